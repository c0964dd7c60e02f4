"""neural-tangents 0.6.5 under a jax that is years newer than it, so that a GPU machine can give its time per pair.

The library is archived and was written for jax 0.4.25; the GPU machine has jax 0.11 and no network. `restore` puts the
few names back that jax has removed since; not a line of the library is changed. Here, where there is a network, once:

    python -m pip download --no-deps --only-binary=:all: --python-version 3.12 -d wheels \\
        neural-tangents==0.6.5 frozendict==2.4.7
    for wheel in wheels/*.whl; do unzip -q "$wheel" -d .gpu-wheels -x 'tests/*' 'examples/*'; done

There, from the repository's root, with .gpu-wheels/neural_tangents and .gpu-wheels/frozendict brought along:

    python3 -m benchmarks.peers.nt_on_new_jax --depth 10 --size 32 --batch 8 --inputs images.npy --out nt.json

Networks: depth × (3×3 convolution, SAME, ReLU), then global average pooling or flattening, then a dense layer; weights
√2, no biases, NTK parametrisation. Timed is the compiled kernel_fn(x1, x2, 'ntk') of one block, x1 the first `batch`
images, x2 the next ones. It runs under jax 0.4.25 as well, which gives the numbers to compare with.
"""

import argparse
import importlib
import importlib.util
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.interpreters.ad
import numpy as np

WHEELS = Path(__file__).resolve().parents[2] / ".gpu-wheels"
# Only the library's empirical kernels work with these, but importing any of it asks for them.
MOVED = ("Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var")


def restore() -> None:
    """Put back what neural_tangents 0.6.5 imports and jax no longer has. A jax that has a name keeps its own."""
    # Last, so that what the machine has itself comes first.
    sys.path.append(str(WHEELS))
    # The experimental part needs TensorFlow; an empty module stands in for it.
    sys.modules["neural_tangents.experimental"] = types.ModuleType("neural_tangents.experimental")
    for name in MOVED:
        if not hasattr(jax.core, name):
            setattr(jax.core, name, getattr(importlib.import_module("jax.extend.core"), name))
    if importlib.util.find_spec("jax.util") is None:
        sys.modules["jax.util"] = importlib.import_module("jax._src.util")
    if not hasattr(jax.interpreters.ad, "zeros_like_p"):
        # Gone for good. The library only uses it as the key of a rule, which is then never looked up.
        jax.interpreters.ad.zeros_like_p = jax.core.Primitive("zeros_like")
    # The library chooses its form of convolution by this name, and knows "gpu" only.
    backend = jax.default_backend
    jax.default_backend = lambda: "gpu" if backend() in ("cuda", "rocm") else backend()


def network(depth: int, end: str) -> Any:
    """The kernel function of the convolutional network."""
    from neural_tangents import stax

    std = {"W_std": 2**0.5, "b_std": None}
    convs = [layer for _ in range(depth) for layer in (stax.Conv(1, (3, 3), padding="SAME", **std), stax.Relu())]
    head = stax.GlobalAvgPool() if end == "pool" else stax.Flatten()
    return stax.serial(*convs, head, stax.Dense(1, **std))[2]


def block(path: Path, size: int, batch: int, dtype: str) -> tuple[jax.Array, jax.Array]:
    """Two batches of the images [n, h, w, c], of which the upper left size × size pixels are taken."""
    x = np.load(path)
    if x.ndim != 4 or x.shape[0] < 2 * batch or min(x.shape[1:3]) < size:
        needed = f"[n, h, w, c] with n ≥ {2 * batch} (twice --batch) and h, w ≥ {size} (--size)"
        raise SystemExit(f"{path} holds an array of shape {list(x.shape)}; needed is {needed}.")
    x = np.ascontiguousarray(x[: 2 * batch, :size, :size]).astype(dtype)
    return jax.device_put(x[:batch]), jax.device_put(x[batch:])


def measured(kernel_fn: Any, x1: jax.Array, x2: jax.Array, repeats: int) -> dict[str, Any]:
    """Compile, run once to warm up, then time."""
    start = time.perf_counter()
    compiled = jax.jit(lambda x1, x2: kernel_fn(x1, x2, "ntk")).lower(x1, x2).compile()
    compile_seconds = time.perf_counter() - start
    kernel = compiled(x1, x2).block_until_ready()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        compiled(x1, x2).block_until_ready()
        times.append(time.perf_counter() - start)
    pairs = x1.shape[0] * x2.shape[0]
    return {
        "us_per_pair": min(times) / pairs * 1e6,
        "seconds": times,
        "compile_seconds": compile_seconds,
        "kernel_dtype": str(kernel.dtype),
        "kernel": np.asarray(kernel).tolist(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--depth", type=int, default=10)
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--end", choices=("pool", "flatten"), default="pool")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    # On a GPU jax's own default may round float32 factors to TF32; "highest" forbids it.
    parser.add_argument("--precision", choices=("default", "highest"), default="default")
    parser.add_argument("--inputs", type=Path, required=True, help=".npy, [n, h, w, c]")
    parser.add_argument("--out", type=Path, required=True, help=".json, with the kernel of the block")
    args = parser.parse_args()
    jax.config.update("jax_enable_x64", args.dtype == "float64")
    jax.config.update("jax_default_matmul_precision", None if args.precision == "default" else args.precision)
    x1, x2 = block(args.inputs, args.size, args.batch, args.dtype)
    report = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    report |= {"jax": jax.__version__, "backend": jax.default_backend(), "device": jax.devices()[0].device_kind}
    report |= measured(network(args.depth, args.end), x1, x2, args.repeats)
    args.out.write_text(json.dumps(report), encoding="utf-8")
    print(json.dumps({key: value for key, value in report.items() if key != "kernel"}, indent=1))


restore()
if __name__ == "__main__":
    main()
