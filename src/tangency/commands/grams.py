"""`tangency gram`, `status`, `verify`: Gram matrices in folders."""

import argparse
import random
import time
from typing import TYPE_CHECKING, Any

from .. import job
from .._base.words import plain
from ..errors import InputError, StoreError
from .options import positive, quoted, say

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..gram.rows import RowMap
    from ..gram.store import StoredGram
    from ..kernels.kernel import Kernel
    from .options import Commands

_FUNCTION = "a function without arguments that returns (kernel, x) or (kernel, x1, x2); MODULE may be a file, job.py"


def add(commands: "Commands") -> None:
    """Enter these commands."""
    gram = commands.add_parser(
        "gram",
        help="compute a Gram matrix into a folder, or go on with one",
        description="Compute a Gram matrix tile by tile into a folder. Stop it at any time (Ctrl-C, power failure): "
        "the same command goes on where it stopped.",
    )
    gram.add_argument("function", metavar="MODULE:FUNCTION", help=_FUNCTION)
    gram.add_argument("--store", required=True, help="the folder (or zarr URL) for the matrix")
    gram.add_argument(
        "--memory", help="what may be allocated, e.g. 8GiB (default: 70%% of what is free; on a GPU, all)"
    )
    gram.add_argument("--tile", type=positive, help="samples on a side of a tile (default: from the memory)")
    where = gram.add_mutually_exclusive_group()
    where.add_argument("--gpus", action="store_true", help="a worker on every visible GPU")
    where.add_argument("--ray", metavar="ADDRESS", help="workers on a Ray cluster: auto, or ray://host:10001")
    gram.add_argument("--quiet", action="store_true", help="no progress bar")
    gram.set_defaults(run=_gram, long=True)

    status = commands.add_parser("status", help="what a folder holds and how far it is")
    status.add_argument("store")
    status.add_argument("--json", action="store_true", help="for machines")
    status.set_defaults(run=_status)

    verify = commands.add_parser(
        "verify",
        help="check all checksums; with a function, compute some tiles again",
        description="Check that every tile is there, and is the one that was written there. Given the function that "
        "makes the kernel, compute some tiles again to compare.",
    )
    verify.add_argument("store")
    verify.add_argument(
        "function", metavar="MODULE:FUNCTION", nargs="?",
        help="what makes the kernel, to compute some tiles again; without it no code runs",
    )  # fmt: skip
    verify.add_argument("--sample", type=positive, help="how many tiles to compute again (default: 20)")
    verify.add_argument("--seed", type=int, default=0, help="which ones")
    verify.set_defaults(run=_verify)


def _gram(args: argparse.Namespace) -> int:
    from .._base import checks
    from ..gram.compute import Run
    from ..gram.ray import RayExecutor
    from ..gram.shelf import shelf
    from ..gram.store import Store

    place = shelf(args.store)  # before the function, which may take hours, or change the working folder
    Store.find(place)
    checks.memory(args.memory)
    kernel, x1, x2 = _call(args.function)
    executor: RayExecutor | str | None = RayExecutor(args.ray) if args.ray else "gpus" if args.gpus else None
    start = time.perf_counter()
    try:
        run = Run(kernel, x1, x2, args.memory, executor, args.function)
        made = run.compute(place, args.tile, not args.quiet)
    finally:
        if isinstance(executor, RayExecutor):
            executor.close()
    say(f"{args.store}: {_size(made.shape)} {str(made.dtype).removeprefix('torch.')}, complete after ", end="")
    say(f"{time.perf_counter() - start:.1f} s. Open it with tangency.open_gram({args.store!r}).")
    return 0


def _status(args: argparse.Namespace) -> int:
    from .._base import strict_json

    gram = _opened(args.store)
    features = _holds_features(gram)
    done, count = gram.progress
    report = {
        "store": args.store,
        "holds": "features" if features else "Gram matrix",
        "shape": list(_shape(gram)),
        "dtype": str(gram.dtype).removeprefix("torch."),
        "tile": gram.store.plan.rows,
        "finished": done,
        "tiles": count,
        "complete": done >= count,
        "function": gram.store.function,
        "manifest": gram.manifest,
    }
    if args.json:
        say(strict_json.text(report, 2))
        return 0
    kernel = gram.manifest["kernel"]
    names = [plain(str(k.get("kernel"))) for k in (kernel, *_inner(kernel))]
    say(f"{args.store}: {_size(_shape(gram))} {report['dtype']}, {' of '.join(names)}")
    state = "complete" if report["complete"] else f"{done / count:.1%}"
    say(f"{done} of {count} {'blocks' if features else 'tiles'} of {report['tile']} samples", end="")
    say(f"{'' if features else ' a side'} ({state})")
    if not report["complete"] and gram.store.function:
        say(f"it says it was begun with: tangency gram {quoted(gram.store.function)} --store {quoted(args.store)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Code runs only if its user names it here: what a store says it was made with is somebody's words."""
    gram = _opened(args.store)
    if args.function is None and args.sample is not None:
        raise InputError("--sample needs the function that makes the kernel: tangency verify STORE MODULE:FUNCTION.")
    found = gram.verify(progress=False)
    for _, why in found.faults:
        say(f"damaged: {why}")
    say(f"{found.finished - len(found.faults)} of {found.finished} finished tiles match their checksums")
    if found.finished < found.tiles:
        say(f"unfinished: {found.tiles - found.finished} of {found.tiles} tiles are missing")
    wrong = 0
    if args.function is not None:
        wrong = _again(gram, sorted(gram.store.finished()), args)
    elif gram.store.function:
        name = quoted(gram.store.function)
        say(f"no tile was computed again. It says it was made with {name}; if you trust that file, to compare some:")
        say(f"tangency verify {quoted(args.store)} {name}")
    else:
        say("no tile was computed again; to compare some: tangency verify STORE MODULE:FUNCTION")
    return int(bool(wrong or not found.sound))


def _again(gram: "StoredGram", finished: list[tuple[int, int]], args: argparse.Namespace) -> int:
    """Compute some tiles again; how many differ by more than rounding."""
    import torch

    from ..gram.compute import Run
    from ..gram.witness import tolerance
    from ..kernels.kernel import all_finite

    kernel, x1, x2 = _call(args.function)
    run = Run(_rows(kernel, args.function) if _holds_features(gram) else kernel, x1, x2)
    run.require_same(gram.store)
    close = tolerance(gram.manifest["kernel"])
    some = random.Random(args.seed).sample(finished, min(args.sample or 20, len(finished)))
    wrong = equal = 0
    worst = 0.0
    for i, j in some:
        tile = run.tile(gram.store.plan, i, j)
        try:
            stored = torch.from_numpy(gram.store.read(i, j))
        except StoreError:  # said already
            continue
        gap = float((tile - stored).abs().max() / tile.abs().max().clamp_min(1e-300))
        gap = gap if all_finite(stored) else float("inf")
        worst, equal = max(worst, gap), equal + bool(torch.equal(tile, stored))
        if gap > close:
            wrong += 1
            say(f"wrong: tile {i}, {j} differs from what the kernel gives now by {gap:.2g} of its largest entry")
    say(f"{len(some)} tiles computed again: {equal} equal bit for bit, largest difference {worst:.2g} (relative)")
    return wrong


def _call(name: str) -> tuple["Kernel", object, object]:
    """What MODULE:FUNCTION returns: kernel, x1, x2 or None."""
    from ..kernels.kernel import Kernel

    made = job.call(name, "(kernel, x)")
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], Kernel)):
        kinds = [type(v).__name__ for v in made] if isinstance(made, tuple) else type(made).__name__
        raise InputError(f"{name} returned {kinds}; needed: (kernel, x) or (kernel, x1, x2).")
    return made[0], made[1], made[2] if len(made) == 3 else None


def _opened(store: str) -> "StoredGram":
    """The store that is there: a path that is not is the user's mistake, not a store's."""
    from ..gram.store import Store, open_store

    if Store.find(store) is None:
        raise InputError(
            f"there is no Gram store at {plain(store)}. Make one: tangency gram MODULE:FUNCTION --store "
            f"{quoted(store)}."
        )
    return open_store(store)


def _holds_features(gram: "StoredGram") -> bool:
    """Whether these are features, which are stored as a matrix with one column of tiles."""
    return bool(gram.manifest["kernel"]["kernel"] == "features")


def _shape(gram: "StoredGram") -> "Sequence[int]":
    """That of the matrix; of features [n, k], or [n, c, k]."""
    if not _holds_features(gram):
        return gram.shape
    n, c, _, k = gram.shape
    return (n, k) if c == 1 else (n, c, k)


def _rows(kernel: "Kernel", name: str) -> "RowMap":
    """What makes the features of a projected kernel."""
    from ..projection.kernel import Projected, ProjectedRows

    if not isinstance(kernel, Projected):
        raise InputError(
            f"{name} returned a {type(kernel).__name__}, and the store holds features; needed: (kernel, x) with the "
            "projected kernel that made them, tg.projected(…)."
        )
    return ProjectedRows(kernel)


def _inner(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs inside a combined kernel's."""
    of = spec.get("of")
    inner = of if isinstance(of, list) else [] if of is None else [of]
    return [k for one in inner for k in (one, *_inner(one))]


def _size(shape: "Sequence[int]") -> str:
    return " x ".join(f"{n:,}" for n in shape)
