"""Gated recurrences, LSTM and GRU: how second moments pass through them (Yang 2019, 2020, tensor programs).

As the width grows, the values before the gates of one channel are Gaussian over times and samples, independent of one
another (each has rows of W and U of its own), with the covariance w_x K[t, t'] + w_h E[h_{t−1} h'_{t'−1}] + b. A cell's
state is a function of those of its own channel, up to now. So moments are found time by time: values at time t are
drawn given the earlier ones, through a root of their covariance that grows with time; the mean of h h' over the draws
is part of the next covariance. The weights that act on times are the same ones, and nothing else is random: the limit
has all widths infinite, and variances w/fan-in of weights, in whichever parametrisation.

The tangent kernel: a change of the weights is one of the values before the gates, da, which is Gaussian and independent
of those (its sign may be turned), with the covariance Θ_a[t, t'] = rates·moments + w_x Θ[t, t'] + w_h Θ_h[t−1, t'−1].
It changes a channel's state by ds_t = keep_t ds_{t−1} + Σ_g drive^g_t da^g_t, and Θ_h = E[dh dh'], a mean over draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...errors import InputError
from ..activations.dual import root
from .core import Here, Moments, Need, Op, RandomAffine, Taken, drawn_with

Cell = Literal["lstm", "gru"]
# Numbers of one tensor [pairs, times, draws] at a time: a heuristic.
ENTRIES = 2**18
MAX_DIMENSION = torch.quasirandom.SobolEngine.MAXDIM


@dataclass(frozen=True)
class Source:
    """One of a cell's Gaussian values, W x_t + U h_{t−1} + b: the numbers of W and of U, with a bias each.

    `mean`: that of the biases, where they are constants (a forget gate's 1).
    """

    inputs: RandomAffine
    hidden: RandomAffine
    mean: float = 0.0

    @property
    def numbers(self) -> tuple[float, float, float]:
        """What decides its covariance."""
        return self.inputs.w_var, self.hidden.w_var, self.inputs.b_var + self.hidden.b_var

    def covariance(self, x: Tensor, last: Tensor) -> Tensor:
        """From the inputs' and that of the hidden values one time earlier."""
        w, u, b = self.numbers
        return w * x + u * last + b

    def tangent(self, x: Tensor, last: Tensor, x_ntk: Tensor | None, last_ntk: Tensor) -> Tensor:
        """Θ_a: of its own weights, and through them of the inputs and of the hidden values one time earlier."""
        i, h = self.inputs, self.hidden
        own = i.w_rate * x + h.w_rate * last + h.w_var * last_ntk + (i.b_rate + h.b_rate)
        return own if x_ntk is None else own + i.w_var * x_ntk

    @property
    def trained(self) -> bool:
        """Whether any of its weights moves."""
        return any((self.inputs.w_rate, self.inputs.b_rate, self.hidden.w_rate, self.hidden.b_rate))


@dataclass(frozen=True)
class Gates(Op):
    """LSTM: c = σ(f) c + σ(i) tanh(g), h = σ(o) tanh(c). GRU: n = tanh(x + σ(r) u), h = (1 − σ(z)) n + σ(z) h.

    `sources`: i, f, g, o; or r, z, x (of the inputs alone), u (of the hidden values alone). The first state is zero.
    h comes out, or with `state` an LSTM's c. Means over `samples` quasi-random draws (a multiple of 4), the same for
    all pairs: with both signs, and with both samples exchanged. So (j, i) is the transpose of (i, j), and (i, i) what a
    sample alone has; two that nearly coincide have it up to the error of the draws, for their difference, however
    small, tells of later values too. Cost: O(samples·T²) for a pair.
    """

    cell: Cell
    sources: tuple[Source, ...]
    backward: bool = False
    state: bool = False
    samples: int = 4096
    seed: int = 0
    limit: ClassVar[str] = (
        "hidden width → ∞, weights of variance w_var/fan-in of inputs and of hidden values, the same at every time; "
        "gates are Gaussian and independent; a first state of 0"
    )
    own: ClassVar[Need] = Need.WHOLE

    def taken(self) -> Taken:
        """As `Op.taken`, with the cell's name."""
        return Taken(self.cell.upper(), self.limit, drawn_with(self.samples))

    def alone(self) -> bool:
        """As `Op.alone`: a sample with itself has half of the draws."""
        return True

    def reads(self, asked: Need) -> Need:
        """As `Op.reads`: every time knows of all before it."""
        return Need.WHOLE if asked else asked

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        (s,) = inputs
        turn = (0, 1) if self.backward else ()
        pairs, times = here.pairs, s.grid[0]
        cov, ntk = (None if v is None else v.flip(turn).flatten(2).movedim(2, 0) for v in (s.cov, s.ntk))
        assert cov is not None
        left, right = (v.flip(turn).movedim(-1, 0) for v in here.own())
        # Pair number i·m + j is that of samples i and j.
        index, m = torch.arange(len(cov), device=cov.device), len(right)
        rows, columns = (index, index) if pairs.zipped else (index // m, index % m)
        moved = here.tangent and (ntk is not None or any(source.trained for source in self.sources))
        parts = []
        sides = 1 if pairs.same else 2
        draws = _draws(self, times, sides, cov)
        room = ENTRIES if cov.device.type == "cpu" else 128 * ENTRIES
        for at in index.split(max(1, room // (times * draws.shape[-1]))):
            joint = cov[at] if pairs.same else _interleaved(cov[at], left[rows[at]], right[columns[at]])
            steps = _steps(self, joint.double(), draws, sides)
            parts.append(_moments(self, steps, cov[at], None if ntk is None else ntk[at], moved))

        def shaped(values: list[Tensor]) -> Tensor:
            """[T, T', *pairs], in the order of the input's times."""
            return torch.cat(values).to(s.cov).movedim(0, 2).unflatten(2, s.cov.shape[2:]).flip(turn)

        tangents = [ntk for _, ntk in parts if ntk is not None]
        after = Moments(shaped([cov for cov, _ in parts]), shaped(tangents) if moved else None, s.grid, whole=True)
        return after.at(here.asked)


def _interleaved(cov: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """[p, 2T, 2T] over the times of two samples: at each time the first one's, then the second one's."""
    rows = [torch.stack([left, cov], -1), torch.stack([cov.mT, right], -1)]
    return torch.stack(rows, 2).flatten(3, 4).flatten(1, 2)


# Draws


def _draws(gates: Gates, times: int, sides: int, like: Tensor) -> Tensor:
    """Standard Gaussians [times·sides, sources, draws]: with both signs, and with both samples exchanged."""
    count = -(-gates.samples // 4)
    even, odd = _points(count, len(gates.sources), times, gates.seed).to(like)
    # A sample with itself has the root [[1, 1], [1, 1]]·√(v/2) at every time: of both numbers their sum counts.
    if sides == 1:
        return torch.cat([even, -even], -1)
    a, b = (even + odd) / math.sqrt(2), (even - odd) / math.sqrt(2)
    both = torch.cat([a, -a, b, -b], -1), torch.cat([b, -b, a, -a], -1)
    return torch.stack(both, 1).flatten(0, 1)


@lru_cache(maxsize=4)
def _points(count: int, sources: int, times: int, seed: int) -> Tensor:
    """Quasi-random standard normal points [2, times, sources, count]: even and odd under an exchange of samples."""
    size = sources * times
    if 2 * size > MAX_DIMENSION:
        most = MAX_DIMENSION // (2 * sources)
        raise InputError(f"a gated recurrence over {times} times; at most {most} are drawn. Give shorter sequences.")
    engine = torch.quasirandom.SobolEngine(2 * size, scramble=True, seed=seed)
    uniform = engine.draw(count, dtype=torch.float64).clamp(1e-15, 1 - 1e-15)  # 0 would become −∞
    # In the order of time, for the first coordinates are the most even ones.
    return torch.special.ndtri(uniform).T.reshape(times, sources, 2, count).movedim(2, 0).contiguous()


@dataclass
class _GrowingRoot:
    """L with L Lᵀ = C, by rows of blocks [sides, sides], those on the diagonal symmetric: they follow an exchange.

    C may be singular: what rounding leaves of zero is zero, here and in the inverse.
    """

    noise: float  # relative to C's diagonal
    inverse: Tensor | None = None  # of what there is, [p, t·sides, t·sides]

    def grow(self, cov: Tensor) -> Tensor:
        """The next rows of L [p, sides, (t + 1)·sides], from those of C."""
        sides = cov.shape[1]
        corner = cov[..., -sides:]
        least = self.noise * corner.diagonal(dim1=1, dim2=2).amax(1)
        if self.inverse is None:
            row, self.inverse = _symmetric_root(corner, least)
            return row
        across = cov[..., :-sides] @ self.inverse.mT
        diagonal, inverse = _symmetric_root(corner - across @ across.mT, least)
        above = torch.cat([self.inverse, torch.zeros_like(across.mT)], 2)
        self.inverse = torch.cat([above, torch.cat([-inverse @ across @ self.inverse, inverse], 2)], 1)
        return torch.cat([across, diagonal], 2)


def _symmetric_root(s: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
    """The symmetric root of [p, 1, 1] or [p, 2, 2] and its inverse, of the part above `least` [p]."""
    least = least.view(-1, 1, 1)
    if s.shape[-1] == 1:
        value = root(torch.where(s > least, s, 0.0))
        return value, torch.where(value > 0, 1 / torch.where(value > 0, value, 1.0), 0.0)
    # In closed form, which has derivatives where both eigenvalues are equal: √S = (S + √|S|)/√(tr S + 2√|S|).
    one = torch.eye(2, dtype=s.dtype, device=s.device)
    trace = s.diagonal(dim1=1, dim2=2).sum(1).view(-1, 1, 1)
    det = (s[:, 0, 0] * s[:, 1, 1] - s[:, 0, 1] * s[:, 1, 0]).clamp_min(0).view(-1, 1, 1)
    smaller = det / (trace / 2 + root(trace.square() / 4 - det)).clamp_min(1e-300)
    some, full = trace > least, smaller > least
    r = root(torch.where(full, det, 0.0))
    scale = torch.where(some, trace + 2 * r, 1.0).sqrt()
    value = torch.where(some, (s + r * one) / scale, 0.0)
    whole = (trace * one - s + r * one) / (torch.where(full, r, 1.0) * scale)  # the adjugate of √S over its determinant
    inverse = torch.where(full, whole, torch.where(some, s / scale**3, 0.0))
    return value, inverse


# One time of a cell


class _Step(NamedTuple):
    """A cell at one time [p, sides, draws]: ds = keep·ds_before + Σ drive·da, dh = out·ds + direct·da_last."""

    hidden: Tensor
    state: Tensor
    keep: Tensor
    drive: Tensor  # [p, sides, driving sources, draws]
    out: Tensor | None  # None: h is the state
    direct: Tensor | None  # by the last source


def _lstm(a: Tensor, state: Tensor) -> _Step:
    i, f, g, o = a.unbind(-2)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * state + i * g
    t = c.tanh()
    drive = torch.stack([g * i * (1 - i), state * f * (1 - f), i * (1 - g * g)], -2)
    return _Step(o * t, c, f, drive, o * (1 - t * t), t * o * (1 - o))


def _gru(a: Tensor, state: Tensor) -> _Step:
    r, z, x, u = a.unbind(-2)
    r, z = r.sigmoid(), z.sigmoid()
    n = (x + r * u).tanh()
    h = n + z * (state - n)
    inner = (1 - z) * (1 - n * n)
    drive = torch.stack([inner * u * r * (1 - r), (state - n) * z * (1 - z), inner, inner * r], -2)
    return _Step(h, h, z, drive, None, None)


CELLS = {"lstm": _lstm, "gru": _gru}


def _steps(gates: Gates, joint: Tensor, draws: Tensor, sides: int) -> list[_Step]:
    """All times of the pairs whose inputs have this covariance [p, T·sides, T·sides]."""
    count, step = draws.shape[-1], CELLS[gates.cell]
    # Sources of the same numbers share one root. What it is multiplied by keeps the type of the draws.
    groups: dict[tuple[float, float, float], list[int]] = {}
    for k, source in enumerate(gates.sources):
        groups.setdefault(source.numbers, []).append(k)
    roots = [_GrowingRoot(100 * torch.finfo(draws.dtype).eps) for _ in groups]
    order = torch.tensor([k for group in groups.values() for k in group], device=draws.device).argsort()
    means = draws.new_tensor([source.mean for source in gates.sources]).view(-1, 1)
    values = draws.new_zeros(len(joint), 0, count)  # the hidden ones so far [p, t·sides, draws]
    state = draws.new_zeros(len(joint), sides, count)
    last = joint.new_zeros(len(joint), sides, sides)  # the hidden values' covariance one time earlier
    steps: list[_Step] = []
    for end in range(sides, len(draws) + 1, sides):
        x, parts = joint[:, end - sides : end, :end], []
        for grown, group in zip(roots, groups.values(), strict=True):
            rows = grown.grow(gates.sources[group[0]].covariance(x, last)).to(draws)
            parts.append((rows @ draws[:end, group].flatten(1)).unflatten(-1, (len(group), count)))
        before = parts[0] if len(parts) == 1 else torch.cat(parts, -2).index_select(-2, order)
        steps.append(step(before + means, state))
        state = steps[-1].state
        values = torch.cat([values, steps[-1].hidden], 1)
        met = (steps[-1].hidden @ values.mT).double() / count
        last = torch.cat([torch.zeros_like(last[..., :sides]), met], 2)  # before the first time there was nothing
    return steps


def _moments(
    gates: Gates, steps: list[_Step], cov: Tensor, ntk: Tensor | None, moved: bool
) -> tuple[Tensor, Tensor | None]:
    """E[h h'] (or of the states) and its tangent kernel [p, T, T'], from draws and the inputs' moments."""
    met = _mean_products([v.hidden for v in steps])
    wanted = _mean_products([v.state for v in steps]) if gates.state else met
    return wanted, _tangents(gates, steps, cov, ntk, met) if moved else None


def _mean_products(values: list[Tensor]) -> Tensor:
    """Of both samples at each two times [p, T, T']."""
    both = torch.stack(values, 2)
    return both[:, 0] @ both[:, -1].mT / both.shape[-1]


def _tangents(gates: Gates, steps: list[_Step], cov: Tensor, ntk: Tensor | None, met: Tensor) -> Tensor:
    """Θ_h [p, T, T'], or that of the states, row by row: each needs the one before it.

    In every draw, E[ds_t ds'_t'] is found by two runs of ds = keep·ds + drive·da: over t, then over t'.
    """
    right = _Right.of(steps)
    count, drives = steps[0].keep.shape[-1], right.drive.shape[2]
    earlier = F.pad(met, (1, 0, 1, 0))[:, :-1, :-1]  # the hidden values' covariance one time earlier
    last = torch.zeros_like(met[:, 0])  # and their tangent kernel
    driven = torch.zeros_like(right.keep)  # E[ds_t (Σ drive·da)'_t']
    rows: list[Tensor] = []
    for t, step in enumerate(steps):
        x_ntk = None if ntk is None else ntk[:, t]
        theta = [source.tangent(cov[:, t], earlier[:, t], x_ntk, last) for source in gates.sources]
        driven = step.keep[:, :1] * driven + _driven(step.drive[:, 0], right.drive, theta[:drives])
        states = right.run(driven)
        if step.out is None or right.out is None or step.direct is None or right.direct is None:
            hidden = states.mean(-1)
        else:
            through = (states * right.out) @ step.out[:, 0].unsqueeze(-1)
            straight = right.direct @ step.direct[:, 0].unsqueeze(-1)
            hidden = (through.squeeze(-1) + straight.squeeze(-1) * theta[-1]) / count
        rows.append(states.mean(-1) if gates.state else hidden)
        last = F.pad(hidden, (1, 0))[:, :-1]
    return torch.stack(rows, 1)


class _Right(NamedTuple):
    """The second sample's times, side by side [p, T', ...]."""

    keep: Tensor
    drive: Tensor
    out: Tensor | None
    direct: Tensor | None

    @classmethod
    def of(cls, steps: list[_Step]) -> "_Right":
        """Of all steps."""
        out = [v.out[:, -1] for v in steps if v.out is not None]
        direct = [v.direct[:, -1] for v in steps if v.direct is not None]
        return cls(
            torch.stack([v.keep[:, -1] for v in steps], 1),
            torch.stack([v.drive[:, -1] for v in steps], 1),
            torch.stack(out, 1) if out else None,
            torch.stack(direct, 1) if direct else None,
        )

    def run(self, driven: Tensor) -> Tensor:
        """s_t' = keep_t' s_{t'−1} + driven_t', over all times."""
        states = [driven[:, 0]]
        for t in range(1, driven.shape[1]):
            states.append(torch.addcmul(driven[:, t], self.keep[:, t], states[-1]))
        return torch.stack(states, 1)


def _driven(left: Tensor, right: Tensor, theta: list[Tensor]) -> Tensor:
    """Σ_g drive^g drive'^g Θ_a^g: [p, T', draws] of drives [p, sources, draws] and [p, T', sources, draws]."""
    scaled = [left[:, k : k + 1] * v.unsqueeze(-1) for k, v in enumerate(theta)]
    total = scaled[0] * right[:, :, 0]
    for k in range(1, len(scaled)):
        total = torch.addcmul(total, scaled[k], right[:, :, k])
    return total
