"""Tampered decisions: JSON and CSV with bytes, cells, columns, numbers and data exchanged.

What `tg.auditing.apply` takes must be what a plain reader of the same file takes for the same data; all else is to be
refused in our words.
"""

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch

import tangency as tg
from tangency.auditing.applied import digest, stamp
from tangency.errors import TangencyError

from .cases import Case

N = 40
NAMES = ("ant", "bee", "=cow")


def data() -> tg.datasets.Labelled:
    """What was audited."""
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    return tg.datasets.Labelled(x, torch.arange(N) % 3, NAMES, ids=[f"i{k}" for k in range(N)])


def others(one: tg.datasets.Labelled, draw: Random) -> tg.datasets.Labelled:
    """Other data than those."""
    order = torch.tensor(draw.sample(range(N), N))
    changed = one.x.clone()  # type: ignore[union-attr]
    changed[draw.randrange(N), 0] += 1e-6
    y = one.y.clone()
    y[draw.randrange(N)] += 1
    return draw.choice(
        [
            one.select(order), one.select(torch.arange(N - 1)), replace(one, x=changed), replace(one, y=y % 3),
            replace(one, classes=("ant", "bee", "cat")), replace(one, x=one.x.double()),  # type: ignore[union-attr]
            tg.datasets.Labelled(torch.randn(45, 9), torch.arange(45) % 3, NAMES),
        ]
    )  # fmt: skip


def written(one: tg.datasets.Labelled, draw: Random) -> tuple[str, str]:
    """A JSON and a CSV of the same decisions, as the page writes them."""
    rows: list[dict[str, Any]] = []
    for k in sorted(draw.sample(range(N), 8)):
        action = draw.choice(["keep", "fix", "drop"])
        rows.append({"sample": k, "action": action} | ({"label": draw.choice(NAMES)} if action == "fix" else {}))
    about = digest(one)
    whole = {"tangency_audit": 1, "samples": N, "data": about, "decisions": rows}
    lines = [["sample", "id", "given", "action", "label", "probability", "margin", "audited"]]
    guard = lambda name: f"'{name}" if name[:1] == "=" else name  # noqa: E731
    for row in rows:
        k = int(row["sample"])
        label = guard(str(row.get("label", "")))
        lines.append([str(k), f"i{k}", guard(NAMES[k % 3]), str(row["action"]), label, "0.5", "-1", stamp(N, about)])
    text = io.StringIO()
    csv.writer(text).writerows(lines)
    return json.dumps(whole, indent=1), "\ufeff" + text.getvalue()


def tampered(text: str, draw: Random) -> str:
    """A change that a disk, an editor, a spreadsheet or somebody's hand makes."""
    at = draw.randrange(len(text))
    lines = text.split("\n")
    k = draw.randrange(len(lines))
    cells = lines[k].split(",")
    c = draw.randrange(len(cells))
    ways = [
        lambda: text[:at] + chr(ord(text[at]) ^ 1 << draw.randrange(7)) + text[at + 1 :],
        lambda: text[:at],
        lambda: text[:at] + draw.choice(['"', ",", "\n", "\x00", "１", "[", "{", "true", "NaN", "\u202e"]) + text[at:],
        lambda: "\n".join([*lines[:k], *lines[k + 1 :]]),
        lambda: "\n".join([*lines[: k + 1], *lines[k:]]),
        lambda: "\n".join([*lines[:k], ",".join([*cells[:c], *cells[c + 1 :]]), *lines[k + 1 :]]),
        lambda: "\n".join([*lines[:k], ",".join([*cells[: c + 1], *cells[c:]]), *lines[k + 1 :]]),
        lambda: text.replace("1", draw.choice(["１", "true", "1.0", "1e0", "-1", "1" * 5000]), draw.randrange(1, 5)),
        lambda: text.replace(",", ";"),
        lambda: text.replace("drop", draw.choice(["DROP", "drop ", "keep", "[" * 3000]), 1),
        lambda: "[" * 10**5 + text,
        lambda: "",
        lambda: text + text,
    ]
    return draw.choice(ways)()


def plainly(text: str, table: bool) -> dict[int, tuple[str, str]] | None:
    """The decisions as a plain reader takes them; None if it is at a loss."""
    try:
        if table:
            found = list(csv.DictReader(io.StringIO(text.removeprefix("\ufeff"), newline="")))
        else:
            found = json.loads(text)["decisions"]
        bare = lambda v: v[1:] if table and v[:2] == "'=" else v  # noqa: E731
        return {int(r["sample"]): (r["action"], bare(r.get("label") or "")) for r in found}
    except (ValueError, KeyError, TypeError, csv.Error, RecursionError, AttributeError):
        return None


def attack(folder: Path, count: int, draw: Random) -> list[Case]:
    """So many files, half of each format: half tampered, half as they were for other data, some for the same."""
    one, found = data(), []
    for k in range(count):
        table = bool(k % 2)
        text = written(one, draw)[table]
        other, whole = k % 4 > 1, k % 10 == 0
        given = others(one, draw) if other and not whole else one
        text = text if other or whole else tampered(text, draw)
        file = folder / f"decisions.{'csv' if table else 'json'}"
        file.write_text(text, encoding="utf-8", newline="")
        how = "as it was" if whole else "for other data" if other else "tampered"
        found.append(_case(file, text, table, given, how, f"{k}: {text[:300]!r}"))
    return found


def _case(file: Path, text: str, table: bool, given: tg.datasets.Labelled, how: str, name: str) -> Case:
    kind = f"{file.suffix[1:]} {how}"
    try:
        clean = tg.auditing.apply(given, file)
    except TangencyError as e:
        return Case(kind, name, "wrong" if how == "as it was" else "refused", str(e))
    except BaseException as e:
        return Case(kind, name, "raw", repr(e))
    expected = plainly(text, table)
    if how == "for other data" or expected is None:
        return Case(kind, name, "wrong", f"taken, with {len(clean)} samples")
    y = {k: NAMES[int(v)] for k, v in enumerate(given.y)}
    for k, (action, label) in expected.items():
        y |= {k: label} if action == "fix" else {}
        if action == "drop":
            del y[k]
    same = list(y.values()) == [clean.classes[int(v)] for v in clean.y]
    return Case(kind, name, "done" if same else "wrong", f"{expected}")
