"""8-bit factors on a card that multiplies them, and the passes over memory that go with them, against plain torch."""

import pytest
import torch
from on_device import CUDA, DEVICE, QUIET, Errors, cosine_error
from torch import Tensor, nn

import tangency as tg
from tangency.engine import fused, methods, narrow
from tangency.engine.blocks import gradient
from tangency.engine.lattice import Lattice, Places

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(q) for q in QUIET)]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def cnn() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.ReLU()]
    more = [nn.Conv2d(128, 256, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(256, 256, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*body, *more, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 10)).eval()


@pytest.mark.parametrize(("n", "m", "k"), [(16, 16, 64), (37, 51, 1000), (1, 3, 7), (200, 333, 40000)])
def test_products(n: int, m: int, k: int, errors: Errors) -> None:
    """Of any shape: rows are filled up to what the card wants. Sums of one sign, where 14 bits would lose per cents.

    Within a step the card adds in few bits even so, and cuts off what is left: 5e-4 at most, measured for k = 64.
    """
    a, b = (narrow.rounded(drawn(rows, k).abs().half().to(DEVICE)) for rows in (n, m))
    got = narrow.matmul_eight(a.q, b.q)
    want = a.q.cpu().float().double() @ b.q.cpu().float().double().T
    assert got.shape == (n, m)
    assert got.is_contiguous()
    errors.below("products of 8 bits", float(((got.cpu() - want) / want).abs().max()), 1e-3)


def test_rounding_is_that_of_torch() -> None:
    g = drawn(9, 5000).half()
    g[3], g[4] = 0, g[4] * 1e-4
    here, there = narrow.rounded(g), narrow.rounded(g.to(DEVICE))
    torch.testing.assert_close(there.scale.cpu(), here.scale)
    # The factor's last bit may differ, and so, at a tie, the rounding.
    assert float((there.q.cpu().float() != here.q.float()).float().mean()) < 1e-3
    assert not there.q.cpu().float()[:, 5000:].any()
    g[0, 7], g[1, 7] = float("inf"), float("nan")
    bad = narrow.rounded(g.to(DEVICE))
    k = narrow.matmul_eight(bad.q, bad.q) * bad.scale[:, None] * bad.scale
    assert k.diagonal().isfinite().tolist() == [False, False, *[True] * 7]


@pytest.mark.skipif(not CUDA, reason="plain torch has no kernel that forms and rounds at once")
@pytest.mark.parametrize(
    ("c", "t", "o", "i"), [(10, 64, 64, 576), (3, 20, 72, 144), (1, 16, 256, 1152), (2, 100, 64, 64)]
)
def test_gradients_are_formed_in_eight_bits(c: int, t: int, o: int, i: int) -> None:
    a = drawn(5, 1, t, i).half().to(DEVICE)
    d = drawn(5, t, c, o, seed=1).half().to(DEVICE).transpose(1, 2)[:, :, :, None]
    for some in (d, d[:, 1:]) if c > 1 else (d,):
        assert fused.forms(a, some)
        rows = narrow.formed(a, some, narrow.bound(a, some))
        want = gradient(a.float(), some.float()).flatten(1)
        got = rows.q.float() * rows.scale[:, None]
        # Rounded to nearest with three bits of mantissa: a sixteenth at most, and of tiny entries 2^-10 of the scale.
        assert bool(((got - want).abs() <= want.abs() * 0.066 + rows.scale[:, None] * 2**-9).all())
        assert float((got - want).norm() / want.norm()) < 0.03
        assert 20 < float(rows.q.float().abs().max()) <= 448


@pytest.mark.parametrize(("n", "m", "h", "w", "stride"), [(5, 70, 4, 4, 1), (3, 9, 5, 7, 1), (2, 3, 8, 8, 2)])
def test_sums_over_shifts(n: int, m: int, h: int, w: int, stride: int, errors: Errors) -> None:
    numbers = torch.arange(1.0, h * w + 1).view(1, 1, h, w)
    table = nn.functional.unfold(numbers, 3, padding=1, stride=stride)[0].T.long() - 1
    positions = ((h - 1) // stride + 1, (w - 1) // stride + 1)
    places = Places(table.to(DEVICE), Lattice((h, w), positions, (3, 3), (stride, stride), (1, 1), (1, 1)))
    x, y = drawn(n, 6, h, w), drawn(m, 6, h, w, seed=1)
    a, b = (nn.functional.unfold(v, 3, padding=1, stride=stride) for v in (x, y))  # [n, i, t]
    t = len(table)
    deltas = drawn(n, t, m, t, seed=2)
    want = ((torch.einsum("nit,mis->ntms", a, b) + 0.5) * deltas).double().sum((1, 3))
    pixels = torch.einsum("ncp,mcq->npmq", x.flatten(2), y.flatten(2)).contiguous()
    got = fused.sum_shifted(pixels.to(DEVICE), deltas.to(DEVICE), places, places, 0.5)
    errors.below("sums over shifts", float((got.cpu() - want).norm() / want.norm()), 1e-5)


@pytest.mark.parametrize("method", [None, "expand", "in place"])
def test_a_network_in_eight_bits(method: str | None, errors: Errors) -> None:
    x = drawn(40, 3, 16, 16)
    want = tg.trace_ntk(cnn().double())(x.double())
    kernel = tg.trace_ntk(cnn().to(DEVICE), dtype="float8", method=method)
    got = kernel(x.to(DEVICE))
    errors.below("float8", cosine_error(got, want), 3e-3)
    errors.below("float8 diag", float((got.diagonal().cpu() / want.diagonal() - 1).abs().max()), 2e-3)
    assert any("8" in row.cost.precision for row in kernel.costs(x[:2].to(DEVICE)).rows if row.cost)
    cross = kernel(x[:3].to(DEVICE), x[3:].to(DEVICE))
    torch.testing.assert_close(cross, got[:3, 3:], rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_patches_by_their_pixels(dtype: str, errors: Errors, monkeypatch: pytest.MonkeyPatch) -> None:
    x = drawn(12, 3, 16, 16)
    want = tg.trace_ntk(cnn().double())(x.double())
    for cost in (0, 1 << 40):
        monkeypatch.setattr(methods, "_FETCH", {"cpu": cost, "cuda": cost})
        got = tg.trace_ntk(cnn().to(DEVICE), dtype=dtype, method="in place")(x.to(DEVICE))
        errors.below(f"pixels {dtype}", cosine_error(got, want), {"float32": 1e-4, "float16": 2e-3}[dtype])


@pytest.mark.skipif(not CUDA, reason="says whether the card has what the other tests are about")
def test_the_card_multiplies_eight_bits() -> None:
    assert narrow.available(DEVICE) == (torch.cuda.get_device_capability() >= (8, 9))
