"""When a monitor looks: at chosen steps, or as often as a share of the training time allows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .._base import checks
from ..errors import InputError

# The share where none is given: a training that takes 5 % longer is one that people leave the monitor in (heuristic).
SHARE = 0.05

Clock = Callable[[], float]


class Pace:
    """Says of each step whether it is due, and measures what looking costs.

    With a share, a step is due if what was spent, this look and one more (the last step is always looked at) are no
    more than that share of the time that went into training, counted from the first call. A look is expected to cost
    what the one before did. So the share holds over the whole run, unless the first and the last look alone exceed it.

    >>> now = iter([0.0, 0.0, 0.0, 1.0, 50.0, 101.0])  # the first look takes a second
    >>> pace = Pace(0.05, None, clock=lambda: next(now))
    >>> pace.due(0)
    True
    >>> with pace.looking():
    ...     pass
    >>> pace.due(1), pace.due(2)  # three seconds are 5 % of sixty
    (False, True)
    """

    def __init__(self, share: float | None, every: int | None, *, clock: Clock) -> None:
        if share is not None and every is not None:
            raise InputError(f"share={share} and every={every} are given; needed: one of them.")
        if every is not None:
            checks.positive(every, "every", "a number of steps")
        if share is not None and (isinstance(share, bool) or not 0 < share < 1):
            raise InputError(f"share={share}; needed: a part of the training time between 0 and 1, e.g. 0.05.")
        self.share, self.every, self.clock = None if every is not None else share or SHARE, every, clock
        self.looks = self.skipped = 0
        self.spent = self.last_cost = 0.0
        self._begun: float | None = None
        self._cost: float | None = None  # of a look; None before the first, which is always due

    def expect(self, cost: float) -> None:
        """A run is resumed: its first look was in another process, and its last took so long."""
        self._cost = cost

    def due(self, step: int) -> bool:
        """Whether to look now; counts the call as skipped if not."""
        now = self._now()
        if self._cost is None:
            wanted = True
        elif self.every is not None:
            wanted = step % self.every == 0
        else:
            assert self.share is not None
            wanted = self.spent + 2 * self._cost <= self.share * (now - self.spent)
        self.skipped += not wanted
        return wanted

    @contextmanager
    def looking(self) -> Iterator[None]:
        """What happens inside is the cost of a look."""
        self._now()
        start = self.clock()
        try:
            yield
        finally:
            self._cost = self.last_cost = max(0.0, self.clock() - start)
            self.spent += self._cost
            self.looks += 1

    @contextmanager
    def afterwards(self) -> Iterator[None]:
        """What happens inside belongs to the last look: its record is written."""
        start = self.clock()
        try:
            yield
        finally:
            took = max(0.0, self.clock() - start)
            self._cost, self.spent = (self._cost or 0.0) + took, self.spent + took

    def part(self) -> float | None:
        """What was spent beside the training so far; None before there was any."""
        training = self._now() - self.spent
        return self.spent / training if training > 0 else None

    def words(self) -> str:
        """How often it looks."""
        return f"every {self.every} steps" if self.every is not None else f"at most {self.share:.3g} of the training"

    def _now(self) -> float:
        """Seconds since the first call."""
        now = self.clock()
        self._begun = now if self._begun is None else self._begun
        return now - self._begun
