"""The reference networks against published sizes and J Jᵀ; training against steps made by hand."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from zoo import randomise

import tangency as tg
from tangency.models import (
    Recipe,
    Scale,
    accuracy,
    fit,
    flip_crop,
    forensics_cnn,
    initialized,
    mlp,
    mobilenet_v2,
    outputs,
    resnet18,
    resnet34,
    seeded,
    small_cnn,
)

DOUBLE = torch.float64


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def equal(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(v, b.state_dict()[k]) for k, v in a.state_dict().items())


# The networks.


def test_sizes_are_the_published_ones() -> None:
    """With 1000 classes, He et al.'s ResNets and Sandler et al.'s MobileNetV2 as torchvision counts them.

    Our ResNets' stem is 3x3 where theirs is 7x7: 7680 weights less.
    """
    with torch.device("meta"):
        assert size(resnet18(1000)) == 11_689_512 - 7680
        assert size(resnet34(1000)) == 21_797_672 - 7680
        assert size(mobilenet_v2(1000)) == 3_504_872
        assert size(resnet34()) == 21_282_122
        assert size(mobilenet_v2()) == 2_236_682
        assert size(mlp([784, 100, 100, 100, 1])) == size(mlp([784, 100, 100, 100, 1], parametrization="ntk")) == 98_801
        convolutions = (9 + 1) * 64 + (9 * 64 + 1) * 32 + (9 * 32 + 1) * 8
        assert size(small_cnn()) == convolutions + 73 * 128 + 129 * 64 + 65
        convolutions = sum((9 * i + 3) * o for i, o in [(3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128)])
        assert size(forensics_cnn()) == convolutions + 2 * 515 * 512 + 513 * 10


def test_old_names_of_parameters_stay() -> None:
    names = list(resnet18(width=2).state_dict())
    assert names[:2] == ["stem.0.weight", "stem.1.weight"]
    assert {"blocks.7.second.1.running_var", "blocks.2.shortcut.0.weight", "head.bias"} < set(names)
    assert not any(name.startswith("blocks.8.") for name in names)
    assert list(mlp([3, 4, 2]).state_dict()) == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_images_keep_their_resolution() -> None:
    """What the last convolution of each network sees of a 32x32 image."""
    x = torch.randn(2, 3, 32, 32)
    mobile, resnet, poisoned = mobilenet_v2(width=0.1), resnet34(width=2), forensics_cnn(width=2).eval()
    assert mobile.blocks(mobile.stem(x)).shape == (2, 32, 4, 4)
    assert resnet.blocks(resnet.stem(x)).shape == (2, 16, 4, 4)
    assert len(resnet.blocks) == 16
    assert len(mobile.blocks) == 17
    assert sum(block.shortcut for block in mobile.blocks) == 10
    assert poisoned[:21](x).shape == (2, 8, 4, 4)


def test_pooling_of_rows_is_the_pooling_of_flat_features() -> None:
    """Shan et al.'s network takes the largest of each four flattened features of a sample, and of one sample only."""
    model, x = forensics_cnn(width=2).eval(), torch.randn(3, 3, 32, 32)
    pooled = next(k for k, layer in enumerate(model) if isinstance(layer, nn.Flatten)) + 1
    for one in x:
        flat = model[: pooled - 2](one[None]).flatten(1)
        want = torch.stack([group.max() for group in flat[0].split(4)])
        torch.testing.assert_close(model[:pooled](one[None])[0], want)
    torch.testing.assert_close(model[:pooled](x), F.max_pool1d(model[: pooled - 2](x).flatten(1), 4))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "resnet34": (lambda: resnet34(3, width=2), (3, 16, 16)),
    "resnet34 without norms": (lambda: resnet34(3, "none", width=2), (3, 16, 16)),
    "mobilenet_v2": (lambda: mobilenet_v2(3, width=0.1), (3, 16, 16)),
    "small_cnn": (lambda: small_cnn(width=2, hidden=(8, 4)), (1, 28, 28)),
    "small_cnn standard": (lambda: small_cnn(2, 3, 16, 1, (6,), parametrization="standard"), (3, 16, 16)),
    "forensics_cnn": (lambda: forensics_cnn(3, width=2), (3, 32, 32)),
    "ntk mlp": (lambda: mlp([6, 9, 8, 2], parametrization="ntk"), (6,)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_kernels_equal_the_jacobian_products(name: str) -> None:
    make, shape = CASES[name]
    model = make()
    if any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules()):
        randomise(model)
    model, x = model.double().eval(), torch.randn(4, *shape, dtype=DOUBLE)
    j = reference.jacobians(model, x)
    full = tg.full_ntk(model)
    for kernel, oracle in [(full, reference.full), (replace(full, trace=True), reference.trace)]:
        got, want = kernel(x), oracle(j, j)
        assert float((got - want).norm() / want.norm()) < 1e-10
    (plan,) = full.feature_map.plans.values()
    assert not plan.fallback  # each parameter has a structured rule


def spread(make: Callable[[], nn.Module], x: Tensor, seeds: int) -> Tensor:
    """f(x)² over many initialisations."""
    with torch.no_grad():
        return torch.stack([initialized(make, seed)(x).squeeze() ** 2 for seed in range(seeds)])


@pytest.mark.parametrize("width", [2, 8, 128])
@pytest.mark.every(3)
def test_outputs_of_ntk_mlps_have_the_variance_of_the_limit(width: int) -> None:
    """E f² = 1 + ½(1 + ½(1 + |x|²)) at every width: ReLU halves the second moment of a centred variable."""
    x = torch.tensor([1.0, -2, 0.5])
    found = spread(lambda: mlp([3, width, width, 1], parametrization="ntk"), x, 800)
    want = 1 + (1 + (1 + x.square().sum()) / 2) / 2
    assert abs(found.mean() - want) < 3.5 * found.std() / len(found) ** 0.5


@pytest.mark.slow
def test_outputs_of_small_cnns_have_a_variance_that_width_leaves() -> None:
    x = torch.randn(1, 1, 16, 16)
    narrow = spread(lambda: small_cnn(size=16, width=1, hidden=(4, 4)), x, 400)
    wide = spread(lambda: small_cnn(size=16, width=6, hidden=(64, 64)), x, 400)
    error = (narrow.var() / len(narrow) + wide.var() / len(wide)).sqrt()
    assert abs(narrow.mean() - wide.mean()) < 3.5 * error
    unscaled = nn.Sequential(*(layer for layer in small_cnn(size=16, width=6) if not isinstance(layer, Scale)))
    assert unscaled(x).square() > 1000 * wide.mean()


def test_a_scale_commutes_with_relu() -> None:
    """The paper's relu(z / √o) is our relu(z) / √o."""
    z = torch.randn(5, 7, dtype=DOUBLE)
    torch.testing.assert_close(Scale(7)(z.relu()), (z / 7**0.5).relu(), rtol=0, atol=1e-15)


def test_standard_parametrization_is_pytorchs() -> None:
    """The same draws as plain torch modules, in the same order: seeds of earlier versions still give their networks."""
    with seeded(0):
        want = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert equal(initialized(lambda: mlp([3, 4, 2], nn.Tanh), 0), want)


def test_networks_that_cannot_be_are_refused() -> None:
    from tangency._base.checks import choice

    with pytest.raises(tg.InputError, match=r"norm='bach'; needed: 'batch', 'none'\. Did you mean 'batch'\?"):
        choice("bach", "norm", ["batch", "none"])
    with pytest.raises(tg.InputError, match="size=7; needed: 8 or more"):
        small_cnn(size=7)


# Augmentation.


def slow_crops(image: Tensor, pad: int) -> dict[tuple[int, int, int], Tensor]:
    """Every crop of the padded image and of its padded mirror image, one by one."""
    found = {}
    h, w = image.shape[-2:]
    for mirrored in (0, 1):
        whole = image.numpy()[:, :, ::-1] if mirrored else image.numpy()
        padded = np.pad(whole, ((0, 0), (pad, pad), (pad, pad)), mode="reflect")
        for i, j in product(range(2 * pad + 1), repeat=2):
            found[mirrored, i, j] = torch.from_numpy(padded[:, i : i + h, j : j + w].copy())
    return found


def test_flip_crop_takes_crops_of_the_padded_image() -> None:
    x = torch.randn(60, 2, 11, 12)
    got = flip_crop(x, torch.Generator().manual_seed(0))
    kinds = []
    for before, after in zip(x, got, strict=True):
        matches = [kind for kind, crop in slow_crops(before, 4).items() if torch.equal(crop, after)]
        assert len(matches) == 1
        kinds += matches
    assert len({kind[1:] for kind in kinds}) > 30  # of 81
    assert 15 < sum(kind[0] for kind in kinds) < 45


def test_flip_crop_draws_all_alike() -> None:
    """Where the middle pixel went, over many copies of one image, tells the crop: 9 x 9 offsets, each as likely."""
    n = 8100
    x = torch.zeros(1, 1, 11, 11)
    x[..., 5, 5] = 1
    moved = flip_crop(x.expand(n, -1, -1, -1), torch.Generator().manual_seed(0))
    counts = moved.sum((0, 1))[1:-1, 1:-1]
    assert counts.sum() == n
    assert 40 < float(((counts - 100) ** 2 / 100).sum()) < 130  # χ² of 80 degrees of freedom: 80 ± 13


def test_flip_crop_depends_on_its_generator_alone() -> None:
    x = torch.randn(5, 3, 8, 8)
    before = torch.get_rng_state()
    a, b, c = (flip_crop(x, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(tg.InputError, match="the images are 4x8, pad=4; padding by reflection needs less"):
        flip_crop(torch.randn(2, 3, 4, 8))


# Training.


def problem(n: int = 40, c: int = 3, dtype: torch.dtype = DOUBLE) -> tuple[nn.Module, Tensor, Tensor]:
    x = torch.randn(n, 4, dtype=dtype)
    return mlp([4, 6, c], nn.Tanh).to(dtype), x, torch.randint(max(c, 2), (n,))


def twin(model: nn.Module, like: Callable[[], nn.Module]) -> nn.Module:
    other = like().to(next(model.parameters()).dtype)
    other.load_state_dict(model.state_dict())
    return other


LOSS_BY_HAND: dict[str, tuple[int, Callable[[Tensor, Tensor], Tensor]]] = {
    "cross_entropy": (3, lambda f, y: -f.log_softmax(-1)[range(len(y)), y].mean()),
    "cross_entropy of one": (1, lambda f, y: F.softplus(torch.where(y == 1, -f[:, 0], f[:, 0])).mean()),
    "mse": (3, lambda f, y: (f - torch.eye(3, dtype=DOUBLE)[y]).square().mean()),
    "mse of one": (1, lambda f, y: (f[:, 0] - torch.where(y == 1, 1.0, -1.0)).square().mean()),
    "sigmoid_mse": (3, lambda f, y: (f.sigmoid() - torch.eye(3, dtype=DOUBLE)[y]).square().mean()),
    "sigmoid_mse of one": (1, lambda f, y: (f[:, 0].sigmoid() - y).square().mean()),
}


@pytest.mark.parametrize("name", LOSS_BY_HAND)
def test_one_step_is_the_step_made_by_hand(name: str) -> None:
    c, by_hand = LOSS_BY_HAND[name]
    model, x, y = problem(c=c)
    other = twin(model, lambda: mlp([4, 6, c], nn.Tanh))
    value = by_hand(other(x), y)
    grads = torch.autograd.grad(value, list(other.parameters()))
    past = fit(model, x, y, epochs=1, batch=len(x), lr=0.3, momentum=0.0, weight_decay=0.1, loss=name.split()[0])
    for p, before, grad in zip(model.parameters(), other.parameters(), grads, strict=True):
        torch.testing.assert_close(p, before - 0.3 * (grad + 0.1 * before), rtol=1e-12, atol=1e-14)
        assert p.grad is None
    assert float(past.loss) == pytest.approx(float(value.detach()), rel=1e-12)
    want = other(x).argmax(-1) == y if c > 1 else (other(x)[:, 0] > 0) == (y == 1)
    assert float(past.accuracy) == pytest.approx(float(want.double().mean()))


@pytest.mark.parametrize(("nesterov", "smoothing"), [(True, 0.0), (False, 0.1)])
def test_steps_with_momentum_are_torchs(nesterov: bool, smoothing: float) -> None:
    model, x, y = problem()
    other = twin(model, lambda: mlp([4, 6, 3], nn.Tanh))
    rule = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.8, nesterov=nesterov)
    for _ in range(5):
        rule.zero_grad()
        F.cross_entropy(other(x), y, label_smoothing=smoothing).backward()
        rule.step()
    fit(model, x, y, epochs=5, batch=100, lr=0.1, momentum=0.8, nesterov=nesterov, label_smoothing=smoothing)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_smoothed_targets_of_one_output() -> None:
    model, x, y = problem(c=1)
    want = F.binary_cross_entropy_with_logits(model(x)[:, 0], y * 0.8 + 0.1)
    past = fit(model, x, y, epochs=1, batch=100, label_smoothing=0.2)
    assert float(past.loss) == pytest.approx(float(want.detach()))


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_other_optimizers_are_torchs(optimizer: str) -> None:
    model, x, y = problem()
    other = twin(model, lambda: mlp([4, 6, 3], nn.Tanh))
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[optimizer]
    fit(model, x, y, epochs=4, batch=8, optimizer=optimizer, weight_decay=0.1)
    fit(other, x, y, epochs=4, batch=8, optimizer=lambda p: kind(p, lr=0.001, weight_decay=0.1))
    assert equal(model, other)


def test_every_sample_counts_once_an_epoch_in_batches_alike() -> None:
    seen: list[Tensor] = []

    def watch(outputs: Tensor, y: Tensor) -> Tensor:
        if outputs.requires_grad:  # not the look that is taken before training
            seen.append(y)
        return F.mse_loss(outputs, y)

    y = torch.arange(21, dtype=DOUBLE)[:, None]
    past = fit(mlp([4, 1]).double(), torch.randn(21, 4, dtype=DOUBLE), y, epochs=2, batch=10, lr=1e-4, loss=watch)
    assert [len(batch) for batch in seen] == [7, 7, 7] * 2  # not 10, 10, 1
    orders = [torch.cat(seen[:3])[:, 0], torch.cat(seen[3:])[:, 0]]
    assert all(order.sort().values.tolist() == list(range(21)) for order in orders)
    assert not torch.equal(*orders)
    assert past.accuracy is None


@pytest.mark.parametrize(
    ("schedule", "warmup", "want"),
    [
        ("constant", None, [1, 1, 1, 1]),
        ("constant", 0.5, [1 / 4, 3 / 4, 1, 1]),
        ("cosine", None, [0.5 + 0.5 * np.cos(np.pi * k / 8) for k in (1, 3, 5, 7)]),
        ("cosine", 0.5, [1 / 4, 3 / 4, 0.5 + 0.5 * np.cos(np.pi / 4), 0.5 + 0.5 * np.cos(np.pi * 3 / 4)]),
        ("onecycle", None, [0.5, 5 / 6, 1 / 2, 1 / 6]),
        ("onecycle", 0.5, [1 / 4, 3 / 4, 3 / 4, 1 / 4]),
    ],
)
def test_schedules(schedule: str, warmup: float | None, want: list[float]) -> None:
    """The distance moved under a loss of gradient 1 is the learning rate."""
    model = nn.Linear(1, 1, bias=False).double()
    places: list[float] = []

    def slope(outputs: Tensor, y: Tensor) -> Tensor:
        places.append(float(model.weight.detach()))
        return outputs.sum()

    options = {"epochs": 2, "batch": 1, "lr": 2, "momentum": 0.0, "schedule": schedule, "warmup": warmup}
    fit(model, torch.ones(2, 1, dtype=DOUBLE), torch.zeros(2), loss=slope, **options)
    moved = -np.diff([*places[1:], float(model.weight.detach())])
    np.testing.assert_allclose(moved, 2 * np.array(want), rtol=1e-12)


def noisy() -> nn.Module:
    """Every kind of randomness in training: batches, dropout; with norms besides."""
    layers = [nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(144, 3)]
    return nn.Sequential(*layers)


def test_weights_depend_on_the_seed_alone() -> None:
    x, y = torch.randn(50, 1, 8, 8), torch.randint(3, (50,))

    def trained(seed: int, **changes: object) -> nn.Module:
        torch.rand(3)  # the caller's generator is elsewhere each time
        model = initialized(noisy, 7)
        fit(model, x, y, epochs=2, batch=16, seed=seed, **{"augment": "flip_crop", **changes})
        return model

    first = trained(0)
    assert equal(first, trained(0))
    assert equal(first, trained(0, test=(x, y)))  # looking on changes nothing
    assert not equal(first, trained(1))
    assert not equal(first, trained(0, augment=None))


def test_callers_generators_are_untouched() -> None:
    x, y = torch.randn(20, 1, 8, 8), torch.randint(3, (20,))
    model = noisy()
    before = torch.get_rng_state()
    fit(model, x, y, epochs=1, augment="flip_crop", test=(x, y))
    initialized(noisy, 3)
    with pytest.raises(tg.InputError):
        fit(model, x, y[:3])
    with pytest.raises(ZeroDivisionError), seeded(5):
        torch.rand(2)
        _ = 1 / 0
    assert torch.equal(before, torch.get_rng_state())


def test_modes() -> None:
    """Trained in training mode, tested in evaluation mode, and left in it; a look leaves each module's mode alone."""
    x, y = torch.randn(20, 1, 8, 8), torch.randint(3, (20,))
    model, modes = noisy(), []
    model.register_forward_hook(lambda module, args, out: modes.append(module.training))
    fit(model, x, y, epochs=2, batch=10, test=(x, y))
    assert modes == [False, False] + [True, True, False] * 2
    assert not any(module.training for module in model.modules())
    assert tg.trace_ntk(model)(x).shape == (20, 20)
    model[1].train()
    outputs(model, x, batch=7)
    assert [module.training for module in model] == [False, True, False, False, False, False]


def test_outputs_and_accuracy() -> None:
    model, x, y = problem()
    got = outputs(model.train(), x, batch=7)
    torch.testing.assert_close(got, model(x))
    assert not got.requires_grad
    assert accuracy(model, x, y, batch=7) == pytest.approx(float((model(x).argmax(-1) == y).double().mean()))
    one = nn.Sequential(mlp([4, 1]).double(), nn.Flatten(0))  # [n], without an axis for its one output
    assert accuracy(one, x, (one(x) > 0).long()) == 1
    assert accuracy(one, x, one(x) > 0) == 1
    with pytest.raises(tg.InputError, match="y has the class 3; needed: whole numbers 0…2"):
        accuracy(model, x, y + 3 - y.max())
    with pytest.raises(tg.InputError, match="batch=0"):
        outputs(model, x, batch=0)


class ByHand(nn.Module):
    """A sigmoid that nobody sees."""

    def forward(self, x: Tensor) -> Tensor:
        return 1 / (1 + (-x).exp())


def halves() -> tuple[nn.Module, Tensor, Tensor]:
    """A network whose one logit is right for all samples but two."""
    x = torch.linspace(-2, 2, 40, dtype=DOUBLE)[:, None]
    y = (x[:, 0] > 0).long()
    y[:2] = 1
    model = nn.Linear(1, 1).double()
    with torch.no_grad():
        model.weight.fill_(3.0)
        model.bias.zero_()
    return model, x, y


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (nn.Identity(), "logits"),
        (nn.Sigmoid(), "probabilities"),
        (nn.Sequential(nn.Sigmoid(), nn.Flatten(0)), "probabilities"),
        (nn.LogSigmoid(), "log-probabilities"),
    ],
)
def test_one_output_decides_where_its_kind_does(last: nn.Module, kind: Any) -> None:
    model, x, y = halves()
    whole = nn.Sequential(model, last)
    assert accuracy(whole, x, y) == 38 / 40
    assert accuracy(whole, x, y, outputs_are=kind) == 38 / 40
    assert accuracy(nn.DataParallel(whole), x, y) == 38 / 40
    assert fit(whole, x, y, loss=lambda found, y: found.sum() * 0, epochs=1, test=(x, y)).test_accuracy == 38 / 40
    with pytest.raises(tg.InputError, match="outputs_are='odds'; needed: 'logits'"):
        accuracy(whole, x, y, outputs_are="odds")


def test_one_output_that_may_be_a_probability_is_said() -> None:
    model, x, y = halves()
    whole = nn.Sequential(model, ByHand())
    said = (
        "lies between 0 and 1 on all 40 samples .* at 0: 55.0% are right. As a probability, .*0.5: 95.0%. .*outputs_are"
    )
    with pytest.warns(tg.TangencyWarning, match=said):
        assert accuracy(whole, x, y) == 22 / 40
    assert accuracy(whole, x, y, outputs_are="probabilities") == 38 / 40
    assert accuracy(whole, x, y, outputs_are="logits") == 22 / 40


@pytest.mark.parametrize(
    ("last", "outs", "loss", "said"),
    [
        (nn.Sigmoid(), 1, "cross_entropy", "ends in sigmoid, and loss='cross_entropy' takes the sigmoid of that again"),
        (nn.LogSigmoid(), 1, "cross_entropy", "ends in logsigmoid, .* takes the sigmoid"),
        (nn.Sigmoid(), 1, "sigmoid_mse", "loss='sigmoid_mse' takes the sigmoid of that again"),
        (nn.Sigmoid(), 1, "mse", "loss='mse' has the targets -1 and 1"),
        (nn.Softmax(1), 2, "cross_entropy", "ends in softmax, .* takes the softmax of that again"),
        (nn.Sigmoid(), 2, "cross_entropy", "ends in sigmoid, .* takes the softmax of that again"),
        (nn.LogSoftmax(1), 2, "cross_entropy", ""),  # whose softmax is itself
        (nn.Softmax(1), 2, "mse", ""),
        (nn.Sigmoid(), 1, F.binary_cross_entropy, ""),
        (nn.Identity(), 1, "cross_entropy", ""),
    ],
)
def test_a_sigmoid_taken_twice_is_said(last: nn.Module, outs: int, loss: Any, said: str) -> None:
    _, x, y = halves()
    model = nn.Sequential(mlp([1, 4, outs]).double(), last)
    targets = y.double()[:, None] if callable(loss) else y
    with pytest.warns(tg.TangencyWarning, match=said + ".* without its last") if said else nullcontext():
        fit(model, x, targets, loss=loss, epochs=1)


def test_outputs_that_are_no_numbers_have_no_accuracy() -> None:
    model, x, y = problem()
    holed = x.clone()
    holed[3:5, 2] = float("nan")
    with pytest.raises(tg.InputError, match="the model's outputs are NaN for 2 of 40 samples; needed: numbers"):
        accuracy(model, holed, y)
    past = fit(model, x, y, epochs=2, test=(x, y))
    model.register_forward_hook(lambda module, args, out: out if module.training else out * float("nan"))
    again = fit(model, x, y, epochs=1, test=(x, y))
    assert past.test_accuracy is not None
    assert again.test_accuracy is not None
    assert bool(past.test_accuracy.isfinite().all())
    assert bool(again.test_accuracy.isnan().all())


def test_samples_that_the_network_cannot_take_are_named() -> None:
    model, x, y = problem()
    pictures = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    bytes8 = torch.zeros(5, 1, 4, 4, dtype=torch.uint8)
    for act, message in (
        (lambda: outputs(model, {"input": x.long()}), r"x\['input'\] is torch.int64 of shape \(40, 4\).*float64"),
        (lambda: outputs(pictures, bytes8), r"x is torch.uint8 .* x.to\(torch.float32\) .* x.float\(\) / 255"),
        (lambda: accuracy(model, x[:, :2], y), r"takes 4 features, x has 2: x is .*\(40, 2\).* shape that the"),
        (
            lambda: outputs(pictures, bytes8.float().expand(-1, 3, -1, -1)),
            r"^Conv2d '0' takes 1 channels, x has 3: x is .*\(5, 3, 4, 4\).* shape that",
        ),
    ):
        with pytest.raises(tg.InputError, match=message):
            act()
    assert accuracy(model, x.float().numpy(), y.numpy()) == accuracy(model, x.float().double(), y)

    def broken(*_: Any) -> None:
        raise RuntimeError("the model's own trouble")

    model.register_forward_hook(broken)
    with pytest.raises(RuntimeError, match="^the model's own trouble"):
        outputs(model, x)


def test_one_output_without_an_axis() -> None:
    """[n] and [n, 1] are the same network."""
    flat = nn.Sequential(mlp([4, 6, 1]), nn.Flatten(0)).double()
    model = twin(flat[0], lambda: mlp([4, 6, 1]))
    x, y = torch.randn(30, 4, dtype=DOUBLE), torch.randint(2, (30,))
    fit(flat, x, y, epochs=2, batch=7)
    fit(model, x, y, epochs=2, batch=7)
    assert equal(flat[0], model)


def test_inputs_of_several_tensors_and_logits() -> None:
    """What a language model takes and returns."""

    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(5, 8), nn.Linear(8, 2)

        def forward(self, ids: Tensor, mask: Tensor) -> Output:
            return Output(self.head((self.embed(ids) * mask[..., None]).sum(1)))

    ids, mask = torch.randint(1, 5, (100, 6)), torch.ones(100, 6)
    x, y = {"ids": ids, "mask": mask}, (ids == 3).any(1).long()
    past = fit(Model(), x, y, epochs=30, batch=20, test=(x, y))
    assert past.test_accuracy is not None
    assert past.test_accuracy[-1] > 0.95


def test_frozen_parameters_stay() -> None:
    model, x, y = problem()
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    fit(model, x, y, epochs=2)
    assert torch.equal(model[0].weight, before)
    model.requires_grad_(False)
    with pytest.raises(tg.InputError, match="no parameter that requires a gradient"):
        fit(model, x, y)


def test_channels_last_is_the_same_training() -> None:
    x, y = torch.randn(40, 3, 8, 8, dtype=DOUBLE), torch.randint(3, (40,))
    a, b = (initialized(lambda: resnet18(3, width=2).double(), 0) for _ in range(2))
    fit(a, x, y, epochs=1, batch=20, lr=0.01)
    fit(b, x, y, epochs=1, batch=20, lr=0.01, channels_last=True)
    for p, q in zip(a.parameters(), b.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-8, atol=1e-10)
        assert q.is_contiguous()


def test_an_augmentation_may_be_any_function() -> None:
    model, x, y = problem()
    drawn = []

    def shifted(x: Tensor, generator: torch.Generator) -> Tensor:
        drawn.append(torch.rand(1, generator=generator))
        return x + drawn[-1]

    fit(model, x, y, epochs=2, batch=20, augment=shifted)
    assert len(set(map(float, drawn))) == 4


def test_a_recipe_is_kept_and_changed() -> None:
    model, x, y = problem()
    recipe = Recipe(epochs=3, lr=0.02)
    past = fit(model, x, y, recipe, lr=0.01, seed=4, device="cpu")
    assert past.recipe == Recipe(epochs=3, lr=0.01)
    assert (past.seed, past.loss.shape, past.test_accuracy) == (4, (3,), None)
    assert past.seconds > 0


def test_divergence_names_the_epoch() -> None:
    model, x, _ = problem()
    with pytest.raises(
        tg.DidNotConverge, match=r"the loss of epoch \d+ of 50 is (nan|inf)\. Lower lr=1e\+06"
    ) as caught:
        fit(model, x, x[:, :3] * 1e3, epochs=50, lr=1e6, loss="mse")
    past = caught.value.solution
    assert not past.loss[-1].isfinite()
    assert past.loss[:-1].isfinite().all()
    assert not model.training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs=0; needed: a whole number, at least 1"),
        ({"batch": -1}, "batch=-1; needed: a whole number"),
        ({"lr": 0.0}, "lr=0 would train nothing"),
        ({"lr": -0.1}, "lr=-0.1; needed: a finite number, at least 0"),
        ({"momentum": 1.0}, "momentum=1.0; needed: at least 0, below 1"),
        ({"weight_decay": float("nan")}, "weight_decay=nan"),
        ({"optimizer": "sdg"}, r"optimizer='sdg'; needed: 'sgd', 'adam', 'adamw', or a function.*Did you mean 'sgd'"),
        ({"schedule": "cosin"}, r"schedule='cosin'; needed: 'constant', 'cosine', 'onecycle'.*Did you mean 'cosine'"),
        ({"loss": "hinge"}, r"loss='hinge'; needed: 'cross_entropy', 'mse', 'sigmoid_mse', or a function"),
        ({"augment": "flip"}, r"augment='flip'; needed: 'flip_crop', a function \(x, generator\) -> x, or None"),
        ({"precision": "int8"}, "precision='int8'; needed: 'float32', 'float16', 'bfloat16', or None"),
        ({"precision": "float16"}, "precision='float16' trains by autocast on CUDA; the model is on cpu"),
        ({"precision": "bfloat16"}, r"on CUDA \(on a CPU, bfloat16 crashes some processors\); the model is on cpu"),
        ({"precision": "float32"}, "precision='float32', the parameters are torch.float64"),
        ({"label_smoothing": 0.1, "loss": "mse"}, "label_smoothing=0.1; it is a part of loss='cross_entropy' alone"),
        ({"optimizer": torch.optim.SGD, "lr": 0.1}, "optimizer= is a function, which sets lr and weight_decay itself"),
        ({"warmup": 1.5}, "warmup=1.5; needed: at least 0, below 1"),
        ({"epoch": 3}, r"epoch= is no option of training\. Did you mean 'epochs'\? Options: epochs, batch, lr"),
        ({"loss": lambda f, y: f[:, 0]}, r"the loss of a batch is \(2,\); needed: one number"),
        ({"augment": "flip_crop"}, r"augment='flip_crop' needs images \[n, c, h, w\] of real numbers; x is \(40, 4\)"),
        ({"channels_last": True}, r"channels_last=True needs images"),
    ],
)
def test_options_that_cannot_be_are_refused(changes: dict[str, object], message: str) -> None:
    model, x, y = problem()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(tg.InputError, match=message):
        fit(model, x, y, **changes)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_data_that_cannot_be_are_refused() -> None:
    model, x, y = problem()
    holed = x.clone()
    holed[3, 2] = float("nan")
    one = mlp([4, 1]).double()
    for network, inputs, labels, options, message in [
        (model, x, y[:-1], {}, "x has 40 samples and y has 39; needed: as many"),
        (model, x, torch.tensor(3), {}, "x has 40 samples and y has 1"),
        (model, x, y + 1, {}, "y has the class 3; needed: whole numbers 0…2 of shape .n., for a model of 3 outputs"),
        (model, x, y - 1, {}, "y has the class -1; needed"),
        (model, x, y.double(), {}, r"y is torch.float64 of shape \(40,\); needed: whole numbers 0…2.*Use y.long\(\)"),
        (model, x, y.double() + 0.5, {}, r"These are no whole numbers: real targets need loss='mse'\.$"),
        (model, x, y[:, None], {}, r"y is torch.int64 of shape \(40, 1\); .* Use y\[:, 0\].long\(\)"),
        (model, x, y.double()[:, None], {}, r"y is torch.float64 of shape \(40, 1\); .* Use y\[:, 0\].long\(\)"),
        (model, x, F.one_hot(y, 3), {}, r"of shape \(40, 3\); needed: whole numbers .* one-hot: y.argmax\(1\)\.$"),
        (model, x, F.one_hot(y, 3).double(), {}, r"float64 of shape \(40, 3\); .* one-hot: y.argmax\(1\)\.$"),
        (model, x, x[:, :3], {}, r"of shape \(40, 3\); needed: whole numbers .* real targets: loss='mse'\.$"),
        (model, x[:, :3], y, {}, r"takes 4 features, x has 3: x is torch.float64 of shape \(2, 3\).*shape that the"),
        (one, x, y, {}, "y has the class 2; needed: whole numbers 0…1 of shape .n., for a model of 1 output"),
        (
            one,
            x,
            x[:, 0],
            {"loss": "mse"},
            r"y is torch.float64 of shape \(40,\), the outputs' shape is \(40, 1\).*: y\[:, None\]\.$",
        ),
        (one, x, holed[:, 2:3], {"loss": "mse"}, r"y\[3, 0\] is nan; needed: finite numbers"),
        (model, holed, y, {}, r"x\[3, 2\] is nan; needed: finite numbers"),
        (model, x[:0], y[:0], {}, "a batch of zero samples"),
        (model, x, y, {"test": (x, y[:3])}, "x has 40 samples and test y has 3"),
        (model, x, y, {"test": (x, y + 1)}, "test y has the class 3"),
        (model, (x,), y, {"augment": lambda x, generator: x}, "augment= changes a tensor; x is a tuple"),
        (nn.Unflatten(1, (2, 2)), x, y, {}, "no parameter"),
        (
            nn.Sequential(model, nn.Unflatten(1, (3, 1))),
            x,
            y,
            {},
            r"the outputs' shape is \(2, 3, 1\); needed: \[n, c\]",
        ),
    ]:
        with pytest.raises(tg.InputError, match=message):
            fit(network, inputs, labels, **options)


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order[:1300]], y[order[:1300]], x[order[1300:]], y[order[1300:]]


@pytest.mark.parametrize(
    "options",
    [{}, {"optimizer": "adam", "schedule": "onecycle", "lr": 0.01}, {"loss": "mse", "schedule": "cosine", "lr": 0.2}],
)
@pytest.mark.every(3)
def test_digits_are_learnt_by_an_mlp(options: dict[str, object]) -> None:
    x, y, u, v = digits()
    model = initialized(lambda: mlp([64, 64, 10]), 0)
    past = fit(model, x, y, epochs=15, test=(u, v), batch=64, **options)
    assert past.test_accuracy is not None
    assert past.test_accuracy[-1] > 0.95
    assert accuracy(model, u, v) == pytest.approx(float(past.test_accuracy[-1]))


@pytest.mark.parametrize(
    "make",
    [lambda: small_cnn(size=16, width=4), lambda: mlp([256, 50, 50, 1], parametrization="ntk")],
    ids=["small_cnn", "mlp"],
)
@pytest.mark.every(2)
def test_two_digits_are_learnt_by_one_output(make: Callable[[], nn.Module]) -> None:
    """Engel et al.'s setting: two classes, one output, its sigmoid, squared loss, the NTK parametrisation."""
    x, y, _, _ = digits()
    chosen = (y == 3) | (y == 8)
    images = F.interpolate(x[chosen].reshape(-1, 1, 8, 8), (16, 16), mode="bilinear")
    model = initialized(make, 0)
    images = images if isinstance(model[0], nn.Conv2d) else images.flatten(1)
    past = fit(model, images[:200], (y[chosen] == 8)[:200], epochs=20, batch=32, lr=1.0, loss="sigmoid_mse")
    assert past.accuracy is not None
    assert past.accuracy[-1] > 0.97
    assert accuracy(model, images[200:], (y[chosen] == 8)[200:]) > 0.9


# Data as people have them.


def small_data(n: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long()


def read_only(v: Tensor) -> np.ndarray:
    array = v.numpy().copy()
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    "form",
    [
        lambda x, y: (x, y.tolist()),
        lambda x, y: (x, tuple(y.tolist())),
        lambda x, y: (x, list(y)),
        lambda x, y: (x.numpy(), y.numpy().astype(np.int32)),
        lambda x, y: (read_only(x), read_only(y)),
        lambda x, y: (x.numpy().astype(">f4"), y.numpy().astype(">i2")),
        lambda x, y: (x.tolist(), y.tolist()),
        lambda x, y: ((x.numpy(),), y),
        lambda x, y: ({"input": x.numpy()}, y.numpy()),
        lambda x, y: (tg.datasets.labelled((x, y)), None),
    ],
)
def test_arrays_lists_and_labelled_sets_are_tensors(form: Callable[[Tensor, Tensor], Any]) -> None:
    """The same training to the bit, the same test accuracy."""
    x, y = small_data()
    want = initialized(lambda: mlp([3, 8, 2]), seed=0)
    past = fit(want, x, y, test=(x, y), epochs=3, batch=8)
    model = initialized(lambda: mlp([3, 8, 2]), seed=0)
    made = form(x, y)
    again = fit(model, *made, test=made[0] if made[1] is None else made, epochs=3, batch=8)
    assert equal(model, want)
    assert past.test_accuracy is not None
    assert again.test_accuracy is not None
    assert torch.equal(again.test_accuracy, past.test_accuracy)
    assert accuracy(model, *made) == float(past.test_accuracy[-1])


def test_real_targets_may_be_arrays() -> None:
    x, _ = small_data()
    models = [initialized(lambda: mlp([3, 8, 1]), seed=0) for _ in range(2)]
    fit(models[0], x, x[:, :1], loss="mse", epochs=2)
    fit(models[1], x, x[:, :1].numpy().astype(np.float64), loss="mse", epochs=2)
    assert equal(*models)


@pytest.mark.parametrize(
    ("given", "test", "message"),
    [
        (["cat", "dog"] * 12, None, "y is a list that is no table of numbers; needed: a class"),
        (np.array(["cat", "dog"] * 12), None, "y is an array of <U3 that is no table of numbers; needed: a class"),
        ([[1, 0], [1]] * 12, None, "y is a list that is no table of numbers"),
        (3, None, "y is a int; needed: a tensor, array or list"),
        (None, None, "y is missing; needed: the classes or targets"),
        (list(range(5)), None, "x has 24 samples and y has 5"),
        ([0, 1] * 12, "test", "test is a str; needed: \\(x, y\\), or tangency.datasets.Labelled"),
        ([0, 1] * 12, (torch.zeros(2, 3), [0, 2]), "test y has the class 2"),
        ([0, 1] * 12, (torch.zeros(2, 3), None), "test y is missing"),
        ([0, 1] * 12, ([["a"]], [0]), "test x is a list that is no table of numbers; needed: numbers"),
    ],
)
def test_data_without_numbers_are_refused(given: Any, test: Any, message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        fit(mlp([3, 8, 2]), small_data()[0], given, test=test, epochs=1)


# Batches of one sample, and wrappers.


@pytest.mark.parametrize(("n", "batch"), [(3, 2), (1, 128), (4, 1), (5, 2)])
def test_a_batch_norm_with_a_single_number_is_refused(n: int, batch: int) -> None:
    """Before a step is made: the model stays as it was, in evaluation mode."""
    x, y = small_data(n)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(tg.InputError, match=rf"batch={batch} leaves a batch of one sample.*norm 1 \(BatchNorm1d\)"):
        fit(model, x, y, epochs=1, batch=batch)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not model.training


def test_a_batch_norm_with_numbers_enough_is_not() -> None:
    x = torch.randn(3, 1, 4, 4)
    y = torch.tensor([0, 1, 0])
    wide = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    fit(wide, x, y, epochs=1, batch=2)  # four positions in each channel
    assert int(wide[1].num_batches_tracked) == 2
    flat = nn.Sequential(nn.Flatten(), nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    fit(flat, x[[0, 1, 2, 0]], y[[0, 1, 2, 0]], epochs=1, batch=3)  # two batches of two
    assert not any(m._forward_pre_hooks for m in flat.modules())


class Parallel(nn.DataParallel):
    """As on a machine with GPUs, which the model has not been moved to: forward() refuses."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.device_ids, self.src_device_obj = [0], torch.device("cuda:0")


def test_the_model_in_data_parallel_is_the_one_inside() -> None:
    x, y = small_data()
    want, wrapped = (initialized(lambda: mlp([3, 8, 2]), seed=0) for _ in range(2))
    outer = Parallel(wrapped)
    with pytest.raises(RuntimeError, match="cuda:0"):
        outer(x)
    fit(want, x, y, test=(x, y), epochs=2, batch=8)
    fit(outer, x, y, test=(x, y), epochs=2, batch=8)
    assert equal(wrapped, want)
    assert not outer.training
    assert torch.equal(outputs(outer, x), outputs(want, x))
    assert accuracy(outer, x, y) == accuracy(want, x, y)


def test_distributed_training_is_refused() -> None:
    outer = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)  # without its processes
    with pytest.raises(tg.InputError, match="Distributed.*, and fit trains in one process. Give model.module"):
        fit(outer, *small_data(), epochs=1)


def test_a_training_can_be_read_and_looked_at() -> None:
    x = torch.randn(40, 2)
    past = tg.models.fit(
        mlp([2, 4, 2]), x, (x[:, 0] > 0).long(), epochs=3, progress=False, test=(x, (x[:, 0] > 0).long())
    )
    lines = past.table().splitlines()
    assert lines[0].split() == ["epoch", "loss", "accuracy", "test", "accuracy"]
    assert len(lines) == 4
    assert [float(line.split()[1]) for line in lines[1:]] == pytest.approx(past.loss.tolist(), rel=1e-4)
    loss, accuracy = past.plot().axes
    assert np.allclose(loss.lines[0].get_ydata(), past.loss)
    assert [len(line.get_xdata()) for line in accuracy.lines] == [3, 3]
    written = past.to_dict()
    assert written["units"] == {"seconds": "s"}
    assert written["loss"] == past.loss.tolist()
    assert "float64[3]" in repr(past)
