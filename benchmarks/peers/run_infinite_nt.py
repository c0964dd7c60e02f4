"""One case of benchmarks/speed/infinite.py by neural-tangents, in its own environment."""

import sys
import types
from typing import Any

# neural_tangents imports its experimental part, which needs TensorFlow; an empty module stands in for it.
sys.modules["neural_tangents.experimental"] = types.ModuleType("neural_tangents.experimental")

import jax  # noqa: E402
from neural_tangents import stax  # noqa: E402

from benchmarks.peers import wide  # noqa: E402

jax.config.update("jax_enable_x64", True)


def network(case: str) -> Any:
    if case == "fc":
        hidden = [layer for _ in range(3) for layer in (stax.Dense(8, 2**0.5), stax.Relu())]
        return stax.serial(*hidden, stax.Dense(1, 2**0.5))[2]
    _, depth, _ = wide.form(case)
    convs = [layer for _ in range(depth) for layer in (stax.Conv(8, (3, 3), padding="SAME", W_std=2**0.5), stax.Relu())]
    head = stax.Flatten() if case.startswith("flat") else stax.GlobalAvgPool()
    return stax.serial(*convs, head, stax.Dense(1, 2**0.5))[2]


def main() -> None:
    args = wide.options()
    kernel_fn = network(args.case)
    x = wide.inputs(args.case)
    x = jax.numpy.asarray(x if args.case == "fc" else x.transpose(0, 2, 3, 1))
    compiled = jax.jit(lambda x: kernel_fn(x, None, "ntk")).lower(x).compile()
    compiled(x).block_until_ready()
    wide.measured(lambda: compiled(x).block_until_ready(), args)


if __name__ == "__main__":
    main()
