"""`tangency shift`: do two data sets differ as a model sees them, where, and in which samples."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from .options import add_output, model_and_data, names, outputs, positive, rows_file, say, write_rows

if TYPE_CHECKING:
    from .._base.types import Json
    from ..representations import Filtered, Shift
    from .options import Commands


def add(commands: "Commands") -> None:
    """Enter this command."""
    command = commands.add_parser(
        "shift",
        help="whether two data sets differ as a model sees them, where, and in which samples: a test and a page",
        description="Compare a target data set with a source as a layer of a model sees both: a test with a p-value, "
        "the components, classes and samples that differ, and which source samples are like the target. Writes one "
        "HTML file that works offline.",
    )
    command.add_argument(
        "function", metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, source, target): samples, or "
        "tangency.datasets.Labelled, which the page can show; or a dict of tangency.shift's arguments. MODULE "
        "may be a file, job.py",
    )  # fmt: skip
    command.add_argument("--out", type=Path, required=True, help="folder for report.html, or the .html file itself")
    command.add_argument("--layers", type=names, help="names or patterns, with commas (default: before the last layer)")
    command.add_argument("--components", type=positive, help="principal components (default: 50, of few samples fewer)")
    command.add_argument(
        "--labels", choices=["predicted"], help="compare the balance of the classes that the model predicts"
    )
    command.add_argument("--samples", type=positive, help="samples of each set that the tests see (default: 2000)")
    command.add_argument("--memory", help="what features may take before they are computed twice (default: 1GiB)")
    command.add_argument("--kept", type=Path, help="a file for the source samples like the target: .csv or .json")
    command.add_argument(
        "--keep", type=_keep, help="how many of them, a part (0.2) or a number (default: all likelier in the target)"
    )
    command.set_defaults(run=_shift, long=True)
    add_output(command)


def _keep(text: str) -> float | int:
    """A part between 0 and 1, or a number of samples."""
    value = int(text) if text.isdecimal() else float(text)
    if not (value >= 1 if isinstance(value, int) else 0 < value < 1):
        raise argparse.ArgumentTypeError(f"{text}; needed: a part between 0 and 1, or a whole number of samples")
    return value


def _shift(args: argparse.Namespace) -> int:
    from .._base import checks, strict_json
    from ..report import page_path, write
    from ..representations import shift

    # Before the work, and before a function that may change the working folder.
    args.out = args.out.absolute()
    page = page_path(args.out)  # refuses what cannot be written
    if args.keep is not None and args.kept is None:
        raise InputError(
            f"--keep {args.keep} says how many samples are kept; give the file for them, too: --kept FILE."
        )
    kept = rows_file(args.kept, "--kept")
    outputs(args, {"--out": page, "--kept": kept})
    checks.memory(args.memory)
    given = {name: getattr(args, name) for name in ("layers", "components", "labels", "samples", "memory")}
    made = model_and_data(args, shift, ("model", "source", "target"), 3, given)
    found = shift(**made, progress=not args.quiet)
    page = write(found, args.out)
    filtered = None if kept is None else found.filter(args.keep)
    if kept is not None and filtered is not None:
        _write_kept(found, filtered, kept)
    if args.json:
        said = {**found.summary(), "report": str(page.resolve()), "kept": None if filtered is None else len(filtered)}
        say(strict_json.text(said, 2))
        return 0
    say(f"\n{found.words()}\n\n{found.table()}\n")
    if filtered is not None:
        say(f"{filtered.sentence()} {kept}")
    say(f"report: {page.resolve()}")
    return 0


def _write_kept(found: "Shift", filtered: "Filtered", to: Path) -> None:
    """A line for each source sample that is kept: its number, its name where it has one, its weight."""
    ids = None if found.source is None else found.source.ids
    rows: list[dict[str, Json]] = [
        {"sample": i, **({"id": ids[i]} if ids else {}), "weight": round(w, 6)}
        for i, w in zip(filtered.index.tolist(), filtered.weights.tolist(), strict=True)
    ]
    write_rows(rows, to)
