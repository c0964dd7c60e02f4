"""The command `tangency`. A file of its own, so that Ctrl-C is a sentence before there is anything to stop."""

import sys


def main() -> int:
    try:
        from tangency.cli import main as run

        return run()
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
