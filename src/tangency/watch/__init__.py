"""One HTML file that shows a training while it goes on: the curves of a monitor, and whether it is lazy or rich.

`write(history, path)` of `monitor.history()` or of a log; `tangency watch RUN.jsonl` writes it again as the log grows.
"""

from .page import build, write

__all__ = ["build", "write"]
