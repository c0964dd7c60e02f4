"""Norms over channels in every spelling: torch's modules, torch.nn.functional, and arithmetic with means in forward().

With infinitely many channels a mean over them is an expectation, known from the moments: E[h²] is the variance, and
the mean of what follows a weight matrix is zero. So x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) is a
product with a known number of each sample, a `Statistic`.
"""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import InputError
from ..activations.quadrature import Quadrature
from ..activations.recognize import recognize
from ..layers.basic import by_statistic, centred, normed, scaled_and_shifted
from ..layers.groups import warn_few
from ..layers.weights import dotted
from ..moments.fields import Builder
from ..moments.functions import apply_function
from ..moments.readouts import read_out
from ..moments.values import Field, Lazy, Random, Seen, Squared, Statistic
from .calls import Call, Parameter, Rule, TorchFunction
from .modules import check_start, of_input, reads
from .tensors import read_item, read_reduction, read_unsqueeze

# torch's RMSNorm without eps takes that of its input's dtype; models are float32 unless told otherwise.
EPS = torch.finfo(torch.float32).eps

# torch.nn's norms


@reads(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(m: nn.LayerNorm | nn.RMSNorm, call: Call) -> object:
    if isinstance(call.args[0], Tensor):
        return of_input(m, call)
    check_start(m, call.build, call.weights)
    rates, value, shape = _module_rates(m, call), call.args[0], tuple(m.normalized_shape)
    if not isinstance(value, Seen):
        return _over_last(call, value, shape, m.eps, rates, center=isinstance(m, nn.LayerNorm))
    # Of each head: infinitely many channels have the statistics of all, and what heads share of the scale adds up as
    # what each has of its own, for they are mixed by independent weights.
    if shape != value.sizes[-1:]:
        raise InputError(f"{call.build.where}: normalises {shape}; it was given values of shape {value.sizes}.")
    f = call.build.settled(value.of)
    whole = _over_last(
        call, replace(f, shape=(*f.grid, f.width), channel=len(f.grid)), (f.width,), m.eps, rates,
        center=isinstance(m, nn.LayerNorm),
    )  # fmt: skip
    return replace(value, of=replace(whole, shape=f.shape, channel=f.channel))


def _module_rates(m: nn.Module, call: Call) -> tuple[float, float]:
    """Those of its scale and shift, 0 where it has none."""
    scale, shift = (
        call.weights.rate(dotted(call.name, p)) if getattr(m, p, None) is not None else 0.0 for p in ("weight", "bias")
    )
    return scale, shift


def _over_last(
    call: Call, value: Random, shape: tuple[int, ...], eps: float | None, rates: tuple[float, float], center: bool
) -> Field:
    """The value normalised over its last axes, of this shape: the channels, alone or with all positions."""
    build = call.build
    if shape != value.shape[len(value.shape) - len(shape) :]:
        raise InputError(f"{build.where}: normalises {shape}; it was given values of shape {value.shape}.")
    dims = range(len(value.shape) - len(shape), len(value.shape))
    if value.channel not in dims or (len(shape) > 1 and len(shape) != len(value.shape)):
        raise build.unsupported(
            f"normalises over axes {[d + 1 for d in dims]}, the channels lie on axis {value.channel + 1}.",
            "Normalise over the channels, alone or with all positions.",
        )
    f = centred(build, value, value.channel, len(shape) > 1) if center else build.settled(value)
    return scaled_and_shifted(build, normed(build, f, len(shape) > 1, EPS if eps is None else eps), *rates)


@reads(nn.GroupNorm)
def _group_norm(m: nn.GroupNorm, call: Call) -> object:
    """Each group has infinitely many channels of one law, so that all have the same statistics."""
    if isinstance(call.args[0], Tensor):
        return of_input(m, call)
    check_start(m, call.build, call.weights)
    return _by_groups(call, call.args[0], m.num_groups, m.eps, _module_rates(m, call))


def _by_groups(call: Call, value: Random, groups: int, eps: float, rates: tuple[float, float]) -> Field:
    """The value normalised over each group of channels, and all positions."""
    build = call.build
    f = centred(build, value, 0, positions=True)
    if groups > 1 and f.width == groups:
        raise build.unsupported(
            "has one channel in each group: its statistics are over positions, which are not infinitely many.",
            "Use fewer groups, such as GroupNorm(1, …), or LayerNorm.",
        )
    if groups > 1 and not f.alike:
        raise build.unsupported(
            f"has {groups} groups of channels that were joined from several layers, and are not of one law.",
            "Use GroupNorm(1, …), or normalise before torch.cat.",
        )
    warn_few(build, f.width, groups)
    return scaled_and_shifted(build, normed(build, f, True, eps), *rates)


# torch.nn.functional's


def _own_rates(call: Call, *given: object) -> tuple[float, float]:
    """The rates of a scale and a shift that forward() gives; known ones must be 1 and 0."""
    rates = []
    for start, p in zip((1.0, 0.0), given, strict=True):
        value = p.value * p.factor if isinstance(p, Parameter) else p
        # With variances given as numbers, a norm is taken at its start, as `check_start` has it for modules.
        checked = call.weights.w_var == "init" or not isinstance(p, Parameter)
        if isinstance(value, Tensor) and checked and not bool((value == start).all()):
            raise call.build.unsupported(
                "has a scale or shift that is not 1 and 0.", "Reset it, or give w_var as a number and a parameter."
            )
        rates.append(call.weights.rate(p.name) * p.factor**2 if isinstance(p, Parameter) else 0.0)
    return rates[0], rates[1]


def _known_norm(call: Call, function: Callable[..., Tensor], *args: object, given: tuple[object, object]) -> Tensor:
    """A norm of the input itself, unless its parameters are trained: they are not infinitely many."""
    if any(_own_rates(call, *given)):
        raise call.build.unsupported(
            "normalises the input with a scale or shift that is trained.",
            "Freeze it (trainable=), leave it out, or put a Linear or Conv layer before it.",
        )
    return function(*args)


def read_layer_norm(call: Call) -> Field | Tensor:
    """F.layer_norm."""
    o = call.named("input", "normalized_shape", "weight", "bias", "eps")
    shape, eps, given = tuple(o["normalized_shape"]), o.get("eps", 1e-5), (o.get("weight"), o.get("bias"))
    if isinstance(o["input"], Tensor):
        return _known_norm(call, F.layer_norm, o["input"], shape, None, None, eps, given=given)
    return _over_last(call, o["input"], shape, eps, _own_rates(call, *given), center=True)


def read_rms_norm(call: Call) -> Field | Tensor:
    """F.rms_norm."""
    o = call.named("input", "normalized_shape", "weight", "eps")
    shape, eps, given = tuple(o["normalized_shape"]), o.get("eps"), (o.get("weight"), None)
    if isinstance(o["input"], Tensor):
        return _known_norm(call, F.rms_norm, o["input"], shape, None, eps, given=given)
    return _over_last(call, o["input"], shape, eps, _own_rates(call, *given), center=False)


def read_group_norm(call: Call) -> Field | Tensor:
    """F.group_norm."""
    o = call.named("input", "num_groups", "weight", "bias", "eps")
    groups, eps, given = int(o["num_groups"]), float(o.get("eps", 1e-5)), (o.get("weight"), o.get("bias"))
    if isinstance(o["input"], Tensor):
        return _known_norm(call, F.group_norm, o["input"], groups, None, None, eps, given=given)
    return _by_groups(call, o["input"], groups, eps, _own_rates(call, *given))


def read_normalize(call: Call) -> Field:
    """F.normalize over the channels, x/‖x‖: ‖x‖² is the width of the finite network times the variance."""
    o = call.named("input", "p", "dim", "eps")
    if float(o.get("p", 2.0)) != 2.0:
        raise call.build.unsupported(f"normalises by the norm p={o['p']}.", "Use p=2.")
    eps = float(o.get("eps", 1e-12))
    length = _second(call, o["input"], o.get("dim", 1), keep=True, total=True)
    return times_statistic(call.build, o["input"], length.then(lambda v: 1 / v.sqrt().clamp(min=eps)))


def refuse_instance_norm(call: Call) -> object:
    """F.instance_norm: always an error."""
    raise call.build.unsupported(
        "takes statistics over the positions of one channel, which are not infinitely many.",
        "Use F.layer_norm, or F.group_norm with few groups.",
    )


# Means over the channels, in forward()


def read_mean(call: Call, mean: bool = True) -> Random:
    """x.mean(dim) and x.sum(dim): over positions, or over the channels."""
    value = call.get(0, "input")
    dims = call.get(1, "dim", call.kwargs.get("axis"))
    if dims is None or not _has_channels(call, value, dims):
        return read_reduction(call, mean=mean)
    keep = bool(call.get(2, "keepdim", False))
    root = _square_root(call.build, value)
    if root is not None:
        return _second(call, root, dims, keep, total=not mean)
    total = None if mean else read_out(call.build, value, call.axes(dims, call.build.settled(value)))
    return _first(call, value, dims, keep, mean) if total is None else total


def _first(call: Call, value: Random, dims: int | tuple[int, ...], keep: bool, mean: bool) -> Statistic:
    """The mean over the channels: zero for what follows weights; of an activation, a function of its variance."""
    build = call.build
    lazy = value if isinstance(value, Lazy) and mean else None
    f = lazy.of if lazy is not None else build.settled(value)
    axes = _positions(call, f, dims)
    if lazy is not None and not axes:
        dual, scale = lazy.dual or Quadrature(lazy.fn, name=lazy.label), lazy.scale
        return Statistic(f, axes, lambda v: scale * dual.mean(v), keep, lazy, build.where)
    if lazy is not None or not f.centered or not mean:
        raise build.unsupported(
            f"takes the {'mean' if mean else 'sum'} over the channels (axis {f.channel + 1}).",
            "That is one fixed read-out; use a Linear layer.",
        )
    return Statistic(f, axes, torch.zeros_like, keep, f, build.where)


def _has_channels(call: Call, value: Random, dims: int | tuple[int, ...]) -> bool:
    """Whether one of these axes of a tensor with its batch is that of the channels."""
    rank = len(value.shape) + 1
    places = (dims,) if isinstance(dims, int) else tuple(dims)
    return not isinstance(value, Statistic) and value.channel + 1 in [d % rank for d in places]


def _square_root(build: Builder, value: Random) -> Random | None:
    """What the value is the square of."""
    if isinstance(value, Squared):
        return value.of
    return build.memory.squares.get(value) if isinstance(value, Lazy) else None


def _positions(call: Call, f: Field, dims: int | tuple[int, ...]) -> tuple[int, ...]:
    """The axes of the grid among these axes of a tensor; the channels must be among them."""
    axes = call.axes(dims, f)
    if f.channel not in axes:
        raise call.build.unsupported(
            f"takes a statistic over positions (axes {[d + 1 for d in axes]}), which are not infinitely many.",
            f"Take it over the channels, axis {f.channel + 1}.",
        )
    return tuple(f.axis(d) for d in axes if d != f.channel)


def _second(call: Call, value: Random, dims: int | tuple[int, ...], keep: bool, total: bool) -> Statistic:
    """E[h²] over the channels (and positions); their sum in the finite network if `total`."""
    f = call.build.settled(value)
    axes = _positions(call, f, dims)
    count = f.width
    for axis in axes:
        count *= f.grid[axis]
    return Statistic(f, axes, (lambda v: v * count) if total else _itself, keep, None, call.build.where)


def _itself(v: Tensor) -> Tensor:
    return v


def read_square(call: Call) -> Random:
    """x², which a mean over the channels may follow."""
    value, build = call.get(0, "input"), call.build
    if isinstance(value, Field) and not value.gaussian:
        known = value.node in build.memory.functions or value.node in build.memory.parts
        if not known:
            return Squared(value)
    after = apply_function(build, value, torch.square, recognize(torch.square), call.label)
    if isinstance(after, Lazy):
        build.memory.squares[after] = value
    return after


def read_variance(call: Call, root: bool = False, both: bool = False) -> object:
    """x.var, x.std, torch.var_mean over the channels: with infinitely many, correction= makes no difference."""
    value = call.get(0, "input")
    given = call.kwargs.every()
    rest = list(call.args[1:])
    dims = given.get("dim", given.get("axis", rest[0] if rest else None))
    if dims is None or isinstance(dims, bool):
        raise call.build.unsupported("takes the variance of everything.", "Name the channels' axis: dim=…")
    keep = bool(given.get("keepdim", rest[2] if len(rest) > 2 else False))
    if isinstance(value, Lazy) and _positions(call, value.of, dims):
        raise call.build.unsupported(
            "takes the variance of an activation over channels and positions.", "Use F.layer_norm or F.group_norm."
        )
    f = centred(call.build, value, value.channel)
    variance = Statistic(f, _positions(call, f, dims), torch.sqrt if root else _itself, keep, None, call.build.where)
    return (variance, _first(call, value, dims, keep, True)) if both else variance


def read_length(call: Call) -> Statistic:
    """x.norm(dim=…), torch.linalg.vector_norm: √(width · variance)."""
    names = ("input", "p", "dim", "keepdim") if call.label == "norm" else ("x", "ord", "dim", "keepdim")
    o = call.named(*names)
    kind = o.get("p", o.get("ord", 2))
    if kind not in (2, 2.0, "fro", None) or o.get("dim") is None:
        raise call.build.unsupported(f"takes a norm (p={kind}, dim={o.get('dim')}).", "Use p=2 over the channels.")
    value: Random = o["input"] if "input" in o else o["x"]
    return _second(call, value, o["dim"], bool(o.get("keepdim", False)), total=True).then(torch.sqrt)


# What is done with a statistic


def times_statistic(build: Builder, value: Random, by: Statistic) -> Field:
    """x times a statistic of values of the same shape."""
    f = value if isinstance(value, Field) else build.settled(value)  # a scale that was just applied still waits
    if not by.kept or (f.shape, f.channel) != (by.of.shape, by.of.channel):
        raise build.unsupported(
            f"multiplies values of shape {f.shape} by a mean over the channels of values of shape {by.of.shape}"
            + ("." if by.kept else ", without its axis."),
            "Give both the same shape, and keepdim=True.",
        )
    return by_statistic(build, f, by)


def less_statistic(call: Call, value: Random, by: Statistic) -> Random:
    """x less a mean over the channels: its own."""
    if isinstance(by.mean_of, Field):  # of centred values: zero
        return value
    if by.mean_of is not value or not by.kept:
        raise call.build.unsupported(
            "adds a mean over the channels to values, or subtracts another one's.",
            "Subtract a value's own mean, x - x.mean(dim, keepdim=True), as LayerNorm does.",
        )
    return centred(call.build, value, value.channel)


def joined_statistics(call: Call, a: Statistic, b: Statistic, op: Callable[[Tensor, Tensor], Tensor]) -> Statistic:
    """Two statistics of one field: E[x²] − (E x)²."""
    if a.of.node != b.of.node or a.axes != b.axes or a.kept != b.kept:
        raise call.build.unsupported(
            "joins means over the channels of different values.", "Use F.layer_norm or F.rms_norm."
        )
    f, g = a.fn, b.fn
    return replace(a, fn=lambda v: op(f(v), g(v)), mean_of=None)


def with_axis(call: Call, rule: Callable[[Call], object]) -> object:
    """unsqueeze and x[..., None]: a statistic gets back the axis of the channels."""
    value = call.args[0]
    if not isinstance(value, Statistic):
        return rule(call)
    f = value.of
    rank = len(f.shape) + 1  # of the tensor with its channels
    if rule is read_unsqueeze:
        place = call.get(1, "dim") % rank
    else:
        items = list(call.args[1]) if isinstance(call.args[1], tuple) else [call.args[1]]
        if Ellipsis in items:
            at = items.index(Ellipsis)
            items[at : at + 1] = [slice(None)] * (rank - len(items) + 1)
        items += [slice(None)] * (rank - len(items))
        plain = [k for k, item in enumerate(items) if item is not None]
        place = items.index(None) if None in items and all(items[k] == slice(None) for k in plain) else -1
    if value.kept or place != f.channel + 1:
        raise call.build.unsupported("indexes a mean over the channels.", "Use keepdim=True.")
    return replace(value, kept=True)


METHODS: dict[str, Rule] = {
    "var": read_variance, "std": partial(read_variance, root=True), "norm": read_length, "square": read_square,
    "mean": read_mean, "sum": partial(read_mean, mean=False),
    "unsqueeze": partial(with_axis, rule=read_unsqueeze),
}  # fmt: skip
FUNCTIONS: dict[TorchFunction, Rule] = {
    F.layer_norm: read_layer_norm, F.rms_norm: read_rms_norm, torch.rms_norm: read_rms_norm,
    F.group_norm: read_group_norm, F.normalize: read_normalize, F.instance_norm: refuse_instance_norm,
    torch.square: read_square,
    torch.mean: read_mean, torch.sum: partial(read_mean, mean=False),
    torch.var: read_variance, torch.std: partial(read_variance, root=True),
    torch.var_mean: partial(read_variance, both=True), torch.std_mean: partial(read_variance, root=True, both=True),
    torch.norm: read_length, torch.linalg.vector_norm: read_length, torch.linalg.norm: read_length,
    torch.unsqueeze: partial(with_axis, rule=read_unsqueeze), operator.getitem: partial(with_axis, rule=read_item),
}  # fmt: skip
