"""Builds and times TRAK's fast_jl and dattri's projections on a CUDA machine; every line printed is JSON.

    FAST_JL_SOURCES=FOLDER python3 benchmarks/peers/run_fast_jl.py [--route ext|raw|prebuilt] [--budget 480]

FOLDER holds the unpacked source of fast_jl 0.1.3 and, under peers/, the Python packages trak (traker 0.3.2), dattri
(0.3.0) and sjlt (0.1.7). Routes to the kernels, each falling back to the next: `ext` builds the packages' own torch
extensions by torch.utils.cpp_extension.load (1 to 2 minutes), `raw` builds the same kernels behind a C interface
(fast_jl_raw.cu, sjlt_raw.cu: they hold the peers' code and are not kept here) with nvcc alone, `prebuilt` loads such
libraries. Whatever the route, the peers' own Python code calls them. Errors are printed, never raised.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

HERE = Path(os.environ.get("FAST_JL_SOURCES", Path(__file__).resolve().parent))
BUILD = Path(os.environ.get("FAST_JL_BUILD", "/tmp/fast_jl_build"))
SOURCES = {"fast_jl": HERE / "fast_jl.cu", "sjlt_C": HERE / "peers/sjlt/kernels/sjlt_kernel.cu"}
CUDA_FLAGS: dict[str, list[str]] = {
    "fast_jl": [],
    "sjlt_C": ["-O3", "--use_fast_math", "--expt-relaxed-constexpr"],
}  # as their setup.py
RAW = {"fast_jl": "fast_jl_raw", "sjlt_C": "sjlt_raw"}
BUILD_LIMIT = 225  # seconds
SLOW = 4.0  # a warm-up longer than this many seconds is taken as the measurement
BEGIN = time.perf_counter()


def say(**row: Any) -> None:
    print(json.dumps({"at": round(time.perf_counter() - BEGIN, 1), **row}, default=str), flush=True)


def attempt(step: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The function's value, or None with its error printed."""
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit) as error:
        say(step=step, error=f"{type(error).__name__}: {error}"[:1500], where=traceback.format_exc()[-600:])
        return None


# --- tools -----------------------------------------------------------------------------------------------------------


def cuda_home() -> Path | None:
    """The toolkit's folder; `nvcc` on the PATH may be a wrapper script, from which torch would guess a wrong one."""
    found = shutil.which("nvcc")
    guesses = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    guesses += sorted(map(str, Path("/usr/local").glob("cuda-*")), reverse=True)
    if found:
        guesses.append(str(Path(found).resolve().parents[1]))
    for guess in filter(None, guesses):
        if (Path(guess) / "bin/nvcc").exists():
            return Path(guess)
    return None


def wheels(pattern: str) -> list[Path]:
    """Files of the NVIDIA wheels beside torch."""
    import torch

    return sorted((Path(torch.__file__).parents[1] / "nvidia").glob(pattern))


def missing_includes(home: Path) -> list[str]:
    """-isystem flags for the headers that ATen/cuda and curand need and the toolkit does not hold."""
    folders: list[Path] = []
    for header in ("curand_kernel.h", "cusparse.h", "cublas_v2.h", "cusolverDn.h"):
        if not any((home / place / header).exists() for place in ("include", "targets/x86_64-linux/include")):
            found = [p.parent for p in wheels(f"*/include/{header}")]
            found += [HERE / "include"] if header.startswith("curand") else []
            folders += found[:1]
    return [flag for folder in dict.fromkeys(folders) for flag in ("-isystem", str(folder))]


def link_flags(home: Path) -> list[str]:
    """torch links with -lcudart: give it the wheel's library under that name where the toolkit has none."""
    if any((home / place / "libcudart.so").exists() for place in ("lib64", "lib", "targets/x86_64-linux/lib")):
        return []
    libraries = wheels("*/lib/libcudart.so.1*")
    if not libraries:
        return []
    links = BUILD / "links"
    links.mkdir(parents=True, exist_ok=True)
    target = links / "libcudart.so"
    if not target.exists():
        target.symlink_to(libraries[0])
    return [f"-L{links}"]


def tools() -> Path | None:
    home = cuda_home()
    row: dict[str, Any] = {
        "step": "tools",
        "python": platform.python_version(),
        "nvcc": shutil.which("nvcc"),
        "cuda_home": home,
    }
    for name in ("c++", "g++", "ninja"):
        row[name] = shutil.which(name)
    if home:
        os.environ["CUDA_HOME"] = str(home)
        os.environ["PATH"] = f"{home}/bin:{os.environ['PATH']}"
        release = subprocess.run([home / "bin/nvcc", "--version"], capture_output=True, text=True).stdout
        row["release"] = release.strip().splitlines()[-1:] or release
        row["extra_includes"] = missing_includes(home)
    import sysconfig

    row["python_h"] = (Path(sysconfig.get_paths()["include"]) / "Python.h").exists()
    say(**row)
    return home


# --- building --------------------------------------------------------------------------------------------------------


def load_extension(name: str) -> Any:
    """In a child: builds. In the parent, after that: finds it built and imports it."""
    os.environ["TORCH_CUDA_ARCH_LIST"] = "9.0"
    home = cuda_home()
    if home is None:
        raise RuntimeError("no nvcc")
    os.environ["CUDA_HOME"] = str(home)
    from torch.utils import cpp_extension

    cpp_extension.CUDA_HOME = str(home)
    folder = BUILD / name
    folder.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        name=name,
        sources=[str(SOURCES[name])],
        build_directory=str(folder),
        extra_cuda_cflags=CUDA_FLAGS[name] + missing_includes(home),
        extra_ldflags=link_flags(home),
        verbose=bool(os.environ.get("FAST_JL_CHILD")),
    )


def build_extensions(names: Sequence[str]) -> list[str]:
    """Each in a process of its own, at once, ended when it takes too long. Returns those that were built."""
    environment = {**os.environ, "FAST_JL_CHILD": "1"}
    children = {}
    for name in names:
        BUILD.mkdir(parents=True, exist_ok=True)
        log = (BUILD / f"{name}.log").open("w", encoding="utf-8")
        command = [sys.executable, str(Path(__file__).resolve()), "--child", name]
        children[name] = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    start = time.perf_counter()
    built: list[str] = []
    for name, child in children.items():
        code: int | str
        try:
            code = child.wait(timeout=max(1.0, BUILD_LIMIT - (time.perf_counter() - start)))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)  # the child leads its own session: it, ninja and nvcc, nothing else
            child.wait()
            code = "timeout"
        row: dict[str, Any] = {
            "step": "build",
            "route": "ext",
            "name": name,
            "code": code,
            "seconds": time.perf_counter() - start,
        }
        if code == 0:
            built.append(name)
        else:
            row["log"] = (BUILD / f"{name}.log").read_text(encoding="utf-8")[-2500:]
        say(**row)
    return built


def build_raw(name: str, home: Path) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    out = BUILD / f"lib{RAW[name]}.so"
    command = [str(home / "bin/nvcc"), "-O3", "-std=c++17", "-arch=sm_90", "-shared", "-Xcompiler", "-fPIC"]
    command += ["-cudart", "static", *missing_includes(home)]
    command += ["--use_fast_math"] if name == "sjlt_C" else []
    start = time.perf_counter()
    done = subprocess.run(
        [*command, str(HERE / f"{RAW[name]}.cu"), "-o", str(out)],
        capture_output=True, text=True, timeout=BUILD_LIMIT,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError((done.stdout + done.stderr)[-1200:])
    say(step="build", route="raw", name=name, seconds=time.perf_counter() - start)
    return out


def fast_jl_module(path: Path) -> types.ModuleType:
    """fast_jl's Python module over the C interface: what the function of the same name in fast_jl.cu does."""
    import torch

    call = ctypes.CDLL(str(path)).fast_jl_project
    call.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 2 + [ctypes.c_uint32] * 5

    def function(kind: int, batches: int) -> Callable[..., Tensor]:
        def project(grads: Tensor, dim: int, seed: int, tiles: int) -> Tensor:
            if not (grads.is_cuda and grads.is_contiguous() and grads.dim() == 2):
                raise RuntimeError("a contiguous 2D CUDA tensor is needed")
            if grads.dtype not in (torch.float16, torch.float32):
                raise RuntimeError("fp16 or fp32 is needed")
            n, p = grads.shape
            tiles, rows = min(p, tiles), 8 * batches
            out = torch.zeros(-(-n // rows) * rows, tiles, dim, device=grads.device, dtype=torch.float32)
            half = int(grads.dtype == torch.float16)
            for first in range(0, n, rows):
                part = grads[first : first + rows]
                pointers = part.data_ptr(), out[first].data_ptr()
                code = call(kind, batches, half, *pointers, len(part), p, dim, int(seed) % 2**32, tiles)
                if code:
                    raise RuntimeError(f"fast_jl: CUDA error {code} (-1: bad sizes, see stderr)")
            return out[:n].sum(1)

        return project

    module = types.ModuleType("fast_jl")
    for kind, word in enumerate(("rademacher", "normal")):
        for batches in (1, 2, 4):
            setattr(module, f"project_{word}_{8 * batches}", function(kind, batches))
    return module


def sjlt_module(path: Path) -> types.ModuleType:
    """sjlt._C over the C interface, float32 only."""
    import torch

    call = ctypes.CDLL(str(path)).sjlt_project
    call.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int] * 6

    def sjlt_projection_cuda(
        x: Tensor, indices: Tensor, signs: Tensor, dim: int, c: int, threads: int, blocks: int
    ) -> list[Tensor]:
        if x.dtype != torch.float32 or not x.is_contiguous():
            raise RuntimeError("contiguous float32 is needed here")
        out = torch.zeros(x.shape[0], dim, dtype=x.dtype, device=x.device)
        pointers = [t.data_ptr() for t in (x, out, indices, signs)]
        code = call(*pointers, x.shape[0], x.shape[1], dim, c, threads // 32 * 32, blocks)
        if code:
            raise RuntimeError(f"sjlt: CUDA error {code}")
        return [out]

    module = types.ModuleType("sjlt._C")
    vars(module)["sjlt_projection_cuda"] = sjlt_projection_cuda
    return module


def obtain(name: str, route: str, home: Path | None, built: Sequence[str]) -> tuple[Any, str | None]:
    """The module by the asked route or the next that works, with the route's name."""
    wrap = {"fast_jl": fast_jl_module, "sjlt_C": sjlt_module}[name]
    if route == "ext" and name in built:
        module = attempt(f"load {name}", load_extension, name)
        if module is not None:
            return module, "ext"
    if route in ("ext", "raw") and home is not None:
        path = attempt(f"raw build {name}", build_raw, name, home)
        module = attempt(f"raw load {name}", wrap, path) if path else None
        if module is not None:
            return module, "raw"
    module = attempt(f"prebuilt {name}", wrap, HERE / f"prebuilt/lib{RAW[name]}.so")
    return (module, "prebuilt") if module is not None else (None, None)


# --- measuring -------------------------------------------------------------------------------------------------------


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clock(function: Callable[[], Any], warmups: int = 2, repeats: int = 3) -> tuple[dict[str, Any], Any]:
    """Two warm-ups, then the best of three; a slow warm-up is itself the measurement."""
    seconds: list[float] = []
    for _ in range(warmups + repeats):
        result = None
        synchronize()
        start = time.perf_counter()
        result = function()
        synchronize()
        seconds.append(time.perf_counter() - start)
        if len(seconds) <= warmups and seconds[-1] > SLOW:
            break
    timed = seconds[warmups:] or seconds[-1:]
    return {"seconds": min(timed), "first": seconds[0], "runs": len(seconds)}, result


def gradients(n: int, p: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Independent Gaussian rows whose coordinates have log-normal scales; with them G Gᵀ in float64."""
    import torch

    torch.manual_seed(0)
    rows = torch.randn(n, p, device=device)
    rows.mul_(torch.randn(p, device=device).mul_(1.0).exp_())
    kernel = torch.zeros(n, n, dtype=torch.float64, device=device)
    for part in rows.split(1_000_000, dim=1):
        kernel += (part @ part.T).double()
    return rows, kernel


def errors(features: Tensor, kernel: Tensor) -> dict[str, float]:
    """Rms of the residuals of the cosines, by the true norms, off the diagonal; times √K it should be about 1."""
    import torch

    f = features.double()
    norms = kernel.diagonal().sqrt()
    residual = (f @ f.T - kernel) / torch.outer(norms, norms)
    off = ~torch.eye(len(f), dtype=torch.bool, device=f.device)
    rms = residual[off].square().mean().sqrt().item()
    diagonal = residual.diagonal()
    return {
        "cos_rms": rms,
        "cos_rms_sqrt_dim": rms * math.sqrt(f.shape[1]),
        "norm2_bias": diagonal.mean().item(),
        "norm2_rms": diagonal.square().mean().sqrt().item(),
    }


def release() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        import torch

        self.args, self.torch = args, torch
        self.device = torch.device("cpu" if args.dry else "cuda:0")
        self.tiles = 4 if args.dry else torch.cuda.get_device_properties(0).multi_processor_count
        self.rows, self.kernel = gradients(args.n, args.p, self.device)
        self.half = self.rows.half()
        release()
        self.held = 0 if args.dry else torch.cuda.memory_allocated()

    def late(self, **what: Any) -> bool:
        if time.perf_counter() - BEGIN < self.args.budget:
            return False
        say(**what, skipped="out of time")
        return True

    def memory(self) -> int:
        """The most that was allocated beyond the gradients, the projector's own matrix included."""
        return 0 if self.args.dry else self.torch.cuda.max_memory_allocated() - self.held

    def measure(self, function: Callable[[], Tensor], factor: float, kernel: Tensor | None = None, **what: Any) -> None:
        """One row: time, error and memory; or what went wrong."""
        if self.late(**what):
            return

        def run() -> None:
            if not self.args.dry:
                self.torch.cuda.reset_peak_memory_stats()
            timing, features = clock(function)
            extra = self.memory()
            say(
                **what,
                **timing,
                extra_bytes=extra,
                **errors(features * factor, self.kernel if kernel is None else kernel),
            )

        attempt(what, run)
        release()

    def fast_jl(self, module: Any, route: str, kind: str, batch: int, dtype: str, dims: Sequence[int]) -> None:
        rows = self.half if dtype == "float16" else self.rows
        function = getattr(module, f"project_{kind}_{batch}")
        for dim in dims:
            what: dict[str, Any] = {
                "peer": f"fast_jl project_{kind}_{batch}",
                "route": route,
                "dtype": dtype,
                "dim": dim,
            }
            self.measure(partial(function, rows, dim, 0, self.tiles), dim**-0.5, **what, n=self.args.n, p=self.args.p)

    def fast_jl_checks(self, module: Any) -> None:
        """What the matrix depends on, on a small part of the gradients."""
        rows = self.rows[:32, :100_000].contiguous()

        def distance(a: Tensor, b: Tensor) -> float:
            return ((a - b).norm() / b.norm()).item()

        base = module.project_rademacher_32(rows, 512, 0, self.tiles)
        say(
            check="fast_jl, relative distance of features from those of project_rademacher_32, 32 float32 rows",
            batch_8=distance(module.project_rademacher_8(rows, 512, 0, self.tiles), base),
            one_row=distance(module.project_rademacher_8(rows[:1].contiguous(), 512, 0, self.tiles), base[:1]),
            float16=distance(module.project_rademacher_32(rows.half(), 512, 0, self.tiles), base),
            again=distance(module.project_rademacher_32(rows, 512, 0, self.tiles), base),
            tiles_108=distance(module.project_rademacher_32(rows, 512, 0, 108), base),  # as on an A100
            first_512_of_1024=distance(module.project_rademacher_32(rows, 1024, 0, self.tiles)[:, :512], base),
        )
        for scale in (1.0, 1e-4, 1e-6, 1e-8, 1e4):  # the kernel turns its input into float16
            kernel = (rows.double() @ rows.double().T) * scale**2
            features = module.project_rademacher_32(rows * scale, 4096, 0, self.tiles) / 64
            say(check="fast_jl on float32 gradients times", scale=scale, **errors(features, kernel))
        attempt("dim 500", lambda: say(shape=module.project_rademacher_8(rows, 500, 0, self.tiles).shape))
        synchronize()

    def trak_cuda(self, dims: Sequence[int]) -> None:
        """The same through TRAK's own wrapper."""
        from trak.projectors import CudaProjector, ProjectionType

        for dim in dims:
            projector = CudaProjector(
                grad_dim=self.args.p, proj_dim=dim, seed=0, proj_type=ProjectionType.rademacher,
                device=self.device, max_batch_size=32,
            )  # fmt: skip
            what: dict[str, Any] = {"peer": "trak CudaProjector rademacher", "dtype": "float16", "dim": dim}
            self.measure(partial(projector.project, self.half, 0), dim**-0.5, **what, n=self.args.n, p=self.args.p)

    def dattri(self, kind: str, dims: Sequence[int], step: int, factor: Callable[[int], float]) -> None:
        """dattri's public function; `step` rows at a time, as its kernels index with 32 bits: step * p < 2**31."""
        from dattri.func.projection import random_project

        for dim in dims:
            what: dict[str, Any] = {"peer": f"dattri {kind}", "dtype": "float32", "dim": dim, "rows_at_once": step}

            def make(dim: int = dim) -> Any:
                return random_project(
                    self.rows[:step], min(step, self.args.n), proj_dim=dim, proj_max_batch_size=32, proj_seed=0,
                    proj_type=kind, device=self.device,
                )  # fmt: skip

            if self.late(**what):
                continue
            project = attempt(what, make)
            if project is None:
                continue

            def run(project: Any = project) -> Tensor:
                return self.torch.cat([project(part) for part in self.rows.split(step)])

            self.measure(run, factor(dim), **what, n=self.args.n, p=self.args.p)
            del project, run
            release()

    def trak_basic(self, dims: Sequence[int]) -> None:
        from trak.projectors import BasicProjector, ProjectionType

        for dim in dims:
            what: dict[str, Any] = {"peer": "trak BasicProjector rademacher", "dtype": "float32", "dim": dim}
            if self.late(**what):
                continue
            projector = BasicProjector(self.args.p, dim, 0, ProjectionType.rademacher, self.device)
            self.measure(partial(projector.project, self.rows, 0), dim**-0.5, **what, n=self.args.n, p=self.args.p)
            del projector
            release()


def dry_module() -> types.ModuleType:
    """Stands in for fast_jl where there is no GPU, to try the rest of this script."""
    import torch

    def project(grads: Tensor, dim: int, seed: int, tiles: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return grads.float() @ torch.randn(grads.shape[1], dim, generator=generator)

    module = types.ModuleType("fast_jl")
    for word in ("rademacher", "normal"):
        for batch in (8, 16, 32):
            setattr(module, f"project_{word}_{batch}", project)
    return module


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--route", choices=["ext", "raw", "prebuilt"], default="ext")
    parser.add_argument("--only", nargs="+", default=["fast_jl", "sjlt", "dense", "more"])
    parser.add_argument("--dims", type=int, nargs="+", default=[512, 2048, 4096, 10240, 16384])
    parser.add_argument("--n", type=int, default=256)
    parser.add_argument("--p", type=int, default=11_000_000)
    parser.add_argument("--budget", type=float, default=480, help="seconds after which no new case is started")
    parser.add_argument("--dry", action="store_true", help="on a CPU, with a stand-in for fast_jl")
    parser.add_argument("--child", help="for this script's own use: build one extension")
    args = parser.parse_args()
    if args.child:
        load_extension(args.child)
        return

    home = attempt("tools", tools)
    import torch

    if not torch.cuda.is_available() and not args.dry:
        say(step="device", error="no CUDA device; building only")
    else:
        name = "dry" if args.dry else torch.cuda.get_device_name(0)
        say(step="device", torch=torch.__version__, cuda=torch.version.cuda, device=name)
    wanted = [name for name, word in (("fast_jl", "fast_jl"), ("sjlt_C", "sjlt")) if word in args.only]
    if "more" in args.only and "fast_jl" not in wanted:
        wanted.append("fast_jl")
    built = attempt("build", build_extensions, wanted) if args.route == "ext" and home and not args.dry else []
    modules = {name: obtain(name, args.route, home, built or []) for name in wanted}
    say(step="modules", routes={name: route for name, (_, route) in modules.items()})
    if args.dry:
        modules["fast_jl"] = dry_module(), "dry"
    elif not torch.cuda.is_available():
        return

    bench = attempt("data", Bench, args)
    if bench is None:
        return
    say(step="data", n=args.n, p=args.p, tiles=bench.tiles)
    module, route = modules.get("fast_jl", (None, None))
    if module is not None:
        sys.modules["fast_jl"] = module
    if "fast_jl" in args.only and module is not None:
        attempt("checks", bench.fast_jl_checks, module)
        for kind, dtype in (("rademacher", "float16"), ("rademacher", "float32"), ("normal", "float16")):
            attempt("fast_jl", bench.fast_jl, module, route, kind, 32, dtype, args.dims)
        attempt("trak", bench.trak_cuda, args.dims[-1:])
    step = max(1, min(args.n, 128, (2**31 - 1) // args.p))
    extension = modules.get("sjlt_C", (None, None))[0]
    if "sjlt" in args.only and extension is not None:
        sys.modules["sjlt._C"] = extension
        attempt("dattri sjlt", bench.dattri, "sjlt", args.dims, step, lambda dim: 1.0)
        attempt("dattri grass", bench.dattri, "grass", args.dims, step, lambda dim: math.sqrt(args.p / (4 * dim)))
    if "dense" in args.only:
        attempt("dattri mask", bench.dattri, "random_mask", args.dims[:1], step, lambda dim: math.sqrt(args.p / dim))
        attempt("trak basic", bench.trak_basic, args.dims[:3])
        fits = [dim for dim in args.dims if 4 * args.p * dim < 100e9]  # it holds the whole matrix
        attempt("dattri dense", bench.dattri, "rademacher", fits, step, lambda dim: 1.0)
    if "more" in args.only and module is not None:
        for batch in (16, 8):
            for kind in ("rademacher", "normal"):
                attempt("more", bench.fast_jl, module, route, kind, batch, "float16", args.dims)
    say(step="done")


if __name__ == "__main__":
    main()
