"""Shapes in annotations, checked at run time in every module of tangency.

`install` changes how tangency's modules are imported: a function or dataclass whose annotations name a shape
(`Float[…]`, `Int[…]`) is checked by beartype when it is called. Only such annotations are checked: what else a caller
may have given wrong is answered by our own messages, which the tests look at. In the modules that `install` is given
by name, all annotations are.

jaxtyping has a decorator and an import hook for this; both bind arguments to the signature at every call, which took
half of the time of our tests. All that is needed of it is that the sizes of one call are remembered together.
"""

import ast
import dataclasses
import functools
import importlib.abc
import importlib.machinery
import inspect
import random
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from types import CodeType, ModuleType
from typing import Any, get_args, get_type_hints

# beartype looks at one item of a list, drawn from Python's own generator; `examine` watches that generator to see
# whether a model draws, and another thread's type check is none of its model. So beartype gets a generator of its own.
_shared, random.getrandbits = random.getrandbits, random.Random(0).getrandbits
from beartype import beartype  # noqa: E402
from beartype.door import die_if_unbearable  # noqa: E402
from jaxtyping import AbstractArray, jaxtyped  # noqa: E402


@beartype
def _first(items: list[int]) -> list[int]:
    return items


_before = random.getstate()
_first([1, 2, 3])
assert random.getstate() == _before, "beartype still draws from the generator of the process"
random.getrandbits = _shared

SHAPES = ("Float[", "Int[", "Bool[")


def has_shape(annotation: object) -> bool:
    """Whether an annotation names a shape, anywhere inside."""
    if inspect.isclass(annotation):
        return issubclass(annotation, AbstractArray)
    return any(has_shape(part) for part in get_args(annotation))


def shapes_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """beartype on the annotations that name a shape; all others become `object`."""
    kept = {name: hint if has_shape(hint) else object for name, hint in function.__annotations__.items()}
    function.__annotations__ = kept
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=kept.get(p.name, p.annotation)) for p in signature.parameters.values()]
    function.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=parameters, return_annotation=kept.get("return", signature.return_annotation)
    )
    return beartype(function)


# Tests may switch the checks off: torch.fx passes proxies where a tensor is annotated.
enabled = True


def checked(thing: Any, wholly: bool = False) -> Any:
    """A function or dataclass whose shapes are checked at every call; `wholly`: all its annotations."""
    if inspect.isclass(thing):
        return _checked_class(thing, wholly) if dataclasses.is_dataclass(thing) else thing
    inner: Callable[..., Any] | None = None

    @functools.wraps(thing)
    def call(*args: Any, **kwargs: Any) -> Any:
        nonlocal inner
        if not enabled:
            return thing(*args, **kwargs)
        if inner is None:  # not before: beartype writes a function for each, and most processes call few
            inner = beartype(_copy(thing)) if wholly else shapes_alone(_copy(thing))
        with _ONE_CALL:
            return inner(*args, **kwargs)

    return call


def _copy(function: Any) -> Any:
    """The same function, whose annotations may be changed."""
    code, defaults = function.__code__, function.__defaults__
    plain = types.FunctionType(code, function.__globals__, function.__name__, defaults, function.__closure__)
    plain.__kwdefaults__, plain.__annotations__ = function.__kwdefaults__, dict(function.__annotations__)
    plain.__module__, plain.__qualname__ = function.__module__, function.__qualname__
    return plain


# What the alias `Json` is made of, which a module that names it need not import.
_IN_JSON = {"Mapping": Mapping, "Sequence": Sequence}
_ONE_CALL = jaxtyped("context")  # the sizes that a name such as "n" has had since it was entered


def _checked_class(cls: type, wholly: bool) -> type:
    """A dataclass whose fields are checked once they are set."""
    made: Callable[..., None] = vars(cls)["__init__"]
    hints: dict[str, Any] | None = None

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        nonlocal hints
        made(self, *args, **kwargs)
        if type(self) is not cls or not enabled:  # what inherits is checked itself
            return
        if hints is None:  # not before: a field may be annotated with a class that comes later
            said = get_type_hints(cls, localns=_IN_JSON)
            hints = {f.name: said[f.name] for f in dataclasses.fields(cls) if wholly or has_shape(said[f.name])}
        with _ONE_CALL:
            for name, hint in hints.items():
                die_if_unbearable(getattr(self, name), hint)

    cls.__init__ = init  # type: ignore[misc]
    return cls


wholly_checked = functools.partial(checked, wholly=True)


class _Decorate(ast.NodeTransformer):
    """Puts `@checked` where annotations name a shape; `wholly`: on all functions and dataclasses."""

    def __init__(self, wholly: bool) -> None:
        self.wholly = wholly

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Not into expressions, in which nothing is defined."""
        return node if isinstance(node, ast.expr) else super().generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return self._visit(node, [a.annotation for a in arguments] + [node.returns])

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return self._visit(node, [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)])

    def _visit(self, node: Any, annotations: list[ast.expr | None]) -> Any:
        self.generic_visit(node)
        if self.wholly or any(shape in ast.unparse(hint) for hint in annotations if hint for shape in SHAPES):
            name = "wholly_checked" if self.wholly else "checked"
            call = ast.parse(f"__import__('shape_checks').{name}", mode="eval").body
            # A class is decorated after @dataclass, a function before @staticmethod, @cached_property and the like.
            place = 0 if isinstance(node, ast.ClassDef) else len(node.decorator_list)
            node.decorator_list.insert(place, ast.fix_missing_locations(ast.copy_location(call, node)))
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        wholly = any(fullname == name or fullname.startswith(name + ".") for name in WHOLLY)
        source = self.get_data(path)
        if not wholly and not any(shape.encode() in source for shape in SHAPES):
            code = super().get_code(fullname)  # which Python may have kept from the last time
            assert code is not None
            return code
        tree = _Decorate(wholly).visit(ast.parse(source, path))
        return compile(tree, path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "tangency":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Loader(name, spec.loader.path)
        return spec


WHOLLY: list[str] = []


def install(wholly: Sequence[str]) -> None:
    """From now on, modules of tangency are imported with their shapes checked; of those in `wholly`, everything."""
    WHOLLY.extend(wholly)
    sys.meta_path.insert(0, _Finder())
