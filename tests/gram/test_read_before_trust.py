"""What lies in a store is told by kind and size before it is read; verify goes on, and serves stored features too."""

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import tangency as tg
from tangency.cli import main
from tangency.errors import DamagedTile, StoreError

JOB = """
import torch
import tangency as tg

def make():
    torch.manual_seed(0)
    return tg.trace_ntk(tg.models.mlp([4, 8, 2]).double()), torch.randn(12, 4).double()

def features():
    torch.manual_seed(0)
    return tg.projected(tg.trace_ntk(tg.models.mlp([4, 8, 2]).double()), dim=6), torch.randn(40, 4).double()

def others():
    torch.manual_seed(1)
    return tg.projected(tg.trace_ntk(tg.models.mlp([4, 8, 2]).double()), dim=6), torch.randn(40, 4).double()
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    return tmp_path / "job.py"


def made(job: Path, what: str = "make") -> tuple[tg.Kernel, torch.Tensor]:
    space: dict[str, Callable[[], tuple[tg.Kernel, torch.Tensor]]] = {}
    exec(job.read_text(encoding="utf-8"), space)
    return space[what]()


def store(job: Path) -> Path:
    folder = job.parent / "K"
    tg.compute(*made(job), store=folder, tile=4, progress=False)
    return folder


def feature_store(job: Path) -> Path:
    k, x = made(job, "features")
    k.features(x, store=job.parent / "phi", tile=16, progress=False)  # type: ignore[attr-defined]
    return job.parent / "phi"


def fifo(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**40)


def listening(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's path is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


KINDS = {fifo: "a FIFO", sparse: "1,099,511,627,776 bytes", listening: "socket"}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", KINDS)
def test_a_tile_that_is_no_tile_is_refused_by_kind_and_size(put: Callable[[Path], None], job: Path) -> None:
    """A FIFO was waited for, for ever; a sparse file of a TiB was read into memory."""
    folder = store(job)
    tile = folder / "c" / "0" / "1"
    tile.unlink()
    put(tile)
    gram = tg.open_gram(folder)
    with pytest.raises(DamagedTile, match=rf"tile 0, 1 of .*{KINDS[put]}"):
        gram[:]
    assert [at for at, _ in gram.verify(progress=False).faults] == [(0, 1)]
    k, x = made(job)
    with pytest.warns(tg.StoreWarning, match="It was computed again"):
        again = tg.compute(k, x, store=folder, progress=False)[:]
    torch.testing.assert_close(again, k(x), rtol=1e-12, atol=1e-12)
    assert gram.verify(progress=False).sound


@pytest.mark.timeout(60)
@pytest.mark.parametrize("put", KINDS)
def test_a_manifest_that_is_no_file_is_refused(put: Callable[[Path], None], job: Path) -> None:
    folder = store(job)
    (folder / "zarr.json").unlink()
    put(folder / "zarr.json")
    with pytest.raises(StoreError, match=rf"(its zarr.json .*{KINDS[put]}|exists and is not a Gram store)"):
        tg.open_gram(folder)


def test_objects_elsewhere_are_not_read_beyond_their_size() -> None:
    zarr = pytest.importorskip("zarr")
    held: dict[str, object] = {}
    memory = zarr.storage.MemoryStore(held)
    k, x = tg.trace_ntk(torch.nn.Linear(3, 1)), torch.randn(6, 3)
    gram = tg.compute(k, x, store=memory, tile=3, progress=False)
    torch.testing.assert_close(gram[:], k(x))  # other tiles, other last digits
    key = next(name for name in held if name.endswith("c/0/1"))
    held[key] = type(held[key]).from_bytes(bytes(10**6))  # type: ignore[attr-defined]
    with pytest.raises(DamagedTile, match="has more bytes than what was written there"):
        tg.open_gram(memory)[:]


def test_verify_goes_on_after_what_cannot_be_read(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each tile that is not as it was written, or that cannot be read, by name; the first ended it before."""
    folder = store(job)
    tiles = {name: folder / "c" / name for name in ("0/0", "0/1", "0/2", "1/1", "2/2")}
    tiles["0/0"].write_bytes(tiles["0/0"].read_bytes()[:-9])
    flipped = bytearray(tiles["0/1"].read_bytes())
    flipped[5] ^= 1
    tiles["0/1"].write_bytes(bytes(flipped))
    whole = tiles["0/2"].read_bytes()
    tiles["0/2"].unlink()
    tiles["0/2"].symlink_to("../1/2")
    tiles["1/1"].unlink()
    fifo(tiles["1/1"])
    tiles["2/2"].write_bytes(whole)  # of another place
    assert main(["verify", str(folder)]) == 1
    said = capsys.readouterr().out
    lines = [line for line in said.splitlines() if line.startswith("damaged: ")]
    assert len(lines) == 5
    for word in ("tile 0, 0 ", "tile 0, 1 ", "is a link", "tile 1, 1 ", "tile 2, 2 "):
        assert sum(word in line for line in lines) == 1, word
    assert "1 of 6 finished tiles match their checksums" in said
    assert not tg.open_gram(folder).verify(progress=False).sound
    # With the function, those that can be read are compared all the same.
    assert main(["verify", str(folder), f"{job}:make"]) == 1
    assert "1 equal bit for bit" in capsys.readouterr().out


def test_a_tile_that_only_may_not_be_read_is_not_thrown_away(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store(job)
    (folder / "c" / "2" / "2").unlink()  # so that the others are looked at

    def refuse(self: object, key: str, most: int) -> np.ndarray | None:
        if key == "c/0/1":
            raise PermissionError(13, "Permission denied")
        return plain(self, key, most)  # type: ignore[arg-type]

    plain = tg.gram.shelf.Folder.read
    monkeypatch.setattr(tg.gram.shelf.Folder, "read", refuse)
    assert [at for at, _ in tg.open_gram(folder).verify(progress=False).faults] == [(0, 1)]
    with pytest.raises(StoreError, match="tile 0, 1 .* cannot be read: Permission denied"):
        tg.compute(*made(job), store=folder, progress=False)
    assert (folder / "c" / "0" / "1").is_file()


def test_stored_features_are_verified_and_shown(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By method and from the command line, as Grams are; both were refused before."""
    folder = feature_store(job)
    features = tg.projection.open_features(folder)
    assert features.verify(progress=False).sound
    assert features.progress == (3, 3)
    assert main(["status", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "40 x 2 x 6 float64, features of " in said
    assert "3 of 3 blocks of 16 samples (complete)" in said
    assert main(["status", str(folder), "--json"]) == 0
    assert '"holds": "features"' in capsys.readouterr().out
    assert main(["verify", str(folder), f"{job}:features"]) == 0
    assert "3 tiles computed again: 3 equal bit for bit" in capsys.readouterr().out
    for function, error in (
        ("others", "holds another Gram matrix"),
        ("make", "the store holds features; needed: (kernel, x) with the projected kernel"),
    ):
        assert main(["verify", str(folder), f"{job}:{function}"]) != 0
        assert error in "".join(capsys.readouterr())
    blocks = sorted(path for path in (folder / "c").rglob("*") if path.is_file())
    blocks[0].write_bytes(blocks[0].read_bytes()[:-1])
    blocks[1].unlink()
    assert main(["verify", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "1 of 2 finished tiles match their checksums" in said
    assert "unfinished: 1 of 3 tiles are missing" in said
    found = features.verify(progress=False)
    assert (found.finished, found.tiles, len(found.faults), found.sound) == (2, 3, 1, False)


def test_no_writer_is_waited_for(job: Path) -> None:
    """Nor is one let in: what somebody writes into the FIFO meanwhile is no tile either."""
    folder = store(job)
    tile = folder / "c" / "1" / "1"
    whole = tile.read_bytes()
    tile.unlink()
    fifo(tile)
    end = os.open(tile, os.O_RDWR | os.O_NONBLOCK)
    writer = threading.Thread(target=os.write, args=(end, whole))
    writer.start()
    try:
        with pytest.raises(DamagedTile, match="a FIFO"):
            tg.open_gram(folder)[:]
    finally:
        writer.join()
        os.close(end)
