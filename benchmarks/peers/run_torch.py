"""One torch method on one case in a process of its own: the trace NTK, its time and its memory."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.peers import common
from benchmarks.speed.cases import CASES, Case

JACOBIAN_BYTES = 8e9  # of Jacobian held at once; outputs are taken in groups that fit
Parameters = dict[str, Tensor]


def single(model: nn.Module) -> tuple[Callable[[Parameters, Tensor], Tensor], Parameters]:
    """The network on one sample as a function of its parameters."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    buffers = {name: b.detach() for name, b in model.named_buffers()}

    def f(parameters: Parameters, x: Tensor) -> Tensor:
        return functional_call(model, (parameters, buffers), (x.unsqueeze(0),)).squeeze(0)

    return f, parameters


def jacobian_contraction(model: nn.Module, x: Tensor, chunk: int) -> Tensor:
    """Per-sample Jacobians by vmap(jacrev), a group of outputs at a time, then one product per parameter."""
    f, parameters = single(model)
    n, outputs = len(x), f(parameters, x[0]).numel()
    size = sum(p.numel() for p in parameters.values())
    group = max(1, min(outputs, int(JACOBIAN_BYTES // (n * size * x.element_size()))))
    kernel = x.new_zeros(n, n)
    for first in range(0, outputs, group):
        last = min(first + group, outputs)
        jacobian = vmap(jacrev(lambda p, x, a=first, b=last: f(p, x)[a:b]), (None, 0))
        held = {name: p.new_empty(n, last - first, p.numel()) for name, p in parameters.items()}
        for start in range(0, n, chunk):
            part = jacobian(parameters, x[start : start + chunk])
            for name, rows in held.items():
                rows[start : start + chunk] = part[name].flatten(2)
        for rows in held.values():
            kernel.addmm_(rows.flatten(1), rows.flatten(1).T)
    return kernel


def ntk_vector_products(model: nn.Module, x: Tensor, chunk: int) -> Tensor:
    """For every pair, a vjp at one sample followed by a jvp at the other, for each output."""
    f, parameters = single(model)
    basis = torch.eye(f(parameters, x[0]).numel(), dtype=x.dtype)

    def pair(x1: Tensor, x2: Tensor) -> Tensor:
        pull = vjp(lambda p: f(p, x1), parameters)[1]

        def product(vector: Tensor) -> Tensor:
            return jvp(lambda p: f(p, x2), (parameters,), pull(vector))[1]

        return vmap(product)(basis).trace()

    return vmap(vmap(pair, (None, 0)), (0, None), chunk_size=chunk)(x, x)


def tangency(model: nn.Module) -> Callable[[Tensor], Tensor]:
    import tangency as tg

    return tg.trace_ntk(model)


def reference(model: nn.Module, x: Tensor, chunk: int) -> Tensor:
    return jacobian_contraction(model.double(), x.double(), chunk)


def method(name: str, case: Case, model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    if name == "tangency":
        kernel = tangency(model)
        return lambda: kernel(x)
    if name == "tangency float64":
        kernel = tangency(model.double())
        return lambda: kernel(x.double())
    # What vmap and forward mode cannot trace: the fused encoder layer and the fused attention kernels.
    torch.backends.mha.set_fastpath_enabled(False)
    if name == "reference":
        function, chunk = reference, max(1, case.chunk // 2)
    elif name == "torch.func jacobian contraction":
        function, chunk = jacobian_contraction, case.chunk
    else:
        function, chunk = ntk_vector_products, 1

    def run() -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return function(model, x, chunk)

    return run


def main() -> None:
    args = common.arguments().parse_args()
    torch.set_num_threads(2)
    case = CASES[args.case]
    data = np.load(args.data)
    model = case.model()
    state = {key.removeprefix("state/"): torch.from_numpy(data[key]) for key in data.files if key.startswith("state/")}
    model.load_state_dict(state)
    x = torch.from_numpy(data["x"][common.sample_indices(case.n, args.n)])
    before = common.current_rss()
    run = method(args.method, case, model, x)
    timing = common.measure(lambda: run().detach().numpy())
    common.report(args.out, timing, args.n, before)


if __name__ == "__main__":
    main()
