"""Whether a module does what its class says. What would change that unseen is refused by name, never passed over.

Hooks, weights that are made of other parameters (weight norm, pruning), and code of an instance's own run in a module's
call, but are no part of the layer that its class is read as.
"""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrize

from ...errors import InputError, UnsupportedModule
from ..layers.weights import dotted

# Where torch keeps a module's hooks, and what messages call them; "_global" before it: those of all modules.
_HOOK_TABLES = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}

# torch's own reparametrisations: the class that makes the weight, its public name, and what takes it off again.
_MADE_BY = {
    "torch.nn.utils.weight_norm.WeightNorm": ("torch.nn.utils.weight_norm", "torch.nn.utils.remove_weight_norm"),
    "torch.nn.utils.spectral_norm.SpectralNorm": (
        "torch.nn.utils.spectral_norm",
        "torch.nn.utils.remove_spectral_norm",
    ),
    **{
        f"torch.nn.utils.parametrizations._{kind}": (f"torch.nn.utils.parametrizations.{name}", "")
        for kind, name in (
            ("WeightNorm", "weight_norm"),
            ("SpectralNorm", "spectral_norm"),
            ("Orthogonal", "orthogonal"),
        )
    },
}


def check_module(module: nn.Module, name: str) -> None:
    """Refuse a module whose call is more than its forward(), or whose weights are made elsewhere."""
    where = f"{'layer ' + name if name else 'the module'} ({_kind(module)})"
    # Shapes and fan-ins are not known before the first call of a lazy layer.
    if any(isinstance(p, nn.UninitializedParameter) for p in module._parameters.values()):
        raise InputError(f"{where}: is lazy and has no weights yet. Call the model once first.")
    _check_wrapped(module, where)
    _check_made(module, name, where)
    # Even backward hooks: they may change the gradients that the tangent kernel is made of.
    for table, kind in _HOOK_TABLES.items():
        if hooks := list(getattr(module, table, {}).values()):
            raise UnsupportedModule(
                f"{where}: has a {kind}, {_hook_name(hooks[0])}, which may change what it computes; the limit is "
                "that of the layers alone. Remove it (the handle's .remove()), or write what it does into forward()."
            )
        if hooks := list(getattr(torch_module, f"_global{table}", {}).values()):
            raise UnsupportedModule(
                f"{where}: torch has a global {kind}, {_hook_name(hooks[0])}, which may change what modules "
                "compute. Remove it (the handle's .remove())."
            )


def _check_wrapped(module: nn.Module, where: str) -> None:
    """Modules around another one, whose forward() fx cannot enter."""
    inner = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
    if type(module).__name__ in inner and isinstance(getattr(module, inner[type(module).__name__], None), nn.Module):
        raise UnsupportedModule(f"{where}: wraps another module. Give that one: model.{inner[type(module).__name__]}.")
    if isinstance(module, torch.jit.ScriptModule):
        raise UnsupportedModule(
            f"{where}: is TorchScript, whose forward() torch.fx cannot read. Give the nn.Module that it was made of."
        )


def check_leaf(module: nn.Module, name: str) -> None:
    """Refuse a layer of torch's, or one inside it, that is not read as what it is."""
    for label, m in module.named_modules(prefix=name):
        check_module(m, label)
        where = f"{'layer ' + label if label else 'the module'} ({_kind(m)})"
        # An instance's own forward hides that of its class, by which it would be read.
        if "forward" in vars(m):
            raise UnsupportedModule(
                f"{where}: its forward was replaced on the instance, so it is not a {_kind(m)} any more. Write a class "
                "with that forward."
            )
        if not _plain(m) and m is not module and (_of_torch(m) or any(True for _ in m.parameters())):
            raise UnsupportedModule(
                f"{where}: is a class of its own inside {name or 'the module'} ({_kind(module)}), which is read as "
                "torch has it. Use torch's own layers there, or write the outer module's forward yourself."
            )
        _check_names(m, label, where)


def check_root(module: nn.Module) -> None:
    """What tracing would pass over at the outermost module alone: its own __call__, its instance's own forward."""
    check_module(module, "")
    if type(module).__call__ is not nn.Module.__call__ and not isinstance(module, torch.fx.GraphModule):
        raise UnsupportedModule(
            f"the module ({_kind(module)}): has a __call__ of its own, which would be passed over. Put the module into "
            "another one whose forward() calls it, or move what it does into forward()."
        )
    if "forward" in vars(module) and not isinstance(module, torch.fx.GraphModule):
        raise UnsupportedModule(
            f"the module ({_kind(module)}): its forward was replaced on the instance; that of the class would be read. "
            "Write a class with that forward."
        )


def exact(module: nn.Module) -> bool:
    """Whether its class is torch's own, with nothing overridden."""
    kind = type(module)
    # nn.MultiheadAttention's out_proj is of a class that torch keeps beside Linear, for quantisation alone.
    return kind is getattr(nn, kind.__name__, None) or kind is NonDynamicallyQuantizableLinear


def _plain(module: nn.Module) -> bool:
    """Whether nothing of it is the user's own code; what is made by a parametrization is refused elsewhere."""
    return exact(module) or isinstance(module, parametrize.ParametrizationList)


def _of_torch(module: nn.Module) -> bool:
    """Whether it derives from one of torch's layers."""
    return any(k is not nn.Module and k.__module__.startswith("torch.nn.modules") for k in type(module).__mro__)


def _check_made(module: nn.Module, name: str, where: str) -> None:
    """Weights made by a parametrization, or by a hook before forward()."""
    if isinstance(module, parametrize.ParametrizationList):  # a weight is asked for without its module being called
        owner, _, attribute = name.rpartition(".parametrizations.")
        raise _made(where, dotted(owner, attribute), module, attribute)
    if parametrize.is_parametrized(module):
        attribute, by = next(iter(module.parametrizations.items()))  # type: ignore[operator,union-attr]
        raise _made(where, dotted(name, attribute), by, attribute)
    # The older reparametrisations and pruning make the weight in a hook: said by name, before hooks in general are.
    for hook in module._forward_pre_hooks.values():
        by = f"{type(hook).__module__}.{type(hook).__name__}"
        weight = str(getattr(hook, "name", None) or getattr(hook, "_tensor_name", None))
        if by in _MADE_BY:
            called, fix = _MADE_BY[by]
            raise _reparametrized(where, dotted(name, weight), called, f"{fix}(module)")
        if by.startswith("torch.nn.utils.prune."):
            fix = f'torch.nn.utils.prune.remove(module, "{weight}")'
            raise _reparametrized(where, dotted(name, weight), by, fix)


def _made(where: str, weight: str, by: Iterable[object], attribute: str) -> UnsupportedModule:
    kinds = [f"{type(p).__module__}.{type(p).__name__}" for p in by]
    called = ", ".join(_MADE_BY.get(k, (k, ""))[0] for k in kinds)
    fix = f'torch.nn.utils.parametrize.remove_parametrizations(module, "{attribute}")'
    return _reparametrized(where, weight, called, fix)


def _reparametrized(where: str, weight: str, called: str, fix: str) -> UnsupportedModule:
    return UnsupportedModule(
        f"{where}: {weight} is made by {called} of other parameters, whose infinite-width limit is not known here. "
        f"Take it off first: {fix}, which leaves a plain weight."
    )


def _check_names(m: nn.Module, name: str, where: str) -> None:
    """The parameters that its class reads, under their names, and no others."""
    # A parameter that torch's class does not know would be passed over, one in another's place read as it.
    names = set(_parameters(m))
    if more := sorted(set(m._parameters) - names):
        raise UnsupportedModule(
            f"{where}: has the parameter {dotted(name, more[0])}, which {_kind(m)} does not know, so what is done with "
            "it cannot be told. Remove it, or write a class whose forward uses it."
        )
    for known in names:
        value = m._parameters[known] if known in m._parameters else getattr(m, known, None)
        if value is not None and not isinstance(value, nn.Parameter) and isinstance(value, (Tensor, torch.fx.Proxy)):
            held = "a buffer" if known in m._buffers else "an attribute or a tensor in its place"
            raise UnsupportedModule(
                f"{where}: {dotted(name, known)} is {held}, not a parameter, so what it is made of and whether it is "
                f"trained cannot be told. Make it a parameter: module.{known} = nn.Parameter(…); requires_grad_(False) "
                "or trainable= freezes it."
            )


def _parameters(m: nn.Module) -> Iterator[str]:
    """The names of the parameters that torch's class of this module reads."""
    if isinstance(m, nn.RNNBase):
        yield from m._flat_weights_names
    elif isinstance(m, nn.MultiheadAttention):
        yield from ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias")
        yield from ("bias_k", "bias_v")
    elif isinstance(m, nn.RNNCellBase):
        yield from ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    else:
        yield from ("weight", "bias")


def _kind(module: nn.Module) -> str:
    """Its class; that which was parametrized, where torch made one of it."""
    kind = type(module)
    # torch.nn.utils.parametrize gives each parametrized module a class of its own, "ParametrizedLinear".
    parametrized = kind.__module__ == "torch.nn.utils.parametrize" and kind.__name__.startswith("Parametrized")
    return kind.__bases__[0].__name__ if parametrized else kind.__name__


def _hook_name(hook: object) -> str:
    """A hook's function, as code names it."""
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', None) or type(hook).__module__}.{name}"
