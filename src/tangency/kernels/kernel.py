"""The contract of kernels: what each must bring, and what follows from that."""

from abc import ABC, abstractmethod
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .._base import tree
from .._base.types import Inputs, Spec
from ..errors import InputError, NonFiniteError

Prepared: TypeAlias = Any  # whatever a kernel's own `prepare` returns: only its own methods look inside
# Samples whose features are held at a time for a diagonal, which needs no more than one (heuristic).
DIAGONAL_BLOCK = 64


class Kernel(ABC):
    """k(x1, x2): a positive semidefinite function of two samples, computed batch by batch.

    A kernel has two halves: `prepare` does the work that depends on one batch, `pair` makes one tile of the Gram matrix
    from two prepared batches. Everything downstream (blocks, stores, solvers, surrogates) uses only these two.

    To bring your own, inherit and write three methods:

    - `prepare(x, memory)`: anything that `pair` needs of the batch x;
    - `pair(a, b, workspace)`: the tile [n, m] of two prepared batches, or [n, c, m, d] for a kernel between outputs;
    - `spec()`: everything that decides the numbers, as JSON values, under "kernel" its name. Stores refuse tiles of
      another spec.

    The same arguments must always give the same numbers, and a sample's numbers must not depend on the others of its
    batch. All else follows, and may be written anew where there is a better way: `ready` checks inputs and casts them,
    `footprint` says how much memory a sample takes (write it where a prepared batch is larger than its samples), `diag`
    and `prepared_diag` are the diagonal, `alike` refuses batches that do not go together, `diagnose` names a sample
    that is not finite, `outputs` and `parts` are for kernels of networks. Kernels are frozen and picklable, so that
    workers can have them. `tg.testing.check_kernel(kernel, x)` checks all of this.

    >>> import tangency as tg
    >>> class Quadratic(tg.Kernel):
    ...     def prepare(self, x, memory=None):
    ...         return x
    ...     def pair(self, a, b, workspace=None):
    ...         return (1 + a @ b.T) ** 2
    ...     def spec(self):
    ...         return {"kernel": "quadratic"}
    >>> x = torch.randn(6, 3)
    >>> tg.testing.check_kernel(Quadratic(), x)
    >>> tg.compute(tg.cosine(Quadratic()), x, progress=False).shape
    torch.Size([6, 6])
    """

    # What a kernel must bring.

    @abstractmethod
    def prepare(self, x: Inputs, memory: int | None = None) -> Prepared:
        """The work that depends on one batch only, x being ready.

        `memory` bounds the bytes that it may take besides its result.
        """

    @abstractmethod
    def pair(self, a: Prepared, b: Prepared, workspace: int | None = None) -> Tensor:
        """One tile. With `b is a` it is symmetric, and computed so; `workspace` bounds the bytes besides its result.

        It does not look at its entries, so a GPU need not be waited for; `finite` does.
        """

    @abstractmethod
    def spec(self) -> Spec:
        """Everything that decides the numbers, as JSON values; its name under "kernel"."""

    # What follows.

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """x checked and cast, before any expensive work; `name` is what errors call it. What is ready stays so."""
        tree.check(x, name)
        return x

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """Bytes per sample of x: (kept in a prepared batch, transient while preparing)."""
        return sum(v[0].numel() * v.element_size() for _, v in tree.leaves(x)), 0

    @property
    def device(self) -> torch.device | None:
        """Where inputs must lie; None if anywhere."""
        return None

    def alike(self, x1: Inputs, x2: Inputs) -> None:
        """Refuse two batches, ready both, that are not the same kind of thing."""
        tree.check_alike(x1, x2)

    def diag(self, x: Inputs) -> Tensor:
        """k(x_i, x_i): [n], or [n, c] for a kernel that is full over outputs."""
        parts = tree.split(self.ready(x), DIAGONAL_BLOCK)
        return torch.cat([self.prepared_diag(self.prepare(part)) for part in parts])

    def prepared_diag(self, a: Prepared) -> Tensor:
        """`diag` of a prepared batch."""
        k = self.pair(a, a)
        side = k.shape[: k.dim() // 2]
        return k.reshape(side.numel(), -1).diagonal().reshape(side)

    def diagnose(self, a: Prepared) -> None:
        """Raise NonFiniteError naming the first sample of a prepared batch that is not finite, if there is one."""
        return None

    def outputs(self, x: Inputs) -> Tensor | None:
        """What the networks in it say of x (ready), [n, …]; None where there are none."""
        return None

    def parts(self, x1: Inputs, x2: Inputs | None = None) -> dict[str, Tensor]:
        """The kernel split by parameter (or layer); the parts sum to the whole."""
        raise InputError(f"{type(self).__name__} does not split into a sum over parameters; ask the kernel inside it.")

    def __call__(self, x1: Inputs, x2: Inputs | None = None) -> Tensor:
        """The Gram matrix of x1 with x2 (with itself if x2 is left out), all at once; `tg.compute` goes by blocks."""
        a, b = self._prepared(x1, x2)
        return self.finite(self.pair(a, b), a, b)

    def finite(self, k: Tensor, a: Prepared, b: Prepared) -> Tensor:
        """The tile k of a and b, if all its entries are finite; else NonFiniteError, with the sample if it is known."""
        if not all_finite(k.detach()):
            # Only now, since it looks at all that was prepared. If that is finite, the products overflowed.
            self.diagnose(a)
            self.diagnose(b)
            raise NonFiniteError("the kernel overflowed although all gradients are finite; use a wider dtype.", 0, "")
        return k

    def _prepared(self, x1: Inputs, x2: Inputs | None) -> tuple[Prepared, Prepared]:
        """Both sides, checked before either is prepared; one and the same if x2 is left out."""
        # The very same object twice is how `pair` knows that a tile is symmetric.
        if x2 is None:
            a = self.prepare(self.ready(x1))
            return a, a
        x1, x2 = self.ready(x1, "x1"), self.ready(x2, "x2")
        self.alike(x1, x2)
        return self.prepare(x1), self.prepare(x2)

    def __sklearn_clone__(self) -> "Kernel":
        """Itself: scikit-learn would copy the model with every fold."""
        return self


def all_finite(k: Tensor, total: Tensor | None = None) -> bool:
    """Whether all entries are. Their sum first: it is finite if they are (or overflows, and the entries decide)."""
    total = k.sum() if total is None else total
    return bool(total.isfinite()) or bool(k.isfinite().all())
