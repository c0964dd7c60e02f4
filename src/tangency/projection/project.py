"""From inputs to projected features: batches are captured, and each parameter's part is added up."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._base import tree
from .._base.memory import batch_budget
from .._base.types import Inputs
from ..engine.blocks import GradientBlock
from ..engine.directions import Outputs
from ..engine.features import Features, Jacobian
from ..errors import InputError, NonFiniteError
from .sketches.kinds import Place, Sketch
from .sketches.random import Stream

Budget = str | Mapping[str, int]
# On a CPU, samples in a batch and bytes that it may take: no more, whatever the memory, and always so many (the last
# ones repeated), because the bits of a matrix product depend on its size. Batches that share a matrix that is costly to
# make. (Heuristics.)
BATCH, BYTES, TOGETHER = 16, 1 << 28, 16
# The same on a GPU, where nothing is repeated.
CUDA_BATCH = 4096
# Bytes of gradients that are formed at a time (heuristic).
GRADIENT_BYTES = {"cpu": 1 << 26, "cuda": 1 << 31}


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that share rows: their names and the rows."""

    names: tuple[str, ...]
    rows: slice

    @property
    def count(self) -> int:
        """How many rows."""
        return self.rows.stop - self.rows.start


@dataclass(frozen=True, eq=False)
class Projector:
    """x → [n, c, k]: the features of `features`, each output's projected (or all outputs' together: `joint`)."""

    feature_map: Features
    sketch: Sketch
    dim: int
    seed: int
    budget: Budget
    joint: bool
    known: dict[tuple[object, ...], dict[str, tuple[int, ...]]] = field(
        default_factory=dict, repr=False
    )  # shapes of activations

    def __call__(self, x: Inputs, memory: int | None = None) -> Tensor:
        """The features of x. `memory` bounds the bytes that capturing gradients may take."""
        if tree.needs_grad(x):
            raise InputError(
                "x requires a gradient, and projected features are not differentiable in x. Use the exact kernel, or "
                "x.detach()."
            )
        with torch.no_grad():
            groups, places = self._layout(x)
            size, step = self._batches(x, memory)
            n, parts = tree.size(x), []
            for start in range(0, n, step):
                batches = list(tree.split(tree.take(x, slice(start, min(start + step, n))), size))
                if self._on_cpu:
                    batches[-1] = tree.fill(batches[-1], size)
                parts.append(self._project(batches, start, groups, places))
            return torch.cat(parts)[:n]

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """Bytes: (per sample, of the features in 32 bits or more; while they are made)."""
        item = next(self.feature_map.network.model.parameters()).element_size()
        outputs = self.feature_map.plan(x).c if isinstance(self.feature_map, Jacobian) and not self.joint else 1
        captured = self._captured(x)
        together = _power(BYTES // captured, BATCH) if self._on_cpu else 1
        return outputs * self.dim * max(4, item), together * captured

    def _batches(self, x: Inputs, memory: int | None) -> tuple[int, int]:
        """Samples in a batch, and in those that are projected together."""
        captured = self._captured(x)
        if not self._on_cpu:
            device = next(self.feature_map.network.model.parameters()).device
            size = _power((memory or batch_budget(device)) // captured, CUDA_BATCH)
            return size, size
        size = _power(BYTES // captured, BATCH)
        if not self.sketch.shared:
            return size, size
        return size, size * max(1, min(TOGETHER, (memory or 4 * BYTES) // (size * captured)))

    def _captured(self, x: Inputs) -> int:
        """Bytes per sample of the gradients that are held at once."""
        if self.joint and isinstance(self.feature_map, Jacobian) and self.feature_map.groups(x):
            plan = self.feature_map.plan(x)
            return plan.kept + plan.transient
        return sum(self.feature_map.footprint(x, _never))

    @property
    def _on_cpu(self) -> bool:
        return next(self.feature_map.network.model.parameters()).device.type == "cpu"

    def _project(self, batches: list[Inputs], start: int, groups: dict[str, Group], places: dict[str, Place]) -> Tensor:
        """The features [n, c, k] of batches, the first of which begins with sample `start`."""
        # Each output is projected by itself, so that those of a group need no others; unless their sum is projected.
        parts = () if self.joint else self.feature_map.groups(batches[0])
        return torch.cat([self._some(batches, start, groups, places, outputs) for outputs in parts or (None,)], 1)

    def _some(
        self,
        batches: list[Inputs],
        start: int,
        groups: dict[str, Group],
        places: dict[str, Place],
        outputs: Outputs | None,
    ) -> Tensor:
        """The features of some of the outputs, or of all."""
        captured: list[dict[str, GradientBlock]] = []  # gradients by parameter, of each batch
        outs, sizes = [], []
        for x in batches:
            try:
                captured.append(self.feature_map(x, None, _never, outputs))
            except NonFiniteError as e:
                raise e.shifted(start) from None
            sizes.append(tree.size(x))
            start += sizes[-1]
            block = next(iter(captured[-1].values()))
            like = next(iter(captured[0].values())).tensors()[-1]
            dtype = torch.float32 if like.dtype == torch.float16 else like.dtype
            rows = block.n if self.joint else block.n * block.c
            outs.append(torch.zeros(rows, self.dim, dtype=dtype, device=like.device))
        # Gradients stay factors until here; `add` forms them a piece at a time.
        room = GRADIENT_BYTES[outs[0].device.type]
        with self.feature_map.network.modes():
            for group in groups.values():
                factor = self.sketch.factor(group.count)
                for name in group.names:
                    # A parameter that no output of a batch depends on is not among its gradients.
                    have = [k for k, gradients in enumerate(captured) if name in gradients]
                    if have:
                        blocks = [captured[k].pop(name) for k in have]  # freed when they have been projected
                        views = [outs[k][:, group.rows] for k in have]
                        self.sketch.add(views, blocks, places[name], self.joint, room)
                for out in outs:
                    out[:, group.rows] *= factor
        return torch.cat([out.unflatten(0, (n, -1)) for out, n in zip(outs, sizes, strict=True)])

    def _layout(self, x: Inputs) -> tuple[dict[str, Group], dict[str, Place]]:
        """Which parameters share which rows, and which random words each has."""
        shapes = self.shapes(x)
        groups = self.groups(shapes)
        places: dict[str, Place] = {}
        for key, group in groups.items():
            common = Stream.of(self.seed, "" if self.budget == "global" else key)
            sizes = [math.prod(shapes[name]) for name in group.names]
            for k, name in enumerate(group.names):
                stream = Stream.of(self.seed, name)
                places[name] = Place(stream, common, shapes[name], sum(sizes[:k]), sum(sizes))
        return groups, places

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Group]:
        """Which parameters share which rows."""
        groups = share_rows(self.budget, shapes, self.dim, isinstance(self.feature_map, Jacobian))
        least = min(groups, key=lambda key: groups[key].count)
        nonzeros = getattr(self.sketch, "nonzeros", 1)
        if groups[least].count < nonzeros:
            where = f"the {groups[least].count} dimensions of {least}" if least else f"dim={self.dim}"
            raise InputError(f"nonzeros={nonzeros} entries of a column do not fit into {where}. Use fewer.")
        return groups

    def shapes(self, x: Inputs | None = None) -> dict[str, tuple[int, ...]]:
        """Of every parameter that counts, or of the features of a sample."""
        if isinstance(self.feature_map, Jacobian):
            parameters = dict(self.feature_map.network.model.named_parameters())
            return {name: tuple(parameters[name].shape) for name in self.feature_map.network.trainable}
        if x is None:
            if len(self.known) != 1:
                raise InputError(
                    "of stored activations alone their layers are not known. Call k.features(x) once first."
                )
            return next(iter(self.known.values()))
        key = tree.signature(x)
        if key not in self.known:
            activations = self.feature_map(tree.take(x, slice(0, 1)), None, _never)
            self.known[key] = {name: (block.tensors()[0][0].numel(),) for name, block in activations.items()}
        return self.known[key]


def share_rows(
    budget: Budget, shapes: Mapping[str, tuple[int, ...]], dim: int, parameters: bool = True
) -> dict[str, Group]:
    """Which parameters share which rows."""
    if budget == "global":
        return {"": Group(tuple(shapes), slice(0, dim))}
    members: dict[str, list[str]] = {}
    if isinstance(budget, str):
        for name in shapes:
            members.setdefault((name.rpartition(".")[0] or name) if parameters else name, []).append(name)
        sizes = {key: sum(math.prod(shapes[name]) for name in names) for key, names in members.items()}
        shares = _shares(sizes, dim)
    else:
        shares = dict(budget)
        for name in shapes:
            fitting = [key for key in shares if name == key or name.startswith(f"{key}.")]
            if not fitting:
                raise InputError(
                    f"budget= says nothing of parameter {name}; needed: dimensions for every parameter that counts, "
                    "by its name or its module's."
                )
            members.setdefault(max(fitting, key=len), []).append(name)  # the innermost module that is named
        idle = [key for key in shares if key not in members]
        if idle:
            raise InputError(f"budget= names {idle[0]!r}, which holds none of the parameters that count.")
    groups, start = {}, 0
    for key, names in members.items():
        groups[key] = Group(tuple(names), slice(start, start + shares[key]))
        start += shares[key]
    return groups


def _shares(sizes: Mapping[str, int], dim: int) -> dict[str, int]:
    """dim rows in proportion to the sizes, at least one each."""
    if dim < len(sizes):
        raise InputError(
            f"dim={dim} is too small for budget='layer': the model has {len(sizes)} layers, and each needs a dimension."
        )
    # One each first; the rest by the method of largest remainders, so that they add up to dim.
    total, left = sum(sizes.values()), dim - len(sizes)
    parts = {key: divmod(left * size, total) for key, size in sizes.items()}
    by_rest = sorted(parts, key=lambda key: -parts[key][1])  # ties in the order of the layers
    more = set(by_rest[: left - sum(whole for whole, _ in parts.values())])
    return {key: 1 + whole + (key in more) for key, (whole, _) in parts.items()}


def _never(name: str) -> bool:
    """No gradient is formed before it is projected."""
    return False


def _power(most: int, limit: int) -> int:
    """The largest power of two up to both, at least 1."""
    return 1 << max(1, min(most, limit)).bit_length() - 1
