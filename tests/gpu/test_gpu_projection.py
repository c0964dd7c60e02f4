"""Projected features on the GPU against the CPU: the same matrix to the bit, the same features up to rounding."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from on_device import CUDA, DEVICE, F64, KINDS, NETS, QUIET, STEADY, Errors, error, made
from torch import Tensor

import tangency as tg
from tangency.projection.sketches.random import Stream, entries

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(q) for q in QUIET)]
DIM = 130
BOUNDS = {torch.float32: 5e-6, F64: 1e-12}


@cache
def projected(net: str, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> tuple[tg.Kernel, Any]:
    model, x = made(net, dtype)
    return tg.projected(tg.trace_ntk(model), DIM, kind, seed=3, **options), x


@cache
def on_cpu(net: str, kind: str, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    """The same features, made on the CPU."""
    model, x = made(net, dtype)
    x = tg._base.tree.transform(lambda v: v.cpu(), x)
    return tg.projected(tg.trace_ntk(model.cpu()), DIM, kind, seed=3, **options).features(x)


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", NETS)
def test_features_are_those_of_the_cpu(net: str, kind: str, dtype: torch.dtype, errors: Errors) -> None:
    kernel, x = projected(net, kind, dtype)
    want = on_cpu(net, kind, dtype)
    name = str(dtype).removeprefix("torch.")
    errors.below(f"features {name}", error(kernel.features(x), want), BOUNDS[dtype], kind)
    flat = want.flatten(1)
    errors.below(f"projected kernel {name}", error(kernel(x), flat @ flat.T), 2 * BOUNDS[dtype], kind)


@pytest.mark.parametrize("options", [{"joint": True}, {"budget": "layer"}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_options(kind: str, options: dict[str, Any], errors: Errors) -> None:
    kernel, x = projected("convolutions", kind, **options)
    errors.below("features float32, options", error(kernel.features(x), on_cpu("convolutions", kind, **options)), 5e-6)


@pytest.mark.parametrize("dtype", ["float16", "tf32"])
@pytest.mark.parametrize("kind", KINDS)
def test_narrow_precisions(kind: str, dtype: str, errors: Errors) -> None:
    model, x = made("convolutions")
    kernel = tg.projected(tg.trace_ntk(model, dtype=dtype), DIM, kind, seed=3)
    errors.below(f"features {dtype}", error(kernel.features(x), on_cpu("convolutions", kind)), 5e-3, kind)


def test_many_nonzeros_and_16_bit_storage(errors: Errors) -> None:
    kernel, x = projected("perceptron", "sparse", nonzeros=4)
    want = on_cpu("perceptron", "sparse", nonzeros=4)
    errors.below("features float32, options", error(kernel.features(x), want), 5e-6)
    half, _ = projected("perceptron", "sparse", nonzeros=4, storage=torch.float16)
    errors.below("features stored in float16", error(half.features(x), want), 1e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", NETS)
def test_blocks_do_not_matter(net: str, kind: str, errors: Errors) -> None:
    """On a CPU to the bit (docs/limitations.md); on a GPU a product of another size may round in another way."""
    kernel, x = projected(net, kind)
    whole = kernel.features(x)
    for options in ({"tile": 7}, {"tile": 40}, {"memory": "1GiB"}):
        got = kernel.features(x, **options)
        errors.below("features in other blocks", error(got, whole), 5e-6, str(options))
        if not CUDA:
            assert torch.equal(got, whole), options


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("net", STEADY)
def test_the_same_blocks_give_the_same_bits(net: str, kind: str) -> None:
    """Also with other work in between."""
    kernel, x = projected(net, kind)
    whole, tiles = kernel.features(x), kernel.features(x, tile=16)
    torch.randn(500, 500, device=DEVICE) @ torch.randn(500, 300, device=DEVICE)
    assert torch.equal(kernel.features(x), whole)
    assert torch.equal(kernel.features(x, tile=16), tiles)


@pytest.mark.parametrize("net", STEADY)
def test_stored_features_go_on_to_the_bit(net: str, tmp_path: Path) -> None:
    pytest.importorskip("zarr", reason="no zarr: python -m benchmarks.robustness.gpu_tests --wheels brings it")
    kernel, x = projected(net, "sparse")
    store = str(tmp_path / "features")
    want = kernel.features(x, store=store, tile=16, progress=False)[:]
    next(p for p in sorted((tmp_path / "features" / "c").rglob("*")) if p.is_file()).unlink()
    again = kernel.features(x, store=store, tile=16, progress=False)
    assert torch.equal(again[:], want)
    assert torch.equal(kernel.features(x, tile=16, progress=False).cpu(), want)
    torch.testing.assert_close(kernel(x[:5], again).cpu(), kernel(x[:5], x).cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("use", range(7))
def test_words_are_those_of_the_cpu(use: int) -> None:
    """The counter-based generator: whole, in pieces, and by tensor arithmetic."""
    stream = Stream(Stream.of(5, "layer.weight").key, output=2)
    for rows, start, count, top in ((1, 0, 1, 0), (3, 5, 1000, 0), (2, 2**33 + 1, 77, 4)):
        want = stream.words(use, rows, start, count, torch.device("cpu"), top)
        got = stream.words(use, rows, start, count, DEVICE, top)
        assert torch.equal(got.cpu(), want)
        assert torch.equal(stream.at(use, rows, torch.arange(start, start + count, device=DEVICE), top).cpu(), want)
        pieces = [stream.words(use, rows, k, 1, DEVICE, top) for k in range(start, start + min(count, 9))]
        assert torch.equal(torch.cat(pieces, 1).cpu(), want[:, :9])


@pytest.mark.parametrize("dtype", [torch.float32, F64], ids=str)
@pytest.mark.parametrize("normal", [False, True])
def test_entries_are_those_of_the_cpu(normal: bool, dtype: torch.dtype) -> None:
    for q, k in ((1, 1), (37, 130), (300, 257)):
        words = Stream.of(3, "w").words(int(normal), -(-k // (4 if normal else 64)), 5, q, torch.device("cpu"))
        want = entries(words, normal, torch.empty(q, k, dtype=dtype))
        got = entries(words.to(DEVICE), normal, torch.empty(q, k, dtype=dtype, device=DEVICE))
        assert torch.equal(got.cpu(), want)


def test_neighbours(errors: Errors) -> None:
    model, x = made("perceptron", F64)
    kernel = tg.projected(tg.trace_ntk(model), DIM, joint=True)
    phi = kernel.features(x)
    similarity, who = tg.projection.nearest(phi[:7], phi, neighbours=4)
    unit = torch.nn.functional.normalize(phi.double(), dim=1)
    want, index = (unit[:7] @ unit.T).topk(4)
    assert torch.equal(who.cpu(), index.cpu())
    errors.below("neighbours", error(similarity, want), 1e-6)
