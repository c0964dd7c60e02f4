"""Which kind of spectrum: error rates over draws of ensembles whose kind is known.

The rates on docs/tasks/learned.md were measured with `wrong` over `ensembles`, by more draws than `test_error_rates`
(slow) has; the constants of `classify` were chosen on the first 30 seeds of these. A few draws of each run always.
"""

import math
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import tangency as tg

S = tg.spectra
F64 = torch.float64
Draw = Callable[[torch.Generator], tuple[Tensor, Tensor]]


def gaussian(rows: int, columns: int, g: torch.Generator) -> Tensor:
    return torch.randn(rows, columns, generator=g, dtype=F64)


def student(rows: int, columns: int, degrees: int, g: torch.Generator) -> Tensor:
    chi = torch.randn(degrees, rows, columns, generator=g, dtype=F64).square().mean(0)
    return gaussian(rows, columns, g) / chi.sqrt()


def pareto(rows: int, columns: int, exponent: float, g: torch.Generator) -> Tensor:
    size = (1 - torch.rand(rows, columns, generator=g, dtype=F64)) ** (-1 / exponent)
    return size * (2 * torch.randint(0, 2, (rows, columns), generator=g) - 1)


def values(w: Tensor) -> Tensor:
    return torch.linalg.svdvals(w).square() / max(w.shape)


def spiked(rows: int, columns: int, count: int, strength: float, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Spikes of `strength` to 1.5 times that, in units of where Baik, Ben Arous & Péché have them leave the bulk."""
    w = gaussian(rows, columns, g)
    u, v = (torch.linalg.qr(gaussian(size, count, g)).Q for size in (rows, columns))
    sizes = strength * (columns / rows) ** 0.25 * math.sqrt(rows) * torch.linspace(1, 1.5, count, dtype=F64)
    return values(w + u @ torch.diag(sizes) @ v.T), values(w)


def beside_gaussian(w: Tensor, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """Heavy-tailed entries after training, Gaussian ones before, with the same median."""
    after, before = values(w), values(gaussian(*w.shape, g))
    return after * before.median() / after.median(), before


def ensembles(n: int, m: int) -> dict[str, tuple[str, Draw]]:
    """Name → (kind, draw)."""
    return {
        "two draws": ("invariant", lambda g: (values(gaussian(n, m, g)), values(gaussian(n, m, g)))),
        "1 spike": ("bulk + spikes", lambda g: spiked(n, m, 1, 2.0, g)),
        "3 spikes": ("bulk + spikes", lambda g: spiked(n, m, 3, 2.5, g)),
        "10 spikes": ("bulk + spikes", lambda g: spiked(n, m, 10, 3.0, g)),
        "Student, 1": ("heavy tail", lambda g: beside_gaussian(student(n, m, 1, g), g)),
        "Student, 2": ("heavy tail", lambda g: beside_gaussian(student(n, m, 2, g), g)),
        "Pareto, 2": ("heavy tail", lambda g: beside_gaussian(pareto(n, m, 2, g), g)),
        "smaller": ("changed bulk", lambda g: (0.7 * values(gaussian(n, m, g)), values(gaussian(n, m, g)))),
    }


def wrong(kind: str, draw: Draw, draws: int) -> float:
    found = Counter(S.classify(*draw(torch.Generator().manual_seed(seed)), draws=0).kind for seed in range(draws))
    return 1 - found[kind] / draws


@pytest.mark.parametrize("name", ensembles(300, 200))
@pytest.mark.every(2)
def test_kinds_of_known_ensembles(name: str) -> None:
    kind, draw = ensembles(300, 200)[name]
    assert wrong(kind, draw, 6) <= 1 / 6


@pytest.mark.parametrize(("n", "m"), [(100, 60), (60, 60), (128, 64)])
def test_two_draws_of_small_matrices_did_not_grow(n: int, m: int) -> None:
    """A few values differ by 5 to 10 % from draw to draw; that is no growth of all of them."""
    kind, draw = ensembles(n, m)["two draws"]
    assert wrong(kind, draw, 40) <= 0.1  # by their medians: 0.17 to 0.4


@pytest.mark.slow
@pytest.mark.parametrize(("n", "m"), [(300, 200), (600, 400), (400, 400)])
def test_error_rates(n: int, m: int) -> None:
    """Few wrong of each kind; the page has the rates of more draws."""
    rates = {name: wrong(kind, draw, 40) for name, (kind, draw) in ensembles(n, m).items()}
    assert max(rates.values()) <= 0.08, rates


def test_kernels_of_random_networks_are_invariant_and_those_of_trained_ones_are_not() -> None:
    """Gaussian inputs and the initial NTK of two draws of a wide network; then a rank-one part along the targets."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(150, 60, generator=g, dtype=F64) / 60**0.5
    torch.manual_seed(0)
    grams = [tg.compute(tg.trace_ntk(tg.models.mlp([60, 400, 1]).double()), x) for _ in range(2)]
    assert S.classify(grams[0], grams[1]).kind == "invariant"
    y = x[:, 0].sign()
    taught = grams[0].dense() + torch.outer(y, y) * float(grams[0].diag().mean())
    found = S.classify(taught, grams[1])
    assert found.kind == "bulk + spikes"
    assert found.before >= 0
    assert float(found.spikes[0]) == pytest.approx(float(torch.linalg.eigvalsh(taught)[-1]), rel=0.5)


def test_a_result_says_why() -> None:
    g = torch.Generator().manual_seed(0)
    after, before = spiked(120, 60, 2, 3.0, g)
    found = S.classify(after, before)
    assert found.kind == "bulk + spikes"
    assert "2 values above the end of the initial bulk" in found.sentence
    assert "the bulks agree" in found.sentence
    assert found.comparison.invariant
    assert found.tail is None
    assert "bulk + spikes" in found.table()
    assert found.plot().axes[0].get_title() == "bulk + spikes"
    heavy = S.classify(*beside_gaussian(student(200, 100, 1, g), g), draws=20)
    assert heavy.kind == "heavy tail"
    assert heavy.tail is not None
    assert f"α = {heavy.tail.alpha:.2f}" in heavy.sentence
    same = S.classify(before, before)
    assert same.sentence.startswith("Invariant: no value is new")
    assert S.classify(0.5 * before, before).sentence.startswith("Changed bulk")
    law = S.marchenko_pastur(120, 60).edge()
    assert S.classify(after, before, edge=law).edge is law
    assert tg.spectra.classify(after, before).to_dict()["kind"] == "bulk + spikes"


def test_spikes_that_were_there_before_do_not_count() -> None:
    after, before = spiked(200, 100, 1, 4.0, torch.Generator().manual_seed(0))
    found = S.classify(after, after)
    assert (found.kind, found.before, len(found.spikes)) == ("invariant", 1, 0)
    more = torch.cat([after, torch.tensor([2 * float(after[0])], dtype=F64)])
    assert S.classify(more, after).kind == "bulk + spikes"
    grown = after.clone()
    grown[0] *= 3
    assert len(S.classify(grown, after).spikes) == 1
    gone = S.classify(before, after)
    assert gone.kind == "changed bulk"  # the bulk is as it was, the spectrum is not
    assert gone.comparison.invariant


@pytest.mark.parametrize("power", [-30, -8, 8, 30])
def test_kinds_do_not_depend_on_the_scale(power: int) -> None:
    g = torch.Generator().manual_seed(0)
    for after, before in (spiked(120, 60, 1, 3.0, g), beside_gaussian(student(200, 100, 1, g), g)):
        one, other = S.classify(after, before, draws=0), S.classify(after * 10.0**power, before * 10.0**power, draws=0)
        assert one.kind == other.kind
        assert len(one.spikes) == len(other.spikes)


def test_odd_spectra_have_a_kind() -> None:
    """Repeated, zero and too few values: an answer or an error of ours, never a crash."""
    flat, zero = torch.ones(30), torch.zeros(30)
    assert S.classify(flat, flat).kind == "invariant"
    assert S.classify(zero, zero).kind == "invariant"
    assert S.classify(torch.cat([flat, torch.tensor([5.0])]), flat).kind == "bulk + spikes"
    half = torch.cat([torch.zeros(30), torch.linspace(1, 2, 30)])  # a matrix of half its rank
    assert S.classify(half, half).kind == "invariant"
    assert S.classify(flat, zero).kind in ("bulk + spikes", "heavy tail")
    with pytest.raises(tg.InputError, match="values has 3 eigenvalues; needed: at least 20"):
        S.classify([1.0, 2.0, 3.0], flat)
    with pytest.raises(tg.InputError, match="edge is a float; needed: an Edge"):
        S.classify(flat, flat, edge=1.0)  # type: ignore[arg-type]
