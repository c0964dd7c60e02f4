"""Pairs of samples through the compiled recursion: laid out in lanes, cut into short calls, spread over threads."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from threading import Event, Lock

import numpy as np
import torch

from ..core import Moments, Side
from .arctan import coefficients
from .compiled import HALO, LANES, run_blocks
from .plan import Met, Plan
from .program import CLASSES_Y, ENTRY_H, ENTRY_W, HEIGHT, WIDTH, Program, make_program

# Steps over places in one call of the compiled loop, about a tenth of a second (heuristic): Ctrl-C waits for its end.
CALL = 4e7
# Steps over places below which a second thread costs more than it saves (heuristic).
SMALL = 1e6
# Bytes of the variances of one side that are laid out at a time (heuristic).
LAID_OUT = 1 << 24
# Bytes that all threads together hold (heuristic): poolings inside large images leave much, and then fewer threads run.
ROOM = 1 << 30
LINE = 64  # bytes of a cache line

Laid = tuple[np.ndarray, np.ndarray]  # a side's inputs and variances, a sample a row


def fused_moments(plan: Plan, a: Side, b: Side, tangent: bool, half: bool) -> Met:
    """All pairs [n, m]; `half`: both sides are one, and (j, i) is (i, j)."""
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
    products, cov, *ntk = matrices
    return Met(Moments(cov, ntk[0] if ntk else None, ()), products)


exact = True  # a sample meets its equal at an angle of exactly 0


def fused_pairs(plan: Plan, a: Side, b: Side, tangent: bool) -> Moments:
    """The moments where the plan ends of samples that meet one by one [n]."""
    index, left = np.arange(a.size), _laid_out(plan, a)
    right = left if b is a else _laid_out(plan, b)
    _, cov, *ntk = _Run(make_program(plan, plan.flat), left, right, index, index, tangent)()
    return Moments(torch.from_numpy(cov), torch.from_numpy(ntk[0]) if ntk else None, ())


def learn_variances(plan: Plan, side: Side) -> None:
    """Put the variances that the plan's activations read into `side.own`, by the same sums as those of pairs.

    So a sample that meets its equal keeps an angle of exactly 0, though not all sums and activations are rounded as
    those of the plain recursion are.
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
    own = x.new_zeros(side.size, sum(math.prod(plan.nodes[node].grid) for node in program.own))
    at = 0
    for node in program.own:
        size = math.prod(plan.nodes[node].grid)
        if node in side.own:
            own[:, at : at + size] = side.own[node].reshape(size, -1).T
        at += size
    return inputs.detach().numpy(), own.detach().numpy()


def rows_at_a_time(plan: Plan, workspace: int | None) -> int:
    """How many samples of a side at a time: copies of their variances, and the sums of pairs, take what is allowed."""
    program = make_program(plan, plan.flat)
    sample = 8 * (sum(math.prod(plan.nodes[k].grid) for k in program.own) + program.channels * math.prod(plan.grid))
    pair = 16 * int(program.stages[-1][CLASSES_Y]) + 64  # sums over each row of classes; indices
    room = LAID_OUT if workspace is None else min(LAID_OUT, workspace // 8)
    return max(LANES, min(room // sample, math.isqrt(4 * room // pair)) // LANES * LANES)


Span = tuple[int, int, int, int]  # of blocks and of rows of classes, each from and to


class _Run:
    """A list of pairs on its way through a program."""

    def __init__(
        self,
        program: Program,
        left: Laid,
        right: Laid,
        first: np.ndarray,
        second: np.ndarray,
        tangent: bool,
        learn: bool = False,
    ) -> None:
        self.program, self.left, self.right, self.tangent, self.learn = program, left, right, tangent, learn
        self.count, self.blocks = len(first), -(-len(first) // LANES)
        # The last lanes repeat a pair, so that every block is full.
        more = self.blocks * LANES - self.count
        self.pairs = tuple(np.append(v, np.repeat(v[-1:], more)).reshape(-1, LANES) for v in (first, second))
        # Each row of classes has sums of its own, so that they do not depend on how the rows are spread over calls.
        self.rows, self.dtype = int(program.stages[-1][CLASSES_Y]), left[0].dtype
        self.out = [np.zeros((self.blocks, self.rows, LANES)) for _ in range(2)]
        self.products = np.zeros((self.blocks, LANES))

    def __call__(self) -> list[np.ndarray]:
        """The inputs' mean products of the pairs, and the covariances (and tangent kernels) where the plan ends."""
        small = self.program.work * self.blocks * LANES < SMALL
        room = sum(math.prod(shape) for shape in self._rooms()) * self.dtype.itemsize
        most = min(torch.get_num_threads(), len(list(self._calls())), ROOM // max(1, room))
        self._spread(1 if small else max(1, most))
        scale, (height, width) = self.program.scales[-1], self.program.stages[0][[ENTRY_H, ENTRY_W]]
        found = [self.products / (height * width), *(v.sum(1) * scale for v in self.out[: 1 + self.tangent])]
        return [v.reshape(-1)[: self.count].astype(self.dtype) for v in found]

    def _calls(self) -> Iterator[Span]:
        """Blocks, and rows of classes of the last stage, for each call of the compiled loop."""
        p, one = self.program, max(1, self.program.work * LANES)
        if len(p.stages) > 1 or one < CALL:
            # At least four calls a thread: the last ones should end together.
            most = max(1, min(int(CALL // one), self.blocks // (4 * torch.get_num_threads())))
            for k in range(0, self.blocks, most):
                yield k, min(k + most, self.blocks), 0, self.rows
            return
        parts = min(self.rows, math.ceil(one / CALL))
        edges = [self.rows * k // parts for k in range(parts + 1)]
        for block in range(self.blocks):
            for lo, hi in pairwise(edges):
                yield block, block + 1, lo, hi

    def _spread(self, threads: int) -> None:
        """All calls, taken one after the other by so many threads."""
        calls, lock, stop = self._calls(), Lock(), Event()

        def work() -> None:
            call = self._ready()
            while not stop.is_set():
                with lock:
                    span = next(calls, None)
                if span is None:
                    return
                call(span)

        # This thread is one of them: a small job would else wait for another to start.
        with ThreadPoolExecutor(max(1, threads - 1)) as pool:
            others = [pool.submit(work) for _ in range(threads - 1)]
            try:
                work()
                for one in others:
                    one.result()
            except BaseException:  # Ctrl-C: each thread ends with the call that it is in
                stop.set()
                raise

    def _rooms(self) -> list[tuple[int, ...]]:
        """What a thread holds: fields and their tangents, rows, what poolings leave, both sides of LANES pairs."""
        p, tangent = self.program, self.tangent
        height = int(max(p.stages[:, ENTRY_H].max(), p.steps[:, HEIGHT].max(initial=1)))
        width = int(max(p.stages[:, ENTRY_W].max(), p.steps[:, WIDTH].max(initial=1)))
        fields, stored = (p.buffers, height, width * LANES), p.stored * LANES
        inputs, places = (v.shape[1] * LANES for v in self.left)
        rows = (4, (width + 2 * HALO) * LANES)
        kept = [fields, fields if tangent else (1, 1, 1), rows, (stored,), (stored if tangent else 0,)]
        return [*kept, (inputs,), (inputs,), (places,), (places,)]

    def _ready(self) -> Callable[[Span], None]:
        """The compiled loop with all that it reads, and room of its own."""
        p, dtype = self.program, self.dtype
        rooms = [_aligned(shape, dtype) for shape in self._rooms()]
        tables = (p.steps, p.constants.astype(dtype), p.stages, p.lists, p.scales.astype(dtype))
        sides = (self.left[0], self.right[0], self.left[1], self.right[1])
        numbers = (0.0, math.pi / 2, math.pi, np.finfo(dtype).tiny, 1.0, 0.5 / math.pi, 0.25, p.channels)
        typed, poly = tuple(dtype.type(v) for v in numbers), coefficients(dtype)
        room, lanes = tuple(rooms[:5]), tuple(rooms[5:])
        given = (
            tables,
            room,
            lanes,
            sides,
            self.pairs,
            typed,
            poly,
            self.tangent,
            self.learn,
            *self.out,
            self.products,
        )
        return lambda span: run_blocks(span, *given)


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Zeros from the start of a cache line on: registers are as long as one, and would else read two."""
    size = math.prod(shape)
    flat = np.zeros(size + LINE // dtype.itemsize, dtype=dtype)
    skip = -flat.ctypes.data % LINE // dtype.itemsize
    return flat[skip : skip + size].reshape(shape)
