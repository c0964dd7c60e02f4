"""What a network's outputs are (logits, probabilities, log-probabilities), and its logits, whichever of these it gives.

Softmax and sigmoid are no part of what is explained: one and the same network may be written with or without them. So
kernels and log-odds are those of the logits: of what goes into the last softmax or sigmoid, where the network is seen
to end in one, and else of the probabilities' logarithms. Two classes have one log-odds, in whatever form it comes.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .._base import checks, tree
from .._base.types import Float, Inputs
from ..errors import InputError, ModelError, TangencyWarning
from .heads import pick
from .network import Network, unwrapped
from .torch_functions import Function

Kind = Literal["logits", "probabilities", "log-probabilities"]
Run = Callable[[nn.Module, Inputs], Tensor]
KINDS: tuple[Kind, ...] = get_args(Kind)
# How far from 1 a row of c probabilities may sum: so much for each, up to MOST (heuristics: rounding in 16 bits or to
# three decimals, clamped probabilities). Within NEARLY they may be meant for probabilities, which is said.
SUM, MOST, NEARLY = 1e-3, 0.02, 0.1
# Another reading of one output makes us doubt ours if it halves the errors on the training data and gains this much.
GAIN = 0.1
# Of 1 − p, so many roundings must be left for its logarithm to have two digits.
TWO_DIGITS = 100
# Classes in another order make us doubt ours if they leave at most this part of the errors on the training data, and
# the gain is so many standard deviations of chance (heuristics).
ORDER, CHANCE = 1 / 5, 3
WITHOUT = "Give the network without its last sigmoid or softmax: its logits."

_ENDINGS: dict[Function, str] = {
    F.softmax: "softmax", torch.softmax: "softmax", Tensor.softmax: "softmax", torch.special.softmax: "softmax",
    F.log_softmax: "log_softmax", torch.log_softmax: "log_softmax", Tensor.log_softmax: "log_softmax",
    torch.special.log_softmax: "log_softmax", F.logsigmoid: "logsigmoid", torch.sigmoid: "sigmoid",
    Tensor.sigmoid: "sigmoid", torch.special.expit: "sigmoid",
}  # fmt: skip
_KIND_OF: dict[str, Kind] = {
    "softmax": "probabilities", "sigmoid": "probabilities",
    "log_softmax": "log-probabilities", "logsigmoid": "log-probabilities",
}  # fmt: skip
_OF_ONE = ("sigmoid", "logsigmoid")
# What may still follow, since it moves no number.
_RESHAPES = {
    Tensor.squeeze, torch.squeeze, Tensor.flatten, torch.flatten, Tensor.reshape, torch.reshape, Tensor.view,
    Tensor.select, torch.select, Tensor.__getitem__, Tensor.contiguous,
}  # fmt: skip


def sums_to_one(p: Float[Tensor, "n c"]) -> bool:
    """Whether rows sum to 1, as far as rounded numbers do."""
    return bool(((p.double().sum(1) - 1).abs() <= min(SUM * p.shape[1], MOST)).all())


def check_kind(kind: str) -> None:
    """Refuse what is no kind of outputs."""
    if kind not in KINDS:
        raise InputError(f"outputs_are={kind!r}; needed: {', '.join(map(repr, KINDS[:-1]))} or {KINDS[-1]!r}.")


class Ending(TorchFunctionMode):
    """Sees the last softmax or sigmoid of a forward pass: its name, what went into it, and what became of that."""

    def __init__(self) -> None:
        super().__init__()
        self.name: str | None = None
        self.source: Tensor | None = None
        self.out: Tensor | None = None

    def __torch_function__(
        self, func: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        out = func(*args, **(kwargs or {}))
        if not isinstance(out, Tensor):
            return out
        if func in _ENDINGS:
            source = args[0] if args else (kwargs or {})["input"]
            assert isinstance(source, Tensor)
            self.name, self.source, self.out = _ENDINGS[func], source, out
        elif func in _RESHAPES and args and args[0] is self.out is not None and self.source is not None:
            self.source = self.source.reshape(out.shape) if out.numel() == self.source.numel() else None
            self.out = out
        return out

    def logits(self, returned: Tensor) -> Tensor | None:
        """What went into the function that made the returned tensor; None if another function made it."""
        whole = self.source is not None and self.source.shape == returned.shape
        return self.source if returned is self.out and whole else None


def ending(model: nn.Module, x: Inputs) -> str | None:
    """The name of the function that makes the model's outputs from its logits, row by row; None if none is seen.

    >>> ending(nn.Sequential(nn.Linear(3, 2), nn.Softmax(1)), torch.randn(4, 3))
    'softmax'
    """
    args, kwargs = tree.arguments(x)
    with torch.no_grad(), Ending() as seen:
        returned = pick(unwrapped(model)[0](*args, **kwargs), None)
    source = seen.logits(returned)
    if source is None or seen.name is None:
        return None
    again = source.softmax(-1) if seen.name.endswith("softmax") else source.sigmoid()
    again = again.log() if seen.name.startswith("log") else again
    return seen.name if torch.allclose(again, returned, rtol=SUM, atol=SUM, equal_nan=True) else None


@dataclass(frozen=True)
class Outputs:
    """What a network's outputs are. `said`: this in a sentence. `doubt`: why it may be otherwise; empty if it is clear.

    `ending`: the function that the network was seen to end in, whose input is taken for its logits.
    """

    kind: Kind
    columns: int
    ending: str | None
    said: str
    doubt: str = ""
    dtype: torch.dtype = torch.float64

    @property
    def two(self) -> bool:
        """Two classes, which have one log-odds."""
        return self.columns <= 2

    @property
    def shifted(self) -> bool:
        """Logits are known but for a shift of all of a sample's, which probabilities do not tell."""
        return self.kind != "logits" and self.ending is None and not self.two

    def logits(self, out: Tensor) -> Float[Tensor, "n c"]:
        """Of outputs, their logits (of more than two probabilities centred); of two classes the log-odds, [n, 1].

        >>> softmax = Outputs("probabilities", 2, None, "")
        >>> softmax.logits(torch.tensor([[0.25, 0.75]])).exp()
        tensor([[3.]])
        """
        if self.columns == 1:
            out = out.reshape(-1, 1)
            if self.kind == "logits":
                return out
            return torch.logit(out) if self.kind == "probabilities" else out - _log1mexp(out)
        z = out.log() if self.kind == "probabilities" else out
        # Of two classes only the difference of logits means anything.
        if self.columns == 2:
            return z[:, 1:] - z[:, :1]
        return z if self.kind == "logits" else z - z.mean(1, keepdim=True)

    def of_source(self, source: Tensor) -> Float[Tensor, "n c"]:
        """The same of what went into the last function."""
        return Outputs("logits", self.columns, None, "").logits(source)

    def probabilities(self, out: Tensor) -> Tensor:
        """Of outputs that are probabilities or their logarithms."""
        return out if self.kind == "probabilities" else out.exp()


def _log1mexp(v: Tensor) -> Tensor:
    """log(1 − e^v) of v < 0, to all digits; the branch that is not taken must not spoil the gradient."""
    near = v > -math.log(2)
    inside, outside = torch.where(near, v, -math.log(2)), torch.where(near, -math.log(2), v)
    return torch.where(near, (-torch.expm1(inside)).log(), torch.log1p(-outside.exp()))


class LogitsOf(nn.Module):
    """A network's logits [n, c] as a module of their own, of two classes the log-odds of the second [n, 1].

    The network is borrowed, not copied or changed.
    """

    def __init__(self, model: nn.Module, outputs: Outputs) -> None:
        super().__init__()
        self.model, self.outputs = unwrapped(model)[0], outputs
        # Of itself alone: `eval()` would change the user's network.
        self.training = False

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        """The logits of what the network returns for these arguments."""
        if self.outputs.ending is None:
            return self.outputs.logits(pick(self.model(*args, **kwargs), None))
        with Ending() as seen:
            returned = pick(self.model(*args, **kwargs), None)
        source = seen.logits(returned)
        if source is None:
            raise ModelError(
                f"the model ended in {self.outputs.ending} on the first samples, and does not on these. {WITHOUT}"
            )
        return self.outputs.of_source(source)


def read(out: Float[Tensor, "n q"], y: Tensor, given: Kind | None = None, seen: str | None = None) -> Outputs:
    """What outputs on the training data are: as `given`, by the function `seen` to make them, else by their numbers.

    One output in [0, 1] is a probability; rows at least 0 that sum to 1 are probabilities; rows whose exponentials do
    are log-probabilities; everything else are logits. Labels y tell whether another reading of one output (another
    threshold) would be right more often.

    >>> read(torch.tensor([[0.1], [0.8]]), torch.tensor([0, 1])).kind
    'probabilities'
    """
    q, y = out.shape[1], y.to(out.device)
    sigmoids = seen in _OF_ONE and q > 1  # one per column, each a probability of its own
    # A softmax over one column, or a sigmoid of each of several, is no way from logits to one distribution.
    seen = seen if seen is not None and (seen in _OF_ONE) == (q == 1) else None
    kind = given or _kind_by_numbers(out, seen)
    if given is not None:
        _refuse_others(out, kind, "training")
    seen = seen if seen is not None and _KIND_OF[seen] == kind else None
    doubt = "" if given is not None or seen is not None else _doubt(out, y, kind, sigmoids)
    doubt = doubt or _order(out, y, kind)
    said = " ".join(filter(None, [_said(out, kind, given, seen), doubt]))
    return Outputs(kind, q, seen, said, doubt, out.dtype)


def _kind_by_numbers(out: Tensor, seen: str | None) -> Kind:
    """What the numbers may be; where a function was seen to make them, preferably what that makes."""
    if seen is not None and _fits(out, _KIND_OF[seen]):
        return _KIND_OF[seen]
    if _fits(out, "probabilities"):
        return "probabilities"
    return "log-probabilities" if out.shape[1] > 1 and _fits(out, "log-probabilities") else "logits"


def _fits(out: Tensor, kind: Kind) -> bool:
    """Whether numbers may be that."""
    if kind == "logits":
        return True
    p = out.double() if kind == "probabilities" else out.double().exp()
    if not bool((p >= 0).all()):
        return False
    return bool((p <= 1).all()) if out.shape[1] == 1 else sums_to_one(p)


def _refuse_others(out: Tensor, kind: Kind, name: str) -> None:
    """Refuse outputs of the training or test samples that are not of this kind."""
    if _fits(out, kind):
        return
    one, plain = out.shape[1] == 1, kind == "probabilities"
    sums = (out if plain else out.exp()).double().sum(1)
    rows = f" (rows of {'them' if plain else 'their exponentials'} sum to {float(sums.min()):.4g} up to "
    rows = "" if one else f"{rows}{float(sums.max()):.4g})"
    needed = "numbers from 0 to 1" if plain else "numbers up to 0"
    needed = needed if one else f"{'rows' if plain else 'logarithms of rows'} of at least 0 that sum to 1"
    raise InputError(
        f"the network's outputs are taken for {kind}, but on the {name} samples they go from {float(out.min()):.4g} to "
        f"{float(out.max()):.4g}{rows}; needed: {needed}. Say outputs_are='logits' if they are logits."
    )


_ONE = {"probabilities": "a probability", "log-probabilities": "a log-probability", "logits": "a logit"}
_WHY = {"probabilities": "are at least 0 and sum to 1", "log-probabilities": "are logarithms of numbers that sum to 1"}


def _said(out: Tensor, kind: Kind, given: Kind | None, seen: str | None) -> str:
    n, q = out.shape
    subject, name = ("output is", _ONE[kind]) if q == 1 else ("outputs are", kind)
    if seen is not None:
        return f"The network's {subject} {name}: it ends in {seen}, and what goes into that is explained, its logits."
    shift = " Its logits are known but for their mean, which is left out." if kind != "logits" and q > 2 else ""
    if given is not None:
        return f"The network's {subject} {name}, as outputs_are says.{shift}"
    if kind == "logits":
        return f"The network's {subject} taken for {name}."
    if q == 1:
        return (
            f"The network's output is taken for {name} of the second class: it lies between 0 and 1 on all {n:,} "
            "training samples."
        )
    return f"The network's outputs are taken for {kind}: on all {n:,} training samples they {_WHY[kind]}.{shift}"


def _doubt(out: Tensor, y: Tensor, kind: Kind, sigmoids: bool) -> str:
    """Why outputs, of which nothing but numbers is known, may be something else; `sigmoids`: some were seen."""
    if out.shape[1] > 1:
        return _doubt_of_rows(out, sigmoids) if kind == "logits" else ""
    values = out[:, 0].double()

    def right(threshold: float) -> float:
        """The share of samples that are right if outputs decide at this threshold."""
        return float(((values > threshold) == (y == 1)).double().mean())

    if kind == "probabilities":
        if right(0.5) > right(0):
            return ""
        return (
            f"So read, {right(0.5):.1%} of the training samples are right, as a logit {right(0):.1%}: say "
            "outputs_are='logits' or outputs_are='probabilities'."
        )
    for threshold, words in (
        (0.5, "if it was trained towards 0 and 1, give the network with ½ taken from its output"),
        (-math.log(2), "if it is a log-probability, say outputs_are='log-probabilities'"),
    ):
        possible = threshold > 0 or bool((values <= 0).all())
        if possible and right(threshold) >= right(0) + GAIN and 1 - right(threshold) <= (1 - right(0)) / 2:
            return (
                f"So read, {right(0):.1%} of the training samples are right; with a threshold at {threshold:.3g}, "
                f"{right(threshold):.1%}: {words}; if it is a logit, say outputs_are='logits'."
            )
    return ""


def _doubt_of_rows(out: Tensor, sigmoids: bool) -> str:
    """Of several columns that are taken for logits."""
    fix = "sigmoids, each of its own, give the network without these; if they are logits, say outputs_are='logits'."
    if not bool(((out >= 0) & (out <= 1)).all()):
        return f"They were made by sigmoids or their logarithms: if they are {fix}" if sigmoids else ""
    if bool(((out.double().sum(1) - 1).abs() <= NEARLY).all()):
        return (
            "They all lie between 0 and 1 and their rows nearly sum to 1: if they are probabilities, give a network "
            f"whose rows do (out / out.sum(1, keepdim=True)); if they are {fix}"
        )
    return f"They all lie between 0 and 1 but their rows do not sum to 1: if they are {fix}"


def _order(out: Tensor, y: Tensor, kind: Kind) -> str:
    """Whether the network is right far more often if its classes are taken in another order."""
    half = {"logits": 0.0, "probabilities": 0.5, "log-probabilities": -math.log(2)}[kind]
    said = (out[:, 0].double() > half).long() if out.shape[1] == 1 else out.argmax(1)
    n, c = len(y), max(2, out.shape[1])
    counts = torch.bincount(said * c + y, minlength=c * c).reshape(c, c)  # rows: what it says
    used = (counts.sum(1) > 0).nonzero()[:, 0]
    for_each = counts[used].argmax(1)
    if len(used) < 2 or len(for_each.unique()) < len(used):
        return ""
    right, other = int(counts.diagonal().sum()), int(counts[used].amax(1).sum())
    if other - right < CHANCE * n**0.5 or n - other > ORDER * (n - right):
        return ""
    moved = [(int(a), int(b)) for a, b in zip(used, for_each, strict=True) if int(a) != int(b)]
    return (
        f"So read, {right / n:.1%} of the training samples are right, in another order of the classes {other / n:.1%} ("
        + checks.some([f"{a} for {b}" for a, b in moved])
        + "): if the network numbers the classes otherwise than the data does, number the labels as it does, or put "
        "its outputs into their order (of one output, change the sign of its logit)."
    )


def _lost(out: Tensor, known: Outputs, name: str) -> str:
    """Refuse probabilities that have rounded to exactly 0 or 1; what to say of those that are near 1, if anything.

    Only where no function was seen whose input could be taken instead.
    """
    if known.kind == "logits" or known.ending is not None:
        return ""
    p, one = known.probabilities(out), known.columns == 1
    gone = (p == 0) | (p == 1) if one else p == 0
    if known.kind == "log-probabilities":
        gone = out.isinf() | (out == 0) if one else out.isinf()
    if count := int(gone.any(1).sum()):
        raise InputError(
            f"{count} of {len(out)} {name} samples have a probability of exactly {'0 or 1' if known.two else '0'}: it "
            f"has rounded, and its logit cannot be had back. {WITHOUT} (If these are logits: outputs_are='logits'.)"
        )
    few = int((1 - p < TWO_DIGITS * torch.finfo(out.dtype).eps).sum())
    if not few or not one or known.kind != "probabilities":
        return ""
    return (
        f"{few} of {len(out)} {name} samples have a probability so near 1 that rounding leaves its logit fewer than "
        f"two digits. {WITHOUT}"
    )


def _clamped(model: nn.Module, x: Inputs, out: Tensor, known: Outputs, name: str) -> None:
    """Refuse probabilities that were clamped or rounded: several samples share the largest or the smallest one, and
    the parameters do not move it. Those of exactly 0 and 1 are `_lost`."""
    if known.kind == "logits" or known.ending is not None:
        return
    # Only the extremes are looked at: a clamp is seen there, and a gradient for every sample would cost too much.
    p, fixed, ends = known.probabilities(out), torch.zeros_like(out, dtype=torch.bool), list[str]()
    for end in (out.min(), out.max()):
        there = out == end
        sample, column = there.nonzero()[0].tolist()
        certain = float(p[sample, column]) in (0.0, 1.0)
        if (
            int(there.any(1).sum()) > 1
            and not certain
            and _unmoved(model, tree.take(x, slice(sample, sample + 1)), column)
        ):
            fixed, ends = fixed | there, [*ends, f"{float(p[sample, column]):.4g}"]
    if ends:
        raise InputError(
            f"{int(fixed.any(1).sum())} of {len(out)} {name} samples have a probability of exactly {' or '.join(ends)} "
            "that the network's parameters do not move: it was clamped or rounded, and its logit cannot be had back. "
            f"{WITHOUT} (If these are logits: outputs_are='logits'.)"
        )


def _unmoved(model: nn.Module, x: Inputs, column: int) -> bool:
    """Whether one output of one sample has a gradient, and it is zero."""
    network = Network.of(model, trainable=lambda name, p: True)
    state = network.state()
    leaves = network.leaves(state, network.trainable)
    with torch.enable_grad(), network.modes(exact=True):
        out = network({**state, **leaves}, tree.transform(lambda v: v.clone(), x))[0, column]
        if not out.requires_grad:
            return False
        grads = torch.autograd.grad(out, list(leaves.values()), allow_unused=True)
    return not any(g is not None and bool(g.to_dense().any()) for g in grads)


def _finite(out: Tensor, kind: Kind | None) -> None:
    """Refuse what is not finite, but for the logarithm of a probability that has rounded to 0: `_lost` says more."""
    if (out.shape[1] == 1 and kind != "log-probabilities") or not _fits(out, "log-probabilities"):
        checks.finite(out, "the model's outputs")


def learn(run: Run, model: nn.Module, x: Inputs, y: Tensor, classes: int, given: Kind | None) -> Outputs:
    """What a network's outputs are, from those on the training samples x of classes y; `run` makes outputs of many."""
    if given is not None:
        check_kind(given)
    out = run(model, x)
    out = out[:, None] if out.dim() == 1 else out
    if out.dim() != 2 or (out.shape[1] != classes and (out.shape[1], classes) != (1, 2)):
        raise InputError(
            f"the model has outputs of shape {list(out.shape[1:])} and the data {classes} classes; needed: a logit "
            "for each class (or a single one for two classes)."
        )
    _finite(out, given)
    known = read(out, y, given, ending(model, tree.take(x, slice(0, 2))))
    lost = _lost(out, known, "training")
    _clamped(model, x, out, known, "training")
    for note in filter(None, [known.doubt and known.said, lost]):
        warnings.warn(note, TangencyWarning, stacklevel=3)
    return known


def logits(run: Run, model: nn.Module, x: Inputs, known: Outputs) -> Float[Tensor, "m c"]:
    """A network's logits of other samples, in float64, with a column for each class: −f/2 and f/2 of one log-odds f."""
    out = run(model, x)
    out = out[:, None] if out.dim() == 1 else out
    _finite(out, known.kind)
    _refuse_others(out, known.kind, "test")
    if note := _lost(out, known, "test"):
        warnings.warn(note, TangencyWarning, stacklevel=3)
    _clamped(model, x, out, known, "test")
    z = known.logits(out.double()) if known.ending is None else run(LogitsOf(model, known), x).double()
    return torch.cat([-z, z], 1) / 2 if known.two else z
