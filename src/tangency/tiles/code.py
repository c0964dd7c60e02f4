"""What of a model can be told apart by its looks: the code of its methods, its attributes, hooks and globals.

It is no proof of anything (see witness.py): it names what changed when the numbers say that something did.
"""

import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..kernel import digest
from ..network import Network

# How deep attributes of attributes are followed, the longest value that is kept as it is, and how many lines are kept
# (heuristics).
DEPTH, LONGEST, MOST = 6, 40, 300
_OWN = set(vars(nn.Module()))  # what every module has
_SIMPLE = (bool, int, float, complex, str, bytes, tuple, list, dict, set, Tensor, np.ndarray, torch.dtype, torch.device)
_LIBRARIES = ("torch", "builtins", "math", "functools", "numpy", "typing", "collections")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def described(thing: Network | nn.Module) -> dict[str, str]:
    """Lines of (what, how it looks)."""
    model = thing.model if isinstance(thing, Network) else thing
    found = dict(_module(model))
    if isinstance(thing, Network):
        for name in ("head", "outputs"):
            if callable(getattr(thing, name)):
                found |= dict(_function(name, getattr(thing, name)))
    if len(found) <= MOST:
        return found
    kinds: dict[str, Any] = {}
    for name, look in sorted(found.items()):
        kinds.setdefault(name.partition(":")[0], hashlib.sha256()).update(f"{name}{look}".encode())
    return {name: h.hexdigest()[:8] for name, h in sorted(kinds.items())[:MOST]}


def _module(model: nn.Module) -> Iterator[tuple[str, str]]:
    kinds: set[type] = set()
    for path, m in model.named_modules():
        kind = type(m)
        for hooks in _HOOKS:
            for k, hook in enumerate(getattr(m, hooks).values()):
                yield from _function(f"{kind.__name__}:{path} {hooks.strip('_')}[{k}]", hook)
        if _library(kind):
            continue
        kinds |= {base for base in kind.__mro__ if base is not object and not _library(base)}
        for name, value in vars(m).items():
            if name not in _OWN:
                yield f"{kind.__name__}:{path}{'.' if path else ''}{name}", _look(value, DEPTH)
    for kind in kinds:
        for name, value in vars(kind).items():
            if isinstance(value, (types.FunctionType, property, staticmethod, classmethod)):
                yield from _function(f"{kind.__name__}.{name}", value)
    for hooks in _HOOKS:
        for k, hook in enumerate(getattr(torch_module, f"_global{hooks}").values()):
            yield from _function(f"torch {hooks.strip('_')}[{k}]", hook)


def _function(name: str, f: Any) -> Iterator[tuple[str, str]]:
    """Its code, and the globals that it reads."""
    yield name, _look(f, DEPTH)
    plain = f.fget if isinstance(f, property) else getattr(f, "__func__", f)
    code, known = getattr(plain, "__code__", None), getattr(plain, "__globals__", {})
    for used in _names(code):
        value = known.get(used)
        if used in known and (isinstance(value, _SIMPLE) or not _library(value)):
            yield f"{name} reads {used}", _look(value, DEPTH)


def _names(code: Any) -> Iterator[str]:
    if code is not None:
        yield from code.co_names
        for inner in code.co_consts:
            if isinstance(inner, types.CodeType):
                yield from _names(inner)


def _look(value: Any, depth: int) -> str:
    """A value in a few characters: as it is if that is short, else hashed."""
    try:
        text = "".join(_text(value, depth))
    except Exception as e:  # somebody's __repr__ or __getattr__
        text = f"({type(e).__name__})"
    return text if len(text) <= LONGEST else hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]


def _text(value: Any, depth: int) -> Iterator[str]:
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type)):
        yield repr(value)
    elif isinstance(value, Tensor):
        yield f"tensor {tuple(value.shape)} {digest({'': value})}"
    elif isinstance(value, np.ndarray):
        yield f"array {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]}"
    elif isinstance(value, functools.partial):
        yield from _text((value.func, value.args, value.keywords), depth)
    elif (code := _code(value)) is not None:
        yield "function "
        yield from _code_text(code)
        plain = getattr(value, "__func__", value)
        cells = [c.cell_contents for c in getattr(plain, "__closure__", None) or () if _filled(c)]
        yield from _text([*cells, *(getattr(plain, "__defaults__", None) or ())], depth - 1) if depth else ()
    elif depth <= 0 or isinstance(value, nn.Module):
        yield type(value).__name__
    elif isinstance(value, Mapping):
        for k in sorted(value, key=repr):
            yield f"{k!r}: "
            yield from _text(value[k], depth - 1)
    elif isinstance(value, (tuple, list)):
        for v in value:
            yield from _text(v, depth - 1)
            yield ", "
    elif isinstance(value, (set, frozenset)):
        yield from sorted("".join(_text(v, depth - 1)) for v in value)
    else:
        yield type(value).__qualname__
        if not _library(value):
            names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
            inside = {name: getattr(value, name, None) for name in names}
            yield from _text({k: v for k, v in inside.items() if not k.startswith("__")}, depth - 1)
            for name, f in inspect.getmembers_static(type(value), inspect.isfunction):
                yield name
                yield from _code_text(f.__code__)


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _code(value: Any) -> types.CodeType | None:
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _code_text(code: types.CodeType) -> Iterator[str]:
    yield hashlib.sha256(code.co_code + repr((code.co_names, code.co_varnames)).encode()).hexdigest()[:16]
    for v in code.co_consts:
        if isinstance(v, types.CodeType):
            yield from _code_text(v)
        else:
            yield repr(v)


def _library(thing: Any) -> bool:
    """Whether it is a module, or torch or Python made it: what that does follows from its version."""
    kind = thing if isinstance(thing, type) or hasattr(thing, "__code__") else type(thing)
    module = getattr(kind, "__module__", None) or ""
    return isinstance(thing, types.ModuleType) or module.partition(".")[0] in _LIBRARIES
