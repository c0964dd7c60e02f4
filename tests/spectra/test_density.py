"""Spectral densities against full decompositions; products with the Jacobian against Grams."""

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor, nn

import tangency as tg
from tangency.spectra.lanczos import lanczos

S = tg.spectra
F64 = torch.float64


def rotated(values: Tensor, seed: int = 0) -> Tensor:
    """A symmetric matrix with these eigenvalues."""
    g = torch.Generator().manual_seed(seed)
    q = torch.linalg.qr(torch.randn(len(values), len(values), generator=g, dtype=F64)).Q
    return (lambda k: (k + k.T) / 2)((q * values.double()) @ q.T)


def off(found: tg.spectra.Density, k: Tensor) -> float:
    """Wasserstein distance to the full spectrum."""
    values = torch.linalg.eigvalsh(k.double())
    return float(wasserstein_distance(found.nodes.numpy(), values.numpy(), found.weights.numpy()))


def network_gram(n: int = 300) -> Tensor:
    torch.manual_seed(0)
    return tg.trace_ntk(tg.models.mlp([10, 64, 3]).double())(torch.randn(n, 10, dtype=F64))


MATRICES: dict[str, Callable[[], Tensor]] = {
    "Wishart": lambda: (lambda w: w.T @ w / 600)(torch.randn(600, 300, dtype=F64)),
    "half its rank": lambda: (lambda w: w @ w.T / 300)(torch.randn(300, 150, dtype=F64)),
    "network": network_gram,
    "heavy tail": lambda: rotated((1 - torch.rand(300, dtype=F64)) ** -1.0),
    "two levels": lambda: rotated(torch.cat([torch.full((200,), 2.0), torch.ones(100)])),
    "geometric": lambda: rotated(0.9 ** torch.arange(300.0)),
}


@pytest.mark.parametrize("name", MATRICES)
def test_density_is_near_the_full_spectrum_and_says_how_near(name: str) -> None:
    torch.manual_seed(1)
    k = MATRICES[name]()
    mean = float(k.diagonal().mean())
    errors, distances = [], []
    for seed in range(3):
        found = S.density(k, probes=8, seed=seed, progress=False)
        assert float(found.weights.sum()) == pytest.approx(1)
        assert torch.all(found.nodes[:-1] >= found.nodes[1:])
        values = found.eigenvalues()
        assert len(values) == 300
        distances.append(off(found, k))
        assert float(wasserstein_distance(values, torch.linalg.eigvalsh(k))) < distances[-1] + 0.01 * mean
        errors.append(found.error)
    assert max(distances) < 0.08 * mean  # 8 probes of 300 entries: √(2/2400) is 0.03
    assert max(d / e for d, e in zip(distances, errors, strict=True)) < 2
    exact = torch.linalg.eigvalsh(k).flip(0)[: found.exact]
    torch.testing.assert_close(found.eigenvalues()[: found.exact], exact, rtol=1e-6, atol=1e-8 * float(exact.sum() + 1))


def test_repeated_eigenvalues_are_counted() -> None:
    k = rotated(torch.cat([torch.full((5,), 9.0), torch.full((3,), 7.0), torch.linspace(0, 1, 200)]))
    found = S.density(k, probes=8, progress=False)
    assert found.exact >= 8
    torch.testing.assert_close(found.eigenvalues()[:8], torch.tensor([9.0] * 5 + [7.0] * 3, dtype=F64))


def test_all_eigenvalues_of_a_small_matrix_are_exact() -> None:
    for values in (torch.tensor([3.0, 1.0]), torch.arange(1.0, 13.0), torch.tensor([5.0, 5.0, 1.0])):
        found = S.density(rotated(values), probes=8, progress=False)
        assert (found.exact, found.error) == (len(values), 0)
        torch.testing.assert_close(found.eigenvalues(), values.double().sort(descending=True).values)


def test_spectra_without_room() -> None:
    for k in (torch.zeros(20, 20), torch.eye(30), 3 * torch.eye(30, dtype=F64)):
        found = S.density(k, progress=False)
        torch.testing.assert_close(found.eigenvalues().to(k), torch.linalg.eigvalsh(k), atol=1e-5, rtol=1e-5)
        assert found.error < 1e-6


@pytest.mark.parametrize("scale", [1e-200, 1e200])
def test_beyond_what_can_be_squared(scale: float) -> None:
    k = network_gram(100)
    one, other = S.density(k, progress=False), S.density(k * scale, progress=False)
    assert other.exact == one.exact
    assert other.mean == pytest.approx(one.mean * scale, rel=1e-6)
    assert other.error == pytest.approx(one.error * scale, rel=0.05)
    torch.testing.assert_close(other.nodes[: one.exact] / scale, one.nodes[: one.exact])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_huge_and_tiny_grams(scale: float) -> None:
    k = network_gram(100)
    one, other = S.density(k.float(), progress=False), S.density((k * scale).float(), progress=False)
    assert other.mean == pytest.approx(one.mean * scale, rel=1e-4)
    assert other.error == pytest.approx(one.error * scale, rel=0.05)


@pytest.mark.parametrize("probes", [1, 7])
def test_bases_stay_orthogonal(probes: int) -> None:
    k = rotated(0.5 ** torch.arange(100.0))  # loses orthogonality within 20 steps if left alone
    starts = torch.randn(100, probes, dtype=F64)
    found = lanczos(tg.linalg.matrix.square(k), starts, 60)
    m = sum(found.widths)
    torch.testing.assert_close(found.basis @ found.basis.T, torch.eye(m, dtype=F64), atol=1e-10, rtol=0)
    torch.testing.assert_close(found.basis @ k @ found.basis.T, found.matrix, atol=1e-10, rtol=0)
    unit = starts / starts.norm(dim=0)
    torch.testing.assert_close(found.basis[:probes].T @ found.within, unit)
    torch.testing.assert_close(found.weights.sum(1), torch.ones(probes, dtype=F64))


def test_a_block_knows_the_moments_of_each_start() -> None:
    """zᵀ Kʲ z for each start z, exact up to twice the steps."""
    torch.manual_seed(0)
    k, starts = rotated(torch.rand(50) + 0.1), torch.randn(50, 3, dtype=F64)
    found, unit = lanczos(tg.linalg.matrix.square(k), starts, 4), starts / starts.norm(dim=0)
    for j in range(8):
        exact = (unit * (torch.linalg.matrix_power(k, j) @ unit)).sum(0)
        torch.testing.assert_close(found.weights @ found.nodes**j, exact)
    less = found.shorter(2)
    torch.testing.assert_close(less.weights @ less.nodes**3, found.weights @ found.nodes**3)
    assert torch.all(less.residuals > 0)


def test_directions_that_are_exhausted_are_left_out() -> None:
    torch.manual_seed(0)
    k = rotated(torch.cat([torch.arange(1.0, 7.0), torch.zeros(44)]))
    found = lanczos(tg.linalg.matrix.square(k), torch.randn(50, 4, dtype=F64), 20)
    assert found.widths == (4, 4, 2)
    assert float(found.residuals.max()) == 0
    density = S.density(k, probes=4, progress=False)
    assert density.exact == 6  # nobody knows how often zero is there
    torch.testing.assert_close(density.eigenvalues(), torch.linalg.eigvalsh(k).flip(0), atol=1e-10, rtol=0)


def test_a_value_that_fills_all_probes_stays_drawn() -> None:
    k = rotated(torch.cat([torch.full((5,), 9.0), torch.linspace(0, 1, 200)]))
    assert S.density(k, probes=5, progress=False).exact == 0
    assert S.density(k, probes=6, progress=False).exact >= 5


def test_the_stated_error_does_not_depend_on_luck() -> None:
    """The noise is that of the beta law, and not the spread of a few probes, which may be alike by chance."""
    k = rotated(torch.cat([torch.full((10,), 5.0), torch.ones(190)]).double())
    ratios = []
    for seed in range(60):
        found = S.density(k, steps=4, probes=2, seed=seed, progress=False)
        ratios.append(off(found, k) / found.error)
    assert max(ratios) < 5  # by the spread of two probes: 40
    noise, mean = S.density(k, steps=4, probes=2, progress=False).noise, 10 / 200
    assert noise == pytest.approx((2 / math.pi) ** 0.5 * 4 * (mean * (1 - mean) / (101 * 2)) ** 0.5, rel=0.5)


def test_quantiles_of_lists_and_numbers() -> None:
    found = S.density(torch.diag(torch.arange(1.0, 6.0)), progress=False)
    assert found.quantile([0.1, 0.9]).tolist() == pytest.approx([1, 5])
    assert float(found.quantile(0.5)) == pytest.approx(3)


def test_stored_grams_and_the_same_seed_give_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = tg.models.mlp([5, 16, 2]), torch.randn(60, 5)
    stored = tg.compute(tg.full_ntk(net), x, store=tmp_path / "gram", tile=17, progress=False)
    a, b = (S.density(k, steps=20, probes=4, seed=3, progress=False) for k in (stored, stored.dense()))
    torch.testing.assert_close(a.eigenvalues(), b.eigenvalues(), rtol=1e-3, atol=1e-4)
    again = S.density(stored, steps=20, probes=4, seed=3, progress=False)
    assert torch.equal(a.nodes, again.nodes)
    assert "exact" in a.table()
    assert len(a.plot().axes) == 2
    assert S.compare(a, stored).wasserstein < 2 * a.error
    assert float(a.cdf(torch.tensor([-1.0, 1e9]))[1]) == pytest.approx(1)


def test_what_no_density_is_made_of() -> None:
    with pytest.raises(tg.InputError, match="not symmetric"):
        S.density(torch.randn(5, 5))
    with pytest.raises(tg.InputError, match="probes=1; needed: at least 2"):
        S.density(torch.eye(3), probes=1)
    with pytest.raises(tg.InputError, match="steps=0"):
        S.density(torch.eye(3), steps=0)
    with pytest.raises(tg.InputError, match=r"K\[0, 0\] is nan"):
        S.density(torch.full((3, 3), math.nan))
    if not torch.cuda.is_available():
        with pytest.raises(tg.InputError, match="device='cuda' cannot be used here"):
            S.eigenvalues(torch.eye(3), device="cuda")


# ---- the Jacobian ---------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    """One weight used twice, an embedding with padding, and a recurrent layer without forward mode on some builds."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=0)
        self.cell = nn.LSTM(6, 6, batch_first=True)

    def forward(self, ids: Tensor) -> Tensor:
        return self.cell(self.table(ids))[0].mean(1) @ self.table.weight.T


def conv() -> nn.Module:
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 3))
    return body.double().eval()


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).double().eval()
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(24, 2).double())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "mlp": (lambda: tg.models.mlp([3, 8, 2]).double(), lambda: torch.randn(11, 3, dtype=F64)),
    "conv": (conv, lambda: torch.randn(9, 1, 8, 8, dtype=F64)),
    "attention": (attention, lambda: torch.randn(7, 3, 8, dtype=F64)),
    "tied, embedding, LSTM": (lambda: Tied().double(), lambda: torch.randint(0, 9, (8, 4))),
}
HEADS: dict[str, Callable[[nn.Module], Any]] = {
    "full": tg.full_ntk,
    "trace": tg.trace_ntk,
    "pseudo": tg.pseudo_ntk,
    "difference": lambda m: tg.head_ntk(m, (0, 1)),
    "softmax": lambda m: tg.head_ntk(m, lambda out: out.softmax(1)[:, :2]),
}


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")
@pytest.mark.every(3)
def test_products_and_alignments_without_the_gram(name: str, head: str) -> None:
    """K v, and α(f) = fᵀ Θ f / n² to 1e-8."""
    torch.manual_seed(0)
    model, x = MODELS[name][0](), MODELS[name][1]()
    before = copy.deepcopy(model.state_dict())
    kernel = HEADS[head](model)
    gram = tg.compute(kernel, x, progress=False)
    implicit = S.jacobian_gram(kernel, x, batch=4)
    assert implicit.shape == gram.shape
    rows = implicit.shape[: len(implicit.shape) // 2].numel()
    v = torch.randn(rows, 2, dtype=F64)
    torch.testing.assert_close(implicit @ v, gram @ v, rtol=1e-9, atol=1e-9)
    f = torch.randn(implicit.shape[: len(implicit.shape) // 2], dtype=F64)
    expected = float(f.flatten() @ (gram @ f.flatten())) / len(x) ** 2
    assert S.jacobian_alignment(kernel, x, f, batch=5) == pytest.approx(expected, rel=1e-8)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_where_forward_mode_is_wrong_two_backward_passes_are_taken() -> None:
    """Padding of an embedding has a tangent in torch's forward mode, and no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, padding_idx=0), nn.Flatten(), nn.Linear(12, 2)).double()
    x = torch.randint(0, 5, (10, 3))
    gram = S.jacobian_gram(tg.full_ntk(model), x)
    v = torch.randn(20, dtype=F64)
    torch.testing.assert_close(gram @ v, tg.full_ntk(model)(x).reshape(20, 20) @ v)
    assert gram.forward == {0: False}


def test_density_over_the_jacobian_is_that_of_the_gram() -> None:
    torch.manual_seed(0)
    model, x = tg.models.mlp([4, 16, 2]).double(), torch.randn(40, 4, dtype=F64)
    kernel = tg.full_ntk(model)
    gram = tg.compute(kernel, x, progress=False)
    one = S.density(S.jacobian_gram(kernel, x), steps=12, probes=3, progress=False)
    other = S.density(gram, steps=12, probes=3, progress=False)
    torch.testing.assert_close(one.eigenvalues(), other.eigenvalues(), rtol=1e-6, atol=1e-8)
    assert "JacobianGram(shape=(40, 2, 40, 2)" in repr(S.jacobian_gram(kernel, x))


def test_checkpoints_and_parts_of_the_parameters() -> None:
    torch.manual_seed(0)
    model, x = tg.models.mlp([3, 8, 1]).double(), torch.randn(6, 3, dtype=F64)
    params = {k: torch.randn_like(v) for k, v in model.state_dict().items()}
    kernel = tg.trace_ntk(model, params=params, trainable=lambda name, p: "weight" in name)
    v = torch.randn(6, dtype=F64)
    torch.testing.assert_close(S.jacobian_gram(kernel, x) @ v, kernel(x) @ v)


def test_what_has_no_jacobian() -> None:
    model, x = tg.models.mlp([3, 8, 2]), torch.randn(6, 3)
    with pytest.raises(tg.InputError, match="'conjugate kernel', which has no Jacobian"):
        S.jacobian_gram(tg.conjugate_kernel(model), x)
    with pytest.raises(tg.InputError, match="needed: the tangent kernel of a network"):
        S.jacobian_gram(tg.cosine(tg.trace_ntk(model)), x)  # type: ignore[arg-type]
    with pytest.raises(tg.ModelError, match=r"Call model.eval\(\) first"):
        S.jacobian_gram(tg.trace_ntk(nn.Sequential(nn.Linear(3, 2), nn.Dropout())), x)
    with pytest.raises(tg.InputError, match=r"K is 12 x 12 and v has shape \(6,\)"):
        S.jacobian_gram(tg.full_ntk(model), x) @ torch.ones(6)
    with pytest.raises(tg.InputError, match="batch=0"):
        S.jacobian_gram(tg.full_ntk(model), x, batch=0)


class Opaque(torch.autograd.Function):
    """Without what torch.func needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


class Unusual(nn.Module):
    """A part that no gradient goes through, a parameter that is not used, control flow on values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            gate = self.a(x).sigmoid()
        h = self.a(x) * gate + self.a(x).detach()
        return self.b(h) if bool((x.sum() > -1e9).item()) else h


@pytest.mark.filterwarnings("ignore::tangency.errors.PerformanceWarning")
def test_unusual_models() -> None:
    torch.manual_seed(0)
    model, x, v = Unusual().double(), torch.randn(7, 3, dtype=F64), torch.randn(14, dtype=F64)
    gram = tg.full_ntk(model)(x).reshape(14, 14)
    torch.testing.assert_close(S.jacobian_gram(tg.full_ntk(model), x, batch=3) @ v, gram @ v)
    with torch.inference_mode():  # no gradients wanted by the caller, nor needed from them
        f = torch.ones(7, 2, dtype=F64)
        assert S.jacobian_alignment(tg.full_ntk(model), x, f) == pytest.approx(float(gram.sum()) / 49)
        u = torch.ones(3, dtype=F64)
        inside = S.linear_alignment(tg.full_ntk(model), u, samples=5)
        assert S.power_law(torch.arange(1.0, 51.0), draws=2).alpha > 1
    torch.testing.assert_close(
        inside.clone(), S.linear_alignment(tg.full_ntk(model), torch.ones(3, dtype=F64), samples=5)
    )

    class Closed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Opaque.apply(super().forward(x))

    with pytest.raises(tg.ModelError, match=r"torch.func cannot differentiate this model.*Compute the Gram"):
        S.jacobian_gram(tg.trace_ntk(Closed(3, 1)), x.float())
