"""Grams of networks whose gradients are large: what holding them costs, beside the loop that a kernel replaces.

python -m benchmarks.speed.fitting                                # two cores: four networks, n = 8, 32, 128
python -m benchmarks.speed.fitting --cases vit --n 8,24           # some of them
python -m benchmarks.speed.fitting --device cuda --n 256,2048     # one GPU

Every row is a process of its own: `k(x)`, `compute` by default, gradients by a plain loop of autograd and by torch.func
(then multiplied), and the floor: one forward pass with c backward passes of the batch, in micro-batches. The first call
with two samples, in which a kernel is verified, is not counted. Rows are written as they come; those that are there are
not measured again (--again does). A row that does not fit, or takes longer than --limit, says so.
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from benchmarks.peers.common import current_rss, peak_rss
from benchmarks.record import RESULTS, ROOT, save

FORMS = ("k(x)", "compute", "compute, 16 bits", "loop", "torch.func", "floor")
LIMIT = 900.0  # seconds for a row
MOST = {"cpu": 14 << 30, "cuda": 120 << 30}  # bytes of gradients that a loop or torch.func may hold
BATCH = {"cpu": 8, "cuda": 128}  # samples in a micro-batch of the floor


class Vit(nn.Module):
    """ViT-tiny: 224 pixels in patches of 16, 192 wide, 12 layers, 3 heads, 10 outputs: 5.5 million parameters."""

    def __init__(self, width: int = 192, depth: int = 12, heads: int = 3, outputs: int = 10) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.first = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 14 * 14 + 1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        t = self.patches(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.first.expand(len(t), -1, -1), t], 1) + self.places
        return self.head(self.norm(self.layers(t))[:, 0])


class MiniLM(nn.Module):
    """MiniLM's shape: 6 layers of 384, 12 heads, a vocabulary of 30,522, mean over tokens, 2 outputs."""

    def __init__(self, width: int = 384, depth: int = 6, heads: int = 12, outputs: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(30_522, width), nn.Embedding(512, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, F.gelu, batch_first=True)
        self.norm, self.layers = nn.LayerNorm(width), nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, outputs)

    def forward(self, ids: Tensor) -> Tensor:
        t = self.norm(self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device)))
        return self.head(self.layers(t).mean(1))


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.before, self.between = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        qkv = self.qkv(self.before(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, width))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class GPT2(nn.Module):
    """GPT-2 small's shape (124 million parameters, tied) that says the loss of each sequence: one output."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12, vocabulary: int = 50_257) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        for embedding in (self.words, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        t = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        logits = F.linear(self.norm(self.blocks(t)), self.words.weight)
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1, keepdim=True)


class Case(NamedTuple):
    """A network and its inputs."""

    title: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Tensor]
    outputs: int


CASES = {
    "vit": Case("ViT-tiny, 224 pixels, 10 outputs", Vit, lambda n: torch.randn(n, 3, 224, 224), 10),
    "minilm": Case("MiniLM's shape, 64 tokens, 2 outputs", MiniLM, lambda n: torch.randint(30_522, (n, 64)), 2),
    "gpt2": Case("GPT-2 small's shape, 64 tokens, loss", GPT2, lambda n: torch.randint(50_257, (n, 64)), 1),
    "resnet18": Case("ResNet18, 32 pixels, 10 outputs", tg.models.resnet18, lambda n: torch.randn(n, 3, 32, 32), 10),
}


def loop(model: nn.Module, x: Tensor, c: int) -> Tensor:
    """Sample by sample, output by output, by plain autograd; then products of all gradients."""
    parameters = list(model.parameters())
    g = x.new_empty(c, len(x), sum(p.numel() for p in parameters), dtype=torch.float32)
    for i in range(len(x)):
        out = model(x[i : i + 1])[0]
        for j in range(c):
            grads = torch.autograd.grad(out[j], parameters, retain_graph=j < c - 1, allow_unused=True)
            row = [torch.zeros_like(p) if v is None else v for v, p in zip(grads, parameters, strict=True)]
            torch.cat([v.flatten() for v in row], out=g[j, i])
    return torch.stack([rows @ rows.T for rows in g]).sum(0)


def by_func(model: nn.Module, x: Tensor, c: int) -> Tensor:
    """vmap(jacrev) by chunks of samples; then products of all gradients."""
    state = {k: v.detach() for k, v in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def one(state: dict[str, Tensor], sample: Tensor) -> Tensor:
        return torch.func.functional_call(model, {**state, **buffers}, sample[None])[0]

    chunk = 4 if x.device.type == "cpu" else 16
    jacobian = torch.func.vmap(torch.func.jacrev(one), (None, 0))
    total, made = x.new_zeros(len(x), len(x), dtype=torch.float32), list[dict[str, Tensor]]()
    for part in x.split(chunk):
        made.append({k: v.detach().flatten(2) for k, v in jacobian(state, part).items()})
    for k in state:
        g = torch.cat([part.pop(k) for part in made])
        total += g.flatten(1) @ g.flatten(1).T
    return total


def floor(model: nn.Module, x: Tensor, c: int) -> Tensor:
    """A forward pass and c backward passes of the batch: gradients of sums over samples, and no kernel at all."""
    for part in x.split(BATCH[x.device.type]):
        out = model(part)
        for j in range(c):
            torch.autograd.grad(out[:, j].sum(), list(model.parameters()), retain_graph=j < c - 1, allow_unused=True)
    return x.new_zeros(1, dtype=torch.float32)


def job(case: str, form: str, n: int, device: str, memory: str | None) -> dict[str, Any]:
    """One row, measured in this process."""
    torch.manual_seed(0)
    of = CASES[case]
    model, x = of.build().eval().to(device), of.inputs(n).to(device)
    held = n * of.outputs * 4 * sum(p.numel() for p in model.parameters())
    if form in ("loop", "torch.func") and held > MOST[device]:
        return {"skipped": f"{held / 1e9:.0f} GB of gradients, more than {MOST[device] / 1e9:.0f}"}
    kernel = tg.trace_ntk(model, dtype="float16" if "16" in form else None)
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "k(x)": kernel,
        "loop": lambda x: loop(model, x, of.outputs),
        "torch.func": lambda x: by_func(model, x, of.outputs),
        "floor": lambda x: floor(model, x, of.outputs),
    }
    run = forms.get(form, lambda x: tg.compute(kernel, x, memory=memory, progress=False).dense())
    on_gpu = device == "cuda"
    run(x[:2])
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    before, cpu, wall = current_rss(), time.process_time(), time.perf_counter()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = run(x)
    if on_gpu:
        torch.cuda.synchronize()
    row: dict[str, Any] = {"seconds": time.perf_counter() - wall, "cpu_seconds": time.process_time() - cpu}
    row["peak_bytes"] = torch.cuda.max_memory_allocated() if on_gpu else peak_rss()
    row |= {"before_bytes": None if on_gpu else before, "said": list(dict.fromkeys(str(w.message)[:300] for w in said))}
    return row | {"trace": float(result.diagonal().sum()) if result.dim() == 2 else None}


def row_of(args: argparse.Namespace, case: str, form: str, n: int) -> dict[str, Any]:
    """The row from a process of its own, or why there is none."""
    command = [sys.executable, "-m", "benchmarks.speed.fitting", "--job", case, form, str(n), "--device", args.device]
    command += ["--memory", args.memory] if args.memory else []
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=args.limit)
    except subprocess.TimeoutExpired:
        return {"skipped": f"took more than {args.limit:.0f} s", "limit": True}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["killed, for memory it seems"])[-1]
        return {"skipped": f"exit status {done.returncode}: {last[:200]}"}
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    """All rows that were asked for and are not there."""
    args = parse()
    if args.job:
        print(json.dumps(job(args.job[0], args.job[1], int(args.job[2]), args.device, args.memory)))
        return
    result = json.loads(args.out.read_text(encoding="utf-8")) if args.out.exists() else {}
    rows = {(r["device"], r["case"], r["n"], r["form"], r["memory"]): r for r in result.get("rows", [])}
    for case in args.cases.split(","):
        slow: set[str] = set()  # forms for which fewer samples took too long already
        for n in sorted(int(v) for v in args.n.split(",")):
            for form in args.forms.split(";"):
                key = (args.device, case, n, form, args.memory)
                if form == "compute, 16 bits" and args.device == "cpu":
                    continue
                if key not in rows or args.again:
                    late = {"skipped": "fewer samples took too long already"}
                    row = late if form in slow else row_of(args, case, form, n)
                    fixed = {"device": args.device, "case": case, "n": n, "form": form, "memory": args.memory}
                    rows[key] = fixed | row | {"load": os.getloadavg()[0]}
                    command = "python -m benchmarks.speed.fitting " + " ".join(sys.argv[1:])
                    save({"rows": list(rows.values())}, args.out, command.strip())
                    print(json.dumps(rows[key]), flush=True)
                if rows[key].get("limit"):
                    slow.add(form)
    print(table(list(rows.values())))


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: CPU seconds (seconds on a GPU) and GiB at the peak, form by form."""
    lines = ["| device, network | n | " + " | ".join(FORMS) + " |", "|---" * (2 + len(FORMS)) + "|"]
    for device, case, n in dict.fromkeys((r["device"], r["case"], r["n"]) for r in rows):
        of = {r["form"]: r for r in rows if (r["device"], r["case"], r["n"]) == (device, case, n)}
        cells = []
        for form in FORMS:
            r = of.get(form)
            if r is None or "seconds" not in r:
                cells.append("" if r is None else "–")
                continue
            seconds = r["seconds"] if device == "cuda" else r["cpu_seconds"]
            cells.append(f"{seconds:.3g} s, {r['peak_bytes'] / 2**30:.1f} GiB")
        lines.append(f"| {device}, {CASES[case].title} | {n} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help="some of %(default)s")
    parser.add_argument("--forms", default=";".join(FORMS), help="some of %(default)s")
    parser.add_argument("--n", default=None, help="numbers of samples (default: 8,32,128; on a GPU 256,2048)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--memory", default=None, help="a budget for compute (default: its own)")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for a row")
    parser.add_argument("--again", action="store_true", help="measure rows again that are there")
    parser.add_argument("--out", type=Path, default=RESULTS / "fitting.json")
    parser.add_argument("--job", nargs=3, metavar=("CASE", "FORM", "N"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.n = args.n or ("8,32,128" if args.device == "cpu" else "256,2048")
    return args


if __name__ == "__main__":
    main()
