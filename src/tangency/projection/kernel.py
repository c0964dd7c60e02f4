"""`projected`: a kernel with explicit features of a chosen dimension, close to the kernel that it was made from."""

import json
import operator
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.types import Float, Inputs
from ..engine.blocks import Dense
from ..engine.contraction import Sum
from ..engine.features import Features, Jacobian
from ..errors import InputError, NonFiniteError, PerformanceWarning, PrecisionLoss
from ..gram.manifest import differences
from ..gram.witness import code, recoded
from ..kernels.kernel import BLOCK, Empirical, Kernel
from .project import Budget, Projector
from .sketches.factored import Kronecker, RandomMask
from .sketches.kinds import Gaussian, Hadamard, Rademacher, Sketch, Sparse

KINDS: dict[str, type[Sketch]] = {
    kind.kind: kind for kind in (Sparse, Rademacher, Gaussian, Hadamard, Kronecker, RandomMask)
}
# The relative error of a sample's features beyond which 16 bits are refused: a kernel that was projected to 10⁶
# dimensions would not be worse.
ROUNDING = 1e-3
# Stands for "these inputs are features already", with the spec of the kernel that made them.
MARK = "features of "


@dataclass(frozen=True)
class Rows:
    """Prepared: features [n, c, k] and what made them."""

    value: Float[Tensor, "n c k"]
    spec: str


@dataclass(frozen=True, eq=False)
class Projected(Kernel):
    """⟨S φ(x), S φ(y)⟩ with a random S: features [n, k], or [n, c, k] with one projection per output."""

    base: Empirical
    projector: Projector
    storage: torch.dtype | None

    def features(
        self,
        x: Any,
        *,
        store: Any = None,
        tile: int | None = None,
        memory: int | str | None = None,
        executor: Any = None,
        progress: bool = True,
    ) -> Any:
        """Φ [n, k], or [n, c, k] for several outputs: Φ.flatten(1) @ Φ.flatten(1).T is k(x).

        With `store`, a folder or zarr URL, they are written there block by block (calling again goes on where it
        stopped), and a `StoredFeatures` is returned, which the kernel takes in place of inputs. Other options as for
        `tg.compute`.
        """
        from .features import compute_features

        return compute_features(self, x, store=store, tile=tile, memory=memory, executor=executor, progress=progress)

    def embedded(self, x: Any, **options: Any) -> Inputs:
        """The features of x as inputs of this very kernel, for several Grams of the same samples. Options as there."""
        return {MARK + self._key: self.features(x, **options)}

    def ready(self, x: Any, name: str = "x") -> Inputs:
        whole = getattr(x, "as_inputs", None)
        if whole is not None:  # stored features
            return self.ready(whole(), name)
        key = features_key(x)
        if key is None:
            return self.base.ready(x, name)
        same_origin(key[len(MARK) :], self._key, name)
        return tree.transform(lambda v: v.to(self.device), x)

    def alike(self, x: Inputs, y: Inputs) -> None:
        if features_key(x) is None and features_key(y) is None:
            super().alike(x, y)

    def footprint(self, x: Inputs) -> tuple[int, int]:
        if features_key(x) is not None:
            (value,) = (v for _, v in tree.leaves(x))
            return value[0].numel() * value.element_size(), 0
        kept, transient = self.projector.footprint(x)
        return (kept if self.storage is None else kept * self.storage.itemsize // 4), transient

    def outputs(self, x: Inputs) -> Tensor | None:
        return self.base.outputs(x) if features_key(x) is None else None

    @property
    def inner(self) -> tuple[Kernel, ...]:
        """Who knows about inputs."""
        return (self.base,)

    @property
    def device(self) -> torch.device:
        return self.base.device

    def prepare(self, x: Inputs, memory: int | None = None) -> Rows:
        if features_key(x) is not None:
            (value,) = (v for _, v in tree.leaves(x))
            return Rows(value if value.dim() == 3 else value[:, None], self._sketch)
        return Rows(self._stored(self.projector(x, memory)), self._sketch)

    def pair(self, a: Rows, b: Rows, workspace: int | None = None) -> Tensor:
        for rows, name in ((a, "a"), (b, "b")):
            same_origin(rows.spec, self._sketch, name)
        left = Dense(a.value)
        right = left if a is b else Dense(b.value)
        total = Sum(left, right, trace=self.base.trace, differentiable=False, workspace=workspace)
        with self.base.features.network.modes(), torch.no_grad():
            total.add(left, right)
        return total.result()

    def diag(self, x: Inputs) -> Tensor:
        parts = tree.split(self.ready(x), BLOCK)
        return torch.cat([self.prepared_diag(self.prepare(part)) for part in parts])

    def prepared_diag(self, a: Rows) -> Tensor:
        value = a.value.float() if a.value.dtype == torch.float16 else a.value
        each = value.square().sum(2)
        return each.sum(1) if self.base.trace else each

    def diagnose(self, a: Rows) -> None:
        good = a.value.flatten(1).isfinite().all(1)
        if not bool(good.all()):
            sample = int((~good).nonzero()[0])
            raise NonFiniteError(
                f"the projected gradient for sample {sample} is not finite. Check that input, or use a wider dtype.",
                sample,
                "features",
            )

    def parts(self, x: Inputs, y: Inputs | None = None) -> dict[str, Tensor]:
        """The kernel split by layer, where each has dimensions of its own (`budget`)."""
        if self.projector.budget == "global":
            raise InputError(
                "all layers share their dimensions, so the projected kernel does not split. Give each layer its own: "
                "tg.projected(…, budget='layer')."
            )
        a, b = self._prepared(x, y)
        given = self.ready(x)
        shapes = self.projector.shapes(None if features_key(given) else given)
        found = {}
        for name, group in self.projector.groups(shapes).items():
            left = Rows(a.value[..., group.rows], a.spec)
            right = left if a is b else Rows(b.value[..., group.rows], b.spec)
            found[name] = self.finite(self.pair(left, right), left, right)
        return found

    def spec(self) -> dict[str, Any]:
        return {**self._options, "of": self.base.spec()}

    @property
    def _options(self) -> dict[str, Any]:
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
    def _sketch(self) -> str:
        """What prepared features must have in common to be multiplied."""
        return json.dumps(self._options, sort_keys=True)

    @property
    def _key(self) -> str:
        """The same, the weights and the code, for features that may come from elsewhere. Cost: hashes them."""
        return origin(self.spec(), code(self))

    def _stored(self, value: Tensor) -> Tensor:
        """In the type in which features are kept, if they survive it."""
        if self.storage is None or value.dtype == self.storage:
            return value
        kept = value.to(self.storage)
        size = torch.linalg.vector_norm(value, dim=(1, 2))
        lost = torch.linalg.vector_norm(value - kept.to(value.dtype), dim=(1, 2))
        bad = ~(lost <= ROUNDING * size) & value.flatten(1).isfinite().all(1)
        if bool(bad.any()):
            sample = int(bad.nonzero()[0])
            largest = float(value[sample].abs().max())
            factor = "0.001" if largest > 1 else "1000"
            raise PrecisionLoss(
                f"the features of sample {sample} (largest entry {largest:.2g}) lose "
                f"{float(lost[sample] / size[sample]):.1%} in {self.storage}. Keep 32 bits (storage=None), or give the "
                f"model's outputs another scale with a head: tg.head_ntk(model, lambda out: {factor} * out).",
                sample,
                "features",
            )
        return kept


def origin(spec: Mapping[str, Any], code: Mapping[str, str]) -> str:
    """What made some features."""
    return json.dumps({**spec, "code": code}, sort_keys=True)


def same_origin(made: str, own: str, name: str) -> None:
    """Refuse features that another kernel made."""
    if made == own:
        return
    then, now = json.loads(made), json.loads(own)
    found = recoded(then.pop("code", {}), now.pop("code", {})) | differences(then, now)
    if not found:
        return
    different = [f"{field} {then!r}, not {now!r}" for field, (then, now) in found.items()]
    raise InputError(
        f"{name} holds features of another kernel: {checks.some(different)}. Features can be multiplied only with "
        "features of the same projection of the same model; compute them again."
    )


def features_key(x: Any) -> str | None:
    """The mark of inputs that are features already."""
    if isinstance(x, Mapping) and len(x) == 1:
        (key,) = x
        if isinstance(key, str) and key.startswith(MARK):
            return key
    return None


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
    """⟨S φ(x), S φ(y)⟩ ≈ k(x, y) with a random S of `dim` rows: features that can be stored, indexed, multiplied.

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
        number = operator.index(str(seed) if isinstance(seed, bool) else seed)  # type: ignore[arg-type]
    except TypeError:
        raise InputError(f"seed={seed!r} is a {type(seed).__name__}; needed: an integer.") from None
    if not isinstance(joint, bool):
        raise InputError(f"joint={joint!r}; needed: True or False.")
    if joint and not base.trace:
        raise InputError("joint=True adds outputs up, so it needs a trace: tg.projected(tg.trace_ntk(model), …).")
    if storage not in (None, "float16", torch.float16):
        raise InputError(f"storage={storage!r}; needed: None (as computed) or torch.float16.")
    projector = Projector(base.features, _sketch(kind, nonzeros), dim, number, budget, joint)
    if isinstance(base.features, Jacobian):
        _sizes(projector)
    return Projected(base, projector, None if storage is None else torch.float16)


def _base(kernel: object) -> Empirical:
    if isinstance(kernel, Features):
        return Empirical("features", kernel, trace=True)
    if isinstance(kernel, Projected):
        raise InputError("the kernel is projected already. Project the one that it was made from: kernel.base.")
    if not isinstance(kernel, Empirical):
        fix = "tg.cosine(tg.projected(k))" if isinstance(kernel, Kernel) else "tg.projected(tg.trace_ntk(model))"
        raise InputError(
            f"tg.projected takes a kernel of a finite network or its features; it was given a {type(kernel).__name__}. "
            f"Combine afterwards: {fix}."
        )
    return kernel


def _sketch(kind: str, nonzeros: int | None) -> Sketch:
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
    if dim not in (10240, total):
        raise InputError(f"dim={dim}, but budget= adds up to {total}. Leave dim out, or make them agree.")
    return total


def _sizes(projector: Projector) -> None:
    """Errors and warnings that need the parameters' sizes."""
    shapes = projector.shapes()
    projector.groups(shapes)
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    if projector.dim >= total:
        warnings.warn(
            f"dim={projector.dim} is not less than the {total} parameters that count: "
            "the exact features are no longer, and have no error. Use the exact kernel, or a smaller dim.",
            PerformanceWarning,
            stacklevel=3,
        )
