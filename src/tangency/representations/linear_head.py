"""The last linear layer of any module: found, its inputs as features of the samples, and other weights put into it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._base import checks, tree
from .._base.progress import bar
from .._base.types import Inputs
from ..engine.modes import numerical_modes
from ..errors import InputError, ModelError
from ..models.evaluate import device_of, evaluating, run_model

# How many samples show what a model does with its last layer (heuristic).
PROBED = 8
# What may follow the last layer in a classifier: logits are then what goes into it.
ENDINGS = {
    "softmax": lambda z: z.softmax(1),
    "log_softmax": lambda z: z.log_softmax(1),
    "sigmoid": torch.sigmoid,
    "logsigmoid": nn.functional.logsigmoid,
}


@dataclass(frozen=True, eq=False)
class LinearHead:
    """A layer z = W φ + b of a model. `ending`: the softmax or sigmoid that follows it, "" if nothing does.

    `pooled`: what follows picks or averages over positions, which the features then have behind them.
    """

    name: str
    layer: nn.Module
    ending: str
    pooled: bool

    @property
    def weight(self) -> Tensor:
        """W [c, d], a view of the layer's own."""
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        return weight.detach().flatten(1)

    @property
    def bias(self) -> Tensor | None:
        """B [c], the layer's own, if it has one."""
        bias = self.layer.bias
        return bias.detach() if isinstance(bias, Tensor) else None

    def put(self, weight: Tensor, bias: Tensor | None) -> None:
        """Other weights, rounded to the layer's type."""
        with torch.no_grad():
            self.weight.copy_(weight)
            if self.bias is not None and bias is not None:
                self.bias.copy_(bias)

    def logits(self, phi: Tensor) -> Tensor:
        """W φ + b in float64, for features [n, d]."""
        z = phi.double() @ self.weight.double().T
        return z if self.bias is None else z + self.bias.double()


def is_linear(module: nn.Module) -> bool:
    """Whether a module is z = W φ + b at every position: a linear layer, or a convolution with a kernel of one."""
    if isinstance(module, nn.Linear):
        return True
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    alone = all(k == 1 for k in (*module.kernel_size, *module.stride)) and module.groups == 1
    return alone and module.padding in (0, tuple(0 for _ in module.kernel_size), "valid", "same")


def find_head(model: nn.Module, x: Inputs, layer: str | None = None) -> LinearHead:
    """The linear layer whose outputs the model gives, by running it on the first samples of x, or the one named."""
    names = {id(m): name for name, m in model.named_modules()}
    if layer is not None:
        _check_name(model, layer)
    device = device_of(model)
    first = tree.to(tree.take(x, slice(0, PROBED)), device)
    with evaluating(model), torch.no_grad(), numerical_modes(device):
        calls = _Calls()
        with calls.watching(m for m in model.modules() if is_linear(m)):
            out = _flat(run_model(model, first), tree.size(first))
        found = [(m, h, z) for m, h, z in calls.made if layer is None or names[id(m)] == layer]
        if not found:
            raise InputError(_nothing(model, layer))
        _check_function(model, first, out)
        module, ending, pooled = _explaining(model, first, out, found) or _refuse(names[id(found[-1][0])], found[-1])
    _check_layer(model, names[id(module)], module, sum(m is module for m, _, _ in calls.made))
    return LinearHead(names[id(module)], module, ending, pooled)


def head_features(model: nn.Module, head: LinearHead, x: Inputs, batch: int, progress: bool, what: str) -> Tensor:
    """φ(x) [n, d], what goes into the head, in the model's type and on its device."""
    device, n = device_of(model), tree.size(x)
    parts: list[Tensor] = []
    with evaluating(model), torch.no_grad(), numerical_modes(device), bar(n, what, "sample", show=progress) as tick:
        for part in tree.split(x, batch):
            parts.append(_features(model, head, tree.to(part, device)))
            tick(len(parts[-1]))
    phi = torch.cat(parts)
    if not bool(phi.isfinite().all()):
        k = int((~phi.isfinite()).any(1).nonzero()[0, 0])
        raise InputError(
            f"what goes into layer {head.name!r} is not finite for sample {k} of {what}. Look for NaN in the samples "
            "and in the weights (a training that diverged)."
        )
    return phi


class _Calls:
    """Linear modules as they are called: (module, what went in, what came out)."""

    def __init__(self) -> None:
        self.made: list[tuple[nn.Module, Tensor, Tensor]] = []

    @contextmanager
    def watching(self, modules: Iterator[nn.Module]) -> Iterator[None]:
        """Within it, calls are kept."""
        handles: list[RemovableHandle] = [m.register_forward_hook(self._keep, with_kwargs=True) for m in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], out: object) -> None:
        given = (*args, *kwargs.values())[:1]
        if given and isinstance(given[0], Tensor) and isinstance(out, Tensor):
            self.made.append((module, given[0], out))


def _features(model: nn.Module, head: LinearHead, x: Inputs) -> Tensor:
    """One batch of φ [n, d]; of a pooled head, what comes out of the model when its input passes it by."""
    n = tree.size(x)
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(module: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], out: Tensor) -> Tensor | None:
        """Keep what goes in and comes out, or let it pass."""
        given = (*args, *kwargs.values())[0]
        kept.append((given, out))
        return given if head.pooled else None

    handle = head.layer.register_forward_hook(keep, with_kwargs=True)
    try:
        out = run_model(model, x)
    finally:
        handle.remove()
    if head.pooled:
        return out.reshape(n, -1)
    phi, z = kept[-1]
    if bool(z.isfinite().all()) and not _close(
        _ended(head.ending, z.reshape(n, -1)), out.reshape(n, -1), _tolerance(out, 100)
    ):
        raise ModelError(
            f"the model's outputs are those of layer {head.name!r} for some samples and not for others: something "
            "follows it (a clamp?) that refitting would not see. Give the model without that."
        )
    return phi.reshape(n, -1)


def _ended(ending: str, z: Tensor) -> Tensor:
    """Logits [n, c] with the softmax or sigmoid that follows."""
    return ENDINGS[ending](z) if ending else z


def _explaining(
    model: nn.Module, x: Inputs, out: Tensor, found: list[tuple[nn.Module, Tensor, Tensor]]
) -> tuple[nn.Module, str, bool] | None:
    """The last of those found that makes the model's outputs, with the ending, and whether it is pooled."""
    n, tolerance = len(out), _tolerance(out, 100)
    for module, _, z in reversed(found):
        if z.numel() == out.numel() and z.shape[0] == n:
            for name in ("", *ENDINGS):
                if _close(_ended(name, z.reshape(n, -1)), out, tolerance):
                    return module, name, False
    # With its input in its output's place, the model gives the features, if it only picks or averages positions.
    module = found[-1][0]
    head = LinearHead("", module, "", True)
    try:
        phi = _features(model, head, x)
    except Exception:  # of any kind: what follows the layer cannot take as many numbers
        return None
    fits = phi.shape[1] == head.weight.shape[1]
    return (module, "", True) if fits and _close(head.logits(phi).to(out), out, tolerance) else None


def _tolerance(out: Tensor, roundings: float) -> float:
    """So many roundings of a number, but never so much that anything would pass (of bfloat16 a hundred are 0.8)."""
    return min(roundings * torch.finfo(out.dtype).eps, 0.05)


def _close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    scale = float(b.abs().max().clamp_min(torch.finfo(b.dtype).tiny))
    return a.shape == b.shape and float((a - b).abs().max()) <= tolerance * scale


def _flat(out: Tensor, n: int) -> Tensor:
    if out.dim() == 0 or out.shape[0] != n:
        raise ModelError(
            f"for {n} samples the model returned a tensor of shape {tuple(out.shape)}; needed: the sample in the "
            "leading dimension, [n, c]."
        )
    return out.reshape(n, -1)


def _check_name(model: nn.Module, layer: str) -> None:
    """Refuse a name that is no module's, or that of a layer of another kind."""
    known = dict(model.named_modules())
    if layer not in known:
        linear = [name for name, m in known.items() if is_linear(m)]
        raise InputError(
            f"the model has no layer {layer!r}.{checks.suggest(str(layer), known)} Its linear layers are "
            f"{checks.some(linear)}."
        )
    if not is_linear(known[layer]):
        raise InputError(f"layer {layer!r} is a {type(known[layer]).__name__}; needed: a linear layer, nn.Linear.")


def _nothing(model: nn.Module, layer: str | None) -> str:
    """What to say where no linear layer was called."""
    if layer is not None:
        return f"layer {layer!r} is not called by the model's forward(), so it makes no outputs. Name the last layer."
    last = [type(m).__name__ for m in model.modules() if next(m.parameters(False), None) is not None]
    return (
        "no linear layer was called by the model's forward()"
        + (f" (its last layer with weights is a {last[-1]})" if last else "")
        + "; needed: a model whose last layer is nn.Linear, called as a module."
    )


def _refuse(name: str, call: tuple[nn.Module, Tensor, Tensor]) -> tuple[nn.Module, str, bool]:
    """Say that what follows the layer is not known."""
    raise ModelError(
        f"the model's outputs are not those of its last linear layer {name!r} (which gives {list(call[2].shape)}), nor "
        "their softmax, sigmoid or mean over positions: something follows it that refitting would not see. Give the "
        "model without that, or name the layer that makes the outputs: layer='…'."
    )


def _check_function(model: nn.Module, x: Inputs, out: Tensor) -> None:
    """Refuse outputs that are no numbers, a model that is random, and one that mixes samples."""
    if not bool(out.isfinite().all()):
        k = int((~out.isfinite()).any(1).nonzero()[0, 0])
        raise InputError(
            f"the model's outputs are not finite for sample {k}. Look for NaN in the samples and in the weights (a "
            "training that diverged)."
        )
    again = _flat(run_model(model, x), len(out))
    tolerance = _tolerance(out, 1e4)
    if not _close(again, out, tolerance):
        raise ModelError(
            "the model gave other outputs for the same samples, in evaluation mode: it is random. Switch that off "
            "(functional dropout takes training=self.training)."
        )
    half = len(out) // 2  # there are models that refuse one alone
    if half and not _close(run_model(model, tree.take(x, slice(0, half))).reshape(half, -1), out[:half], tolerance):
        raise ModelError(
            "samples have other outputs than among others, in evaluation mode: the model mixes samples (a batch "
            "norm without running statistics?). Needed: outputs of each sample by itself."
        )


def _check_layer(model: nn.Module, name: str, layer: nn.Module, calls: int) -> None:
    """Refuse a layer whose weights are not its own alone."""
    weight = layer._parameters.get("weight")
    if not isinstance(weight, Tensor):
        raise ModelError(
            f"the weight of layer {name!r} is made of other parameters (a weight or spectral norm). Make it a "
            "parameter first: torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')."
        )
    if not weight.is_floating_point():
        raise ModelError(
            f"the weight of layer {name!r} is {weight.dtype}; needed: real numbers. Load it without quantisation."
        )
    if calls > 1:
        raise ModelError(
            f"layer {name!r} is called {calls} times in one forward pass, so the outputs are not linear in it. Needed: "
            "a last layer of its own."
        )
    own = f"{name}.weight" if name else "weight"
    places = [k for k, p in model.named_parameters(remove_duplicate=False) if p.data_ptr() == weight.data_ptr()]
    shared = [k for k in places if k != own and model.get_submodule(k.rpartition(".")[0]) is not layer]
    if shared and weight.numel():
        raise ModelError(
            f"the weight of layer {name!r} is tied to {checks.some(shared)}: another would change the features too. "
            "Give the last layer weights of its own: layer.weight = nn.Parameter(layer.weight.detach().clone())."
        )
