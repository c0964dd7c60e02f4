"""Kernels made of kernels: sums, multiples, cosines."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.types import Inputs, Spec
from ..errors import InputError
from .kernel import Kernel, Prepared


@dataclass(frozen=True, eq=False)
class _Combined(Kernel):
    """What all combinators share: they ask their first kernel about inputs."""

    @property
    @abstractmethod
    def inner(self) -> tuple[Kernel, ...]:
        """The kernels that it is made of."""

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """As the first kernel has it."""
        return self.inner[0].ready(x, name)

    def alike(self, x1: Inputs, x2: Inputs) -> None:
        """As the first kernel has it."""
        self.inner[0].alike(x1, x2)

    @property
    def device(self) -> torch.device | None:
        """That of the first kernel."""
        return self.inner[0].device

    def outputs(self, x: Inputs) -> Tensor | None:
        """Those of all networks in it, side by side."""
        outputs = [out.flatten(1) for kernel in self.inner if (out := kernel.outputs(x)) is not None]
        return torch.cat(outputs, 1) if outputs else None

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """What all kernels keep, and what the one at work needs besides."""
        # 8 bytes for what a combination keeps itself: a norm.
        kept, transient = 8, 0
        for kernel in self.inner:
            own_kept, own_transient = kernel.footprint(x)
            kept, transient = kept + own_kept, max(transient, own_transient)
        return kept, transient


@dataclass(frozen=True, eq=False)
class SumKernel(_Combined):
    """k₁ + k₂ + …"""

    kernels: tuple[Kernel, ...]

    @property
    def inner(self) -> tuple[Kernel, ...]:
        """The summands."""
        return self.kernels

    def prepare(self, x: Inputs, memory: int | None = None) -> Prepared:
        """As `Kernel.prepare`: each summand's, one after the other."""
        return tuple(k.prepare(x, memory) for k in self.kernels)

    def pair(self, a: Prepared, b: Prepared, workspace: int | None = None) -> Tensor:
        """As `Kernel.pair`: the sum of the summands' tiles."""
        parts = [
            k.pair(left, left if a is b else right, workspace)
            for k, left, right in zip(self.kernels, a, b, strict=True)
        ]
        # Else torch would say no more than that it cannot stack them.
        if len({p.shape for p in parts}) > 1:
            raise InputError(
                f"kernels of different shapes cannot be added: {[tuple(p.shape) for p in parts]}. Add traces to traces."
            )
        return torch.stack(parts).sum(0)

    def diagnose(self, a: Prepared) -> None:
        """As `Kernel.diagnose`, summand by summand."""
        for kernel, prepared in zip(self.kernels, a, strict=True):
            kernel.diagnose(prepared)

    def diag(self, x: Inputs) -> Tensor:
        """The sum of the summands' diagonals."""
        return torch.stack([k.diag(x) for k in self.kernels]).sum(0)

    def parts(self, x1: Inputs, x2: Inputs | None = None) -> dict[str, Tensor]:
        """The parts of all summands, under their number."""
        return {f"{j}.{name}": p for j, k in enumerate(self.kernels) for name, p in k.parts(x1, x2).items()}

    def spec(self) -> Spec:
        """As `Kernel.spec`: what it does, and the spec of what it is made of."""
        return {"kernel": "sum", "of": [k.spec() for k in self.kernels]}


@dataclass(frozen=True, eq=False)
class ScaleKernel(_Combined):
    """factor · k"""

    kernel: Kernel
    factor: float

    @property
    def inner(self) -> tuple[Kernel, ...]:
        """The one kernel."""
        return (self.kernel,)

    def prepare(self, x: Inputs, memory: int | None = None) -> Prepared:
        """As the kernel itself."""
        return self.kernel.prepare(x, memory)

    def pair(self, a: Prepared, b: Prepared, workspace: int | None = None) -> Tensor:
        """`factor` times the kernel's tile."""
        return self.kernel.pair(a, b, workspace) * self.factor

    def diagnose(self, a: Prepared) -> None:
        """As the kernel itself."""
        self.kernel.diagnose(a)

    def diag(self, x: Inputs) -> Tensor:
        """`factor` times the kernel's diagonal."""
        return self.kernel.diag(x) * self.factor

    def parts(self, x1: Inputs, x2: Inputs | None = None) -> dict[str, Tensor]:
        """`factor` times the kernel's parts."""
        return {name: p * self.factor for name, p in self.kernel.parts(x1, x2).items()}

    def spec(self) -> Spec:
        """As `Kernel.spec`: what it does, and the spec of what it is made of."""
        return {"kernel": "scale", "factor": self.factor, "of": self.kernel.spec()}


@dataclass(frozen=True, eq=False)
class CosineKernel(_Combined):
    """k(x1, x2) / √(k(x1, x1) k(x2, x2)); the diagonal of a batch with itself is exactly 1."""

    kernel: Kernel

    @property
    def inner(self) -> tuple[Kernel, ...]:
        """The one kernel."""
        return (self.kernel,)

    def prepare(self, x: Inputs, memory: int | None = None) -> Prepared:
        """As the kernel itself, with the norms √k(x, x); refused where one is 0."""
        inner = self.kernel.prepare(x, memory)
        norms = self.kernel.prepared_diag(inner).sqrt()
        if bool((norms.detach() == 0).any()):
            sample = int((norms.detach() == 0).nonzero()[0, 0])
            raise InputError(
                f"k(x, x) = 0 for sample {sample} of this batch, so its cosine is undefined. Leave it out, or use the "
                "kernel without cosine."
            )
        return inner, norms

    def pair(self, a: Prepared, b: Prepared, workspace: int | None = None) -> Tensor:
        """The kernel's tile by the norms, exactly 1 where a sample meets itself."""
        same = a is b
        left, right = a[1], b[1]
        k = self.kernel.pair(a[0], a[0] if same else b[0], workspace)
        # By the product of the norms, not one after the other: symmetric to the last bit.
        k = k / (left.view(*left.shape, *[1] * right.dim()) * right)
        if same:
            # k(x, x) from a product and from a sum of squares differ by rounding, which must not show here.
            size = left.numel()
            eye = torch.eye(size, dtype=torch.bool, device=k.device).view(k.shape)
            k = torch.where(eye, torch.ones_like(k), k)
        return k

    def diagnose(self, a: Prepared) -> None:
        """As the kernel itself."""
        self.kernel.diagnose(a[0])

    def diag(self, x: Inputs) -> Tensor:
        """1 for every sample."""
        return torch.ones_like(self.kernel.diag(x))

    def spec(self) -> Spec:
        """As `Kernel.spec`: what it does, and the spec of what it is made of."""
        return {"kernel": "cosine", "of": self.kernel.spec()}


def sum(*kernels: Kernel | Sequence[Kernel]) -> SumKernel:
    """k₁ + k₂ + … of kernels on the same inputs.

    >>> import tangency as tg
    >>> k, x = tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(4, 3)
    >>> torch.allclose(tg.sum(k, k)(x), 2 * k(x))
    True
    """
    given: list[object] = []
    for k in kernels:
        given.extend(k if isinstance(k, (list, tuple)) else [k])
    summands = tuple(k for k in given if isinstance(k, Kernel))
    if not given or len(summands) < len(given):
        raise InputError(f"tg.sum takes one or more kernels; it was given {[type(k).__name__ for k in given]}.")
    return SumKernel(summands)


def scale(kernel: Kernel, factor: float) -> ScaleKernel:
    """factor · k, factor ≥ 0.

    >>> import tangency as tg
    >>> k, x = tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(4, 3)
    >>> torch.allclose(tg.scale(k, 0.5)(x), k(x) / 2)
    True
    """
    _is_kernel(kernel, "tg.scale")
    if not (isinstance(factor, (int, float)) and 0 <= factor < float("inf")):
        raise InputError(f"factor={factor!r}; a kernel can be scaled by a finite number ≥ 0 only.")
    return ScaleKernel(kernel, float(factor))


def cosine(kernel: Kernel) -> CosineKernel:
    """k(x1, x2) / √(k(x1, x1) k(x2, x2)): self-similarity exactly 1. Of `trace_ntk` it is the trNTK.

    >>> import tangency as tg
    >>> tg.cosine(tg.trace_ntk(torch.nn.Linear(3, 2)))(torch.randn(2, 3)).diagonal()
    tensor([1., 1.])
    """
    _is_kernel(kernel, "tg.cosine")
    # The cosine of a sum is no sum of cosines, and which of them is meant is for the user to say.
    if isinstance(kernel, _Combined):
        raise InputError(
            f"tg.cosine takes an empirical or infinite kernel; it was given a {type(kernel).__name__}. Take the cosine "
            "first."
        )
    return CosineKernel(kernel)


def _is_kernel(kernel: object, where: str) -> None:
    if not isinstance(kernel, Kernel):
        raise InputError(
            f"{where} takes a kernel; it was given a {type(kernel).__name__}. Make one: tg.trace_ntk(model)."
        )
