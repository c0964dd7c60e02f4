"""Features by which copies are told from others, of samples and of their mirror images, and neighbours by them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from .machine import FeatureMachine, Machine, Nearest


@dataclass(frozen=True, eq=False)
class Views:
    """Features [n, p] of the training samples and [m, p] of the test samples; of pictures, of their mirror images too.

    `by`: what the features are, in words.
    """

    train: Tensor
    test: Tensor | None
    mirrored_train: Tensor | None
    mirrored_test: Tensor | None
    by: str

    def within(self, k: int, progress: bool) -> list[Nearest]:
        """Of each training sample the k nearest others; the same of its mirror image."""
        plain = FeatureMachine(self.train).nearest(k, progress)
        if self.mirrored_train is None:
            return [plain]
        # A picture's mirror image may be like the picture itself, which is no copy.
        return [plain, without_itself(FeatureMachine(self.train, self.mirrored_train).nearest_to_test(k + 1, progress))]

    def between(self, k: int, progress: bool) -> list[Nearest]:
        """Of each test sample the k nearest training samples; the same of its mirror image."""
        rows = [v for v in (self.test, self.mirrored_test) if v is not None]
        return [FeatureMachine(self.train, v).nearest_to_test(k, progress) for v in rows]


def neighbours_of(machine: Machine, k: int, progress: bool) -> tuple[Nearest, Nearest | None]:
    """What a machine says of neighbours: of the training samples, and of the test samples if there are any."""
    return machine.nearest(k, progress), machine.nearest_to_test(k, progress) if machine.m else None


def without_itself(near: Nearest) -> Nearest:
    """All but one of the neighbours of each sample: itself, or if it is not among them the last."""
    here = torch.arange(len(near.places), device=near.places.device)[:, None]
    own = near.places == here
    own[:, -1] |= ~own.any(1)
    n, k = own.shape
    return Nearest(near.similarity[~own].reshape(n, k - 1), near.places[~own].reshape(n, k - 1))
