"""One case of benchmarks/speed/infinite.py by tangency."""

from importlib.metadata import version

import torch
from torch import nn

import tangency as tg
from benchmarks.peers import wide
from tangency._base.extras import is_installed


def network(case: str) -> nn.Module:
    if case == "fc":
        hidden = [layer for i in (784, 8, 8) for layer in (nn.Linear(i, 8), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(8, 1))
    size, depth, _ = wide.form(case)
    convs = [layer for i in (3, *[8] * (depth - 1)) for layer in (nn.Conv2d(i, 8, 3, padding=1), nn.ReLU())]
    if case.startswith("flat"):
        return nn.Sequential(*convs, nn.Flatten(), nn.Linear(8 * size * size, 1))
    return nn.Sequential(*convs, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1))


def main() -> None:
    args = wide.options()
    x, kernel = torch.from_numpy(wide.inputs(args.case)), tg.infinite_ntk(network(args.case), w_var=2.0, b_var=0.0)
    kernel(x)  # what is loaded and kept at the first call
    compiled = version("numba") if is_installed("numba") else None
    wide.measured(lambda: kernel(x), args, threads=torch.get_num_threads(), numba=compiled)


if __name__ == "__main__":
    main()
