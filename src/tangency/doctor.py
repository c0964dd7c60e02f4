"""What a machine has of what tangency can use, what is missing, and whether a kernel comes out right on it."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ._base import machine
from ._base.extras import EXTRAS, install, is_installed
from ._base.memory import machine_memory
from ._base.results import Result
from ._version import __version__
from .kernels.ntk import trace_ntk

# How far a kernel in float64 may be from autograd's, relative to its largest entry: thousands of roundings.
TOLERANCE = 1e-12
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass(frozen=True, repr=False)
class Library(Result):
    """What is installed and where."""

    version: str
    where: str


@dataclass(frozen=True, repr=False)
class Gpu(Result):
    """A GPU that torch can use. `memory`: all of it."""

    name: str
    memory: int
    driver: str

    UNITS: ClassVar[Mapping[str, str]] = {"memory": "bytes"}


@dataclass(frozen=True, repr=False)
class ExtraFound(Result):
    """An extra: the versions of its libraries, what is missing of them, what it is for, and what adds it."""

    found: dict[str, str]
    missing: tuple[str, ...]
    use: str
    command: str


@dataclass(frozen=True, repr=False)
class Threads(Result):
    """Who may compute: torch's threads, the variables that set them, cores (of this process; of the machine), load."""

    torch: int
    variables: dict[str, str | None]
    cores: int
    machine_cores: int
    load: float | None
    advice: str


@dataclass(frozen=True, repr=False)
class SelfCheck(Result):
    """A small kernel against plain autograd in float64 on one device. `error`: relative to the largest entry."""

    device: str
    error: float | None
    failure: str

    @property
    def passed(self) -> bool:
        """Whether the kernel came out right."""
        return self.error is not None and self.error <= TOLERANCE


@dataclass(frozen=True, repr=False)
class Diagnosis(Result):
    """What `doctor()` found; `table()` is for people, `to_dict()` for machines. Memory and disk in bytes."""

    libraries: dict[str, Library]
    gpus: tuple[Gpu, ...]
    no_gpu: str  # why there is none, if there is none
    extras: dict[str, ExtraFound]
    threads: Threads
    memory_free: int
    memory: int
    disk_free: int
    folder: str
    checks: tuple[SelfCheck, ...]

    UNITS: ClassVar[Mapping[str, str]] = {"memory_free": "bytes", "memory": "bytes", "disk_free": "bytes"}

    @property
    def healthy(self) -> bool:
        """Whether kernels come out right on all devices."""
        return all(check.passed for check in self.checks)

    def __repr__(self) -> str:
        missing = [name for name, extra in self.extras.items() if extra.missing]
        kernels = "right" if self.healthy else "wrong"
        return f"Diagnosis(kernels {kernels}, {len(self.gpus)} GPUs, extras missing: {', '.join(missing) or 'none'})"

    def table(self) -> str:
        """Everything in a few lines, with what to do about it."""
        wide = max(map(len, self.libraries))
        lines = [f"{name:{wide}}  {v.version}  {v.where}" for name, v in self.libraries.items()]
        lines += ["", *(f"GPU: {g.name}, {_size(g.memory)}, driver {g.driver}" for g in self.gpus)]
        lines += [f"GPU: none. {self.no_gpu}"] if self.no_gpu else []
        lines += [_threads_line(self.threads)]
        lines += [f"  {self.threads.advice}"] if self.threads.advice else []
        lines += [f"memory: {_size(self.memory_free)} free of {_size(self.memory)}"]
        lines += [f"disk: {_size(self.disk_free)} free at {self.folder}", "", "extras:"]
        lines += [_extra_line(name, extra) for name, extra in self.extras.items()]
        lines += ["", *map(_check_line, self.checks)]
        return "\n".join(lines)


def doctor() -> Diagnosis:
    """Versions, GPUs, optional libraries, threads, memory and disk, and a kernel checked against autograd: a second.

    >>> doctor().healthy
    True
    """
    gpus = _gpus()
    devices = ["cpu", *(f"cuda:{k}" for k in range(len(gpus)))]
    here = Path.cwd()
    return Diagnosis(
        libraries=_libraries(),
        gpus=gpus,
        no_gpu="" if gpus else _why_no_gpu(),
        extras={name: _extra(name) for name in EXTRAS},
        threads=_threads(),
        memory_free=machine.available_memory(),
        memory=machine_memory(),
        disk_free=shutil.disk_usage(here).free,
        folder=str(here),
        checks=tuple(self_check(device) for device in devices),
    )


def self_check(device: str, kernel: Callable[[nn.Module], Callable[[Tensor], Tensor]] = trace_ntk) -> SelfCheck:
    """A small kernel against plain autograd in float64.

    >>> self_check("cpu").passed
    True
    """
    try:
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay what they are
            torch.manual_seed(0)
            layers = nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
            model, x = nn.Sequential(*layers).double().to(device), torch.randn(6, 1, 6, 6).double().to(device)
        ours, reference = kernel(model)(x), _plain_ntk(model, x)
        return SelfCheck(device, float((ours - reference).abs().max() / reference.abs().max()), "")
    except Exception as e:
        return SelfCheck(device, None, f"{type(e).__name__}: {e}")


def _plain_ntk(model: nn.Module, x: Tensor) -> Tensor:
    """Σ_c ⟨∂f_c(x_i)/∂θ, ∂f_c(x_j)/∂θ⟩ from one backward pass for every sample and output."""
    parameters = list(model.parameters())
    rows = []
    for sample in x:
        for output in model(sample[None])[0]:
            rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(output, parameters, retain_graph=True)]))
    jacobian = torch.stack(rows).view(len(x), -1, rows[0].numel())
    return torch.einsum("icp,jcp->ij", jacobian, jacobian)


def _libraries() -> dict[str, Library]:
    return {
        "tangency": Library(__version__, str(Path(__file__).parent)),
        "python": Library(platform.python_version(), sys.executable),
        "torch": Library(torch.__version__, str(Path(torch.__file__).parent)),
        "numpy": Library(np.__version__, str(Path(np.__file__).parent)),
    }


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    driver = _driver()
    found = (torch.cuda.get_device_properties(k) for k in range(torch.cuda.device_count()))
    return tuple(Gpu(p.name, p.total_memory, driver) for p in found)


def _driver() -> str:
    """The version of NVIDIA's driver, nothing where nobody knows."""
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        said = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=10).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return said[0] if said else "unknown"


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; pytorch.org has builds with it."
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides them all."
    if shutil.which("nvidia-smi") is None:
        return "There is no NVIDIA driver (nvidia-smi)."
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as e:
        return str(e).splitlines()[0]
    return "torch sees none."


def _extra(name: str) -> ExtraFound:
    libraries = EXTRAS[name].libraries
    found = {title: _version(title) for library, title in libraries.items() if is_installed(library)}
    missing = tuple(title for title in libraries.values() if title not in found)
    return ExtraFound(found, missing, EXTRAS[name].use, install(name))


def _version(title: str) -> str:
    try:
        return version(title)
    except PackageNotFoundError:  # on the path, and not installed
        return "unknown version"


def _threads() -> Threads:
    count, variables = torch.get_num_threads(), {name: os.environ.get(name) for name in _THREADS}
    have, there = machine.cores(), os.cpu_count() or 1
    return Threads(count, variables, have, there, machine.load(), machine.busy(count))


def _threads_line(threads: Threads) -> str:
    variables = ", ".join(f"{k} {'not set' if v is None else f'is {v}'}" for k, v in threads.variables.items())
    load = "" if threads.load is None else f", load {threads.load:.1f}"
    return (
        f"threads: torch uses {threads.torch}; this process may use {threads.cores} of {threads.machine_cores} "
        f"cores{load}; {variables}"
    )


def _extra_line(name: str, extra: ExtraFound) -> str:
    if extra.missing:
        return f"  {name:8}  missing ({extra.use}): {extra.command}"
    return f"  {name:8}  {', '.join(f'{title} {v}' for title, v in extra.found.items())} ({extra.use})"


def _check_line(check: SelfCheck) -> str:
    what = f"self-check on {check.device}, a small kernel against autograd in float64"
    if check.error is None:
        return f"{what}: failed. {check.failure}"
    said = "right" if check.passed else f"WRONG, at most {TOLERANCE:.0e} is rounding"
    return f"{what}: relative error {check.error:.1e}, {said}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
