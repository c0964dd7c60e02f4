"""Gram stores of kernels on the GPU: the numbers of memory, resumed bit for bit, whatever the budget."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from on_device import DEVICE, NETS, QUIET, STEADY, Errors, error, trace

import tangency as tg
from tangency.gram.sweep import Sweep

pytest.importorskip("zarr", reason="zarr is missing here: python -m benchmarks.robustness.gpu_tests --wheels brings it")
pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(q) for q in QUIET)]
TILE = 8
BUDGETS = ("1GiB", "8GiB")


def chunks(store: Path) -> dict[str, bytes]:
    return {str(p.relative_to(store)): p.read_bytes() for p in store.glob("c/**/*") if p.is_file()}


def filled(path: Path, kernel: tg.Kernel, x: Any, **options: Any) -> tg.Gram:
    return tg.compute(kernel, x, **({"store": str(path), "tile": TILE, "progress": False} | options))


def same(got: Path, want: Path, net: str, errors: Errors) -> None:
    """The same bits, or where a GPU does not repeat its own, the same numbers."""
    if net in STEADY:
        assert chunks(got) == chunks(want)
    a, b = (tg.open_gram(str(path)).dense() for path in (got, want))
    errors.below("store, resumed or with another budget", error(a, b), 1e-5)


@pytest.mark.parametrize("net", NETS)
def test_a_store_holds_what_memory_holds(net: str, tmp_path: Path, errors: Errors) -> None:
    kernel, x = trace(net)
    gram = filled(tmp_path / "gram", kernel, x)
    assert gram.progress == (21, 21)
    inside = tg.compute(kernel, x, tile=TILE, progress=False).dense()
    errors.below("store against memory", error(gram.dense(), inside), 1e-5)
    errors.below("store against k(x)", error(gram.dense(), kernel(x)), 1e-5)
    errors.below(
        "store, two sides", error(filled(tmp_path / "two", kernel, x, x2=x[:11]).dense(), inside[:, :11]), 1e-5
    )


@pytest.mark.parametrize("net", NETS)
def test_a_run_goes_on_where_it_stopped(
    net: str, tmp_path: Path, errors: Errors, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, x = trace(net)
    filled(tmp_path / "whole", kernel, x)
    path, tiles = tmp_path / "gram", Sweep.tiles

    def interrupted(self: Sweep, task: Any) -> Iterator[Any]:
        for count, tile in enumerate(tiles(self, task)):
            if count == 5:
                raise KeyboardInterrupt
            yield tile

    monkeypatch.setattr(Sweep, "tiles", interrupted)
    with pytest.raises(KeyboardInterrupt):
        filled(path, kernel, x)
    monkeypatch.undo()
    done, total = tg.open_gram(str(path)).progress
    assert 0 < done < total
    first = chunks(path)
    again = computed_again(monkeypatch)
    filled(path, kernel, x)
    assert len(again) == total - done, "a finished tile was computed again"
    assert {k: chunks(path)[k] for k in first} == first
    same(path, tmp_path / "whole", net, errors)


def computed_again(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tiles that are made from now on."""
    tiles: Any = Sweep.tiles
    found: list[tuple[int, int]] = []

    def noted(self: Sweep, task: Any) -> Iterator[Any]:
        for i, j, tile in tiles(self, task):
            found.append((i, j))
            yield i, j, tile

    monkeypatch.setattr(Sweep, "tiles", noted)
    return found


@pytest.mark.parametrize("net", NETS)
def test_two_budgets_give_the_same_tiles(net: str, tmp_path: Path, errors: Errors) -> None:
    """Some tiles are made under one budget, the others under another."""
    kernel, x = trace(net)
    whole, path = tmp_path / "whole", tmp_path / "gram"
    filled(whole, kernel, x, memory=BUDGETS[0])
    shutil.copytree(whole, path)
    for name in list(chunks(path))[::2]:
        (path / name).unlink()
    filled(path, kernel, x, memory=BUDGETS[1])
    same(path, whole, net, errors)


@pytest.mark.parametrize("net", NETS)
def test_a_damaged_tile_is_made_again(net: str, tmp_path: Path, errors: Errors) -> None:
    kernel, x = trace(net)
    whole, path = tmp_path / "whole", tmp_path / "gram"
    filled(whole, kernel, x)
    shutil.copytree(whole, path)
    raw = bytearray((path / "c" / "1" / "3").read_bytes())
    raw[50] ^= 1
    (path / "c" / "1" / "3").write_bytes(raw)
    gram = filled(path, kernel, x)
    with pytest.warns(tg.StoreWarning, match="tile 1, 3 .*computed again"):
        gram @ torch.ones(len(x))
    same(path, whole, net, errors)


def test_inputs_may_lie_anywhere(tmp_path: Path, errors: Errors) -> None:
    """On the device, on the CPU, in NumPy, in a file: the same samples, the same hash, the same store."""
    kernel, x = trace("convolutions")
    want = filled(tmp_path / "gram", kernel, x).dense()
    np.save(tmp_path / "x.npy", x.cpu().numpy())
    for other in (x.cpu(), x.cpu().numpy(), np.load(tmp_path / "x.npy", mmap_mode="r")):
        assert torch.equal(filled(tmp_path / "gram", kernel, other).dense(), want)
        inside = tg.compute(kernel, other, tile=TILE, progress=False).dense()
        assert inside.device.type == DEVICE.type
        errors.below("inputs from elsewhere", error(inside, want), 1e-5)


def test_the_kernel_of_the_cpu_goes_on_with_a_store_of_the_gpu(tmp_path: Path, errors: Errors) -> None:
    """Its spec has nothing of the device in it: the same weights, the same data."""
    kernel, x = trace("perceptron", torch.float64)
    filled(tmp_path / "gram", kernel, x, memory="1GiB")  # as much as the CPU will have
    want = chunks(tmp_path / "gram")
    (tmp_path / "gram" / "c" / "0" / "2").unlink()
    model = kernel.feature_map.network.model.cpu()
    filled(tmp_path / "gram", tg.trace_ntk(model), x.cpu())
    assert chunks(tmp_path / "gram").keys() == want.keys()
    dense = tg.open_gram(str(tmp_path / "gram")).dense()
    errors.below("store of both devices, float64", error(dense, tg.trace_ntk(model)(x.cpu())), 1e-12)
