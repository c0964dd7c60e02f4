"""Shapes drawn by hypothesis: every rule over its whole geometry, against plain autograd."""

from dataclasses import replace

import reference
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import tangency as tg

F64 = torch.float64


def agrees(model: nn.Module, x: torch.Tensor, covered: bool = True) -> None:
    model = model.double().eval()
    j = reference.jacobians(model, x)
    kernel = tg.full_ntk(model)
    got, want = kernel(x), reference.full(j, j)
    assert float((got - want).norm()) <= 1e-10 * float(want.norm()) + 1e-14
    trace = replace(kernel, trace=True)(x)  # trace_ntk(model), without another probe
    assert float((trace - reference.trace(j, j)).norm()) <= 1e-10 * float(trace.norm()) + 1e-14
    if covered:
        assert not kernel.feature_map.plan(x).fallback


class Pool(nn.Module):
    """Sums a layer's positions into a few outputs that weigh them differently."""

    def __init__(self, layer: nn.Module, c: int = 2) -> None:
        super().__init__()
        self.layer, self.c = layer, c

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.layer(x)).flatten(1)
        weights = torch.cos(torch.arange(y.shape[1] * self.c, dtype=y.dtype)).view(self.c, -1)
        return y @ weights.T


sizes = st.integers(1, 3)


@given(dims=st.integers(1, 3), n=st.integers(2, 3), data=st.data())
def test_convolutions(dims: int, n: int, data: st.DataObject) -> None:
    groups, i, o = data.draw(sizes), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    kernel = tuple(data.draw(st.lists(sizes, min_size=dims, max_size=dims)))
    stride = tuple(data.draw(st.lists(sizes, min_size=dims, max_size=dims)))
    dilation = tuple(data.draw(st.lists(st.integers(1, 2), min_size=dims, max_size=dims)))
    mode = data.draw(st.sampled_from(["zeros", "circular", "reflect", "replicate"]))
    padding = tuple(data.draw(st.integers(0, 2)) for _ in range(dims))
    shape = tuple(data.draw(st.integers(4, 6)) for _ in range(dims))
    assume(all(s + 2 * p >= d * (k - 1) + 1 for s, p, d, k in zip(shape, padding, dilation, kernel, strict=True)))
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dims - 1]
    layer = conv(
        groups * i, groups * o, kernel, stride, padding, dilation, groups, bias=data.draw(st.booleans()),
        padding_mode=mode,
    )  # fmt: skip
    agrees(Pool(layer), torch.randn(n, groups * i, *shape, dtype=F64))


@given(dims=st.integers(1, 3), n=st.integers(2, 3), data=st.data())
def test_transposed_convolutions(dims: int, n: int, data: st.DataObject) -> None:
    groups, i, o = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    draw = lambda low, high: tuple(data.draw(st.integers(low, high)) for _ in range(dims))  # noqa: E731
    kernel, stride, padding, dilation, shape = draw(1, 3), draw(1, 3), draw(0, 1), draw(1, 2), draw(2, 3)
    extra = tuple(data.draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    out = [
        (v - 1) * s - 2 * p + d * (k - 1) + e + 1
        for v, s, p, d, k, e in zip(shape, stride, padding, dilation, kernel, extra, strict=True)
    ]
    assume(min(out) > 0)
    conv = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][dims - 1]
    layer = conv(groups * i, groups * o, kernel, stride, padding, extra, groups, dilation=dilation)
    agrees(Pool(layer), torch.randn(n, groups * i, *shape, dtype=F64))


@settings(max_examples=15)
@given(leading=st.lists(sizes, max_size=3), i=st.integers(1, 5), o=st.integers(1, 5), n=st.integers(2, 4))
def test_linear_with_any_leading_dimensions(leading: list[int], i: int, o: int, n: int) -> None:
    agrees(Pool(nn.Linear(i, o), c=3), torch.randn(n, *leading, i, dtype=F64))


@settings(max_examples=15)
@given(n=st.integers(2, 4), t=st.integers(1, 6), rows=st.integers(1, 5), o=st.integers(1, 4), data=st.data())
def test_embeddings(n: int, t: int, rows: int, o: int, data: st.DataObject) -> None:
    padding = data.draw(st.none() | st.integers(0, rows - 1))
    agrees(Pool(nn.Embedding(rows, o, padding_idx=padding)), torch.randint(0, rows, (n, t)))


@given(kind=st.sampled_from(["layer", "group", "instance", "batch", "rms"]), n=st.integers(2, 4), data=st.data())
def test_norms(kind: str, n: int, data: st.DataObject) -> None:
    groups, per = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 2))
    c, size = groups * per, data.draw(st.integers(2, 4))
    layer = {
        "layer": nn.LayerNorm([c, size]),
        "group": nn.GroupNorm(groups, c),
        "instance": nn.InstanceNorm1d(c, affine=True),
        "batch": nn.BatchNorm1d(c),
        "rms": nn.RMSNorm([size]),
    }[kind]
    agrees(Pool(nn.Sequential(nn.Conv1d(c, c, 1), layer)), torch.randn(n, c, size, dtype=F64))


KINDS = {"trace": tg.trace_ntk, "full": tg.full_ntk, "cosine": lambda model: tg.cosine(tg.trace_ntk(model))}


@settings(max_examples=15)
@given(
    kind=st.sampled_from(list(KINDS)), n=st.integers(1, 9), m=st.integers(1, 9), rows=st.integers(1, 9),
    c=st.integers(1, 3),
)  # fmt: skip
def test_any_blocking_gives_the_same_matrix(kind: str, n: int, m: int, rows: int, c: int) -> None:
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(9, c)).double()
    x, y = torch.randn(n, 2, 4, dtype=F64), torch.randn(m, 2, 4, dtype=F64)
    kernel = KINDS[kind](model)
    for other in (None, y):
        whole = kernel(x, other)
        got = tg.compute(kernel, x, other, tile=rows, memory="100kB", progress=False).dense()
        torch.testing.assert_close(got, whole, rtol=1e-11, atol=1e-13)


@settings(max_examples=15)
@given(workspace=st.integers(1, 4096), method=st.sampled_from(["expand", "in place"]), trace=st.booleans())
def test_any_workspace_gives_the_same_tile(workspace: int, method: str, trace: bool) -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    x, y = torch.randn(4, 2, 3, 3, dtype=F64), torch.randn(3, 2, 3, 3, dtype=F64)
    kernel = (tg.trace_ntk if trace else tg.full_ntk)(model, method=method)
    a, b = kernel.prepare(x), kernel.prepare(y)
    torch.testing.assert_close(kernel.pair(a, b, workspace), kernel(x, y), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(kernel.pair(a, a, workspace), kernel(x), rtol=1e-11, atol=1e-13)
