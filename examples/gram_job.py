"""A job for the command line: the kernel of a small CNN on scikit-learn's digits, all 1,797 images.

    tangency gram examples/gram_job.py:make --store runs/digits
    tangency status runs/digits
    tangency verify runs/digits examples/gram_job.py:make --sample 5

Stop it with Ctrl-C and start it again: it goes on where it stopped. For your own model, write such a function.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import tangency as tg


def make() -> tuple[tg.Kernel, torch.Tensor]:
    torch.manual_seed(0)  # the same weights every time, or the store refuses
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(288, 10),
    )
    images = torch.as_tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    return tg.cosine(tg.trace_ntk(model)), images
