"""Self-attention with infinitely many heads and channels: how second moments pass through it.

Hron, Bahri, Sohl-Dickstein, Novak 2020, "Infinite attention: NNGP and NTK for deep attention networks". Tensors:
`cov1` [n, T, T] and `cov2` [m, T', T'] are the covariances of the layer's input over the positions of one sample, per
channel; `cov` [n, m, T, T'] and `ntk` are those of all pairs of samples, or [n, T, T'] of pairs one by one (n = m; so
`cov1` itself, for samples with themselves). `ntk` None is zero. Masks are True at valid positions: the others get no
attention as keys and values, and do ask as queries, as in torch. Each function gives the two moments of its output,
the tangent kernel only if `tangent`. `rates` says how much the training of the weights of queries, keys, values and
output counts: 1 as in the NTK parametrisation, 0 if frozen. A trained bias adds (∂f/∂b)² times its own rate, which is
by default its variance: the NTK parametrisation again.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ...errors import InputError

Moments = tuple[Tensor, Tensor | None]
Four = tuple[float, float, float, float]
_CHUNK = 2**18  # entries of one of the dozen tensors that are held at once: a heuristic
_ORTHOGONAL = 1024  # at most so many draws are made orthogonal to one another, which costs their number cubed
_ONES, _NONE = (1.0, 1.0, 1.0, 1.0), (0.0, 0.0, 0.0, 0.0)


def linear(
    cov: Tensor,
    ntk: Tensor | None,
    cov1: Tensor,
    cov2: Tensor,
    *,
    mechanism: str = "softmax",
    qk_var: float,
    ov_var: float,
    b_var: float = 0.0,
    b_rate: float | None = None,
    rates: Four = _ONES,
    mask1: Tensor | None = None,
    mask2: Tensor | None = None,
    tangent: bool = True,
) -> Moments:
    """σ² A K A'ᵀ + b² and σ² A (Θ + r K) A'ᵀ + b², A = ζ(√qk_var·K₁₁): scores q·k/d with tied weights are constants.

    ζ is 'softmax', 'identity', 'relu' or 'abs', σ² = ov_var, r = rates of value and output. As d → ∞ the scores have no
    tangent kernel, so the weights of queries and keys add nothing. Cost: O(T³) for a pair.
    """
    zipped = _shapes(cov, ntk, cov1, cov2, mask1, mask2)
    left, right = (_weights(c, m, mechanism, math.sqrt(qk_var)) for c, m in ((cov1, mask1), (cov2, mask2)))

    def both(mat: Tensor) -> Tensor:
        return ov_var * torch.einsum("nsu,nuv,ntv->nst" if zipped else "nsu,nmuv,mtv->nmst", left, mat, right)

    found = both(cov)
    if not tangent:
        return found + b_var, None
    own = (rates[2] + rates[3]) * found + (b_var if b_rate is None else b_rate)
    return found + b_var, own if ntk is None else own + both(ntk)


def quadratic(
    cov: Tensor,
    ntk: Tensor | None,
    cov1: Tensor,
    cov2: Tensor,
    *,
    qk_var: float,
    ov_var: float,
    b_var: float = 0.0,
    b_rate: float | None = None,
    rates: Four = _ONES,
    mask1: Tensor | None = None,
    mask2: Tensor | None = None,
    tangent: bool = True,
) -> Moments:
    """σ² K ⟨K, K⟩ + b² and σ² {(Θ + r K)⟨K, K⟩ + 2K⟨K, Θ⟩} + b²: scores q·k/√d as they are, no softmax.

    ⟨·, ·⟩ sums over pairs of valid positions, σ² = qk_var·ov_var, r the sum of the rates. Cost: O(T²) for a pair.
    """
    zipped = _shapes(cov, ntk, cov1, cov2, mask1, mask2)
    keys = cov
    for mask, side in ((mask1, -1), (mask2, -2)):
        if mask is not None:
            pairs = mask if zipped else mask.unsqueeze(1 if side == -1 else 0)
            keys = keys * pairs.unsqueeze(side).to(cov)
    scale, dot = qk_var * ov_var, (keys * cov).sum((-1, -2), keepdim=True)
    nngp = scale * cov * dot + b_var
    if not tangent:
        return nngp, None
    own = scale * sum(rates) * cov * dot + (b_var if b_rate is None else b_rate)
    if ntk is None:
        return nngp, own
    return nngp, own + scale * (ntk * dot + 2 * cov * (keys * ntk).sum((-1, -2), keepdim=True))


def softmax(
    cov: Tensor,
    ntk: Tensor | None,
    cov1: Tensor,
    cov2: Tensor,
    *,
    q_var: float,
    k_var: float,
    v_var: float,
    o_var: float,
    samples: int,
    seed: int = 0,
    rates: Four = _ONES,
    biases: Four = _NONE,
    bias_rates: Four | None = None,
    mask1: Tensor | None = None,
    mask2: Tensor | None = None,
    causal: bool = False,
    tangent: bool = True,
) -> Moments:
    """o·v·E[ζ K ζ'ᵀ] for ζ = softmax(G), G Gaussian of covariance q·k·K[s,s']K[t,t'], and its tangent kernel, by draws.

    What torch.nn.MultiheadAttention does: scores q·k/√d of independent projections of variances `q_var`, …, the value's
    and the output's projections; `biases` are the variances of their biases (keys' biases do nothing). With
    J = ∂ζ/∂G = diag ζ − ζζᵀ of a query,
      Θ_out[s,s'] = o·v·E[ζ (Θ + (r_v + r_o) K) ζ'ᵀ] + Σ_tt' Θ_G[st,s't'] o·v·E[J K J'ᵀ]_tt',
      Θ_G[st,s't'] = q·k·{(Θ + r_q K)[s,s'] K[t,t'] + K[s,s'] (Θ + r_k K)[t,t']},
    plus what biases add. The expectations are means over `samples` draws of G (rounded up to a multiple of 4), each
    exactly Gaussian, so unbiased. They come as ±Z, as Z with both samples exchanged, and orthogonal to one another as
    far as there are fewer draws than dimensions: from samples ≥ 2(T + T')² on, most of the variance is gone.

    The same draws serve all pairs, so the result does not depend on blocks; (j, i) is the transpose of (i, j), and
    (i, i) is `own`, up to rounding. Valid positions that come first have the same draws whatever the padding.
    A joint covariance that is not quite positive is taken as its positive part.
    Cost: O(samples·T³) for a pair; drawing, once, O(samples²·T²), up to 4096 samples, linear beyond.

    >>> one = torch.ones(1, 1, 1, 1)
    >>> nngp, ntk = softmax(one, None, one[0], one[0], q_var=1.0, k_var=1.0, v_var=1.0, o_var=0.5, samples=8)
    >>> float(nngp), float(ntk)
    (0.5, 1.0)
    """
    layer = _Layer(q_var, k_var, v_var, o_var, rates, biases, bias_rates, causal, samples, seed)
    zipped = _shapes(cov, ntk, cov1, cov2, mask1, mask2)
    part = _Part(cov if zipped else cov.flatten(0, 1), None if ntk is None else ntk.flatten(0, -3), tangent)
    count = len(cov2)
    index = torch.arange(len(part.cov), device=cov.device)
    sides = (cov1, mask1, index if zipped else index // count), (cov2, mask2, index if zipped else index % count)
    means = [v.reshape(cov.shape) for v in _pairwise(layer, part, [_Side.of(*side, causal) for side in sides])]
    return _assemble(layer, cov, ntk, means, tangent)


def own(
    cov1: Tensor,
    ntk1: Tensor | None,
    *,
    q_var: float,
    k_var: float,
    v_var: float,
    o_var: float,
    samples: int,
    seed: int = 0,
    rates: Four = _ONES,
    biases: Four = _NONE,
    bias_rates: Four | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    tangent: bool = True,
) -> Moments:
    """`softmax` of each sample with itself [n, T, T], what it gives for the pair (i, i); a third of the cost."""
    layer = _Layer(q_var, k_var, v_var, o_var, rates, biases, bias_rates, causal, samples, seed)
    _shapes(cov1, ntk1, cov1, cov1, mask, mask)
    allowed = _allowed(cov1, mask, causal)
    found = []
    draws, pairs = _sizes(layer, cov1)
    for index in torch.arange(len(cov1), device=cov1.device).split(pairs):
        roots = _roots(cov1[index].double(), layer, None if mask is None else mask[index])
        heads = _own_heads(layer, roots, allowed[index], draws, cov1.dtype)
        found.append(_mean(_Part(cov1, ntk1, tangent).at(index), heads, 2 * layer.base))
    return _assemble(layer, cov1, ntk1, [torch.cat(v) for v in zip(*found, strict=True)], tangent)


@dataclass(frozen=True)
class _Layer:
    q: float
    k: float
    v: float
    o: float
    rates: Four
    biases: Four
    bias_rates: Four | None
    causal: bool
    samples: int
    seed: int

    def __post_init__(self) -> None:
        variances = (self.q, self.k, self.v, self.o, *self.biases)
        if not all(v >= 0 and math.isfinite(v) for v in variances):
            raise InputError(f"the variances of weights and biases are {variances}; needed: finite numbers ≥ 0.")
        if self.samples < 4:
            raise InputError(f"samples={self.samples}; needed: at least 4, and some hundreds for errors about 1%.")

    @property
    def base(self) -> int:
        """Independent draws; each is used with both signs and with both samples exchanged."""
        return -(-self.samples // 4)


def _shapes(cov: Tensor, ntk: Tensor | None, cov1: Tensor, cov2: Tensor, *masks: Tensor | None) -> bool:
    """Whether samples meet one by one; refuse what does not fit."""
    (n, t), (m, s) = cov1.shape[:2], cov2.shape[:2]
    zipped = cov.dim() == 3
    want = (n, t, s) if zipped else (n, m, t, s)
    square = cov1.shape == (n, t, t) and cov2.shape == (m, s, s)
    if not square or cov.shape != want or (zipped and n != m) or (ntk is not None and ntk.shape != cov.shape):
        shapes = [None if v is None else list(v.shape) for v in (cov, ntk, cov1, cov2)]
        raise InputError(
            f"cov, ntk, cov1, cov2 have the shapes {shapes}; needed: [n, m, T, T'] (or [n, T, T'] one by one) for cov "
            "and ntk, [n, T, T] and [m, T', T'] for the covariances of each sample."
        )
    for mask, own in zip(masks, (cov1, cov2), strict=True):
        if mask is not None and (mask.shape != own.shape[:2] or mask.dtype != torch.bool):
            raise InputError(
                f"a mask is {mask.dtype} {list(mask.shape)}; needed: bool {list(own.shape[:2])}, True where valid."
            )
    return zipped


def _weights(cov: Tensor, mask: Tensor | None, mechanism: str, std: float) -> Tensor:
    """The attention that constant scores std·K give."""
    scores = std * cov
    if mechanism == "softmax":
        return _attention(scores, _allowed(cov, mask, causal=False))
    functions = {"identity": torch.clone, "relu": torch.relu, "abs": torch.abs}
    if mechanism not in functions:
        raise InputError(f"mechanism={mechanism!r}; needed: one of {['softmax', *functions]}.")
    found = functions[mechanism](scores)
    return found if mask is None else found * mask[:, None].to(found)


def _allowed(cov: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """[n, T, T]: which keys a query may see."""
    allowed = torch.ones_like(cov, dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if mask is None:
        return allowed
    allowed = allowed & mask[:, None]
    alone = ~allowed.any(-1) & mask
    if bool(alone.any()) or not bool(mask.any(-1).all()):
        raise InputError("a mask leaves a sample, or a valid query, without any key. Take such samples out first.")
    return allowed


def _attention(scores: Tensor, allowed: Tensor) -> Tensor:
    """softmax over the allowed keys; zero for (invalid) queries that have none."""
    found = torch.softmax(scores.masked_fill(~allowed, -torch.inf), -1)
    return found.masked_fill(~allowed.any(-1, keepdim=True), 0)


def _root(cov: Tensor, scale: Tensor | None = None, power: float = 0.5) -> Tensor:
    """The symmetric root of the positive part, or its pseudo-inverse; what rounding leaves of a zero is zero."""
    values, vectors = torch.linalg.eigh(cov)
    least = 1e-12 * (values[..., -1:] if scale is None else scale)
    values = torch.where(values > least.clamp_min(0), values, torch.inf if power < 0 else 0) ** power
    return (vectors * values.unsqueeze(-2)) @ vectors.mT


def _roots(cov: Tensor, layer: _Layer, valid: Tensor | None) -> tuple[Tensor, Tensor]:
    """Roots of the covariances of queries and keys [p, N, N]: symmetric, so that they follow an exchange of samples.

    Valid positions have a root of their own, whatever the others are; the others are drawn given the valid ones.
    """
    asked = layer.q * cov + layer.biases[0]
    if valid is None:
        root = _root(cov)
        return (math.sqrt(layer.q) * root if layer.biases[0] == 0 else _root(asked)), math.sqrt(layer.k) * root
    row, column = valid[:, :, None], valid[:, None]
    inside = row & column
    across = (asked * (column & ~row)) @ _root(asked * inside, power=-0.5)
    rest = (asked - across @ across.mT) * ~(row | column)
    scale = asked.diagonal(dim1=1, dim2=2).amax(1, keepdim=True)
    return _root(asked * inside) + across + _root(rest, scale), math.sqrt(layer.k) * _root(cov * inside)


@lru_cache(maxsize=4)
def _draws(count: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """Standard Gaussians [2, count, 2, size, size], on the CPU in float64: even and odd under an exchange of samples.

    With X = even, Y = odd, the draw over the 2·size positions of a pair is [[X₀+Y₀, X₁+Y₁], [X₁−Y₁, X₀−Y₀]]/√2.
    The columns are drawn in the order of max(t, u), so that a smaller size is the leading part of a larger one.
    """
    parts = -(-count // _ORTHOGONAL)
    seeds = torch.randint(2**62, (parts, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    rows = [len(r) for r in torch.arange(count).chunk(parts)]
    t, u = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    order = (torch.maximum(t, u) * 2 * size + torch.where(t < u, t, 2 * size - 1 - u)).flatten().argsort()
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    found = []
    for parity in range(2):
        drawn = [_orthogonal(r, 2 * size**2, s[parity]) for r, s in zip(rows, seeds, strict=False)]
        found.append(torch.cat(drawn).view(count, -1, 2)[:, place].movedim(2, 1).reshape(count, 2, size, size))
    return found[0], found[1]


def _orthogonal(rows: int, columns: int, seed: int) -> Tensor:
    """Gaussian rows [rows, columns] whose directions are orthogonal within each `rows` columns (Yu et al. 2016).

    Each row alone is exactly Gaussian: a uniform direction, times a norm of its own.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for start in range(0, columns, rows):
        directions, norms = torch.randn(2, rows, rows, generator=generator, dtype=torch.float64)
        q, r = torch.linalg.qr(directions[:, : columns - start])
        found.append(q * r.diagonal().sign() * norms.norm(dim=1, keepdim=True))
    return torch.cat(found, 1)


def _sizes(layer: _Layer, cov: Tensor) -> tuple[int, int]:
    """How many draws and how many pairs are held at once."""
    one = 4 * max(cov.shape[-2:]) ** 2
    room = _CHUNK if cov.device.type == "cpu" else 128 * _CHUNK
    draws = min(layer.base, max(1, room // one))
    return draws, max(1, room // (one * draws))


@dataclass(frozen=True)
class _Side:
    """One of the two batches, and which of its samples belongs to each pair."""

    cov: Tensor
    allowed: Tensor
    valid: Tensor | None
    index: Tensor

    @classmethod
    def of(cls, cov: Tensor, mask: Tensor | None, index: Tensor, causal: bool) -> "_Side":
        return cls(cov, _allowed(cov, mask, causal), mask, index)

    def at(self, pairs: Tensor) -> "_Side":
        index = self.index[pairs]
        return _Side(self.cov[index], self.allowed[index], None if self.valid is None else self.valid[index], index)


@dataclass(frozen=True)
class _Part:
    """K and Θ [p, T, T'] of some pairs."""

    cov: Tensor
    ntk: Tensor | None
    tangent: bool

    def at(self, pairs: Tensor) -> "_Part":
        return _Part(self.cov[pairs], None if self.ntk is None else self.ntk[pairs], self.tangent)


def _pairwise(layer: _Layer, whole: _Part, sides: list[_Side]) -> list[Tensor]:
    """`_mean` for all pairs, some at a time."""
    found = []
    draws, pairs = _sizes(layer, whole.cov)
    for index in torch.arange(len(whole.cov), device=whole.cov.device).split(pairs):
        part, (a, b) = whole.at(index), [side.at(index) for side in sides]
        joint = torch.cat([torch.cat([a.cov, part.cov], 2), torch.cat([part.cov.mT, b.cov], 2)], 1).double()
        valid = None
        if a.valid is not None or b.valid is not None:
            each = (x.cov.new_ones(x.cov.shape[:2], dtype=torch.bool) if x.valid is None else x.valid for x in (a, b))
            valid = torch.cat(list(each), 1)
        found.append(_mean(part, _heads(layer, _roots(joint, layer, valid), (a, b), draws), 4 * layer.base))
    return [torch.cat(v) for v in zip(*found, strict=True)]


Heads = Iterator[tuple[Tensor, Tensor]]


def _heads(layer: _Layer, roots: tuple[Tensor, Tensor], sides: tuple[_Side, _Side], step: int) -> Heads:
    """Attentions [p, b, T, T] and [p, b, T', T'] of b heads at a time, the same heads for both samples."""
    t, s = (side.cov.shape[-1] for side in sides)
    left, right = (r.to(sides[0].cov.dtype) for r in roots)
    even, odd = _draws(layer.base, max(t, s), layer.seed)
    for x, y in zip(even.split(step), odd.split(step), strict=True):
        draws = _spread(x.to(left), t, s, 1), _spread(y.to(left), t, s, -1)
        found = []
        for rows, side in ((slice(t), sides[0]), (slice(t, t + s), sides[1])):
            a, b = (_scores(left[:, rows], z, right[:, rows]) for z in draws)
            found.append(_attention(torch.cat([a + b, a - b, -a - b, b - a], 1), side.allowed.unsqueeze(1)))
        yield found[0], found[1]


def _spread(x: Tensor, t: int, s: int, sign: int) -> Tensor:
    """[[X₀, X₁], [±X₁, ±X₀]]/√2 over the t + s positions of a pair."""
    above = torch.cat([x[:, 0, :t, :t], x[:, 1, :t, :s]], 2)
    below = torch.cat([x[:, 1, :s, :t], x[:, 0, :s, :s]], 2)
    return torch.cat([above, sign * below], 1) / math.sqrt(2)


def _own_heads(layer: _Layer, roots: tuple[Tensor, Tensor], allowed: Tensor, step: int, dtype: torch.dtype) -> Heads:
    """The same for samples with themselves: there the root is [[R, R], [R, R]]/√2, so a draw counts as (X₀ + X₁)/√2."""
    left, right = (r.to(dtype) for r in roots)
    for x in _draws(layer.base, allowed.shape[-1], layer.seed)[0].split(step):
        a = _scores(left, (x.sum(1) / math.sqrt(2)).to(left), right)
        head = _attention(torch.cat([a, -a], 1), allowed.unsqueeze(1))
        yield head, head


def _scores(left: Tensor, z: Tensor, right: Tensor) -> Tensor:
    """left z rightᵀ for p pairs and b draws [p, b, T, T]; left and right [p, T, N], z [b, N, N]."""
    p, t, n = left.shape
    half = left.reshape(p * t, n) @ z.movedim(0, 1).reshape(n, -1)  # [pT, bN]
    return (half.view(p, -1, n) @ right.mT).view(p, t, len(z), t).transpose(1, 2)


def _mean(part: _Part, heads: Heads, count: int) -> tuple[Tensor, ...]:
    """E of ζKζ'ᵀ, and if wanted of ⟨K, JKJ'ᵀ⟩, ζΘζ'ᵀ and ⟨Θ, JKJ'ᵀ⟩ for each two queries."""
    total: list[Tensor] = []
    for a, b in heads:
        terms = _terms(part, a, b)
        total = [x + y for x, y in zip(total, terms, strict=True)] if total else terms
    return tuple(v / count for v in total)


def _terms(part: _Part, a: Tensor, b: Tensor) -> list[Tensor]:
    """Sums over heads. (JKJ'ᵀ)_tt' = ζ_t ζ'_t' {K_tt' − (ζK)_t' − (Kζ')_t + ζKζ'}: matrix products suffice."""
    cov, ntk = part.cov, part.ntk

    def times(x: Tensor, mat: Tensor) -> Tensor:
        return (x.flatten(1, 2) @ mat).unflatten(1, x.shape[1:3])

    right = times(a, cov)  # ζK
    value = right @ b.mT
    if not part.tangent:
        return [value.sum(1)]
    left = times(b, cov.mT)  # ζ'Kᵀ
    scores = (times(a, cov * cov) - right * right) @ b.mT - a @ (left * left).mT + value * value
    if ntk is None:
        return [value.sum(1), scores.sum(1)]
    right_ntk = times(a, ntk)
    value_ntk = right_ntk @ b.mT
    scores_ntk = (times(a, cov * ntk) - right_ntk * right) @ b.mT - a @ (times(b, ntk.mT) * left).mT
    return [v.sum(1) for v in (value, scores, value_ntk, scores_ntk + value_ntk * value)]


def _assemble(layer: _Layer, cov: Tensor, ntk: Tensor | None, means: list[Tensor], tangent: bool) -> Moments:
    """Both moments from the means over heads; constants of values and keys drop out of JKJ'ᵀ, as rows of ζ sum to 1."""
    q, k, v, o = layer.q, layer.k, layer.v, layer.o
    bq, _, bv, bo = layer.biases
    trained = layer.biases if layer.bias_rates is None else layer.bias_rates
    rq, rk, rv, ro = layer.rates
    value = v * means[0] + bv
    nngp = o * value + bo
    if not tangent:
        return nngp, None
    asked, scores = q * cov + bq, k * means[1]
    found = rv * v * means[0] + trained[2] + ro * value
    found = found + v * scores * (rq * q * cov + trained[0] + rk * asked)
    if ntk is not None:
        found = found + v * (means[2] + q * ntk * scores + asked * k * means[3])
    return nngp, o * found + trained[3]
