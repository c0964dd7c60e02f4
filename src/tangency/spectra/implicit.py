"""J Jᵀ without the Gram: products with the Jacobian and its transpose, batch by batch, by torch.func.

K v = J (Jᵀ v): Jᵀ v is one weighted backward pass over all samples, J w one forward-mode pass. Many vectors go along
in the same passes: their cotangents under one vmap of the pullback, their tangents under one vmap of the forward mode,
as many at a time as fit into a budget. torch's batching rules are not taken on trust: for each batch of samples and
each number of vectors the sum of the answers, with random weights, is compared once with the answer for the sum.
Whether forward mode agrees with backward mode is measured once for each batch, uᵀ(J w) = (Jᵀ u)ᵀ w; where it does not,
or cannot run, J w is the derivative of the backward pass, which is linear.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor
from torch.func import jvp, vjp, vmap

from .._base import checks, tree
from .._base.memory import batch_budget
from .._base.types import Float, Inputs, Int, Memory, Numbers, Params
from ..engine.fallback import Plainly, private
from ..engine.features import Jacobian
from ..engine.network import Network
from ..errors import InputError, ModelError, NonFiniteError, PerformanceWarning
from ..kernels.empirical import Empirical

Point = dict[str, Tensor]  # by parameter, or of samples and outputs under ""; several vectors lie along a first axis
Linear = Callable[[Point], Point]
# Samples at a time; on a GPU more, so that so many vectors still go together (heuristics).
BATCH, TOGETHER = 256, 32
# What torch raises where it cannot batch, or has no forward mode.
CANNOT = (RuntimeError, NotImplementedError, TypeError)


@dataclass(frozen=True, eq=False, repr=False)
class JacobianGram:
    """The Gram of a tangent kernel as an operator, K v = J (Jᵀ v); nothing of size n² is ever held."""

    network: Network
    x: Inputs
    outputs: int  # c
    trace: bool  # Σ_c J_c J_cᵀ [n, n], else J Jᵀ [n, c, n, c]
    batch: int
    chunk: int = 1  # vectors at a time
    forward: dict[int, bool] = field(default_factory=dict)  # of each batch, by its first sample: is it right
    together: dict[tuple[str, int, int], bool] = field(default_factory=dict)  # "pull" or "push", batch, vectors: right

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
        columns = given.reshape(rows, -1).to(self.device, self.dtype).T
        return self._product(columns).T.reshape(given.shape)

    def _product(self, v: Float[Tensor, "q r"]) -> Float[Tensor, "q r"]:
        """K v of each row, as many at a time as the budget allows; where memory runs out, half as many."""
        out, total = torch.zeros_like(v), len(v) * (self.outputs if self.trace else 1)
        start, step = 0, -(-total // -(-total // self.chunk))  # chunks about equal
        while start < total:
            part = torch.arange(start, min(start + step, total), device=v.device)
            try:
                self._add(out, v, part)
            except torch.OutOfMemoryError:
                if len(part) == 1:
                    raise
                step = len(part) // 2
                continue
            start += len(part)
        return out

    def _add(self, out: Float[Tensor, "q r"], v: Float[Tensor, "q r"], part: Int[Tensor, " k"]) -> None:
        """Put some of the products into `out`: of vectors, or (traced) of vectors at one output."""
        c = self.outputs
        if not self.trace:
            out[part] = self.push(self.pull(v[part].unflatten(1, (self.n, c)))).flatten(1)
            return
        # Each vector at each output by itself: Σ_c J_c J_cᵀ v.
        here, vector, output = torch.arange(len(part), device=v.device), part // c, part % c
        weights = v.new_zeros(len(part), self.n, c)
        weights[here, :, output] = v[vector]
        out.index_add_(0, vector, self.push(self.pull(weights))[here, :, output])

    @torch.inference_mode(False)  # in which forward mode gives zero, without a word, before torch 2.12
    def pull(self, v: Float[Tensor, "q n c"]) -> Point:
        """Jᵀ v = Σ_i Σ_c v_ic ∂f_c(x_i)/∂θ of each v, by parameter [q, …]: one backward pass over all samples."""
        point, rest = self._point()
        v = cast(Tensor, tree.normal(v))
        total = {k: p.new_zeros(len(v), *p.shape) for k, p in point.items()}
        for part, f in self._batches(rest):
            for k, rows in self._all("pull", part.start, _pullback(f, point), {"": v[:, part]}).items():
                total[k] += rows
        return total

    @torch.inference_mode(False)
    def push(self, w: Point) -> Float[Tensor, "q n c"]:
        """J w = Σ_p ∂f_c(x_i)/∂θ_p w_p of each w, by parameter [q, …]: one forward-mode pass over all samples."""
        point, rest = self._point()
        w = cast(Point, tree.normal(w))
        rows = []
        for part, f in self._batches(rest):
            # Each batch once: samples may take different ways (a padded word, an expert).
            if part.start not in self.forward:
                self.forward[part.start] = _agrees(f, point)
            along = _forward(f, point) if self.forward[part.start] else _backward_twice(f, point)
            rows.append(self._all("push", part.start, along, w)[""].detach())
        return torch.cat(rows, 1)

    def _all(self, which: str, start: int, one: Linear, vectors: Point) -> Point:
        """`one` of each vector: together under vmap where that is right, else one by one."""
        count = len(next(iter(vectors.values())))
        key = (which, start, count)
        if count > 1 and self.together.get(key, True):
            found = _vmapped(one, vectors)
            if key not in self.together:
                self.together[key] = found is not None and _linear(one, vectors, found)
            if found is not None and self.together[key]:
                return found
        each = [one({k: v[i] for k, v in vectors.items()}) for i in range(count)]
        return {k: torch.stack([row[k] for row in each]) for k in each[0]}

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
        forwards = _forward(f, point)(w)[""]
    except CANNOT as e:
        if isinstance(e, torch.OutOfMemoryError):
            raise
        return False
    (rows,) = back(u)
    one, other = float((forwards * u).sum()), math.fsum(float((rows[k] * w[k]).sum()) for k in w)
    size = float(forwards.norm() * u.norm()) + abs(other)
    return abs(one - other) <= torch.finfo(out.dtype).eps ** 0.5 * size


def _pullback(f: Callable[[Point], Tensor], point: Point) -> Linear:
    back = vjp(f, point)[1]
    return lambda u: dict(back(u[""])[0])


def _forward(f: Callable[[Point], Tensor], point: Point) -> Linear:
    return lambda w: {"": jvp(f, (point,), (w,))[1]}


def _backward_twice(f: Callable[[Point], Tensor], point: Point) -> Linear:
    """J w as the transpose of u ↦ Jᵀ u."""
    out, back = vjp(f, point)[:2]
    twice = vjp(lambda u: back(u)[0], torch.zeros_like(out))[1]
    return lambda w: {"": twice(w)[0]}


def _vmapped(one: Linear, vectors: Point) -> Point | None:
    """Of all vectors at once; None where torch cannot."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "There is a performance drop")
        try:
            return vmap(one)(vectors)
        except CANNOT as e:
            if isinstance(e, torch.OutOfMemoryError):
                raise
            return None


def _linear(one: Linear, vectors: Point, found: Point) -> bool:
    """Whether Σ_i r_i one(v_i) = one(Σ_i r_i v_i) for random r, of every parameter."""
    count = len(next(iter(vectors.values())))
    r = torch.randn(count, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    got = {k: torch.tensordot(r.to(v), v, 1) for k, v in found.items()}
    want = one({k: torch.tensordot(r.to(v), v, 1) for k, v in vectors.items()})
    sizes = {k: float(torch.tensordot(r.to(v).abs(), v.abs(), 1).norm()) for k, v in found.items()}
    rounding = torch.finfo(next(iter(found.values())).dtype).eps
    # Of a parameter whose gradient is nothing but rounding, rounding beside the others is no difference.
    floor = 100 * rounding * max(sizes.values())
    return all(float((got[k] - want[k]).norm()) <= rounding**0.5 * sizes[k] + floor for k in got)


def jacobian_gram(kernel: Empirical, x: Inputs, *, batch: int | None = None, memory: Memory = None) -> JacobianGram:
    """K v = J (Jᵀ v) for the tangent kernel of a network, J the Jacobian of its outputs (or head) in its parameters.

    `kernel`: `tg.full_ntk`, `tg.trace_ntk`, `tg.pseudo_ntk` or `tg.head_ntk`, at its `params` and over its `trainable`.
    The result goes to `tg.spectra.density`, or is multiplied: `K @ v`. Cost: a product takes a backward and a
    forward-mode pass over all samples for each vector (c of each where the kernel is traced over c outputs), `batch`
    samples at a time (default: 256, on a GPU what fits) and as many vectors as fit into `memory` (default: 512 MiB, on
    a GPU a third of what is free), at least one; a vector takes about four times the parameters.

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
    if batch is not None:
        checks.positive(batch, "batch", "samples at a time")
    budget = checks.memory(memory)
    features = kernel.feature_map
    # As `compute` takes them: from wherever they lie.
    x = kernel.ready(tree.to(tree.given(x, "x"), next(features.network.model.parameters()).device))
    # Refuses models that are random or mix samples. What it says of rules is of no concern: none are used here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        plan = features.plan(x)
    found = JacobianGram(features.network, x, plan.c, kernel.trace, batch or BATCH)
    _try_out(found)
    if budget is None:
        budget = batch_budget(found.device)
    if batch is None and found.device.type == "cuda":
        found = replace(found, batch=max(BATCH, min(found.n, budget // (TOGETHER * plan.transient))))
    # A tangent or gradient, its part of a batch and its sum; what a pass keeps of each sample, for each vector.
    vector = 4 * sum(p.nbytes for p in found._point()[0].values()) + min(found.batch, found.n) * plan.transient
    return replace(found, chunk=max(1, budget // vector))


def _try_out(gram: JacobianGram) -> None:
    """Run one sample backwards, so that what torch.func cannot do is said before the work starts."""
    first = JacobianGram(gram.network, tree.take(gram.x, slice(0, 1)), gram.outputs, gram.trace, 1)
    try:
        rows = first.pull(torch.ones(1, 1, gram.outputs, dtype=gram.dtype, device=gram.device))
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
