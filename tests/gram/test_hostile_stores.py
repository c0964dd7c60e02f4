"""Stores that somebody sent, copied, edited or broke, and models that changed since: never believed without a look."""

import importlib
import json
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scaled_net
import store_job
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor, nn

import tangency as tg
from tangency.cli import main
from tangency.gram import executors
from tangency.gram.compute import Run
from tangency.gram.manifest import manifest_digest, manifest_file
from tangency.gram.shelf import Folder
from tangency.gram.store import Store

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "gram"
    tg.compute(store_job.kernel(), store_job.inputs(), store=path, tile=50, progress=False)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def again(path: Any, **options: Any) -> tg.Gram:
    given: dict[str, Any] = {"tile": 50, "progress": False} | options
    return tg.compute(store_job.kernel(), store_job.inputs(), store=path, **given)


# What a store names


EVIL = "from pathlib import Path\nPath('ran').write_text('')\ndef make():\n    raise SystemExit('ran')\n"


@pytest.mark.parametrize("name", ["copy/evil.py:make", "evil:make", "os:abort"])
def test_verify_runs_nothing_that_the_store_names(
    copy: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(copy.parent)
    (copy / "evil.py").write_text(EVIL, encoding="utf-8")
    Path("evil.py").write_text(EVIL, encoding="utf-8")
    (copy / "zarr.json").write_bytes(manifest_file(tg.open_gram(copy).manifest, name))
    for command in (["verify", "copy"], ["status", "copy"], ["status", "copy", "--json"]):
        assert main(command) == 0
    said = capsys.readouterr().out
    assert f"tangency verify copy {name}" in said
    assert not Path("ran").exists()


def test_a_name_in_a_store_is_quoted_and_shown(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(copy.parent)
    (copy / "zarr.json").write_bytes(manifest_file(tg.open_gram(copy).manifest, "job.py:make; rm -rf ~\x1b[2J\r$(id)"))
    (copy / "c" / "0" / "1").unlink()
    assert main(["status", "copy"]) == 0
    said = capsys.readouterr().out
    assert r"'job.py:make; rm -rf ~\x1b[2J\r$(id)'" in said
    assert "\x1b" not in said


def test_a_file_may_be_called_as_a_library_is(tmp_path: Path) -> None:
    """Nor does a file in the job's folder take a library's place."""
    job = (
        "import torch, tangency as tg\ndef make():\n    return tg.trace_ntk(torch.nn.Linear(3, 2)), torch.ones(4, 3)\n"
    )
    for name in ("random", "tqdm", "zarr"):
        (tmp_path / f"{name}.py").write_text(job + f"print('{name} was run')\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "tangency", "gram", "random.py:make", "--store", "k"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith("was run")] == ["random was run"]


def test_links_inside_a_store_are_not_followed(copy: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    for inside in ("c", "c/0", "seal", "zarr.json", "c/0/0"):
        broken = Path(shutil.copytree(copy, tmp_path / "broken"))
        if elsewhere.is_dir():
            shutil.rmtree(elsewhere)
        elsewhere.unlink(missing_ok=True)
        os.rename(broken / inside, elsewhere)
        (broken / inside).symlink_to(elsewhere)
        before = {p: p.read_bytes() for p in (elsewhere, *elsewhere.rglob("*")) if p.is_file()}
        with pytest.raises(tg.StoreError, match="is a link to .*only the store's folder itself"):
            again(broken).dense()
        assert before == {p: p.read_bytes() for p in (elsewhere, *elsewhere.rglob("*")) if p.is_file()}
        shutil.rmtree(broken)
    (tmp_path / "link").symlink_to(copy)
    assert again(tmp_path / "link").progress == (10, 10)


# Models that changed since


SCALE = 1.0


class Helper:
    def __init__(self) -> None:
        self.options = {"deep": [{"slope": 1.0}]}

    def __call__(self, x: Tensor) -> Tensor:
        return F.leaky_relu(x, 0.1) * self.options["deep"][0]["slope"]


class Changing(nn.Module):
    """Everything that decides its outputs is invisible to its printed form and its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
        self.power, self.helper, self.act = 1, Helper(), lambda x: x
        self.config = {"layers": [{"gain": 1.0}]}

    def forward(self, x: Tensor) -> Tensor:
        h = self.helper(self.act(self.a(x))) ** self.power
        return self.b(h) * self.config["layers"][0]["gain"] * SCALE


def other_forward(self: Changing, x: Tensor) -> Tensor:
    return self.b(self.helper(self.a(x)).abs())


def other_constant(self: Changing, x: Tensor) -> Tensor:
    h = self.helper(self.act(self.a(x))) ** self.power
    return self.b(h) * self.config["layers"][0]["gain"] * SCALE * 1.01


def sharp(out: Tensor) -> Tensor:
    return (out * SCALE).sum(1)


CHANGES: dict[str, tuple[Callable[[Changing, pytest.MonkeyPatch], Any], str]] = {
    "forward": (lambda m, p: p.setattr(Changing, "forward", other_forward), "Changing.forward"),
    "constant": (lambda m, p: p.setattr(Changing, "forward", other_constant), "Changing.forward"),
    "attribute": (lambda m, p: setattr(m, "power", 2), "power"),
    "helper": (lambda m, p: m.helper.options["deep"][0].update(slope=0.9), "helper"),
    "configuration": (lambda m, p: m.config["layers"][0].update(gain=0.9), "config"),
    "lambda": (lambda m, p: setattr(m, "act", lambda x: 2 * x), "act"),
    "global": (lambda m, p: p.setattr(sys.modules[__name__], "SCALE", 1.1), "reads SCALE"),
    "hook": (lambda m, p: m.a.register_forward_hook(lambda _m, _i, out: out * 1.1), "hook"),
    "hook before": (lambda m, p: m.b.register_forward_pre_hook(lambda _m, args: (args[0] * 1.1,)), "hook"),
}  # fmt: skip


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.every(3)
def test_another_model_is_told_by_its_numbers(
    name: str, finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, path = Changing(), tmp_path / "k"
    made = tg.compute(tg.trace_ntk(model), X, store=path, tile=5, progress=False)
    assert isinstance(made, tg.gram.store.StoredGram)
    if not finished:
        made.store.discard(1, 2)
    change, why = CHANGES[name]
    change(model, monkeypatch)
    with pytest.raises(tg.StoreMismatch, match=r"k\(x1\[\d+\], x1\[\d+\]\): ") as e:
        tg.compute(tg.trace_ntk(model), X, store=path, tile=5, progress=False)
    assert any(why in field for field in e.value.fields if field.startswith("code of")), e.value
    assert made.progress == ((10, 10) if finished else (9, 10))


def test_a_global_that_a_head_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    tg.compute(tg.head_ntk(model, sharp), X, store=tmp_path / "k", progress=False)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 1.5)
    with pytest.raises(tg.StoreMismatch, match="code of head reads SCALE: '1.0' in the store, '1.5' now"):
        tg.compute(tg.head_ntk(model, sharp), X, store=tmp_path / "k", progress=False)


def test_stored_features_of_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, path = Changing(), tmp_path / "phi"
    k = tg.projected(tg.pseudo_ntk(model), dim=16)
    phi = k.features(X, store=path, progress=False)
    torch.testing.assert_close(k(phi, X), k(X))
    model.power = 2
    with pytest.raises(tg.StoreMismatch, match="power"):
        k.features(X, store=path, progress=False)
    with pytest.raises(tg.InputError, match="features of another kernel: Changing:power"):  # against new ones
        k(phi, X)


def test_code_that_computes_the_same_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, path = Changing(), tmp_path / "k"
    want = tg.compute(tg.trace_ntk(model), X, store=path, progress=False).dense()
    model.note = "renamed"
    with pytest.warns(
        tg.StoreWarning, match="attributes or globals look different .*note: .absent. → 'renamed'.* kernel are the same"
    ):
        got = tg.compute(tg.trace_ntk(model), X, store=path, progress=False)
    assert torch.equal(got.dense(), want)


def test_workers_that_import_something_else_are_refused(workers: tg.Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class travels by its name; what the program set in its module does not."""
    k = tg.trace_ntk(scaled_net.Net(3, 2))
    tg.compute(k, X, tile=5, executor=workers, progress=False)
    monkeypatch.setattr(scaled_net, "SCALE", 2.0)
    with pytest.raises(tg.ModelError, match=r"other numbers on a worker: k\(x1\[0\], x1\[0\]\)"):
        tg.compute(k, X, tile=5, executor=workers, progress=False)


# Races


def test_two_models_that_begin_one_store_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both find nothing there, then both begin: one is first, the other is refused."""
    at_once, find = threading.Barrier(2), Store.find

    def together(where: Any) -> Any:
        found = find(where)
        if threading.current_thread() is not threading.main_thread() and not where.__dict__.setdefault("met", False):
            where.met = True
            at_once.wait(60)
        return found

    monkeypatch.setattr(Store, "find", staticmethod(together))
    for k in range(4):
        found: dict[int, Any] = {}
        kernels = {seed: store_job.kernel(seed) for seed in (1, 2)}

        def run(seed: int, k: int = k, found: dict[int, Any] = found, kernels: dict[int, Any] = kernels) -> None:
            try:
                found[seed] = tg.compute(kernels[seed], X.repeat(1, 2), store=tmp_path / str(k), tile=5, progress=False)
            except tg.StoreMismatch as e:
                found[seed] = e

        threads = [threading.Thread(target=run, args=(seed,)) for seed in (1, 2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        refused = [seed for seed, v in found.items() if isinstance(v, tg.StoreMismatch)]
        assert len(refused) == 1, found
        (first,) = {1, 2} - set(refused)
        want = tg.compute(store_job.kernel(first), X.repeat(1, 2), tile=5, progress=False).dense()
        assert torch.equal(found[first].dense(), want)


def test_a_store_replaced_or_moved_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, harms = Store.write, []

    def disturbed(self: Store, i: int, j: int, tile: np.ndarray) -> None:
        write(self, i, j, tile)
        if (i, j) == (1, 1):
            harms[0]()

    def moved() -> None:
        (tmp_path / "k").rename(tmp_path / "moved")

    def headless() -> None:
        (tmp_path / "k" / "zarr.json").unlink()

    def replaced() -> None:
        other = tg.open_gram(tmp_path / "k").manifest | {"begun": "another"}
        (tmp_path / "k" / "zarr.json").write_bytes(manifest_file(other))

    def deleted() -> None:
        (tmp_path / "k" / "c" / "1" / "1").unlink()  # the one just written: others may still be with their writers

    monkeypatch.setattr(Store, "write", disturbed)
    for harm, what in (
        (moved, "cannot be written|not there any more"),
        (headless, "not there any more"),
        (replaced, "is another store now"),
        (deleted, r"1 of 10 tiles are not in .* at the end, first \(1, 1\)"),
    ):
        for folder in ("k", "moved"):
            shutil.rmtree(tmp_path / folder, ignore_errors=True)
        harms[:] = [harm]
        with pytest.raises(tg.StoreError, match=what):
            again(tmp_path / "k")
        assert not (tmp_path / "moved").exists() or not (tmp_path / "k").exists(), "tiles in two folders"


class Careless:
    """An executor that loses a task."""

    def __init__(self) -> None:
        self.count = 0

    def submit(self, f: Callable[..., Any], *args: Any) -> Future[Any]:
        done: Future[Any] = Future()
        self.count += 1
        done.set_result([] if self.count == 2 else f(*args))
        return done


def test_an_executor_that_drops_tiles(tmp_path: Path) -> None:
    with pytest.raises(tg.WorkerLost, match="did not come back from the executor"):
        again(None, executor=Careless())
    with pytest.raises(tg.IncompleteGram, match="not in .* at the end"):
        again(tmp_path / "k", executor=Careless())
    assert again(tmp_path / "k").progress == (10, 10)


def die(*_: Any) -> None:
    os._exit(1)


def test_a_pool_whose_process_was_killed(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1) as pool:
        pool.submit(die)
        with pytest.raises(tg.WorkerLost, match=r"executor is broken.*make a new executor"):
            again(tmp_path / "k", executor=pool)
    done = ThreadPoolExecutor(1)
    done.shutdown()
    with pytest.raises(tg.WorkerLost, match=r"executor is broken .cannot schedule new futures after shutdown"):
        again(tmp_path / "k", executor=done)


def test_workers_given_inline_end_with_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    class Here:
        """Stands in for a process."""

        def __init__(self, device: str) -> None:
            self.device = device

        def ask(self, call: bytes) -> tuple[bool, Any]:
            f, args = pickle.loads(call)
            return True, f(*args)

        def end(self) -> None:
            ended.append(self.device)

    monkeypatch.setattr(executors, "_Process", Here)
    workers = tg.Workers(1)
    tg.compute(store_job.kernel(), X.repeat(1, 2), tile=5, executor=workers, progress=False)
    (thread,) = workers._threads
    del workers
    thread.join()  # a thread that stays ends by the timeout of pytest
    assert ended == ["cpu"]


# Chunks


def swap(a: Path, b: Path) -> None:
    first, second = a.read_bytes(), b.read_bytes()
    a.write_bytes(second)
    b.write_bytes(first)


def test_swapped_and_foreign_chunks_are_found(copy: Path, whole: Path, tmp_path: Path) -> None:
    swap(copy / "c" / "0" / "1", copy / "c" / "1" / "2")
    gram = tg.open_gram(copy)
    with pytest.raises(tg.DamagedTile, match="tile 0, 1 .*from another place or another store"):
        gram.dense()
    assert main(["verify", str(copy)]) == 1
    healed = again(copy)
    with pytest.warns(tg.StoreWarning, match="It was computed again"):
        assert torch.equal(healed.dense(), tg.open_gram(whole).dense())
    other = tmp_path / "other"  # the same job, begun again: a tile of it is right, but it is not ours
    again(other)
    shutil.copy(other / "c" / "2" / "2", copy / "c" / "2" / "2")
    assert tg.open_gram(copy)[100:150, 100:150].shape == (50, 50)
    tg.compute(store_job.kernel(9), store_job.inputs(), store=tmp_path / "third", tile=50, progress=False)
    shutil.copy(tmp_path / "third" / "c" / "2" / "2", copy / "c" / "2" / "2")
    for seal in (tmp_path / "third" / "seal").glob("2.2.*"):
        shutil.copy(seal, copy / "seal" / seal.name)
    with pytest.raises(tg.DamagedTile, match="tile 2, 2 .*another store"):
        tg.open_gram(copy).dense()


def test_chunks_that_vanish_during_a_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gram, read = tg.open_gram(copy), Store.read

    def vanishing(self: Store, i: int, j: int) -> np.ndarray:
        if (i, j) == (1, 2):
            (copy / "c" / "1" / "2").unlink(missing_ok=True)
        return read(self, i, j)

    monkeypatch.setattr(Store, "read", vanishing)
    for use in (lambda g: g @ torch.ones(store_job.N), lambda g: g.dense(), lambda g: g[:, 120]):
        shutil.copy(copy / "c" / "1" / "1", copy / "c" / "1" / "2")
        with pytest.raises(tg.DamagedTile, match="tile 1, 2 .* is gone"):
            use(gram)


def test_what_is_outside_the_grid_does_not_count(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gram = tg.open_gram(copy)
    (copy / "c" / "1" / "2").unlink()
    for stray in ("c/7/7", "c/2/1", "c/x/y", "c/0/99999999999999999999", "seal/7.7.00", "seal/odd"):
        (copy / stray).parent.mkdir(parents=True, exist_ok=True)
        (copy / stray).write_bytes(b"")
    assert gram.progress == (9, 10)
    assert main(["status", str(copy), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["complete"] is False
    assert main(["verify", str(copy)]) == 1
    assert "unfinished: 1 of 10 tiles are missing" in capsys.readouterr().out


# Places


def test_a_job_that_changes_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "away").mkdir()
    (tmp_path / "leaving_job.py").write_text(
        "import os, torch, tangency as tg\ndef make():\n    os.chdir('away')\n"
        "    return tg.trace_ntk(torch.nn.Linear(3, 2)), torch.ones(9, 3)\n",
        encoding="utf-8",
    )
    assert main(["gram", "leaving_job.py:make", "--store", "k", "--tile", "2"]) == 0
    assert tg.open_gram(tmp_path / "k").progress == (15, 15)
    assert not list((tmp_path / "away").iterdir())
    monkeypatch.chdir(tmp_path)
    made = again("k2")
    monkeypatch.chdir(tmp_path / "away")
    assert (made @ torch.ones(store_job.N)).shape == (store_job.N,)
    assert made.progress == (10, 10)


def test_home_and_file_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for place, where in (
        ("~/a b", "a b"),
        (f"file://{tmp_path}/c%20d", "c d"),
        (f"file:{tmp_path}/e", "e"),
        (f"file://localhost{tmp_path}/f", "f"),
        ("file:g", "g"),
        (zarr.storage.LocalStore("h"), "h"),
    ):
        again(place)
        assert tg.open_gram(tmp_path / where).progress == (10, 10), place
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a b", "c d", "e", "f", "g", "h"]
    for place, what in (
        ("file://elsewhere/k", "names the machine"),
        ("k\0", "is no place"),
        (3, "is a int; needed: a folder"),
        ("~nobody-of-that-name/k", "nobody-of-that-name"),
    ):
        with pytest.raises(tg.InputError, match=what):
            again(place)


def test_folders_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(tg.StoreError, match="cannot be .*name too long"):
        again(tmp_path / ("x" * 300))
    real = Path.iterdir

    def forbidden(self: Path) -> Any:
        if self.name == "locked":
            raise PermissionError(13, "Permission denied", str(self))
        return real(self)

    (tmp_path / "locked").mkdir()
    monkeypatch.setattr(Path, "iterdir", forbidden)
    with pytest.raises(tg.StoreError, match="locked cannot be opened: Permission denied"):
        again(tmp_path / "locked")


def test_a_plan_of_too_many_files_is_refused(tmp_path: Path) -> None:
    x = torch.zeros(1, 3).expand(20_000, 3)
    with pytest.raises(tg.MemoryBudgetError, match="files; at most .*Give more memory, or tile="):
        tg.compute(tg.trace_ntk(nn.Linear(3, 2)), x, store=tmp_path / "k", tile=1, progress=False)
    assert not (tmp_path / "k").exists()


# Manifests


def edits() -> dict[str, Callable[[dict[str, Any]], Any]]:
    def own(change: Callable[[dict[str, Any]], Any], honest: bool = False) -> Callable[[dict[str, Any]], Any]:
        """A change of what we say of ourselves; an honest one brings its digest along."""

        def edit(meta: dict[str, Any]) -> Any:
            said = meta["attributes"]["tangency"]
            change(said)
            if honest:
                meta["attributes"]["digest"] = manifest_digest(said)
                meta["shape"] = said["shape"]
            return meta

        return edit

    def zarrs(*path: Any, value: Any) -> Callable[[dict[str, Any]], Any]:
        def edit(meta: dict[str, Any]) -> Any:
            inner: Any = meta
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = value
            return meta

        return edit

    return {
        "endian": zarrs("codecs", 0, "configuration", "endian", value="big"),
        "separator": zarrs("chunk_key_encoding", "configuration", "separator", value="."),
        "shape": zarrs("shape", value=[10**12, 10**12]),
        "chunks": zarrs("chunk_grid", "configuration", "chunk_shape", value=[25, 25]),
        "type": zarrs("data_type", value="float64"),
        "fill": zarrs("fill_value", value=0.0),
        "codecs": zarrs("codecs", value=[{"name": "numcodecs.pickle"}]),
        "group": zarrs("node_type", value="group"),
        "no attributes": zarrs("attributes", value={}),
        "attributes": zarrs("attributes", value=[]),
        "a list": lambda meta: [meta],
        "rows": own(lambda m: m["plan"].update(rows=25)),
        "kernel": own(lambda m: m["kernel"].update(weights="0" * 16)),
        "witness": own(lambda m: m["witness"].update(entries={})),
        "huge": own(lambda m: m.update(shape=[10**12, 10**12]), honest=True),
        "negative": own(lambda m: m.update(shape=[-200, 200]), honest=True),
        "a fraction": own(lambda m: m.update(shape=[200.0, 200]), honest=True),
        "three sides": own(lambda m: m.update(shape=[200, 200, 2]), honest=True),
        "no rows": own(lambda m: m["plan"].update(rows=0), honest=True),
        "no plan": own(lambda m: m.pop("plan"), honest=False),
        "objects": own(lambda m: m.update(dtype="object"), honest=True),
        "not square": own(lambda m: m.update(shape=[200, 100]), honest=True),
        "no kernel": own(lambda m: m.pop("kernel"), honest=True),
        "a kernel without a name": own(lambda m: m["kernel"].pop("kernel"), honest=True),
        "no witness": own(lambda m: m.pop("witness"), honest=True),
        "witness of another kind": own(lambda m: m.update(witness=3), honest=True),
    }


@pytest.mark.parametrize("name", edits())
def test_edited_manifests_end_in_words(copy: Path, name: str) -> None:
    path = copy / "zarr.json"
    path.write_text(json.dumps(edits()[name](json.loads(path.read_text(encoding="utf-8")))), encoding="utf-8")
    for use in (tg.open_gram, again):
        with pytest.raises(tg.StoreError, match=str(copy)):
            use(copy)
    assert main(["status", str(copy)]) == 1


def test_manifests_that_are_no_json(copy: Path) -> None:
    for text in (b"", b"{", b"null", b"\xff\xfe", b"[" * 100_000, b'{"attributes": NaN}'):
        (copy / "zarr.json").write_bytes(text)
        with pytest.raises(tg.StoreError):
            tg.open_gram(copy)


# Samples that change


class Noisy(torch.utils.data.Dataset):
    """Augments: an item is another one each time."""

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, k: int) -> Tensor:
        return X[k] + 0.01 * torch.randn(3)


def test_data_sets_that_change_are_refused(tmp_path: Path) -> None:
    kernel = tg.trace_ntk(nn.Linear(3, 2))
    for store in (None, tmp_path / "k"):
        with pytest.raises(tg.InputError, match=r"sample \d+ of x1 is not what it was.*switch augmentation off"):
            tg.compute(kernel, Noisy(), store=store, tile=5, progress=False)
    augmenting = tg.from_dataset(list(X), collate=lambda some: torch.stack(some) + torch.rand(1))
    with pytest.raises(tg.InputError, match="is not row 0 of the batch"):
        tg.compute(kernel, augmenting, tile=5, progress=False)


@pytest.mark.parametrize("by_workers", [False, True])
def test_a_collate_that_gives_another_number(tmp_path: Path, workers: tg.Workers, by_workers: bool) -> None:
    def doubled(some: list[Tensor]) -> Tensor:
        return torch.stack(some + some[:1] if len(some) > 2 else some)

    given = tg.from_dataset(list(X), collate=doubled)
    with pytest.raises(tg.InputError, match="x1: 5 samples were asked for, and 6 came. A collate function"):
        tg.compute(
            tg.trace_ntk(nn.Linear(3, 2)), given, store=tmp_path / "k", tile=5, progress=False,
            executor=workers if by_workers else None,
        )  # fmt: skip


def test_an_array_that_changes_after_it_was_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, x = tg.trace_ntk(nn.Linear(3, 2)), X.numpy().copy()
    run, job = Run(kernel, x), Run._job

    def then(self: Run) -> Any:
        found = job(self)
        x[7] += 1
        return found

    monkeypatch.setattr(Run, "_job", then)
    with pytest.raises(tg.InputError, match="sample 7 of x1 is not what it was"):
        run.compute(tmp_path / "k", 5, False)


def test_a_folder_without_hard_links_can_hold_a_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: Any, **__: Any) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", none)
    assert again(tmp_path / "k").progress == (10, 10)
    shelf = Folder(tmp_path / "k")
    shelf.begin("zarr.json", b"another")
    assert shelf.read("zarr.json", 2**20).tobytes() != b"another"  # type: ignore[union-attr]


@pytest.mark.slow
def test_an_ascii_terminal_and_a_closed_pipe(whole: Path) -> None:
    quiet = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C"}
    done = subprocess.run(
        [sys.executable, "-m", "tangency", "status", str(whole) + "-τ"], env=quiet, capture_output=True, check=False
    )
    assert done.returncode == 2
    assert b"\\u03c4" in done.stderr
    assert b"Traceback" not in done.stderr
    command = f"{shlex.quote(sys.executable)} -m tangency status {shlex.quote(str(whole))} --json | true"
    done = subprocess.run(command, shell=True, capture_output=True, check=False)
    assert done.stderr == b""


# What code looks like

NET = """
import sys
from collections import Counter
import torch
import tangency as tg
import helped
from tangency.gram.witness import code_looks

COUNT, CACHE = 0, {}
k = "a global that no code reads; self.k is another thing"

class Net(torch.nn.Module):
    '''DOC'''
    LIMIT = 3

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.l, self.k, self.act, self.calls = torch.nn.Linear(3, 2), 1.0, "relu", Counter()

    def forward(self, x):
        '''DOC'''
        global COUNT
        COUNT += 1
        self.calls["f"] += 1
        CACHE[COUNT] = 1
        y = helped.f(self.l(x), x) * self.k
        return y.relu() if self.act in {"relu", "gelu", "silu", "tanh"} else y

def make():
    return tg.trace_ntk(Net())

def go(path):
    global k
    x = torch.randn(12, 3, generator=torch.Generator().manual_seed(1))
    x[5, 0] = 10.0
    k = make()
    return tg.compute(k, x, store=path, progress=False)

if __name__ == "__main__":
    go(sys.argv[1])
"""
HELPED = """
import torch
def core(z, x):
    return z * torch.where(x[:, :1] > 5, VALUE, 1.0)

def f(z, x):
    return core(z, x)
"""


def run_net(folder: Path, *command: str, seed: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(folder)}
    return subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_same_program_looks_the_same_in_every_process(tmp_path: Path) -> None:
    """Sets are printed in another order, counters count, the file is imported or run, a docstring is written."""
    (tmp_path / "helped.py").write_text(HELPED.replace("VALUE", "1.0"), encoding="utf-8")
    for seed, doc, command in (
        ("1", "", ["net.py", "k"]),
        ("2", "What it does.", ["-c", "import net; net.go('k'); net.go('k')"]),
    ):
        (tmp_path / "net.py").write_text(NET.replace("DOC", doc), encoding="utf-8")
        done = run_net(tmp_path, "-W", "error::UserWarning", *command, seed=seed)
        assert done.returncode == 0, (command, done.stderr)


def test_a_function_that_a_function_calls_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a sample that the witness does not look at sees the change; it is said all the same."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "helped.py").write_text(HELPED.replace("VALUE", "1.0"), encoding="utf-8")
    (tmp_path / "helped_net.py").write_text(NET, encoding="utf-8")
    net = importlib.import_module("helped_net")
    assert net.go(tmp_path / "k").progress == net.go(tmp_path / "k").progress == (1, 1)
    (tmp_path / "helped.py").write_text(
        HELPED.replace("VALUE", "30.0"), encoding="utf-8"
    )  # of another length: no old bytecode
    importlib.invalidate_caches()
    importlib.reload(net.helped)
    with pytest.raises(tg.StoreMismatch, match="code of core: 'function"):
        net.go(tmp_path / "k")


# What an adversary found


def test_indices_as_people_have_them(copy: Path) -> None:
    gram, whole = tg.open_gram(copy), tg.open_gram(copy).dense()
    for three in (torch.tensor(3), np.array(3), np.int64(3)):
        assert torch.equal(gram[three], whole[3])
        assert torch.equal(gram[three, three], whole[3, 3])
    assert torch.equal(gram[(slice(2, 4),)], whole[2:4])
    assert len(gram) == store_job.N
    assert np.array_equal(np.asarray(gram), whole.numpy())
    small = gram.select([0, 1, 2])
    assert torch.equal(torch.stack(list(small)), whole[:3])
    for bad in (True, "a"):
        with pytest.raises(tg.InputError, match="is no row or column"):
            gram[bad]
    with pytest.raises(tg.InputError, match=r"weights have shape \(200,\), the smallest is -1; needed"):
        gram.weighted(-torch.ones(store_job.N))


def test_features_are_no_gram(tmp_path: Path) -> None:
    k = tg.projected(tg.trace_ntk(nn.Linear(3, 2)), dim=4)
    phi = k.features(X, store=tmp_path / "phi", progress=False)
    with pytest.raises(tg.StoreError, match="holds features, not a Gram matrix.*open_features"):
        tg.open_gram(tmp_path / "phi")
    with pytest.raises(tg.InputError, match="the samples alone"):
        phi[0, 1]
    torch.testing.assert_close(pickle.loads(pickle.dumps(phi))[:3], phi[:3])


def test_a_damaged_tile_of_a_store_that_may_only_be_read(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want, path = tg.open_gram(copy).dense(), copy / "c" / "1" / "2"
    gram = again(copy)
    path.write_bytes(path.read_bytes()[:-1])

    def forbidden(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Folder, "write", forbidden)
    with pytest.warns(tg.StoreWarning, match="computed again"), pytest.warns(tg.StoreWarning, match="not be put back"):
        assert torch.equal(gram.dense(), want)


def test_a_folder_that_may_not_be_read_is_not_empty(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = os.scandir

    def locked(path: Any) -> Any:
        if str(path).endswith("/c"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", locked)
    with pytest.raises(tg.StoreError, match="cannot be read: Permission denied"):
        tg.open_gram(copy).progress  # noqa: B018


@pytest.mark.parametrize(
    ("x", "what"),
    [
        (np.ma.masked_array(X.numpy(), mask=X.numpy() > 1), "a masked array, whose mask would be lost"),
        (X.to_sparse(), "a sparse tensor"),
        ((X > 0).to(torch.uint8), "x is torch.uint8 of shape .*x.to.torch.float32"),
        (torch.randn(8, 5), "Linear layer takes 3 features, x has 5: .*Give samples of the shape"),
        (tg.from_dataset([("a", 1)] * 4, 5), "pick=5 is not in item 0 of the data set, a tuple"),
        (
            tg.from_dataset([object()] * 4),
            "the items 0 to 0 of the data set, of type object, could not be made a batch",
        ),
    ],
)
def test_samples_that_cannot_be_used(x: Any, what: str, tmp_path: Path) -> None:
    with pytest.raises(tg.InputError, match=what):
        tg.compute(tg.trace_ntk(nn.Linear(3, 2)), x, store=tmp_path / "k", progress=False)


@pytest.mark.parametrize("executor", [tg.Workers, Careless])
def test_a_class_is_no_executor(executor: Any) -> None:
    with pytest.raises(tg.InputError, match="executor is the class"):
        again(None, executor=executor)


@pytest.mark.parametrize("devices", [1.5, True, None])
def test_devices_that_are_none(devices: Any) -> None:
    with pytest.raises(tg.InputError, match="needed: a number of CPU processes"):
        tg.Workers(devices)


def test_the_command_line_looks_before_the_function_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("early_job.py").write_text(
        "import sys\ndef make():\n    raise RuntimeError('hours')\ndef leave():\n    sys.exit(0)", encoding="utf-8"
    )
    Path("file").write_text("", encoding="utf-8")
    for argv, what in (
        (["early_job.py:make", "--store", "file"], "not a Gram store"),
        (["early_job.py:make", "--store", "k", "--memory", "lots"], "needed: a number of bytes"),
        (["early_job.py:leave", "--store", "k"], "ended the program"),
    ):
        assert main(["gram", *argv]) in (1, 2)
        assert what in capsys.readouterr().err


def test_a_collate_that_sorts(tmp_path: Path) -> None:
    def by_length(some: list[Tensor]) -> Tensor:
        return torch.stack(sorted(some, key=lambda v: float(v.norm())))

    for store in (None, tmp_path / "k"):
        with pytest.raises(tg.InputError, match=r"item \d+ of the data set is not row \d+ of the batch"):
            tg.compute(
                tg.trace_ntk(nn.Linear(3, 2)), tg.from_dataset(list(X), collate=by_length), store=store, tile=5,
                progress=False,
            )  # fmt: skip


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_no_sorting(side: str) -> None:
    words = [torch.arange(1, 2 + k % 4) for k in range(12)]

    def padded(some: list[Tensor]) -> Tensor:
        return nn.utils.rnn.pad_sequence(some, batch_first=True, padding_side=side)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x).sum(1))

    k = tg.trace_ntk(Bag(), trainable="head")
    got = tg.compute(k, tg.from_dataset(words, collate=padded), tile=5, progress=False).dense()
    torch.testing.assert_close(got, k(padded(words)))


def test_a_model_changed_before_a_damaged_tile_is_made_again(copy: Path) -> None:
    kernel = store_job.kernel()
    gram = tg.compute(kernel, store_job.inputs(), store=copy, tile=50, progress=False)
    path = copy / "c" / "1" / "2"
    path.write_bytes(path.read_bytes()[:-1])
    with torch.no_grad():
        kernel.feature_map.network.model[0].weight.mul_(1.1)
    with pytest.raises(tg.StoreMismatch, match="kernel.weights"):
        gram.dense()


@pytest.mark.parametrize("finished", [True, False])
def test_a_store_of_another_function_is_refused_whatever_the_witness_says(
    finished: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No sample that is looked at sees the change; others may. Read without a kernel, it is what it is."""
    torch.manual_seed(0)
    model, path = Changing(), tmp_path / "k"
    made = tg.compute(tg.trace_ntk(model), X, store=path, tile=5, progress=False)
    want = made.dense()

    def far(self: Changing, x: Tensor) -> Tensor:
        h = self.helper(self.act(self.a(x))) ** self.power
        return self.b(h) * self.config["layers"][0]["gain"] * SCALE * torch.where(x[:, :1] > 50, 2.0, 1.0)

    monkeypatch.setattr(Changing, "forward", far)
    if not finished:
        made.store.discard(1, 2)  # type: ignore[attr-defined]
    with pytest.raises(tg.StoreMismatch, match=r"code of Changing.forward: 'function(.|\n)*tg.open_gram reads it"):
        tg.compute(tg.trace_ntk(model), X, store=path, tile=5, progress=False)
    assert torch.equal(tg.open_gram(path)[:10, :10], want[:10, :10])


def test_weights_that_change_during_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile that the changed model made may stay under the manifest of the old one."""
    kernel, write = store_job.kernel(), Store.write
    model = kernel.feature_map.network.model  # type: ignore[attr-defined]

    def changing(self: Store, i: int, j: int, tile: np.ndarray) -> None:
        write(self, i, j, tile)
        if (i, j) == (1, 1):
            with torch.no_grad():
                model[0].weight.add_(0.1)

    monkeypatch.setattr(Store, "write", changing)
    with pytest.raises(tg.StoreMismatch, match="kernel.weights"):
        tg.compute(kernel, store_job.inputs(), store=tmp_path / "k", tile=50, progress=False)
    monkeypatch.undo()
    assert tg.open_gram(tmp_path / "k").progress == (0, 10)
    assert torch.equal(again(tmp_path / "k").dense(), again(None).dense())


def test_an_array_that_changes_while_tasks_wait(tmp_path: Path) -> None:
    """Blocks are copies: what was looked at is what is used."""
    x = store_job.inputs().numpy().copy()
    want = again(None).dense()

    class Late:
        """Runs a task only when its result is asked for."""

        def submit(self, f: Callable[..., Any], *args: Any) -> Any:
            class Waiting:
                def result(self) -> Any:
                    x[:] = 0
                    return f(*args)

            return Waiting()

    try:
        got = tg.compute(store_job.kernel(), x, store=tmp_path / "k", tile=50, executor=Late(), progress=False)
    except tg.InputError as e:
        assert "is not what it was" in str(e)  # noqa: PT017
        assert (tg.open_gram(tmp_path / "k")[:50, :50] - want[:50, :50]).abs().max() < 1e-6
    else:
        assert torch.equal(got.dense(), want)
