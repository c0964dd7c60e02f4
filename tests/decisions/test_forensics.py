"""Patches pixel by pixel, poisoning counted, neighbours by brute force, precision and recall as scikit-learn's."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import precision_score, recall_score
from torch import Tensor, nn

import tangency as tg
from tangency import InputError
from tangency.decisions.forensics import YELLOW, Patch, detect, flag, poison
from tangency.models import mlp

F64 = torch.float64
CORNERS = ["top left", "top right", "bottom left", "bottom right"]


# Patches.


def painted(x: Tensor, row: int, column: int, size: int, colours: list[float]) -> Tensor:
    """Pixel by pixel."""
    out = x.clone()
    for n in range(x.shape[0]):
        for c in range(x.shape[1]):
            for i in range(size):
                for j in range(size):
                    out[n, c, row + i, column + j] = colours[c]
    return out


@pytest.mark.parametrize("corner", CORNERS)
@pytest.mark.parametrize("margin", [0, 1, 3])
@pytest.mark.parametrize("shape", [(2, 3, 9, 12), (1, 1, 8, 7)])
def test_patches_lie_in_their_corner_and_nowhere_else(corner: str, margin: int, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    before = x.clone()
    h, w = shape[2:]
    row = margin if corner.startswith("top") else h - 3 - margin
    column = margin if corner.endswith("left") else w - 3 - margin
    patch = Patch(size=3, colour=0.25, position=corner, margin=margin)  # type: ignore[arg-type]
    assert patch.place(x) == (row, column)
    assert torch.equal(patch(x), painted(x, row, column, 3, [0.25] * shape[1]))
    assert torch.equal(x, before)
    assert patch(x).data_ptr() != x.data_ptr()


@given(st.integers(1, 6), st.integers(0, 5), st.integers(0, 7), st.integers(6, 12), st.integers(6, 12))
def test_patches_lie_at_the_row_and_column_asked_for_or_are_refused(
    size: int, row: int, column: int, h: int, w: int
) -> None:
    x = torch.rand(2, 2, h, w)
    patch = Patch(size=size, colour=(0.5, -2.0), position=(row, column), margin=99)  # no corner, so no margin
    if row + size > h or column + size > w:
        with pytest.raises(
            InputError, match=rf"{size} x {size} at row {row}, column {column} does not fit into .*{h} x"
        ):
            patch(x)
    else:
        assert torch.equal(patch(x), painted(x, row, column, size, [0.5, -2.0]))


def test_a_patch_may_fill_the_picture() -> None:
    x = torch.rand(2, 1, 5, 5)
    for position in (*CORNERS, (0, 0)):
        assert bool((Patch(size=5, colour=7.0, position=position)(x) == 7).all())  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.uint8])
def test_colours_are_by_channel_on_the_pictures_own_scale_and_type(dtype: torch.dtype) -> None:
    x = (255 * torch.rand(2, 3, 8, 8)).to(dtype)
    colour = (255, 254, 3) if dtype == torch.uint8 else (0.1, -5.0, 300.0)
    made = Patch(size=2, colour=colour)(x)
    assert made.dtype == dtype
    assert torch.equal(made, painted(x, 6, 6, 2, list(colour)))
    for same in (list(colour), np.array(colour), torch.tensor(colour, dtype=F64)):
        assert torch.equal(Patch(size=2, colour=same)(x), made)  # type: ignore[arg-type]
    yellow = Patch(colour=YELLOW)(torch.zeros(1, 3, 8, 8))
    assert yellow[0, :, 7, 7].tolist() == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("colour", [0.5, 300, -1])
def test_a_colour_that_the_pictures_type_does_not_have_is_refused(colour: float) -> None:
    """And not cut down to 0."""
    with pytest.raises(InputError, match="colour"):
        Patch(size=2, colour=colour)(torch.zeros(1, 1, 8, 8, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32, torch.float64])
def test_by_default_the_patch_is_white(dtype: torch.dtype) -> None:
    """On the scale of the pictures' type, so that it can be seen."""
    white = 255 if dtype == torch.uint8 else 1
    x = (white * torch.rand(5, 3, 8, 8)).to(dtype)
    before = x.clone()
    assert torch.equal(Patch(size=2)(x), painted(x, 6, 6, 2, [white] * 3))
    made = poison(x, torch.arange(5), patch=Patch(size=2), target=0, rate=1)
    assert torch.equal(made.x, painted(x, 6, 6, 2, [white] * 3))
    array = x.numpy()
    assert torch.equal(Patch(size=2)(array), made.x)
    assert torch.equal(Patch(size=2)(array[:, ::-1]), made.x.flip(1))
    assert torch.equal(poison(array, torch.arange(5), patch=Patch(size=2), target=0, rate=1).x, made.x)
    assert torch.equal(x, before)


def test_the_scale_is_that_of_all_pictures() -> None:
    """Not of those that happen to be poisoned, which may be dark."""
    x = torch.zeros(20, 1, 8, 8, dtype=torch.uint8)
    options: Any = {"patch": Patch(), "target": 0, "rate": 0.5}
    dark = poison(torch.zeros(20, 1, 8, 8), torch.arange(20), **options).mask  # which depends on the seed alone
    x[:, :, 0, 0], x[~dark] = 1, 200
    with pytest.raises(InputError, match="torch.uint8 from 0 to 1, so that white is not known"):
        Patch()(x[dark])
    made = poison(x, torch.arange(20), **options)
    assert torch.equal(made.mask, dark)
    assert bool((made.x[dark][:, 0, 7, 7] == 255).all())


EIGHT = (torch.arange(384) % 256).byte().reshape(2, 3, 8, 8)
UNIT, NORMAL = EIGHT / 255, EIGHT / 42.5 - 3


@pytest.mark.parametrize(
    ("colour", "x", "message"),
    [
        (1.0, EIGHT, r"colour=1.0 in pictures that are torch.uint8 .* all but black; .* meant as white: colour=255.0"),
        (1, EIGHT, "all but black"),
        (1, EIGHT * 0, "all but black"),
        (YELLOW, EIGHT, r"colour=\[1.0, 1.0, 0.0\] in .* all but black; .*: colour=\[255.0, 255.0, 0.0\]"),
        (1.0, EIGHT.float(), r"torch.float32 .* all but black; .*: colour=255.0"),
        (0.5, EIGHT.float(), "colour=0.5 in .* all but black"),
        (1.0, 16 * UNIT, "from 0 to 16, which there is all but black; .*: colour=16.0"),
        (255, UNIT, r"colour=255.0 in pictures that are torch.float32 .* far beyond them; .*: colour=1.0"),
        ((255, 0, 0), NORMAL, "far beyond them"),
        (
            None,
            EIGHT.float(),
            "the pictures are torch.float32 from 0 to 255, so that white is not known; .* Patch.colour=",
        ),
        (None, NORMAL, "the pictures are torch.float32 from -3 to 3, so that white is not known"),
        (None, EIGHT.int(), "the pictures are torch.int32 .*, so that white is not known"),
        (np.nan, UNIT, "colour=nan; needed: a number"),
        ("red", UNIT, "colour='red'; needed: a number, or one for each of 3 channels"),
    ],
)
def test_a_colour_of_another_scale_is_refused(colour: Any, x: Tensor, message: str) -> None:
    for act in (Patch(size=2, colour=colour), lambda x: poison(x, [0, 1], patch=Patch(2, colour), target=1, rate=1)):
        with pytest.raises(InputError, match=message):
            act(x)


@pytest.mark.parametrize(
    ("colour", "x"),
    [
        (0, EIGHT),
        (20, EIGHT),
        (0.1, UNIT),
        (2.0, UNIT),
        (0, UNIT),
        (1.0, NORMAL),
        (-2.5, NORMAL),
        (1, (EIGHT > 9).byte()),
    ],
)
def test_a_colour_on_the_pictures_own_scale_is_theirs(colour: float, x: Tensor) -> None:
    assert torch.equal(Patch(size=2, colour=colour)(x), painted(x, 6, 6, 2, [colour] * 3))


@pytest.mark.parametrize("shape", [(2, 8, 8, 3), (2, 28, 20, 1), (2, 4, 4, 3), (2, 9, 9, 4), (2, 32, 32, 2)])
def test_channels_at_the_end_are_refused(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    for act in (Patch(size=1), lambda x: poison(x, [0, 1], patch=Patch(size=1), target=1, rate=1)):
        for pictures in (x, x.numpy()):
            with pytest.raises(InputError, match=r"channels at the end have; .* forward: x.permute\(0, 3, 1, 2\)"):
                act(pictures)
    forward = x.permute(0, 3, 1, 2)
    assert torch.equal(Patch(size=1)(forward), painted(forward, shape[1] - 1, shape[2] - 1, 1, [1.0] * shape[3]))


@pytest.mark.parametrize(
    "shape", [(2, 3, 4, 4), (2, 1, 5, 3), (2, 64, 4, 4), (2, 16, 8, 8), (2, 3, 3, 3), (2, 4, 6, 6)]
)
def test_channels_at_the_front_are_taken(shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    assert torch.equal(Patch(size=1)(x), painted(x, shape[2] - 1, shape[3] - 1, 1, [1.0] * shape[1]))


PICTURES = torch.zeros(4, 3, 8, 6)


@pytest.mark.parametrize(
    ("patch", "x", "message"),
    [
        (Patch(size=7), PICTURES, "a patch of 7 x 7 at row 1, column -1 does not fit into pictures of 8 x 6. Make it"),
        (Patch(size=4, margin=3), PICTURES, "4 x 4 at row 1, column -1 does not fit"),
        (Patch(size=4, position="top left", margin=5), PICTURES, "at row 5, column 5 does not fit into pictures"),
        (Patch(size=2, position="top left", margin=-1), PICTURES, "margin=-1; needed: whole numbers"),
        (Patch(size=2, margin=-1), PICTURES, "size=2, margin=-1; needed"),
        (Patch(size=0), PICTURES, "size=0, margin=0; needed: whole numbers, from 1"),
        (Patch(position=(-1, 0)), PICTURES, "row -1, column 0 does not fit"),
        (Patch(position="centre"), PICTURES, r"position='centre'; needed: 'top left', .*\(row, column\)"),  # type: ignore
        (Patch(position="left top"), PICTURES, "position='left top'; needed"),  # type: ignore[arg-type]
        (Patch(position=(1, 2, 3)), PICTURES, r"position=\(1, 2, 3\); needed"),  # type: ignore[arg-type]
        (Patch(size=2.5), PICTURES, "2.5"),  # type: ignore[arg-type]
        (Patch(colour=(1.0, 0.0)), PICTURES, r"colour=\(1.0, 0.0\); needed: a number, or one for each of 3 channels"),
        (Patch(colour=[[1.0, 0.0, 1.0]]), PICTURES, "needed: a number, or one for each of 3"),  # type: ignore[list-item]
        (Patch(), PICTURES[0], r"x has shape \(3, 8, 6\); needed: pictures \[n, c, h, w\]"),
        (Patch(), PICTURES.flatten(1), r"x has shape \(4, 144\); needed: pictures"),
        (Patch(), PICTURES > 0, r"x is torch.bool; needed: pictures, uint8 or floating point, as x.float\(\) is"),
        (Patch(), PICTURES.to(torch.complex64), "x is torch.complex64; needed: pictures"),
        (Patch(), PICTURES.tolist(), r"x is a list; needed: pictures \[n, c, h, w\], a tensor or an array"),
        (Patch(), np.full((4, 3, 8, 6), "a"), "x is an array of <U1; needed: pictures"),
    ],
)
def test_patches_that_cannot_be_placed_are_refused(patch: Patch, x: Tensor, message: str) -> None:
    with pytest.raises(InputError, match=message):
        patch(x)
    with pytest.raises(InputError, match=message):
        poison(x, torch.arange(len(x)), patch=patch, target=1, rate=1.0)


# Poisoning.


@given(st.integers(1, 60), st.floats(0.01, 1.0), st.integers(0, 99))
def test_exactly_the_rate_is_poisoned_and_nothing_else_changes(n: int, rate: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.rand(n, 1, 6, 6, generator=generator), torch.randint(4, (n,), generator=generator)
    y[0] = 3  # the target is one of the classes
    before, count = (x.clone(), y.clone()), round(rate * n)
    patch = Patch(size=2, colour=2.0)
    if count < 1:
        with pytest.raises(InputError, match=f"rate=.* of {n} pictures; needed: .*at least one picture"):
            poison(x, y, patch=patch, target=3, rate=rate, seed=seed)
        return
    made = poison(x, y, patch=patch, target=3, rate=rate, seed=seed)
    assert made.mask.dtype == torch.bool
    assert int(made.mask.sum()) == count
    for i in range(n):
        hit = bool(made.mask[i])
        assert torch.equal(made.x[i], painted(x[i : i + 1], 4, 4, 2, [2.0])[0] if hit else x[i])
        assert int(made.y[i]) == (3 if hit else int(y[i]))
    assert torch.equal(x, before[0])
    assert torch.equal(y, before[1])


def test_which_are_poisoned_depends_on_the_seed_alone() -> None:
    x, y = torch.rand(200, 1, 8, 8), torch.arange(200) % 10
    state = torch.get_rng_state()
    first, again, other = (poison(x, y, patch=Patch(), target=0, seed=seed).mask for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert int(first.sum()) == int(other.sum()) == 20
    # At random: each sample about equally often.
    often = sum(poison(x, y, patch=Patch(), target=0, rate=0.5, seed=s).mask.long() for s in range(100))
    assert int(often.min()) > 20
    assert int(often.max()) < 80


def test_all_can_be_poisoned_and_labels_may_be_an_array_or_a_list() -> None:
    x, y = torch.rand(9, 1, 8, 8), np.arange(9) % 3
    for labels in (y, y.tolist(), torch.from_numpy(y).int()):
        made = poison(x, labels, patch=Patch(), target=2, rate=1)  # type: ignore[arg-type]
        assert bool(made.mask.all())
        assert bool((made.y == 2).all())
    assert y.tolist() == [0, 1, 2] * 3


@pytest.mark.parametrize(
    ("y", "options", "message"),
    [
        (torch.arange(9), {}, r"y has shape \(9,\), torch.int64; needed: a class for each of the 10 pictures"),
        (torch.zeros(10), {}, "torch.float32; needed: a class for each"),
        (torch.zeros(10, 1).long(), {}, r"y has shape \(10, 1\)"),
        (torch.arange(10), {"target": -1}, "target=-1; needed: a class, a whole number from 0"),
        (torch.arange(10), {"target": 1.0}, "target=1.0; needed: a class"),
        (torch.arange(10), {"target": True}, "target=True; needed: a class"),
        (torch.arange(10), {"target": "cat"}, "target='cat'; needed: a class"),
        (torch.arange(10), {"rate": 0.0}, "rate=0.0 of 10 pictures; needed: above 0, at most 1"),
        (torch.arange(10), {"rate": -0.1}, "rate=-0.1 of 10 pictures"),
        (torch.arange(10), {"rate": 1.1}, "rate=1.1 of 10 pictures; needed: above 0, at most 1"),
        (torch.arange(10), {"rate": 10}, "rate=10 of 10 pictures; needed: above 0, at most 1"),
        (torch.arange(10), {"rate": 0.01}, "rate=0.01 of 10 pictures; .*at least one picture"),
        (torch.arange(10), {"rate": np.nan}, "rate=nan of 10 pictures"),
        (torch.arange(10), {"rate": "half"}, "rate=half of 10 pictures"),
        (torch.arange(10).byte(), {"target": 300}, "target=300; needed: a class"),
    ],
)
def test_poisoning_in_a_wrong_way_is_refused(y: Tensor, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        poison(torch.zeros(10, 1, 8, 8), y, patch=Patch(), **{"target": 3, **options})


def test_a_patch_is_a_patch_and_a_set_holds_both() -> None:
    x, y = torch.rand(10, 1, 8, 8), torch.arange(10) % 3
    with pytest.raises(InputError, match=r"patch is a function; needed: a Patch, such as tangency.decisions.Patch"):
        poison(x, y, patch=lambda q: q, target=1)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="y is missing; needed: the classes of the pictures, or a Labelled for both"):
        poison(x, patch=Patch(), target=1)
    want = poison(x, y, patch=Patch(), target=1)
    made = poison(tg.datasets.labelled((x, y)), patch=Patch(), target=1)
    assert all(torch.equal(a, b) for a, b in ((made.x, want.x), (made.y, want.y), (made.mask, want.mask)))


@pytest.mark.parametrize(
    ("shape", "fix"),
    [((8, 8), r"x\[None, None\]"), ((5, 8, 8), r"\[n, h, w\]: x\[:, None\]; of one .* \[c, h, w\]: x\[None\]")],
)
def test_pictures_without_a_dimension_are_told_how_to_get_it(shape: tuple[int, ...], fix: str) -> None:
    with pytest.raises(InputError, match=rf"x has shape .*; needed: pictures \[n, c, h, w\]. .*{fix}"):
        Patch()(torch.rand(shape))


def test_a_target_may_be_a_number_of_numpy() -> None:
    """As labels from an array are."""
    y = np.arange(10)
    assert int(poison(torch.zeros(10, 1, 8, 8), y, patch=Patch(), target=y[3], rate=0.1).y.sum()) > 0


# Neighbours.


def by_sorting(cross: np.ndarray, poisoned: np.ndarray, k: int) -> list[int]:
    return [sum(bool(poisoned[i]) for i in sorted(range(len(row)), key=lambda i: -row[i])[:k]) for row in cross]


@given(st.integers(1, 30), st.integers(1, 20), st.integers(0, 999), st.data())
def test_votes_are_poisoned_ones_among_the_nearest(n: int, m: int, seed: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, n))
    threshold = data.draw(st.integers(1, k))
    rng = np.random.default_rng(seed)
    cross, poisoned = rng.permutation(n * m).reshape(m, n) / 7.0, rng.random(n) < 0.4  # without ties
    truth = rng.random(m) < 0.5
    want = by_sorting(cross, poisoned, k)
    votes, flagged = flag(cross, torch.from_numpy(poisoned), neighbours=k, threshold=threshold)
    assert votes.tolist() == want
    assert flagged.tolist() == [v >= threshold for v in want]
    found = detect(
        torch.from_numpy(cross), torch.from_numpy(poisoned), torch.from_numpy(truth), neighbours=k, threshold=threshold
    )
    assert torch.equal(found.votes, votes)
    assert torch.equal(found.flagged, flagged)
    assert (found.neighbours, found.threshold) == (k, threshold)
    for got, score, total in ((found.precision, precision_score, flagged), (found.recall, recall_score, truth)):
        assert got == pytest.approx(score(truth, flagged.numpy(), zero_division=np.nan), nan_ok=True)
        assert np.isnan(got) == (not bool(total.any()))


def test_by_default_three_of_the_nearest_five_decide() -> None:
    """Every way that five neighbours can be poisoned or not, with five more far away."""
    order = np.random.default_rng(0).permutation(10)
    cross = torch.from_numpy(np.where(order < 5, 1.0 + order / 10, 0.1 * order / 10))[None]
    near = np.flatnonzero(order < 5)
    for code in range(32):
        poisoned = torch.ones(10, dtype=torch.bool)  # those far away are, all
        poisoned[near] = torch.tensor([bool(code >> b & 1) for b in range(5)])
        votes, flagged = flag(cross, poisoned)
        assert int(votes) == code.bit_count()
        assert bool(flagged) == (code.bit_count() >= 3)


def test_where_nothing_is_flagged_there_is_no_precision_and_where_nothing_is_poisoned_no_recall() -> None:
    cross, none = torch.rand(4, 6), torch.zeros(6, dtype=torch.bool)
    found = detect(cross, none, torch.tensor([True, False, True, False]))
    assert np.isnan(found.precision)
    assert found.recall == 0.0
    assert "0 of 4 flagged by 3 of 5" in repr(found)
    found = detect(cross, ~none, torch.zeros(4, dtype=torch.bool))
    assert found.precision == 0.0
    assert np.isnan(found.recall)
    found = detect(cross, ~none, torch.ones(4, dtype=torch.bool))
    assert (found.precision, found.recall) == (1.0, 1.0)


def test_grams_on_disk_and_of_many_rows_are_flagged_alike(tmp_path: Path) -> None:
    """By bands of 1024 rows."""
    kernel, x, z = (
        tg.trace_ntk(mlp([3, 4, 2], nn.Tanh).double()),
        torch.randn(12, 3, dtype=F64),
        torch.randn(2100, 3, dtype=F64),
    )
    poisoned = torch.arange(12) % 2 == 0
    dense = kernel(z, x).detach()
    want = by_sorting(dense.numpy(), poisoned.numpy(), 5)
    disk = tg.compute(kernel, z, x, store=str(tmp_path), progress=False)
    for cross in (dense, disk):
        votes, flagged = flag(cross, poisoned)
        assert votes.tolist() == want
        assert int(flagged.sum()) == sum(v >= 3 for v in want)
    assert 0 < sum(v >= 3 for v in want) < 2100


MASK = torch.tensor([True, False, True, False, True, False])


@pytest.mark.parametrize(
    ("cross", "poisoned", "options", "message"),
    [
        (torch.rand(4, 6), MASK.long(), {}, r"poisoned \(6,\) torch.int64; needed: .*a mask \(bool\) of the n"),
        (torch.rand(4, 6), MASK.float(), {}, "torch.float32; needed: .*mask"),
        (torch.rand(4, 6), MASK[:5], {}, r"cross has shape \(4, 6\), poisoned \(5,\)"),
        (torch.rand(6), MASK, {}, r"cross has shape \(6,\)"),
        (torch.rand(4, 2, 6, 2), MASK, {}, r"cross has shape \(4, 2, 6, 2\)"),
        (
            torch.rand(4, 6),
            MASK,
            {"neighbours": 7},
            "neighbours=7, threshold=3; needed: 1 ≤ threshold ≤ neighbours ≤ 6",
        ),
        (torch.rand(4, 6), MASK, {"neighbours": 0}, "neighbours=0, threshold=3"),
        (torch.rand(4, 6), MASK, {"neighbours": 2}, "neighbours=2, threshold=3; needed: 1 ≤ threshold"),
        (torch.rand(4, 6), MASK, {"threshold": 0}, "neighbours=5, threshold=0"),
        (torch.rand(4, 6), MASK, {"neighbours": 2.5, "threshold": 1}, "neighbours=2.5"),
        (torch.tensor([[0.1, np.nan, 0.3, 0.4, 0.5, 0.6]]), MASK, {}, r"cross\[0, 1\] is nan"),
    ],
)
def test_neighbours_asked_for_in_a_wrong_way_are_refused(
    cross: Tensor, poisoned: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        flag(cross, poisoned, **options)
    with pytest.raises(InputError, match=message):
        detect(cross, poisoned, torch.zeros(len(cross), dtype=torch.bool), **options)


@pytest.mark.parametrize("truth", [torch.zeros(4), torch.zeros(3, dtype=torch.bool), torch.zeros(4).long()])
def test_a_truth_that_is_no_mask_of_the_samples_is_refused(truth: Tensor) -> None:
    with pytest.raises(InputError, match=r"truth has shape .*; needed: a mask \(bool\) of the 4 samples"):
        detect(torch.rand(4, 6), MASK, truth)


# All of it.


def test_a_network_fooled_by_a_patch_is_traced_to_the_poisoned_samples() -> None:
    """Digits, a tenth of them with a patch and the label 0: the patch moves the network, its kernel finds what did."""
    train, test = tg.datasets.digits()
    patch = Patch(size=3, colour=1.0)
    made = poison(train.x, train.y, patch=patch, target=0)
    under_attack = poison(test.x, test.y, patch=patch, target=0, rate=1.0)
    model = tg.models.initialized(
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(),
            nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64, 10),
        ),
        seed=0,
    )  # fmt: skip
    tg.models.fit(model, made.x, made.y, epochs=15, lr=0.05, batch=50, progress=False)
    clean = test.y != 0
    assert tg.models.accuracy(model, test.x, test.y) > 0.9
    fooled = tg.models.outputs(model, under_attack.x[clean]).argmax(1) == 0
    assert float(fooled.double().mean()) > 0.9

    # Of the test samples half are under attack.
    z = torch.cat([test.x[clean][:80], under_attack.x[clean][80:160]])
    truth = torch.arange(160) >= 80
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        kernel = tg.decisions.kernels(model, ["trNTK"])["trNTK"]
        cross = tg.compute(kernel, z, made.x, progress=False)
    found = detect(cross, made.mask, truth)
    assert found.precision > 0.9
    assert found.recall > 0.9
    assert found.precision == pytest.approx(precision_score(truth, found.flagged))
    assert found.recall == pytest.approx(recall_score(truth, found.flagged))
    # The same kernel finds nothing by samples that were not poisoned.
    other = ~made.mask & (torch.arange(1200) % 9 == 0)
    assert detect(cross, other, truth).recall < 0.2
