"""Products of 8 bits, and patches by their pixels: against gradients that autograd takes sample by sample."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.engine import expansion, features, fused, methods, narrow
from tangency.engine.capture import capture
from tangency.engine.rules import Windows

F64 = torch.float64
QUIET = pytest.mark.filterwarnings("ignore:dtype='float8' on cpu:tangency.PerformanceWarning")
TWO = (3, 2)


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """[n, c, p], one backward pass at a time."""
    parameters, rows = list(model.parameters()), []
    for one in x:
        out = model(one[None])[0]
        gradients = [torch.autograd.grad(v, parameters, retain_graph=True) for v in out]
        rows.append(torch.stack([torch.cat([g.flatten() for g in of_one]) for of_one in gradients]))
    return torch.stack(rows)


def cnn() -> nn.Module:
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*body, nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 16, 4)).eval()


def numbers_of_e4m3() -> list[float]:
    """All that are not negative, from the definition: 4 bits of exponent with bias 7, 3 of mantissa, one NaN."""
    small = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e, m in itertools.product(range(1, 16), range(8))]
    return (small + normal)[:-1]


def test_rounded_takes_the_nearest_number_of_eight_bits() -> None:
    table = torch.tensor(numbers_of_e4m3())
    g = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).half()
    g[1] *= 1e-3
    g[2] = 0
    r = narrow.rounded(g)
    assert r.q.shape == (3, 64)
    assert not r.q.float()[:, 50:].any()  # filled up
    scale = torch.tensor([*(g[:2].float().abs().amax(1) / 448), 1.0])
    v = g.float() / scale[:, None]
    least = (v.abs()[..., None] - table).abs().amin(-1)
    torch.testing.assert_close((r.q.float()[:, :50] - v).abs(), least, rtol=0, atol=1e-4)
    assert r.q.float().abs().amax(1).tolist() == [448, 448, 0]
    # Too long by rounding, which the scale takes back: in the mean, products with other rows are right then.
    torch.testing.assert_close(r.scale, scale, rtol=2e-2, atol=0)
    back = r.q.float()[:, :50] * r.scale[:, None]
    torch.testing.assert_close((back * g).sum(1), g.float().square().sum(1))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    g = torch.ones(2, 32).half()
    g[1, 3] = bad
    r = narrow.rounded(g)
    k = narrow.matmul_eight(r.q, r.q) * r.scale[:, None] * r.scale
    assert k.isfinite().tolist() == [[True, False], [False, False]]


def test_products_of_eight_bits_are_exact_but_for_the_rounding_of_their_factors() -> None:
    draw = torch.Generator().manual_seed(2)
    r, s = (narrow.rounded(torch.randn(n, 40, generator=draw).half()) for n in (5, 7))
    want = r.q.double() @ s.q.double().T
    torch.testing.assert_close(narrow.matmul_eight(r.q, s.q).double(), want, rtol=1e-6, atol=1e-2)


@QUIET
@pytest.mark.parametrize("method", [None, "expand", "in place"])
def test_eight_bits_are_within_rounding(method: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "LEAST", 512)
    monkeypatch.setattr(narrow, "WIDE", 128)
    model, x = cnn(), torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    j = jacobian(model.double(), x.double()).flatten(1)
    want = j @ j.T
    model.float()
    size = want.diagonal().sqrt()
    narrow_ones, half = (tg.trace_ntk(model, dtype=dtype, method=method) for dtype in ("float8", "float16"))
    k, sixteen = narrow_ones(x), half(x)
    off = ((k - want) / (size[:, None] * size)).abs()
    assert k.dtype == torch.float32
    assert 5e-5 < float(off.max()) < 3e-3  # three bits of mantissa, and not more
    assert float(((sixteen - want) / (size[:, None] * size)).abs().max()) < 5e-5
    # The diagonal, and what cosines divide by, have 16.
    assert float((k.diagonal() / want.diagonal() - 1).abs().max()) < 1e-4
    torch.testing.assert_close(k.diagonal(), narrow_ones.diag(x))
    assert torch.equal(k, k.T)
    torch.testing.assert_close(narrow_ones(x[:2], x[2:]), k[:2, 2:], rtol=1e-5, atol=0)  # rounded alike in any tile
    assert torch.equal(tg.cosine(narrow_ones)(x).diagonal(), torch.ones(6))


@QUIET
def test_the_full_kernel_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(narrow, "LEAST", 512)
    model, x = cnn(), torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(3))
    j = jacobian(model.double(), x.double())
    want = torch.einsum("ncp,mdp->ncmd", j, j)
    kernel = tg.full_ntk(model.float(), dtype="float8", method="expand")
    k = kernel(x)
    assert 1e-5 < float((k - want).abs().max() / want.abs().max()) < 3e-3
    own, exact = k.reshape(16, 16).diagonal(), want.reshape(16, 16).diagonal()
    torch.testing.assert_close(own, exact.float(), rtol=1e-4, atol=0)


@QUIET
def test_costs_say_which_parameters_have_how_many_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = cnn(), torch.randn(3, 3, 8, 8)
    kernel = tg.trace_ntk(model, dtype="float8", method="expand")
    bits = {row.parameter: row.cost.precision for row in kernel.costs(x).rows if row.cost}
    assert bits["4.weight"] == "8 bits"  # 4 outputs of 64 x 288
    assert bits["2.weight"] == "16 bits"  # 4 of 32 x 144 are too few
    assert bits["4.bias"] == "float32"
    assert "8 bits" in kernel.costs(x).table()
    monkeypatch.setattr(narrow, "WIDE", 256)
    rows = tg.trace_ntk(model, dtype="float8", method="in place").costs(x).rows
    in_place = {row.parameter: row.cost.precision for row in rows if row.cost}
    assert in_place["4.weight"] == "8 and 16 bits"
    assert {row.cost.precision for row in tg.trace_ntk(model).costs(x).rows if row.cost} == {"float32"}


@QUIET
def test_formed_gradients_are_kept_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where gradients are smaller than their factors: many positions, few weights."""
    monkeypatch.setattr(narrow, "LEAST", 512)
    torch.manual_seed(0)
    body = nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()
    model, x = nn.Sequential(*body, nn.Linear(64, 3)), torch.randn(7, 4, 12, 12)
    j = jacobian(model.double(), x.double()).flatten(1)
    want = j @ j.T
    model.float()
    kernel, half = (tg.trace_ntk(model, dtype=dtype) for dtype in ("float8", "float16"))
    blocks = kernel.prepare(x)
    assert blocks["0.weight"].g.dtype == torch.float8_e4m3fn
    sixteen = half.prepare(x)
    assert sum(sixteen[name].nbytes - block.nbytes for name, block in blocks.items()) == 7 * 3 * 16 * 36
    assert kernel.footprint(x)[0] == half.footprint(x)[0] - 3 * 16 * 36
    assert {r.parameter: (r.method, r.cost.precision) for r in kernel.costs(x).rows if r.cost}["0.weight"] == (
        "formed",
        "8 bits",
    )
    size = want.diagonal().sqrt()
    for prepared in (blocks, kernel.prepare(x, memory=1)):  # at once, and a sample at a time
        k = kernel.pair(prepared, prepared)
        assert 1e-5 < float(((k - want) / (size[:, None] * size)).abs().max()) < 3e-3
        torch.testing.assert_close(kernel.prepared_diag(prepared), want.diagonal().float(), rtol=1e-4, atol=0)
    torch.testing.assert_close(kernel.pair(blocks, sixteen), half(x), rtol=5e-3, atol=0)
    some = kernel.prepare(x[2:4])
    some["0.weight"].g.view(torch.uint8)[1, 0, 0] = 127  # NaN
    with pytest.raises(tg.NonFiniteError, match="sample 1 is not finite at parameter 0.weight"):
        kernel.diagnose(some)


def test_cotangents_beyond_16_bits_are_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's samples say nothing of one whose gradient is 10⁴ times as large; it is noticed after all passes."""
    torch.manual_seed(0)

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))) * x[:, :1].exp()

    model, x = Steep(), torch.randn(6, 4)
    x[4, 0] = 9
    j = jacobian(model.double(), x.double()).flatten(1)
    model.float()
    passes: list[int] = []
    kernel = tg.trace_ntk(model, dtype="float16")
    kernel.prepare(x[:2])  # plans are made of these

    def counted(*given: Any, **named: Any) -> Any:
        passes.append(len(given[2]))
        return capture(*given, **named)

    monkeypatch.setattr(features, "capture", counted)
    (plan,) = kernel.feature_map.plans.values()
    prepared = kernel.prepare(x, memory=2 * (plan.kept + plan.transient))
    assert passes == [2, 2, 2, 2, 2, 2]
    got, want = kernel.pair(prepared, prepared), j @ j.T
    size = want.diagonal().sqrt()
    assert float(((got - want) / (size[:, None] * size)).abs().max()) < 1e-3
    passes.clear()
    kernel.prepare(x[:4], memory=2 * (plan.kept + plan.transient))
    assert passes == [2, 2]


@QUIET
def test_eight_bits_go_into_stores_and_through_derivatives(tmp_path: object) -> None:
    model, x = cnn(), torch.randn(5, 3, 8, 8)
    kernel = tg.trace_ntk(model, dtype="float8")
    gram = tg.compute(kernel, x, store=f"{tmp_path}/k", tile=2, progress=False)
    torch.testing.assert_close(gram.dense(), kernel(x), rtol=2e-3, atol=0)
    assert torch.equal(tg.compute(kernel, x, store=f"{tmp_path}/k", progress=False).dense(), gram.dense())
    y = x[:2].clone().requires_grad_()
    kernel(y).sum().backward()  # what is differentiated keeps 32 bits
    assert y.grad is not None
    assert bool(y.grad.isfinite().all())


@QUIET
@pytest.mark.parametrize("dtype", ["float64", "float16", "float8"])
@pytest.mark.parametrize("make", [tg.trace_ntk, tg.full_ntk])
@pytest.mark.every(5, 1)
def test_rows_that_meet_a_column_together(make: Any, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as one by one, and gradients of the column are formed once."""
    monkeypatch.setattr(narrow, "LEAST", 512)
    model, x = cnn(), torch.randn(11, 3, 8, 8)
    formed: list[int] = []
    form = expansion._Side.formed

    def counted(self: expansion._Side, *given: Any) -> Any:
        formed.append(self.x.n)
        return form(self, *given)

    monkeypatch.setattr(expansion._Side, "formed", counted)
    base = make(model, dtype=dtype, method="expand")
    for kernel in (base, 2 * base, tg.cosine(base)):
        blocks = [kernel.prepare(kernel.ready(v)) for v in x.split([3, 3, 1, 4])]
        formed.clear()
        together = kernel.pairs(blocks[:3], blocks[3], 1 << 16)
        at_once = formed.count(4)
        formed.clear()
        for tile, a in zip(together, blocks[:3], strict=True):
            assert torch.equal(tile, kernel.pair(a, blocks[3], 1 << 16))
        assert 0 < 3 * at_once == formed.count(4)
        # Among the rows may be the column itself.
        own, other = kernel.pairs([blocks[3], blocks[0]], blocks[3])
        assert torch.equal(own, kernel.pair(blocks[3], blocks[3]))
        assert torch.equal(other, kernel.pair(blocks[0], blocks[3]))


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"kernel_size": 3, "padding": 1}, (5, 4)),
        ({"kernel_size": 3, "stride": 2, "padding": 1}, (6, 5)),
        ({"kernel_size": TWO, "dilation": 2, "padding": (2, 0)}, (5, 6)),
        ({"kernel_size": 3, "padding": 1, "groups": 2}, (4, 4)),
        ({"kernel_size": 3, "padding": 1, "padding_mode": "circular"}, (4, 4)),
    ],
)
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.every(3)
def test_patches_by_their_pixels(
    options: dict[str, object], size: tuple[int, int], trace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Σ over shifts of the pixels' products, in place of products of patches."""
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, **options)  # type: ignore[arg-type]
    model = nn.Sequential(conv, nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)).double()
    x = torch.randn(4, 4, *size, dtype=F64)
    wide = torch.randn(3, 4, size[0] + 1, size[1], dtype=F64)  # images of another size: other places
    calls: list[int] = []
    shifted = fused.shifted
    monkeypatch.setattr(fused, "shifted", lambda *given: calls.append(1) or shifted(*given))
    make = tg.trace_ntk if trace else tg.full_ntk
    equation = "ncp,mcp->nm" if trace else "ncp,mdp->ncmd"
    i, j = jacobian(model, x), jacobian(model, wide)
    for cost, taken in ((0, True), (1 << 40, False)):
        monkeypatch.setattr(methods, "_FETCH", {"cpu": cost, "cuda": cost})
        calls.clear()
        kernel = make(model, method="in place")
        torch.testing.assert_close(kernel(x), torch.einsum(equation, i, i), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(kernel(x, wide), torch.einsum(equation, i, j), rtol=1e-9, atol=1e-9)
        assert bool(calls) == taken or conv.stride == (2, 2)  # there are four times as many pixels as positions


def test_pixels_are_taken_where_they_are_cheaper() -> None:
    """By count: nine times fewer multiply–adds for 3 x 3, unless there are more pixels than positions."""
    x = torch.randn(2, 512, 4, 4)
    flops = {}
    for stride, kernel_size in ((1, 3), (2, 3), (1, 1)):
        model = nn.Sequential(nn.Conv2d(512, 8, kernel_size, stride, kernel_size // 2, bias=False), nn.Flatten())
        kernel = tg.trace_ntk(
            nn.Sequential(*model, nn.Linear(8 * (4 // stride) ** 2, 1, bias=False)), method="in place"
        )
        cost = kernel.costs(x, x.clone()).rows[0].cost
        assert cost is not None
        flops[stride, kernel_size] = cost.flops / 4  # of a pair
    assert flops[1, 3] == 2 * 256 * (512 + 9 + 8)
    assert flops[2, 3] == 2 * 16 * (9 * 512 + 8)
    assert flops[1, 1] == 2 * 256 * (512 + 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("channels", "groups"), [(8, 1), (16, 2), (4, 1), (6, 1), (12, 2)])
@pytest.mark.parametrize("first", [0, 1])
def test_patches_are_copied_several_channels_at_a_time(
    dtype: torch.dtype, channels: int, groups: int, first: int
) -> None:
    """Whatever lies in memory as it may: the patches are those of `unfold`."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, channels + 1, 5, 6, generator=draw).to(dtype).contiguous(memory_format=torch.channels_last)
    windows = Windows((3, 2), (1, 2), ((1, 1), (0, 1)), (1, 1), groups)
    for some in (x[:, first : first + channels], x[1:, :channels].contiguous(memory_format=torch.channels_last)):
        padded = nn.functional.pad(some.float(), (0, 1, 1, 1))
        want = nn.functional.unfold(padded, (3, 2), stride=(1, 2))  # [n, (channels, taps), t]
        want = want.view(len(some), groups, channels // groups, 6, -1).permute(0, 4, 1, 3, 2).flatten(3)
        got = windows.patches(some)
        assert got.dtype == dtype
        assert torch.equal(got.float(), want)
