"""What of a model can be told apart by its looks: the code of its methods, its attributes, hooks and globals.

It is no proof of anything (see witness.py): it names what changed when the numbers say that something did, and warns
where they do not. So it must look the same in every process that runs the same program.
"""

import dis
import functools
import hashlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..engine.network import Network
from ..kernels.kernel import digest, instructions

# How deep attributes of attributes are followed, the longest value that is kept as it is, and how many lines are kept
# (heuristics).
DEPTH, LONGEST, MOST = 6, 40, 300
FUNCTION = "function"
CHANGES = "(changes)"  # what a run itself changes: counters, caches
_OWN = set(vars(nn.Module()))  # what every module has
_SIMPLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def described(thing: Network | nn.Module) -> dict[str, str]:
    """Lines of (what, how it looks)."""
    looks = Looks()
    looks.model(thing.model if isinstance(thing, Network) else thing)
    if isinstance(thing, Network):
        for name in ("head", "outputs"):
            if callable(getattr(thing, name)):
                looks.function(name, getattr(thing, name))
    if len(looks.lines) <= MOST:
        return looks.lines
    kinds: dict[str, Any] = {}
    for name, look in sorted(looks.lines.items()):
        kinds.setdefault(name.partition(":")[0], hashlib.sha256()).update(f"{name}{look}".encode())
    return {name: h.hexdigest()[:8] for name, h in sorted(kinds.items())[:MOST]}


def lasting(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The lines of `before`, less what was another afterwards."""
    return {k: v if after.get(k) == v else CHANGES for k, v in before.items()}


def rewritten(look: str, other: str) -> bool:
    """Whether two looks are those of functions that do other things, whatever they bring along."""
    return (
        look.startswith(FUNCTION) and other.startswith(FUNCTION) and look.split(" over ")[0] != other.split(" over ")[0]
    )


class Looks:
    """Everything is looked at once, however often it is met."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self._texts: dict[tuple[int, int], tuple[Any, str]] = {}  # with the object, so that its id stays its own
        self._followed: set[int] = set()

    def model(self, model: nn.Module) -> None:
        for path, m in model.named_modules():
            kind = type(m)
            for hooks in _HOOKS:
                for k, hook in enumerate(getattr(m, hooks).values()):
                    self.function(f"{kind.__name__}:{path} {hooks.strip('_')}[{k}]", hook)
            if _package(kind) == "torch":
                continue
            self.kind(kind)
            for name, value in vars(m).items():
                if name not in _OWN:
                    self.lines[f"{kind.__name__}:{path}{'.' if path else ''}{name}"] = self.look(value)
        for hooks in _HOOKS:
            for k, hook in enumerate(getattr(torch_module, f"_global{hooks}").values()):
                self.function(f"torch {hooks.strip('_')}[{k}]", hook)

    def kind(self, kind: type) -> None:
        """A class: its methods and constants, or the version of the package that it comes from."""
        for base in kind.__mro__:
            if id(base) in self._followed or base is object:
                continue
            self._followed.add(id(base))
            if (package := _package(base)) == "torch":  # whose version the manifest has
                continue
            if package:
                self.lines[f"package {package}"] = str(getattr(sys.modules.get(package), "__version__", ""))
                continue
            for name, value in vars(base).items():
                if _code(value) is not None:
                    self.function(f"{base.__name__}.{name}", value)
                elif isinstance(value, _SIMPLE) and not name.startswith("__"):
                    self.lines[f"{base.__name__}.{name}"] = self.look(value)

    def function(self, name: str, f: Any) -> None:
        """Its code, and the globals that it reads; functions and classes among them are followed."""
        self.lines[name] = self.look(f)
        plain = _plain(f)
        code, known = _code(f), getattr(plain, "__globals__", {})
        if code is None or id(code) in self._followed:
            return
        self._followed.add(id(code))
        for used, attributes in _globals(code):
            value = known.get(used)
            if isinstance(value, types.ModuleType) and not _package(value):
                for attribute in attributes:
                    if attribute in vars(value):
                        self._read(f"{used}.{attribute}", name, vars(value)[attribute])
            elif used in known:
                self._read(used, name, value)

    def _read(self, used: str, by: str, value: Any) -> None:
        if isinstance(value, types.ModuleType) or (_package(value) and not isinstance(value, _HELD)):
            return
        if isinstance(value, type):
            self.kind(value)
        elif _code(value) is not None:
            self.function(used, value)
        else:
            self.lines[f"{by} reads {used}"] = self.look(value)

    def look(self, value: Any, depth: int = DEPTH) -> str:
        """A value in a few characters: as it is if that is short, else hashed."""
        try:
            text = self._text(value, depth)
        except Exception as e:  # somebody's __repr__ or __getattr__
            text = f"({type(e).__name__})"
        return text if len(text) <= LONGEST else _short(text)

    def _text(self, value: Any, depth: int) -> str:
        if value is None or isinstance(value, _SIMPLE):
            return repr(value)
        if isinstance(value, type):
            return value.__qualname__  # whose module may be __main__ in one run and not in another
        key = (id(value), depth)
        if key not in self._texts:
            self._texts[key] = value, type(value).__name__  # if it holds itself
            self._texts[key] = value, "".join(self._parts(value, depth))
        return self._texts[key][1]

    def _parts(self, value: Any, depth: int) -> Iterator[str]:
        if isinstance(value, Tensor):
            yield f"tensor {tuple(value.shape)} {digest({'': value})}"
        elif isinstance(value, np.ndarray):
            yield f"array {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]}"
        elif isinstance(value, functools.partial):
            yield self._text((value.func, value.args, value.keywords), depth)
        elif (code := _code(value)) is not None:
            yield f"{FUNCTION} {_short(''.join(instructions(code, _plain(value).__doc__)))}"
            yield self._closure(value, depth)
        elif depth <= 0 or isinstance(value, nn.Module):
            yield type(value).__name__
        elif isinstance(value, Mapping):
            yield "{" + ", ".join(f"{k!r}: {self._text(value[k], depth - 1)}" for k in sorted(value, key=repr)) + "}"
        elif isinstance(value, (tuple, list)):
            yield "[" + ", ".join(self._text(v, depth - 1) for v in value) + "]"
        elif isinstance(value, (set, frozenset)):
            yield "{" + ", ".join(sorted(self._text(v, depth - 1) for v in value)) + "}"
        else:
            yield type(value).__qualname__
            if not _package(value):
                self.kind(type(value))
                names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
                yield self._text({n: getattr(value, n, None) for n in names}, depth - 1)

    def _closure(self, f: Any, depth: int) -> str:
        """What a function brings along: the values that it closes over, and its defaults."""
        plain = _plain(f)
        cells = [c.cell_contents for c in getattr(plain, "__closure__", None) or () if _filled(c)]
        held = [*cells, *(getattr(plain, "__defaults__", None) or ())]
        return f" over {_short(self._text(held, depth - 1))}" if held and depth > 0 else ""


_HELD = (*_SIMPLE, tuple, list, dict, set, frozenset, Tensor, np.ndarray, functools.partial)


def _globals(code: types.CodeType) -> Iterator[tuple[str, list[str]]]:
    """The names that some code, and the functions inside it, look up in its module; with the attributes it asks for."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield str(instruction.argval), list(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from _globals(inner)


def _plain(f: Any) -> Any:
    return f.fget if isinstance(f, property) else getattr(f, "__func__", f)


def _code(value: Any) -> types.CodeType | None:
    code = getattr(_plain(value), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]


def _package(thing: Any) -> str:
    """The installed package (or Python itself) that something comes from: what it does follows from its version.

    Empty for what is the user's own.
    """
    kind = thing if isinstance(thing, (type, types.ModuleType)) or _code(thing) is not None else type(thing)
    name = kind.__name__ if isinstance(kind, types.ModuleType) else getattr(kind, "__module__", None) or ""
    top = name.partition(".")[0]
    return top if top and _installed(top) else ""


@functools.cache
def _installed(top: str) -> bool:
    if top in sys.builtin_module_names or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file or top == "tangency"
