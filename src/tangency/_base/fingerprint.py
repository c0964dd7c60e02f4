"""Fingerprints of models, weights, samples and functions: short hashes that are the same in every process."""

import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping
from types import CodeType

import numpy as np
import torch
from torch import Tensor, nn

from . import tree
from .types import WORDS, Inputs, Json

# Blocks of samples that have a hash of their own, by which one that was changed is found.
BLOCKS = 256
# Stores name functions by their module. One of ours that moved keeps the name that stores were begun with.
FIRST_NAME = {"tangency.kernels.ntk": "tangency.ntk"}


def architecture(model: nn.Module) -> str:
    """A hash of what a model is made of: its modules as they print, and the shapes and types of its tensors."""
    # As it prints says which modules and options; the shapes say what a custom module's repr leaves out.
    shapes = [(k, tuple(v.shape), str(v.dtype)) for k, v in model.state_dict(keep_vars=True).items() if v is not None]
    return hashlib.sha256(repr((_stable(model), shapes)).encode()).hexdigest()[:16]


def digest(state: Mapping[str, Tensor]) -> str:
    """A hash of named tensors, bit for bit."""
    h = hashlib.sha256()
    # As bytes: NaNs and signs of zeros count, and bfloat16, which NumPy does not know, needs no cast.
    for k, v in state.items():
        h.update(k.encode())
        h.update(v.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:16]


def samples(x: Inputs) -> dict[str, Json]:
    """Which samples these are, to the bit, and in which order; `other_samples` says what differs. Reads them once."""
    form: dict[str, Json] = {}
    parts: list[np.ndarray] = []
    for name, leaf in tree.leaves(x):
        value = leaf.detach().cpu()
        form[name] = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape[1:])}"
        if value.dim() == 0:  # the same for all samples
            form[name] = f"{form[name]} {value.item()}"
        elif value.numel():
            parts.append(value.contiguous().reshape(len(value), -1).view(torch.uint8).numpy())
    rows = [_short(b"".join(part[i].tobytes() for part in parts)) for i in range(len(parts[0]) if parts else 0)]
    edges = _edges(len(rows))
    blocks: Json = [_short(b"".join(rows[a:b]))[:4].hex() for a, b in itertools.pairwise(edges)]
    orders = {"in order": _short(b"".join(rows)).hex(), "in any order": _short(b"".join(sorted(rows))).hex()}
    return {"count": len(rows), "form": form, **orders, "blocks": blocks}


def other_samples(was: Mapping[str, Json], now: Mapping[str, Json]) -> str | None:
    """In which way samples are others than those of a fingerprint; None if they are the same.

    >>> other_samples(samples(torch.eye(4)), samples(torch.eye(4)[[0, 1, 3, 2]]))
    'the same samples in another order, from sample 2 on'
    """
    if was.get("count") != now["count"]:
        return f"{was.get('count')} samples, and there are {now['count']}"
    if was.get("form") != now["form"]:
        then, here = (", ".join(f"{k} {v}" for k, v in f.items()) for f in (was.get("form"), now["form"]))  # type: ignore[union-attr]
        return f"samples of another form: {then}, and these are {here}"
    if was.get("in order") == now["in order"]:
        return None
    edges = _edges(int(now["count"]))  # type: ignore[arg-type]
    pairs = zip(was["blocks"], now["blocks"], itertools.pairwise(edges), strict=False)  # type: ignore[arg-type]
    a, b = next((block for then, here, block in pairs if then != here), (0, 1))
    first = f"sample {a}" if b - a == 1 else f"one of samples {a} to {b - 1}"
    if was.get("in any order") == now["in any order"]:
        return f"the same samples in another order, from {first} on"
    return f"other samples, the first is {first}"


def _short(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=8).digest()


def _edges(n: int) -> list[int]:
    """Where blocks of samples begin and end: few enough to be kept in a file."""
    count = min(n, BLOCKS)
    return [n * k // count for k in range(count + 1)] if count else [0]


def without_words(spec: Json) -> Json:
    """A spec without the words for people in it, which decide no number.

    >>> without_words({"of": [{"kernel": "infinite ntk", "says": {"0": "channels → ∞"}}]})
    {'of': [{'kernel': 'infinite ntk'}]}
    """
    if isinstance(spec, Mapping):
        return {k: without_words(v) for k, v in spec.items() if k != WORDS}
    return [without_words(v) for v in spec] if isinstance(spec, (list, tuple)) else spec


def describe(thing: object) -> Json:
    """A head, or what picks the outputs, as a JSON value; functions by their code and what they close over."""
    if thing is None or isinstance(thing, (int, str)):
        return thing
    if isinstance(thing, tuple):
        return list(thing)
    h = hashlib.sha256()
    if getattr(thing, "__code__", None) is not None:
        for part in instructions(thing.__code__):  # type: ignore[attr-defined]
            h.update(part.encode())
        cells = [c.cell_contents for c in getattr(thing, "__closure__", None) or ()]
        for v in (*cells, *(getattr(thing, "__defaults__", None) or ())):
            h.update(digest({"": v}).encode() if isinstance(v, Tensor) else _stable(v).encode())
    else:
        h.update(_stable(thing).encode())
    module, name = getattr(thing, "__module__", ""), getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{FIRST_NAME.get(module, module)}.{name}:{h.hexdigest()[:8]}"


def instructions(code: CodeType, doc: str | None = None) -> Iterator[str]:
    """What some code does, in pieces to hash: the same in every process, and without its docstring if that is given."""
    # Not line numbers or file names: moving a function does not change it.
    yield hashlib.sha256(code.co_code + repr((code.co_names, code.co_varnames)).encode()).hexdigest()[:16]
    for k, v in enumerate(code.co_consts):
        if isinstance(v, CodeType):  # a function inside
            yield from instructions(v)
        elif k or doc is None or v != doc:
            yield _stable(v)


def _stable(thing: object) -> str:
    """repr without what is another each time: addresses, and the order of sets."""
    if isinstance(thing, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_stable, thing))) + "}"
    if type(thing) is tuple:
        return "(" + ", ".join(map(_stable, thing)) + ")"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))
