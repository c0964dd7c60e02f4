"""The command line: parse, call, print."""

import argparse
import importlib
import importlib.util
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ._version import __version__
from .errors import DamagedTile, InputError, TangencyError
from .kernel import Kernel, all_finite
from .tiles.ray import RayExecutor
from .tiles.run import Run
from .tiles.store import StoredGram, open_gram

# How far a tile that is computed again, perhaps on another machine, may be from the stored one, relative to its largest
# entry (heuristic: rounding in other orders).
_CLOSE = {"float64": 1e-9, "float32": 1e-4, "tf32": 5e-3, "float16": 5e-3}


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        return int(args.run(args))
    except KeyboardInterrupt as e:
        print(f"\n{str(e) or 'stopped'}", file=sys.stderr)
        return 130
    except TangencyError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tangency", description="Neural tangent kernels of PyTorch modules.")
    parser.add_argument("--version", action="version", version=f"tangency {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    gram = commands.add_parser(
        "gram",
        help="compute a Gram matrix into a folder, or go on with one",
        description="Compute a Gram matrix tile by tile into a folder. Stop it at any time (Ctrl-C, power failure): "
        "the same command goes on where it stopped.",
    )
    gram.add_argument("function", metavar="MODULE:FUNCTION", help=_FUNCTION)
    gram.add_argument("--store", required=True, help="the folder (or zarr URL) for the matrix")
    gram.add_argument("--memory", help="what may be allocated, e.g. 8GiB (default: 4GiB; on a GPU, what is free)")
    gram.add_argument("--tile", type=_positive, help="samples on a side of a tile (default: from the memory)")
    where = gram.add_mutually_exclusive_group()
    where.add_argument("--gpus", action="store_true", help="a worker on every visible GPU")
    where.add_argument("--ray", metavar="ADDRESS", help="workers on a Ray cluster: auto, or ray://host:10001")
    gram.add_argument("--quiet", action="store_true", help="no progress bar")
    gram.set_defaults(run=_gram)

    status = commands.add_parser("status", help="what a folder holds and how far it is")
    status.add_argument("store")
    status.add_argument("--json", action="store_true", help="for machines")
    status.set_defaults(run=_status)

    verify = commands.add_parser(
        "verify",
        help="check all checksums, and compute some tiles again",
        description="Check the checksum of every finished tile, and compute some of them again to compare.",
    )
    verify.add_argument("store")
    verify.add_argument(
        "function", metavar="MODULE:FUNCTION", nargs="?", help="default: what `tangency gram` was given"
    )
    verify.add_argument("--sample", type=int, default=20, help="how many tiles to compute again (default: 20)")
    verify.add_argument("--seed", type=int, default=0, help="which ones")
    verify.set_defaults(run=_verify)
    return parser


_FUNCTION = "a function without arguments that returns (kernel, x) or (kernel, x1, x2); MODULE may be a file, job.py"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}; needed: at least 1")
    return value


def _gram(args: argparse.Namespace) -> int:
    kernel, x1, x2 = _call(args.function)
    executor: Any = RayExecutor(args.ray) if args.ray else "gpus" if args.gpus else None
    start = time.perf_counter()
    try:
        run = Run(kernel, x1, x2, args.memory, args.function)
        made = run.compute(args.store, args.tile, executor, not args.quiet)
    finally:
        if args.ray:
            executor.close()
    print(f"{args.store}: {_size(made.shape)} {str(made.dtype).removeprefix('torch.')}, complete after ", end="")
    print(f"{time.perf_counter() - start:.1f} s. Open it with tangency.open_gram({args.store!r}).")
    return 0


def _status(args: argparse.Namespace) -> int:
    gram = open_gram(args.store)
    done, count = gram.progress
    report = {
        "store": args.store,
        "shape": list(gram.shape),
        "dtype": str(gram.dtype).removeprefix("torch."),
        "tile": gram.store.plan.rows,
        "finished": done,
        "tiles": count,
        "complete": done >= count,
        "function": gram.store.function,
        "manifest": gram.manifest,
    }
    if args.json:
        print(json.dumps(report, indent=2))
        return 0
    kernel = gram.manifest["kernel"]
    names = [kernel["kernel"], *(k["kernel"] for k in _inner(kernel))]
    print(f"{args.store}: {_size(gram.shape)} {report['dtype']}, {' of '.join(names)}")
    state = "complete" if report["complete"] else f"{done / count:.1%}"
    print(f"{done} of {count} tiles of {report['tile']} samples a side ({state})")
    if not report["complete"] and gram.store.function:
        print(f"go on: tangency gram {gram.store.function} --store {args.store}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    gram = open_gram(args.store)
    finished = gram.store.finished()
    damaged = [str(why) for _, why in gram.store.damaged(finished)]
    for why in damaged:
        print(f"damaged: {why}")
    print(f"{len(finished) - len(damaged)} of {len(finished)} finished tiles match their checksums")
    function = args.function or gram.store.function
    if args.sample < 1 or not finished:
        return int(bool(damaged))
    if function is None:
        raise InputError(
            f"{args.store} does not say how it was made. Give the function: tangency verify STORE MODULE:FUNCTION."
        )
    wrong = _again(gram, function, sorted(finished), args)
    return int(bool(damaged or wrong))


def _again(gram: StoredGram, function: str, finished: list[tuple[int, int]], args: argparse.Namespace) -> int:
    """Compute some tiles again; how many differ by more than rounding."""
    kernel, x1, x2 = _call(function)
    run = Run(kernel, x1, x2)
    run.require_same(gram.store)
    precision = next(
        (k["dtype"] for k in (gram.manifest["kernel"], *_inner(gram.manifest["kernel"])) if "dtype" in k), ""
    )
    some = random.Random(args.seed).sample(finished, min(args.sample, len(finished)))
    wrong = equal = 0
    worst = 0.0
    for i, j in some:
        tile = run.one(gram.store.plan, i, j)
        try:
            stored = torch.from_numpy(gram.store.read(i, j))
        except DamagedTile:
            continue
        gap = float((tile - stored).abs().max() / tile.abs().max().clamp_min(1e-300))
        gap = gap if all_finite(stored) else float("inf")
        worst, equal = max(worst, gap), equal + bool(torch.equal(tile, stored))
        if gap > _CLOSE.get(precision, 1e-4):
            wrong += 1
            print(f"wrong: tile {i}, {j} differs from what the kernel gives now by {gap:.2g} of its largest entry")
    print(f"{len(some)} tiles computed again: {equal} equal bit for bit, largest difference {worst:.2g} (relative)")
    return wrong


def _call(name: str) -> tuple[Kernel, Any, Any]:
    """What MODULE:FUNCTION returns: kernel, x1, x2 or None."""
    function = _function(name)
    made = function()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], Kernel)):
        kinds = [type(v).__name__ for v in made] if isinstance(made, tuple) else type(made).__name__
        raise InputError(f"{name} returned {kinds}; needed: (kernel, x) or (kernel, x1, x2).")
    return made[0], made[1], made[2] if len(made) == 3 else None


def _function(name: str) -> Callable[[], Any]:
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise InputError(f"{name!r} is not MODULE:FUNCTION, e.g. job:make or path/to/job.py:make.")
    try:
        if where.endswith(".py"):
            path = Path(where).resolve()
            if not path.is_file():
                raise InputError(f"there is no file {where}.")
            sys.path.insert(0, str(path.parent))
            module = importlib.import_module(path.stem)
        else:
            sys.path.insert(0, str(Path.cwd()))
            module = importlib.import_module(where)
    except ModuleNotFoundError as e:
        raise InputError(
            f"{where} cannot be imported: {e}. Run from the folder that holds it, or give the file."
        ) from e
    function = getattr(module, attribute, None)
    if not callable(function):
        raise InputError(f"{where} has no function {attribute!r}.")
    return function


def _inner(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs inside a combined kernel's."""
    of = spec.get("of")
    inner = of if isinstance(of, list) else [] if of is None else [of]
    return [k for one in inner for k in (one, *_inner(one))]


def _size(shape: torch.Size) -> str:
    return " x ".join(f"{n:,}" for n in shape)


if __name__ == "__main__":
    sys.exit(main())
