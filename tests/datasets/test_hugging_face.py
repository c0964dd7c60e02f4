"""Data sets of Hugging Face's interface, by a stand-in: images, texts, tables; names of classes are theirs."""

import io
from collections import UserDict
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow

import tangency as tg
from tangency import InputError
from tangency.datasets import from_hf, labelled


class Image:
    """A feature, known by the name of its class."""


class Value:
    def __init__(self, dtype: str) -> None:
        self.dtype = dtype


class ClassLabel(Value):
    def __init__(self, *names: str) -> None:
        super().__init__("int64")
        self.names = list(names)


class Rows:
    """What of datasets.Dataset is used (its version 5.2 behaves the same)."""

    split = "train"

    def __init__(self, features: Any, rows: list[dict[str, Any]], kind: str | None = None) -> None:
        self.features, self.rows, self.format = features, rows, {"type": kind}
        self.column_names = list(features or ())

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, key: str | int) -> Any:
        if self.format["type"] == "torch":
            raise AssertionError("read in another format than plain Python")
        return [row[key] for row in self.rows] if isinstance(key, str) else self.rows[key]

    def with_format(self, kind: str | None) -> "Rows":
        return Rows(self.features, self.rows, kind)

    def select_columns(self, names: list[str]) -> "Rows":
        return Rows({k: self.features[k] for k in names}, [{k: row[k] for k in names} for row in self.rows])


ANIMALS = ClassLabel("cat", "dog", "owl")
PIXELS = np.random.default_rng(0).integers(0, 256, (3, 4, 5, 3), dtype=np.uint8)
PHOTOS = [{"img": Pillow.fromarray(p), "label": k} for p, k in zip(PIXELS, [2, 0, 2], strict=True)]
PICTURES = Rows({"img": Image(), "label": ANIMALS}, PHOTOS)
REVIEWS = Rows(
    {"text": Value("string"), "label": ClassLabel("bad", "good"), "stars": Value("float32"), "by": Value("string")},
    [{"text": "a joy", "label": 1, "stars": 4.5, "by": "ann"}, {"text": "dull", "label": 0, "stars": 0.1, "by": "bob"}],
)


def lengths(texts: list[str]) -> torch.Tensor:
    return torch.tensor([[float(len(t))] for t in texts])


def test_images() -> None:
    data = from_hf(PICTURES)
    want = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
    assert torch.equal(torch.as_tensor(data.show), want)
    assert torch.equal(data.x, want.float() / 255)  # type: ignore[arg-type]
    assert (data.classes, data.y.tolist(), data.name) == (("cat", "dog", "owl"), [2, 0, 2], "train")
    assert from_hf(PICTURES, size=(2, 2), mode="L").x.shape == (3, 1, 2, 2)  # type: ignore[union-attr]
    packed = io.BytesIO()
    Pillow.fromarray(PIXELS[0]).save(packed, "PNG")
    raw = Rows(PICTURES.features, [{"img": {"bytes": packed.getvalue(), "path": None}, "label": 1}])
    test = from_hf(raw, image="img", like=data)
    assert torch.equal(torch.as_tensor(test.show)[0], want[0])
    assert torch.equal(from_hf(PICTURES.with_format("torch")).x, data.x)  # type: ignore[arg-type]


def test_texts() -> None:
    data = from_hf(REVIEWS, text="text", encode=lengths)
    assert (data.show, data.x.tolist(), data.y.tolist()) == (("a joy", "dull"), [[5.0], [4.0]], [1, 0])  # type: ignore[union-attr]
    tokens = from_hf(REVIEWS, text="text", encode=lambda t: UserDict(ids=lengths(t).long(), mask=lengths(t)))
    assert isinstance(tokens.x, dict)
    assert sorted(tokens.x) == ["ids", "mask"]
    only = Rows({"t": Value("string"), "label": ANIMALS}, [{"t": "a", "label": 0}])
    assert from_hf(only, encode=lengths).show == ("a",)


def test_tables() -> None:
    data = from_hf(REVIEWS, columns=["stars", "by"])
    assert data.columns == ("stars", "by=ann", "by=bob")
    assert torch.as_tensor(data.show).tolist() == [[4.5, 1, 0], [0.1, 0, 1]]
    assert (data.classes, data.y.tolist()) == (("bad", "good"), [1, 0])
    assert from_hf(REVIEWS, columns=["by", "stars"], like=data).x.tolist() == data.x.tolist()  # type: ignore[union-attr]
    coded = from_hf(REVIEWS, columns=["label", "stars"], label="by")
    assert coded.columns == ("label=bad", "label=good", "stars")
    assert coded.classes == ("ann", "bob")


@pytest.mark.parametrize(
    ("feature", "given", "classes", "y"),
    [
        (Value("int64"), [2, 0], ("0", "1", "2"), [2, 0]),
        (Value("string"), ["b", "a"], ("a", "b"), [1, 0]),
        (Value("bool"), [True, False], ("False", "True"), [1, 0]),
    ],
)
def test_classes_without_names(feature: Value, given: list[Any], classes: tuple[str, ...], y: list[int]) -> None:
    rows = Rows({"t": Value("string"), "labels": feature}, [{"t": "a", "labels": v} for v in given])
    data = from_hf(rows, text="t", encode=lengths)
    assert (data.classes, data.y.tolist()) == (classes, y)


def one(**row: Any) -> Rows:
    features = {"img": Image(), "t": Value("string"), "label": ANIMALS, "n": Value("float64")}
    return Rows({k: features[k] for k in row}, [row])


STREAM = SimpleNamespace(features={}, column_names=[], __getitem__=None)
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ({"train": PICTURES, "test": PICTURES}, {}, r"has the splits 'train', 'test'; needed: one .*dataset\['train'\]"),
    ([1], {}, "dataset is a list; needed: a datasets.Dataset of Hugging Face's"),
    (STREAM, {}, r"dataset is a SimpleNamespace, a stream; needed: rows that can be counted. .*from_list"),
    (Rows(PICTURES.features, []), {}, "dataset has no rows"),
    (Rows(None, [{}]), {}, "does not know the types of its columns"),
    (Rows({}, [{}], "custom"), {}, r"has a transform .*dataset.with_format\(None\)"),
    (REVIEWS, {}, r"columns 'text' \(string\), 'label' \(ClassLabel\), .*; needed: which of them the model takes"),
    (REVIEWS, {"encode": lengths}, "needed: which of them the model takes"),
    (REVIEWS, {"text": "text", "columns": ["by"]}, "text= and columns= were given; needed: one of them"),
    (REVIEWS, {"columns": "by"}, r"columns='by' is one string; needed: a list, as in columns=\['by'\]"),
    (REVIEWS, {"text": "txt"}, r"text: dataset has no column 'txt'. Did you mean 'text'.* Its columns are 'text' \("),
    (REVIEWS, {"text": "text"}, "text='text' without encode; needed: a function that makes numbers"),
    (REVIEWS, {"columns": ["by"], "encode": lengths}, "encode= was given, and columns=; needed: text="),
    (REVIEWS, {"text": "text", "encode": 3}, "encode is a int; needed: a function"),
    (REVIEWS, {"text": "text", "encode": lambda t: {"ids": [[1]] * len(t)}}, 'encode made a list; .*="pt"'),
    (REVIEWS, {"text": "text", "encode": lambda t: lengths(t)[:1]}, r"encode made \[\[1, 1\]\] of 2 texts; needed:"),
    (REVIEWS, {"text": "text", "encode": lengths, "label": "text"}, "label='text' is also what the model takes"),
    (one(t="a", n=1.0), {"encode": lengths}, "no column of the type ClassLabel, nor one called label among .* label="),
    (one(t="a", n=1.5), {"encode": lengths, "label": "n"}, r"row 0: 'n' is 1.5 \(a float\); needed: classes, words"),
    (one(t="a", label=-1), {"encode": lengths}, r"row 0: 'label' is -1, no class; .*dataset.filter"),
    (one(t="a", label=None), {"encode": lengths}, "row 0: 'label' is None, no class"),
    (one(t=None, label=0), {"encode": lengths}, r"row 0, 't' of train: a NoneType; needed: a text"),
    (one(img=None, label=0), {}, "row 0 of train holds a NoneType; needed: an image of Pillow's"),
    (one(img={"bytes": b"no", "path": None}, label=0), {}, "row 0 of train cannot be read as an image"),
    (one(img=PHOTOS[0]["img"], label=0), {"like": labelled((torch.rand(1, 3, 4, 5), [0]), classes=["dog"])},
     "row 0: 'label' is 'cat', none of the training set's classes dog"),
]  # fmt: skip


@pytest.mark.parametrize(("dataset", "options", "message"), WRONG)
def test_what_is_refused(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_hf(dataset, **options)


def test_several_columns_of_classes_and_too_many_words() -> None:
    two = Rows({"t": Value("string"), "a": ANIMALS, "b": ANIMALS}, [{"t": "x", "a": 0, "b": 0}])
    with pytest.raises(InputError, match="dataset has several columns of classes among"):
        from_hf(two, text="t", encode=lengths)
    many = Rows({"t": Value("string"), "label": Value("string")}, [{"t": "x", "label": f"w{k}"} for k in range(1001)])
    with pytest.raises(InputError, match="'label' has 1001 different words, as text or names have"):
        from_hf(many, text="t", encode=lengths)


def test_labelled_and_explain_say_how_to_read_it() -> None:
    with pytest.raises(InputError, match=r"train is a Rows; .* Read it: tg.datasets.from_hf\(dataset, image=…"):
        tg.explain(torch.nn.Linear(3, 2), PICTURES, PICTURES)
    with pytest.raises(InputError, match=r"data is a dict; .*from_hf\(dataset\['train'\], image=…"):
        labelled({"train": PICTURES})
