"""One way to write a file: whole or not at all, whatever happens; and what cannot be written is refused before."""

import contextlib
import json
import os
import socket
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from made_audits import audited

import tangency as tg
from benchmarks.robustness.attack.disks import full_disk
from tangency import watch
from tangency._base import files
from tangency.active import Campaign
from tangency.cli import main
from tangency.commands.options import write_rows
from tangency.errors import InputError
from tangency.experiments.table import Kept, Options

JOB = """
import torch
import tangency as tg

def data(n=30):
    y = torch.arange(n) % 3
    return tg.datasets.Labelled(torch.eye(3)[y] + torch.arange(n)[:, None] / 99, y, ("ant", "bee", "cow"))

def make():
    return tg.models.mlp([3, 4, 3]), data(), data()

def fails():
    raise RuntimeError("the job fails")

def bad():
    net, train, test = make()
    train.x[3, 1] = float("nan")
    return net, train, test

def kernel():
    return tg.trace_ntk(tg.models.mlp([3, 4, 3])), data().x
"""


def tree(folder: Path) -> dict[str, bytes | None]:
    """All that is below a folder, links as what they lead to."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in sorted(folder.rglob("*"))
        if "__pycache__" not in p.parts
    }


def killed(work: Callable[[], object], at: str, module: Any) -> int:
    """Do the work in another process, which is killed (SIGKILL) when it calls this function; the signal it died of."""
    child = os.fork()
    if child == 0:
        setattr(module, at, lambda *_, **__: os.kill(os.getpid(), 9))
        with contextlib.suppress(BaseException):
            torch.set_num_threads(1)  # a fork of a process whose OpenMP threads have run waits for them for ever
            work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def writers(folder: Path) -> dict[str, tuple[Path, Callable[[], object]]]:
    """Everything that writes what the user may have already: where, and how."""
    monitor = tg.dynamics.Monitor(tg.trace_ntk(tg.models.mlp([3, 8, 1])), torch.eye(3))
    monitor(0)
    campaign = Campaign(torch.eye(9), ["cat", "dog"])
    campaign.tell([1, 2], ["dog", "cat"])
    log = folder / "run.jsonl"
    runs = tg.dynamics.runlog.RunLog(log, {}, resume=False)
    kept = Kept(Options(out=folder), "table", {"a": 1})
    rows: list[dict[str, Any]] = [{"sample": k, "label": f"label {k}"} for k in range(300)]
    found = audited("nothing", n=60, m=0, wrong=3)
    return {
        "page": (folder / "report.html", lambda: tg.report.write(found, folder)),
        "labels.csv": (folder / "labels.csv", lambda: write_rows(rows, folder / "labels.csv")),
        "labels.json": (folder / "labels.json", lambda: write_rows(rows, folder / "labels.json")),
        "campaign": (folder / "c.json", lambda: campaign.save(folder / "c.json")),
        "watch": (folder / "run.html", lambda: watch.write_page(monitor.history(), folder / "run.html")),
        "start": (folder / "run.jsonl.last.pt", lambda: runs.save_last(0, torch.eye(90))),
        "table": (folder / "table.json", lambda: kept.__setitem__("row", {"a": 3, "b": ["text" * 20] * 30})),
    }


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Callable[[], object]]]:
    return writers(tmp_path_factory.mktemp("written"))


KINDS = ["page", "labels.csv", "labels.json", "campaign", "watch", "start", "table"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_full_disk_leaves_what_was_there(kind: str, every: dict[str, Any]) -> None:
    to, work = every[kind]
    for before in (None, b"of the user's, and long enough " * 99):
        to.unlink(missing_ok=True)
        if before is not None:
            to.write_bytes(before)
        was = tree(to.parent)
        with full_disk(200), pytest.raises(InputError, match=r"cannot be written: File too large\. .* Free some room"):
            work()
        assert tree(to.parent) == was
    work()
    assert to.read_bytes() != before
    to.unlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", ["fchown", "fsync", "link", "replace"])
def test_a_killed_writer_leaves_what_was_there(kind: str, at: str, every: dict[str, Any]) -> None:
    to, work = every[kind]
    to.write_bytes(b"before")
    was = tree(to.parent)
    assert killed(work, at, files.os) == -9
    now = tree(to.parent)
    # Between its name and the renaming the new file is there in whole beside the old one; before, it has no name.
    beside = [name for name in set(now) - set(was) if at == "replace" and name.endswith(files.PARTIAL)]
    assert {name: data for name, data in now.items() if name not in beside} == was
    for name in beside:
        (to.parent / name).unlink()
    to.unlink()


@pytest.mark.parametrize("nameless", [True, False])
def test_mode_links_and_folders(nameless: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to write, with files that have no name until they are whole and without."""
    if not nameless:
        monkeypatch.setattr(files, "_nameless", lambda *_: False)
    to = tmp_path / "real" / "labels.csv"
    files.write(to, "first")
    assert stat.S_IMODE(to.stat().st_mode) == 0o666 & ~_umask()
    to.chmod(0o640)
    if os.getuid() == 0:
        os.chown(to, 1234, 4321)
    link, loose = tmp_path / "link.csv", tmp_path / "loose.csv"
    link.symlink_to("real/labels.csv")
    loose.symlink_to("real/other.csv")
    files.write(link, b"second")
    files.write(loose, lambda file: file.write(b"third"))
    assert link.is_symlink()
    assert loose.is_symlink()
    assert (to.read_bytes(), (tmp_path / "real" / "other.csv").read_bytes()) == (b"second", b"third")
    assert stat.S_IMODE(to.stat().st_mode) == 0o640
    if os.getuid() == 0:
        assert (to.stat().st_uid, to.stat().st_gid) == (1234, 4321)
    assert sorted(p.name for p in to.parent.iterdir()) == ["labels.csv", "other.csv"]

    def fails(file: Any) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        files.write(tmp_path / "new" / "deep" / "a.txt", fails)
    with pytest.raises(InputError, match=r"a text holds U\+D800, which is half a letter"):
        files.write(tmp_path / "new" / "deep" / "a.txt", "a\ud800")
    assert not (tmp_path / "new").exists()


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_what_cannot_be_written_is_refused_before(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo.csv")
    (tmp_path / "folder.csv").mkdir()
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    (tmp_path / "device.csv").symlink_to("/dev/full")
    listening = socket.socket(socket.AF_UNIX)
    where = os.getcwd()
    os.chdir(tmp_path)  # a socket's path must be short
    listening.bind("socket.csv")
    os.chdir(where)
    was = sorted(p.name for p in tmp_path.rglob("*"))
    for name, why in (
        ("fifo.csv", "it is a FIFO"), ("folder.csv", "it is a folder"), ("loop.csv", "Too many levels"),
        ("device.csv", "it is a device"), ("socket.csv", "it is a socket"), (f"new/{'a' * 300}.csv", "name too long"),
        ("fifo.csv/a.csv", "Not a directory"), (f"{'a/' * 3000}.csv", "name too long"),
    ):  # fmt: skip
        with pytest.raises(InputError, match=f"cannot be written: {why}.*Give a file|cannot be written: .*{why}"):
            files.writable(tmp_path / name, "--out")
        with pytest.raises(InputError, match="cannot be written"):
            files.write(tmp_path / name, "text")
    listening.close()
    assert files.writable(tmp_path / "a" / "b" / "c.csv", "--out") == tmp_path / "a" / "b" / "c.csv"
    assert sorted(p.name for p in tmp_path.rglob("*")) == was


def test_outputs_lie_apart(tmp_path: Path) -> None:
    a, b = tmp_path / "a.csv", tmp_path / "b.csv"
    a.write_text("", encoding="utf-8")
    os.link(a, tmp_path / "hard.csv")
    (tmp_path / "soft").symlink_to(".")
    for other in (a, tmp_path / "hard.csv", tmp_path / "soft" / "a.csv", tmp_path / "x" / ".." / "a.csv"):
        with pytest.raises(InputError, match="--out and --csv are one place"):
            files.apart({"--out": a, "--csv": other})
        with pytest.raises(InputError, match="--out is .* which is the job too and would be overwritten"):
            files.apart({"--out": other}, inputs={"the job": a})
        with pytest.raises(InputError, match="--out and --store are one place"):
            files.apart({"--out": a}, folders={"--store": other})
    for one, other in ((b, tmp_path / "B.csv"), (tmp_path / "\u00e9.csv", tmp_path / "e\u0301.csv")):
        with pytest.raises(InputError, match="one place"):  # on some disks
            files.apart({"--out": one, "--csv": other})
    with pytest.raises(InputError, match="which is to be a file"):
        files.apart({"--out": b, "--csv": b / "c.csv"})
    files.apart({"--out": a, "--csv": None}, inputs={"the job": b, "none": None}, folders={"--store": tmp_path})


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.py").write_text(JOB, encoding="utf-8")
    (tmp_path / "decided.csv").write_text("sample,given,action,label\n", encoding="utf-8")
    (tmp_path / "run.html").write_text("{}", encoding="utf-8")
    os.link(tmp_path / "decided.csv", tmp_path / "hard.csv")
    os.mkfifo(tmp_path / "fifo.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = [
    ("audit apply job.py:data decided.csv --out decided.csv", "the file of decisions too"),
    ("audit apply job.py:data decided.csv --out hard.csv", "the file of decisions too"),
    ("audit apply job.py:data decided.csv --out fifo.json", "it is a FIFO"),
    ("audit apply job.py:data fifo.json --out labels.csv", "is a FIFO"),
    ("audit apply job.py:fails decided.csv --out new/labels.csv", "the job fails"),
    ("audit job.py:make --out a.html --csv a.html", "--out and --csv are one place"),
    ("audit job.py:make --out page --csv job.py", "the job too and would be overwritten"),
    ("audit job:make --out page --csv job.py", "the job too and would be overwritten"),
    ("audit job.py:make --out new/a.html --csv new/a.html/b.csv", "to be a file"),
    ("audit job.py:make --out a.html --store a.html", "--out and --store are one place"),
    ("audit job.py:fails --out new --csv newer/a.csv", "the job fails"),
    ("audit job.py:bad --out new --store stored", "is nan"),
    ("explain job.py:fails --out new --store stored", "the job fails"),
    ("explain job.py:bad --out new --store stored", "is nan"),
    ("shift job.py:make --out a.html --kept fifo.json", "it is a FIFO"),
    ("shift job.py:fails --out new --kept newer/kept.csv", "the job fails"),
    ("probe job.py:fails --out new", "the job fails"),
    ("watch run.html", "the log too and would be overwritten"),
    ("watch fifo.json --out new/run.html", "is a FIFO"),
    ("reproduce uci --out new --data nowhere", "nowhere"),
]


@pytest.mark.parametrize(("words", "message"), REFUSED)
def test_a_refusal_leaves_nothing(words: str, message: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    was = tree(here)
    assert main(words.split()) in (1, 2)
    assert message in capsys.readouterr().err
    assert tree(here) == was


def test_a_store_is_made_with_its_first_tile(here: Path) -> None:
    """A run that failed before it leaves nothing, which would stand in the way of the mended one."""
    kernel = tg.trace_ntk(tg.models.mlp([3, 4, 3]))
    x = torch.randn(9, 3)
    bad = x.clone()
    bad[5, 1] = float("nan")
    was = tree(here)
    for k, error in ((kernel, tg.NonFiniteError), (tg.projected(kernel, dim=8), tg.NonFiniteError)):
        with pytest.raises(error, match="5"):
            tg.compute(k, bad, store="grams/k", tile=3, progress=False)
    with pytest.raises(tg.TangencyError):
        tg.projected(kernel, dim=8).features(bad, store="features/k", progress=False)
    assert tree(here) == was
    with pytest.raises(tg.errors.StoreError, match=r"cannot be made: Not a directory|not a Gram store"):
        tg.compute(kernel, x, store="job.py/k", tile=3, progress=False)
    assert tree(here) == was
    made = tg.compute(kernel, x, store="grams/k", tile=3, progress=False)
    assert made.progress == (6, 6)  # type: ignore[attr-defined]  # a stored one
    assert torch.equal(made.dense(), tg.compute(kernel, x, tile=3, progress=False).dense())


def test_records_of_experiments_begin_with_a_result(tmp_path: Path) -> None:
    kept = Kept(Options(out=tmp_path / "out"), "table", {})
    assert not (tmp_path / "out").exists()
    kept["row"] = {"a": 1}
    assert json.loads((tmp_path / "out" / "table.json").read_text(encoding="utf-8"))["rows"] == {"row": {"a": 1}}
    write = partial(files.write, tmp_path / "out" / "table.json")
    write("{")
    with pytest.raises(InputError, match="no record of this experiment"):
        Kept(Options(out=tmp_path / "out"), "table", {})
