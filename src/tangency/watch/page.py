"""The page around its parts: what a training's record has to show, as JSON, with style and code from the files here."""

import html
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

import torch
from torch import Tensor

from .._base import files, strict_json
from .._base.page import filled, script_json, visible, visible_text
from .._base.types import FilePath, Json
from .._version import __version__
from ..dynamics import Evolution
from ..errors import InputError

# Points of a curve, at most: more are no more to the eye, and the page is loaded again and again (heuristic).
MOST = 1000
# Eigenvalues of one record that are drawn (heuristic).
MODES = 12


def write_page(history: Evolution, path: FilePath, *, refresh: float | None = None) -> Path:
    """Write the page of a training's record, in whole or not at all. `refresh`: seconds after which it loads again.

    >>> import tempfile, tangency as tg
    >>> monitor = tg.dynamics.Monitor(tg.trace_ntk(tg.models.mlp([3, 8, 1])), torch.randn(20, 3))
    >>> monitor(0)
    >>> write_page(monitor.history(), f"{tempfile.mkdtemp()}/run.html").name
    'run.html'
    """
    to = files.writable(path, "path")
    files.write(to, page_text(history, refresh=refresh))
    return to


def page_text(history: Evolution, *, refresh: float | None = None) -> str:
    """The page as text."""
    if refresh is not None and not refresh > 0:
        raise InputError(f"refresh={refresh}; needed: seconds, above 0, or None for a page that stays as it is.")
    model = str(history.about.get("model") or "The network")
    parts = {
        "title": html.escape(visible_text(f"{model}: lazy or rich?")),
        "style": _asset("watch.css"),
        "data": script_json(visible(content(history, refresh))),
        "script": _asset("watch.js"),
    }
    return filled(_asset("page.html"), parts)


def content(history: Evolution, refresh: float | None) -> dict[str, Json]:
    """What the page shows."""
    found, rows = history.verdict(), _thinned(len(history))
    titles = history.titles()
    curves = [
        {"name": name, "title": titles[name], "values": strict_json.plain(_shown(column)[rows])}
        for name, column in history.values.items()
    ]
    return {
        "model": str(history.about.get("model") or "The network"),
        "verdict": None if found is None else strict_json.plain({**vars(found)}),
        "steps": [int(step) for step in history.steps[rows].tolist()],
        "curves": curves,
        "facts": _facts(history),
        "notes": [f"{note[:1].upper()}{note[1:]}." for note in history.notes] + _left_out(history, len(rows)),
        "ended": history.ended,
        "refresh": refresh,
        "version": __version__,
    }


def _facts(history: Evolution) -> dict[str, Json]:
    """How it was recorded, in words."""
    about = history.about
    kernel, probe = (v if isinstance(v, Mapping) else {} for v in (about.get("kernel"), about.get("probe")))
    count = about.get("parameters")
    facts: dict[str, Json] = {
        "Kernel": kernel.get("kernel"),
        "Parameters": f"{count:,}" if isinstance(count, int) else None,
        "Probe": f"{probe.get('samples')} samples, top {about.get('top')} eigenvectors",
        "Begun": about.get("begun"),
        "Recorded": f"{len(history):,} steps, {about.get('pace')}",
        "Skipped": f"{history.skipped:,} calls",
        "Recording took": f"{float(history.seconds.nansum()):.3g} s",
    }
    return {name: value for name, value in facts.items() if value is not None}


def _shown(column: Tensor) -> Tensor:
    return column if column.dim() == 1 else column[:, :MODES]


def _thinned(count: int) -> Tensor:
    """Places of at most `MOST` records, the first and the last among them."""
    return torch.linspace(0, count - 1, min(count, MOST)).round().long().unique()


def _left_out(history: Evolution, shown: int) -> list[str]:
    """What is in the record and not on the page."""
    words = [f"{shown:,} of {len(history):,} records are drawn."] if shown < len(history) else []
    wide = [name for name, column in history.values.items() if column.dim() == 2 and column.shape[1] > MODES]
    return words + [f"Of {name} the largest {MODES} are drawn." for name in wide]


def _asset(name: str) -> str:
    """A file that lies beside this one."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
