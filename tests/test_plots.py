"""The picture of a Gram matrix."""

import numpy as np
import pytest
import torch

import tangency as tg
from tangency import plots


def test_gram_picture() -> None:
    model, x = tg.models.mlp([4, 8, 3]), torch.randn(12, 4)
    labels = torch.arange(12) % 3
    figure = plots.gram(tg.trace_ntk(model)(x), labels, names=["a", "b", "c"])
    left, right = figure.axes[:2]
    shown = torch.as_tensor(np.array(left.images[0].get_array()))
    order = torch.argsort(labels, stable=True)
    torch.testing.assert_close(shown, tg.trace_ntk(model)(x).double()[order][:, order])
    values = torch.as_tensor(np.array(right.lines[0].get_ydata()))
    assert torch.all(values[:-1] >= values[1:])
    assert [t.get_text() for t in left.get_xticklabels()] == ["a", "b", "c"]
    with pytest.raises(tg.InputError, match=r"with 4 labels; needed: \[n, n\]"):
        plots.gram(torch.eye(3), torch.zeros(4, dtype=torch.long))
