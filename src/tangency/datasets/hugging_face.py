"""Samples with their classes out of Hugging Face's `datasets`, whose library is not imported: what is given has it."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .._base import checks
from ..errors import InputError
from .accepted import check_range, is_hf
from .folders import shape_of
from .labelled import Labelled
from .pixels import FORMATS, PIXELS, Asked, Mode, batch, unit
from .table import wished
from .values import as_lines

if TYPE_CHECKING:
    from PIL.Image import Image

Encode = Callable[[list[str]], Any]  # of n texts: a tensor, or a dict of tensors
# Names by which the classes go where no column is declared to hold them.
_LABELS = ("label", "labels")
# Different labels that may be counted as classes where nobody has named them (heuristic).
_MANY = 1000


def from_hf(
    dataset: Any,
    *,
    image: str | None = None,
    text: str | None = None,
    columns: Sequence[str] | None = None,
    label: str | None = None,
    encode: Encode | None = None,
    like: Labelled | None = None,
    size: tuple[int, int] | None = None,
    mode: Mode | None = None,
    limit: int = PIXELS,
    progress: bool = True,
) -> Labelled:
    """A `datasets.Dataset` of Hugging Face's as samples: x from one column of images or texts, or from table columns.

    `image`: a column of images, read as `folder` reads files (`size`, `mode`, `limit`); by default the one of the type
    Image. `text`: a column of texts, which `encode` makes numbers of: a function from the list of all texts to a tensor
    or a dict of tensors, such as `lambda texts: tokenizer(texts, padding=True, return_tensors="pt")`; the texts stay as
    `show`. `columns`: columns of numbers and words, read as `frame` reads them. `label`: the column of the classes; by
    default the one of the type ClassLabel, or the one called label or labels. Classes are a ClassLabel's names, in its
    order; else the words, sorted, or whole numbers from 0. `like`: the training set, whose classes, columns and form
    these have.

    One split at a time, in memory. Rows come in their order; formats that were set (`with_format("torch")`) do not
    matter, a transform that was set is refused: give its result to `with_x`. Lhoest et al. 2021.

    >>> from types import SimpleNamespace as Feature
    >>> class Reviews(list):  # datasets.load_dataset(…, split="train") has these
    ...     features = {"text": Feature(dtype="string"), "label": Feature(names=["bad", "good"], dtype="int64")}
    ...     column_names = ["text", "label"]
    ...     def __getitem__(self, key):
    ...         return [row[key] for row in self] if isinstance(key, str) else list.__getitem__(self, key)
    >>> rows = Reviews([{"text": "a joy", "label": 1}, {"text": "dull", "label": 0}])
    >>> data = from_hf(rows, text="text", encode=lambda texts: torch.tensor([[float(len(t))] for t in texts]))
    >>> data.show, data.classes, data.y.tolist(), data.x.tolist()
    (('a joy', 'dull'), ('bad', 'good'), [1, 0], [[5.0], [4.0]])
    """
    dataset = _checked(dataset)
    image, text = _inputs(dataset, image, text, columns, encode)
    label = _label(dataset, label, [image, text, *(columns or ())])
    name = str(getattr(dataset, "split", None) or "data")
    if columns is not None:
        return _table(dataset, list(columns), label, like, name)
    asked = Asked(size, mode, limit, None if like is None or image is None else shape_of(like))
    y, classes = _classes(list(dataset[label]), dataset.features[label], label, like)
    if image is not None:
        show = _images(dataset, image, asked, name, progress)
        return Labelled(unit(show), y, classes, show, name=name)
    texts = list(dataset[text])
    return Labelled(_encoded(encode, texts, f"{text!r} of {name}"), y, classes, texts=texts, name=name)


def _images(dataset: Any, column: str, asked: Asked, name: str, progress: bool) -> Tensor:
    """The images of a column, as bytes; a row at a time, so that they are not all decoded at once."""
    alone = dataset.select_columns([column]) if hasattr(dataset, "select_columns") else dataset
    names = [f"row {k} of {name}" for k in range(len(dataset))]
    return batch(lambda k: _opened(alone[k][column], names[k]), names, asked, name, progress)


def _checked(dataset: Any) -> Any:
    """The data set in the format of plain Python."""
    if isinstance(dataset, Mapping) and dataset and all(map(is_hf, dataset.values())):
        raise InputError(
            f"dataset has the splits {', '.join(map(repr, dataset))}; needed: one of them, as in "
            f"dataset[{next(iter(dataset))!r}]."
        )
    if not is_hf(dataset):
        raise InputError(f"dataset is a {type(dataset).__name__}; needed: a datasets.Dataset of Hugging Face's.")
    if not hasattr(dataset, "__len__"):
        raise InputError(
            f"dataset is a {type(dataset).__name__}, a stream; needed: rows that can be counted. Take some: "
            "datasets.Dataset.from_list(list(dataset.take(1000)), features=dataset.features)."
        )
    if not len(dataset):
        raise InputError("dataset has no rows; needed: at least one.")
    if not isinstance(dataset.features, Mapping):
        raise InputError("dataset does not know the types of its columns (features is None); needed: those.")
    if (getattr(dataset, "format", None) or {}).get("type") == "custom":
        raise InputError(
            "dataset has a transform (set_transform or with_transform); needed: the columns as they are stored: "
            "dataset.with_format(None). What the transform makes goes to with_x() afterwards."
        )
    return dataset.with_format(None) if hasattr(dataset, "with_format") else dataset


def _inputs(
    dataset: Any, image: str | None, text: str | None, columns: Sequence[str] | None, encode: Encode | None
) -> tuple[str | None, str | None]:
    """The column of images or of texts, or none of both where there are columns of a table."""
    given = {"image": image, "text": text, "columns": columns}
    said = [k for k, v in given.items() if v is not None]
    if len(said) > 1:
        raise InputError(f"{' and '.join(f'{k}=' for k in said)} were given; needed: one of them.")
    if isinstance(columns, str):
        raise InputError(f"columns={columns!r} is one string; needed: a list, as in columns=[{columns!r}].")
    for option, column in [(k, c) for k in said for c in (given[k] if k == "columns" else [given[k]])]:  # type: ignore[union-attr]
        _check_column(dataset, column, option)
    if not said:
        images = [name for name, feature in dataset.features.items() if type(feature).__name__ == "Image"]
        texts = [name for name, feature in dataset.features.items() if "string" in str(getattr(feature, "dtype", ""))]
        if len(images) == 1 and encode is None:
            return images[0], None
        if encode is None or len(texts) != 1:
            raise InputError(
                f"dataset has the columns {_described(dataset)}; needed: which of them the model takes. Say so: "
                "image=, text= with encode=, or columns=."
            )
        text = texts[0]
    if text is not None and encode is None:
        raise InputError(
            f"text={text!r} without encode; needed: a function that makes numbers of a list of texts, such as "
            'encode=lambda texts: tokenizer(texts, padding=True, return_tensors="pt").'
        )
    if text is None and encode is not None:
        raise InputError(f"encode= was given, and {said[0]}=; needed: text=, the column of texts that it takes.")
    return image, text


def _label(dataset: Any, given: str | None, taken: Sequence[object]) -> str:
    """The column of the classes."""
    if given is not None:
        _check_column(dataset, given, "label")
        if given in taken:
            raise InputError(f"label={given!r} is also what the model takes; needed: another column.")
        return given
    declared = [name for name, feature in dataset.features.items() if _declared(feature) and name not in taken]
    found = declared or [name for name in _LABELS if name in dataset.features and name not in taken]
    if len(found) != 1:
        why = "several columns of classes" if found else "no column of the type ClassLabel, nor one called label"
        raise InputError(f"dataset has {why} among {_described(dataset)}. Say which holds the classes: label=.")
    return found[0]


def _declared(feature: object) -> list[str] | None:
    """The names of a ClassLabel."""
    names = getattr(feature, "names", None)
    return list(names) if isinstance(names, (list, tuple)) and names else None


def _check_column(dataset: Any, given: object, option: str) -> None:
    if not isinstance(given, str) or given not in dataset.features:
        hint = checks.suggest(given, dataset.features) if isinstance(given, str) else ""
        raise InputError(f"{option}: dataset has no column {given!r}.{hint} Its columns are {_described(dataset)}.")


def _described(dataset: Any) -> str:
    """The columns with their types, for messages."""
    kinds = {name: type(feature).__name__ for name, feature in dataset.features.items()}
    return checks.some([
        f"{name!r} ({getattr(dataset.features[name], 'dtype', None) or kind if kind == 'Value' else kind})"
        for name, kind in kinds.items()
    ], 10)  # fmt: skip


def _classes(
    values: list[Any], feature: object, label: str, like: Labelled | None
) -> tuple[list[int] | Tensor, tuple[str, ...]]:
    """The class of each row, and their names."""
    names = _declared(feature)
    for k, v in enumerate(values):
        low, high = 0, len(names) - 1 if names else None
        if v is None or (names and not (isinstance(v, int) and low <= v <= high)):  # type: ignore[operator]
            raise InputError(
                f"row {k}: {label!r} is {v!r}, no class; needed: classes in every row. Leave the others out: "
                f"dataset.filter(lambda row: row[{label!r}] in …)."
            )
        if not isinstance(v, (str, int)):
            raise InputError(
                f"row {k}: {label!r} is {v!r} (a {type(v).__name__}); needed: classes, words or whole numbers."
            )
    words = [names[v] if names else str(v) for v in values]
    if like is not None:
        order: Sequence[str] = like.classes
    elif names:
        order = names
    elif all(type(v) is int for v in values):
        y = torch.tensor(values)
        check_range(y, None)
        return y, tuple(str(k) for k in range(int(y.max()) + 1))
    else:
        order = sorted(set(words))
        if len(order) > _MANY:
            raise InputError(f"{label!r} has {len(order)} different words, as text or names have; needed: classes.")
    place = {word: k for k, word in enumerate(order)}
    new = next((k for k, word in enumerate(words) if word not in place), None)
    if new is not None:
        raise InputError(
            f"row {new}: {label!r} is {words[new]!r}, none of the training set's classes "
            f"{checks.some(list(order), 10)}.{checks.suggest(words[new], order)}"
        )
    return [place[word] for word in words], tuple(order)


def _opened(value: Any, name: str) -> "Image":
    """An image as the data set gives it: Pillow's, or undecoded as a dict of bytes or a path."""
    import PIL.Image

    if isinstance(value, Mapping) and (value.get("bytes") is not None or value.get("path")):
        source = io.BytesIO(value["bytes"]) if value.get("bytes") is not None else value["path"]
        return PIL.Image.open(source, formats=FORMATS)
    if not isinstance(value, PIL.Image.Image):
        raise InputError(
            f"{name} holds a {type(value).__name__}; needed: an image of Pillow's. Leave rows without one out."
        )
    return value


def _encoded(encode: Encode | None, texts: list[str], where: str) -> Any:
    """What the model takes, made of all texts at once."""
    for k, v in enumerate(texts):
        if not isinstance(v, str):
            raise InputError(
                f"row {k}, {where}: a {type(v).__name__}; needed: a text. Leave it out: dataset.filter(…)."
            )
    if not callable(encode):
        raise InputError(f"encode is a {type(encode).__name__}; needed: a function of a list of texts.")
    made = encode(texts)
    made = dict(made) if isinstance(made, Mapping) else made
    parts = list(made.values()) if isinstance(made, dict) else [made]
    if not all(isinstance(v, (Tensor, np.ndarray)) for v in parts):
        wrong = next(type(v).__name__ for v in parts if not isinstance(v, (Tensor, np.ndarray)))
        raise InputError(
            f"encode made a {wrong}; needed: a tensor, or a dict of tensors. Of a tokenizer: tokenizer(texts, "
            'padding=True, return_tensors="pt").'
        )
    shapes = [list(v.shape) for v in parts]
    if not shapes or any(shape[:1] != [len(texts)] for shape in shapes):
        raise InputError(f"encode made {shapes} of {len(texts)} texts; needed: one row for each.")
    return made


def _table(dataset: Any, columns: list[str], label: str, like: Labelled | None, name: str) -> Labelled:
    """Columns of numbers and words, by the rules of tables."""
    names = list(dataset.features)
    declared = _declared(dataset.features[label])
    if like is None:
        coded = [c for c in columns if _declared(dataset.features[c])]
        wish = wished(label, None, columns, coded, declared, True, None, None, None)
    else:
        wish = wished(label, like, None, (), None, True, None, None, None)
        own = {label, *columns}
        names = [c for c in names if c in own]
    lines = as_lines(wish, name, names, len(dataset), lambda k: _values(dataset, names[k]))
    return wish.read(lines, name)


def _values(dataset: Any, column: str) -> list[object]:
    """The values of a column: classes by their names, numbers in their own precision."""
    values, feature = list(dataset[column]), dataset.features[column]
    names = _declared(feature)
    if names:
        return [None if v is None or v < 0 else names[v] for v in values]
    small = {"float16": np.float16, "float32": np.float32}.get(str(getattr(feature, "dtype", "")))
    return values if small is None else [None if v is None else small(v) for v in values]
