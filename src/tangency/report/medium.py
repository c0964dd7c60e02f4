"""What a person looks at: pictures, texts or rows of a table, each at several levels of quality, best first."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..datasets import Labelled
from ..errors import InputError
from . import pack, pictures

# Pixels on a side, at most: of a test picture, which is shown large, and of a training picture (heuristic).
LARGE, SMALL = 160, 96
# Pictures stay exact as long as they take no more (heuristic): digits do, photographs do not.
EXACT = 1_000_000
# Pictures from which the bytes of all are guessed before all are encoded.
PROBE = 400
# Columns of a table that are shown; more cannot be read side by side.
COLUMNS = 24


class Medium(ABC):
    """What is shown of the samples of a training and a test set."""

    @property
    @abstractmethod
    def levels(self) -> Sequence[Any]:
        """How it can be kept, from the best to the smallest."""

    @abstractmethod
    def content(self, test: Tensor, train: Tensor, level: Any) -> dict[str, Any]:
        """What the page gets of these samples."""

    @abstractmethod
    def notes(self, level: Any) -> list[str]:
        """What the page says about it."""

    def wanted(self, test: Tensor, train: Tensor, level: Any) -> bool:
        """Whether the level is worth its bytes: exact pictures only where they are small."""
        return True

    def guess(self, test: Tensor, train: Tensor, level: Any) -> int:
        """About how many bytes that takes."""
        return len(json.dumps(self.content(test, train, level)))


def medium(test: Labelled, train: Labelled) -> Medium:
    """What is shown of these data sets, which must be of one kind."""
    kinds = [_kind(data.show) for data in (test, train)]
    if kinds[0] != kinds[1]:
        raise InputError(
            f"the test data show {kinds[0]}, the training data {kinds[1]}; needed: the same. Give both the same show=."
        )
    if kinds[0] == "pictures":
        return Pictures(test.show, train.show, _scaled(test) or _scaled(train))
    if kinds[0] == "texts":
        return Texts(test.show, train.show)
    if kinds[0] == "rows":
        return Rows(test.show, train.show, train.columns or test.columns)
    return Nothing()


@dataclass(frozen=True, eq=False)
class Pictures(Medium):
    test: Tensor
    train: Tensor
    scaled: bool
    _sizes: dict[tuple[int, Any], float] = field(default_factory=dict)

    @property
    def levels(self) -> Sequence[pictures.Level]:
        return pictures.levels(min(SMALL, max(self.train.shape[2:])))

    def content(self, test: Tensor, train: Tensor, level: pictures.Level) -> dict[str, Any]:
        of_test = pictures.sheets(self.test[test], self._large(level))
        return {"kind": "pictures", "test": of_test, "train": pictures.sheets(self.train[train], level)}

    def guess(self, test: Tensor, train: Tensor, level: pictures.Level) -> int:
        parts = ((self.test, test, self._large(level)), (self.train, train, level))
        return int(sum(self._each(k, images, rows, at) * len(rows) for k, (images, rows, at) in enumerate(parts)))

    def notes(self, level: pictures.Level) -> list[str]:
        kind = pictures.encoder()
        size = (self.train.shape[2], self.train.shape[3])
        found = [f"Pictures of training samples: {level.words(kind, size)}."]
        large = self._large(level)
        size = (self.test.shape[2], self.test.shape[3])
        if large != level or pictures.fitted(size, large.side) != size:
            found.append(f"Pictures of test samples: {large.words(kind, size)}.")
        if self.scaled:
            found.append("The inputs do not lie in [0, 1]; the pictures show them scaled to their range.")
        if kind == "png" and not level.exact:
            found.append("With Pillow installed (pip install pillow) more, or better, pictures would fit.")
        return found

    def wanted(self, test: Tensor, train: Tensor, level: pictures.Level) -> bool:
        tiny = max(self.train.shape[2:]) <= pictures.BLOCK
        return not level.exact or tiny or pictures.encoder() == "png" or self.guess(test, train, level) <= EXACT

    def _large(self, level: pictures.Level) -> pictures.Level:
        """Test pictures are few and are shown large: they stay good, and may be larger."""
        quality = 100 if level.quality == 100 else pictures.BEST
        return pictures.Level(max(level.side, LARGE), quality, level.shades)

    def _each(self, k: int, images: Tensor, rows: Tensor, level: pictures.Level) -> float:
        """Characters of the page for one picture, measured on a few."""
        if not len(rows):
            return 0.0
        if (k, level) not in self._sizes:
            some = rows[torch.linspace(0, len(rows) - 1, min(PROBE, len(rows))).long()]
            files = pictures.sheets(images[some], level)["files"]
            self._sizes[k, level] = sum(len(f["data"]) for f in files) / len(some)
        return self._sizes[k, level]


@dataclass(frozen=True, eq=False)
class Texts(Medium):
    test: Sequence[str]
    train: Sequence[str]

    @property
    def levels(self) -> Sequence[int]:
        """Characters of a training text that are kept."""
        return 4000, 2000, 1000, 500, 250, 120

    def content(self, test: Tensor, train: Tensor, level: int) -> dict[str, Any]:
        return {
            "kind": "texts",
            "test": [_cut(self.test[i], 4 * level) for i in test.tolist()],
            "train": [_cut(self.train[i], level) for i in train.tolist()],
        }

    def notes(self, level: int) -> list[str]:
        found = []
        for what, texts, most in (("training", self.train, level), ("test", self.test, 4 * level)):
            if any(len(text) > most for text in texts):
                found.append(f"Of {what} texts the first {most} characters are kept; a cut one ends with “…”.")
        return found


@dataclass(frozen=True, eq=False)
class Rows(Medium):
    test: Tensor
    train: Tensor
    columns: Sequence[str]

    @property
    def levels(self) -> Sequence[int]:
        """Columns that are kept."""
        return (min(COLUMNS, self.train.shape[1]),)

    def content(self, test: Tensor, train: Tensor, level: int) -> dict[str, Any]:
        names = list(self.columns) or [f"x{k}" for k in range(self.train.shape[1])]
        of_test, of_train = (pack.floats(v[:, :level]) for v in (self.test[test.cpu()], self.train[train.cpu()]))
        return {"kind": "rows", "columns": names[:level], "test": of_test, "train": of_train}

    def notes(self, level: int) -> list[str]:
        d = self.train.shape[1]
        return [f"Of the {d} columns the first {level} are shown."] if level < d else []


@dataclass(frozen=True, eq=False)
class Nothing(Medium):
    @property
    def levels(self) -> Sequence[None]:
        return (None,)

    def content(self, test: Tensor, train: Tensor, level: None) -> dict[str, Any]:
        return {"kind": "nothing"}

    def notes(self, level: None) -> list[str]:
        return [
            "The samples are shown by number and class alone: the inputs are neither pictures nor rows. Give the data "
            "sets show=: pictures, texts or rows."
        ]


def _kind(show: Any) -> str:
    if isinstance(show, Tensor):
        return "pictures" if show.dim() == 4 else "rows"
    return "nothing" if show is None else "texts"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _scaled(data: Labelled) -> bool:
    """Whether the pictures are the inputs scaled to their range: one line for all channels leads from x to show."""
    x, show = data.x, data.show
    if not (isinstance(x, Tensor) and x.shape == show.shape and show.dtype == torch.uint8 != x.dtype and len(x)):
        return False
    a, b = x[:4].detach().flatten().double().cpu(), show[:4].flatten().double().cpu()
    if bool((a.min() >= 0) & (a.max() <= 1)) or float(a.var()) == 0:
        return False
    slope = ((a - a.mean()) * (b - b.mean())).mean() / a.var(correction=0)
    return bool(((a - a.mean()) * slope + b.mean() - b).abs().max() <= 1)
