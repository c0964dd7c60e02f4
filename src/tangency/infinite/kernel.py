"""Kernels of infinitely wide networks, as kernels like all others: `tg.infinite_ntk(module)`, `tg.infinite_nngp`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from .. import _check, _tree
from .._types import Inputs
from ..errors import InputError, ModelError
from ..kernel import Kernel
from .fields import Builder
from .layers import Layer
from .plan import Plan, near, prepared, run
from .state import Pairs, Side, State
from .weights import Weights

# Bytes of one state of a block of pairs: a few of them lie in a core's cache (heuristic).
CACHE = 1 << 20
GPU = 1 << 28
# States alive at a time in the loop, at most (heuristic): inputs, outputs, temporaries, for cov and ntk.
ALIVE = 8


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
    seen: set[Any] = field(default_factory=set, repr=False)  # forms of inputs that were looked at

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        _check.inputs(x, name)
        x = _tree.transform(lambda v: v.double() if v.is_floating_point() else v, x)
        for label, v in _tree.leaves(x):
            _check.finite(v, name + label[1:])
        return x

    def read(self, x: Inputs) -> tuple[Builder, Plan]:
        """The network's operations for inputs of this shape; what of x alone is computed, is computed here."""
        build = Builder(_tree.size(x), self.samples, self.seed)
        value = self.layer.grow(build, x, self.weights, "")
        return build, build.plan(value, self.twin)

    def prepare(self, x: Inputs, memory: int | None = None) -> Ready:
        build, plan = self.read(x)
        self._apart(x, build)
        size = _tree.size(x)
        energy = build.energy
        if energy is None:  # only indices came in
            energy = torch.zeros(size, dtype=torch.float64, device=next(v for _, v in _tree.leaves(x)).device)
        return Ready(plan, prepared(plan, Side(build.known, size, energy)))

    def _apart(self, x: Inputs, build: Builder) -> None:
        """No sample may depend on another one of its batch; looked at once for every form of inputs."""
        form = tuple((label, tuple(v.shape[1:])) for label, v in _tree.leaves(x))
        if form in self.seen or _tree.size(x) < 2:
            return
        one, _ = self.read(_tree.take(x, slice(0, 1)))
        for slot, v in build.known.items():
            alone, among = one.known[slot][..., 0].double(), v[..., 0].double()
            if not torch.allclose(alone, among, rtol=1e-9, atol=1e-12, equal_nan=True):
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
        """The standard error of k(x, y) where expectations are drawn (softmax attention): from other seeds; else 0.

        Cost: `repeats` times k(x, y).
        """
        if repeats < 2:
            raise InputError(f"repeats={repeats}; needed: at least 2.")
        found = [replace(self, seed=self.seed + 1 + r)(x, y) for r in range(repeats)]
        return torch.stack(found).std(0)

    def diag(self, x: Inputs) -> Tensor:
        a = self.prepare(self.ready(x))
        if a.plan.batchwise:
            return self.pair(a, a).diagonal()
        own = self._own(a, self.get == "ntk").diagonal() if a.plan.nodes[-1].grid else self._own(a, self.get == "ntk")
        v = self._asked(own, self.get, a.plan)
        return v.flatten(0, -2).T if v.dim() > 1 else v

    def _moments(self, a: Ready, b: Ready, want: tuple[str, ...], workspace: int | None) -> dict[str, Tensor]:
        """Block by block, each small enough for the cache; the upper half only where both sides are the same."""
        _same_network(a, b)
        plan, same, tangent = a.plan, a is b, "ntk" in want
        if plan.batchwise:
            return self._at_once(a, b, want)
        p = prod(plan.nodes[-1].grid)
        shape = (a.side.size, p, b.side.size, p) if plan.nodes[-1].grid else (a.side.size, b.side.size)
        found = {name: a.side.energy.new_empty(shape) for name in want}
        half = len(shape) // 2
        for i, j in _blocks(plan, a.side.size, b.side.size, workspace, same, a.side.energy.device.type):
            state = self._tile(plan, a.side.rows(i), b.side.rows(j), tangent, i.start - j.start if same else None)
            for name, out in found.items():
                tile = _arranged(self._asked(state, name, plan), p, half)
                tile = _mirrored(tile, half) if same and j.start == i.start else tile
                out[(i, slice(None), j) if half == 2 else (i, j)] = tile
                if same:
                    turned = tile.permute(2, 3, 0, 1) if half == 2 else tile.T
                    out[(j, slice(None), i) if half == 2 else (j, i)] = turned
        if same and not plan.exact_diagonal:
            own, each = self._own(a, tangent), torch.arange(a.side.size, device=a.side.energy.device)
            for name, out in found.items():
                v = self._asked(own, name, plan)
                if half == 2:
                    out[each, :, each] = v.reshape(p, p, -1).permute(2, 0, 1)
                else:
                    out[each, each] = v
        return found

    def _asked(self, state: State, name: str, plan: Plan) -> Tensor:
        if name == "ntk":
            return torch.zeros_like(state.cov) if state.ntk is None else state.ntk
        return torch.zeros_like(state.cov) if plan.twin else state.cov

    def _tile(self, plan: Plan, a: Side, b: Side, tangent: bool, diagonal: int | None) -> State:
        """All pairs of two blocks; those whose inputs nearly coincide again, from their differences."""
        seen: list[Tensor] | None = [] if plan.exact_near else None
        state = run(plan, Pairs(a, b), plan.cross, tangent, inputs=seen)
        assert state is not None
        close = near(seen, a, b, diagonal) if seen else None
        if close is None:
            return state
        i, j = close.unbind(1)
        few = run(plan, Pairs(a.rows(i), b.rows(j), zipped=True), plan.cross, tangent)
        assert few is not None
        ntk = None if state.ntk is None or few.ntk is None else state.ntk.index_put((i, j), few.ntk)
        return State(state.cov.index_put((i, j), few.cov), ntk, state.grid)

    def _own(self, a: Ready, tangent: bool) -> State:
        """Each sample with itself."""
        state = run(a.plan, Pairs(a.side, a.side, zipped=True, same=True), a.plan.cross, tangent)
        assert state is not None
        return state

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
        return {name: self._asked(state, name, a.plan) for name in want}

    def footprint(self, x: Inputs) -> tuple[int, int]:
        _, plan = self.read(_tree.take(x, slice(0, 1)))
        inputs = sum(v[:1].numel() for _, v in _tree.leaves(x))
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


def _mirrored(tile: Tensor, half: int) -> Tensor:
    """A block that begins on the diagonal, its square symmetric to the last bit: the upper half counts."""
    rows = tile.shape[0]
    square = tile[:, :rows] if half == 1 else tile[:, :, :rows]
    flat = square.reshape(square.shape[:half].numel(), -1)
    flat = flat.triu() + flat.triu(1).T
    rest = tile[:, rows:] if half == 1 else tile[:, :, rows:]
    return torch.cat([flat.reshape(square.shape), rest], half)


def _arranged(v: Tensor, p: int, half: int) -> Tensor:
    """[*grid, *grid, i, j] as [i, s, j, t]."""
    return v if half == 1 else v.reshape(p, p, *v.shape[-2:]).permute(2, 0, 3, 1)


def _blocks(
    plan: Plan, n: int, m: int, workspace: int | None, same: bool, device: str
) -> Iterator[tuple[slice, slice]]:
    """Blocks of pairs whose states lie in the cache; from the diagonal on where both sides are the same."""
    most = CACHE if device == "cpu" else GPU
    room = most if workspace is None else max(8, min(most, workspace // ALIVE))
    pairs = max(1, room // (8 * plan.cell()))
    columns = max(1, min(m, int(2 * pairs**0.5), pairs))  # at least as many as rows: one block holds the diagonal's
    rows = max(1, min(n, pairs // columns))
    for i in range(0, n, rows):
        for j in range(i if same else 0, m, columns):
            yield slice(i, min(i + rows, n)), slice(j, min(j + columns, m))
