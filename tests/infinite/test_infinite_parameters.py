"""Parameters as values: broadcast, rows taken several times, biases by themselves. Most cases are an adversary's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ask import Ask
from torch import Tensor, nn

import tangency as tg
from tangency.errors import UnsupportedModule

W = 32
torch.manual_seed(0)
VECTORS, SERIES = torch.randn(3, 3, dtype=torch.float64), torch.randn(2, 2, 3, dtype=torch.float64)
Forward = Callable[[Any, Tensor], Tensor]


def kernels(fn: Forward, x: Tensor, options: dict[str, Any], **more: Any) -> Tensor:
    torch.manual_seed(1)
    parts = {"a": nn.Linear(3, W), "o": nn.Linear(W, 1), "q": nn.Parameter(torch.randn(4, W))}
    return torch.stack(list(tg.infinite_ntk(Ask(fn, **(parts | more)), **options).both(x)))


BROADCAST: dict[str, Forward] = {
    "value first": lambda s, x: s.o((s.a(x)[:, None] + s.q).relu().mean(1)),
    "parameter first": lambda s, x: s.o((s.q + s.a(x).unsqueeze(1)).relu().mean(1)),
    "with a batch": lambda s, x: s.o((s.a(x)[:, None] + s.q[None]).relu().mean(1)),
    "channels first": lambda s, x: s.o((s.a(x)[:, :, None] + s.q.T).relu().mean(2)),
}


@pytest.mark.parametrize("name", BROADCAST)
@pytest.mark.parametrize("trainable", [None, "q"])
def test_a_value_is_repeated_along_a_parameter(name: str, trainable: str | None) -> None:
    options = {"w_var": 1.0, "b_var": 0.1, "trainable": trainable}
    spelt = kernels(lambda s, x: s.o((s.a(x)[:, None].expand(-1, 4, -1) + s.q).relu().mean(1)), VECTORS, options)
    torch.testing.assert_close(kernels(BROADCAST[name], VECTORS, options), spelt)


@pytest.mark.parametrize(("index", "share"), [([0, 1], 0.5), ([0, 0], 1.0), ([-1, 3], 1.0)])
def test_rows_that_are_taken_twice_are_one(index: list[int], share: float) -> None:
    """E (w·(q_i + q_j)/2)² over the read-out w and the parameter's part of its gradient: 1/2, or 1 for one row."""
    found = kernels(
        lambda s, x: s.o((s.a(x) + s.q[torch.tensor(index)]).mean(1)), SERIES, {"w_var": 1.0, "trainable": "q"}
    )
    torch.testing.assert_close(found[1], torch.full_like(found[1], share))
    alone = kernels(lambda s, x: s.o(s.a(x).mean(1)), SERIES, {"w_var": 1.0, "trainable": "q"})
    torch.testing.assert_close(found[0] - alone[0], torch.full_like(found[0], share))


def test_a_parameter_is_expanded_along_positions() -> None:
    options = {"w_var": 1.0, "b_var": 0.1}

    def joined(s: Any, x: Tensor, token: Tensor) -> Tensor:
        return s.o(torch.relu(torch.cat([token, s.a(x)], 1)).mean(1))

    by_index = kernels(lambda s, x: joined(s, x, s.q[None, torch.tensor([0, 0])].expand(2, -1, -1)), SERIES, options)
    expanded = kernels(lambda s, x: joined(s, x, s.q[0].expand(len(x), 2, -1)), SERIES, options)
    torch.testing.assert_close(expanded, by_index)


def test_joined_rows_that_are_taken_twice() -> None:
    def joined(s: Any, x: Tensor, rows: Tensor) -> Tensor:
        return s.o(torch.cat([rows.expand(len(x), -1, -1), s.a(x)], 1).mean(1))

    options = {"w_var": 1.0, "trainable": "q"}
    one = kernels(lambda s, x: joined(s, x, s.q[None, torch.tensor([2, 2])]), SERIES, options)
    two = kernels(lambda s, x: joined(s, x, s.q[None, torch.tensor([1, 2])]), SERIES, options)
    torch.testing.assert_close(one[1], 2 * two[1])


PICKS: dict[str, Forward] = {
    "index": lambda s, x: s.q[torch.tensor([3, 0])],
    "index_select": lambda s, x: s.q.index_select(0, torch.tensor([3, 0])),
    "gather": lambda s, x: torch.gather(s.q, 0, torch.tensor([[3], [0]]).expand(-1, W)),
    "flip": lambda s, x: s.q.flip(0)[:2],
}


@pytest.mark.parametrize("name", PICKS)
def test_entries_of_a_parameter_in_every_spelling(name: str) -> None:
    options = {"w_var": 1.0, "b_var": 0.1}
    plain = kernels(lambda s, x: s.o((s.a(x) + s.q[:2]).relu().mean(1)), SERIES, options)
    torch.testing.assert_close(
        kernels(lambda s, x: s.o((s.a(x) + PICKS[name](s, x)).relu().mean(1)), SERIES, options), plain
    )


@pytest.mark.parametrize("parametrization", ["ntk", "standard"])
def test_a_bias_that_is_added_by_itself_is_a_bias(parametrization: str) -> None:
    options = {"b_var": 0.5, "parametrization": parametrization}
    inside = kernels(lambda s, x: s.o(F.linear(x, s.a.weight, s.a.bias).relu()), VECTORS, options)
    added = kernels(lambda s, x: s.o((F.linear(x, s.a.weight) + s.a.bias).relu()), VECTORS, options)
    torch.testing.assert_close(inside, added)


def test_norms_of_each_head() -> None:
    """With infinitely many channels in each head its statistics are those of all."""

    def attended(s: Any, x: Tensor, each: bool) -> Tensor:
        q, k, v = s.p(s.a(x)).chunk(3, -1)
        q, k = (q, k) if each else (s.n(q), s.m(k))
        q, k, v = (h.view(len(x), 2, 4, 8).transpose(1, 2) for h in (q, k, v))
        q, k = (s.n(q), s.m(k)) if each else (q, k)
        return s.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).mean(1))

    options, qkv = {"b_var": 0.1, "samples": 256}, nn.Linear(W, 3 * W)
    whole = kernels(lambda s, x: attended(s, x, False), SERIES, options, p=qkv, n=nn.LayerNorm(W), m=nn.RMSNorm(W))
    heads = kernels(lambda s, x: attended(s, x, True), SERIES, options, p=qkv, n=nn.LayerNorm(8), m=nn.RMSNorm(8))
    torch.testing.assert_close(heads, whole)


def test_max_of_two_values_is_their_maximum() -> None:
    second = nn.Linear(3, W)
    options: dict[str, Any] = {"samples": 256}
    found = kernels(lambda s, x: s.o(torch.max(s.a(x), s.c(x))), VECTORS, options, c=second)
    torch.testing.assert_close(
        found, kernels(lambda s, x: s.o(torch.maximum(s.a(x), s.c(x))), VECTORS, options, c=second)
    )


class Rectified(torch.autograd.Function):
    """An honest one."""

    @staticmethod
    def forward(ctx: Any, u: Tensor) -> Tensor:
        ctx.save_for_backward(u)
        return u.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * (ctx.saved_tensors[0] > 0)


class Clipped(Rectified):
    """One whose backward is another for large values alone."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (u,) = ctx.saved_tensors
        return grads[0] * (u > 0) * (u < 60)


def test_autograd_functions_in_modules_that_fx_traces() -> None:
    plain = kernels(lambda s, x: s.o(s.a(x).relu()), VECTORS, {})
    torch.testing.assert_close(kernels(lambda s, x: s.o(Rectified.apply(s.a(x))), VECTORS, {}), plain)
    with pytest.raises(UnsupportedModule, match="without gradients"):
        kernels(lambda s, x: s.o(Clipped.apply(s.a(x))), VECTORS, {})


REFUSED: dict[str, tuple[Forward, str]] = {
    "a layer on a parameter": (lambda s, x: s.o(s.a(x) + s.b(s.q).mean(0)), "the parameter q itself.*join it"),
    "a mean of a parameter": (lambda s, x: s.o(s.a(x) + s.q.mean(0)), "the parameter q itself"),
    "one token at both ends": (
        lambda s, x: (lambda c: s.o(torch.cat([c, s.a(x)[:, None], c], 1)))(s.q[None, :1].expand(len(x), -1, -1)),
        "joins the parameter q in several places.*again",
    ),
    "rows repeated along positions": (
        lambda s, x: s.o(torch.cat([s.q.repeat(2, 1).expand(len(x), -1, -1), s.a(x)[:, None]], 1)),
        "repeats the parameter q",
    ),
    "numbers that are no noise": (lambda s, x: s.o(s.a(x) + s.even), "even.*mean 0.5.*zeros"),
    "a product with one norm in both factors": (
        lambda s, x: s.o(s.n(s.a(x)) * s.n(s.b(s.a(x).relu()))), "one norm's trained scale",
    ),
    "a maximum with one norm in both": (
        lambda s, x: s.o(torch.maximum(s.n(s.a(x)), s.n(s.b(s.a(x).relu())))), "joint law is not known",
    ),
    "one norm of queries and keys": (
        lambda s, x: s.o(F.scaled_dot_product_attention(s.n(s.a(x[:, None])), s.n(s.c(x[:, None])), s.d(x[:, None]))),
        "normed by one trained scale.*norm of its own",
    ),
    "a minimum over positions": (lambda s, x: s.o(torch.min(s.a(x)[:, None], 1)[0]), "amax"),
    "channels in two orders": (
        lambda s, x: s.o((s.a(x)[:, None] + torch.cat([s.q[:1], s.q[:1].flip(1)])).mean(1)), "parameter q",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    forward, message = REFUSED[name]
    with pytest.raises(UnsupportedModule, match=message):
        layers = {"b": nn.Linear(W, W), "c": nn.Linear(3, W), "d": nn.Linear(3, W), "n": nn.RMSNorm(W)}
        kernels(forward, VECTORS, {}, even=nn.Parameter(torch.full((W,), 0.5)), **layers)
