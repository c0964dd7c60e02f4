"""`tangency audit`, `tangency audit apply`: what is wrong with the data, and what was decided about it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from ..kernels.names import TITLES
from .options import (
    add_memory,
    add_output,
    add_outputs_are,
    made_by,
    model_and_data,
    names,
    outputs,
    positive,
    rows_file,
    say,
    write_rows,
)

if TYPE_CHECKING:
    from .._base.types import Json
    from ..auditing import Audit
    from ..datasets import Labelled
    from .options import Commands

_JOB = (
    "a function without arguments that returns (model, train) or (model, train, test): the data as (x, y) or "
    "tangency.datasets.Labelled; or a dict of tangency.audit's arguments. MODULE may be a file, job.py"
)


def add(commands: "Commands") -> None:
    """Enter these commands."""
    command = commands.add_parser(
        "audit",
        help="which labels are wrong, which samples leak into the test set, which the model does not know",
        description="What one trained network says of its own data, by leave-one-out of its kernels: suspicious labels "
        "with what they should be, copies, leaks, outliers, regions of mistakes, and what cleaning would do. Writes "
        "one HTML file that works offline, in which labels are kept, fixed or dropped; `tangency audit apply` takes "
        "these decisions to the labels.",
    )
    command.add_argument("function", metavar="MODULE:FUNCTION", help=_JOB)
    command.add_argument("--out", type=Path, required=True, help="folder for report.html, or the .html file itself")
    command.add_argument("--kernels", type=names, help=f"some of {', '.join(TITLES)} (default: trNTK,CK), with commas")
    command.add_argument("--samples", type=positive, help="suspects to list one by one (default: 200)")
    command.add_argument("--neighbours", type=positive, help="training samples to show for each (default: 8)")
    command.add_argument("--csv", type=Path, help="a file for what is said of every training sample (needs pandas)")
    add_outputs_are(command)
    add_memory(command)
    command.set_defaults(run=_audit, long=True)
    add_output(command)

    taken = commands.add_parser(
        "audit apply",
        help="take the decisions that were made on an audit's page to the labels",
        description="Read the decisions that the page exports (.json or .csv) and write the cleaned labels: a line for "
        "each training sample that stays, with its number, its name where it has one, and its label. The job returns "
        "the training data that were audited, with the labels they had then; decisions about others are refused.",
    )
    taken.add_argument(
        "function", metavar="MODULE:FUNCTION",
        help="as for the audit; or one that returns the training set alone, which need not train a network",
    )  # fmt: skip
    taken.add_argument("decisions", type=Path, help="the file that the page exported")
    taken.add_argument("--out", type=Path, required=True, help="the file for the labels: .csv or .json")
    taken.add_argument("--json", action="store_true", help="figures for machines, on standard output")
    taken.set_defaults(run=_apply)


def _audit(args: argparse.Namespace) -> int:
    from .._base import checks
    from .._base.extras import needed
    from .._base.files import writable
    from ..decisions import audit
    from ..decisions.compared import check_names
    from ..report import page_path

    # Before the work, and before a function that may change the working folder.
    args.out, store = args.out.absolute(), None if args.store is None else Path(args.store).absolute()
    listed = None if args.csv is None else writable(args.csv, "--csv")
    outputs(args, {"--out": page_path(args.out), "--csv": listed})
    if listed is not None:
        with needed("pandas", "--csv"):
            import pandas  # noqa: F401
    check_names(args.kernels)
    checks.memory(args.memory)
    given = {name: getattr(args, name) for name in ("outputs_are", "samples", "neighbours", "memory")}
    given |= {"store": store, "kernel": args.kernels}
    made = model_and_data(args, audit, ("model", "train", "test"), 2, given)
    return _tell(audit(**made, progress=not args.quiet), listed, args)


def _tell(found: "Audit", listed: Path | None, args: argparse.Namespace) -> int:
    """Write the page, print what was found and where it is."""
    from .._base import strict_json
    from .._base.files import write
    from ..report import write as write_page

    page = write_page(found, args.out)
    if listed is not None:
        issues = found.issues()
        issues.insert(0, "sample", range(len(issues)))
        write(listed, issues.to_csv(index=found.train.ids is not None))
    if args.json:
        say(strict_json.text({**found.summary(), "report": str(page.resolve())}, 2))
        return 0
    say(f"\n{found.words()}\n")
    if found.suspects.count:
        say(f"{found.table()}\n")
    if listed is not None:
        say(f"every sample: {listed}")
    say(f"report: {page.resolve()}")
    return 0


def _apply(args: argparse.Namespace) -> int:
    from .._base import strict_json
    from ..auditing.applied import decided

    to, decisions = rows_file(args.out, "--out"), args.decisions.absolute()
    assert to is not None
    outputs(args, {"--out": to}, {"the file of decisions": decisions})
    data, y, kept = decided(_training_set(args), decisions)
    rows: list[dict[str, Json]] = [
        {"sample": i, **({"id": data.ids[i]} if data.ids else {}), "label": data.classes[int(y[i])]}
        for i in kept.nonzero()[:, 0].tolist()
    ]
    write_rows(rows, to)
    dropped, fixed = len(data) - len(rows), int((y != data.y)[kept].sum())
    if args.json:
        say(strict_json.text({"kept": len(rows), "dropped": dropped, "fixed": fixed, "labels": str(to)}, 2))
        return 0
    say(f"{len(rows):,} of {len(data):,} samples stay, {fixed:,} of them with another label; {dropped:,} do not.")
    say(f"labels: {to}")
    return 0


def _training_set(args: argparse.Namespace) -> "Labelled":
    """With the labels that were audited."""
    from torch import nn

    from ..auditing.applied import audited
    from ..decisions.audited import with_labels

    made = made_by(args, "what it returned for the audit, or the training set alone")
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        return audited(made[1])
    if not isinstance(made, dict):
        return audited(made)
    if made.get("train") is None:
        raise InputError(f"{args.function} returned a dict without 'train'; needed: what it returned for the audit.")
    labels = made.get("labels")
    data = audited(made["train"], labels)
    return data if labels is None else with_labels(data, labels)
