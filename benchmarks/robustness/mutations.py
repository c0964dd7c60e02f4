"""How much the tests see: one small change of the code at a time, and whether a test notices.

    pip install coverage pytest-cov
    python -m benchmarks.robustness.mutations [--mutants 200] [--seed 34] [--jobs 2] [--rooms gram linalg]
    python -m benchmarks.robustness.mutations --drawn 5a15837 --commit main --known FILE

The mutants are drawn from the commit `--drawn` and made at `--commit` (both: HEAD) where their lines are still there,
so that two suites can be held against the same ones. The suite runs once under coverage (two or three times as long
as `make test`; kept in `--folder`), which says what tests run a line and how long they take. A mutant then gets the
tests that run its line, one case of every test function first, the shortest first, for at most `--limit` CPU-seconds:
in a fork of a process that has collected the suite, whose functions are given the changed code, so that most take a
second. What runs at import is judged from the import on. `--known` names an earlier result, whose test that caught a
mutant goes first. At last all tests that caught something run on the unchanged code, and what fails there is not
believed.

What a test in a process of its own runs is not seen: those of a room come last, and for a line that nothing else runs.
"""

import argparse
import ast
import bisect
import contextlib
import difflib
import functools
import gc
import importlib
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[2]
MARKS = "not slow and not gpu"
# Other rooms than its own whose tests are a room's too.
ALSO = {"engine": ["kernels"], "linalg": ["regress"], "decisions": ["surrogate"]}
ROOMS = ["engine", "kernels", "gram", "regress", "linalg", "spectra", "auditing", "decisions", "surrogate", "dynamics"]
ROOMS += ["distributions", "representations", "active", "projection", "datasets", "infinite", "studies"]
# These look at files, not at what the code does.
NOT_RUN = [f"tests/{name}.py" for name in ("test_architecture", "test_house_files", "test_packaging", "test_extras")]
FIRST = 4.0  # CPU-seconds of tests before those that lie in many files
MEMORY = 8 << 30
TOO_LATE, ANEW = 97, "not by a change of functions"
OUT = os.dup(1)  # pytest has the usual one
WARM = ["torch", "torch.fx.experimental.symbolic_shapes", "pytest", "hypothesis", "sklearn.linear_model", "scipy.stats"]
WARM += ["transformers", "zarr"]  # not beartype: tests/helpers/shape_checks.py is the first to import it
TIMES = """
import os, pytest
@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    before = sum(os.times()[:4])
    yield
    with open(os.path.join(os.path.dirname(__file__), f"{os.getpid()}.times"), "a", encoding="utf-8") as f:
        f.write(f"{sum(os.times()[:4]) - before:.3f}\\t{item.nodeid}\\n")
"""
PAIRS: list[tuple[type, type]] = [
    (ast.Lt, ast.LtE),
    (ast.Gt, ast.GtE),
    (ast.Eq, ast.NotEq),
    (ast.In, ast.NotIn),
    (ast.Is, ast.IsNot),
]
PAIRS += [(ast.Add, ast.Sub), (ast.Mult, ast.Div), (ast.And, ast.Or)]
SWAP: dict[type, type] = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
SWAP |= {ast.FloorDiv: ast.Mult, ast.USub: ast.UAdd}


@dataclass(frozen=True)
class Mutant:
    """One small change: where it is in the lines of a file (counted from 0, columns in bytes) and what stands there."""

    name: str
    room: str
    file: str  # from the root
    rows: tuple[int, int]
    columns: tuple[int, int]
    statement: range  # the lines, counted from 1, that run when it does
    called: bool  # inside a function, so that it does not run at import
    new: str

    def within(self, text: str) -> str:
        """The file with the change."""
        (a, b), (start, end), rows = self.rows, self.columns, text.splitlines(keepends=True)
        before = "".join(rows[:a]) + rows[a].encode()[:start].decode()
        return f"{before}({self.new}){rows[b].encode()[end:].decode()}" + "".join(rows[b + 1 :])

    def carried(self, was: str, now: str) -> "Mutant | None":
        """The same change in a later text of the file, where its lines are still there."""
        a, b = self.rows
        same = difflib.SequenceMatcher(None, was.splitlines(), now.splitlines(), autojunk=False)
        for block in same.get_matching_blocks():
            if block.a <= a and b < block.a + block.size:
                up = block.b - block.a
                moved = range(self.statement.start + up, self.statement.stop + up)
                return replace(self, rows=(a + up, b + up), statement=moved)
        return None


# What is changed


def places(tree: ast.AST) -> Iterator[Any]:
    """Comparisons, signs and operations, `and` and `or`, numbers."""
    for n in ast.walk(tree):
        if isinstance(n, ast.Compare) and type(n.ops[0]) in SWAP:
            yield n
        elif isinstance(n, ast.UnaryOp | ast.BinOp) and type(n.op) in SWAP:
            left = n.left if isinstance(n, ast.BinOp) else None
            if not (isinstance(left, ast.Constant) and isinstance(left.value, str)):  # texts that are put together
                yield n
        elif isinstance(n, ast.BoolOp) or (
            isinstance(n, ast.Constant) and type(n.value) in (int, float) and n.value != 0.5
        ):
            yield n


def changed(n: Any) -> str:
    """The place with its other operation, or its number one up (half as much again); the tree is changed with it."""
    if isinstance(n, ast.Compare):
        n.ops[0] = SWAP[type(n.ops[0])]()
    elif isinstance(n, ast.Constant):
        assert isinstance(n.value, int | float)
        n.value = n.value + 1 if isinstance(n.value, int) else n.value * 1.5
    else:
        n.op = SWAP[type(n.op)]()
    return ast.unparse(n)


def statement(tree: ast.AST, n: Any) -> range:
    """The lines that run when the place does: those of its statement, of `if` and the like only its own."""
    best: Any = n
    for s in ast.walk(tree):
        if isinstance(s, ast.stmt) and s.lineno <= n.lineno and n.end_lineno <= (s.end_lineno or 0):
            best = s if best is n or s.lineno >= best.lineno else best
    best = n if hasattr(best, "body") else best
    return range(best.lineno, best.end_lineno + 1)


def called(tree: ast.AST, n: Any) -> bool:
    """Whether a place stands in the body of a function."""
    for f in ast.walk(tree):
        if isinstance(f, ast.FunctionDef | ast.Lambda):
            body: Any = f.body if isinstance(f, ast.Lambda) else f.body[0]
            if (body.lineno, body.col_offset) <= (n.lineno, n.col_offset) and n.end_lineno <= (f.end_lineno or 0):
                return True
    return False


def draw(tree: Path, count: int, seed: int, rooms: list[str]) -> list[Mutant]:
    """Mutants of a source tree: a room, a file in it and a place in that, each drawn evenly; none twice."""
    rng, found = random.Random(seed), dict[str, Mutant]()
    while len(found) < count:
        room = rng.choice(rooms)
        names = [str(f.relative_to(tree)) for f in sorted((tree / "src" / "tangency" / room).rglob("*.py"))]
        name = rng.choice([f for f in names if not any(w in f for w in ("__init__", "pictures", "triton", "fused"))])
        text = (tree / name).read_text(encoding="utf-8")
        code = ast.parse(text)
        if not (where := list(places(code))):
            continue
        n = rng.choice(where)
        old, lines, inside = ast.get_source_segment(text, n), statement(code, n), called(code, n)
        new, rows, columns = changed(n), (n.lineno - 1, n.end_lineno - 1), (n.col_offset, n.end_col_offset)
        mutant = Mutant(f"{name}:{n.lineno} {old} -> {new}", room, name, rows, columns, lines, inside, new)
        with contextlib.suppress(SyntaxError):  # inside f-strings Python 3.11 does not know where it is
            if new != old and ast.dump(ast.parse(mutant.within(text))) == ast.dump(code):
                found.setdefault(mutant.name, mutant)
    return list(found.values())


# What runs it


@dataclass(frozen=True)
class Plan:
    """What tests a mutant gets, in which order, and whether its line runs when the package is imported."""

    mutant: Mutant
    tests: list[str]
    at_import: bool


@dataclass
class Map:
    """What tests run a line, and the CPU-seconds of each."""

    seconds: dict[str, float]
    data: Any  # coverage's
    tree: Path

    def __post_init__(self) -> None:
        self.seen = {c.rpartition("|")[0] for c in self.data.measured_contexts()}

    def plan(self, mutant: Mutant, limit: float, known: str = "") -> Plan:
        """The tests for a mutant, in the order in which they are tried, the known one first."""
        contexts = self.data.contexts_by_lineno(str(self.tree / mutant.file))
        here = {c for line in mutant.statement for c in contexts.get(line, ())}
        at_import, here = "" in here or not mutant.called, here - {""}
        if not here:  # what runs anything of the file
            here = {c for line in contexts for c in contexts[line]} - {""}
        run = {c.rpartition("|")[0] for c in here}
        # A fixture that several tests share has run in the first of them alone.
        shared = {c.partition("::")[0] for c in here if c.endswith("|setup")}
        folders = tuple(f"tests/{room}/" for room in [mutant.room, *ALSO.get(mutant.room, [])])
        beside = {t for t in self.seconds if t.partition("::")[0] in shared}
        elsewhere = {t for t in self.seconds.keys() - self.seen if t.startswith(folders)}
        room = set() if run else {t for t in self.seconds if t.startswith(folders)}
        order: dict[str, float] = {known: 0.0} if known in self.seconds else {}
        for test in itertools.chain(*(self.ordered(part) for part in (run, beside - run, elsewhere, room))):
            if test in self.seconds and test not in order:
                order[test] = self.seconds[test]
        spent = list(itertools.accumulate(order.values()))
        soon, late = bisect.bisect(spent, FIRST) + 1, bisect.bisect(spent, limit)
        names = list(order)
        return Plan(mutant, by_file(names[:soon]) + by_file(names[soon : max(soon, late)]), at_import)

    def ordered(self, tests: Collection[str]) -> list[str]:
        """One case of every function first, the shortest first."""
        rank, nth = dict[str, int](), Counter[str]()
        for test in sorted(tests, key=lambda t: (self.seconds.get(t, 0.0), t)):
            function = test.partition("[")[0]
            rank[test] = nth[function]
            nth[function] += 1
        return sorted(rank, key=lambda t: (rank[t], self.seconds.get(t, 0.0), t))


def by_file(tests: list[str]) -> list[str]:
    """Those of one file together: what a file's tests share is made once."""
    files = list(dict.fromkeys(test.partition("::")[0] for test in tests))
    return sorted(tests, key=lambda t: files.index(t.partition("::")[0]))


def environment(tree: Path) -> dict[str, str]:
    return {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def measured(tree: Path, folder: Path, jobs: int) -> Map:
    """Coverage of the suite by test; kept in the folder."""
    from coverage import CoverageData

    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "done").exists():
        (folder / "mutation_times.py").write_text(TIMES, encoding="utf-8")
        env = os.environ | environment(tree) | {"COVERAGE_FILE": str(folder / ".coverage")}
        env["PYTHONPATH"] += os.pathsep + str(folder)
        command = [sys.executable, "-m", "pytest", "-q", "-n", str(jobs), "--dist", "worksteal", "-m", MARKS]
        command += ["-p", "mutation_times", f"--cov={tree / 'src' / 'tangency'}", "--cov-context=test", "--cov-report="]
        command += ["-p", "no:cacheprovider", *(f"--ignore={name}" for name in ["tests/gpu", *NOT_RUN])]
        if subprocess.run(command, cwd=tree, env=env, check=False).returncode not in (0, 1):
            raise SystemExit("the suite did not run: see above")
        (folder / "done").touch()
    rows = [row.split("\t", 1) for f in folder.glob("*.times") for row in f.read_text(encoding="utf-8").splitlines()]
    data = CoverageData(str(folder / ".coverage"))
    data.read()
    return Map({test: float(seconds) for seconds, test in rows}, data, tree)


# Whether it is seen


class Suite:
    """A plugin of pytest that has collected tests and, in place of running them all, does the given work."""

    def __init__(self, work: Callable[["Suite"], object], said: Path) -> None:
        self.work, self.said = work, said
        self.tests: dict[str, Any] = {}
        self.functions: dict[str, list[types.FunctionType]] = {}

    def pytest_runtestloop(self, session: Any) -> bool:
        self.tests = {item.nodeid: item for item in session.items}
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.fails(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.fails(f"the import of {report.nodeid}")

    def fails(self, what: str) -> None:
        with self.said.open("a", encoding="utf-8") as f:
            f.write(what + "\n")

    def run(self, names: list[str], stop: bool = True) -> int:
        """The tests of these names in this order, up to the first that fails."""
        tests = [self.tests[name] for name in names if name in self.tests]
        for test, after in itertools.zip_longest(tests, tests[1:]):
            test.config.hook.pytest_runtest_protocol(item=test, nextitem=after)
            if stop and self.said.exists():
                break
        return 0

    def live(self, file: Path) -> list[types.FunctionType]:
        """The functions of a file that this process has."""
        if not self.functions:
            gc.unfreeze()  # tests/conftest.py freezes what is there, and that is not listed
            gc.collect()
            for thing in gc.get_objects():
                if type(thing) is types.FunctionType:  # isinstance would ask objects that warn
                    self.functions.setdefault(thing.__code__.co_filename, []).append(thing)
            gc.freeze()
        return self.functions.get(str(file), [])

    def change(self, file: Path, line: int) -> bool:
        """Give the functions of this process the code that now stands in the file; false if none is another."""
        module = next((m for m in list(sys.modules.values()) if getattr(m, "__file__", "") == str(file)), None)
        if module is None:  # whoever imports it reads the file
            return True
        assert module.__spec__ is not None
        new, count = codes(cast(Any, module.__spec__.loader).get_code(module.__name__)), 0
        for function in self.live(file):
            old = function.__code__
            twins = new.get((old.co_qualname, old.co_firstlineno), [])
            if old.co_firstlineno <= line and len(twins) == 1 and twins[0] != old:
                function.__code__, count = twins[0], count + 1
        return count > 0


def codes(code: types.CodeType) -> dict[tuple[str, int], list[types.CodeType]]:
    """All functions of a module's code by what they are called and where they begin."""
    found: dict[tuple[str, int], list[types.CodeType]] = {}
    inside = [code]
    for part in inside:
        found.setdefault((part.co_qualname, part.co_firstlineno), []).append(part)
        inside += [c for c in part.co_consts if isinstance(c, types.CodeType)]
    return found


def write(file: Path, text: str) -> None:
    """A file with a time of its own: Python's compiled files go by size and second."""
    stamp = file.stat().st_mtime + 2
    file.write_text(text, encoding="utf-8")
    os.utime(file, (stamp, stamp))


@contextlib.contextmanager
def written(mutant: Mutant, tree: Path) -> Iterator[Path]:
    """The mutant in its file, for processes that tests start."""
    file = tree / mutant.file
    original = file.read_text(encoding="utf-8")
    write(file, mutant.within(original))
    try:
        yield file
    finally:
        write(file, original)


def pytest_there(tree: Path, files: Iterable[str], suite: Suite) -> int:
    """pytest in this process, which is no other's, with its output in a file."""
    log = os.open(str(suite.said) + ".log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ |= environment(tree)
    os.chdir(tree)
    sys.path[:] = [str(tree / "src"), str(tree), *(p for p in sys.path if p not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")  # processes that tests start would import this file
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "-m", MARKS, f"--basetemp={suite.said}.tmp"]
    return int(pytest.main([*files, *options], plugins=[suite]))


def apart(work: Callable[[], int], seconds: float, said: Path) -> list[str]:
    """What fails of tests that run in a fork of this process and should take that many CPU-seconds."""
    said.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
            os._exit(work())
        except BaseException:
            traceback.print_exc()
            os._exit(99)
    used, deadline, began = 0.0, 30 + 4 * seconds, time.monotonic()
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        time.sleep(0.02)
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{child}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            used = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        if used > deadline or time.monotonic() - began > 20 * deadline:
            os.killpg(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it has left behind
    failed = said.read_text(encoding="utf-8").splitlines() if said.exists() else []
    if os.WIFSIGNALED(status):
        return [*failed, "no end" if os.WTERMSIG(status) == signal.SIGKILL else "a crash"]
    code = os.WEXITSTATUS(status)
    return failed or {0: [], 1: [], 4: ["the import"], 5: [], TOO_LATE: [ANEW]}[code]


class Worker:
    """Judges mutants in a copy of the tree, one after the other, and says what catches each."""

    def __init__(self, plans: list[Plan], cover: Map, tree: Path, answers: Path) -> None:
        self.plans, self.cover, self.tree, self.answers = plans, cover, tree, answers
        self.said = tree.with_suffix(".said")

    def work(self) -> None:
        """Functions first, in forks of a process that has collected the tests; then each from the import on."""
        functions = [plan for plan in self.plans if not plan.at_import]
        files = sorted({test.partition("::")[0] for plan in functions for test in plan.tests})
        if functions:
            child = os.fork()
            if child == 0:
                os._exit(pytest_there(self.tree, files, Suite(functools.partial(self.each, functions), self.said)))
            if os.waitpid(child, 0)[1]:
                raise SystemExit(f"the tests could not be collected: {self.said}.log")
        done = answered(self.answers)
        self.each([p for p in self.plans if p.at_import or done[p.mutant.name] == ANEW], None)

    def each(self, plans: list[Plan], suite: Suite | None) -> None:
        for plan in plans:
            self.judge(plan, suite)

    def judge(self, plan: Plan, suite: Suite | None) -> None:
        """Run the tests of one mutant, in a fork of the suite or of a process without one."""
        began, mutant, tests = time.monotonic(), plan.mutant, plan.tests
        with written(mutant, self.tree) as file:

            def run() -> int:
                if suite is None:
                    return alone(self.tree, tests, self.said)
                return suite.run(tests) if suite.change(file, mutant.rows[0] + 1) else TOO_LATE

            failed = apart(run, sum(self.cover.seconds[test] for test in tests), self.said) if tests else []
        by = failed[0] if failed else ""
        with self.answers.open("a", encoding="utf-8") as f:
            f.write(json.dumps([mutant.name, by]) + "\n")
        took = f"{time.monotonic() - began:5.1f} s {len(tests):4d} tests{' anew' * (suite is None)}"
        os.write(OUT, f"{took}  {mutant.name}  |  {by or 'NOT SEEN'}\n".encode())


def alone(tree: Path, tests: list[str], said: Path, stop: bool = True) -> int:
    """The given tests in this process, collected for them alone."""
    return pytest_there(
        tree, dict.fromkeys(t.partition("::")[0] for t in tests), Suite(lambda suite: suite.run(tests, stop), said)
    )


def answered(answers: Path) -> dict[str, str]:
    return dict(json.loads(row) for row in answers.read_text(encoding="utf-8").splitlines()) if answers.exists() else {}


def judge_all(plans: list[Plan], cover: Map, jobs: int, folder: Path) -> dict[str, str]:
    """What catches each mutant, by its name; shared out between processes, each with a copy of the tree."""
    answers, workers = folder / "answers.jsonl", []
    answers.unlink(missing_ok=True)
    for slot in range(jobs):
        copy = folder / f"tree{slot}"
        subprocess.run(["rm", "-rf", str(copy)], check=True)
        subprocess.run(["cp", "-r", str(cover.tree), str(copy)], check=True)
        if worker := os.fork():
            workers.append(worker)
            continue
        try:
            Worker(plans[slot::jobs], cover, copy, answers).work()
        except BaseException:
            os.write(OUT, traceback.format_exc().encode())
        os._exit(0)
    for worker in workers:
        os.waitpid(worker, 0)
    return answered(answers)


def fail_anyway(caught: dict[str, str], cover: Map, folder: Path) -> set[str]:
    """The tests that catch something and fail on the unchanged code too."""
    tests, said = sorted({by for by in caught.values() if by in cover.seconds}), folder / "control.said"
    work = functools.partial(alone, cover.tree, tests, said, stop=False)
    return set(apart(work, 10 * sum(cover.seconds[t] for t in tests), said)) if tests else set()


# The whole


def tree_of(name: str, folder: Path) -> Path:
    """A clone at a commit."""
    if not folder.exists():
        subprocess.run(["git", "clone", "-q", "--no-checkout", str(ROOT), str(folder)], check=True)
        subprocess.run(["git", "checkout", "-q", "--detach", name], cwd=folder, check=True)
    return folder


def commit(name: str) -> str:
    return subprocess.run(["git", "rev-parse", name], cwd=ROOT, check=True, capture_output=True, text=True).stdout[:10]


def later(mutants: list[Mutant], was: Path, now: Path) -> list[Mutant]:
    """Those of one tree in another; what is no longer there is said."""
    found = []
    for mutant in mutants:
        old, new = was / mutant.file, now / mutant.file
        if new.exists() and (kept := mutant.carried(old.read_text(encoding="utf-8"), new.read_text(encoding="utf-8"))):
            found.append(kept)
        else:
            print("no longer there:", mutant.name)
    return found


def report(mutants: list[Mutant], caught: dict[str, str]) -> dict[str, Any]:
    """Counts by room, and every mutant with what catches it."""
    rooms = defaultdict[str, list[int]](lambda: [0, 0])
    for mutant in mutants:
        rooms[mutant.room][0] += bool(caught[mutant.name])
        rooms[mutant.room][1] += 1
    total = sum(seen for seen, _ in rooms.values())
    return {
        "caught": total,
        "mutants": len(mutants),
        "caught_by_room": {room: f"{seen} of {drawn}" for room, (seen, drawn) in sorted(rooms.items())},
        "survivors": sorted(m.name for m in mutants if not caught[m.name]),
        "caught_by": {m.name: caught[m.name] for m in mutants if caught[m.name]},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=int, default=200)
    parser.add_argument("--seed", type=int, default=34)
    parser.add_argument("--rooms", nargs="+", choices=ROOMS, default=ROOMS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=25.0)
    parser.add_argument("--drawn", default="HEAD")
    parser.add_argument("--commit", default="HEAD")
    parser.add_argument("--known", type=Path)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    drawn, judged = commit(given.drawn), commit(given.commit)
    folder = given.folder or Path(tempfile.mkdtemp(prefix="mutations-"))
    was, tree = (tree_of(name, folder / name) for name in (drawn, judged))
    mutants = later(draw(was, given.mutants, given.seed, given.rooms), was, tree)
    cover = measured(tree, folder / "coverage", given.jobs)
    earlier = json.loads(given.known.read_text(encoding="utf-8")) if given.known else {}
    known = earlier.get("after", earlier).get("caught_by", {})
    plans = [cover.plan(mutant, given.limit, known.get(mutant.name, "")) for mutant in mutants]
    os.environ |= environment(tree)
    for name in WARM:
        importlib.import_module(name)
    caught = judge_all(plans, cover, given.jobs, folder)
    while wrong := fail_anyway(caught, cover, folder):
        os.write(OUT, f"fail on the unchanged code too: {sorted(wrong)}\n".encode())
        if not wrong <= cover.seconds.keys():
            raise SystemExit(f"see {folder}/control.said.log")
        again = [p for p in plans if caught[p.mutant.name] in wrong]
        again = [replace(p, tests=[t for t in p.tests if t not in wrong]) for p in again]
        caught |= judge_all(again, cover, given.jobs, folder)
    result = {"seed": given.seed, "drawn": drawn, "commit": judged, "limit": given.limit, **report(mutants, caught)}
    print(json.dumps({k: v for k, v in result.items() if k != "caught_by"}, indent=2))
    if given.out:
        given.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
