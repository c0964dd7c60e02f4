"""A task that another process can do: everything it needs travels with it, and doing it twice does no harm.

The kernel is packed once (`pack`); a worker unpacks it once and keeps it, with the row blocks of its last task.
"""

import io
import pickle
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._types import Inputs
from ..errors import InputError
from ..kernel import Kernel, all_finite
from .plan import Task, TilePlan
from .source import batch
from .sweep import Sweep


@dataclass(frozen=True)
class Job:
    """What all tasks of a run share."""

    kernel: bytes
    cut: TilePlan
    run: str  # another one for every run: what a worker holds comes from the inputs of that run

    @staticmethod
    def of(kernel: Kernel, cut: TilePlan) -> "Job":
        return Job(pack(kernel), cut, secrets.token_hex(16))


Tiles = list[tuple[int, int, np.ndarray]]
_held = threading.local()  # a sweep is one thread's: the workers of an executor may be threads of one process


def perform(job: Job, task: Task, inputs: Mapping[tuple[int, int], Inputs]) -> Tiles:
    """The tiles of a task, from the inputs of its blocks (side, block)."""
    if getattr(_held, "run", None) != job.run:
        _held.sweep = None  # one job at a time: a worker's memory is planned for one
        _held.sweep = Sweep(unpack(job.kernel), lambda side, k: {}, job.cut)
        _held.run = job.run
    sweep: Sweep = _held.sweep
    kernel = sweep.kernel
    sweep.load = lambda side, k: batch(kernel, inputs[side, k], "x")
    with torch.no_grad():
        found = [(i, j, tile.cpu()) for i, j, tile in sweep.tiles(task)]
        for i, j, tile in found:
            if not all_finite(tile):
                raise sweep.diagnose(i, j)
    return [(i, j, tile.numpy()) for i, j, tile in found]


def pack(kernel: Kernel) -> bytes:
    """The kernel as bytes. Tensors on a GPU travel by way of the CPU to the receiver's own GPU."""
    try:
        from cloudpickle import CloudPickler as Base
    except ImportError:
        Base = pickle.Pickler  # type: ignore[misc,assignment,unused-ignore]

    class Packer(Base):  # type: ignore[misc,valid-type,unused-ignore]
        def reducer_override(self, thing: Any) -> Any:
            if type(thing) is Tensor and _far(thing):
                return _arrive, (_leave(thing),)
            override = getattr(super(), "reducer_override", None)
            return NotImplemented if override is None else override(thing)

    buffer = io.BytesIO()
    try:
        Packer(buffer, protocol=5).dump(kernel)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise InputError(
            f"the kernel cannot be sent to other processes: {e}. Define the model and its functions in a module that "
            "can be imported, or pip install cloudpickle."
        ) from e
    return buffer.getvalue()


def unpack(packed: bytes) -> Kernel:
    try:
        return pickle.loads(packed)
    except (AttributeError, ImportError) as e:  # without cloudpickle, what a script defines is sent by name alone
        raise InputError(
            f"a worker cannot unpack the kernel: {e}. Define the model and its functions in a module that the workers "
            "can import too, or pip install cloudpickle."
        ) from e


def _far(t: Tensor) -> bool:
    return t.device.type == "cuda"


def _leave(t: Tensor) -> Tensor:
    return t.detach().cpu()


def _arrive(t: Tensor) -> Tensor:
    return t.cuda()
