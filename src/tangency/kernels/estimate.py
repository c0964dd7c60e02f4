"""How far a trace over outputs that was estimated by random directions is from the exact one, by their own spread."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from .._base.results import Result, text_table
from .._base.types import Float, Inputs
from ..engine.directions import Outputs
from ..errors import InputError
from .empirical import Empirical
from .kernel import Kernel


@dataclass(frozen=True, eq=False, repr=False)
class ProbeError(Result):
    """An estimate of k(x) by `probes` random directions of `outputs` outputs, and the standard error of every entry.

    K̂ is a mean of `probes` independent, unbiased estimates z_r; the standard error is their standard deviation divided
    by √probes. Relative errors are divided by √(k̂(x, x) k̂(y, y)).
    """

    probes: int
    outputs: int
    estimate: Float[Tensor, "n n"]
    standard_error: Float[Tensor, "n n"]

    UNITS: ClassVar[Mapping[str, str]] = {"estimate": "as the kernel", "standard_error": "as the kernel"}

    @property
    def relative(self) -> Float[Tensor, "n n"]:
        """The standard errors divided by √(k̂(x, x) k̂(y, y))."""
        size = self.estimate.diagonal().clamp_min(0).sqrt()
        return self.standard_error / (size[:, None] * size).clamp_min(torch.finfo(size.dtype).tiny)

    @property
    def rms(self) -> float:
        """The root of the mean square of the relative standard errors of pairs; of one sample alone, its own."""
        return float(self._pairs(self.relative).square().mean().sqrt())

    @property
    def own(self) -> float:
        """The same of the diagonal: of k̂(x, x) itself."""
        return float(self.relative.diagonal().square().mean().sqrt())

    def needed(self, error: float) -> int:
        """Probes for which `rms` is about `error`, as it falls with their root; no more than there are outputs, by
        which the trace is exact."""
        if not isinstance(error, (int, float)) or isinstance(error, bool) or not 0 < error < math.inf:
            raise InputError(f"error={error!r}; needed: a positive number, relative to √(k(x, x) k(y, y)).")
        return min(self.outputs, max(2, math.ceil(self.probes * (self.rms / error) ** 2)))

    def table(self) -> str:
        """Parts of the pairs, and the relative standard error below which each part lies."""
        errors = self._pairs(self.relative)
        parts = (0.5, 0.9, 0.99, 1.0)
        return text_table(["pairs", "standard error up to"], [[f"{p:.0%}", float(errors.quantile(p))] for p in parts])

    def __repr__(self) -> str:
        """Its figures, which say more than the shapes of its tensors."""
        return f"ProbeError(probes={self.probes} of {self.outputs} outputs, rms={self.rms:.3g}, own={self.own:.3g})"

    @staticmethod
    def _pairs(v: Float[Tensor, "n n"]) -> Tensor:
        """The entries of all pairs of different samples, each once."""
        n = len(v)
        i, j = torch.triu_indices(n, n, 1 if n > 1 else 0, device=v.device)
        return v[i, j].double()


def probe_error(kernel: Kernel, x: Inputs) -> ProbeError:
    """How far `tg.trace_ntk(model, probes=k)` is from the exact trace on the samples x, from the spread of its probes.

    Some dozen samples say enough. Of two or three probes the spread itself is rough: give eight or more. Cost: a
    forward and a backward pass for each probe.

    >>> import torch, tangency as tg
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 200))
    >>> x = torch.randn(6, 3)
    >>> error = tg.probe_error(tg.trace_ntk(model, probes=32), x)
    >>> error.rms < 0.2, error.needed(error.rms / 2) in (127, 128, 129)
    (True, True)
    """
    if not isinstance(kernel, Empirical) or kernel.probes is None:
        given = repr(kernel) if isinstance(kernel, Empirical) else f"a {type(kernel).__name__}"
        raise InputError(
            f"kernel is {given}, which is not estimated by probes; needed: tg.trace_ntk(model, probes=…) itself (of "
            "its cosine or multiples, the kernel inside)."
        )
    ready = kernel.ready(x)

    def tiles() -> Iterable[Tensor]:
        """What each direction adds to the estimate."""
        assert kernel.probes is not None
        for r in range(kernel.probes.count):
            blocks = kernel.capture(ready, None, Outputs(r, r + 1))
            yield kernel.finite(kernel.pair(blocks, blocks), blocks, blocks).detach()

    network = kernel.feature_map.network
    with torch.no_grad():
        total, spread = mean_and_error(tiles(), kernel.probes.count)
        some = kernel.ready(x)
        with network.modes():
            c = network.whole()(network.state(), some).shape[1]
    return ProbeError(kernel.probes.count, c, total, spread)


def mean_and_error(tiles: Iterable[Tensor], k: int) -> tuple[Tensor, Tensor]:
    """The mean of k estimates z_r and its standard error, from what each adds to the mean, z_r / k."""
    # Welford's updates: the difference of two large sums of squares would be rounding.
    mean = squares = torch.zeros(())
    for r, tile in enumerate(tiles):
        z = k * tile.double()
        mean, squares = (z, torch.zeros_like(z)) if r == 0 else (mean, squares)
        step = z - mean
        mean = mean + step / (r + 1)
        squares = squares + step * (z - mean)
    return mean, (squares / (k - 1) / k).sqrt()
