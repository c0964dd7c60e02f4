"""`tangency probe`: what each layer of a trained network knows of the classes."""

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from .options import add_output, indices, model_and_data, names, outputs, positive, say

if TYPE_CHECKING:
    from .options import Commands


def add(commands: "Commands") -> None:
    """Enter this command."""
    command = commands.add_parser(
        "probe",
        help="what each layer of a network knows of the classes, and where it has collapsed to them",
        description="Nearest neighbours, class centres and a linear SVM on the first principal components of each "
        "layer: their accuracies on the test set, how many components they need, and how far the samples have drawn "
        "together at the means of their classes. Prints a table; --out keeps pictures and figures.",
    )
    command.add_argument(
        "function", metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, train, test): the data as (x, y) or "
        "tangency.datasets.Labelled; or a dict of tangency.representations.probe's arguments. MODULE may be a file",
    )  # fmt: skip
    command.add_argument("--layers", type=names, help="names or patterns, with commas (default: the model's children)")
    command.add_argument("--pool", choices=["mean", "first"], help="what is made of positions (default: all are kept)")
    command.add_argument("--dims", type=indices, help="numbers of components, with commas (default: 1, 2, …, all)")
    command.add_argument("--neighbours", type=positive, help="training samples that decide (default: 10)")
    command.add_argument("--memory", help="what one layer's outputs may take, e.g. 8GiB")
    command.add_argument("--out", type=Path, help="folder for probing.json and pictures (these need matplotlib)")
    command.set_defaults(run=_probe, long=True)
    add_output(command)


def _probe(args: argparse.Namespace) -> int:
    from .._base import checks, strict_json
    from .._base.extras import needed
    from .._base.files import writable, write
    from ..representations import probe
    from ..representations.probing import VIEWS

    out = None if args.out is None else args.out.absolute()  # before a function that may change the working folder
    if out is not None:
        figures = writable(out / "probing.json", "--out")
        pictures = {view: writable(out / f"{view}.png", "--out") for view in VIEWS}
        outputs(args, {"--out": figures, **{f"the picture {view}": to for view, to in pictures.items()}})
        with needed("matplotlib", "--out"):
            import matplotlib  # noqa: F401
    checks.memory(args.memory)
    given = {name: getattr(args, name) for name in ("layers", "pool", "dims", "neighbours", "memory")}
    made = model_and_data(args, probe, ("model", "train", "test"), 3, given)
    found = probe(**made, progress=not args.quiet)
    if out is not None:
        write(figures, strict_json.text(found.to_dict(), 1) + "\n")
        for view, to in pictures.items():
            write(to, partial(found.plot(view).savefig, format="png", dpi=150))
    if args.json:
        say(strict_json.text(found.to_dict(), 2))
        return 0
    say(f"\n{found.table()}\n\n{found.words()}")
    if out is not None:
        say(f"pictures: {out}")
    return 0
