"""Kernels of infinitely wide networks, as kernels like all others: `tg.infinite_ntk(module)`, `tg.infinite_nngp`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Inputs
from ..errors import InputError, ModelError
from ..kernels.kernel import Kernel
from .layers.basic import Layer
from .layers.weights import Weights
from .moments.assemble import Tile, blocks, moment
from .moments.fields import Builder
from .moments.plan import Plan, near, portions, prepared, run
from .moments.state import Pairs, Side, State

# Pairs within a block are taken one by one where a sample's inputs are at most so many times its moments (heuristic).
NARROW = 8


@dataclass
class Ready:
    """A prepared batch: the plan for its shape, and its side of the pairs."""

    plan: Plan
    side: Side


@dataclass(frozen=True, eq=False)
class Infinite(Kernel):
    """The kernel of a network of infinite width: its NTK, or (`get` "nngp") the covariance of its outputs."""

    layer: Layer
    weights: Weights
    get: Literal["ntk", "nngp"] = "ntk"
    samples: int = 4096
    seed: int = 0
    twin: bool = False
    seen: set[Any] = field(default_factory=set, repr=False)  # forms of inputs that were looked at, warnings given

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        checks.inputs(x, name)
        x = tree.transform(lambda v: v.double() if v.is_floating_point() else v, x)
        for label, v in tree.leaves(x):
            checks.finite(v, name + label[1:])
        return x

    def read(self, x: Inputs) -> tuple[Builder, Plan]:
        """The network's operations for inputs of this shape; what of x alone is computed, is computed here."""
        build = Builder(tree.size(x), self.samples, self.seed, warned=self.seen)
        value = self.layer.grow(build, x, self.weights, "")
        return build, build.plan(value, self.twin)

    def prepare(self, x: Inputs, memory: int | None = None) -> Ready:
        build, plan = self.read(x)
        self._apart(x, build)
        size = tree.size(x)
        energy = build.energy
        if energy is None:  # only indices came in
            energy = torch.zeros(size, dtype=torch.float64, device=next(v for _, v in tree.leaves(x)).device)
        return Ready(plan, prepared(plan, Side(build.known, size, energy)))

    def _apart(self, x: Inputs, build: Builder) -> None:
        """No sample may depend on another one of its batch; looked at once for every form of inputs."""
        form = tuple((label, tuple(v.shape[1:])) for label, v in tree.leaves(x))
        if form in self.seen or tree.size(x) < 2:
            return
        one, _ = self.read(tree.take(x, slice(0, 1)))
        for slot, v in build.known.items():
            alone, among = one.known[slot][..., 0].double(), v[..., 0].double()
            if not torch.allclose(alone, among, rtol=1e-9, atol=1e-12, equal_nan=True) or one.numbers != build.numbers:
                raise ModelError(
                    "what forward() computes of one sample's input depends on the others of its batch. Normalise the "
                    "data beforehand, and reduce over other axes than the batch."
                )
        self.seen.add(form)

    def pair(self, a: Ready, b: Ready, workspace: int | None = None) -> Tensor:
        return self._moments(a, b, (self.get,), workspace)[self.get]

    def both(self, x: Inputs, y: Inputs | None = None) -> tuple[Tensor, Tensor]:
        """The NNGP and the NTK, in one pass.

        >>> import torch, tangency as tg
        >>> nngp, ntk = tg.infinite_ntk(torch.nn.Linear(3, 1)).both(torch.randn(4, 3))
        >>> torch.equal(nngp, ntk)  # of a linear model
        True
        """
        a, b = self._prepared(x, y)
        found = self._moments(a, b, ("nngp", "ntk"), None)
        return self.finite(found["nngp"], a, b), self.finite(found["ntk"], a, b)

    def error(self, x: Inputs, y: Inputs | None = None, *, repeats: int = 8) -> Tensor:
        """The standard error of k(x, y) where expectations are drawn, from as many other seeds; 0 where none is.

        Drawn are softmax attention, activations of sums that are not Gaussian, and with w_var="init" those right after
        a Linear layer of few inputs whose weights are uniform. Cost: `repeats` times k(x, y).
        """
        if repeats < 2:
            raise InputError(f"repeats={repeats}; needed: at least 2.")
        found = [replace(self, seed=self.seed + 1 + r)(x, y) for r in range(repeats)]
        return torch.stack(found).std(0)

    def diag(self, x: Inputs) -> Tensor:
        return self.prepared_diag(self.prepare(self.ready(x)))

    def prepared_diag(self, a: Ready) -> Tensor:
        if a.plan.batchwise:
            return self.pair(a, a).diagonal()
        own = self._own(a, self.get == "ntk")
        v = moment(a.plan, own.diagonal() if own.whole else own, self.get)
        return v.flatten(0, -2).T if v.dim() > 1 else v

    def _moments(self, a: Ready, b: Ready, want: tuple[str, ...], workspace: int | None) -> dict[str, Tensor]:
        """Block by block, each small enough for the cache; the upper half only where both sides are the same."""
        _same_network(a, b)
        plan, same, tangent, n, m = a.plan, a is b, "ntk" in want, a.side.size, b.side.size
        if plan.batchwise:
            return self._at_once(a, b, want)
        out, each = Tile(plan, n, m, want, a.side.energy), torch.arange(max(n, m), device=a.side.energy.device)
        inputs = sum(v.numel() for v in a.side.known.values())
        small = same and not plan.featured and inputs <= NARROW * n * plan.cell()
        for i, j in blocks(plan, n, m, workspace, same, small, a.side.energy.device.type):
            if small and i.start == j.start:  # each pair of the square once, one by one
                first, second = (
                    torch.triu_indices(i.stop - i.start, i.stop - i.start, device=a.side.energy.device) + i.start
                )
                meet = Pairs(a.side.rows(first), a.side.rows(second), zipped=True)
                out.pairs(first, second, self._met(plan, meet, tangent, first == second))
                j = slice(i.stop, j.stop)
            if j.start < j.stop:
                meet = Pairs(a.side.rows(i), b.side.rows(j))
                alone = each[i].unsqueeze(1) == each[j] if same and i.start == j.start else None
                out.block(i, j, self._met(plan, meet, tangent, alone), mirror=same)
        if same and not plan.exact_diagonal:
            out.pairs(each[:n], each[:n], self._own(a, tangent))
        return out.found

    def _met(self, plan: Plan, pairs: Pairs, tangent: bool, alone: Tensor | None) -> State:
        """The output's moments; of pairs whose inputs nearly coincide again, from their differences.

        `alone`: where samples meet themselves, which is exact or for the caller to see to.
        """
        seen: list[Tensor] | None = [] if plan.exact_near else None
        state = run(plan, pairs, plan.cross, tangent, inputs=seen)
        assert state is not None
        close = near(seen, pairs, alone) if seen else None
        if close is None:
            return state
        few = Pairs(pairs.a.rows(close[0]), pairs.b.rows(close[-1]), zipped=True, gaps=True)
        again = run(plan, few, plan.cross, tangent)
        assert again is not None
        ntk = None if state.ntk is None or again.ntk is None else state.ntk.index_put(close, again.ntk)
        return State(state.cov.index_put(close, again.cov), ntk, state.grid)

    def _own(self, a: Ready, tangent: bool) -> State:
        """Each sample with itself."""
        found = []
        for part in portions(a.plan, a.side, a.plan.cross):
            state = run(a.plan, Pairs(part, part, zipped=True, same=True), a.plan.cross, tangent)
            assert state is not None
            found.append(state)
        ntks = [s.ntk for s in found if s.ntk is not None]
        cov, ntk = torch.cat([s.cov for s in found], -1), torch.cat(ntks, -1) if ntks else None
        return replace(found[0], cov=cov, ntk=ntk, gap=None)

    def _at_once(self, a: Ready, b: Ready, want: tuple[str, ...]) -> dict[str, Tensor]:
        """A network that mixes the samples of a batch: the batch with itself, whole."""
        if a is not b:
            raise InputError(
                "BatchNorm in training mode makes the kernel one of a whole batch: k(x), not k(x, y). Give all samples "
                "as one x, or put the model into evaluation mode."
            )
        side = Side(a.side.known, a.side.size, a.side.energy)
        state = run(a.plan, Pairs(side, side), a.plan.cross, "ntk" in want, record=True)
        assert state is not None
        return {name: moment(a.plan, state, name) for name in want}

    def footprint(self, x: Inputs) -> tuple[int, int]:
        _, plan = self.read(tree.take(x, slice(0, 1)))
        inputs = sum(v[:1].numel() for _, v in tree.leaves(x))
        return 8 * (inputs + plan.own() + 1), 8 * plan.cell()

    def spec(self) -> dict[str, Any]:
        w = self.weights
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
        }


def _same_network(a: Ready, b: Ready) -> None:
    shapes = [{slot: tuple(v.shape[:-1]) for slot, v in r.side.known.items()} for r in (a, b)]
    grids = [[node.grid for node in r.plan.nodes] for r in (a, b)]
    if shapes[0] != shapes[1] or grids[0] != grids[1]:
        raise InputError(
            "the samples of x and of y have different shapes, so they are no inputs of one network. Give both alike."
        )
