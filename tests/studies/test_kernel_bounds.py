"""Bounds between kernel machines: on exact projections, on drawn ones, and where what is printed is false."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import tangency as tg
from tangency.errors import InputError
from tangency.studies import (
    Bound,
    Bounds,
    ClassificationFit,
    Grid,
    Grids,
    RegressionFit,
    classification_bounds,
    regression_bounds,
)
from tangency.studies.kernel_bounds import Corners, monotone

LINE, SQUARE = Grids(Grid((12,)), (3,)), Grids(Grid((5, 5)), (2, 2))
VALUES, FLAT = torch.zeros(37, dtype=torch.float64), torch.zeros(121, dtype=torch.float64)


def fitted(grids: Grids, features: Tensor, f: Tensor) -> RegressionFit:
    """The weighted least squares of f on features [m, p], by NumPy."""
    root = grids.train.weights().sqrt()
    a, b = grids.coarse(features) * root[:, None], grids.coarse(f) * root
    gamma = torch.from_numpy(np.linalg.lstsq(a.numpy(), b.numpy(), rcond=None)[0])
    return RegressionFit(features @ gamma, float(gamma.norm()))


def test_grids_lie_within_each_other() -> None:
    grids = Grids(Grid((3, 2), 0.0, 6.0), (2, 5))
    assert (len(grids.train), len(grids.test), grids.test.cells) == (12, 77, (6, 10))
    assert torch.equal(grids.coarse(grids.test.nodes()), grids.train.nodes())
    values = torch.rand(12, dtype=torch.float64)
    by_numpy = np.trapezoid(np.trapezoid(values.reshape(4, 3).numpy(), dx=3.0, axis=1), dx=2.0, axis=0)
    assert float(grids.train.weights() @ values) == pytest.approx(by_numpy)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Grid((0,)), r"cells=\(0,\); needed: a tuple of whole numbers from 1, one per axis"),
        (lambda: Grid([5]), r"cells=\[5\]; needed"),  # type: ignore[arg-type]
        (lambda: Grid((5,), 1.0, 1.0), "low=1.0, high=1.0; needed: finite numbers, low below high"),
        (lambda: Grid((5,), 0.0, float("inf")), "low=0.0, high=inf; needed"),
        (
            lambda: Grids(Grid((5,)), (1,)),
            r"ratio=\(1,\); needed: a tuple of whole numbers above 1, one for each of the 1",
        ),
        (lambda: Grids(Grid((5, 5)), (2,)), "one for each of the 2 axes"),
        (
            lambda: regression_bounds(SQUARE, VALUES, RegressionFit(VALUES), RegressionFit(VALUES)),
            "2 axes; needed: one",
        ),  # type: ignore[arg-type]
        (
            lambda: classification_bounds(LINE, VALUES, ClassificationFit(VALUES), ClassificationFit(VALUES)),
            "1 axes; needed: two",
        ),  # type: ignore[arg-type]
        (
            lambda: regression_bounds(LINE, VALUES, RegressionFit(VALUES[:1]), RegressionFit(VALUES)),
            r"CK values is torch.float64 of shape \(1,\); needed: a real number for each node of the test grid, \[37\]",
        ),
        (lambda: regression_bounds(LINE, VALUES / 0, RegressionFit(VALUES), RegressionFit(VALUES)), r"f\[0\] is nan"),
        (lambda: regression_bounds(LINE, VALUES, VALUES, VALUES), "ck and ntk are fits"),  # type: ignore[arg-type]
        (
            lambda: classification_bounds(
                SQUARE, torch.full((121,), 2), ClassificationFit(FLAT), ClassificationFit(FLAT)
            ),
            "labels has others than 0 and 1",
        ),
        (lambda: Grids((5,), (2,)), "train is a tuple; needed: a Grid"),  # type: ignore[arg-type]
        (lambda: Bounds((Bound("(38)", 1.0, 2.0, True),))["(39)"], r"no bound '\(39\)'; there are \(38\)"),
    ],
)
def test_what_is_refused(make: object, says: str) -> None:
    with pytest.raises(InputError, match=says):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("name", ["f1", "f2", "f3"])
def test_exact_projections_keep_every_bound(name: str) -> None:
    grids = Grids(Grid((40,)), (3,))
    x = grids.test.nodes()[:, 0]
    f = tg.studies.FUNCTIONS[name](x[:, None])
    powers = torch.stack([torch.cos(k * torch.arccos(x)) for k in range(9)], 1)
    found = regression_bounds(grids, f, fitted(grids, powers[:, :4], f), fitted(grids, powers, f))
    assert found.violations == 0
    assert found["(38)"].says == "holds"
    assert found["(48)"].says == found["(49)"].says == "holds"
    # Lemma 4.4 says less than that a projection is no longer than f.
    assert found["(49*)"].right < found["(49)"].right


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), n=st.integers(2, 12), tau=st.integers(2, 5), p=st.integers(1, 8))
def test_drawn_projections_keep_every_bound(seed: int, n: int, tau: int, p: int) -> None:
    g = torch.Generator().manual_seed(seed)
    grids = Grids(Grid((n,)), (tau,))
    features = torch.randn(len(grids.test), p, generator=g, dtype=torch.float64)
    f = torch.randn(len(grids.test), generator=g, dtype=torch.float64).cumsum(0)
    ck, ntk = (fitted(grids, part, f) for part in (features[:, : max(1, p // 2)], features))
    found = regression_bounds(grids, f, ck, ntk)
    assert found.violations == 0, found.table()
    # (33), which holds for any function.
    zero, one = (
        float((w * v.square()).sum()) for w, v in ((grids.train.weights(), grids.coarse(f)), (grids.test.weights(), f))
    )
    assert zero <= tau * one * (1 + 1e-12)


def test_theorem_4_1_where_what_it_assumes_is_true() -> None:
    x = LINE.test.nodes()[:, 0]
    one = torch.ones_like(x)
    f = torch.exp(x)
    near = torch.stack([one, f + 0.1 * x], 1)
    found = regression_bounds(LINE, f, fitted(LINE, one[:, None], f), fitted(LINE, near, f))
    assert found["(45) NTK"].says == found["(45) CK"].says == "holds"
    assert monotone(LINE, x)
    assert not monotone(LINE, torch.sin(20 * x))
    noise = torch.randn(len(x), generator=torch.Generator().manual_seed(0), dtype=x.dtype)
    assert monotone(LINE, 1 + 1e-15 * noise)  # flat, up to rounding
    assert not monotone(LINE, 1 + 1e-9 * noise)


def test_what_a_pseudo_inverse_cuts_off_is_allowed_for() -> None:
    # The NTK has lost the direction in which the CK fits f: (38) is false, (38*) knows by how much.
    x = LINE.test.nodes()[:, 0]
    features = torch.stack([torch.ones_like(x), 1e-3 * x], 1)
    f = 2 + 1e-3 * x
    root = LINE.train.weights().sqrt()
    s = torch.linalg.svdvals(LINE.coarse(features) * root[:, None])
    kept = fitted(LINE, features[:, :1], f)
    cut = RegressionFit(kept.values, kept.norm, cut=float(s[1]))
    found = regression_bounds(LINE, f, fitted(LINE, features, f), cut, nested=False)
    assert found["(38)"].says == "fails, not promised"
    assert found["(38*)"].says == "holds"
    assert found.fails == ("(38)", "(45) NTK", "(48)")
    assert found.violations == 0
    wrong = regression_bounds(LINE, f, fitted(LINE, features, f), kept, nested=False)  # the cut not said
    assert wrong.violations == 2
    assert wrong["(38*)"].says == wrong["(48*)"].says == "VIOLATED"
    assert "VIOLATED" in wrong.table()


def test_48_is_false_as_printed_on_long_intervals() -> None:
    # S_CK = span φ₁, S_NTK = span (φ₁, φ₁ + s), s a saw-tooth with zeros on the training nodes: of all fits that are
    # exact there, the shortest is φ₁ + s/2. A part of f outside both makes β < 1.
    grids = Grids(Grid((100,), 0.0, 100.0), (2,))
    x = grids.test.nodes()[:, 0]
    saw = torch.where(torch.arange(len(x)) % 2 == 1, 1.0, 0.0).double()
    first = torch.ones_like(x)
    f = first + 1e-3 * torch.sin(torch.pi * x / 50)
    ck = fitted(grids, first[:, None], f)
    ntk = fitted(grids, torch.stack([first, first + saw], 1), f)
    found = regression_bounds(grids, f, ck, ntk)
    assert found["(48)"].says == "VIOLATED"
    assert found["(48*)"].says == "holds"
    assert found.violations == 1


def logits(features: Tensor, grids: Grids, labels: Tensor) -> ClassificationFit:
    """ψ of the logistic regression with a kernel of features, without a penalty."""
    x = grids.coarse(features)
    fit = tg.regress.logistic(x @ x.T, grids.coarse(labels).long(), reg=0.0)
    return ClassificationFit(fit.logits(features @ x.T), fit.model.norm**2)


def test_65_is_false_as_printed() -> None:
    # One training node that is wrong, with all test nodes around it: 15 of them, not τ₁τ₂ = 6.
    grids = Grids(Grid((11, 7)), (2, 3))
    labels = grids.test.nodes()[:, 0] > 0.05
    signed = torch.full(grids.test.shape, -2.8, dtype=torch.float64)
    signed[10, 12] = 1.0
    filled = torch.zeros_like(signed)
    filled[9:12, 10:15] = 2 * 3.8
    filled[10, 12] = 0.0
    turn = torch.where(labels, -1.0, 1.0).double()
    phi, s = (turn * part.flatten() for part in (signed, filled))
    ck, ntk = logits(phi[:, None], grids, labels), logits(torch.stack([phi, phi + s], 1), grids, labels)
    found = classification_bounds(grids, labels, ck, ntk)
    assert Corners.of(grids, torch.where(labels, -1, 1) * ntk.logits, labels).top
    assert found["(65) NTK"].says == "VIOLATED"
    assert found["(65*) NTK"].says == found["(52*)"].says == found["(65*) CK"].says == "holds"
    assert found.violations == 1


def test_68_is_false_as_printed() -> None:
    # A chessboard of labels on the training nodes, tilted a little: a ramp fits it best. Between them the labels are
    # against the ramp, as the matching property allows.
    grids = Grids(Grid((12, 12)), (3, 3))
    place = grids.train.nodes()[:, 0]
    i, j = (v.flatten() for v in torch.meshgrid(torch.arange(13), torch.arange(13), indexing="ij"))
    known = (i + j) % 2 == 0
    known[[0, 3 * 13 + 5]] = ~known[[0, 3 * 13 + 5]]
    x = grids.test.nodes()[:, 0]
    ones = torch.ones_like(x)
    fit = tg.regress.logistic_features(torch.stack([torch.ones_like(place), place], 1), known.long(), reg=0.0)
    rising = float(fit.model.coefficients[1]) > 0
    labels = ((x < 0) if rising else (x > 0)).reshape(grids.test.shape).clone()
    labels[::3, ::3] = known.reshape(13, 13)
    labels = labels.flatten()
    ck, ntk = logits(ones[:, None], grids, labels), logits(torch.stack([ones, x], 1), grids, labels)
    found = classification_bounds(grids, labels, ck, ntk)
    assert found["(68) NTK"].says == "VIOLATED"
    assert found["(68*) NTK"].says == found["(68*) CK"].says == "holds"
    assert found.violations == 1


def test_corners_of_cells() -> None:
    grids = Grids(Grid((4, 3)), (2, 2))
    z = grids.test.nodes()
    labels = z.sum(1) > 0.1
    found = Corners.of(grids, 3 * z[:, 0], labels)
    h = ((2 / 4) ** 2 + (2 / 3) ** 2) ** 0.5
    assert found.rise == pytest.approx(3 * h)
    assert found.top
    assert found.matching
    hump = torch.zeros(grids.test.shape, dtype=torch.float64)
    hump[1, 1] = 1.0
    assert not Corners.of(grids, hump.flatten(), labels).top
    assert not Corners.of(grids, 1 + 1e-9 * hump.flatten(), labels).top
    assert Corners.of(grids, 1 + 1e-15 * hump.flatten(), labels).top  # a tie, up to rounding
    alone = torch.zeros(grids.test.shape, dtype=torch.bool)
    alone[3, 3] = True
    assert not Corners.of(grids, hump.flatten(), alone.flatten()).matching
