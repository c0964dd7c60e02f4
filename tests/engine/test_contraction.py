"""Half of a symmetric tile is computed, in whatever pieces; gradients are formed in one place after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tangency.engine.blocks import DenseBlock, GradientBlock, OuterBlock, Use, formed, gradient, summands
from tangency.engine.contraction import TileSum, add_to_each
from tangency.engine.expansion import expanded
from tangency.engine.micro_batches import put, put_formed
from tangency.engine.rules import GroupedRule, LinearRule

WHOLE = 1 << 28


def linear(n: int, t: int, i: int, o: int, c: int = 2, seed: int = 0) -> OuterBlock:
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(n, t, i, generator=draw, dtype=torch.float64)
    d = torch.randn(n, c, t, o, generator=draw, dtype=torch.float64)
    return OuterBlock((Use(LinearRule(), x, d, LinearRule().form(x, d)),))


def grouped(n: int, t: int, g: int, i: int, o: int) -> OuterBlock:
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(n, t, g, i, generator=draw, dtype=torch.float64)
    d = torch.randn(n, 2, t, g, o, generator=draw, dtype=torch.float64)
    return OuterBlock((Use(GroupedRule(), x, d, GroupedRule().form(x, d)),))


def by_hand(x: OuterBlock) -> Tensor:
    """G[n, c, g, o, i] from what the use holds, as the definition has it."""
    a, d = x.uses[0].x, x.uses[0].d
    if a.dim() == 3:  # one group
        a, d = a[:, :, None], d[:, :, :, None]
    return torch.einsum("nctgo,ntgi->ncgoi", d, a)


def tile(x: GradientBlock, y: GradientBlock, trace: bool, method: str | None, workspace: int) -> Tensor:
    total = TileSum(x, y, trace=trace, differentiable=False, workspace=workspace)
    total.add(x, y, method)
    return total.result()


class Products(TorchDispatchMode):
    """Counts the multiply–adds of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("mm", "addmm", "addmm_"):
            left, right = args[-2:]
            self.count += left.shape[0] * left.shape[1] * right.shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("n", [1, 7, 48, 49, 130])
@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(
    ("method", "workspace"), [("expand", WHOLE), ("in place", WHOLE), ("in place", 4000), ("expand", 4000)]
)
def test_a_symmetric_tile_is_the_product_and_exactly_symmetric(
    n: int, trace: bool, method: str, workspace: int
) -> None:
    x = linear(n, 3, 5, 4)
    g = by_hand(x).flatten(2)
    k = tile(x, x, trace, method, workspace)
    expected = torch.einsum("ncp,mcp->nm", g, g) if trace else torch.einsum("ncp,mdp->ncmd", g, g)
    torch.testing.assert_close(k, expected, rtol=1e-12, atol=1e-10)
    square = k if trace else k.reshape(2 * n, 2 * n)
    assert torch.equal(square, square.T)


@pytest.mark.parametrize("trace", [True, False])
def test_parts_in_strips_of_their_own_add_up(trace: bool) -> None:
    """A tile of many parameters: some in place with strips of few samples, some products with wide ones."""
    n = 70
    first, second, third = linear(n, 9, 3, 2), linear(n, 1, 4, 3, seed=1), grouped(n, 2, 3, 2, 2)
    dense = DenseBlock(torch.randn(n, 2, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2)))
    total = TileSum(first, first, trace=trace, differentiable=False)
    for block, method in ((first, "in place"), (second, None), (third, "expand"), (dense, None), (third, "in place")):
        total.add(block, block, method)
    g = torch.cat([*(by_hand(b).flatten(2) for b in (first, second, third, third)), dense.g], 2)
    expected = torch.einsum("ncp,mcp->nm", g, g) if trace else torch.einsum("ncp,mdp->ncmd", g, g)
    torch.testing.assert_close(total.result(), expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("method", ["expand", "in place"])
def test_half_of_a_symmetric_tile_is_left_out(method: str) -> None:
    """The multiply–adds of a tile with itself, beside those of the same tile of two different sides."""
    x, y = linear(200, 16, 4, 4), linear(200, 16, 4, 4)
    counts = []
    for other in (x, y):
        with Products() as products:
            tile(x, other, True, method, WHOLE)
        counts.append(products.count)
    assert 0.5 < counts[0] / counts[1] < 0.63


def test_slices_of_gradients_take_each_others_place() -> None:
    x = linear(4, 3, 8, 40, c=3)
    slices, places = [], set()
    for _, left, right in expanded([x], x, trace=True, differentiable=False, workspace=4 * 8 * 8 * 20):
        assert isinstance(left, Tensor)
        assert left is right
        places.add(left.data_ptr())
        slices.append(left.clone())
    assert len(slices) > 2
    assert len(places) == 1
    squares = sum(float(s.square().sum()) for s in slices)
    assert squares == pytest.approx(float(by_hand(x).square().sum()))


@pytest.mark.parametrize("x", [linear(5, 3, 4, 2), grouped(5, 3, 2, 4, 2)], ids=["linear", "grouped"])
@pytest.mark.parametrize("workspace", [WHOLE, 200])
def test_both_sides_of_a_tile_keep_their_own_slices(x: OuterBlock, workspace: int) -> None:
    y = x.rows(slice(1, 4))
    g = by_hand(x).flatten(2)
    expected = torch.einsum("ncp,mcp->nm", g, g[1:4])
    torch.testing.assert_close(tile(x, y, True, "expand", workspace), expected, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize("workspace", [WHOLE, 800])
@pytest.mark.parametrize("groups", [1, 2])
def test_blocks_that_take_each_others_place_leave_the_column_alone(trace: bool, workspace: int, groups: int) -> None:
    """Several blocks with one: of growing sizes, so that the place has to grow."""
    whole = linear(12, 3, 4, 70) if groups == 1 else grouped(12, 3, 2, 4, 70)
    g, spans = by_hand(whole).flatten(2), (slice(0, 2), slice(2, 7), slice(7, 9))
    y, xs = whole.rows(slice(9, 12)), [whole.rows(span) for span in spans]
    sums = [TileSum(x, y, trace=trace, differentiable=False, workspace=workspace) for x in xs]
    add_to_each(sums, xs, y, "expand")
    for one, span in zip(sums, spans, strict=True):
        expected = torch.einsum("ncp,mcp->nm" if trace else "ncp,mdp->ncmd", g[span], g[9:])
        torch.testing.assert_close(one.result(), expected, rtol=1e-12, atol=1e-10)


def test_blocks_share_one_place_and_the_column_has_its_own() -> None:
    whole = linear(9, 3, 8, 40, c=3)
    y, xs = whole.rows(slice(6, 9)), [whole.rows(slice(k, k + 3)) for k in (0, 3)]
    rows, columns, seen = set(), set(), []
    for k, left, right in expanded(xs, y, trace=True, differentiable=False, workspace=4 * 8 * 8 * 20):
        assert isinstance(left, Tensor)
        assert isinstance(right, Tensor)
        rows.add(left.data_ptr())
        columns.add(right.data_ptr())
        seen.append(k)
    assert len(seen) > 4
    assert seen == [0, 1] * (len(seen) // 2)
    assert len(rows) == len(columns) == 1
    assert rows != columns


def test_gradients_are_formed_where_they_are_wanted() -> None:
    x = linear(3, 4, 5, 6)
    a, d = x.a().transpose(1, 2), x.d()
    room = torch.full((3, 2 * 6 * 5), float("nan"), dtype=torch.float64)
    made = gradient(a, d, room)
    assert made.data_ptr() == room.data_ptr()
    assert torch.equal(room.view(3, 2, -1), gradient(a, d))


def test_rows_that_no_micro_batch_brings_are_zero() -> None:
    """Also where the memory was used before."""
    used = torch.full((20, 2, 3, 6), 7.0, dtype=torch.float64)
    del used
    x = linear(4, 3, 5, 6)
    whole = put(None, x, 8, 20)
    assert isinstance(whole, OuterBlock)
    for v, part in zip(whole.tensors(), x.tensors(), strict=True):
        assert torch.equal(v[8:12], part)
        assert not v[:8].any()
        assert not v[12:].any()
        assert v.dtype == part.dtype


@pytest.mark.parametrize("kind", ["linear", "transposed", "grouped", "16 bits"])
def test_gradients_of_micro_batches_are_formed_in_their_place(kind: str) -> None:
    """Of every kind of factors, also where the model took another way for the second micro-batch."""
    x = grouped(7, 9, 2, 3, 2) if kind == "grouped" else linear(7, 9, 3, 4)
    use = x.uses[0]
    if kind == "transposed":
        rule = LinearRule(transposed=True)
        x = OuterBlock((Use(rule, use.x, use.d, rule.form(use.x, use.d)),))
    if kind == "16 bits":
        scale = torch.arange(1.0, 8.0)
        x = OuterBlock((Use(use.lift, use.x.half(), use.d.half(), use.form),), scale=scale)
    whole: GradientBlock | None = None
    for start, stop in ((0, 4), (4, 7)):
        before = None if whole is None else whole.tensors()[0].data_ptr()
        whole = put_formed(whole, x.rows(slice(start, stop)), start, 8)
        assert isinstance(whole, DenseBlock)
        assert before in (None, whole.g.data_ptr())
    assert isinstance(whole, DenseBlock)
    torch.testing.assert_close(whole.expand()[:7], formed(x).expand())
    assert not whole.g[7:].any()
    other = put_formed(put(None, DenseBlock(torch.ones(4, 2, 3).half()), 0, 7), linear(3, 9, 3, 4), 4, 7)
    assert [b.n for b in summands(other)] == [7, 7]
