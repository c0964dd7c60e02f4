"""Passes over memory that torch makes slowly or in several, fused by Triton for 16-bit factors on a GPU.

Each function has its meaning in plain torch beside it; the kernels are used only where `_kernels` finds them.
"""

from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx

from .._base import triton
from .._base.memory import power_of_two
from .lattice import Places

# How `form_rows` cuts its work (heuristic; `benchmarks/speed/float8.py` tries others).
FORM = {"BLOCK_O": 128, "BLOCK_I": 128, "num_warps": 4, "num_stages": 3}


def _kernels(v: Tensor) -> ModuleType | None:
    """The Triton kernels, where they can be used for v: on a GPU, and not in a graph."""
    usable = v.device.type == "cuda" and not v.requires_grad
    return triton.load_kernels("tangency.engine.fused_triton") if usable else None


def dot_positions(d: Tensor, x: Tensor) -> Tensor:
    """Σ_t d[n, t, o] · x[n, t, o] in 32 bits → [n, o]."""
    if (kernels := _kernels(d)) is None:
        return (d.float() * x).sum(1)
    n, t, o = d.shape
    out = torch.empty(n, o, dtype=torch.float32, device=d.device)
    block = min(64, power_of_two(o))
    grid = (n, -(-o // block))
    kernels.dot[grid](d, x, out, t, o, *d.stride(), *x.stride(), BLOCK_T=64, BLOCK_O=block)
    return out


def sum_products(a: Tensor, d: Tensor, n: int, t: int, m: int, s: int) -> Tensor:
    """Σ_{t,s} a[n·t, m·s] · d[n·t, m·s] → [n, m], both contiguous, in one pass over each."""
    kernels = _kernels(a) if a.dtype == torch.float32 else None
    if kernels is None or s > 4096:  # a row of s products must fit one program's registers
        return a.mul_(d).view(n * t, m, s).sum(2).view(n, t, m).sum(1)
    out = torch.empty(n, m, dtype=torch.float32, device=a.device)
    # Triton wants powers of two; about 1024 products at a time keep a program busy (heuristic).
    wide = power_of_two(s)
    columns = max(1, 1024 // wide)
    grid = (-(-m // columns), n)
    kernels.sum_pairs[grid](a, d, out, t, m, s, WIDE=wide, COLUMNS=columns)
    return out


def round_rows(g: Tensor, q: Tensor, scale: Tensor, sums: Tensor, top: Tensor) -> bool:
    """Write rows of g [rows, k], scaled to `top` [rows], into q, what undoes it into `scale`, and into `sums` [rows, 2]
    the rows' products with themselves and with what they were rounded to; False if nothing was done.

    `narrow.rounded` has its meaning in torch. One pass: a row is still in the cache when it is read again.
    """
    kernels = _kernels(g)
    if kernels is None or g.stride(1) != 1:
        return False
    sizes = g.shape[1], q.shape[1], g.stride(0)
    kernels.round_row[(len(g),)](g, q, scale, sums, top, *sizes, BLOCK=8192, num_warps=8)
    return True


def forms(a: Tensor, d: Tensor) -> bool:
    """Whether `form_rows` has a kernel for these factors."""
    n, c, _, g, o = d.shape
    neighbours = d.stride(4) == 1 and (c == 1 or d.stride(1) == o)  # outputs and channels are one dimension
    # Rows must be multiples of 16 long; tiles of 128 x 128 that are mostly empty would take longer than three passes.
    fits = g == 1 and a.stride(3) == 1 and a.shape[3] % 16 == 0 and a.shape[3] >= 64 and c * o >= 64
    return fits and neighbours and d.dtype == torch.float16 and n < 1 << 16 and _kernels(d) is not None


def form_rows(a: Tensor, d: Tensor, factor: Tensor, out: Tensor) -> Tensor:
    """factor · Σ_t δ_t ⊗ a_t → out [n, c·o·i], from a [n, 1, t, i] and δ [n, c, t, 1, o], where `forms` says so.

    Returned are the rows' products with themselves and with what they were rounded to: [n, 2].
    """
    kernels = _kernels(d)
    assert kernels is not None
    n, c, t, _, o = d.shape
    i, rows = a.shape[3], c * o
    deep = 64 if t > 32 else 32 if t > 16 else 16
    sizes = FORM | {"BLOCK_T": deep}
    grid = (-(-rows // sizes["BLOCK_O"]) * -(-i // sizes["BLOCK_I"]), n)
    sums = torch.empty(n, grid[0], 2, device=d.device)
    strides = d.stride(0), d.stride(2), a.stride(0), a.stride(2)
    kernels.form[grid](d, a, factor, out, sums, t, rows, i, *strides, **sizes)
    return sums.sum(1)


def sum_shifted(pixels: Tensor, deltas: Tensor, left: Places, right: Places, constant: float = 0.0) -> Tensor:
    """Σ_{t,s} (Σ_u pixels[·, left[t, u], ·, right[s, u]] + constant) · deltas[·, t, ·, s] → [n, m].

    `pixels` [n, p, m, q] and `deltas` [n, t, m, s], contiguous; of two batches of one convolution.
    """
    n, _, m, s = deltas.shape
    kernels = _kernels(pixels) if pixels.dtype == torch.float32 else None
    if kernels is None or left.lattice is None or right.lattice is None or s > 4096 or left.table.shape[1] > 49:
        return (shifted(pixels, left.table, right.table) + constant).mul_(deltas).sum(3).sum(1)
    out = torch.empty(n, m, dtype=torch.float32, device=pixels.device)
    wide = power_of_two(s)
    # Each pixel is fetched for every tap, from the cache: few columns at a time, or they would not stay there.
    columns = max(1, 256 // wide)
    x, y = left.lattice, right.lattice
    sizes = {"PX": x.pixels, "TX": x.positions, "PY": y.pixels, "TY": y.positions}
    taps = {"KERNEL": y.kernel, "STRIDE": y.stride, "BEFORE": y.before, "GAP": y.gap}
    two = {f"{name}{k}": v[k] for name, v in (sizes | taps).items() for k in range(2)}
    grid = (-(-m // columns), n)
    kernels.sum_shifts[grid](pixels, deltas, out, constant, m, 0, WIDE=wide, COLUMNS=columns, **two)
    return out


def shifted(pixels: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Σ_u pixels[n, left[t, u], m, right[s, u]] → [n, t, m, s]: the products of patches from those of pixels."""
    n, p, m, q = pixels.shape
    # A pixel of zeros on either side, which stands for all that lie outside of the image.
    framed = pixels.new_zeros(n, p + 1, m, q + 1)
    framed[:, :p, :, :q] = pixels
    left, right = torch.where(left < 0, p, left), torch.where(right < 0, q, right)
    total = pixels.new_zeros(n, len(left), m, len(right))
    for u in range(left.shape[1]):
        total += framed.index_select(1, left[:, u]).index_select(3, right[:, u])
    return total


def scale_channels(d: Tensor, scale: Tensor) -> Tensor:
    """d[n, o, …] · scale[o]."""
    last = d.dim() == 4 and d.is_contiguous(memory_format=torch.channels_last)
    kernels = _kernels(d)
    if kernels is None or not last:
        return d * scale.to(d.dtype).view(-1, *[1] * (d.dim() - 2))
    out = torch.empty_like(d)
    block = 4096
    kernels.scale_last[(-(-d.numel() // block),)](d, scale, out, d.numel(), d.shape[1], BLOCK=block)
    return out


class _BatchNorm(torch.autograd.Function):
    """F.batch_norm in evaluation mode with a cheap derivative in x, the only one that is needed."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        """As torch does it; kept for the derivative is one number per channel."""
        scale = torch.rsqrt(var.float() + eps)
        ctx.save_for_backward(scale if weight is None else scale * weight)
        return F.batch_norm(x, mean, var, weight, bias, eps=eps)

    @staticmethod
    def backward(ctx: FunctionCtx, d: Tensor) -> tuple[Tensor | None, ...]:
        """δ times weight/σ per channel; nothing for the other arguments."""
        (scale,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return scale_channels(d, scale), None, None, None, None, None


def batch_norm(
    input: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """F.batch_norm for a model in evaluation mode that is differentiated in its input only."""
    return _BatchNorm.apply(input, running_mean, running_var, weight, bias, eps)
