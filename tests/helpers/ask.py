"""A module with any forward()."""

from collections.abc import Callable
from typing import Any

from torch import nn


class Ask(nn.Module):
    """forward() by a function of the module and its input, which torch.fx traces; with some layers and parameters."""

    def __init__(self, fn: Callable[[Any, Any], Any], **parts: Any) -> None:
        super().__init__()
        self.fn = fn
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Any) -> Any:
        return self.fn(self, x)
