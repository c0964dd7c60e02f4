"""What a monitor costs: the same training of a ResNet18 without one and with one, in turns, in the same process.

    OMP_NUM_THREADS=1 python -m benchmarks.speed.monitor [--width 16] [--size 16] [--probe 200] [--steps 60] \
        [--batch 32] [--share 0.05] [--rounds 2] [--device cpu] [--out FILE]
    python -m benchmarks.speed.monitor --width 64 --size 32 --batch 128 --steps 2000 --device cuda --out FILE

The kernel is the pseudo-NTK (one backward pass a sample), its probe `--probe` samples, and all default quantities with
targets and loss are recorded. Both trainings start at the same weights and see the same batches, drawn at random; the
runs end at the same weights, which is checked. Processor time of this process is compared, so that what others compute
on the machine does not count (on a GPU: the clock on the wall); the monitor goes by the same clock. Its first record is
always made, and so is its last: a training must be long enough for its share to hold these two.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tangency as tg
from benchmarks.record import RESULTS, save

Clock = Callable[[], float]


def network(args: argparse.Namespace) -> nn.Module:
    make = lambda: tg.models.resnet18(10, width=args.width)  # noqa: E731
    return tg.models.initialized(make, seed=0).to(args.device).train()


def trained(args: argparse.Namespace, clock: Clock, x: Tensor, y: Tensor, watched: bool, log: Path) -> dict[str, Any]:
    """One training; with a monitor, what it recorded."""
    net = network(args)
    sgd = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    draws = torch.Generator().manual_seed(1)
    monitor = None
    start = clock()
    if watched:
        kernel = tg.pseudo_ntk(net)
        probe = x[: args.probe], y[: args.probe]
        options: dict[str, Any] = {"y": probe[1], "loss": F.cross_entropy, "share": args.share, "clock": clock}
        monitor = tg.dynamics.Monitor(kernel, probe[0], log=log, **options)
        monitor.step(0)
    for step in range(1, args.steps + 1):
        rows = torch.randint(len(x), (args.batch,), generator=draws)
        sgd.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        sgd.step()
        if monitor is not None:
            monitor.step(step)
    if monitor is not None:
        monitor.close()
    if args.device == "cuda":
        torch.cuda.synchronize()
    found: dict[str, Any] = {"seconds": clock() - start, "end": [p.detach().clone() for p in net.parameters()]}
    if monitor is not None:
        history = monitor.history()
        found |= {"records": len(history), "skipped": history.skipped, "own_share": monitor.share}
        found |= {"seconds_of_records": history.seconds.tolist(), "verdict": str(history.verdict())}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("width", 16), ("size", 16), ("probe", 200), ("steps", 60), ("batch", 32), ("rounds", 2)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=RESULTS / "monitor.json")
    args = parser.parse_args()
    clock: Clock = time.process_time if args.device == "cpu" else time.perf_counter
    torch.manual_seed(0)
    x = torch.randn(2000, 3, args.size, args.size, device=args.device)
    y = torch.randint(10, (2000,), device=args.device)
    runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for k in range(args.rounds):
            for watched in (False, True):
                runs[watched].append(trained(args, clock, x, y, watched, Path(folder) / f"{k}.jsonl"))
                print({name: v for name, v in runs[watched][-1].items() if name != "end"}, flush=True)
    for a, b in zip(runs[False][0]["end"], runs[True][0]["end"], strict=True):
        assert torch.equal(a, b), "the monitor changed the training"
    plain, with_monitor = (median(run["seconds"] for run in runs[watched]) for watched in (False, True))
    result: dict[str, Any] = {
        "what": f"ResNet18 of width {args.width} on {args.size} x {args.size} pixels, probe of {args.probe} samples",
        "options": {name: getattr(args, name) for name in ("steps", "batch", "share", "rounds", "device")},
        "clock": "processor time" if args.device == "cpu" else "wall",
        "seconds_plain": [run["seconds"] for run in runs[False]],
        "seconds_watched": [run["seconds"] for run in runs[True]],
        "overhead": with_monitor / plain - 1,
        "runs": [{name: v for name, v in run.items() if name != "end"} for run in runs[True]],
        "weights_equal_bit_for_bit": True,
    }
    print(f"overhead: {result['overhead']:.1%} (asked for: {args.share:.0%} at most)")
    save(result, args.out, "python -m benchmarks.speed.monitor " + " ".join(sys.argv[1:]))


if __name__ == "__main__":
    main()
