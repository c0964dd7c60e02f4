"""Talking heads: weights that mix the heads of attention, before or after its softmax (Shazeer et al. 2020, CaiT).

With infinitely many heads a mix of their scores is Gaussian again, with the covariance times w_var, and each mixed head
has rows of the weights of its own: heads stay independent. After the softmax a mixed attention is Gaussian itself,
with the second moments w_var·E[ζ ζ'] + b_var, so that head outputs have w_var·E[ζ V ζ'ᵀ] + b_var·Σ_ss' V_ss'. A bias
before the softmax is alike for all keys and not seen; after it, it gives every key the same attention, masked or not.
"""

import math
from dataclasses import replace
from math import prod

from torch import nn

from ..moments.axes import atoms_of
from .attention import Scores
from .calls import Call


def mix_heads(m: nn.Linear, call: Call, s: Scores) -> Scores:
    """nn.Linear over the heads of scores, which lie on their last axis."""
    build = call.build
    heads = sorted(atoms_of(s.axes, "channel"), key=lambda a: a.place)
    if not heads or tuple(heads) != s.axes[-1] or atoms_of(s.axes, "position") or m.out_features != m.in_features:
        raise build.unsupported(
            f"takes attention's scores of shape {s.sizes}; weights have a rule for them where they mix heads.",
            "Mix as many heads as there are, on the last axis: layer(scores.permute(0, 2, 3, 1)).permute(0, 3, 1, 2).",
        )
    op = call.weights.layer(call.name, prod(a.size for a in heads), bias=m.bias is not None, tensors=(m.weight, m.bias))
    if s.done and s.after is None:
        return replace(s, after=op)
    if s.done or s.bias is not None or s.tables or not op.w_var:
        raise build.unsupported(
            "mixes the heads of scores after a mask or bias, twice after the softmax, or by weights of variance 0.",
            "Mix heads before masks are added, and once after the softmax.",
        )
    return replace(s, scale=s.scale * math.sqrt(op.w_var), mixed=s.mixed + op.w_rate / op.w_var)
