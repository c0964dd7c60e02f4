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

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .._base.fingerprint import digest, instructions
from ..engine.network import Network

# How deep attributes of attributes are followed, the longest value that is kept as it is, and how many lines are kept
# (heuristics).
DEPTH, LONGEST, MOST = 6, 40, 300
FUNCTION = "function"
CHANGES = "(changes)"  # what a run itself changes: counters, caches
_EVERY_MODULE = set(vars(nn.Module()))  # the attributes that every module has
_SIMPLE = (bool, int, float, complex, str, bytes, torch.dtype, torch.device)
_FORWARD_HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def describe_code(thing: Network | nn.Module) -> dict[str, str]:
    """What of a model can be looked at, by name, and how it looks."""
    looks = Looks()
    looks.model(thing.model if isinstance(thing, Network) else thing)
    if isinstance(thing, Network):
        for name in ("head", "outputs"):
            function = getattr(thing, name)
            if callable(function):
                looks.function(name, function)
    if len(looks.lines) <= MOST:
        return looks.lines
    # Too many to keep: one line for each kind of module, a hash of its lines. It tells less of what changed.
    kinds: dict[str, list[str]] = {}
    for name, look in sorted(looks.lines.items()):
        kinds.setdefault(name.partition(":")[0], []).append(name + look)
    return {name: _short("".join(lines)) for name, lines in sorted(kinds.items())[:MOST]}


def rewritten(look: str, other: str) -> bool:
    """Whether two looks are those of functions that do other things, whatever they bring along."""
    return (
        look.startswith(FUNCTION) and other.startswith(FUNCTION) and look.split(" over ")[0] != other.split(" over ")[0]
    )


class Looks:
    """What was seen, as lines of (what, how it looks). Everything is looked at once, however often it is met."""

    def __init__(self) -> None:
        self.lines: dict[str, str] = {}
        self._texts: dict[tuple[int, int], tuple[object, str]] = {}  # with the object, so that its id stays its own
        self._followed: set[int] = set()

    def model(self, model: nn.Module) -> None:
        """Its modules' classes, attributes and hooks; those of torch follow from its version."""
        for path, m in model.named_modules():
            kind = type(m)
            for hooks in _FORWARD_HOOKS:
                for k, hook in enumerate(getattr(m, hooks).values()):
                    self.function(f"{kind.__name__}:{path} {hooks.strip('_')}[{k}]", hook)
            if _package(kind) == "torch":  # its settings are in the model's repr, which the spec hashes
                continue
            self.kind(kind)
            for name, value in vars(m).items():
                if name not in _EVERY_MODULE:
                    self.lines[f"{kind.__name__}:{path}{'.' if path else ''}{name}"] = self.look(value)
        # Hooks of all modules there are, set by torch.nn.modules.module.register_module_forward_hook.
        for hooks in _FORWARD_HOOKS:
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

    def function(self, name: str, f: object) -> None:
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
                # A module of the user's own: what is asked of it, `settings.SCALE`, is as good as a global.
                for attribute in attributes:
                    if attribute in vars(value):
                        self._read(f"{used}.{attribute}", name, vars(value)[attribute])
            elif used in known:
                self._read(used, name, value)

    def _read(self, used: str, by: str, value: object) -> None:
        """A global that a function reads."""
        if isinstance(value, types.ModuleType) or (_package(value) and not isinstance(value, _HELD)):
            return
        if isinstance(value, type):
            self.kind(value)
        elif _code(value) is not None:
            self.function(used, value)
        else:
            self.lines[f"{by} reads {used}"] = self.look(value)

    def look(self, value: object, depth: int = DEPTH) -> str:
        """A value in a few characters: as it is if that is short, else hashed."""
        try:
            text = self._text(value, depth)
        except Exception as e:  # somebody's __repr__ or __getattr__: looking must not stop a run
            text = f"({type(e).__name__})"
        return text if len(text) <= LONGEST else _short(text)

    def _text(self, value: object, depth: int) -> str:
        """A value in full, its parts to some depth."""
        if value is None or isinstance(value, _SIMPLE):
            return repr(value)
        if isinstance(value, type):
            return value.__qualname__  # whose module may be __main__ in one run and not in another
        key = (id(value), depth)
        if key not in self._texts:
            self._texts[key] = value, type(value).__name__  # if it holds itself
            self._texts[key] = value, "".join(self._parts(value, depth))
        return self._texts[key][1]

    def _parts(self, value: object, depth: int) -> Iterator[str]:
        if isinstance(value, Tensor):
            yield f"tensor {tuple(value.shape)} {digest({'': value})}"
        elif isinstance(value, np.ndarray):
            yield f"array {value.shape} {hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]}"
        elif isinstance(value, functools.partial):
            yield self._text((value.func, value.args, value.keywords), depth)
        elif (code := _code(value)) is not None:
            yield f"{FUNCTION} {_short(''.join(instructions(code, _plain(value).__doc__)))}"
            yield self._closure(value, depth)
        elif depth <= 0 or isinstance(value, nn.Module):  # modules of the model have lines of their own
            yield type(value).__name__
        elif isinstance(value, Mapping):
            # By name, not in the order in which they were set: that may differ from run to run.
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

    def _closure(self, f: object, depth: int) -> str:
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


def _plain(f: object) -> object:
    """The function behind a property or a method."""
    return f.fget if isinstance(f, property) else getattr(f, "__func__", f)


def _code(value: object) -> types.CodeType | None:
    """The instructions of a function, method or property; None for anything else."""
    code = getattr(_plain(value), "__code__", None)
    return code if isinstance(code, types.CodeType) else None


def _filled(cell: types.CellType) -> bool:
    """Whether a variable that a function closes over has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _short(text: str) -> str:
    """Eight characters that tell it from others; it may hold halves of surrogate pairs."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:8]


def _package(thing: object) -> str:
    """The installed package (or Python itself) that something comes from: what it does follows from its version.

    Empty for what is the user's own.
    """
    kind = thing if isinstance(thing, (type, types.ModuleType)) or _code(thing) is not None else type(thing)
    name = kind.__name__ if isinstance(kind, types.ModuleType) else getattr(kind, "__module__", None) or ""
    top = name.partition(".")[0]
    return top if top and _installed(top) else ""


@functools.cache
def _installed(top: str) -> bool:
    """Whether a package is Python's, was installed, or is this one, also where it is worked on."""
    if top in sys.builtin_module_names or (top in sys.stdlib_module_names and top != "__main__"):
        return True
    file = getattr(sys.modules.get(top), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file or top == "tangency"
