"""Fingerprints of models, weights and functions: short hashes that are the same in every process."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from types import CodeType

import torch
from torch import Tensor, nn

from .types import WORDS, Json

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
