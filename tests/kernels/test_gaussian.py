"""The Gaussian kernel against scikit-learn's, and its bandwidth against NumPy's median."""

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist
from sklearn.metrics.pairwise import rbf_kernel

import tangency as tg


def test_it_is_scikit_learns_and_keeps_the_contract() -> None:
    x = torch.randn(9, 2, 3, dtype=torch.float64)
    k = tg.gaussian(x)
    rows = x.flatten(1).numpy()
    assert k.bandwidth == pytest.approx(np.sort(pdist(rows))[17])  # the lower of the two in the middle
    assert np.allclose(k(x[:4], x).numpy(), rbf_kernel(rows[:4], rows, gamma=1 / (2 * k.bandwidth**2)))
    tg.testing.check_kernel(k, x)
    tg.testing.check_kernel(tg.gaussian(bandwidth=2.0) + k, x.float())
    assert torch.equal(k(x).diagonal(), torch.ones(9, dtype=torch.float64))


def test_digits_of_samples_far_from_the_origin_are_not_lost() -> None:
    x = torch.randn(20, 3)
    near, far = tg.gaussian(bandwidth=1.0)(x), tg.gaussian(bandwidth=1.0)((x + 4096).double())
    assert torch.allclose(near, far, atol=1e-3)


def test_samples_that_are_single_numbers() -> None:
    x = torch.randn(7)
    assert torch.equal(tg.gaussian(x)(x), tg.gaussian(x[:, None])(x[:, None]))


def test_of_many_samples_some_are_drawn_by_the_seed() -> None:
    x = torch.randn(1500, 2)
    assert tg.gaussian(x).bandwidth == tg.gaussian(x).bandwidth != tg.gaussian(x, seed=1).bandwidth
    assert tg.gaussian(x).bandwidth == pytest.approx(float(torch.pdist(x).median()), rel=0.05)


def test_equal_samples_do_not_count() -> None:
    x = torch.zeros(50, 2)
    x[:5] = torch.arange(10.0).reshape(5, 2)
    apart = pdist(x.numpy())
    assert tg.gaussian(x).bandwidth == pytest.approx(np.median(apart[apart > 0]), rel=0.1)


def test_what_is_refused() -> None:
    x = torch.randn(5, 2)
    bad = x.clone()
    bad[1, 0] = math.inf
    for call, message in [
        (lambda: tg.gaussian(), "needed: samples whose median distance"),
        (lambda: tg.gaussian(x, bandwidth=1.0), "one of the two"),
        (lambda: tg.gaussian(bandwidth=0.0), "bandwidth=0; needed: a number above 0"),
        (lambda: tg.gaussian(bandwidth=math.nan), "bandwidth=nan"),
        (lambda: tg.gaussian(x[:1]), "x has 1 sample, which has no distance"),
        (lambda: tg.gaussian(torch.ones(5, 2)), "all samples are equal, so they have no distance"),
        (lambda: tg.gaussian(bad), r"x\[1, 0\] is inf"),
        (lambda: tg.gaussian({"a": x}), "x is a dict; the Gaussian kernel takes one tensor"),
        (lambda: tg.gaussian(torch.zeros(4, 2, dtype=torch.complex64)), "needed: real numbers"),
        (lambda: tg.gaussian(bandwidth=1.0)(x, torch.randn(5, 3)), "samples of 2 and of 3 numbers"),
    ]:
        with pytest.raises(tg.InputError, match=message):
            call()
