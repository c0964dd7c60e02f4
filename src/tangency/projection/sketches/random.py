"""Random words that are a pure function of (seed, parameter name, use, row, column).

Word `w` of row `r` is word w mod 4 of Philox4x64-10 (Salmon et al. 2011) with the counter (w // 4 + 1, r, output, use)
and a key of 128 bits: the first 16 bytes, little-endian, of SHA-256 of "seed:name". That is what NumPy gives:

    key = int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little")
    np.random.Philox(counter=[0, r, output, use], key=key).random_raw(count)

so any program can make them again. Nothing is kept between calls: blocks, processes and devices do not matter.
"""

import hashlib
import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from . import triton

# What words are for: the last number of the counter.
SIGN, NORMAL, COLUMN, SHIFT, FIRST, REST, PICK = range(7)
# The constants of Philox4x64: multipliers of the two halves of the counter, and what is added to the key every round.
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_LOW = 0xFFFFFFFF


@dataclass(frozen=True)
class Stream:
    """The words of one parameter; `output` numbers the outputs where each has a matrix of its own."""

    key: int
    output: int = 0

    @staticmethod
    def of(seed: int, name: str) -> "Stream":
        """The stream of a parameter, by its name."""
        return Stream(int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:16], "little"))

    def words(self, use: int, rows: int, start: int, count: int, device: torch.device, top: int = 0) -> Tensor:
        """Words start … start + count of rows top … top + rows: int64 [rows, count]."""
        if device.type == "cuda" and triton.present():
            first, last = start // 4, -(-(start + count) // 4)
            made = triton.launch_words(self.key, self.output, use, top + rows, first, last - first, device)[top:]
            return made[:, start - 4 * first : start - 4 * first + count]
        if device.type != "cpu":
            return self.at(use, rows, torch.arange(start, start + count, device=device), top)
        made = torch.empty(rows, count, dtype=torch.int64)
        for r in range(rows):
            # NumPy adds 1 to the counter before it makes the first four words.
            source = np.random.Philox(counter=[start // 4, top + r, self.output, use], key=self.key)
            made[r] = torch.from_numpy(source.random_raw(start % 4 + count)[start % 4 :].view(np.int64))
        return made

    def at(self, use: int, rows: int, index: Tensor, top: int = 0) -> Tensor:
        """Words with these numbers of rows top … top + rows: int64 [rows, len(index)], by plain tensor arithmetic."""
        row = torch.arange(top, top + rows, device=index.device)[:, None]
        made = _philox((index // 4 + 1)[None], row, self.output, use, self.key)
        return torch.stack(made).gather(0, (index % 4).expand(1, rows, -1))[0]


def signs(stream: Stream, use: int, row: int, start: int, count: int, like: Tensor) -> Tensor:
    """±1 of columns start … start + count: column p has bit p mod 64 of word p // 64 of a row (1 is +)."""
    first = start // 64
    words = stream.words(use, 1, first, -(-(start + count) // 64) - first, like.device, row)[0]
    bits = (words[:, None] >> torch.arange(64, device=like.device)) & 1
    return bits.flatten()[start - 64 * first : start - 64 * first + count].to(like.dtype).mul_(2).sub_(1)


def below(words: Tensor, k: int) -> Tensor:
    """Words as numbers 0 … k: their upper 32 bits times k, shifted down."""
    return (((words >> 32) & _LOW) * k) >> 32


def entries(words: Tensor, normal: bool, out: Tensor) -> Tensor:
    """A dense matrix [q, k] into `out`, from the words [rows, q] of its columns: each has 64 signs or 4 normal numbers.

    Row r of the matrix is bit r mod 64 of word row r // 64 (1 is +), or entry of `normal_table` number: bits
    16 (r mod 4) … of word row r // 4.
    """
    q, k = out.shape
    if out.device.type == "cuda" and triton.present():
        return triton.launch_entries(words, normal_table(out.device) if normal else None, out)
    # The words of a column side by side, so that their bytes are its entries in order (little-endian).
    packed = words.T.clone(memory_format=torch.contiguous_format)
    if normal and out.device.type == "cpu":
        number = packed.numpy().view(np.uint16).reshape(q, -1)[:, :k]
        return out.copy_(torch.from_numpy(normal_table(out.device).numpy()[number]))
    if normal:
        index = packed.view(torch.int16).view(q, -1)[:, :k].int() & 0xFFFF
        return out.copy_(normal_table(out.device)[index])
    index = packed.view(torch.uint8).view(-1).int()
    table = sign_table(out.dtype, out.device)
    if k % 64 == 0 and out.is_contiguous():
        torch.index_select(table, 0, index, out=out.view(-1, 8))
        return out
    return out.copy_(table[index].view(q, -1)[:, :k])


@cache
def sign_table(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The eight signs in a byte: [256, 8]."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (bits * 2 - 1).to(device, dtype)


@cache
def normal_table(device: torch.device) -> Tensor:
    """65,536 equally likely values of a normal distribution, Φ⁻¹((i + ½) / 65536), scaled to variance 1; float32.

    A table, because logarithms and cosines differ in their last bits between machines.
    """
    quantile = NormalDist().inv_cdf
    half = [quantile((i + 0.5) / 65536) for i in range(32768, 65536)]
    spread = math.sqrt(math.fsum(v * v for v in half) / 32768)
    values = torch.tensor([v / spread for v in half], dtype=torch.float64)
    return torch.cat([-values.flip(0), values]).to(device, torch.float32)


def _philox(first: Tensor, second: Tensor, third: int, fourth: int, key: int) -> list[Tensor]:
    """Ten rounds on 64-bit words; int64 tensors hold their bits."""
    c = [v.broadcast_to(torch.broadcast_shapes(first.shape, second.shape)) for v in (first, second)]
    c += [torch.full_like(c[0], third), torch.full_like(c[0], fourth)]
    low, high = key % 2**64, key >> 64
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(c[0], _MULTIPLIERS[0]), _product(c[2], _MULTIPLIERS[1])
        c = [high1 ^ c[1] ^ _signed(low), low1, high0 ^ c[3] ^ _signed(high), low0]
        low, high = (low + _WEYL[0]) % 2**64, (high + _WEYL[1]) % 2**64
    return c


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """(high, low) words of the 128-bit product of unsigned words."""
    # By halves of 32 bits: torch has no 128-bit product, and int64 products wrap round, which is what is wanted.
    a0, a1, b0, b1 = a & _LOW, (a >> 32) & _LOW, b & _LOW, b >> 32
    ll, lh, hl, hh = a0 * b0, a0 * b1, a1 * b0, a1 * b1
    middle = ((ll >> 32) & _LOW) + (lh & _LOW) + (hl & _LOW)
    return hh + ((lh >> 32) & _LOW) + ((hl >> 32) & _LOW) + ((middle >> 32) & _LOW), a * _signed(b)


def _signed(word: int) -> int:
    """An unsigned word as the int64 with its bits."""
    return word - 2**64 if word >= 2**63 else word
