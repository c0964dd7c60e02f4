"""What networks learn: the three experiments, small, on bundled digits."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from tangency.cli import main
from tangency.datasets import Labelled
from tangency.errors import InputError
from tangency.experiments import EXPERIMENTS, eigenfunctions
from tangency.experiments.energy_table1 import label_energy
from tangency.experiments.learned import LEARNERS, affordable, chosen, halves, learner, read_set, room, some_images
from tangency.experiments.table import Options, Trainings
from tangency.models import mlp
from tangency.studies import SCHEDULE


def run(capsys: pytest.CaptureFixture[str], name: str, *more: str) -> dict:
    assert main(["reproduce", name, "--quick", "--quiet", "--json", "--device", "cpu", *more]) == 0
    return json.loads(capsys.readouterr().out)


QUICK = Options(quick=True, progress=False, where="cpu")


def test_eigenfunctions_go_on_where_they_were_stopped(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    small = ("--samples", "80", "--test", "40", "--epochs", "1", "--out", str(tmp_path))
    first = run(capsys, "eigenfunctions", *small, "--indices", "1")
    assert [row["task"] for row in first["rows"]] == ["1", "labels"]
    assert 0.7 < first["runs"]["digits, mlp"]["overlap"] < 0.9
    more = run(capsys, "eigenfunctions", *small, "--indices", "1,20")
    assert more["rows"][0] == first["rows"][0]
    assert more["rows"][1]["task"] == "20"
    table = EXPERIMENTS["eigenfunctions"].run(
        Options(
            quick=True, progress=False, out=tmp_path, learned=Trainings(samples=80, test=40, epochs=1, indices=(1, 20))
        )
    )
    assert len(table.plot().axes) == 3  # type: ignore[attr-defined]


def test_energy_is_the_part_of_the_labels_in_the_first_eigenvectors(capsys: pytest.CaptureFixture[str]) -> None:
    found = run(capsys, "energy-table1", "--samples", "100", "--test", "40", "--epochs", "3")
    row = found["rows"][0]
    assert row["random %"] == "70.7"
    assert 70 < float(row["init %"]) <= 100
    model = mlp([4, 8, 1])
    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    assert 0.9 < label_energy(model, x, y, QUICK) <= 1 + 1e-6


def test_directions_of_one_network(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = run(
        capsys,
        "anisotropy",
        "--samples",
        "60",
        "--test",
        "60",
        "--epochs",
        "2",
        "--indices",
        "0,40",
        "--out",
        str(tmp_path),
    )
    kept = torch.load(tmp_path / "anisotropy-lenet.pt", weights_only=True)
    assert kept["directions"].shape == (10, 1, 8, 8)
    assert kept["values"].shape == (64,)
    first, last = found["rows"]
    assert first["σ/σ_0"] == "1.00e+00"
    assert float(last["σ/σ_0"]) < 0.5
    with pytest.raises(
        InputError, match="--indices up to 100 of resnet18; needed: below 32, as one product takes a second on a CPU"
    ):
        EXPERIMENTS["anisotropy"].run(Options(where="cpu", learned=Trainings(networks=("resnet18",), indices=(100,))))


def test_a_few_eigenfunctions_are_the_first_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    known, _ = some_images("digits", QUICK, 120, 20)
    assert isinstance(known.x, torch.Tensor)
    model = learner("mlp", tuple(known.x.shape[1:]), seed=0)
    every = eigenfunctions.functions_of(model, known.x, 3, QUICK)
    monkeypatch.setattr(eigenfunctions, "OVERLAPS", 10)
    some = eigenfunctions.functions_of(model, known.x, 12, QUICK)
    assert len(every) > 100
    assert len(some) == 13
    assert some.residual <= eigenfunctions.TOL
    torch.testing.assert_close(some.values, every.values[:13], rtol=1e-7, atol=0)
    torch.testing.assert_close(some.vectors, every.vectors[:, :13], rtol=0, atol=1e-5)


def test_what_a_gpu_is_spared() -> None:
    gpu, recipe = Options(where="cuda"), SCHEDULE.but(captured=True)
    assert affordable(recipe, "resnet18", gpu) == recipe.but(precision="bfloat16", channels_last=True)
    assert affordable(recipe, "lenet", gpu) == affordable(recipe, "resnet18", QUICK) == recipe
    assert room(1 << 30, QUICK) is None
    assert room(1 << 30, gpu) == 13 << 30


def test_networks_are_drawn_as_published() -> None:
    for name in LEARNERS:
        model = learner(name, (3, 32, 32), seed=0)
        assert not model.training
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Conv2d)):
                assert module.bias is None or not bool(module.bias.any())
                if module.weight.numel() > 2000:
                    fan = module.weight[0].numel()
                    assert float(module.weight.detach().var() * fan) == pytest.approx(1, abs=0.1)
                    assert float(module.weight.detach().abs().max()) <= 2 / 0.8796 / fan**0.5 + 1e-6
    assert sum(p.numel() for p in learner("mlp", (1, 28, 28), 0).parameters()) == 784 * 100 + 100 * 100 + 100 + 201
    assert not [m for m in learner("lenet", (1, 32, 32), 0, nn.GELU).modules() if isinstance(m, nn.ReLU)]


def test_images_and_classes() -> None:
    known, asked = some_images("digits", QUICK, 50, 20)
    assert known.counts().tolist() == [5] * 10
    assert len(asked) == 20
    torch.testing.assert_close(known.x.mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)  # type: ignore[union-attr]
    two = halves(Labelled(torch.rand(4, 2), [0, 3, 1, 2], ("a", "b", "c", "d")))
    assert two.y.tolist() == [1, 0, 1, 0]


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="--samples 5000; needed: at most 1200, as many as digits train has"):
        some_images("digits", QUICK, 5000, 20)
    with pytest.raises(InputError, match="--sets svhn; needed: mnist, cifar10"):
        read_set("svhn", Options())
    with pytest.raises(InputError, match="--networks vgg; needed: some of mlp, lenet, resnet18, narrow"):
        chosen(Options(learned=Trainings(networks=("vgg",))), ())
    with pytest.raises(InputError, match="MNIST.*--data"):
        EXPERIMENTS["eigenfunctions"].run(Options())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            ["uci", "--quick", "--samples", "5"],
            "--samples is for cntk, eigenfunctions, energy-table1, anisotropy, single-relu, probing, shift; uci",
        ),
        (["cntk", "--quick", "--indices", "1"], "--indices is for eigenfunctions, energy-table1, anisotropy; cntk"),
        (["anisotropy", "--quick", "--flips"], "--flips is for cntk; anisotropy does not take it"),
    ],
)
def test_options_of_other_experiments(given: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *given]) == 2
    assert says in capsys.readouterr().err


def test_indices_are_numbers_from_0(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in ("-1", "a", ","):
        with pytest.raises(SystemExit):
            main(["reproduce", "eigenfunctions", f"--indices={wrong}"])
        assert "--indices" in capsys.readouterr().err
