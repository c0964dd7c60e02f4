"""Recurrent layers taken apart into linear ones that share their weights over the steps."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from ..rules import NoRule
from .bilinear import IsWeight

CellWeights = Sequence[Tensor | None]  # input to hidden, hidden to hidden, their biases, projection of the state
State = tuple[Tensor, ...]  # h, or (h, c)
Cell = Callable[[Tensor, Tensor, State], State]  # what the input and the state give, and the state before


def as_data(v: Tensor) -> Tensor:
    """v, which the recorder is to treat as data even if it is a constant: an initial state is the first of many."""
    if torch.overrides.has_torch_function_unary(v):
        return torch.overrides.handle_torch_function(as_data, (v,), v)
    return v.clone()


def _lstm(x: Tensor, h: Tensor, state: State) -> State:
    i, f, g, o = (x + h).chunk(4, -1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(x: Tensor, h: Tensor, state: State) -> State:
    (xr, xz, xn), (hr, hz, hn) = x.chunk(3, -1), h.chunk(3, -1)
    z = torch.sigmoid(xz + hz)
    new = torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return (new + z * (state[0] - new),)


def _tanh(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.tanh(x + h),)


def _relu(x: Tensor, h: Tensor, state: State) -> State:
    return (torch.relu(x + h),)


CELLS: dict[str, Cell] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _tanh, "rnn_relu": _relu}


def layer_steps(kind: str) -> Callable[..., Callable[[], object]]:
    """torch.lstm, torch.gru, torch.rnn_tanh and torch.rnn_relu on batches that are not packed."""
    cell = CELLS[kind]

    def take_apart(
        is_weight: IsWeight, input: Tensor, hx: Tensor | Sequence[Tensor], params: object, has_biases: bool,
        num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> Callable[[], tuple[Tensor, ...]]:  # fmt: skip
        """The layer as linear layers over its steps; NoRule where it has another form or dropout."""
        if not isinstance(params, (list, tuple)) or input.dim() != 3 or (train and dropout):
            raise NoRule
        start: State = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        directions = 2 if bidirectional else 1
        count = len(params) // (num_layers * directions)  # weights of one layer in one direction
        if any(is_weight(v) for v in start) or count not in ((4, 5) if has_biases else (2, 3)):
            raise NoRule

        def weights(k: int) -> CellWeights:
            """Those of one layer and direction: two weights, two biases or None, a projection or None."""
            of_layer = list(params[k * count : (k + 1) * count])
            projection = of_layer.pop() if count % 2 else None
            return [*of_layer, *([] if has_biases else [None, None]), projection]

        def steps() -> tuple[Tensor, ...]:
            """What torch returns: the outputs and the last states."""
            x = input.transpose(0, 1) if batch_first else input
            ends: list[State] = []
            for layer in range(num_layers):
                outs = []
                for d in range(directions):
                    k = layer * directions + d
                    y, end = _run(cell, x, tuple(s[k] for s in start), weights(k), reverse=d == 1)
                    outs.append(y)
                    ends.append(end)
                x = torch.cat(outs, -1) if bidirectional else outs[0]
            finals = tuple(torch.stack(s) for s in zip(*ends, strict=True))
            return (x.transpose(0, 1) if batch_first else x, *finals)

        return steps

    return take_apart


def _run(cell: Cell, x: Tensor, state: State, weights: CellWeights, reverse: bool) -> tuple[Tensor, State]:
    """One layer in one direction: x [t, n, i] → outputs [t, n, h] and the last state."""
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    assert w_ih is not None
    assert w_hh is not None
    # All inputs at once: they do not depend on the state.
    rows = F.linear(x, w_ih, b_ih).unbind(0)
    # Zeros, mostly: as constants, the first step's products with weights would be weights, and not taps like the rest.
    state = tuple(as_data(s) for s in state)
    outs = []
    for row in reversed(rows) if reverse else rows:
        state = cell(row, F.linear(state[0], w_hh, b_hh), state)
        if w_hr is not None:
            state = (F.linear(state[0], w_hr), *state[1:])
        outs.append(state[0])
    return torch.stack(outs[::-1] if reverse else outs), state


def cell_steps(kind: str) -> Callable[..., Callable[[], object]]:
    """torch.lstm_cell, torch.gru_cell, …"""
    cell = CELLS[kind]

    def take_apart(
        is_weight: IsWeight,
        input: Tensor,
        hx: Tensor | Sequence[Tensor],
        w_ih: Tensor,
        w_hh: Tensor,
        b_ih: Tensor | None = None,
        b_hh: Tensor | None = None,
    ) -> Callable[[], Tensor | State]:
        """The cell as two linear layers and its gates."""
        state: State = (hx,) if isinstance(hx, Tensor) else tuple(hx)
        if any(is_weight(v) for v in state) or is_weight(input):
            raise NoRule

        def steps() -> Tensor | State:
            """What torch returns: the new state, or a pair of them."""
            new = cell(F.linear(input, w_ih, b_ih), F.linear(state[0], w_hh, b_hh), state)
            return new[0] if len(new) == 1 else new

        return steps

    return take_apart
