"""Spectra of a network's weight matrices, by name."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from .._base import checks
from .._base.results import Result, text_table
from .._base.types import Float, Params, Trainable
from ..engine.network import borrowed, unwrapped
from ..errors import InputError
from .marchenko_pastur import MarchenkoPastur
from .ranks import Ranks, ranks

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class WeightSpectrum(Result):
    """Eigenvalues s²/n of WᵀW / n, s the singular values of W and n its larger size; `count` matrices of a layer."""

    name: str
    values: Float[Tensor, " k"]  # largest first; of all matrices together, min(rows, columns) of each
    rows: int  # of one matrix, as it lies in the layer
    columns: int
    count: int = 1  # more than one for a grouped convolution

    @property
    def singular(self) -> Float[Tensor, " k"]:
        """Singular values of W, largest first."""
        return (self.values * max(self.rows, self.columns)).sqrt()

    @property
    def ranks(self) -> Ranks:
        """Effective ranks and the condition number of WᵀW."""
        return ranks(self.values)

    @property
    def bulk(self) -> MarchenkoPastur:
        """The Marchenko–Pastur law with the median of these values, which a few spikes do not move.

        Gavish & Donoho 2014, "The optimal hard threshold for singular values is 4/√3".
        """
        median = float(self.values.flip(0).quantile(0.5))
        if not median > 0:
            raise InputError(
                f"the median of the eigenvalues of {self.name} is {median:.3g}, so no bulk can be fitted; needed: a "
                "matrix of at least half its full rank."
            )
        law = MarchenkoPastur(max(self.rows, self.columns), min(self.rows, self.columns), 1.0)
        unit = float(law.quantiles(torch.tensor([0.5], dtype=torch.float64)))
        return MarchenkoPastur(law.rows, law.columns, median / unit)

    def eigenvalues(self) -> Float[Tensor, " k"]:
        """`values`."""
        return self.values

    def spikes(self) -> Float[Tensor, " s"]:
        """Those values above the end of the bulk (`bulk.edge()`), largest first."""
        return self.bulk.edge().spikes(self.values)

    def table(self) -> str:
        """Sizes, ranks, the end of the bulk and what lies outside."""
        edge, r = self.bulk.edge(), self.ranks
        row = [self.name, f"{self.rows} x {self.columns}", r.largest, edge.threshold, len(self.spikes()), r.entropy]
        return text_table(["weight", "size", "largest", "edge", "spikes", "effective rank"], [row])

    def plot(self) -> "Figure":
        """A histogram of the values, with the Marchenko–Pastur law and its end."""
        from .pictures import draw_bulk

        bulk = self.bulk
        x = torch.linspace(bulk.lower, bulk.upper, 400, dtype=torch.float64)[1:]
        title = f"{self.name}, {len(self.spikes())} spikes"
        return draw_bulk(self.values, (x, bulk.density(x)), bulk.edge().threshold, title)


def weights(model: nn.Module, *, names: Trainable = None, params: Params | None = None) -> dict[str, WeightSpectrum]:
    """λ = s²/n of each weight matrix W, s its singular values, n its larger size: the eigenvalues of WᵀW / n.

    `names`: which parameters, as `trainable=` of the kernels (default: all with two dimensions or more, frozen ones
    too). `params`: a state dict, for the spectra at a checkpoint. A convolution's weight [o, i, …] is the matrix
    [o, i·…] that is applied to patches, one for each of its groups; a weight that is made of others (weight norm,
    spectral norm, pruning, by parametrisations or by hooks) is what is made of them; gates and heads that lie in one
    parameter (LSTM, attention) are one matrix. In float64.
    Cost: a singular value decomposition of each. Martin & Mahoney 2021, "Implicit self-regularization…"

    >>> import tangency as tg
    >>> found = tg.spectra.weights(torch.nn.Sequential(torch.nn.Linear(100, 400), torch.nn.Linear(400, 10)))
    >>> list(found)
    ['0.weight', '1.weight']
    >>> len(found["0.weight"].spikes())  # a random matrix: all of it is bulk
    0
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module.")
    model, prefix = unwrapped(model)
    for name, p in model.named_parameters():
        if isinstance(p, nn.parameter.UninitializedParameter) or p.is_meta:
            raise InputError(f"parameter {name} has no values yet (lazy, or on the meta device). Run or load it.")
    values: dict[str, Tensor] = {}
    if params is not None:
        checks.state_dict(params)
        values = {k.removeprefix(prefix): v.detach() for k, v in params.items()}
        checks.params(values, model)
    if names is None and not any(_matrix(k, p) for k, p in model.named_parameters()):
        raise InputError("the model has no weight matrix: none of its parameters has two dimensions or more.")
    chosen = checks.trained(model, _matrix if names is None else names)
    found: dict[str, WeightSpectrum] = {}
    with borrowed(model, values), torch.no_grad():
        for name, w, groups in _matrices(model, chosen):
            found[name] = _spectrum(name, w, groups)
    if not found:
        raise InputError(
            f"none of {checks.some(list(chosen))} is a matrix; needed: parameters with two dimensions or more."
        )
    return found


def _matrix(name: str, p: Tensor) -> bool:
    """Whether a parameter has a matrix in it: of weight norm it is a vector of lengths, too."""
    return p.dim() >= 2 and p.is_floating_point()


def _matrices(model: nn.Module, chosen: tuple[str, ...]) -> Iterator[tuple[str, Tensor, int]]:
    """Name, value and groups of the weights that the chosen parameters are or make, each once."""
    place = {k: n for n, k in enumerate(chosen)}
    seen: set[str] = set()
    tables: dict[str, tuple[nn.Module, str]] = {}
    every = dict(model.named_parameters())
    ids = {id(every[k]): k for k in chosen}
    for path, module in model.named_modules():
        if isinstance(module, parametrize.ParametrizationList):
            continue
        for key, p in module._parameters.items():
            if p is not None and id(p) in ids:
                tables.setdefault(ids[id(p)], (module, key))
        for key, made in getattr(module, "parametrizations", {}).items():
            if not any(id(p) in ids for p in made.parameters()):
                continue
            value = _made(module, key, made)
            if value.dim() >= 2:
                seen.add(name := f"{path}.{key}" if path else key)
                yield name, value, _groups(module, key)
        for key, value, sources in _hooked(module):
            if any(id(module._parameters[k]) in ids for k in sources) and value.dim() >= 2:
                seen.update(f"{path}.{k}" if path else k for k in sources)
                yield f"{path}.{key}" if path else key, value, _groups(module, key)
    for name in sorted(tables, key=place.__getitem__):
        module, key = tables[name]
        w = getattr(module, key)
        if w.dim() >= 2 and name not in seen:
            yield name, w, _groups(module, key)


def _hooked(module: nn.Module) -> Iterator[tuple[str, Tensor, tuple[str, ...]]]:
    """Weights that hooks make before each pass, by name, and the parameters that they are made of."""
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield hook.name, hook.compute_weight(module), (f"{hook.name}_v", f"{hook.name}_g")
        elif isinstance(hook, SpectralNorm):
            yield hook.name, hook.compute_weight(module, do_power_iteration=False), (f"{hook.name}_orig",)
        elif isinstance(hook, prune.BasePruningMethod):
            yield hook._tensor_name, hook.apply_mask(module), (f"{hook._tensor_name}_orig",)


def _made(module: nn.Module, key: str, made: nn.Module) -> Tensor:
    """The weight that parameters make, without a step of what its making does in training (spectral norm)."""
    modes = [(part, part.training) for part in made.modules()]
    try:
        made.eval()
        value: Tensor = getattr(module, key).detach()
    finally:
        for part, mode in modes:
            part.training = mode
    return value


def _groups(module: nn.Module, key: str) -> int:
    return module.groups if isinstance(module, nn.modules.conv._ConvNd) and key == "weight" else 1


def _spectrum(name: str, w: Tensor, groups: int) -> WeightSpectrum:
    w = w.detach().to("cpu", torch.float64)
    checks.finite(w, name)
    if not w.numel():
        raise InputError(
            f"{name} has shape {tuple(w.shape)}: an empty matrix has no eigenvalues. Leave it out: names=."
        )
    parts = w.reshape(groups, w.shape[0] // groups, -1)
    rows, columns = parts.shape[1:]
    s = torch.linalg.svdvals(parts).flatten().sort(descending=True).values
    return WeightSpectrum(name, s.square() / max(rows, columns), rows, columns, groups)
