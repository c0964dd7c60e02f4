"""Embeddings by an ImageNet ResNet-50, from the files of its TensorFlow.js model (Keras weights), in plain torch.

    python -m benchmarks.studies.resnet50 [--weights FOLDER] [--cache FOLDER]

prints what it sees in scikit-learn's two pictures and in CIFAR-10. Images are what Keras's `preprocess_input` makes of
them: BGR, 0 to 255, less the means of ImageNet.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import tangency as tg
from benchmarks.record import pictures

WEIGHTS, CACHE = Path("/work/data/resnet50"), Path("/work/cache-active")
EPSILON = 1e-3  # of its batch normalisations
MEANS = (103.939, 116.779, 123.68)
BLOCKS = {"2": "abc", "3": "abcd", "4": "abcdef", "5": "abc"}


def read(folder: Path) -> dict[str, Tensor]:
    """The weights by their names."""
    (group,) = json.loads((folder / "model.json").read_text(encoding="utf-8"))["weightsManifest"]
    data = bytearray().join((folder / path).read_bytes() for path in group["paths"])
    found, at = {}, 0
    for entry in group["weights"]:
        assert entry["dtype"] == "float32", entry
        assert "quantization" not in entry, entry
        count = torch.Size(entry["shape"]).numel()
        values = torch.frombuffer(data, dtype=torch.float32, count=count, offset=at)
        found[entry["name"]] = values.reshape(entry["shape"])
        at += 4 * count
    assert at == len(data), (at, len(data))
    return found


class ResNet50:
    """Images [n, 3, h, w] in [0, 1], RGB -> embeddings [n, 2048]; `logits` of those, 1,000 classes."""

    def __init__(self, folder: Path) -> None:
        self.weights = read(folder)
        self.folded = {n[:-7]: self.fold(n[:-7]) for n in self.weights if n.endswith("/kernel") and n[:2] != "fc"}

    def fold(self, name: str) -> tuple[Tensor, Tensor]:
        """A convolution and the batch normalisation after it as one convolution."""
        w = self.weights
        norm = "bn_conv1" if name == "conv1" else "bn" + name.removeprefix("res")
        scale = w[f"{norm}/gamma"] / (w[f"{norm}/moving_variance"] + EPSILON).sqrt()
        kernel = w[f"{name}/kernel"].permute(3, 2, 0, 1) * scale[:, None, None, None]
        bias = (w[f"{name}/bias"] - w[f"{norm}/moving_mean"]) * scale + w[f"{norm}/beta"]
        return kernel.contiguous(memory_format=torch.channels_last), bias

    def conv(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        """One of them; all but the first keep the side."""
        kernel, bias = self.folded[name]
        return F.conv2d(x, kernel, bias, stride, padding=kernel.shape[-1] // 2)

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        x = 255 * x.flip(1) - torch.tensor(MEANS)[:, None, None]
        x = self.conv(x.contiguous(memory_format=torch.channels_last), "conv1", 2).relu_()
        x = F.max_pool2d(x, 3, 2, 1)
        for stage, names in BLOCKS.items():
            for name in names:
                stem, stride = f"res{stage}{name}_branch", 2 if name == "a" and stage != "2" else 1
                z = self.conv(x, f"{stem}2a", stride).relu_()
                z = self.conv(self.conv(z, f"{stem}2b").relu_(), f"{stem}2c")
                x = (z + (self.conv(x, f"{stem}1", stride) if name == "a" else x)).relu_()
        return x.mean((2, 3))

    def logits(self, z: Tensor) -> Tensor:
        """Of the 1,000 classes of ImageNet."""
        return z @ self.weights["fc1000/kernel"] + self.weights["fc1000/bias"]


def embeddings(images: Tensor, name: str, weights: Path, cache: Path, side: int = 128) -> Tensor:
    """Of small images, enlarged; kept in `cache`, a thousand in a file."""
    cache.mkdir(parents=True, exist_ok=True)
    net, found = None, []
    for number, part in enumerate(images.split(1000)):
        file = cache / f"{name}-{side}-{number}-{len(part)}.pt"
        if not file.exists():
            net = net or ResNet50(weights)
            large = (F.interpolate(few, size=side, mode="bicubic", align_corners=False) for few in part.split(25))
            torch.save(torch.cat([net(x.clamp(0, 1)) for x in large]), file)
            print(file, flush=True)
        found.append(torch.load(file))
    return torch.cat(found)


def main() -> None:
    """Is it the right network?"""
    from sklearn.datasets import load_sample_images
    from sklearn.neighbors import KNeighborsClassifier

    parser = argparse.ArgumentParser()
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--cache", type=Path, default=CACHE)
    parser.add_argument("--data", default="/work/data")
    args = parser.parse_args()
    net = ResNet50(args.weights)
    for name, image in zip(("china", "flower"), load_sample_images().images, strict=True):
        x = torch.tensor(image).permute(2, 0, 1)[None, :, 13:413, 120:520] / 255
        p = net.logits(net(F.interpolate(x, size=224, mode="bilinear", antialias=True))).softmax(1)[0]
        print(name, [(int(k), round(float(p[k]), 3)) for k in p.argsort(descending=True)[:5]])
    parts = tg.datasets.cifar10(args.data)
    pool, test = parts.train.take(2000, seed=0), parts.test.take(1000, seed=0)
    z = embeddings(pictures(test), "test", args.weights, args.cache)
    print("most frequent ImageNet class of each class of CIFAR-10, and how often")
    for c in range(10):
        top = net.logits(z[test.y == c]).argmax(1)
        print(parts.train.classes[c], int(top.mode().values), f"{float((top == top.mode().values).float().mean()):.0%}")
    x = embeddings(pictures(pool), "pool", args.weights, args.cache)
    knn = KNeighborsClassifier(10).fit(x, pool.y)
    print("10 nearest neighbours:", knn.score(z, test.y))


if __name__ == "__main__":
    main()
