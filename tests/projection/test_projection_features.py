"""Projected features: the same bits in any blocking and process, stores, neighbours, and what is refused."""

import itertools
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from forked import FORK
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from zoo import Net

import tangency as tg
from tangency._base import tree as _tree
from tangency._base.types import FeatureBatch
from tangency.gram.compute import Run
from tangency.gram.rows import RowMap
from tangency.gram.witness import SAMPLES
from tangency.models import mlp
from tangency.projection import StoredFeatures, nearest, open_features

F64 = torch.float64
KINDS = ("sparse", "rademacher", "gaussian", "hadamard", "kronecker", "random-mask")
pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:no structured rule covers:tangency.PerformanceWarning"),
]
N = 45


# Bits. In 32 bits, where a sum in another order shows.


def perceptron() -> tuple[nn.Module, Any]:
    return mlp([20, 64, 48, 10]), torch.randn(N, 20)


def small_perceptron() -> tuple[nn.Module, Any]:
    return mlp([6, 9, 8, 4]), torch.randn(N, 6)


def convolutions() -> tuple[nn.Module, Any]:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, groups=2), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * 25, 10)), torch.randn(N, 3, 12, 12)


def transformer() -> tuple[nn.Module, Any]:
    """With an embedding that is tied to the output and looked up in other rows by every sample."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, norm_first=True)
    out = nn.Linear(16, 50, bias=False)
    embedding = nn.Embedding(50, 16, padding_idx=0)
    out.weight = embedding.weight
    model = Net(
        lambda net, x: net.out(net.body(net.embedding(x)).mean(1))[:, :4],
        embedding=embedding,
        body=nn.TransformerEncoder(layer, 1, enable_nested_tensor=False),
        out=out,
    )
    return model.eval(), torch.randint(50, (N, 7))


NETS = (perceptron, convolutions, transformer)


@cache
def plain(net: Callable[[], tuple[nn.Module, Any]]) -> tuple[tg.Kernel, Any]:
    """A kernel and inputs."""
    torch.manual_seed(0)
    model, x = net()
    return tg.trace_ntk(model), x


@cache
def made(net: Callable[[], tuple[nn.Module, Any]], kind: str, dim: int = 130) -> tuple[tg.Kernel, Any, Tensor]:
    """A projected kernel, inputs and their features."""
    base, x = plain(net)
    kernel = tg.projected(base, dim, kind, seed=3)
    return kernel, x, kernel.features(x)


RUNS = [
    (net, kind) for net in NETS for kind in KINDS if net is perceptron or kind in ("sparse", "gaussian", "kronecker")
]


@pytest.mark.parametrize(("net", "kind"), RUNS)
@pytest.mark.every(5)
def test_tiles_do_not_matter(net: Any, kind: str) -> None:
    kernel, x, phi = made(net, kind)
    assert phi.dtype == torch.float32
    for tile in (7, 40):
        assert torch.equal(kernel.features(x, tile=tile), phi), f"tile={tile}"
    assert torch.equal(kernel.prepare(kernel.ready(x)).value, phi)


@pytest.mark.parametrize(("net", "kind"), [*RUNS, (small_perceptron, "sparse")])
@pytest.mark.every(5, 2)
def test_memory_does_not_matter(net: Any, kind: str) -> None:
    """Down to the least with which there is any answer."""
    kernel, x, phi = made(net, kind)
    least = memory_needed(kernel, x)
    for memory in (least, 3 * least):
        assert torch.equal(kernel.features(x, memory=memory), phi), f"memory={memory}, least {least}"


def memory_needed(kernel: tg.Kernel, x: Any) -> int:
    """What the refusal of too small a budget says."""
    with pytest.raises(tg.MemoryBudgetError) as e:
        kernel.features(x, memory=1000)
    return int(str(e.value).split("memory=")[-1].split(",")[0].rstrip("."))


@pytest.mark.parametrize(("net", "kind"), RUNS)
@pytest.mark.every(5, 1)
def test_the_other_samples_do_not_matter(net: Any, kind: str) -> None:
    """Splitting by hand, another order, alone."""
    kernel, x, phi = made(net, kind)
    parts = [kernel.features(_tree.take(x, s)) for s in (slice(0, 7), slice(7, N))]
    assert torch.equal(torch.cat(parts), phi)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(5))
    assert torch.equal(kernel.features(_tree.take(x, order)), phi[order])
    assert torch.equal(kernel.features(_tree.take(x, order[:1])), phi[order[:1]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(3)
def test_whole_batches_of_small_layers(kind: str) -> None:
    """Products of a few numbers have other bits in other rows of a batch (MKL): a tile holds whole batches."""
    kernel, x, phi = made(small_perceptron, kind)
    for tile in (1, 7, 32):
        assert torch.equal(kernel.features(x, tile=tile), phi), f"tile={tile}"
    assert torch.equal(torch.cat([kernel.features(x[:16]), kernel.features(x[16:])]), phi)


@pytest.mark.slow
def test_workers_do_not_matter(workers: tg.Workers) -> None:
    for net, kind in ((perceptron, "rademacher"), (convolutions, "random-mask")):
        kernel, x, phi = made(net, kind)
        assert torch.equal(kernel.features(x, tile=7 if net is perceptron else 16, executor=workers), phi)


def _made_anew(path: Path) -> None:
    torch.set_num_threads(1)
    torch.save({(net.__name__, kind): made(net, kind)[2] for net, kind in RUNS}, path)


def test_processes_do_not_matter(tmp_path: Path) -> None:
    """One that makes everything anew."""
    path = tmp_path / "features.pt"
    process = FORK.Process(target=_made_anew, args=(path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    other = torch.load(path)
    for net, kind in RUNS:
        assert torch.equal(other[net.__name__, kind], made(net, kind)[2]), (net, kind)


def test_a_pickled_kernel_gives_the_same_bits() -> None:
    for kind in KINDS:
        kernel, x, phi = made(perceptron, kind)
        assert torch.equal(pickle.loads(pickle.dumps(kernel)).features(x), phi)


def test_the_seed_and_the_names_decide() -> None:
    """Not the order of parameters or what torch's own generators are at; and no two seeds or kinds agree."""
    kernel, x, phi = made(perceptron, "sparse")
    model = kernel.base.feature_map.network.model
    torch.manual_seed(99)
    again = tg.projected(tg.trace_ntk(model), 130, seed=3)
    assert torch.equal(again.features(x), phi)
    others = [tg.projected(again.base, 130, kind, seed) for kind in KINDS for seed in (-3, 0)]
    found = [phi, *(k.features(x) for k in others)]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    wrapped = Net(lambda net, x: net.inner(x), inner=model)
    assert not torch.equal(tg.projected(tg.trace_ntk(wrapped), 130, seed=3).features(x), phi)


# What may come: inputs, parameters and outputs of every form.


def close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert float((got - want).abs().max()) <= 1e-10 * float(want.abs().max())


def one_by_one(kernel: Any, x: Any) -> Tensor:
    n = len(next(_tree.leaves(x))[1])
    return torch.cat([kernel.features(_tree.take(x, slice(k, k + 1))) for k in range(n)])


def tuples() -> tuple[nn.Module, Any]:
    model = Net(
        lambda net, x, y: net.out((net.a(x) + net.b(y).sum(1)).tanh()),
        a=nn.Linear(4, 9),
        b=nn.Linear(5, 9),
        out=nn.Linear(9, 2),
    )
    return model, (torch.randn(19, 4), torch.randn(19, 3, 5))


def dicts() -> tuple[nn.Module, Any]:
    model = Net(
        lambda net, image, kind, flag: net.out(net.conv(image).mean((2, 3)).tanh() + net.kind(kind)) * flag,
        conv=nn.Conv2d(2, 6, 3),
        kind=nn.Embedding(5, 6),
        out=nn.Linear(6, 3),
    )
    return model, {"image": torch.randn(19, 2, 5, 5), "kind": torch.randint(5, (19,)), "flag": 2}


def scalars() -> tuple[nn.Module, Any]:
    """Outputs [n], and parameters of no dimension."""
    scale = nn.Parameter(torch.tensor(0.3))
    return Net(
        lambda net, x: net.out(x.tanh())[:, 0] * net.scale.exp(), out=nn.Linear(30, 1), scale=scale
    ), torch.randn(19, 30)


def recurrent() -> tuple[nn.Module, Any]:
    return Net(
        lambda net, x: net.out(net.body(x)[0][:, -1]), body=nn.GRU(3, 4, batch_first=True), out=nn.Linear(4, 2)
    ), torch.randn(19, 4, 3)


@pytest.mark.parametrize("net", [tuples, dicts, scalars, recurrent])
def test_forms(net: Any) -> None:
    model, x = net()
    model, x = model.double(), _tree.cast(x, F64)
    kernel = tg.projected(tg.trace_ntk(model), 20)
    phi, some = kernel.features(x), [0, 15, 16, 18]
    c = {tuples: 2, dicts: 3, scalars: 1, recurrent: 2}[net]
    assert phi.shape == ((19, 20) if c == 1 else (19, c, 20))
    for k in some:
        close(kernel.features(_tree.take(x, slice(k, k + 1))), phi[k : k + 1])
    torch.testing.assert_close(phi.flatten(1) @ phi.flatten(1).T, kernel(x))
    if isinstance(x, tuple):
        close(kernel.features(list(x)), phi)
    close(kernel.features(_arrays(x)), phi)


def _arrays(x: Any) -> Any:
    def array(v: Any) -> Any:
        return v.numpy() if isinstance(v, Tensor) else v

    if isinstance(x, dict):
        return {k: array(v) for k, v in x.items()}
    return tuple(map(array, x)) if isinstance(x, tuple) else array(x)


def test_inputs_may_have_any_name() -> None:
    """Also one that the library uses itself."""
    model = Net(lambda net, directions: net.layer(directions).tanh(), layer=nn.Linear(3, 20))
    x = torch.randn(5, 3)
    kernel = tg.projected(tg.trace_ntk(model), 8)
    phi = kernel.features({"directions": x})
    assert phi.shape == (5, 20, 8)
    torch.testing.assert_close(phi.flatten(1) @ phi.flatten(1).T, kernel({"directions": x}))


@pytest.mark.parametrize("kind", KINDS)
def test_features_do_not_depend_on_what_came_before(kind: str) -> None:
    """Of activations, whose number depends on the size of the images."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2))
    base, x = tg.embedding_kernel(model.double(), layers=["0"]), torch.randn(3, 1, 9, 9, dtype=F64)
    kernel = tg.projected(base, 10, kind)
    kernel.features(torch.randn(3, 1, 6, 6, dtype=F64))
    assert torch.equal(kernel.features(x), tg.projected(base, 10, kind).features(x))


def test_texts_of_several_lengths() -> None:
    """A data set whose batches are padded each to its own longest sample."""
    embedding = nn.Embedding(50, 8, padding_idx=0, dtype=F64)
    model = Net(lambda net, ids: net.out(net.e(ids).sum(1).tanh()), e=embedding, out=nn.Linear(8, 3, dtype=F64))
    texts = [torch.randint(1, 50, (length,)) for length in [2, 2, 3, 4, 4, 5, 7, 8, 9]]
    pad = nn.utils.rnn.pad_sequence
    some = tg.from_dataset(texts, collate=lambda batch: pad(batch, batch_first=True))
    for kind in KINDS:
        kernel = tg.projected(tg.trace_ntk(model), 24, kind)
        close(kernel.features(some, tile=4), kernel.features(pad(texts, batch_first=True)))


def test_checkpoints_and_inference_mode() -> None:
    """A state dict that was given stays, whatever becomes of the model; tensors made in inference mode do no harm."""
    model, x = mlp([5, 30, 3], nn.Tanh).double(), torch.randn(9, 5, dtype=F64)
    own = tg.projected(tg.trace_ntk(model), 24)
    given = tg.projected(tg.trace_ntk(model, params=model.state_dict()), 24)
    phi, embedded = own.features(x), given.embedded(x)
    with torch.inference_mode():
        for kind in KINDS:
            assert tg.projected(tg.trace_ntk(model), 24, kind).features(x.clone()).isfinite().all()
    assert torch.equal(own.features(x), phi)
    with torch.no_grad():
        model[0].weight.add_(1)
    assert not torch.equal(own.features(x), phi)
    assert torch.equal(given.features(x), phi)
    torch.testing.assert_close(given(embedded, x), given(x))


def test_a_head_with_labels() -> None:
    model, x, y = mlp([5, 30, 3], nn.Tanh).double(), torch.randn(9, 5, dtype=F64), torch.randint(3, (9,))
    base = tg.head_ntk(model, lambda out, label: F.cross_entropy(out, label, reduction="none"))
    kernel = tg.projected(base, 60)
    assert kernel.features((x, y)).shape == (9, 60)
    assert not torch.equal(kernel.features((x, y)), kernel.features((x, (y + 1) % 3)))
    close(kernel.features((x, y)), one_by_one(kernel, (x, y)))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(2)
def test_branches_that_depend_on_the_data(kind: str) -> None:
    """Batches that lack a parameter, or use it more often, beside batches that do not."""

    def forward(net: Any, x: Tensor) -> Tensor:
        h = net.first(x)
        if bool((x[:, 0] > 0).any()):
            h = torch.where(x[:, :1] > 0, net.second(h.tanh()), h)
        return net.out(h.tanh())

    model = Net(forward, first=nn.Linear(3, 12), second=nn.Linear(12, 12), out=nn.Linear(12, 2)).double()
    x = torch.randn(70, 3, dtype=F64)
    x[:, 0] = torch.cat([-torch.rand(33), torch.rand(37)])
    kernel = tg.projected(tg.trace_ntk(model), 40, kind)
    phi = kernel.features(x)
    some = [0, 15, 16, 32, 33, 48, 69]
    close(phi[some], one_by_one(kernel, x[some]))
    assert bool((phi[:33] != phi[0]).any())


@pytest.mark.parametrize("kind", ["sparse", "hadamard", "kronecker", "random-mask"])
def test_a_weight_that_some_batches_use_in_another_way(kind: str) -> None:
    """Its gradients come as factors from one batch and formed from the next: one matrix for both.

    With so many rows there is no error, if it is.
    """

    def forward(net: Any, x: Tensor) -> Tensor:
        h, far = net.conv(x).tanh().mean((2, 3)), x[:, 0, 0, 0] > 5
        if bool(far.any()):
            h = h + far[:, None] * (net.conv.weight**2).sum((1, 2, 3))
        return net.out(h)

    model = Net(forward, conv=nn.Conv2d(2, 3, 2), out=nn.Linear(3, 1)).double()
    x = torch.randn(40, 2, 4, 4, dtype=F64)
    x[30:, 0, 0, 0] = 6
    budget = {"conv.weight": 32, "conv.bias": 4, "out.weight": 4, "out.bias": 1}
    with pytest.warns(tg.PerformanceWarning, match="not less than"):
        kernel = tg.projected(tg.trace_ntk(model), kind=kind, budget=budget)
    torch.testing.assert_close(kernel(x), tg.trace_ntk(model)(x))


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_have_no_part(kind: str) -> None:
    """Those that count project the same whether the others are frozen, left out, or not there."""
    model, x = mlp([5, 30, 20, 3], nn.Tanh).double(), torch.randn(6, 5, dtype=F64)
    chosen = tg.projected(tg.trace_ntk(model, trainable="4"), 25, kind)
    for p in model[:4].parameters():
        p.requires_grad_(False)
    close(tg.projected(tg.trace_ntk(model), 25, kind).features(x), chosen.features(x))
    alone = Net(lambda net, z: net.get_submodule("4")(z))
    alone.add_module("4", model[4])
    close(tg.projected(tg.trace_ntk(alone), 25, kind).features(model[:4](x).detach()), chosen.features(x))


@pytest.mark.parametrize("kind", ["sparse", "rademacher", "hadamard", "kronecker", "random-mask"])
def test_unused_parameters_have_no_part(kind: str) -> None:
    class Some(nn.Module):
        def __init__(self, unused: bool) -> None:
            super().__init__()
            self.used = nn.Linear(4, 30, dtype=F64)
            if unused:
                self.unused = nn.Linear(50, 50, dtype=F64)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x).tanh()

    torch.manual_seed(0)
    plain, x = Some(False), torch.randn(5, 4, dtype=F64)
    more = Some(True)
    more.used.load_state_dict(plain.used.state_dict())
    if kind == "random-mask":  # picks among all entries: of rows that fall on unused ones nothing is left
        base = tg.trace_ntk(more)
        phi, exact = tg.projected(base, 60, kind).features(x), base(x)
        seeds = [tg.projected(base, 60, kind, seed)(x) / exact for seed in range(40)]
        assert 0 < float((phi != 0).double().mean()) < 0.5
        assert 0.5 < float(torch.stack(seeds).diagonal(dim1=1, dim2=2).mean()) < 1.5
        return
    close(
        tg.projected(tg.trace_ntk(more), 30, kind).features(x), tg.projected(tg.trace_ntk(plain), 30, kind).features(x)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_padding_and_repeated_tokens(kind: str) -> None:
    """Of an embedding: tokens twice in a sample, and one without a gradient."""
    embedding = nn.Embedding(40, 5, padding_idx=3, dtype=F64)
    model = Net(lambda net, x: net.e(x).tanh().sum((1, 2)), e=embedding)
    x = torch.tensor([[1, 1, 3], [3, 3, 3], [39, 0, 1], [2, 2, 2]])
    kernel = tg.projected(tg.trace_ntk(model), 12, kind)
    phi = kernel.features(x)
    assert not bool(phi[1].any())  # nothing but padding
    close(phi, one_by_one(kernel, x))
    alone = kernel.features(torch.tensor([[1, 3, 3]]))
    twice = kernel.features(torch.tensor([[1, 1, 3]]))
    close(twice, 2 * alone)
    first = kernel.features(torch.tensor([[0, 3, 3], [0, 0, 3]]))  # row 0 is a row as any other
    assert bool(first[0].any()) or kind == "random-mask"  # which may leave out all of the row's five entries
    close(first[1], 2 * first[0])


@pytest.mark.parametrize("kind", ["sparse", "rademacher", "kronecker", "random-mask"])
@pytest.mark.every(3)
def test_a_large_vocabulary_is_not_written_out(kind: str) -> None:
    """Gradients of 200,000 rows, of which a sample has six."""
    model = Net(lambda net, x: net.e(x).mean(1), e=nn.Embedding(200_000, 8))
    kernel = tg.projected(tg.pseudo_ntk(model), 64, kind)
    x = kernel.ready(torch.randint(200_000, (4, 6)))
    largest = _largest_tensor(lambda: kernel.prepare(x))
    assert largest < 80e6, f"{largest / 1e6:.0f} MB in one tensor; all gradients of a batch are 102"


def _largest_tensor(f: Callable[[], Any]) -> int:
    """Bytes of the largest tensor that an operation makes within f."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for v in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(v, Tensor):
                    Watch.largest = max(Watch.largest, v.untyped_storage().nbytes())
            return out

    with Watch():
        f()
    return Watch.largest


@pytest.mark.parametrize("layer", ["linear", "conv", "grouped", "embedding", "transposed"])
@pytest.mark.parametrize("compact", [True, False])
def test_pieces_are_as_small_as_they_should_be(layer: str, compact: bool) -> None:
    """Gradients are formed a piece at a time, whatever the layer: on a GPU a batch has thousands of samples."""
    from tangency.projection.sketches.pieces import gradient_pieces

    n, room = 16, 1 << 20
    make: dict[str, Any] = {
        "linear": lambda: (nn.Linear(200, 300, bias=False), torch.randn(n, 200)),
        "conv": lambda: (nn.Sequential(nn.Conv2d(64, 80, 3, bias=False), nn.Flatten()), torch.randn(n, 64, 3, 3)),
        "grouped": lambda: (
            nn.Sequential(nn.Conv2d(64, 256, 3, bias=False, groups=2), nn.Flatten()),
            torch.randn(n, 64, 3, 3),
        ),
        "embedding": lambda: (nn.Sequential(nn.Embedding(3000, 64), nn.Flatten()), torch.randint(3000, (n, 40))),
        "transposed": lambda: (
            Net(lambda net, x: x @ net.w, w=nn.Parameter(torch.randn(200, 300))),
            torch.randn(n, 200),
        ),
    }
    model, x = make[layer]()
    kernel = tg.pseudo_ntk(model)
    (block,) = kernel.feature_map(x, None, lambda name: False).values()
    found = list(gradient_pieces(block, room, compact))
    whole = sum(p.g.numel() * p.g.element_size() for p in found)
    assert whole > 1.2 * room
    assert max(p.g.numel() * p.g.element_size() for p in found) <= room
    at = [p.start + torch.arange(p.g.shape[2]) if p.index is None else p.columns() for p in found]
    columns = torch.cat(at)
    assert len(columns.unique()) == len(columns)
    exact = block.expand()
    together = torch.zeros_like(exact)
    for p, where in zip(found, at, strict=True):
        together[:, :, where] = p.g
    torch.testing.assert_close(together, exact)


def test_sixteen_bit_factors() -> None:
    """The float16 mode: blocks carry scales of their own."""
    model, x = mlp([20, 40, 30, 10]), torch.randn(9, 20)
    wide, half = tg.trace_ntk(model), tg.trace_ntk(model, dtype="float16")
    for k, kind in enumerate(KINDS):
        want, got = (tg.projected(base, 50, kind, joint=k % 2 == 0).features(x) for base in (wide, half))
        assert got.dtype == torch.float32
        assert float((got - want).norm() / want.norm()) < 1e-3, kind


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_is_named(kind: str) -> None:
    model, x = mlp([3, 40, 2], nn.Tanh), torch.randn(50, 3)
    kernel = tg.projected(tg.trace_ntk(model), 8, kind)
    x[37, 1] = float("nan")
    for run in (kernel, kernel.features, lambda v: kernel.features(v, tile=8), kernel.diag):
        with pytest.raises(tg.NonFiniteError, match="sample 37") as e:
            run(x)
        assert e.value.sample == 37
    with pytest.raises(tg.NonFiniteError, match="sample 17"):
        kernel(x[:20].nan_to_num(), x[20:])


def test_an_overflow_of_the_features_is_named() -> None:
    """Of gradients that are finite, as the outputs are."""
    model, x = nn.Linear(3, 1, bias=False), torch.ones(40, 3)
    nn.init.constant_(model.weight, 1e-30)
    base = tg.trace_ntk(model)
    kernels = (tg.projected(base, 1, "rademacher", seed) for seed in range(99))
    kernel = next(k for k in kernels if abs(float(k.features(x[:1]))) == 3)  # three equal signs
    x[33] = 3e38
    assert tg.trace_ntk(model).features(x).isfinite().all()
    with pytest.raises(tg.NonFiniteError, match="sample 33"):
        kernel.features(x)


# Stores.


def small(seed: int = 0) -> tg.Kernel:
    torch.manual_seed(seed)
    return tg.trace_ntk(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)))


def inputs(n: int = 200) -> Tensor:
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(1))


TILE = 16


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "features"
    tg.projected(small(), 24).features(inputs(), store=path, tile=TILE, progress=False)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def chunks(store: Path) -> dict[str, bytes]:
    return {str(p.relative_to(store)): p.read_bytes() for p in store.glob("c/**/*") if p.is_file() and not p.suffix}


def again(path: Any, x: Any = None, **options: Any) -> StoredFeatures:
    given = {"store": str(path), "tile": TILE, "progress": False} | options
    return tg.projected(small(), 24).features(inputs() if x is None else x, **given)


def test_stored_features_are_those_in_memory(whole: Path) -> None:
    kernel, x = tg.projected(small(), 24), inputs()
    phi, stored = kernel.features(x), open_features(whole)
    assert isinstance(stored, StoredFeatures)
    assert (len(stored), stored.shape, stored.dtype) == (200, phi.shape, torch.float32)
    assert torch.equal(stored.tensor(), phi)
    assert repr(stored) == f"StoredFeatures({str(whole)!r}, shape=(200, 3, 24), dtype=torch.float32)"
    assert torch.equal(torch.cat([block for _, block in stored.blocks()]), phi)
    assert [rows.stop - rows.start for rows, _ in stored.blocks()] == [16] * 12 + [8]
    assert torch.equal(pickle.loads(pickle.dumps(stored)).tensor(), phi)
    with pytest.raises(tg.MemoryBudgetError):
        stored.tensor(max_bytes=1000)


def test_stored_features_are_indexed_like_a_tensor(whole: Path) -> None:
    stored = open_features(whole)
    phi = stored.tensor()
    mask = torch.arange(200) % 3 == 0
    rows = [0, -1, 57, slice(3, 40), slice(None, None, 7), slice(5, 5), [4, 1, 199, 1], torch.tensor([3, 3, 150]), mask]
    for k in [*rows, np.array([2, 100]), np.int64(7)]:
        assert torch.equal(stored[k], phi[k]), k
    for k in (200, -201):
        with pytest.raises((IndexError, tg.InputError), match=str(k)):
            stored[k]


@pytest.mark.parametrize("make", [tg.pseudo_ntk, tg.full_ntk, tg.conjugate_kernel])
def test_one_output_has_no_dimension_of_its_own(make: Any, tmp_path: Path) -> None:
    model = mlp([6, 16, 3], nn.Tanh)
    kernel, x = tg.projected(make(model), 8), inputs(20)
    phi, stored = kernel.features(x), kernel.features(x, store=tmp_path / "f", tile=7, progress=False)
    assert phi.shape == ((20, 3, 8) if make is tg.full_ntk else (20, 8))
    assert torch.equal(stored.tensor(), phi)
    for k in (2, -1, np.int64(3), slice(1, 3), [5, 2]):
        assert torch.equal(stored[k], phi[k]), k
    assert stored.shape == phi.shape
    assert torch.equal(torch.stack(list(stored)), phi)  # ends
    torch.testing.assert_close(kernel(stored), kernel(x))
    assert torch.equal(kernel.diag(stored), kernel.diag(x))


def test_a_store_in_place_of_inputs(whole: Path, tmp_path: Path) -> None:
    kernel, x, y = tg.projected(small(), 24), inputs(), inputs(230)[200:]
    stored = open_features(whole)
    want = kernel(x, y)
    for a, b, k in ((stored, None, kernel(x)), (stored, y, want), (y, stored, want.T), (stored, stored, kernel(x))):
        torch.testing.assert_close(kernel(a, b), k)
        torch.testing.assert_close(tg.compute(kernel, a, b, tile=50, progress=False).dense(), k)
    gram = tg.compute(kernel, stored, y, store=tmp_path / "gram", tile=50, progress=False)
    torch.testing.assert_close(gram.dense(), want)
    assert torch.equal(kernel.features(stored), kernel.features(x))


@pytest.mark.slow
def test_workers_read_a_store_in_place_of_inputs(whole: Path, workers: tg.Workers) -> None:
    kernel, x, y = tg.projected(small(), 24), inputs(), inputs(230)[200:]
    there = tg.compute(kernel, open_features(whole), y, tile=100, executor=workers, progress=False)
    torch.testing.assert_close(there.dense(), kernel(x, y))


@pytest.mark.parametrize("combine", [tg.cosine, lambda k: tg.scale(k, 2.0), lambda k: tg.sum(k, k)])
@pytest.mark.every(3)
def test_a_store_in_place_of_inputs_of_combined_kernels(whole: Path, combine: Any) -> None:
    """Engel et al.'s kernels are cosines."""
    kernel, x, y = combine(tg.projected(small(), 24)), inputs(), inputs(230)[200:]
    stored = open_features(whole)
    torch.testing.assert_close(kernel(stored), kernel(x))
    torch.testing.assert_close(kernel.diag(stored), kernel.diag(x))
    torch.testing.assert_close(kernel(stored, y), kernel(x, y))
    torch.testing.assert_close(kernel(y, stored), kernel(y, x))
    torch.testing.assert_close(tg.compute(kernel, stored, y, progress=False).dense(), kernel(x, y))


@pytest.mark.parametrize("make", [tg.trace_ntk, tg.conjugate_kernel])
def test_parts_of_a_store(make: Any, tmp_path: Path) -> None:
    model = mlp([6, 16, 3], nn.Tanh)
    kernel, x, y = tg.projected(make(model), 12, budget="layer"), inputs(20), inputs(25)[20:]
    stored = kernel.features(x, store=tmp_path / "f", progress=False)
    for a, b in ((kernel.parts(stored), kernel.parts(x)), (kernel.parts(stored, y), kernel.parts(x, y))):
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name])


def test_features_of_another_kernel_are_refused(whole: Path) -> None:
    """Of another seed, kind, dimension, model, in whatever place."""
    stored, x = open_features(whole), inputs(5)
    model = small().feature_map.network.model
    others: dict[str, tg.Kernel] = {
        "seed 0, not 1": tg.projected(small(), 24, seed=1),
        "kind 'sparse', not 'gaussian'": tg.projected(small(), 24, "gaussian"),
        "dim 24, not 25": tg.projected(small(), 25),
        "nonzeros 1, not 2": tg.projected(small(), 24, nonzeros=2),
        "joint False, not True": tg.projected(small(), 24, joint=True),
        "budget 'global', not 'layer'": tg.projected(small(), 24, budget="layer"),
        "storage None, not 'float16'": tg.projected(small(), 24, storage="float16"),
        "of.weights": tg.projected(small(seed=5), 24),
        "of.kernel 'trace ntk', not 'pseudo ntk'": tg.projected(tg.pseudo_ntk(model), 24),
        "of.parameters": tg.projected(tg.trace_ntk(model, trainable="0"), 24),
    }
    for what, kernel in others.items():
        for run in (lambda k: k(stored), lambda k: k(x, stored), lambda k: tg.compute(k, stored, x, progress=False)):
            with pytest.raises(tg.InputError) as e:
                run(kernel)
            assert what in str(e.value)
            assert "compute them again" in str(e.value)


def test_features_of_other_weights_are_refused() -> None:
    """However the weights were changed."""
    model, x = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 3)).eval(), inputs(5)
    kernel = tg.projected(tg.trace_ntk(model), 24)

    def shift(v: Tensor) -> None:
        with torch.no_grad():
            v.add_(1)

    def swap() -> None:
        model[0].weight = nn.Parameter(model[0].weight + 1)

    changes: dict[str, Callable[[], Any]] = {
        "in place": lambda: shift(model[0].weight),
        "buffer": lambda: shift(model[2].running_mean),
        "data": lambda: model[0].weight.data.add_(1),
        "new data": lambda: setattr(model[0].weight, "data", model[0].weight.data + 1),
        "new parameter": swap,
        "state dict": lambda: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
        "through numpy": lambda: model[0].weight.detach().numpy().__iadd__(1),
    }
    for name, change in changes.items():
        embedded = kernel.embedded(x)
        torch.testing.assert_close(kernel(embedded), kernel(x))
        change()
        with pytest.raises(tg.InputError, match=r"of\.(weights|buffers)"):
            pytest.fail(f"{name}: {kernel(embedded).shape}")


def test_prepared_rows_of_another_kernel_are_refused() -> None:
    kernel, x = tg.projected(small(), 24), inputs(3)
    a = kernel.prepare(kernel.ready(x))
    for other in (
        tg.projected(small(), 24, seed=1),
        tg.projected(small(), 24, "rademacher"),
        tg.projected(small(), 23),
        tg.projected(small(), 24, budget="layer"),
    ):
        b = other.prepare(other.ready(x))
        for pair in ((a, b), (b, a)):
            with pytest.raises(tg.InputError, match="features of another kernel"):
                kernel.pair(*pair)


def test_mismatches_name_each_field(copy: Path) -> None:
    x, base = inputs(), small()
    changed = x.clone()
    changed[7, 3] += 1e-6

    def fields(kernel: Any, x: Tensor = x, **options: Any) -> set[str]:
        with pytest.raises(tg.StoreMismatch) as e:
            kernel.features(x, store=str(copy), progress=False, **options)
        assert all(name in str(e.value) for name in e.value.fields)
        return set(e.value.fields)

    assert fields(tg.projected(base, 24, seed=1)) == {"kernel.of.seed"}
    assert fields(tg.projected(base, 24, "hadamard")) == {"kernel.of.kind", "kernel.of.nonzeros"}
    assert fields(tg.projected(base, 24, nonzeros=3)) == {"kernel.of.nonzeros"}
    assert "kernel.of.dim" in fields(tg.projected(base, 25))
    assert "kernel.of.joint" in fields(tg.projected(base, 24, joint=True))
    assert fields(tg.projected(base, 24, budget="layer")) == {"kernel.of.budget"}
    assert "kernel.of.storage" in fields(tg.projected(base, 24, storage="float16"))
    assert fields(tg.projected(small(seed=5), 24)) == {"kernel.of.of.weights"}
    assert fields(tg.projected(base, 24), changed) == {"inputs.x1"}
    assert fields(tg.projected(base, 24), x[:100]) == {"inputs.x1", "shape"}
    assert fields(tg.projected(base, 24), tile=40) == {"tile"}
    before = chunks(copy)
    assert again(copy).gram.progress == (13, 13)
    assert chunks(copy) == before


def test_a_finished_store_returns_at_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tangency.projection import Projected

    prepare, seen = Projected.prepare, []

    def counted(self: Projected, x: Tensor, memory: int | None = None) -> Any:
        seen.append(len(x))
        return prepare(self, x, memory)

    monkeypatch.setattr(Projected, "prepare", counted)
    assert again(copy).shape == (200, 3, 24)
    assert sum(seen) == SAMPLES  # a look at a few, which tells whether the kernel is still the same
    assert open_features(copy)[:3].shape == (3, 3, 24)


def test_grams_and_features_are_told_apart(whole: Path, tmp_path: Path) -> None:
    tg.compute(small(), inputs(20), store=tmp_path / "gram", progress=False)
    with pytest.raises(tg.StoreError, match=r"holds a Gram matrix, not features.*tg\.open_gram"):
        open_features(tmp_path / "gram")
    with pytest.raises(tg.StoreError, match="there is no"):
        open_features(tmp_path / "nothing")
    with pytest.raises(tg.StoreMismatch):
        tg.compute(small(), inputs(), store=str(whole), progress=False)


def slow_run(path: str, log: str) -> None:
    """Compute into the store, writing a line as every tile is made."""
    from tangency.gram import sweep

    torch.set_num_threads(1)
    tiles, made = sweep.RowSweep.tiles, itertools.count()

    def slow(self: Any, task: Any) -> Iterator[Any]:
        with open(log, "a", encoding="utf-8") as f:
            for i, j, tile in tiles(self, task):
                f.write(f"{i}\n")
                f.flush()
                if next(made) == 3:  # of all tasks; waits to be killed: however late, the job has not finished
                    threading.Event().wait()
                yield i, j, tile

    sweep.RowSweep.tiles = slow  # type: ignore[method-assign]
    again(path)


def test_killed_runs_go_on(whole: Path, tmp_path: Path) -> None:
    """Nothing that was finished is lost or made twice, and the end has the bits of a run that was not killed."""
    path, before, context = tmp_path / "features", {}, multiprocessing.get_context("fork")
    for kill in range(4):
        log = tmp_path / f"log{kill}"
        process = context.Process(target=slow_run, args=(str(path), str(log)))
        process.start()
        while process.is_alive() and not (log.exists() and log.read_text(encoding="utf-8").count("\n") > 3):
            time.sleep(0.005)
        assert process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        after = chunks(path)
        begun = {f"c/{line}/0/0/0" for line in log.read_text(encoding="utf-8").split()}
        assert not begun & before.keys(), "a finished block was computed again"
        assert {k: after.get(k) for k in before} == before, "a finished block was lost or changed"
        before = after
    assert 0 < len(before) < 13
    unfinished = open_features(path)
    assert f"{len(before)} of 13 blocks" in repr(unfinished)
    with pytest.raises(tg.IncompleteGram):
        unfinished.tensor()
    done = again(path)
    assert chunks(path) == chunks(whole)
    assert torch.equal(done.tensor(), open_features(whole).tensor())


@pytest.mark.parametrize("harm", ["flip", "empty", "cut"])
def test_a_damaged_block_is_found_and_made_again(whole: Path, copy: Path, harm: str) -> None:
    path = copy / "c" / "3" / "0" / "0" / "0"
    raw = bytearray(path.read_bytes())
    raw[100] ^= 1
    path.write_bytes({"flip": bytes(raw), "empty": b"", "cut": bytes(raw[:77])}[harm])
    with pytest.raises(tg.DamagedTile, match=r"tile 3, 0 of .*does not match its checksum"):
        open_features(copy).tensor()
    assert open_features(copy)[:16].shape == (16, 3, 24)
    with pytest.raises(tg.DamagedTile):
        tg.projected(small(), 24)(open_features(copy))
    stored = again(copy)
    with pytest.warns(tg.StoreWarning, match="tile 3, 0 .*It was computed again"):
        phi = stored.tensor()
    assert torch.equal(phi, open_features(whole).tensor())
    assert chunks(copy) == chunks(whole)


def test_what_is_not_finite_is_not_stored(tmp_path: Path) -> None:
    x = inputs()
    x[130] = float("nan")
    with pytest.raises(tg.NonFiniteError, match="sample 130"):
        again(tmp_path / "features", x)
    for tile in chunks(tmp_path / "features").values():
        assert np.isfinite(np.frombuffer(tile[:-4], np.float32)).all()


# 16 bits.


def test_sixteen_bits_cost_little(tmp_path: Path) -> None:
    """Half the bytes, an error of 2^-11 in an entry and less in the kernel: far below that of the projection."""
    torch.manual_seed(0)
    base, x = tg.trace_ntk(mlp([6, 40, 3], nn.Tanh)), inputs(60)
    wide, half = tg.projected(base, 256), tg.projected(base, 256, storage=torch.float16)
    phi, kept = wide.features(x), half.features(x)
    assert kept.dtype == torch.float16
    assert torch.equal(kept, phi.half())
    k, norms = wide(x), wide.diag(x).sqrt()
    relative = (half(x) - k).abs() / (norms[:, None] * norms)
    assert half(x).dtype == torch.float32
    assert 0 < float(relative.max()) < 2**-11
    assert float(relative.max()) < 0.01 * tg.projection_error(base, wide, x).rms
    stored = half.features(x, store=tmp_path / "half", progress=False)
    assert stored.dtype == torch.float16
    assert torch.equal(stored.tensor(), kept)
    torch.testing.assert_close(half(stored), half(x))
    torch.testing.assert_close(half.diag(stored), half.diag(x))
    assert sum(map(len, chunks(tmp_path / "half").values())) < 60 * 3 * 256 * 2 + 1000


@pytest.mark.parametrize(
    ("factor", "fix"), [(1e-9, "1000 \\* out"), (1e-5, "1000 \\* out"), (1e7, "out / 1000|0.001 \\* out")]
)
def test_what_16_bits_cannot_hold_is_refused(factor: float, fix: str) -> None:
    """Said with the sample, by how much, and what helps: a larger scale for what is too small, and the reverse."""
    model, x = small().feature_map.network.model, inputs(40)
    base = tg.head_ntk(model, lambda out: factor * out)
    with pytest.raises(tg.InputError, match=rf"sample 0 .*(lose|float16).*storage=None.*({fix})"):
        tg.projected(base, 64, storage="float16").features(x)
    assert tg.projected(base, 64).features(x).isfinite().all()


def test_the_sample_that_16_bits_cannot_hold_is_named_wherever_it_is() -> None:
    model = nn.Linear(3, 1, bias=False)
    kernel = tg.projected(tg.trace_ntk(model), 2, storage="float16")
    x = torch.ones(50, 3)
    x[37] = 1e7
    for tile in (None, 8):
        with pytest.raises(tg.InputError, match="sample 37"):
            kernel.features(x, tile=tile)


def test_a_gradient_of_zero_is_kept_in_16_bits() -> None:
    model, x = nn.Linear(3, 2, bias=False), torch.randn(4, 3)
    x[2] = 0
    kernel = tg.projected(tg.trace_ntk(model), 4, storage="float16")
    assert not bool(kernel.features(x)[2].any())
    with pytest.raises(tg.InputError, match="sample 2.*cosine is undefined"):
        tg.cosine(kernel)(x)


# Neighbours.


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5), st.booleans(), st.booleans(), st.integers(0, 99))
def test_neighbours_are_those_of_brute_force(n: int, m: int, count: int, cosine: bool, ties: bool, seed: int) -> None:
    """Values sorted, each sample once; where values tie, whichever."""
    draw = torch.Generator().manual_seed(seed)
    features, queries = (torch.randn(v, 2, 3, generator=draw, dtype=F64) for v in (n, m))
    if ties:
        features, queries = (v.round().clamp(-1, 1) + torch.eye(2, 3) * 3 for v in (features, queries))
    count = min(count, n)
    value, number = nearest(queries, features, count, cosine=cosine)
    flat = [v.flatten(1) for v in (queries, features)]
    if cosine:
        flat = [v / v.norm(dim=1, keepdim=True) for v in flat]
    want = flat[0] @ flat[1].T
    assert value.shape == number.shape == (m, count)
    torch.testing.assert_close(value, want.sort(1, descending=True).values[:, :count])
    torch.testing.assert_close(value, want.gather(1, number))
    assert all(len(set(row)) == count for row in number.tolist())


def test_neighbours_across_blocks(whole: Path) -> None:
    """More than a block in memory, and a store of 13 of them."""
    draw = torch.Generator().manual_seed(0)
    features, queries = torch.randn(9000, 6, generator=draw), torch.randn(5, 6, generator=draw)
    value, number = nearest(queries, features, 20, cosine=False)
    want = (queries @ features.T).topk(20)
    torch.testing.assert_close(value, want.values)
    assert torch.equal(number, want.indices)
    stored = open_features(whole)
    phi = stored.tensor()
    value, number = nearest(phi[[180, 3]], stored, 30)
    want = nearest(phi[[180, 3]], phi, 30)
    torch.testing.assert_close(value, want[0])
    assert torch.equal(number, want[1])
    assert number[:, 0].tolist() == [180, 3]
    assert torch.equal(nearest(stored, stored, 1)[1][:, 0], torch.arange(200))


def test_neighbours_by_the_kernel(whole: Path) -> None:
    """The similarities are the kernel's own entries."""
    kernel, x, y = tg.projected(small(), 24), inputs(), inputs(205)[200:]
    value, number = nearest(kernel.features(y), open_features(whole), 7, cosine=False)
    torch.testing.assert_close(value, kernel(y, x).gather(1, number), rtol=1e-4, atol=1e-4)
    value, number = nearest(kernel.features(y), open_features(whole), 7)
    torch.testing.assert_close(value, tg.cosine(kernel)(y, x).gather(1, number), rtol=1e-4, atol=1e-4)


def test_neighbours_in_16_bits_and_of_other_types(tmp_path: Path) -> None:
    half = tg.projected(small(), 64, storage="float16")
    x = inputs(40)
    stored = half.features(x, store=tmp_path / "half", tile=16, progress=False)
    value, number = nearest(half.features(x[:3]), stored, 4)
    assert number[:, 0].tolist() == [0, 1, 2]
    assert value.dtype == torch.float32
    torch.testing.assert_close(value[:, 0], torch.ones(3))
    wide = tg.projected(small(), 64).features(x[:3])
    assert nearest(wide, stored, 1)[1][:, 0].tolist() == [0, 1, 2]
    assert nearest(wide.double(), stored, 1)[1][:, 0].tolist() == [0, 1, 2]


def test_neighbours_that_make_no_sense() -> None:
    features = torch.randn(5000, 4)
    for count in (0, -1, 2.0, True, None):
        with pytest.raises(tg.InputError, match=f"neighbours={count}"):
            nearest(features[:2], features, count)
    with pytest.raises(tg.InputError, match="neighbours=5001, but there are 5000"):
        nearest(features[:2], features, 5001)
    for queries in (features[0], features[:2, :3], features[:2, None]):
        with pytest.raises(tg.InputError, match="queries have shape"):
            nearest(queries, features, 2)
    features[4500] = 0
    with pytest.raises(tg.InputError, match="sample 4500.*cosine=False"):
        nearest(features[:2], features, 2)
    with pytest.raises(tg.InputError, match="query 0|queries"):
        nearest(torch.zeros(1, 4), features[:10], 2)
    assert nearest(features[:2], features, 2, cosine=False)[0].shape == (2, 2)


# What is refused, with what was given, what is needed and how to put it right.

MODEL = mlp([3, 40, 2], nn.Tanh)
KERNEL = tg.trace_ntk(MODEL)


@pytest.mark.parametrize("dim", [0, -1, 1.5, 8.0, True, None, "8", [8]])
def test_dimensions_that_make_no_sense(dim: Any) -> None:
    with pytest.raises(tg.InputError) as e:
        tg.projected(KERNEL, dim)
    assert f"dim={dim!r}" in str(e.value)
    assert "at least 1" in str(e.value)


@pytest.mark.parametrize("dim", [242, 243, 10240])
def test_more_dimensions_than_parameters(dim: int) -> None:
    assert sum(p.numel() for p in MODEL.parameters()) == 242
    with pytest.warns(tg.PerformanceWarning, match=f"dim={dim} is not less than the 242 parameters.*exact kernel"):
        tg.projected(KERNEL, dim)
    with pytest.warns(tg.PerformanceWarning, match="82 parameters"):
        tg.projected(tg.trace_ntk(MODEL, trainable="2"), dim)
    tg.projected(KERNEL, 241)  # not a word


@pytest.mark.parametrize("kind", ["rademachr", "SPARSE", "srht", "", None, 3, ["sparse"]])
def test_unknown_kinds(kind: Any) -> None:
    with pytest.raises(tg.InputError) as e:
        tg.projected(KERNEL, 8, kind)
    assert f"kind={kind!r}" in str(e.value)
    assert all(repr(known) in str(e.value) for known in KINDS)
    assert ("Did you mean 'rademacher'?" in str(e.value)) == (kind == "rademachr")


@pytest.mark.parametrize("seed", [1.0, "1", True, None, [1], torch.tensor(1.5)])
def test_seeds_that_make_no_sense(seed: Any) -> None:
    with pytest.raises(tg.InputError) as e:
        tg.projected(KERNEL, 8, seed=seed)
    assert f"seed={seed!r}" in str(e.value)
    assert "integer" in str(e.value)


def test_seeds() -> None:
    """Any integer, also NumPy's (seeds come out of np.arange and generators)."""
    x = torch.randn(3, 3)
    found = [tg.projected(KERNEL, 8, seed=seed).features(x) for seed in (0, -1, 1, 2**80)]
    assert all(not torch.equal(a, b) for i, a in enumerate(found) for b in found[:i])
    kernel = tg.projected(KERNEL, 8, seed=np.int64(1))
    assert torch.equal(kernel.features(x), found[2])
    assert kernel.spec() == tg.projected(KERNEL, 8, seed=1).spec()


@pytest.mark.parametrize(
    ("nonzeros", "kind", "message"),
    [
        (0, "sparse", "nonzeros=0; needed: a number of entries per column, at least 1"),
        (-2, "sparse", "nonzeros=-2"),
        (2.0, "sparse", "nonzeros=2.0"),
        (True, "sparse", "nonzeros=True"),
        (9, "sparse", "nonzeros=9"),
        (2, "gaussian", "nonzeros=2 is for kind='sparse'; kind='gaussian'"),
        (1, "kronecker", "nonzeros=1 is for kind='sparse'"),
    ],
)
def test_nonzeros_that_make_no_sense(nonzeros: Any, kind: str, message: str) -> None:
    with pytest.raises(tg.InputError) as e:
        tg.projected(KERNEL, 8, kind, nonzeros=nonzeros)
    assert message in str(e.value)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ("layers", "budget='layers'; needed: 'global', 'layer', or a dict"),
        (None, "budget=None; needed: 'global', 'layer', or a dict"),
        (["0"], "budget=['0']; needed"),
        ({}, "budget"),
        ({"0": 3}, "says nothing of parameter 2.weight"),
        ({"0": 3, "2.weight": 1}, "says nothing of parameter 2.bias"),
        ({"0": 3, "2": 2, "7": 1}, "names '7'"),
        ({"0": 3, "2.wieght": 1, "2": 2}, "names '2.wieght'"),
        ({"0": 3, "2": 0}, "budget['2']=0; needed: a number of dimensions, at least 1"),
        ({"0": 3, "2": 1.0}, "budget['2']=1.0"),
        ({"0": 3, "2": True}, "budget['2']=True"),
        ({0: 3, 2: 2}, "budget"),
    ],
)
def test_budgets_that_make_no_sense(budget: Any, message: str) -> None:
    with pytest.raises(tg.InputError) as e:
        tg.projected(KERNEL, budget=budget)
    assert message in str(e.value)


def test_budgets_and_dimensions_must_agree() -> None:
    budget = {"0": 5, "2": 3}
    assert tg.projected(KERNEL, budget=budget).projector.dim == 8
    assert tg.projected(KERNEL, 8, budget=budget).projector.dim == 8
    for dim in (7, 9, 1):
        with pytest.raises(tg.InputError, match=f"dim={dim}, but budget= adds up to 8"):
            tg.projected(KERNEL, dim, budget=budget)
    with pytest.raises(tg.InputError, match="dim=1 is too small for budget='layer': the model has 2 layers"):
        tg.projected(KERNEL, 1, budget="layer")
    assert tg.projected(KERNEL, 2, budget="layer").features(torch.randn(3, 3)).shape == (3, 2, 2)


def test_budgets_of_activations_are_checked_when_they_are_known() -> None:
    kernel = tg.projected(tg.conjugate_kernel(MODEL), budget={"2": 8})
    with pytest.raises(tg.InputError, match="says nothing of"):
        kernel.features(torch.randn(3, 3))


def test_joint_needs_a_trace() -> None:
    with pytest.raises(tg.InputError, match=r"joint=True.*needs a trace: tg\.projected\(tg\.trace_ntk"):
        tg.projected(tg.full_ntk(MODEL), 8, joint=True)
    assert tg.projected(KERNEL, 8, joint=True).features(torch.randn(3, 3)).shape == (3, 8)


@pytest.mark.parametrize("storage", ["half", torch.bfloat16, torch.float32, 16, "int8"])
def test_storage_that_makes_no_sense(storage: Any) -> None:
    with pytest.raises(tg.InputError) as e:
        tg.projected(KERNEL, 8, storage=storage)
    assert f"storage={storage!r}; needed: None (as computed) or torch.float16" in str(e.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda: tg.cosine(KERNEL), r"CosineKernel.*tg\.cosine\(tg\.projected\(k\)\)"),
        (lambda: tg.sum(KERNEL, KERNEL), "SumKernel"),
        (lambda: tg.infinite_ntk(MODEL), "nfinite"),
        (lambda: tg.projected(KERNEL, 8), r"projected already.*kernel\.base"),
        (lambda: MODEL, r"Sequential.*tg\.projected\(tg\.trace_ntk\(model\)\)"),
        (lambda: None, r"NoneType.*tg\.projected\(tg\.trace_ntk\(model\)\)"),
        (lambda: torch.randn(3, 3), r"Tensor.*tg\.projected\(tg\.trace_ntk\(model\)\)"),
    ],
)
def test_what_cannot_be_projected(given: Any, message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        tg.projected(given(), 8)


def test_features_themselves_can_be_projected() -> None:
    x = torch.randn(4, 3)
    assert torch.equal(tg.projected(KERNEL.feature_map, 8).features(x), tg.projected(KERNEL, 8).features(x))


def test_inputs_that_make_no_sense() -> None:
    kernel, x = tg.projected(KERNEL, 8), torch.randn(3, 3)
    with pytest.raises(tg.InputError, match=r"requires a gradient.*x\.detach\(\)"):
        kernel(x.clone().requires_grad_())
    with torch.no_grad():
        kernel(x.clone().requires_grad_())
    assert not kernel.features(x.clone().requires_grad_()).requires_grad
    for bad in (x[:0], torch.full((3, 3), 1e39, dtype=torch.float64), "x", None, 3, [1.0, 2.0]):
        with pytest.raises(tg.InputError):
            kernel.features(bad)
    for tile in (0, -1, 1.5, True, "8"):
        with pytest.raises(tg.InputError, match="tile="):
            kernel.features(x, tile=tile)
    with pytest.raises(tg.ModelError, match=r"model\.eval\(\)"):
        tg.projected(tg.trace_ntk(nn.Sequential(nn.Linear(3, 40), nn.Dropout(0.5))), 8).features(x)


def test_errors_that_make_no_sense() -> None:
    x, kernel = torch.randn(6, 3), tg.projected(KERNEL, 8)
    error = tg.projection_error
    other = tg.trace_ntk(mlp([3, 40, 2], nn.Tanh))
    with pytest.raises(tg.InputError, match="made from another one: weights differ"):
        error(other, kernel, x)
    with pytest.raises(tg.InputError, match="made from another one: kernel, head differ"):
        error(tg.pseudo_ntk(MODEL), kernel, x)
    with pytest.raises(tg.InputError, match="made from another one"):
        error(tg.cosine(KERNEL), kernel, x)
    with pytest.raises(tg.InputError, match=r"projected is a .*needed: tg\.projected\(kernel"):
        error(kernel, KERNEL, x)
    with pytest.raises(tg.InputError, match=r"projected is a CosineKernel"):
        error(KERNEL, tg.cosine(kernel), x)
    for bad in (None, kernel, MODEL):
        with pytest.raises(tg.InputError, match="needed: the exact kernel"):
            error(bad, kernel, x)
    with pytest.raises(tg.InputError, match="one sample; needed: at least two"):
        error(KERNEL, kernel, x[:1])
    linear = nn.Linear(3, 2, bias=False)
    x[4] = 0
    for make in (tg.trace_ntk, tg.full_ntk):
        with pytest.raises(tg.InputError, match=r"k\(x, x\) is 0 for sample 4"):
            error(make(linear), tg.projected(make(linear), 3), x)


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf, "a", None])
def test_targets_that_make_no_sense(bad: Any) -> None:
    found = tg.projection_error(KERNEL, tg.projected(KERNEL, 8), torch.randn(6, 3))
    with pytest.raises(tg.InputError, match=f"error={bad}"):
        found.dimension(bad)
    with pytest.raises(tg.InputError, match=f"probability={bad}"):
        found.dimension(0.1, bad)
    for probability in (1, 1.5):
        with pytest.raises(tg.InputError, match=f"probability={probability}; needed: a number between 0 and 1"):
            found.dimension(0.1, probability)


def test_results_do_not_leave_a_trace_in_the_model() -> None:
    """Nothing of the model, the inputs or torch's generators is changed."""
    model, x = mlp([3, 40, 2], nn.Tanh), torch.randn(20, 3)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    copy, state = x.clone(), torch.get_rng_state()
    for kind in KINDS:
        tg.projected(tg.trace_ntk(model), 8, kind).features(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, copy)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# Features in place of inputs, and results.


def test_features_stand_for_inputs_of_their_own_kernel_alone() -> None:
    kernel, x = tg.projected(KERNEL, 8), torch.randn(6, 3)
    batch = kernel.embedded(x)
    assert isinstance(batch, FeatureBatch)
    assert repr(batch) == "FeatureBatch([6, 2, 8])"
    assert torch.equal(kernel(batch), kernel(x))
    assert torch.equal(tg.compute(kernel, batch, x, progress=False).dense(), kernel(x, x))
    assert torch.equal(kernel.diag(batch), kernel.diag(x))
    with pytest.raises(tg.InputError, match="x is a FeatureBatch; needed: a tensor"):
        KERNEL(batch)
    with pytest.raises(tg.InputError, match="x1 is a FeatureBatch; needed: a tensor"):
        tg.compute(KERNEL, batch, progress=False)
    with pytest.raises(tg.InputError, match="features of another kernel: seed 0, not 1"):
        tg.projected(KERNEL, 8, seed=1)(batch)


def test_rows_have_values_by_themselves() -> None:
    """A run of rows makes each block once, and nothing of pairs."""
    seen: list[int] = []

    class Lengths(RowMap):
        together = 4

        def values(self, x: Any, memory: int | None = None) -> Tensor:
            seen.append(len(x))
            return torch.stack([x, x.square()], 1)

        def ready(self, x: Any, name: str = "x") -> Any:
            return x

        def footprint(self, x: Any) -> tuple[int, int]:
            return 48, 48

        def diagnose(self, values: Tensor) -> None: ...

        def outputs(self, x: Any) -> None: ...

        def spec(self) -> dict[str, Any]:
            return {"kernel": "features", "of": {"kernel": "lengths"}}

        @property
        def device(self) -> torch.device:
            return torch.device("cpu")

    x = torch.randn(10, 3)
    made = Run(Lengths(), x).compute(None, 4, False)
    assert made.shape == (10, 2, 1, 3)
    assert torch.equal(made.dense()[:, :, 0], torch.stack([x, x.square()], 1))
    assert seen == [1, 4, 4, 2]  # the first is the plan's


def test_neighbours_have_names() -> None:
    features = torch.eye(4)
    result = nearest(features[:2], features, neighbours=1)
    assert result.index[:, 0].tolist() == [0, 1]
    assert torch.equal(result.similarity, torch.ones(2, 1))


def test_a_projection_error_can_be_read() -> None:
    error = tg.projection_error(KERNEL, tg.projected(KERNEL, 8), torch.randn(6, 3))
    assert len(repr(error)) < 200
    lines = error.table().splitlines()
    assert [line.split()[0] for line in lines] == ["pairs", "50%", "90%", "95%", "99%", "100%"]
    assert float(lines[-1].split()[1]) == pytest.approx(error.largest, rel=1e-4)
    said = error.to_dict()
    assert said["kind"] == "sparse"
    assert len(said["residuals"]) == 15
