"""What a monitor costs: the same training of a ResNet18 without one and with one, step by step in turns.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.monitor [--width 16] [--size 16] [--probe 200] [--steps 3000] \
        [--batch 32] [--share 0.05] [--device cpu] [--out FILE]
    python -m benchmarks.speed.monitor --width 64 --size 32 --batch 128 --steps 5000 --device cuda --out FILE

The kernel is the pseudo-NTK (one backward pass a sample), its probe `--probe` samples, and all default quantities with
targets and loss are recorded into a log. Both trainings start at the same weights and see the same batches, and end at
the same weights, which is checked. They take turns at each step, so that a machine that is busy is so for both, and
processor time of this process is counted (on a GPU: the clock on the wall). The monitor goes by the watched training's
clock. Its first record and its last are always made: a training must be long enough for its share to hold these two.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, save


class Stopwatch:
    """The time that one of the trainings has had."""

    def __init__(self, device: str) -> None:
        self.gpu = device == "cuda"
        self.total, self.begun = 0.0, -1.0

    def now(self) -> float:
        """Of the machine."""
        if self.gpu:
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def __call__(self) -> float:
        return self.total + (self.now() - self.begun if self.begun >= 0 else 0.0)

    def __enter__(self) -> None:
        self.begun = self.now()

    def __exit__(self, *_: object) -> None:
        self.total, self.begun = self.total + self.now() - self.begun, -1.0


class Training:
    """A ResNet18 with its optimizer, and the time it has taken."""

    def __init__(self, args: argparse.Namespace) -> None:
        make = lambda: tg.models.resnet18(10, width=args.width)  # noqa: E731
        self.net: nn.Module = tg.models.initialized(make, seed=0).to(args.device).train()
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9)
        self.clock = Stopwatch(args.device)

    def step(self, x: Tensor, y: Tensor) -> None:
        self.sgd.zero_grad()
        F.cross_entropy(self.net(x), y).backward()
        self.sgd.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 16), ("size", 16), ("probe", 200), ("steps", 3000), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of both trainings, at most")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "monitor.json")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cudnn.deterministic = True  # else two trainings on a GPU differ by themselves
    x = torch.randn(2000, 3, args.size, args.size, device=args.device)
    y = torch.randint(10, (2000,), device=args.device)
    for _ in range(3):  # what CUDA loads at first use is no monitor's cost
        Training(args).step(x[: args.batch], y[: args.batch])
    plain, watched = Training(args), Training(args)
    draws = torch.Generator().manual_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        kernel, probe = tg.pseudo_ntk(watched.net), slice(0, args.probe)
        options: dict[str, Any] = {"share": args.share, "clock": watched.clock, "log": Path(folder) / "run.jsonl"}
        with watched.clock:
            monitor = tg.dynamics.Monitor(kernel, x[probe], y=y[probe], loss=F.cross_entropy, **options)
            monitor.step(0)
        for step in range(1, args.steps + 1):
            rows = torch.randint(len(x), (args.batch,), generator=draws)
            batch = x[rows], y[rows]
            with plain.clock:
                plain.step(*batch)
            with watched.clock:
                watched.step(*batch)
                monitor.step(step)
            if plain.clock() + watched.clock() > args.seconds:
                args.steps = step
                break
            if step % 200 == 0:
                print(f"step {step}: {plain.clock():.1f} s, {watched.clock():.1f} s with a monitor", flush=True)
        with watched.clock:
            monitor.close()
    ends = zip(plain.net.state_dict().values(), watched.net.state_dict().values(), strict=True)
    same = all(torch.equal(a, b) for a, b in ends)
    assert same or args.device == "cuda", "the monitor changed the training"
    history = monitor.history()
    result: dict[str, Any] = {
        "what": f"ResNet18 of width {args.width} on {args.size} x {args.size} pixels, probe of {args.probe} samples",
        "options": {name: getattr(args, name) for name in ("steps", "batch", "share", "device")},
        "clock": "wall" if args.device == "cuda" else "processor time",
        "seconds_plain": plain.clock(),
        "seconds_watched": watched.clock(),
        "overhead": watched.clock() / plain.clock() - 1,
        "share_by_its_own_clock": monitor.share,
        "records": len(history),
        "skipped": history.skipped,
        "seconds_of_records": history.seconds.tolist(),
        "steps_of_records": [int(step) for step in history.steps.tolist()],
        "verdict": str(history.verdict()),
        "weights_equal_bit_for_bit": same,
    }
    print(f"overhead: {result['overhead']:.1%} (asked for: {args.share:.0%} at most)")
    save(result, args.out, "python -m benchmarks.speed.monitor " + " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
