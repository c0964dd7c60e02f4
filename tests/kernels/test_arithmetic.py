"""k1 + k2, 2 * k, k / 2 and Python's own sum: what `tg.sum` and `tg.scale` make, for every kind of kernel."""

import operator
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import tangency as tg


class Quadratic(tg.Kernel):
    """A user's own."""

    def prepare(self, x, memory=None):
        return x

    def pair(self, a, b, workspace=None):
        return (1 + a @ b.T) ** 2

    def spec(self):
        return {"kernel": "quadratic"}


X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
MODEL = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))
KINDS = {
    "empirical": tg.trace_ntk(MODEL),
    "full": tg.full_ntk(MODEL),
    "cosine": tg.cosine(tg.trace_ntk(MODEL)),
    "projected": tg.projected(tg.trace_ntk(MODEL), dim=16),
    "infinite": tg.infinite_ntk(MODEL),
    "own": Quadratic(),
    "sum": tg.sum(tg.trace_ntk(MODEL), tg.pseudo_ntk(MODEL)),
    "scale": tg.scale(tg.trace_ntk(MODEL), 3.0),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(3)
def test_operators_make_what_sum_and_scale_make(kind: str) -> None:
    k = KINDS[kind]
    other = Quadratic() if kind != "full" else k
    pairs = [
        (2 * k, tg.scale(k, 2)),
        (k * 2, tg.scale(k, 2)),
        (k / 2, tg.scale(k, 0.5)),
        (np.float32(2) * k, tg.scale(k, 2)),
        (k * np.int64(2), tg.scale(k, 2)),
        (torch.tensor(2.0) * k, tg.scale(k, 2)),
        (0 * k, tg.scale(k, 0)),
    ]
    if kind != "sum":
        pairs += [
            (k + other, tg.sum(k, other)),
            (sum([k, other]), tg.sum([k, other])),
            (sum([k, other, k]), tg.sum(k, other, k)),
            (k + (other + k), tg.sum(k, other, k)),
            (sum([k]), tg.sum(k)),
        ]
    for made, expected in pairs:
        assert type(made) is type(expected)
        assert made.spec() == expected.spec()
        assert torch.equal(made(X), expected(X))


def test_a_store_of_tg_sum_goes_on_as_k_plus_k(tmp_path: Path) -> None:
    k, c = tg.trace_ntk(MODEL), tg.conjugate_kernel(MODEL)
    made = tg.compute(tg.sum(k, tg.scale(c, 0.25)), X, store=tmp_path / "k")
    assert torch.equal(tg.compute(k + c / 4, X, store=tmp_path / "k").dense(), made.dense())
    with pytest.raises(tg.StoreMismatch, match="factor"):
        tg.compute(k + c / 5, X, store=tmp_path / "k")


@pytest.mark.parametrize(
    ("attempt", "message"),
    [
        (lambda k: k * k, r"two kernels cannot be multiplied; needed: a number ≥ 0 .*pair\(\)"),
        (lambda k: k + 3, r"a kernel and 3 cannot be added; needed: two kernels on the same inputs"),
        (lambda k: 3 + k, r"a kernel and 3 cannot be added"),
        (lambda k: 0.0 + k, r"a kernel and 0.0 cannot be added"),
        (lambda k: k + False, r"a kernel and False cannot be added"),
        (lambda k: k + torch.eye(6), r"a kernel and a Tensor cannot be added"),
        (lambda k: torch.eye(6) + k, r"a kernel and a Tensor cannot be added"),
        (lambda k: np.eye(6) + k, r"a kernel and a ndarray cannot be added"),
        (lambda k: k * -1, r"factor=-1; a kernel can be scaled by a finite number ≥ 0 only"),
        (lambda k: k * float("nan"), r"factor=nan"),
        (lambda k: 10**400 * k, r"factor=a whole number of more than 64 bits; a kernel can be scaled by a finite"),
        (lambda k: k / 10**5000, r"cannot be divided by a whole number of more than 64 bits"),
        (lambda k: k * torch.ones(2), r"factor=a Tensor"),
        (lambda k: "2" * k, r"factor='2'"),
        (lambda k: k / 0, r"a kernel cannot be divided by 0; needed: a finite number above 0"),
        (lambda k: k / k, r"a kernel cannot be divided by an Empirical"),
        (lambda k: sum([k, 3]), r"a kernel and 3 cannot be added"),
    ],
)
def test_what_is_no_kernel_is_refused(attempt: Callable[..., object], message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        attempt(tg.trace_ntk(MODEL))
    with pytest.raises(TypeError):
        operator.sub(tg.trace_ntk(MODEL), 1)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.every(2)
def test_summands_that_compute_in_different_types_each_get_their_own(order: int) -> None:
    """float32, float64 and an infinite kernel, which computes in float64: each part is what it is alone."""
    parts = [tg.trace_ntk(MODEL), tg.trace_ntk(MODEL, dtype="float64"), tg.infinite_ntk(MODEL)][::order]
    wide = X.double() + 1e-9
    for x in (X, wide, wide.numpy()):
        expected = sum(k(x).double() for k in parts)
        torch.testing.assert_close(sum(parts)(x), expected, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sum(parts).diag(x), expected.diagonal(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(tg.compute(sum(parts), x, tile=2).dense(), expected, rtol=1e-5, atol=1e-5)
    tg.testing.check_kernel(sum(parts), X, tolerance=1e-5)


def test_kernels_without_features_say_so() -> None:
    for k in (tg.cosine(tg.trace_ntk(MODEL)), 2 * tg.trace_ntk(MODEL), tg.infinite_ntk(MODEL), Quadratic()):
        with pytest.raises(tg.InputError, match=rf"{type(k).__name__} has no explicit features.*tg\.projected"):
            k.features(X)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.every(3)
def test_the_cosine_of_every_kernel(kind: str) -> None:
    k = KINDS[kind]
    other = tg.full_ntk(MODEL) if kind == "full" else Quadratic()
    for made in (k, 2 * k, k + other, (k + other) / 3 + k, tg.cosine(k), 2 * tg.cosine(k) + other):
        cosine, whole = tg.cosine(made), made(X).double()
        flat = whole.reshape(-1, whole.shape[: whole.dim() // 2].numel())
        norms = flat.diagonal().sqrt()
        want = (flat / (norms[:, None] * norms)).view(whole.shape)
        got = cosine(X)
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
        half = want.narrow(want.dim() // 2, 0, 2)
        torch.testing.assert_close(cosine(X, X[:2]).double(), half, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(tg.compute(cosine, X, tile=4).dense().double(), want, rtol=1e-5, atol=1e-5)
        same = got.reshape(flat.shape).diagonal()
        assert torch.equal(same, torch.ones_like(same))
    torch.testing.assert_close(tg.cosine(2 * k)(X), tg.cosine(k)(X))
    with pytest.raises(tg.InputError, match=r"k\(x, x\) = 0 for sample 0 of this batch"):
        tg.cosine(0 * k)(X)


@pytest.mark.parametrize("kind", KINDS)
def test_diagonals_of_prepared_batches(kind: str) -> None:
    k = KINDS[kind]
    for made in (2 * k, k + k, tg.cosine(k)):
        prepared = made.prepare(made.ready(X))
        torch.testing.assert_close(made.prepared_diag(prepared), made.diag(X), rtol=1e-5, atol=1e-6)


def test_costs_of_combinations() -> None:
    k, c = tg.trace_ntk(MODEL), tg.conjugate_kernel(MODEL)
    both = (k + c).costs(X, X[:4])
    assert both.flops == k.costs(X, X[:4]).flops + c.costs(X, X[:4]).flops
    assert (both.n, both.m) == (6, 4)
    assert [row.parameter for row in both.rows][:2] == ["0.0.weight", "0.0.bias"]
    assert both.rows[-1].parameter.startswith("1.")
    assert "1.input of 2" in both.table()
    for same in (2 * k, tg.cosine(k), tg.cosine(k / 3)):
        assert same.costs(X).table() == k.costs(X).table()
    for other in (Quadratic(), tg.projected(k, dim=16), k + Quadratic()):
        with pytest.raises(tg.InputError, match=r"what an? \w+ costs is not known by parameter.*trace_ntk\(model\)"):
            other.costs(X)


@pytest.mark.slow
def test_check_kernel_goes_by_the_coarsest_part() -> None:
    narrow, wide = tg.trace_ntk(MODEL), tg.infinite_ntk(MODEL)
    for k in (wide + narrow, tg.cosine(2 * (narrow + wide)), tg.cosine(tg.trace_ntk(MODEL) + Quadratic())):
        tg.testing.check_kernel(k, X)

    class Off(Quadratic):
        """Right to seven digits only, in float64."""

        def pair(self, a, b, workspace=None):
            return super().pair(a.double(), b.double()) * (1 + 1e-7 * len(a))

    tg.testing.check_kernel(Off() + narrow, X)
    with pytest.raises(AssertionError, match="differ by"):
        tg.testing.check_kernel(Off() + wide, X)


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (2 * tg.trace_ntk(MODEL), r"it was given a ScaleKernel. Project first: 2 \* tg.projected\(k\)"),
        (tg.trace_ntk(MODEL) + Quadratic(), r"a SumKernel. Project first: tg.projected\(k1\) \+ tg.projected\(k2\)"),
        (tg.cosine(tg.trace_ntk(MODEL)), r"a CosineKernel. Project first: tg.cosine\(tg.projected\(k\)\)"),
        (tg.infinite_ntk(MODEL), r"a Infinite. Give one of these: tg.projected\(tg.trace_ntk\(model\)\)"),
    ],
)
def test_combinations_are_projected_part_by_part(kernel: tg.Kernel, message: str) -> None:
    with pytest.raises(tg.InputError, match=message):
        tg.projected(kernel)


@pytest.mark.parametrize(
    ("tile", "message"),
    [
        (lambda k: k[:1], r"pair\(\) returned \(1, 4\) for 4 and 4 samples; needed: a tensor \[n, m\]"),
        (lambda k: k.sum(0), r"pair\(\) returned \(1,\) for 1 and 1 samples"),
        (lambda k: k.numpy(), r"pair\(\) returned a ndarray; needed: a tensor \[n, m\]"),
        (lambda k: None, r"pair\(\) returned a NoneType; needed"),
    ],
)
def test_tiles_of_a_users_kernel_have_their_shape(tile: Callable[[torch.Tensor], object], message: str) -> None:
    class Wrong(Quadratic):
        def pair(self, a, b, workspace=None):
            return tile(super().pair(a, b))

    with pytest.raises(tg.InputError, match=message):
        tg.compute(Wrong(), X, tile=4)
    if not isinstance(tile(X), torch.Tensor):
        with pytest.raises(tg.InputError, match=message):
            Wrong()(X)
