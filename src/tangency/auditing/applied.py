"""What a person decided about suspects on the page, taken to the labels."""

import csv
import hashlib
import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .._base import checks, fingerprint, strict_json, tree
from .._base.files import path
from .._base.results import brief
from .._base.targets import floats
from .._base.types import FilePath
from ..datasets import Labelled, labelled
from ..datasets.accepted import whole
from ..datasets.files import read_bytes
from ..datasets.labelled import Samples
from ..errors import InputError

ACTIONS = ("keep", "fix", "drop")
VERSION = 1
# What a CSV must have, and whole numbers in it: digits of ASCII, no more than any number of samples has.
COLUMNS = ("sample", "given", "action", "label", "audited")
NUMBER = re.compile(r"[0-9]{1,18}")
AS_THEN = "Give the training set that was audited, as it was then."


@dataclass(frozen=True)
class Decided:
    """What one sample's label gets: "keep", "drop", or "fix" with the new class."""

    sample: int
    action: str
    label: str | None = None


def digest(data: Labelled, given: Tensor | None = None) -> dict[str, str | None]:
    """Which data they are: short hashes of labels, class names, ids (None without) and inputs, to the bit.

    `given`: labels or real targets in place of the data's own. Classes that are called by their numbers are counted.

    >>> digest(labelled((torch.eye(3), [0, 1, 1])))["classes"]
    '2 numbered'
    """
    y = (data.y if given is None else given).detach().cpu()
    y = y.double() if y.is_floating_point() else y.long()
    inputs = {f"{name} {v.dtype} {tuple(v.shape)} ": v for name, v in tree.leaves(data.x)}
    return {
        "labels": fingerprint.digest({"": y}),
        "classes": f"{len(data.classes)} numbered"
        if data.classes == _numbers(len(data.classes))
        else _hash(data.classes),
        "ids": None if data.ids is None else _hash(data.ids),
        "inputs": fingerprint.digest(inputs),
    }


def _numbers(c: int) -> tuple[str, ...]:
    """What c classes without names are called."""
    return tuple(map(str, range(c)))


def _hash(names: Sequence[str]) -> str:
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


def apply(data: Samples, decisions: FilePath | Mapping[str, object]) -> Labelled:
    """The samples that were kept, with the labels that were fixed: by the page's export, a .json or .csv, or a dict.

    `data` are the samples that were audited, as they were then (in any form that `tg.datasets.labelled` takes):
    decisions about others are refused, by the number of samples and by hashes of labels, names of classes and samples,
    and inputs. In a CSV these stand in the column "audited" of every row, which spreadsheets leave as it is.

    >>> data = Labelled(torch.eye(3), [0, 1, 1], ("cat", "dog"))
    >>> decided = {"tangency_audit": 1, "samples": 3, "data": digest(data),
    ...            "decisions": [{"sample": 1, "action": "fix", "label": "cat"}, {"sample": 2, "action": "drop"}]}
    >>> apply(data, decided).y.tolist()
    [0, 0]
    """
    data, y, kept = decided(audited(data), decisions)
    return replace(data, y=y).select(kept)


def audited(data: object, labels: object = None) -> Labelled:
    """The training set, in any form; refuses real targets, its own or `labels` in their place."""
    y = data[1] if isinstance(data, (tuple, list)) and len(data) == 2 else None
    if floats(y if labels is None else labels):
        raise InputError(
            "the targets are real numbers, which cannot be applied: Labelled has no place for them. Needed: classes "
            "(if these are: y.long()); or drop samples by the numbers in the decisions."
        )
    return labelled(data, name="data")


def decided(data: Labelled, decisions: FilePath | Mapping[str, object]) -> tuple[Labelled, Tensor, Tensor]:
    """The data, with all classes that were audited, the labels after the decisions, and a mask of samples to keep."""
    data, found = _read(data, decisions)
    y, kept = data.y.clone(), torch.ones(len(data), dtype=torch.bool)
    for one in found:
        if one.action == "drop":
            kept[one.sample] = False
        elif one.action == "fix":
            assert one.label is not None
            y[one.sample] = data.classes.index(one.label)
    if not bool(kept.any()):
        raise InputError("every sample is dropped; needed: decisions that keep some.")
    return data, y, kept


def _read(data: Labelled, decisions: FilePath | Mapping[str, object]) -> tuple[Labelled, list[Decided]]:
    """Checked against the data, which get the classes that were audited where they have no names."""
    where = "the decisions" if isinstance(decisions, Mapping) else str(decisions)
    try:
        data, rows = _rows(data, decisions if isinstance(decisions, Mapping) else path(decisions, "decisions"))
        found = [_one(data, row) for row in rows]
        twice = [sample for sample, many in Counter(d.sample for d in found).items() if many > 1]
        if twice:
            raise InputError(f"sample {twice[0]} is there twice; needed: one decision for each sample.")
    except InputError as e:
        raise InputError(f"{where}: {e}") from None
    return data, found


Rows = Sequence[Mapping[str, object]]


def _rows(data: Labelled, decisions: Path | Mapping[str, object]) -> tuple[Labelled, Rows]:
    """One for each decision, unchecked; with the data, checked."""
    if isinstance(decisions, Path):
        try:
            text = read_bytes(decisions, "the page's export").decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError("no text (UTF-8); needed: the page's export as it is.") from None
        if decisions.suffix.lower() == ".csv":
            return _of_csv(text, data)
        try:
            decisions = strict_json.parse(text)  # type: ignore[assignment]  # looked at below
        except ValueError as e:
            raise InputError(f"no JSON ({e}); needed: the page's export (.json, or .csv by that name).") from None
    if not isinstance(decisions, Mapping) or not _equal(decisions.get("tangency_audit"), VERSION):
        raise InputError(f'no decisions of an audit; needed: the page\'s export, with "tangency_audit": {VERSION}.')
    data = _same(data, decisions)
    rows = decisions.get("decisions")
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise InputError('"decisions" is no list of decisions; needed: the page\'s export as it is.')
    return data, rows


def _same(data: Labelled, decisions: Mapping[str, object]) -> Labelled:
    """The data, with as many numbered classes as there were; refuses others than the decisions are about."""
    if not _equal(decisions.get("samples"), len(data)):
        raise InputError(f"about {brief(decisions.get('samples'))} samples; the data have {len(data)}. {AS_THEN}")
    about = decisions.get("data")
    if not isinstance(about, Mapping):
        raise InputError('"data", which says what they are about, is not there; needed: the page\'s export as it is.')
    # A network may have classes that the training set has no sample of.
    many = re.fullmatch(r"(\d{1,6}) numbered", str(about.get("classes")))
    if many and data.classes == _numbers(len(data.classes)) and len(data.classes) < int(many[1]):
        data = replace(data, classes=_numbers(int(many[1])))
    own = digest(data)
    # Samples without names may be those that had some.
    other = [k for k, v in own.items() if about.get(k) != v and not (k == "ids" and None in (v, about.get(k)))]
    if other:
        raise InputError(f"about other data: the {' and the '.join(other)} are not what was audited. {AS_THEN}")
    return data


def stamp(samples: int, about: Mapping[str, str | None]) -> str:
    """Which data a CSV of decisions is about, as a cell of each of its rows; `about` as `digest` has it.

    >>> stamp(3, {"labels": "0a", "classes": "2 numbered", "ids": None, "inputs": "1b"})
    'audit 1; samples 3; labels 0a; classes 2 numbered; ids -; inputs 1b'
    """
    hashes = "; ".join(f"{name} {'-' if value is None else value}" for name, value in about.items())
    return f"audit {VERSION}; samples {samples}; {hashes}"


def _unstamped(cell: str) -> dict[str, object]:
    """What a cell of the column "audited" says, as JSON has it."""
    said = dict(part.partition(" ")[::2] for part in cell.split("; "))
    if said.pop("audit", None) != str(VERSION) or not NUMBER.fullmatch(said.get("samples", "")):
        raise InputError(f"audited is {brief(cell)}, which says no data; needed: the page's export as it is.")
    return {"samples": int(said.pop("samples")), "data": {k: None if v == "-" else v for k, v in said.items()}}


def _of_csv(text: str, data: Labelled) -> tuple[Labelled, Rows]:
    """The rows of a table that is about these data; with the data, checked."""
    head, *lines = _cells(text) or [[]]
    if missing := [name for name in COLUMNS if name not in head]:
        old = " Pages of earlier versions wrote none: take their JSON." if missing == ["audited"] else ""
        raise InputError(f"no column {checks.some(missing)}; needed: the page's export as it is.{old}")
    rows = [dict(zip(head, line, strict=True)) for line in lines]
    for k, audited in enumerate({row["audited"]: None for row in rows}):
        if k:
            raise InputError("its rows are about several sets of data, by the column audited; needed: about one.")
        data = _same(data, _unstamped(audited))
    names = {"given": set(data.classes), "label": set(data.classes), "id": set(data.ids or ())}

    def named(key: str, value: str) -> object:
        if key == "sample" and NUMBER.fullmatch(value):
            return int(value)
        # The page puts a ' before what a spreadsheet would take for a formula, and before a '.
        return value[1:] if value.startswith("'") and value[1:] in names.get(key, ()) else value

    return data, [{key: named(key, value) for key, value in row.items()} for row in rows]


def _cells(text: str) -> list[list[str]]:
    """The lines of a CSV, each with as many cells as the first; empty ones are left out."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    lines: list[list[str]] = []
    try:
        for line in reader:
            if lines and line and len(line) != len(lines[0]):
                said = f"line {reader.line_num} has {len(line)} cells and the first one {len(lines[0])}"
                raise InputError(f"{said}; needed: the page's export as it is.")
            lines += [line] if line else []
    except csv.Error as e:
        raise InputError(f"line {reader.line_num} is no CSV ({e}); needed: the page's export as it is.") from None
    if lines and (twice := [name for name, many in Counter(lines[0]).items() if many > 1]):
        raise InputError(f"two columns are called {brief(twice[0])}; needed: the page's export as it is.")
    return lines


def _equal(value: object, number: int) -> bool:
    """Whether it is this whole number: true is not 1."""
    return whole(value) and value == number


def _one(data: Labelled, row: Mapping[str, object]) -> Decided:
    """One decision, checked."""
    number, action, label = row.get("sample"), row.get("action"), row.get("label")
    if not whole(number, 0, len(data) - 1):
        raise InputError(f"sample {brief(number)}; needed: a number from 0 to {len(data) - 1}.")
    number = int(number)  # type: ignore[call-overload]  # a whole number
    if action not in ACTIONS:
        raise InputError(f"sample {number}: action {brief(action)}; needed: one of {', '.join(ACTIONS)}.")
    given, own = row.get("given"), data.classes[int(data.y[number])]
    if given is not None and given != own:
        raise InputError(f"sample {number} was {brief(given)} then and is {own!r} in the data. {AS_THEN}")
    called = row.get("id")
    if called and data.ids is not None and called != data.ids[number]:
        raise InputError(
            f"sample {number} was called {brief(called)} then and is {data.ids[number]!r} in the data. {AS_THEN} (If a "
            "spreadsheet has changed the names: delete the column id.)"
        )
    if action == "fix" and label not in data.classes:
        raise InputError(f"sample {number}: label {brief(label)}; the classes are {checks.some(list(data.classes))}.")
    return Decided(number, str(action), str(label) if action == "fix" else None)
