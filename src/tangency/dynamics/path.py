"""Training for any loss with the kernel held fixed: as an ODE, and step by step.

The parameters move by Jᵀ a, so that a [n, …], one number per training output, is all that has to be followed:
f(z) = f₀(z) + k(z, X) a. For a gradient flow da/dt = −lr·∂L/∂f(X); a step of SGD is a ← a − lr·∂L/∂f(X).
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from .._base import checks, tree
from .._base.extras import needed
from .._base.progress import bar
from .._base.results import Result
from .._base.types import Array, Float, Numbers
from ..errors import DidNotConverge, InputError
from ..gram.gram import Gram
from ..linalg.matrix import Matrix, square, targets
from ..regress.model import apply, new_f0

Loss = Callable[[Tensor, Tensor], Tensor]
Times = Sequence[float] | Array | float
Batch = Sequence[int] | Array  # numbers of samples
INTEGRATORS = ("DOP853", "RK45", "RK23", "Radau", "BDF", "LSODA")  # of SciPy


@dataclass(frozen=True, eq=False, repr=False)
class Path(Result):
    """What training goes through: at each time the coefficients a, the outputs and the loss on the training samples."""

    times: Float[Tensor, " t"]  # times of a flow, numbers of steps of a descent
    dual: Float[Tensor, "t ..."]
    train: Float[Tensor, "t ..."]
    loss: Float[Tensor, " t"]
    shifted: bool  # starts from f₀
    full: bool  # the kernel couples the outputs

    def predict(self, cross: Matrix, f0: Numbers | None = None) -> Tensor:
        """f on new samples at each time [t, m, …], from their Gram with the training samples."""
        if self.full:
            out = torch.stack([apply(cross, a, True) for a in self.dual])
        else:  # all times as columns: one pass over a Gram on disk
            columns = apply(cross, self.dual.movedim(0, 1).flatten(1), False)
            out = columns.reshape(-1, len(self.dual), *self.dual.shape[2:]).movedim(1, 0)
        return out + new_f0(f0, out[0], self.shifted)


@dataclass(frozen=True, eq=False)
class _Training:
    """A loss of the training outputs, which start from f₀."""

    gram: Gram
    y: Tensor
    f0: Tensor  # flat [n·c, q]
    shape: torch.Size
    loss: Loss
    shifted: bool

    @staticmethod
    def of(K: Matrix, y: Numbers, loss: Loss, f0: Numbers | None) -> "_Training":
        """Checked, and the loss tried once: what it cannot take is said before any work."""
        gram = square(K)
        side = gram.shape[: len(gram.shape) // 2]
        y = tree.numbers(y)
        if y.dim() == 0 or len(y) != side[0]:
            raise InputError(f"there are {side[0]} samples and y has shape {tuple(y.shape)}; needed: [{side[0]}, …].")
        checks.beside(y, gram.device, "y")
        checks.finite(y, "y")
        # Classes do not say how many outputs there are; a full kernel does.
        if f0 is None and not y.is_floating_point() and len(side) == 1:
            raise InputError("y holds classes, so f0 must say how many outputs there are: f0=torch.zeros(n, classes).")
        kind = torch.promote_types(gram.dtype, y.dtype)
        begin = y.new_zeros(side if len(side) == 2 else y.shape, dtype=kind) if f0 is None else f0
        begin = targets(begin, side, kind, gram.device, "f0")
        training = _Training(gram, y, begin.reshape(side.numel(), -1), begin.shape, loss, f0 is not None)
        try:
            value = training.value(training.f0)
        except (RuntimeError, ValueError, TypeError, IndexError) as e:
            raise InputError(
                f"loss(f, y) failed for f of shape {tuple(begin.shape)} and y of shape {tuple(y.shape)}: {e}. Give y "
                "as the loss needs it, and f0 with a column per output."
            ) from e
        if not isinstance(value, Tensor) or value.dim() != 0:
            raise InputError("the loss must give one number for all samples; use reduction='mean' or 'sum'.")
        return training

    def value(self, f: Tensor, rows: Tensor | None = None) -> Tensor:
        """The loss of outputs f, flat; of the samples `rows` alone, if given."""
        f = f.reshape(self.shape)
        return self.loss(f, self.y) if rows is None else self.loss(f[rows], self.y[rows])

    def gradient(self, f: Tensor, rows: Tensor | None = None) -> Tensor:
        """∂L/∂f, flat; zero outside the rows of a batch."""
        with torch.enable_grad():
            f = f.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.value(f, rows), f)
        return g

    def path(self, times: Tensor, duals: list[Tensor], outputs: list[Tensor]) -> Path:
        """What was gone through, in the shapes of y, with the loss at each time."""
        with torch.no_grad():
            loss = torch.stack([self.value(f).to(self.f0.dtype) for f in outputs])
        a, f = (torch.stack([v.reshape(self.shape) for v in stops]) for stops in (duals, outputs))
        return Path(times, a, f, loss, self.shifted, len(self.gram.shape) == 4)


def integrate(
    K: Matrix,
    y: Numbers,
    times: Times,
    *,
    loss: Loss,
    lr: float = 1.0,
    f0: Numbers | None = None,
    momentum: float | None = None,
    rtol: float = 1e-9,
    atol: float = 1e-10,
    integrator: str = "DOP853",
    progress: bool = True,
) -> Path:
    """df/dt = −lr·K ∂L/∂f for any differentiable `loss(f, y)`, by SciPy's adaptive `solve_ivp`.

    K [n, n] acts on each column of f [n, q] (K⊗I), or is full, [n, c, n, c]. `momentum` μ: f″ + (1 − μ) f′ =
    −lr·K ∂L/∂f from rest, the limit of heavy-ball steps. `integrator`: "DOP853", "RK45", and for stiff problems
    "LSODA", "Radau". The right-hand side is evaluated in float64 on K's device. Needs SciPy.

    >>> import tangency as tg
    >>> x, y = torch.randn(6, 3).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    >>> path = tg.dynamics.integrate(
    ...     x @ x.T, y, [0, 1, 10], loss=torch.nn.functional.cross_entropy, f0=torch.zeros(6, 3).double()
    ... )
    >>> path.train.shape, bool(path.loss[-1] < path.loss[0])
    (torch.Size([3, 6, 3]), True)
    """
    training, lr = _Training.of(K, y, loss, f0), checks.nonnegative(lr, "lr")
    when = checked_times(times, training.f0)
    if bool(when.isinf().any()) or bool((when.diff() < 0).any()):
        raise InputError(f"times={when.tolist()}; needed: finite and in order. For t → ∞ see flow and ridgeless.")
    if momentum is not None and not 0 <= momentum < 1:
        raise InputError(f"momentum={momentum}; needed: at least 0, below 1, or None for a flow without inertia.")
    size = training.f0.numel()

    def tensor(a: np.ndarray) -> Tensor:
        """SciPy's flat state as a [n·c, q], where K is."""
        return torch.from_numpy(a).to(training.f0.device).reshape(training.f0.shape)

    def outputs(a: Tensor) -> Tensor:
        """f₀ + K a."""
        return training.f0.double() + training.gram @ a

    with bar(None, "gradient flow", "evaluation", show=progress) as step:
        # da/dt = −lr ∂L/∂f; with momentum a″ = −lr ∂L/∂f − (1 − μ) a′.
        def slope(t: float, state: np.ndarray) -> np.ndarray:
            """The right-hand side."""
            step(note=f"t = {t:.3g} of {float(when[-1]):.3g}")
            force = -lr * training.gradient(outputs(tensor(state[:size]))).cpu().numpy().ravel()
            if momentum is None:
                return force
            return np.concatenate([state[size:], force - (1 - momentum) * state[size:]])

        # The state is a, and with momentum its velocity behind it.
        begin = np.zeros(size if momentum is None else 2 * size)
        states = _solve_ivp(slope, begin, when.cpu().numpy(), integrator, rtol=rtol, atol=atol)
    duals = [tensor(np.ascontiguousarray(column)) for column in states[:size].T]
    return training.path(when, duals, [outputs(a) for a in duals])


def _solve_ivp(
    slope: Callable[[float, np.ndarray], np.ndarray],
    begin: np.ndarray,
    times: np.ndarray,
    integrator: str,
    **tol: float,
) -> np.ndarray:
    """States at the times, a column each, by SciPy."""
    with needed("scipy", "integrate()"):
        from scipy.integrate import solve_ivp
    if integrator not in INTEGRATORS:
        raise InputError(f"integrator={integrator!r}; needed: one of {', '.join(INTEGRATORS)}, as SciPy calls them.")
    span = (0.0, max(float(times[-1]), 1e-300))  # solve_ivp takes no empty span
    solution = solve_ivp(slope, span, begin, method=integrator, t_eval=times, **tol)
    if not solution.success:
        raise DidNotConverge(
            f"solve_ivp ({integrator}) stopped: {solution.message} Try integrator='LSODA' or 'Radau'.", solution
        )
    return np.asarray(solution.y)


def descend(
    K: Matrix,
    y: Numbers,
    *,
    loss: Loss,
    lr: float | Callable[[int], float],
    steps: int | None = None,
    f0: Numbers | None = None,
    momentum: float = 0.0,
    nesterov: bool = False,
    batches: Iterable[Batch] | None = None,
    every: int = 1,
    progress: bool = True,
) -> Path:
    """f ← f − lr·K ∂L/∂f: descent in function space, number for number what torch.optim.SGD does to `linearize`.

    `loss(f, y)` as in training (its reduction counts). `batches`: the samples of each step, as lists or tensors of
    their numbers (default: all, `steps` times); the loss is then that of these samples alone. `momentum`, `nesterov`:
    as in torch.optim.SGD. `lr`: a number, or a function of the step from 0. `every`: which steps are kept; the last
    always is. For Adam see `train`. Cost: n² a step and output; n·batch without momentum, for a K in memory.

    >>> import tangency as tg
    >>> x, y = torch.randn(6, 3).double(), torch.randn(6).double()
    >>> path = tg.dynamics.descend(x @ x.T, y, loss=torch.nn.functional.mse_loss, lr=0.1, steps=20)
    >>> path.train.shape
    torch.Size([21, 6])
    """
    training = _Training.of(K, y, loss, f0)
    if not 0 <= momentum < 1 or (nesterov and not momentum):
        raise InputError(f"momentum={momentum}, nesterov={nesterov}; needed: 0 ≤ momentum < 1, and > 0 for Nesterov's.")
    if (steps is not None and steps < 0) or every < 1:
        raise InputError(f"steps={steps}, every={every}; needed: steps at least 0, every at least 1.")
    plan = [b if b is None else _check_rows(b, training.shape[0], training.f0.device) for b in schedule(steps, batches)]
    product = _product(training.gram, training.f0)
    a, f, velocity = torch.zeros_like(training.f0), training.f0, None
    kept: list[tuple[int, Tensor, Tensor]] = [(0, a, f)]
    with bar(len(plan), "descent", "step", show=progress) as step:
        for number, rows in enumerate(plan):
            g = training.gradient(f, rows)
            # As torch.optim.SGD has it: v ← μ v + g, and Nesterov's step is g + μ v.
            if momentum:
                velocity = g if velocity is None else momentum * velocity + g
                g = g + momentum * velocity if nesterov else velocity
            rate = lr(number) if callable(lr) else lr
            # Without momentum only the batch's coefficients change, so that n·batch entries of K are enough.
            a, f = a - rate * g, f - rate * product(g, None if momentum else rows)
            if (number + 1) % every == 0 or number + 1 == len(plan):
                kept.append((number + 1, a, f))
            step()
    if not bool(f.isfinite().all()):
        raise DidNotConverge(
            f"the descent diverged within {len(plan)} steps; use a smaller lr (tg.dynamics.max_learning_rate).",
            training.path(*_columns(kept, training.f0)),
        )
    return training.path(*_columns(kept, training.f0))


def schedule(steps: int | None, batches: Iterable[Batch] | None) -> list[Batch | None]:
    """The samples of each step; None for all of them."""
    if (steps is None) == (batches is None):
        raise InputError("give either steps= (of all samples) or batches= (the samples of each step).")
    return [None] * (steps or 0) if batches is None else list(batches)


def _columns(kept: list[tuple[int, Tensor, Tensor]], like: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Steps, coefficients and outputs of what was kept, each on their own."""
    return torch.tensor([k for k, _, _ in kept]).to(like), [a for _, a, _ in kept], [f for _, _, f in kept]


def _check_rows(batch: Batch, n: int, device: torch.device) -> Tensor:
    """Numbers of samples from 0 to n − 1, [b]."""
    rows = torch.as_tensor(batch, device=device)
    if rows.dim() != 1 or rows.is_floating_point() or rows.dtype == torch.bool or not len(rows):
        raise InputError(f"a batch is {rows.dtype} of shape {tuple(rows.shape)}; needed: numbers of samples, [b].")
    if int(rows.min()) < 0 or int(rows.max()) >= n:
        raise InputError(f"a batch has samples from {int(rows.min())} to {int(rows.max())}; needed: from 0 to {n - 1}.")
    return rows


def _product(gram: Gram, like: Tensor) -> Callable[[Tensor, Tensor | None], Tensor]:
    """K d; with rows, K d where d is zero outside the samples of these rows. A Gram on disk streams."""
    # On disk a pass over all tiles costs the same whichever rows are asked for.
    if gram.device is None:
        return lambda d, rows: gram @ d
    n, c = gram.shape[0], len(like) // gram.shape[0]
    k = gram.dense().reshape(n * c, n, c).to(like.dtype)

    def product(d: Tensor, rows: Tensor | None) -> Tensor:
        """K d, from the columns of these samples alone."""
        if rows is None:
            return k.reshape(n * c, n * c) @ d
        moved = rows.unique()  # a batch may name a sample twice; d already sums over both
        return k[:, moved].flatten(1) @ d.reshape(n, c, -1)[moved].flatten(0, 1)

    return product


def checked_times(times: Times, like: Tensor) -> Tensor:
    """[t] in float64 where `like` is, each at least 0; infinity counts."""
    when = torch.as_tensor(times, dtype=torch.float64).reshape(-1).to(like.device)
    if not len(when) or not bool((when >= 0).all()):
        raise InputError(f"times={when.tolist()}; needed: one or more, each at least 0.")
    return when
