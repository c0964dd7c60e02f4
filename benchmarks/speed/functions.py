"""Every function that computes, on the CPU and on a GPU: seconds of each, and how far the two answers are apart.

Where a GPU is, with torch and NumPy alone (zarr for the rows with a store):

    python3 -m benchmarks.speed.functions --out FILE --commit $(git rev-parse HEAD)

FILE lies beside the other figures of that machine, in benchmarks/results/h200/.

Each function runs once before it is timed, on few samples; its time holds everything, data and model being there. The
difference is the largest of ‖a − b‖ / ‖b‖ over the tensors that are compared. `python3 -m benchmarks.speed.functions
--table FILE` prints the table of docs/speed.md. `tests/gpu/test_gpu_functions.py` takes the same cases, small, and
with data and model where they may lie. With TANGENCY_GPU_ON_CPU=1 the second column is the CPU again.
"""

import argparse
import copy
import datetime
import json
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tangency as tg
from tangency.demo import network
from tangency.kernels.empirical import Empirical

ROOT = Path(__file__).resolve().parents[2]
Found = dict[str, Tensor]
START, END = "<!-- functions -->", "<!-- /functions -->"


@dataclass(frozen=True)
class World:
    """A trained network and its data, somewhere."""

    net: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    options: dict[str, Any]  # memory, store: where they were asked for and the function takes them

    def take(self, *names: str) -> dict[str, Any]:
        """Those of the options that a function takes."""
        return {k: v for k, v in self.options.items() if k in names} | {"progress": False}

    def kernel(self) -> Empirical:
        """Of the network's trace."""
        return tg.trace_ntk(self.net)

    def gram(self) -> tg.Gram:
        """Of the training samples, in memory or in a store."""
        options = self.take("memory", "store")
        if "store" in options:
            options["store"] = Path(options["store"]) / "gram"
        return tg.compute(self.kernel(), self.train[0], **options)


def world(n: int, m: int) -> World:
    """On the CPU: `n` training and `m` test images of ten classes, 5 % of the labels wrong, and a CNN trained on it."""
    g = torch.Generator().manual_seed(0)
    patterns = torch.randn(10, 1, 8, 8, generator=g)

    def drawn(count: int) -> tuple[Tensor, Tensor]:
        y = torch.arange(count) % 10
        return patterns[y] + 1.5 * torch.randn(count, 1, 8, 8, generator=g), y

    train, test = drawn(n), drawn(m)
    wrong = torch.randperm(n, generator=g)[: n // 20]
    train[1][wrong] = (train[1][wrong] + 1) % 10
    net = tg.models.initialized(network, seed=0)
    tg.models.fit(net, *train, epochs=3, lr=3e-3, batch=50, optimizer="adam", progress=False)
    return World(net, train, test, {})


def moved(w: World, model: str | torch.device, data: str | torch.device, **options: Any) -> World:
    """The same, with a copy of the model and the data elsewhere."""
    train, test = (tuple(v.to(data) for v in part) for part in (w.train, w.test))
    return World(copy.deepcopy(w.net).to(model).eval(), train, test, options)  # type: ignore[arg-type]


def audit(w: World) -> Found:
    found = tg.audit(w.net, w.train, w.test, **w.take("memory", "store"))
    assert found.cleaning is not None
    return {
        "margin": found.suspects.margin, "wrong": found.suspects.wrong, "support": found.support.unexplained,
        "cleaned": found.cleaning.dropped,
    }  # fmt: skip


def audit_targets(w: World) -> Found:
    """The targets are the network's own outputs, smooth functions of its inputs, and a few that are not."""
    parts = []
    for x, _ in (w.train, w.test):
        g = torch.Generator().manual_seed(3)
        u = torch.randn(64, 10, generator=g) / 8
        y = (x.flatten(1).cpu() @ u).sin() + 0.05 * torch.randn(len(x), 10, generator=g)
        y[:5] += 2
        parts.append((x, y.to(x.device)))
    found = tg.audit(w.net, *parts, **w.take("memory", "store"))
    return {"margin": found.suspects.margin, "wrong": found.suspects.wrong, "reg": torch.tensor(found.choice.reg)}


def audit_features(w: World) -> Found:
    kernel = tg.cosine(tg.projected(w.kernel(), dim=64))
    found = tg.audit(w.net, w.train, w.test, kernel=kernel, **w.take("memory"))
    return {"margin": found.suspects.margin, "support": found.support.unexplained}


def explain(w: World) -> Found:
    found = tg.explain(w.net, w.train, w.test, kernels=["trNTK", "CK"], samples=10, **w.take("memory", "store"))
    return {f"logits by {e.name}": e.logits.softmax(1) for e in found.explanations} | {"logits": found.logits}


def shift(w: World) -> Found:
    found = tg.shift(w.net, w.train[0], w.test[0] + 0.5, draws=199, **w.take("memory"))
    return {
        "MMD": torch.tensor(found.mmd.value), "p": torch.tensor([found.mmd.p, found.classifier.p]),
        "null": found.mmd.null.sort().values, "ratio": found.ratio_target,
    }  # fmt: skip


def mmd(w: World) -> Found:
    found = tg.distributions.mmd(w.kernel(), w.train[0], w.test[0] + 0.2, draws=199, **w.take("memory"))
    return {"MMD": torch.tensor(found.value), "p": torch.tensor(found.p), "witness": found.witness_x}


def outliers(w: World) -> Found:
    x, z = (v.flatten(1) for v in (w.train[0], w.test[0]))
    found = tg.distributions.outliers_features(x, z)
    return {"scores": found.scores}


def probe(w: World) -> Found:
    found = tg.representations.probe(w.net, w.train, w.test, layers=["1", "6"], dims=(1, 5, 20), **w.take("memory"))
    curves = {f"{layer.name} {kind}": v for layer in found.layers for kind, v in layer.accuracy.items()}
    collapse = torch.tensor([[layer.collapse.nc1, layer.collapse.nc2_norms] for layer in found.layers])
    return curves | {"collapse": collapse, "explained": found.layers[0].explained}


def refit(w: World) -> Found:
    found = tg.refit_last_layer(w.net, w.train, w.test, reg=1.0, resamples=100, progress=False)
    assert found.test is not None
    head = found.model.get_submodule(found.layer)
    assert isinstance(head, nn.Linear)
    return {"weights": head.weight.detach(), "loss": torch.tensor([found.train.loss.after, found.test.loss.after])}


def look_ahead(w: World) -> Found:
    labelled = torch.arange(0, len(w.train[0]), 4)
    memory = {k: v for k, v in w.options.items() if k == "memory"}
    ahead = tg.active.look_ahead(w.gram(), labelled, w.train[1].cpu()[labelled], classes=10, **memory)
    return {"outputs": ahead.outputs, "change": ahead.most_likely_change()}


def monitor(w: World) -> Found:
    net = copy.deepcopy(w.net)
    watched = tg.dynamics.Monitor(tg.trace_ntk(net), w.test[0], y=w.test[1], loss=nn.functional.cross_entropy, every=1)
    g = torch.Generator().manual_seed(1)
    for step in range(4):
        watched.step(step)
        with torch.no_grad():
            for p in net.parameters():
                p.add_((0.02 * torch.randn(p.shape, generator=g)).to(p.device))
    found = watched.history()
    return {k: v for k, v in found.values.items() if k in ("change", "cosine", "moved", "loss", "alignment", "energy")}


def density(w: World) -> Found:
    found = tg.spectra.density(w.gram(), steps=8, probes=6, progress=False)
    return {"eigenvalues": found.eigenvalues()}


def jacobian_density(w: World) -> Found:
    memory = {k: v for k, v in w.options.items() if k == "memory"}
    gram = tg.spectra.jacobian_gram(w.kernel(), w.test[0], **memory)
    found = tg.spectra.density(gram, steps=4, probes=4, progress=False)
    return {"eigenvalues": found.eigenvalues()}


def alignment(w: World) -> Found:
    f = w.train[1].float() - 4.5
    gram = w.gram()
    y = f.to(gram.device or f.device)
    one = tg.spectra.jacobian_alignment(w.kernel(), w.train[0], f)
    return {
        "alignment": torch.tensor(one), "eigenvalues": tg.spectra.eigenvalues(gram)[:20],
        "target": torch.tensor(tg.spectra.target_alignment(gram, y, centred=True)),
        "energy": tg.spectra.energy(gram, y, 5, progress=False).parts,
    }  # fmt: skip


def validate(w: World) -> Found:
    """From the Gram alone: predicted and measured risk, and an audit of real targets."""
    gram, cross = w.gram(), tg.compute(w.kernel(), w.test[0], w.train[0], progress=False)
    y, z = (nn.functional.one_hot(v, 10).double() for v in (w.train[1], w.test[1]))
    if gram.device is not None:
        y, z = y.to(gram.device), z.to(gram.device)
    reg = float(gram.diag().mean())
    study = tg.regress.risk_study(gram, y, cross, z, sizes=[len(y) // 2], regs=[reg, 10 * reg], progress=False)
    found = tg.auditing.audit_gram(gram, w.train[1].double(), targets="real", progress=False)
    return {"gcv": study.gcv, "loo": study.loo, "measured": study.measured, "margin": found.suspects.margin}


def eigenfunctions(w: World) -> Found:
    found = tg.studies.eigenfunctions(w.gram(), 5, tol=1e-6, progress=False)
    return {"values": found.values, "vectors": found.vectors @ found.vectors.T}


def anisotropy(w: World) -> Found:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the network has kinks
        found = tg.studies.anisotropy(w.net, w.test[0], 3, head=0, progress=False)
    return {"values": found.values, "direction": torch.outer(*[found.directions[0].flatten()] * 2)}


def infinite(w: World) -> Found:
    """Of a dense network as wide as one likes; tests/gpu/test_gpu_infinite.py has the others."""
    net = nn.Sequential(nn.Flatten(), tg.models.mlp([64, 8, 8, 10])).to(w.test[0].device)
    return {"kernel": tg.infinite_ntk(net)(w.test[0]), "gram": tg.compute(tg.infinite_ntk(net), w.test[0]).dense()}


def convergence(w: World) -> Found:
    x = w.test[0].flatten(1)[:20].double()
    found = tg.studies.convergence(lambda m: tg.models.mlp([64, m, 1]), [16, 64], x, seeds=3, progress=False)
    return {"ntk": found.ntk, "nngp": found.nngp}


def trainability(w: World) -> Found:
    x = w.test[0].flatten(1)[:30]
    x = (x / x.norm(dim=1, keepdim=True) * 8).double()
    found = tg.studies.trainability(x, [1, 4, 8], [1.0, 2.0], activation="relu", progress=False)
    return {"kappa": found.kappa.log()}


def leave_out(w: World) -> Found:
    y = nn.functional.one_hot(w.train[1], 10).double()
    gram = w.gram()
    found = tg.regress.leave_out(gram, y.to(gram.device or y.device), reg=float(gram.diag().mean()), progress=False)
    return {"predictions": found.predictions, "leverage": found.leverage}


def surrogate(w: World) -> Found:
    gram = w.gram()
    y = w.train[1] if gram.device is None else w.train[1].to(gram.device)
    fit = tg.surrogate.fit(gram, y, progress=False)
    return {"probabilities": fit.probabilities(gram[:50].to(fit.coefficients))}


def least_squares(w: World) -> Found:
    """Tall features, a column of them twice."""
    x = w.train[0].flatten(1).double()
    phi = torch.cat([x, x[:, :1]], 1)
    y = nn.functional.one_hot(w.train[1], 10).double()
    fit = tg.regress.least_squares(phi, y)
    return {"coefficients": fit.coefficients, "fitted": fit.fitted}


@dataclass(frozen=True)
class Case:
    """A function, what it takes (a store, memory), and how far two devices' answers may be apart."""

    run: Callable[[World], Found]
    takes: tuple[str, ...] = ()
    bound: float = 1e-3

    @property
    def name(self) -> str:
        """What it is called in the table."""
        return self.run.__name__.replace("_", " ")


# Float32 networks' kernels are right to about 1e-6; what is built on them is as its conditioning has it. Accuracies and
# p-values move by whole samples and draws where two are about equal.
CASES = (
    Case(audit, ("store", "memory"), 5e-3),
    Case(audit_targets, ("store", "memory"), 1e-5),
    Case(audit_features, ("memory",), 5e-3),
    Case(explain, ("store", "memory"), 5e-3),
    Case(shift, ("memory",), 2e-2),
    Case(mmd, ("memory",), 2e-2),
    Case(outliers, (), 1e-4),
    Case(probe, ("memory",), 3e-2),
    Case(refit, (), 1e-3),
    Case(look_ahead, ("store", "memory"), 1e-3),
    Case(monitor, (), 1e-3),
    Case(density, ("store",), 1e-3),
    Case(jacobian_density, ("memory",), 1e-3),
    Case(alignment, ("store",), 1e-3),
    Case(validate, ("store",), 1e-2),
    Case(eigenfunctions, ("store",), 1e-2),
    Case(anisotropy, (), 1e-2),
    Case(infinite, (), 1e-5),
    Case(convergence, (), 1e-6),
    Case(trainability, (), 1e-6),
    Case(leave_out, ("store",), 1e-3),
    Case(surrogate, ("store",), 1e-3),
    Case(least_squares, (), 1e-8),
)


def difference(found: Found, wanted: Found) -> float:
    """The largest ‖a − b‖ / ‖b‖ of two answers."""
    assert found.keys() == wanted.keys()
    worst = 0.0
    for name, b in wanted.items():
        a, b = (v.detach().cpu().double() for v in (found[name], b))
        assert a.shape == b.shape, f"{name}: {tuple(a.shape)}, not {tuple(b.shape)}"
        assert bool(a.isfinite().equal(b.isfinite())), f"{name}: other numbers are finite"
        a, b = a[b.isfinite()], b[b.isfinite()]
        worst = max(worst, float((a - b).norm() / b.norm().clamp_min(1e-300)))
    return worst


def timed(run: Callable[[World], Found], w: World) -> tuple[Found, float]:
    """The answer and its seconds."""
    sync()
    start = time.perf_counter()
    found = run(w)
    sync()
    return found, time.perf_counter() - start


def sync() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured(cases: Iterable[Case], n: int, device: str) -> list[dict[str, Any]]:
    """A row for each case."""
    small, large = world(120, 60), world(n, n // 3)
    rows = []
    for case in cases:
        seconds, answers = [], []
        for where in ("cpu", device):
            with suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                case.run(moved(small, where, where))  # starts libraries
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found, took = timed(case.run, moved(large, where, where))
            seconds.append(took)
            answers.append(found)
        row = {"function": case.name, "cpu": round(seconds[0], 3), "gpu": round(seconds[1], 3)}
        row |= {"difference": difference(answers[1], answers[0]), "bound": case.bound}
        print(f"{row['function']:18s} {row['cpu']:8.2f} s {row['gpu']:8.2f} s  {row['difference']:.1e}", flush=True)
        rows.append(row)
    return rows


def with_stores(cases: Iterable[Case], device: str) -> list[dict[str, Any]]:
    """Data on the CPU, model on the device, `store=` and `memory=` given: how far from the CPU's answer in memory."""
    small, rows = world(120, 60), []
    for case in cases:
        if not case.takes:
            continue
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            options = {k: v for k, v in {"store": folder, "memory": "64MB"}.items() if k in case.takes}
            apart = difference(case.run(moved(small, device, "cpu", **options)), case.run(moved(small, "cpu", "cpu")))
        rows.append({"function": case.name, "options": sorted(options), "difference": apart, "bound": case.bound})
    return rows


def table(result: dict[str, Any], file: str) -> str:
    """In Markdown, with where it comes from."""
    worst = max(r["difference"] for r in result["elsewhere"])
    lines = [
        f"{result['device']} beside {result['cpu']}, torch {result['torch']} "
        f"(`{file}`); with a store, a budget and data on the CPU the largest "
        f"difference is {worst:.0e}.",
        "",
    ]
    lines += ["| function | CPU, s | GPU, s | difference |", "|---|---|---|---|"]
    lines += [
        f"| {r['function']} | {r['cpu']:.2f} | {r['gpu']:.2f} | {r['difference']:.0e} |" for r in result["functions"]
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the figures, as JSON")
    parser.add_argument("--commit", default="unknown", help="what was measured")
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--only", default="", help="functions whose names hold this")
    parser.add_argument("--table", type=Path, help="write the table of this JSON into docs/speed.md, and stop")
    args = parser.parse_args()
    if args.table:
        page = ROOT / "docs" / "speed.md"
        text, result = page.read_text(encoding="utf-8"), json.loads(args.table.read_text(encoding="utf-8"))
        before, after = text.index(START) + len(START), text.index(END)
        page.write_text(f"{text[:before]}\n{table(result, args.table.as_posix())}\n{text[after:]}", encoding="utf-8")
        return
    device = "cpu" if os.environ.get("TANGENCY_GPU_ON_CPU") else "cuda"
    cases = [c for c in CASES if args.only in c.name]
    result = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "CPU in place of a GPU",
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": args.commit,
        "samples": args.samples,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python3 -m benchmarks.speed.functions --out FILE --commit HASH",
        "functions": measured(cases, args.samples, device),
        "elsewhere": with_stores(cases, device),
    }
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
