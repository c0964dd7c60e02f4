"""κ(Θ) and the mean predictor of networks that are not dense: read by `infinite_ntk`, against dense ones and theory."""

import math

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.infinite import Erf, Linear, Serial
from tangency.studies import condition, phase, trainability


def dense(depth: int, w_var: float) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), *[m for _ in range(depth) for m in (Erf().module(), nn.Linear(4, 4))])


def conv(depth: int, pooled: bool) -> nn.Module:
    def block() -> nn.Module:
        return nn.Sequential(nn.Conv1d(3, 3, 3, padding=1, padding_mode="circular"), Erf().module())

    end = [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(3, 1)] if pooled else [nn.Flatten(), nn.Linear(12, 1)]
    return nn.Sequential(*[block() for _ in range(depth)], *end)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.erf(x))


def test_networks_agree_with_dense_ones() -> None:
    x, z, y = torch.randn(7, 5).double(), torch.randn(4, 5).double(), torch.randn(7)
    depths, w_vars = [3, 1, 3], [0.7, 1.6]
    before = trainability(x, depths, w_vars, b_var=0.1, activation=Erf(), x_test=z, y=y, progress=False)
    found = trainability(x, depths, w_vars, b_var=0.1, network=dense, x_test=z, y=y, progress=False)
    torch.testing.assert_close(found.kappa, before.kappa, rtol=1e-6, atol=0)
    torch.testing.assert_close(found.predictor, before.predictor, rtol=1e-6, atol=0)
    assert found.phases == ()
    assert math.isnan(found.critical)
    # With both, the network decides the kernel, the activation says the phases.
    both = trainability(x, depths, w_vars, b_var=0.1, network=dense, activation=Erf(), progress=False)
    torch.testing.assert_close(both.kappa, found.kappa)
    assert [p.phase for p in both.phases] == [p.phase for p in before.phases]
    assert both.critical == before.critical
    one = condition(x, depths, w_var=1.6, b_var=0.1, network=dense, x_test=z, y=y, progress=False)
    torch.testing.assert_close(one.kappa, found.kappa[:, 1])
    # Layers of tangency and kernels are as good as modules.
    layers = lambda depth, w: Serial(Linear(), *[m for _ in range(depth) for m in (Erf(), Linear())])  # noqa: E731
    kernel = lambda depth, w: tg.infinite_ntk(layers(depth, w), w_var=w, b_var=0.1)  # noqa: E731
    first, second = (condition(x, [2], w_var=1.6, b_var=0.1, network=n, progress=False) for n in (layers, kernel))
    torch.testing.assert_close(first.kappa, second.kappa)
    expected = condition(x, [2], w_var=1.6, b_var=0.1, activation=Erf(), progress=False)
    torch.testing.assert_close(first.kappa, expected.kappa, rtol=1e-6, atol=0)


@pytest.mark.parametrize("pooled", [False, True])
def test_convolutions_have_the_phases_of_their_dense_network(pooled: bool) -> None:
    """Xiao et al. 2020, table 1: in order κ ~ 1/(l χ₁^l), in chaos κ → 1, flattened or pooled (circular padding)."""
    x = torch.randn(4, 3, 4).double()
    x = x / x.square().mean((1, 2), keepdim=True).sqrt()
    make = lambda depth, w: conv(depth, pooled)  # noqa: E731
    w, b = 0.5, 0.05
    deep = phase(Erf(), w_var=w, b_var=b)
    assert deep.phase == "ordered"
    ordered = condition(x, [12, 13], w_var=w, b_var=b, network=make, progress=False)
    assert float(ordered.kappa[1] / ordered.kappa[0]) == pytest.approx(12 / 13 / deep.chi, rel=0.05)
    chaotic = condition(x, [16], w_var=8.0, b_var=b, network=make, progress=False)
    assert float(chaotic.kappa[0]) == pytest.approx(1, abs=0.05)


def test_residual_networks_stay_trainable_in_order() -> None:
    """Yang and Schoenholz 2017: with a shortcut there is no exponential order; κ grows slowly at any σ_w²."""
    x = torch.randn(5, 4).double()

    def residual(depth: int, w_var: float) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), *[Residual() for _ in range(depth)], nn.Linear(4, 1))

    plain = condition(x, [10, 30], w_var=0.5, b_var=0.05, activation=Erf(), progress=False)
    short = condition(x, [10, 30], w_var=0.5, b_var=0.05, network=residual, progress=False)
    assert float(plain.kappa[1] / plain.kappa[0]) > 1e3
    assert float(short.kappa[1] / short.kappa[0]) < 30


def test_normalised_networks_do_not_see_the_weight_variance() -> None:
    """A layer norm before each activation: Θ is a multiple of σ_w², so κ is the same at all of them."""
    x = torch.randn(5, 4).double()

    def normed(depth: int, w_var: float) -> nn.Module:
        def block() -> nn.Module:
            return nn.Sequential(nn.LayerNorm(8, elementwise_affine=False), Erf().module(), nn.Linear(8, 8))

        return nn.Sequential(nn.Linear(4, 8), *[block() for _ in range(depth)])

    found = trainability(x, [1, 6], [0.3, 1.0, 4.0], network=normed, progress=False)
    for k in (0, 2):  # but for the norm's ε
        torch.testing.assert_close(found.kappa[:, k], found.kappa[:, 1], rtol=1e-3, atol=0)
    plain = trainability(x, [1, 6], [0.3, 4.0], activation=Erf(), progress=False)
    assert float(plain.kappa[1, 0] / plain.kappa[1, 1]) > 10
    assert len(found.table().splitlines()) == 3
    assert len(found.plot().axes) == 3  # two grids; without x_test the second has no colours


def test_networks_that_cannot_be_used() -> None:
    x = torch.randn(4, 3, 6).double()
    with pytest.raises(tg.InputError, match=r"neither activation nor network is given; needed: the activation"):
        condition(torch.randn(4, 3), [1], w_var=1.0)
    with pytest.raises(tg.InputError, match=r"network is a Linear.*needed: a function|network is a str; needed"):
        condition(x, [1], w_var=1.0, network="conv")  # type: ignore[arg-type]
    open_end = lambda depth, w: nn.Conv1d(3, 2, 3, padding=1)  # noqa: E731
    with pytest.raises(tg.InputError, match=r"network\(1, 1.5\) has outputs with positions.*End it in a pooling"):
        condition(x, [1], w_var=1.5, network=open_end)
    with pytest.raises(tg.InputError, match=r"x is of shape \(3,\); needed: a tensor of two samples or more"):
        condition(torch.randn(3), [1], w_var=1.5, network=open_end)
    with pytest.raises(tg.InputError, match=r"x_test is of shape \(2, 3, 5\); needed: a tensor \[m, 3, 6\]"):
        condition(x, [1], w_var=1.5, network=open_end, x_test=torch.randn(2, 3, 5))
