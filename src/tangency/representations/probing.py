"""What each layer knows of the classes: three plain classifiers on its first d principal components, d = 1, 2, …

Harlev, Engel, Stinis & Chiang 2023, "Exploring learned representations of neural networks with principal component
analysis".
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.memory import batch_budget
from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Float, Inputs, Int, Memory
from ..datasets import Labelled, labelled, same_columns
from ..datasets.labelled import Samples, same_form
from ..engine.network import borrowed
from ..errors import InputError, ModelError, TangencyWarning
from ..models import outputs
from ..models.evaluate import THRESHOLD, last, predictions
from .classifiers import SMALL, linear_svm, nearest_centres, nearest_neighbours
from .collapse import Collapse, checked_classes, of_rows
from .components import Moments, Rows, Scores, held, moments, principal
from .layers import Layers, LayersOf, Pool

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CLASSIFIERS: Mapping[str, str] = {"neighbours": "nearest neighbours", "centres": "class centres", "svm": "linear SVM"}
# As published; from then on every thousand, and all.
GRID = (*range(1, 21), 30, 40, 50, 100, 150, 200, 250, 300, 400, 500, 750, 1000, 1250, 1500, 1750, 2000)
SHARE = 0.9  # of the best accuracy, as published
# The classifiers agree where their accuracies are no farther apart (heuristic).
AGREE = 0.02
View = Literal["accuracy", "components", "collapse"]
NOT_FINITE = "NaN or infinity for some samples"
VIEWS: tuple[View, ...] = get_args(View)


@dataclass(frozen=True, eq=False, repr=False)
class ProbedLayer(Result):
    """One layer: test accuracies with the first `dims` components, and the share of variance that these explain.

    `accuracy`: of "neighbours", "centres" and "svm", [d] each. `exact`: False where the components are those of
    subspace iteration. `collapse`: NC1, NC2 and NC4 of the training samples in this layer, not standardised.
    """

    name: str
    features: int
    dims: Int[Tensor, " d"]
    accuracy: Mapping[str, Float[Tensor, " d"]]
    explained: Float[Tensor, " d"]
    collapse: Collapse
    exact: bool

    def best(self, classifier: str) -> float:
        """The highest accuracy."""
        return float(self._of(classifier).max())

    def needed(self, classifier: str, share: float = SHARE) -> int:
        """The least d with so much of the best accuracy."""
        return int(self.dims[self._first(classifier, share)])

    def variance(self, classifier: str, share: float = SHARE) -> float:
        """The share of the variance that these components explain."""
        return float(self.explained[self._first(classifier, share)])

    def apart(self, classes: int) -> float:
        """How far apart the classifiers' accuracies are at most, from d = c − 1 on, which hold c collapsed classes."""
        curves = torch.stack(list(self.accuracy.values()))
        differ = curves.amax(0) - curves.amin(0)
        later = self.dims >= classes - 1
        return float(differ[later].max()) if bool(later.any()) else float(differ[-1])

    def _of(self, classifier: str) -> Tensor:
        return self.accuracy[checks.choice(classifier, "classifier", self.accuracy)]

    def _first(self, classifier: str, share: float) -> int:
        curve = self._of(classifier)
        return int((curve >= share * curve.max()).nonzero()[0])


@dataclass(frozen=True, eq=False, repr=False)
class Probing(Result):
    """Every probed layer, in the model's order.

    `network`: the test accuracy of the model itself, None where its outputs are no classes.
    """

    layers: tuple[ProbedLayer, ...]
    classes: int
    samples: int  # of the training set
    test_samples: int
    network: float | None
    neighbours: int = 10
    reg: float = 1.0

    def __getitem__(self, name: str) -> ProbedLayer:
        names = [layer.name for layer in self.layers]
        return self.layers[names.index(checks.choice(name, "layer", names))]

    @property
    def collapsed(self) -> str | None:
        """The first layer from which on all three classifiers agree to 2 points with any d ≥ c − 1; None if none."""
        first = None
        for layer in reversed(self.layers):
            if layer.apart(self.classes) > AGREE:
                break
            first = layer.name
        return first

    def table(self) -> str:
        """A line for each layer: best accuracy, components for 90 % of it and their variance, and the collapse."""
        head = ["layer", "features", *(f"{c} {what}" for c in CLASSIFIERS for what in ("%", "PCs", "var %")),
                "apart %", "NC1", "NC4 %"]  # fmt: skip
        rows: list[list[object]] = []
        for layer in self.layers:
            row: list[object] = [layer.name, layer.features]
            for c in CLASSIFIERS:
                row += [f"{100 * layer.best(c):.1f}", layer.needed(c), f"{100 * layer.variance(c):.1f}"]
            nc4 = layer.collapse.nc4
            rows.append([
                *row, f"{100 * layer.apart(self.classes):.1f}", f"{layer.collapse.nc1:.3g}",
                "" if nc4 is None else f"{100 * nc4:.1f}",
            ])  # fmt: skip
        return text_table(head, rows)

    def words(self) -> str:
        """How well the last layer is told apart, and from where on all three classifiers agree."""
        last = self.layers[-1]
        how = ", ".join(f"{CLASSIFIERS[kind]} {last.best(kind):.1%}" for kind in last.accuracy)
        own = "" if self.network is None else f"; the network itself {self.network:.1%}"
        agree = "nowhere" if self.collapsed is None else f"from {self.collapsed} on"
        return f"{last.name}: {how}{own}. The three agree to {100 * AGREE:.0f} points {agree}."

    def plot(self, view: View = "accuracy") -> "Figure":
        """A figure: "accuracy" by the number of components, "components" for 90 % of the best, or the "collapse"."""
        from .probing_pictures import draw_accuracy, draw_collapse, draw_components

        draw = {"accuracy": draw_accuracy, "components": draw_components, "collapse": draw_collapse}
        return draw[checks.choice(view, "view", draw)](self)


def probe(
    model: nn.Module,
    train: Samples,
    test: Samples,
    *,
    layers: LayersOf = None,
    dims: Sequence[int] | None = None,
    pool: Pool = None,
    neighbours: int = 10,
    reg: float = 1.0,
    memory: Memory = None,
    batch: int | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Probing:
    """Test accuracy of k nearest neighbours, class centres and a linear SVM on z_l's first d components, of each l.

    z_l(x), the output of layer l, is flattened (or pooled), standardised, divided by √p, so that ‖z_l‖² is 1 on
    average, and turned into the principal components of the training samples. `layers`: names or patterns
    (`"layer3.*"`), by default the model's children but the last. `dims`: by default the published 1, …, 20, 30, …,
    2000, 3000, … and all; more than there are means all. The SVM is scikit-learn's LinearSVC with C = 1/reg; on
    features that are not divided by √p, with C = 1/(p reg). `memory`: what one layer's outputs may take; those that
    take more are computed anew in every pass. Components are exact where samples or features are at most 3,072
    (12,288 on a GPU), else by subspace iteration up to the largest of `dims` (2,000), where `seed` counts.

    Cost: a few forward passes for each layer; O(min(n, p)³) for components, O(n m d) for neighbours.

    >>> import tangency as tg
    >>> x = torch.randn(200, 4)
    >>> data = tg.datasets.labelled((x, (x[:, 0] > 0).long())).split(150)
    >>> net = tg.models.initialized(lambda: tg.models.mlp([4, 16, 16, 2]), seed=0)
    >>> past = tg.models.fit(net, data.train, epochs=20, progress=False)
    >>> found = probe(net, *data, layers=["1", "3"], progress=False)
    >>> [layer.best("svm") > 0.8 for layer in found.layers]
    [True, True]
    """
    known, asked = _checked_data(train, test)
    budget, classes = checks.memory(memory), len(known.classes)
    dims = _checked_dims(dims)
    _check_options(neighbours, reg, len(known))
    chosen = Layers.of_model(model, layers, pool)
    device = next(chosen.network.model.parameters()).device
    for part in (known, asked):
        chosen.ready(part.x, part.name)
    y, z = known.y.to(device), asked.y.to(device)
    decided = [_decisions(chosen.network.model, part.x, classes) for part in (known, asked)]
    setup = _Setup(chosen, (known.x, asked.x), (y, z), classes, decided[0], budget or batch_budget(device), batch)
    found = []
    with bar(len(chosen.names), "probing", "layer", show=progress) as tick:
        for name in chosen.names:
            found.append(_probe_layer(setup, name, dims, neighbours, reg, seed))
            tick(note=f"{name}: {found[-1].best('svm'):.1%}")
    right = None if decided[1] is None else float((decided[1] == z).double().mean())
    return Probing(tuple(found), classes, len(known), len(asked), right, neighbours, reg)


@dataclass(frozen=True, eq=False)
class _Setup:
    """What is the same for all layers; of two, the first is of the training set, the second of the test set."""

    chosen: Layers
    x: tuple[Inputs, Inputs]
    y: tuple[Tensor, Tensor]
    classes: int
    decisions: Tensor | None  # the network's, on the training set
    budget: int
    batch: int | None

    def rows(self, name: str) -> tuple[Rows, Rows]:
        """The layer's outputs: kept, if the memory is there, else computed in every pass."""
        layer = replace(self.chosen, names=(name,))
        firsts = [next(layer.batches(tree.take(x, slice(0, 2)), progress=False))[1][name] for x in self.x]
        shape, other = (tuple(first.shape[1:]) for first in firsts)
        if shape != other:
            raise ModelError(
                f"layer {name} gives {shape} for training and {other} for test samples; needed: one shape. Pool over "
                "positions: pool='mean'."
            )
        size = firsts[0][0].numel() * firsts[0].element_size()
        streamed = [_streamed(layer, name, x, len(y), self.batch) for x, y in zip(self.x, self.y, strict=True)]
        if size * sum(rows.n for rows in streamed) > self.budget:
            return streamed[0], streamed[1]
        train, test = (_kept(rows, first, name) for rows, first in zip(streamed, firsts, strict=True))
        return train, test


def _kept(rows: Rows, first: Tensor, name: str) -> Rows:
    """In memory, once."""
    whole = first.new_empty(rows.n, first[0].numel())
    for at, block in rows.blocks():
        if block.shape[1] != whole.shape[1]:
            raise ModelError(
                f"layer {name} gives {block.shape[1]} features for samples from {at.start} on and {whole.shape[1]} for "
                "the first two; needed: one shape. Pool over positions: pool='mean'."
            )
        whole[at] = block
    return held(whole)


def _streamed(layer: Layers, name: str, x: Inputs, n: int, batch: int | None) -> Rows:
    return Rows(n, lambda: ((at, v[name].flatten(1)) for at, v in layer.batches(x, batch=batch, progress=False)))


def _probe_layer(
    setup: _Setup, name: str, dims: Sequence[int] | None, neighbours: int, reg: float, seed: int
) -> ProbedLayer:
    train, test = setup.rows(name)
    (y, z), c = setup.y, setup.classes
    standard = moments(train, y, c)
    _check_layer(standard, name)
    near = of_rows(train, y, standard.means, None, setup.decisions)
    scores = principal(train, test, standard, None if dims is None else max(dims), setup.budget, seed)
    del train, test
    if not bool(scores.test.isfinite().all()):
        raise ModelError(f"layer {name} puts out {NOT_FINITE} of the test set; needed: finite numbers.")
    grid = _grid(dims, scores)
    machines = linear_svm(scores.train, y, scores.test, grid, classes=c, reg=reg)
    if machines.gradient > 100 * SMALL:
        warnings.warn(
            f"layer {name}: a linear SVM stopped with a gradient of {machines.gradient:.0e} of that of w = 0; its "
            "accuracies may be a little off. A larger reg makes it easier.",
            TangencyWarning,
            stacklevel=4,
        )
    found = {
        "neighbours": nearest_neighbours(scores.train, y, scores.test, grid, neighbours=neighbours, classes=c),
        "centres": nearest_centres(scores.train, y, scores.test, grid, classes=c),
        "svm": machines.found,
    }
    places = torch.tensor(grid)
    explained = (scores.variances.cumsum(0) / scores.total).cpu()[places - 1].clamp_max(1)
    accuracy = {kind: (v == z).double().mean(1).cpu() for kind, v in found.items()}
    return ProbedLayer(name, len(standard.mean), places, accuracy, explained, near, scores.exact)


def _grid(dims: Sequence[int] | None, scores: Scores) -> list[int]:
    """The d's of this layer, which has so many components."""
    k = len(scores.variances)
    asked = [*GRID, *range(GRID[-1] + 1000, k, 1000), k] if dims is None else dims
    return sorted({min(d, k) for d in asked if d <= k or dims is not None})


def _checked_data(train: Samples, test: Samples) -> tuple[Labelled, Labelled]:
    known = labelled(train, name="train")
    named = isinstance(test, Labelled)
    same_form(train, test)
    asked = labelled(test, classes=None if named else known.classes, name="test")
    if asked.classes != known.classes:
        raise InputError(
            f"the test set's classes are {checks.some(list(asked.classes))}, the training set's "
            f"{checks.some(list(known.classes))}. Give both the same classes, in the same order."
        )
    same_columns(known, asked)
    if len(known.classes) < 2:
        raise InputError(f"there is one class only ({known.classes[0]!r}); a classifier needs two or more.")
    if not bool(known.counts().all()):
        lacking = [known.classes[k] for k in (known.counts() == 0).nonzero()[:, 0].tolist()]
        raise InputError(f"the training set has no sample of {checks.some(lacking)}. Leave the class out of both sets.")
    checked_classes(known.y, len(known))
    return known, asked


def _check_options(neighbours: int, reg: float, n: int) -> None:
    checks.positive(neighbours, "neighbours", "how many training samples decide")
    if neighbours > n:
        raise InputError(f"neighbours={neighbours}, and there are {n} training samples. Take fewer neighbours.")
    if checks.nonnegative(reg, "reg") == 0:
        raise InputError("reg=0; needed: a positive number, 1/C of a support vector machine.")


def _checked_dims(dims: Sequence[int] | None) -> list[int] | None:
    if dims is None:
        return None
    if isinstance(dims, (str, int)) or not len(dims):
        raise InputError(f"dims={dims!r}; needed: numbers of components, such as (1, 2, 5, 10).")
    whole = tree.numbers(list(dims), "dims").tolist()
    for d in whole:
        checks.positive(d, "dims", "whole numbers of components")
    return whole


def _check_layer(standard: Moments, name: str) -> None:
    if not bool(standard.mean.isfinite().all() and standard.scale.isfinite().all()):
        raise ModelError(f"layer {name} puts out {NOT_FINITE}; needed: finite numbers.")
    if not standard.varying:
        raise ModelError(f"layer {name} puts out the same for all samples, so there is nothing to probe. Leave it out.")


def _decisions(model: nn.Module, x: Inputs, classes: int) -> Tensor | None:
    """The classes that the network itself gives, if its outputs are classes."""
    with borrowed(model, {name: b.clone() for name, b in model.named_buffers()}):  # forward() may write to them
        try:
            out = outputs(model, x)
        except InputError:  # it returns something else than one tensor
            return None
        if out.dim() > 2 or max(2, out[0].numel()) != classes:
            return None
        return predictions(out, THRESHOLD[last(model, x) or "logits"] if out[0].numel() == 1 else 0.0)
