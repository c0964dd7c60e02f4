"""A store begun on one processor, gone on with on another, verified on a third and read here.

Processors are played by settings that libraries read (benchmarks/robustness/processors.py says which act where), each
in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

import tangency as tg

JOB = '''
import sys
import numpy as np
import torch
from torch import nn
import tangency as tg
from tangency.gram.store import Store

torch.set_num_threads(1)

def model():
    """The weights of a file: those drawn from a seed need not be the same on another processor."""
    net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))
    with np.load("made.npz") as made:
        net.load_state_dict({name: torch.from_numpy(made[name]) for name in net.state_dict()})
        return net, torch.from_numpy(made["x"])

def float32():
    net, x = model()
    return tg.trace_ntk(net), x

def float64():
    net, x = model()
    return tg.full_ntk(net, dtype="float64"), x

def infinite():
    net, x = model()
    return tg.infinite_ntk(nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 1))), x

def other():
    """A weight that is off by a thousandth: no rounding of any processor."""
    net, x = model()
    net[0].weight.data *= 1.001
    return tg.trace_ntk(net), x

def into(stop):
    """All three, each stopped after so many tiles."""
    write = Store.write
    for job in (float32, float64, infinite):
        written = []
        def stopping(self, i, j, tile):
            if len(written) == stop:
                raise KeyboardInterrupt
            written.append((i, j))
            write(self, i, j, tile)
        Store.write = stopping
        try:
            kernel, x = job()
            tg.compute(kernel, x, store=job.__name__, tile=4, progress=False)
        except KeyboardInterrupt:
            assert len(written) == stop
'''
NAMES = ("float32", "float64", "infinite")
OLD = {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "SSE41"}
LESS_OLD = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
# What docs/tasks/gram.md promises of numbers from two processors: the largest difference beside the largest entry.
DIGITS = {"float32": 1e-6, "float64": 1e-14, "infinite": 1e-14}


def _ask(where: Path, settings: dict[str, str], code: str) -> subprocess.CompletedProcess[str]:
    plain = {k: v for k, v in os.environ.items() if k not in OLD}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], cwd=where, env=plain | settings, capture_output=True,
        encoding="utf-8",
        check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, dict[str, bytes]]]:
    """A folder with the job and its three stores, begun on one processor and finished on another, and what the first
    had written."""
    where, numbers = tmp_path_factory.mktemp("processors"), np.random.default_rng(0)
    shapes = {"0.weight": (32, 6), "0.bias": (32,), "2.weight": (3, 32), "2.bias": (3,), "x": (16, 6)}
    np.savez(where / "made.npz", **{k: numbers.standard_normal(v).astype("f4") / 2 for k, v in shapes.items()})
    (where / "jobs.py").write_text(JOB, encoding="utf-8")
    begun = _ask(where, {}, "import jobs; jobs.into(4)")
    assert begun.returncode == 0, begun.stderr
    first = {name: {str(p): p.read_bytes() for p in (where / name).rglob("*") if p.is_file()} for name in NAMES}
    ended = _ask(where, OLD, "import jobs; jobs.into(None)")
    assert ended.returncode == 0, ended.stderr
    return where, first


def _reference(where: Path, name: str) -> Tensor:
    """Computed here, in one go."""
    scope: dict[str, object] = {}
    code = JOB.replace("torch.set_num_threads(1)", "").replace("made.npz", str(where / "made.npz"))
    exec(compile(code, "jobs.py", "exec"), scope)
    kernel, x = scope[name]()  # type: ignore[operator]
    return tg.compute(kernel, x, progress=False).dense()


@pytest.mark.parametrize("name", NAMES)
def test_read_here_it_has_the_digits_that_are_promised(
    stores: tuple[Path, dict[str, dict[str, bytes]]], name: str
) -> None:
    where, first = stores
    gram = tg.open_gram(str(where / name))
    assert sorted(gram.store.finished()) == sorted(gram.store.plan.tiles())
    # What the first processor wrote is untouched; every number, whoever made it, is the one computed here.
    assert all(Path(path).read_bytes() == was for path, was in first[name].items())
    found, want = gram.dense(), _reference(where, name)
    assert float((found - want).abs().max() / want.abs().max()) < DIGITS[name]


@pytest.mark.slow
def test_a_third_processor_verifies_it_and_sees_another_kernel(
    stores: tuple[Path, dict[str, dict[str, bytes]]],
) -> None:
    where, _ = stores
    pairs = [*((n, n) for n in NAMES), ("float32", "other")]
    asks = "".join(
        f"print('{name} by {job}:', cli.main(['verify', '{name}', 'jobs.py:{job}']))\n" for name, job in pairs
    )
    said = _ask(where, LESS_OLD, "from tangency import cli\n" + asks)
    assert said.returncode == 0, said.stderr
    for name in NAMES:
        assert f"\n{name} by {name}: 0\n" in said.stdout, said.stdout + said.stderr
    assert said.stdout.count("10 of 10 finished tiles match their checksums") == 4
    assert said.stdout.count("10 tiles computed again") == 3
    assert said.stdout.splitlines()[-1] == "float32 by other: 1"
    assert "kernel.weights" in said.stderr
