"""Projected kernels: what each kind costs and how far it is off, ours and others', and whole data sets.

    python -m benchmarks.speed.projection kinds --data DIR                       # results/projection.json
    python -m benchmarks.speed.projection memory
    python -m benchmarks.speed.projection projectors --data DIR --peers PYTHON   # results/projection_projectors.json
    python -m benchmarks.speed.projection error --data DIR                       # results/projection_error.*
    python -m benchmarks.speed.projection quality --data DIR                     # τ_K: results/projection_quality.json

On the GPU machine (PYTHONPATH=src; --out says where the JSON goes):

    python3 -m benchmarks.speed.projection kinds --device cuda --data DIR --weights WEIGHTS --out kinds.json
    python3 -m benchmarks.speed.projection projectors --device cuda --out projectors.json
    python3 -m benchmarks.speed.projection resnet --data DIR --weights WEIGHTS --out resnet.json

DIR holds cifar-10-batches-bin/ and fashion-mnist/. WEIGHTS is surrogate-table2.pt, which `tangency reproduce
surrogate-table2` leaves in --out. Peers on
a CPU: `benchmarks/peers/run_projection.py` in its own environment, PYTHON being its interpreter; on a GPU:
`benchmarks/peers/run_fast_jl.py`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, ROOT, fashion, pictures, save
from tangency import plots
from tangency.engine.blocks import DenseBlock
from tangency.experiments.surrogate_table2 import standardized
from tangency.kernels.empirical import Empirical
from tangency.projection.error import ProjectionError
from tangency.projection.sketches.kinds import Place
from tangency.projection.sketches.random import Stream

KINDS = tuple(tg.projection.KINDS)
DIMS = (512, 2048, 4096, 10240, 16384)
SLOW = ("rademacher", "gaussian")


class Transformer(nn.Module):
    """Tokens → 10 outputs: four encoder layers, 4.5 million parameters."""

    def __init__(self, vocabulary: int = 5000, width: int = 256, length: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.tokens(x) + self.places).mean(1))


def cifar(folder: Path) -> Tensor:
    """All 60,000 images, standardized."""
    train, test = (standardized(part) for part in tg.datasets.cifar10(folder))
    return torch.cat([pictures(train), pictures(test)])


def images(folder: Path, n: int) -> Tensor:
    """The first n training images, standardized."""
    rows = np.fromfile(folder / "cifar-10-batches-bin" / "data_batch_1.bin", np.uint8, n * 3073).reshape(n, -1)
    x = torch.from_numpy(rows[:, 1:]).reshape(n, 3, 32, 32).float() / 255
    return pictures(standardized(tg.datasets.labelled((x, rows[:, 0]))))


def networks(options: argparse.Namespace, n: int) -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    resnet, transformer = tg.models.resnet18(10), Transformer()
    if options.weights:
        resnet.load_state_dict(torch.load(options.weights, map_location="cpu", weights_only=True))
    found = {"ResNet18": (resnet, images(options.data, n)), "transformer": (transformer, torch.randint(5000, (n, 64)))}
    return {name: (m.to(options.device).eval(), x.to(options.device)) for name, (m, x) in found.items()}


def seconds(f: Callable[..., Any], *args: Any, repeats: int = 2) -> float:
    """The best of a few runs, the first of which warms up, unless it took a minute."""

    def once() -> float:
        start = time.perf_counter()
        f(*args)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start

    first = once()
    return first if first > 60 else min(once() for _ in range(repeats))


def gradients(kernel: Empirical, x: Tensor) -> None:
    """The factors that a projection begins with."""
    for i in range(0, len(x), 256):
        kernel.feature_map(x[i : i + 256], None, lambda _: False)


def chosen(kind: str, trace: bool, cuda: bool) -> tuple[int, ...]:
    """Dimensions: not all of them where a matrix of that many rows takes minutes."""
    if kind not in SLOW:
        return DIMS
    return ((512, 10240) if trace else DIMS) if cuda else (512, 2048, 10240) if kind == "rademacher" else (512, 2048)


def kinds(options: argparse.Namespace) -> dict[str, Any]:
    """Every kind at every dimension: seconds per 1,000 samples, and error on some samples."""
    cuda = options.device == "cuda"
    n, some = (1024, 128) if cuda else (8, 8)
    rows = []
    for name, (model, x) in networks(options, n).items():
        for make in (tg.pseudo_ntk, tg.trace_ntk) if cuda else (tg.pseudo_ntk,):
            base, exact = make(model, dtype="float16" if cuda else None), make(model)
            few = x[: min(some, 64) if make is tg.trace_ntk else some]
            alone = seconds(gradients, base, x) / n * 1e3
            rows.append({"network": name, "kernel": base.name, "kind": "gradients alone", "per 1000": alone})
            print(rows[-1], flush=True)
            for kind in KINDS:
                for dim in chosen(kind, make is tg.trace_ntk, cuda):
                    k = tg.projected(base, dim, kind)
                    torch.cuda.reset_peak_memory_stats() if cuda else None
                    part = x[:512] if make is tg.trace_ntk else x
                    taken = seconds(k.prepare, part, repeats=1) / len(part) * 1e3
                    peak = torch.cuda.max_memory_allocated() if cuda else None
                    seeds = range(1 if cuda or kind in SLOW else 4)
                    errors = [tg.projection_error(exact, tg.projected(exact, dim, kind, s), few) for s in seeds]
                    every = torch.cat([e.residuals for e in errors])
                    rows.append({
                        "network": name, "kernel": base.name, "kind": kind, "dim": dim, "per 1000": taken,
                        "peak bytes": peak, "rms": float(every.square().mean().sqrt()), "seeds": len(seeds),
                        "predicted": errors[0].expected_rms, "largest": float(every.abs().max()),
                    })  # fmt: skip
                    print(rows[-1], flush=True)
    result = {"device": device(options), "samples": n, "rows": rows}
    result["weights"] = "trained" if options.weights else "as initialised"
    return result


PEAK = """
import torch, tangency as tg
from benchmarks.speed.projection import Transformer, peak
torch.manual_seed(0)
model = {model}.eval()
x = {x}
k = tg.projected(tg.pseudo_ntk(model), 10240, {kind!r})
k.ready(x); k.footprint(x)
before = peak()
k.prepare(x)
print(peak() - before)
"""


def peak() -> int:
    """Bytes that this process ever held."""
    line = next(v for v in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if v.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """Bytes beyond model and probe, in a process of its own, at 10,240 dimensions."""
    nets = {
        "ResNet18": ("tg.models.resnet18(10)", "torch.randn(8, 3, 32, 32)"),
        "transformer": ("Transformer()", "torch.randint(5000, (8, 64))"),
    }
    rows = []
    for name, (model, x) in nets.items():
        for kind in KINDS:
            if kind != "gaussian":  # as rademacher, for minutes
                code = PEAK.format(model=model, x=x, kind=kind)
                done = subprocess.run(
                    [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
                )
                rows.append({"network": name, "kind": kind, "extra bytes": int(done.stdout)})
                print(rows[-1], flush=True)
    return {"rows": rows}


def projector(kind: str, dim: int, g: Tensor) -> Tensor:
    """Our projection of gradients that are given as a matrix, as other projectors take them."""
    sketch = tg.projection.KINDS[kind]()
    out = torch.zeros(len(g), dim, device=g.device)
    place = Place(Stream.of(0, "g"), Stream.of(0, ""), (g.shape[1],), 0, g.shape[1])
    sketch.add([out], [DenseBlock(g[:, None])], place, False, 1 << 30)
    return out * sketch.factor(dim)


def cosine_error(f: Tensor, g: Tensor) -> float:
    """Root mean square of residuals over norms, over pairs."""
    f, g = f.double(), torch.stack([v.double() for v in g])
    exact, found = g @ g.T, f @ f.T
    norms = exact.diagonal().sqrt()
    i, j = torch.triu_indices(len(g), len(g), 1, device=g.device)
    return float((((found - exact) / (norms[:, None] * norms))[i, j]).square().mean().sqrt())


def cpu_projectors(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A matrix of ResNet18's real gradients [8, 11.2 million], by us and by peers."""
    model, x = networks(options, 8)["ResNet18"]
    g = tg.pseudo_ntk(model).features(x)
    rows = []
    for kind in ("sparse", "hadamard", "rademacher", "gaussian"):
        for dim in (512,) if kind in SLOW else DIMS:
            taken = seconds(projector, kind, dim, g, repeats=1)
            rows.append({"projector": f"tangency {kind}", "dim": dim, "seconds": taken})
            rows[-1]["rms"] = cosine_error(projector(kind, dim, g), g)
            print(rows[-1], flush=True)
    if options.peers:
        with tempfile.TemporaryDirectory() as folder:
            np.save(f"{folder}/g.npy", g.numpy())
            for peer in ("trak-normal", "trak-rademacher", "dattri-normal"):
                for dim in (512,):
                    command = [
                        options.peers,
                        "-m",
                        "benchmarks.peers.run_projection",
                        "--grads",
                        f"{folder}/g.npy",
                        "--peer",
                        peer,
                        "--dim",
                        str(dim),
                    ]
                    command += ["--seed", "0", "--out", f"{folder}/f.npy", "--threads", str(torch.get_num_threads())]
                    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
                    said = json.loads(done.stdout.strip().splitlines()[-1])
                    error = cosine_error(torch.from_numpy(np.load(f"{folder}/f.npy")), g)
                    rows.append({"projector": peer, "dim": dim, "seconds": said["seconds"], "rms": error, "said": said})
                    print(rows[-1], flush=True)
    return rows


def projectors(options: argparse.Namespace) -> dict[str, Any]:
    """Gradients as a matrix: on a GPU [256, 11 million], as `peers/run_fast_jl.py` gives to fast_jl and dattri."""
    if options.device == "cpu":
        return {"device": device(options), "rows": cpu_projectors(options)}
    torch.manual_seed(0)
    rows = []
    for dtype in (torch.float16, torch.float32):
        g = torch.randn(256, 11_000_000, device="cuda").to(dtype)
        for kind in ("sparse", "rademacher", "gaussian", "hadamard"):
            for dim in DIMS:
                torch.cuda.reset_peak_memory_stats()
                held = torch.cuda.memory_allocated()
                taken = seconds(projector, kind, dim, g, repeats=3)
                extra = torch.cuda.max_memory_allocated() - held
                rows.append({"projector": f"tangency {kind}", "dtype": str(dtype), "dim": dim, "seconds": taken})
                few = g[:64]
                rows[-1] |= {"extra bytes": extra, "rms": cosine_error(projector(kind, dim, few), few)}
                print(rows[-1], flush=True)
    return {"device": device(options), "n": 256, "p": 11_000_000, "rows": rows}


def resnet(options: argparse.Namespace) -> dict[str, Any]:
    """60,000 CIFAR-10 images, 10,240 dimensions: features and Gram matrix, timed whole; probing, compiling included."""
    x = cifar(options.data).cuda()
    model, _ = networks(options, 1)["ResNet18"]
    published = {"proj-pNTK": "7.4 min, A100", "proj-trNTK": "1.12 h, A100"}
    rows = []
    for name, make in (("proj-pNTK", tg.pseudo_ntk), ("proj-trNTK", tg.trace_ntk)):
        for kind in options.kinds if make is tg.pseudo_ntk else options.kinds[:1]:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            k = tg.projected(make(model, dtype="float16"), kind=kind, storage=torch.float16)
            phi = k.features(x, progress=False)
            torch.cuda.synchronize()
            made = time.perf_counter() - start
            flat = phi.flatten(1)
            gram = torch.empty(len(x), len(x), device="cuda")
            for i in range(0, len(x), 4096):
                gram[i : i + 4096] = torch.mm(flat[i : i + 4096], flat.T, out_dtype=torch.float32)
            torch.cuda.synchronize()
            rows.append({
                "kernel": name, "kind": kind, "features": list(phi.shape), "seconds": made,
                "with Gram": time.perf_counter() - start, "peak bytes": torch.cuda.max_memory_allocated(),
                "published": published[name],
            })  # fmt: skip
            print(rows[-1], flush=True)
            del phi, flat, gram
    return {"device": device(options), "rows": rows, "weights": "trained" if options.weights else "as initialised"}


def quality(options: argparse.Namespace) -> dict[str, Any]:
    """τ_K of surrogates from exact and from projected kernels: a CNN on 2,000 images of Fashion-MNIST."""
    x, y = fashion(options.data)
    z, labels = fashion(options.data, "t10k")
    x, y, z, labels = x[:2000], y[:2000], z[:1000], labels[:1000]
    model = small()
    tg.models.fit(model, x, y, tg.models.Recipe(epochs=15, batch=64, lr=0.05), seed=0, progress=False)
    network = torch.softmax(tg.models.outputs(model, z).double(), 1)
    rows = []
    names = {"trNTK": tg.trace_ntk(model), "pNTK": tg.pseudo_ntk(model)}
    every: dict[str, Any] = {}
    for name, exact in names.items():
        every[name] = exact
        for kind in KINDS if name == "pNTK" else [k for k in KINDS if k not in SLOW]:
            every[f"proj-{name} {kind}"] = tg.projected(exact, 10240, kind)
    grams = tg.decisions.Grams(x, z, progress=False)
    for name, kernel in every.items():
        own, cross = grams(tg.cosine(kernel))
        for alpha in (1e-4, 1e-2):
            made = tg.surrogate.fit(own, y, reg=tg.surrogate.default_reg(own, alpha=alpha), progress=False)
            f = tg.surrogate.faithfulness(network, made.probabilities(cross), labels)
            rows.append({"kernel": name, "alpha": alpha, "tau": f.tau, "tad": f.tad})
            print(rows[-1], flush=True)
        grams.forget([])
    return {"accuracy": float((network.argmax(1) == labels).double().mean()), "rows": rows}


def device(options: argparse.Namespace) -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"{torch.get_num_threads()} CPU threads"


def error(options: argparse.Namespace) -> dict[str, Any]:
    """Residuals against the dimension for every kind, over seeds, like Engel et al. 2024, Figure 4a."""
    x, _ = fashion(options.data)
    model = small()
    exact, few = tg.pseudo_ntk(model), x[:16]
    found: list[ProjectionError] = []
    rows: list[dict[str, Any]] = []
    for kind in KINDS:
        for dim in (128, 512, 2048, 8192):
            seeds = range(2 if kind in SLOW and dim == 8192 else 8)
            errors = [tg.projection_error(exact, tg.projected(exact, dim, kind, seed), few) for seed in seeds]
            every = torch.cat([e.residuals for e in errors])
            rows.append({"kind": kind, "dim": dim, "rms": float(every.square().mean().sqrt()), "seeds": len(seeds)})
            rows[-1] |= {"predicted": errors[0].expected_rms, "q95": float(every.abs().quantile(0.95))}
            found += errors
            print(rows[-1], flush=True)
    plots.draw_projection(found).savefig(RESULTS / "projection_error.png", dpi=110)
    return {"parameters": sum(p.numel() for p in model.parameters()), "samples": len(few), "rows": rows}


def small() -> nn.Module:
    """A convolutional network for 28 x 28 images, 225,000 parameters."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, 10),
    ).eval()  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["kinds", "memory", "error", "quality", "projectors", "resnet"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--peers", help="the Python of the peers' environment")
    parser.add_argument(
        "--kinds", nargs="+", default=["sparse", "rademacher"], help="resnet: of the pNTK; of the trace the first"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    every = {
        "kinds": kinds,
        "memory": memory,
        "error": error,
        "quality": quality,
        "projectors": projectors,
        "resnet": resnet,
    }
    result = every[options.what](options)
    name = "projection" if options.what == "kinds" else f"projection_{options.what}"
    save(result, options.out or RESULTS / f"{name}.json", "python " + " ".join(sys.argv))


if __name__ == "__main__":
    main()
