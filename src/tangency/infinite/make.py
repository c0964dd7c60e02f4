"""`tg.infinite_ntk` and `tg.infinite_nngp`: from a module or layers to a kernel."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from .._base import checks
from ..errors import InputError
from .kernel import Infinite
from .layers.compose import as_layer
from .layers.twin import Twin
from .layers.weights import Number, Parametrization, Weights, checked, within

Variance = Number | Literal["init"]


@dataclass(frozen=True)
class Named:
    """Whether a parameter is among those trained: by names of parameters, or of layers that hold them."""

    names: tuple[str, ...] | None

    def __call__(self, name: str) -> bool:
        return self.names is None or any(within(name, n) for n in self.names)


def infinite_ntk(
    network: Any,
    *,
    w_var: Variance = 2.0,
    b_var: Number = 0.0,
    parametrization: Parametrization | None = None,
    train: Any = None,
    lr: Number = 1.0,
    samples: int = 4096,
    seed: int = 0,
) -> Infinite:
    """Θ(x, y) = E ⟨∂f(x)/∂θ, ∂f(y)/∂θ⟩ of the network as all its widths grow, by the recursion over layers.

    `network` is an nn.Module (read by torch.fx) or layers of `tangency.infinite`. Weights have variance w_var/fan-in
    and biases b_var; "init" reads off how the module was initialised. A mapping gives numbers by layer name. In the
    "ntk" parametrisation weights are √(w_var/fan-in) times standard normal parameters; in the "standard" one (the
    default with "init") the parameters are the weights themselves, and the module's own widths enter. `train` says
    which parameters count, as in `trace_ntk`; `lr` is a factor of each one's part. Outputs with positions give
    [n, s, m, t]. `samples` and `seed` are for what is drawn, such as softmax attention; `error` says how exact it is.

    Computed in float64. Cost: O(n m) for dense networks, O(n m s) with s positions that are flattened in the end,
    O(n m s²) where they are pooled. Jacot et al. 2018; Arora et al. 2019; Yang 2020.

    >>> import torch, tangency as tg
    >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    >>> tg.infinite_ntk(net, w_var=2.0)(torch.eye(3)).round(decimals=3)
    tensor([[1.3330, 0.2120, 0.2120],
            [0.2120, 1.3330, 0.2120],
            [0.2120, 0.2120, 1.3330]], dtype=torch.float64)
    """
    return _made("ntk", network, w_var, b_var, parametrization, train, lr, samples, seed)


def infinite_nngp(
    network: Any,
    *,
    w_var: Variance = 2.0,
    b_var: Number = 0.0,
    parametrization: Parametrization | None = None,
    samples: int = 4096,
    seed: int = 0,
) -> Infinite:
    """K(x, y) = E f(x) f(y) of one output at initialisation as all widths grow: the network is a Gaussian process.

    Options are those of `infinite_ntk`. Neal 1996; Lee et al. 2018.

    >>> import torch, tangency as tg
    >>> tg.infinite_nngp(torch.nn.Linear(2, 1), w_var=1.0)(torch.eye(2))
    tensor([[0.5000, 0.0000],
            [0.0000, 0.5000]], dtype=torch.float64)
    """
    return _made("nngp", network, w_var, b_var, parametrization, None, 1.0, samples, seed)


def _made(
    get: Literal["ntk", "nngp"],
    network: Any,
    w_var: Variance,
    b_var: Number,
    parametrization: Parametrization | None,
    train: Any,
    lr: Number,
    samples: int,
    seed: int,
) -> Infinite:
    how = checked(w_var, b_var, parametrization, lr)
    if isinstance(network, type):
        raise InputError(f"{network.__name__} is a class. Give an instance: {network.__name__}(…).")
    twin = isinstance(network, Twin)
    network = network.first if isinstance(network, Twin) else network
    trained: Callable[[str], bool] = _trained(network, train)
    if isinstance(network, nn.Module):
        known = {*(n for n, _ in network.named_modules()), *(n for n, _ in network.named_parameters())}
        for what, given in (("w_var", w_var), ("b_var", b_var), ("lr", lr)):
            for key in given if isinstance(given, Mapping) else ():
                if key not in known:
                    raise InputError(f"{what}= names {key!r}, which is no layer.{checks.suggest(key, known)}")
    weights = Weights(w_var, b_var, how, trained, lr, chosen=train is not None)
    layer = as_layer(network)
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise InputError(f"samples={samples!r}; needed: a whole number, at least 2.")
    return Infinite(layer, weights, get, samples, seed, twin)


def _trained(network: Any, train: Any) -> Named:
    if isinstance(network, nn.Module):
        every = dict(network.named_parameters())
        frozen = train is None and not any(p.requires_grad for p in every.values())
        names = tuple(every) if frozen or not every else checks.trained(network, train)
        return Named(names)
    if train is None:
        return Named(None)
    given = (train,) if isinstance(train, str) else tuple(train) if isinstance(train, Iterable) else (train,)
    if not all(isinstance(n, str) for n in given):
        raise InputError(f"train={train!r}; needed: names of layers, such as '0' or ['2', '4.1'].")
    return Named(given)
