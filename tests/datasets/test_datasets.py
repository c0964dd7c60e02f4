"""Parts keep samples and labels together; files come back as they were written, or are refused with the reason."""

import gzip
import math
import pickle
import random
import re
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tangency import InputError, TangencyError, TangencyWarning
from tangency._base.tree import leaves
from tangency.datasets import (
    MISSING,
    Labelled,
    cifar10,
    csv,
    digits,
    fashion_mnist,
    files,
    idx,
    images,
    labelled,
    mnist,
    same_columns,
)
from tangency.datasets.cells import Form
from tangency.datasets.encoding import Column, Encoding
from tangency.datasets.table import fields, is_missing, number

CLASSES = ("ant", "bee", "cat", "dog")
LABELS = st.lists(st.integers(0, 3), min_size=2, max_size=40)


def numbered(y: list[int]) -> Labelled:
    """Every part of sample k says k, so that what belongs together can be told."""
    n = torch.arange(len(y))
    x = {"a": n.float()[:, None], "b": n.int().expand(2, -1).T, "flag": True}
    return Labelled(x, torch.tensor(y), CLASSES, show=[f"sample {k}" for k in n.tolist()], name="numbered")


def which(data: Labelled) -> list[int]:
    """The numbers of the samples, which x and show agree on."""
    found = data.x["a"][:, 0].long()
    assert torch.equal(data.x["b"], found.int().expand(2, -1).T)
    assert data.x["flag"] is True
    assert data.show == tuple(f"sample {k}" for k in found.tolist())
    assert len(data) == len(found)
    assert data.name == "numbered"
    return found.tolist()


# ---------------------------------------------------------------------------------------------------------- parts


@given(y=LABELS, data=st.data())
def test_select_is_indexing(y: list[int], data: st.DataObject) -> None:
    whole, n = numbered(y), len(y)
    index = data.draw(st.lists(st.integers(-n, n - 1), min_size=1))
    want = [k % n for k in index]
    for form in (index, tuple(index), np.array(index), torch.tensor(index), torch.tensor(index, dtype=torch.int16)):
        part = whole.select(form)
        assert which(part) == want
        assert part.y.tolist() == [y[k] for k in want]
    mask = data.draw(st.lists(st.booleans(), min_size=n, max_size=n).filter(any))
    for masked in (mask, np.array(mask), torch.tensor(mask)):
        assert which(whole.select(masked)) == [k for k in range(n) if mask[k]]
    cut = data.draw(st.slices(n).filter(lambda s: len(range(n)[s]) > 0))
    assert which(whole.select(cut)) == list(range(n)[cut])


@given(y=LABELS, chosen=st.lists(st.integers(0, 3), min_size=1, unique=True))
def test_only_keeps_the_samples_of_some_classes(y: list[int], chosen: list[int]) -> None:
    whole = numbered(y)
    if not set(chosen) & set(y):
        with pytest.raises(InputError, match=f"none of the {len(y)} samples is of class '{CLASSES[chosen[0]]}'"):
            whole.only(*chosen)
        return
    part = whole.only(*chosen)
    assert which(part) == [k for k in range(len(y)) if y[k] in chosen]
    assert part.classes == tuple(CLASSES[k] for k in chosen)
    # The names of the labels are what they were.
    assert [part.classes[k] for k in part.y.tolist()] == [CLASSES[y[k]] for k in which(part)]
    by_name = whole.only(*part.classes)
    assert torch.equal(by_name.y, part.y)
    assert which(by_name) == which(part)


@given(y=LABELS.map(lambda y: [*y, 0, 1, 2, 3]), seed=st.none() | st.integers(0, 2**32 - 1), data=st.data())
def test_take_is_balanced(y: list[int], seed: int | None, data: st.DataObject) -> None:
    whole = numbered(y)
    n = data.draw(st.integers(1, int(whole.counts().min())))
    part = whole.take(per_class=n, seed=seed)
    assert part.counts().tolist() == [n] * 4
    found = which(part)
    assert found == sorted(set(found))
    assert part.y.tolist() == [y[k] for k in found]
    assert which(whole.take(per_class=n, seed=seed)) == found
    if seed is None:
        assert found == [k for k in range(len(y)) if y[:k].count(y[k]) < n]


@given(y=LABELS, seed=st.none() | st.integers(0, 2**32 - 1), data=st.data())
def test_take_keeps_proportions(y: list[int], seed: int | None, data: st.DataObject) -> None:
    whole = numbered(y)
    n = data.draw(st.integers(1, len(y)))
    part = whole.take(n, seed=seed)
    assert len(part) == n
    found = which(part)
    assert found == sorted(set(found))
    assert part.y.tolist() == [y[k] for k in found]
    assert bool(((part.counts() - whole.counts() * (n / len(y))).abs() < 1).all())
    many = part.counts().tolist()
    if seed is None:
        assert found == [k for k in range(len(y)) if y[:k].count(y[k]) < many[y[k]]]
    elif n < len(y):
        assert found == which(whole.split(n, seed=seed)[0])  # the same draw


@given(y=LABELS, seed=st.integers(0, 2**32 - 1), data=st.data())
def test_split_is_a_stratified_partition(y: list[int], seed: int, data: st.DataObject) -> None:
    whole, n = numbered(y), len(y)
    count = data.draw(st.integers(1, n - 1))
    first, second = whole.split(count, seed=seed)
    assert len(first) == count
    assert sorted(which(first) + which(second)) == list(range(n))
    for part in (first, second):
        assert part.y.tolist() == [y[k] for k in which(part)]
        assert which(part) == sorted(which(part))
        share = whole.counts() * (len(part) / n)
        assert bool(((part.counts() - share).abs() < 1).all())
    assert which(whole.split(count / n, seed=seed)[0]) == which(first)


def test_seeds_decide() -> None:
    whole = numbered([k % 4 for k in range(40)])
    assert which(whole.split(20)[0]) == which(whole.split(20, seed=0)[0]) != which(whole.split(20, seed=1)[0])
    assert which(whole.take(20, seed=0)) != which(whole.take(20, seed=1))
    # Over seeds every sample is taken equally often: 200 draws of a half, within 4 standard deviations.
    often = torch.bincount(torch.tensor([k for seed in range(200) for k in which(whole.take(20, seed=seed))]))
    assert bool(((often - 100).abs() < 4 * math.sqrt(200 / 4)).all())


def test_slices_copy_nothing() -> None:
    whole = labelled((torch.rand(6, 3), [0, 1] * 3))
    assert whole.select(slice(2, 5)).x.data_ptr() == whole.x[2:].data_ptr()


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda d: d.select([0, 4]), "there is no sample 4; there are 4, numbered from 0"),
        (lambda d: d.select([-5]), "there is no sample -5"),
        (lambda d: d.select([]), "none of the 4 samples; needed: at least one"),
        (lambda d: d.select([False] * 4), "none of the 4 samples"),
        (lambda d: d.select(slice(4, None)), "none of the 4 samples"),
        (lambda d: d.select([True]), "the mask has 1 entries; needed: 4"),
        (lambda d: d.select([0.5]), r"given torch.float32 \[1\]; needed: whole numbers \[k\], or a mask of 4"),
        (lambda d: d.select([[0]]), r"given torch.int64 \[1, 1\]"),
        (
            lambda d: d.select(2),
            r"select\(2\); needed: numbers of samples, a mask or a slice, as in select\(\[0, 2\]\)",
        ),
        (lambda d: d.select("ant"), r"select\('ant'\)"),
        (lambda d: d.select(["ant"]), "given list of something"),
        (lambda d: d.only(), "only.. was given no class; needed: some of ant, bee, cat, dog"),
        (lambda d: d.only("cat", "bea"), "no class 'bea'. Did you mean 'bee'.* There are ant, bee, cat, dog"),
        (lambda d: d.only(4), "no class 4; the classes are 0 to 3"),
        (lambda d: d.only(-1), "no class -1"),
        (lambda d: d.only("cat", 2), "class 'cat' was given twice"),
        (lambda d: d.only(["cat", "dog"]), r"given \['cat', 'dog'\]; needed: names or numbers .* only\('cat', 'dog'\)"),
        (lambda d: d.only(True), "given True; needed"),
        (lambda d: d.take(0), r"take\(0\) of 4 samples; needed: a whole number from 1 to 4"),
        (lambda d: d.take(5), r"take\(5\) of 4 samples"),
        (lambda d: d.take(1.0), r"take\(1.0\) of 4 samples"),
        (lambda d: d.take(), r"n=None and per_class=None; needed: one of them, take\(300\) for 300 samples in all"),
        (lambda d: d.take(2, per_class=1), "n=2 and per_class=1; needed: one of them"),
        (lambda d: d.take(per_class=0), "per_class=0; needed: a whole number, at least 1"),
        (lambda d: d.take(per_class=1.0), "per_class=1.0"),
        (lambda d: d.take(per_class=1), "'dog' has 0 samples; needed: 1 of each class. Leave it out first, with only"),
        (lambda d: d.only(0, 1).take(per_class=2), "'bee' has 1 samples; needed: 2 of each class. Take at most 1"),
        (lambda d: d.only(0).take(1, seed=-1), "seed=-1; needed: a whole number from 0"),
        (lambda d: d.only(0).take(1, seed=0.5), "seed=0.5"),
        (lambda d: d.split(0), r"split\(0\) of 4 samples; needed: a fraction between 0 and 1, or a number of samples"),
        (lambda d: d.split(4), r"split\(4\) of 4"),
        (lambda d: d.split(1.0), r"split\(1.0\) of 4"),
        (lambda d: d.split(0.1), r"split\(0.1\) of 4 samples; .* leaves at least one in each part"),
        (lambda d: d.split(True), r"split\(True\)"),
        (lambda d: d.split("half"), r"split\('half'\)"),
        (lambda d: d.select([0]).split(0.5), "there is one sample; needed: at least two"),
    ],
)
def test_refused_parts(act: Callable[[Labelled], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        act(numbered([0, 0, 1, 2]))


# --------------------------------------------------------------------------------------------------- what is given


@pytest.mark.parametrize("kind", [torch.int64, torch.int32, torch.uint8, np.int64, np.uint16, ">i4", list, tuple])
def test_labels_in_any_integer_type(kind: Any) -> None:
    given = [0, 2, 1]
    y: Any = torch.tensor(given, dtype=kind) if isinstance(kind, torch.dtype) else np.array(given)
    y = kind(given) if kind in (list, tuple) else y if isinstance(y, Tensor) else y.astype(kind)
    data = labelled((torch.rand(3, 2), y))
    assert data.y.dtype == torch.int64
    assert data.y.tolist() == given
    assert data.classes == ("0", "1", "2")
    assert data.counts().tolist() == [1, 1, 1]


@pytest.mark.parametrize("kind", ["tensor", "array", "big-endian", "read-only", "reversed", "tuple", "dict", "tokens"])
def test_inputs_in_any_form(kind: str) -> None:
    x = torch.rand(3, 4)
    a = x.numpy().copy()
    a.flags.writeable = kind != "read-only"
    forms = {"tensor": x, "array": a, "big-endian": a.astype(">f4"), "read-only": a, "reversed": a[::-1].copy()[::-1]}
    forms |= {"tuple": (a, x, None), "dict": {"u": a, "v": x}, "tokens": torch.arange(12).reshape(3, 4)}
    data = labelled((forms[kind], [0, 1, 1]))
    for _, leaf in leaves(data.x):
        assert torch.equal(leaf, forms["tokens"] if kind == "tokens" else x)
    assert data.select([2]).y.tolist() == [1]
    assert (data.show is None) == (kind in ("tuple", "dict"))


def test_labelled_passes_through() -> None:
    data = numbered([0, 1])
    assert labelled(data) is data
    assert labelled(data, classes=["x", "y"]).classes == ("x", "y")
    named = labelled([torch.rand(2, 3), [1, 0]], classes=np.array(["no", "yes"]), name="answers")
    assert repr(named) == "Labelled(answers: x [2, 3], 2 classes)"
    assert repr(data) == "Labelled(numbered: x['a'] [2, 1], x['b'] [2, 2], 4 classes)"
    again = pickle.loads(pickle.dumps(data))
    assert which(again) == [0, 1]
    assert again.classes == data.classes


X = torch.rand(3, 2)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (X, r"data is a Tensor; needed: \(x, y\), .* or a torch Dataset or DataLoader of"),
        ((X,), "data is a tuple of 1; needed"),
        ([X, [0], [0]], "data is a list of 3; needed"),
        ((X, [0.0, 1.0, 2.0]), r"data: y is torch.float64; needed: integers from 0. If these are classes: y.long\(\)"),
        ((X, torch.zeros(3)), "y is torch.float32"),
        ((X, torch.zeros(3, 1).long()), r"y has shape \[3, 1\]; needed: \[n\], .* Use y\[:, 0\]"),
        ((X, torch.eye(3)), r"y has shape \[3, 3\]; .* If it is one-hot: y.argmax\(1\)"),
        ((X, torch.tensor(1)), r"y has shape \[\]; needed: \[n\], one integer for each sample.$"),
        ((X, ["a", "b", 3]), "y holds names, and at 2 3; needed: a name for each sample"),
        ((X, [b"a", b"b", b"a"]), "y holds objects that are no names and no numbers"),
        ((X, [[0], [1, 2], [1]]), "y is a list of lists of several lengths"),
        ((X, {0, 1}), "y is a set; needed: the class of each sample, in a tensor, array or list"),
        ((X, np.array(["2020"] * 3, "M8[D]")), r"y holds datetime64\[D\], of which there are no tensors"),
        ((X, [0, 1, -1]), r"y\[2\] is -1; needed: classes numbered from 0. Number them: y = torch.unique"),
        ((X, [0, 10**9, 1]), r"y\[1\] is 1000000000; needed: classes numbered from 0"),
        ((X, [0, 1]), "x has 3 samples, y has 2; needed: one label for each sample.$"),
        (([X[0], X[1], X[2]], [0, 1, 2]), "x has 2 samples, y has 3; .* If x is a list of samples: torch.stack"),
        ((X.tolist(), [0, 1, 2]), "x holds no tensor"),
        ((None, [0, 1, 2]), "x is a NoneType; needed: a tensor"),
        ((np.array(["a", "b", "c"]), [0, 1, 2]), "x holds <U1, of which there are no tensors; needed: numbers"),
        ((X[:0], []), "a batch of zero samples was given"),
        (((X, X[:2]), [0, 1, 2]), "disagree on the number of samples"),
        (
            ({"u": X.index_fill(0, torch.tensor([1]), math.nan)}, [0, 1, 2]),
            r"sample 1 is not finite: x\['u'\]\[1, 0\] is nan",
        ),
    ],
)
def test_refused_data(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        labelled(data)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_samples_that_are_not_finite_are_named(value: float, dtype: torch.dtype) -> None:
    x = torch.zeros(5, 2, 3, dtype=dtype, requires_grad=True).clone()
    labelled((x, [0] * 5))
    x[3, 1, 2] = value
    with pytest.raises(InputError, match=rf"noisy: sample 3 is not finite: x\[3, 1, 2\] is {value}; needed: finite"):
        labelled((x, [0] * 5), name="noisy")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": ("a", "b")}, r"^set: y\[2\] is 2; needed: labels from 0 to 1, as there are 2 classes. Leave"),
        ({"classes": ()}, "there are no classes"),
        ({"classes": "abc"}, "classes='abc'; needed: a tuple of names"),
        ({"classes": (0.0, 1, 2)}, r"classes=\[0.0, .1., .2.\]; needed: a tuple of names"),
        ({"classes": ("a", "b", "a")}, "classes has 'a' twice; needed: different names"),
        ({"show": ["a", "b"]}, "show has 2 entries, y has 3; needed: one for each sample"),
        ({"show": torch.rand(4, 2)}, "show has 4 entries, y has 3"),
        ({"show": "abc"}, "show is a str; needed: images"),
        ({"show": ["a", 1, "b"]}, "show is a list; needed"),
        ({"show": np.array([["a", "b"]] * 3, object)}, "show holds object, of which there are no tensors"),
        ({"show": torch.rand(3, 4, 4)}, r"show has shape \[3, 4, 4\]; needed: images .*show\[:, None\] adds"),
        ({"show": torch.rand(3, 4, 4, 3)}, r"show has shape \[3, 4, 4, 3\]; .* show.permute\(0, 3, 1, 2\)"),
        ({"show": torch.rand(3, 1, 4, 4) + 1.5}, r"show is torch.float32 from 1.\d+ to 2.\d+; needed: images in uint8"),
        ({"show": torch.ones(3, 1, 4, 4).long()}, "show is torch.int64 from 1 to 1; needed: images in uint8"),
        ({"columns": ("u", "v", "w")}, r"columns has 3 names, show has shape \[3, 2\]; needed: table rows \[n, 3\]"),
        ({"columns": ("u", "v"), "show": ["a", "b", "c"]}, "columns has 2 names, show has no columns"),
        ({"columns": ("u", "u")}, "columns has 'u' twice"),
        (
            {"show": ["a", "b\ud800", "c"]},
            r"show\[1\] has a lone surrogate \('\\ud800', character 1\), .* Repair it: text",
        ),
        ({"classes": ("a", "\udc80", "c")}, r"classes\[1\] has a lone surrogate"),
        ({"columns": ("u", "v\udfff")}, r"columns\[1\] has a lone surrogate"),
        ({"name": "\ud800"}, "^name has a lone surrogate"),
        ({"name": None}, "^name is a NoneType; needed: a string"),
        ({"encoding": Encoding(Column("y"), (Column("u"),))}, "encoding is of a table with other columns"),
    ],
)
def test_refused_fields(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Labelled(**({"x": X, "y": [0, 1, 2], "classes": ("a", "b", "c"), "name": "set"} | options))


def test_what_a_person_looks_at() -> None:
    y = [0, 1, 1]
    for unit in (torch.rand(3, 3, 4, 4), torch.randint(255, (3, 1, 4, 4), dtype=torch.uint8), torch.randn(3, 5)):
        assert labelled((unit, y)).show.data_ptr() == unit.data_ptr()  # no copy
    for other in (torch.rand(3, 2, 4, 4), torch.rand(3, 4, 4), {"x": torch.rand(3, 4)}):
        assert labelled((other, y)).show is None
    wide = torch.randn(3, 3, 4, 4, dtype=torch.float64, requires_grad=True)
    seen = labelled((wide, y)).show
    assert seen.dtype == torch.uint8
    assert (int(seen.min()), int(seen.max())) == (0, 255)
    low, high = (float(v) for v in wide.detach().aminmax())
    back = seen / 255 * (high - low) + low
    assert float((back - wide.detach()).abs().max()) <= (high - low) / 500
    assert labelled((torch.full((3, 1, 2, 2), 7), y)).show.unique().tolist() == [0]  # one grey has no range
    texts = Labelled(torch.rand(3, 4), y, ("a", "b"), show=np.array(["p", "q", "r"]))  # type: ignore[arg-type]
    assert texts.select([2, 0]).show == ("r", "p")
    table = Labelled(torch.rand(3, 4), y, ("a", "b"), show=np.ones((3, 2)), columns=("u", "v"))  # type: ignore[arg-type]
    assert table.only("b").show.tolist() == [[1, 1], [1, 1]]


def test_with_x_keeps_what_is_shown() -> None:
    data = labelled((torch.rand(4, 1, 2, 2), [0, 1, 0, 1]), name="small")
    other = data.with_x((data.x - 3).flatten(1))
    assert other.x.shape == (4, 4)
    assert torch.equal(other.show, data.x)
    assert (other.name, other.classes) == ("small", data.classes)
    with pytest.raises(InputError, match="small: x has 3 samples, y has 4"):
        data.with_x(torch.rand(3, 4))


# ------------------------------------------------------------------------------------------------------------- IDX

CODES = {8: "u1", 9: "i1", 11: "i2", 12: "i4", 13: "f4", 14: "f8"}


def idx_bytes(array: np.ndarray) -> bytes:
    code = {v: k for k, v in CODES.items()}[array.dtype.str[1:]]
    return (
        bytes([0, 0, code, array.ndim])
        + np.array(array.shape, ">u4").tobytes()
        + array.astype(array.dtype.newbyteorder(">")).tobytes()
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(5,), (2, 3), (4, 2, 3), (2, 1, 3, 2), (0, 3)])
@pytest.mark.parametrize("kind", CODES.values())
def test_idx_round_trip(kind: str, shape: tuple[int, ...], packed: bool, tmp_path: Path) -> None:
    want = (np.random.default_rng(0).normal(size=shape) * 50).astype(kind)
    file = tmp_path / "any.name"
    file.write_bytes(gzip.compress(idx_bytes(want), mtime=0) if packed else idx_bytes(want))
    got = idx(str(file))
    assert tuple(got.shape) == shape
    assert got.numpy().dtype == want.dtype
    assert np.array_equal(got.numpy(), want)


def test_refused_idx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = idx_bytes(np.arange(6, dtype=np.int32).reshape(2, 3))
    packed = gzip.compress(good, mtime=0)
    file = tmp_path / "file"
    for content, message in [
        (b"", "begins with nothing; needed: an IDX file"),
        (b"\0\0\x08", "begins with 00 00 08; needed"),
        (b"<!DOCTYPE", r"begins with 3c 21 44 4f; needed: an IDX file, which begins with 00 00, a type \(08, 09, 0b"),
        (b"\0\0\x0a\x01" + bytes(9), "begins with 00 00 0a 01"),
        (b"\0\0\x08\x00" + bytes(1), "begins with 00 00 08 00"),
        (b"\0\0\x08\xff" + bytes(1020), "begins with 00 00 08 ff"),
        (good[:9], "is truncated: 9 bytes, its header alone has 12. Get it again"),
        (good[:-1], r"is truncated: 35 bytes; needed: 36 for \[2, 3\] numbers of 4 bytes, as its header says"),
        (good + b"\0", "goes on after its end: 37 bytes; needed: 36"),
        (
            b"\0\0\x08\x03" + bytes(4) + b"\xff" * 8,
            r"its header says \[0, 4294967295, 4294967295\], which no array can",
        ),
        (b"\0\0\x0e\x02" + b"\xff" * 8, r"its header says \[4294967295, 4294967295\], which no array can have"),
        (b"\0\0\x08\x01" + b"\xff" * 4, r"is truncated: 8 bytes; needed: 4294967303 for \[4294967295\]"),
        (packed[:-9], "is truncated: its gzip stream ends early. Get it again"),
        (packed[:-8] + bytes(8), r"is damaged: it cannot be unpacked \(CRC check failed"),
        (packed[:10] + b"\xff" * 20, r"is damaged: it cannot be unpacked \(Error -3"),
    ]:
        file.write_bytes(content)
        with pytest.raises(InputError, match=message) as e:
            idx(file)
        assert str(file) in str(e.value)
    for path, message in [
        (tmp_path / "none", "none does not exist; needed: an IDX file"),
        (tmp_path, "is a folder, not a file; needed: an IDX file"),
        (file / "below", r"cannot be read \(Not a directory\)"),
        (7, "file is a int; needed: a path"),
        ("a\0b", r"file is 'a\\x00b', which no file can be called"),
        ("a\ud800", r"file is 'a\\ud800', which no file can be called"),
    ]:
        with pytest.raises(InputError, match=message):
            idx(path)  # type: ignore[arg-type]

    def forbidden(self: Path) -> bytes:  # root may read everything, so that chmod would show nothing
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", forbidden)
    with pytest.raises(InputError, match="file may not be read by you; needed: an IDX file. Try chmod"):
        idx(file)


def test_what_a_packed_file_may_hold_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed file of 50 kB that holds 50 MB is refused before it has taken that memory."""
    monkeypatch.setattr(files, "UNPACKED", (10_000, 1_000_000))
    file = tmp_path / "packed"
    file.write_bytes(gzip.compress(bytes(50_000_000), 1, mtime=0))
    tracemalloc.start()
    with pytest.raises(InputError, match=r"packed has [\d,]+ bytes and unpacks to more than 1,000,000; .*\(gunzip\)"):
        idx(file)
    assert tracemalloc.get_traced_memory()[1] < 5_000_000
    tracemalloc.stop()
    for array in (np.zeros(9_000, np.uint8), np.random.default_rng(0).integers(0, 256, 90_000, np.uint8)):
        file.write_bytes(gzip.compress(idx_bytes(array), mtime=0))  # small, or as large as its file says
        assert np.array_equal(idx(file).numpy(), array)
    file.write_bytes(idx_bytes(np.zeros(2_000_000, np.uint8)))  # not packed: what one sees is what there is
    assert len(idx(file)) == 2_000_000
    monkeypatch.undo()
    official = 16 + 60_000 * 28 * 28  # MNIST's training images, packed to a fifth of that
    assert official < files.UNPACKED[0] < files.UNPACKED[1]


def test_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "v").write_bytes(idx_bytes(np.arange(3, dtype=np.uint8)))
    assert idx("~/v").tolist() == [0, 1, 2]


# ----------------------------------------------------------------------------------------------------------- MNIST

READERS = {"mnist": mnist, "fashion-mnist": fashion_mnist, "MNIST/raw": mnist, "FashionMNIST/raw": fashion_mnist}


def write_mnist(folder: Path, packed: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, n in (("train", 30), ("t10k", 20)):
        arrays[f"{part}-images-idx3"] = rng.integers(0, 256, (n, 28, 28), np.uint8)
        arrays[f"{part}-labels-idx1"] = rng.permutation(n).astype(np.uint8) % 10
    for name, array in arrays.items():
        raw = idx_bytes(array)
        (folder / f"{name}-ubyte{'.gz' * packed}").write_bytes(gzip.compress(raw, mtime=0) if packed else raw)
    return arrays


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("place", READERS)
def test_mnist_round_trip(place: str, packed: bool, tmp_path: Path) -> None:
    read, arrays = READERS[place], write_mnist(tmp_path / place, packed)
    for folder in (tmp_path, tmp_path / place, (tmp_path / place).parent):
        for data, part in zip(read(folder), ("train", "t10k"), strict=True):
            pixels, y = arrays[f"{part}-images-idx3"], arrays[f"{part}-labels-idx1"]
            assert data.x.dtype == torch.float32
            assert data.show.dtype == torch.uint8
            assert np.array_equal(data.show[:, 0].numpy(), pixels)
            assert np.array_equal(data.x[:, 0].numpy(), pixels.astype(np.float32) / np.float32(255))
            assert data.x.shape == (len(y), 1, 28, 28)
            assert data.y.tolist() == y.tolist()
            assert (data.classes[5], data.classes[9]) == (("5", "9") if read is mnist else ("sandal", "ankle boot"))
    train, test = read(str(tmp_path))
    assert [d.name.removeprefix("Fashion-") for d in (train, test)] == ["MNIST train", "MNIST test"]


def test_refused_mnist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = write_mnist(tmp_path)
    images_file, labels_file = (tmp_path / f"train-{k}-ubyte" for k in ("images-idx3", "labels-idx1"))
    x, y = arrays["train-images-idx3"], arrays["train-labels-idx1"]
    wrong = y.copy()
    wrong[[7, 9]] = 12
    for file, array, message in [
        (images_file, x[:-1], "29 images, .*train-labels-idx1-ubyte has 30 labels; needed: files of one set"),
        (
            images_file,
            y,
            r"train-images-idx3-ubyte holds torch.uint8 \[30\]; needed: torch.uint8 \[n, 28, 28\], images",
        ),
        (images_file, x[:, :8], r"holds torch.uint8 \[30, 8, 28\]; needed"),
        (images_file, x.astype(np.float32), r"holds torch.float32 \[30, 28, 28\]; needed"),
        (
            labels_file,
            x,
            r"train-labels-idx1-ubyte holds torch.uint8 \[30, 28, 28\]; needed: torch.uint8 \[n\], labels",
        ),
        (labels_file, y.astype(np.int32), r"holds torch.int32 \[30\]; needed"),
        (labels_file, wrong, "train-labels-idx1-ubyte: label 7 has class 12; needed: 0 to 9. It is another file"),
    ]:
        kept = file.read_bytes()
        file.write_bytes(idx_bytes(array))
        with pytest.raises(InputError, match=message):
            mnist(tmp_path)
        file.write_bytes(kept)
    mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").unlink()
    get = r"needed: the four IDX files of MNIST .*torchvision.datasets.MNIST\(folder, download=True\)"
    with pytest.raises(InputError, match="t10k-labels-idx1-ubyte does not exist; " + get):
        mnist(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        InputError, match="no train-images-idx3-ubyte in .*empty, .*empty/mnist, .*empty/MNIST/raw.*" + get
    ):
        mnist(tmp_path / "empty")
    with pytest.raises(InputError, match="the folder .*nowhere does not exist; " + get):
        mnist(tmp_path / "nowhere")
    with pytest.raises(InputError, match="train-images-idx3-ubyte is not a folder; needed: the folder of the four IDX"):
        mnist(images_file)
    with pytest.raises(InputError, match="folder is a NoneType; needed: a path"):
        mnist(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needed: the four IDX files of Fashion-MNIST .*zalandoresearch/fashion-mnist"):
        fashion_mnist(tmp_path / "empty")
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match="the folder .* may not be read by you; .* Try chmod"):
        mnist(tmp_path)


# -------------------------------------------------------------------------------------------------------- CIFAR-10

BATCHES = [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]


@pytest.fixture
def cifar_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of 20 records each, where the official ones have 10,000."""
    monkeypatch.setattr(images, "_RECORDS", 20)
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in BATCHES:
        records = rng.integers(0, 256, (20, 3073), np.uint8)
        records[:, 0] %= 10
        (folder / name).write_bytes(records.tobytes())
    return folder


def test_cifar10_round_trip(cifar_files: Path) -> None:
    records = [np.frombuffer((cifar_files / name).read_bytes(), np.uint8).reshape(20, 3073) for name in BATCHES]
    wants = np.concatenate(records[:5]), records[5]
    for folder in (cifar_files, str(cifar_files.parent)):
        for data, want, n in zip(cifar10(folder), wants, (100, 20), strict=True):
            assert data.x.shape == (n, 3, 32, 32)
            assert data.x.dtype == torch.float32
            assert data.show.dtype == torch.uint8
            assert data.y.tolist() == want[:, 0].tolist()
            assert torch.equal(data.x, data.show.float() / 255)
            for c, plane in enumerate(np.split(want[:, 1:], 3, axis=1)):  # red, green, blue, row by row
                assert np.array_equal(data.show[:, c].flatten(1).numpy(), plane)
    assert data.classes == tuple(re.findall(r"\w+", "airplane automobile bird cat deer dog frog horse ship truck"))
    assert data.name == "CIFAR-10 test"


def test_refused_cifar10(cifar_files: Path, tmp_path: Path) -> None:
    file = cifar_files / "data_batch_3.bin"
    kept = file.read_bytes()
    bad = bytearray(kept)
    bad[4 * 3073] = 10
    for content, message in [
        (kept[:-3073], r"58387 bytes \(19.0 records\); needed: 61460 \(20 records of 3073 bytes\). It is truncated"),
        (kept + kept, r"122920 bytes \(40.0 records\); needed: 61460 .* It is another file: get it again"),
        (bytes(bad), "data_batch_3.bin: record 4 has class 10; needed: 0 to 9"),
    ]:
        file.write_bytes(content)
        with pytest.raises(InputError, match=message):
            cifar10(cifar_files)
    file.unlink()
    get = "needed: the binary version of CIFAR-10 .* https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    with pytest.raises(InputError, match="data_batch_3.bin does not exist; " + get):
        cifar10(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="no data_batch_1.bin in .*empty, .*empty/cifar-10-batches-bin; " + get):
        cifar10(empty)


def test_pickles_are_never_read(cifar_files: Path, tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (tmp_path.joinpath("sprung").mkdir, ())

    python = tmp_path / "elsewhere" / "cifar-10-batches-py"
    python.mkdir(parents=True)
    (python / "data_batch_1").write_bytes(pickle.dumps(Trap()))
    for folder in (python, python.parent):
        with pytest.raises(
            InputError, match="of the Python version of CIFAR-10, a pickle; .* Needed: the binary version"
        ):
            cifar10(folder)
    archive = tmp_path / "archive"
    archive.mkdir()
    (archive / "cifar-10-python.tar.gz").touch()
    with pytest.raises(InputError, match="cifar-10-python.tar.gz is of the Python version"):
        cifar10(archive)
    assert not (tmp_path / "sprung").exists()
    cifar_files.rename(python.parent / cifar_files.name)  # both versions side by side
    assert len(cifar10(python.parent)[0]) == 100
    # Nothing in the folder could run what a file says.
    text = "\n".join(source.read_text(encoding="utf-8") for source in Path(images.__file__).parent.glob("*.py"))
    assert "def cifar10" in text
    assert not re.search(
        r"pickle\b.*import|import pickle|urllib|np\.load|torch\.load|\beval\(|\bexec\(|subprocess", text
    )


def test_the_official_size() -> None:
    assert (images._RECORDS * images._RECORD, images._RECORD) == (30_730_000, 1 + 3 * 32 * 32)


# ---------------------------------------------------------------------------------------------------------- digits


def test_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    from sklearn.datasets import load_digits

    train, test = digits()
    assert (len(train), len(test)) == (1200, 597)
    assert train.x.shape == (1200, 1, 8, 8)
    assert (float(train.x.min()), float(train.x.max())) == (0, 1)
    bunch = load_digits()
    rows = [
        (*(16 * v).flatten().int().tolist(), k) for d in (train, test) for v, k in zip(d.x, d.y.tolist(), strict=True)
    ]
    assert sorted(rows) == sorted((*map(int, v), int(k)) for v, k in zip(bunch.data, bunch.target, strict=True))
    assert train.y[:10].tolist() == [2, 8, 2, 6, 6, 7, 1, 9, 8, 5]  # the order is part of the promise
    assert bool((train.counts() > 100).all())
    more = digits(test=797)
    assert torch.equal(more[0].x, train.x[:1000])
    assert [d.name for d in more] == ["digits train", "digits test"]
    for wrong in (0, 1797, 0.3, True):
        with pytest.raises(InputError, match=f"test={wrong}; needed: a number of images from 1 to 1796"):
            digits(test=wrong)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(InputError, match=r"digits\(\) needs scikit-learn: pip install 'tangency\[sklearn\]'"):
        digits()


# ------------------------------------------------------------------------------------------------------------- CSV

FRUIT = "weight,colour,seeds,kind\n120,red,5,apple\n9.5, red ,1,cherry\n\n130,green,4,apple\n"


@pytest.fixture
def table(tmp_path: Path) -> Callable[..., Labelled]:
    def read(text: str | bytes, target: Any = "kind", **options: Any) -> Labelled:
        file = tmp_path / "fruit.csv"
        file.write_bytes(text.encode() if isinstance(text, str) else text)
        return csv(file, target, **options)

    return read


def test_csv(table: Callable[..., Labelled]) -> None:
    data = table(FRUIT)
    assert data.columns == ("weight", "colour=green", "colour=red", "seeds")
    assert data.x.tolist() == [[120, 0, 1, 5], [9.5, 0, 1, 1], [130, 1, 0, 4]]
    assert (data.x.dtype, data.show.dtype) == (torch.float32, torch.float64)
    assert torch.equal(data.show.float(), data.x)
    assert (data.classes, data.y.tolist(), data.name) == (("apple", "cherry"), [0, 1, 0], "fruit")


@pytest.mark.parametrize(
    "form",
    [
        lambda t: gzip.compress(t.encode(), mtime=0),
        lambda t: b"\xef\xbb\xbf" + t.encode(),
        lambda t: t.replace("\n", "\r\n"),
        lambda t: t.replace("\n", "\r"),
        lambda t: t.replace("\n", "\r", 2),
        lambda t: t.replace(",", ";"),
        lambda t: t.replace(",", "\t"),
        lambda t: t.replace(",", "|"),
        lambda t: t.replace("colour", '"colour"').replace("apple", '"apple"'),
        lambda t: t.rstrip("\n"),
        lambda t: "\n" + t + "\n  \n",
    ],
)
def test_csv_in_any_dress(form: Callable[[str], Any], table: Callable[..., Labelled]) -> None:
    want, got = table(FRUIT), table(form(FRUIT))
    assert got.columns == want.columns
    assert got.classes == want.classes
    assert torch.equal(got.show, want.show)
    assert torch.equal(got.y, want.y)


@given(st.lists(st.tuples(st.floats(-1e30, 1e30), st.integers(-9, 9)), min_size=1, max_size=20))
def test_csv_numbers_come_back_exactly(rows: list[tuple[float, int]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "numbers.csv"
        file.write_text("".join(f"{v!r},{k}\n" for v, k in rows), encoding="utf-8")
        data = csv(file, 1, header=False)
    assert data.show[:, 0].tolist() == [v for v, _ in rows]
    assert data.x[:, 0].tolist() == torch.tensor([v for v, _ in rows], dtype=torch.float32).tolist()
    assert [int(data.classes[k]) for k in data.y.tolist()] == [k for _, k in rows]
    assert list(data.classes) == [str(k) for k in sorted({k for _, k in rows})]
    assert data.columns == ("0",)


def test_csv_options(table: Callable[..., Labelled]) -> None:
    assert table(FRUIT, columns=["seeds", "weight"]).columns == ("seeds", "weight")
    assert table(FRUIT, columns=[-2, 0]).columns == ("seeds", "weight")
    assert table(FRUIT, 3, header=True).classes == ("apple", "cherry")
    headless = FRUIT.split("\n", 1)[1]
    assert table(headless, -1, header=False).columns == ("0", "1=green", "1=red", "2")
    assert table(headless, "3", header=False).classes == ("apple", "cherry")
    coded = table(FRUIT, categorical=["seeds"])
    assert coded.columns[-3:] == ("seeds=1", "seeds=4", "seeds=5")
    ordered = table(FRUIT, classes=["cherry", "plum", "apple"])
    assert (ordered.classes, ordered.y.tolist()) == (("cherry", "plum", "apple"), [2, 0, 2])
    assert table("a b\n1 x\n2 y\n", "b", delimiter=" ").classes == ("x", "y")
    assert table("a,b\r1,x;y\r2,z\r", "b").classes == ("x;y", "z")  # line 1 ends where it does
    quoted = table('a,b\n"1","say ""hi"", you"\n2,"two\nlines"\n', "b")
    assert quoted.classes == ('say "hi", you', "two\nlines")
    # Other columns may be anything; numbers are one class however they are written, and long ones stay apart.
    partly = table("id,v,kind\n?,1,2\n,2,1.0\n?,3,1\n", columns=["v"])
    assert (partly.classes, partly.y.tolist()) == (("1", "2"), [1, 0, 0])
    assert table("v,kind\n1,10000000000000001\n1,10000000000000002\n").y.tolist() == [0, 1]
    assert table("v,kind\n1,10\n1,9\n").classes == ("9", "10")
    assert table("v,kind\n1,10\n1,9\n1,none\n").classes == ("10", "9", "none")


MANY = "".join(f"word{k},{k % 2}\n" for k in range(1001))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        (
            FRUIT,
            {"target": "kin"},
            "target: .*fruit.csv has no column 'kin'. Did you mean 'kind'.*weight, colour, seeds, kind",
        ),
        (FRUIT, {"target": "120"}, "If line 1 holds data, give the target by number, with header=False"),
        (FRUIT, {"target": 4, "header": True}, "target: there is no column 4; .*fruit.csv has 4 columns"),
        (FRUIT, {"target": 3}, "target=3 does not tell whether line 1 holds the names .* header=True or header=False"),
        (FRUIT, {"target": 1.5, "header": True}, "target: 1.5 is no column; needed: a name, or a number"),
        (FRUIT, {"header": "infer"}, "header='infer'; needed: True, False or None"),
        (FRUIT, {"columns": ["wait"]}, "columns: .* has no column 'wait'"),
        (FRUIT, {"columns": "seeds"}, r"columns='seeds' is one string; needed: a list, as in columns=\['seeds'\]"),
        (FRUIT, {"categorical": "seeds"}, "categorical='seeds' is one string; needed: a list"),
        (FRUIT, {"classes": "ac"}, "classes='ac' is one string; needed: a list"),
        (FRUIT, {"columns": 5}, "columns is a int; needed: a list"),
        ("a,b,kind\n1,2,x\n3,4,y\n", {"columns": "ab"}, "columns='ab' is one string"),
        (FRUIT, {"target": None}, "target is missing; needed: the column of the classes, by name or number, or like="),
        (FRUIT, {"missing": "ignore"}, "missing='ignore'; needed: 'refuse' or 'leave out'"),
        (FRUIT, {"decimal": ";"}, "decimal=';'; needed: '.' or ','"),
        (FRUIT, {"thousands": "."}, r"thousands='\.' with decimal='\.'; needed: one of '' ','"),
        ("a,kind\n?,x\n1,NA\n", {"missing": "leave out"}, r"every line lacks a value \('a' 1, 'kind' 1\)"),
        ("a,kind\n1,x\n?,y\n2,\n", {}, "line 3, .*missing='leave out' does it.* Values are missing in 2 lines"),
        ('"' + "a" * 140_000 + '",kind\n1,x\n', {}, "line 1: field larger than field limit"),
        ("a,kind\n1,234,x\n", {}, "line 2 has 3 fields; line 1 has 2. Needed: as many. A value with ',' in it needs"),
        (FRUIT, {"columns": []}, r"columns=\[\] with target='kind'; needed: one or more columns, each once, without"),
        (FRUIT, {"columns": ["kind"]}, "each once, without the target"),
        (FRUIT, {"columns": ["seeds", 2]}, "each once, without the target"),
        (
            FRUIT,
            {"columns": ["seeds"], "categorical": ["colour"]},
            "categorical=.*needed: some of the columns that are used",
        ),
        (
            FRUIT,
            {"classes": ["appel", "cherry"]},
            "line 2, column 'kind': 'apple' is none of the classes appel, cherry. Did you mean 'appel'",
        ),
        (FRUIT, {"classes": ["apple", "cherry", "apple"]}, "classes has 'apple' twice"),
        (FRUIT, {"delimiter": ", "}, "delimiter=', '; needed: one character"),
        (FRUIT, {"delimiter": ";"}, "no column 'kind'"),
        ("kind\na\n", {}, "line 1 of .*fruit.csv is divided by none of ',' ';' .* Say which: delimiter="),
        ("a;b,kind\n1,5;2,x\n", {}, "line 1 of .* could be divided by ',' or ';'. Say which: delimiter="),
        ("", {}, "fruit.csv is empty; needed: a CSV file"),
        ("\n \n", {}, "fruit.csv is empty"),
        ("a,kind\n", {}, "fruit.csv has no line of data; needed: at least one"),
        ("a,kind\n1,x\n\n2,y,z\n", {}, "line 4 has 3 fields; line 1 has 2. Needed: as many"),
        ("a,kind\n1,x\n2\n", {}, "line 3 has 1 fields; line 1 has 2"),
        (
            "a,kind\n1,x\n,y\n",
            {},
            r"line 3, column 'a': the value is missing \(''\). Fill it in, or leave the line out",
        ),
        ("a,kind\n1,x\n?,y\n", {}, r"line 3, column 'a': the value is missing \('\?'\)"),
        ("a,kind\n1,x\nNaN,y\n", {}, r"line 3, column 'a': the value is missing \('NaN'\)"),
        ("a,kind\nred,x\nn/a,y\n", {}, r"line 3, column 'a': the value is missing \('n/a'\)"),
        ("a,kind\n1,x\n2, \n", {}, r"line 3, column 'kind': the value is missing \(''\)"),
        ("a,kind\n1,x\ninf,y\n", {}, "line 3, column 'a': 'inf'; needed: finite numbers within float32"),
        ("a,kind\n1,x\n1e39,y\n", {}, "line 3, column 'a': '1e39'; needed: finite numbers within float32"),
        (
            "a,kind\n1,x\n2,y\n3more,y\n",
            {},
            "line 4, column 'a': '3more' is no number, others of the column are. .* categorical=",
        ),
        ("a,kind\n1_0,x\n2,y\n", {}, "line 2, column 'a': '1_0' is no number"),
        (
            "a;kind\n1,5;x\n2,5;y\n",
            {"delimiter": ";"},
            "line 2, column 'a': '1,5' looks like a number .* Say how they are written: decimal=','",
        ),
        ('a,kind\n1,x\n2,"y\n', {}, "line 3: unexpected end of data; needed: CSV"),
        ("a,kind\n1,2.5\n", {}, "line 2, column 'kind': the target is 2.5; needed: classes, which are words or whole"),
        ("a,kind\n1,1\n1,inf\n", {}, "line 3, column 'kind': the target is inf"),
        ("a,a,kind\n1,2,x\n", {}, "two columns that would be called 'a'; .* Rename one in line 1, or leave it out"),
        (
            "a=x,a,kind\n1,x,u\n2,z,v\n",
            {},
            "two columns that would be called 'a=x'; .* Rename one in line 1, or leave it out with columns=",
        ),
        ("a,a,kind\n1,2,x\n", {"columns": [0, 1]}, "two columns that would be called 'a'; .* Rename one in line 1"),
        (
            "a,kind\n1,x\n2,?\n",
            {},
            r"column 'kind': the value is missing \('\?'\). Fill it in, or leave the line out \(missing='leave out' "
            r"does it\); if '\?' is a class, name it: classes=\.$",
        ),
        ("a,kind\n", {}, "no line of data; .* Its one line is taken for the names .* write the names above it"),
        ("sep=;\na;kind\n1;x\n", {"delimiter": ","}, "line 1 of .* says sep=;, and delimiter=','; needed: the same"),
        ("a,kind,kind\n1,2,x\n", {}, "has several columns 'kind'; needed: different names in line 1"),
        (",a,kind\n0,2,x\n", {}, r"column 0 has no name \(an index\?\). Name it in line 1, or .* columns="),
        ("word,kind\n" + MANY, {}, "column 'word' has 1001 different words, as text or identifiers have. Leave it out"),
        ("kind,word\n" + MANY, {"categorical": ["word"]}, "target 'kind' has 1001 different values, as a quantity has"),
        (b"a,kind\n1,\xff\n", {}, r"is not UTF-8 \(byte 9: invalid start byte\); needed: text in UTF-8"),
        (gzip.compress(FRUIT.encode(), mtime=0)[:-9], {}, "is truncated: its gzip stream ends early"),
    ],
)
def test_refused_tables(text: str, options: dict[str, Any], message: str, table: Callable[..., Labelled]) -> None:
    with pytest.raises(InputError, match=message):
        table(text, **options)


def test_a_numeric_target_is_looked_through_a_few_times(
    table: Callable[..., Labelled], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparisons grow as the lines do, not as their square."""
    compared = []

    class Counted(float):
        __hash__ = float.__hash__

        def __eq__(self, other: object) -> bool:
            compared.append(other)
            return float.__eq__(self, other) is True

    read = Form.number
    monkeypatch.setattr(Form, "number", lambda form, cell: None if read(form, cell) is None else Counted(cell))
    data = table("a,kind\n" + "".join(f"{i},{i % 3}\n" for i in range(500)))
    assert data.classes == ("0", "1", "2")
    assert 0 < len(compared) <= 10 * 500


def test_a_group_of_thousands_does_not_follow_a_zero(table: Callable[..., Labelled]) -> None:
    written = {"decimal": ",", "thousands": "."}
    assert table("a;kind\n1.500;x\n102.250,5;y\n", **written).x[:, 0].tolist() == [1500, 102250.5]
    for cells in ("0.500;x\n2.250;y\n", "2.250;x\n-0.500;y\n", "2.250;x\n012.500;y\n"):
        with pytest.raises(InputError, match="(0.500|012.500)' is no number, others .* separators"):
            table("a;kind\n" + cells, **written)


@pytest.mark.parametrize(
    ("cells", "said"),
    [
        (("1700000000", "1700000060", "5"), "1700000000 and 1700000060 are both 1700000000.0 .3 different .* become 2"),
        (("49301234", "1", "49301233"), "49301233 and 49301234 are both 4930123[26].0"),
        (("16777216", "16777217", "1e9"), "16777216 and 16777217"),
        (("1.00000001", "1.00000002", "1.00000003"), "are both 1.0 "),
    ],
)
def test_numbers_that_become_one_are_named(cells: tuple[str, ...], said: str, table: Callable[..., Labelled]) -> None:
    """In float32, as x is; not where all can be told apart or are words, nor for digits that are lost in the noise."""
    text = "a,kind\n" + "".join(f"{cell},{'xy'[k % 2]}\n" for k, cell in enumerate(cells))
    with pytest.warns(TangencyWarning, match=f"column 'a' has different numbers .* {said}.* categorical=.* columns="):
        data = table(text)
    assert len(set(data.x[:, 0].tolist())) < len(set(data.show[:, 0].tolist())) == len(cells)
    assert table(text, categorical=["a"]).x.shape == (len(cells), len(cells))
    assert table("a,kind\n16777216,x\n16777218,y\n").x[:, 0].tolist() == [16777216, 16777218]
    assert table("a,kind\n0.1234567890,x\n0.1234567891,y\n9.5,y\n").x[0] == table("a,kind\n0.123456789,x\n").x[0]


def test_a_category_may_be_called_like_a_missing_value(table: Callable[..., Labelled], tmp_path: Path) -> None:
    """If its name is given; elsewhere, and of a test set whose training set does not know it, it is missing."""
    text = "alley,b,kind\nNA,1,u\nPave,2,v\n"
    for options in ({}, {"categorical": ["alley"]}):
        with pytest.raises(
            InputError, match=r"missing \('NA'\).* category, name it: categorical=\{'alley': \['NA'\]\}"
        ):
            table(text, **options)
    data = table(text, categorical={"alley": ["NA"]})
    assert data.columns == ("alley=NA", "alley=Pave", "b")
    assert data.x.tolist() == [[1, 0, 1], [0, 1, 2]]
    more = table("alley,b,kind\nPave,3,u\nNA,4,v\n?,4,v\n", None, like=data, missing="leave out")
    assert more.x.tolist() == [[0, 1, 3], [1, 0, 4]]
    with pytest.raises(InputError, match=r"line 3, column 'b': the value is missing \('NA'\)"):
        table("alley,b,kind\nPave,3,u\nNA,NA,v\n", None, like=data)
    with pytest.raises(InputError, match="column 'alley': the value is missing"):
        table(text, None, like=table("alley,b,kind\nGravel,1,u\nPave,2,v\n"))
    with pytest.raises(InputError, match=r"categorical\['alley'\]='NA' is one string; needed: a list"):
        table(text, categorical={"alley": "NA"})
    with pytest.raises(InputError, match=r"categorical=\['kind'\]; needed: some of the columns that are used"):
        table(text, categorical={"kind": []})


def test_a_line_may_say_the_delimiter(table: Callable[..., Labelled], tmp_path: Path) -> None:
    """As Excel has it; lines keep their numbers."""
    assert table("sep=;\r\na,b;kind\r\n1;x\r\n2;y\r\n").x[:, 0].tolist() == [1, 2]
    assert fields(tmp_path / "fruit.csv")[0] == ["a,b", "kind"]
    with pytest.raises(InputError, match="line 4, column 'a': the value is missing"):
        table("sep=|\na|kind\n1|x\n|y\n")


def test_classes_may_be_whole_numbers() -> None:
    for names in ((1, 0), [1, 0], np.array([1, 0]), ("1", 0)):
        assert Labelled(X, [0, 1, 1], names).classes == ("1", "0")  # type: ignore[arg-type]


def test_csv_paths(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none.csv does not exist; needed: a CSV file"):
        csv(tmp_path / "none.csv", "kind")
    with pytest.raises(InputError, match="is a folder, not a file; needed: a CSV file"):
        csv(tmp_path, "kind")
    with pytest.raises(InputError, match="file is a list; needed: a path"):
        csv([], "kind")  # type: ignore[arg-type]


def test_many_words_if_they_are_meant(table: Callable[..., Labelled]) -> None:
    data = table("word,kind\n" + MANY, categorical=["word"])
    assert data.x.shape == (1001, 1001)
    assert torch.equal(data.x.sum(1), torch.ones(1001))


def test_fields_are_the_text_of_a_table(tmp_path: Path) -> None:
    file = tmp_path / "gaps.csv"
    file.write_text("a;b\n1;?\n\n; x y \n", encoding="utf-8")
    assert fields(file) == (["a", "b"], [["1", "?"], ["", "x y"]])
    assert fields(file, header=False, delimiter=";")[0] == ["0", "1"]
    with pytest.raises(InputError, match="line 3 has 1 fields; line 1 has 2"):
        file.write_text("a,b\n1,2\n3\n", encoding="utf-8")
        fields(file)


def test_cells() -> None:
    given = ("", "?", "NaN", "N/A", "null", "None", "#N/A", "<NA>", "0", "none", "-")
    assert [is_missing(c) for c in given] == [True] * 8 + [False] * 3
    assert all(is_missing(word) and is_missing(word.upper()) for word in MISSING)
    assert [number(c) for c in ("1e3", "-.5", "5more", "1_0")] == [1000.0, -0.5, None, None]


# ---------------------------------------------------------------------------------- what is a number, a word, nothing


def quoted(*cells: str) -> str:
    """A table with these values in column a."""
    return "a,kind\n" + "".join(f'"{cell}",{"xy"[k % 2]}\n' for k, cell in enumerate(cells))


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        (
            ["1,234,567"],
            "'1,234,567' looks like a number with separators .* written: thousands=','. If these are words",
        ),
        (["1.234,5"], r"written: decimal=',', thousands='\.'"),
        (["12,5", "1,234"], "written: decimal=','[.]"),
        (["1,234"], "written: decimal=',' or thousands=','"),
        (["1.234.567"], r"written: thousands='\.', decimal=','"),
        (["1 234"], "written: thousands=' '"),
        (["1\u202f234"], "written: thousands=' '"),
        (["1'234.5"], r"written: decimal='\.', thousands=\"'\""),
        (["1_000"], "written: thousands='_'"),
        (
            ["10%", "20 %"],
            "'10%' looks like a number with %, as 2 of the 2 cells of the column do. Write numbers alone. .* categor",
        ),
        (["$10", "-$7.50"], r"looks like a number with \$"),
        (["7 €", "1.000,50 €"], "looks like a number with €"),
        (["(10)"], "Write it with digits, a point and a minus"),
        (["\N{MINUS SIGN}5"], "Write it with digits, a point and a minus"),
        (["0x10", "0x1F"], r"'0x10' looks like a number to another base, .* Write it in decimal \(16\)"),
        (["10 kg", "7.5 kg"], "looks like a number with the unit 'kg'"),
        (["2020-01-31", "1999-12-01"], "looks like a date or time, .* Make a number of it"),
        (["31.1.2020"], "looks like a date or time"),
        (["12:30", "7:05"], "looks like a date or time"),
        (["1 Jan 2020", "3 Feb 2021"], "looks like a date or time"),
        (["Jan-20", "Feb-20"], "looks like a date or time"),
        (["2020-01", "2020-02"], "looks like a date or time"),
        (["01/2020"], "looks like a date or time"),
        (["Monday, 2nd of March 2020", "Tue 3 Mar 2020"], "looks like a date or time"),
        (["10:30 PM", "9:05 a.m."], "looks like a date or time"),
        (["USD 10", "USD 12.50"], "looks like a number with USD, .* Write numbers alone"),
        (["1.5x10^3", "2×10³"], r"looks like a number with a power of ten, .* Write it with e \(1.5e3\)"),
        (['=""007""', '=""008""'], "looks like a spreadsheet's formula for text, .* between the quotes"),
        (["0,500"], "written: decimal=','[.]"),
        (["unknown", "10%", "20%"], "line 3, column 'a': '10%' looks like"),
        (["unknown"] * 9 + ["10%", "20%"], "line 11, column 'a': '10%' looks .* as 2 of the 11 cells"),  # most values
        (
            ["1", "10%"],
            "line 3, column 'a': '10%' is no number, others of the column are. It looks like a number with %",
        ),
        (["1", "-"], "'-' is no number, others of the column are. Correct it, or empty it if it is missing, or name"),
    ],
)
def test_numbers_in_another_dress_are_refused(cells: list[str], message: str, table: Callable[..., Labelled]) -> None:
    with pytest.raises(InputError, match=message):
        table(quoted(*cells))
    assert len(table(quoted(*cells), categorical=["a"]).columns) == len(set(cells))  # unless they are meant as words


@pytest.mark.parametrize(
    "cells",
    [
        ["30-39", "40-49"],
        ["1st", "2nd", "3rd"],
        ["1.2.3", "1.10.0"],
        ["A1", "A2"],
        ["<5", ">=5"],
        ["1/2"],
        ["red", "10%"],
    ],
)
def test_words_with_digits_are_words(cells: list[str], table: Callable[..., Labelled]) -> None:
    assert table(quoted(*cells)).columns == tuple(f"a={cell}" for cell in sorted(cells))


@pytest.mark.parametrize(
    ("form", "cells", "want"),
    [
        ({"decimal": ","}, ["1,5", "-2", "1e3"], [1.5, -2, 1000]),
        ({"thousands": ","}, ["1,234,567", "-12", "1,234.5", "12,34,567"], [1234567, -12, 1234.5, 1234567]),
        ({"decimal": ",", "thousands": "."}, ["1.234,5", "0,25"], [1234.5, 0.25]),
        ({"decimal": ",", "thousands": " "}, ["1 234,5", "1\u202f000"], [1234.5, 1000]),
        ({"thousands": "'"}, ["1'000'000"], [1e6]),
        ({"thousands": "_"}, ["1_000"], [1000]),
    ],
)
def test_numbers_are_read_as_they_are_said_to_be_written(
    form: dict[str, Any], cells: list[str], want: list[float], table: Callable[..., Labelled]
) -> None:
    assert table(quoted(*cells), **form).show[:, 0].tolist() == want
    wrong = {",": "1.5", ".": "1,50"}[form.get("decimal", ".")] if "_" not in cells[0] else "1_00"
    with pytest.raises(InputError, match=f"line {len(cells) + 2}, column 'a': '{wrong}' is no number"):
        table(quoted(*cells, wrong), **form)  # 1.5 is not 15


def test_classes_and_categories_are_told_apart_as_they_are_written(table: Callable[..., Labelled]) -> None:
    assert table("v,kind\n1,02\n1,10\n1,01\n").classes == ("01", "02", "10")
    assert table("v,kind\n1,2.0\n1,1.\n1,2\n").classes == ("1", "2")
    for text, options, place in (
        ("v,kind\n1,01\n2,1\n", {}, "line 3, column 'kind': '1', and '01' in line 2, are one number. Write them alike"),
        ("v,kind\n1,1\n2,1e0\n", {}, "line 3, column 'kind': '1e0', and '1' in line 2, are one number"),
        ("v,kind\n1,x\n+1,y\n", {"categorical": ["v"]}, r"line 3, column 'v': '\+1', and '1' in line 2"),
    ):
        with pytest.raises(InputError, match=place):
            table(text, **options)
    named = table("v,kind\n1,01\n2,1\n3,1.0\n", classes=["1", "01"])
    assert (named.classes, named.y.tolist()) == (("1", "01"), [1, 0, 0])
    assert table("v,kind\n1.0,x\n1,y\n", categorical=["v"]).columns == ("v=1",)
    far = table("v,kind\n1,1e-99999999999999999999\n2,1e-99999999999999999998\n", classes=None, categorical=["v"])
    assert len(far.classes) == 2
    for quantity in ("10%", "2,5", "2020-01-31"):
        with pytest.raises(InputError, match=f"the target '{quantity}' looks like .* name them: classes="):
            table(f'v,kind\n1,"{quantity}"\n2,"{quantity}"\n')
        assert table(f'v,kind\n1,"{quantity}"\n', classes=[quantity, "0"]).y.tolist() == [0]


def test_lines_that_lack_a_value_are_left_out_if_asked(table: Callable[..., Labelled]) -> None:
    text = "a,b,kind\n1,red,x\n?,red,y\n2,None,x\n3,blue,#N/A\nNULL,,y\n4,red,y\n"
    with pytest.raises(InputError, match=r"line 3, column 'a': the value is missing \('\?'\).* in 4 lines"):
        table(text)
    data = table(text, missing="leave out")
    assert data.columns == ("a", "b=red")  # blue is in no line that is left
    assert (data.show.tolist(), data.y.tolist(), data.classes) == ([[1, 1], [4, 1]], [0, 1], ("x", "y"))
    assert data.encoding is not None
    assert (data.encoding.left_out, [c.missing for c in data.encoding.columns]) == (4, [2, 2])
    assert len(table(text, missing="leave out", columns=["a"])) == 3  # what is not used may be missing
    # A class that is named is no missing value.
    assert table("v,kind\n1,NA\n2,EU\n", classes=["EU", "NA"]).y.tolist() == [1, 0]


def test_a_summary_says_what_was_understood(table: Callable[..., Labelled]) -> None:
    text = "weight,colour,id,kind\n120,red,1,apple\n9.5,red,2,cherry\n?,green,3,apple\n130,green,4,apple\n"
    data = table(text, columns=["weight", "colour"], missing="leave out")
    assert data.summary() == (
        "fruit: 3 samples, 2 classes (kind): apple 2, cherry 1\n"
        "  weight  number  9.5 to 130\n"
        "  colour  words   green 1, red 2\n"
        "  not used: id\n"
        "  missing values: weight 1; 1 line left out"
    )
    assert (
        "apple 1, cherry 0\n  weight  number  130 to 130\n  colour  words   green 1, red 0"
        in data.select([2]).summary()
    )
    assert table(FRUIT).summary().endswith("  missing values: none")
    assert "not used" not in table(FRUIT).summary()  # all columns are
    hostile = table("a\x1b[2J,b\u202e,kind\n1,\x1b]0;\x07,x\ty\n").summary()  # what a terminal would act on is quoted
    assert all(line.isprintable() for line in hostile.split("\n"))
    assert "'b\\u202e'   words   '\\x1b]0;\\x07' 1" in hostile
    wide = "".join(f"c{k}," for k in range(50)) + "kind\n" + "1," * 50 + "x\n"
    assert "c39  number  1 to 1\n  and 10 columns more\n" in table(wide).summary()
    x = {"u": torch.arange(8.0).reshape(2, 4), "v": torch.ones(2, 1, 3)}
    many = Labelled(x, [0, 11], tuple(f"k{k}" for k in range(12)))  # type: ignore[arg-type]
    assert many.summary() == (
        "data: 2 samples, 12 classes: k0 1, " + "".join(f"k{k} 0, " for k in range(1, 10)) + "and 2 more\n"
        "  x['u']  [4] 0 to 7\n"
        "  x['v']  [1, 3] 1 to 1"
    )


# ------------------------------------------------------------------------------------ read like the training set

WORDS = ["red", "green", "blue"]


@given(
    rows=st.lists(st.tuples(st.integers(-9, 9), st.sampled_from(WORDS), st.integers(0, 2)), min_size=2, max_size=12),
    order=st.permutations(range(3)), cut=st.integers(1, 11),
)  # fmt: skip
def test_columns_go_by_name_and_words_as_in_the_training_set(
    rows: list[tuple[int, str, int]], order: list[int], cut: int
) -> None:
    """The second part of a file, its columns in another order, is what it was in the whole file; or it is refused."""
    cut = min(cut, len(rows) - 1)
    names = ("a", "b", "kind")
    with tempfile.TemporaryDirectory() as folder:
        whole, first, second = (Path(folder) / name for name in ("whole.csv", "first.csv", "second.csv"))
        lines = [",".join(map(str, row)) for row in rows]
        whole.write_text("\n".join([",".join(names), *lines]), encoding="utf-8")
        first.write_text("\n".join([",".join(names), *lines[:cut]]), encoding="utf-8")
        mixed = [";".join(str(row[k]) for k in order) for row in (names, *rows[cut:])]
        second.write_text("\n".join(mixed), encoding="utf-8")
        want, train = csv(whole, "kind"), csv(first, "kind")
        new = {row[1] for row in rows[cut:]} - {row[1] for row in rows[:cut]}
        new_classes = {row[2] for row in rows[cut:]} - {row[2] for row in rows[:cut]}
        if new or new_classes:
            with pytest.raises(
                InputError, match="is not in this column of the training set|none of the training set's"
            ):
                csv(second, like=train)
            return
        test = csv(second, like=train)
    assert (test.columns, test.classes) == (train.columns, train.classes)
    named = {name: want.show[cut:, k] for k, name in enumerate(want.columns)}
    assert torch.equal(test.show, torch.stack([named[name] for name in test.columns], 1))
    assert torch.equal(test.x, test.show.float())
    assert [test.classes[k] for k in test.y.tolist()] == [want.classes[k] for k in want.y[cut:].tolist()]
    same_columns(train, test)


@pytest.fixture
def train(tmp_path: Path) -> Labelled:
    file = tmp_path / "train.csv"
    file.write_text("a,b,c,kind\n1,red,5,x\n2,blue,6,y\n", encoding="utf-8")
    return csv(file, "kind")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,b,kind\n1,red,x\n", {}, "fruit.csv lacks 'c', which the training set has; needed: the same columns,"),
        ("a,b,c\n1,red,2\n", {}, "lacks 'kind', which the training set has"),
        ("a,b,c,kind,id\n1,red,2,x,7\n", {}, "has 'id', which the training set lacks; .* with columns="),
        ("A,b,c,kind\n1,red,2,x\n", {}, "lacks 'a', which the training set has,? and has 'A', which the training"),
        ("a,b,c,kind\n1,rad,2,x\n", {}, "column 'b': 'rad' is not in this column of the training set, which has blue, "
         "red. Did you mean 'red'"),
        ("a,b,c,kind\n1,red,2,z\n", {}, "column 'kind': 'z' is none of the training set's classes x, y"),
        ("a,b,c,kind\n1,red,big,x\n", {}, "column 'c': 'big' is no number, those of the training set are"),
        ("a,b,c,kind\n1,red,10%,x\n", {}, "'10%' is no number, those of the training set are. It looks like a number"),
        ("a,b,c,kind\n1,?,2,x\n", {}, r"column 'b': the value is missing \('\?'\)"),
        ("a,b,c,c,kind\n1,red,2,3,x\n", {}, "has several columns 'c'"),
        ("1,red,2,x\n", {"header": False}, "lacks 'kind', 'a', 'b'"),
        ("a,b,c,kind\n1,red,2,x\n", {"target": "c"}, "target='c', and the training set's is 'kind'"),
        ("a,b,c,kind\n1,red,2,x\n", {"columns": ["a"]}, "like= and columns= were given; like= decides that"),
        ("a,b,c,kind\n1,red,2,x\n", {"classes": ["x"]}, "like= and classes= were given"),
        ("a,b,c,kind\n1,red,2,x\n", {"categorical": ["a"]}, "like= and categorical= were given"),
    ],
)  # fmt: skip
def test_what_the_training_set_does_not_know_is_refused(
    text: str, options: dict[str, Any], message: str, train: Labelled, table: Callable[..., Labelled]
) -> None:
    with pytest.raises(InputError, match=message):
        table(text, **{"target": None, "like": train} | options)


def test_what_a_file_may_have_of_its_own(train: Labelled, table: Callable[..., Labelled]) -> None:
    want = table("a,b,c,kind\n1.5,red,2000,y\n", like=train)
    assert (want.x.tolist(), want.y.tolist()) == ([[1.5, 0, 1, 2000]], [1])
    for text, options in (
        ("kind;c;b;a\ny;2.000;red;1,5\n", {"decimal": ",", "thousands": "."}),
        ("kind\tc\tb\ta\ny\t2000\tred\t1.5\ny\t?\tred\t1\n", {"missing": "leave out"}),
    ):
        got = table(text, None, like=train, **options)
        assert (got.columns, got.x.tolist(), got.y.tolist()) == (want.columns, want.x.tolist(), [1])
    again = table(
        "kind,c,b,a\ny,2000,red,1.5\n", None, like=pickle.loads(pickle.dumps(want))
    )  # like one that was read so
    assert again.x.tolist() == want.x.tolist()
    assert table("a,b,c,kind\n1,red,2,y\n", None, like=train.only("y")).y.tolist() == [0]
    few = table("a,b,id,kind\n1,red,7,x\n2,blue,8,y\n", columns=["a", "b"])
    assert table("b,kind,a,other\nred,x,3,?\n", None, like=few).x.tolist() == [[3, 0, 1]]
    plain = table("1,red,x\n2,blue,y\n", -1, header=False)
    assert table("3,blue,y\n", None, like=plain).x.tolist() == [[3, 1, 0]]


def test_a_set_that_was_changed_or_not_read_decides_nothing(train: Labelled, table: Callable[..., Labelled]) -> None:
    text = "a,b,c,kind\n1,red,2,x\n"
    for like, message in (
        (
            train.with_x(train.x - 1),
            r"has another x than its file \(with_x\). Read this file like the set as it was read",
        ),
        (train.with_x({"x": train.x}), "has another x than its file"),
        (labelled((X, [0, 1, 2])), r"like=Labelled\(data: x \[3, 2\], 3 classes\) was not read from a table"),
        ((X, [0, 1, 2]), "like is a tuple; needed: the training set, as tangency.datasets.csv read it"),
    ):
        with pytest.raises(InputError, match=message):
            table(text, None, like=like)


def test_sets_with_other_columns_are_refused_where_they_are_used_together(
    train: Labelled, table: Callable[..., Labelled]
) -> None:
    def named(*columns: str) -> Labelled:
        return Labelled(X, [0, 1, 2], ("a", "b", "c"), columns=columns)  # type: ignore[arg-type]

    for one, other, message in (
        (
            named("a", "b"),
            named("b", "a"),
            r"columns are the training set's in another order \(b, a for a, b\). .*like=train",
        ),
        (named("a", "b"), named("a", "c"), "are not the training set's: they lack b and have c in addition"),
        (train, table("a,b,c,kind\n1,green,5,x\n2,red,6,y\n"), "they lack b=blue and have b=green in addition"),
        (train, table("b,a,c,kind\nred,1,5,x\nblue,1,5,y\n"), "in another order"),
    ):
        with pytest.raises(InputError, match=message):
            same_columns(one, other)
    same_columns(named("a", "b"), named("a", "b"))
    same_columns(named("a", "b"), labelled((X, [0, 1, 2])))  # without names nothing is known
    same_columns(train, train.select([1]))


# --------------------------------------------------------------------------------------------------- files of any bytes

NAUGHTY = (
    "\0",
    "\r",
    "\n",
    '"',
    ",",
    ";",
    "\t",
    "\u2212",
    "\u0663",
    "²",
    "\u2028",
    "\u202e",
    "%",
    "1,234",
    "01",
    "+1",
    "-0",
)
NAUGHTY += (
    "None",
    "inf",
    "1e99999999999999999999",
    "1e-99999999999999999999",
    "9" * 400,
    "a" * 140_000,
    "0x" + "f" * 50,
)
SPLINTERS = [text.encode() for text in NAUGHTY]
SPLINTERS += [b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\x1f\x8b", b"\xff\xff\xff\xff", b"\0\0\0\0"]


def mutated(raw: bytes, rng: random.Random) -> bytes:
    made = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5))):
        i = rng.randrange(len(made) + 1)
        j = min(len(made), i + rng.choice((1, 2, 4, 30)))
        made[i:j] = rng.choice(
            (b"", rng.choice(SPLINTERS), made[i:j] * 2, rng.randbytes(j - i), made[i:j] + rng.choice(SPLINTERS))
        )
    return bytes(made)


def test_files_of_any_bytes_are_read_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand damaged files: nothing but our own errors comes out, and never text that could not be written."""
    monkeypatch.setattr(images, "_RECORDS", 2)
    rng, file = random.Random(0), tmp_path / "file"
    (tmp_path / "train.csv").write_text(FRUIT, encoding="utf-8")
    known = csv(tmp_path / "train.csv", "kind")
    write_mnist(tmp_path / "mnist")
    cifar = tmp_path / "cifar-10-batches-bin"
    cifar.mkdir()
    for name in BATCHES:
        (cifar / name).write_bytes(bytes([3, *range(256)] * 32)[: 2 * 3073].ljust(2 * 3073, b"\1"))
    readers: list[tuple[bytes, Path, Callable[[], Any]]] = [
        (FRUIT.encode(), file, lambda: csv(file, "kind").summary().encode()),
        (FRUIT.encode(), file, lambda: csv(file, "kind", missing="leave out", categorical=["seeds"])),
        (FRUIT.encode(), file, lambda: csv(file, -1, header=False)),
        (FRUIT.encode(), file, lambda: csv(file, like=known)),
        (FRUIT.encode(), file, lambda: fields(file)),
        (idx_bytes(np.zeros((0, 3, 2), np.float64)), file, lambda: idx(file)),
        (idx_bytes(np.arange(6, dtype=np.int16).reshape(2, 3)), file, lambda: idx(file)),
        (b"", tmp_path / "mnist" / "t10k-labels-idx1-ubyte", lambda: mnist(tmp_path)),
        (b"", tmp_path / "mnist" / "t10k-images-idx3-ubyte", lambda: mnist(tmp_path)),
        (b"", cifar / "test_batch.bin", lambda: cifar10(tmp_path)),
    ]
    outcomes = {True: 0, False: 0}
    for round_ in range(100):
        for good, place, reader in readers:
            kept = good or place.read_bytes()
            packed = (lambda b: b, gzip.compress)[round_ % 4 == 0]
            place.write_bytes(mutated(packed(kept), rng) if round_ % 8 else packed(mutated(kept, rng)))
            try:
                reader()
                outcomes[True] += 1
            except TangencyError as e:
                str(e).encode()
                outcomes[False] += 1
            place.write_bytes(kept)
    assert min(outcomes.values()) > 50  # both happen
