"""Shapes in annotations are checked at run time under pytest; one thread: two workers share two cores."""

import gc
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before any of them is loaded, and for all processes that tests start: threads wait for work of microseconds in a loop.
# benchmarks/robustness/processors.py asks for other numbers: sums cut among threads have other last digits.
os.environ.setdefault("TANGENCY_TEST_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", os.environ["TANGENCY_TEST_THREADS"])
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ["TANGENCY_TEST_THREADS"])
os.environ.setdefault("MKL_NUM_THREADS", os.environ["TANGENCY_TEST_THREADS"])

import pytest
import shape_checks
import torch
from hypothesis import settings

assert "tangency" not in sys.modules, "tangency was imported before its shapes could be checked"
# Shapes are checked in all modules; under `make test-all`, inside the engine and the models, every other annotation too
# (mypy knows most of it). At the doors (kernels, network, …) our own messages about wrong types are what is tested.
INSIDE = [
    "agreement",
    "apart",
    "blocks",
    "capture",
    "contraction",
    "expansion",
    "fallback",
    "features",
    "fused",
    "halving",
    "hidden",
    "layout",
    "probe",
    "readers",
    "recorder",
    "rules",
    "verify",
    "weights",
]
INSIDE = [f"engine.{name}" for name in INSIDE] + ["gram.gram", "models"]
wholly = [f"tangency.{room}" for room in INSIDE] if os.environ.get("TANGENCY_CHECK_TYPES") else []
shape_checks.install(wholly)
import tangency as tg  # noqa: E402

torch.set_num_threads(int(os.environ["TANGENCY_TEST_THREADS"]))
pytest_plugins = ["spent"]
many = 30 if os.environ.get("TANGENCY_CHECK_TYPES") else 15  # examples under `make test-all`, and under `make test`
settings.register_profile("tangency", deadline=None, max_examples=many, derandomize=True)
settings.load_profile("tangency")


def pytest_configure(config: pytest.Config) -> None:
    # Not in pyproject.toml: naming the class there would import tangency before the hook above.
    config.addinivalue_line("filterwarnings", "error::tangency.errors.TangencyWarning")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test's cases that are not slow by themselves each k-th runs under `make test`, as its mark `every` says."""
    met: Counter[str] = Counter()
    for item in items:
        mark = item.get_closest_marker("every")
        if mark is not None and item.get_closest_marker("slow") is None:
            k, first = (*mark.args, 0)[:2]
            name = item.nodeid.partition("[")[0]
            if met[name] % k != first:
                item.add_marker(pytest.mark.slow)
            met[name] += 1


def pytest_collection_finish() -> None:
    """What is there by now stays: Python need not look through a million objects for garbage again and again."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def job_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Write a module for the command line into a folder that is then the current one; its name is new every time."""

    def write(text: str) -> str:
        name = f"job_{abs(hash(str(tmp_path))) % 10**8}"
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        monkeypatch.chdir(tmp_path)
        return name

    return write


@pytest.fixture(scope="module")
def few_shuffles() -> Iterator[None]:
    """What chance gives, of two orders of the labels: nine took more than half of the time of `explain`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tangency.decisions.chance.SHUFFLES", 2)
        yield


@pytest.fixture(scope="session")
def workers() -> Iterator[tg.Workers]:
    """Two processes, for all tests that do no harm to them."""
    with tg.Workers(2) as found:
        yield found


@pytest.fixture(autouse=True)
def _seed() -> None:
    # Not torch.manual_seed where there is no GPU: it writes down for three kinds of them where it was called.
    torch.manual_seed(0) if torch.cuda.is_available() else torch.default_generator.manual_seed(0)
