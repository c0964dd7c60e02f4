"""Samples that a model cannot take, said in words: which layer takes what, and what it was given."""

import inspect
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ..errors import InputError, TangencyError
from . import tree
from .types import Inputs

# What torch raises where samples do not fit a layer.
FAILURES = (RuntimeError, IndexError, ValueError, AssertionError, TypeError)
# How torch words it where a layer cannot take its input: by the numbers' type, or by the shape.
_ABOUT_TYPES = re.compile(r"dtype|same type|scalar type|should be the same|tensor for argument")
_ABOUT_SHAPES = re.compile(
    r"shapes? cannot|size mismatch|size of tensor|channels|normalized_shape|[eE]xpected .*\dD|incompatible|"
    r"must be equal to input_size|index out of range|can't be greater than actual|embedding dim|running_mean"
)
_INDEX_TYPES = (torch.int32, torch.int64)
# How the layers of torch call what they are given.
_INPUTS = ("input", "query")
_NORM_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}
Layer = tuple[str, nn.Module, Tensor]  # its name in words, itself, what it was given


@contextmanager
def in_words(x: Inputs, name: str = "x", dtype: torch.dtype | None = None) -> Iterator[None]:
    """Within it, where a model cannot take the samples x, that is what is said, in place of torch's own words."""
    try:
        yield
    except FAILURES as e:
        refusal = misfit(e, x, name, dtype)
        if refusal is None:
            raise
        raise refusal from e


def misfit(e: Exception, x: Inputs, name: str, dtype: torch.dtype | None) -> InputError | None:
    """What to say of samples x where a model failed on their type or shape; None where it failed for another reason.

    `dtype`: the one that is computed in; None where each layer has its own.
    """
    text = next(iter(str(e).splitlines()), "")
    if isinstance(e, TypeError):
        return _miscalled(e, x, name)
    if isinstance(e, TangencyError) or not (_ABOUT_TYPES.search(text) or _ABOUT_SHAPES.search(text)):
        return None
    leaves = [(name + label[1:], v) for label, v in tree.leaves(x)]
    given = ", ".join(f"{label} is {v.dtype} of shape {tuple(v.shape)}" for label, v in leaves)
    layer = _failed(e)
    words = "" if layer is None else _misfit_of(*layer, leaves)
    fix = "Give samples of the shape that the network was made for."
    indices = layer is not None and isinstance(layer[1], (nn.Embedding, nn.EmbeddingBag))
    if indices:
        fix = "Give whole numbers within these, or an embedding of more rows."
        if layer is not None and layer[2].dtype not in _INDEX_TYPES and not layer[2].is_floating_point():
            fix = f"Give them in a type that torch can look up: {name}.long(), of an array {name}.astype('int64')."
    elif not words and _ABOUT_TYPES.search(text):
        want = dtype or (None if layer is None else _own_type(layer[1])) or torch.float32
        if layer is None and all(v.dtype == want for _, v in leaves):
            return None  # a head's trouble, or the model's own
        where = "" if layer is None else f"{layer[0]} takes {want}: "
        fix = _type_fix(layer, leaves, name, want)
        return InputError(f"the network cannot take these samples: {where}{given}. {fix}")
    if words:
        return InputError(f"{words}: {given}. {fix}")
    return InputError(f"the network cannot take these samples: {given}. {fix} (torch: {text})")


def _type_fix(layer: Layer | None, leaves: list[tuple[str, Tensor]], name: str, want: torch.dtype) -> str:
    """What to do where numbers are of another type than a layer takes."""
    kinds = {v.dtype for _, v in leaves}
    reached = None if layer is None else layer[2].dtype
    if any(kind.is_complex for kind in kinds) and (reached is None or reached.is_complex):
        return f"It takes real numbers: give {name}.abs(), or both parts as features: torch.view_as_real({name})."
    if torch.complex128 in kinds:
        return f"Give it in as many digits as the parameters have: {name}.to(torch.complex64)."
    if reached is not None and reached != want and want in kinds and reached not in kinds:
        return (
            f"What reaches that layer is {reached}: forward() casts on the way (.float(), say). Cast to the type of "
            "the layer's parameters there; or, if the kernel was given a dtype=, leave it out: it casts all parameters."
        )
    scale = f" (divided by 255, if the network was trained so: {name}.float() / 255)" * (torch.uint8 in kinds)
    return f"Give it in the type of the parameters: {name}.to({want}){scale}."


def _miscalled(e: TypeError, x: Inputs, name: str) -> InputError | None:
    """Where forward() has other arguments than x gives: what it takes, and what it was given."""
    frames = [frame for frame, _ in traceback.walk_tb(e.__traceback__)]
    modules = [m for frame in frames if isinstance(m := frame.f_locals.get("self"), nn.Module) and not _ours(m)]
    # Raised by the call of the model itself: a layer that is called wrongly is the model's own trouble.
    if (
        frames[-1].f_code.co_name not in ("_call_impl", "inner")
        or not modules
        or any(m is not modules[0] for m in modules)
    ):
        return None
    model = modules[0]
    takes = ", ".join(_argument(p) for p in inspect.signature(model.forward).parameters.values())
    words = f"{type(model).__name__}.forward() takes ({takes})"
    if isinstance(x, Mapping):
        return InputError(
            f"{words}; the dict {name} has {', '.join(map(repr, x))}. Give its inputs the names that forward() has."
        )
    args = tree.arguments(x)[0]
    shapes = {v.shape if isinstance(v, Tensor) else None for v in args}
    if len(args) > 1 and len(shapes) == 1:
        fix = f"Of a list of samples make one tensor: torch.stack({name}), of arrays numpy.stack({name})."
    else:
        last = args[-1]
        labels = len(args) > 1 and isinstance(last, Tensor) and last.dim() == 1
        fix = f"If the last are labels, give the samples alone: {name}[0]." if labels else "Give a tuple with one each."
    return InputError(f"{words}; {name} has {len(args)} input{'s' * (len(args) != 1)}. {fix}")


def _argument(p: inspect.Parameter) -> str:
    """As it stands in a signature, without types and values."""
    stars = "*" * (p.kind == p.VAR_POSITIONAL) + "**" * (p.kind == p.VAR_KEYWORD)
    return f"{stars}{p.name}" + "=…" * (p.default is not p.empty)


def _ours(module: nn.Module) -> bool:
    """Modules of ours around the user's give its layers other names."""
    return type(module).__module__.startswith(("tangency.dynamics", "tangency.engine"))


def _failed(e: Exception) -> Layer | None:
    """The innermost layer that was running when e was raised, and what it was given."""
    model: nn.Module | None = None
    found: tuple[nn.Module, Tensor] | None = None
    for frame, _ in traceback.walk_tb(e.__traceback__):
        module = frame.f_locals.get("self")
        if not isinstance(module, nn.Module):
            continue
        model = module if model is None and not _ours(module) else model
        value = next((v for key in _INPUTS if isinstance(v := frame.f_locals.get(key), Tensor)), None)
        if value is not None:
            found = module, value
    if model is None or found is None:
        return None
    name = next((name for name, m in model.named_modules() if m is found[0]), "")
    kind = type(found[0]).__name__
    return (f"{kind} {name!r}" if name else f"the {kind} layer"), *found


def _misfit_of(words: str, layer: nn.Module, v: Tensor, leaves: list[tuple[str, Tensor]]) -> str:
    """That the layer takes something else than it was given; nothing where that is not the trouble."""
    takes, got = _takes(layer, v)
    if not takes:
        return ""
    # By its shape: the layer may have been given a part of the samples, or a copy.
    source = next((label for label, leaf in leaves if leaf.dim() == v.dim() and leaf.shape[1:] == v.shape[1:]), None)
    return f"{words} takes {takes}, {source} has {got}" if source else f"{words} takes {takes}, and is given {got}"


def _takes(layer: nn.Module, v: Tensor) -> tuple[str, str]:
    """What a layer takes, and what v has in its place; two empty strings where it could take v."""
    if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)):
        return _indices(layer.num_embeddings, v)
    if isinstance(layer, nn.modules.conv._ConvNd):
        window = len(layer.kernel_size)
        if v.dim() != window + 2:
            sides = ", ".join("dhw"[3 - window :])
            return f"{window + 2} dimensions [n, {layer.in_channels}, {sides}]", str(v.dim())
        if v.shape[1] == layer.in_channels:
            return _window(layer, v)
        return _count(layer.in_channels, v, 1, "channels")
    for kind, dims in _NORM_DIMS.items():
        if isinstance(layer, kind) and v.dim() not in dims:
            return f"{' or '.join(map(str, dims))} dimensions", str(v.dim())
    if isinstance(layer, nn.modules.batchnorm._NormBase):
        return _count(layer.num_features, v, 1, "channels")
    if isinstance(layer, nn.GroupNorm):
        return _count(layer.num_channels, v, 1, "channels")
    if isinstance(layer, (nn.LayerNorm, nn.RMSNorm)):
        last = list(v.shape[-len(layer.normalized_shape) :])
        return ("", "") if last == list(layer.normalized_shape) else (f"{list(layer.normalized_shape)}", str(last))
    if isinstance(layer, nn.RNNBase) and v.dim() not in (2, 3):
        return "3 dimensions (samples, positions, features)", str(v.dim())
    if isinstance(layer, nn.Linear):
        return _count(layer.in_features, v, -1, "features")
    if isinstance(layer, nn.RNNBase):
        return _count(layer.input_size, v, -1, "features")
    return _count(layer.embed_dim, v, -1, "features") if isinstance(layer, nn.MultiheadAttention) else ("", "")


def _count(needed: int, v: Tensor, dim: int, of: str) -> tuple[str, str]:
    """So many of something in a dimension of v; none where v has only its samples."""
    there = v.shape[dim] if v.dim() > 1 else 0
    return ("", "") if there == needed else (f"{needed} {of}", str(there or "none"))


def _window(layer: nn.modules.conv._ConvNd, v: Tensor) -> tuple[str, str]:
    """Positions enough for one window."""
    padding = layer._reversed_padding_repeated_twice[::-2]
    least = [d * (k - 1) + 1 - 2 * p for d, k, p in zip(layer.dilation, layer.kernel_size, padding, strict=True)]
    there = list(v.shape[2:])
    return ("", "") if all(map(int.__ge__, there, least)) else (f"at least {least} positions", str(there))


def _indices(rows: int, v: Tensor) -> tuple[str, str]:
    takes = f"whole numbers from 0 to {rows - 1}"
    if v.dtype not in _INDEX_TYPES:
        return takes, str(v.dtype)
    low, high = int(v.min()), int(v.max())
    return ("", "") if low >= 0 and high < rows else (takes, str(low if low < 0 else high))


def _own_type(layer: nn.Module) -> torch.dtype | None:
    return next((p.dtype for p in layer.parameters(recurse=False)), None)
