"""The loop over blocks: prepare rows once, sweep the columns, within the memory budget."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import _check, _tree
from .._types import Inputs
from ..errors import InputError, NonFiniteError, PerformanceWarning
from ..gram import DenseGram, Gram, _place
from ..kernel import Kernel, Prepared
from .plan import TilePlan, plan


def compute(
    kernel: Kernel, x: Inputs, y: Inputs | None = None, *, memory: int | str = "4GiB", progress: bool = True
) -> Gram:
    """The Gram matrix of x with y, block by block, for any number of samples.

    The symmetric half is computed once. `memory` bounds what is allocated on the way, the result included, beyond the
    inputs and the model. `progress` shows a bar on a terminal. Running out of CUDA memory halves the blocks.

    >>> import tangency as tg
    >>> gram = tg.compute(tg.trace_ntk(torch.nn.Linear(3, 2)), torch.randn(100, 3), memory="64MB")
    >>> gram.shape, (gram @ torch.ones(100)).shape
    (torch.Size([100, 100]), torch.Size([100]))
    """
    if not isinstance(kernel, Kernel):
        raise InputError(f"kernel is a {type(kernel).__name__}; needed: a tangency kernel, e.g. tg.trace_ntk(model).")
    budget = _check.memory(memory)
    assert budget is not None
    x = _tree.transform(lambda v: v.detach(), kernel.ready(x))
    if y is not None:
        y = _tree.transform(lambda v: v.detach(), kernel.ready(y, "y"))
        _check.same_form(x, y)
    cut = _cut(kernel, x, y, budget)
    while True:
        try:
            with torch.no_grad():
                return DenseGram(run_tiles(kernel, x, y, cut, progress))
        except torch.cuda.OutOfMemoryError:
            torch.cuda.empty_cache()
            cut = cut.halved()
            warnings.warn(
                f"CUDA ran out of memory; going on with blocks of {cut.rows} samples.", PerformanceWarning, stacklevel=2
            )


def _cut(kernel: Kernel, x: Inputs, y: Inputs | None, budget: int) -> TilePlan:
    n, m = _tree.size(x), _tree.size(x if y is None else y)
    kept, transient = kernel.footprint(x)
    if y is not None:
        other = kernel.footprint(y)
        kept, transient = max(kept, other[0]), max(transient, other[1])
    few = _tree.take(x, slice(0, 1))
    tile = kernel.pair(*[kernel.prepare(few)] * 2)
    cell = tile.numel() * tile.element_size()
    return plan(n, m, y is None, budget, n * m * cell, kept, transient, cell, tile.device.type == "cuda")


def run_tiles(kernel: Kernel, x: Inputs, y: Inputs | None, cut: TilePlan, progress: bool = False) -> Tensor:
    """The whole matrix by the blocks of a plan; of a symmetric one the lower half is copied from the upper."""
    out: Tensor | None = None
    kept: dict[int, Prepared] = {}

    def prepare(side: Inputs, block: slice) -> Prepared:
        try:
            return kernel.prepare(_tree.take(side, block), cut.capture)
        except NonFiniteError as e:
            raise e.shifted(block.start) from None

    with _bar(cut.count, progress) as step:
        for rows, columns in cut.tiles():
            a = kept.pop(rows.start) if y is None and rows.start in kept else prepare(x, rows)
            kept.clear()
            for block in columns:
                same = y is None and block == rows
                b = a if same else prepare(x if y is None else y, block)
                tile = kernel.pair(a, b, cut.workspace)
                if out is None:
                    c, d = (tile.shape[1:2], tile.shape[3:]) if tile.dim() == 4 else ((), ())
                    out = tile.new_empty(cut.n, *c, cut.m, *d)
                _place(out, rows, block, tile)
                if y is None and not same:
                    _place(out, block, rows, tile.T if tile.dim() == 2 else tile.permute(2, 3, 0, 1))
                    if block.start == rows.stop:
                        kept[block.start] = b  # the next row block
                step()
    assert out is not None
    return out


@contextmanager
def _bar(total: int, progress: bool) -> Iterator[Any]:
    """A progress bar on a terminal (tqdm, where it is installed); silence elsewhere."""
    if not (progress and total > 1 and sys.stderr.isatty()):
        yield lambda: None
        return
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda: None
        return
    with tqdm(total=total, unit="tile", desc="kernel") as bar:
        yield bar.update
