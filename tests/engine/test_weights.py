"""Values computed from parameters alone: rules work on them, and the result is pulled back to the parameters."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import jacobians_loop, parts, trace
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from zoo import Net, parameter

import tangency as tg

F64 = torch.float64
# ruff: noqa: E501
pytestmark = pytest.mark.filterwarnings("error::tangency.PerformanceWarning")


def check(model: nn.Module, x: Any, tolerance: float = 1e-10) -> None:
    """All by rules, equal to plain autograd as a whole and by parameter."""
    model = model.double().eval()
    kernel = tg.trace_ntk(model)
    got = kernel(x)
    j = jacobians_loop(model, x)
    want = trace(j, j)
    scale = float(want.norm())
    assert float((got - want).norm()) < tolerance * scale
    found = kernel.parts(x)
    for name, part in parts(j, j).items():
        assert float((found[name] - torch.einsum("ncmc->nm", part)).norm()) < tolerance * scale, name
    assert float((kernel.diag(x) - want.diagonal()).norm()) < tolerance * scale
    matrix = kernel.features(x)
    flat = torch.cat([v.reshape(len(want), v.shape[1], -1) for v in j.values()], 2)
    torch.testing.assert_close(matrix, flat.flatten(1), rtol=1e-8, atol=1e-10)  # in the parameters' own order


def rows(n: int = 5, *shape: int) -> Tensor:
    return torch.randn(n, *(shape or (4,)), dtype=F64, generator=torch.Generator().manual_seed(1))


CASES: dict[str, Callable[[], nn.Module]] = {
    "transposed": lambda: Net(lambda m, x: F.linear((x @ m.w.t()).tanh(), m.w.T), w=parameter(3, 4)),
    "slices apart": lambda: Net(lambda m, x: F.linear(F.linear(x, m.w[:4]).tanh(), m.w[4:]), w=parameter(6, 4)),
    "slices that overlap": lambda: Net(lambda m, x: F.linear(x, m.w[:4]) * F.linear(x, m.w[2:6]), w=parameter(6, 4)),
    "columns": lambda: Net(lambda m, x: F.linear(x[:, :2], m.w[:, 1:3]) + F.linear(x, m.w), w=parameter(3, 4)),
    "chunks": lambda: Net(lambda m, x: sum(F.linear(x, w).tanh() for w in m.w.chunk(3)), w=parameter(6, 4)),
    "flat": lambda: Net(lambda m, x: F.linear(x, m.v[:12].view(3, 4), m.v[12:]), v=parameter(15)),
    "one plus": lambda: Net(lambda m, x: m.f(F.layer_norm(x, (4,)) * (1 + m.w)), w=parameter(4), f=nn.Linear(4, 2)),
    "exp, clamp": lambda: Net(lambda m, x: x * m.a.exp() + m.b.clamp(-0.2, 0.2), a=parameter(4), b=parameter(4)),
    "scalar": lambda: Net(lambda m, x: m.f(x).tanh() * m.t.exp() / m.s, f=nn.Linear(4, 3), t=parameter(), s=parameter(1)),
    "scaled": lambda: Net(lambda m, x: F.linear(x, 0.5 * m.w / 3).tanh() @ (m.w.double() * 2), w=parameter(3, 4)),
    "low rank": lambda: Net(lambda m, x: F.linear(x, m.b @ m.a), a=parameter(2, 4), b=parameter(3, 2)),
    "cat": lambda: Net(lambda m, x: m.f(x) + torch.cat([m.q, torch.zeros(1), m.v]), f=nn.Linear(4, 3), q=parameter(1), v=parameter(1)),
    "hypernetwork": lambda: Net(lambda m, x: F.linear(x, m.h(m.z).view(3, 4)), h=nn.Linear(5, 12), z=parameter(5)),
    "in place on a copy": lambda: Net(zeroed, w=parameter(6), f=nn.Linear(4, 6)),
    "table by constants": lambda: Net(lambda m, x: x + m.t[torch.tensor([2, 0, 2, 5])], t=parameter(6)),
    "table by data": lambda: Net(lambda m, x: m.t[(x.abs() * 2).long().clamp(max=5) - 6].sum((1, 3)), t=parameter(6, 2, 3)),
    "class token": lambda: Net(lambda m, x: m.f(torch.cat([m.c.expand(len(x), -1), x], 1)), c=parameter(1, 2), f=nn.Linear(6, 3)),
    "token by shape": lambda: Net(lambda m, x: m.f(torch.cat([m.c.expand_as(x), x], 1)), c=parameter(4), f=nn.Linear(8, 3)),
    "tokens repeated": lambda: Net(lambda m, x: m.f(torch.cat([m.c.repeat(len(x), 1), x], 1).tanh()), c=parameter(1, 2), f=nn.Linear(6, 3)),
    "where, minimum": lambda: Net(lambda m, x: torch.where(x > 0, m.a, x) - torch.minimum(x, m.b) ** 2, a=parameter(4), b=parameter(4)),
    "lerp, power": lambda: Net(lambda m, x: torch.lerp(x, m.a, 0.3) + (x.abs() + 1) ** m.b, a=parameter(4), b=parameter(4)),
    "einsum": lambda: Net(lambda m, x: torch.einsum("ni,iho->nho", x, m.w), w=parameter(4, 2, 3)),
    "einsum with groups": lambda: Net(lambda m, x: torch.einsum("ngi,gio->nog", x.view(-1, 2, 2), m.w), w=parameter(2, 2, 3)),
    "einsum of three": lambda: Net(lambda m, x: torch.einsum("ni,nj,ijo->no", x, x.tanh(), m.w), w=parameter(4, 4, 2)),
    "einsum without a result": lambda: Net(lambda m, x: torch.einsum("ni,io", x, m.w), w=parameter(4, 3)),
    "einsum with dots, without a result": lambda: Net(lambda m, x: torch.einsum("...i,oi", x, m.w), w=parameter(3, 4)),
    "einsum with dots": lambda: Net(lambda m, x: torch.einsum("...i,oi->...o", x, m.w), w=parameter(3, 4)),
    "experts": lambda: Net(lambda m, x: torch.bmm(x.expand(3, -1, -1), m.w).sum(0), w=parameter(3, 4, 2)),
    "weight first": lambda: Net(lambda m, x: (m.q @ x[:, :, None].tanh())[..., 0] + F.linear(m.q, x).T, q=parameter(3, 4)),
    "bilinear": lambda: Net(lambda m, x: m.b(x, x.tanh()), b=nn.Bilinear(4, 4, 3)),
    "conv of a view": lambda: Net(lambda m, x: F.conv1d(x[:, None], m.w[:, None]).flatten(1), w=parameter(3, 2)),
    "conv and linear": lambda: Net(lambda m, x: F.conv1d(x.view(-1, 2, 2), m.w, padding=1).mean(2) + F.linear(x, m.w.flatten(1)), w=parameter(3, 2, 2)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 2)),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2)),
    "weight standardisation": lambda: Net(standardised, w=parameter(3, 2, 2), g=parameter(3)),
    "attention bias": lambda: Net(attention, f=nn.Linear(1, 6), b=parameter(7)),
    "bias used elsewhere": lambda: Net(lambda m, x: m.f(x) * m.f.bias, f=nn.Linear(4, 3)),
}  # fmt: skip


def zeroed(m: Any, x: Tensor) -> Tensor:
    w = m.w.clone()
    w[2:4].zero_()
    return m.f(x) + w


def standardised(m: Any, x: Tensor) -> Tensor:
    w = F.batch_norm(m.w.reshape(1, 3, -1), None, None, weight=m.g, training=True).reshape_as(m.w)
    return F.conv1d(x.view(-1, 2, 2), w, padding=1).flatten(1)


def attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.f(x[:, :, None]).view(-1, 4, 3, 2).unbind(2)
    bias = m.b[torch.arange(4)[:, None] - torch.arange(4) + 3]
    return F.scaled_dot_product_attention(q, k, v, bias).flatten(1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(4)
def test_weights_made_of_parameters(name: str) -> None:
    torch.manual_seed(0)
    check(CASES[name](), rows())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False, "batch_first": False}]
)
@pytest.mark.every(3)
def test_recurrent_layers(kind: type[nn.RNNBase], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    options = {"batch_first": True} | options
    body = kind(1, 3, **options)

    def forward(m: Any, x: Tensor) -> Tensor:
        x = x[:, :, None] if options["batch_first"] else x.t()[:, :, None]
        y = m.body(x)[0]
        return y[:, -1] if options["batch_first"] else y[-1]

    check(Net(forward, body=body), rows())


def test_cells_and_projections() -> None:
    torch.manual_seed(0)
    check(Net(lambda m, x: m.c(x, (x[:, :3], x[:, 1:]))[0], c=nn.LSTMCell(4, 3)), rows())
    check(Net(lambda m, x: m.c(x, x[:, :3]), c=nn.GRUCell(4, 3)), rows())
    check(Net(lambda m, x: m.l(x[:, :, None])[0][:, -1], l=nn.LSTM(1, 4, proj_size=2, batch_first=True)), rows())


def test_old_hooks_and_pruning() -> None:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        layers = [torch.nn.utils.weight_norm(nn.Linear(4, 3)), torch.nn.utils.spectral_norm(nn.Linear(4, 3))]
    layers.append(nn.Linear(4, 3))
    prune.random_unstructured(layers[-1], "weight", 0.4)
    for layer in layers:
        check(nn.Sequential(layer, nn.Tanh(), nn.Linear(3, 2)), rows())


def test_a_parametrization_of_ones_own() -> None:
    class Symmetric(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w.triu() + w.triu(1).mT

    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Symmetric())
    check(nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 2)), rows())


def test_an_autograd_function_of_weights() -> None:
    """A straight-through estimator: the kernel has the derivative that training has, not that of the values."""

    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, w: Tensor) -> Tensor:
            return torch.round(4 * w) / 4

        @staticmethod
        def backward(ctx: Any, d: Tensor) -> Tensor:
            return 3 * d

    check(Net(lambda m, x: F.linear(x, Round.apply(m.w)).tanh(), w=parameter(3, 4)), rows())


def test_a_fixed_graph_with_node_numbers_as_inputs() -> None:
    """The whole graph is a function of the weights; a sample picks its row."""
    torch.manual_seed(0)
    model = Net(lambda m, i: (m.a @ m.g((m.a @ m.f(m.x)).relu()))[i], f=nn.Linear(4, 6), g=nn.Linear(6, 3))
    model.register_buffer("a", torch.rand(9, 9).softmax(1))
    model.register_buffer("x", torch.randn(9, 4))
    check(model, torch.arange(7))


def test_embedding_bags_and_sparse_gradients() -> None:
    torch.manual_seed(0)
    ids = torch.randint(7, (5, 3))
    sparse, plain = (nn.Embedding(7, 2, sparse=flag).double() for flag in (True, False))
    plain.load_state_dict(sparse.state_dict())
    torch.testing.assert_close(tg.trace_ntk(sparse)(ids), tg.trace_ntk(plain)(ids))
    check(Net(lambda m, i: m.e(i).flatten(1), e=nn.Embedding(7, 2, max_norm=0.4)), ids)
    bag = Net(lambda m, i, w: m.e(i, per_sample_weights=w), e=nn.EmbeddingBag(7, 2, mode="sum"))
    check(bag, (ids, rows(5, 3)))


def test_scaling_by_frequency_is_no_part_of_the_function() -> None:
    """It divides gradients by how often a row occurs in the batch; J is the derivative of what forward() computes."""
    torch.manual_seed(0)
    scaled, plain = (nn.Embedding(4, 2, scale_grad_by_freq=flag).double() for flag in (True, False))
    plain.load_state_dict(scaled.state_dict())
    ids = torch.tensor([[1, 1, 2], [0, 3, 3], [2, 2, 2]])
    torch.testing.assert_close(tg.trace_ntk(scaled)(ids), tg.trace_ntk(plain)(ids))


@settings(max_examples=25, deadline=None)
@given(
    o=st.integers(1, 4),
    i=st.integers(1, 4),
    n=st.integers(1, 4),
    start=st.integers(0, 3),
    scale=st.sampled_from([1.0, -2.0, 0.5]),
    turned=st.booleans(),
)
def test_views_of_any_shape(o: int, i: int, n: int, start: int, scale: float, turned: bool) -> None:
    """A weight cut out of a longer vector, turned and scaled: all sizes may coincide."""
    torch.manual_seed(0)

    def forward(m: Any, x: Tensor) -> Tensor:
        w = m.v[start : start + o * i]
        w = w.view(i, o).t() if turned else w.view(o, i)
        return F.linear(x, scale * w).tanh() * m.v[:1]

    check(Net(forward, v=parameter(start + o * i + 1)), torch.randn(n, i, dtype=F64))


def test_llama_with_its_own_norm_in_float64() -> None:
    """It computes its norms in float32 whatever its type: rounding there is no sign of randomness."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=6, pad_token_id=0, use_cache=False,
    )  # fmt: skip
    for seed in range(3):
        torch.manual_seed(seed)
        model = transformers.LlamaForSequenceClassification(config).double().eval()
        x = {"input_ids": torch.randint(1, 11, (4, 6))}
        j = jacobians_loop(model, x)
        torch.testing.assert_close(tg.trace_ntk(model)(x), trace(j, j), rtol=1e-5, atol=1e-5)
