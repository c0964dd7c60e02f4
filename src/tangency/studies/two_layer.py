"""A network of one hidden layer whose width is of the order of its samples, by its formula: no graph, three products.

Wang, Engel, Sarwate, Dumitriu and Chiang, "Spectral evolution and invariance in linear-width neural networks"
(arXiv:2211.06506). Gradients, the conjugate kernel and the tangent kernel are written out, so that a step of a
thousand inputs and 1,500 neurons costs what its matrix products cost.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._base.results import Result
from .._base.types import Float
from ..errors import InputError
from .phases import Activation
from .teachers import Normalised, normalised

Second = Literal["normal", "sign"]


class Step(NamedTuple):
    """A loss and its gradients."""

    loss: Float[Tensor, ""]
    w: Float[Tensor, "_ _"]
    v: Float[Tensor, " h"]


@dataclass(frozen=True, eq=False, repr=False)
class TwoLayer(Result):
    """f(x) = v·σ(W x/√d)/√h, in the NTK parametrisation, without biases.

    >>> from tangency.studies import two_layer
    >>> net = two_layer(20, 30, activation="tanh", seed=0)
    >>> x = torch.randn(5, 20, dtype=torch.float64)
    >>> net(x).shape, net.ntk(x).shape
    (torch.Size([5]), torch.Size([5, 5]))
    """

    w: Float[Tensor, "h d"]
    v: Float[Tensor, " h"]
    activation: Normalised

    def __call__(self, x: Float[Tensor, "n d"]) -> Float[Tensor, " n"]:
        """f at each sample."""
        return self.hidden(x) @ self.v

    def fields(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n h"]:
        """W x/√d, what goes into the activations."""
        if x.dtype != self.w.dtype:
            raise InputError(f"x is {x.dtype}, the network {self.w.dtype}. Use x.to({self.w.dtype}).")
        return x @ self.w.T * self.w.shape[1] ** -0.5

    def hidden(self, x: Float[Tensor, "n d"]) -> Float[Tensor, "n h"]:
        """σ(W x/√d)/√h, the features behind the conjugate kernel."""
        return self.activation(self.fields(x)) * len(self.v) ** -0.5

    def gradients(self, x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> Step:
        """L = ‖y − f(X)‖²/(2n), ∂L/∂W = diag(v) σ'(W X/√d) diag(r) Xᵀ/√(hd), ∂L/∂v = σ(W X/√d) r/√h, r = (f − y)/n.

        Cost: two products of n·h·d.
        """
        loss, back, v = self.backward(x, y)
        return Step(loss, back.T @ x, v)

    def backward(self, x: Float[Tensor, "n d"], y: Float[Tensor, " n"]) -> Step:
        """As `gradients`, with the factor B [n, h] of ∂L/∂W = Bᵀ X in place of the product."""
        value, slope = self.activation.both(self.fields(x))
        root_h, root_d = len(self.v) ** 0.5, self.w.shape[1] ** 0.5
        miss = value @ self.v / root_h - y
        r = miss / len(y)
        back = slope.mul_(self.v / (root_h * root_d)).mul_(r[:, None])
        return Step(miss @ r / 2, back, r @ value / root_h)

    def ck(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"] | None = None) -> Float[Tensor, "n m"]:
        """K_CK = σ(W X/√d)ᵀ σ(W Z/√d)/h; `z=None`: of x with itself."""
        a = self.hidden(x)
        return a @ (a if z is None else self.hidden(z)).T

    def ntk(self, x: Float[Tensor, "n d"], z: Float[Tensor, "m d"] | None = None) -> Float[Tensor, "n m"]:
        """K_NTK = (XᵀZ/d) ⊙ (σ'(W X/√d)ᵀ diag(v)² σ'(W Z/√d)/h) + K_CK, both layers' parameters counted."""
        a = self._slopes(x)
        b = a if z is None else self._slopes(z)
        return x @ (x if z is None else z).T / x.shape[1] * (a @ b.T) + self.ck(x, z)

    def _slopes(self, x: Tensor) -> Tensor:
        return self.activation.both(self.fields(x))[1].mul_(self.v * len(self.v) ** -0.5)

    def spectra(self, x: Float[Tensor, "n d"]) -> dict[str, Tensor]:
        """Eigenvalues, falling, in float64: of W Wᵀ/d (as many as it has rows or columns), of the CK and of the NTK."""
        w = torch.linalg.svdvals(self.w.double()).square() / self.w.shape[1]
        wide = TwoLayer(self.w.double(), self.v.double(), self.activation)
        kernels = (torch.linalg.eigvalsh(k(x.double())).flip(0) for k in (wide.ck, wide.ntk))
        return dict(zip(("weights", "ck", "ntk"), (w, *kernels), strict=True))

    def module(self) -> nn.Module:
        """The same network as a torch module, for kernels of tangency: a copy of its weights."""
        h, d = self.w.shape
        first, last = nn.Linear(d, h, bias=False), nn.Linear(h, 1, bias=False)
        first.weight, last.weight = nn.Parameter(self.w.clone()), nn.Parameter(self.v[None].clone())
        return _Module(first, last, self.activation)

    def copy(self) -> "TwoLayer":
        """The same with weights of its own."""
        return TwoLayer(self.w.clone(), self.v.clone(), self.activation)


class _Module(nn.Module):
    def __init__(self, first: nn.Linear, last: nn.Linear, activation: Normalised) -> None:
        super().__init__()
        self.first, self.last, self.phi = first, last, activation.dual.module()
        self.mean, self.scale = activation.mean, activation.scale

    def forward(self, x: Tensor) -> Tensor:
        """[n, 1] outputs."""
        h, d = self.first.weight.shape
        return self.last((self.phi(self.first(x) * d**-0.5) - self.mean) / self.scale) * h**-0.5


def two_layer(
    d: int,
    h: int,
    *,
    activation: Activation | Normalised = "tanh",
    second: Second = "normal",
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> TwoLayer:
    """f(x) = v·σ(W x/√d)/√h with W_ij ~ N(0, 1) and v_i ~ N(0, 1), or ±1 with `second="sign"`; σ normalised.

    Numbers are drawn in float64 from `seed` alone, whatever the dtype.

    >>> from tangency.studies import two_layer
    >>> two_layer(1000, 1500, seed=0).w.shape
    torch.Size([1500, 1000])
    """
    for name, size in (("d", d), ("h", h)):
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{name}={size!r}; needed: a whole number of 1 or more.")
    if second not in ("normal", "sign"):
        raise InputError(f"second={second!r}; needed: 'normal' (v_i ~ N(0, 1)) or 'sign' (v_i = ±1).")
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(h, d, generator=generator, dtype=torch.float64)
    v = torch.randn(h, generator=generator, dtype=torch.float64)
    v = v if second == "normal" else torch.where(v > 0, 1.0, -1.0).double()
    return TwoLayer(w.to(dtype), v.to(dtype), normalised(activation))
