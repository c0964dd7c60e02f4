"""Rejection rates: those of the tests called one by one, levels that are kept, power that grows."""

import pytest
import torch
from torch import Tensor

import tangency as tg
from tangency.distributions.power import Test

D = tg.distributions


def pair(m: int = 80, n: int = 90, shift: float = 0.8, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(m, 2, generator=g), torch.randn(n, 2, generator=g) + shift


def test_kernels_grams_and_functions_get_the_same_samples() -> None:
    x, y = pair()
    kernel = tg.gaussian(bandwidth=1.0)
    tests: dict[str, Test] = {
        "kernel": kernel,
        "Gram": kernel(torch.cat([x, y])),
        "function": lambda a, b, seed: D.mmd(kernel, a, b, draws=49, seed=seed, progress=False),
    }
    found = D.power(tests, x, y, sizes=[5, 20], repeats=6, draws=49, progress=False)
    assert torch.equal(found.p["kernel"], found.p["Gram"])
    assert torch.equal(found.p["kernel"], found.p["function"])
    assert found.p["Gram"].shape == (2, 6)
    assert not found.same
    again = D.power(tests, x, y, sizes=[5, 20], repeats=6, draws=49, progress=False, seed=1)
    assert not torch.equal(found.p["Gram"], again.p["Gram"])


def test_power_grows_and_the_level_is_kept() -> None:
    x, y = pair()
    tests: dict[str, Test] = {
        "Gaussian": tg.gaussian(x),
        "features": lambda a, b, seed: D.mmd_features(a, b, draws=39, seed=seed),
    }
    found = D.power(tests, x, y, sizes=[5, 40], repeats=20, draws=39, progress=False)
    assert all(found.rates(name)[0][0] < found.rates(name)[1][0] for name in tests)
    assert found.rates("Gaussian")[1][0] > 0.8
    assert "rejects most often" in found.sentence()
    null = D.level(tests, torch.cat([x, x + 0.01]), sizes=[10, 20], repeats=60, draws=39, progress=False)
    assert null.same
    assert null.holds(0.0, 0.14)
    assert not null.holds(0.2, 0.3)
    assert "Of samples without a difference" in null.sentence()
    assert "One source" in str(null.plot().axes[0].get_title())


def test_table_plot_and_dict() -> None:
    x, y = pair(30, 30)
    found = D.power({"Gaussian": tg.gaussian(x)}, x, y, sizes=[5, 10], repeats=4, draws=19, progress=False)
    assert "n = 10" in found.table()
    assert len(found.plot().axes) == 1
    assert found.to_dict()["level"] == 0.05
    rate, low, high = found.rates("Gaussian")[0]
    assert low <= rate <= high
    assert f"{100 * rate:.1f} [{100 * low:.1f}, {100 * high:.1f}]" in found.table()


class Bad:
    """Neither rejected nor not."""

    p = float("nan")


def test_what_is_refused() -> None:
    x, y = pair()
    k = tg.gaussian(x)
    for call, message in [
        (lambda: D.power({}, x, y, sizes=[5]), "needed: tests by name"),
        (lambda: D.power(k, x, y, sizes=[5]), "tests is a Gaussian; needed: tests by name"),  # type: ignore[arg-type]
        (lambda: D.power({"a": "NTK"}, x, y, sizes=[5]), r"tests\['a'\] is a str"),  # type: ignore[dict-item]
        (lambda: D.power({"a": lambda *_: 3}, x, y, sizes=[5]), "a test returned a int; needed: a result with a p"),  # type: ignore[dict-item]
        (lambda: D.power({"a": lambda *_: Bad()}, x, y, sizes=[5]), "a test returned p=nan; needed: a p-value"),
        (lambda: D.power({"a": k}, x, y, sizes=[]), "sizes is empty"),
        (lambda: D.power({"a": k}, x, y, sizes=[81]), "sizes holds 81; needed: from 2 to 80"),
        (lambda: D.level({"a": k}, x, sizes=[41]), "sizes holds 41; needed: from 2 to 40"),
        (lambda: D.power({"a": k}, x, y, sizes=[5], repeats=0), "repeats=0"),
        (lambda: D.power({"a": k}, x, y, sizes=[5], draws=0), "draws=0"),
        (lambda: D.power({"a": k}, x, y, sizes=[5], level=5), "level=5; needed: a probability"),
        (lambda: D.power({"a": k(x)}, x, y, sizes=[5]), r"the Gram of 'a' has shape \(80, 80\); needed: one row"),
    ]:
        with pytest.raises(tg.InputError, match=message):
            call()
