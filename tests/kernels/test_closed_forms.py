"""K6: the closed forms of two-layer networks, and NTK = CK + E."""

import pytest
import torch
from torch import nn

import tangency as tg
from tangency.models import TwoLayer, mlp

ACTIVATIONS = {
    "tanh": (torch.tanh, lambda z: 1 - torch.tanh(z) ** 2),
    "relu": (torch.relu, lambda z: (z > 0).to(z)),
    "sin": (torch.sin, torch.cos),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_two_layer_ntk_and_ck(name: str) -> None:
    """K^CK = X₁ᵀX₁ and K^NTK = XᵀX/d ⊙ σ'ᵀ diag(v)² σ'/h + K^CK: (76) and (77) of Chiang et al. 2023."""
    act, slope = ACTIVATIONS[name]
    d, h, n = 7, 23, 9
    model = TwoLayer(d, h, act).double()
    x = torch.randn(n, d, dtype=torch.float64)
    z = x @ model.W.detach().T / d**0.5  # [n, h]
    x1 = act(z) / h**0.5
    ck = x1 @ x1.T
    v = model.v.detach().flatten()
    ntk = (x @ x.T / d) * (slope(z) * v**2 @ slope(z).T / h) + ck
    torch.testing.assert_close(tg.conjugate_kernel(model, bias=False)(x), ck, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(tg.trace_ntk(model)(x), ntk, rtol=1e-12, atol=1e-14)
    parts = tg.trace_ntk(model).parts(x)
    torch.testing.assert_close(parts["v"], ck, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(parts["W"], ntk - ck, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_two_layer_ntk_as_a_sum_over_neurons(name: str) -> None:
    """Cagnetta et al. 2023 (16): K(x, x') = c/m Σᵢ [σ(wᵢx/√d)σ(wᵢx'/√d) + vᵢ² σ'(wᵢx/√d)σ'(wᵢx'/√d) x·x'/d], c = 2."""
    act, slope = ACTIVATIONS[name]
    d, m, c = 5, 11, 2.0

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(m, d))
            self.second = nn.Parameter(torch.randn(1, m))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = act(nn.functional.linear(x / d**0.5, self.first))
            return nn.functional.linear((c / m) ** 0.5 * hidden, self.second)

    model = Net().double()
    x = torch.randn(6, d, dtype=torch.float64)
    w, v = model.first.detach(), model.second.detach()[0]
    want = torch.zeros(6, 6, dtype=torch.float64)
    for a in range(6):
        for b in range(6):
            za, zb = w @ x[a] / d**0.5, w @ x[b] / d**0.5
            terms = act(za) * act(zb) + v**2 * slope(za) * slope(zb) * (x[a] @ x[b]) / d
            want[a, b] = c / m * terms.sum()
    torch.testing.assert_close(tg.trace_ntk(model)(x), want, rtol=1e-12, atol=1e-14)


def test_ntk_is_ck_plus_the_rest() -> None:
    """For one output the last layer's part (weight, bias) is 1 + z·z'; the others are E: (30) of Chiang et al. 2023."""
    model = mlp([4, 16, 8, 1], nn.Tanh).double()
    x = torch.randn(7, 4, dtype=torch.float64)
    last = list(dict(model.named_parameters()))[-2:]
    parts = tg.trace_ntk(model).parts(x)
    ck = tg.conjugate_kernel(model)(x)
    torch.testing.assert_close(parts[last[0]] + parts[last[1]], ck, rtol=1e-12, atol=1e-14)
    rest = tg.trace_ntk(model, trainable=lambda name, p: name not in last)
    torch.testing.assert_close(ck + rest(x), tg.trace_ntk(model)(x), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(tg.trace_ntk(model, trainable=last)(x), ck, rtol=1e-12, atol=1e-14)


def test_pseudo_ntk_tends_to_the_full_one_with_width() -> None:
    """Sutherland 2023, "Pseudo-NTK": ‖Θ − pNTK ⊗ I‖/‖Θ‖ falls as 1/√width; K3's λmax too."""
    x = torch.randn(12, 6, dtype=torch.float64)
    norms, tops, widths = [], [], [32, 512]
    for width in widths:
        gaps, top = [], []
        for seed in range(5):
            torch.manual_seed(seed)
            model = mlp([6, width, width, 3]).double()
            for layer in model:
                if isinstance(layer, nn.Linear):
                    nn.init.kaiming_normal_(layer.weight)
            full = tg.full_ntk(model)(x).reshape(36, 36)
            pseudo = torch.kron(tg.pseudo_ntk(model)(x), torch.eye(3, dtype=torch.float64))
            gaps.append(float((full - pseudo).norm() / full.norm()))
            values = [float(torch.linalg.eigvalsh(k)[-1]) for k in (full, pseudo)]
            top.append(abs(values[0] - values[1]) / values[0])
        norms.append(sum(gaps) / 5)
        tops.append(sum(top) / 5)
    slope = torch.log(torch.tensor(norms[0] / norms[1])) / torch.log(torch.tensor(widths[1] / widths[0]))
    assert 0.3 < float(slope) < 0.7, norms
    assert tops[1] < tops[0] / 2, tops


def test_cosine_has_unit_diagonal_and_the_stated_form() -> None:
    model = mlp([4, 16, 3]).double()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    k, cos = tg.trace_ntk(model), tg.cosine(tg.trace_ntk(model))
    assert torch.equal(cos(x).diagonal(), torch.ones(6, dtype=torch.float64))
    want = k(x, y) / (k.diag(x).sqrt()[:, None] * k.diag(y).sqrt())
    torch.testing.assert_close(cos(x, y), want, rtol=1e-13, atol=0)
    assert float(cos(x).abs().max()) <= 1 + 1e-14
