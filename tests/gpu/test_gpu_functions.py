"""Every function that computes: on the device the CPU's answer, wherever data lie, with a store and with a budget.

The cases are those of `benchmarks/speed/functions.py`, which measures them, on few samples. In `make test` each
runs once on the CPU: that says nothing of a GPU, but the cases stay right.
"""

from functools import cache
from pathlib import Path

import pytest
from on_device import DEVICE, QUIET, Errors

from benchmarks.speed.functions import CASES, Case, Found, World, difference, moved, world

pytestmark = [
    *(pytest.mark.filterwarnings(q) for q in QUIET), pytest.mark.filterwarnings("ignore::tangency.TangencyWarning"),
]  # fmt: skip
by_name = pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)


@cache
def small() -> World:
    return world(120, 60)


@cache
def tiny() -> World:
    return world(60, 30)


@cache
def on_the_cpu(case: Case) -> Found:
    return case.run(moved(small(), "cpu", "cpu"))


@by_name
@pytest.mark.every(5)
def test_a_case_runs(case: Case) -> None:
    found = case.run(moved(tiny(), "cpu", "cpu"))
    assert found
    assert all(bool(v.isfinite().any()) for v in found.values())


@by_name
@pytest.mark.gpu
def test_model_and_data_on_the_device(case: Case, errors: Errors) -> None:
    found = case.run(moved(small(), DEVICE, DEVICE))
    errors.below(f"function {case.name}", difference(found, on_the_cpu(case)), case.bound)


@by_name
@pytest.mark.gpu
def test_the_model_there_and_the_data_on_the_cpu(case: Case, errors: Errors) -> None:
    found = case.run(moved(small(), DEVICE, "cpu"))
    errors.below(f"function {case.name}, data on the CPU", difference(found, on_the_cpu(case)), case.bound)


@pytest.mark.parametrize("data", ["cpu", DEVICE], ids=["cpu", "device"])
@pytest.mark.parametrize("case", [c for c in CASES if c.takes], ids=lambda c: c.name)
@pytest.mark.gpu
def test_with_a_store_and_a_budget(case: Case, data: str, tmp_path: Path, errors: Errors) -> None:
    if "store" in case.takes:
        pytest.importorskip("zarr", reason="zarr is missing here")
    options = {k: v for k, v in {"store": tmp_path, "memory": "64MB"}.items() if k in case.takes}
    found = case.run(moved(small(), DEVICE, data, **options))
    errors.below(f"function {case.name}, {' and '.join(options)}", difference(found, on_the_cpu(case)), case.bound)
