"""A job for `tangency audit`: a small CNN on scikit-learn's digits, one in twenty of which has a wrong label.

    tangency audit examples/audit_job.py:make --out page
    tangency audit apply examples/audit_job.py:training_set decisions.json --out labels.csv

`make` is all that a model of your own needs: (model, train) or (model, train, test). The page exports what was decided
on it as decisions.json; `training_set` returns what was audited, without training a network again.
"""

from dataclasses import replace

import torch

import tangency as tg
from tangency.datasets import Labelled, digits
from tangency.demo import network


def training_set() -> Labelled:
    train, _ = digits()
    draw = torch.Generator().manual_seed(0)
    wrong = torch.rand(len(train), generator=draw) < 0.05
    other = (train.y + torch.randint(1, 10, train.y.shape, generator=draw)) % 10
    return replace(train, y=torch.where(wrong, other, train.y))


def make() -> tuple[torch.nn.Module, Labelled, Labelled]:
    train, (_, test) = training_set(), digits()
    model = tg.models.initialized(network, seed=0)
    tg.models.fit(model, train.x, train.y, epochs=8, lr=3e-3, batch=50, optimizer="adam")
    return model, train, test
