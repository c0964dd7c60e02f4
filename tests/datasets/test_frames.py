"""A table is the same set as a data frame, a CSV file and a Parquet file; what has no cell is refused by its place."""

import datetime
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tangency import InputError, MemoryBudgetError, TangencyWarning
from tangency._base import machine
from tangency.datasets import Labelled, csv, frame, labelled, parquet

FRUIT = pd.DataFrame(
    {"weight": [120, 9.5, 130], "colour": ["red", "red", "blue"], "kind": ["apple", "cherry", "apple"]}
)
WORDS = st.sampled_from(["red", "blue", "a b", "É", "none", 'quo"te', "x,y"])
WHOLE = st.integers(-(2**24), 2**24)  # as far as float32 tells whole numbers apart
HALVES = st.integers(-1000, 1000).map(lambda k: k / 8)


def same(a: Labelled, b: Labelled) -> None:
    assert torch.equal(a.x, b.x)  # type: ignore[arg-type]
    assert torch.equal(torch.as_tensor(a.show), torch.as_tensor(b.show))
    assert (a.columns, a.classes, a.y.tolist()) == (b.columns, b.classes, b.y.tolist())
    assert a.encoding is not None
    assert b.encoding is not None
    assert (a.encoding.columns, a.encoding.target, a.encoding.left_out) == (
        b.encoding.columns,
        b.encoding.target,
        b.encoding.left_out,
    )


def three(df: pd.DataFrame, target: str, **options: Any) -> Labelled:
    """Read in all three ways, which must agree."""
    with tempfile.TemporaryDirectory() as place:
        df.to_csv(f"{place}/t.csv", index=False)
        df.to_parquet(f"{place}/t.parquet")
        data = frame(df, target, **options)
        same(csv(f"{place}/t.csv", target, delimiter=",", **options), data)
        same(parquet(f"{place}/t.parquet", target, **options), data)
        for like in (csv(f"{place}/t.csv", target, delimiter=",", **options), data):
            same(frame(df.iloc[::-1], like=like), data.select(list(range(len(data)))[::-1]))
            same(parquet(f"{place}/t.parquet", like=like), data)
            same(csv(f"{place}/t.csv", like=like, delimiter=","), data)
    return data


@given(data=st.data(), n=st.integers(1, 12))
def test_a_frame_a_csv_file_and_a_parquet_file_are_one_set(data: st.DataObject, n: int) -> None:
    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return data.draw(st.lists(values, min_size=n, max_size=n))

    whole, gaps = column(WHOLE), column(st.none() | st.booleans())
    df = pd.DataFrame({
        "whole": whole,
        "small": np.array(column(HALVES), np.float32),
        "float": column(HALVES),
        "word": column(WORDS),
        "flag": column(st.booleans()),
        "kind": pd.Categorical(column(st.sampled_from(["x", "y"]))),
        "nullable": pd.array(column(st.integers(0, 9)), dtype="Int64"),
        "class": column(st.sampled_from(["u", "v", "w"])),
    })  # fmt: skip
    three(df, "class")
    df["gap"] = pd.array([None if g is None else k for k, g in zip(whole, gaps, strict=True)], dtype="Int64")
    if None in gaps and gaps.count(None) < n:
        for read in (frame,):
            with pytest.raises(InputError, match=rf"frame, row {gaps.index(None)}, column 'gap': the value is missing"):
                read(df, "class")
        assert len(three(df, "class", missing="leave out")) == n - gaps.count(None)


def test_types() -> None:
    df = FRUIT.assign(
        code=pd.Categorical([3, 1, 3]), money=[Decimal("1.50"), Decimal("2"), None], f=np.array([0.1, 1e20, 3], "f4")
    )
    data = frame(df[:2], "kind")
    assert data.columns == ("weight", "colour=red", "code=1", "code=3", "money", "f")
    assert torch.as_tensor(data.show)[:, -1].tolist() == [0.1, 1e20]
    assert torch.equal(data.x[:, -1], torch.tensor([0.1, 1e20]))  # type: ignore[index, call-overload]
    assert frame(df, 2, columns=[0], name="fruit").name == "fruit"
    assert frame(df, -4, columns=["f"]).classes == ("apple", "cherry")
    unnamed = pd.DataFrame([[1.0, 0], [2.0, 1]])
    assert frame(unnamed, 1).columns == ("0",)
    arrow = pd.DataFrame({"f": pd.array([0.1, None], dtype=pd.ArrowDtype(pa.float32())), "y": ["a", "b"]})
    assert torch.as_tensor(frame(arrow, "y", missing="leave out").show).tolist() == [[0.1]]
    texts = pd.DataFrame({"a": ["1.234,5", "2"], "b": [0.5, 1e-7], "y": ["u", "v"]})
    assert torch.as_tensor(frame(texts, "y", decimal=",", thousands=".").show).tolist() == [[1234.5, 0.5], [2.0, 1e-7]]
    days = pd.DataFrame({"day": pd.to_datetime(["2020-01-01", "2020-01-02"]), "y": ["u", "v"]})
    assert three(days, "y", categorical=["day"]).columns == ("day=2020-01-01", "day=2020-01-02")


WRONG: list[tuple[Any, dict[str, Any], str]] = [
    ({"a": [1]}, {}, "df is a dict; needed: a pandas DataFrame"),
    (pd.Series([1]), {}, r"df is a Series; needed: a pandas DataFrame. Write s.to_frame\(\)"),
    (pa.table({"a": [1]}), {}, r"df is a Table; .* Write df.to_pandas\(\)"),
    (FRUIT, {"name": 3}, "name is a int; needed: a string"),
    (FRUIT, {"target": None}, "target is missing; needed: the column of the classes"),
    (FRUIT, {"target": "knd"}, r"target: frame has no column 'knd'. Did you mean 'kind'.* colour, kind\.$"),
    (FRUIT[:0], {}, "frame has no rows; needed: at least one"),
    (FRUIT.rename(columns={"weight": 7}), {}, r"frame has a column called 7 \(a int\); needed: names that are strings"),
    (FRUIT.rename(columns={"weight": ""}), {}, r"column 0 has no name \(an index\?\). Name it, or say which columns"),
    (FRUIT.set_axis(["a", "a", "kind"], axis=1), {}, "two columns that would be called 'a'; .* Rename one, or leave"),
    (FRUIT.assign(a=[[1], [2], [3]]), {}, "frame, row 0, column 'a' holds a list; needed: numbers, words, true"),
    (FRUIT.assign(a=pd.to_timedelta([1, 2, 3])), {}, "column 'a' holds a Timedelta; needed"),
    (FRUIT.assign(a=pd.to_datetime(["2020-01-02"] * 3)), {}, "'2020-01-02' looks like a date or time, as 3 of the 3"),
    (FRUIT.assign(a=[datetime.time(10, 30)] * 3), {}, "'10:30:00' looks like a date or time"),
    (FRUIT.assign(a=[1, None, None]), {}, r"row 1, column 'a': .*leave the row out .*missing in 2 rows"),
    (FRUIT.assign(a=[None] * 3), {"missing": "leave out"}, "frame: every row lacks a value"),
    (FRUIT.assign(a=[1, np.inf, 2]), {}, "row 1, column 'a': 'inf'; needed: finite numbers"),
    (FRUIT.assign(a=["1", "one", "2"]), {}, "row 1, column 'a': 'one' is no number, others of the column are"),
    (FRUIT.assign(kind=[0.5, 1, 2]), {}, "row 0, column 'kind': the target is 0.5; needed: classes"),
    (FRUIT.assign(kind=["1", "01", "2"]), {}, "row 1, column 'kind': '01', and '1' in row 0, are one number"),
    (FRUIT.assign(colour=["red", "red", "grey"]), {"like": frame(FRUIT, "kind")}, "'grey' is not .* leave the row out"),
    (
        FRUIT.assign(kind=["apple", "fig", "fig"]),
        {"like": frame(FRUIT, "kind")},
        "'fig' is none of .* Leave the row out",
    ),
    (FRUIT.assign(a=[1, 2, 3]), {"like": frame(FRUIT, "kind")}, "frame has 'a', which the training set lacks"),
    (FRUIT, {"like": labelled((torch.eye(2), [0, 1]))}, "was not read from a table; .*csv, frame or parquet returned"),
]


@pytest.mark.parametrize(("df", "options", "message"), WRONG)
def test_refused_frames(df: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        frame(df, **({} if "like" in options else {"target": "kind"}) | options)


def test_parquet_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "t.parquet"
    odd = pd.DataFrame({"a": [1.0, 2.0], "l": [[1], [2]], "y": ["u", "v"]}, index=pd.Index([5, 7], name="id"))
    odd.to_parquet(file)
    assert parquet(file, "y", columns=["a"]).columns == ("a",)
    assert parquet(file, "y", columns=["a", "id"]).columns == ("a", "id")
    with pytest.raises(InputError, match="t.parquet, row 0, column 'l' holds a list"):
        parquet(file, "y")
    pq.write_table(pa.table({"t": pa.array([1, None], pa.timestamp("ns")), "y": ["u", "v"]}), file)
    with pytest.raises(InputError, match="row 1, column 't': the value is missing"):
        parquet(file, "y")
    with pytest.raises(InputError, match="'1970-01-01 00:00:00.000000001' looks like a date or time"):
        parquet(file, "y", missing="leave out")
    pq.write_table(pa.table({"n": pa.array([3, 1, 3]).dictionary_encode(), "y": ["u", "v", "u"]}), file)
    assert parquet(file, "y").columns == ("n=1", "n=3")
    coded = pd.DataFrame({"n": pd.Categorical([3, 1, 3]), "y": ["u", "v", "u"]})
    coded.to_parquet(file)
    same(parquet(file, "y"), frame(coded, "y"))
    for note in ({}, {"ARROW:schema": "none"}, {"pandas": "none"}, {"pandas": "[1]"}):  # of other programs
        pq.write_table(pa.table({"n": [3, 1], "y": ["u", "v"]}, metadata=note), file, store_schema=False)
        assert parquet(file, "y").columns == ("n",)
    pq.write_table(pa.table([pa.array([1]), pa.array([2])], names=["a", "a"]), file)
    with pytest.raises(InputError, match="has several columns 'a'; needed: different names"):
        parquet(file, "a")
    FRUIT.to_parquet(file)
    raw = file.read_bytes()
    monkeypatch.setattr(machine, "available_memory", lambda: 899)
    with pytest.raises(MemoryBudgetError, match="has 3 rows and 3 columns: to read them takes about"):
        parquet(file, "kind")
    monkeypatch.undo()
    for damaged, message in [
        (raw[:-9], "is truncated, its end is missing; needed: PAR1"),
        (b"a,b\n1,2\n", "is no Parquet file; needed: PAR1 as its first and last"),
        (raw[:4] + bytes(len(raw) - 8) + raw[-4:], "is damaged: it cannot be read"),
    ]:
        file.write_bytes(damaged)
        with pytest.raises(InputError, match=message):
            parquet(file, "kind")
    with pytest.raises(InputError, match="none.parquet does not exist; needed: a Parquet file"):
        parquet(tmp_path / "none.parquet", "kind")


def test_numbers_that_become_one_are_named_at_the_users_line(tmp_path: Path) -> None:
    df = pd.DataFrame({"a": [2**24, 2**24 + 1], "y": ["u", "v"]})
    df.to_parquet(tmp_path / "t.parquet")
    for read in (lambda: frame(df, "y"), lambda: parquet(tmp_path / "t.parquet", "y")):
        with pytest.warns(TangencyWarning, match="column 'a' has different numbers that become one") as said:
            read()
        assert said[0].filename == __file__


def test_labelled_says_which_reader() -> None:
    with pytest.raises(InputError, match=r"train is a DataFrame; .* Read it: tg.datasets.frame\(df, target=…\)"):
        labelled(FRUIT, name="train")
