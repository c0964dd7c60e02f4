"""What a `Monitor` can record of a kernel while its network trains: small formulas, each by its name.

Where they come from: change and cosine, Fort et al. 2020; alignment, Cristianini et al. 2001, centred as in Cortes et
al. 2012; energy on the top eigenvectors, Ortiz-Jiménez et al. 2021; effective rank, Roy & Vetterli 2007.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from .._base import checks, tree
from .._base.types import Float, Numbers
from ..errors import InputError

Value = float | list[float]
UserFunction = Callable[[Tensor], object]


@dataclass(frozen=True, eq=False)
class Start:
    """What is kept of the first record, to which later ones are compared."""

    step: int
    gram: Float[Tensor, "n n"]
    theta: dict[str, Tensor] | None  # in the type of the parameters; None where nothing recorded needs it

    @cached_property
    def vectors(self) -> Float[Tensor, "n n"]:
        """Eigenvectors, those of the largest eigenvalues first."""
        return torch.linalg.eigh(self.gram).eigenvectors.flip(1)


@dataclass(frozen=True, eq=False)
class Sight:
    """The kernel at one step, with what it is compared to. Eigenpairs are computed when something asks for them."""

    step: int
    gram: Float[Tensor, "n n"]  # float64, [n·c, n·c] of a full kernel
    theta: dict[str, Tensor] | None
    start: Start
    before: tuple[int, Float[Tensor, "n n"]] | None  # the record before this one
    top: int  # how many eigenvectors are the top ones
    targets: Float[Tensor, "n q"] | None
    loss: Callable[[], float] | None

    @cached_property
    def pairs(self) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
        """Eigenvalues and eigenvectors, largest first."""
        values, vectors = torch.linalg.eigh(self.gram)
        return values.flip(0), vectors.flip(1)

    @cached_property
    def sines(self) -> Float[Tensor, " k"]:
        """sin² of the principal angles between the top eigenspaces now and at the start, largest first."""
        here = self.pairs[1][:, : self.top]
        there = self.start.vectors[:, : self.top].to(here)
        # From what lies outside, not from the cosines, which would round small angles away.
        return torch.linalg.svdvals(here - there @ (there.T @ here)).square().clamp(0, 1)


@dataclass(frozen=True)
class Quantity:
    """One thing to record: what it is in words, how it is computed, and what must be given for it."""

    title: str
    of: Callable[[Sight], Value]
    needs: str = ""  # "y" or "loss"


def _cosine(a: Tensor, b: Tensor) -> float:
    """Of two kernels as vectors: 1 where they agree up to a factor."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def centered(K: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """H K H with H = 1 − 11ᵀ/n: the kernel of features with mean 0 on these samples.

    >>> bool(centered(torch.ones(3, 3)).abs().max() == 0)
    True
    """
    return K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()


def alignment(K: Float[Tensor, "n n"], y: Float[Tensor, "n q"]) -> float:
    """⟨K, y yᵀ⟩ / (‖K‖ ‖y yᵀ‖): 1 where the kernel is that of the targets themselves.

    >>> y = torch.tensor([[1.0], [-1.0]])
    >>> alignment(y @ y.T, y)
    1.0
    """
    # ⟨K, y yᵀ⟩ = ⟨K y, y⟩ and ‖y yᵀ‖ = ‖yᵀ y‖, without another n × n matrix.
    return float(((K @ y) * y).sum() / (K.norm() * (y.T @ y).norm()))


def effective_rank(values: Float[Tensor, " n"]) -> float:
    """exp(−Σ p log p) with p = λ / Σ λ: how many eigenvalues count, as a number that need not be whole.

    >>> round(effective_rank(torch.tensor([1.0, 1.0, 0.0])), 6)
    2.0
    """
    p = values.clamp_min(0) / values.clamp_min(0).sum()
    return float(torch.special.entr(p).sum().exp())


def _change(s: Sight) -> float:
    return float((s.gram - s.start.gram).norm() / s.start.gram.norm())


def _velocity(s: Sight) -> float:
    if s.before is None:  # the start; or a run that was resumed without the record before
        return 0.0 if s.step == s.start.step else math.nan
    step, gram = s.before
    return (1 - _cosine(s.gram, gram)) / (s.step - step)


def _moved(s: Sight) -> float:
    assert s.theta is not None
    assert s.start.theta is not None
    # In float64: steps are small beside the parameters.
    squares = [(p.double() - q.to(p.device).double()).square().sum() for p, q in _both(s.theta, s.start.theta)]
    return float(torch.stack([v.cpu() for v in squares]).sum().sqrt())


def _moved_part(s: Sight) -> float:
    assert s.start.theta is not None
    size = sum(float(q.double().square().sum()) for q in s.start.theta.values())
    return _moved(s) / size**0.5 if size else math.nan


def _both(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [(a[name], b[name]) for name in a]


def _aligned(s: Sight) -> float:
    assert s.targets is not None
    return alignment(s.gram, s.targets)


def _aligned_centered(s: Sight) -> float:
    assert s.targets is not None
    return alignment(centered(s.gram), s.targets - s.targets.mean(0))


def _energy(s: Sight) -> float:
    assert s.targets is not None
    return float((s.pairs[1][:, : s.top].T @ s.targets).square().sum() / s.targets.square().sum())


def _rotation(s: Sight) -> float:
    return math.degrees(math.asin(float(s.sines.mean()) ** 0.5))


def _angle(s: Sight) -> float:
    return math.degrees(math.asin(float(s.sines[0]) ** 0.5))


def _loss(s: Sight) -> float:
    assert s.loss is not None
    return s.loss()


# In the order of tables and pictures. Rotation is a mean over all principal angles, since the largest is that of the
# last of the top eigenvectors, which trades places with the next where their eigenvalues lie close.
QUANTITIES: Mapping[str, Quantity] = {
    "loss": Quantity("loss on the probe", _loss, "loss"),
    "change": Quantity("‖Θ_t − Θ_0‖ / ‖Θ_0‖", _change),
    "cosine": Quantity("cosine of Θ_t and Θ_0", lambda s: _cosine(s.gram, s.start.gram)),
    "velocity": Quantity("1 − cosine with the record before, per step", _velocity),
    "moved": Quantity("‖θ_t − θ_0‖", _moved),
    "moved_part": Quantity("‖θ_t − θ_0‖ / ‖θ_0‖", _moved_part),
    "rotation": Quantity("turn of the top eigenspace, mean angle in degrees", _rotation),
    "angle": Quantity("turn of the top eigenspace, largest angle in degrees", _angle),
    "rank": Quantity("effective rank", lambda s: effective_rank(s.pairs[0])),
    "top_part": Quantity("λ₁ / trace", lambda s: float(s.pairs[0][0] / s.gram.trace())),
    "alignment": Quantity("kernel target alignment", _aligned, "y"),
    "centered_alignment": Quantity("kernel target alignment, centred", _aligned_centered, "y"),
    "energy": Quantity("part of the targets on the top eigenvectors", _energy, "y"),
    "eigenvalues": Quantity("largest eigenvalues", lambda s: s.pairs[0][: s.top].tolist()),
    "spectrum": Quantity("all eigenvalues", lambda s: s.pairs[0].tolist()),
}
# Recorded where nothing is chosen; with targets, and with a loss, these too.
ALWAYS = ("change", "cosine", "velocity", "moved", "rotation")
WITH_TARGETS = ("centered_alignment", "energy")


def picked(record: Sequence[str] | None, *, targets: bool, loss: bool) -> tuple[str, ...]:
    """Names of quantities, checked, each once and in the order of `QUANTITIES`.

    >>> picked(None, targets=False, loss=True)
    ('loss', 'change', 'cosine', 'velocity', 'moved', 'rotation')
    """
    if isinstance(record, str):
        record = (record,)
    if record is None:
        record = (*ALWAYS, *(WITH_TARGETS if targets else ()), *(("loss",) if loss else ()))
    for name in record:
        checks.choice(name, "record", QUANTITIES)
        needs = QUANTITIES[name].needs
        if (needs == "y" and not targets) or (needs == "loss" and not loss):
            what = "targets: y=" if needs == "y" else "targets and a loss: y=, loss=torch.nn.functional.cross_entropy"
            raise InputError(f"record has {name!r}, which needs {what} of the probe. Give it, or leave {name!r} out.")
    return tuple(name for name in QUANTITIES if name in record)


def encoded(y: Numbers, n: int, outputs: int | None) -> Float[Tensor, "n q"]:
    """Targets as columns in float64; classes become one-hot less 1/c, which for two classes is ±½.

    `outputs`: of a full kernel, whose rows are samples times outputs.

    >>> encoded([0, 1, 1], 3, None)[:, 1].tolist()
    [-0.5, 0.5, 0.5]
    """
    values = tree.numbers(y)
    if values.dim() == 0 or len(values) != n:
        given = tuple(values.shape) if values.dim() else "one number"
        raise InputError(f"the probe has {n} samples and y is {given}; needed: a target for each sample.")
    if values.dim() == 1 and not values.is_floating_point():
        if int(values.min()) < 0:
            raise InputError(f"y has the class {int(values.min())}; needed: classes from 0, or real targets as floats.")
        classes = F.one_hot(values.long(), outputs or -1) if outputs != 1 else values[:, None]
        made = classes.double() - (1 / classes.shape[1] if classes.shape[1] > 1 else 0)
    else:
        made = values.double().flatten(1) if values.dim() > 1 else values.double()[:, None]
    checks.finite(made, "y")
    if outputs is None:
        return made
    if made.shape[1] != outputs:
        raise InputError(f"y has {made.shape[1]} columns and the full kernel {outputs} outputs; needed: as many.")
    return made.reshape(-1, 1)


def plain(value: object, name: str) -> Value:
    """What a function of the user's returned, as a number or a list of numbers."""
    try:
        numbers = torch.as_tensor(value).detach().double()
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise InputError(f"functions[{name!r}] returned a {kind}; needed: a number, or a tensor of a few.") from None
    if numbers.dim() > 1:
        raise InputError(f"functions[{name!r}] returned shape {tuple(numbers.shape)}; needed: a number, or one row.")
    return float(numbers) if numbers.dim() == 0 else numbers.tolist()


def look(sight: Sight, record: Sequence[str], functions: Mapping[str, UserFunction]) -> dict[str, Value]:
    """All that is recorded of a step; the user's functions get a copy of the Gram, which they may change."""
    values = {name: QUANTITIES[name].of(sight) for name in record}
    return values | {name: plain(f(sight.gram.clone()), name) for name, f in functions.items()}
