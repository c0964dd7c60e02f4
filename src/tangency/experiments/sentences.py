"""Texts in two classes, and MiniLM with a linear layer on the mean of its tokens, at its own or at random weights.

The folder of an experiment has `minilm/` (config.json, tokenizer.json, model.safetensors, as
sentence-transformers/all-MiniLM-L6-v2 comes), and `sentiment140/`, `cola/`, `sst2/` with their tables.
"""

import csv
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from .._base.extras import needed
from ..errors import InputError
from ..models import outputs, seeded

TWEETS = "testdata.manual.2009.06.14.csv"
LONGEST = 128  # tokens of a text that are read
BATCH = 64


class Texts(NamedTuple):
    """Texts as MiniLM takes them, padded to the longest, and their classes."""

    x: dict[str, Tensor]
    y: Tensor

    def select(self, index: Tensor) -> "Texts":
        """Some of them."""
        return Texts({name: v[index] for name, v in self.x.items()}, self.y[index])


def read_tweets(folder: Path) -> tuple[list[str], list[int]]:
    """The 359 tweets of Sentiment140 that people have labelled: negative 0, positive 1; neutral ones are left out."""
    path = _file(folder / "sentiment140" / TWEETS)
    with path.open(encoding="latin-1", newline="") as file:
        rows = [(row[5], int(row[0])) for row in csv.reader(file) if len(row) == 6 and row[0] in ("0", "4")]
    return [text for text, _ in rows], [label // 4 for _, label in rows]


def read_pairs(folder: Path, name: str, part: str) -> tuple[list[str], list[int]]:
    """Sentences of CoLA (text, tab, label) or SST-2 (label, tab, text)."""
    lines = _file(folder / name / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
    cells = [line.split("\t") for line in lines if line]
    where = 0 if name == "sst2" else -1
    return [row[where + 1 if where == 0 else 0] for row in cells], [int(row[where]) for row in cells]


def _file(path: Path) -> Path:
    if not path.is_file():
        raise InputError(f"there is no file {path}; needed: a folder with minilm/, sentiment140/, cola/ and sst2/.")
    return path


def tokens(folder: Path, texts: Sequence[str], labels: Sequence[int]) -> Texts:
    """Numbers of words and parts of words, and which of them are padding."""
    with needed("transformers", "this experiment"):
        from tokenizers import Tokenizer
    made = Tokenizer.from_file(str(_file(folder / "minilm" / "tokenizer.json")))
    made.enable_truncation(LONGEST)
    made.enable_padding()
    found = made.encode_batch(list(texts))
    x = {"input_ids": [v.ids for v in found], "attention_mask": [v.attention_mask for v in found]}
    return Texts({name: torch.tensor(v) for name, v in x.items()}, torch.tensor(list(labels)))


class Sentences(nn.Module):
    """A linear layer on the mean of the last hidden layer over the tokens of a text."""

    def __init__(self, encoder: nn.Module, size: int, classes: int = 2) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(size, classes)

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The mean [n, d]."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        kept = attention_mask[:, :, None].to(hidden)
        mean: Tensor = (hidden * kept).sum(1) / kept.sum(1)
        return mean

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Logits [n, classes]."""
        logits: Tensor = self.head(self.embed(input_ids, attention_mask))
        return logits


class _Embedding(nn.Module):
    """The features alone, as a model of their own."""

    def __init__(self, sentences: Sentences) -> None:
        super().__init__()
        self.sentences = sentences

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """[n, d]."""
        return self.sentences.embed(input_ids, attention_mask)


def sentences(folder: Path | None, *, seed: int, trained: bool = True) -> Sentences:
    """MiniLM at its trained weights, or at random ones as BERT is begun (N(0, 0.02²)); of no folder, a tiny BERT."""
    with needed("transformers", "this experiment"):
        from transformers import BertConfig, BertModel
    if folder is None:
        small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        config = BertConfig(vocab_size=64, max_position_embeddings=LONGEST, **small)
    else:
        config = BertConfig.from_json_file(str(_file(folder / "minilm" / "config.json")))
    with seeded(seed):
        model = Sentences(BertModel(config, add_pooling_layer=False), config.hidden_size)
    if trained and folder is not None:
        weights = {k: v.float() if v.is_floating_point() else v for k, v in _weights(folder).items()}
        lacking = model.encoder.load_state_dict(weights, strict=False).missing_keys
        if [name for name in lacking if "position_ids" not in name]:
            raise InputError(f"{folder / 'minilm'} lacks weights: {', '.join(lacking[:3])}, …")
    return model.eval()


@cache
def _weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    found = load_file(str(_file(folder / "minilm" / "model.safetensors")))
    return {name: v for name, v in found.items() if not name.startswith("pooler.")}


def with_lora(model: Sentences, seed: int) -> Sentences:
    """The encoder frozen but for adapters of rank 8 at its queries and values (Hu et al. 2022), by `peft`."""
    with needed("peft", "a low-rank adapter"):
        from peft import LoraConfig, inject_adapter_in_model
    config = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.1, target_modules=["query", "value"])
    with seeded(seed):
        model.encoder = inject_adapter_in_model(config, model.encoder)
    return model


def embedded(model: Sentences, x: dict[str, Tensor]) -> Tensor:
    """The features of texts [n, d]: those of a length together, so that little padding is read."""
    lengths = x["attention_mask"].sum(1)
    order, parts = lengths.argsort(), []
    for index in order.split(BATCH):
        longest = int(lengths[index].max())
        batch = {name: v[index, :longest] for name, v in x.items()}
        parts.append(outputs(_Embedding(model), batch, batch=BATCH))
    phi = torch.cat(parts)
    return phi[order.argsort().to(phi.device)]
