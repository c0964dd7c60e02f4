"""The page: its numbers, what its samples look like, and the text, style and code that show them, in one file."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .._base import checks, files
from .._base.page import visible_text
from .._base.strict_json import plain
from .._base.types import FilePath, Json, Memory
from .._version import __version__
from ..auditing import Audit
from ..decisions import Decisions
from ..errors import InputError
from ..representations import Shift
from . import audit_content, notes, pack, shell
from .checked import parts
from .content import content, listed_samples
from .looks import Look, looks
from .shift_page import page_of_shift


def write(
    result: Decisions | Audit | Shift, path: FilePath, *, audit: Audit | None = None, limit: Memory = "8MB"
) -> Path:
    """Write the page as one HTML file and return where it is: `path` if that ends with .html, else path/report.html.

    Of decisions (`tg.explain`), of an audit (`tg.audit`), of decisions with an `audit` of the same training set, or of
    a shift (`tg.shift`). The file needs no server, no connection and nothing installed. `limit`: its size at most; see
    `build`.

    >>> import tempfile, torch, tangency as tg
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> net = tg.models.mlp([3, 8, 2])
    >>> decisions = tg.explain(net, (x[:20], y[:20]), (x[20:], y[20:]), kernels="CK", progress=False)
    >>> write(decisions, tempfile.mkdtemp()).name
    'report.html'
    """
    to = page_path(path)  # before the work
    page = build(result, audit=audit, limit=limit)
    files.write(to, page)
    return to


def build(result: Decisions | Audit | Shift, *, audit: Audit | None = None, limit: Memory = "8MB") -> str:
    """The page as text of at most `limit` bytes (a number, a string such as "8MB", or None: no limit).

    Where all does not fit, first the quality of the training pictures goes down (or the length of the texts), then the
    number of training samples in each list, then the number of suspects; the page says in its last section what was
    left out.

    >>> import torch, tangency as tg
    >>> x, y = torch.randn(40, 3), torch.arange(40) % 2
    >>> net = tg.models.mlp([3, 8, 2])
    >>> decisions = tg.explain(net, (x[:20], y[:20]), (x[20:], y[20:]), kernels="CK", progress=False)
    >>> len(build(decisions, limit="1MB")) < 1_000_000
    True
    >>> found = tg.audit(net, (x, y), progress=False)
    >>> "Suspect labels" in build(found)
    True
    """
    most = checks.memory(limit, "limit")
    if isinstance(result, Shift):
        if audit is not None:
            raise InputError(
                "audit= goes with decisions; the page of a shift is written by itself: write(shift, path)."
            )
        return page_of_shift(result, most)
    decisions, audit = parts(result, audit)
    data = decisions or audit
    assert data is not None
    choices = looks(data.test, data.train)
    cuts = list(_cuts(decisions, audit))
    # Every look with the whole lists, then the smallest one with ever shorter lists.
    plans = [(look, cuts[0]) for look in choices] + [(choices[-1], cut) for cut in cuts[1:]]
    numbers: dict[Cut, _Numbers] = {}  # of the last length of lists alone: they are large
    needed = 0
    for number, (look, cut) in enumerate(plans, 1):
        if cut not in numbers:
            numbers = {cut: _numbers(decisions, audit, cut)}
        made = numbers[cut]
        if number < len(plans) and not look.is_wanted(made.test, made.train):
            continue
        needed = len(made.text) + look.guess(made.test, made.train)
        if most is not None and needed > 1.02 * most:  # a guess may be a little wrong
            continue
        page = _page(decisions, audit, look, (cut, cuts[0]), made)
        needed = len(page.encode())
        if most is None or needed <= most:
            return page
    lists = "one training sample in each list" if decisions else "one suspect"
    raise InputError(
        f"limit={limit!r}; the page needs {needed:,} bytes even with the smallest pictures and {lists}. Raise limit=, "
        + ("or explain fewer samples." if decisions else "or set it to None.")
    )


@dataclass(frozen=True)
class Cut:
    """How much of everything is shown: training samples in each list of a decision, and what of an audit."""

    lists: int
    audit: audit_content.Frame | None


def _cuts(decisions: Decisions | None, audit: Audit | None) -> Iterator[Cut]:
    """From everything to next to nothing: shorter lists first, then fewer suspects and fewer of all others."""
    longest = 0 if decisions is None else max(e.attribution.similar.shape[1] for e in decisions.explanations)
    frame = None if audit is None else audit_content.whole(audit)
    cut = Cut(longest, frame)
    yield cut
    for length in range(max(longest, 0 if frame is None else frame.neighbours) - 1, 0, -1):
        less = None if frame is None else audit_content.Frame(frame.suspects, min(length, frame.neighbours))
        cut = Cut(min(length, longest), less)
        yield cut
    if audit is not None and audit.train.ids is not None and cut.audit is not None:
        cut = Cut(cut.lists, replace(cut.audit, ids=False))
        yield cut
    while cut.audit is not None and cut.audit.suspects > 1:
        suspects, others = (max(1, 2 * v // 3) for v in (cut.audit.suspects, cut.audit.others))
        cut = Cut(cut.lists, replace(cut.audit, suspects=suspects, others=others))
        yield cut


@dataclass(frozen=True, eq=False)
class _Numbers:
    """The numbers of a page as JSON, without braces, and the samples with a place on it."""

    text: str
    test: Tensor
    train: Tensor


def _numbers(decisions: Decisions | None, audit: Audit | None, cut: Cut) -> _Numbers:
    """The samples that are explained come first among the test samples."""
    shown = torch.zeros(0, dtype=torch.long) if decisions is None else decisions.shown.cpu()
    train = [] if decisions is None else [listed_samples(decisions, cut.lists)]
    test = shown
    if audit is not None and cut.audit is not None:
        train.append(cut.audit.training(audit))
        more = cut.audit.test(audit)
        test = torch.cat([shown, more[~torch.isin(more, shown)]])
    refer = torch.cat(train).unique()
    made = {"places": shell.json_text({"test": pack.integers(test), "train": pack.integers(refer)})}
    if decisions is not None:
        made["numbers"] = shell.json_text(content(decisions, cut.lists, refer))
    if audit is not None and cut.audit is not None:
        made["audit"] = shell.json_text(audit_content.audit_content(audit, cut.audit, refer, test))
        made["exact"] = shell.exact_json(audit_content.exact(audit, cut.audit, refer))
    return _Numbers(",".join(f'"{key}":{text}' for key, text in made.items()), test, refer)


def page_path(path: FilePath) -> Path:
    """Where `write` puts the page; refuses what cannot be written.

    >>> import tempfile
    >>> page_path(tempfile.mkdtemp()).name
    'report.html'
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"path is a {type(path).__name__}; needed: a folder or a .html file, as a string or a Path.")
    to = files.path(path, "path")
    to = to if to.suffix.lower() in (".html", ".htm") else to / "report.html"
    return files.writable(to, "path", "Give a folder, or a .html file, where you may write.")


def _page(d: Decisions | None, a: Audit | None, look: Look, cuts: tuple[Cut, Cut], made: _Numbers) -> str:
    """The page with this look; `cuts`: what is shown, and what would be with no limit."""
    facts = (d or a).facts  # type: ignore[union-attr]  # one of them is there
    model, data = (str(facts.get(key) or "") for key in ("model", "data"))
    samples = shell.json_text(look.content(made.test, made.train))
    if d is not None:
        model, data = model or "the network", data or "the test data"
        title, skip = f"{model} on {data}: why did the network say that?", ("why", "Skip to the decisions")
    else:
        title = f"{' on '.join(filter(None, (model, data))) or 'The data'}: which labels are wrong?"
        skip = ("suspects", "Skip to the suspect labels")
    title = visible_text(title)
    said = look.notes() + notes.of_decisions(d, cuts[0].lists, cuts[1].lists) + notes.of_audit(a, cuts[0].audit)
    if any("⟨U+" in part for part in (title, samples, made.text)):
        said.append("Characters that cannot be seen, or that turn the direction of writing, are shown as ⟨U+…⟩.")
    about: dict[str, Json] = {
        "model": model, "data": data, "facts": _facts(d, a), "version": __version__, "notes": list(said),
    }  # fmt: skip
    text = f'{{"about":{shell.json_text(about)},"look":{samples},{made.text}}}'
    kinds = {"decisions": d, "audit": a}
    return shell.assembled(title, skip, text, parts=[name for name, part in kinds.items() if part is not None])


def _facts(d: Decisions | None, a: Audit | None) -> Json:
    """How it was computed: decisions and audit, each what the other has not said."""
    facts = {} if d is None else dict(d.facts)
    if a is not None:
        own = {k: v for k, v in a.facts.items() if k not in ("titles",) and v not in ("", None) and facts.get(k) != v}
        facts |= {f"audit: {k}" if d is not None else k: v for k, v in own.items()}
    return plain(facts)
