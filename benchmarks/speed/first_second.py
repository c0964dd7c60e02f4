"""What one waits for before anything is computed: imports, `tangency --help`, a mistyped word, a first kernel.

git worktree add /tmp/before COMMIT
python -m benchmarks.speed.first_second [/tmp/before/src] [--rounds 10] [--out FILE]

Every case in a process of its own, the cases in turn, so that a machine that slows down slows down all; medians of wall
seconds and CPU seconds (user + system) over the rounds, and the number of modules that a case imports.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from typing import NamedTuple

from benchmarks.record import RESULTS, ROOT, save

COMMAND = "import sys; sys.argv = ['tangency', *{words!r}]; import tangency_command; tangency_command.main()"
KERNEL = "k = tangency.trace_ntk(torch.nn.Sequential(torch.nn.Linear(3, 2))); k(torch.zeros(4, 3))"
CASES = {
    "python": "pass",
    "import torch": "import torch",
    "import tangency": "import tangency",
    "import torch, tangency": "import torch, tangency",
    "import torch, tangency; a first kernel": f"import torch, tangency; {KERNEL}",
    "tangency --help": COMMAND.format(words=["--help"]),
    "tangency explian": COMMAND.format(words=["explian"]),
}


class Run(NamedTuple):
    """One process."""

    wall: float
    cpu: float


def run(code: str, tree: Path) -> Run:
    """Both kinds of seconds."""
    before, begin = cpu_seconds(), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment(tree), capture_output=True, check=False)
    return Run(time.perf_counter() - begin, cpu_seconds() - before)


def cpu_seconds() -> float:
    """Of all processes that have ended, user and system."""
    used = getrusage(RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def environment(tree: Path) -> dict[str, str]:
    """Where this tree is the one that is imported; one thread."""
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def modules(code: str, tree: Path) -> int:
    """How many are imported, counted by Python itself, those that every process imports among them."""
    command = [sys.executable, "-X", "importtime", "-c", code]
    done = subprocess.run(command, env=environment(tree), capture_output=True, text=True, encoding="utf-8", check=False)
    return done.stderr.count("import time:") - 1  # its heading


def measured(trees: dict[str, Path], rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """By tree and case. A first round warms the file system and the compiled modules, and is not counted."""
    every = list(product(trees, CASES))
    seconds: dict[tuple[str, str], list[Run]] = {key: [] for key in every}
    for turn in range(rounds + 1):
        for tree, case in every:
            found = run(CASES[case], trees[tree])
            seconds[tree, case] += [found] if turn else []
    table: dict[str, dict[str, dict[str, float]]] = {}
    for (tree, case), runs in seconds.items():
        table.setdefault(tree, {})[case] = {
            "wall seconds": round(statistics.median(r.wall for r in runs), 3),
            "CPU seconds": round(statistics.median(r.cpu for r in runs), 3),
            "modules": modules(CASES[case], trees[tree]),
        }
    return table


def above_torch(cases: dict[str, dict[str, float]]) -> float:
    """CPU seconds of `import torch, tangency` less those of `import torch`."""
    return round(cases["import torch, tangency"]["CPU seconds"] - cases["import torch"]["CPU seconds"], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="the src of an older checkout")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=RESULTS / "first_second.json")
    args = parser.parse_args()
    trees = {"before": args.before} if args.before else {}
    trees |= {"now": ROOT / "src"}
    table = measured(trees, args.rounds)
    for tree, cases in table.items():
        for case, row in cases.items():
            print(f"{tree:7} {case:42} {row['wall seconds']:7.3f} s {row['CPU seconds']:7.3f} s {row['modules']:6}")
        print(f"{tree:7} tangency above torch: {above_torch(cases)} CPU seconds")
    facts = {"rounds": args.rounds, "above torch": {tree: above_torch(cases) for tree, cases in table.items()}}
    save(facts | {"cases": table}, args.out, "python -m benchmarks.speed.first_second BEFORE/src")


if __name__ == "__main__":
    main()
