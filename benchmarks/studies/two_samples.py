"""Two-sample tests and outlier scores, measured: the level, power on perturbed CIFAR-10, AUROC on other images.

    python -m benchmarks.studies.two_samples level
    python -m benchmarks.studies.two_samples series
    python -m benchmarks.studies.two_samples train --data DATA --save NET
    python -m benchmarks.studies.two_samples power --data DATA --network NET
    python -m benchmarks.studies.two_samples outliers --data DATA --network NET
    python -m benchmarks.studies.two_samples picture

DATA holds the official files of CIFAR-10, MNIST and Fashion-MNIST. `train` trains a small network on eight of the ten
classes, on a CPU in minutes. NET is what it saved, or the weights of `tg.models.resnet18` trained on all ten, on images
standardised as in `tangency reproduce` (a state dict, by itself or under "model" or "state"). Each part writes
benchmarks/results/two_samples_PART.json (with `--name` appended).
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, ROOT, pictures, save
from tangency.distributions import Outliers, Power
from tangency.distributions.power import Test
from tangency.experiments.surrogate_table2 import MEAN, STD

D = tg.distributions
F64 = torch.float64
HELD_OUT_CLASSES = ("ship", "truck")  # the last two, chosen before anything was measured


# ---- networks -------------------------------------------------------------------------------------------------------


class Network(nn.Module):
    """A network with its input standardised: by 0.5 and 0.25, or as those of `tangency reproduce` were trained."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.start, self.scale = ((0.5,) * 3, (0.25,) * 3) if isinstance(body, nn.Sequential) else (MEAN, STD)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images in [0, 1]."""
        mean, std = (x.new_tensor(v)[:, None, None] for v in (self.start, self.scale))
        return self.body((x - mean) / std)


def small(outputs: int) -> nn.Module:
    """Three convolutions with stride 2: a tenth of the work of `tg.models.small_cnn`, so that a CPU trains it."""
    layers: list[nn.Module] = []
    for i, o in ((3, 24), (24, 48), (48, 64)):
        layers += [nn.Conv2d(i, o, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(1024, 64), nn.ReLU(), nn.Linear(64, outputs))


def train(args: argparse.Namespace) -> None:
    """On images of eight classes."""
    known, test = tg.datasets.cifar10(args.data / "cifar-10-batches-bin")
    names = [c for c in known.classes if c not in HELD_OUT_CLASSES]
    part = known.only(*names).take(args.images, seed=0)
    model = tg.models.initialized(lambda: Network(small(len(names))), seed=0)
    begin = time.process_time()
    asked = test.only(*names)
    past = tg.models.fit(
        model, part, epochs=args.epochs, batch=64, lr=1e-3, optimizer="adam", schedule="onecycle", augment="flip_crop"
    )
    found = tg.models.accuracy(model, asked.x, asked.y)
    print(f"test accuracy {found:.3f}, training loss {float(past.loss[-1]):.3f}, {time.process_time() - begin:.0f} s")
    torch.save({"state": model.body.state_dict(), "outputs": len(names), "accuracy": found}, args.save)


def load(args: argparse.Namespace) -> tuple[Network, str]:
    """The network, and what it is."""
    held = torch.load(args.network, map_location=args.device, weights_only=True)
    state = next((held[k] for k in ("state", "model", "state_dict") if k in held), held)
    if "accuracy" in held and "outputs" in held:
        body, what = small(held["outputs"]), f"small CNN, {held['outputs']} classes, accuracy {held['accuracy']:.3f}"
    else:
        body, what = tg.models.resnet18(10), "ResNet18, 10 classes"
    body.load_state_dict(state)
    return Network(body).to(args.device).eval().requires_grad_(requires_grad=True), what


def untrained(network: Network) -> Network:
    """The same network with fresh weights."""
    is_small = isinstance(network.body, nn.Sequential)
    return tg.models.initialized(lambda: Network(small(10) if is_small else tg.models.resnet18(10)), seed=1).eval()


def hidden(network: Network, x: Tensor) -> Tensor:
    """The last hidden layer."""
    return tg.conjugate_kernel(network, bias=False).features(x)


def in_parts(f: Callable[[Tensor], Tensor], x: Tensor, step: int = 250) -> Tensor:
    """f of some samples at a time."""
    with torch.no_grad():
        return torch.cat([f(part) for part in x.split(step)])


# ---- level ----------------------------------------------------------------------------------------------------------


def level(args: argparse.Namespace) -> None:
    """Rejections at 5 % where both samples come from one source: images of CIFAR-10; series for the wild bootstrap."""
    images = cifar_test(args)[:1500]
    network = untrained(Network(small(10)))
    pixels = images.flatten(1)
    phi = in_parts(lambda x: tg.projected(tg.pseudo_ntk(network), dim=512, seed=0).features(x, progress=False), images)
    # Looked at once, not in every test.
    gauss, ntk = (tg.linalg.matrix.square(k) for k in (tg.gaussian(pixels)(pixels), (phi @ phi.T).double()))
    numbers = torch.arange(len(images))

    def classified(statistic: str, machine: str) -> Callable[[Tensor, Tensor, int], D.ClassifierTest]:
        return lambda a, b, seed: D.classifier_test(
            ntk, a, b, statistic=statistic, machine=machine, draws=199, seed=seed, progress=False
        )

    tests: dict[str, Test] = {
        "MMD, Gaussian": gauss,
        "MMD, NTK": ntk,
        "MMD biased, NTK": lambda a, b, s: D.mmd(ntk, a, b, biased=True, draws=199, seed=s, progress=False),
        "MMD by features": lambda a, b, s: D.mmd_features(phi[a], phi[b], draws=199, seed=s, progress=False),
        "wild bootstrap, NTK": lambda a, b, s: D.mmd(
            ntk, a, b, test="wild bootstrap", length=1.0, draws=199, seed=s, progress=False
        ),
        "ridge, AUC": classified("auc", "ridge"),
        "ridge, accuracy": classified("accuracy", "ridge"),
        "ridge, scores": classified("scores", "ridge"),
        "logistic, AUC": classified("auc", "logistic"),
    }
    found = D.level(tests, numbers, sizes=args.sizes or [15, 40, 100], repeats=args.repeats)
    record: dict[str, object] = {"repeats": args.repeats, "cases": rates(found), "all within 3-7 %": found.holds()}
    print(found.table(), found.sentence(), sep="\n", flush=True)
    record["what"] = "images of CIFAR-10's test set (1500); rejected at 5 %, [rate, low, high]; NTK of a random CNN"
    finish(record, args)


def series(args: argparse.Namespace) -> None:
    """The wild bootstrap on series that remember, and what permutations make of them."""
    kernel, generator = tg.gaussian(bandwidth=1.5), torch.Generator().manual_seed(0)
    found: dict[str, object] = {}
    for n in args.sizes or [100, 200, 400]:
        for memory in (0.0, 0.5):
            count = {"wild bootstrap": 0, "permutation": 0}
            for seed in range(args.repeats):
                both = torch.cat([remembering(n, memory, generator) for _ in range(2)])
                gram = kernel(both)
                for test in count:
                    p = D.mmd(gram, range(n), range(n, 2 * n), test=test, draws=199, seed=seed, progress=False).p
                    count[test] += p <= 0.05
            found[f"n = {n}, memory {memory}"] = {k: v / args.repeats for k, v in count.items()}
            print(n, memory, found[f"n = {n}, memory {memory}"], flush=True)
        finish({"rejected at 5 %": found, "repeats": args.repeats, "kernel": "Gaussian, two numbers a step"}, args)


def remembering(n: int, memory: float, generator: torch.Generator) -> Tensor:
    """A stationary series of two numbers with this correlation from one to the next."""
    noise = torch.randn(n, 2, generator=generator, dtype=F64)
    made = noise.clone()
    for t in range(1, n):
        made[t] = memory * made[t - 1] + (1 - memory**2) ** 0.5 * noise[t]
    return made


# ---- power ----------------------------------------------------------------------------------------------------------


def blurred(x: Tensor, sigma: float) -> Tensor:
    """A Gaussian blur of 5 × 5."""
    t = torch.arange(-2.0, 3.0, device=x.device)
    w = (-(t**2) / (2 * sigma**2)).exp()
    w = (w / w.sum()).to(x)
    plane = (w[:, None] * w).expand(3, 1, 5, 5)
    return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), plane, groups=3)


def noisy(x: Tensor, size: float) -> Tensor:
    """Gaussian noise, kept within [0, 1]."""
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(5)).to(x)
    return (x + size * noise).clamp(0, 1)


# How mild each is was chosen once, so that no test would reject everything or nothing at all sizes.
PERTURBED: dict[str, Callable[[Tensor], Tensor]] = {
    "nothing": lambda x: x,
    "noise 0.03": lambda x: noisy(x, 0.03),
    "blur 0.5": lambda x: blurred(x, 0.5),
    "contrast 0.8": lambda x: (x - 0.5) * 0.8 + 0.5,
    "red + 0.04": lambda x: (x + x.new_tensor([0.04, 0, 0])[:, None, None]).clamp(0, 1),
}


def power(args: argparse.Namespace) -> None:
    """Kernels of the network beside the median-heuristic Gaussian, images against perturbed other ones."""
    network, what = load(args)
    images = cifar_test(args).to(args.device)
    count = args.images if args.images < 5000 else 1000
    first, other = images[:count], images[count : 2 * count]
    trained, fresh = (
        tg.projected(tg.pseudo_ntk(net), dim=args.dim, seed=0) for net in (network, untrained(network).to(args.device))
    )
    maps: dict[str, Callable[[Tensor], Tensor]] = {
        "CK, trained": lambda x: hidden(network, x),
        "NTK, trained": lambda x: trained.features(x, progress=False),
        "NTK, untrained": lambda x: fresh.features(x, progress=False),
    }
    of_first = {name: in_parts(f, first) for name, f in maps.items()}
    record: dict[str, object] = {"network": what, "images of each": count, "sizes": args.sizes or [25, 50, 100, 200]}
    for name, change in PERTURBED.items():
        changed = change(other)
        pixels = torch.cat([first, changed]).flatten(1)
        tests: dict[str, Tensor] = {"Gaussian, pixels": tg.gaussian(pixels)(pixels)}
        for kind, f in maps.items():
            phi = torch.cat([of_first[kind], in_parts(f, changed)]).double()
            tests[f"{kind}, Gaussian"] = tg.gaussian(phi)(phi)
            if kind == "NTK, trained":
                tests[f"{kind}, cosine"] = tg.linalg.matrix.square(phi @ phi.T).cosine().dense()
        found = D.power(tests, first, other, sizes=args.sizes or [25, 50, 100, 200], repeats=args.repeats)
        print(name, found.table(), sep="\n", flush=True)
        record[name] = rates(found)
        finish(record, args)


def rates(found: Power) -> dict[str, object]:
    """By test and size."""
    return {name: dict(zip(map(str, found.sizes), found.rates(name), strict=True)) for name in found.p}


# ---- outliers -------------------------------------------------------------------------------------------------------


def outliers(args: argparse.Namespace) -> None:
    """Every score on MNIST, Fashion-MNIST and, where the network has not seen them, held-out classes of CIFAR-10."""
    network, what = load(args)
    known, test = tg.datasets.cifar10(args.data / "cifar-10-batches-bin")
    eight = "8 classes" in what
    names = [c for c in known.classes if not (eight and c in HELD_OUT_CLASSES)]
    train_part, mine = known.only(*names).take(args.images, seed=0), test.only(*names).take(2000, seed=0)
    others = {
        "MNIST": as_colour(tg.datasets.mnist(args.data / "mnist")[1]),
        "Fashion-MNIST": as_colour(tg.datasets.fashion_mnist(args.data / "fashion-mnist")[1]),
    }
    if eight:
        others[f"CIFAR-10's {' and '.join(HELD_OUT_CLASSES)}"] = pictures(test.only(*HELD_OUT_CLASSES))[:1000]
    images = {"known": pictures(train_part), "fresh": pictures(mine)[:1000], "asked": pictures(mine)[1000:]}
    features = {k: in_parts(lambda x: hidden(network, x.to(args.device)), x).cpu() for k, x in images.items()}
    logits = {k: in_parts(lambda x: network(x.to(args.device)), x).cpu() for k, x in images.items()}
    record: dict[str, object] = {"network": what, "known": len(images["known"]), "fresh": 1000, "asked": "1000 + 1000"}
    for name, strange in others.items():
        phi = in_parts(lambda x: hidden(network, x.to(args.device)), strange[:1000]).cpu()
        out = in_parts(lambda x: network(x.to(args.device)), strange[:1000]).cpu()
        asked, is_strange = torch.cat([features["asked"], phi]), torch.arange(1000 + len(phi)) >= 1000
        found = {**by_features(features, asked, train_part.y), **by_kernels(features, asked)}
        rows: dict[str, object] = {}
        for score, result in found.items():
            rows[score] = summary(result, is_strange)
        confidence = torch.cat([logits["asked"], out]).softmax(1).amax(1)
        base = D.auroc(-confidence, is_strange)
        rows["largest softmax probability"] = {"AUROC": [base.value, base.low, base.high]}
        energy = D.auroc(-torch.cat([logits["asked"], out]).logsumexp(1), is_strange)
        rows["energy"] = {"AUROC": [energy.value, energy.low, energy.high]}
        pixels = tg.gaussian(images["known"][:2000])
        plain = D.outliers(
            pixels,
            images["known"][:2000],
            torch.cat([images["asked"], strange[:1000]]),
            score="density",
            fresh=images["fresh"],
            progress=False,
        )
        rows["density, Gaussian on pixels"] = summary(plain, is_strange)
        rows["scikit-learn's OneClassSVM on the same features"] = svm(features["known"][:2000], asked, is_strange)
        record[name] = rows
        for score, row in rows.items():
            print(name, score, row, flush=True)
        finish(record, args)


def by_features(features: dict[str, Tensor], asked: Tensor, labels: Tensor) -> dict[str, Outliers]:
    """All scores by features."""
    known, fresh = features["known"], features["fresh"]
    found = {kind: D.outliers_features(known, asked, score=kind, fresh=fresh) for kind in ("density", "neighbours")}
    found["mahalanobis, one class"] = D.outliers_features(known, asked, fresh=fresh)
    for kind in ("mahalanobis", "relative mahalanobis"):
        found[f"{kind}, classes"] = D.outliers_features(known, asked, score=kind, labels=labels, fresh=fresh)
    return found


def by_kernels(features: dict[str, Tensor], asked: Tensor) -> dict[str, Outliers]:
    """All scores by the Gaussian kernel on the features of 2,000 known samples."""
    known = features["known"][:2000]
    kernel = tg.gaussian(known)
    found = {}
    for kind in ("mahalanobis", "one class", "density"):
        made = D.outliers(kernel, known, asked, score=kind, fresh=features["fresh"], progress=False)
        found[f"{kind}, Gaussian on features"] = made
    return found


def summary(found: Outliers, strange: Tensor) -> dict[str, object]:
    """AUROC, and how many of both kinds lie above the threshold for 5 %."""
    area = found.auroc(strange)
    above = found.scores > found.threshold(0.05)
    return {
        "AUROC": [area.value, area.low, area.high],
        "flagged at 5 %: known": float(above[~strange].double().mean()),
        "strange": float(above[strange].double().mean()),
    }


def svm(known: Tensor, asked: Tensor, strange: Tensor) -> dict[str, object]:
    """scikit-learn's, with the same bandwidth."""
    from sklearn.svm import OneClassSVM

    gamma = 1 / (2 * tg.gaussian(known).bandwidth ** 2)
    fitted = OneClassSVM(gamma=gamma, nu=0.1).fit(known.numpy())
    area = D.auroc(-torch.from_numpy(fitted.score_samples(asked.numpy())), strange)
    return {"AUROC": [area.value, area.low, area.high]}


# ---- what the parts share -------------------------------------------------------------------------------------------


def cifar_test(args: argparse.Namespace) -> Tensor:
    """The test images in a random order."""
    images = pictures(tg.datasets.cifar10(args.data / "cifar-10-batches-bin")[1])
    return images[torch.randperm(len(images), generator=torch.Generator().manual_seed(0))]


def as_colour(data: tg.datasets.Labelled) -> Tensor:
    """1 × 28 × 28 as 3 × 32 × 32."""
    return F.pad(pictures(data)[:1000], (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous()


def finish(record: dict[str, object], args: argparse.Namespace) -> None:
    """Write what there is so far."""
    command = f"python -m benchmarks.studies.two_samples {args.part} --data DATA"
    command += "" if args.network is None else " --network NET"
    command += f" --repeats {args.repeats} --images {args.images} --dim {args.dim}"
    save(dict(record), RESULTS / f"two_samples_{args.part}{args.name}.json", command)


def picture(args: argparse.Namespace) -> None:
    """What was rejected at the largest size, and AUROC of every score: docs/assets/two_samples.png."""
    found, scored = (
        json.loads((RESULTS / f"two_samples_{p}{args.name}.json").read_text(encoding="utf-8"))
        for p in ("power", "outliers")
    )
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    changes = [name for name in PERTURBED if name in found]
    size = str(max(found["sizes"]))
    kernels = list(found[changes[0]])
    for k, kernel in enumerate(kernels):
        points = [found[change][kernel][size] for change in changes]
        place = [i + 0.15 * (k - (len(kernels) - 1) / 2) for i in range(len(changes))]
        spread = [[p[0] - p[1] for p in points], [p[2] - p[0] for p in points]]
        left.bar(place, [p[0] for p in points], 0.14, yerr=spread, label=kernel, error_kw={"lw": 0.7})
    left.axhline(0.05, color="gray", lw=0.8, ls="--")
    left.set_xticks(range(len(changes)), changes, fontsize=8)
    left.set(ylabel="rejected at 5 %", title=f"MMD, {size} images of each")
    left.legend(frameon=False, fontsize=8)
    others = [name for name, rows in scored.items() if isinstance(rows, dict)]
    rows = list(scored[others[0]])
    for k, other in enumerate(others):
        points = [scored[other][row]["AUROC"] for row in rows]
        place = [-i + 0.18 * (1 - k) for i in range(len(rows))]
        spread = [[p[0] - p[1] for p in points], [p[2] - p[0] for p in points]]
        right.errorbar([p[0] for p in points], place, xerr=spread, fmt="o", ms=4, lw=0.9, label=other)
    right.axvline(0.5, color="gray", lw=0.8, ls="--")
    right.set_yticks([-i for i in range(len(rows))], rows, fontsize=8)
    right.set(xlabel="AUROC", title="Outlier scores")
    right.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.2, -0.12), ncols=3)
    path = ROOT / "docs" / "assets" / f"two_samples{args.name}.png"
    figure.savefig(path, dpi=75)
    Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


def main() -> None:
    """One part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["level", "series", "train", "power", "outliers", "picture"])
    parser.add_argument("--data", type=Path, default=Path("/work/data"))
    parser.add_argument("--network", type=Path)
    parser.add_argument("--save", type=Path, default=Path("small_cnn.pt"))
    parser.add_argument("--name", default="")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=12000)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--sizes", type=int, nargs="+")
    parser.add_argument("--repeats", type=int, default=500)
    args = parser.parse_args()
    parts = (level, series, train, power, outliers, picture)
    {part.__name__: part for part in parts}[args.part](args)


if __name__ == "__main__":
    main()
