"""The rooms of the house: a module imports only from rooms below its own; torch and numpy alone are enough."""

import ast
import functools
import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import shape_checks
import torch
from beartype.roar import BeartypeCallHintViolation, BeartypeDoorHintViolation

import tangency as tg
from tangency._base.types import Float

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "tangency"
# The drawing in docs/design.md, lowest floor first: a room imports only from floors below its own. The first floor and
# the last hold what stands at the top of the package beside the rooms; there, files may import each other.
DRAWING = re.findall(r"^( \d|\d\d)  (.{52})", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"), re.MULTILINE)
FLOORS = [names.split() for _, names in reversed(DRAWING)]
FLOORS[0].append("_version")
FLOORS[-1].append("__main__")
FLOOR = {name: k for k, rooms in enumerate(FLOORS) for name in rooms}
# Within infinite: each folder imports only from those to its left; the files beside them from all.
INFINITE = ["activations", "moments", "layers", "reading"]


def module_name(path: Path) -> str:
    """`engine.blocks` for src/tangency/engine/blocks.py; a package's own name for its `__init__.py`."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


MODULES = {module_name(path) for path in SRC.rglob("*.py")}


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    """What a file says, at its top or anywhere inside: not the expressions, which are most of it and define nothing."""
    found: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    for node in found:
        found += (child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
    return found


@functools.cache
def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, at its top or anywhere inside, relative or absolute."""
    inside = path.relative_to(SRC).parts[:-1]
    names = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name.removeprefix("tangency.") for alias in node.names if alias.name.startswith("tangency")}
        if isinstance(node, ast.ImportFrom):
            if node.level:
                stem = [*inside[: len(inside) - node.level + 1], *(node.module.split(".") if node.module else [])]
            elif node.module and node.module.split(".")[0] == "tangency":
                stem = node.module.split(".")[1:]
            else:
                continue
            for alias in node.names:
                longer = ".".join([*stem, alias.name])
                names.add(longer if longer in MODULES else ".".join(stem))
    return {name or "__init__" for name in names}


def test_the_drawing_shows_all_rooms() -> None:
    """Ten floors at most, and everything that stands in src/tangency."""
    assert [int(number) for number, _ in DRAWING] == list(range(len(DRAWING), 0, -1))
    assert len(FLOORS) <= 10
    there = {p.name.removesuffix(".py") for p in SRC.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()}
    assert there == set(FLOOR)


def test_rooms_import_only_from_floors_below() -> None:
    for path in SRC.rglob("*.py"):
        room = path.relative_to(SRC).parts[0].removesuffix(".py")
        for name in imports(path):
            other = name.split(".")[0]
            same_room = other == room or (FLOOR[other] == FLOOR[room] and FLOOR[room] in (0, len(FLOORS) - 1))
            assert same_room or FLOOR[other] < FLOOR[room], f"{path.relative_to(SRC)} imports {name}"


def test_folders_of_infinite_import_only_from_the_left() -> None:
    for k, folder in enumerate(INFINITE):
        for path in (SRC / "infinite" / folder).rglob("*.py"):
            others = {name.split(".")[1] for name in imports(path) if name.startswith("infinite.")}
            assert others <= set(INFINITE[: k + 1]), f"{path.relative_to(SRC)} imports {others}"


def test_no_two_modules_import_each_other() -> None:
    """No cycles, lazy imports included."""
    graph = {module_name(path): imports(path) for path in SRC.rglob("*.py")}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_files_stay_readable() -> None:
    for path in SRC.rglob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 500, path
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_shapes_are_checked_under_pytest() -> None:
    with pytest.raises(BeartypeDoorHintViolation):
        tg.engine.blocks.DenseBlock(torch.zeros(2, 2))

    @shape_checks.checked
    def joined(a: Float[torch.Tensor, "n c"], b: Float[torch.Tensor, " n"]) -> Float[torch.Tensor, " n"]:
        return (a.sum(1) + b)[: 3 if float(b.sum()) else None]

    joined(torch.zeros(5, 2), torch.zeros(5))
    joined(torch.zeros(4, 2), torch.zeros(4))  # n is one number in a call, not for ever
    with pytest.raises(BeartypeCallHintViolation):
        joined(torch.zeros(5, 2), torch.zeros(4))
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        joined(torch.zeros(5, 2), torch.ones(5))
