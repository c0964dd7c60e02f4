"""Projected features of many samples: in memory, or in a store that the kernel takes in place of inputs.

Φ(x) is made as the Gram matrix [n, c, 1, k] of the samples with one more thing, "the k directions", so that everything
that a run of tiles can do (budget, resume, fingerprints, workers) is there for features too.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._base import checks
from .._base.types import Inputs
from ..errors import InputError, StoreError
from ..gram.compute import compute
from ..gram.gram import DenseGram
from ..gram.source import Source
from ..gram.store import StoredGram, opened
from ..kernels.kernel import Kernel, all_finite
from .kernel import MARK, Projected, Rows, origin, same_origin
from .project import BATCH

DIRECTIONS = "the directions"  # no argument of a model can have this name


@dataclass(frozen=True, eq=False)
class Directions(Kernel):
    """k(x, directions)[n, c, 1, k]: a projected kernel's features, as a Gram matrix that is made by rows."""

    projected: Projected
    by_rows = BATCH

    def prepare(self, x: Inputs, memory: int | None = None) -> Rows | None:
        return None if _are_directions(x) else self.projected.prepare(x, memory)

    def pair(self, a: Rows, b: Rows | None, workspace: int | None = None) -> Tensor:
        return a.value[:, :, None]

    def diag(self, x: Inputs) -> Tensor:
        raise InputError("samples and directions are not the same: there is no diagonal.")

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        return x if _are_directions(x) else self.projected.ready(x, name)

    def alike(self, x: Inputs, y: Inputs) -> None:
        """Samples and directions need nothing in common."""

    def footprint(self, x: Inputs) -> tuple[int, int]:
        return (0, 0) if _are_directions(x) else self.projected.footprint(x)

    def outputs(self, x: Inputs) -> Tensor | None:
        return None if _are_directions(x) else self.projected.outputs(x)

    @property
    def device(self) -> torch.device:
        return self.projected.device

    def diagnose(self, a: Rows | None) -> None:
        if a is not None:
            self.projected.diagnose(a)

    def spec(self) -> dict[str, Any]:
        return {"kernel": "features", "of": self.projected.spec()}


def _are_directions(x: Inputs) -> bool:
    return isinstance(x, Mapping) and set(x) == {DIRECTIONS}


def compute_features(
    kernel: Projected, x: Any, *, store: Any, tile: int | None, **options: Any
) -> "Tensor | StoredFeatures":
    """What `Projected.features` gives. Blocks hold whole batches, so that a sample is always in the same one."""
    if isinstance(tile, int) and not isinstance(tile, bool) and tile > 0:
        tile = -(-tile // BATCH) * BATCH
    made = compute(Directions(kernel), x, {DIRECTIONS: torch.zeros(1)}, store=store, tile=tile, **options)
    if isinstance(made, StoredGram):
        return StoredFeatures(made)
    assert isinstance(made, DenseGram)
    return _squeezed(made.value[:, :, 0])


def _squeezed(value: Tensor) -> Tensor:
    """[n, k] where there is one output."""
    return value[:, 0] if value.shape[1] == 1 else value


@dataclass(frozen=True, eq=False)
class StoredFeatures(Source):
    """Features on disk, [n, k] or [n, c, k]. A projected kernel takes them in place of the inputs they were made of."""

    gram: StoredGram

    def __len__(self) -> int:
        return self.gram.shape[0]

    @property
    def shape(self) -> torch.Size:
        n, c, _, k = self.gram.shape
        return torch.Size([n, k] if c == 1 else [n, c, k])

    @property
    def dtype(self) -> torch.dtype:
        return self.gram.dtype

    @property
    def path(self) -> str:
        return self.gram.path

    @property
    def manifest(self) -> dict[str, Any]:
        """What decides the numbers: kernel, projection, hashes of inputs, versions."""
        return self.gram.manifest

    @property
    def origin(self) -> str:
        """What made them: kernel, projection, weights, code."""
        return origin(self.manifest["kernel"]["of"], self.manifest["witness"]["code"])

    def __getitem__(self, rows: Any) -> Tensor:
        """The features of some samples: a number, a slice, an index set or a mask."""
        if isinstance(rows, tuple):
            raise InputError(
                "needed: the samples alone, features[rows]; outputs and dimensions of these: features[rows][…]."
            )
        if isinstance(rows, (int, np.integer)):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"sample {rows} is not among the {len(self)}.")
            return self[[int(rows)]][0]
        return _squeezed(self.gram[rows, 0])

    def tensor(self, max_bytes: int | str | None = None) -> Tensor:
        """All of them; refuses above `max_bytes` (by default, half of the machine's memory)."""
        return _squeezed(self.gram.dense(max_bytes)[:, :, 0])

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, features) block by block, as they are stored."""
        for rows, _, tile in self.gram.tiles():
            assert isinstance(rows, slice)
            yield rows, _squeezed(tile[:, :, 0])

    def take(self, block: slice) -> Inputs:
        return {MARK + self.origin: self[block]}

    def as_inputs(self) -> Inputs:
        """All samples, marked with what made them."""
        return self.take(slice(0, len(self)))

    def digest(self) -> str:
        """Of what they were made of."""
        made = {k: self.manifest[k] for k in ("kernel", "inputs", "shape")}
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        done, count = self.gram.progress
        state = "" if done == count else f", {done} of {count} blocks"
        return f"StoredFeatures({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype}{state})"


def open_features(path: Any) -> StoredFeatures:
    """The features in a store, finished or unfinished, without the kernel that made them.

    >>> import tempfile, tangency as tg
    >>> k = tg.projected(tg.pseudo_ntk(torch.nn.Linear(300, 2)), dim=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = k.features(torch.randn(9, 300), store=folder + "/features")
    ...     tg.projection.open_features(folder + "/features").shape
    torch.Size([9, 64])
    """
    gram = opened(path)
    if gram.manifest["kernel"].get("kernel") != "features":
        raise StoreError(f"{path} holds a Gram matrix, not features. Open it with tg.open_gram.")
    return StoredFeatures(gram)


def nearest(
    queries: "Tensor | StoredFeatures", features: "Tensor | StoredFeatures", count: int = 10, *, cosine: bool = True
) -> tuple[Tensor, Tensor]:
    """(similarity, number) of the `count` samples most similar to each query: [m, count] each, the largest first.

    The similarity is the kernel's entry, or its cosine. Either side may also be an array. Stored features are read
    block by block, so there may be millions of them; if both sides are stored, they must come from one projection of
    one model. Cost: one pass over the features, one product per block.

    >>> import tangency as tg
    >>> k, x = tg.projected(tg.pseudo_ntk(torch.nn.Linear(300, 2)), dim=64), torch.randn(9, 300)
    >>> phi = k.features(x)
    >>> tg.projection.nearest(phi[:2], phi, 1)[1]  # to itself
    tensor([[0],
            [1]])
    """
    queries, features = _tensor(queries), _tensor(features)
    n = _comparable(queries, features)
    checks.positive(count, "count", "a number of neighbours")
    if count > n:
        raise InputError(f"count={count}, but there are {n} samples to choose from.")
    left = _rows(queries.tensor() if isinstance(queries, StoredFeatures) else queries, "query", 0, cosine)
    best = left.new_empty(len(left), 0)
    where = torch.empty(len(left), 0, dtype=torch.long, device=left.device)
    for rows, block in features.blocks() if isinstance(features, StoredFeatures) else _split(features):
        found = left @ _rows(block, "sample", rows.start, cosine).to(left.device, left.dtype).T
        if not all_finite(found):
            i, j = (~found.isfinite()).nonzero()[0].tolist()
            raise InputError(
                f"the similarity of query {i} and sample {rows.start + j} overflows {str(found.dtype)[6:]}. Use "
                "cosine=True, or give both in float64."
            )
        number = torch.arange(rows.start, rows.stop, device=left.device).expand(len(left), -1)
        best, where = torch.cat([best, found], 1), torch.cat([where, number], 1)
        best, order = best.topk(min(count, best.shape[1]), dim=1)
        where = where.gather(1, order)
    return best, where


def _tensor(given: Any) -> Any:
    """An array of numbers as a tensor; anything else as it is."""
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "fiu":
        return given
    return torch.from_numpy(np.require(given, given.dtype.newbyteorder("="), ["C", "W"]))


def _comparable(queries: Any, features: Any) -> int:
    """How many samples there are to choose from, of two sides that may be multiplied."""
    for v, name in ((queries, "queries"), (features, "features")):
        if not isinstance(v, (Tensor, StoredFeatures)):
            raise InputError(
                f"{name} are a {type(v).__name__}; needed: a tensor, an array of numbers, or StoredFeatures."
            )
        if not v.dtype.is_floating_point:
            raise InputError(f"{name} are {v.dtype}; needed: real numbers, as k.features(x) gives them.")
    if isinstance(queries, StoredFeatures) and isinstance(features, StoredFeatures):
        same_origin(queries.origin, features.origin, queries.path)
    if len(queries.shape) < 2 or queries.shape[1:] != features.shape[1:]:
        raise InputError(
            f"the queries have shape {tuple(queries.shape)}, the features {tuple(features.shape)}; needed: features of "
            "the same kernel, [m, …] and [n, …]."
        )
    return len(features)


def _split(features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(features), 4096):
        some = slice(start, min(start + 4096, len(features)))
        yield some, features[some]


def _rows(v: Tensor, what: str, first: int, unit: bool) -> Tensor:
    """Features as rows, of length one if `unit`; what is not finite is refused, since nothing is nearest to it."""
    v = (v.float() if v.dtype == torch.float16 else v).flatten(1)
    if not all_finite(v):
        which = first + int((~v.isfinite().all(1)).nonzero()[0])
        raise InputError(f"the features of {what} {which} are not finite (NaN or infinity). Leave it out, or mend it.")
    if not unit:
        return v
    largest = v.abs().amax(1, keepdim=True)
    if bool((largest == 0).any()):
        which = first + int((largest[:, 0] == 0).nonzero()[0])
        raise InputError(f"the features of {what} {which} are all 0, so its cosine is undefined: use cosine=False.")
    v = v / largest  # their squares could overflow, or vanish
    return v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
