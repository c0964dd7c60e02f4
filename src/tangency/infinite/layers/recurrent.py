"""Simple recurrent networks: the same weights at every time, so the moments of two times know of one another."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..activations.duals import Dual, Relu
from ..moments.core import Here, Moments, Need, Op, RandomAffine
from ..moments.fields import Builder, Field
from ..moments.joins import concat_channels
from ..moments.nongaussian import find_doubt
from .basic import Argument, Layer
from .weights import Weights


@dataclass(frozen=True)
class Recur(Op):
    """h_t = φ(W x_t + U h_{t−1} + b): each pair of times (t, t') from the pair before, (t − 1, t' − 1).

    Alemohammad, Wang, Balestriero and Baraniuk 2021, 'The recurrent neural tangent kernel'.
    """

    dual: Dual
    inputs: RandomAffine
    hidden: RandomAffine
    backward: bool = False
    own: ClassVar[Need] = Need.DIAGONAL

    def alone(self) -> bool:
        """As `Op.alone`: where the dual rounds the angle of two equal inputs."""
        return not self.dual.exact

    def __call__(self, states: Sequence[Moments], here: Here) -> Moments:
        (s,) = states
        s = self._turned(s)
        alone = here.pairs.same and not s.whole
        # What is known of each side is its input's variance at every time; those of hidden values follow from them.
        left, right = (self._variances(v.flip(0) if self.backward else v) for v in here.own())
        covs: list[Tensor] = []
        ntks: list[Tensor] = []
        for t in range(s.grid[0]):
            cov, ntk = self._before(s, t, covs, ntks, here.tangent)
            if alone:
                value, slope = self.dual.own(cov, slope=here.tangent)
            else:
                p, q = here.pairs.spread(left[t : t + 1], right if s.whole else right[t : t + 1], 1, whole=False)
                value, slope = self.dual.both(cov, p, q, slope=here.tangent)
            covs.append(value)
            if here.tangent:
                assert ntk is not None
                assert slope is not None
                ntks.append(ntk * slope)
        joined = torch.stack(covs) if s.whole else torch.cat(covs)
        tangent = (torch.stack(ntks) if s.whole else torch.cat(ntks)) if ntks else None
        return self._turned(replace(s, cov=joined, ntk=tangent, gap=None))

    def _before(
        self, s: Moments, t: int, covs: list[Tensor], ntks: list[Tensor], tangent: bool
    ) -> tuple[Tensor, Tensor | None]:
        """The moments before φ at time t, with all times t' (whole) or with t itself: [T' or 1, *pairs]."""
        i, h = self.inputs, self.hidden
        x = s.cov[t] if s.whole else s.cov[t : t + 1]
        last = self._shifted(covs[-1], s.whole) if covs else None
        cov = x * i.w_var + (i.b_var + h.b_var)
        cov = cov if last is None else cov + h.w_var * last
        if not tangent:
            return cov, None
        # The layer's own weights at this time, then what comes through them: the inputs' tangent, and the time before's.
        ntk = x * i.w_rate + (i.b_rate + h.b_rate)
        if s.ntk is not None:
            ntk = ntk + i.w_var * (s.ntk[t] if s.whole else s.ntk[t : t + 1])
        if last is not None:
            ntk = ntk + h.w_rate * last + h.w_var * self._shifted(ntks[-1], s.whole)
        return cov, ntk

    def _shifted(self, v: Tensor, whole: bool) -> Tensor:
        """Each time t' takes what time t' − 1 had; before the first there was nothing."""
        return torch.cat([torch.zeros_like(v[:1]), v[:-1]]) if whole else v

    def _variances(self, own: Tensor) -> Tensor:
        """Of the values before φ: [T, n]."""
        variances: list[Tensor] = []
        for x in own:
            v = x * self.inputs.w_var + (self.inputs.b_var + self.hidden.b_var)
            if variances:
                v = v + self.hidden.w_var * self.dual.own(variances[-1], slope=False)[0]
            variances.append(v)
        return torch.stack(variances)

    def _turned(self, s: Moments) -> Moments:
        """Times in the order in which they are gone through."""
        if not self.backward:
            return s
        return s.map(lambda v: v.flip((0, 1) if s.whole else (0,)))


@dataclass(frozen=True)
class RNN(Layer):
    """φ(W x_t + U h_{t−1} + b) over the positions of [batch, time, channels]; all times' hidden values come out."""

    dual: Dual = field(default_factory=Relu)
    bidirectional: bool = False
    w_var: float | None = None
    b_var: float | None = None
    bias: bool = True
    width: int | None = None
    suffix: str = "_l0"
    of: nn.Module | None = field(default=None, repr=False, compare=False)

    def grow(self, build: Builder, value: Argument, weights: Weights, name: str) -> Field:
        """As `Layer.grow`."""
        f = build.field(value, -1)
        if len(f.grid) != 1:
            raise InputError(f"{build.where}: a recurrent layer takes [batch, time, channels]; it was given {f.shape}.")
        width = self.width or f.width
        ways = self.ways(build, f, weights, name, width)
        return ways[0] if len(ways) == 1 else concat_channels(build, ways)

    def ways(self, build: Builder, f: Field, weights: Weights, name: str, width: int) -> list[Field]:
        """The hidden values of each direction."""
        directions = (False, True) if self.bidirectional else (False,)
        return [self._way(build, f, weights, name, width, back) for back in directions]

    def _way(self, build: Builder, f: Field, weights: Weights, name: str, width: int, back: bool) -> Field:
        """The hidden values of one direction."""
        # torch's names of an RNN's parameters: weight_ih_l0, bias_hh_l1_reverse, …
        end = self.suffix + ("_reverse" if back else "")
        numbers = []
        for kind, fan_in in (("ih", f.width), ("hh", width)):
            names = (f"weight_{kind}{end}", f"bias_{kind}{end}")
            tensors = (getattr(self.of, names[0], None), getattr(self.of, names[1], None) if self.bias else None)
            # Inputs and hidden values have weights and a bias each, as in torch; the variances of both biases add.
            own = (self.w_var, self.b_var)
            numbers.append(weights.layer(name, fan_in, bias=self.bias, own=own, tensors=tensors, names=names))
        law = find_doubt(build.nodes, build.known, f.node, f.few, numbers[0], build.where)
        build.warn(replace(f, doubt=law))
        node = build.add(Recur(self.dual, numbers[0], numbers[1], back), (f,), f.grid)
        return Field(
            node, (*f.grid, width), 1, gaussian=False, centered=self.dual.centered(), sources=frozenset([node])
        )

    def module(self, width: int) -> nn.Module:
        """Refused: torch has no lazy RNN."""
        raise InputError("an RNN's finite form needs its input size: nn.RNN(inputs, width, batch_first=True).")
