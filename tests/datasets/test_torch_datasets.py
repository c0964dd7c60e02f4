"""torch's data sets and loaders as samples with classes: every sample once, in the data set's own order."""

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import tangency as tg
from tangency._base import machine
from tangency.datasets import Labelled, labelled
from tangency.errors import InputError, MemoryBudgetError

N = 10
X, Y = torch.arange(N * 3.0).view(N, 3), torch.arange(N) % 2


class Listed(Dataset[object]):
    """A data set of these items, with names for its classes."""

    def __init__(self, items: list[object], classes: object = None) -> None:
        self.items = items
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, k: int) -> object:
        return self.items[k]


class Stream(IterableDataset[object]):
    """The items one after the other; nobody knows how many."""

    def __init__(self, items: list[object]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[object]:
        return iter(self.items)


PAIRS: list[object] = [(x, int(y)) for x, y in zip(X, Y, strict=True)]
SETS: dict[str, Any] = {
    "tensors": TensorDataset(X, Y),
    "items": Listed(PAIRS),
    "arrays": Listed([[np.asarray(x), np.int64(y)] for x, y in PAIRS]),
    "stream": Stream(PAIRS),
    "loader": DataLoader(Listed(PAIRS), batch_size=3),
    "shuffled loader": DataLoader(Listed(PAIRS), batch_size=4, shuffle=True, drop_last=True),
    "loader of a stream": DataLoader(Stream(PAIRS), batch_size=4, drop_last=True),
    "permutation": DataLoader(Listed(PAIRS), batch_sampler=BatchSampler(RandomSampler(PAIRS), 4, drop_last=False)),
    "subset": Subset(Listed([("not", "read"), *PAIRS]), range(1, N + 1)),
}


@pytest.mark.parametrize("name", SETS)
def test_every_sample_once_in_order(name: str) -> None:
    data = labelled(SETS[name], name=name)
    assert torch.equal(torch.as_tensor(data.x), X)
    assert torch.equal(data.y, Y)
    assert data.classes == ("0", "1")
    assert data.name == name


def test_names_of_classes() -> None:
    named = Listed(PAIRS, ["cat", "dog"])
    for data in (named, Subset(named, [3, 2]), DataLoader(Subset(Subset(named, [3, 2]), [0]))):
        assert labelled(data).classes == ("cat", "dog")
    assert labelled(named, classes=["a", "b"]).classes == ("a", "b")
    assert labelled(Listed(PAIRS, 2)).classes == ("0", "1")  # something else of that name


def test_inputs_of_several_parts() -> None:
    parts = Listed([({"ids": x.long(), "mask": x > 1}, y) for x, y in PAIRS])  # type: ignore[attr-defined,misc]
    data = labelled(parts)
    assert isinstance(data.x, dict)
    assert torch.equal(data.x["mask"], X > 1)
    data = labelled(Listed([((x, 2 * x), y) for x, y in PAIRS]))  # type: ignore[operator,misc]
    assert isinstance(data.x, tuple)
    assert torch.equal(data.x[1], 2 * X)


def test_collate_of_a_loader() -> None:
    """Samples of several lengths, in dicts: padded to the longest of all, not of a batch."""
    items: list[object] = [{"ids": torch.ones(1 + k % 4), "label": k % 2} for k in range(N)]

    def padded(batch: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
        ids = torch.nn.utils.rnn.pad_sequence([item["ids"] for item in batch], batch_first=True)
        return ids, torch.tensor([item["label"] for item in batch])

    data = labelled(DataLoader(Listed(items), batch_size=2, shuffle=True, collate_fn=padded))
    assert torch.equal(torch.as_tensor(data.x).sum(1), torch.tensor([1.0 + k % 4 for k in range(N)]))
    with pytest.raises(InputError, match=r"collate_fn makes a dict of 'ids'; needed: \(x, y\)"):
        labelled(DataLoader(Listed(items), collate_fn=lambda batch: {"ids": batch}))
    with pytest.raises(InputError, match=r"10 samples cannot be made one batch \(KeyError: 'words'\)\.$"):
        labelled(DataLoader(Listed(items), collate_fn=lambda batch: batch[0]["words"]))


def test_explain_takes_them() -> None:
    """The figures are those of tensors, names come from the data set, and two sets of other names are refused."""
    model = tg.models.initialized(lambda: tg.models.mlp([3, 8, 2]), seed=0).eval()
    x = torch.randn(30, 3)
    y = (x[:, 0] > 0).long()
    items: list[object] = list(zip(x, y, strict=True))
    train, test = Listed(items[:20], ["no", "yes"]), Listed(items[20:])
    options: Any = {"kernels": ["trNTK"], "progress": False}
    plain = tg.explain(model, (x[:20], y[:20]), (x[20:], y[20:]), **options)
    found = tg.explain(model, DataLoader(train, batch_size=7, shuffle=True), test, **options)
    assert found.test.classes == ("no", "yes")
    assert torch.equal(found.explanations[0].logits, plain.explanations[0].logits)
    with pytest.raises(InputError, match="the test set's classes are yes, no, the training set's no, yes"):
        tg.explain(model, train, Listed(items[20:], ["yes", "no"]), **options)


class Picture:
    """Stands in for PIL.Image.Image."""


Picture.__module__ = "PIL.Image"
LOADERS: list[tuple[Any, str]] = [
    (
        DataLoader(Listed(PAIRS), sampler=WeightedRandomSampler([1.0] * N, N)),
        "a DataLoader with a WeightedRandomSampler, which may leave samples out .* needed: every sample once. Give the "
        "data set, loader.dataset, or .*Subset",
    ),
    (DataLoader(Listed(PAIRS), sampler=SubsetRandomSampler(range(3))), "with a SubsetRandomSampler"),
    (DataLoader(Listed(PAIRS), sampler=RandomSampler(PAIRS, replacement=True)), "with a RandomSampler"),
    (DataLoader(Listed(PAIRS), sampler=RandomSampler(PAIRS, num_samples=3)), "with a RandomSampler"),
    (DataLoader(Listed(PAIRS), batch_sampler=[[0, 1], [1, 2]]), "with a list"),
    (DataLoader(Listed(PAIRS), batch_size=None), "without batch_size; needed: .* or its data set itself"),
    (DataLoader(Stream(PAIRS), batch_size=None), "without batch_size; needed: one that makes batches of samples"),
]
WRONG: list[tuple[Any, str]] = [
    *LOADERS,
    (Listed([]), "the data set is empty"),
    (Listed([X[0]]), r"an item of set is a Tensor; needed: \(x, y\)"),
    (Listed([(1, 2, 3)]), r"is \(int, int, int\); needed: .* Several inputs go as \(\(x1, x2\), y\)"),
    (Listed([{"x": 1}]), "is a dict of 'x'; needed: .* collate_fn may make"),
    (Listed([(Picture(), 0)]), "is a PIL image; needed: .* transform=torchvision.transforms.ToTensor"),
    (Listed([("a text", 0)]), "is a str; needed: a tensor or array, or a tuple or dict of them. Make numbers of it"),
    (Listed([({"a": [X[0], None]}, 0)]), "is a NoneType; needed: a tensor"),
    (Listed([(X[0], 0), (X[0, :2], 1)]), "its 2 samples cannot be made one batch .*stack.* Pad or resize them"),
    (Listed([(X[0], b"cat")]), "y holds objects that are no names"),
    (Listed([(X[0], 0.5)]), "y is torch.float.*; needed: integers"),
    (Dataset(), "is a Dataset; needed: a data set with a length and numbered items, or an iterable"),
]


@pytest.mark.parametrize(("data", "message"), WRONG)
def test_what_is_refused(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        labelled(data, name="set")


def test_memory_is_refused_before_it_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first item, where the length is known; else while reading."""
    read = []

    class Counted(Listed):
        def __getitem__(self, k: int) -> object:
            read.append(k)
            return super().__getitem__(k)

    each = X[0].nbytes
    monkeypatch.setattr(machine, "available_memory", lambda: 2 * each * N - 1)
    with pytest.raises(MemoryBudgetError, match=r"set has 10 samples of .* MiB: .* are free.*from_dataset.*pick=0"):
        labelled(Counted(PAIRS), name="set")
    assert read == [0]
    with pytest.raises(MemoryBudgetError, match="set has 10 samples and more"):
        labelled(Stream(PAIRS), name="set")
    monkeypatch.setattr(machine, "available_memory", lambda: 2 * each * N)
    assert len(labelled(Counted(PAIRS))) == len(labelled(Stream(PAIRS))) == N


def test_an_error_in_a_data_set_says_where() -> None:
    class Broken(Listed):
        def __getitem__(self, k: int) -> object:
            return super().__getitem__(k if k < 4 else 99)

    with pytest.raises(IndexError, match="list index out of range") as e:
        labelled(Broken(PAIRS), name="train")
    assert e.value.__notes__ == ["(while item 4 of train was read)"]


def test_a_bar_where_reading_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Bar:
        def __init__(self, **options: object) -> None:
            asked.append(options)

        def __enter__(self) -> "Bar":
            return self

        def __exit__(self, *_: object) -> None: ...

        def update(self, k: int) -> None:
            asked.append({"k": k})

    stand_in = ModuleType("tqdm")
    stand_in.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", stand_in)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    labelled(Listed(PAIRS), name="train")
    assert (asked[0]["desc"], asked[0]["total"], asked[0]["delay"]) == ("reading train", N, 2.0)
    assert len(asked) == N + 1
    labelled(Listed(PAIRS), progress=False)
    assert len(asked) == N + 1


def test_kernels_say_how_to_give_them() -> None:
    kernel, data = tg.trace_ntk(torch.nn.Linear(3, 2)), TensorDataset(X, Y)
    for call, message in [
        (lambda: kernel(data), r"x is a TensorDataset; .* tg.compute\(kernel, tg.from_dataset\(x, pick=0\)\)"),
        (lambda: kernel(DataLoader(data)), r"Give its data set: .*from_dataset\(x.dataset, pick=0\)"),
        (lambda: kernel(labelled(data)), r"x is a Labelled; .* Give the inputs alone: x\.x"),
        (lambda: kernel(tg.from_dataset(data, 0)), r"block by block go to tg.compute\(kernel, x\)"),
        (lambda: tg.compute(kernel, data), r"looks like inputs and a label.*tg.from_dataset\(x1, pick=0\)"),
        (lambda: tg.compute(kernel, DataLoader(data)), r"tg.from_dataset\(x1.dataset, pick=0\)"),
        (lambda: tg.compute(kernel, labelled(data)), r"Give the inputs alone: x1\.x"),
        (lambda: tg.models.fit(torch.nn.Linear(3, 2), data), r"y is missing.*tg.datasets.labelled\(dataset\)"),
    ]:
        with pytest.raises(InputError, match=message):
            call()
    assert torch.equal(tg.compute(kernel, tg.from_dataset(data, pick=0)).dense(), kernel(X))


def test_images_and_texts_are_names_for_show() -> None:
    words, pictures = [str(k) for k in range(N)], torch.rand(N, 1, 4, 4)
    assert Labelled(X, Y, ("a", "b"), texts=words).show == tuple(words)
    assert Labelled(X, Y, ("a", "b"), texts=np.array(words)).select([3]).show == ("3",)
    assert torch.equal(torch.as_tensor(Labelled(X, Y, ("a", "b"), images=pictures).show), pictures)
    with_x = Labelled(X, Y, ("a", "b"), images=pictures).with_x(X[:, :2])
    assert torch.equal(torch.as_tensor(with_x.show), pictures)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"texts": words, "images": pictures}, "images= and texts= were given; needed: one of them"),
        ({"texts": words, "show": words}, "show= and texts= were given"),
        ({"texts": words[:3]}, "texts has 3 entries, y has 10"),
        ({"texts": "abc"}, "texts is a str; needed: n strings"),
        ({"texts": pictures}, "texts is a Tensor; needed: n strings"),
        ({"images": pictures[:, 0]}, r"images has shape \[10, 4, 4\]; .*images\[:, None\] adds the channel"),
        ({"images": X}, r"images has shape \[10, 3\]"),
        ({"images": list(pictures)}, r"images is a list; needed: a tensor .* torch.stack\(images\)"),
    ]
    for given, message in wrong:
        with pytest.raises(InputError, match=message):
            Labelled(X, Y, ("a", "b"), **given)


def test_samplers_that_take_every_sample() -> None:
    data = labelled(DataLoader(Listed(PAIRS), batch_sampler=BatchSampler(SequentialSampler(PAIRS), 3, drop_last=True)))
    assert len(data) == N


def dropping(items: list[Any]) -> tuple[Tensor, Tensor]:
    """As people leave out broken items."""
    kept = [item for item in items if item is not None and float(item[0][0]) != 6.0]
    return torch.stack([x for x, _ in kept]), torch.tensor([y for _, y in kept])


def sorting(items: list[Any]) -> tuple[Tensor, Tensor]:
    """As people sort by length, for packed sequences."""
    ordered = sorted(items, key=lambda item: -float(item[0][0]))
    return torch.stack([x for x, _ in ordered]), torch.tensor([y for _, y in ordered])


def padding(items: list[Any]) -> tuple[Tensor, Tensor]:
    """As long as the longest."""
    longest = max(len(x) for x, _ in items)
    rows = [torch.nn.functional.pad(x, (0, longest - len(x))) for x, _ in items]
    return torch.stack(rows), torch.tensor([y for _, y in items])


def test_places_are_those_of_the_data_set() -> None:
    """A sample is named by its place: who leaves samples out or moves them in collate_fn is told."""
    with pytest.raises(InputError, match=r"collate_fn makes 9 samples of 10.*Subset\(dataset, indices\)"):
        labelled(DataLoader(Listed(PAIRS), collate_fn=dropping))
    with pytest.raises(
        InputError, match=r"collate_fn changes the samples or their order .item 0 is not the batch's sample 0"
    ):
        labelled(DataLoader(Listed(PAIRS), collate_fn=sorting))
    ragged: list[object] = [(torch.ones(1 + k % 3), k % 2) for k in range(N)]
    made = labelled(DataLoader(Listed(ragged), collate_fn=padding))
    assert isinstance(made.x, Tensor)
    assert made.x.sum(1).tolist() == [1 + k % 3 for k in range(N)]


class Unsized(Stream):
    """As torch's own ChainDataset: a length in name alone."""

    def __len__(self) -> int:
        raise TypeError("object of type 'It' has no len()")


def test_odd_items() -> None:
    assert len(labelled(Unsized(PAIRS))) == N
    with pytest.raises(InputError, match=r"a list of 3 numbers, of which torch makes 3 inputs.*torch.tensor\(x\)"):
        labelled(Listed([([1.0, 2.0, 3.0], 0)]))
    masked = np.ma.masked_equal(X.numpy(), 4.0)
    with pytest.raises(InputError, match=r"x is a masked array, whose mask would be lost"):
        labelled((masked, Y))
    with pytest.raises(InputError, match=r"y is a masked array, whose mask would be lost"):
        labelled((X, np.ma.masked_equal(Y.numpy(), 1)))


class Normalising(DataLoader[object]):
    """Does something to every batch."""

    def __iter__(self) -> Any:
        return ((x / 2, y) for x, y in super().__iter__())


def test_loaders_that_give_something_else_than_their_data_set() -> None:
    data = TensorDataset(X, Y)
    for part in (
        SequentialSampler(range(7)),
        RandomSampler(range(7)),
        BatchSampler(SequentialSampler(range(7)), 2, False),
    ):
        given = {"batch_sampler": part} if isinstance(part, BatchSampler) else {"sampler": part}
        with pytest.raises(InputError, match=r"which may leave samples out or repeat them"):
            labelled(DataLoader(data, **given))  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"a Normalising, a DataLoader that makes its batches in a way of its own"):
        labelled(Normalising(data, batch_size=2))
    masked: list[object] = [(np.ma.masked_equal(x.numpy(), 4.0), 0) for x in X]
    with pytest.raises(InputError, match=r"item 0 of data has a masked array|item 0 of .* masked array"):
        labelled(Listed(masked))


class Noisy(torch.utils.data.Dataset[Any]):
    """Each item is another when it is read again, from one number on."""

    def __init__(self, first: int, labels: bool = False) -> None:
        self.first, self.labels = first, labels

    def __len__(self) -> int:
        return 9

    def __getitem__(self, k: int) -> tuple[Tensor, int]:
        x = torch.full((3,), float(k))
        if k < self.first or self.labels:
            return x, int(torch.randint(0, 10**6, ())) if k >= self.first else k % 3
        return x + torch.rand(3), k % 3


@pytest.mark.parametrize(("data", "item"), [(Noisy(0), 0), (Noisy(3), 4), (Noisy(8), 8), (Noisy(8, labels=True), 8)])
def test_augmentation_is_refused(data: Noisy, item: int) -> None:
    for given in (data, DataLoader(data, batch_size=4)):
        with pytest.raises(InputError, match=f"item {item} of train is another each time .* Switch augmentation off"):
            labelled(given, name="train")
    assert len(labelled(Noisy(9))) == 9


class Cached(Dataset[tuple[object, int]]):
    """Gives a tensor the first time, afterwards the number that it holds."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __len__(self) -> int:
        return 9

    def __getitem__(self, k: int) -> tuple[object, int]:
        again, _ = k in self.read, self.read.add(k)
        return float(k) if again else torch.tensor(float(k)), k % 3


def test_values_of_two_kinds_are_not_compared() -> None:
    assert labelled(Cached()).x.tolist() == list(range(9))
