"""Training a network as it is usually done, so that its kernel can be looked at."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.progress import bar
from .._base.results import Result, text_table
from .._base.types import Float, Inputs
from ..errors import DidNotConverge, InputError, TangencyWarning
from .augment import flip_crop
from .evaluate import (
    THRESHOLD,
    are_classes,
    check_classes,
    count,
    device_of,
    evaluating,
    inside_parallel,
    last,
    outputs,
    pair,
    predictions,
    run_model,
    same_number,
)
from .losses import LOSSES
from .recipe import HALVES, Recipe
from .recorded import Recorded, Step
from .seeds import seeded

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, eq=False, repr=False)
class Training(Result):
    """How it went: the mean loss and accuracy of each epoch's training batches, and the test accuracy after it.

    `accuracy` is None where y are no classes, `test_accuracy` where no test samples were given. `batch_loss`: the loss
    of each step's batch, before the step.
    """

    loss: Float[Tensor, " e"]
    accuracy: Float[Tensor, " e"] | None
    test_accuracy: Float[Tensor, " e"] | None
    seconds: float
    seed: int
    recipe: Recipe
    batch_loss: Float[Tensor, " s"]

    UNITS: ClassVar = {"seconds": "s"}

    def table(self) -> str:
        """Loss and accuracies, a line for each epoch."""
        columns = {"loss": self.loss, "accuracy": self.accuracy, "test accuracy": self.test_accuracy}
        shown = {name: values for name, values in columns.items() if values is not None}
        rows = [[epoch + 1, *(float(v[epoch]) for v in shown.values())] for epoch in range(len(self.loss))]
        return text_table(["epoch", *shown], rows)

    def plot(self) -> "Figure":
        """A figure: the loss, and the accuracies where there are classes, by epoch."""
        from ..plots import draw_training

        return draw_training(self)


def fit(
    model: nn.Module,
    x: object,
    y: object = None,
    recipe: Recipe | None = None,
    *,
    test: object = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    progress: bool = True,
    **changes: Any,
) -> Training:
    """θ ← θ - lr · step(∇L(f(x; θ), y)) over shuffled batches, on the model itself, which is then ready for kernels.

    How it is trained, the `Recipe` says; `changes` are its fields: `fit(model, x, y, epochs=30, lr=0.1)`. Batches,
    augmentation and dropout depend on `seed` alone, and on a CPU the weights do, to the bit; on a GPU only after
    `torch.use_deterministic_algorithms(True, warn_only=True)`, since cuDNN's backward passes add up in any order. The
    caller's generators are untouched. Each epoch's ⌈n / batch⌉ batches differ in size by one at most, so no norm meets
    a tiny last batch; one that would be left with a single number is refused. Of a model in DataParallel the one inside
    is trained. The named losses take logits: a network that ends in a sigmoid or softmax of its own gets a warning.

    x: tensors or arrays, a tuple or dict of them, or lists of numbers; y: likewise, one entry for each sample; or
    `tg.datasets.Labelled` in place of both. The model is in training mode while it is trained and in evaluation mode
    afterwards. `test`, (x, y) or a Labelled, is evaluated after each epoch. The data are moved to the model's device
    once, the GPU is asked for numbers once an epoch. Raises `DidNotConverge`, which holds the epochs so far, where an
    epoch's loss is not finite.

    >>> import tangency as tg
    >>> x = torch.randn(200, 2)
    >>> net = tg.models.initialized(lambda: tg.models.mlp([2, 16, 1]), seed=0)
    >>> past = tg.models.fit(net, x, (x[:, 0] > 0).long(), epochs=20, batch=20)
    >>> past.loss.shape, bool(past.accuracy[-1] > 0.95), net.training
    (torch.Size([20]), True, False)
    """
    recipe = (recipe or Recipe()).but(**changes)
    given, model = model, alone(model)
    if device is not None:
        model.to(device)
    with seeded(seed, device_of(model)), laid_out(model, recipe):
        run = prepare_run(model, x, y, recipe, seed, test)
        start = perf_counter()
        rows: list[list[float]] = []
        given.train()
        try:
            check_norms(model, run.per_sample, run.n // run.batches, recipe)
            with bar(recipe.epochs * run.batches, "training", "step", show=progress) as tick:
                for number in range(recipe.epochs):
                    rows.append(run.epoch(number, tick))
                    check_finite(run.training(rows, start))
        finally:
            run.close()
            given.eval()
        return run.training(rows, start)


@contextmanager
def laid_out(model: nn.Module, recipe: Recipe) -> Iterator[None]:
    """Within it, weights of convolutions have their channels last, where the recipe says so; after it, as usual."""
    if recipe.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    try:
        yield
    finally:
        if recipe.channels_last:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def alone(model: nn.Module) -> nn.Module:
    """The model that is trained, in this one process."""
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; needed: a torch.nn.Module.")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise InputError("the model is in DistributedDataParallel, and fit trains in one process. Give model.module.")
    return inside_parallel(model)


def prepare_run(model: nn.Module, x: object, y: object, recipe: Recipe, seed: int, test: Any) -> "_Run":
    """All checks, and everything on the model's device."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise InputError("the model has no parameter that requires a gradient, so there is nothing to train.")
    check_precision(recipe, parameters[0])
    x, y = checked_data(x, y, model, "")
    with evaluating(model), torch.no_grad(), norms(model) as per_sample:
        out = run_model(model, tree.take(x, slice(0, 2)))
    labels = y.long() if are_classes(y) else None
    if callable(recipe.loss):
        targets, value = y, recipe.loss
        sensible = labels is not None and out.dim() <= 2 and y.min() >= 0 and y.max() < max(count(out), 2)
        labels = labels if sensible else None
    else:
        named = LOSSES[recipe.loss]
        targets, value = named.targets(y, out, recipe.label_smoothing), named.value
    seen = last(model, x)
    check_ending(seen, recipe, are_classes(y), count(out) if out.dim() in (1, 2) else 0)
    first = value(out, targets[:2])
    if not isinstance(first, Tensor) or first.numel() != 1:
        shape = tuple(first.shape) if isinstance(first, Tensor) else type(first).__name__
        raise InputError(f"the loss of a batch is {shape}; needed: one number, the mean over the batch.")
    if test is not None:
        if not hasattr(test, "y") and not (isinstance(test, (tuple, list)) and len(test) == 2):
            raise InputError(f"test is a {type(test).__name__}; needed: (x, y), or tangency.datasets.Labelled.")
        samples, said = (test, None) if hasattr(test, "y") else test
        test = checked_data(samples, said, model, "test ")
        check_classes(test[1], out, "test y")
    check_images(x, recipe)
    generator = torch.Generator(parameters[0].device).manual_seed(seed)
    rule = recipe.rule(parameters)
    scaler = torch.amp.GradScaler(parameters[0].device.type, enabled=recipe.precision == "float16")
    at = THRESHOLD[seen or "logits"]
    return _Run(model, x, targets, labels, value, test, recipe, seed, generator, rule, scaler, per_sample, at)


def check_ending(seen: str | None, recipe: Recipe, classes: bool, q: int) -> None:
    """Warn of a network that ends in a sigmoid or softmax, where the loss takes one again or wants other numbers."""
    twice = recipe.loss == "sigmoid_mse" or (recipe.loss == "cross_entropy" and (seen != "log_softmax" or q == 1))
    beyond = recipe.loss == "mse" and classes and q == 1
    if seen is None or not (twice or beyond):
        return
    again = "softmax" if recipe.loss == "cross_entropy" and q > 1 else "sigmoid"
    does = "has the targets -1 and 1, of which it reaches one at most" if beyond else f"takes the {again} of that again"
    warnings.warn(
        f"the network ends in {seen}, and loss={recipe.loss!r} {does}. Train the network without its last {seen}, or "
        "with a loss of your own: loss=a function of (outputs, y).",
        TangencyWarning,
        stacklevel=4,
    )


@contextmanager
def norms(model: nn.Module) -> Iterator[dict[str, float]]:
    """How many numbers of a sample each batch norm takes its mean over, filled in while the model runs."""
    per_sample: dict[str, float] = {}

    def look(name: str) -> Callable[[nn.Module, tuple[object, ...]], None]:
        """A hook that notes the norm's inputs under its name."""

        def seen(module: nn.Module, args: tuple[object, ...]) -> None:
            """Note how many numbers of a sample the mean is taken over."""
            if args and isinstance(args[0], Tensor) and args[0].dim() > 1:
                per_sample[name] = args[0].numel() / (args[0].shape[0] * args[0].shape[1])

        return seen

    hooks = [
        m.register_forward_pre_hook(look(name))
        for name, m in model.named_modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm)
    ]
    try:
        yield per_sample
    finally:
        for hook in hooks:
            hook.remove()


def check_norms(model: nn.Module, per_sample: dict[str, float], smallest: int, recipe: Recipe) -> None:
    """Refuse batches in which a norm of the batch would have a single number, and no variance."""
    for name, m in model.named_modules():
        if m.training and per_sample.get(name, 2.0) * smallest < 2:
            raise InputError(
                f"batch={recipe.batch} leaves a batch of one sample, in which the batch norm {name} "
                f"({type(m).__name__}) has one number to normalise. Give a larger batch=, or another number of samples."
            )


def checked_data(x: object, y: object, model: nn.Module, whose: str) -> tuple[Inputs, Tensor]:
    """The samples and labels, checked, as the model takes them and on its device."""
    x, y = pair(x, y, whose)
    tree.check(x, f"{whose}x")
    device = device_of(model)
    x = tree.suited(tree.transform(lambda v: v.to(device), x), model, f"{whose}x")
    same_number(x, y, f"{whose}y")
    for label, v in tree.leaves(x):
        checks.finite(v, f"{whose}{label}")
    return x, y.to(device)


def check_precision(recipe: Recipe, parameter: Tensor) -> None:
    """16 bits on CUDA alone."""
    if recipe.precision in HALVES and not parameter.is_cuda:
        crash = " (on a CPU, bfloat16 crashes some processors)" if recipe.precision == "bfloat16" else ""
        raise InputError(
            f"precision={recipe.precision!r} trains by autocast on CUDA{crash}; the model is on {parameter.device}. "
            "Leave precision out, or move the model: device='cuda'."
        )
    if recipe.precision is not None and parameter.dtype != torch.float32:
        raise InputError(f"precision={recipe.precision!r}, the parameters are {parameter.dtype}. Use model.float().")


def check_images(x: Inputs, recipe: Recipe) -> None:
    """What augmentation and the layout of channels need."""
    given = f"{tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
    if recipe.augment is not None and not isinstance(x, Tensor):
        raise InputError(f"augment= changes a tensor; x is {given}.")
    if recipe.augment == "flip_crop" or recipe.channels_last:
        option = "augment='flip_crop'" if recipe.augment == "flip_crop" else "channels_last=True"
        if not isinstance(x, Tensor) or x.dim() != 4 or not x.is_floating_point():
            raise InputError(f"{option} needs images [n, c, h, w] of real numbers; x is {given}.")
    if recipe.augment == "flip_crop" and isinstance(x, Tensor):
        flip_crop(x[:1], torch.Generator(x.device))


def check_finite(past: Training) -> None:
    """Refuse to go on where the last epoch's loss is no number."""
    if not bool(past.loss[-1].isfinite()):
        rate = "the learning rate" if callable(past.recipe.optimizer) else f"lr={past.recipe.peak:g}"
        raise DidNotConverge(
            f"training diverged: the loss of epoch {len(past.loss)} of {past.recipe.epochs} is {float(past.loss[-1])}. "
            f"Lower {rate}, warm up (warmup=0.1), or standardise x.",
            past,
        )


@dataclass(eq=False)
class _Run:
    """One training under way."""

    model: nn.Module
    x: Inputs
    targets: Tensor
    labels: Tensor | None
    value: Callable[[Tensor, Tensor], Tensor]
    test: tuple[Inputs, Tensor] | None
    recipe: Recipe
    seed: int
    generator: torch.Generator
    rule: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    per_sample: dict[str, float]  # numbers of a sample that a batch norm takes its mean over
    at: float  # above which a single output says the second class

    def __post_init__(self) -> None:
        self.n = len(self.targets)
        self.batches = ceil(self.n / self.recipe.batch)
        self.rates = [group["lr"] for group in self.rule.param_groups]
        self.device = self.targets.device
        self.take: Step = self.step
        self.losses: list[Tensor] = []  # of each epoch's batches
        if self.recipe.captured:
            self.take = Recorded(self.step, self.device)
            for group in self.rule.param_groups:  # fused steps on CUDA read the rate in float32, there
                kind = torch.float32 if self.device.type == "cuda" else torch.float64
                group["lr"] = torch.tensor(group["lr"], dtype=kind, device=self.device)

    def close(self) -> None:
        """Give back gradients and recorded steps."""
        self.rule.zero_grad()
        if isinstance(self.take, Recorded):
            self.take.forget()

    def epoch(self, number: int, tick: Callable[..., object]) -> list[float]:
        """Loss, accuracy and test accuracy: numbers stay on the device until its end, so that it never waits."""
        batches = torch.randperm(self.n, generator=self.generator, device=self.device).tensor_split(self.batches)
        found = torch.empty(self.batches, 2, dtype=torch.float64, device=self.device)
        for k, rows in enumerate(batches):
            # The rate at the middle of each step: neither the first nor the last is one of rate 0.
            self.set_rate(self.recipe.factor((number * self.batches + k + 0.5) / (self.recipe.epochs * self.batches)))
            found[k] = self.take(rows)
            if k + 1 < self.batches:
                tick()  # the last step's comes with what the epoch has to say
        losses, right = found.cpu().T
        self.losses.append(losses)
        sizes = torch.tensor([len(rows) for rows in batches], dtype=torch.float64)
        loss, accuracy = float(losses @ sizes) / self.n, float(right.sum()) / self.n
        numbers = [loss, accuracy, self.tested()]
        shown = [f"loss {loss:.3g}"] + [f"accuracy {accuracy:.1%}"] * (self.labels is not None)
        tick(note=", ".join(shown + [f"test {numbers[2]:.1%}"] * (self.test is not None)))
        return numbers

    def set_rate(self, factor: float) -> None:
        """The schedule's part of the learning rate."""
        for group, rate in zip(self.rule.param_groups, self.rates, strict=True):
            if self.recipe.captured:
                group["lr"].fill_(rate * factor)
            else:
                group["lr"] = rate * factor

    def step(self, rows: Tensor) -> Tensor:
        """One step on these samples: their mean loss, and how many of them were right before it."""
        batch = self.augmented(tree.take(self.x, rows))
        with self.autocast():
            out = run_model(self.model, batch)
        out = out.float() if out.dtype in HALVES.values() else out
        value = self.value(out, self.targets[rows])
        self.rule.zero_grad()
        self.scaler.scale(value).backward()
        self.scaler.step(self.rule)
        self.scaler.update()
        right = 0 * value if self.labels is None else (predictions(out, self.at) == self.labels[rows]).sum()
        return torch.stack([value.detach().double(), right.detach().double()])

    def augmented(self, batch: Inputs) -> Inputs:
        """The batch, changed and laid out as the recipe says."""
        if self.recipe.augment is not None:
            change = flip_crop if self.recipe.augment == "flip_crop" else self.recipe.augment
            batch = change(batch, self.generator)  # type: ignore[operator, arg-type]
        if self.recipe.channels_last and isinstance(batch, Tensor):
            batch = batch.contiguous(memory_format=torch.channels_last)
        return batch

    def autocast(self) -> AbstractContextManager[object]:
        """16 bits where the recipe says so."""
        if self.recipe.precision not in HALVES:
            return nullcontext()
        return torch.autocast("cuda", HALVES[self.recipe.precision])

    def tested(self) -> float:
        """The test accuracy; NaN if an output is."""
        if self.test is None:
            return float("nan")
        x, y = self.test
        with self.autocast():
            out = outputs(self.model, x)
        return float("nan") if out.isnan().any() else float((predictions(out, self.at) == y).double().mean())

    def training(self, rows: list[list[float]], start: float) -> Training:
        """What there is to report."""
        loss, accuracy, test = torch.tensor(rows, dtype=torch.float64).T
        return Training(
            loss,
            None if self.labels is None else accuracy,
            None if self.test is None else test,
            perf_counter() - start,
            self.seed,
            self.recipe,
            torch.cat(self.losses),
        )
