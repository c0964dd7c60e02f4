"""What the rounding of a kernel decides is not taken for an answer: regs so small are passed over, and that is said."""

import pytest
import torch
from torch import Tensor

import tangency as tg
from tangency.auditing import audit_gram
from tangency.auditing.choice import TARGET_FACTORS, UNSURE, choose
from tangency.auditing.machine import GramMachine
from tangency.linalg import spectrum
from tangency.linalg.matrix import square

F64 = torch.float64


def smooth(n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A kernel whose eigenvalues fall quickly, and targets that it explains but for a little noise."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 2, generator=g, dtype=F64)
    K = torch.exp(-2 * torch.cdist(x, x).square())
    return (K + K.T) / 2, torch.sin(4 * x).sum(1) + 1e-4 * torch.randn(n, generator=g, dtype=F64)


def rounded_anew(K: Tensor, seed: int) -> Tensor:
    """K in float32 as another machine may have it: each entry off by up to its last digit."""
    noise = torch.rand(K.shape, generator=torch.Generator().manual_seed(seed), dtype=F64) - 0.5
    return (K * (1 + torch.finfo(torch.float32).eps * (noise.triu() + noise.triu(1).T))).float()


@pytest.mark.parametrize("factor", TARGET_FACTORS)
def test_the_bound_is_above_the_estimate_and_near_it(factor: float) -> None:
    """Against `Risks.uncertainty`, which takes all of the inverse."""
    K, y = smooth(80)
    machine = GramMachine(square(K.float()))
    exact = float(tg.regress.cross_validate(spectrum(K.float(), dtype=F64), y, [factor]).uncertainty)
    bound = machine.uncertainty(machine.left_out(y[:, None], factor))
    assert exact <= bound <= 10 * exact


def test_few_samples_are_decomposed_in_float64_where_they_are_worked_on() -> None:
    K, _ = smooth(40)
    pairs = GramMachine(square(K.float())).spectrum
    assert pairs is not None
    assert pairs.dtype == F64
    assert pairs.eps == torch.finfo(torch.float32).eps  # of the type that the Gram came in
    assert pairs.residual < 1e-13


def test_a_reg_that_rounding_decides_is_passed_over() -> None:
    """In float64 the smallest reg is best; in float32 its errors would be others on every machine."""
    K, y = smooth(80)
    exact = audit_gram(K, y, progress=False)
    assert exact.choice.reg < 1e-3
    assert exact.warnings == ()
    found = [audit_gram(rounded_anew(K, seed), y, progress=False) for seed in (1, 2)]
    for one in found:
        assert one.choice.reg > exact.choice.reg
        assert float(one.choice.uncertainty["K"][one.choice.regs["K"] == one.choice.reg]) <= UNSURE
        assert any("dtype='float64'" in w and "less leave-one-out loss" in w for w in one.warnings)
        assert "decided by rounding" in one.choice.table()
    a, b = (one.suspects.margin for one in found)
    torch.testing.assert_close(a, b, rtol=0.03, atol=0.03)


def test_where_rounding_decides_everything_the_least_uncertain_is_taken_and_said() -> None:
    K, y = smooth(80)
    machines = {"K": GramMachine(square(K.float()))}
    choice, _ = choose(machines, y[:, None], (1e-7, 1e-5, 1e-6), None, lambda: None)
    assert bool((choice.uncertainty["K"] > UNSURE).all())
    assert choice.reg == pytest.approx(1e-5)
    assert "every reg that was tried" in choice.warnings[0]


def test_real_targets_are_audited_in_float64() -> None:
    """A float32 network and the same in float64 say the same, by all kernels that go by name."""
    torch.manual_seed(0)
    net = tg.models.mlp([3, 16, 1]).eval()
    x = torch.randn(60, 3)
    y = x[:, :1].sin() + 0.01 * torch.randn(60, 1)
    one = tg.audit(net, (x, y), progress=False)
    other = tg.audit(net.double(), (x.double(), y), progress=False)
    assert one.choice.reg == other.choice.reg
    torch.testing.assert_close(one.suspects.margin, other.suspects.margin, rtol=1e-6, atol=1e-6)
