"""Copies between training and test sets: natural ones, shown on sheets to be judged by eye, and planted ones.

    python -m benchmarks.studies.leaks --data DIR [--rows 50000] [--test 10000] [--sets cifar10 fashion] [--ntk]

DIR holds cifar-10-batches-bin and fashion-mnist. A small CNN is trained on each set (kept in runs/leaks). Copies are
found as `tg.audit` finds them, by all hidden layers, and for comparison by the last one alone (CK); with --ntk also by
the projected tangent kernel, on 5,000 images. Then 100 training images of each kind (as they are, mirrored, cropped,
moved, compressed, brighter or darker, with noise) are put into the test set: how many are found? Sheets of the natural
pairs go to runs/leaks; results/leaks.json has the counts. With --known FILE (duplicates_cifar10.csv of Barz & Denzler
2020, "Do we train on test data?") also how many of those are found.
"""

import argparse
import csv
import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, ROOT, pictures, save
from tangency.auditing.audit import copies_of
from tangency.auditing.copies import NEIGHBOURS, Copies
from tangency.auditing.data import Data
from tangency.auditing.views import Views
from tangency.datasets import Labelled
from tangency.decisions.layered import views

RUNS = ROOT / "runs" / "leaks"
EACH, SHEET, EPOCHS = 100, 60, {"cifar10": 5, "fashion": 3, "mnist": 2}
FOLDERS = {"cifar10": "cifar-10-batches-bin", "fashion": "fashion-mnist", "mnist": "mnist"}
LOADERS = {"cifar10": tg.datasets.cifar10, "fashion": tg.datasets.fashion_mnist, "mnist": tg.datasets.mnist}
Change = Callable[[Tensor, torch.Generator], Tensor]


# ---- the networks ---------------------------------------------------------------------------------------------------


def network(channels: int) -> nn.Sequential:
    """Four convolutions of 32 to 256 channels with pooling, a global average and a linear layer."""
    layers: list[nn.Module] = []
    for i, o in ((channels, 32), (32, 64), (64, 128), (128, 256)):
        layers += [nn.Conv2d(i, o, 3, padding=1), nn.ReLU()] + ([nn.MaxPool2d(2)] if o < 256 else [])
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10))


def trained(name: str, train: Labelled) -> nn.Sequential:
    """Without augmentation; from runs/leaks if it has been trained before."""
    torch.manual_seed(0)
    x, file = pictures(train), RUNS / f"{name}-plain.pt"
    model = network(x.shape[1])
    if file.exists():
        model.load_state_dict(torch.load(file))
        return model.eval()
    steps, order = EPOCHS[name] * -(-len(x) // 128), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(EPOCHS[name]):
        for some in torch.randperm(len(x), generator=order).split(128):
            optimizer.zero_grad()
            F.cross_entropy(model(x[some]), train.y[some]).backward()
            optimizer.step()
            schedule.step()
    torch.save(model.state_dict(), file)
    return model.eval()


# ---- what is planted ------------------------------------------------------------------------------------------------


def cropped(x: Tensor, g: torch.Generator) -> Tensor:
    """1 to 4 pixels less, made as large as before."""
    less, size = int(torch.randint(1, 5, (1,), generator=g)), x.shape[-1]
    top, left = (int(v) for v in torch.randint(0, less + 1, (2,), generator=g))
    part = x[None, :, top : top + size - less, left : left + size - less]
    return F.interpolate(part, size=(size, size), mode="bilinear", align_corners=False)[0]


def moved(x: Tensor, g: torch.Generator) -> Tensor:
    """By 1 to 4 pixels along at least one side, the edge repeated."""
    wide, size = F.pad(x[None], (4,) * 4, mode="replicate")[0], x.shape[-1]
    top, left = 4, 4
    while (top, left) == (4, 4):
        top, left = (int(v) for v in torch.randint(0, 9, (2,), generator=g))
    return wide[:, top : top + size, left : left + size]


def compressed(x: Tensor, g: torch.Generator) -> Tensor:
    """JPEG of quality 30 to 75."""
    quality, file = int(torch.randint(30, 76, (1,), generator=g)), io.BytesIO()
    image(x).save(file, "JPEG", quality=quality)
    made = np.array(Image.open(file).convert("L" if len(x) == 1 else "RGB"))
    return torch.from_numpy(made).reshape(*x.shape[1:], len(x)).permute(2, 0, 1).float() / 255


def lit(x: Tensor, g: torch.Generator) -> Tensor:
    """Contrast 0.7 to 1.3, brightness ±0.15."""
    contrast, bright = torch.rand(2, generator=g).tolist()
    return ((x - 0.5) * (0.7 + 0.6 * contrast) + 0.5 + (bright - 0.5) * 0.3).clamp(0, 1)


KINDS: dict[str, Change] = {
    "as it is": lambda x, g: x,
    "mirrored": lambda x, g: x.flip(-1),
    "cropped": cropped,
    "moved": moved,
    "JPEG": compressed,
    "light": lit,
    "noise": lambda x, g: (x + 0.03 * torch.randn(x.shape, generator=g)).clamp(0, 1),
}


def plant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers of the training images [kinds, EACH], and the changed images one after the other."""
    g = torch.Generator().manual_seed(1)
    source = torch.randperm(len(x), generator=g)[: EACH * len(KINDS)].reshape(len(KINDS), EACH)
    changed = [change(x[i], g) for change, row in zip(KINDS.values(), source, strict=True) for i in row.tolist()]
    return source, torch.stack(changed)


# ---- what is measured -----------------------------------------------------------------------------------------------


def by_projection(kernel: tg.projection.Projected, x: Tensor, z: Tensor, by: str) -> Views:
    """Features of another kernel, without mirror images."""
    train, test = (kernel.features(v, progress=False).flatten(1) for v in (x, z))
    return Views(train, test, None, None, by)


def study(seen: Views, train: Labelled, test: Labelled, source: Tensor, planted: Tensor) -> dict[str, Any]:
    """Natural copies and leaks, then recall of what was planted; the last rows of the views are the planted ones."""
    m, start = len(test), time.perf_counter()
    within, across = seen.within(NEIGHBOURS, False), seen.between(NEIGHBOURS, False)
    seconds = time.perf_counter() - start
    natural = [type(near)(near.similarity[:m], near.places[:m]) for near in across]
    copies, leaks = copies_of(Data(train, test), within, natural, (train.x, test.x), seen.by)
    both = torch.cat([pictures(test), planted])
    more = replace(test, x=both, y=torch.cat([test.y, train.y[source.flatten()]]), show=None)
    _, with_planted = copies_of(Data(train, more), within, across, (train.x, more.x), seen.by)
    assert leaks is not None
    assert with_planted is not None
    pairs = {(a - m, b) for a, b in with_planted.pairs.tolist() if a >= m}
    flat = source.flatten().tolist()
    recall = {
        kind: sum((k * EACH + i, flat[k * EACH + i]) in pairs for i in range(EACH)) / EACH
        for k, kind in enumerate(KINDS)
    }
    return {
        "by": seen.by,
        "dimension": leaks.dimension,
        "neighbours_seconds": seconds,
        "leaked_test_images": len(set(leaks.pairs[:, 0].tolist())),
        "pairs": len(leaks),
        "mirrored_pairs": int(leaks.mirrored.sum()),
        "equal_pairs": int(leaks.exact.sum()),
        "contradictory_pairs": int(leaks.contradictory.sum()),
        "within_training": {
            "pairs": len(copies), "groups": len(copies.groups()), "equal": int(copies.exact.sum()),
            "mirrored": int(copies.mirrored.sum()), "contradictory": int(copies.contradictory.sum()),
        },
        "recall_of_planted": recall,
        "other_pairs_of_planted": sum((i, b) not in {(i, flat[i])} for i, b in pairs),
        "leaked_with_planted_there": len({a for a, _ in with_planted.pairs.tolist() if a < m}),
        "leaks": leaks,
        "copies": copies,
    }  # fmt: skip


def known_found(leaks: Copies, file: Path | None) -> dict[str, Any] | None:
    """How many of the test images that others found to be in the training set are among the leaks."""
    if file is None:
        return None
    theirs = {int(row["TestID"]) for row in csv.DictReader(file.open(encoding="utf-8"))}
    return {"theirs": len(theirs), "found": len(theirs & set(leaks.pairs[:, 0].tolist()))}


# ---- sheets ---------------------------------------------------------------------------------------------------------


def image(x: Tensor) -> Image.Image:
    """A picture of [c, h, w] in [0, 1]."""
    bytes_ = (x * 255).round().byte().permute(1, 2, 0).numpy()
    return Image.fromarray(bytes_[..., 0] if bytes_.shape[2] == 1 else bytes_)


def sheet(left: Labelled, right: Labelled, found: Copies, which: list[int], file: Path, columns: int = 6) -> None:
    """Pairs side by side, with their labels and cosine; m: one is the other's mirror image."""
    size = 2 * pictures(left).shape[-1]
    wide, high = 2 * size + 14, size + 16
    page = Image.new("RGB", (columns * wide, -(-len(which) // columns) * high), "white")
    pen = ImageDraw.Draw(page)
    for place, p in enumerate(which):
        a, b = found.pairs[p].tolist()
        x, y = place % columns * wide, place // columns * high
        for shift, shown in ((0, pictures(left)[a]), (size + 2, pictures(right)[b])):
            page.paste(image(shown).resize((size, size), Image.Resampling.BICUBIC), (x + shift, y + 13))
        names = " ".join(left.classes[int(v)][:5] for v in {int(left.y[a]): 0, int(right.y[b]): 0})
        pen.text((x, y), f"{float(found.similarity[p]):.3f}{' m' if found.mirrored[p] else ''} {names}", fill="black")
    page.quantize(128).save(file, optimize=True)


def surest(found: Copies) -> list[int]:
    """The surest pair of each first sample, the surest first."""
    first: dict[int, int] = {}
    for p, a in enumerate(found.pairs[:, 0].tolist()):
        first.setdefault(a, p)
    return list(first.values())


# ---- all of it ------------------------------------------------------------------------------------------------------


def whole(args: argparse.Namespace) -> bool:
    """Whether it is the study, and no trial of a part: else nothing is written outside runs/."""
    return bool(args.rows >= 50000 and args.test >= 10000)


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """One data set: its network, natural and planted copies by each view, and sheets."""
    train, test = LOADERS[name](args.data / FOLDERS[name])
    train, test = train.select(slice(0, args.rows)), test.select(slice(0, args.test))
    x = pictures(train)
    mean, std = (v[:, None, None] for v in (x.mean((0, 2, 3)), x.std((0, 2, 3))))
    model = trained(name, replace(train, x=(x - mean) / std, show=None))
    source, planted = plant(x)
    inputs, asked = (x - mean) / std, (torch.cat([pictures(test), planted]) - mean) / std
    with torch.no_grad():
        right = torch.cat([model(v) for v in asked[: len(test)].split(500)]).argmax(1) == test.y
    result: dict[str, Any] = {"rows": len(train), "test": len(test), "accuracy": float(right.double().mean())}
    start = time.perf_counter()
    layered = views(model, inputs, asked, None, False)
    assert layered is not None
    result["features_seconds"] = time.perf_counter() - start
    last = tg.projected(tg.conjugate_kernel(model), dim=256)
    for key, seen in (
        ("layers", layered),
        ("CK", by_projection(last, inputs, asked, "the last hidden layer, without mirror images")),
    ):
        found = study(seen, train, test, source, planted)
        leaks, copies = found.pop("leaks"), found.pop("copies")
        if name == "cifar10":
            found["known"] = known_found(leaks, args.known)
        result[key] = found
        print(name, key, found, flush=True)
        torch.save((leaks.pairs, leaks.chance, leaks.similarity, leaks.mirrored), RUNS / f"{name}-{key}-pairs.pt")
        if key == "layers":
            chosen = surest(leaks)
            for k in range(0, len(chosen), SHEET):
                sheet(test, train, leaks, chosen[k : k + SHEET], RUNS / f"{name}-leaks-{k:04}.png")
            if len(copies):
                sheet(train, train, copies, surest(copies)[:SHEET], RUNS / f"{name}-copies.png")
            if name == "cifar10" and chosen and whole(args):
                sheet(test, train, leaks, chosen[:24], ROOT / "docs" / "assets" / "leaks.png")
    return result


def tangent(args: argparse.Namespace) -> dict[str, Any]:
    """The projected tangent kernel beside the others on 5,000 images of CIFAR-10, for which it takes a minute."""
    train, test = LOADERS["cifar10"](args.data / FOLDERS["cifar10"])
    x = pictures(train)
    mean, std = (v[:, None, None] for v in (x.mean((0, 2, 3)), x.std((0, 2, 3))))
    model = trained("cifar10", replace(train, x=(x - mean) / std, show=None))
    train, test = train.select(slice(0, 5000)), test.select(slice(0, 500))
    source, planted = plant(pictures(train))
    inputs, asked = (pictures(train) - mean) / std, (torch.cat([pictures(test), planted]) - mean) / std
    layered = views(model, inputs, asked, None, False)
    assert layered is not None
    ck, ntk = tg.projected(tg.conjugate_kernel(model), 256), tg.projected(tg.trace_ntk(model), 512, joint=True)
    result = {}
    for key, seen in {
        "layers": layered,
        "CK": by_projection(ck, inputs, asked, "the last hidden layer, without mirror images"),
        "NTK": by_projection(ntk, inputs, asked, "the projected tangent kernel, without mirror images"),
    }.items():
        found = study(seen, train, test, source, planted)
        result[key] = {k: v for k, v in found.items() if k not in ("leaks", "copies")}
        print(key, result[key], flush=True)
    return result


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=60000)
    parser.add_argument("--test", type=int, default=10000)
    parser.add_argument("--sets", nargs="+", default=["cifar10", "fashion"], choices=list(LOADERS))
    parser.add_argument("--known", type=Path)
    parser.add_argument("--ntk", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    RUNS.mkdir(parents=True, exist_ok=True)
    result = {name: compare(name, args) for name in args.sets}
    if args.ntk:
        result["cifar10, 5,000 images"] = tangent(args)
    command = "python -m benchmarks.studies.leaks --data DIR"
    command += (" --known duplicates_cifar10.csv" if args.known else "") + (" --ntk" if args.ntk else "")
    save(result, (RESULTS if whole(args) else RUNS) / "leaks.json", command)


if __name__ == "__main__":
    main()
