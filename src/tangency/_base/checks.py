"""Checks that several rooms share, each with its message: what was given, what is needed, the fix.

They run before any expensive work. Those of inputs are in `tree`, those of one room beside what they check.
"""

import difflib
import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from ..errors import InputError
from .types import Params, Trainable


def trained(model: nn.Module, trainable: Trainable) -> tuple[str, ...]:
    """The names of the parameters that count: by default those with requires_grad."""
    every = dict(model.named_parameters())
    if not every:
        raise InputError("the model has no parameters, so it has no tangent kernel.")
    if trainable is None:
        names = [k for k, p in every.items() if p.requires_grad]
        if not names:
            raise InputError(
                "every parameter is frozen (requires_grad=False), so no parameter counts. Say which do: trainable='…' "
                "(a name or a module), or trainable=lambda name, p: True for all."
            )
    else:
        names = [k for k in every if k in _select(model, every, trainable)]
        if not names:
            raise InputError(
                f"trainable={trainable!r} selects none of the {len(every)} parameters, e.g. {some(list(every))}."
            )
    for k in names:
        if not every[k].is_floating_point():
            raise InputError(f"parameter {k} is {every[k].dtype}; tangent kernels need real floating-point parameters.")
    return tuple(names)


def _select(model: nn.Module, every: Mapping[str, Tensor], trainable: Trainable) -> set[str]:
    # A tied parameter goes by its first name, whichever of its names was given.
    canonical = {name: k for name, p in model.named_parameters(remove_duplicate=False) for k in every if every[k] is p}
    if isinstance(trainable, str):
        chosen = {canonical[k] for k in canonical if k == trainable or k.startswith(trainable + ".")}
        if not chosen:
            candidates = [*canonical, *(n for n, _ in model.named_modules() if n)]
            raise InputError(
                f"trainable={trainable!r} names no parameter and no module.{suggest(trainable, candidates)}"
            )
        return chosen
    if isinstance(trainable, nn.Module):
        ids = {id(p) for p in trainable.parameters()}
        chosen = {k for k, p in every.items() if id(p) in ids}
        if not chosen:
            raise InputError("trainable= is a module that has no parameters of this model. Pass one of its submodules.")
        return chosen
    if callable(trainable):
        return {k for k, p in every.items() if trainable(k, p)}
    if isinstance(trainable, Iterable):
        return set().union(*(_select(model, every, t) for t in trainable))
    raise InputError(
        f"trainable={trainable!r}; needed: a name, a module, a predicate (name, parameter) -> bool, or a list."
    )


def state_dict(params: object) -> None:
    """`params=` must be a mapping from names to tensors."""
    if not isinstance(params, Mapping) or not all(isinstance(v, Tensor) for v in params.values()):
        given = f"a {type(params).__name__}" + " of other things than tensors" * isinstance(params, Mapping)
        raise InputError(f"params= is {given}; needed: a state dict, from names to tensors: model.state_dict().")


def params(params: Params, model: nn.Module) -> None:
    """`params=` must fit the model: no unknown, missing or misshapen entry."""
    # Under all names: a state dict has tied parameters under each of theirs.
    held = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    unknown = [k for k in params if k not in held]
    if unknown:
        raise InputError(
            f"params= has entries that the model lacks: {some(unknown)}.{suggest(unknown[0], held)} Pass a state dict "
            "of this model."
        )
    missing = [k for k, _ in model.named_parameters() if k not in params]
    if missing:
        raise InputError(f"params= lacks {some(missing)}. Pass the whole state dict: model.state_dict().")
    for k, v in params.items():
        if v.shape != held[k].shape:
            raise InputError(f"params[{k!r}] has shape {tuple(v.shape)}; the model's is {tuple(held[k].shape)}.")


def memory(given: int | str | None, name: str = "memory") -> int | None:
    """Bytes from a number or a string such as '4GiB' or '500 MB'."""
    # True is an int, too, and nobody means one byte by it.
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        if given is not None and given <= 0:
            raise InputError(f"{name}={given}; needed: a positive number of bytes, or a string such as '4GiB'.")
        return given
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", given.lower()) if isinstance(given, str) else None
    if match is None or float(match[1]) <= 0:
        raise InputError(f"{name}={given!r}; needed: a number of bytes, or a string such as '4GiB' or '500MB'.")
    # "4GiB" and "4096" count in 1024s, "4GB" in 1000s.
    base = 1024 if match[3] or match[2] == "" else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2] or " "))


def nonnegative(value: object, name: str) -> float:
    """A finite number, at least 0."""
    try:
        if isinstance(value, (str, bool)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
    except OverflowError:  # a whole number beyond every float
        number = float("inf")
    except (TypeError, ValueError):
        raise InputError(f"{name}={value!r}; needed: a number, at least 0.") from None
    if not 0 <= number < float("inf"):
        raise InputError(f"{name}={number:g}; needed: a finite number, at least 0.")
    return number


def positive(value: object, name: str, what: str) -> None:
    """An integer, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name}={value!r}; needed: {what}, at least 1.")


def beside(value: Tensor, device: torch.device | None, name: str, other: str = "K") -> None:
    """On the same device as `other`, which is None if it lies on disk."""
    if device is not None and value.device != device:
        raise InputError(f"{other} is on {device}, {name} on {value.device}. Move one: .to({str(device)!r}).")


def fraction(value: float, name: str) -> float:
    """A part of something: at least 0, below 1."""
    if not 0 <= value < 1:
        raise InputError(f"{name}={value}; needed: a fraction of the largest, at least 0, below 1.")
    return value


def choice(value: object, name: str, choices: Iterable[str], more: str = "") -> str:
    """`value`, which must be one of `choices`; `more` says what else the option takes."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        listed = ", ".join(map(repr, known)) + more
        raise InputError(f"{name}={value!r}; needed: {listed}.{suggest(str(value), known)}")
    return value


def finite(value: Tensor, name: str) -> None:
    """No NaN, no infinity. Their sum first, which takes no memory: it is finite only if they are."""
    if not value.is_floating_point() or bool(value.sum().isfinite()):
        return
    if not bool(value.isfinite().all()):
        where = tuple((~value.isfinite()).nonzero()[0].tolist())
        raise InputError(f"{name}[{', '.join(map(str, where))}] is {float(value[where])}; needed: finite numbers.")


def some(names: list[str], most: int = 4) -> str:
    """The first few of some names, and how many more there are.

    >>> some(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def layers(found: list[tuple[str, nn.Module]]) -> str:
    """Modules of a model by kind and name, to begin a sentence with.

    >>> layers([("1", nn.Dropout()), ("3", nn.Dropout())])
    "Dropout layers '1' and '3'"
    >>> layers([("1", nn.Dropout()), ("2", nn.LSTM(1, 1))])
    "layers '1' (Dropout) and '2' (LSTM)"
    """
    kinds = [type(m).__name__ for _, m in found]
    names = [repr(name) for name, _ in found]
    if found[0][0] == "":  # the model itself
        return f"the model, a {kinds[0]} layer,"
    alike = len(set(kinds)) == 1
    shown = names if alike else [f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True)]
    more = f" and {len(shown) - 4} more" if len(shown) > 4 else ""
    head = shown[:4] if more else shown
    listed = ", ".join(head) if more else " and ".join(filter(None, [", ".join(head[:-1]), head[-1]]))
    return f"{kinds[0] + ' ' if alike else ''}layer{'s' * (len(found) > 1)} {listed}{more}"


def suggest(name: str, candidates: Iterable[str]) -> str:
    """What a misspelt name may have been meant for, as a sentence; nothing where none is like it."""
    close = difflib.get_close_matches(name, list(candidates), n=2)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
