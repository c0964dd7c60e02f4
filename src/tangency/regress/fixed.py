"""A fit belongs to the kernel that it was made with: whether that is still the same."""

import json
from collections.abc import Sequence

import torch
from torch import Tensor

from .._base import checks
from .._base.types import Spec
from ..errors import ModelError

# How far a kernel may be from what it was, relative to its largest entry (heuristic: rounding on another machine, with
# margin).
ROUNDED = 2e-2


def close(spec: Spec, dtype: torch.dtype) -> float:
    """How far entries of one kernel may be apart, relative to the largest."""
    coarse = any(f'"{name}"' in json.dumps(spec) for name in ("tf32", "float16", "float8"))
    return ROUNDED if coarse else float(torch.finfo(dtype).eps ** 0.5)


def moved(now: Tensor, then: Tensor, limit: float) -> list[str]:
    """What is to be said of entries that are others than in `fit`; nothing if they are the same."""
    gap = float((now - then).abs().max() / then.abs().max().clamp_min(torch.finfo(then.dtype).tiny))
    return [] if gap <= limit else [f"k of the first training samples, by {gap:.2g} of its largest entry"]


def unchanged(changed: Sequence[str]) -> None:
    """Refuse to predict with a kernel that is another than it was in `fit`."""
    if changed:
        raise ModelError(
            "the kernel has changed since fit, and the coefficients belong to what it was. Other than then: "
            f"{checks.some(list(changed))}. Fit again; or, to go on with the network as it was, fit with a copy of it: "
            "tg.trace_ntk(copy.deepcopy(model))."
        )
