"""The contract of kernels: what each must bring, and what follows from that, sums and multiples of kernels too."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from .._base import tree
from .._base.types import FeatureBatch, Inputs, Spec
from ..errors import InputError, NonFiniteError
from .costs import Costs, side_by_side

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
      another spec; what stands under "says" is words for people, which they do not compare.

    The same arguments must always give the same numbers, and a sample's numbers must not depend on the others of its
    batch. All else follows, and may be written anew where there is a better way: `ready` checks inputs and casts them,
    `footprint` says how much memory a sample takes (write it where a prepared batch is larger than its samples), `diag`
    and `prepared_diag` are the diagonal, `alike` refuses batches that do not go together, `diagnose` names a sample
    that is not finite, `outputs` and `parts` are for kernels of networks. Kernels are frozen and picklable, so that
    workers can have them. `tg.testing.check_kernel(kernel, x)` checks all of this.

    Kernels on the same inputs can be added (`k1 + k2`, sum([k1, k2, k3])), multiplied by a number ≥ 0 (`2 * k`) and
    divided by one (`k / 2`): these are `tg.sum` and `tg.scale`.

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

    def pairs(self, rows: Sequence[Prepared], b: Prepared, workspace: int | None = None) -> list[Tensor]:
        """The tiles of several batches with b, the same as by `pair`; for where work on b can serve them all."""
        return [self.pair(a, b, workspace) for a in rows]

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """x checked and cast, before any expensive work; `name` is what errors call it. What is ready stays so."""
        return tree.given(x, name)

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """Bytes per sample of x: (kept in a prepared batch, transient while preparing)."""
        return sum(v[0].numel() * v.element_size() for _, v in tree.leaves(x)), 0

    def entry(self, x: Inputs) -> Tensor:
        """A tile [1, 1], or [1, c, 1, c], of one sample, for its shape and type: what stands in it does not matter."""
        prepared = self.prepare(x)
        return self.pair(prepared, prepared)

    def check_room(self, x1: Inputs, x2: Inputs) -> None:
        """Refuse a tile, all at once, of two batches that are ready, for which no memory has room."""
        return None

    def brief(self, x: Inputs) -> "Kernel":
        """A kernel on the same inputs that changes when this one does, and costs a few passes: stores look at it to see
        whether they are still of the same model. Itself, unless it costs many."""
        return self

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

    def features(self, x: Inputs) -> Tensor:
        """Φ with Φ Φᵀ = k(x), where the kernel has such features at hand."""
        raise InputError(
            f"{type(self).__name__} has no explicit features. Take those of the kernel that it was made of, or project "
            "one of a network: tg.projected(tg.trace_ntk(model)).features(x)."
        )

    def costs(self, x1: Inputs, x2: Inputs | None = None) -> Costs:
        """What a tile of x1 with x2 takes, by parameter, for kernels of finite networks and what is made of them."""
        raise InputError(
            f"what {_short(self)} costs is not known by parameter. Ask a kernel of a finite network, or sums, "
            "multiples and cosines of such: tg.trace_ntk(model).costs(x)."
        )

    def __add__(self, other: object) -> "SumKernel":
        """k₁ + k₂, the kernel that `tg.sum` makes; sums of sums are one sum.

        >>> import tangency as tg
        >>> k, x = tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(4, 3)
        >>> torch.equal((k + k)(x), tg.sum(k, k)(x))
        True
        """
        return SumKernel(_summands(self) + _summands(other))

    def __radd__(self, other: object) -> "SumKernel":
        """As `k₁ + k₂`. Python's own sum([k₁, k₂]) begins with 0."""
        return SumKernel(_summands(other) + _summands(self))

    def __mul__(self, factor: object) -> "ScaleKernel":
        """factor · k for a number ≥ 0, the kernel that `tg.scale` makes.

        >>> import tangency as tg
        >>> k, x = tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(4, 3)
        >>> torch.equal((2 * k)(x), 2 * k(x)), torch.equal((k / 2)(x), k(x) / 2)
        (True, True)
        """
        return times(self, factor)

    __rmul__ = __mul__

    def __truediv__(self, divisor: object) -> "ScaleKernel":
        """(1 / divisor) · k for a number above 0."""
        number = _number(divisor)
        if number is None or not 0 < number < float("inf"):
            raise InputError(f"a kernel cannot be divided by {_short(divisor)}; needed: a finite number above 0.")
        return times(self, 1 / number)

    # NumPy would make an array of the kernel before it multiplies: np.float32(2) * k is ours to answer.
    __array_ufunc__ = None

    def __call__(self, x1: Inputs, x2: Inputs | None = None) -> Tensor:
        """The Gram matrix of x1 with x2 (with itself if x2 is left out), all at once; `tg.compute` goes by blocks."""
        a, b = self._prepared(x1, x2)
        return self.finite(self.pair(a, b), a, b)

    def finite(self, k: Tensor, a: Prepared, b: Prepared) -> Tensor:
        """The tile k of a and b, if all its entries are finite; else NonFiniteError, with the sample if it is known."""
        if not isinstance(k, Tensor):  # what a user's own pair() may give
            check_tile(k, 0, 0)
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
            x1 = self.ready(x1)
            self.check_room(x1, x1)
            a = self.prepare(x1)
            return a, a
        x1, x2 = self.ready(x1, "x1"), self.ready(x2, "x2")
        self.alike(x1, x2)
        self.check_room(x1, x2)
        return self.prepare(x1), self.prepare(x2)

    def __sklearn_clone__(self) -> "Kernel":
        """Itself: scikit-learn would copy the model with every fold."""
        return self


def check_tile(k: object, n: int, m: int) -> None:
    """Refuse what a user's own pair() returns for n and m samples and is no tile: torch would broadcast it."""
    if isinstance(k, Tensor) and k.dim() in (2, 4) and (k.shape[0], k.shape[k.dim() // 2]) == (n, m):
        return
    given = f"{tuple(k.shape)} for {n} and {m} samples" if isinstance(k, Tensor) else f"a {type(k).__name__}"
    raise InputError(
        f"the kernel's pair() returned {given}; needed: a tensor [n, m], or [n, c, m, d] for a kernel between outputs."
    )


def all_finite(k: Tensor, total: Tensor | None = None) -> bool:
    """Whether all entries are. Their sum first: it is finite if they are (or overflows, and the entries decide)."""
    total = k.sum() if total is None else total
    return bool(total.isfinite()) or bool(k.isfinite().all())


@dataclass(frozen=True, eq=False)
class Combined(Kernel):
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
        outputs = [out.flatten(1) for k in self.inner if (out := k.outputs(self._own(k, x))) is not None]
        return torch.cat(outputs, 1) if outputs else None

    def entry(self, x: Inputs) -> Tensor:
        """As `Kernel.entry`: like that of its first kernel."""
        return self.inner[0].entry(self._own(self.inner[0], x))

    def check_room(self, x1: Inputs, x2: Inputs) -> None:
        """As the kernels inside have it."""
        for kernel in self.inner:
            kernel.check_room(self._own(kernel, x1), self._own(kernel, x2))

    def brief(self, x: Inputs) -> Kernel:
        """The same of what its kernels have for that."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        made: dict[str, Any] = {k: v.brief(self._own(v, x)) for k, v in values.items() if isinstance(v, Kernel)}
        several = {k: v for k, v in values.items() if isinstance(v, tuple) and v == self.inner}
        made |= {k: tuple(one.brief(self._own(one, x)) for one in v) for k, v in several.items()}
        return replace(self, **made)

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """What all kernels keep, and what the one at work needs besides."""
        # 8 bytes for what a combination keeps itself: a norm.
        kept, transient = 8, 0
        for kernel in self.inner:
            own_kept, own_transient = kernel.footprint(self._own(kernel, x))
            kept, transient = kept + own_kept, max(transient, own_transient)
        return kept, transient

    def _own(self, kernel: Kernel, x: Inputs) -> Inputs:
        """What is ready for the whole, ready for one of the kernels."""
        return x


@dataclass(frozen=True, eq=False)
class SumKernel(Combined):
    """k₁ + k₂ + …"""

    kernels: tuple[Kernel, ...]

    @property
    def inner(self) -> tuple[Kernel, ...]:
        """The summands."""
        return self.kernels

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """As the summands have it; where these compute in different types, as given: each then casts for itself."""
        given = tree.tensors(x, name)
        made = [k.ready(given, name) for k in self.kernels]
        kinds = {tuple(v.dtype for _, v in tree.leaves(own)) for own in made}
        return made[0] if len(kinds) == 1 else given

    def entry(self, x: Inputs) -> Tensor:
        """As `Kernel.entry`: in the widest type of the summands; those of different shapes are refused."""
        return _summed([k.entry(self._own(k, x)) for k in self.kernels])

    def _own(self, kernel: Kernel, x: Inputs) -> Inputs:
        # Features are nobody's to cast, and to ask where they come from again would hash the weights again.
        return x if isinstance(x, FeatureBatch) else kernel.ready(x)

    def prepare(self, x: Inputs, memory: int | None = None) -> Prepared:
        """As `Kernel.prepare`: each summand's, one after the other."""
        return tuple(k.prepare(self._own(k, x), memory) for k in self.kernels)

    def pair(self, a: Prepared, b: Prepared, workspace: int | None = None) -> Tensor:
        """As `Kernel.pair`: the sum of the summands' tiles."""
        return _summed(
            [
                k.pair(left, left if a is b else right, workspace)
                for k, left, right in zip(self.kernels, a, b, strict=True)
            ]
        )

    def diagnose(self, a: Prepared) -> None:
        """As `Kernel.diagnose`, summand by summand."""
        for kernel, prepared in zip(self.kernels, a, strict=True):
            kernel.diagnose(prepared)

    def diag(self, x: Inputs) -> Tensor:
        """The sum of the summands' diagonals."""
        return torch.stack([k.diag(x) for k in self.kernels]).sum(0)

    def prepared_diag(self, a: Prepared) -> Tensor:
        """The sum of the summands' diagonals."""
        return torch.stack([k.prepared_diag(own) for k, own in zip(self.kernels, a, strict=True)]).sum(0)

    def parts(self, x1: Inputs, x2: Inputs | None = None) -> dict[str, Tensor]:
        """The parts of all summands, under their number."""
        return {f"{j}.{name}": p for j, k in enumerate(self.kernels) for name, p in k.parts(x1, x2).items()}

    def costs(self, x1: Inputs, x2: Inputs | None = None) -> Costs:
        """Those of all summands, under their number."""
        return side_by_side("sum", [k.costs(x1, x2) for k in self.kernels])

    def spec(self) -> Spec:
        """As `Kernel.spec`: what it does, and the spec of what it is made of."""
        return {"kernel": "sum", "of": [k.spec() for k in self.kernels]}


@dataclass(frozen=True, eq=False)
class ScaleKernel(Combined):
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

    def pairs(self, rows: Sequence[Prepared], b: Prepared, workspace: int | None = None) -> list[Tensor]:
        """`factor` times the kernel's tiles."""
        return [tile * self.factor for tile in self.kernel.pairs(rows, b, workspace)]

    def diagnose(self, a: Prepared) -> None:
        """As the kernel itself."""
        self.kernel.diagnose(a)

    def diag(self, x: Inputs) -> Tensor:
        """`factor` times the kernel's diagonal."""
        return self.kernel.diag(x) * self.factor

    def prepared_diag(self, a: Prepared) -> Tensor:
        """`factor` times the kernel's diagonal."""
        return self.kernel.prepared_diag(a) * self.factor

    def parts(self, x1: Inputs, x2: Inputs | None = None) -> dict[str, Tensor]:
        """`factor` times the kernel's parts."""
        return {name: p * self.factor for name, p in self.kernel.parts(x1, x2).items()}

    def costs(self, x1: Inputs, x2: Inputs | None = None) -> Costs:
        """Those of the kernel itself."""
        return self.kernel.costs(x1, x2)

    def spec(self) -> Spec:
        """As `Kernel.spec`: what it does, and the spec of what it is made of."""
        return {"kernel": "scale", "factor": self.factor, "of": self.kernel.spec()}


def _summed(parts: Sequence[Tensor]) -> Tensor:
    """The sum of the summands' tiles."""
    # Else torch would say no more than that it cannot stack them.
    if len({p.shape for p in parts}) > 1:
        raise InputError(
            f"kernels of different shapes cannot be added: {[tuple(p.shape) for p in parts]}. Add traces to traces."
        )
    return torch.stack(list(parts)).sum(0)


def times(kernel: Kernel, factor: object) -> ScaleKernel:
    """factor · kernel, for a finite number ≥ 0."""
    if isinstance(factor, Kernel):
        raise InputError(
            "two kernels cannot be multiplied; needed: a number ≥ 0 (k1 + k2 adds kernels). For the product of their "
            "entries write a kernel of your own: inherit tg.Kernel, and multiply both tiles in pair()."
        )
    number = _number(factor)
    if number is None or not 0 <= number < float("inf"):
        raise InputError(f"factor={_short(factor)}; a kernel can be scaled by a finite number ≥ 0 only.")
    return ScaleKernel(kernel, number)


def _number(value: object) -> float | None:
    """A number as Python's, also if it is NumPy's or a tensor of no dimension; None for anything else."""
    if isinstance(value, (np.generic, np.ndarray, Tensor)) and value.ndim == 0:
        value = value.item()
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # a whole number beyond every float
        return float("inf")


def _short(value: object) -> str:
    """A number as it is, anything else by its type: a tensor or a model may be long."""
    if isinstance(value, int) and value.bit_length() > 64:
        return "a whole number of more than 64 bits"
    if isinstance(value, (int, float, str, type(None))):
        return repr(value)
    name = type(value).__name__
    return f"an {name}" if name[0] in "AEIOU" else f"a {name}"


def _summands(k: object) -> tuple[Kernel, ...]:
    """What k adds to a sum; the 0 that Python's own sum() begins with adds nothing."""
    if isinstance(k, SumKernel):
        return k.kernels
    if isinstance(k, Kernel):
        return (k,)
    if type(k) is int and k == 0:
        return ()
    raise InputError(
        f"a kernel and {_short(k)} cannot be added; needed: two kernels on the same inputs. For k(x, y) + c write a "
        "kernel of your own: inherit tg.Kernel, and add c in pair()."
    )
