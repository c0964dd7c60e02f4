"""`tangency doctor`: what is installed here, and whether it computes right."""

import argparse
from typing import TYPE_CHECKING

from .options import say

if TYPE_CHECKING:
    from .options import Commands


def add(commands: "Commands") -> None:
    """Enter this command."""
    command = commands.add_parser(
        "doctor",
        help="what is installed, what is missing and how to get it, and whether a kernel comes out right here",
        description="Versions, GPUs, optional libraries, threads, memory and disk of this machine, with advice; and a "
        "small kernel against plain autograd. Exit code 1 if that fails.",
    )
    command.add_argument("--json", action="store_true", help="for machines")
    command.set_defaults(run=_doctor)


def _doctor(args: argparse.Namespace) -> int:
    from .._base import strict_json
    from ..doctor import doctor

    found = doctor()
    say(strict_json.text(found.to_dict(), 2) if args.json else found.table())
    return int(not found.healthy)
