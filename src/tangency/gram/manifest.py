"""What a store says of itself: everything that decides its numbers, in the `zarr.json` that other programs read too.

It is checked as a whole when a store is opened: what zarr is told must follow from what we say, and a digest shows that
nothing was changed by hand. The digest is also the key that binds every tile to its store.
"""

import hashlib
import json
import math
import platform
import re
import secrets
from collections.abc import Collection, Iterator, Mapping
from typing import TypedDict, cast

import numpy as np
import torch

from .._base.types import WORDS, Json, Spec
from .._version import __version__
from ..errors import StoreError
from .plan import TilePlan

# Raised whenever a store could be misread by a version that knows the format before only.
FORMAT = 2
# The libraries that numbers are made with here.
VERSIONS: Mapping[str, str] = {
    "tangency": __version__,
    "torch": torch.__version__,
    "numpy": np.__version__,
    "python": platform.python_version(),
}
# A function in a spec, and a hash of its code (`_base.fingerprint.describe`).
_FUNCTION = re.compile(r"(?P<name>[^:]+):[0-9a-f]{8}")
# Files of one store, at most (heuristic): file systems get slow, and listing them takes minutes.
MOST_TILES = 1_000_000
DTYPES = ("float16", "float32", "float64")
NEW_FOLDER = "Give an empty or a new folder."


class Witness(TypedDict):
    """What a kernel gave for a few samples when a store was begun, by name, and what its code looked like."""

    entries: dict[str, list[float | None]]
    outputs: dict[str, list[float | None]]
    code: dict[str, str]


class Manifest(TypedDict):
    """Everything that decides the numbers of a store, and with what they were made."""

    format: int
    kernel: Spec
    inputs: dict[str, str | None]  # hashes of x1 and x2
    shape: list[int]
    dtype: str
    symmetric: bool
    plan: dict[str, int]  # what decides the bits of a tile
    witness: Witness
    versions: dict[str, str]
    begun: str  # another one for every store: tells two stores of the same job apart


def manifest(
    spec: Spec, inputs: Mapping[str, str | None], shape: torch.Size, dtype: torch.dtype, cut: TilePlan, witness: Witness
) -> Manifest:
    """The manifest of a new store."""
    return {
        "format": FORMAT,
        "kernel": dict(spec),
        "inputs": dict(inputs),
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "symmetric": cut.symmetric,
        "plan": plan_fields(cut),
        "witness": witness,
        "versions": dict(VERSIONS),
        "begun": secrets.token_hex(8),
    }


def manifest_digest(said: Manifest) -> str:
    """The hash that a store's zarr.json carries of its manifest."""
    # Sorted: another program that writes the file anew may put the keys in another order.
    return hashlib.blake2b(json.dumps(said, sort_keys=True).encode(), digest_size=16).hexdigest()


def manifest_file(said: Manifest, function: str | None = None) -> bytes:
    """The `zarr.json` of a store. `function` is what the command line was given to make it."""
    # `function` is outside of the digest: it decides no number, and is never run without being asked for.
    _check(said)
    attributes = {"tangency": said, "digest": manifest_digest(said)}
    return json.dumps(
        {**_array(said), "attributes": attributes | ({} if function is None else {"function": function})}, indent=1
    ).encode()


def chunk_shape(said: Manifest) -> list[int]:
    """The shape of a stored tile; at the edges it is filled up with NaN."""
    rows, shape = said["plan"]["rows"], said["shape"]
    sides = [rows, rows] if len(shape) == 2 else [rows, shape[1], rows, shape[3]]
    return [max(1, min(c, s)) for c, s in zip(sides, shape, strict=True)]


def _array(said: Manifest) -> dict[str, Json]:
    """What zarr needs to know."""
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": said["shape"],
        "data_type": said["dtype"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunk_shape(said)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": "NaN",
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
    }


def read_manifest(raw: bytes, store: str) -> tuple[Manifest, str | None]:
    """The manifest and the function of a `zarr.json`, or StoreError. Nothing in it is trusted before it was checked."""
    try:
        about = json.loads(raw)
    except (ValueError, RecursionError) as e:
        raise StoreError(
            f"{store} cannot be opened as a Gram store: its zarr.json is damaged ({e}). {NEW_FOLDER}"
        ) from e
    attributes = about.get("attributes") if isinstance(about, dict) else None
    said = attributes.get("tangency") if isinstance(attributes, dict) else None
    if not isinstance(attributes, dict) or not isinstance(said, dict):
        raise StoreError(f"{store} is a zarr array, but not one that tangency made. Give another folder.")
    if said.get("format") != FORMAT:
        made_with = said.get("versions")
        version = made_with.get("tangency") if isinstance(made_with, dict) else None
        raise StoreError(
            f"{store} has format {said.get('format')}; this version of tangency reads {FORMAT}. Use the version that "
            f"made it ({version}), or give an empty or a new folder."
        )
    manifest = cast(Manifest, said)  # `_check` sees to it
    if manifest_digest(manifest) != attributes.get("digest"):
        raise StoreError(
            f"{store}: its manifest (in zarr.json) is not as it was written, so what it holds is not known. Bring the "
            "file back from a copy, or compute again into a new folder."
        )
    try:
        _check(manifest)
        wrong = next((k for k, v in _array(manifest).items() if about.get(k) != v), None)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as e:
        raise StoreError(f"{store}: its manifest makes no sense ({type(e).__name__}: {e}). {NEW_FOLDER}") from e
    if wrong is not None:
        raise StoreError(
            f"{store}: its zarr.json was changed: {wrong} is {about.get(wrong)!r}, and was written as "
            f"{_array(manifest)[wrong]!r}. Put that back."
        )
    function = attributes.get("function")
    return manifest, function if isinstance(function, str) else None


def _check(said: Manifest) -> None:
    """Refuse what no version of ours writes, before anything is made of it."""
    shape, rows = said["shape"], said["plan"]["rows"]
    whole = [*shape, *(said["plan"][k] for k in ("rows", "capture", "workspace"))]
    # `type(v) is int`: True is an int to isinstance.
    if len(shape) not in (2, 4) or any(type(v) is not int or v < 0 for v in whole) or rows < 1 or 0 in shape:
        raise ValueError(f"shape {shape}, plan {said['plan']}")
    if said["dtype"] not in DTYPES or type(said["symmetric"]) is not bool:
        raise ValueError(f"dtype {said['dtype']!r}, symmetric {said['symmetric']!r}")
    if said["symmetric"] and shape[0] != shape[len(shape) // 2]:
        raise ValueError(f"symmetric, with shape {shape}")
    by_name: Mapping[str, object] = said
    for name in ("kernel", "inputs", "witness", "versions"):
        if not isinstance(by_name[name], dict):
            raise TypeError(f"{name} is a {type(by_name[name]).__name__}")
    for part in ("entries", "outputs", "code"):
        if not isinstance(said["witness"].get(part, {}), dict):
            raise TypeError(f"the witness's {part} are no dict")
    if not isinstance(said["kernel"]["kernel"], str):
        raise TypeError("the kernel has no name")
    if plan_of(said).count > MOST_TILES:
        raise ValueError(f"{plan_of(said).count} tiles")


def plan_fields(cut: TilePlan) -> dict[str, int]:
    """What of a plan decides the bits of a tile; the rest may be another when a store is gone on with."""
    return {"rows": cut.rows, "capture": cut.capture, "workspace": cut.workspace}


def plan_of(said: Manifest) -> TilePlan:
    """How a store's matrix is cut into tiles."""
    shape, plan = said["shape"], said["plan"]
    return TilePlan(
        shape[0], shape[len(shape) // 2], said["symmetric"], plan["rows"], plan["capture"], plan["workspace"]
    )


def differences(was: Mapping[str, object], now: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Every field in which two trees differ, with its path: (then, now). Words for people are left out."""
    before, here, absent = dict(_flatten(was)), dict(_flatten(now)), "(absent)"
    pairs = {k: (before.get(k, absent), here.get(k, absent)) for k in [*here, *before]}
    return {k: pair for k, pair in pairs.items() if not _same(k, *pair)}


def only_looks(path: str, was: object, now: object, versions: Collection[str]) -> bool:
    """Whether two values of a spec may differ because these versions do: another Python compiles the same function to
    other instructions, and another torch may print the same module otherwise. What they do, their numbers say."""
    if "python" in versions and isinstance(was, str) and isinstance(now, str):
        then, here = _FUNCTION.fullmatch(was), _FUNCTION.fullmatch(now)
        if then and here:
            return then["name"] == here["name"]
    return "torch" in versions and path.rpartition(".")[2] == "model"


def _same(path: str, was: object, now: object) -> bool:
    """Equal; errors that a rule of quadrature measured of itself but for digits in which processors differ."""
    if path.endswith(".error") and isinstance(was, float) and isinstance(now, float):
        return math.isclose(was, now, rel_tol=0.01)
    return was == now


def _flatten(tree: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a tree with their paths: `of[1].head`."""
    if isinstance(tree, Mapping):
        for k, v in tree.items():
            if k != WORDS:
                yield from _flatten(v, f"{prefix}.{k}" if prefix else str(k))
    # Lists of plain values, such as the names of parameters, are compared and shown as a whole.
    elif isinstance(tree, list) and any(isinstance(v, Mapping) for v in tree):
        for k, v in enumerate(tree):
            yield from _flatten(v, f"{prefix}[{k}]")
    else:
        yield prefix, list(tree) if isinstance(tree, tuple) else tree  # JSON has no tuples
