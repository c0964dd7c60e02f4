"""Wrong labels: planted ones are found, probabilities and rates mean what they say, bad input is refused."""

import math

import pytest
import torch
from torch import Tensor

import tangency as tg
from tangency.auditing import audit_gram
from tangency.auditing.labels import estimate_noise, suspect_labels
from tangency.auditing.machine import FeatureMachine, GramMachine
from tangency.auditing.mixture import tell_apart
from tangency.errors import InputError


def blobs(n: int, classes: int, apart: float = 4.0, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Normal points around as many corners."""
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    return torch.randn(n, 8, generator=g).double() + apart * torch.eye(8).double()[y], y


def flipped(y: Tensor, classes: int, rate: float, seed: int = 0) -> Tensor:
    """Labels of which a part is wrong."""
    g = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(y), generator=g) < rate
    return torch.where(wrong, (y + torch.randint(1, classes, y.shape, generator=g)) % classes, y)


def rbf(a: Tensor, b: Tensor) -> Tensor:
    return (-torch.cdist(a, b).square() / 32).exp()


def test_planted_labels_are_found_with_their_class() -> None:
    x, y = blobs(300, 4, apart=6.0)
    given = flipped(y, 4, 0.1)
    found = audit_gram(rbf(x, x), given, progress=False)
    wrong = given != y
    assert set(found.suspects.first(int(wrong.sum())).tolist()) == set(wrong.nonzero()[:, 0].tolist())
    assert torch.equal(found.suspects.suggested[wrong], y[wrong])
    assert found.noise.low <= float(wrong.double().mean()) <= found.noise.high


def test_margins_are_those_of_refits_without_each_sample() -> None:
    x, y = blobs(40, 3, apart=1.5)
    found = audit_gram(rbf(x, x), y, progress=False)
    targets = torch.nn.functional.one_hot(y).double()
    for i in (0, 7, 39):
        rest = torch.arange(40) != i
        mean = targets[rest].mean(0)
        solved = torch.linalg.solve(rbf(x[rest], x[rest]) + found.choice.reg * torch.eye(39), targets[rest] - mean)
        said = (rbf(x[i : i + 1], x[rest]) @ solved)[0] + mean
        others = said.clone()
        others[y[i]] = -math.inf
        assert float(found.suspects.margin[i]) == pytest.approx(float(said[y[i]] - others.max()), abs=1e-8)


def test_without_wrong_labels_almost_none_is_suspected() -> None:
    x, y = blobs(400, 4)
    found = audit_gram(rbf(x, x), y, progress=False)
    assert found.suspects.count <= 4
    assert found.noise.low == 0


def test_rates_of_kinds_that_are_drawn_are_found() -> None:
    """Margins drawn as two normal distributions: the probabilities add up to how many are wrong."""
    g = torch.Generator().manual_seed(0)
    right, wrong = 0.6 + 0.15 * torch.randn(1800, generator=g), -0.5 + 0.12 * torch.randn(200, generator=g)
    kinds = tell_apart(torch.cat([right, wrong]))
    assert float(kinds.wrong.sum()) == pytest.approx(200, rel=0.05)
    assert float(kinds.wrong[1800:].min()) > 0.9
    assert tell_apart(right).single


def test_a_smaller_margin_is_never_less_suspicious() -> None:
    x, y = blobs(300, 3, apart=2.0)
    wrong = audit_gram(rbf(x, x), flipped(y, 3, 0.2), progress=False).suspects
    assert bool((wrong.wrong[wrong.order].diff() <= 0).all())


def test_test_mistakes_lower_the_rate() -> None:
    """What the machine also gets wrong on clean samples is no sign of wrong labels."""
    x, y = blobs(200, 3, apart=2.0)
    left = tg.regress.leave_out(rbf(x, x), torch.nn.functional.one_hot(y).double(), reg=1.0, progress=False)
    found = suspect_labels(left, y)
    none, many = (estimate_noise(found, 3, (k, 100)) for k in (0, 60))
    assert many.low <= none.low


def test_what_a_blind_machine_contradicts_may_be_wrong_and_only_sure_ones_must_be() -> None:
    x, y = blobs(200, 3, apart=2.0)
    left = tg.regress.leave_out(rbf(x, x), torch.nn.functional.one_hot(y).double(), reg=1.0, progress=False)
    found = suspect_labels(left, y)
    seeing, blind = (estimate_noise(found, 3, None, part) for part in (None, 0.4))
    assert seeing.high < 0.4 <= blind.high
    assert (seeing.low, seeing.rate) == (blind.low, blind.rate)
    assert seeing.low <= float((found.suspects.wrong > 0.9).double().mean())


def test_features_and_their_gram_give_the_same_audit() -> None:
    x, y = blobs(120, 3)
    z, _ = blobs(30, 3, seed=1)
    targets = torch.nn.functional.one_hot(y).double()
    one, other = FeatureMachine(x, z), GramMachine(tg.linalg.matrix.square(x @ x.T), None, None)
    a, b = one.left_out(targets, 2.0), other.left_out(targets, 2.0)
    torch.testing.assert_close(a.predictions, b.predictions, rtol=1e-9, atol=1e-9)
    seen = one.see(targets, 2.0)
    solved = torch.linalg.solve(x @ x.T + 2.0 * torch.eye(120), x @ z.T)
    mean = targets.mean(0)
    torch.testing.assert_close(seen.predictions, solved.T @ (targets - mean) + mean, rtol=1e-8, atol=1e-8)
    squares = z.square().sum(1)
    torch.testing.assert_close(seen.unexplained, 1 - ((z @ x.T) * solved.T).sum(1) / squares, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.every(3)
def test_wrong_targets_are_found_and_their_neighbours_are_not(seed: int) -> None:
    """A target that is a hundred times the noise off moves what is said of its neighbours."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(200, 2, generator=g).double()
    y = torch.sin(x[:, 0]) + 0.02 * torch.randn(200, generator=g).double()
    y[[3, 50, 120]] += torch.tensor([1.5, -2.0, 1.0]).double()
    found = audit_gram((-torch.cdist(x, x).square() / 2).exp(), y, progress=False)
    assert set(found.suspects.first(3).tolist()) == {3, 50, 120}
    assert found.suspects.count <= 8
    assert found.noise.low <= 3 / 200 <= found.noise.high
    with pytest.raises(InputError, match="real numbers"):
        found.cleaned()


@pytest.mark.parametrize("kind", ["normal", "Laplace", "Student", "Cauchy"])
@pytest.mark.every(3)
def test_noise_with_a_long_tail_is_no_sign_of_wrong_targets(kind: str) -> None:
    torch.manual_seed(0)
    draws = {"normal": torch.distributions.Normal(0.0, 1.0), "Laplace": torch.distributions.Laplace(0.0, 1.0)}
    drawn = draws.get(kind, torch.distributions.StudentT(3.0 if kind == "Student" else 1.0)).sample((200,))
    x = torch.randn(200, 4).double()
    y = x[:, 0].sin() + x[:, 1] + 0.1 * drawn.double()
    K = (-torch.cdist(x, x).square() / 8).exp()
    found = audit_gram((K + K.T) / 2, y, progress=False)
    assert found.suspects.count <= 2
    assert found.noise.low == 0


def test_labels_that_the_others_agree_with_are_not_called_wrong() -> None:
    """An easy class and hard ones are two heaps of margins, too (found by an adversary, on clean iris)."""
    from sklearn.datasets import load_iris

    flowers = load_iris()
    x, y = torch.from_numpy(flowers.data / flowers.data.max(0)), torch.from_numpy(flowers.target)
    for K in (x @ x.T, rbf(x, x), rbf(4 * x, 4 * x)):
        found = audit_gram((K + K.T) / 2, y, progress=False)
        assert not bool((found.suspects.margin[found.suspects.wrong > 0.5] >= 0).any())
        assert found.noise.rate <= found.noise.contradicted + 1e-9
        assert found.noise.low == 0


def test_a_class_that_is_not_known_has_no_wrong_labels() -> None:
    """Of a rare class most are contradicted, by mistake; and of a kernel that knows nothing, all that are not usual."""
    g = torch.Generator().manual_seed(2)
    y = (torch.rand(300, generator=g) < 0.1).long()
    x = torch.randn(300, 5, generator=g).double()
    x[:, 0] += 1.5 * y
    found = audit_gram(rbf(x, x), y, progress=False)
    assert found.suspects.count == 0
    assert any("class 1" in w or "these classes" in w for w in found.warnings)
    for K, labels in (
        (torch.ones(100, 100), torch.tensor([0] * 60 + [1] * 40)),
        (torch.eye(120), torch.arange(120) % 4),
    ):
        nothing = audit_gram(K.double(), labels, progress=False)
        assert nothing.suspects.count == 0
        assert nothing.noise.rate <= 0.5
        assert (nothing.noise.low, nothing.noise.high) == (0, 1)
        assert not nothing.sure


def test_hard_samples_are_told_from_wrong_labels_by_clean_ones_alone() -> None:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(0, 2, (400,), generator=g)
    x = torch.randn(400, 5, generator=g).double()
    hard = torch.rand(400, generator=g) < 0.25
    x[:, 0] += torch.where(hard, 0.15, 3.0) * (2 * y - 1)
    x[:, 1] += 8 * hard
    K = rbf(x, x)
    K = (K + K.T) / 2
    assert audit_gram(K[:200, :200], y[:200], progress=False).noise.low == 0
    test = {"cross": K[200:, :200], "prior": torch.ones(200), "test_labels": y[200:]}
    found = audit_gram(K[:200, :200], y[:200], progress=False, **test)  # type: ignore[arg-type]
    assert found.noise.low <= 0.02
    assert any("own mistakes" in w for w in found.warnings)


def test_cleaning_is_what_refits_say() -> None:
    x, y = blobs(150, 3, apart=2.0)
    z, y_test = blobs(60, 3, apart=2.0, seed=1)
    given = flipped(y, 3, 0.3)
    found = audit_gram(rbf(x, x), given, cross=rbf(z, x), prior=torch.ones(60), test_labels=y_test, progress=False)
    assert found.cleaning is not None
    targets = torch.nn.functional.one_hot(given).double()
    for size, score in zip(found.cleaning.removed.tolist(), found.cleaning.dropped.tolist(), strict=True):
        kept = torch.ones(150, dtype=torch.bool)
        kept[found.suspects.order[:size]] = False
        K = rbf(x[kept], x[kept]) + found.choice.reg * torch.eye(int(kept.sum()))
        mean = targets[kept].mean(0)
        said = rbf(z, x[kept]) @ torch.linalg.solve(K, targets[kept] - mean) + mean
        assert score == pytest.approx(float((said.argmax(1) == y_test).double().mean()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": torch.zeros(20).long()}, "at least two classes"),
        ({"labels": torch.arange(19) % 2}, "one for each"),
        ({"samples": 0}, "whole numbers from 1"),
        ({"neighbours": True}, "whole numbers from 1"),
        ({"prior": torch.ones(3)}, "together"),
        ({"labels": torch.ones(20)}, "all targets are equal"),
    ],
)
def test_bad_input_is_refused(options: dict[str, object], message: str) -> None:
    x, y = blobs(20, 2)
    with pytest.raises(InputError, match=message):
        audit_gram(x @ x.T, **({"labels": y, "progress": False} | options))  # type: ignore[arg-type]


def test_few_samples_are_refused() -> None:
    with pytest.raises(InputError, match="at least 10"):
        audit_gram(torch.eye(4), [0, 1, 0, 1], progress=False)
