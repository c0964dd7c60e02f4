"""One HTML file: why a network decided as it did, what is wrong with its data, or how they shifted; works offline.

`write(decisions, path)` of `tg.explain`, `write(audit, path)` of `tg.audit`, `write(decisions, path, audit=audit)` of
both, `write(shift, path)` of `tg.shift`. On the page of an audit suspects are kept, fixed or dropped, and
`tg.auditing.apply` takes what was decided.
"""

from .build import build, page_path, write

__all__ = ["build", "page_path", "write"]
