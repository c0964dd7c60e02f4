"""torch's modules as layers: one small reader for each type. Those of sequences are in `sequences`."""

import copy
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from ...errors import UnsupportedModule
from ..activations.duals import ABRelu, LeakyRelu
from ..activations.recognize import recognize
from ..layers.basic import Dropout, Linear, Pair, per_axis
from ..layers.sequences import Embedding
from ..layers.spatial import AvgPool, Conv, ConvTranspose, GlobalAvgPool, resampled, resampled_value
from ..layers.twin import Twin
from ..layers.weights import Weights, dotted
from ..moments.axes import by_heads, on_channels
from ..moments.core import RandomAffine
from ..moments.fields import Builder
from ..moments.functions import apply_function
from ..moments.maxima import scale_and_shift
from ..moments.shapes import regrid
from ..moments.values import Field, Lazy, Normed, Random, Seen, Value
from .attention import Scores, take_softmax
from .calls import RANDOM, Call, Keywords
from .faithful import check_leaf, exact
from .joining import padded
from .merged import beside_batch, channel_by_channel
from .talking import mix_heads
from .tensors import read_flatten

# From a module and its call to the value after it. The module is of one of the types that the reader is for.
Reader = Callable[[Any, Call], object]
SomeReader = TypeVar("SomeReader", bound=Reader)
READERS: dict[type, Reader] = {}
# Types whose readers look at all arguments of a call themselves, not at the input alone.
ALL_ARGUMENTS = (
    nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.TransformerDecoderLayer,
    nn.TransformerDecoder, nn.Transformer, nn.RNN, nn.LSTM, nn.GRU, nn.Bilinear,
    nn.EmbeddingBag,
)  # fmt: skip

NO_LIMIT: dict[type, str] = {
    **dict.fromkeys((nn.LSTMCell, nn.GRUCell), "Steps by hand have no rule; use nn.LSTM or nn.GRU over all times"),
    nn.RNNCell: "Called in a loop, its weights are shared over time; use nn.RNN on the whole sequence",
    **dict.fromkeys(
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        "Its statistics are over the positions of one channel, which are not infinitely many; use LayerNorm or "
        "GroupNorm(1, …)",
    ),
    **dict.fromkeys(
        (nn.LogSoftmax, nn.Softmin, nn.Softmax2d), "A softmax over channels has no limit; leave it to the loss"
    ),
    Twin: "Give Twin(network) itself to infinite_ntk",
}


def reads(*types: type) -> Callable[[SomeReader], SomeReader]:
    """Enter a reader for modules of these types."""

    def enter(reader: SomeReader) -> SomeReader:
        """Into READERS, as it is."""
        READERS.update(dict.fromkeys(types, reader))
        return reader

    return enter


def no_limit(build: Builder, kind: type) -> UnsupportedModule:
    """The refusal of a module of one of the types in NO_LIMIT."""
    return build.unsupported("has no known infinite-width limit.", NO_LIMIT[kind] + ".")


def read_module(module: nn.Module, call: Call) -> object:
    """The value after a module of torch's; arguments that its reader does not know are refused."""
    check_leaf(module, call.name)
    build = call.build
    if not call.args and call.kwargs.given:
        call = replace(call, args=(call.kwargs.first(),))
    # Along the bases, so that a refusal of torch's class holds for what derives from it too.
    for kind in type(module).__mro__:
        if kind in NO_LIMIT:
            raise no_limit(build, kind)
        if kind in READERS:
            if not exact(module):
                raise build.unsupported(
                    f"derives from {kind.__name__} with code of its own, which would be passed over.",
                    f"Use {kind.__name__} itself.",
                )
            value = _read_along(module, kind, call)
            # After reading, for a reader may have asked for some of them.
            missed = call.kwargs.missed() if call.kwargs.given else ""
            missed = missed or (f"{len(call.args)} arguments" if len(call.args) > 1 else "")
            if missed and not isinstance(module, ALL_ARGUMENTS):
                raise build.unsupported(f"is given {missed}, which is not read.", "Give its input alone.")
            return value
    dual = recognize(module)
    if dual is not None or _elementwise(module):
        return apply_function(build, call.args[0], _out_of_place(module), dual, type(module).__name__)
    raise build.unsupported(
        "has no rule for an infinite width.",
        "Write it with layers that have one (docs/infinite.md lists them), or as an activation by torch functions.",
    )


def _read_along(module: nn.Module, kind: type, call: Call) -> object:
    """The value after a module; one along other axes, after those that act on the channels of each position alone."""
    value = call.args[0] if call.args else None
    if isinstance(value, Seen) and (kind is nn.Linear or (kind in (nn.LayerNorm, nn.RMSNorm) and not by_heads(value))):
        return on_channels(call.build, value, lambda f: READERS[kind](module, replace(call, args=(f,))))  # type: ignore[arg-type, return-value]
    if isinstance(value, Seen) and kind is _BatchNorm:
        return channel_by_channel(call.build, value, lambda v: _batch_normed(module, replace(call, args=(v,))))  # type: ignore[arg-type]
    return READERS[kind](module, call)


def _out_of_place(module: nn.Module) -> nn.Module:
    """An activation that leaves its input as it is: functions compose, and others may read the same values."""
    if not getattr(module, "inplace", False):
        return module
    other = copy.copy(module)
    other.inplace = False  # type: ignore[assignment]
    return other


def read_part(part: nn.Module, value: Value, call: Call, name: str) -> Value:
    """The value after a module within the one that is called; messages name it."""
    build = call.build
    build.name, build.where = name, f"layer {name} ({type(part).__name__})"
    after = read_module(part, replace(call, args=(value,), kwargs=Keywords(), name=name))
    assert isinstance(after, (Tensor, *RANDOM))
    return after


def as_known(module: nn.Module, *args: object, **kwargs: object) -> object:
    """A module's output for known inputs, in float64; the user's module stays as it is."""
    # A copy where the call would change the user's module, or round to float32.
    changes = module.training and any(True for _ in module.buffers())  # running statistics
    if changes or any(v.is_floating_point() and v.dtype != torch.float64 for v in module.state_dict().values()):
        module = copy.deepcopy(module).double()
    value: object = module(*args, **kwargs)
    return value


def _elementwise(module: nn.Module) -> bool:
    """Whether torch files it under activations and it has no parameters."""
    plain = not any(True for _ in module.parameters()) and not (isinstance(module, nn.RReLU) and module.training)
    return plain and type(module).__module__ == "torch.nn.modules.activation"


@reads(nn.Softmax)
def _softmax(m: nn.Softmax, call: Call) -> object:
    return take_softmax(replace(call, args=(call.args[0], m.dim), kwargs=Keywords()))


@reads(nn.Identity)
def _identity(m: nn.Identity, call: Call) -> object:
    value: object = call.args[0]
    return value


# Layers with weights


@reads(nn.Linear)
def _linear(m: nn.Linear, call: Call) -> Field | Scores:
    if isinstance(call.args[0], Scores):
        return mix_heads(m, call, call.args[0])
    layer = Linear(bias=m.bias is not None, width=m.out_features, of=m)
    return layer.grow(call.build, call.args[0], call.weights, call.name)


@reads(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _conv(m: nn.Conv1d | nn.Conv2d | nn.Conv3d, call: Call) -> Random:
    value: Value = call.args[0]
    if isinstance(value, Seen):
        f, back = beside_batch(call.build, value)
        return back(_convolved(m, replace(call, args=(f,)), 1))
    return _convolved(m, call, 0)


def _convolved(m: nn.Conv1d | nn.Conv2d | nn.Conv3d, call: Call, more: int) -> Field:
    """The convolution, with windows of 1 over as many axes `more` before its own."""
    value: Value = call.args[0]
    padding: Pair | str = m.padding if isinstance(m.padding, str) else (0,) * more + tuple(m.padding)
    if m.padding_mode not in ("zeros", "circular"):  # borders of their own, then none
        amounts, padding = list(m._reversed_padding_repeated_twice), 0
        value = padded(call.build, value, amounts, m.padding_mode, channel=0)
    layer = Conv(
        (1,) * more + tuple(m.kernel_size), (1,) * more + tuple(m.stride), padding, (1,) * more + tuple(m.dilation),
        m.groups, m.padding_mode == "circular", bias=m.bias is not None, width=m.out_channels, of=m,
    )  # fmt: skip
    return layer.grow(call.build, value, call.weights, call.name)


@reads(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _conv_transpose(m: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d, call: Call) -> Field:
    layer = ConvTranspose(
        tuple(m.kernel_size), m.stride, cast(Pair, m.padding), m.output_padding, m.dilation,
        bias=m.bias is not None, width=m.out_channels, of=m, groups=m.groups,
    )  # fmt: skip
    return layer.grow(call.build, call.args[0], call.weights, call.name)


@reads(nn.Embedding)
def _embedding(m: nn.Embedding, call: Call) -> Field:
    if m.max_norm is not None or m.scale_grad_by_freq:
        raise call.build.unsupported(
            "rescales its rows (max_norm) or their gradients (scale_grad_by_freq).", "Leave both at their default."
        )
    layer = Embedding(width=m.embedding_dim, padding=m.padding_idx, of=m)
    return layer.grow(call.build, call.args[0], call.weights, call.name)


# Positions


@reads(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def _avg_pool(m: nn.AvgPool1d | nn.AvgPool2d | nn.AvgPool3d, call: Call) -> Value:
    # AvgPool2d: the digit before the last letter.
    dims = int(type(m).__name__[-2])
    if getattr(m, "divisor_override", None):
        raise call.build.unsupported("has a divisor of its own.", "Use the window's, and multiply.")
    size, stride, padding = (per_axis(v, dims) for v in (m.kernel_size, m.stride, m.padding))
    if isinstance(call.args[0], Seen):
        f, back = beside_batch(call.build, call.args[0])
        layer = AvgPool((1, *size), (1, *stride), (0, *padding), not m.count_include_pad, ceil=m.ceil_mode)
        pooled = layer.grow(call.build, f, call.weights, call.name)
        assert isinstance(pooled, Field)
        return back(pooled)
    layer = AvgPool(size, stride, padding, not m.count_include_pad, ceil=m.ceil_mode)
    return layer.grow(call.build, call.args[0], call.weights, call.name)


@reads(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
def _adaptive(m: nn.AdaptiveAvgPool1d | nn.AdaptiveAvgPool2d | nn.AdaptiveAvgPool3d, call: Call) -> Value:
    if isinstance(call.args[0], Seen):
        f, back = beside_batch(call.build, call.args[0])
        sizes = per_axis(m.output_size, len(f.grid) - 1)  # type: ignore[arg-type]
        pooled = _adaptive(SimpleNamespace(output_size=(None, *sizes)), replace(call, args=(f,)))  # type: ignore[arg-type]
        assert isinstance(pooled, Field)
        return back(pooled)
    build = call.build
    f = build.field(call.args[0], 0)
    asked = per_axis(m.output_size, len(f.grid))  # type: ignore[arg-type]  # None keeps an axis as it is
    want = tuple(n if w is None else w for w, n in zip(asked, f.grid, strict=True))
    # Windows of equal size tile the positions; where sizes do not divide they overlap, from ⌊w·n/m⌋ to ⌈(w + 1)·n/m⌉.
    if any(n % w for w, n in zip(want, f.grid, strict=True)):
        return resampled(build, f, {axis: _means(n, w) for axis, (n, w) in enumerate(zip(f.grid, want, strict=True))})
    size = tuple(n // w for w, n in zip(want, f.grid, strict=True))
    if all(w == 1 for w in want):
        pooled = GlobalAvgPool().grow(build, f, call.weights, call.name)
        return regrid(build, pooled, (f.width, *want), 0)
    return AvgPool(size).grow(build, f, call.weights, call.name)


def _means(n: int, m: int) -> Tensor:
    """The means [m, n] over m windows of n positions, as adaptive pooling takes them."""
    return F.adaptive_avg_pool1d(torch.eye(n, dtype=torch.float64).unsqueeze(0), m)[0].T


@reads(nn.Flatten)
def _flatten(m: nn.Flatten, call: Call) -> object:
    return read_flatten(replace(call, args=(call.args[0], m.start_dim, m.end_dim), kwargs=Keywords(), label="Flatten"))


# torch.nn's layers of borders and the mode of F.pad that each is.
_BORDERS: dict[type, str] = {
    **dict.fromkeys((nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d), "constant"),
    **dict.fromkeys((nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d), "constant"),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), "reflect"),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), "replicate"),
    **dict.fromkeys((nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d), "circular"),
}


@reads(*_BORDERS)
def _border(m: nn.Module, call: Call) -> Value:
    value, amounts = call.args[0], getattr(m, "padding", 0)
    amounts = [amounts] * 2 * (len(value.shape) - 1) if isinstance(amounts, int) else list(amounts)
    number = getattr(m, "value", 0)
    return padded(call.build, value, amounts, _BORDERS[type(m)], channel=0, number=float(number))


@reads(nn.Upsample)
def _upsample(m: nn.Upsample, call: Call) -> Field:
    options = {k: getattr(m, k) for k in ("size", "scale_factor", "mode", "align_corners", "recompute_scale_factor")}
    return interpolated(call.build, call.args[0], options)


def interpolated(build: Builder, value: Value, options: dict[str, Any]) -> Field:
    """Interpolation is a matrix over each axis: what torch's own, with these options, does to the identity."""
    f, o = build.field(value, 0), {k: v for k, v in options.items() if v is not None}
    mode, dims = o.pop("mode", "nearest"), len(f.grid)
    if mode not in ("nearest", "nearest-exact", "linear", "bilinear", "trilinear", "bicubic"):
        raise build.unsupported(f"interpolates by {mode!r}.", "Use nearest, (bi-, tri-)linear or bicubic.")
    to = "size" if "size" in o else "scale_factor"
    asked = o.pop(to)
    each = tuple(asked) if isinstance(asked, (tuple, list)) else (asked,) * dims
    flat = mode in ("bilinear", "bicubic")  # torch has these for images alone: the identity is one, and keeps its width
    matrices = {}
    for axis, (n, goal) in enumerate(zip(f.grid, each, strict=True)):
        eye = torch.eye(n, dtype=torch.float64)
        o[to] = (goal, n if to == "size" else 1.0) if flat else goal
        after = F.interpolate(eye.view(1, *[1] * flat, n, n), mode="linear" if mode == "trilinear" else mode, **o)
        matrices[axis] = after.view(-1, n) if flat else after[0].T
    return resampled_value(build, value, f, matrices)


# Dropout and norms


@reads(_DropoutNd, nn.AlphaDropout)
def _dropout(m: _DropoutNd, call: Call) -> object:
    value: object = call.args[0]
    if not m.training or not m.p:
        return value
    if not isinstance(m, nn.Dropout):
        raise call.build.unsupported("drops whole channels or more.", "Use nn.Dropout, or model.eval().")
    return Dropout(m.p).grow(call.build, value, call.weights, call.name)


def check_start(m: nn.Module, build: Builder, weights: Weights) -> None:
    """w_var="init" reads the module's own numbers: a norm's are taken for 1 and 0, as torch begins with."""
    # With numbers given, weights are those of a new network, norms at their start included.
    if weights.w_var != "init":
        return
    for p, start in ((getattr(m, "weight", None), 1.0), (getattr(m, "bias", None), 0.0)):
        if p is not None and not bool((p == start).all()):
            raise build.unsupported(
                "has a scale or shift that is not 1 and 0, which w_var='init' does not read.",
                "Reset them (reset_parameters()), or give w_var as a number.",
            )


def of_input(m: nn.Module, call: Call) -> object:
    """A norm of the input itself is known, unless it has trained parameters: they are not infinitely many."""
    if any(call.weights.rate(dotted(call.name, p)) for p, _ in m.named_parameters()):
        raise call.build.unsupported(
            "normalises the input with a scale or shift that is trained.",
            "Freeze it (trainable=), use affine=False, or put a Linear or Conv layer before it.",
        )
    return as_known(m, call.args[0])


@reads(_BatchNorm)
def _batch_norm(m: _BatchNorm, call: Call) -> object:
    check_channels(call, m.num_features)
    return _batch_normed(m, call)


def check_channels(call: Call, count: int) -> None:
    """Refuse numbers of each entry of axis 1 where the channels lie elsewhere: they would be those of positions."""
    value = call.args[0]
    if isinstance(value, RANDOM) and (value.channel != 0 or value.shape[0] != count):
        raise call.build.unsupported(
            f"acts on {count} channels along axis 1; what it is given has {value.shape[value.channel]}, on axis "
            f"{value.channel + 1}.",
            "Move the channels there with transpose, and back after it.",
        )


def _batch_normed(m: _BatchNorm, call: Call) -> Any:
    build, weights = call.build, call.weights
    if isinstance(call.args[0], Tensor):
        # Statistics of the batch would make one sample depend on the others.
        if m.training or not m.track_running_stats:
            raise build.unsupported("normalises the input over the batch.", "Normalise the data beforehand.")
        return of_input(m, call)
    check_start(m, build, weights)
    rates = weights.rates(call.name) if m.affine else (0.0, 0.0)
    if not m.training and m.track_running_stats:
        value = call.args[0]
        if isinstance(value, Seen) and len(value.axes) == 2:  # tokens of all samples as rows [batch·time, channels]
            return on_channels(build, value, lambda f: _running(m, build, rates, f))
        return _running(m, build, rates, value)
    f = call.field()
    # The limit over a batch is known of Gaussian values (`moments/batchnorm.py`, `moments/batchdraws.py`).
    if not f.gaussian:
        raise build.unsupported(
            "uses the statistics of the batch; their limit is known right after a Linear or Conv layer.",
            "Use LayerNorm or GroupNorm(1, …), or model.eval() for the statistics of initialisation.",
        )
    return Normed(f, m.eps, rates, call.name)


def _running(m: _BatchNorm, build: Builder, rates: tuple[float, float], value: Random) -> Field:
    """In evaluation mode: a constant factor, while the running statistics are those of initialisation."""
    assert m.running_mean is not None
    assert m.running_var is not None
    # As torch begins with them: BatchNorm then divides by √(1 + eps), and shifts by nothing.
    fresh = bool((m.running_mean == 0).all() and (m.running_var == 1).all())
    if not fresh:
        raise build.unsupported(
            "has running statistics of its own training.", "Reset them (reset_running_stats), or use GroupNorm(1, …)."
        )
    return scale_and_shift(build, value, 1 / (1 + m.eps), rates)


@reads(nn.PReLU)
def _prelu(m: nn.PReLU, call: Call) -> object:
    """A slope of each channel's own is a parameter; its derivative is min(x, 0)."""
    build, value = call.build, call.args[0]
    rate = call.weights.rate(dotted(call.name, "weight"))
    # One slope is one function; slopes that differ by channel are many, which one dual is not of.
    slopes = m.weight.detach().double()
    if float(slopes.max() - slopes.min()) > 0:
        raise build.unsupported("has different slopes.", "At initialisation they are one number: 0.25 by default.")
    dual = LeakyRelu(float(slopes[0]))
    if isinstance(value, Tensor):
        if rate:
            raise build.unsupported("trains slopes on the input itself.", "Put a Linear or Conv layer before it.")
        return dual(value)
    if rate and m.num_parameters == 1:
        raise build.unsupported(
            "trains one slope for all channels, whose gradient has no limit.",
            "Give each channel its own (num_parameters), or freeze it (trainable=).",
        )
    if m.num_parameters > 1:
        check_channels(call, m.num_parameters)
    after = apply_function(build, value, dual, dual, "PReLU")
    if not rate or not isinstance(after, Lazy):
        return after
    return replace(after, inner=ABRelu(1.0, 0.0), rate=rate, whose=build.identity(RandomAffine(1.0, 0.0, rate)))
