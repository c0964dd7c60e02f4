"""Gates and masks: scales of each channel's own (LayerScale), comparisons and torch.where, shifts after norms."""

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..layers.basic import scaled_and_shifted
from ..moments.core import GAIN, RandomAffine
from ..moments.functions import apply_function, scale_by
from ..moments.joins import add_fields
from ..moments.origins import gaussian_origin
from ..moments.shapes import weigh_by
from ..moments.values import Field, Lazy, Random, Statistic
from .calls import RANDOM, Call, Parameter, Rule, TorchFunction

# Scales and shifts by parameters


def _one_per_channel(value: Random, by: Parameter) -> bool:
    """Whether a parameter, aligned as torch broadcasts, has a number for each channel and nothing else."""
    rank = len(value.shape) + 1
    if by.value.dim() > rank:
        return False
    sizes = [1] * (rank - by.value.dim()) + list(by.value.shape)
    return all(n == (value.shape[value.channel] if k == value.channel + 1 else 1) for k, n in enumerate(sizes))


def apply_gain(call: Call, value: Random, by: Parameter) -> Field:
    """Each channel times a parameter of its own (LayerScale: [C], [C, 1, 1], [1, C, 1, 1]).

    Its limit: the scales stay what they are at the start, and the kernel of each is the value itself, times its rate.
    """
    build = call.build
    f = build.settled(value)
    rate = call.weights.rate(by.name) * by.factor**2
    if by.value.numel() == 1 and f.width != 1:
        if rate:
            raise build.unsupported(
                f"multiplies all channels by one trained number ({by.name}). Its gradient is a sum over all channels, "
                "as random as the network's output: the tangent kernel of two wide networks differs by it, and has no "
                "limit.",
                f"Freeze it (requires_grad_(False), or trainable= without {by.name}), or give every channel its own: "
                f"nn.Parameter(torch.full(({f.width},), …)).",
            )
        return build.settled(scale_by(build, value, float(by.value.detach()) * by.factor))
    if not _one_per_channel(f, by):
        raise build.unsupported(
            f"multiplies values of shape {f.shape} by the parameter {by.name} of shape {tuple(by.value.shape)}, which "
            f"is not one number per channel (axis {f.channel + 1}).",
            f"Give it {f.width} numbers on the channels' axis, and size 1 elsewhere.",
        )
    # Second moments see the mean square of the factors over channels; only equal ones leave the values Gaussian.
    square = (by.value.detach().double() * by.factor).square()
    constant = float(square.max() - square.min()) == 0
    positive = constant and float(by.value.detach().flatten()[0]) * by.factor > 0  # a multiple by √w_var
    op = RandomAffine(float(square.mean()), means=GAIN)
    kept = replace(f, gaussian=f.gaussian and constant, alike=f.alike and constant)
    scaled = build.trained_pass(op, kept, build.identity(op) if positive else None)
    if f.node in build.memory.normed_nodes:
        build.memory.normed_nodes.add(scaled.node)
    factor = rate / float(square.mean()) if float(square.mean()) else 0.0
    # Factors of 0 (LayerScale may begin so): nothing passes, yet their gradient is the value itself.
    if not factor and rate:
        return build.apply(RandomAffine(0.0, 0.0, rate, means=GAIN), f, gaussian=False)
    gained = build.identity(RandomAffine(1.0, 0.0, factor)) if factor else None
    return replace(scaled, gain=factor, gained=gained)


def apply_shift(call: Call, value: Random, by: Parameter) -> Field | None:
    """A norm's shift, zeros at the start, written as a sum; None for other parameters."""
    known = isinstance(value, Field) and value.node in call.build.memory.normed_nodes
    if not known or not isinstance(value, Field) or not _one_per_channel(value, by) or bool(by.value.any()):
        return None
    rate = call.weights.rate(by.name) * by.factor**2
    after = replace(scaled_and_shifted(call.build, value, value.gain, rate), gained=value.gained)
    call.build.memory.normed_nodes.add(after.node)
    return after


# Comparisons and choices


def read_comparison(call: Call, op: Callable[[Tensor, Tensor | float], Tensor]) -> Random:
    """x > 0: a step of a field, 1 or 0; torch.where makes an activation of it."""
    a, b = call.args[0], call.get(1, "other")
    swapped = not isinstance(a, RANDOM)
    value, number = (b, a) if swapped else (a, b)
    if isinstance(number, Tensor) and number.numel() == 1:
        number = float(number)
    if not isinstance(number, (int, float)) or isinstance(value, Statistic):
        raise call.build.unsupported("compares random values with others.", "Compare with a number.")
    call.build.numbers.append(float(number))

    def step(x: Tensor) -> Tensor:
        """1 where it holds; 0·x lets autograd find the slope, which is zero."""
        return (op(torch.full_like(x, number), x) if swapped else op(x, number)).to(x.dtype) + 0 * x

    return apply_function(call.build, value, step, None, call.label)


def read_where(call: Call) -> Random:
    """torch.where(mask, a, b): a known mask over samples and positions, or a comparison of the values themselves."""
    condition, a, b = call.get(0, "condition"), call.get(1, "input"), call.get(2, "other")
    if isinstance(condition, RANDOM):
        return _chosen(call, condition, a, b)
    if not isinstance(condition, Tensor) or any(isinstance(v, Parameter) for v in (a, b)):
        raise call.build.unsupported("chooses between parameters.", "Choose between values, or multiply by a mask.")
    like = a if isinstance(a, RANDOM) else b
    mask = condition.double()
    mask = mask.reshape(*[1] * (len(like.shape) + 1 - mask.dim()), *mask.shape)
    if mask.shape[1 + like.channel] != 1 or len(mask.shape) != len(like.shape) + 1:
        raise call.build.unsupported("chooses by channel.", "Give the mask size 1 on the channels' axis.")
    parts = [_masked(call, v, m, like) for v, m in ((a, mask), (b, 1 - mask))]
    kept = [p for p in parts if p is not None]
    if len(kept) == 1 and isinstance(kept[0], Field):
        return kept[0]
    return add_fields(call.build, kept)


def _masked(call: Call, value: object, mask: Tensor, like: Random) -> Field | Tensor | None:
    """A value times a mask; None for zeros."""
    build = call.build
    full = mask.expand(build.size, *mask.shape[1:])
    if isinstance(value, RANDOM):
        return weigh_by(build, value, full)
    if not isinstance(value, Tensor):
        value = torch.tensor(float(value), dtype=torch.float64)  # type: ignore[arg-type]  # a number
    if not bool(value.any()):
        return None
    return (value.double() * full.to(value.device)).expand(build.size, *like.shape)


def _chosen(call: Call, condition: Random, a: object, b: object) -> Random:
    """torch.where(x > 0, f(x), g(x)): one function of the field that all three are of."""
    origins: list[tuple[Field | None, Callable[..., Tensor]]] = []
    for value in (condition, a, b):
        if isinstance(value, Tensor) and value.numel() == 1:
            value = float(value)
        if isinstance(value, (int, float)):
            call.build.numbers.append(float(value))
            origins.append((None, partial(torch.full_like, fill_value=float(value))))
            continue
        known = gaussian_origin(call.build, value) if isinstance(value, RANDOM) else None
        if known is None or len(known[0]) != 1:
            raise call.build.unsupported(
                "chooses by random values that are no functions of one layer's outputs.",
                "Compare and choose among functions of the same values: torch.where(x > 0, f(x), g(x)).",
            )
        origins.append((known[0][0], known[1]))
    fields = [f for f, _ in origins if f is not None]
    if any(f.node != fields[0].node for f in fields):
        raise call.build.unsupported(
            "chooses by other values than those it gives.", "Use torch.where(x > 0, f(x), g(x)) of one x."
        )
    (_, which), (_, first), (_, second) = origins
    return Lazy(fields[0], None, lambda x: torch.where(which(x) != 0, first(x), second(x)), label=call.label)


def _one_of(rule: Callable[..., Tensor], call: Call) -> object:
    """view, reshape, unsqueeze of a parameter: the same numbers by other sizes."""
    p: Parameter = call.args[0]
    rest, options = call.args[1:], call.kwargs.every()
    return p.formed(lambda v: rule(v, *rest, **options))


def or_parameter(method: str, rule: Rule) -> Rule:
    """The rule of a method that parameters have too, where it only changes their form."""

    def read(call: Call) -> object:
        """By what it is called on."""
        if isinstance(call.args[0], Parameter):
            return _one_of(getattr(Tensor, method), call)
        return rule(call)

    return read


COMPARISONS = {
    name: partial(read_comparison, op=getattr(operator, name)) for name in ("gt", "lt", "ge", "le")
}  # fmt: skip
METHODS: dict[str, Rule] = {**COMPARISONS, "where": lambda call: read_where(replace(call, args=_moved(call.args)))}
FUNCTIONS: dict[TorchFunction, Rule] = {torch.where: read_where}
for _name, _rule in COMPARISONS.items():
    FUNCTIONS |= {getattr(operator, _name): _rule, getattr(torch, _name): _rule}


def _moved(args: tuple[object, ...]) -> tuple[object, ...]:
    """x.where(condition, other) in the order of torch.where."""
    return (args[1], args[0], *args[2:])
