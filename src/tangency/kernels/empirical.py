"""Kernels of finite networks: inner products of per-sample features, one block per parameter."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from .._base import tree
from .._base.fingerprint import architecture, describe, digest
from .._base.types import Inputs, Spec
from ..engine.blocks import DenseBlock, OuterBlock
from ..engine.contraction import TileSum, add_to_each
from ..engine.directions import Outputs, Probes, Spread
from ..engine.expansion import squared_norms
from ..engine.features import Features, Jacobian, check_fits
from ..engine.methods import Method, choose_method
from ..engine.narrow import EIGHT
from ..errors import NonFiniteError, PerformanceWarning
from .costs import CostRow, Costs
from .grouped import Blocks, Grouped, Side, each, finest, placed, some, traced
from .kernel import Kernel

# Outputs from which on it is said what they cost (heuristic), before the work.
MANY = 100


@dataclass(frozen=True, eq=False, repr=False)
class Empirical(Kernel):
    """Σ over parameters of ⟨φ(x1), φ(x2)⟩: traced over outputs [n, m], or full [n, c, m, d]."""

    name: str
    feature_map: Features
    trace: bool
    method: Method = None

    def __repr__(self) -> str:
        """Its name and the model's type: not the model, and never its weights."""
        return f"Empirical({self.name!r} of {type(self.feature_map.network.model).__name__})"

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """As `Kernel.ready`: in the type of the parameters, on their device."""
        return self.feature_map.network.ready(x, name)

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """As `Kernel.footprint`, from a probe of two samples."""
        self._say_outputs(x)
        return self.feature_map.footprint(x, self._form)

    def entry(self, x: Inputs) -> Tensor:
        """As `Kernel.entry`; a tangent kernel's is known from the probe, without gradients of a sample."""
        if not isinstance(self.feature_map, Jacobian):
            return super().entry(x)
        network, c = self.feature_map.network, self.feature_map.plan(x).c
        state, wide = network.state(), torch.float32
        if not network.half:  # as `capture` widens all blocks
            wide = reduce(torch.promote_types, [state[k].dtype for k in network.trainable])
        return torch.zeros((1, 1) if self.trace else (1, c, 1, c), dtype=wide, device=self.device)

    @property
    def device(self) -> torch.device:
        """That of the parameters."""
        return next(self.feature_map.network.model.parameters()).device

    def prepare(self, x: Inputs, memory: int | None = None) -> Side:
        """As `Kernel.prepare`: the features, in micro-batches that fit into `memory`.

        Where those of all outputs would be too large, the samples alone: gradients are then captured when they are
        multiplied, a group of outputs at a time, whose tiles are added up.
        """
        self._say_outputs(x)
        groups = self.feature_map.groups(x)
        if not groups:
            return self.feature_map(x, memory, self._form)
        return Grouped(x, groups, memory, tree.size(x) * self.feature_map.footprint(x, self._form)[0])

    def capture(self, x: Inputs, memory: int | None, outputs: Outputs) -> Blocks:
        """The features of some of the outputs, x being ready."""
        return self.feature_map(x, memory, self._form, outputs)

    def _say_outputs(self, x: Inputs) -> None:
        """Warn once of what many outputs cost."""
        known = self.feature_map
        if not isinstance(known, Jacobian) or known.network.directions or MANY in known.said:
            return
        known.said.add(MANY)
        if (c := known.plan(x).c) > MANY:
            warnings.warn(
                f"the kernel is of {c:,} outputs: {c:,} backward passes for every sample. Less costs: "
                "tg.trace_ntk(model, probes=16), an estimate of the trace by 16 (tg.probe_error measures its error); "
                "tg.pseudo_ntk(model), one; tg.head_ntk(model, head), those of the outputs that matter.",
                PerformanceWarning,
                stacklevel=5,
            )

    def check_room(self, x1: Inputs, x2: Inputs) -> None:
        """As `Kernel.check_room`."""
        n, m, first = tree.size(x1), tree.size(x2), next(self.feature_map.network.model.parameters())
        c, d = (1, 1) if self.trace else (self._count(x1), self._count(x2))
        check_fits(
            n * c * m * d * max(4, first.element_size()),
            self.device,
            f"the kernel of {n} by {m} samples" + (f", full between {c} outputs," if c > 1 else "") + " takes",
            "Keep it on disk: tg.compute(kernel, x, store=…)"
            + ("; a trace, or a head of fewer outputs, takes less: tg.trace_ntk, tg.head_ntk." if c > 1 else "."),
        )

    def _count(self, x: Inputs) -> int:
        """How many outputs a sample of x has."""
        return self.feature_map.plan(x).c if isinstance(self.feature_map, Jacobian) else 1

    def brief(self, x: Inputs) -> Kernel:
        """As `Kernel.brief`: a trace over many outputs by a few directions, in which all of them take part."""
        if not self.trace or not self.feature_map.groups(x):
            return self
        return replace(self, feature_map=Jacobian(self.feature_map.network.through(Spread())))

    def outputs(self, x: Inputs) -> Tensor:
        """The network's outputs [n, c], its head included."""
        network = self.feature_map.network.whole()
        with network.modes():
            return network(network.state(), x)

    def _forced(self, name: str) -> str | None:
        """The method that was asked for, for one parameter."""
        return self.method.get(name) if isinstance(self.method, Mapping) else self.method

    def _form(self, name: str) -> bool:
        """Whether the gradients of a parameter may be formed; "in place" needs their factors."""
        return self._forced(name) != "in place"

    def diagnose(self, a: Side) -> None:
        """As `Kernel.diagnose`, with the parameter whose gradient it is."""
        if isinstance(a, Grouped):
            for blocks in each(a, self.capture):
                self.diagnose(blocks)
            return
        # (sample, parameter), to name the first sample, and its first parameter, whatever the order of the blocks.
        bad: list[tuple[int, str]] = []
        for name, block in a.items():
            for t in block.tensors():
                t = t.float() if t.dtype == EIGHT else t
                good = t.flatten(1).isfinite().all(1) if t.is_floating_point() else None
                if good is not None and not bool(good.all()):
                    bad.append((int((~good).nonzero()[0]), name))
        if bad:
            sample = min(s for s, _ in bad)
            name = next(n for s, n in bad if s == sample)
            raise NonFiniteError(
                f"the gradient for sample {sample} is not finite at parameter {name}. Check that input, or use a wider "
                "dtype.",
                sample,
                name,
            )

    def pair(self, a: Side, b: Side, workspace: int | None = None) -> Tensor:
        """As `Kernel.pair`: the parameters' products, summed. Differentiable if the features are."""
        if isinstance(a, Grouped) or isinstance(b, Grouped):
            return self._of_groups([a], b, workspace)[0]
        return self._tiles([a], b, workspace)[0]

    def pairs(self, rows: Sequence[Side], b: Side, workspace: int | None = None) -> list[Tensor]:
        """As `Kernel.pairs`: gradients of b that must be formed are formed once for all rows."""
        blocks = [a for a in rows if not isinstance(a, Grouped)]
        if isinstance(b, Grouped) or len(blocks) < len(rows):
            return [self.pair(rows[0], b, workspace)] if len(rows) == 1 else self._of_groups(rows, b, workspace)
        # A tile is a sum in the order of its parameters: together go only those whose parameters are the same.
        if len(rows) == 1 or any(a is b or a.keys() != blocks[0].keys() for a in blocks):
            return [self.pair(a, b, workspace) for a in blocks]
        return self._tiles(blocks, b, workspace)

    def _of_groups(self, rows: Sequence[Side], b: Side, workspace: int | None) -> list[Tensor]:
        """The tiles of each of the rows with b, some of which are captured a group of outputs at a time."""

        def tile(left: Blocks, right: Blocks) -> dict[str, Tensor]:
            """Of one group of outputs with another."""
            return {"": self._tiles([left], right, workspace)[0]}

        return [tiles[""] for tiles in self._by_outputs(rows, b, tile)]

    def _by_outputs(
        self, rows: Sequence[Side], b: Side, tile: Callable[[Blocks, Blocks], dict[str, Tensor]]
    ) -> list[dict[str, Tensor]]:
        """What `tile` makes of a group of outputs, put together for all of them."""
        if self.trace:
            return traced(rows, b, self.capture, tile)
        return [placed(a, b, self.capture, tile) for a in rows]

    def _tiles(self, rows: Sequence[Blocks], b: Blocks, workspace: int | None) -> list[Tensor]:
        network, second = self.feature_map.network, next(iter(b.values()))
        differentiable = torch.is_grad_enabled() and any(
            t.requires_grad for side in (*rows, b) for block in side.values() for t in block.tensors()
        )
        sums = []
        for a in rows:
            first = next(iter(a.values()))
            options = {"trace": self.trace, "differentiable": differentiable, "eight": network.eight}
            sums.append(TileSum(first, first if a is b else second, workspace=workspace, **options))
        names = rows[0].keys() & b.keys()
        with network.modes(), torch.set_grad_enabled(differentiable):
            # A weight's product brings its bias along. A parameter that one of the batches does not reach adds nothing.
            done: list[set[str]] = [set() for _ in rows]
            for name in rows[0]:
                left = [k for k in range(len(rows)) if name in names and name not in done[k]]
                blocks = [rows[k][name] for k in left]
                along = add_to_each([sums[k] for k in left], blocks, b[name], self._forced(name), names) if left else []
                for k, brought in zip(left, along, strict=True):
                    done[k] |= brought
            tiles = [one.result() for one in sums]
            if network.eight and rows[0] is b and not differentiable:
                # Rounding to 8 bits adds up in a square, where it has one sign, and cosines divide by these.
                size = self.prepared_diag(b).flatten()
                tiles[0].view(len(size), len(size)).diagonal().copy_(size)
            return tiles

    def parts(self, x1: Inputs, x2: Inputs | None = None) -> dict[str, Tensor]:
        """As `Kernel.parts`: the Gram matrix of each parameter (or layer), zero where the outputs do not use it."""
        a, b = self._prepared(x1, x2)
        if isinstance(a, Grouped) or isinstance(b, Grouped):
            grams = self._by_outputs([a], b, self._by_name)[0]
        else:
            grams = self._by_name(a, b)
        names = self.feature_map.network.trainable if isinstance(self.feature_map, Jacobian) else tuple(grams)
        # A network that uses no parameter is refused.
        return {name: grams[name] if name in grams else torch.zeros_like(next(iter(grams.values()))) for name in names}

    def _by_name(self, a: Blocks, b: Blocks) -> dict[str, Tensor]:
        """The Gram matrix of each parameter that both batches use."""
        grams = {}
        for name in (k for k in a if k in b):
            left = {name: a[name]}
            right = left if a is b else {name: b[name]}
            grams[name] = self.finite(self.pair(left, right), left, right)
        return grams

    def prepared_diag(self, a: Side) -> Tensor:
        """As `Kernel.prepared_diag`, without products of different samples."""
        if isinstance(a, Grouped):
            parts = [self.prepared_diag(blocks) for blocks in each(a, self.capture)]
            return torch.stack(parts).sum(0) if self.trace else torch.cat(parts, 1)
        with self.feature_map.network.modes():
            total = torch.stack([squared_norms(block) for block in a.values()]).sum(0)
        return total.sum(1) if self.trace else total

    def features(self, x: Inputs) -> Tensor:
        """Φ with Φ Φᵀ = k(x, x): [n, p] (traced: outputs side by side), or [n, c, p] if full. Takes n·c·p numbers."""
        x = self.ready(x)
        self._say_outputs(x)
        if isinstance(self.feature_map, Jacobian):
            chosen = [self.feature_map.network.model.get_parameter(k) for k in self.feature_map.network.trainable]
            # And once more, where the parts are put together.
            size = 2 * tree.size(x) * self._count(x) * sum(p.numel() * max(4, p.element_size()) for p in chosen)
            fix = "Project them: tg.projected(kernel).features(x); tg.compute(kernel, x) never holds them all."
            check_fits(size, self.device, f"the gradients of {tree.size(x)} samples, all formed, take", fix)
        parts = []
        for outputs in self.feature_map.groups(x) or (None,):
            blocks = self.feature_map(x, None, self._form, outputs)
            parts.append(torch.cat([blocks.pop(name).expand() for name in tuple(blocks)], 2))
        g = torch.cat(parts, 1)
        return g.flatten(1) if self.trace else g

    def costs(self, x1: Inputs, x2: Inputs | None = None) -> Costs:
        """Per parameter: rule, method, cost. Prints as a table. Cost: prepares the batches, contracts nothing."""
        a, b = self._prepared(x1, x2)
        if isinstance(a, Grouped) or isinstance(b, Grouped):  # of one group: the others take as much
            groups = finest(a, b)
            left = some(a, groups[0], self.capture)
            one = self._costs(left, left if a is b else some(b, groups[0], self.capture), x1)
            return one.times(len(groups) ** (1 if self.trace else 2), groups[-1].stop, len(groups))
        return self._costs(a, b, x1)

    def _costs(self, a: Blocks, b: Blocks, x1: Inputs) -> Costs:
        plan = self.feature_map.plan(self.ready(x1)) if isinstance(self.feature_map, Jacobian) else None
        eight, rows = self.feature_map.network.eight, list[CostRow]()
        # Biases that come with their weight's products.
        along: set[str | None] = set()
        for name in self.feature_map.network.trainable if plan else a:
            if name not in a:
                rows.append(CostRow(name, "unused", "", (), None))
                continue
            rule = "activation" if plan is None else "torch.func" if name in plan.fallback else plan.rules[name]
            if name in along:
                rows.append(CostRow(name, rule, "with its weight", (), None))
                continue
            block = a[name]
            cost = choose_method(block, b[name], self.trace, self._forced(name), eight=eight)
            if isinstance(block, DenseBlock) and plan is not None and name in plan.saved:
                cost = replace(cost, method="formed")
            sizes = block.sizes() if isinstance(block, OuterBlock) else ()
            if isinstance(block, OuterBlock) and block.scale is None and cost.method != "expand":
                along.add(block.bias)
            rows.append(CostRow(name, rule, cost.method, sizes, cost))
        first, x = next(iter(a.values())), tree.take(self.ready(x1), slice(0, 1))
        kept, transient = self.footprint(x)
        entry = self.entry(x)
        return Costs(
            self.name,
            first.n,
            next(iter(b.values())).n,
            tuple(rows),
            passes=first.c if plan else 0,
            symmetric=a is b,
            kept=kept,
            transient=transient,
            device=self.device.type,
            half=self.feature_map.network.half,
            entry=entry.numel() * entry.element_size(),
        )

    def form(self) -> Spec:
        """All that `spec` says but for the values of weights and buffers: what stays the same while a model trains."""
        network = self.feature_map.network
        layers = getattr(self.feature_map, "layers", None)
        return {
            "kernel": self.name,
            "trace": self.trace,
            "model": architecture(network.model),
            "parameters": list(network.trainable),
            "outputs": describe(network.readout.outputs),
            "head": describe(network.readout.head),
            "dtype": network.precision or str(next(network.model.parameters()).dtype).removeprefix("torch."),
            "layers": None if layers is None else list(layers),
            "bias": getattr(self.feature_map, "bias", None),
            "method": dict(self.method) if isinstance(self.method, Mapping) else self.method,
        } | ({} if self.probes is None else {"probes": self.probes.count, "seed": self.probes.seed})

    @property
    def probes(self) -> Probes | None:
        """The random directions of the outputs by which it is estimated; None where it is exact."""
        directions = self.feature_map.network.directions
        return directions[0] if directions and isinstance(directions[0], Probes) else None

    def spec(self) -> Spec:
        """As `Kernel.spec`: hashes of model, weights and buffers, the parameters that count, and all options."""
        network, form = self.feature_map.network, self.form()
        state, names = network.state(), dict(network.model.named_parameters()).keys()
        # Apart from each other, so that a refused store can say which of them changed.
        weights = {k: v for k, v in state.items() if k in names}
        buffers = {k: v for k, v in state.items() if k not in names}
        first = {k: form[k] for k in ("kernel", "trace", "model", "parameters")}
        return {**first, "weights": digest(weights), "buffers": digest(buffers), **form}
