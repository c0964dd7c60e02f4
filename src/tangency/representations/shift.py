"""Did the data shift? Two data sets compared as a layer of a model sees them."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._base import checks
from .._base.checks import some
from .._base.types import Array, Json, Memory
from ..datasets import Labelled
from ..distributions import ClassifierTest, TwoSample, classifier_test_features, mmd
from ..engine.network import borrowed
from ..errors import InputError, ModelError
from ..gram.source import Source
from ..gram.source import source as source_of
from ..kernels.gaussian import gaussian
from ..models import outputs
from .carriers import bent, compare_components, log_ratio
from .classes import compare_classes
from .layers import Layers, LayersOf, Pool
from .principal import Embedded, Principal, principal
from .shifted import Shift, at_most, checked_labels

Labels = tuple[Array | Sequence[int], Array | Sequence[int]] | Literal["predicted"] | None
# Samples that each set needs, at least (heuristic: five parts of two).
FEWEST = 10
# The part of the variance that one sample in a hundred holds, above which it is warned of (heuristic).
HALF = 0.5
# Bytes for features that are kept, in place of a second pass (heuristic).
MEMORY = 1 << 30
# Samples for which the model predicts classes at a time are taken from the set together.
_BLOCK = 4096
_SIDES = ("source", "target")


def shift(
    model: nn.Module | None,
    source: object,
    target: object,
    *,
    layers: LayersOf = None,
    pool: Pool = "mean",
    components: int | None = None,
    labels: Labels = None,
    names: tuple[str, str] | None = None,
    samples: int = 2000,
    draws: int = 999,
    level: float = 0.05,
    batch: int | None = None,
    memory: Memory = None,
    seed: int = 0,
    progress: bool = True,
) -> Shift:
    """Do source and target have one distribution in z(x), what a layer of the model puts out; and what carries it.

    Both sets in the leading principal components of z (kernel PCA with the embedding kernel), compared by two tests
    fixed beforehand: MMD with a Gaussian kernel of the median distance, and the AUROC of a cross-fitted classifier,
    each with a p-value by permutation; `p` is twice the smaller. Then which components differ (Kolmogorov–Smirnov,
    corrected by Holm), which samples carry it, and with labels whether the balance of the classes or the inputs of a
    class differ.
    `.filter()` takes source samples that are like the target, `.downstream()` says what training on them does.

    `source`, `target`: samples in any form that `tg.compute` takes (data sets are read batch by batch), or `Labelled`.
    The model must not have been trained on one of the two alone: it knows its training samples, and that would be
    found, too; compare new data with validation data. `model=None`: the samples are features themselves. `layers`:
    names or patterns; by default the last but one of the model's children, on which its last layer works. `pool`: as
    for `layer_outputs`. `components`: how many; 50 by default, of few
    samples or features fewer. `labels`: the
    classes of both sets, (y_source, y_target); of two `Labelled` with the same classes they are known; "predicted":
    those that the model predicts. `samples`: how many of each set the tests see at most; all are embedded. `draws`: of
    the permutations. `memory`: for features that are kept ("1GiB"); of more, only their p × p covariance and the
    components are, by two passes over the samples. Results are on the CPU.

    Vargas, Tsou et al. 2023, "Foundation model's embedded representations may detect distribution shift".

    >>> import tangency as tg
    >>> net = tg.models.mlp([5, 20, 2])
    >>> x, z = torch.randn(200, 5), torch.randn(150, 5) + torch.tensor([1.0, 0, 0, 0, 0])
    >>> found = tg.shift(net, x, z, progress=False)
    >>> found.shifted, len(found.filter(50))
    (True, 50)
    """
    begin = time.perf_counter()
    _check_options(model, components, samples, draws, level, names)
    sets = _sets(model, (source, target), layers, pool, batch, progress)
    data = [v if isinstance(v, Labelled) else None for v in (source, target)]
    kinds = _labels(model, data, [embedded.samples for embedded in sets], labels)
    found, placed = principal(sets, components, checks.memory(memory) or MEMORY)
    tests = _Tests(samples, draws, seed, progress)
    made = _compared(found, (placed[0], placed[1]), tests, kinds, level, (data, _names(names, data)), sets[0].layers)
    made.facts["model"] = "" if model is None else type(model).__name__
    made.facts["seconds"] = time.perf_counter() - begin
    return made


def _sets(
    model: nn.Module | None,
    given: tuple[object, object],
    layers: LayersOf,
    pool: Pool,
    batch: int | None,
    progress: bool,
) -> list[Embedded]:
    """Both sets, ready to go through the model."""
    chosen = None if model is None else _layers(model, layers, pool)
    sets = []
    for v, name in zip(given, _SIDES, strict=True):
        samples = source_of(v.x if isinstance(v, Labelled) else v, name)
        if len(samples) < FEWEST:
            raise InputError(f"{name} has {len(samples)} samples; needed: at least {FEWEST} in each set.")
        sets.append(Embedded(samples, chosen, name, batch, progress))
    return sets


def _compared(
    found: Principal,
    sets: tuple[Tensor, Tensor],
    tests: "_Tests",
    kinds: "_Kinds | None",
    level: float,
    known: tuple[Sequence[Labelled | None], tuple[str, str]],
    layers: Layers | None,
) -> Shift:
    """The comparison of two sets in their components; `known`: what they are shown by, and called."""
    (a, b), (data, names) = sets, known
    warnings = (*_warnings(a, b), *([] if kinds is not None else _unlike(data)))
    by_mmd, by_classifier = tests.mmd(a, b), tests.classifier(a, b)
    classes = None if kinds is None else compare_classes(
        kinds.names, kinds.ys, sets, lambda u, v: tests.mmd(u, v).p, tests.draws, tests.seed, kinds.of
    )  # fmt: skip
    layer = "the samples themselves" if layers is None else ", ".join(layers.names)
    facts: dict[str, Json] = {
        "model": "", "layers": layer, "features": len(found.mean), "components": len(found.values),
        "explained": float(found.explained.sum()), "source": len(a), "target": len(b),
        "tested": [min(len(z), tests.samples) for z in sets], "permutations": tests.draws, "seed": tests.seed,
    }  # fmt: skip
    ratios = log_ratio(a, b, tests.samples, torch.Generator().manual_seed(tests.seed))
    return Shift(
        data[0], data[1], names, layer, a, b, by_mmd, by_classifier, level,
        compare_components(a, b, found.explained), *ratios, classes, None if kinds is None else kinds.ys, tests.seed,
        warnings, facts,
    )  # fmt: skip


@dataclass(frozen=True)
class _Tests:
    """The tests of two samples, of at most so many of each."""

    samples: int
    draws: int
    seed: int
    progress: bool

    def mmd(self, a: Tensor, b: Tensor) -> TwoSample:
        """MMD with the Gaussian kernel of the median distance."""
        a, b = self._some(a, b)
        if bool((torch.cat([a, b]) == a[0]).all()):  # no distance, no difference
            return mmd(gaussian(bandwidth=1.0), a, b, draws=self.draws, seed=self.seed, progress=False)
        kernel = gaussian(torch.cat([a, b]), seed=self.seed)
        return mmd(kernel, a, b, draws=self.draws, seed=self.seed, progress=self.progress)

    def classifier(self, a: Tensor, b: Tensor) -> ClassifierTest:
        """By features in which two Gaussians are told apart."""
        scale = torch.cat([a, b]).std(0, correction=0)
        x, y = self._some(bent(a, scale), bent(b, scale))
        return classifier_test_features(x, y, draws=self.draws, seed=self.seed, progress=self.progress)

    def _some(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(self.seed)
        return at_most(a, self.samples, draw), at_most(b, self.samples, draw)


class _Kinds(NamedTuple):
    """The classes of both sets."""

    names: tuple[str, ...]
    ys: tuple[Tensor, Tensor]
    of: str


def _check_options(
    model: object, components: int | None, samples: int, draws: int, level: float, names: object
) -> None:
    if model is not None and not isinstance(model, nn.Module):
        raise InputError(
            f"model is a {type(model).__name__}; needed: a torch.nn.Module, or None where the samples are features."
        )
    checks.positive(samples, "samples", "how many of each set are tested")
    if components is not None:
        checks.positive(components, "components", "the number of components")
    if samples < FEWEST:
        raise InputError(f"samples={samples}; needed: at least {FEWEST} of each set for a test.")
    checks.positive(draws, "draws", "the number of permutations")
    if not isinstance(level, float) or not 0 < level < 1:
        raise InputError(f"level={level!r}; needed: a probability between 0 and 1, such as 0.05.")
    if 2 / (draws + 1) > level:
        raise InputError(
            f"draws={draws}; needed: at least {math.ceil(2 / level) - 1}, as no p-value of two tests is below "
            f"{2 / (draws + 1):.2g} with so few, and level={level:g}."
        )
    if names is not None and not (
        isinstance(names, (tuple, list)) and len(names) == 2 and all(isinstance(v, str) and v for v in names)
    ):
        raise InputError(f"names={names!r}; needed: what source and target are called, two strings.")


def _layers(model: nn.Module, layers: LayersOf, pool: Pool) -> Layers:
    """Those that were named; else what the model's last layer works on."""
    if layers is None and not any(True for _ in model.children()):
        raise InputError(
            f"the model is a single {type(model).__name__} without layers of its own; needed: a model whose last layer "
            "works on something, or model=None, which compares the samples themselves."
        )
    chosen = Layers.of_model(model, layers, pool)
    if layers is None and chosen.names:
        return Layers.of_model(model, chosen.names[-1], pool)
    return chosen


def _labels(
    model: nn.Module | None, data: Sequence[Labelled | None], inputs: list[Source], labels: Labels
) -> _Kinds | None:
    """The classes of both sets, where they are known."""
    a, b = data
    if isinstance(labels, str):
        checks.choice(labels, "labels", ("predicted",), " or (y_source, y_target)")
        if model is None:
            raise InputError("labels='predicted' without a model; needed: one that predicts classes, or the labels.")
        ys = [_predicted(model, samples) for samples in inputs]
        count = int(max(int(y.max()) for y in ys)) + 1
        names = a.classes if a is not None and len(a.classes) >= count else tuple(map(str, range(count)))
        return _Kinds(names, (ys[0], ys[1]), "predictions")
    if labels is not None:
        y, z, called = checked_labels(labels, (len(inputs[0]), len(inputs[1])))
        return _Kinds(called or tuple(map(str, range(int(max(y.max(), z.max())) + 1))), (y, z), "labels")
    if a is not None and b is not None and a.classes == b.classes and len(a.classes) > 1:
        return _Kinds(a.classes, (a.y.cpu(), b.y.cpu()), "labels")
    return None


def _predicted(model: nn.Module, samples: Source) -> Tensor:
    """The class that the model predicts for each sample."""
    made = []
    with borrowed(model, {name: b.clone() for name, b in model.named_buffers()}):  # forward() may write to them
        for start in range(0, len(samples), _BLOCK):
            out = outputs(model, samples.take(slice(start, min(start + _BLOCK, len(samples)))))
            if out.dim() != 2 or out.shape[1] < 2:
                raise ModelError(
                    f"the model's outputs have shape {tuple(out.shape)}; needed for labels='predicted': [n, c], an "
                    "output for each of two classes or more. Give the labels: labels=(y_source, y_target)."
                )
            made.append(out.argmax(1).cpu())
    return torch.cat(made)


def _names(names: tuple[str, str] | None, data: Sequence[Labelled | None]) -> tuple[str, str]:
    """What the sets are called: as said, or as the data sets are, if these are two names."""
    if names is not None:
        return names[0], names[1]
    own = [v.name for v in data if v is not None and v.name]
    return (own[0], own[1]) if len(own) == 2 and own[0] != own[1] else _SIDES


def _unlike(data: Sequence[Labelled | None]) -> list[str]:
    """That the labels of two sets were left out, as one number means two classes."""
    a, b = data
    if a is None or b is None or a.classes == b.classes:
        return []
    return [
        f"labels were not compared, as the classes are called {some(list(a.classes))} in one set and "
        f"{some(list(b.classes))} in the other. Give both the same names in the same order, or "
        "labels=(y_source, y_target)."
    ]


def _warnings(a: Tensor, b: Tensor) -> tuple[str, ...]:
    """What makes the answer less certain; refuses sets that are one."""
    # A few components tell samples apart, by steps coarser than what batches of different sizes round to; of one or two
    # components by finer ones, or many samples would be alike by chance.
    leading = torch.cat([a, b])[:, :4]
    # Quartiles, as one far sample would make the steps too coarse; of a million rows, as torch takes no more.
    low, high = leading[:: 1 + len(leading) // 1_000_000].quantile(leading.new_tensor([0.25, 0.75]), 0)
    scale = torch.where(high > low, high - low, leading.std(0)).clamp_min(1e-300)
    steps = {1: 1e9, 2: 1e6}.get(leading.shape[1], 1e4)
    _, kind = (leading / scale * steps).round().unique(dim=0, return_inverse=True)
    of_source, of_target = kind[: len(a)], kind[len(a) :]
    if len(a) == len(b) and torch.equal(of_source.sort().values, of_target.sort().values):
        raise InputError("source and target have the same features, sample by sample: they are one set. Give two sets.")
    shared = int(torch.isin(of_target, of_source).sum())
    found = []
    if shared:
        found.append(
            f"{shared:,} of {len(b):,} target samples have the features of a source sample. Samples that are in both "
            "sets hide a shift, and p-values take all samples to be independent."
        )
    squares = torch.cat([a, b]).square().sum(1)
    few = squares.topk(max(1, len(squares) // 100))
    share, at = float(few.values.sum() / squares.sum()), int(few.indices[0])
    if share > HALF:
        where = f"{_SIDES[0]}[{at}]" if at < len(a) else f"{_SIDES[1]}[{at - len(a)}]"
        found.append(
            f"{len(few.values)} of {len(squares):,} samples, {where} the farthest, hold {share:.0%} of the variance, "
            "so that the components show them and little else. Leave them out if they are errors."
        )
    return tuple(found)
