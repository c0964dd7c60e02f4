"""What users do that nobody has in mind: models that write, refuse, clamp and trim, features of any size."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from tangency.errors import InputError, ModelError
from tangency.representations import collapse, layer_outputs, probe, shift

RNG = torch.Generator().manual_seed(0)
X = torch.randn(120, 4, generator=RNG)
Y = (X[:, 1] + 0.5 * torch.randn(120, generator=RNG) > 0).long()


class Around(nn.Module):
    """A hidden layer and a last one; what happens to inputs and outputs is the test's own."""

    def __init__(self, before=lambda model, x: x, after=lambda z: z, outputs: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 6), nn.Linear(6, outputs)
        self.register_buffer("calls", torch.zeros(()))
        self.before, self.after = before, after
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.head(self.body(self.before(self, x)).relu()))


def refitted(model: nn.Module, x: Tensor, y: Tensor, **options: object) -> tg.representations.Refit:
    return tg.refit_last_layer(model, (x, y), progress=False, **options)


@pytest.mark.parametrize("size", [1e4, 1e6, 1e8])
def test_a_large_feature_does_not_hide_small_ones(size: float) -> None:
    x, head = X.clone(), nn.Linear(4, 1)
    x[:, 0] *= size
    nn.init.zeros_(head.weight)
    target = (2 * x[:, 1] - x[:, 2] + 0.1 * torch.randn(120, generator=torch.Generator().manual_seed(1)))[:, None]
    scaled = np.c_[x / x.std(0), np.ones(120)].astype(np.float64)
    least = float(np.linalg.lstsq(scaled, target.double().numpy(), rcond=None)[1][0]) / 120
    assert refitted(head, x, target, reg=0).train.loss.after == pytest.approx(least, rel=1e-6)
    assert refitted(head, x, target).train.loss.after < 1.05 * least  # reg by leave-one-out


def test_folds_go_on_while_a_large_feature_is_noise() -> None:
    x, head = X.clone(), nn.Linear(4, 2)
    x[:, 0] *= 100
    nn.init.zeros_(head.weight)
    free = refitted(head, x, Y, reg=0).train.loss.after
    assert refitted(head, x, Y).train.loss.after < 1.1 * free


def test_logits_that_are_certain_and_wrong_are_led_back() -> None:
    y = Y.clone()
    y[:7] = 1 - y[:7]
    torch.manual_seed(0)
    found = refitted(nn.Linear(4, 2).double(), 1e6 * X.double(), y, reg=1.0)
    assert found.train.loss.before > 1e4
    from_zero = refitted(nn.Linear(4, 2), X, y, reg=1e-12, start="zero")
    assert found.train.loss.after == pytest.approx(from_zero.train.loss.after, rel=1e-6)


def test_zeros_and_ones_as_floats_are_asked_about() -> None:
    for y, fix in ((Y.float(), r"y\.long\(\)"), (Y.float()[:, None], r"y\[:, 0\]\.long\(\)")):
        with pytest.raises(InputError, match=fix):
            refitted(nn.Linear(4, 1), X, y)
    with pytest.raises(InputError, match=r"y\.argmax\(1\)"):
        refitted(nn.Linear(4, 2), X, F.one_hot(Y, 2).float())
    assert refitted(nn.Linear(4, 1), X, Y.float(), loss="mse").loss == "mse"


def test_what_follows_the_layer_for_some_samples_only_is_seen() -> None:
    far = torch.cat([X, 1000 * X])
    with pytest.raises(ModelError, match="for some samples and not for others"):
        refitted(Around(after=lambda z: z.clamp(-10, 10)), far, Y.repeat(2), reg=1.0)
    with pytest.raises(ModelError, match="with other weights"):  # only beyond what the network gave before
        refitted(Around(after=lambda z: z.clamp(-1.5, 1.5)), 0.1 * X, Y, reg=1e-6)


def test_buffers_that_forward_writes_to_stay() -> None:
    def count(model: nn.Module, x: Tensor) -> Tensor:
        model.calls += 1
        return x

    model = Around(count)
    layer_outputs(model, X, progress=False)
    probe(model, (X, Y), (X, Y), layers="body", dims=(1,), progress=False)
    shift(model, X, X + 0.1, layers="body", labels="predicted", draws=39, progress=False)
    found = refitted(model, X, Y)
    assert model.calls == found.model.calls == 0


def test_models_that_refuse_one_sample_or_take_keywords() -> None:
    def several(model: nn.Module, x: Tensor) -> Tensor:
        assert len(x) > 1
        return x

    class Named(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(input=x)

    assert refitted(Around(several), X, Y).layer == "head"
    assert probe(Around(several), (X, Y), (X, Y), layers="body", dims=(1,), progress=False)["body"].features == 6
    head = nn.Linear(4, 2)
    assert refitted(Named(head), X, Y).train.loss.after == refitted(head, X, Y).train.loss.after


class Trimmed(nn.Module):
    """Texts cut to the longest of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(20, 4), nn.Linear(4, 2)
        self.eval()

    def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
        most = int(attention_mask.sum(1).max())
        return self.head(self.embedding(ids[:, :most]).mean(1))


def test_padding_that_the_model_cuts_off_is_no_mean_over_all_positions() -> None:
    lengths = torch.arange(120) % 7 + 2
    mask = (torch.arange(9) < lengths[:, None]).long()
    x, model = {"ids": torch.randint(20, (120, 9), generator=RNG), "attention_mask": mask}, Trimmed()
    with pytest.raises(InputError, match="not known which positions count"):
        layer_outputs(model, x, "embedding", pool="mean", progress=False)
    with pytest.raises(ModelError, match="needed: one shape"):
        probe(model, (x, Y), (x, Y), layers="embedding", batch=5, progress=False)
    train, test = ({k: v[rows] for k, v in x.items()} for rows in ([0, 1] * 5, [1, 2]))
    with pytest.raises(ModelError, match=r"\(3, 4\) for training and \(4, 4\) for test"):
        probe(model, (train, [0, 1] * 5), (test, [0, 1]), layers="embedding", neighbours=1, progress=False)


def test_numbers_that_are_none_in_the_test_set_alone_are_refused() -> None:
    class Log(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    model = nn.Sequential(nn.Sequential(Log(), nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2)).eval()
    with pytest.raises(ModelError, match="of the test set"):
        probe(model, (X.abs() + 1, Y), (X, Y), layers="0.0", progress=False)


def test_one_test_sample_has_no_interval_and_no_samples_are_refused() -> None:
    found = tg.refit_last_layer(nn.Linear(4, 2), (X, Y), (X[:1], Y[:1]), progress=False)
    assert found.test.loss.low is None
    assert found.test.accuracy.high is None
    with pytest.raises(InputError, match="shape"):
        collapse(X[:0], Y[:0])


def test_half_precision_is_refused_in_words_of_this_function() -> None:
    with pytest.raises(InputError, match=r"deepcopy\(model\)\.float\(\)"):
        layer_outputs(nn.Linear(4, 2).half(), X.half(), progress=False)
