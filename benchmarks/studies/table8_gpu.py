"""Which convention decides the table of Wang et al. (arXiv:2211.06506): all readings of it, many runs at once on a GPU.

    python -m benchmarks.studies.table8_gpu --out FOLDER [--budget 150] [--quick]
    python -m benchmarks.studies.table8_gpu --classify FOLDER [--save benchmarks/results/h200/table8.json]

The text leaves open what "normalized tanh" is (unit variance, or centred as tanh is: its Assumption 3.2 asks no more),
how v is drawn, whether 0.3 is the noise's standard deviation or its root, and the batches. Each reading (`READINGS`,
listed before any was run at this size) is trained in each way (`GROUPS`) from three seeds. Runs of one group are one
stack of matrices; one that has come below the loss stops moving. float32 without TF32, one group again in float64.
table8.json and table8.npz (eigenvalues of the kept ones) are written after each group; what is there is not run again.
"""

import argparse
import itertools
import json
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.record import save
from tangency.spectra import classify
from tangency.studies import Taught, TwoLayer, teacher, two_layer
from tangency.studies.teachers import Normalised

SEEDS = (0, 1, 2)
UNTIL = 1e-5


@dataclass(frozen=True)
class Size:
    """Of the problem."""

    n: int = 2000
    h: int = 1500
    d: int = 1000
    test: int = 4000


@dataclass(frozen=True)
class Reading:
    """What the text may mean."""

    tanh: str = "unit"  # E σ² = 1, or "plain": tanh itself
    v: str = "normal"  # or "sign", or "uniform" in [−1, 1]
    noise: float = 0.3

    def __str__(self) -> str:
        return f"{self.tanh}-{self.v}-{self.noise}"


@dataclass(frozen=True)
class Group:
    """One way to train."""

    name: str
    method: str
    lr: float
    batch: int | None = None
    decay: float = 1.0
    epochs: int = 300
    check: int = 1  # epochs between two looks at the loss
    dtype: torch.dtype = torch.float32


READINGS = [
    Reading(tanh, v, noise)
    for noise, tanh, v in itertools.product((0.3, 0.09), ("unit", "plain"), ("normal", "sign", "uniform"))
]
STATED, PLAIN = Reading(), Reading("plain")
KEPT = (STATED, PLAIN)  # whose spectra are kept
# The cheap ones first; the two small rates, as stated, of few readings.
GROUPS: list[tuple[Group, list[Reading]]] = [
    (Group("adam 0.092, all", "adam", 0.092), READINGS),
    *((Group(f"sgd 22, batch {b}", "sgd", 22.0, b), READINGS) for b in (16, 32, 8, 64)),
    (Group("gd 50", "gd", 50.0, epochs=3000, check=5), READINGS),
    (Group("sgd 22, batch 16, float64", "sgd", 22.0, 16, dtype=torch.float64), [STATED]),
    (Group("adam 0.092, batch 64", "adam", 0.092, 64, epochs=150), READINGS),
    (Group("adam 0.092, batch 64, decay 0.97", "adam", 0.092, 64, 0.97, epochs=150), READINGS),
    (Group("gd 5", "gd", 5.0, epochs=20_000, check=20), [STATED, PLAIN]),
    (Group("sgd 0.1, batch 16", "sgd", 0.1, 16, epochs=8000, check=20), [STATED, PLAIN]),
]


def draw(reading: Reading, seed: int, size: Size) -> tuple[TwoLayer, Taught]:
    """The network before training and its samples, as in `tangency reproduce spectra-table8`, in float64."""
    data = teacher(size.n, size.d, tau=0.2, noise=reading.noise, test=size.test, seed=seed)
    net = two_layer(size.d, size.h, seed=1000 + seed)
    uniform = torch.rand(size.h, generator=torch.Generator().manual_seed(2000 + seed), dtype=torch.float64) * 2 - 1
    v = {"normal": net.v, "sign": net.v.sign(), "uniform": uniform}[reading.v]
    tanh = net.activation
    return TwoLayer(net.w, v, tanh if reading.tanh == "unit" else Normalised(tanh.dual, tanh.mean, 1.0)), data


class Stack:
    """Networks of one shape side by side: f_r(x) = v_r·tanh(W_r x/√d)/(scale_r √h)."""

    def __init__(self, runs: list[tuple[TwoLayer, Taught]], group: Group, device: torch.device) -> None:
        def put(parts: Iterable[Tensor]) -> Tensor:
            return torch.stack(list(parts)).to(device, group.dtype)

        self.group, self.networks = group, [net for net, _ in runs]
        self.w, self.v = put(net.w for net, _ in runs), put(net.v for net, _ in runs)
        self.x, self.y = put(data.x for _, data in runs), put(data.y for _, data in runs)
        self.scale = put(torch.tensor(net.activation.scale, dtype=torch.float64) for net, _ in runs)[:, None, None]
        self.lr = torch.full((len(runs), 1, 1), group.lr, device=device, dtype=group.dtype)
        self.count, self.rows = 0, torch.arange(len(runs), device=device)[:, None]
        self.order = torch.zeros(self.y.shape, dtype=torch.long, device=device)
        self.generator = torch.Generator(device).manual_seed(0)
        self.moments = [torch.zeros_like(p) for p in (self.w, self.v) * 2] if group.method == "adam" else []

    def outputs(self, x: Tensor) -> Tensor:
        """[runs, n]."""
        value = torch.tanh(torch.bmm(x, self.w.mT) * self.w.shape[2] ** -0.5) / self.scale
        return torch.bmm(value, self.v[:, :, None])[:, :, 0] * self.v.shape[1] ** -0.5

    def losses(self) -> list[float]:
        """L of each run, all samples."""
        return ((self.outputs(self.x) - self.y).square().mean(1) / 2).tolist()

    def step(self, x: Tensor, y: Tensor) -> None:
        """θ ← θ − lr·step(∇L) on these samples [runs, b, d], L = ‖y − f‖²/(2b)."""
        h, d = self.w.shape[1:]
        value = torch.tanh(torch.bmm(x, self.w.mT) * d**-0.5)
        slope = (1 - value.square()) / self.scale
        value = value / self.scale
        r = (torch.bmm(value, self.v[:, :, None])[:, :, 0] * h**-0.5 - y) / y.shape[1]
        to_v = torch.bmm(r[:, None], value)[:, 0] * h**-0.5
        back = slope * (self.v * (h * d) ** -0.5)[:, None] * r[:, :, None]
        if self.group.method == "adam":
            self._adam((torch.bmm(back.mT, x), to_v))
        else:
            self.w.baddbmm_((back * self.lr).mT, x, alpha=-1)
            self.v.sub_(to_v * self.lr[:, 0])

    def _adam(self, gradients: tuple[Tensor, Tensor]) -> None:
        self.count += 1
        one, two = 1 - 0.9**self.count, 1 - 0.999**self.count
        pairs = zip((self.w, self.v), gradients, self.moments[:2], self.moments[2:], strict=True)
        for p, g, m, s in pairs:
            m.lerp_(g, 0.1)
            s.mul_(0.999).addcmul_(g, g, value=0.001)
            p.sub_(m / (s.sqrt() / two**0.5 + 1e-8) * (self.lr if p.dim() == 3 else self.lr[:, 0]) / one)

    def sweep(self) -> None:
        """Each sample once."""
        if self.group.batch is None:
            self.step(self.x, self.y)
            return
        for part in self.order.split(self.group.batch, 1):
            self.step(self.x[self.rows, part], self.y[self.rows, part])

    def epoch(self) -> Callable[[], None]:
        """`sweep` over a new order of the samples; on a GPU all its steps are one graph, but Adam's, which count."""
        run = self.sweep
        if self.w.is_cuda and self.group.method != "adam":
            before = self.w.clone(), self.v.clone()
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):  # a graph needs its libraries warm
                self.sweep()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.sweep()
            self.w.copy_(before[0])
            self.v.copy_(before[1])
            run = graph.replay

        def one() -> None:
            if self.group.batch is not None:
                noise = torch.rand(self.y.shape, generator=self.generator, device=self.y.device)
                self.order.copy_(noise.argsort(1))
            run()

        return one

    def network(self, r: int) -> TwoLayer:
        """That run's network, in float64."""
        return TwoLayer(self.w[r].double(), self.v[r].double(), self.networks[r].activation)


def train(stack: Stack, until: float, left: Callable[[], float]) -> list[dict[str, Any]] | None:
    """Epochs, loss and whether it was reached, of each run; None if time runs out."""
    group, run = stack.group, stack.epoch()
    found: list[dict[str, Any]] = [{} for _ in stack.networks]
    for epoch in range(1, group.epochs + 1):
        run()
        stack.lr *= group.decay
        if epoch % group.check and epoch < group.epochs:
            continue
        if left() < 0:
            return None
        for r, loss in enumerate(stack.losses()):
            over = not loss < 1e12
            if not found[r] and (loss < until or over or epoch == group.epochs):
                found[r] = {"epochs": epoch, "loss": loss, "reached": loss < until}
                stack.lr[r] = 0
        if all(found):
            break
    return found


def scores(data: Taught, predicted: Tensor) -> dict[str, float]:
    """R² and error on the test samples."""
    return {"r2": data.r2(predicted), "error": data.error(predicted)}


def feature(net: TwoLayer, data: Taught) -> float:
    """|βᵀu₁|, u₁ the first right singular vector of W: by squaring WᵀW fourteen times."""
    power = net.w.T @ net.w
    for _ in range(14):
        power = power / power.norm()
        power = power @ power
    u = power @ torch.ones_like(data.beta[0])
    return float((u @ data.beta[0]).abs() / u.norm())


class Record:
    """table8.json and table8.npz; eigenvalues are found beside the training, on the CPU's cores."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.json, self.npz = folder / "table8.json", folder / "table8.npz"
        self.runs: dict[str, dict[str, Any]] = (
            json.loads(self.json.read_text(encoding="utf-8"))["runs"] if self.json.exists() else {}
        )
        self.values = dict(np.load(self.npz)) if self.npz.exists() else {}
        self.pool, self.due = ThreadPoolExecutor(2), dict[str, Future[dict[str, Tensor]]]()

    def write(self, patience: float = 0, **more: Any) -> None:
        """Both files, with the eigenvalues that are there after so long."""
        wait(self.due.values(), timeout=patience)
        for key in [key for key, future in self.due.items() if future.done()]:
            for name, values in self.due.pop(key).result().items():
                self.values[f"{key}/{name}"] = values.float().numpy()
        self.json.write_text(json.dumps({"runs": self.runs, **more}, indent=1) + "\n", encoding="utf-8")
        np.savez(self.npz, **self.values)

    def spectra(self, key: str, net: TwoLayer, x: Tensor) -> None:
        """Keep the eigenvalues of a network."""
        if f"{key}/weights" not in self.values:
            self.due[key] = self.pool.submit(TwoLayer(net.w.cpu(), net.v.cpu(), net.activation).spectra, x.cpu())


def on(device: torch.device, net: TwoLayer, data: Taught) -> tuple[TwoLayer, Taught]:
    """Both on a device."""
    parts = (v.to(device) for v in (data.x, data.y, data.x_test, data.y_test, data.beta))
    x, y, x_test, y_test, beta = parts
    moved = Taught(x, y, x_test, y_test, beta, data.link, data.tau, data.noise, data.seed)
    return TwoLayer(net.w.to(device), net.v.to(device), net.activation), moved


def lazies(record: Record, cases: list[tuple[Reading, int]], size: Size, device: torch.device) -> None:
    """The lazy network of each reading, and with its first outputs left out."""
    for reading, seed in cases:
        key = f"lazy/{reading}/{seed}"
        if key in record.runs:
            continue
        net, data = on(device, *draw(reading, seed, size))
        K, across = net.ntk(data.x), net.ntk(data.x_test, data.x)
        first = net(data.x_test)
        targets = torch.stack([data.y - net(data.x), data.y], 1)
        inner, without = (across @ torch.cholesky_solve(targets, torch.linalg.cholesky(K))).T
        record.runs[key] = scores(data, first + inner)
        record.runs[key] |= {f"{k}_without_f0": v for k, v in scores(data, without).items()}
        if reading in KEPT:
            record.spectra(f"initial/{reading}/{seed}", net, data.x)


def run(folder: Path, budget: float, quick: bool) -> None:
    """All groups, as far as time goes."""
    torch.backends.cuda.matmul.allow_tf32 = False
    began = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = Size(200, 150, 100, 500) if quick else Size()
    until = 1e-2 if quick else UNTIL
    seeds = SEEDS[:1] if quick else SEEDS
    record = Record(folder)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    about: dict[str, Any] = {"device": name, "torch": torch.__version__, "size": size.__dict__, "until": until}
    about["seconds"] = {}
    lazies(record, [(r, s) for r in READINGS for s in seeds], size, device)
    about["seconds"]["lazy"] = time.monotonic() - began
    record.write(**about)
    for group, readings in GROUPS:
        cases = [(r, s) for r in readings for s in seeds if f"{group.name}/{r}/{s}" not in record.runs]
        started = time.monotonic()
        if not cases or started - began > budget:
            continue
        drawn = [draw(r, s, size) for r, s in cases]
        stack = Stack(drawn, group, device)
        found = train(stack, until, lambda: budget - (time.monotonic() - began))
        if found is None:
            print(f"{group.name}: out of time", flush=True)
            continue
        for i, ((reading, seed), row) in enumerate(zip(cases, found, strict=True)):
            key = f"{group.name}/{reading}/{seed}"
            record.runs[key] = row
            if not row["loss"] < 1e12:
                continue
            net, data = on(device, stack.network(i), drawn[i][1])
            row |= scores(data, net(data.x_test)) | {"feature": feature(net, data)}
            row["v_square"] = float(net.v.square().mean())
            if reading in KEPT:
                record.spectra(key, net, data.x)
        about["seconds"][group.name] = time.monotonic() - started
        record.write(**about)
        print(f"{group.name}: {time.monotonic() - started:.1f} s, at {time.monotonic() - began:.1f} s", flush=True)
    record.write(max(0.0, budget + 60 - (time.monotonic() - began)), **about)
    record.pool.shutdown(wait=False, cancel_futures=True)
    print("done", flush=True)


def spread(values: list[float]) -> str:
    """The mean and its standard error."""
    return f"{np.mean(values):.3f}" + (
        f" ± {np.std(values, ddof=1) / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
    )


def summary(folder: Path, target: Path | None) -> None:
    """Means over seeds of each reading, and the classifier's word where spectra were kept."""
    record = Record(folder)
    about = json.loads((folder / "table8.json").read_text(encoding="utf-8"))
    rows: dict[str, dict[str, Any]] = {}
    for key, row in record.runs.items():
        group, reading, seed = key.split("/")
        into = rows.setdefault(
            f"{group} / {reading}", {"r2": [], "error": [], "feature": [], "reached": [], "kinds": []}
        )
        into["r2"].append(row.get("r2", math.nan))
        into["error"].append(row.get("error", math.nan))
        into["feature"].append(row.get("feature", math.nan))
        into["reached"].append(f"{row['epochs']}{'' if row['reached'] else '!'}" if "epochs" in row else "")
        before = f"initial/{reading}/{seed}"
        if f"{key}/weights" in record.values and f"{before}/weights" in record.values:
            pairs = ((record.values[f"{k}/{m}"] for k in (key, before)) for m in ("weights", "ck", "ntk"))
            kinds = [classify(*(torch.from_numpy(a).double() for a in pair)).kind for pair in pairs]
            into["kinds"].append(" | ".join(kinds))
    for name, row in sorted(rows.items()):
        figures = "  ".join(f"{k} {spread(row[k])}" for k in ("r2", "error", "feature"))
        print(f"{name:58s} {figures}  {' '.join(row['reached'])}  {'; '.join(row['kinds'])}")
    if target is not None:
        save({**about, "summary": rows}, target, "python -m benchmarks.studies.table8_gpu --out FOLDER")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget", type=float, default=150, help="seconds")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try it on a CPU")
    parser.add_argument("--classify", type=Path, metavar="FOLDER")
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    if args.classify:
        summary(args.classify, args.save)
    else:
        run(args.out, args.budget, args.quick)


if __name__ == "__main__":
    main()
