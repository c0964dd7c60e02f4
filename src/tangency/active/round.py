"""What is known when samples are to be chosen; each thing is made when a strategy first asks for it."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.types import Float, Inputs, Int, Memory, Numbers
from ..errors import InputError
from ..gram.compute import compute
from ..gram.gram import Gram
from ..kernels.kernel import Kernel
from ..kernels.ntk import conjugate_kernel, trace_ntk
from ..models import outputs as outputs_of
from .lookahead import LookAhead, look_ahead

OutputsAre = Literal["logits", "probabilities", "scores"]


@dataclass(frozen=True)
class Vectors:
    """Vectors by their products: `diagonal` [n] with themselves, `products(i)` [n] of the i-th with all."""

    diagonal: Float[Tensor, " n"]
    products: Callable[[int], Tensor]


@dataclass(eq=False)
class Round:
    """The samples x that are looked at: those with labels, then the candidates; a network, or a kernel, or both.

    `kernel`: a kernel, or the Gram of x. `given`: outputs of the network, if they are there already. `draw`: where a
    strategy takes its random numbers from.
    """

    x: Inputs
    labels: Int[Tensor, " m"]
    classes: int
    draw: torch.Generator
    model: nn.Module | None = None
    kernel: Kernel | Gram | None = None
    given: Numbers | None = None
    outputs_are: OutputsAre = "logits"
    reg: float | None = None
    memory: Memory = None
    progress: bool = False

    @property
    def device(self) -> torch.device:
        """Where the work is done: where the kernel is, else the network, else the samples."""
        places = [v.device for v in (self.kernel,) if v is not None]
        places += [p.device for p in self.model.parameters()][:1] if self.model is not None else []
        places += [leaf.device for _, leaf in tree.leaves(self.x)]
        return next((place for place in places if place is not None), torch.device("cpu"))

    @property
    def labelled(self) -> Int[Tensor, " m"]:
        """The samples with labels: the first ones."""
        return torch.arange(len(self.labels), device=self.device)

    @property
    def candidates(self) -> Int[Tensor, " u"]:
        """The samples that may be chosen: the others."""
        return torch.arange(len(self.labels), tree.size(self.x), device=self.device)

    @cached_property
    def outputs(self) -> Float[Tensor, "n c"] | None:
        """What the network says of all samples, as probabilities where it was trained on these; None without one."""
        if self.given is None and self.model is None:
            return None
        out = outputs_of(self.model, self.x) if self.given is None else tree.numbers(self.given, "outputs")  # type: ignore[arg-type]  # one of the two is there
        n, c = tree.size(self.x), self.classes
        single = c == 2 and out.shape in ((n,), (n, 1)) and self.outputs_are != "scores"
        if out.shape != (n, c) and not single:
            raise InputError(
                f"the outputs have shape {tuple(out.shape)}; needed: {(n, c)}, one for each of the {c} classes."
            )
        checks.finite(out, "outputs")
        out = out.to(self.device, torch.float64)
        if single:
            one = out.reshape(n)
            one = one.sigmoid() if self.outputs_are == "logits" else one
            out = torch.stack([1 - one, one], 1)
        elif self.outputs_are == "logits":
            out = out.softmax(1)
        if self.outputs_are == "probabilities" and (
            bool((out < 0).any()) or bool(((out.sum(1) - 1).abs() > 1e-3).any())
        ):
            raise InputError(
                "the outputs are no probabilities: some are below 0, or a row does not sum to 1. Say what they are: "
                "outputs_are='logits' or 'scores'."
            )
        return out

    @cached_property
    def probabilities(self) -> Float[Tensor, "n c"]:
        """Of the classes of each sample: the network's, else the machine's outputs brought to the nearest ones."""
        if self.outputs is not None and self.outputs_are != "scores":
            return self.outputs
        return nearest_probabilities(self.machine.outputs if self.outputs is None else self.outputs)

    @cached_property
    def gram(self) -> Gram:
        """Of all samples."""
        kernel = self.kernel
        if isinstance(kernel, Gram):
            return kernel
        if kernel is None:
            if self.model is None:
                raise InputError("nothing says what is known; needed: the network, ask(count, model), or kernel=.")
            kernel = trace_ntk(self.model) / self.classes  # the mean over the outputs
        return compute(kernel, self._beside(kernel.device), memory=self.memory, progress=self.progress)

    @cached_property
    def machine(self) -> LookAhead:
        """The kernel machine that looks ahead, from the network's outputs on."""
        return look_ahead(
            self.gram,
            self.labelled,
            self.labels,
            classes=self.classes,
            reg=self.reg,
            f0=self.outputs,
            memory=self.memory,
        )

    @cached_property
    def vectors(self) -> Vectors:
        """The samples as vectors, near to each other or far: the network's last hidden layer, else the kernel's own."""
        if self.model is not None:
            hidden = conjugate_kernel(self.model)
            features = hidden.features(self._beside(hidden.device)).to(self.device, torch.float64)
            checks.finite(features, "last hidden layer")
            return Vectors(features.square().sum(1), lambda i: features @ features[i])
        if len(self.gram.shape) == 4:
            raise InputError(
                "the kernel is full over outputs; needed for distances: one number for each pair of samples, as "
                "tg.trace_ntk has."
            )
        diagonal = self.gram.diag().to(self.device, torch.float64)
        return Vectors(diagonal, lambda i: self.gram.select(None, [i]).dense()[:, 0].to(diagonal))

    def _beside(self, device: torch.device | None) -> Inputs:
        """x where a kernel takes it."""
        return self.x if device is None else tree.to(self.x, device)


def nearest_probabilities(v: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    """The row of probabilities that is nearest to each row: its entries less one number, none below zero.

    Held, Wolfe & Crowder 1974.

    >>> nearest_probabilities(torch.tensor([[0.9, 0.3, -0.2]]))
    tensor([[0.8000, 0.2000, 0.0000]])
    """
    ordered = v.sort(1, descending=True).values
    count = torch.arange(1, v.shape[1] + 1, device=v.device)
    over = (ordered.cumsum(1) - 1) / count  # what is to be taken off, if the so many largest stay
    kept = (ordered > over).sum(1, keepdim=True)
    return (v - over.gather(1, kept - 1)).clamp_min(0)
