"""The conformance suite finds kernels that are none."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import tangency as tg
from tangency.kernel import Empirical

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, eq=False)
class Spoiled(Empirical):
    """A good kernel with a fault in its tiles."""

    spoil: Callable[[Tensor], Tensor] = torch.clone

    def pair(self, a: object, b: object, workspace: int | None = None) -> Tensor:
        return self.spoil(super().pair(a, b, workspace))  # type: ignore[arg-type]


def spoiled(spoil: Callable[[Tensor], Tensor]) -> Spoiled:
    torch.manual_seed(0)
    good = tg.trace_ntk(tg.models.mlp([4, 6, 2]).double())
    return Spoiled(good.name, good.features, good.trace, None, spoil)


def calls() -> Callable[[Tensor], Tensor]:
    count = [0]

    def drift(k: Tensor) -> Tensor:
        count[0] += 1
        return k * (1 + 1e-14 * count[0])

    return drift


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda k: k + torch.triu(torch.ones_like(k), 1), "symmetry"),
        (lambda k: k - 100 * torch.eye(*k.shape, dtype=k.dtype), "not positive semidefinite"),
        (lambda k: 2 * k, "diag"),
        (lambda k: k[:, :-1], "must be square"),
        (lambda k: k + 0.1 * torch.outer(torch.arange(len(k)), torch.arange(k.shape[1])), "diag|block|permutation"),
        (calls(), "different numbers"),
    ],
)
def test_faults_are_found(spoil: Callable[[Tensor], Tensor], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        tg.testing.check_kernel(spoiled(spoil), X)


def test_the_unspoiled_one_passes() -> None:
    tg.testing.check_kernel(spoiled(torch.clone), X)
    with pytest.raises(AssertionError, match="at least three"):
        tg.testing.check_kernel(spoiled(torch.clone), X[:2])
