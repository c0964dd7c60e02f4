"""One case of benchmarks/infinite.py by neural-tangents, in its own environment."""

import argparse
import json
import sys
import time
import types
from pathlib import Path

# neural_tangents imports its experimental part, which needs TensorFlow; an empty module stands in for it.
sys.modules["neural_tangents.experimental"] = types.ModuleType("neural_tangents.experimental")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from neural_tangents import stax  # noqa: E402

jax.config.update("jax_enable_x64", True)


def network(case: str):
    if case == "fc":
        hidden = [layer for _ in range(3) for layer in (stax.Dense(8, 2**0.5), stax.Relu())]
        return stax.serial(*hidden, stax.Dense(1, 2**0.5))[2]
    convs = [layer for _ in range(5) for layer in (stax.Conv(8, (3, 3), padding="SAME", W_std=2**0.5), stax.Relu())]
    head = stax.Flatten() if case.startswith("flat") else stax.GlobalAvgPool()
    return stax.serial(*convs, head, stax.Dense(1, 2**0.5))[2]


def inputs(case: str) -> np.ndarray:
    shape = (5000, 784) if case == "fc" else (32, 3, int(case[4:]), int(case[4:]))
    x = np.random.default_rng(0).standard_normal(shape)
    return x if case == "fc" else x.transpose(0, 2, 3, 1)


def resident(field: str) -> int:
    """Bytes: VmRSS now, or VmHWM, the most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(row for row in lines if row.startswith(field + ":")).split()[1]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    kernel_fn = network(args.case)
    run = jax.jit(lambda x: kernel_fn(x, None, "ntk"))
    x = jax.numpy.asarray(inputs(args.case))
    run(x[:2]).block_until_ready()
    compiled = jax.jit(lambda x: kernel_fn(x, None, "ntk")).lower(x).compile()
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before, times, k = resident("VmRSS"), [], None
    for _ in range(args.repeats):
        k = None
        start = time.perf_counter()
        k = compiled(x).block_until_ready()
        times.append(time.perf_counter() - start)
    report = {"seconds": min(times), "all": times, "bytes": resident("VmHWM") - before}
    (args.out / "report.json").write_text(json.dumps(report))
    np.save(args.out / "kernel.npy", np.asarray(k))


if __name__ == "__main__":
    main()
