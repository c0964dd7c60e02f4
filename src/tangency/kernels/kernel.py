"""Kernels: inner products of per-sample features, and what can be made of them.

A kernel has two halves: `prepare` does the work that depends on one batch, `pair` makes one tile of the Gram matrix
from two prepared batches. Everything downstream uses only these two.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.types import Inputs
from ..engine.blocks import Block, Dense, Outer
from ..engine.contraction import Sum, diagonal
from ..engine.cost import Cost, Method, choose, forced
from ..engine.features import Features, Jacobian
from ..errors import InputError, NonFiniteError
from .choices import Explanation, Row

Prepared = Any
# Samples whose features are held at a time for a diagonal, which needs no more than one (heuristic).
BLOCK = 64


class Kernel(ABC):
    """k(x, y). Frozen and picklable; `spec()` says everything that decides its numbers."""

    # Where a tile is made of its rows alone, how many are made together: blocks are multiples of it, and one is held.
    by_rows: ClassVar[int] = 0

    @abstractmethod
    def prepare(self, x: Inputs, memory: int | None = None) -> Prepared:
        """The work that depends on one batch only. `memory` bounds the bytes that it may take besides its result."""

    @abstractmethod
    def pair(self, a: Prepared, b: Prepared, workspace: int | None = None) -> Tensor:
        """One tile. With `b is a` it is symmetric, and computed so.

        It does not look at its entries, so a GPU need not be waited for; `finite` does.
        """

    @abstractmethod
    def diag(self, x: Inputs) -> Tensor:
        """k(x_i, x_i): [n], or [n, c] for a kernel that is full over outputs."""

    @abstractmethod
    def spec(self) -> dict[str, Any]:
        """Everything that decides the numbers, as JSON values."""

    @abstractmethod
    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """x checked and cast, before any expensive work."""

    @abstractmethod
    def footprint(self, x: Inputs) -> tuple[int, int]:
        """Bytes per sample of x: (kept in a prepared batch, transient while preparing)."""

    @property
    def device(self) -> torch.device | None:
        """Where inputs must lie; None if anywhere."""
        return None

    def alike(self, x: Inputs, y: Inputs) -> None:
        """Refuse two batches, ready both, that are not the same kind of thing."""
        checks.same_form(x, y)

    def diagnose(self, a: Prepared) -> None:
        """Raise NonFiniteError naming the first sample of a prepared batch that is not finite, if there is one."""
        return None

    def outputs(self, x: Inputs) -> Tensor | None:
        """What the networks in it say of x (ready), [n, …]; None where there are none."""
        return None

    def prepared_diag(self, a: Prepared) -> Tensor:
        """`diag` of a prepared batch."""
        raise InputError(f"{type(self).__name__} gives no diagonal of a prepared batch, so it has no cosine.")

    def __call__(self, x: Inputs, y: Inputs | None = None) -> Tensor:
        """The Gram matrix of x with y (with itself if y is left out), all at once; `tg.compute` goes by blocks."""
        a, b = self._prepared(x, y)
        return self.finite(self.pair(a, b), a, b)

    def finite(self, k: Tensor, a: Prepared, b: Prepared) -> Tensor:
        """The tile k of a and b, if all its entries are finite."""
        if not all_finite(k.detach()):
            self.diagnose(a)
            self.diagnose(b)
            raise NonFiniteError("the kernel overflowed although all gradients are finite; use a wider dtype.", 0, "")
        return k

    def _prepared(self, x: Inputs, y: Inputs | None) -> tuple[Prepared, Prepared]:
        """Both sides, checked before either is prepared; one and the same if y is left out."""
        x = self.ready(x)
        if y is None:
            a = self.prepare(x)
            return a, a
        y = self.ready(y, "y")
        self.alike(x, y)
        return self.prepare(x), self.prepare(y)

    def __sklearn_clone__(self) -> "Kernel":
        """Itself: scikit-learn would copy the model with every fold."""
        return self

    def parts(self, x: Inputs, y: Inputs | None = None) -> dict[str, Tensor]:
        """The kernel split by parameter (or layer); the parts sum to the whole."""
        raise InputError(f"{type(self).__name__} does not split into a sum over parameters; ask the kernel inside it.")


def all_finite(k: Tensor, total: Tensor | None = None) -> bool:
    """Whether all entries are. Their sum first: it is finite if they are (or overflows, and the entries decide)."""
    total = k.sum() if total is None else total
    return bool(total.isfinite()) or bool(k.isfinite().all())


@dataclass(frozen=True, eq=False)
class Empirical(Kernel):
    """Σ over parameters of ⟨φ(x), φ(y)⟩: traced over outputs [n, m], or full [n, c, m, d]."""

    name: str
    features: Features
    trace: bool
    method: Method = None

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        return self.features.network.ready(x, name)

    def footprint(self, x: Inputs) -> tuple[int, int]:
        return self.features.footprint(x, self._form)

    @property
    def device(self) -> torch.device:
        return next(self.features.network.model.parameters()).device

    def prepare(self, x: Inputs, memory: int | None = None) -> dict[str, Block]:
        return self.features(x, memory, self._form)

    def outputs(self, x: Inputs) -> Tensor:
        network = self.features.network
        with network.modes():
            return network(network.state(), x)

    def _form(self, name: str) -> bool:
        return forced(self.method, name) != "in place"

    def diagnose(self, a: dict[str, Block]) -> None:
        bad: list[tuple[int, str]] = []
        for name, block in a.items():
            for t in block.tensors():
                good = t.flatten(1).isfinite().all(1) if t.is_floating_point() else None
                if good is not None and not bool(good.all()):
                    bad.append((int((~good).nonzero()[0]), name))
        if bad:
            sample = min(s for s, _ in bad)
            name = next(n for s, n in bad if s == sample)
            raise NonFiniteError(
                f"the gradient for sample {sample} is not finite at parameter {name}. Check that input, or use a wider "
                "dtype.",
                sample,
                name,
            )

    def pair(self, a: dict[str, Block], b: dict[str, Block], workspace: int | None = None) -> Tensor:
        first, second = next(iter(a.values())), next(iter(b.values()))
        differentiable = torch.is_grad_enabled() and any(
            t.requires_grad for p in (a, b) for block in p.values() for t in block.tensors()
        )
        total = Sum(
            first, first if a is b else second, trace=self.trace, differentiable=differentiable, workspace=workspace
        )
        with self.features.network.modes(), torch.set_grad_enabled(differentiable):
            done: set[str] = set()
            for name in a:
                if name in b and name not in done:
                    done |= total.add(a[name], b[name], forced(self.method, name), a.keys() & b.keys())
            return total.result()

    def parts(self, x: Inputs, y: Inputs | None = None) -> dict[str, Tensor]:
        a, b = self._prepared(x, y)
        names = self.features.network.train if isinstance(self.features, Jacobian) else tuple(a)
        zero = None
        found = {}
        for name in names:
            if name in a and name in b:
                left = {name: a[name]}
                right = left if a is b else {name: b[name]}
                found[name] = self.finite(self.pair(left, right), left, right)
                zero = torch.zeros_like(found[name])
        assert zero is not None
        return {name: found.get(name, zero) for name in names}

    def diag(self, x: Inputs) -> Tensor:
        parts = tree.split(self.ready(x), BLOCK)
        return torch.cat([self.prepared_diag(self.prepare(part)) for part in parts])

    def prepared_diag(self, a: dict[str, Block]) -> Tensor:
        with self.features.network.modes():
            total = torch.stack([diagonal(block) for block in a.values()]).sum(0)
        return total.sum(1) if self.trace else total

    def matrix(self, x: Inputs) -> Tensor:
        """Φ with Φ Φᵀ = k(x, x): [n, p] (traced: outputs side by side), or [n, c, p] if full. Takes n·c·p numbers."""
        g = torch.cat([block.expand() for block in self.prepare(self.ready(x)).values()], 2)
        return g.flatten(1) if self.trace else g

    def explain(self, x: Inputs, y: Inputs | None = None) -> Explanation:
        """Per parameter: rule, method, cost. Prints as a table. Cost: prepares the batches, contracts nothing."""
        a, b = self._prepared(x, y)
        plan = self.features.plan(self.ready(x)) if isinstance(self.features, Jacobian) else None
        rows: list[Row] = []
        along: set[str | None] = set()  # biases that come with their weight's products
        for name in self.features.network.train if plan else a:
            if name not in a:
                rows.append(Row(name, "unused", "", (), None))
                continue
            rule = "activation" if plan is None else "torch.func" if name in plan.fallback else plan.rules[name]
            if name in along:
                rows.append(Row(name, rule, "with its weight", (), None))
                continue
            block = a[name]
            cost: Cost = choose(block, b[name], self.trace, forced(self.method, name))
            if isinstance(block, Dense) and plan is not None and name in plan.saved:
                cost = replace(cost, method="formed")
            sizes = block.sizes() if isinstance(block, Outer) else ()
            if isinstance(block, Outer) and block.scale is None and cost.method != "expand":
                along.add(block.bias)
            rows.append(Row(name, rule, cost.method, sizes, cost))
        return Explanation(self.name, next(iter(a.values())).n, next(iter(b.values())).n, tuple(rows))

    def spec(self) -> dict[str, Any]:
        network = self.features.network
        layers = getattr(self.features, "layers", None)
        state, own = network.state(), dict(network.model.named_parameters())
        return {
            "kernel": self.name,
            "trace": self.trace,
            "model": architecture(network.model),
            "parameters": list(network.train),
            "weights": digest({k: v for k, v in state.items() if k in own}),
            "buffers": digest({k: v for k, v in state.items() if k not in own}),
            "outputs": describe(network.outputs),
            "head": describe(network.head),
            "dtype": network.precision or str(next(network.model.parameters()).dtype).removeprefix("torch."),
            "layers": None if layers is None else list(layers),
            "bias": getattr(self.features, "bias", None),
            "method": dict(self.method) if isinstance(self.method, Mapping) else self.method,
        }


def architecture(model: nn.Module) -> str:
    shapes = [(k, tuple(v.shape), str(v.dtype)) for k, v in model.state_dict(keep_vars=True).items() if v is not None]
    return hashlib.sha256(repr((_stable(model), shapes)).encode()).hexdigest()[:16]


def digest(state: Mapping[str, Tensor]) -> str:
    h = hashlib.sha256()
    for k, v in state.items():
        h.update(k.encode())
        h.update(v.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()[:16]


def describe(thing: object) -> Any:
    """A head, or what picks the outputs, as a JSON value; functions by their code and what they close over."""
    if thing is None or isinstance(thing, (int, str)):
        return thing
    if isinstance(thing, tuple):
        return list(thing)
    h = hashlib.sha256()
    if getattr(thing, "__code__", None) is not None:
        for part in instructions(thing.__code__):  # type: ignore[attr-defined]
            h.update(part.encode())
        cells = [c.cell_contents for c in getattr(thing, "__closure__", None) or ()]
        for v in (*cells, *(getattr(thing, "__defaults__", None) or ())):
            h.update(digest({"": v}).encode() if isinstance(v, Tensor) else _stable(v).encode())
    else:
        h.update(_stable(thing).encode())
    name = getattr(thing, "__qualname__", type(thing).__qualname__)
    return f"{getattr(thing, '__module__', '')}.{name}:{h.hexdigest()[:8]}"


def instructions(code: CodeType, doc: str | None = None) -> Iterator[str]:
    """What some code does, in pieces to hash: the same in every process, and without its docstring if that is given."""
    yield hashlib.sha256(code.co_code + repr((code.co_names, code.co_varnames)).encode()).hexdigest()[:16]
    for k, v in enumerate(code.co_consts):
        if isinstance(v, CodeType):  # a function inside
            yield from instructions(v)
        elif k or doc is None or v != doc:
            yield _stable(v)


def _stable(thing: object) -> str:
    """repr without what is another each time: addresses, and the order of sets."""
    if isinstance(thing, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_stable, thing))) + "}"
    if type(thing) is tuple:
        return "(" + ", ".join(map(_stable, thing)) + ")"
    return re.sub(r" at 0x[0-9a-f]+", "", repr(thing))
