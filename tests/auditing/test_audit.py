"""`tg.audit` from a network: what it takes, what it warns of, what it leaves alone; decisions applied."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.auditing import apply
from tangency.auditing.applied import digest, stamp
from tangency.errors import InputError


def points(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 3
    return torch.randn(n, 3, generator=g) + 3 * torch.eye(3)[y], y


def trained(x: Tensor, y: Tensor, epochs: int = 10, width: int = 32) -> nn.Module:
    net = tg.models.mlp([3, width, 3])
    tg.models.fit(net, x, y, epochs=epochs, lr=1e-2, optimizer="adam", progress=False)
    return net.eval()


def test_a_network_tells_which_of_its_labels_are_wrong() -> None:
    x, y = points(150)
    given = y.clone()
    given[:9] = (given[:9] + 1) % 3
    z, y_test = points(60, 1)
    net = trained(x, given)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    found = tg.audit(net, (x, given), (z, y_test), progress=False)
    assert len(set(found.suspects.first(9).tolist()) & set(range(9))) >= 8
    assert found.choice.kernel in ("trNTK", "CK")
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    again = tg.audit(net, (x, y), (z, y_test), labels=given, progress=False)
    assert torch.equal(again.suspects.margin, found.suspects.margin)
    assert "trNTK" in found.words() or "CK" in found.words()
    assert len(found.table(5).splitlines()) == 6


def test_a_network_that_has_memorised_its_labels_gets_a_warning() -> None:
    x, y = points(60)
    given = y.clone()
    given[:12] = (given[:12] + 1) % 3
    net = trained(x, given, epochs=600, width=256)
    assert float((tg.models.outputs(net, x).argmax(1) == given).double().mean()) >= 0.99
    found = tg.audit(net, (x, given), progress=False)
    assert not found.sure
    assert any("fits" in w for w in found.warnings)
    assert "Caution" in found.words()


def test_a_kernel_that_knows_nothing_gets_a_warning() -> None:
    x, _ = points(90)
    y = torch.randint(0, 3, (90,), generator=torch.Generator().manual_seed(3))
    found = tg.audit(tg.models.mlp([3, 16, 3]).eval(), (x, y), progress=False)
    assert any("does not know these classes" in w for w in found.warnings)


def test_leaks_and_contradictions() -> None:
    x, y = points(90)
    z, y_test = points(30, 1)
    z[4], y_test[4] = x[10], (y[10] + 1) % 3
    found = tg.audit(trained(x, y), (x, y), (z, y_test), progress=False)
    assert found.leaks is not None
    pairs = found.leaks.pairs.tolist()
    assert [4, 10] in pairs
    at = pairs.index([4, 10])
    assert bool(found.leaks.exact[at])
    assert bool(found.leaks.contradictory[at])
    assert "leaked" in found.issues().columns
    assert bool(found.issues()["leaked"][10])


def test_groups_are_left_out_together() -> None:
    """Copies of a sample in its own group say nothing of it."""
    x, y = points(60)
    given = y.clone()
    given[0] = (given[0] + 1) % 3
    twice, labels = torch.cat([x, x[:1], x[:1]]), torch.cat([given, given[:1], given[:1]])
    groups = torch.cat([torch.arange(60), torch.tensor([0, 0])])
    net = trained(x, y)
    alone, together = (tg.audit(net, (twice, labels), groups=g, progress=False) for g in (None, groups))
    assert float(together.suspects.margin[0]) < float(alone.suspects.margin[0])


def test_retraining_checks_the_closed_form() -> None:
    x, y = points(90)
    given = y.clone()
    given[:10] = (given[:10] + 1) % 3
    sizes = []

    def retrain(data: tg.datasets.Labelled) -> nn.Module:
        sizes.append(len(data))
        assert isinstance(data.x, Tensor)
        return trained(data.x, data.y)

    found = tg.audit(
        retrain(tg.datasets.labelled((x, given))), (x, given), points(30, 1), retrain=retrain, progress=False
    )
    assert sizes[1:] == [90, 90 - found.suspects.count, 90]
    assert found.cleaning is not None
    assert found.cleaning.retrained is not None
    assert set(found.cleaning.retrained) == {"as given", "dropped", "mended"}


def test_projected_features_agree_with_the_whole_kernel() -> None:
    x, y = points(200)
    given = y.clone()
    given[:8] = (given[:8] + 1) % 3
    net = trained(x, given, width=64)
    k = tg.projected(tg.trace_ntk(net), dim=40)
    found = tg.audit(net, (x, given), kernel=tg.cosine(k), progress=False)
    phi = torch.nn.functional.normalize(k.features(x, progress=False).flatten(1), dim=1).double()
    same = tg.auditing.audit_gram(phi @ phi.T, given, progress=False)
    torch.testing.assert_close(found.suspects.margin.double(), same.suspects.margin.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": [0, 1]}, "one whole number"),
        ({"labels": ["cat"] * 30}, "the classes are"),
        ({"kernel": "NTK9"}, "no kernel"),
        ({"kernel": {}}, "kernels"),
        ({"kernel": {"a": 3}}, "a kernel"),
        ({"kernel": 3}, r"kernel=3; needed: a name \(trNTK"),
        ({"kernel": ["CK", 3]}, "needed: a name"),
        ({"labels": np.array(["cat"] * 30)}, "labels has 'cat'; the classes are 0, 1, 2"),
        ({"retrain": lambda data: None}, "give a test set"),
        ({"groups": [1, 2]}, "groups"),
        ({"samples": 0}, "whole numbers"),
    ],
)
def test_bad_input_is_refused(options: dict[str, object], message: str) -> None:
    net = tg.models.mlp([3, 8, 3]).eval()
    with pytest.raises(InputError, match=message):
        tg.audit(net, points(30), progress=False, **options)  # type: ignore[arg-type]


def test_full_kernels_and_what_is_no_model_are_refused() -> None:
    net = tg.models.mlp([3, 8, 3]).eval()
    with pytest.raises(InputError, match="one similarity for each pair"):
        tg.audit(net, points(30), kernel=tg.full_ntk(net), progress=False)
    with pytest.raises(InputError, match=r"torch\.nn\.Module"):
        tg.audit("net", points(30))  # type: ignore[arg-type]


# ---- decisions applied ----------------------------------------------------------------------------------------------

DATA = tg.datasets.Labelled(torch.eye(4), [0, 1, 1, 0], ("cat", "dog"), ids=["a", "b", "c", "d"])


def decided(**changes: object) -> dict[str, object]:
    rows = [
        {"sample": 1, "action": "fix", "label": "cat"},
        {"sample": 2, "action": "drop"},
        {"sample": 0, "action": "keep"},
    ]
    return {"tangency_audit": 1, "samples": 4, "data": digest(DATA), "decisions": rows} | changes


def test_decisions_are_applied(tmp_path: Path) -> None:
    file = tmp_path / "decisions.json"
    file.write_text(json.dumps(decided()), encoding="utf-8")
    for given in (decided(), file, str(file)):
        cleaned = apply(DATA, given)
        assert (cleaned.y.tolist(), cleaned.ids) == ([0, 0, 0], ("a", "b", "d"))
    assert DATA.y.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tangency_audit": 9}, "no decisions of an audit"),
        ({"samples": 5}, "about 5 samples; the data have 4. Give the training set that was audited, as it was then"),
        ({"data": None}, "what they are about"),
        ({"data": {}}, "the labels and the classes and the inputs are not what was audited"),
        ({"decisions": 3}, "no list"),
        ({"decisions": [{"sample": 9, "action": "keep"}]}, "from 0 to 3"),
        ({"decisions": [{"sample": 1, "action": "mend"}]}, "keep, fix, drop"),
        ({"decisions": [{"sample": 1, "action": "fix", "label": "cow"}]}, "the classes are"),
        ({"decisions": [{"sample": 1, "action": "keep"}] * 2}, "twice"),
        ({"decisions": [{"sample": i, "action": "drop"} for i in range(4)]}, "every sample is dropped"),
    ],
)
def test_decisions_about_other_data_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        apply(DATA, decided(**changes))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (replace(DATA, x=torch.eye(4)[[0, 2, 1, 3]]), "the inputs are"),
        (replace(DATA, x=torch.eye(4).double()), "the inputs are"),
        (replace(DATA, classes=("cat", "cow")), "the classes are"),
        (replace(DATA, ids=("a", "c", "b", "d")), "the ids are"),
        (replace(DATA, y=torch.tensor([1, 1, 1, 0])), "the labels are"),
    ],
)
def test_decisions_name_what_of_the_data_is_another(other: tg.datasets.Labelled, what: str) -> None:
    with pytest.raises(InputError, match=f"about other data: {what} not what was audited. Give the training set that"):
        apply(other, decided())


def test_decisions_about_a_folder_in_which_a_file_was_replaced_are_refused(tmp_path: Path) -> None:
    """The files are as many, and so are those of each class, but number 5 is another picture."""
    images = pytest.importorskip("PIL.Image")
    root = tmp_path / "pictures"
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for k in range(8):
            images.new("L", (4, 4), 20 * k).save(root / name / f"{k:02}.png")
    before = tg.datasets.folder(root, progress=False)
    decisions = {"tangency_audit": 1, "samples": 16, "data": digest(before)}
    decisions |= {"decisions": [{"sample": 5, "action": "drop"}]}
    kept = apply(before, decisions).ids
    assert kept is not None
    assert not [name for name in kept if name.endswith("cat/05.png")]
    (root / "cat" / "05.png").unlink()
    images.new("L", (4, 4), 9).save(root / "cat" / "09.png")
    table = tmp_path / "decisions.csv"
    assert before.ids is not None
    about = stamp(16, digest(before))
    table.write_text(f"sample,id,given,action,label,audited\n5,{before.ids[5]},cat,drop,,{about}\n", encoding="utf-8")
    after = tg.datasets.folder(root, progress=False)
    assert after.y.tolist() == before.y.tolist()
    with pytest.raises(InputError, match="the ids and the inputs are not what was audited"):
        apply(after, decisions)
    with pytest.raises(InputError, match="the ids and the inputs are not what was audited"):
        apply(after, table)
    table.write_text(table.read_text(encoding="utf-8").replace(about, stamp(16, digest(after))), encoding="utf-8")
    with pytest.raises(InputError, match=r"sample 5 was called '.*05.png' then and is '.*06.png' in the data"):
        apply(after, table)


def test_samples_in_any_form_are_applied_to(tmp_path: Path) -> None:
    x, y = torch.eye(4), torch.tensor([0, 1, 1, 0])
    about = {"tangency_audit": 1, "samples": 4, "decisions": [{"sample": 1, "action": "drop"}]}
    mine = about | {"data": digest(tg.datasets.labelled((x, y)))}
    for data in ((x, y), (x, y.tolist()), torch.utils.data.TensorDataset(x, y), DATA):
        given = mine if data is not DATA else about | {"data": digest(replace(DATA, ids=None))}
        assert apply(data, given).y.tolist() == [0, 1, 0]  # type: ignore[arg-type]
    # The network that was audited may have had more classes than the data.
    wider = replace(tg.datasets.labelled((x, y)), classes=tuple("01234"))
    fixed = mine | {"data": digest(wider), "decisions": [{"sample": 1, "action": "fix", "label": "4"}]}
    assert apply((x, y), fixed).y.tolist() == [0, 4, 1, 0]
    with pytest.raises(InputError, match="targets are real numbers, which cannot be applied"):
        apply((x, y.float()), mine)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"data is a int; needed: \(x, y\)"):
        apply(3, mine)  # type: ignore[arg-type]


CSV = "sample,given,action,label,audited\n"
ABOUT = stamp(4, digest(DATA))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column sample, given, action, label and 1 more"),
        ("sample,given,action,label\n1,dog,drop,\n", "no column audited; .* wrote none: take their JSON"),
        (f"{CSV}1,dog,drop\n", "line 2 has 3 cells and the first one 5"),
        (f"{CSV}1,dog,drop,,{ABOUT},\n", "line 2 has 6 cells"),
        (f"{CSV[:-1]},label\n1,dog,fix,cat,{ABOUT},dog\n", "two columns are called 'label'"),
        (f'{CSV}1,"dog,drop,,{ABOUT}\n', "is no CSV"),
        (f'{CSV}1,"dog"x,drop,,{ABOUT}\n', "is no CSV"),
        (f"{CSV}1,{'a' * 140_000},drop,,{ABOUT}\n", "is no CSV .field larger"),
        (f"{CSV}1,dog,drop,,{stamp(45, digest(DATA))}\n", "about 45 samples; the data have 4"),
        (f"{CSV}1,dog,drop,,{stamp(4, {**digest(DATA), 'inputs': '0'})}\n", "the inputs are not what was audited"),
        (f"{CSV}1,dog,drop,,{stamp(4, {**digest(DATA), 'classes': '0'})}\n", "the classes are not what was audited"),
        (f"{CSV}1,dog,drop,,{ABOUT}\n2,dog,drop,,{ABOUT}x\n", "about several sets of data"),
        (f"{CSV}1,dog,drop,,\n", "which says no data"),
        (f"{CSV}1,dog,drop,,audit 2{ABOUT[7:]}\n", "which says no data"),
        (f"{CSV}\uff11,dog,drop,,{ABOUT}\n", "sample '\uff11'; needed: a number from 0 to 3"),
        (f"{CSV} 1,dog,drop,,{ABOUT}\n", "sample ' 1'; needed"),
        (f"{CSV}{'1' * 5000},dog,drop,,{ABOUT}\n", "needed: a number from 0 to 3"),
        (f"{CSV}1,dog,drop,,{ABOUT}\n01,dog,keep,,{ABOUT}\n", "sample 1 is there twice"),
        (f"{CSV}1,,drop,,{ABOUT}\n", "sample 1 was '' then and is 'dog'"),
    ],
)
def test_tables_of_decisions_are_read_strictly(text: str, message: str, tmp_path: Path) -> None:
    """A row goes where it was made for, or nowhere."""
    file = tmp_path / "decisions.csv"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        apply(DATA, file)
    file.write_text(f"\ufeff{CSV}\n1,dog,drop,,{ABOUT}\n\n", encoding="utf-8")  # empty lines, a byte order mark
    assert len(apply(DATA, file)) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"tangency_audit": 1', '"tangency_audit": true'), "no decisions of an audit"),
        (('"samples": 4', '"samples": 4.0'), "about 4 samples"),
        (('"samples": 4', '"samples": 4, "samples": 5'), '"samples" is there twice'),
        (('"sample": 1,', '"sample": true,'), "sample True; needed: a number"),
        (('"sample": 1,', '"sample": "1",'), "sample '1'; needed: a number"),
        (('"sample": 1,', '"sample": 1.0,'), "sample 1; needed: a number"),
        (('"sample": 1,', f'"sample": {"1" * 5000},'), "a number with too many digits"),
        (('"sample": 1,', '"sample": NaN,'), "NaN, which is not JSON"),
        (('"sample": 1,', f'"sample": {"[" * 10**5}{"]" * 10**5},'), "nested too deeply"),
        (('"drop"', '["drop"]'), "action ."),
        (('"label": "cat"', '"label": ["cat"]'), "label ."),
        (('"label": "cat"', '"label": null'), "label None"),
    ],
)
def test_decisions_are_read_strictly(change: tuple[str, str], message: str, tmp_path: Path) -> None:
    text = json.dumps(decided())
    assert change[0] in text
    file = tmp_path / "decisions.json"
    file.write_text(text.replace(*change), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        apply(DATA, file)


def test_names_that_look_like_formulas_come_through_the_csv(tmp_path: Path) -> None:
    """As the page writes them: with a ' before what a spreadsheet would run, and before a '."""
    data = tg.datasets.Labelled(torch.eye(3), [0, 1, 0], ("=x", "'=x"), ids=["-s0", "'-s0", "=s"])
    file = tmp_path / "decisions.csv"
    rows = ["0,'-s0,'=x,fix,''=x", "1,''-s0,''=x,fix,'=x", "2,'=s,'=x,keep,"]
    text = "".join(f"{row},{stamp(3, digest(data))}\n" for row in rows)
    file.write_text(f"sample,id,given,action,label,audited\n{text}", encoding="utf-8")
    assert apply(data, file).y.tolist() == [1, 0, 0]


def test_the_rate_is_bounded_by_a_copy_that_has_seen_no_label() -> None:
    """A copy with shuffled weights, of the default kernel alone; what is frozen is not shuffled, the model is left."""
    x, y = points(240)
    given = y.clone()
    given[:72] = (given[:72] + 1) % 3
    net = trained(x, given, epochs=200, width=128)
    before = [p.clone() for p in net.parameters()]
    found = tg.audit(net, (x, given), progress=False)
    assert list(found.choice.regs) == ["trNTK"]
    assert found.noise.blind is not None
    assert found.noise.low <= 0.3 <= max(0.3, found.noise.blind) <= found.noise.high
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    assert tg.audit(net, (x, given), kernel="trNTK", progress=False).noise.blind is None
    for p in net.parameters():
        p.requires_grad_(False)
    net[-1].weight.requires_grad_(True)  # type: ignore[index, union-attr]
    frozen = tg.decisions.audited._shuffled(net)
    assert torch.equal(frozen[0].weight, net[0].weight)  # type: ignore[index]
    assert not torch.equal(frozen[-1].weight, net[-1].weight)  # type: ignore[index]


# ---- what networks and data may be ----------------------------------------------------------------------------------


def test_names_from_numpy_and_pandas() -> None:
    pandas = pytest.importorskip("pandas")
    x, y = points(30)
    net = tg.models.mlp([3, 8, 3]).eval()
    data = tg.datasets.Labelled(x, y, ("ant", "bee", "cow"))
    names = np.array(data.classes)[y.numpy()]
    subjects = [f"s{i % 9}" for i in range(30)]
    margin = tg.audit(net, data, progress=False).suspects.margin
    grouped = tg.audit(net, data, groups=subjects, progress=False).suspects.margin
    assert not torch.equal(margin, grouped)
    for labels in (names, names.astype(object), pandas.Series(names), pandas.Categorical(names), pandas.Series(y)):
        assert torch.equal(tg.audit(net, data, labels=labels, progress=False).suspects.margin, margin)
    for groups in (pandas.Series(subjects), pandas.Series(subjects, dtype=object), np.array(subjects, dtype=object)):
        assert torch.equal(tg.audit(net, data, groups=groups, progress=False).suspects.margin, grouped)
    for column in (pandas.Series(y.numpy(), index=range(9, 39)), pandas.array(y.tolist(), dtype="Int64")):
        assert torch.equal(tg.audit(net, (x, column), progress=False).suspects.margin, margin)


@pytest.mark.parametrize("names", [None, tuple("abcde")])
def test_a_network_may_have_classes_of_which_there_is_no_sample(names: tuple[str, ...] | None) -> None:
    x, y = points(60)
    y = y.clamp_max(1)
    net = tg.models.mlp([3, 16, 5]).eval()
    data = (x, y) if names is None else tg.datasets.Labelled(x, y, names)
    asked = (x[:9], torch.full((9,), 4)) if names is None else None
    found = tg.audit(net, data, asked, progress=False)
    assert found.train.classes == (names or tuple("01234"))
    assert set(found.suspects.suggested.tolist()) <= {0, 1}
    assert "no sample of " + ("2, 3, 4" if names is None else "c, d, e") in str(found.facts["said"])


def test_networks_that_cannot_be_audited_as_they_are() -> None:
    x, y = points(30)
    net = tg.models.mlp([3, 8, 3]).eval()
    with torch.inference_mode(), pytest.raises(InputError, match="Call it outside of inference_mode"):
        tg.audit(net, (x, y), progress=False)
    with pytest.raises(InputError, match=r"parameters are torch\.float16; .* copy\.deepcopy\(model\)\.float\(\)"):
        tg.audit(tg.models.mlp([3, 8, 3]).half().eval(), (x.half(), y), progress=False)
    with pytest.raises(InputError, match=r"If these are classes: y\.long\(\)"):
        tg.audit(net, (x, y.float()), progress=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x @ x.T - 50 * torch.eye(len(x)), r"k\(x, x\) of sample 0 is -.*: K is not positive semi-definite"),
        (lambda x: 0 * (x @ x.T), r"k\(x, x\) is 0 for all samples"),
        (lambda x: torch.eye(len(x)) - torch.ones(len(x), len(x)) * 0.9, "K is not positive semi-definite; needed"),
    ],
)
def test_what_is_no_gram_is_refused(make: Callable[[Tensor], Tensor], message: str) -> None:
    x, y = points(90)
    with pytest.raises(InputError, match=message):
        tg.auditing.audit_gram(make(x.double()), y, progress=False)


def test_what_retrain_returns_is_named() -> None:
    x, y = points(60)
    net = trained(x, y)
    broken = tg.models.mlp([3, 8, 3]).eval()
    torch.nn.init.constant_(next(broken.parameters()), float("nan"))
    for model, words in (
        (nn.Linear(3, 7).eval(), "outputs of shape"),
        (broken, "outputs"),
        (nn.Linear(5, 3).eval(), ""),
    ):
        with pytest.raises(InputError, match=f"the network that retrain returned for the data 'as given': .*{words}"):
            tg.audit(net, (x, y), points(30, 1), retrain=lambda data, model=model: model, progress=False)


def test_where_every_sample_is_a_suspect_the_audit_is_not_lost() -> None:
    x, y = points(30)
    found = tg.audit(trained(x, y), (x, y), points(30, 1), progress=False)
    all_wrong = replace(found, suspects=replace(found.suspects, wrong=torch.ones(30).double()))
    sizes = []

    def retrain(data: tg.datasets.Labelled) -> nn.Module:
        sizes.append(len(data))
        return trained(x, y)

    again = tg.decisions.audited._retrained(all_wrong, retrain, None)
    assert again.cleaning is not None
    assert again.cleaning.retrained is not None
    assert list(again.cleaning.retrained) == ["as given", "mended"]
    assert sizes == [30, 30]
    assert "every sample is a suspect" in again.warnings[-1]


def test_a_sample_whose_kernel_is_0_is_like_none() -> None:
    x, y = points(60)
    z, y_test = points(30, 1)
    x[3], z[4] = 0, 0
    found = tg.auditing.audit_gram(
        x @ x.T, y, cross=z @ x.T, prior=z.square().sum(1), test_labels=y_test, progress=False
    )
    assert found.test_support is not None
    assert (float(found.support.unexplained[3]), float(found.test_support.unexplained[4])) == (1, 1)
    assert bool(found.similarity.isfinite().all())
    assert not [pair for pair in found.copies.pairs.tolist() if 3 in pair]
