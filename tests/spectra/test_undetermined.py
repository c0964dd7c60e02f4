"""What is not determined is not told: a null space's directions. Growth of all values is, and spikes that are gone."""

import pytest
import torch
from torch import nn

import tangency as tg
from tangency.errors import InputError


def wishart(seed: int = 0) -> torch.Tensor:
    A = torch.randn(300, 200, generator=torch.Generator().manual_seed(seed)).double()
    return torch.linalg.eigvalsh(A.T @ A / 300)


@pytest.mark.parametrize("factor", [0.5, 1.3, 3.0, 30.0])
def test_a_spectrum_that_grew_as_a_whole_has_no_spikes(factor: float) -> None:
    found = tg.spectra.classify(factor * wishart(), wishart())
    assert found.kind == "changed bulk"
    assert f"{factor:.3g} times" in found.sentence


def test_a_spike_beside_growth_is_one() -> None:
    grown = torch.cat([3 * wishart(), torch.tensor([60.0]).double()])
    found = tg.spectra.classify(grown, wishart())
    assert found.kind == "bulk + spikes"
    assert found.spikes.tolist() == pytest.approx([60.0])


@pytest.mark.parametrize("lost", [(500.0,), (500.0, 400.0, 300.0, 200.0, 100.0)])
def test_spikes_that_are_gone_are_a_change(lost: tuple[float, ...]) -> None:
    before = torch.cat([wishart(), torch.tensor(lost).double()])
    found = tg.spectra.classify(wishart(), before)
    assert found.kind == "changed bulk"
    assert f"{len(lost)} of {len(lost)} values" in found.sentence
    assert tg.spectra.classify(before, before).kind == "invariant"


def test_the_null_space_of_a_kernel_does_not_turn() -> None:
    a = torch.ones(8, 8).double()
    a[0, 0] += 1
    b = 1.0001 * torch.ones(8, 8).double()
    b[0, 0] += 1
    found = tg.spectra.rotation([a, b], count=4, centred=False, progress=False)
    assert found.angles.shape == (2, 2)
    assert float(found.angles.max()) < 1e-3
    y = torch.tensor([1.0, 2.0, 3.0, 4.0])
    one, other = (tg.spectra.energy(torch.ones(4, 4), v, 3, progress=False).parts for v in (y, y[[3, 0, 2, 1]]))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one, one[:1].expand(3))


def test_a_scaled_network_of_low_rank_did_not_turn() -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0)).double()
    net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False)).double()
    monitor = tg.dynamics.Monitor(tg.trace_ntk(net), x, every=1)
    monitor.step(0)
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(1.3)
    monitor.step(1)
    assert float(monitor.history()["rotation"][-1]) < 1e-3


def test_samples_that_are_changed_later_are_no_change_of_the_kernel() -> None:
    x, y = torch.randn(20, 4).double(), torch.randn(20).double()
    net = tg.models.mlp([4, 8, 1]).double()
    monitor = tg.dynamics.Monitor(tg.trace_ntk(net), x[:10], y=y[:10], record=("change", "alignment"), every=1)
    monitor.step(0)
    x.mul_(3)
    y.neg_().add_(1)
    monitor.step(1)
    found = monitor.history()
    assert float(found["change"][-1]) == 0
    assert float(found["alignment"][-1]) == float(found["alignment"][0])


def test_a_function_does_not_take_the_name_of_a_quantity() -> None:
    net = tg.models.mlp([4, 8, 1])
    with pytest.raises(InputError, match="another name"):
        tg.dynamics.Monitor(tg.trace_ntk(net), torch.randn(5, 4), functions={"change": torch.trace})


def test_weights_of_spectral_norm_are_read_without_a_step_of_it() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(70, 40)).train()
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    one, other = (tg.spectra.weights(layer)["weight"].values for _ in range(2))
    assert torch.equal(one, other)
    assert all(torch.equal(v, before[k]) for k, v in layer.state_dict().items())
    assert all(m.training for m in layer.modules())


def test_nothing_has_no_direction() -> None:
    with pytest.raises(InputError, match="K has no eigenvalue above 0"):
        tg.spectra.label_alignment(torch.zeros(4, 4), [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(InputError, match="W is 0"):
        tg.spectra.weight_alignment(torch.zeros(3, 4), torch.ones(4))
    density = tg.spectra.density(torch.eye(30), progress=False)
    assert float(density.cdf(2.0)) == pytest.approx(1.0)
