"""What the benchmarks share: Fashion-MNIST from its official files, and results with the machine that gave them."""

import gzip
import json
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import tangency as tg

RESULTS = Path(__file__).parent / "results"


def fashion(folder: Path, part: str = "train") -> tuple[Tensor, Tensor]:
    """Images [n, 1, 28, 28] in [0, 1] and labels of "train" or "t10k", from the gzipped IDX files."""

    def read(stem: str, offset: int) -> np.ndarray:
        path = next(folder.glob(f"{part}-{stem}*.gz"))
        return np.frombuffer(gzip.decompress(path.read_bytes()), np.uint8, offset=offset)

    images = torch.from_numpy(read("images", 16).reshape(-1, 1, 28, 28).astype(np.float32)) / 255
    return images, torch.from_numpy(read("labels", 8).astype(np.int64))


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
    path.write_text(json.dumps(result, indent=2) + "\n")
