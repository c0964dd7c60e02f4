"""One neural-tangents implementation on one case in a process of its own; runs in the peers' environment."""

import sys
import types

# neural_tangents imports its experimental part, which needs TensorFlow; an empty module stands in for it.
sys.modules["neural_tangents.experimental"] = types.ModuleType("neural_tangents.experimental")

import jax  # noqa: E402
import neural_tangents as nt  # noqa: E402
import numpy as np  # noqa: E402

from benchmarks.peers import common, nets  # noqa: E402


def main() -> None:
    parser = common.arguments()
    parser.add_argument("--vmap", action="store_true", help="pass vmap_axes=0")
    parser.add_argument("--batch", type=int, default=0, help="for nt.batch; 0 takes all samples at once")
    args = parser.parse_args()
    data = np.load(args.data)
    state = {key.removeprefix("state/"): data[key] for key in data.files if key.startswith("state/")}
    f, parameters, x = nets.build(args.case, state, data["x"])
    check_forward(f, parameters, x[:16], data["y"][:16])
    x = jax.numpy.asarray(x[common.sample_indices(len(x), args.n)])
    before = common.current_rss()

    implementation = nt.NtkImplementation[args.method]
    axes = 0 if args.vmap else None
    kernel_fn = nt.empirical_ntk_fn(f, trace_axes=(-1,), vmap_axes=axes, implementation=implementation)
    kernel_fn = nt.batch(kernel_fn, batch_size=args.batch, device_count=0) if args.batch else jax.jit(kernel_fn)
    outputs = data["y"].shape[1]

    def run(x: jax.Array = x) -> np.ndarray:
        return outputs * np.asarray(kernel_fn(x, None, parameters).block_until_ready())

    # All blocks have one shape, so that one of them compiles what the whole needs.
    timing = common.measure(run, warm=lambda: run(x[: args.batch] if args.batch else x))
    common.report(args.out, timing, args.n, before)


def check_forward(f: nets.Network, parameters: nets.Parameters, x: np.ndarray, y: np.ndarray) -> None:
    error = float(np.abs(np.asarray(jax.jit(f)(parameters, x)) - y).max() / np.abs(y).max())
    if error > 1e-5:
        raise AssertionError(f"the jax network differs from the torch one by {error:.1e}, relatively")


if __name__ == "__main__":
    main()
