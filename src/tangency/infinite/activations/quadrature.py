"""The dual of any elementwise function, by numbers.

A smooth function is expanded in Hermite polynomials once per variance (Mehler): with a_k(p) = E[φ(√p z)h_k(z)],
E[φ(u)φ(v)] = Σ a_k(p)a_k(q)ρᵏ. That costs three passes over the pairs per term, needs φ on O(n) points only, and is
positive definite by construction. A function with kinks has coefficients that fall too slowly, above all near ρ = 1,
where kernels live, and so has tanh(√p z) for large p. What the coefficients leave out is known, so each pair for which
it is too much goes to `piecewise.py` if φ is straight far out, or to `rules.py`.
"""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ..._base.types import Spec
from ...errors import InputError
from .dual import TWO_PI, Dual, Pair, Pointwise, recording, root
from .kink_table import interpolate
from .piecewise import integrate_pairs
from .rules import composite_rule, derivative, line, nested

# Values of φ at once in an expansion: 16 MB.
_VALUES = 2**21
# Rows summed at once: 64 × 256 pairs stay in the cache.
_ROWS = 64
# The largest variance in a table.
_TABLE = 16.0
# A larger error is refused.
_WORST = 1e-6
_LADDER = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@functools.lru_cache(maxsize=8)
def _hermite(
    degree: int, level: float, graded: bool, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Points z and the matrix of h_k(z)·weight, k < degree, of a rule against the normal density: φ(√p z), p ≤ level.

    Trapezoidal; `graded`, for a kink at 0 or a large level: pieces of Gauss–Legendre, 1/2 long but shorter near 0.
    """
    end, fine = 12.5 + math.sqrt(degree) / 8, max(1.0, math.sqrt(level) / 4)  # h_k grows: its product ends later
    if graded:
        near = [0.0, *(0.5 / 3**k for k in range(1 + math.ceil(math.log(4 * fine, 3))))]
        right = torch.tensor(sorted({*near, *np.arange(0.5, end + 0.5, 0.5).tolist()}), dtype=torch.float64)
        points, widths = composite_rule(torch.cat([-right[1:].flip(0), right]), 16)
        z, weight = points.numpy(), widths.numpy()
    else:
        count = round(end * 12 * fine)
        z, weight = np.arange(-count, count + 1) / (12 * fine), np.full(2 * count + 1, 1 / (12 * fine))
    # Half of the density with each factor: h_k(z) alone overflows far out.
    half = np.exp(-z * z / 4) / TWO_PI**0.25
    rows = [half, z * half]
    for k in range(1, degree - 1):
        rows.append((z * rows[k] - math.sqrt(k) * rows[k - 1]) / math.sqrt(k + 1))
    table = np.stack(rows[:degree], axis=1) * (half * weight)[:, None]
    return torch.from_numpy(z).to(device, dtype), torch.from_numpy(table).to(device, dtype)


def _narrow(p: Tensor) -> Tensor:
    """p without the copies that an expand made."""
    for dim in range(p.ndim):
        if p.shape[dim] > 1 and p.stride(dim) == 0:
            p = p.narrow(dim, 0, 1)
    return p


def find_kinks(fn: Callable[[Tensor], Tensor], reach: float = 10.0) -> tuple[float, ...]:
    """Where φ, φ' or φ'' jumps in [−reach, reach], by bisection: a jump is what does not shrink with its interval.

    Jumps below 1e-3 of the largest value, and two in one interval of 1/64, may be missed.
    """
    kinks: list[float] = []
    # φ, φ' and φ'': a jump of any of them slows the expansion down.
    stages: list[Callable[[Tensor], Tensor]] = [fn, functools.partial(derivative, fn)]
    stages.append(functools.partial(derivative, stages[1]))
    for stage in stages:
        grid = torch.arange(-reach - 1 / 128, reach + 1 / 64, 1 / 64, dtype=torch.float64)
        try:
            value = _plain(stage, grid)
        except RuntimeError:  # torch has no second derivative of some (Hardsigmoid)
            break
        left, right, low, high = grid[:-1], grid[1:], value[:-1], value[1:]
        # Candidates: what changes much over an interval of 1/64. Bisection tells jumps from slopes.
        steep = (high - low).abs() > 1e-3 * value.abs().max().clamp(min=1e-12)
        left, right, low, high = left[steep], right[steep], low[steep], high[steep]
        for _ in range(44):
            middle = (left + right) / 2
            at = _plain(stage, middle)
            first = (at - low).abs() > (high - at).abs()
            left, low = torch.where(first, left, middle), torch.where(first, low, at)
            right, high = torch.where(first, middle, right), torch.where(first, at, high)
        jump = (high - low).abs() > 1e-3 * value.abs().max().clamp(min=1e-12)
        kinks += [round(float(x), 9) + 0.0 for x in ((left + right) / 2)[jump]]
    return tuple(sorted(set(kinks)))


def _plain(stage: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.enable_grad():
        return stage(x.detach().requires_grad_()).detach().nan_to_num()


def _level(p: Tensor, q: Tensor) -> float:
    """The power of 4 that holds both variances, at least 1: it alone decides on degree and table, not the tile."""
    top = max(float(v.detach().max()) if v.numel() else 0.0 for v in (p, q))
    return 4.0 ** max(0, math.ceil(math.log(top, 4) - 1e-12)) if top > 0 else 1.0


@dataclass(frozen=True)
class Quadrature(Dual):
    """The dual of an elementwise function: a Hermite expansion if it is smooth, quadrature if it has kinks.

    ```python
    dual = Quadrature(torch.tanh)
    dual.spec()  # {"name": "tanh", "method": "expansion", "error": …}
    ```

    `kinks`: where φ or a derivative jumps; looked for where None. An expansion takes as many terms, up to `degree`, as
    bring the tail Σ_{k>K} a_k² below `tolerance`·E[φ²] for all variances up to the next power of 4. `nodes`:
    Gauss–Legendre points per smooth piece. Methods and their cost for a tile of n × m:
    "expansion", three passes per term; "table" (the only kink is 0), a product of [n, 20] and [20, m] for each of 24
    terms, and a second or so for the first tile; "quadrature" (other kinks), see below.

    With `refine`, pairs that the expansion leaves above its tolerance and pairs beyond the table (variances above 16)
    are integrated, like all those of a function with other kinks: 20 to 150 μs each for a function that is straight far
    from 0 (Tanh, SiLU, ELU …), 0.1 to 0.4 ms near ρ = ±1 or at small variances with kinks, up to 5 ms for any other
    function. Where even that leaves an error above 1e-6, which it measures once per power of 4, `both` raises an
    InputError.
    """

    fn: Callable[[Tensor], Tensor] = field(repr=False)
    name: str = ""
    kinks: tuple[float, ...] | None = None
    degree: int = 512
    nodes: int = 16
    tolerance: float = 1e-10
    refine: bool = True

    def __post_init__(self) -> None:
        name = self.name or getattr(self.fn, "__name__", type(self.fn).__name__)
        kinks = find_kinks(self.fn) if self.kinks is None else tuple(sorted(float(t) for t in self.kinks))
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "kinks", kinks)

    @property
    def method(self) -> str:
        """What `both` begins with: "expansion", "table" or "quadrature"."""
        return "quadrature" if any(self.kinks or ()) else "table" if self.kinks else "expansion"

    def __call__(self, x: Tensor) -> Tensor:
        return self.fn(x)

    def module(self) -> nn.Module:
        """A copy of the module that it is of, or one that applies the function."""
        return copy.deepcopy(self.fn) if isinstance(self.fn, nn.Module) else Pointwise(self)

    def both(self, c: Tensor, p: Tensor, q: Tensor, slope: bool = True) -> Pair:
        """By expansion, table or quadrature, whatever is good enough for each pair."""
        p, q = _narrow(p), _narrow(q)
        return _moments(self, c, p, q, slope, check=True)

    def own(self, p: Tensor, slope: bool = True) -> Pair:
        """By a rule in one dimension."""
        x, w = line(self.kinks or (), p, 2 * self.nodes)
        value = (w * self.fn(x) ** 2).sum(-1)
        return value, (w * derivative(self.fn, x) ** 2).sum(-1) if slope else None

    def mean(self, p: Tensor) -> Tensor:
        """By a rule in one dimension."""
        x, w = line(self.kinks or (), p, 2 * self.nodes)
        return (w * self.fn(x)).sum(-1)

    def error(self, p_max: float = 4.0) -> float:
        """The stated error, relative to √(E[φ(u)²]E[φ(v)²]), for variances up to p_max; the larger of φ and φ'."""
        return _stated(self, float(p_max))

    def how(self) -> str:
        """As `Dual.how`: by an expansion, or by quadrature."""
        return "Hermite expansion" if self.method == "expansion" else "quadrature"

    def spec(self) -> Spec:
        """Name, method, kinks, options and the stated error, for JSON."""
        facts: Spec = {"name": self.name, "method": self.method, "kinks": list(self.kinks or ())}
        if isinstance(self.fn, functools.partial):
            facts["options"] = self.fn.keywords
        rule = {"degree": self.degree, "nodes": self.nodes, "tolerance": self.tolerance, "refine": self.refine}
        return facts | rule | {"error": self.error(), "error_p_max": 4.0}


def HermiteExpansion(fn: Callable[[Tensor], Tensor], degree: int = 512, name: str = "") -> Quadrature:  # noqa: N802
    """`Quadrature` by expansion only, also of a function with kinks (its tail is then what `error` states)."""
    return Quadrature(fn, name, kinks=(), degree=degree, refine=False)


def _variances(p_max: float) -> Tensor:
    return p_max * torch.tensor([1e-3, 0.03, 0.2, 0.5, 0.8, 1.0], dtype=torch.float64)


@functools.lru_cache(maxsize=256)
def _stated(dual: Quadrature, p_max: float) -> float:
    """Expansion: the tail left (a bound, by Cauchy–Schwarz) or the rule's error. Else: against twice as many points."""
    if dual.method == "expansion":
        level = 4.0 ** max(0, math.ceil(math.log(p_max, 4) - 1e-12))
        if not dual.refine or _terms(dual, level)[1]:
            return _tail(dual, p_max, level)
    moments = functools.partial(_moments, dual, check=False)
    return max(dual.tolerance if dual.method == "expansion" else 1e-12, _off(dual, p_max, moments))


def _off(dual: Quadrature, p_max: float, moments: Callable[..., Pair]) -> float:
    """The largest error of some moments, relative to own ones, against quadrature with twice as many points."""
    worst, ends = 0.0, p_max * torch.tensor([1e-3, 0.03, 0.5, 1.0], dtype=torch.float64)
    i, j = torch.triu_indices(4, 4).unbind()
    # A few correlations, most near 1: there errors are largest, and there kernels live.
    rho = torch.tensor([-1.0, -0.6, 0.3, 0.97, 0.9999], dtype=torch.float64)[:, None]
    c, p, q = (v.reshape(-1) for v in torch.broadcast_tensors(rho * (ends[i] * ends[j]).sqrt(), ends[i], ends[j]))
    with torch.no_grad():
        fine = nested(dual.fn, dual.kinks or (), 2 * dual.nodes, c, p, q, True)
        for coarse, better, a, b in zip(moments(c, p, q, True), fine, dual.own(p), dual.own(q), strict=True):
            assert coarse is not None and better is not None and a is not None and b is not None  # noqa: PT018
            off = (coarse - better).abs() / (a * b).sqrt().clamp(min=1e-300)
            worst = max(worst, float(off.nan_to_num(math.inf, math.inf).max()))
    return worst


@functools.lru_cache(maxsize=256)
def _tabled(dual: Quadrature, level: float) -> bool:
    """Whether the table for variances up to `level` is good: it is for ELU, not for Softsign."""
    if dual.method != "table" or level > _TABLE:
        return False
    return _off(dual, level, functools.partial(interpolate, dual.fn, dual.nodes, level)) < 1e-8


def _tail(dual: Quadrature, p_max: float, level: float) -> float:
    """What an expansion leaves out at variances up to p_max, or the error of its coefficients."""
    p, worst, terms = _variances(p_max), 1e-14, _terms(dual, level)[0]
    with torch.no_grad():
        for order, own in zip((False, True), dual.own(p), strict=True):
            assert own is not None
            a, energy = _coefficients(dual, p, level, terms, order)
            finer = _coefficients(dual, p, 4 * max(level, 16.0), terms, order)[0]  # half the step, or less
            off = torch.stack([energy - a.square().sum(-1), energy - own, 2 * (a - finer).norm(dim=-1) * own.sqrt()])
            worst = max(worst, float((off.abs() / own.clamp(min=1e-300)).max()))
    return worst


def _moments(dual: Quadrature, c: Tensor, p: Tensor, q: Tensor, slope: bool, check: bool) -> Pair:
    """What is fast for all pairs, then `integrate_pairs` for those where it is not good enough."""
    level, hard = _level(p, q), None
    moments: Pair | None = None
    if _tabled(dual, level):
        moments = interpolate(dual.fn, dual.nodes, level, c, p, q, slope)
    elif dual.method != "quadrature":
        moments, hard = _expanded(dual, level, c, p, q, slope)
        small = torch.maximum(p, q).broadcast_to(c.shape) <= _TABLE
        if dual.method == "table" and hard is not None and bool((hard & small).any()) and _tabled(dual, _TABLE):
            table = interpolate(dual.fn, dual.nodes, _TABLE, c, p, q, slope)
            second = None if table[1] is None or moments[1] is None else torch.where(small, table[1], moments[1])
            moments, hard = (torch.where(small, table[0], moments[0]), second), hard & ~small
    if moments is not None and hard is None:
        return moments
    # Asked once per function and level; kept.
    if check and (error := _stated(dual, level)) > _WORST:
        raise InputError(
            f"The moments of {dual.name} at a variance of {float(torch.maximum(p.max(), q.max())):.3g} are right to "
            f"{error:.0e} only, and {_WORST:.0e} is needed. Give it smaller variances: normalise the inputs, put a "
            "LayerNorm before it, or lower w_var."
        )
    full = torch.broadcast_tensors(c, p, q)
    if moments is None or hard is None:
        value, second = integrate_pairs(dual.fn, dual.kinks or (), dual.nodes, slope, *(t.reshape(-1) for t in full))
        return value.reshape(full[0].shape), None if second is None else second.reshape(full[0].shape)
    if not bool(hard.any()):
        return moments
    better = integrate_pairs(dual.fn, dual.kinks or (), dual.nodes, slope, *(t.masked_select(hard) for t in full))
    value = moments[0].masked_scatter(hard, better[0])
    return value, None if moments[1] is None or better[1] is None else moments[1].masked_scatter(hard, better[1])


def _coefficients(dual: Quadrature, p: Tensor, level: float, terms: int, order: bool) -> tuple[Tensor, Tensor]:
    """a_k(p), k < terms, of φ (or of φ') in a new last dimension; and E[φ²] by the same rule."""
    z, table = _hermite(terms, level, bool(dual.kinks) or level > 256.0, p.dtype, p.device)
    coefficients, energy = [], []
    for part in p.reshape(-1).split(max(1, _VALUES // len(z))):
        x = root(part)[:, None] * z
        y = derivative(dual.fn, x) if order else dual.fn(x)
        coefficients.append(y @ table)
        energy.append(y.detach() ** 2 @ table[:, 0])
    return torch.cat(coefficients).reshape(*p.shape, terms), torch.cat(energy).reshape(p.shape)


@functools.lru_cache(maxsize=256)
def _terms(dual: Quadrature, level: float) -> tuple[int, bool]:
    """The first rung at which the tails of φ and φ' are below the tolerance for variances up to `level`, or the cap.

    And whether they are.
    """
    p, rungs = _variances(level), [*(k for k in _LADDER if k < dual.degree), dual.degree]
    with torch.no_grad():
        full = [_coefficients(dual, p, level, dual.degree, order) for order in (False, True)]
    tails = [(1 - a.square().cumsum(-1) / energy.clamp(min=1e-300)[:, None]).amax(0) for a, energy in full]
    enough = next((k for k in rungs if max(float(tail[k - 1]) for tail in tails) < dual.tolerance), None)
    pairs = zip(full, dual.own(p), strict=True)
    right = all(bool(((a[1] - b).abs() <= 1e-8 * b).all()) for a, b in pairs if b is not None)  # as another rule
    return enough or dual.degree, right and enough is not None


def _expanded(
    dual: Quadrature, level: float, c: Tensor, p: Tensor, q: Tensor, slope: bool
) -> tuple[Pair, Tensor | None]:
    """Σ a_k(p)a_k(q)ρᵏ for φ and for φ', by rows of the tile; and where the terms left out may be too much."""
    terms, enough = _terms(dual, level)
    scale = root(p * q)
    rho = torch.where(scale > 0, c / torch.where(scale > 0, scale, 1.0), 0.0).clamp(-1.0, 1.0)
    factors, hard = [], None
    for order in (False, True)[: 1 + slope]:
        # Of each sample alone, so in float64 whatever the pairs are in: the tails are as small as the tolerance.
        (a, first), (b, second) = (_coefficients(dual, v.double(), level, terms, order) for v in (p, q))
        factors.append((a.to(c.dtype), b.to(c.dtype)))
        if dual.refine and not enough:  # Cauchy–Schwarz
            tails = [1 - x.detach().square().sum(-1) / own.clamp(min=1e-300) for x, own in ((a, first), (b, second))]
            bound = rho.detach().abs() ** terms * root(tails[0]) * root(tails[1])
            doubt = ~(bound <= dual.tolerance)  # also where it is no number
            hard = doubt if hard is None else hard | doubt
    # Odd or even functions have every second coefficient 0: half of the passes.
    parity, sums = _parity(dual.fn), []
    for k, (a, b) in enumerate(factors):
        start, stride = (0, 1) if parity == 0 else (int(parity == -1) ^ k, 2)
        if recording(c, p, q) or rho.ndim < 2:
            sums.append(_series(rho, a, b, start, stride))
        else:
            rows = range(0, rho.shape[-2], _ROWS)
            sums.append(torch.cat([_series(*_rows(i, rho, a, b), start, stride) for i in rows], -2))
    return (sums[0], sums[1] if slope else None), hard


def _rows(start: int, rho: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    cut = slice(start, start + _ROWS)
    a, b = (x[..., cut, :, :] if x.ndim > 2 and x.shape[-3] > 1 else x for x in (a, b))
    return rho[..., cut, :], a, b


def _series(rho: Tensor, a: Tensor, b: Tensor, start: int, stride: int) -> Tensor:
    """Σ_k a[k]b[k]ρᵏ over k = start, start + stride, …"""
    a, b = (x[..., start::stride].movedim(-1, 0).contiguous() for x in (a, b))
    # ρ^start, then times ρ or ρ²: one multiplication per term.
    power, step = torch.ones_like(rho) if start == 0 else rho.clone(), rho if stride == 1 else rho * rho
    total = torch.zeros_like(rho)
    if recording(rho, a, b):
        for k in range(len(a)):
            total, power = total + a[k] * b[k] * power, power * step
        return total
    product = a[0] * b[0]
    for k in range(len(a)):
        total.addcmul_(torch.mul(a[k], b[k], out=product), power)
        power.mul_(step)
    return total


@functools.lru_cache(maxsize=256)
def _parity(fn: Callable[[Tensor], Tensor]) -> int:
    """1 for an even function, −1 for an odd one, 0 otherwise: every second coefficient is then 0."""
    x = torch.linspace(0.01, 8.0, 997, dtype=torch.float64)
    with torch.no_grad():
        right, left = fn(x), fn(-x)
    bound = 1e-15 * right.abs().max()
    return 1 if bool(((right - left).abs() <= bound).all()) else -int(bool(((right + left).abs() <= bound).all()))
