"""Which labels are wrong, what leaks, what is not known: the data of a trained network, by its own kernels."""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.targets import Kind as TargetKind
from .._base.targets import by_name, column, floats, read_targets
from .._base.types import Array, Inputs, Json, Memory, StorePlace
from .._version import __version__
from ..auditing.audit import check, examine
from ..auditing.data import Data
from ..auditing.machine import DECOMPOSED, FeatureMachine, GramMachine, Machine
from ..auditing.result import Audit
from ..datasets import Labelled
from ..datasets.labelled import Samples
from ..engine import outputs as heads
from ..engine.network import check_evaluation_mode, unwrapped
from ..errors import InputError, MissingLibrary, ModelError
from ..kernels.combine import CosineKernel
from ..kernels.kernel import Kernel
from ..kernels.names import TITLES
from ..models import outputs
from ..projection import Projected
from ..regress.groups import GroupLabels, checked_groups
from ..surrogate import Kind
from .compared import Grams, Names, choose_named, kernels, with_logits
from .data import checked_pair, checked_train, common_name, placed
from .described import described
from .layered import views

# Kernels that are tried by default. Of labels not CK: the last layer follows wrong labels first, and has the least
# leave-one-out loss just where it does (benchmarks/studies/wrong_labels.py).
OF_CLASSES, OF_TARGETS = ("trNTK",), ("trNTK", "trNTK⁰", "CK")
# The kernel of a copy of the network that has seen no label: its trained weights are shuffled.
BLIND = "trNTK of shuffled weights"

Retrain = Callable[[Labelled], nn.Module]


def audit(
    model: nn.Module,
    train: Samples,
    test: Samples | None = None,
    *,
    kernel: Kernel | Mapping[str, Kernel] | Names = None,
    labels: Array | Sequence[int] | Sequence[str] | None = None,
    targets: TargetKind | None = None,
    groups: GroupLabels = None,
    outputs_are: Kind | None = None,
    retrain: Retrain | None = None,
    samples: int = 200,
    neighbours: int = 8,
    name: str | None = None,
    memory: Memory = None,
    store: StorePlace | None = None,
    progress: bool = True,
) -> Audit:
    """Which labels are wrong: margins of f₋ᵢ(xᵢ), what the network's kernel machine says of xᵢ without xᵢ, of all i.

    From one trained network: its kernels' leave-one-out predictions are closed forms, so nothing is trained again. Also
    copies within the training set and between it and the test set (by all hidden layers; of pictures also mirrored),
    samples that nothing supports, classes that are mixed up, regions where the network is wrong, what cleaning does.

    `train`, `test`: as for `explain`; or (x, y) with real y, which audits targets. `kernel`: names of
    `tg.decisions.kernels`, a kernel, or kernels by name (default: trNTK; of real targets trNTK⁰ and CK too); the one
    with the least leave-one-out loss is taken, and the result says which. Of real targets, named kernels are computed
    in float64 for up to 6,000 samples: small regs magnify rounding. By default a copy with shuffled weights, which has
    learned no label, bounds their rate. A projected kernel (tg.projected) of fewer dimensions than there are samples
    makes no Gram: leave-one-out in the space of its features, exact for it, at a cost that grows with n and not n².
    `labels`: in place of the training set's, numbers or names of classes. `targets`: "classes" or "real", of floats
    that may be either. `groups`: which samples belong together (one subject, one source): without a sample then means
    without its group. `retrain`: a function from a `Labelled` to a trained network, to check by training what dropping
    the suspects does (three trainings). `samples`: how many suspects are listed one by one, each with its `neighbours`.
    `memory` and `store`: as for `explain`. A network that has memorised its labels gets a warning.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    >>> x = torch.randn(60, 3)
    >>> y = (x[:, 0] > 0).long()
    >>> worst = int(x[:, 0].argmax())
    >>> y[worst] = 0  # wrong
    >>> found = audit(model, (x, y), progress=False)
    >>> int(found.suspects.order[0]) == worst
    True
    """
    begin = time.perf_counter()
    model = _module(model, kernel)
    data = _data(model, *_meant(train, test, labels, targets), retrain, progress)
    check(data, samples, neighbours)
    checked_groups(groups, len(data.train), torch.device("cpu"))
    x = placed(model, data.train.x)
    z = None if data.test is None else placed(model, data.test.x)
    data, chosen, titles, said = _kernels(model, data, x, z, kernel, outputs_are)
    blind = (machines := _machines(chosen, Grams(x, z, memory, progress, store))).pop(BLIND, None)
    facts = _facts(model, name, data, {k: titles.get(k, k) for k in machines}, said)
    inputs, seen = (data.train.x, _x(data.test)), views(model, x, z, memory, progress)
    found = examine(machines, data, groups, samples, neighbours, progress, facts, inputs, seen, blind)
    found = found if retrain is None else _retrained(found, retrain, outputs_are)
    found.facts["seconds"] = time.perf_counter() - begin
    return found


def _module(model: nn.Module, kernel: object) -> nn.Module:
    """The model itself, without wrappers; refuses what is none, or not in evaluation mode."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module.")
    if torch.is_inference_mode_enabled():
        raise InputError(
            "tg.audit was called inside torch.inference_mode(), where there are no gradients; needed: gradients. Call "
            "it outside of inference_mode (torch.no_grad() does not matter)."
        )
    model = unwrapped(model)[0]
    check_evaluation_mode(model)
    _check_kernel(model, kernel)
    return model


def _check_kernel(model: nn.Module, kernel: object) -> None:
    """Refuse what is no kernel and no name of one, and a model whose named kernels cannot be computed as it is."""
    given = list(kernel.values()) if isinstance(kernel, Mapping) else [kernel]
    if given and all(isinstance(k, Kernel) for k in given):
        return
    names = [kernel] if isinstance(kernel, str) else kernel
    if names is not None and not (isinstance(names, (list, tuple)) and all(isinstance(v, str) for v in names)):
        raise InputError(
            f"kernel={kernel!r}; needed: a name ({', '.join(TITLES)}), a kernel (tg.trace_ntk(model)), or kernels by "
            "name."
        )
    narrow = {p.dtype for p in model.parameters() if p.is_floating_point()} - {torch.float32, torch.float64}
    if narrow:
        raise InputError(
            f"the model's parameters are {next(iter(narrow))}; needed: float32 or float64. Give a copy of it, "
            "copy.deepcopy(model).float(), or the model itself, model.float(), with inputs of that type."
        )


def _meant(
    train: Samples, test: Samples | None, labels: object, targets: TargetKind | None
) -> tuple[Samples, Samples | None, object, TargetKind]:
    """Both sets and the labels with class numbers where floats are said to be classes, and what all of them are.

    The labels that are audited decide, and the test set's are read as they are.
    """
    inside = isinstance(train, (tuple, list)) and len(train) == 2
    if labels is None and not inside:
        if targets == "real":
            raise InputError(f"targets='real' and train is a {type(train).__name__}; needed: (x, y), with real y.")
        return train, test, None, "classes"
    given, what = (train[1], "the y of train") if labels is None else (labels, "labels")  # type: ignore[index]
    if targets is None and not floats(given):
        return train, test, labels, "classes"
    found = read_targets(given, what, targets=targets)
    if found.kind == "real":
        return train, test, labels, "real"
    if labels is not None:
        labels = found.values if floats(labels) else labels
    sides = [_numbered(side, name) for side, name in ((train, "train"), (test, "test"))]
    return sides[0], sides[1], labels, "classes"  # type: ignore[return-value]  # there is a training set


def _numbered(side: Samples | None, name: str) -> Samples | None:
    """(x, y) with class numbers for floats; other samples as they are."""
    if not isinstance(side, (tuple, list)) or len(side) != 2 or not floats(side[1]):
        return side
    return side[0], read_targets(side[1], f"the y of {name}", targets="classes").values


def _data(
    model: nn.Module,
    train: Samples,
    test: Samples | None,
    labels: object,
    kind: TargetKind,
    retrain: Retrain | None,
    progress: bool,
) -> Data:
    """What is audited: classes, or real targets."""
    data = _real_data(model, train, test, labels) if kind == "real" else None
    if retrain is not None and data is not None:
        raise InputError("retrain= takes Labelled data, which has classes, and the targets are real; leave it out.")
    if retrain is not None and test is None:
        raise InputError("retrain= is there to compare test scores; give a test set, too.")
    return data or _class_data(model, train, test, labels, progress)


def _facts(model: nn.Module, name: str | None, data: Data, titles: dict[str, Json], said: str) -> dict[str, Json]:
    """What the result says of where its numbers come from."""
    return {
        "model": name or described(model),
        "parameters": sum(p.numel() for p in model.parameters()),
        "data": common_name(data.train.name, "test" if data.test is None else data.test.name),
        "titles": titles,
        "said": said,
        "torch": torch.__version__,
        "tangency": __version__,
    }


def _x(data: Labelled | None) -> Inputs | None:
    return None if data is None else data.x


def _class_data(model: nn.Module, train: Samples, test: Samples | None, labels: object, progress: bool) -> Data:
    """Both sets checked, with the labels that are to be audited."""
    if test is None:
        known, asked = checked_train(model, train, progress, absent=True), None
    else:
        known, asked = checked_pair(model, train, test, progress, absent=True)
    return Data(known if labels is None else with_labels(known, labels), asked)


def with_labels(known: Labelled, labels: object) -> Labelled:
    """The samples with other labels, numbers or names of classes."""
    if by_name(labels):
        y = read_targets(labels, "labels", names=known.classes).values
    else:
        y = tree.numbers(column(labels), "labels").cpu()
    if y.is_floating_point() or y.shape != (len(known),):
        raise InputError(
            f"labels has shape {tuple(y.shape)}, {y.dtype}; needed: one whole number (or name of a class) for each of "
            f"the {len(known)} training samples."
        )
    return replace(known, y=y.long())


def _real_data(model: nn.Module, train: object, test: object, labels: object) -> Data:
    """Samples with real targets."""
    x, targets = _pair(train, labels, "train")
    z, test_targets = (None, None) if test is None else _pair(test, None, "test")
    width = outputs(model, placed(model, tree.take(x.x, slice(0, 2)))).reshape(2, -1).shape[1]
    for which, t in (("train", targets), ("test", test_targets)):
        if t is not None and t.shape[1] != width:
            classes = t.shape[1] == 1 and bool((t == t.round()).all())
            raise InputError(
                f"a target of {which} has {t.shape[1]} number{'s' * (t.shape[1] > 1)}, an output of the model {width}; "
                f"needed: as many.{' If these are classes: y.long().' if classes else ''}"
            )
    return Data(x, z, targets, test_targets)


def _pair(samples: object, y: object, which: str) -> tuple[Labelled, Tensor]:
    """Samples without classes, and their targets [n, q]."""
    if isinstance(samples, Labelled):
        x: object = samples.x
    elif isinstance(samples, (tuple, list)) and len(samples) == 2:
        x, y = samples[0], samples[1] if y is None else y
    else:
        raise InputError(f"{which} is a {type(samples).__name__}; needed with real targets: (x, y).")
    targets = tree.numbers(y, f"the targets of {which}").cpu().double()  # type: ignore[arg-type]
    checks.finite(targets, f"the targets of {which}")
    n = len(targets)
    data = Labelled(x, torch.zeros(n, dtype=torch.long), ("all",), name=which)  # type: ignore[arg-type]
    return data, targets.reshape(n, -1)


def _kernels(
    model: nn.Module,
    data: Data,
    x: Inputs,
    z: Inputs | None,
    kernel: Kernel | Mapping[str, Kernel] | Names,
    outputs_are: Kind | None,
) -> tuple[Data, dict[str, Kernel], Mapping[str, str], str]:
    """The data with what the network says of them, the kernels that are tried, their titles, and what is to be said."""
    given = {"kernel": kernel} if isinstance(kernel, Kernel) else kernel if isinstance(kernel, Mapping) else None
    titles: Mapping[str, str] = TITLES
    said = ""
    names: Names = None if given is not None else kernel  # type: ignore[assignment]  # no kernel: names
    if data.real:
        if given is None:
            # Regs go down to 1e-4 k(x, x), where float32's rounding would decide (and differ between machines).
            wide = torch.float64 if len(data.train) <= DECOMPOSED else None
            given = _present(model, OF_TARGETS, x, wide) if names is None else kernels(model, names, dtype=wide)
        return data, dict(given), titles, said
    read = heads.learn(outputs, model, x, data.train.y, len(data.train.classes), outputs_are)
    data = replace(data, said=_said(model, x, read), test_said=None if z is None else _said(model, z, read))
    if given is None:
        network = with_logits(model, read)
        wanted = _has(network, OF_CLASSES, x) if names is None else names
        given, titles, said = choose_named(network, wanted, read, x)
        if names is None:
            given = dict(given) | {BLIND: kernels(_shuffled(network), ["trNTK"])["trNTK"]}
    return data, dict(given), titles, " ".join(filter(None, [read.said, said, _absent(data.train)]))


def _absent(train: Labelled) -> str:
    """Of which classes there is no sample, if so."""
    none = [train.classes[k] for k in (train.counts() == 0).nonzero()[:, 0].tolist()]
    if not none:
        return ""
    return f"The training set has no sample of {checks.some(none)}, so no label is suggested to be that."


def _shuffled(network: nn.Module) -> nn.Module:
    """A copy in which the entries of each trained weight have changed places: as large, and with nothing learned.

    What is frozen stays, since it has not seen these labels.
    """
    made, generator = copy.deepcopy(network), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in made.parameters():
            if p.requires_grad and p.dim() > 1:
                order = torch.randperm(p.numel(), generator=generator).to(p.device)
                p.copy_(p.flatten()[order].view_as(p))
    return made


def _said(model: nn.Module, x: Inputs, read: heads.Outputs) -> Tensor:
    """The class that the network says, of each sample."""
    logits = heads.logits(outputs, model, x, read)
    return logits.argmax(1).cpu() if logits.shape[1] > 1 else (logits[:, 0] > 0).long().cpu()


def _has(network: nn.Module, names: Sequence[str], x: Inputs) -> list[str]:
    """Those of the kernels that the network has."""
    return list(_present(network, names, x))


def _present(
    network: nn.Module, names: Sequence[str], x: Inputs, dtype: torch.dtype | None = None
) -> dict[str, Kernel]:
    """Those of the kernels that the network has: one without a hidden layer has no CK."""
    found = dict[str, Kernel]()
    for name in names:
        try:
            made = kernels(network, [name], dtype=dtype)
            made[name].diag(tree.take(x, slice(0, 2)))
        except MissingLibrary:
            raise
        except InputError:
            if name == names[0]:
                raise
            continue
        found |= made
    return found


def _machines(chosen: Mapping[str, Kernel], grams: Grams) -> dict[str, Machine]:
    """What each kernel makes of the samples: features where it has them, else Grams."""
    machines = dict[str, Machine]()
    for name, kernel in chosen.items():
        base = kernel.kernel if isinstance(kernel, CosineKernel) else kernel
        try:
            if isinstance(base, Projected) and (featured := _of_features(base, grams, base is not kernel)):
                machines[name] = featured
                continue
            train = grams.train(kernel)
            if len(train.shape) != 2:
                raise InputError(
                    f"its Gram has shape {tuple(train.shape)}; needed: [n, n], one similarity for each pair of samples "
                    "(tg.trace_ntk, not tg.full_ntk)."
                )
            device = next(iter(tree.leaves(grams.x)))[1].device
            if grams.z is None or name == BLIND:  # which is asked for one reg, and for no test samples
                machines[name] = GramMachine(train, device=device, several=name != BLIND)
                continue
            cross = grams.cross(kernel)
            own = torch.ones(cross.shape[0], dtype=cross.dtype) if base is not kernel else grams.squares(kernel)
            machines[name] = GramMachine(train, cross, own, device)
        except InputError as e:
            raise InputError(f"kernel {name}: {e}") from e
    return machines


def _of_features(kernel: Projected, grams: Grams, unit: bool) -> FeatureMachine | None:
    """Features [n, p], of length 1 for a cosine; None where a Gram is smaller (p ≥ n), or is of several outputs."""
    features = grams.features(kernel, "train").flatten(1)
    if features.shape[1] >= len(features) or not kernel.base.trace:
        return None
    kind = torch.promote_types(features.dtype, torch.float32)  # they may be stored in 16 bits
    made = [features.to(kind)]
    if grams.z is not None:
        made.append(grams.features(kernel, "test").flatten(1).to(kind))
    if unit:
        made = [torch.nn.functional.normalize(phi, dim=1) for phi in made]
    return FeatureMachine(*made)


def _retrained(found: Audit, retrain: Retrain, outputs_are: Kind | None) -> Audit:
    """Test accuracies of networks trained on the data as they are, without the suspects, and with mended labels."""
    assert found.cleaning is not None
    sets, warnings = {"as given": found.train}, found.warnings
    if found.suspects.count < len(found.train):
        sets["dropped"] = found.cleaned("drop")
    else:
        warnings += ("every sample is a suspect: none would be left, so nothing was trained without the suspects.",)
    sets["mended"] = found.cleaned("fix")
    scores = {name: _accuracy(retrain(data), data, found.test, name, outputs_are) for name, data in sets.items()}
    return replace(found, cleaning=replace(found.cleaning, retrained=scores), warnings=warnings)


def _accuracy(model: object, data: Labelled, test: Labelled | None, name: str, outputs_are: Kind | None) -> float:
    """On the test samples, of a network that was trained on these data."""
    assert test is not None
    if not isinstance(model, nn.Module):
        raise InputError(f"retrain returned a {type(model).__name__}; needed: the network that it trained.")
    try:
        check_evaluation_mode(model)
        read = heads.learn(outputs, model, placed(model, data.x), data.y, len(data.classes), outputs_are)
        said = _said(model, placed(model, test.x), read)
    except (InputError, ModelError) as e:
        raise InputError(f"the network that retrain returned for the data {name!r}: {e}") from e
    return float((said == test.y.cpu()).double().mean())
