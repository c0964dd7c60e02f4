"""Eigenfunctions of a kernel, and networks and their linearisations that learn them."""

import math
from functools import partial

import pytest
import torch
from torch import nn

import tangency as tg
from tangency.errors import InputError
from tangency.models import Recipe, initialized, mlp
from tangency.studies import eigenfunctions, learn
from tangency.studies.learning import SCHEDULE, attempt, travelled

DOUBLE = torch.float64
SHORT = Recipe(epochs=40, batch=16, lr=0.1, momentum=0.9, nesterov=False, schedule="onecycle", warmup=0.0)


def net(inputs: int = 3, width: int = 24) -> nn.Sequential:
    return initialized(lambda: mlp([inputs, width, 1], activation=nn.Tanh), seed=0).double()


def samples(n: int = 40, d: int = 3) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)


@pytest.fixture(scope="module")
def functions() -> tg.studies.Eigenfunctions:
    return eigenfunctions(tg.trace_ntk(net())(samples()))


# The functions themselves


def test_eigenpairs_in_order(functions: tg.studies.Eigenfunctions) -> None:
    K = tg.trace_ntk(net())(samples())
    torch.testing.assert_close(K @ functions.vectors, functions.vectors * functions.values)
    assert bool((functions.values.diff() <= 0).all())
    torch.testing.assert_close(functions.real(2).square().mean(), torch.ones((), dtype=DOUBLE))
    torch.testing.assert_close(
        functions.vectors.abs().amax(0), functions.vectors.amax(0)
    )  # a largest entry is positive


def test_nystrom_at_the_points_themselves_is_the_eigenvector(functions: tg.studies.Eigenfunctions) -> None:
    kernel, x = tg.trace_ntk(net()), samples()
    few = eigenfunctions(kernel(x), 6)
    torch.testing.assert_close(few.extend(kernel(x)), few.vectors)
    torch.testing.assert_close(few.extend(tg.compute(kernel, x[:7], x, progress=False)), few.vectors[:7])
    # At a new point: the function that ridgeless regression on φ_j would find there.
    z = samples(5) + 0.1
    model = tg.regress.ridge(kernel(x), few.vectors[:, 1], reg=1e-12)
    torch.testing.assert_close(few.extend(kernel(z, x))[:, 1], model.predict(kernel(z, x)), rtol=1e-4, atol=1e-6)


def test_some_by_krylov_are_the_first_of_all() -> None:
    K = tg.trace_ntk(net())(samples(80))
    all_, few = eigenfunctions(K), eigenfunctions(K, 5, progress=False)
    torch.testing.assert_close(few.values, all_.values[:5])
    torch.testing.assert_close(few.vectors, all_.vectors[:, :5], atol=1e-6, rtol=0)
    again = eigenfunctions(tg.linalg.spectrum(K), 5)
    torch.testing.assert_close(again.vectors, all_.vectors[:, :5])


def test_a_gaussian_vector_and_its_signs() -> None:
    """In expectation √(2/π): 500 eigenvectors of a rotationally invariant random matrix are Gaussian to 1/√n."""
    a = torch.randn(500, 700, generator=torch.Generator().manual_seed(0), dtype=DOUBLE)
    overlap = eigenfunctions(a @ a.T).overlap()
    assert abs(float(overlap.mean()) - math.sqrt(2 / math.pi)) < 2e-3
    flat = eigenfunctions(torch.ones(4, 4, dtype=DOUBLE))
    torch.testing.assert_close(flat.overlap(), torch.ones(1, dtype=DOUBLE))
    assert len(flat) == 1  # the others are rounding


def test_two_classes_by_sign_and_by_median(functions: tg.studies.Eigenfunctions) -> None:
    assert torch.equal(functions.binary(1), (functions.vectors[:, 1] > 0).long())
    assert functions.binary(1, cut="median").bincount().tolist() == [20, 20]
    task = functions.tasks(samples(), [1, 3], test=10)
    assert [j for j, _ in task] == [1, 3]
    train, test = task[1][1]
    assert (len(train), len(test)) == (30, 10)
    assert torch.equal(test.y, functions.binary(3)[30:])


def test_ties_are_not_decided_by_rounding() -> None:
    """Whatever the last digits and the signs that eigh gives: the same functions and classes."""
    v = torch.tensor([[1, 1, 1, 1], [1, -1, 1, -1], [1, 0, -1, 0], [0, 1, 0, -1]], dtype=DOUBLE)
    v = (v / v.norm(dim=1, keepdim=True)).T
    values, expected = torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=DOUBLE), [[1, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    for seed in range(8):
        drawn = torch.Generator().manual_seed(seed)
        turned = (v + 1e-15 * torch.randn(4, 4, generator=drawn, dtype=DOUBLE)) * (
            2 * torch.randint(2, (4,), generator=drawn) - 1
        )
        pairs = tg.linalg.Spectrum(values, turned, torch.Size((4, 4)), "eigh", 1, 0.0, 2e-16)
        found = eigenfunctions(pairs)
        torch.testing.assert_close(found.vectors, v, rtol=0, atol=1e-14)
        assert [found.binary(j).tolist() for j in (1, 2, 3)] == expected
        with pytest.raises(InputError, match=r"Begin with index 1\."):
            found.binary(0)


def test_linearised_training_on_one_function_decays_at_its_own_rate(functions: tg.studies.Eigenfunctions) -> None:
    """f_lin − f₀ → φ_j along φ_j alone: what is left after t steps of gradient descent is (1 − η λ_j)^t φ_j."""
    model, x = net(), samples()
    for j in (0, 3, 6):
        lin = tg.linearize(model)
        rate = 0.5 / float(functions.values[0])
        target = functions.vectors[:, j : j + 1] + model(x).detach()
        past = tg.dynamics.train(
            lin, x, target, loss=lambda f, y: (f - y).square().sum() / 2, steps=9, progress=False,
            optimizer=partial(torch.optim.SGD, lr=rate),
        )  # fmt: skip
        left = (target - past.train)[..., 0]
        shrunk = (1 - rate * functions.values[j]) ** torch.arange(10)
        torch.testing.assert_close(left, shrunk[:, None] * functions.vectors[:, j], atol=1e-10, rtol=0)


# Learning them


def test_network_and_linearisation_learn_and_the_model_stays(functions: tg.studies.Eigenfunctions) -> None:
    model, x = net(), samples()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    found = learn(model, functions.tasks(x, [1, 12], test=10), recipe=SHORT, until=0.4, progress=False)
    assert found.names == ("1", "12")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    first, later = found.network
    assert first.train_accuracy >= 0.95
    assert first.loss < later.loss  # harder, the smaller its eigenvalue
    assert found.linear[0].train_accuracy >= 0.9
    assert first.iterations >= 2  # an epoch, at least
    assert len(found.table().splitlines()) == 3
    assert len(found.plot().axes) == 3
    alone = learn(model, {"one": functions.tasks(x, [1], test=10)[0][1]}, recipe=SHORT, linear=False, until=0.4)
    assert alone.linear == ()
    assert alone.network[0] == first  # the same seed, to the bit
    assert len(alone.plot().axes) == 3


def test_iterations_and_distances_by_hand(functions: tg.studies.Eigenfunctions) -> None:
    model = nn.Linear(3, 1, bias=False).double()
    data = functions.tasks(samples(), [1], test=10)[0][1]
    still = attempt(model, data, SHORT.but(lr=1e-12), linear=False)
    assert math.isnan(still.iterations)
    assert still.distance < 1e-9
    assert abs(still.angle) < 1e-12
    moved = attempt(model, data, SHORT.but(epochs=1, batch=30, lr=1.0, momentum=0.0, schedule="constant"), linear=False)
    w = model.weight.detach()
    z = (data.train.x @ w.T)[:, 0]
    step = -((torch.sigmoid(z) - data.train.y)[:, None] * data.train.x).mean(0)
    assert moved.distance == pytest.approx(float(step.norm()), rel=1e-9)
    assert moved.angle == pytest.approx(float(1 - torch.cosine_similarity(w[0], w[0] + step, dim=0)), rel=1e-6)
    # The linear model is its own linearisation.
    both = [tuple(attempt(model, data, SHORT, linear=kind)) for kind in (True, False)]
    assert both[0] == pytest.approx(both[1], nan_ok=True)
    easy = attempt(model, data, SHORT.but(batch=30), linear=False, until=10.0)
    assert easy.iterations == 1  # at once, by one batch of all samples
    assert travelled([torch.ones(2)], [torch.ones(2)])[0] == 0


def test_the_published_schedule() -> None:
    assert (SCHEDULE.epochs, SCHEDULE.batch, SCHEDULE.peak, SCHEDULE.momentum) == (100, 128, 0.05, 0.9)
    assert [SCHEDULE.factor(part) for part in (0, 0.25, 1)] == [1, 0.75, 0]
    assert not SCHEDULE.nesterov


# Refusals


def test_what_is_refused(functions: tg.studies.Eigenfunctions) -> None:
    x, K = samples(), tg.trace_ntk(net())(samples())
    rank = len(functions)
    with pytest.raises(InputError, match=rf"index={rank}; needed: 0 to {rank - 1}.*above rounding"):
        functions.real(rank)
    with pytest.raises(InputError, match="index=-1"):
        functions.binary(-1)
    with pytest.raises(InputError, match="count=41; needed: from 1 to 40, the number of samples"):
        eigenfunctions(K, 41)
    with pytest.raises(InputError, match="pairs in the spectrum"):
        eigenfunctions(tg.linalg.top(K, 3, progress=False), 4)
    with pytest.raises(InputError, match="makes one class; needed: two. Begin with index 1, or cut='median'"):
        eigenfunctions(torch.ones(4, 4) + torch.diag(torch.arange(4.0))).binary(0)
    for cut in ("sign", "median"):
        with pytest.raises(InputError, match=r"makes one class; needed: two. Begin with index 1\."):
            eigenfunctions(torch.ones(4, 4)).binary(0, cut=cut)
    with pytest.raises(InputError, match="cut='half'; needed: 'sign', 'median'"):
        functions.binary(1, cut="half")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"of several outputs; needed: \[n, n\]"):
        eigenfunctions(tg.full_ntk(nn.Linear(3, 2).double())(x))
    with pytest.raises(InputError, match=r"cross has shape \(40, 39\); needed: \[m, 40\]"):
        functions.extend(K[:, :39])
    with pytest.raises(InputError, match="x has 39 samples; needed: the 40"):
        functions.tasks(x[:39], [1], test=3)
    with pytest.raises(InputError, match="test=40; needed: how many samples are held out, from 1 to 39"):
        functions.tasks(x, [1], test=40)


def test_what_learning_refuses(functions: tg.studies.Eigenfunctions) -> None:
    x = samples()
    tasks = functions.tasks(x, [1], test=10)
    with pytest.raises(InputError, match=r"the outputs' shape is \(2, 2\); needed: one output"):
        learn(mlp([3, 4, 2]).double(), tasks, recipe=SHORT)
    with pytest.raises(InputError, match="loss='mse'; needed: 'cross_entropy'"):
        learn(net(), tasks, recipe=SHORT.but(loss="mse"))
    with pytest.raises(InputError, match="tasks is empty"):
        learn(net(), {}, recipe=SHORT)
    with pytest.raises(InputError, match="model is a builtin_function"):
        learn(torch.tanh, tasks)  # type: ignore[arg-type]
    one = tg.datasets.Labelled(x, torch.zeros(40, dtype=torch.long), ("a", "b"))
    with pytest.raises(InputError, match=r"\[40, 0\] of the classes \['a', 'b'\]; needed: two classes"):
        learn(net(), {"one": tg.datasets.TrainTest(one, one)}, recipe=SHORT)


def test_pictures(functions: tg.studies.Eigenfunctions) -> None:
    assert len(functions.plot().axes) == 2
    assert functions.table().splitlines()[0].split()[:2] == ["index", "λ"]
