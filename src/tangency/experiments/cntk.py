"""Kernel regression on CIFAR-10 with exact convolutional kernels of infinite width.

Arora et al. 2019: the CNTK with global average pooling; Shankar et al. 2020: Myrtle kernels.

Published are accuracies with all 50,000 training images. Here it is a curve over as many as one has the time for, by
Grams that are computed tile by tile into a store, so that a run can be stopped and gone on with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ..datasets import TrainTest, cifar10
from ..errors import DidNotConverge, InputError, NotPositiveDefinite
from ..gram.compute import compute
from ..gram.gram import Gram
from ..gram.shelf import shelf
from ..gram.store import Store
from ..infinite import Infinite, infinite_nngp, infinite_ntk
from ..models import conv_stack, myrtle
from ..regress import KernelModel, ridge
from .bundled import images
from .table import Kept, Options, Row, Table, run_environment

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Widths do not matter: the kernels are those of infinite ones.
NETWORKS: dict[str, Callable[..., nn.Module]] = {
    "cntk": partial(conv_stack, 11, 1, width=2),
    "myrtle5": partial(myrtle, 5, 1, width=2),
    "myrtle7": partial(myrtle, 7, 1, width=2),
    "myrtle10": partial(myrtle, 10, 1, width=2),
}
KERNELS: dict[str, Callable[..., Infinite]] = {"ntk": infinite_ntk, "nngp": infinite_nngp}
CNTK_PUBLISHED = {("cntk", "ntk"): "77.43", ("myrtle10", "nngp"): "90"}
ALL_TRAINED, ALL_IMAGES = 50_000, 60_000
SAMPLES, TEST = 5000, 2000
QUICK_SAMPLES, QUICK_TEST = 40, 20
# What reg may be, times the mean of K's diagonal.
REGS = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)
PARTS = (8, 4, 2, 1)  # the curve: all images over these
HELD_OUT = 5  # reg is chosen on the last of so many parts of the training images
# Samples on a side of a tile: as much as is lost when a run is stopped.
TILE, QUICK_TILE = 256, 16
ZCA = 1e-4  # added to the eigenvalues of the covariance of images of unit norm, as Shankar et al. do


@dataclass(frozen=True, repr=False)
class LearningCurve(Table):
    """Accuracy by the number of training images, beside what was published for all of them."""

    def plot(self) -> "Figure":
        """The curve of each kernel, with the standard error of its accuracies, and the published points."""
        from ..plots import draw_learning_curve

        curves: dict[str, list[tuple[int, float, float]]] = {}
        published: dict[str, tuple[int, float]] = {}
        for row in self.rows:
            name, images = row["kernel"], row["training images"]
            if row.get("published %"):
                published[name] = (images, float(row["published %"]))
            else:
                curves.setdefault(name, []).append((images, float(row["accuracy %"]), float(row["± %"])))
        return draw_learning_curve(curves, published, self.facts["network"])


class Pictures(NamedTuple):
    """What is learnt from and asked about; with flips, x has every image twice, the mirrored ones behind the others."""

    x: Tensor
    y: Tensor
    z: Tensor
    labels: Tensor
    classes: int

    def rows(self, numbers: Tensor) -> Tensor:
        """The rows of x of these images: those of their mirror images too."""
        return torch.cat([numbers + k for k in range(0, len(self.x), len(self.y))])

    def targets(self, numbers: Tensor) -> Tensor:
        """One-hot, less their mean, for the rows of these images."""
        y = self.y[numbers].repeat(len(self.x) // len(self.y))
        return nn.functional.one_hot(y, self.classes).double() - 1 / self.classes


def balanced(y: Tensor, n: int) -> Tensor:
    """The numbers of n samples in an order of which every beginning has the classes alike: first ones first."""
    place = torch.empty_like(y)
    for c in y.unique():
        at = (y == c).nonzero()[:, 0]
        place[at] = torch.arange(len(at), device=y.device)
    return place.argsort(stable=True)[:n]


def standardised(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Each channel by its mean and spread over the training images."""
    spread, mean = torch.std_mean(x.double(), (0, 2, 3), keepdim=True)
    spread = torch.where(spread > 0, spread, 1.0)
    return tuple(((v.double() - mean) / spread).float() for v in (x, z))  # type: ignore[return-value]


def whitened(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Each image less its mean and of unit norm, times (C + ZCA)^-½; C is the second moment of the training images."""

    def plain(v: Tensor) -> Tensor:
        """Images as vectors of mean 0 and norm 1."""
        flat = v.flatten(1).double()
        return nn.functional.normalize(flat - flat.mean(1, keepdim=True))

    a, b = plain(x), plain(z)
    values, vectors = torch.linalg.eigh(a.T @ a / len(a))
    turn = (vectors * (values.clamp(min=0) + ZCA).rsqrt()) @ vectors.T
    return (a @ turn).float().view_as(x), (b @ turn).float().view_as(z)


def pictures(options: Options) -> Pictures:
    """The images that were asked for, ready for the kernel."""
    asked = options.regression
    if options.quick:
        data, n, m = images(1), QUICK_SAMPLES, QUICK_TEST
    else:
        data = cifar10(options.folder("CIFAR-10 in its binary version (cifar-10-batches-bin)"))
        n, m = SAMPLES, TEST
    known, new = _some(data, asked.samples or n, asked.test or m)
    x, z = known[0], new[0]
    x = torch.cat([x, x.flip(-1)]) if asked.flips else x
    x, z = (whitened if asked.whiten else standardised)(x, z)
    x, y, z, labels = (v.to(options.device) for v in (x, known[1], z, new[1]))
    return Pictures(x, y, z, labels, len(data.train.classes))


def _some(data: TrainTest, n: int, m: int) -> list[tuple[Tensor, Tensor]]:
    """n training and m test images with their classes, each beginning balanced; refuses more than there are."""
    found = []
    for part, count, option in ((data.train, n, "--samples"), (data.test, m, "--test")):
        if count > len(part):
            raise InputError(f"{option} {count}; there are {len(part)} images in {part.name or 'the set'}.")
        assert isinstance(part.x, Tensor)
        index = balanced(part.y, count)
        found.append((part.x[index], part.y[index]))
    least = PARTS[0] * HELD_OUT
    if n < least:
        raise InputError(
            f"--samples {n}; needed: at least {least}: an eighth begins the curve, a fifth of it is held out."
        )
    return found


class TimedGram(NamedTuple):
    """A Gram, the seconds that this run spent on it, and on how many pairs: those not found in the store."""

    gram: Gram
    seconds: float
    pairs: int


def timed_gram(kernel: Infinite, x1: Tensor, x2: Tensor | None, store: Path | None, options: Options) -> TimedGram:
    """The Gram, from the store as far as it is there."""
    begun = None if store is None else Store.find(shelf(store))
    left = 1.0 if begun is None else 1 - len(begun.finished()) / begun.plan.count
    every = len(x1) * (len(x1) + 1) // 2 if x2 is None else len(x1) * len(x2)
    if left > 0:
        kernel(x1[:2], x1[:1])  # compiles what is to be compiled, which is no part of what a pair takes
    begin = perf_counter()
    tile = QUICK_TILE if options.quick else TILE
    gram = compute(kernel, x1, x2, store=store, tile=tile, progress=options.progress)
    return TimedGram(gram, perf_counter() - begin, round(left * every))


def fit(K: Tensor, targets: Tensor, regs: Sequence[float], scale: float) -> tuple[float, KernelModel]:
    """Ridge regression with the first of these regs, times `scale`, for which K has the digits; that reg."""
    for k, reg in enumerate(regs):
        try:
            return reg, ridge(K, targets, reg=reg * scale)
        except (NotPositiveDefinite, DidNotConverge):
            if k == len(regs) - 1:
                raise
    raise AssertionError


def measure_size(train: Gram, cross: Gram, data: Pictures, n: int) -> Row:
    """The accuracy with n training images: reg by the last fifth of them, then all of them."""
    here = data.x.device
    numbers = torch.arange(n, device=here)
    some, held = numbers[: n - n // HELD_OUT], numbers[n - n // HELD_OUT :]
    scale = float(train.diag().mean())
    rows = data.rows(some).cpu()
    K, beside = train.select(rows, rows).dense().to(here), train.select(held.cpu(), rows).dense().to(here)
    tried: dict[float, float] = {}
    for reg in REGS:
        try:
            model = ridge(K, data.targets(some), reg=reg * scale)
        except (NotPositiveDefinite, DidNotConverge):
            continue  # K has not the digits for so small a reg
        tried[reg] = float((model.predict(beside).argmax(1) == data.y[held]).double().mean())
    # Of equally good ones the largest: the smoothest fit.
    best = max(tried, key=lambda reg: (tried[reg], reg), default=REGS[-1])
    rows = data.rows(numbers).cpu()
    reg, model = fit(train.select(rows, rows).dense().to(here), data.targets(numbers), REGS[REGS.index(best) :], scale)
    right = model.predict(cross.select(None, rows).dense().to(here)).argmax(1) == data.labels
    accuracy = float(right.double().mean())
    error = (accuracy * (1 - accuracy) / len(right)) ** 0.5
    return {"images": n, "accuracy": accuracy, "error": error, "reg": reg, "held out": tried.get(best, float("nan"))}


def reproduce_cntk(options: Options) -> LearningCurve:
    """Grams of the images with the kernels asked for, and the curve of each."""
    asked, names = options.regression, options.kernels or ("ntk",)
    for name in names:
        if name not in KERNELS:
            raise InputError(f"--kernels {name}; needed: some of {', '.join(KERNELS)}.")
    data = pictures(options)
    n, m = len(data.y), len(data.z)
    spec = {
        "network": asked.network, "images": n, "test": m, "flips": asked.flips, "whiten": asked.whiten,
        "dtype": asked.dtype, "regs": REGS, "size": tuple(data.x.shape[1:]),
    }  # fmt: skip
    kept = Kept(options, "cntk", spec)
    folder = asked.store or (None if options.out is None else options.out / f"{kept.name}-grams")
    sizes = [n // part for part in PARTS]
    for name in names:
        keys = [f"{name}, {size} images" for size in sizes]
        if all(key in kept for key in keys):
            continue
        kernel = KERNELS[name](NETWORKS[asked.network](channels=data.x.shape[1]), w_var=2.0, dtype=asked.dtype)
        places = [None if folder is None else folder / f"{name}-{part}" for part in ("train", "test")]
        train = timed_gram(kernel, data.x, None, places[0], options)
        cross = timed_gram(kernel, data.z, data.x, places[1], options)
        pairs = train.pairs + cross.pairs
        if pairs and f"{name}, cost" not in kept:
            kept[f"{name}, cost"] = {"pairs": pairs, "seconds": train.seconds + cross.seconds}
        for key, size in zip(keys, sizes, strict=True):
            if key not in kept:
                kept[key] = measure_size(train.gram, cross.gram, data, size)
    return _curve(options, kept, names, sizes, data)


def _curve(options: Options, kept: Kept, names: Sequence[str], sizes: Sequence[int], data: Pictures) -> LearningCurve:
    """The table: a row for each kernel and size, and one for what was published."""
    asked, rows = options.regression, []
    for name in names:
        for size in sizes:
            facts = kept[f"{name}, {size} images"]
            rows.append({
                "kernel": name.upper(), "training images": size, "accuracy %": f"{100 * facts['accuracy']:.2f}",
                "± %": f"{100 * facts['error']:.2f}", "held out %": f"{100 * facts['held out']:.1f}",
                "reg": f"{facts['reg']:g}",
            })  # fmt: skip
        published = None if options.quick else CNTK_PUBLISHED.get((asked.network, name))
        if published:
            rows.append({"kernel": name.upper(), "training images": ALL_TRAINED, "published %": published})
    columns = ("kernel", "training images", "accuracy %", "± %", "held out %", "reg", "published %")
    form = "x".join(str(k) for k in data.x.shape[1:])
    title = f"{asked.network}: kernel regression on images of {form}, {len(data.z)} test images"
    costs = {name: kept[f"{name}, cost"] for name in names if f"{name}, cost" in kept}
    beside = CNTK_NOTES if any("published %" in row for row in rows) else ("No published figure for this is at hand.",)
    notes = (*_how(options), *beside, *(_cost(name, costs.get(name)) for name in names))
    facts = {"network": asked.network, "cost": costs, "runs": dict(kept.rows)}
    return LearningCurve(title, columns, tuple(rows), notes, facts)


def _how(options: Options) -> tuple[str, ...]:
    """How the figures were made, in sentences."""
    asked = options.regression
    form = "less its mean, of unit norm, ZCA-whitened (1e-4)" if asked.whiten else "standardised by channel"
    return (
        f"Each image {form}{'; every training image also mirrored' if asked.flips else ''}. {asked.dtype}.",
        "Ridge regression on one-hot targets less their mean; reg, times the mean of K's diagonal, is chosen by the",
        "  accuracy on the last fifth of the training images. ±: standard error, from the number of test images.",
    )


CNTK_NOTES = (
    "published: with all 50,000 training images, so to be looked at beside the curve, not at one of its sizes.",
    "  Arora et al. 2019: CNTK with global average pooling, 11 layers, no mirrored images. Shankar et al. 2020:",
    "  Myrtle-10's compositional kernel (an NNGP), with ZCA and mirrored images.",
)


def _cost(name: str, cost: Row | None) -> str:
    """What a pair took, and what all images would take at that rate."""
    if cost is None:
        return f"{name.upper()}: all tiles were there, so no time was measured."
    each, every = cost["seconds"] / cost["pairs"], ALL_IMAGES * (ALL_IMAGES + 1) // 2
    return (
        f"{name.upper()}: {1e6 * each:.3g} µs per pair, all of tg.compute included ({cost['pairs']:,} pairs in "
        f"{cost['seconds']:.3g} s, {run_environment()['device']}).\n  Extrapolated from that, not measured: "
        f"{each * every / 3600:.3g} hours for {ALL_IMAGES:,} images of this size ({every:,} pairs)."
    )
