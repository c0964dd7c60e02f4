"""What a tile of an infinite network's kernel takes, layer by layer, and what computes it."""

from dataclasses import dataclass, field
from math import prod

import torch

from ..engine.methods import Cost
from ..kernels.costs import CostRow, Costs
from .moments.core import Activation, CentredActivation, Need, Op
from .moments.fused.choose import choose
from .moments.positions import Pool, Window
from .moments.recursion import Recursion
from .moments.windowed import Windowed

# Of both moments of one pair of positions, counted off the formulas (heuristic).
ACTIVATION, OTHERS = 40, 4


@dataclass
class _Layer:
    """One layer's operations, as they are added up."""

    rules: list[str] = field(default_factory=list)
    method: str = ""
    flops: float = 0.0
    bytes: float = 0.0


def recursion_costs(
    name: str, recursion: Recursion, device: torch.device, dtype: torch.dtype, sizes: tuple[int, int], same: bool
) -> Costs:
    """The costs of a tile of n by m samples; `same`: the upper half of it."""
    n, m = sizes
    pairs = n * (n + 1) / 2 if same else float(n * m)
    found = choose(recursion, device, dtype)
    end = -1 if isinstance(found, str) else found.plan.end
    how = "fused kernels" if device.type == "cuda" else "compiled loop"
    layers: dict[str, _Layer] = {}
    for k, (node, need) in enumerate(zip(recursion.nodes, recursion.cross, strict=True)):
        if not need:
            continue
        layer = layers.setdefault(node.name or "output", _Layer())
        entries = pairs * prod(node.grid) ** (2 if need == Need.WHOLE else 1)
        layer.rules.append(type(node.op).__name__)
        layer.method = layer.method or (how if k <= end else "plain recursion")
        layer.flops += entries * _per_entry(node.op)
        # Read and written once by every operation, cov and ntk; the fused ones keep them in registers or a cache.
        layer.bytes += 0.0 if k <= end else 4 * entries * dtype.itemsize
    bits = f"{8 * dtype.itemsize} bits"
    rows = [
        CostRow(layer, " ".join(dict.fromkeys(v.rules)), v.method, (), Cost(v.method, v.flops, v.bytes, 0.0, bits))
        for layer, v in layers.items()
    ]
    title = name if not isinstance(found, str) else f"{name} (no fused recursion: {found})"
    return Costs(title, n, m, tuple(rows))


def _per_entry(op: Op) -> float:
    """Operations for one pair of positions."""
    if isinstance(op, (Activation, CentredActivation)):
        return ACTIVATION
    if isinstance(op, Windowed):  # products of slopes at all entries of both windows, over all draws
        return 4.0 * op.draws * sum(s.windows.size**2 for s in op.sources)
    return 2.0 * sum(op.size) if isinstance(op, Window | Pool) else OTHERS
