"""The version, in the places that say it: bumped together, and checked.

    python scripts/release.py bump 0.2.0     # writes _version.py, CITATION.cff and the changelog's heading
    python scripts/release.py check          # do they agree?
    python scripts/release.py check v0.2.0   # and is this what the tag says, with the changelog closed?

`_version.py` is where everything else reads the version from. Needs nothing but Python.
"""

import re
import sys
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = "src/tangency/_version.py"
CITATION = "CITATION.cff"
CHANGELOG = "CHANGELOG.md"
OPEN = "Unreleased"


class Disagreement(Exception):
    """What does not fit, and what to do."""


def parse(version: str) -> tuple[int, ...]:
    """`0.2.0` as numbers.

    >>> parse("0.10.0") > parse("0.9.1")
    True
    """
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise Disagreement(f"{version!r} is not a version. Give three numbers, as in 0.2.0.")
    return tuple(map(int, version.split(".")))


def current(root: Path = ROOT) -> str:
    """The version in _version.py."""
    return _found(root / VERSION, r'__version__ = "(.+)"')


def headings(root: Path = ROOT) -> list[str]:
    """The changelog's versions as their headings name them, newest first, without dates."""
    return re.findall(r"^## (\S+)", (root / CHANGELOG).read_text(encoding="utf-8"), re.MULTILINE)


def check(tag: str | None = None, root: Path = ROOT) -> None:
    """Disagreement, unless all places say the same; with a tag, unless this very version is closed in the changelog."""
    version, cited, newest = current(root), _found(root / CITATION, r"version: (.+)"), headings(root)[:1]
    parse(version)
    if cited != version:
        raise Disagreement(f"{CITATION} says {cited}, {VERSION} {version}. Run: make bump VERSION={version}")
    if tag is None and newest not in ([OPEN], [version]):
        raise Disagreement(f"{CHANGELOG} begins with {newest}; it must be {OPEN!r} or {version!r}.")
    if tag is not None and tag != f"v{version}":
        raise Disagreement(f"the tag is {tag}, the version {version}. Bump first, or tag v{version}.")
    if tag is not None and newest != [version]:
        raise Disagreement(f"{CHANGELOG} begins with {newest}, not with {version}. Run: make bump VERSION={version}")


def bump(version: str, root: Path = ROOT, today: str | None = None) -> None:
    """Write the version everywhere, and close the changelog's open heading with it and the date."""
    before, known = current(root), headings(root)
    if parse(version) < parse(before):
        raise Disagreement(f"{version} is older than {before}, which {VERSION} says. Give a newer one.")
    if known[:1] != [OPEN]:
        raise Disagreement(f"{CHANGELOG} has no '## {OPEN}' at its top: there is nothing to release.")
    if version in known:
        raise Disagreement(f"{CHANGELOG} already has {version}. Give a newer one.")
    today = today or datetime.now(UTC).date().isoformat()
    _replace(root / VERSION, r'__version__ = ".+"', f'__version__ = "{version}"')
    _replace(root / CITATION, r"version: .+(\ndate-released: .+)?", f"version: {version}\ndate-released: {today}")
    _replace(root / CHANGELOG, rf"## {OPEN}", f"## {version} ({today})")


def _found(path: Path, pattern: str) -> str:
    lines = re.findall(f"^{pattern}$", path.read_text(encoding="utf-8"), re.MULTILINE)
    if len(lines) != 1:
        raise Disagreement(f"{path.name} has {len(lines)} lines like {pattern!r}; one is needed.")
    return lines[0]


def _replace(path: Path, pattern: str, by: str) -> None:
    path.write_text(
        re.sub(f"^{pattern}$", by, path.read_text(encoding="utf-8"), count=1, flags=re.MULTILINE), encoding="utf-8"
    )


def main(words: list[str]) -> str | None:
    """What the command line asks for; the message, if it cannot be."""
    try:
        match words:
            case ["bump", version]:
                bump(version)
                print(f"now: make test, commit, git tag v{version}, git push origin v{version}")
            case ["check"]:
                check()
            case ["check", tag]:
                check(tag)
            case _:
                return __doc__
    except Disagreement as e:
        return str(e)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
