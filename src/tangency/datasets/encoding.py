"""How the columns of a table became numbers: learned from one file, applied to others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .cells import Form

Missing = Literal["refuse", "leave out"]
_POINT = Form()


@dataclass(frozen=True)
class Column:
    """A column that is used: of numbers, or of words, each of which has a 0/1 column of its own."""

    name: str
    words: tuple[str, ...] | None = None  # None: numbers
    missing: int = 0  # values that its file lacks

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the numbers that a row became: a column of words gives one for each word.

        >>> Column("colour", ("green", "red")).names
        ('colour=green', 'colour=red')
        """
        return (self.name,) if self.words is None else tuple(f"{self.name}={word}" for word in self.words)

    def encoded(self, labels: Sequence[str]) -> np.ndarray:
        """Words as 0/1, [n, one for each]; all of them must be known."""
        place = {word: j for j, word in enumerate(self.words or ())}
        values = np.zeros((len(labels), len(place)))
        values[range(len(labels)), [place[label] for label in labels]] = 1
        return values


@dataclass(frozen=True)
class Encoding:
    """What a reader understood of a table, so that another file is read in the same way: `csv(file, like=train)`."""

    target: Column  # its classes are those of the set
    columns: tuple[Column, ...]
    unused: tuple[str, ...] = ()  # columns of the file that were not asked for
    every: bool = True  # whether all columns were asked for
    header: bool = True
    form: Form = _POINT
    missing: Missing = "refuse"
    left_out: int = 0  # lines of the file, since they lack a value

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the numbers that a row became: a column of words gives one for each word."""
        return tuple(name for column in self.columns for name in column.names)
