"""Inputs as trees: a tensor, a tuple (`model(*x)`) or a dict (`model(**x)`), the sample in each leading dimension."""

import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import InputError
from .types import FeatureBatch, Inputs


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


def cast(x: Inputs, dtype: torch.dtype | None) -> Inputs:
    """x with its floating-point tensors in this type; as it is for None."""
    if dtype is None:
        return x
    return transform(lambda v: v.to(dtype) if v.is_floating_point() else v, x)


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


def check(x: Inputs, name: str = "x") -> None:
    """Refuse what is not a tensor, tuple or dict with the same number (> 0) of samples in every leading dimension."""
    if not isinstance(x, (Tensor, Mapping, tuple, list)):
        raise InputError(
            f"{name} is a {type(x).__name__}; needed: a tensor, or a tuple or dict of tensors with the sample in the "
            f"leading dimension. Use torch.as_tensor({name})."
        )
    tensors = list(leaves(x))
    if not tensors:
        raise InputError(f"{name} holds no tensor; needed: at least one with the sample in the leading dimension.")
    for label, v in tensors:
        if v.dim() == 0:
            raise InputError(f"{_called(label, name)} is a scalar; needed: the sample in the leading dimension.")
    sizes = {_called(label, name): v.shape[0] for label, v in tensors}
    if len(set(sizes.values())) > 1:
        raise InputError(f"the inputs disagree on the number of samples: {sizes}. Each leading dimension counts them.")
    if 0 in sizes.values():
        shapes = ", ".join(f"{_called(label, name)} of shape {tuple(v.shape)}" for label, v in tensors)
        raise InputError(f"a batch of zero samples was given ({shapes}); a kernel needs at least one.")


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


# How torch words it where a layer cannot take its input: by the numbers' type, or by the shape.
_ABOUT_TYPES = re.compile(r"dtype|same type|scalar type|should be the same")
_ABOUT_SHAPES = re.compile(
    r"shapes? cannot|size mismatch|size of tensor|channels|normalized_shape|[eE]xpected .*\dD|incompatible"
)


def misfit(e: RuntimeError, x: Inputs, name: str, dtype: torch.dtype | None) -> InputError | None:
    """What to say of samples x where a model failed on their type or shape; None where it failed for another reason."""
    text = next(iter(str(e).splitlines()), "")
    types = [v.dtype for _, v in leaves(x)]
    if _ABOUT_TYPES.search(text):
        want = dtype or torch.float32
        scale = f" (divided by 255, if the network was trained so: {name}.float() / 255)" * (torch.uint8 in types)
        fix = f"Give it in the type of the parameters: {name}.to({want}){scale}."
    elif _ABOUT_SHAPES.search(text):
        fix = "Give samples of the shape that the network was made for."
    else:
        return None
    given = ", ".join(f"{_called(label, name)} is {v.dtype} of shape {tuple(v.shape)}" for label, v in leaves(x))
    return InputError(f"the network cannot take these samples: {given} ({text}). {fix}")


def _called(label: str, name: str) -> str:
    """A label of `leaves`, which start with x, under the name that the user knows."""
    return name + label[1:]
