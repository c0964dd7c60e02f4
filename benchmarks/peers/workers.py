"""Starts the worker scripts, each in a process of its own, held to a time and a memory limit."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = Path(os.environ.get("TANGENCY_PEERS", ROOT / ".venv-peers"))
TIMEOUT = 400.0  # seconds
MEMORY = 16 * 2**30  # bytes

Row = dict[str, Any]


def peers_python() -> Path:
    """The Python of neural-tangents' environment, which the first call makes."""
    python = ENVIRONMENT / "bin" / "python"
    mark = ENVIRONMENT / "installed"
    requirements = Path(__file__).with_name("requirements.txt")
    if not mark.exists() or mark.read_text(encoding="utf-8") != requirements.read_text(encoding="utf-8"):
        print(f"making {ENVIRONMENT}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", ENVIRONMENT], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-r", requirements], check=True)
        mark.write_text(requirements.read_text(encoding="utf-8"), encoding="utf-8")
    return python


def peers_versions() -> dict[str, str]:
    """Versions in neural-tangents' environment; none where it has not been made."""
    if not (ENVIRONMENT / "installed").exists():
        return {}
    code = "from importlib.metadata import distributions as d; print(*(f'{x.name}=={x.version}' for x in d()))"
    done = subprocess.run([ENVIRONMENT / "bin" / "python", "-c", code], capture_output=True, text=True, check=True)
    versions = dict(item.split("==") for item in done.stdout.split())
    return {name: versions[name] for name in ("jax", "jaxlib", "neural-tangents")}


def work(python: Path | str, script: str, *options: str | Path) -> Row:
    """Runs a worker; its report with its kernel, or the error that came instead."""
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+", encoding="utf-8") as log:
        command = [python, "-m", f"benchmarks.peers.{script}", *options, "--out", folder]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)
        error = watch(process)
        if not error and process.returncode:
            log.seek(0)
            error = last_line(log.read()) or f"exit status {process.returncode}"
        if error:
            return {"error": error}
        report: Row = json.loads((Path(folder) / "report.json").read_text(encoding="utf-8"))
        return report | {"kernel": np.load(Path(folder) / "kernel.npy")}


def watch(process: subprocess.Popen) -> str | None:
    """Waits for the process, and ends it where it passes a limit."""
    deadline = time.monotonic() + TIMEOUT
    try:
        while process.poll() is None:
            if time.monotonic() > deadline:
                return f"took more than {TIMEOUT:.0f} s"
            if resident(process.pid) > MEMORY:
                return f"took more than {MEMORY / 2**30:.0f} GiB"
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    return None


def resident(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def last_line(text: str) -> str:
    """The last line of a log that names an error, or its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line.split(":")[0]]
    return (named or lines or [""])[-1][:300]
