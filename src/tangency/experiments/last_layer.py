"""Qadeer et al. 2023, Table 5: a linear probe against fine-tuning, on 359 tweets; here with MiniLM, CoLA and SST-2 too.

The published model is GPT-2, which is no part of this; what can be compared is the order, and the gaps.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache, lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from .._base.progress import bar
from ..errors import InputError
from ..models import Recipe, fit
from ..representations import Refit, refit_last_layer
from .sentences import Texts, embedded, read_pairs, read_tweets, sentences, tokens, with_lora
from .table import Kept, Options, Row, Table, mean

SETS = {"tweets": "359 tweets", "cola": "CoLA", "sst2": "SST-2"}
METHODS = {
    "random": "random weights + refit",
    "probe": "trained weights + refit (linear probe)",
    "lora": "LoRA (rank 8)",
    "finetune": "fine-tuning",
}
REFITTED = "fine-tuning + refit"
# Training and test accuracy in percent on the tweets, GPT-2; the adapter there was quantised, too.
LAST_PUBLISHED = {
    "random": ("85.7 ± 0.27", "57.8 ± 1.05"), "probe": ("95.3 ± 0.15", "86.3 ± 0.55"),
    "finetune": ("99.9 ± 0.02", "83.7 ± 0.81"), "lora": ("70.0 ± 0.28", "66.9 ± 0.77"),
}  # fmt: skip
SHUFFLES, KNOWN = 50, 150  # of the tweets, and how many of each class are for training; as published
QUICK_SHUFFLES = 2
# As BERT is usually fine-tuned, and its adapters; chosen before anything was measured, and not tuned.
TUNING = Recipe(epochs=10, batch=32, lr=5e-5, optimizer="adamw", weight_decay=0.01, schedule="onecycle", warmup=0.1)
ADAPTING = TUNING.but(lr=5e-4, weight_decay=0.0)
EPOCHS = {"tweets": 10, "cola": 3, "sst2": 3}  # ten as published; three as usual for sets of this size
ON_GPU = 10  # processes that share a GPU: each waits for launches most of the time (heuristic)
LAST_NOTES = (
    "MiniLM (6 layers, width 384) with a linear layer on the mean of its tokens; published: GPT-2 (12 layers, 768).",
    "Refit: `refit_last_layer`, the penalty by 5 folds of the training set. Published probes ran for ten epochs.",
    "Random weights: drawn anew for every shuffle or seed. LoRA: published with a 4-bit GPT-2 (QLoRA), here without.",
    "Fine-tuning: AdamW, batches of 32, rate 5e-5 (LoRA 5e-4) up over a tenth and down again, 10 epochs (tweets) or 3,",
    "  as is usual; not tuned. '+ refit': then the last layer at its optimum, begun from the fine-tuned one.",
    "±: of the tweets the standard error over shuffles of 300/59; of CoLA and SST-2 over the dev sentences (seeds are",
    "  averaged for each sentence first). MCC: Matthews' correlation, CoLA's usual score.",
)


class LastTask(NamedTuple):
    """One fit: which method, on which set, with which shuffle or seed."""

    method: str
    name: str
    seed: int
    folder: Path | None
    device: str

    @property
    def key(self) -> str:
        """What it is called where it is kept."""
        return f"{self.method}, {self.name}, {self.seed}"


def read_split(folder: Path | None, name: str, seed: int) -> tuple[Texts, Tensor, Tensor]:
    """All texts of a set, and which are for training and testing: a shuffle of the tweets, else the set's own parts."""
    texts, known = read_set(folder, name)
    if name == "tweets":
        order = torch.randperm(len(texts.y), generator=torch.Generator().manual_seed(seed))
        of_class = [order[texts.y[order] == c] for c in (0, 1)]
        return texts, torch.cat([v[:known] for v in of_class]), torch.cat([v[known:] for v in of_class])
    n = torch.arange(len(texts.y))
    return texts, n[:known], n[known:]


@cache
def read_set(folder: Path | None, name: str) -> tuple[Texts, int]:
    """All texts of a set, and how many are for training: of the tweets of each class, else the first so many."""
    if folder is None:
        return _made(), 40
    if name == "tweets":
        return tokens(folder, *read_tweets(folder)), KNOWN
    train, dev = (read_pairs(folder, name, part) for part in ("train", "dev"))
    return tokens(folder, train[0] + dev[0], train[1] + dev[1]), len(train[0])


def _made() -> Texts:
    """Made sentences for --quick: a class has some words of its own."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(2, 64, (120, 12), generator=generator)
    y = (torch.arange(120) % 2).long()
    for k in range(3):
        ids[torch.arange(120), torch.randint(12, (120,), generator=generator)] = 2 + k % 2 + 2 * y
    return Texts({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, y)


@lru_cache(2)  # shuffles of the tweets have the same features
def features(folder: Path | None, name: str, device: str, random: int | None) -> Tensor:
    """Of all texts of a set, on the CPU: at trained weights, or at random ones of this seed."""
    model = sentences(folder, seed=random or 0, trained=random is None).to(device)
    return embedded(model, read_set(folder, name)[0].x).cpu()


def run_task(task: LastTask) -> Row:
    """One fit: accuracies, and which test texts were right."""
    texts, train, test = read_split(task.folder, task.name, task.seed if task.name == "tweets" else 0)

    def refit(head: nn.Module, phi: Tensor, start: Literal["network", "zero"]) -> Refit:
        """The last layer sees nothing but features, which are computed once; such small fits belong on a CPU."""
        known, asked = ((phi[index], texts.y[index]) for index in (train, test))
        return refit_last_layer(head, known, asked, start=start, resamples=1, progress=False)

    if task.method in ("random", "probe"):
        phi = features(task.folder, task.name, task.device, task.seed if task.method == "random" else None)
        return _measured(refit(nn.Linear(phi.shape[1], 2), phi, "zero"))
    model = sentences(task.folder, seed=task.seed)
    if task.method == "lora":
        model = with_lora(model, task.seed)
    recipe = (ADAPTING if task.method == "lora" else TUNING).but(epochs=EPOCHS[task.name] if task.folder else 1)
    with tf32():
        fit(model.to(task.device), *texts.select(train), recipe, seed=task.seed, progress=False)
    found = refit(model.head.cpu(), embedded(model.to(task.device), texts.x).cpu(), "network")
    row = _measured(found, before=True)
    return row if task.method == "lora" else {**row, "refit": _measured(found)}


def _measured(found: Refit, before: bool = False) -> Row:
    """Accuracies in percent, and the predictions for the test texts, before or after the refit."""
    assert found.test is not None
    assert found.test.accuracy is not None
    assert found.train.accuracy is not None
    which = "before" if before else "after"
    losses = found.test.losses[0 if before else 1]
    # Of two classes: a text is right where its own has more than half, a loss below log 2.
    right = (losses < 0.6931471805599453).cpu()
    return {
        "train": 100 * getattr(found.train.accuracy, which),
        "test": 100 * getattr(found.test.accuracy, which),
        "right": "".join("1" if v else "0" for v in right.tolist()),
        "loss": getattr(found.test.loss, which),
        "reg": None if before else found.reg,
    }


def run_all(tasks: Sequence[LastTask], workers: int) -> Iterator[tuple[LastTask, Row]]:
    """Each task with its row, as they are done, in so many processes of one thread each; the longest begin first."""
    if min(workers, len(tasks)) < 2:
        for task in tasks:
            yield task, run_task(task)
        return
    # Not forked: torch's threads and CUDA do not live on in a child.
    pool = ProcessPoolExecutor(min(workers, len(tasks)), get_context("spawn"), torch.set_num_threads, (1,))
    try:
        long_first = sorted(tasks, key=lambda task: (task.name == "tweets", task.method in ("random", "probe")))
        waiting = {pool.submit(run_task, task): task for task in long_first}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


@contextmanager
def tf32() -> Iterator[None]:
    """Products of fine-tuning in tf32 on a GPU: what is compared are accuracies, not digits."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def reproduce_last(options: Options) -> Table:
    """Every method on every set, as rows of the table."""
    chosen = options.cases or tuple(name for name in METHODS if name in ("random", "probe") or not options.quick)
    for name in chosen:
        if name not in METHODS:
            raise InputError(f"--cases {name}; needed: some of {', '.join(METHODS)}.")
    folder = None if options.quick else options.folder("a folder with minilm/, sentiment140/, cola/ and sst2/")
    shuffles = QUICK_SHUFFLES if options.quick else SHUFFLES
    spec = {"shuffles": shuffles, "tuning": TUNING, "adapting": ADAPTING, "epochs": EPOCHS}
    kept = Kept(options, "last-layer", spec)
    every = [
        LastTask(method, name, seed, folder, options.device)
        for name in (("tweets",) if options.quick else SETS)
        for method in chosen
        for seed in range(shuffles if name == "tweets" else 1 if method == "probe" else options.seeds)
    ]
    tasks = [task for task in every if task.key not in kept]
    with bar(len(every), "last layer", "fit", done=len(every) - len(tasks), show=options.progress) as step:
        for task, row in run_all(tasks, ON_GPU if options.device.startswith("cuda") else 1):
            kept[task.key] = row
            step(note=task.key)
    rows = list(_rows(every, kept, folder, options.quick))
    title = "The last layer retrained: probe, fine-tuning, LoRA and random features"
    columns = ("set", "method", "fits", "train %", "test %", "MCC", "train % paper", "test % paper")
    return Table(title, columns, tuple(rows), LAST_NOTES, {"runs": dict(kept.rows)})


def _rows(every: Sequence[LastTask], kept: Kept, folder: Path | None, quick: bool) -> Iterator[Row]:
    """A row for each method on each set; fine-tuning has a second one, of its last layer refitted."""
    for name, method in dict.fromkeys((task.name, task.method) for task in every):
        runs = [kept[t.key] for t in every if (t.name, t.method) == (name, method)]
        published = LAST_PUBLISHED[method] if name == "tweets" and not quick else (None, None)
        y = None if name == "tweets" else _asked(folder, name)
        title = "made sentences" if quick else SETS[name]
        yield _row(title, METHODS[method], runs, y, published)
        if all("refit" in run for run in runs):
            yield _row(title, REFITTED, [run["refit"] for run in runs], y, (None, None))


def _row(name: str, method: str, runs: list[Row], y: Tensor | None, published: tuple[str | None, str | None]) -> Row:
    train = [float(run["train"]) for run in runs]
    row: Row = {"set": name, "method": method, "fits": len(runs), "MCC": None}
    row |= {"train % paper": published[0], "test % paper": published[1]}
    if y is None:
        return row | {"train %": spread(train), "test %": spread([float(run["test"]) for run in runs])}
    right = torch.tensor([[float(v) for v in run["right"]] for run in runs], dtype=torch.float64)
    said = torch.where(right == 1, y, 1 - y)
    row["MCC"] = mean([matthews(v, y) for v in said])
    return row | {"train %": spread(train), "test %": spread((100 * right.mean(0)).tolist())}


def _asked(folder: Path | None, name: str) -> Tensor:
    """The classes of the dev sentences."""
    texts, _, test = read_split(folder, name, 0)
    return texts.y[test]


def spread(values: Sequence[float]) -> str:
    """The mean and its standard error, as the paper has them."""
    v = torch.tensor(list(values), dtype=torch.float64)
    return f"{float(v.mean()):.1f}" + (f" ± {float(v.std() / len(v) ** 0.5):.2f}" if len(v) > 1 else "")


def matthews(said: Tensor, y: Tensor) -> float:
    """The correlation of two binary variables; 0 where one is constant."""
    a, b = said.double() - said.double().mean(), y.double() - y.double().mean()
    size = float(a.norm() * b.norm())
    return float(a @ b) / size if size else 0.0
