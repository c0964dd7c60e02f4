"""Traces over many outputs: captured in groups, and estimated by random directions with a measured error."""

import itertools
import pickle
from typing import Any

import pytest
import torch
from reference import full as full_reference
from reference import jacobians_loop, trace
from torch import Tensor, nn

import tangency as tg
from tangency.engine import directions, features
from tangency.engine.directions import signs
from tangency.kernels.estimate import mean_and_error
from tangency.kernels.grouped import Grouped

F64 = torch.float64
X = torch.randn(6, 3, 8, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 3, 8, 8, dtype=F64, generator=torch.Generator().manual_seed(1))


def net(c: int = 12) -> nn.Sequential:
    torch.manual_seed(c)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Tanh(), nn.Conv2d(4, 5, 3, stride=2), nn.Tanh(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(20, c)).double().eval()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.fixture
def in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little room that the outputs of `net` go a few at a time."""
    monkeypatch.setattr(features, "WHOLE", 0)
    monkeypatch.setattr(features, "GROUP", 6_000)


@pytest.mark.usefixtures("in_groups")
class TestInGroups:
    def test_there_are_groups(self) -> None:
        kernel = tg.trace_ntk(net())
        prepared = kernel.prepare(kernel.ready(X))
        assert isinstance(prepared, Grouped)
        assert 1 < len(prepared.groups) < 12
        assert [g.start for g in prepared.groups[1:]] == [g.stop for g in prepared.groups[:-1]]
        plan = kernel.feature_map.plan(X)
        kept, _ = kernel.footprint(X)
        assert kept <= 6_000 < plan.kept
        sizes = {g.count for g in prepared.groups}
        assert max(sizes) - min(sizes) <= 1  # about equal

    @pytest.mark.parametrize("method", [None, "expand", "in place"])
    def test_traces_and_full_kernels_are_those_of_autograd(self, method: str | None) -> None:
        model = net()
        jx, jy = jacobians_loop(model, X), jacobians_loop(model, Y)
        close(tg.trace_ntk(model, method=method)(X), trace(jx, jx))
        close(tg.trace_ntk(model, method=method)(X, Y), trace(jx, jy))
        close(tg.full_ntk(model, method=method)(X), full_reference(jx, jx))
        close(tg.full_ntk(model, method=method)(X, Y), full_reference(jx, jy))

    def test_everything_that_a_kernel_promises(self) -> None:
        tg.testing.check_kernel(tg.cosine(tg.trace_ntk(net(9))), X[:4])

    def test_stores_are_resumed_and_looked_at_by_a_few_directions(self, tmp_path: Any) -> None:
        model = net()
        kernel = tg.trace_ntk(model)
        k = tg.compute(kernel, X, store=tmp_path / "k", tile=2, progress=False)
        close(k.dense(), kernel(X))
        again = tg.compute(pickle.loads(pickle.dumps(kernel)), X, store=tmp_path / "k", progress=False)
        assert torch.equal(again.dense(), k.dense())
        with torch.no_grad():
            model[-1].weight[3, 2] += 0.1
        with pytest.raises(tg.StoreMismatch):
            tg.compute(tg.trace_ntk(model), X, store=tmp_path / "k", progress=False)

    def test_batches_of_other_groups_meet(self) -> None:
        """Longer samples take more room, so they have more groups; short ones have none."""

        class Mean(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                torch.manual_seed(0)
                self.embed, self.out = nn.Embedding(30, 20), nn.Linear(20, 9)

            def forward(self, x: Tensor) -> Tensor:
                return self.out(torch.tanh(self.embed(x)).mean(1))

        model = Mean().double()
        long, short = torch.arange(4 * 40).view(4, 40) % 30, torch.arange(3 * 2).view(3, 2)
        jx, jy = jacobians_loop(model, long), jacobians_loop(model, short)
        for kernel, want in ((tg.trace_ntk(model), trace), (tg.full_ntk(model), full_reference)):
            a, b = (kernel.prepare(kernel.ready(v)) for v in (long, short))
            assert isinstance(a, Grouped)
            assert not isinstance(b, Grouped)
            close(kernel.pair(a, b), want(jx, jy))
            close(kernel.pair(b, a), want(jy, jx))

    def test_projected_features_are_those_of_all_outputs_together(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = net()
        made = {joint: tg.projected(tg.trace_ntk(model), dim=64, joint=joint).features(X) for joint in (False, True)}
        monkeypatch.setattr(features, "WHOLE", 1 << 28)
        for joint, phi in made.items():
            close(phi, tg.projected(tg.trace_ntk(model), dim=64, joint=joint).features(X))

    def test_gradients_in_x_go_through_the_groups(self) -> None:
        model, x = net(), X[:3].clone().requires_grad_(True)
        (g,) = torch.autograd.grad(tg.trace_ntk(model)(x).square().sum(), x)
        y = X[:3].clone().requires_grad_(True)
        parameters = list(model.parameters())
        rows = [
            torch.cat([v.flatten() for v in torch.autograd.grad(value, parameters, create_graph=True)])
            for out in model(y)
            for value in out
        ]
        j = torch.stack(rows).view(3, -1)
        (want,) = torch.autograd.grad((j @ j.T).square().sum(), y)
        torch.testing.assert_close(g, want, rtol=1e-7, atol=1e-9)

    def test_costs_are_of_all_groups(self) -> None:
        kernel = tg.trace_ntk(net())
        costs = kernel.costs(X)
        assert costs.passes == 12
        assert costs.groups == len(kernel.prepare(kernel.ready(X)).groups)
        assert "12 backward passes for every sample, in" in str(costs)

    def test_memory_does_not_grow_with_the_outputs(self) -> None:
        kept = [tg.trace_ntk(net(c)).footprint(X)[0] for c in (12, 48, 96)]
        assert max(kept) <= 6_000


def test_more_than_there_is_room_for_is_refused_before(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = tg.trace_ntk(net())
    kernel(X[:2])
    monkeypatch.setattr(features, "free_memory", lambda device: 100_000)
    with pytest.raises(tg.MemoryBudgetError, match=r"6 samples at once, of 12 outputs, take .* tg\.compute\(kernel"):
        kernel(X)
    monkeypatch.setattr(features, "free_memory", lambda device: 6 * 12 * 6 * 12 * 8 - 1)
    with pytest.raises(tg.MemoryBudgetError, match=r"6 by 6 samples, full between 12 outputs, takes .* store="):
        tg.full_ntk(net())(X)
    with pytest.raises(tg.MemoryBudgetError, match=r"6 by 6 samples, full between 12 outputs, takes .* store="):
        (2 * tg.full_ntk(net()))(X, X)
    with pytest.raises(tg.MemoryBudgetError, match=r"6 samples, all formed, take .*tg\.projected"):
        kernel.features(X)


def test_many_outputs_are_said_once_before_the_work() -> None:
    kernel = tg.trace_ntk(net(101))
    with pytest.warns(
        tg.PerformanceWarning, match=r"101 outputs: 101 backward passes .* probes=16.*pseudo_ntk.*head_ntk"
    ):
        kernel(X[:2])
    kernel(X)  # another warning would be an error
    pickle.loads(pickle.dumps(kernel))(X[:2])
    tg.trace_ntk(net(100))(X[:2])
    tg.pseudo_ntk(net(101))(X[:2])
    tg.trace_ntk(net(101), probes=4)(X[:2])


# Probes.


def directed(model: nn.Module, k: int, seed: int) -> Tensor:
    """The estimate by its definition, from the full kernel."""
    j = jacobians_loop(model, X)
    theta = full_reference(j, j)
    v = signs(k, theta.shape[1], seed)
    return torch.einsum("rc,ncmd,rd->nm", v, theta, v) / k


def test_an_estimate_is_what_its_formula_says() -> None:
    model = net()
    for k, seed in ((2, 0), (5, 3), (11, 2**64 - 1)):
        close(tg.trace_ntk(model, probes=k, seed=seed)(X), directed(model, k, seed))
    assert not torch.allclose(directed(model, 5, 3), directed(model, 5, 4))


def test_estimates_are_unbiased(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over all patterns of signs is the trace, exactly."""
    model = net(4)
    patterns = torch.tensor(list(itertools.product((-1.0, 1.0), repeat=4)), dtype=F64)
    total = torch.zeros(len(X), len(X), dtype=F64)
    for pair in patterns.split(2):
        monkeypatch.setattr(directions, "signs", lambda k, c, seed, pair=pair: pair if k == 2 else signs(k, c, seed))
        total += tg.trace_ntk(model, probes=2)(X) / 8
    close(total, tg.trace_ntk(model)(X))


def test_an_estimate_is_a_kernel() -> None:
    kernel = tg.trace_ntk(net(), probes=6, seed=1)
    tg.testing.check_kernel(kernel, X)
    tg.testing.check_kernel(tg.cosine(kernel), X)
    assert float(torch.linalg.eigvalsh(kernel(X)).min()) > 0
    assert kernel.outputs(kernel.ready(X)).shape == (6, 12)  # all of them: they are what the model says
    assert kernel.features(X).shape[0] == 6


def test_probes_go_by_rules_fallback_heads_and_projections() -> None:
    class Cosines(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.f, self.p = nn.Linear(8, 5), nn.Parameter(torch.randn(9, 5))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cosine_similarity(self.f(x.mean((1, 2)))[:, None], self.p[None], -1)

    with pytest.warns(tg.PerformanceWarning, match="no structured rule covers p"):
        close(tg.trace_ntk(Cosines().double(), probes=3)(X), directed(Cosines().double(), 3, 0))
    kernel = tg.trace_ntk(net(), probes=4, outputs=lambda out: out[:, :9])
    assert kernel.outputs(kernel.ready(X)).shape == (6, 9)
    head = tg.head_ntk(net(), lambda out, w: torch.tanh(out) * w, probes=5)
    w = torch.linspace(1, 2, 12, dtype=F64).expand(6, 12)
    whole = tg.full_ntk(nn.Sequential(net(), nn.Tanh()))(X) * w[0][:, None, None] * w[0]
    v = signs(5, 12, 0)
    close(head((X, w)), torch.einsum("rc,ncmd,rd->nm", v, whole, v) / 5)
    phi = tg.projected(tg.trace_ntk(net(), probes=4), dim=400).features(X)
    assert phi.shape == (6, 4, 400)


@pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning")  # a derivative of a derivative has no rules
def test_probes_of_a_linearised_network() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), nn.Tanh(), nn.Linear(6, 9)).double()
    close(tg.trace_ntk(tg.linearize(model), probes=3)(X), tg.trace_ntk(model, probes=3)(X))


def test_stores_know_probes_and_seed(tmp_path: Any) -> None:
    model = net()
    kernel = tg.trace_ntk(model, probes=4, seed=3)
    assert {"probes": 4, "seed": 3}.items() <= kernel.spec().items()
    assert "probes" not in tg.trace_ntk(model).spec()
    k = tg.compute(kernel, X, store=tmp_path / "k", tile=4, progress=False)
    close(k.dense(), directed(model, 4, 3))
    for other in (tg.trace_ntk(model), tg.trace_ntk(model, probes=4), tg.trace_ntk(model, probes=5, seed=3)):
        with pytest.raises(tg.StoreMismatch):
            tg.compute(other, X, store=tmp_path / "k", progress=False)


def test_a_density_over_the_jacobian_takes_estimates() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 10)).double()
    gram, v = tg.spectra.jacobian_gram(tg.trace_ntk(model, probes=4), X), torch.randn(6, dtype=F64)
    close(gram @ v, directed(model, 4, 0) @ v)


@pytest.mark.parametrize("probes", [1, 0, -3, 2.0, True, "16"])
def test_what_are_no_probes(probes: Any) -> None:
    with pytest.raises(tg.InputError, match="needed: a whole number of random directions, at least 2"):
        tg.trace_ntk(net(), probes=probes)


def test_other_refusals() -> None:
    with pytest.raises(tg.InputError, match="12 outputs: the exact kernel costs less, 12 backward passes"):
        tg.trace_ntk(net(), probes=20)(X)
    with pytest.raises(tg.InputError, match="the exact kernel costs the same"):
        tg.trace_ntk(net(), probes=12)(X)
    for seed in (-1, 1.5, True, None):
        with pytest.raises(tg.InputError, match="seed="):
            tg.trace_ntk(net(), probes=4, seed=seed)  # type: ignore[arg-type]
    for kernel in (tg.trace_ntk(net()), tg.cosine(tg.trace_ntk(net(), probes=4))):
        with pytest.raises(tg.InputError, match="not estimated by probes"):
            tg.probe_error(kernel, X)


# The measured error.


def test_mean_and_standard_error_are_those_of_the_estimates() -> None:
    z = 1e6 + torch.randn(9, 4, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    mean, error = mean_and_error(iter(z / 9), 9)
    torch.testing.assert_close(mean, z.mean(0))
    torch.testing.assert_close(error, z.std(0) / 3, rtol=1e-6, atol=0)


def test_the_error_of_a_kernel_is_the_spread_of_its_probes() -> None:
    model, k = net(), 5
    error = tg.probe_error(tg.trace_ntk(model, probes=k, seed=2), X)
    j = jacobians_loop(model, X)
    theta, v = full_reference(j, j), signs(k, 12, 2)
    z = torch.einsum("rc,ncmd,rd->rnm", v, theta, v)
    close(error.estimate, z.mean(0))
    torch.testing.assert_close(error.standard_error, z.std(0) / k**0.5)
    size = z.mean(0).diagonal().sqrt()
    torch.testing.assert_close(error.relative, error.standard_error / size[:, None] / size)
    assert (error.probes, error.outputs) == (5, 12)
    assert error.needed(error.rms) == 5
    assert error.needed(1e-9) == 12
    assert "probes=5 of 12 outputs" in repr(error)
    assert "50%" in error.table()
    assert error.to_dict()["probes"] == 5
    one = tg.probe_error(tg.trace_ntk(model, probes=k), X[:1])
    assert one.rms == one.own
    with pytest.raises(tg.InputError, match="needed: a positive number"):
        error.needed(0)


def test_the_exact_trace_lies_within_the_error_as_often_as_it_should() -> None:
    """t-distributed with 15 degrees of freedom: 95 % within 2.13 standard errors, over 400 seeds of a known kernel."""
    model, k = net(60), 16
    j = jacobians_loop(model, X[:3])
    theta = full_reference(j, j)
    exact = torch.einsum("ncmc->nm", theta)
    inside = []
    for seed in range(400):
        v = signs(k, 60, seed)
        mean, error = mean_and_error(torch.einsum("rc,ncmd,rd->rnm", v, theta, v) / k, k)
        inside.append((mean - exact).abs() <= 2.131 * error)
    share = torch.stack(inside).double().mean(0)
    # Quadratic forms of 60 signs are not quite normal; the binomial error of 400 is .011.
    assert (share > 0.90).all()
    assert (share < 0.99).all()
