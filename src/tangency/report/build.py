"""The page: its numbers, what its samples look like, and the text, style and code that show them, in one file."""

import html
import json
import os
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._base import checks
from .._base.strict_json import plain
from .._version import __version__
from ..datasets.files import path as usable
from ..decisions import Decisions
from ..errors import InputError
from . import pack
from .content import CHOSEN, CLASSES, CONFUSED, FLIERS, content, neighbours
from .medium import Medium, medium

# Joined in this order into one script: each may use what those before it define.
SCRIPTS = ("dom", "data", "charts", "overview", "faithful", "sample", "explorer", "kernel", "foot", "page")


def write(decisions: Decisions, path: str | os.PathLike[str], *, limit: int | str | None = "8MB") -> Path:
    """Write the page as one HTML file and return where it is: `path` if that ends with .html, else path/report.html.

    The file needs no server, no connection and nothing installed. `limit`: its size at most; see `build`.

    >>> import tempfile, torch, tangency as tg
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> net = tg.models.mlp([3, 8, 2])
    >>> found = tg.explain(net, (x[:20], y[:20]), (x[20:], y[20:]), kernels="CK", progress=False)
    >>> write(found, tempfile.mkdtemp()).name
    'report.html'
    """
    to = place(path)  # before the work
    page = build(decisions, limit=limit)
    try:
        to.write_text(page, encoding="utf-8", newline="\n")
    except OSError as e:
        raise _unwritable(to, e) from None
    return to


def build(decisions: Decisions, *, limit: int | str | None = "8MB") -> str:
    """The page as text of at most `limit` bytes (a number, a string such as "8MB", or None: no limit).

    Where all does not fit, first the quality of the training pictures goes down (or the length of the texts), then the
    number of training samples in each list; the page says in its last section what was left out.

    >>> import torch, tangency as tg
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> net = tg.models.mlp([3, 8, 2])
    >>> found = tg.explain(net, (x[:20], y[:20]), (x[20:], y[20:]), kernels="CK", progress=False)
    >>> len(build(found, limit="1MB")) < 1_000_000
    True
    """
    most = checks.memory(limit, "limit")
    _usable(decisions)
    looks = medium(decisions.test, decisions.train)
    k = max(v.attribution.similar.shape[1] for v in decisions.views)
    levels = list(looks.levels)
    plans = [(level, k) for level in levels] + [(levels[-1], fewer) for fewer in range(k - 1, 0, -1)]
    numbers: dict[int, tuple[Tensor, str]] = {}
    needed = 0
    for level, many in plans:
        if many not in numbers:
            refer = neighbours(decisions, many)
            numbers = {many: (refer, _json(content(decisions, many, refer)))}
        refer, text = numbers[many]
        shown = decisions.shown.cpu()
        if (level, many) != plans[-1] and not looks.wanted(shown, refer, level):
            continue
        needed = len(text) + looks.guess(shown, refer, level)
        if most is not None and needed > 1.02 * most:  # a guess may be a little wrong
            continue
        page = _page(decisions, looks, level, many, k, refer, text)
        needed = len(page.encode())
        if most is None or needed <= most:
            return page
    raise InputError(
        f"limit={limit!r}; the page needs {needed:,} bytes even with the smallest pictures and one training sample in "
        "each list. Raise limit=, or explain fewer samples."
    )


def place(path: str | os.PathLike[str]) -> Path:
    """Where `write` puts the page, its folder made; refuses what cannot be written.

    >>> import tempfile
    >>> place(tempfile.mkdtemp()).name
    'report.html'
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path is a {type(path).__name__}; needed: a folder or a .html file, as a string or a Path.")
    to = usable(path, "path")
    to = to if to.suffix.lower() in (".html", ".htm") else to / "report.html"
    try:
        to.parent.mkdir(parents=True, exist_ok=True)
        if to.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if to.exists() and not os.access(to, os.W_OK):
            raise PermissionError(None, "permission denied")
        with tempfile.TemporaryFile(dir=to.parent):  # tells more than permissions do
            pass
    except OSError as e:
        raise _unwritable(to, e) from None
    return to


def _unwritable(to: Path, e: OSError) -> InputError:
    return InputError(
        f"{to} cannot be written: {e.strerror or e}. Give a folder, or a .html file, where you may write."
    )


def _page(d: Decisions, looks: Medium, level: Any, many: int, k: int, refer: Tensor, text: str) -> str:
    about = {
        "model": str(d.facts.get("model") or "the network"),
        "data": str(d.facts.get("data") or "the test data"),
        "facts": plain(d.facts),
        "version": __version__,
        "notes": looks.notes(level) + _notes(d, many, k),
    }
    title = f"{pack.visible(about['model'])} on {pack.visible(about['data'])}: why did the network say that?"
    look = _json(looks.content(d.shown.cpu(), refer, level))
    if any("⟨U+" in part for part in (title, look, text)):
        about["notes"].append(
            "Characters that cannot be seen, or that turn the direction of writing, are shown as ⟨U+…⟩."
        )
    data = f'{{"about":{_json(about)},"look":{look},"numbers":{text}}}'
    script = "\n".join(_asset(f"{name}.js") for name in SCRIPTS)
    parts = {"title": html.escape(title), "style": _asset("style.css"), "data": data, "script": script}
    page = _asset("page.html")
    for name, value in parts.items():
        before, _, after = page.partition(f"<!--{name}-->")
        page = before + value + after
    return page


def _notes(d: Decisions, many: int, k: int) -> list[str]:
    """What is not as it was given, or is not there."""
    found = [
        *([d.outputs_said] if d.outputs_said else []),
        "Box plots and outliers are drawn to 1/65,000 of their range; every printed number is kept in 32 bits.",
    ]
    if many < k:
        found.append(
            f"Each list shows {many} training samples instead of {k}, so that the page stays below its limit of bytes. "
            "A larger limit= shows them all."
        )
    t = d.views[0].attribution.boxes.shape[2]
    if max(t, d.logits.shape[1]) > CLASSES:
        found.append(
            f"There are more than {CLASSES} classes: for each sample the {CHOSEN} with the largest probability, or the "
            f"largest sum of attributions, are shown; the confusion matrix has the {CONFUSED} with most mistakes."
        )
    f = max(v.attribution.fliers.shape[3] for v in d.views)
    if f > FLIERS:
        found.append(f"Of {f} outliers of each box the {FLIERS} farthest are drawn.")
    return found


def _json(value: Any) -> str:
    # Inside a script element only "<" could end it; JSON has it in strings alone, where it may be written as \u003c.
    return json.dumps(pack.visible(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _usable(d: Decisions) -> None:
    if not isinstance(d, Decisions):
        raise InputError(f"decisions is a {type(d).__name__}; needed: tangency.decisions.Decisions.")
    if not d.views:
        raise InputError("the decisions have no views; needed: at least one kernel.")
    if d.logits.dim() != 2 or d.logits.shape[1] < 2:
        raise InputError(f"logits has shape {tuple(d.logits.shape)}; needed: [m, c] with at least two classes.")
    m, s = len(d.test.y), len(d.shown)
    if s == 0:
        raise InputError("no sample is to be explained (shown is empty); needed: at least one.")
    if bool(((d.shown < 0) | (d.shown >= m)).any()):
        raise InputError(f"shown goes from {int(d.shown.min())} to {int(d.shown.max())}; there are {m} test samples.")
    if len(torch.unique(d.shown)) < s:
        raise InputError("shown names a test sample twice; needed: each once.")
    names = [v.name for v in d.views]
    if len(set(names)) < len(names):
        raise InputError(f"two views have one name: {checks.some(names)}; needed: different names.")
    for what, logits in [("the network", d.logits), *((v.name, v.logits) for v in d.views)]:
        if len(logits) != m:
            raise InputError(f"{what} has logits of {len(logits)} samples; there are {m} test samples.")
        checks.finite(logits, f"the logits of {what}")
    for v in d.views:
        if len(v.attribution.outputs) != s:
            raise InputError(f"{v.name} explains {len(v.attribution.outputs)} samples; shown names {s}. Give as many.")
