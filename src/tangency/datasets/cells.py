"""What one cell of a table holds: nothing, a number, a word, or a number written in a way that is not understood."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import isfinite

from ..errors import InputError

# What stands for no value, in capitals or not: R, pandas, SQL, spreadsheets and the UCI sets write these.
MISSING = (
    "", "?", "na", "n/a", "#n/a", "#n/a n/a", "#na", "<na>", "nan", "-nan", "null", "1.#ind", "-1.#ind",
    "1.#qnan", "-1.#qnan", "#div/0!", "#name?", "#null!", "#num!", "#ref!", "#value!",
)  # fmt: skip
_MISSING = frozenset(MISSING)
_SPACES = " \u00a0\u2009\u202f"
THOUSANDS = ("", ",", ".", "'", "’", " ", "_")


def is_missing(cell: str) -> bool:
    """Whether a cell stands for no value: one of `MISSING`, in capitals or not, or None as Python writes it.

    In small letters "none" is a word: a garage may be of the kind "none".

    >>> is_missing("?"), is_missing("NA"), is_missing("None"), is_missing("none"), is_missing("0")
    (True, True, True, False, False)
    """
    return cell.lower() in _MISSING or cell == "None"


def shown(words: Iterable[str]) -> list[str]:
    """Words as they may stand in a message: those with control characters or marks of direction are quoted.

    >>> shown(["red", "\\x1b[2J"])
    ['red', "'\\\\x1b[2J'"]
    """
    return [word if word.isprintable() else ascii(word) for word in words]


@dataclass(frozen=True)
class Form:
    """How numbers are written: the sign before the fraction, and the one between thousands, if there is one."""

    decimal: str = "."
    thousands: str = ""

    def __post_init__(self) -> None:
        if self.decimal not in (".", ","):
            raise InputError(f"decimal={self.decimal!r}; needed: '.' or ','.")
        if self.thousands not in THOUSANDS or self.thousands == self.decimal:
            known = " ".join(repr(v) for v in THOUSANDS if v != self.decimal)
            raise InputError(f"thousands={self.thousands!r} with decimal={self.decimal!r}; needed: one of {known}.")

    def plain(self, cell: str) -> str | None:
        """The number in a cell with a point and no thousands; None if it holds a word.

        >>> Form(",", ".").plain("1.234,5"), Form(",", ".").plain("1.23")
        ('1234.5', None)
        """
        if self.thousands:
            if self.thousands == " ":
                cell = re.sub(f"[{_SPACES}]", " ", cell)
            front, point, fraction = cell.partition(self.decimal)
            groups = front.lstrip("+-").split(self.thousands)
            if len(groups) > 1:
                inner = all(len(g) in (2, 3) for g in groups[1:-1])  # 12,34,567 in India
                outer = 1 <= len(groups[0]) <= 3 and not groups[0].startswith("0") and len(groups[-1]) == 3
                if not (inner and outer and "".join(groups).isdigit()):  # 0.500 is no 500
                    return None
            cell = front.replace(self.thousands, "") + point + fraction
        if self.decimal != ".":
            if "." in cell:
                return None
            cell = cell.replace(self.decimal, ".")
        try:
            float(cell)
        except ValueError:
            return None
        return None if "_" in cell else cell.strip()

    def number(self, cell: str) -> float | None:
        """The number in a cell; None if it holds a word."""
        plain = self.plain(cell)
        return None if plain is None else float(plain)

    def value(self, cell: str) -> Decimal | None:
        """The same exactly, so that long numbers can be told apart; None also where it is beyond all floats."""
        plain = self.plain(cell)
        try:
            return None if plain is None or not isfinite(float(plain)) else Decimal(plain)
        except ArithmeticError:  # an exponent of very many digits
            return None

    def label(self, cell: str) -> str:
        """A cell as a class or category: the word itself; 1.0 and 1. are 1, whereas 01, +1 and 1e0 stay as they are.

        >>> [Form().label(cell) for cell in ("red", "1.0", "01")]
        ['red', '1', '01']
        """
        whole = re.fullmatch(r"(-?(?:0|[1-9][0-9]*))(?:\.0*)?", self.plain(cell) or "")
        return whole[1] if whole else cell


def number(cell: str) -> float | None:
    """The number in a cell, written with a point; None if it holds a word (as which 1_000 counts).

    >>> number(".5"), number("1_000"), number("red")
    (0.5, None, None)
    """
    return Form().number(cell)


# Numbers that are understood by people alone; longer cells are words (heuristic).
_LONGEST = 40
_GROUPS = rf"\d{{1,3}}(?:[.,'’_{_SPACES}]\d{{2,3}})*[.,'’_{_SPACES}]\d{{3}}"
_DIGITS = rf"(?=[.,]?\d)(?:{_GROUPS}|\d*)(?:[.,]\d*)?(?:[eE][-+−]?\d+)?"
_SIGNED = re.compile(rf"\(?\s*[-+−–]?\s*(?P<core>{_DIGITS})\s*[-−]?\s*\)?")
_UNIT = re.compile(rf"[-+−–]?(?:{_DIGITS})\s*(?P<unit>[^\W\d_]{{1,10}}[²³]?|°[CFcf]?)")
_POWER = re.compile(rf"[-+−–]?(?:{_DIGITS})?\s*[x×*·]?\s*10\s*(?:(?:\^|\*\*)\s*\(?[-+−]?\d+\)?|[⁺⁻]?[⁰¹²³⁴-⁹]+)")
# What money is counted in, written before the number (after it, it is a unit).
_MONEY = re.compile(
    rf"(?P<money>USD|EUR|GBP|JPY|CNY|RMB|CHF|INR|AUD|CAD|NZD|SEK|NOK|DKK|PLN|CZK|HUF|RUB|TRY|BRL|MXN|ZAR|KRW|SGD|HKD|Rs)"
    rf"\.?\s*[-+−–]?(?:{_DIGITS})"
)
_BASE = re.compile(r"[-+]?0(?:[xX][0-9a-fA-F]+|[bB][01]+|[oO][0-7]+)")
_DATE = re.compile(
    r"(?:\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.](?:\d{4}|\d\d))(?:[T\s]+\d.*)?|"
    r"(?:1[89]|20)\d\d[-/](?:0?[1-9]|1[0-2])|(?:0?[1-9]|1[0-2])[-/](?:1[89]|20)\d\d|"
    r"\d{1,2}(?::\d\d){1,2}(?:[.,]\d+)?(?:\s*[ap]\.?m\.?)?|\d{1,2}:\d\d:\d\d.*",
    re.IGNORECASE,
)
_MONTHS = (
    "january", "february", "march", "april", "may", "june", "july", "august", "september", "october", "november",
    "december",
)  # fmt: skip
_DAYS = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
_MONTH = frozenset([*_MONTHS, *(m[:3] for m in _MONTHS), "sept"])
_BESIDE = frozenset([*_DAYS, *(d[:3] for d in _DAYS), "st", "nd", "rd", "th", "of", "am", "pm", "utc", "gmt", "t", "z"])


def _is_date(cell: str) -> bool:
    """Whether this is a date or a time, in digits or with the name of its month.

    >>> _is_date("1 Jan 2020"), _is_date("10:30 PM"), _is_date("May"), _is_date("march hare 2")
    (True, True, False, False)
    """
    if _DATE.fullmatch(cell):
        return True
    words = [word.lower() for word in re.findall(r"[^\W\d_]+", cell)]
    named = any(word in _MONTH for word in words) and all(word in _MONTH or word in _BESIDE for word in words)
    return named and re.search(r"\d", cell) is not None


def odd(cell: str) -> tuple[str, str] | None:
    """What is odd in a cell that looks like a number but is none, and what to do; None if it is a word.

    >>> odd("10%"), odd("red")
    (('a number with %', 'Write numbers alone'), None)
    """
    if len(cell) > _LONGEST:
        return None
    if _BASE.fullmatch(cell):
        return "a number to another base", f"Write it in decimal ({int(cell, 0)})"
    if re.fullmatch(r'="[^"]*"', cell):
        return "a spreadsheet's formula for text", "Write what stands between the quotes"
    if _is_date(cell):
        return "a date or time", "Make a number of it, such as days or seconds"
    marks = [c for c in cell if c in "%‰" or unicodedata.category(c) == "Sc"]
    bare = "".join(c for c in cell if c not in marks).strip()
    signed = _SIGNED.fullmatch(bare)
    if signed and marks:
        return f"a number with {marks[0]}", "Write numbers alone"
    if _POWER.fullmatch(cell):
        return "a number with a power of ten", "Write it with e (1.5e3)"
    if money := _MONEY.fullmatch(cell):
        return f"a number with {money['money']}", "Write numbers alone"
    if signed:
        return "a number with separators or signs of its own", _separators(signed["core"])
    unit = _UNIT.fullmatch(cell)
    return (f"a number with the unit {unit['unit']!r}", "Write numbers alone") if unit else None


def _separators(core: str) -> str:
    """What to say about the separators of 1.234,5 and the like."""
    signs = [" " if c in _SPACES else c for c in core if c in ".,'’_" + _SPACES]
    if not signs:
        return "Write it with digits, a point and a minus"
    last, rest = signs[-1], signs[:-1]
    if rest and last not in rest and last in ".,":
        return f"Say how they are written: decimal={last!r}, thousands={rest[0]!r}"
    three = re.search(r"\D\d{3}$", core) is not None and not core.startswith("0")
    if rest or last not in ".,":
        return f"Say how they are written: thousands={last!r}" + (", decimal=','" if last == "." else "")
    other = "" if not three else f" or thousands={last!r}" + (", decimal=','" if last == "." else "")
    return f"Say how they are written: decimal={last!r}{other}"


def oddity(cells: Sequence[str], form: Form) -> tuple[int, str, str, int] | None:
    """(which cell, what it is, what to do, how many) if most look like numbers but are none, by lines or by values.

    Units count if they are the same: 10kg and 20kg, not 1st and 2nd.

    >>> oddity(["10%", "20%", "unknown"], Form())
    (0, 'a number with %', 'Write numbers alone', 2)
    """
    counts = Counter(cells)
    oddities = {cell: odd(cell) if form.plain(cell) is None else None for cell in counts}
    groups = {cell: what[0] if "unit" in what[0] else "" for cell, what in oddities.items() if what}
    for weights in (counts, dict.fromkeys(counts, 1)):
        tally: Counter[str] = Counter()
        for cell, group in groups.items():
            tally[group] += weights[cell]
        for group, many in tally.items():
            if 2 * many > sum(weights.values()):
                i = next(i for i, cell in enumerate(cells) if groups.get(cell) == group)
                alike = sum(counts[cell] for cell in groups if groups[cell] == group)
                return i, *(oddities[cells[i]] or ("", "")), alike
    return None
