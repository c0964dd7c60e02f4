"""Numbers for a page: little-endian typed arrays in base64, as `array` in data.js reads them."""

import base64
import math
import re
from collections.abc import Mapping, Sequence
from unicodedata import bidirectional

import numpy as np
import torch
from torch import Tensor

from .._base.types import Json

Content = dict[str, Json]  # a part of what the page's script reads
Packed = Content  # an array in it
# What marks NaN among 16-bit integers; the numbers themselves take −32767 … 32767.
_NOTHING = -32768
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


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


def visible(value: Json) -> Json:
    """`value` with every text made safe to show: what would be unseen, or turn the line around, becomes ⟨U+202E⟩.

    That is control characters (but for tabs and line ends), marks of the direction of writing, and halves of surrogate
    pairs, which no file can hold. A text with letters that are written from right to left is set apart from what stands
    beside it, by marks of our own.

    >>> visible({"class": ["cat", "dog\\u202e", "\\ud800"]})
    {'class': ['cat', 'dog⟨U+202E⟩', '⟨U+D800⟩']}
    """
    if isinstance(value, str):
        return visible_text(value)
    if isinstance(value, Mapping):
        return {visible_text(k): visible(v) for k, v in value.items()}
    return [visible(v) for v in value] if isinstance(value, Sequence) else value


def visible_text(text: str) -> str:
    """As `visible` has it, of one text."""
    if text.isascii() and text.isprintable():
        return text
    shown = _UNSEEN.sub(lambda m: f"⟨U+{ord(m[0]):04X}⟩", text.replace("\r\n", "\n"))
    leftwards = not shown.isascii() and any(bidirectional(c) in ("R", "AL", "AN") for c in shown)
    return f"\u2068{shown}\u2069" if leftwards else shown


def coded(data: bytes) -> str:
    """In base64, which a script element can hold."""
    return base64.b64encode(data).decode("ascii")


def _packed(kind: str, array: np.ndarray, shape: torch.Size) -> Packed:
    """As `array` in data.js takes it: "f4", "u2", … of this shape."""
    return {"type": kind, "shape": list(shape), "data": coded(array.tobytes())}
