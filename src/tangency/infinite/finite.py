"""The finite networks behind the limit: their random weights, and their kernels in the same parametrisation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._base import tree
from .._base.types import Inputs
from ..engine.network import check_evaluation_mode
from ..errors import InputError
from ..kernels.empirical import Empirical
from ..kernels.kernel import Prepared
from ..kernels.ntk import trace_ntk
from .layers.twin import Twin
from .layers.weights import Number, Parametrization, by_name, check_options

_NORM_LAYERS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


Kind = Literal["weight", "bias", "scale", "shift"]


class Role(NamedTuple):
    """What a parameter is: a weight (of variance w_var/fan_in), a bias (b_var), or a norm's scale or shift."""

    kind: Kind
    fan_in: int
    by: str  # the name that mappings of variances are asked for


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of each parameter, by its name: what `draw` draws and `empirical_ntk` scales by.

    >>> roles(nn.Sequential(nn.Conv1d(4, 2, 3), nn.LayerNorm(5)))["0.weight"].fan_in
    12
    """
    known = {}
    for name, parameter in model.named_parameters():
        path, _, attribute = name.rpartition(".")
        owner = model.get_submodule(path)
        role = _role(owner, attribute, parameter)
        if role is None:
            raise InputError(
                f"parameter {name} is held by a {type(owner).__name__}; how it is used, and so its fan-in, cannot be "
                "told. Needed: Linear, Conv, Embedding, RNN, MultiheadAttention or norm layers. Put it into one."
            )
        kind, fan_in = role
        # A bias goes by its weight's name, which mappings of variances know.
        weight = "weight" if attribute in ("weight", "bias") else attribute.replace("bias", "weight")
        by = f"{path}.{weight}" if path else weight
        if isinstance(model, Twin):  # its halves go by the names of the network that they are copies of
            by = by.partition(".")[2]
        known[name] = Role(kind, fan_in, by)
    if not known:
        raise InputError(f"{type(model).__name__} has no parameters; needed: a network with weights.")
    return known


def _role(owner: nn.Module, attribute: str, p: Tensor) -> tuple[Kind, int] | None:
    """The kind and fan-in of a parameter, by the layer that holds it; None where that does not tell."""
    if isinstance(owner, _NORM_LAYERS):
        return ("shift" if attribute == "bias" else "scale"), 1
    # A row is looked up, not summed over.
    if isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
        return "weight", 1
    if isinstance(owner, nn.Bilinear):
        return ("bias", 1) if attribute == "bias" else ("weight", p[0].numel())
    # Its weights are [in, out, *window], so the first entry is not one output's.
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):
        return (
            ("bias", 1)
            if attribute == "bias"
            else ("weight", owner.in_channels // owner.groups * prod(owner.kernel_size))
        )
    if isinstance(owner, (nn.Linear, nn.modules.conv._ConvNd)):
        return ("bias", 1) if attribute == "bias" else ("weight", p[0].numel())
    if isinstance(owner, (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)):
        return ("bias", 1) if "bias" in attribute else ("weight", p.shape[-1])
    return None


def draw(
    model: nn.Module,
    *,
    w_var: Number = 2.0,
    b_var: Number = 0.0,
    seed: int = 0,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """W ~ N(0, w_var/fan-in), b ~ N(0, b_var): all weights of a module anew, in place, as the limit supposes them.

    Variances are numbers or mappings by layer name, as in `infinite_ntk`. Norms get scale 1 and shift 0, and the row of
    an Embedding's padding_idx zeros. Both halves of a `Twin` get the same. Drawn in float64 on the CPU, so the same on
    every device.

    >>> net = draw(nn.Linear(400, 300), w_var=3.0, b_var=0.1, seed=1)
    >>> round(net.weight.var().item() * 400, 2)
    3.0
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module, whose weights are drawn anew.")
    check_variances(w_var, b_var, "ntk")
    # The same weights in both halves, so that they cancel.
    if isinstance(model, Twin):
        draw(model.first, w_var=w_var, b_var=b_var, seed=seed, generator=generator)
        model.second.load_state_dict(model.first.state_dict())
        return model
    generator = torch.Generator().manual_seed(seed) if generator is None else generator
    with torch.no_grad():
        for name, role in roles(model).items():
            p = model.get_parameter(name)
            if role.kind in ("scale", "shift"):
                p.fill_(1.0 if role.kind == "scale" else 0.0)
                continue
            variance = _variance(role, w_var, b_var)
            # In float64 on the CPU, then rounded: the same numbers for every dtype and device.
            p.copy_(variance**0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        for layer in model.modules():
            if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.padding_idx is not None:
                layer.weight[layer.padding_idx] = 0.0
    return model


def scales(
    model: nn.Module, w_var: Number = 2.0, b_var: Number = 0.0, parametrization: Parametrization = "ntk"
) -> dict[str, float]:
    """How much each parameter's part of the tangent kernel counts: w_var/fan-in and b_var ("ntk"), or 1 ("standard").

    0 for those without requires_grad, unless none has it.

    >>> scales(nn.Linear(4, 2), w_var=2.0, b_var=0.1)
    {'weight': 0.5, 'bias': 0.1}
    """
    standard = parametrization == "standard"
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    factors = {}
    for name, role in roles(model).items():
        factors[name] = 1.0 if standard or role.kind in ("scale", "shift") else _variance(role, w_var, b_var)
    return {name: 0.0 if name in frozen and len(frozen) < len(factors) else f for name, f in factors.items()}


def _variance(role: Role, w_var: Number, b_var: Number) -> float:
    """Of one entry of a weight or bias."""
    if role.kind == "bias":
        return by_name(b_var, role.by, "b_var")
    return by_name(w_var, role.by, "w_var") / role.fan_in


def check_variances(w_var: object, b_var: object, parametrization: str) -> None:
    """Numbers or mappings of numbers, at least 0; "init" is refused, for these weights are drawn."""
    if isinstance(w_var, str):
        raise InputError(f"w_var={w_var!r}; needed: a number, or a mapping from layer names to numbers.")
    check_options(w_var, b_var, parametrization, 1.0)


@dataclass(frozen=True, eq=False)
class Scaled:
    """Σ_p scale_p ⟨∂f(x1)/∂p, ∂f(x2)/∂p⟩ over the parameters p, mean over outputs: the tangent kernel of √scale·p.

    Follows the module as it is trained. `prepare` keeps one moment of it, `between` compares two.
    """

    kernel: Empirical
    scale: Mapping[str, float]
    outputs: int

    @classmethod
    def of(cls, model: nn.Module, x: Inputs, scale: Mapping[str, float]) -> "Scaled":
        """The kernel over the parameters whose scale is not 0."""
        moving = [name for name, value in scale.items() if value]
        if not moving:
            raise InputError("all variances are 0, so no parameter counts. Give w_var > 0.")
        first = tree.take(tree.suited(x, model), slice(0, 1))
        return cls(trace_ntk(model, trainable=moving), scale, network_outputs(model, first)[0].numel())

    def prepare(self, x: Inputs) -> Prepared:
        """The gradients of all parameters at x, as they are now."""
        return self.kernel.prepare(self.kernel.ready(x))

    def between(self, a: Prepared, b: Prepared) -> Tensor:
        """The kernel of two prepared batches, which may be of two moments."""
        total: Tensor | None = None
        # A parameter that an output does not depend on is missing from a prepared batch.
        for name in a:
            if name in b:
                left = {name: a[name]}
                part = self.kernel.pair(left, left if a is b else {name: b[name]}) * (self.scale[name] / self.outputs)
                total = part if total is None else total + part
        if total is None:
            raise InputError("the outputs depend on none of the parameters that count. Check the module's forward.")
        return total.detach()


def empirical_ntk(
    model: nn.Module,
    x1: Inputs,
    x2: Inputs | None = None,
    *,
    w_var: Number = 2.0,
    b_var: Number = 0.0,
    parametrization: Parametrization = "ntk",
) -> Tensor:
    """Θ_m(x1, x2)[n, m] = Σ_p s_p·mean_c ⟨∂f_c(x1)/∂p, ∂f_c(x2)/∂p⟩ of a module; `infinite_ntk` is its limit.

    s = w_var/fan-in for weights and b_var for biases in the "ntk" parametrisation (a bias of variance 0 does not
    count), 1 in the "standard" one and for norms. Options as for `infinite_ntk`; `draw` draws such weights.

    >>> import tangency as tg
    >>> net, x = nn.Sequential(nn.Linear(3, 4096), nn.ReLU(), nn.Linear(4096, 1)), torch.eye(3)
    >>> near = tg.infinite.empirical_ntk(tg.infinite.draw(net), x)
    >>> bool((near - tg.infinite_ntk(net)(x)).abs().max() < 0.1)
    True
    """
    check_variances(w_var, b_var, parametrization)
    kernel = Scaled.of(model, x1, scales(model, w_var, b_var, parametrization))
    a = kernel.prepare(x1)
    return kernel.between(a, a if x2 is None else kernel.prepare(x2))


def empirical_nngp(model: nn.Module, x1: Inputs, x2: Inputs | None = None) -> Tensor:
    """K_m(x1, x2)[n, m] = mean_c f_c(x1)f_c(x2) of a module with many outputs; `infinite_nngp` is its limit.

    Its error falls as (number of outputs)^-1/2, whatever the width; `readout_nngp` needs one output only.

    >>> net = draw(nn.Linear(2, 100_000), w_var=1.0)
    >>> empirical_nngp(net, torch.eye(2)).round(decimals=1)
    tensor([[0.5000, ...0.0000],
            [...0.0000, 0.5000]])
    """
    with torch.no_grad():
        first = network_outputs(model, x1)
        second = first if x2 is None else network_outputs(model, x2)
        left, right = (v.reshape(len(v), -1) for v in (first, second))  # outputs [n] are one each
        return left @ right.T / left.shape[1]


def readout_nngp(
    model: nn.Module, x1: Inputs, x2: Inputs | None = None, *, w_var: Number = 2.0, b_var: Number = 0.0
) -> Tensor:
    """K_m(x1, x2)[n, m] = E f(x1)f(x2) over the last layer's weights, the others as they are: w_var·h·h/m + b_var.

    That is the last layer's part of `empirical_ntk`. Converges as the width grows, with one output, too. The outputs
    must be linear in the weights and biases of the layer that is called last.

    >>> net = draw(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> h = torch.relu(net[0](torch.eye(2))).detach()
    >>> torch.allclose(readout_nngp(net, torch.eye(2), w_var=2.0), 2 / 3 * h @ h.T)
    True
    """
    check_variances(w_var, b_var, "ntk")
    role = roles(model)
    kernel = Scaled.of(model, x1, {name: _variance(role[name], w_var, b_var) for name in readout(model, x1)})
    a = kernel.prepare(x1)
    return kernel.between(a, a if x2 is None else kernel.prepare(x2))


def readout(model: nn.Module, x: Inputs) -> tuple[str, ...]:
    """The parameters of the layer that is called last; refused if the outputs are not linear in them."""
    called: list[str] = []
    few = tree.take(tree.suited(x, model), slice(0, 2))
    # Which layer is called last is seen by hooks, for the order of registration need not be that of the calls.
    holders = {name.rpartition(".")[0] for name, _ in model.named_parameters()}

    def note(path: str) -> Callable[..., None]:
        """A hook that writes down which layer was called."""
        return lambda *_: called.append(path)

    hooks = [model.get_submodule(path).register_forward_hook(note(path)) for path in holders]
    try:
        with torch.no_grad():
            outputs = network_outputs(model, few)
    finally:
        for hook in hooks:
            hook.remove()
    last = called[-1] if called else ""
    weights = {name: p for name, p in model.named_parameters() if name.rpartition(".")[0] == last}
    with torch.no_grad():
        args, kwargs = tree.arguments(few)
        # −2 tells what is linear from what is even, or of another degree.
        scaled = torch.func.functional_call(model, {name: -2 * p for name, p in weights.items()}, args, kwargs)
    if not called or not torch.allclose(scaled, -2 * outputs, rtol=1e-4, atol=1e-5 * float(outputs.abs().max())):
        raise InputError(
            f"the outputs are not linear in the weights of the layer called last ({last or type(model).__name__}), so "
            "their covariance is not its part of the kernel. End with a linear layer, or use empirical_nngp."
        )
    return tuple(weights)


def network_outputs(model: nn.Module, x: Inputs) -> Tensor:
    """The module's outputs: one tensor, samples first."""
    args, kwargs = tree.arguments(tree.suited(x, model))
    outputs = model(*args, **kwargs)
    if not isinstance(outputs, Tensor):
        raise InputError(f"the module returns a {type(outputs).__name__}; needed: one tensor of outputs.")
    return outputs


def materialized(factory: Callable[[int], nn.Module], width: int, x: Inputs) -> nn.Module:
    """The network of this width in float64, beside x, its lazy layers sized."""
    module = factory(width)
    if not isinstance(module, nn.Module):
        raise InputError(
            f"module_factory({width}) returned {type(module).__name__}; needed: an nn.Module. Write "
            "lambda width: nn.Sequential(…)."
        )
    # float64, as the limit is computed: differences that fall as 1/width must not end in rounding.
    device = next(v.device for _, v in tree.leaves(x))
    module = module.to(device, torch.float64)
    with torch.no_grad():
        network_outputs(module, tree.take(x, slice(0, 1)))
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise InputError(f"module_factory({width}) has lazy layers that its forward does not use. Remove them.")
    check_evaluation_mode(module)
    return module
