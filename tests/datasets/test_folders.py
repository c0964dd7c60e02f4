"""Image folders come back to the byte, in torchvision's order; what would lose something is refused by name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tangency import InputError, MemoryBudgetError, TangencyWarning
from tangency._base import machine
from tangency.datasets import Labelled, folder, labelled

GEN = np.random.default_rng(0)


def save(file: Path, shape: tuple[int, ...] = (4, 5, 3), **options: Any) -> np.ndarray:
    """Write random pixels [h, w] or [h, w, c]."""
    pixels = GEN.integers(0, 256, shape, dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, **options)
    return pixels


def test_bytes_come_back_in_the_order_of_torchvision(tmp_path: Path) -> None:
    names = ["cat/b.png", "cat/a.PNG", "cat/x/1.bmp", "cat/x-y/1.png", "dog/z.tiff", "dog/.hidden.png", "ant/1.ppm"]
    wrote = {name: save(tmp_path / name) for name in names}
    (tmp_path / ".git").mkdir()
    data = folder(tmp_path, progress=False)
    # torchvision: classes sorted; within one, sorted(os.walk(…)), and sorted names in each folder.
    want = []
    for place in ("ant", "cat", "dog"):
        for root, _, files in sorted(os.walk(tmp_path / place, followlinks=True)):
            want += [str((Path(root) / f).relative_to(tmp_path)) for f in sorted(files) if not f.startswith(".")]
    assert data.ids == tuple(want)
    assert data.classes == ("ant", "cat", "dog")
    assert [data.classes[k] for k in data.y.tolist()] == [name.split("/")[0] for name in want]
    for k, name in enumerate(want):
        pixels = torch.from_numpy(wrote[name]).permute(2, 0, 1)
        assert torch.equal(torch.as_tensor(data.show)[k], pixels)
        assert torch.equal(data.x[k], pixels.float() / 255)  # type: ignore[index, call-overload]
    assert data.name == tmp_path.name


def test_ids_stay_with_their_samples() -> None:
    y = [0, 1, 2, 0, 1, 2, 0]
    whole = Labelled(torch.arange(7.0)[:, None], y, ["abc", "b", "c"], ids=[f"id {k}" for k in range(7)])
    train, test = whole.split(4)
    parts = [whole.select([5, 0, 0]), whole.select(slice(2, 5)), whole.only("c", "abc"), whole.take(3, seed=1)]
    for part in [*parts, train, test, whole.with_x(whole.x), labelled(whole, classes=["u", "v", "w"])]:
        assert part.ids == tuple(f"id {int(v)}" for v in torch.as_tensor(part.show)[:, 0])
    assert labelled((torch.rand(2, 1), [0, 1])).select([0]).ids is None
    for ids, message in [
        (["a"], "ids has 1 entries, y has 2"),
        ("ab", "ids is a str; needed: n strings"),
        ([1, 2], r"ids\[0\] is a int; needed: a string"),
        (["a", "\ud800"], r"ids\[1\] has a lone surrogate"),
    ]:
        with pytest.raises(InputError, match=message):
            Labelled(torch.rand(2, 1), [0, 1], ("a", "b"), ids=ids)  # type: ignore[arg-type]


def test_grey_where_all_are_grey(tmp_path: Path) -> None:
    grey = save(tmp_path / "a/1.png", (4, 5))
    Image.new("1", (5, 4), 1).save(tmp_path / "a/2.png")
    data = folder(tmp_path)
    assert data.x.shape == (2, 1, 4, 5)  # type: ignore[union-attr]
    assert torch.as_tensor(data.show)[1].unique().tolist() == [255]
    assert folder(tmp_path, mode="RGB").x.shape == (2, 3, 4, 5)  # type: ignore[union-attr]
    save(tmp_path / "b/1.png")
    mixed = folder(tmp_path)
    assert torch.equal(torch.as_tensor(mixed.show)[0], torch.from_numpy(grey).expand(3, 4, 5))
    assert folder(tmp_path, mode="L").x.shape == (3, 1, 4, 5)  # type: ignore[union-attr]


def tent(n: int, m: int) -> np.ndarray:
    """[m, n]: a new pixel is a mean of the n, whose weights fall off linearly to its neighbours' middles."""
    middles = (np.arange(m) + 0.5) * n / m
    weights = np.maximum(0, 1 - np.abs(np.arange(n) + 0.5 - middles[:, None]) * m / n)
    return weights / weights.sum(1, keepdims=True)


@given(h=st.integers(1, 9), w=st.integers(1, 9))
def test_resizing_is_antialiased_and_keeps_constants(h: int, w: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    root = tmp_path_factory.mktemp("set")
    (root / "a").mkdir()
    Image.new("RGB", (12, 8), (10, 20, 30)).save(root / "a/1.png")
    pixels = save(root / "a/2.png", (18, 18, 3))
    show = torch.as_tensor(folder(root, size=(h, w)).show)
    assert show[0].flatten(1).unique(dim=1).tolist() == [[10], [20], [30]]
    want = np.einsum("hi,wj,ijc->chw", tent(18, h), tent(18, w), pixels.astype(float))
    assert np.abs(show[1].numpy() - want).max() <= 1.0  # Pillow rounds to bytes twice, once along each axis


def test_orientation_palettes_and_opaque_alpha(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    pixels = GEN.integers(0, 256, (4, 6, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90° clockwise
    Image.fromarray(pixels).save(tmp_path / "a/1.png", exif=exif)
    turned = torch.from_numpy(np.rot90(pixels, -1).copy()).permute(2, 0, 1)
    assert torch.equal(torch.as_tensor(folder(tmp_path).show)[0], turned)
    few = Image.fromarray((pixels > 127).astype(np.uint8) * 255).rotate(90, expand=True)
    few.quantize(8).save(tmp_path / "a/2.png")
    opaque = few.copy()
    opaque.putalpha(255)
    opaque.save(tmp_path / "a/3.png")
    show = torch.as_tensor(folder(tmp_path).show)
    want = torch.from_numpy(np.array(few)).permute(2, 0, 1)
    assert torch.equal(show[1], want)
    assert torch.equal(show[2], want)


def test_like_decides(tmp_path: Path) -> None:
    for name in ("train/a/1.png", "train/b/1.png", "test/b/1.png"):
        save(tmp_path / name, (4, 5))
    train = folder(tmp_path / "train")
    test = folder(tmp_path / "test", like=train.with_x(train.x.flatten(1)))  # type: ignore[union-attr]
    assert (test.classes, test.y.tolist()) == (("a", "b"), [1])
    save(tmp_path / "test/b/2.png", (8, 9))
    wrong: list[tuple[dict[str, Any], str]] = [
        ({}, r"8 × 9 \(1: .*2.png …\); needed: that of the training set, 4 × 5. size=\(4, 5\) resizes"),
        ({"size": (3, 3)}, r"size=\(3, 3\), and the training set has \(4, 5\)"),
        ({"mode": "RGB"}, "mode='RGB', and the images of the training set have 1 channels"),
        (
            {"like": labelled((torch.rand(2, 3), [0, 1]))},
            r"like is Labelled\(data.*; needed: the training set, with im",
        ),
        ({"like": 3}, "like is a int; needed: the training set"),
    ]
    for options, message in wrong:
        with pytest.raises(InputError, match=message):
            folder(tmp_path / "test", **{"like": train, **options})
    assert len(folder(tmp_path / "test", like=train, size=(4, 5))) == 2
    save(tmp_path / "test/b/3.png", (4, 5, 3))
    with pytest.raises(InputError, match=r"3.png is in colour, the training set is grey; .* mode='L'"):
        folder(tmp_path / "test", like=train, size=(4, 5))
    assert len(folder(tmp_path / "test", like=train, size=(4, 5), mode="L")) == 3
    save(tmp_path / "test/bb/3.png", (4, 5))
    with pytest.raises(InputError, match=r"subfolder 'bb', which is none of the training set's classes a, b\. Did you"):
        folder(tmp_path / "test", like=train, size=(4, 5), mode="L")


def transparent(file: Path) -> None:
    Image.new("RGBA", (5, 4), (1, 2, 3, 200)).save(file)


def deep(file: Path) -> None:
    """A PNG of 16 bits and three channels, which Pillow reads but cannot write: the header says so."""
    Image.new("RGB", (5, 4)).save(file)
    raw = bytearray(file.read_bytes())
    raw[24] = 16
    raw[29:33] = __import__("zlib").crc32(raw[12:29]).to_bytes(4, "big")
    file.write_bytes(bytes(raw))


BROKEN: list[tuple[str, Callable[[Path], Any], str]] = [
    ("x.png", lambda f: f.write_bytes(b"no image"), r"x.png cannot be read as an image \(UnidentifiedImageError"),
    ("x.jpg", lambda f: f.write_bytes(b""), r"x.jpg cannot be read as an image"),
    ("x.png", lambda f: (save(f, (90, 90, 3)), f.write_bytes(f.read_bytes()[:3000])), r"x.png cannot be read"),
    ("x.png", transparent, "x.png has transparent pixels; needed: none, .*alpha_composite"),
    ("x.png", lambda f: Image.new("I;16", (5, 4)).save(f), r"x.png has more than 8 bits a channel \(mode I;16\)"),
    ("x.png", deep, r"x.png has more than 8 bits a channel \(mode RGB\)"),
    ("x.ppm", lambda f: f.write_bytes(b"P6 5 4 1023\n" + bytes(120)), r"more than 8 bits a channel \(mode RGB\)"),
    ("x.tif", lambda f: Image.new("F", (5, 4)).save(f), r"more than 8 bits a channel \(mode F\)"),
    ("x.jpg", lambda f: Image.new("CMYK", (5, 4)).save(f), "x.jpg is in mode CMYK; needed: grey or RGB"),
    (
        "x.tif",
        lambda f: Image.new("L", (5, 4)).save(f, save_all=True, append_images=[Image.new("L", (5, 4))]),
        "x.tif has 2 frames; needed: one picture",
    ),
    ("x.png", lambda f: os.mkfifo(f), "x.png is no file but a broken link, a pipe or the like"),
    ("x.png", lambda f: f.symlink_to("nowhere.png"), "x.png is no file but a broken link"),
    ("x", lambda f: f.symlink_to(f.parent), "x is a link that leads back to a folder above it; needed: no circles"),
    (
        "x.png",
        lambda f: save(f, (7, 5, 3)),
        r"4 × 5 \(1: .*1.png …\), 7 × 5 \(1: .*x.png …\); needed: one. size=\(h, w\)",
    ),
]


@pytest.mark.parametrize(("name", "make", "message"), BROKEN)
def test_refused_files(name: str, make: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    save(tmp_path / "a/1.png")
    make(tmp_path / "a" / name)
    with pytest.raises(InputError, match=message):
        folder(tmp_path)


def test_refused_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="the folder .*none does not exist; needed: a folder with one subfolder for"):
        folder(tmp_path / "none")
    with pytest.raises(InputError, match="has no subfolder; needed: one for each class"):
        folder(tmp_path)
    save(tmp_path / "a/1.png", (4, 5, 3))
    with pytest.raises(InputError, match="1.png is not a folder"):
        folder(tmp_path / "a/1.png")
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match="class 'b': .* has no image .* Take the folder out if it is no class"):
        folder(tmp_path)
    (tmp_path / "b").rmdir()
    options: list[tuple[dict[str, Any], str]] = [
        ({"size": 3}, r"size=3; needed: \(height, width\)"),
        ({"size": (3, 0)}, r"size=\(3, 0\); needed"),
        ({"mode": "CMYK"}, "mode='CMYK'; needed: 'RGB', 'L'"),
        ({"limit": 0}, "limit=0; needed: the most pixels"),
        ({"limit": 19}, "1.png has 4 × 5 = 20 pixels; needed: at most 19, .*: limit=20"),
    ]
    for given_options, message in options:
        with pytest.raises(InputError, match=message):
            folder(tmp_path, **given_options)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 15)
    assert len(folder(tmp_path)) == 1  # Pillow would warn; our limit decides
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    with pytest.raises(InputError, match=r"1.png: .*decompression bomb.*PIL.Image.MAX_IMAGE_PIXELS, and limit="):
        folder(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(machine, "available_memory", lambda: 5 * 4 * 5 * 3 - 1)
    with pytest.raises(MemoryBudgetError, match="has 1 images of 4 × 5: to read them takes .* Give a smaller size="):
        folder(tmp_path)
    monkeypatch.setattr(os, "scandir", lambda place: (_ for _ in ()).throw(PermissionError(13, "Permission denied")))
    with pytest.raises(InputError, match=r"the folder .* cannot be read \(Permission denied\)"):
        folder(tmp_path)


def test_other_files_are_counted(tmp_path: Path) -> None:
    save(tmp_path / "a/1.png")
    (tmp_path / "a/notes.txt").write_text("", encoding="utf-8")
    save(tmp_path / "loose.png")
    with pytest.warns(TangencyWarning, match=r"2 files were left out, .*: loose.png, a/notes.txt\."):
        assert folder(tmp_path).ids == ("a/1.png",)


def test_links_that_lead_elsewhere_are_followed(tmp_path: Path) -> None:
    save(tmp_path / "set/a/1.png")
    save(tmp_path / "other/2.png")
    (tmp_path / "set/a/more").symlink_to(tmp_path / "other")
    assert folder(tmp_path / "set").ids == ("a/1.png", "a/more/2.png")
