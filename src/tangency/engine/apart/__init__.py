"""Functions with parameters that are taken apart into simpler ones, which have rules.

Each entry takes `is_weight` and the function's own arguments, and returns the steps, to be run under the recorder; or
raises NoRule before anything is computed.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules import NoRule
from . import attention, bilinear, recurrent

Plan = Callable[..., Callable[[], Any]]


def _attention(is_weight: Any, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    bound = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs)
    bound.apply_defaults()
    if not attention.covers(bound.arguments):
        raise NoRule
    return lambda: attention.forward(**bound.arguments)


def _embedding_bag(is_weight: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Callable[[], Any]:
    """A weighted bag as a lookup and a sum."""
    bound = inspect.signature(F.embedding_bag).bind(input, weight, *args, **kwargs)
    bound.apply_defaults()
    a = bound.arguments
    weights = a["per_sample_weights"]
    plain = a["max_norm"] is None and a["padding_idx"] is None and a["offsets"] is None
    if weights is None or not plain or input.dim() != 2 or a["mode"] != "sum" or is_weight(weights):
        raise NoRule
    return lambda: (F.embedding(input, weight) * weights[..., None]).sum(-2)


def _grouped_products(
    is_weight: Any, input: Tensor, weight: Tensor, offs: Any = None, **kwargs: Any
) -> Callable[[], Any]:
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
        ends = offs.tolist()
        return torch.cat([input[a:b] @ weight[e] for e, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True))])

    return steps


def _functions() -> dict[Any, Plan]:
    found: dict[Any, Plan] = {
        F.multi_head_attention_forward: _attention,
        F.embedding_bag: _embedding_bag,
        F.linear: bilinear.linear,
        F.bilinear: bilinear.bilinear,
        torch.bilinear: bilinear.bilinear,
        torch.einsum: bilinear.einsum,
        torch.tensordot: bilinear.tensordot,
        torch.bmm: bilinear.bmm,
        Tensor.bmm: bilinear.bmm,
        torch.baddbmm: bilinear.baddbmm,
        Tensor.baddbmm: bilinear.baddbmm,
    }
    for name in ("matmul", "mm", "mv", "__matmul__", "__rmatmul__"):
        for space in (torch, Tensor):
            if (f := getattr(space, name, None)) is not None:
                found[f] = _reversed if name == "__rmatmul__" else bilinear.matmul
    for f in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)):
        if f is not None:
            found[f] = _grouped_products
    for kind in recurrent.CELLS:
        found[getattr(torch, kind)] = recurrent.layers(kind)
        found[getattr(torch, f"{kind}_cell")] = recurrent.one_step(kind)
    return found


def _reversed(is_weight: Any, input: Tensor, other: Tensor) -> Callable[[], Any]:
    return bilinear.matmul(is_weight, other, input)


TAKEN_APART = _functions()
