"""`make demo && make test` in fresh clones, as newcomers run it: another language, another user, no browser.

    python3 -m benchmarks.robustness.fresh_clone                                # all of CASES, each whole
    python3 -m benchmarks.robustness.fresh_clone --cases ci c-locale+space      # these
    python3 -m benchmarks.robustness.fresh_clone --cases user --select tests/test_house_files.py
    python3 -m benchmarks.robustness.fresh_clone --quick                        # part of .ci/run

A case is conditions joined by `+`; `plain` is none of them. Each case is a clone of the commit at hand in a folder of
its own, with a HOME of its own, and only HOME, PATH, pip's cache and what the conditions say in its environment. PATH
is one folder of links to this machine's programs, without browsers unless the case has `browser`. A whole case makes
its own .venv (2 GB, shared only through pip's cache) and takes 12 to 20 CPU-minutes.

`--quick`: every condition that can be had here falls, drawn by the commit's hash, to one of two cases, which run the
demo and the tests of SELECTION with the packages of this checkout's .venv (`--share`), tangency itself from the clone.

The table (case, passed, failed, seconds, CPU-minutes, environment) goes to `--out`; the exit status is 0 if all went
well. Needs nothing but Python and git.
"""

import argparse
import json
import os
import platform
import pwd
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONDITIONS = {
    "browser": "Chromium is found, and TANGENCY_NEED_BROWSER=1",
    "c-locale": "LC_ALL=C",
    "ci": "CI=true",
    "closed-home": "nothing can be written in HOME",
    "in-order": "pytest -p no:randomly",
    "letter": "a letter outside ASCII in the path",
    "long": "a path too long for the first line of a script",
    "space": "a space in the path",
    "time-zone": "TZ=Pacific/Chatham",
    "user": "not as root",
}
VARIABLES = {
    "browser": {"TANGENCY_NEED_BROWSER": "1"},
    "c-locale": {"LC_ALL": "C"},
    "ci": {"CI": "true"},
    "in-order": {"PYTEST_ADDOPTS": "-p no:randomly"},
    "time-zone": {"TZ": "Pacific/Chatham"},
}
CASES = ["ci", "c-locale+time-zone+space+closed-home+ci", "user+letter+browser+in-order", "user+closed-home+long"]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Files, processes, pages, names, the command line: what a machine can make different.
SELECTION = [
    "tests/test_house_files.py",
    "tests/test_packaging.py",
    "tests/command/test_cli.py",
    "tests/datasets/test_datasets.py::test_home_folder",
    "tests/datasets/test_datasets.py::test_files_of_any_bytes_are_read_or_refused",
    "tests/gram/test_executors.py::test_workers_end_when_their_parent_is_killed",
    "tests/gram/test_hostile_stores.py::test_an_ascii_terminal_and_a_closed_pipe",
    "tests/watch/test_watch.py",
]
COUNTED = ("passed", "failed", "error", "skipped")
DEFAULT_OUT = ROOT / "benchmarks" / "results" / "fresh_clone.json"


class Unable(Exception):
    """A condition that cannot be had on this machine, and why."""


@dataclass(frozen=True)
class Place:
    """One case made ready: where it runs, as whom, with what in its environment."""

    clone: Path
    environment: dict[str, str]
    user: str
    python: str


def parsed(case: str) -> list[str]:
    """The conditions of `a+b`."""
    found = [] if case == "plain" else case.split("+")
    unknown = sorted(set(found) - set(CONDITIONS))
    if unknown:
        raise SystemExit(f"{case!r}: no condition {', '.join(unknown)}. There are: plain, {', '.join(CONDITIONS)}.")
    return found


def drawn(commit: str, possible: list[str]) -> list[str]:
    """Two cases that have all conditions between them, the same two for the same commit."""
    order = random.Random(commit).sample(possible, len(possible))
    halves = [sorted(order[0::2]), sorted(order[1::2])]
    return ["+".join(half) or "plain" for half in halves]


# ---- what a machine has ----------------------------------------------------------------------------------------------


def myself() -> str:
    """Who runs this; a number, where it has no name."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def another_user() -> str:
    """Whom an ordinary user's case runs as: whoever runs this, or, for root, `nobody`."""
    return "nobody" if os.geteuid() == 0 else myself()


def as_user(user: str) -> dict[str, Any]:
    """What subprocess needs to start a process as this user, in a group of processes of its own."""
    own: dict[str, Any] = {"start_new_session": True}
    if user != myself():
        known = pwd.getpwnam(user)
        own |= {"user": known.pw_uid, "group": known.pw_gid, "extra_groups": []}
    return own


def can(user: str, command: list[str]) -> bool:
    """Whether a command ends well for this user."""
    try:
        done = subprocess.run(
            command, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, check=False, **as_user(user)
        )
        return done.returncode == 0
    except OSError:
        return False


def python_for(user: str, share: Path | None) -> str:
    """A Python that this user may run, able to make a venv: the one that runs this, or the system's."""
    needed = sys.version_info[:2] if share else (3, 11)
    module, unfit = ("venv", "!=") if share else ("ensurepip", "<")
    code = f"import sys, {module}; sys.exit(sys.version_info[:2] {unfit} {needed})"
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for found in (f"{sys.base_prefix}/bin/{version}", f"/usr/local/bin/{version}", "/usr/bin/python3"):
        if can(user, [found, "-c", code]):
            return found
    raise Unable(f"{user} may run no Python {'.'.join(map(str, needed))} that makes a venv here")


def packages(share: Path) -> Path:
    """The packages of a venv."""
    found = sorted(share.glob("lib/python3.*/site-packages"))
    if len(found) != 1:
        raise SystemExit(f"--share {share}: needed is a venv with its packages. Make it: make .venv/installed")
    return found[0]


def closed_home(user: str, folder: Path) -> Path:
    """A HOME that is there and in which this user cannot write; permissions do not stop root, the kernel does."""
    home = Path("/sys") if user == "root" else folder / "home"
    if home == folder / "home":
        home.chmod(0o555)
    if can(user, ["mkdir", str(home / "tangency-tried")]):
        raise Unable(f"{user} can write in {home}")
    return home


def lacking(condition: str, share: Path | None) -> str:
    """Why a condition cannot be had here, or nothing."""
    if condition == "browser" and not any(map(shutil.which, BROWSERS)):
        return "no Chromium here (apt-get install chromium)"
    if condition != "user":
        return ""
    user = another_user()
    try:
        python_for(user, share)
    except Unable as e:
        return str(e)
    if share and not can(user, ["test", "-r", str(packages(share) / "torch" / "__init__.py")]):
        return f"{user} may not read {share}"
    return ""


# ---- a case ----------------------------------------------------------------------------------------------------------


def programs(folder: Path, python: str, browser: bool) -> None:
    """All programs of this machine's PATH as links in one folder; python3 is the one given."""
    folder.mkdir()
    for place in [*os.environ["PATH"].split(os.pathsep), "/usr/local/bin", "/usr/bin", "/bin"]:
        for file in Path(place).glob("*"):
            link = folder / file.name
            if not (file.name.startswith("python") or (file.name in BROWSERS and not browser) or link.is_symlink()):
                link.symlink_to(file)
    (folder / "python3").write_text(f'#!/bin/sh\nexec "{python}" "$@"\n', encoding="utf-8")
    (folder / "python3").chmod(0o755)


def made_ready(conditions: list[str], folder: Path, share: Path | None, cache: Path) -> Place:
    """The clone, HOME, PATH and user of a case."""
    user = another_user() if "user" in conditions else myself()
    python = python_for(user, share)
    folder.chmod(0o755)
    name = "a clone" if "space" in conditions else "clone"
    name = name.replace("clone", "clöne") if "letter" in conditions else name
    name += "-" + "x" * 150 if "long" in conditions else ""
    programs(folder / "bin", python, "browser" in conditions)
    home = folder / "home"
    home.mkdir()
    environment = {"HOME": str(home), "PATH": str(folder / "bin")}
    for condition in conditions:
        environment |= VARIABLES.get(condition, {})
    clone = folder / name
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(clone)], check=True)
    if share:
        borrow(clone, python, packages(share))
    if user != myself():
        subprocess.run(["chown", "-R", f"{user}:", str(clone), str(home)], check=True)
    if "closed-home" in conditions:
        environment["HOME"] = str(closed_home(user, folder))
    elif not share:
        environment["PIP_CACHE_DIR"] = str(cache)
    return Place(clone, environment, user, python)


def borrow(clone: Path, python: str, site: Path) -> None:
    """A .venv with another one's packages and the clone's own tangency, as `make` would have installed it."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(clone / ".venv")], check=True)
    # ASCII: Python 3.11 reads it in the locale's encoding.
    line = f"import sys; sys.path += [{str(clone / 'src')!a}, {str(site)!a}]\n"
    (packages(clone / ".venv") / "borrowed.pth").write_text(line, encoding="utf-8")
    (clone / ".venv" / "installed").touch()


def run(command: list[str], place: Place, log: Path, limit: float) -> int:
    """A command in the clone, its words into the log; its status, or 124 if it was stopped at the limit."""
    with log.open("ab") as out:
        process = subprocess.Popen(
            command,
            cwd=place.clone,
            env=place.environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            **as_user(place.user),
        )
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return 124
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a group of its own: workers too
                process.wait()


def cpu() -> float:
    """User and system seconds of all processes that have ended below this one."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def one(
    case: str, select: list[str], share: Path | None, cache: Path, limit: float, more: dict[str, str]
) -> dict[str, Any]:
    """A row of the table."""
    conditions = parsed(case)
    with tempfile.TemporaryDirectory(prefix="tangency-", ignore_cleanup_errors=True) as name:
        folder, log = Path(name), Path(name) / "log"
        place = made_ready(conditions, folder, share, cache)
        place.environment.update(more)
        test = (
            [".venv/bin/python", "-m", "pytest", "-m", "not slow and not gpu", *select] if select else ["make", "test"]
        )
        row: dict[str, Any] = {"case": case, "conditions": [CONDITIONS[c] for c in conditions]}
        began, before = time.monotonic(), cpu()
        for step, command in (("demo", ["make", "demo"]), ("test", test)):
            row[step] = run([str(folder / "bin" / "env"), *command], place, log, limit)
            if row[step]:
                break
        words = log.read_text(encoding="utf-8", errors="replace")
        row |= outcome(words)
        row["seconds"], row["cpu_minutes"] = round(time.monotonic() - began), round((cpu() - before) / 60, 2)
        row["environment"] = {k: v.replace(name, "…") for k, v in place.environment.items()}
        row |= {"user": place.user, "python": version_of(place.python), "log": words}
    return row


def version_of(python: str) -> str:
    code = "import platform; print(platform.python_version())"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def outcome(words: str) -> dict[str, Any]:
    """What pytest's last line counts, and the tests that it names before."""
    last = next((line for line in reversed(words.splitlines()) if re.search(r"\d+ \w+.* in [\d.]+s", line)), "")
    counts = {what: sum(map(int, re.findall(rf"(\d+) {what}", last))) for what in COUNTED}
    return {**counts, "names": re.findall(r"^(?:FAILED|ERROR) (\S+)", words, re.MULTILINE)}


def went_well(row: dict[str, Any]) -> bool:
    """Both commands ended well, and tests were run."""
    return row.get("demo") == 0 and row.get("test") == 0 and row["passed"] > 0


# ---- the table -------------------------------------------------------------------------------------------------------


def at_hand() -> str:
    """The commit that is cloned."""
    words = ["git", "rev-parse", "HEAD"]
    commit = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    if subprocess.run(["git", "diff", "--quiet", "HEAD"], cwd=ROOT, check=False).returncode:
        print(f"not in the clones: what is not committed yet. They are of {commit[:12]}.", file=sys.stderr)
    return commit


def quick_cases(commit: str, share: Path) -> list[str]:
    why = {condition: lacking(condition, share) for condition in CONDITIONS}
    for condition, reason in why.items():
        if reason:
            print(f"left out: {condition}: {reason}")
    return drawn(commit, [condition for condition, reason in why.items() if not reason])


def tried(
    cases: list[str], select: list[str], share: Path | None, limit: float, more: dict[str, str]
) -> Iterator[dict[str, Any]]:
    """The row of each case, said as it comes; the words of a case that did not go well too."""
    with tempfile.TemporaryDirectory(prefix="tangency-pip-", ignore_cleanup_errors=True) as cache:
        os.chmod(cache, 0o777)  # every case's user puts there what pip has downloaded
        for case in cases:
            row = one(case, select, share, Path(cache), limit, more)
            log = row.pop("log")
            counts = ", ".join(f"{row[what]} {what}" for what in COUNTED if row[what]) or "no test ran"
            print(f"{case}: {counts}; {row['seconds']} s, {row['cpu_minutes']} CPU-minutes", flush=True)
            if not went_well(row):
                print(log[-20_000:], flush=True)
            yield row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=CASES, help="conditions joined by +: " + ", ".join(CONDITIONS))
    parser.add_argument("--select", nargs="+", default=[], help="what pytest runs, in place of all")
    parser.add_argument(
        "--share",
        type=lambda words: Path(words).resolve(),
        help="a venv whose packages all cases use, in place of one each",
    )
    parser.add_argument("--quick", action="store_true", help="two cases drawn by the commit, SELECTION, this .venv")
    parser.add_argument("--set", nargs="+", default=[], metavar="NAME=VALUE", help="in every case's environment, too")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which a command is stopped")
    parser.add_argument("--out", type=Path, help=f"the table, as JSON; {DEFAULT_OUT.relative_to(ROOT)} where all runs")
    args = parser.parse_args()
    commit, cases, select, share = at_hand(), args.cases, args.select, args.share
    if args.quick:
        share, select = share or ROOT / ".venv", select or SELECTION
        cases = quick_cases(commit, share)
    for case in cases:  # before the first, which takes minutes
        for condition in parsed(case):
            if reason := lacking(condition, share):
                raise SystemExit(f"{case}: {condition}: {reason}")
    command = " ".join(["python3 -m benchmarks.robustness.fresh_clone", *sys.argv[1:]])
    table = {"commit": commit, "command": command, "machine": platform.platform(), "cores": os.cpu_count()}
    out = args.out or (None if args.quick or select else DEFAULT_OUT)
    rows = []
    for row in tried(cases, select, share, args.limit, dict(word.split("=", 1) for word in args.set)):
        rows.append(row)
        if out:
            words = json.dumps({**table, "select": select, "cases": rows}, indent=2, ensure_ascii=False)
            out.write_text(words + "\n", encoding="utf-8")
    sys.exit(not all(map(went_well, rows)))


if __name__ == "__main__":
    main()
