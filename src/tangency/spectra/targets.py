"""The alignment of a target with a network's tangent kernel, without the Gram, and what it bounds.

Ortiz-Jiménez, Moosavi-Dezfooli & Frossard 2021, "What can linearized neural networks actually say about
generalization?": Lemma 1 and Theorem 1.
"""

import math
from itertools import islice

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.targets import signs
from .._base.types import Array, Float, Inputs, Numbers
from ..errors import InputError, ModelError
from ..kernels.empirical import Empirical
from .implicit import JacobianGram, Point, jacobian_gram
from .mixed_derivative import MixedDerivative


def jacobian_alignment(kernel: Empirical, x: Inputs, f: Numbers, *, batch: int | None = None) -> float:
    """α(f) = ‖E_x[f(x) ∇_θ f_θ(x)]‖² = fᵀ Θ f / n², from one weighted average of the Jacobian.

    `f`: the target at the samples: [n] for a kernel with one output (a head, `tg.pseudo_ntk`) or traced over its
    outputs, [n, c] for `tg.full_ntk`. Cost: one backward pass over all samples (c of them if traced), `batch` at a
    time (as for `jacobian_gram`), and some times the memory of the parameters; no Gram is formed. Ortiz-Jiménez et al.
    2021, Lemma 1.

    >>> import tangency as tg
    >>> net, x = tg.models.mlp([3, 16, 1]).double(), torch.randn(50, 3).double()
    >>> k, f = tg.trace_ntk(net), x[:, 0].sign()
    >>> alpha = tg.spectra.jacobian_alignment(k, x, f)
    >>> abs(alpha - float(f @ k(x) @ f) / 50**2) < 1e-10
    True
    """
    gram = jacobian_gram(kernel, x, batch=batch)
    weights = _target(f, gram)
    n, c = weights.shape[0], gram.outputs
    if not gram.trace:
        return _squared(gram.pull(weights[None])) / n**2
    every = (weights * e for e in torch.eye(c, dtype=weights.dtype, device=weights.device))
    parts = iter(lambda: list(islice(every, gram.chunk)), [])
    return math.fsum(_squared(gram.pull(torch.stack(part))) for part in parts) / n**2


def norm_bound(alpha: float, f: Numbers) -> float:
    """‖f‖_Θ² ≥ ‖f‖₂⁴ / α(f): the least norm that a target has in the kernel's space, E over the n samples in ‖f‖₂.

    ‖f‖_Θ² = fᵀ Θ⁻¹ f where Θ is invertible on the samples. `alpha`: of `jacobian_alignment` with the same `f`.
    A target that the kernel does not see (α = 0) has no finite norm. Ortiz-Jiménez et al. 2021, Lemma 1.

    >>> import tangency as tg
    >>> K, f = torch.diag(torch.tensor([4.0, 1.0])), torch.tensor([1.0, 1.0])
    >>> alpha = float(f @ K @ f) / 2**2
    >>> tg.spectra.norm_bound(alpha, f) <= float(f @ K.inverse() @ f)
    True
    """
    alpha = checks.nonnegative(alpha, "alpha")
    values = _function(f).double()
    if values.dim() not in (1, 2) or not values.numel():
        raise InputError(f"f has shape {tuple(values.shape)}; needed: the target at n samples, [n] or [n, c].")
    checks.finite(values, "f")
    largest = float(values.abs().max())
    if not largest > 0:
        raise InputError("f is 0 everywhere; needed: a target that is not.")
    if alpha == 0:
        return math.inf
    # (largest²)² may leave the range where the quotient does not.
    mean = float((values / largest).square().sum()) / len(values)
    return mean * largest * (mean * largest / alpha) * largest * largest


def linear_alignment(
    kernel: Empirical, u: Array, *, x: Inputs | None = None, samples: int = 1000, seed: int = 0, batch: int = 256
) -> Float[Tensor, " c"]:
    """α(g_u) = ‖E_x[∇²_{x,θ} f_θ(x)] u‖² for the linear target g_u(x) = uᵀx, x ~ N(0, 1), of each output.

    `u`: of an input's shape (and of norm 1, to be a direction). `x`: inputs to average over, for instance zeros [1, …],
    in place of `samples` drawn ones; no data are needed, and Stein's lemma takes the noise of f's values away. It needs
    derivatives that exist: networks with kinks (ReLU, max pooling) are refused.
    Cost: two backward passes over all samples for each output. Ortiz-Jiménez et al. 2021, Theorem 1, (7).

    >>> import tangency as tg
    >>> net = torch.nn.Linear(3, 1).double()
    >>> tg.spectra.linear_alignment(tg.trace_ntk(net), torch.tensor([1.0, 0.0, 0.0]), samples=64)  # ∂²f/∂x∂w = 1
    tensor([1.], dtype=torch.float64)
    """
    direction = tree.numbers(u, "u")
    if not direction.is_floating_point() or not direction.numel():
        raise InputError(f"u is {direction.dtype} of shape {tuple(direction.shape)}; needed: real numbers of an input.")
    checks.finite(direction, "u")
    checks.positive(samples, "samples", "inputs to draw")
    if x is None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(samples, *direction.shape, generator=generator, dtype=direction.dtype).to(direction.device)
    gram = jacobian_gram(kernel, x, batch=batch)
    if not isinstance(gram.x, Tensor) or gram.x.shape[1:] != direction.shape:
        shape = tuple(gram.x.shape[1:]) if isinstance(gram.x, Tensor) else "no tensor"
        raise InputError(f"an input has shape {shape} and u {tuple(direction.shape)}; needed: a u of an input's shape.")
    found = []
    for output in range(gram.outputs):
        derivative = MixedDerivative.of(gram.network, gram.x, output, batch)
        if derivative.kinks:
            raise ModelError(
                f"the network has {', '.join(derivative.kinks)}: second derivatives are lost where it bends, so that "
                "α would be wrong. Make it smooth (nn.GELU, average pooling), or take the definition, which needs "
                "none: tg.spectra.jacobian_alignment(kernel, x, x.flatten(1) @ u.flatten()) with many x ~ N(0, 1)."
            )
        found.append(float(derivative.times(direction.flatten()).double().square().sum()))
    return torch.tensor(found, dtype=torch.float64)


def _target(f: Numbers, gram: JacobianGram) -> Float[Tensor, "n c"]:
    """The target as weights [n, c] of the outputs; [n, 1] for a traced kernel, where each output has the same."""
    given = _function(f)
    n, c = gram.n, gram.outputs
    flat = given.dim() == 1 and (gram.trace or c == 1)
    wanted = [n] if gram.trace else [n, c]
    if list(given.shape) not in (wanted, [n, 1] if gram.trace or c == 1 else wanted) and not (flat and len(given) == n):
        raise InputError(
            f"f has shape {tuple(given.shape)} for {n} samples; needed: {wanted}"
            + (", one number for each sample." if gram.trace else ", one for each sample and output.")
        )
    checks.finite(given, "f")
    return given.reshape(n, -1).to(gram.device, gram.dtype)


def _function(f: Numbers) -> Tensor:
    """What a target function says of the samples; refuses classes, which have no size."""
    values = tree.numbers(f, "f")
    if values.is_floating_point() or signs(values):
        return values if values.is_floating_point() else values.double()
    raise InputError(
        f"f is {values.dtype}: numbers of classes are no values of a function. Give real numbers: of two classes ±1 "
        "(2.0 * f - 1), of several one-hot columns for tg.full_ntk, or f.double() if these are values."
    )


def _squared(point: Point) -> float:
    """‖·‖² over all parameters, summed in float64."""
    return math.fsum(float(v.double().square().sum()) for v in point.values())
