"""Weights in other spellings than a layer: einsum, tensordot, Bilinear, tables by a function, bags of rows."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import InputError
from ..layers.basic import input_misfit
from ..layers.sequences import Embedding
from ..layers.spatial import resampled
from ..moments.ops import Multiply, Weigh
from ..moments.positions import Total
from ..moments.shapes import weigh_by
from ..moments.values import Field, Value, all_sources
from .calls import RANDOM, Call, Keywords, Parameter, Rule, TorchFunction
from .modules import reads
from .tensors import read_permute

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def read_einsum(call: Call) -> object:
    """torch.einsum of values with a weight ("btc,dc->btd"), or with a known matrix over positions ("st,btc->bsc")."""
    rule, given = str(call.args[0]), call.args[1:]
    values = list(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else list(given)
    if len(values) != 2 or "->" not in rule:
        raise call.build.unsupported(f"is einsum({rule!r}) of {len(values)} values.", "Use two, and write '->'.")
    left, out = rule.replace(" ", "").split("->")
    names = left.split(",")
    # The weight, or the known matrix, second.
    if not isinstance(values[1], Parameter) and not (isinstance(values[0], RANDOM) and isinstance(values[1], Tensor)):
        values, names = values[::-1], names[::-1]
    value, by = values
    if isinstance(value, Parameter) or isinstance(by, RANDOM):
        raise call.build.unsupported(
            f"is einsum({rule!r}) of two parameters, or of two random values.",
            "Multiply values by a weight; for attention use F.scaled_dot_product_attention.",
        )
    rank = value.dim() if isinstance(value, Tensor) else len(value.shape) + 1
    if "..." in names[0]:
        more = LETTERS[: rank - len(names[0]) + 3]
        names[0], out = names[0].replace("...", more), out.replace("...", more)
    return _contracted(call, value, by, names[0], names[1], out)


def _contracted(call: Call, value: Value, by: Parameter | Tensor, of_value: str, of_weight: str, out: str) -> object:
    """Values times a matrix along one axis, by the letters of their axes and of the output's."""
    build = call.build
    old = [n for n in of_weight if n in of_value and n not in out]
    new = [n for n in of_weight if n not in of_value]
    kept = of_value.replace(old[0], new[0]) if len(old) == len(new) == 1 else ""
    plain = len(of_weight) == 2 and sorted(kept) == sorted(out) and len(set(out)) == len(out) and out[:1] == kept[:1]
    if not plain or of_value.index(old[0]) == 0:
        raise build.unsupported(
            f"contracts axes {of_value!r} with {of_weight!r} to {out!r}.",
            "Contract one axis with a matrix, the batch first: 'btc,dc->btd', 'bchw,oc->bohw'.",
        )
    axis = of_value.index(old[0]) - 1
    matrix = by.value if isinstance(by, Parameter) else by
    place = of_weight.index(old[0])
    matrix = matrix if place else matrix.T  # [new, old]
    if isinstance(by, Parameter):
        f = build.field(value, axis)
        if f.width != matrix.shape[1]:
            raise input_misfit(build, matrix.shape[1], f.width)
        drawn, names = by.drawn(build), (by.name, by.name + ".bias")
        tensors = (drawn if place else drawn.T, None)
        op = call.weights.layer("", f.width, bias=False, tensors=tensors, names=names, whole=drawn.shape[place])
        scale = by.factor**2
        op = replace(op, w_var=op.w_var * scale, w_rate=op.w_rate * scale)
        after = build.affine(f, matrix.shape[0], op)
    else:
        assert not isinstance(value, Tensor)
        f = build.settled(value)
        if axis == f.channel:
            raise build.unsupported("multiplies the channels by a known matrix.", "Use a Linear layer.")
        after = resampled(build, f, {f.axis(axis): matrix})
    order = tuple(kept.index(n) for n in out)
    if order == tuple(range(len(order))):
        return after
    return read_permute(replace(call, args=(after, order), kwargs=Keywords()))


def read_tensordot(call: Call) -> object:
    """torch.tensordot of values with a weight along one axis."""
    value, by, dims = call.get(0, "a"), call.get(1, "b"), call.get(2, "dims", 2)
    rank = value.dim() if isinstance(value, Tensor) else len(value.shape) + 1
    if isinstance(dims, int):
        dims = ([rank - 1], [0]) if dims == 1 else ([], [])
    first, second = ([d] if isinstance(d, int) else list(d) for d in dims)
    if not isinstance(by, Parameter) or by.value.dim() != 2 or len(first) != 1:
        raise call.build.unsupported("contracts several axes.", "Contract one axis with a matrix, dims=1.")
    letters, axis, row = LETTERS[:rank], first[0] % rank, second[0] % 2
    weight = letters[axis] + "z" if row == 0 else "z" + letters[axis]
    return _contracted(call, value, by, letters, weight, letters.replace(letters[axis], "") + "z")


@reads(nn.Bilinear)
def _bilinear(m: nn.Bilinear, call: Call) -> Field:
    """Σ W_ij x_i y_j + b: Gaussian with covariance w_var·E[x x']·E[y y'], for sums over both kinds of channels."""
    build = call.build
    options = call.named("input1", "input2")
    f, g = (build.field(options[name], -1) for name in ("input1", "input2"))
    for side, needed in ((f, m.in1_features), (g, m.in2_features)):
        if side.width != needed:
            raise input_misfit(build, needed, side.width)
    if f.grid != g.grid:
        raise InputError(f"{build.where}: is given values of shapes {f.shape} and {g.shape}; needed: equal positions.")
    node = build.add(Multiply(), (f, g), f.grid)
    few = f.few and g.few  # of one input and many channels the sum is Gaussian
    shape = (*f.grid, f.width * g.width)
    both = Field(node, shape, len(f.grid), False, False, all_sources((f, g)), few=few)
    op = call.weights.layer(call.name, both.width, bias=m.bias is not None, tensors=(m.weight, m.bias))
    return build.affine(both, m.out_features, op)


# Tables


def read_table(call: Call) -> Field:
    """F.embedding of known indices and a parameter."""
    o = call.named("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
    index, table, build = o["input"], o["weight"], call.build
    if not isinstance(table, Parameter) or not isinstance(index, Tensor) or table.factor != 1:
        raise build.unsupported("looks up random indices, or a table that is no parameter.", "Use nn.Embedding.")
    if o.get("max_norm") is not None or o.get("scale_grad_by_freq"):
        raise build.unsupported(
            "rescales its rows (max_norm) or their gradients (scale_grad_by_freq).", "Leave both at their default."
        )
    if index.dim() == 0 or len(index) != build.size:  # a table of positions: the same for every sample
        index = (index if index.dim() > 1 and len(index) == 1 else index.unsqueeze(0)).expand(build.size, -1)
    if int(index.min()) < 0 or int(index.max()) >= len(table.value):
        raise InputError(f"{build.where}: indices to {int(index.max())} into {len(table.value)} rows.")
    f = build.table(index, table.value.shape[1], o.get("padding_idx"))
    names = (table.name, table.name + ".bias")
    return build.affine(f, f.width, call.weights.layer("", 1, bias=False, tensors=(table.value, None), names=names))


@reads(nn.EmbeddingBag)
def _bag(m: nn.EmbeddingBag, call: Call) -> Field:
    """The sum or mean of a table's rows: an Embedding, summed over positions."""
    o, build = call.named("input", "offsets", "per_sample_weights"), call.build
    index = o["input"]
    if o.get("offsets") is not None or not isinstance(index, Tensor) or index.dim() != 2:
        raise build.unsupported(
            "takes its bags from one row of indices (offsets).", "Give indices [batch, length], padded by padding_idx."
        )
    if m.mode == "max" or m.max_norm is not None or m.scale_grad_by_freq:
        raise build.unsupported(f"has mode {m.mode!r} or rescales rows.", "Use mode='sum' or 'mean', and no max_norm.")
    layer = Embedding(width=m.embedding_dim, padding=m.padding_idx, of=m)
    f = layer.grow(build, index, call.weights, call.name)
    if o.get("per_sample_weights") is not None:
        f = weigh_by(build, f, o["per_sample_weights"].double().unsqueeze(-1))
    total = build.apply(Total((0,), mean=False), f, shape=(f.width,), channel=0)
    if m.mode == "sum":
        return total
    real = torch.ones_like(index) if m.padding_idx is None else (index != m.padding_idx)
    return build.apply(Weigh(build.slot(1 / real.sum(1).clamp(min=1).double())), total)


FUNCTIONS: dict[TorchFunction, Rule] = {
    torch.einsum: read_einsum, torch.tensordot: read_tensordot, F.embedding: read_table,
}  # fmt: skip
