"""Pictures for a page: many small ones on few sheets, encoded by Pillow where it is installed, else as PNG by zlib.

WebP, and JPEG where Pillow has no WebP, blur what lies within a block of 16 × 16 pixels. So each picture of a lossy
sheet takes whole blocks, and nothing of its neighbours can be seen in it.
"""

import io
import math
import struct
import zlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from . import pack

# Pixels on a side of a sheet, at most: phones refuse larger ones.
SHEET = 4096
# Pixels on a side of what WebP and JPEG compress together.
LOSSY_BLOCK = 16
# The best lossy quality: at this one the eye finds no difference (heuristic).
BEST = 88
NAMES = {"webp": "WebP", "jpeg": "JPEG"}


@dataclass(frozen=True)
class Level:
    """How pictures are kept: at most `side` pixels high and wide; exactly (`quality` 100), lossy, or in few shades."""

    side: int
    quality: int = 100
    shades: int = 256

    @property
    def exact(self) -> bool:
        """Whether every pixel is as it was, but for size."""
        return self.quality == 100 and self.shades == 256

    def words(self, encoder: str, size: tuple[int, int]) -> str:
        """What becomes of pictures of this height and width, for the page's notes."""
        parts = [f"{NAMES[encoder]} at quality {self.quality}"] if self.quality < 100 else []
        parts += [f"PNG with {self.shades} shades a colour"] if self.shades < 256 else []
        parts += ["PNG, every pixel as it is"] if self.exact else []
        small = scaled_size(size, self.side)
        shrunk = f", made smaller from {size[1]} × {size[0]} to {small[1]} × {small[0]} pixels" if small != size else ""
        return parts[0] + shrunk


@dataclass(frozen=True)
class Sheets:
    """Pictures side by side on few files."""

    size: tuple[int, int]  # height and width of a picture
    cell: tuple[int, int]  # and of the room that it takes
    across: int  # pictures in a row
    per: int  # pictures on a sheet
    files: tuple[tuple[str, str], ...]  # MIME type, and what is in it in base64

    def content(self) -> pack.Content:
        """As looks.js reads it."""
        files = [{"mime": mime, "data": data} for mime, data in self.files]
        return {"size": self.size, "cell": self.cell, "across": self.across, "per": self.per, "files": files}


def encoder() -> str:
    """'webp' or 'jpeg' where Pillow can be imported, else 'png'."""
    try:
        from PIL import features
    except ImportError:
        return "png"
    return "webp" if features.check("webp") else "jpeg"


def levels(side: int) -> tuple[Level, ...]:
    """From the best to the smallest. A picture of `side` pixels is made smaller only where quality does not help."""
    if encoder() == "png":
        shaded = [Level(side), *(Level(side, shades=s) for s in (64, 32, 16, 8))]
        return tuple(shaded + [Level(s, shades=16) for s in (64, 48, 32) if s < side])
    lossy = [Level(side), *(Level(side, quality) for quality in (BEST, 80, 70, 60, 50, 40))]
    return tuple(lossy + [Level(s, 40) for s in (64, 48, 32) if s < side])


def scaled_size(size: tuple[int, int], side: int) -> tuple[int, int]:
    """Height and width of a picture that is to have at most `side` pixels either way, its shape kept."""
    part = min(1.0, side / max(size))
    return max(1, round(size[0] * part)), max(1, round(size[1] * part))


def sheets(images: Tensor, level: Level) -> Sheets:
    """Images [n, 1 or 3, h, w], uint8 or float in [0, 1], side by side on sheets."""
    size = scaled_size((images.shape[2], images.shape[3]), level.side)
    h, w = size if level.quality == 100 else (-(-s // LOSSY_BLOCK) * LOSSY_BLOCK for s in size)
    # About square sheets, so that browsers need not decode very long ones.
    most = max(1, SHEET // h) * max(1, SHEET // w)
    across = min(max(1, SHEET // w), max(1, math.ceil(math.sqrt(min(len(images), most) * h / w))))
    per = across * max(1, SHEET // h)
    files = []
    for start in range(0, len(images), per):
        sheet = _sheet(_bytes(images[start : start + per], size, level), (h, w), across)
        mime, data = _encoded(sheet, level)
        files.append((mime, pack.coded(data)))
    return Sheets(size, (h, w), across, per, tuple(files))


def _bytes(images: Tensor, size: tuple[int, int], level: Level) -> Tensor:
    """[n, c, h, w] bytes of this size, in as many shades as there may be."""
    images = images.detach().cpu()
    if tuple(images.shape[2:]) != size:
        scale = 1.0 if images.dtype == torch.uint8 else 255.0
        images = (F.interpolate(images.float(), size, mode="area") * scale).round().byte()
    elif images.dtype != torch.uint8:
        images = (images.float() * 255).round().byte()
    if level.shades < 256:
        steps = level.shades - 1
        images = ((images.float() / 255 * steps).round() / steps * 255).round().byte()
    return images


def _sheet(images: Tensor, cell: tuple[int, int], across: int) -> np.ndarray:
    """Bytes [height, width] or [height, width, 3]; the room beside a picture repeats its edge, which costs least."""
    n, c, h, w = images.shape
    down = -(-n // across)
    padded = F.pad(images.float(), (0, cell[1] - w, 0, cell[0] - h), mode="replicate") if cell != (h, w) else images
    board = torch.zeros(down * across, c, *cell, dtype=torch.uint8)
    board[:n] = padded.byte()
    sheet = board.view(down, across, c, *cell).permute(0, 3, 1, 4, 2).reshape(down * cell[0], across * cell[1], c)
    return np.ascontiguousarray((sheet[..., 0] if c == 1 else sheet).numpy())


def _encoded(sheet: np.ndarray, level: Level) -> tuple[str, bytes]:
    """Its MIME type and the file."""
    if level.quality == 100:
        return "image/png", png(sheet)
    from PIL import Image

    kind, out = encoder(), io.BytesIO()
    options = {"method": 4} if kind == "webp" else {"optimize": True}
    Image.fromarray(sheet).save(out, kind.upper(), quality=level.quality, **options)
    return f"image/{kind}", out.getvalue()


def png(image: np.ndarray) -> bytes:
    """Bytes [h, w] (gray) or [h, w, 3] as a PNG file, each row as it is or less the one above, whichever is smaller.

    >>> png(np.zeros((2, 3), np.uint8))[:4]
    b'\\x89PNG'
    """
    h, w = image.shape[:2]
    rows = image.reshape(h, -1)
    up = rows.copy()
    up[1:] -= rows[:-1]  # bytes wrap around, as the format wants
    packed = []
    for kind, lines in ((0, rows), (2, up)):
        marked = np.concatenate([np.full((h, 1), kind, np.uint8), lines], 1)
        packed.append(zlib.compress(marked.tobytes(), 9))

    def chunk(name: bytes, data: bytes) -> bytes:
        """Length, name, what is in it, and a checksum."""
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    # 8 bits a channel; colour type 2 is RGB, 0 is gray.
    head = struct.pack(">IIBBBBB", w, h, 8, 2 if image.ndim == 3 else 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", min(packed, key=len)) + chunk(b"IEND", b"")
