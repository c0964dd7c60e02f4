"""Kernels by the names that a comparison gives them, and their Grams of training and test samples."""

import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .. import _check
from .._types import Inputs
from ..combine import CosineKernel, cosine
from ..errors import InputError
from ..gram import DenseGram, Gram
from ..kernel import Kernel
from ..ntk import conjugate_kernel, embedding_kernel, pseudo_ntk, trace_ntk
from ..projection import Projected, projected
from ..tiles.run import compute
from ..tiles.shelf import Folder, shelf

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
DEFAULT = ("trNTK", "trNTK⁰", "pNTK", "Em", "CK")


def kernels(model: nn.Module, names: Sequence[str] | str | None = None, **options: Any) -> dict[str, Kernel]:
    """The kernels that are compared by default, by name: trNTK, trNTK⁰, pNTK, Em, CK (Engel et al. 2024, Table 2).

    All but trNTK⁰ are cosines. "trNTK0" is taken for "trNTK⁰". On demand: proj-trNTK, proj-pNTK.

    >>> import torch
    >>> list(kernels(torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))))
    ['trNTK', 'trNTK⁰', 'pNTK', 'Em', 'CK']
    """
    wanted = check_names(names)
    trace = functools.cache(lambda: trace_ntk(model, **options))  # one object: its Gram is computed once for both
    made: dict[str, Callable[[], Kernel]] = {
        "trNTK": lambda: cosine(trace()),
        "trNTK⁰": trace,
        "pNTK": lambda: cosine(pseudo_ntk(model, **options)),
        "Em": lambda: cosine(embedding_kernel(model, **options)),
        "CK": lambda: cosine(conjugate_kernel(model, **options)),
        "proj-trNTK": lambda: cosine(projected(trace())),
        "proj-pNTK": lambda: cosine(projected(pseudo_ntk(model, **options))),
    }
    return {name: made[name]() for name in dict.fromkeys(wanted)}


def check_names(names: Sequence[str] | str | None) -> list[str]:
    known = {name.lower(): name for name in TITLES} | {"trntk0": "trNTK⁰"}
    given = list(DEFAULT) if names is None else names.split(",") if isinstance(names, str) else list(names)
    if not given:
        raise InputError(f"no kernel was named; needed: some of {', '.join(TITLES)}.")
    wanted = []
    for name in given:
        found = known.get(str(name).strip().lower())
        if found is None:
            hint = _check.suggest(str(name), TITLES)
            raise InputError(f"there is no kernel {name!r}.{hint} Known: {', '.join(TITLES)}.")
        wanted.append(found)
    return wanted


class Grams:
    """Grams of the samples x and of z with x, by kernel; a kernel and its cosine share one computation.

    >>> import torch
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
                    sample = int((~(each > 0)).nonzero()[0, 0])
                    raise InputError(
                        f"k(x, x) is not positive for {which} sample {sample}, so its cosine is undefined. Leave that "
                        "sample out, or use a kernel without cosine (trNTK⁰)."
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
