"""Products of a weight with data in all the forms that torch has, written as linear layers, so that one rule serves.

In y = Σ w·x every index of the weight is shared with the data (summed over: fan-in), with the result (fan-out), or with
both (groups: experts, heads). What the weight does not have are positions.
"""

import math
import string
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules import NoRule

Steps = Callable[[], Tensor]
IsWeight = Callable[[object], bool]


def grouped_linear(x: Tensor, weight: Tensor) -> Tensor:
    """y[…, g, o] = Σ_i x[…, g, i] W[g, o, i]. It has a rule of its own (`GroupedRule`)."""
    if torch.overrides.has_torch_function((x, weight)):
        return torch.overrides.handle_torch_function(grouped_linear, (x, weight), x, weight)
    return torch.einsum("...gi,goi->...go", x, weight)


def contraction_steps(data: Tensor, weight: Tensor, of_data: str, of_weight: str, of_out: str) -> Steps:
    """einsum("of_data,of_weight->of_out") as a linear layer, or one for each group."""
    for letters in (of_data, of_weight, of_out):
        if len(set(letters)) != len(letters):
            raise NoRule  # a diagonal
    of_data, data_sums = _without_sums(of_data, of_weight + of_out)
    of_weight, weight_sums = _without_sums(of_weight, of_data + of_out)
    shapes = [[n for k, n in enumerate(v.shape) if k not in s] for v, s in ((data, data_sums), (weight, weight_sums))]
    size = dict(zip(of_weight, shapes[1], strict=True)) | dict(zip(of_data, shapes[0], strict=True))
    groups = [v for v in of_weight if v in of_data and v in of_out]
    fan_in = [v for v in of_weight if v not in of_out]
    fan_out = [v for v in of_weight if v not in of_data]
    positions = [v for v in of_data if v not in of_weight]

    def count(letters: Sequence[str]) -> int:
        """How many entries the axes of these letters have together."""
        return math.prod(size[v] for v in letters)

    def steps() -> Tensor:
        """The contraction as a linear layer (grouped, where letters stay in both operands)."""
        x = data.sum(data_sums) if data_sums else data
        w = weight.sum(weight_sums) if weight_sums else weight
        x = x.permute([of_data.index(v) for v in (*positions, *groups, *fan_in)])
        w = w.permute([of_weight.index(v) for v in (*groups, *fan_out, *fan_in)])
        lead = [size[v] for v in positions]
        if groups:
            x = x.reshape(*lead, count(groups), count(fan_in))
            y = grouped_linear(x, w.reshape(count(groups), count(fan_out), count(fan_in)))
        else:
            y = F.linear(x.reshape(*lead, count(fan_in)), w.reshape(count(fan_out), count(fan_in)))
        y = y.reshape(*lead, *(size[v] for v in (*groups, *fan_out)))
        of_y = [*positions, *groups, *fan_out]
        return y.permute([of_y.index(v) for v in of_out])

    return steps


def _without_sums(letters: str, others: str) -> tuple[str, list[int]]:
    """The letters that occur elsewhere too, and the dimensions of those that are just summed over."""
    return "".join(v for v in letters if v in others), [k for k, v in enumerate(letters) if v not in others]


def einsum_steps(is_weight: IsWeight, equation: object, *operands: Tensor) -> Steps:
    """torch.einsum with one weight; the data are multiplied with each other first."""
    if not isinstance(equation, str):
        raise NoRule
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    terms, out = _letters(equation, [v.dim() for v in operands])
    weights = [(v, t) for v, t in zip(operands, terms, strict=True) if is_weight(v)]
    data = [(v, t) for v, t in zip(operands, terms, strict=True) if not is_weight(v)]
    if len(weights) != 1:  # not linear in its weights
        raise NoRule
    (weight, of_weight) = weights[0]
    if len(data) == 1:
        return contraction_steps(data[0][0], weight, data[0][1], of_weight, out)
    # Of the letters of the data, those that the weight or the result still need.
    kept = "".join(dict.fromkeys(v for _, t in data for v in t if v in of_weight + out))
    join = ",".join(t for _, t in data) + "->" + kept

    def steps() -> Tensor:
        """All data first, then the weight."""
        return contraction_steps(torch.einsum(join, *(v for v, _ in data)), weight, kept, of_weight, out)()

    shape = torch.einsum(join, *(torch.empty(v.shape, device="meta") for v, _ in data))
    contraction_steps(shape, weight.detach(), kept, of_weight, out)  # NoRule before anything is computed
    return steps


def _letters(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """The terms and the result of an equation, with letters in place of the dots."""
    left, arrow, out = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ranks):
        raise NoRule
    free = [v for v in string.ascii_letters if v not in equation]
    extra = max((rank - len(t) + 3 for t, rank in zip(terms, ranks, strict=True) if "..." in t), default=0)
    dots = "".join(free[:extra])
    if not arrow:
        once = [v for v in sorted(set(left) - {",", "."}) if left.count(v) == 1]
        out = ("..." if "..." in left else "") + "".join(once)
    full = []
    for t, rank in zip(terms, ranks, strict=True):
        count = rank - len(t) + 3  # dimensions that the dots of this term stand for
        full.append(t.replace("...", dots[len(dots) - count :] if count else "") if "..." in t else t)
    return full, out.replace("...", dots)


def matmul_steps(is_weight: IsWeight, input: Tensor, other: Tensor) -> Steps:
    """input @ other with one of them a weight, of any rank."""
    a, b = input, other
    if a.dim() < 1 or b.dim() < 1:
        raise NoRule
    rank = max(a.dim(), b.dim(), 2)
    batch = string.ascii_lowercase[: rank - 2]
    of_a = batch[rank - a.dim() :] + "XY" if a.dim() > 1 else "Y"
    of_b = batch[rank - b.dim() :] + "YZ" if b.dim() > 1 else "Y"
    out = batch + ("X" if a.dim() > 1 else "") + ("Z" if b.dim() > 1 else "")
    return _broadcast(is_weight, a, b, of_a, of_b, out)


def _broadcast(is_weight: IsWeight, a: Tensor, b: Tensor, of_a: str, of_b: str, out: str) -> Steps:
    """A contraction in which dimensions of size 1 go with any other."""
    large = {v for v, n in (*zip(of_a, a.shape, strict=True), *zip(of_b, b.shape, strict=True)) if n > 1}

    def squeezed(v: Tensor, letters: str) -> tuple[Tensor, str]:
        """An operand without the axes along which it is repeated."""
        keep = [k for k, letter in enumerate(letters) if v.shape[k] > 1 or letter not in large]
        # A letter of size 1 everywhere stays with both; one of size 1 in just this operand is dropped.
        return v.squeeze([k for k in range(v.dim()) if k not in keep]), "".join(letters[k] for k in keep)

    weight_first = is_weight(a)
    data, weight = (b, a) if weight_first else (a, b)
    of_data, of_weight = (of_b, of_a) if weight_first else (of_a, of_b)

    def steps() -> Tensor:
        """The contraction of what is left after the repeated axes are gone."""
        x, of_x = squeezed(data, of_data)
        w, of_w = squeezed(weight, of_weight)
        return contraction_steps(x, w, of_x, of_w, out)()

    x, of_x = squeezed(data.detach(), of_data)
    w, of_w = squeezed(weight.detach(), of_weight)
    contraction_steps(x, w, of_x, of_w, out)  # NoRule before anything is computed
    return steps


def bmm_steps(is_weight: IsWeight, input: Tensor, mat2: Tensor) -> Steps:
    """torch.bmm with one of them a weight."""
    return _broadcast(is_weight, input, mat2, "aXY", "aYZ", "aXZ")


def baddbmm_steps(
    is_weight: IsWeight, input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Steps:
    """torch.baddbmm: a product, and a sum."""
    product = bmm_steps(is_weight, batch1, batch2) if is_weight(batch1) or is_weight(batch2) else None

    def steps() -> Tensor:
        """beta · input + alpha · product."""
        y = torch.bmm(batch1, batch2) if product is None else product()
        y = y * alpha if alpha != 1 else y
        return y + (input * beta if beta != 1 else input)

    return steps


def linear_steps(is_weight: IsWeight, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Steps:
    """F.linear of a weight with data in the place of its weight."""
    if not is_weight(input):
        raise NoRule
    matmul_steps(lambda v: v is input, input, weight.t())  # NoRule before anything is computed

    def steps() -> Tensor:
        """The product, and the bias where there is one."""
        y = input @ weight.t()
        return y if bias is None else y + bias

    return steps


def bilinear_steps(
    is_weight: IsWeight, input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Steps:
    """F.bilinear: a linear layer on x₁ ⊗ x₂."""
    if is_weight(input1) or is_weight(input2):
        raise NoRule

    def steps() -> Tensor:
        """A linear layer of all products of an entry of each input."""
        return F.linear((input1[..., :, None] * input2[..., None, :]).flatten(-2), weight.flatten(1), bias)

    return steps


def tensordot_steps(is_weight: IsWeight, a: Tensor, b: Tensor, dims: object = 2) -> Steps:
    """torch.tensordot with one of them a weight, its dimensions given letters."""
    if isinstance(dims, int):
        first, second = list(range(a.dim() - dims, a.dim())), list(range(dims))
    elif isinstance(dims, (list, tuple)) and len(dims) == 2:
        first, second = [int(v) % a.dim() for v in dims[0]], [int(v) % b.dim() for v in dims[1]]
    else:
        raise NoRule
    of_a = list(string.ascii_lowercase[: a.dim()])
    of_b = list(string.ascii_uppercase[: b.dim()])
    for j, k in zip(first, second, strict=True):
        of_b[k] = of_a[j]
    out = [v for j, v in enumerate(of_a) if j not in first] + [v for k, v in enumerate(of_b) if k not in second]
    data, weight = (
        ((b, "".join(of_b)), (a, "".join(of_a))) if is_weight(a) else ((a, "".join(of_a)), (b, "".join(of_b)))
    )
    return contraction_steps(data[0], weight[0], data[1], weight[1], "".join(out))
