"""`tg.infinite_ntk` and `tg.infinite_nngp`: from a module or layers to a kernel."""

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import nn

from .._base import checks
from .._base.types import Trainable
from ..errors import InputError
from .compose import Composable, as_layer
from .kernel import Infinite
from .layers.twin import Twin
from .layers.weights import Number, Parametrization, Weights, check_options

Variance = Number | Literal["init"]
DType = Literal["float64", "float32"] | torch.dtype


def infinite_ntk(
    model: Composable,
    *,
    w_var: Variance = 2.0,
    b_var: Number = 0.0,
    parametrization: Parametrization | None = None,
    trainable: Trainable = None,
    lr: Number = 1.0,
    samples: int = 4096,
    seed: int = 0,
    dtype: DType = "float64",
    device: torch.device | str | None = None,
) -> Infinite:
    """Θ(x1, x2) = E ⟨∂f(x1)/∂θ, ∂f(x2)/∂θ⟩ of the network as all its widths grow, by the recursion over layers.

    `model` is an nn.Module (read by torch.fx, or by running it once) or layers of `tangency.infinite`. Weights have
    variance w_var/fan-in and biases b_var; "init" reads off how the module was initialised. A mapping gives numbers by
    layer name. In the "ntk" parametrisation weights are √(w_var/fan-in) times standard normal parameters; in the
    "standard" one (the default with "init") the parameters are the weights themselves, and the module's own widths
    enter. `trainable` says which parameters count, as in `trace_ntk`; `lr` is a factor of each one's part. Outputs with
    positions give [n, s, m, t]. `samples` and `seed` are for what is drawn, such as softmax attention; `error` says how
    exact it is. Pairs are computed where the inputs lie, or on `device`.

    Computed in float64. With `dtype` "float32" the moments of pairs are in float32: half the memory, and errors about
    1e-6 of the largest entry; the diagonal and nearly equal inputs still come from float64. Cost: O(n m) for dense
    networks, O(n m s) with s positions that are flattened in the end, O(n m s²) where they are pooled. Jacot et al.
    2018; Arora et al. 2019; Yang 2020.

    >>> import torch, tangency as tg
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> tg.infinite_ntk(net, w_var=2.0)(torch.eye(3)).round(decimals=3)
    tensor([[1.3330, 0.2120, 0.2120],
            [0.2120, 1.3330, 0.2120],
            [0.2120, 0.2120, 1.3330]], dtype=torch.float64)
    """
    weights = _weights(model, w_var, b_var, parametrization, trainable, lr)
    return _kernel("ntk", model, weights, samples, seed, dtype, device)


def infinite_nngp(
    model: Composable,
    *,
    w_var: Variance = 2.0,
    b_var: Number = 0.0,
    parametrization: Parametrization | None = None,
    samples: int = 4096,
    seed: int = 0,
    dtype: DType = "float64",
    device: torch.device | str | None = None,
) -> Infinite:
    """K(x1, x2) = E f(x1) f(x2) of one output at initialisation as all widths grow: the network is a Gaussian process.

    Options are those of `infinite_ntk`. Neal 1996; Lee et al. 2018.

    >>> import torch, tangency as tg
    >>> tg.infinite_nngp(torch.nn.Linear(2, 1), w_var=1.0)(torch.eye(2))
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]], dtype=torch.float64)
    """
    weights = _weights(model, w_var, b_var, parametrization, None, 1.0)
    return _kernel("nngp", model, weights, samples, seed, dtype, device)


def _weights(
    model: Composable,
    w_var: Variance,
    b_var: Number,
    parametrization: Parametrization | None,
    trainable: Trainable,
    lr: Number,
) -> Weights:
    """What decides the weights' numbers; names that the model does not have are refused."""
    how = check_options(w_var, b_var, parametrization, lr)
    names: tuple[str, ...] | None
    if isinstance(model, type):
        raise InputError(f"{model.__name__} is a class. Give an instance: {model.__name__}(…).")
    if isinstance(model, nn.Module):
        network = model.first if isinstance(model, Twin) else model
        parameters = dict(network.named_parameters())
        known = parameters.keys() | dict(network.named_modules()).keys()
        # A network whose parameters are all frozen is taken as its architecture: all of them count.
        frozen = trainable is None and not any(p.requires_grad for p in parameters.values())
        names = tuple(parameters) if frozen or not parameters else checks.trained(network, trainable)
        for what, option in (("w_var", w_var), ("b_var", b_var), ("lr", lr)):
            for key in option if isinstance(option, Mapping) else ():
                if key not in known:
                    raise InputError(f"{what}= names {key!r}, which is no layer.{checks.suggest(key, known)}")
    else:
        names = _layer_names(trainable)
    return Weights(w_var, b_var, how, names, lr, chosen=trainable is not None)


def _layer_names(trainable: Trainable) -> tuple[str, ...] | None:
    """Which of `tangency.infinite`'s layers are trained: None is all."""
    if trainable is None:
        return None
    given = tuple(trainable) if isinstance(trainable, Iterable) and not isinstance(trainable, str) else (trainable,)
    names = tuple(name for name in given if isinstance(name, str))
    if len(names) < len(given):
        raise InputError(f"trainable={trainable!r}; needed: names of layers, such as '0' or ['2', '4.1'].")
    return names


def _kernel(
    get: Literal["ntk", "nngp"],
    model: Composable,
    weights: Weights,
    samples: int,
    seed: int,
    dtype: DType,
    device: torch.device | str | None,
) -> Infinite:
    """The kernel of a network, its options checked."""
    kinds = {"float64": torch.float64, "float32": torch.float32}
    kind = kinds.get(str(dtype).removeprefix("torch."))
    if kind is None:
        raise InputError(
            f"dtype={dtype!r}; needed: 'float64' or 'float32'. Narrower types cannot tell the angles of near inputs."
        )
    twin = isinstance(model, Twin)
    layer = as_layer(model.first if isinstance(model, Twin) else model)
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise InputError(f"samples={samples!r}; needed: a whole number, at least 2.")
    return Infinite(layer, weights, get, samples, seed, twin, kind, _device(device))


def _device(device: torch.device | str | None) -> torch.device | None:
    """A device that is there."""
    if device is None:
        return None
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as e:
        raise InputError(f"device={device!r}; needed: a device of torch, such as 'cuda', or None: that of x.") from e
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise InputError(f"device={device!r}; torch sees {torch.cuda.device_count()} GPUs here.")
    return found
