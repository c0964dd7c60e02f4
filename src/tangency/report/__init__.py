"""One HTML file that shows why a network decided as it did, or what is wrong with its data: no server, no network.

`write(decisions, path)` of `tg.explain`, `write(audit, path)` of `tg.audit`, `write(decisions, path, audit=audit)` of
both. On the page of an audit suspects are kept, fixed or dropped, and `tg.auditing.apply` takes what was decided.
"""

from .build import build, page_path, write

__all__ = ["build", "page_path", "write"]
