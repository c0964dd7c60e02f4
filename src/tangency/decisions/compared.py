"""Kernels by the names that a comparison gives them, and their Grams of training and test samples."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.fingerprint import without_words
from .._base.types import FeatureBatch, Inputs, Memory, StorePlace
from ..engine.hidden import default_layers
from ..engine.network import unwrapped
from ..engine.outputs import WITHOUT, LogitsOf, Outputs
from ..errors import InputError, ModelError
from ..gram.compute import compute
from ..gram.gram import DenseGram, Gram
from ..gram.shelf import Folder, shelf
from ..kernels.combine import CosineKernel, cosine
from ..kernels.kernel import Kernel
from ..kernels.names import TITLES
from ..kernels.ntk import conjugate_kernel, embedding_kernel, pseudo_ntk, trace_ntk
from ..projection import Projected, projected

# Of two classes, tangent kernels are those of the log-odds: what the decision is made of, however it is written.
OF_TWO = {
    "trNTK": "cosine of the tangent kernel of the log-odds",
    "trNTK⁰": "tangent kernel of the log-odds",
    "pNTK": "cosine of the tangent kernel of the log-odds",
    "proj-trNTK": "cosine of the tangent kernel of the log-odds, projected to 10,240 dimensions",
    "proj-pNTK": "cosine of the tangent kernel of the log-odds, projected to 10,240 dimensions",
}
SUMS = ("pNTK", "proj-pNTK")  # of the outputs' sum
HIDDEN = ("Em", "CK")
VANISHES = "the outputs of a sample have the same sum whatever the parameters are, so this kernel, of their sum, is 0."
AS_THEY_ARE = "Kernels were given, and are taken as they are; tg.decisions.logits_of makes logits for them."
# Samples on which kernels are tried (heuristic).
TRIED = 8
# Gradients of up to this many roundings count as zero (heuristic).
ZERO_ROUNDINGS = 1000
DEFAULT = ("trNTK", "trNTK⁰", "pNTK", "Em", "CK")

Names = Sequence[str] | str | None
Makers = Mapping[str, Callable[[], Kernel]]


def kernels(model: nn.Module, names: Names = None, **options: Any) -> dict[str, Kernel]:
    """The kernels that are compared by default, by name: trNTK, trNTK⁰, pNTK, Em, CK (Engel et al. 2024, Table 2).

    All but trNTK⁰ are cosines. "trNTK0" is taken for "trNTK⁰". On demand: proj-trNTK, proj-pNTK.

    A model without hidden layers has no Em, one without linear or convolutional layers no CK: they are refused.

    >>> list(kernels(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))))
    ['trNTK', 'trNTK⁰', 'pNTK', 'Em', 'CK']
    """
    makers = _makers(model, options)
    # Each once, in the order of the names.
    return {name: makers[name]() for name in dict.fromkeys(check_names(names))}


def _makers(model: nn.Module, options: Mapping[str, Any]) -> Makers:
    """How each kernel is made, when it is asked for: some models have no hidden layers."""
    trace = functools.cache(lambda: trace_ntk(model, **options))  # one object: its Gram is computed once for both
    pseudo = functools.cache(lambda: pseudo_ntk(model, **options))
    return {
        "trNTK": lambda: cosine(trace()),
        "trNTK⁰": trace,
        "pNTK": lambda: cosine(pseudo()),
        "Em": lambda: cosine(_embedding(model, options)),
        "CK": lambda: cosine(conjugate_kernel(model, **options)),
        "proj-trNTK": lambda: cosine(projected(trace())),
        "proj-pNTK": lambda: cosine(projected(pseudo())),
    }


def _embedding(model: nn.Module, options: Mapping[str, Any]) -> Kernel:
    """Em; refuses a model of one module, with a reason of its own."""
    if not default_layers(unwrapped(model)[0]):
        raise InputError("this model has no modules before its last, whose outputs Em compares.")
    return embedding_kernel(model, **options)


def check_names(names: Names) -> list[str]:
    """Names as `TITLES` has them, from a list or from words with commas; None: the default ones. Refuses others."""
    known = {name.lower(): name for name in TITLES} | {"trntk0": "trNTK⁰"}
    words = list(DEFAULT) if names is None else names.split(",") if isinstance(names, str) else list(names)
    if not words:
        raise InputError(f"no kernel was named; needed: some of {', '.join(TITLES)}.")
    wanted = []
    for word in words:
        name = known.get(str(word).strip().lower())
        if name is None:
            hint = checks.suggest(str(word), TITLES)
            raise InputError(f"there is no kernel {word!r}.{hint} Known: {', '.join(TITLES)}.")
        wanted.append(name)
    return wanted


class Chosen(NamedTuple):
    """The kernels of a comparison, what they are in words, and what there is to say about the choice."""

    kernels: dict[str, Kernel]
    titles: Mapping[str, str]
    said: str


def take_given(kernels: Mapping[str, Kernel], outputs: Outputs) -> Chosen:
    """Kernels of the user's own, by name; refuses what is none."""
    for name, kernel in kernels.items():
        if not isinstance(kernel, Kernel):
            kind = type(kernel).__name__
            raise InputError(f"kernels[{name!r}] is a {kind}; needed: a kernel, e.g. tg.trace_ntk(model).")
    if not kernels:
        raise InputError(f"kernels= is empty; needed: at least one, or names ({', '.join(TITLES)}).")
    return Chosen(dict(kernels), TITLES, "" if outputs.kind == "logits" else AS_THEY_ARE)


def with_logits(model: nn.Module, read: Outputs) -> nn.Module:
    """What named kernels are of: the model, or its logits; of two classes there is one log-odds, not two logits."""
    return model if read.kind == "logits" and read.columns != 2 else LogitsOf(model, read)


def choose_named(network: nn.Module, names: Names, outputs: Outputs, x: Inputs) -> Chosen:
    """The named kernels of a network of logits, tried on some samples; refuses those that it has none of.

    By default all that say something of their own: others are left out, and why is said. `outputs`: what the logits
    were made from.
    """
    wanted = check_names(names)
    for name in wanted:
        if names is not None and name in SUMS and outputs.shifted:
            raise InputError(
                f"{name} is the kernel of the logits' sum, which the network's {outputs.kind} do not tell. "
                f"{WITHOUT} Or leave this kernel out."
            )
    makers, few = _makers(network, {}), tree.take(x, slice(0, TRIED))
    chosen, notes = dict[str, Kernel](), []
    for name in dict.fromkeys(wanted):
        if names is None and name in SUMS and (outputs.two or outputs.shifted):
            why = "of two classes it is trNTK." if outputs.two else f"the {outputs.kind} do not tell the logits' sum."
            notes.append(f"{name} is left out: {why}")
            continue
        if not (why := _why_missing(name, makers, few)):
            chosen[name] = makers[name]()
        elif names is None:
            notes.append(f"{name} is left out: {why}")
        else:
            raise InputError(f"kernel {name}: {why} Name other kernels: kernels=['trNTK', …].")
    titles: Mapping[str, str] = TITLES
    if outputs.two:
        titles = TITLES | OF_TWO
    elif outputs.shifted:  # logits are known but for a shift, so kernels are those of the centred ones
        titles = {name: title.replace("outputs", "centred logits") for name, title in TITLES.items()}
    return Chosen(chosen, titles, " ".join(notes))


def _why_missing(name: str, makers: Makers, x: Inputs) -> str:
    """Why the model has no such kernel, if so."""
    if name in SUMS:
        return VANISHES if _vanishes(makers["pNTK"](), makers["trNTK⁰"](), x) else ""
    if name in HIDDEN:
        try:
            makers[name]().diag(x)
        except (InputError, ModelError) as e:
            # Where kernels go by name, there is no layer= to give.
            return str(e).removesuffix(" Name one: layer='…'.")
    return ""


def _vanishes(pseudo: Kernel, trace: Kernel, x: Inputs) -> bool:
    """Whether the gradients of the outputs' sum are the rounding of those of the outputs, and nothing else.

    By the largest of some samples: those of a saturated softmax are rounding themselves.
    """
    assert isinstance(pseudo, CosineKernel)
    # k(x, x) is the square of a gradient's length, so the bound on its roundings is squared, too.
    small, large = pseudo.kernel.diag(x), trace.diag(x)
    return float(small.max()) <= (ZERO_ROUNDINGS * torch.finfo(small.dtype).eps) ** 2 * float(large.max())


class GramPair(NamedTuple):
    """The Gram of the training samples [n, n], and that of the test samples with them [m, n]."""

    train: Gram
    cross: Gram


class Grams:
    """Grams of the samples x and of z with x, by kernel; a kernel and its cosine share one computation.

    >>> trace = trace_ntk(torch.nn.Linear(3, 2))
    >>> grams = Grams(torch.randn(5, 3), torch.randn(4, 3))
    >>> [tuple(g.shape) for g in (*grams(trace), *grams(cosine(trace)))]
    [(5, 5), (4, 5), (5, 5), (4, 5)]
    """

    def __init__(
        self,
        x: Inputs,
        z: Inputs | None = None,
        memory: Memory = None,
        progress: bool = True,
        store: StorePlace | None = None,
    ) -> None:
        self.x, self.z, self.memory, self.progress = x, z, memory, progress
        self.folder = None if store is None else _folder(store)
        # By the kernel's id, which stays its own as long as the caller holds the kernel.
        self.done: dict[tuple[int, str], Gram] = {}
        self.taken: dict[tuple[int, str], FeatureBatch] = {}  # of x and z, for projected kernels
        self.norms: dict[int, Tensor] = {}  # k(z, z)

    def __call__(self, kernel: Kernel) -> GramPair:
        return GramPair(self.train(kernel), self.cross(kernel))

    def train(self, kernel: Kernel) -> Gram:
        """The Gram of x [n, n]; refuses a cosine where some k(x, x) = 0."""
        if not isinstance(kernel, CosineKernel):
            return self._computed(kernel, "train")
        train = self._computed(kernel.kernel, "train")
        _check_norms(train.diag(), "training")
        cosines: Gram = train.cosine()
        # Else it would divide at every product.
        return DenseGram(cosines.dense(), symmetric=True) if train._in_memory else cosines

    def cross(self, kernel: Kernel) -> Gram:
        """The Gram of z with x [m, n]; refuses a cosine where some k(z, z) = 0."""
        if not isinstance(kernel, CosineKernel):
            return self._computed(kernel, "test")
        cross, squares = self._computed(kernel.kernel, "test"), self.squares(kernel.kernel)
        _check_norms(squares, "test")
        return cross.cosine(squares, self._computed(kernel.kernel, "train").diag())

    def _computed(self, kernel: Kernel, which: str) -> Gram:
        key = (id(kernel), which)
        if key not in self.done:
            sides = [self._side(kernel, side) for side in dict.fromkeys((which, "train"))]
            store = None if self.folder is None else _stores(self.folder, kernel)[which]
            self.done[key] = compute(kernel, *sides, store=store, memory=self.memory, progress=self.progress)
        return self.done[key]

    def _side(self, kernel: Kernel, which: str) -> Inputs:
        """x or z; of a projected kernel its features, which several Grams need, made once."""
        value = self.x if which == "train" or self.z is None else self.z
        return self._embedded(kernel, which) if isinstance(kernel, Projected) else value

    def features(self, kernel: Projected, which: str) -> Tensor:
        """Of a projected kernel, [n, k] or [n, c, k], for "train" or "test" samples."""
        return self._embedded(kernel, which).value

    def _embedded(self, kernel: Projected, which: str) -> FeatureBatch:
        key, value = (id(kernel), which), self.x if which == "train" or self.z is None else self.z
        if key not in self.taken:
            self.taken[key] = kernel.embedded(value, memory=self.memory, progress=self.progress)
        return self.taken[key]

    def squares(self, kernel: Kernel) -> Tensor:
        """k(z, z) of every z, [m]; it is not in the Grams: one pass over the samples, made once."""
        if id(kernel) not in self.norms:
            self.norms[id(kernel)] = kernel.diag(self._side(kernel, "test"))
        return self.norms[id(kernel)]

    def forget(self, later: Sequence[Kernel]) -> None:
        """Drop what no later kernel needs."""
        needed = {id(k.kernel if isinstance(k, CosineKernel) else k) for k in later}
        self.done = {key: gram for key, gram in self.done.items() if key[0] in needed}
        self.taken = {key: batch for key, batch in self.taken.items() if key[0] in needed}
        for number in set(self.norms) - needed:
            del self.norms[number]


def _check_norms(squares: Tensor, which: str) -> None:
    """Refuse samples with k(x, x) = 0."""
    if not bool((squares > 0).all()):
        zero = (~(squares > 0)).nonzero()[:, 0]
        raise InputError(
            f"k(x, x) is not positive for {len(zero)} of {len(squares)} {which} samples (the first is sample "
            f"{int(zero[0])}), so their cosine is undefined: the network's parameters do not move its "
            "outputs there (clamped, rounded, or no unit is active). Leave these samples out, or use a "
            "kernel without cosine (trNTK⁰)."
        )


def _stores(folder: Path, kernel: Kernel) -> dict[str, Path]:
    """A folder of its own for each kernel and each of its two Grams."""
    spec = kernel.spec()
    # Eight digits tell a handful of kernels apart; `compute` compares the whole spec with what is in a store.
    number = hashlib.sha256(json.dumps(without_words(spec), sort_keys=True).encode()).hexdigest()[:8]
    name = f"{str(spec['kernel']).replace(' ', '-')}-{number}"
    return {which: folder / f"{name}-{which}" for which in ("train", "test")}


def _folder(store: StorePlace) -> Path:
    """A folder of this machine: several stores go into it."""
    place = shelf(store)
    if not isinstance(place, Folder):
        raise InputError(f"store={place.name!r} is no folder of this machine; needed: one, for several Grams.")
    return place.path
