"""The page of a shift: what `Shift` holds, cut to what is shown. The names: shift/data.js."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .._base.page import visible_text
from .._base.strict_json import plain
from .._base.types import Json
from .._version import __version__
from ..errors import InputError
from ..representations import Shift
from . import pack, shell
from .looks import Look, NoLook, kind, looks
from .pack import Content

# Samples of each set in the picture, those that are listed as carrying the shift, and components in the picture.
DRAWN, LISTED, COMPONENTS = 1000, 60, 12
# Names of source samples that the page carries for its files, at most; the log ratios in the histogram likewise.
NAMED, COUNTED = 100_000, 20_000


def page_of_shift(s: Shift, limit: int | None) -> str:
    """The page in at most `limit` bytes: first with worse pictures or shorter texts, then with fewer samples."""
    choices = _looks(s)
    cuts = list(_cuts())
    plans = [(look, cuts[0]) for look in choices] + [(choices[-1], cut) for cut in cuts[1:]]
    needed = 0
    for number, (look, (drawn, listed)) in enumerate(plans, 1):
        made = _Made(s, drawn, listed)
        source, target = made.places
        if number < len(plans) and not look.is_wanted(target, source):
            continue
        needed = len(made.text) + look.guess(target, source)
        if limit is not None and needed > 1.02 * limit:  # a guess may be a little wrong
            continue
        page = _page(s, look, made)
        needed = len(page.encode())
        if limit is None or needed <= limit:
            return page
    raise InputError(
        f"limit={limit}; the page needs {needed:,} bytes even with the smallest pictures and few samples. Raise "
        "limit=, or set it to None."
    )


def _cuts() -> Iterator[tuple[int, int]]:
    """How many samples of each set are in the picture, and how many are listed."""
    drawn, listed = DRAWN, LISTED
    yield drawn, listed
    while drawn > 30:
        drawn, listed = drawn * 2 // 3, max(6, listed * 4 // 5)
        yield drawn, listed


def _looks(s: Shift) -> list[Look]:
    """What the samples look like, where both sets can be shown in one way."""
    if s.source is None or s.target is None or kind(s.source.show) != kind(s.target.show):
        return [NoLook()]
    if kind(s.source.show) == "rows" and s.source.columns != s.target.columns:
        return [NoLook()]
    shapes = {show.shape[1:] for show in (s.source.show, s.target.show) if isinstance(show, Tensor)}
    return looks(s.target, s.source) if len(shapes) < 2 else [NoLook()]


class _Made:
    """The numbers of a page as JSON, and the samples with a place on it."""

    def __init__(self, s: Shift, drawn: int, listed: int) -> None:
        carried = s.carriers(listed)
        self.drawn = [_spread(len(z), drawn) for z in (s.z_source, s.z_target)]
        self.carried = [rows.cpu() for rows in carried]
        self.places = [torch.cat(parts).unique() for parts in zip(self.drawn, self.carried, strict=True)]
        places = {"test": pack.integers(self.places[1]), "train": pack.integers(self.places[0])}
        numbers = {"places": shell.json_text(places), "shift": shell.json_text(self._content(s))}
        self.text = ",".join(f'"{key}":{text}' for key, text in numbers.items())

    def _content(self, s: Shift) -> Content:
        c, order = s.components, s.components.order
        shown = sorted({*range(min(2, len(c))), *order[: COMPONENTS - 2].tolist()})
        sides = [
            self._side(s, k, z[:, shown], ratio)
            for k, (z, ratio) in enumerate(((s.z_source, s.ratio_source), (s.z_target, s.ratio_target)))
        ]
        ids = None if s.source is None or len(s.z_source) > NAMED else s.source.ids
        return {
            "names": list(s.names), "layer": s.layer, "p": s.p, "shifted": s.shifted, "level": s.level,
            "words": s.sentences(), "warnings": list(s.warnings),
            "mmd": plain({"value": s.mmd.value, "p": s.mmd.p}),
            "classifier": plain({"auc": s.classifier.auc.value, "low": s.classifier.auc.low,
                                 "high": s.classifier.auc.high, "p": s.classifier.p}),
            "components": {name: pack.floats(getattr(c, name))
                           for name in ("distance", "difference", "spread", "ks", "p", "explained")},
            "shown": shown, "source": sides[0], "target": sides[1], "ratio": pack.floats(s.ratio_source),
            "ids": None if ids is None else list(ids), "classes": _classes(s),
        }  # fmt: skip

    def _side(self, s: Shift, k: int, z: Tensor, ratio: Tensor) -> Content:
        rows, carried, data = self.drawn[k], self.carried[k], (s.source, s.target)[k]
        places = self.places[k]
        labels = None if s.labels is None else pack.integers(s.labels[k][places])
        return {
            "count": len(z), "drawn": pack.integers(rows), "z": pack.quantised(z[rows].T, 1),
            "ratio": pack.floats(ratio[rows]),
            "carriers": pack.integers(carried), "carried": pack.floats(ratio[carried]),
            "ratios": pack.floats(ratio[_spread(len(ratio), COUNTED)]), "labels": labels,
            "ids": None if data is None or data.ids is None else [data.ids[i] for i in places.tolist()],
        }  # fmt: skip


def _spread(n: int, most: int) -> Tensor:
    """At most so many of n numbers, evenly."""
    return torch.linspace(0, n - 1, min(n, most)).round().long()


def _classes(s: Shift) -> Json:
    c = s.classes
    if c is None:
        return None
    return {
        "names": list(c.names), "of": c.of, "balance_p": c.balance_p, "source": pack.floats(c.source),
        "target": pack.floats(c.target), "inputs_p": pack.floats(c.inputs_p),
    }  # fmt: skip


def _page(s: Shift, look: Look, made: _Made) -> str:
    title = visible_text(f"{s.names[0]} against {s.names[1]}: did the data shift?")
    # The page of other results calls these sets training and test samples.
    said = [note.replace("training", "source").replace("test ", "target ") for note in look.notes()]
    counts = zip(made.drawn, (s.z_source, s.z_target), s.names, strict=True)
    said += [f"{len(d):,} of {len(z):,} {name} samples are in the picture." for d, z, name in counts if len(d) < len(z)]
    tested = s.facts.get("tested")
    if isinstance(tested, list) and tested != [len(s.z_source), len(s.z_target)]:
        said.append(f"The tests saw {tested[0]:,} source and {tested[1]:,} target samples, drawn at random.")
    samples = shell.json_text(look.content(made.places[1], made.places[0]))
    if any("⟨U+" in part for part in (title, samples, made.text)):
        said.append("Characters that cannot be seen, or that turn the direction of writing, are shown as ⟨U+…⟩.")
    about: dict[str, Json] = {
        "model": str(s.facts.get("model") or ""), "data": " and ".join(s.names), "facts": plain(s.facts),
        "version": __version__, "notes": list(said),
    }  # fmt: skip
    text = f'{{"about":{shell.json_text(about)},"look":{samples},{made.text}}}'
    return shell.assembled(title, ("carriers", "Skip to the samples"), text, parts=("shift",))
