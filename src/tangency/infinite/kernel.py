"""Kernels of infinitely wide networks, as kernels like all others: `tg.infinite_ntk(module)`, `tg.infinite_nngp`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import WORDS, Inputs, Spec
from ..engine.modes import numerical_modes
from ..errors import InputError, ModelError, NonFiniteError
from ..kernels.costs import Costs
from ..kernels.kernel import Kernel, all_finite
from .costs import recursion_costs
from .layers.basic import Layer
from .layers.weights import Weights
from .limits import Limits, recursion_limits
from .moments.assemble import PreparedBatch, gram_tile, output_moment, own_moments, prepared_side
from .moments.core import Side
from .moments.fields import Builder
from .moments.positions import Resample, Take
from .moments.recursion import Recursion


class BothKernels(NamedTuple):
    """The two kernels of one network of infinite width, each [n, m] (or [n, s, m, t] with positions)."""

    nngp: Tensor
    ntk: Tensor


@dataclass(frozen=True, eq=False, repr=False)
class Infinite(Kernel):
    """The kernel of a network of infinite width: its NTK, or (`get` "nngp") the covariance of its outputs."""

    layer: Layer
    weights: Weights
    get: Literal["ntk", "nngp"] = "ntk"
    samples: int = 4096
    seed: int = 0
    twin: bool = False
    dtype: torch.dtype = torch.float64  # of tiles, and of the moments of pairs; those of one sample are in float64
    device: torch.device | None = None  # where pairs are computed; None: where the inputs lie
    seen: set[object] = field(default_factory=set, repr=False)  # forms of inputs that were looked at, warnings given

    def __repr__(self) -> str:
        """Which kernel, of which network, in which parametrisation."""
        source = getattr(self.layer, "source", self.layer)
        kind = "" if self.dtype == torch.float64 else f", {self._type}"
        how = f"{self.weights.parametrization} parametrisation"
        return f"Infinite({self.get!r} of {type(source).__name__}, {how}{kind})"

    @property
    def _type(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """As `Kernel.ready`: in float64, for a recursion over layers loses digits with each; finite."""
        given = tree.given(x, name)
        ready = tree.cast(given if self.device is None else tree.to(given, self.device), torch.float64, name)
        for label, v in tree.leaves(ready):
            checks.finite(v, name + label[1:])
        return ready

    def read(self, x: Inputs) -> tuple[Builder, Recursion]:
        """The network's operations for inputs of this shape; what of x alone is computed, is computed here."""
        build = Builder(tree.size(x), self.samples, self.seed, warned=self.seen)
        value = self.layer.grow(build, x, self.weights, "")
        return build, build.recursion(value, self.twin)

    def prepare(self, x: Inputs, memory: int | None = None) -> PreparedBatch:
        """As `Kernel.prepare`: the recursion for inputs of this shape, and each sample's own moments."""
        form = tuple((label, tuple(v.shape[1:])) for label, v in tree.leaves(x))
        build, recursion = self.read(x)
        # No sample may depend on another one of its batch. Once for every form of inputs: it costs two more readings.
        # With BatchNorm in training mode they do, and one alone has no statistics.
        if form not in self.seen and build.size > 1 and not recursion.batchwise:
            for at in (0, build.size - 1):  # the last too: a running sum leaves the first one as it is
                alone, _ = self.read(tree.take(x, slice(at, at + 1)))
                self._check_apart(alone, build, at)
            self.seen.add(form)
        energy = build.energy
        if energy is None:  # only indices came in
            energy = torch.zeros(build.size, dtype=torch.float64, device=next(v for _, v in tree.leaves(x)).device)
        if not all_finite(energy):
            sample = int((~energy.isfinite()).nonzero()[0])
            raise NonFiniteError(
                f"the squares of sample {sample} are too large for float64, in which the kernel is computed. Scale the "
                "inputs.",
                sample,
                "",
            )
        side = prepared_side(recursion, Side(build.known, build.size, energy))
        if self.dtype != torch.float64 and not recursion.batchwise:
            # Own moments by the very operations of the pairs, not those of float64 rounded: then equal patches have
            # equal moments to the last bit, and the angle 0 instead of √ε (measured: errors of 1e-7 instead of 3e-5).
            with numerical_modes(energy.device):
                side = prepared_side(recursion, side.rounded(self.dtype))
        return PreparedBatch(recursion, side)

    def _check_apart(self, alone: Builder, among: Builder, at: int) -> None:
        """Refuse a network of which sample `at` has other known values alone than among the others."""
        same = alone.numbers == among.numbers and alone.known.keys() == among.known.keys()
        # Known matrices over positions are numbers of their operations: those of one batch may be taken for fixed ones.
        same = same and [n.grid for n in alone.nodes] == [n.grid for n in among.nodes]
        for a, b in zip(alone.nodes, among.nodes, strict=True) if same else ():
            same = same and (not isinstance(a.op, (Resample, Take)) or a.op == b.op)
        for slot, v in among.known.items() if same else ():
            by_itself, in_batch = alone.known[slot][..., 0].double(), v[..., at].double()
            alike = by_itself.shape == in_batch.shape
            same = same and alike and torch.allclose(by_itself, in_batch, rtol=1e-9, atol=1e-12, equal_nan=True)
        if among.known and not same:
            raise ModelError(
                "what forward() computes of one sample's input depends on the others of its batch. Normalise the data "
                "beforehand, and reduce over other axes than the batch."
            )

    def pair(self, a: PreparedBatch, b: PreparedBatch, workspace: int | None = None) -> Tensor:
        """As `Kernel.pair`: [n, m], or [n, s, m, t] where the outputs have positions."""
        return self._tiles(a, b, (self.get,), workspace)[self.get]

    def _tiles(
        self, a: PreparedBatch, b: PreparedBatch, want: Sequence[str], workspace: int | None
    ) -> dict[str, Tensor]:
        with numerical_modes(a.side.energy.device):
            tiles = gram_tile(a, b, want, workspace)
        return {name: v.to(self.dtype) for name, v in tiles.items()}  # BatchNorm's are in float64 whatever was asked

    def both(self, x1: Inputs, x2: Inputs | None = None) -> BothKernels:
        """The NNGP and the NTK, in one pass.

        >>> import torch, tangency as tg
        >>> nngp, ntk = tg.infinite_ntk(torch.nn.Linear(3, 1)).both(torch.randn(4, 3))
        >>> torch.equal(nngp, ntk)  # of a linear model
        True
        """
        a, b = self._prepared(x1, x2)
        tiles = self._tiles(a, b, ("nngp", "ntk"), None)
        return BothKernels(self.finite(tiles["nngp"], a, b), self.finite(tiles["ntk"], a, b))

    def error(self, x1: Inputs, x2: Inputs | None = None, *, repeats: int = 8) -> Tensor:
        """The standard error of k(x1, x2) where expectations are drawn, from as many other seeds; 0 where none is.

        Drawn are softmax attention, LSTM and GRU, activations of sums that are not Gaussian, max pooling, activations
        after depthwise convolutions, BatchNorm in training mode before other activations than ReLU, and with
        w_var="init" activations right after a Linear layer of few inputs whose weights are uniform. Cost: `repeats`
        times k(x1, x2).
        """
        if repeats < 2:
            raise InputError(f"repeats={repeats}; needed: at least 2.")
        draws = [replace(self, seed=self.seed + 1 + r)(x1, x2) for r in range(repeats)]
        return torch.stack(draws).std(0)

    def diag(self, x: Inputs) -> Tensor:
        """As `Kernel.diag`, of the whole batch at once, which BatchNorm may mix."""
        a = self.prepare(self.ready(x))
        return self.finite(self.prepared_diag(a), a, a)

    def prepared_diag(self, a: PreparedBatch) -> Tensor:
        """As `Kernel.prepared_diag`: [n], or [n, s] with positions."""
        if a.recursion.batchwise:
            return self.pair(a, a).diagonal()
        # A sample with itself one by one: exact, where the matrix's diagonal may have rounded.
        moments = own_moments(a, self.get == "ntk")
        v = output_moment(a.recursion, moments.diagonal() if moments.whole else moments, self.get)
        v = v.to(self.dtype)
        return v.flatten(0, -2).T if v.dim() > 1 else v

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """As `Kernel.footprint`: a sample in float64 and, where pairs are in another type, in that one too."""
        # The recursion is that of any number of samples.
        _, recursion = self.read(tree.take(x, slice(0, 1)))
        inputs = sum(v[:1].numel() for _, v in tree.leaves(x))
        size = 8 if self.dtype == torch.float64 else 8 + self.dtype.itemsize
        return size * (inputs + recursion.kept + 1), 8 * recursion.cell

    def costs(self, x1: Inputs, x2: Inputs | None = None) -> Costs:
        """What a tile of x1 with x2 takes, layer by layer, and what computes it: fused kernels, or the plain recursion.

        >>> import torch, tangency as tg
        >>> print(tg.infinite_ntk(torch.nn.Linear(3, 1)).costs(torch.eye(3)).rows[0].method)
        plain recursion
        """
        x = self.ready(x1)
        _, recursion = self.read(tree.take(x, slice(0, 1)))
        device = next(v for _, v in tree.leaves(x)).device
        sizes = tree.size(x), tree.size(x if x2 is None else self.ready(x2, "x2"))
        return recursion_costs(f"infinite {self.get}", recursion, device, self.dtype, sizes, x2 is None)

    def limits(self, x: Inputs) -> Limits:
        """Which limit is taken at every layer, and how its moments are computed, for inputs like x.

        In the order in which layers are read; a name that no module has is that of a line in forward().

        >>> import torch, tangency as tg
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        >>> tg.infinite_ntk(net).limits(torch.eye(3)).rows[1].how
        'Hermite expansion'
        """
        _, recursion = self.read(self.ready(x))
        source = getattr(self.layer, "source", self.layer)
        return recursion_limits(f"infinite {self.get} of {type(source).__name__}", recursion)

    def spec(self) -> Spec:
        """As `Kernel.spec`: the network, every number that its weights were given, and which limits are taken."""
        w, says = self.weights, self.layer.says()
        return {
            "kernel": f"infinite {self.get}",
            "network": self.layer.spec(),
            "parametrization": w.parametrization,
            "w_var": dict(w.w_var) if isinstance(w.w_var, Mapping) else w.w_var,
            "b_var": dict(w.b_var) if isinstance(w.b_var, Mapping) else w.b_var,
            "lr": dict(w.lr) if isinstance(w.lr, Mapping) else w.lr,
            "layers": self.layer.numbers(w),
            "samples": self.samples,
            "seed": self.seed,
            "twin": self.twin,
            # Only where it is not what it always was: stores from before there was a choice stay valid.
            **({} if self.dtype == torch.float64 else {"dtype": self._type}),
            **({WORDS: says} if says else {}),
        }
