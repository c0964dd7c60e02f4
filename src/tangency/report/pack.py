"""Numbers for a page: little-endian typed arrays in base64, as `array` in data.js reads them."""

import base64
import math

import numpy as np
import torch
from torch import Tensor

from .._base.types import Json

Content = dict[str, Json]  # a part of what the page's script reads
Packed = Content  # an array in it
# What marks NaN among 16-bit integers; the numbers themselves take −32767 … 32767.
_NOTHING = -32768


def numpy(value: Tensor) -> np.ndarray:
    """In the machine's memory, without its graph."""
    return value.detach().cpu().numpy()


def floats(value: Tensor) -> Packed:
    """As 32-bit floats."""
    return _packed("f4", numpy(value.double()).astype("<f4"), value.shape)


def integers(value: Tensor) -> Packed:
    """Exactly, in the fewest bytes: whole numbers, none negative."""
    array = numpy(value.long())
    most = int(array.max()) if array.size else 0
    kind = "u1" if most < 1 << 8 else "u2" if most < 1 << 16 else "u4"
    return _packed(kind, array.astype(f"<{kind}"), value.shape)


def bits(value: Tensor) -> Packed:
    """Truth values, a byte each."""
    return integers(value.bool())


def quantised(value: Tensor, kept: int) -> Packed:
    """16-bit integers times a step of their own for each index of the first `kept` dimensions; NaN stays NaN.

    The error is at most 1/131068 of the range of these numbers: below a pixel of any chart.
    """
    rows = value.detach().double().cpu().reshape(*value.shape[:kept], -1)
    if rows.numel() == 0:
        return _packed("i2", np.zeros(0, "<i2"), value.shape) | {"low": floats(rows), "step": floats(rows)}
    inside = rows.isfinite()
    low = torch.where(inside, rows, math.inf).amin(-1)
    high = torch.where(inside, rows, -math.inf).amax(-1)
    middle = torch.where(high >= low, (low + high) / 2, 0)
    # Middle and step in 32 bits first, as the page will have them: then rounding is the only error.
    middle = middle.float().double()
    reach = torch.maximum(high - middle, middle - low)
    step = torch.where(reach > 0, reach / 32767, 1).float().double()
    whole = ((rows - middle[..., None]) / step[..., None]).round().clamp(-32767, 32767)
    whole = torch.where(inside, whole, _NOTHING)
    packed = _packed("i2", numpy(whole).astype("<i2"), value.shape)
    return packed | {"low": floats(middle), "step": floats(step)}


def shades(value: Tensor, low: float, high: float) -> Packed:
    """Eight bits between low and high; what lies outside takes the nearest."""
    part = (value.double() - low) / (high - low) if high > low else torch.full_like(value, 0.5, dtype=torch.double)
    return integers((part.nan_to_num(0).clamp(0, 1) * 255).round())


def coded(data: bytes) -> str:
    """In base64, which a script element can hold."""
    return base64.b64encode(data).decode("ascii")


def _packed(kind: str, array: np.ndarray, shape: torch.Size) -> Packed:
    """As `array` in data.js takes it: "f4", "u2", … of this shape."""
    return {"type": kind, "shape": list(shape), "data": coded(array.tobytes())}
