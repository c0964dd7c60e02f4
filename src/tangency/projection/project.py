"""From inputs to projected features: batches are captured, and each parameter's part is added up."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._base import tree
from .._base.memory import batch_budget
from .._base.types import Inputs
from ..engine.blocks import Block
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
ROOM = {"cpu": 1 << 26, "cuda": 1 << 31}


@dataclass(frozen=True, eq=False)
class Group:
    """Parameters that share rows: their names and the rows."""

    names: tuple[str, ...]
    rows: slice

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start


@dataclass(frozen=True, eq=False)
class Projector:
    """x → [n, c, k]: the features of `features`, each output's projected (or all outputs' together: `joint`)."""

    features: Features
    sketch: Sketch
    dim: int
    seed: int
    budget: Budget
    joint: bool
    known: dict[Any, dict[str, tuple[int, ...]]] = field(default_factory=dict, repr=False)  # shapes of activations

    def __call__(self, x: Inputs, memory: int | None = None) -> Tensor:
        if tree.needs_grad(x):
            raise InputError(
                "x requires a gradient, and projected features are not differentiable in x. Use the exact kernel, or "
                "x.detach()."
            )
        with torch.no_grad():
            groups, places = self._layout(x)
            parts: list[Tensor] = []
            for some in self._batches(x, memory):
                parts.append(self._project(some, sum(map(len, parts)), groups, places))
            return torch.cat(parts)[: tree.size(x)]

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """Bytes: (per sample, of the features in 32 bits or more; while they are made)."""
        item = next(self.features.network.model.parameters()).element_size()
        return self.outputs(x) * self.dim * max(4, item), self._batch(x) * self._each(x)

    def outputs(self, x: Inputs) -> int:
        return self.features.plan(x).c if isinstance(self.features, Jacobian) and not self.joint else 1

    def _batches(self, x: Inputs, memory: int | None) -> Iterator[list[Inputs]]:
        """Batches of one size, a few at a time."""
        each, n, device = self._each(x), tree.size(x), self._device
        if device.type == "cuda":
            room = memory or batch_budget(device)
            yield from ([part] for part in tree.split(x, _power(room // each, CUDA_BATCH)))
            return
        size = self._batch(x)
        together = max(1, min(TOGETHER, (memory or 4 * BYTES) // (size * each))) if self.sketch.shared else 1
        for start in range(0, n, size * together):
            some = list(tree.split(tree.take(x, slice(start, min(start + size * together, n))), size))
            yield [*some[:-1], _filled(some[-1], size)]

    def _each(self, x: Inputs) -> int:
        """Bytes that capturing a sample takes."""
        return sum(self.features.footprint(x, _never))

    def _batch(self, x: Inputs) -> int:
        """Samples that are captured together at least: on a CPU always, whatever the memory."""
        return _power(BYTES // self._each(x), BATCH) if self._device.type == "cpu" else 1

    @property
    def _device(self) -> torch.device:
        return next(self.features.network.model.parameters()).device

    def _project(self, batches: list[Inputs], start: int, groups: dict[str, Group], places: dict[str, Place]) -> Tensor:
        found = []
        for x in batches:
            try:
                found.append(self.features(x, None, _never))
            except NonFiniteError as e:
                raise e.shifted(start) from None
            start += tree.size(x)
        like = next(iter(found[0].values())).tensors()[-1]
        outs = [self._zeros(next(iter(f.values())), like) for f in found]
        room = ROOM[like.device.type]
        with self.features.network.modes():
            for group in groups.values():
                for name in group.names:
                    have = [k for k, f in enumerate(found) if name in f]
                    if have:
                        blocks = [found[k].pop(name) for k in have]
                        views = [outs[k][:, group.rows] for k in have]
                        self.sketch.add(views, blocks, places[name], self.joint, room)
                for out in outs:
                    out[:, group.rows] *= self.sketch.factor(group.count)
        n = [tree.size(x) for x in batches]
        return torch.cat([out.unflatten(0, (m, -1)) for out, m in zip(outs, n, strict=True)])

    def _zeros(self, block: Block, like: Tensor) -> Tensor:
        rows = block.n if self.joint else block.n * block.c
        return torch.zeros(
            rows, self.dim, dtype=torch.float32 if like.dtype == torch.float16 else like.dtype, device=like.device
        )

    def _layout(self, x: Inputs) -> tuple[dict[str, Group], dict[str, Place]]:
        shapes = self.shapes(x)
        found = self.groups(shapes)
        places: dict[str, Place] = {}
        for key, group in found.items():
            common = Stream.of(self.seed, "" if self.budget == "global" else key)
            sizes = [math.prod(shapes[name]) for name in group.names]
            for k, name in enumerate(group.names):
                stream = Stream.of(self.seed, name)
                places[name] = Place(stream, common, shapes[name], sum(sizes[:k]), sum(sizes))
        return found, places

    def groups(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Group]:
        """Which parameters share which rows."""
        found = groups(self.budget, shapes, self.dim, isinstance(self.features, Jacobian))
        least = min(found, key=lambda key: found[key].count)
        nonzeros = getattr(self.sketch, "nonzeros", 1)
        if found[least].count < nonzeros:
            where = f"the {found[least].count} dimensions of {least}" if least else f"dim={self.dim}"
            raise InputError(f"nonzeros={nonzeros} entries of a column do not fit into {where}. Use fewer.")
        return found

    def shapes(self, x: Inputs | None = None) -> dict[str, tuple[int, ...]]:
        """Of every parameter that counts, or of the features of a sample."""
        if isinstance(self.features, Jacobian):
            own = dict(self.features.network.model.named_parameters())
            return {name: tuple(own[name].shape) for name in self.features.network.train}
        if x is None:
            if len(self.known) != 1:
                raise InputError(
                    "of stored activations alone their layers are not known. Call k.features(x) once first."
                )
            return next(iter(self.known.values()))
        key = tree.signature(x)
        if key not in self.known:
            one = self.features(tree.take(x, slice(0, 1)), None, _never)
            self.known[key] = {name: (block.tensors()[0][0].numel(),) for name, block in one.items()}
        return self.known[key]


def groups(
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
            members.setdefault(max(fitting, key=len), []).append(name)
        idle = [key for key in shares if key not in members]
        if idle:
            raise InputError(f"budget= names {idle[0]!r}, which holds none of the parameters that count.")
    found, start = {}, 0
    for key, names in members.items():
        found[key] = Group(tuple(names), slice(start, start + shares[key]))
        start += shares[key]
    return found


def _shares(sizes: Mapping[str, int], dim: int) -> dict[str, int]:
    """dim rows in proportion to the sizes, at least one each."""
    if dim < len(sizes):
        raise InputError(
            f"dim={dim} is too small for budget='layer': the model has {len(sizes)} layers, and each needs a dimension."
        )
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


def _filled(x: Inputs, size: int) -> Inputs:
    """x with its last sample repeated until there are `size`."""
    missing = size - tree.size(x)
    if missing == 0:
        return x
    return tree.transform(lambda v: torch.cat([v, v[-1:].expand(missing, *v.shape[1:])]), x)
