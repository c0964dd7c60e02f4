"""Other processors, as far as this one can play them: settings under which the same sums have other last digits.

    python -m benchmarks.robustness.processors hashes                    # which settings act here, and on what
    python -m benchmarks.robustness.processors tests                     # the whole suite under each combined setting
    python -m benchmarks.robustness.processors tests --settings old      # under one of them
    python -m benchmarks.robustness.processors tests --tender            # the tender part: `make test-processors`

A setting is a few environment variables that torch, MKL, oneDNN, OpenBLAS and NumPy read, the threads of torch, or
MKL's way on processors of Intel, which it takes elsewhere too where it is told that this is one (that needs a C
compiler). `hashes` runs the same products, sums and decompositions under each and compares their bits. Those that act
are put together into the few settings of COMBINED. `--json FILE` writes what came of the tests; without it nothing is
kept.
"""

import argparse
import functools
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parents[2]
Setting = Mapping[str, str]
# The setting that stands for MKL on a processor of Intel; `_environment` makes the library that it takes.
INTEL = "MKL_AS_ON_INTEL"
# What torch's threads are in the tests: tests/conftest.py.
THREADS = "TANGENCY_TEST_THREADS"
# One thing each.
SINGLE: tuple[Setting, ...] = (
    {"ATEN_CPU_CAPABILITY": "default"}, {"ATEN_CPU_CAPABILITY": "avx2"},
    {"MKL_CBWR": "COMPATIBLE"}, {"MKL_CBWR": "AVX2"}, {INTEL: "1"},
    {"ONEDNN_MAX_CPU_ISA": "SSE41"}, {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"OPENBLAS_CORETYPE": "Prescott"}, {"OPENBLAS_CORETYPE": "Haswell"}, {"OPENBLAS_CORETYPE": "SkylakeX"},
    {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL"}, {"NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL"},
    {THREADS: "4"},
)  # fmt: skip
# Those that act, put together.
COMBINED: Mapping[str, Setting] = {
    # Without AVX2 and FMA; threads as always in the tests.
    "old": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "OPENBLAS_CORETYPE": "Prescott",
        "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_ICL",
    },
    # A Xeon: MKL by AVX-512 with FMA, its own vector functions.
    "intel": {INTEL: "1", "OPENBLAS_CORETYPE": "SkylakeX"},
    # AVX2 everywhere, and sums cut among threads.
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "MKL_CBWR": "AVX2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "OPENBLAS_CORETYPE": "Haswell",
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL",
        THREADS: "4",
    },
}
# Where ties, signs, definiteness and last digits decide something, or are printed; found by whole runs under COMBINED.
TENDER = (
    "tests/active", "tests/gram/test_earlier_stores.py", "tests/gram/test_other_processors.py",
    "tests/infinite/test_infinite_float32.py", "tests/kernels/test_digits.py", "tests/linalg",
    "tests/regress/test_regress.py", "tests/spectra/test_alignment.py", "tests/spectra/test_undetermined.py",
    "tests/studies/test_eigenfunctions.py", "tests/studies/test_kernel_bounds.py", "tests/studies/test_teachers.py",
    "tests/test_docs.py",
)  # fmt: skip
FOR_MKL = "int mkl_serv_intel_cpu(void) { return 1; }\nint mkl_serv_intel_cpu_true(void) { return 1; }\n"


@functools.cache
def _as_on_intel() -> Path | None:
    """A library that answers MKL's question whether this is a processor of Intel; None without a C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="tangency-processors-"))
    (folder / "intel.c").write_text(FOR_MKL)
    made = subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "intel.so", folder / "intel.c"], check=False)
    return folder / "intel.so" if made.returncode == 0 else None


def environment(setting: Setting) -> dict[str, str] | None:
    """This process's environment with a setting; None where it cannot be had here."""
    ours = {k for one in SINGLE for k in one}
    made = {k: v for k, v in os.environ.items() if k not in ours} | dict(setting)
    made["OMP_NUM_THREADS"] = made.get(THREADS, "1")
    if made.pop(INTEL, None):
        library = _as_on_intel()
        if library is None:
            return None
        made["LD_PRELOAD"] = f"{library} {made.get('LD_PRELOAD', '')}".strip()
    return made


# ---- which settings act ---------------------------------------------------------------------------------------------


def _digest(*arrays: object) -> str:
    seen = hashlib.sha256()
    for array in arrays:
        seen.update(np.ascontiguousarray(array).tobytes())  # type: ignore[call-overload]
    return seen.hexdigest()[:12]


def fingerprints() -> dict[str, str]:
    """The bits of what this process computes from the same numbers, by name."""
    numbers, found = np.random.default_rng(0), dict[str, str]()
    for kind in (torch.float32, torch.float64):
        drawn = [numbers.standard_normal(shape) for shape in ((97, 129), (129, 45), (3, 5, 12, 12), (7, 5, 3, 3))]
        a, b, image, filters = (torch.from_numpy(v).to(kind) for v in drawn)
        k = a @ a.T / 8 + torch.eye(97, dtype=kind)
        k = ((k + k.T) * 512).round() / 1024  # the same in all digits
        values, vectors = torch.linalg.eigh(k)
        x, y, m = a.numpy(), b.numpy(), k.numpy()
        made: dict[str, Callable[[], tuple[object, ...]]] = {
            "product": lambda a=a, b=b: (a @ b,),
            "sum": lambda a=a: (a.sum(), a.sum(0), a.mean(1), a.norm(dim=0), a.var(), a.logsumexp(1)),
            "tanh": lambda a=a: (a.tanh(), a.exp(), a.erf(), a.sin(), a.sigmoid()),
            "convolution": lambda i=image, f=filters: (torch.nn.functional.conv2d(i, f, padding=1),),
            "eigenvalues": lambda v=values: (v,),
            "eigenvectors": lambda v=vectors: (v,),
            "cholesky": lambda k=k: (torch.linalg.cholesky(k),),
            "randn": lambda kind=kind: (torch.randn(99, generator=torch.Generator().manual_seed(0), dtype=kind),),
            "NumPy product": lambda x=x, y=y: (x @ y,),
            "NumPy tanh": lambda x=x: (np.tanh(x), np.exp(x), x.sum(0)),
            "NumPy eigenvalues": lambda m=m: (np.linalg.eigvalsh(m),),
        }  # fmt: skip
        found |= {f"{name} {str(kind)[6:]}": _digest(*make()) for name, make in made.items()}
    return found


def _fingerprints_under(setting: Setting) -> dict[str, str] | None:
    env = environment(setting)
    if env is None:
        return None
    asked = [sys.executable, "-m", "benchmarks.robustness.processors", "fingerprints"]
    done = subprocess.run(asked, cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def acting() -> dict[str, list[str] | None]:
    """For each setting, one thing each and combined, what it changes here; None where it cannot be had."""
    bare = _fingerprints_under({})
    assert bare is not None
    found = dict[str, list[str] | None]()
    for name, setting in [*((_written(one), one) for one in SINGLE), *COMBINED.items()]:
        here = _fingerprints_under(setting)
        found[name] = None if here is None else [k for k, v in here.items() if v != bare[k]]
    return found


def _written(setting: Setting) -> str:
    return " ".join(f"{k}={v}" for k, v in setting.items())


# ---- the tests under them -------------------------------------------------------------------------------------------


def run_tests(name: str, pytest_arguments: Sequence[str]) -> dict[str, object] | None:
    """pytest under a combined setting: what passed, what failed, and what it took; None where it cannot be had."""
    env = environment(COMBINED.get(name, {}))
    if env is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(
            [sys.executable, "-m", "pytest", *pytest_arguments, f"--junitxml={report}"], cwd=ROOT, env=env, check=False
        )
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cases = list(ET.parse(report).getroot().iter("testcase"))
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    wrong = [f"{c.get('classname')}::{c.get('name')}" for c in cases if {"failure", "error"} & {e.tag for e in c}]
    skipped = sum(any(e.tag == "skipped" for e in c) for c in cases)
    return {
        "setting": name,
        "environment": dict(COMBINED.get(name, {})),
        "processor": processor(),
        "passed": len(cases) - len(wrong) - skipped,
        "failed": len(wrong),
        "skipped": skipped,
        "seconds": round(seconds),
        "cpu_minutes": round(cpu / 60, 1),
        "failures": wrong,
    }


def processor() -> str:
    """The name of this machine's processor, and the instructions that torch takes here."""
    about = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {torch.backends.cpu.get_cpu_capability()}"


def _kept(path: Path, rows: list[dict[str, object]], command: str) -> None:
    """Into a file with rows of other settings and processors, in place of those of the same."""
    from benchmarks.record import save

    def key(row: Mapping[str, object]) -> tuple[object, ...]:
        return row["setting"], row["processor"], row["tests"]

    before = json.loads(path.read_text())["rows"] if path.exists() else []
    new = {key(row) for row in rows}
    save({"rows": [row for row in before if key(row) not in new] + rows}, path, command)


def main() -> int:
    """What the command line asks for; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=["hashes", "fingerprints", "tests"])
    parser.add_argument("--settings", nargs="+", choices=["bare", *COMBINED], default=list(COMBINED))
    parser.add_argument("--tender", action="store_true", help="only the part that is known to be tender")
    parser.add_argument("--workers", default="2", help="processes of pytest")
    parser.add_argument("--json", type=Path, help="a file for the results, such as benchmarks/results/processors.json")
    args = parser.parse_args()
    if args.what == "fingerprints":
        print(json.dumps(fingerprints()))
        return 0
    if args.what == "hashes":
        for name, changed in acting().items():
            print(f"{name}: {'not to be had here' if changed is None else ', '.join(changed) or 'nothing'}")
        return 0
    part = [*TENDER] if args.tender else []
    options = ["-q", "-n", args.workers, "--dist", "worksteal", "-m", "not slow and not gpu"]
    rows = []
    for name in args.settings:
        print(f"---- {name}: {_written(COMBINED.get(name, {}))}", flush=True)
        row = run_tests(name, [*options, *part])
        if row is None:
            print("not to be had here: it needs a C compiler")
            continue
        rows.append(row | {"tests": "tender" if args.tender else "make test"})
        print({k: v for k, v in row.items() if k != "environment"}, flush=True)
    if args.json is not None:
        _kept(args.json, rows, f"python -m benchmarks.robustness.processors {' '.join(sys.argv[1:])}")
    return int(any(row["failed"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
