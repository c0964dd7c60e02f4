"""How to train: everything but the model, the data and the seed."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn

from .._base.checks import choice, nonnegative, suggest
from ..errors import InputError
from .losses import LOSSES

Rule = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Tensor, Tensor], Tensor]
Augment = Callable[[Tensor, torch.Generator], Tensor]

RATES = {"sgd": 0.05, "adam": 0.001, "adamw": 0.001}  # heuristics: they suit small networks at their usual scale
PEAKS = {"constant": 0.0, "cosine": 0.0, "onecycle": 0.25}  # schedules, and the part of the steps that leads up to lr
HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Recipe:
    """How `fit` trains, checked when it is made.

    `lr`: by default 0.05 for "sgd", 0.001 for "adam" and "adamw". `optimizer` may be a function of the parameters,
    which then sets lr and weight_decay itself. `momentum` and `nesterov` are SGD's. `schedule`: "constant"; "cosine"
    falls from lr to 0; "onecycle" rises to lr and falls to 0, both linearly. `warmup`: the fraction of all steps in
    which the rate rises (by default 0, and 0.25 for "onecycle").

    `loss`: "cross_entropy" (of one output: binary, of its sigmoid); "mse" to one-hot targets (of one output: ±1);
    "sigmoid_mse", the same of sigmoids and to 0 and 1; or a function (outputs, y) -> mean over the batch. The two
    squared losses also take real targets y of the outputs' shape. `augment`: "flip_crop", or a function (images,
    generator) -> images. `precision`: "float16" and "bfloat16" train by autocast on CUDA, None and "float32" as the
    parameters are. `captured`: on CUDA, a step is recorded once as a CUDA graph and replayed, which takes a small
    network a fraction of the time. Python is not asked again, so forward() and a loss of your own must do the same at
    every step: no random numbers of the CPU, no counting, no turn that depends on values.

    >>> recipe = Recipe(epochs=30, batch=512, lr=0.4, schedule="onecycle", weight_decay=5e-4, augment="flip_crop")
    >>> [recipe.factor(part) for part in (0.125, 0.25, 0.625, 1)]
    [0.5, 1.0, 0.5, 0.0]
    """

    epochs: int = 10
    batch: int = 128
    lr: float | int | None = None
    optimizer: str | Rule = "sgd"
    momentum: float | int = 0.9
    nesterov: bool = True
    weight_decay: float | int = 0.0
    schedule: str = "constant"
    warmup: float | int | None = None
    loss: str | Loss = "cross_entropy"
    label_smoothing: float | int = 0.0
    augment: str | Augment | None = None
    precision: str | None = None
    channels_last: bool = False
    captured: bool = False

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"{name}={value!r}; needed: a whole number, at least 1.")
        for name in ("momentum", "weight_decay"):
            nonnegative(getattr(self, name), name)
        for name in ("momentum", "label_smoothing", "warmup"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1:
                raise InputError(f"{name}={value!r}; needed: at least 0, below 1.")
        if self.lr is not None and nonnegative(self.lr, "lr") == 0:
            raise InputError("lr=0 would train nothing; needed: a positive number.")
        choice(self.schedule, "schedule", PEAKS)
        if self.precision is not None:
            choice(self.precision, "precision", ["float32", *HALVES], ", or None")
        if self.augment is not None and not callable(self.augment):
            choice(self.augment, "augment", ["flip_crop"], ", a function (x, generator) -> x, or None")
        if not callable(self.loss):
            choice(self.loss, "loss", LOSSES, ", or a function (outputs, y) -> loss")
        if self.label_smoothing and self.loss != "cross_entropy":
            raise InputError(f"label_smoothing={self.label_smoothing}; it is a part of loss='cross_entropy' alone.")
        if not callable(self.optimizer):
            choice(self.optimizer, "optimizer", RATES, ", or a function parameters -> torch.optim.Optimizer")
        elif self.lr is not None or self.weight_decay:
            raise InputError("optimizer= is a function, which sets lr and weight_decay itself. Leave both out.")
        if self.captured:
            self._check_captured()

    def _check_captured(self) -> None:
        """Refuse what a CUDA graph cannot hold, or would repeat as it was at first."""
        reasons = {
            "optimizer= is a function, whose rate cannot be changed from outside": callable(self.optimizer),
            "augment= draws other changes at every step": self.augment is not None,
            "precision='float16' looks at the gradients in Python": self.precision == "float16",
        }
        for reason, holds in reasons.items():
            if holds:
                raise InputError(f"captured=True records one step and replays it; {reason}. Leave one of the two out.")

    def but(self, **changes: Any) -> "Recipe":
        """This recipe with other values of some fields."""
        known = [field.name for field in fields(self)]
        for name in changes:
            if name not in known:
                raise InputError(
                    f"{name}= is no option of training.{suggest(name, known)} Options: {', '.join(known)}."
                )
        return replace(self, **changes)

    @property
    def peak(self) -> float:
        """The learning rate that the schedule multiplies; 1 where the optimizer is a function and sets its own."""
        return float(self.lr or RATES.get(str(self.optimizer), 1.0))

    def factor(self, done: float | int) -> float:
        """The part of the learning rate that is used after the fraction `done` of all steps."""
        rise = PEAKS[self.schedule] if self.warmup is None else self.warmup
        if done < rise:
            return done / rise
        left = (1 - done) / (1 - rise)
        return {"constant": 1.0, "cosine": 0.5 - 0.5 * math.cos(math.pi * left), "onecycle": left}[self.schedule]

    def rule(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of these parameters."""
        if callable(self.optimizer):
            return self.optimizer(parameters)
        # Fused steps need no word from the GPU, not even whether a scaled float16 gradient overflowed.
        fused = parameters[0].is_cuda or None
        options: dict[str, Any] = {"lr": self.peak, "weight_decay": self.weight_decay, "fused": fused}
        if self.optimizer == "sgd":
            # Without momentum, Nesterov's step is the plain one; torch refuses the pair.
            nesterov = self.nesterov and self.momentum > 0
            return torch.optim.SGD(parameters, momentum=self.momentum, nesterov=nesterov, **options)
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adam
        return kind(parameters, capturable=self.captured and parameters[0].is_cuda, **options)
