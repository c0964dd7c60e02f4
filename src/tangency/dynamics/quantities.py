"""What a `Monitor` can record of a kernel while its network trains: small formulas, each by its name.

Alignments, angles and ranks are those of `tangency.spectra`, which has the papers. Change and velocity: Fort et al.
2020, "Deep learning versus kernel learning".
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .._base import checks, tree
from .._base.targets import Kind, by_name, column, columns_of
from .._base.types import Float, Numbers
from ..errors import InputError, TangencyError
from ..linalg.eigen import Spectrum, spectrum
from ..spectra.alignment import cka, energy, numerical_rank, principal_angles, target_alignment
from ..spectra.ranks import ranks

Value = float | list[float]
UserFunction = Callable[[Tensor], object]


@dataclass(frozen=True, eq=False)
class Start:
    """What is kept of the first record, to which later ones are compared."""

    step: int
    gram: Float[Tensor, "n n"]
    theta: dict[str, Tensor] | None  # in the type of the parameters; None where nothing recorded needs it

    @cached_property
    def pairs(self) -> Spectrum:
        """Eigenvalues and eigenvectors, largest first."""
        return spectrum(self.gram)


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
    def pairs(self) -> Spectrum:
        """Eigenvalues and eigenvectors, largest first."""
        return self.start.pairs if self.gram is self.start.gram else spectrum(self.gram)

    @cached_property
    def angles(self) -> Float[Tensor, " k"]:
        """Principal angles between the top eigenspaces at the start and now, the largest last."""
        count = min(self.top, numerical_rank(self.start.pairs.values), numerical_rank(self.pairs.values))
        return principal_angles(self.start.pairs.vectors[:, :count], self.pairs.vectors[:, :count])


@dataclass(frozen=True)
class Quantity:
    """One thing to record: what it is in words, how it is computed, and what must be given for it."""

    title: str
    of: Callable[[Sight], Value]
    needs: str = ""  # "y" or "loss"


def _change(s: Sight) -> float:
    return float((s.gram - s.start.gram).norm() / s.start.gram.norm())


def _cosine(s: Sight) -> float:
    return cka(s.gram, s.start.gram, centred=False)


def _velocity(s: Sight) -> float:
    if s.before is None:  # the start; or a run that was resumed without the record before
        return 0.0 if s.step == s.start.step else math.nan
    step, gram = s.before
    return (1 - cka(s.gram, gram, centred=False)) / (s.step - step)


def _moved(s: Sight) -> float:
    assert s.theta is not None
    assert s.start.theta is not None
    for name, p in s.theta.items():
        if p.shape != (was := s.start.theta[name].shape):
            raise InputError(f"{name} is {tuple(p.shape)} now and was {tuple(was)}; needed: the same network")
    # In float64: steps are small beside the parameters.
    far = [(p.double() - s.start.theta[name].to(p.device).double()).square().sum() for name, p in s.theta.items()]
    return math.fsum(map(float, far)) ** 0.5


def _moved_part(s: Sight) -> float:
    assert s.start.theta is not None
    size = math.fsum(float(p.double().square().sum()) for p in s.start.theta.values()) ** 0.5
    return _moved(s) / size if size else math.nan


def _alignment(s: Sight, centred: bool) -> float:
    assert s.targets is not None
    return target_alignment(s.gram, s.targets, centred=centred, targets="real")


def _energy(s: Sight) -> float:
    assert s.targets is not None
    return energy(s.pairs, s.targets, s.top, targets="real").concentration


def _rotation(s: Sight) -> float:
    return math.degrees(math.asin(float(s.angles.sin().square().mean()) ** 0.5))


def _loss(s: Sight) -> float:
    assert s.loss is not None
    return s.loss()


# In the order of tables and pictures. Rotation is a mean over all principal angles, since the largest is that of the
# last of the top eigenvectors, which trades places with the next where their eigenvalues lie close.
QUANTITIES: Mapping[str, Quantity] = {
    "loss": Quantity("loss on the probe", _loss, "loss"),
    "change": Quantity("‖Θ_t − Θ_0‖ / ‖Θ_0‖", _change),
    "cosine": Quantity("cosine of Θ_t and Θ_0", _cosine),
    "velocity": Quantity("1 − cosine with the record before, per step", _velocity),
    "moved": Quantity("‖θ_t − θ_0‖", _moved),
    "moved_part": Quantity("‖θ_t − θ_0‖ / ‖θ_0‖", _moved_part),
    "rotation": Quantity("turn of the top eigenspace, mean angle in degrees", _rotation),
    "angle": Quantity("turn of the top eigenspace, largest angle in degrees", lambda s: math.degrees(s.angles[-1])),
    "rank": Quantity("effective rank", lambda s: ranks(s.pairs.values).entropy),
    "top_part": Quantity("λ₁ / trace", lambda s: float(s.pairs.values[0] / s.gram.trace())),
    "alignment": Quantity("kernel target alignment", lambda s: _alignment(s, False), "y"),
    "centred_alignment": Quantity("kernel target alignment, centred", lambda s: _alignment(s, True), "y"),
    "energy": Quantity("‖Φ y‖ / ‖y‖ on the top eigenvectors", _energy, "y"),
    "eigenvalues": Quantity("largest eigenvalues", lambda s: s.pairs.values[: s.top].tolist()),
    "spectrum": Quantity("all eigenvalues", lambda s: s.pairs.values.tolist()),
}
# Recorded where nothing is chosen; with targets, and with a loss, these too.
ALWAYS = ("change", "cosine", "velocity", "moved", "rotation")
WITH_TARGETS = ("centred_alignment", "energy")


def picked(record: Sequence[str] | None, *, targets: bool, loss: bool, full: bool) -> tuple[str, ...]:
    """Names of quantities, checked, each once and in the order of `QUANTITIES`. `full`: of a kernel with all outputs.

    >>> picked(None, targets=False, loss=True, full=False)
    ('loss', 'change', 'cosine', 'velocity', 'moved', 'rotation')
    """
    if isinstance(record, str):
        record = (record,)
    if record is None:
        record = (*ALWAYS, *(WITH_TARGETS[full:] if targets else ()), *(("loss",) if loss else ()))
    for name in record:
        checks.choice(name, "record", QUANTITIES)
        needs = QUANTITIES[name].needs
        if (needs == "y" and not targets) or (needs == "loss" and not loss):
            what = "targets: y=" if needs == "y" else "targets and a loss: y=, loss=torch.nn.functional.cross_entropy"
            raise InputError(f"record has {name!r}, which needs {what} of the probe. Give it, or leave {name!r} out.")
        if full and name == "centred_alignment":
            raise InputError(
                "record has 'centred_alignment', which needs one row for each sample, and the kernel is full over its "
                "outputs. Use the trace kernel, or 'alignment'."
            )
    return tuple(name for name in QUANTITIES if name in record)


def encoded(y: Numbers | Sequence[str], n: int, outputs: int | None, kind: Kind | None = None) -> Float[Tensor, "n q"]:
    """Targets as columns in float64; classes become one-hot less 1/c, as they do in `tangency.spectra`.

    `outputs`: of a full kernel, whose rows are samples times outputs.

    >>> encoded([0, 1, 1], 3, None)[:, 1].tolist()
    [-0.5, 0.5, 0.5]
    """
    values = y if by_name(y) else tree.numbers(column(y))
    if isinstance(values, Tensor) and (values.dim() == 0 or len(values) != n):
        given = tuple(values.shape) if values.dim() else "one number"
        raise InputError(f"the probe has {n} samples and y is {given}; needed: a target for each sample.")
    made = tree.numbers(columns_of(values, outputs, targets=kind)).double()
    if len(made) != n:
        raise InputError(f"the probe has {n} samples and y is of {len(made)}; needed: a target for each sample.")
    made = made.flatten(1) if made.dim() > 1 else made[:, None]
    checks.finite(made, "y")
    if outputs is None:
        return made
    if made.shape[1] != outputs:
        raise InputError(f"y has {made.shape[1]} columns and the full kernel {outputs} outputs; needed: as many.")
    return made.reshape(-1, 1)


def _plain(value: object, name: str) -> Value:
    """What a function of the user's returned, as a number or a list of numbers."""
    try:
        numbers = torch.as_tensor(value).detach().double()
    except (TypeError, ValueError, RuntimeError):
        kind = type(value).__name__
        raise InputError(f"functions[{name!r}] returned a {kind}; needed: a number, or a tensor of a few.") from None
    if numbers.dim() > 1:
        raise InputError(f"functions[{name!r}] returned shape {tuple(numbers.shape)}; needed: a number, or one row.")
    return float(numbers) if numbers.dim() == 0 else numbers.tolist()


def look(
    sight: Sight, record: Sequence[str], functions: Mapping[str, UserFunction]
) -> tuple[dict[str, Value], list[str]]:
    """All that is recorded of a step, and what is to be said of it; the user's functions get a copy of the Gram.

    What has no value any more (the alignment of a kernel that died) is NaN; at the start it is an error.
    """
    values, notes = dict[str, Value](), list[str]()
    for name in record:
        try:
            values[name] = QUANTITIES[name].of(sight)
        except TangencyError as e:
            if sight.step == sight.start.step:
                raise
            values[name] = math.nan
            notes.append(f"step {sight.step}, {name}: {str(e).rstrip('.')}")
    return values | {name: _plain(f(sight.gram.clone()), name) for name, f in functions.items()}, notes
