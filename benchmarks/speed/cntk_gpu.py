"""Convolutional kernels of infinite width on one GPU: how exact, how fast, beside neural-tangents in the same run.

    python3 -m benchmarks.speed.cntk_gpu --out cntk.json [--data FOLDER] [--peer] [--only exact,psd,speed]

Exact: the fused kernels in float32 and float64 against the plain recursion in float64, on random images and on
CIFAR-10: the first ones, those with the largest areas of one colour, copies, copies with one changed value, and darker
copies. PSD: the least eigenvalue of the Gram of 2,000 images over its trace. Speed: microseconds a pair, all of
`tg.compute` included, with what the compiled kernels take of the card. `--peer` runs neural-tangents (float32, jitted,
compiling not counted) by benchmarks/peers/nt_on_new_jax.py. Needs torch and numpy alone, the peer jax.
"""

import argparse
import ctypes
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.infinite import Conv, Erf, Gelu, GlobalAvgPool, Identity, LeakyRelu, Linear, Relu, Serial, Sum
from tangency.infinite.activations.dual import Dual
from tangency.infinite.layers.basic import Layer
from tangency.infinite.moments.assemble import PreparedBatch, gram_tile
from tangency.infinite.moments.core import Side
from tangency.infinite.moments.fused import gpu
from tangency.infinite.moments.fused.cuda import Program, make_program
from tangency.infinite.moments.fused.layout import Real
from tangency.infinite.moments.fused.plan import find_plan
from tangency.infinite.moments.recursion import with_own_moments

Row = dict[str, Any]
REGISTERS, LOCAL = 4, 3  # of cuFuncGetAttribute


def block(stride: int) -> Layer:
    branch = Serial(Relu(), Conv((3, 3), stride=stride, padding=1), Relu(), Conv((3, 3), padding=1))
    return Sum(branch, Conv((1, 1), stride=stride) if stride > 1 else Identity())


def stack(kind: Dual, depth: int) -> Layer:
    layers = [layer for _ in range(depth) for layer in (Conv((3, 3), padding=1), kind)]
    return Serial(*layers, GlobalAvgPool(), Linear())


STRIDES = (1, 1, 2, 1, 2, 1, 2, 1)
NETS: dict[str, tuple[Layer | nn.Module, int]] = {  # and how many images its time is taken with
    "10 convolutions, pooling": (tg.models.conv_stack(10), 1600),
    "21 convolutions, pooling": (tg.models.conv_stack(21), 800),
    "21 convolutions, Flatten": (tg.models.conv_stack(21, size=32), 4000),
    "Myrtle-5": (tg.models.myrtle(5), 1200),
    "Myrtle-10": (tg.models.myrtle(10), 1200),
    "ResNet18, pre-activation": (
        Serial(Conv((3, 3), padding=1), *map(block, STRIDES), Relu(), GlobalAvgPool(), Linear()),
        1600,
    ),
    "leaky ReLU, 5 convolutions": (stack(LeakyRelu(0.1), 5), 800),
    "GELU, 5 convolutions": (stack(Gelu(), 5), 800),
    "erf, 5 convolutions": (stack(Erf(), 5), 800),
}


def images(folder: Path | None, count: int) -> Tensor:
    """CIFAR-10 standardised by channel, or noise."""
    if folder is None:
        return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(0)).cuda()
    x = tg.datasets.cifar10(folder).train.x
    assert isinstance(x, Tensor)
    x = x[:count]
    spread, mean = torch.std_mean(x, (0, 2, 3), keepdim=True)
    return ((x - mean) / spread).cuda()


def hard(x: Tensor) -> Tensor:
    """The first images, those of large areas of one colour, and copies that nearly coincide with one of them."""
    still = (x[..., 1:] - x[..., :-1]).abs().sum(1) == 0
    flat = x[still.double().mean((1, 2)).argsort(descending=True)[:6]]
    first = x[:8]
    changed = first[:2].clone()
    changed[:, 0, 5, 5] += 1 / 64
    return torch.cat([first, flat, first[:1], changed, 0.5 * first[:1]])


def plainly(kernel: tg.infinite.Infinite, x: Tensor) -> PreparedBatch:
    build, recursion = kernel.read(kernel.ready(x))
    assert build.energy is not None
    return PreparedBatch(recursion, with_own_moments(recursion, Side(build.known, build.size, build.energy)))


def exactness(name: str, net: Layer | nn.Module, x: Tensor, of: str) -> Row:
    kernel = tg.infinite_ntk(net)
    a = plainly(kernel, x)
    plain = gram_tile(a, a, ("nngp", "ntk"), None, fuse=False)
    row: Row = {"network": name, "images": of, "n": len(x)}
    for dtype in ("float32", "float64"):
        found = tg.infinite_ntk(net, dtype=dtype).both(x)
        for part, v in zip(("nngp", "ntk"), found, strict=True):
            off = (v.double() - plain[part]).abs()
            row[f"{dtype} {part}, relative"] = float((off / plain[part].abs()).max())
            row[f"{dtype} {part}, of the largest"] = float(off.max() / plain[part].abs().max())
    return row


def attribute(compiled: Any, which: int) -> int:
    value = ctypes.c_int()
    torch.cuda._utils._get_gpu_runtime_library().cuFuncGetAttribute(ctypes.byref(value), which, compiled.func)
    return value.value


def built(program: Program) -> list[Row]:
    """What each kernel takes of a processor with 65,536 registers and room for 64 warps."""
    rows = []
    for k in program.kernels:
        compiled = gpu._compiled(k.text, "stage", k.shared, 0)
        registers = attribute(compiled, REGISTERS)
        blocks = min(65536 // (registers * 32 * k.warps), 233472 // (k.shared + 1024), 64 // k.warps)
        rows.append({
            "registers": registers, "spilled bytes": attribute(compiled, LOCAL), "shared bytes": k.shared,
            "warps of a block": k.warps, "warps of a processor": blocks * k.warps, "occupancy": blocks * k.warps / 64,
        })  # fmt: skip
    return rows


def timed(name: str, net: Layer | nn.Module, x: Tensor, dtype: str) -> Row:
    kernel = tg.infinite_ntk(net, dtype=dtype)  # type: ignore[arg-type]
    tg.compute(kernel, x[:64], progress=False)  # compiles
    torch.cuda.synchronize()
    start = time.perf_counter()
    tg.compute(kernel, x, progress=False)
    torch.cuda.synchronize()
    seconds, n = time.perf_counter() - start, len(x)
    plan = find_plan(kernel.read(kernel.ready(x[:1]))[1])
    assert not isinstance(plan, str)
    real: Real = "float" if dtype == "float32" else "double"
    program = make_program(plan, real, True)
    assert not isinstance(program, str)
    pairs = n * (n + 1) / 2
    row = {"network": name, "dtype": dtype, "n": n, "seconds": seconds, "µs a pair": 1e6 * seconds / pairs}
    return row | {"kernels": built(program)}


def peer(depth: int, end: str, x: Tensor, batch: int) -> Row:
    """neural-tangents in a process of its own, and its first block against ours in float64."""
    folder = Path("/tmp/cntk_peer")
    folder.mkdir(exist_ok=True)
    np.save(folder / "images.npy", x[: 2 * batch].movedim(1, -1).cpu().numpy())
    out = folder / "peer.json"
    options = ["--depth", str(depth), "--size", "32", "--batch", str(batch), "--end", end, "--repeats", "5"]
    command = [sys.executable, "-m", "benchmarks.peers.nt_on_new_jax", *options, "--dtype", "float32"]
    subprocess.run([*command, "--inputs", str(folder / "images.npy"), "--out", str(out)], check=True)
    found = json.loads(out.read_text(encoding="utf-8"))
    net = tg.models.conv_stack(depth, size=None if end == "pool" else 32)
    ours = tg.infinite_ntk(net)(x[:batch], x[batch : 2 * batch]).cpu().numpy()
    theirs = np.asarray(found.pop("kernel"))
    return {"depth": depth, "end": end, "largest difference": float(np.abs(ours / theirs - 1).max()), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--peer", action="store_true")
    parser.add_argument("--only", default="exact,psd,speed")
    args = parser.parse_args()
    result: dict[str, Any] = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    result |= {"python": platform.python_version(), "tangency": tg.__version__, "command": " ".join(sys.argv)}
    x, noise = images(args.data, 5000), images(None, 5000)

    def note(part: str, row: Row) -> None:
        """Print a row, and keep all there is in the file."""
        result.setdefault(part, []).append(row)
        print(part, json.dumps(row, ensure_ascii=False), flush=True)
        args.out.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    if args.peer:
        for depth, end in ((10, "pool"), (21, "pool"), (21, "flatten")):
            note("neural-tangents", peer(depth, end, noise, 8 if end == "pool" else 64))
    if "speed" in args.only:
        for name, (net, n) in NETS.items():
            note("speed", timed(name, net, noise[:n], "float32"))
        net, n = NETS["10 convolutions, pooling"]
        note("speed", timed("10 convolutions, pooling", net, noise[: n // 4], "float64"))
    if "exact" in args.only:
        for name, (net, _) in NETS.items():
            note("exact", exactness(name, net, noise[:12], "random"))
            if args.data is not None:
                note("exact", exactness(name, net, hard(x), "CIFAR-10, hard ones among them"))
    if "psd" in args.only:
        gram = tg.compute(tg.infinite_ntk(tg.models.conv_stack(10), dtype="float32"), x[:2000], progress=False)
        K = gram.dense().double().cuda()
        least = torch.linalg.eigvalsh(K)[0]
        note(
            "psd",
            {"n": 2000, "least eigenvalue over trace": float(least / K.trace()), "symmetric": bool((K == K.T).all())},
        )


if __name__ == "__main__":
    main()
