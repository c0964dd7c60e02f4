"""Which functions with parameters are taken apart into simpler ones, which have rules.

Each entry of `TAKEN_APART` takes `is_weight` and the function's own arguments, and returns the steps, to be run under
the recorder; or raises NoRule before anything is computed.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules import NoRule
from ..torch_functions import Function, signature
from . import attention, bilinear, recurrent
from .bilinear import IsWeight

Steps = Callable[[], object]


def _attention(is_weight: IsWeight, *args: object, **kwargs: object) -> Steps:
    bound = signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    if not attention.covers(a["query"], a["dropout_p"], a["training"], a["add_zero_attn"], a):
        raise NoRule
    return lambda: attention.attend(**bound.arguments)


def _embedding_bag(is_weight: IsWeight, input: Tensor, weight: Tensor, *args: object, **kwargs: object) -> Steps:
    """A weighted bag as a lookup and a sum."""
    bound = signature(F.embedding_bag).bind(input, weight, *args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    weights = a["per_sample_weights"]
    plain = a["max_norm"] is None and a["padding_idx"] is None and a["offsets"] is None
    if weights is None or not plain or input.dim() != 2 or a["mode"] != "sum" or is_weight(weights):
        raise NoRule
    return lambda: (F.embedding(input, weight) * weights[..., None]).sum(-2)


def _grouped_products(
    is_weight: IsWeight, input: Tensor, weight: Tensor, offs: Tensor | None = None, **kwargs: object
) -> Steps:
    """torch._grouped_mm: rows up to offs[e] times the weight of expert e."""
    if (
        offs is None
        or input.dim() != 2
        or weight.dim() != 3
        or is_weight(input)
        or any(v is not None for v in kwargs.values())
    ):
        raise NoRule

    def steps() -> Tensor:
        """Each group of rows times its own weight."""
        ends = offs.tolist()
        spans = zip([0, *ends[:-1]], ends, strict=True)
        return torch.cat([input[start:end] @ weight[e] for e, (start, end) in enumerate(spans)])

    return steps


def _functions() -> dict[Function, Callable[..., Steps]]:
    table: dict[Function, Callable[..., Steps]] = {
        F.multi_head_attention_forward: _attention,
        F.embedding_bag: _embedding_bag,
        F.linear: bilinear.linear_steps,
        F.bilinear: bilinear.bilinear_steps,
        torch.bilinear: bilinear.bilinear_steps,
        torch.einsum: bilinear.einsum_steps,
        torch.tensordot: bilinear.tensordot_steps,
        torch.bmm: bilinear.bmm_steps,
        Tensor.bmm: bilinear.bmm_steps,
        torch.baddbmm: bilinear.baddbmm_steps,
        Tensor.baddbmm: bilinear.baddbmm_steps,
    }
    for name in ("matmul", "mm", "mv", "__matmul__", "__rmatmul__"):
        for space in (torch, Tensor):
            if (f := getattr(space, name, None)) is not None:
                table[f] = _reversed if name == "__rmatmul__" else bilinear.matmul_steps
    for f in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)):
        if f is not None:
            table[f] = _grouped_products
    for kind in recurrent.CELLS:
        table[getattr(torch, kind)] = recurrent.layer_steps(kind)
        table[getattr(torch, f"{kind}_cell")] = recurrent.cell_steps(kind)
    return table


def _reversed(is_weight: IsWeight, input: Tensor, other: Tensor) -> Steps:
    return bilinear.matmul_steps(is_weight, other, input)


TAKEN_APART = _functions()
