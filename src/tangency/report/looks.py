"""What a person looks at: pictures, texts or rows of a table, each at several levels of quality."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._base.extras import install
from ..datasets import Labelled
from ..errors import InputError
from . import pack, pictures

# Pixels on a side, at most: of a test picture, which is shown large, and of a training picture (heuristic).
LARGE, SMALL = 160, 96
# Pictures stay exact as long as they take no more (heuristic): digits do, photographs do not.
EXACT_BYTES = 1_000_000
# Pictures from which the bytes of all are guessed before all are encoded.
PROBE = 400
# Columns of a table that are shown; more cannot be read side by side.
COLUMNS = 24
# Characters of a training text that are kept, from the best to the smallest; of a test text so many times more.
TEXT_LENGTHS, TEST_TEXT = (4000, 2000, 1000, 500, 250, 120), 4


class Look(ABC):
    """What is shown of the samples of a training and a test set, at one level of quality."""

    @abstractmethod
    def content(self, test: Tensor, train: Tensor) -> pack.Content:
        """What the page gets of these samples."""

    @abstractmethod
    def notes(self) -> list[str]:
        """What the page says about it."""

    def is_wanted(self, test: Tensor, train: Tensor) -> bool:
        """Whether it is worth its bytes: exact pictures only where they are small."""
        return True

    def guess(self, test: Tensor, train: Tensor) -> int:
        """About how many bytes it takes."""
        return len(json.dumps(self.content(test, train)))


def looks(test: Labelled | None, train: Labelled) -> list[Look]:
    """What may be shown of these data sets, which must be of one kind; from the best to the smallest."""
    if test is not None and kind(test.show) != kind(train.show):
        raise InputError(
            f"the test data show {kind(test.show)}, the training data {kind(train.show)}; needed: the same. Give "
            "both the same show=."
        )
    known, asked = train.show, None if test is None else test.show
    if isinstance(known, Tensor):
        asked = asked if isinstance(asked, Tensor) else known[:0]
        if known.dim() != 4:
            return [TableLook(asked, known, train.columns or (() if test is None else test.columns))]
        rescaled = _is_rescaled(train) or (test is not None and _is_rescaled(test))
        levels = pictures.levels(min(SMALL, max(known.shape[2:])))
        return [PictureLook(asked, known, rescaled, level) for level in levels]
    if isinstance(known, tuple):
        return [TextLook(asked if isinstance(asked, tuple) else (), known, length) for length in TEXT_LENGTHS]
    return [NoLook()]


@dataclass(frozen=True, eq=False)
class PictureLook(Look):
    """Pictures [n, c, h, w] of both sets; `rescaled`: they are the inputs, brought to the range of pictures."""

    test: Tensor
    train: Tensor
    rescaled: bool
    level: pictures.Level
    _sizes: dict[str, float] = field(default_factory=dict)

    def content(self, test: Tensor, train: Tensor) -> pack.Content:
        """Sheets of pictures."""
        return {
            "kind": "pictures",
            "test": pictures.sheets(self.test[test], self._large).content(),
            "train": pictures.sheets(self.train[train], self.level).content(),
        }

    def guess(self, test: Tensor, train: Tensor) -> int:
        """From some of the pictures."""
        large = self._size_of_one("test", self.test, test, self._large) * len(test)
        return int(large + self._size_of_one("train", self.train, train, self.level) * len(train))

    def notes(self) -> list[str]:
        """How the pictures are kept."""
        encoder = pictures.encoder()
        size = (self.train.shape[2], self.train.shape[3])
        notes = [f"Pictures of training samples: {self.level.words(encoder, size)}."]
        size = (self.test.shape[2], self.test.shape[3])
        if len(self.test) and (self._large != self.level or pictures.scaled_size(size, self._large.side) != size):
            notes.append(f"Pictures of test samples: {self._large.words(encoder, size)}.")
        if self.rescaled:
            notes.append("The inputs do not lie in [0, 1]; the pictures show them scaled to their range.")
        if encoder == "png" and not self.level.exact:
            notes.append(f"With Pillow installed ({install('report')}) more, or better, pictures would fit.")
        return notes

    def is_wanted(self, test: Tensor, train: Tensor) -> bool:
        """All but exact pictures that take much."""
        # A lossy picture takes whole blocks: one that is smaller than a block saves nothing.
        tiny = max(self.train.shape[2:]) <= pictures.LOSSY_BLOCK
        exact = self.level.exact and not tiny and pictures.encoder() != "png"
        return not exact or self.guess(test, train) <= EXACT_BYTES

    @property
    def _large(self) -> pictures.Level:
        """Test pictures are few and are shown large: they stay good, and may be larger."""
        quality = 100 if self.level.quality == 100 else pictures.BEST
        return pictures.Level(max(self.level.side, LARGE), quality, self.level.shades)

    def _size_of_one(self, part: str, images: Tensor, rows: Tensor, level: pictures.Level) -> float:
        """Characters of the page for one picture of a part, measured on a few, once."""
        if not len(rows):
            return 0.0
        if part not in self._sizes:
            few = rows[torch.linspace(0, len(rows) - 1, min(PROBE, len(rows))).long()]
            files = pictures.sheets(images[few], level).files
            self._sizes[part] = sum(len(data) for _, data in files) / len(few)
        return self._sizes[part]


@dataclass(frozen=True, eq=False)
class TextLook(Look):
    """Texts of both sets, those of the training set cut to `length` characters."""

    test: Sequence[str]
    train: Sequence[str]
    length: int

    def content(self, test: Tensor, train: Tensor) -> pack.Content:
        """The texts, cut."""
        return {
            "kind": "texts",
            "test": [_cut(self.test[i], TEST_TEXT * self.length) for i in test.tolist()],
            "train": [_cut(self.train[i], self.length) for i in train.tolist()],
        }

    def notes(self) -> list[str]:
        """Which texts were cut."""
        notes = []
        for what, texts, most in (("training", self.train, self.length), ("test", self.test, TEST_TEXT * self.length)):
            if any(len(text) > most for text in texts):
                notes.append(f"Of {what} texts the first {most} characters are kept; a cut one ends with “…”.")
        return notes


@dataclass(frozen=True, eq=False)
class TableLook(Look):
    """Rows [n, d] of both sets, and the names of their columns."""

    test: Tensor
    train: Tensor
    columns: Sequence[str]

    def content(self, test: Tensor, train: Tensor) -> pack.Content:
        """The first columns."""
        names = list(self.columns) or [f"x{k}" for k in range(self.train.shape[1])]
        of_test, of_train = self.test[test.cpu(), :COLUMNS], self.train[train.cpu(), :COLUMNS]
        return {
            "kind": "rows",
            "columns": names[:COLUMNS],
            "test": pack.floats(of_test),
            "train": pack.floats(of_train),
        }

    def notes(self) -> list[str]:
        """Whether columns are left out."""
        d = self.train.shape[1]
        return [f"Of the {d} columns the first {COLUMNS} are shown."] if d > COLUMNS else []


class NoLook(Look):
    """Nothing but number and class."""

    def content(self, test: Tensor, train: Tensor) -> pack.Content:
        """Only that there is nothing."""
        return {"kind": "nothing"}

    def notes(self) -> list[str]:
        """Why, and what would help."""
        return [
            "The samples are shown by number and class alone: the inputs are neither pictures nor rows. Give the data "
            "sets show=: pictures, texts or rows."
        ]


def kind(show: Tensor | Sequence[str] | None) -> str:
    """In a word, for messages."""
    if isinstance(show, Tensor):
        return "pictures" if show.dim() == 4 else "rows"
    return "nothing" if show is None else "texts"


def _cut(text: str, most: int) -> str:
    """At most so many characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def _is_rescaled(data: Labelled) -> bool:
    """Whether the pictures are the inputs scaled to their range: one line for all channels leads from x to show."""
    x, show = data.x, data.show
    if not isinstance(x, Tensor) or not isinstance(show, Tensor) or x.shape != show.shape or not len(x):
        return False
    if show.dtype != torch.uint8 or x.dtype == torch.uint8:
        return False
    a, b = x[:4].detach().flatten().double().cpu(), show[:4].flatten().double().cpu()
    if bool((a.min() >= 0) & (a.max() <= 1)) or float(a.var()) == 0:
        return False
    slope = ((a - a.mean()) * (b - b.mean())).mean() / a.var(correction=0)
    return bool(((a - a.mean()) * slope + b.mean() - b).abs().max() <= 1)  # to a shade, as rounding leaves it
