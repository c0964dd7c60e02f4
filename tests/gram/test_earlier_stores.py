"""Stores that an earlier tangency wrote (tests/fixtures/make_stores.py) open, are believed, and are gone on with."""

import shutil
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import tangency as tg
from tangency import cli
from tangency.gram import store as gram_store
from tangency.gram.manifest import differences

FIXTURES = Path(__file__).parents[1] / "fixtures"
sys.path.append(str(FIXTURES))

import make_stores  # noqa: E402

FINISHED = [name for name, made in make_stores.STORES.items() if made.kept is None]
# `tangency verify` takes Gram matrices, of inputs that a function returns.
VERIFIED = [name for name in FINISHED if "features" not in name]
# Bits depend on torch, on the processor and on its libraries, and no name that a program can ask for says whether two
# are alike. So numbers are compared up to rounding, beside the largest: 2.9 ε at worst were measured under the settings
# of benchmarks/robustness/processors.py (AMD, Intel, without AVX2), and not quite three times that is allowed.
ROUNDING = 8


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Path]:
    """A copy that may be written to. That another torch, Python or tangency made it is said, and is no fault."""
    shutil.copytree(make_stores.HERE, tmp_path / "stores")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*was begun with other versions")
        yield tmp_path / "stores"


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The tiles that are written from here on."""
    tiles: list[tuple[int, int]] = []
    write = gram_store.Store.write

    def watched(self: gram_store.Store, i: int, j: int, tile: np.ndarray) -> None:
        tiles.append((i, j))
        write(self, i, j, tile)

    monkeypatch.setattr(gram_store.Store, "write", watched)
    return tiles


def _opened(store: Path) -> Tensor:
    """What it holds, without a kernel."""
    if make_stores.STORES[store.name].features:
        return tg.projection.open_features(str(store)).tensor()
    return tg.open_gram(str(store)).dense()


def _same(a: Tensor, b: Tensor) -> None:
    """Equal up to rounding, in every entry."""
    assert a.dtype == b.dtype
    within = ROUNDING * torch.finfo(a.dtype).eps * float(b.abs().max())
    torch.testing.assert_close(a, b, rtol=0, atol=within)


def _files(store: Path) -> dict[str, bytes]:
    return {str(p.relative_to(store)): p.read_bytes() for p in sorted(store.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_store_holds_what_is_computed_today(stores: Path, name: str) -> None:
    today = make_stores.STORES[name].into(None)
    value = today if isinstance(today, Tensor) else today.dense()
    _same(_opened(stores / name), value)


@pytest.mark.parametrize("name", FINISHED)
def test_a_finished_store_is_returned_as_it_is(stores: Path, name: str, written: list[tuple[int, int]]) -> None:
    before = _files(stores / name)
    held = make_stores.STORES[name].into(stores / name)
    value = held.tensor() if make_stores.STORES[name].features else held.dense()
    assert torch.equal(value, _opened(stores / name))
    assert written == []
    assert _files(stores / name) == before


@pytest.mark.parametrize("name", ["trace", "features"])
def test_an_interrupted_store_is_gone_on_with(stores: Path, name: str, written: list[tuple[int, int]]) -> None:
    store, made = stores / f"{name}_interrupted", make_stores.STORES[f"{name}_interrupted"]
    gram = gram_store.open_store(str(store))
    there, before = gram.store.finished(), _files(store)
    assert len(there) == made.kept
    made.into(store)
    assert sorted([*written, *there]) == sorted(gram.store.plan.tiles())
    assert before.items() <= _files(store).items()  # what was there is as it was
    _same(_opened(store), _opened(stores / name))


def test_features_are_still_those_of_their_kernel(stores: Path) -> None:
    kernel, x = make_stores.STORES["features"].job()
    features = tg.projection.open_features(str(stores / "features"))
    _same(tg.compute(kernel, features, progress=False).dense(), tg.compute(kernel, x, progress=False).dense())


@pytest.mark.parametrize("name", VERIFIED)
def test_the_command_accepts_them(
    stores: Path, name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_stores, "job", make_stores.STORES[name].job, raising=False)
    count = tg.open_gram(str(stores / name)).store.plan.count
    assert cli.main(["status", str(stores / name)]) == 0
    assert f"{count} of {count} tiles" in capsys.readouterr().out
    assert cli.main(["verify", str(stores / name), f"{FIXTURES / 'make_stores.py'}:job"]) == 0
    said = capsys.readouterr().out
    assert f"{count} of {count} finished tiles match their checksums" in said
    assert f"{count} tiles computed again" in said


def test_another_kernel_is_refused(stores: Path) -> None:
    model, x = make_stores.drawn()
    model.gain = 0.75
    with pytest.raises(tg.errors.StoreMismatch):
        tg.compute(tg.trace_ntk(model), x, store=str(stores / "trace"), tile=2, progress=False)
    model.gain = 0.5
    with pytest.raises(tg.errors.StoreMismatch, match="head"):
        tg.compute(tg.head_ntk(model, lambda out: out.sum(1)), x, store=str(stores / "trace"), tile=2, progress=False)


def test_a_function_that_moved_keeps_its_name_in_stores() -> None:
    """Else `explain(store=…)`, which finds its Grams by a hash of the spec, would compute them again."""
    head = str(tg.pseudo_ntk(torch.nn.Linear(3, 2)).spec()["head"])
    assert head.startswith("tangency.ntk._mean_head:")
    if sys.version_info[:2] == (3, 11):  # which instructions a function is compiled to, each Python decides anew
        assert head.endswith(":00eef8a5")


def test_errors_that_a_rule_measured_of_itself_may_differ_in_their_last_digits() -> None:
    was = {"dual": {"name": "tanh", "error": 2.4331120570893924e-11}}
    assert not differences(was, {"dual": {"name": "tanh", "error": 2.433123958497916e-11}})
    assert list(differences(was, {"dual": {"name": "tanh", "error": 3e-11}})) == ["dual.error"]
    assert list(differences({"reg": 1e-3}, {"reg": 1.0001e-3})) == ["reg"]
