"""How two blocks of a parameter are multiplied, at what cost, and in how many bits.

The choice is made by multiply–add flops and bytes moved, with the estimated time flops/rate + bytes/bandwidth. The two
rates per kind of device are heuristics (what a plain product and a plain copy reach), good enough to tell methods
apart: near the break-even point the choice hardly matters.

Which parameters are multiplied in 8 bits is decided by their sizes alone, never by how many samples meet: an entry is
rounded alike in every tile.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..errors import InputError
from . import narrow
from .blocks import DenseBlock, GradientBlock, MixedBlock, OuterBlock

Method = str | Mapping[str, str] | None  # for all parameters, or by name

# (flop/s, byte/s), heuristic: two cores; one H200.
_RATES = {
    ("cpu", torch.float64): (6e10, 1e10),
    ("cpu", torch.float32): (1.2e11, 1e10),
    ("cuda", torch.float64): (4e13, 3e12),
    ("cuda", torch.float32): (4e13, 3e12),
    ("cuda", torch.float16): (5e14, 3e12),
}
_EIGHT_RATE = {"cuda": 1e15}  # flop/s of 8 bits, likewise; elsewhere they are no faster than more bits
# Multiply–adds in whose time one number is fetched from a cache and added (heuristic; measured: two cores, one H200).
_FETCH = {"cpu": 300, "cuda": 48}


@dataclass(frozen=True)
class Cost:
    """An estimate for one layer of one tile."""

    method: str
    flops: float
    bytes: float
    seconds: float
    precision: str = ""  # of the factors, as they are multiplied


@dataclass(frozen=True)
class PairSizes:
    """A pair of blocks in numbers: n, m samples; c outputs; t, s positions; g groups of i × o weights.

    `pixels`: p·q pairs of pixels where patches can go by them, else 0; `taps` of a patch. `eight`: whether 8 bits are
    asked for. `fetch`: what fetching a number costs, in multiply–adds.
    """

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
    pixels: int = 0
    taps: int = 1
    eight: bool = False
    fetch: int = 0

    @staticmethod
    def of(x: OuterBlock, y: OuterBlock, trace: bool, eight: bool = False) -> "PairSizes":
        """The numbers of two blocks of one kind."""
        t, g, i, o = x.sizes()
        s = y.sizes()[0]
        item = x.uses[0].d.element_size()
        if x.indexed:  # rows that occur at all
            i = min(i, x.n * t + y.n * s)
        first, second = x.uses[0].form, y.uses[0].form
        single = len(x.uses) == len(y.uses) == 1 and first.taps == second.taps
        pixels = first.pixels * second.pixels if single else 0
        eight = eight and x.dtype == torch.float16 and not x.indexed
        fetch = _FETCH.get(x.uses[0].d.device.type, _FETCH["cuda"])
        return PairSizes(x.n, y.n, x.c, t, s, g, i, o, item, trace, x is y, x.indexed, pixels, first.taps, eight, fetch)

    @property
    def shifted(self) -> bool:
        """Whether products of patches cost less as sums over shifted products of pixels."""
        channels = self.i // self.taps
        by_pixels = self.pixels * channels + self.fetch * self.taps * self.t * self.s
        return self.pixels > 0 and by_pixels < self.t * self.s * self.i

    @property
    def eight_expanded(self) -> bool:
        """Whether rows of gradients are long enough for 8 bits."""
        return self.eight and self.c * self.g * self.o * self.i >= narrow.LEAST

    @property
    def eight_in_place(self) -> bool:
        """Whether cotangents are wide enough for 8 bits, and lie as products of 8 bits want it."""
        width = self.c * self.o
        return self.eight and self.trace and width >= narrow.WIDE and width % 16 == 0

    @property
    def pairs(self) -> float:
        """How many pairs of samples; of a symmetric tile a bit more than half, since strips are not triangles."""
        return self.n * self.m * (0.6 if self.symmetric else 1.0)

    @property
    def outputs(self) -> int:
        """How many products of cotangents a pair of samples needs: c for a trace, c·d for the full kernel."""
        return self.c if self.trace else self.c * self.c


class _Work(NamedTuple):
    """What a method takes: flops in all, how many of them in 8 bits, bytes moved."""

    flops: float
    eight: float
    bytes: float


def _cost_of_expanding(z: PairSizes) -> _Work:
    """To form G for both sides, then one product of [n, c·o·i] with [m, c·o·i]."""
    rows = z.n if z.symmetric else z.n + z.m
    form = 0.0 if z.indexed else 2.0 * rows * z.t * z.c * z.g * z.o * z.i
    product = 2.0 * z.pairs * z.outputs * z.g * z.o * z.i
    passes = 3.5 if z.eight_expanded else 2  # written, read; rounded: read, half as much written, and that read
    moved = rows * (passes * z.c * z.g * z.o * z.i + z.t * z.g * (z.i if not z.indexed else 1)) * z.itemsize
    return _Work(form + product, product if z.eight_expanded else 0.0, float(moved))


def _cost_in_place(z: PairSizes) -> _Work:
    """Of Σ_{t,s} (a_it·a_js)(δ_it·δ_js): the first factor once for all outputs of a trace."""
    passes = 4.0 if z.trace else 2.0 + 2 * z.outputs
    ts = z.t * z.s * z.g
    alike = ts * (1 if z.indexed else z.i)
    if z.shifted:
        alike = z.g * z.pixels * z.i // z.taps + ts * z.taps
        passes += z.taps / 8  # from a cache, which is about so much faster than memory
    deltas = 2.0 * z.pairs * ts * z.outputs * z.o
    # Products of 16-bit factors come in 32 bits.
    moved = z.pairs * ts * passes * max(z.itemsize, 4)
    return _Work(2.0 * z.pairs * alike + deltas, deltas if z.eight_in_place else 0.0, moved)


def _estimate(method: str, z: PairSizes, device: str, dtype: torch.dtype) -> Cost:
    expand = method == "expand"
    work = _cost_of_expanding(z) if expand else _cost_in_place(z)
    rate, bandwidth = _RATES.get((device, dtype), _RATES["cpu", torch.float32])
    seconds = (work.flops - work.eight) / rate + work.eight / _EIGHT_RATE.get(device, rate) + work.bytes / bandwidth
    eight = z.eight_expanded if expand else z.eight_in_place
    precision = ("8 bits" if expand else "8 and 16 bits") if eight else _in_words(dtype)
    return Cost(method, work.flops, work.bytes, seconds, precision)


def _in_words(dtype: torch.dtype) -> str:
    return {torch.float16: "16 bits", narrow.EIGHT: "8 bits"}.get(dtype, str(dtype).removeprefix("torch."))


def choose_method(
    x: GradientBlock, y: GradientBlock, trace: bool, forced: str | None = None, *, eight: bool = False
) -> Cost:
    """The cheapest method for a pair of blocks, or the forced one where it applies. `eight`: 8 bits where they pay."""
    if not (isinstance(x, OuterBlock) and isinstance(y, OuterBlock) and x.kind == y.kind and x.slot == y.slot):
        return _cost_of_product(x, y, trace, eight)
    d, z = x.uses[0].d, PairSizes.of(x, y, trace, eight)
    if forced in ("expand", "in place"):
        return _estimate(forced, z, d.device.type, d.dtype)
    options = [_estimate(m, z, d.device.type, d.dtype) for m in ("expand", "in place")]
    best = min(options, key=lambda c: c.seconds)
    if best.method == "in place" and z.t == z.s == 1:  # two matrices, multiplied entry by entry: said as such
        return replace(best, method="outer")
    return best


def _cost_of_product(x: GradientBlock, y: GradientBlock, trace: bool, eight: bool) -> Cost:
    """One product of gradients that are there already, or of blocks of different kinds, which are expanded."""
    p = x.g.shape[2] if isinstance(x, DenseBlock) else sum(v[0, 0].numel() for v in x.tensors())
    pairs = x.n * y.n * (0.6 if x is y else 1.0) * (x.c if trace else x.c**2)
    tensor = x.tensors()[0]
    device = tensor.device.type
    rate = _RATES.get((device, tensor.dtype), _RATES["cpu", torch.float32])[0]
    moved = float(x.nbytes + (0 if x is y else y.nbytes))
    precision = _in_words(tensor.dtype)
    if eight and dense_in_eight(x, y):
        rate, precision = _EIGHT_RATE.get(device, rate), "8 bits"
    method = "expand" if isinstance(x, MixedBlock) else "dense"
    return Cost(method, 2.0 * pairs * p, moved, 2.0 * pairs * p / rate, precision)


def dense_in_eight(x: GradientBlock, y: GradientBlock) -> bool:
    """Whether gradients that were formed in 16 bits are long enough for 8, or have 8 already."""
    if not (isinstance(x, DenseBlock) and isinstance(y, DenseBlock)) or x.scale is None or y.scale is None:
        return False
    return x.c * x.g.shape[2] >= narrow.LEAST


def check_method(method: object, parameters: Collection[str]) -> None:
    """Refuse a method, or one for a parameter, that there is not."""
    choices = method if isinstance(method, Mapping) else {None: method}
    for name, choice in choices.items():
        if choice not in (None, "expand", "in place"):
            raise InputError(
                f"method={choice!r} is unknown; use None (the cost model chooses), 'expand' or 'in place'."
            )
        if name is not None and name not in parameters:
            raise InputError(f"method= names {name!r}, which is none of the parameters that count.")


def method_for(method: Method, name: str) -> str | None:
    """The method that was asked for, for one parameter."""
    return method.get(name) if isinstance(method, Mapping) else method
