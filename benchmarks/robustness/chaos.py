"""Tries to make Gram stores silently wrong: kills, races, deletions, swaps, edits, changed models, inputs, executors.

    python -m benchmarks.robustness.chaos [--seed 0] [--runs 3] [--minutes 8] [--out benchmarks/results/chaos.json]
    python -m benchmarks.robustness.chaos --repeat 0/kill/threads/2

Every run harms one small store (120 samples, 36 or 120 tiles) and then has quiet processes go on with it and read it.
It must end bit-equal to what a single quiet process computes, or refused with a TangencyError; another matrix, NaN, a
raw traceback, a hang or a store that is called complete and is not is a fault, and printed with its name. `--repeat
NAME` does one run again: the same harm, at the same file operation or forward pass of the process that is harmed.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import platform
import re
import shutil
import signal
import sys
import tempfile
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from random import Random
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}  # for workers

import numpy as np
import zarr

from benchmarks.record import RESULTS, save
from benchmarks.robustness import chaos_jobs
from benchmarks.robustness.chaos_jobs import CHANGES, HARMS, KERNELS, MEMORIES, ODD, Job, chunks, seals

os.environ["CHAOS_WARM"] = "1"  # the process that all others are forked from
FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["benchmarks.robustness.chaos_jobs"])
EXECUTORS = ("none", "threads", "processes", "workers")
CHEAP = EXECUTORS[:3]  # workers import torch anew, which takes seconds
STORES = [f"gram{memory}" for memory in MEMORIES]
OUTCOMES = ("equal", "warned", "refused", "fault")
LIMIT = 240.0  # seconds after which a process counts as hanging
KINDS: dict[str, tuple[Callable[["Case"], None], tuple[str, ...]]] = {}


def kind(name: str, executors: tuple[str, ...] = EXECUTORS) -> Callable[[Any], Any]:
    return lambda f: KINDS.setdefault(name, (f, executors))[0]


class Bench:
    """References and finished stores, made when they are first needed, each in a quiet process of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def made(self, kernel: str, tile: int, change: str = "", harm: str = "") -> Path:
        """A folder with answer.npy and two finished stores."""
        folder = self.folder / f"{kernel}-{tile}-{change}-{harm}".replace(" ", "_").replace("'", "")
        if not folder.exists():
            folder.mkdir()
            job = Job(kernel, tile, str(folder), "", answers=[str(folder / "answer.npy")], change=change, harm=harm)
            process = FORK.Process(target=chaos_jobs.reference, args=(job, str(folder / "gram")))
            process.start()
            process.join()
            if process.exitcode:
                raise SystemExit(f"no reference for {kernel}, {change}: see above")
        return folder

    def others(self, kernel: str, tile: int) -> Path:
        """A store of the same job and one of other weights."""
        folder = self.folder / f"others-{kernel}-{tile}".replace(" ", "_")
        if not folder.exists():
            shutil.copytree(self.made(kernel, tile, "weights") / STORES[0], folder / "stranger")
            shutil.copytree(self.made(kernel, tile) / STORES[1], folder / "twin")
        return folder


def children(process: Any) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{process.pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += [int(k) for k in path.read_text(encoding="utf-8").split()]
    return found


@dataclass
class Case:
    """One run: a store, what was done to it, and what each process said."""

    bench: Bench
    name: str  # seed/kind/executor/number
    folder: Path
    steps: list[dict[str, Any]] = field(default_factory=list)
    kills: int = 0
    strikes: int = 0  # harms of which it is known that their moment came

    def __post_init__(self) -> None:
        self.draw = Random(self.name)
        _, self.kind, self.executor, _ = self.name.split("/")
        self.kernel, self.tile = self.draw.choice(list(KERNELS)), self.draw.choice([8, 16])
        self.store = self.folder / "gram"
        self._started: list[Any] = []

    def job(self, **given: Any) -> Job:
        store, which = str(self.store), (self.kernel, self.tile)
        answers = [str(self.bench.made(*which, given.get("change", "")) / "answer.npy")]
        if given.get("how", "compute") != "compute" and self.kind.startswith(
            "move"
        ):  # another store in its place is whole too
            answers.append(str(self.bench.made(*which, "weights") / "answer.npy"))
        usual = {"store": store, "where": store, "answers": answers, "executor": self.executor}
        usual |= {"memory": self.draw.choice(MEMORIES), "others": str(self.bench.others(*which))}
        return Job(*which, str(self.folder), f"{self.name}/{len(self._started)}", **(usual | given))

    def start(self, barrier: Any = None, **given: Any) -> Any:
        here, there = FORK.Pipe(duplex=False)
        job = self.job(**given)
        process: Any = FORK.Process(target=chaos_jobs.run, args=(job, there, barrier))
        process.start()
        there.close()
        process.job, process.answer = job, here
        self._started.append(process)
        return process

    def end(self, process: Any, killed: bool = False) -> str:
        """Wait for its word. One that was killed need not say any."""
        found: tuple[str, str, list[str], int] | None = None
        if not wait([process.answer, process.sentinel], LIMIT):
            found = ("fault", f"hangs: no answer after {LIMIT:.0f} s", [], 0)
            process.kill()
        elif process.answer.poll():
            with contextlib.suppress(EOFError):
                found = process.answer.recv()
        process.join(10)  # pools that were broken may take a while
        if found is None and (killed or process.job.harm == "kill") and process.exitcode == -signal.SIGKILL:
            self.kills += 1
            return "killed"
        outcome, detail, told, struck = found or ("fault", f"it died with exit code {process.exitcode}", [], 0)
        self.strikes += struck
        usual, known = Job("", 0, "", ""), ("folder", "where", "answers", "others", "seed")
        about = {k: v for k, v in asdict(process.job).items() if k not in known and v != getattr(usual, k)}
        if outcome == "fault" and "another matrix" in detail and any("look different" in word for word in told):
            outcome = "warned"  # an attribute that no sample of the witness sees
        self.steps.append({"outcome": outcome, "detail": detail, "warned": told, "job": about})
        return outcome

    def several(self, most: int) -> Iterator[int]:
        """As many new stores, one after the other; fewer where starting takes longer."""
        for k in range(max(1, most // {"none": 1, "threads": 1, "processes": 2}.get(self.executor, most))):
            self.store = self.folder / f"gram{k}"
            yield k

    def do(self, **given: Any) -> str:
        return self.end(self.start(**given))

    def fault(self, detail: str) -> None:
        self.steps.append({"outcome": "fault", "detail": detail, "warned": [], "job": {}})

    def copy(self, partial: bool) -> None:
        """A finished store, or one with a third of its tiles."""
        shutil.copytree(self.bench.made(self.kernel, self.tile) / STORES[0], self.store)
        for chunk in chunks(self.store) if partial else []:
            if self.draw.random() < 0.67:
                for path in [chunk, *seals(self.store, chunk)]:
                    path.unlink()

    def settle(self, **given: Any) -> None:
        """A quiet process goes on with what is there; what it calls complete must be readable without it."""
        for store in [self.store, *self.folder.glob("away*")]:
            here = {"executor": self.draw.choice(CHEAP), "store": str(store)} | given
            if self.do(**here) == "equal" and self.do(**(here | {"how": "open"})) != "equal":
                self.fault(f"called complete, and cannot be read: {self.steps[-1]['detail']}")

    def moment(self, most: int = 250, passes: int = 0) -> tuple[str, int]:
        """A file operation or, of as many, a forward pass."""
        where = self.draw.choice(["file", "pass"]) if passes else "file"
        return where, self.draw.randint(1, most if where == "file" else passes)

    def clean(self) -> None:
        for process in self._started:
            process.kill()
            process.join()
        shutil.rmtree(self.folder, ignore_errors=True)

    def said(self, outcome: str) -> list[dict[str, Any]]:
        return [step for step in self.steps if step["outcome"] == outcome]

    @property
    def outcome(self) -> str:
        """The worst."""
        return max((s["outcome"] for s in self.steps), key=OUTCOMES.index, default="fault")


@kind("kill")
def kill(case: Case) -> None:
    """The computing process, again and again, at a file operation or at any time; another executor goes on."""
    case.tile = 8
    for _ in range(4 if case.executor == "workers" else 13):
        who = case.draw.choice([case.executor, case.executor, *CHEAP])
        if case.draw.random() < 0.6:
            case.do(executor=who, harm="kill", moment=case.moment(80))
            continue
        there, begun = len(chunks(case.store)), time.monotonic()
        process = case.start(executor=who, pause=0.01)
        while process.is_alive() and len(chunks(case.store)) <= there and time.monotonic() < begun + LIMIT:
            time.sleep(0.001)
        time.sleep(case.draw.uniform(0, 0.05))
        process.kill()
        case.end(process, killed=True)
    case.settle()


@kind("kill of workers", ("processes", "workers"))
def kill_workers(case: Case) -> None:
    process = case.start(pause=0.02)
    for _ in range(case.draw.randint(1, 4)):
        end = time.monotonic() + 30
        while process.is_alive() and not children(process) and time.monotonic() < end:
            time.sleep(0.002)
        time.sleep(case.draw.uniform(0, 0.3 if case.executor == "processes" else 3))
        for pid in children(process)[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                case.kills += 1
    case.end(process)
    case.settle()


@kind("Ctrl-C")
def interrupt(case: Case) -> None:
    case.do(harm="interrupt", moment=case.moment(250, 45))
    case.settle()


@kind("disk error")
def disk_error(case: Case) -> None:
    how = case.draw.choice(["compute", "compute", "open", "product"])
    if how != "compute":
        case.copy(partial=False)
    case.do(harm="disk error", how=how, moment=case.moment(150))
    case.settle()


def race(what: str, *changes: str) -> None:
    """Processes that begin the same new store at once, with models that may differ; then each goes on alone."""

    @kind(f"race, {what}")
    def begin(case: Case) -> None:
        chosen = ["", *(case.draw.choice(changes) for _ in range(case.draw.randint(1, 2)))]
        barrier = FORK.Barrier(len(chosen))
        for process in [case.start(barrier, change=c, pause=0.001) for c in chosen]:
            case.end(process)
        for change in sorted(set(chosen)):
            case.settle(change=change)


race("same model", "")
race("other weights", "weights")
race("other code", "forward", "attribute", "hook", "global", "lambda attribute")


@kind("writers")
def writers(case: Case) -> None:
    """Several processes on one store, one of them killed."""
    case.copy(partial=True)
    many = [case.start(executor=e, pause=0.002) for e in [case.executor, *case.draw.sample(CHEAP, 2)]]
    if case.draw.random() < 0.5:
        time.sleep(case.draw.uniform(0.1, 0.5))
        many[-1].kill()
    for process in many:
        case.end(process, killed=process is many[-1])
    case.settle()


def harmed(what: str) -> None:
    """The three times at which the files of a store are harmed."""

    @kind(f"{what}, computing")
    def computing(case: Case) -> None:
        if case.draw.random() < 0.5:
            case.copy(partial=True)
        case.do(harm=what, moment=case.moment(250))
        case.settle()

    @kind(f"{what}, at rest")
    def at_rest(case: Case) -> None:
        for _ in case.several(2):
            case.copy(partial=case.draw.random() < 0.5)
            chaos_jobs.harm(what, case.job(), case.draw)
            case.strikes += 1
            case.do(how=case.draw.choice(["compute", "compute", "open", "product", "verify"]))
            case.settle()

    @kind(f"{what}, reading", ("none", "threads"))
    def reading(case: Case) -> None:
        case.copy(partial=False)
        case.do(how=case.draw.choice(["compute", "open", "product"]), harm=what, moment=case.moment(100))
        case.settle()


for what in HARMS:
    harmed(what)


def stray(case: Case) -> None:
    """One store, in one place."""
    found = {p.resolve().parent for p in case.folder.rglob("zarr.json")}
    if found - {case.store.resolve()}:
        case.fault(f"there are stores at {sorted(map(str, found))}, and there was to be one at {case.store}")


@kind("chdir")
def chdir(case: Case) -> None:
    (elsewhere := case.folder / "elsewhere").mkdir()
    given = case.draw.choice(["gram", "./gram", "elsewhere/../gram"])
    case.do(store=given, harm="chdir", moment=case.moment(250, 45), others=str(elsewhere))
    stray(case)
    case.settle()


@kind("spelled paths")
def spelled(case: Case) -> None:
    """One store by many names: begun under one, killed, gone on with under the next."""
    case.store = case.folder / case.draw.choice(["gram", "my gram #1 ü%41", "a:b"])
    (case.folder / "link").symlink_to(case.store)
    quoted, name = urllib.parse.quote(str(case.store)), case.store.name
    forms = [case.store, f"./{name}", f"~/{name}", f"{case.store}/", f"{case.folder}/../{case.folder.name}/{name}"]
    forms += [f"file://{quoted}", f"file:{quoted}", f"file://localhost{quoted}", f"local://{case.store}"]
    forms += [str(case.folder / "link")]
    for given in case.draw.sample(forms, 2):
        case.do(store=given, harm="kill", moment=case.moment(100))
    case.do(store=case.draw.choice(forms))
    stray(case)
    case.settle()


def meanwhile(what: str, harm: str, other: tuple[str, str], ways: list[str]) -> None:
    """Something that counts is changed after it was hashed: all of the matrix must be that of before, or of after."""

    @kind(f"{what} changed meanwhile")
    def changed(case: Case) -> None:
        both = [str(case.bench.made(case.kernel, case.tile, *which) / "answer.npy") for which in ((), other)]
        for k in case.several(4):
            given = {"inputs": ways[k % len(ways)], "moment": case.moment(250, 45)}
            case.do(harm=harm, answers=both, pause=0.001, **given)
            case.settle()


meanwhile("inputs", "inputs", ("", "inputs"), ["tensor", "array", "memmap"])
meanwhile("model", "model", ("weights", ""), ["tensor"])


@kind("data sets that change")
def changed_items(case: Case) -> None:
    sets = ["augmenting", "collate drops", "collate repeats", "collate sorts"]
    case.draw.shuffle(sets)
    for k in case.several(4):
        case.do(inputs=sets[k])
        case.settle(inputs="items")


@kind("model changed between runs")
def changed_model(case: Case) -> None:
    case.tile = 16
    for _ in case.several(4):
        change = case.draw.choice([c for c in CHANGES if c])
        case.kernel = "head" if change == "head's global" else case.draw.choice(["trace", "full"])
        case.copy(partial=case.draw.random() < 0.5)
        case.do(change=change)
        case.settle()


@kind("changed before a tile is healed", ("none", "threads"))
def healing(case: Case) -> None:
    case.copy(partial=False)
    case.do(harm=f"healing after other {case.draw.choice(['inputs', 'model'])}")
    case.settle()


@kind("executors that lose or repeat", EXECUTORS[1:])
def odd_executors(case: Case) -> None:
    for _ in case.several(4):
        case.do(odd=case.draw.choice(ODD))
        case.settle()


def one(bench: Bench, name: str) -> Case:
    case = Case(bench, name, Path(tempfile.mkdtemp(dir=bench.folder.parent, prefix="case")))
    try:
        KINDS[case.kind][0](case)
    finally:
        case.clean()
    return case


def names(args: argparse.Namespace) -> list[str]:
    """Round by round, so that a run that is cut short has tried everything; workers, which are slow to start, once."""
    return [
        f"{args.seed}/{what}/{executor}/{k}"
        for k in range(args.runs)
        for what, (_, executors) in KINDS.items()
        for executor in executors
        if re.search(args.only, f"{what}/{executor}") and (executor != "workers" or k == 0)
    ]


def summary(seed: int, cases: list[Case]) -> dict[str, Any]:
    counts: dict[tuple[str, str], Counter[str]] = {}
    for case in cases:
        counts.setdefault((case.kind, case.executor), Counter())[case.outcome] += 1
    rows = [{"harm": k, "executor": e, **{o: c[o] for o in OUTCOMES}} for (k, e), c in counts.items()]
    why = Counter(step["detail"].partition(":")[0] for case in cases for step in case.said("refused"))
    return {
        "seed": seed,
        "runs": len(cases),
        **{o: sum(row[o] for row in rows) for o in OUTCOMES},
        "kills": sum(case.kills for case in cases),
        "other harms that struck": sum(case.strikes for case in cases),
        "refused with": dict(why),
        "counts": rows,
        "faults": [{"run": case.name, **step} for case in cases for step in case.said("fault")],
        "versions": {"numpy": np.__version__, "zarr": zarr.__version__, "system": platform.platform()},
    }


def table(rows: list[dict[str, Any]]) -> str:
    cells = {(row["harm"], row["executor"]): " / ".join(str(row[o]) for o in OUTCOMES) for row in rows}
    lines = [("equal / warned / refused / faults", *EXECUTORS)]
    lines += [(kind, *(cells.get((kind, e), "") for e in EXECUTORS)) for kind in dict.fromkeys(k for k, _ in cells)]
    return "\n".join(f"{line[0]:34}" + "".join(f"{cell:>16}" for cell in line[1:]) for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3, help="of each kind of harm and executor")
    parser.add_argument("--minutes", type=float, default=8.0, help="no run begins later")
    parser.add_argument("--only", default="", help="a regular expression of kind/executor")
    parser.add_argument("--repeat", help="one run, by its name")
    parser.add_argument("--out", type=Path, default=RESULTS / "chaos.json")
    args = parser.parse_args()
    todo, cases, begun = [args.repeat] if args.repeat else names(args), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="chaos") as folder:
        (Path(folder) / "bench").mkdir()
        bench = Bench(Path(folder) / "bench")
        for name in todo:
            if time.monotonic() - begun > 60 * args.minutes:
                break
            cases.append(one(bench, name))
            if args.repeat:
                print(json.dumps(cases[0].steps, indent=1))
            for step in cases[-1].said("fault"):
                print(f"FAULT in {name}: {step['detail']}\n  {step['job']}\n  warned: {step['warned']}", flush=True)
    result = summary(args.seed, cases) | {"seconds": round(time.monotonic() - begun), "planned": len(todo)}
    print(f"\n{table(result['counts'])}\n")
    print(", ".join(f"{name}: {value}" for name, value in result.items() if isinstance(value, int)))
    if not args.repeat:
        save(result, args.out, " ".join(["python -m benchmarks.robustness.chaos", *sys.argv[1:]]))
    return int(result["fault"] > 0)


if __name__ == "__main__":
    sys.exit(main())
