"""Random changes of images that keep their class."""

import torch
from torch import Tensor

from .._base.types import Float
from ..errors import InputError


def flip_crop(
    x: Float[Tensor, "n c h w"], generator: torch.Generator | None = None, *, pad: int = 4
) -> Float[Tensor, "n c h w"]:
    """Each image mirrored with probability ½, then a random crop of its own size out of itself padded by reflection.

    All at once on the images' device: one gather, without a loop over the images and without the padded images.

    >>> flip_crop(torch.randn(5, 3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([5, 3, 32, 32])
    """
    n, c, h, w = x.shape
    if not 0 <= pad < min(h, w):
        raise InputError(f"the images are {h}x{w}, pad={pad}; padding by reflection needs less than their size.")
    down, right = torch.randint(-pad, pad + 1, (2, n, 1), generator=generator, device=x.device)
    mirrored = torch.randint(0, 2, (n, 1), generator=generator, device=x.device).bool()
    rows = reflect(down + torch.arange(h, device=x.device), h)
    columns = reflect(right + torch.arange(w, device=x.device), w)
    columns = torch.where(mirrored, w - 1 - columns, columns)
    sample = torch.arange(n, device=x.device).reshape(n, 1, 1, 1)
    channel = torch.arange(c, device=x.device).reshape(1, c, 1, 1)
    return x[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]


def reflect(index: Tensor, size: int) -> Tensor:
    """Indices beyond 0…size - 1 mirrored back at the first and at the last."""
    return size - 1 - (size - 1 - index.abs()).abs()
