"""Which rule reads which function of torch; torch.nn.functional's layers become the modules that they belong to."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...errors import UnsupportedModule
from ..layers.spatial import Conv
from ..moments.channels import take_channels
from ..moments.fields import Builder
from ..moments.functions import apply_function, scale_by
from ..moments.joins import multiply_fields
from ..moments.values import Field, Random, Unsettled
from . import gates, norms, products, rearranged, shuffles
from .arithmetic import (
    read_addmm,
    read_baddbmm,
    read_einsum,
    read_elementwise,
    read_extreme,
    read_linear,
    read_masked_fill,
    read_matmul,
    read_power,
    read_product,
    read_sum,
    read_where,
)
from .attention import Scores, read_repeat_interleave, read_sdpa, take_softmax
from .batch_norm import read_batch_norm
from .biases import FORMS as BIAS_FORMS
from .biases import PositionBias, or_bias
from .calls import QUESTIONS, RANDOM, Call, Keywords, Parameter, Rule, TorchFunction
from .joining import read_cat, read_pad, read_stack
from .modules import interpolated, read_module, reads
from .tensors import (
    full_shape,
    read_attribute,
    read_cast,
    read_expand,
    read_flatten,
    read_item,
    read_movedim,
    read_narrow,
    read_new,
    read_parts,
    read_permute,
    read_reshape,
    read_select,
    read_size,
    read_split,
    read_squeeze,
    read_transpose,
    read_unbind,
    read_unflatten,
    read_unsqueeze,
)
from .windows import read_amax, read_max

REFUSED: set[Rule] = set()  # rules that only say why there is none
AS_VALUES: tuple[Rule, ...] = (read_sum, read_cat)  # rules that take a parameter as a value of its own


def _as_module(kind: Callable[..., nn.Module], *names: str) -> Rule:
    """The rule of a functional form whose options, in this order, are those of a module."""

    def read(call: Call) -> object:
        """The value after a module with the call's options."""
        options = call.named("input", *names)
        value, training = options.pop("input"), options.pop("training", True)
        return _through(kind(**options).train(bool(training)), value, call)

    return read


def _through(module: nn.Module, value: object, call: Call) -> object:
    """The value after a module without parameters that stands for a function."""
    return read_module(module, replace(call, args=(value,), kwargs=Keywords(), name=""))


def _refusal(what: str, instead: str) -> Rule:
    """The rule of a function without a limit."""

    def refuse(call: Call) -> object:
        """Always an error."""
        raise call.build.unsupported(what, instead)

    REFUSED.add(refuse)
    return refuse


def no_rule(build: Builder) -> UnsupportedModule:
    """The error for a function that is in no table."""
    return build.unsupported(
        "has no rule for random values.",
        "Use a torch.nn layer for it, or build the network from layers of tangency.infinite.",
    )


def read_dropout(call: Call) -> object:
    """F.dropout."""
    training = bool(call.get(2, "training", True))
    module = nn.Dropout(float(call.get(1, "p", 0.5))).train(training)
    return _through(module, call.get(0, "input"), call)


def read_conv(call: Call) -> Field:
    """F.conv with parameters."""
    options = call.named("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    weight, bias = options["weight"], options.get("bias")
    if not isinstance(weight, Parameter):
        raise call.build.unsupported("has weights that are no parameter.", "Use nn.Conv.")
    if bias is not None and not isinstance(bias, Parameter):
        raise call.build.unsupported("has a bias that is no parameter.", "Use nn.Conv.")
    if weight.factor != 1 or (bias is not None and bias.factor != 1):
        raise call.build.unsupported("has a multiple of a parameter for weights or bias.", "Multiply its output.")
    # The layer reads initialisations off a module's tensors; here they are the user's own parameters.
    drawn = weight.drawn(call.build)
    source = SimpleNamespace(weight=drawn, bias=None if bias is None else bias.drawn(call.build))
    layer = Conv(
        tuple(weight.value.shape[2:]), options.get("stride", 1), options.get("padding", 0), options.get("dilation", 1),
        options.get("groups", 1), bias=bias is not None, width=weight.value.shape[0],
        of=cast(nn.Module, source),  # a layer reads its weights and sizes alone
    )  # fmt: skip
    names = (weight.name, bias.name if bias is not None else weight.name + ".bias")
    return layer.grow(call.build, options["input"], call.weights, "", names, drawn[0].numel())


def read_chunk(call: Call) -> tuple[Random | Parameter, ...]:
    """Parts of the positions, or of the channels: independent fields of one law."""
    value, count, dim = call.args[0], call.get(1, "chunks"), call.get(2, "dim", 0)
    total = full_shape(call.build, value)[dim]
    size = -(-total // count)  # rounded up, as torch does: the last part may be shorter
    return read_parts(call, [min(size, total - s) for s in range(0, total, size)], dim)


def read_glu(call: Call) -> Field:
    """F.glu: one half of the channels times the sigmoid of the other."""
    f = call.form()
    (axis,) = call.axes(call.get(1, "dim", -1), f)
    if axis != f.channel:
        raise call.build.unsupported("gates positions by positions.", "Gate along the channels.")
    if f.width % 2:
        raise call.build.unsupported(f"takes {f.width} channels apart into 2.", "Use an even number.")
    a, b = (take_channels(call.build, f, range(k, k + f.width // 2)) for k in (0, f.width // 2))
    return multiply_fields(call.build, [a, apply_function(call.build, b, torch.sigmoid, None, "sigmoid")])


@reads(nn.GLU)
def _glu(m: nn.GLU, call: Call) -> Field:
    return read_glu(replace(call, args=(call.args[0], m.dim), kwargs=Keywords()))


def read_negation(call: Call) -> object:
    """−x."""
    return scale_by(call.build, call.args[0], -1.0)


def read_interpolate(call: Call) -> Field:
    """F.interpolate of positions."""
    names = ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")
    options = call.named("input", *names)
    return interpolated(call.build, options.pop("input"), options)


def read_larger(call: Call) -> object:
    """torch.max(x, dim), and torch.max(x, y), which is torch.maximum."""
    two = isinstance(call.get(1, "other"), RANDOM)
    return read_extreme(call, torch.maximum) if two else read_max(call)


def read_smaller(call: Call) -> object:
    """torch.min(x, y), which is torch.minimum."""
    if isinstance(call.get(1, "other"), RANDOM):
        return read_extreme(call, torch.minimum)
    raise call.build.unsupported("takes a minimum over an axis.", "Write it as -(-x).amax(dim).")


def read_dim(call: Call) -> int:
    """x.dim(), the batch counted."""
    return len(full_shape(call.build, call.args[0]))


# Functions of each number by itself. `recognize` knows the duals of many; the others are integrated numerically.
ELEMENTWISE: tuple[TorchFunction, ...] = (
    torch.relu, torch.tanh, torch.sigmoid, torch.erf, torch.sin, torch.cos, torch.exp, torch.abs, torch.sign,
    torch.square, torch.sqrt, torch.rsqrt, torch.reciprocal, torch.clamp, torch.clip, torch.clamp_min,
    torch.expm1, torch.log1p, torch.atan, torch.sinh, torch.cosh,
    torch.asinh, torch.selu, torch.celu, torch.relu_, torch.tanh_, torch.sigmoid_, torch.special.erf,
    torch.special.expit, F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish,
    F.softplus, F.softsign, F.logsigmoid, F.tanhshrink, F.softshrink, F.hardshrink, F.hardtanh, F.hardswish,
    F.hardsigmoid, F.threshold, F.tanh, F.sigmoid,
)  # fmt: skip
ELEMENTWISE_METHODS = {
    name: getattr(torch, name)
    for name in (
        "relu",
        "tanh",
        "sigmoid",
        "erf",
        "sin",
        "cos",
        "exp",
        "abs",
        "sign",
        "square",
        "clamp",
        "sqrt",
        "rsqrt",
        "reciprocal",
        "clip",
        "clamp_min",
    )
}
# The options of torch's functions are in the order of their signatures, for they may be given by position.
POOL = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad")
MAX_POOL = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
NO_LOG = _refusal("is a log-softmax of random values.", "Leave it to the loss.")
NO_ANSWER = _refusal(
    "asks for the numbers of random values, and the answer of one draw is not the network's.",
    "Write it without control flow on values (torch.where), and keep them tensors.",
)
read_difference, read_quotient = partial(read_sum, sign=-1.0), partial(read_product, divide=True)

# Methods of tensors, by name; further ones are at the end.
METHODS: dict[str, Rule] = {
    "add": read_sum, "add_": read_sum, "sub": read_difference, "mul": read_product, "mul_": read_product,
    "div": read_quotient, "neg": read_negation, "pow": read_power, "bmm": read_matmul, "matmul": read_matmul,
    "masked_fill": read_masked_fill, "size": read_size, "dim": read_dim,
    "view": read_reshape, "reshape": read_reshape, "flatten": read_flatten, "permute": read_permute,
    "transpose": read_transpose, "swapaxes": read_transpose, "t": read_transpose, "unsqueeze": read_unsqueeze,
    "squeeze": read_squeeze, "chunk": read_chunk, "split": read_split, "unbind": read_unbind,
    "unflatten": read_unflatten, "select": read_select, "narrow": read_narrow, "movedim": read_movedim,
    "moveaxis": read_movedim, "swapdims": read_transpose,
    "new_zeros": partial(read_new, number=0), "new_ones": partial(read_new, number=1),
    "softmax": take_softmax, "log_softmax": NO_LOG, "max": read_larger, "min": read_smaller, "amax": read_amax,
    **dict.fromkeys(("contiguous", "float", "double", "to", "clone", "type_as"), read_cast),
    **dict.fromkeys(("expand", "expand_as"), read_expand),
    **dict.fromkeys(QUESTIONS, NO_ANSWER),
}  # fmt: skip
METHODS |= {name: partial(read_elementwise, target=fn, method=name) for name, fn in ELEMENTWISE_METHODS.items()}
# In place is the same here: values are never changed, and names that would show it are refused (`graphs`).
METHODS |= {f"{name}_": METHODS[name] for name in (*ELEMENTWISE_METHODS, "sub", "div", "neg", "pow", "masked_fill")}

# Functions; what is in neither table is refused for random values, and run as it is for known ones.
FUNCTIONS: dict[TorchFunction, Rule] = {
    operator.add: read_sum, operator.iadd: read_sum, torch.add: read_sum,
    operator.sub: read_difference, operator.isub: read_difference, torch.sub: read_difference,
    operator.mul: read_product, operator.imul: read_product, torch.mul: read_product,
    operator.truediv: read_quotient, operator.itruediv: read_quotient, torch.div: read_quotient,
    operator.neg: read_negation, torch.neg: read_negation,
    operator.pow: read_power, operator.ipow: read_power, torch.pow: read_power,
    operator.matmul: read_matmul, torch.matmul: read_matmul, torch.bmm: read_matmul, torch.sparse.mm: read_matmul,
    torch.mm: read_matmul, F.linear: read_linear, operator.getitem: read_item, getattr: read_attribute,
    torch.reshape: read_reshape, torch.flatten: read_flatten, torch.permute: read_permute,
    torch.transpose: read_transpose, torch.swapaxes: read_transpose, torch.t: read_transpose,
    torch.unsqueeze: read_unsqueeze, torch.squeeze: read_squeeze, torch.cat: read_cat, torch.concat: read_cat,
    F.pad: read_pad, torch.chunk: read_chunk, F.glu: read_glu,
    F.avg_pool1d: _as_module(nn.AvgPool1d, *POOL), F.avg_pool2d: _as_module(nn.AvgPool2d, *POOL),
    F.avg_pool3d: _as_module(nn.AvgPool3d, *POOL),
    F.adaptive_avg_pool1d: _as_module(nn.AdaptiveAvgPool1d, "output_size"),
    F.adaptive_avg_pool2d: _as_module(nn.AdaptiveAvgPool2d, "output_size"),
    F.adaptive_avg_pool3d: _as_module(nn.AdaptiveAvgPool3d, "output_size"),
    F.interpolate: read_interpolate,
    F.dropout: read_dropout, F.pixel_shuffle: _as_module(nn.PixelShuffle, "upscale_factor"),
    F.pixel_unshuffle: _as_module(nn.PixelUnshuffle, "downscale_factor"),
    F.unfold: _as_module(nn.Unfold, "kernel_size", "dilation", "padding", "stride"),
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d), read_conv),
    F.max_pool1d: _as_module(nn.MaxPool1d, *MAX_POOL), torch.max_pool1d: _as_module(nn.MaxPool1d, *MAX_POOL),
    F.max_pool2d: _as_module(nn.MaxPool2d, *MAX_POOL), torch.max_pool2d: _as_module(nn.MaxPool2d, *MAX_POOL),
    F.max_pool3d: _as_module(nn.MaxPool3d, *MAX_POOL), torch.max_pool3d: _as_module(nn.MaxPool3d, *MAX_POOL),
    F.adaptive_max_pool1d: _as_module(nn.AdaptiveMaxPool1d, "output_size"),
    F.adaptive_max_pool2d: _as_module(nn.AdaptiveMaxPool2d, "output_size"),
    F.adaptive_max_pool3d: _as_module(nn.AdaptiveMaxPool3d, "output_size"),
    torch.amax: read_amax, torch.max: read_larger, torch.min: read_smaller,
    **{fn: partial(read_extreme, op=fn) for fn in (torch.maximum, torch.minimum)},
    F.batch_norm: read_batch_norm,
    Tensor.new_zeros: partial(read_new, number=0), Tensor.new_ones: partial(read_new, number=1),
    **dict.fromkeys((F.softmax, torch.softmax), take_softmax),
    **dict.fromkeys((F.log_softmax, torch.log_softmax), NO_LOG),
    F.scaled_dot_product_attention: read_sdpa, torch.baddbmm: read_baddbmm, torch.addmm: read_addmm,
    torch.split: read_split, torch.unbind: read_unbind, torch.unflatten: read_unflatten, torch.narrow: read_narrow,
    torch.select: read_select, torch.movedim: read_movedim, torch.moveaxis: read_movedim,
    torch.swapdims: read_transpose,
    **{fn: partial(read_elementwise, target=fn) for fn in ELEMENTWISE},
}  # fmt: skip
# Whole families of their own files; what they have takes the place of what stands above.
METHODS |= norms.METHODS | gates.METHODS | shuffles.METHODS | rearranged.METHODS
FUNCTIONS |= norms.FUNCTIONS | gates.FUNCTIONS | shuffles.FUNCTIONS | products.FUNCTIONS | rearranged.FUNCTIONS
METHODS |= {name: gates.or_parameter(name, METHODS[name]) for name in ("view", "reshape", "unsqueeze", "squeeze")}
METHODS |= {name: or_bias(name, METHODS[name]) for name in BIAS_FORMS}
FUNCTIONS |= {
    fn: or_bias(name, FUNCTIONS[fn]) for name in BIAS_FORMS if (fn := getattr(torch, name, None)) in FUNCTIONS
}


def _either(first: Rule, other: Rule, kinds: type | tuple[type, ...], every: bool = False) -> Rule:
    """The first rule where some value (or every one) is of these kinds, as those of attention are; else the other."""

    def choose(call: Call) -> object:
        """The value by the rule that is for it."""
        values = [
            v for v in tree_leaves(call.args, is_leaf=lambda v: isinstance(v, RANDOM)) if not isinstance(v, (str, int))
        ]
        met = [isinstance(v, kinds) for v in values]
        return first(call) if (all(met) if every else any(met)) else other(call)

    return choose


FUNCTIONS[torch.where] = _either(read_where, gates.read_where, (Scores, Parameter, PositionBias))
FUNCTIONS[torch.einsum] = _either(read_einsum, products.read_einsum, RANDOM, every=True)
FUNCTIONS[torch.stack] = _either(read_stack, shuffles.read_stack, Unsettled)
FUNCTIONS[torch.repeat_interleave] = _either(read_repeat_interleave, shuffles.read_repeat_interleave, Unsettled)
METHODS["repeat_interleave"] = FUNCTIONS[torch.repeat_interleave]


def _stochastic_depth(call: Call) -> object:
    """torchvision's: nothing outside of training."""
    options = call.named("input", "p", "mode", "training")
    if options.get("training", True) and options["p"]:
        raise call.build.unsupported("drops whole branches at random.", "Use model.eval(), or p=0.")
    value: object = options["input"]
    return value


# Functions of libraries that may be missing, by their names: torch.fx keeps them as they are (torch.fx.wrap).
NAMED: dict[str, Rule] = {"torchvision.ops.stochastic_depth.stochastic_depth": _stochastic_depth}


def find_rule(target: TorchFunction | str) -> Rule | None:
    """The rule of a function, or of a method by its name; a method and torch's function of its name are the same."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    function = getattr(torch, name, None) if name != "where" else None  # x.where(condition, y) has another order
    if not isinstance(target, str):
        by_name = METHODS.get(name) if function is target else NAMED.get(f"{getattr(target, '__module__', '')}.{name}")
        return FUNCTIONS.get(target) or by_name
    return METHODS.get(name) or (FUNCTIONS.get(function) if function is not None else None)
