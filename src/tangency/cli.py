"""The command line: parse, call, print."""

import argparse
import contextlib
import inspect
import io
import os
import random
import shlex
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from . import job
from ._base import checks, machine, strict_json
from ._version import __version__
from .datasets import Labelled
from .decisions import TITLES, Decisions, explain
from .decisions.compared import check_names
from .demo import demo
from .doctor import doctor
from .errors import DamagedTile, InputError, ModelError, NonFiniteError, TangencyError
from .experiments import EXPERIMENTS
from .experiments.cntk import NETWORKS
from .experiments.table import Options, Regression
from .gram.compute import Run
from .gram.ray import RayExecutor
from .gram.shelf import shelf
from .gram.store import Store, StoredGram, open_gram
from .gram.witness import tolerance
from .kernels.kernel import Kernel, all_finite
from .report import page_path, write


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 1 something failed (a damaged tile, no convergence), 2 what was given cannot be used."""
    for stream in (sys.stdout, sys.stderr):  # a terminal that knows no Greek gets escapes
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    if not (sys.argv[1:] if argv is None else argv):
        parser.print_help()
        return 0
    args = parser.parse_args(argv)
    try:
        with _warnings_in_a_line():
            if args.run in (_demo, _explain, _gram, _reproduce):  # long work
                machine.tell_if_busy(torch.get_num_threads())
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as e:
        print(f"\n{str(e) or 'stopped'}", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read the output has had enough: `tangency … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as e:
        if not args.debug:
            return _failed(e)
        if not isinstance(e, job.JobFailed):
            raise
        traceback.print_exception(e.cause)
        return 2


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Where in our code a warning comes from tells nobody anything here."""
    own, warnings.formatwarning = warnings.formatwarning, lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = own


def _failed(e: Exception) -> int:
    """Say what went wrong in one line, and where if that is in the user's code; the exit code."""
    if isinstance(e, job.JobFailed):
        print(f"error: {e}", file=sys.stderr)
        return 2
    if isinstance(e, TangencyError):
        print(f"error: {e}", file=sys.stderr)
        return 2 if isinstance(e, (InputError, ModelError, NonFiniteError)) else 1
    if isinstance(e, OSError) and e.filename is not None:
        print(f"error: {e.filename}: {e.strerror}.", file=sys.stderr)
        return 2
    place = job.where(e)
    print(f"error: {type(e).__name__}: {e}" + (f"\n{place}" if place else ""), file=sys.stderr)
    print("Where it happened: the same command with --debug.", file=sys.stderr)
    return 1


_HELP = """Why did the network say that? Tangent kernels of PyTorch modules, and what they tell about a model.

First steps:
  tangency demo                             train a small network on digits, explain it, write a page to look at
  tangency explain job.py:make --out page   the same for your own model and data: make() returns (model, train, test)
  tangency doctor                           what is installed and missing here, and whether it computes right
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tangency", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="tangency COMMAND --help says more about each.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"tangency {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error happened (traceback)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _explain_options(commands)
    _gram_options(commands)
    _doctor_options(commands)
    for command in commands.choices.values():  # before or after the command, both work
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


def _explain_options(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    demo = commands.add_parser(
        "demo",
        help="explain a small network on bundled data: see what a report looks like",
        description="Train a small CNN on scikit-learn's digits, fit its kernel surrogates, trace its decisions to "
        "training images, and write a page to look at. Under 90 seconds on two cores.",
    )
    demo.add_argument("--out", type=Path, default=Path("demo"), help="folder for the report (default: demo)")
    demo.set_defaults(run=_demo)

    explain = commands.add_parser(
        "explain",
        help="why a trained classifier says what it says: a surrogate, attributions, and a page to look at",
        description="Fit a kernel surrogate to a trained classifier, measure how faithful it is, and trace every "
        "decision to the training samples that made it. Writes one HTML file that works offline.",
    )
    explain.add_argument(
        "function", metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, train, test): the data as (x, y) or "
        "tangency.datasets.Labelled; or a dict of tangency.explain's arguments. MODULE may be a file, job.py",
    )  # fmt: skip
    explain.add_argument("--out", type=Path, required=True, help="folder for report.html, or the .html file itself")
    explain.add_argument(
        "--kernels", type=_names, help=f"some of {', '.join(TITLES)} (default: the first five), with commas"
    )
    explain.add_argument("--samples", type=_positive, help="test samples to explain one by one (default: 500)")
    explain.add_argument("--neighbours", type=_positive, help="training samples to show for each (default: 8)")
    explain.add_argument(
        "--outputs-are", choices=["logits", "probabilities", "log-probabilities"],
        help="what the network's outputs are (default: found from the training data, and said)",
    )  # fmt: skip
    explain.add_argument("--store", type=Path, help="a folder for the Grams: they need not fit in memory, and are kept")
    explain.add_argument("--memory", help="what Gram tiles may take, e.g. 8GiB (default: 4GiB; on a GPU, what is free)")
    explain.set_defaults(run=_explain)
    for command in (demo, explain, _reproduce_options(commands)):
        command.add_argument("--json", action="store_true", help="figures for machines, on standard output")
        command.add_argument("--quiet", action="store_true", help="no progress bar")


def _reproduce_options(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    reproduce = commands.add_parser(
        "reproduce",
        help="a published table, measured again: " + ", ".join(EXPERIMENTS),
        description="Measure a published table again and print ours beside it.\n\n"
        + "\n".join(f"  {e.name}\n    {e.title}\n    {e.needs}" for e in EXPERIMENTS.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    reproduce.add_argument("name", choices=list(EXPERIMENTS), metavar="NAME", help="which (see above)")
    reproduce.add_argument("--data", type=Path, help="the folder with the official files of the data sets")
    reproduce.add_argument(
        "--out", type=Path, help="folder for what is finished: the same command goes on where it was stopped"
    )
    reproduce.add_argument("--quick", action="store_true", help="small, on bundled data, under a minute: does it run?")
    reproduce.add_argument(
        "--seeds",
        type=_positive,
        default=3,
        help="networks to train (surrogate-table1), repeats of the folds (uci); default: 3",
    )
    reproduce.add_argument(
        "--kernels", type=_names, default=(), help="some of the kernels, with commas (tables 2, 3; cntk: ntk, nngp)"
    )
    _cntk_options(reproduce)
    reproduce.set_defaults(run=_reproduce)
    return reproduce


def _cntk_options(reproduce: argparse.ArgumentParser) -> None:
    """None where they are not given: for another experiment they are refused."""
    cntk = reproduce.add_argument_group("cntk alone")
    cntk.add_argument("--network", choices=list(NETWORKS), help="(default: cntk, 11 convolutions and a global average)")
    cntk.add_argument("--samples", type=_positive, help="training images (default: 5000)")
    cntk.add_argument("--test", type=_positive, help="test images (default: 2000)")
    cntk.add_argument("--flips", action="store_true", default=None, help="add the mirror image of every training image")
    cntk.add_argument("--whiten", action="store_true", default=None, help="ZCA, by the training images (as for Myrtle)")
    cntk.add_argument("--dtype", choices=["float32", "float64"], help="(default: float32)")
    cntk.add_argument("--store", type=Path, help="a folder for the Grams, to go on with (default: one in --out)")
    cntk.add_argument(
        "--device", dest="where", type=_device, help="cpu, cuda, cuda:1 (default: a GPU where there is one)"
    )


def _gram_options(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
        help="check all checksums; with a function, compute some tiles again",
        description="Check that every tile is there, and is the one that was written there. Given the function that "
        "makes the kernel, compute some tiles again to compare.",
    )
    verify.add_argument("store")
    verify.add_argument(
        "function", metavar="MODULE:FUNCTION", nargs="?",
        help="what makes the kernel, to compute some tiles again; without it no code runs",
    )  # fmt: skip
    verify.add_argument("--sample", type=_positive, help="how many tiles to compute again (default: 20)")
    verify.add_argument("--seed", type=int, default=0, help="which ones")
    verify.set_defaults(run=_verify)


def _doctor_options(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    doctor = commands.add_parser(
        "doctor",
        help="what is installed, what is missing and how to get it, and whether a kernel comes out right here",
        description="Versions, GPUs, optional libraries, threads, memory and disk of this machine, with advice; and a "
        "small kernel against plain autograd. Exit code 1 if that fails.",
    )
    doctor.add_argument("--json", action="store_true", help="for machines")
    doctor.set_defaults(run=_doctor)


_FUNCTION = "a function without arguments that returns (kernel, x) or (kernel, x1, x2); MODULE may be a file, job.py"


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}; needed: at least 1")
    return value


def _device(text: str) -> str:
    try:
        torch.zeros(1, device=text).item()  # "meta" is a device, too, and has no numbers
    except (RuntimeError, AssertionError) as e:  # no such device, or a torch without it
        raise argparse.ArgumentTypeError(f"{text}: {str(e).partition(chr(10))[0]}") from e
    return text


def _names(text: str) -> tuple[str, ...]:
    """Each once, in the order given."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def _demo(args: argparse.Namespace) -> int:
    page_path(args.out)  # before the work
    return _tell(demo(not args.quiet), args)


def _explain(args: argparse.Namespace) -> int:
    # Before the work, and before a function that may change the working folder.
    args.out, store = args.out.absolute(), None if args.store is None else args.store.absolute()
    page_path(args.out)  # refuses what cannot be written
    check_names(args.kernels)
    checks.memory(args.memory)
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        made = job.call(args.function, "(model, train, test)")
    if isinstance(made, tuple) and len(made) == 3:
        made = dict(zip(("model", "train", "test"), made, strict=True))
    if not isinstance(made, dict) or not {"model", "train", "test"} <= set(made):
        kinds = [type(v).__name__ for v in made] if isinstance(made, tuple) else type(made).__name__
        raise InputError(f"{args.function} returned {kinds}; needed: (model, train, test), or a dict with these.")
    given = {name: getattr(args, name) for name in ("kernels", "outputs_are", "samples", "neighbours", "memory")}
    given["store"] = store
    made |= {name: value for name, value in given.items() if value is not None}
    unknown = set(made) - set(inspect.signature(explain).parameters)
    if unknown:
        raise InputError(
            f"{args.function} returned {checks.some(sorted(unknown))}, which tangency.explain does not take."
        )
    for part in ("train", "test"):
        if isinstance(made[part], Labelled) and not args.json:
            print(made[part].summary())
    return _tell(explain(**made, progress=not args.quiet), args)


def _tell(decisions: Decisions, args: argparse.Namespace) -> int:
    """Write the report, print the figures and where it is."""
    page = write(decisions, args.out)
    if args.json:
        print(strict_json.text({**decisions.summary(), "report": str(page.resolve())}, 2))
        return 0
    facts = decisions.facts
    print(
        f"\n{facts['model']} with {facts['parameters']:,} parameters: {decisions.accuracy:.2%} of "
        f"{facts['test']:,} test ",
        end="",
    )
    print(f"samples right.\nIts surrogates, from {facts['train']:,} training samples:\n\n{decisions.table()}\n")
    print(
        "τ_K: how far the surrogate orders the test samples by the probability of the correct class as the network does"
    )
    print("(1: exactly). TAD: the surrogate's accuracy less the network's.\n")
    print(f"report: {page.resolve()}")
    return 0


def _reproduce(args: argparse.Namespace) -> int:
    names = [f.name for f in fields(Regression)]
    given = {name: value for name in (*names, "where") if (value := getattr(args, name)) is not None}
    if given and args.name != "cntk":
        name = next(iter(given)).replace("where", "device")
        raise InputError(f"--{name} is for cntk; {args.name} does not take it.")
    if args.quick and args.data is not None:
        raise InputError(f"--data {args.data} and --quick, which runs on bundled data; give one of the two.")
    basic = (args.data, args.out, args.quick, args.seeds, args.kernels, not args.quiet)
    options = Options(*basic, given.pop("where", None), Regression(**given))
    begin = time.perf_counter()
    table = EXPERIMENTS[args.name].run(options)
    command = shlex.join(["tangency", *sys.argv[1:]])
    record = {**table.to_dict(), "command": command, "seconds": time.perf_counter() - begin}
    if args.out is not None:
        name = f"{args.name}{'-quick' if args.quick else ''}-table.json"
        (args.out / name).write_text(strict_json.text(record, 1) + "\n")
    print(strict_json.text(record, 2) if args.json else table.table())
    return 0


def _gram(args: argparse.Namespace) -> int:
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
    print(f"{args.store}: {_size(made.shape)} {str(made.dtype).removeprefix('torch.')}, complete after ", end="")
    print(f"{time.perf_counter() - start:.1f} s. Open it with tangency.open_gram({args.store!r}).")
    return 0


def _doctor(args: argparse.Namespace) -> int:
    found = doctor()
    print(strict_json.text(found.to_dict(), 2) if args.json else found.table())
    return int(not found.healthy)


def _status(args: argparse.Namespace) -> int:
    gram = _opened(args.store)
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
        print(strict_json.text(report, 2))
        return 0
    kernel = gram.manifest["kernel"]
    names = [_plain(str(k.get("kernel"))) for k in (kernel, *_inner(kernel))]
    print(f"{args.store}: {_size(gram.shape)} {report['dtype']}, {' of '.join(names)}")
    state = "complete" if report["complete"] else f"{done / count:.1%}"
    print(f"{done} of {count} tiles of {report['tile']} samples a side ({state})")
    if not report["complete"] and gram.store.function:
        print(f"it says it was begun with: tangency gram {_quoted(gram.store.function)} --store {_quoted(args.store)}")
    return 0


def _verify(args: argparse.Namespace) -> int:
    """Code runs only if its user names it here: what a store says it was made with is somebody's words."""
    gram = _opened(args.store)
    if args.function is None and args.sample is not None:
        raise InputError("--sample needs the function that makes the kernel: tangency verify STORE MODULE:FUNCTION.")
    finished, count = gram.store.finished(), gram.store.plan.count
    damaged = [str(why) for _, why in gram.store.damaged(finished)]
    for why in damaged:
        print(f"damaged: {why}")
    print(f"{len(finished) - len(damaged)} of {len(finished)} finished tiles match their checksums")
    if len(finished) < count:
        print(f"unfinished: {count - len(finished)} of {count} tiles are missing")
    wrong = 0
    if args.function is not None:
        wrong = _again(gram, sorted(finished), args)
    elif gram.store.function:
        name = _quoted(gram.store.function)
        print(f"no tile was computed again. It says it was made with {name}; if you trust that file, to compare some:")
        print(f"tangency verify {_quoted(args.store)} {name}")
    else:
        print("no tile was computed again; to compare some: tangency verify STORE MODULE:FUNCTION")
    return int(bool(damaged or wrong or len(finished) < count))


def _again(gram: StoredGram, finished: list[tuple[int, int]], args: argparse.Namespace) -> int:
    """Compute some tiles again; how many differ by more than rounding."""
    kernel, x1, x2 = _call(args.function)
    run = Run(kernel, x1, x2)
    run.require_same(gram.store)
    close = tolerance(gram.manifest["kernel"])
    some = random.Random(args.seed).sample(finished, min(args.sample or 20, len(finished)))
    wrong = equal = 0
    worst = 0.0
    for i, j in some:
        tile = run.tile(gram.store.plan, i, j)
        try:
            stored = torch.from_numpy(gram.store.read(i, j))
        except DamagedTile:
            continue
        gap = float((tile - stored).abs().max() / tile.abs().max().clamp_min(1e-300))
        gap = gap if all_finite(stored) else float("inf")
        worst, equal = max(worst, gap), equal + bool(torch.equal(tile, stored))
        if gap > close:
            wrong += 1
            print(f"wrong: tile {i}, {j} differs from what the kernel gives now by {gap:.2g} of its largest entry")
    print(f"{len(some)} tiles computed again: {equal} equal bit for bit, largest difference {worst:.2g} (relative)")
    return wrong


def _call(name: str) -> tuple[Kernel, object, object]:
    """What MODULE:FUNCTION returns: kernel, x1, x2 or None."""
    made = job.call(name, "(kernel, x)")
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], Kernel)):
        kinds = [type(v).__name__ for v in made] if isinstance(made, tuple) else type(made).__name__
        raise InputError(f"{name} returned {kinds}; needed: (kernel, x) or (kernel, x1, x2).")
    return made[0], made[1], made[2] if len(made) == 3 else None


def _opened(store: str) -> StoredGram:
    """The store that is there: a path that is not is the user's mistake, not a store's."""
    if Store.find(store) is None:
        raise InputError(
            f"there is no Gram store at {_plain(store)}. Make one: tangency gram MODULE:FUNCTION --store "
            f"{_quoted(store)}."
        )
    return open_gram(store)


def _plain(text: str) -> str:
    """Somebody's words for a terminal: control characters are shown, not obeyed."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _quoted(text: str) -> str:
    return shlex.quote(_plain(text))


def _inner(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The specs inside a combined kernel's."""
    of = spec.get("of")
    inner = of if isinstance(of, list) else [] if of is None else [of]
    return [k for one in inner for k in (one, *_inner(one))]


def _size(shape: torch.Size) -> str:
    return " x ".join(f"{n:,}" for n in shape)


if __name__ == "__main__":
    sys.exit(main())
