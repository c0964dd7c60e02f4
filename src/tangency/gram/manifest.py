"""What a store says of itself: everything that decides its numbers, in the `zarr.json` that other programs read too.

It is checked as a whole when a store is opened: what zarr is told must follow from what we say, and a digest shows that
nothing was changed by hand. The digest is also the key that binds every tile to its store.
"""

import hashlib
import json
import platform
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from .._version import __version__
from ..errors import StoreError
from .plan import TilePlan

FORMAT = 2
# Files of one store, at most (heuristic): file systems get slow, and listing them takes minutes.
MOST_TILES = 1_000_000
DTYPES = ("float16", "float32", "float64")
Manifest = dict[str, Any]


def manifest(
    spec: Mapping[str, Any],
    inputs: Mapping[str, str | None],
    shape: torch.Size,
    dtype: torch.dtype,
    cut: TilePlan,
    witness: Mapping[str, Any],
) -> Manifest:
    """Everything that decides the numbers, and with what they were made."""
    return {
        "format": FORMAT,
        "kernel": dict(spec),
        "inputs": dict(inputs),
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "symmetric": cut.symmetric,
        "plan": cut.decisive,
        "witness": dict(witness),
        "versions": {
            "tangency": __version__,
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "begun": secrets.token_hex(8),  # tells two stores of the same job apart
    }


def digest(said: Manifest) -> str:
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


def written(said: Manifest, function: str | None = None) -> bytes:
    """The `zarr.json` of a store. `function` is what the command line was given to make it."""
    own = {"tangency": said, "digest": digest(said)} | ({} if function is None else {"function": function})
    return json.dumps({**_array(said), "attributes": own}, indent=1).encode()


def chunk(said: Manifest) -> list[int]:
    """The shape of a stored tile; at the edges it is filled up with NaN."""
    rows, shape = said["plan"]["rows"], said["shape"]
    sides = [rows, rows] if len(shape) == 2 else [rows, shape[1], rows, shape[3]]
    return [max(1, min(c, s)) for c, s in zip(sides, shape, strict=True)]


def _array(said: Manifest) -> dict[str, Any]:
    """What zarr needs to know."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": said["shape"],
        "data_type": said["dtype"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk(said)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "NaN",
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }


def read(raw: bytes, store: str) -> tuple[Manifest, str | None]:
    """The manifest and the function of a `zarr.json`, or StoreError."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise StoreError(f"{store} cannot be opened as a Gram store: its zarr.json is damaged ({e}). {_NEW}") from e
    attributes = found.get("attributes") if isinstance(found, dict) else None
    said = attributes.get("tangency") if isinstance(attributes, dict) else None
    if not isinstance(attributes, dict) or not isinstance(said, dict):
        raise StoreError(f"{store} is a zarr array, but not one that tangency made. Give another folder.")
    if said.get("format") != FORMAT:
        versions = said.get("versions")
        made = versions.get("tangency") if isinstance(versions, dict) else None
        raise StoreError(
            f"{store} has format {said.get('format')}; this version of tangency reads {FORMAT}. Use the version that "
            f"made it ({made}), or give an empty or a new folder."
        )
    if digest(said) != attributes.get("digest"):
        raise StoreError(
            f"{store}: its manifest (in zarr.json) is not as it was written, so what it holds is not known. Bring the "
            "file back from a copy, or compute again into a new folder."
        )
    try:
        _check(said)
        wrong = next((k for k, v in _array(said).items() if found.get(k) != v), None)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as e:
        raise StoreError(f"{store}: its manifest makes no sense ({type(e).__name__}: {e}). {_NEW}") from e
    if wrong is not None:
        raise StoreError(
            f"{store}: its zarr.json was changed: {wrong} is {found.get(wrong)!r}, and was written as "
            f"{_array(said)[wrong]!r}. Put that back."
        )
    function = attributes.get("function")
    return said, function if isinstance(function, str) else None


_NEW = "Give an empty or a new folder."


def _check(said: Manifest) -> None:
    """Refuse what no version of ours writes, before anything is made of it."""
    shape, rows = said["shape"], said["plan"]["rows"]
    whole = [*shape, *(said["plan"][k] for k in ("rows", "capture", "workspace"))]
    if len(shape) not in (2, 4) or any(type(v) is not int or v < 0 for v in whole) or rows < 1 or 0 in shape:
        raise ValueError(f"shape {shape}, plan {said['plan']}")
    if said["dtype"] not in DTYPES or type(said["symmetric"]) is not bool:
        raise ValueError(f"dtype {said['dtype']!r}, symmetric {said['symmetric']!r}")
    if said["symmetric"] and shape[0] != shape[len(shape) // 2]:
        raise ValueError(f"symmetric, with shape {shape}")
    for name in ("kernel", "inputs", "witness", "versions"):
        if not isinstance(said[name], dict):
            raise TypeError(f"{name} is a {type(said[name]).__name__}")
    for part in ("entries", "outputs", "code"):
        if not isinstance(said["witness"].get(part, {}), dict):
            raise TypeError(f"the witness's {part} are no dict")
    if not isinstance(said["kernel"]["kernel"], str):
        raise TypeError("the kernel has no name")
    if plan_of(said).count > MOST_TILES:
        raise ValueError(f"{plan_of(said).count} tiles")


def plan_of(said: Manifest) -> TilePlan:
    shape, plan = said["shape"], said["plan"]
    return TilePlan(
        shape[0], shape[len(shape) // 2], said["symmetric"], plan["rows"], plan["capture"], plan["workspace"]
    )


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Every field in which two trees differ, with its path: (then, now)."""
    before, given, absent = dict(_flatten(was)), dict(_flatten(now)), "(absent)"
    both = {k: (before.get(k, absent), given.get(k, absent)) for k in [*given, *before]}
    return {k: pair for k, pair in both.items() if pair[0] != pair[1]}


def _flatten(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, Mapping):
        for k, v in tree.items():
            yield from _flatten(v, f"{prefix}.{k}" if prefix else str(k))
    elif isinstance(tree, list) and any(isinstance(v, Mapping) for v in tree):
        for k, v in enumerate(tree):
            yield from _flatten(v, f"{prefix}[{k}]")
    else:
        yield prefix, list(tree) if isinstance(tree, tuple) else tree
