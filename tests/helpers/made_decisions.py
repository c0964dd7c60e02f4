"""Decisions of networks that never were, made up but consistent, and what a page says of them."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tangency._base.types import Json
from tangency.datasets import Labelled
from tangency.decisions import Decisions, Explanation
from tangency.decisions.attribution import Attribution
from tangency.surrogate import Faithfulness, Interval, MonotoneMap, Surrogate

ANIMALS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
# ---- decisions, made up but consistent ------------------------------------------------------------------------------


def attribution(
    kernel: Tensor, weights: Tensor, bias: Tensor, outputs: Tensor, y: Tensor, c: int, k: int
) -> Attribution:
    """The definition, slowly: A = W κ + b / N, its boxes and its extremes."""
    n = len(y)
    a = torch.stack([kernel * weights[:, o].T + bias[o, None] / n for o in outputs.T], 1)  # [s, q, n]
    boxes, outliers = torch.full((*a.shape[:2], c, 6), torch.nan), torch.zeros(*a.shape[:2], c, dtype=torch.long)
    fliers = torch.full((*a.shape[:2], c, 6), torch.nan)
    for t in range(c):
        part = a[..., y == t]
        if not part.shape[-1]:
            continue
        low, mid, high = torch.quantile(part, torch.tensor([0.25, 0.5, 0.75]), dim=-1)
        reach = 1.5 * (high - low)
        inside = (part >= (low - reach)[..., None]) & (part <= (high + reach)[..., None])
        ends = part.masked_fill(~inside, torch.inf).amin(-1), part.masked_fill(~inside, -torch.inf).amax(-1)
        boxes[:, :, t] = torch.stack([ends[0], low, mid, high, ends[1], part.mean(-1)], -1)
        outliers[:, :, t] = (~inside).sum(-1)
        far = (part - mid[..., None]).abs().masked_fill(inside, -1).topk(min(6, part.shape[-1]), -1)
        fliers[:, :, t, : far.indices.shape[-1]] = part.gather(-1, far.indices).masked_fill(far.values < 0, torch.nan)
    similar, best, worst = kernel.topk(k, 1), a.topk(k, -1), a.topk(k, -1, largest=False)
    return Attribution(
        outputs, a.sum(-1), boxes, outliers, fliers, similar.indices, similar.values, best.indices, best.values,
        worst.indices, worst.values,
    )  # fmt: skip


def faithfulness(logits: Tensor, network: Tensor, y: Tensor, tau: float) -> Faithfulness:
    accuracy, theirs = (float((v.argmax(1) == y).double().mean()) for v in (logits, network))
    ends = {key: Interval(v - 0.03, v + 0.03) for key, v in (("tau", tau), ("tad", accuracy - theirs), ("r2", 0.8))}
    line = MonotoneMap(torch.tensor([-6.0, -1.0, 2.0, 8.0]), torch.tensor([-9.0, -1.5, 3.0, 14.0]))
    return Faithfulness(tau, accuracy - theirs, 0.9, 0.8, line, accuracy, theirs, ends, 0.95, len(y))


def opening(d: Decisions) -> int:
    """The sample that the page opens on: the first misclassified one of those explained, or the first."""
    wrong = d.shown[(d.logits.argmax(1) != d.test.y)[d.shown]]
    return int(wrong[0] if len(wrong) else d.shown[0])


def picture_of(kernel: Tensor, y: Tensor, c: int, g: int = 60) -> tuple[Tensor, Tensor]:
    order = y.argsort(stable=True)
    picture = F.interpolate(kernel[order][:, order][None, None], (g, g), mode="area")[0, 0]
    ends = (torch.bincount(y, minlength=c).cumsum(0) * g / len(y)).round().long()
    return picture, ends.diff(prepend=torch.zeros(1, dtype=torch.long))


def decide(
    train: Labelled,
    test: Labelled,
    *,
    kernels: int = 3,
    shown: int = 24,
    k: int = 6,
    noise: float = 1.0,
    poison: bool = False,
) -> Decisions:
    """Decisions of a made-up network, with kernels that follow it more or less."""
    c, n, m = len(train.classes), len(train), len(test)
    make = torch.Generator().manual_seed(7)
    random = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    centres = random(c, 24)
    both = torch.cat([train.y, test.y])
    base = centres[both] + noise * random(n + m, 24)
    network = (F.normalize(base[n:], dim=1) @ F.normalize(centres, dim=1).T) * 9
    rows = torch.arange(m)[:: max(1, m // shown)][:shown]
    names = ["trNTK", "CK", "pNTK", "Em", "embedding NTK", "a", "b", "d"]
    views = []
    for i in range(kernels):
        features = F.normalize(base + 0.35 * (i + 1) * random(n + m, 24), dim=1)
        gram, cross = features[:n] @ features[:n].T, features[n:] @ features[:n].T
        target = F.one_hot(train.y, c).float() - 1 / c
        weights, bias = 12 * torch.linalg.solve(gram + 2 * torch.eye(n), target), 0.1 * random(c)
        logits = cross @ weights + bias
        outputs = network[rows].topk(min(2, c), 1).indices
        picture, spans = picture_of(gram, train.y, c)
        flagged = (torch.arange(m) % (4 + i) == 0) if poison else None
        machine = Surrogate(weights, bias, 1e-3, "l2", "newton", 7, 3e-9 * 7**i, 0.1)
        faith = faithfulness(logits, network, test.y, 0.8 - 0.1 * i)
        found = attribution(cross[rows], weights, bias, outputs, train.y, c, k)
        title, spectrum = f"a made-up kernel, number {i + 1}", torch.linalg.eigvalsh(gram).flip(0)
        seconds = 1.5 + 60 * i
        views.append(
            Explanation(names[i], title, machine, faith, logits, found, picture, spans, spectrum, seconds, flagged)
        )
    facts: dict[str, Json] = {
        "model": "made-up network",
        "data": test.name,
        "parameters": 1234567,
        "seconds": 12.5,
        "device": "cpu",
        "kernels": names[:kernels],
    }
    dirty = (torch.arange(n) % 9 == 0, torch.arange(m) % 5 == 0) if poison else (None, None)
    return Decisions(train, test, network, tuple(views), rows, facts, *dirty)


def smooth(n: int, channels: int, side: int, seed: int = 0) -> Tensor:
    """Pictures without noise, roughly as photographs are."""
    coarse = torch.rand(n, channels, 5, 5, generator=torch.Generator().manual_seed(seed))
    return (F.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1) * 255).byte()


def labels(n: int, c: int, seed: int = 0) -> Tensor:
    return torch.randint(c, (n,), generator=torch.Generator().manual_seed(seed))


def pictured(channels: int = 3, side: int = 32, c: int = 10, **options: Any) -> Decisions:
    classes = ANIMALS if c == 10 else tuple(f"kind {k}" for k in range(c))
    train = Labelled(
        torch.zeros(160, 1), labels(160, c), classes, show=smooth(160, channels, side), name="smooth pictures"
    )
    test = Labelled(
        torch.zeros(90, 1), labels(90, c, 1), classes, show=smooth(90, channels, side, 1), name="smooth pictures"
    )
    return decide(train, test, **options)


NASTY = "<script>window.hacked = 1</script>"


def written(c: int = 2, **options: Any) -> Decisions:
    words = ["slow", "great", "music", "a", "the", "plot", "was", "never", "again"]
    pick = torch.Generator().manual_seed(3)
    text = lambda i: f"text {i} {NASTY} " + " ".join(words[int(k)] for k in torch.randint(9, (40,), generator=pick))  # noqa: E731
    classes = (f"<img src=x onerror='window.hacked = 2'>{NASTY}", "good & fine")[:c]
    train = Labelled(
        torch.zeros(80, 1), labels(80, c), classes, show=[text(i) for i in range(80)], name=f"reviews {NASTY}"
    )
    test = Labelled(
        torch.zeros(40, 1), labels(40, c, 1), classes, show=[text(1000 + i) for i in range(40)], name=f"reviews {NASTY}"
    )
    made = decide(train, test, noise=2.5, **options)
    facts = {**made.facts, "model": f"</script>{NASTY}", "note": NASTY}
    views = tuple(replace(v, title=f"{v.title} {NASTY}") for v in made.explanations)
    return replace(made, facts=facts, explanations=views)


def tabled(**options: Any) -> Decisions:
    make = torch.Generator().manual_seed(5)
    columns = tuple(f"measurement {k}" for k in range(30))
    classes = ("setosa", "versicolor", "virginica with a very long name that goes on and on")
    train = Labelled(torch.randn(90, 30, generator=make), labels(90, 3), classes, columns=columns, name="flowers")
    test = Labelled(torch.randn(40, 30, generator=make), labels(40, 3, 1), classes, columns=columns, name="flowers")
    return decide(train, test, **options)


# ---- what a page says -----------------------------------------------------------------------------------------------


def place(d: Decisions, at: int = 0) -> str:
    """The address of one of the explained samples: without it the page opens on a misclassified one."""
    return f"#sample={int(d.shown[at])}"


def sample(page: Any) -> int:
    return int(re.fullmatch(r"Test sample #(\d+)", page.inner_text("#sample-title"))[1])  # type: ignore[index]


def listed(page: Any) -> list[int]:
    return page.eval_on_selector_all("#strip .entry", "nodes => nodes.map((n) => Number(n.dataset.sample))")


def neighbours(page: Any, kind: str) -> list[tuple[int, float]]:
    read = "nodes => nodes.map((n) => [Number(n.dataset.index), Number(n.dataset.value)])"
    return [tuple(pair) for pair in page.eval_on_selector_all(f"[data-list={kind}] .tile", read)]


def values(page: Any, selector: str) -> Tensor:
    return torch.tensor(page.eval_on_selector_all(selector, "nodes => nodes.map((n) => Number(n.dataset.value))"))


def check_numbers(page: Any, d: Decisions, at: int, view: int, output: int) -> None:
    """What the page shows of one sample is what the decisions hold."""
    v, a = d.explanations[view], d.explanations[view].attribution
    assert sample(page) == int(d.shown[at])
    for kind, index, amount in (
        ("similar", a.similar[at], a.similarity[at]),
        ("helpful", a.helpful[at, output], a.help[at, output]),
        ("harmful", a.harmful[at, output], a.harm[at, output]),
    ):
        seen = neighbours(page, kind)
        assert [i for i, _ in seen] == index.tolist()
        torch.testing.assert_close(torch.tensor([x for _, x in seen]), amount)
    for column, logits in (("network", d.logits), ("surrogate", v.logits)):
        shown = values(page, f".probabilities td.{column}")
        torch.testing.assert_close(shown, logits[d.shown[at]].softmax(0), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(values(page, "#total"), a.totals[at, output][None])
    # The means lie on the axis where they belong: one straight line leads from numbers to pixels.
    read = "nodes => nodes.map((n) => Number(n.getAttribute('x1')))"
    x = np.array(page.eval_on_selector_all("#boxes .mean", read))
    mean = a.boxes[at, output, :, 5].double().numpy()
    slope, start = np.polyfit(mean, x, 1)
    assert slope > 0
    np.testing.assert_allclose(slope * mean + start, x, atol=0.2)
