"""Pairs of samples through the compiled recursion: laid out in lanes, cut into short calls, spread over threads."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from ..core import Moments, Side
from .arctan import coefficients
from .compiled import HALO, LANES, run_blocks
from .plan import Plan
from .program import CLASSES_Y, ENTRY_H, ENTRY_W, FROM_H, FROM_W, HEIGHT, WIDTH, Program, make_program

# Steps over places in one call of the compiled loop, about a tenth of a second (heuristic): Ctrl-C waits for its end.
CALL = 4e7
# Steps over places below which a second thread costs more than it saves (heuristic).
SMALL = 4e5
# Bytes of the variances of one side that are laid out at a time (heuristic).
LAID_OUT = 1 << 24
LINE = 64  # bytes of a cache line

Laid = tuple[np.ndarray, np.ndarray]  # a side's inputs and variances, a sample a row


def fused_moments(plan: Plan, a: Side, b: Side, tangent: bool, half: bool) -> Moments:
    """The moments of all pairs [n, m] where the plan ends; `half`: both sides are one, and (j, i) is (i, j)."""
    second, first = np.tril_indices(a.size) if half else (v.ravel() for v in np.indices((b.size, a.size)))
    # Columns in groups that share their lanes, row after row: what is laid out for them serves all rows.
    order = np.lexsort((second, first, second // LANES))
    first, second = first[order], second[order]
    program, left = make_program(plan, plan.flat), _laid_out(plan, a)
    right = left if half else _laid_out(plan, b)
    values = _Run(program, left, right, first, second, tangent)()
    matrices = []
    for v in values:
        matrix = np.empty((a.size, b.size), dtype=left[0].dtype)
        matrix[first, second] = v
        if half:
            matrix[second, first] = v
        matrices.append(torch.from_numpy(matrix))
    return Moments(matrices[0], matrices[1] if tangent else None, ())


exact = True  # a sample meets its equal at an angle of exactly 0


def fused_pairs(plan: Plan, a: Side, b: Side, tangent: bool) -> Moments:
    """The moments where the plan ends of samples that meet one by one [n]."""
    index, left = np.arange(a.size), _laid_out(plan, a)
    right = left if b is a else _laid_out(plan, b)
    cov, *ntk = _Run(make_program(plan, plan.flat), left, right, index, index, tangent)()
    return Moments(torch.from_numpy(cov), torch.from_numpy(ntk[0]) if ntk else None, ())


def learn_variances(plan: Plan, side: Side) -> None:
    """Put the variances that the plan's activations read into `side.own`, by the same sums as those of pairs.

    So a sample that meets its equal keeps an angle of exactly 0, though not all sums and activations are rounded as those
    of the plain recursion are.
    """
    program, laid, index = make_program(plan, True), _laid_out(plan, side), np.arange(side.size)
    _Run(program, laid, laid, index, index, False, learn=True)()
    variances, at = torch.from_numpy(laid[1]), 0
    for node in program.own:
        grid = plan.nodes[node].grid
        side.own[node] = variances[:, at : at + math.prod(grid)].unflatten(1, grid).movedim(0, -1)
        at += math.prod(grid)


def _laid_out(plan: Plan, side: Side) -> Laid:
    """A side's inputs [n, channels · pixels] and variances [n, places]; those not known yet are 0."""
    program = make_program(plan, plan.flat)
    x = side.known[program.slot]
    inputs = x.movedim(-1, 0).movedim(-1, 1).reshape(side.size, -1).contiguous()
    own = [side.own.get(node, x.new_zeros(*plan.nodes[node].grid, side.size)) for node in program.own]
    flat = (
        torch.cat([v.reshape(-1, side.size).to(x.dtype) for v in own]).T.contiguous()
        if own
        else x.new_zeros(side.size, 0)
    )
    return inputs.detach().numpy(), flat.detach().numpy()


def rows_at_a_time(plan: Plan, workspace: int | None) -> int:
    """How many samples of a side are laid out at a time: copies of their variances take a part of what is allowed."""
    program = make_program(plan, plan.flat)
    one = 8 * (sum(math.prod(plan.nodes[k].grid) for k in program.own) + program.channels * math.prod(plan.grid))
    room = LAID_OUT if workspace is None else min(LAID_OUT, workspace // 4)
    return max(LANES, room // one // LANES * LANES)


@dataclass
class _Run:
    """A list of pairs on its way through a program."""

    program: Program
    left: Laid
    right: Laid
    first: np.ndarray
    second: np.ndarray
    tangent: bool
    learn: bool = False

    def __call__(self) -> list[np.ndarray]:
        """The covariances (and tangent kernels) of the pairs where the plan ends; runs in threads, and can be stopped."""
        p, count = self.program, len(self.first)
        self.blocks = -(-count // LANES)
        # The last lanes repeat a pair, so that every block is full.
        self.pairs = tuple(
            np.concatenate([v, np.repeat(v[-1:], self.blocks * LANES - count)]).reshape(self.blocks, LANES)
            for v in (self.first, self.second)
        )
        self.rows = int(p.stages[-1][CLASSES_Y])
        self.out = [np.zeros((self.blocks, self.rows, LANES)) for _ in range(2)]
        work = p.work * self.blocks * LANES
        threads = 1 if work < SMALL else min(torch.get_num_threads(), len(list(self._calls())))
        self._spread(threads)
        scale, dtype = p.scales[-1], self.left[0].dtype
        return [(v.sum(1).reshape(-1)[:count] * scale).astype(dtype) for v in self.out[: 1 + self.tangent]]

    def _calls(self) -> Iterator[tuple[int, int, int, int]]:
        """Blocks, and rows of classes of the last stage, for each call of the compiled loop."""
        p, one = self.program, max(1, self.program.work * LANES)
        if len(p.stages) > 1 or one < CALL:
            # About a tenth of a second, and at least four calls a thread: the last ones should end together.
            most = max(1, min(int(CALL // one), self.blocks // (4 * torch.get_num_threads())))
            for k in range(0, self.blocks, most):
                yield k, min(k + most, self.blocks), 0, self.rows
            return
        parts = min(self.rows, math.ceil(one / CALL))
        edges = [self.rows * k // parts for k in range(parts + 1)]
        for block in range(self.blocks):
            for lo, hi in zip(edges[:-1], edges[1:], strict=True):
                yield block, block + 1, lo, hi

    def _spread(self, threads: int) -> None:
        """The calls, taken by as many threads."""
        calls, lock, stop = self._calls(), Lock(), []

        def work() -> None:
            call = self._prepared()
            while not stop:
                with lock:
                    span = next(calls, None)
                if span is None:
                    return
                call(span)

        if threads <= 1:
            work()
            return
        with ThreadPoolExecutor(threads) as pool:
            running = [pool.submit(work) for _ in range(threads)]
            try:
                for one in running:
                    one.result()
            except BaseException:  # Ctrl-C: each thread ends with the call that it is in
                stop.append(True)
                raise

    def _prepared(self):
        """The compiled loop with all that it needs, and room of its own."""
        p, dtype = self.program, self.left[0].dtype
        height = int(max(p.stages[:, ENTRY_H].max(), *p.steps[:, HEIGHT], *p.steps[:, FROM_H]))
        width = int(max(p.stages[:, ENTRY_W].max(), *p.steps[:, WIDTH], *p.steps[:, FROM_W]))

        def room(*shape: int) -> np.ndarray:
            # From the start of a cache line on: registers are as long as one.
            flat = np.zeros(math.prod(shape) + LINE // dtype.itemsize, dtype=dtype)
            skip = -flat.ctypes.data % LINE // dtype.itemsize
            return flat[skip : skip + math.prod(shape)].reshape(shape)

        fields = (p.buffers, height, width * LANES)
        stored = p.stored * LANES
        tangent = self.tangent
        own = (
            room(*fields),
            room(*fields) if tangent else room(1, 1, 1),
            room(3, (width + 2 * HALO) * LANES),
            room(stored),
            room(stored if tangent else 0),
        )
        places, inputs = self.left[1].shape[1] * LANES, self.left[0].shape[1] * LANES
        lanes = (room(inputs), room(inputs), room(places), room(places))
        constants = p.constants.astype(dtype)
        tables = (p.steps, constants, p.stages, p.lists, p.scales.astype(dtype))
        sides = (self.left[0], self.right[0], self.left[1], self.right[1])
        tiny = np.finfo(dtype).tiny
        given = (0.0, math.pi / 2, math.pi, tiny, 1.0, 0.5 / math.pi, 0.25, p.channels)
        numbers = tuple(dtype.type(v) for v in given)
        poly = coefficients(dtype)

        def call(span):
            run_blocks(span, tables, own, lanes, sides, self.pairs, numbers, poly, tangent, self.learn, *self.out)

        return call
