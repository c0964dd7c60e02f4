"""A loop of labelling: which samples to ask for, what was told of them, kept in a file between rounds.

Training stays with the user: after each round the network (or the kernel) as it then is says what to ask for next.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import Tensor, nn

from .._base import checks, fingerprint, strict_json, tree
from .._base.files import path, read, writable, write
from .._base.results import brief, environment
from .._base.targets import by_name, column, read_targets
from .._base.types import FilePath, Inputs, Int, Json, Memory, Numbers
from ..datasets.accepted import names, tensors, whole
from ..errors import InputError, TangencyWarning
from ..gram.gram import Gram
from ..kernels.kernel import Kernel
from ..linalg.matrix import Matrix, square
from .lookahead import Indices, check_classes, places
from .round import OutputsAre, Round
from .strategies import BLIND, STRATEGIES, Strategy, named

FORMAT = 2
# Candidates that are looked at in a round (heuristic: their Gram takes 32 MB and seconds).
MOST = 2000
# Between the first numbers of two seeds' generators: more than a campaign has labels.
SPACING = 10**9


class Campaign:
    """Samples x, of which more and more have labels: `ask` says which to label next, `tell` what they are.

    `classes`: how many there are, or their names. `strategy`: one of `tg.active.STRATEGIES` by name, or a function
    (round, count) -> numbers of candidates. What is asked for depends on the seed, the labels told and the network or
    kernel given, and on nothing else: asked again, the same is answered.

    >>> import tangency as tg
    >>> pool, test = tg.datasets.digits()
    >>> campaign = tg.active.Campaign(pool.x.flatten(1), classes=10, strategy="lookahead")
    >>> first = campaign.ask(20, strategy="random")  # with no labels, anything else would be a guess
    >>> campaign.tell(first, pool.y[first])  # what a person says of them
    >>> net = tg.models.initialized(lambda: tg.models.mlp([64, 32, 10]), seed=0)
    >>> past = tg.models.fit(net, *campaign.data, epochs=20, lr=0.01, optimizer="adam", batch=20)  # your own training
    >>> len(campaign.ask(5, net))
    5
    """

    def __init__(
        self, x: Inputs, classes: int | Sequence[str], *, strategy: str | Strategy = "lookahead", seed: int = 0
    ) -> None:
        self.x = tensors(x)
        if any(leaf.dim() and not len(leaf) for _, leaf in tree.leaves(self.x)):
            raise InputError("the pool is empty; needed: samples, of which some may have labels.")
        tree.check(self.x)
        self.size = tree.size(self.x)
        self.names = _class_names(classes)
        named(strategy)
        self.strategy = strategy
        self.seed = _whole(seed, "seed", 0)
        self.rounds: list[tuple[Tensor, Tensor]] = []  # (samples, labels) as they were told

    def __repr__(self) -> str:
        what = self.strategy if isinstance(self.strategy, str) else named(self.strategy).__name__
        done = f"{len(self.labelled)} of {self.size} samples labelled in {len(self.rounds)} rounds"
        return f"Campaign({done}, {len(self.names)} classes, {what})"

    @property
    def labelled(self) -> Int[Tensor, " m"]:
        """The samples with labels, in the order in which they were told."""
        return torch.cat([torch.zeros(0, dtype=torch.long), *(i for i, _ in self.rounds)])

    @property
    def labels(self) -> Int[Tensor, " m"]:
        """Their classes, as numbers."""
        return torch.cat([torch.zeros(0, dtype=torch.long), *(y for _, y in self.rounds)])

    @property
    def unlabelled(self) -> Int[Tensor, " u"]:
        """The samples without a label."""
        free = torch.ones(self.size, dtype=torch.bool)
        free[self.labelled] = False
        return free.nonzero()[:, 0]

    @property
    def data(self) -> tuple[Inputs, Tensor]:
        """(x, y) of the samples with labels, to train on."""
        return tree.take(self.x, self.labelled), self.labels

    def tell(self, index: Indices, labels: Numbers | Sequence[str]) -> None:
        """Labels of these samples, asked for or not: numbers of classes, or names where the classes have names."""
        i = places(index, self.size, "index").cpu()
        if not len(i):
            raise InputError("index is empty; needed: the numbers of the samples that were labelled.")
        values, counts = i.unique(return_counts=True)
        if bool((counts > 1).any()):
            raise InputError(f"sample {int(values[counts > 1][0])} is told twice in one call; needed: each once.")
        again = i[torch.isin(i, self.labelled)]
        if len(again):
            old = self.names[int(self.labels[self.labelled == again[0]][0])]
            raise InputError(
                f"sample {int(again[0])} was told before, as {old!r}. Leave it out; to change a label, call "
                f"forget([{int(again[0])}]) first."
            )
        self.rounds.append((i, self._numbers(labels, len(i))))

    def forget(self, index: Indices) -> None:
        """Take the labels of these samples back."""
        i = places(index, self.size, "index").cpu()
        never = i[~torch.isin(i, self.labelled)]
        if len(never):
            raise InputError(f"sample {int(never[0])} has no label, so none can be taken back.")
        kept = [(known, ~torch.isin(known, i), y) for known, y in self.rounds]
        self.rounds = [(known[keep], y[keep]) for known, keep, y in kept if bool(keep.any())]

    def ask(
        self,
        count: int,
        model: nn.Module | None = None,
        *,
        kernel: Kernel | Matrix | None = None,
        outputs: Numbers | None = None,
        outputs_are: OutputsAre = "logits",
        strategy: str | Strategy | None = None,
        most: int = MOST,
        reg: float | None = None,
        memory: Memory = None,
        progress: bool = True,
    ) -> Int[Tensor, " k"]:
        """The numbers of `count` samples to label next, the most wanted first. Nothing is changed by asking.

        `model`: the network as it is now, which "lookahead" takes as f₀ with its NTK (the mean over outputs), "badge"
        and "coreset" by its last hidden layer. `outputs_are`: "logits" and "probabilities" are of a network trained by
        cross-entropy, where f₀ are its probabilities; "scores" of one trained on squared errors, as published, where
        f₀ are the outputs themselves. `kernel`: another kernel, or the Gram of all samples; without a model, the ridge
        fit with it is the learner. `outputs`: of all samples, if they are there already.

        At most so many candidates are looked at, drawn at random: `most`. `strategy`, if another than usual. `reg` and
        `memory`: as for `look_ahead`. Cost: by a kernel, the Gram of (labels + most)² entries.
        """
        pick = named(self.strategy if strategy is None else strategy)
        free = self.unlabelled
        _whole(count, "count", 1)
        if count > len(free):
            left = f"{len(free)} of {self.size} samples have no label" if len(free) else "every sample has a label"
            raise InputError(f"count={count}, and {left}; needed: at most {len(free)}.")
        checks.choice(outputs_are, "outputs_are", get_args(OutputsAre))
        if _whole(most, "most", 1) < count:
            raise InputError(f"most={most} candidates, of which {count} were asked for; needed: at least as many.")
        self._check_known(pick)
        # The same whenever it is asked: the seed and the labels so far decide.
        draw = torch.Generator().manual_seed((SPACING * self.seed + len(self.labelled)) % 2**63)
        if len(free) > most:
            free = free[torch.randperm(len(free), generator=draw)[:most]]
        index = torch.cat([self.labelled, free])
        known = Round(
            tree.take(self.x, index),
            self.labels,
            len(self.names),
            draw,
            model=_checked_model(model),
            kernel=self._part(kernel, index),
            given=None if outputs is None else self._of_all(outputs)[index],
            outputs_are=outputs_are,
            reg=reg,
            memory=memory,
            progress=progress,
        )
        return index[_checked(pick(known, count), known, count)]

    def _part(self, kernel: Kernel | Matrix | None, index: Tensor) -> Kernel | Gram | None:
        """A kernel as it is; of a Gram of all samples, the part that is looked at."""
        if kernel is None or isinstance(kernel, Kernel):
            return kernel
        gram = square(kernel, "kernel")
        if gram.shape[0] != self.size:
            raise InputError(
                f"kernel is the Gram of {gram.shape[0]} samples; needed: of all {self.size}, with labels and without."
            )
        return gram.select(index, index)

    def _of_all(self, outputs: Numbers) -> Tensor:
        """Outputs of all samples, on the CPU."""
        out = tree.numbers(outputs, "outputs").cpu()
        if out.dim() == 0 or len(out) != self.size:
            raise InputError(f"outputs have shape {tuple(out.shape)}; needed: a row for each of {self.size} samples.")
        return out

    def to_dict(self) -> dict[str, Json]:
        """All of it but the samples, as JSON has it."""
        what = self.strategy if isinstance(self.strategy, str) else None
        rounds = [[i.tolist(), y.tolist()] for i, y in self.rounds]
        head: dict[str, Json] = {
            "tangency_campaign": FORMAT,
            "size": self.size,
            "pool": fingerprint.samples(self.x),
            "classes": list(self.names),
            "strategy": what,
        }
        return {**head, "seed": self.seed, "rounds": rounds, "environment": environment()}

    def save(self, file: FilePath) -> None:
        """Write it to a file, whole or not at all; `load` goes on from there. Samples and networks are not in it."""
        to = writable(file, "file")
        write(to, strict_json.text(self.to_dict()) + "\n")

    @staticmethod
    def load(file: FilePath, x: Inputs, *, strategy: str | Strategy | None = None) -> "Campaign":
        """The campaign that was saved, about the same samples x; others are refused, and so is another order.

        A strategy of your own is not in the file: give it.

        >>> import tempfile
        >>> campaign = Campaign(torch.randn(9, 2), ["cat", "dog"])
        >>> campaign.tell([3, 5], ["dog", "cat"])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     campaign.save(f"{folder}/labels.json")
        ...     Campaign.load(f"{folder}/labels.json", campaign.x)
        Campaign(2 of 9 samples labelled in 1 rounds, 2 classes, lookahead)
        """
        held = _read(path(file, "file"))
        strategy = held["strategy"] if strategy is None else strategy
        if strategy is None:
            raise InputError(f"{file} was saved with a strategy of your own; needed: strategy=, the function.")
        campaign = Campaign(x, held["classes"], strategy=strategy, seed=held["seed"])
        other = (
            f"{held['size']} samples, and x has {campaign.size}"
            if campaign.size != held["size"]
            else None
            if held["pool"] is None
            else fingerprint.other_samples(held["pool"], fingerprint.samples(campaign.x))
        )
        if other:
            raise InputError(
                f"{file} is about {other}; needed: the samples that it was begun with, in their order and to the bit."
            )
        for index, labels in held["rounds"]:
            campaign.tell(index, labels)
        return campaign

    def _numbers(self, labels: Numbers | Sequence[str], count: int) -> Int[Tensor, " k"]:
        if isinstance(labels, str):
            raise InputError(f"labels is {labels!r}; needed: a list, one label for each sample.")
        if by_name(labels):
            y = read_targets(labels, "labels", names=self.names).values
        else:
            y = tree.numbers(column(labels), "labels")
        if y.dim() != 1 or len(y) != count or y.is_floating_point() or y.is_complex():
            raise InputError(
                f"labels are {y.dtype} of shape {tuple(y.shape)}; needed: a class for each of the {count} samples."
            )
        check_classes(y, len(self.names))
        return y.detach().cpu().long()

    def _check_known(self, pick: Strategy) -> None:
        """What is learned of less than two classes tells no sample from another; one's own strategy may do without."""
        there, name = self.labels.unique(), {v: k for k, v in STRATEGIES.items()}.get(pick)
        if name is None or pick in BLIND or len(there) >= 2:
            return
        said = f"all {len(self.labelled)} labels are {self.names[int(there[0])]!r}" if len(there) else "none is there"
        raise InputError(
            f"strategy={name!r} compares classes and needs labels of at least two; {said}. Ask at random until there "
            "are: ask(count, strategy='random')."
        )


def _checked_model(model: object) -> nn.Module | None:
    if model is None or isinstance(model, nn.Module):
        return model
    raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module. A kernel goes to kernel=.")


def _checked(chosen: object, known: Round, count: int) -> Tensor:
    """What a strategy answered, if it is `count` of the candidates, each once."""
    i = places(chosen, tree.size(known.x), "what the strategy chose").cpu()  # type: ignore[arg-type]  # looked at there
    if len(i) != count or len(i.unique()) != count or not bool((i >= len(known.labels)).all()):
        raise InputError(
            f"the strategy chose {i.tolist()}; needed: {count} of round.candidates, each once, the most wanted first."
        )
    return i


def _class_names(classes: object) -> tuple[str, ...]:
    """Names, or numbers for names."""
    if whole(classes, 2):
        return tuple(str(k) for k in range(int(classes)))  # type: ignore[call-overload]  # a whole number
    if isinstance(classes, str) or not isinstance(classes, Sequence) or len(classes) < 2:
        raise InputError(f"classes={classes!r}; needed: how many there are, or their names, at least two.")
    return names(classes, "classes")


def _whole(value: object, name: str, least: int) -> int:
    if not whole(value, least):
        raise InputError(f"{name}={value!r}; needed: a whole number, at least {least}.")
    return int(value)  # type: ignore[call-overload]  # a whole number


def _read(file: Path) -> dict[str, Any]:
    """What `save` wrote."""
    try:
        held = strict_json.parse(read(file))
    except OSError as e:
        raise InputError(f"{file} cannot be read: {e.strerror or e}. Give the file of Campaign.save.") from None
    except ValueError as e:
        raise InputError(f"{file} holds no campaign ({e}); needed: a file that Campaign.save wrote.") from None
    keys = ("size", "classes", "strategy", "seed", "rounds")
    if not isinstance(held, dict) or "tangency_campaign" not in held or any(k not in held for k in keys):
        raise InputError(f"{file} holds no campaign; needed: a file that Campaign.save wrote.")
    version, pool = held["tangency_campaign"], held.get("pool")
    if not whole(version, 1, FORMAT):
        raise InputError(f"{file} is of format {brief(version)}; this version of tangency reads 1 to {FORMAT}.")
    if version == 1:
        warnings.warn(
            f"{file} is of a version that did not keep which samples it is about: that x are the same, in the same "
            "order, is for you to see. Save it again, and it will be known.",
            TangencyWarning,
            stacklevel=3,
        )
    held["pool"] = None if version == 1 else pool
    rounds = held["rounds"]
    parts = [part for r in rounds for part in r] if _lists(rounds) and all(len(r) == 2 for r in rounds) else None
    if parts is None or not _lists(parts) or not all(whole(v) and abs(v) < 2**62 for part in parts for v in part):
        raise InputError(f"the rounds in {file} are no list of [samples, labels]; needed: as Campaign.save wrote them.")
    if version != 1 and not _is_fingerprint(pool):
        raise InputError(f"{file} does not say which samples it is about; needed: as Campaign.save wrote it.")
    return held


def _lists(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(v, list) for v in value)


def _is_fingerprint(pool: object) -> bool:
    """Whether it has the parts that `fingerprint.samples` gives."""
    return isinstance(pool, dict) and isinstance(pool.get("form"), dict) and isinstance(pool.get("blocks"), list)
