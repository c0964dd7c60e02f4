"""The command line, as a user runs it."""

import fcntl
import json
import os
import pty
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import tangency as tg
from tangency.cli import main

JOB = """
import os, time, torch, tangency as tg

def kernel():
    torch.manual_seed(0)
    return tg.cosine(tg.trace_ntk(tg.models.mlp([5, 8, 3])))

def data():
    return torch.randn(100, 5, generator=torch.Generator().manual_seed(1))

def make():
    return kernel(), data()

def both():
    return kernel(), data(), data()[:30]

def other():
    return kernel(), data() + 1

def wrong():
    return data()

class Slow(tg.kernels.combine.ScaleKernel):
    def pair(self, a, b, workspace=None):
        if not os.path.exists("go on"):
            time.sleep(0.05)
        return super().pair(a, b, workspace)

def slow():
    return Slow(kernel().kernel, 2.0), data()
"""


@pytest.fixture
def job(job_module: Callable[[str], str]) -> str:
    return job_module(JOB)


def test_gram_status_verify(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gram", f"{job}:make", "--store", "runs/k", "--tile", "32"]) == 0
    assert "100 x 100 float32, complete" in capsys.readouterr().out
    module = __import__(job)
    want = module.kernel()(module.data())
    torch.testing.assert_close(tg.open_gram("runs/k").dense(), want)
    assert main(["status", "runs/k"]) == 0
    assert "10 of 10 tiles of 32 samples a side (complete)" in capsys.readouterr().out
    assert main(["status", "runs/k", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["complete"] is True
    assert report["function"] == f"{job}:make"
    assert report["manifest"]["kernel"]["of"]["kernel"] == "trace ntk"
    assert main(["verify", "runs/k", f"{job}:make", "--sample", "4"]) == 0
    out = capsys.readouterr().out
    assert "10 of 10 finished tiles match their checksums" in out
    assert "4 tiles computed again: 4 equal bit for bit" in out
    assert main(["gram", f"{job}.py:both", "--store", "runs/two", "--memory", "1GiB", "--quiet"]) == 0
    assert tg.open_gram("runs/two").shape == (100, 30)


def test_verify_finds_damage_and_wrong_numbers(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["gram", f"{job}:make", "--store", "k", "--tile", "32"])
    store = tg.open_gram("k").store
    tile = store.read(0, 1)
    tile[3, 4] += 0.5  # a tile that is wrong but whole
    store.write(0, 1, tile)
    raw = bytearray(Path("k/c/1/2").read_bytes())
    raw[9] ^= 4
    Path("k/c/1/2").write_bytes(raw)
    capsys.readouterr()
    assert main(["verify", "k", f"{job}:make", "--sample", "100"]) == 1
    out = capsys.readouterr().out
    assert f"damaged: tile 1, 2 of {Path.cwd() / 'k'}" in out
    assert "9 of 10 finished tiles match" in out
    assert "wrong: tile 0, 1 differs" in out


def test_errors_are_sentences(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["gram", f"{job}:make", "--store", "k"])
    for argv, what in [
        (["gram", f"{job}:wrong", "--store", "k2"], r"needed: (kernel, x)"),
        (["gram", f"{job}:absent", "--store", "k2"], "has no function 'absent'"),
        (["gram", "nosuchmodule:make", "--store", "k2"], "cannot be imported"),
        (["gram", "nosuchfile.py:make", "--store", "k2"], "no file"),
        (["gram", job, "--store", "k2"], "is not MODULE:FUNCTION"),
        (["gram", f"{job}:make", "--store", "k2", "--memory", "much"], "needed: a number of bytes"),
        (["gram", f"{job}:make", "--store", "k2", "--gpus"], "needs the model on a GPU"),
        (["verify", "k", "--sample", "3"], "--sample needs the function"),
        (
            ["status", "no where"],
            "no Gram store at no where. Make one: tangency gram MODULE:FUNCTION --store 'no where'",
        ),
        (["verify", "nowhere"], "no Gram store at nowhere"),
    ]:
        capsys.readouterr()
        assert main(argv) == 2, argv
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert what in err, err
    for argv, what in [
        (["gram", f"{job}:other", "--store", "k"], "inputs.x1"),
        (["verify", "k", f"{job}:other"], "inputs.x1"),
    ]:
        assert main(argv) == 1, argv
        err = capsys.readouterr().err
        assert err.startswith("error: ")
        assert what in err, err


def test_ctrl_c_says_how_to_go_on(job: str) -> None:
    """On a terminal: a bar with tiles per second; Ctrl-C ends with the sentence, and the same command goes on."""
    primary, secondary = pty.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [sys.executable, "-m", "tangency.cli", "gram", f"{job}:slow", "--store", "k", "--tile", "5"]
    # A test run in the background of a shell ignores SIGINT, and its children would too.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, stderr=secondary, stdout=subprocess.DEVNULL, preexec_fn=heed)
    os.close(secondary)
    while len(list(Path("k").glob("c/*/*"))) < 20 and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    said = b""
    while True:
        try:
            piece = os.read(primary, 4096)
        except OSError:
            break
        if not piece:
            break
        said += piece
    assert process.wait() == 130
    text = said.decode()
    assert "tile/s" in text
    assert "Traceback" not in text
    assert f"tiles are safe in {Path.cwd() / 'k'}. Call again with the same arguments to go on." in text
    done, count = tg.open_gram("k").progress
    assert 20 <= done < count
    assert tg.open_gram("k").store.function == f"{job}:slow"  # known from the start: status can say how to go on
    Path("go on").touch()
    assert main(command[3:]) == 0
    assert tg.open_gram("k").progress == (count, count)


def test_suggested_commands_can_be_pasted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Into a shell, where names have spaces and quotes."""
    folder = tmp_path / "my $jobs' folder"
    folder.mkdir()
    (folder / "a job.py").write_text(JOB, encoding="utf-8")
    name, store = f"{folder}/a job.py:make", f"{folder}/a gram"
    assert main(["gram", name, "--store", store, "--quiet"]) == 0
    capsys.readouterr()
    assert main(["verify", store]) == 0
    (verify,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("tangency verify"))
    assert shlex.split(verify) == ["tangency", "verify", store, name]
    for tile in Path(store).glob("c/0/*"):
        tile.unlink()
    assert main(["status", store]) == 0
    said = capsys.readouterr().out
    assert shlex.split(said[said.index("tangency gram") :]) == ["tangency", "gram", name, "--store", store]


def test_without_arguments_there_is_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["tangency"])
    assert main() == 0
    assert capsys.readouterr().out == said
    assert "First steps" in said
    assert "doctor" in said


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["--help"])
    assert e.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("gram", "status", "verify"))


@pytest.mark.parametrize("words", [["doctor"], ["demo"]])  # the second looks at torch's threads first
def test_ctrl_c_while_torch_is_being_imported(words: list[str], tmp_path: Path) -> None:
    """A stand-in for torch that is interrupted as it is imported."""
    assert with_torch("raise KeyboardInterrupt", words, tmp_path) == (130, "stopped")


def test_without_torch(tmp_path: Path) -> None:
    """Help needs none; what computes says what is missing."""
    absent = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    assert with_torch(absent, ["gram", "--help"], tmp_path) == (0, "")
    said = "error: tangency needs PyTorch, which is not installed here: pip install torch."
    assert with_torch(absent, ["doctor"], tmp_path) == (2, said)


def with_torch(text: str, words: list[str], folder: Path) -> tuple[int, str]:
    """What a command returns and says on standard error where this file is torch."""
    (folder / "torch.py").write_text(text + "\n", encoding="utf-8")
    code = "import sys, tangency_command; sys.exit(tangency_command.main())"
    paths = os.pathsep.join([str(folder), str(Path(tg.__file__).parents[1])])
    done = subprocess.run(
        [sys.executable, "-c", code, *words], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        encoding="utf-8", check=False, cwd=folder,
    )  # fmt: skip
    return done.returncode, done.stderr.strip()
