"""Kernel regression with exact convolutional kernels: images, fits, and that it goes on where it was stopped."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import tangency as tg
from tangency.cli import main
from tangency.errors import InputError
from tangency.experiments import cntk
from tangency.experiments.table import Options, Regression
from tangency.infinite import Infinite

SMALL = ["reproduce", "cntk", "--quick", "--quiet", "--json", "--network", "myrtle5", "--test", "12", "--device", "cpu"]


def run(capsys: pytest.CaptureFixture[str], *more: str) -> dict:
    assert main([*SMALL, *more]) == 0
    return json.loads(capsys.readouterr().out)


def options(**given: object) -> Options:
    return Options(quick=True, progress=False, where="cpu", regression=Regression(**given))  # type: ignore[arg-type]


# Images


def test_every_beginning_has_the_classes_alike() -> None:
    y = torch.tensor([0, 0, 0, 0, 1, 2, 2, 1, 1, 2, 0])
    order = cntk.balanced(y, 9)
    assert order.tolist() == [0, 4, 5, 1, 6, 7, 2, 8, 9]
    assert len(cntk.balanced(y, 11).unique()) == 11


def test_standardised_by_the_training_images() -> None:
    x, z = torch.rand(20, 3, 4, 4) * torch.tensor([1.0, 5.0, 9.0])[:, None, None], torch.rand(5, 3, 4, 4)
    a, b = cntk.standardised(x, z)
    torch.testing.assert_close(a.mean((0, 2, 3)), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(a.std((0, 2, 3)), torch.ones(3))
    torch.testing.assert_close(b[0, 1], (z[0, 1] - x[:, 1].mean()) / x[:, 1].std())
    dark = torch.zeros(2, 1, 2, 2)
    assert torch.equal(cntk.standardised(dark, dark)[0], dark)


def test_whitened_as_published() -> None:
    """By the inverse root of C + 1e-4, made here by singular values."""
    generator = torch.Generator().manual_seed(0)
    x, z = (torch.rand(n, 3, 3, 3, generator=generator) for n in (40, 5))
    unit = []
    for v in (x, z):
        flat = v.flatten(1).double().numpy()
        flat = flat - flat.mean(1, keepdims=True)
        unit.append(flat / np.linalg.norm(flat, axis=1, keepdims=True))
    _, s, vt = np.linalg.svd(unit[0], full_matrices=True)
    root = vt.T @ np.diag((s**2 / 40 + 1e-4) ** -0.5) @ vt
    for got, want in zip(cntk.whitened(x, z), unit, strict=True):
        np.testing.assert_allclose(got.flatten(1).numpy(), want @ root, rtol=1e-4, atol=1e-5)


def test_mirror_images_lie_behind_the_others() -> None:
    data = cntk.pictures(options(flips=True))
    assert len(data.x) == 2 * len(data.y) == 80
    assert torch.equal(data.x[40:], data.x[:40].flip(-1))
    numbers = torch.tensor([2, 7])
    assert data.rows(numbers).tolist() == [2, 7, 42, 47]
    targets = data.targets(numbers)
    assert torch.equal(targets[:2], targets[2:])
    assert targets.argmax(1).tolist() == data.y[[2, 7, 2, 7]].tolist()
    assert targets.sum().abs() < 1e-12


# Fits


def test_curve_is_that_of_a_plain_solution(tmp_path: Path) -> None:
    """The same choice of reg and the same accuracies, by NumPy from the dense Grams."""
    asked = options(network="myrtle5", test=20, flips=True, dtype="float64", store=tmp_path)
    asked = replace(asked, kernels=("nngp",))
    table = cntk.reproduce_cntk(asked)
    data = cntk.pictures(asked)
    train, cross = (tg.open_gram(tmp_path / f"nngp-{part}").numpy() for part in ("train", "test"))
    y, labels, scale = data.y.numpy(), data.labels.numpy(), train.diagonal().mean()
    k = tg.infinite_nngp(tg.models.myrtle(5, 1, width=2))
    np.testing.assert_allclose(cross[:2, 38:42], k(data.z[:2], data.x[38:42]).numpy())

    def right(fit: list[int], rows: np.ndarray, truth: np.ndarray, reg: float) -> float:
        both = [*fit, *(i + 40 for i in fit)]
        t = np.tile(np.eye(10)[y[fit]] - 0.1, (2, 1))
        a = np.linalg.solve(train[np.ix_(both, both)] + reg * scale * np.eye(len(both)), t)
        return float(((rows[:, both] @ a).argmax(1) == truth).mean())

    for row, n in zip(table.rows, (5, 10, 20, 40), strict=True):
        some, held = list(range(n - n // 5)), list(range(n - n // 5, n))
        tried = [(right(some, train[held], y[held], reg), reg) for reg in cntk.REGS]
        best = max(tried)
        assert row["training images"] == n
        assert row["reg"] == f"{best[1]:g}"
        assert row["held out %"] == f"{100 * best[0]:.1f}"
        assert row["accuracy %"] == f"{100 * right(list(range(n)), cross, labels, best[1]):.2f}"


def test_regs_for_which_there_are_no_digits_are_passed_over() -> None:
    K = torch.ones(6, 6) - 1e-3 * torch.eye(6)  # not positive: only a reg above 1e-3 helps
    reg, _ = cntk.fit(K, torch.randn(6, 2).double(), (1e-6, 1e-4, 1e-2, 1.0), 1.0)
    assert reg == 1e-2
    with pytest.raises(tg.NotPositiveDefinite):
        cntk.fit(K, torch.randn(6, 2).double(), (1e-6, 1e-4), 1.0)


# The command


def test_stopped_and_gone_on_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was finished is not computed again, and the numbers are those of a run that was not stopped."""
    whole = run(capsys)
    calls, pair = [0], Infinite.pair

    def counted(self: Infinite, a: object, b: object, workspace: int | None = None) -> torch.Tensor:
        calls[0] += 1
        if calls[0] == stop:
            raise KeyboardInterrupt
        return pair(self, a, b, workspace)  # type: ignore[arg-type]

    monkeypatch.setattr(Infinite, "pair", counted)
    more = ("--out", str(tmp_path / "out"), "--store", str(tmp_path / "grams"))
    stop = 12  # one for the shape, six to know the kernel by, then tiles
    assert main([*SMALL, *more]) == 130
    capsys.readouterr()
    done, every = tg.open_gram(tmp_path / "grams" / "ntk-train").progress
    assert 0 < done < every == 6  # tiles of 16 samples of 40, half of them
    stop = 0
    again = run(capsys, *more)
    assert again["rows"] == whole["rows"]
    assert whole["cost"]["ntk"]["pairs"] == 40 * 41 // 2 + 12 * 40
    assert 12 * 40 < again["cost"]["ntk"]["pairs"] < whole["cost"]["ntk"]["pairs"]  # those of the second run alone
    assert any("Extrapolated from that, not measured" in note for note in again["notes"])
    calls[0] = 0
    assert run(capsys, *more)["rows"] == whole["rows"]
    assert calls[0] == 0


def test_a_picture() -> None:
    pytest.importorskip("matplotlib")
    rows = (
        {"kernel": "NTK", "training images": 10, "accuracy %": "30.00", "± %": "1.00"},
        {"kernel": "NTK", "training images": 20, "accuracy %": "40.00", "± %": "1.00"},
        {"kernel": "NTK", "training images": 50_000, "published %": "77.43"},
    )
    (axis,) = cntk.LearningCurve("t", ("kernel",), rows, (), {"network": "cntk"}).plot().axes
    assert axis.get_lines()[-1].get_ydata()[0] == 77.43
    assert "NTK, published" in [t.get_text() for t in axis.get_legend().get_texts()]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["cntk", "--quick", "--data", "/nowhere"], "--data /nowhere and --quick"),
        (["cntk", "--quick", "--kernels", "ntk, other"], "--kernels other; needed"),
        (["cntk", "--quick", "--samples", "39"], "--samples 39; needed: at least 40"),
        (["cntk", "--quick", "--samples", "100000"], "--samples 100000; there are"),
        (["cntk", "--quick", "--kernels", "rbf"], "--kernels rbf; needed: some of ntk, nngp"),
        (["cntk"], "CIFAR-10 in its binary version (cifar-10-batches-bin) is needed"),
        (["uci", "--quick", "--flips"], "--flips is for cntk; uci does not take it"),
        (["uci", "--quick", "--device", "cpu"], "--device is for cntk, eigenfunctions"),
    ],
)
def test_refused(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *argv]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("device", ["abacus", "meta"])
def test_devices_that_there_are_not(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*SMALL, "--device", device])
    assert f"{device}: " in capsys.readouterr().err


def test_more_images_than_there_are() -> None:
    with pytest.raises(InputError, match="--test 5000; there are"):
        cntk.pictures(options(test=5000))
