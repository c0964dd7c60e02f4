"""Self-attention with infinitely many heads and channels: how second moments pass through it.

Hron, Bahri, Sohl-Dickstein, Novak 2020, "Infinite attention: NNGP and NTK for deep attention networks". A head's scores
are G[s, t] = q_s·k_t/√d between the query of position s and the key of position t. With independent weights of queries
and keys they are Gaussian in the limit, of covariance

    E[G[s, t] G'[s', t']] = q·k·K[s, s'] K[t, t'],        q, k the variances of the projections,  K that of the inputs,

and heads are independent, so the output is Gaussian with the covariance o·v·E[ζ K ζ'ᵀ], ζ = softmax(G): an expectation
that has no closed form and is drawn (`softmax_heads`, `draws.py`). It has one where the scores are used as they are
(`quadratic_heads`), and where they are divided by d with weights that queries and keys share, which makes them
constants (`linear_heads`).

`Projection`, `AttentionLayer`: the layer. `Sequences`, `SequencePairs`: the moments of its input. Each function gives
the two moments of its output, the tangent kernel only if it is asked for.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from .core import RandomAffine
from .draws import (
    Heads,
    Sequences,
    attention_weights,
    draw_heads,
    draw_own_heads,
    joint_roots,
    seen_keys,
    sizes_at_once,
)


class OutputMoments(NamedTuple):
    """The covariance and the tangent kernel (None if it was not asked for) of an attention layer's output."""

    cov: Tensor
    ntk: Tensor | None


@dataclass(frozen=True)
class Projection:
    """The weights and biases of queries, keys, values or outputs.

    `rate`: how much the training of the weights counts, 1 as in the NTK parametrisation and 0 if frozen. `b_rate` is
    what a trained bias adds for each (∂f/∂b)²: in the NTK parametrisation, its variance.
    """

    var: float
    rate: float = 1.0
    b_var: float = 0.0
    b_rate: float = 0.0

    @classmethod
    def of(cls, affine: RandomAffine) -> "Projection":
        """The same numbers, the rate of the weights by their variance."""
        return cls(affine.w_var, affine.w_rate / affine.w_var if affine.w_var else 0.0, affine.b_var, affine.b_rate)


@dataclass(frozen=True)
class AttentionLayer:
    """The projections of one layer; for softmax also how many heads are drawn, and whether only the past is seen."""

    q: Projection
    k: Projection
    v: Projection
    o: Projection
    causal: bool = False
    samples: int = 4096
    seed: int = 0

    @property
    def base(self) -> int:
        """Independent draws; each is used with both signs and with both samples exchanged."""
        return -(-self.samples // 4)

    def check_drawable(self) -> None:
        """Refuse what no heads can be drawn for."""
        # Only softmax heads are drawn: the closed forms take any number.
        four = (self.q, self.k, self.v, self.o)
        variances = (*(p.var for p in four), *(p.b_var for p in four))
        if not all(v >= 0 and math.isfinite(v) for v in variances):
            raise InputError(f"the variances of weights and biases are {variances}; needed: finite numbers ≥ 0.")
        if self.samples < 4:
            raise InputError(f"samples={self.samples}; needed: at least 4, and some hundreds for errors about 1%.")


@dataclass(frozen=True)
class SequencePairs:
    """Moments of the layer's input where two batches meet: all with all, or one by one.

    `cov` [n, m, T, T'] and `ntk` are those of all pairs of samples, or [n, T, T'] of pairs one by one (n = m; so
    `left.cov` itself, for samples with themselves). `ntk` None is zero. `tangent`: whether the output's is wanted.
    """

    cov: Tensor
    ntk: Tensor | None
    left: Sequences
    right: Sequences
    tangent: bool = True

    def __post_init__(self) -> None:
        cov, ntk, cov1, cov2 = self.cov, self.ntk, self.left.cov, self.right.cov
        (n, t), (m, s) = cov1.shape[:2], cov2.shape[:2]
        want = (n, t, s) if self.zipped else (n, m, t, s)
        square = cov1.shape == (n, t, t) and cov2.shape == (m, s, s)
        if not square or cov.shape != want or (self.zipped and n != m) or (ntk is not None and ntk.shape != cov.shape):
            shapes = [None if v is None else list(v.shape) for v in (cov, ntk, cov1, cov2)]
            raise InputError(
                f"cov, ntk, cov1, cov2 have the shapes {shapes}; needed: [n, m, T, T'] (or [n, T, T'] one by one) for "
                "cov and ntk, [n, T, T] and [m, T', T'] for the covariances of each sample."
            )
        for side in (self.left, self.right):
            mask, shape = side.mask, side.cov.shape[:2]
            if mask is not None and (mask.shape != shape or mask.dtype != torch.bool):
                raise InputError(
                    f"a mask is {mask.dtype} {list(mask.shape)}; needed: bool {list(shape)}, True where valid."
                )

    @property
    def zipped(self) -> bool:
        """Whether samples meet one by one."""
        return self.cov.dim() == 3


def linear_heads(layer: AttentionLayer, pairs: SequencePairs, mechanism: str = "softmax") -> OutputMoments:
    """σ² A K A'ᵀ + b² and σ² A (Θ + r K) A'ᵀ + b², A = ζ(√(q·k)·K₁₁): scores q·k/d with tied weights are constants.

    ζ is 'softmax', 'identity', 'relu' or 'abs', σ² = o·v, r = the rates of value and output. As d → ∞ the scores have
    no tangent kernel, so the weights of queries and keys add nothing. Cost: O(T³) for a pair.
    """
    std, scale = math.sqrt(layer.q.var * layer.k.var), layer.o.var * layer.v.var
    left, right = (_constant_attention(side, mechanism, std) for side in (pairs.left, pairs.right))
    rule = "nsu,nuv,ntv->nst" if pairs.zipped else "nsu,nmuv,mtv->nmst"

    def through(mat: Tensor) -> Tensor:
        """A covariance through the scores of both sides."""
        return scale * torch.einsum(rule, left, mat, right)

    value = through(pairs.cov)
    if not pairs.tangent:
        return OutputMoments(value + layer.o.b_var, None)
    ntk = (layer.v.rate + layer.o.rate) * value + layer.o.b_rate
    return OutputMoments(value + layer.o.b_var, ntk if pairs.ntk is None else ntk + through(pairs.ntk))


def _constant_attention(side: Sequences, mechanism: str, std: float) -> Tensor:
    """The attention [n, T, T] that constant scores std·K give."""
    scores = std * side.cov
    if mechanism == "softmax":
        return attention_weights(scores, seen_keys(side, causal=False))
    functions = {"identity": torch.clone, "relu": torch.relu, "abs": torch.abs}
    if mechanism not in functions:
        raise InputError(f"mechanism={mechanism!r}; needed: one of {['softmax', *functions]}.")
    attention = functions[mechanism](scores)
    return attention if side.mask is None else attention * side.mask[:, None].to(attention)


def quadratic_heads(layer: AttentionLayer, pairs: SequencePairs) -> OutputMoments:
    """σ² K ⟨K, K⟩ + b² and σ² {(Θ + r K)⟨K, K⟩ + 2K⟨K, Θ⟩} + b²: scores q·k/√d as they are, no softmax.

    ⟨·, ·⟩ sums over pairs of valid positions, σ² = q·k·o·v, r the sum of the rates. Cost: O(T²) for a pair.
    """
    cov, ntk, keys = pairs.cov, pairs.ntk, pairs.cov
    for mask, axis in ((pairs.left.mask, -1), (pairs.right.mask, -2)):
        if mask is not None:
            # Keys on both sides: [n, T] against the last axis, [m, T'] against the one before it.
            rows = mask if pairs.zipped else mask.unsqueeze(1 if axis == -1 else 0)
            keys = keys * rows.unsqueeze(axis).to(cov)
    scale = layer.q.var * layer.k.var * (layer.o.var * layer.v.var)
    dot = (keys * cov).sum((-1, -2), keepdim=True)
    nngp = scale * cov * dot + layer.o.b_var
    if not pairs.tangent:
        return OutputMoments(nngp, None)
    rates = sum((layer.q.rate, layer.k.rate, layer.v.rate, layer.o.rate))
    trained = scale * rates * cov * dot + layer.o.b_rate
    if ntk is None:
        return OutputMoments(nngp, trained)
    below = scale * (ntk * dot + 2 * cov * (keys * ntk).sum((-1, -2), keepdim=True))
    return OutputMoments(nngp, trained + below)


def softmax_heads(layer: AttentionLayer, pairs: SequencePairs) -> OutputMoments:
    """o·v·E[ζ K ζ'ᵀ] for ζ = softmax(G), G Gaussian of covariance q·k·K[s,s']K[t,t'], and its tangent kernel, by draws.

    What torch.nn.MultiheadAttention does: scores q·k/√d of independent projections of queries and keys, the value's and
    the output's projections, all with biases (those of keys do nothing). With J = ∂ζ/∂G = diag ζ − ζζᵀ of a query and
    the rates r of the projections,
      Θ_out[s,s'] = o·v·E[ζ (Θ + (r_v + r_o) K) ζ'ᵀ] + Σ_tt' Θ_G[st,s't'] o·v·E[J K J'ᵀ]_tt',
      Θ_G[st,s't'] = q·k·{(Θ + r_q K)[s,s'] K[t,t'] + K[s,s'] (Θ + r_k K)[t,t']},
    plus what biases add. The expectations are means over `samples` draws of G (rounded up to a multiple of 4), each
    exactly Gaussian, so unbiased. They come as ±Z, as Z with both samples exchanged, and orthogonal to one another as
    far as there are fewer draws than dimensions: from samples ≥ 2(T + T')² on, most of the variance is gone.

    The same draws serve all pairs, so the result does not depend on blocks; (j, i) is the transpose of (i, j), and
    (i, i) is `own_softmax_heads`, up to rounding. Valid positions that come first have the same draws whatever the
    padding. A joint covariance that is not quite positive is taken as its positive part.
    Cost: O(samples·T³) for a pair; drawing, once, O(samples²·T²), up to 4096 samples, linear beyond.

    >>> one, half = Projection(1.0), Projection(0.5)
    >>> x = Sequences(torch.ones(1, 1, 1))
    >>> layer = AttentionLayer(one, one, one, half, samples=8)
    >>> nngp, ntk = softmax_heads(layer, SequencePairs(torch.ones(1, 1, 1, 1), None, x, x))
    >>> float(nngp), float(ntk)
    (0.5, 1.0)
    """
    layer.check_drawable()
    part = _Part.of(pairs)
    # Pair number i·m + j is that of samples i and j.
    count, index = len(pairs.right.cov), torch.arange(len(part.cov), device=pairs.cov.device)
    sides = [
        (pairs.left, seen_keys(pairs.left, layer.causal), index if pairs.zipped else index // count),
        (pairs.right, seen_keys(pairs.right, layer.causal), index if pairs.zipped else index % count),
    ]
    means: list[list[Tensor]] = []
    draws, at_once = sizes_at_once(layer.base, part.cov)
    for at in index.split(at_once):
        here = part.at(at)
        a, b = (side.at(samples[at]) for side, _, samples in sides)
        seen = [keys[samples[at]] for _, keys, samples in sides]
        # The covariance over all positions of both samples [p, T + T', T + T'], whose root needs float64.
        joint = torch.cat([torch.cat([a.cov, here.cov], 2), torch.cat([here.cov.mT, b.cov], 2)], 1).double()
        valid = None if a.mask is None and b.mask is None else torch.cat([a.valid(), b.valid()], 1)
        roots = joint_roots(joint, valid, layer.q.var, layer.q.b_var, layer.k.var)
        heads = draw_heads(roots, (seen[0], seen[1]), layer.base, layer.seed, draws, pairs.left.cov.dtype)
        means.append(_mean_terms(here, heads, 4 * layer.base))
    return _assemble(layer, pairs, [torch.cat(v).reshape(pairs.cov.shape) for v in zip(*means, strict=True)])


def own_softmax_heads(layer: AttentionLayer, pairs: SequencePairs) -> OutputMoments:
    """`softmax_heads` of each sample with itself (`pairs` one by one), for (i, i) the same; a third of the cost."""
    layer.check_drawable()
    side, part = pairs.left, _Part.of(pairs)
    seen = seen_keys(side, layer.causal)
    means: list[list[Tensor]] = []
    draws, at_once = sizes_at_once(layer.base, side.cov)
    for at in torch.arange(len(side.cov), device=side.cov.device).split(at_once):
        here = side.at(at)
        roots = joint_roots(here.cov.double(), here.mask, layer.q.var, layer.q.b_var, layer.k.var)
        # Even draws alone: exchanging a sample with itself changes nothing. So there are half as many heads.
        heads = draw_own_heads(roots, seen[at], layer.base, layer.seed, draws, side.cov.dtype)
        means.append(_mean_terms(part.at(at), heads, 2 * layer.base))
    return _assemble(layer, pairs, [torch.cat(v) for v in zip(*means, strict=True)])


@dataclass(frozen=True)
class _Part:
    """K and Θ [p, T, T'] of some pairs."""

    cov: Tensor
    ntk: Tensor | None
    tangent: bool

    @classmethod
    def of(cls, pairs: SequencePairs) -> "_Part":
        """All pairs, one after the other."""
        cov = pairs.cov if pairs.zipped else pairs.cov.flatten(0, 1)
        return cls(cov, None if pairs.ntk is None else pairs.ntk.flatten(0, -3), pairs.tangent)

    def at(self, index: Tensor) -> "_Part":
        """Those with these numbers."""
        return _Part(self.cov[index], None if self.ntk is None else self.ntk[index], self.tangent)


def _mean_terms(part: _Part, heads: Heads, count: int) -> list[Tensor]:
    """E of ζKζ'ᵀ, and if wanted of ⟨K, JKJ'ᵀ⟩, ζΘζ'ᵀ and ⟨Θ, JKJ'ᵀ⟩ for each two queries."""
    total: list[Tensor] = []
    for a, b in heads:
        terms = _sum_terms(part, a, b)
        total = [x + y for x, y in zip(total, terms, strict=True)] if total else terms
    return [v / count for v in total]


def _sum_terms(part: _Part, a: Tensor, b: Tensor) -> list[Tensor]:
    """Sums over heads. (JKJ'ᵀ)_tt' = ζ_t ζ'_t' {K_tt' − (ζK)_t' − (Kζ')_t + ζKζ'}: matrix products suffice."""
    cov, ntk = part.cov, part.ntk

    def times(x: Tensor, mat: Tensor) -> Tensor:
        """A product with a matrix over the positions, for all draws at once."""
        return (x.flatten(1, 2) @ mat).unflatten(1, x.shape[1:3])

    right = times(a, cov)  # ζK
    value = right @ b.mT
    if not part.tangent:
        return [value.sum(1)]
    left = times(b, cov.mT)  # ζ'Kᵀ
    # ⟨K, JKJ'ᵀ⟩, by the formula above with K for both.
    scores = (times(a, cov * cov) - right * right) @ b.mT - a @ (left * left).mT + value * value
    if ntk is None:
        return [value.sum(1), scores.sum(1)]
    right_ntk = times(a, ntk)
    value_ntk = right_ntk @ b.mT
    scores_ntk = (times(a, cov * ntk) - right_ntk * right) @ b.mT - a @ (times(b, ntk.mT) * left).mT
    return [v.sum(1) for v in (value, scores, value_ntk, scores_ntk + value_ntk * value)]


def _assemble(layer: AttentionLayer, pairs: SequencePairs, means: list[Tensor]) -> OutputMoments:
    """Both moments from the means over heads; constants of values and keys drop out of JKJ'ᵀ, as rows of ζ sum to 1."""
    q, k, v, o = layer.q, layer.k, layer.v, layer.o
    value = v.var * means[0] + v.b_var
    nngp = o.var * value + o.b_var
    if not pairs.tangent:
        return OutputMoments(nngp, None)
    queries, scores = q.var * pairs.cov + q.b_var, k.var * means[1]
    ntk = v.rate * v.var * means[0] + v.b_rate + o.rate * value
    ntk = ntk + v.var * scores * (q.rate * q.var * pairs.cov + q.b_rate + k.rate * queries)
    if pairs.ntk is not None:
        ntk = ntk + v.var * (means[2] + q.var * pairs.ntk * scores + queries * k.var * means[3])
    return OutputMoments(nngp, o.var * ntk + o.b_rate)
