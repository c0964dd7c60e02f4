"""Whole Gram matrices on one GPU, in a store: ResNet18 on CIFAR-10 (60,000 x 60,000), BERT-base on CoLA (9,600).

Run on the GPU machine, where zarr must be importable:

    PYTHONPATH=src python3 -m benchmarks.speed.scale trace --data DIR --store /tmp/trace --out results.json
    PYTHONPATH=src python3 -m benchmarks.speed.scale logit --data DIR --store /tmp/logit --out results.json
    PYTHONPATH=src python3 -m benchmarks.speed.scale bert  --data DIR --store /tmp/bert  --out results.json

DIR holds cifar0.npy … cifar3.npy (rows of CIFAR-10's binary format, 15,000 each, in canonical order) and cola.npy
(token numbers of CoLA's 9,067 sentences, and random ones of lengths drawn from CoLA's up to 9,600, padded with 0).

`benchmarks/speed/scale_data.py` makes them.

A run may be stopped (--stop-after SECONDS) or killed and started again: the seconds of all its commands add up in
STORE.json. They count from the call of `tg.compute` to its return, hashing, planning, probing and writing included;
training and checking are not counted.
"""

import argparse
import json
import platform
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import tangency as tg
from tangency.gram import sweep
from tangency.gram.store import StoredGram

PUBLISHED = {
    "trace": "389 h, one A100 (Engel et al. 2024, Table 4)",
    "logit": "32 h, four V100 (Ortiz-Jiménez et al. 2021, §B); 43 min, four A100 (the best public script)",
    "bert": "1200 h, one A100 (Engel et al. 2024, Table 4)",
}


def cifar(folder: Path, n: int) -> tuple[Tensor, Tensor]:
    """Images, normalised, and labels: 50,000 for training, then 10,000."""
    rows = np.concatenate([np.load(folder / f"cifar{k}.npy") for k in range(4)])[:n]
    x = torch.from_numpy(rows[:, 1:].reshape(-1, 3, 32, 32).copy()).float() / 255
    mean, std = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    return (x - mean[:, None, None]) / std[:, None, None], torch.from_numpy(rows[:, 0].astype(np.int64))


def resnet(x: Tensor, labels: Tensor, path: Path, epochs: int = 4) -> nn.Module:
    """ResNet18 trained for a few epochs (kept beside the store, so that a resumed run has the same weights)."""
    torch.manual_seed(0)
    model = tg.models.resnet18(10).cuda()
    if path.exists():
        model.load_state_dict(torch.load(path))
        return model.eval()
    x, labels = x[:50000].cuda(), labels[:50000].cuda()
    steps = epochs * (len(x) // 512)
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, steps)
    model.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for _ in range(epochs):
        order = torch.randperm(len(x), device="cuda")
        for k in range(len(x) // 512):
            some = order[k * 512 : (k + 1) * 512]
            images = x[some].flip(3) if k % 2 else x[some]
            with torch.autocast("cuda", torch.float16):
                loss = nn.functional.cross_entropy(model(images), labels[some], label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    model = model.eval().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    torch.save(model.state_dict(), path)
    return model


def bert(path: Path) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return BertForSequenceClassification(config).cuda().eval()


class Sentences(Dataset):
    """Token numbers, sorted by length; a batch is padded to its own longest."""

    def __init__(self, ids: np.ndarray) -> None:
        lengths = (ids != 0).sum(1)
        order = np.argsort(lengths, kind="stable")
        self.ids, self.lengths = ids[order].astype(np.int64), lengths[order]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> Tensor:
        return torch.from_numpy(self.ids[k, : self.lengths[k]])

    @staticmethod
    def collate(items: list[Tensor]) -> dict[str, Tensor]:
        ids = nn.utils.rnn.pad_sequence(items, batch_first=True)
        ids = nn.functional.pad(ids, (0, -ids.shape[1] % 4))  # few different shapes
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}


def matrix_rate() -> float:
    """TFLOP/s of a plain product of 16-bit matrices with 32-bit results."""
    a, b = (torch.randn(16384, 16384, device="cuda", dtype=torch.float16) for _ in range(2))
    best = 0.0
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        torch.mm(a, b.T, out_dtype=torch.float32)
        torch.cuda.synchronize()
        best = max(best, 2 * 16384**3 / (time.perf_counter() - start) / 1e12)
    return best


def flops(kernel: Any, inputs: Any, n: int, tile: int) -> float:
    """Multiply-add flops of the whole symmetric job by the cost model's count for one tile."""
    costs = [row.cost.flops for row in kernel.costs(*inputs).rows if row.cost is not None]
    return sum(costs) * (n / tile) ** 2 / 2


def cosine_error(gram: StoredGram, kernel: Any, exact: Any, take: Any, pairs: int, step: int = 20) -> float:
    """Largest difference of cosines over random pairs of finished tiles, against float64."""
    draw, cut, done = random.Random(1), gram.store.plan, sorted(gram.store.finished())
    worst = 0.0
    for _ in range(0, pairs, step):
        at = draw.choice(done)
        rows, columns = cut.block(at[0]), cut.block(at[1], 1)
        p, q = (torch.tensor([draw.randrange(b.start, b.stop) for _ in range(step)]) for b in (rows, columns))
        stored = torch.from_numpy(gram.store.read(*at))[p - rows.start, q - columns.start].double()
        x, y = take(p), take(q)
        got = stored / (kernel.diag(x).double() * kernel.diag(y).double()).sqrt().cpu()
        want = exact(x, y).diagonal().cpu() / (exact.diag(x) * exact.diag(y)).sqrt().cpu()
        worst = max(worst, float((got - want).abs().max()))
    return worst


def job(name: str, folder: Path, beside: Path, n: int | None) -> tuple[Any, Any, Any, Any, int]:
    """(kernel, float64 kernel, inputs, take by numbers, samples)."""
    if name == "bert":
        model, data = bert(beside), Sentences(np.load(folder / "cola.npy")[:n])
        source = tg.from_dataset(data, collate=Sentences.collate)

        def pick(numbers: Tensor) -> Any:
            batch = Sentences.collate([data[int(k)] for k in numbers])
            return {k: v.cuda() for k, v in batch.items()}

        return tg.trace_ntk(model, dtype="float16"), tg.trace_ntk(model, dtype="float64"), source, pick, len(data)
    x, labels = cifar(folder, n or 60000)
    model = resnet(x, labels, beside)
    with torch.no_grad():
        test = slice(50000, None) if len(x) == 60000 else slice(0, None)
        said = torch.cat([model(some.cuda()).argmax(1).cpu() for some in x[test].split(1000)])
    print(f"accuracy {float((said == labels[test]).float().mean()):.3f}", flush=True)
    make = tg.trace_ntk if name == "trace" else lambda m, dtype: tg.head_ntk(m, 0, dtype=dtype)
    return make(model, dtype="float16"), make(model, dtype="float64"), x, lambda k: x[k].cuda(), len(x)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("job", choices=["trace", "logit", "bert"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--store", required=True)
    parser.add_argument("--samples", type=int, help="the first so many only")
    parser.add_argument("--tile", type=int)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--no-overlap", action="store_true", help="prepare blocks on the main stream")
    parser.add_argument("--stop-after", type=int, help="seconds after which to stop, as Ctrl-C would")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    kernel, exact, inputs, take, n = job(args.job, args.data, Path(args.store + ".pt"), args.samples)
    clock = Path(args.store + ".json")
    earlier = json.loads(clock.read_text(encoding="utf-8")) if clock.exists() else []
    torch.cuda.reset_peak_memory_stats()
    if args.no_overlap:
        sweep.SideStream = lambda device: None  # type: ignore[assignment,misc,return-value]
    if args.stop_after:
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(args.stop_after)
    start = time.perf_counter()
    try:
        tg.compute(kernel, inputs, store=args.store, tile=args.tile, progress=True)
        torch.cuda.synchronize()
    except KeyboardInterrupt as e:
        print(e, flush=True)
    finally:
        signal.alarm(0)
        earlier.append(time.perf_counter() - start)
        clock.write_text(json.dumps(earlier), encoding="utf-8")
    gram = tg.open_gram(args.store)
    peak = torch.cuda.max_memory_allocated() / 2**30
    seconds, plan, done = sum(earlier), gram.store.plan, gram.progress[0]
    size = sum(f.stat().st_size for f in Path(args.store).rglob("*") if f.is_file())
    print(f"{args.job}: {seconds:.1f} s, {done} of {plan.count} tiles of {plan.rows}, {peak:.0f} GiB", flush=True)
    result: dict[str, Any] = {
        "samples": n,
        "seconds": seconds,
        "commands": len(earlier),
        "published": PUBLISHED[args.job],
        "tile": plan.rows,
        "tiles_done": done,
        "tiles": plan.count,
        "tiles_per_s": done / seconds,
        "peak_GiB": peak,
        "store_GB": size / 1e9,
        "matrix_TFLOP_per_s": matrix_rate(),
    }
    if done == plan.count:
        begin = time.perf_counter()
        _ = gram @ torch.ones(n)
        result["product_GB_per_s"] = size / 1e9 / (time.perf_counter() - begin)
    if args.job != "bert":  # its tiles differ in length
        block = [inputs[k * plan.rows : (k + 1) * plan.rows].cuda() for k in range(2)]
        result["TFLOP_per_s"] = flops(kernel, block, n, plan.rows) * done / plan.count / seconds / 1e12
        del block
    torch.cuda.empty_cache()
    result["max_cosine_error"], result["pairs"] = cosine_error(gram, kernel, exact, take, args.pairs), args.pairs
    result |= {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "tangency": tg.__version__,
        "command": f"PYTHONPATH=src python3 -m benchmarks.speed.scale {args.job} --data DIR --store STORE",
    }
    print(json.dumps(result), flush=True)
    if args.out:
        args.out.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
