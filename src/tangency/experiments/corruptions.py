"""Mild corruptions of images, those of Hendrycks & Dietterich (2019) at their least severity for CIFAR-10."""

import io
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .._base.extras import needed

# Deviation of the noise, width of the blur in pixels, part of the contrast that stays, JPEG's quality.
NOISE, BLUR, CONTRAST, QUALITY = 0.04, 0.4, 0.75, 80


def noise(x: Tensor, seed: int = 0) -> Tensor:
    """Gaussian noise on every pixel, cut to [0, 1]."""
    draw = torch.Generator().manual_seed(seed)
    return (x + NOISE * torch.randn(x.shape, generator=draw)).clamp(0, 1)


def blur(x: Tensor, seed: int = 0) -> Tensor:
    """A Gaussian blur, edges mirrored."""
    weights = torch.tensor([np.exp(-((k / BLUR) ** 2) / 2) for k in (-2, -1, 0, 1, 2)], dtype=x.dtype)
    weights = weights / weights.sum()
    c = x.shape[1]
    wide = F.pad(x, (2, 2, 2, 2), mode="reflect")
    rows = F.conv2d(wide, weights.view(1, 1, 5, 1).expand(c, 1, 5, 1), groups=c)
    return F.conv2d(rows, weights.view(1, 1, 1, 5).expand(c, 1, 1, 5), groups=c)


def contrast(x: Tensor, seed: int = 0) -> Tensor:
    """Towards the mean of each image and channel."""
    mean = x.mean((2, 3), keepdim=True)
    return (mean + CONTRAST * (x - mean)).clamp(0, 1)


def jpeg(x: Tensor, seed: int = 0) -> Tensor:
    """Compressed by JPEG and read again."""
    with needed("PIL", "JPEG compression"):
        from PIL import Image

    out = []
    for pixels in (x * 255).round().byte().permute(0, 2, 3, 1).numpy():
        file = io.BytesIO()
        Image.fromarray(pixels.squeeze()).save(file, "JPEG", quality=QUALITY)
        back = np.asarray(Image.open(file), dtype=np.float32) / 255
        out.append(torch.from_numpy(back.reshape(pixels.shape)).permute(2, 0, 1))
    return torch.stack(out)


CORRUPTIONS: Mapping[str, Callable[[Tensor, int], Tensor]] = {
    "noise": noise, "blur": blur, "contrast": contrast, "jpeg": jpeg,
}  # fmt: skip
