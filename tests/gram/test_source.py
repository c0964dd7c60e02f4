"""Samples from anywhere: the same numbers however they are kept, and never more than a block of them at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import tangency as tg
from tangency.gram import source as module
from tangency.gram.source import source
from tangency.models import mlp

F64 = torch.float64
N, M, TILE = 9, 7, 4  # the last block is a single sample


class Tokens(nn.Module):
    """A masked mean over tokens, with the arguments of a Hugging Face model."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden, self.out = nn.Embedding(10, 4), nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, flip: bool = False) -> Tensor:
        h = torch.tanh(self.hidden(self.embed(input_ids)))
        w = attention_mask.to(h)[..., None]
        y = self.out((h * w).sum(1) / w.sum(1))
        return -y[:, :1] * y if flip else y


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(2, 6)

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        return torch.tanh(self.a(u) * self.b(v))


class Listed(Dataset):
    """Items as they are."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, k: int) -> Any:
        return self.items[k]


class Guarded:
    """An array on disk, so to speak: it takes slices, and remembers them."""

    def __init__(self, values: np.ndarray, most: int) -> None:
        self.values, self.most, self.read = values, most, []  # type: ignore[var-annotated]
        self.shape, self.dtype = values.shape, values.dtype

    def __getitem__(self, k: slice) -> np.ndarray:
        assert isinstance(k, slice)
        assert 0 < k.stop - k.start <= self.most, "too much at once"
        self.read.append((k.start, k.stop))
        return self.values[k]

    def __len__(self) -> int:
        return len(self.values)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise AssertionError("read as a whole")

    __iter__ = __array__


def mapped(path: Path, x: np.ndarray, mode: str = "r") -> np.memmap:
    new = np.memmap(path, x.dtype, "w+", shape=x.shape)
    new[:] = x
    new.flush()
    return np.memmap(path, x.dtype, mode, shape=x.shape)


def zarred(path: Path, x: np.ndarray) -> zarr.Array:
    made = zarr.create_array(str(path), shape=x.shape, chunks=(3, *x.shape[1:]), dtype=x.dtype)
    made[:] = x
    return made


FORMS: dict[str, Callable[[Tensor, Path], Any]] = {
    "tensor with gradient": lambda x, p: x.clone().requires_grad_(),
    "strided tensor": lambda x, p: torch.stack([x, -x], -1)[..., 0],
    "array": lambda x, p: x.numpy().copy(),
    "Fortran array": lambda x, p: np.asfortranarray(x.numpy()),
    "reversed array": lambda x, p: x.numpy()[::-1].copy()[::-1],
    "read-only memmap": lambda x, p: mapped(p, x.numpy()),
    "copy-on-write memmap": lambda x, p: mapped(p, x.numpy(), "c"),
    "other byte order": lambda x, p: mapped(p, x.numpy().astype(">f4")),
    "zarr": lambda x, p: zarred(p, x.numpy()),
    "array-like": lambda x, p: Guarded(x.numpy(), len(x)),
}
SETS: dict[str, Callable[[Tensor], Any]] = {
    "tuple of one": lambda x: (x.numpy(),),
    "list of one": lambda x: [x],
    "data set of tensors": lambda x: Listed(list(x)),
    "data set of arrays": lambda x: Listed(list(x.numpy())),
    "TensorDataset": lambda x: TensorDataset(x),
    "position": lambda x: tg.from_dataset(TensorDataset(x, torch.arange(len(x))), 0),
    "last position": lambda x: tg.from_dataset(Listed([(k, v) for k, v in enumerate(x)]), -1),
    "key": lambda x: tg.from_dataset(Listed([{"image": v, "label": 1} for v in x]), "image"),
    "tuple of keys": lambda x: tg.from_dataset(Listed([{"image": v, "label": 1} for v in x]), ("image",)),
    "callable": lambda x: tg.from_dataset(Listed([(1, {"image": -v}) for v in x]), lambda item: -item[1]["image"]),
    "collate": lambda x: tg.from_dataset(Listed(x.tolist()), collate=torch.tensor),
}


@pytest.fixture(scope="module")
def plain() -> tuple[tg.Kernel, Tensor, Tensor, Tensor, Tensor]:
    """A kernel, samples in tensors, and their Gram matrices."""
    torch.manual_seed(1)
    kernel, x, y = tg.trace_ntk(mlp([5, 6, 2], nn.Tanh)), torch.randn(N, 5), torch.randn(M, 5)
    square, wide = (tg.compute(kernel, x, other, tile=TILE, progress=False).dense() for other in (None, y))
    torch.testing.assert_close(square, kernel(x))
    torch.testing.assert_close(wide, kernel(x, y))
    return kernel, x, y, square, wide


@pytest.mark.parametrize("form", [*FORMS, *SETS])
@pytest.mark.every(4)
def test_the_same_numbers_from_any_form(form: str, plain: tuple[Any, ...], tmp_path: Path) -> None:
    kernel, x, y, square, wide = plain
    left, right = (FORMS[form](v, tmp_path / n) if form in FORMS else SETS[form](v) for v, n in ((x, "x"), (y, "y")))

    def gram(*inputs: Any, **options: Any) -> Tensor:
        return tg.compute(kernel, *inputs, tile=TILE, progress=False, **options).dense()

    assert torch.equal(gram(left), square)
    assert torch.equal(gram(left, store=str(tmp_path / "gram")), square)
    assert torch.equal(gram(left, right), wide)
    if form in FORMS:  # each side in a form of its own
        assert torch.equal(gram(x, right), wide)


def test_tuples_and_dicts(tmp_path: Path) -> None:
    kernel, u, v = tg.full_ntk(Two()), torch.randn(N, 5), torch.randn(N, 2)
    want = tg.compute(kernel, (u, v), tile=TILE, progress=False).dense()
    torch.testing.assert_close(want, kernel((u, v)))
    pairs = list(zip(u, v, strict=True))
    for given in (
        (u.numpy(), mapped(tmp_path / "v", v.numpy())),
        [zarred(tmp_path / "u", u.numpy()), v],
        {"v": v, "u": u.numpy()},
        Listed(pairs),
        Listed([{"v": b, "u": a} for a, b in pairs]),
        tg.from_dataset(Listed([(b, 3, a) for a, b in pairs]), (2, 0)),
        tg.from_dataset(Listed([{"v": b, "label": 0, "u": a} for a, b in pairs]), ("u", "v")),
    ):
        assert torch.equal(tg.compute(kernel, given, tile=TILE, progress=False).dense(), want)
    swapped = tg.from_dataset(Listed([(b, a) for a, b in pairs]), lambda item: {"u": item[1], "v": item[0]})
    assert torch.equal(tg.compute(kernel, swapped, tile=TILE, progress=False).dense(), want)


def ragged(count: int = N) -> list[list[int]]:
    """Sequences of tokens, sorted by length."""
    lengths = sorted(int(k) for k in torch.randint(1, 9, (count,)))
    return [torch.randint(10, (k,)).tolist() for k in lengths]


def padded(sequences: list[list[int]]) -> dict[str, Tensor]:
    """To the longest of those given."""
    width = max(map(len, sequences))
    return {
        "input_ids": torch.tensor([s + [0] * (width - len(s)) for s in sequences]),
        "attention_mask": torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences]),
    }


def test_hugging_face_dicts(tmp_path: Path) -> None:
    kernel, x = tg.trace_ntk(Tokens()), padded(ragged())
    want = tg.compute(kernel, x, tile=TILE, progress=False).dense()
    torch.testing.assert_close(want, kernel(x))
    arrays = {k: v.numpy() for k, v in x.items()}
    maps = {k: mapped(tmp_path / k, v.numpy()) for k, v in x.items()}
    items = Listed([{k: v[n] for k, v in arrays.items()} for n in range(N)])
    for given in (arrays, maps, items):
        assert torch.equal(tg.compute(kernel, given, tile=TILE, progress=False).dense(), want)
    flipped = tg.compute(kernel, {**arrays, "flip": True}, tile=TILE, progress=False).dense()  # flags go along
    torch.testing.assert_close(flipped, kernel({**x, "flip": True}))
    assert not torch.allclose(flipped, want)


@pytest.mark.parametrize("tile", [1, 4, 20])
@pytest.mark.every(3)
def test_each_block_padded_to_its_own_longest(tile: int, tmp_path: Path) -> None:
    kernel, left, right = tg.full_ntk(Tokens().double()), ragged(), ragged(M)
    widths = set()

    def collate(sequences: list[list[int]]) -> dict[str, Tensor]:
        batch = padded(sequences)
        widths.add(batch["input_ids"].shape[1])
        return batch

    x, y = (tg.from_dataset(Listed(s), collate=collate) for s in (left, right))
    for other, want in ((None, kernel(padded(left))), (y, kernel(padded(left), padded(right)))):
        for store in (None, str(tmp_path / f"{other is None}")):
            got = tg.compute(kernel, x, other, tile=tile, store=store, progress=False).dense()
            assert float((got - want).norm()) <= 1e-10 * float(want.norm())
    assert tile == 20 or len(widths) > 1


def test_only_the_blocks_at_work_are_loaded() -> None:
    kernel, x, y = tg.trace_ntk(mlp([5, 6, 2])), torch.randn(41, 5), torch.randn(18, 5)
    for other in (None, y):
        sides = [Guarded(v.numpy(), TILE) for v in (x, other) if v is not None]
        gram = tg.compute(kernel, *sides, tile=TILE, progress=False)
        assert torch.equal(gram.dense(), tg.compute(kernel, x, other, tile=TILE, progress=False).dense())
        for side in sides:
            probes = {(0, 2), (side.shape[0] - 2, side.shape[0])}
            blocks = {(k, min(k + TILE, side.shape[0])) for k in range(0, side.shape[0], TILE)}
            assert set(side.read) == probes | blocks
    with_two = {"u": Guarded(x.numpy(), TILE), "v": Guarded(x[:, :2].numpy(), TILE)}
    tg.compute(tg.trace_ntk(Two()), with_two, tile=TILE, progress=False)
    assert with_two["u"].read == with_two["v"].read
    seen: list[int] = []
    items = tg.from_dataset(Listed(list(range(41))), lambda k: seen.append(k) or x[k])
    tg.compute(kernel, items, tile=200, progress=False)
    assert sorted(seen) == sorted([0, 1, 39, 40, *range(41)])  # the probes, and each once


def digest(x: Any) -> str:
    return source(x, "x").digest()


def test_digests_know_content_not_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(N, 5)
    same = {form: digest(make(x, tmp_path / form)) for form, make in FORMS.items()}
    assert set(same.values()) == {digest(x)}, same
    assert digest({"a": x}) == digest({"a": x.numpy()})
    assert digest((x, x)) == digest([x.numpy(), x])
    assert digest(Listed(list(x))) == digest(Listed(list(x.numpy()))) == digest(tg.from_dataset(Listed(list(x))))
    before = digest(x)
    monkeypatch.setattr(module, "_PIECE", 3 * 5 * 8)  # three samples at a time
    assert digest(x) == before
    assert digest(Guarded(x.numpy(), 3)) == before
    huge = Guarded(np.zeros((2, 100), np.float32), 1)  # a sample is larger than a piece
    last = digest(huge)
    huge.values[1, 99] = 1
    assert digest(huge) != last


def test_digests_tell_inputs_apart() -> None:
    x, y = torch.randn(N, 4), torch.randn(N, 4)
    changed = x.clone()
    changed[-1, -1] = torch.nextafter(changed[-1, -1], torch.tensor(9.0))
    inputs: list[Any] = [
        x, changed, x.double(), x.half(), x.view(torch.int32), x[:-1], x[:, None], x.view(N, 2, 2), x.flip(0),
        (x,), (x, y), (y, x), {"a": x}, {"b": x}, {"a": x, "b": y}, {"a": y, "b": x}, {"a": x, "flip": True},
        {"a": x, "flip": False}, Listed(list(x)), Listed(list(changed)), Listed(list(x.view(torch.int32))),
        Listed(list(x[:-1])),
        Listed(list(x.view(N, 2, 2))), Listed([{"a": v} for v in x]), Listed([{"b": v} for v in x]),
        TensorDataset(x, y), tg.from_dataset(TensorDataset(x, y), 1), tg.from_dataset(TensorDataset(x, y), (1, 0)),
    ]  # fmt: skip
    assert len({digest(v) for v in inputs}) == len(inputs)
    # Two sequences cut elsewhere.
    first, second = Listed([torch.tensor([1, 2]), torch.tensor([3])]), Listed([torch.tensor([1]), torch.tensor([2, 3])])
    assert digest(tg.from_dataset(first, collate=list)) != digest(tg.from_dataset(second, collate=list))


class Opaque:
    """An item that does not show what is in it, as an image of PIL."""

    def __init__(self, value: Tensor) -> None:
        self.value = value

    def __repr__(self) -> str:
        return "<an image>"


def test_digests_see_what_the_model_gets(tmp_path: Path) -> None:
    """What collate makes of the items decides the numbers, so a store must not be gone on with after a change of it."""
    x, kernel = torch.randn(N, 4), tg.trace_ntk(mlp([4, 6, 2]))

    def collated(items: list[Any], f: Callable[[Tensor], Tensor]) -> tg.gram.source.Items:
        return tg.from_dataset(Listed(items), collate=lambda some: f(torch.stack([v.value for v in some])))

    given = collated([Opaque(v) for v in x], lambda t: t)
    want = tg.compute(kernel, given, store=str(tmp_path / "k"), progress=False).dense()
    assert torch.equal(want, tg.compute(kernel, x, progress=False).dense())
    for other in (collated([Opaque(-v) for v in x], lambda t: t), collated([Opaque(v) for v in x], lambda t: 2 * t)):
        with pytest.raises(tg.StoreMismatch, match=r"inputs\.x1"):
            tg.compute(kernel, other, store=str(tmp_path / "k"), progress=False)


class Unshaped:
    def __getitem__(self, k: slice) -> np.ndarray:
        return np.zeros((2, 5))


X = torch.zeros(4, 5)
REFUSED: dict[str, tuple[Any, str]] = {
    "labels": (Listed([(X[0], 3)]), r"of x1 are \(Tensor, int\).*from_dataset\(x1, pick=0\).*loss as head, \(0, 1\)"),
    "labels in tensors": (TensorDataset(X, torch.arange(4)), r"\(Tensor, Tensor\).*tg\.from_dataset\(x1, pick=0\)"),
    "empty set": (Listed([]), "the data set is empty; a kernel needs at least one sample"),
    "strings": (["a cat", "a dog"], "x1 is a list of str; needed: a tensor, array, tuple, dict or data set"),
    "tuple of strings": (("a cat", "a dog"), "x1 holds no tensor"),
    "array of strings": (np.array(["a cat", "a dog"]), "x1 holds <U5, of which there are no tensors.*collate="),
    "ragged array": (np.array([[1.0], [1.0, 2.0]], dtype=object), "x1 holds object"),
    "string": ("a cat", "x1 is a str; needed: a tensor, a NumPy or zarr array"),
    "without shape": (Unshaped(), r"x1 is a Unshaped; needed: a tensor.*sample in the leading dimension"),
    "number": (np.float64(3), "x1 is a float64; needed: a tensor"),
    "scalar": (np.array(3.0), "x1 is a scalar; needed: the sample in the leading dimension"),
    "nothing": ([], "x1 holds no tensor"),
    "disagreement": ({"u": np.zeros((4, 5)), "v": X[:3]}, r"disagree on the number of samples: .*x1\['u'\].*: 4.*: 3"),
    "zero samples": (np.zeros((0, 5)), r"zero samples was given \(x1 of shape \(0, 5\)\)"),
    "too large": (X.double() + 1e39, r"x1\[0, 0\] is 1e\+39, too large for torch.float32, .*dtype='float64'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str, tmp_path: Path) -> None:
    given, message = REFUSED[case]
    for store in (None, str(tmp_path / "k")):
        with pytest.raises(tg.InputError, match=message):
            tg.compute(tg.trace_ntk(mlp([5, 6, 2])), given, store=store, progress=False)
    assert not (tmp_path / "k").exists()


def test_refused_on_the_other_side(tmp_path: Path) -> None:
    kernel = tg.trace_ntk(Two().double())
    u, v = torch.randn(N, 5, dtype=F64), torch.randn(N, 2, dtype=F64)
    for other, message in [
        (
            {"u": u, "v": v},
            r"x1 and x2 differ in form: x1 has \['x\[0\]', 'x\[1\]'\], x2 has \[\"x\['u'\]\", \"x\['v'\]\"\]",
        ),
        ((u,), "differ in form"),
        ((u, v[:, 0]), r"x1 and x2 differ: x\[1\] is \(2, 2\) torch.float64 on cpu in x1, \(2,\)"),
        ((u, v[:3]), r"disagree on the number of samples: {'x2\[0\]': 9, 'x2\[1\]': 3}"),
        (["a"], "x2 is a list of str"),
        (TensorDataset(u, torch.arange(N)), r"items of x2 are.*tg.from_dataset\(x2, pick=0\)"),
    ]:
        with pytest.raises(tg.InputError, match=message):
            tg.compute(kernel, (u, v), other, progress=False)


def test_other_widths_come_to_that_of_the_parameters(tmp_path: Path) -> None:
    kernel = tg.trace_ntk(Two().double())
    u, v = torch.randn(N, 5, dtype=F64), torch.randn(N, 2, dtype=F64)
    narrow, wide = mapped(tmp_path / "u", u.float().numpy()), u.float().double()
    assert torch.equal(tg.compute(kernel, (narrow, v), progress=False).dense(), kernel((wide, v)))
    assert torch.equal(tg.compute(kernel, (u, v), (narrow, v), progress=False).dense(), kernel((u, v), (wide, v)))


def test_refused_data_sets() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            yield X[0]

    for given in (Stream(), iter([X[0]])):
        with pytest.raises(tg.InputError, match=r"the data set is a .*numbered items \(map-style\)"):
            tg.from_dataset(given)
    with pytest.raises(tg.InputError, match="the data set is empty"):
        tg.from_dataset([])
