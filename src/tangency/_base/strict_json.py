"""JSON as its standard has it: NaN and infinity, for which it has no words, become null."""

import json
import math
from collections.abc import Mapping

import numpy as np
from torch import Tensor

from .types import Json


def plain(value: object) -> Json:
    """What JSON can hold: finite numbers, text, lists, dicts; NaN and infinity become None.

    >>> plain({"tau": float("nan"), "n": np.int64(3), "shape": (2, 1)})
    {'tau': None, 'n': 3, 'shape': [2, 1]}
    """
    if isinstance(value, Tensor):
        value = value.detach().cpu().tolist()
    if isinstance(value, np.generic | np.ndarray):
        value = value.tolist()
    if isinstance(value, bool | int | str) or value is None:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    return str(value)


def plain_dict(value: Mapping[str, object]) -> dict[str, Json]:
    """The same of a dict, which stays one."""
    return {str(k): plain(v) for k, v in value.items()}


def text(value: object, indent: int | None = None) -> str:
    """`value` as JSON that every reader takes, in ASCII.

    >>> text({"tau": float("nan"), "name": "é"})
    '{"tau": null, "name": "\\\\u00e9"}'
    """
    return json.dumps(plain(value), indent=indent, allow_nan=False)
