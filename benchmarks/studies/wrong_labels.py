"""Finding wrong labels: `tg.audit` beside loss, margin, neighbours, AUM, TracIn, cross-validation and cleanlab.

    python -m benchmarks.studies.wrong_labels --data /work/data --shared /work/shared/data
    python -m benchmarks.studies.wrong_labels … --sets digits,fashion --seeds 3 --rows 4000 --coverage 200
    python -m benchmarks.studies.wrong_labels … --quick      # two small sets, one seed: about two minutes
    python -m benchmarks.studies.wrong_labels … --summary    # measure nothing: the table and picture of what there is

Data: DIR of shared/tools/fetch_data (cifar10, fashion, uci, minilm, newsgroups), and sentiment140 in --shared; digits
come with scikit-learn. cleanlab gets an environment of its own (.venv-cleanlab, made at first use).

A cell is a set, a kind of noise (symmetric; pair: to the next class; instance: drawn by how unsure an independent weak
classifier is, to its runner-up), a rate and a seed. In each a network is trained until it has fitted every label
(nearly, where equal samples have two), and looked at three times: early (a tenth of the epochs), middle (half of the
wrong labels fitted) and memorised. Every method ranks the labels from that one training; cross-validation and cleanlab
from four more, just as long. Told: AUROC, average precision, precision at the true number; what `tg.audit` chose and
warned of; whether its 90 % interval of the noise rate has the truth in it, with a clean test set and without; how good
its probabilities are. --coverage adds many cheap cells (300 samples, one training) for the last. Finished cells are
kept in runs/wrong_labels/cells.jsonl and not measured again. Writes results/wrong_labels.json and
docs/assets/wrong_labels.png.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tangency as tg
from benchmarks.record import RESULTS, ROOT, save
from benchmarks.studies import wrong_labels_data as data
from benchmarks.studies import wrong_labels_methods as methods
from benchmarks.studies import wrong_labels_summary as summary
from benchmarks.studies.wrong_labels_data import CACHE, KINDS, RATES, Folders, Problem
from tangency.auditing.labels import Found, NoiseRate, estimate_noise
from tangency.auditing.mixture import Kinds

Cell = dict[str, Any]
# Sets and training samples of the cheap cells, which have a seed of their own each.
COVERED, COVERED_ROWS, COVERED_SEEDS = ("digits", "vehicle", "satimage", "dermatology"), 300, 1000
BINS = 10
TWEETED = (3, 20)  # epochs of the head on the tweets: stopped early, and memorised


def judged(found: tg.auditing.Audit, wrong: Tensor) -> Cell:
    """What an audit says of how many labels are wrong, beside how many are."""
    s, rate = found.suspects, float(wrong.double().mean())
    # The same estimate, made without the mistakes on test samples.
    again = Found(s, Kinds(s.wrong, 0.0), s.suggested)
    alone = estimate_noise(again, len(found.train.classes), None, found.noise.blind)
    bins = (s.wrong * BINS).long().clamp_max(BINS - 1)
    called = s.wrong > 0.5
    return {
        "kernel": found.choice.kernel,
        "factor": round(found.choice.reg, 3),  # k(x, x) of a cosine is 1
        "with test": _interval(found.noise, rate),
        "without test": _interval(alone, rate),
        "brier": float((s.wrong - wrong.double()).square().mean()),
        "constant's brier": rate * (1 - rate),
        "bins": [
            [int((bins == b).sum()), float(s.wrong[bins == b].sum()), int(wrong[bins == b].sum())] for b in range(BINS)
        ],
        "called": _called(called, wrong),
        "warned": any("fits" in w for w in found.warnings),
        "warnings": len(found.warnings),
        "machine": found.facts.get("machine_test_accuracy"),
        "seconds": round(float(str(found.facts["seconds"])), 2),
    }


def _interval(noise: NoiseRate, rate: float) -> Cell:
    inside = noise.low <= rate <= noise.high
    return {"rate": noise.rate, "low": noise.low, "high": noise.high, "inside": inside}


def _called(called: Tensor, wrong: Tensor) -> list[float]:
    """How many labels are called wrong, and which part of them is, and which part of the wrong ones that is."""
    right = int((called & wrong).sum())
    return [int(called.sum()), right / max(int(called.sum()), 1), right / max(int(wrong.sum()), 1)]


def audited(p: Problem, model: torch.nn.Module, given: Tensor) -> tg.auditing.Audit:
    """`tg.audit` as anybody would call it."""
    return tg.audit(model, (p.x, given), (p.z, p.z_y), progress=False)


def prepared(key: Cell, folders: Folders) -> tuple[Problem, Tensor, Tensor, methods.Run, dict[str, int]]:
    """The problem of a cell, its labels, which of them are wrong, the training, and its stages."""
    p = data.problem(key["set"], folders, key["seed"], key["rows"])
    given = data.noisy(p, key["kind"], key["rate"], key["seed"])
    wrong = given != p.y
    run = methods.train(p, p.x, given, key["seed"])
    return p, given, wrong, run, methods.stages(run, given, wrong)


def facts(p: Problem, run: methods.Run, epoch: int, given: Tensor, wrong: Tensor) -> Cell:
    """Of the network at a stage."""
    logits, everything = run.logits[epoch - 1], torch.ones_like(wrong)
    return {
        "epoch": epoch,
        "fitted": methods.fitted_part(logits, given, everything),
        "fitted wrong": methods.fitted_part(logits, given, wrong) if bool(wrong.any()) else None,
        "test accuracy": float((methods.outputs(run.at(epoch), p.z).argmax(1) == p.z_y).double().mean()),
    }


def measure(key: Cell, folders: Folders, cleanlab: methods.Cleanlab) -> Cell:
    """All methods in one cell."""
    begin = time.perf_counter()
    p, given, wrong, run, epochs = prepared(key, folders)
    folds = methods.cross_validated(p, given, epochs, key["seed"])
    no_labels = {"inputs 20-NN": methods.neighbours_differ(methods.cosines(p.x), given)}
    fresh = tg.decisions.kernels(tg.models.initialized(p.make, seed=4000 + key["seed"]).eval(), ["trNTK"])["trNTK"]
    untrained = methods.left_out(fresh, p.x, given, p.classes)[1]
    no_labels["untrained NTK leave-one-out"] = untrained[1.0].suspicion
    known, found, kept = dict[int, Tensor](), dict[str, Cell](), dict[str, Any]()
    for stage, epoch in epochs.items():
        model = run.at(epoch)
        audit = audited(p, model, given)
        scores, tried = methods.of_kernels(model, p.x, given, p.classes)
        peers, issues = cleanlab.scores(given, folds[stage])
        scores |= methods.of_outputs(run, epoch, given) | methods.of_gradients(p, run, epoch, given, known) | peers
        scores |= {
            "tg.audit": -audit.suspects.margin,
            "NTK leave-one-out, reg × 3": tried["NTK × 3"].suspicion,
            "cross-validated margin": -methods.margins(folds[stage], given),
            **no_labels,
        }
        tried |= {f"untrained × {factor:g}": left for factor, left in untrained.items()}
        found[stage] = facts(p, run, epoch, given, wrong) | {
            "scores": {name: methods.measured(score, wrong) for name, score in scores.items()},
            "audit": judged(audit, wrong),
            "cleanlab called": _called(issues, wrong),
            "tried": {
                k: [left.loss, methods.measured(left.suspicion, wrong)[0], float((left.suspicion > 0).double().mean())]
                for k, left in tried.items()
            },
        }
        kept[stage] = {"wrong": audit.suspects.wrong.float()} | {k: v.suspicion.float() for k, v in tried.items()}
    folder = CACHE / "margins"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(kept | {"given": given, "truth": p.y}, folder / f"{'_'.join(str(v) for v in key.values())}.pt")
    return key | {
        "n": len(given), "m": len(p.z_y), "classes": p.classes, "truth": float(wrong.double().mean()),
        "stages": found, "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def cover(key: Cell, folders: Folders) -> Cell:
    """One training, and what audits say of the rate at its stages."""
    begin = time.perf_counter()
    p, given, wrong, run, epochs = prepared(key, folders)
    found = {
        stage: facts(p, run, epoch, given, wrong) | {"audit": judged(audited(p, run.at(epoch), given), wrong)}
        for stage, epoch in epochs.items()
    }
    return key | {
        "n": len(given), "m": len(p.z_y), "classes": p.classes, "truth": float(wrong.double().mean()),
        "stages": found, "seconds": round(time.perf_counter() - begin, 1),
    }  # fmt: skip


def tweeted(folders: Folders, epochs: int) -> Cell:
    """The 359 tweets, audited by a head that is trained on MiniLM's features."""
    texts, x, y = data.tweets(folders)
    x = (x - x.mean(0)) / x.std()
    model = tg.models.initialized(lambda: tg.models.mlp([x.shape[1], 64, 2]), seed=0)
    tg.models.fit(model, x, y, epochs=epochs, batch=32, lr=1e-3, optimizer="adam", progress=False)
    names = ["negative", "positive"]
    found = tg.audit(model, tg.datasets.Labelled(x, y, names, texts=texts), progress=False)
    s = found.suspects
    listed = [
        {
            "text": texts[i],
            "given": names[int(s.given[i])],
            "suggested": names[int(s.suggested[i])],
            "wrong": round(float(s.wrong[i]), 3),
            "margin": round(float(s.margin[i]), 3),
        }
        for i in s.order[:15].tolist()
    ]
    return {"tweets": len(texts), "epochs": epochs, "words": found.words(), "most suspicious": listed}


def keys(options: argparse.Namespace) -> Iterator[Cell]:
    """All cells that are asked for, the first seed of all sets first."""
    for seed in range(options.seeds):
        for name in options.sets:
            for kind in options.kinds:
                for rate in options.rates:
                    key = {"what": "cell", "set": name, "kind": kind, "rate": rate, "seed": seed}
                    yield key | {"rows": options.rows or data.SIZES[name]}
    for k in range(options.coverage):
        name, kind = COVERED[k % len(COVERED)], KINDS[(k // len(COVERED)) % len(KINDS)]
        rate = (0.0, *RATES)[(k // (len(COVERED) * len(KINDS))) % (1 + len(RATES))]
        key = {"what": "coverage", "set": name, "kind": kind, "rate": rate, "seed": COVERED_SEEDS + k}
        yield key | {"rows": COVERED_ROWS}


def same(cell: Cell) -> str:
    """What tells one cell from another."""
    return json.dumps([cell[name] for name in ("what", "set", "kind", "rate", "seed", "rows")])


def run_all(options: argparse.Namespace, folders: Folders, file: Path) -> list[Cell]:
    """Measure what is not there yet, until the time is up; all cells that are there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
    known, begin = {same(cell) for cell in done}, time.perf_counter()
    cleanlab: methods.Cleanlab | None = None
    for key in [] if options.summary else keys(options):
        if same(key) in known:
            continue
        if time.perf_counter() - begin > 60 * options.minutes:
            print("the time is up; the same command goes on from here", flush=True)
            break
        if key["what"] == "coverage":
            cell = cover(key, folders)
        else:
            cleanlab = cleanlab or methods.Cleanlab()
            cell = measure(key, folders, cleanlab) | {"cleanlab": cleanlab.version}
        done.append(cell)
        with open(file, "a", encoding="utf-8") as kept:
            kept.write(json.dumps(cell) + "\n")
        print(summary.line(cell), flush=True)
    return done


def arguments() -> argparse.Namespace:
    """What is to be measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--shared", type=Path, required=True)
    parser.add_argument("--sets", type=lambda s: s.split(","), default=list(data.SIZES))
    parser.add_argument("--kinds", type=lambda s: s.split(","), default=list(KINDS))
    parser.add_argument("--rates", type=lambda s: [float(v) for v in s.split(",")], default=list(RATES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="training samples of every set (default: a size that fits each)")
    parser.add_argument("--coverage", type=int, default=0, help="how many cheap cells for the coverage of intervals")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no cell after so many")
    parser.add_argument("--cells", default="cells", help="the file in runs/wrong_labels that keeps them")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--summary", action="store_true", help="only summarise the cells that are there")
    options = parser.parse_args()
    if options.quick:
        options.sets, options.seeds, options.rates, options.coverage = ["dermatology", "vehicle"], 1, [0.1, 0.4], 5
    return options


def main() -> None:
    """Measure, summarise, draw."""
    options = arguments()
    torch.set_num_threads(1)
    folders = Folders(options.data, options.shared)
    # Numbers of a quick look are not mixed with those of the whole.
    cells = run_all(options, folders, CACHE / f"{'quick' if options.quick else options.cells}.jsonl")
    result = summary.summarise(cells) | {f"tweets, {k} epochs": tweeted(folders, k) for k in TWEETED}
    print(summary.words(result))
    if options.quick or not result["cells"]:
        return
    command = "python -m benchmarks.studies.wrong_labels --data DIR --shared DIR --seeds 3 --coverage 180"
    save(result, RESULTS / "wrong_labels.json", command)
    summary.draw(result).savefig(ROOT / "docs" / "assets" / "wrong_labels.png", dpi=110)


if __name__ == "__main__":
    main()
