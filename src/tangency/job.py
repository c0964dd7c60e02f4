"""MODULE:FUNCTION, as the command line takes it: the user's code found and called, and its mistakes shown in it."""

import contextlib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

from ._base.files import LONGEST
from ._base.words import said, short
from .errors import InputError, TangencyError

# Whose lines are no help to the user: ours, and those of Python's import.
_LEFT_OUT = (str(Path(__file__).parent), str(Path(importlib.__file__).parent), "<frozen ")


class JobFailed(Exception):
    """The user's code raised an error, `cause`; `str()` says which, and where in the user's files."""

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(f"{_words(name, cause)}\n{where(cause)}".rstrip())
        self.cause = cause


def call(name: str, needed: str) -> object:
    """What MODULE:FUNCTION returns, a list as a tuple; `needed` says in messages what it should."""
    function = find(name)
    try:
        with _users_code(name):
            made = function()
    except ImportError as e:  # `find` has words for those of the module; this one is of a line in the function
        raise JobFailed(name, e) from e
    except SystemExit as e:
        raise InputError(f"{name} ended the program (sys.exit({e.code!r})); needed: {needed}.") from e
    return tuple(made) if isinstance(made, list) else made


def nameable(name: str) -> bool:
    """Whether files and modules can be called so: no NUL, and no part longer than any disk takes."""
    try:
        return "\0" not in name and all(len(os.fsencode(part)) <= LONGEST for part in re.split("[/:]", name))
    except UnicodeEncodeError:
        return False


def file_of(name: str) -> Path | None:
    """The user's file that MODULE:FUNCTION is in, where its name tells: nothing may be written there."""
    module = name.rpartition(":")[0]
    file = Path(module if module.endswith(".py") else f"{module.replace('.', '/')}.py").absolute()
    return file if module and nameable(name) and file.is_file() else None


def find(name: str) -> Callable[[], object]:
    """The function, its module imported."""
    module_name, _, attribute = name.rpartition(":")
    if not module_name or not attribute or not nameable(name):
        raise InputError(f"{short(name)!r} is not MODULE:FUNCTION, e.g. job:make or path/to/job.py:make.")
    try:
        with _users_code(module_name):
            module = _file(Path(module_name)) if module_name.endswith(".py") else _module(module_name)
    except ModuleNotFoundError as e:
        own = e.name is not None and (module_name + ".").startswith(e.name + ".")
        fix = "Run from the folder that holds it, or give the file." if own else "Install what it imports."
        raise InputError(f"{module_name} cannot be imported: {e}. {fix}") from e
    except ImportError as e:
        raise InputError(
            f"{module_name} cannot be imported: {e}. A file in a package goes by its name: pkg.job:make."
        ) from e
    except SystemExit as e:
        raise InputError(f"{module_name} ended the program (sys.exit({e.code!r})) when it was imported.") from e
    function = getattr(module, attribute, None)
    if not callable(function):
        raise InputError(f"{module_name} has no function {attribute!r}.")
    return function


def where(e: Exception) -> str:
    """The lines that led to an error, without ours: from the user's first one on."""
    frames = [f for f in traceback.extract_tb(e.__traceback__) if not f.filename.startswith(_LEFT_OUT)]
    # What is wrong with the syntax of a file has its place in the error itself.
    place = traceback.format_exception_only(e)[:-1] if isinstance(e, SyntaxError) else []
    return "".join([*traceback.format_list(frames), *place]).rstrip()


@contextlib.contextmanager
def _users_code(name: str) -> Iterator[None]:
    """Errors inside are the user's, but for those that `find` has words for."""
    try:
        yield
    except Exception as e:
        # Ours without a line of the user's is about the name that was given; an import that fails has its own advice.
        if isinstance(e, ImportError) or (isinstance(e, TangencyError) and not where(e)):
            raise
        raise JobFailed(name, e) from e


def _words(name: str, e: Exception) -> str:
    notes = "".join(f" {note}" for note in getattr(e, "__notes__", ()))
    if isinstance(e, TangencyError):
        return f"{e}{notes}"
    return f"{name}: {type(e).__name__}: {e.msg if isinstance(e, SyntaxError) else said(e)}{notes}"


def _file(path: Path) -> ModuleType:
    """A module by its file, which may be called as any other is."""
    path = path.resolve()
    if not path.is_file():
        raise InputError(f"there is no file {path}.")
    spec = _found(path.stem, path.parent)
    if spec is not None and spec.origin == str(path):
        return importlib.import_module(path.stem)
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with contextlib.suppress(ImportError):
        import cloudpickle

        cloudpickle.register_pickle_by_value(module)  # workers cannot import it by that name
    return module


def _module(name: str) -> ModuleType:
    spec, here = _found(name, Path.cwd()), Path.cwd() / (name.replace(".", "/") + ".py")
    if here.is_file() and spec is not None and spec.origin != str(here):
        raise InputError(f"{name} is {spec.origin}, and there is a file {here} too. Say which: give the file.")
    return importlib.import_module(name)


def _found(name: str, folder: Path) -> ModuleSpec | None:
    """What Python would import by that name, with the folder as the last place to look: a file in it must not take the
    place of a library's."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # already there, made by hand
        return None
