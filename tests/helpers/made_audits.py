"""Audits of data that never were: real ones, of points around centres, some with wrong labels, some there twice."""

from dataclasses import replace
from typing import Any

import torch
from made_decisions import NASTY, smooth
from torch import Tensor

import tangency as tg
from tangency._base.types import Json
from tangency.auditing import Audit, Region
from tangency.auditing.audit import examine
from tangency.auditing.data import Data
from tangency.auditing.machine import GramMachine
from tangency.datasets import Labelled
from tangency.linalg.matrix import between, square

# Names that a file, a page or a spreadsheet may take for something else.
NAMES = (
    'say "cheese", please', "=1+1", "two\nlines", "-1", "'quoted", "", "\u202eturned", "\u05e9\u05dc\u05d5\u05dd",
    f"<img src=x onerror='window.hacked = 3'>{NASTY}", "ends\r\nlike Windows ", "\t@SUM(A1)", "été, 雪",
)  # fmt: skip


def points(n: int, c: int, seed: int, d: int = 24) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    centres = 4 * torch.randn(c, d, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n) % c
    return centres[y] + torch.randn(n, d, generator=make), y


def shown(kind: str, n: int, seed: int) -> dict[str, Any]:
    if kind == "pictures":
        return {"show": smooth(n, 3, 24, seed)}
    if kind == "texts":
        return {"show": [f"text {i} {NASTY} the plot was slow, again " * 3 for i in range(n)]}
    return {}


def audited(
    kind: str = "pictures",
    n: int = 160,
    c: int = 4,
    *,
    m: int = 60,
    wrong: int = 9,
    names: tuple[str, ...] = (),
    samples: int = 40,
    twice: bool = True,
    ids: bool = True,
    **options: Any,
) -> Audit:
    """`wrong` of n labels are the next class's; with `twice` training samples 20 and 40 are copies of 10 and 30, which
    has another label, test sample 7 of training sample 50."""
    x, y = points(n, c, 1)
    z, t = points(max(1, m), c, 2)
    given = y.clone()
    given[:wrong] = (given[:wrong] + 1) % c
    if twice:
        x[20], x[40] = x[10], x[30]
        given[20] = given[10]
        given[40] = (given[30] + 1) % c
        z[7 % len(z)] = x[50]
    classes = names or tuple(f"kind {k}" for k in range(c))
    named = [f"{'=' if i % 7 == 0 else ''}file {i}, of {NASTY if i == 3 else 'many'}.png" for i in range(n)]
    inputs = x if kind == "rows" else {"x": x}
    asked = z if kind == "rows" else {"x": z}
    train = Labelled(inputs, given, classes, name="made up", ids=named if ids else None, **shown(kind, n, 1))
    test = Labelled(asked, t, classes, name="made up", **shown(kind, m, 2)) if m else None
    machine = GramMachine(square(x @ x.T), *((between(z @ x.T), z.square().sum(1)) if m else ()))
    data = Data(train, test)
    facts: dict[str, Json] = {
        "model": f"made-up network {NASTY}",
        "data": "made up",
        "titles": {"K": "a kernel"},
        "said": "",
    }
    return examine({"K": machine}, data, None, samples, 6, False, facts, (inputs, asked if m else None), **options)


def with_regions(a: Audit) -> Audit:
    rows = torch.arange(5, 25)
    region = Region(rows, 9, 0.08, 1e-4, f"9 of 9 mistakes take {a.train.classes[0]} for {a.train.classes[1]}.")
    assert a.cleaning is not None
    cleaning = replace(a.cleaning, retrained={"as given": 0.9, "dropped": 0.93, "mended": 0.94})
    return replace(a, regions=(region,), cleaning=cleaning, warnings=(f"the network has learned its labels {NASTY}.",))


def of_targets() -> Audit:
    x, _ = points(120, 3, 4, 5)
    y = x @ torch.linspace(-1, 1, 5)
    y[:4] += 30
    return tg.auditing.audit_gram(x @ x.T, y.double(), samples=20, progress=False)
