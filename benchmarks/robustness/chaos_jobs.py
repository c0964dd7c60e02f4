"""What the processes of `chaos.py` do: jobs whose models, inputs, executors and files are harmed at a chosen moment.

A moment is the k-th file operation below the store's folder, or the k-th forward pass, of a process: so harms hit
between any two steps of a run, and hit there again when the run is repeated.
"""

import ctypes
import errno
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import zarr
from torch import Tensor, nn

import tangency as tg
from tangency.cli import main as command
from tangency.gram.manifest import manifest_digest, manifest_file

N, M = 120, 40
MEMORIES = ("2MB", "3MB")  # each is enough for what was begun with the other
GAIN, POWER = 1.0, 1.0  # globals that the model and the head read
OPERATIONS = ("open", "os.rename", "os.link", "os.remove", "os.mkdir", "os.scandir", "os.listdir")
passes, at_pass, act, struck = itertools.count(1), 0, lambda: None, 0


def beat() -> None:
    """Called by every forward pass."""
    time.sleep(float(os.environ.get("CHAOS_PAUSE", "0")))
    if next(passes) == at_pass:
        act()


# Models and the ways in which they become another function.


def gain() -> float:
    return GAIN


class Net(nn.Module):
    shift: Tensor

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(5, 12, dtype=dtype), nn.Linear(12, 2, dtype=dtype)
        self.register_buffer("shift", torch.zeros(5, dtype=dtype))
        self.scale, self.helper, self.config = 1.0, SimpleNamespace(factor=1.0), {"deep": {"slope": 0.5}}
        self.bend: Callable[[Tensor], Tensor] = torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        beat()
        h = self.bend(self.inner(x * self.scale + self.shift)) * self.helper.factor * gain()
        return self.outer(h) + self.config["deep"]["slope"] * h[:, :2] ** 2


def set_forward(gain: Callable[[Tensor], Any]) -> None:
    """Another forward(): the same, but for a factor in the middle."""

    def forward(self: Net, x: Tensor) -> Tensor:
        beat()
        h = torch.tanh(self.inner(x)) * gain(x)
        return self.outer(h) + 0.5 * h[:, :2] ** 2

    Net.forward = forward  # type: ignore[method-assign]


def head(out: Tensor) -> Tensor:
    return out[:, 0] * POWER + out[:, 1] ** 2


def set_global(name: str, value: float) -> None:
    sys.modules[__name__].__dict__[name] = value


@torch.no_grad()
def train_on(model: Net) -> None:
    model.inner.weight += 0.1


CHANGES: dict[str, Callable[[Net], Any]] = {
    "": lambda m: None,
    "weights": train_on,
    "buffer": lambda m: m.shift.add_(0.1),
    "forward": lambda m: set_forward(lambda x: 1.25),
    "attribute": lambda m: setattr(m, "scale", 1.5),
    "helper object": lambda m: setattr(m.helper, "factor", 1.5),
    "nested configuration": lambda m: m.config["deep"].update(slope=0.7),
    "lambda attribute": lambda m: setattr(m, "bend", lambda h: torch.tanh(h) * 1.5),
    "hook": lambda m: m.outer.register_forward_hook(lambda _m, _args, out: out * 1.5),
    "hook before": lambda m: m.inner.register_forward_pre_hook(lambda _m, args: (args[0] * 1.5,)),
    "global": lambda m: set_global("GAIN", 1.5),
    "head's global": lambda m: set_global("POWER", 1.5),
    # Neither shows at the samples that a store keeps as its witness: only the code looks different.
    "forward, far from the witness": lambda m: set_forward(lambda x: torch.where(x[:, :1] > 1.0, 1.5, 1.0)),
    "constant, in its tenth digit": lambda m: set_forward(lambda x: 1 + 2e-10),
}
KERNELS: dict[str, Callable[[], tuple[Net, Any, bool]]] = {  # the model, its kernel, whether there is an x2
    "trace": lambda: (m := Net(torch.float64), tg.trace_ntk(m), False),
    "trace in float32": lambda: (m := Net(torch.float32), tg.trace_ntk(m), False),
    "trace of two sides": lambda: (m := Net(torch.float64), tg.trace_ntk(m), True),
    "full": lambda: (m := Net(torch.float64), tg.full_ntk(m), False),
    "head": lambda: (m := Net(torch.float64), tg.head_ntk(m, head), False),
}


# Inputs, and those that are others each time.


def samples(kernel: str) -> Tensor:
    x = torch.randn(N, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[[0, 1, 59, 60, N - 2, N - 1], 0] = 0.5  # the witness's
    return x.float() if "32" in kernel else x


class Noisy(torch.utils.data.Dataset[Tensor]):
    """An item is another at its `calls`-th loading and after."""

    def __init__(self, x: Tensor, calls: int) -> None:
        self.x, self.calls = x, calls

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, k: int) -> Tensor:
        self.calls -= 1
        return self.x[k] if self.calls > 0 else self.x[k] + torch.rand(1)


def inputs(job: "Job", draw: Random) -> tuple[Any, Callable[[], Any]]:
    """The samples as the job wants them, and what changes some of them."""
    x = samples(job.kernel)
    if job.inputs == "memmap":
        path = Path(job.folder, f"x{os.getpid()}.npy")
        np.save(path, x.numpy())
        mine = np.load(path, mmap_mode="r")
        return mine, lambda: np.load(path, mmap_mode="r+").__setitem__(slice(40, 90), 3.0)
    if job.inputs in ("tensor", "array"):
        given = x.numpy() if job.inputs == "array" else x
        return given, lambda: x[40:90].fill_(3.0)
    collates: dict[str, Callable[[list[Tensor]], Tensor]] = {
        "collate drops": lambda items: torch.stack(items[1:] if len(items) > 2 else items),
        "collate repeats": lambda items: torch.stack([*items, items[-1]] if len(items) > 2 else items),
        "collate sorts": lambda items: torch.stack(sorted(items, key=lambda v: float(v[0]))),
    }
    calls = draw.randrange(1, 600) if job.inputs == "augmenting" else 10**9
    noisy = Noisy(x, calls)
    return tg.from_dataset(noisy, collate=collates.get(job.inputs)), lambda: setattr(noisy, "calls", 0)


# Executors, and those that lose or repeat what they are given.


class Odd:
    """An executor whose results are not what was asked for, now and then."""

    def __init__(self, inner: Any, how: str, draw: Random) -> None:
        self.inner, self.how, self.draw = inner, how, draw
        self.last: list[Any] = []
        self.held: list[Future[Any]] = []

    def submit(self, f: Callable[..., Any], *args: Any) -> Any:
        future: Future[Any] = self.inner.submit(f, *args)
        if self.how == "shuts down" and self.draw.random() < 0.3:
            self.inner.__exit__(None, None, None) if isinstance(self.inner, tg.Workers) else self.inner.shutdown(False)
        if self.how == "swaps results":
            self.held.append(future)
        return type("Later", (), {"result": lambda _: self.result(future, f, args)})()

    def result(self, future: Any, f: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if self.how == "swaps results":  # each result once, but not where it was asked for
            return self.held.pop(self.draw.randrange(len(self.held))).result()
        found, odd = future.result(), self.draw.random() < 0.4
        now = {
            "drops tasks": [],
            "drops tiles": found[1:],
            "returns nothing": None,
            "repeats tiles": found + found,
            "reverses tiles": found[::-1],
            "repeats results": self.last or found,
            "repeats tasks": found + (self.inner.submit(f, *args).result() if self.how == "repeats tasks" else []),
        }.get(self.how, found)
        self.last = found
        return now if odd else found


ODD = ["drops tasks", "drops tiles", "returns nothing", "repeats tiles", "reverses tiles", "repeats results"]
ODD += ["repeats tasks", "swaps results", "shuts down"]


def follow_parent() -> None:
    """A pool's process that lost its parent would wait for ever: have it killed too."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


@contextmanager
def executor(name: str, odd: str, draw: Random) -> Iterator[Any]:
    fork = multiprocessing.get_context("fork")
    makers: dict[str, Callable[[], Any]] = {
        "none": nullcontext,
        "workers": lambda: tg.Workers(2),
        "threads": lambda: ThreadPoolExecutor(3),
        "processes": lambda: ProcessPoolExecutor(2, mp_context=fork, initializer=follow_parent),
    }
    with makers[name]() as live:
        yield Odd(live, odd, draw) if odd else live


# Harms to the files of a store: HARMS[kind] are functions of (store, random numbers, folder of other stores).


def chunks(store: Path) -> list[Path]:
    return sorted(p for p in store.glob("c/**/*") if p.is_file() and p.suffix != ".partial")


def place(chunk: Path, store: Path) -> str:
    parts = chunk.relative_to(store).parts[1:]
    return f"{parts[0]}.{parts[len(parts) // 2]}."


def seals(store: Path, chunk: Path) -> list[Path]:
    return sorted(store.glob(f"seal/{place(chunk, store)}*"))


def pick(store: Path, draw: Random, most: int = 3) -> list[Path]:
    there = chunks(store)
    return draw.sample(there, min(len(there), draw.randint(1, most)))


def delete(store: Path, draw: Random, _: Path) -> None:
    what = draw.choice(["chunk", "seal", "both", "zarr.json", "c", "seal/", "row", "all"])
    some = pick(store, draw)
    for chunk in some if what in ("chunk", "both", "seal") else []:
        for path in ([chunk] if what != "seal" else []) + (seals(store, chunk) if what != "chunk" else []):
            path.unlink(missing_ok=True)
    if what == "zarr.json":
        (store / what).unlink(missing_ok=True)
    folder = {"c": store / "c", "seal/": store / "seal", "all": store, "row": some[0].parent if some else store / "c"}
    if what in folder:
        shutil.rmtree(folder[what], ignore_errors=True)


def swap(store: Path, draw: Random, others: Path) -> None:
    """Chunks in each other's place, or from another store, with and without their seals."""
    some, with_seals = pick(store, draw, 12), draw.random() < 0.5
    other = draw.choice(sorted(others.iterdir()))
    if draw.random() < 0.5 and len(some) > 1:
        a, b = some[:2]
        names = [(path, x, y) for x, y in ((a, b), (b, a)) for path in seals(store, x)] if with_seals else []
        for path, x, y in names:
            path.rename(path.with_name(path.name.replace(place(x, store), place(y, store), 1)))
        a.rename(a.with_name("held"))
        b.rename(a)
        a.with_name("held").rename(b)
        return
    for chunk in some:
        theirs = other / chunk.relative_to(store)
        if theirs.exists():
            shutil.copy(theirs, chunk)
            for seal in seals(other, theirs) if with_seals else []:
                shutil.copy(seal, store / "seal" / seal.name)


def damage(store: Path, draw: Random, _: Path) -> None:
    how = draw.choice(["flip", "cut", "grow", "empty", "zeros", "another program", "folder"])
    for chunk in pick(store, draw):
        raw = bytearray(chunk.read_bytes())
        if how == "another program":  # whose checksum is right
            array = zarr.open_array(str(store), mode="r+")
            at = (int(k) * c for k, c in zip(chunk.parts[-array.ndim :], array.chunks, strict=True))
            array[tuple(slice(k, k + 1) for k in at)] = 0.125
        elif how == "folder":
            chunk.unlink()
            chunk.mkdir()
        else:
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
            zeros = bytes(len(raw))
            cut = raw[: draw.randrange(len(raw))]
            now: dict[str, bytes | bytearray] = {
                "flip": raw,
                "cut": cut,
                "grow": raw + b"0" * 8,
                "empty": b"",
                "zeros": zeros,
            }
            chunk.write_bytes(now[how])


def edit(store: Path, draw: Random, _: Path) -> None:
    """One field of zarr.json set to something else, with the old digest, the right digest, or a file made to match."""
    path = store / "zarr.json"
    if not path.is_file():
        return
    if draw.random() < 0.1:
        raw = path.read_bytes()
        path.write_bytes(draw.choice([b"", b"{}", b"[1]", b"\xff\xfe", raw[: len(raw) // 2], b"[" * 10**5]))
        return
    about = json.loads(path.read_text(encoding="utf-8"))
    node = draw.choice([about, about["attributes"]["tangency"]])
    key = draw.choice(sorted(node))
    while isinstance(node[key], (dict, list)) and node[key] and draw.random() < 0.7:
        node = node[key]
        key = draw.choice(sorted(node) if isinstance(node, dict) else range(len(node)))
    if draw.random() < 0.15:
        node.pop(key) if isinstance(node, dict) else node.clear()
    else:
        node[key] = draw.choice(_instead(node[key]))
    how, text = draw.choice(["plain", "digest", "whole"]), json.dumps(about).encode()
    with suppress(Exception):  # of what makes no sense no file can be made to match
        if how == "digest":
            about["attributes"]["digest"] = manifest_digest(about["attributes"]["tangency"])
            text = json.dumps(about).encode()
        elif how == "whole":
            text = manifest_file(about["attributes"]["tangency"])
    path.write_bytes(text)


def _instead(value: Any) -> list[Any]:
    odd: list[Any] = [None, "", [], {}, -1, 10**12, 1.5, "NaN", [[]]]
    if isinstance(value, bool):
        return [not value, *odd]
    if isinstance(value, int):
        return [value + 1, value * 2, value // 2, str(value), 0, *odd]
    if isinstance(value, str):
        near = {"little": "big", "/": ".", "float64": "float32", "float32": "float64", "crc32c": "gzip", "NaN": 0.0}
        return [near.get(value, value + "0"), value[::-1], *odd]
    return [value[::-1], *odd] if isinstance(value, list) else odd


def move(store: Path, draw: Random, others: Path) -> None:
    """Renamed, and perhaps something else in its place."""
    if not store.exists():
        return
    away = store.with_name(f"away{draw.randrange(10**6)}")
    store.rename(away)
    what = draw.choice(["nothing", "empty", "file", "link", "other", "back"])
    if what == "empty":
        store.mkdir()
    elif what == "file":
        store.write_text("mine", encoding="utf-8")
    elif what == "link":
        store.symlink_to(away)
    elif what == "other":
        shutil.copytree(draw.choice(sorted(others.iterdir())), store)
    elif what == "back":
        time.sleep(0.01)
        away.rename(store)


HARMS = {"deletion": delete, "swap": swap, "damage": damage, "manifest": edit, "move": move}


def harm(kind: str, job: "Job", draw: Random) -> None:
    with suppress(OSError):  # what was to be harmed has just gone
        HARMS[kind](Path(job.where), draw, Path(job.others))


# The job of a process.


@dataclass
class Job:
    """What a process is to do, and with which store. `answers` are files with the matrices that it may return."""

    kernel: str
    tile: int
    folder: str
    seed: str
    others: str = ""  # stores that are not ours, or a folder to go to
    store: Any = None
    where: str = ""  # the store's folder, however `store` says it
    answers: list[str] = field(default_factory=list)
    executor: str = "none"
    memory: str = MEMORIES[0]
    how: str = "compute"  # or open, product, verify
    change: str = ""  # of the model, before
    inputs: str = "tensor"
    odd: str = ""  # the executor
    harm: str = ""
    moment: tuple[str, int] = ("", 0)  # of the harm: file or pass, and which one
    pause: float = 0.0


def run(job: Job, answer: Any, barrier: Any = None) -> None:
    """Do the job; answer (outcome, detail, warnings, whether the harm's moment came)."""
    os.environ.pop("CHAOS_WARM", None)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what pools say when their parent was killed
    torch.set_num_threads(1)
    os.environ["CHAOS_PAUSE"] = str(job.pause)
    os.environ["HOME"] = job.folder
    os.chdir(job.folder)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            outcome = _judged(job, barrier)
        except tg.TangencyError as e:
            outcome = ("refused" if str(e).strip() else "fault", f"{type(e).__name__}: {e}")
        except KeyboardInterrupt as e:
            outcome = ("refused" if job.harm == "interrupt" else "fault", f"KeyboardInterrupt: {e}")
        except BaseException as e:
            where = "".join(traceback.format_exception(e)[-4:])
            outcome = ("fault", f"raw {type(e).__name__}: {e}\n{where}")
    told = sorted({f"{w.category.__name__}: {w.message}" for w in said if issubclass(w.category, tg.TangencyWarning)})
    answer.send((*outcome, told, struck))


def _judged(job: Job, barrier: Any) -> tuple[str, str]:
    draw = Random(job.seed)
    model, kernel, two = KERNELS[job.kernel]()
    CHANGES[job.change](model)
    x, change_inputs = inputs(job, draw)
    y = samples(job.kernel)[40 : 40 + M].clone() if two else None
    _arm(job, draw, model, change_inputs)
    if barrier is not None:
        barrier.wait(60)
    if job.how == "verify":
        return _verified(job)
    if job.how in ("open", "product"):
        gram: Any = tg.open_gram(job.store)
    else:
        with executor(job.executor, job.odd, draw) as live:
            given = {"store": job.store, "tile": job.tile, "memory": job.memory, "executor": live}
            gram = tg.compute(kernel, x, y, progress=False, **given)
        if job.harm.startswith("healing"):
            damage(Path(job.where), draw, Path())
            train_on(model) if "model" in job.harm else change_inputs()
    if job.how == "product":
        products = [a.replace(".npy", ".product.npy") for a in job.answers]
        return judge(gram @ ones(gram), [torch.from_numpy(np.load(a)) for a in products])
    return judge(gram.dense(), [torch.from_numpy(np.load(a)) for a in job.answers])


def reference(job: Job, store: str) -> None:
    """What a single quiet process computes, in memory and into a store, held against plain autograd."""
    torch.set_num_threads(1)
    model, kernel, two = KERNELS[job.kernel]()
    CHANGES[job.change](model)
    x, change_inputs = inputs(job, Random(0))
    if job.harm == "inputs":
        change_inputs()
    y = samples(job.kernel)[40 : 40 + M].clone() if two else None
    found = tg.compute(kernel, x, y, tile=job.tile, progress=False).dense()
    for memory in MEMORIES:  # which decides who is held how long, and no bits
        gram = tg.compute(kernel, x, y, tile=job.tile, memory=memory, store=f"{store}{memory}", progress=False)
        assert torch.equal(gram.dense(), found), "the reference depends on the memory budget"
    full = torch.einsum("ncp,mdp->ncmd", gradients(model, job, x), gradients(model, job, x if y is None else y))
    plain = {"full": full, "head": full[:, 0, :, 0]}.get(job.kernel, full.diagonal(dim1=1, dim2=3).sum(-1))
    assert torch.allclose(found, plain, rtol=1e-4, atol=1e-4), "the reference is wrong"
    np.save(job.answers[0], found.numpy())
    np.save(job.answers[0].replace(".npy", ".product.npy"), (gram @ ones(gram)).numpy())


def gradients(model: Net, job: Job, x: Tensor) -> Tensor:
    """[n, outputs, parameters], one sample and output at a time."""
    rows = []
    for sample in x.split(1):
        out = model(sample)
        out = (head(out) if job.kernel == "head" else out).flatten()
        each = [torch.autograd.grad(v, list(model.parameters()), retain_graph=True) for v in out]
        rows.append(torch.stack([torch.cat([g.flatten() for g in gs]) for gs in each]))
    return torch.stack(rows)


def ones(gram: Any) -> Tensor:
    return torch.ones(gram.shape[len(gram.shape) // 2 :].numel(), dtype=gram.dtype)


def judge(found: Tensor, wanted: list[Tensor]) -> tuple[str, str]:
    if any(found.dtype == w.dtype and torch.equal(found, w) for w in wanted):
        return "equal", ""
    if found.shape != wanted[0].shape:
        return "fault", f"another matrix: {tuple(found.shape)} in place of {tuple(wanted[0].shape)}"
    share = float((found != wanted[0]).double().mean())
    most = float((found.double() - wanted[0].double()).abs().nan_to_num(9e99).max())
    return "fault", f"another matrix: {share:.1%} of the entries differ, by up to {most:.3g}"


def _verified(job: Job) -> tuple[str, str]:
    """The command line's word for it, which must not be better than what can be read."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        code = command(["verify", str(job.store)])
    if code:
        return ("refused" if code in (1, 2) else "fault"), f"verify: exit code {code}"
    outcome, detail = judge(tg.open_gram(job.store).dense(), [torch.from_numpy(np.load(a)) for a in job.answers])
    return outcome, f"verify said that all is well; {detail}"


def _arm(job: Job, draw: Random, model: Net, change_inputs: Callable[[], Any]) -> None:
    """Let the harm happen at its moment."""
    global at_pass, act
    kind, k = job.moment
    lasting = job.harm == "disk error" and draw.random() < 0.5
    number = draw.choice([errno.ENOSPC, errno.EIO, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.EROFS])

    def strike() -> None:
        global struck
        struck = 1
        acts[job.harm]()

    def fail() -> None:
        raise OSError(number, os.strerror(number))

    acts: dict[str, Callable[[], Any]] = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
        "disk error": fail,
        "chdir": lambda: os.chdir(job.others),
        "model": lambda: train_on(model),
        "inputs": change_inputs,
    }
    if job.harm in HARMS:
        acts[job.harm] = lambda: harm(job.harm, job, draw)
    if kind == "pass":
        at_pass, act = k, strike
    count = itertools.count(1)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in OPERATIONS and any(isinstance(a, (str, Path)) and job.where in str(a) for a in args):
            done = next(count)
            if done == k or (lasting and done > k):
                strike()

    if kind == "file":
        sys.addaudithook(hook)


if os.environ.get("CHAOS_WARM"):  # in the process that all others are forked from: what torch loads at its first use
    torch.set_num_threads(1)
    tg.compute(KERNELS["full"]()[1], samples("full"), memory="2MB", progress=False)
