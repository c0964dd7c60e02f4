"""Shapes in annotations, checked at run time in every module of tangency.

`install` changes how tangency's modules are imported: a function or dataclass whose annotations name a shape
(`Float[…]`, `Int[…]`) is decorated with `shapes_checked`. Only such annotations are checked: what else a caller may
have given wrong is answered by our own messages, which the tests look at.
"""

import ast
import dataclasses
import importlib.abc
import importlib.machinery
import inspect
import random
import sys
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any, get_args

# beartype looks at one item of a list, drawn from Python's own generator; `examine` watches that generator to see
# whether a model draws, and another thread's type check is none of its model. So beartype gets a generator of its own.
_shared, random.getrandbits = random.getrandbits, random.Random(0).getrandbits
from beartype import beartype  # noqa: E402
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


def shapes_checked(thing: Any) -> Any:
    """A function or dataclass whose shapes are checked at every call."""
    if inspect.isclass(thing) and not dataclasses.is_dataclass(thing):
        return thing
    return jaxtyped(thing, typechecker=shapes_alone)


class _Decorate(ast.NodeTransformer):
    """Puts `@shapes_checked` where annotations name a shape."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return self._visit(node, [a.annotation for a in arguments] + [node.returns])

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        return self._visit(node, [field.annotation for field in node.body if isinstance(field, ast.AnnAssign)])

    def _visit(self, node: Any, annotations: list[ast.expr | None]) -> Any:
        self.generic_visit(node)
        if any(shape in ast.unparse(hint) for hint in annotations if hint for shape in SHAPES):
            call = ast.parse("__import__('shape_checks').shapes_checked", mode="eval").body
            # A class is decorated after @dataclass, a function before @staticmethod, @cached_property and the like.
            place = 0 if isinstance(node, ast.ClassDef) else len(node.decorator_list)
            node.decorator_list.insert(place, ast.copy_location(call, node))
            ast.fix_missing_locations(node)
        return node


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = _Decorate().visit(ast.parse(self.get_data(path), path))
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


def install() -> None:
    """From now on, modules of tangency are imported with their shapes checked."""
    sys.meta_path.insert(0, _Finder())
