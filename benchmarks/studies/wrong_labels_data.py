"""Data sets, networks and wrong labels for benchmarks.studies.wrong_labels.

Each set is drawn anew for each seed: `rows` training samples and up to 500 test samples, disjoint. Texts are features
of a frozen all-MiniLM-L6-v2 (mean over the tokens, 128 at most), computed once and kept; the network is a head on them.
"""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import ROOT, pictures

CACHE = ROOT / "runs" / "wrong_labels"
KINDS, RATES = ("symmetric", "pair", "instance"), (0.05, 0.1, 0.2, 0.4)
# Training samples that are taken by default: what fits into an hour of one core.
SIZES = {
    "dermatology": 250, "vehicle": 600, "satimage": 800, "digits": 800, "newsgroups": 1000, "fashion": 1000,
    "cifar10": 1000,
}  # fmt: skip
TEST, HIDDEN, TOKENS = 500, (256, 128), 128


@dataclass(frozen=True)
class Problem:
    """Training samples with their true labels, clean test samples, and the network that is trained."""

    name: str
    x: Tensor
    y: Tensor
    z: Tensor
    z_y: Tensor
    classes: int
    make: Callable[[], nn.Sequential]
    batch: int = 50
    lr: float = 2e-3


@dataclass(frozen=True)
class Folders:
    """Where data lie: `data` as shared/tools/fetch_data makes it, `shared` with sentiment140."""

    data: Path
    shared: Path


def problem(name: str, folders: Folders, seed: int, rows: int | None = None) -> Problem:
    """A subset of the data, drawn by the seed, standardised by its training samples."""
    x, y = _all(name, folders)
    n = min(rows or SIZES[name], len(y) - min(TEST, len(y) // 4))
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1000 + seed))
    some, others = order[:n], order[n : n + TEST]
    classes = int(y.max()) + 1
    a, b = x[some], x[others]
    if a.dim() == 2:
        mean, spread = a.mean(0), a.std(0).clamp_min(1e-6) if name != "newsgroups" else a.std()
    else:
        mean, spread = a.mean((0, 2, 3), keepdim=True)[0], a.std((0, 2, 3), keepdim=True)[0]
    a, b = (a - mean) / spread, (b - mean) / spread
    make = _network(a, classes)
    return Problem(name, a, y[some], b, y[others], classes, make)


def _network(x: Tensor, classes: int) -> Callable[[], nn.Sequential]:
    """LeNet-5 for images, else an MLP."""
    if x.dim() == 4:
        return lambda: tg.models.lenet5(classes, x.shape[1], x.shape[2])
    return lambda: tg.models.mlp([x.shape[1], *HIDDEN, classes])


_KEPT: dict[str, tuple[Tensor, Tensor]] = {}


def _all(name: str, folders: Folders) -> tuple[Tensor, Tensor]:
    """All samples of a set, read once."""
    if name not in _KEPT:
        _KEPT[name] = _read(name, folders)
    return _KEPT[name]


def _read(name: str, folders: Folders) -> tuple[Tensor, Tensor]:
    if name == "digits":
        from sklearn.datasets import load_digits

        digits = load_digits()
        return torch.tensor(digits.data).float(), torch.tensor(digits.target).long()
    if name == "fashion":
        train, _ = tg.datasets.fashion_mnist(folders.data)
        return pictures(train).float(), train.y
    if name == "cifar10":
        train, _ = tg.datasets.cifar10(folders.data)
        return pictures(train).float(), train.y
    if name == "newsgroups":
        texts, y = _newsgroups(folders.data)
        return embedded(texts, folders.data / "minilm", CACHE / "newsgroups.pt"), y
    return _table(folders.data / "uci" / f"{name}.csv")


def _table(path: Path) -> tuple[Tensor, Tensor]:
    """Numbers, and the class in the last column; rows with missing cells are left out."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row and "?" not in row]
    names = sorted({row[-1] for row in rows})
    x = torch.tensor([[float(v) for v in row[:-1]] for row in rows])
    return x, torch.tensor([names.index(row[-1]) for row in rows])


def _newsgroups(folder: Path, most: int = 2000) -> tuple[list[str], Tensor]:
    """So many posts, drawn once, of all twenty groups; headers and signatures are gone in this copy."""
    lines = (
        (folder / "newsgroups" / "20newsgroups-train.tab")
        .read_text(errors="replace", encoding="utf-8")
        .splitlines()[3:]
    )
    rows = [line.split("\t", 1) for line in lines if "\t" in line]
    names = sorted({row[0] for row in rows})
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:most].tolist()
    return [rows[i][1] for i in order], torch.tensor([names.index(rows[i][0]) for i in order])


def tweets(folders: Folders) -> tuple[list[str], Tensor, Tensor]:
    """The hand-labelled tweets of Sentiment140 that are negative (0) or positive (1): texts, features, labels."""
    path = folders.shared / "sentiment140" / "testdata.manual.2009.06.14.csv"
    with open(path, newline="", encoding="latin-1") as file:
        rows = [(row[0], row[5]) for row in csv.reader(file) if row[0] in "04"]
    texts = [text for _, text in rows]
    features = embedded(texts, folders.data / "minilm", CACHE / "tweets.pt")
    return texts, features, torch.tensor([int(label == "4") for label, _ in rows])


def embedded(texts: list[str], folder: Path, cache: Path) -> Tensor:
    """Features of MiniLM [n, 384], from the cache where they are there."""
    if cache.exists():
        kept: Tensor = torch.load(cache)
        return kept
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
    found = torch.zeros(len(texts), model.config.hidden_size)
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))  # little padding
    with torch.no_grad():
        for start in range(0, len(order), 16):
            some = order[start : start + 16]
            words = tokenizer(
                [texts[i] for i in some], padding=True, truncation=True, max_length=TOKENS, return_tensors="pt"
            )
            hidden, mask = model(**words).last_hidden_state, words["attention_mask"][..., None].float()
            found[some] = torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)
    cache.parent.mkdir(parents=True, exist_ok=True)
    torch.save(found, cache)
    return found


def noisy(p: Problem, kind: str, rate: float, seed: int) -> Tensor:
    """Labels of which exactly round(rate·n) are wrong: uniform, to the next class, or where a weak classifier errs."""
    n, g = len(p.y), torch.Generator().manual_seed(2000 + seed)
    count = round(rate * n)
    chance, to = torch.ones(n).double(), (p.y + 1) % p.classes
    if kind == "symmetric":
        to = (p.y + torch.randint(1, p.classes, (n,), generator=g)) % p.classes
    elif kind == "instance":
        chance, to = _unsure(p)
    given = p.y.clone()
    if count:
        flipped = torch.multinomial(chance, count, generator=g)
        given[flipped] = to[flipped]
    return given


def _unsure(p: Problem) -> tuple[Tensor, Tensor]:
    """1 - p(true class) and the runner-up, by logistic regression on 20 principal components, out of fold."""
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import KFold
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y = p.x.flatten(1).numpy(), p.y.numpy()
    said = np.full((len(y), p.classes), 1e-6)
    for train, test in KFold(3, shuffle=True, random_state=0).split(x):
        parts = PCA(min(20, x.shape[1]), random_state=0), StandardScaler(), LogisticRegression(C=0.1, max_iter=300)
        weak = make_pipeline(*parts).fit(x[train], y[train])
        said[np.ix_(test, weak.classes_)] = weak.predict_proba(x[test])
    probability = torch.tensor(said)
    sure = probability[torch.arange(len(y)), p.y]
    others = probability.scatter(1, p.y[:, None], -1.0)
    return (1 - sure).clamp_min(1e-4), others.argmax(1)
