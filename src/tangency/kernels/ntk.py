"""The kernels of a finite network, as users call them."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch  # noqa: F401 - for the examples
from torch import Tensor, nn

from .._base.types import Params, PickedOutputs, Trainable
from ..engine import narrow
from ..engine.directions import Directions, Probes
from ..engine.features import Jacobian
from ..engine.heads import Head, head_arity
from ..engine.hidden import Hidden, default_layers, layer_names
from ..engine.methods import Method, check_method
from ..engine.network import Network
from ..errors import InputError, PerformanceWarning
from .empirical import Empirical


def _tangent(
    name: str, model: nn.Module, *, trace: bool, method: Method, directions: tuple[Directions, ...] = (), **options: Any
) -> Empirical:
    """What the tangent kernels share: a network, checked, and its Jacobian."""
    network = replace(Network.of(model, **options), directions=directions)
    check_method(method, network.trainable)
    device = next(network.model.parameters()).device
    if network.eight and not narrow.available(device):
        warnings.warn(
            f"dtype='float8' on {device}, which does not multiply 8-bit numbers (CUDA cards do from compute capability "
            "8.9 on): the same numbers are multiplied in more bits, slower than with dtype='float16'.",
            PerformanceWarning,
            stacklevel=3,
        )
    return Empirical(name, Jacobian(network), trace=trace, method=method)


def _probes(probes: int | None, seed: int) -> tuple[Directions, ...]:
    """The random directions of the outputs that were asked for, checked."""
    if probes is None:
        return ()
    if not isinstance(probes, int) or isinstance(probes, bool) or probes < 2:
        raise InputError(
            f"probes={probes!r}; needed: a whole number of random directions, at least 2 (of one alone the error "
            "cannot be measured), or None for the exact trace."
        )
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**64:
        raise InputError(f"seed={seed!r}; needed: a whole number from 0 to 2⁶⁴ − 1.")
    return (Probes(probes, seed),)


def full_ntk(
    model: nn.Module,
    *,
    params: Params | None = None,
    trainable: Trainable = None,
    outputs: PickedOutputs = None,
    dtype: object = None,
    method: Method = None,
) -> Empirical:
    """Θ(x1, x2)[n, c, m, d] = ⟨∂f_c(x1_n)/∂θ, ∂f_d(x2_m)/∂θ⟩, so that reshape(n·c, m·d) is J Jᵀ.

    `params`: a state dict, for the kernel at a checkpoint. `trainable`: which parameters count, by name, module,
    predicate or a list of these (default: those with requires_grad). `outputs`: picks the tensor out of what the model
    returns. `dtype`: float64, float32, and on CUDA 'tf32', float16 and 'float8'. `method`: forces 'expand' or 'in
    place', on every layer or, as a dict, on the parameters that it names.

    >>> model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    >>> full_ntk(model)(x).shape
    torch.Size([4, 2, 4, 2])
    """
    return _tangent(
        "full ntk", model, trace=False, method=method, params=params, trainable=trainable, outputs=outputs, dtype=dtype
    )


def trace_ntk(
    model: nn.Module,
    *,
    params: Params | None = None,
    trainable: Trainable = None,
    outputs: PickedOutputs = None,
    dtype: object = None,
    method: Method = None,
    probes: int | None = None,
    seed: int = 0,
) -> Empirical:
    """trNTK⁰(x1, x2)[n, m] = Σ_c ⟨∂f_c(x1)/∂θ, ∂f_c(x2)/∂θ⟩, a sum over outputs; `cosine` of it is trNTK.

    Options as for `full_ntk`. Engel et al. 2024, "Faithful and efficient explanations…", (4).

    `probes`: for networks of many outputs, an estimate by so many random directions v_r of the outputs, of signs drawn
    with `seed`, in place of all of them: 1/k Σ_r ⟨J(x1)ᵀv_r, J(x2)ᵀv_r⟩, where E[v vᵀ] = 1. It is unbiased, and as the
    directions are the same for all samples it is symmetric and positive semidefinite. Cost: k backward passes in place
    of c; the error falls as 1/√k (`probe_error` measures it).

    >>> model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    >>> k = trace_ntk(model)
    >>> torch.allclose(k(x), 2 * (1 + x @ x.T), atol=1e-5)  # a linear model: Σ_c (1 + x·x')
    True
    """
    return _tangent(
        "trace ntk",
        model,
        trace=True,
        method=method,
        directions=_probes(probes, seed),
        params=params,
        trainable=trainable,
        outputs=outputs,
        dtype=dtype,
    )


def pseudo_ntk(
    model: nn.Module,
    *,
    params: Params | None = None,
    trainable: Trainable = None,
    outputs: PickedOutputs = None,
    dtype: object = None,
    method: Method = None,
) -> Empirical:
    """pNTK(x1, x2)[n, m] = ⟨∂F(x1)/∂θ, ∂F(x2)/∂θ⟩ with F = Σ_c f_c/√C: one backward pass whatever C is.

    Options as for `full_ntk`. Mohamadi, Bae & Sutherland 2023, "A fast, well-founded approximation to the eNTK".

    >>> model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    >>> torch.allclose(pseudo_ntk(model)(x), 1 + x @ x.T, atol=1e-5)
    True
    """
    return _tangent(
        "pseudo ntk",
        model,
        trace=True,
        method=method,
        params=params,
        trainable=trainable,
        outputs=outputs,
        head=_mean_head,
        dtype=dtype,
    )


# Its code and its name are part of the spec in stores: changed, they would refuse every pseudo-NTK that exists.
def _mean_head(out: Tensor) -> Tensor:
    flat = out.flatten(1) if out.dim() > 1 else out[:, None]
    return flat.sum(1) / flat.shape[1] ** 0.5


def head_ntk(
    model: nn.Module,
    head: Head,
    *,
    params: Params | None = None,
    trainable: Trainable = None,
    outputs: PickedOutputs = None,
    dtype: object = None,
    method: Method = None,
    probes: int | None = None,
    seed: int = 0,
) -> Empirical:
    """k(x1, x2)[n, m] = Σ_h ⟨∂h(f(x1))/∂θ, ∂h(f(x2))/∂θ⟩ for any differentiable function h of the outputs.

    `head` is an output's number, a pair (a, b) for f_a − f_b, or a function from outputs [n, …] to [n] or [n, c]. One
    that takes more arguments (a loss takes labels) gets the last elements of the inputs: `k((x, labels))`.
    Other options as for `full_ntk`; `probes` and `seed`, for heads of many outputs, as for `trace_ntk`.

    >>> model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    >>> head_ntk(model, (0, 1))(x).shape
    torch.Size([4, 4])
    """
    if head is None:
        raise InputError("head=None; needed: an output's number, a pair of them, or a function of the outputs.")
    if isinstance(head, tuple) and (len(head) != 2 or not all(isinstance(j, int) for j in head)):
        raise InputError(f"head={head!r}; a tuple must be two output numbers (a, b) for f_a − f_b.")
    # Here, not when it is first called: what is no head should be said where it was given.
    head_arity(head)
    return _tangent(
        "head ntk",
        model,
        trace=True,
        method=method,
        directions=_probes(probes, seed),
        params=params,
        trainable=trainable,
        outputs=outputs,
        head=head,
        dtype=dtype,
    )


def conjugate_kernel(
    model: nn.Module,
    *,
    layer: str | None = None,
    bias: bool = True,
    params: Params | None = None,
    outputs: PickedOutputs = None,
    dtype: object = None,
) -> Empirical:
    """CK(x1, x2)[n, m] = 1 + z(x1)·z(x2), z the last hidden layer (the input of the last linear or convolutional one).

    `layer` names a module whose output is z instead; `bias=False` leaves the 1 out. Cost: one forward pass.
    Qadeer et al., "Efficient kernel surrogates…", (29); Fan & Wang 2020.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)), torch.randn(4, 3)
    >>> z = model[0](x)
    >>> torch.allclose(conjugate_kernel(model)(x), 1 + z @ z.T, atol=1e-5)
    True
    """
    # No gradient is taken, so all parameters may be frozen.
    network = Network.of(model, params=params, trainable=lambda name, p: True, outputs=outputs, dtype=dtype)
    layers = None if layer is None else layer_names(network.model, layer)
    return Empirical("conjugate kernel", Hidden(network, layers, bias), trace=True)


def embedding_kernel(
    model: nn.Module,
    *,
    layers: Sequence[str] | str | None = None,
    params: Params | None = None,
    outputs: PickedOutputs = None,
    dtype: object = None,
) -> Empirical:
    """Em(x1, x2)[n, m] = Σ_l z_l(x1)·z_l(x2) over the outputs z_l of the chosen modules.

    By default the model's children but the last. `k.parts` gives each layer's Gram matrix. Cost: one forward pass.

    >>> model, x = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)), torch.randn(4, 3)
    >>> z = model[0](x)
    >>> torch.allclose(embedding_kernel(model, layers="0")(x), z @ z.T, atol=1e-5)
    True
    """
    network = Network.of(model, params=params, trainable=lambda name, p: True, outputs=outputs, dtype=dtype)
    chosen = default_layers(network.model) if layers is None else layers
    return Empirical("embedding kernel", Hidden(network, layer_names(network.model, chosen), bias=False), trace=True)
