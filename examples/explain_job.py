"""A job for `tangency explain`: a small CNN on scikit-learn's digits, some of which carry a planted back door.

    tangency explain examples/explain_job.py:make --out page
    tangency explain examples/explain_job.py:poisoned --out page

`make` is all that a model of your own needs: (model, train, test). `poisoned` returns a dict of `tangency.explain`'s
arguments instead: a tenth of the training images got a white corner and the label 0, and half of the test images.
"""

from typing import Any

import torch

import tangency as tg
from tangency.datasets import Labelled, digits
from tangency.decisions.forensics import Patch, poison
from tangency.demo import network


def trained(train: Labelled) -> torch.nn.Module:
    model = tg.models.initialized(network, seed=0)
    tg.models.fit(model, train.x, train.y, epochs=15, lr=3e-3, batch=50, optimizer="adam")
    return model


def make() -> tuple[torch.nn.Module, Labelled, Labelled]:
    train, test = digits()
    return trained(train), train, test


def poisoned() -> dict[str, Any]:
    train, test = digits()
    patch = Patch(size=2, colour=1.0)
    bad, attacked = (poison(d, patch=patch, target=0, rate=r) for d, r in ((train, 0.1), (test, 0.5)))
    train = Labelled(bad.x, bad.y, train.classes, name="poisoned digits train")
    test = Labelled(attacked.x, attacked.y, test.classes, name="poisoned digits test")
    return {
        "model": trained(train),
        "train": train,
        "test": test,
        "poisoned_train": bad.mask,
        "poisoned_test": attacked.mask,
        "name": "A small CNN",
    }
