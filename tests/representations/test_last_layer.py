"""The last layer at its optimum: against scikit-learn and least squares, never worse, refused where it is not last."""

import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import LeaveOneOut, cross_val_predict
from torch import Tensor, nn

import tangency as tg
from tangency.representations import Paired, Refit
from tangency.representations.gain import paired
from tangency.representations.head_choice import choose_reg
from tangency.representations.head_fit import HeadProblem, solve_head

N, D = 60, 5
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(N, D, generator=GENERATOR)
TARGETS = X[:, :2].sin() + 0.3 * torch.randn(N, 2, generator=GENERATOR)
THREE = (X[:, :3] + torch.randn(N, 3, generator=GENERATOR)).argmax(1)
TWO = (X[:, 0] + torch.randn(N, generator=GENERATOR) > 0).long()


def refit(model: nn.Module, *data: object, **options: object) -> Refit:
    return tg.refit_last_layer(model, *data, progress=False, **{"resamples": 50, **options})  # type: ignore[arg-type]


def net(outputs: int, *more: nn.Module, hidden: int = 8, bias: bool = True) -> nn.Sequential:
    def made() -> nn.Sequential:
        return nn.Sequential(nn.Linear(D, hidden), nn.Tanh(), nn.Linear(hidden, outputs, bias=bias), *more)

    return tg.models.initialized(made, seed=1)


def features(model: nn.Sequential) -> Tensor:
    with torch.no_grad():
        return model[1](model[0](X))


# The optimum


@pytest.mark.parametrize("bias", [True, False])
def test_square_loss_without_reg_is_least_squares(bias: bool) -> None:
    model = net(2, bias=bias).double()
    found = refit(model, (X.double(), TARGETS.double()), reg=0)
    phi = model[1](model[0](X.double())).detach()
    phi = torch.cat([phi, torch.ones(N, 1)], 1) if bias else phi
    best = phi @ torch.linalg.lstsq(phi, TARGETS.double()).solution
    torch.testing.assert_close(found.model(X.double()), best, rtol=0, atol=1e-10)
    assert found.train.loss.after == pytest.approx(float((best - TARGETS).square().mean()), rel=1e-10)


def test_ridge_from_zero_is_that_of_scikit_learn() -> None:
    model = net(2).double()
    weights = torch.rand(N, generator=torch.Generator().manual_seed(3))
    found = refit(model, (X.double(), TARGETS), reg=0.7, start="zero", sample_weights=weights)
    phi = model[1](model[0](X.double())).detach().numpy()
    theirs = Ridge(0.7).fit(phi, TARGETS.double().numpy(), weights.numpy())
    np.testing.assert_allclose(found.model[2].weight.detach().numpy(), theirs.coef_, atol=1e-9)  # type: ignore[index]
    np.testing.assert_allclose(found.model[2].bias.detach().numpy(), theirs.intercept_, atol=1e-9)  # type: ignore[index]


@pytest.mark.parametrize(("outputs", "y"), [(3, THREE), (2, TWO), (1, TWO)])
def test_cross_entropy_from_zero_is_that_of_scikit_learn(outputs: int, y: Tensor) -> None:
    model, reg = net(outputs).double(), 0.5
    found = refit(model, (X.double(), y), reg=reg, start="zero")
    phi = model[1](model[0](X.double())).detach().numpy()
    # Two logits share a penalty: their difference has half of it.
    theirs = LogisticRegression(C=(2 if outputs == 2 else 1) / reg, tol=1e-12, max_iter=10_000).fit(phi, y.numpy())
    ours = found.model(X.double()).detach()
    wanted = torch.as_tensor(theirs.predict_log_proba(phi))
    logs = ours.log_softmax(1) if outputs > 1 else nn.functional.logsigmoid(torch.cat([-ours, ours], 1))
    torch.testing.assert_close(logs, wanted, rtol=0, atol=1e-5)


def test_cross_entropy_without_reg_has_no_gradient_left() -> None:
    found = refit(net(3).double(), (X.double(), THREE), reg=0)
    loss = nn.functional.cross_entropy(found.model(X.double()), THREE, reduction="sum")
    head = found.model.get_submodule("2")
    assert all(float(g.norm()) < 1e-8 for g in torch.autograd.grad(loss, list(head.parameters())))


def test_one_logit_and_two_find_the_same() -> None:
    model = net(1).double()
    pair = net(2).double()
    with torch.no_grad():
        pair[0].load_state_dict(model[0].state_dict())
    one = refit(model, (X.double(), TWO), reg=0).model(X.double())
    two = refit(pair, (X.double(), TWO), reg=0).model(X.double())
    torch.testing.assert_close(one[:, 0], two[:, 1] - two[:, 0], rtol=1e-6, atol=1e-8)


# Never worse


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.01, 1.0, 100.0, None]), st.sampled_from(["classes", "one", "real"]))
def test_the_training_loss_never_rises(seed: int, reg: float | None, kind: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(40, D, generator=generator) * 10 ** float(torch.randn((), generator=generator))
    y: Tensor = torch.arange(40) % 2
    y = y[torch.randperm(40, generator=generator)] if kind != "real" else torch.randn(40, 2, generator=generator)
    model = tg.models.initialized(lambda: tg.models.mlp([D, 6, 1 if kind == "one" else 2]), seed=seed)
    if seed % 2:
        tg.models.fit(model, x, y, epochs=3, lr=0.01, loss="mse" if kind == "real" else "cross_entropy", progress=False)
    found = refit(model, (x, y), reg=reg)
    assert found.train.loss.after <= found.train.loss.before


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.1, 10.0]), st.booleans())
def test_from_zero_the_penalised_objective_never_rises(seed: int, reg: float, square: bool) -> None:
    model = tg.models.initialized(lambda: tg.models.mlp([D, 6, 2]), seed=seed)
    data = (X, TARGETS) if square else (X, TWO)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tg.TangencyWarning)
        found = refit(model, data, reg=reg, start="zero")

    def objective(loss: float, of: nn.Module) -> float:
        squares = float(list(of.parameters())[-2].detach().double().square().sum())
        return N * loss * (2 if square else 1) + (reg if square else reg / 2) * squares

    assert objective(found.train.loss.after, found.model) <= objective(found.train.loss.before, model) * (1 + 1e-12)


def test_a_second_refit_changes_nothing() -> None:
    once = refit(net(2), (X, TARGETS), reg=0)
    twice = refit(once.model, (X, TARGETS), reg=0)
    assert twice.train.loss.after <= once.train.loss.after
    assert twice.moved < 1e-4


def test_weights_that_rounding_would_spoil_are_not_taken() -> None:
    """In float16 the optimum, rounded, is not the best: a neighbour of it stays as it is."""
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(40, 1, generator=generator) + 0.1 * torch.randn(40, 6, generator=generator)).half()
    y = (x.float() @ torch.randn(6, 1, generator=generator)).half()
    model = refit(nn.Linear(6, 1, bias=False).half(), (x, y), reg=0).model
    weight = next(model.parameters()).data

    def loss() -> float:
        return float((x.double() @ weight.double().T - y.double()).square().mean())

    for k in range(6):  # to the next float16 up or down, where that is better
        for towards in (9.0, -9.0):
            before, old = loss(), weight.clone()
            weight[0, k] = torch.nextafter(weight[0, k].float().half(), torch.tensor(towards).half())
            if loss() >= before:
                weight.copy_(old)
    found = refit(model, (x, y), reg=0)
    assert found.kept
    assert "kept as it was" in repr(found)
    assert found.train.loss.after == found.train.loss.before == pytest.approx(loss())


def test_a_loss_that_rises_from_zero_is_said() -> None:
    trained = refit(net(3), (X, THREE), reg=0.01).model
    with pytest.warns(tg.TangencyWarning, match=r"the training loss rose from .*start='zero'"):
        found = refit(trained, (X, THREE), reg=1e6, start="zero")
    assert found.train.loss.change > 0


def test_the_model_and_the_random_state_stay() -> None:
    model = nn.Sequential(nn.Linear(D, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    model[1].eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    found = refit(model, (X, THREE), (X, THREE))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == [m.training for m in found.model.modules()]
    assert not any(m._forward_hooks for m in [*model.modules(), *found.model.modules()])
    changed = [k for k, v in found.model.state_dict().items() if not torch.equal(v, before[k])]
    assert changed == ["3.weight", "3.bias"]


# Choosing reg


def problem(square: bool, bias: bool = True) -> HeadProblem:
    y = TARGETS if square else nn.functional.one_hot(THREE, 3)
    begin = torch.zeros(N, y.shape[1]).double()
    return HeadProblem(X.double(), y.double(), begin, torch.ones(N).double(), bias, square, 1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_leave_one_out_is_that_of_n_fits(bias: bool) -> None:
    found = choose_reg(problem(True, bias), None, 0, False)
    for k in (0, 8, 20):
        ridge = Ridge(float(found.regs[k]), fit_intercept=bias)
        left = cross_val_predict(ridge, X.double().numpy(), TARGETS.double().numpy(), cv=LeaveOneOut())
        assert float(found.risks[k]) == pytest.approx(float(np.mean((left - TARGETS.numpy()) ** 2)), rel=1e-6)
    assert found.by == "leave-one-out"
    assert found.best == float(found.regs[found.risks.argmin()])


def test_leave_one_out_with_weights_is_that_of_n_fits() -> None:
    whole = problem(True)
    w = torch.rand(N, generator=torch.Generator().manual_seed(1)).double()
    weighted = HeadProblem(whole.phi, whole.targets, whole.begin, w, True, True, 1e-12)
    found, total = choose_reg(weighted, None, 0, False), 0.0
    for i in range(N):
        rest = torch.arange(N) != i
        fit = weighted.select(rest.nonzero()[:, 0])
        z = whole.phi[i] @ (parts := solve_head(fit, float(found.regs[5])))[0] + parts[1]
        total += float(w[i] * (z - whole.targets[i]).square().mean())
    assert float(found.risks[5]) == pytest.approx(total / float(w.sum()), rel=1e-8)


def test_folds_find_a_reg_that_fits_held_out_samples() -> None:
    found = choose_reg(problem(False), None, 0, False)
    again = choose_reg(problem(False), None, 0, False)
    assert found.by == "5 folds"
    assert torch.equal(found.risks, again.risks)
    assert float(found.risks.min()) < float(found.risks[0])
    assert int(found.risks.argmin()) > 0
    assert "loss (5 folds)" in found.table()


@pytest.mark.parametrize("square", [True, False])
def test_validation_samples_choose(square: bool) -> None:
    y = TARGETS if square else THREE
    found = refit(net(2 if square else 3), (X[:40], y[:40]), validation=(X[40:], y[40:]))
    assert found.choice is not None
    assert found.choice.by == "held-out samples"
    for reg in (found.reg * 10, found.reg / 10):
        other = refit(net(2 if square else 3), (X[:40], y[:40]), (X[40:], y[40:]), reg=reg)
        assert other.test is not None
        assert float(found.choice.risks.min()) <= other.test.loss.after + 1e-3


# What it gained


def test_intervals_hold_the_difference_as_often_as_they_say() -> None:
    hits, generator = 0, torch.Generator().manual_seed(5)
    for seed in range(200):
        a = torch.randn(80, generator=generator).double()
        b = a - 0.3 + 0.5 * torch.randn(80, generator=generator).double()
        found = paired(a, b, torch.ones(80).double(), 200, seed)
        assert found.low is not None
        assert found.high is not None
        hits += found.low <= -0.3 <= found.high
    assert 180 <= hits <= 198


def test_results_can_be_read() -> None:
    found = refit(net(3), (X[:40], THREE[:40]), (X[40:], THREE[40:]))
    assert "test accuracy" in found.table()
    assert found.to_dict()["test"]["samples"] == 20  # type: ignore[call-overload, index]
    assert len(found.plot().axes) == 2
    assert "Refit(layer '2', test loss" in repr(found)
    alone = refit(net(2), (X, TARGETS), reg=1)
    assert alone.test is None
    assert alone.choice is None
    assert len(alone.plot().axes) == 1
    assert "accuracy" not in alone.table()
    assert repr(Paired(2.0, 1.0, -1.5, -0.5)) == "Paired(2 → 1, change -1 in [-1.5, -0.5])"


def test_smooth_functions_gain_orders_of_magnitude() -> None:
    """Qadeer et al. 2023, section 6, with a smaller network and a shorter training."""
    x, z = (torch.linspace(-1, 1, n).double()[:, None] for n in (101, 301))
    model = tg.models.initialized(lambda: tg.models.mlp([1, 64, 64, 1], activation=nn.Tanh).double(), seed=0)
    tg.models.fit(model, x, (3 * x).exp(), epochs=200, batch=101, lr=1e-3, optimizer="adam", loss="mse", progress=False)
    found = refit(model, (x, (3 * x).exp()), (z, (3 * z).exp()))
    assert found.test is not None
    assert found.test.loss.after < 1e-8 * found.test.loss.before


# Models and data as people have them


class Dictionary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.ModuleDict({"out": nn.Linear(D, 3)})

    def forward(self, a: Tensor, b: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head["out"](a + b)}


MODELS: dict[str, tuple[Callable[[], nn.Module], object, str]] = {
    "softmax": (lambda: net(3, nn.Softmax(1)), X, "2"),
    "log-softmax": (lambda: net(3, nn.LogSoftmax(1)), X, "2"),
    "one convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        torch.randn(N, 3, 6, 6, generator=GENERATOR), "2",
    ),
    "dict": (Dictionary, {"a": X, "b": X}, "head.out"),
    "tuple": (Dictionary, (X, X), "head.out"),
    "data parallel": (lambda: nn.DataParallel(net(3)), X, "2"),
    "bare": (lambda: nn.Linear(D, 3), X, ""),
    "resnet": (lambda: tg.models.resnet18(3, width=2), torch.randn(N, 3, 8, 8, generator=GENERATOR), "head"),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    make, x, layer = MODELS[name]
    model = tg.models.initialized(make, seed=0)
    found = refit(model, (x, THREE), (x, THREE), reg=0.01)
    assert found.layer == layer
    assert found.train.loss.after < found.train.loss.before
    assert found.test is not None
    assert found.test.accuracy is not None
    ending = {"softmax": "probabilities", "log-softmax": "log-probabilities"}.get(name, "logits")
    right = tg.models.accuracy(found.model.eval(), x, THREE, outputs_are=ending)
    assert found.test.accuracy.after == pytest.approx(right)


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_hugging_face(kind: str) -> None:
    import transformers as hf

    ids = torch.randint(1, 50, (N, 7), generator=GENERATOR)
    if kind == "gpt2":  # a linear layer at every token, of which the last one counts
        small = {"n_embd": 16, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        model: nn.Module = hf.GPT2ForSequenceClassification(hf.GPT2Config(vocab_size=50, num_labels=3, **small))
    else:
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
        model = hf.BertForSequenceClassification(hf.BertConfig(vocab_size=50, num_labels=3, **sizes))
    found = refit(model.eval(), ({"input_ids": ids}, THREE), reg=1e-3)
    assert found.layer == ("score" if kind == "gpt2" else "classifier")
    with torch.no_grad():
        loss = nn.functional.cross_entropy(found.model(input_ids=ids).logits.double(), THREE)
    assert found.train.loss.after == pytest.approx(float(loss), rel=1e-4)
    assert found.train.loss.after < found.train.loss.before


def test_data_in_every_form_gives_the_same() -> None:
    model, data = net(3), torch.utils.data.TensorDataset(X, THREE)
    labelled = tg.datasets.labelled((X, THREE))
    forms: list[tuple[object, ...]] = [
        ((X, THREE),), ((X.numpy(), THREE.tolist()),), (labelled,), (data,), ((X.double(), THREE),),
        (torch.utils.data.DataLoader(data, batch_size=7, shuffle=True),),
    ]  # fmt: skip
    losses = [refit(model, *form, reg=0.1).train.loss.after for form in forms]
    assert max(losses) - min(losses) < 1e-9
    both = refit(model, tg.datasets.TrainTest(labelled, labelled), reg=0.1)
    assert both.test is not None
    assert both.test.loss.after == pytest.approx(losses[0])


def test_classes_by_the_square_loss() -> None:
    for outputs, y in ((3, THREE), (1, TWO)):
        found = refit(net(outputs), (X, y), reg=0, loss="mse")
        assert found.train.accuracy is not None
        assert found.train.accuracy.after >= 0.6


def test_constant_features_leave_the_bias() -> None:
    found = refit(nn.Linear(D, 3), (torch.ones(N, D), THREE))
    shares = torch.bincount(THREE).double() / N
    assert found.train.loss.after == pytest.approx(-float((shares * shares.log()).sum()), rel=1e-6)
    real = refit(nn.Linear(D, 2, bias=False), (torch.zeros(N, D), TARGETS))
    assert real.train.loss.change == 0


# What is refused


class Random(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(nn.functional.dropout(x))


class Mixing(Random):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0))


class Functional(Random):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.head.weight, self.head.bias)


class Locked(Random):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)


def tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))
    model[2].weight = model[0].weight
    return model


def called_twice() -> nn.Module:
    layer = nn.Linear(D, D)
    return nn.Sequential(layer, nn.Tanh(), layer)


def zero_scaled() -> nn.Module:
    model = nn.Sequential(nn.Linear(D, 3), tg.models.Scale(4))
    nn.init.zeros_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    return model


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(D, 3)))


CONV = torch.randn(N, 3, 6, 6, generator=GENERATOR)
NAN = torch.full_like(X, float("nan"))
REFUSED: list[tuple[Callable[[], nn.Module], object, dict[str, object], str]] = [
    (lambda: net(3, nn.Tanh()), (X, THREE), {}, r"not those of its last linear layer '2'.*Give the model"),
    (lambda: net(3), (X, THREE), {"layer": "0"}, r"not those of its last linear layer '0'"),
    (lambda: net(3), (X, THREE), {"layer": "1"}, r"layer '1' is a Tanh; needed: a linear layer"),
    (lambda: net(3), (X, THREE), {"layer": "head"}, r"no layer 'head'.*Its linear layers are 0, 2"),
    (Functional, (X, THREE), {"layer": "head"}, r"layer 'head' is not called"),
    (Functional, (X, THREE), {}, r"no linear layer was called .*called as a module"),
    (Random, (X, THREE), {}, r"it is random"),
    (Mixing, (X, THREE), {}, r"mixes samples"),
    (Locked, (X, THREE), {}, r"cannot be copied \(TypeError"),
    (tied, (X, THREE), {}, r"tied to 0.weight"),
    (called_twice, (X, THREE), {}, r"called 2 times"),
    (zero_scaled, (X, THREE), {}, r"does not give W φ \+ b"),
    (normed, (X, THREE), {}, r"made of other parameters.*remove_parametrizations"),
    (lambda: net(3, nn.Sigmoid()), (X, THREE), {}, r"3 outputs and ends in a sigmoid"),
    (lambda: net(2, nn.Softmax(1)), (X, TARGETS), {}, r"ends in a softmax, and the square loss"),
    (lambda: net(3), (NAN, THREE), {}, r"not finite for sample 0"),
    (lambda: net(3), (torch.cat([X[:-1], NAN[:1]]), THREE), {}, r"not finite for sample 59 of training samples"),
    (lambda: net(2), (X, TARGETS / 0), {}, r"is inf|is nan|is -inf"),
    (lambda: net(3), (X, THREE * 0), {}, r"no sample .* of class 1, 2.*run off"),
    (lambda: net(4), (X, THREE), {}, r"no sample .* of class 3"),
    (lambda: net(2), (X, THREE), {}, r"class 2; needed"),
    (lambda: net(3), (X[:4], torch.tensor([0, 1, 2, 2])), {}, r"class 0 has one sample.*at least 2"),
    (lambda: net(2), (X, (X[:, 0] > 9).long().index_fill(0, torch.tensor([0]), 1)), {"reg": 0}, r"separated"),
    (lambda: net(3), (X, THREE), {"reg": -1}, r"reg=-1"),
    (lambda: net(3), (X, THREE), {"start": "here"}, r"start='here'"),
    (lambda: net(3), (X, THREE), {"loss": "hinge"}, r"loss='hinge'"),
    (lambda: net(3), (X, THREE), {"batch": 0}, r"batch=0"),
    (lambda: net(3), (X, THREE), {"reg": 1, "validation": (X, THREE)}, r"are both given; needed: one"),
    (lambda: net(3), (X, THREE), {"test": (X, TARGETS)}, r"whole numbers 0…2"),
    (lambda: net(3), (X, THREE[:7]), {}, r"60 samples and the y of data has 7"),
    (lambda: net(3), {"x": X}, {}, r"data is a dict; needed"),
    (lambda: net(3), tg.datasets.labelled((X, THREE)).split(40), {"test": (X, THREE)}, r"needed: one test set"),
    (lambda: net(3)[0].forward, (X, THREE), {}, r"model is a method"),  # type: ignore[list-item, return-value]
]


@pytest.mark.parametrize("case", range(len(REFUSED)))
def test_refused(case: int) -> None:
    make, data, options, message = REFUSED[case]
    with pytest.raises(tg.TangencyError, match=message):
        refit(make(), data, **options)
