"""Images from the official files of CIFAR-10, MNIST and Fashion-MNIST, and the digits that come with scikit-learn."""

import math
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._base.extras import needed
from .._base.files import path
from .._base.types import FilePath
from ..errors import InputError
from .accepted import whole
from .files import find_file, locate, read_bytes
from .labelled import Labelled, TrainTest, shuffled
from .pixels import unit

# Type codes of the IDX format; its numbers are big-endian.
_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}
_DIMENSIONS = 32  # as many as any NumPy takes
_DIGIT_NAMES = tuple("0123456789")
_CLOTHES = ("T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

# A CIFAR-10 file: so many records, each of a label and 3 × 32 × 32 bytes.
_RECORDS, _RECORD = 10_000, 3073
_CIFAR_FOLDER = "cifar-10-batches-bin"
_CIFAR = (
    "the binary version of CIFAR-10 (data_batch_1.bin … data_batch_5.bin, test_batch.bin). Get and unpack "
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
)
# What betrays the other version: its folder, its archive, a file of it.
_PICKLED = ("cifar-10-batches-py", "cifar-10-python.tar.gz", "data_batch_1")


def cifar10(folder: FilePath) -> TrainTest:
    """CIFAR-10 as (train, test): 50,000 and 10,000 images [3, 32, 32] in [0, 1], from the files of its binary version.

    `folder`: where `data_batch_1.bin` … lie, or its parent. x is float32, `show` the bytes of the files. Krizhevsky
    2009, "Learning multiple layers of features from tiny images". Memory: 0.9 GB.

    >>> cifar10("/nowhere")  # else: train, test = cifar10(folder); birds_and_cats = train.only("bird", "cat")
    Traceback (most recent call last):
    ...
    tangency.errors.InputError: the folder /nowhere does not exist; needed: the binary version of CIFAR-10 ...
    """
    root = path(folder, "folder")
    pickled = next((root / name for name in _PICKLED if os.path.exists(root / name)), None)
    if pickled and not any(find_file(place, "data_batch_1.bin") for place in (root, root / _CIFAR_FOLDER)):
        raise InputError(
            f"{pickled} is of the Python version of CIFAR-10, a pickle; a pickle can run any program, so none is ever "
            f"read. Needed: {_CIFAR}."
        )
    place = locate(root, (_CIFAR_FOLDER,), "data_batch_1.bin", _CIFAR)
    batches = [_batch(place, f"data_batch_{k}.bin") for k in range(1, 6)]
    test = _batch(place, "test_batch.bin")
    return TrainTest(_images(np.concatenate(batches), "CIFAR-10 train"), _images(test, "CIFAR-10 test"))


def _batch(folder: Path, name: str) -> np.ndarray:
    """The records of one file, [_RECORDS, _RECORD]."""
    file = find_file(folder, name) or folder / name
    raw = read_bytes(file, _CIFAR)
    full = _RECORDS * _RECORD
    if len(raw) != full:
        raise InputError(
            f"{file} has {len(raw)} bytes ({len(raw) / _RECORD:.1f} records); needed: {full} ({_RECORDS} records of "
            f"{_RECORD} bytes). It is {'truncated' if len(raw) < full else 'another file'}: get it again."
        )
    records = np.frombuffer(raw, np.uint8).reshape(_RECORDS, _RECORD)
    _known(records[:, 0], file, "record")
    return records


def _images(records: np.ndarray, name: str) -> Labelled:
    show = torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32).copy())
    return Labelled(unit(show), torch.from_numpy(records[:, 0].astype(np.int64)), _OBJECTS, show=show, name=name)


def mnist(folder: FilePath) -> TrainTest:
    """MNIST as (train, test): 60,000 and 10,000 images [1, 28, 28] in [0, 1], from its four IDX files, gzipped or not.

    `folder`: where `train-images-idx3-ubyte` … lie, or a parent in which they lie in `mnist` or `MNIST/raw` (as
    torchvision leaves them). x is float32, `show` the bytes of the files. LeCun et al. 1998.

    >>> import tempfile
    >>> images = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(2 * 28 * 28)  # two, all black
    >>> labels = bytes([0, 0, 8, 1, 0, 0, 0, 2]) + bytes([5, 0])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for part in ("train", "t10k"):
    ...         _ = (Path(folder) / f"{part}-images-idx3-ubyte").write_bytes(images)
    ...         _ = (Path(folder) / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    ...     train, test = mnist(folder)
    >>> train
    Labelled(MNIST train: x [2, 1, 28, 28], 10 classes)
    """
    get = "Get them with torchvision.datasets.MNIST(folder, download=True)"
    return _pair(folder, ("mnist", "MNIST/raw", "raw"), _DIGIT_NAMES, "MNIST", get)


def fashion_mnist(folder: FilePath) -> TrainTest:
    """Fashion-MNIST as (train, test), in the form of `mnist`: 60,000 and 10,000 images [1, 28, 28] of clothes.

    `folder`: where `train-images-idx3-ubyte` … lie, gzipped or not, or a parent in which they lie in `fashion-mnist` or
    `FashionMNIST/raw`. Xiao, Rasul & Vollgraf 2017.

    >>> fashion_mnist("/nowhere")  # else: train, test = fashion_mnist(folder); shoes = train.only("sandal", "sneaker")
    Traceback (most recent call last):
    ...
    tangency.errors.InputError: the folder /nowhere does not exist; needed: the four IDX files of Fashion-MNIST ...
    """
    get = "Get them from https://github.com/zalandoresearch/fashion-mnist"
    return _pair(folder, ("fashion-mnist", "FashionMNIST/raw", "raw"), _CLOTHES, "Fashion-MNIST", get)


def _pair(folder: FilePath, places: tuple[str, ...], classes: tuple[str, ...], name: str, get: str) -> TrainTest:
    need = f"the four IDX files of {name} (train-images-idx3-ubyte, …), gzipped or not. {get}"
    place = locate(folder, places, "train-images-idx3-ubyte", need)
    parts = {"train": "train", "t10k": "test"}  # the files' own words, and ours
    return TrainTest(*(_part(place, part, classes, f"{name} {ours}", need) for part, ours in parts.items()))


def _part(folder: Path, part: str, classes: tuple[str, ...], name: str, need: str) -> Labelled:
    files = [folder / f"{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1")]
    images, labels = (find_file(folder, file.name) or file for file in files)
    show, y = _idx(images, need), _idx(labels, need)
    if show.dtype != torch.uint8 or show.shape[1:] != (28, 28):
        raise InputError(f"{images} holds {_form(show)}; needed: torch.uint8 [n, 28, 28], images.")
    if y.dtype != torch.uint8 or y.dim() != 1:
        raise InputError(f"{labels} holds {_form(y)}; needed: torch.uint8 [n], labels.")
    if len(show) != len(y):
        raise InputError(f"{images} has {len(show)} images, {labels} has {len(y)} labels; needed: files of one set.")
    _known(y.numpy(), labels, "label")
    return Labelled(unit(show[:, None]), y.long(), classes, show=show[:, None], name=name)


def idx(file: FilePath) -> Tensor:
    """The numbers of an IDX file, gzipped or not, of any of its types and dimensions.

    An IDX file is: two zero bytes, a type, the number of dimensions, the dimensions, the numbers, big-endian. LeCun.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder) / "labels-idx1-ubyte"
    ...     _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes([7, 2, 1]))
    ...     idx(file)
    tensor([7, 2, 1], dtype=torch.uint8)
    """
    return _idx(path(file, "file"), "an IDX file")


def _idx(file: Path, need: str) -> Tensor:
    raw = read_bytes(file, need)
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _IDX_TYPES or not 1 <= raw[3] <= _DIMENSIONS:
        raise InputError(
            f"{file} begins with {raw[:4].hex(' ') or 'nothing'}; needed: an IDX file, which begins with 00 00, a type "
            f"({', '.join(f'{k:02x}' for k in _IDX_TYPES)}) and the number of dimensions. It is another file: get it "
            "again."
        )
    dtype, start = np.dtype(_IDX_TYPES[raw[2]]), 4 + 4 * raw[3]
    if len(raw) < start:
        raise InputError(f"{file} is truncated: {len(raw)} bytes, its header alone has {start}. Get it again.")
    shape = tuple(int(k) for k in np.frombuffer(raw, ">u4", raw[3], 4))
    if math.prod(max(k, 1) for k in shape) * dtype.itemsize > sys.maxsize:  # also where one of them is 0
        raise InputError(
            f"{file}: its header says {list(shape)}, which no array can have. It is damaged: get it again."
        )
    full = start + math.prod(shape) * dtype.itemsize
    if len(raw) != full:
        state = "is truncated" if len(raw) < full else "goes on after its end"
        raise InputError(
            f"{file} {state}: {len(raw)} bytes; needed: {full} for {list(shape)} numbers of {dtype.itemsize} bytes, "
            "as its header says. Get it again."
        )
    array = np.frombuffer(raw, dtype, offset=start).reshape(shape)
    return torch.from_numpy(array.astype(dtype.newbyteorder("=")))


def digits(*, test: int = 597) -> TrainTest:
    """1,797 handwritten digits [1, 8, 8] in [0, 1] as (train, test), shuffled once and for all; they need no file.

    They come with scikit-learn. `test`: the number of test images, the last ones of the shuffled. Alpaydin &
    Kaynak 1998.

    >>> train, test = digits()
    >>> train, len(test)
    (Labelled(digits train: x [1200, 1, 8, 8], 10 classes), 597)
    """
    with needed("sklearn", "digits()"):
        from sklearn.datasets import load_digits
    bunch = load_digits()
    n = len(bunch.target)
    if not whole(test, 1, n - 1):
        raise InputError(f"test={test!r}; needed: a number of images from 1 to {n - 1}.")
    order = shuffled(n, 0)
    x = torch.from_numpy(bunch.images).float().div_(16)[order, None]
    y = torch.from_numpy(bunch.target).long()[order]
    first, last = slice(n - test), slice(n - test, None)
    return TrainTest(
        Labelled(x[first], y[first], _DIGIT_NAMES, name="digits train"),
        Labelled(x[last], y[last], _DIGIT_NAMES, name="digits test"),
    )


def _known(labels: np.ndarray, file: Path, what: str) -> None:
    """All ten-class sets: labels from 0 to 9."""
    wrong = np.flatnonzero(labels > 9)
    if len(wrong):
        raise InputError(
            f"{file}: {what} {wrong[0]} has class {labels[wrong[0]]}; needed: 0 to 9. It is another file, or damaged."
        )


def _form(v: Tensor) -> str:
    return f"{v.dtype} {list(v.shape)}"
