"""Every architecture of the zoo against J Jᵀ from plain automatic differentiation, in float64 and float32."""

import warnings
from dataclasses import replace

import pytest
import reference
import torch
from zoo import ZOO, Case, build

import tangency as tg
from tangency.testing import ModelState

CASES = [pytest.param(case, id=case.name) for case in ZOO]
pytestmark = pytest.mark.filterwarnings("ignore::tangency.PerformanceWarning", "ignore:.*batching rule.*:UserWarning")


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    assert got.shape == want.shape
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_jacobian_products(case: Case) -> None:
    model, x = build(case, 4)
    before = ModelState.of(model)
    left, right = tg._base.tree.take(x, slice(0, 3)), tg._base.tree.take(x, slice(2, 4))
    j = reference.jacobians(model, x)
    a, b = {k: v[:3] for k, v in j.items()}, {k: v[2:] for k, v in j.items()}
    full, pseudo = tg.full_ntk(model), tg.pseudo_ntk(model)
    trace = replace(full, trace=True)  # trace_ntk(model), without another probe
    assert error(full(x), reference.full(j, j)) < 1e-10
    assert error(full(left, right), reference.full(a, b)) < 1e-10
    assert error(trace(x), reference.trace(j, j)) < 1e-10
    assert error(trace(left, right), reference.trace(a, b)) < 1e-10
    assert error(pseudo(x), reference.pseudo(j, j)) < 1e-10
    assert error(trace.diag(x), torch.diagonal(reference.trace(j, j))) < 1e-10
    scale = float(reference.full(j, j).norm())
    want, got, traced = reference.parts(j, j), full.parts(x), trace.parts(x)
    assert set(got) == set(traced) == set(want)
    for name, part in want.items():
        assert float((got[name] - part).norm()) < 1e-10 * scale, name
        assert float((traced[name] - torch.einsum("ncmc->nm", part)).norm()) < 1e-10 * scale, name
    assert error(torch.stack(list(traced.values())).sum(0), trace(x)) < 1e-12
    for method in ("expand", "in place"):
        assert error(replace(full, method=method)(x), reference.full(j, j)) < 1e-10, method
        assert error(replace(trace, method=method)(x), reference.trace(j, j)) < 1e-10, method
    before.check(model)  # and nothing of it was touched


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(5)
def test_fewer_bits_are_within_rounding(case: Case) -> None:
    """The float16 mode on a CPU: the same packing, scaling and contraction as on a GPU, with passes in 32 bits."""
    model, x = build(case, 3)
    want, single, half = (tg.trace_ntk(model, dtype=dtype)(x) for dtype in (None, "float32", "float16"))
    assert single.dtype == half.dtype == torch.float32
    assert error(single, want) < 1e-5
    scale = want.diagonal().sqrt()
    assert float(((half - want) / (scale[:, None] * scale)).abs().max()) < 1e-3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(3)
def test_rules_cover_what_they_should(case: Case) -> None:
    model, x = build(case, 3)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        kernel = tg.trace_ntk(model)
        kernel(x)
        kernel(x)
    (plan,) = kernel.feature_map.plans.values()
    assert set(plan.fallback) == set(case.fallback)
    messages = [str(w.message) for w in said if issubclass(w.category, tg.PerformanceWarning)]
    assert len(messages) == bool(case.fallback)  # said once
    assert all(name in messages[0] for name in list(case.fallback)[:1])
