"""The second reader: modules that torch.fx cannot trace are run once, and recorded as a graph."""

import copy
import pickle
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ask import Ask
from torch import Tensor, nn

import tangency as tg
from tangency.errors import InputError, TangencyError, UnsupportedModule
from tangency.infinite.compose import Serial
from tangency.infinite.kernel import Infinite
from tangency.infinite.layers.basic import Linear
from tangency.infinite.reading.functional import find_rule
from tangency.infinite.reading.recorded import Recorded, read_source
from tangency.infinite.reading.traced import Traced

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LINEAR = 2 * X @ X.T / 3  # the tangent kernel of one Linear layer


class Any1(Ask):
    """The same with keywords, at which torch.fx stops as soon as forward() looks at them."""

    def forward(self, x: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        """As fn has it."""
        if len(kwargs) > 9:
            raise TypeError("too many")
        return self.fn(self, x, **kwargs)


def parts(s: Any, x: Any) -> Any:
    pair = s.b(x).chunk(2, 1)
    return torch.cat([2 - s.a(x), pair[0], pair[1]], 1) / 3


def by_hand(s: Any, x: Any) -> Any:
    return (x @ s.w.T).tanh() @ s.v


def mlp() -> Any:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))


def recorded(model: nn.Module) -> Infinite:
    kernel = tg.infinite_ntk(model)
    assert isinstance(kernel.layer, Recorded)
    return kernel


# Both readers


def images() -> Tensor:
    return torch.randn(3, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def seq() -> Tensor:
    return torch.randn(3, 5, 6, dtype=torch.float64)


class Residual(nn.Module):
    """A convolutional network with a residual block, in-place activations and a mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(2, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 1)
        self.scale = nn.Parameter(torch.randn(8))
        self.register_buffer("shift", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Shifted images in, one number out."""
        h = self.a(x - self.shift)
        h = F.relu(h, inplace=True)
        h = F.avg_pool2d(h + 0.5 * self.b(h), 2)
        h = h.mean(dim=(2, 3)) + self.scale
        return self.c(h)


class Tokens(nn.Module):
    """Embeddings, positions, torch's own attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(9, 8), nn.Embedding(5, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.out = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Indices in, one number out."""
        h = self.words(x) + self.places(torch.arange(x.shape[1]))
        return self.out(self.layer(h).mean(1))


BOTH: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dense": (mlp, lambda: X),
    "residual": (Residual, images),
    "tokens": (lambda: Tokens().eval(), lambda: torch.randint(9, (3, 5))),
    "norms": (lambda: nn.Sequential(nn.Linear(3, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 1)), lambda: X),
    "batch norm in training": (lambda: nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU()), lambda: X),
    "dropout": (lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)), lambda: X),
    "parts": (
        lambda: Ask(parts, a=nn.Linear(3, 4), b=mlp()[:3]),
        lambda: X,
    ),
    "weights by hand": (
        lambda: Ask(by_hand, w=nn.Parameter(torch.randn(8, 3)), v=nn.Parameter(torch.randn(8, 1))),
        lambda: X,
    ),
    "known values": (
        lambda: Ask(lambda s, x: s.a((x - x.mean(1, keepdim=True)).to(x.dtype) ** 2), a=nn.Linear(3, 1)),
        lambda: X,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.every(2)
def test_both_readers_give_the_same_bits(name: str) -> None:
    torch.manual_seed(0)
    make, inputs = BOTH[name]
    model, x = make(), inputs()
    weights = tg.infinite_ntk(model).weights
    kernels = [Infinite(layer, weights) for layer in (Traced(model), Recorded(model))]
    assert torch.equal(kernels[0](x), kernels[1](x))
    assert torch.equal(kernels[0].diag(x), kernels[1].diag(x))
    if "batch norm" not in name:
        assert torch.equal(kernels[0](x, x[:1]), kernels[1](x, x[:1]))


def test_fx_comes_first() -> None:
    assert isinstance(read_source(mlp()), Traced)
    assert not isinstance(read_source(mlp()), Recorded)


# What fx cannot trace


@dataclass
class Answer:
    """What a model returns beside its scores."""

    scores: Tensor
    loss: Tensor | None = None


class Store:
    """A cache, which is no output."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


def by_shape(s: Any, x: Any, **kwargs: Any) -> Any:
    for _ in range(x.dim() - 1):
        if x.shape[1] == 3:
            x = s.a(x)
    return x


def by_values(s: Any, x: Any, **kwargs: Any) -> Any:
    if bool((x.abs() < 1e6).all()) and float(x.max()) < 1e6:
        x = s.a(x)
    return x


def by_mask(s: Any, x: Any, mask: Any = None) -> Any:
    if mask is not None:
        x = x * mask.unsqueeze(-1)
    return s.a(x)


FREE: dict[str, Callable[..., Any]] = {
    "shapes": by_shape,
    "values that agree": by_values,
    "a dict": lambda s, x, **k: {"logits": s.a(x), "hidden": s.b(x)},
    "a dict in a dict": lambda s, x, **k: {"a": {"b": s.a(x)}},
    "an object": lambda s, x, **k: Answer(s.a(x)),
    "a cache beside it": lambda s, x, **k: (s.a(x), Store(s.b(x))),
    "an input beside it": lambda s, x, **k: (x, s.a(x)),
    "what is not used": lambda s, x, **k: (torch.cumsum(s.b(x), 1), s.a(x))[1],
    "numpy of the input": lambda s, x, **k: s.a(torch.from_numpy(x.numpy() * 1.0)),
    "vmap of the input": lambda s, x, **k: s.a(torch.vmap(lambda r: r * 1.0)(x)),
    "a loop over positions": lambda s, x, **k: s.a(torch.stack(list(x.T), 1)),
    "a module made there": lambda s, x, **k: nn.Identity()(s.a(nn.Flatten()(x))),
    "an empty cache": lambda s, x, **k: torch.cat([torch.tensor([]), s.a(x)], dim=-1),
    "an index": lambda s, x, **k: s.a(x[:, [0, 1, 2]]),
    "reversed": lambda s, x, **k: 1 - (1 - s.a(x)),
    "a length": lambda s, x, **k: s.a(x.view(len(x), -1)),
    "no gradients of what is known": lambda s, x, **k: s.a(torch.no_grad()(torch.clone)(x)),
}


@pytest.mark.parametrize("name", FREE)
@pytest.mark.every(3)
def test_what_fx_cannot_trace_is_run(name: str) -> None:
    model = Any1(FREE[name], a=nn.Linear(3, 1), b=nn.Linear(3, 2))
    kernel = recorded(model)
    # What torch does not see made of the input has the digits of the module's own type.
    close = {"rtol": 1e-6, "atol": 1e-6} if "of the input" in name else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(kernel(X), LINEAR, **close)
    torch.testing.assert_close(kernel(X, X[:2]), LINEAR[:, :2], **close)
    torch.testing.assert_close(kernel(X[:1]), LINEAR[:1, :1], **close)


def test_inputs_by_name() -> None:
    kernel = recorded(Any1(by_mask, a=nn.Linear(6, 1)))
    x, mask = seq(), torch.ones(3, 5)
    mask[0, 2:] = 0
    full = kernel({"x": x, "mask": mask})
    y = x * mask[:, :, None].double()
    torch.testing.assert_close(full, torch.einsum("ntc,msc->ntms", y, y) / 3)
    with pytest.raises(UnsupportedModule, match="unexpected keyword argument 'masks'"):
        kernel({"x": x, "masks": mask})
    with pytest.raises(InputError, match=r"2 inputs were given; the model takes \['x'\]"):
        kernel((x, mask))


def test_a_deep_network_agrees_with_fx() -> None:
    """A network that fx stops at, and the same one without what stops it."""
    torch.manual_seed(0)
    inner = mlp()
    free = Any1(lambda s, x, **k: s.net(x) if x.dim() == 2 and x.sum() == x.sum() else x, net=inner)
    for make in (tg.infinite_ntk, tg.infinite_nngp):
        assert torch.equal(make(free, w_var=1.5, b_var=0.1)(X), make(inner, w_var=1.5, b_var=0.1)(X))
    assert torch.equal(tg.infinite_ntk(free, dtype="float32")(X), tg.infinite_ntk(inner, dtype="float32")(X))
    names = ["net.4.weight"]
    assert torch.equal(tg.infinite_ntk(free, trainable=names)(X), tg.infinite_ntk(inner, trainable=["4.weight"])(X))


def test_hidden_values_of_layers_before_it() -> None:
    free = Any1(lambda s, x, **k: s.a(torch.relu(x)) if x.shape[1] == 8 else x, a=nn.Linear(8, 1))
    plain = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
    assert torch.equal(tg.infinite_ntk(Serial(Linear(bias=True, width=8), free))(X), tg.infinite_ntk(plain)(X))
    asks = Any1(lambda s, x, **k: s.a(x) if len(x.tolist()) else x, a=nn.Linear(8, 1))
    with pytest.raises(UnsupportedModule, match=r"tolist at .*asks for the numbers of random values.*torch.where"):
        tg.infinite_ntk(Serial(Linear(width=8), asks))(X)


# What is refused


class Counts(nn.Module):
    """Another function at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.calls = nn.Linear(3, 1), [0]

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """a(x) times how often it was called, in a list that copies share."""
        CALLS[0] += 1
        return self.a(x) * (CALLS[0] if len(kwargs) == 0 else 1)


CALLS = [0]


def numbers_of(s: Any, x: Any, **kwargs: Any) -> Any:
    return s.a(x) * float(s.a.weight.abs().max())


def hidden_answer(s: Any, x: Any, **kwargs: Any) -> Any:
    h = s.a(x)
    return h if h.mean() > 0 else -h


def hidden_list(s: Any, x: Any, **kwargs: Any) -> Any:
    return s.c(torch.tensor(s.b(x).tolist()))


def without_gradients(s: Any, x: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        h = torch.relu(s.b(x))
    return s.c(h)


def changed_view(s: Any, x: Any, **kwargs: Any) -> Any:
    h = s.b(x)
    part = h.view(-1, 2)
    h.relu_()
    return s.c(part)


ELSEWHERE = nn.Linear(3, 1)
NO: dict[str, tuple[Callable[..., Any], str]] = {
    "a sample's own way": (lambda s, x, **k: s.a(x) if x[0, 0] > 0 else 2 * s.a(x), r"x\[0, 0\] > 0.*no inputs of one"),
    "a number of the batch": (lambda s, x, **k: s.a(x) * float(x.mean()), "float.*no inputs of one network|others of"),
    "the batch's size": (lambda s, x, **k: s.a(x) if x.shape[0] > 2 else x, "sample alone|one sample|disagree|other"),
    "a hidden answer": (
        hidden_answer,
        r"__bool__ at .*h\.mean\(\) > 0.*numbers of random|mean at .*reduces everything",
    ),
    "a hidden number": (hidden_list, "tolist at .*numbers of random values"),
    "a weight's number": (numbers_of, "abs at .*function of the trained parameter"),
    "random numbers": (lambda s, x, **k: s.a(x + torch.rand(4, 3)[: len(x)]), "rand.*draws random numbers"),
    "Python's random numbers": (lambda s, x, **k: s.a(x) * random.random(), "other values|depends on the"),
    "no gradients": (without_gradients, "without gradients"),
    "a view changed": (changed_view, "changes a value in place that is read later"),
    "an outside layer": (lambda s, x, **k: ELSEWHERE(x), "Linear at .*no part of the module.*Register"),
    "an outside weight": (lambda s, x, **k: x @ ELSEWHERE.weight.T, "parameter from outside"),
    "vmap of a layer": (lambda s, x, **k: torch.vmap(s.a)(x) + 0.0, "torch does not show"),
    "assigned data": (lambda s, x, **k: setattr(x, "data", 2 * x) or s.a(x), r"\.data at .*is assigned"),
    "several outputs": (lambda s, x, **k: {"one": s.a(x), "two": {"deep": s.b(x)}}, r"2 random values: one, two\.deep"),
    "an error": (lambda s, x, **k: s.c(s.a(x)), r"forward\(\) stops in layer c \(Linear\) at .*mat1"),
    "no rule": (lambda s, x, **k: torch.cumsum(s.b(x), 1), r"cumsum at .*test_infinite_recorded\.py:\d+ .*no rule"),
}


@pytest.mark.parametrize("name", NO)
def test_what_is_refused(name: str) -> None:
    fn, message = NO[name]
    model = Any1(fn, a=nn.Linear(3, 1), b=nn.Linear(3, 2), c=nn.Linear(2, 1))
    x = X.clone()
    x[0, 0], x[1, 0] = 1.0, -1.0
    with pytest.raises(TangencyError, match=message):
        recorded(model)(x)


def test_a_module_that_lies() -> None:
    """Its runs differ by something that no copy holds."""
    with pytest.raises(UnsupportedModule, match="gives other values: it keeps a state|others of its batch"):
        tg.infinite_ntk(Counts())(X)


def test_what_depends_on_the_weights_is_refused() -> None:
    """A branch by the numbers of a weight, asked in a way that torch does not show."""
    net = Any1(
        lambda s, x, **k: s.a(x) if s.a.weight.data_ptr() and _first(s.a.weight) > 0.05 else -s.a(x), a=nn.Linear(3, 1)
    )
    with torch.no_grad():
        net.a.weight.fill_(0.05 + 1e-6)
    with pytest.raises(UnsupportedModule, match="depends on the values of its weights|numbers of random|no rule"):
        tg.infinite_ntk(net)(X)


def _first(w: Tensor) -> float:
    with torch._C.DisableTorchFunction():
        return w.detach().flatten()[0].item()


def test_answers_stay_those_of_the_first_batch() -> None:
    net = Any1(lambda s, x, **k: s.a(x) if bool(x[:, 0].sum() > 0) else torch.relu(s.a(x)), a=nn.Linear(3, 1))
    kernel, up = recorded(net), X.abs()
    kernel(up)
    with pytest.raises(UnsupportedModule, match="no inputs of one network"):
        kernel(-up)


def test_questions_that_only_large_batches_meet() -> None:
    net = Any1(lambda s, x, **k: 2 * s.a(x) if len(x) > 2 and bool(x[0, 0] > 0) else s.a(x), a=nn.Linear(3, 1))
    kernel, up = recorded(net), X.abs()
    torch.testing.assert_close(kernel(up[:2]), 2 * up[:2] @ up[:2].T / 3)
    with pytest.raises(TangencyError, match="no inputs of one network|others of its batch|sample alone"):
        kernel(up)


# The user's model


class Caching(nn.Module):
    """Keeps what it saw, in a buffer and in a dict, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm = nn.Linear(3, 8), nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(3))
        self.cache: dict[str, Tensor] = {}

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """a(x); what is kept decides nothing."""
        if len(kwargs) == 0 and "x" not in self.cache:
            self.cache["x"] = x
        self.seen.add_(x.detach().mean(0))
        return self.norm(self.a(x))


def test_the_model_stays_as_it_is() -> None:
    net = Caching().train()
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    x = X.clone()
    tg.infinite_ntk(net)(x)
    assert net.training
    assert not net.cache
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert all(p.grad is None for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, X)


def test_torch_is_left_as_it_was() -> None:
    call, compiling = nn.Module.__call__, torch.compiler.is_compiling
    with pytest.raises(UnsupportedModule):
        tg.infinite_ntk(Any1(lambda s, x, **k: 1 / 0))(X)
    assert nn.Module.__call__ is call
    assert torch.compiler.is_compiling is compiling
    assert not torch.compiler.is_compiling()


def test_threads_record_side_by_side() -> None:
    results: list[Tensor] = []
    nets = [Any1(by_shape, a=nn.Linear(3, 1)) for _ in range(4)]
    threads = [threading.Thread(target=lambda n=n: results.append(tg.infinite_ntk(n)(X))) for n in nets]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(results) == 4
    for k in results:
        torch.testing.assert_close(k, LINEAR)


class Plain(nn.Module):
    """For pickle: a class of its own, which fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 1)

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        """a(x)."""
        return self.a(x) if len(kwargs) == 0 else x


def test_kernels_go_to_workers_and_stores() -> None:
    kernel = tg.infinite_ntk(Plain())
    again = pickle.loads(pickle.dumps(kernel))
    assert isinstance(again.layer, Recorded)
    assert torch.equal(again(X), kernel(X))
    assert again.spec() == kernel.spec()
    assert tg.infinite_ntk(Any1(by_shape, a=nn.Linear(3, 1))).spec() != kernel.spec()


# What libraries write where torch has a layer


class NormAct(nn.BatchNorm2d):
    """A norm and its activation, as timm writes them."""

    def forward(self, x: Tensor) -> Tensor:
        """relu(norm(x))."""
        means = (self.running_mean, self.running_var)
        return F.relu(F.batch_norm(x, *means, self.weight, self.bias, self.training, 0.0, self.eps))


def test_batch_norm_by_a_function() -> None:
    convs = (nn.Conv2d(2, 8, 3), nn.Flatten(), nn.Linear(32, 1))
    layers = (nn.Sequential(nn.BatchNorm2d(8, eps=0.1), nn.ReLU()), NormAct(8, eps=0.1))
    for lr in (1.0, {"": 1.0, "1": 0.0}):
        plain, own = (tg.infinite_ntk(nn.Sequential(convs[0], m, *convs[1:]).eval(), lr=lr)(images()) for m in layers)
        assert torch.equal(plain, own)
    layers[1].running_mean.add_(1)  # type: ignore[union-attr]
    with pytest.raises(UnsupportedModule, match="batch_norm at .*running statistics of its own training"):
        tg.infinite_ntk(nn.Sequential(convs[0], layers[1]).eval())(images())


def test_a_class_token_by_its_channels() -> None:
    def joined(s: Any, x: Any) -> Any:
        return s.out(torch.cat([s.token.expand(x.shape[0], 1, -1), s.a(x)], 1).mean(1))

    torch.manual_seed(0)
    token = torch.randn(8)
    parts = {"a": nn.Linear(6, 8), "out": nn.Linear(8, 1)}
    x = seq()
    flat, full = (Ask(joined, token=nn.Parameter(t), **parts) for t in (token, token[None, None]))
    assert torch.equal(tg.infinite_ntk(flat)(x), tg.infinite_ntk(full)(x))


def test_methods_and_functions_of_one_name_have_one_rule() -> None:
    assert find_rule("chunk") is find_rule(torch.chunk)
    assert find_rule(torch.masked_fill) is find_rule("masked_fill")
    assert find_rule("cumsum") is None


# Refusals without inputs


def test_what_has_no_limit_is_refused_when_the_kernel_is_made() -> None:
    norm = nn.InstanceNorm2d(4)
    with pytest.raises(UnsupportedModule, match=r"layer 1 \(InstanceNorm2d\).*no known infinite-width limit"):
        tg.infinite_ntk(nn.Sequential(nn.Conv2d(2, 4, 3), norm))
    with pytest.raises(UnsupportedModule, match=r"cumsum at .*no rule for random values"):
        tg.infinite_ntk(Ask(lambda s, x: torch.cumsum(s.a(x), 1), a=nn.Linear(3, 8)))
    # On the input itself, or never called, it does no harm.
    pictures = images()
    read_first = nn.Sequential(nn.InstanceNorm2d(2), nn.Flatten(), nn.Linear(pictures[0].numel(), 1))
    tg.infinite_ntk(read_first)(pictures)
    unused = Ask(lambda s, x: s.a(x), a=nn.Linear(3, 1), norm=norm)
    torch.testing.assert_close(tg.infinite_ntk(unused)(X), LINEAR)


# Hugging Face


def test_hugging_face_models_are_run() -> None:
    """They get as far as the layers: where one has no rule, its line is named."""
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    gpt = transformers.GPT2Config(
        n_embd=16, n_layer=1, n_head=2, vocab_size=50, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    bert = transformers.BertConfig(**small, vocab_size=50)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, 3:] = 0
    tokens = {"input_ids": torch.randint(50, (2, 5)), "attention_mask": mask}
    pictures = {"pixel_values": torch.randn(2, 3, 8, 8)}
    vit = transformers.ViTForImageClassification(transformers.ViTConfig(**small, image_size=8, patch_size=4))
    for model, x in (
        (transformers.GPT2Model(gpt), tokens),
        (transformers.BertForSequenceClassification(bert), tokens),
        (vit, pictures),
    ):
        kernel = tg.infinite_ntk(model.eval())
        assert isinstance(kernel.layer, Recorded)
        try:
            outcome = str(bool(kernel(x).isfinite().all()))
        except UnsupportedModule as e:
            outcome = str(e)
        assert outcome == "True" or ("transformers" in outcome and ".py:" in outcome)  # a kernel, or the line


def test_batch_norm_without_running_statistics() -> None:
    """Its statistics are those of the batch in evaluation mode too: one sample alone has none."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.n, self.b = nn.Linear(3, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.b(torch.relu(self.n(self.a(x))))
            return out

    class Starred(Plain):
        def forward(self, *args: Tensor) -> Tensor:
            return super().forward(args[0] if len(args) == 1 else args[1])

    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(tg.infinite_ntk(Starred())(x), tg.infinite_ntk(Plain())(x))


def test_unflatten_as_a_method() -> None:
    """Tensor.unflatten is written in Python, and not among the methods that torch lists."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            (h,) = (part.unflatten(-1, (2, 4)) for part in self.a(x).chunk(1, -1))  # which torch.fx cannot trace
            out: Tensor = self.b(torch.relu(h).flatten(1))
            return out

    model, x = Split(), torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    kernel = tg.infinite_ntk(model)
    assert isinstance(kernel.layer, Recorded)
    torch.testing.assert_close(kernel(x), tg.infinite_ntk(nn.Sequential(model.a, nn.ReLU(), model.b))(x))
