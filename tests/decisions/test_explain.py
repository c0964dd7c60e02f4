"""tg.explain against its parts put together by hand, on every form of model and data; and what it leaves behind."""

import copy
import dataclasses
import gc
import json
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from tangency import InputError, ModelError, TangencyWarning, decisions
from tangency.datasets import Labelled
from tangency.decisions import Decisions, Explanation, chance, compared, explained, kernels
from tangency.decisions.attribution import Attribution, attributions
from tangency.decisions.forensics import flag
from tangency.engine import outputs as heads
from tangency.models import initialized, mlp
from tangency.surrogate import default_reg, faithfulness, fit, kendall, log_odds

pytestmark = pytest.mark.usefixtures("few_shuffles")
F64 = torch.float64
FIVE = ["trNTK", "trNTK⁰", "pNTK", "Em", "CK"]
N, M = 60, 40


def near(got: Any, want: Any, tolerance: float = 1e-9) -> None:
    got, want = (np.asarray(v, dtype=np.float64) for v in (got, want))
    assert got.shape == want.shape
    assert np.linalg.norm(got - want) <= tolerance * max(np.linalg.norm(want), 1e-300)


def data(classes: int = 3, dtype: torch.dtype = F64, seed: int = 0) -> tuple[tuple[Tensor, Tensor], ...]:
    """Clouds that overlap a little: (x, y) to train on and to test."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (N + M,), generator=generator)
    y[:classes] = torch.arange(classes)
    centres = torch.randn(classes, 3, generator=generator, dtype=F64)
    x = (centres[y] + torch.randn(N + M, 3, generator=generator, dtype=F64)).to(dtype)
    return (x[:N], y[:N]), (x[N:], y[N:])


@cache
def _trained(classes: int, outputs: int) -> nn.Sequential:
    model = initialized(lambda: mlp([3, 12, 10, outputs], nn.Tanh), seed=0).double()
    tg.models.fit(model, *data(classes)[0], epochs=20, batch=20, progress=False)
    return model


def trained(classes: int = 3, outputs: int | None = None) -> nn.Sequential:
    """A copy, so that no test can spoil it for another."""
    return copy.deepcopy(_trained(classes, outputs or classes))


def explain(model: nn.Module, *args: Any, **options: Any) -> Decisions:
    return tg.explain(model, *args, **{"progress": False, **options})


@pytest.fixture(scope="module")
def found() -> Decisions:
    return explain(trained(), *data())


def tensors(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a result, with the way to it; refuses Grams, kernels and modules on that way."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    assert not isinstance(value, (tg.Gram, tg.Kernel, nn.Module)), path
    if isinstance(value, Tensor):
        yield path, value
    elif dataclasses.is_dataclass(value):
        for field in fields(value):
            yield from tensors(getattr(value, field.name), f"{path}.{field.name}", seen)
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from tensors(each, f"{path}[{key!r}]", seen)
    elif isinstance(value, (list, tuple)):
        for key, each in enumerate(value):
            yield from tensors(each, f"{path}[{key}]", seen)


def alike(one: Decisions, other: Decisions, tolerance: float = 0.0) -> None:
    """Every number of both."""
    pairs = list(zip(tensors(one), tensors(other), strict=True))
    assert len(pairs) > 20
    for (path, a), (same, b) in pairs:
        assert path == same
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=path)
    for u, v in zip(one.explanations, other.explanations, strict=True):
        assert (u.name, u.title) == (v.name, v.title)
        for name in ("tau", "tad", "pearson", "r2", "intervals"):
            a, b = getattr(u.faithfulness, name), getattr(v.faithfulness, name)
            if tolerance == 0:
                assert a == b


# The figures.


def by_hand(kernel: tg.Kernel, reg: float = 1.0) -> tuple[Tensor, Tensor, Any]:
    """K, κ(test, train) and the surrogate, without explain."""
    (x, y), (z, _) = data()
    K, cross = tg.compute(kernel, x, progress=False), tg.compute(kernel, z, x, progress=False)
    return K.dense(), cross.dense(), fit(K, y, reg=reg * default_reg(K), progress=False)


@pytest.mark.parametrize("name", FIVE)
@pytest.mark.every(3)
def test_figures_are_those_of_the_parts_put_together_by_hand(found: Decisions, name: str) -> None:
    model, ((_, y), (z, y_z)) = trained(), data()
    view: Explanation = next(v for v in found.explanations if v.name == name)
    K, cross, surrogate = by_hand(kernels(model)[name])
    network, ties = model(z).detach(), torch.finfo(F64).eps ** 0.5
    near(found.logits, model(z).detach(), 1e-14)
    near(view.surrogate.coefficients, surrogate.coefficients, 1e-5)
    near(view.logits, surrogate.logits(cross), 1e-6)
    assert view.surrogate.reg == pytest.approx(surrogate.reg, rel=1e-12)
    assert view.title == decisions.TITLES[name]
    want = faithfulness(network, view.logits, y_z, outputs_are="logits", ties=ties)
    for figure in (
        "tau",
        "tad",
        "pearson",
        "r2",
        "accuracy",
        "network_accuracy",
        "samples",
        "intervals",
        "level",
        "ties",
    ):
        assert getattr(view.faithfulness, figure) == getattr(want, figure), figure
    direct = faithfulness(torch.softmax(network, 1), surrogate.probabilities(cross), y_z)
    assert view.faithfulness.tau == pytest.approx(direct.tau, abs=5e-3)
    assert view.faithfulness.tad == direct.tad
    # Attributions: of what the network said, and of the correct class, or the next if that was it.
    order = model(z).detach().argsort(1, descending=True)
    said = torch.stack([order[:, 0], torch.where(order[:, 0] == y_z, order[:, 1], y_z)], 1)
    a = view.attribution
    assert torch.equal(a.outputs, said)
    near(a.totals, view.logits.gather(1, said), 1e-11)
    near(a.similarity, cross.sort(1, descending=True).values[:, :8], 1e-10)
    near(cross.gather(1, a.similar), a.similarity, 1e-10)
    each = attributions(view.surrogate, cross, said)
    near(a.help, each.sort(-1, descending=True).values[..., :8], 1e-8)
    near(a.harm, each.sort(-1).values[..., :8], 1e-8)
    means = torch.stack([each[..., y == t].mean(-1) for t in range(3)], -1)
    near(a.boxes[..., 5], means, 1e-8)
    # The Gram sorted by class, and its eigenvalues.
    rows = y.argsort(stable=True)
    near(view.picture, K[rows][:, rows], 1e-6)
    assert view.spans.tolist() == torch.bincount(y).tolist()
    near(view.values, np.linalg.eigvalsh(K.numpy())[::-1], 1e-10)


def test_the_whole_says_what_it_is(found: Decisions) -> None:
    (x, _), (z, y_z) = data()
    assert [v.name for v in found.explanations] == FIVE
    assert torch.equal(found.train.x, x)
    assert torch.equal(found.test.y, y_z)
    assert found.accuracy == float((trained()(z).argmax(1) == y_z).double().mean())
    assert found.accuracy == found.explanations[0].faithfulness.network_accuracy
    assert 0.5 < found.accuracy < 1
    facts = {"train": N, "test": M, "classes": 3, "explained": M, "parameters": 211}
    facts["model"] = "MLP of 3 layers with 211 parameters"
    assert {k: found.facts[k] for k in facts} == facts
    assert found.poisoned_train is None
    assert found.explanations[0].flagged is None
    *lines, accuracies, sentence, against, rule, last = found.table().splitlines()
    assert last == found.outputs_said == "The network's outputs are taken for logits."
    assert len(lines) == 6
    best = max(found.explanations, key=lambda e: e.faithfulness.tau)
    said = found.verdict()
    assert (sentence, (against,), rule) == (f"{best.name}: {said.sentence}", said.against, said.rule)
    assert accuracies == (
        f"The network's accuracy is {found.accuracy:.2%}, balanced over classes {found.balanced_accuracy:.2%}; "
        f"always saying {found.majority[0]} has {found.majority[1]:.2%}."
    )
    for line, view in zip(lines[1:], found.explanations, strict=True):
        assert line.startswith(view.name)
        assert f"{view.faithfulness.tau:.3f}" in line
    summary = json.loads(json.dumps(found.summary()))
    assert list(summary["kernels"]) == FIVE
    for view in found.explanations:
        got = summary["kernels"][view.name]
        for figure in ("tau", "tad", "pearson", "r2", "accuracy", "ties"):
            assert got[figure] == getattr(view.faithfulness, figure)
        assert got["intervals"]["tau"] == [
            view.faithfulness.intervals["tau"].low,
            view.faithfulness.intervals["tau"].high,
        ]
        assert got["gradient"] <= 1e-6
    assert summary["network_accuracy"] == found.accuracy
    assert (summary["outputs_are"], summary["outputs_said"]) == ("logits", last)


def test_at_the_prompt_it_is_a_line(found: Decisions) -> None:
    assert repr(found).startswith(
        "Decisions(MLP of 3 layers with 211 parameters: 40 test samples, 60 to train, 3 classes, "
        f"accuracy {found.accuracy:.1%}"
    )
    assert f"CK τ_K {found.explanations[-1].faithfulness.tau:.3f}" in repr(found)
    assert max(len(repr(v)) for v in (found, *found.explanations)) < 300
    assert "tensor" not in repr((found, found.explanations))


def test_a_faithful_kernel_is_found_faithful_and_the_trace_more_than_noise(found: Decisions) -> None:
    """All five of a trained network follow it; of another network's labels they would not."""
    for view in found.explanations:
        assert view.faithfulness.tau > 0.3
        assert abs(view.faithfulness.tad) < 0.2
    model = trained()
    (x, y), (z, y_z) = data()
    shuffled = y[torch.randperm(N, generator=torch.Generator().manual_seed(0))]
    astray = explain(model, (x, shuffled), (z, y_z), kernels=["trNTK"]).explanations[0].faithfulness
    assert astray.tau < found.explanations[0].faithfulness.tau - 0.2


def test_the_correct_class_is_explained_even_where_the_network_thinks_least_of_it() -> None:
    model, (train, (z, _)) = trained(), data()
    order = model(z).detach().argsort(1, descending=True)
    got = explain(model, train, (z, order[:, 2]), kernels=["CK"]).explanations[0]
    assert torch.equal(got.attribution.outputs, order[:, [0, 2]])
    near(got.attribution.totals, got.logits.gather(1, order[:, [0, 2]]), 1e-11)


def test_reg_is_a_factor_on_the_default(found: Decisions) -> None:
    other = explain(trained(), *data(), kernels=["CK"], reg_factor=50.0).explanations[0]
    assert other.surrogate.reg == pytest.approx(50 * found.explanations[-1].surrogate.reg)
    _, cross, surrogate = by_hand(kernels(trained())["CK"], 50.0)
    near(other.logits, surrogate.logits(cross), 1e-6)


def test_memory_and_progress_change_no_figure(found: Decisions) -> None:
    alike(explain(trained(), *data(), memory="1MB"), found, 1e-6)


def test_grams_in_a_store_give_the_same_figures_and_are_there_the_second_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, given = trained(), (*data(), {"kernels": ["trNTK", "trNTK⁰", "CK"]})
    stored = explain(model, *given[:2], **given[2], store=tmp_path / "grams")
    alike(stored, explain(model, *given[:2], **given[2]), 1e-7)  # other solvers, which stream over tiles
    folders = sorted(p.name for p in (tmp_path / "grams").iterdir())
    assert len(folders) == 4, folders  # two kernels, cosines apart, with training and test samples
    made = [tg.open_gram(tmp_path / "grams" / name) for name in folders]
    assert {tuple(g.shape) for g in made} == {(N, N), (M, N)}
    missing: list[set[Any]] = []
    look = tg.gram.target.Stored.missing
    monkeypatch.setattr(tg.gram.target.Stored, "missing", lambda self: missing.append(look(self)) or missing[-1])
    alike(explain(model, *given[:2], **given[2], store=tmp_path / "grams"), stored)
    assert missing == [set()] * 4
    with pytest.raises(InputError, match="no folder of this machine"):
        explain(trained(), *data(), store="memory://grams")


def test_columns_of_train_and_test_go_by_name(tmp_path: Path) -> None:
    (x, y), (z, w) = data(2)
    for file, v, t, names in (("train", x, y, "a,b,c,y"), ("test", z[:, [1, 0, 2]], w, "b,a,c,y")):
        lines = [f"{p},{q},{r},{'yes' if k else 'no'}" for (p, q, r), k in zip(v.tolist(), t.tolist(), strict=True)]
        (tmp_path / f"{file}.csv").write_text("\n".join([names, *lines]), encoding="utf-8")
    known = tg.datasets.csv(tmp_path / "train.csv", "y")
    model = trained(2).float()
    with pytest.raises(InputError, match="columns"):
        explain(model, known, tg.datasets.csv(tmp_path / "test.csv", "y"))
    got = explain(model, known, tg.datasets.csv(tmp_path / "test.csv", like=known), kernels=["CK"])
    want = explain(model, (x.float(), y), (z.float(), w), kernels=["CK"])
    assert got.accuracy == want.accuracy
    torch.testing.assert_close(got.logits, want.logits)


def test_two_runs_are_equal_and_leave_everything_as_it_was(found: Decisions) -> None:
    """To the bit; the model, the data and the random numbers are untouched."""
    model, (train, test) = trained(), data()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    copies = [v.clone() for v in (*train, *test)]
    state = torch.get_rng_state()
    again = explain(model, train, test)
    alike(again, found)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip((*train, *test), copies, strict=True))
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


# Which are shown.


def test_results_say_what_they_are_and_become_json(found: Decisions) -> None:
    first = found.explanations[0]
    everything = found.to_dict()
    assert everything["kernels"] == found.summary()["kernels"]
    assert everything["units"]["seconds"] == "s"
    assert len(json.dumps(everything)) < 10_000  # figures, not data
    for result in (first, first.surrogate, first.faithfulness, first.faithfulness.map, first.attribution):
        assert json.loads(json.dumps(result.to_dict()))["result"] == type(result).__name__
        assert "tensor" not in repr(result)
    tau, *_ = first.faithfulness.table().splitlines()[1:]
    assert f"{first.faithfulness.tau:.3f}" in tau


@pytest.mark.parametrize("samples", [1, 3, 9, M - 1, 500])
@pytest.mark.every(2)
def test_of_many_test_samples_so_many_are_shown_some_wrong_and_some_unfaithful(found: Decisions, samples: int) -> None:
    some = explain(trained(), *data(), kernels=["trNTK", "CK"], samples=samples)
    count, y = min(samples, M), data()[1][1]
    shown = some.shown
    assert len(shown) == count == some.facts["explained"]
    assert shown.tolist() == sorted(set(shown.tolist()))
    assert int(shown[0]) >= 0
    assert int(shown[-1]) < M
    if samples < M:
        wrong = (found.logits.argmax(1) != y).nonzero()[:, 0].tolist()
        assert len(wrong) > 3
        assert len(set(wrong) & set(shown.tolist())) >= min(samples // 3, len(wrong))
        ranks = [
            log_odds(z, y, outputs_are="logits").argsort().argsort()
            for z in (found.logits, some.explanations[0].logits)
        ]
        gap = (ranks[0] - ranks[1]).abs()
        worst = gap.sort(descending=True).values[: samples // 3]
        # As many of the least faithful, up to ties.
        assert samples < 3 or int((gap[shown] >= worst[-1]).sum()) >= samples // 3
    for view, whole in ((some.explanations[0], found.explanations[0]), (some.explanations[1], found.explanations[-1])):
        assert view.logits.shape == (M, 3)
        assert view.faithfulness.samples == M
        assert view.faithfulness.tau == whole.faithfulness.tau
        part = view.attribution
        for field in fields(Attribution):
            got, want = getattr(part, field.name), getattr(whole.attribution, field.name)[shown]
            torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-12, equal_nan=True, msg=field.name)


def test_which_are_shown_is_the_same_in_every_run() -> None:
    a, b = (explain(trained(), *data(), kernels=["CK"], samples=11).shown for _ in range(2))
    assert torch.equal(a, b)


def test_more_neighbours_than_training_samples_are_all_of_them() -> None:
    (x, y), test = data()
    few = explain(trained(), (x[:6], y[:6]), test, kernels=["CK"], neighbours=100, poisoned_train=torch.ones(6).bool())
    assert few.explanations[0].attribution.similar.shape == (M, 6)
    assert explain(trained(), (x[:4], y[:4]), test, kernels=["CK"], poisoned_train=torch.ones(4).bool()).explanations
    assert explain(trained(), *data(), kernels=["CK"], neighbours=3).explanations[0].attribution.helpful.shape == (
        M,
        2,
        3,
    )


# Forms of models and data.


class Squeezed(nn.Module):
    """One output without an axis of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[:, 0]


@pytest.mark.parametrize("squeezed", [False, True])
def test_a_model_with_one_output_has_two_classes(squeezed: bool) -> None:
    inner, (train, (z, y_z)) = trained(2, 1), data(2)
    model = Squeezed(inner).eval() if squeezed else inner
    one = explain(model, train, (z, y_z))
    out = inner(z).detach()[:, 0]
    near(one.logits, torch.stack([-out, out], 1) / 2, 1e-14)
    near(torch.softmax(one.logits, 1)[:, 1], torch.sigmoid(out), 1e-12)
    assert one.accuracy == float(((out > 0).long() == y_z).double().mean())
    assert [v.name for v in one.explanations] == ["trNTK", "trNTK⁰", "Em", "CK"]  # the pseudo kernel is the trace
    for view in one.explanations:
        assert view.attribution.outputs.sort(1).values.tolist() == [[0, 1]] * M
        assert float(view.attribution.totals.sum(1).abs().max()) < 1e-10  # −z/2 and z/2
    assert [v.name for v in explain(model, train, (z, y_z), kernels=["pNTK"]).explanations] == ["pNTK"]


def test_two_outputs_of_two_classes_are_explained_by_their_difference() -> None:
    model, (train, (z, y_z)) = trained(2), data(2)
    two = explain(model, train, (z, y_z), kernels=["trNTK"])
    out = model(z).detach()
    near(two.logits, out - out.mean(1, keepdim=True), 1e-13)
    assert two.accuracy == float((out.argmax(1) == y_z).double().mean())
    assert two.explanations[0].title == "cosine of the tangent kernel of the log-odds"


# What the outputs are: one network, written in several ways.


class Ends(nn.Module):
    """A network with something done to its outputs."""

    def __init__(self, inner: nn.Module, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.end = inner, end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.inner(x))


def difference(z: Tensor) -> Tensor:
    return z[:, 1:] - z[:, :1]


# Of a network with two logits, by what its outputs are.
TWO: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "two logits": ("logits", lambda z: z),
    "one logit": ("logits", difference),
    "sigmoid": ("probabilities", lambda z: torch.sigmoid(difference(z))),
    "softmax": ("probabilities", lambda z: torch.softmax(z, 1)),
    "log-softmax": ("log-probabilities", lambda z: z.log_softmax(1)),
    "squeezed": ("probabilities", lambda z: difference(z).sigmoid().squeeze(1)),
    "logsigmoid": ("log-probabilities", lambda z: F.logsigmoid(difference(z))),
    "sigmoid by hand": ("probabilities", lambda z: 1 / (1 + (-difference(z)).exp())),
    "softmax by hand": ("probabilities", lambda z: z.exp() / z.exp().sum(1, keepdim=True)),
    "log-softmax by hand": ("log-probabilities", lambda z: z - z.exp().sum(1, keepdim=True).log()),
    "0 and the logit": ("logits", lambda z: torch.cat([0 * z[:, :1], difference(z)], 1)),
}


def gradients(f: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> Tensor:
    """[n, p] by plain autograd, sample by sample."""
    rows = [torch.autograd.grad(f(x[i : i + 1]).sum(), list(model.parameters())) for i in range(len(x))]
    return torch.stack([torch.cat([g.flatten() for g in row]) for row in rows])


@pytest.fixture(scope="module")
def of_two() -> Decisions:
    return explain(trained(2), *data(2))


def agree(got: Decisions, want: Decisions, tolerance: float = 1e-8) -> None:
    """Every number that an explanation holds, but for the sentence that says what the outputs are."""
    for (path, a), (same, b) in zip(tensors(got), tensors(want), strict=True):
        assert path == same
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, equal_nan=True, msg=path)
    assert got.accuracy == want.accuracy
    for u, v in zip(got.explanations, want.explanations, strict=True):
        assert (u.name, u.title) == (v.name, v.title)
        for name in ("tau", "tad", "accuracy", "network_accuracy", "ties"):
            assert getattr(u.faithfulness, name) == getattr(v.faithfulness, name), name
        for name in ("pearson", "r2"):
            assert getattr(u.faithfulness, name) == pytest.approx(getattr(v.faithfulness, name), abs=tolerance), name
        assert torch.equal(u.attribution.similar, v.attribution.similar)
        assert torch.equal(u.attribution.helpful, v.attribution.helpful)


@pytest.mark.parametrize("form", TWO)
@pytest.mark.every(4)
def test_one_network_written_in_several_ways_has_one_explanation(form: str, of_two: Decisions) -> None:
    kind, end = TWO[form]
    got = explain(Ends(trained(2), end).eval(), *data(2), kernels=["trNTK", "CK"])
    assert got.outputs_are == kind
    views = tuple(v for v in of_two.explanations if v.name in ("trNTK", "CK"))
    agree(got, dataclasses.replace(of_two, explanations=views))


def test_that_explanation_is_the_one_made_by_hand(of_two: Decisions) -> None:
    """Accuracy, probabilities, the log-odds' gradients by plain autograd, their cosines, and what follows."""
    model, ((x, y), (z, y_z)) = trained(2), data(2)
    odds = difference(model(z)).detach()[:, 0]
    near(of_two.logits.softmax(1)[:, 1], 1 / (1 + (-odds).exp()), 1e-13)
    assert of_two.accuracy == float(((odds > 0) == (y_z == 1)).double().mean())
    left, right = (gradients(lambda v: difference(model(v)), model, v) for v in (z, x))
    a, b = (v / v.norm(dim=1, keepdim=True) for v in (left, right))
    for name, cross, K in (("trNTK⁰", left @ right.T, right @ right.T), ("trNTK", a @ b.T, b @ b.T)):
        view = next(v for v in of_two.explanations if v.name == name)
        near(view.attribution.similarity, cross.sort(1, descending=True).values[:, :8], 1e-10)
        K = (K + K.T) / 2
        surrogate = fit(K, y, reg=default_reg(K), progress=False)
        near(view.logits, surrogate.logits(cross), 1e-6)
        sign = 2.0 * y_z - 1
        want = scipy.stats.kendalltau(sign * odds, sign * difference(surrogate.logits(cross))[:, 0]).statistic
        assert view.faithfulness.tau == pytest.approx(want, abs=2e-3)
    assert [v.name for v in of_two.explanations] == ["trNTK", "trNTK⁰", "Em", "CK"]  # the pseudo kernel is the trace


@pytest.mark.parametrize(
    ("module", "kind"), [(nn.Softmax(1), "probabilities"), (nn.LogSoftmax(1), "log-probabilities")], ids=["p", "log p"]
)
@pytest.mark.every(2)
def test_three_classes_and_a_last_module_agree_with_the_logits_in_every_kernel(
    found: Decisions, module: nn.Module, kind: str
) -> None:
    for model in (nn.Sequential(trained(), module), nn.Sequential(*trained(), module)):
        got = explain(model.eval(), *data())
        agree(got, found)
        assert (got.outputs_are, "it ends in" in got.outputs_said) == (kind, True)


def test_of_probabilities_alone_the_logits_are_centred_and_have_no_sum(found: Decisions) -> None:
    """Softmax forgets a shift of a sample's logits: where nobody sees what goes into it, this is left out, and said."""
    (x, y), (z, y_z) = data()
    end = TWO["softmax by hand"][1]
    got = explain(Ends(trained(), end).eval(), (x, y), (z, y_z))
    near(got.logits, found.logits - found.logits.mean(1, keepdim=True), 1e-12)
    assert [v.name for v in got.explanations] == ["trNTK", "trNTK⁰", "Em", "CK"]
    assert "known but for their mean" in got.outputs_said
    assert got.explanations[0].title == "cosine of the tangent kernel's trace over centred logits"
    model = trained()
    kernel = tg.trace_ntk(model, outputs=lambda out: out - out.mean(1, keepdim=True))
    near(
        got.explanations[1].attribution.similarity, kernel(z, x).detach().sort(1, descending=True).values[:, :8], 1e-10
    )
    with pytest.raises(
        InputError, match="pNTK is the kernel of the logits' sum, which .* do not tell. Give the network"
    ):
        explain(Ends(trained(), end).eval(), (x, y), (z, y_z), kernels=["CK", "pNTK"])


def test_a_saturated_network_is_explained_by_what_goes_into_its_last_function() -> None:
    """Its probabilities are 0 and 1 to the last bit; its logits are not."""
    (x, y), (z, y_z) = data(2)
    inner = trained(2)
    with torch.no_grad():
        inner[-1].weight *= 300
    want = explain(inner, (x, y), (z, y_z), kernels=["trNTK"])
    for name in ("sigmoid", "softmax"):
        model = Ends(inner, TWO[name][1]).eval()
        assert bool((model(z) == 1).any())
        agree(explain(model, (x, y), (z, y_z), kernels=["trNTK"]), want)
    by_hand = TWO["sigmoid by hand"][1]
    for end in (by_hand, lambda z: torch.cat([1 - by_hand(z), by_hand(z)], 1).log()):
        with pytest.raises(InputError, match="have a probability of exactly 0 or 1: it has rounded.*without its last"):
            explain(Ends(inner, end).eval(), (x, y), (z, y_z), kernels=["trNTK"])


def test_probabilities_that_lose_their_digits_near_one_are_warned_of() -> None:
    (x, y), (z, y_z) = data(2)
    inner, by_hand = trained(2, 1), lambda f: 1 / (1 + (-f).exp())
    most = 33 / float(inner(torch.cat([x, z])).detach().max())
    with pytest.warns(TangencyWarning, match="so near 1 that rounding leaves its logit fewer than two digits"):
        explain(Ends(inner, lambda f: by_hand(most * f)).eval(), (x, y), (z, y_z), kernels=["CK"])


def clamped(low: float) -> Callable[[Tensor], Tensor]:
    return lambda f: torch.sigmoid(f).clamp(low, 1 - low)


def test_clamped_probabilities_are_refused_with_their_number() -> None:
    """Their gradients are 0 and their log-odds all one: tau of trNTK⁰ would be a number without a meaning."""
    (x, y), (z, y_z) = data(2)
    inner = trained(2, 1)
    for low in (0.1, 0.02):
        p = torch.sigmoid(inner(x)).detach()
        few = int(((p <= low) | (p >= 1 - low)).sum())
        assert 1 < few < N
        for kernel in ("trNTK", "trNTK⁰", "CK"):
            with pytest.raises(
                InputError, match=f"{few} of 60 training samples have .*clamped or rounded.*without its"
            ):
                explain(Ends(inner, clamped(low)).eval(), (x, y), (z, y_z), kernels=[kernel])
    inside = ((p > low) & (p < 1 - low))[:, 0]  # of the test samples alone
    with pytest.raises(InputError, match="test samples have a probability of exactly 0.02 or 0.98 that the network's"):
        explain(Ends(inner, clamped(low)).eval(), (x[inside], y[inside]), (z, y_z), kernels=["CK"])
    for end in (lambda v: v.softmax(1).clamp_min(1e-3), lambda v: (1000 * v.softmax(1)).round().clamp_min(1) / 1000):
        model = Ends(trained(3), end).eval()
        few = int((model(data(3)[0][0]) == 1e-3).any(1).sum())
        assert 1 < few < N
        with pytest.raises(InputError, match=f"{few} of 60 training samples have a probability of exactly 0.001"):
            explain(model, *data(3), kernels=["CK"])


def test_equal_samples_with_the_largest_probability_are_not_taken_for_clamped() -> None:
    (x, y), (z, y_z) = data(2)
    inner = trained(2, 1)
    order = inner(x)[:, 0].argsort()
    x, y = x[order][[0, 0, *range(N), N - 1]], y[order][[0, 0, *range(N), N - 1]]
    by_hand = Ends(inner, lambda f: 1 / (1 + (-f).exp())).eval()
    assert int((by_hand(x) == by_hand(x).max()).sum()) > 1
    got, want = (explain(model, (x, y), (z, y_z), kernels=["trNTK"]) for model in (by_hand, inner))
    near(got.explanations[0].logits, want.explanations[0].logits, 1e-6)


def test_samples_without_a_cosine_are_counted() -> None:
    """Logits that are clamped have no gradients."""
    (x, y), (z, y_z) = data(2)
    model = Ends(trained(2, 1), lambda f: f.clamp(-1, 1)).eval()
    few = int((model.inner(x).abs() > 1).sum())
    assert 1 < few < N
    with pytest.raises(
        InputError, match=f"k.x, x. is not positive for {few} of 60 training samples .the first is sample"
    ):
        explain(model, (x, y), (z, y_z), kernels=["trNTK"])


# A network whose classes are in another order than the data's: how many classes and outputs, how it ends, the order.
ORDERS: dict[str, tuple[int, int, Callable[[Tensor], Tensor], str]] = {
    "sign": (2, 1, lambda f: torch.sigmoid(-f), r"0 for 1, 1 for 0"),
    "p, 1 − p": (2, 1, lambda f: torch.cat([torch.sigmoid(f), 1 - torch.sigmoid(f)], 1), r"0 for 1, 1 for 0"),
    "flipped": (2, 2, lambda z: z.flip(1), r"0 for 1, 1 for 0"),
    "rolled": (3, 3, lambda z: z.roll(1, 1), r"0 for 2, 1 for 0, 2 for 1"),
}


@pytest.mark.parametrize("name", ORDERS)
def test_classes_in_another_order_are_warned_of(name: str) -> None:
    classes, outputs, end, order = ORDERS[name]
    train, test = data(classes)
    inner = trained(classes, outputs)
    share = tg.models.accuracy(inner, *train)
    with pytest.warns(
        TangencyWarning, match=f"in another order of the classes {share:.1%} .{order}.*number the labels"
    ):
        got = explain(Ends(inner, end).eval(), train, test, kernels=["CK"])
    assert got.accuracy < 0.3
    assert "in another order of the classes" in got.outputs_said


def test_a_network_that_is_wrong_in_no_order_is_not_doubted() -> None:
    (x, y), test = data(2)
    order = torch.randperm(N, generator=torch.Generator().manual_seed(0))
    explain(trained(2), (x, y[order]), test, kernels=["CK"])
    constant = Ends(trained(2), lambda z: z * 0.01 - torch.tensor([0.0, 9.0], dtype=F64)).eval()  # says 0 of all
    explain(constant, (x, (y > -1).long() - (torch.arange(N) < 3).long()), test, kernels=["CK"])


@pytest.mark.parametrize("factor", [0.998, 1.002])
def test_rows_that_sum_to_nearly_one_are_probabilities(found: Decisions, factor: float) -> None:
    got = explain(Ends(trained(), lambda z: factor * z.softmax(1)).eval(), *data(), kernels=["CK"])
    assert got.outputs_are == "probabilities"
    assert got.explanations[0].faithfulness.tau == found.explanations[-1].faithfulness.tau


# By name, how a network with one logit (three for "sigmoids") ends, what that is taken for, and what is said.
DOUBTS: dict[str, tuple[Callable[[Tensor], Tensor], str, str]] = {
    "line": (lambda f: 0.75 + 0.02 * f, "probabilities", "right, as a logit .*: say outputs_are='logits' or"),
    "regression": (lambda f: 0.5 + 0.09 * f, "logits", "trained towards 0 and 1, give .* with ½ taken from"),
    "log p": (lambda f: -(1 + (-f).exp()).log(), "logits", "say outputs_are='log-probabilities'"),
    "sigmoids": (torch.sigmoid, "logits", "between 0 and 1 but their rows do not sum to 1: if they are sigmoids"),
    "logsigmoids": (F.logsigmoid, "logits", "made by sigmoids or their logarithms: if they are sigmoids, each of its"),
    "nearly": (lambda z: 0.95 * z.softmax(1), "logits", "rows nearly sum to 1: if they are probabilities, give a net"),
}


@pytest.mark.parametrize("name", DOUBTS)
@pytest.mark.every(2)
def test_where_the_numbers_leave_doubt_a_warning_says_what_was_taken_and_how_to_decide(name: str) -> None:
    end, kind, message = DOUBTS[name]
    classes = 3 if name in ("sigmoids", "logsigmoids", "nearly") else 2
    model = Ends(trained(classes, 3 if classes == 3 else 1), end).eval()
    with pytest.warns(TangencyWarning, match=message) as caught:
        got = explain(model, *data(classes), kernels=["CK"])
    assert got.outputs_are == kind
    assert str(caught[0].message) == got.outputs_said
    decided = explain(model, *data(classes), kernels=["CK"], outputs_are=kind)  # without a warning
    near(decided.logits, got.logits, 1e-14)
    assert "as outputs_are says" in decided.outputs_said


def test_what_outputs_are_may_be_given() -> None:
    (x, y), (z, y_z) = data(2)
    inner = trained(2, 1)
    sigmoid = Ends(inner, torch.sigmoid).eval()
    as_logit = explain(sigmoid, (x, y), (z, y_z), kernels=["trNTK"], outputs_are="logits")
    near(as_logit.logits[:, 1], torch.sigmoid(inner(z)).detach()[:, 0] / 2, 1e-14)
    kernel = tg.cosine(tg.trace_ntk(sigmoid))(z, x).detach()
    near(as_logit.explanations[0].attribution.similarity, kernel.sort(1, descending=True).values[:, :8], 1e-10)
    log_p = Ends(inner, DOUBTS["log p"][0]).eval()
    got = explain(log_p, (x, y), (z, y_z), kernels=["trNTK"], outputs_are="log-probabilities")
    agree(got, explain(inner, (x, y), (z, y_z), kernels=["trNTK"]))
    shifted = Ends(inner, lambda f: torch.sigmoid(f) * (1 + 9 * (f.shape[0] == M))).eval()  # more than 1 on the tests
    for model, given, message in (
        (
            inner,
            "probabilities",
            r"taken for probabilities, but on the training samples they go from -\d.*numbers from 0 to 1",
        ),
        (
            inner,
            "log-probabilities",
            "taken for log-probabilities, but .*needed: numbers up to 0. Say outputs_are='logits'",
        ),
        (trained(2), "probabilities", "rows of them sum to .* up to .*needed: rows of at least 0 that sum to 1"),
        (
            trained(2),
            "log-probabilities",
            "rows of their exponentials sum to .*needed: logarithms of rows of at least 0 that sum to 1",
        ),
        (inner, "probs", "outputs_are='probs'; needed: 'logits', 'probabilities' or 'log-probabilities'"),
        (shifted, None, "taken for probabilities, but on the test samples they go from"),
    ):
        with pytest.raises(InputError, match=message):
            explain(model, (x, y), (z, y_z), kernels=["CK"], outputs_are=given)


def test_a_softmax_that_makes_no_probabilities_of_a_sample_is_none() -> None:
    """Over the samples, in the middle, or of one output: the numbers decide, not the name of a function."""
    x = torch.randn(5, 3)
    for end, want in (
        (lambda z: z.softmax(0), None), (lambda z: 3 * z.softmax(1), None), (lambda z: z, None),
        (lambda z: z.softmax(1)[:, [2, 0, 1]], None), (lambda z: z.softmax(1)[:, :2], None),
        (lambda z: z.softmax(1).reshape(-1, 3), "softmax"),
    ):  # fmt: skip
        assert heads.ending(Ends(nn.Linear(3, 3), end), x) == want
    one = heads.read(torch.ones(9, 1), torch.arange(9) % 2, None, "softmax")
    assert (one.kind, one.ending) == ("probabilities", None)


def test_kernels_that_are_given_are_taken_as_they_are_and_logits_can_be_had_for_them(of_two: Decisions) -> None:
    train, test = data(2)
    model = Returning(Ends(trained(2), TWO["softmax"][1]), Plain).eval()
    before, modes = {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]
    module = tg.decisions.logits_of(model, train)
    made = {"mine": tg.cosine(tg.trace_ntk(module)), "other": tg.trace_ntk(model)}
    got = explain(model, train, test, kernels=made)
    near(got.explanations[0].logits, of_two.explanations[0].logits, 1e-8)
    assert (
        float((got.explanations[1].logits - of_two.explanations[1].logits).abs().max()) > 0.1
    )  # p(1 − p) times another
    assert "Kernels were given, and are taken as they are; tg.decisions.logits_of" in got.outputs_said
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert [m.training for m in model.modules()] == modes


class Pooled(nn.Module):
    """Adds over the positions of a sample: the order in which they come matters to rounding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).sum(1))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_ties_that_rounding_would_break_are_ties_in_both_precisions(dtype: torch.dtype) -> None:
    """Each test sample comes in four orders of its positions; τ by hand is of the means of the four."""
    generator = torch.Generator().manual_seed(1)
    model = initialized(Pooled, seed=0).double()
    some, x = (torch.randn(n, 9, 2, dtype=F64, generator=generator) for n in (30, 60))
    z = torch.stack([each[torch.randperm(9, generator=generator)] for each in some for _ in range(4)])
    noise = 0.3 * torch.randn(90, 3, dtype=F64, generator=generator)
    y, y_z = (model(x) + noise[:60]).argmax(1), (model(some) + noise[60:]).argmax(1).repeat_interleave(4)
    got = explain(model.to(dtype), (x.to(dtype), y), (z.to(dtype), y_z), kernels=["trNTK", "CK"])
    for view in got.explanations:
        odds = [v.gather(1, y_z[:, None])[:, 0] for v in (got.logits, view.logits)]
        others = [v.scatter(1, y_z[:, None], -torch.inf).exp().sum(1).log() for v in (got.logits, view.logits)]
        odds = [(a - b).reshape(30, 4) for a, b in zip(odds, others, strict=True)]
        assert any(bool((v != v[:, :1]).any()) for v in odds)  # rounding did part them
        means = [v.mean(1).repeat_interleave(4) for v in odds]
        want = scipy.stats.kendalltau(*means).statistic
        assert view.faithfulness.tau == pytest.approx(want, abs=1e-12)
        assert abs(scipy.stats.kendalltau(*(v.flatten() for v in odds)).statistic - want) > 1e-3
        assert view.faithfulness.ties == torch.finfo(dtype).eps ** 0.5


# Forms of inputs.


# Kernels that a model does not have.


def centred(z: Tensor) -> Tensor:
    return z - z.mean(1, keepdim=True)


def balanced_last(model: nn.Sequential) -> nn.Sequential:
    """The same with a last layer whose rows sum to 0, as weight decay makes them."""
    with torch.no_grad():
        for p in model[-1].parameters():
            p -= p.mean(0)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_a_sum_of_outputs_that_cancels_is_no_dependence_on_the_batch(dtype: torch.dtype) -> None:
    """What is left is rounding; the gradients of the sum are not, or they are 0."""
    x = data(dtype=dtype)[0][0][:12]
    model = balanced_last(trained()).to(dtype)
    assert float(model(x).sum(1).detach().abs().max()) < 100 * torch.finfo(dtype).eps
    got = tg.compute(tg.pseudo_ntk(model), x, progress=False).dense()
    exact = copy.deepcopy(model).double()
    g = gradients(lambda v: exact(v).sum(1) / 3**0.5, exact, x.double())
    near(got.double(), g @ g.T, 1e-5 if dtype == torch.float32 else 1e-12)
    for end in (centred, lambda z: torch.softmax(z, 1)):
        ended = Ends(trained().to(dtype), end).eval()
        size = tg.compute(tg.trace_ntk(ended), x, progress=False).diag().max()
        none = tg.compute(tg.pseudo_ntk(ended), x, progress=False).dense()
        assert float(none.abs().max()) <= 1e4 * torch.finfo(dtype).eps ** 2 * float(size)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("part", [1e-2, 1e-5])
def test_a_dependence_on_the_batch_is_found_in_a_sum_that_cancels_otherwise(dtype: torch.dtype, part: float) -> None:
    x = data(dtype=dtype)[0][0][:12]
    inner = trained().to(dtype)
    mixing = Ends(inner, lambda z: centred(z) + part * z.mean(0)).eval()
    by_head = tg.head_ntk(Ends(inner, centred).eval(), lambda out: out.sum(1) + part * (out - out.mean(0))[:, 0])
    for kernel in (tg.pseudo_ntk(mixing), by_head):
        with pytest.raises(ModelError, match="depends on the other samples of the batch"):
            tg.compute(kernel, x, progress=False)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("centred", torch.float32), ("centred", F64), ("softmax twice", F64), ("softmax as logits", torch.float32)],
)
@pytest.mark.every(2)
def test_a_pseudo_kernel_that_vanishes_is_left_out_and_why_is_said(name: str, dtype: torch.dtype) -> None:
    ends = {"centred": centred, "softmax twice": lambda z: z.softmax(1).softmax(1)}
    model = Ends(trained().to(dtype), ends.get(name, lambda z: z.softmax(1))).eval()
    options: dict[str, Any] = {"outputs_are": "logits"} if name == "softmax as logits" else {}
    got = explain(model, *data(dtype=dtype), **options)
    assert [v.name for v in got.explanations] == ["trNTK", "trNTK⁰", "Em", "CK"]
    assert "pNTK is left out: the outputs of a sample have the same sum whatever" in got.outputs_said
    assert got.outputs_said in got.table()
    with pytest.raises(InputError, match="kernel pNTK: the outputs of a sample have the same sum.*Name other kernels"):
        explain(model, *data(dtype=dtype), kernels=["CK", "pNTK"], **options)


def test_a_pseudo_kernel_of_a_last_layer_whose_rows_cancel_is_kept() -> None:
    """Its outputs sum to 0, and its gradients do not vanish."""
    got = explain(balanced_last(trained()), *data())
    assert [v.name for v in got.explanations] == FIVE
    near(got.explanations[2].logits, got.explanations[4].logits, 1e-6)  # it is the last hidden layer


class Bare(nn.Module):
    """Parameters without layers; with `hidden` two of them, else one number for each feature."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(*((3, 8) if hidden else (3,)), generator=generator, dtype=F64))
        self.v = nn.Parameter(torch.randn(8, 3, generator=generator, dtype=F64)) if hidden else None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.w if self.v is None else torch.tanh(x @ self.w) @ self.v


@pytest.mark.parametrize(
    ("make", "missing"),
    [
        (lambda: nn.Linear(3, 3), ["Em"]),
        (lambda: nn.Sequential(nn.Linear(3, 3)), ["Em"]),
        (lambda: Bare(hidden=True), ["Em"]),
        (lambda: Bare(hidden=False), ["Em", "CK"]),
    ],
    ids=["linear", "in a sequence", "parameters", "numbers"],
)
@pytest.mark.every(3)
def test_models_without_hidden_layers_are_explained_without_their_kernels(
    make: Callable[[], nn.Module], missing: list[str]
) -> None:
    names, model = [name for name in FIVE if name not in missing], initialized(make, seed=0).double()
    tg.models.fit(model, *data()[0], epochs=10, batch=20, progress=False)
    got = explain(model, *data())
    agree(got, explain(model, *data(), kernels=names))
    assert [v.name for v in got.explanations] == names
    reasons = {"Em": "this model has no modules before its last", "CK": "no linear or convolutional layer was found"}
    for name in missing:
        assert f"{name} is left out: {reasons[name]}" in got.outputs_said
        with pytest.raises(InputError, match=f"kernel {name}: {reasons[name]}.*Name other kernels"):
            explain(model, *data(), kernels=[name])


class Parts(nn.Module):
    """Takes its input in two parts, and a flag."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.inner(torch.cat([a, b], 1))


def test_inputs_may_be_tuples_and_dicts() -> None:
    model, ((x, y), (z, y_z)) = trained(), data()
    names = ["trNTK", "pNTK", "Em", "CK"]
    whole = explain(model, (x, y), (z, y_z), kernels=names)
    for form in (lambda v: (v[:, :1], v[:, 1:]), lambda v: {"a": v[:, :1], "b": v[:, 1:]}):
        got = explain(Parts(model).eval(), (form(x), y), (form(z), y_z), kernels=names)
        near(got.logits, whole.logits, 1e-12)
        for view, want in zip(got.explanations, whole.explanations, strict=True):
            near(view.logits, want.logits, 1e-6)
            assert torch.equal(view.attribution.similar, want.attribution.similar)


class Returning(nn.Module):
    """Returns something around its logits."""

    def __init__(self, inner: nn.Module, form: Any) -> None:
        super().__init__()
        self.inner, self.form = inner, form

    def forward(self, x: Tensor) -> Any:
        return self.form(self.inner(x))


@dataclass
class Plain:
    """What some models return: an attribute, and nothing else."""

    logits: Tensor


def model_output(logits: Tensor) -> Any:
    from transformers.modeling_outputs import SequenceClassifierOutput

    return SequenceClassifierOutput(logits=logits)


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "hf": model_output,
    "plain": Plain,
    "space": lambda z: SimpleNamespace(logits=z),
    "dict": lambda z: {"logits": z, "hidden": 2 * z},
    "one key": lambda z: {"scores": z},
    "tuple of one": lambda z: (z,),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.every(3)
def test_a_model_may_return_something_with_logits(found: Decisions, form: Any) -> None:
    got = explain(Returning(trained(), form).eval(), *data(), kernels=["trNTK", "pNTK"])
    near(got.logits, found.logits, 1e-14)
    for view, want in zip(got.explanations, found.explanations[:3:2], strict=True):
        assert view.name == want.name
        near(view.logits, want.logits, 1e-6)


def test_kernels_may_be_given_by_name_or_as_they_are(found: Decisions) -> None:
    model = trained()
    made = {
        "sum": tg.sum(tg.cosine(tg.trace_ntk(model)), tg.cosine(tg.conjugate_kernel(model))),
        "mine": tg.scale(tg.head_ntk(model, (0, 1)), 3.0),
        "CK": tg.cosine(tg.conjugate_kernel(model)),
        "last layer": tg.cosine(tg.trace_ntk(model, trainable=list(model)[-1])),
    }
    got = explain(model, *data(), kernels=made)
    assert [v.name for v in got.explanations] == list(made)
    assert [v.title for v in got.explanations] == ["sum", "mine", decisions.TITLES["CK"], "last layer"]
    for view, kernel in zip(got.explanations, made.values(), strict=True):
        _, cross, surrogate = by_hand(kernel)
        near(view.logits, surrogate.logits(cross), 1e-6)
    near(got.explanations[2].logits, found.explanations[4].logits, 1e-9)
    for names in (["CK", "trNTK"], ("CK", "trNTK", "CK"), [" CK", "trNTK "]):
        assert [v.name for v in explain(model, *data(), kernels=names).explanations] == ["CK", "trNTK"]
    assert list(kernels(model, ["trNTK0"])) == ["trNTK⁰"]
    five = kernels(model)
    assert five["trNTK"].kernel is five["trNTK⁰"]  # one computation for both


def test_data_may_be_labelled_arrays_and_pairs(found: Decisions) -> None:
    model, ((x, y), (z, y_z)) = trained(), data()
    names = ("low", "middle", "high")
    got = explain(
        model, Labelled(x, y, names, name="clouds train"), Labelled(z, y_z, names, name="clouds test"), kernels=["CK"]
    )
    near(got.explanations[0].logits, found.explanations[-1].logits, 1e-9)
    assert got.train.classes == got.test.classes == names
    assert got.facts["data"] == "clouds"
    got = explain(model, (x.numpy(), y.tolist()), (z.numpy(), y_z.numpy()), kernels=["CK"])
    near(got.explanations[0].logits, found.explanations[-1].logits, 1e-9)
    # The test set need not have every class.
    assert explain(model, (x, y), (z[y_z < 2], y_z[y_z < 2]), kernels=["CK"]).test.classes == ("0", "1", "2")


def test_pictures_through_a_network_with_norms_and_dropout_are_explained_in_evaluation_mode() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 3)
    ).double()  # fmt: skip
    x, y = torch.rand(50, 1, 6, 6, dtype=F64), torch.arange(50) % 3
    model(x)  # statistics
    with pytest.raises(ModelError, match=r"Dropout layer '3' is in training mode, so .*Call model.eval\(\) first"):
        explain(model, (x[:30], y[:30]), (x[30:], y[30:]))
    model[3].eval()
    with pytest.raises(ModelError, match=r"layer '1' uses the statistics of the batch.*Call model.eval\(\) first"):
        explain(model, (x[:30], y[:30]), (x[30:], y[30:]))
    model.eval()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    got, again = (explain(model, (x[:30], y[:30]), (x[30:], y[30:])) for _ in range(2))
    alike(got, again)
    near(got.logits, model(x[30:]).detach(), 1e-13)
    assert [v.name for v in got.explanations] == FIVE
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not any(m.training for m in model.modules())


def test_single_precision_says_the_same_to_its_digits(found: Decisions) -> None:
    """A model and data in float32: the surrogate is fitted in float64 all the same."""
    got = explain(trained().float(), *data(dtype=torch.float32))
    for view, want in zip(got.explanations, found.explanations, strict=True):
        assert view.surrogate.coefficients.dtype == F64
        assert view.logits.dtype == F64
        near(view.logits, want.logits, 5e-2)
        assert view.faithfulness.tau == pytest.approx(want.faithfulness.tau, abs=0.03)


def test_data_of_another_type_come_to_the_models() -> None:
    for model, kind, own in ((trained(), torch.float32, F64), (trained().float(), F64, torch.float32)):
        given = data(dtype=kind)
        got = explain(model, *given, kernels=["CK"])
        want = explain(model, *((x.to(own), y) for x, y in given), kernels=["CK"])
        assert torch.equal(got.logits, want.logits)


def test_frozen_parameters_do_not_matter_to_kernels_of_hidden_layers(found: Decisions) -> None:
    """Only tangent kernels need parameters that count."""
    model = trained().requires_grad_(False)
    got = explain(model, *data(), kernels=["Em", "CK"])
    near(got.explanations[1].logits, found.explanations[4].logits, 1e-9)
    with pytest.raises(InputError, match="every parameter is frozen"):
        explain(model, *data(), kernels=["trNTK"])


def test_inputs_that_require_gradients_leave_none_in_the_result() -> None:
    (x, y), (z, y_z) = data()
    got = explain(trained(), (x.requires_grad_(), y), (z.requires_grad_(), y_z), kernels=["trNTK", "CK"])
    for path, v in tensors(got):
        assert not v.requires_grad or path.startswith((".train.x", ".test.x", ".train.show", ".test.show")), path


# Poison.


def test_masks_of_poisoned_samples_flag_test_samples_by_their_neighbours() -> None:
    (x, y), (z, y_z) = data()
    train_mask, test_mask = torch.arange(N) % 3 == 0, torch.arange(M) % 2 == 0
    got = explain(trained(), (x, y), (z, y_z), poisoned_train=train_mask, poisoned_test=test_mask, samples=7)
    assert torch.equal(got.poisoned_train, train_mask)
    assert torch.equal(got.poisoned_test, test_mask)
    for view in got.explanations:
        _, cross, _ = by_hand(kernels(trained())[view.name])
        want = [sum(bool(train_mask[i]) for i in row.argsort(descending=True)[:5]) >= 3 for row in cross]
        assert view.flagged.tolist() == want
        assert torch.equal(view.flagged, flag(cross, train_mask)[1])
        assert 0 < sum(want) < M
    alone = explain(trained(), (x, y), (z, y_z), poisoned_test=test_mask.numpy(), kernels=["CK"])
    assert alone.explanations[0].flagged is None
    assert torch.equal(alone.poisoned_test, test_mask)


def test_chance_is_the_range_over_shuffled_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as is said, each time in another order; what did not converge counts with what it has."""
    (x, y), (z, y_z) = data()
    K, cross = (tg.linalg.matrix.between(v.double()) for v in (x @ x.T, z @ x.T))
    network = torch.randn(M, 3, dtype=F64)
    odds = log_odds(network, y_z, outputs_are="logits")
    orders, taus = [], []

    def counted(part: Tensor, labels: Tensor, **options: Any) -> Any:
        orders.append(labels)
        surrogate = fit(part, labels, **options)
        taus.append(float(kendall(odds, log_odds(surrogate.logits(z @ x.T), y_z, outputs_are="logits"))))
        if len(orders) == 2:
            raise tg.DidNotConverge("enough", solution=surrogate)
        return surrogate

    monkeypatch.setattr(chance, "fit", counted)
    for shuffles in (9, 3):
        monkeypatch.setattr(chance, "SHUFFLES", shuffles)
        orders.clear()
        taus.clear()
        found = chance.shuffled(K, cross, network, y, y_z)
        assert len({tuple(order.tolist()) for order in orders}) == shuffles
        assert all(torch.equal(order.bincount(), y.bincount()) for order in orders)
        assert (found.low, found.high) == pytest.approx((min(taus), max(taus)))


# What is left behind.


def test_a_kernel_and_its_cosine_share_one_gram_and_none_outlives_its_last_use(
    monkeypatch: pytest.MonkeyPatch, found: Decisions
) -> None:
    made: list[weakref.ref[tg.Gram]] = []
    alive: list[int] = []
    real = compared.compute

    def counted(*args: Any, **options: Any) -> tg.Gram:
        gc.collect()
        alive.append(sum(r() is not None for r in made))
        gram = real(*args, **options)
        made.append(weakref.ref(gram))
        return gram

    monkeypatch.setattr(compared, "compute", counted)
    got = explain(trained(), *data())
    assert len(made) == 8  # two for each of four kernels; the trace's serve its cosine as well
    assert max(alive) <= 1  # when the next begins, nothing but its own first half is there
    gc.collect()
    assert not any(r() is not None for r in made)
    alike(got, found)


@pytest.mark.slow
def test_the_result_holds_no_gram_nor_anything_of_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even behind a view: the memory that each tensor keeps alive is counted."""
    monkeypatch.setattr(explained, "PICTURE_ROWS", 12)
    (x, y), (z, y_z) = data()
    got = explain(trained(), (x, y), (z, y_z), samples=20, poisoned_train=y == 1)
    seen = dict(tensors(got))
    assert ".explanations[0].picture" in seen
    assert ".explanations[4].attribution.boxes" in seen
    for path, v in seen.items():
        assert v.untyped_storage().nbytes() < 4 * N * M, path
        assert v.device.type == "cpu"
        assert not v.requires_grad, path


@pytest.mark.parametrize(("size", "classes"), [(12, 3), (30, 20), (45, 20), (59, 3)])
def test_the_picture_of_a_large_gram_has_an_equal_part_of_each_class(
    size: int, classes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most so many rows, first come; each entry is that of the Gram."""
    monkeypatch.setattr(explained, "PICTURE_ROWS", size)
    x, y = torch.randn(N, 3, dtype=F64), torch.arange(N) % classes
    model = mlp([3, 8, classes], nn.Tanh).double()
    view = explain(model, (x, y), (x[:9], y[:9]), kernels=["CK"]).explanations[0]
    assert view.picture.shape == (int(view.spans.sum()),) * 2
    K = tg.cosine(tg.conjugate_kernel(model))(x).detach()
    rows = torch.cat([(y == c).nonzero()[: int(k), 0] for c, k in enumerate(view.spans)])
    near(view.picture, K[rows][:, rows], 1e-6)
    share = view.spans / torch.bincount(y)
    assert float(share.max() - share.min()) <= 1 / (N // classes) + 1e-6
    assert len(view.picture) <= size


# Asked in a wrong way.

(X, Y), (Z, Y_Z) = data()
NET = initialized(lambda: mlp([3, 4, 3]), seed=0).double()


def spoiled(x: Tensor, value: float) -> Tensor:
    x = x.clone()
    x[5, 1] = value
    return x


REFUSED: list[tuple[Any, Any, Any, dict[str, Any], str]] = [
    (lambda v: v, (X, Y), (Z, Y_Z), {}, "model is a function; needed: a torch.nn.Module"),
    (NET, X, (Z, Y_Z), {}, r"train is a Tensor; needed: \(x, y\)"),
    (NET, (X, Y), (Z, Y_Z, Y_Z), {}, r"test is a tuple of 3; needed: \(x, y\)"),
    (NET, (X, Y - 1), (Z, Y_Z), {}, r"train: y\[\d+\] is -1; needed: .*Number them"),
    (NET, (X, Y), (Z, Y_Z + 1), {}, r"test: y\[\d+\] is 3; needed: labels from 0 to 2"),
    (NET, (X, Y.double()), (Z, Y_Z), {}, "train: y is torch.float64; needed: integers from 0"),
    (NET, (X, Y[:9]), (Z, Y_Z), {}, "train: x has 60 samples, y has 9; needed: one label for each"),
    (NET, (X, Y), (Z[:, :2], Y_Z), {}, r"a training sample has the shape x \[3\], a test sample x \[2\]; needed"),
    (NET, (X, Y), ({"x": Z}, Y_Z), {}, r"a training sample has the shape x \[3\], a test sample x\['x'\] \[3\]"),
    (NET, (X, 2 * (Y > 0)), (Z, 0 * Y_Z), {}, r"the training set has no sample of 1\. Leave the class out of both"),
    (NET, (X, 0 * Y), (Z, 0 * Y_Z), {}, r"there is one class only \('0'\); a classifier needs two or more"),
    (NET, (spoiled(X, np.nan), Y), (Z, Y_Z), {}, r"train: sample 5 is not finite: x\[5, 1\] is nan; needed: finite"),
    (NET, (X, Y), (spoiled(Z, np.inf), Y_Z), {}, r"test: sample 5 is not finite: x\[5, 1\] is inf"),
    (mlp([3, 4, 5]).double(), (X, Y), (Z, Y_Z), {}, r"the model has outputs of shape \[5\] and the data 3 classes"),
    (mlp([3, 4, 1]).double(), (X, Y), (Z, Y_Z), {}, r"training set go to 2 and the model has 1 output; need"),
    (nn.Sequential(mlp([3, 4, 6]), nn.Unflatten(1, (2, 3))).double(), (X, Y), (Z, Y_Z), {}, r"of shape \[2, 3\]"),
    (Returning(NET, lambda z: 1e308 * z * 1e9), (X, Y), (Z, Y_Z), {}, r"the model's outputs\[0, \d\] is -?inf"),
    (Returning(NET, lambda z: {"scores": z, "h": z}), (X, Y), (Z, Y_Z), {}, "returns a dict; needed: a tensor, or"),
    (Returning(NET, lambda z: (z, z)), (X, Y), (Z, Y_Z), {}, "returns a tuple; needed: .*one tensor. Put"),
    (copy.deepcopy(NET).half(), (X.half(), Y), (Z.half(), Y_Z), {}, "parameters are torch.float16; .*Give model"),
    (NET, (X, Y), (Z, Y_Z), {"kernels": ["trNTK", "trNKT"]}, "there is no kernel 'trNKT'. Did you mean 'trNTK'"),
    (NET, (X, Y), (Z, Y_Z), {"kernels": ["NNGP"]}, "there is no kernel 'NNGP'.*Known: trNTK, trNTK⁰, pNTK, Em, CK"),
    (NET, (X, Y), (Z, Y_Z), {"kernels": []}, "no kernel was named; needed: some of trNTK"),
    (NET, (X, Y), (Z, Y_Z), {"kernels": {}}, "kernels= is empty; needed: at least one"),
    (NET, (X, Y), (Z, Y_Z), {"kernels": {"a": X @ X.T}}, r"kernels\['a'\] is a Tensor; needed: a kernel"),
    (NET, (X, Y), (Z, Y_Z), {"kernels": {"a": tg.full_ntk(NET)}}, "one similarity for each pair.*tg.trace_ntk"),
    (NET, (X, Y), (Z, Y_Z), {"samples": 0}, "samples=0, neighbours=8, reg_factor=1.0; needed: whole numbers from 1"),
    (NET, (X, Y), (Z, Y_Z), {"samples": 2.5}, "samples=2.5"),
    (NET, (X, Y), (Z, Y_Z), {"neighbours": 0}, "neighbours=0"),
    (NET, (X, Y), (Z, Y_Z), {"reg_factor": 0.0}, "reg_factor=0.0; needed: .*above 0"),
    (NET, (X, Y), (Z, Y_Z), {"reg_factor": -1.0}, "reg_factor=-1.0; needed: .*above 0"),
    (NET, (X, Y), (Z, Y_Z), {"reg_factor": np.nan}, "reg_factor=nan"),
    (NET, (X, Y), (Z, Y_Z), {"memory": "lots"}, "memory='lots'; needed: a number of bytes"),
    (NET, (X, Y), (Z, Y_Z), {"poisoned_train": torch.zeros(N)}, r"poisoned_train has shape \(60,\), torch.float32"),
    (NET, (X, Y), (Z, Y_Z), {"poisoned_train": torch.zeros(M).bool()}, r"poisoned_train has shape \(40,\).*the 60"),
    (NET, (X, Y), (Z, Y_Z), {"poisoned_test": torch.zeros(N).bool()}, r"poisoned_test has shape \(60,\).*the 40"),
    (NET, (X, Y), (Z, Y_Z), {"poisoned_test": Y_Z}, r"poisoned_test .*torch.int64; needed: a mask \(bool\)"),
    (NET, (X, Y), (Z[:1], Y_Z[:1]), {}, "test"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "train", "test", "options", "message"), REFUSED, ids=[r[4][:50] for r in REFUSED])
def test_what_cannot_be_explained_is_refused(
    model: Any, train: Any, test: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        explain(model, train, test, **options)


def test_sets_whose_classes_are_in_another_order_are_refused() -> None:
    """Class 0 is a cat in one and a dog in the other: nothing that follows would be right."""
    names = ("cat", "dog", "owl")
    for other in (("dog", "cat", "owl"), ("cat", "dog", "bat")):
        with pytest.raises(InputError, match="the test set's classes are .*, the training set's .*same order"):
            explain(NET, Labelled(X, Y, names), Labelled(Z, Y_Z, other), kernels=["CK"])


def test_refusals_come_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be used, a test set too small: found out before a Gram is computed."""

    def fail(*args: Any, **options: Any) -> Any:
        raise AssertionError("a Gram was computed")

    monkeypatch.setattr(compared, "compute", fail)
    for test, options in (
        ((Z, Y_Z), {"poisoned_train": torch.zeros(3)}),
        ((Z, Y_Z), {"kernels": ["trNTK", "none"]}),
        ((Z, Y_Z), {"kernels": {"good": tg.trace_ntk(NET), "bad": 3}}),
        ((Z[:1], Y_Z[:1]), {}),
    ):
        with pytest.raises(InputError):
            explain(NET, (X, Y), test, **options)


def test_kernels_go_by_name_whatever_the_case_and_by_one_string() -> None:
    every = tg.decisions.kernels
    assert list(every(NET, "trntk, ck")) == list(every(NET, ["TRNTK", "CK", "CK"])) == ["trNTK", "CK"]
    assert list(every(NET, ["trNTK0"])) == ["trNTK⁰"]
