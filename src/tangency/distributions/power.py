"""How often a two-sample test rejects, by the number of samples: its power, and whether it keeps its level."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Float, Inputs, Memory
from ..errors import InputError
from ..gram.compute import compute
from ..gram.gram import Gram
from ..gram.source import source
from ..kernels.kernel import Kernel
from ..linalg.matrix import Matrix, square
from .intervals import proportion
from .pooled import Joined
from .two_sample import mmd

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Tested(Protocol):
    """What a test returns: anything with a p-value."""

    @property
    def p(self) -> float:
        """At most α with probability at most α where there is no difference."""


# A kernel; the Gram of all samples of x and then y; or what tests two samples, with a seed.
Test = Kernel | Matrix | Callable[..., Tested]


@dataclass(frozen=True, eq=False, repr=False)
class Power(Result):
    """How often each test rejects two samples of each size.

    `p` [sizes, repeats]: the p-values of each test; all tests had the same samples. `same`: both samples came from one
    source, so that the rate should be the level.
    """

    sizes: tuple[int, ...]
    p: Mapping[str, Float[Tensor, "s r"]]
    level: float
    same: bool

    def rates(self, name: str) -> list[tuple[float, float, float]]:
        """(rejected, low, high) of a test at each size, with Wilson's interval for 95 %."""
        found = []
        for row in self.p[name]:
            count = int((row <= self.level).sum())
            found.append((count / len(row), *proportion(count, len(row))))
        return found

    def holds(self, low: float = 0.03, high: float = 0.07) -> bool:
        """Whether every rate is within these, as it should be where the samples come from one source."""
        return all(low <= rate <= high for name in self.p for rate, _, _ in self.rates(name))

    def sentence(self) -> str:
        """What was found, in words."""
        repeats = next(iter(self.p.values())).shape[1]
        if self.same:
            every = [rate for name in self.p for rate, _, _ in self.rates(name)]
            return (
                f"Of samples without a difference {min(every):.1%} to {max(every):.1%} are rejected at "
                f"{self.level:.0%} ({repeats} draws for each of {len(every)} cases)."
            )
        last = {name: self.rates(name)[-1] for name in self.p}
        best = max(last, key=lambda name: last[name][0])
        rate, low, high = last[best]
        return (
            f"At {self.sizes[-1]} samples of each, {best} rejects most often: {rate:.0%} [{low:.0%}, {high:.0%}] of "
            f"{repeats} draws at the level {self.level:g}."
        )

    def table(self) -> str:
        """A line for each test, a column for each size: how many per cent are rejected, with the interval."""
        rows = [
            [name, *(f"{100 * rate:.1f} [{100 * low:.1f}, {100 * high:.1f}]" for rate, low, high in self.rates(name))]
            for name in self.p
        ]
        return text_table(["rejected, %", *(f"n = {n}" for n in self.sizes)], rows)

    def plot(self) -> "Figure":
        """Rates with intervals over the size."""
        from .pictures import draw_power

        what = "One source" if self.same else "Two sources"
        return draw_power(self.sizes, {name: self.rates(name) for name in self.p}, self.level, what)


def power(
    tests: Mapping[str, Test],
    x: Inputs,
    y: Inputs,
    *,
    sizes: Sequence[int],
    repeats: int = 200,
    draws: int = 199,
    level: float = 0.05,
    seed: int = 0,
    memory: Memory = None,
    progress: bool = True,
) -> Power:
    """P(p ≤ level) for n samples of x and n of y, for each test and each n of `sizes`.

    `tests`: by name, a kernel (tested by `mmd`, with `draws` permutations), the Gram of all samples of x and then y,
    or any function (some of x, some of y, seed) whose answer has a `p`. Samples are drawn without replacement,
    `repeats` times, the same for all tests; the larger x and y, the more the draws are independent. Cost: each kernel's
    Gram once, then a test for each draw.

    >>> import tangency as tg
    >>> x, y = torch.randn(300, 2), torch.randn(300, 2) + 0.5
    >>> found = tg.distributions.power({"Gaussian": tg.gaussian(x)}, x, y, sizes=[10, 60], repeats=40, progress=False)
    >>> small, large = found.rates("Gaussian")
    >>> small[0] < large[0]
    True
    """
    return _study(tests, tree.given(x, "x"), tree.given(y, "y"), sizes, repeats, draws, level, seed, memory, progress)


def level(
    tests: Mapping[str, Test],
    x: Inputs,
    *,
    sizes: Sequence[int],
    repeats: int = 500,
    draws: int = 199,
    level: float = 0.05,
    seed: int = 0,
    memory: Memory = None,
    progress: bool = True,
) -> Power:
    """P(p ≤ level) for two samples of n each that are both drawn from x: should be `level`, for each test and n.

    As `power`; a Gram among the tests is that of x alone.

    >>> import tangency as tg
    >>> x = torch.randn(200, 2)
    >>> tg.distributions.level({"Gaussian": tg.gaussian(x)}, x, sizes=[20], progress=False).holds(0.02, 0.08)
    True
    """
    return _study(tests, tree.given(x, "x"), None, sizes, repeats, draws, level, seed, memory, progress)


def _study(
    tests: Mapping[str, Test],
    x: Inputs,
    y: Inputs | None,
    sizes: Sequence[int],
    repeats: int,
    draws: int,
    level: float,
    seed: int,
    memory: Memory,
    progress: bool,
) -> Power:
    """Draws of every size, by every test."""
    counts = [tree.size(x)] if y is None else [tree.size(x), tree.size(y)]
    _check(tests, counts, sizes, repeats, draws, level)
    kinds = {name: _prepared(name, test, x, y, memory, progress) for name, test in tests.items()}
    generator = torch.Generator().manual_seed(seed)
    p = {name: torch.empty(len(sizes), repeats, dtype=torch.float64) for name in tests}
    with bar(len(sizes) * repeats, "power", "draw", show=progress) as tick:
        for s, n in enumerate(sizes):
            for r in range(repeats):
                one = torch.randperm(counts[0], generator=generator)
                left, right = one[:n], one[n : 2 * n]
                if y is not None:
                    right = torch.randperm(counts[1], generator=generator)[:n]
                for name, kind in kinds.items():
                    p[name][s, r] = _p(kind, x, y, left, right, draws, seed + r)
                tick(note=f"n = {n}")
    return Power(tuple(sizes), p, level, y is None)


def _p(
    kind: Tensor | Callable[..., Tested],
    x: Inputs,
    y: Inputs | None,
    left: Tensor,
    right: Tensor,
    draws: int,
    seed: int,
) -> float:
    """The p-value of one draw."""
    if not isinstance(kind, Tensor):
        found = kind(tree.take(x, left), tree.take(x if y is None else y, right), seed)
        if not hasattr(found, "p"):
            raise InputError(f"a test returned a {type(found).__name__}; needed: a result with a p-value, result.p.")
        if not 0 <= (p := float(found.p)) <= 1:
            raise InputError(f"a test returned p={p:g}; needed: a p-value, from 0 to 1.")
        return p
    rows = torch.cat([left, right if y is None else right + tree.size(x)]).to(kind.device)
    n = len(left)
    return mmd(kind[rows][:, rows], range(n), range(n, 2 * n), draws=draws, seed=seed, progress=False).p


def _prepared(
    name: str, test: Test, x: Inputs, y: Inputs | None, memory: Memory, progress: bool
) -> Tensor | Callable[..., Tested]:
    """A Gram of everything, in memory; a function stays what it is."""
    if callable(test) and not isinstance(test, Kernel):
        return test
    if isinstance(test, Kernel):
        samples = source(x, "x") if y is None else Joined(source(x, "x"), source(y, "y"))
        whole: Gram = compute(test, samples, memory=memory, progress=progress)
    else:
        whole = square(test, f"tests[{name!r}]")
    total = tree.size(x) + (0 if y is None else tree.size(y))
    if len(whole.shape) == 4 or len(whole) != total:
        raise InputError(
            f"the Gram of {name!r} has shape {tuple(whole.shape)}; needed: one row for each of the {total} samples, "
            "those of x and then those of y."
        )
    return whole.dense().detach()


def _check(
    tests: Mapping[str, Test], counts: list[int], sizes: Sequence[int], repeats: int, draws: int, level: float
) -> None:
    """Refuse what cannot be drawn."""
    if not isinstance(tests, Mapping) or not tests:
        raise InputError(
            f"tests is a {type(tests).__name__}; needed: tests by name, such as {{'NTK': tg.trace_ntk(model)}}."
        )
    for name, test in tests.items():
        if not (callable(test) or hasattr(test, "shape")):
            raise InputError(
                f"tests[{name!r}] is a {type(test).__name__}; needed: a kernel, a Gram of all samples, or a function "
                "(x, y, seed)."
            )
    checks.positive(repeats, "repeats", "a number of draws of samples")
    checks.positive(draws, "draws", "a number of permutations")
    if not 0 < level < 1:
        raise InputError(f"level={level}; needed: a probability between 0 and 1.")
    if not sizes:
        raise InputError("sizes is empty; needed: how many samples of each, such as [20, 50, 100].")
    for n in sizes:
        checks.positive(n, "sizes", "numbers of samples")
        most = counts[0] // 2 if len(counts) == 1 else min(counts)
        if not 2 <= n <= most:
            raise InputError(f"sizes holds {n}; needed: from 2 to {most}, as many as can be drawn of each.")
