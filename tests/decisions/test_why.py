"""One decision in words, against attributions that are computed here."""

import math
import re
from dataclasses import replace
from itertools import permutations

import pytest
import torch

import tangency as tg
from tangency.decisions.chance import shuffled
from tangency.errors import InputError
from tangency.linalg.matrix import between

X = torch.randn(90, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()
NAMES = ("low", "mid", "high")


@pytest.fixture(scope="module")
def made() -> tuple[torch.nn.Module, tg.decisions.Decisions]:
    torch.manual_seed(0)
    net = tg.models.mlp([4, 16, 3])
    tg.models.fit(net, X[:60], Y[:60], epochs=10, progress=False)
    train, test = (tg.datasets.Labelled(X[s], Y[s], NAMES) for s in (slice(0, 60), slice(60, 90)))
    return net, tg.explain(net, train, test, kernels=["trNTK", "CK"], samples=20, neighbours=3, progress=False)


def test_it_names_the_samples_with_the_largest_parts(made: tuple[torch.nn.Module, tg.decisions.Decisions]) -> None:
    net, decisions = made
    for sample in decisions.shown[:5].tolist():
        says = int(net(X[60 + sample : 61 + sample]).argmax())
        for explanation, kernel in zip(
            decisions.explanations, (tg.cosine(tg.trace_ntk(net)), tg.cosine(tg.conjugate_kernel(net))), strict=True
        ):
            first, second, pro, con, like = decisions.why(sample, kernel=explanation.name).split("\n")
            truth = "which is right" if says == int(Y[60 + sample]) else f"it is {NAMES[int(Y[60 + sample])]}"
            assert first.startswith(f"test sample {sample}: {NAMES[says]}, with probability ")
            assert first.endswith(f"; {truth}.")
            assert second.startswith(f"By {explanation.name} (τ_K {explanation.faithfulness.tau:.2f})")
            cross = kernel(X[60 + sample : 61 + sample], X[:60]).double()
            parts = tg.decisions.attributions(explanation.surrogate, cross)[0, says]
            for line, want, values in (
                (pro, parts.topk(3), parts),
                (con, parts.topk(3, largest=False), parts),
                (like, cross[0].topk(3), cross[0]),
            ):
                said = re.findall(r"(\d+) \((\w+), ([-+\d.]+)\)", line)
                assert [int(i) for i, _, _ in said] == want.indices.tolist()
                assert [name for _, name, _ in said] == [NAMES[k] for k in Y[want.indices].tolist()]
                assert [float(v) for _, _, v in said] == pytest.approx(values[want.indices].tolist(), abs=0.006)


def test_the_most_faithful_kernel_is_asked(made: tuple[torch.nn.Module, tg.decisions.Decisions]) -> None:
    decisions = made[1]
    best = max(decisions.explanations, key=lambda e: e.faithfulness.tau)
    sample = int(decisions.shown[0])
    assert decisions.why(sample) == decisions.why(sample, kernel=best.name)


def test_a_tau_that_is_no_number_is_of_no_faithful_kernel(made: tuple[torch.nn.Module, tg.decisions.Decisions]) -> None:
    """Of a surrogate that says the same of every sample: it comes after one that orders them the wrong way round."""
    first, second = made[1].explanations

    def with_tau(e: tg.decisions.Explanation, tau: float) -> tg.decisions.Explanation:
        return replace(e, faithfulness=replace(e.faithfulness, tau=tau))

    for explanations in permutations((with_tau(first, math.nan), with_tau(second, -1.0))):
        decisions = replace(made[1], explanations=explanations)
        assert f"\n{second.name}: " in decisions.table()
        assert decisions.verdict() == decisions.verdict(second.name)


def test_chance_does_not_depend_on_the_kernels_scale(made: tuple[torch.nn.Module, tg.decisions.Decisions]) -> None:
    """reg is a factor times the default, which grows with the kernel."""
    train, test = (X[:60] @ X[:60].T).double(), (X[60:] @ X[:60].T).double()

    def chance(scale: float, **options: float) -> tg.surrogate.Interval:
        K, cross = (between(scale * part) for part in (train, test))
        return shuffled(K, cross, made[1].logits, Y[:60], Y[60:], **options)

    once = chance(1.0)
    assert chance(64.0) == once
    assert chance(1.0, reg_factor=100.0) != once


def test_what_was_not_looked_into_is_refused(made: tuple[torch.nn.Module, tg.decisions.Decisions]) -> None:
    decisions = made[1]
    for wrong in (1000, -1, "first", sorted(set(range(30)) - set(decisions.shown.tolist()))[0]):
        with pytest.raises(InputError, match=r"is none of the 20 test samples that were looked into.*samples=…"):
            decisions.why(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="kernel='pNTK'; needed: one of those compared, trNTK, CK"):
        decisions.why(int(decisions.shown[0]), kernel="pNTK")
