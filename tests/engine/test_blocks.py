"""What a block says of its factors, once and for all, is true of the factors it forms."""

from collections.abc import Iterator

import pytest
import torch
from zoo import ZOO, Case, build

import tangency as tg
from tangency.engine import blocks

pytestmark = pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning", "ignore:.*batching rule.*:UserWarning")
CASES = [pytest.param(case, id=case.name) for case in ZOO[::3]]


def factored(block: blocks.GradientBlock) -> Iterator[blocks.OuterBlock]:
    for part in blocks.summands(block):
        if isinstance(part, blocks.OuterBlock):
            yield part


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(3)
def test_sizes_are_those_of_the_factors(case: Case) -> None:
    model, x = build(case, 3)
    captured = tg.trace_ntk(model, method="in place").prepare(x)
    for whole in (block for b in captured.values() for block in factored(b)):
        for block in (whole, whole.rows(slice(1, 3)), blocks.with_dtype(whole, torch.float32)):
            assert isinstance(block, blocks.OuterBlock)
            t, g, i, o = block.sizes()
            a, d = block.a(), block.d()
            assert d.shape == (block.n, block.c, t, g, o)
            assert a.shape == ((block.n, t) if block.indexed else (block.n, t, g, i))
            assert all(use.lift.form(use.x, use.d) == use.form for use in block.uses)


@pytest.mark.parametrize("case", CASES[::4])
@pytest.mark.every(3)
def test_micro_batches_put_together_say_the_same(case: Case) -> None:
    model, x = build(case, 4)
    kernel = tg.trace_ntk(model, method="in place")
    at_once, in_parts = kernel.prepare(x), kernel.prepare(x, 1)
    assert at_once.keys() == in_parts.keys()
    for name, block in at_once.items():
        first, second = list(factored(block)), list(factored(in_parts[name]))
        assert [b.sizes() for b in first] == [b.sizes() for b in second]
        assert [b.kind for b in first] == [b.kind for b in second]
        torch.testing.assert_close(block.expand(), in_parts[name].expand())
