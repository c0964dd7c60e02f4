"""Do two samples come from one distribution: the maximum mean discrepancy under any kernel, and which samples tell."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._base import checks
from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Array, Float, Memory, Numbers
from ..errors import InputError
from ..kernels.kernel import Kernel
from ..linalg.matrix import Matrix
from ..projection.features import StoredFeatures
from . import null
from .pooled import Pooled, grouped, of_samples, pooled, pooled_features, sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TESTS = ("permutation", "wild bootstrap")
# How long samples remember each other, in samples: what Chwialkowski et al. 2014 take; of short series a tenth.
LENGTH = 20.0


@dataclass(frozen=True, eq=False, repr=False)
class TwoSample(Result):
    """MMD² of two samples, how likely so large a one is by chance, and how much each sample adds to it.

    `null`: what the statistic is for samples without a difference (permuted, or by the wild bootstrap). `every`: these
    are all permutations there are. `witness_x` [m], `witness_y` [n]: mean similarity of a sample to x less that to y
    (to the others, if unbiased); large where x has more samples like it than y has. value = mean(witness_x) −
    mean(witness_y).
    """

    value: float
    p: float
    null: Float[Tensor, " b"]
    witness_x: Float[Tensor, " m"]
    witness_y: Float[Tensor, " n"]
    test: str
    biased: bool
    every: bool = False

    def rejected(self, level: float = 0.05) -> bool:
        """Whether p is at most `level`: then a difference is found that chance shows with that probability."""
        return self.p <= level

    def carriers(self, count: int = 10) -> tuple[Tensor, Tensor]:
        """Numbers of the samples of x that are least like y, and of those of y that are least like x, surest first."""
        checks.positive(count, "count", "a number of samples")
        return self.witness_x.argsort(descending=True, stable=True)[:count], self.witness_y.argsort(stable=True)[:count]

    def sentence(self, level: float = 0.05) -> str:
        """What was found, in words."""
        large = round(self.p * len(self.null)) if self.every else round(self.p * (1 + len(self.null))) - 1
        kind = "permutations" if self.test == "permutation" else "draws of the wild bootstrap"
        how = f"p = {self.p:.2g}; {large} of {'all ' * self.every}{len(self.null)} {kind} are as large"
        if self.rejected(level):
            return f"The samples differ: MMD² = {self.value:.4g} ({how})."
        few = 1 / (len(self.null) + (not self.every))
        if few > level:
            return f"Too few for a test at {level:g}: {how}, and no p-value could be below {few:.2g}."
        return f"No difference is found, which does not show that there is none: MMD² = {self.value:.4g} ({how})."

    def table(self) -> str:
        """The value beside the null distribution."""
        low, middle, high = (float(v) for v in self.null.quantile(self.null.new_tensor([0.05, 0.5, 0.95])))
        sides = f"{len(self.witness_x)}, {len(self.witness_y)}"
        return text_table(
            ["m, n", "MMD²", "null 5 %", "50 %", "95 %", "p", "test"],
            [[sides, self.value, low, middle, high, self.p, self.test]],
        )

    def plot(self) -> "Figure":
        """The value in its null distribution, and the witness of both samples."""
        from .pictures import draw_two_sample

        return draw_two_sample(self.null, self.value, self.p, (self.witness_x, self.witness_y), "MMD²")


def mmd(
    kernel: Kernel | Matrix,
    x: object,
    y: object,
    *,
    test: str = "permutation",
    draws: int = 1000,
    biased: bool | None = None,
    groups: tuple[Numbers, Numbers] | None = None,
    length: float | None = None,
    seed: int = 0,
    memory: Memory = None,
    progress: bool = True,
) -> TwoSample:
    """MMD² = mean k(x, x') + mean k(y, y') − 2 mean k(x, y), and its p-value: do x and y have one distribution?

    `kernel`: any of tangency, with x and y such as `tg.compute` takes; or a Gram of all samples, of which x and y are
    the numbers of rows. It must not have been fitted to one of the two alone (a network that was trained on x knows x).

    `test`: "permutation" for independent samples, whose p-value (1 + #)/(1 + draws) is exact at any size; where there
    are at most `draws` ways to divide the samples, all are gone through. `groups`: a pair of group numbers; samples of
    one group (images of one patient) stay together. "wild bootstrap" for two series in order of time, each of which
    remembers about `length` samples (default 20, of short series a tenth); its level holds for long series.
    `biased`: with k(x_i, x_i), as the wild bootstrap has it; without by default, so that the mean is 0 where there is
    no difference. Deterministic by `seed`, on any device.

    Cost: the Gram, and N² multiply–adds in float64 a draw, as matrix products. Gretton et al. 2012, "A kernel
    two-sample test"; Chwialkowski, Sejdinovic & Gretton 2014, "A wild bootstrap for degenerate kernel tests".

    >>> import tangency as tg
    >>> x, y = torch.randn(60, 3), torch.randn(60, 3) + 0.7
    >>> found = tg.distributions.mmd(tg.gaussian(torch.cat([x, y])), x, y, draws=200, progress=False)
    >>> found.rejected(), found.p
    (True, 0.004...)
    """
    options = _options(test, draws, biased, groups, length, memory)
    return _tested(pooled(kernel, x, y, memory, progress), options, seed, progress)


def mmd_features(
    x: Array | StoredFeatures,
    y: Array | StoredFeatures,
    *,
    test: str = "permutation",
    draws: int = 1000,
    biased: bool | None = None,
    groups: tuple[Numbers, Numbers] | None = None,
    length: float | None = None,
    seed: int = 0,
    memory: Memory = None,
    progress: bool = True,
) -> TwoSample:
    """MMD² = ‖mean φ(x) − mean φ(y)‖² by features [m, p], [n, p]: `mmd` for samples too many for a Gram.

    Features in memory, or stored ones, which are read block by block; the witness is of features about the mean of
    both. Options as for `mmd`. Cost: N·p multiply–adds a
    draw; the features are read once for all draws that fit into `memory` (128 MiB).

    >>> x, y = torch.randn(500, 4), torch.randn(400, 4) + 0.3
    >>> found = mmd_features(x, y, draws=100, progress=False)
    >>> abs(found.value - float((x.mean(0) - y.mean(0)).square().sum())) < 0.05, found.rejected()
    (True, True)
    """
    options = _options(test, draws, biased, groups, length, memory)
    return _tested(of_samples(pooled_features(x, y)), options, seed, progress)


@dataclass(frozen=True)
class _Options:
    """How it is tested, checked."""

    test: str
    draws: int
    biased: bool
    groups: tuple[Numbers, Numbers] | None
    length: float | None
    memory: int | None


def _options(
    test: str,
    draws: int,
    biased: bool | None,
    groups: tuple[Numbers, Numbers] | None,
    length: float | None,
    memory: Memory,
) -> _Options:
    """Refuse what does not go together, before anything is computed."""
    is_wild = checks.choice(test, "test", TESTS) == "wild bootstrap"
    checks.positive(draws, "draws", "a number of draws")
    if is_wild and biased is False:
        raise InputError("the wild bootstrap is of the biased statistic; leave biased= out, or test='permutation'.")
    if is_wild and groups is not None:
        raise InputError("groups= are permuted as one; the wild bootstrap is for series: leave one of the two out.")
    if length is not None and not is_wild:
        raise InputError("length= is how long a series remembers, for test='wild bootstrap'; permutations have none.")
    if length is not None and not checks.nonnegative(length, "length") > 0:
        raise InputError("length=0; needed: a number of samples above 0.")
    return _Options(test, draws, is_wild if biased is None else biased, groups, length, checks.memory(memory))


def _tested(both: Pooled, given: _Options, seed: int, progress: bool) -> TwoSample:
    """The test, for either way to have the kernel."""
    m, n = len(both.of_x), len(both.of_y)
    sizes(m, n, 2, "so that each has another to be compared with")
    own = torch.cat([torch.ones(m), torch.zeros(n)])[:, None]
    ends = both.spread(torch.cat([own, 1 - own], 1))
    product, diag = both.product(ends), both.diag()
    count = _Statistic(both, diag, product.sum(1), given.biased)
    value = float(count(ends[:, :1]))
    scale = float(diag.abs().mean())
    generator = torch.Generator().manual_seed(seed)
    if given.test == "permutation":
        drawn, every = _permuted(both, given, count, generator, progress)
    else:
        drawn, every = _wild(both, given, generator, progress), False
    p = null.p_value(value, drawn, scale, every=every)
    witness_x, witness_y = _witness(product, diag, both, given.biased)
    return TwoSample(value, p, drawn.cpu(), witness_x.cpu(), witness_y.cpu(), given.test, given.biased, every)


@dataclass(frozen=True, eq=False)
class _Statistic:
    """MMD² for columns that are 1 where a sample counts as x's: of all columns by one product with the kernel."""

    both: Pooled
    diag: Float[Tensor, " N"]
    rows: Float[Tensor, " N"]  # Σ_j k(i, j) over x and y
    biased: bool

    def __call__(self, z: Float[Tensor, "N b"]) -> Float[Tensor, " b"]:
        """zᵀKz is the sum over x; what is left of the rows' sums makes those over y and between them."""
        inside = torch.zeros(self.both.size, dtype=torch.bool)
        inside[torch.cat([self.both.of_x, self.both.of_y])] = True
        held = inside.to(z.device)
        rows, diag = self.rows[held], self.diag[held]
        xx, from_x = self.both.forms(z), rows @ z[held]
        xy, yy = from_x - xx, rows.sum() - 2 * from_x + xx
        m = z.sum(0)
        n = len(rows) - m
        if self.biased:
            return xx / m**2 + yy / n**2 - 2 * xy / (m * n)
        of_x = diag @ z[held]
        return (xx - of_x) / (m * (m - 1)) + (yy - diag.sum() + of_x) / (n * (n - 1)) - 2 * xy / (m * n)


def _permuted(
    both: Pooled, given: _Options, count: _Statistic, generator: torch.Generator, progress: bool
) -> tuple[Tensor, bool]:
    """The statistic of permuted samples, and whether these are all permutations."""
    groups, of_x = grouped(given.groups, len(both.of_x), len(both.of_y))
    total = int(groups.max()) + 1
    sizes(of_x, total - of_x, 1, "of groups that can be permuted")
    smallest = _smallest(groups, of_x)
    if smallest < 2 and not given.biased:
        raise InputError(
            "with these groups a permutation may leave one sample on a side, which has no other to be compared with; "
            "give biased=True."
        )
    if null.partitions(total, of_x, given.draws):
        return count(both.spread(null.every_partition(groups, of_x))), True
    draw = partial(null.permuted, groups, of_x)
    return _drawn(both, given, count, lambda k: both.spread(draw(k, generator)), progress), False


def _smallest(groups: Tensor, of_x: int) -> int:
    """The fewest samples that a permutation of groups may leave on a side."""
    held = groups.bincount().sort().values
    return int(min(held[:of_x].sum(), held[: len(held) - of_x].sum()))


def _wild(both: Pooled, given: _Options, generator: torch.Generator, progress: bool) -> Tensor:
    """vᵀKv with v = (W_x/m, −W_y/n)."""
    m, n = len(both.of_x), len(both.of_y)
    length = min(LENGTH, min(m, n) / 10) if given.length is None else given.length
    if length * 2 > min(m, n):
        raise InputError(f"length={length:g} beside series of {m} and {n} samples; needed: series many times as long.")

    def weights(k: int) -> Tensor:
        """Of both series."""
        series = [null.wild(size, length, k, generator) / size for size in (m, n)]
        return both.spread(torch.cat([series[0], -series[1]]))

    return _drawn(both, given, both.forms, weights, progress)


def _drawn(
    both: Pooled, given: _Options, count: Callable[[Tensor], Tensor], weights: Callable[[int], Tensor], progress: bool
) -> Tensor:
    """The statistic of all draws, as many at a time as fit into the memory."""
    parts = []
    with bar(given.draws, given.test, "draw", show=progress, delay=1) as tick:
        for k in null.widths(given.draws, both.width, given.memory):
            parts.append(count(weights(k)))
            tick(k)
    return torch.cat(parts)


def _witness(product: Tensor, diag: Tensor, both: Pooled, biased: bool) -> tuple[Tensor, Tensor]:
    """Mean similarity to x less mean similarity to y, of each sample, itself left out unless biased."""
    m, n = len(both.of_x), len(both.of_y)
    ix, iy = both.of_x.to(product.device), both.of_y.to(product.device)
    own_x, own_y = (0.0, 0.0) if biased else (diag[ix], diag[iy])
    less = 0 if biased else 1
    witness_x = (product[ix, 0] - own_x) / (m - less) - product[ix, 1] / n
    witness_y = product[iy, 0] / m - (product[iy, 1] - own_y) / (n - less)
    return witness_x, witness_y
