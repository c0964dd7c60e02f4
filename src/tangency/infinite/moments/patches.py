"""Values as functions of fields over windows of positions: how they come about, and how they join with others."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from .fields import Builder
from .origins import function_of, gaussian_origin
from .values import Field, Lazy, Patched, Random, Value, correlated
from .windows import WIDEST, Core, Parameters, Windows

AVERAGE = "Use average pooling: nn.AvgPool2d(k) for nn.MaxPool2d(k), x.mean(dim) for x.amax(dim)"


def is_patched(build: Builder, value: Value) -> bool:
    """Whether a value is a function of windows."""
    return _known_patches(build, value) is not None


def _known_patches(build: Builder, value: Value) -> Patched | None:
    if isinstance(value, Field):
        value = function_of(build, value) or value
    return value if isinstance(value, Patched) else None


def as_patches(build: Builder, value: Value) -> Patched | None:
    """A value as a function of fields over windows (of one position, where it is elementwise); None if it is none."""
    known = _known_patches(build, value)
    if known is not None or isinstance(value, Tensor):
        return known
    # The derivative by a slope of PReLU's is no part of the function.
    origin = None if isinstance(value, Lazy) and value.rate else gaussian_origin(build, value)
    if origin is None:
        return None
    of, fn = origin
    return Patched(of, (Windows.same(of[0].grid),) * len(of), _first(fn), value.shape, value.channel, "windows")


def _first(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The function of the only entry of each window."""
    return lambda *x: fn(*(v[0] for v in x))


def joined_patches(build: Builder, values: Sequence[Value], op: Callable[[Tensor, Tensor], Tensor]) -> Patched | None:
    """The sum (or product) of such functions, as one; None where it is none, or fields are correlated."""
    parts = [as_patches(build, value) for value in values]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts):
        return None
    of: dict[object, Field | Parameters] = {}
    at: dict[object, Windows] = {}
    places: list[list[tuple[object, slice]]] = []
    for part in known:
        place: list[tuple[object, slice]] = []
        for source, windows in zip(part.of, part.at, strict=True):
            key: object = source.node if isinstance(source, Field) else source
            # A field that both read has both windows side by side.
            start = at[key].size if key in at else 0
            at[key] = at[key].beside(windows) if key in at else windows
            of.setdefault(key, source)
            place.append((key, slice(start, start + windows.size)))
        places.append(place)
    fields = [f for f in of.values() if isinstance(f, Field)]
    # Uncorrelated Gaussian fields are independent; for others the joint law is not known here.
    if any(correlated(a, b) for k, a in enumerate(fields) for b in fields[:k]):
        return None
    shares = [build.memory.shares[p] for p in of.values() if isinstance(p, Parameters) and p in build.memory.shares]
    if any(p is q and set(m) & set(n) for k, (p, m) in enumerate(shares) for q, n in shares[:k]):
        return None  # filters of some channels that both have
    order = {key: k for k, key in enumerate(of)}

    def together(*x: Tensor) -> Tensor:
        """All functions, each of its own windows."""
        found = [
            part.fn(*(x[order[key]][cut] for key, cut in place)) for part, place in zip(known, places, strict=True)
        ]
        total = found[0]
        for v in found[1:]:
            total = op(total, v)
        return total

    first = known[0]
    return checked_patches(
        build, Patched(tuple(of.values()), tuple(at.values()), together, first.shape, first.channel, "sum")
    )


def checked_patches(build: Builder, value: Patched) -> Patched:
    """Refuse windows that are too wide for quasi-random points."""
    if value.width > WIDEST:
        raise build.unsupported(
            f"depends on {value.width} positions at once; expectations are drawn over up to {WIDEST}.", f"{AVERAGE}."
        )
    return value


def scaled_patches(build: Builder, value: Random, factor: float, rates: tuple[float, float]) -> Patched | None:
    """factor·(γ y + β) with trained γ = 1 and β = 0 of each channel's own, as a function; None if y is none."""
    patches = as_patches(build, value)
    if patches is None:
        return None
    fn, grid = patches.fn, patches.at[0].grid
    one = Windows(grid, ((0,),) * len(patches.at[0].index))
    scale, shift = Parameters(1, 1.0, 0.0, rates[0]), Parameters(1, 0.0, 0.0, rates[1])

    def normed(*x: Tensor) -> Tensor:
        """γ and β come last."""
        return x[-2][0] * factor * fn(*x[:-2]) + x[-1][0]

    core = None if patches.core is None else _normed_core(patches.core, factor)
    return replace(patches, of=(*patches.of, scale, shift), at=(*patches.at, one, one), fn=normed, core=core)


def _normed_core(core: Core, factor: float) -> Core:
    """That of factor·(γ y + β), γ and β last."""
    inner, outer = core.inner, core.outer
    return Core(lambda *x: inner(*x[:-2]), lambda z, *x: x[-2][0] * factor * outer(z, *x[:-2]) + x[-1][0])


def same_windows(build: Builder, a: Random, b: Random, op: Callable[[Tensor, Tensor], Tensor]) -> Patched | None:
    """Two functions of windows that share a field, joined; None if they share none."""
    if not (is_patched(build, a) or is_patched(build, b)):
        return None
    left, right = as_patches(build, a), as_patches(build, b)
    if left is None or right is None or not any(correlated(f, g) for f in left.fields for g in right.fields):
        return None
    return joined_patches(build, [a, b], op)
