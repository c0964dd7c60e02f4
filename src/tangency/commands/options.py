"""What several commands have: kinds of arguments, and a model with its data from a function of the user's."""

import argparse
import contextlib
import csv
import io
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from .. import job
from .._base.words import lines, plain
from ..errors import InputError

if TYPE_CHECKING:
    from .._base.files import Places
    from .._base.types import Json

    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]


def positive(text: str) -> int:
    """A whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}; needed: at least 1")
    return value


def names(text: str) -> tuple[str, ...]:
    """Each once, in the order given."""
    return tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))


def indices(text: str) -> tuple[int, ...]:
    """Whole numbers from 0, each once, in the order given."""
    found = tuple(int(name) for name in names(text))
    if not found or min(found) < 0:
        raise argparse.ArgumentTypeError(f"{text!r}; needed: numbers from 0, with commas")
    return found


def say(text: str = "", *, end: str = "\n", error: bool = False, flush: bool = False) -> None:
    """Print: all that commands say goes through here, for names in it may be a stranger's."""
    print(lines(text), end=end, file=sys.stderr if error else sys.stdout, flush=flush)


def quoted(text: str) -> str:
    """For a command that somebody copies."""
    return shlex.quote(plain(text))


def outputs(args: argparse.Namespace, files: "Places", inputs: "Places | None" = None) -> None:
    """Refuse, before the work, files that are written in one place, over what is read, or over the job itself."""
    from .._base.files import apart

    function, store = getattr(args, "function", None), getattr(args, "store", None)
    read = {**({} if function is None else {"the job": job.file_of(function)}), **(inputs or {})}
    apart(files, inputs=read, folders={"--store": None if store is None else Path(store).absolute()})


def rows_file(given: Path | None, option: str) -> Path | None:
    """Where rows go that somebody asked for, .csv or .json; refused where none can be written."""
    from .._base.files import writable

    if given is None:
        return None
    to = writable(given, option)
    if to.suffix.lower() not in (".csv", ".json"):
        raise InputError(f"{option} {given}; needed: a file that ends with .csv or .json.")
    return to


def write_rows(rows: Sequence[dict[str, "Json"]], to: Path) -> None:
    """Rows with the same cells as CSV, or as JSON if the file ends with .json."""
    from .._base import strict_json
    from .._base.files import write

    if to.suffix.lower() == ".json":
        write(to, strict_json.text(rows, 1) + "\n")
        return
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(to, text.getvalue())


def add_output(command: argparse.ArgumentParser) -> None:
    """How results are told."""
    command.add_argument("--json", action="store_true", help="figures for machines, on standard output")
    command.add_argument("--quiet", action="store_true", help="no progress bar")


def add_memory(command: argparse.ArgumentParser) -> None:
    """What Grams may take, and where they are kept."""
    command.add_argument("--store", help="a folder for the Grams: they need not fit in memory, and are kept")
    free = "default: 70%% of what is free; on a GPU, all"
    command.add_argument("--memory", help=f"what Gram tiles may take, e.g. 8GiB ({free})")


def add_outputs_are(command: argparse.ArgumentParser) -> None:
    """What the network's outputs are."""
    command.add_argument(
        "--outputs-are", choices=["logits", "probabilities", "log-probabilities"],
        help="what the network's outputs are (default: found from the training data, and said)",
    )  # fmt: skip


def made_by(args: argparse.Namespace, needed: str) -> object:
    """What MODULE:FUNCTION returns; what it prints does not come between figures for machines."""
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        return job.call(args.function, needed)


def model_and_data(
    args: argparse.Namespace,
    function: Callable[..., object],
    parts: Sequence[str],
    least: int,
    options: dict[str, object],
) -> dict[str, Any]:
    """Arguments for `function`: MODULE:FUNCTION's (a tuple of the first of `parts`, or a dict), and `options`."""
    import inspect

    from .._base import checks
    from ..datasets import Labelled

    shapes = [f"({', '.join(parts[:k])})" for k in range(least, len(parts) + 1)]
    needed = " or ".join(shapes)
    made = made_by(args, needed)
    if isinstance(made, tuple) and least <= len(made) <= len(parts):
        made = dict(zip(parts, made, strict=False))
    if not isinstance(made, dict) or not set(parts[:least]) <= set(made):
        kinds = [type(v).__name__ for v in made] if isinstance(made, tuple) else type(made).__name__
        raise InputError(f"{args.function} returned {kinds}; needed: {needed}, or a dict with these.")
    made |= {name: value for name, value in options.items() if value is not None}
    unknown = set(made) - set(inspect.signature(function).parameters)
    if unknown:
        name = f"tangency.{function.__name__}"
        raise InputError(f"{args.function} returned {checks.some(sorted(unknown))}, which {name} does not take.")
    for part in parts:
        if isinstance(made.get(part), Labelled) and not args.json:
            say(made[part].summary())
    return made
