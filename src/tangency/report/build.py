"""The page: its numbers, what its samples look like, and the text, style and code that show them, in one file."""

import html
import json
import os
import tempfile
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from .._base import checks
from .._base.strict_json import plain
from .._base.types import FilePath, Json, Memory
from .._version import __version__
from ..datasets.files import path as usable_path
from ..decisions import Decisions
from ..errors import InputError
from . import pack
from .content import CHOSEN, CLASSES, CONFUSED, FLIERS, MATRIX, content, listed_samples
from .looks import Look, looks

# Joined in this order into one script: each may use what those before it define.
SCRIPTS = (
    "dom", "data", "state", "touch", "charts", "trust", "overview", "faithful", "confusion", "neighbours",
    "attribution", "sample", "explorer", "kernel", "foot", "keys", "theme", "page",
)  # fmt: skip
# Likewise: later rules outdo those before them, so that the last is for narrow windows.
STYLES = ("base", "overview", "charts", "decisions", "narrow")


def write(decisions: Decisions, path: FilePath, *, limit: Memory = "8MB") -> Path:
    """Write the page as one HTML file and return where it is: `path` if that ends with .html, else path/report.html.

    The file needs no server, no connection and nothing installed. `limit`: its size at most; see `build`.

    >>> import tempfile, torch, tangency as tg
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> net = tg.models.mlp([3, 8, 2])
    >>> decisions = tg.explain(net, (x[:20], y[:20]), (x[20:], y[20:]), kernels="CK", progress=False)
    >>> write(decisions, tempfile.mkdtemp()).name
    'report.html'
    """
    to = page_path(path)  # before the work
    page = build(decisions, limit=limit)
    try:
        to.write_text(page, encoding="utf-8", newline="\n")
    except OSError as e:
        raise _unwritable(to, e) from None
    return to


def build(decisions: Decisions, *, limit: Memory = "8MB") -> str:
    """The page as text of at most `limit` bytes (a number, a string such as "8MB", or None: no limit).

    Where all does not fit, first the quality of the training pictures goes down (or the length of the texts), then the
    number of training samples in each list; the page says in its last section what was left out.

    >>> import torch, tangency as tg
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> net = tg.models.mlp([3, 8, 2])
    >>> decisions = tg.explain(net, (x[:20], y[:20]), (x[20:], y[20:]), kernels="CK", progress=False)
    >>> len(build(decisions, limit="1MB")) < 1_000_000
    True
    """
    most = checks.memory(limit, "limit")
    _check(decisions)
    choices = looks(decisions.test, decisions.train)
    longest = max(e.attribution.similar.shape[1] for e in decisions.explanations)
    # Every look with the whole lists, then the smallest one with ever shorter lists.
    plans = [(look, longest) for look in choices] + [(choices[-1], length) for length in range(longest - 1, 0, -1)]
    numbers: dict[int, tuple[Tensor, str]] = {}  # of the last length of lists alone: they are large
    needed = 0
    for number, (look, length) in enumerate(plans, 1):
        if length not in numbers:
            refer = listed_samples(decisions, length)
            numbers = {length: (refer, _json(content(decisions, length, refer)))}
        refer, text = numbers[length]
        shown = decisions.shown.cpu()
        if number < len(plans) and not look.is_wanted(shown, refer):
            continue
        needed = len(text) + look.guess(shown, refer)
        if most is not None and needed > 1.02 * most:  # a guess may be a little wrong
            continue
        page = _page(decisions, look, length, longest, refer, text)
        needed = len(page.encode())
        if most is None or needed <= most:
            return page
    raise InputError(
        f"limit={limit!r}; the page needs {needed:,} bytes even with the smallest pictures and one training sample in "
        "each list. Raise limit=, or explain fewer samples."
    )


def page_path(path: FilePath) -> Path:
    """Where `write` puts the page, its folder made; refuses what cannot be written.

    >>> import tempfile
    >>> page_path(tempfile.mkdtemp()).name
    'report.html'
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path is a {type(path).__name__}; needed: a folder or a .html file, as a string or a Path.")
    to = usable_path(path, "path")
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
    """What to say of a file that cannot be written."""
    return InputError(
        f"{to} cannot be written: {e.strerror or e}. Give a folder, or a .html file, where you may write."
    )


def _page(d: Decisions, look: Look, length: int, longest: int, refer: Tensor, text: str) -> str:
    """The page with this look and lists of this length; `text`: its numbers, which refer to the samples in `refer`."""
    model, data = str(d.facts.get("model") or "the network"), str(d.facts.get("data") or "the test data")
    title = f"{pack.visible_text(model)} on {pack.visible_text(data)}: why did the network say that?"
    samples = _json(look.content(d.shown.cpu(), refer))
    notes = look.notes() + _notes(d, length, longest)
    if any("⟨U+" in part for part in (title, samples, text)):
        notes.append("Characters that cannot be seen, or that turn the direction of writing, are shown as ⟨U+…⟩.")
    about = {"model": model, "data": data, "facts": plain(d.facts), "version": __version__, "notes": notes}
    data = f'{{"about":{_json(about)},"look":{samples},"numbers":{text}}}'
    script, style = (
        "\n".join(_asset(f"{n}.{end}") for n in names) for names, end in ((SCRIPTS, "js"), (STYLES, "css"))
    )
    parts = {"title": html.escape(title), "style": style, "data": data, "script": script}
    # No part can hold a mark itself: the title is escaped, and JSON has no "<" left.
    page = _asset("page.html")
    for name, value in parts.items():
        before, _, after = page.partition(f"<!--{name}-->")
        page = before + value + after
    return page


def _notes(d: Decisions, length: int, longest: int) -> list[str]:
    """What is not as it was given, or is not there."""
    notes = [
        *([d.outputs_said] if d.outputs_said else []),
        "Box plots and outliers are drawn to 1/65,000 of their range; every printed number is kept in 32 bits.",
    ]
    if length < longest:
        notes.append(
            f"Each list shows {length} training samples instead of {longest}, so that the page stays below its "
            "limit of bytes. A larger limit= shows them all."
        )
    t = d.explanations[0].attribution.boxes.shape[2]
    if max(t, d.logits.shape[1]) > CLASSES:
        notes.append(
            f"There are more than {CLASSES} classes: for each sample the {CHOSEN} with the largest probability, or the "
            "largest sum of attributions, are shown."
            + (f" The confusion matrix has the {CONFUSED} with most mistakes." if d.logits.shape[1] > MATRIX else "")
        )
    outliers = max(e.attribution.fliers.shape[3] for e in d.explanations)
    if outliers > FLIERS:
        notes.append(f"Of {outliers} outliers of each box the {FLIERS} farthest are drawn.")
    return notes


def _json(value: Json) -> str:
    """For a script element of the page."""
    # Inside a script element only "<" could end it; JSON has it in strings alone, where it may be written as \u003c.
    return json.dumps(pack.visible(value), ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )


def _asset(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _check(d: Decisions) -> None:
    """Refuse decisions that do not belong together: they may be put together by hand."""
    if not isinstance(d, Decisions):
        raise InputError(f"decisions is a {type(d).__name__}; needed: tangency.decisions.Decisions.")
    if not d.explanations:
        raise InputError("the decisions have no explanations; needed: at least one kernel.")
    if d.logits.dim() != 2 or d.logits.shape[1] < 2:
        raise InputError(f"logits has shape {tuple(d.logits.shape)}; needed: [m, c] with at least two classes.")
    m, s = len(d.test.y), len(d.shown)
    if s == 0:
        raise InputError("no sample is to be explained (shown is empty); needed: at least one.")
    if bool(((d.shown < 0) | (d.shown >= m)).any()):
        raise InputError(f"shown goes from {int(d.shown.min())} to {int(d.shown.max())}; there are {m} test samples.")
    if len(torch.unique(d.shown)) < s:
        raise InputError("shown names a test sample twice; needed: each once.")
    names = [e.name for e in d.explanations]
    if len(set(names)) < len(names):
        raise InputError(f"two explanations have one name: {checks.some(names)}; needed: different names.")
    for what, logits in [("the network", d.logits), *((e.name, e.logits) for e in d.explanations)]:
        if len(logits) != m:
            raise InputError(f"{what} has logits of {len(logits)} samples; there are {m} test samples.")
        checks.finite(logits, f"the logits of {what}")
    for e in d.explanations:
        if len(e.attribution.outputs) != s:
            raise InputError(f"{e.name} explains {len(e.attribution.outputs)} samples; shown names {s}. Give as many.")
