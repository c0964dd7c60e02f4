"""Nothing of a user's module is passed over: it is read, or refused by name with the fix.

The references are the plain recursion written out here and the modules' own Jacobians.
"""

import math
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ask import Ask
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import tangency as tg
from tangency.errors import InputError, ModelError, TangencyError, UnsupportedModule

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))


def relu_net(x: Tensor, first: bool = True, second: bool = True) -> Tensor:
    """Θ of Linear, ReLU, Linear with w_var = 2, b_var = 0, of the layers that are trained: the arc-cosine recursion."""
    k = 2 * x @ x.T / x.shape[1]
    norms = k.diagonal().sqrt()
    theta = (k / norms / norms[:, None]).clamp(-1, 1).acos()
    hidden = norms * norms[:, None] * (theta.sin() + (math.pi - theta) * theta.cos()) / (2 * math.pi)
    slope = (math.pi - theta) / (2 * math.pi)
    return 2 * hidden * second + 2 * k * slope * first


# Weights that are made of other parameters


class Double(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


def custom(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Double())


def on_bias(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "bias", Double())


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


MADE: dict[str, tuple[Callable[[nn.Module], Any], Callable[[nn.Module], Any], str]] = {
    "weight_norm": (
        parametrizations.weight_norm,
        lambda m: parametrize.remove_parametrizations(m, "weight"),
        r"0 \(Linear\): 0\.weight is made by torch\.nn\.utils\.parametrizations\.weight_norm.*remove_parametrizations",
    ),
    "spectral_norm": (
        parametrizations.spectral_norm,
        lambda m: parametrize.remove_parametrizations(m, "weight"),
        r"0\.weight is made by torch\.nn\.utils\.parametrizations\.spectral_norm",
    ),
    "orthogonal": (
        parametrizations.orthogonal,
        lambda m: parametrize.remove_parametrizations(m, "weight"),
        r"0\.weight is made by torch\.nn\.utils\.parametrizations\.orthogonal",
    ),
    "custom": (
        custom,
        lambda m: parametrize.remove_parametrizations(m, "weight"),
        r"0\.weight is made by .*Double.*remove_parametrizations\(module, \"weight\"\)",
    ),
    "bias": (
        on_bias,
        lambda m: parametrize.remove_parametrizations(m, "bias"),
        r"0\.bias is made by .*Double.*remove_parametrizations\(module, \"bias\"\)",
    ),
    "old weight_norm": (
        old_weight_norm,
        nn.utils.remove_weight_norm,
        r"0\.weight is made by torch\.nn\.utils\.weight_norm.*remove_weight_norm",
    ),
    "old spectral_norm": (
        nn.utils.spectral_norm,
        nn.utils.remove_spectral_norm,
        r"0\.weight is made by torch\.nn\.utils\.spectral_norm.*remove_spectral_norm",
    ),
    "pruning": (
        lambda m: prune.l1_unstructured(m, "weight", amount=0.5),
        lambda m: prune.remove(m, "weight"),
        r"0\.weight is made by torch\.nn\.utils\.prune.*prune\.remove\(module, \"weight\"\)",
    ),
}


@pytest.mark.parametrize("name", MADE)
def test_reparametrised_weights_are_refused_and_the_fix_works(name: str) -> None:
    make, undo, message = MADE[name]
    net = dense()
    kernel = tg.infinite_ntk(net)
    torch.testing.assert_close(kernel(X), relu_net(X))
    make(net[0])
    with pytest.raises(UnsupportedModule, match=message):
        tg.infinite_ntk(net)
    with pytest.raises(UnsupportedModule, match=message):
        kernel(X)  # made before
    alone = nn.Linear(3, 8)
    make(alone)
    with pytest.raises(UnsupportedModule, match="the module"):
        tg.infinite_nngp(alone)
    undo(net[0])
    torch.testing.assert_close(tg.infinite_ntk(net)(X), relu_net(X))


def test_reparametrised_weights_elsewhere() -> None:
    """Of recurrences, attention's parts, a class of the user's own, and a layer whose weight is used by itself."""
    rnn = nn.RNN(3, 8, batch_first=True)
    parametrizations.weight_norm(rnn, "weight_hh_l0")
    with pytest.raises(UnsupportedModule, match="weight_hh_l0 is made by"):
        tg.infinite_ntk(rnn)
    attention = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    parametrizations.weight_norm(attention.self_attn.out_proj)
    with pytest.raises(UnsupportedModule, match=r"self_attn\.out_proj\.weight is made by"):
        tg.infinite_ntk(attention)
    own = Ask(lambda s, x: F.linear(x, s.w), w=nn.Parameter(torch.randn(8, 3)))
    parametrize.register_parametrization(own, "w", Double())
    with pytest.raises(UnsupportedModule, match="w is made by"):
        tg.infinite_ntk(own)
    for change in (custom, old_weight_norm):
        borrowed = Ask(lambda s, x: F.linear(x, s.a.weight), a=nn.Linear(3, 8))
        change(borrowed.a)
        with pytest.raises(UnsupportedModule, match="a.weight is made by|requires a gradient but is no parameter"):
            tg.infinite_ntk(borrowed)(X)


def test_weights_that_are_no_parameters() -> None:
    for make in (lambda m, w: m.register_buffer("weight", w), lambda m, w: setattr(m, "weight", w)):
        net = dense()
        weight = net[0].weight.detach()
        del net[0].weight
        make(net[0], weight)
        with pytest.raises(UnsupportedModule, match=r"0\.weight is (a buffer|an attribute).*nn\.Parameter"):
            tg.infinite_ntk(net)
    net = dense()
    net[0].register_parameter("gain", nn.Parameter(torch.ones(1)))
    with pytest.raises(UnsupportedModule, match=r"0\.gain, which Linear does not know"):
        tg.infinite_ntk(net)
    made = nn.Parameter(torch.randn(8, 3))
    for value in (2 * made, torch.randn(8, 3, requires_grad=True)):
        with pytest.raises(UnsupportedModule, match="no parameter"):
            tg.infinite_ntk(Ask(lambda s, x: x @ s.w.T, w=value))(X)


# Hooks


def doubled(*args: Any) -> Any:
    return 2 * args[-1] if isinstance(args[-1], Tensor) else (2 * args[-1][0],)


HOOKS: dict[str, Callable[[nn.Module], Any]] = {
    "forward": lambda m: m.register_forward_hook(doubled),
    "forward with kwargs": lambda m: m.register_forward_hook(lambda m, a, k, out: 2 * out, with_kwargs=True),
    "forward pre": lambda m: m.register_forward_pre_hook(doubled),
    "forward pre with kwargs": lambda m: m.register_forward_pre_hook(lambda m, a, k: (a, k), with_kwargs=True),
    "backward": lambda m: m.register_full_backward_hook(lambda m, i, o: tuple(2 * g for g in i)),
    "backward pre": lambda m: m.register_full_backward_pre_hook(lambda m, o: tuple(2 * g for g in o)),
    "global forward": lambda m: nn.modules.module.register_module_forward_hook(lambda m, a, out: 2 * out),
    "global forward pre": lambda m: nn.modules.module.register_module_forward_pre_hook(doubled),
}


@pytest.mark.parametrize("name", HOOKS)
def test_hooks_are_refused(name: str) -> None:
    for place in ("", "0", "1", "2"):
        net = dense()
        kernel = tg.infinite_ntk(net)
        torch.testing.assert_close(kernel(X), relu_net(X))
        handle = HOOKS[name](net.get_submodule(place))
        try:
            for ask in (lambda n=net: tg.infinite_ntk(n), lambda k=kernel: k(X)):
                where = "the module" if "global" in name else place or "the module"
                with pytest.raises(UnsupportedModule, match=rf"{where} \(.*hook.*remove\(\)"):
                    ask()
        finally:
            handle.remove()
        torch.testing.assert_close(kernel(X), relu_net(X))


def test_hooks_inside_torchs_own_modules() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    layer.linear2.register_forward_hook(doubled)
    with pytest.raises(UnsupportedModule, match=r"linear2 \(Linear\).*hook"):
        tg.infinite_ntk(nn.TransformerEncoder(layer, 2))


# Code of its own


class Twice(nn.Linear):
    """A subclass with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Inherits(nn.Linear):
    pass


class Shifted(nn.Conv1d):
    """A subclass that changes what torch's forward calls."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return 2 * super()._conv_forward(x, weight, bias)


class NormTwice(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Called(nn.Sequential):
    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


def test_subclasses_are_read_by_their_own_forward() -> None:
    plain = tg.infinite_ntk(nn.Linear(3, 1), b_var=0.1)(X)
    torch.testing.assert_close(plain, 2 * X @ X.T / 3 + 0.1)
    torch.testing.assert_close(tg.infinite_ntk(Inherits(3, 1), b_var=0.1)(X), plain)
    torch.testing.assert_close(tg.infinite_ntk(Twice(3, 1), b_var=0.1)(X), 4 * plain)
    torch.testing.assert_close(tg.infinite_ntk(nn.Sequential(Twice(3, 1)), b_var=0.1)(X), 4 * plain)
    flat = tg.infinite_ntk(Shifted(3, 1, 1), b_var=0.1)(X[:, :, None])
    torch.testing.assert_close(flat.reshape(4, 4), 4 * plain)
    normed = tg.infinite_ntk(nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8)))(X)
    torch.testing.assert_close(tg.infinite_ntk(nn.Sequential(nn.Linear(3, 8), NormTwice(8)))(X), 4 * normed)
    torch.testing.assert_close(tg.infinite_ntk(nn.Sequential(Called(nn.Linear(3, 1))), b_var=0.1)(X), 4 * plain)
    with pytest.raises(UnsupportedModule, match="__call__ of its own"):
        tg.infinite_ntk(Called(nn.Linear(3, 1)))


def test_subclasses_inside_torchs_own_modules_are_refused() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    layer.linear1 = Twice(8, 16)
    with pytest.raises(UnsupportedModule, match=r"linear1 \(Twice\).*class of its own"):
        tg.infinite_ntk(layer)(torch.randn(2, 3, 8))


def test_a_replaced_forward_is_read_or_refused() -> None:
    net = dense()
    net[0].forward = lambda x: 2 * F.linear(x, net[0].weight, net[0].bias)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModule, match=r"0 \(Linear\): its forward was replaced"):
        tg.infinite_ntk(net)
    root = Ask(lambda s, x: s.a(x), a=nn.Linear(3, 1))
    root.forward = lambda x: 2 * root.a(x)  # type: ignore[method-assign]
    with pytest.raises(UnsupportedModule, match="its forward was replaced"):
        tg.infinite_ntk(root)
    inner = Ask(lambda s, x: s.a(x), a=nn.Linear(3, 1))
    inner.forward = lambda x: 2 * inner.a(x)  # type: ignore[method-assign]
    torch.testing.assert_close(tg.infinite_ntk(nn.Sequential(inner))(X), 8 * X @ X.T / 3)


def test_what_tracing_cannot_see_is_found_by_comparing() -> None:
    def by_type(s: Any, x: Any) -> Any:
        return s.a(x) if isinstance(x, Tensor) else 2 * s.a(x)

    def caught(s: Any, x: Any) -> Any:
        try:
            if x.sum() > -1e9:
                return 2 * s.a(x)
        except Exception:
            pass
        return s.a(x)

    for fn in (by_type, lambda s, x: s.a(x) * random.random()):
        with pytest.raises(UnsupportedModule, match="tracing passes over"):
            tg.infinite_ntk(Ask(fn, a=nn.Linear(3, 1)))(X)
    # A question about values stops fx; running the module shows which way all samples go.
    torch.testing.assert_close(tg.infinite_ntk(Ask(caught, a=nn.Linear(3, 1)))(X), 8 * X @ X.T / 3)


def no_grad(s: Any, x: Any) -> Any:
    with torch.no_grad():
        h = torch.relu(s.a(x))
    return s.b(h)


def in_place(s: Any, x: Any) -> Any:
    h = s.a(x)
    h.relu_()
    return s.b(h)


def in_place_view(s: Any, x: Any) -> Any:
    h = s.a(x)
    h.view(-1, 8).mul_(3)
    return s.b(torch.relu(h))


def added_to(s: Any, x: Any) -> Any:
    h = s.a(x)
    g = h
    g += 1
    return s.b(torch.relu(h))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * x

    @staticmethod
    def backward(ctx: Any, *g: Any) -> Any:
        return g[0]


UNSEEN: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "no_grad": (no_grad, r"without gradients.*requires_grad_\(False\)"),
    "detach": (lambda s, x: s.b(torch.relu(s.a(x)).detach()), "detach"),
    "data": (lambda s, x: s.b(torch.relu(s.a(x)).data), r"\.data"),
    "autograd.Function": (lambda s, x: s.b(Square.apply(s.a(x))), "autograd.Function"),
    "in place": (in_place, "in place.*old name"),
    "in place, by a view": (in_place_view, "in place.*old name"),
    "in place, +=": (added_to, "in place.*old name"),
    "in place, by a module": (lambda s, x: (lambda h: s.b(s.r(h)) + s.c(h))(s.a(x)), "in place.*old name"),
    "in place, by an option": (lambda s, x: (lambda h: s.b(F.relu(h, True)) + s.c(h))(s.a(x)), "in place.*old name"),
    "random numbers": (lambda s, x: s.b(torch.relu(s.a(x) + torch.randn(8))), "random numbers"),
    "noise on the input": (lambda s, x: s.b(torch.relu(s.a(x + torch.randn_like(x)))), "random numbers"),
    "dropout of the input": (lambda s, x: s.b(torch.relu(s.a(F.dropout(x)))), "random numbers"),
    "rounding": (lambda s, x: s.b(torch.div(s.a(x), 2, rounding_mode="floor")), "rounding_mode"),
    "integers": (lambda s, x: s.b(s.a(x).to(torch.int32)), "int32"),
    "integers, by keyword": (lambda s, x: s.b(s.a(x).to(dtype=torch.int32)), "int32"),
    "an output": (lambda s, x: s.b(torch.mul(s.a(x), 2, out=s.d(x))), "out="),
    "division by a parameter": (lambda s, x: s.b(s.a(x) / s.g), "divides by the parameter"),
    "a threshold for each sample": (lambda s, x: s.b(torch.clamp(s.a(x), min=x.mean(1, keepdim=True))), "beside"),
    "functional_call": (lambda s, x: torch.func.functional_call(s.a, {"weight": 2 * s.a.weight}, (x,)), "not a param"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNSEEN)
def test_what_a_graph_does_not_show(name: str) -> None:
    fn, message = UNSEEN[name]
    g, r = nn.Parameter(torch.full((8,), 2.0)), nn.ReLU(inplace=True)
    net = Ask(fn, a=nn.Linear(3, 8), b=nn.Linear(8, 1), c=nn.Linear(8, 1), d=nn.Linear(3, 8), g=g, r=r)
    with pytest.raises(UnsupportedModule, match=message):
        tg.infinite_ntk(net)(X)


def test_changes_in_place_that_change_nothing_else() -> None:
    """The usual forms are read, and the user's tensors stay as they are."""
    x = X.clone()
    for fn in (
        lambda s, x: s.b(F.relu(s.a(x), inplace=True)),
        lambda s, x: s.b(s.a(x).relu_()),
        lambda s, x: s.b(s.r(s.a(x))),
        lambda s, x: s.b(torch.relu(s.a(x.mul_(1.0)))),
    ):
        net = Ask(fn, a=nn.Linear(3, 8), b=nn.Linear(8, 1), r=nn.ReLU(inplace=True))
        torch.testing.assert_close(tg.infinite_ntk(net)(x), relu_net(X))
    torch.testing.assert_close(
        tg.infinite_ntk(Ask(lambda s, x: s.a(x.mul_(2.0)), a=nn.Linear(3, 1)))(x), 8 * X @ X.T / 3
    )
    assert torch.equal(x, X)


# Arguments and factors


def linear_kernel(net: nn.Module, x: Tensor) -> Tensor:
    """Θ of a module that is linear in its parameters, by its Jacobian, mean over outputs."""
    params = dict(net.double().named_parameters())
    j = torch.func.jacrev(lambda p: torch.func.functional_call(net, p, (x,)))(params)
    outs = net(x)[0].numel()
    return (
        sum(torch.einsum("ncp,mcp->nm", v.reshape(len(x), outs, -1), v.reshape(len(x), outs, -1)) for v in j.values())
        / outs
    )  # type: ignore[return-value]


FACTORS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[], dict[str, Any]], Callable[[Tensor], Tensor]]] = {
    "bias": (
        lambda s, x: F.linear(x, s.w, s.b * 3),
        lambda: {"w": nn.Parameter(torch.randn(5, 3)), "b": nn.Parameter(torch.randn(5))},
        lambda x: x @ x.T + 9,
    ),
    "weight": (
        lambda s, x: F.linear(x, s.w * 3, s.b),
        lambda: {"w": nn.Parameter(torch.randn(5, 3)), "b": nn.Parameter(torch.randn(5))},
        lambda x: 9 * x @ x.T + 1,
    ),
    "buffer": (
        lambda s, x: s.a(x) * s.c,
        lambda: {"a": nn.Linear(3, 5), "c": nn.Buffer(torch.tensor([3.0]))},
        lambda x: 9 * (x @ x.T + 1),
    ),
    "attribute": (
        lambda s, x: s.a(x) * s.scale,
        lambda: {"a": nn.Linear(3, 5), "scale": 3.0},
        lambda x: 9 * (x @ x.T + 1),
    ),
    "expanded positions": (
        lambda s, x: s.a(x).unsqueeze(1).expand(-1, 4, -1).sum(1),
        lambda: {"a": nn.Linear(3, 5)},
        lambda x: 16 * (x @ x.T + 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FACTORS)
def test_factors_are_read(name: str) -> None:
    fn, parts, want = FACTORS[name]
    net = Ask(fn, **parts())
    torch.testing.assert_close(linear_kernel(net, X), want(X))
    torch.testing.assert_close(tg.infinite_ntk(net, w_var=1.0, parametrization="standard")(X), want(X))


def test_multiples_of_scales_are_read() -> None:
    """h · (3γ): K by 9γ², and γ's own part 9·h·h."""
    gamma = nn.Parameter(torch.full((8,), 0.5))
    net = Ask(lambda s, x: s.a(x) * (s.g * 3), a=nn.Linear(3, 8, bias=False), g=gamma)
    k = X @ X.T / 3
    torch.testing.assert_close(tg.infinite_ntk(net, w_var=1.0)(X), 9 * 0.25 * k + 9 * k)
    torch.testing.assert_close(tg.infinite_nngp(net, w_var=1.0)(X), 9 * 0.25 * k)
    gamma.requires_grad_(False)
    torch.testing.assert_close(tg.infinite_ntk(net, w_var=1.0)(X), 9 * 0.25 * k)


def text() -> Tensor:
    return torch.randint(9, (4, 3), generator=torch.Generator().manual_seed(0))


REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "first hidden value": (
        lambda: Ask(lambda s, x: s.r(x[:, None], hx=torch.ones(1, 4, 8))[0], r=nn.RNN(3, 8, batch_first=True)),
        X,
        "first hidden value",
    ),
    "output size": (
        lambda: Ask(lambda s, x: s.u(x[:, None], output_size=[8]), u=nn.ConvTranspose1d(1, 8, 3, stride=2)),
        X,
        "output_size",
    ),
    "output size by place": (
        lambda: Ask(lambda s, x: s.u(x[:, None], [8]), u=nn.ConvTranspose1d(1, 8, 3, stride=2)),
        X,
        "2 arguments",
    ),
    "max_norm": (lambda: nn.Embedding(9, 8, max_norm=1.0), text(), "max_norm"),
    "scale_grad_by_freq": (lambda: nn.Embedding(9, 8, scale_grad_by_freq=True), text(), "scale_grad_by_freq"),
    "conv of a multiple": (
        lambda: Ask(lambda s, x: F.conv1d(x[:, None], s.w * 2), w=nn.Parameter(torch.randn(8, 1, 3))),
        X,
        "multiple of a parameter",
    ),
    "bias that is no parameter": (
        lambda: Ask(lambda s, x: F.linear(x, s.w, torch.ones(8)), w=nn.Parameter(torch.randn(8, 3))),
        X,
        "bias that is no parameter",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_no_reader_knows(name: str) -> None:
    make, x, message = REFUSED[name]
    with pytest.raises(UnsupportedModule, match=message):
        tg.infinite_ntk(make())(x)


def test_inputs_that_the_model_does_not_take() -> None:
    with pytest.raises(InputError, match=r"\['mask'\].*takes \['input'\]"):
        tg.infinite_ntk(dense())({"input": X, "mask": X})


def test_norms_that_do_not_begin_at_one() -> None:
    net = nn.Sequential(nn.Linear(30, 8), nn.LayerNorm(8), nn.Linear(8, 1))
    x = torch.randn(3, 30)
    before = tg.infinite_ntk(net, w_var="init")(x)
    nn.init.constant_(net[1].weight, 0.5)
    with pytest.raises(UnsupportedModule, match=r"1 \(LayerNorm\).*w_var='init'"):
        tg.infinite_ntk(net, w_var="init")(x)
    nn.init.ones_(net[1].weight)
    torch.testing.assert_close(tg.infinite_ntk(net, w_var="init")(x), before)


# Which parameters count


def test_frozen_parameters() -> None:
    net = dense()
    net[0].requires_grad_(False)
    torch.testing.assert_close(tg.infinite_ntk(net)(X), relu_net(X, first=False))
    torch.testing.assert_close(tg.infinite_ntk(net, trainable="0")(X), relu_net(X, second=False))
    layers = tg.infinite.Serial(net[0], tg.infinite.Relu(), tg.infinite.Linear())
    torch.testing.assert_close(tg.infinite_ntk(layers)(X), relu_net(X, first=False))
    torch.testing.assert_close(tg.infinite_ntk(layers, trainable=["0", "2"])(X), relu_net(X))


def test_tied_weights() -> None:
    same = nn.Linear(3, 3)
    for net in (
        tg.infinite.Serial(same, tg.infinite.Relu(), same),
        nn.Sequential(same, nn.ReLU(), same),
        nn.Sequential(same, nn.ReLU(), _with_memory_of(same)),
    ):
        with pytest.raises(UnsupportedModule, match="shares its weights"):
            tg.infinite_ntk(net)(X)
    torch.testing.assert_close(tg.infinite_ntk(nn.Sequential(same, nn.ReLU(), nn.Linear(3, 1)))(X), relu_net(X))


def _with_memory_of(layer: nn.Linear) -> nn.Linear:
    other = nn.Linear(3, 3)
    other.weight = nn.Parameter(layer.weight.data)  # another parameter of the same numbers
    return other


def test_modes_may_change_after_the_kernel_is_made() -> None:
    net = Ask(lambda s, x: s.a(x) * (1.0 if s.training else 2.0), a=nn.Linear(3, 1))
    kernel = tg.infinite_ntk(net.train())
    torch.testing.assert_close(kernel(X), 2 * X @ X.T / 3)
    net.eval()
    torch.testing.assert_close(kernel(X), 8 * X @ X.T / 3)


def test_numbers_that_mix_a_batch() -> None:
    for fn in (lambda s, x: s.a(x) * x.mean(), lambda s, x: s.a(x) / x.shape[0], lambda s, x: s.a(x) + x.sum().item()):
        with pytest.raises(ModelError, match="others of its batch"):
            tg.infinite_ntk(Ask(fn, a=nn.Linear(3, 1)))(X)


# Raw errors


class Many(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.a(args[0])


def forever(s: Any, x: Any) -> Any:
    return forever(s, s.a(x))


def assigned(s: Any, x: Any) -> Any:
    h = s.a(x)
    h[:, 0] = 0
    return h


STRAY = nn.Parameter(torch.randn(8, 3))
ODD: dict[str, Callable[[], Any]] = {
    "control flow on values": lambda: Ask(lambda s, x: s.a(x) if x.sum() > 0 else x, a=nn.Linear(3, 1)),
    "control flow on shapes": lambda: Ask(lambda s, x: s.a(x) if x.shape[0] > 2 else x, a=nn.Linear(3, 1)),
    "len": lambda: Ask(lambda s, x: s.a(x) * len(x), a=nn.Linear(3, 1)),
    "loop over a tensor": lambda: Ask(lambda s, x: sum(s.a(r) for r in x), a=nn.Linear(3, 1)),
    "float": lambda: Ask(lambda s, x: s.a(x) * float(x.mean()), a=nn.Linear(3, 1)),
    "numpy": lambda: Ask(lambda s, x: torch.tensor(s.a(x).detach().numpy()), a=nn.Linear(3, 1)),
    "recursion": lambda: Ask(forever, a=nn.Linear(3, 3)),
    "no forward": lambda: nn.ModuleList([nn.Linear(3, 1)]),
    "nothing": lambda: nn.Module(),
    "missing attribute": lambda: Ask(lambda s, x: s.nowhere(x)),
    "missing key": lambda: Ask(lambda s, x: {"a": s.a(x)}["b"], a=nn.Linear(3, 1)),
    "missing name": lambda: Ask(lambda s, x: undefined(s.a(x)), a=nn.Linear(3, 1)),  # type: ignore[name-defined] # noqa: F821
    "modules in a list": lambda: Ask(lambda s, x: s.all[0](x), all=[nn.Linear(3, 1)]),
    "a parameter from elsewhere": lambda: Ask(lambda s, x: F.linear(x, STRAY)),
    "an impossible shape": lambda: Ask(lambda s, x: s.a(x.reshape(7, -1)), a=nn.Linear(3, 1)),
    "an impossible shape of random values": lambda: Ask(lambda s, x: s.a(x).view(4, 5), a=nn.Linear(3, 8)),
    "None": lambda: Ask(lambda s, x: None, a=nn.Linear(3, 1)),
    "a string": lambda: Ask(lambda s, x: "output", a=nn.Linear(3, 1)),
    "two outputs": lambda: Ask(lambda s, x: (s.a(x), s.b(x)), a=nn.Linear(3, 1), b=nn.Linear(3, 1)),
    "assignment": lambda: Ask(assigned, a=nn.Linear(3, 8)),
    "script": lambda: torch.jit.script(dense()),
    "compiled": lambda: torch.compile(dense()),
    "parallel": lambda: nn.DataParallel(dense()),
    "einsum": lambda: Ask(lambda s, x: torch.einsum("bi,oi->ob", x, s.w), w=nn.Parameter(torch.randn(8, 3))),
    "vmap": lambda: Ask(lambda s, x: torch.vmap(s.a)(x), a=nn.Linear(3, 1)),
    "fourier": lambda: Ask(lambda s, x: torch.fft.rfft(s.a(x)).abs(), a=nn.Linear(3, 8)),
    "wrong options": lambda: Ask(lambda s, x: torch.sum(s.a(x), dim="c"), a=nn.Linear(3, 8)),
    "raises": lambda: Ask(lambda s, x: 1 / 0, a=nn.Linear(3, 1)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
@pytest.mark.parametrize("name", ODD)
def test_odd_modules_end_in_words(name: str) -> None:
    with pytest.raises(TangencyError) as e:
        tg.infinite_ntk(ODD[name]())(X)
    said = str(e.value)
    assert len(said) > 40
    if "cannot be traced" in said or "could not be read" in said:
        assert name in ("compiled",) or e.value.__cause__ is not None  # the error that stopped it


def test_any_number_of_arguments() -> None:
    torch.testing.assert_close(tg.infinite_ntk(Many())(X), 2 * X @ X.T / 3)


def test_lazy_layers_ask_for_a_call() -> None:
    with pytest.raises(InputError, match=r"0 \(LazyLinear\).*Call the model once"):
        tg.infinite_ntk(nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.Linear(8, 1)))


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x.cumsum(0),
        lambda x: x - 0.5 * x[:1],
        lambda x: x / x.abs().max(),
        lambda x: x * torch.arange(1, len(x) + 1)[:, None],
    ],
    ids=["running sum", "less the first", "largest of all", "numbered"],
)
def test_samples_that_the_first_one_does_not_show_to_be_mixed(mix: Callable[[Tensor], Tensor]) -> None:
    """The first sample has the same values alone as in its batch; the last one has not."""
    x = X.clone()
    x[0, 0] = 9.0
    with pytest.raises(TangencyError, match="depends on"):
        tg.infinite_ntk(Ask(lambda s, x: s.a(mix(x)), a=nn.Linear(3, 1)))(x)


def test_a_table_of_the_batch_is_no_matrix_over_positions() -> None:
    """With as many samples as positions [batch, time] could pass for [time, time]."""
    net = Ask(
        lambda s, x: s.b(torch.einsum("st,btc->bsc", x.sum(-1), s.a(x))).mean(1), a=nn.Linear(3, 8), b=nn.Linear(8, 1)
    )
    with pytest.raises(ModelError, match="depends on the others of its batch"):
        tg.infinite_ntk(net)(torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(0)))
