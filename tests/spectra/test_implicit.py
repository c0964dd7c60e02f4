"""Many vectors in one pass over the samples: the same products as one by one, and how many passes that takes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.engine.network import Network
from tangency.spectra import implicit

F64 = torch.float64
S = tg.spectra


def conv() -> tuple[nn.Module, Tensor]:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.PReLU(4), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 4))
    return body.double().eval(), torch.randn(10, 1, 8, 8, dtype=F64)


def dense() -> tuple[nn.Module, Tensor]:
    return tg.models.mlp([5, 8, 4]).double(), torch.randn(10, 5, dtype=F64)


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples went through the network in each forward pass."""
    found, real = [], Network.__call__

    def counted(self: Network, state: Any, x: Any, *more: Any) -> Tensor:
        found.append(len(x))
        return real(self, state, x, *more)

    monkeypatch.setattr(Network, "__call__", counted)
    return found


@pytest.mark.parametrize("head", [tg.full_ntk, tg.trace_ntk, tg.pseudo_ntk])
@pytest.mark.parametrize("net", [conv, dense])
@pytest.mark.every(4)
def test_together_as_one_by_one(net: Any, head: Any) -> None:
    """With as many vectors as channels or samples, too, where wrong batching rules have been seen to hide."""
    torch.manual_seed(0)
    model, x = net()
    many, alone = S.jacobian_gram(head(model), x, batch=4), S.jacobian_gram(head(model), x, batch=4, memory=1)
    assert alone.chunk == 1
    rows = many.shape[: len(many.shape) // 2].numel()
    for count in (1, 4, 10):
        v = torch.randn(rows, count, dtype=F64)
        torch.testing.assert_close(many @ v, alone @ v, rtol=1e-12, atol=1e-12 * float((alone @ v).abs().max()))
    assert any(many.together.values())
    assert not alone.together


@pytest.mark.parametrize("head", [tg.full_ntk, tg.trace_ntk])
def test_passes_are_shared(head: Any, forwards: list[int]) -> None:
    """A product with 16 vectors: one pass back and one forth a batch, and checks once; before, 2 · 16 · c · batches."""
    torch.manual_seed(0)
    model, x = dense()
    gram = S.jacobian_gram(head(model), x, batch=5)
    v = torch.randn(gram.shape[: len(gram.shape) // 2].numel(), 16, dtype=F64)
    first = gram @ v
    forwards.clear()
    assert torch.equal(gram @ v, first)
    assert len(forwards) == 2 * 2  # both ways, of two batches
    before = 2 * 2 * 16 * (4 if head is tg.trace_ntk else 1)
    assert 16 * len(forwards) <= before


def test_a_budget_bounds_how_many_go_together(forwards: list[int]) -> None:
    torch.manual_seed(0)
    model, x = dense()
    whole = S.jacobian_gram(tg.full_ntk(model), x)
    v = torch.randn(40, 12, dtype=F64)
    vector = 4 * 8 * sum(p.numel() for p in model.parameters())
    part = S.jacobian_gram(tg.full_ntk(model), x, memory=12 * vector)
    assert 1 <= part.chunk < 12
    torch.testing.assert_close(part @ v, whole @ v, rtol=1e-12, atol=1e-10)
    forwards.clear()
    assert len(part @ v) == 40
    assert len(forwards) == 2 * -(-12 // part.chunk)


def test_a_wrong_batching_rule_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own have been, silently: then the vectors go one by one."""
    torch.manual_seed(0)
    model, x = dense()
    gram, v = S.jacobian_gram(tg.full_ntk(model), x), torch.randn(40, 3, dtype=F64)
    want = S.jacobian_gram(tg.full_ntk(model), x, memory=1) @ v
    real = implicit._vmapped

    def wrong(one: Any, vectors: Any) -> Any:
        found = real(one, vectors)
        return {k: g.roll(1, 0) if k.endswith("bias") else g for k, g in found.items()}

    monkeypatch.setattr(implicit, "_vmapped", wrong)
    torch.testing.assert_close(gram @ v, want, rtol=1e-12, atol=1e-10)
    assert gram.together["pull", 0, 3] is False
    assert gram.together["push", 0, 3] is True


def test_what_cannot_be_batched_goes_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = dense()
    v = torch.randn(40, 3, dtype=F64)
    want = S.jacobian_gram(tg.full_ntk(model), x) @ v

    def refused(*args: Any, **options: Any) -> Any:
        raise RuntimeError("vmap: no batching rule")

    monkeypatch.setattr(implicit, "vmap", lambda f: refused)
    gram = S.jacobian_gram(tg.full_ntk(model), x)
    torch.testing.assert_close(gram @ v, want, rtol=1e-12, atol=1e-10)
    assert set(gram.together.values()) == {False}


def test_where_memory_runs_out_fewer_go_together(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = dense()
    gram, v = S.jacobian_gram(tg.full_ntk(model), x), torch.randn(40, 8, dtype=F64)
    want, real, asked = gram @ v, implicit.vmap, []

    def small(f: Any) -> Any:
        def run(vectors: Any) -> Any:
            asked.append(len(next(iter(vectors.values()))))
            if asked[-1] > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return real(f)(vectors)

        return run

    monkeypatch.setattr(implicit, "vmap", small)
    torch.testing.assert_close(gram @ v, want, rtol=1e-12, atol=1e-10)
    assert asked[:3] == [8, 4, 2]
    with pytest.raises(tg.InputError, match="memory=0"):
        S.jacobian_gram(tg.full_ntk(model), x, memory=0)
