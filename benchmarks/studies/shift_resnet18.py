"""CIFAR-10 against mildly corrupted CIFAR-10, as the layers of a trained ResNet18 see them; and against more of itself.

    python -m benchmarks.studies.shift_resnet18 --data DATA --network NET --images 1000

DATA holds CIFAR-10 in its binary version, NET the weights of `tg.models.resnet18` (`benchmarks.studies.probing_gpu`
trains and exports them). Test images, the first half against the second half, as it is and corrupted as in
`tangency reproduce shift`; layers by their means over positions. Writes benchmarks/results/shift_resnet18.json.
"""

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tangency as tg
from benchmarks.record import RESULTS, pictures, save
from benchmarks.studies.two_samples import load
from tangency.experiments.corruptions import CORRUPTIONS
from tangency.representations import layer_outputs

LAYERS = ("body.blocks.0", "body.blocks.3", "body.blocks.7")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--network", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    network, what = load(args)
    _, test = tg.datasets.cifar10(args.data)
    source, other = (pictures(part) for part in test.take(2 * args.images, seed=0).split(0.5))
    seen = partial(layer_outputs, network, layers=list(LAYERS), pool="mean", progress=False)
    known, rows = seen(source), dict[str, Any]()
    for name, corrupt in {"unchanged": lambda x, seed: x, **CORRUPTIONS}.items():
        asked = seen(corrupt(other, 0))
        for layer in LAYERS:
            found = tg.shift(None, known[layer], asked[layer], progress=False)
            c = found.classifier
            row = {"p": found.p, "p MMD": found.mmd.p, "p classifier": c.p, "AUROC": c.auc.value}
            rows[f"{name}, {layer.removeprefix('body.')}"] = row
            print(name, layer, {k: round(v, 4) for k, v in row.items()}, flush=True)
    command = f"python -m benchmarks.studies.shift_resnet18 --images {args.images}"
    save({"network": what, "images": len(source), "rows": rows}, RESULTS / "shift_resnet18.json", command)


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
