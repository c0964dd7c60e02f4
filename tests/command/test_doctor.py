"""`tangency doctor`: what it says of the machine, and that it finds a kernel that is wrong."""

import json
import sys

import pytest
import torch
from torch import Tensor

import tangency as tg
from tangency import doctor as function
from tangency._base import machine
from tangency._base.extras import EXTRAS
from tangency.cli import main

doctor = sys.modules["tangency.doctor"]


def test_a_healthy_machine(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.random.get_rng_state()
    assert main(["doctor"]) == 0
    assert torch.equal(torch.random.get_rng_state(), before)
    said = capsys.readouterr().out
    for words in (tg.__version__, torch.__version__, sys.executable, "threads: torch uses", "OMP_NUM_THREADS", "free"):
        assert words in said
    assert "self-check on cpu" in said
    assert said.rstrip().endswith(", right")
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["checks"][0]["error"] <= doctor.TOLERANCE
    assert set(found["extras"]) == set(EXTRAS)
    assert found["libraries"]["torch"]["version"] == torch.__version__
    assert "kernels right" in repr(function())


def test_missing_extras_come_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    monkeypatch.setitem(sys.modules, "ray", None)
    found = function()
    assert found.extras["store"].missing == ("google-crc32c",)
    assert found.extras["ray"].missing == ("Ray",)
    assert "ray       missing (many machines): pip install 'tangency[ray]'" in found.table()
    assert "extras missing: store, ray" in repr(found)
    assert not found.extras["plots"].missing
    assert found.healthy  # nothing is wrong with a machine that has no Ray


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def wrong(model: torch.nn.Module) -> object:
        return lambda x: tg.trace_ntk(model)(x) * (1 + 1e-9)

    def broken(model: torch.nn.Module) -> object:
        raise RuntimeError("no such instruction")

    for kernel, said in (
        (wrong, "relative error 1.0e-09, WRONG"),
        (broken, "failed. RuntimeError: no such instruction"),
    ):
        real = doctor.self_check
        with monkeypatch.context() as patch:
            patch.setattr(doctor, "self_check", lambda device, real=real, kernel=kernel: real(device, kernel))
            assert main(["doctor"]) == 1
        assert said in capsys.readouterr().out


def test_the_reference_is_the_definition() -> None:
    """For f(x) = w·x the kernel is x·x', whatever the weights."""
    model, x = torch.nn.Linear(3, 2, bias=False).double(), torch.randn(4, 3).double()
    want: Tensor = 2 * x @ x.T
    torch.testing.assert_close(doctor._plain_ntk(model, x), want)


def test_why_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in doctor._why_no_gpu()
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert doctor._why_no_gpu() == "CUDA_VISIBLE_DEVICES hides them all."
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    assert "no NVIDIA driver" in doctor._why_no_gpu()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: "/usr/bin/nvidia-smi")

    def too_old() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.setattr(torch.cuda, "init", too_old)
    assert doctor._why_no_gpu() == "The NVIDIA driver on your system is too old"


def test_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory = "NVIDIA H200", 150 << 30

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: Properties())
    monkeypatch.setattr(doctor.subprocess, "run", lambda *a, **k: type("Done", (), {"stdout": "570.1\n"}))
    (gpu,) = doctor._gpus()
    assert (gpu.name, gpu.driver) == ("NVIDIA H200", "570.1")

    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(doctor.subprocess, "run", missing)
    assert doctor._driver() == "unknown"


def test_advice_on_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(machine, "load", lambda: 1e3)
    assert "OMP_NUM_THREADS=1" in doctor._threads().advice
