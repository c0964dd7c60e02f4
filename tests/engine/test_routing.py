"""Models in which data decide the way: which row belongs to which sample is measured, never inferred from a count."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import jacobians_loop, trace
from torch import Tensor, nn
from zoo import Net, parameter

import tangency as tg

F64 = torch.float64
pytestmark = pytest.mark.filterwarnings("error::tangency.PerformanceWarning")


def agrees(model: nn.Module, *batches: Tensor) -> None:
    model = model.double().eval()
    kernel = tg.trace_ntk(model)
    for x in batches:
        j = jacobians_loop(model, x)
        torch.testing.assert_close(kernel(x), trace(j, j), rtol=1e-9, atol=1e-10)
        torch.testing.assert_close(
            tg.compute(kernel, x, tile=3, progress=False).dense(), trace(j, j), rtol=1e-9, atol=1e-10
        )


class Experts(nn.Module):
    """Every token goes to its best k of e experts."""

    def __init__(self, e: int = 4, k: int = 2) -> None:
        super().__init__()
        self.router, self.head, self.k = nn.Linear(4, e), nn.Linear(4, 3), k
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(e))

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, 4)
        value, index = self.router(h).softmax(-1).topk(self.k, -1)
        out = torch.zeros_like(h)
        for e, expert in enumerate(self.experts):
            row, column = torch.where(index == e)
            if len(row):
                out.index_add_(0, row, expert(h[row]) * value[row, column, None])
        return self.head((h + out).reshape(x.shape)).reshape(len(x), -1)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("tokens", [(), (3,)])
@pytest.mark.every(3)
def test_mixtures_of_experts(seed: int, tokens: tuple[int, ...]) -> None:
    torch.manual_seed(seed)
    agrees(Experts(k=1 + seed % 2), torch.randn(6, *tokens, 4, dtype=F64), torch.randn(3, *tokens, 4, dtype=F64))


def test_an_expert_with_as_many_rows_as_samples() -> None:
    """One sample has two rows at an expert and another one none: the count is that of a layer that everybody passes."""

    def forward(m: Any, x: Tensor) -> Tensor:
        h = x.reshape(-1, 2)
        mine = (h[:, 0] > 0).nonzero()[:, 0]
        y = torch.zeros(len(h), 3, dtype=x.dtype).index_add(0, mine, m.expert(h[mine]).tanh())
        return m.head(y.reshape(len(x), 2, 3)).flatten(1)

    torch.manual_seed(0)
    first = torch.tensor([[1.0, 2, -1, 3], [2, -1, -2, 1]], dtype=F64)  # one row each: what the probe sees
    skewed = torch.tensor([[1.0, 2, 3, 1], [-2, 1, -1, 1], [1, 0.5, -1, 2]], dtype=F64)  # 2 + 0 + 1
    agrees(Net(forward, expert=nn.Linear(2, 3), head=nn.Linear(3, 2)), first, skewed, skewed.flip(0))


def test_sorted_batches() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return m.head(m.first(x[order]).tanh()[order.argsort()])

    torch.manual_seed(0)
    agrees(
        Net(forward, first=nn.Linear(4, 5), head=nn.Linear(5, 2)),
        torch.randn(7, 4, dtype=F64).sort(0)[0],
        torch.randn(7, 4, dtype=F64),
    )


def test_capacity_buffers() -> None:
    """Tokens are dispatched into [experts, capacity, width] by a one-hot product, and weights are three-dimensional."""

    def forward(m: Any, x: Tensor) -> Tensor:
        gate = m.router(x).softmax(-1)
        expert = gate.argmax(-1)
        hot = F.one_hot(expert, 3).to(x.dtype)
        slot = F.one_hot(((hot.cumsum(0) - 1) * hot).sum(1).long(), len(x)).to(x.dtype)
        dispatch = torch.einsum("ne,nc->nec", hot, slot)
        inside = torch.einsum("nec,nd->ecd", dispatch, x)
        y = torch.einsum("nec,eco->no", dispatch, torch.bmm(inside, m.w).tanh())
        return y * gate.amax(-1, keepdim=True)

    torch.manual_seed(0)
    agrees(Net(forward, router=nn.Linear(4, 3), w=parameter(3, 4, 2)), torch.randn(6, 4, dtype=F64))


def test_loops_over_samples() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        rows = []
        for row in torch.tanh(m.first(x)).split(1):
            if float(row[0, 0].detach()) > 0:
                row = m.rare(row)
            for _ in range(1 + int(row[0, 1] > 0)):
                row = torch.tanh(m.loop(row))
            rows.append(row)
        return torch.cat(rows)

    torch.manual_seed(0)
    model = Net(forward, first=nn.Linear(4, 3), rare=nn.Linear(3, 3), loop=nn.Linear(3, 3))
    agrees(model, torch.randn(6, 4, dtype=F64), torch.randn(2, 4, dtype=F64))
    agrees(
        Net(lambda m, x: torch.stack([m.b(m.a(r).tanh()) for r in x]), a=nn.Linear(4, 3), b=nn.Linear(3, 2)),
        torch.randn(5, 4, dtype=F64),
    )


def test_a_use_that_the_probe_had_not_seen() -> None:
    """The first batch shows one way only, the next all of them; new parameters are compared with autograd there."""

    def forward(m: Any, x: Tensor) -> Tensor:
        high = x[:, 0] > 0
        h = x.new_zeros(len(x), 4)
        if high.any():
            h = h.index_put((high.nonzero()[:, 0],), torch.tanh(m.high(x[high])) * torch.exp(m.power))
        if not high.all():
            h = h.index_put(((~high).nonzero()[:, 0],), torch.tanh(m.low(x[~high])))
        return m.last(h)

    torch.manual_seed(0)
    model = Net(forward, low=nn.Linear(4, 4), high=nn.Linear(4, 4), last=nn.Linear(4, 2), power=parameter(4))
    x = torch.randn(9, 4, dtype=F64)
    agrees(model, x[x[:, 0] < 0], x, x[x[:, 0] > 0])


def test_samples_that_compete_for_an_expert_are_refused() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        order = m.router(x)[:, 0].argsort(descending=True)
        taken = order[: max(1, len(x) // 2)]  # the capacity
        return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, taken, m.expert(x[taken])) + m.out(x)

    torch.manual_seed(0)
    model = Net(forward, router=nn.Linear(4, 1), expert=nn.Linear(4, 3), out=nn.Linear(4, 3)).double()
    with pytest.raises(tg.ModelError, match="depends on the other samples of the batch"):
        tg.trace_ntk(model)(torch.randn(6, 4, dtype=F64))


def test_rows_that_belong_to_several_samples_go_to_the_fallback() -> None:
    """A value that two samples share (the mean of the batch, subtracted again) has no owner."""

    def forward(m: Any, x: Tensor) -> Tensor:
        if bool((x[:, 0] > 1e9).any()):  # data decide
            return x
        together = m.a(x.flatten()[None])  # one row for the whole batch
        return m.b(x) + together - together.detach() * 1

    torch.manual_seed(0)
    x = torch.randn(2, 4, dtype=F64)
    model = Net(forward, a=nn.Linear(8, 3), b=nn.Linear(4, 3)).double()
    with pytest.raises((tg.ModelError, RuntimeError)):
        tg.trace_ntk(model)(x)
