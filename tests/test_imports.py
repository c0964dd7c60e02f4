"""What an import, a help text and a mistyped word cost, in modules; and that names are found whoever asks first."""

import ast
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import tangency as tg
from tangency import experiments
from tangency._base import on_demand
from tangency.cli import _parser
from tangency.experiments import EXPERIMENTS, catalogue, cntk, conjugate, learned, spectra_table8
from tangency.experiments.table import Options, Regression, Trainings

SRC = Path(tg.__file__).parent
# What `import tangency` brings: what it needs to bring the rest, and the errors.
FIRST = {"tangency", "tangency._base", "tangency._base.on_demand", "tangency._version", "tangency.errors"}
# Rooms that a Gram matrix has no need of.
NOT_FOR_A_KERNEL = {
    "active", "auditing", "commands", "decisions", "distributions", "dynamics", "experiments", "infinite", "linalg",
    "regress", "report", "representations", "spectra", "studies", "surrogate",
}  # fmt: skip
HEAVY = ["matplotlib", "numba", "numpy", "pandas", "ray", "scipy", "sklearn", "torch", "transformers", "triton", "zarr"]
# Every room that is lazy: its own names, and those that it imports at once.
LAZY = [tg, experiments]


def in_a_process(code: str) -> str:
    """What Python prints that has imported nothing of ours yet; an error is a failure."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> set[str]:
    """The modules that are there after it."""
    return set(in_a_process(f"{code}\nimport sys\nprint('\\n' + ' '.join(sys.modules))").splitlines()[-1].split())


def test_import_tangency() -> None:
    found = loaded("import tangency")
    assert {name for name in found if name.partition(".")[0] == "tangency"} == FIRST
    assert not found & set(HEAVY)
    assert len(found - loaded("pass")) < 60


def test_a_gram_matrix_imports_what_makes_it() -> None:
    """And no library but torch and NumPy: scikit-learn, SciPy and others take longer than the matrix does."""
    found = loaded(
        "import torch\nbefore = set(__import__('sys').modules)\nimport tangency as tg\n"
        "k = tg.trace_ntk(torch.nn.Sequential(torch.nn.Linear(3, 2)))\n"
        "assert k(torch.randn(4, 3)).shape == (4, 4)\ntg.compute(k, torch.randn(4, 3))"
    )
    assert "tangency.gram.compute" in found
    assert not {f"tangency.{room}" for room in NOT_FOR_A_KERNEL} & found
    assert not {name for name in HEAVY if name not in ("torch", "numpy", "triton")} & found  # triton: torch's own


ANSWERS = """
import contextlib, io, sys, tangency_command
for words in {words!r}:
    sys.argv = ["tangency", *words]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = tangency_command.main()
        except SystemExit as e:
            code = e.code
    assert code == {code}, (words, code, err.getvalue())
    assert bool(out.getvalue()) == (code == 0) and bool(err.getvalue()) == (code == 2), words
"""
COMMANDS = ["demo", "explain", "audit", "audit apply", "probe", "shift", "reproduce", "gram", "status", "verify",
            "watch", "doctor"]  # fmt: skip


def test_help_and_version_import_nothing_that_computes() -> None:
    asked = [[], ["--help"], ["--version"], *([*name.split(), "--help"] for name in COMMANDS)]
    found = loaded(ANSWERS.format(words=asked, code=0))
    assert not found & set(HEAVY)
    assert not {f"tangency.{room}" for room in NOT_FOR_A_KERNEL - {"commands", "experiments"}} & found
    assert len(found) < 200


def test_mistyped_words_import_nothing_that_computes() -> None:
    """Of devices torch alone knows which there are: those are looked at when all else is in order."""
    asked = [
        ["explian"],
        ["--verson"],
        ["audit", "job:make", "--uot", "page"],
        ["audit", "apply"],
        ["explain", "job:make", "--out", "page", "--outputs-are", "numbers"],
        ["gram", "job:make", "--store", "k", "--tile", "0"],
        ["reproduce", "cnkt"],
        ["reproduce", "cntk", "--network", "myrtle"],
        ["reproduce", "cntk", "--device", "cuda:9", "--qick"],
        ["shift", "job:make", "--out", "page", "--keep", "2.5"],
        ["watch", "run.jsonl", "--every", "0"],
        ["verify", "k", "--sample", "many"],
    ]
    assert not loaded(ANSWERS.format(words=asked, code=2)) & set(HEAVY)


def test_the_commands_of_this_file_are_all() -> None:
    there = _parser()._subparsers._group_actions[0].choices  # type: ignore[union-attr]
    assert list(there or ()) == COMMANDS


@pytest.mark.parametrize("package", LAZY, ids=lambda p: p.__name__)
def test_each_public_name_has_one_place(package: ModuleType) -> None:
    """What an `__init__` imports, now or on demand, is what it says is public; and each is what its place has."""
    source = Path(package.__file__ or "").read_text(encoding="utf-8")
    at_once = {
        alias.name
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom) and node.level and node.module != "_base.on_demand"
        for alias in node.names
    } - {"import_on_demand"}
    later = on_demand._places(package.__name__)
    assert not at_once & set(later)
    assert sorted([*at_once, *later]) == sorted({*package.__all__, *(["estimators"] if package is tg else [])})
    for name, (module, attribute) in later.items():
        there = sys.modules[module] if getattr(package, name) and not attribute else None
        assert getattr(package, name) is (there or getattr(sys.modules[module], attribute)), name
    assert set(package.__all__) <= set(dir(package))


@pytest.mark.slow
def test_rooms_imported_in_any_order_leave_the_names_as_they_are() -> None:
    """Modules first, above all that of a function's name; then `import *`; in a process that has asked for nothing."""
    same = {name for name in tg.__all__ if not isinstance(getattr(tg, name), ModuleType) and is_module(SRC / name)}
    assert same == {"doctor"}
    in_a_process(
        "import tangency.doctor, tangency.watch, tangency.representations.shift, tangency.auditing.audit\n"
        "import sys, pickle, tangency as tg\nfrom tangency import doctor\n"
        "assert tg.doctor is doctor is sys.modules['tangency.doctor'].doctor\n"
        "assert tg.watch is sys.modules['tangency.watch']\n"
        "assert tg.shift is tg.representations.shift is sys.modules['tangency.representations.shift'].shift\n"
        "assert all(map(callable, (tg.sum, tg.scale, tg.audit, tg.compute, tg.cosine, tg.explain)))\n"
        "assert tg.engine.blocks.DenseBlock and tg.kernels.combine.sum is tg.sum and tg._base.tree.take\n"
        "assert pickle.loads(b'ctangency\\nGram\\n.') is tg.Gram and pickle.loads(pickle.dumps(tg.sum)) is tg.sum\n"
        "assert 'trace_ntk' in dir(tg) and 'engine' not in dir(tg) and 'sklearn' not in sys.modules\n"
        "from tangency import *\n"
        "assert all(globals()[name] is getattr(tg, name) for name in tg.__all__) and 'estimators' not in globals()"
    )


def is_module(path: Path) -> bool:
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package with a function `same` in a module of that name, one in another's module, and a room."""
    name = "toy_package"
    (tmp_path / name).mkdir()
    for file, text in {
        "__init__": "from typing import TYPE_CHECKING\nfrom tangency._base.on_demand import import_on_demand\n"
        "if TYPE_CHECKING:\n    from . import room\n    from .other import first as other_name, slow\n"
        "    from .same import same\n"
        "__all__ = ['other_name', 'room', 'same', 'slow']\nimport_on_demand(__name__)",
        "other": "import time\nfirst = 1\ntime.sleep(0.05)\nslow = object()",
        "room": "from .same import same",
        "same": "def same(): pass",
        "beside": "",
    }.items():
        (tmp_path / name / f"{file}.py").write_text(text + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield import_module(name)
    on_demand._places.cache_clear()
    for known in [k for k in sys.modules if k.partition(".")[0] == name]:
        del sys.modules[known]


def test_a_package_on_demand(toy: Any) -> None:
    assert {"other_name", "room", "same", "slow"} <= set(dir(toy)) - set(vars(toy))
    assert toy.other_name == 1
    assert "other_name" in vars(toy)
    assert toy.beside is sys.modules["toy_package.beside"]
    assert toy.room is import_module("toy_package.room")
    assert not hasattr(toy, "first")
    with pytest.raises(ImportError, match="cannot import name 'smae' from 'toy_package'"):
        exec("from toy_package import smae")
    toy.same = 3  # as a test that replaces it does
    assert toy.same == 3


@pytest.mark.parametrize("pickler", ["pickle", "cloudpickle"])
def test_functions_travel_that_name_a_package(pickler: str, toy: Any) -> None:
    """A user's function in a script goes to workers with what it names: `lambda x: tg.trace_ntk(model)(x)`."""
    pickling = pytest.importorskip(pickler)
    assert pickling.loads(pickling.dumps(toy)) is toy
    assert pickling.loads(pickling.dumps(tg)) is tg
    if pickler == "cloudpickle":
        assert pickling.loads(pickling.dumps(lambda: toy.same))() is toy.same


@pytest.mark.parametrize("asked_before", [True, False])
def test_a_module_does_not_take_the_name_of_a_function(asked_before: bool, toy: Any) -> None:
    """Python's import puts `toy.same`, the module, into the package, where the function is public."""
    if asked_before:
        assert callable(toy.same)
    module = import_module("toy_package.same")
    assert toy.same is module.same
    assert import_module("toy_package.room").same is toy.same


def test_threads_that_ask_at_once_get_the_same(toy: Any) -> None:
    """While the module is being imported by one of them."""
    ready = threading.Barrier(8)

    def ask(_: int) -> object:
        ready.wait()
        return toy.slow

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert all(thing is toy.slow for thing in found)


def test_after_ctrl_c_a_name_can_be_asked_for_again(toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stop:
        """Finds nothing, and is interrupted as it looks."""

        def find_spec(self, name: str, *_: object) -> None:
            if name == "toy_package.same":
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "meta_path", [Stop(), *sys.meta_path])
        with pytest.raises(KeyboardInterrupt):
            _ = toy.room
    assert callable(toy.room.same)


def test_without_its_source_a_package_says_what_is_missing(toy: Any) -> None:
    """As in a program that was frozen without its files."""
    toy.__spec__.loader = None
    with pytest.raises(ImportError, match="toy_package/__init__.py is not there"):
        _ = toy.same


def test_names_that_are_not_there() -> None:
    for name in ("traec_ntk", "__wrapped__", "__all_names__"):
        with pytest.raises(AttributeError, match=f"module 'tangency' has no attribute '{name}'"):
            getattr(tg, name)


# ---- what --help knows of experiments without importing them --------------------------------------------------------


def test_the_catalogue_says_what_the_experiments_have() -> None:
    assert tuple(cntk.NETWORKS) == catalogue.NETWORKS
    assert catalogue.LEARNERS == tuple(learned.LEARNERS) == tuple(learned.TITLES)
    assert (*(f.name for f in fields(Regression)), "where") == catalogue.OF_REGRESSION
    assert (*(f.name for f in fields(Trainings)), "where") == catalogue.OF_TRAININGS
    known = {f.name for kind in (Options, Regression, Trainings) for f in fields(kind)}
    for experiment in EXPERIMENTS.values():
        assert set(experiment.takes) <= known
        assert callable(experiment.run), experiment.name
    rows = ", ".join([*spectra_table8.CASES, *spectra_table8.EXTRA])
    assert EXPERIMENTS["spectra-table8"].needs == f"no files; --cases chooses rows: {rows}"


def test_the_catalogue_names_the_figures_as_they_are() -> None:
    there = [e for e in EXPERIMENTS.values() if e.name.startswith("conjugate-fig")]
    for figure, experiment in zip(conjugate.FIGURES, there, strict=True):
        width, runs = figure.networks.width, 10 if figure.course else 100
        assert experiment.figure == figure.number
        assert experiment.name == f"conjugate-fig{figure.number}"
        assert experiment.title.endswith(f"Figure {figure.number}: {figure.title}, width {width}")
        assert f"--seeds {runs})" in experiment.needs
