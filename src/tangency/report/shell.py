"""The page around its parts: text, style and code from the files beside this one, put together into one."""

import html
from collections.abc import Sequence
from importlib import resources

from .._base.page import filled, script_json, visible
from .._base.types import Json

# Joined in this order into one script: each may use what those before it define. What belongs to decisions, to
# an audit and to a shift each has a block of its own, so that their names do not meet.
FIRST = (
    "dom", "data", "looks", "state", "touch", "keys", "axes", "parts", "matrix", "strip", "theme", "foot",
)  # fmt: skip
DECISIONS = (
    "numbers", "view", "charts", "trust", "overview", "faithful", "confusion", "neighbours", "attribution", "sample",
    "explorer", "kernel", "decisions",
)  # fmt: skip
AUDIT = tuple(
    f"audit/{name}"
    for name in (
        "data", "decided", "files", "suspect", "suspects", "overview", "margins", "pairs", "unlike", "cleaning",
        "audit",
    )
)  # fmt: skip
SHIFT = tuple(
    f"shift/{name}" for name in ("data", "density", "scatter", "overview", "components", "carriers", "filter", "shift")
)
BLOCKS = {"decisions": DECISIONS, "audit": AUDIT, "shift": SHIFT}
LAST = ("page",)
# Likewise: later rules outdo those before them, so that the last is for narrow windows.
STYLES = ("base", "overview", "charts", "decisions", "audit/audit", "shift/shift", "narrow")


def assembled(title: str, skip: tuple[str, str], data: str, *, parts: Sequence[str]) -> str:
    """The page with this title and these data (JSON), of some of `BLOCKS`.

    `skip`: which section its first link leads to, and its words.
    """
    blocks = [FIRST, *(BLOCKS[name] for name in parts), LAST]
    scripts = ["\n".join(_asset(f"{name}.js") for name in names) for names in blocks]
    inner = [f"{{\n{text}\n}}" for text in scripts[1:-1]]
    marks = {
        "title": html.escape(title),
        "style": "\n".join(_asset(f"{name}.css") for name in STYLES),
        "skip": f'<a class="skip" href="#{skip[0]}">{html.escape(skip[1])}</a>',
        "data": data,
        "script": "\n".join([scripts[0], *inner, scripts[-1]]),
    }
    return filled(_asset("page.html"), marks)


def json_text(value: Json) -> str:
    """For a script element of the page; every text in it can be shown."""
    return script_json(visible(value))


def exact_json(value: Json) -> str:
    """Likewise, with every text as it is, for files that the page writes."""
    return script_json(value, ascii_only=True)


def _asset(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
