"""Products of 16-bit and 8-bit factors with 32-bit sums.

8 bits are e4m3 (three bits of mantissa, up to 448): rows are rounded with a scale each, which is put back when their
products are there. A card from compute capability 8.9 on multiplies them twice as fast as 16 bits; elsewhere the same
numbers are multiplied in more bits, which is slower and gives the same result up to the order of the sums.
"""

from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from . import fused

EIGHT = torch.float8_e4m3fn
TOP = 448.0  # the largest number of e4m3
# Entries of a sample's gradient, all outputs, from which on 8 bits are used (heuristic). Of a ResNet18's convolutions
# each alone has cosines off by 4e-4 (rms) in 8 bits, whatever its size; short ones average less and cost no time.
LEAST = 1 << 15
# Entries of a cotangent, all outputs together, from which on its products in place are worth rounding (heuristic):
# with fewer it is memory that is waited for.
WIDE = 1 << 11
# Hopper's own sums keep about 14 bits, and rows have a hundred thousand entries and more: added up that way they would
# lose whole per cents, always towards zero. So partial sums go to 32 bits every few steps, at some cost in speed.
FAST_SUMS = False
# Entries that are rounded at a time where torch does it in several passes (heuristic).
_PIECE = 1 << 24
# torch.mm(…, out_dtype=…) came with torch 2.8.
_WIDE_RESULTS = tuple(int(v) for v in torch.__version__.split(".")[:2]) >= (2, 8)


@dataclass(frozen=True)
class Rounded:
    """Rows in 8 bits: row k is scale[k] · q[k]. Rows of q may be longer, filled up with zeros to a multiple of 16."""

    q: Tensor  # [rows, …] in e4m3
    scale: Tensor  # [rows] in 32 bits

    def __getitem__(self, rows: slice) -> "Rounded":
        """Some of the rows."""
        return Rounded(self.q[rows], self.scale[rows])


@cache
def available(device: torch.device) -> bool:
    """Whether a device multiplies numbers of 8 bits itself."""
    if device.type != "cuda" or torch.version.hip is not None:  # AMD's cards have an e4m3 of their own
        return False
    return torch.cuda.get_device_capability(device) >= (8, 9)


def rounded(g: Tensor, phase: Tensor | None = None) -> Rounded:
    """Rows [rows, k] in 8 bits, each scaled so that its largest entry becomes 448, or 448/2^phase.

    Numbers are denser towards zero, so that rounding makes more of them larger than smaller: rows come out too long, by
    about a thousandth. Each scale is corrected for that, such that a row's product with itself unrounded is right.

    `phase` [rows], from 0 to 1, is for rows that may be the same numbers for many samples: rounded alike, their errors
    would be alike too and add up in products. With scales that differ they do not.
    """
    rows, k = g.shape
    q = torch.empty(rows, -(-k // 16) * 16, dtype=EIGHT, device=g.device)
    scale = torch.empty(rows, dtype=torch.float32, device=g.device)
    sums = torch.empty(rows, 2, dtype=torch.float32, device=g.device)
    top = torch.full((rows,), TOP, device=g.device) if phase is None else TOP * torch.exp2(-phase.float())
    if fused.round_rows(g, q, scale, sums, top):
        return Rounded(q, scale * _correction(sums))
    step = max(1, _PIECE // k)
    for start in range(0, rows, step):
        some = slice(start, start + step)
        few = g[some].float()
        largest = torch.linalg.vector_norm(few, torch.inf, 1)
        # Of a row of zeros no scale can be told; 1 does no harm.
        scale[some] = torch.where(largest == 0, 1.0, largest / top[some])
        few = F.pad(few / scale[some, None], (0, q.shape[1] - k))
        q[some] = few.to(EIGHT)
        sums[some] = torch.stack([few.square().sum(1), (few * q[some].float()).sum(1)], 1)
    return Rounded(q, scale * _correction(sums))


def _correction(sums: Tensor) -> Tensor:
    """g·g / g·q per row, from both [rows, 2]; 1 where there is nothing."""
    return torch.where(sums[:, 1] == 0, 1.0, sums[:, 0] / sums[:, 1])


def formed(a: Tensor, d: Tensor, largest: Tensor) -> Rounded:
    """Σ_t δ_t ⊗ a_t as rows [n, c·o·i] in 8 bits, from a [n, 1, t, i] and δ [n, c, t, 1, o], in one pass over memory.

    For factors that `fused.forms`; `rounded` of the gradients does the same in three passes. `largest` [n]: what no
    entry exceeds. Some times too large, it costs a part of the range of e4m3 and no digits.
    """
    scale = torch.where(largest == 0, 1.0, largest / TOP)
    q = torch.empty(len(d), d.shape[1] * d.shape[4] * a.shape[3], dtype=EIGHT, device=d.device)
    return Rounded(q, scale * _correction(fused.form_rows(a, d, 1 / scale, q)))


def bound(a: Tensor, d: Tensor) -> Tensor:
    """What no entry of Σ_t δ_t ⊗ a_t exceeds, by Cauchy and Schwarz: max‖δ_o‖·max‖a_i‖, norms over positions: [n]."""
    largest = [torch.linalg.vector_norm(v, dim=2, dtype=torch.float32).flatten(1).amax(1) for v in (a, d)]
    return largest[0] * largest[1]


def matmul_eight(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ in 32 bits of rows [n, k], [m, k] in e4m3; k is a multiple of 16."""
    if not available(a.device):
        return matmul_wide(a.half(), b.half().T)  # every number of e4m3 is one of 16 bits
    m = len(b)
    if m % 16:  # asked for by cuBLAS; as bytes, since torch pads no 8-bit numbers
        b = F.pad(b.view(torch.uint8), (0, 0, 0, -m % 16)).view(EIGHT)
    one = torch.ones((), device=a.device)
    out = torch._scaled_mm(a, b.T, scale_a=one, scale_b=one, out_dtype=torch.float32, use_fast_accum=FAST_SUMS)
    return out if out.shape[1] == m else out[:, :m].contiguous()


def matmul_wide(a: Tensor, b: Tensor) -> Tensor:
    """a @ b with 32-bit accumulation and result for 16-bit factors."""
    if a.dtype != torch.float16:
        return a @ b
    # Products of 16-bit factors are exact in 32 bits; a 16-bit result would lose what was gained.
    if a.device.type == "cuda" and _WIDE_RESULTS:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
