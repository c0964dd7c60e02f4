"""LSTM and GRU of infinite width: against quadrature at one time, finite networks at several, and in every spelling."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.infinite.finite import Scaled, readout_nngp, scales
from tangency.infinite.moments.gated import Gates

OUT = 4
torch.manual_seed(3)
SERIES, OTHERS = torch.randn(3, 4, 3, dtype=torch.float64), torch.randn(2, 4, 3, dtype=torch.float64)
TOKENS = torch.tensor([[1, 2, 3, 0], [2, 2, 0, 5], [4, 1, 3, 8]])


class Net(nn.Module):
    """A recurrent layer, and a linear one on what `read` takes of it."""

    def __init__(self, kind: type[nn.RNNBase], width: int = 8, read: str = "out", **options: Any) -> None:
        super().__init__()
        self.rnn = kind(3, width, **{"batch_first": True, **options})
        self.head, self.read = nn.Linear(width * (1 + bool(options.get("bidirectional"))), OUT), read

    def forward(self, x: Tensor) -> Tensor:
        out, last = self.rnn(x)
        if self.read == "mean":
            return self.head(out.mean(1))
        if self.read == "c":
            return self.head(last[1][-1])
        return self.head(out[:, -1])


def close(a: Tensor, b: Tensor, within: float) -> None:
    """To so much of the largest entry."""
    assert float((a - b).abs().max() / b.abs().max()) < within, (a, b)


# One time: the gates are independent Gaussians, and few


def lstm_state(a: Tensor) -> Tensor:
    i, g = a
    return torch.tanh(torch.sigmoid(i) * torch.tanh(g))


def gru_state(a: Tensor) -> Tensor:
    r, x, u = a
    return torch.tanh(x + torch.sigmoid(r) * u)


def expected(fn: Callable[[Tensor], Tensor], covs: list[np.ndarray], nodes: int) -> tuple[float, float]:
    """E[h h'] and Σ_g E[∂_g h ∂_g h']·C_g[0, 1], of independent gates of covariances C_g [2, 2], on a grid."""
    points, weights = np.polynomial.hermite_e.hermegauss(nodes)
    weights = weights / weights.sum()
    values, masses = [], []
    for cov in covs:
        e, v = np.linalg.eigh(cov)
        axes = [(points, weights) if x > 1e-12 else (np.zeros(1), np.ones(1)) for x in e]
        grid = np.stack([m.ravel() for m in np.meshgrid(axes[0][0], axes[1][0])])
        values.append(torch.from_numpy(v @ (np.sqrt(e.clip(0))[:, None] * grid)))
        masses.append(torch.from_numpy(np.outer(axes[1][1], axes[0][1]).ravel()))
    index = torch.meshgrid(*(torch.arange(len(m)) for m in masses), indexing="ij")
    mass = torch.stack([m[k.ravel()] for m, k in zip(masses, index, strict=True)]).prod(0)
    sides = []
    for side in range(2):
        a = torch.stack([v[side][k.ravel()] for v, k in zip(values, index, strict=True)]).requires_grad_()
        h = fn(a)
        sides.append((h.detach(), torch.autograd.grad(h.sum(), a)[0]))
    (h, dh), (k, dk) = sides
    slopes = (mass * dh * dk).sum(1)
    return float((mass * h * k).sum()), float((slopes * torch.tensor([c[0, 1] for c in covs])).sum())


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_one_time_by_quadrature(kind: type[nn.RNNBase]) -> None:
    x = SERIES[:2, :1]
    products = (x[:, 0] @ x[:, 0].T / 3).numpy()
    nngp, ntk = tg.infinite_ntk(Net(kind), w_var=1.5, b_var=0.2, samples=1 << 14).both(x)
    for i, j in ((0, 0), (0, 1)):
        # Two biases of variance 0.2 each; in the NTK parametrisation a gate's own tangent kernel is its covariance.
        inputs = products[np.ix_([i, j], [i, j])] * 1.5 + 0.2
        gate = expected(lambda a: torch.sigmoid(a[0]), [inputs + 0.2], 31)  # o, or 1 − z
        if kind is nn.LSTM:
            state = expected(lstm_state, [inputs + 0.2] * 2, 23)
        else:
            # r multiplies U h + b, which is b alone at the first time; the inputs' part has the other bias.
            state = expected(gru_state, [inputs + 0.2, inputs, np.full((2, 2), 0.2)], 13)
        want = 1.5 * gate[0] * state[0] + 0.2
        assert abs(float(nngp[i, j]) / want - 1) < 2e-3
        tangent = want + 1.5 * (gate[0] * state[1] + gate[1] * state[0])
        assert abs(float(ntk[i, j]) / tangent - 1) < 2e-3


# Several times: finite networks

CASES: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "lstm, two layers, c": (nn.LSTM, {"num_layers": 2, "read": "c"}),
    "gru, both directions, mean": (nn.GRU, {"bidirectional": True, "read": "mean"}),
}


def drawn(kind: type[nn.RNNBase], width: int, options: dict[str, Any], nets: int, what: str) -> Tensor:
    """Kernels of finite networks [nets, 3, 2]: of SERIES with OTHERS."""
    numbers = {"w_var": 2.0, "b_var": 0.1}
    module = Net(kind, width, **options).double().eval()
    kernel = Scaled.of(module, SERIES, scales(module, **numbers))
    found = []
    for seed in range(nets):
        tg.infinite.draw(module, seed=seed, **numbers)
        if what == "ntk":
            found.append(kernel.between(kernel.prepare(SERIES), kernel.prepare(OTHERS)))
        else:
            found.append(readout_nngp(module, SERIES, OTHERS, **numbers))
    return torch.stack(found).double()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_mean_over_networks(name: str) -> None:
    kind, options = CASES[name]
    exact = tg.infinite_ntk(Net(kind, **options), b_var=0.1).both(SERIES, OTHERS)
    for what, limit in zip(("nngp", "ntk"), exact, strict=True):
        nets = 12
        found = drawn(kind, 96, options, nets, what)
        along = (found * limit).sum((1, 2)) / limit.square().sum()
        assert abs(float((along.mean() - 1) / (along.std() / nets**0.5))) < 3, f"{what}: {float(along.mean()):.3f}"
        z = (found.mean(0) - limit) / (found.std(0) / nets**0.5)
        assert float(z.abs().max()) < 4.5, f"{what}: {z}"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.every(2)
def test_slope_in_width(kind: type[nn.RNNBase]) -> None:
    limit, widths = tg.infinite_ntk(Net(kind), b_var=0.1)(SERIES, OTHERS), (8, 128)
    off = [float((drawn(kind, w, {}, 12, "ntk") - limit).square().sum((1, 2)).mean().sqrt()) for w in widths]
    slope = np.log(off[1] / off[0]) / np.log(widths[1] / widths[0])
    assert -0.75 < slope < -0.3, (slope, off)


# As users write it


class Classifier(nn.Module):
    """Tokens, an LSTM, the last output."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.fc = how, nn.Embedding(9, 8), nn.Linear(16, 2)
        self.lstm = nn.LSTM(8, 16, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        emb = self.embed(ids)
        if self.how == "zeros":
            h0 = torch.zeros(1, ids.size(0), 16)
            out, _ = self.lstm(emb, (h0, torch.zeros(1, ids.size(0), 16)))
            return self.fc(out[:, -1, :])
        out, (h, _) = self.lstm(emb)
        if self.how.startswith("h["):
            return self.fc(h[-1] if self.how == "h[-1]" else h[-1, :, :])
        return self.fc(h.squeeze(0)) if self.how == "squeezed" else self.fc(out[:, -1])


@pytest.mark.parametrize("how", ["h[-1]", "h[-1, :, :]", "squeezed", "zeros"])
def test_classifier_in_other_words(how: str) -> None:
    want = tg.infinite_ntk(Classifier("out"), b_var=0.1, samples=256)(TOKENS)
    assert bool((torch.linalg.eigvalsh(want) > 0).all())
    torch.testing.assert_close(tg.infinite_ntk(Classifier(how), b_var=0.1, samples=256)(TOKENS), want)


class TimeFirst(nn.Module):
    """The batch on axis 1, as torch has it unless told otherwise."""

    def __init__(self, kind: type[nn.RNNBase], read: str) -> None:
        super().__init__()
        self.rnn, self.head, self.read = kind(3, 8, num_layers=2), nn.Linear(8, OUT), read

    def forward(self, x: Tensor) -> Tensor:
        out, _ = self.rnn(x if self.read == "samples as times" else x.transpose(0, 1))
        if self.read == "mean":
            return self.head(out.mean(0))
        return self.head(out.transpose(0, 1)[:, -1] if self.read == "back" else out[-1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("read", ["last", "mean", "back"])
@pytest.mark.every(4)
def test_batch_on_axis_one(kind: type[nn.RNNBase], read: str) -> None:
    want = tg.infinite_ntk(Net(kind, read="mean" if read == "mean" else "out", num_layers=2), samples=64)(SERIES)
    torch.testing.assert_close(tg.infinite_ntk(TimeFirst(kind, read), samples=64)(SERIES), want)
    square = torch.randn(4, 4, 3, dtype=torch.float64)  # as many samples as times: the axis must not be guessed
    with pytest.raises(tg.UnsupportedModule, match="batch_first=True"):
        tg.infinite_ntk(TimeFirst(kind, "samples as times"), samples=64)(square)


def test_layers_are_those_of_modules() -> None:
    for kind, layer in ((nn.LSTM, tg.infinite.LSTM), (nn.GRU, tg.infinite.GRU)):
        module, options = kind(3, 8, batch_first=True, bidirectional=True), {"b_var": 0.1, "samples": 64}
        by_hand = tg.infinite_ntk(layer(bidirectional=True), **options)(SERIES)
        torch.testing.assert_close(tg.infinite_ntk(module, **options)(SERIES), by_hand)
        # The way back reads the sequence from its end.
        turned = tg.infinite_ntk(module, **options)(SERIES.flip(1))
        torch.testing.assert_close(turned.flip((1, 3)), by_hand)


# What every kernel keeps


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.every(2)
def test_promises(kind: type[nn.RNNBase]) -> None:
    x = torch.cat([SERIES, SERIES[:1], SERIES[:1] + 1e-7])  # a copy, and nearly one
    k = tg.infinite_ntk(Net(kind), b_var=0.1, samples=512)
    gram = k(x)
    assert torch.equal(gram, gram.T)
    assert torch.equal(gram.diagonal(), k.diag(x))
    torch.testing.assert_close(k(SERIES, OTHERS), k(OTHERS, SERIES).T, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(k(x[:2], x[2:]), gram[:2, 2:], rtol=1e-7, atol=1e-7)  # whatever the tiles
    torch.testing.assert_close(k(x[:1], x[:1])[0, 0], gram[0, 0], rtol=1e-7, atol=0.0)  # it meets itself as alone
    torch.testing.assert_close(gram[0, 3:], gram[0, :1].expand(2), rtol=1e-4, atol=0.0)
    assert float(torch.linalg.eigvalsh(gram)[0]) > -float(k.error(x).max())
    torch.testing.assert_close(pickle.loads(pickle.dumps(k))(x), gram)
    narrow = tg.infinite_ntk(Net(kind), b_var=0.1, samples=512, dtype="float32")(x)
    close(narrow.double(), gram, 1e-4)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.every(2)
def test_error_is_that_of_the_draws(kind: type[nn.RNNBase]) -> None:
    few, many = (tg.infinite_ntk(Net(kind), b_var=0.1, samples=n) for n in (256, 16384))
    off, error = (few(SERIES) - many(SERIES)).abs(), few.error(SERIES)
    assert float((off / error).max()) < 5
    assert float(many.error(SERIES, repeats=4).mean()) < float(error.mean()) / 3


@pytest.mark.filterwarnings("ignore:Converting a tensor")  # the graph is compared with the module
def test_inputs_may_have_gradients() -> None:
    x = SERIES[:2].clone().requires_grad_()
    k = tg.infinite_ntk(Net(nn.LSTM), b_var=0.1, samples=64)
    (slope,) = torch.autograd.grad(k(x)[0, 1], x)
    step = torch.zeros_like(x)
    step[0, 1, 2] = 1e-5
    with torch.no_grad():
        moved = (k(x + step)[0, 1] - k(x - step)[0, 1]) / 2e-5
    torch.testing.assert_close(slope[0, 1, 2], moved, rtol=1e-5, atol=1e-8)


# Weights as the module was initialised


def test_gates_have_variances_and_means_of_their_own() -> None:
    module = nn.LSTM(64, 128, batch_first=True)
    with torch.no_grad():
        for kind, size in (("ih", 64), ("hh", 128)):
            weight, bias = getattr(module, f"weight_{kind}_l0"), getattr(module, f"bias_{kind}_l0")
            nn.init.normal_(weight, std=size**-0.5)
            weight[256:384] *= 2  # g
            nn.init.zeros_(bias)
        module.bias_hh_l0[128:256] = 1.0  # f
    k = tg.infinite_ntk(module, w_var="init")
    _, recursion = k.read(torch.randn(2, 3, 64).double())
    (op, _) = (node.op for node in recursion.nodes if isinstance(node.op, Gates))
    assert isinstance(op, Gates)
    assert [source.mean for source in op.sources] == [0.0, 1.0, 0.0, 0.0]
    for source, w in zip(op.sources, (1, 1, 4, 1), strict=True):
        assert abs(source.inputs.w_var / w - 1) < 0.1
        assert abs(source.hidden.w_var / w - 1) < 0.1
        assert source.inputs.b_var == source.hidden.b_var == 0.0
    said = k.spec()["layers"]
    assert {f"weight_{kind}_l0.{gate}" for kind in ("ih", "hh") for gate in "ifgo"} <= set(said)
    plain = tg.infinite_ntk(nn.GRU(64, 90), w_var="init").spec()["layers"]
    assert plain["weight_ih_l0.n"]["init"] == "torch's default of RNNs"
