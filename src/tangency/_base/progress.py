"""Progress on a terminal (tqdm, where it is installed); else silence."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Tick(Protocol):
    """Moves a bar on by k and may write a note behind it."""

    def __call__(self, k: int = 1, note: str = "") -> None: ...


@contextmanager
def bar(
    total: int | None, what: str, unit: str, *, done: int = 0, show: bool = True, delay: float = 0
) -> Iterator[Tick]:
    """`step(k=1, note="")` moves the bar on by k and may write a note behind it; it is shown after `delay` seconds."""
    # Log files get no bars: one line for every step of a long job.
    if not (show and sys.stderr.isatty()):
        yield lambda k=1, note="": None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda k=1, note="": None
        return
    with tqdm(total=total, initial=done, unit=unit, desc=what, smoothing=0.05, delay=delay) as shown:

        def step(k: int = 1, note: str = "") -> None:
            """Move on by k, and show the note behind the bar."""
            if note:
                shown.set_postfix_str(note, refresh=False)
            shown.update(k)

        yield step
