"""Gaussian inputs and teachers that see them through a few directions: data whose features are known.

Wang, Engel, Sarwate, Dumitriu and Chiang, "Spectral evolution and invariance in linear-width neural networks"
(arXiv:2211.06506), section 3: single-index, multiple-index and mixture teachers.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result, text_table
from .._base.types import Float
from ..errors import InputError
from ..infinite.activations.dual import Dual
from .phases import Activation, find_dual

# φ'(z) from z and φ(z), for the activations that networks of a study are trained with; others by autograd.
SLOPES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Tanh": lambda z, value: 1 - value.square(),
    "Sigmoid": lambda z, value: value * (1 - value),
    "Softplus": lambda z, value: torch.sigmoid(z),
    "Relu": lambda z, value: (z > 0).to(z.dtype),
    "Erf": lambda z, value: 2 * torch.pi**-0.5 * (-z.square()).exp(),
    "Identity": lambda z, value: torch.ones_like(z),
}


@dataclass(frozen=True)
class Normalised:
    """σ(z) = (φ(z) − mean)/scale, such that E[σ(z)] = 0 and E[σ(z)²] = 1 for z ~ N(0, 1).

    >>> from tangency.studies import normalised
    >>> sigma = normalised("relu")
    >>> f"{sigma.mean:.4f}, {sigma.scale:.4f}, {sigma(torch.zeros(())):.4f}"
    '0.3989, 0.5838, -0.6833'
    """

    dual: Dual
    mean: float
    scale: float

    def __call__(self, z: Tensor) -> Tensor:
        """σ, elementwise."""
        return (self.dual(z) - self.mean) / self.scale

    def both(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """(σ(z), σ'(z)), new tensors; at a kink the slope is that of torch."""
        value, slope = self._by_formula(z) if self._known else self._by_autograd(z)
        return (value - self.mean) / self.scale, slope / self.scale

    @cached_property
    def _known(self) -> bool:
        """Whether the slope that is written out for its name is its own: Softplus(beta=3) has the name of another."""
        if self.name not in SLOPES:
            return False
        z = torch.linspace(-3, 3, 12, dtype=torch.float64)
        return torch.allclose(self._by_formula(z)[1], self._by_autograd(z)[1], rtol=1e-6, atol=1e-9)

    def _by_formula(self, z: Tensor) -> tuple[Tensor, Tensor]:
        value = self.dual(z)
        return value, SLOPES[self.name](z, value)

    def _by_autograd(self, z: Tensor) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False), torch.enable_grad():
            at = z.detach().clone().requires_grad_()
            value = self.dual(at)
            return value.detach(), torch.autograd.grad(value.sum(), at)[0]

    @property
    def name(self) -> str:
        """That of φ."""
        return str(self.dual.spec().get("name", type(self.dual).__name__))


def normalised(activation: "Activation | Normalised") -> Normalised:
    """σ = (φ − E[φ(z)])/√Var[φ(z)] of an activation φ: a name ("tanh"), one of torch or of `tangency.infinite`.

    >>> from tangency.studies import normalised
    >>> z = torch.linspace(-2, 2, 5)
    >>> value, slope = normalised("tanh").both(z)
    """
    if isinstance(activation, Normalised):
        return activation
    dual, one = find_dual(activation), torch.ones((), dtype=torch.float64)
    mean = float(dual.mean(one))
    variance = float(dual.own(one, slope=False)[0]) - mean**2
    if variance < 1e-12:
        raise InputError(f"activation={activation!r} is constant; needed: a function that changes, such as 'tanh'.")
    return Normalised(dual, mean, variance**0.5)


@dataclass(frozen=True, eq=False, repr=False)
class Taught(Result):
    """Samples x ~ N(0, I) and labels y = f*(x) + noise·ε of a teacher, and test samples with y_test = f*(x_test).

    `beta` [k, d]: the teacher's directions, orthonormal. Test labels have no noise: a network that has learned the
    teacher misses none of them.
    """

    x: Float[Tensor, "n d"]
    y: Float[Tensor, " n"]
    x_test: Float[Tensor, "m d"]
    y_test: Float[Tensor, " m"]
    beta: Float[Tensor, "k d"]
    link: Normalised
    tau: float
    noise: float
    seed: int

    def target(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """f*(x) = Σ_i σ*(xᵀβ_i)/k + τ‖x‖²/d."""
        return self.link(x @ self.beta.T).mean(1) + self.tau / x.shape[1] * x.square().sum(1)

    def r2(self, predicted: Float[Tensor, " m"]) -> float:
        """1 − mean (f − y_test)²/Var(y_test), the coefficient of determination on the test samples."""
        return 1 - float(self.error(predicted) / self.y_test.var(correction=0))

    def error(self, predicted: Float[Tensor, " m"]) -> float:
        """mean (f − y_test)² on the test samples."""
        return float((predicted - self.y_test).square().mean())

    def table(self) -> str:
        """What it is, in two lines."""
        k, d = self.beta.shape
        row = [len(self.y), len(self.y_test), d, k, self.link.name, self.tau, self.noise]
        return text_table(["n", "test", "d", "directions", "link", "τ", "noise"], [row])

    def to(self, dtype: torch.dtype) -> "Taught":
        """The same numbers in another precision."""
        x, y, x_test, y_test, beta = (v.to(dtype) for v in (self.x, self.y, self.x_test, self.y_test, self.beta))
        return Taught(x, y, x_test, y_test, beta, self.link, self.tau, self.noise, self.seed)


def teacher(
    n: int,
    d: int,
    *,
    directions: int = 1,
    link: "Activation | Normalised" = "softplus",
    tau: float = 0.0,
    noise: float = 0.0,
    test: int = 2000,
    seed: int = 0,
) -> Taught:
    """y = Σ_i σ*(xᵀβ_i)/k + τ‖x‖²/d + noise·ε, x ~ N(0, I_d), of k = `directions` orthonormal β_i; σ* is normalised.

    `directions=1` is a single-index teacher, more are a multiple-index one, `tau` mixes in a quadratic that no
    direction shows. Everything is drawn from `seed`, in float64; test labels are f*(x) without noise. E[f*] = τ and
    Var f* = 1/k + 2τ²/d + what link and norm have in common.

    >>> from tangency.studies import teacher
    >>> data = teacher(100, 20, tau=0.2, noise=0.3, test=50)
    >>> data.x.shape, data.y_test.shape, data.beta.shape
    (torch.Size([100, 20]), torch.Size([50]), torch.Size([1, 20]))
    """
    for value, name, what in (
        (n, "n", "a number of training samples"),
        (d, "d", "a number of inputs"),
        (directions, "directions", "how many directions the teacher has"),
        (test, "test", "a number of test samples"),
    ):
        checks.positive(value, name, what)
    if directions > d:
        raise InputError(f"directions={directions}, d={d}; needed: no more orthogonal directions than inputs.")
    if not math.isfinite(tau):
        raise InputError(f"tau={tau}; needed: a finite number, the weight of ‖x‖²/d.")
    generator = torch.Generator().manual_seed(seed)
    beta, x, x_test = (torch.randn(rows, d, generator=generator, dtype=torch.float64) for rows in (directions, n, test))
    beta = torch.linalg.qr(beta.T).Q.T
    noises = checks.nonnegative(noise, "noise") * torch.randn(n, generator=generator, dtype=torch.float64)
    bare = Taught(x, noises, x_test, x_test[:, 0], beta, normalised(link), float(tau), float(noise), seed)
    return Taught(x, bare.target(x) + noises, x_test, bare.target(x_test), *_rest(bare))


def _rest(bare: Taught) -> tuple[Tensor, Normalised, float, float, int]:
    return bare.beta, bare.link, bare.tau, bare.noise, bare.seed
