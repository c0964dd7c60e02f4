"""One HTML file that shows a training while it goes on: the curves of a monitor, and whether it is lazy or rich.

`write_page(history, path)` of `monitor.history()` or of a log; `tangency watch RUN.jsonl` writes it as the log grows.
"""

from .page import page_text, write_page

__all__ = ["page_text", "write_page"]
