"""Every input check, with its message: what was given, what is needed, the fix. All run before expensive work."""

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InputError, ModelError
from . import tree
from .types import Inputs

_NORMS = (nn.modules.batchnorm._NormBase,)
_DROPOUTS = (nn.modules.dropout._DropoutNd, nn.RReLU)


def evaluation_mode(model: nn.Module) -> None:
    """Refuse modules whose training behaviour makes the kernel random or mixes the samples of a batch."""
    random = [n for n, m in tree.own_modules(model, _DROPOUTS) if m.training and getattr(m, "p", 1) > 0]
    random += [n for n, m in tree.own_modules(model, (nn.RNNBase, nn.MultiheadAttention)) if m.training and m.dropout]
    mixing = [
        n
        for n, m in tree.own_modules(model, _NORMS)
        if not isinstance(m, nn.modules.instancenorm._InstanceNorm)
        and (m.training or not m.track_running_stats or m.running_mean is None)
    ]
    if random:
        raise ModelError(
            f"{some(random)} in training mode make the model random, so it has no kernel. Call model.eval() first."
        )
    if mixing:
        hint = (
            "Call model.eval() first"
            if any(model.get_submodule(_path(n)).training for n in mixing)
            else ("Build them with track_running_stats=True")
        )
        raise ModelError(
            f"{some(mixing)} use the statistics of the batch, so one sample's output depends on the others. {hint}."
        )


def inputs(x: Inputs, name: str = "x") -> None:
    """A tensor, tuple or dict with the same number (> 0) of samples in every leading dimension."""
    if not isinstance(x, (Tensor, Mapping, tuple, list)):
        raise InputError(
            f"{name} is a {type(x).__name__}; needed: a tensor, or a tuple or dict of tensors with the sample in the "
            f"leading dimension. Use torch.as_tensor({name})."
        )
    found = list(tree.leaves(x))
    if not found:
        raise InputError(f"{name} holds no tensor; needed: at least one with the sample in the leading dimension.")
    for label, v in found:
        if v.dim() == 0:
            raise InputError(f"{_rename(label, name)} is a scalar; needed: the sample in the leading dimension.")
    sizes = {_rename(label, name): v.shape[0] for label, v in found}
    if len(set(sizes.values())) > 1:
        raise InputError(f"the inputs disagree on the number of samples: {sizes}. Each leading dimension counts them.")
    if 0 in sizes.values():
        shapes = ", ".join(f"{_rename(label, name)} of shape {tuple(v.shape)}" for label, v in found)
        raise InputError(f"a batch of zero samples was given ({shapes}); a kernel needs at least one.")


def computable(dtypes: Iterable[torch.dtype]) -> None:
    """16-bit parameters need a decision about the arithmetic."""
    for dtype in dtypes:
        if dtype not in (torch.float32, torch.float64):
            raise InputError(
                f"the parameters are {dtype}. Say in what to compute: dtype='float32', or dtype='float16' for 16-bit "
                "factors with 32-bit sums."
            )


def same_place(x: Inputs, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Inputs and parameters on one device, in one floating-point type."""
    want = next(iter(dtypes))
    for label, v in tree.leaves(x):
        if v.device != device:
            raise InputError(
                f"{label} is on {v.device}, the parameters are on {device}. Move one: x.to({str(device)!r})."
            )
        if v.is_floating_point() and v.dtype not in dtypes:
            raise InputError(
                f"{label} is {v.dtype}, the parameters are {want}. Cast one (x.to({want})), or pass dtype= to the "
                "kernel, which casts both."
            )


def same_form(x: Inputs, y: Inputs) -> None:
    """x and y must be two batches of the same kind of thing."""
    left, right = dict(tree.leaves(x)), dict(tree.leaves(y))
    if left.keys() != right.keys() or isinstance(x, Mapping) != isinstance(y, Mapping):
        raise InputError(
            f"x and y differ in form: x has {sorted(left)}, y has {sorted(right)}. Both must be inputs of one model."
        )
    for label in left:
        a, b = left[label], right[label]
        if a.dim() != b.dim() or a.dtype != b.dtype or a.device != b.device:
            raise InputError(
                f"x and y differ: {label} is {tuple(a.shape)} {a.dtype} on {a.device} in x, "
                f"{tuple(b.shape)} {b.dtype} on {b.device} in y. Give both alike."
            )


def state_dict(given: Mapping[str, Tensor], model: nn.Module) -> None:
    """`params=` must fit the model: no unknown, missing or misshapen entry."""
    own = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    unknown = [k for k in given if k not in own]
    if unknown:
        raise InputError(
            f"params= has entries that the model lacks: {some(unknown)}.{suggest(unknown[0], own)} "
            "Pass a state dict of this model."
        )
    missing = [k for k, _ in model.named_parameters() if k not in given]
    if missing:
        raise InputError(f"params= lacks {some(missing)}. Pass the whole state dict: model.state_dict().")
    for k, v in given.items():
        if v.shape != own[k].shape:
            raise InputError(f"params[{k!r}] has shape {tuple(v.shape)}; the model's is {tuple(own[k].shape)}.")


# How torch words it where a layer cannot take its input: by the numbers' type, or by the shape.
_TYPES = re.compile(r"dtype|same type|scalar type|should be the same")
_SHAPES = re.compile(
    r"shapes? cannot|size mismatch|size of tensor|channels|normalized_shape|[eE]xpected .*\dD|incompatible"
)


def misfit(e: RuntimeError, x: Inputs, name: str, dtype: torch.dtype | None) -> InputError | None:
    """What to say of samples x where a model failed on their type or shape; None where it failed for another reason."""
    text = next(iter(str(e).splitlines()), "")
    types = [v.dtype for _, v in tree.leaves(x)]
    if _TYPES.search(text):
        want = dtype or torch.float32
        scale = f" (divided by 255, if the network was trained so: {name}.float() / 255)" * (torch.uint8 in types)
        fix = f"Give it in the type of the parameters: {name}.to({want}){scale}."
    elif _SHAPES.search(text):
        fix = "Give samples of the shape that the network was made for."
    else:
        return None
    given = ", ".join(f"{_rename(label, name)} is {v.dtype} of shape {tuple(v.shape)}" for label, v in tree.leaves(x))
    return InputError(f"the network cannot take these samples: {given} ({text}). {fix}")


Train = str | nn.Module | Callable[[str, Tensor], bool] | Iterable[Any] | None


def trained(model: nn.Module, train: Train) -> tuple[str, ...]:
    """The names of the parameters that count: by default those with requires_grad."""
    every = dict(model.named_parameters())
    if not every:
        raise InputError("the model has no parameters, so it has no tangent kernel.")
    if train is None:
        names = [k for k, p in every.items() if p.requires_grad]
        if not names:
            raise InputError(
                "every parameter is frozen (requires_grad=False), so no parameter counts. Say which do: train='…' "
                "(a name or a module), or train=lambda name, p: True for all."
            )
    else:
        names = [k for k in every if k in _select(model, every, train)]
        if not names:
            raise InputError(f"train={train!r} selects none of the {len(every)} parameters, e.g. {some(list(every))}.")
    for k in names:
        if not every[k].is_floating_point():
            raise InputError(f"parameter {k} is {every[k].dtype}; tangent kernels need real floating-point parameters.")
    return tuple(names)


def _select(model: nn.Module, every: Mapping[str, Tensor], train: Train) -> set[str]:
    # A tied parameter goes by its first name, whichever of its names was given.
    canonical = {name: k for name, p in model.named_parameters(remove_duplicate=False) for k in every if every[k] is p}
    if isinstance(train, str):
        chosen = {canonical[k] for k in canonical if k == train or k.startswith(train + ".")}
        if not chosen:
            candidates = [*canonical, *(n for n, _ in model.named_modules() if n)]
            raise InputError(f"train={train!r} names no parameter and no module.{suggest(train, candidates)}")
        return chosen
    if isinstance(train, nn.Module):
        ids = {id(p) for p in train.parameters()}
        chosen = {k for k, p in every.items() if id(p) in ids}
        if not chosen:
            raise InputError("train= is a module that has no parameters of this model. Pass one of its submodules.")
        return chosen
    if callable(train):
        return {k for k, p in every.items() if train(k, p)}
    if isinstance(train, Iterable):
        return set().union(*(_select(model, every, t) for t in train))
    raise InputError(f"train={train!r}; needed: a name, a module, a predicate (name, parameter) -> bool, or a list.")


_DTYPES = {"float64": torch.float64, "float32": torch.float32, "tf32": torch.float32, "float16": torch.float32}


def precision(dtype: object) -> str | None:
    """'float64', 'float32', 'tf32', 'float16' or None (as the parameters are)."""
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, (str, torch.dtype)) else dtype
    if name is not None and name not in _DTYPES:
        raise InputError(
            f"dtype={dtype!r}; needed: float64, float32, 'tf32' or float16 (16-bit factors, 32-bit sums), or None."
        )
    return None if name is None else str(name)


def storage(name: str | None) -> torch.dtype | None:
    return None if name is None else _DTYPES[name]


def memory(given: int | str | None, name: str = "memory") -> int | None:
    """Bytes from a number or a string such as '4GiB' or '500 MB'."""
    if given is None or (isinstance(given, int) and not isinstance(given, bool)):
        if given is not None and given <= 0:
            raise InputError(f"{name}={given}; needed: a positive number of bytes, or a string such as '4GiB'.")
        return given
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b?\s*", given.lower()) if isinstance(given, str) else None
    if match is None or float(match[1]) <= 0:
        raise InputError(f"{name}={given!r}; needed: a number of bytes, or a string such as '4GiB' or '500MB'.")
    base = 1024 if match[3] or match[2] == "" else 1000
    return int(float(match[1]) * base ** " kmgt".index(match[2] or " "))


def nonnegative(value: object, name: str) -> float:
    """A finite number, at least 0."""
    try:
        if isinstance(value, (str, bool)):
            raise TypeError
        number = float(value)  # type: ignore[arg-type]
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


def _path(name: str) -> str:
    return "" if name == "model" else name


def _rename(label: str, name: str) -> str:
    return name + label[1:]


def some(names: list[str], most: int = 4) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def suggest(name: str, candidates: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(candidates), n=2)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""
