"""Anisotropy directions of LeNet and of ResNet18, both with GELU, as pictures: what each finds easy before training.

    python -m benchmarks.studies.directions [--count 8] [--tol 1e-3]

Ortiz-Jiménez et al. 2021, appendix C.2, figure 1. No data are needed; ResNet18 takes some minutes of one core. Writes
benchmarks/results/directions.json and docs/assets/anisotropy.png.
"""

import argparse
import time

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import nn

import tangency as tg
from benchmarks.record import RESULTS, ROOT, save
from tangency.experiments.learned import TITLES, learner

SHAPES = {"lenet": (1, 32, 32), "resnet18": (3, 32, 32)}


def drawn(found: dict[str, tg.studies.Anisotropy]) -> Figure:
    """Two rows for each network: the directions, and the magnitude of their Fourier transforms."""
    count = min(len(v) for v in found.values())
    figure = Figure(figsize=(1.1 * count, 5.0), layout="constrained")
    axes = figure.subplots(2 * len(found), count)
    for row, (name, result) in enumerate(found.items()):
        for i, image in enumerate(result.directions[:count].double()):
            most = float(image.abs().max())
            above, below = axes[2 * row, i], axes[2 * row + 1, i]
            if len(image) == 3:
                above.imshow((image / (2 * most) + 0.5).permute(1, 2, 0).numpy())
            else:
                above.imshow(image[0].numpy(), cmap="RdBu", vmin=-most, vmax=most)
            power = torch.fft.fft2(image).abs().square().sum(0)
            below.imshow(torch.fft.fftshift(power.sqrt()).numpy(), cmap="magma")
            above.set_title(f"{TITLES[name] + ', ' if i == 0 else ''}u_{i}", fontsize=8)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
    return figure


def main() -> None:
    """The directions of both networks, their times, and one picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=8)
    parser.add_argument("--tol", type=float, default=1e-3, help="of ResNet18's directions")
    args = parser.parse_args()
    found, record = dict[str, tg.studies.Anisotropy](), dict[str, object]()
    for name, shape in SHAPES.items():
        model = learner(name, shape, seed=0, activation=nn.GELU)
        derivative = tg.studies.MixedDerivative(model, shape)
        begin = time.process_time()
        derivative.gram_times(torch.randn(derivative.size[1], 2))
        product = (time.process_time() - begin) / 2
        begin = time.process_time()
        # LeNet is small: to the default tolerance.
        found[name] = tg.studies.anisotropy(model, shape, args.count, tol=args.tol if name == "resnet18" else None)
        record[name] = {
            "p, d": derivative.size,
            "processor seconds of MᵀM v": product,
            "processor seconds": time.process_time() - begin,
            "σ": found[name].values.tolist(),
            "residual": found[name].residual,
        }
        print(name, record[name], flush=True)
    path = ROOT / "docs" / "assets" / "anisotropy.png"
    drawn(found).savefig(path, dpi=70)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # a third of the bytes
    command = f"python -m benchmarks.studies.directions --count {args.count} --tol {args.tol:g}"
    save({"directions": record}, RESULTS / "directions.json", command)


if __name__ == "__main__":
    main()
