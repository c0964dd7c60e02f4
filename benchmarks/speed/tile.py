"""Times of the trace kernel on one GPU: ResNet18 (3x32x32, 10 outputs) and BERT-base's shape (2 outputs, length 64).

Run on the GPU machine:

    PYTHONPATH=src python3 -m benchmarks.speed.tile [--out results.json] [--profile] [--only resnet bert torch.func zoo]

Every figure is the best of three after a warm-up, synchronised; errors are against float64 on a subset.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import tangency as tg

torch.manual_seed(0)


def clock(f: Callable[[], Any], repeats: int = 3) -> float:
    f()
    best = float("inf")
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        f()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best


def resnet() -> tuple[nn.Module, Callable[[int], Tensor]]:
    model = tg.models.resnet18(10).cuda().eval()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d) and m.running_mean is not None and m.running_var is not None:
            m.running_mean.normal_(0, 0.1)
            m.running_var.uniform_(0.5, 1.5)
    return model, lambda n: torch.randn(n, 3, 32, 32, device="cuda")


def bert() -> tuple[nn.Module, Callable[[int], Any]]:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = BertForSequenceClassification(config).cuda().eval()

    def inputs(n: int) -> dict[str, Tensor]:
        ids = torch.randint(1000, 30000, (n, 64), device="cuda")
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return model, inputs


def cosine_error(got: Tensor, want: Tensor, dg: tuple[Tensor, Tensor], dw: tuple[Tensor, Tensor]) -> float:
    def cos(k: Tensor, d: tuple[Tensor, Tensor]) -> Tensor:
        return k.double() / (d[0].double().sqrt()[:, None] * d[1].double().sqrt())

    return float((cos(got, dg) - cos(want, dw)).abs().max())


def measure(make: Callable[[], Any], n: int, subset: int, profile: bool) -> dict[str, Any]:
    model, inputs = make()
    x, y = inputs(n), inputs(n)
    few = tg._base.tree.take(x, slice(0, subset)), tg._base.tree.take(y, slice(0, subset))
    exact = tg.trace_ntk(model, dtype=torch.float64)
    want, dw = exact(*few), (exact.diag(few[0]), exact.diag(few[1]))
    result: dict[str, Any] = {"n": n}
    for dtype in ("float16", "tf32", "float32"):
        kernel = tg.trace_ntk(model, dtype=dtype)
        got, dg = kernel(*few), (kernel.diag(few[0]), kernel.diag(few[1]))
        row = {
            "max_cosine_error": cosine_error(got, want, dg, dw),
            "frobenius_error": float((got - want).norm() / want.norm()),
        }
        if dtype == "float16":
            torch.cuda.reset_peak_memory_stats()
            row["capture_one_side_s"] = clock(partial(kernel.prepare, x))
            a, b = kernel.prepare(x), kernel.prepare(y)
            row["pair_s"] = clock(partial(kernel.pair, a, b))
            if profile:
                _layers(kernel, a, b)
            del a, b
            row["total_s"] = clock(partial(kernel, x, y))
            row["peak_GiB"] = torch.cuda.max_memory_allocated() / 2**30
        result[dtype] = row
        print(dtype, row, flush=True)
    return result


def _layers(kernel: Any, a: Any, b: Any) -> None:
    for name in a:
        seconds = clock(partial(kernel.pair, {name: a[name]}, {name: b[name]}), 1)
        cost = tg.engine.methods.choose_method(a[name], b[name], True)
        if seconds > 1e-3:
            print(f"{name:50s} {cost.method:10s} {seconds * 1e3:8.1f} ms {cost.flops / seconds / 1e12:6.0f} TFLOP/s")


def torch_func(make: Callable[[], Any], n: int) -> dict[str, float]:
    """vmap(jacrev) and a product per parameter, as PyTorch's tutorial does, in blocks of n (larger ones do not fit).

    For 2048 x 2048 a row block's Jacobian is kept while the columns' are made: 32·(row + 32·(column + product)) at 64.
    """
    model, inputs = make()
    params = {k: v.detach() for k, v in model.named_parameters()}
    x = inputs(n)

    def f(p: Any, one: Tensor) -> Tensor:
        return torch.func.functional_call(model, p, (one[None],))[0]

    jac = torch.func.vmap(torch.func.jacrev(f), (None, 0))

    def product(left: Any, right: Any) -> Tensor:
        total = torch.zeros(n, n, device="cuda")
        for k in left:
            total += left[k].flatten(1) @ right[k].flatten(1).T
        return total

    one_side = clock(lambda: jac(params, x))
    left = jac(params, x)
    contraction = clock(lambda: product(left, left))
    blocks = 2048 / n
    whole = blocks * (one_side + blocks * (one_side + contraction))
    return {"n": n, "jacobian_s": one_side, "product_s": contraction, "blocks_of_2048_s": whole}


def zoo(names: list[str]) -> dict[str, Any]:
    """Every architecture of the tests on the GPU: largest cosine error of each precision against float64 on the CPU."""
    import warnings

    from tests.helpers.zoo import ZOO, build

    warnings.simplefilter("ignore")
    worst: dict[str, Any] = {}
    for case in ZOO:
        model, x = build(case, 4)
        want = tg.trace_ntk(model)(x)
        scale = want.diagonal().sqrt()
        model.cuda()
        x = tg._base.tree.transform(lambda v: v.cuda(), x)
        row: dict[str, Any] = {}
        try:
            for name in names:
                got = tg.trace_ntk(model, dtype=name)(x).double().cpu()
                row[name] = float(((got - want) / (scale[:, None] * scale)).abs().max())
        except RuntimeError as e:  # a case that keeps a constant on the CPU
            row = {"error": str(e)}
            print(f"{case.name}: {str(e)[:150]}", flush=True)
        worst[case.name] = row
    for name in names:
        case, error = max(((k, v[name]) for k, v in worst.items() if name in v), key=lambda kv: kv[1])
        print(f"zoo of {len(worst)}, {name}: worst cosine error {error:.2e} ({case})", flush=True)
    return worst


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--only", nargs="*", default=["resnet", "bert", "torch.func", "zoo"])
    args = parser.parse_args()
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "command": "PYTHONPATH=src python3 -m benchmarks.speed.tile",
        "tangency": tg.__version__,
    }
    if "resnet" in args.only:
        result["resnet18"] = measure(resnet, 2048, 64, args.profile)
    if "torch.func" in args.only:
        result["resnet18_torch_func"] = torch_func(resnet, 64)
        print("torch.func", result["resnet18_torch_func"], flush=True)
    if "zoo" in args.only:
        result["zoo"] = zoo(["float64", "float32", "tf32", "float16"])
    if "bert" in args.only:
        result["bert_base"] = measure(bert, 1024, 32, args.profile)
    if args.out:
        with open(args.out, "w", encoding="utf-8") as f:
            json.dump(result, f, indent=2)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
