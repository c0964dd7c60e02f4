"""J Jᵀ without the Gram: products with the Jacobian and its transpose, batch by batch, by torch.func.

K v = J (Jᵀ v): Jᵀ v is one weighted backward pass over all samples, J w one forward-mode pass. Whether torch's forward
mode agrees with its backward mode is measured once for each batch, uᵀ(J w) = (Jᵀ u)ᵀ w; where it does not, or cannot
run, J w is the derivative of the backward pass, which is linear.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import jvp, vjp

from .._base import checks, tree
from .._base.types import Float, Inputs, Numbers, Params
from ..engine.fallback import Plainly, private
from ..engine.features import Jacobian
from ..engine.network import Network
from ..errors import InputError, ModelError, NonFiniteError, PerformanceWarning
from ..kernels.empirical import Empirical

Point = dict[str, Tensor]  # by parameter


@dataclass(frozen=True, eq=False, repr=False)
class JacobianGram:
    """The Gram of a tangent kernel as an operator, K v = J (Jᵀ v); nothing of size n² is ever held."""

    network: Network
    x: Inputs
    outputs: int  # c
    trace: bool  # Σ_c J_c J_cᵀ [n, n], else J Jᵀ [n, c, n, c]
    batch: int
    forward: dict[int, bool] = field(default_factory=dict)  # of each batch, by its first sample: is it right

    @property
    def n(self) -> int:
        """Samples."""
        return tree.size(self.x)

    @property
    def shape(self) -> torch.Size:
        """[n, n], or [n, c, n, c] for a full kernel of several outputs."""
        return torch.Size([self.n, self.n] if self.trace else [self.n, self.outputs, self.n, self.outputs])

    @property
    def dtype(self) -> torch.dtype:
        """That of the parameters that count."""
        return next(iter(self._point()[0].values())).dtype

    @property
    def device(self) -> torch.device:
        """That of the parameters."""
        return next(self.network.model.parameters()).device

    def __repr__(self) -> str:
        return f"JacobianGram(shape={tuple(self.shape)}, {type(self.network.model).__name__}, batch={self.batch})"

    def __matmul__(self, v: Numbers) -> Float[Tensor, "..."]:
        """K v for v [n·c] or [n·c, q] (a traced kernel: [n]). Cost: 2q passes over all samples, 2qc if traced."""
        given = tree.numbers(v, "v")
        rows = self.n * (1 if self.trace else self.outputs)
        if given.dim() not in (1, 2) or len(given) != rows:
            raise InputError(
                f"K is {rows} x {rows} and v has shape {tuple(given.shape)}; needed: [{rows}] or [{rows}, q]."
            )
        columns = given.reshape(rows, -1).to(self.device, self.dtype)
        out = torch.stack([self._product(column) for column in columns.T], 1)
        return out.reshape(given.shape)

    def _product(self, v: Float[Tensor, " r"]) -> Float[Tensor, " r"]:
        if not self.trace:
            return self.push(self.pull(v.reshape(self.n, self.outputs))).flatten()
        eye = torch.eye(self.outputs, dtype=v.dtype, device=v.device)
        return torch.stack([self.push(self.pull(v[:, None] * e)) @ e for e in eye]).sum(0)

    def pull(self, v: Float[Tensor, "n c"]) -> Point:
        """Jᵀ v = Σ_i Σ_c v_ic ∂f_c(x_i)/∂θ, by parameter: one backward pass over all samples."""
        point, rest = self._point()
        total = {k: torch.zeros_like(p) for k, p in point.items()}
        for part, f in self._batches(rest):
            back = vjp(f, point)[1]
            (rows,) = back(v[part])
            for k in total:
                total[k] += rows[k]
        return total

    def push(self, w: Point) -> Float[Tensor, "n c"]:
        """J w = Σ_p ∂f_c(x_i)/∂θ_p w_p: one forward-mode pass over all samples."""
        point, rest = self._point()
        rows = []
        for part, f in self._batches(rest):
            # Each batch once: samples may take different ways (a padded word, an expert).
            if part.start not in self.forward:
                self.forward[part.start] = _agrees(f, point)
            along = _forward if self.forward[part.start] else _backward_twice
            rows.append(along(f, point, w).detach())
        return torch.cat(rows)

    def _point(self) -> tuple[Point, Point]:
        """The parameters that count, and everything else that the model holds."""
        state = self.network.state()
        # Plain tensors: torch.func wraps them, which the classes of parameters need not allow.
        point = {k: state[k].detach().as_subclass(Tensor) for k in self.network.trainable}
        return point, {k: v for k, v in state.items() if k not in point}

    def _batches(self, rest: Params) -> Iterator[tuple[slice, Callable[[Point], Tensor]]]:
        """The samples a batch at a time: which, and their outputs as a function of the parameters."""
        with self.network.modes(differentiable=True, exact=True), Plainly():
            for start in range(0, self.n, self.batch):
                part = slice(start, min(start + self.batch, self.n))
                taken = tree.take(self.x, part)

                def f(p: Point, taken: Inputs = taken) -> Tensor:
                    """The outputs [b, c] at these parameters."""
                    return self.network({**rest, **p}, private(taken))

                yield part, f


def _agrees(f: Callable[[Point], Tensor], point: Point) -> bool:
    """uᵀ(J w) = (Jᵀ u)ᵀ w for random u and w."""
    seeds = torch.Generator().manual_seed(0)  # leaves the caller's random numbers alone
    out, back = vjp(f, point)[:2]
    u = torch.randn(out.shape, generator=seeds, dtype=out.dtype).to(out.device)
    w = {k: torch.randn(p.shape, generator=seeds, dtype=p.dtype).to(p.device) for k, p in point.items()}
    try:
        forwards = _forward(f, point, w)
    except (RuntimeError, NotImplementedError, TypeError) as e:
        if isinstance(e, torch.OutOfMemoryError):
            raise
        return False
    (rows,) = back(u)
    one, other = float((forwards * u).sum()), math.fsum(float((rows[k] * w[k]).sum()) for k in w)
    size = float(forwards.norm() * u.norm()) + abs(other)
    return abs(one - other) <= torch.finfo(out.dtype).eps ** 0.5 * size


def _forward(f: Callable[[Point], Tensor], point: Point, w: Point) -> Tensor:
    return jvp(f, (point,), (w,))[1]


def _backward_twice(f: Callable[[Point], Tensor], point: Point, w: Point) -> Tensor:
    """J w as the transpose of u ↦ Jᵀ u."""
    out, back = vjp(f, point)[:2]
    return vjp(lambda u: back(u)[0], torch.zeros_like(out))[1](w)[0]


def jacobian_gram(kernel: Empirical, x: Inputs, *, batch: int = 256) -> JacobianGram:
    """K v = J (Jᵀ v) for the tangent kernel of a network, J the Jacobian of its outputs (or head) in its parameters.

    `kernel`: `tg.full_ntk`, `tg.trace_ntk`, `tg.pseudo_ntk` or `tg.head_ntk`, at its `params` and over its `trainable`.
    The result goes to `tg.spectra.density`, or is multiplied: `K @ v`. Cost: a product with one vector takes a backward
    and a forward-mode pass over all samples (c of each where the kernel is traced over c outputs), `batch` samples at a
    time, and as much memory as the parameters.

    >>> import tangency as tg
    >>> net, x = tg.models.mlp([3, 8, 2]).double(), torch.randn(20, 3).double()
    >>> K, v = tg.spectra.jacobian_gram(tg.full_ntk(net), x), torch.randn(40).double()
    >>> torch.allclose(K @ v, tg.compute(tg.full_ntk(net), x) @ v)
    True
    """
    if not isinstance(kernel, Empirical) or not isinstance(kernel.feature_map, Jacobian):
        given = getattr(kernel, "name", type(kernel).__name__)
        raise InputError(
            f"kernel is {given!r}, which has no Jacobian; needed: the tangent kernel of a network, such as "
            "tg.trace_ntk(model)."
        )
    checks.positive(batch, "batch", "samples at a time")
    x = kernel.ready(x)
    features = kernel.feature_map
    # Refuses models that are random or mix samples. What it says of rules is of no concern: none are used here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        outputs = features.plan(x).c
    found = JacobianGram(features.network, x, outputs, kernel.trace, batch)
    _try_out(found)
    return found


def _try_out(gram: JacobianGram) -> None:
    """Run one sample backwards, so that what torch.func cannot do is said before the work starts."""
    first = JacobianGram(gram.network, tree.take(gram.x, slice(0, 1)), gram.outputs, gram.trace, 1)
    try:
        rows = first.pull(torch.ones(1, gram.outputs, dtype=gram.dtype, device=gram.device))
    except (RuntimeError, NotImplementedError) as e:
        if isinstance(e, torch.OutOfMemoryError):
            raise
        raise ModelError(
            f"torch.func cannot differentiate this model ({str(e).splitlines()[0]}), so its kernel cannot be had "
            "without forming it. Compute the Gram: tg.compute(kernel, x)."
        ) from e
    for name, row in rows.items():
        if not bool(row.isfinite().all()):
            raise NonFiniteError(
                f"the gradient for sample 0 is not finite at parameter {name}. Check that input.", 0, name
            )
