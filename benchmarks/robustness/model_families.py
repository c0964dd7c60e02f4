"""Tries `tg.infinite_ntk(model)` on model families as their libraries ship them, and writes the table of the docs.

    python -m benchmarks.robustness.model_families [--only NAME] [--seconds 120] [--jobs 1] [--no-write]

With --only the other rows stay as they were.

Needs torchvision, timm and transformers beside tangency; nothing is downloaded. Each family is read in a process of
its own with a time limit, in evaluation mode, for two samples: "read" is a kernel without draws, "drawn" one whose
expectations are drawn (with its relative standard error at samples=256), "refused" an error of tangency's, "slow" one
that took longer than the limit, "broken" anything else: a fault of ours, or of the model in this environment.
"""

import argparse
import json
import multiprocessing
import os
import re
import site
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}

import torch

import tangency as tg
from benchmarks.record import RESULTS, ROOT, save
from benchmarks.robustness.families import AFTERWARDS, FAMILIES, Family, stub_torchvision
from tangency.errors import TangencyError

PAGE = ROOT / "docs" / "model_families.md"
DRAWS = 256


def attempt(family: Family) -> dict[str, Any]:
    """One row: what became of a family."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    started = time.perf_counter()
    try:
        model, x = family.make().eval(), family.samples()
        with torch.no_grad():  # the model itself must run, or the row says nothing of tangency
            model(**x) if isinstance(x, dict) else model(*x) if isinstance(x, tuple) else model(x)
    except Exception as e:
        return {"outcome": "broken", "why": f"the model does not run here: {type(e).__name__}: {e}"[:300]}
    try:
        row = _kernel(model, x)
    except TangencyError as e:
        row = {"outcome": "refused", "why": _first_sentence(str(e)), "whole": _short(str(e))}
    except Exception as e:
        row = {"outcome": "broken", "why": f"{type(e).__name__}: {e}"[:300]}
    return row | {"seconds": round(time.perf_counter() - started, 1)}


def _kernel(model: torch.nn.Module, x: Any) -> dict[str, Any]:
    kernel = tg.infinite_ntk(model, samples=DRAWS)
    value = kernel(x)
    if not bool(value.isfinite().all()):
        return {"outcome": "broken", "why": "the kernel is not finite"}
    # Two seeds: what is drawn differs, what is not stays.
    error = float(kernel.error(x, repeats=2).max() / value.abs().max())
    if error == 0:
        return {"outcome": "read", "why": ""}
    return {"outcome": "drawn", "why": f"±{100 * error:.2g} % at samples={DRAWS}"}


def _short(message: str) -> str:
    """A message without where this machine keeps its packages."""
    for folder in (*site.getsitepackages(), str(ROOT)):
        message = message.replace(f"{folder}/", "")
    return re.sub(r"/\S*?/site-packages/", "", message)


def _first_sentence(message: str) -> str:
    """What is refused, without the way out: up to the first full stop that ends a sentence."""
    short = _short(message)
    end = re.search(r"(?<=[a-z)’'\"\]0-9])\. (?=[A-Z])", short)
    return short[: end.start() + 1] if end else short


def _work(family: Family, pipe: Connection) -> None:
    pipe.send(attempt(family))


def tried(families: list[Family], seconds: float, jobs: int) -> Iterator[tuple[Family, dict[str, Any]]]:
    """Every family in a process forked from this one, which has the libraries loaded."""
    context = multiprocessing.get_context("fork")
    waiting = list(families)
    running: list[tuple[Family, Any, Connection, float]] = []
    while waiting or running:
        while waiting and len(running) < jobs:
            family = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(family, theirs), daemon=True)
            process.start()
            theirs.close()
            running.append((family, process, ours, time.monotonic()))
        for entry in list(running):
            family, process, ours, began = entry
            if ours.poll(0.05):
                try:
                    row = ours.recv()
                except EOFError:
                    row = {"outcome": "broken", "why": "the process died"}
            elif time.monotonic() - began > seconds:
                process.kill()
                row = {"outcome": "slow", "why": f"longer than {seconds:g} s"}
            else:
                continue
            process.join()
            running.remove(entry)
            yield family, row


def page(rows: list[dict[str, Any]]) -> str:
    """The table, as the docs have it."""
    counts = Counter(row["outcome"] for row in rows)
    first = [row["outcome"] in ("read", "drawn") for row in rows if row["family"] not in AFTERWARDS]
    share = 100 * (counts["read"] + counts["drawn"]) / len(rows)
    said = ", ".join(f"{counts[k]} {k}" for k in ("read", "drawn", "refused", "slow", "broken") if counts[k])
    lines = [
        "# Model families at infinite width",
        "",
        "What `tg.infinite_ntk(model)` makes of models as their libraries ship them: built from their",
        "configurations with random weights, small, in evaluation mode, for two samples each. Every row is executed by",
        "`python -m benchmarks.robustness.model_families`; figures: `benchmarks/results/model_families.json`.",
        "",
        f"Of {len(rows)} families {share:.0f} % have a kernel: {said}. *Read*: exact, up to rounding and quadrature.",
        "*Drawn*: expectations without a closed form are drawn; the standard error, relative to the largest entry, is",
        f"that at `samples={DRAWS}` and falls with more. *Refused*: the first sentence of the refusal; the rest",
        f"names a way out. Of the {len(first)} that were listed before a look at the outcomes {sum(first)} have a",
        f"kernel ({100 * sum(first) / len(first):.0f} %); the others were added, or given other options, since.",
        "",
        "| family | library | outcome | why |",
        "|---|---|---|---|",
    ]
    for row in rows:
        why = row["why"].replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")
        lines.append(f"| {row['family']} | {row['library']} | {row['outcome']} | {why} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try them all, print and write what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="families whose name contains this")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    stub_torchvision()
    for library in ("torchvision.models", "timm", "transformers"):
        __import__(library)
    families = [f for f in FAMILIES if options.only.lower() in f"{f.library} {f.name}".lower()]
    found: dict[int, dict[str, Any]] = {}
    for family, row in tried(families, options.seconds, options.jobs):
        found[families.index(family)] = {"family": family.name, "library": family.library, **row}
        print(json.dumps(found[families.index(family)]), flush=True)
    rows = [found[k] for k in sorted(found)]
    print(Counter(row["outcome"] for row in rows))
    if options.only:  # the others as they were
        stored = json.loads((RESULTS / "model_families.json").read_text(encoding="utf-8"))["families"]
        known = {(row["family"], row["library"]): row for row in (*stored, *rows)}
        rows = [known[key] for f in FAMILIES if (key := (f.name, f.library)) in known]
    if not options.no_write:
        save({"families": rows}, RESULTS / "model_families.json", "python -m benchmarks.robustness.model_families")
        Path(PAGE).write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
