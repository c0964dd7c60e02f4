"""Tries to lose or misread what is the user's, at random: each part is a file of this folder.

    python -m benchmarks.robustness.attack [PART …] [--quick] [--seed 0] [--out benchmarks/results/attack.json]

A case ends well ("done", "refused") or is a fault: "lost" (a file of the user's is gone or another), "half" (a file is
not whole), "left" (something was written where nothing was done), "raw" (an error that is not ours), "wrong" (taken,
and not what was said), "shown" (a terminal escape or a mark of direction reached the terminal), "hang". Exit 1 with a
fault.
"""

import argparse
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.record import RESULTS, save

from . import commands, decisions, disks, kills
from .cases import FAULTS, Case

# How many cases, in full and with --quick. `disks` and `kills`: of each kind of file.
PARTS = {
    "commands": (commands.attack, 1000, 24),
    "decisions": (decisions.attack, 400, 60),
    "kills": (kills.attack, 100, 3),
    "disks": (disks.attack, 40, 3),
}


def spent() -> float:
    """Processor seconds of this process and those that it started."""
    return sum(os.times()[:4])


def run(names: list[str], quick: bool, seed: int) -> tuple[dict[str, Any], list[Case]]:
    """Attack with these parts; counts by part and outcome, and the cases that are faults."""
    result: dict[str, Any] = {}
    bad: list[Case] = []
    for name in names:
        attack, count, few = PARTS[name]
        begin = spent()
        with tempfile.TemporaryDirectory(prefix="attack-") as folder:
            found = attack(Path(folder), few if quick else count, Random(f"{seed} {name}"))
        tally = Counter(case.outcome for case in found)
        kinds = {k: dict(Counter(c.outcome for c in found if c.kind == k)) for k in sorted({c.kind for c in found})}
        seconds = round(spent() - begin, 1)
        result[name] = {"cases": len(found), "outcomes": dict(tally), "kinds": kinds, "cpu_seconds": seconds}
        bad += [case for case in found if case.outcome in FAULTS]
    return result, bad


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "attack.json")
    args = parser.parse_args()
    result, bad = run(args.parts or list(PARTS), args.quick, args.seed)
    for name, part in result.items():
        print(f"{name}: {part['cases']} cases, {part['outcomes']}, {part['cpu_seconds']} CPU s")
    for case in bad:
        print(f"{case.outcome}: {case.kind}: {case.name}\n    {case.said[:500]}")
    if not args.quick:
        faults = [{"part": c.kind, "case": c.name, "outcome": c.outcome, "said": c.said[:500]} for c in bad]
        command = f"python -m benchmarks.robustness.attack {' '.join(args.parts)} --seed {args.seed}".replace("  ", " ")
        save({"parts": result, "faults": faults}, args.out, command)
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
