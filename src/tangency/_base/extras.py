"""Libraries that tangency does without until something needs them: what each extra is for, and how one is asked for."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import NamedTuple

from ..errors import MissingLibrary


class Extra(NamedTuple):
    """What `pip install 'tangency[…]'` adds: libraries, by the name that is imported, and what they are for."""

    libraries: Mapping[str, str]
    use: str


# As pyproject.toml has them (tests/test_packaging.py compares); `demo` and `all` are made of these.
EXTRAS: Mapping[str, Extra] = {
    "progress": Extra({"tqdm": "tqdm"}, "progress bars"),
    "store": Extra({"zarr": "zarr", "google_crc32c": "google-crc32c"}, "Gram matrices on disk, of any size"),
    "workers": Extra({"cloudpickle": "cloudpickle"}, "kernels of your own scripts in other processes"),
    "ray": Extra({"ray": "Ray"}, "many machines"),
    "sklearn": Extra({"sklearn": "scikit-learn"}, "tg.estimators, the bundled digits, tangency demo"),
    "dynamics": Extra({"scipy": "SciPy"}, "training as an ODE, Gram.to_scipy()"),
    "plots": Extra({"matplotlib": "matplotlib"}, "plot() of results"),
    "report": Extra({"PIL": "Pillow"}, "smaller pictures in reports, folders of images"),
    "pandas": Extra({"pandas": "pandas"}, "data frames as data: tg.datasets.frame"),
    "parquet": Extra({"pyarrow": "pyarrow"}, "Parquet files as data: tg.datasets.parquet"),
    "hf": Extra({"datasets": "datasets"}, "makes what tg.datasets.from_hf reads"),
    "lightning": Extra({"lightning": "lightning"}, "trains what tg.dynamics.lightning_callback watches"),
    "transformers": Extra({"transformers": "transformers"}, "trains what tg.dynamics.trainer_callback watches"),
    "lora": Extra({"peft": "peft"}, "low-rank adapters in tangency reproduce last-layer"),
    "compiled": Extra({"numba": "numba"}, "convolutional kernels of infinite width, several times faster on a CPU"),
}
# The extra of each library, by the name that is imported.
EXTRA_OF: Mapping[str, str] = {library: name for name, extra in EXTRAS.items() for library in extra.libraries}


@contextmanager
def needed(library: str, what: str) -> Iterator[None]:
    """Imports inside that `what` cannot do without: if the library is missing, an error says which extra has it.

    A library that is there and fails for another reason keeps its own words.

    >>> with needed("matplotlib", "a picture"):  # else: a picture needs matplotlib: pip install 'tangency[plots]'.
    ...     from matplotlib.figure import Figure
    """
    try:
        yield
    except ModuleNotFoundError as e:
        # zarr.abc missing while zarr is there means another version, which its own words tell best.
        if e.name is None or e.name.partition(".")[0] != library or is_installed(library):
            raise
        title = EXTRAS[EXTRA_OF[library]].libraries[library]
        raise MissingLibrary(f"{what} needs {title}: {install(EXTRA_OF[library])}.", name=library) from e


def install(extra: str) -> str:
    """The command that adds an extra.

    >>> install("store")
    "pip install 'tangency[store]'"
    """
    return f"pip install 'tangency[{extra}]'"


def is_installed(library: str) -> bool:
    """Whether a library can be found, without importing it."""
    try:
        return find_spec(library) is not None
    except ValueError:  # made by hand, so it is there
        return True
