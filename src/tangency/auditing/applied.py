"""What a person decided about suspects on the page, taken to the labels."""

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from .._base import checks
from .._base.types import FilePath
from ..datasets import Labelled
from ..datasets.files import path, read_bytes
from ..errors import InputError

ACTIONS = ("keep", "fix", "drop")
VERSION = 1


@dataclass(frozen=True)
class Decided:
    """What one sample's label gets: "keep", "drop", or "fix" with the new class."""

    sample: int
    action: str
    label: str | None = None


def digest(y: Tensor) -> str:
    """Which labels they are: decisions about others are refused."""
    return hashlib.sha256(y.detach().cpu().long().contiguous().numpy().tobytes()).hexdigest()[:16]


def apply(data: Labelled, decisions: FilePath | Mapping[str, object]) -> Labelled:
    """The samples that were kept, with the labels that were fixed: by the page's export, a .json or .csv, or a dict.

    `data` are the samples that were audited, with the labels they had then: decisions about others are refused (a CSV
    does not say which labels it is about, so there only the sample numbers are checked, and the labels it quotes).

    >>> data = Labelled(torch.eye(3), [0, 1, 1], ("cat", "dog"))
    >>> decided = {"tangency_audit": 1, "samples": 3, "labels": digest(data.y),
    ...            "decisions": [{"sample": 1, "action": "fix", "label": "cat"}, {"sample": 2, "action": "drop"}]}
    >>> apply(data, decided).y.tolist()
    [0, 0]
    """
    y, kept = decided(data, decisions)
    return replace(data, y=y).select(kept)


def decided(data: Labelled, decisions: FilePath | Mapping[str, object]) -> tuple[Tensor, Tensor]:
    """The labels of all samples after the decisions, and a mask of those that are kept."""
    y, kept = data.y.clone(), torch.ones(len(data), dtype=torch.bool)
    for one in _read(data, decisions):
        if one.action == "drop":
            kept[one.sample] = False
        elif one.action == "fix":
            assert one.label is not None
            y[one.sample] = data.classes.index(one.label)
    if not bool(kept.any()):
        raise InputError("every sample is dropped; needed: decisions that keep some.")
    return y, kept


def _read(data: Labelled, decisions: FilePath | Mapping[str, object]) -> list[Decided]:
    """Checked against the data."""
    where = "the decisions" if isinstance(decisions, Mapping) else str(decisions)
    try:
        rows = _rows(data, decisions if isinstance(decisions, Mapping) else path(decisions, "decisions"))
        found = [_one(data, row) for row in rows]
        twice = [sample for sample, many in Counter(d.sample for d in found).items() if many > 1]
        if twice:
            raise InputError(f"sample {twice[0]} is there twice; needed: one decision for each sample.")
    except InputError as e:
        raise InputError(f"{where}: {e}") from None
    return found


def _rows(data: Labelled, decisions: Path | Mapping[str, object]) -> Sequence[Mapping[str, object]]:
    """One for each decision, unchecked."""
    if isinstance(decisions, Path):
        try:
            text = read_bytes(decisions, "the page's export").decode("utf-8-sig")
        except UnicodeDecodeError:
            raise InputError("no text (UTF-8); needed: the page's export as it is.") from None
        if decisions.suffix.lower() == ".csv":
            return _csv_rows(text, data.classes)
        try:
            decisions = json.loads(text)
        except json.JSONDecodeError as e:
            raise InputError(f"no JSON ({e}); needed: the page's export (.json, or .csv by that name).") from None
    if not isinstance(decisions, Mapping) or decisions.get("tangency_audit") != VERSION:
        raise InputError(f'no decisions of an audit; needed: the page\'s export, with "tangency_audit": {VERSION}.')
    if decisions.get("samples") != len(data) or decisions.get("labels") != digest(data.y):
        raise InputError(
            f"about {decisions.get('samples')} samples with the labels {decisions.get('labels')}; the data have "
            f"{len(data)} with {digest(data.y)}. Give the training set that was audited, with the labels it had then."
        )
    rows = decisions.get("decisions")
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise InputError('"decisions" is no list of decisions; needed: the page\'s export as it is.')
    return rows


def _csv_rows(text: str, classes: Sequence[str]) -> list[dict[str, object]]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    missing = {"sample", "action", "given", "label"} - set(reader.fieldnames or ())
    if missing:
        raise InputError(f"no column {checks.some(sorted(missing))}; needed: the page's export as it is.")
    names = set(classes)

    def named(key: str, value: str | None) -> str | None:
        # The page puts a ' before what a spreadsheet would take for a formula, and before a '.
        ours = key in ("given", "label") and value is not None and value.startswith("'") and value[1:] in names
        return value[1:] if ours and value is not None else value

    return [{k: named(k, v) for k, v in row.items() if k is not None} for row in reader]


def _one(data: Labelled, row: Mapping[str, object]) -> Decided:
    """One decision, checked."""
    sample, action, label = row.get("sample"), row.get("action"), row.get("label")
    try:
        number = int(str(sample))
    except ValueError:
        number = -1
    if isinstance(sample, bool) or not 0 <= number < len(data):
        raise InputError(f"sample {sample!r}; needed: a number from 0 to {len(data) - 1}.")
    if action not in ACTIONS:
        raise InputError(f"sample {number}: action {action!r}; needed: one of {', '.join(ACTIONS)}.")
    given, own = row.get("given"), data.classes[int(data.y[number])]
    if given is not None and given != own:
        raise InputError(
            f"sample {number} was {given!r} then and is {own!r} in the data. Give the training set that was audited, "
            "with the labels it had then."
        )
    if action == "fix" and label not in data.classes:
        raise InputError(f"sample {number}: label {label!r}; the classes are {checks.some(list(data.classes))}.")
    return Decided(number, str(action), str(label) if action == "fix" else None)
