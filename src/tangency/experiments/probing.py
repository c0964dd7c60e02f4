"""Harlev et al. 2023, Figures 17 and 18: what each block of a ResNet18 knows of CIFAR-10's classes.

Their network was trained by others (Phan 2021; 92.5 %), with a max pool behind the stem, which makes its first layers a
quarter of ours; ours has none and is trained here. They took all 50,000 training images; we take 10,000, of which all
components are exact, or as many as --samples says (above 12,288: the first 2,000 components). Their SVM's penalty is
not stated; ours is LinearSVC's C = 1 for features of unit length on average (see `probe`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..datasets import Labelled, TrainTest
from ..errors import InputError
from ..models import Recipe, accuracy, initialized, resnet18, small_cnn
from ..models import fit as train
from ..representations import Collapse, ProbedLayer, Probing, collapse, layer_outputs, probe
from ..representations.components import EXACT
from ..representations.layers import Pool
from ..representations.probing import GRID
from .bundled import images
from .surrogate_table2 import cifar, resnet_recipe
from .table import Kept, Options, Row, Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SAMPLES, TEST, EPOCHS = 10_000, 10_000, 30
QUICK_EPOCHS = 20
# Beyond the published 2,000 they go on by thousands; these tell as much for half the time.
FAR = (3000, 4000, 6000, 8000)
PROBING_NOTES = (
    "PCs: principal components with which a classifier has 90 % of its best test accuracy in that layer; var %: the",
    "  variance that they explain. apart: how far the three classifiers' accuracies are at most, with 9 PCs and more.",
    "NC1: variance within classes over that between; NC4: decisions of the network other than the nearest mean's.",
)
PUBLISHED = (
    "Published: from block 5 on all three are alike, with the network's accuracy from about 10 PCs on, and blocks 6 to",
    "  8 need 2 to 3 PCs, which explain 20 to 40 % of the variance. Before, k-NN is best with about 100 PCs and falls,",
    "  class centres stay as they are from there on, and the SVM, the best of the three everywhere, goes on rising.",
)


class Place(NamedTuple):
    """Where a network is looked at."""

    title: str
    layer: str
    pool: Pool = None


# The stem's output behind its ReLU; what the average pool makes of block 8; the logits.
RESNET = (
    Place("stem", "activation"), *(Place(f"block {k + 1}", f"blocks.{k}") for k in range(8)),
    Place("pooled", "blocks.7", "mean"), Place("logits", "head"),
)  # fmt: skip
SMALL_CNN = (
    *(Place(f"convolution {k}", layer) for k, layer in ((1, "2"), (2, "5"), (3, "8"))),
    Place("hidden 1", "11"), Place("hidden 2", "13"), Place("logits", "14"),
)  # fmt: skip


@dataclass(frozen=True, repr=False)
class ProbingTable(Table):
    """A row for each layer, and the curves that they are made of."""

    def probing(self) -> Probing:
        """As `tg.representations.probe` returns it."""
        return probing_of(self.facts)

    def plot(self) -> "Figure":
        """Accuracy by the number of components, as in Figure 17."""
        return self.probing().plot()


def probing_of(facts: Mapping[str, object]) -> Probing:
    """A probing, of what the record of a table says."""
    runs = facts["runs"]
    assert isinstance(runs, Mapping)
    whole: Row = dict(facts)
    layers = tuple(_layer(title, row) for title, row in runs.items())
    return Probing(layers, whole["classes"], whole["samples"], whole["test samples"], whole["accuracy"])


def _layer(title: str, row: Row) -> ProbedLayer:
    double = torch.float64
    return ProbedLayer(
        title,
        row["features"],
        torch.tensor(row["dims"]),
        {kind: torch.tensor(v, dtype=double) for kind, v in row["accuracy"].items()},
        torch.tensor(row["explained"], dtype=double),
        Collapse(**row["collapse"]),
        row["exact"],
    )


def measure_layer(model: nn.Module, data: TrainTest, place: Place, options: Options) -> Row:
    """One layer, as a row of numbers for the record."""
    begin, n = perf_counter(), len(data.train)
    dims = None if options.quick else (*GRID, *FAR, n) if n <= EXACT["cuda"] else GRID
    found = probe(model, *data, layers=place.layer, pool=place.pool, dims=dims, progress=options.progress).layers[0]
    return {
        "seconds": perf_counter() - begin,
        "features": found.features,
        "dims": found.dims.tolist(),
        "accuracy": {kind: v.tolist() for kind, v in found.accuracy.items()},
        "explained": found.explained.tolist(),
        "collapse": numbers(found.collapse),
        "exact": found.exact,
    }


def numbers(found: Collapse) -> Row:
    """NC1 to NC4 for the record."""
    return {field.name: getattr(found, field.name) for field in fields(found)}


def last_layer(model: nn.Module, known: Labelled, place: Place, options: Options) -> Row:
    """NC1 to NC4 of what goes into the last layer, with its weights."""
    head = model.get_submodule("head")
    assert isinstance(head, nn.Linear)
    z = layer_outputs(model, known, place.layer, pool=place.pool, progress=options.progress)[place.layer]
    found = collapse(z, known.y.to(z.device), head.weight, head.bias)
    return numbers(found)


def recipe(options: Options) -> Recipe:
    """How the network is trained."""
    if options.quick:
        return Recipe(epochs=options.learned.epochs or QUICK_EPOCHS, batch=50, lr=5e-3, optimizer="adam")
    return resnet_recipe(options).but(epochs=options.learned.epochs or EPOCHS)


def probed_data(options: Options) -> tuple[TrainTest, TrainTest]:
    """(all of it, what is probed), on the device."""
    whole = images(2, channels=1, train=80, test=40) if options.quick else cifar(options)
    asked, parts = options.learned, []
    for part, count, option in zip(whole, (asked.samples, asked.test), ("--samples", "--test"), strict=True):
        most = (SAMPLES, TEST)[option == "--test"] if count is None else count
        if count is not None and count > len(part):
            raise InputError(f"{option} {count}; there are {len(part)} images in {part.name}.")
        some = part.take(min(most, len(part)))
        assert isinstance(some.x, Tensor)
        parts.append(some.with_x(some.x.to(options.device)))
    return whole, TrainTest(*parts)


def trained(options: Options, kept: Kept, known: Labelled) -> nn.Module:
    """The network, on all training images."""
    make = (lambda: small_cnn(10, size=16, width=4, parametrization="standard")) if options.quick else resnet18
    how = recipe(options)
    return kept.network(
        initialized(make, seed=0), lambda m: train(m, known, None, how, seed=0, progress=options.progress)
    )


def reproduce_probing(options: Options) -> ProbingTable:
    """A trained network, and a row for every layer of it."""
    kept = Kept(options, "probing", {"recipe": recipe(options)})
    whole, data = probed_data(options)
    places = SMALL_CNN if options.quick else RESNET
    model = trained(options, kept, whole.train)
    facts: Row = {
        "classes": len(data.train.classes), "samples": len(data.train), "test samples": len(data.test),
        "accuracy": accuracy(model, data.test), "train accuracy": accuracy(model, data.train),
    }  # fmt: skip
    runs: dict[str, Row] = {}
    for place in places:
        key = f"{place.title}, {len(data.train)} and {len(data.test)} images"
        if key not in kept:
            kept[key] = measure_layer(model, data, place, options)
        runs[place.title] = kept[key]
    facts |= {"runs": runs}
    notes: tuple[str, ...] = PROBING_NOTES
    if not options.quick:
        facts |= {"last layer": last_layer(model, data.train, places[-2], options)}
        notes += (
            f"NC3 of the pooled features and the last layer's weights: {facts['last layer']['nc3']:.3g}",
            *PUBLISHED,
        )
    return _table(facts, "digits, a small CNN" if options.quick else "CIFAR-10, a ResNet18", notes)


def _table(facts: Row, what: str, notes: tuple[str, ...]) -> ProbingTable:
    found = probing_of(facts)
    short = {"neighbours": "10-NN", "centres": "centres", "svm": "SVM"}
    rows = []
    for layer in found.layers:
        row: Row = {"layer": layer.name, "features": layer.features}
        for kind, name in short.items():
            row[f"{name} %"] = f"{100 * layer.best(kind):.1f}"
            row[f"{name} PCs"] = layer.needed(kind)
            row[f"{name} var %"] = f"{100 * layer.variance(kind):.1f}"
        nc4 = layer.collapse.nc4
        row |= {"apart %": f"{100 * layer.apart(found.classes):.1f}", "NC1": f"{layer.collapse.nc1:.3g}"}
        rows.append(row | {"NC4 %": "" if nc4 is None else f"{100 * nc4:.1f}"})
    agree = "nowhere" if found.collapsed is None else f"from {found.collapsed} on"
    title = (
        f"Probes of each layer: {what} ({100 * facts['accuracy']:.2f} % right), {found.samples:,} training and "
        f"{found.test_samples:,} test images"
    )
    notes = (f"The three classifiers agree (to 2 points) {agree}.", *notes)
    return ProbingTable(title, tuple(rows[0]), tuple(rows), notes, facts)
