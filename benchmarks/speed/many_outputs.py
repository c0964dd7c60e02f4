"""Tangent kernels of networks with 1,000 outputs: seconds and peak memory, exact and by random directions.

    python -m benchmarks.speed.many_outputs [--cases mlp resnet18 resnet50] [--images 4] [--size 224] [--memory 8GiB] \
        [--probes 16] [--device cpu] [--out FILE] [--how exact …] [--keep]
    python -m benchmarks.speed.many_outputs --device cuda --images 256 --out FILE

ResNet18 and ResNet50 are those of He et al. (2016) for ImageNet, 7 x 7 stem and all, with random weights and
statistics; "mlp" has two million parameters (its first call took 22 s and 15.2 GiB when all outputs of two samples were
compared with autograd). Each job has a process of its own (on a GPU as well), so that its peak is its own: "exact" and
"probes" are `tg.compute` within `--memory`, "first" and "second" two calls of the mlp's kernel. Where both an estimate
and the exact kernel were computed, their difference stands beside the error that `tg.probe_error` measured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.peers.common import peak_rss
from benchmarks.record import RESULTS, save
from tangency._base.results import environment

CLASSES = 1000
RESNETS = ("probes", "error", "exact")
HOWS = {"mlp": ("first", "second", "probes", "error"), "resnet18": RESNETS, "resnet50": RESNETS}


class Residual(nn.Module):
    """Two 3 x 3 convolutions, or a bottleneck of 1 x 1, 3 x 3, 1 x 1, and what goes around them."""

    def __init__(self, i: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        o = 4 * width if bottleneck else width
        sizes = [(i, width, 1, 1), (width, width, 3, stride), (width, o, 1, 1)]
        sizes = sizes if bottleneck else [(i, width, 3, stride), (width, o, 3, 1)]
        layers: list[nn.Module] = []
        for a, b, size, step in sizes:
            layers += [nn.Conv2d(a, b, size, step, size // 2, bias=False), nn.BatchNorm2d(b), nn.ReLU()]
        self.body = nn.Sequential(*layers[:-1])
        around = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))
        self.around = around if stride > 1 or i != o else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.around(x))


def resnet(depths: tuple[int, ...], bottleneck: bool) -> nn.Sequential:
    """For images of ImageNet."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    i = 64
    for k, depth in enumerate(depths):
        for j in range(depth):
            layers.append(Residual(i, 64 << k, 2 if j == 0 and k > 0 else 1, bottleneck))
            i = (64 << k) * (4 if bottleneck else 1)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(i, CLASSES))


def model(case: str) -> nn.Module:
    """One of the networks, with the same random weights and statistics in every process."""
    torch.manual_seed(0)
    made: nn.Module
    if case == "mlp":
        made = nn.Sequential(nn.Linear(784, 1100), nn.ReLU(), nn.Linear(1100, CLASSES))
    else:
        made = resnet((2, 2, 2, 2), False) if case == "resnet18" else resnet((3, 4, 6, 3), True)
    for m in made.modules():
        if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None and m.running_var is not None:
            nn.init.normal_(m.running_mean, std=0.1)
            nn.init.uniform_(m.running_var, 0.5, 1.5)
    return made.eval()


def job(case: str, how: str, args: argparse.Namespace) -> dict[str, Any]:
    """One measurement, in this process."""
    torch.set_num_threads(2)
    net = model(case).to(args.device)
    torch.manual_seed(1)
    x = torch.randn(*((8, 784) if case == "mlp" else (args.images, 3, args.size, args.size))).to(args.device)
    with torch.no_grad():
        net(x[:1])
    probes = args.probes if how in ("probes", "error") else None
    kernel, before = tg.trace_ntk(net, probes=probes), peak_rss()
    _wait(args.device)
    cpu, wall = time.process_time(), time.perf_counter()
    found: dict[str, Any] = {
        "case": case,
        "how": how,
        "n": len(x),
        "parameters": sum(p.numel() for p in net.parameters()),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.PerformanceWarning)
        if how == "error":
            error = tg.probe_error(kernel, x)
            found |= {"rms": error.rms, "own": error.own, "needed_for_1_percent": error.needed(0.01)}
            k = error.estimate
        elif how in ("first", "second"):
            k = kernel(x)
            if how == "second":
                _wait(args.device)
                cpu, wall = time.process_time(), time.perf_counter()
                k = kernel(x)
        else:
            k = tg.compute(kernel, x, memory=args.memory, progress=False).dense()
    _wait(args.device)
    found |= {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    found |= {"peak_gib": peak_rss() / 2**30, "peak_before_gib": before / 2**30}
    if args.device == "cuda":
        found["peak_gpu_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if how != "second":
        torch.save(k.cpu(), Path(args.folder) / f"{case}_{how}.pt")
    return found


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def compared(case: str, folder: Path) -> dict[str, Any]:
    """How far the estimate of a case is from the exact kernel, relative to √(k(x, x) k(y, y)), and from `call`."""
    exact, near = (folder / f"{case}_{how}.pt" for how in ("exact", "probes"))
    if not exact.exists() or not near.exists():
        return {}
    k, about = torch.load(exact).double(), torch.load(near).double()
    size = k.diagonal().sqrt()
    gap = (about - k) / size[:, None] / size
    i, j = torch.triu_indices(len(k), len(k), 1)
    return {"case": case, "how": "difference", "rms": float(gap[i, j].square().mean().sqrt()),
            "own": float(gap.diagonal().square().mean().sqrt())}  # fmt: skip


def alone(case: str, how: str, args: argparse.Namespace, folder: str) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    given = [v for name in ("images", "size", "probes", "device") for v in (f"--{name}", str(getattr(args, name)))]
    given += ["--memory", args.memory] if args.memory else []
    command = [sys.executable, "-m", "benchmarks.speed.many_outputs", *given, "--job", case, how, "--folder", folder]
    # Threads that wait do not spin: CPU-seconds are those of the work, on a busy machine too.
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"})
    if done.returncode:
        return {"case": case, "how": how, "failed": (done.stderr.strip().splitlines() or ["killed"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", default=["mlp", "resnet18", "resnet50"])
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--memory", default=None)
    parser.add_argument("--probes", type=int, default=16)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "many_outputs.json")
    parser.add_argument("--how", nargs="+", default=["first", "second", "probes", "error", "exact"])
    parser.add_argument("--keep", action="store_true", help="rows of an earlier run that are not measured again")
    parser.add_argument("--job", nargs=2)
    parser.add_argument("--folder", default="")
    args = parser.parse_args()
    args.memory = args.memory or ("8GiB" if args.device == "cpu" else None)
    if args.job:
        case, how = args.job
        print(json.dumps(job(case, how, args)))
        return
    rows: list[dict[str, Any]] = []
    if args.out.exists() and args.keep:
        rows = json.loads(args.out.read_text(encoding="utf-8"))["rows"]
    with tempfile.TemporaryDirectory() as folder:
        for case, how in [(name, how) for name in args.cases for how in HOWS[name] if how in args.how]:
            rows = [row for row in rows if (row["case"], row["how"]) not in ((case, how), (case, "difference"))]
            rows.append(alone(case, how, args, folder))
            if found := compared(case, Path(folder)):
                rows.append(found)
            print(rows[-1], flush=True)
            result = {"rows": rows, "memory": args.memory, "size": args.size, "environment": environment()}
            save(result, args.out, "python -m benchmarks.speed.many_outputs " + " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
