"""The study of small sets: its measures, its splits, what it does with gaps, its kernel, and how it goes on."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forked import FORK
from scipy.stats import friedmanchisquare, rankdata

from tangency import InputError
from tangency._base import strict_json as _json
from tangency.cli import main
from tangency.experiments import classifiers, uci
from tangency.experiments.classifiers import CLASSIFIERS, ClassifierJob, Plan, TableSplit
from tangency.experiments.table import Kept, Options

SMALL = replace(uci.QUICK_PLAN, depths=(1,), costs=(1.0,), gammas=(0.1,), degrees=(2,), scales=(0.1,), few_costs=(1.0,),
                trees=5, layers=(1,), width=8, steps=20)  # fmt: skip


def oracle(x: np.ndarray, depth: int, frozen: int) -> np.ndarray:
    """Θ of a ReLU network by the arc-cosine recursion, entry by entry: layers below `frozen` add nothing of their own.

    Σ_0 = x·z; Σ_h = E[relu(u) relu(v)] and Σ̇_h = E[relu'(u) relu'(v)] for (u, v) of covariance Σ_{h-1};
    Θ = Σ_h over h ≥ frozen of Σ_h Σ̇_{h+1} ⋯ Σ̇_depth.
    """
    n = len(x)
    found = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            a, b, s = float(x[i] @ x[i]), float(x[j] @ x[j]), float(x[i] @ x[j])
            theta = s if frozen == 0 else 0.0
            for h in range(1, depth + 1):
                length = math.sqrt(a * b)
                angle = math.acos(max(-1.0, min(1.0, s / length))) if length > 0 else math.pi / 2
                s = length * (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / (2 * math.pi)
                theta = theta * (math.pi - angle) / (2 * math.pi) + (s if h >= frozen else 0.0)
                a, b = a / 2, b / 2
            found[i, j] = theta
    return found


def some(n: int = 60, d: int = 3, classes: int = 2, seed: int = 0) -> uci.UciSet:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, d))
    y = np.digitize(x[:, 0], np.linspace(-1, 1, classes + 1)[1:-1])
    return uci.UciSet("some", x, y, np.zeros(d, bool))


def write(folder: Path, name: str, samples: uci.UciSet) -> None:
    lines = [",".join([*(f"{v:.5f}" for v in row), f"c{c}"]) for row, c in zip(samples.x, samples.y, strict=True)]
    (folder / f"{name}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


# Measures


def test_friedman_ranks_share_ties() -> None:
    a = np.array([[0.9, 0.8, 0.8, 0.1], [0.5, 0.5, 0.5, 0.5], [0.1, 0.2, 0.3, 0.4]])
    assert uci.ranks(a) == pytest.approx([2.5, 8 / 3, 7 / 3, 2.5])  # places 1, 2.5, 2.5, 4; 2.5 each; 4, 3, 2, 1
    assert uci.ranks(a) == pytest.approx(rankdata(-a, axis=1).mean(0))


def test_friedman_ranks_are_those_of_scipys_test() -> None:
    a = np.random.default_rng(0).integers(0, 8, size=(40, 6)) / 10
    n, k = a.shape
    places = rankdata(-a, axis=1)
    ties = sum((t**3 - t).sum() for t in (np.unique(row, return_counts=True)[1] for row in places))
    statistic = 12 * n / (k * (k + 1)) * ((uci.ranks(a) - (k + 1) / 2) ** 2).sum() / (1 - ties / (n * k * (k * k - 1)))
    assert statistic == pytest.approx(friedmanchisquare(*a.T).statistic)


def test_parts_of_the_best() -> None:
    a = np.array([[1.0, 0.9, 0.95], [0.5, 0.4, 0.46], [0.2, 0.2, 0.1]])
    assert uci.share(a, 0.9).tolist() == pytest.approx([1, 2 / 3, 2 / 3])  # 90 % of the best itself counts
    assert uci.share(a, 0.95).tolist() == pytest.approx([1, 1 / 3, 1 / 3])
    assert uci.of_best(a).mean(0) == pytest.approx([1, (0.9 + 0.8 + 1) / 3, (0.95 + 0.92 + 0.5) / 3])


def test_rows_hold_ours_beside_the_published() -> None:
    a = np.full((2, 6), 0.5)
    a[:, 0] = 0.8, 1.0
    first = uci.comparison(a, published=True)[0]
    assert first["classifier"] == "NTK"
    assert (first["rank"], first["accuracy %"], first["P90 %"], first["PMA %"]) == (
        "1.00", "90.00 ± 10.00", "100.00", "100.00 ± 0.00",
    )  # fmt: skip
    assert (first["rank paper"], first["accuracy % paper"], first["P95 % paper"]) == ("28.34", "81.95 ± 14.10", "72.22")


# Splits


@pytest.mark.parametrize("k", [2, 4])
def test_folds_are_stratified_and_depend_on_the_seed_alone(k: int) -> None:
    y = np.random.default_rng(0).choice(4, size=203, p=[0.6, 0.3, 0.09, 0.01])
    fold = uci.folds(y, k, seed=3)
    for c in range(4):
        counts = np.bincount(fold[y == c], minlength=k)
        assert counts.max() - counts.min() <= 1, c
    sizes = np.bincount(fold, minlength=k)
    assert sizes.max() - sizes.min() <= 1
    assert (fold == uci.folds(y, k, seed=3)).all()
    assert (fold != uci.folds(y, k, seed=4)).any()


def test_every_classifier_gets_the_same_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, ClassifierJob] = {}

    def spy(name: str) -> Callable[[ClassifierJob], dict[str, Any]]:
        def look(job: ClassifierJob) -> dict[str, Any]:
            seen[name] = job
            return {"choice": {}, "validation": 0.0, "accuracies": [0.0]}

        return look

    for name in list(CLASSIFIERS):
        monkeypatch.setitem(CLASSIFIERS, name, spy(name))
        uci.measure(some(), name, SMALL, 2, "cpu")
    first = seen["NTK"]
    assert len(first.folds) == 8
    for job in seen.values():
        for a, b in zip([first.choose, *first.folds], [job.choose, *job.folds], strict=True):
            assert (a.x == b.x).all()
            assert (a.x_test == b.x_test).all()
            assert (a.y_test == b.y_test).all()


def test_a_repeat_asks_every_row_once() -> None:
    samples = some()
    _, several = uci.splits(samples, 2)
    for repeat in (several[:4], several[4:]):
        asked = np.concatenate([s.y_test for s in repeat])
        assert np.bincount(asked).tolist() == np.bincount(samples.y).tolist()
        assert all(len(s.y) + len(s.y_test) == 60 for s in repeat)
    assert any((a.y_test != b.y_test).any() for a, b in zip(several[:4], several[4:], strict=True))


def test_gaps_are_filled_from_the_training_rows_alone() -> None:
    x = np.array([[1.0, 0], [2.0, 1], [9.0, 1], [np.nan, np.nan], [np.nan, np.nan], [5.0, 0]])
    y = np.array([0, 1, 0, 1, 0, 1])
    train, test = np.array([0, 1, 2, 3]), np.array([4, 5])

    def split(values: np.ndarray) -> TableSplit:
        return uci.standardised(uci.UciSet("some", values, y, np.array([False, True])), train, test)

    found = split(x)
    filled = np.array([1.0, 2, 9, 2])  # the median of 1, 2, 9; of words the most frequent, 1
    assert found.x[:, 0] == pytest.approx((filled - filled.mean()) / filled.std())
    assert found.x_test[0, 0] == pytest.approx((2 - filled.mean()) / filled.std())
    words = np.array([0.0, 1, 1, 1])
    assert found.x[:, 1] == pytest.approx((words - words.mean()) / words.std())
    assert found.x_test[0, 1] == pytest.approx((1 - words.mean()) / words.std())
    fault = x.copy()
    fault[5] = 1e6, 0  # of a test row: nothing else may change
    again = split(fault)
    assert (again.x == found.x).all()
    assert (again.x_test[0] == found.x_test[0]).all()
    fault[2, 0] = 1.5  # of a training row: the median is another
    assert split(fault).x_test[0, 0] != found.x_test[0, 0]


def test_constant_and_empty_columns_are_zero() -> None:
    x = np.array([[3.7, np.nan, 1.0], [3.7, np.nan, 2.0], [3.7, np.nan, 4.0], [5.0, 2.0, 3.0]])
    samples = uci.UciSet("some", x, np.array([0, 1, 0, 1]), np.zeros(3, bool))
    split = uci.standardised(samples, np.array([0, 1, 2]), np.array([3]))
    assert (split.x[:, :2] == 0).all()
    assert (split.x_test[0, :2] == 0).all()
    assert split.x_test[0, 2] != 0


# Reading


def test_words_are_numbered_and_gaps_kept(tmp_path: Path) -> None:
    (tmp_path / "car.csv").write_text("2,red,1.5,b\n5more,?,2,a\n3,blue,?,b\n2,red,.5,a\n", encoding="utf-8")
    samples = uci.read_set(tmp_path / "car.csv")
    assert samples.words.tolist() == [True, True, False]
    assert np.array_equal(samples.x, [[0, 1, 1.5], [2, np.nan, 2], [1, 0, np.nan], [0, 1, 0.5]], equal_nan=True)
    assert samples.y.tolist() == [1, 0, 1, 0]
    assert samples.facts() == {"n": 4, "d": 3, "classes": 2, "rows of the rarest class": 2, "missing": 2}


def test_sets_that_are_left_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uci, "MOST", 50)
    write(tmp_path, "big", some(60))
    write(tmp_path, "good", some(40))
    write(tmp_path, "better", some(50))
    write(tmp_path, "one", some(20, classes=1))
    (tmp_path / "torn.csv").write_text("1,2,a\n1,b\n", encoding="utf-8")
    (tmp_path / "unknown.csv").write_text("1,2,a\n1,3,?\n", encoding="utf-8")
    used, out = uci.sets(Options(data=tmp_path))
    assert [s.name for s in used] == ["better", "good"]
    assert list(out) == ["big", "one", "torn", "unknown"]
    assert out["big"] == "60 rows, more than 50"
    assert "two classes" in out["one"]
    assert "line 2 has 2 fields" in out["torn"]
    assert "class is missing" in out["unknown"]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: None, "no \\*.csv in .*needed: UCI sets.*class in the last column"),
        (
            lambda folder: (folder / "a.csv").write_text("1,inf,a\n2,2,b\n", encoding="utf-8"),
            "none of the 1 sets.*infinite",
        ),
        (
            lambda folder: (folder / "a.csv").write_text("1\n2\n", encoding="utf-8"),
            "none of the 1 sets.*has one column",
        ),
    ],
)
def test_a_folder_without_sets_is_refused(make: Callable[[Path], object], said: str, tmp_path: Path) -> None:
    make(tmp_path)
    with pytest.raises(InputError, match=said):
        uci.reproduce_uci(Options(data=tmp_path))


def test_no_folder_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "uci"]) == 2
    assert "one CSV file each" in capsys.readouterr().err
    assert main(["reproduce", "uci", "--data", "/no/such/folder"]) == 2
    assert "/no/such/folder is no folder" in capsys.readouterr().err


# Classifiers


@pytest.mark.parametrize(("depth", "frozen"), [(1, 0), (2, 0), (2, 1), (3, 2), (5, 0), (5, 4)])
def test_the_ntk_with_frozen_layers_is_the_recursions(depth: int, frozen: int) -> None:
    x = np.random.default_rng(depth).normal(size=(9, 4))
    expected = oracle(x, depth, frozen)
    assert classifiers.ntk_gram(depth, frozen, x, x) == pytest.approx(expected, rel=1e-7, abs=1e-9)
    assert classifiers.ntk_gram(depth, frozen, x[:3], x[3:]) == pytest.approx(expected[:3, 3:], rel=1e-7, abs=1e-9)


def test_the_other_kernels_are_scikit_learns() -> None:
    from sklearn.metrics.pairwise import polynomial_kernel, rbf_kernel

    x, z = np.random.default_rng(0).normal(size=(2, 7, 3))
    assert classifiers.gaussian_gram(0.3, x, z) == pytest.approx(rbf_kernel(x, z, gamma=0.3))
    expected = polynomial_kernel(x, z, degree=3, gamma=0.1, coef0=1)
    assert classifiers.polynomial_gram(3, 0.1, x, z) == pytest.approx(expected)


def test_a_machine_without_bounded_duals_is_the_same_for_every_larger_cost() -> None:
    """What the search leaves out would not have changed its choice."""
    choose, several = uci.splits(some(80, classes=2), 1)
    job = ClassifierJob(choose, several, 2, replace(SMALL, gammas=(4.0,), costs=(0.1, 1.0, 10.0, 1e3, 1e4)))
    K, L = (classifiers.gaussian_gram(4.0, v, choose.x) for v in (choose.x, choose.x_test))
    every = {C: classifiers._svm(K, L, choose, C) for C in job.plan.costs}
    free = [C for C, (_, bounded) in every.items() if not bounded]
    assert free
    assert len({every[C][0] for C in free}) == 1
    assert classifiers.gaussian_svm(job)["validation"] == max(a for a, _ in every.values())


def test_networks_side_by_side_are_those_trained_alone() -> None:
    _, several = uci.splits(some(61, classes=3), 1)  # folds of two sizes: the shorter ones are filled up
    job = ClassifierJob(several[0], several, 3, replace(SMALL, steps=60))
    for initialisation, rate in (("he", 0.1), ("ntk", 3.0)):
        together = classifiers.train_networks(initialisation, 1, [rate] * 2, several[:2], job)  # type: ignore[arg-type]
        alone = classifiers.train_networks(initialisation, 1, [rate], several[:1], job)  # type: ignore[arg-type]
        assert together[0] == alone[0]
        assert min(together) > 0.7, initialisation


def test_initialisations() -> None:
    he, ntk = (classifiers.initial(kind, [50, 400, 400, 2]) for kind in ("he", "ntk"))  # type: ignore[arg-type]
    weights = [p for name, p in he.named_parameters() if name.endswith("weight")]
    assert [float(w.detach().var()) * w.shape[1] for w in weights] == pytest.approx([2, 2, 2], rel=0.15)
    assert [float(p.detach().std()) for p in ntk.parameters() if p.dim() > 1] == pytest.approx([1, 1, 1], rel=0.05)
    assert all((p == 0).all() for net in (he, ntk) for name, p in net.named_parameters() if name.endswith("bias"))


def test_a_class_that_the_training_rows_lack_is_a_mistake_and_no_error() -> None:
    samples = some(41, classes=2)
    lone = replace(samples, y=np.where(np.arange(41) == 7, 2, samples.y))
    for name in CLASSIFIERS:
        row = uci.measure(lone, name, SMALL, 1, "cpu")
        assert len(row["accuracies"]) == 4
        assert min(row["accuracies"]) < 1


# The whole


@pytest.mark.slow  # tests/command/test_explain_cli.py has it with a smaller plan
def test_the_quick_form_prints_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", "uci", "--quick", "--seeds", "1", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*CLASSIFIERS, "rank paper", "PMA %", "not the value"))
    record = json.loads((tmp_path / "uci-quick-table.json").read_text(encoding="utf-8"))
    assert set(record["sets"]) == {"breast cancer", "iris", "wine"}
    for facts in record["sets"].values():
        assert facts["n"] <= 200
        for row in facts["classifiers"].values():
            assert row["accuracy"] > 0.8, facts
            assert len(row["accuracies"]) == 4


def test_a_study_that_was_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", some(40))
    write(tmp_path, "b", some(30))
    monkeypatch.setattr(uci, "PLAN", SMALL)
    monkeypatch.setattr(uci.machine, "cores", lambda: 1)
    real, calls = uci.measure, list[str]()

    def stopping(samples: uci.UciSet, name: str, *rest: Any) -> Any:
        if len(calls) == 7:
            raise KeyboardInterrupt
        calls.append(f"{samples.name}: {name}")
        return real(samples, name, *rest)

    options = Options(data=tmp_path, out=tmp_path / "out", seeds=1, progress=False)
    monkeypatch.setattr(uci, "measure", stopping)
    with pytest.raises(KeyboardInterrupt):
        uci.reproduce_uci(options)
    assert list(json.loads((tmp_path / "out/uci.json").read_text(encoding="utf-8"))["rows"]) == calls
    before, calls = calls, []
    table = uci.reproduce_uci(options)
    assert len(calls) == 5
    assert not set(before) & set(calls)
    assert len(table.rows) == 6
    write(tmp_path, "b", some(30, seed=1))
    with pytest.raises(InputError, match="begun in another way.*sets"):
        uci.reproduce_uci(options)


def test_processes_find_what_one_alone_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "a", some(40))
    monkeypatch.setattr(uci, "PLAN", SMALL)
    monkeypatch.setattr(uci, "get_context", {"spawn": FORK}.get)  # no less apart from this process, and sooner there
    options = Options(data=tmp_path, seeds=1, progress=False)
    found = []
    for cores in (1, 2):
        monkeypatch.setattr(uci.machine, "cores", lambda cores=cores: cores)
        found.append(uci.reproduce_uci(options).rows)
    assert found[0] == found[1]


def test_the_plan_is_the_published_one() -> None:
    plan = Plan()
    kernels = sum(depth for depth in plan.depths)
    assert kernels * len(plan.costs) == 105
    assert len(plan.gammas) == kernels


# What is kept between two runs


def strict(text: str) -> Any:
    """JSON, and nothing that only Python's reader takes."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_has_no_words_for_what_is_no_number() -> None:
    value = {
        "nan": math.nan,
        "rows": [1.5, -math.inf, {"k": np.float32("inf")}],
        "tensor": torch.tensor([0.0, math.nan]),
    }
    assert strict(_json.text(value, 2)) == {"nan": None, "rows": [1.5, None, {"k": None}], "tensor": [0.0, None]}
    assert strict(_json.text({"name": "caf\u00e9 \ud800"})) == {"name": "caf\u00e9 \ud800"}


def test_rows_with_nan_are_kept_in_json_and_come_back(tmp_path: Path) -> None:
    kept = Kept(Options(out=tmp_path), "some", {})
    kept["row"] = {"tau": math.nan, "list": [0.5, math.nan], "name": "x"}
    assert strict((tmp_path / "some.json").read_text(encoding="utf-8"))["rows"]["row"] == {
        "tau": None,
        "list": [0.5, None],
        "name": "x",
    }
    again = Kept(Options(out=tmp_path), "some", {})["row"]
    assert math.isnan(again["tau"])
    assert math.isnan(again["list"][1])
    assert (again["list"][0], again["name"]) == (0.5, "x")


def trained_in(folder: Path) -> Kept:
    kept = Kept(Options(out=folder), "some", {})
    kept.network(torch.nn.Linear(3, 2), lambda model: None)
    kept["row"] = {"tau": 0.5}
    return kept


def cut(path: Path, part: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: cut(path, 0.0),
        lambda path: cut(path, 0.5),
        lambda path: cut(path, 0.99),
        lambda path: path.write_bytes(b"not a checkpoint"),
        lambda path: torch.save({"weight": torch.zeros(1)}, path),
        lambda path: torch.save([1, 2], path),
        lambda path: torch.save(torch.nn.Linear(3, 2), path),
    ],
)
def test_a_damaged_network_is_named(damage: Callable[[Path], object], tmp_path: Path) -> None:
    trained_in(tmp_path)
    damage(tmp_path / "some.pt")
    with pytest.raises(
        InputError, match=r"some\.pt cannot be read as the trained network .*Give another --out, or remove"
    ):
        Kept(Options(out=tmp_path), "some", {}).network(torch.nn.Linear(3, 2), lambda model: None)


def test_another_network_or_none_does_not_go_on_with_the_rows(tmp_path: Path) -> None:
    first = trained_in(tmp_path)
    torch.save(torch.nn.Linear(3, 2).state_dict(), tmp_path / "some.pt")
    with pytest.raises(InputError, match=r"some\.pt is another network than the one that the rows were measured on"):
        Kept(Options(out=tmp_path), "some", {}).network(torch.nn.Linear(3, 2), lambda model: None)
    (tmp_path / "some.pt").unlink()
    with pytest.raises(InputError, match=r"some\.pt, the network on which the rows .* is gone"):
        Kept(Options(out=tmp_path), "some", {}).network(torch.nn.Linear(3, 2), lambda model: None)
    assert first["row"] == {"tau": 0.5}


@pytest.mark.parametrize("text", ["", "[]", "{", '{"spec": [], "rows": 3}', '{"rows": {}}', "\x00"])
def test_a_damaged_record_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "some.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"some\.json is no record of this experiment"):
        Kept(Options(out=tmp_path), "some", {})
