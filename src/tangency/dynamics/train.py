"""Training a module by any torch optimizer, keeping what it puts out on the way."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import _check, _tree
from .._progress import bar
from .._types import Float, Inputs, Outputs
from ..errors import DidNotConverge, InputError
from ..network import pick

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
    _check.inputs(x)
    n = _tree.size(x)
    if len(y) != n:
        raise InputError(f"x has {n} samples and y has {len(y)}; needed: as many.")
    if (steps is None) == (batches is None):
        raise InputError("give either steps= (of all samples) or batches= (the samples of each step).")
    plan = [None] * (steps or 0) if batches is None else [torch.as_tensor(b) for b in batches]
    step_rule = optimizer([p for p in module.parameters() if p.requires_grad])
    kept: list[tuple[int, Tensor, Tensor | None, Tensor]] = []

    def forward(inputs: Inputs) -> Tensor:
        args, kwargs = _tree.arguments(inputs)
        return pick(module(*args, **kwargs), outputs)

    def keep(number: int) -> None:
        with torch.no_grad():
            out = forward(x)
            kept.append((number, out, None if x_test is None else forward(x_test), loss(out, y)))
        if watch is not None:
            watch(number)

    keep(0)
    with bar(len(plan), "training", "step", show=progress) as tick:
        for number, rows in enumerate(plan, 1):

            def closure(rows: Tensor | None = rows) -> Tensor:
                step_rule.zero_grad()
                batch, target = (x, y) if rows is None else (_tree.take(x, rows), y[rows])
                value = loss(forward(batch), target)
                value.backward()
                return value

            value = torch.as_tensor(step_rule.step(closure))  # type: ignore[arg-type]
            if number % every == 0 or number == len(plan):
                keep(number)
            tick(note=f"loss {float(value.detach()):.3g}")
    history = _history(kept)
    if not bool(history.loss.isfinite().all()):
        raise DidNotConverge("training diverged: the loss is not finite. Use a smaller learning rate.", history)
    return history


def _history(kept: list[tuple[int, Tensor, Tensor | None, Tensor]]) -> History:
    test = None if kept[0][2] is None else torch.stack([t for _, _, t, _ in kept if t is not None])
    outputs = torch.stack([out for _, out, _, _ in kept])
    return History(
        torch.tensor([k for k, _, _, _ in kept]).to(outputs), outputs, test, torch.stack([v for _, _, _, v in kept])
    )
