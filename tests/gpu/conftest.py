"""Tests of the CUDA paths. They need a GPU, or TANGENCY_GPU_ON_CPU=1, with which they run on the CPU in its place.

TANGENCY_GPU_LOG names a file to which every outcome and every measured error goes as a line of JSON;
`benchmarks/robustness/gpu_tests.py` makes its table of it.
"""

from collections.abc import Iterator

import pytest
import torch
from on_device import CUDA, Errors, flags, note


@pytest.fixture
def errors(request: pytest.FixtureRequest) -> Errors:
    return Errors(request.node.nodeid)


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    """Skips without a GPU; afterwards torch's own switches must be as they were."""
    if CUDA and not torch.cuda.is_available():
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
