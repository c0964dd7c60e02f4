"""Images that Pillow reads as one batch of bytes [n, c, h, w]: checked by their first bytes, upright, of one size."""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch import Tensor

from .._base import checks, machine
from .._base.extras import needed
from .._base.progress import bar
from ..errors import InputError, MemoryBudgetError
from .accepted import whole

if TYPE_CHECKING:
    from PIL.Image import Image

Mode = Literal["RGB", "L"]
# The most pixels of one image, as Pillow has it: a file of some kB may unpack to any number (heuristic).
PIXELS = 89_478_485
# The kinds of files that are read, as Pillow calls them: it would start other programs for some.
FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP")
# Pillow's words for what a pixel is: grey or of a colour, also with transparency and by a palette.
_GREY, _COLOUR = ("1", "L", "LA"), ("RGB", "RGBA", "P", "PA")
_ORIENTATION, _ON_ITS_SIDE = 0x0112, (5, 6, 7, 8)  # the EXIF tag, and its values that swap height and width
# Seconds of reading before a bar is shown.
_PATIENCE = 2.0


@dataclass(frozen=True)
class Head:
    """What the first bytes of an image say: (height, width) when it is upright, and whether it is grey."""

    size: tuple[int, int]
    grey: bool


@dataclass(frozen=True)
class Asked:
    """How images are to be read; `known`: the [c, h, w] of the training set, if they are to be like those."""

    size: tuple[int, int] | None
    mode: Mode | None
    limit: int
    known: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        pair = isinstance(self.size, (tuple, list, torch.Size)) and len(self.size) == 2
        if self.size is not None and not (pair and all(whole(k, 1) for k in self.size)):
            raise InputError(f"size={self.size!r}; needed: (height, width), two whole numbers, at least 1.")
        if self.mode not in (None, "RGB", "L"):
            raise InputError(f"mode={self.mode!r}; needed: 'RGB', 'L' (grey), or None, by the files.")
        if not whole(self.limit, 1):
            raise InputError(f"limit={self.limit!r}; needed: the most pixels of one image, a whole number.")
        if self.known and self.size is not None and tuple(self.size) != self.known[1:]:
            raise InputError(f"size={tuple(self.size)}, and the training set has {self.known[1:]}; needed: the same.")
        if self.known and self.mode is not None and _channels(self.mode) != self.known[0]:
            raise InputError(
                f"mode={self.mode!r}, and the images of the training set have {self.known[0]} channels; needed: the "
                "same mode."
            )

    def mode_of(self, heads: Sequence[Head], names: Sequence[str]) -> Mode:
        """One mode for all: as asked for, else grey where every image is grey."""
        if self.mode is not None:
            return self.mode
        coloured = next((name for head, name in zip(heads, names, strict=True) if not head.grey), None)
        if self.known and self.known[0] == 1 and coloured is not None:
            raise InputError(
                f"{coloured} is in colour, the training set is grey; needed: images alike. To make grey images of "
                "them: mode='L'."
            )
        return "L" if (self.known[0] == 1 if self.known else coloured is None) else "RGB"

    def size_of(self, heads: Sequence[Head], names: Sequence[str], what: str) -> tuple[int, int]:
        """One size for all: as asked for, else that of every image."""
        if self.size is not None:
            return int(self.size[0]), int(self.size[1])
        sizes = Counter(head.size for head in heads)
        want = self.known[1:] if self.known else heads[0].size
        if set(sizes) == {want}:
            return want
        first = {head.size: name for head, name in reversed(list(zip(heads, names, strict=True)))}
        found = [f"{h} × {w} ({many}: {first[h, w]} …)" for (h, w), many in sizes.most_common()]
        whose = f"that of the training set, {want[0]} × {want[1]}" if self.known else "one"
        give = f"size={want}" if self.known else f"size=(h, w), such as {sizes.most_common(1)[0][0]},"
        raise InputError(
            f"{what} has images of the sizes (height × width) {checks.some(found)}; needed: {whose}. {give} resizes "
            "them all."
        )


def batch(
    opened: Callable[[int], "Image"], names: Sequence[str], asked: Asked, what: str, progress: bool
) -> Tensor:  # fmt: skip
    """All images as bytes [n, c, h, w]; `opened(k)` opens image k, whose name for messages is `names[k]`.

    Each is opened twice: first for what its first bytes say, so that nothing is refused after an hour.
    """
    with needed("PIL", what):
        import PIL.Image  # noqa: F401
    heads = []
    for k, name in enumerate(names):
        with _named(name), opened(k) as image:
            heads.append(_head(image, name, asked.limit))
    mode, (h, w) = asked.mode_of(heads, names), asked.size_of(heads, names, what)
    shape, room = (len(names), _channels(mode), h, w), machine.available_memory()
    need = 5 * int(np.prod(shape, dtype=object))  # as bytes, and as float32 for the model
    if need > room:
        raise MemoryBudgetError(
            f"{what} has {len(names):,} images of {h} × {w}: to read them takes {need / 2**30:.3g} GiB, and "
            f"{room / 2**30:.3g} GiB are free. Give a smaller size=, or fewer images."
        )
    made = torch.empty(shape, dtype=torch.uint8)
    with bar(len(names), f"reading {what}", "image", show=progress, delay=_PATIENCE) as step:
        for k, name in enumerate(names):
            with _named(name), opened(k) as image:
                made[k] = torch.from_numpy(_pixels(image, name, mode, (h, w)))
            step()
    return made


def unit(pixels: Tensor) -> Tensor:
    """Bytes as float32 in [0, 1].

    >>> unit(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0., 1.])
    """
    return pixels.float().div_(255)


def _channels(mode: Mode) -> int:
    return 1 if mode == "L" else 3


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Pillow's work on one image: whatever it raises names the image."""
    from PIL.Image import DecompressionBombError, DecompressionBombWarning

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DecompressionBombWarning)  # `limit` decides
            yield
    except (InputError, MemoryError):
        raise
    except DecompressionBombError as e:
        raise InputError(
            f"{name}: {e}. If it is right, raise Pillow's own limit, PIL.Image.MAX_IMAGE_PIXELS, and limit=."
        ) from e
    except Exception as e:  # a damaged file makes Pillow raise nearly anything
        raise InputError(
            f"{name} cannot be read as an image ({type(e).__name__}: {e}). Get it again, or take it out."
        ) from e


def _head(image: "Image", name: str, limit: int) -> Head:
    """What kind of image this is, by its first bytes; refused where making bytes of it would lose something."""
    w, h = image.size
    if w * h > limit:
        raise InputError(
            f"{name} has {h} × {w} = {h * w:,} pixels; needed: at most {limit:,}, since small files can unpack to "
            f"anything. If it is right: limit={h * w}."
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":  # a telephone's JPEG, whose other frames are previews
        raise InputError(f"{name} has {frames} frames; needed: one picture. Save the one that counts as a file.")
    parts = str([tile[3] for tile in getattr(image, "tile", ())])  # how Pillow will unpack the bytes
    if ";16" in parts or image.mode.startswith("I") or image.mode == "F" or _most(image) > 255:
        raise InputError(
            f"{name} has more than 8 bits a channel (mode {image.mode}), which Pillow would cut off; needed: 8. Scale "
            "it to 0 … 255 and save it so, or give tensors: tg.datasets.Labelled(x, y, classes)."
        )
    if image.mode not in (*_GREY, *_COLOUR):
        raise InputError(
            f"{name} is in mode {image.mode}; needed: grey or RGB. Convert it with its colour profile and save it so."
        )
    on_its_side = image.getexif().get(_ORIENTATION) in _ON_ITS_SIDE
    return Head((w, h) if on_its_side else (h, w), image.mode in _GREY)


def _most(image: "Image") -> int:
    """The largest value that a PPM file says to have; 0 of other files."""
    tiles = getattr(image, "tile", ())
    args = tiles[0][3] if image.format == "PPM" and tiles else ()
    return next((v for v in args if isinstance(v, int)), 0) if isinstance(args, tuple) else 0


def _pixels(image: "Image", name: str, mode: Mode, size: tuple[int, int]) -> np.ndarray:
    """Bytes [c, h, w] of one image, turned upright, then resized."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    image = ImageOps.exif_transpose(image)
    if image.mode in ("LA", "RGBA", "PA") or "transparency" in image.info:
        low = image.convert("RGBA").getchannel("A").getextrema()[0]
        if low < 255:  # type: ignore[operator]  # of one channel it is a number
            raise InputError(
                f"{name} has transparent pixels; needed: none, for what is behind them decides what is seen. Put it "
                "on a background: PIL.Image.alpha_composite."
            )
    image = image.convert(mode)
    if image.size != (size[1], size[0]):
        image = image.resize((size[1], size[0]), Resampling.BILINEAR)  # Pillow's is antialiased
    array = np.array(image)
    return array[None] if mode == "L" else np.ascontiguousarray(array.transpose(2, 0, 1))
