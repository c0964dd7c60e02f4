"""A job for `tangency shift`: a small CNN on scikit-learn's digits, and new digits in which much has changed.

    tangency shift examples/shift_job.py:make --out page

`make` is all that a model of your own needs: (model, source, target). The source is a part of the data that the model
was not trained on; the new digits are darker, a little noisy, and 1 and 7 are more frequent among them.
"""

import torch

import tangency as tg
from tangency.datasets import Labelled, digits
from tangency.demo import network


def changed(data: Labelled) -> Labelled:
    draw = torch.Generator().manual_seed(0)
    often = (data.y == 1) | (data.y == 7)
    data = data.select(often | (torch.rand(len(data), generator=draw) < 0.5))
    assert isinstance(data.x, torch.Tensor)
    x = (0.8 * data.x + 0.08 * torch.randn(data.x.shape, generator=draw)).clamp(0, 1)
    return Labelled(x, data.y, data.classes, name="new digits")


def make() -> tuple[torch.nn.Module, Labelled, Labelled]:
    train, test = digits()
    model = tg.models.initialized(network, seed=0)
    tg.models.fit(model, train.x, train.y, epochs=8, lr=3e-3, batch=50, optimizer="adam")
    source, other = test.split(0.5)
    return model, source, changed(other)
