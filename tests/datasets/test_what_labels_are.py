"""What labels are is decided once: classes in every form give one answer, floats that may be some are asked about."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tangency as tg
from tangency import spectra
from tangency._base.targets import columns_of, read_targets
from tangency.auditing import audit_gram
from tangency.errors import InputError

N, M = 60, 24
NAMES = ("ant", "bee", "cat")


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    return torch.randn(n, 3, generator=g) + 2 * torch.eye(3)[y], y


X, Y = points(N, 0)
Z, T = points(M, 1)
NET = tg.models.initialized(lambda: tg.models.mlp([3, 8, 3]), seed=0).eval()
K = X.double() @ X.double().T + torch.eye(N, dtype=torch.float64)


def category(y: Tensor) -> Any:
    pd = pytest.importorskip("pandas")
    return pd.Series(pd.Categorical.from_codes(y.tolist(), categories=list(NAMES)))


def column(y: Tensor) -> Any:
    return pytest.importorskip("pandas").Series([NAMES[int(k)] for k in y])


FORMS: dict[str, Callable[[Tensor], Any]] = {
    "int32": lambda y: y.int(),
    "numbers in a list": lambda y: y.tolist(),
    "array": lambda y: y.numpy().astype(np.uint8),
    "names": lambda y: [NAMES[int(k)] for k in y],
    "array of names": lambda y: np.array(NAMES)[y.numpy()],
    "objects": lambda y: np.array(NAMES, dtype=object)[y.numpy()],
    "category": category,
    "column of names": column,
}

# What is said of samples with labels: a list of numbers, whatever form those come in.
ASKED: dict[str, Callable[[Any, Any], list[Any]]] = {
    "audit": lambda y, t: tg.audit(NET, (X, y), (Z, t), progress=False).suspects.margin.tolist(),
    "labels=": lambda y, t: tg.audit(
        NET, tg.datasets.Labelled(X, Y, NAMES), labels=y, progress=False
    ).suspects.margin.tolist(),
    "audit_gram": lambda y, t: audit_gram(K, y, progress=False).suspects.margin.tolist(),
    "explain": lambda y, t: [tg.explain(NET, (X, y), (Z, t), kernels=["CK"], samples=2, progress=False).accuracy],
    "probe": lambda y, t: (
        tg.representations.probe(NET, (X, y), (Z, t), dims=[2], progress=False).layers[0].accuracy["svm"].tolist()
    ),
    "shift": lambda y, t: tg.shift(None, X, Z, labels=(y, t), draws=99, progress=False).classes.source.tolist(),  # type: ignore[union-attr]
    "refit_last_layer": lambda y, t: (
        tg.refit_last_layer(NET, (X, y), (Z, t), reg=0.1, resamples=50, progress=False)
        .model[-1]
        .weight.flatten()
        .tolist()
    ),
    "energy": lambda y, t: spectra.energy(K, y, 5, progress=False).parts.tolist(),
    "label_alignment": lambda y, t: [spectra.label_alignment(K, y, progress=False)],
    "target_alignment": lambda y, t: [spectra.target_alignment(K, y, centred=c) for c in (False, True)],
    "flow": lambda y, t: tg.dynamics.flow(K, y).at([1.0]).train.flatten().tolist(),
    "look_ahead": lambda y, t: tg.active.look_ahead(K, range(N), y).outputs.flatten().tolist(),
    "Monitor": lambda y, t: watched(y),
    "collapse": lambda y, t: [tg.representations.collapse(X, y).nc1],
}


def watched(y: Any, **options: Any) -> list[float]:
    monitor = tg.dynamics.Monitor(
        tg.trace_ntk(NET), X, y=y, record=["alignment", "centred_alignment", "energy"], every=1, **options
    )
    monitor(0)
    history = monitor.history()
    return [float(history[name][0]) for name in ("alignment", "centred_alignment", "energy")]


@pytest.mark.parametrize("asked", ASKED)
def test_classes_in_every_form_give_one_answer(asked: str) -> None:
    of = ASKED[asked]
    right = of(Y, T)
    dear = (
        "audit",
        "look_ahead",
        "flow",
        "audit_gram",
        "labels=",
        "explain",
        "probe",
        "shift",
    )  # two kinds, through the same door
    for form, make in FORMS.items() if asked not in dear else [(form, FORMS[form]) for form in ("names", "category")]:
        assert of(make(Y), make(T)) == pytest.approx(right, abs=1e-12), form


def test_names_are_kept() -> None:
    """For messages and pages, in the order in which they sort, or in the categories' own."""
    found = tg.audit(NET, (X, FORMS["names"](Y)), progress=False)
    assert found.train.classes == NAMES
    assert audit_gram(K, FORMS["category"](Y), progress=False).train.classes == NAMES
    assert tg.datasets.labelled((X, (Y > 0))).classes == ("False", "True")
    pd = pytest.importorskip("pandas")
    back = pd.Series(pd.Categorical(["a", "b", "a"], categories=["b", "a"]))
    data = tg.datasets.labelled((X[:3], back))
    assert (data.classes, data.y.tolist()) == (("b", "a"), [1, 0, 1])
    # Categories in another order, or fewer of them, are the same classes.
    assert tg.datasets.labelled((X[:2], pd.Categorical(["a", "b"])), classes=data.classes).y.tolist() == [1, 0]


WHOLE, HOT = Y.float(), torch.eye(3)[Y]
ASKS: dict[str, Callable[..., Any]] = {
    "audit": lambda y, **o: tg.audit(NET, (X, y), progress=False, **o).suspects.margin,
    "audit_gram": lambda y, **o: audit_gram(K, y, progress=False, **o).suspects.margin,
    "energy": lambda y, **o: spectra.energy(K, y, 5, progress=False, **o).parts,
    "label_alignment": lambda y, **o: torch.tensor(spectra.label_alignment(K, y, progress=False, **o)),
    "target_alignment": lambda y, **o: torch.tensor(spectra.target_alignment(K, y, **o)),
    "Monitor": lambda y, **o: torch.tensor(watched(y, **o)),
    "flow": lambda y, **o: tg.dynamics.flow(K, y, **o).at([1.0]).train,
}


@pytest.mark.parametrize("floats", [WHOLE, HOT.numpy(), WHOLE.tolist(), WHOLE[:, None]], ids=range(4))
@pytest.mark.parametrize("asks", ASKS)
def test_floats_that_may_be_classes_are_asked_about(asks: str, floats: Any) -> None:
    """Audited as real targets without a word they gave a rate of .46 where .10 was wrong."""
    of = ASKS[asks]
    if asks != "flow" or np.asarray(floats).ndim == 1:  # rows are what classes would be made there
        with pytest.raises(
            InputError, match=r"classes, or real numbers\? If these are classes: y.*, or targets='classes'"
        ):
            of(floats)
    torch.testing.assert_close(of(floats, targets="classes"), of(Y), rtol=0, atol=1e-12)
    if asks != "audit" and not (asks == "audit_gram" and floats is not WHOLE):  # the model has three outputs; dear
        real = of(floats, targets="real")
        if asks != "flow" or np.asarray(floats).ndim == 1:
            assert real.shape != of(Y).shape or not torch.allclose(real, of(Y), atol=1e-6)


def test_others_that_ask() -> None:
    with pytest.raises(InputError, match=r"whole numbers 0, 1, 2.*give y.long\(\)"):
        tg.refit_last_layer(NET, (X, WHOLE), progress=False)
    with pytest.raises(InputError, match=r"targets\.long\(\)"):
        tg.active.look_ahead(K, range(N), WHOLE)
    for call in (tg.explain, tg.representations.probe):
        with pytest.raises(InputError, match=r"If these are classes: y\.long"):
            call(NET, (X, WHOLE), (Z, T), progress=False)
        with pytest.raises(InputError, match=r"If it is one-hot: y\.argmax\(1\)"):
            call(NET, (X, HOT), (Z, T), progress=False)
    with pytest.raises(InputError, match=r"If these are classes: y\.long"):
        tg.shift(None, X, Z, labels=(WHOLE, T), progress=False)
    for f in (Y, Y > 0):
        with pytest.raises(InputError, match="no values of a function"):
            spectra.jacobian_alignment(tg.trace_ntk(NET), X, f)
        with pytest.raises(InputError, match="no values of a function"):
            spectra.norm_bound(1.0, f)


def test_planted_errors_are_found_in_floats_that_are_said_to_be_classes() -> None:
    x, y = points(200, 2)
    x += 2 * torch.eye(3)[y]
    labels = y.clone()
    labels[:20] = (labels[:20] + 1) % 3
    found = audit_gram(rbf(x), labels.double(), targets="classes", progress=False)
    assert len(set(found.suspects.first().tolist()) & set(range(20))) >= 18
    assert found.noise.low <= 0.1 <= found.noise.high


def rbf(x: Tensor) -> Tensor:
    K = (-torch.cdist(x, x).square() / 16).double().exp()
    return (K + K.T) / 2


def test_both_sides_are_read_as_the_labels_that_are_audited() -> None:
    """A test set of whole numbers by chance has real targets where the training set has."""
    net = tg.models.initialized(lambda: tg.models.mlp([3, 8, 1]), seed=0).eval()
    y, t = X.sum(1, keepdim=True), torch.arange(M).float()[:, None] % 4
    assert tg.audit(net, (X, y), (Z, t), progress=False).real
    assert tg.audit(net, (X, y), (Z, t.long()), progress=False).real
    kind = {"targets": "classes"}
    one = tg.audit(NET, (X, WHOLE), (Z, HOT[:M]), progress=False, **kind)  # type: ignore[arg-type]
    assert not one.real
    assert one.test is not None
    assert torch.equal(one.test.y, Y[:M])


@pytest.mark.parametrize("call", [tg.audit, tg.explain, tg.representations.probe, tg.refit_last_layer])
def test_names_on_one_side_and_numbers_on_the_other_are_refused(call: Callable[..., Any]) -> None:
    for train, test in ((Y, FORMS["names"](T)), (FORMS["names"](Y), T)):
        with pytest.raises(InputError, match=r"are (names|numbers), those of (the test set|test) (names|numbers)"):
            call(NET, (X, train), (Z, test), progress=False)
    with pytest.raises(InputError, match="the classes are ant, bee, cat"):
        call(NET, (X, FORMS["names"](Y)), (Z, ["dog"] * M), progress=False)


def test_what_is_neither_is_refused() -> None:
    pd = pytest.importorskip("pandas")
    for wrong, message in (
        (["a", 1], "holds names, and at 1 1"),
        (pd.Series(["a", None]), "holds names, and at 1"),
        (pd.Series(pd.Categorical(["a", None])), "no category at 1"),
        (torch.ones(2, dtype=torch.cfloat), "complex"),
        ([b"a", b"b"], "no table of numbers"),
    ):
        with pytest.raises(InputError, match=message):
            read_targets(wrong)
    with pytest.raises(InputError, match="names of classes, and targets='real'"):
        read_targets(["a", "b"], targets="real")
    with pytest.raises(InputError, match=r"y\[1\] is 0\.5"):
        read_targets([0.0, 0.5], targets="classes")
    with pytest.raises(InputError, match="targets='ints'; needed"):
        read_targets([0, 1], targets="ints")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="targets='real' and train is a Labelled"):
        tg.audit(NET, tg.datasets.labelled((X, Y)), targets="real", progress=False)


@settings(max_examples=12, deadline=None)
@given(st.permutations(range(7)), st.integers(2, 5), st.integers(0, 100))
def test_renaming_classes_changes_no_answer(names: list[int], c: int, seed: int) -> None:
    """Other numbers, with gaps too: energies and alignments stay, the flow's columns change places."""
    y = torch.randint(0, c, (N,), generator=torch.Generator().manual_seed(seed))
    y[:c] = torch.arange(c)
    other = torch.tensor(names)[y]
    for one in ("energy", "label_alignment", "target_alignment"):
        assert ASKED[one](other, None) == pytest.approx(ASKED[one](y, None), rel=1e-9, abs=1e-12), one
    order = torch.tensor(names[:c]).argsort()
    path, moved = (tg.dynamics.flow(K, v).at([1.0]).train[0] for v in (y, other))
    torch.testing.assert_close(moved, path[:, order], rtol=1e-9, atol=1e-12)


def test_two_classes_as_signs_are_what_they_are_as_classes() -> None:
    """±1 has been coded already: which class is called which changes a sign, and no answer here."""
    two = (Y > 0).long()
    for signs in (2 * two - 1, 2.0 * two - 1, 1.0 - 2 * two, (2.0 * two - 1)[:, None]):
        for one in ("energy", "label_alignment", "target_alignment", "Monitor"):
            assert ASKED[one](signs, None) == pytest.approx(ASKED[one](two, None), rel=1e-9), one
    assert torch.equal(tg.dynamics.flow(K, 2.0 * two - 1).problem.y, (2.0 * two - 1).double())


@pytest.mark.parametrize("y", [Y, FORMS["names"](Y), 5 * Y, (Y > 0), 2.0 * (Y > 0) - 1, X[:, 0]], ids=range(6))
def test_a_monitor_says_what_spectra_says(y: Any) -> None:
    gram = tg.trace_ntk(NET)(X).double()
    top = 10  # as the monitor has it by default
    said = [
        spectra.target_alignment(gram, y), spectra.target_alignment(gram, y, centred=True),
        spectra.energy(gram, y, top, progress=False).concentration,
    ]  # fmt: skip
    assert watched(y) == pytest.approx(said, rel=1e-6)


def test_a_full_kernel_has_a_column_for_each_output() -> None:
    full = tg.full_ntk(NET)(X[:12]).double()
    y = Y[:12]
    numbers = torch.eye(3)[y].double() - 1 / 3
    assert spectra.target_alignment(full, y) == pytest.approx(spectra.target_alignment(full, numbers))
    flow = tg.dynamics.flow(full, y).at([1.0]).train
    torch.testing.assert_close(flow, tg.dynamics.flow(full, torch.eye(3).double()[y]).at([1.0]).train)
    with pytest.raises(InputError, match="classes from 0 to 5 and the kernel has 3 outputs"):
        columns_of([0, 5], 3)
    with pytest.raises(InputError, match="y has 3 classes; needed: two, or"):
        columns_of([0, 1, 2], 1)
    assert columns_of([True, False], 1).tolist() == [[0.5], [-0.5]]  # type: ignore[union-attr]


def test_estimators_say_by_their_name_what_labels_are() -> None:
    """A classifier takes floats for classes, as scikit-learn has it, and gives them back; a regressor integers."""
    pytest.importorskip("sklearn")
    from tangency.estimators import KernelClassifier, KernelRegressor

    numbers = K.numpy()
    right = KernelClassifier().fit(numbers, Y.numpy()).predict_proba(numbers)
    for form, make in {**FORMS, "floats": lambda y: y.double().numpy()}.items():
        fit = KernelClassifier().fit(numbers, make(Y))
        np.testing.assert_allclose(fit.predict_proba(numbers), right, atol=1e-9, err_msg=form)
    assert KernelClassifier().fit(numbers, WHOLE.numpy()).predict(numbers).dtype.kind == "f"
    with pytest.raises(ValueError, match="continuous"):
        KernelClassifier().fit(numbers, X[:, 0].numpy())
    one, other = (KernelRegressor().fit(numbers, y).predict(numbers) for y in (Y.numpy(), WHOLE.numpy()))
    np.testing.assert_allclose(one, other)
    with pytest.raises(ValueError, match="could not convert string|dtype"):
        KernelRegressor().fit(numbers, FORMS["names"](Y))
