"""`tangency reproduce probing` on a GPU within a budget of seconds, and its network in 16 bits, in two files.

    python -m benchmarks.studies.probing_gpu --data FOLDER --out OUT --samples 10000,50000 --budget 300

Needs torch, numpy and cifar-10-batches-bin/ in FOLDER. Every layer is written when it is done, so that a second call
goes on. `--tiny` tries it out on a CPU: a narrow network, few images. `--merge OUT --save FILE` puts the two files of
the network together again, on any machine. `--network FILE --places "block 6,block 7"` probes some places of a network
that is there, and adds them to OUT/places.json. `--picture RECORD…` draws docs/assets/probing*.png of such records.
"""

import argparse
import json
import signal
import time
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from benchmarks.record import ROOT
from tangency.datasets import TrainTest
from tangency.experiments import probing
from tangency.experiments.surrogate_table2 import cifar
from tangency.experiments.table import Kept, Options, Trainings
from tangency.models import accuracy, resnet18

HALVES = ("resnet18_cifar10_a.pt", "resnet18_cifar10_b.pt")


def main() -> None:
    """Run, or put the network together."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--samples", default="10000")
    parser.add_argument("--test", type=int)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--budget", type=float, default=300)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--merge", type=Path)
    parser.add_argument("--save", type=Path)
    parser.add_argument("--network", type=Path)
    parser.add_argument("--places", default="block 6,block 7,block 8,pooled,logits")
    parser.add_argument("--picture", type=Path, nargs="+")
    args = parser.parse_args()
    if args.picture is not None:
        draw(args.picture)
    elif args.merge is not None:
        torch.save(merged(args.merge), args.save)
    elif args.network is not None:
        measure_places(args)
    else:
        measure(args)


def measure_places(args: argparse.Namespace) -> None:
    """Some places of a network, as many as the budget allows."""
    learned = Trainings(samples=int(args.samples), test=args.test)
    options = Options(data=args.data, learned=learned, progress=False)
    _, data = probing.probed_data(options)
    model = resnet18()
    model.load_state_dict(torch.load(args.network, map_location="cpu", weights_only=True))
    model.to(options.device).eval()
    args.out.mkdir(parents=True, exist_ok=True)
    rows: dict[str, object] = {}
    begin = time.perf_counter()
    for place in probing.RESNET:
        if place.title in args.places.split(",") and time.perf_counter() - begin < args.budget:
            rows[f"{place.title}, {len(data.train)} and {len(data.test)} images"] = probing.measure_layer(
                model, data, place, options
            )
            (args.out / "places.json").write_text(json.dumps({"rows": rows}) + "\n", encoding="utf-8")
            print(f"{place.title}: {time.perf_counter() - begin:.0f} s so far", flush=True)


def draw(files: list[Path]) -> None:
    """Accuracies by the number of components: a panel for each classifier, a line for each layer of all files."""
    import matplotlib.pyplot as plt

    rows = {key: row for file in files for key, row in json.loads(file.read_text(encoding="utf-8"))["rows"].items()}
    titles = {"neighbours": "nearest neighbours", "centres": "nearest class centre", "svm": "linear SVM"}
    figure, panels = plt.subplots(1, 3, figsize=(12, 3.8), layout="constrained", sharey=True)
    for panel, (name, title) in zip(panels, titles.items(), strict=True):
        for k, (key, row) in enumerate(rows.items()):
            if name in row["accuracy"]:
                color, style = plt.get_cmap("viridis")(k / len(rows)), "-" if "10000" in key else "--"
                shown = [100 * v for v in row["accuracy"][name]]
                panel.plot(row["dims"], shown, style, color=color, marker=".", ms=4, lw=1, label=key.partition(",")[0])
        panel.set(title=title, xscale="log", xlabel="principal components")
    panels[0].set(ylabel="test accuracy, %")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8)
    figure.savefig(ROOT / "docs" / "assets" / "probing.png", dpi=110)


def merged(folder: Path) -> dict[str, Tensor]:
    """The state dict in single precision."""
    parts = [torch.load(folder / name, map_location="cpu", weights_only=True) for name in HALVES]
    return {k: v.float() if v.is_floating_point() else v for part in parts for k, v in part.items()}


def measure(args: argparse.Namespace) -> None:
    """Train, write the network, probe with each number of samples, as far as the budget goes."""
    if args.tiny:
        shrink()
    begin = time.perf_counter()
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGALRM, spent)
    signal.setitimer(signal.ITIMER_REAL, args.budget)
    for k, n in enumerate(map(int, args.samples.split(","))):
        learned = Trainings(samples=n, test=args.test, epochs=args.epochs)
        options = Options(data=args.data, out=args.out, learned=learned, progress=False)
        try:
            if k == 0:
                export(options, args.out)
                print(f"trained after {time.perf_counter() - begin:.0f} s", flush=True)
            table = probing.reproduce_probing(options)
        except TimeoutError:
            print(f"{n} samples: {args.budget:g} s are spent; the layers that are done are in {args.out}", flush=True)
            return
        record = {**table.to_dict(), "seconds": time.perf_counter() - begin}
        (args.out / f"probing-{n}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(f"{table.table()}\n{record['seconds']:.0f} s so far", flush=True)


def spent(*_: object) -> NoReturn:
    """The budget is spent."""
    raise TimeoutError


def export(options: Options, out: Path) -> None:
    """The network, trained if it is not there, in 16 bits and two files, with the accuracy that these have."""
    whole, _ = probing.probed_data(options)
    kept = Kept(options, "probing", {"recipe": probing.recipe(options)})
    model = probing.trained(options, kept, whole.train)
    right = accuracy(model, whole.test)
    state = {k: v.half() if v.is_floating_point() else v for k, v in model.cpu().state_dict().items()}
    names, sizes = list(state), torch.tensor([v.numel() for v in state.values()]).cumsum(0)
    half = int((sizes <= sizes[-1] / 2).sum())
    for name, part in zip(HALVES, (names[:half], names[half:]), strict=True):
        torch.save({k: state[k].clone() for k in part}, out / name)
    model.load_state_dict(merged(out))
    facts = {"accuracy": right, "accuracy of the files": accuracy(model.to(options.device), whole.test)}
    (out / "resnet18_cifar10.json").write_text(
        json.dumps(facts | {"recipe": repr(probing.recipe(options))}) + "\n", encoding="utf-8"
    )
    print(facts, flush=True)


def shrink() -> None:
    """A network and data with which all of this takes seconds."""

    def few(options: Options) -> TrainTest:
        """The first images."""
        train, test = cifar(options)
        return TrainTest(train.take(300), test.take(100))

    setattr(probing, "cifar", few)  # noqa: B010  # mypy knows that these names are not exported
    setattr(probing, "resnet18", partial(resnet18, width=4))  # noqa: B010


if __name__ == "__main__":
    main()
