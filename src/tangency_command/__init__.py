"""The command `tangency`. A file of its own, so that Ctrl-C is a sentence while torch is still being imported."""

import sys


def main() -> int:
    try:
        from tangency.cli import main as run
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130
    return run()
