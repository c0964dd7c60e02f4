"""The tests of `tests/gpu` on a machine that has a GPU, torch, NumPy and transformers, and no network.

Here, where there is a network, once (into .gpu-wheels/, which git ignores):

    python -m benchmarks.robustness.gpu_tests --wheels

On the GPU machine, from the repository's root, with .gpu-wheels/ brought along:

    python3 -m benchmarks.robustness.gpu_tests --out gpu_tests.json --commit $(git rev-parse HEAD)

What the machine has itself comes first; .gpu-wheels/ is for what it lacks. The table says for every file and test how
many passed, failed and were skipped and how long they took, and for every group of comparisons the largest error. The
exit status is that of pytest. With TANGENCY_GPU_ON_CPU=1 the same tests run on the CPU.
"""

import argparse
import datetime
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".gpu-wheels"
# What the tests import beside torch, NumPy and transformers; never with dependencies, which would be torch itself.
PACKAGES = [
    "pytest",
    "pytest-timeout",
    "pluggy",
    "iniconfig",
    "packaging",
    "pygments",
    "hypothesis",
    "sortedcontainers",
]
PACKAGES += ["attrs", "jaxtyping", "wadler-lindig", "beartype", "cloudpickle", "tqdm", "typing-extensions"]
PACKAGES += ["zarr", "numcodecs", "donfig", "google-crc32c", "pyyaml"]
PLATFORMS = ["manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64"]
LARGEST = 40 << 20
# -c, so that .gpu-wheels comes last: PYTHONPATH would put it before what the machine has.
START = "import sys; sys.path.append(sys.argv.pop(1)); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
NOTHING = "no GPU: all tests were skipped"
OUTCOMES = ("passed", "failed", "skipped", "xfailed", "xpassed")


def wheels(python: str) -> None:
    """Fill .gpu-wheels for another Python than this one."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", "--no-deps"]
    command += ["--no-compile", "--target", str(WHEELS), "--python-version", python, "--implementation", "cp"]
    command += ["--only-binary=:all:", *(f"--platform={p}" for p in PLATFORMS), *PACKAGES]
    subprocess.run(command, check=True)
    for folder in ("bin", "numcodecs/tests"):
        shutil.rmtree(WHEELS / folder, ignore_errors=True)
    if shutil.which("strip"):  # half of it is for debuggers
        subprocess.run(["strip", "--strip-debug", *map(str, WHEELS.rglob("*.so"))], check=True)
    size = sum(p.stat().st_size for p in WHEELS.rglob("*") if p.is_file())
    print(f"{WHEELS}: {size / 2**20:.1f} MiB for Python {python}")
    if size > LARGEST:
        raise SystemExit(f"more than {LARGEST >> 20} MiB: take something out of PACKAGES")


def run(log: Path, junit: Path, limit: float, options: list[str]) -> int:
    """pytest in a process of its own; its status, or 124 if it took longer than `limit` seconds."""
    command = [sys.executable, "-c", START, str(WHEELS), "tests/gpu", "-p", "no:cacheprovider", "-q", "-m", "gpu"]
    command += ["--tb=short", "-o", "timeout=100", "--junitxml", str(junit), *options]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "helpers"), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, PYTHONPATH=path.rstrip(os.pathsep), TANGENCY_GPU_LOG=str(log))
    environment |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True)
    try:
        return process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its workers too
        process.wait()
        return 124


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def place(test: str) -> tuple[str, str]:
    """File and function of a test."""
    file, _, rest = test.partition("::")
    return Path(file).stem, rest.partition("[")[0]


def add(row: dict[str, Any], line: dict[str, Any]) -> None:
    row[line["outcome"]] = row.get(line["outcome"], 0) + 1
    row["seconds"] = round(row.get("seconds", 0.0) + line["seconds"], 2)


def table(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Counts and seconds by file and by test, the largest error of each group, and what went wrong."""
    files: dict[str, Any] = {}
    errors: dict[str, Any] = {}
    total: dict[str, Any] = {}
    failures, skips = [], {}
    for line in found:
        file, test = place(line["test"])
        if line["kind"] == "error":
            note_error(errors.setdefault(file, {}), line)
            continue
        row = files.setdefault(file, {"tests": {}})
        for counted in (row, row["tests"].setdefault(test, {}), total):
            add(counted, line)
        if line["outcome"] == "failed":
            failures.append({"test": line["test"], "why": line["reason"]})
        elif line["outcome"] in ("skipped", "xfailed"):
            skips[line["test"]] = line["reason"].splitlines()[-1][-300:]
    for file, groups in errors.items():
        files.setdefault(file, {"tests": {}})["errors"] = groups
    return {"total": total, "files": files, "failures": failures, "skipped": skips}


def note_error(groups: dict[str, Any], line: dict[str, Any]) -> None:
    value = line["error"] if line["error"] == line["error"] else float("inf")  # not a number: the worst of all
    row = groups.setdefault(line["group"], {"largest": -1.0, "comparisons": 0})
    row["comparisons"] += 1
    if value > row["largest"]:
        row |= {"largest": value, "bound": line["bound"], "test": line["test"].partition("::")[2]}


def machine(commit: str) -> dict[str, Any]:
    import torch

    device = "CPU in place of a GPU" if os.environ.get("TANGENCY_GPU_ON_CPU") else NOTHING
    if device == NOTHING and torch.cuda.is_available():
        device = torch.cuda.get_device_name()
    return {
        "device": device,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "commit": commit or at_hand(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": "python3 -m benchmarks.robustness.gpu_tests --out FILE --commit HASH",
    }


def at_hand() -> str:
    """The commit of this working tree, where there is one."""
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "unknown"


def report(result: dict[str, Any]) -> None:
    for file, row in result["files"].items():
        counts = ", ".join(f"{row[k]} {k}" for k in OUTCOMES if k in row)
        print(f"{file}: {counts}; {row.get('seconds', 0):.0f} s")
        for group, error in row.get("errors", {}).items():
            print(f"    {group:45s} {error['largest']:.1e} of {error['bound']:.0e}  {error['test']}")
    for failure in result["failures"]:
        print(f"FAILED {failure['test']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", action="store_true", help="fill .gpu-wheels/ and stop")
    parser.add_argument("--python", default="3.12", help="the GPU machine's Python, for --wheels")
    parser.add_argument("--out", type=Path, help="the table, as JSON; FILE.xml beside it is pytest's own report")
    parser.add_argument("--commit", default="", help="what was tested, where there is no .git")
    parser.add_argument("--limit", type=float, default=420.0, help="seconds after which pytest is stopped")
    args, options = parser.parse_known_args()
    if args.wheels:
        return wheels(args.python)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"
        junit = args.out.resolve().with_suffix(".xml") if args.out else Path(folder) / "junit.xml"
        status = run(log, junit, args.limit, options)
        result = {**machine(args.commit), "status": status, **table(lines(log))}
    report(result)
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(status if result["device"] != NOTHING else NOTHING)


if __name__ == "__main__":
    main()
