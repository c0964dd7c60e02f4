"""`tangency explain`, `demo`: why a network says what it says."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..kernels.names import TITLES
from .options import add_memory, add_output, add_outputs_are, model_and_data, names, outputs, positive, say

if TYPE_CHECKING:
    from ..decisions import Decisions
    from .options import Commands


def add(commands: "Commands") -> None:
    """Enter these commands."""
    shown = commands.add_parser(
        "demo",
        help="explain a small network on bundled data: see what a report looks like",
        description="Train a small CNN on scikit-learn's digits, fit its kernel surrogates, trace its decisions to "
        "training images, and write a page to look at. Under 90 seconds on two cores.",
    )
    shown.add_argument("--out", type=Path, default=Path("demo"), help="folder for the report (default: demo)")
    shown.set_defaults(run=_demo, long=True)
    add_output(shown)

    command = commands.add_parser(
        "explain",
        help="why a trained classifier says what it says: a surrogate, attributions, and a page to look at",
        description="Fit a kernel surrogate to a trained classifier, measure how faithful it is, and trace every "
        "decision to the training samples that made it. Writes one HTML file that works offline.",
    )
    command.add_argument(
        "function", metavar="MODULE:FUNCTION",
        help="a function without arguments that returns (model, train, test): the data as (x, y) or "
        "tangency.datasets.Labelled; or a dict of tangency.explain's arguments. MODULE may be a file, job.py",
    )  # fmt: skip
    command.add_argument("--out", type=Path, required=True, help="folder for report.html, or the .html file itself")
    command.add_argument(
        "--kernels", type=names, help=f"some of {', '.join(TITLES)} (default: the first five), with commas"
    )
    command.add_argument("--samples", type=positive, help="test samples to explain one by one (default: 500)")
    command.add_argument("--neighbours", type=positive, help="training samples to show for each (default: 8)")
    add_outputs_are(command)
    add_memory(command)
    command.set_defaults(run=_explain, long=True)
    add_output(command)


def _demo(args: argparse.Namespace) -> int:
    from ..demo import demo
    from ..report import page_path

    page_path(args.out)  # before the work
    return _tell(demo(not args.quiet), args)


def _explain(args: argparse.Namespace) -> int:
    from .._base import checks
    from ..decisions import explain
    from ..decisions.compared import check_names
    from ..report import page_path

    # Before the work, and before a function that may change the working folder.
    args.out, store = args.out.absolute(), None if args.store is None else Path(args.store).absolute()
    outputs(args, {"--out": page_path(args.out)})
    check_names(args.kernels)
    checks.memory(args.memory)
    given = {name: getattr(args, name) for name in ("kernels", "outputs_are", "samples", "neighbours", "memory")}
    made = model_and_data(args, explain, ("model", "train", "test"), 3, {**given, "store": store})
    return _tell(explain(**made, progress=not args.quiet), args)


def _tell(decisions: "Decisions", args: argparse.Namespace) -> int:
    """Write the report, print the figures and where it is."""
    from .._base import strict_json
    from ..report import write

    page = write(decisions, args.out)
    if args.json:
        say(strict_json.text({**decisions.summary(), "report": str(page.resolve())}, 2))
        return 0
    facts = decisions.facts
    say(
        f"\n{facts['model']} with {facts['parameters']:,} parameters: {decisions.accuracy:.2%} of "
        f"{facts['test']:,} test ",
        end="",
    )
    say(f"samples right.\nIts surrogates, from {facts['train']:,} training samples:\n\n{decisions.table()}\n")
    say(
        "τ_K: how far the surrogate orders the test samples by the probability of the correct class as the network does"
    )
    say("(1: exactly). TAD: the surrogate's accuracy less the network's.\n")
    say(f"report: {page.resolve()}")
    return 0
