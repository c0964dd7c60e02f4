"""What is left out is left out: every number of an audit against fits that were made without the samples, in NumPy."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tangency as tg
from tangency.auditing import audit_gram
from tangency.auditing.machine import FeatureMachine, GramMachine, Machine
from tangency.linalg.matrix import between, square
from tangency.regress import LeftOut

N, M, CLASSES = 48, 9, 3
MAKE = np.random.default_rng(0)
X, Z = MAKE.normal(size=(N, 5)), MAKE.normal(size=(M, 5))
LABELS = np.where(MAKE.random(N) < 0.6, 0, MAKE.integers(0, CLASSES, N))  # one class is frequent: frequencies matter
WEIGHTS = MAKE.normal(size=(5, 2))
TARGETS = {
    "classes": np.eye(CLASSES)[LABELS],
    "real": X @ WEIGHTS + 7,
    "one real target": X @ WEIGHTS[:, :1] + 3 * MAKE.normal(size=(N, 1)),
}
# Some of one size, one that has most samples, single samples, classes as groups, groups that are one class each, two.
GROUPS = {
    "each by itself": None,
    "five of one size": np.arange(N) % 5,
    "one has most": np.minimum(np.arange(N), 9),
    "by class": LABELS,
    "two": (np.arange(N) < 20).astype(int),
    "names": np.array([f"subject {k % 7}" for k in range(N)]),
}


def refitted(K: np.ndarray, y: np.ndarray, reg: float, groups: np.ndarray | None, kept: np.ndarray) -> np.ndarray:
    """The prediction of each sample by mean and ridge of the kept samples that are not of its group, one fit each."""
    found = np.empty_like(y)
    for i in range(len(y)):
        others = kept & ((np.arange(len(y)) != i) if groups is None else (groups != groups[i]))
        mean = y[others].mean(0)
        inside = np.linalg.solve(K[np.ix_(others, others)] + reg * np.eye(others.sum()), y[others] - mean)
        found[i] = mean + K[i, others] @ inside
    return found


def rbf(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(-((a[:, None] - b[None]) ** 2).sum(2) / 8))


def _gram(path: Path) -> tuple[Machine, np.ndarray]:
    return GramMachine(square(torch.from_numpy(rbf(X, X)))), rbf(X, X)


def _factor(path: Path) -> tuple[Machine, np.ndarray]:
    return GramMachine(square(torch.from_numpy(rbf(X, X))), several=False), rbf(X, X)


def _store(path: Path) -> tuple[Machine, np.ndarray]:
    k = tg.trace_ntk(tg.models.mlp([5, 6, 1]).double())
    gram = tg.compute(k, torch.from_numpy(X), store=path / "K", tile=20, progress=False)
    return GramMachine(gram), gram[:].numpy()


def _few_features(path: Path) -> tuple[Machine, np.ndarray]:
    return FeatureMachine(torch.from_numpy(X)), X @ X.T


def _many_features(path: Path) -> tuple[Machine, np.ndarray]:
    phi = np.concatenate([rbf(X, X), X], 1)  # more features than samples
    return FeatureMachine(torch.from_numpy(phi)), phi @ phi.T


FORMS = {"Gram": _gram, "factor": _factor, "store": _store, "features": _few_features, "many features": _many_features}


@pytest.mark.parametrize("form", FORMS)
def test_what_is_said_without_a_sample_or_its_group_is_what_a_refit_says(form: str, tmp_path: Path) -> None:
    """Class frequencies and means of targets are those of the others, too; samples set aside (weight 0) are in none."""
    torch.manual_seed(0)
    machine, K = FORMS[form](tmp_path)
    some = np.arange(N) % 11 != 3
    reg = 0.3 * float(np.diag(K).mean())
    for title, groups in GROUPS.items():
        numbers = None if groups is None else torch.from_numpy(np.unique(groups, return_inverse=True)[1])
        for kind, y in TARGETS.items():
            for kept in (None, some):
                mask = None if kept is None else torch.from_numpy(kept)
                left = machine.left_out(torch.from_numpy(y), reg, numbers, mask)
                truth = refitted(K, y, reg, groups, np.ones(N, dtype=bool) if kept is None else kept)
                off = np.abs(left.predictions.numpy() - truth).max()
                assert off < 1e-9, (title, kind, kept is None)
                assert np.abs(left.errors.numpy() - (y - truth)).max() < 1e-9, (title, kind, kept is None)


@pytest.mark.parametrize("groups", GROUPS)
def test_an_audit_says_what_refits_say(groups: str) -> None:
    """Margins, signs, suggestions, the loss, and the part that is contradicted; `reg` is the one that was taken."""
    K, of, y = rbf(X, X), GROUPS[groups], TARGETS["classes"]
    found = audit_gram(torch.from_numpy(K), LABELS, groups=of, progress=False)
    said = refitted(K, y, found.choice.reg, of, np.ones(N, dtype=bool))
    others = said.copy()
    others[np.arange(N), LABELS] = -np.inf
    margin = said[np.arange(N), LABELS] - others.max(1)
    np.testing.assert_allclose(found.suspects.margin.numpy(), margin, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(found.suspects.suggested.numpy(), np.where(margin < 0, others.argmax(1), LABELS))
    assert found.noise.contradicted == pytest.approx(float((margin < 0).mean()), abs=1e-12)
    taken = found.choice.regs["K"] == found.choice.reg
    assert float(found.choice.losses["K"][taken]) == pytest.approx(float(((y - said) ** 2).mean()), rel=1e-9)


@pytest.mark.parametrize("groups", ["each by itself", "five of one size", "names"])
def test_an_audit_of_targets_says_what_refits_say(groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also without those that it sets aside."""
    K, of, asked = X @ X.T, GROUPS[groups], list[Tensor | None]()
    y = TARGETS["real"] + 0.1 * np.random.default_rng(1).normal(size=(N, 2))
    y[:2] += 40

    def watched(self: GramMachine, *given: Tensor | None) -> LeftOut:
        asked.append(given[3])
        return plain(self, *given)  # type: ignore[arg-type]

    plain = GramMachine._left_out
    monkeypatch.setattr(GramMachine, "_left_out", watched)
    found = audit_gram(torch.from_numpy(K), torch.from_numpy(y), groups=of, progress=False)
    kept = [mask for mask in asked if mask is not None][-1]
    assert not bool(kept[:2].any())
    said = refitted(K, y, found.choice.reg, of, kept.numpy())
    np.testing.assert_allclose(found.suspects.suggested.numpy(), said, rtol=0, atol=1e-9)


def _of_gram() -> Machine:
    K = torch.from_numpy(rbf(X, X))
    return GramMachine(square(K), between(torch.from_numpy(rbf(Z, X))), torch.ones(M, dtype=torch.float64))


def _of_features() -> Machine:
    return FeatureMachine(torch.from_numpy(X), torch.from_numpy(Z))


@pytest.mark.parametrize(
    ("make", "kernel"), [(_of_gram, rbf), (_of_features, lambda a, b: a @ b.T)], ids=["Gram", "features"]
)
def test_fits_without_some_samples_have_the_mean_of_the_others(
    make: Callable[[], Machine], kernel: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> None:
    """What cleaning would do, and what is said of test samples: the samples dropped are not in the frequencies."""
    machine, y, kept, reg = make(), TARGETS["classes"], np.arange(N) % 4 != 1, 2.0

    def fitted(who: np.ndarray) -> np.ndarray:
        mean = y[who].mean(0)
        solved = np.linalg.solve(kernel(X[who], X[who]) + reg * np.eye(who.sum()), y[who] - mean)
        return np.asarray(kernel(Z, X[who]) @ solved + mean)

    without = machine.without(torch.from_numpy(y), reg, torch.from_numpy(kept))
    np.testing.assert_allclose(without.numpy(), fitted(kept), rtol=0, atol=1e-9)
    seen = machine.see(torch.from_numpy(y), reg)
    np.testing.assert_allclose(seen.predictions.numpy(), fitted(np.ones(N, dtype=bool)), rtol=0, atol=1e-9)


def test_where_all_others_are_set_aside_their_mean_is_what_there_is() -> None:
    """A group that has all samples of the fit is not in what is said of it all the same."""
    K, y = rbf(X, X), TARGETS["one real target"]
    groups, kept = torch.arange(N) // 30, torch.arange(N) < 30
    left = GramMachine(square(torch.from_numpy(K))).left_out(torch.from_numpy(y), 1.0, groups, kept)
    said: Tensor = left.predictions[:30]
    np.testing.assert_allclose(said.numpy(), np.broadcast_to(y[30:].mean(0), (30, 1)), rtol=0, atol=1e-9)
