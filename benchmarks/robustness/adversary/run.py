"""Models that tangency's authors did not choose, against a plain autograd loop.

    RUN=benchmarks.robustness.adversary.run
    python -m $RUN --setup                    # once: makes .venv-adversary
    python -m $RUN                            # everything; benchmarks/results/adversary.json
    python -m $RUN --library timm --only vit  # some; prints, and writes nothing unless --out FILE
    python -m $RUN --build                    # only builds the models and calls them

Models run one after the other in worker processes, so that one which dies or hangs is recorded and the rest go on. A
PYTHONPATH with another tangency is honoured.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
ENVIRONMENT = ROOT / ".venv-adversary"
LIMIT = 120.0  # seconds for one model
START = 60.0  # and for a worker's imports
MEMORY = 16 << 30

Result = dict[str, Any]


def setup() -> None:
    """The environment: torch alone first, then the libraries without their dependencies, then tangency."""
    python = str(ENVIRONMENT / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", str(ENVIRONMENT)], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    constraints = str(ROOT / "constraints.txt")
    subprocess.run([*install, "-r", constraints], check=True)
    subprocess.run([*install, "--no-deps", "-r", str(HERE / "requirements.txt")], check=True)
    subprocess.run([*install, "-c", constraints, "-e", str(ROOT)], check=True)


def own_environment() -> None:
    """Go on in .venv-adversary if this is another Python."""
    if Path(sys.prefix).resolve() == ENVIRONMENT.resolve():
        return
    python = ENVIRONMENT / "bin" / "python"
    if not python.exists():
        sys.exit("no .venv-adversary; make it with: python -m benchmarks.robustness.adversary.run --setup")
    os.execv(python, [str(python), *sys.argv])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--setup", action="store_true", help="make the environment")
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--library", default="", help="models of this library")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes at a time")
    parser.add_argument("--no-time", action="store_true", help="leave the timing out")
    parser.add_argument("--build", action="store_true", help="only build the models and call them")
    parser.add_argument("--out", type=Path, help="where the results go")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", help="models by their full names")
    return parser.parse_args()


def work(o: argparse.Namespace) -> None:
    """A worker: one JSON line for each model, written when it is done."""
    import faulthandler
    import resource

    from benchmarks.robustness.adversary import catalogue

    if not o.build:
        # if tangency cannot be imported, it shows before the first model
        from benchmarks.robustness.adversary import checks  # noqa: F401

    faulthandler.enable()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    known = {e.name: e for e in catalogue.entries(o.library)}
    with o.worker.open("a", buffering=1, encoding="utf-8") as out:
        out.write("{}\n")  # imports are done
        for name in o.names:
            start = time.perf_counter()
            result = _built(known[name]) if o.build else _examined(known[name], not o.no_time)
            out.write(json.dumps(result | {"total_seconds": time.perf_counter() - start}) + "\n")


def _examined(entry: Any, timed: bool) -> Result:
    from benchmarks.robustness.adversary import checks

    return checks.examine(entry, timed)


def _built(entry: Any) -> Result:
    """Sizes of a model, and whether the entry is a fair one, without tangency."""
    from benchmarks.robustness.adversary.reference import call, mixing

    result: Result = {"name": entry.name, "library": entry.library, "verdict": "exact"}
    try:
        model, x = entry.build(double=True), entry.inputs(6, double=True)
        shape = call(model, x, entry.outputs).shape
        sizes = [p.numel() for p in model.parameters() if p.requires_grad]
        found = {"parameters": sum(sizes), "tensors": len(sizes), "outputs": shape[1]}
        result |= found | {"mixing": mixing(model, x, entry.outputs)}
    except Exception as e:
        result |= {"verdict": "faulty", "message": f"{type(e).__name__}: {' '.join(str(e).split())[:300]}"}
    return result


class Worker:
    """A process at work on a list of models, and the file in which its results appear."""

    def __init__(self, library: str, names: list[str], o: argparse.Namespace) -> None:
        self.library, self.left = library, list(names)
        self.file = Path(tempfile.mkstemp(suffix=".jsonl")[1])
        flags = [flag for flag, on in (("--no-time", o.no_time), ("--build", o.build)) if on]
        command = [
            sys.executable,
            "-m",
            "benchmarks.robustness.adversary.run",
            "--library",
            library,
            "--worker",
            str(self.file),
            *flags,
            *names,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self.process = subprocess.Popen(command, stdout=self.errors, stderr=self.errors, env=environment, cwd=ROOT)
        self.seen, self.since, self.over = 0, time.monotonic(), False

    def news(self) -> list[Result]:
        """Results since the last call; the last may say that the process died or was stopped."""
        code = self.process.poll()  # first: what a process wrote before it ended is read below
        lines = self.file.read_text(encoding="utf-8").split("\n")[:-1]
        found = [json.loads(line) for line in lines[self.seen :]]
        if found:
            self.seen, self.since = len(lines), time.monotonic()
        results = [r for r in found if r]
        self.left = self.left[len(results) :]
        late = time.monotonic() - self.since > (LIMIT if self.seen else START)
        self.over = not found and (code is not None or late)
        if self.over and self.left:
            self.process.kill()
            self.process.wait()
            said = f"the process ended with {code}: {self._tail()}" if code is not None else f"over {LIMIT:.0f} s"
            verdict = "timeout" if code is None else "died"
            lost, self.left = (self.left[:1], self.left[1:]) if self.seen else (self.left, [])  # its imports failed
            results += [{"name": n, "library": self.library, "verdict": verdict, "message": said} for n in lost]
        return results

    def _tail(self) -> str:
        """What the process said last; after a fault, where it was."""
        self.errors.seek(0)
        said = self.errors.read().strip()
        fault = said.rfind("Fatal Python error")
        lines = said[fault:].split("\n")[:5] if fault >= 0 else said.split("\n")[-2:]
        return " ".join(part.strip().rsplit("/", 1)[-1] for part in lines)[-400:]


def every(o: argparse.Namespace) -> list[Result]:
    """All chosen models, a few workers at a time; a worker that died is followed by another for what it left."""
    from benchmarks.robustness.adversary import catalogue

    waiting: list[tuple[str, list[str]]] = []
    for library in [o.library] if o.library else catalogue.LIBRARIES:
        names = [e.name for e in catalogue.entries(library, o.only) if not o.names or e.name in o.names]
        waiting += [(library, names)] if names else []
    results: list[Result] = []
    workers: list[Worker] = []
    while waiting or workers:
        while waiting and len(workers) < o.jobs:
            workers.append(Worker(*waiting.pop(0), o))
        time.sleep(0.1)
        for worker in list(workers):
            for result in worker.news():
                results.append(result)
                print(line(result), flush=True)
            if worker.over:
                workers.remove(worker)
                worker.file.unlink()
                if worker.left:
                    waiting.insert(0, (worker.library, worker.left))
    return results


def line(r: Result) -> str:
    """One model in one line."""
    seconds = r.get("seconds")
    times = f"{seconds['first']:6.2f} {seconds['second']:6.2f} {seconds['loop']:6.2f}" if seconds else " " * 20
    error = f"{r['error']:7.0e}" if r.get("error") is not None else " " * 7
    share = f"{100 * r['rule_entries']:4.0f}%" if "rule_entries" in r else " " * 5
    note = f"  {r.get('check', '')}: {' '.join(r['message'].split())[:150]}" if r.get("message") else ""
    mixed = f"  (mixing {r['mixing']:.0e})" if r.get("mixing", 0) > 1e-6 else ""
    size = f"{r.get('parameters', 0):9,d}"
    return f"{r['library']:12} {r['name']:32} {r['verdict']:8} {size} {share} {error} {times}{note}{mixed}"


def summary(results: list[Result]) -> Result:
    """Counts of verdicts, shares by rules, and the models that gain least over the loop."""
    timed = [r for r in results if "seconds" in r]
    ratios = sorted((r["seconds"]["loop"] / r["seconds"]["second"], r["name"]) for r in timed)
    first = sorted((r["seconds"]["loop"] / r["seconds"]["first"], r["name"]) for r in timed)
    ruled = [r for r in results if "rule_entries" in r]
    return {
        "models": len(results),
        "verdicts": _verdicts(results),
        "by_library": {k: _verdicts([r for r in results if r["library"] == k]) for k in _libraries(results)},
        "unexpected": [r["name"] for r in results if r["verdict"] != r.get("expected", "exact")],
        "all_by_rules": sum(not r["fallback"] for r in ruled),
        "mean_rule_tensors": sum(r["rule_tensors"] for r in ruled) / max(len(ruled), 1),
        "mean_rule_entries": sum(r["rule_entries"] for r in ruled) / max(len(ruled), 1),
        "median_gain": ratios[len(ratios) // 2][0] if ratios else None,
        "median_gain_first_call": first[len(first) // 2][0] if first else None,
        "least_gains": [{"name": name, "gain": gain} for gain, name in ratios[:15]],
    }


def _verdicts(results: list[Result]) -> dict[str, int]:
    return dict(Counter(r["verdict"] for r in results))


def _libraries(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(r["library"] for r in results))


def main() -> None:
    o = options()
    if o.setup:
        return setup()
    own_environment()
    if o.worker:
        return work(o)
    results = every(o)
    found = summary(results)
    print(json.dumps(found, indent=2))
    some = o.only or o.library or o.names or o.build or o.no_time
    out = o.out or (None if some else ROOT / "benchmarks" / "results" / "adversary.json")
    if out:
        save(found, results, out)


def save(found: Result, results: list[Result], out: Path) -> None:
    """With the environment, as the other benchmarks."""
    import torch

    from benchmarks import record

    torch.set_num_threads(1)
    command = "python -m benchmarks.robustness.adversary.run " + " ".join(sys.argv[1:])
    whole = {"source": source(), "summary": found, "models": [shortened(r) for r in results]}
    record.save(whole, out, command.strip())


def source() -> str:
    """Which tangency was examined: its commit, and whether it has been changed since."""
    import tangency

    command = ["git", "-C", str(Path(tangency.__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def shortened(result: Result) -> Result:
    """Long messages cut, and of the checks only those that did not pass."""
    checks = {k: c for k, c in result.get("checks", {}).items() if c["verdict"] != "exact"}
    cut = {name: c | {"message": c.get("message", "")[:300]} for name, c in checks.items()}
    return result | {"checks": cut, "message": result.get("message", "")[:300]}


if __name__ == "__main__":
    main()
