"""Inputs as trees: a tensor, a tuple (`model(*x)`) or a dict (`model(**x)`), the sample in each leading dimension.

The rule for what users give, wherever samples, targets or labels are taken: NumPy arrays are as good as tensors, in
tuples and dicts too (`tensors`, `numbers`); floating-point numbers of any width are brought to the type that is
computed in (`cast`; `narrowed` where a model might need the digits), integers and booleans stay as they are.
"""

import copy
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset

from ..errors import InputError
from .types import FeatureBatch, Inputs, Numbers


def leaves(x: Inputs) -> Iterator[tuple[str, Tensor]]:
    """The tensors of x with the names that error messages use; other values (flags, None) are passed through."""
    return _leaves("x", x)


def _leaves(name: str, x: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(x, Tensor):
        yield name, x
    elif isinstance(x, Mapping):
        for k, v in x.items():
            yield from _leaves(f"{name}[{k!r}]", v)
    elif isinstance(x, (tuple, list)):
        for j, v in enumerate(x):
            yield from _leaves(f"{name}[{j}]", v)
    elif isinstance(x, FeatureBatch):
        yield f"{name}.value", x.value


def tensors(x: Inputs, name: str = "x") -> Inputs:
    """x with a tensor for every NumPy array in it; tensors and other values (flags, None) are passed through."""
    if isinstance(x, np.ndarray):
        return from_array(x, name)
    if isinstance(x, Mapping):
        return {k: tensors(v, f"{name}[{k!r}]") for k, v in x.items()} if _has_arrays(x) else x
    if isinstance(x, (tuple, list)) and _has_arrays(x):
        parts = [tensors(v, f"{name}[{k}]") for k, v in enumerate(x)]
        return type(x)(*parts) if hasattr(x, "_fields") else tuple(parts)  # type: ignore[arg-type]  # a named tuple
    return x


def _has_arrays(x: object) -> bool:
    if isinstance(x, (Mapping, tuple, list)):
        return any(map(_has_arrays, x.values() if isinstance(x, Mapping) else x))
    return isinstance(x, np.ndarray)


def from_array(v: np.ndarray, name: str = "x") -> Tensor:
    """An array as a tensor, in the array's own memory where torch can share it.

    >>> from_array(np.arange(3)[::-1])
    tensor([2, 1, 0])
    """
    if isinstance(v, np.ma.MaskedArray):
        raise InputError(f"{name} is a masked array, whose mask would be lost. Give numbers: {name}.filled(…).")
    # What torch cannot hold is copied: another byte order, negative strides, memory that may not be written.
    array = np.asarray(v)
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if not array.flags.writeable or min(array.strides, default=0) < 0:
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError):
        raise InputError(
            f"{name} is an array of {v.dtype}, of which there are no tensors; needed: numbers of at most 64 bits, such "
            f"as {name}.astype(np.float32)."
        ) from None


def numbers(v: Numbers | float, name: str = "y") -> Tensor:
    """Targets, labels or weights as a tensor without a graph: of a tensor, an array, or a (nested) list of numbers.

    Numbers in a list are float64 or int64, as in NumPy.

    >>> numbers([0.5, 1])
    tensor([0.5000, 1.0000], dtype=torch.float64)
    """
    if isinstance(v, Tensor):
        return v.detach()
    try:
        array = v if isinstance(v, np.ndarray) else np.asarray(v)
    except (ValueError, TypeError, RuntimeError):  # rows of different lengths, tensors with a graph or on a GPU
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biufc":
        given = f"an array of {array.dtype}" if isinstance(v, np.ndarray) else f"a {type(v).__name__}"
        raise InputError(f"{name} is {given} and no table of numbers; needed: a tensor, an array or a list of numbers.")
    return from_array(array, name)


def transform(f: Callable[[Tensor], Tensor], x: Inputs) -> Inputs:
    """Apply f to every tensor of x, in tuples, lists and dicts within each other; a list becomes a tuple."""
    if isinstance(x, Tensor):
        return f(x)
    if isinstance(x, Mapping):
        return {k: transform(f, v) for k, v in x.items()}
    # A named tuple stays one: forward() may ask for its fields.
    if isinstance(x, tuple) and hasattr(x, "_fields"):
        return type(x)(*[transform(f, v) for v in x])  # type: ignore[arg-type]  # its fields, not an iterable
    if isinstance(x, (tuple, list)):
        return tuple(transform(f, v) for v in x)
    if isinstance(x, FeatureBatch):
        return replace(x, value=f(x.value))
    return x


def to(x: Inputs, device: torch.device) -> Inputs:
    """x with every tensor on a device. Copies to a GPU are not waited for; from one they are, or they could be read
    before they are there."""
    return transform(lambda v: v.to(device, non_blocking=device.type == "cuda"), x)


def size(x: Inputs) -> int:
    """The number of samples."""
    return next(leaves(x))[1].shape[0]


def take(x: Inputs, index: slice | Tensor) -> Inputs:
    """Some of the samples."""
    return transform(lambda v: v[index if isinstance(index, slice) else index.to(v.device)], x)


def split(x: Inputs, step: int) -> Iterator[Inputs]:
    """Batches of `step` samples, the last one with what is left."""
    n = size(x)
    return (take(x, slice(start, min(start + step, n))) for start in range(0, n, step))


def fill(x: Inputs, count: int) -> Inputs:
    """x with its last sample repeated until there are `count`."""
    missing = count - size(x)
    if missing == 0:
        return x
    return transform(lambda v: torch.cat([v, v[-1:].expand(missing, *v.shape[1:])]), x)


def cast(x: Inputs, dtype: torch.dtype | None, name: str = "x") -> Inputs:
    """x with its floating-point tensors in this type; as it is for None.

    Digits that the type has not are lost; a number that is too large for it is refused.
    """
    if dtype is None:
        return x
    labels = (_called(label, name) for label, _ in leaves(x))
    return transform(lambda v: cast_tensor(v, dtype, next(labels)), x)


def suited(x: Inputs, model: nn.Module, name: str = "x") -> Inputs:
    """What a user gave as samples, as this model takes it: in the type of its parameters, if that is one."""
    dtype, x = dtype_of(model), given(x, name)
    return x if dtype is None else narrowed(x, dtype, lambda part: copy_outputs(model, *arguments(part)), name)


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """The floating-point type of a model's parameters; None where they are of several, or there are none.

    >>> dtype_of(nn.Linear(2, 1).double())
    torch.float64
    """
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else None


def narrowed(x: Inputs, dtype: torch.dtype, run: Callable[[Inputs], Tensor], name: str = "x") -> Inputs:
    """As `cast`, but refused where the digits that are lost matter: to a model that takes the wider type itself.

    `run`: the model's outputs. Most models refuse the wider type at their first layer, and are then meant to be given
    their own; one that begins with (x - start).float() takes it, and would see other numbers.
    """
    made = cast(x, dtype, name)
    bits = torch.finfo(dtype).bits
    wider = next((v.dtype for _, v in leaves(x) if v.is_floating_point() and torch.finfo(v.dtype).bits > bits), None)
    if wider is None:
        return made
    try:
        run(take(x, slice(0, 1)))
    except Exception:  # of any kind: what the model says of x itself comes when it runs
        return made
    for wide, narrow in zip(split(x, 64), split(made, 64), strict=True):
        before, after = run(wide).double(), run(narrow).double()
        scale = float(before.abs().nan_to_num(0, 0, 0).max())
        if not torch.allclose(before, after, rtol=0, atol=1e-3 * scale, equal_nan=True):
            raise InputError(
                f"{name} is {wider}, which forward() takes as it is, and for {name} in {dtype}, the type of the "
                "parameters, it gives other outputs: the digits that would be lost matter. Do what forward() does to "
                f"them beforehand, or give {name}.to({dtype}) if the rounded numbers are meant."
            )
    return made


def copy_outputs(model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor:
    """All numbers that a model puts out, from a copy: the model stays as it is."""
    with torch.no_grad():
        returned = copy.deepcopy(model).eval()(*args, **kwargs)
    return torch.cat([v.flatten() for v in tree_leaves(returned) if isinstance(v, Tensor)])


def cast_tensor(v: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """As `cast`, of one tensor."""
    if v.dtype == dtype or not v.is_floating_point():
        return v
    made = v.to(dtype)
    # Wider types hold every number of a narrower one, and looking would wait for a GPU.
    if torch.finfo(v.dtype).max <= torch.finfo(dtype).max or bool(made.detach().isfinite().all()):
        return made
    lost = (made.isinf() & v.isfinite()).detach().nonzero()
    if len(lost):
        at = tuple(lost[0].tolist())
        raise InputError(
            f"{name}[{', '.join(map(str, at))}] is {float(v[at]):.6g}, too large for {dtype}, the type that is "
            f"computed in (it goes to {torch.finfo(dtype).max:.3g}). Scale it, or compute in float64: model.double(), "
            "or for a kernel its dtype='float64'."
        )
    return made


def normal(x: Inputs) -> Inputs:
    """x without tensors that were made in inference mode, which autograd refuses; not to be called in that mode."""
    return transform(lambda v: v.clone() if v.is_inference() else v, x)


def two_samples(x: Inputs) -> tuple[Inputs, int]:
    """The first sample and one that differs from it, and which; the first one twice (0) where there is none."""
    x = transform(lambda v: v.detach(), x)
    # Not through all of them: where the first 64 are alike, so are most, and looking would wait for a GPU each time.
    for other in range(1, min(size(x), 64)):
        if any(not torch.equal(v[0], v[other]) for _, v in leaves(x)):
            return take(x, torch.tensor([0, other])), other
    return take(x, torch.tensor([0, 0])), 0


def needs_grad(x: Inputs) -> bool:
    """Whether gradients with respect to x are wanted."""
    return torch.is_grad_enabled() and any(v.requires_grad for _, v in leaves(x))


def arguments(x: Inputs) -> tuple[tuple[object, ...], dict[str, object]]:
    """x as (args, kwargs) of a call."""
    if isinstance(x, Tensor):
        return (x,), {}
    if isinstance(x, Mapping):
        return (), dict(x)
    assert not isinstance(x, FeatureBatch)  # features are nobody's arguments: `check` refuses them
    return tuple(x), {}


def signature(x: Inputs) -> tuple[Hashable, ...]:
    """What decides how a model treats x: its structure, the types and shapes of a sample (not their number), and values
    that are no tensors."""

    def form(v: object) -> Hashable:
        """One value of the tree, as something that can be compared and hashed."""
        if isinstance(v, Tensor):
            return v.dtype, v.shape[1:], str(v.device)
        if isinstance(v, Mapping):
            return "dict", tuple((k, form(w)) for k, w in v.items())
        if isinstance(v, (tuple, list)):
            return "tuple", tuple(form(w) for w in v)
        # What is neither a tensor nor a number may do anything: it is known by its identity.
        return type(v), v if isinstance(v, (bool, int, float, str, type(None))) else id(v)

    return (form(x),)


def rebuild(x: Inputs, values: Iterable[Tensor]) -> Inputs:
    """x with its tensors replaced, in the order of `leaves`."""
    new = iter(values)
    return transform(lambda _: next(new), x)


def given(x: Inputs, name: str = "x") -> Inputs:
    """What a user gave as samples, with tensors for arrays, and checked."""
    x = tensors(x, name)
    check(x, name)
    return x


def advice(x: object, name: str) -> str:
    """What to give in place of a torch data set or loader, or of samples with their classes; else nothing."""
    if isinstance(x, Dataset):
        return f" Of a data set: tg.compute(kernel, tg.from_dataset({name}, pick=0)), which loads it block by block."
    if isinstance(x, DataLoader):
        return f" Give its data set: tg.compute(kernel, tg.from_dataset({name}.dataset, pick=0))."
    if hasattr(x, "take") and hasattr(x, "digest"):
        return f" Samples that are loaded block by block go to tg.compute(kernel, {name})."
    if type(x).__module__.startswith("scipy.sparse"):
        return f" Of a sparse matrix: {name}.toarray()."
    # `Labelled` lives floors above: what has inputs and their classes is one.
    return f" Give the inputs alone: {name}.x." if hasattr(x, "x") and hasattr(x, "classes") else ""


def check(x: Inputs, name: str = "x") -> None:
    """Refuse what is not a tensor, tuple or dict with the same number (> 0) of samples in every leading dimension."""
    if not isinstance(x, (Tensor, Mapping, tuple, list)):
        fix = advice(x, name) or f" Of a table or a list of numbers: numpy.asarray({name})."
        raise InputError(
            f"{name} is a {type(x).__name__}; needed: a tensor or NumPy array, or a tuple or dict of them, with the "
            f"sample in the leading dimension.{fix}"
        )
    found = list(leaves(x))
    if not found:
        raise InputError(
            f"{name} holds no tensor or array; needed: at least one with the sample in the leading dimension. Of a "
            f"list of numbers: numpy.asarray({name})."
        )
    for label, v in found:
        check_layout(v, _called(label, name))
        if v.dim() == 0:
            raise InputError(f"{_called(label, name)} is a scalar; needed: the sample in the leading dimension.")
    sizes = {_called(label, name): v.shape[0] for label, v in found}
    if len(set(sizes.values())) > 1:
        raise InputError(f"the inputs disagree on the number of samples: {sizes}. Each leading dimension counts them.")
    if 0 in sizes.values():
        shapes = ", ".join(f"{_called(label, name)} of shape {tuple(v.shape)}" for label, v in found)
        raise InputError(f"a batch of zero samples was given ({shapes}); a kernel needs at least one.")


def check_layout(v: Tensor, name: str) -> None:
    """Refuse tensors that cannot be cut into samples as others are."""
    if v.is_nested:
        raise InputError(
            f"{name} is a nested tensor; needed: samples of one shape. Pad them: {name}.to_padded_tensor(0.0)."
        )
    if v.layout != torch.strided:
        raise InputError(f"{name} is a sparse tensor; needed: a dense one, {name}.to_dense().")
    if v.is_quantized:
        raise InputError(f"{name} is a quantized tensor; needed: its numbers, {name}.dequantize().")


def check_place(x: Inputs, device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Refuse inputs that are not where the parameters are: on one device, in one floating-point type."""
    # Models may mix types (a norm in 32 bits); one of them is enough to say what is meant.
    want = next(iter(dtypes))
    for label, v in leaves(x):
        if v.device != device:
            raise InputError(
                f"{label} is on {v.device}, the parameters are on {device}. Move one: x.to({str(device)!r})."
            )
        if v.is_floating_point() and v.dtype not in dtypes:
            raise InputError(
                f"{label} is {v.dtype}, the parameters are {want}. Cast one (x.to({want})), or pass dtype= to the "
                "kernel, which casts both."
            )


def check_alike(x1: Inputs, x2: Inputs) -> None:
    """Refuse two batches that are not the same kind of thing."""
    left, right = dict(leaves(x1)), dict(leaves(x2))
    if left.keys() != right.keys() or isinstance(x1, Mapping) != isinstance(x2, Mapping):
        raise InputError(
            f"x1 and x2 differ in form: x1 has {sorted(left)}, x2 has {sorted(right)}. Both must be inputs of one "
            "model."
        )
    for label in left:
        a, b = left[label], right[label]
        if a.dim() != b.dim() or a.dtype != b.dtype or a.device != b.device:
            raise InputError(
                f"x1 and x2 differ: {label} is {tuple(a.shape)} {a.dtype} on {a.device} in x1, "
                f"{tuple(b.shape)} {b.dtype} on {b.device} in x2. Give both alike."
            )


def _called(label: str, name: str) -> str:
    """A label of `leaves`, which start with x, under the name that the user knows."""
    return name + label[1:]
