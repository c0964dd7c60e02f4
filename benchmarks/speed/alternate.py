"""Is a change slower? Two source trees in turn, each in processes of its own, the best of several runs of every case.

git worktree add /tmp/before COMMIT
python -m benchmarks.speed.alternate /tmp/before/src --rounds 3 --out FILE   # CPU, one thread: cases.py
python -m benchmarks.speed.alternate /tmp/before/src --gpu --out FILE        # one GPU: ResNet18 tiles, features
python -m benchmarks.speed.alternate /tmp/before/src --stores --out FILE     # Grams on disk: written, read, resumed
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "src"


def cpu() -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    import tangency as tg
    from benchmarks.speed.cases import CASES

    torch.set_num_threads(1)
    for case in CASES.values():
        kernel, x = tg.trace_ntk(case.model()), case.inputs()
        yield case.title, partial(kernel, x)


def gpu() -> Iterator[tuple[str, Callable[[], Any]]]:
    import torch

    import tangency as tg

    torch.manual_seed(0)
    model = tg.models.resnet18().cuda().eval()
    x, y = (torch.randn(2048, 3, 32, 32, device="cuda") for _ in range(2))

    def tile(kernel: Any, n: int) -> Callable[[], Any]:
        def run() -> None:
            kernel(x[:n], y[:n])
            torch.cuda.synchronize()

        return run

    yield "trace, 16-bit factors, 2048 x 2048", tile(tg.trace_ntk(model, dtype="float16"), 2048)
    yield "pseudo, 16-bit factors, 2048 x 2048", tile(tg.pseudo_ntk(model, dtype="float16"), 2048)
    yield "trace, tf32, 512 x 512", tile(tg.trace_ntk(model, dtype="tf32"), 512)
    projected = tg.projected(tg.pseudo_ntk(model, dtype="float16"), 10_240)

    def features() -> None:
        projected.features(x, progress=False)
        torch.cuda.synchronize()

    yield "projected features, 10,240 of 2048 samples", features


def stores() -> Iterator[tuple[str, Callable[[], Any]]]:
    import shutil
    import tempfile
    from itertools import count

    import torch

    import tangency as tg

    torch.manual_seed(0)
    kernel, x = tg.trace_ntk(tg.models.mlp([784, 100, 100, 10])), torch.randn(6000, 784)
    with tempfile.TemporaryDirectory() as folder:
        number, whole = count(), f"{folder}/whole"

        def write(into: str) -> Any:
            return tg.compute(kernel, x, store=into, progress=False, tile=512)

        gram, v = write(whole), torch.randn(6000)
        yield "write 6000 x 6000", lambda: write(f"{folder}/new{next(number)}")
        yield "read: product with a vector", lambda: gram @ v
        halves = []
        for k in range(6):
            halves.append(shutil.copytree(whole, f"{folder}/half{k}"))
            for chunk in sorted(Path(halves[-1]).glob("c/*/*"))[::2]:
                chunk.unlink()
        yield "go on with half of it", lambda: write(halves.pop())
        yield "return a finished one", lambda: write(whole)


def measure(options: argparse.Namespace) -> dict[str, float]:
    """The best of several runs of each case after a first one, in this process."""
    warnings.simplefilter("ignore")
    found, repeats = {}, options.repeats
    for name, run in gpu() if options.gpu else stores() if options.stores else cpu():
        run()
        best = float("inf")
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            best = min(best, time.perf_counter() - start)
        found[name] = best
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="the src folder of the tree to compare with")
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--stores", action="store_true")
    parser.add_argument("--before", default="", help="the other tree's commit, for the record")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--out")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options)))
        return
    best: dict[str, dict[str, float]] = {"before": {}, "now": {}}
    flag = "--gpu" if options.gpu else "--stores" if options.stores else ""
    for _ in range(options.rounds):
        for label, source in (("before", options.other), ("now", str(HERE))):
            command = [
                sys.executable,
                "-m",
                "benchmarks.speed.alternate",
                source,
                "--measure",
                "--repeats",
                str(options.repeats),
            ]
            command += [flag] if flag else []
            environment = os.environ | {"PYTHONPATH": source}
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=ROOT)
            for name, seconds in json.loads(done.stdout.splitlines()[-1]).items():
                best[label][name] = min(seconds, best[label].get(name, float("inf")))
    rows = {k: {"before": best["before"][k], "now": v, "ratio": v / best["before"][k]} for k, v in best["now"].items()}
    for name, row in rows.items():
        print(f"{name:45} {row['before']:8.3f} {row['now']:8.3f}  {row['ratio']:.3f}")
    if options.out:
        from benchmarks.record import save

        said = "python -m benchmarks.speed.alternate BEFORE/src " + flag
        save({"before": options.before, "rounds": options.rounds, "rows": rows}, Path(options.out), said)


if __name__ == "__main__":
    main()
