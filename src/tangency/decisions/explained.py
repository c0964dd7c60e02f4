"""Why did the network say that: kernels, surrogates, faithfulness and attributions of one model on one data set."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .._base.types import Json, Memory, StorePlace
from .._version import __version__
from ..datasets import Labelled, labelled
from ..datasets.labelled import Samples
from ..engine import outputs as heads
from ..engine.network import check_evaluation_mode, unwrapped
from ..errors import DidNotConverge, InputError, MissingLibrary, ModelError
from ..gram.gram import Gram
from ..kernels.combine import CosineKernel
from ..kernels.kernel import Kernel
from ..linalg.eigen import Spectrum, top
from ..models import outputs
from ..surrogate import Faithfulness, Kind, LogitsOf, default_reg, faithfulness, fit, log_odds
from ..surrogate.faithful import levelled, rounding
from .attribution import Attribution, summarize
from .chance import shuffled
from .compared import Grams, Names, choose_named, take_given, with_logits
from .data import checked_pair, common_name, placed
from .described import described
from .forensics import flag
from .result import Decisions, Explanation

# Up to this many samples all eigenvalues are shown, above it the largest LARGEST (heuristic: seconds of work).
EVERY, LARGEST = 2500, 256
# Rows of the picture of a Gram, at most: more than a page has pixels for are of no use.
PICTURE_ROWS = 240


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
    second: nn.Module | None = None,
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
    `name`: what to call the model (default: what it is). `second`: another network for the same classes, trained from
    another seed, say: how it follows the first is about the most that one may expect of a surrogate. What chance gives
    is found by 9 surrogates a kernel of 200 training samples with shuffled labels. `store`: a folder for the Grams,
    which then need not fit in memory, and are there when the same is asked again. `tg.report.write(…)` makes a page.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.randn(60, 3)
    >>> y = (x[:, 0] > 0).long()
    >>> decisions = explain(model, (x[:40], y[:40]), (x[40:], y[40:]), kernels=["trNTK", "CK"], progress=False)
    >>> decisions.explanations[0].attribution
    Attribution(20 decisions, 2 logits each, 2 classes, 8 nearest)
    """
    begin = time.perf_counter()
    model, known, asked = _checked(model, train, test, progress)
    poisoned_train, poisoned_test = _mask(poisoned_train, known, "train"), _mask(poisoned_test, asked, "test")
    _check_options(samples, neighbours, reg_factor, None if isinstance(kernels, Mapping) else model)
    x, z = placed(model, known.x), placed(model, asked.x)
    read = heads.learn(outputs, model, x, known.y, len(known.classes), outputs_are)
    logits = heads.logits(outputs, model, z, read)
    ceiling = None if second is None else _compare_second(second, known, asked, logits, read, outputs_are)
    network = with_logits(model, read)
    chosen = take_given(kernels, read) if isinstance(kernels, Mapping) else choose_named(network, kernels, read, x)
    facts = _facts(model, name, known, asked, samples, logits.device)
    task = _Task(
        train=known, test=asked, logits=logits, asked=_asked_logits(logits, asked.y.to(logits.device)),
        grams=Grams(x, z, memory, progress, store), titles=chosen.titles, reg_factor=reg_factor, samples=samples,
        neighbours=min(neighbours, len(known)), poisoned=poisoned_train, dtype=read.dtype, progress=progress,
    )  # fmt: skip
    explanations, shown = task.explain_all(chosen.kernels)
    facts["seconds"] = time.perf_counter() - begin
    masks, said = (poisoned_train, poisoned_test), " ".join(filter(None, [read.said, chosen.said]))
    return Decisions(known, asked, logits.cpu(), explanations, shown, facts, *masks, read.kind, said, ceiling)


def logits_of(model: nn.Module, train: Samples, *, outputs_are: Kind | None = None) -> nn.Module:
    """The network's logits as a module, in whatever form it gives its outputs: for kernels of one's own.

    Of two classes it is the log-odds of the second, [n, 1]. `train`, `outputs_are`: as for `explain`.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Softmax(1))
    >>> x, y = torch.randn(9, 3), torch.arange(9) % 2
    >>> torch.allclose(logits_of(model, (x, y))(x), model[0](x)[:, 1:] - model[0](x)[:, :1])
    True
    """
    model, known = unwrapped(model)[0], labelled(train, name="train")
    x = placed(model, known.x)
    return LogitsOf(model, heads.learn(outputs, model, x, known.y, len(known.classes), outputs_are))


def _checked(model: nn.Module, train: Samples, test: Samples, progress: bool) -> tuple[nn.Module, Labelled, Labelled]:
    """The model itself, and both sets, checked against each other."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module.")
    model = unwrapped(model)[0]
    check_evaluation_mode(model)
    known, asked = checked_pair(model, train, test, progress)
    if len(asked) < 2:
        raise InputError("there is one test sample; needed: two or more, since faithfulness compares their order.")
    return model, known, asked


def _compare_second(
    second: nn.Module, train: Labelled, test: Labelled, logits: Tensor, read: heads.Outputs, outputs_are: Kind | None
) -> Faithfulness:
    """How a second network's log-odds follow the first's, whose `logits` of the test samples are given."""
    if not isinstance(second, nn.Module):
        raise InputError(f"second is a {type(second).__name__}; needed: a torch.nn.Module, or None.")
    second = unwrapped(second)[0]
    try:
        check_evaluation_mode(second)
        own = heads.learn(outputs, second, placed(second, train.x), train.y, len(train.classes), outputs_are)
        theirs = heads.logits(outputs, second, placed(second, test.x), own)
    except (InputError, ModelError) as e:
        raise type(e)(f"second: {e}") from e
    return faithfulness(
        logits, theirs.to(logits.device), test.y.to(logits.device), outputs_are="logits",
        ties=rounding(read.dtype, own.dtype),
    )  # fmt: skip


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


def _facts(
    model: nn.Module, name: str | None, train: Labelled, test: Labelled, samples: int, device: torch.device
) -> dict[str, Json]:
    """What the page says of where its numbers come from."""
    return {
        "model": name or described(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": common_name(train.name, test.name),
        "train": len(train),
        "test": len(test),
        "classes": len(train.classes),
        "explained": min(samples, len(test)),
        "device": str(device),
        "torch": torch.__version__,
        "tangency": __version__,
    }


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
        chance = shuffled(gram, cross, self.logits, y, y_test, reg_factor=self.reg_factor, ties=ties)
        cosines = self._cosines(kernel, gram, attribution, shown)
        return Explanation(
            name, self.titles.get(name, name), surrogate, faithful, logits.cpu(), attribution, picture, spans, values,
            time.perf_counter() - begin, flagged, chance, cosines,
        ), shown  # fmt: skip

    def _cosines(self, kernel: Kernel, gram: Gram, attribution: Attribution, shown: Tensor) -> Tensor:
        """κ(x, x_i)/√(κ(x, x) κ(x_i, x_i)) of the most similar training samples; NaN where a κ(x, x) is 0."""
        if isinstance(kernel, CosineKernel):
            return attribution.similarity
        asked, known = self.grams.squares(kernel).cpu().double()[shown], gram.diag().cpu().double()
        lengths = (asked[:, None] * known[attribution.similar]).sqrt()
        return attribution.similarity.double() / torch.where(lengths > 0, lengths, torch.nan)


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
