"""How kernels are run on the GPU: by workers, on other streams, in threads, with little memory."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import (
    CASES,
    CUDA,
    DEVICE,
    F64,
    NETS,
    QUIET,
    STEADY,
    Errors,
    cosine_error,
    error,
    flags,
    made,
    other_stream,
    synchronize,
    there,
    trace,
)
from torch import Tensor
from zoo import build

import tangency as tg
from tangency.testing import ModelState

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(q) for q in QUIET)]
ROUNDS = 4


def executor() -> Any:
    return "gpus" if CUDA else tg.Workers(1)


# Workers.


@pytest.mark.parametrize("net", NETS)
def test_a_worker_on_every_gpu(net: str, errors: Errors) -> None:
    """The same tiles as here, from a process of their own: to the bit where a GPU repeats its bits."""
    if net == "transformer":
        pytest.importorskip("cloudpickle", reason="a model with lambdas needs cloudpickle to travel")
    kernel, x = trace(net)
    before = ModelState.of(kernel.feature_map.network.model)
    options: dict[str, Any] = {"tile": 16, "memory": "1GiB", "progress": False}
    want = tg.compute(kernel, x, **options).dense()
    got = tg.compute(kernel, x, executor=executor(), **options).dense()
    errors.below("workers", error(got, want), 1e-6)
    if net in STEADY:
        assert torch.equal(got.cpu(), want.cpu())
    before.check(kernel.feature_map.network.model)


def test_workers_fill_a_store(tmp_path: Path, errors: Errors) -> None:
    pytest.importorskip("zarr", reason="no zarr: python -m benchmarks.robustness.gpu_tests --wheels brings it")
    kernel, x = trace("convolutions", F64)
    gram = tg.compute(kernel, x, store=str(tmp_path / "gram"), tile=16, executor=executor(), progress=False)
    errors.below("workers, float64", error(gram.dense(), kernel(x)), 1e-12)


def test_workers_make_features(errors: Errors) -> None:
    model, x = made("perceptron", F64)
    kernel = tg.projected(tg.trace_ntk(model), 100)
    got = kernel.features(x, tile=16, executor=executor(), progress=False)
    errors.below("workers, float64", error(got, kernel.features(x)), 1e-12)


def test_errors_of_a_worker_arrive() -> None:
    kernel, x = trace("perceptron")
    x[20, 3] = float("nan")
    with pytest.raises(tg.NonFiniteError, match="sample 20"):
        tg.compute(kernel, x, tile=16, executor=executor(), progress=False)


# Streams.


@pytest.mark.parametrize("net", NETS)
def test_on_another_stream(net: str, errors: Errors) -> None:
    """The inputs are made on a stream that is not the default one, late: nothing may be read before."""
    kernel, x = trace(net, F64)
    calls: list[Callable[[tg.Kernel, Any], Tensor]] = [
        lambda k, v: k(v),
        lambda k, v: k.diag(v),
        lambda k, v: tg.compute(k, v, tile=16, progress=False).dense(),
        lambda k, v: tg.projected(k, 64).features(v, progress=False),
    ]
    for call in calls:
        want = call(kernel, x)
        fresh, _ = trace(net, F64)  # probes there too
        with other_stream():
            got = call(fresh, x.clone())
        synchronize()
        errors.below("another stream", error(got, want), 1e-12)


@pytest.mark.parametrize("dtype", ["float32", "float16", "tf32"])
def test_precisions_on_another_stream(dtype: str, errors: Errors) -> None:
    model, x = made("convolutions")
    kernel = tg.trace_ntk(model, dtype=dtype)
    want = kernel(x)
    with other_stream():
        got = kernel(x.clone())
    synchronize()
    errors.below("another stream, narrow", error(got, want), 1e-5 if dtype == "float32" else 1e-3, dtype)


def test_the_next_tile_s_samples_do_not_overtake(errors: Errors) -> None:
    """Many tiles: the next block is made on a stream of its own while the present one is contracted."""
    model, _ = made("convolutions", F64)
    x = torch.randn(400, 3, 12, 12, dtype=F64)
    kernel = tg.trace_ntk(model)
    want = kernel(x.to(DEVICE))
    for tile in (37, 128):
        got = tg.compute(kernel, x, tile=tile, progress=False).dense()
        errors.below("many tiles", error(got, want), 1e-12, f"tile={tile}")


# Threads.


def together(*calls: Callable[[], Any]) -> list[list[Any]]:
    """What the calls give, each several times in a thread of its own, all at once."""
    found: list[list[Any]] = [[] for _ in calls]
    failed: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def work(k: int) -> None:
        try:
            start.wait()
            for _ in range(ROUNDS):
                found[k].append(calls[k]())
        except BaseException as e:
            failed.append(e)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    synchronize()
    if failed:
        raise failed[0]
    return found


def kernel_of(name: str, dtype: str | None = None) -> tuple[tg.Kernel, Any]:
    model, x = build(CASES[name], 4)
    return tg.trace_ntk(model.to(DEVICE), dtype=dtype), there(x)


@pytest.mark.parametrize("names", [("lenet", "vit"), ("lstm", "gru"), ("lstm", "resnet_batch"), ("bert", "bert")])
def test_two_kernels_in_threads(names: tuple[str, str], errors: Errors) -> None:
    (one, x), (two, y) = (kernel_of(name) for name in names)
    want, before = (one(x), two(y)), flags()
    fresh = [kernel_of(name)[0] for name in names]
    found = together(lambda: fresh[0](x), lambda: fresh[1](y))
    assert flags() == before
    for got, right in zip(found, want, strict=True):
        for k in got:
            errors.below("threads", error(k, right), 1e-8)


def test_two_precisions_in_threads(errors: Errors) -> None:
    """tf32 is a switch of the whole process: a kernel of float32 must not be computed with another thread's."""
    names = ("encoder", "attention_masked")
    want = [kernel_of(name)[0](kernel_of(name)[1]) for name in names]
    (exact, x), (rough, y) = kernel_of(names[0], "float32"), kernel_of(names[1], "tf32")
    exact(x), rough(y)
    found = together(lambda: exact(x), lambda: rough(y))
    for k in found[0]:
        errors.below("threads, float32 beside tf32", cosine_error(k, want[0].cpu()), 1e-5)
    for k in found[1]:
        errors.below("threads, tf32 beside float32", cosine_error(k, want[1].cpu()), 2e-2)


def test_threads_on_streams_of_their_own(errors: Errors) -> None:
    (one, x), (two, y) = kernel_of("lenet"), kernel_of("conv_strided")
    want = one(x), two(y)
    synchronize()

    def on(kernel: tg.Kernel, inputs: Any) -> Tensor:
        with other_stream():
            result = kernel(inputs)
        synchronize()
        return result

    for got, right in zip(together(lambda: on(one, x), lambda: on(two, y)), want, strict=True):
        for k in got:
            errors.below("threads on streams", error(k, right), 1e-8)


# Memory.


@pytest.mark.parametrize("memory", ["512MiB", "1GiB"])
def test_a_budget_is_kept(memory: str, errors: Errors) -> None:
    model, _ = made("convolutions")
    x = torch.randn(3000 if CUDA else 300, 3, 12, 12)
    kernel = tg.trace_ntk(model)
    tg.compute(kernel, x[:100], tile=20, memory=memory, progress=False)  # libraries' own first allocations
    held = reset_peak()
    got = tg.compute(kernel, x, memory=memory, progress=False).dense()
    if CUDA:
        taken = torch.cuda.max_memory_allocated() - held
        errors.below("peak memory over budget", taken / tg._base.checks.memory(memory), 1.0, memory)
    errors.below(
        "small budgets", error(got[:100, -100:], kernel(x[:100].to(DEVICE), x[-100:].to(DEVICE))), 1e-5, memory
    )


def reset_peak() -> int:
    """Bytes on the device now, from where its peak is counted anew."""
    synchronize()
    if not CUDA:
        return 0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()
