"""Projected kernels against a second program that makes the random matrix from its documentation, and in expectation.

The first part of this file is that program. It knows NumPy and the docstrings of `tangency.projection.sketches`;
it imports nothing from there.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import ZOO, Case, Net, build

import tangency as tg
from tangency.models import mlp
from tangency.projection.project import _never as never

F64 = torch.float64
KINDS = ("sparse", "rademacher", "gaussian", "hadamard", "kronecker", "random-mask")
pytestmark = pytest.mark.filterwarnings(
    "ignore:dim=.* is not less than:tangency.PerformanceWarning",
    "ignore:no structured rule covers:tangency.PerformanceWarning",
    "ignore:.*batching rule.*:UserWarning",
)

# The second program. What words are for:
SIGN, NORMAL, COLUMN, SHIFT, FIRST, REST, PICK = range(7)
Shapes = Mapping[str, tuple[int, ...]]


def random_words(seed: int, name: str, use: int, row: int, count: int, output: int = 0) -> np.ndarray:
    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    return np.random.Philox(counter=[0, row, output, use], key=key).random_raw(count)


def below(word: Any, k: Any) -> Any:
    """A word as a number 0 … k."""
    return ((word >> np.uint64(32)) * np.uint64(k) >> np.uint64(32)).astype(np.int64)


def column_signs(seed: int, name: str, use: int, row: int, count: int, output: int) -> np.ndarray:
    p, words = np.arange(count), random_words(seed, name, use, row, -(-count // 64), output)
    return (words[p // 64] >> (p % 64).astype(np.uint64) & np.uint64(1)) * 2.0 - 1


def dense_signs(seed: int, name: str, use: int, k: int, p: int, output: int) -> np.ndarray:
    """[k, p]: row r is bit r mod 64 of the words of row r // 64."""
    r, words = np.arange(k), np.stack([random_words(seed, name, use, r, p, output) for r in range(-(-k // 64))])
    return (words[r // 64] >> (r % 64).astype(np.uint64)[:, None] & np.uint64(1)) * 2.0 - 1


@cache
def normal_values() -> np.ndarray:
    values = np.array([NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(65536)])
    return (values / np.sqrt((values**2).mean())).astype(np.float32).astype(np.float64)


def rademacher(seed: int, name: str, p: int, k: int, output: int) -> np.ndarray:
    return dense_signs(seed, name, SIGN, k, p, output) / math.sqrt(k)


def gaussian(seed: int, name: str, p: int, k: int, output: int) -> np.ndarray:
    s = np.empty((k, p))
    for r in range(k):
        words = random_words(seed, name, NORMAL, r // 4, p, output)
        s[r] = normal_values()[(words >> np.uint64(16 * (r % 4))) & np.uint64(0xFFFF)]
    return s / math.sqrt(k)


def sparse(seed: int, name: str, p: int, k: int, output: int, nonzeros: int = 1) -> np.ndarray:
    s = np.zeros((k, p))
    for group in range(nonzeros):
        low, high = group * k // nonzeros, (group + 1) * k // nonzeros
        length = high - low
        shifts = random_words(seed, name, SHIFT, group, -(-p // length), output)
        sign = column_signs(seed, name, COLUMN, group, p, output)
        column = np.arange(p)
        s[low + (column + below(shifts, length)[column // length]) % length, column] = sign / math.sqrt(nonzeros)
    return s


def chunk_length(p: int, k: int) -> int:
    """Of a Hadamard transform: the power of two from k on, or that from p on, if it is longer, up to 16,384."""
    return max(1 << (k - 1).bit_length(), min(16384, 1 << (p - 1).bit_length()))


@cache
def sylvester(length: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < length:
        h = np.block([[h, h], [h, -h]])
    return h


def hadamard(seed: int, name: str, p: int, k: int, output: int) -> np.ndarray:
    length = chunk_length(p, k)
    half = max(1, length.bit_length() // 2)
    h = sylvester(length)
    sign = column_signs(seed, name, COLUMN, 0, p, output)
    chunks = -(-p // length)
    words = random_words(seed, name, SHIFT, 0, 8 * chunks, output)
    s = np.empty((k, chunks * length))
    for chunk in range(chunks):
        rows = []
        for j in range(k):
            for step in range(3):
                odd, add = (int(w) for w in words[8 * chunk + 2 * step : 8 * chunk + 2 * step + 2])
                j = (j * (odd % length | 1) + add) % length
                j ^= j >> half
            rows.append(j)
        assert len(set(rows)) == k, "rows of one chunk are different ones"
        after = column_signs(seed, name, COLUMN, 1, chunk * length + k, output)[chunk * length :]
        s[:, chunk * length : (chunk + 1) * length] = after[:, None] * h[rows]
    return s[:, :p] * sign / math.sqrt(k)


def side(seed: int, name: str, use: int, k: int, size: int, output: int) -> np.ndarray:
    if k >= size:
        return np.diag(column_signs(seed, name, use, 0, size, output))
    return dense_signs(seed, name, use, k, size, output) / math.sqrt(k)


def sides(k: int, o: int, i: int) -> tuple[int, int]:
    """As equal as o and i allow, k₁ k₂ ≤ k."""
    first = min(o, math.isqrt(k))
    rest = min(i, k // first)
    return min(o, k // rest), rest


def kronecker(seed: int, name: str, shape: tuple[int, ...], k: int, output: int) -> np.ndarray:
    if len(shape) < 2:
        return sparse(seed, name, math.prod(shape), k, output)
    o, i = shape[0], math.prod(shape[1:])
    k1, k2 = sides(k, o, i)
    both = np.kron(side(seed, name, FIRST, k1, o, output), side(seed, name, REST, k2, i, output))
    s = np.zeros((k, o * i))
    s[: len(both)] = both
    return np.roll(s, below(random_words(seed, name, SHIFT, 0, 1, output)[0], k), axis=0)


def random_mask(seed: int, key: str, total: int, k: int, output: int) -> np.ndarray:
    """[k, total] over the entries of all parameters of a group."""
    s, words = np.zeros((k, total)), random_words(seed, key, PICK, 0, k, output)
    for r in range(k):
        low, high = r * total // k, (r + 1) * total // k
        if high > low:
            s[r, low + below(words[r], high - low)] = math.sqrt(high - low) * (1 if int(words[r]) & 1 else -1)
    return s


def group_matrix(
    kind: str, seed: int, key: str, shapes: Shapes, k: int, output: int, **options: int
) -> dict[str, np.ndarray]:
    """The columns of every parameter of a group with k rows. `key` is the group's name, empty for a global budget."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    if kind == "random-mask":
        s = random_mask(seed, key, sum(sizes.values()), k, output)
        return dict(zip(shapes, np.split(s, np.cumsum(list(sizes.values()))[:-1], axis=1), strict=True))
    if kind == "kronecker":
        return {name: kronecker(seed, name, shape, k, output) for name, shape in shapes.items()}
    make = {"sparse": sparse, "rademacher": rademacher, "gaussian": gaussian, "hadamard": hadamard}[kind]
    return {name: make(seed, name, sizes[name], k, output, **options) for name in shapes}


def budget_groups(shapes: Shapes, dim: int, budget: Any, layers: bool = True) -> list[tuple[str, list[str], int]]:
    """(name, parameters, rows) of each group, in the order of their rows."""
    if budget == "global":
        return [("", list(shapes), dim)]
    members: dict[str, list[str]] = {}
    for name in shapes:
        if budget == "layer":
            key = (name.rpartition(".")[0] or name) if layers else name
        else:
            key = max((b for b in budget if f"{name}.".startswith(f"{b}.")), key=len)
        members.setdefault(key, []).append(name)
    if budget != "layer":
        return [(key, names, budget[key]) for key, names in members.items()]
    sizes = [sum(math.prod(shapes[n]) for n in names) for names in members.values()]
    exact = [Fraction((dim - len(sizes)) * size, sum(sizes)) for size in sizes]
    rows = [1 + int(v) for v in exact]
    for k in sorted(range(len(sizes)), key=lambda k: int(exact[k]) - exact[k])[: dim - sum(rows)]:
        rows[k] += 1
    return [(key, names, r) for (key, names), r in zip(members.items(), rows, strict=True)]


def project(
    jacobians: Mapping[str, Tensor],
    dim: int,
    kind: str,
    seed: int = 0,
    budget: Any = "global",
    joint: bool = False,
    layers: bool = True,
    **options: int,
) -> np.ndarray:
    """J Sᵀ: [n, c, dim], or [n, dim] for one output or `joint`. Of Jacobians [n, c, *shape]."""
    shapes = {name: tuple(j.shape[2:]) for name, j in jacobians.items()}
    flat = {name: j.reshape(*j.shape[:2], -1).numpy() for name, j in jacobians.items()}
    n, c = next(iter(flat.values())).shape[:2]
    parts = []
    for key, names, k in budget_groups(shapes, dim, budget, layers):
        part = np.zeros((n, c, k))
        for output in range(c):
            some = {name: shapes[name] for name in names}
            made = group_matrix(kind, seed, key, some, k, output if joint else 0, **options)
            for name in names:
                part[:, output] += flat[name][:, output] @ made[name].T
        parts.append(part.sum(1) if joint else part)
    phi = np.concatenate(parts, -1)
    return phi[:, 0] if not joint and c == 1 else phi


# The two programs.


def same(got: Tensor, want: np.ndarray, tolerance: float = 1e-10) -> None:
    assert got.shape == want.shape
    assert got.dtype == F64
    assert float(np.abs(want).max()) > 0
    assert float(np.abs(got.numpy() - want).max()) < tolerance * float(np.abs(want).max())


def test_philox_known_answer() -> None:
    """The vector of Random123 for philox4x64-10: of counter 0, key 0."""
    from tangency.projection.sketches.random import _philox

    want = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
    zero = torch.zeros(1, dtype=torch.int64)
    assert [int(w) % 2**64 for w in _philox(zero, zero, 0, 0, 0)] == want
    # NumPy counts up before it makes the first words, so its counter −1 makes those of 0.
    assert np.random.Philox(counter=2**256 - 1, key=0).random_raw(4).tolist() == want


@given(
    st.integers(-(2**70), 2**70),
    st.text(max_size=8),
    st.integers(0, 6),
    st.integers(0, 2**20),
    st.integers(1, 3),
    st.integers(0, 2**40),
    st.integers(1, 9),
)
def test_words_are_numpys(seed: int, name: str, use: int, output: int, rows: int, start: int, count: int) -> None:
    """By NumPy (a CPU's way), by tensor arithmetic (any device's), at any place."""
    from tangency.projection.sketches.random import Stream

    stream = Stream(Stream.of(seed, name).key, output)
    range_, chosen = torch.arange(start, start + count), torch.arange(start, start + count).flip(0)
    got = stream.words(use, rows, start, count, torch.device("cpu"))
    assert torch.equal(got, stream.at(use, rows, range_))
    assert torch.equal(got.flip(1), stream.at(use, rows, chosen))
    for row in range(rows):
        key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
        philox = np.random.Philox(counter=[start // 4, row, output, use], key=key)
        want = philox.random_raw(start % 4 + count)[start % 4 :]
        assert np.array_equal(got[row].numpy().view(np.uint64), want)


@given(st.integers(1, 200), st.integers(1, 70), st.booleans(), st.sampled_from([torch.float32, F64]))
def test_entries_are_the_documented_bits(k: int, q: int, normal: bool, dtype: torch.dtype) -> None:
    from tangency.projection.sketches.random import Stream, entries

    rows = -(-k // (4 if normal else 64))
    words = Stream.of(3, "w").words(NORMAL if normal else SIGN, rows, 5, q, torch.device("cpu"))
    got = entries(words, normal, torch.empty(q, k, dtype=dtype))
    want = (gaussian if normal else rademacher)(3, "w", q + 5, k, 0)[:, 5:].T * math.sqrt(k)
    assert got.dtype == dtype
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-12 if dtype == F64 else 1e-6)


def test_normal_numbers_are_normal() -> None:
    """Moments of the table: as those of a normal distribution but for the tails that 65,536 values leave out."""
    v = normal_values()
    assert np.array_equal(v, -v[::-1])
    assert abs((v**2).mean() - 1) < 1e-6
    assert abs((v**4).mean() - 3) < 2e-3
    assert len(np.unique(v)) == 65536


def heads() -> dict[str, Callable[[nn.Module], tg.Kernel]]:
    return {
        "trace": tg.trace_ntk,
        "pseudo": tg.pseudo_ntk,
        "head": lambda model: tg.head_ntk(model, squares),
        "full": tg.full_ntk,
    }


def squares(out: Tensor) -> Tensor:
    flat = out.flatten(1)
    return torch.stack([flat[:, 0] ** 2, flat.sum(1)], 1)


def mean(out: Tensor) -> Tensor:
    return out.flatten(1).sum(1) / math.sqrt(out.flatten(1).shape[1])


NETS = (
    "conv_grouped",
    "conv_strided",
    "transposed_grouped",
    "group_norm",
    "called_twice",
    "tied_embedding",
    "scale_shift",
    "frozen_and_unused",
    "gpt2_last_token",
)
CASES = {case.name: case for case in ZOO}


@cache
def net(name: str, head: str) -> tuple[tg.Kernel, Any, dict[str, Tensor]]:
    """A kernel of a network of the zoo, inputs, and the Jacobian by plain autograd."""
    model, x = build(CASES[name], 3)
    j = reference.jacobians(model, x, head={"head": squares, "pseudo": mean}.get(head))
    return heads()[head](model), x, j


def by_module(shapes: Shapes, dim: int) -> dict[str, int]:
    """A budget with one parameter by its own name and the others by the outermost module that holds them."""
    names = list(shapes)
    keys = list(dict.fromkeys([names[-1], *(n.split(".")[0] for n in names[:-1])]))
    return {key: dim // len(keys) + k for k, key in enumerate(keys)}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=[pytest.mark.slow] if name == "gpt2_last_token" and kind != "sparse" else [])
        for name in NETS
        for kind in KINDS
    ],
)
@pytest.mark.every(9)
def test_features_are_those_of_the_second_program(name: str, kind: str) -> None:
    seed = 5
    shapes = {k: v.shape[2:] for k, v in net(name, "trace")[2].items()}
    split = by_module(shapes, 41)
    runs = [("trace", "global", False), ("trace", "layer", True)]
    if name != "gpt2_last_token":  # slow to probe
        runs += [("trace", "global", True), ("pseudo", "layer", False), ("head", split, True), ("full", split, False)]
    for head, budget, joint in runs:
        kernel, x, j = net(name, head)
        dim = max(21, len(shapes)) if isinstance(budget, str) else sum(budget.values())
        made = tg.projected(kernel, dim, kind, seed, budget=budget, joint=joint)
        same(made.features(x) if budget == "global" else quick(made, x), project(j, dim, kind, seed, budget, joint))


LARGE = ("lenet", "resnet_batch", "resnet_plain", "hundred_outputs", "gpt2_classifier", "llama", *NETS)
EVERY = [pytest.param(c, id=c.name, marks=[pytest.mark.slow] if c.name in LARGE else []) for c in ZOO]


def quick(made: Any, x: Any) -> Tensor:
    """`made.features(x)` without what is done for many samples."""
    value = made.prepare(made.ready(x)).value
    return value[:, 0] if value.shape[1] == 1 else value


@pytest.mark.parametrize("case", EVERY)
@pytest.mark.every(5)
def test_every_architecture(case: Case) -> None:
    """The kinds that take gradients by ranges of columns, in every order in which a rule may give them."""
    model, x = build(case, 2)
    j, kernel = reference.jacobians(model, x), tg.trace_ntk(model)
    made = tg.projected(kernel, 37, "rademacher", 3)
    same(quick(made, x), project(j, 37, "rademacher", 3))
    made = tg.projected(kernel, 37, "sparse", 3, nonzeros=3, joint=True)
    same(quick(made, x), project(j, 37, "sparse", 3, joint=True, nonzeros=3))


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(case, id=case.name) for case in ZOO])
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_and_kind(case: Case, kind: str) -> None:
    model, x = build(case, 2)
    j, kernel = reference.jacobians(model, x), tg.trace_ntk(model)
    dim = max(70, len(j))
    for budget, joint in (("global", False), ("layer", True)):
        made = tg.projected(kernel, dim, kind, 3, budget=budget, joint=joint)
        same(made.features(x), project(j, dim, kind, 3, budget, joint))


@pytest.mark.parametrize("kind", KINDS)
def test_activations(kind: str) -> None:
    """The conjugate and the embedding kernel: names of layers take the place of names of parameters."""
    model, x = mlp([5, 30, 40, 3], nn.Tanh).double(), torch.randn(4, 5, dtype=F64)
    z = {"input of 4": model[:4](x), "1": torch.ones(4, 1, dtype=F64)}
    j = {name: v.detach()[:, None] for name, v in z.items()}
    for budget in ("global", "layer", {"input of 4": 20, "1": 3}):
        dim = 23
        made = tg.projected(tg.conjugate_kernel(model), dim, kind, 1, budget=budget)
        same(made.features(x), project(j, dim, kind, 1, budget, layers=False))
    j = {name: model[:stop](x).detach()[:, None] for name, stop in (("1", 2), ("3", 4))}
    made = tg.projected(tg.embedding_kernel(model, layers=["1", "3"]), 9, kind, 1, budget="layer")
    same(made.features(x), project(j, 9, kind, 1, "layer", layers=False))


def remembering(kernel: tg.Kernel) -> tg.Kernel:
    """The kernel, which computes the gradients of a batch once, however many random matrices they are projected by."""
    blocks, known = kernel.feature_map._blocks, {}

    def once(x: Tensor, plan: Any, memory: int | None, form: Any, outputs: Any) -> dict[str, Any]:
        if form is not never:  # not asked for by a projection
            return blocks(x, plan, memory, form, outputs)
        key = x.numpy().tobytes(), outputs
        if key not in known:
            known[key] = blocks(x, plan, memory, form, outputs)
        return dict(known[key])

    object.__setattr__(kernel.feature_map, "_blocks", once)
    return kernel


@cache
def few(*sizes: int) -> tuple[tg.Kernel, Tensor, dict[str, Tensor]]:
    """The kernel of a model with parameters of these sizes, inputs and Jacobians."""
    torch.manual_seed(0)
    members: dict[str, Any] = {f"p{k}": nn.Parameter(torch.randn(size, dtype=F64)) for k, size in enumerate(sizes)}

    def forward(net: Any, x: Tensor) -> Tensor:
        total = torch.zeros_like(x[:, :2])
        for name in members:
            p = getattr(net, name)
            total = total + (p * x[:, :1] + x[:, 1:2] * torch.arange(len(p))).sin().sum(1, keepdim=True) * x[:, :2]
        return total

    model, x = Net(forward, **members), torch.randn(3, 2, dtype=F64)
    return remembering(tg.trace_ntk(model)), x, reference.jacobians(model, x)


SIZES = st.sampled_from([(1,), (1, 1, 1), (64, 65, 1), (63, 128), (300,), (129, 2, 77)])


@pytest.mark.parametrize("kind", KINDS)
@given(SIZES, st.integers(1, 200), st.booleans(), st.integers(-9, 9))
@example((1, 1, 1), 1, True, 0)
@example((64, 65, 1), 63, False, 1)
@example((63, 128), 64, True, 2)
@example((300,), 65, False, 3)
@example((129, 2, 77), 1000, True, 4)
@pytest.mark.every(2)
def test_odd_sizes(kind: str, sizes: tuple[int, ...], dim: int, joint: bool, seed: int) -> None:
    """Parameters of a single entry, more rows than columns, lengths next to the word's 64 bits."""
    kernel, x, j = few(*sizes)
    made = tg.projected(kernel, dim, kind, seed, joint=joint)
    same(quick(made, x), project(j, dim, kind, seed, "global", joint))


@given(st.sampled_from([(9, 3, 20, 1), (64, 65, 1), (7, 7, 7)]), st.integers(4, 90))
@example((9, 3, 20, 1), 61)  # two layers have the same claim to the last row
def test_layers_share_the_dimensions_by_size(sizes: tuple[int, ...], dim: int) -> None:
    """Exactly, in integers: another program cannot be asked to round as we do."""
    kernel, x, j = few(*sizes)
    same(quick(tg.projected(kernel, dim, "sparse", budget="layer"), x), project(j, dim, "sparse", 0, "layer"))


@pytest.mark.parametrize(
    "name", ["conv_strided", "conv_grouped", "looped_conv", "transposed_grouped", "tied_embedding"]
)
@pytest.mark.parametrize("dim", [70, 300])
def test_kronecker_with_a_side_that_is_kept(name: str, dim: int) -> None:
    """In the weight's own order, whatever the order of the factors."""
    kernel, x, j = net(name, "trace")
    shapes = [v.shape[2:] for v in j.values() if v.dim() > 3]
    assert any(
        k >= size
        for s in shapes
        for k, size in zip(sides(dim, s[0], s[1:].numel()), (s[0], s[1:].numel()), strict=True)
    )
    for joint in (False, True):
        made = tg.projected(kernel, dim, "kronecker", 3, joint=joint)
        same(quick(made, x), project(j, dim, "kronecker", 3, "global", joint))


def test_no_words_are_made_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each non-zero has its own, and needs none of the others'."""
    from tangency.projection.sketches.random import Stream

    kernel, x, _ = few(300)
    quick(tg.projected(kernel, 128), x)
    words, made = Stream.words, 0

    def counted(self: Any, use: int, rows: int, start: int, count: int, *rest: Any, **more: Any) -> Tensor:
        nonlocal made
        found = words(self, use, rows, start, count, *rest, **more)
        made += found.numel()
        return found

    monkeypatch.setattr(Stream, "words", counted)
    for nonzeros in (4, 32):
        made = 0
        quick(tg.projected(kernel, 128, nonzeros=nonzeros), x)
        signs, shifts = nonzeros * -(-300 // 64), nonzeros * -(-300 // (128 // nonzeros))
        assert made <= 2 * (signs + shifts)


@given(SIZES, st.integers(1, 70), st.integers(1, 20))
def test_nonzeros_need_not_divide_the_dimension(sizes: tuple[int, ...], dim: int, nonzeros: int) -> None:
    kernel, x, j = few(*sizes)
    nonzeros = min(nonzeros, dim)
    made = tg.projected(kernel, dim, "sparse", 2, nonzeros=nonzeros)
    same(quick(made, x), project(j, dim, "sparse", 2, nonzeros=nonzeros))


# In expectation. What the errors of the random matrices of each kind should be, from the gradients themselves.

SEEDS = 80


@dataclass(frozen=True)
class World:
    """A kernel on a few samples: exactly, and the gradients it is made of."""

    kernel: tg.Kernel
    x: Tensor
    exact: np.ndarray  # [n, n]
    gradients: dict[str, np.ndarray]  # [n, c, *shape]
    found: dict[Any, np.ndarray] = field(default_factory=dict)

    def flat(self) -> np.ndarray:
        return np.concatenate([g.reshape(*g.shape[:2], -1) for g in self.gradients.values()], 2)

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Of every entry the number of its parameter, and its own there."""
        sizes = [math.prod(g.shape[2:]) for g in self.gradients.values()]
        return np.repeat(np.arange(len(sizes)), sizes), np.concatenate([np.arange(size) for size in sizes])

    def residuals(self, seeds: int = SEEDS, **options: Any) -> np.ndarray:
        """[seed, n, n]"""
        key = (seeds, *map(str, sorted(options.items())))
        if key not in self.found:
            made = [tg.projected(self.kernel, seed=seed, **options)(self.x) for seed in range(seeds)]
            self.found[key] = np.stack([k.numpy() for k in made]) - self.exact
        return self.found[key]


@cache
def world(name: str, bias: bool = True) -> World:
    torch.manual_seed(0)
    model, x = mlp([5, 16, 12, 3], nn.Tanh, bias=bias).double(), torch.randn(5, 5, dtype=F64)
    kernel = remembering({"trace": tg.trace_ntk, "pseudo": tg.pseudo_ntk}[name](model))
    j = reference.jacobians(model, x, head=mean if name == "pseudo" else None)
    return World(kernel, x, reference.trace(j, j).numpy(), {k: v.numpy() for k, v in j.items()})


def meeting(kind: str, parameter: np.ndarray, column: np.ndarray, k: int, nonzeros: int = 1) -> np.ndarray:
    """E (Σ_r S_ra S_rb)² for two different entries a, b of the gradient."""
    other = parameter[:, None] != parameter

    def apart(length: Any) -> np.ndarray:
        return other | (column[:, None] // length != column // length)

    if kind == "sparse":  # entries of one chunk never meet
        lengths = [(g + 1) * k // nonzeros - g * k // nonzeros for g in range(nonzeros)]
        return sum(apart(length) / length for length in lengths) / nonzeros**2
    if kind == "hadamard":  # those of one chunk meet as k of its orthogonal rows do
        length = np.array([chunk_length(size, k) for size in np.bincount(parameter).tolist()])[parameter]
        return np.where(apart(length[:, None]), 1 / k, (length - k) / (k * np.maximum(1, length - 1)))
    return np.full(other.shape, 1 / k)


def variance(g: np.ndarray, meet: np.ndarray, fourth: float = 0.0) -> np.ndarray:
    """Of Σ_c ⟨S g_c(x), S g_c(y)⟩ for all pairs of samples; `fourth`: the variance of Σ_r S_ra²."""
    found = np.empty((len(g), len(g)))
    off = meet * (1 - np.eye(len(meet)))
    for a in range(len(g)):
        for b in range(len(g)):
            m = g[a].T @ g[b]
            found[a, b] = (off * (m * m + m * m.T)).sum() + fourth * (m.diagonal() ** 2).sum()
    return found


def agrees(residuals: np.ndarray, expected: np.ndarray) -> None:
    """Mean 0 and the expected variance, by how much the seeds themselves differ."""
    seeds, upper = len(residuals), np.triu_indices(len(expected))
    z = residuals.mean(0)[upper] / np.sqrt(expected[upper] / seeds)
    assert np.abs(z).max() < 4.5, f"biased: {np.abs(z).max():.1f} standard errors"
    each = (residuals**2 / expected)[:, *upper].mean(1)
    error = each.std(ddof=1) / math.sqrt(seeds)
    assert error < 0.25, "too few seeds to say anything"
    assert abs(each.mean() - 1) < 4.5 * error, f"variance {each.mean():.2f} ± {error:.2f} of what it should be"


FLAT: list[dict[str, Any]] = [
    {"kind": "rademacher", "dim": 24},
    {"kind": "gaussian", "dim": 24},
    {"kind": "sparse", "dim": 24},
    {"kind": "sparse", "dim": 26, "nonzeros": 4},
    {"kind": "hadamard", "dim": 16},
    {"kind": "hadamard", "dim": 23},
]


def label(options: Mapping[str, Any]) -> str:
    return " ".join(map(str, options.values()))


def predicted_variance(w: World, options: Mapping[str, Any], joint: bool) -> np.ndarray:
    g, (parameter, column) = w.flat(), w.columns()
    if joint:  # outputs are one long gradient whose parts have matrices of their own
        count = g.shape[1]
        parameter = np.concatenate([parameter + 1000 * c for c in range(count)])
        column, g = np.tile(column, count), g.reshape(len(g), 1, -1)
    k = options["dim"]
    fourth = ((normal_values() ** 4).mean() - 1) / k if options["kind"] == "gaussian" else 0.0
    return variance(g, meeting(options["kind"], parameter, column, k, options.get("nonzeros", 1)), fourth)


@pytest.mark.parametrize(
    ("options", "head"),
    [
        pytest.param(options, head, id=f"{label(options)} {head}")
        for options in FLAT
        for head in ("trace", "pseudo", "joint")
        if head == "trace" or (options["kind"] in ("gaussian", "sparse") and options["dim"] == 24)
    ],
)
@pytest.mark.every(5)
def test_unbiased_with_the_variance_of_the_matrix(options: dict[str, Any], head: str) -> None:
    w, joint = world("pseudo" if head == "pseudo" else "trace"), head == "joint"
    agrees(w.residuals(joint=joint, **options), predicted_variance(w, options, joint))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2)
def test_the_mean_over_seeds_tends_to_the_kernel(kind: str) -> None:
    """At the Monte Carlo rate: seeds have nothing in common."""
    w = world("trace")
    r = w.residuals(joint=False, kind=kind, dim=24) / np.sqrt(np.outer(w.exact.diagonal(), w.exact.diagonal()))
    counts = np.array([1, 2, 4, 8, 16])
    rms = [np.sqrt((r.reshape(-1, m, *r.shape[1:]).mean(1) ** 2).mean()) for m in counts]
    assert abs(np.polyfit(np.log(counts), np.log(rms), 1)[0] + 0.5) < 0.15


def test_kronecker_has_the_variance_of_two_sides() -> None:
    """BᵀB = I + W and AᵀA = I + Z with uncorrelated entries of variance 1/k₁ and 1/k₂ off the diagonal.

    So the error of tr(BᵀB X AᵀA Yᵀ) has a part in W, one in Z and one in both. Layers of their own rows are
    independent; a layer's single parameter shares its rows with nothing.
    """
    w = world("trace", bias=False)
    budget = {"0.weight": 30, "2.weight": 20, "4.weight": 18}
    expected = np.zeros_like(w.exact)
    for name, g in w.gradients.items():
        k = sides(budget[name], *g.shape[2:])
        on = [k[d] < g.shape[2 + d] for d in (0, 1)]  # a side that is kept whole has no error
        assert any(on), name
        i, j = np.triu_indices(g.shape[2], 1), np.triu_indices(g.shape[3], 1)
        for a in range(len(g)):
            for b in range(len(g)):
                f = np.einsum("cpu,cqv->pquv", g[a], g[b])
                first, rest = np.einsum("pquu->pq", f), np.einsum("ppuv->uv", f)
                both = f + f.transpose(1, 0, 2, 3)
                both = (both + both.transpose(0, 1, 3, 2))[i][:, *j]
                expected[a, b] += on[0] * ((first + first.T)[i] ** 2).sum() / k[0]
                expected[a, b] += on[1] * ((rest + rest.T)[j] ** 2).sum() / k[1]
                expected[a, b] += all(on) * (both**2).sum() / (k[0] * k[1])
    agrees(w.residuals(kind="kronecker", budget=budget, dim=68), expected)


def test_random_mask_has_the_variance_of_a_stratified_sample() -> None:
    w, dim = world("trace"), 47
    g = w.flat()
    each = np.einsum("ncp,mcp->nmp", g, g)
    total, expected = g.shape[2], np.zeros_like(w.exact)
    for r in range(dim):
        run = each[:, :, r * total // dim : (r + 1) * total // dim]
        expected += run.shape[2] * (run**2).sum(2) - run.sum(2) ** 2
    agrees(w.residuals(kind="random-mask", dim=dim, seeds=200), expected)


def refused(what: Callable[[], Any], message: str) -> bool:
    try:
        what()
    except tg.InputError as e:
        return message in str(e)
    return False


@pytest.mark.parametrize("kind", ["sparse", "hadamard"])
@pytest.mark.every(2)
def test_parameters_of_a_single_entry(kind: str) -> None:
    """However many there are, and first entries of others: their columns of the matrix are as independent as any."""
    torch.manual_seed(0)
    parts = nn.ModuleList([nn.Linear(1, 1, bias=False, dtype=F64) for _ in range(12)])
    model = Net(lambda net, x: sum(part(x[:, k : k + 1]) for k, part in enumerate(net.parts)), parts=parts)
    kernel, x = remembering(tg.trace_ntk(model)), torch.randn(5, 12, dtype=F64)
    dim, seeds = 16, 60
    found = tg.projection_error(kernel, tg.projected(kernel, dim, kind), x)
    exact, (i, j) = x @ x.T, torch.triu_indices(5, 5, 1)
    norms = (exact.diagonal()[:, None] * exact.diagonal()).sqrt()
    made = torch.stack([(tg.projected(kernel, dim, kind, seed)(x) - exact) / norms for seed in range(seeds)])
    ratio = (made[:, i, j] / found.predicted).square().mean(1)
    assert float(ratio.mean()) < 1 + 4.5 * float(ratio.std()) / math.sqrt(seeds)
    assert int(torch.linalg.matrix_rank(tg.projected(kernel, dim, kind).features(x))) == 5


def test_more_nonzeros_than_a_layer_has_rows() -> None:
    """Refused, or right: never a layer that counts less than it should."""
    w, options = world("trace"), {"kind": "sparse", "nonzeros": 4, "dim": 9, "budget": {"0": 6, "2": 2, "4": 1}}
    if refused(lambda: tg.projected(w.kernel, **options), "nonzeros=4"):
        return
    residuals = w.residuals(**options)
    spread = residuals.std(0, ddof=1) / math.sqrt(SEEDS)
    assert np.abs(residuals.mean(0) / spread).max() < 4.5


@pytest.mark.parametrize("head", ["trace", "pseudo"])
@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "sparse", "hadamard"])
def test_the_prediction_bounds_the_variance(kind: str, head: str) -> None:
    """It leaves out what a kind does better than normal entries, for which it is exact."""
    w, k = world(head), 16
    found = tg.projection_error(w.kernel, tg.projected(w.kernel, k, kind), w.x)
    upper = np.triu_indices(len(w.exact), 1)
    norms = np.sqrt(np.outer(w.exact.diagonal(), w.exact.diagonal()))
    want = np.sqrt(predicted_variance(w, {"kind": kind, "dim": k}, joint=False))[upper] / norms[upper]
    ratio = found.predicted.numpy() / want
    assert ratio.min() > 0.999
    assert ratio.max() < (1.001 if kind == "gaussian" else 1.4)


@pytest.mark.parametrize("kind", ["rademacher", "sparse"])
def test_the_prediction_knows_the_budget(kind: str) -> None:
    """Layers with rows of their own: their variances add up, each with its own number of rows."""
    w, dim, budget = world("trace"), 78, {"0": 64, "2": 7, "4": 7}
    found = tg.projection_error(w.kernel, tg.projected(w.kernel, dim, kind, budget=budget), w.x)
    norms = np.sqrt(np.outer(w.exact.diagonal(), w.exact.diagonal()))
    i, j = np.triu_indices(len(w.exact), 1)
    residuals = (w.residuals(kind=kind, dim=dim, budget=budget) / norms)[:, i, j]
    ratio = (residuals**2 / found.predicted.double().numpy() ** 2).mean(1)
    assert 0.5 < ratio.mean() < 1 + 4.5 * ratio.std(ddof=1) / math.sqrt(SEEDS)


@cache
def wide(name: str) -> tuple[tg.Kernel, Tensor]:
    """Thousands of parameters."""
    torch.manual_seed(0)
    if name == "random-mask":  # gradients whose entries are about alike: its error depends on that
        return remembering(tg.trace_ntk(nn.Linear(4000, 1))), torch.randn(12, 4000)
    if name == "kronecker":  # layers wider than a side of the matrix
        return remembering(tg.pseudo_ntk(mlp([64, 64, 64], nn.Tanh, bias=False))), torch.randn(12, 64)
    if name == "uneven":  # most of the kernel is a few entries of the gradient
        return remembering(tg.trace_ntk(mlp([8, 100, 80, 2], nn.ReLU))), torch.randn(12, 8)
    return remembering(tg.pseudo_ntk(mlp([40, 60, 50, 40], nn.Tanh))), torch.randn(12, 40)


@cache
def relative(name: str, kind: str, dim: int, seeds: int) -> np.ndarray:
    """[seed, pairs], computed without `projection_error`."""
    kernel, x = wide(name)
    exact = kernel(x).double().numpy()
    i, j = np.triu_indices(len(exact), 1)
    norms = np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
    made = [tg.projected(kernel, dim, kind, seed)(x).double().numpy() for seed in range(seeds)]
    return np.stack([((k - exact) / norms)[i, j] for k in made])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2, 1)
def test_the_error_falls_with_the_dimension(kind: str) -> None:
    """As k^-½, for Kronecker products as k^-¼; where it is predicted, as predicted."""
    kernel, x = wide(kind)
    dims = np.array([16, 47, 139, 410])
    rms = np.array([np.sqrt((relative(kind, kind, int(k), 10) ** 2).mean()) for k in dims])
    slope = np.polyfit(np.log(dims), np.log(rms), 1)[0]
    assert abs(slope + (0.25 if kind == "kronecker" else 0.5)) < 0.08
    found = [tg.projection_error(kernel, tg.projected(kernel, int(k), kind), x).expected_rms for k in dims[::3]]
    if kind in ("kronecker", "random-mask"):
        assert found == [None, None]
    else:
        assert all(0.8 < r < 1.2 for r in rms[::3] / found)


@pytest.mark.parametrize("kind", ["rademacher", "gaussian", "sparse", "hadamard"])
@pytest.mark.every(2)
def test_the_dimension_that_an_error_needs(kind: str) -> None:
    kernel, x = wide(kind)
    first = tg.projection_error(kernel, tg.projected(kernel, 64, kind, 1000), x)
    error, probability = 0.2, 0.9
    k = first.dimension(error, probability)
    assert (np.abs(relative(kind, kind, k, 20)) < error).mean() >= probability
    assert (np.abs(relative(kind, kind, k // 3, 20)) < error).mean() < probability  # it is not just large
    assert first.dimension(0.1) == pytest.approx(4 * first.dimension(0.2), rel=0.02)
    assert first.dimension(0.2, 0.99) > k


def test_no_dimension_is_promised_for_a_mask() -> None:
    """Of gradients that are a few large entries, the error of one seed says little about that of others."""
    kernel, x = wide("uneven")
    found = [tg.projection_error(kernel, tg.projected(kernel, 64, "random-mask", seed), x) for seed in range(8)]
    assert max(f.rms for f in found) > 3 * min(f.rms for f in found)
    with pytest.raises(tg.InputError, match="random-mask.*no dimension can be promised.*sparse"):
        found[0].dimension(0.2, 0.9)


def test_the_dimension_that_all_pairs_need() -> None:
    kernel, x = wide("sparse")
    first = tg.projection_error(kernel, tg.projected(kernel, 64), x)
    k = first.dimension(0.25, 0.8, every=True)
    assert k > first.dimension(0.25, 0.8)
    assert (np.abs(relative("sparse", "sparse", k, 20)).max(1) < 0.25).mean() >= 0.8


def test_kronecker_needs_the_fourth_power() -> None:
    kernel, x = wide("kronecker")
    found = tg.projection_error(kernel, tg.projected(kernel, 64, "kronecker"), x)
    assert found.dimension(0.1) == pytest.approx(16 * found.dimension(0.2), rel=0.02)


@pytest.mark.parametrize("make", [tg.trace_ntk, tg.pseudo_ntk, tg.full_ntk])
def test_what_the_error_holds(make: Any) -> None:
    model, x = mlp([4, 12, 3], nn.Tanh).double(), torch.randn(5, 4, dtype=F64)
    kernel = make(model)
    made = tg.projected(kernel, 16, seed=4)
    found = tg.projection_error(kernel, made, x)
    exact, got = (k(x).numpy() for k in (kernel, made))
    if exact.ndim == 4:
        exact, got = exact.reshape(15, 15), got.reshape(15, 15)
    size = np.sqrt(np.outer(exact.diagonal(), exact.diagonal()))
    i, j = np.triu_indices(len(exact), 1)
    want = ((got - exact) / size)[i, j]
    np.testing.assert_allclose(found.residuals, want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.own, got.diagonal() / exact.diagonal() - 1, rtol=1e-5, atol=1e-6)
    assert found.rms == pytest.approx(np.sqrt((want**2).mean()), rel=1e-5)
    assert found.largest == pytest.approx(np.abs(want).max(), rel=1e-5)
    assert found.quantile(0.5) == pytest.approx(np.median(np.abs(want)), rel=1e-5)
    assert (found.kind, found.dim, found.predicted.shape) == ("sparse", 16, found.residuals.shape)
    assert all(text in repr(found) for text in ("sparse", "dim=16", f"{found.rms:.3g}", f"{found.expected_rms:.3g}"))


# What every kernel must satisfy.


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2, 1)
def test_conformance(kind: str) -> None:
    model, x = mlp([5, 9, 3], nn.Tanh).double(), torch.randn(4, 5, dtype=F64)
    tg.testing.check_kernel(tg.projected(tg.trace_ntk(model), 12, kind, 3, budget="layer"), x)
    if kind in ("sparse", "hadamard"):  # combinations of kernels and of kinds do not know of each other
        tg.testing.check_kernel(tg.projected(tg.pseudo_ntk(model), 12, kind), x)
        tg.testing.check_kernel(tg.cosine(tg.projected(tg.full_ntk(model), 12, kind)), x)


@pytest.mark.parametrize("kind", ["sparse", "kronecker"])
@pytest.mark.every(2)
def test_conformance_in_32_and_16_bits(kind: str) -> None:
    model, x = mlp([5, 9, 3], nn.Tanh), torch.randn(4, 5)
    tg.testing.check_kernel(
        tg.projected(tg.trace_ntk(model), 10, kind, joint=True, storage="float16"), x, tolerance=2e-3
    )
    tg.testing.check_kernel(tg.projected(tg.trace_ntk(model, dtype="float16"), 10, kind), x, tolerance=2e-3)


@pytest.mark.parametrize("kind", ["sparse", "hadamard", "kronecker", "random-mask"])
def test_enough_dimensions_are_exact(kind: str) -> None:
    """Where every parameter has at least as many rows as entries, there is nothing to lose."""
    model, x = mlp([3, 4, 2], nn.Tanh).double(), torch.randn(4, 3, dtype=F64)
    kernel = tg.full_ntk(model)
    budget = {"0.weight": 16, "0.bias": 4, "2.weight": 8, "2.bias": 2}
    torch.testing.assert_close(tg.projected(kernel, 30, kind, budget=budget)(x), kernel(x), rtol=1e-12, atol=1e-12)


def test_parts_add_up_and_are_those_of_the_layers() -> None:
    model, x = mlp([5, 30, 20, 3], nn.Tanh).double(), torch.randn(6, 5, dtype=F64)
    kernel = tg.trace_ntk(model)
    y = torch.randn(2, 5, dtype=F64)
    made = tg.projected(kernel, 60, budget={"0": 30, "2.weight": 10, "2": 5, "4": 15})
    parts = made.parts(x, y)
    assert list(parts) == ["0", "2.weight", "2", "4"]
    torch.testing.assert_close(sum(parts.values()), made(x, y))
    left, right = (made.features(v).flatten(0, 1) for v in (x, y))
    assert left.shape == (18, 60)
    at = 0
    for (_, part), rows in zip(parts.items(), (30, 10, 5, 15), strict=True):
        some = slice(at, at + rows)
        want = (left[:, some] @ right[:, some].T).view(6, 3, 2, 3).diagonal(dim1=1, dim2=3).sum(-1)
        torch.testing.assert_close(part, want)
        at += rows
    with pytest.raises(tg.InputError, match="budget='layer'"):
        tg.projected(kernel, 60).parts(x)


# Neighbours: only what can be compared.


def features_in(folder: Path, name: str, base: tg.Kernel, **options: Any) -> tg.projection.StoredFeatures:
    kernel = tg.projected(base, **{"dim": 16, **options})
    return kernel.features(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), store=folder / name)


def test_neighbours_of_another_projection_are_refused(tmp_path: Path) -> None:
    """Their products mean nothing, whatever the shapes; the message names what differs."""
    torch.manual_seed(0)
    net, other = mlp([8, 12, 2]), mlp([8, 12, 2])
    first = features_in(tmp_path, "first", tg.pseudo_ntk(net))
    again = features_in(tmp_path, "again", tg.pseudo_ntk(net))
    assert tg.projection.nearest(again, first, 1)[1][:, 0].tolist() == [0, 1, 2, 3, 4, 5]
    made = {
        "seed 1, not 0": features_in(tmp_path, "seed", tg.pseudo_ntk(net), seed=1),
        "kind 'rademacher', not 'sparse'": features_in(tmp_path, "kind", tg.pseudo_ntk(net), kind="rademacher"),
        "dim 24, not 16": features_in(tmp_path, "dim", tg.pseudo_ntk(net), dim=24),
        "of.weights '": features_in(tmp_path, "weights", tg.pseudo_ntk(other)),
        "of.head 1, not": features_in(tmp_path, "head", tg.head_ntk(net, 1)),
        "of.dtype 'float64', not 'float32'": features_in(tmp_path, "dtype", tg.pseudo_ntk(net, dtype="float64")),
        "storage 'float16', not None": features_in(tmp_path, "half", tg.pseudo_ntk(net), storage="float16"),
    }
    for part, features in made.items():
        with pytest.raises(tg.InputError, match=f"{features.path} holds features of another kernel.*{re.escape(part)}"):
            tg.projection.nearest(features, first, 1)
        if features.shape == first.shape:  # plain tensors carry no manifest
            assert tg.projection.nearest(features.tensor(), first, 1)[1].shape == (6, 1)


@pytest.mark.parametrize("cosine", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_neighbours_of_what_is_not_finite_are_refused(bad: float, cosine: bool) -> None:
    features = torch.randn(5000, 2, 3)
    broken = features.clone()
    broken[4321, 1, 2] = bad
    with pytest.raises(tg.InputError, match="the features of query 4321 are not finite"):
        tg.projection.nearest(broken, features, 1, cosine=cosine)
    with pytest.raises(tg.InputError, match="the features of sample 4321 are not finite"):
        tg.projection.nearest(features[:3], broken, 1, cosine=cosine)
    assert tg.projection.nearest(features[:3], broken[:4000], 1)[1][:, 0].tolist() == [0, 1, 2]


def test_neighbours_of_arrays() -> None:
    features = torch.randn(9, 4)
    want = tg.projection.nearest(features[:3], features, 2)
    array = features.numpy()
    array.flags.writeable = False
    for left, right in ((array[:3], array), (features[:3], array), (array.astype(">f4")[:3], features)):
        found = tg.projection.nearest(left, right, 2)
        assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    for wrong in (np.array(["a"]), [[1.0]]):
        with pytest.raises(tg.InputError, match="queries are a .*; needed: a tensor, an array of numbers, or Stored"):
            tg.projection.nearest(wrong, features, 1)
    with pytest.raises(tg.InputError, match="queries are torch.int64; needed: real numbers"):
        tg.projection.nearest(np.ones((2, 4), np.int64), features, 1)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_neighbours_whose_squares_leave_the_type(scale: float) -> None:
    features = torch.randn(9, 4)
    value, number = tg.projection.nearest(features * scale, features, 1)
    assert number[:, 0].tolist() == list(range(9))
    torch.testing.assert_close(value[:, 0], torch.ones(9))
    with pytest.raises(tg.InputError, match="the similarity of query 0 and sample 0 overflows float32"):
        tg.projection.nearest(features * 1e30, features * 1e30, 1, cosine=False)
    with pytest.raises(tg.InputError, match="queries are torch.int64; needed: real numbers"):
        tg.projection.nearest(features.long(), features, 1)
