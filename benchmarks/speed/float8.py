"""8-bit and 16-bit factors on one GPU: seconds, where they go, and errors against plain float64. ResNet18, 10 outputs.

Run on the GPU machine:

    PYTHONPATH=src python3 -m benchmarks.speed.float8 --out FILE [--samples 12672] [--full trace-float8 …] [--data DIR]

With --data (the folder of `benchmarks/speed/scale.py`) the images are CIFAR-10's, else made: a smooth picture per class
with noise. The network is trained on them for some seconds first. Four parts, each printed when it is there:

- parts: products, rounding and forming alone, a block prepared, one tile contracted with each change switched on alone;
- layers: milliseconds of each parameter in one tile, in 16 and in 8 bits;
- whole: the Gram of all samples from the call of `tg.compute` to its return, extrapolated to 60,000 by the number of
  pairs, errors of 200 pairs against gradients by autograd in float64, and the 15 GPU kernels that take longest;
- --full: 60,000 samples in a store, as `benchmarks/speed/scale.py` does it;
- surrogate (only if named): two thirds of the samples train the network and its surrogates, the last third asks them:
  accuracy of ridge regression and τ_K in both precisions, errors of 200 pairs as above.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.speed.scale import cifar, flops, matrix_rate, resnet
from benchmarks.speed.tile import clock
from tangency.decisions import Grams
from tangency.engine import fused, methods, narrow
from tangency.engine.blocks import gradient
from tangency.engine.rules import ConvRule, Windows
from tangency.gram import plan, sweep
from tangency.gram.plan import TilePlan
from tangency.models import outputs
from tangency.surrogate import default_reg, faithfulness, fit

TILE, DEVICE = 2112, "cuda"
NEVER = 1 << 60
# What is switched on or off, one thing at a time: (dtype, settings).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "16 bits, patches unfolded": ("float16", {"fetch": NEVER}),
    "16 bits": ("float16", {}),
    "8 bits, patches unfolded": ("float8", {"fetch": NEVER}),
    "8 bits, formed in three passes": ("float8", {"form": False}),
    "8 bits, none in place": ("float8", {"wide": NEVER}),
    "8 bits, sums of 14 bits": ("float8", {"fast": True}),
    "8 bits": ("float8", {}),
}


def say(*words: object) -> None:
    print(*words, flush=True)


def images(n: int) -> tuple[Tensor, Tensor]:
    """Made images: a smooth picture per class, moved and mixed with another and with noise."""
    draw = torch.Generator().manual_seed(0)
    pictures = nn.functional.interpolate(torch.randn(40, 3, 6, 6, generator=draw), size=(40, 40), mode="bicubic")
    labels = torch.randint(0, 10, (n,), generator=draw)
    kinds = labels + 10 * torch.randint(0, 4, (n,), generator=draw)
    others = torch.randint(0, 40, (n,), generator=draw)
    x = torch.empty(n, 3, 32, 32)
    for k in range(n):
        i, j = (int(v) for v in torch.randint(0, 8, (2,), generator=draw))
        x[k] = (0.8 * pictures[kinds[k]] + 0.5 * pictures[others[k]])[:, i : i + 32, j : j + 32]
    return x + 0.4 * torch.randn(x.shape, generator=draw), labels


@contextmanager
def settings(
    fetch: int | None = None, wide: int | None = None, fast: bool = False, form: bool = True, benchmark: bool = False
) -> Iterator[None]:
    """The library with some of its choices changed."""
    before = methods._FETCH, narrow.WIDE, narrow.FAST_SUMS, fused.forms
    methods._FETCH = before[0] if fetch is None else {"cpu": fetch, "cuda": fetch}
    narrow.WIDE = before[1] if wide is None else wide
    narrow.FAST_SUMS = fast
    fused.forms = before[3] if form else lambda a, d: False
    try:
        yield
    finally:
        methods._FETCH, narrow.WIDE, narrow.FAST_SUMS, fused.forms = before


def alone() -> dict[str, float]:
    """Products of [2112, k] in TFLOP/s, and the error that 14-bit sums make; rounding in GB/s of what it reads."""
    k, result = 1 << 17, {}
    g = torch.randn(TILE, k, device=DEVICE).relu_().half()  # of one sign: what sums lose does not cancel
    result["16-bit product"] = 2 * TILE**2 * k / clock(lambda: narrow.matmul_wide(g, g.T)) / 1e12
    result["rounding, GB/s"] = g.numel() * 2 / clock(lambda: narrow.rounded(g)) / 1e9
    few = g[:256]
    want = narrow.rounded(few).q.double()
    exact = want @ want.T
    q = narrow.rounded(g).q
    for fast in (False, True):
        with settings(fast=fast):
            name = "8-bit product" + ", sums of 14 bits" * fast
            result[name] = 2 * TILE**2 * k / clock(lambda: narrow.matmul_eight(q, q)) / 1e12
            got = narrow.matmul_eight(q[:256], q[:256]).double()
            result[f"{name}: relative error"] = float(((got - exact) / exact).abs().max())
    for name, value in result.items():
        say(f"  {name:45s} {value:12.4g}")
    return result


def tuning() -> dict[str, float]:
    """Microseconds per sample to form gradients in 8 bits, and nanoseconds per pair to sum over shifts."""
    result, before = {}, dict(fused.FORM)
    for t, rows, i in ((64, 2560, 2304), (256, 1280, 1152), (64, 256, 2304)):
        a = torch.randn(256, 1, t, i, device=DEVICE).half()
        d = torch.randn(256, t, 1, rows, device=DEVICE).half().transpose(1, 2)[:, :, :, None]
        largest = narrow.bound(a, d)
        for o, wide, warps, stages in (
            (128, 128, 8, 3), (128, 128, 4, 3), (128, 128, 8, 1), (128, 128, 4, 1), (128, 256, 8, 2), (256, 128, 8, 2),
            (64, 128, 4, 2), (64, 256, 4, 2), (128, 64, 4, 2),
        ):  # fmt: skip
            fused.FORM.update({"BLOCK_O": o, "BLOCK_I": wide, "num_warps": warps, "num_stages": stages})
            name = f"form {rows} x {i}, t = {t}, us a sample: {o} x {wide}, {warps} warps, {stages} stages"
            result[name] = 1e6 / 256 * clock(partial(narrow.formed, a, d, largest))
        fused.FORM.update(before)
        result[f"bound {rows} x {i}, t = {t}, us a sample"] = 1e6 / 256 * clock(partial(narrow.bound, a, d))
        whole = partial(gradient, a, d)
        result[f"form {rows} x {i}, t = {t}, us a sample, 16 bits"] = 1e6 / 256 * clock(whole)
    rule = ConvRule(Windows((3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1), 1))
    places = rule.places(torch.empty(1, 1, 1, 4, 4, device=DEVICE))
    p, d = (torch.randn(512, 16, 1024, 16, device=DEVICE) for _ in range(2))
    pairs = 512 * 1024
    result["sum over shifts, ns a pair"] = 1e9 / pairs * clock(partial(fused.sum_shifted, p, d, places, places))
    flat = p.view(512 * 16, -1), d.view(512 * 16, -1), 512, 16, 1024, 16
    result["sum of products, ns a pair"] = 1e9 / pairs * clock(partial(fused.sum_products, *flat))
    for rows in (1856, 2048, 2112, 2304, 2432, 2560, 2688, 2816, 3072, 4032):
        g = torch.randn(rows, 1 << 16, device=DEVICE).half()
        q = narrow.rounded(g).q
        flop = 2 * rows**2 * g.shape[1] / 1e12
        result[f"{rows} rows, 16 bits, TFLOP/s"] = flop / clock(partial(narrow.matmul_wide, g, g.T))
        result[f"{rows} rows, 8 bits, TFLOP/s"] = flop / clock(partial(narrow.matmul_eight, q, q))
    for name, value in result.items():
        say(f"  {name:75s} {value:9.4g}")
    return result


def prepare(kernel: Any, x: Tensor, memory: int | None = None) -> Any:
    return kernel.prepare(kernel.ready(x), memory)


def parts(model: nn.Module, x: Tensor) -> dict[str, Any]:
    """Preparing a block, and one tile with each change alone."""
    result: dict[str, Any] = {}
    first, second = x[:TILE].to(DEVICE), x[TILE : 2 * TILE].to(DEVICE)
    for name, make in KERNELS.items():
        kernel = make(model, "float16")
        for gigabytes in (4, 8, 12, 24):
            seconds = clock(partial(prepare, kernel, first, gigabytes << 30))
            result[f"{name}, prepare in {gigabytes} GiB"] = seconds
            say(f"  {name:6s} prepare {TILE} in {gigabytes} GiB {seconds * 1e3:8.1f} ms")
        say(f"  {name:6s} bytes of a sample (kept, transient): {kernel.footprint(kernel.ready(first))}")
        held = {dtype: [prepare(make(model, dtype), v) for v in (first, second)] for dtype in ("float16", "float8")}
        sides = held["float16"]
        size = kernel.prepared_diag(sides[0]).sqrt()[:, None] * kernel.prepared_diag(sides[1]).sqrt()
        want = None
        for label, (dtype, chosen) in VARIANTS.items():
            other, sides = make(model, dtype), held[dtype]
            with settings(**chosen):
                seconds, tile = clock(partial(other.pair, *sides, 1 << 31)), other.pair(*sides, 1 << 31)
            want = tile if want is None else want
            gap = float(((tile - want) / size).abs().max())
            result[f"{name}, tile, {label}"] = {"seconds": seconds, "cosines_from_first": gap}
            say(f"  {name:6s} tile, {label:34s} {seconds * 1e3:8.1f} ms, cosines off the first by {gap:.1e}")
        result[f"{name}, layers"] = layers(make, model, held)
        del held, sides
        torch.cuda.empty_cache()
    return result


def layers(make: Callable[..., Any], model: nn.Module, held: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of each parameter in a tile."""
    rows = {}
    for dtype, (a, b) in held.items():
        kernel = make(model, dtype)
        for name in a:
            ms = 1e3 * clock(partial(kernel.pair, {name: a[name]}, {name: b[name]}, 1 << 31), 1)
            if ms > 1:
                cost = methods.choose_method(a[name], b[name], True, eight=kernel.feature_map.network.eight)
                rows[f"{name}, {dtype}"] = ms
                rate = cost.flops / ms / 1e9
                say(f"    {name:32s} {dtype:8s} {cost.method:9s} {cost.precision:14s} {ms:7.1f} ms {rate:6.0f} TFLOP/s")
    return rows


def brute_force(model: nn.Module, x: Tensor, outputs: list[int]) -> Tensor:
    """Σ_c ∂f_c ∂f_c'ᵀ of a few samples in float64, by autograd alone."""
    wide = resnet_like(model).double()
    parameters, rows = list(wide.parameters()), []
    for one in x.double():
        out = wide(torch.stack([one, one]))[0]  # torch's batch norm is wrong for some batches of one
        gradients = [torch.autograd.grad(out[c], parameters, retain_graph=True) for c in outputs]
        rows.append(torch.stack([torch.cat([g.flatten() for g in of_one]) for of_one in gradients]).flatten())
    j = torch.stack(rows)
    return (j @ j.T).cpu()


def resnet_like(model: nn.Module) -> nn.Module:
    copy = tg.models.resnet18(10).to(DEVICE).eval()
    copy.load_state_dict(model.state_dict())
    return copy


def errors(gram: Tensor, want: Tensor, numbers: Tensor) -> dict[str, float]:
    """Of 200 pairs: cosines, entries relative to their largest, and the diagonal."""
    got = gram[numbers][:, numbers].double().cpu()

    def cosines(k: Tensor) -> Tensor:
        d = k.diagonal().sqrt()
        return k / (d[:, None] * d)

    i, j = torch.triu_indices(len(numbers), len(numbers), 1)
    i, j = i[:200], j[:200]
    off = (cosines(got) - cosines(want))[i, j].abs()
    diagonal = (got.diagonal() / want.diagonal() - 1).abs()
    return {"cosine_max": float(off.max()), "cosine_mean": float(off.mean()), "diagonal_max": float(diagonal.max())}


def top_kernels(run: Callable[[], Any]) -> list[dict[str, Any]]:
    """The 15 GPU kernels that take longest, and their part of all."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as record:
        run()
        torch.cuda.synchronize()
    events = [e for e in record.key_averages() if e.self_device_time_total > 0]
    total = sum(e.self_device_time_total for e in events)
    events.sort(key=lambda e: -e.self_device_time_total)
    rows = []
    for e in events[:15]:
        name, ms = e.key[:110], e.self_device_time_total / 1e3
        rows.append({"kernel": name, "ms": ms, "calls": e.count})
        say(f"    {1e5 * ms / total:5.1f} % {ms:9.1f} ms {e.count:6d}  {name}")
    return rows


@contextmanager
def cuts() -> Iterator[list[TilePlan]]:
    """The plans of the runs inside."""
    noted, begin = list[TilePlan](), sweep.Sweep.__init__

    def init(self: sweep.Sweep, kernel: Any, load: Any, cut: TilePlan) -> None:
        noted.append(cut)
        begin(self, kernel, load, cut)

    sweep.Sweep.__init__ = init  # type: ignore[method-assign]
    try:
        yield noted
    finally:
        sweep.Sweep.__init__ = begin  # type: ignore[method-assign]


def whole(model: nn.Module, x: Tensor, profile: bool) -> dict[str, Any]:
    """The Gram of all samples, in both precisions."""
    n, result = len(x), dict[str, Any]()
    numbers = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:21]
    for name, make in KERNELS.items():
        want = brute_force(model, x[numbers].to(DEVICE), list(range(10)) if name == "trace" else [0])
        torch.cuda.empty_cache()
        for label in ("float16, next block ahead", "float16, rows apart", "float16", "float8"):
            dtype, plan.AHEAD = label.split(",")[0], "ahead" in label
            plan.TOGETHER["cuda"] = 1 if "," in label else 3
            kernel = make(model, dtype)
            torch.cuda.synchronize()
            start = time.perf_counter()
            with cuts() as noted:
                gram = tg.compute(kernel, x, progress=False)
            torch.cuda.synchronize()
            seconds, cut = time.perf_counter() - start, noted[-1]
            off = errors(gram.dense(), want, numbers)
            del gram
            blocks = [x[: cut.rows].to(DEVICE), x[-cut.rows :].to(DEVICE)]
            row: dict[str, Any] = {
                "samples": n,
                "seconds": seconds,
                "extrapolated_to_60000_s": seconds * (60000 / n) ** 2,
                "TFLOP_per_s": flops(kernel, blocks, n, cut.rows) / seconds / 1e12,
                "tile": cut.rows,
                "held": cut.group,
                **off,
            }
            del blocks
            torch.cuda.empty_cache()
            say(f"  {name} {label}: " + ", ".join(f"{k} {v:.4g}" for k, v in row.items()))
            if profile and "," not in label:
                row["kernels"] = top_kernels(partial(tg.compute, kernel, x, progress=False))
            result[f"{name}, {label}"] = row
    return result


def surrogates(model: nn.Module, x: Tensor, labels: Tensor) -> dict[str, Any]:
    """What is decided by the kernels of both precisions: ridge accuracy, τ_K and accuracy of the surrogate."""
    known, result = 2 * len(x) // 3, dict[str, Any]()
    x, y = x.to(DEVICE), labels.to(DEVICE)
    network = outputs(model, x[known:]).double()
    targets = nn.functional.one_hot(y[:known], 10).double() - 0.1
    result["network"] = float((network.argmax(1) == y[known:]).double().mean())
    numbers = torch.randperm(known, generator=torch.Generator().manual_seed(1))[:21]
    for name, make in KERNELS.items():
        want = brute_force(model, x[numbers.to(DEVICE)], list(range(10)) if name == "trace" else [0])
        for dtype in ("float16", "float8"):
            kernel = make(model, dtype)
            off = errors(tg.compute(kernel, x[:known], progress=False).dense(), want, numbers)
            gram, cross = Grams(x[:known], x[known:], progress=False)(tg.cosine(kernel))
            machine = tg.regress.ridge(gram, targets, reg=1e-3)
            right = (machine.predict(cross).argmax(1).to(DEVICE) == y[known:]).double().mean()
            surrogate = fit(gram, y[:known], reg=default_reg(gram, alpha=1e-3), progress=False)
            faith = faithfulness(network, surrogate.logits(cross), y[known:], outputs_are="logits")
            row = {"ridge_accuracy": float(right), "tau": faith.tau, "surrogate_accuracy": faith.accuracy, **off}
            result[f"{name}, {dtype}"] = row
            say(f"  {name} {dtype}: " + ", ".join(f"{k} {v:.5g}" for k, v in row.items()))
    return result


def full(model: nn.Module, x: Tensor, folder: str, jobs: list[str]) -> dict[str, Any]:
    """60,000 samples into a store."""
    result = {}
    for job in jobs:
        name, dtype = job.split("-")
        start = time.perf_counter()
        tg.compute(KERNELS[name](model, dtype), x, store=f"{folder}/{job}", progress=False)
        torch.cuda.synchronize()
        result[job] = seconds = time.perf_counter() - start
        say(f"  {job}, {len(x)} samples: {seconds:.1f} s")
    return result


KERNELS: dict[str, Callable[..., Any]] = {
    "trace": lambda model, dtype: tg.trace_ntk(model, dtype=dtype),
    "logit": lambda model, dtype: tg.head_ntk(model, 0, dtype=dtype),
}
JOBS = [f"{name}-{dtype}" for name in KERNELS for dtype in ("float16", "float8")]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=12672)
    parser.add_argument("--data", type=Path, help="cifar0.npy …, as benchmarks/speed/scale.py has them")
    parser.add_argument("--only", nargs="*", choices=["parts", "whole", "surrogate"], default=["parts", "whole"])
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument(
        "--full", nargs="*", choices=JOBS, help="60,000 samples as well, these or all: 1 to 6 minutes each"
    )
    args = parser.parse_args()
    begin, n = time.perf_counter(), args.samples if args.full is None else 60000
    x, labels = cifar(args.data, n) if args.data else images(n)
    with tempfile.TemporaryDirectory() as folder:
        known = 2 * n // 3 if "surrogate" in args.only else n
        epochs = 20 if known < 10000 else 4 if known < 20000 else 1
        model = resnet(x[:known], labels[:known], Path(folder) / "resnet.pt", epochs)
        with torch.no_grad():
            said = torch.cat([model(some.to(DEVICE)).argmax(1).cpu() for some in x[:4000].split(1000)])
        result: dict[str, Any] = {
            "images": "CIFAR-10" if args.data else "made",
            "training_accuracy": float((said == labels[:4000]).float().mean()),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "command": "PYTHONPATH=src python3 -m benchmarks.speed.float8 --out FILE",
        }

        def keep(name: str, value: object) -> None:
            result[name] = value
            args.out.write_text(json.dumps(result, indent=2), encoding="utf-8")

        say(f"trained, accuracy {result['training_accuracy']:.3f} ({time.perf_counter() - begin:.0f} s)")
        if "parts" in args.only:
            keep("matrix_TFLOP_per_s", matrix_rate())
            keep("alone", alone())
            keep("tuning", tuning())
            keep("parts", parts(model, x))
            say(f"({time.perf_counter() - begin:.0f} s)")
        if "whole" in args.only:
            keep("whole", whole(model, x[: args.samples], not args.no_profile))
            say(f"({time.perf_counter() - begin:.0f} s)")
        if "surrogate" in args.only:
            keep("surrogate", surrogates(model, x[: args.samples], labels[: args.samples]))
            say(f"({time.perf_counter() - begin:.0f} s)")
        if args.full is not None:
            keep("full", full(model, x, folder, args.full or JOBS))


if __name__ == "__main__":
    main()
