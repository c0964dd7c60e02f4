"""Training a module by any torch optimizer, keeping what it puts out on the way."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._base import checks, tree
from .._base.progress import bar
from .._base.types import Float, Inputs, Outputs
from ..engine.network import pick
from ..errors import DidNotConverge, InputError
from .path import schedule

Optimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]


@dataclass(frozen=True, eq=False)
class History:
    """Outputs and loss after 0, …, the last step, on the training samples and on the test samples where there are."""

    steps: Float[Tensor, " t"]
    train: Float[Tensor, "t ..."]
    test: Float[Tensor, "t ..."] | None
    loss: Float[Tensor, " t"]


def train(
    module: nn.Module,
    x: Inputs,
    y: Tensor,
    *,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: Optimizer,
    steps: int | None = None,
    batches: Iterable[Any] | None = None,
    x_test: Inputs | None = None,
    every: int = 1,
    outputs: Outputs = None,
    watch: Callable[[int], Any] | None = None,
    progress: bool = True,
) -> History:
    """θ ← optimizer(∇L(f(x; θ), y)) on the module itself, in the mode it is in, with what it puts out on the way.

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
    checks.inputs(x)
    n = tree.size(x)
    if len(y) != n:
        raise InputError(f"x has {n} samples and y has {len(y)}; needed: as many.")
    plan = [b if b is None else torch.as_tensor(b) for b in schedule(steps, batches)]
    step_rule = optimizer([p for p in module.parameters() if p.requires_grad])
    record = _Record(module, x, y, loss, x_test, outputs, watch)
    record.keep(0)
    with bar(len(plan), "training", "step", show=progress) as tick:
        for number, rows in enumerate(plan, 1):

            def closure(rows: Tensor | None = rows) -> Tensor:
                step_rule.zero_grad()
                batch, target = (x, y) if rows is None else (tree.take(x, rows), y[rows])
                value = loss(record.forward(batch), target)
                value.backward()
                return value

            value = torch.as_tensor(step_rule.step(closure))  # type: ignore[arg-type]
            if number % every == 0 or number == len(plan):
                record.keep(number)
            tick(note=f"loss {float(value.detach()):.3g}")
    history = record.history()
    if not bool(history.loss.isfinite().all()):
        raise DidNotConverge("training diverged: the loss is not finite. Use a smaller learning rate.", history)
    return history


@dataclass(eq=False)
class _Record:
    """What the module puts out, kept at the steps asked for."""

    module: nn.Module
    x: Inputs
    y: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    x_test: Inputs | None
    outputs: Outputs
    watch: Callable[[int], Any] | None
    kept: list[tuple[int, Tensor, Tensor | None, Tensor]] = field(default_factory=list)

    def forward(self, inputs: Inputs) -> Tensor:
        args, kwargs = tree.arguments(inputs)
        return pick(self.module(*args, **kwargs), self.outputs)

    def keep(self, number: int) -> None:
        with torch.no_grad():
            out = self.forward(self.x)
            test = None if self.x_test is None else self.forward(self.x_test)
            self.kept.append((number, out, test, self.loss(out, self.y)))
        if self.watch is not None:
            self.watch(number)

    def history(self) -> History:
        steps, outputs, tests, losses = zip(*self.kept, strict=True)
        train = torch.stack(outputs)
        test = None if self.x_test is None else torch.stack(tests)
        return History(torch.tensor(steps).to(train), train, test, torch.stack(losses))
