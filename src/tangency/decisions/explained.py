"""Why did the network say that: kernels, surrogates, faithfulness and attributions of one model on one data set."""

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .._base import checks, tree
from .._base.results import Result, environment
from .._base.types import Array, Float, Inputs, Int, Json, Memory, StorePlace
from .._version import __version__
from ..datasets import Labelled, labelled, same_columns
from ..datasets.from_torch import class_names
from ..engine import outputs as heads
from ..engine.network import check_evaluation_mode, unwrapped
from ..errors import DidNotConverge, InputError, MissingLibrary
from ..gram.gram import Gram
from ..kernels.kernel import Kernel
from ..linalg.eigen import Spectrum, top
from ..models import outputs
from ..surrogate import Faithfulness, Kind, LogitsOf, Surrogate, default_reg, faithfulness, fit, log_odds
from ..surrogate.faithful import levelled, rounding
from .attribution import Attribution, summarize
from .compared import Grams, Names, choose_named, take_given
from .forensics import flag

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Samples = Labelled | tuple[Inputs, Array | Sequence[int]] | Dataset[Any] | DataLoader[Any]
# Up to this many samples all eigenvalues are shown, above it the largest LARGEST (heuristic: seconds of work).
EVERY, LARGEST = 2500, 256
# Rows of the picture of a Gram, at most: more than a page has pixels for are of no use.
PICTURE_ROWS = 240


@dataclass(frozen=True, eq=False, repr=False)
class Explanation(Result):
    """What one kernel says about the decisions of a network on m test samples, s of which are explained one by one."""

    name: str  # short: trNTK, CK, …
    title: str  # in words: cosine of the trace of the tangent kernel
    surrogate: Surrogate
    faithfulness: Faithfulness  # over all m test samples
    logits: Float[Tensor, "m c"]
    attribution: Attribution  # of the s samples in `Decisions.shown`
    picture: Float[Tensor, "g g"]  # the Gram of some training samples, an equal part of each class, sorted by class
    spans: Int[Tensor, " t"]  # rows of the picture that each class takes
    values: Float[Tensor, " r"]  # eigenvalues of the Gram, largest first
    seconds: float
    flagged: Tensor | None = None  # [m] bool: test samples whose neighbours are mostly poisoned

    UNITS: ClassVar[Mapping[str, str]] = {"seconds": "s"}

    def plot(self) -> "Figure":
        """A figure: the Gram of some training samples, sorted by class, beside the spectrum."""
        from ..plots import draw_gram

        classes = torch.arange(len(self.spans)).repeat_interleave(self.spans)
        return draw_gram(self.picture, classes, values=self.values)

    def __repr__(self) -> str:
        return f"Explanation({self.name}: {self.faithfulness!r}, {self.attribution!r})"


@dataclass(frozen=True, eq=False, repr=False)
class Decisions(Result):
    """A network's decisions on test data, each traced to the training data through one or more kernels.

    `logits`: the network's, whose softmax are its probabilities, in whatever form it gives them; of two classes −f/2
    and f/2, f the log-odds. `outputs_are`: what its outputs are, and `outputs_said` how that is known, in a sentence.
    """

    train: Labelled
    test: Labelled
    logits: Float[Tensor, "m c"]
    explanations: tuple[Explanation, ...]
    shown: Int[Tensor, " s"]  # test samples that are explained one by one
    facts: dict[str, Json]  # model, parameters, seconds, version, …
    poisoned_train: Tensor | None = None  # [n] bool, where known
    poisoned_test: Tensor | None = None  # [m] bool
    outputs_are: Kind = "logits"
    outputs_said: str = ""

    UNITS: ClassVar[Mapping[str, str]] = {"seconds": "s", "network_accuracy": "fraction", "tad": "fraction"}

    def __repr__(self) -> str:
        taus = ", ".join(f"{e.name} τ_K {e.faithfulness.tau:.3f}" for e in self.explanations)
        return (
            f"Decisions({self.facts.get('model', 'network')}: {len(self.test)} test samples, "
            f"{len(self.train)} to train, {len(self.train.classes)} classes, accuracy {self.accuracy:.1%}; {taus})"
        )

    @property
    def accuracy(self) -> float:
        """The network's, on the test data."""
        return float((self.logits.argmax(1) == self.test.y.to(self.logits.device)).double().mean())

    @property
    def _best(self) -> Explanation:
        """The most faithful one; last comes a τ_K that is NaN, of a surrogate that says the same of every sample."""
        return max(self.explanations, key=lambda e: -2 if math.isnan(e.faithfulness.tau) else e.faithfulness.tau)

    def table(self) -> str:
        """A line for each kernel; then what the network's outputs are."""
        lines = [f"{'kernel':10s}{'τ_K':>8s}{'95% interval':>18s}{'TAD':>9s}{'Pearson':>9s}{'R²':>7s}{'seconds':>9s}"]
        for e in self.explanations:
            f, ends = e.faithfulness, e.faithfulness.intervals["tau"]
            between = f"[{ends.low:.3f}, {ends.high:.3f}]"
            lines.append(
                f"{e.name:10s}{f.tau:8.3f}{between:>18s}{f.tad:+9.2%}{f.pearson:9.3f}{f.r2:7.3f}{e.seconds:9.1f}"
            )
        return "\n".join([*lines, *filter(None, (self.outputs_said, self.warning))])

    @property
    def warning(self) -> str:
        """A sentence where not even the most faithful surrogate follows the network, else nothing."""
        best = self._best.faithfulness
        if "tau" not in best.intervals or best.intervals["tau"].low > 0:  # NaN is not
            return ""
        return (
            f"None of these surrogates follows the network (the best τ_K, {best.tau:.2f}, may as well be 0): what they "
            "say of its decisions explains them, not it."
        )

    def why(self, sample: int, *, kernel: str | None = None) -> str:
        """One decision in words: what the network says of a test sample, and the training samples behind it.

        `sample`: its number in the test data, one of those in `shown`. `kernel`: default: the most faithful one. The
        numbers are A(x, x_i), a training sample's part in the logit, and for those most like it κ(x, x_i).
        """
        names = {e.name: e for e in self.explanations}
        if kernel is not None and kernel not in names:
            raise InputError(f"kernel={kernel!r}; needed: one of those compared, {checks.some(list(names))}.")
        rows = (self.shown == sample).nonzero()[:, 0] if isinstance(sample, int) else self.shown[:0]
        if not len(rows):
            raise InputError(
                f"sample={sample!r} is none of the {len(self.shown)} test samples that were looked into (`shown`: "
                f"{checks.some([str(k) for k in self.shown.tolist()])}); explain(…, samples=…) says how many."
            )
        by = names[kernel] if kernel else self._best
        says, truth = int(self.logits[sample].argmax()), int(self.test.y[sample])
        sure = float(self.logits[sample].double().softmax(0)[says])
        right = "which is right" if says == truth else f"it is {self.test.classes[truth]}"
        return (
            f"test sample {sample}: {self.train.classes[says]}, with probability {sure:.2f}; {right}.\n"
            f"By {by.name} (τ_K {by.faithfulness.tau:.2f}), of the training samples\n"
            + by.attribution.words(int(rows[0]), says, self.train.y, self.train.classes)
        )

    def plot(self) -> "Figure":
        """A figure: how faithful each kernel is, with its interval, and its spectrum. Samples: `tg.report.write`."""
        from ..plots import draw_decisions

        return draw_decisions(self.explanations)

    def summary(self) -> dict[str, Json]:
        """The figures, for JSON."""
        return {
            **self.facts,
            "outputs_are": self.outputs_are,
            "outputs_said": self.outputs_said,
            "network_accuracy": self.accuracy,
            "kernels": {
                e.name: {
                    "tau": e.faithfulness.tau,
                    "intervals": {k: [i.low, i.high] for k, i in e.faithfulness.intervals.items()},
                    "tad": e.faithfulness.tad,
                    "pearson": e.faithfulness.pearson,
                    "r2": e.faithfulness.r2,
                    "accuracy": e.faithfulness.accuracy,
                    "ties": e.faithfulness.ties,
                    "reg": e.surrogate.reg,
                    "gradient": e.surrogate.gradient,
                    "seconds": e.seconds,
                }
                for e in self.explanations
            },
        }

    def to_dict(self) -> dict[str, Json]:
        """The figures, with units and the environment; neither data nor what is said of single samples."""
        # `Result.to_dict` would write out both data sets.
        return {"result": "Decisions", **self.summary(), "units": dict(self.UNITS), "environment": environment()}


def explain(
    model: nn.Module,
    train: Samples,
    test: Samples,
    *,
    kernels: Mapping[str, Kernel] | Names = None,
    outputs_are: Kind | None = None,
    reg_factor: float = 1.0,
    samples: int = 500,
    neighbours: int = 8,
    poisoned_train: Tensor | None = None,
    poisoned_test: Tensor | None = None,
    name: str | None = None,
    memory: Memory = None,
    store: StorePlace | None = None,
    progress: bool = True,
) -> Decisions:
    """A faithful kernel surrogate of a trained classifier, and which training samples made each of its decisions.

    `train`, `test`: `tg.datasets.Labelled`, (x, y), or a torch `Dataset` or `DataLoader` of (x, y), in its own order.
    `kernels`: names of `tg.decisions.kernels`, or kernels by name (default: all five; of two classes without pNTK,
    which then is trNTK; without Em or CK where the model has no such hidden layer, and pNTK where it is 0, which the
    result says). `outputs_are`: "logits", "probabilities" or "log-probabilities" (default: found out from the training
    data and said in the result; a warning where in doubt). Named kernels and all figures are those of the logits, in
    whatever form the network has them; kernels that are given are taken as they are (`logits_of` makes logits for
    them). `reg_factor`: times `tg.surrogate.default_reg`. `samples`: how many test samples are explained one by one;
    all are in the figures. `neighbours`: training samples that are listed for each. `poisoned_*`: masks, where known.
    `name`: what to call the model (default: its class). `store`: a folder for the Grams, which then need not fit in
    memory, and are there when the same is asked again. `tg.report.write(…)` makes a page of it.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.randn(60, 3)
    >>> y = (x[:, 0] > 0).long()
    >>> decisions = explain(model, (x[:40], y[:40]), (x[40:], y[40:]), kernels=["trNTK", "CK"], progress=False)
    >>> decisions.explanations[0].attribution
    Attribution(20 decisions, 2 logits each, 2 classes, 8 nearest)
    """
    begin = time.perf_counter()
    model, known, asked = _checked_data(model, train, test, progress)
    poisoned_train, poisoned_test = _mask(poisoned_train, known, "train"), _mask(poisoned_test, asked, "test")
    _check_options(samples, neighbours, reg_factor, None if isinstance(kernels, Mapping) else model)
    x, z = _placed(model, known.x), _placed(model, asked.x)
    read = heads.learn(outputs, model, x, known.y, len(known.classes), outputs_are)
    logits = heads.logits(outputs, model, z, read)
    # Of two classes there is one log-odds to take kernels of, not two logits.
    network = model if read.kind == "logits" and read.columns != 2 else LogitsOf(model, read)
    grams = Grams(x, z, memory, progress, store)
    chosen = take_given(kernels, read) if isinstance(kernels, Mapping) else choose_named(network, kernels, read, x)
    facts = _facts(model, name, known, asked, samples, logits.device)
    task = _Task(
        train=known, test=asked, logits=logits, asked=_asked_logits(logits, asked.y.to(logits.device)), grams=grams,
        titles=chosen.titles, reg_factor=reg_factor, samples=samples, neighbours=min(neighbours, len(known)),
        poisoned=poisoned_train, dtype=read.dtype, progress=progress,
    )  # fmt: skip
    explanations, shown = task.explain_all(chosen.kernels)
    facts["seconds"] = time.perf_counter() - begin
    said = " ".join(filter(None, [read.said, chosen.said]))
    return Decisions(
        known, asked, logits.cpu(), explanations, shown, facts, poisoned_train, poisoned_test, read.kind, said
    )


def logits_of(model: nn.Module, train: Samples, *, outputs_are: Kind | None = None) -> nn.Module:
    """The network's logits as a module, in whatever form it gives its outputs: for kernels of one's own.

    Of two classes it is the log-odds of the second, [n, 1]. `train`, `outputs_are`: as for `explain`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Softmax(1))
    >>> x, y = torch.randn(9, 3), torch.arange(9) % 2
    >>> torch.allclose(logits_of(model, (x, y))(x), model[0](x)[:, 1:] - model[0](x)[:, :1])
    True
    """
    model, known = unwrapped(model)[0], labelled(train, name="train")
    x = _placed(model, known.x)
    return LogitsOf(model, heads.learn(outputs, model, x, known.y, len(known.classes), outputs_are))


def _checked_data(
    model: nn.Module, train: Samples, test: Samples, progress: bool
) -> tuple[nn.Module, Labelled, Labelled]:
    """The model itself, and both sets, checked against each other."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module.")
    model = unwrapped(model)[0]
    check_evaluation_mode(model)
    known = labelled(train, name="train", progress=progress)
    # A test set without names takes the training set's: it need not have samples of every class.
    named = isinstance(test, Labelled) or class_names(test) is not None
    asked = labelled(test, classes=None if named else known.classes, name="test", progress=progress)
    if len(asked) < 2:
        raise InputError("there is one test sample; needed: two or more, since faithfulness compares their order.")
    if asked.classes != known.classes:
        raise InputError(
            f"the test set's classes are {checks.some(list(asked.classes))}, the training set's "
            f"{checks.some(list(known.classes))}. Give both the same classes, in the same order."
        )
    if len(known.classes) < 2:
        raise InputError(f"there is one class only ({known.classes[0]!r}); a classifier needs two or more.")
    _check_labels(model, known)
    counts = known.counts()
    if not bool(counts.all()):
        empty = [known.classes[c] for c in (counts == 0).nonzero()[:, 0].tolist()]
        raise InputError(
            f"the training set has no sample of {checks.some(empty)}. Leave the class out of both sets "
            "(Labelled.only), or add samples of it."
        )
    same_columns(known, asked)
    left, right = ({k: v.shape[1:] for k, v in tree.leaves(data.x)} for data in (known, asked))
    if left != right:
        shapes = [", ".join(f"{k} {list(s)}" for k, s in side.items()) for side in (left, right)]
        raise InputError(f"a training sample has the shape {shapes[0]}, a test sample {shapes[1]}; needed: the same.")
    return model, known, asked


def _check_labels(model: nn.Module, train: Labelled) -> None:
    """Refuse labels for which the model has no output, by its first two samples."""
    out = outputs(model, _placed(model, tree.take(train.x, slice(0, 2))))
    count = 1 if out.dim() == 1 else out.shape[1]
    most = int(train.y.max())
    if out.dim() <= 2 and most >= max(2, count):
        raise InputError(
            f"the labels of the training set go to {most} and the model has {count} output{'s' * (count > 1)}; needed: "
            f"labels from 0 to {max(2, count) - 1}. Number the classes from 0, or mend the labels that are too large."
        )


def _mask(mask: Tensor | None, data: Labelled, name: str) -> Tensor | None:
    """Which samples are poisoned, where that is known, as bools in the machine's memory."""
    if mask is None:
        return None
    mask = torch.as_tensor(mask).cpu()
    if mask.dtype != torch.bool or mask.shape != (len(data),):
        raise InputError(
            f"poisoned_{name} has shape {tuple(mask.shape)}, {mask.dtype}; needed: a mask (bool) of the {len(data)} "
            "samples."
        )
    return mask


def _check_options(samples: int, neighbours: int, reg_factor: float, model: nn.Module | None) -> None:
    """Refuse, before the network runs, counts below 1, factors that are not above 0 (NaN is not), and 16-bit models.

    `model`: None where kernels are given; named ones are computed in the network's own type.
    """
    if not all(isinstance(v, int) and v >= 1 for v in (samples, neighbours)) or not reg_factor > 0:
        raise InputError(
            f"samples={samples}, neighbours={neighbours}, reg_factor={reg_factor}; needed: whole numbers from 1, and "
            "above 0."
        )
    for p in [] if model is None else model.parameters():
        if p.is_floating_point() and p.dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"the model's parameters are {p.dtype}; needed: torch.float32 or torch.float64. Give model.float(), "
                "and samples of that type (x.float())."
            )


def _placed(model: nn.Module, x: Inputs) -> Inputs:
    """The inputs where the model is, without their graph, in the type of its parameters, if that is one."""
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    device = parameters[0].device if parameters else torch.device("cpu")
    dtypes = list(dict.fromkeys(p.dtype for p in parameters))
    placed = tree.to(tree.transform(Tensor.detach, x), device)
    placed = tree.suited(placed, model)
    if dtypes:
        tree.check_place(placed, device, dtypes)
    return placed


def _facts(
    model: nn.Module, name: str | None, train: Labelled, test: Labelled, samples: int, device: torch.device
) -> dict[str, Json]:
    """What the page says of where its numbers come from."""
    return {
        "model": name or type(model).__name__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": _common_name(train.name, test.name),
        "train": len(train),
        "test": len(test),
        "classes": len(train.classes),
        "explained": min(samples, len(test)),
        "device": str(device),
        "torch": torch.__version__,
        "tangency": __version__,
    }


def _common_name(train: str, test: str) -> str:
    """What both sets are of: "digits" of "digits train" and "digits test"; nothing if they say no more than that."""
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(train.split(), test.split(), strict=False))
    return " ".join(a for a, _ in same) or ("" if test == "test" else test)


@dataclass(frozen=True, eq=False)
class _Task:
    """What is the same for all kernels."""

    train: Labelled
    test: Labelled
    logits: Tensor  # the network's, of the test samples
    asked: Tensor  # [m, 2]: which of them are explained
    grams: Grams
    titles: Mapping[str, str]
    reg_factor: float
    samples: int
    neighbours: int
    poisoned: Tensor | None
    dtype: torch.dtype  # of the network's outputs
    progress: bool

    def explain_all(self, kernels: Mapping[str, Kernel]) -> tuple[tuple[Explanation, ...], Tensor]:
        """What each kernel says, and which test samples are explained one by one."""
        explanations: list[Explanation] = []
        shown = None
        for position, (name, kernel) in enumerate(kernels.items()):
            explanation, shown = self.explain(name, kernel, shown)
            explanations.append(explanation)
            self.grams.forget(list(kernels.values())[position + 1 :])  # so that few are held at a time
        assert shown is not None
        return tuple(explanations), shown

    def explain(self, name: str, kernel: Kernel, shown: Tensor | None) -> tuple[Explanation, Tensor]:
        """What one kernel says; the first one also decides which samples are shown, the same for all."""
        begin = time.perf_counter()
        try:
            gram, cross = self.grams(kernel)
        except MissingLibrary:  # which is no kernel's fault
            raise
        except InputError as e:
            raise InputError(f"kernel {name}: {e}") from e
        device, classes = self.logits.device, len(self.train.classes)
        y, y_test = self.train.y.to(device), self.test.y.to(device)
        # The default follows the kernel's scale, so one factor means the same for all kernels.
        reg = self.reg_factor * default_reg(gram)
        surrogate = fit(gram, y, reg=reg, classes=classes, progress=self.progress)
        logits = surrogate.logits(cross)
        # The network's log-odds and the surrogate's are known to the coarser of the two types.
        ties = rounding(self.dtype, gram.dtype)
        faithful = faithfulness(self.logits, logits, y_test, outputs_are="logits", ties=ties)
        if shown is None:
            shown = _choose_shown(self.logits, logits, y_test, self.samples, ties)
        values, (picture, spans) = _eigenvalues(gram), _picture(gram, self.train)
        attribution = summarize(
            surrogate, cross.select(shown), outputs=self.asked[shown.to(device)], labels=self.train.y, classes=classes,
            neighbours=self.neighbours, progress=self.progress,
        ).cpu()  # fmt: skip
        flagged = None
        if self.poisoned is not None:
            # 3 of 5, as published (Engel et al. 2024, Table 3); of fewer samples, of as many as there are.
            nearest = min(5, len(self.train))
            flagged = flag(cross, self.poisoned, neighbours=nearest, threshold=min(3, nearest)).flagged.cpu()
        return Explanation(
            name, self.titles.get(name, name), surrogate, faithful, logits.cpu(), attribution, picture, spans, values,
            time.perf_counter() - begin, flagged,
        ), shown  # fmt: skip


def _asked_logits(logits: Tensor, y: Tensor) -> Tensor:
    """Two logits to explain of each sample: what the network said, and the correct class, or the runner-up if it is."""
    first, second = logits.topk(2).indices.unbind(1)
    return torch.stack([first, torch.where(first == y, second, y)], 1)


def _choose_shown(logits: Tensor, surrogate: Tensor, y: Tensor, samples: int, ties: float) -> Tensor:
    """Which test samples to explain one by one: of many, some wrong ones, the least faithful, and random others."""
    if len(y) <= samples:
        return torch.arange(len(y))
    odds = [levelled(log_odds(z, y, outputs_are="logits"), ties) for z in (logits, surrogate)]
    ranks = [values.argsort(stable=True).argsort() for values in odds]
    gap = (ranks[0] - ranks[1]).abs()
    wrong = (logits.argmax(1) != y).nonzero()[:, 0].cpu()
    # One seed, and on the CPU: the same samples in every run, on every device.
    order = torch.Generator().manual_seed(0)
    wrong = wrong[torch.randperm(len(wrong), generator=order)]
    # A third of each kind, where there are so many; a sample that is in the queue twice is shown once.
    queue = torch.cat([wrong[: samples // 3], gap.argsort(descending=True).cpu()[: samples // 3]])
    queue = torch.cat([queue, torch.randperm(len(y), generator=order)])
    return torch.tensor(list(dict.fromkeys(queue.tolist()))[:samples]).sort().values


def _picture(gram: Gram, train: Labelled) -> tuple[Tensor, Tensor]:
    """The Gram sorted by class, at most PICTURE_ROWS: of each class an equal part of its samples, first come.

    And how many rows each class takes.
    """
    counts = train.counts()
    part = min(1.0, PICTURE_ROWS / len(train))
    # At least one row of each class: its place in the picture is to be seen.
    spans = (counts * part).floor().long().clamp_min(1).minimum(counts)
    rows = torch.cat([(train.y == c).nonzero()[: int(k), 0] for c, k in enumerate(spans)])
    return gram.select(rows, rows).dense().float().cpu(), spans


def _eigenvalues(gram: Gram) -> Tensor:
    """Largest first: all of a small Gram, the largest of a large one."""
    if gram.shape[0] <= EVERY:
        return torch.linalg.eigvalsh(gram.dense().double()).flip(0).cpu()
    try:
        return top(gram, LARGEST, tol=1e-3, progress=False).values.double().cpu()
    except DidNotConverge as e:  # for a picture, what was found is enough
        if not isinstance(e.solution, Spectrum):
            raise
        return e.solution.values.double().cpu()
