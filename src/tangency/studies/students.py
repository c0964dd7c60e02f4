"""Two-layer networks trained on a teacher's samples, beside the lazy network, which cannot learn features.

Wang, Engel, Sarwate, Dumitriu and Chiang, "Spectral evolution and invariance in linear-width neural networks"
(arXiv:2211.06506), sections 2 to 4: gradient descent, SGD, Adam and AdaGrad on L = ‖y − f(X)‖²/(2n), both layers
trained.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .._base import checks
from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Float
from ..errors import DidNotConverge, InputError
from ..regress import ridgeless
from .teachers import Taught
from .two_layer import TwoLayer

Method = Literal["gd", "sgd", "adam", "adagrad"]
METHODS = ("gd", "sgd", "adam", "adagrad")
Watch = Callable[[TwoLayer], Mapping[str, float]]


@dataclass(frozen=True)
class Optimizer:
    """θ ← θ − lr·step(∇L), on all samples ("gd") or on shuffled batches ("sgd", "adam", "adagrad").

    Adam (Kingma and Ba 2015) has β = (0.9, 0.999), ε = 1e-8, AdaGrad (Duchi et al. 2011) ε = 1e-10, as in torch.
    `batch=None`: all samples. `seed` decides the order of the samples, `decay` multiplies lr after each epoch.

    >>> from tangency.studies import Optimizer
    >>> Optimizer("sgd", 22.0, batch=16)
    Optimizer(method='sgd', lr=22.0, batch=16, seed=0, decay=1.0)
    """

    method: Method
    lr: float
    batch: int | None = None
    seed: int = 0
    decay: float = 1.0

    def __post_init__(self) -> None:
        checks.choice(self.method, "method", METHODS)
        if not checks.nonnegative(self.lr, "lr"):
            raise InputError("lr=0; needed: a learning rate above 0.")
        if not 0 < self.decay <= 1:
            raise InputError(f"decay={self.decay}; needed: a factor for lr after each epoch, above 0, at most 1.")
        if self.batch is not None:
            checks.positive(self.batch, "batch", "a number of samples in a batch")
            if self.method == "gd":
                raise InputError(f"method='gd' takes all samples at once, batch={self.batch}. Use method='sgd'.")


@dataclass(frozen=True, eq=False, repr=False)
class Learned(Result):
    """A network before and after it was trained, and what it makes of the teacher's test samples.

    `loss` [epochs]: L over each epoch (of "gd": before each step). `reached`: whether it came below `until`. `seen`:
    what `watch` returned, with the epoch.
    """

    initial: TwoLayer
    network: TwoLayer
    optimizer: Optimizer
    loss: Float[Tensor, " e"]
    reached: bool
    r2: float
    error: float
    seen: tuple[Mapping[str, float], ...] = ()

    UNITS: ClassVar[Mapping[str, str]] = {"error": "mean square"}

    def table(self) -> str:
        """One line: the optimizer, epochs, the last loss, R² and test error."""
        o, last = self.optimizer, float(self.loss[-1])
        row = [o.method, o.lr, o.batch or "all", len(self.loss), last, self.r2, self.error]
        return text_table(["method", "lr", "batch", "epochs", "loss", "R²", "test error"], [row])


def train_two_layer(
    net: TwoLayer,
    data: Taught,
    optimizer: Optimizer,
    *,
    until: float = 1e-5,
    epochs: int = 20_000,
    watch: Watch | None = None,
    progress: bool = True,
) -> Learned:
    """θ ← θ − lr·step(∇L), L = ‖y − f(X)‖²/(2n), on a copy of `net`, both layers, until L < `until` or so many epochs.

    Both `net` and `data` are in one precision (`data.to(torch.float32)`). `watch(network)` returns numbers: it is
    called at the start, after epochs that grow by a quarter (1, 2, 3, 4, 5, 6, 7, 8, 10, …) and at the end. Raises
    `DidNotConverge`, which holds the result, where L overflows.
    Cost: an epoch is two products of n·h·d, and small batches add reading W once a step.

    >>> from tangency.studies import Optimizer, train_two_layer, teacher, two_layer
    >>> data = teacher(60, 30, noise=0.3)
    >>> run = train_two_layer(two_layer(30, 90), data, Optimizer("gd", 5.0), epochs=20, progress=False)
    >>> len(run.loss), run.reached, bool(run.loss[-1] < run.loss[0])
    (20, False, True)
    """
    checks.positive(epochs, "epochs", "a number of epochs")
    _same(net, data)
    run = _Run(net.copy(), data, optimizer)
    losses: list[float] = []
    seen, due = [{"epoch": 0.0, **watch(run.net)}] if watch else [], 1
    with bar(epochs, f"{optimizer.method} {optimizer.lr:g}", "epoch", show=progress) as tick:
        while True:
            losses.append(run.epoch())
            run.lr *= optimizer.decay
            tick(note=f"loss {losses[-1]:.3g}")
            # Beyond this, float32 loses the loss for good.
            over = not losses[-1] < 1e12 or (losses[-1] < 4 * until and run.loss() < until) or len(losses) == epochs
            if watch and (len(losses) == due or over):
                seen.append({"epoch": float(len(losses)), **watch(run.net)})
                due = max(due + 1, due * 5 // 4)
            if over:
                break
    reached = math.isfinite(losses[-1]) and run.loss() < until
    found = run.net(data.x_test)
    result = Learned(net, run.net, optimizer, torch.tensor(losses, dtype=torch.float64), reached,
                     data.r2(found), data.error(found), tuple(seen))  # fmt: skip
    if not losses[-1] < 1e12:
        raise DidNotConverge(
            f"training diverged: the loss of epoch {len(losses)} is {losses[-1]:g}. Lower lr={optimizer.lr:g}, or take "
            f"larger batches (batch={optimizer.batch}).",
            result,
        )
    return result


def _same(net: TwoLayer, data: Taught) -> None:
    if net.w.shape[1] != data.x.shape[1]:
        raise InputError(f"the network takes {net.w.shape[1]} inputs, the samples have {data.x.shape[1]}. Give one d.")
    if net.w.dtype != data.x.dtype:
        raise InputError(f"the network is {net.w.dtype}, the samples are {data.x.dtype}. Use data.to({net.w.dtype}).")


class _Run:
    """One training under way, in place."""

    def __init__(self, net: TwoLayer, data: Taught, optimizer: Optimizer) -> None:
        self.net, self.data, self.how, self.count, self.lr = net, data, optimizer, 0, optimizer.lr
        self.generator = torch.Generator().manual_seed(optimizer.seed)
        self.first = [torch.zeros_like(p) for p in (net.w, net.v)] if optimizer.method == "adam" else []
        self.second = [torch.zeros_like(p) for p in (net.w, net.v)] if optimizer.method.startswith("ada") else []

    def loss(self) -> float:
        """L of all training samples."""
        return float((self.net(self.data.x) - self.data.y).square().mean()) / 2

    def epoch(self) -> float:
        """Each sample once; the mean of the losses before each step."""
        x, y, n = self.data.x, self.data.y, len(self.data.y)
        if self.how.batch is None or self.how.batch >= n:
            return float(self.step(x, y))
        total = torch.zeros((), dtype=torch.float64)
        for rows in torch.randperm(n, generator=self.generator).split(self.how.batch):
            total += self.step(x[rows], y[rows]) * len(rows)
        return float(total) / n

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        """One step on these samples; the loss before it."""
        loss, back, v = self.net.backward(x, y)
        self.count += 1
        if self.how.method in ("gd", "sgd"):
            # The product goes into W at once: for small batches, reading W is most of the work.
            self.net.w.addmm_(back.T, x, alpha=-self.lr)
            self.net.v.sub_(v, alpha=self.lr)
        else:
            (self._adam if self.how.method == "adam" else self._adagrad)((back.T @ x, v))
        return loss

    def _adam(self, gradients: tuple[Tensor, Tensor]) -> None:
        """m ← 0.9 m + 0.1 g, s ← 0.999 s + 0.001 g², θ ← θ − lr·(m/(1 − 0.9^t))/(√(s/(1 − 0.999^t)) + 1e-8)."""
        one, two = 1 - 0.9**self.count, 1 - 0.999**self.count
        for p, g, m, s in zip((self.net.w, self.net.v), gradients, self.first, self.second, strict=True):
            m.lerp_(g, 0.1)
            s.mul_(0.999).addcmul_(g, g, value=0.001)
            p.addcdiv_(m, s.sqrt().div_(two**0.5).add_(1e-8), value=-self.lr / one)

    def _adagrad(self, gradients: tuple[Tensor, Tensor]) -> None:
        """s ← s + g², θ ← θ − lr·g/(√s + 1e-10)."""
        for p, g, s in zip((self.net.w, self.net.v), gradients, self.second, strict=True):
            s.addcmul_(g, g)
            p.addcdiv_(g, s.sqrt().add_(1e-10), value=-self.lr)


@dataclass(frozen=True, eq=False, repr=False)
class Lazy(Result):
    """The network linearised where it began, trained to the end: its outputs on the test samples, R² and test error."""

    predicted: Float[Tensor, " m"]
    r2: float
    error: float


def lazy(net: TwoLayer, data: Taught) -> Lazy:
    """f̂(x) = f₀(x) + K(x, X) K(X, X)⁻¹ (y − f₀(X)), K the tangent kernel of `net` as it is: ridgeless regression.

    Cost: an eigendecomposition of [n, n].

    >>> from tangency.studies import lazy, teacher, two_layer
    >>> lazy(two_layer(30, 90), teacher(60, 30)).predicted.shape
    torch.Size([2000])
    """
    _same(net, data)
    model = ridgeless(net.ntk(data.x), data.y, f0=net(data.x))
    predicted = model.predict(net.ntk(data.x_test, data.x), f0=net(data.x_test))
    return Lazy(predicted, data.r2(predicted), data.error(predicted))
