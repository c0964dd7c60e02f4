"""What the benchmarks share: Fashion-MNIST from its official files, and results with the machine that gave them."""

import json
import platform
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tangency as tg

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def fashion(folder: Path, part: str = "train") -> tuple[Tensor, Tensor]:
    """Images [n, 1, 28, 28] in [0, 1] and labels of "train" or "t10k", from the official IDX files."""
    train, test = tg.datasets.fashion_mnist(folder)
    data = train if part == "train" else test
    return pictures(data), data.y


def pictures(data: tg.datasets.Labelled) -> Tensor:
    """The inputs of a data set of images, which are one tensor."""
    assert isinstance(data.x, Tensor)
    return data.x


def save(result: dict[str, Any], path: Path, command: str) -> None:
    """Write a result as JSON, with the command and the environment."""
    result |= {
        "command": command,
        "machine": platform.processor() or platform.machine(),
        "cores": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tangency": tg.__version__,
    }
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
