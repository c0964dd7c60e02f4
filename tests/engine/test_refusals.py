"""Samples and options that do not fit, said in words: which layer takes what, what was given, and the fix."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg

MLP = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))
CNN = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 6 * 6, 3)).eval()
WORDS = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 2))
SHAPE = "Give samples of the shape that the network was made for"


class Recurrent(nn.Module):
    """Of sequences."""

    def __init__(self):
        super().__init__()
        self.rnn, self.norm, self.last = nn.LSTM(3, 4, batch_first=True), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(self.norm(self.rnn(x)[0][:, -1]))


class Functional(nn.Module):
    """Without layers, so none can be named."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return x @ self.w


class Both(nn.Module):
    """Two inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, a, b):
        return self.a(a) + self.b(b)


def late_word():
    """A word that is in no vocabulary, after samples that the probe looks at."""
    words = torch.arange(18).reshape(6, 3) % 10
    words[4, 1] = 12
    return words


MISFITS = {
    "width": (MLP, torch.randn(5, 4), rf"^Linear '0' takes 3 features, x has 4: x is .*\(5, 4\). {SHAPE}"),
    "no width": (MLP, torch.randn(5), r"^Linear '0' takes 3 features, x has none"),
    "the layer alone": (nn.Linear(3, 2), torch.randn(5, 4), r"^the Linear layer takes 3 features, x has 4"),
    "channels": (CNN, torch.randn(5, 3, 8, 8), r"^Conv2d '0' takes 1 channels, x has 3"),
    "dimensions": (CNN, torch.randn(5, 8, 8), r"^Conv2d '0' takes 4 dimensions \[n, 1, h, w\], x has 3"),
    "further in": (CNN, torch.randn(5, 1, 9, 9), r"^Linear '4' takes 144 features, and is given 196: x is"),
    "too small": (CNN, torch.randn(5, 1, 2, 2), r"^Conv2d '0' takes at least \[3, 3\] positions, x has \[2, 2\]"),
    "bytes": (CNN, torch.zeros(5, 1, 8, 8, dtype=torch.uint8), r"Conv2d '0' takes torch.float32: .*x.float\(\) / 255"),
    "word": (WORDS, late_word(), r"^Embedding '0' takes whole numbers from 0 to 9, x has 12: .*an embedding of more"),
    "negative": (WORDS, late_word() - 3, r"^Embedding '0' takes whole numbers from 0 to 9, x has -3"),
    "no words": (WORDS, torch.randn(5, 3), r"^Embedding '0' takes whole numbers from 0 to 9, x has torch.float32"),
    "words of 16 bits": (
        WORDS,
        torch.zeros(5, 3, dtype=torch.uint16),
        r"^Embedding '0' takes whole numbers from 0 to 9, x has torch.uint16.*that torch can look up: x.long\(\)",
    ),
    "words of 8 bits": (WORDS, torch.zeros(5, 3, dtype=torch.int8), r"x has torch.int8: .*x.long\(\), of an array"),
    "labels beside": (MLP, (torch.randn(5, 3), torch.zeros(5).long()), r"x has 2 inputs. If the last are labels"),
    "sequence": (Recurrent(), torch.randn(5, 7, 4), r"^LSTM 'rnn' takes 3 features, x has 4"),
    "no sequence": (Recurrent(), torch.randn(5, 7, 4, 3), r"^LSTM 'rnn' takes 3 dimensions .*, x has 4"),
    "norm": (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(5, 3), r"^LayerNorm '0' takes \[4\], x has"),
    "groups": (
        nn.Sequential(nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(4, 2)),
        torch.randn(5, 6, 1),
        r"^GroupNorm '0' takes 4 channels, x has 6",
    ),
    "batch norm": (
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).eval(),
        torch.randn(5, 3),
        r"^BatchNorm1d '0' takes 4 channels, x has 3",
    ),
    "batch norm of pictures": (
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2)).eval(),
        torch.randn(5, 4, 2, 2),
        r"^BatchNorm1d '0' takes 2 or 3 dimensions, x has 4",
    ),
    "attention": (
        nn.Sequential(nn.TransformerEncoderLayer(8, 2, batch_first=True), nn.Flatten(), nn.Linear(24, 2)).eval(),
        torch.randn(5, 3, 4),
        r"^MultiheadAttention '0.self_attn' takes 8 features",
    ),
    "one of two": (
        Both(),
        {"a": torch.randn(5, 3), "b": torch.randn(5, 7)},
        r"^Linear 'b' takes 2 features, x\['b'\] has 7",
    ),
    "no layer": (Functional(), torch.randn(5, 4), rf"^the network cannot take these .* {SHAPE}. \(torch: mat1"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISFITS)
def test_a_layer_says_what_it_takes(case: str) -> None:
    model, x, message = MISFITS[case]
    with pytest.raises(tg.InputError, match=message):
        tg.trace_ntk(model)(x)


def test_wherever_a_model_runs() -> None:
    x, y = torch.randn(5, 4), torch.zeros(5, 3)
    sgd = {"loss": F.mse_loss, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "steps": 1, "progress": False}
    for name, attempt in {
        "x": lambda: tg.conjugate_kernel(MLP)(x),
        "x ": lambda: tg.linearize(MLP)(x),
        "x  ": lambda: tg.models.outputs(MLP, x),
        "x   ": lambda: tg.compute(tg.trace_ntk(MLP), x),
        "x    ": lambda: tg.dynamics.train(MLP, x, y, **sgd),
        "x     ": lambda: tg.explain(MLP, (x, [0, 1, 2, 0, 1]), (x, [0, 1, 2, 0, 1]), progress=False),
        "x_batch": lambda: tg.dynamics.one_step(MLP, x[:, :3], x, y, loss=F.mse_loss, lr=0.1),
    }.items():
        with pytest.raises(tg.InputError, match=rf"^Linear '0' takes 3 features, {name.strip()} has 4"):
            attempt()
    with pytest.raises(tg.InputError, match=r"^layer 0 \(Linear\): takes 3 features or channels; it was given 4"):
        tg.infinite_ntk(MLP)(x)


def test_the_models_own_trouble_stays_its_own() -> None:
    class Troubled(nn.Linear):
        def forward(self, input):
            raise ValueError("the model's own trouble")

    for attempt in (tg.trace_ntk(Troubled(3, 2)), tg.conjugate_kernel(Troubled(3, 2)), tg.linearize(Troubled(3, 2))):
        with pytest.raises(ValueError, match="^the model's own trouble"):
            attempt(torch.randn(5, 3))


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([nn.Dropout()], r"^Dropout layer '0' is in training mode, so the model is random and has no kernel. Call mod"),
        ([nn.Dropout(), nn.ReLU(), nn.Dropout()], r"^Dropout layers '0' and '2' are in training mode, so the model is"),
        ([nn.Dropout(), nn.RReLU()], r"^layers '0' \(Dropout\) and '1' \(RReLU\) are in training mode"),
        ([nn.Dropout() for _ in range(6)], r"^Dropout layers '0', '1', '2', '3' and 2 more are in training mode"),
        ([nn.BatchNorm1d(3)], r"^BatchNorm1d layer '0' uses the statistics of the batch.*Call model.eval\(\) first"),
        ([nn.BatchNorm1d(3), nn.BatchNorm1d(3)], r"^BatchNorm1d layers '0' and '1' use the statistics of the batch"),
    ],
)
def test_layers_are_named(layers: list[nn.Module], message: str) -> None:
    with pytest.raises(tg.ModelError, match=message):
        tg.trace_ntk(nn.Sequential(*layers, nn.Linear(3, 2)))(torch.randn(5, 3))


X, Y = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)), torch.arange(12) % 3
WRONG = torch.where(torch.arange(12) == 5, 7, Y)


def test_labels_beyond_the_outputs() -> None:
    full, gram = tg.compute(tg.full_ntk(MLP), X), tg.compute(tg.trace_ntk(MLP), X)
    loss = lambda out, y: F.cross_entropy(out, y, reduction="none")  # noqa: E731
    for attempt, message in (
        (
            lambda: tg.explain(MLP, (X, WRONG), (X, Y), progress=False),
            r"the labels of the training set go to 7 and the model has 3 outputs; needed: labels from 0 to 2",
        ),
        (lambda: tg.regress.logistic(full, WRONG, reg=1.0), r"from 0 to 7; needed: from 0 to 2, as the model has 3"),
        (
            lambda: tg.regress.logistic(gram, WRONG, reg=1.0, classes=3),
            r"from 0 to 7; needed: from 0 to 2, as classes=3",
        ),
        (lambda: tg.surrogate.fit(gram, WRONG), r"no sample .* of class 3, 4, 5, 6 \(of 8\).*The largest label is 7"),
        (lambda: tg.surrogate.fit(gram, WRONG, classes=3), r"from 0 to 7; needed: from 0 to 2, as classes=3"),
        (
            lambda: tg.head_ntk(MLP, loss)((X, WRONG)),
            r"the labels that the head is given go to 7 and the model has 3 outputs; needed: labels from 0 to 2",
        ),
    ):
        with pytest.raises(tg.InputError, match=message):
            attempt()
    one = nn.Sequential(nn.Linear(3, 1))
    with pytest.raises(tg.InputError, match="go to 7 and the model has 1 output; needed: labels from 0 to 1"):
        tg.explain(one, (X, WRONG), (X, Y), progress=False)


LOSS = lambda out, y: F.cross_entropy(out, y, reduction="none")  # noqa: E731


@pytest.mark.parametrize("y", [Y.int(), Y.int().numpy(), Y.float(), Y.double().numpy()])
def test_labels_of_a_loss_are_int64(y: object) -> None:
    with pytest.raises(tg.InputError, match=r"that the head is given are torch.\w+32; needed: torch.int64.*y.long\(\)"):
        tg.head_ntk(MLP, LOSS)((X, y))
    assert tg.head_ntk(MLP, LOSS)((X, Y)).shape == (12, 12)
    with pytest.raises(RuntimeError, match="Long"):  # not whole: nothing that .long() would mend
        tg.head_ntk(MLP, lambda out, y: F.nll_loss(out, y, reduction="none"))((X, Y + 0.5))


class Cast(nn.Module):
    """Brings what it is given to one type on its way."""

    def __init__(self, kind: torch.dtype, first: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.a, self.b, self.kind = nn.Linear(3, 4, dtype=first), nn.Linear(4, 2), kind

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.b(torch.tanh(self.a(x)).to(self.kind))


class Magnitude(nn.Module):
    """Takes complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.abs())


CASTS = r"Linear 'b' takes {0}: x is {0} .* that layer is {1}: forward\(\) casts on the way .*leave it out"
TYPES = {
    "cast away": (Cast(torch.float32), {"dtype": "float64"}, X, CASTS.format("torch.float64", "torch.float32")),
    "cast to more": (Cast(torch.float64), {}, X, CASTS.format("torch.float32", "torch.float64")),
    "mixed": (
        Cast(torch.float32, torch.float64),
        {"dtype": "float64"},
        X,
        CASTS.format("torch.float64", "torch.float32"),
    ),
    "mixed, too narrow": (
        Cast(torch.float32, torch.float64),
        {},
        X,
        r"Linear 'a' takes torch.float64: x is torch.float32 .*x.to\(torch.float64\)",
    ),
    "complex": (MLP, {}, X.to(torch.complex64), r"It takes real numbers: give x.abs\(\), or .*view_as_real\(x\)"),
    "wide complex": (Magnitude(), {}, X.to(torch.complex128), r"x.to\(torch.complex64\)"),
}


@pytest.mark.parametrize("case", TYPES)
def test_types_that_casting_the_samples_does_not_mend(case: str) -> None:
    model, options, x, message = TYPES[case]
    for make in (tg.trace_ntk, tg.conjugate_kernel):
        with pytest.raises(tg.InputError, match=message):
            make(model, **options)(x)


def test_arguments_that_forward_has_not() -> None:
    model = Cast(torch.float32)
    for x, message in (
        ({"X": X}, r"^Cast.forward\(\) takes \(x, mask=…\); the dict x has 'X'. Give its inputs the names"),
        ((X, X, X[:, :1]), r"^Cast.forward\(\) takes \(x, mask=…\); x has 3 inputs. Give a tuple with one each"),
        ([X, X, X], r"x has 3 inputs. Of a list of samples make one tensor: torch.stack\(x\)"),
    ):
        for take in (tg.trace_ntk(model), tg.conjugate_kernel(model), lambda x: tg.models.outputs(model, x)):
            with pytest.raises(tg.InputError, match=message):
                take(x)
        with pytest.raises(tg.InputError, match=message):
            tg.linearize(model)(**x) if isinstance(x, dict) else tg.linearize(model)(*x)
    with pytest.raises(tg.InputError, match=r"^Both.forward\(\) takes \(a, b\); x has 1 input. Give a tuple"):
        tg.trace_ntk(Both())(X)

    class Wrong(nn.Module):
        """Calls its own layer wrongly."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, x)

    for take in (tg.trace_ntk(Wrong()), tg.linearize(Wrong())):
        with pytest.raises(TypeError, match=r"^Linear.forward\(\) takes 2 positional arguments but 3 were given"):
            take(X)


def test_outputs_that_depend_on_no_parameter() -> None:
    class Detour(nn.Linear):
        """Through NumPy, where gradients end."""

        def forward(self, input: Tensor) -> Tensor:
            return torch.as_tensor(super().forward(input).detach().numpy())

    k = tg.trace_ntk(Detour(3, 2))
    for attempt in (lambda: k(X), lambda: k.diag(X), lambda: tg.compute(k, X), lambda: tg.projected(k, dim=4)(X)):
        with pytest.raises(tg.ModelError, match=r"do not depend on any of the parameters that count.*\.numpy\(\)"):
            attempt()


def test_inputs_too_large_for_the_modules_type() -> None:
    """Infinite kernels compute in float64, whatever the module's own type."""
    relu, x = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1)), X.double()
    k = tg.infinite_ntk(relu)
    torch.testing.assert_close(k(1e39 * x) / 1e78, k(x))  # homogeneous
    for attempt in (k, k.diag):
        with pytest.raises(
            tg.NonFiniteError, match=r"the squares of sample 0 are too large for float64.*Scale the inp"
        ):
            attempt(1e160 * x)


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (
            lambda: tg.regress.ridge(torch.eye(3), torch.ones(3), reg=10**400),
            r"^reg=inf; needed: a finite number, at least 0",
        ),
        (lambda: tg.trace_ntk(MLP, params=[1]), r"^params= is a list; needed: a state dict.*model.state_dict\(\)"),
        (lambda: tg.trace_ntk(MLP, params={"0.weight": 1}), r"^params= is a dict of other things than tensors"),
        (
            lambda: tg.regress.ridge(torch.eye(3), torch.ones(3), reg=1.0, sample_weights="balanced"),
            r"^sample_weights='balanced'; needed: a number for each sample",
        ),
        (lambda: tg.linalg.solve(torch.eye(3), None), r"^y is a NoneType and no table of numbers; needed: a tensor"),
        (lambda: tg.linalg.solve(torch.eye(2), ["a", "b"]), r"^y is a list and no table of numbers"),
        (lambda: tg.linalg.solve(torch.eye(2), [[1.0], [1.0, 2.0]]), r"^y is a list and no table of numbers"),
        (
            lambda: tg.dynamics.ensemble((torch.eye(3), torch.eye(3)), (torch.eye(3), torch.eye(3)), torch.ones(3)),
            r"^nngp has 2 Grams; needed: 3 Grams \(Q, q, κ\)",
        ),
        (
            lambda: tg.dynamics.one_step(MLP, X, X[:4], Y[:3], loss=F.cross_entropy, lr=0.1),
            r"^x_batch has 4 samples and y_batch has shape \(3,\); needed: a target for each sample, \[4, …\]",
        ),
        (lambda: tg.infinite.draw(3), r"^model is a int; needed: a torch.nn.Module, whose weights are drawn anew"),
        (lambda: tg.testing.check_kernel(3, X), r"^kernel is a int; needed: a tangency kernel"),
        (lambda: tg.cosine(tg.trace_ntk(MLP)).features(X), r"^CosineKernel has no explicit features"),
    ],
)
def test_one_sentence_each(attempt: Callable[..., object], message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        attempt()
