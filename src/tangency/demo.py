"""The main job on bundled data: a small CNN on digits, and why it says what it says."""

from torch import nn

from .datasets import digits
from .decisions import Decisions, explain
from .models import fit, initialized


def network() -> nn.Sequential:
    """A small CNN for 8 x 8 digits (38,282 parameters)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def demo(progress: bool = True) -> Decisions:
    """Train on 1,200 of scikit-learn's digits; trace the decisions on the other 597 to them."""
    train, test = digits()
    model = initialized(network, seed=0)
    fit(model, train.x, train.y, epochs=15, lr=3e-3, batch=50, optimizer="adam", progress=progress)
    return explain(model, train, test, name="A small CNN", progress=progress)
