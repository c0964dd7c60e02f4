"""Decompositions against torch's plain ones, by blocks of rows, and where torch's routine gives up."""

from typing import Any

import pytest
import torch
from torch import Tensor

import tangency as tg
from tangency.linalg import decompose
from tangency.linalg.decompose import eigh, singular, svd

F64 = torch.float64


def tall(n: int, p: int, rank: int, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, rank, generator=g, dtype=F64) @ torch.randn(rank, p, generator=g, dtype=F64)
    return a * torch.logspace(0, -6, p, dtype=F64)


@pytest.mark.parametrize(
    ("n", "p", "rank"), [(300, 7, 7), (300, 7, 4), (12, 12, 12), (13, 12, 12), (5, 40, 5), (90, 30, 9)]
)
@pytest.mark.parametrize("held", [1 << 25, 1])
def test_singular_is_the_svd(n: int, p: int, rank: int, held: int) -> None:
    """σ, the projector onto V, and V f(σ) Uᵀ t, which no sign changes; `held`=1: in blocks."""
    a, t = tall(n, p, rank), torch.randn(n, 2, generator=torch.Generator().manual_seed(1), dtype=F64)
    u, s, vt = torch.linalg.svd(a, full_matrices=False)
    found = singular(a, t, held)
    assert (found.values.shape, found.right.shape, found.inside.shape) == ((min(n, p),), (p, min(n, p)), (min(n, p), 2))
    torch.testing.assert_close(found.values, s, rtol=0, atol=1e-14 * float(s[0]) * n)
    keep = s > 1e-12 * s[0]
    f = (s / (s.square() + 1e-6))[:, None]
    want = vt[keep].T @ (f * (u.T @ t))[keep]
    got = found.right[:, keep] @ (f * found.inside)[keep]
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8 * float(want.abs().max()))


@pytest.mark.parametrize(("n", "p"), [(90, 20), (20, 90), (30, 30), (31, 30)])
@pytest.mark.parametrize("held", [None, 1])
def test_many_columns_go_by_eigenvectors(n: int, p: int, held: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32; against singular values in float64, down to float32's rounding times f."""
    monkeypatch.setattr(decompose, "LARGE", 8)
    monkeypatch.setattr(decompose, "svd", lambda _: pytest.fail("singular values were asked for"))
    a, t = tall(n, p, min(n, p)).float(), torch.randn(n, 2, generator=torch.Generator().manual_seed(1))
    u, s, vt = torch.linalg.svd(a.double(), full_matrices=False)
    found = singular(a, t, held)
    assert (found.values.shape, found.right.shape, found.inside.shape) == ((min(n, p),), (p, min(n, p)), (min(n, p), 2))
    torch.testing.assert_close(found.values.double(), s, rtol=1e-6, atol=2e-8 * float(s[0]))
    for reg in (1e-2, 1e-4):
        f = (s / (s.square() + reg))[:, None]
        want = vt.T @ (f * (u.T @ t.double()))
        torch.testing.assert_close(
            found.right.double() @ (f * found.inside.double()), want, rtol=1e-4, atol=1e-4 * float(want.abs().max())
        )


@pytest.mark.parametrize("reg", [0.0, 1e-4, 1.0])
@pytest.mark.parametrize(("n", "p"), [(60, 9), (9, 60)])
@pytest.mark.parametrize("weighted", [False, True])
def test_least_squares_is_that_by_the_svd_of_the_features(
    n: int, p: int, reg: float, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of some rows, with a feature twice (rank deficient), weights and several targets."""
    g = torch.Generator().manual_seed(0)
    phi, y = torch.randn(n, p, generator=g, dtype=F64), torch.randn(n, 3, generator=g, dtype=F64)
    phi[:, -1] = phi[:, 0]
    w = torch.rand(n, generator=g, dtype=F64) + 0.1 if weighted else torch.ones(n, dtype=F64)
    monkeypatch.setattr(decompose, "HELD", 1)
    fit = tg.regress.least_squares(phi, y, reg=reg, sample_weights=w if weighted else None)
    u, s, vt = torch.linalg.svd(phi * w.sqrt()[:, None], full_matrices=False)
    keep = s > 1e-12 * s[0]
    want = vt[keep].T @ ((s / (s.square() + reg))[:, None] * (u.T @ (y * w.sqrt()[:, None])))[keep]
    torch.testing.assert_close(fit.coefficients, want, rtol=1e-9, atol=1e-9)
    assert fit.residual < 1e-12
    assert fit.rank == (int(keep.sum()) if reg == 0 else None)


def test_where_torch_gives_up_lapack_in_float64_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.randn(6, 6)
    real: dict[str, Any] = {"svd": torch.linalg.svd, "eigh": torch.linalg.eigh}

    def failing(name: str) -> Any:
        def function(m: Tensor, **options: Any) -> Any:
            if m.dtype == torch.float32:
                raise RuntimeError("cusolver error: CUSOLVER_STATUS_EXECUTION_FAILED, when calling …\nmore lines")
            return real[name](m, **options)

        return function

    for name in real:
        monkeypatch.setattr(torch.linalg, name, failing(name))
    torch.testing.assert_close(svd(a)[1], real["svd"](a).S)
    torch.testing.assert_close(eigh(a @ a.T)[0], real["eigh"](a @ a.T).eigenvalues, rtol=1e-4, atol=1e-4)
    assert svd(a)[0].dtype == torch.float32


def test_where_nothing_helps_the_error_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(m: Tensor, **options: Any) -> Any:
        raise torch.linalg.LinAlgError("linalg.svd: The algorithm failed to converge.")

    monkeypatch.setattr(torch.linalg, "svd", failing)
    with pytest.raises(tg.DidNotConverge, match=r"matrix \(6, 3\) on cpu were not found: .*failed to converge"):
        svd(torch.randn(6, 3))


def test_no_memory_is_no_failure_to_converge(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(m: Tensor, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.linalg, "svd", failing)
    with pytest.raises(torch.OutOfMemoryError):
        svd(torch.randn(6, 3))
