"""What the tests cost in processor time: a plugin that prints the twenty dearest, and the sum beside the budget.

Processor seconds (user and system), of a test and of the processes that it started and waited for: unlike the time on
the clock they hardly depend on what else the machine does. They are printed; nothing fails by them.
"""

import resource
from collections.abc import Generator
from typing import Any

import pytest

BUDGET = 12 * 60  # all of `make test`, lint included, on an ordinary machine: CONTRIBUTING.md
SECONDS = "processor seconds"
before = 0.0


def spent() -> float:
    """By this process and by those of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    global before
    before = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if call.when == "teardown":
        report.user_properties.append((SECONDS, round(spent() - before, 3)))
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    reports = [r for kept in terminalreporter.stats.values() for r in kept if getattr(r, "when", None) == "teardown"]
    costs = [(dict(r.user_properties)[SECONDS], r.nodeid) for r in reports]
    terminalreporter.section(f"the dearest tests, in {SECONDS}")
    for seconds, name in sorted(costs, reverse=True)[:20]:
        terminalreporter.write_line(f"{seconds:7.1f}  {name}")
    terminalreporter.write_line(
        f"{spent():7.1f}  in all; `make test`, with lint, may take {BUDGET} on an ordinary machine"
    )
