"""Arithmetic in forward(): sums, products, powers, matrices."""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import InputError
from ..activations.recognize import recognize
from ..moments.axes import aligned, atoms_of, matched, on_channels, plain, seen
from ..moments.functions import apply_function, scale_by
from ..moments.joins import add_fields, concat_channels, joined_function, multiply_fields
from ..moments.origins import gaussian_origin
from ..moments.patches import same_windows
from ..moments.positions import Aggregate
from ..moments.readouts import read_out
from ..moments.shapes import take_positions, weigh_by
from ..moments.values import Field, Lazy, Patched, Random, Seen, Statistic, Unsettled, Value
from .attention import (
    MASKED,
    Scores,
    add_bias,
    add_known,
    mask_scores,
    multiply_by_letters,
    multiply_matrices,
    scale_scores,
)
from .biases import PositionBias, add_to_parameter, is_random, mask_bias, read_chosen
from .calls import RANDOM, Call, JoinedBias, Keywords, Parameter, TorchFunction
from .gates import apply_gain, apply_shift
from .norms import joined_statistics, less_statistic, read_square, times_statistic
from .parameters import as_value
from .rotary import add_turned, is_head, weigh_channels
from .tensors import read_permute


def read_elementwise(call: Call, target: TorchFunction, method: str | None = None) -> Random | Tensor:
    """An activation, by torch's function for it."""
    value, rest, kwargs = call.args[0], call.args[1:], call.kwargs.every()
    kwargs.pop("inplace", None)
    if isinstance(value, Parameter):
        if call.weights.rate(value.name):
            raise call.build.unsupported(
                f"is a function of the trained parameter {value.name}.",
                "Use the parameter itself, or freeze it (requires_grad_(False), or trainable= without it).",
            )
        known: Tensor = target(value.value.detach().double() * value.factor, *rest, **kwargs)
        return known
    # A tensor of several numbers would make the function another one for each channel or position.
    for v in (*rest, *kwargs.values()):
        if isinstance(v, (Parameter, *RANDOM)) or (isinstance(v, Tensor) and v.numel() != 1):
            raise call.build.unsupported("is given a tensor beside its input.", "Give numbers, or use arithmetic.")
    dual = recognize(target, *rest, **kwargs)
    # torch.relu_ would change what others read, for functions compose.
    copied = getattr(target, "__name__", "").endswith("_")

    def fn(x: Tensor) -> Tensor:
        """The function, out of place."""
        out: Tensor = target(x.clone() if copied else x, *rest, **kwargs)
        return out

    return apply_function(call.build, value, fn, dual, method or call.label)


def _together(call: Call, a: Random, b: Random, op: Callable[[Tensor, Tensor], Tensor]) -> Lazy | Patched | None:
    """Two elementwise functions of one field, joined: a function of it; None if they are none."""
    joined = same_windows(call.build, a, b, op)
    if joined is not None:
        return joined
    left, right = gaussian_origin(call.build, a), gaussian_origin(call.build, b)
    # Of different fields, or of several, it is for `moments.joins`, which asks whether they are correlated.
    if left is None or right is None or len(left[0]) != 1 or [f.node for f in left[0]] != [f.node for f in right[0]]:
        return None
    f, g = left[1], right[1]
    return Lazy(left[0][0], None, lambda x: op(f(x), g(x)), label=call.label)


def _number(call: Call, value: object) -> float | None:
    """A number that no sample may have changed: it is noted, to compare."""
    if isinstance(value, Tensor) and value.dim() == 0 and not value.requires_grad:
        value = float(value)
    if not isinstance(value, (bool, int, float)):
        return None
    # forward() may have computed it from the batch: `Infinite.prepare` compares the numbers of one sample and of many.
    call.build.numbers.append(float(value))
    return float(value)


def read_sum(call: Call, sign: float = 1.0) -> Random | Parameter:
    """x + y, or x − y by its sign: with a number, a known tensor, a parameter, or another random value."""
    a, b = call.get(0, "input"), call.get(1, "other")
    weights = (1.0, sign * float(call.kwargs.get("alpha", 1.0)))
    if not isinstance(a, RANDOM) or (isinstance(a, PositionBias) and isinstance(b, RANDOM)):
        a, b, weights = b, a, weights[::-1]
    if not isinstance(a, RANDOM) and (offset := _offset_parameter(call, a, b, weights)) is not None:
        return offset
    if not is_random(a) and not is_random(b) and (bias := add_to_parameter(a, b, weights)) is not None:
        return bias
    if not isinstance(a, RANDOM):
        raise call.build.unsupported("adds a parameter to an input.", "Put a layer with weights before it.")
    by_a, by_b = weights
    shift = _number(call, b)
    if isinstance(a, Unsettled):
        return _sum_along(call, a, b if shift is None else shift, by_a, by_b)
    if shift is not None:
        if shift == 0 and by_a == 1:
            return a
        return apply_function(call.build, a, lambda x: by_a * x + by_b * shift, None, call.label)
    if isinstance(a, Statistic) or isinstance(b, Statistic):
        return _with_statistic(call, a, b, by_a, by_b)
    if isinstance(b, RANDOM):
        # x + tanh(x) is a function of x: as two fields they would be correlated, and refused.
        joined = _together(call, a, b, lambda x, y: by_a * x + by_b * y)
        if joined is not None:
            return joined
    else:
        shifted = apply_shift(call, a, b) if isinstance(b, Parameter) and weights == (1.0, 1.0) else None
        if shifted is not None:
            return shifted
        b = _beside(call, b, a)
    first, second = (v if w == 1 else _multiple(call, v, w) for v, w in ((a, by_a), (b, by_b)))
    return add_fields(call.build, [first, second])


def _plus(call: Call, a: Random, b: object) -> Random:
    """The sum of a random value and something."""
    after = read_sum(replace(call, args=(a, b), kwargs=Keywords()))
    assert not isinstance(after, Parameter)
    return after


def _sum_along(call: Call, a: Unsettled, b: object, by_a: float, by_b: float) -> Random:
    """Scores plus known numbers; or values along other axes plus known ones, a parameter, or values along the same."""
    build = call.build
    if isinstance(a, Scores):
        if isinstance(b, (Parameter, *RANDOM)):
            bias = PositionBias.of(b)
            scaled = a if by_a == 1 else scale_scores(build, a, by_a)
            return add_bias(call, scaled, b if bias is None else bias.times(by_b))
        scaled = a if by_a == 1 else scale_scores(build, a, by_a)
        # A number is the same for all keys: no softmax sees it.
        return add_known(build, scaled, by_b * b) if isinstance(b, Tensor) else scaled
    assert isinstance(a, Seen)
    first = a if by_a == 1 else scale_by(build, a, by_a)
    assert isinstance(first, Seen)
    turned = isinstance(b, Seen) and (a.turn is not None or b.turn is not None)
    if turned:
        together = add_turned(build, a, b, (by_a, by_b))  # type: ignore[arg-type]
        if together is None:
            raise build.unsupported(*(b.why() if a.turn is None else a.why()))  # type: ignore[attr-defined]
        return together
    if isinstance(b, Seen) and b.axes == a.axes and isinstance(a.of, RANDOM) and a.of.shape == b.of.shape:
        return replace(a, of=_plus(call, first.of, scale_by(build, b.of, by_b)))
    both = matched(build, a, seen(build, b)) if isinstance(b, RANDOM) else None
    if both is not None:
        left, right = (v.of if w == 1 else scale_by(build, v.of, w) for v, w in zip(both, (by_a, by_b), strict=True))
        return plain(build, replace(both[0], of=_plus(call, left, right)))
    if isinstance(b, float):
        return apply_function(build, first, lambda x: x + by_b * b, None, call.label)
    if isinstance(b, Tensor):
        # Batch first, positions in their order, channels last, as the field has them.
        order = [*atoms_of(a.axes, "batch"), *sorted(atoms_of(a.axes, "position"), key=lambda v: v.place)]
        known = aligned(by_b * b, a.axes, [*order, *a.axes[-1]]).flatten(len(order))
        return on_channels(build, first, lambda f: _plus(call, f, known))
    if isinstance(b, Parameter) and b.value.dim() == 1:
        scaled_b = replace(b, factor=b.factor * by_b)
        return on_channels(build, first, lambda f: _plus(call, f, scaled_b))
    raise build.unsupported(*a.why())


def _offset_parameter(call: Call, a: object, b: object, weights: tuple[float, float]) -> Parameter | None:
    """1 + w of a parameter whose entries are all equal at the start, as a norm's scale is written; else None."""
    p, other = (a, b) if isinstance(a, Parameter) else (b, a)
    if not isinstance(p, Parameter) or p.factor != 1 or weights != (1.0, 1.0):
        return None
    constant = p.value.numel() > 0 and bool((p.value == p.value.flatten()[0]).all())
    number = _number(call, other)
    return None if number is None or not constant else replace(p, value=p.value.detach() + number)


def _with_statistic(call: Call, a: Random, b: object, by_a: float, by_b: float) -> Random:
    """A sum with a mean over the channels: of two, or a value less its own."""
    if isinstance(a, Statistic) and isinstance(b, Statistic):
        return joined_statistics(call, a, b, lambda x, y: by_a * x + by_b * y)
    if isinstance(b, Statistic) and (by_a, by_b) == (1.0, -1.0):
        return less_statistic(call, a, b)
    raise call.build.unsupported(
        "adds a mean over the channels to values.",
        "Subtract a value's own mean, x - x.mean(dim, keepdim=True), as LayerNorm does.",
    )


def _multiple(call: Call, value: Tensor | Random, factor: float) -> Tensor | Random:
    """factor · value, known or random."""
    return value * factor if isinstance(value, Tensor) else scale_by(call.build, value, factor)


def _beside(call: Call, value: Tensor | Parameter, like: Random) -> Tensor | Field:
    """A known tensor or a parameter, broadcast to the shape of a random value."""
    shape = like.shape
    if isinstance(value, Parameter):
        sizes = [1] * (len(shape) - value.value.dim()) + list(value.value.shape)
        if value.value.dim() > len(shape) + 1 or (value.value.dim() == len(shape) + 1 and value.value.shape[0] != 1):
            raise call.build.unsupported(f"adds {value.name}, whose first axis is the batch.", "Give it size 1 there.")
        sizes = sizes[-len(shape) :]
        if sizes[like.channel] != shape[like.channel]:
            raise call.build.unsupported(
                f"adds the parameter {value.name}, which is not one number per channel.",
                "Give it the channels' size on their axis.",
            )
        # The parameter is a random value of its own, with one position where it is the same for all.
        f = as_value(call, value, tuple(sizes), like.channel)
        for dim, (have, want) in enumerate(zip(sizes, shape, strict=True)):
            if have == 1 and want > 1:  # of more positions than the value has, the value is repeated
                f = take_positions(call.build, f, dim, (0,) * want, drop=False)
        return f
    if value.dim() > len(shape) + 1:
        raise InputError(f"{call.build.where}: values of shapes {tuple(value.shape)} and {(call.build.size, *shape)}.")
    return value.expand(call.build.size, *shape)


def read_product(call: Call, divide: bool = False) -> Random | Parameter:
    """x · y or x / y, by a number, a known tensor (a number per position), a parameter, or another random value."""
    a, b = call.get(0, "input"), call.get(1, "other")
    build = call.build
    # A product commutes: a becomes the random value, or the parameter that a number multiplies.
    if not divide and not isinstance(a, RANDOM) and (isinstance(b, RANDOM) or not isinstance(a, Parameter)):
        a, b = b, a
    factor = _number(call, b)
    if isinstance(a, Parameter) and factor is not None:
        return replace(a, factor=a.factor * (1 / factor if divide else factor))
    if divide and isinstance(b, RANDOM):
        return _quotient(call, a, b)
    if not isinstance(a, RANDOM):
        raise build.unsupported("multiplies an input by a parameter.", "Put a layer with weights before it.")
    if factor is not None and isinstance(a, Scores):
        return scale_scores(build, a, 1 / factor if divide else factor)
    if factor is not None:
        return scale_by(build, a, 1 / factor if divide else factor)
    if isinstance(b, RANDOM):
        return _product(call, a, b)
    if isinstance(b, Parameter):
        if divide:
            raise build.unsupported(f"divides by the parameter {b.name}.", "Multiply by one.")
        return apply_gain(call, a, b)
    # Channels are alike in the limit, so a known factor may depend on samples and positions alone.
    known = b.double().reciprocal() if divide else b.double()
    if isinstance(a, Seen):  # but those of a head may be turned, before scores are made of them
        return weigh_channels(build, a, known)
    shape = (build.size, *a.shape)
    aligned = known.reshape(*[1] * (len(shape) - known.dim()), *known.shape)
    if aligned.shape[1 + a.channel] != 1 and isinstance(a, Field) and is_head(a):
        return weigh_channels(build, build.memory.turned.get(a.node) or seen(build, a), known)
    if aligned.shape[1 + a.channel] != 1:
        raise build.unsupported(
            "multiplies each channel by a number of its own.", "Give the factor size 1 on the channels' axis."
        )
    return weigh_by(build, a, aligned.expand(build.size, *aligned.shape[1:]))


def _product(call: Call, a: Random, b: Random) -> Random:
    """Of two random values."""
    if isinstance(a, Statistic) and isinstance(b, Statistic):
        return joined_statistics(call, a, b, torch.mul)
    if isinstance(a, Statistic) or isinstance(b, Statistic):
        value, by = (b, a) if isinstance(a, Statistic) else (a, b)
        assert isinstance(by, Statistic)
        return times_statistic(call.build, value, by)
    if isinstance(a, Seen) or isinstance(b, Seen):
        both = matched(call.build, seen(call.build, a), seen(call.build, b))
        if both is not None:
            left, right = both
            return plain(call.build, replace(left, of=_product(call, left.of, right.of)))
    if a is b:
        return read_square(replace(call, args=(a,), kwargs=Keywords()))
    return _together(call, a, b, torch.mul) or multiply_fields(call.build, [a, b])


def _quotient(call: Call, a: object, b: Random) -> Random:
    """By a random value: a function of it, if what is divided is a number or a function of the same field."""
    if isinstance(b, Statistic) and isinstance(a, RANDOM):
        return _product(call, a, b.then(torch.reciprocal))
    number = _number(call, a)
    if number is not None:
        return apply_function(call.build, b, lambda x: number / x, None, call.label)
    joined = _together(call, a, b, torch.div) if isinstance(a, RANDOM) else None
    if joined is None:
        raise call.build.unsupported("divides by a random value.", "Use a norm layer, or multiply.")
    return joined


def read_power(call: Call) -> Random | Tensor:
    """x ** p, or p ** x."""
    base, exponent = call.get(0, "input"), call.get(1, "exponent")
    if isinstance(base, RANDOM):
        square = isinstance(exponent, (int, float)) and exponent == 2
        return read_square(call) if square else read_elementwise(call, torch.pow)
    number = _number(call, base)
    if number is None:
        raise call.build.unsupported("raises a known value to a random one.", "Use a number as base.")
    return apply_function(call.build, exponent, lambda x: number**x, None, call.label)


def read_masked_fill(call: Call) -> Random | Parameter:
    """masked_fill(mask, 0)."""
    value, mask, fill = call.args[0], call.get(1, "mask"), call.get(2, "value")
    if isinstance(value, Scores):
        return mask_scores(call.build, value, ~mask, float(fill))
    if (bias := PositionBias.of(value)) is not None:
        return mask_bias(call.build, bias, ~mask, float(fill), MASKED)
    if _number(call, fill) != 0:
        raise call.build.unsupported(f"fills random values with {fill}.", "Fill with 0, or use key_padding_mask.")
    return read_product(replace(call, args=(value, (~mask).double()), kwargs=Keywords()))


def read_where(call: Call) -> Random:
    """torch.where(mask, scores, −∞), or with both exchanged; of a bias for the scores likewise."""
    if (chosen := read_chosen(call, MASKED)) is not None:
        return chosen
    mask, a, b = call.get(0, "condition"), call.get(1, "input"), call.get(2, "other")
    if isinstance(b, Scores):
        mask, a, b = ~mask, b, a
    fill = float(b) if isinstance(b, (int, float)) or (isinstance(b, Tensor) and b.numel() == 1) else None
    if not isinstance(a, Scores) or fill is None or isinstance(mask, (Parameter, *RANDOM)):
        raise call.build.unsupported(
            "chooses between random values.",
            "Mask attention's scores with −inf, or write an activation by torch functions.",
        )
    return mask_scores(call.build, a, mask, fill)


def read_baddbmm(call: Call) -> Random:
    """torch.baddbmm(known, q, kᵀ, beta, alpha): scores and known summands."""
    known, a, b = call.get(0, "input"), call.get(1, "batch1"), call.get(2, "batch2")
    beta, alpha = call.kwargs.get("beta", 1), call.kwargs.get("alpha", 1)
    if not isinstance(a, RANDOM) or not isinstance(b, RANDOM) or isinstance(known, (Parameter, *RANDOM)):
        raise call.build.unsupported("multiplies other than queries and keys.", "Use torch.bmm and a sum.")
    after = multiply_matrices(call, a, b)
    if isinstance(after, Scores):
        after = scale_scores(call.build, after, float(alpha))
        return add_known(call.build, after, beta * known) if beta else after
    raise call.build.unsupported("adds to attention's output.", "Use torch.bmm and a sum.")


def read_addmm(call: Call) -> Random:
    """torch.addmm(bias, x, weight), as Hugging Face's Conv1D has it."""
    bias, value, weight = call.get(0, "input"), call.get(1, "mat1"), call.get(2, "mat2")
    plain_form = call.kwargs.get("beta", 1) == 1 and call.kwargs.get("alpha", 1) == 1
    if not (isinstance(bias, Parameter) and isinstance(weight, Parameter) and plain_form):
        raise call.build.unsupported("has weights or a bias that are no parameter.", "Use nn.Linear.")
    return _linear(call, value, weight, bias, 0)


def read_einsum(call: Call) -> Random:
    """torch.einsum of queries and keys, or of attention and values."""
    equation, operands = call.args[0], call.args[1:]
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (tuple, list)) else operands
    if len(operands) == 2 and all(isinstance(v, RANDOM) for v in operands):
        left, right, output = re.split(",|->", equation.replace(" ", "")) if "->" in equation else ("", "", "")
        summed = [k for k, c in enumerate(left) if c not in output]
        if left == right and len(summed) == 1 and [*left[: summed[0]], *left[summed[0] + 1 :]] == list(output):
            return _inner(call, equation, operands, summed[0] - 1)
        return multiply_by_letters(call, equation, *operands)
    before, _, after = equation.replace(" ", "").partition("->")
    if len(operands) == 1 and before.isalpha() and sorted(before) == sorted(after) == sorted(set(before)):
        order = tuple(before.index(letter) for letter in after)  # letters that only change places
        moved = read_permute(replace(call, args=(operands[0], order), kwargs=Keywords()))
        assert not isinstance(moved, Parameter)
        return moved
    raise call.build.unsupported(f"is einsum {equation!r}.", "Use nn.Linear, matmul or attention.")


def _inner(call: Call, equation: str, values: Sequence[Random], axis: int) -> Field:
    """ "bc,bc->b": the inner product of two values over their channels, axis `axis` of their shape."""
    total = read_out(call.build, multiply_fields(call.build, values), (axis,))
    if total is None:
        raise call.build.unsupported(
            f"is einsum {equation!r} over positions, or of values neither of which follows weights.",
            "Contract the channels, and let one of the two branches end in a Linear layer.",
        )
    return total


def read_extreme(call: Call, op: Callable[[Tensor, Tensor], Tensor]) -> Random:
    """torch.maximum and torch.minimum of values that are functions of independent Gaussian ones, or of the same."""
    a, b = call.get(0, "input"), call.get(1, "other")
    if not (isinstance(a, RANDOM) and isinstance(b, RANDOM)):
        raise call.build.unsupported("compares random values with known ones.", "Use torch.clamp, with a number.")
    joined = _together(call, a, b, op) or joined_function(call.build, [a, b], op)
    if joined is None:
        raise call.build.unsupported(
            "takes the larger or smaller of values whose joint law is not known here.",
            "Compare outputs of Linear or Conv layers, or activations of them.",
        )
    return joined


def read_matmul(call: Call) -> Random:
    """A known matrix over positions times values (graphs), or values times a parameter (a linear layer)."""
    a, b = call.args[0], call.get(1, "mat2", call.kwargs.get("other"))
    build = call.build
    if isinstance(b, Parameter) and b.value.dim() == 3 and b.value.shape[0] == 1:  # expanded along the batch, for bmm
        b = b.moved(lambda v: v[0])
    if isinstance(b, Parameter) and isinstance(a, (*RANDOM, Tensor)):
        return _linear(call, a, b, None, 0)
    if isinstance(a, RANDOM) and isinstance(b, RANDOM):
        return multiply_matrices(call, a, b)
    if not isinstance(a, Tensor) or not isinstance(b, RANDOM):
        raise build.unsupported(
            "multiplies random values by a known matrix from the right, or by a parameter from the left.",
            "Multiply by weights from the right, by known matrices over positions from the left.",
        )
    f = build.settled(b)
    if len(f.shape) != 2 or f.channel != 1:
        raise build.unsupported(f"aggregates values of shape {f.shape}.", "Needed: [batch, nodes, channels].")
    matrix = a.to_dense() if a.layout != torch.strided else a  # moments over positions are dense in any case
    matrix = (matrix if matrix.dim() == 3 else matrix.expand(build.size, *matrix.shape)).double()
    slot = build.slot(matrix.movedim(0, -1))
    return build.apply(Aggregate(slot), f, shape=(matrix.shape[1], f.width))


def read_linear(call: Call) -> Random:
    """F.linear with parameters."""
    value, weight, bias = call.args[0], call.get(1, "weight"), call.get(2, "bias")
    if not isinstance(weight, Parameter):
        raise call.build.unsupported("has weights that are no parameter.", "Use nn.Linear.")
    if isinstance(bias, JoinedBias):
        return _linear_by_parts(call, value, weight, bias)
    if bias is not None and not isinstance(bias, Parameter):
        raise call.build.unsupported("has a bias that is no parameter.", "Use nn.Linear.")
    return _linear(call, value, weight, bias, weight.value.dim() - 1)


def _linear_by_parts(call: Call, value: Value, weight: Parameter, bias: JoinedBias) -> Random:
    """F.linear whose bias has several parts: as many layers side by side, each by rows of the weights."""
    if isinstance(value, Seen):
        return on_channels(call.build, value, lambda f: _linear_by_parts(call, f, weight, bias))
    if sum(bias.sizes) != len(weight.value):
        raise InputError(f"{call.build.where}: {sum(bias.sizes)} biases for {len(weight.value)} rows of {weight.name}.")
    parts, start = [], 0
    for part, rows in zip(bias.parts, bias.sizes, strict=True):
        # The initialisation of all rows is that of the whole matrix, whichever of them a part has.
        some = weight.part((slice(start, start + rows),))
        parts.append(_linear(call, value, some, part if isinstance(part, Parameter) else None, 1))
        start += rows
    return concat_channels(call.build, parts)


def _linear(call: Call, value: Value, weight: Parameter, bias: Parameter | None, axis: int) -> Random:
    """Values times a parameter, their channels along this axis of it: a matrix, or one read-out."""
    if isinstance(value, Seen):
        return on_channels(call.build, value, lambda f: _linear(call, f, weight, bias, axis))
    f = call.build.field(value, -1)
    fan_in, width = weight.value.shape[axis], weight.value.shape[1 - axis] if weight.value.dim() == 2 else 1
    if f.width != fan_in:
        raise InputError(f"{call.build.where}: the weights {weight.name} take {fan_in} features; given were {f.width}.")
    names = (weight.name, bias.name if bias is not None else weight.name + ".bias")
    drawn = weight.drawn(call.build)
    tensors = (drawn, None if bias is None else bias.drawn(call.build))
    op = call.weights.layer("", fan_in, bias=bias is not None, tensors=tensors, names=names, whole=drawn.shape[axis])
    # A multiple of a parameter has its variance and its gradient times the square.
    w, b = weight.factor**2, 1.0 if bias is None else bias.factor**2
    if (w, b) != (1.0, 1.0):
        op = replace(op, w_var=op.w_var * w, w_rate=op.w_rate * w, b_var=op.b_var * b, b_rate=op.b_rate * b)
    return call.build.affine(f, width, op)
