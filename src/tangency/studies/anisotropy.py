"""Neural anisotropy directions: which directions of the inputs a network finds easy before it has seen any data.

Ortiz-Jiménez, Modas, Moosavi-Dezfooli and Frossard 2020, "Neural anisotropy directions"; that they are the right
singular vectors of the mixed derivative: Ortiz-Jiménez, Moosavi-Dezfooli and Frossard 2021, theorem 1, appendices C, D.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.results import Result, text_table
from .._base.types import Array, Float, Trainable
from ..datasets import Labelled, TrainTest
from ..engine.heads import Head
from ..errors import InputError, ModelError, TangencyWarning
from ..linalg.eigen import top_of
from ..spectra.mixed_derivative import MixedDerivative

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Anisotropy(Result):
    """σ_i and u_i of M = E_x[∂²f/∂θ∂x] = Σ_i σ_i w_i u_iᵀ, largest first: the network learns x ↦ u_0ᵀx most easily.

    σ_i² is the alignment of x ↦ u_iᵀx with the tangent kernel for x ~ N(0, I) (theorem 1).
    """

    values: Float[Tensor, " k"]
    directions: Float[Tensor, "k ..."]  # of the shape of an input each, of unit norm
    residual: float  # of the eigenpairs of MᵀM, relative to σ_0²
    kinks: tuple[str, ...]  # functions in the network that have no second derivative everywhere

    def __len__(self) -> int:
        return len(self.values)

    @property
    def alignment(self) -> Float[Tensor, " k"]:
        """α(x ↦ u_iᵀx) = ‖M u_i‖² = σ_i²."""
        return self.values.square()

    def tasks(
        self,
        indices: Sequence[int],
        *,
        train: int = 10_000,
        test: int = 10_000,
        epsilon: float = 1.0,
        sigma: float = 1.0,
        seed: int = 0,
    ) -> Iterator[tuple[int, TrainTest]]:
        """(i, (train, test)) for each index, drawn from D(u_i) (`separable`), one at a time, for `learn`."""
        for i in indices:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < len(self):
                raise InputError(f"index {i!r}; needed: 0 to {len(self) - 1}, of the {len(self)} directions found.")
        for i in indices:
            both = separable(self.directions[i], train + test, epsilon=epsilon, sigma=sigma, seed=seed)
            yield i, TrainTest(both.select(slice(train)), both.select(slice(train, train + test)))

    def table(self) -> str:
        """A line for each of the first ten: σ, σ² as a part of the sum of those found."""
        parts = (self.alignment / self.alignment.sum()).tolist()
        return text_table(["index", "σ", "part of σ²"], list(zip(range(10), self.values.tolist(), parts, strict=False)))

    def plot(self, count: int = 10) -> "Figure":
        """The first directions as pictures, and below each the magnitude of its Fourier transform."""
        shape = tuple(self.directions.shape[1:])
        if len(shape) not in (2, 3) or (len(shape) == 3 and shape[0] not in (1, 3)):
            raise InputError(
                f"the inputs' shape is {shape}; needed: images [h, w], [1, h, w] or [3, h, w], whose directions are "
                "pictures. Of other inputs, look at .values and .directions."
            )
        from .pictures import draw_anisotropy

        return draw_anisotropy(self.directions[:count], self.values[:count])


def anisotropy(
    model: nn.Module,
    at: Array | Sequence[int],
    count: int = 10,
    *,
    head: Head = None,
    trainable: Trainable = None,
    dtype: object = None,
    batch: int = 64,
    tol: float | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Anisotropy:
    """u_i, the right singular vectors of M = E_x[∂²f/∂θ∂x]: the network's anisotropy directions, easiest first.

    `at`: samples [n, …] to average over, or the shape of an input for M at the origin, as published. `head`: which
    function of several outputs. By randomised block Krylov iteration on MᵀM (`tg.linalg.top_of`, whose `tol` this is):
    each product is two times two backward passes. The theory needs a smooth network; where it has kinks (ReLU, max
    pooling) there is a warning. `tg.models.lenet5(activation=nn.GELU, pool=nn.AvgPool2d)` is smooth.
    Cost: a few times max(count, 16) products; p numbers at a time where the samples fit one `batch`, else p·16.

    >>> import tangency as tg
    >>> net = tg.models.mlp([6, 32, 1], activation=torch.nn.GELU)
    >>> found = tg.studies.anisotropy(net, (6,), 3)
    >>> found.directions.shape, bool((found.values.diff() <= 0).all())
    (torch.Size([3, 6]), True)
    """
    derivative = MixedDerivative(model, at, head=head, trainable=trainable, dtype=dtype, batch=batch)
    d = derivative.size[1]
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= d:
        raise InputError(
            f"count={count!r}; needed: from 1 to {d}, the numbers in an input of shape {tuple(derivative.shape)}."
        )
    if derivative.kinks:
        warnings.warn(
            f"the network has {', '.join(derivative.kinks)}, without a second derivative where it bends: the mixed "
            "derivative misses that part, and at the origin it may be none at all. Use smooth ones (nn.GELU, nn.Tanh, "
            "average pooling): tg.models.lenet5(activation=nn.GELU, pool=nn.AvgPool2d), "
            "tg.models.resnet18(activation=nn.GELU).",
            TangencyWarning,
            stacklevel=2,
        )
    x = derivative.x
    options = {"dtype": x.dtype, "device": x.device, "tol": tol, "seed": seed, "progress": progress}
    pairs = top_of(derivative.gram_times, d, count, **options)  # type: ignore[arg-type]
    if not float(pairs.values[0]) > 0:
        raise ModelError(
            "the mixed derivative is zero: the slope in the inputs does not depend on the parameters here (a network "
            "that is dead at the origin?). Give samples: at=x, which are averaged over."
        )
    values = pairs.values.clamp_min(0).sqrt()
    return Anisotropy(values, pairs.vectors.T.reshape(count, *derivative.shape), pairs.residual, derivative.kinks)


def separable(u: Array, n: int, *, epsilon: float = 1.0, sigma: float = 1.0, seed: int = 0) -> Labelled:
    """D(u): x = ε y u + w, w ~ N(0, σ²(I − u uᵀ)), y = ±1 with equal odds: n samples, separable along u alone.

    `u` of the shape of an input; it is brought to unit norm. The classes 0 and 1 are y = −1 and 1. Ortiz-Jiménez et
    al. 2021, appendix C.1 (the authors' code has ε/2 in place of ε).

    >>> data = separable(torch.tensor([0.0, 2.0]), 4, epsilon=0.5)
    >>> torch.equal(data.x[:, 1].sign() > 0, data.y == 1), data.x[:, 1].abs().tolist()
    (True, [0.5, 0.5, 0.5, 0.5])
    """
    direction = tree.from_array(u, "u") if isinstance(u, np.ndarray) else u
    if not isinstance(direction, Tensor) or direction.dim() == 0 or not direction.is_floating_point():
        raise InputError(f"u is {type(u).__name__}; needed: a tensor of real numbers, of the shape of an input.")
    checks.finite(direction, "u")
    norm = float(direction.norm())
    if not norm > 0:
        raise InputError("u is zero; needed: a direction.")
    checks.positive(n, "n", "samples")
    epsilon, sigma = checks.nonnegative(epsilon, "epsilon"), checks.nonnegative(sigma, "sigma")
    direction = direction.detach() / norm
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (n,), generator=generator)
    w = sigma * torch.randn(n, direction.numel(), generator=generator, dtype=direction.dtype)
    flat = direction.flatten().cpu()
    x = w - (w @ flat)[:, None] * flat + epsilon * (2.0 * y[:, None] - 1).to(w) * flat
    return Labelled(x.view(n, *direction.shape), y, ("−1", "+1"), name="D(u)")
