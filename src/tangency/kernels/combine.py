"""Kernels made of kernels: sums, multiples, cosines. (The first two are also `k1 + k2` and `2 * k`: `kernel.py`.)"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .._base.types import Inputs, Spec
from ..errors import InputError
from .costs import Costs
from .kernel import Combined, Kernel, Prepared, ScaleKernel, SumKernel, times


@dataclass(frozen=True, eq=False)
class CosineKernel(Combined):
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
        return self._by_norms(self.kernel.pair(a[0], b[0], workspace), a, b)

    def pairs(self, rows: Sequence[Prepared], b: Prepared, workspace: int | None = None) -> list[Tensor]:
        """Likewise, of the kernel's tiles."""
        tiles = self.kernel.pairs([a[0] for a in rows], b[0], workspace)
        return [self._by_norms(k, a, b) for k, a in zip(tiles, rows, strict=True)]

    def _by_norms(self, k: Tensor, a: Prepared, b: Prepared) -> Tensor:
        same = a is b
        left, right = a[1], b[1]
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

    def prepared_diag(self, a: Prepared) -> Tensor:
        """1 for every sample."""
        return torch.ones_like(a[1])

    def costs(self, x1: Inputs, x2: Inputs | None = None) -> Costs:
        """Those of the kernel itself: norms are next to nothing."""
        return self.kernel.costs(x1, x2)

    def spec(self) -> Spec:
        """As `Kernel.spec`: what it does, and the spec of what it is made of."""
        return {"kernel": "cosine", "of": self.kernel.spec()}


def sum(*kernels: Kernel | Sequence[Kernel]) -> SumKernel:
    """k₁ + k₂ + … of kernels on the same inputs; `k1 + k2` and Python's own sum([k1, k2]) are the same.

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
    """factor · k, factor ≥ 0; `factor * k` is the same.

    >>> import tangency as tg
    >>> k, x = tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(4, 3)
    >>> torch.allclose(tg.scale(k, 0.5)(x), k(x) / 2)
    True
    """
    _is_kernel(kernel, "tg.scale")
    return times(kernel, factor)


def cosine(kernel: Kernel) -> CosineKernel:
    """k(x1, x2) / √(k(x1, x1) k(x2, x2)): self-similarity exactly 1. Of `trace_ntk` it is the trNTK.

    Any kernel has one. That of a sum is no sum of cosines: in cosine(k1 + k2) the larger kernel counts for more, in
    cosine(k1) + cosine(k2) both count alike.

    >>> import tangency as tg
    >>> tg.cosine(tg.trace_ntk(torch.nn.Linear(3, 2)))(torch.randn(2, 3)).diagonal()
    tensor([1., 1.])
    """
    _is_kernel(kernel, "tg.cosine")
    return CosineKernel(kernel)


def _is_kernel(kernel: object, where: str) -> None:
    if not isinstance(kernel, Kernel):
        raise InputError(
            f"{where} takes a kernel; it was given a {type(kernel).__name__}. Make one: tg.trace_ntk(model)."
        )
