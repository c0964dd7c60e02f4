"""Shapes in annotations are checked at run time under pytest; one thread, since two workers share two cores."""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings
from jaxtyping import install_import_hook

sys.path.insert(0, str(Path(__file__).parent))
with install_import_hook("tangency", "beartype.beartype"):
    import tangency as tg  # noqa: F401

torch.set_num_threads(1)
settings.register_profile("tangency", deadline=None, max_examples=30, derandomize=True)
settings.load_profile("tangency")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
