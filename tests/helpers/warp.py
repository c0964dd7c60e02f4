"""Runs the generated CUDA kernels on a CPU, a warp at a time (warp.h): the very text that a GPU gets is tested."""

import ctypes
import hashlib
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from torch import Tensor

from tangency.infinite.moments.fused.source import HEADER, Kernel

HERE = Path(__file__).parent
STAGE = """
extern "C" void go(int gx, int gy, int warps, const cell* a, const cell* b, const int* c, const int* d, const cell* e,
                   const cell* f, cell* g, cell* h, double* s, int n, int p) {
    for (blockIdx.x = 0; blockIdx.x < gx; blockIdx.x++)
        for (blockIdx.y = 0; blockIdx.y < gy; blockIdx.y++)
            for (WARP = 0; WARP < warps; WARP++) stage(a, b, c, d, e, f, g, h, s, n, p);
}
"""
POOL = """
extern "C" void go(const cell* from, cell* to, int count) {
    blockDim.x = count;
    for (threadIdx.x = 0; threadIdx.x < count; threadIdx.x++) pool(from, to, count);
}
"""


def compiler() -> str | None:
    """A C++ compiler, if there is one."""
    return shutil.which("g++") or shutil.which("clang++")


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="tangency-warp-")


@cache
def _library(source: str) -> ctypes.CDLL:
    found = compiler()
    assert found is not None
    stem = Path(_folder().name) / hashlib.sha256(source.encode()).hexdigest()[:16]
    stem.with_suffix(".cpp").write_text(source, encoding="utf-8")
    options = ["-O0", "-ffp-contract=off", "-shared", "-fPIC", "-w", f"-I{HERE}"]
    subprocess.run([found, *options, "-o", f"{stem}.so", f"{stem}.cpp"], check=True)
    return ctypes.CDLL(f"{stem}.so")


def check_types(text: str) -> None:
    """Read a kernel's whole text, header and all, as a CUDA compiler would (cuda.h); what is ambiguous is an error."""
    found = compiler()
    assert found is not None
    options = ["-std=c++17", "-fsyntax-only", "-pedantic-errors", "-include", str(HERE / "cuda.h"), "-x", "c++", "-"]
    subprocess.run([found, *options], input=text, text=True, check=True)


def _pointer(v: Tensor | int) -> ctypes.c_void_p | ctypes.c_int:
    return ctypes.c_void_p(v.data_ptr()) if isinstance(v, Tensor) else ctypes.c_int(v)


class Warps:
    """As `gpu.Gpu`, on a CPU."""

    def stage(self, kernel: Kernel, blocks: tuple[int, int], args: Sequence[Tensor | int]) -> None:
        """Run a stage's kernel, warp after warp."""
        text = kernel.text.split(HEADER)[1]
        text = text.replace("extern __shared__ __align__(16) unsigned char space[];", "unsigned char* space = space_;")
        source = f'#define CELL {kernel.layout.real}\n#include "warp.h"\n{text}{STAGE}'
        _library(source).go(*blocks, kernel.warps, *map(_pointer, args))

    def pool(self, text: str, source: Tensor, to: Tensor) -> None:
        """Run the pooling between two stages, entry after entry."""
        cell = "float" if to.element_size() == 4 else "double"
        text = f'#define CELL {cell}\n#include "warp.h"\n' + text.split(";", 1)[1] + POOL
        _library(text).go(_pointer(source), _pointer(to), to.numel())
