"""Infinite kernels in float32: what is of pairs is, what is of one sample is not, and both meet within 1e-5."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency import infinite as inf
from tangency.errors import InputError, StoreMismatch


def images(n: int) -> Tensor:
    """Digits, standardised: large parts of them are the same background."""
    x = tg.datasets.digits().train.x[:n].double()
    return (x - x.mean()) / x.std()


def stack(depth: int, *end: object, b_var: float | None = None) -> inf.Serial:
    """Convolutions and ReLU, then what is given."""
    layers = [inf.Conv((3, 3), padding=1, b_var=b_var or 0.0, bias=b_var is not None), inf.Relu()] * depth
    return inf.Serial(*layers, *end, inf.Linear())


def dense(depth: int) -> inf.Serial:
    return inf.Serial(inf.Flatten(), *[inf.Linear(), inf.Relu()] * depth, inf.Linear())


def off(net: object, x: Tensor, y: Tensor | None = None) -> float:
    """The largest error of both kernels in float32, relative to the largest entry."""
    exact, rounded = (tg.infinite_ntk(net, dtype=kind).both(x, y) for kind in ("float64", "float32"))
    return max(float((b.double() - a).abs().max() / a.abs().max()) for a, b in zip(exact, rounded, strict=True))


@pytest.mark.parametrize(
    ("net", "n"),
    [
        (dense(3), 60), (dense(20), 60), (stack(5, inf.Flatten()), 60), (stack(20, inf.Flatten()), 40),
        (stack(5, inf.GlobalAvgPool()), 10), (stack(10, inf.GlobalAvgPool(), b_var=0.1), 8),
    ],
)  # fmt: skip
def test_close_to_float64_on_digits(net: inf.Serial, n: int) -> None:
    assert off(net, images(n)) < 3e-6


@pytest.mark.parametrize("net", [dense(20), stack(20, inf.Flatten()), stack(10, inf.GlobalAvgPool())])
@pytest.mark.every(2)
def test_copies_and_near_copies(net: inf.Serial) -> None:
    """From equal ones over those that are taken from float64 to the nearest that are not (cosine 0.99)."""
    x, noise = images(4), torch.randn(4, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for size in (0.0, 1e-5, 1e-3, 0.06, 0.13, 0.15, 0.18):
        assert off(net, x + size * noise, x) < 1e-5


@pytest.mark.parametrize("b_var", [None, 0.1])
def test_equal_patches_have_the_angle_zero(b_var: float | None) -> None:
    """Different images with the same background. Own variances rounded from float64 were off by 3e-5 here."""
    x = torch.full((5, 1, 12, 12), -0.4242, dtype=torch.float64)
    x[:, :, 4:8, 4:8] = torch.randn(5, 1, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert off(stack(2, inf.Flatten(), b_var=b_var), x) < 5e-7
    assert off(stack(2, inf.GlobalAvgPool(), b_var=b_var), x[:3]) < 5e-7


def test_diagonal_is_that_of_float64() -> None:
    x = images(6)
    for net in (dense(10), stack(10, inf.Flatten()), stack(3, inf.GlobalAvgPool())):
        exact, rounded = (tg.infinite_ntk(net, dtype=kind) for kind in ("float64", "float32"))
        assert torch.equal(rounded(x).diagonal(), exact(x).diagonal().float())
        assert torch.equal(rounded.diag(x), exact.diag(x).float())


def test_contract_of_kernels() -> None:
    k = tg.infinite_nngp(dense(2), dtype=torch.float32)
    tg.testing.check_kernel(k, images(6))
    assert "float32" in repr(k)


def test_positions_of_the_output() -> None:
    """Near pairs are put back among pairs of positions too."""
    x = images(3)
    net = inf.Serial(inf.Conv((3, 3), padding=1), inf.Relu(), inf.Conv((3, 3), padding=1))
    assert off(net, x, torch.cat([x[:1], x[1:] + 1e-4])) < 1e-6


def test_batch_norm_is_computed_in_float64() -> None:
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).train()
    exact, rounded = (tg.infinite_ntk(net, dtype=kind)(images(8)) for kind in ("float64", "float32"))
    assert torch.equal(rounded, exact.float())


def test_autocast_changes_nothing() -> None:
    x, k = images(12), tg.infinite_ntk(dense(2), dtype="float32")
    with torch.autocast("cpu", torch.float16):
        inside = k(x)
    assert torch.equal(inside, k(x))


def test_gradients() -> None:
    x = images(5).requires_grad_()
    grads = [
        torch.autograd.grad(tg.infinite_ntk(dense(3), dtype=kind)(x, images(9)[5:]).sum(), x)[0]
        for kind in ("float64", "float32")
    ]
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-6)


def test_footprint_and_store(tmp_path: Path) -> None:
    x, wide = images(8), tg.infinite_ntk(dense(2))
    k = tg.infinite_ntk(dense(2), dtype="float32")
    assert k.footprint(x)[0] == 1.5 * wide.footprint(x)[0]
    assert "dtype" not in wide.spec()  # stores of before stay valid
    assert k.spec() == {**wide.spec(), "dtype": "float32"}
    gram = tg.compute(k, x, store=tmp_path / "gram", tile=3, progress=False)
    assert gram.dtype == torch.float32
    torch.testing.assert_close(gram.dense(), k(x))
    with pytest.raises(StoreMismatch, match="float32"):
        tg.compute(wide, x, store=tmp_path / "gram", tile=3, progress=False)


@pytest.mark.parametrize("kind", ["float16", torch.bfloat16, "tf32", None, 32])
def test_other_types_are_refused(kind: object) -> None:
    with pytest.raises(InputError, match="needed: 'float64' or 'float32'"):
        tg.infinite_nngp(nn.Linear(2, 1), dtype=kind)  # type: ignore[arg-type]
