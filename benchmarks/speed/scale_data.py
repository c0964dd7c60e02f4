"""Make the inputs of benchmarks/speed/scale.py from the official files.

    python -m benchmarks.speed.scale_data CIFAR_FOLDER COLA_FOLDER VOCABULARY OUT

CIFAR_FOLDER holds data_batch_1.bin … test_batch.bin, COLA_FOLDER train.tsv and dev.tsv (text TAB label), VOCABULARY is
the vocab.txt of BERT's uncased tokenizer.
"""

import sys
from pathlib import Path

import numpy as np
from transformers import BertTokenizerFast


def main(cifar: Path, cola: Path, vocabulary: Path, out: Path) -> None:
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    rows = np.concatenate([np.fromfile(cifar / f"{name}.bin", np.uint8).reshape(-1, 3073) for name in names])
    for k in range(4):
        np.save(out / f"cifar{k}.npy", rows[k * 15000 : (k + 1) * 15000])
    tokenizer = BertTokenizerFast(vocab_file=str(vocabulary), do_lower_case=True)
    lines = [
        line for part in ("train", "dev") for line in (cola / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
    ]
    ids = [tokenizer(line.split("\t")[0])["input_ids"] for line in lines]
    draw, lengths = np.random.default_rng(0), [len(v) for v in ids]
    while len(ids) < 9600:
        n = lengths[draw.integers(len(lengths))]
        ids.append([101, *draw.integers(1000, 30000, n - 2).tolist(), 102])
    padded = np.zeros((len(ids), max(map(len, ids))), np.int16)
    for k, v in enumerate(ids):
        padded[k, : len(v)] = v
    np.save(out / "cola.npy", padded)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:5]))
