"""The command line: parse, call, print."""

import argparse
import contextlib
import io
import os
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from . import job
from ._base.words import lines, said, short
from ._version import __version__
from .commands import auditing, experiments, explaining, grams, health, probing, shifting, watching
from .commands.options import say
from .errors import InputError, ModelError, NonFiniteError, TangencyError


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
            if getattr(args, "long", False):
                _tell_if_busy()
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt as e:
        say(f"\n{said(e) or 'stopped'}", error=True)
        return 130
    except BrokenPipeError:  # whoever read the output has had enough: `tangency … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as e:
        if not args.debug:
            return _failed(e)
        if not isinstance(e, job.JobFailed):
            raise
        say("".join(traceback.format_exception(e.cause)), error=True, end="")
        return 2


def _tell_if_busy() -> None:
    import torch

    from ._base import machine

    machine.tell_if_busy(torch.get_num_threads())


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Where in our code a warning comes from tells nobody anything here."""
    own, warnings.formatwarning = warnings.formatwarning, lambda message, *_, **__: f"warning: {lines(str(message))}\n"
    try:
        yield
    finally:
        warnings.formatwarning = own


def _failed(e: Exception) -> int:
    """Say what went wrong in one line, and where if that is in the user's code; the exit code."""
    if isinstance(e, job.JobFailed):
        say(f"error: {e}", error=True)
        return 2
    if isinstance(e, TangencyError):
        say(f"error: {e}", error=True)
        return 2 if isinstance(e, (InputError, ModelError, NonFiniteError)) else 1
    if isinstance(e, OSError) and e.filename is not None:
        say(f"error: {short(str(e.filename))}: {e.strerror}.", error=True)
        return 2
    if isinstance(e, ModuleNotFoundError) and e.name == "torch":
        say("error: tangency needs PyTorch, which is not installed here: pip install torch.", error=True)
        return 2
    place = job.where(e)
    say(f"error: {type(e).__name__}: {said(e)}" + (f"\n{place}" if place else ""), error=True)
    say("Where it happened: the same command with --debug.", error=True)
    return 1


_HELP = """Why did the network say that? Tangent kernels of PyTorch modules, and what they tell about a model.

First steps:
  tangency demo                             train a small network on digits, explain it, write a page to look at
  tangency explain job.py:make --out page   the same for your own model and data: make() returns (model, train, test)
  tangency audit job.py:make --out page     which of the labels are wrong, what leaks, what the model does not know
  tangency shift job.py:make --out page     do two data sets differ as the model sees them, where, and in which samples?
  tangency watch run.jsonl                  a training as it goes on: does the kernel stay, or is another one learned?
  tangency doctor                           what is installed and missing here, and whether it computes right
"""


class _Plain(argparse.ArgumentParser):
    """Arguments that are refused are shown, not obeyed."""

    def _print_message(self, message: str, file: Any = None) -> None:
        super()._print_message(lines(message), file)


class _Parser(_Plain):
    """`audit apply` is a command of its own: what comes after it is no option of `audit`."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As every parser's, with the two words as one."""
        words = list(sys.argv[1:] if args is None else args)
        at = next((k for k in range(len(words)) if words[k : k + 2] == ["audit", "apply"]), None)
        if at is not None:
            words[at : at + 2] = ["audit apply"]
        return super().parse_known_args(words, namespace)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tangency", description=_HELP, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="tangency COMMAND --help says more about each.",
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"tangency {__version__}")
    parser.add_argument("--debug", action="store_true", help="show where an error happened (traceback)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Plain)
    for kind in (explaining, auditing, probing, shifting, experiments, grams, watching, health):
        kind.add(commands)
    for command in commands.choices.values():  # before or after the command, both work
        command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
