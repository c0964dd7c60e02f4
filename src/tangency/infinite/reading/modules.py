"""torch's modules as layers: one small reader for each type."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import InputError
from ..activations.duals import ABRelu, LeakyRelu
from ..activations.quadrature import recognize
from ..layers.basic import AvgPool, Conv, Dropout, Embedding, GlobalAvgPool, LayerNorm, Linear, each
from ..layers.twin import Twin
from ..layers.weights import Weights, dotted
from ..moments.fields import Builder, Field, Lazy, Normed
from ..moments.ops import Affine
from ..moments.positions import Pad
from .calls import Call, Options
from .faithful import check_leaf, exact
from .tensors import flatten

Reader = Callable[[Any, Builder, Weights, str, Any], Any]
READERS: dict[type, Reader] = {}

NO_LIMIT: dict[type, str] = {
    **dict.fromkeys(
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        "The maximum over positions has no known kernel; use average pooling or strides (AvgPool, a strided Conv)",
    ),
    **dict.fromkeys((nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell), "Gated recurrences have no rule here; use nn.RNN"),
    **dict.fromkeys(
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        "Its statistics are over the positions of one channel, which are not infinitely many; use LayerNorm or "
        "GroupNorm(1, …)",
    ),
    **dict.fromkeys((nn.Bilinear,), "Products of two inputs by one weight have no rule; multiply two Linear layers"),
    **dict.fromkeys(
        (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.Softmax2d),
        "A softmax over channels has no limit; leave it to the loss",
    ),
    nn.GLU: "Gate by two layers, a(x) * torch.sigmoid(b(x)), or by h.chunk(2, dim)",
    Twin: "Give Twin(network) itself to infinite_ntk",
}


def reads(*types: type) -> Callable[[Reader], Reader]:
    def note(fn: Reader) -> Reader:
        READERS.update(dict.fromkeys(types, fn))
        return fn

    return note


def convert(module: nn.Module, build: Builder, weights: Weights, name: str, args: Any, kwargs: Any) -> Any:
    """The value after a module of torch's."""
    check_leaf(module, name)
    for kind in type(module).__mro__:
        if kind in NO_LIMIT:
            raise build.unsupported("has no known infinite-width limit.", NO_LIMIT[kind] + ".")
        if kind in READERS:
            if not exact(module):
                raise build.unsupported(
                    f"derives from {kind.__name__} with code of its own, which would be passed over.",
                    f"Use {kind.__name__} itself.",
                )
            return _read(READERS[kind], module, build, weights, name, _Args(args, kwargs))
    dual = recognize(module)
    if dual is not None or _elementwise(module):
        value = args[0] if args else next(iter(kwargs.values()))
        return build.elementwise(value, module, dual, type(module).__name__)
    raise build.unsupported(
        "has no rule for an infinite width.",
        "Write it with layers that have one (docs/infinite.md lists them), or as an activation by torch functions.",
    )


class _Args(tuple[Any, ...]):
    """A call's arguments; `named` are those given by keyword."""

    named: Options

    def __new__(cls, args: Any, kwargs: Any) -> "_Args":
        made = super().__new__(cls, args if args else tuple(kwargs.values())[:1])
        made.named = Options(kwargs)
        if not args:
            made.named.asked |= set(list(kwargs)[:1])
        return made


def _read(reader: Reader, module: nn.Module, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    """The reader's value; arguments that it does not know are refused."""
    found = reader(module, build, weights, name, args)
    if isinstance(module, (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder, nn.RNN)):
        return found  # their readers know all arguments
    missed = args.named.missed() or (f"{len(args)} arguments" if len(args) > 1 else "")
    if missed:
        raise build.unsupported(f"is given {missed}, which is not read.", "Give its input alone.")
    return found


def _elementwise(module: nn.Module) -> bool:
    """Whether torch files it under activations and it has no parameters."""
    plain = not any(True for _ in module.parameters()) and not (isinstance(module, nn.RReLU) and module.training)
    return plain and type(module).__module__ == "torch.nn.modules.activation"


@reads(nn.Identity)
def _identity(m: nn.Identity, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    return args[0]


@reads(nn.Linear)
def _linear(m: nn.Linear, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    return Linear(bias=m.bias is not None, width=m.out_features, of=m).grow(build, args[0], weights, name)


@reads(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _conv(m: Any, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    if m.padding_mode not in ("zeros", "circular"):
        raise build.unsupported(f"pads by {m.padding_mode!r}.", "Use padding_mode='zeros' or 'circular'.")
    layer = Conv(
        tuple(m.kernel_size), m.stride, m.padding, m.dilation, m.groups, m.padding_mode == "circular",
        bias=m.bias is not None, width=m.out_channels, of=m,
    )  # fmt: skip
    return layer.grow(build, args[0], weights, name)


@reads(nn.Embedding)
def _embedding(m: nn.Embedding, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    if m.max_norm is not None or m.scale_grad_by_freq:
        raise build.unsupported(
            "rescales its rows (max_norm) or their gradients (scale_grad_by_freq).", "Leave both at their default."
        )
    return Embedding(width=m.embedding_dim, padding=m.padding_idx, of=m).grow(build, args[0], weights, name)


@reads(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
def _avg_pool(m: Any, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    dims = int(type(m).__name__[-2])
    if getattr(m, "divisor_override", None):
        raise build.unsupported("has a divisor of its own.", "Use the window's, and multiply.")
    return AvgPool(
        each(m.kernel_size, dims),
        each(m.stride, dims),
        each(m.padding, dims),
        not m.count_include_pad,
        ceil=m.ceil_mode,
    ).grow(build, args[0], weights, name)


@reads(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
def _adaptive(m: Any, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    f = build.field(args[0], 0)
    want = each(m.output_size, len(f.grid))
    want = tuple(n if w is None else w for w, n in zip(want, f.grid, strict=True))
    if any(n % w for w, n in zip(want, f.grid, strict=True)):
        raise build.unsupported(f"makes {want} of {f.grid} positions by unequal windows.", "Use sizes that divide.")
    size = tuple(n // w for w, n in zip(want, f.grid, strict=True))
    if all(w == 1 for w in want):
        return build.regrid(GlobalAvgPool().grow(build, f, weights, name), (f.width, *want), 0)
    return AvgPool(size).grow(build, f, weights, name)


@reads(nn.Flatten)
def _flatten(m: nn.Flatten, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    return flatten(Call(build, weights, (args[0], m.start_dim, m.end_dim), {}, "Flatten"))


@reads(nn.modules.dropout._DropoutNd, nn.AlphaDropout)
def _dropout(m: Any, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    if not m.training or not m.p:
        return args[0]
    if not isinstance(m, nn.Dropout):
        raise build.unsupported("drops whole channels or more.", "Use nn.Dropout, or model.eval().")
    return Dropout(m.p).grow(build, args[0], weights, name)


@reads(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(m: Any, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    if isinstance(args[0], Tensor):
        return _of_input(m, build, weights, name, args[0])
    f = build.settled(args[0])
    over = len(m.normalized_shape)
    if tuple(m.normalized_shape) != f.shape[len(f.shape) - over :]:
        raise InputError(
            f"{build.where}: normalises {tuple(m.normalized_shape)}; it was given values of shape {f.shape}."
        )
    dims = range(len(f.shape) - over, len(f.shape))
    if f.channel not in dims or (over > 1 and over != len(f.shape)):
        raise build.unsupported(
            f"normalises over axes {[d + 1 for d in dims]}, the channels lie on axis {f.channel + 1}.",
            "Normalise over the channels, alone or with all positions.",
        )
    _at_start(m, build, weights)
    eps = m.eps if m.eps is not None else torch.finfo(torch.float32).eps
    affine = bool(m.elementwise_affine)
    shift = affine and getattr(m, "bias", None) is not None
    return LayerNorm(f.channel, over > 1, eps, affine, shift).grow(build, f, weights, name)


def _at_start(m: Any, build: Builder, weights: Weights) -> None:
    """w_var="init" reads the module's own numbers: a norm's are taken for 1 and 0, as torch begins with."""
    if weights.w_var != "init":
        return
    for p, start in ((getattr(m, "weight", None), 1.0), (getattr(m, "bias", None), 0.0)):
        if p is not None and not bool((p == start).all()):
            raise build.unsupported(
                "has a scale or shift that is not 1 and 0, which w_var='init' does not read.",
                "Reset them (reset_parameters()), or give w_var as a number.",
            )


def _of_input(m: nn.Module, build: Builder, weights: Weights, name: str, x: Tensor) -> Tensor:
    """A norm of the input itself is known, unless it has trained parameters: they are not infinitely many."""
    if any(weights.rate(dotted(name, p)) for p, _ in m.named_parameters()):
        raise build.unsupported(
            "normalises the input with a scale or shift that is trained.",
            "Freeze it (train=), use affine=False, or put a Linear or Conv layer before it.",
        )
    return as_known(m, x)


def as_known(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """A module's output for known inputs, in float64; the user's module stays as it is."""
    changes = module.training and any(True for _ in module.buffers())  # running statistics
    if changes or any(v.is_floating_point() and v.dtype != torch.float64 for v in module.state_dict().values()):
        module = copy.deepcopy(module).double()
    return module(*args, **kwargs)


@reads(nn.GroupNorm)
def _group_norm(m: nn.GroupNorm, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    if m.num_groups != 1:
        raise build.unsupported(
            "normalises over groups of channels.",
            "Use GroupNorm(1, …): with infinitely many channels all groups agree.",
        )
    if isinstance(args[0], Tensor):
        return _of_input(m, build, weights, name, args[0])
    _at_start(m, build, weights)
    return LayerNorm(0, True, m.eps, m.affine).grow(build, args[0], weights, name)


@reads(nn.modules.batchnorm._BatchNorm)
def _batch_norm(m: Any, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    if isinstance(args[0], Tensor):
        if m.training or not m.track_running_stats:
            raise build.unsupported("normalises the input over the batch.", "Normalise the data beforehand.")
        return _of_input(m, build, weights, name, args[0])
    f = build.settled(args[0])
    _at_start(m, build, weights)
    if not m.training and m.track_running_stats:
        return _running(m, build, weights, name, f)
    if len(f.shape) != 1 or not f.gaussian:
        raise build.unsupported(
            "uses the statistics of the batch; their limit is known after a Linear layer, without positions.",
            "Use LayerNorm or GroupNorm(1, …), or model.eval() for the statistics of initialisation.",
        )
    rates = weights.rates(name) if m.affine else (0.0, 0.0)
    return Normed(f, m.eps, rates, name)


def _running(m: Any, build: Builder, weights: Weights, name: str, f: Field) -> Any:
    """In evaluation mode: a constant factor, while the running statistics are those of initialisation."""
    fresh = bool((m.running_mean == 0).all() and (m.running_var == 1).all())
    if not fresh:
        raise build.unsupported(
            "has running statistics of its own training.", "Reset them (reset_running_stats), or use GroupNorm(1, …)."
        )
    rates = weights.rates(name) if m.affine else (0.0, 0.0)
    return replace(build.same(Affine(1 / (1 + m.eps), 0.0, 0.0, rates[1]), f), gain=rates[0])


@reads(nn.PReLU)
def _prelu(m: nn.PReLU, build: Builder, weights: Weights, name: str, args: Any) -> Any:
    """A slope of each channel's own is a parameter; its derivative is min(x, 0)."""
    rate = weights.rate(dotted(name, "weight"))
    slopes = m.weight.detach().double()
    if float(slopes.max() - slopes.min()) > 0:
        raise build.unsupported("has different slopes.", "At initialisation they are one number: 0.25 by default.")
    value, dual = args[0], LeakyRelu(float(slopes[0]))
    if isinstance(value, Tensor):
        if rate:
            raise build.unsupported("trains slopes on the input itself.", "Put a Linear or Conv layer before it.")
        return dual(value)
    if rate and m.num_parameters == 1:
        raise build.unsupported(
            "trains one slope for all channels, whose gradient has no limit.",
            "Give each channel its own (num_parameters), or freeze it (train=).",
        )
    found = build.elementwise(value, dual, dual, "PReLU")
    return replace(found, inner=ABRelu(1.0, 0.0), rate=rate) if rate and isinstance(found, Lazy) else found


@reads(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
def _zero_pad(m: Any, build: Builder, weights: Weights, name: str, args: _Args) -> Any:
    f = build.field(args[0], 0)
    amounts = [m.padding] * 2 * len(f.grid) if isinstance(m.padding, int) else list(m.padding)
    pairs = tuple((amounts[2 * k], amounts[2 * k + 1]) for k in range(len(f.grid)))[::-1]
    op = Pad(pairs)
    return build.same(op, f, shape=(f.width, *op.grid(f.grid)))
