"""Gradients of a matrix that looks rows up and multiplies: their products without forming any."""

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.engine.blocks import DenseBlock, MixedBlock, OuterBlock
from tangency.engine.contraction import TileSum
from tangency.engine.rules import EmbeddingRule, LinearRule
from tangency.engine.tied import tied

F64 = torch.float64
ROWS, WIDTH = 11, 4


def block(
    n: int, c: int, t: int, s: int, seed: int, padding: int | None = None, dtype: torch.dtype = F64
) -> MixedBlock:
    """t positions looked up and s multiplied, of which the second is of a module of its own."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=F64, generator=g).to(dtype)

    index = torch.randint(ROWS, (n, t), generator=g)
    parts = [
        EmbeddingRule(ROWS, padding).weight(index, draw(n, c, t, WIDTH)),
        LinearRule().weight(draw(n, s, WIDTH), draw(n, c, s, ROWS)),
    ]
    return MixedBlock(tuple(parts))


def tile(x: MixedBlock, y: MixedBlock, trace: bool, workspace: int | None = None) -> Tensor:
    total = TileSum(x, y, trace=trace, differentiable=False, workspace=workspace)
    total.add(x, y)
    return total.result()


def by_gradients(x: MixedBlock, y: MixedBlock, trace: bool) -> Tensor:
    return torch.einsum("icp,jcp->ij" if trace else "icp,jdp->icjd", x.expand(), y.expand())


@pytest.mark.parametrize("trace", [True, False])
@pytest.mark.parametrize(("c", "t", "s"), [(1, 1, 1), (3, 5, 2), (2, 2, 7)])
def test_products_are_those_of_the_gradients(
    trace: bool, c: int, t: int, s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Symmetric, two sides with other numbers of positions, padding, a workspace for one sample at a time."""
    monkeypatch.setattr(TileSum, "_by_samples", lambda *_: pytest.fail("a gradient was formed"))
    for padding in (None, 3):
        x, y = block(6, c, t, s, 0, padding), block(5, c, t + 1, s, 1, padding)
        for workspace in (None, 1):
            torch.testing.assert_close(tile(x, y, trace, workspace), by_gradients(x, y, trace))
            square = tile(x, x, trace, workspace)
            torch.testing.assert_close(square, by_gradients(x, x, trace))
            flat = square if trace else square.reshape(6 * c, 6 * c)
            assert torch.equal(flat, flat.T)


def test_what_is_tied() -> None:
    x = block(3, 2, 2, 2, 0)
    looked_up, multiplied = x.blocks
    assert tied(x) is not None
    assert tied(MixedBlock((multiplied, looked_up))) == tied(x)
    other = LinearRule().weight(torch.ones(3, 2, WIDTH), torch.ones(3, 2, 2, ROWS + 1))
    turned = LinearRule(transposed=True).weight(torch.ones(3, 2, ROWS), torch.ones(3, 2, 2, WIDTH))
    dense = DenseBlock(torch.ones(3, 2, ROWS * WIDTH))
    for parts in ((looked_up, other), (looked_up, turned), (looked_up, dense), (looked_up, looked_up), (looked_up,)):
        assert tied(MixedBlock(tuple(parts))) is None
    assert isinstance(looked_up, OuterBlock)
    assert tied(looked_up) is None


class Language(nn.Module):
    """Words in, the loss of the next word out, by the same matrix."""

    def __init__(self, outputs: bool) -> None:
        super().__init__()
        self.words, self.mix, self.outputs = nn.Embedding(13, 6, padding_idx=0), nn.Linear(6, 6), outputs

    def forward(self, ids: Tensor) -> Tensor:
        logits = nn.functional.linear(torch.tanh(self.mix(self.words(ids))).cumsum(1), self.words.weight)
        if self.outputs:
            return logits[:, -1, :3]
        lost = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return lost.mean(1, keepdim=True)


@pytest.mark.parametrize("outputs", [True, False])
def test_networks_with_tied_embeddings(outputs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against plain autograd; in 16 bits to their precision; the products that form gradients are not used."""
    monkeypatch.setattr(TileSum, "_by_samples", lambda *_: pytest.fail("a gradient was formed"))
    torch.manual_seed(0)
    model = Language(outputs).double()
    x, y = torch.randint(13, (7, 5)), torch.randint(13, (4, 5))

    def gradients(ids: Tensor) -> Tensor:
        rows = []
        for sample in ids:
            out = model(sample[None])[0]
            parts = [torch.autograd.grad(v, list(model.parameters()), retain_graph=True) for v in out]
            rows.append(torch.stack([torch.cat([g.flatten() for g in of]) for of in parts]))
        return torch.stack(rows)

    full = torch.einsum("icp,jdp->icjd", gradients(x), gradients(y))
    torch.testing.assert_close(tg.full_ntk(model)(x, y), full)
    trace = full.diagonal(dim1=1, dim2=3).sum(-1)
    torch.testing.assert_close(tg.trace_ntk(model)(x, y), trace)
    in_half = tg.trace_ntk(model.float(), dtype="float16")(x, y)
    torch.testing.assert_close(in_half.double(), trace, rtol=5e-3, atol=5e-3 * float(trace.abs().max()))
