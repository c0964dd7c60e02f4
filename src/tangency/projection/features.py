"""Projected features of many samples: in a store that the kernel takes in place of inputs, and among each other."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._base import checks
from .._base.results import Result
from .._base.types import Array, FeatureBatch, Json, Memory, StorePlace
from ..errors import InputError, StoreError
from ..gram.manifest import Manifest, differences, only_looks
from ..gram.source import Source
from ..gram.store import Progress, StoredGram, Verified, open_store
from ..gram.witness import recoded
from ..kernels.kernel import all_finite

# Samples of features in memory that are compared with queries at a time (heuristic).
COMPARED = 4096


def origin(spec: Mapping[str, Json], code: Mapping[str, str]) -> str:
    """What made some features: the kernel's spec, weights included, and its code, as JSON."""
    return json.dumps({**spec, "code": code}, sort_keys=True)


def same_origin(made: str, wanted: str, name: str) -> None:
    """Refuse features that another kernel made."""
    if made == wanted:
        return
    then, now = json.loads(made), json.loads(wanted)
    code, here = then.pop("code", {}), now.pop("code", {})
    # Another version of Python writes code otherwise: then only what else the specs say is compared.
    versions = ["python"] if code.get("python") != here.get("python") else []
    found = differences(then, now).items()
    changes = recoded(code, here) | {k: pair for k, pair in found if not only_looks(k, *pair, versions)}
    if not changes:
        return
    different = [f"{field} {then!r}, not {now!r}" for field, (then, now) in changes.items()]
    raise InputError(
        f"{name} holds features of another kernel: {checks.some(different)}. Features can be multiplied only with "
        "features of the same projection of the same model; compute them again."
    )


def squeezed(value: Tensor) -> Tensor:
    """[n, c, k], or [n, k] where there is one output."""
    return value[:, 0] if value.shape[1] == 1 else value


@dataclass(frozen=True, eq=False)
class StoredFeatures(Source):
    """Features on disk, [n, k] or [n, c, k]. A projected kernel takes them in place of the inputs they were made of."""

    gram: StoredGram

    def __len__(self) -> int:
        return self.gram.shape[0]

    @property
    def shape(self) -> torch.Size:
        """[n, k], or [n, c, k]."""
        n, c, _, k = self.gram.shape
        return torch.Size([n, k] if c == 1 else [n, c, k])

    @property
    def dtype(self) -> torch.dtype:
        """The type in which they are kept."""
        return self.gram.dtype

    @property
    def path(self) -> str:
        """Where they are."""
        return self.gram.path

    @property
    def manifest(self) -> Manifest:
        """What decides the numbers: kernel, projection, hashes of inputs, versions."""
        return self.gram.manifest

    @property
    def origin(self) -> str:
        """What made them: kernel, projection, weights, code."""
        spec = self.gram.manifest["kernel"]["of"]
        assert isinstance(spec, Mapping)
        return origin(spec, self.gram.manifest["witness"]["code"])

    def __getitem__(self, rows: int | slice | Sequence[int] | Array) -> Tensor:
        """The features of some samples: a number, a slice, an index set or a mask."""
        if isinstance(rows, tuple):
            raise InputError(
                "needed: the samples alone, features[rows]; outputs and dimensions of these: features[rows][…]."
            )
        if isinstance(rows, (int, np.integer)):
            if not -len(self) <= rows < len(self):
                raise IndexError(f"sample {rows} is not among the {len(self)}.")
            return self[[int(rows)]][0]
        return squeezed(self.gram[rows, 0])

    def tensor(self, max_bytes: Memory = None) -> Tensor:
        """All of them; refuses above `max_bytes` (by default, half of the machine's memory)."""
        return squeezed(self.gram.dense(max_bytes)[:, :, 0])

    def blocks(self) -> Iterator[tuple[slice, Tensor]]:
        """(rows, features) block by block, as they are stored."""
        for rows, _, tile in self.gram.tiles():
            assert isinstance(rows, slice)
            yield rows, squeezed(tile[:, :, 0])

    @property
    def progress(self) -> Progress:
        """(finished blocks, all blocks)."""
        return self.gram.progress

    def verify(self, *, progress: bool = True) -> Verified:
        """Whether every finished block is there as it was written, by its checksum and seal. Cost: reads them all."""
        return self.gram.verify(progress=progress)

    def take(self, block: slice) -> FeatureBatch:
        """The features of these samples, with what made them."""
        return FeatureBatch(self[block], self.origin)

    def digest(self) -> str:
        """Of what they were made of."""
        # Not of the numbers, which would have to be read: the kernel and the inputs' hashes decide them.
        made = {k: self.manifest[k] for k in ("kernel", "inputs", "shape")}
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        done, count = self.gram.progress
        state = "" if done == count else f", {done} of {count} blocks"
        return f"StoredFeatures({self.path!r}, shape={tuple(self.shape)}, dtype={self.dtype}{state})"


def open_features(path: StorePlace) -> StoredFeatures:
    """The features in a store, finished or unfinished, without the kernel that made them.

    >>> import tempfile, tangency as tg
    >>> k = tg.projected(tg.pseudo_ntk(torch.nn.Linear(300, 2)), dim=64)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     made = k.features(torch.randn(9, 300), store=folder + "/features")
    ...     tg.projection.open_features(folder + "/features").shape
    torch.Size([9, 64])
    """
    gram = open_store(path)
    if gram.manifest["kernel"].get("kernel") != "features":
        raise StoreError(f"{path} holds a Gram matrix, not features. Open it with tg.open_gram.")
    return StoredFeatures(gram)


class _NeighbourFields(NamedTuple):
    similarity: Tensor
    index: Tensor  # type: ignore[assignment]  # numbers of the samples; hides tuple.index, which nobody would call


class Neighbours(Result, _NeighbourFields):
    """What `nearest` finds, similarity and index: [m, neighbours] each, the most similar first."""


def nearest(
    queries: Array | StoredFeatures, features: Array | StoredFeatures, neighbours: int = 10, *, cosine: bool = True
) -> Neighbours:
    """The samples most similar to each of the m queries, `neighbours` of them, the most similar first.

    The similarity is the kernel's entry, or its cosine. Either side may also be an array. Stored features are read
    block by block, so there may be millions of them; if both sides are stored, they must come from one projection of
    one model. Cost: one pass over the features, one product per block.

    >>> import tangency as tg
    >>> k, x = tg.projected(tg.pseudo_ntk(torch.nn.Linear(300, 2)), dim=64), torch.randn(9, 300)
    >>> phi = k.features(x)
    >>> tg.projection.nearest(phi[:2], phi, 1).index  # to itself
    tensor([[0],
            [1]])
    """
    left, right = _checked(queries, "queries"), _checked(features, "features")
    n = _comparable(left, right)
    checks.positive(neighbours, "neighbours", "a number of samples")
    if neighbours > n:
        raise InputError(f"neighbours={neighbours}, but there are {n} samples to choose from.")
    asked = _rows(left.tensor() if isinstance(left, StoredFeatures) else left, "query", 0, cosine)
    best = asked.new_empty(len(asked), 0)
    where = torch.empty(len(asked), 0, dtype=torch.long, device=asked.device)
    for rows, block in right.blocks() if isinstance(right, StoredFeatures) else _split(right):
        similarity = asked @ _rows(block, "sample", rows.start, cosine).to(asked.device, asked.dtype).T
        if not all_finite(similarity):
            i, j = (~similarity.isfinite()).nonzero()[0].tolist()
            raise InputError(
                f"the similarity of query {i} and sample {rows.start + j} overflows {str(similarity.dtype)[6:]}. Use "
                "cosine=True, or give both in float64."
            )
        number = torch.arange(rows.start, rows.stop, device=asked.device).expand(len(asked), -1)
        # The best so far compete with this block: no more than they and one block is ever held.
        best, where = torch.cat([best, similarity], 1), torch.cat([where, number], 1)
        best, order = best.topk(min(neighbours, best.shape[1]), dim=1)
        where = where.gather(1, order)
    return Neighbours(best, where)


def _checked(features: object, name: str) -> Tensor | StoredFeatures:
    """Features as a tensor, or stored ones as they are; anything else is refused."""
    if isinstance(features, np.ndarray) and features.dtype.kind in "fiu":
        # torch takes neither other byte orders nor memory that may not be written.
        features = torch.from_numpy(np.require(features, features.dtype.newbyteorder("="), ["C", "W"]))
    if not isinstance(features, (Tensor, StoredFeatures)):
        raise InputError(
            f"{name} are a {type(features).__name__}; needed: a tensor, an array of numbers, or StoredFeatures."
        )
    if not features.dtype.is_floating_point:
        raise InputError(f"{name} are {features.dtype}; needed: real numbers, as k.features(x) gives them.")
    return features


def _comparable(queries: Tensor | StoredFeatures, features: Tensor | StoredFeatures) -> int:
    """How many samples there are to choose from, of two sides that may be multiplied."""
    if isinstance(queries, StoredFeatures) and isinstance(features, StoredFeatures):
        same_origin(queries.origin, features.origin, queries.path)
    if len(queries.shape) < 2 or queries.shape[1:] != features.shape[1:]:
        raise InputError(
            f"the queries have shape {tuple(queries.shape)}, the features {tuple(features.shape)}; needed: features of "
            "the same kernel, [m, …] and [n, …]."
        )
    return len(features)


def _split(features: Tensor) -> Iterator[tuple[slice, Tensor]]:
    for start in range(0, len(features), COMPARED):
        rows = slice(start, min(start + COMPARED, len(features)))
        yield rows, features[rows]


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
    # Before the norm is taken: the squares of large features could overflow, those of small ones vanish.
    v = v / largest
    return v / torch.linalg.vector_norm(v, dim=1, keepdim=True)
