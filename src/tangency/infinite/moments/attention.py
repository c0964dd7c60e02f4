"""Attention of one sequence to another, from the moments of its queries, keys and values, heads drawn.

`heads.py` has self-attention as one layer with its projections (nn.MultiheadAttention); here the projections were read
before, so queries, keys and values may come from anywhere: from two sequences, through norms, rotated by position.

With scores G[s, t] = c·q_s·k_t/√d + bias and infinitely many heads, G is Gaussian of covariance c²·Q[s, s']·K[t, t']
(Hron et al. 2020), and channels of the joined heads have the second moments
    E[ζ V ζ'ᵀ],    ζ = softmax(G),
    Θ = E[ζ Θ_V ζ'ᵀ] + c²·Σ_tt' (Θ_Q[s, s'] K[t, t'] + Q[s, s'] Θ_K[t, t'])·E[J V J'ᵀ]_tt',    J = diag ζ − ζζᵀ.
Tables of position biases that each head has of its own are drawn beside the scores (`tables.py`).
The same draws as in `heads.py`: self-attention gives the same numbers, up to rounding.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ...errors import InputError
from .core import Here, Moments, Need, Op, Taken, drawn_with
from .draws import over_pair, scores_of, sizes_at_once, standard_draws, symmetric_root
from .tables import Attended, Table, table_shifts, table_sum

# Added to all scores of a query where forward() puts one finite number in their place: they have no gradient then.
FILLED = -1e36
Scores = Iterator[tuple[Tensor, Tensor]]  # of some heads, of the samples on both sides: [p, b, T, S], [p, b, T', S']


class Parts(NamedTuple):
    """Queries, keys and values of some pairs [p, T, T'], [p, S, S'], [p, S, S']: covariances, or tangent kernels."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None

    def at(self, index: Tensor) -> "Parts":
        """The pairs with these numbers."""
        return Parts(*(None if x is None else x[index] for x in self))


@dataclass(frozen=True)
class Attention(Op):
    """softmax(c·q·k/√d + bias)·v of given queries, keys and values: the channels of all heads side by side.

    The limit: infinitely many heads, each infinitely wide, and scores times c = s·√d for a network that multiplies them
    by s: 1 for the usual 1/√d, else what the finite network has. Heads that share keys and values (grouped queries)
    have the same second moments per channel. Known summands of the scores (masks: −∞) may differ by head.
    """

    scale: float = 1.0  # c
    samples: int = 4096
    seed: int = 0
    bias: int | None = None  # the slot of known summands [heads, T, S, n]; heads is 1 where all have the same
    shared: Tensor | None = field(default=None, repr=False, compare=False)  # those of all samples [heads, T, S]
    shift: float = 0.0  # the variance of the keys' biases: alike for all keys, so that a softmax does not see them
    waves: Tensor | None = field(default=None, repr=False, compare=False)  # [R, T, S]: G = Σ_r wave_r·G_r
    tables: tuple[Table, ...] = ()  # trained summands of the scores, of each head's own
    mixed: float = 0.0  # of trained weights that mixed the scores of heads, w_var in c²: their rate by their variance
    limit: ClassVar[str] = "heads → ∞, each infinitely wide (one head is taken for many)"
    own: ClassVar[Need] = Need.WHOLE

    def taken(self) -> Taken:
        """As `Op.taken`, with the scaling of the scores."""
        factor = "" if abs(self.scale - 1) < 1e-12 else f"{self.scale:g}·"
        turned = "" if self.waves is None else ", turned by the rotary angles of the module at hand"
        tables = ", with position biases of each head's own" if self.tables else ""
        scores = f"scores {factor}q·k/√d, which are Gaussian{turned}{tables}"
        return Taken("attention (softmax)", f"{self.limit}; {scores}", drawn_with(self.samples))

    def alone(self) -> bool:
        """As `Op.alone`: heads of a sample with itself are drawn otherwise than with others."""
        return True

    def reads(self, asked: Need) -> Need:
        """As `Op.reads`: every query looks at all keys."""
        return Need.WHOLE if asked else asked

    @property
    def base(self) -> int:
        """Independent draws; each is used with both signs and with both samples exchanged."""
        return -(-self.samples // 4)

    def __call__(self, inputs: Sequence[Moments], here: Here) -> Moments:
        if self.samples < 4:
            raise InputError(f"samples={self.samples}; needed: at least 4, and some hundreds for errors about 1%.")
        zipped, same = here.pairs.zipped, here.pairs.same
        pairs = inputs[0].cov.shape[2:]
        cov = Parts(*(_lined(s.cov, zipped) for s in inputs))
        ntk = Parts(*(None if s.ntk is None or not here.tangent else _lined(s.ntk, zipped) for s in inputs))
        queries, keys = (tuple(v.movedim(-1, 0) for v in here.own(k)) for k in (0, 1))
        biases = self._biases(here)
        assert cov.q is not None
        assert cov.k is not None
        index = torch.arange(len(cov.q), device=cov.q.device)
        count = queries[1].shape[0]
        sides = (index, index) if zipped else (index // count, index % count)
        draws, at_once = sizes_at_once(self.base, max(cov.q, cov.k, key=lambda v: max(v.shape[-2:])))
        means: list[list[Tensor]] = []
        for at in index.split(at_once):
            part, a, b = cov.at(at), sides[0][at], sides[1][at]
            left, right = queries[0][a], keys[0][a]
            if same:
                scores = self._own_scores(self._roots(left, right), (left, right), draws)
            else:
                other = queries[1][b], keys[1][b]
                assert part.q is not None
                assert part.k is not None
                roots = self._roots(_joint(left, part.q, other[0]), _joint(right, part.k, other[1]))
                scores = self._scores(roots, ((left, right), other), draws)
            known = biases[0].at(a), biases[1].at(b)
            means.append(self._means(part, ntk.at(at), scores, known, here.tangent))
        joined = [torch.cat(v) for v in zip(*means, strict=True)]
        value, tangent = self._assembled(cov, ntk, joined, here.tangent)
        back = [None if v is None else _unlined(v, pairs, zipped) for v in (value, tangent)]
        assert back[0] is not None
        return Moments(back[0], back[1], inputs[0].grid, whole=True).at(here.asked)

    def _biases(self, here: Here) -> tuple["_Bias", "_Bias"]:
        known = (None, None) if self.bias is None else here.known(self.bias)
        left, right = (_Bias(self.shared, None if v is None else v.movedim(-1, 0)) for v in known)
        return left, right

    def _roots(self, queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Symmetric roots of the covariances of queries, times c², and of keys."""
        return symmetric_root(self.scale**2 * queries.double()), symmetric_root(keys.double() - self.shift)

    def _blocks(self, x: Tensor, size: int) -> list[Tensor]:
        """One draw [b, 2, size, size] for each wave; a single one where nothing is rotated."""
        side = self._side()
        cut = [x[..., i * size : (i + 1) * size, j * size : (j + 1) * size] for i in range(side) for j in range(side)]
        return cut[: 1 if self.waves is None else len(self.waves)]

    def _side(self) -> int:
        return 1 if self.waves is None else math.ceil(math.sqrt(len(self.waves)))

    def _waved(self, parts: list[Tensor]) -> Tensor:
        """Σ over waves of the wave times the scores of a draw of its own."""
        if self.waves is None:
            return parts[0]
        waves = self.waves.to(parts[0])
        return sum((w * part for w, part in zip(waves, parts, strict=True)), start=torch.zeros_like(parts[0]))

    def _scores(
        self, roots: tuple[Tensor, Tensor], own: tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]], at_once: int
    ) -> Scores:
        """Scores of `at_once` draws at a time, four heads of each: both signs, both samples exchanged."""
        (t, s), (u, v) = ((q.shape[-1], k.shape[-1]) for q, k in own)
        dtype, size = own[0][0].dtype, max(t, s, u, v)
        left, right = (r.to(dtype) for r in roots)
        even, odd = standard_draws(self.base, size * self._side(), self.seed)
        shifts = self._shifts(at_once, (1, 1, -1, -1))
        for x, y, shift in zip(even.split(at_once), odd.split(at_once), shifts, strict=True):
            found = []
            for rows, columns in ((slice(t), slice(s)), (slice(t, t + u), slice(s, s + v))):
                a, b = (
                    self._waved([
                        scores_of(left[:, rows], over_pair(z.to(left), (t, s), (u, v), sign), right[:, columns])
                        for z in self._blocks(drawn, size)
                    ])
                    for drawn, sign in ((x, 1), (y, -1))
                )  # fmt: skip
                found.append(_shifted(torch.cat([a + b, a - b, -a - b, b - a], 1), shift))
            yield found[0], found[1]

    def _own_scores(self, roots: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], at_once: int) -> Scores:
        """Those of samples with themselves: half as many, for an exchange changes nothing."""
        t, s = (v.shape[-1] for v in own)
        left, right = (r.to(own[0].dtype) for r in roots)
        size = max(t, s)
        even = standard_draws(self.base, size * self._side(), self.seed)[0].split(at_once)
        for x, shift in zip(even, self._shifts(at_once, (1, -1)), strict=True):
            drawn = (z[..., :t, :s].sum(1) / math.sqrt(2) for z in self._blocks(x, size))
            a = self._waved([scores_of(left, z.to(left), right) for z in drawn])
            both = _shifted(torch.cat([a, -a], 1), shift)
            yield both, both

    def _shifts(self, at_once: int, signs: Sequence[int]) -> Iterator[Tensor | None]:
        """What tables add to each draw's heads, for as many draws at a time."""
        return table_shifts(self.tables, self.base, self.seed, at_once, signs)

    def _trained(self, tangent: bool) -> list[Table]:
        """The tables whose training counts."""
        return [table for table in self.tables if tangent and table.rate]

    def _means(
        self, cov: Parts, ntk: Parts, scores: Scores, biases: tuple["_Bias", "_Bias"], tangent: bool
    ) -> list[Tensor]:
        """The expectations that are asked for, over heads and over the biases that heads may have."""
        total: list[Tensor] = []
        count = 0
        for left, right in scores:
            for h in range(biases[0].heads):
                a, b = biases[0].attention(left, h), biases[1].attention(right, h)
                terms = self._terms(cov, ntk, a, b, tangent)
                if (still := _still(biases[0].filled(h), biases[1].filled(h))) is not None:
                    first = 1 if ntk.v is None else 2  # after those that are no derivatives of scores
                    terms = [*terms[:first], *(v.masked_fill(still, 0) for v in terms[first:])]
                total = [x + y for x, y in zip(total, terms, strict=True)] if total else terms
                count += left.shape[1]
        return [v / count for v in total]

    def _terms(self, cov: Parts, ntk: Parts, a: Tensor, b: Tensor, tangent: bool) -> list[Tensor]:
        """Sums over heads of ζVζ'ᵀ, and where something is trained of ζΘζ'ᵀ, ⟨K, JVJ'ᵀ⟩, ⟨Θ_K, JVJ'ᵀ⟩ in this order.

        Then those of the tables that are trained.
        """
        assert cov.v is not None
        assert cov.k is not None
        right, left = _times(a, cov.v), _times(b, cov.v.mT)
        value = right @ b.mT
        terms = [value] if ntk.v is None else [value, _times(a, ntk.v) @ b.mT]
        # (JVJ'ᵀ)_tt' = ζ_t ζ'_t' {V_tt' − (ζV)_t' − (Vζ')_t + ζVζ'}, as in `heads.py`.
        waved = [(a, b)] if self.waves is None else [(w * a, w * b) for w in self.waves.to(a)]
        for mat, wanted in ((cov.k, self._queries(cov, ntk, tangent)), (ntk.k, ntk.k)):
            if wanted is None or mat is None:
                continue
            parts = [
                (_times(x, mat * cov.v) - _times(x, mat) * right) @ y.mT
                - x @ (_times(y, mat.mT) * left).mT
                + (_times(x, mat) @ y.mT) * value
                for x, y in waved
            ]
            terms.append(sum(parts[1:], start=parts[0]))
        heads = Attended(a, b, right, left, value)
        return [v.sum(1) for v in terms] + [table_sum(table, cov.v, heads) for table in self._trained(tangent)]

    def _queries(self, cov: Parts, ntk: Parts, tangent: bool) -> Tensor | None:
        """What multiplies K in the scores' tangent kernel: Θ_Q, and Q where weights that mix heads are trained."""
        if not self.mixed or not tangent or cov.q is None:
            return ntk.q
        return self.mixed * cov.q if ntk.q is None else ntk.q + self.mixed * cov.q

    def _assembled(self, cov: Parts, ntk: Parts, means: list[Tensor], tangent: bool) -> tuple[Tensor, Tensor | None]:
        """Both moments from the means over heads."""
        value, rest = means[0], means[1:]
        parts = [rest.pop(0)] if ntk.v is not None else []
        if (queries := self._queries(cov, ntk, tangent)) is not None:
            parts.append(self.scale**2 * queries * rest.pop(0))
        if ntk.k is not None:
            assert cov.q is not None
            parts.append(self.scale**2 * cov.q * rest.pop(0))
        parts += [table.rate * rest.pop(0) for table in self._trained(tangent)]
        return value, sum(parts[1:], start=parts[0]) if parts else None


@dataclass(frozen=True)
class _Bias:
    """Known summands of the scores: of all samples [heads, T, S], and of each [n, heads, T, S]."""

    shared: Tensor | None
    of_samples: Tensor | None

    @property
    def heads(self) -> int:
        """How many heads have summands of their own."""
        shared, own = self.shared, self.of_samples
        return max(1 if shared is None else len(shared), 1 if own is None else own.shape[1])

    def at(self, index: Tensor) -> "_Bias":
        """Those of the samples with these numbers."""
        return self if self.of_samples is None else _Bias(self.shared, self.of_samples[index])

    def filled(self, head: int) -> Tensor | None:
        """Queries [n or 1, T] whose scores were all filled; None where there are none."""
        found: Tensor | None = None
        for known in (None if self.shared is None else self.shared.unsqueeze(0), self.of_samples):
            if known is not None:
                # A factor after it, such as 1/√d, leaves it as good as that.
                rows = (known[:, min(head, known.shape[1] - 1)] < 1e-3 * FILLED).all(-1)
                found = rows if found is None else found | rows
        return found if found is not None and bool(found.any()) else None

    def attention(self, scores: Tensor, head: int) -> Tensor:
        """softmax over keys of scores [p, b, T, S]."""
        if self.shared is not None:
            scores = scores + self.shared[min(head, len(self.shared) - 1)].to(scores)
        if self.of_samples is not None:
            own = self.of_samples[:, min(head, self.of_samples.shape[1] - 1)]
            scores = scores + own.unsqueeze(1).to(scores)
        return scores.softmax(-1)


def _still(left: Tensor | None, right: Tensor | None) -> Tensor | None:
    """[p or 1, T, T']: pairs of queries of which one has no scores; None where all have."""
    if left is None or right is None:
        return left.unsqueeze(2) if left is not None else right.unsqueeze(1) if right is not None else None
    return left.unsqueeze(2) | right.unsqueeze(1)


def _shifted(scores: Tensor, shift: Tensor | None) -> Tensor:
    """Scores [p, b, T, S] with what tables add to each head."""
    return scores if shift is None else scores + shift.to(scores)


def _times(x: Tensor, mat: Tensor) -> Tensor:
    """[p, b, T, S] times a matrix [p, S, S'] over the positions, for all draws at once."""
    return (x.flatten(1, 2) @ mat).unflatten(1, x.shape[1:3])


def _joint(a: Tensor, across: Tensor, b: Tensor) -> Tensor:
    """The covariance over all positions of both samples."""
    return torch.cat([torch.cat([a, across], 2), torch.cat([across.mT, b], 2)], 1)


def _lined(v: Tensor, zipped: bool) -> Tensor:
    """[T, T', *pairs] as [p, T, T']."""
    return v.movedim(-1, 0) if zipped else v.movedim((-2, -1), (0, 1)).flatten(0, 1)


def _unlined(v: Tensor, pairs: torch.Size, zipped: bool) -> Tensor:
    """[p, T, T'] as [T, T', *pairs]."""
    return v.movedim(0, -1) if zipped else v.unflatten(0, pairs).movedim((0, 1), (-2, -1))
