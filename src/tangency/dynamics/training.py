"""Training a module by any torch optimizer, keeping what it puts out on the way."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from .._base import tree
from .._base.misfit import in_words
from .._base.progress import bar
from .._base.results import Result
from .._base.types import Float, Inputs, Numbers, PickedOutputs
from ..engine.heads import pick
from ..errors import DidNotConverge, InputError
from .path import Batch, Loss, schedule

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True, eq=False, repr=False)
class History(Result):
    """Outputs and loss after 0, …, the last step, on the training samples and on the test samples where there are."""

    steps: Float[Tensor, " t"]
    train: Float[Tensor, "t ..."]
    test: Float[Tensor, "t ..."] | None
    loss: Float[Tensor, " t"]


def train(
    model: nn.Module,
    x: Inputs,
    y: Numbers,
    *,
    loss: Loss,
    optimizer: Optimizer,
    steps: int | None = None,
    batches: Iterable[Batch] | None = None,
    x_test: Inputs | None = None,
    every: int = 1,
    outputs: PickedOutputs = None,
    watch: Callable[[int], object] | None = None,
    progress: bool = True,
) -> History:
    """θ ← optimizer(∇L(f(x; θ), y)) on the model itself, in the mode it is in, with what it puts out on the way.

    With `tg.linearize(model)` this is linearised training by any optimizer, Adam included. `optimizer` is called with
    the parameters: `lambda p: torch.optim.Adam(p, lr=1e-3)`. `batches`: the samples of each step (default: all, `steps`
    times). `every`: which steps are kept; the last always is. `watch(step)` is called at these: a `Monitor`, say.

    >>> import tangency as tg
    >>> net, x = tg.models.mlp([3, 8, 1]), torch.randn(20, 3)
    >>> lin = tg.linearize(net)
    >>> adam = lambda p: torch.optim.Adam(p, lr=1e-2)
    >>> past = tg.dynamics.train(lin, x, x[:, :1], loss=torch.nn.functional.mse_loss, optimizer=adam, steps=30)
    >>> past.train.shape, bool(past.loss[-1] < past.loss[0])
    (torch.Size([31, 20, 1]), True)
    """
    x = tree.suited(x, model)
    y = _targets(model, x, y)
    x_test = None if x_test is None else tree.suited(x_test, model, "x_test")
    plan = [b if b is None else torch.as_tensor(b) for b in schedule(steps, batches)]
    step_rule = optimizer([p for p in model.parameters() if p.requires_grad])
    record = _Record(model, x, y, loss, x_test, outputs, watch)
    # Step 0 is the start; a Monitor that watches takes it for Θ_0.
    record.keep(0)
    with bar(len(plan), "training", "step", show=progress) as tick:
        for number, rows in enumerate(plan, 1):
            # torch.optim calls it, some optimizers (LBFGS) more than once a step.
            def closure(rows: Tensor | None = rows) -> Tensor:
                """The batch's loss, with gradients left in the parameters."""
                step_rule.zero_grad()
                batch, target = (x, y) if rows is None else (tree.take(x, rows), y[rows])
                value = loss(record.forward(batch), target)
                value.backward()
                return value

            value = torch.as_tensor(step_rule.step(closure))  # type: ignore[arg-type]
            if number % every == 0 or number == len(plan):
                record.keep(number)
            tick(note=f"loss {float(value.detach()):.3g}")
    # A run that diverged is raised with what it went through.
    history = record.history()
    if not bool(history.loss.isfinite().all()):
        raise DidNotConverge("training diverged: the loss is not finite. Use a smaller learning rate.", history)
    return history


def _targets(model: nn.Module, x: Inputs, given: Numbers) -> Tensor:
    """A target for each sample; real ones in the type of the parameters, if that is one."""
    y, n = tree.numbers(given), tree.size(x)
    if y.dim() == 0 or len(y) != n:
        raise InputError(f"x has {n} samples and y has {y.shape[0] if y.dim() else 'one number'}; needed: as many.")
    dtype = tree.dtype_of(model)
    return y if dtype is None else tree.cast_tensor(y, dtype, "y")


@dataclass(eq=False)
class _Record:
    """What the model puts out, kept at the steps asked for."""

    model: nn.Module
    x: Inputs
    y: Tensor
    loss: Loss
    x_test: Inputs | None
    outputs: PickedOutputs
    watch: Callable[[int], object] | None
    kept: list[tuple[int, Tensor, Tensor | None, Tensor]] = field(default_factory=list)

    def forward(self, inputs: Inputs) -> Tensor:
        """What the model puts out, the tensor of it that `outputs` picks."""
        args, kwargs = tree.arguments(inputs)
        with in_words(inputs):
            returned = self.model(*args, **kwargs)
        return pick(returned, self.outputs)

    def keep(self, number: int) -> None:
        """Keep outputs and loss after so many steps, and tell `watch`."""
        with torch.no_grad():
            out = self.forward(self.x)
            test = None if self.x_test is None else self.forward(self.x_test)
            self.kept.append((number, out, test, self.loss(out, self.y)))
        if self.watch is not None:
            self.watch(number)

    def history(self) -> History:
        """All that was kept, stacked."""
        steps, outputs, tests, losses = zip(*self.kept, strict=True)
        train = torch.stack(outputs)
        test = None if self.x_test is None else torch.stack(tests)
        return History(torch.tensor(steps).to(train), train, test, torch.stack(losses))
