"""`tangency watch`: a training's record as a page and a table, while it grows."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError
from .options import say

if TYPE_CHECKING:
    from .options import Commands


def add(commands: "Commands") -> None:
    """Enter this command."""
    command = commands.add_parser(
        "watch",
        help="a training's record as a page that keeps up with it: is it lazy or rich?",
        description="Show the log of a tg.dynamics.Monitor (log=RUN.jsonl): the curves and whether training is lazy "
        "or rich, as one HTML file that works offline, and as a table here. Follows the log until its run ends, or "
        "Ctrl-C; the page loads itself again.",
    )
    command.add_argument("log", metavar="RUN.jsonl", type=Path, help="the monitor's log")
    command.add_argument("--out", type=Path, help="the .html file (default: beside the log, RUN.html)")
    how = command.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="write the page as the log is now, and end")
    how.add_argument("--follow", action="store_true", help="go on after the end of the run, too: it may be resumed")
    command.add_argument(
        "--every", type=_seconds, default=5.0, metavar="SECONDS", help="how often to look (default: 5)"
    )
    command.add_argument(
        "--json", action="store_true", help="the record for machines, on standard output; needs --once"
    )
    command.set_defaults(run=_watch)


def _seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text}; needed: seconds, above 0")
    return value


def _watch(args: argparse.Namespace) -> int:
    from .._base import strict_json
    from .._base.files import apart, writable
    from ..dynamics import Evolution
    from ..watch import write_page

    if args.json and not args.once:
        raise InputError("--json without --once; needed: both, for a record that goes on has no last word.")
    out = writable(args.out or args.log.with_suffix(".html"), "--out")
    if out.suffix.lower() != ".html":
        raise InputError(f"--out {out}; needed: a file that ends with .html.")
    apart({"--out": out}, inputs={"the log": args.log})
    found, size = Evolution.load(args.log), _size(args.log)
    follows = not args.once and (args.follow or not found.ended)
    page = write_page(found, out, refresh=args.every if follows else None)
    if args.json:
        say(strict_json.text({**found.to_dict(), "page": str(page.resolve())}, 2))
        return 0
    say(found.table(), flush=True)
    if follows:
        say(f"page: {page.resolve()}; Ctrl-C ends", flush=True)
    while follows:
        time.sleep(args.every)
        if _size(args.log) == size:
            continue
        before, found, size = len(found), Evolution.load(args.log), _size(args.log)
        follows = args.follow or not found.ended
        write_page(found, out, refresh=args.every if follows else None)
        if len(found) > before:
            say("\n".join(found.table().splitlines()[1 + before :]), flush=True)
    say(f"\n{found.words()}\npage: {page.resolve()}")
    return 0


def _size(log: Path) -> tuple[int, int]:
    """What changes when a log does."""
    found = log.stat()
    return found.st_size, found.st_mtime_ns
