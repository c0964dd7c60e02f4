"""What the probe finds out about a model on one kind of input, and capture goes by."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

import torch

from .layout import Layout
from .recorder import Key


class Unfamiliar(Exception):  # a signal to features.py, never shown to users
    """The model called other functions than it did while it was probed."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls


@dataclass(frozen=True)
class CapturePlan:
    """Where the samples lie, which rule covers which parameter, and what a sample takes."""

    layouts: dict[Key, Layout]
    copies: dict[Hashable, Layout]  # weights that hold a copy for every sample
    fallback: dict[str, str]  # parameter → why no rule covers it
    rules: dict[str, str]  # parameter → the rule that covers it
    c: int
    calls: int  # a fingerprint of the model's calls
    narrowest: torch.dtype  # the fewest bits that the model computes in
    looped: frozenset[str] = frozenset()  # of the fallback, what torch.func gets wrong: plain autograd, by samples
    company: bool = False  # one sample needs another one beside it there: autograd itself is wrong for it alone
    kept: int = 1  # bytes per sample that the blocks take
    transient: int = 1  # bytes per sample that a forward and a backward pass take besides
    saved: dict[str, int] = field(default_factory=dict)  # parameter → bytes per sample less if its gradients are formed
    seed: float = 1.0  # factor on the cotangents of a float16 pass
    private: bool = False  # forward() writes to its inputs: it gets copies
    shield: bool = False  # forward() recomputes parts in the backward pass, which is prevented
    measured: set[int] = field(default_factory=set)  # other fingerprints, for which rows are traced to their samples

    def without(self, names: Iterable[str], why: str) -> "CapturePlan":
        """The plan with these parameters in the fallback."""
        return replace(self, fallback=self.fallback | dict.fromkeys(names, why))
