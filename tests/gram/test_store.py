"""Stores: nothing finished is lost or computed twice, nothing damaged or foreign is taken."""

import contextlib
import errno
import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import store_job
import torch
import zarr
from forked import FORK
from torch import nn

import tangency as tg
from tangency.gram.manifest import manifest_file
from tangency.gram.shelf import Folder
from tangency.gram.store import Store
from tangency.gram.witness import SAMPLES


def chunks(store: Path) -> dict[str, bytes]:
    return {str(p.relative_to(store)): p.read_bytes() for p in store.glob("c/*/*") if p.suffix != ".partial"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the job, uninterrupted."""
    path = tmp_path_factory.mktemp("whole") / "gram"
    tg.compute(store_job.kernel(), store_job.inputs(), store=str(path), tile=store_job.TILE, progress=False)
    return path


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


def again(path: Path, **options: Any) -> tg.Gram:
    given: dict[str, Any] = {"store": str(path), "tile": store_job.TILE, "progress": False} | options
    return tg.compute(store_job.kernel(), store_job.inputs(), **given)


def start(path: Path, log: Path, pause: float, most: int | None = None) -> Any:
    process = FORK.Process(target=store_job.run, args=(str(path), str(log), pause, most))
    process.start()
    return process


def made(log: Path) -> list[str]:
    """Tiles that were begun, from complete lines."""
    return log.read_text(encoding="utf-8").split("\n")[:-1] if log.exists() else []


@pytest.mark.parametrize("most", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_at_many_moments(most: int, whole: Path, tmp_path: Path) -> None:
    path, draw = tmp_path / "gram", random.Random(0)
    kills, before = 0, {}
    while kills < most:
        log = tmp_path / f"log{kills}"
        process = start(path, log, 0.03, most=4)  # 20 kills leave some of the 91 tiles
        while process.is_alive() and not made(log):  # begun
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.12))
        assert process.is_alive(), f"finished or failed after {kills} kills"
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        kills += 1
        after = chunks(path)
        computed = {f"c/{line.replace(' ', '/')}" for line in made(log)}
        assert not computed & before.keys(), "a finished tile was computed again"
        assert {k: after.get(k) for k in before} == before, "a finished tile was lost or changed"
        before = after
    assert 0 < len(before) < len(chunks(whole))
    gram = again(path)
    assert chunks(path) == chunks(whole)  # bit for bit
    assert torch.equal(gram.dense(), tg.open_gram(str(whole)).dense())


def test_two_processes_share_a_store(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "gram"
    both = [start(path, tmp_path / f"log{k}", 0.01) for k in range(2)]
    for process in both:
        process.join()  # a deadlock ends by the timeout of pytest
        assert process.exitcode == 0
    assert chunks(path) == chunks(whole)


def test_a_finished_store_returns_at_once(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a look at a few samples, which tells whether the kernel is still the same."""
    from tangency.kernels.empirical import Empirical

    prepare, seen = Empirical.prepare, []

    def counted(self: Empirical, x: torch.Tensor, memory: int | None = None) -> Any:
        seen.append(len(x))
        return prepare(self, x, memory)

    monkeypatch.setattr(Empirical, "prepare", counted)
    assert again(copy).shape == (store_job.N, store_job.N)
    assert sum(seen) == SAMPLES


def test_the_store_is_plain_zarr(whole: Path) -> None:
    """Another program can read it: a zarr v3 array with a crc32c codec; of a symmetric matrix the upper half."""
    array = zarr.open_array(str(whole), mode="r")
    assert array.metadata.zarr_format == 3
    assert [type(c).__name__ for c in array.metadata.codecs] == ["BytesCodec", "Crc32cCodec"]
    want = store_job.kernel()(store_job.inputs()).numpy()
    np.testing.assert_allclose(np.triu(array[:]), np.triu(want), rtol=1e-5, atol=1e-5)
    manifest = dict(array.attrs["tangency"])
    assert manifest["kernel"]["kernel"] == "trace ntk"
    assert {"weights", "buffers", "dtype", "method"} <= manifest["kernel"].keys()
    assert manifest["plan"]["rows"] == store_job.TILE
    assert manifest["versions"]["torch"] == torch.__version__
    json.dumps(manifest)


def flip(path: Path, at: int = 100) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


@pytest.mark.parametrize("harm", [flip, lambda p: p.write_bytes(b""), lambda p: p.write_bytes(p.read_bytes()[:77])])
def test_a_damaged_tile_is_found_and_computed_again(whole: Path, copy: Path, harm: Any) -> None:
    harm(copy / "c" / "1" / "3")
    with pytest.raises(tg.DamagedTile, match=r"tile 1, 3 of .*does not match its checksum"):
        tg.open_gram(str(copy)).dense()
    assert tg.open_gram(str(copy))[:16, :16].shape == (16, 16)  # the others can be read
    gram = again(copy)
    with pytest.warns(tg.StoreWarning, match="tile 1, 3 .*It was computed again"):
        v = gram @ torch.ones(store_job.N)
    assert torch.equal(v, tg.open_gram(str(whole)) @ torch.ones(store_job.N))
    assert chunks(copy) == chunks(whole)


def test_damage_is_found_when_a_run_goes_on(whole: Path, copy: Path) -> None:
    flip(copy / "c" / "0" / "0")
    (copy / "c" / "2" / "2").unlink()
    with pytest.warns(tg.StoreWarning, match="tile 0, 0 .*will be computed again"):
        again(copy)
    assert chunks(copy) == chunks(whole)


def test_an_unfinished_store_gives_what_it_has(copy: Path) -> None:
    (copy / "c" / "0" / "12").unlink()
    gram = tg.open_gram(str(copy))
    assert gram.progress == (90, 91)
    assert "90 of 91 tiles" in repr(gram)
    assert gram[:32, :32].shape == (32, 32)
    with pytest.raises(tg.IncompleteGram, match=r"90 of 91 tiles.*first \(0, 12\)"):
        gram @ torch.ones(store_job.N)
    with pytest.raises(tg.StoreError, match="no Gram store at"):
        tg.open_gram(str(copy) + "-elsewhere")


def test_mismatches_name_each_field(copy: Path) -> None:
    kernel, x = store_job.kernel(), store_job.inputs()

    def fields(k: Any, a: Any, b: Any = None, **options: Any) -> set[str]:
        with pytest.raises(tg.StoreMismatch) as e:
            tg.compute(k, a, b, store=str(copy), progress=False, **options)
        assert all(name in str(e.value) for name in e.value.fields)
        return set(e.value.fields)

    model = kernel.feature_map.network.model
    changed = x.clone()
    changed[7, 3] += 1e-6
    assert fields(store_job.kernel(seed=5), x) == {"kernel.weights"}
    assert fields(kernel, changed) == {"inputs.x1"}
    assert fields(kernel, x[:100]) == {"inputs.x1", "shape"}
    assert fields(kernel, x, x) == {"inputs.x2", "symmetric"}
    assert fields(kernel, x, tile=8) == {"tile"}
    assert fields(tg.trace_ntk(model, trainable="0"), x) == {"kernel.parameters"}
    assert fields(tg.trace_ntk(model, method="expand"), x) == {"kernel.method"}
    assert {"kernel.dtype", "kernel.weights"} <= fields(tg.trace_ntk(model, dtype="float64"), x)
    assert {"kernel.kernel", "kernel.head"} <= fields(tg.pseudo_ntk(model), x)
    assert "kernel.kernel" in fields(tg.cosine(kernel), x)
    assert chunks(copy), "a refusal must leave the store alone"
    assert again(copy).progress == (91, 91)


def test_buffers_and_heads_are_told_apart(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    x, path = torch.randn(20, 3), str(tmp_path / "gram")
    tg.compute(tg.head_ntk(model, lambda out: out.sum(1)), x, store=path, progress=False)
    with pytest.raises(tg.StoreMismatch, match="kernel.head"):
        tg.compute(tg.head_ntk(model, lambda out: out.prod(1)), x, store=path, progress=False)
    model[1].running_mean += 1
    with pytest.raises(tg.StoreMismatch) as e:
        tg.compute(tg.head_ntk(model, lambda out: out.sum(1)), x, store=path, progress=False)
    assert set(e.value.fields) == {"kernel.buffers"}


def test_code_that_another_python_compiled_is_compared_by_its_numbers(tmp_path: Path) -> None:
    """The same function has other instructions there, and another torch may print the same module otherwise."""
    model, x, path = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).eval(), torch.randn(20, 3), tmp_path / "gram"

    def first(out: torch.Tensor) -> torch.Tensor:
        return out.sum(1)

    def begun_elsewhere(head: Any, **versions: str) -> str:
        shutil.rmtree(path, ignore_errors=True)
        tg.compute(tg.head_ntk(model, head), x, store=str(path), progress=False)
        said = json.loads((path / "zarr.json").read_text(encoding="utf-8"))["attributes"]["tangency"]
        name = said["kernel"]["head"].rpartition(":")[0]
        said["kernel"] |= {"head": f"{name}:00000000", **({"model": "0" * 16} if "torch" in versions else {})}
        said["versions"] |= versions
        said["witness"]["code"] = {"python": versions.get("python", said["versions"]["python"])}
        (path / "zarr.json").write_bytes(manifest_file(said))
        return str(path)

    def again(head: Any) -> tg.Gram:
        return tg.compute(tg.head_ntk(model, head), x, store=str(path), progress=False)

    begun_elsewhere(first, python="3.99.0")
    with pytest.warns(
        tg.StoreWarning, match=r"python 3.99.0 → .*By its numbers alone is known to be the same: kernel.head"
    ):
        gram = again(first)
    with pytest.warns(tg.StoreWarning, match="was not written there"):  # the seals are those of the manifest before
        assert torch.equal(gram.dense(), tg.head_ntk(model, first)(x))
    begun_elsewhere(first, python="3.99.0", torch="1.0")
    with pytest.warns(tg.StoreWarning, match=r"known to be the same: (?=.*kernel.head)(?=.*kernel.model)"):
        again(first)
    begun_elsewhere(
        lambda out: out.prod(1), python="3.99.0"
    )  # a function of another name, of the same one other numbers
    with pytest.raises(tg.StoreMismatch, match="kernel.head"):
        again(first)
    numbers = {"out": 1.0}

    def scaled(out: torch.Tensor) -> torch.Tensor:
        return out.sum(1) * numbers["out"]

    begun_elsewhere(scaled, python="3.99.0")
    numbers["out"] = 2.0
    with pytest.warns(tg.StoreWarning, match="numbers alone"), pytest.raises(tg.StoreMismatch, match=r"k\(x1\[0\]"):
        again(scaled)
    begun_elsewhere(first)
    with pytest.raises(tg.StoreMismatch, match="kernel.head"):  # the same Python: the code itself is another
        again(first)


def test_other_versions_are_said(copy: Path) -> None:
    said = json.loads((copy / "zarr.json").read_text(encoding="utf-8"))["attributes"]["tangency"]
    said["versions"]["torch"] = "1.0"
    (copy / "zarr.json").write_bytes(manifest_file(said))
    with pytest.warns(tg.StoreWarning, match=r"torch 1.0 → "):
        again(copy)
    said["format"] = 99
    (copy / "zarr.json").write_bytes(manifest_file(said))
    with pytest.raises(tg.StoreError, match="format 99"):
        again(copy)


def test_foreign_folders_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine", encoding="utf-8")
    zarr.create_array(str(tmp_path / "other"), shape=(4,), dtype="f4")
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    for path, what in (
        (tmp_path, "not a Gram store"),
        (tmp_path / "other", "not one that"),
        (tmp_path / "file", "not"),
    ):
        with pytest.raises(tg.StoreError, match=what):
            again(path)
    assert (tmp_path / "notes.txt").read_text(encoding="utf-8") == "mine"


def test_urls(whole: Path) -> None:
    """Any store that zarr knows: here fsspec's memory."""
    gram = again(Path("x"), store="memory://tangency-test/gram")
    assert torch.equal(gram.dense(), tg.open_gram(str(whole)).dense())
    assert again(Path("x"), store="memory://tangency-test/gram").progress == (91, 91)
    with pytest.raises(tg.StoreMismatch):
        again(Path("x"), store="memory://tangency-test/gram", tile=5)


def test_places(whole: Path, tmp_path: Path) -> None:
    for place in (tmp_path / "path", f"file://{tmp_path}/url", zarr.storage.LocalStore(tmp_path / "own")):
        assert torch.equal(again(Path("x"), store=place).dense(), tg.open_gram(str(whole)).dense())
    assert tg.open_gram(tmp_path / "url").progress == (91, 91)
    (tmp_path / "plain").write_text("", encoding="utf-8")
    for place, error, what in (
        ("", tg.InputError, "needed: a folder or a URL"),
        ("nosuch://a/b", tg.StoreError, "Protocol not known"),
        *([] if importlib.util.find_spec("s3fs") else [("s3://bucket/gram", tg.InputError, "s3fs")]),
        (tmp_path / "plain" / "k", tg.StoreError, "cannot be"),
    ):
        with pytest.raises(error, match=what):
            again(Path("x"), store=place)


def test_a_disk_that_fills_up(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected where the bytes are written: the error is clear, what was finished stays, and the run goes on."""
    path, write, left = tmp_path / "gram", Folder._partial, 60  # a seal and a chunk for each tile

    def full(*args: Any) -> Any:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*args)

    monkeypatch.setattr(Folder, "_partial", full)
    with pytest.raises(tg.StoreError, match="disk of .* is full.*finished tiles are safe.*call again"):
        again(path)
    there = chunks(path)
    assert 20 < len(there) < 30
    monkeypatch.setattr(Folder, "_partial", write)
    again(path)
    assert chunks(path) == chunks(whole)
    assert there.items() <= chunks(path).items()


def test_a_disk_that_is_too_small_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(tg.StoreError, match=r"needs 9.32e-05 GB more and the disk has 1e-06 GB free"):
        again(tmp_path / "gram")
    assert not chunks(tmp_path / "gram")


@contextlib.contextmanager
def small_disk(where: Path, size: str) -> Iterator[Path]:
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", where], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip("this user may not mount a small disk; the same fault is injected in test_a_disk_that_fills_up")
    try:
        yield where
    finally:
        subprocess.run(["umount", where], check=True)


def test_a_small_disk_that_fills_up(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real file system that somebody else fills while we write."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        write = Store.write

        def greedy(self: Store, i: int, j: int, tile: np.ndarray) -> None:
            if (i, j) == (6, 6):
                with contextlib.suppress(OSError), open(disk / "junk", "wb") as f:
                    f.write(b"0" * 2_000_000)
            write(self, i, j, tile)

        monkeypatch.setattr(Store, "write", greedy)
        with pytest.raises(tg.StoreError, match="is full"):
            again(disk / "gram")
        (disk / "junk").unlink()
        monkeypatch.setattr(Store, "write", write)
        there = chunks(disk / "gram")
        assert 20 < len(there) < 91
        again(disk / "gram")
        assert chunks(disk / "gram") == chunks(whole)
        assert there.items() <= chunks(disk / "gram").items()


def test_ctrl_c_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tangency.kernels.empirical import Empirical

    pair, count = Empirical.pair, 0

    def interrupted(self: Empirical, *args: Any) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 30:
            raise KeyboardInterrupt
        return pair(self, *args)

    monkeypatch.setattr(Empirical, "pair", interrupted)
    with pytest.raises(KeyboardInterrupt, match=r"\d\d of 91 tiles are safe in .*Call again with the same arguments"):
        again(tmp_path / "gram")
    count = 0
    with pytest.raises(KeyboardInterrupt, match=r"\d\d of 91 tiles, which are lost. With store="):
        again(tmp_path / "gram", store=None)


def test_not_finite_is_not_stored(tmp_path: Path) -> None:
    x = store_job.inputs()
    x[130] = float("nan")
    with pytest.raises(tg.NonFiniteError, match="sample 130"):
        tg.compute(store_job.kernel(), x, store=str(tmp_path / "gram"), tile=16, progress=False)
    for tile in chunks(tmp_path / "gram").values():
        assert np.isfinite(np.frombuffer(tile[:-4], np.float32)).all()


def test_leftovers_of_killed_writers_go(copy: Path) -> None:
    (copy / "c" / "0" / "5").unlink()
    old, new = copy / "c" / "0" / "5.dead.partial", copy / "c" / "0" / "5.live.partial"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1, 1))
    again(copy)
    assert not old.exists()
    assert new.exists(), "another process may be writing it"


def test_cuda_out_of_memory_before_the_first_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tangency.kernels.empirical import Empirical

    prepare = Empirical.prepare

    def small(self: Empirical, x: torch.Tensor, memory: int | None = None) -> Any:
        if len(x) > 10:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return prepare(self, x, memory)

    monkeypatch.setattr(Empirical, "prepare", small)
    with pytest.warns(tg.PerformanceWarning, match="going on with blocks of 8"):
        gram = again(tmp_path / "gram")
    assert gram.store.plan.rows == 8
    monkeypatch.undo()
    torch.testing.assert_close(gram.dense(), store_job.kernel()(store_job.inputs()))


def test_without_zarr(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "zarr", None)
    again(tmp_path / "gram")  # a folder needs no zarr
    with pytest.raises(tg.InputError, match=r"needs zarr: pip install 'tangency\[store\]'"):
        again(tmp_path, store="memory://tangency-test/without")
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    with pytest.raises(tg.InputError, match=r"pip install 'tangency\[store\]'"):
        again(tmp_path / "other")
    assert not (tmp_path / "other").exists()
