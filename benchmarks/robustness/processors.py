"""Other processors, as far as this one can play them: settings under which the same sums have other last digits.

    python -m benchmarks.robustness.processors hashes                    # which settings act here, and on what
    python -m benchmarks.robustness.processors digits                    # how far apart kernels are under them
    python -m benchmarks.robustness.processors tests                     # the whole suite under each combined setting
    python -m benchmarks.robustness.processors tests --settings old      # under one of them
    python -m benchmarks.robustness.processors tests --tender            # the tender part: `make test-processors`

A setting is a few environment variables that torch, MKL, oneDNN, OpenBLAS and NumPy read, the threads of torch, or
MKL's way on processors of Intel, which it takes elsewhere too where it is told that this is one (that needs a C
compiler). `hashes` runs the same products, sums and decompositions under each and compares their bits. Those that act
are put together into the few settings of COMBINED. `--json FILE` keeps what came of `digits` or `tests`, beside what
the file has of other settings and processors.
"""

import argparse
import functools
import hashlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import save

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
    (folder / "intel.c").write_text(FOR_MKL, encoding="utf-8")
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
        seen.update(np.ascontiguousarray(array).tobytes())
    return seen.hexdigest()[:12]


def fingerprints() -> dict[str, str]:
    """The bits of what this process computes from the same numbers, by name."""
    numbers, found = np.random.default_rng(0), dict[str, str]()
    for kind in (torch.float32, torch.float64):
        drawn = [numbers.standard_normal(shape) for shape in ((97, 129), (129, 45), (3, 5, 12, 12), (7, 5, 3, 3))]
        a, b, image, filters = (torch.from_numpy(v).to(kind) for v in drawn)
        k = a @ a.T / 8 + torch.eye(97, dtype=kind)
        k = ((k + k.T) * 512).round() / 1024  # the same in all digits
        falling, vectors = torch.linalg.eigh(k)
        x, y, m = a.numpy(), b.numpy(), k.numpy()
        made: dict[str, tuple[object, ...]] = {
            "product": (a @ b,),
            "sum": (a.sum(), a.sum(0), a.mean(1), a.norm(dim=0), a.var(), a.logsumexp(1)),
            "tanh": (a.tanh(), a.exp(), a.erf(), a.sin(), a.sigmoid()),
            "convolution": (torch.nn.functional.conv2d(image, filters, padding=1),),
            "eigenvalues": (falling,),
            "eigenvectors": (vectors,),
            "cholesky": (torch.linalg.cholesky(k),),
            "randn": (torch.randn(99, generator=torch.Generator().manual_seed(0), dtype=kind),),
            "NumPy product": (x @ y,),
            "NumPy tanh": (np.tanh(x), np.exp(x), x.sum(0)),
            "NumPy eigenvalues": (np.linalg.eigvalsh(m),),
        }  # fmt: skip
        found |= {f"{name} {str(kind)[6:]}": _digest(*values) for name, values in made.items()}
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


# ---- how far apart kernels are under them ---------------------------------------------------------------------------


def write_kernels(path: Path) -> None:
    """Kernels of the same weights and inputs, as this process computes them."""
    torch.set_num_threads(int(os.environ.get(THREADS, "1")))
    numbers = np.random.default_rng(0)

    def filled(model: nn.Module) -> nn.Module:
        for p in model.parameters():
            width = p[0].numel() if p.dim() > 1 else 1
            p.data = torch.from_numpy((numbers.standard_normal(tuple(p.shape)) / width**0.5).astype("f4"))
        return model.eval()

    images = torch.from_numpy(numbers.random((120, 1, 8, 8)).astype("f4"))
    words = torch.from_numpy(numbers.standard_normal((40, 12, 32)).astype("f4"))
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    cnn = filled(nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(288, 10)))
    deep = filled(tg.models.mlp([64, *[128] * 6, 3], activation=nn.Tanh))
    attention = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
    reader = filled(nn.Sequential(attention, nn.Flatten(), nn.Linear(384, 3)))
    wide = nn.Sequential(nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    found = dict[str, Tensor]()
    for kind in ("float32", "float64"):
        found[f"CNN {kind}"] = tg.trace_ntk(cnn, dtype=kind)(images)
        found[f"six layers of tanh {kind}"] = tg.trace_ntk(deep, dtype=kind)(images.flatten(1))
        found[f"attention {kind}"] = tg.trace_ntk(reader, dtype=kind)(words)
        found[f"infinite width {kind}"] = tg.infinite_ntk(wide, dtype=kind)(images.flatten(1))
    found["projected float32"] = tg.projected(tg.trace_ntk(cnn), dim=256)(images)
    np.savez(path, **{name: k.numpy() for name, k in found.items()})  # type: ignore[arg-type]


def apart() -> dict[str, float]:
    """For each kernel the largest difference under any two settings, beside the largest entry."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("bare", *COMBINED):
            env = environment(COMBINED.get(name, {}))
            if env is not None:
                file = Path(folder) / f"{name}.npz"
                asked = [sys.executable, "-m", "benchmarks.robustness.processors", "kernels", "--out", str(file)]
                subprocess.run(asked, cwd=ROOT, env=env, check=True)
                with np.load(file) as kernels:
                    made.append({k: v.astype("f8") for k, v in kernels.items()})
    pairs = list(itertools.combinations(made, 2))
    return {k: max(float(np.abs(a[k] - b[k]).max() / np.abs(a[k]).max()) for a, b in pairs) for k in made[0]}


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
    about = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    names = [line.partition(":")[2].strip() for line in about.splitlines() if line.startswith("model name")]
    return f"{names[0] if names else 'unknown'}, {torch.backends.cpu.get_cpu_capability()}"


def _kept(path: Path, what: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Into a file with rows of other settings and processors, in place of those of the same."""

    def key(row: Mapping[str, object]) -> tuple[object, ...]:
        return row.get("setting"), row["processor"], row.get("tests")

    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    before, new = held.get(what, []), {key(row) for row in rows}
    parts = {part: held.get(part, []) for part in ("digits", "tests")}
    parts[what] = [row for row in before if key(row) not in new] + [dict(row) for row in rows]
    save(parts, path, f"python -m benchmarks.robustness.processors {' '.join(sys.argv[1:])}")


def _tests(args: argparse.Namespace) -> list[dict[str, object]]:
    """A row for each setting that is asked for and can be had."""
    options, rows = ["-q", "-n", args.workers, "--dist", "worksteal", "-m", "not slow and not gpu"], []
    quick = ["old", "avx2" if environment(COMBINED["intel"]) is None else "intel"]  # two of them: under two minutes
    for name in args.settings or (quick if args.tender else COMBINED):
        print(f"---- {name}: {_written(COMBINED.get(name, {}))}", flush=True)
        row = run_tests(name, [*options, *(TENDER if args.tender else ())])
        if row is None:
            print("not to be had here: it needs a C compiler")
            continue
        rows.append(row | {"tests": "tender" if args.tender else "make test"})
        print({k: v for k, v in rows[-1].items() if k != "environment"}, flush=True)
    return rows


def main() -> int:
    """What the command line asks for; 1 if a test failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=["hashes", "digits", "tests", "fingerprints", "kernels"])
    parser.add_argument(
        "--settings", nargs="+", choices=["bare", *COMBINED], help="default: all; of the tender part two"
    )
    parser.add_argument("--tender", action="store_true", help="only the part that is known to be tender")
    parser.add_argument("--workers", default="2", help="processes of pytest")
    parser.add_argument("--json", type=Path, help="a file for the results, such as benchmarks/results/processors.json")
    parser.add_argument("--out", type=Path, help="for kernels: a file")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    if args.what == "fingerprints":
        print(json.dumps(fingerprints()))
    elif args.what == "kernels":
        write_kernels(args.out)
    elif args.what == "hashes":
        for name, changed in acting().items():
            print(f"{name}: {'not to be had here' if changed is None else ', '.join(changed) or 'nothing'}")
    elif args.what == "digits":
        rows = [{"processor": processor(), "largest difference": apart()}]
        print(json.dumps(rows, indent=1))
    else:
        rows = _tests(args)
    if args.json is not None and rows:
        _kept(args.json, args.what, rows)
    return int(any(row.get("failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
