"""JSON as its standard has it, written and read: NaN and infinity, for which it has no words, become null."""

import json
import math
from collections.abc import Mapping
from typing import NoReturn

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


def parse(given: str | bytes) -> Json:
    """What a JSON text says; a ValueError says why it is none, or one that two readers may take for two things.

    >>> parse('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ...
    ValueError: "a" is there twice
    """
    try:
        return json.loads(given, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except UnicodeDecodeError:
        raise ValueError("no text (UTF-8)") from None
    except json.JSONDecodeError:
        raise
    except ValueError as e:
        if "digits" in str(e):  # Python's limit for whole numbers
            raise ValueError("a number with too many digits") from None
        raise


def _object(pairs: list[tuple[str, Json]]) -> dict[str, Json]:
    """A dict, if no name is there twice: readers differ in which they take."""
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        name = next(k for k, _ in pairs if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        raise ValueError(f"{json.dumps(name[:60])} is there twice")
    return made


def _constant(word: str) -> NoReturn:
    raise ValueError(f"{word}, which is not JSON")
