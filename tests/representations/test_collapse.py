"""NC1 to NC4 against their definitions, written out with all covariances, and on constructed collapse."""

import pytest
import torch
from torch import Tensor

from tangency.errors import InputError
from tangency.representations import collapse


def sample(n: int = 90, p: int = 7, c: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % c
    return 3 * torch.randn(c, p, generator=g, dtype=torch.float64)[y] + torch.randn(n, p, generator=g).double(), y


@pytest.mark.parametrize("p", [2, 7, 60])
def test_as_papyan_han_and_donoho_define_it(p: int) -> None:
    h, y = sample(p=p)
    h, y = h[:83], y[:83]  # classes of unlike sizes
    c = 4
    g = torch.Generator().manual_seed(1)
    W, b = torch.randn(c, p, generator=g, dtype=torch.float64), torch.randn(c, generator=g, dtype=torch.float64)
    means = torch.stack([h[y == k].mean(0) for k in range(c)])
    M = means - means.mean(0)
    within = sum((h[y == k] - means[k]).T @ (h[y == k] - means[k]) / int((y == k).sum()) for k in range(c)) / c
    between = M.T @ M / c
    pairs = [(M[i], M[j]) for i in range(c) for j in range(c) if i != j]
    cosines = torch.stack([a @ b / a.norm() / b.norm() for a, b in pairs])
    found = collapse(h, y, W, b)
    assert found.nc1 == pytest.approx(float(torch.trace(within @ torch.linalg.pinv(between, rtol=1e-10))) / c)
    assert found.nc2_norms == pytest.approx(float(M.norm(dim=1).std(correction=0) / M.norm(dim=1).mean()))
    assert found.nc2_angles == pytest.approx(float(cosines.std(correction=0)))
    assert found.nc2_simplex == pytest.approx(float((cosines + 1 / 3).abs().mean()))
    assert found.nc3 == pytest.approx(float((W / W.norm() - M / M.norm()).square().sum()))
    nearest = torch.cdist(h, means).argmin(1)
    assert found.nc4 == pytest.approx(float(((h @ W.T + b).argmax(1) != nearest).double().mean()))


def test_a_rotation_a_shift_and_a_scale_change_nothing() -> None:
    h, y = sample()
    turn = torch.linalg.qr(torch.randn(7, 7, generator=torch.Generator().manual_seed(2)).double()).Q
    a, b = collapse(h, y), collapse(5 * h @ turn + 100, y)
    for name in ("nc1", "nc2_norms", "nc2_angles", "nc2_simplex"):
        assert getattr(b, name) == pytest.approx(getattr(a, name), rel=1e-6)


def test_full_collapse_is_zero_and_one_output_counts_as_two() -> None:
    simplex = torch.eye(5, dtype=torch.float64) - 0.2
    y = torch.arange(50) % 5
    found = collapse(simplex[y], y, 3 * simplex, torch.zeros(5).double())
    assert max(found.nc1, found.nc2_norms, found.nc2_angles, found.nc2_simplex) < 1e-12
    assert (found.nc3, found.nc4) == (pytest.approx(0, abs=1e-12), 0)
    pair = torch.tensor([[-1.0, 0.0], [1.0, 0.0]])[y % 2]
    two = collapse(pair, y % 2, torch.tensor([[2.0, 0.0]]), torch.zeros(1))
    assert (two.nc3, two.nc4) == (pytest.approx(0, abs=1e-12), 0)
    assert len(two.table().splitlines()) == 7
    assert "nc3" in two.to_dict()


def test_samples_drawn_together_have_less_nc1() -> None:
    h, y = sample()
    means = torch.stack([h[y == k].mean(0) for k in range(4)])[y]
    values = [collapse(means + t * (h - means), y).nc1 for t in (1, 0.5, 0.1)]
    assert values[1] == pytest.approx(values[0] / 4)
    assert values[2] == pytest.approx(values[0] / 100)


def test_images_are_flattened_and_arrays_taken() -> None:
    h, y = sample(p=8)
    a, b = collapse(h, y), collapse(h.reshape(-1, 2, 2, 2).numpy(), y.tolist())
    assert a.nc1 == pytest.approx(b.nc1)


def test_bad_input_is_refused_with_its_fix() -> None:
    h, y = sample(n=40)
    w = torch.zeros(4, 7, dtype=torch.float64)

    def refused(words: str, *given: object, **options: object) -> None:
        with pytest.raises(InputError, match=words):
            collapse(*given, **options)  # type: ignore[arg-type]

    refused(r"features have the shape \(40,\); needed: \[n, …\]", h[:, 0], y)
    refused("features are torch.int64; needed: floating-point", h.long(), y)
    refused(
        r"features\[3, 2\] is nan", h.index_put((torch.tensor(3), torch.tensor(2)), torch.tensor(torch.nan).double()), y
    )
    refused(r"labels are torch.int64 of shape \(39,\); needed: a class, from 0, for each of 40", h, y[:39])
    refused("labels are torch.float64", h, y.double())
    refused("labels go from -1 to 3", h, torch.where(y == 0, -1, y))
    refused("labels go from 0 to 0; needed: two classes", h, 0 * y)
    refused("no sample is of class 1", h, torch.where(y == 1, 0, y))
    refused("each of the 4 classes has one sample", h[:4], y[:4])
    refused("equal means in this layer", torch.ones(40, 3), y)
    refused(r"weights have the shape \(3, 7\) and the bias \(3,\); needed: \(4, 7\) and \(4,\)", h, y, w[:3])
    refused("bias is given without weights", h, y, bias=w[:, 0])
    refused("weights", h, y, w + torch.nan)
