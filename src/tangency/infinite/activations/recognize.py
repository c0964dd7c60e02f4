"""Which activation of torch has which dual."""

import functools
from collections.abc import Callable, Hashable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .dual import Abs, Dual, LeakyRelu, Pointwise, Relu, Sign
from .duals import Cos, Erf, Exp, Gelu, Identity, Monomial, Sin
from .piecewise import PiecewiseLinear
from .quadrature import Quadrature

Number = int | float
Options = dict[str, object]  # the arguments of an activation beside its input
Maker = Callable[..., Dual | None]


def _smooth(fn: Callable[..., Tensor], name: str) -> Callable[..., Dual]:
    return lambda **options: Quadrature(functools.partial(fn, **options) if options else fn, name, kinks=())


def _kinked(fn: Callable[..., Tensor], name: str, kinks: Callable[..., tuple[float, ...]]) -> Callable[..., Dual]:
    def make(**options: object) -> Dual:
        """The dual with these options, its kinks known."""
        return Quadrature(functools.partial(fn, **options) if options else fn, name, kinks(**options))

    return make


def _at_zero(**options: object) -> tuple[float, ...]:
    return (0.0,)


def _gelu(approximate: str) -> Dual:
    return Gelu() if approximate == "none" else _smooth(F.gelu, "GELU")(approximate=approximate)


def _clamp(min: float | None, max: float | None) -> Dual | None:
    ends = [end for end in (min, max) if end is not None]
    if not ends or not all(isinstance(end, Number) for end in ends):  # tensors as ends are not read
        return None
    if ends == [min]:
        return Relu() if min == 0 else PiecewiseLinear((float(ends[0]),), (0.0, 1.0), float(ends[0]))
    if ends == [max]:
        return PiecewiseLinear((float(ends[0]),), (1.0, 0.0), float(ends[0]))
    low, high = float(ends[0]), float(ends[1])
    return PiecewiseLinear((low, high), (0.0, 1.0, 0.0), low) if low < high else None


def _power(exponent: object) -> Dual | None:
    if not isinstance(exponent, Number) or exponent < 0 or exponent != int(exponent):
        return None
    return Monomial(int(exponent))


def _threshold(threshold: float | None, value: float | None) -> Dual | None:
    if threshold is None or value is None:
        return None
    if value == threshold:
        return Relu() if value == 0 else PiecewiseLinear((threshold,), (0.0, 1.0), value)
    return _kinked(F.threshold, "Threshold", lambda threshold, value: (threshold,))(threshold=threshold, value=value)


# Name of torch's function: its options after the input with their defaults, and what makes the dual of them.
_ACTIVATIONS: dict[str, tuple[Options, Maker]] = {
    "abs": ({}, Abs),
    "celu": ({"alpha": 1.0}, _kinked(F.celu, "CELU", _at_zero)),
    "clamp": ({"min": None, "max": None}, _clamp),
    "cos": ({}, Cos),
    "elu": ({"alpha": 1.0}, _kinked(F.elu, "ELU", _at_zero)),
    "erf": ({}, Erf),
    "exp": ({}, Exp),
    "gelu": ({"approximate": "none"}, _gelu),
    "hardshrink": ({"lambd": 0.5}, _kinked(F.hardshrink, "Hardshrink", lambda lambd: (-lambd, lambd))),
    "hardsigmoid": ({}, lambda: PiecewiseLinear((-3.0, 3.0), (0.0, 1 / 6, 0.0), 0.0)),
    "hardswish": ({}, _kinked(F.hardswish, "Hardswish", lambda: (-3.0, 3.0))),
    "hardtanh": ({"min_val": -1.0, "max_val": 1.0}, lambda min_val, max_val: _clamp(min_val, max_val)),
    "identity": ({}, Identity),
    "leaky_relu": ({"negative_slope": 0.01}, LeakyRelu),
    "logsigmoid": ({}, _smooth(F.logsigmoid, "LogSigmoid")),
    "mish": ({}, _smooth(F.mish, "Mish")),
    "pow": ({"exponent": None}, _power),
    "relu": ({}, Relu),
    "relu6": ({}, lambda: _clamp(0.0, 6.0)),
    "selu": ({}, _kinked(F.selu, "SELU", _at_zero)),
    "sigmoid": ({}, _smooth(torch.sigmoid, "Sigmoid")),
    "sign": ({}, Sign),
    "silu": ({}, _smooth(F.silu, "SiLU")),
    "sin": ({}, Sin),
    "softplus": ({"beta": 1.0, "threshold": 20.0}, _smooth(F.softplus, "Softplus")),
    "softshrink": ({"lambd": 0.5}, lambda lambd: _softshrink(lambd)),
    "softsign": ({}, _kinked(F.softsign, "Softsign", _at_zero)),
    "square": ({}, functools.partial(Monomial, 2)),
    "tanh": ({}, _smooth(torch.tanh, "Tanh")),
    "tanhshrink": ({}, _smooth(F.tanhshrink, "Tanhshrink")),
    "threshold": ({"threshold": None, "value": None}, _threshold),
}
_MODULES = {"LeakyReLU": "leaky_relu", "LogSigmoid": "logsigmoid"}  # others: the class's name in small letters
_ALIASES = {"absolute": "abs", "clip": "clamp", "sgn": "sign"}


def _softshrink(lambd: float) -> Dual:
    return PiecewiseLinear((-lambd, lambd), (1.0, 0.0, 1.0), 0.0) if lambd > 0 else Identity()


@functools.lru_cache(maxsize=256)
def _make(name: str, options: tuple[tuple[str, object], ...]) -> Dual | None:
    """One object for the same activation, so that its tables are made once."""
    return _ACTIVATIONS[name][1](**dict(options))


def _from(name: str, args: Iterable[object], options: Options) -> Dual | None:
    """The dual of an activation by its name and arguments; None for arguments that it does not have."""
    defaults = _ACTIVATIONS[name][0]
    given = dict(zip(defaults, args, strict=False)) | {key: options[key] for key in options if key in defaults}
    if {*options} - {*defaults, "inplace"} or any(isinstance(value, Tensor) for value in given.values()):
        return None
    return _make(name, tuple((defaults | given).items()))


@functools.cache
def _functions() -> dict[Callable[..., object], str]:
    """Every function of torch that is one of the activations, also in place and as a method."""
    homes: tuple[object, ...] = (Tensor, torch.special, torch, F)
    functions: dict[Callable[..., object], str] = {}
    for name, key in [*zip(_ACTIVATIONS, _ACTIVATIONS, strict=True), *_ALIASES.items()]:
        for home in homes:
            functions |= {getattr(home, form): key for form in (name, f"{name}_") if hasattr(home, form)}
    return functions


def recognize(module: nn.Module | Callable[..., object] | str, *args: object, **options: object) -> Dual | None:
    """The dual of a torch activation; None if it is none of them (then `Quadrature` takes any elementwise function).

    A module (`nn.ELU(2.0)`), a function of torch, torch.nn.functional or Tensor with the arguments that follow its
    input (`F.elu, 2.0`), a `functools.partial` of one, or its name ("relu"). A PReLU counts as LeakyReLU with its
    present slope if it has one slope only; an RReLU outside training as LeakyReLU with its mean slope.
    """
    if isinstance(module, Dual):
        return module
    if isinstance(module, functools.partial):
        return None if module.args else recognize(module.func, *args, **(module.keywords | options))
    if isinstance(module, nn.Module):
        return _of_module(module)
    if isinstance(module, str):
        name: str | None = _ALIASES.get(module.removesuffix("_"), module.removesuffix("_"))
    else:
        name = _functions().get(module) if isinstance(module, Hashable) else None
    return _from(name, args, options) if name in _ACTIVATIONS else None


def _of_module(module: nn.Module) -> Dual | None:
    if isinstance(module, Pointwise):
        return module.dual
    if isinstance(module, nn.PReLU):
        slopes = module.weight.detach().double()
        return LeakyRelu(float(slopes[0])) if bool((slopes == slopes[0]).all()) else None
    if isinstance(module, nn.RReLU):
        return None if module.training else LeakyRelu((module.lower + module.upper) / 2)
    kind = type(module)
    name = _MODULES.get(kind.__name__, kind.__name__.lower())
    if name not in _ACTIVATIONS or kind is not getattr(nn, kind.__name__, None):
        return None  # a subclass, or another module of that name, may do anything
    return _from(name, (), {key: getattr(module, key) for key in _ACTIVATIONS[name][0]})
