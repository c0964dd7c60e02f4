"""Hand-written: sharing, routing, recurrence, wrappers and unusual inputs."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from benchmarks.robustness.adversary.entry import CLASSES, Entry, entry, family, rows, tokens


def mlp(width: int = 10) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, CLASSES))


def compiled() -> nn.Module:
    return cast(nn.Module, torch.compile(mlp(), backend="eager"))


class TwoNames(nn.Module):
    """One layer under two names, used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.blocks = nn.ModuleList([self.first, nn.Linear(6, CLASSES)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.again(self.first(x).tanh()).tanh() + self.blocks[0](x))


class TiedWeights(nn.Module):
    """One tensor as a weight, transposed as another, and alone in a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(4, 6, bias=False)
        self.decode.weight = nn.Parameter(torch.randn(6, 4) / 3)
        self.head = nn.Linear(6, CLASSES)
        self.head.bias = nn.Parameter(torch.randn(CLASSES))
        self.extra = self.head.bias

    def forward(self, x: Tensor) -> Tensor:
        h = F.linear(self.encode(x).tanh(), self.encode.weight.T) + self.decode(F.linear(x, self.decode.weight.T))
        return self.head(h.tanh()) * self.extra


class Unrolled(nn.Module):
    """The same block several times, as in a deep equilibrium model."""

    def __init__(self, until: float | None) -> None:
        super().__init__()
        self.inject, self.block, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)
        self.until = until

    def forward(self, x: Tensor) -> Tensor:
        u = self.inject(x)
        h = torch.zeros_like(u)
        for _ in range(12):
            new = torch.tanh(0.5 * self.block(h) + u)
            if self.until is not None and float((new - h).detach().abs().max()) < self.until:
                break
            h = new
        return self.head(h)


class FunctionalSharing(nn.Module):
    """A network called with its weights doubled and with its own, by functional_call."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = mlp(), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        changed = {name: self.scale * p for name, p in self.inner.named_parameters()}
        return functional_call(self.inner, changed, (x,)) + self.inner(x)


class Routed(nn.Module):
    """Experts by index: each sees only the samples that are sent to it."""

    def __init__(self, top: int, tokens_too: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(6, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.SiLU(), nn.Linear(8, CLASSES)) for _ in range(4))
        self.top, self.tokens_too = top, tokens_too

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weight, chosen = self.gate(flat).softmax(-1).topk(self.top)
        out = flat.new_zeros(len(flat), CLASSES)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if len(row):
                out = out.index_add(0, row, expert(flat[row]) * weight[row, place, None])
        return out.view(*x.shape[:-1], CLASSES).mean(1) if self.tokens_too else out


class LoopOverSamples(nn.Module):
    """A Python loop over the batch; sample by sample through one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd, self.head = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = [(self.even if float(row[0].detach()) > 0 else self.odd)(row).tanh() for row in x]
        return self.head(torch.stack(hidden))


class Checkpointed(nn.Module):
    """checkpoint around blocks of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(2))
        self.stem, self.head = nn.Linear(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        for block in self.blocks:
            h = h + checkpoint(block, h, use_reentrant=False)
        return self.head(h)


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(4, 6, batch_first=True, **options)
        self.head = nn.LazyLinear(CLASSES)
        self.head(self.rnn(torch.zeros(1, 2, 4))[0])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0]).mean(1)


class Packed(nn.Module):
    """A packed sequence; the lengths are an input."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(4, 6, batch_first=True), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.rnn(packed)[1][0])


class States(nn.Module):
    """(x, (h0, c0)) with the sample first, turned for the LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:
        h, c = (s.transpose(0, 1).contiguous() for s in state)
        return self.head(self.rnn(x.transpose(0, 1), (h, c))[0][-1])


class Cells(nn.Module):
    """LSTMCell and GRUCell in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.head = nn.LSTMCell(4, 6), nn.GRUCell(6, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = c = g = x.new_zeros(len(x), 6)
        for step in x.unbind(1):
            h, c = self.lstm(step, (h, c))
            g = self.gru(h, g)
        return self.head(g)


class Nested(nn.Module):
    """Dicts within dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 8), nn.Embedding(10, 8), nn.Linear(8, CLASSES)

    def forward(self, features: dict[str, Any], flip: Tensor) -> dict[str, Any]:
        h = self.left(features["dense"]["values"]) + self.right(features["words"][0]).mean(1)
        return {"out": [self.head(h.tanh() * flip[:, None])]}


class Flagged(nn.Module):
    """A Python flag and a number among the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.other = mlp(), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor, extra: bool = False, factor: float = 1.0) -> Tensor:
        return self.net(x) + factor * self.other(x) if extra else self.net(x)


class SequenceFirst(nn.Module):
    """nn.Transformer layers with the sequence in the leading dimension."""

    def __init__(self, both: bool) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 12, "dropout": 0.0}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(**sizes) if both else None
        self.query, self.head = nn.Parameter(torch.randn(3, 1, 8)), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x.transpose(0, 1))
        if self.decoder is not None:
            h = self.decoder(self.query.expand(-1, len(x), -1), h)
        return self.head(h.mean(0))


class Registers(nn.Module):
    """A class token, registers and positions before nn.MultiheadAttention."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.registers = nn.Parameter(torch.randn(1, 1, 8)), nn.Parameter(torch.randn(3, 8))
        self.positions = nn.Parameter(torch.randn(4, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, add_bias_kv=True)
        self.norm, self.head = nn.RMSNorm(8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        h = torch.cat([self.token.expand(n, -1, -1), x + self.positions, self.registers.repeat(n, 1, 1)], 1)
        h = h + self.attention(*[self.norm(h)] * 3, need_weights=False)[0]
        return self.head(h[:, 0])


def states(n: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return torch.randn(n, 5, 4), (torch.randn(n, 1, 6), torch.randn(n, 1, 6))


def nested(n: int) -> dict[str, Any]:
    dense = {"values": torch.randn(n, 4)}
    return {"features": {"dense": dense, "words": (torch.randint(0, 10, (n, 3)),)}, "flip": torch.ones(n) - 0.5}


def flat_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.1, batch_first=True, norm_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32, CLASSES))


def named() -> nn.Module:
    """Names that hold dots of the wrapper and the like."""
    inner = nn.Sequential(OrderedDict(module=nn.Linear(6, 8), weight=nn.Tanh(), out=nn.Linear(8, CLASSES)))
    return nn.Sequential(OrderedDict(module=inner))


def frozen() -> nn.Module:
    """Only a bias, a norm and the last layer train; the rest is held fast."""
    net = mlp()
    for p in net[0].parameters():
        p.requires_grad_(False)
    net[0].bias.requires_grad_(True)
    return net


def recurrent(kind: Callable[..., nn.RNNBase], **options: Any) -> Callable[[], nn.Module]:
    return lambda: Recurrent(kind, **options)


SEQUENCE = rows(5, 4)
ENTRIES: list[Entry] = family(
    "odd",
    [
        entry("two_names", TwoNames, rows(6)),
        entry("tied_weights", TiedWeights, rows(6)),
        entry("unrolled_fixed", lambda: Unrolled(None), rows(6)),
        entry("functional_sharing", FunctionalSharing, rows(6)),
        entry("routed_top1", lambda: Routed(1), rows(6)),
        entry("routed_top2", lambda: Routed(2), rows(6)),
        entry("routed_tokens", lambda: Routed(2, tokens_too=True), rows(4, 6)),
        entry("loop_over_samples", LoopOverSamples, rows(6)),
        entry("checkpointed", Checkpointed, rows(6)),
        entry("lstm", recurrent(nn.LSTM), SEQUENCE),
        entry("lstm_bidirectional", recurrent(nn.LSTM, bidirectional=True, num_layers=2), SEQUENCE),
        entry("lstm_projected", recurrent(nn.LSTM, proj_size=3), SEQUENCE),
        entry("gru", recurrent(nn.GRU, num_layers=2), SEQUENCE),
        entry("rnn", recurrent(nn.RNN, nonlinearity="relu"), SEQUENCE),
        entry("rnn_packed", Packed, lambda n: (torch.randn(n, 5, 4), torch.arange(n) % 4 + 2)),
        entry("lstm_states", States, states),
        entry("recurrent_cells", Cells, SEQUENCE),
        entry("nested_dicts", Nested, nested, lambda out: out["out"][0]),
        entry("python_flags", Flagged, lambda n: (torch.randn(n, 6), True, 0.5)),
        entry("python_flags_by_name", Flagged, lambda n: {"x": torch.randn(n, 6), "extra": True}),
        entry("sequence_first", lambda: SequenceFirst(False), rows(4, 8)),
        entry("sequence_first_decoder", lambda: SequenceFirst(True), rows(4, 8)),
        entry("transformer_encoder", flat_encoder, rows(4, 8)),
        entry("registers", Registers, rows(4, 8)),
        entry("data_parallel", lambda: nn.DataParallel(mlp()), rows(6)),
        entry("compiled", compiled, rows(6)),
        entry("odd_names", named, rows(6)),
        entry("frozen", frozen, rows(6)),
        entry("words", lambda: nn.Sequential(nn.Embedding(20, 6), nn.Flatten(), nn.Linear(30, CLASSES)), tokens(5, 20)),
    ],
)
