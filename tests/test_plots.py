"""Pictures show the numbers that they were given."""

import numpy as np
import pytest
import torch

import tangency as tg
from tangency import plots
from tangency.studies.convergence import typical


def test_gram_picture() -> None:
    model, x = tg.models.mlp([4, 8, 3]), torch.randn(12, 4)
    labels = torch.arange(12) % 3
    figure = plots.draw_gram(tg.trace_ntk(model)(x), labels, names=["a", "b", "c"])
    left, right = figure.axes[:2]
    shown = torch.as_tensor(np.array(left.images[0].get_array()))
    order = torch.argsort(labels, stable=True)
    torch.testing.assert_close(shown, tg.trace_ntk(model)(x).double()[order][:, order])
    values = torch.as_tensor(np.array(right.lines[0].get_ydata()))
    assert torch.all(values[:-1] >= values[1:])
    assert [t.get_text() for t in left.get_xticklabels()] == ["a", "b", "c"]
    with pytest.raises(tg.InputError, match=r"with 4 labels; needed: \[n, n\]"):
        plots.draw_gram(torch.eye(3), torch.zeros(4, dtype=torch.long))


def test_pictures_of_machines_show_their_numbers() -> None:
    x, z = torch.randn(30, 4).double(), torch.randn(9, 4).double()
    study = tg.regress.risk_study(
        x @ x.T, x[:, :2], z @ x.T, z[:, :2], sizes=[10, 30], regs=[0.1, 1.0, 10.0], repeats=2, progress=False
    )
    left, right = plots.draw_risk(study).axes
    np.testing.assert_allclose(left.lines[0].get_ydata(), study.measured[0].mean(0))
    np.testing.assert_allclose(left.lines[4].get_ydata(), study.gcv[1].mean(0))
    np.testing.assert_allclose(right.lines[3].get_ydata(), study.loo[1].flatten())

    net = tg.models.mlp([4, 8, 1]).double()
    monitor = tg.dynamics.Monitor(tg.trace_ntk(net), x)
    for step in (0, 5):
        monitor(step)
        with torch.no_grad():
            net[0].weight += 0.1
    regime = monitor.regime()
    axes = plots.draw_regime(regime, regime, names=["one", "two"]).axes
    np.testing.assert_allclose(axes[0].lines[1].get_ydata(), regime.change)
    assert [t.get_text() for t in axes[0].get_legend().get_texts()] == ["one", "two"]

    flow = tg.dynamics.flow(x @ x.T, x[:, 0])
    left, right = plots.draw_spectral_bias(flow, [0.01, 0.1, 1.0], modes=[0, 2, 99]).axes
    assert len(left.lines) == 2  # there is no hundredth mode
    remaining = np.exp(-2 * float(flow.values[2]) * np.array([0.01, 0.1, 1.0]))
    np.testing.assert_allclose(left.lines[1].get_ydata(), remaining)
    np.testing.assert_allclose(right.lines[0].get_ydata(), flow.time_to_fit())


def test_pictures_of_wide_networks_show_their_numbers() -> None:
    def net(m: int) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(3, m), torch.nn.Tanh(), torch.nn.Linear(m, 1))

    x, y = torch.randn(4, 3), torch.tensor([1.0, -1, 1, -1])
    spec = tg.studies.GradientDescent(y, steps=4, every=2)
    found = tg.studies.convergence(net, [8, 32, 64], x, seeds=2, train=spec, progress=False)
    start, kernel, parameters = plots.draw_convergence(found).axes
    np.testing.assert_allclose(start.containers[0].lines[0].get_ydata(), typical(found.ntk))
    np.testing.assert_allclose(kernel.containers[1].lines[0].get_ydata(), typical(found.training.drift))
    np.testing.assert_allclose(parameters.containers[0].lines[0].get_ydata(), typical(found.training.moved))
    assert str(found.slopes["ntk"]) in start.get_legend().get_texts()[1].get_text()

    grid = tg.studies.trainability(
        x, [1, 5, 400], [0.5, 2.0, 4.0], b_var=0.1, activation="erf", x_test=x[:2] + 0.1, y=y, progress=False
    )
    plane, left, right = plots.draw_phase(grid).axes[:3]
    np.testing.assert_allclose(plane.lines[0].get_xdata(), grid.edge[1])
    shown = np.ma.masked_invalid(np.where(np.isfinite(grid.kappa), grid.kappa, np.nan))
    assert shown.mask.any()  # lost in rounding, so not drawn
    np.testing.assert_allclose(left.collections[0].get_array().reshape(3, 3).filled(0), shown.filled(0))
    np.testing.assert_allclose(left.lines[0].get_xdata(), [grid.critical] * 2)
    assert "generalise" in right.get_title()
