"""A folder of images with one subfolder for each class, as torchvision's `ImageFolder` has it."""

import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from .._base import checks
from .._base.extras import needed
from .._base.files import path as checked_path
from .._base.types import FilePath
from ..errors import InputError, TangencyWarning
from .files import text_of
from .labelled import Labelled
from .pixels import FORMATS, PIXELS, Asked, Mode, batch, unit

# What torchvision's ImageFolder reads.
ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class _Found(NamedTuple):
    """A file below a class's folder, and its name from the root on."""

    file: Path
    name: str
    image: bool


def folder(
    path: FilePath,
    *,
    size: tuple[int, int] | None = None,
    mode: Mode | None = None,
    like: Labelled | None = None,
    limit: int = PIXELS,
    progress: bool = True,
) -> Labelled:
    """An image folder, one subfolder for each class, as samples: x [n, 1 or 3, h, w] = bytes / 255, in float32.

    Classes are the names of the subfolders, sorted; images may lie deeper, and come in the order of torchvision's
    `ImageFolder`. `ids` of the result has the name of each file, `show` its bytes. `size`: (height, width) to resize to
    (bilinear, antialiased; the shape of images is not kept); without it all must have one size. `mode`: "RGB", "L"
    (grey), or by the files: grey if all are. Read test sets with `like=train`: the classes are those of `train`, of
    which some may be missing, and size and colour must be the same. `limit`: the most pixels of one image; `progress`:
    of long reading.

    Images are turned as their EXIF orientation says, palettes become colours, the first picture of a telephone's
    several counts, colour profiles are ignored. Refused, by name: what cannot be read, more than 8 bits a channel,
    transparent pixels, several frames, CMYK. Hidden files are passed over; files that are no images by their ending
    (.jpg .jpeg .png .ppm .bmp .pgm .tif .tiff .webp) are left out, and a warning counts them.

    >>> import tempfile
    >>> from PIL import Image
    >>> root = Path(tempfile.mkdtemp())
    >>> for name, grey in (("night", 10), ("day", 250)):
    ...     (root / name).mkdir()
    ...     Image.new("L", (8, 6), grey).save(root / name / "1.png")
    >>> data = folder(root)
    >>> data.x.shape, data.classes, data.ids
    (torch.Size([2, 1, 6, 8]), ('day', 'night'), ('day/1.png', 'night/1.png'))
    """
    root = _root(path)
    asked = Asked(size, mode, limit, None if like is None else shape_of(like))
    with needed("PIL", "folder()"):
        import PIL.Image
    found, y, classes = _samples(root, None if like is None else like.classes)
    where = [str(f.file) for f in found]
    opened = lambda k: PIL.Image.open(found[k].file, formats=FORMATS)  # noqa: E731  # the files stay closed till then
    show = batch(opened, where, asked, str(root), progress)
    ids = [f.name for f in found]
    return Labelled(unit(show), y, classes, show, name=text_of(root.resolve().name), ids=ids)


def _samples(root: Path, known: tuple[str, ...] | None) -> tuple[list[_Found], list[int], tuple[str, ...]]:
    """The images, the class of each, and the names of the classes: those of the training set, if it is known."""
    places, loose = _classes(root)
    if not places:
        raise InputError(f"{root} has no subfolder; needed: one for each class, with its images in it.")
    classes = tuple(map(text_of, places)) if known is None else known
    found: list[_Found] = []
    y: list[int] = []
    for place in places:
        name = text_of(place)
        if name not in classes:
            raise InputError(
                f"{root} has a subfolder {name!r}, which is none of the training set's classes "
                f"{checks.some(list(classes), 10)}.{checks.suggest(name, classes)}"
            )
        files = sorted(_below(root, root / place), key=lambda f: (str(f.file.parent), f.file.name))
        images = [f for f in files if f.image]
        loose += [f.name for f in files if not f.image]
        if not images:
            raise InputError(
                f"class {name!r}: {root / place} has no image ({' '.join(ENDINGS)}); needed: at least one. Take the "
                "folder out if it is no class."
            )
        found += images
        y += [classes.index(name)] * len(images)
    if loose:
        warnings.warn(
            f"{root}: {len(loose)} files were left out, as they lie in no class's folder or are no images by "
            f"their ending ({' '.join(ENDINGS)}): {checks.some(loose)}.",
            TangencyWarning,
            stacklevel=3,
        )
    return found, y, classes


def shape_of(like: object) -> tuple[int, int, int]:
    """The [c, h, w] of the training set's images, as a person sees them: with_x() may have changed x."""
    if not isinstance(like, Labelled) or not isinstance(like.show, Tensor) or like.show.dim() != 4:
        what = repr(like) if isinstance(like, Labelled) else f"a {type(like).__name__}"
        raise InputError(f"like is {what}; needed: the training set, with images.")
    c, h, w = like.show.shape[1:]
    return c, h, w


def _root(given: object) -> Path:
    root = checked_path(given, "path")
    need = "a folder with one subfolder for each class"
    if not os.path.lexists(root):
        raise InputError(f"the folder {root} does not exist; needed: {need}.")
    if not os.path.isdir(root):
        raise InputError(f"{root} is not a folder; needed: {need}.")
    return root


def _entries(place: Path) -> list["os.DirEntry[str]"]:
    """What is in a folder, hidden things aside."""
    try:
        with os.scandir(place) as inside:
            return [entry for entry in inside if not entry.name.startswith(".")]
    except OSError as e:
        raise InputError(f"the folder {place} cannot be read ({e.strerror}); needed: images.") from None


def _classes(root: Path) -> tuple[list[str], list[str]]:
    """The names of the subfolders, sorted, and of the files beside them."""
    inside = _entries(root)
    return sorted(e.name for e in inside if e.is_dir()), sorted(text_of(e.name) for e in inside if not e.is_dir())


def _below(root: Path, place: Path) -> Iterator[_Found]:
    """All files in a folder and below it; links are followed, in circles they are refused."""
    waiting: list[tuple[Path, tuple[tuple[int, int], ...]]] = [(place, ())]
    while waiting:
        here, above = waiting.pop()
        state = os.stat(here)
        itself = state.st_dev, state.st_ino
        if itself in above:
            raise InputError(f"{here} is a link that leads back to a folder above it; needed: no circles. Remove it.")
        for entry in _entries(here):
            file = here / entry.name
            if entry.is_dir():
                waiting.append((file, (*above, itself)))
                continue
            image = file.suffix.lower() in ENDINGS
            if image and not entry.is_file():
                raise InputError(f"{file} is no file but a broken link, a pipe or the like; needed: an image.")
            yield _Found(file, text_of(file.relative_to(root).as_posix()), image)
