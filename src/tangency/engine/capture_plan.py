"""What the probe finds out about a model on one kind of input, and capture goes by."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field, replace

import torch

from .blocks import GradientBlock, MixedBlock, OuterBlock
from .layout import Layout
from .recorder import Key


class Unfamiliar(Exception):  # a signal to features.py, never shown to users
    """The model called other functions than it did while it was probed."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls


@dataclass(frozen=True)
class Sizes:
    """Bytes per sample of one parameter's block: whatever the outputs, for each output, and for each once formed."""

    shared: int
    each: int
    formed: int | None  # None where gradients are not formed beforehand

    @staticmethod
    def of(block: GradientBlock) -> "Sizes":
        """Those of a block of some samples and outputs."""
        cells = block.n * block.c
        if not isinstance(block, OuterBlock):
            parts = [Sizes.of(b) for b in block.blocks] if isinstance(block, MixedBlock) else []
            each = sum(v.each for v in parts) if parts else block.nbytes // cells
            return Sizes(sum(v.shared for v in parts), each, None)
        # Blocks list activations and cotangents in turn.
        shared, each = (sum(v.numel() * v.element_size() for v in block.tensors()[k::2]) for k in (0, 1))
        _, g, i, o = block.sizes()
        formed = None if block.indexed or block.slot is not None else g * o * i * block.uses[0].d.element_size()
        return Sizes(shared // block.n, each // cells, formed)

    def kept(self, c: int) -> int:
        """Bytes of the factors for c outputs."""
        return self.shared + c * self.each

    def saved(self, c: int) -> int:
        """How much less the gradients of c outputs take than their factors; 0 or less where they do not."""
        return 0 if self.formed is None else self.kept(c) - c * self.formed


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
    sizes: dict[str, Sizes] = field(default_factory=dict)  # parameter → what its block takes
    passes: int = 1  # bytes that the forward pass of two samples keeps
    unruled: int = 0  # bytes of the gradient of one output with respect to all that is in the fallback
    half: bool = False  # factors are kept in 16 bits, half of what `sizes` says
    seed: float = 1.0  # factor on the cotangents of a float16 pass
    private: bool = False  # forward() writes to its inputs: it gets copies
    shield: bool = False  # forward() recomputes parts in the backward pass, which is prevented
    measured: set[int] = field(default_factory=set)  # other fingerprints, for which rows are traced to their samples

    def without(self, names: Iterable[str], why: str) -> "CapturePlan":
        """The plan with these parameters in the fallback."""
        return replace(self, fallback=self.fallback | dict.fromkeys(names, why))

    def for_outputs(self, c: int) -> "CapturePlan":
        """The plan for so many outputs, whatever their number was."""
        share = 2 if self.half else 1
        factors = sum(v.kept(c) for v in self.sizes.values())
        saved = {k: less // share for k, v in self.sizes.items() if (less := v.saved(c)) > 0}
        # Besides what is saved: the outputs of the layer at work, and one set of cotangents on its way (heuristic), of
        # two samples, both in 32 bits.
        transient = max(self.passes + 2 * factors // c, 1)
        kept = max((factors + c * self.unruled) // share, 1)
        return replace(self, c=c, kept=kept, transient=transient, saved=saved)

    def group(self, most: int, room: int) -> int:
        """Outputs to be captured at once: all, if a sample's blocks take no more than `most` bytes, else as many as
        fit into `room`. The sizes alone decide, so that every tile is added up alike."""

        def size(c: int) -> int:
            """Bytes of a sample's blocks, gradients formed where that takes less."""
            plan = self.for_outputs(c)
            return plan.kept - sum(plan.saved.values())

        if size(self.c) <= most:
            return self.c
        each = (size(self.c) - size(1)) / (self.c - 1) if self.c > 1 else 0
        fit = max(1, int((room - size(1)) / max(each, 1)) + 1) if each else 1
        return min(self.c, -(-self.c // -(-self.c // min(fit, self.c))))
