"""Outputs of layers: against hooks of one's own, in batches, pooled, from every kind of data; the model left alone."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import tangency as tg
from tangency.representations import Layers, layer_outputs


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Sequential(nn.Flatten(), nn.Linear(144, 5)),
        nn.Linear(5, 2),
    ).eval()


class Tokens(nn.Module):
    """Embeds tokens, and returns what Hugging Face's models return."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Embedding(10, 6), nn.Linear(6, 6)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        return {"last_hidden_state": self.mix(self.embed(input_ids)).tanh(), "pooled": attention_mask}


def test_what_modules_put_out_whatever_the_batch(net: nn.Module) -> None:
    x = torch.rand(7, 3, 8, 8)
    want = {"0": net[0](x), "3": net[:4](x), "4": net(x)}
    for batch in (None, 1, 3, 100):
        found = layer_outputs(net, x, ["4", "0", "3"], batch=batch, progress=False)
        assert list(found) == ["0", "3", "4"]  # in the model's order
        for name, z in want.items():
            torch.testing.assert_close(found[name], z.detach(), rtol=1e-5, atol=1e-6)
            assert not found[name].requires_grad


def test_patterns_and_defaults(net: nn.Module) -> None:
    x = torch.rand(2, 3, 8, 8)
    assert list(layer_outputs(net, x, "3*", progress=False)) == ["3", "3.0", "3.1"]
    assert list(layer_outputs(net, x, progress=False)) == ["0", "1", "2", "3"]
    assert Layers.of_model(net, ["[04]"]).names == ("0", "4")


def test_every_kind_of_samples(net: nn.Module) -> None:
    x = torch.rand(5, 3, 8, 8)
    want = layer_outputs(net, x, "3", progress=False)["3"]
    pairs = TensorDataset(x, torch.arange(5))
    for given in (
        x.numpy().astype(np.float64), tg.from_dataset(pairs, 0), tg.datasets.Labelled(x, [0, 1, 0, 1, 0], ("a", "b")),
    ):  # fmt: skip
        torch.testing.assert_close(layer_outputs(net, given, "3", batch=2, progress=False)["3"], want)


def test_positions_are_pooled_of_texts_by_their_mask() -> None:
    model = Tokens().eval()
    ids, mask = torch.randint(10, (3, 4)), torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]])
    x = {"input_ids": ids, "attention_mask": mask}
    z = model.mix(model.embed(ids)).detach()
    means = torch.stack([z[i, : int(m.sum())].mean(0) for i, m in enumerate(mask)])
    for pool, want in (("mean", means), ("first", z[:, 0]), (lambda v: v[:, -1], z[:, -1]), (None, z)):
        found = layer_outputs(model, x, "mix", pool=pool, progress=False)["mix"]
        torch.testing.assert_close(found, want)
    images = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 1))
    x = torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(
        layer_outputs(images, x, "0", pool="mean", progress=False)["0"], images[0](x).mean((2, 3)).detach()
    )


def test_the_model_is_as_it_was(net: nn.Module) -> None:
    before = {k: v.clone() for k, v in net.state_dict().items()}
    x = torch.rand(4, 3, 8, 8)
    state, hooks = torch.get_rng_state(), len(net[0]._forward_hooks)
    with pytest.raises(RuntimeError, match="stop"):
        layer_outputs(net, x, "0", pool=lambda z: (_ for _ in ()).throw(RuntimeError("stop")))
    layer_outputs(net, x, "0", progress=False)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert len(net[0]._forward_hooks) == hooks
    assert not net.training
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": "conv9"}, "no layer 'conv9'.*It has 0, 1, 2, 3, 3.0, 3.1, 4"),
        ({"layers": 3}, "no layer 3"),
        ({"layers": []}, "no layer was named"),
        ({"pool": "max"}, "pool='max'; needed: 'mean', 'first', a function"),
        ({"pool": lambda z: z.sum()}, "pool made shape \\(\\) of layer 0"),
        ({"batch": 0}, "batch=0; needed"),
        ({"x": torch.rand(2, 4, 8, 8)}, "has 4"),
        ({"x": torch.zeros(0, 3, 8, 8)}, "sample"),
    ],
)
def test_clear_errors(net: nn.Module, change: dict[str, object], message: str) -> None:
    given = {"x": torch.rand(2, 3, 8, 8), "layers": "0"} | change
    with pytest.raises((tg.InputError, tg.ModelError), match=message):
        layer_outputs(net, progress=False, **given)  # type: ignore[arg-type]


def test_training_mode_unused_layers_and_lengths_are_refused(net: nn.Module) -> None:
    with pytest.raises(tg.ModelError, match="Call model.eval"):
        layer_outputs(net.train(), torch.rand(2, 3, 8, 8), "0")
    net.eval().extra = nn.Linear(2, 2)
    net.forward = lambda x: nn.Sequential(*list(net)[:5])(x)  # type: ignore[method-assign]
    with pytest.raises(tg.InputError, match="extra were not called"):
        layer_outputs(net, torch.rand(2, 3, 8, 8), "extra")
    with pytest.raises(tg.ModelError, match="floating-point values with the sample in the leading"):
        odd = nn.Sequential(nn.Linear(3, 2), nn.Flatten(0), nn.Unflatten(0, (-1, 2)))
        layer_outputs(odd, torch.rand(4, 3), "1")
