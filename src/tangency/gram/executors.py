"""Who computes the tiles: processes on this machine, one per GPU, or anything that has `submit(f, *args).result()`."""

import contextlib
import os
import pickle
import queue
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, NamedTuple, TypeAlias

import torch

from .._base.types import Executor, Pending, T
from ..errors import InputError, WorkerLost
from ..kernels.kernel import Kernel
from .rows import RowMap

Submit: TypeAlias = Callable[..., Pending[object]]
Call: TypeAlias = tuple[object, ...]  # a function and its arguments
# How often the tiles of one task may go down with their worker: a task that kills its workers must end somewhere.
ATTEMPTS = 4
# Seconds that a worker may take to import torch and call back (heuristic).
START = 120.0


class _Entry(NamedTuple):
    """A task that waits for a process: what was promised for it, and the call, pickled."""

    future: Future[Any]
    call: bytes


Tasks: TypeAlias = queue.Queue[_Entry | None]  # None: one process may end


def check_executor(executor: object, kernel: Kernel | RowMap) -> None:
    """Refuse what cannot take tasks, before anything is computed."""
    if isinstance(executor, str):
        if executor != "gpus":
            raise InputError(
                f"executor={executor!r}; needed: 'gpus', tg.Workers(…), tg.RayExecutor(…), or an object with submit()."
            )
        if kernel.device is None or kernel.device.type != "cuda":
            raise InputError(
                "executor='gpus' needs the model on a GPU: model.cuda(), or device='cuda' for tg.infinite_ntk."
            )
    elif executor is not None and (isinstance(executor, type) or not callable(getattr(executor, "submit", None))):
        kind = f"the class {executor.__name__}" if isinstance(executor, type) else f"a {type(executor).__name__}"
        raise InputError(
            f"executor is {kind}; needed: 'gpus', tg.Workers(…), tg.RayExecutor(…), or an "
            "object with submit(f, *args).result(), such as a concurrent.futures.ProcessPoolExecutor."
        )


@contextmanager
def connect(executor: Executor | str) -> Iterator[tuple[Submit, Callable[[], int]]]:
    """(submit, number of workers now) of what the user gave; workers that we start ourselves end with the context."""
    if isinstance(executor, str):  # "gpus", as `check_executor` saw to
        given: AbstractContextManager[Executor] = Workers([f"cuda:{k}" for k in range(torch.cuda.device_count())])
    else:
        given = contextlib.nullcontext(executor)

    with given as live:
        try:
            yield live.submit, lambda: _workers(live)
        except RuntimeError as e:  # a pool of processes does not outlive one of them
            if not isinstance(e, BrokenExecutor) and "after shutdown" not in str(e):
                raise
            raise WorkerLost(
                f"the executor is broken ({e}). What was finished is safe in the store, if there is one: make a new "
                "executor and call again. tg.Workers replaces processes that die."
            ) from e


def _workers(executor: Executor) -> int:
    """How many tasks are worth sending at a time."""
    # `_max_workers` is what Python's own pools have; 8 where nothing is said (heuristic).
    return int(getattr(executor, "workers", 0) or getattr(executor, "_max_workers", 0) or 8)


def workers_here(executor: Executor | str | None) -> int:
    """How many share this machine's memory; 0 if they may be on others."""
    if executor is None or isinstance(executor, str):  # "gpus": one for each
        return 1
    return _workers(executor) if isinstance(executor, (Workers, ProcessPoolExecutor, ThreadPoolExecutor)) else 0


def results(submit: Submit, calls: Iterable[Call], workers: Callable[[], int]) -> Iterator[object]:
    """The results of all calls in the order in which they come in, two more under way than workers; lost ones again."""
    waiting: list[tuple[Pending[object], Call, int]] = []  # with how often it was tried
    source = iter(calls)
    while True:
        # Two more, so that no worker waits for us; not all at once, since each call carries its inputs.
        while len(waiting) < workers() + 2 and (call := next(source, None)) is not None:
            waiting.append((submit(*call), call, 1))
        if not waiting:
            return
        future, call, tried = waiting.pop(_ready(waiting))
        try:
            yield future.result()
        except WorkerLost as e:
            if tried == ATTEMPTS:
                raise WorkerLost(f"a task was lost {ATTEMPTS} times with its worker, so it is given up: {e}") from e
            waiting.append((submit(*call), call, tried + 1))


def _ready(waiting: Sequence[tuple[Pending[object], Call, int]]) -> int:
    """The first future that is done; where futures cannot say so, the oldest."""
    while True:
        for k, (future, _, _) in enumerate(waiting):
            done = getattr(future, "done", None)
            if done is None or done():
                return k
        time.sleep(0.005)


class Workers:
    """Processes on this machine, one per device: `tg.compute(…, executor=tg.Workers(["cuda:0", "cuda:1"]))`.

    `devices` is a number of CPU processes or a list of devices; a process sees its own device alone. The processes
    start with the first task and stay until `close()`, or until the end of a `with`. One that dies is replaced, and its
    task computed again. Nothing has to be guarded by `if __name__ == "__main__"`.
    """

    def __init__(self, devices: int | Sequence[str]) -> None:
        refusal = InputError(
            f"Workers({devices!r}): needed: a number of CPU processes, or a list of devices such as "
            "['cuda:0', 'cuda:1']."
        )
        if isinstance(devices, (bool, str)) or not isinstance(devices, (int, list, tuple)):
            raise refusal
        names = ["cpu"] * devices if isinstance(devices, int) else [str(d) for d in devices]
        if not names:
            raise InputError(f"Workers({devices!r}): needed: at least one device.")
        for name in names:
            kind, _, number = name.partition(":")
            if kind not in ("cpu", "cuda") or not (number or "0").isdigit():
                raise refusal
        self.devices = names
        self._tasks: Tasks = queue.Queue()
        self._threads: list[threading.Thread] = []
        # Given inline and forgotten, it ends its processes when nobody can reach it any more.
        self._finalizer = weakref.finalize(self, _dismiss, self._tasks, self._threads)

    @property
    def workers(self) -> int:
        """How many processes there are."""
        return len(self.devices)

    def submit(self, f: Callable[..., T], /, *args: object) -> Future[T]:
        """f(*args) in one of the processes, when one is free."""
        if not self._threads:
            for device in self.devices:  # a thread must not hold on to this object
                thread = threading.Thread(target=_serve, args=(device, self._tasks), daemon=True)
                self._threads.append(thread)
                thread.start()
        future: Future[T] = Future()
        self._tasks.put(_Entry(future, pickle.dumps((f, args), protocol=5)))
        return future

    def close(self) -> None:
        """End the processes when what was submitted is done, and wait for that."""
        threads = list(self._threads)
        _dismiss(self._tasks, self._threads)
        for thread in threads:
            thread.join()

    def __repr__(self) -> str:
        return f"Workers({self.devices})"

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        # Whoever leaves early does not want what is still queued.
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._tasks.get_nowait()
                if entry is not None:
                    entry.future.cancel()
        self.close()


def _dismiss(tasks: Tasks, threads: list[threading.Thread]) -> None:
    """Tell every thread to end its process when what is queued has been done."""
    for _ in threads:
        tasks.put(None)
    threads.clear()


def _serve(device: str, tasks: Tasks) -> None:
    """One thread per process: hand it a task, wait for the answer."""
    live: _Process | None = None
    while (entry := tasks.get()) is not None:
        future, call = entry
        if not future.set_running_or_notify_cancel():
            continue
        try:
            live = live or _Process(device)  # the first, or in the place of one that died
            good, answer = live.ask(call)
            future.set_result(answer) if good else future.set_exception(answer)
        except (EOFError, OSError, WorkerLost) as e:
            if live is not None:
                live.end()
                live = None
            future.set_exception(WorkerLost(f"the worker on {device} is gone ({type(e).__name__}: {e})."))
        except Exception as e:  # whoever waits for the future must hear of it
            future.set_exception(e)
        del entry, future, call  # the next may be long in coming
    if live is not None:
        live.end()


class _Process:
    """A Python process that computes what it is sent."""

    def __init__(self, device: str) -> None:
        # What is sent is unpickled, so only who knows the key may speak; it goes by the environment, which other users
        # cannot read.
        key = secrets.token_hex(16)
        with Listener(None, authkey=key.encode()) as listener:
            environment = dict(os.environ, TANGENCY_WORKER_KEY=key)
            if device.startswith("cuda"):
                environment["CUDA_VISIBLE_DEVICES"] = _visible(device)
            # What the parent can import, the worker can.
            environment["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
            # -P: the working folder comes before the libraries only where it does for the parent.
            command = [sys.executable, "-P", "-c", f"from {__name__} import _work; _work()"]
            self.process = subprocess.Popen(
                [*command, str(listener.address), str(torch.get_num_threads())],
                env=environment,
                start_new_session=True,  # Ctrl-C is for the parent, which ends its workers
            )
            self.connection = self._accept(listener)

    def _accept(self, listener: Listener) -> Connection:
        """The worker's call, or WorkerLost if it died first."""
        calls: queue.Queue[Connection | Exception] = queue.Queue()

        # In a thread: `accept` cannot be told to give up when the process is dead.
        def accept() -> None:
            """Wait for the worker to call; runs in a thread, so that its death is noticed meanwhile."""
            try:
                calls.put(listener.accept())
            except Exception as e:
                calls.put(e)

        threading.Thread(target=accept, daemon=True).start()
        end = time.monotonic() + START
        while time.monotonic() < end and self.process.poll() is None:
            with contextlib.suppress(queue.Empty):
                answer = calls.get(timeout=0.1)
                if isinstance(answer, Exception):
                    raise WorkerLost(f"it could not be reached: {answer}")
                return answer
        self.process.kill()
        raise WorkerLost(f"it did not start (exit status {self.process.poll()}).")

    def ask(self, call: bytes) -> tuple[bool, Any]:
        """(whether it went well, the answer or the exception)."""
        self.connection.send_bytes(call)
        return pickle.loads(self.connection.recv_bytes())

    def end(self) -> None:
        """Hang up, which ends the process; one that does not notice is killed."""
        with contextlib.suppress(OSError):
            self.connection.close()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _visible(device: str) -> str:
    """The device as CUDA_VISIBLE_DEVICES must name it in a process that sees it alone."""
    number = int(device.partition(":")[2] or 0)
    # The parent may itself see some devices only; numbers are then those of its list.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(k) for k in range(number + 1)]
    if number >= len(names):
        raise InputError(f"there is no {device}: CUDA_VISIBLE_DEVICES={visible} has {len(names)} in all.")
    return names[number].strip()


def _work() -> None:
    """The life of a worker: until the connection closes."""
    address, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    with Client(address, authkey=os.environ["TANGENCY_WORKER_KEY"].encode()) as connection:
        while True:
            try:
                call = connection.recv_bytes()
            except (EOFError, OSError):
                return
            try:
                f, args = pickle.loads(call)
                answer = pickle.dumps((True, f(*args)), protocol=5)
            except BaseException as e:  # SystemExit too: the parent waits for an answer
                answer = pickle.dumps((False, _sendable(e)), protocol=5)
            connection.send_bytes(answer)


def _sendable(e: BaseException) -> BaseException:
    """The exception, or its words where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(e))
    except Exception:
        return RuntimeError(f"{type(e).__name__}: {e}")
    return e
