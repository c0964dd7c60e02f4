"""Inputs in more digits than the parameters have: rounded where layers want them so, refused where digits matter."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tangency as tg

START = 1.7e9  # seconds: float32 knows them to within 128
X = np.linspace(START, START + 300, 30)[:, None]


class Clock(nn.Module):
    """Takes times in float64, and its layers what is left of them in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x - START).float() / 100)


class Numbered(Clock):
    """Takes numbers of rows as floats; only some of them differ when rounded."""

    def forward(self, x: Tensor) -> Tensor:
        return self.layers((x.long() % 7).float())


@pytest.mark.parametrize(
    "use",
    [
        lambda m, x: tg.trace_ntk(m)(x),
        lambda m, x: tg.compute(tg.trace_ntk(m), x, progress=False),
        lambda m, x: tg.conjugate_kernel(m)(x),
        lambda m, x: tg.linearize(m)(x),
        lambda m, x: tg.models.outputs(m, x),
        lambda m, x: tg.models.fit(m, x, np.arange(30) % 2, epochs=1, progress=False),
        lambda m, x: tg.estimators.KernelRegressor(tg.trace_ntk(m)).fit(x, np.arange(30.0)),
        lambda m, x: tg.explain(m, (x[:20], np.arange(20) % 2), (x[20:], np.arange(10) % 2), progress=False),
    ],
)
@pytest.mark.parametrize("model", [Clock(), Numbered()])
def test_digits_that_matter_are_not_lost(use: Callable[[nn.Module, np.ndarray], object], model: nn.Module) -> None:
    x = X if type(model) is Clock else 2.0**24 + np.r_[np.arange(0, 50, 2), 51, 53, 55, 57, 59][:, None]
    with pytest.raises(
        tg.InputError,
        match=r"float64, which forward\(\) takes as it is, and for [xX]1?.* in torch.float32.*lost matter",
    ):
        use(model, x)


def test_the_same_done_beforehand_is_the_same() -> None:
    model = Clock()
    inner = tg.trace_ntk(model.layers)((X - START) / 100)  # float64, which its layers do not take: rounded
    torch.testing.assert_close(inner, tg.trace_ntk(model.layers)(torch.tensor((X - START) / 100).float()))


class Scaled(nn.Module):
    """Takes any type: float32 parameters times float64 inputs are float64."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sum(1, keepdim=True).sin()


def test_ordinary_rounding_is_no_reason() -> None:
    x = torch.randn(100, 3, dtype=torch.float64)
    model = Scaled()
    torch.testing.assert_close(tg.trace_ntk(model)(x), tg.trace_ntk(model)(x.float()))
    normed = nn.BatchNorm1d(3)
    normed(x.float())
    before = {k: v.clone() for k, v in normed.state_dict().items()}
    tg.dynamics.train(
        normed.eval(), x, x, loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, 0.0), steps=1
    )
    assert all(torch.equal(before[k], v) for k, v in normed.state_dict().items())
