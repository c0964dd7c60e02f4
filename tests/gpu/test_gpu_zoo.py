"""Every architecture of the zoo on the GPU against the CPU in float64, in all precisions; nothing of it is touched."""

from functools import cache
from typing import Any

import pytest
import torch
from on_device import CASES, DEVICE, QUIET, Errors, cosine_error, error, there
from torch import Tensor
from zoo import build

import tangency as tg
from tangency.testing import ModelState

pytestmark = [pytest.mark.gpu, *(pytest.mark.filterwarnings(q) for q in QUIET)]
# torch's CUDA kernels of depthwise convolutions and of weight_norm are not accurate to float64 (docs/limitations.md).
LOOSE = {"mobilenet", "depthwise_multiplier", "weight_normed"}
NARROW = {"float32": 1e-4, "float16": 2e-3, "tf32": 2e-2}
N = 4


def on_device(name: str) -> tuple[torch.nn.Module, Any]:
    model, x = build(CASES[name], N)
    return model.to(DEVICE), there(x)


@cache
def wanted(name: str) -> Tensor:
    """The trace kernel on the CPU."""
    model, x = build(CASES[name], N)
    return tg.trace_ntk(model)(x)


@pytest.mark.parametrize("name", CASES)
def test_float64_is_that_of_the_cpu(name: str, errors: Errors) -> None:
    bound = 1e-7 if name in LOOSE else 1e-8
    group = "zoo float64 (depthwise, weight_norm)" if name in LOOSE else "zoo float64"
    (near, x), (far, y) = build(CASES[name], N), on_device(name)
    before = ModelState.of(far)
    want = tg.full_ntk(near)(x)
    full, trace = tg.full_ntk(far), tg.trace_ntk(far)
    got = full(y)
    assert got.device.type == DEVICE.type
    errors.below(group, error(got, want), bound, "full")
    errors.below(group, error(trace(y), wanted(name)), bound, "trace")
    errors.below(group, error(tg.pseudo_ntk(far)(y), tg.pseudo_ntk(near)(x)), bound, "pseudo")
    errors.below(group, error(full.diag(y), torch.einsum("ncnc->nc", want)), bound, "diag of full")
    errors.below(group, error(trace.diag(y), wanted(name).diagonal()), bound, "diag of trace")
    right = tg._base.tree.take(y, slice(1, 3))
    errors.below(group, error(trace(y, right), wanted(name)[:, 1:3]), bound, "two sides")
    before.check(far)


@pytest.mark.parametrize("name", CASES)
def test_parts_are_those_of_the_cpu(name: str, errors: Errors) -> None:
    """Relative to the whole: a part may be zero."""
    bound = 1e-7 if name in LOOSE else 1e-8
    (near, x), (far, y) = build(CASES[name], N), on_device(name)
    want, got = tg.trace_ntk(near).parts(x), tg.trace_ntk(far).parts(y)
    assert list(got) == list(want)
    scale = float(wanted(name).norm())
    for key, part in want.items():
        errors.below("zoo parts", float((got[key].cpu() - part).norm()) / scale, bound, key)


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("name", CASES)
def test_narrow_precisions_are_close(name: str, dtype: str, errors: Errors) -> None:
    model, x = on_device(name)
    before = ModelState.of(model)
    kernel = tg.trace_ntk(model, dtype=dtype)
    got = kernel(x)
    assert got.dtype == torch.float32
    errors.below(f"zoo {dtype}", cosine_error(got, wanted(name)), NARROW[dtype], "k(x)")
    diagonal = float((kernel.diag(x).double().cpu() / wanted(name).diagonal() - 1).abs().max())
    errors.below(f"zoo {dtype} diag", diagonal, NARROW[dtype])
    before.check(model)
