"""SIGKILL at random moments while each kind of file is written over an old one: the old one is there, or a new one."""

from pathlib import Path
from random import Random

from .cases import Case, killed_after, writers


def attack(folder: Path, count: int, draw: Random) -> list[Case]:
    """`count` kills of each kind."""
    found: list[Case] = []
    for kind, (to, works) in writers(folder).items():
        whole = []
        for work in works:
            work()
            whole.append(to.read_bytes())

        for k in range(count):
            to.write_bytes(whole[k % 2])
            to.chmod(0o640)
            died = killed_after(draw.uniform(0, 0.03), works)
            now = to.read_bytes() if to.exists() else b""
            beside = [p.name for p in to.parent.iterdir() if p.name.endswith(".partial")]
            for name in beside:
                (to.parent / name).unlink()
            outcome = "done"
            if not to.exists():
                outcome = "lost"
            elif now not in whole or to.stat().st_mode & 0o777 != 0o640:
                outcome = "half"
            elif died != -9:
                outcome = "raw"
            found.append(Case(kind, f"kill {k}", outcome, f"{len(now)} bytes, exit {died}, beside: {beside}"))
    return found
