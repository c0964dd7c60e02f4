"""Tables whose columns have types: pandas' data frames, and Parquet files."""

import base64
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .._base.extras import needed
from .._base.files import path
from .._base.types import FilePath
from ..errors import InputError
from .encoding import Missing
from .files import read_bytes, title
from .labelled import Labelled
from .lines import Lines, Which
from .table import Wish, wished
from .values import as_lines, check_room


def frame(
    df: Any,
    target: Which | None = None,
    *,
    like: Labelled | None = None,
    columns: Sequence[Which] | None = None,
    categorical: Sequence[Which] | Mapping[Which, Sequence[str]] = (),
    classes: Sequence[str] | None = None,
    decimal: str | None = None,
    thousands: str | None = None,
    missing: Missing | None = None,
    name: str = "frame",
) -> Labelled:
    """The rows of a pandas data frame as samples: x [n, d] in float32, the class from column `target`.

    What `csv` understands of the file that `df.to_csv(file, index=False)` writes, by its rules and options (`csv` says
    which): words become 0/1 columns, true and false too, numbers stay; None, NaN, NA and NaT are missing values;
    dates are refused, unless `categorical`; numbers in texts are numbers. In addition, columns of pandas' type category
    are `categorical`. The index is not used. `decimal`, `thousands`: of numbers in texts. `name`: what the set is
    called, in messages too, which count rows from 0. `like`: what `csv` or `parquet` read will do as well.

    >>> import pandas as pd
    >>> df = pd.DataFrame({"weight": [120, 9.5, 130], "colour": ["red", "red", "blue"], "kind": list("aca")})
    >>> data = frame(df, "kind")
    >>> data.columns, data.x.tolist()
    (('weight', 'colour=blue', 'colour=red'), [[120.0, 0.0, 1.0], [9.5, 0.0, 1.0], [130.0, 1.0, 0.0]])
    >>> frame(df[:1], like=data).y.tolist()
    [0]
    """
    with needed("pandas", "frame()"):
        import pandas as pd
    if not isinstance(df, pd.DataFrame):
        fix = (
            " Write df.to_pandas()." if hasattr(df, "to_pandas") else " Write s.to_frame()." * isinstance(df, pd.Series)
        )
        raise InputError(f"df is a {type(df).__name__}; needed: a pandas DataFrame.{fix}")
    if not isinstance(name, str):
        raise InputError(f"name is a {type(name).__name__}; needed: a string.")
    wish = wished(target, like, columns, categorical, classes, True, decimal, thousands, missing)
    names, header = _names(list(df.columns), name)
    lines = as_lines(wish, name, names, len(df), lambda k: _series(df.iloc[:, k]), header)
    coded = [k for k, dtype in enumerate(df.dtypes) if isinstance(dtype, pd.CategoricalDtype)]
    return _with_categories(wish, lines, coded).read(lines, name)


def parquet(
    file: FilePath,
    target: Which | None = None,
    *,
    like: Labelled | None = None,
    columns: Sequence[Which] | None = None,
    categorical: Sequence[Which] | Mapping[Which, Sequence[str]] = (),
    classes: Sequence[str] | None = None,
    decimal: str | None = None,
    thousands: str | None = None,
    missing: Missing | None = None,
) -> Labelled:
    """The rows of a Parquet file as samples: x [n, d] in float32, the class from column `target`.

    As `frame` reads the data frame that was written to it, with the same options: an index of pandas' is used only if
    it is asked for by name, and columns of Arrow's type dictionary are `categorical`. Columns of lists, records, bytes
    or durations are refused where they are used. Nothing in the file is run or unpickled.

    >>> import tempfile
    >>> from pathlib import Path
    >>> import pyarrow as pa, pyarrow.parquet
    >>> file = Path(tempfile.mkdtemp()) / "fruit.parquet"
    >>> pa.parquet.write_table(pa.table({"weight": [120, 9.5], "kind": ["apple", "cherry"]}), file)
    >>> data = parquet(file, "kind")
    >>> data, data.classes
    (Labelled(fruit: x [2, 1], 2 classes), ('apple', 'cherry'))
    """
    with needed("pyarrow", "parquet()"):
        import pyarrow as pa
        import pyarrow.parquet as pq
    wish = wished(target, like, columns, categorical, classes, True, decimal, thousands, missing)
    place = path(file, "file")
    raw = read_bytes(place, "a Parquet file")
    if raw[:4] != b"PAR1" or raw[-4:] != b"PAR1":
        state = "is truncated, its end is missing" if raw[:4] == b"PAR1" else "is no Parquet file"
        raise InputError(f"{place} {state}; needed: PAR1 as its first and last four bytes. Get it again.")
    try:
        opened = pq.ParquetFile(pa.BufferReader(raw))
        schema = opened.schema_arrow
        if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
            raise InputError(f"{place} has several columns {twice[0]!r}; needed: different names.")
        kept = [name for name in schema.names if name not in _index(schema.metadata) - _asked(wish)]
        label, used = wish.places(Lines(str(place), kept, [], [], True, kind="row"))
        check_room(opened.metadata.num_rows, len(used) + 1, place)
        table = opened.read(columns=[kept[k] for k in (*used, label)])
        lines = as_lines(wish, place, kept, table.num_rows, lambda k: _column(table.column(kept[k])))
    except (pa.ArrowException, OSError) as e:
        raise InputError(f"{place} is damaged: it cannot be read ({e}). Get it again.") from e
    written = _written(schema, opened.metadata.metadata)
    coded = [k for k, name in enumerate(kept) if pa.types.is_dictionary(written.field(name).type)]
    return _with_categories(wish, lines, coded).read(lines, title(place))


def _with_categories(wish: Wish, lines: Lines, coded: Sequence[int]) -> Wish:
    """The wish with the columns of numbers `coded`, as far as they are used, among the categorical ones."""
    if wish.known:  # the training set decides
        return wish
    said = wish.categorical or {}
    already = {lines.column(c, "categorical") for c in said}
    more: dict[Which, frozenset[str]] = {
        k: frozenset() for k in wish.places(lines)[1] if k in coded and k not in already
    }
    return replace(wish, categorical={**said, **more} or None)


def _names(given: Sequence[Any], file: str) -> tuple[list[str], bool]:
    """The names of the columns, and whether they have any: 0, 1, 2, … are none."""
    if given and [type(v) for v in given] == [int] * len(given) and list(given) == list(range(len(given))):
        return [str(v) for v in given], False
    for v in given:
        if not isinstance(v, str):
            raise InputError(
                f"{file} has a column called {v!r} (a {type(v).__name__}); needed: names that are strings, or 0, 1, "
                "2, … for none. df.columns = [str(c) for c in df.columns] makes them."
            )
    return list(given), True


def _series(column: Any) -> Iterable[object]:
    """The values of a column; floats in their own precision, whatever holds them."""
    if getattr(column.dtype, "kind", "") == "f" and hasattr(column.dtype, "itemsize"):
        return column.to_numpy(dtype=np.dtype(f"f{column.dtype.itemsize}"), na_value=np.nan)
    return column.array


def _column(column: Any) -> Iterable[object]:
    """The same of a Parquet file's."""
    kind = str(column.type)
    if kind.startswith("timestamp[ns"):  # finer than Python's own times
        return column.to_numpy()
    small = {"halffloat": np.float16, "float": np.float32}.get(kind)
    values = column.to_pylist()
    return values if small is None else [None if v is None else small(v) for v in values]


def _written(schema: Any, metadata: Mapping[bytes, bytes] | None) -> Any:
    """The types that the columns had when they were written, as Arrow notes them in the file.

    Parquet itself gives the type dictionary back for words alone, not for numbers.
    """
    import pyarrow as pa

    try:
        noted = pa.ipc.read_schema(pa.py_buffer(base64.b64decode((metadata or {})[b"ARROW:schema"])))
    except (KeyError, ValueError, OSError, pa.ArrowException):  # another program's file, or a note that is none
        return schema
    return noted if noted.names == schema.names else schema


def _index(metadata: Mapping[bytes, bytes] | None) -> set[str]:
    """The columns that were the index of a data frame, as pandas notes it in the file."""
    try:
        said = json.loads((metadata or {}).get(b"pandas", b"{}")).get("index_columns", [])
    except (ValueError, AttributeError):  # a note that is none
        return set()
    return {v for v in said if isinstance(v, str)} if isinstance(said, list) else set()


def _asked(wish: Wish) -> set[Any]:
    """What was asked for by name; of a training set, all that it has."""
    known = wish.known
    like = {known.target.name, *(c.name for c in known.columns)} if known else set()
    return {wish.target, *(wish.columns or ()), *(wish.categorical or ()), *like}
