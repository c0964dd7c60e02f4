"""The finite networks behind the limit: their random weights, and their kernels in the same parametrisation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.types import Inputs
from ..errors import InputError
from ..kernels.kernel import Empirical, Prepared
from ..kernels.ntk import trace_ntk
from .layers.twin import Twin
from .layers.weights import Number, Parametrization, by_name, checked

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)


@dataclass(frozen=True)
class Role:
    """What a parameter is: a weight (of variance w_var/fan_in), a bias (b_var), or a norm's scale or shift."""

    kind: Literal["weight", "bias", "scale", "shift"]
    fan_in: int
    by: str  # the name that mappings of variances are asked for


def roles(module: nn.Module) -> dict[str, Role]:
    """The role of each parameter, by its name: what `draw` draws and `empirical_ntk` scales by.

    >>> roles(nn.Sequential(nn.Conv1d(4, 2, 3), nn.LayerNorm(5)))["0.weight"].fan_in
    12
    """
    found = {}
    for name, parameter in module.named_parameters():
        path, _, own = name.rpartition(".")
        owner = module.get_submodule(path)
        role = _role(owner, own, parameter)
        if role is None:
            raise InputError(
                f"parameter {name} is held by a {type(owner).__name__}; how it is used, and so its fan-in, cannot be "
                "told. Needed: Linear, Conv, Embedding, RNN, MultiheadAttention or norm layers. Put it into one."
            )
        kind, fan_in = role
        weight = "weight" if own in ("weight", "bias") else own.replace("bias", "weight")
        found[name] = Role(kind, fan_in, _outside(f"{path}.{weight}" if path else weight, module))
    if not found:
        raise InputError(f"{type(module).__name__} has no parameters; needed: a network with weights.")
    return found


def _outside(name: str, module: nn.Module) -> str:
    """A twin's halves go by the names of the network that they are copies of."""
    return name.partition(".")[2] if isinstance(module, Twin) else name


def _role(owner: nn.Module, own: str, p: Tensor) -> tuple[Literal["weight", "bias", "scale", "shift"], int] | None:
    if isinstance(owner, _NORMS):
        return ("shift" if own == "bias" else "scale"), 1
    if isinstance(owner, nn.Embedding):
        return "weight", 1
    if isinstance(owner, nn.modules.conv._ConvTransposeNd):
        return ("bias", 1) if own == "bias" else ("weight", owner.in_channels * prod(owner.kernel_size))
    if isinstance(owner, (nn.Linear, nn.modules.conv._ConvNd)):
        return ("bias", 1) if own == "bias" else ("weight", p[0].numel())
    if isinstance(owner, (nn.RNN, nn.RNNCell, nn.MultiheadAttention)):
        return ("bias", 1) if "bias" in own else ("weight", p.shape[-1])
    return None


def draw(
    module: nn.Module,
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
    check_variances(w_var, b_var, "ntk")
    if isinstance(module, Twin):
        draw(module.first, w_var=w_var, b_var=b_var, seed=seed, generator=generator)
        module.second.load_state_dict(module.first.state_dict())
        return module
    generator = torch.Generator().manual_seed(seed) if generator is None else generator
    with torch.no_grad():
        for name, role in roles(module).items():
            p = module.get_parameter(name)
            if role.kind in ("scale", "shift"):
                p.fill_(1.0 if role.kind == "scale" else 0.0)
                continue
            variance = _variance(role, w_var, b_var)
            p.copy_(variance**0.5 * torch.randn(p.shape, generator=generator, dtype=torch.float64))
        for layer in module.modules():
            if isinstance(layer, nn.Embedding) and layer.padding_idx is not None:
                layer.weight[layer.padding_idx] = 0.0
    return module


def scales(
    module: nn.Module, w_var: Number = 2.0, b_var: Number = 0.0, parametrization: Parametrization = "ntk"
) -> dict[str, float]:
    """How much each parameter's part of the tangent kernel counts: w_var/fan-in and b_var ("ntk"), or 1 ("standard").

    0 for those without requires_grad, unless none has it.

    >>> scales(nn.Linear(4, 2), w_var=2.0, b_var=0.1)
    {'weight': 0.5, 'bias': 0.1}
    """
    standard = parametrization == "standard"
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    found = {}
    for name, role in roles(module).items():
        found[name] = 1.0 if standard or role.kind in ("scale", "shift") else _variance(role, w_var, b_var)
    return {name: 0.0 if name in frozen and len(frozen) < len(found) else value for name, value in found.items()}


def _variance(role: Role, w_var: Number, b_var: Number) -> float:
    if role.kind == "bias":
        return by_name(b_var, role.by, "b_var")
    return by_name(w_var, role.by, "w_var") / role.fan_in


def check_variances(w_var: Any, b_var: Any, parametrization: str) -> None:
    """Numbers or mappings of numbers, at least 0; "init" is refused, for these weights are drawn."""
    if isinstance(w_var, str):
        raise InputError(f"w_var={w_var!r}; needed: a number, or a mapping from layer names to numbers.")
    checked(w_var, b_var, parametrization, 1.0)


@dataclass(frozen=True, eq=False)
class Scaled:
    """Σ_p scale_p ⟨∂f(x)/∂p, ∂f(y)/∂p⟩ over the parameters p, mean over outputs: the tangent kernel of √scale·p.

    Follows the module as it is trained. `prepare` keeps one moment of it, `between` compares two.
    """

    kernel: Empirical
    scale: Mapping[str, float]
    outputs: int

    @classmethod
    def of(cls, module: nn.Module, x: Inputs, scale: Mapping[str, float]) -> "Scaled":
        """The kernel over the parameters whose scale is not 0."""
        moving = [name for name, value in scale.items() if value]
        if not moving:
            raise InputError("all variances are 0, so no parameter counts. Give w_var > 0.")
        return cls(trace_ntk(module, train=moving), scale, forward(module, tree.take(x, slice(0, 1)))[0].numel())

    def prepare(self, x: Inputs) -> Prepared:
        """The gradients of all parameters at x, as they are now."""
        return self.kernel.prepare(self.kernel.ready(x))

    def between(self, a: Prepared, b: Prepared) -> Tensor:
        """The kernel of two prepared batches, which may be of two moments."""
        total: Tensor | None = None
        for name in a:
            if name in b:
                left = {name: a[name]}
                part = self.kernel.pair(left, left if a is b else {name: b[name]}) * (self.scale[name] / self.outputs)
                total = part if total is None else total + part
        if total is None:
            raise InputError("the outputs depend on none of the parameters that count. Check the module's forward.")
        return total.detach()


def empirical_ntk(
    module: nn.Module,
    x: Inputs,
    y: Inputs | None = None,
    *,
    w_var: Number = 2.0,
    b_var: Number = 0.0,
    parametrization: Parametrization = "ntk",
) -> Tensor:
    """Θ_m(x, y)[n, m] = Σ_p s_p·mean_c ⟨∂f_c(x)/∂p, ∂f_c(y)/∂p⟩ of a module; `infinite_ntk` is its limit.

    s = w_var/fan-in for weights and b_var for biases in the "ntk" parametrisation (a bias of variance 0 does not
    count), 1 in the "standard" one and for norms. Options as for `infinite_ntk`; `draw` draws such weights.

    >>> import tangency as tg
    >>> net, x = nn.Sequential(nn.Linear(3, 4096), nn.ReLU(), nn.Linear(4096, 1)), torch.eye(3)
    >>> near = tg.infinite.empirical_ntk(tg.infinite.draw(net), x)
    >>> bool((near - tg.infinite_ntk(net)(x)).abs().max() < 0.1)
    True
    """
    check_variances(w_var, b_var, parametrization)
    kernel = Scaled.of(module, x, scales(module, w_var, b_var, parametrization))
    a = kernel.prepare(x)
    return kernel.between(a, a if y is None else kernel.prepare(y))


def empirical_nngp(module: nn.Module, x: Inputs, y: Inputs | None = None) -> Tensor:
    """K_m(x, y)[n, m] = mean_c f_c(x)f_c(y) of a module with many outputs; `infinite_nngp` is its limit.

    Its error falls as (number of outputs)^-1/2, whatever the width; `readout_nngp` needs one output only.

    >>> net = draw(nn.Linear(2, 100_000), w_var=1.0)
    >>> empirical_nngp(net, torch.eye(2)).round(decimals=1)
    tensor([[0.5000, ...0.0000],
            [...0.0000, 0.5000]])
    """
    with torch.no_grad():
        left = forward(module, x).flatten(1)
        right = left if y is None else forward(module, y).flatten(1)
        return left @ right.T / left.shape[1]


def readout_nngp(
    module: nn.Module, x: Inputs, y: Inputs | None = None, *, w_var: Number = 2.0, b_var: Number = 0.0
) -> Tensor:
    """K_m(x, y)[n, m] = E f(x)f(y) over the last layer's weights, the others as they are: w_var·h(x)·h(y)/m + b_var.

    That is the last layer's part of `empirical_ntk`. Converges as the width grows, with one output, too. The outputs
    must be linear in the weights and biases of the layer that is called last.

    >>> net = draw(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> h = torch.relu(net[0](torch.eye(2))).detach()
    >>> torch.allclose(readout_nngp(net, torch.eye(2), w_var=2.0), 2 / 3 * h @ h.T)
    True
    """
    check_variances(w_var, b_var, "ntk")
    role = roles(module)
    kernel = Scaled.of(module, x, {name: _variance(role[name], w_var, b_var) for name in readout(module, x)})
    a = kernel.prepare(x)
    return kernel.between(a, a if y is None else kernel.prepare(y))


def readout(module: nn.Module, x: Inputs) -> tuple[str, ...]:
    """The parameters of the layer that is called last; refused if the outputs are not linear in them."""
    called: list[str] = []
    few = tree.take(x, slice(0, 2))
    holders = {name.rpartition(".")[0] for name, _ in module.named_parameters()}

    def note(path: str) -> Callable[..., None]:
        return lambda *_: called.append(path)

    hooks = [module.get_submodule(path).register_forward_hook(note(path)) for path in holders]
    try:
        with torch.no_grad():
            outputs = forward(module, few)
    finally:
        for hook in hooks:
            hook.remove()
    last = called[-1] if called else ""
    own = {name: p for name, p in module.named_parameters() if name.rpartition(".")[0] == last}
    with torch.no_grad():
        args, kwargs = tree.arguments(few)
        changed = torch.func.functional_call(module, {name: -2 * p for name, p in own.items()}, args, kwargs)
    if not called or not torch.allclose(changed, -2 * outputs, rtol=1e-4, atol=1e-5 * float(outputs.abs().max())):
        raise InputError(
            f"the outputs are not linear in the weights of the layer called last ({last or type(module).__name__}), so "
            "their covariance is not its part of the kernel. End with a linear layer, or use empirical_nngp."
        )
    return tuple(own)


def forward(module: nn.Module, x: Inputs) -> Tensor:
    """The module's outputs: one tensor, samples first."""
    args, kwargs = tree.arguments(x)
    outputs = module(*args, **kwargs)
    if not isinstance(outputs, Tensor):
        raise InputError(f"the module returns a {type(outputs).__name__}; needed: one tensor of outputs.")
    return outputs


def materialized(factory: Callable[[int], Any], width: int, x: Inputs) -> nn.Module:
    """The network of this width in float64, beside x, its lazy layers sized."""
    module = factory(width)
    if not isinstance(module, nn.Module):
        raise InputError(
            f"module_factory({width}) returned {type(module).__name__}; needed: an nn.Module. Write "
            "lambda width: nn.Sequential(…)."
        )
    device = next(v.device for _, v in tree.leaves(x))
    module = module.to(device, torch.float64)
    with torch.no_grad():
        forward(module, tree.take(x, slice(0, 1)))
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in module.parameters()):
        raise InputError(f"module_factory({width}) has lazy layers that its forward does not use. Remove them.")
    checks.evaluation_mode(module)
    return module
