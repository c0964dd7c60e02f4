"""The numbers of a page: what `Decisions` holds, cut to what is shown. The names are those that numbers.js reads."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.strict_json import plain, plain_dict
from ..decisions import Decisions, Explanation
from ..decisions.verdict import CLOSELY, IN_PART, RULE
from ..surrogate import Faithfulness, MonotoneMap, log_odds
from . import pack
from .pack import Content

# Test samples in the scatter plot, and points of a spectrum.
POINTS, VALUES = 2000, 240
# Up to this many classes everything is shown of each; of more, the so many that matter most for a sample.
CLASSES, CHOSEN = 24, 12
# The confusion matrix, which scrolls, has all of up to so many classes; of more, so many with most mistakes.
MATRIX, CONFUSED = 100, 20
# Rows of the picture of a Gram, outliers of a box that are drawn.
ROWS, FLIERS = 200, 8
# Log-odds beyond this are drawn at it: a double cannot tell such probabilities from 0 and 1.
LIMIT = 60.0


def odds_of(logits: Tensor, y: Tensor) -> Tensor:
    """Log-odds of the true class, within what can be drawn.

    >>> odds_of(torch.tensor([[100.0, 0.0]]), torch.tensor([1]))
    tensor([-60.], dtype=torch.float64)
    """
    return log_odds(logits.detach().cpu().double(), y.cpu(), outputs_are="logits").clamp(-LIMIT, LIMIT)


def listed_samples(decisions: Decisions, length: int) -> Tensor:
    """The training samples in lists of this length, in the order of their numbers."""
    parts = [torch.zeros(0, dtype=torch.long)]
    for explanation in decisions.explanations:
        a = explanation.attribution
        parts += [samples[..., :length].flatten().cpu() for samples in (a.similar, a.helpful, a.harmful)]
    return torch.cat(parts).unique()


def content(decisions: Decisions, length: int, refer: Tensor) -> Content:
    """Everything but what the samples look like; `refer`: the training samples with a place on the page."""
    d, frame, classes = decisions, _frame(decisions, length, refer), _classes(decisions)
    shown, points, y = frame.shown, frame.points, d.test.y.cpu()
    said = d.logits.argmax(1).cpu()
    return {
        "classes": classes,
        "counts": {"train": len(d.train.y), "test": len(y), "by_class": frame.counts.tolist()},
        "wrong": int((said != y).sum()),
        "warning": d.warning,
        "accuracy": _accuracy(d),
        "second": None if d.second is None else _faithful(d.second),
        "words": {"closely": CLOSELY, "in part": IN_PART, "rule": RULE},
        "shown": pack.integers(shown),
        "truth": pack.integers(y[shown]),
        "said": pack.integers(said[shown]),
        "poisoned": None if d.poisoned_test is None else pack.bits(d.poisoned_test.cpu()[shown]),
        "train": {
            "index": pack.integers(refer),
            "truth": pack.integers(d.train.y.cpu()[refer]),
            "poisoned": None if d.poisoned_train is None else pack.bits(d.poisoned_train.cpu()[refer]),
        },
        "kept": pack.integers(frame.kept),
        "probability": pack.floats(_probability(d.logits, frame)),
        "confusion": {"classes": frame.confused.tolist(), "network": _confusion(d.logits, y, frame.confused)},
        "scatter": {
            "index": pack.integers(points),
            "right": pack.bits((said == y)[points]),
            "network": pack.floats(odds_of(d.logits, d.test.y)[points]),
        },
        "views": [_view(d, explanation, frame) for explanation in d.explanations],
    }


@dataclass(frozen=True, eq=False)
class Frame:
    """What is shown, for all kernels alike: numbers of samples and of classes."""

    length: int  # of the lists of training samples
    refer: Tensor  # training samples with a place on the page
    shown: Tensor  # test samples that are explained
    points: Tensor  # test samples in the scatter plot
    kept: Tensor  # [s, p] classes whose probabilities are shown
    confused: Tensor  # classes in the confusion matrix
    counts: Tensor  # training samples of each class


def _frame(d: Decisions, length: int, refer: Tensor) -> Frame:
    """What is shown of these decisions."""
    c, shown = len(_classes(d)), d.shown.cpu()
    counts = torch.bincount(d.train.y.cpu(), minlength=c)
    return Frame(length, refer, shown, _points(d), _kept(d, shown), _confused(d, c), counts)


def _probability(logits: Tensor, frame: Frame) -> Tensor:
    """Of the classes that are kept, for the samples that are explained, [s, p]."""
    return logits.cpu()[frame.shown].double().softmax(1).gather(1, frame.kept)


def _view(d: Decisions, view: Explanation, frame: Frame) -> Content:
    """What the page has of one kernel."""
    odds, network = odds_of(view.logits, d.test.y), odds_of(d.logits, d.test.y)
    shown, points, f, s = frame.shown, frame.points, view.faithfulness, view.surrogate
    # The line of the map is drawn from the first point to the last, through all knots between.
    ends = torch.stack(odds[points].aminmax())
    line = MonotoneMap(f.map.knots.detach().cpu().double(), f.map.values.detach().cpu().double())
    knots = _thinned(torch.cat([ends, line.knots.clamp(-LIMIT, LIMIT)]).unique(), VALUES)
    return {
        "name": view.name,
        "title": view.title,
        "faithful": _faithful(f),
        "chance": None if view.chance is None else plain([view.chance.low, view.chance.high]),
        "verdict": _verdict(d, view),
        "fit": plain(
            {
                "gradient": s.gradient,
                "loss": s.loss,
                "reg": s.reg,
                "penalty": s.penalty,
                "solver": s.solver,
                "steps": s.steps,
                "seconds": view.seconds,
            }
        ),
        "said": pack.integers(view.logits.argmax(1).cpu()[shown]),
        "off": pack.floats((line(odds) - network)[shown]),
        "flagged": None if view.flagged is None else pack.bits(view.flagged.cpu()[shown]),
        "probability": pack.floats(_probability(view.logits, frame)),
        "scatter": pack.floats(odds[points]),
        "line": [pack.floats(knots), pack.floats(line(knots))],
        "confusion": _confusion(view.logits, d.test.y.cpu(), frame.confused),
        "gram": _gram(view),
        "spectrum": _spectrum(view),
        **_attribution(view, frame),
    }


def _faithful(f: Faithfulness) -> Content:
    """The figures and their intervals."""
    intervals = {key: [v.low, v.high] for key, v in f.intervals.items()}
    names = ("tau", "tad", "pearson", "r2", "accuracy", "balanced_accuracy", "network_accuracy")
    numbers = {key: getattr(f, key) for key in names}
    return plain_dict({**numbers, "intervals": intervals, "level": f.level, "samples": f.samples})


def _accuracy(d: Decisions) -> Content:
    """The network's, and what it is to be held against."""
    often, majority = d.majority
    return plain_dict(
        {"network": d.accuracy, "balanced": d.balanced_accuracy, "majority": majority, "most frequent": often}
    )


def _verdict(d: Decisions, view: Explanation) -> Content:
    """What τ_K means, in words."""
    said = d.verdict(view.name)
    return {"word": said.word, "sentence": said.sentence, "against": list(said.against)}


def _attribution(view: Explanation, frame: Frame) -> Content:
    """Lists of neighbours as places in `refer`; boxes of all classes, or of those with the largest sums."""
    a, k = view.attribution, frame.length
    boxes, fliers, outliers = (v.detach().cpu() for v in (a.boxes, a.fliers, a.outliers))
    t = boxes.shape[2]
    # A box has the mean; times the samples of its class it is their part of the logit.
    sums = (boxes[..., 5].double() * frame.counts[:t]).nan_to_num(0)
    weight = sums.abs()
    weight.scatter_(2, a.outputs.cpu()[..., None], torch.inf)  # the class that is explained is always there
    classes = weight.topk(min(t, CLASSES if t <= CLASSES else CHOSEN), -1).indices.sort(-1).values
    # Padding is NaN, and nearest to everything.
    far = (fliers - boxes[..., 2:3]).abs().nan_to_num(-1)
    fliers = fliers.gather(3, far.topk(min(FLIERS, fliers.shape[3]), -1).indices)

    def chosen(v: Tensor) -> Tensor:
        """Of [s, q, t, …], the classes that are shown."""
        index = classes.reshape(*classes.shape, *[1] * (v.dim() - 3)).expand(*classes.shape, *v.shape[3:])
        return v.gather(2, index)

    def places(v: Tensor) -> pack.Packed:
        """Numbers of training samples as places in `refer`, which is sorted."""
        return pack.integers(torch.searchsorted(frame.refer, v[..., :k].cpu().contiguous()))

    return {
        "outputs": pack.integers(a.outputs),
        "totals": pack.floats(a.totals),
        "boxes": {
            "classes": pack.integers(classes),
            "values": pack.quantised(torch.cat([chosen(boxes), chosen(fliers)], -1), 2),
            "sums": pack.floats(chosen(sums)),
            "all": classes.shape[2] == t,
            "rest": pack.floats(sums.sum(-1) - chosen(sums).sum(-1)),
            "outliers": pack.integers(chosen(outliers)),
        },
        "lists": {
            "similar": [
                places(a.similar),
                pack.floats(a.similarity[..., :k]),
                None if view.cosines is None else pack.floats(view.cosines[..., :k]),
            ],
            "helpful": [places(a.helpful), pack.floats(a.help[..., :k])],
            "harmful": [places(a.harmful), pack.floats(a.harm[..., :k])],
        },
    }


def _classes(d: Decisions) -> list[str]:
    """A name for each class and each output."""
    names = list(d.train.classes if len(d.train.classes) >= len(d.test.classes) else d.test.classes)
    return names + [f"output {k}" for k in range(len(names), d.logits.shape[1])]


def _points(d: Decisions) -> Tensor:
    """Test samples for the scatter plot: those explained one by one, then others at random; always the same."""
    m = len(d.test.y)
    if m <= POINTS:
        return torch.arange(m)
    shown = d.shown.cpu()[:POINTS]
    order = torch.randperm(m, generator=torch.Generator().manual_seed(0))
    others = order[~torch.isin(order, shown)][: POINTS - len(shown)]
    return torch.cat([shown, others]).sort().values


def _kept(d: Decisions, shown: Tensor) -> Tensor:
    """[s, p]: all classes, or for each sample the likeliest (for anyone) and the true one."""
    c = d.logits.shape[1]
    if c <= CLASSES:
        return torch.arange(c).expand(len(shown), c).contiguous()
    logits = (d.logits, *(e.logits for e in d.explanations))
    likeliest = torch.stack([z.cpu()[shown].double().softmax(1) for z in logits]).amax(0)
    weight = likeliest.scatter(1, d.test.y.cpu()[shown, None], 2.0)  # above every probability
    return weight.topk(CHOSEN, 1).indices.sort(1).values


def _confused(d: Decisions, c: int) -> Tensor:
    """All classes, or those with most mistakes of the network."""
    if c <= MATRIX:
        return torch.arange(c)
    y, said = d.test.y.cpu(), d.logits.argmax(1).cpu()
    wrong = y != said
    mistakes = torch.bincount(y[wrong], minlength=c) + torch.bincount(said[wrong], minlength=c)
    return mistakes.topk(CONFUSED).indices.sort().values


def _confusion(logits: Tensor, y: Tensor, classes: Tensor) -> pack.Packed:
    """[true, said], the last column for all that are not in `classes`."""
    said, k = logits.argmax(1).cpu(), len(classes)
    place = torch.full((int(max(y.max(), classes.max(), said.max())) + 1,), k)
    place[classes] = torch.arange(k)
    inside = place[y] < k
    counts = torch.bincount(place[y[inside]] * (k + 1) + place[said[inside]], minlength=k * (k + 1))
    return pack.integers(counts.view(k, k + 1))


def _gram(view: Explanation) -> Content:
    """The picture of the Gram in shades, and where its classes end, as parts of its height."""
    picture, spans = view.picture.detach().cpu().double(), view.spans.cpu()
    ends = spans.cumsum(0).double() / max(1, len(picture))
    entries = picture.flatten()[:: max(1, picture.numel() // 100_000)]  # quantile() refuses very long ones
    entries = entries[entries.isfinite()]
    entries = entries if len(entries) else torch.zeros(1, dtype=entries.dtype)
    # Not the extremes: a few large entries would leave all others one shade.
    low, high = (float(v) for v in torch.quantile(entries, torch.tensor([0.01, 0.99], dtype=entries.dtype)))
    if len(picture) > ROWS:
        picture = torch.nn.functional.interpolate(picture[None, None], (ROWS, ROWS), mode="area")[0, 0]
    return {"shades": pack.shades(picture, low, high), "low": low, "high": high, "ends": ends.tolist()}


def _spectrum(view: Explanation) -> Content:
    """Eigenvalues at some places, evenly on the logarithmic axis that they are drawn on."""
    values = view.values.detach().cpu().double()
    above = int((values > 0).sum())
    place = _thinned(torch.arange(1, len(values) + 1).double(), VALUES, log=True).long()
    place = place[values[place - 1] > 0] if len(values) else place
    return {
        "place": pack.integers(place),
        "value": pack.floats(values[place - 1] if len(values) else values),
        "count": len(values),
        "positive": above,
    }


def _thinned(values: Tensor, most: int, log: bool = False) -> Tensor:
    """At most so many of these, first and last among them, evenly by place or by its logarithm."""
    if len(values) <= most:
        return values
    n = len(values)
    place = torch.logspace(0, math.log10(n), most) - 1 if log else torch.linspace(0, n - 1, most)
    return values[place.round().long().clamp(0, len(values) - 1).unique()]
