"""The options and kernels that users call: checkpoints, subsets of parameters, outputs, heads, layers, combinators."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference import full, jacobians, trace
from torch import Tensor, nn

import tangency as tg
from tangency.models import lenet5, mlp

F64 = torch.float64
X = torch.randn(5, 6, dtype=F64, generator=torch.Generator().manual_seed(1))


def net(c: int = 3) -> nn.Sequential:
    return mlp([6, 7, c], nn.Tanh).double()


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-13)


def test_params_is_the_kernel_at_a_checkpoint_and_stays_there() -> None:
    model = net()
    other = net()
    want = tg.trace_ntk(other)(X)
    kernel = tg.trace_ntk(model, params=other.state_dict())
    live = tg.trace_ntk(other)
    close(kernel(X), want)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(1.5)
    close(kernel(X), want)  # a copy was taken
    assert float((live(X) - want).abs().max()) > 1e-3  # without params= the model's own are read at every call


def test_buffers_of_a_checkpoint_count() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double().eval()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    state["1.running_var"] = state["1.running_var"] * 4
    kernel = tg.trace_ntk(model, params=state)
    before = tg.trace_ntk(model)(X)
    model.load_state_dict(state)
    close(kernel(X), tg.trace_ntk(model)(X))
    assert float((kernel(X) - before).abs().max()) > 1e-3


def test_train_chooses_the_parameters() -> None:
    model = net()
    j = jacobians(model, X)
    first = {k: v for k, v in j.items() if k.startswith("0.")}
    want = trace(first, first)
    for choice in ("0", model[0], lambda name, p: name[0] == "0", ["0.weight", "0.bias"], [model[0]]):
        close(tg.trace_ntk(model, trainable=choice)(X), want)
    weight = {"0.weight": j["0.weight"]}
    close(tg.trace_ntk(model, trainable="0.weight")(X), trace(weight, weight))
    model[0].requires_grad_(False)
    rest = {k: v for k, v in j.items() if k.startswith("2.")}
    close(tg.trace_ntk(model)(X), trace(rest, rest))  # frozen parameters do not count by default
    close(tg.trace_ntk(model, trainable=["0", "2"])(X), trace(j, j))


def test_a_tied_parameter_may_be_named_by_either_name() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    model[2].weight = model[0].weight
    close(tg.trace_ntk(model, trainable="2.weight")(X), tg.trace_ntk(model, trainable="0.weight")(X))


def test_heads() -> None:
    model = net()
    rows = jacobians(model, X)
    pick = {k: v[:, 1:2] for k, v in rows.items()}
    close(tg.head_ntk(model, 1)(X), trace(pick, pick))
    gap = {k: v[:, 0:1] - v[:, 2:3] for k, v in rows.items()}
    close(tg.head_ntk(model, (0, 2))(X), trace(gap, gap))
    close(tg.head_ntk(model, lambda out: out[:, 0] - out[:, 2])(X), trace(gap, gap))
    close(tg.head_ntk(model, lambda out: out)(X), trace(rows, rows))
    sums = {k: v.sum(1, keepdim=True) / 3**0.5 for k, v in rows.items()}
    close(tg.pseudo_ntk(model)(X), trace(sums, sums))


def test_a_loss_takes_labels_from_the_inputs() -> None:
    model, y = net(), torch.tensor([0, 2, 1, 1, 0])
    kernel = tg.head_ntk(model, lambda out, labels: F.cross_entropy(out, labels, reduction="none"))
    j = jacobians(model, X)
    slope = (torch.softmax(model(X), 1) - F.one_hot(y, 3)).detach()
    chained = {k: torch.einsum("nc,nc...->n...", slope, v)[:, None] for k, v in j.items()}
    close(kernel((X, y)), trace(chained, chained))
    margin = tg.head_ntk(model, _margin)
    assert margin((X, y), (X[:2], y[:2])).shape == (5, 2)
    tg.testing.check_kernel(margin, (X, y))


def _margin(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    others = out.masked_fill(F.one_hot(y, out.shape[1]).bool(), -torch.inf)
    return out.gather(1, y[:, None])[:, 0] - others.amax(1)


def test_outputs_are_picked() -> None:
    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = net()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.body(x)
            return {"logits": y, "other": y * 2}

    model = Many()
    close(tg.trace_ntk(model)(X), tg.trace_ntk(model.body)(X))
    close(tg.trace_ntk(model, outputs="other")(X), 4 * tg.trace_ntk(model.body)(X))
    close(tg.trace_ntk(model, outputs=lambda r: r["other"])(X), 4 * tg.trace_ntk(model.body)(X))


def test_conjugate_and_embedding_kernels() -> None:
    model = net()
    z = torch.tanh(model[0](X)).detach()
    close(tg.conjugate_kernel(model)(X), 1 + z @ z.T)
    close(tg.conjugate_kernel(model, bias=False)(X), z @ z.T)
    first = model[0](X).detach()
    close(tg.conjugate_kernel(model, layer="0")(X), 1 + first @ first.T)
    close(tg.embedding_kernel(model)(X), z @ z.T + first @ first.T)
    close(tg.embedding_kernel(model, layers=["0"])(X), first @ first.T)
    parts = tg.embedding_kernel(model, layers=["0", "1"]).parts(X)
    close(parts["1"], z @ z.T)
    conv = lenet5().double()
    images = torch.randn(3, 3, 32, 32, dtype=F64)
    maps = conv[0](images).flatten(1).detach()
    close(tg.embedding_kernel(conv, layers="0")(images), maps @ maps.T)


def test_combinators() -> None:
    model = net()
    k, ck = tg.trace_ntk(model), tg.conjugate_kernel(model)
    close(tg.sum(k, ck)(X), k(X) + ck(X))
    close(tg.sum([k, tg.scale(ck, 3)]).diag(X), k.diag(X) + 3 * ck.diag(X))
    close(tg.scale(k, 0.5)(X, X[:2]), k(X, X[:2]) / 2)


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [
        *((k, F64) for k in ("full", "trace", "pseudo", "head", "ck", "em", "cosine", "full cosine", "sum")),
        *((k, torch.float32) for k in ("full", "em", "cosine", "sum")),
        *(
            pytest.param(k, torch.float32, marks=pytest.mark.slow)
            for k in ("trace", "pseudo", "head", "ck", "full cosine")
        ),
    ],
)
@pytest.mark.every(3)
def test_conformance(kernel: str, dtype: torch.dtype) -> None:
    model, x = lenet5(4, size=20).to(dtype).eval(), torch.randn(5, 3, 20, 20, dtype=dtype)
    made = {
        "full": tg.full_ntk(model),
        "trace": tg.trace_ntk(model),
        "pseudo": tg.pseudo_ntk(model),
        "head": tg.head_ntk(model, (0, 1)),
        "ck": tg.conjugate_kernel(model),
        "em": tg.embedding_kernel(model),
        "cosine": tg.cosine(tg.trace_ntk(model)),
        "full cosine": tg.cosine(tg.full_ntk(model)),
        "sum": tg.sum(tg.trace_ntk(model), tg.scale(tg.conjugate_kernel(model), 2.0)),
    }[kernel]
    tg.testing.check_kernel(made, x)


def test_full_kernel_reshapes_to_the_jacobian_product() -> None:
    model = net()
    j = torch.cat([v.flatten(2) for v in jacobians(model, X).values()], 2).reshape(15, -1)
    k = tg.full_ntk(model)(X)
    assert k.is_contiguous()
    close(k.view(15, 15), j @ j.T)
    close(torch.einsum("ncmc->nm", k), tg.trace_ntk(model)(X))
    close(full(jacobians(model, X), jacobians(model, X)), k)


def test_spec_tells_kernels_apart() -> None:
    model = net()
    specs = [
        tg.trace_ntk(model).spec(),
        tg.full_ntk(model).spec(),
        tg.trace_ntk(model, trainable="0").spec(),
        tg.trace_ntk(model, dtype="float32").spec(),
        tg.head_ntk(model, 0).spec(),
        tg.head_ntk(model, lambda out: out[:, 0]).spec(),
        tg.head_ntk(model, lambda out: out[:, 1]).spec(),
        tg.conjugate_kernel(model, bias=False).spec(),
        tg.trace_ntk(net()).spec(),
    ]
    assert len({str(s) for s in specs}) == len(specs)


def test_other_positions_on_the_two_sides() -> None:
    """A fully convolutional net on images of two sizes: t ≠ s."""
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.Tanh(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2)
    ).double()
    x, y = torch.randn(3, 2, 6, 6, dtype=F64), torch.randn(2, 2, 5, 8, dtype=F64)
    want = trace(jacobians(model, x), jacobians(model, y))
    for method in (None, "expand", "in place"):
        close(tg.trace_ntk(model, method=method)(x, y), want)


def test_inside_inference_mode() -> None:
    model = net()
    want = tg.trace_ntk(model)(X)
    with torch.inference_mode():
        close(tg.trace_ntk(model)(X * 1.0), want)
        close(tg.conjugate_kernel(model)(X * 1.0), tg.conjugate_kernel(model)(X))


def test_every_sample_shape_is_probed() -> None:
    """Memory estimates and rows per sample belong to a shape."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 2)).double()
    kernel = tg.trace_ntk(model)
    small = kernel.footprint(torch.randn(3, 1, 8, 8, dtype=F64))
    large = kernel.footprint(torch.randn(3, 1, 32, 32, dtype=F64))
    assert large[1] > 8 * small[1]
    factors = tg.trace_ntk(model, method="in place")
    assert factors.footprint(torch.randn(3, 1, 32, 32, dtype=F64))[0] > 8 * large[0]


def test_gradients_are_formed_once_where_they_are_smaller() -> None:
    """A convolution over many positions keeps its gradients, a linear layer its factors; the footprint says so."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 3)).double()
    x = torch.randn(5, 1, 8, 8, dtype=F64)
    kernel = tg.trace_ntk(model)
    blocks = kernel.prepare(x)
    assert isinstance(blocks["0.weight"], tg.engine.blocks.DenseBlock)
    assert isinstance(blocks["3.weight"], tg.engine.blocks.OuterBlock)
    assert sum(b.nbytes for b in blocks.values()) == 5 * kernel.footprint(x)[0]
    assert {r.parameter: r.method for r in kernel.costs(x).rows}["0.weight"] == "formed"
    factors = tg.trace_ntk(model, method="in place")
    assert isinstance(factors.prepare(x)["0.weight"], tg.engine.blocks.OuterBlock)
    for other in (factors, tg.trace_ntk(model, method="expand")):
        close(other(x), kernel(x))
        close(other.diag(x), kernel.diag(x))
    close(kernel.pair(blocks, factors.prepare(x)), kernel(x))  # one side formed, the other not
    small = kernel.prepare(x, memory=1)  # one sample at a time, put together
    close(small["0.weight"].g, blocks["0.weight"].g)
    half, exact = tg.trace_ntk(model, dtype="float16"), kernel(x)
    assert half.prepare(half.ready(x))["0.weight"].g.dtype == torch.float16
    assert float((half(x) - exact).abs().max()) < 2e-3 * float(exact.abs().max())
    assert float((half.diag(x) - exact.diagonal()).abs().max()) < 2e-3 * float(exact.abs().max())


def test_methods_can_be_forced_by_name_and_costs_say_so() -> None:
    model = lenet5(4).double()
    x = torch.randn(3, 3, 32, 32, dtype=F64)
    kernel = tg.trace_ntk(model, method={"0.weight": "in place", "7.weight": "expand"})
    close(kernel(x), tg.trace_ntk(model)(x))
    rows = {row.parameter: row for row in kernel.costs(x).rows}
    assert rows["0.weight"].method == "in place"
    assert rows["7.weight"].method == "expand"
    assert rows["9.weight"].method == "outer"
    assert "0.weight" in str(kernel.costs(x))
    with pytest.raises(tg.InputError, match="names '9.wight'"):
        tg.trace_ntk(model, method={"9.wight": "expand"})


def test_costs_print_as_a_table_and_go_into_json() -> None:
    costs = tg.trace_ntk(net()).costs(X, X[:2])
    lines = costs.table().splitlines()
    assert str(costs) == costs.table()
    assert lines[0].startswith("trace ntk, 5 x 2 samples")
    assert len(lines) == 3 + len(costs.rows) + 2  # a title, a header, a rule; a line of what a sample takes
    assert lines[-1].endswith("while it is captured: all fit into the budget")
    said = [tuple(line.split()[-2:]) for line in lines[3 : 3 + len(costs.rows)]]
    spent = [(row.cost.flops, row.cost.bytes) if row.cost else (0, 0) for row in costs.rows]
    assert said == [(f"{flops / 1e9:.3g}", f"{moved / 1e6:.3g}") for flops, moved in spent]
    assert lines[0].endswith(f", {costs.flops / 1e9:.3g} Gflop to contract")
    assert len(repr(costs)) < 200
    record = json.loads(json.dumps(costs.to_dict()))
    assert [row["parameter"] for row in record["rows"]] == [row.parameter for row in costs.rows]


@pytest.mark.parametrize("dtype", ["float32", "tf32", "float16"])
def test_the_forward_pass_is_never_rounded(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU lower precision is allowed for the backward passes and the contraction alone: ReLUs must not flip."""
    from contextlib import contextmanager

    from tangency.engine.network import Network

    state: list[bool] = []
    seen: list[tuple[str, bool]] = []
    modes, call = Network.modes, Network.__call__

    @contextmanager
    def noted(self: Network, **options: bool) -> Iterator[None]:
        state.append(options.get("exact", False))
        with modes(self, **options):
            yield
        state.pop()

    def forward(self: Network, *args: Any) -> Tensor:
        seen.append(("forward", state[-1]))
        out = call(self, *args)
        if out.requires_grad:
            out.register_hook(lambda g: seen.append(("backward", state[-1])))
        return out

    x = torch.randn(4, 3)
    kernel = tg.trace_ntk(mlp([3, 5, 2]), dtype=dtype)
    kernel(x)  # the probe, which is exact throughout
    monkeypatch.setattr(Network, "modes", noted)
    monkeypatch.setattr(Network, "__call__", forward)
    kernel(x)
    assert seen == [("forward", True), ("backward", False), ("backward", False)]


def test_micro_batches_of_different_forms_are_put_together() -> None:
    """A model may go another way for some samples, so that a parameter's blocks differ in kind."""
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(4 * 36, 3)).double()
    x = torch.randn(4, 1, 8, 8, dtype=F64)
    factors = tg.trace_ntk(model, method="in place").prepare(x)["0.weight"]
    dense = tg.engine.blocks.formed(factors)
    mixed = tg.engine.blocks.MixedBlock((factors, factors))
    half = tg.trace_ntk(model, dtype="float16")
    scaled = half.prepare(half.ready(x))["0.weight"]
    kinds = [factors, dense, mixed, scaled]
    wide = tg.engine.blocks.DenseBlock(scaled.expand())
    same = half.pair({"w": scaled}, {"w": scaled})
    for a, b in ((scaled, wide), (wide, scaled), (wide, wide)):  # one side may have been put together
        torch.testing.assert_close(half.pair({"w": a}, {"w": b}), same, rtol=1e-5, atol=1e-5)
    for first in kinds:
        for second in kinds:
            target = tg.engine.micro_batches.put(None, first.rows(slice(0, 2)), 0, 4)
            whole = tg.engine.micro_batches.put(target, second.rows(slice(2, 4)), 2, 4).expand().double()
            want = torch.cat([first.expand()[:2].double(), second.expand()[2:].double()])
            torch.testing.assert_close(whole, want, rtol=1e-6, atol=1e-6)


def test_a_diagonal_holds_the_features_of_few_samples_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """10,000 samples of a ResNet18 would take all of a large GPU."""
    sizes: list[int] = []
    whole = tg.kernels.empirical.Empirical.prepare

    def prepare(self: tg.kernels.empirical.Empirical, x: Tensor, memory: int | None = None) -> object:
        sizes.append(len(x))
        return whole(self, x, memory)

    k, x = tg.trace_ntk(nn.Linear(3, 2).double()), torch.randn(150, 3).double()
    want = k(x).diagonal()
    monkeypatch.setattr(tg.kernels.empirical.Empirical, "prepare", prepare)
    torch.testing.assert_close(k.diag(x), want)
    assert max(sizes) <= tg.kernels.kernel.DIAGONAL_BLOCK
    assert sum(sizes) == 150
