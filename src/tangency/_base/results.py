"""What every public result can do: a short `repr`, `to_dict()` for JSON, and the environment that it was made in.

A result is a frozen dataclass that inherits from `Result` and has no `__repr__` of its own:

    @dataclass(frozen=True, repr=False)
    class Fit(Result):
        '''What a fit is.'''

        values: Tensor
        seconds: float

        UNITS = {"seconds": "s"}

It adds `table()` where there is something to tabulate, and `plot()` where people would rather look. A result that
people unpack (`similarity, index = nearest(…)`) is a named tuple, with `Result` before it.
"""

import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from .._version import __version__
from . import strict_json
from .types import Json

# Characters of one value in a repr.
LONGEST = 60


class Result:
    """The base of all public results."""

    UNITS: ClassVar[Mapping[str, str]] = {}

    def __repr__(self) -> str:
        """Names and values, tensors by their type and shape alone."""
        parts = ", ".join(f"{name}={brief(getattr(self, name))}" for name in _names(self))
        return f"{type(self).__name__}({parts})"

    def to_dict(self) -> dict[str, Json]:
        """Everything in it, ready for JSON, with units and the environment that it was made in."""
        values = {name: _plain(getattr(self, name)) for name in _names(self)}
        return {"result": type(self).__name__, **values, "units": dict(self.UNITS), "environment": environment()}


def environment() -> dict[str, Json]:
    """The versions and the machine that numbers were made with."""
    return {
        "tangency": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def brief(value: object) -> str:
    """A value in a few words: `float32[10, 3]` for a tensor, a type's name for what would be long."""
    if isinstance(value, Tensor | np.ndarray):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)}" if value.ndim else brief(value.item())
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Mapping):
        inside = ", ".join(f"{k!r}: {brief(v)}" for k, v in value.items())
        return f"{{{inside}}}" if len(value) <= 4 else f"{{{len(value)} entries}}"
    if isinstance(value, tuple | list) and len(value) > 4:
        return f"({len(value)} × {type(value[0]).__name__})"
    if isinstance(value, tuple | list):
        return "(" + ", ".join(brief(v) for v in value) + ")"
    text = repr(value)
    return text if len(text) <= LONGEST else f"{type(value).__name__}(…)"


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Rows as aligned text under a header, numbers as `brief` has them.

    >>> print(text_table(["reg", "loss"], [[0.1, 2.0], [10.0, 0.25]]))
    reg  loss
    0.1     2
     10  0.25
    """
    cells = [list(header), *([v if isinstance(v, str) else brief(v) for v in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(line, widths, strict=True)) for line in cells)


def _names(value: object) -> tuple[str, ...]:
    """The fields of a dataclass or a named tuple that are shown."""
    if is_dataclass(value):
        return tuple(f.name for f in fields(value) if f.repr)
    return tuple(getattr(value, "_fields", ()))


def _plain(value: object) -> Json:
    """A value as JSON has it; results inside results become dicts, without the environment said again."""
    # A model is named, not written out: its weights are no result.
    if isinstance(value, nn.Module):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return [_plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value) if f.repr}
    return strict_json.plain(value)
