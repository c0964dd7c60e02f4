"""The Gaussian kernel on the samples themselves: what kernels of networks are compared with."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Inputs, Spec
from ..errors import InputError
from .kernel import Kernel

# Samples among which the median distance is found (heuristic: half a million pairs give it to a percent or so).
COMPARED = 1000


@dataclass(frozen=True, eq=False)
class Gaussian(Kernel):
    """exp(−‖x − x'‖²/(2 s²)), s the bandwidth, of samples as they are given, flattened."""

    bandwidth: float

    def ready(self, x: Inputs, name: str = "x") -> Tensor:
        """x checked: one tensor of real numbers."""
        return _rows(x, name)

    def prepare(self, x: Inputs, memory: int | None = None) -> Tensor:
        """As `Kernel.prepare`: samples as rows, by the bandwidth, in float64."""
        assert isinstance(x, Tensor)
        return x.reshape(len(x), -1).double() / self.bandwidth

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """As `Kernel.footprint`: a row in float64."""
        assert isinstance(x, Tensor)
        return 8 * x[0].numel(), 0

    def pair(self, a: Tensor, b: Tensor, workspace: int | None = None) -> Tensor:
        """As `Kernel.pair`."""
        if a.shape[1] != b.shape[1]:
            raise InputError(f"samples of {a.shape[1]} and of {b.shape[1]} numbers were given; needed: of one size.")
        # Distances from products lose the digits that two samples have in common: float64 has enough of them.
        squared = a.square().sum(1)[:, None] + b.square().sum(1) - 2 * a @ b.T
        if a is b:
            squared = (squared + squared.T) / 2
            squared = squared - torch.diag_embed(squared.diagonal())
        return (-squared.clamp_min(0) / 2).exp()

    def prepared_diag(self, a: Tensor) -> Tensor:
        """1 for every sample."""
        return a.new_ones(len(a))

    def spec(self) -> Spec:
        """As `Kernel.spec`."""
        return {"kernel": "gaussian", "bandwidth": self.bandwidth}


def gaussian(x: Inputs | None = None, *, bandwidth: float | None = None, seed: int = 0) -> Gaussian:
    """exp(−‖x − x'‖²/(2 s²)) on the samples themselves, s given, or the median distance between the samples x.

    Of more than 1,000 samples, that of 1,000 drawn by `seed`; pairs that are equal have none. For a two-sample test
    give both samples together, so that the bandwidth does not know which is which: `tg.gaussian(torch.cat([x, y]))`.
    On features of a network it is a kernel of the features. Entries are float64.

    Gretton et al. 2012, "A kernel two-sample test", has the median.

    >>> import tangency as tg
    >>> x = torch.tensor([[0.0], [1.0], [2.0]])
    >>> k = tg.gaussian(x)
    >>> k.bandwidth, round(float(k(x)[0, 1]), 4)
    (1.0, 0.6065)
    """
    if (x is None) == (bandwidth is None):
        raise InputError("needed: samples whose median distance is the bandwidth, or bandwidth=, one of the two.")
    if x is None:
        size = checks.nonnegative(bandwidth, "bandwidth")
        if size == 0:
            raise InputError("bandwidth=0; needed: a number above 0.")
        return Gaussian(size)
    rows = _rows(x, "x")
    rows = rows.reshape(len(rows), -1)
    if len(rows) > COMPARED:
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:COMPARED].to(rows.device)]
    if len(rows) < 2:
        raise InputError(
            f"x has {len(rows)} sample, which has no distance to others; needed: two or more, or bandwidth=."
        )
    apart = torch.pdist(rows.double())
    apart = apart[apart > 0]
    if not len(apart):
        raise InputError("all samples are equal, so they have no distance. Give bandwidth=.")
    return Gaussian(float(apart.median()))


def _rows(x: Inputs, name: str) -> Tensor:
    """One tensor of finite real numbers, [n, …]."""
    made = tree.given(x, name)
    if not isinstance(made, Tensor):
        raise InputError(f"{name} is a {type(x).__name__}; the Gaussian kernel takes one tensor or array [n, …].")
    if made.is_complex():
        raise InputError(f"{name} is {made.dtype}; needed: real numbers.")
    checks.finite(made, name)
    return made
