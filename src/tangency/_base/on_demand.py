"""A package whose public names are imported when they are first asked for, not when the package is.

Its `__init__.py` imports them as any other does, but under `if TYPE_CHECKING:`. Editors and mypy read these lines
there; here they are read when a name is first asked for, so that no list of names and places stands beside them.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


def import_on_demand(package: str) -> None:
    """For the end of an `__init__.py`: what it imports under `if TYPE_CHECKING:` comes when it is asked for (PEP 562).

    Modules of the package, too, which nobody need have imported: `tg.engine.blocks`.
    """
    sys.modules[package].__class__ = _Package


class _Package(ModuleType):
    """A module's own `__getattr__` and `__dir__` would do, but for what its submodules do to its names."""

    def __getattr__(self, name: str) -> object:
        """What is not there yet. Two threads that ask at once wait for one import and get the same."""
        if name in vars(self).get("__all__", ()):
            module, attribute = _places(self.__name__)[name]
            value = import_module(module)
            value = getattr(value, attribute) if attribute else value
        elif not name.startswith("__") and find_spec(f"{self.__name__}.{name}") is not None:
            value = import_module(f"{self.__name__}.{name}")
        else:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        vars(self)[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        """Python's import puts each submodule here under its name, which may be a public function's: that one stays."""
        if isinstance(value, ModuleType) and name in vars(self).get("__all__", ()):
            _, attribute = _places(self.__name__).get(name, ("", ""))
            if attribute and value.__name__ == f"{self.__name__}.{name}":
                return
        super().__setattr__(name, value)

    def __reduce__(self) -> tuple[Callable[[str], ModuleType], tuple[str]]:
        """By its name: cloudpickle, which sends users' functions and their `tg` to workers, knows plain modules."""
        return import_module, (self.__name__,)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *vars(self).get("__all__", ())})


@cache
def _places(package: str) -> dict[str, tuple[str, str]]:
    """By name: the module, and what it is called there (nothing: the name is the module's)."""
    import ast  # a millisecond or two, which a package nobody asks does not cost

    spec = sys.modules[package].__spec__
    source = getattr(spec and spec.loader, "get_source", lambda _: None)(package)
    if source is None:
        raise ImportError(f"{package} imports its names by its own source, and {package}/__init__.py is not there.")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    lines = [line for block in blocks if ast.unparse(block.test) == "TYPE_CHECKING" for line in block.body]
    found = {}
    for line in lines:
        assert isinstance(line, ast.ImportFrom)
        assert line.level == 1
        for alias in line.names:
            module, attribute = (line.module, alias.name) if line.module else (alias.name, "")
            found[alias.asname or alias.name] = f"{package}.{module}", attribute
    return found
