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


def test_pictures_of_decisions_show_their_numbers() -> None:
    x, y = torch.randn(40, 3), torch.arange(40) % 3
    decisions = tg.explain(
        tg.models.mlp([3, 8, 3]), (x[:28], y[:28]), (x[28:], y[28:]), kernels=["trNTK", "CK"], outputs_are="logits",
        progress=False,
    )  # fmt: skip
    taus, tads, spectra = decisions.plot().axes
    for k, explanation in enumerate(decisions.explanations):
        faithful = explanation.faithfulness
        for axis, value, ends in ((taus, faithful.tau, "tau"), (tads, faithful.tad, "tad")):
            interval = faithful.intervals[ends]
            assert list(axis.lines[2 * k].get_xdata()) == [interval.low, interval.high]
            assert list(axis.lines[2 * k + 1].get_xdata()) == [value]
        values = explanation.values / explanation.values[0]
        np.testing.assert_allclose(spectra.lines[k].get_ydata(), values.clamp_min(1e-16))
    first = decisions.explanations[0]

    gram, spectrum = first.plot().axes[:2]
    np.testing.assert_allclose(np.array(gram.images[0].get_array()), first.picture.double())
    np.testing.assert_allclose(spectrum.lines[0].get_ydata(), first.values.clamp_min(float(first.values[0]) * 1e-16))

    figures, increasing = first.faithfulness.plot().axes
    assert [float(figures.lines[k].get_xdata()[0]) for k in (1, 3, 5)] == [
        first.faithfulness.tau, first.faithfulness.tad, first.faithfulness.pearson,
    ]  # fmt: skip
    knots = torch.as_tensor(np.array(increasing.lines[0].get_xdata()))
    np.testing.assert_allclose(increasing.lines[0].get_ydata(), first.faithfulness.map(knots))

    said, other = first.attribution.plot(5, names=["ant", "bee", "cat"]).axes
    heights = [np.unique(line.get_ydata()) for line in said.lines]
    middles = [float(v[0]) for v in heights if len(v) == 1]
    assert all(float(v) in middles for v in first.attribution.boxes[5, 0, :, 2])
    names = ["ant", "bee", "cat"]
    assert said.get_title().startswith(f"logit of {names[int(first.attribution.outputs[5, 0])]}")
    assert other.get_title().startswith(f"logit of {names[int(first.attribution.outputs[5, 1])]}")
    with pytest.raises(tg.InputError, match="decision=12; needed: one of the 12 that are explained"):
        first.attribution.plot(12)
