"""What contracting one layer costs, by each method, and which one is chosen.

Counts are multiply–add flops and bytes moved; the estimated time is flops/rate + bytes/bandwidth. The two rates per
kind of device are heuristics (what a plain product and a plain copy reach), good enough to tell methods apart: near
the break-even point the choice hardly matters.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from ..errors import InputError
from .blocks import Block, Dense, Mixed, Outer

Method = str | Mapping[str, str] | None  # for all parameters, or by name

# (flop/s, byte/s), heuristic: two cores; one H200.
_RATES = {
    ("cpu", torch.float64): (6e10, 1e10),
    ("cpu", torch.float32): (1.2e11, 1e10),
    ("cuda", torch.float64): (4e13, 3e12),
    ("cuda", torch.float32): (4e13, 3e12),
    ("cuda", torch.float16): (5e14, 3e12),
}


@dataclass(frozen=True)
class Cost:
    """An estimate for one layer of one tile."""

    method: str
    flops: float
    bytes: float
    seconds: float


@dataclass(frozen=True)
class Sizes:
    """A pair of blocks in numbers: n, m samples; c outputs; t, s positions; g groups of i × o weights."""

    n: int
    m: int
    c: int
    t: int
    s: int
    g: int
    i: int
    o: int
    itemsize: int
    trace: bool
    symmetric: bool
    indexed: bool

    @staticmethod
    def of(x: Outer, y: Outer, trace: bool) -> "Sizes":
        t, g, i, o = x.sizes()
        s = y.sizes()[0]
        item = torch.empty(0, dtype=x.dtype).element_size()
        if x.indexed:  # rows that occur at all
            i = min(i, x.n * t + y.n * s)
        return Sizes(x.n, y.n, x.c, t, s, g, i, o, item, trace, x is y, x.indexed)

    @property
    def pairs(self) -> float:
        return self.n * self.m * (0.6 if self.symmetric else 1.0)

    @property
    def outputs(self) -> int:
        """How many products of cotangents a pair of samples needs: c for a trace, c·d for the full kernel."""
        return self.c if self.trace else self.c * self.c


def expand(z: Sizes) -> tuple[float, float]:
    """Form G for both sides, then one product of [n, c·o·i] with [m, c·o·i]."""
    rows = z.n if z.symmetric else z.n + z.m
    form = 0.0 if z.indexed else 2.0 * rows * z.t * z.c * z.g * z.o * z.i
    product = 2.0 * z.pairs * z.outputs * z.g * z.o * z.i
    moved = rows * (2 * z.c * z.g * z.o * z.i + z.t * z.g * (z.i if not z.indexed else 1)) * z.itemsize
    return form + product, float(moved)


def in_place(z: Sizes) -> tuple[float, float]:
    """Σ_{t,s} (a_it·a_js)(δ_it·δ_js): the first factor once for all outputs of a trace."""
    width = (1 if z.indexed else z.i) + z.outputs * z.o
    passes = 4 if z.trace else 2 + 2 * z.outputs
    ts = z.t * z.s * z.g
    return 2.0 * z.pairs * ts * width, z.pairs * ts * passes * max(z.itemsize, 4)


def estimate(method: str, z: Sizes, device: str, dtype: torch.dtype) -> Cost:
    flops, moved = expand(z) if method == "expand" else in_place(z)
    rate, bandwidth = _RATES.get((device, dtype), _RATES["cpu", torch.float32])
    return Cost(method, flops, moved, flops / rate + moved / bandwidth)


def choose(x: Block, y: Block, trace: bool, forced: str | None = None) -> Cost:
    """The cheapest method for a pair of blocks, or the forced one where it applies."""
    if not (isinstance(x, Outer) and isinstance(y, Outer) and x.kind == y.kind and x.slot == y.slot):
        return _dense(x, y, trace)
    device, z = x.uses[0].d.device.type, Sizes.of(x, y, trace)
    if forced in ("expand", "in place"):
        return estimate(forced, z, device, x.dtype)
    options = [estimate(m, z, device, x.dtype) for m in ("expand", "in place")]
    best = min(options, key=lambda c: c.seconds)
    if best.method == "in place" and z.t == z.s == 1:
        return Cost("outer", best.flops, best.bytes, best.seconds)
    return best


def _dense(x: Block, y: Block, trace: bool) -> Cost:
    p = x.g.shape[2] if isinstance(x, Dense) else sum(v[0, 0].numel() for v in x.tensors())
    pairs = x.n * y.n * (0.6 if x is y else 1.0) * (x.c if trace else x.c**2)
    tensor = x.tensors()[0]
    rate = _RATES.get((tensor.device.type, tensor.dtype), _RATES["cpu", torch.float32])[0]
    moved = float(x.nbytes + (0 if x is y else y.nbytes))
    return Cost("expand" if isinstance(x, Mixed) else "dense", 2.0 * pairs * p, moved, 2.0 * pairs * p / rate)


def check_method(method: object, parameters: Collection[str]) -> None:
    each = method if isinstance(method, Mapping) else {None: method}
    for name, choice in each.items():
        if choice not in (None, "expand", "in place"):
            raise InputError(
                f"method={choice!r} is unknown; use None (the cost model chooses), 'expand' or 'in place'."
            )
        if name is not None and name not in parameters:
            raise InputError(f"method= names {name!r}, which is none of the parameters that count.")


def forced(method: Method, name: str) -> str | None:
    """The method that was asked for, for one parameter."""
    return method.get(name) if isinstance(method, Mapping) else method
