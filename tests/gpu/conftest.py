"""Tests of the CUDA paths. They need a GPU, or TANGENCY_GPU_ON_CPU=1, with which they run on the CPU in its place.

Tests without the mark `gpu` belong to the GPU's suite too where it runs; elsewhere `make test` runs them on the CPU, so
that they stay right.

TANGENCY_GPU_LOG names a file to which every outcome and every measured error goes as a line of JSON;
`benchmarks/robustness/gpu_tests.py` makes its table of it.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from on_device import CUDA, WANTED, Errors, flags, note


@pytest.fixture
def errors(request: pytest.FixtureRequest) -> Errors:
    return Errors(request.node.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where the GPU's suite can run, all of this folder is in it."""
    for item in items:
        if Path(__file__).parent in item.path.parents and (CUDA or not WANTED):
            item.add_marker("gpu")


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Skips without a GPU; afterwards torch's own switches must be as they were."""
    if WANTED and not CUDA and request.node.get_closest_marker("gpu"):
        pytest.skip("torch.cuda.is_available() is False; TANGENCY_GPU_ON_CPU=1 runs this test on the CPU instead")
    before = flags()
    yield
    assert flags() == before, "torch's switches (tf32, cuDNN, gradients) were left changed"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when != "call" and report.outcome == "passed":
        return
    outcome = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"  # type: ignore[assignment]
    reason = "" if outcome == "passed" else str(report.longrepr)[-1500:]
    note(kind="outcome", test=report.nodeid, outcome=outcome, seconds=report.duration, reason=reason)
