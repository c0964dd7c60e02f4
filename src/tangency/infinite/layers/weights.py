"""How weights are drawn and how fast they move: variances, parametrisation, what is trained, learning rates."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor

from ..._base import checks
from ..._base.types import Json
from ...errors import InputError
from ..moments.core import VALUE, Law, RandomAffine
from .initial import TELLING, detect_init

Parametrization = Literal["ntk", "standard"]
Number = float | Mapping[str, float]


@dataclass(frozen=True)
class Weights:
    """What decides the numbers of every layer with weights.

    A mapping goes by the names of modules or parameters; the longest that fits counts, "" is for all others. `record`
    collects what was decided, by layer.
    """

    w_var: Number | Literal["init"] = 2.0
    b_var: Number = 0.0
    parametrization: Parametrization = "ntk"
    trained: tuple[str, ...] | None = None  # names of parameters, or of layers that hold them; None: all
    lr: Number = 1.0
    record: dict[str, Json] = field(default_factory=dict)
    chosen: bool = False  # whether trainable= was given
    frozen: frozenset[str] = frozenset()  # parameters that modules among layers hold still

    def layer(
        self,
        name: str,
        fan_in: int,
        *,
        patch: int = 1,
        bias: bool = True,
        variances: tuple[float | None, float | None] = (None, None),
        tensors: tuple[Tensor | None, Tensor | None] = (None, None),
        names: tuple[str, str] = ("weight", "bias"),
        whole: int | None = None,
    ) -> RandomAffine:
        """The numbers of one layer whose window of `patch` positions is summed before it.

        `whole`: the fan-in of the parameter of which its weights are a slice, by which they were drawn.
        """
        w_name, b_name = (dotted(name, n) for n in names)
        w_var, b_var, note, laws = self._variances(w_name, b_name, fan_in, variances, tensors, bias)
        drawn_by = fan_in if whole is None else whole
        if drawn_by != fan_in and self.w_var != "init":  # the slice sums fewer terms of the same variance
            w_var *= fan_in / drawn_by
        lr_w, lr_b = self.rate(w_name), self.rate(b_name) if bias else 0.0
        standard = self.parametrization == "standard"
        # ⟨∂f/∂W, ∂f/∂W⟩ is Σ h² = fan-in·mean(h²) where the parameter is the weight itself; the factor √(w_var/fan-in)
        # of the NTK parametrisation makes it w_var·mean(h²).
        w_rate, b_rate = (fan_in, 1.0) if standard else (w_var, b_var)
        self.record[name or names[0]] = {"w_var": w_var, "b_var": b_var, "lr": [lr_w, lr_b], "fan_in": drawn_by, **note}
        return RandomAffine(w_var / patch, b_var, lr_w * w_rate / patch, lr_b * b_rate, laws)

    def _variances(
        self,
        w_name: str,
        b_name: str,
        fan_in: int,
        variances: tuple[float | None, float | None],
        tensors: tuple[Tensor | None, Tensor | None],
        bias: bool,
    ) -> tuple[float, float, dict[str, str], tuple[Law, Law]]:
        """w_var, b_var, what they were taken for, and the laws of both; the layer's own `variances` come first."""
        note: dict[str, str] = {}
        of_weight: Law = "normal"
        of_bias: Law = "normal"
        if self.w_var == "init":
            if tensors[0] is None:
                raise InputError("w_var='init' reads a module's weights; layers have none. Give numbers.")
            init = detect_init(tensors[0])
            # The limit's w_var is of order 1: the weights' variance times the fan-in of the module at hand.
            w_var, note["init"], of_weight = init.variance * fan_in, init.label, init.law
            b_var = 0.0
            if tensors[1] is not None:
                init = detect_init(tensors[1], tensors[0])
                b_var, note["bias init"], of_bias = init.variance, init.label, init.law
        else:
            w_var = by_name(self.w_var, w_name, "w_var")
            b_var = by_name(self.b_var, b_name, "b_var") if bias else 0.0
        # A layer's own numbers are of normal weights, whatever its tensors hold.
        if variances[0] is not None:
            w_var, of_weight = variances[0], "normal"
        if variances[1] is not None:
            b_var, of_bias = variances[1], "normal"
        return w_var, b_var if bias else 0.0, note, (of_weight, of_bias if bias else "normal")

    def value(self, name: str, tensor: Tensor, factor: float = 1.0) -> RandomAffine:
        """The numbers of a parameter, or a multiple of it, that is used as a value."""
        init = detect_init(tensor)
        lr = self.rate(name)
        rate = 1.0 if self.parametrization == "standard" else init.variance
        self.record[name] = {"variance": init.variance, "lr": lr, "init": init.label}
        return RandomAffine(
            init.variance * factor**2, 0.0, lr * rate * factor**2, laws=(init.law, "normal"), means=VALUE
        )

    def bias(self, name: str, tensor: Tensor, factor: float = 1.0) -> RandomAffine:
        """The numbers of a bias that is added by itself: of variance b_var, as one inside a layer has."""
        if self.w_var == "init":
            return self.value(name, tensor, factor)
        variance, lr = by_name(self.b_var, name, "b_var"), self.rate(name)
        rate = 1.0 if self.parametrization == "standard" else variance
        self.record[name] = {"variance": variance, "lr": lr}
        return RandomAffine(variance * factor**2, 0.0, lr * rate * factor**2, means=VALUE)

    def table(self, name: str, tensor: Tensor, factor: float, layer: str) -> tuple[float, float, Law]:
        """Variance, rate and law of the entries of a position bias: a parameter's own, or an Embedding's (`layer`).

        The variance is about their mean, which a softmax does not see: constants have none.
        """
        op = self.layer(layer, 1, bias=False, tensors=(tensor, None)) if layer else self.value(name, tensor)
        variance = op.w_var
        if not layer or self.w_var == "init":
            mean = float(tensor.detach().double().mean())
            init = detect_init(tensor)
            variance -= mean**2 if init.label == "measured" else variance if init.label.startswith("constant") else 0.0
        # Of few entries the law cannot be told: they are taken for normal.
        law: Law = op.laws[0] if tensor.numel() >= TELLING else "normal"
        return variance * factor**2, op.w_rate * factor**2, law

    def rate(self, name: str) -> float:
        """A parameter's learning rate, 0 if it is frozen: how fast one of order 1 moves (a norm's scale or shift)."""
        moves = name not in self.frozen and (self.trained is None or any(within(name, key) for key in self.trained))
        return by_name(self.lr, name, "lr") if moves else 0.0

    def rates(self, name: str) -> tuple[float, float]:
        """Those of a norm's scale and shift."""
        return self.rate(dotted(name, "weight")), self.rate(dotted(name, "bias"))


def dotted(*parts: str) -> str:
    """The name of a part within a part; the network itself has none."""
    return ".".join(part for part in parts if part)


def within(name: str, key: str) -> bool:
    """Whether `name` is `key`, or lies in it."""
    return name == key or name.startswith(key + ".")


def by_name(given: Number, name: str, what: str) -> float:
    """A number, or that of the longest name in a mapping which `name` begins with."""
    if not isinstance(given, Mapping):
        return float(given)
    # "2" is for all parameters of layer 2, "2.weight" for one: the longest name is the most special.
    fits = [key for key in given if key == "" or within(name, key)]
    if not fits:
        raise InputError(
            f"{what}= gives no number for {name}; it has {checks.some([repr(k) for k in given])}. Add one, or '' for "
            "all others."
        )
    return float(given[max(fits, key=len)])


def check_options(w_var: object, b_var: object, parametrization: str | None, lr: object) -> Parametrization:
    """The options, before any work; the parametrisation that they mean."""
    for what, option in (("w_var", w_var), ("b_var", b_var), ("lr", lr)):
        if isinstance(option, str) and what == "w_var":
            checks.choice(option, "w_var", ["init"], ", a number, or a mapping from layer names to numbers")
            continue
        for key, value in option.items() if isinstance(option, Mapping) else [(None, option)]:
            checks.nonnegative(value, what if key is None else f"{what}[{key!r}]")
    if parametrization is None:
        return "standard" if w_var == "init" else "ntk"
    return checks.choice(parametrization, "parametrization", get_args(Parametrization))  # type: ignore[return-value]
