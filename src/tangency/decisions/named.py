"""Kernels by the names that a comparison gives them, and their Grams of training and test samples."""

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .._base import checks, tree
from .._base.types import Inputs
from ..engine.features import default_layers
from ..engine.network import unwrapped
from ..errors import InputError, ModelError
from ..gram.compute import compute
from ..gram.gram import DenseGram, Gram
from ..gram.shelf import Folder, shelf
from ..kernels.combine import CosineKernel, cosine
from ..kernels.kernel import Kernel
from ..kernels.ntk import conjugate_kernel, embedding_kernel, pseudo_ntk, trace_ntk
from ..projection import Projected, projected

TITLES = {
    "trNTK": "cosine of the tangent kernel's trace over outputs",
    "trNTK⁰": "trace of the tangent kernel over outputs",
    "pNTK": "cosine of the pseudo tangent kernel (of the outputs' sum)",
    "Em": "cosine of the hidden layers' embeddings together",
    "CK": "cosine of the last hidden layer (conjugate kernel)",
    "proj-trNTK": "cosine of the tangent kernel's trace over outputs, projected to 10,240 dimensions",
    "proj-pNTK": "cosine of the pseudo tangent kernel, projected to 10,240 dimensions",
}
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
# Samples on which kernels are tried; roundings of gradients that one may be made of and count as zero (heuristics).
TRIED, ROUNDINGS = 8, 1000
DEFAULT = ("trNTK", "trNTK⁰", "pNTK", "Em", "CK")


def kernels(model: nn.Module, names: Sequence[str] | str | None = None, **options: Any) -> dict[str, Kernel]:
    """The kernels that are compared by default, by name: trNTK, trNTK⁰, pNTK, Em, CK (Engel et al. 2024, Table 2).

    All but trNTK⁰ are cosines. "trNTK0" is taken for "trNTK⁰". On demand: proj-trNTK, proj-pNTK.

    A model without hidden layers has no Em, one without linear or convolutional layers no CK: they are refused.

    >>> list(kernels(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))))
    ['trNTK', 'trNTK⁰', 'pNTK', 'Em', 'CK']
    """
    made = _makers(model, options)
    return {name: made[name]() for name in dict.fromkeys(check_names(names))}


def usable(
    model: nn.Module, names: Sequence[str] | str | None, x: Inputs, without: Sequence[str] = ()
) -> tuple[dict[str, Kernel], str]:
    """The kernels asked for, tried on some samples; refuses those that the model has none of.

    By default (without those in `without`) these are left out, and why is said.
    """
    made, x, found, notes = _makers(model, {}), tree.take(x, slice(0, TRIED)), dict[str, Kernel](), []
    for name in dict.fromkeys(check_names(names)):
        if names is None and name in without:
            continue
        if not (why := _missing(name, made, x)):
            found[name] = made[name]()
        elif names is None:
            notes.append(f"{name} is left out: {why}")
        else:
            raise InputError(f"kernel {name}: {why} Name other kernels: kernels=['trNTK', …].")
    return found, " ".join(notes)


def _missing(name: str, made: Mapping[str, Callable[[], Kernel]], x: Inputs) -> str:
    """Why the model has no such kernel, if so."""
    if name in SUMS:
        return VANISHES if _vanishes(made["pNTK"](), made["trNTK⁰"](), x) else ""
    if name in HIDDEN:
        try:
            made[name]().diag(x)
        except (InputError, ModelError) as e:
            return str(e).removesuffix(" Name one: layer='…'.")
    return ""


def _makers(model: nn.Module, options: dict[str, Any]) -> dict[str, Callable[[], Kernel]]:
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


def _embedding(model: nn.Module, options: dict[str, Any]) -> Kernel:
    if not default_layers(unwrapped(model)[0]):
        raise InputError("this model has no modules before its last, whose outputs Em compares.")
    return embedding_kernel(model, **options)


def _vanishes(pseudo: Kernel, trace: Kernel, x: Inputs) -> bool:
    """Whether the gradients of the outputs' sum are the rounding of those of the outputs, and nothing else.

    By the largest of some samples: those of a saturated softmax are rounding themselves.
    """
    assert isinstance(pseudo, CosineKernel)
    small, large = pseudo.kernel.diag(x), trace.diag(x)
    return float(small.max()) <= (ROUNDINGS * torch.finfo(small.dtype).eps) ** 2 * float(large.max())


def check_names(names: Sequence[str] | str | None) -> list[str]:
    known = {name.lower(): name for name in TITLES} | {"trntk0": "trNTK⁰"}
    given = list(DEFAULT) if names is None else names.split(",") if isinstance(names, str) else list(names)
    if not given:
        raise InputError(f"no kernel was named; needed: some of {', '.join(TITLES)}.")
    wanted = []
    for name in given:
        found = known.get(str(name).strip().lower())
        if found is None:
            hint = checks.suggest(str(name), TITLES)
            raise InputError(f"there is no kernel {name!r}.{hint} Known: {', '.join(TITLES)}.")
        wanted.append(found)
    return wanted


class Grams:
    """Grams of the samples x and of z with x, by kernel; a kernel and its cosine share one computation.

    >>> trace = trace_ntk(torch.nn.Linear(3, 2))
    >>> grams = Grams(torch.randn(5, 3), torch.randn(4, 3))
    >>> [tuple(g.shape) for g in (*grams(trace), *grams(cosine(trace)))]
    [(5, 5), (4, 5), (5, 5), (4, 5)]
    """

    def __init__(
        self, x: Inputs, z: Inputs, memory: int | str | None = None, progress: bool = True, store: Any = None
    ) -> None:
        self.x, self.z, self.options = x, z, {"memory": memory, "progress": progress}
        self.folder = None if store is None else _folder(store)
        self.done: dict[int, tuple[Gram, Gram]] = {}
        self.asked: dict[int, Inputs] = {}  # z, as each kernel takes it best

    def __call__(self, kernel: Kernel) -> tuple[Gram, Gram]:
        if isinstance(kernel, CosineKernel):
            own, cross = self(kernel.kernel)
            norms = {"training": own.diag(), "test": kernel.kernel.diag(self.asked[id(kernel.kernel)])}
            for which, each in norms.items():
                if not bool((each > 0).all()):
                    zero = (~(each > 0)).nonzero()[:, 0]
                    raise InputError(
                        f"k(x, x) is not positive for {len(zero)} of {len(each)} {which} samples (the first is sample "
                        f"{int(zero[0])}), so their cosine is undefined: the network's parameters do not move its "
                        "outputs there (clamped, rounded, or no unit is active). Leave these samples out, or use a "
                        "kernel without cosine (trNTK⁰)."
                    )
            cosined: Gram = own.cosine()
            if own._in_memory:  # else it would divide at every product
                cosined = DenseGram(cosined.dense(), symmetric=True)
            return cosined, cross.cosine(norms["test"], norms["training"])
        if id(kernel) not in self.done:
            x, z = (self._once(kernel, inputs) for inputs in (self.x, self.z))
            own = compute(kernel, x, store=self._place(kernel, "train"), **self.options)  # type: ignore[arg-type]
            cross = compute(kernel, z, x, store=self._place(kernel, "test"), **self.options)  # type: ignore[arg-type]
            self.done[id(kernel)] = own, cross
            self.asked[id(kernel)] = z
        return self.done[id(kernel)]

    def _once(self, kernel: Kernel, x: Inputs) -> Inputs:
        """What costs least to make Grams of: projected features, which both need."""
        return kernel.embedded(x, **self.options) if isinstance(kernel, Projected) else x

    def _place(self, kernel: Kernel, part: str) -> Path | None:
        """A folder of its own for each kernel and each of its two Grams."""
        if self.folder is None:
            return None
        spec = kernel.spec()
        number = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:8]
        return self.folder / f"{spec['kernel'].replace(' ', '-')}-{number}-{part}"

    def forget(self, later: Sequence[Kernel]) -> None:
        """Drop what no later kernel needs."""
        needed = {id(k.kernel if isinstance(k, CosineKernel) else k) for k in later}
        for key in set(self.done) - needed:
            del self.done[key], self.asked[key]


def _folder(store: Any) -> Path:
    found = shelf(store)
    if not isinstance(found, Folder):
        raise InputError(f"store={found.name!r} is no folder of this machine; needed: one, for several Grams.")
    return found.path
