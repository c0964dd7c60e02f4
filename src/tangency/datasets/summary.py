"""What is in a data set, in a few lines."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from .._base import tree
from .._base.types import Inputs
from .cells import shown
from .encoding import Column, Encoding

# Columns, and words of one, that are named (heuristic: a screen).
_COLUMNS, _WORDS = 40, 10


def summary(
    name: str, classes: Mapping[str, int], x: Inputs, rows: Tensor | None, columns: tuple[str, ...],
    encoding: Encoding | None,
) -> str:  # fmt: skip
    """The text of `Labelled.summary`; `rows` [n, d] are those of the columns."""
    n = sum(classes.values())
    of = f" ({shown([encoding.target.name])[0]})" if encoding else ""
    lines = [f"{shown([name])[0]}: {_many(n, 'sample')}, {_many(len(classes), 'class')}{of}: {_counts(classes)}"]
    if rows is None:
        lines += [f"  {label}  {list(v.shape[1:])} {_range(v)}" for label, v in tree.leaves(x)]
        return "\n".join(lines)
    known = encoding.columns if encoding else tuple(Column(c) for c in columns)
    names = shown(c.name for c in known[:_COLUMNS])
    width = max(map(len, names))
    lines += [f"  {c:{width}}  {text}" for c, text in zip(names, _described(known[:_COLUMNS], rows), strict=True)]
    if len(known) > _COLUMNS:
        lines.append(f"  and {len(known) - _COLUMNS} columns more")
    if encoding and encoding.unused:
        lines.append(f"  not used: {_some(shown(encoding.unused))}")
    if encoding:
        lacking = {c.name: c.missing for c in (*encoding.columns, encoding.target) if c.missing}
        left = f"; {_many(encoding.left_out, 'line')} left out" if lacking else ""
        lines.append(f"  missing values: {_counts(lacking) if lacking else 'none'}{left}")
    return "\n".join(lines)


def _described(columns: tuple[Column, ...], rows: Tensor) -> Iterator[str]:
    """The kind of each column, and what of it occurs."""
    at = 0
    for column in columns:
        part = rows[:, at : at + len(column.names)]
        at += len(column.names)
        if column.words is None:
            yield f"number  {_range(part)}"
        else:
            yield "words   " + _counts(dict(zip(column.words, part.sum(0).long().tolist(), strict=True)))


def _range(v: Tensor) -> str:
    if not v.numel() or v.is_complex():
        return ""
    low, high = (float(k) for k in v.detach().aminmax())
    return f"{low:g} to {high:g}"


def _counts(counts: Mapping[str, int]) -> str:
    return _some([f"{word} {count}" for word, count in zip(shown(counts), counts.values(), strict=True)])


def _some(words: list[str]) -> str:
    more = f", and {len(words) - _WORDS} more" if len(words) > _WORDS else ""
    return ", ".join(words[:_WORDS]) + more


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}" + ("" if n == 1 else "es" if what.endswith("s") else "s")
