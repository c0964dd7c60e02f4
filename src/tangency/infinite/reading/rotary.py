"""Rotary embeddings as forward() writes them: q * cos + rotate_half(q) * sin, in any order of the channels.

What they are is a known matrix M_s over the channels of each head, for each position s. Then scores q_sᵀ M_sᵀ N_t k_t
are Gaussian with the covariance Q[s, s'] K[t, t']·⟨A_st, A_s't'⟩/d, A_st = M_sᵀN_t (for rotations the mean over angles
of cos(angle·((s − t) − (s' − t'))), Su et al. 2021). That factor is Σ_r w_r[s, t] w_r[s', t'], and with a draw of
scores for each of the waves w_r, their weighted sum has it. d and the angles are those of the finite network.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from ...errors import InputError
from ..moments.axes import aligned, atoms_of
from ..moments.fields import Builder
from ..moments.values import Atom, Axes, Field, Seen, Turn

# Numbers of all matrices A_st at once (heuristic: half a gigabyte).
ENTRIES = 1 << 26


def _positions(value: Seen) -> list[Atom]:
    return sorted(atoms_of(value.axes, "position"), key=lambda a: a.place)


def turn_of(value: Seen) -> Turn:
    """Its matrix, the identity where there is none."""
    if value.turn is not None:
        return value.turn
    eye = torch.eye(value.sizes[-1], dtype=torch.float64)
    return Turn(eye.view(*[1] * len(_positions(value)), *eye.shape), value.axes[-1])


def _merged(value: Seen) -> Seen:
    """The same with one atom for the channels that were turned, where they lie on the last axis together."""
    turn = value.turn
    if turn is None or len(turn.atoms) == 1 or turn.atoms != value.axes[-1]:
        return value
    atoms = (Atom("channel", turn.atoms[0].place[:-1], value.sizes[-1]),)
    return replace(value, axes=(*value.axes[:-1], atoms), turn=replace(turn, atoms=atoms))


def is_head(value: object) -> bool:
    """Whether it is a field [batch, 1, time, channels], as a single head has it."""
    return isinstance(value, Field) and len(value.shape) == 3 and value.shape[0] == 1 and value.channel == 2


def weigh_channels(build: Builder, value: Seen, known: Tensor) -> Seen:
    """Times known numbers that may differ by position and by channel of a head."""
    value = _merged(value)
    turn = turn_of(value)
    if {a.kind for a in value.axes[-1]} != {"channel"} or turn.atoms != value.axes[-1] or known.dim() > len(value.axes):
        raise build.unsupported(*value.why())
    others = [a for a in atoms_of(value.axes, "batch", "channel", "copy") if a not in turn.atoms]
    places = _positions(value)
    numbers = aligned(known.double(), value.axes, [*others, *places, *turn.atoms]).flatten(-len(turn.atoms))
    first = numbers[(0,) * len(others)]
    if not bool((numbers == first).all()):
        raise build.unsupported(
            "multiplies each channel by a number that differs by sample or by head.", "Give all the same."
        )
    first = first.expand(*first.shape[:-1], turn.matrix.shape[-2])
    return replace(value, turn=replace(turn, matrix=first.unsqueeze(-1).to(turn.matrix.device) * turn.matrix))


def add_turned(build: Builder, a: Seen, b: Seen, by: tuple[float, float]) -> Seen | None:
    """The sum of two such values of one field; None where they are of two."""
    a, b = _merged(a), _merged(b)
    first, second = build.settled(a.of), build.settled(b.of)
    left, right = turn_of(a), turn_of(b)
    if first.node != second.node or a.axes != b.axes or left.atoms != right.atoms:
        return None
    return replace(a, turn=replace(left, matrix=by[0] * left.matrix + by[1] * right.matrix))


def _cut(build: Builder, f: Field) -> tuple[Field, tuple[int, ...], float] | None:
    """The field of which this one is some rows, times a number; None if it is of none."""
    before, factor = build.memory.multiples.get(f.node, (f, 1.0))
    found = build.memory.cuts.get(before.node)
    return None if found is None else (*found, factor)


def join_turned(build: Builder, values: Sequence[object], stacked: bool) -> Seen | None:
    """Parts of a field's channels joined in another order, with other signs, or turned; None where they are none.

    `stacked`: along a new last axis, where entries of the parts come in turn.
    """
    parts = [_merged(v) for v in values if isinstance(v, Seen) and v.sizes[-1]]
    if len(parts) < sum(not isinstance(v, Seen) or v.sizes[-1] > 0 for v in values):
        return None
    if len(parts) == 1 and not stacked:
        return parts[0]
    shapes = {v.sizes if stacked else v.sizes[:-1] for v in parts}
    if len(shapes) != 1 or any(len(v.axes[-1]) != 1 or turn_of(v).atoms != v.axes[-1] for v in parts):
        return None
    found = [c for v in parts if (c := _cut(build, build.settled(v.of))) is not None]
    if len(found) != len(parts) or any(c[0].node != found[0][0].node for c in found):
        return None
    base, size = found[0][0], sum(v.sizes[-1] for v in parts)
    matrix, start = torch.zeros(size, size, dtype=torch.float64), 0
    for k, (v, (_, rows, factor)) in enumerate(zip(parts, found, strict=True)):
        each = v.sizes[-1]
        local = list(rows[:each])
        # The same channels of every head, which come one after the other.
        if list(rows) != [h * size + r for h in range(base.width // size) for r in local]:
            return None
        own = turn_of(v).matrix
        into = torch.arange(each) * len(parts) + k if stacked else torch.arange(start, start + each)
        placed = own.new_zeros(*own.shape[:-2], size, size)
        placed[..., into.unsqueeze(1), torch.tensor(local)] = factor * own
        matrix, start = matrix + placed, start + each
    lead, place = parts[0].axes[:-1], parts[0].axes[-1][0].place
    last: Axes = ((Atom("channel", place, size),),)
    if stacked:
        each = parts[0].sizes[-1]
        last = ((Atom("channel", (*place, 0), each),), (Atom("channel", (*place, 1), len(parts)),))
    turn = Turn(matrix, tuple(a for axis in last for a in axis))
    return Seen(base, (*lead, *last), turn)


def score_waves(build: Builder, queries: Seen, keys: Seen, draws: int) -> Tensor | None:
    """The waves [R, T, S] by which turned queries and keys change the scores; None where nothing is turned."""
    if queries.turn is None and keys.turn is None:
        return None
    if atoms_of(queries.axes[:-2], "position") or atoms_of(keys.axes[:-2], "position"):
        raise build.unsupported("turns channels of positions in windows.", "Use rotary embeddings without windows.")
    sides = []
    for v in (queries, keys):
        turn = turn_of(v)
        if turn.atoms != v.axes[-1]:
            raise build.unsupported(*v.why())
        places = _positions(v)
        matrix = turn.matrix.expand(*(a.size for a in places), *turn.matrix.shape[-2:])
        order = [places.index(a) for a in v.axes[-2] if a.kind == "position"]
        matrix = matrix.permute(*order, -2, -1).reshape(-1, *turn.matrix.shape[-2:])
        sides.append(matrix)
    (t, size, _), (s, *_) = (m.shape for m in sides)
    if t * s * size**2 > ENTRIES:
        raise InputError(
            f"{build.where}: rotary embeddings of {t} × {s} positions with {size} channels a head; at most "
            f"{ENTRIES:,} numbers are held. Use shorter sequences or smaller heads."
        )
    features = torch.einsum("sji,tjk->stik", *sides).reshape(t * s, -1) / math.sqrt(size)
    return _waves(build, features, (t, s), draws)


def _waves(build: Builder, features: Tensor, sizes: tuple[int, int], draws: int) -> Tensor:
    """w [R, T, S] with Σ_r w_r w_rᵀ the products of these features [T·S, F]."""
    # Rotations depend on s − t alone: equal rows are one, told by their products with some fixed numbers.
    marks = features @ torch.linspace(1, 2, features.shape[1], dtype=torch.float64).sin()
    _, names = torch.unique((marks * 1e9).round(), return_inverse=True)
    places = torch.zeros(int(names.max()) + 1, dtype=torch.long).scatter_(0, names, torch.arange(len(names)))
    if not torch.allclose(features[places][names], features, atol=1e-7):
        places = names = torch.arange(len(features))
    vectors, values, _ = torch.linalg.svd(features[places], full_matrices=False)
    kept = values > 1e-7 * values[0]  # what is below adds less than 1e-14 to the covariance
    waves = (vectors * values)[:, kept][names].T.reshape(-1, *sizes)
    side = max(sizes) * math.ceil(math.sqrt(len(waves)))
    if draws * side**2 > 8 * ENTRIES:
        raise InputError(
            f"{build.where}: rotary embeddings of {sizes[0]} × {sizes[1]} positions need {len(waves)} draws of scores "
            f"for each of {draws}, more than memory has. Give fewer samples= or shorter sequences."
        )
    assert prod(waves.shape[1:]) == len(features)
    return waves
