"""What the cells of benchmarks.studies.wrong_labels say together: tables, winners, coverage, calibration, a picture."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.studies.wrong_labels_data import KINDS, RATES
from benchmarks.studies.wrong_labels_methods import STAGES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Cell = dict[str, Any]
MEASURES = ("AUROC", "average precision", "precision at the true number")
# What each method needs, in trainings.
COSTS = {
    "tg.audit": "1", "NTK leave-one-out, reg × 3": "1", "NTK leave-one-out": "1", "CK leave-one-out": "1",
    "NTK 20-NN": "1", "embedding 20-NN": "1", "loss": "1", "margin": "1", "self-influence": "1",
    "TracIn": "1 + checkpoints", "AUM": "1 + every epoch", "cross-validated margin": "4", "cleanlab": "4",
    "cleanlab issues": "4", "inputs 20-NN": "0", "untrained NTK leave-one-out": "0",
}  # fmt: skip
# Two-sided 95 % of Student's t, by degrees of freedom.
T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776}


def line(cell: Cell) -> str:
    """One finished cell."""
    where = f"{cell['set']:12}{cell['kind']:10}{cell['rate']:.2f} seed {cell['seed']}"
    if cell["what"] == "coverage":
        inside = [s["audit"]["with test"]["inside"] for s in cell["stages"].values()]
        return f"{where}  inside {inside}  {cell['seconds']} s"
    parts = []
    for stage, s in cell["stages"].items():
        best = max(s["scores"], key=lambda name: s["scores"][name][0])
        parts.append(f"{stage} {s['scores']['tg.audit'][0]:.3f} ({best} {s['scores'][best][0]:.3f})")
    return f"{where}  {', '.join(parts)}  {cell['seconds']} s"


def summarise(cells: list[Cell]) -> Cell:
    """All figures."""
    grid = [c for c in cells if c["what"] == "cell"]
    return {
        "sizes": {name: sizes(grid, name) for name in dict.fromkeys(c["set"] for c in grid)},
        "cells": len(grid),
        "coverage cells": len(cells) - len(grid),
        "seconds": round(sum(c["seconds"] for c in cells)),
        "cleanlab": sorted({c["cleanlab"] for c in grid}),
        "costs in trainings": COSTS,
        "networks": networks(grid),
        "by stage": {stage: table(grid, stage) for stage in STAGES},
        "by stage and kind": split(grid, "kind", KINDS),
        "by stage and rate": split(grid, "rate", RATES),
        "by stage and set": split(grid, "set", dict.fromkeys(c["set"] for c in grid)),
        "winners": {stage: winners(grid, stage) for stage in STAGES},
        "winner of each cell": each_winner(grid),
        "mean ranks": {stage: ranks(grid, stage) for stage in STAGES},
        "choice": {stage: choices(grid, stage) for stage in STAGES},
        "coverage": coverage(cells),
        "calibration": {stage: calibration(cells, stage) for stage in STAGES},
        "called wrong": {stage: called(grid, stage) for stage in STAGES},
        "warned of memorising": {stage: mean(s["audit"]["warned"] for s in at(cells, stage)) for stage in STAGES},
    }  # fmt: skip


def split(grid: list[Cell], by: str, values: Iterable[object]) -> Cell:
    """A table for each stage and each value of a field."""
    names = {value: f"{value:.0%}" if isinstance(value, float) else str(value) for value in values}
    return {
        f"{stage}, {name}": table([c for c in grid if c[by] == value], stage)
        for stage in STAGES
        for value, name in names.items()
    }


def sizes(grid: list[Cell], name: str) -> Cell:
    """How large a set was, and which seeds there are."""
    own = [c for c in grid if c["set"] == name]
    return {
        "train": sorted({c["n"] for c in own}),
        "test": sorted({c["m"] for c in own}),
        "classes": own[0]["classes"],
        "seeds": sorted({c["seed"] for c in own}),
        "cells": len(own),
    }


def at(cells: Iterable[Cell], stage: str) -> list[Cell]:
    """The stage of each cell."""
    return [c["stages"][stage] for c in cells]


def mean(values: Iterable[float]) -> float | None:
    """Rounded; None of nothing."""
    found = list(values)
    return round(float(np.mean(found)), 4) if found else None


def networks(grid: list[Cell]) -> Cell:
    """How far the networks were at each stage."""
    return {
        stage: {
            "epochs": mean(s["epoch"] for s in at(grid, stage)),
            "labels fitted": mean(s["fitted"] for s in at(grid, stage)),
            "wrong labels fitted": mean(s["fitted wrong"] for s in at(grid, stage)),
            "test accuracy": mean(s["test accuracy"] for s in at(grid, stage)),
        }
        for stage in STAGES
    }


def table(chosen: list[Cell], stage: str) -> Cell:
    """Of each method the mean of each measure, with half the 95 % interval over seeds (each seed's mean of cells).

    Means are of all cells that there are, intervals of the cells that every seed has; of one seed there is none.
    """
    seeds = sorted({c["seed"] for c in chosen})
    of = {seed: [c for c in chosen if c["seed"] == seed] for seed in seeds}
    common = set.intersection(*({(c["set"], c["kind"], c["rate"]) for c in of[s]} for s in seeds)) if seeds else set()
    found: Cell = {}
    for name in COSTS:
        values = np.array([s["scores"][name] for s in at(chosen, stage)])
        if not len(values):
            continue
        means = np.array([
            np.mean([
                c["stages"][stage]["scores"][name] for c in of[s] if (c["set"], c["kind"], c["rate"]) in common
            ], axis=0)
            for s in seeds
        ]) if common else values[:1]  # fmt: skip
        half = T[len(means) - 1] * means.std(0, ddof=1) / math.sqrt(len(means)) if len(means) > 1 else [None] * 3
        found[name] = {
            m: [round(float(v), 4), None if h is None else round(float(h), 4)]
            for m, v, h in zip(MEASURES, values.mean(0), half, strict=True)
        }
    return found


def compared(stage: Cell) -> dict[str, float]:
    """AUROC of each method that is compared."""
    return {name: stage["scores"][name][0] for name in COSTS}


def of_one(scores: dict[str, float]) -> dict[str, float]:
    """Without those that need more than one training."""
    return {name: value for name, value in scores.items() if COSTS[name] != "4"}


def winners(grid: list[Cell], stage: str) -> Cell:
    """How many cells each method wins by AUROC: of all, and of those with one training; and ours beside cleanlab."""
    all_, one = dict[str, float](), dict[str, float]()
    for s in at(grid, stage):
        for found, scores in ((all_, compared(s)), (one, of_one(compared(s)))):
            best = [name for name, value in scores.items() if value == max(scores.values())]
            for name in best:  # equal ones share the cell
                found[name] = found.get(name, 0.0) + 1 / len(best)
    differences = {
        name: mean(compared(s)["tg.audit"] - compared(s)[name] for s in at(grid, stage))
        for name in COSTS
        if name != "tg.audit"
    }
    better = {
        name: mean(compared(s)["tg.audit"] > compared(s)[name] for s in at(grid, stage))
        for name in COSTS
        if name != "tg.audit"
    }
    return {
        "of all": falling(all_), "of one training": falling(one),
        "tg.audit's AUROC less": differences, "part of cells in which tg.audit is better than": better,
    }  # fmt: skip


def falling(counts: dict[str, float]) -> Cell:
    """The most frequent first."""
    return {name: round(count, 2) for name, count in sorted(counts.items(), key=lambda pair: -pair[1])}


def each_winner(grid: list[Cell]) -> list[str]:
    """The winner of each cell's mean over seeds, beside ours."""
    found = []
    for name, kind, rate in sorted({(c["set"], c["kind"], c["rate"]) for c in grid}):
        own = [c for c in grid if (c["set"], c["kind"], c["rate"]) == (name, kind, rate)]
        for stage in STAGES:
            means = {m: float(np.mean([compared(s)[m] for s in at(own, stage)])) for m in COSTS}
            best = max(means, key=lambda m: means[m])
            found.append(f"{name}, {kind} {rate:.0%}, {stage}: {best} {means[best]:.3f}, ours {means['tg.audit']:.3f}")
    return found


def ranks(grid: list[Cell], stage: str) -> Cell:
    """The mean place of each method, 1 the best; equal ones share theirs."""
    places: dict[str, list[float]] = {name: [] for name in COSTS}
    for s in at(grid, stage):
        scores = compared(s)
        for name, value in scores.items():
            above = sum(v > value for v in scores.values())
            places[name].append(above + (sum(v == value for v in scores.values()) + 1) / 2)
    return dict(sorted(((name, mean(p) or 0.0) for name, p in places.items()), key=lambda pair: pair[1]))


def choices(grid: list[Cell], stage: str) -> Cell:
    """What the audit's choice of kernel and reg costs beside each fixed choice, and beside the best of each cell."""
    own = at(grid, stage)
    taken = Counter(f"{s['audit']['kernel']} × {s['audit']['factor']:g}" for s in own)
    tried = list(own[0]["tried"]) if own else []
    fixed = {name: mean(s["tried"][name][1] for s in own) for name in tried}
    return {
        "taken": dict(taken.most_common()),
        "AUROC of the choice": mean(s["scores"]["tg.audit"][0] for s in own),
        "AUROC of each fixed one": fixed,
        "AUROC of the best in each cell": mean(max(v[1] for v in s["tried"].values()) for s in own),
    }


def coverage(cells: list[Cell]) -> Cell:
    """How often the true rate lies in the 90 % interval, how wide that is, and on which side it is missed."""
    found: Cell = {}
    names = dict.fromkeys(c["set"] for c in cells)
    groups = {"all": cells} | {kind: [c for c in cells if c["kind"] == kind] for kind in KINDS}
    groups |= {f"{rate:.0%}": [c for c in cells if c["rate"] == rate] for rate in (0.0, *RATES)}
    groups |= {name: [c for c in cells if c["set"] == name] for name in names}
    for name, chosen in groups.items():
        for how in ("with test", "without test"):
            for stage in STAGES:
                rows = [(c["truth"], c["stages"][stage]["audit"][how]) for c in chosen]
                found.setdefault(how, {}).setdefault(stage, {})[name] = {
                    "runs": len(rows),
                    "inside": mean(r["inside"] for _, r in rows),
                    "truth below": mean(t < r["low"] for t, r in rows),
                    "truth above": mean(t > r["high"] for t, r in rows),
                    "width": mean(r["high"] - r["low"] for _, r in rows),
                    "rate's error": mean(abs(r["rate"] - t) for t, r in rows),
                    "rate's bias": mean(r["rate"] - t for t, r in rows),
                }
    return found


def calibration(cells: list[Cell], stage: str) -> Cell:
    """Brier scores of `wrong`, that of the true rate for all, and how often labels of each probability are wrong."""
    own = [s["audit"] for s in at(cells, stage)]
    bins = np.array([s["bins"] for s in own]).sum(0) if own else np.zeros((0, 3))
    total = bins[:, 0].sum()
    gaps = [abs(said - true) for _, said, true in bins]
    return {
        "brier": mean(s["brier"] for s in own),
        "brier of the true rate": mean(s["constant's brier"] for s in own),
        "expected calibration error": round(float(sum(gaps) / total), 4) if total else None,
        "reliability (samples, said, true)": [
            [int(n), round(float(said / max(n, 1)), 3), round(float(true / max(n, 1)), 3)] for n, said, true in bins
        ],
    }


def called(grid: list[Cell], stage: str) -> Cell:
    """Labels that are called wrong, by `wrong` > 0.5 and by cleanlab's find_label_issues: precision, recall, F1."""
    found = {}
    for name, of in (("tg.audit", lambda s: s["audit"]["called"]), ("cleanlab", lambda s: s["cleanlab called"])):
        rows = [of(s) for s in at(grid, stage)]
        f1 = mean(2 * p * r / (p + r) if p + r else 0.0 for _, p, r in rows)
        found[name] = {"precision": mean(r[1] for r in rows), "recall": mean(r[2] for r in rows), "F1": f1}
    return found


def words(result: Cell) -> str:
    """The tables that are printed."""
    lines = [f"{result['cells']} cells, {result['coverage cells']} for coverage, {result['seconds']} s"]
    lines += [f"{name}: {size}" for name, size in result["sizes"].items()]
    lines += [f"{stage}: {n}" for stage, n in result["networks"].items()]
    columns = [f"{stage}, {kind}" for stage in STAGES for kind in KINDS]
    for measure in MEASURES[:2]:
        lines += ["", f"{measure:28}" + "".join(f"{c.replace('memorised', 'memo'):>18}" for c in columns)]
        for name in COSTS:
            cells = [result["by stage and kind"][c].get(name, {}).get(measure, [math.nan, None]) for c in columns]
            lines.append(f"{name:28}" + "".join(f"{_with_error(*cell):>18}" for cell in cells))
    lines += ["", f"{'mean rank':28}" + "".join(f"{stage:>12}" for stage in STAGES) + f"{'trainings':>18}"]
    for name in result["mean ranks"]["memorised"]:
        places = (result["mean ranks"][stage][name] for stage in STAGES)
        lines.append(f"{name:28}" + "".join(f"{place:12.2f}" for place in places) + f"{COSTS[name]:>18}")
    for stage in STAGES:
        lines.append(f"\n{stage}: winners {result['winners'][stage]['of all']}")
        lines.append(f"  called wrong {result['called wrong'][stage]}")
        lines.append(f"  choice {result['choice'][stage]}")
        lines.append(f"  warned of memorising {result['warned of memorising'][stage]}")
        for how in ("with test", "without test"):
            lines.append(f"  {how}: {result['coverage'][how][stage]['all']}")
        lines.append(f"  calibration {result['calibration'][stage]}")
    for name in [name for name in result if name.startswith("tweets")]:
        lines += ["", f"{name}: {result[name]['words']}"]
        for tweet in result[name]["most suspicious"]:
            lines.append(f"  {tweet['given']} → {tweet['suggested']} ({tweet['wrong']:.2f}): {tweet['text']}")
    return "\n".join(lines)


def _with_error(value: float, half: float | None) -> str:
    return f"{value:.3f}" if half is None else f"{value:.3f} ± {half:.3f}"


def draw(result: Cell) -> "Figure":
    """A figure: AUROC of each method at each stage, the coverage of the intervals, and reliability."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5), layout="constrained")
    left, middle, right = figure.subplots(1, 3, width_ratios=(1.5, 1, 1))
    colors = dict(zip(STAGES, ("#3b528b", "#21918c", "#d1495b"), strict=True))
    names = list(result["mean ranks"]["middle"])[::-1]
    for k, stage in enumerate(STAGES):
        rows = [result["by stage"][stage][name]["AUROC"] for name in names]
        places = np.arange(len(names)) + 0.22 * (1 - k)
        error = [half or 0.0 for _, half in rows]
        left.errorbar([v for v, _ in rows], places, xerr=error, fmt="o", ms=5, color=colors[stage], label=stage)
    left.set_yticks(range(len(names)), [f"{name}  ({COSTS[name].split()[0]})" for name in names])
    left.get_yticklabels()[names.index("tg.audit")].set_fontweight("bold")
    left.set(xlabel="AUROC, mean of all cells", title="Finding wrong labels (trainings needed)")
    left.legend(frameon=False, loc="upper left")
    for k, how in enumerate(("with test", "without test")):
        for j, stage in enumerate(STAGES):
            inside = result["coverage"][how][stage]["all"]["inside"]
            shade = 1.0 if how == "with test" else 0.5
            middle.bar(j + 0.4 * (k - 0.5), 100 * inside, 0.36, color=colors[stage], alpha=shade)
    middle.axhline(90, color="gray", lw=0.8, ls=":")
    middle.set_xticks(range(len(STAGES)), STAGES)
    title = "90 % intervals that hold the true rate\n(pale: without a clean test set)"
    middle.set(ylabel="%", ylim=(0, 100), title=title)
    right.plot([0, 1], [0, 1], color="gray", lw=0.8)
    for stage in STAGES:
        bins = [b for b in result["calibration"][stage]["reliability (samples, said, true)"] if b[0] >= 50]
        right.plot([b[1] for b in bins], [b[2] for b in bins], "o-", ms=4, lw=1.4, color=colors[stage])
    right.set(xlabel="probability said", ylabel="part that is wrong", title="suspects.wrong")
    for axis in (left, middle, right):
        axis.grid(alpha=0.25, lw=0.4)
    return figure
