"""`projected`: a kernel with explicit features of a chosen dimension, close to the kernel that it was made from."""

import json
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Executor, FeatureBatch, Float, Inputs, Memory, Spec, StorePlace
from ..engine.blocks import DenseBlock
from ..engine.contraction import TileSum
from ..engine.features import Features, Jacobian
from ..errors import InputError, NonFiniteError, PerformanceWarning, PrecisionLoss
from ..gram.compute import Run
from ..gram.gram import DenseGram
from ..gram.rows import RowMap
from ..gram.store import StoredGram
from ..gram.witness import code_looks
from ..kernels.combine import CosineKernel
from ..kernels.empirical import Empirical
from ..kernels.kernel import Kernel, ScaleKernel, SumKernel
from .features import StoredFeatures, origin, same_origin, squeezed
from .project import BATCH, Budget, Projector
from .sketches.factored import Kronecker, RandomMask
from .sketches.kinds import GaussianEntries, Hadamard, Rademacher, Sketch, Sparse

KINDS: dict[str, type[Sketch]] = {
    kind.kind: kind for kind in (Sparse, Rademacher, GaussianEntries, Hadamard, Kronecker, RandomMask)
}
# The relative error of a sample's features beyond which 16 bits are refused: a kernel that was projected to 10⁶
# dimensions would not be worse.
MOST_LOST = 1e-3


@dataclass(frozen=True, eq=False, repr=False)
class Projected(Kernel):
    """⟨S φ(x1), S φ(x2)⟩ with a random S: features [n, k], or [n, c, k] with one projection per output."""

    base: Empirical
    projector: Projector
    storage: torch.dtype | None

    def __repr__(self) -> str:
        """What it was made from, and how."""
        p = self.projector
        return f"Projected({self.base!r}, dim={p.dim}, {type(p.sketch).__name__}, seed={p.seed})"

    @overload
    def features(
        self,
        x: object,
        *,
        store: None = None,
        tile: int | None = None,
        memory: Memory = None,
        executor: Executor | str | None = None,
        progress: bool = True,
    ) -> Tensor: ...

    @overload
    def features(
        self,
        x: object,
        *,
        store: StorePlace,
        tile: int | None = None,
        memory: Memory = None,
        executor: Executor | str | None = None,
        progress: bool = True,
    ) -> StoredFeatures: ...

    def features(
        self,
        x: object,
        *,
        store: StorePlace | None = None,
        tile: int | None = None,
        memory: Memory = None,
        executor: Executor | str | None = None,
        progress: bool = True,
    ) -> Tensor | StoredFeatures:
        """Φ [n, k], or [n, c, k] for several outputs: Φ.flatten(1) @ Φ.flatten(1).T is k(x).

        With `store`, a folder or zarr URL, they are written there block by block (calling again goes on where it
        stopped), and a `StoredFeatures` is returned, which the kernel takes in place of inputs. Other options as for
        `tg.compute`.
        """
        # Blocks hold whole batches, so that a sample is always in the same one; what makes no sense is refused later.
        if isinstance(tile, int) and not isinstance(tile, bool) and tile > 0:
            tile = -(-tile // BATCH) * BATCH
        made = Run(ProjectedRows(self), x, None, memory, executor).compute(store, tile, progress)
        if isinstance(made, StoredGram):
            return StoredFeatures(made)
        assert isinstance(made, DenseGram)
        return squeezed(made.value[:, :, 0])

    def embedded(
        self,
        x: object,
        *,
        tile: int | None = None,
        memory: Memory = None,
        executor: Executor | str | None = None,
        progress: bool = True,
    ) -> FeatureBatch:
        """The features of x as inputs of this very kernel, for several Grams of the same samples. Options as there."""
        value = self.features(x, tile=tile, memory=memory, executor=executor, progress=progress)
        return FeatureBatch(value, self._origin)

    def ready(self, x: Inputs | StoredFeatures, name: str = "x") -> Inputs:
        """x checked and cast; features, stored or not, if this kernel made them."""
        if isinstance(x, StoredFeatures):
            x = x.take(slice(0, len(x)))
        if not isinstance(x, FeatureBatch):
            return self.base.ready(x, name)
        same_origin(x.origin, self._origin, name)
        return tree.to(x, self.base.device)

    def alike(self, x1: Inputs, x2: Inputs) -> None:
        """Features and samples need nothing in common: what made them has been compared."""
        if not isinstance(x1, FeatureBatch) and not isinstance(x2, FeatureBatch):
            super().alike(x1, x2)

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """Bytes per sample: (of its features, while they are made)."""
        if isinstance(x, FeatureBatch):
            return x.value[0].numel() * x.value.element_size(), 0
        # The projector counts features in 32 bits, which 16-bit ones are made from.
        kept, transient = self.projector.footprint(x)
        return (kept if self.storage is None else kept * self.storage.itemsize // 4), transient

    def outputs(self, x: Inputs) -> Tensor | None:
        """What the network says of x; features do not tell."""
        return None if isinstance(x, FeatureBatch) else self.base.outputs(x)

    @property
    def inner(self) -> tuple[Kernel, ...]:
        """Who knows about inputs."""
        return (self.base,)

    @property
    def device(self) -> torch.device:
        """That of the model."""
        return self.base.device

    def prepare(self, x: Inputs, memory: int | None = None) -> FeatureBatch:
        """The features [n, c, k]; their origin is the projection alone, since weights take long to hash."""
        made = json.dumps(self._options, sort_keys=True)
        if isinstance(x, FeatureBatch):
            return FeatureBatch(x.value if x.value.dim() == 3 else x.value[:, None], made)
        value = self.projector(x, memory)
        return FeatureBatch(value if self.storage in (None, value.dtype) else self._narrowed(value, self.storage), made)

    def pair(self, a: FeatureBatch, b: FeatureBatch, workspace: int | None = None) -> Tensor:
        """One tile: a matrix product of the features."""
        wanted = json.dumps(self._options, sort_keys=True)
        same_origin(a.origin, wanted, "a")
        same_origin(b.origin, wanted, "b")
        left = DenseBlock(a.value)
        right = left if a is b else DenseBlock(b.value)
        total = TileSum(left, right, trace=self.base.trace, differentiable=False, workspace=workspace)
        with self.base.feature_map.network.modes(), torch.no_grad():
            total.add(left, right)
        return total.result()

    def prepared_diag(self, a: FeatureBatch) -> Tensor:
        """`diag` of a prepared batch."""
        # The squares of 16-bit numbers overflow from 256 on.
        value = a.value.float() if a.value.dtype == torch.float16 else a.value
        norms = value.square().sum(2)
        return norms.sum(1) if self.base.trace else norms

    def diagnose(self, a: FeatureBatch) -> None:
        """Name the first sample whose features are not finite, if there is one."""
        good = a.value.flatten(1).isfinite().all(1)
        if not bool(good.all()):
            sample = int((~good).nonzero()[0])
            raise NonFiniteError(
                f"the projected gradient for sample {sample} is not finite. Check that input, or use a wider dtype.",
                sample,
                "features",
            )

    def parts(self, x1: Inputs, x2: Inputs | None = None) -> dict[str, Tensor]:
        """The kernel split by layer, where each has dimensions of its own (`budget`)."""
        if self.projector.budget == "global":
            raise InputError(
                "all layers share their dimensions, so the projected kernel does not split. Give each layer its own: "
                "tg.projected(…, budget='layer')."
            )
        a, b = self._prepared(x1, x2)
        ready = self.ready(x1)
        shapes = self.projector.shapes(None if isinstance(ready, FeatureBatch) else ready)
        tiles = {}
        for name, group in self.projector.groups(shapes).items():
            left = replace(a, value=a.value[..., group.rows])
            right = left if a is b else replace(b, value=b.value[..., group.rows])
            tiles[name] = self.finite(self.pair(left, right), left, right)
        return tiles

    def spec(self) -> Spec:
        """Everything that decides the numbers, as JSON values."""
        return {**self._options, "of": self.base.spec()}

    @property
    def _options(self) -> Spec:
        """The projection: what prepared features must have in common to be multiplied."""
        p = self.projector
        return {
            "kernel": "projected",
            "kind": p.sketch.kind,
            "nonzeros": getattr(p.sketch, "nonzeros", None),
            "dim": p.dim,
            "seed": p.seed,
            "budget": dict(p.budget) if isinstance(p.budget, Mapping) else p.budget,
            "joint": p.joint,
            "storage": None if self.storage is None else str(self.storage).removeprefix("torch."),
        }

    @property
    def _origin(self) -> str:
        """The projection, the weights and the code, for features that may come from elsewhere. Cost: hashes them."""
        return origin(self.spec(), code_looks(self))

    def _narrowed(self, value: Tensor, storage: torch.dtype) -> Tensor:
        """In the type in which features are kept, if they survive it."""
        kept = value.to(storage)
        size = torch.linalg.vector_norm(value, dim=(1, 2))
        lost = torch.linalg.vector_norm(value - kept.to(value.dtype), dim=(1, 2))
        # Samples whose features are not finite anyway are left to `diagnose`, which names the cause.
        bad = ~(lost <= MOST_LOST * size) & value.flatten(1).isfinite().all(1)
        if bool(bad.any()):
            sample = int(bad.nonzero()[0])
            largest = float(value[sample].abs().max())
            factor = "0.001" if largest > 1 else "1000"
            raise PrecisionLoss(
                f"the features of sample {sample} (largest entry {largest:.2g}) lose "
                f"{float(lost[sample] / size[sample]):.1%} in {storage}. Keep 32 bits (storage=None), or give the "
                f"model's outputs another scale with a head: tg.head_ntk(model, lambda out: {factor} * out).",
                sample,
                "features",
            )
        return kept


@dataclass(frozen=True, eq=False)
class ProjectedRows(RowMap):
    """The features of a projected kernel, as values that each sample has by itself."""

    kernel: Projected
    together = BATCH

    def values(self, x: Inputs, memory: int | None = None) -> Float[Tensor, "n c k"]:
        """The features of a batch."""
        return self.kernel.prepare(x, memory).value

    def ready(self, x: Inputs, name: str = "x") -> Inputs:
        """As the kernel takes them."""
        return self.kernel.ready(x, name)

    def footprint(self, x: Inputs) -> tuple[int, int]:
        """Bytes per sample: (of its features, while they are made)."""
        return self.kernel.footprint(x)

    def diagnose(self, values: Float[Tensor, "n c k"]) -> None:
        """Name the first sample whose features are not finite, if there is one."""
        self.kernel.diagnose(FeatureBatch(values, ""))

    def outputs(self, x: Inputs) -> Tensor | None:
        """What the network says of x."""
        return self.kernel.outputs(x)

    def spec(self) -> Spec:
        """That they are features, and the kernel's own spec."""
        return {"kernel": "features", "of": self.kernel.spec()}

    @property
    def device(self) -> torch.device:
        """That of the model."""
        return self.kernel.base.device


def projected(
    kernel: Kernel | Features,
    dim: int = 10240,
    kind: str = "sparse",
    seed: int = 0,
    *,
    budget: Budget = "global",
    joint: bool = False,
    nonzeros: int | None = None,
    storage: object = None,
) -> Projected:
    """⟨S φ(x1), S φ(x2)⟩ ≈ k(x1, x2) with a random S of `dim` rows: features that can be stored, indexed, multiplied.

    `kind`: "sparse" (the default: the error of the dense kinds at a fraction of their cost, docs/projection.md; with
    `nonzeros` entries per column), "rademacher", "gaussian", "hadamard", "kronecker", "random-mask". `seed` and the
    parameters' names alone decide S, on every device and in every blocking.

    `budget`: "global" (all parameters share the dimensions), "layer" (each layer has its own, by size), or dimensions
    by parameter or module; then they add up to `dim`. `joint` projects all outputs of a trace together: features [n, k]
    instead of [n, c, k]. `storage=torch.float16` keeps the features in 16 bits. Engel et al. 2024, (5), (6) are
    `tg.cosine` of it. Cost: `k.features(x)` one pass over the gradients; a tile one matrix product.

    >>> import torch, tangency as tg
    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 500), torch.nn.Tanh(), torch.nn.Linear(500, 2))
    >>> x = torch.randn(4, 3)
    >>> k = tg.projected(tg.pseudo_ntk(model), dim=1024)
    >>> phi = k.features(x)
    >>> phi.shape, torch.allclose(phi @ phi.T, k(x), rtol=1e-4)
    (torch.Size([4, 1024]), True)
    """
    base = _base(kernel)
    if isinstance(budget, Mapping):
        dim = _rows_of(budget, dim)
    elif budget not in ("global", "layer"):
        raise InputError(f"budget={budget!r}; needed: 'global', 'layer', or a dict from layers to dimensions.")
    checks.positive(dim, "dim", "a number of dimensions")
    try:
        # A bool is an int to Python; as a string it is refused like anything else that is no number.
        number = operator.index(str(seed) if isinstance(seed, bool) else seed)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"seed={seed!r} is a {type(seed).__name__}; needed: an integer.") from None
    if not isinstance(joint, bool):
        raise InputError(f"joint={joint!r}; needed: True or False.")
    if joint and not base.trace:
        raise InputError("joint=True adds outputs up, so it needs a trace: tg.projected(tg.trace_ntk(model), …).")
    if storage not in (None, "float16", torch.float16):
        raise InputError(f"storage={storage!r}; needed: None (as computed) or torch.float16.")
    projector = Projector(base.feature_map, _sketch(kind, nonzeros), dim, number, budget, joint)
    # Of activations the sizes are known only when there are inputs.
    if isinstance(base.feature_map, Jacobian):
        _check_sizes(projector)
    return Projected(base, projector, None if storage is None else torch.float16)


def _base(kernel: object) -> Empirical:
    """The kernel that is projected; features alone are one with a trace."""
    if isinstance(kernel, Features):
        return Empirical("features", kernel, trace=True)
    if isinstance(kernel, Projected):
        raise InputError("the kernel is projected already. Project the one that it was made from: kernel.base.")
    if not isinstance(kernel, Empirical):
        fixes: dict[type, str] = {
            CosineKernel: "Project first: tg.cosine(tg.projected(k)).",
            ScaleKernel: "Project first: 2 * tg.projected(k).",
            SumKernel: "Project first: tg.projected(k1) + tg.projected(k2).",
        }
        fix = fixes.get(type(kernel), "Give one of these: tg.projected(tg.trace_ntk(model)).")
        raise InputError(
            f"tg.projected takes a kernel of a finite network or its features; it was given a {type(kernel).__name__}. "
            f"{fix}"
        )
    return kernel


def _sketch(kind: str, nonzeros: int | None) -> Sketch:
    """The kind of random matrix, by its name."""
    made = KINDS[checks.choice(kind, "kind", KINDS)]
    if nonzeros is None:
        return made()
    if made is not Sparse:
        raise InputError(f"nonzeros={nonzeros} is for kind='sparse'; kind={kind!r} has none to choose.")
    checks.positive(nonzeros, "nonzeros", "a number of entries per column")
    return Sparse(nonzeros)


def _rows_of(budget: Mapping[str, int], dim: int) -> int:
    if not budget or not all(isinstance(name, str) for name in budget):
        raise InputError(f"budget={dict(budget)!r}; needed: dimensions by the names of parameters or modules.")
    for name, rows in budget.items():
        checks.positive(rows, f"budget[{name!r}]", "a number of dimensions")
    total = sum(budget.values())
    if dim not in (10240, total):  # 10240 is what `dim` is where nothing was given
        raise InputError(f"dim={dim}, but budget= adds up to {total}. Leave dim out, or make them agree.")
    return total


def _check_sizes(projector: Projector) -> None:
    """Errors and warnings that need the parameters' sizes."""
    shapes = projector.shapes()
    projector.groups(shapes)  # refuses a budget that does not fit
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    if projector.dim >= total:
        warnings.warn(
            f"dim={projector.dim} is not less than the {total} parameters that count: "
            "the exact features are no longer, and have no error. Use the exact kernel, or a smaller dim.",
            PerformanceWarning,
            stacklevel=3,
        )
