"""Each guard speaks before expensive work: what was given, what is needed, the fix."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tangency as tg

X = torch.randn(4, 6)


def net(*middle: nn.Module, c: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.ReLU(), nn.Linear(8, c))


class Fn(nn.Module):
    """A model whose forward is a function of (model, x)."""

    def __init__(self, f) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.first, self.second, self.f = nn.Linear(6, 8), nn.Linear(8, 3), f

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.f(self, x)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.1), nn.RReLU()])
def test_random_layers_in_training_mode(layer: nn.Module) -> None:
    model = net(layer)
    message = rf"^{type(layer).__name__} layer '1' is in training mode, so the model is random.*model\.eval\(\)"
    with pytest.raises(tg.ModelError, match=message):
        tg.trace_ntk(model)(X)
    model.eval()
    assert tg.trace_ntk(model)(X).shape == (4, 4)


def test_dropout_inside_attention_and_lstm() -> None:
    with pytest.raises(tg.ModelError, match="self_attn.*training mode"):
        tg.trace_ntk(nn.TransformerEncoderLayer(6, 2, 8, dropout=0.1))(torch.randn(2, 3, 6))
    with pytest.raises(tg.ModelError, match="training mode"):
        tg.trace_ntk(nn.LSTM(6, 4, num_layers=2, dropout=0.3), outputs=0)(torch.randn(2, 3, 6))


def test_batch_statistics() -> None:
    model = net(nn.BatchNorm1d(8))
    with pytest.raises(tg.ModelError, match=r"^BatchNorm1d layer '1' uses the statistics of.*model\.eval\(\)"):
        tg.trace_ntk(model)(X)
    model = net(nn.BatchNorm1d(8, track_running_stats=False)).eval()
    with pytest.raises(tg.ModelError, match="track_running_stats=True"):
        tg.trace_ntk(model)(X)


def test_outputs_that_depend_on_other_samples() -> None:
    model = Fn(lambda m, x: m.second(F.relu(m.first(x - x.mean(0)))))
    with pytest.raises(tg.ModelError, match="depends on the other samples of the batch"):
        tg.trace_ntk(model)(X)


def test_a_random_forward() -> None:
    model = Fn(lambda m, x: m.second(F.dropout(m.first(x), 0.5, training=True)))
    with pytest.raises(tg.ModelError, match=r"draws random numbers in training mode \(model, first"):
        tg.trace_ntk(model)(X)
    with pytest.raises(tg.ModelError, match="although it is in evaluation mode"):
        tg.trace_ntk(model.eval())(X)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_outputs_name_the_sample(bad: float) -> None:
    x = X.clone()
    x[2, 1] = bad
    with pytest.raises(tg.NonFiniteError, match="output for sample 2 is not finite") as e:
        tg.trace_ntk(net())(x)
    assert e.value.sample == 2
    many = torch.randn(40, 6)
    many[33] = bad
    with pytest.raises(tg.NonFiniteError, match="sample 33"):
        tg.compute(tg.trace_ntk(net()), many, memory="60KB", progress=False)


def test_non_finite_gradients_name_sample_and_layer() -> None:
    model = Fn(lambda m, x: m.second(torch.sqrt(F.relu(m.first(x)) * (x[:, :1] > 0))))  # √ has slope ∞ at 0
    x = X.abs()
    with torch.no_grad():
        model.first.bias.fill_(10.0)
    x[3, 0] = -1.0
    with pytest.raises(tg.NonFiniteError, match=r"gradient for sample 3 is not finite at parameter first\.weight"):
        tg.trace_ntk(model)(x)


def test_frozen_and_unused_parameters() -> None:
    model = net()
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(tg.InputError, match="every parameter is frozen.*trainable="):
        tg.trace_ntk(model)
    assert tg.trace_ntk(model, trainable=lambda name, p: True)(X).shape == (4, 4)
    model = Fn(lambda m, x: m.first(x))
    parts = tg.trace_ntk(model).parts(X)
    assert float(parts["second.weight"].abs().max()) == 0
    assert "unused" in str(tg.trace_ntk(model).costs(X))
    with pytest.raises(tg.ModelError, match="do not depend on any of the parameters"):
        tg.trace_ntk(model, trainable="second")(X)
    with pytest.raises(tg.InputError, match="no parameters"):
        tg.trace_ntk(nn.ReLU())


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(0, 6), r"zero samples.*\(0, 6\)"),
        (torch.tensor(1.0), "x is a scalar"),
        ([[1.0] * 6], "holds no tensor"),
        (3, "x is a int; needed: a tensor"),
        ({}, "holds no tensor"),
        ((torch.randn(3, 6), torch.randn(2, 6)), "disagree on the number of samples"),
        (torch.full((3, 6), 1e39, dtype=torch.float64), r"x\[0, 0\] is 1e\+39, too large for torch.float32"),
        (torch.randn(3, 6, device="meta"), "x is on meta, the parameters are on cpu"),
    ],
)
def test_inputs(x: object, message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        tg.trace_ntk(net())(x)  # type: ignore[arg-type]


def test_sixteen_bit_parameters_need_a_decision() -> None:
    with pytest.raises(tg.InputError, match=r"parameters are torch.float16. Say in what to compute: dtype="):
        tg.trace_ntk(net().half())(X.half())
    assert tg.trace_ntk(net().half(), dtype="float32")(X.half()).dtype == torch.float32


def test_second_inputs_are_checked_too() -> None:
    kernel = tg.trace_ntk(net())
    with pytest.raises(tg.InputError, match=r"x2 of shape \(0, 6\)"):
        kernel(X, X[:0])
    with pytest.raises(tg.InputError, match="x1 and x2 differ in form"):
        kernel(X, (X,))
    with pytest.raises(tg.InputError, match=r"x1 and x2 differ: x is \(4, 6\)"):
        kernel(X, X[:, None])


def test_a_wrong_shape_is_said_with_the_layer_that_takes_another() -> None:
    with pytest.raises(tg.InputError, match=r"^Linear '0' takes 6 features, x has 5: x is .* of shape \(4, 5\)"):
        tg.trace_ntk(net())(torch.randn(4, 5))


def test_outputs() -> None:
    pair = Fn(lambda m, x: (m.first(x), m.first(x)))
    with pytest.raises(tg.InputError, match=r"returned a tuple of 2; needed: one tensor"):
        tg.trace_ntk(pair)(X)
    with pytest.raises(tg.InputError, match="outputs='a' does not pick"):
        tg.trace_ntk(pair, outputs="a")(X)
    with pytest.raises(tg.ModelError, match="needed: the sample in the leading dimension"):
        tg.trace_ntk(Fn(lambda m, x: m.first(x).T))(X)
    with pytest.raises(tg.ModelError, match="output is torch.int64"):
        tg.trace_ntk(Fn(lambda m, x: m.first(x).argmax(1)))(X)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (7, "head=7: the model has 3 outputs"),
        ((0, 1, 2), "must be two output numbers"),
        (None, "head=None"),
        ("logit", "head='logit'; needed"),
        (lambda out: out.sum(), "head returned shape"),
        (lambda out, y: out, r"inputs as a tuple whose last 1"),
    ],
)
def test_heads(head: object, message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        tg.head_ntk(net(), head)(X)  # type: ignore[arg-type]


def test_options() -> None:
    model = net()
    with pytest.raises(tg.InputError, match="method='fast' is unknown"):
        tg.trace_ntk(model, method="fast")
    with pytest.raises(tg.InputError, match="dtype='float4'; needed: .* 'float8'"):
        tg.trace_ntk(model, dtype="float4")
    with pytest.raises(tg.InputError, match="dtype=torch.float8_e5m2; needed"):
        tg.trace_ntk(model, dtype=torch.float8_e5m2)
    with pytest.warns(tg.PerformanceWarning, match="dtype='float8' on cpu, which does not multiply 8-bit numbers"):
        assert tg.trace_ntk(model, dtype=torch.float8_e4m3fn).spec()["dtype"] == "float8"
    with pytest.raises(tg.InputError, match="dtype=torch.bfloat16; needed"):
        tg.trace_ntk(model, dtype=torch.bfloat16)
    with pytest.raises(tg.InputError, match=r"trainable='2.wieght' names no parameter.*Did you mean '2.weight'"):
        tg.trace_ntk(model, trainable="2.wieght")
    with pytest.raises(tg.InputError, match="no parameters of this model"):
        tg.trace_ntk(model, trainable=nn.Linear(2, 2))
    with pytest.raises(tg.InputError, match="selects none"):
        tg.trace_ntk(model, trainable=lambda name, p: False)
    with pytest.raises(tg.InputError, match="params= lacks 2.weight"):
        tg.trace_ntk(model, params={k: v for k, v in model.state_dict().items() if k != "2.weight"})
    with pytest.raises(tg.InputError, match=r"entries that the model lacks: 2.weigth.*Did you mean"):
        tg.trace_ntk(model, params=model.state_dict() | {"2.weigth": torch.ones(1)})
    with pytest.raises(tg.InputError, match=r"params\['0.bias'\] has shape \(1,\); the model's is \(8,\)"):
        tg.trace_ntk(model, params=model.state_dict() | {"0.bias": torch.ones(1)})
    with pytest.raises(tg.InputError, match=r"the model has no layer '3'"):
        tg.conjugate_kernel(model, layer="3")
    with pytest.raises(tg.InputError, match="needed: a torch.nn.Module"):
        tg.trace_ntk(torch.relu)  # type: ignore[arg-type]
    with pytest.raises(tg.InputError, match="a lazy module"):
        tg.trace_ntk(nn.LazyLinear(3))
    with pytest.raises(tg.InputError, match="scripted modules"):
        tg.trace_ntk(torch.jit.trace(model, X))


def test_combinators() -> None:
    kernel = tg.trace_ntk(net())
    with pytest.raises(tg.InputError, match="one or more kernels"):
        tg.sum()
    with pytest.raises(tg.InputError, match="finite number ≥ 0"):
        tg.scale(kernel, -1)
    with pytest.raises(tg.InputError, match="takes a kernel; it was given a Sequential"):
        tg.cosine(net())  # type: ignore[arg-type]
    with pytest.raises(tg.InputError, match="different shapes"):
        tg.sum(kernel, tg.full_ntk(net()))(X)
    dead = nn.Sequential(nn.Linear(6, 8, bias=False), nn.ReLU(), nn.Linear(8, 1, bias=False))
    with pytest.raises(tg.InputError, match=r"k\(x, x\) = 0 for sample 1"):
        tg.cosine(tg.trace_ntk(dead))(torch.cat([X[:1], torch.zeros(1, 6)]))
    with pytest.raises(tg.InputError, match="does not split"):
        tg.cosine(kernel).parts(X)


def test_memory() -> None:
    kernel = tg.trace_ntk(net())
    for bad in ("4 apples", "-1GB", 0, "0B"):
        with pytest.raises(tg.InputError, match="memory="):
            tg.compute(kernel, X, memory=bad)
    with pytest.raises(tg.MemoryBudgetError, match=r"too small.*Give at least memory="):
        tg.compute(kernel, X, memory=100)
    with pytest.raises(tg.InputError, match="kernel is a Sequential"):
        tg.compute(net(), X)  # type: ignore[arg-type]


def test_a_layer_input_changed_in_place() -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(m.first(x))
        y = m.second(h)
        h += 1.0
        return y

    with pytest.raises(tg.ModelError, match=r"input of the layer with second.weight was changed in place"):
        tg.trace_ntk(Fn(forward))(X)
