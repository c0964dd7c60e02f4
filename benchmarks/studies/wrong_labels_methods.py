"""Trainings with a record, and what each method says of each label, for benchmarks.studies.wrong_labels.

All scores are larger where a label is more suspicious. All but those of `cross_validated` come from one training: of
the network as it was at a stage, and those of AUM and TracIn from the epochs before it.
"""

import copy
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import tangency as tg
from benchmarks.record import ROOT
from benchmarks.studies.wrong_labels_data import Problem
from tangency.auditing.machine import GramMachine

STAGES = ("early", "middle", "memorised")
# Epochs at most, and after the first in which so many labels are fitted: equal samples with two labels never all are.
MOST, AFTER, NEARLY = 300, 20, 0.995
NEIGHBOURS, FOLDS, CHECKPOINTS = 20, 4, 3
FACTORS = (1.0, 3.0, 10.0, 30.0)  # regs of leave-one-out, times the mean diagonal
Scores = dict[str, Tensor]
State = dict[str, Tensor]


class Left(NamedTuple):
    """The leave-one-out loss of a kernel and reg, and less the margins [n]."""

    loss: float
    suspicion: Tensor


@dataclass
class Run:
    """One training: weights and outputs of the training samples after each epoch."""

    model: nn.Sequential
    states: list[State] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    def at(self, epoch: int) -> nn.Sequential:
        """The network as it was after so many epochs."""
        model = copy.deepcopy(self.model)
        model.load_state_dict(self.states[epoch - 1])
        return model.eval()


def train(p: Problem, x: Tensor, given: Tensor, seed: int, epochs: int | None = None, keep: Sequence[int] = ()) -> Run:
    """Adam at a constant rate without weight decay: for so many epochs, or until it has fitted all labels.

    Weights and outputs are kept after each epoch, or after those in `keep` alone (the others' places stay empty).
    """
    model = tg.models.initialized(p.make, seed=seed)
    assert isinstance(model, nn.Sequential)
    rule, run = torch.optim.Adam(model.parameters(), lr=p.lr), Run(model)
    g = torch.Generator().manual_seed(seed)
    end = epochs or MOST
    for epoch in range(1, MOST + 1):
        model.train()
        for some in torch.randperm(len(x), generator=g).split(p.batch):
            rule.zero_grad()
            F.cross_entropy(model(x[some]), given[some]).backward()
            rule.step()
        model.eval()
        if not keep or epoch in keep:
            run.states.append({k: v.clone() for k, v in model.state_dict().items()})
        else:
            run.states.append({})
        if epochs is None:
            run.logits.append(outputs(model, x))
            fitted = float((run.logits[-1].argmax(1) == given).double().mean())
            end = epoch if fitted == 1 else min(end, epoch + AFTER) if fitted >= NEARLY else end
        if epoch == end:
            break
    return run


def outputs(model: nn.Module, x: Tensor) -> Tensor:
    """Logits [n, c]."""
    with torch.no_grad():
        return torch.cat([model(part) for part in x.split(500)])


def stages(run: Run, given: Tensor, wrong: Tensor) -> dict[str, int]:
    """Epochs: a tenth of what memorising took; the first with half of the wrong labels fitted; that with the most."""
    everything = [fitted_part(z, given, torch.ones_like(wrong)) for z in run.logits]
    last = 1 + everything.index(max(everything))
    early = max(1, round(last / 10))
    of_wrong = [fitted_part(z, given, wrong) for z in run.logits]
    half = next((k + 1 for k, part in enumerate(of_wrong) if part >= 0.5), last)
    return {"early": early, "middle": min(max(half, early + 1), max(last - 1, 1)), "memorised": last}


def fitted_part(logits: Tensor, given: Tensor, some: Tensor) -> float:
    """The part of these labels that the network gives."""
    return float((logits.argmax(1) == given)[some].double().mean()) if bool(some.any()) else float("nan")


def margins(scores: Tensor, given: Tensor) -> Tensor:
    """The given class less the largest other."""
    others = scores.scatter(1, given[:, None], -torch.inf).amax(1)
    return scores.gather(1, given[:, None])[:, 0] - others


def of_outputs(run: Run, epoch: int, given: Tensor) -> Scores:
    """Loss and margin at this epoch, and the mean margin of the logits of all epochs up to it (AUM)."""
    logits = run.logits[epoch - 1].double()
    past = torch.stack([margins(z.double(), given) for z in run.logits[:epoch]])
    return {
        "loss": F.cross_entropy(logits, given, reduction="none"),
        "margin": -margins(logits.softmax(1), given),
        "AUM": -past.mean(0),
    }


def neighbours_differ(similarity: Tensor, given: Tensor) -> Tensor:
    """The part of the most similar others with another label, weighed by similarity."""
    similarity = similarity.clone().fill_diagonal_(-torch.inf)
    near = similarity.topk(min(NEIGHBOURS, len(given) - 1), 1)
    weight = (near.values - similarity.nan_to_num(neginf=1.0).min() + 1e-6).clamp_min(1e-6)
    return ((given[near.indices] != given[:, None]) * weight).sum(1) / weight.sum(1)


def cosines(features: Tensor) -> Tensor:
    """Of all pairs."""
    unit = F.normalize(features.flatten(1).double(), dim=1)
    return unit @ unit.T


def of_gradients(p: Problem, run: Run, epoch: int, given: Tensor, known: dict[int, Tensor]) -> Scores:
    """Self-influence ‖∇L‖² at this epoch, and its mean over checkpoints up to it (TracIn, one rate for all)."""
    at = sorted({max(1, round(epoch * k / CHECKPOINTS)) for k in range(1, CHECKPOINTS + 1)})
    for e in at:
        if e not in known:
            known[e] = self_influence(run.at(e), p.x, given)
    return {"self-influence": known[epoch], "TracIn": torch.stack([known[e] for e in at]).mean(0)}


def self_influence(model: nn.Module, x: Tensor, given: Tensor) -> Tensor:
    """The square of the length of each sample's gradient of the loss."""
    weights = {k: v.detach() for k, v in model.named_parameters()}

    def loss(w: State, one: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(model, w, (one[None],)), label[None])

    def square(w: State, one: Tensor, label: Tensor) -> Tensor:
        return sum((v.square().sum() for v in grad(loss)(w, one, label).values()), torch.zeros(()))

    return vmap(square, (None, 0, 0), chunk_size=100)(weights, x, given).double()


def left_out(kernel: tg.Kernel, x: Tensor, given: Tensor, classes: int) -> tuple[Tensor, dict[float, Left]]:
    """The Gram, and margins without each sample for each of the regs."""
    gram = tg.compute(kernel, x, progress=False)
    machine, targets = GramMachine(gram), F.one_hot(given, classes).double()
    found = {}
    for factor in FACTORS:
        left = machine.left_out(targets, factor * float(machine.squares.mean()))
        suspicion = -margins(left.predictions, given)
        found[factor] = Left(float(left.errors.square().mean()), suspicion)
    return gram[:].double(), found


def of_kernels(model: nn.Sequential, x: Tensor, given: Tensor, classes: int) -> tuple[Scores, dict[str, Left]]:
    """Leave-one-out margins of trNTK and CK, reg the mean diagonal; neighbours; and all regs."""
    made = tg.decisions.kernels(model, ["trNTK", "CK"])
    scores, tried = Scores(), dict[str, Left]()
    for name, title in (("trNTK", "NTK"), ("CK", "CK")):
        gram, found = left_out(made[name], x, given, classes)
        tried |= {f"{title} × {factor:g}": left for factor, left in found.items()}
        scores[f"{title} leave-one-out"] = found[1.0].suspicion
        if title == "NTK":
            scores["NTK 20-NN"] = neighbours_differ(gram, given)
    with torch.no_grad():
        scores["embedding 20-NN"] = neighbours_differ(cosines(model[:-1](x)), given)
    return scores, tried


def cross_validated(p: Problem, given: Tensor, epochs: dict[str, int], seed: int) -> dict[str, Tensor]:
    """Probabilities [n, c] at each stage, of networks that were trained without the sample, as long as the first."""
    order = torch.randperm(len(given), generator=torch.Generator().manual_seed(3000 + seed))
    found = {stage: torch.zeros(len(given), p.classes).double() for stage in epochs}
    for k, out in enumerate(order.tensor_split(FOLDS)):
        rest = torch.ones(len(given), dtype=torch.bool)
        rest[out] = False
        last, keep = max(epochs.values()), tuple(epochs.values())
        run = train(p, p.x[rest], given[rest], seed + 100 * (k + 1), last, keep)
        for stage, epoch in epochs.items():
            found[stage][out] = outputs(run.at(epoch), p.x[out]).double().softmax(1)
    return found


class Cleanlab:
    """cleanlab in its own environment, which the first use makes: one process for the whole benchmark."""

    def __init__(self) -> None:
        script = ROOT / "benchmarks" / "peers" / "run_cleanlab.py"
        self.process = subprocess.Popen(
            [cleanlab_python(), script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.version: str = self._read()["cleanlab"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def scores(self, given: Tensor, probabilities: Tensor) -> tuple[Scores, Tensor]:
        """Its quality scores; those with what it calls an issue first; and its issues. Refused: nothing is known."""
        assert self.process.stdin is not None
        asked = {"labels": given.tolist(), "probabilities": probabilities.tolist()}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        if "error" in answer:
            print("cleanlab:", answer["error"], file=sys.stderr, flush=True)
            nothing = torch.zeros(len(given))
            return {"cleanlab": nothing, "cleanlab issues": nothing}, nothing.bool()
        quality, issues = torch.tensor(answer["quality"]).double(), torch.tensor(answer["issues"]).bool()
        return {"cleanlab": -quality, "cleanlab issues": issues.double() - quality}, issues


def cleanlab_python() -> Path:
    """The Python of cleanlab's environment."""
    folder, wanted = ROOT / ".venv-cleanlab", ROOT / "benchmarks" / "peers" / "requirements-cleanlab.txt"
    python, mark = folder / "bin" / "python", folder / "installed"
    if not mark.exists() or mark.read_text(encoding="utf-8") != wanted.read_text(encoding="utf-8"):
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "-r", wanted], check=True)
        mark.write_text(wanted.read_text(encoding="utf-8"), encoding="utf-8")
    return python


def measured(score: Tensor, wrong: Tensor) -> list[float]:
    """AUROC, average precision, and the precision of the first as many as there are wrong ones."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    truth, values = wrong.numpy(), np.nan_to_num(score.numpy(), posinf=1e30, neginf=-1e30)
    count = int(wrong.sum())
    first = wrong[torch.tensor(values).argsort(descending=True, stable=True)[:count]]
    found = [roc_auc_score(truth, values), average_precision_score(truth, values), float(first.double().mean())]
    return [round(float(v), 5) for v in found]
