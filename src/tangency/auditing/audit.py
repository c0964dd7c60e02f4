"""An audit from what kernels say of the samples: put together here, each part in its file."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.progress import bar
from .._base.targets import Kind, read_targets
from .._base.types import Array, Inputs, Json, Numbers
from ..datasets import Labelled
from ..errors import InputError
from ..linalg.matrix import Matrix, between, square
from ..regress import LeftOut
from ..regress.groups import GroupLabels, checked_groups
from ..regress.leave_out import margins
from .choice import FACTORS, Choice, choose
from .cleaning import Cleaning, measure_cleaning
from .copies import NEIGHBOURS, Copies, around, digests, find_copies
from .data import Data, facts_of
from .labels import NoiseRate, Suspects, estimate_noise, suspect_labels
from .machine import GramMachine, Machine, Nearest, Seen
from .regions import COMPONENTS, Causes, Region, find_regions, neighbours_wrong
from .result import Audit
from .support import Support, support
from .targets import estimate_wrong_targets, leave_out_targets, suspect_targets
from .views import Views, neighbours_of

# With fewer samples there is nothing to compare with.
FEWEST = 10


def audit_gram(
    K: Matrix,
    labels: Numbers | Sequence[int] | Sequence[str],
    *,
    cross: Matrix | None = None,
    prior: Array | None = None,
    test_labels: Numbers | Sequence[int] | Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    targets: Kind | None = None,
    groups: GroupLabels = None,
    samples: int = 200,
    neighbours: int = 8,
    name: str = "K",
    progress: bool = True,
) -> Audit:
    """Which labels are wrong, by leave-one-out margins y_i − a_i / (K + reg)⁻¹_ii of a Gram matrix of any kernel.

    K [n, n] of the training samples, `labels` [n]: classes (integers from 0, booleans, names, categories), or real
    targets; floats that may be either need `targets`, "classes" or "real". With `cross` [m, n] of test samples, `prior`
    their k(z, z) [m] and `test_labels` also leaks, what is not supported, and what cleaning would do. The rest is as in
    `tg.audit`, which makes the Grams from a network.

    >>> x, y = torch.randn(60, 5), torch.arange(60) % 3
    >>> x[range(60), y] += 3
    >>> y[0] = 1  # wrong
    >>> found = audit_gram(x @ x.T, y, progress=False)
    >>> int(found.suspects.order[0])
    0
    """
    gram = square(K)
    if len(gram.shape) != 2:
        raise InputError(f"K has shape {tuple(gram.shape)}; needed: [n, n], one similarity for each pair of samples.")
    found = read_targets(labels, "labels", targets=targets, names=classes)
    y = found.values.cpu()  # what is said of samples lies there; machines take targets to their own
    classes = found.names if classes is None else classes
    given = [v is not None for v in (cross, prior, test_labels)]
    if any(given) and not all(given):
        raise InputError("give cross, prior and test_labels together (k(z, x), k(z, z) and labels), or none of them.")
    between_ = None if cross is None else between(cross)
    k_zz = None if prior is None else tree.numbers(prior, "prior")
    z = None
    if test_labels is not None:  # read as the others were
        z = read_targets(test_labels, "test_labels", targets=found.kind, names=found.names).values.cpu()
    if between_ is not None and k_zz is not None and z is not None:
        m = between_.shape[0]
        if between_.shape[1] != gram.shape[0] or k_zz.shape != (m,) or len(z) != m:
            raise InputError(
                f"cross has shape {tuple(between_.shape)}, prior {tuple(k_zz.shape)} and test_labels {tuple(z.shape)}; "
                f"needed: [m, {gram.shape[0]}], [m], [m]."
            )
    data = _data(gram.shape[0], y, z, classes)
    machine = GramMachine(gram, between_, k_zz)
    return examine({name: machine}, data, groups, samples, neighbours, progress, {})


def _data(n: int, y: Tensor, z: Tensor | None, classes: Sequence[str] | None) -> Data:
    """Samples known by their number alone."""
    if len(y) != n:
        raise InputError(f"labels has {len(y)} entries; K has {n} samples. Give one for each.")

    def number(k: int) -> Tensor:
        return torch.arange(k)  # not a row of a table, which a page would show

    if y.is_floating_point():
        checks.finite(y, "labels")
        one = Labelled(number(n), torch.zeros(n, dtype=torch.long), ("all",), name="train")
        other = (
            None
            if z is None
            else Labelled(number(len(z)), torch.zeros(len(z), dtype=torch.long), ("all",), name="test")
        )
        return Data(one, other, y.reshape(n, -1).double(), None if z is None else z.reshape(len(z), -1).double())
    names = [str(k) for k in range(int(y.max()) + 1)] if classes is None else classes
    test = None if z is None else Labelled(number(len(z)), z, names, name="test")
    return Data(Labelled(number(n), y, names, name="train"), test)


def examine(
    machines: Mapping[str, Machine],
    data: Data,
    groups: GroupLabels,
    samples: int,
    neighbours: int,
    progress: bool,
    facts: dict[str, Json],
    inputs: tuple[Inputs, Inputs | None] | None = None,
    views: Views | None = None,
    blind: Machine | None = None,
) -> Audit:
    """All parts of an audit, from machines that are there; `inputs`: what the network takes, to tell equal samples.

    `views`: features by which copies are told; without them, the chosen kernel's neighbours do. `blind`: a machine
    whose kernel has seen no label.
    """
    begin = time.perf_counter()
    n, k = len(data.train), min(NEIGHBOURS, len(data.train) - 1)
    check(data, samples, neighbours)
    labels = None if groups is None else checked_groups(groups, n, torch.device("cpu"))
    targets = data.numbers(data.given)
    total = None if data.real else len(machines) * len(FACTORS)
    with bar(total, "leave-one-out", "fit", show=progress) as step:
        if data.real:
            choice, left = leave_out_targets(machines, targets, labels, step)
        else:
            choice, left = choose(machines, targets, FACTORS, labels, step)
    machine = machines[choice.kernel]
    seen = machine.see(targets, choice.reg) if machine.m else None
    unseen = None if blind is None else blind.left_out(targets, float(blind.squares.mean()), labels)
    suspects, noise, evidence, unknown = _suspects(data, left, seen, unseen)
    near, near_test = neighbours_of(machine, k, progress)
    if views is None:
        copies, leaks = copies_of(data, [near], [near_test] if near_test else [], inputs, f"the kernel {choice.kernel}")
    else:
        copies, leaks = copies_of(data, views.within(k, progress), views.between(k, progress), inputs, views.by)
    known = support(machine.unexplained(left))
    asked = None if seen is None else support(seen.unexplained, known.unexplained)
    listed = suspects.order[: min(samples, n)]
    shown = min(neighbours, k)
    said, warnings = facts_of(data, left, seen, suspects, noise, unknown)
    said["evidence"] = evidence
    return Audit(
        data.train, data.test, suspects, noise, listed, near.places.cpu()[listed, :shown],
        near.similarity.cpu()[listed, :shown], copies, leaks, known, asked,
        _regions(data, machine, left, suspects, near, near_test, known, asked),
        _cleaning(data, machine, suspects, choice), choice, (*warnings, *copies.warnings, *choice.warnings),
        {**facts, **said, "seconds": time.perf_counter() - begin}, data.real,
    )  # fmt: skip


def check(data: Data, samples: int, neighbours: int) -> None:
    """Refuse what there is nothing to find in."""
    n = len(data.train)
    if not all(isinstance(v, int) and not isinstance(v, bool) and v >= 1 for v in (samples, neighbours)):
        raise InputError(f"samples={samples!r}, neighbours={neighbours!r}; needed: whole numbers from 1.")
    if n < FEWEST:
        raise InputError(f"there are {n} training samples; needed: at least {FEWEST}, to compare each with the others.")
    if data.real:
        checks.finite(data.given, "targets")
        if not bool((data.given.std(0) > 0).all()):
            raise InputError("all targets are equal; needed: targets that differ, else nothing can be told about them.")
        return
    counts = data.train.counts()
    if int((counts > 0).sum()) < 2:
        only = data.train.classes[int(counts.argmax())]
        raise InputError(
            f"all samples are of class {only!r}; needed: at least two classes, to mistake one for another."
        )


def _suspects(
    data: Data, left: LeftOut, seen: Seen | None, unseen: LeftOut | None
) -> tuple[Suspects, NoiseRate, float, tuple[int, ...]]:
    """Suspicious labels or targets, how many there are, the evidence that there are any, and classes not known."""
    if data.real:
        suspects, evidence = suspect_targets(left, data.given)
        return suspects, estimate_wrong_targets(suspects), evidence, ()
    found = suspect_labels(left, data.train.y)
    mistakes = None
    if seen is not None and data.test is not None:
        wrong = seen.predictions.cpu().argmax(1) != data.test.y.cpu()
        mistakes = (int(wrong.sum()), len(wrong))
    blind = None
    if unseen is not None:
        blind = float((margins(unseen.predictions.cpu(), data.train.y.cpu()) < 0).double().mean())
    noise = estimate_noise(found, len(data.train.classes), mistakes, blind)
    return found.suspects, noise, found.kinds.evidence, found.unknown


def copies_of(
    data: Data,
    within: Sequence[Nearest],
    across: Sequence[Nearest],
    inputs: tuple[Inputs, Inputs | None] | None,
    by: str,
) -> tuple[Copies, Copies | None]:
    """Within the training set, and between it and the test set."""
    # Without inputs no two samples are known to be equal.
    rows = digests(inputs[0]) if inputs else [f"train {i}" for i in range(len(data.train))]
    y = None if data.real else data.train.y
    known = around(within[0], rows)
    copies = find_copies(within, known, (rows, rows), None if y is None else (y, y), by)
    if not across or data.test is None:
        return copies, None
    others = digests(inputs[1]) if inputs and inputs[1] is not None else [f"test {i}" for i in range(len(data.test))]
    return copies, find_copies(across, known, (others, rows), None if y is None else (data.test.y, y), by)


def _regions(
    data: Data,
    machine: Machine,
    left: LeftOut,
    suspects: Suspects,
    near: Nearest,
    near_test: Nearest | None,
    known: Support,
    asked: Support | None,
) -> tuple[Region, ...]:
    """Where the network is wrong on test samples; without those, where leave-one-out contradicts labels."""
    if data.real:
        return ()
    suspicious = suspects.wrong > 0.5
    if data.test is not None and data.test_said is not None and near_test is not None and asked is not None:
        truth, said, around, unknown = data.test.y.cpu(), data.test_said.cpu(), near_test, asked
    elif data.test is None:
        truth, said, around, unknown = data.train.y.cpu(), suspects.suggested.cpu(), near, known
    else:
        return ()
    unsupported = torch.zeros(len(truth), dtype=torch.bool)
    unsupported[unknown.outliers] = True
    causes = Causes(neighbours_wrong(around, suspicious, 5), unsupported, said, truth)
    points = machine.coordinates(COMPONENTS, data.test is not None)
    return find_regions(points.cpu(), said != truth, causes, data.train.classes)


def _cleaning(data: Data, machine: Machine, suspects: Suspects, choice: Choice) -> Cleaning | None:
    """What it would do to the test score; None without test samples."""
    if data.test is None:
        return None
    return measure_cleaning(machine, suspects, choice.reg, data.numbers, data.scores, data.score)
