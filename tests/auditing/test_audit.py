"""`tg.audit` from a network: what it takes, what it warns of, what it leaves alone; decisions applied."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tangency as tg
from tangency.auditing import apply
from tangency.auditing.applied import digest
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
    assert any("mean little" in w for w in found.warnings)


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
    return {"tangency_audit": 1, "samples": 4, "labels": digest(DATA.y), "decisions": rows} | changes


def test_decisions_are_applied(tmp_path: Path) -> None:
    file = tmp_path / "decisions.json"
    file.write_text(json.dumps(decided()))
    for given in (decided(), file, str(file)):
        cleaned = apply(DATA, given)
        assert (cleaned.y.tolist(), cleaned.ids) == ([0, 0, 0], ("a", "b", "d"))
    assert DATA.y.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tangency_audit": 9}, "no decisions of an audit"),
        ({"samples": 5}, "the labels it had then"),
        ({"labels": "0"}, "the labels it had then"),
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
