"""What one step of training does to the outputs, and which samples did it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._base import checks, tree
from .._base.misfit import in_words
from .._base.results import Result
from .._base.types import Float, Inputs, Numbers, PickedOutputs, Trainable
from ..errors import InputError
from ..kernels.empirical import Empirical
from ..kernels.ntk import full_ntk


def one_step(
    model: nn.Module,
    x: Inputs,
    x_batch: Inputs,
    y_batch: Numbers,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    lr: float,
    trainable: Trainable = None,
    outputs: PickedOutputs = None,
) -> Tensor:
    """f(x; θ') − f(x; θ) ≈ −lr·Σ_i Θ(x, x_i) ∂L/∂f(x_i) [n, m, c]: the share of each of the m samples of an SGD step.

    Summed over m it is the change of the outputs, up to O(lr²). `loss(f, y)` as in training, with its reduction.

    >>> import tangency as tg
    >>> net, x = tg.models.mlp([3, 8, 2]), torch.randn(5, 3)
    >>> shares = tg.dynamics.one_step(net, x, x[:3], torch.zeros(3, 2), loss=torch.nn.functional.mse_loss, lr=0.1)
    >>> shares.sum(1).shape
    torch.Size([5, 2])
    """
    kernel = full_ntk(model, trainable=trainable, outputs=outputs)
    z, y = _outputs(kernel, x_batch, "x_batch").requires_grad_(), tree.numbers(y_batch, "y_batch")
    if y.dim() == 0 or len(y) != len(z):
        raise InputError(
            f"x_batch has {len(z)} samples and y_batch has shape {tuple(y.shape)}; needed: a target for each sample, "
            f"[{len(z)}, …]."
        )
    with torch.enable_grad():
        value = loss(z, tree.cast_tensor(y, z.dtype, "y_batch"))
    if value.dim() != 0:
        raise InputError("the loss must give one number for the batch; use reduction='mean' or 'sum'.")
    (g,) = torch.autograd.grad(value, z)
    # n new samples with c outputs, m samples of the batch with d: kept apart over m.
    return -checks.nonnegative(lr, "lr") * torch.einsum("ncmd,md->nmc", kernel(x, x_batch), g)


@dataclass(frozen=True, eq=False, repr=False)
class Decomposition(Result):
    """q' − q ≈ lr·A K (p − q_u), factor by factor."""

    A: Float[Tensor, "n c c"]  # ∂q/∂z at the observed samples, diag(q) − q qᵀ
    K: Float[Tensor, "n c m d"]  # the full kernel between observed and updating samples
    gap: Float[Tensor, "m d"]  # p − q at the updating samples
    shares: Float[Tensor, "n m c"]  # of each updating sample in the change
    change: Float[Tensor, "n c"]


def learning_path(
    model: nn.Module,
    x: Inputs,
    x_update: Inputs,
    target: Numbers,
    *,
    lr: float,
    trainable: Trainable = None,
    outputs: PickedOutputs = None,
) -> Decomposition:
    """q^{t+1}(x) − q^t(x) = lr·A(x) K(x, x_u) (p(x_u) − q(x_u)) + O(lr²): one SGD step on the cross-entropy.

    `target`: the probabilities p [m, c], or classes [m]. For m updating samples the loss is their mean, and `shares`
    says what each one did. Ren, Guo & Sutherland 2022, "Better supervisory signals by observing…", Prop. 1.

    >>> import tangency as tg
    >>> net, x = tg.models.mlp([3, 8, 4]), torch.randn(5, 3)
    >>> tg.dynamics.learning_path(net, x, x[:1], torch.tensor([2]), lr=0.1).change.shape
    torch.Size([5, 4])
    """
    kernel = full_ntk(model, trainable=trainable, outputs=outputs)
    q, seen = (_outputs(kernel, v, name).softmax(1) for v, name in ((x, "x"), (x_update, "x_update")))
    target = tree.numbers(target, "target").to(q.device)
    if not target.is_floating_point():
        if target.dim() != 1 or (len(target) and not 0 <= int(target.min()) <= int(target.max()) < q.shape[1]):
            raise InputError(f"classes of shape {tuple(target.shape)}; needed: [m], from 0 to {q.shape[1] - 1}.")
        target = F.one_hot(target.long(), q.shape[1])
    if target.shape != seen.shape:
        raise InputError(f"target has shape {tuple(target.shape)}; needed: {tuple(seen.shape)} or [{len(seen)}].")
    # −∂L/∂z of the cross-entropy is p − q; ∂q/∂z is diag(q) − q qᵀ.
    gap = target.to(q) - seen
    slope = torch.diag_embed(q) - q[:, :, None] * q[:, None]
    k = kernel(x, x_update)
    shares = checks.nonnegative(lr, "lr") / len(gap) * torch.einsum("nbc,ncmd,md->nmb", slope, k, gap)
    return Decomposition(slope, k, gap, shares, shares.sum(1))


def _outputs(kernel: Empirical, x: Inputs, name: str) -> Tensor:
    """f(x) [n, c] by the kernel's own network, in its precision."""
    network = kernel.feature_map.network
    ready = kernel.ready(x, name)
    with torch.no_grad(), in_words(ready, name, network.computes):
        return network(network.state(), ready)
