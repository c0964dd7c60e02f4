"""The numbers of an audit's sections: what `Audit` holds, cut to what is shown. The names: audit/data.js.

Labels of all training samples are there, and what the samples and classes are called, exactly: the page writes files.
"""

import hashlib
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import strict_json
from .._base.page import visible_text
from .._base.strict_json import plain
from .._base.types import Json
from ..auditing import Audit, Copies, Support
from ..auditing.applied import VERSION, digest, stamp
from . import pack
from .content import CONFUSED, MATRIX
from .pack import Content

# Pairs of copies, outliers of one set, and samples of a region that are shown, at most; bars of the histogram.
PAIRS, OUTLIERS, INSIDE, BARS = 60, 60, 12, 48
# Pairs of classes that are mixed up which are named.
MIXED = 12
# Real targets of a sample that are shown.
TARGETS = 4


@dataclass(frozen=True)
class Frame:
    """How much is shown: suspects, neighbours of each, and at most so many of every other list.

    `ids`: what all training samples are called, for the files that the page writes; else of those on the page alone.
    """

    suspects: int
    neighbours: int
    others: int = PAIRS
    ids: bool = True

    def training(self, a: Audit) -> Tensor:
        """The training samples with a place on the page."""
        parts = [
            self.listed(a),
            self.near(a.neighbours).flatten(),
            a.copies.pairs[_first(a.copies, self.others)].flatten(),
        ]
        parts += [a.support.outliers[: min(self.others, OUTLIERS)]]
        if a.leaks is not None:
            parts.append(a.leaks.pairs[_first(a.leaks, self.others), 1])
        if a.test is None:
            parts += self._inside(a)
        return torch.cat([p.cpu().long() for p in parts]).unique()

    def test(self, a: Audit) -> Tensor:
        """The test samples with a place on the page."""
        parts = [torch.zeros(0, dtype=torch.long)]
        if a.test is not None:
            parts += self._inside(a)
            parts += [] if a.leaks is None else [a.leaks.pairs[_first(a.leaks, self.others), 0]]
            parts += [] if a.test_support is None else [a.test_support.outliers[: min(self.others, OUTLIERS)]]
        return torch.cat([p.cpu().long() for p in parts]).unique()

    def listed(self, a: Audit) -> Tensor:
        """The suspects that are shown."""
        return a.listed.cpu()[: self.suspects]

    def near(self, of: Tensor) -> Tensor:
        """What is shown of the neighbours' numbers or similarities."""
        return of.cpu()[: self.suspects, : self.neighbours]

    def _inside(self, a: Audit) -> list[Tensor]:
        return [r.samples[: min(INSIDE, self.others)] for r in a.regions]


def whole(a: Audit) -> Frame:
    """Everything that may be shown."""
    return Frame(len(a.listed), a.neighbours.shape[1])


def audit_content(a: Audit, frame: Frame, train: Tensor, test: Tensor) -> Content:
    """All but what the samples look like; `train`, `test`: the samples with a place on the page, in their order."""
    real = a.real
    return {
        "version": VERSION,
        "real": real,
        "samples": len(a.train),
        "tests": None if a.test is None else len(a.test),
        "about": plain(about(a)),
        "audited": stamp(len(a.train), about(a)),
        "memory": _memory(a),
        "classes": list(a.train.classes),
        "ids": _ids(a, frame, train),
        "words": _sentences(a),
        "warnings": list(a.warnings),
        "noise": plain({k: getattr(a.noise, k) for k in ("rate", "low", "high", "level", "contradicted", "by_test")}),
        "choice": _choice(a),
        "given": None if real else pack.integers(a.suspects.given),
        "asked": None if real or a.test is None else pack.integers(a.test.y.cpu()[test]),
        "targets": _targets(a.suspects.given[train]) if real else None,
        "suspects": _suspects(a, frame),
        "margins": _margins(a),
        "mixed": None if real else _mixed(a),
        "copies": _copies(a.copies, frame.others),
        "leaks": None if a.leaks is None else _copies(a.leaks, frame.others),
        "outliers": _outliers(a.support, frame.others),
        "test_outliers": None if a.test_support is None else _outliers(a.test_support, frame.others),
        "regions": [
            {
                "samples": pack.integers(r.samples[: min(INSIDE, frame.others)]),
                "size": len(r.samples),
                "mistakes": r.mistakes,
                "elsewhere": r.elsewhere,
                "chance": r.chance,
                "why": r.why,
            }
            for r in a.regions
        ],
        "cleaning": _cleaning(a),
    }


def exact(a: Audit, frame: Frame, train: Tensor) -> Content:
    """Names of classes and samples that cannot be shown as they are: as they are, by their number."""
    ids = _ids(a, frame, train) or {}
    named = {"classes": dict(enumerate(a.train.classes)), "ids": ids if isinstance(ids, dict) else dict(enumerate(ids))}
    return {
        key: {str(k): name for k, name in names.items() if visible_text(name) != name} for key, names in named.items()
    }


def _ids(a: Audit, frame: Frame, train: Tensor) -> list[str] | dict[str, str] | None:
    """What the training samples are called, by their number."""
    ids = a.train.ids
    if ids is None:
        return None
    return list(ids) if frame.ids else {str(i): ids[i] for i in train.tolist()}


def about(a: Audit) -> dict[str, str | None]:
    """Which data, with which labels or targets, were audited: files of decisions about others are refused."""
    if a not in _ABOUT:  # a page that has to be small is tried many times, and inputs may be many
        _ABOUT[a] = digest(a.train, a.suspects.given)
    return _ABOUT[a]


_ABOUT: weakref.WeakKeyDictionary[Audit, dict[str, str | None]] = weakref.WeakKeyDictionary()


def _sentences(a: Audit) -> list[str]:
    """What was found, without the warnings, which stand by themselves."""
    text = a.words()
    for warning in a.warnings:
        text = text.replace(f"Caution: {warning}", "")
    return [line for line in text.split("\n") if line]


def _memory(a: Audit) -> str:
    """What a browser remembers the decisions under: the data, and what the classes and samples are called."""
    return hashlib.sha256(strict_json.text(about(a)).encode()).hexdigest()[:24]


def _suspects(a: Audit, frame: Frame) -> Content:
    s, listed = a.suspects, frame.listed(a)
    labels: Content = (
        {"targets": _targets(s.given[listed]), "predicted": _targets(s.suggested[listed])}
        if a.real
        else {"suggested": pack.integers(s.suggested[listed])}
    )
    return {
        "count": s.count,
        "index": pack.integers(listed),
        "wrong": pack.floats(s.wrong[listed]),
        "margin": pack.floats(s.margin[listed]),
        "neighbours": pack.integers(frame.near(a.neighbours)),
        "similarity": pack.floats(frame.near(a.similarity)),
        **labels,
    }


def _targets(of: Tensor) -> pack.Packed:
    """The first of each sample's real targets, [n, q]."""
    return pack.floats(of.reshape(len(of), -1)[:, :TARGETS])


def _margins(a: Audit) -> Content:
    """Bars of margins: of labels that are more likely right, and of suspects; and the margin between the two."""
    margin, wrong = a.suspects.margin.double().cpu(), a.suspects.wrong.cpu() > 0.5
    low, high = (float(v) for v in margin.aminmax())
    high = high if high > low else low + 1
    place = ((margin - low) / (high - low) * BARS).long().clamp(0, BARS - 1)
    right, bad = (torch.bincount(place[mask], minlength=BARS) for mask in (~wrong, wrong))
    cut: Json = None
    if bool(wrong.any()) and not bool(wrong.all()):
        cut = float(margin[wrong].max() + margin[~wrong].min()) / 2
    return {"low": low, "high": high, "right": right.tolist(), "wrong": bad.tolist(), "cut": cut}


def _mixed(a: Audit) -> Content:
    """How many samples with the label of the row are expected to be of the column's class; the last column: others."""
    counts = a.noise.counts.double().cpu()
    c = len(counts)
    chosen = torch.arange(c)
    if c > MATRIX:
        away = counts.clone().fill_diagonal_(0)
        chosen = (away.sum(0) + away.sum(1)).topk(CONFUSED).indices.sort().values
    inside = counts[chosen][:, chosen]
    rest = counts[chosen].sum(1) - inside.sum(1)
    pairs = [[g, s, float(counts[g, s]), low, high] for g, s, low, high in a.noise.pairs(MIXED)]
    return {"classes": chosen.tolist(), "counts": pack.floats(torch.cat([inside, rest[:, None]], 1)), "pairs": pairs}


def _copies(copies: Copies, most: int) -> Content:
    first = _first(copies, most)
    return {
        "count": len(copies),
        "exact": int(copies.exact.sum()),
        "contradictory": int(copies.contradictory.sum()),
        "pairs": pack.integers(copies.pairs[first]),
        "similarity": pack.floats(copies.similarity[first]),
        "equal": pack.bits(copies.exact[first]),
        "differ": pack.bits(copies.contradictory[first]),
    }


def _first(copies: Copies, most: int) -> Tensor:
    """Which pairs are shown, those with different labels first: one of the two is certainly wrong."""
    return (~copies.contradictory.cpu()).long().argsort(stable=True)[:most]


def _outliers(support: Support, most: int) -> Content:
    index = support.outliers.cpu()[: min(most, OUTLIERS)]
    return {
        "count": len(support.outliers),
        "limit": support.limit,
        "index": pack.integers(index),
        "unexplained": pack.floats(support.unexplained[index]),
    }


def _choice(a: Audit) -> Content:
    titles = a.facts.get("titles")
    rows: list[Json] = [
        [name, reg, loss, name == a.choice.kernel and reg == a.choice.reg]
        for name in a.choice.regs
        for reg, loss in zip(a.choice.regs[name].tolist(), a.choice.losses[name].tolist(), strict=True)
    ]
    title = titles.get(a.choice.kernel) if isinstance(titles, dict) else None
    return {"kernel": a.choice.kernel, "title": title, "reg": a.choice.reg, "tried": plain(rows)}


def _cleaning(a: Audit) -> Json:
    c = a.cleaning
    if c is None:
        return None
    return plain(
        {
            "removed": c.removed.tolist(),
            "dropped": c.dropped.tolist(),
            "mended": c.mended.tolist(),
            "suspects": c.suspects,
            "gain": c.gain,
            "error": c.gain_error,
            "score": c.score,
            "retrained": c.retrained,
        }
    )
