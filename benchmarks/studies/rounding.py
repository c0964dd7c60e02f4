"""Where 16-bit rounding hurts: forward pass, backward passes, or factors. Cosine errors against float64, on the CPU.

    python -m benchmarks.studies.rounding [--out benchmarks/results/rounding.json]

A ResNet18 of width 16 is trained for a minute on scikit-learn's digits (enlarged to 32 x 32). Its trace kernel on 40
test images is then computed with every convolution's and norm's output rounded to 16 bits in the forward pass only, in
the backward passes only, and with nothing but the factors rounded, which is what dtype="float16" does.
"""

import argparse
import copy
import json
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import tangency as tg


class Forward(torch.autograd.Function):
    """Rounds what passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.half().float()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Backward(torch.autograd.Function):
    """Rounds what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.half().float()


def trained(x: Tensor, y: Tensor, seconds: float) -> nn.Module:
    torch.manual_seed(0)
    model = tg.models.resnet18(10, width=16).train()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        some = torch.randint(0, len(x), (64,))
        optimizer.zero_grad()
        F.cross_entropy(model(x[some]), y[some]).backward()
        optimizer.step()
    return model.eval()


def rounded(model: nn.Module, kind: type[torch.autograd.Function]) -> nn.Module:
    model = copy.deepcopy(model)
    for m in model.modules():
        if isinstance(m, (nn.Conv2d, nn.BatchNorm2d)):
            m.register_forward_hook(lambda m, args, out: kind.apply(out))
    return model


def cosine(k: Tensor) -> Tensor:
    norms = k.double().diagonal().sqrt()
    return k.double() / (norms[:, None] * norms)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/rounding.json"))
    parser.add_argument("--seconds", type=float, default=60)
    args = parser.parse_args()
    warnings.simplefilter("ignore")  # the hooks' own functions have no rule
    digits = load_digits()
    x = F.interpolate(torch.as_tensor(digits.images, dtype=torch.float32)[:, None] / 16, size=32).repeat(1, 3, 1, 1)
    y = torch.as_tensor(digits.target)
    model = trained(x[:1400], y[:1400], args.seconds)
    with torch.no_grad():
        accuracy = float((model(x[1400:]).argmax(1) == y[1400:]).float().mean())
    some = x[1400:1440]
    want = cosine(tg.trace_ntk(model, dtype="float64")(some))
    kernels = {
        "float32": tg.trace_ntk(model),
        "factors rounded": tg.trace_ntk(model, dtype="float16"),
        "backward rounded": tg.trace_ntk(rounded(model, Backward)),
        "forward rounded": tg.trace_ntk(rounded(model, Forward)),
    }
    errors = {name: float((cosine(k(some)) - want).abs().max()) for name, k in kernels.items()}
    result = {
        "command": "python -m benchmarks.studies.rounding",
        "torch": torch.__version__,
        "test_accuracy": accuracy,
        "max_cosine_error": errors,
    }
    args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
