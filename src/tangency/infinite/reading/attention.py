"""Attention as forward() writes it out: scores of queries and keys, masks, softmax, times values; and in one call.

The limit is that of `moments.attention`: infinitely many heads, scores times c = s·√d for a network that multiplies
them by s (1 for the usual 1/√d). Queries, keys and values must come from different weights.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from ...errors import InputError
from ..moments.attention import FILLED, Attention
from ..moments.axes import aligned, arranged, atoms_of, permuted, plain, regrouped, seen
from ..moments.core import RandomAffine
from ..moments.correlations import Correlations
from ..moments.fields import Builder
from ..moments.ops import Add, Rescale
from ..moments.positions import Permute, Regrid, Take, Total
from ..moments.shapes import regrid, take_positions
from ..moments.tables import Table
from ..moments.values import Atom, Axes, Field, Random, Seen, Unsettled, correlated
from .biases import PositionBias, score_table
from .calls import RANDOM, Call, Parameter
from .rotary import score_waves

# Below it, a number that fills scores is a mask: its exponential is 0 beside any other (in float32 from −104 on).
MASKED = -1e3
# Finite summands are cut here: in float32, −3.4e38 twice would be −∞, and a softmax over nothing else NaN.
LOWEST = -1e30


@dataclass(frozen=True, eq=False)
class Scores(Unsettled):
    """Scores of queries and keys along `axes`, before or after the softmax.

    Its atoms are the batch, heads (channels), positions that do not meet one another, queries and keys. `bias` is what
    known values add: [n or 1, heads or 1, rest or 1, T, S], `fixed` whether it is the same for all samples.
    """

    q: Field  # [rest·T, channels]
    k: Field
    axes: Axes
    scale: float  # c
    bias: Tensor | None = None
    fixed: bool = True
    done: bool = False  # softmax was taken
    waves: Tensor | None = None  # of rotary embeddings
    tables: tuple[Table, ...] = ()  # trained biases, their index [rest or 1, T, S]
    mixed: float = 0.0  # rate by variance of weights that mixed heads before the softmax
    after: RandomAffine | None = None  # weights that mixed them after it

    def why(self) -> tuple[str, str]:
        """As `Unsettled.why`."""
        return (
            "takes attention's scores, which have a rule for sums with known numbers and with parameters, multiples, "
            "masks, a softmax over the keys, nn.Linear over the heads and the product with values alone.",
            "Write attention as softmax(q @ k.transpose(-2, -1) / √d + mask) @ v, or use nn.MultiheadAttention.",
        )

    @property
    def order(self) -> list[list[Atom]]:
        """Its atoms as `bias` has them."""
        kinds = ("batch", "channel", "position", "query", "key")
        return [sorted(atoms_of(self.axes, kind), key=lambda a: a.place) for kind in kinds]


def _lead(build: Builder, axis: Sequence[Atom], other: Sequence[Atom]) -> None:
    """Heads, samples and positions that both have on one axis must be the same."""
    left, right = ([(a.kind, a.size) for a in v if a.kind in ("batch", "position")] for v in (axis, other))
    heads, others = (prod(a.size for a in v if a.kind in ("channel", "copy")) for v in (axis, other))
    if left != right or others not in (1, heads):
        raise build.unsupported(
            f"multiplies values whose axes do not fit: {list(axis)} and {list(other)}.",
            "Give queries, keys and values the same batch and heads on the same axes.",
        )


def _line(build: Builder, value: Seen, at: int) -> Field:
    """[rest·T, channels]: positions on the first axes, then those of axis `at`, as one sequence."""
    lead = [a for axis in value.axes[:-2] for a in axis if a.kind == "position"]
    f = arranged(build, value, [*lead, *(a for a in value.axes[at] if a.kind == "position")])
    # Scores and sums over keys are linear in it, so that a scale of each channel's own is applied now.
    f = replace(build.settled(f), shape=f.shape, channel=f.channel, gaussian=f.gaussian)
    return regrid(build, f, (prod(f.grid), f.width), 1)


def _beside(build: Builder, value: Random, axes: Axes) -> Seen:
    """Keys or values along their axes: one head that was expanded to those of the queries is copies of it."""
    found, node = seen(build, value), value.node if isinstance(value, Field) else -1
    copies = build.memory.copied.get(node)
    if copies is None or len(copies.axes) != len(axes):
        return found
    # Positions that do not meet would lie beside those of the queries.
    heads = [atoms_of((a,), "channel") and atoms_of((b,), "position") for a, b in zip(axes, found.axes, strict=True)]
    return copies if any(heads[:-2]) else found


def _kinds(axis: Sequence[Atom]) -> set[str]:
    return {a.kind for a in axis}


def make_scores(build: Builder, q: Random, k: Random) -> Scores:
    """q @ kᵀ for q [..., T, d] and k [..., S, d] (already turned back)."""
    queries = seen(build, q)
    keys = _beside(build, k, queries.axes)
    if len(queries.axes) != len(keys.axes) or len(queries.axes) < 3 or queries.sizes[-1] != keys.sizes[-1]:
        raise build.unsupported(
            f"multiplies values of shapes {queries.sizes} and {keys.sizes} (transposed).",
            "Needed for attention: [batch, heads, T, d] and [batch, heads, S, d].",
        )
    for name, v in (("queries", queries), ("keys", keys)):
        if _kinds(v.axes[-1]) != {"channel"} or not _kinds(v.axes[-2]) <= {"position"}:
            raise build.unsupported(
                f"sums {name} over axes {v.axes[-1]}, for the entries {v.axes[-2]}; attention sums over channels.",
                "Multiply q [..., T, d] by k [..., S, d] transposed: positions attend to positions.",
            )
    for a, b in zip(queries.axes[:-2], keys.axes[:-2], strict=True):
        _lead(build, a, b)
    left, right = _line(build, queries, -2), _line(build, keys, -2)
    if correlated(left, right):
        raise build.unsupported(
            "multiplies queries and keys that share weights, so that scores grow with the width.",
            "Give keys weights (or a part of them) of their own.",
        )
    _check_norms(build, (left, right))
    if not all(_is_gaussian(build, v) and v.centered for v in (left, right)):
        raise build.unsupported(
            "multiplies queries or keys that are not Gaussian of mean zero in the limit.",
            "Make them by a Linear layer (a norm may follow).",
        )
    counts = queries.sizes[-2], keys.sizes[-2]
    ends = [(Atom("query", (0,), counts[0]),), (Atom("key", (0,), counts[1]),)]
    # Positions that do not meet are numbered as they come, which is how both sequences have them.
    lead = [a for axis in queries.axes[:-2] for a in axis if a.kind == "position"]
    names = {a: replace(a, place=(k,)) for k, a in enumerate(lead)}
    axes = [tuple(names.get(a, a) for a in axis) for axis in queries.axes[:-2]]
    waves = score_waves(build, queries, keys, -(-build.samples // 4))
    return Scores(left, right, (*axes, *ends), math.sqrt(queries.sizes[-1]), waves=waves)


def add_known(build: Builder, s: Scores, known: Tensor) -> Scores:
    """Known summands: a mask of 0 and −∞, or biases."""
    if s.done:
        raise build.unsupported("adds to attention after its softmax.", "Add to the scores before it.")
    if known.dim() > len(s.axes):
        raise InputError(f"{build.where}: values of shapes {tuple(known.shape)} and {s.sizes}.")
    # By the number of axes alone, for what a batch holds must not decide it.
    batch = next(k for k, axis in enumerate(s.axes) if "batch" in _kinds(axis))
    fixed = known.dim() < len(s.axes) - batch
    # Masks that are made here lie on the CPU, those of the module where its inputs are.
    known = known.to(next((v.device for v in build.known.values()), known.device), torch.float64)
    known = torch.where(known.isfinite() & (known != FILLED), known.clamp_min(LOWEST), known)
    order = s.order
    parts = aligned(known, s.axes, [a for group in order for a in group])
    sizes, shape = list(parts.shape), []
    for group in order:
        have = [sizes.pop(0) for _ in group]
        # Several atoms of one kind are one axis here: all of size 1, or all of their own.
        shape.append([1] * len(group) if all(n == 1 for n in have) else [a.size for a in group])
    parts = parts.expand([n for group in shape for n in group]).reshape([prod(group) for group in shape])
    bias = parts if s.bias is None else s.bias + parts
    return replace(s, bias=bias, fixed=s.fixed and fixed)


def mask_scores(build: Builder, s: Scores, keep: Tensor, fill: float) -> Scores:
    """Scores where `keep` is true, else a number that is as good as −∞."""
    if fill > MASKED:
        raise build.unsupported(f"fills scores with {fill}.", "Fill with float('-inf').")
    masked = torch.zeros(keep.shape, dtype=torch.float64, device=keep.device).masked_fill(~keep, -torch.inf)
    if math.isfinite(fill):  # one number for all keys of a query: its softmax is uniform, and knows of no scores
        masked = masked.masked_fill(~keep.any(-1, keepdim=True), FILLED)
    return add_known(build, s, masked)


def scale_scores(build: Builder, s: Scores, factor: float) -> Scores:
    """A multiple of scores."""
    if s.done:
        raise build.unsupported("multiplies attention after its softmax.", "Multiply the values.")
    bias = s.bias
    if bias is not None:  # 0·∞ would be NaN, and −∞ stays what it is for a factor above 0
        if factor <= 0 and bool(torch.isinf(bias).any()):
            raise build.unsupported(f"multiplies masked scores by {factor}.", "Mask after scaling.")
        bias = bias * factor
    tables = tuple(replace(t, variance=t.variance * factor**2, rate=t.rate * factor**2) for t in s.tables)
    return replace(s, scale=s.scale * factor, bias=bias, tables=tables)


def add_bias(call: Call, s: Scores, bias: object) -> Scores:
    """Trained numbers of each head's own, and what is known beside them."""
    found, build = PositionBias.of(bias), call.build
    if found is None:
        raise build.unsupported(*NO_RANDOM_BIAS)
    if s.done:
        raise build.unsupported("adds to attention after its softmax.", "Add to the scores before it.")
    tables = [score_table(build, call.weights, s.axes, s.order, p) for p in found.tables]
    s = replace(s, tables=(*s.tables, *tables))
    return s if found.known is None else add_known(build, s, found.known)


def take_softmax(call: Call) -> Scores:
    """softmax over the keys."""
    s, build = call.get(0, "input"), call.build
    if not isinstance(s, Scores):
        raise build.unsupported(
            "is a softmax of random values that are no attention scores.",
            "Leave the last one to the loss; over channels it has no limit.",
        )
    dim = call.get(1, "dim", -1)
    call.kwargs.get("_stacklevel")
    if s.done or _kinds(s.axes[dim]) - {"key"} or not s.axes[dim]:
        raise build.unsupported(
            f"is a softmax over axis {dim}, which is not that of the keys.",
            "Take it over the keys: the last axis of q @ k.transpose(-2, -1).",
        )
    return replace(s, done=True)


def attend(build: Builder, s: Scores, value: Random) -> Random:
    """Attention times values [..., S, d]: the joined heads' field along its axes."""
    values = _beside(build, value, s.axes)
    if not s.done:
        raise build.unsupported("multiplies scores by values without a softmax.", "Take a softmax over the keys.")
    last = s.axes[-2:]
    if len(values.axes) != len(s.axes) or [_kinds(v) for v in last] != [{"query"}, {"key"}]:
        raise build.unsupported(
            f"multiplies attention of shape {s.sizes} and values of shape {values.sizes}.", "Needed: [..., S, d]."
        )
    if (
        _kinds(values.axes[-1]) != {"channel"}
        or not _kinds(values.axes[-2]) <= {"position"}
        or s.sizes[-1] != values.sizes[-2]
    ):
        raise build.unsupported(
            f"multiplies attention of shape {s.sizes} by values along {values.axes[-2:]}.", "Needed: [..., S, d]."
        )
    for a, b in zip(s.axes[:-2], values.axes[:-2], strict=True):
        _lead(build, a, b)
    if values.turn is not None:
        raise build.unsupported(*values.why())
    v = _line(build, values, -2)
    if correlated(s.q, v) or correlated(s.k, v):
        raise build.unsupported(
            "multiplies attention by values that share weights with its queries or keys.",
            "Give values weights (or a part of them) of their own.",
        )
    _check_norms(build, (s.q, s.k, v))
    heads = atoms_of(s.axes[:-2], "channel")
    width = prod(a.size for a in heads) * values.sizes[-1]
    out = _attended(build, s, v, width)
    # Its positions: those that do not meet, then the queries.
    lead = atoms_of(s.axes, "position")
    if [a.place for a in lead] != sorted(a.place for a in lead):
        raise build.unsupported("turns positions of scores that do not meet.", "Keep their order.")
    sizes = [a.size for a in lead] + ([s.sizes[-2]] if s.sizes[-2] > 1 else [])
    out = regrid(build, out, (*sizes, width), len(sizes))
    names: dict[Atom, Atom] = {a: Atom("position", (k,), a.size) for k, a in enumerate(lead)}
    names |= {a: Atom("channel", (0, k), a.size) for k, a in enumerate(sorted(heads, key=lambda a: a.place))}
    axes = [tuple(names.get(a, a) for a in axis) for axis in s.axes[:-2]]
    line = (Atom("position", (len(lead),), s.sizes[-2]),) if s.sizes[-2] > 1 else ()
    each = Atom("channel", (1,) if heads else (0,), values.sizes[-1])
    return plain(build, Seen(out, (*axes, line, (each,))))


def _attended(build: Builder, s: Scores, v: Field, width: int) -> Field:
    """The joined heads as one sequence [rest·T, width]."""
    rest = prod(a.size for a in atoms_of(s.axes, "position"))
    bias, fixed = s.bias, s.fixed
    if s.tables and bias is not None and bool((bias == bias[:, :1]).all()):
        bias = bias[:, :1]  # a mask that was added to a bias has its heads: all the same
    if rest > 1:  # a sequence for each: positions see those of their own alone
        same = torch.eye(rest, dtype=torch.bool).view(1, 1, rest, 1, rest, 1)
        t, u = (s.q.shape[0] // rest, s.k.shape[0] // rest)
        own = torch.zeros(1, 1, 1, t, u, dtype=torch.float64) if bias is None else bias
        own = own.expand(*own.shape[:2], rest, t, u).unsqueeze(4)
        bias = torch.where(same.to(own.device), own, -torch.inf).reshape(*own.shape[:2], rest * t, rest * u)
    elif bias is not None:
        bias = bias.expand(*bias.shape[:2], 1, s.q.shape[0], s.k.shape[0]).squeeze(2)
    shared = slot = None
    if bias is not None:
        if bool((bias == -torch.inf).all(-1).any()):
            raise InputError(
                f"{build.where}: a mask leaves a query without any key, whose softmax is 0/0. Let it see itself, or "
                "take such samples out."
            )
        if fixed:
            shared = bias[0]
        else:
            slot = build.slot(bias.expand(build.size, *bias.shape[1:]).movedim(0, -1))
    shift = _bias_variance(build, s.k.node)
    tables = tuple(replace(t, index=_own_windows(t.index, rest)) for t in s.tables)
    op = Attention(
        s.scale,
        build.samples,
        build.seed,
        slot,
        shared,
        0.0 if s.waves is not None else shift,
        s.waves,
        tables,
        s.mixed,
    )
    node = build.add(op, (s.q, s.k, v), (s.q.shape[0],))
    alike = v.alike and (bias is None or bool((bias == bias[:, :1]).all()))  # masks by head make heads of several laws
    out = Field(node, (s.q.shape[0], width), 1, gaussian=False, centered=v.centered, sources=v.sources, alike=alike)
    return out if s.after is None else _mixed_after(build, out, v, s.after)


def _mixed_after(build: Builder, out: Field, v: Field, op: RandomAffine) -> Field:
    """The joined heads where weights mix attention after its softmax (`talking.py`)."""
    out = build.apply(RandomAffine(op.w_var, 0.0, op.w_rate), out)
    if not op.b_var and not op.b_rate:
        return out
    total = build.apply(Total((0,), mean=False), v, shape=(v.width,), channel=0)
    total = build.apply(RandomAffine(op.b_var, 0.0, op.b_rate), total)
    every = take_positions(build, regrid(build, total, (1, v.width), 1), 0, (0,) * out.shape[0], drop=False)
    # Weights and biases are independent of mean zero: both parts are of the same values, and uncorrelated.
    return replace(out, node=build.add(Add(), (out, every), out.grid))


def _own_windows(index: Tensor, rest: int) -> Tensor:
    """[rest or 1, T, S] as [rest·T, rest·S], −1 between positions that do not meet."""
    index = index.expand(rest, *index.shape[1:])
    same = torch.eye(rest, dtype=torch.bool, device=index.device).view(rest, 1, rest, 1)
    return torch.where(same, index.unsqueeze(2), -1).reshape(rest * index.shape[1], -1)


def _is_gaussian(build: Builder, f: Field) -> bool:
    """Whether scores of such queries or keys are Gaussian: a norm's scale of each channel's own may be trained.

    Its gradient is a sum over a head's channels, which is what a scale's part of the tangent kernel says of it.
    """
    node = f.node
    while isinstance(build.nodes[node].op, (Regrid, Permute, Take, Rescale)) and node not in build.memory.scaled:
        node = build.nodes[node].inputs[0]
    return f.gaussian or node in build.memory.scaled


def _bias_variance(build: Builder, number: int) -> float:
    """The variance of the biases of keys: alike for all of them, so that a softmax does not see it."""
    node = build.nodes[number]
    while isinstance(node.op, (Regrid, Permute, Take)) or node.op == Rescale(1.0):
        node = build.nodes[node.inputs[0]]
    return node.op.b_var if isinstance(node.op, RandomAffine) else 0.0


def multiply_matrices(call: Call, a: Random, b: Random) -> Random:
    """a @ b of two random values: scores, or attention times values."""
    if isinstance(a, Scores):
        return attend(call.build, a, b)
    if isinstance(b, Scores):
        raise call.build.unsupported(*b.why())
    keys = seen(call.build, b)
    order = list(range(len(keys.axes)))
    return make_scores(call.build, a, permuted(call.build, keys, [*order[:-2], order[-1], order[-2]]))


def read_sdpa(call: Call) -> Random:
    """F.scaled_dot_product_attention."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
    options, build = call.named(*names), call.build
    if options.get("dropout_p"):
        raise build.unsupported("drops attention at training.", "Use dropout_p=0.0 or model.eval().")
    q, k, v = (options[name] for name in names[:3])
    if not all(isinstance(x, RANDOM) for x in (q, k, v)):
        raise build.unsupported(
            "attends to inputs themselves, whose channels are not infinitely many.", "Put Linear layers before it."
        )
    if options.get("enable_gqa"):
        groups = seen(build, q).sizes[-3]
        k, v = (repeat_heads(build, seen(build, x), -3, groups // seen(build, x).sizes[-3]) for x in (k, v))
    s = make_scores(build, q, k)
    scale = options.get("scale")
    # torch divides by √d unless told otherwise.
    s = replace(s, scale=1.0 if scale is None else s.scale * float(scale))
    if options.get("is_causal"):
        s = mask_scores(build, s, torch.ones(s.sizes[-2:], dtype=torch.bool).tril(), -torch.inf)
    mask = options.get("attn_mask")
    if isinstance(mask, (Parameter, *RANDOM)):
        s = add_bias(call, s, mask)
    elif mask is not None:
        s = mask_scores(build, s, mask, -torch.inf) if mask.dtype == torch.bool else add_known(build, s, mask)
    return attend(build, replace(s, done=True), v)


NO_RANDOM_BIAS = (
    "adds to attention's scores what weights made of other values; known numbers and tables of parameters have a rule.",
    "Keep it known (a buffer), or add a parameter that is looked up by position.",
)


def repeat_heads(build: Builder, value: Seen, dim: int, times: int) -> Random:
    """Each head several times in a row (grouped queries)."""
    at = dim % len(value.axes)
    copied = (*value.axes[at], Atom("copy", (at,), times)) if times > 1 else value.axes[at]
    return plain(build, replace(value, axes=(*value.axes[:at], copied, *value.axes[at + 1 :])))


def read_repeat_interleave(call: Call) -> Random:
    """torch.repeat_interleave(x, n, dim) of heads."""
    times, dim = call.get(1, "repeats"), call.get(2, "dim")
    value = call.get(0, "input")
    if not isinstance(times, int) or dim is None or not isinstance(value, Seen):
        raise call.build.unsupported("repeats values.", "Repeat heads of keys and values, by one number.")
    return repeat_heads(call.build, value, dim, times)


def reshape_scores(build: Builder, s: Scores, sizes: Sequence[int]) -> Scores:
    """Scores under another shape: batch and heads merged or split."""
    axes = regrouped(s.axes, sizes)
    if axes is None or any(len(axis) > 1 and _kinds(axis) & {"query", "key"} for axis in axes):
        raise build.unsupported(f"gives scores of shape {s.sizes} the shape {tuple(sizes)}.", "Keep queries and keys.")
    if s.bias is not None and atoms_of(axes, "channel") != atoms_of(s.axes, "channel"):
        raise build.unsupported("splits the heads of scores after a mask.", "Mask them after it.")
    return replace(s, axes=axes)


def _check_norms(build: Builder, values: Sequence[Field]) -> None:
    """Refuse queries, keys and values of which two hold the same trained scale: it moves both."""
    known = Correlations(build)
    if any(known.related(a.node, b.node) for k, a in enumerate(values) for b in values[:k]):
        raise build.unsupported(
            "takes queries, keys or values of which two are normed by one trained scale.",
            "Give each a norm of its own, or freeze it (trainable=).",
        )


def multiply_by_letters(call: Call, equation: str, a: Random, b: Random) -> Random:
    """torch.einsum of two random values, as the product of matrices that it is."""
    build = call.build
    inputs, _, output = equation.replace(" ", "").partition("->")
    left, _, right = inputs.partition(",")
    both = [c for c in left if c in right]
    summed = [c for c in both if c not in output]
    rows, columns = ([c for c in v if c not in other] for v, other in ((left, right), (right, left)))
    fits = [len(v) for v in (summed, rows, columns)] == [1, 1, 1] and "." not in equation
    if not fits or set(left + right) - set(summed) != set(output):
        raise build.unsupported(
            f"is einsum {equation!r} of two random values.", "Write it as matmul: q @ k.transpose(-2, -1), attn @ v."
        )
    lead = [c for c in both if c in output]
    first = _turned(build, a, left, [*lead, *rows, *summed])
    after = multiply_matrices(call, first, _turned(build, b, right, [*lead, *summed, *columns]))
    return _turned(build, after, "".join([*lead, *rows, *columns]), list(output))


def _turned(build: Builder, value: Random, have: str, want: Sequence[str]) -> Random:
    """The axes that go by these letters, in another order."""
    order = [have.index(c) for c in want]
    if isinstance(value, Scores):
        return replace(value, axes=tuple(value.axes[k] for k in order))
    return permuted(build, seen(build, value), order)
