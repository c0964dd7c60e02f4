"""The rooms of the house: a module imports only from rooms above its own; torch and numpy alone are enough."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jaxtyping import TypeCheckError

import tangency as tg

SRC = Path(__file__).parent.parent / "src" / "tangency"
ROOMS = [
    ["_version", "errors", "_types", "_progress", "_json"],
    ["_tree"],
    ["_check"],
    ["_triton"],
    ["fused"],
    ["blocks"],
    ["rules", "borrow", "torch_functions"],
    ["layout", "weights", "attention", "bilinear", "recurrent"],
    ["structured", "apart"],
    ["recorder"],
    ["capture", "network"],
    ["jacobian", "examine"],
    ["probe"],
    ["features"],
    ["cost"],
    ["contract", "choices"],
    ["sketch"],
    ["kernel"],
    ["combine", "ntk", "gram"],
    ["tiles", "matrix"],
    ["eigen", "factor", "linearize", "projection"],
    ["solve"],
    ["regress"],
    ["dynamics", "estimators", "surrogate", "forensics"],
    ["infinite"],
    ["attribution", "datasets", "models"],
    ["decisions"],
    ["testing", "plots", "report", "experiments", "demo"],
    ["cli"],
    ["__main__"],
    ["__init__"],
]
FLOOR = {name: k for k, room in enumerate(ROOMS) for name in room}


def imports(path: Path) -> set[str]:
    """The rooms that a file of the package imports from."""
    found = set()
    depth = len(path.relative_to(SRC).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
    return found


def test_modules_import_only_from_rooms_above() -> None:
    for path in SRC.rglob("*.py"):
        room = path.relative_to(SRC).parts[0].removesuffix(".py")
        for other in imports(path) - {room}:
            assert FLOOR[other] < FLOOR[room], f"{path.name} imports {other}"


def test_files_stay_readable() -> None:
    for path in SRC.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 500, path
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"


def test_import_needs_torch_and_numpy_alone() -> None:
    """The GPU machine has nothing else that could be relied on."""
    optional = ["jaxtyping", "beartype", "sklearn", "scipy", "matplotlib", "tqdm", "transformers", "zarr", "ray", "PIL"]
    code = f"""
import sys
for name in {optional}:
    sys.modules[name] = None
import torch, tangency as tg
print(tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(4, 3)).shape)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([4, 4])" in done.stdout


def test_shapes_are_checked_under_pytest() -> None:
    with pytest.raises(TypeCheckError, match="g"):
        tg.blocks.Dense(torch.zeros(2, 2))
    with pytest.raises(TypeCheckError):
        tg.blocks.scatter(torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 1, 3, 1, 4), "five")  # type: ignore[arg-type]
