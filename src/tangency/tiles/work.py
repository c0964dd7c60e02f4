"""A task that another process can do: everything it needs travels with it, and doing it twice does no harm.

The kernel is packed once (`pack`); a worker unpacks it once and keeps it, with the row blocks of its last task.
"""

import hashlib
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._types import Inputs
from ..errors import InputError
from ..kernel import Kernel
from .plan import Task, TilePlan
from .source import batch
from .sweep import Sweep


@dataclass(frozen=True)
class Job:
    """What all tasks of a run share."""

    kernel: bytes
    digest: str
    cut: TilePlan

    @staticmethod
    def of(kernel: Kernel, cut: TilePlan) -> "Job":
        packed = pack(kernel)
        return Job(packed, hashlib.sha256(packed).hexdigest(), cut)


Tiles = list[tuple[int, int, np.ndarray]]
_held: dict[tuple[str, TilePlan], Sweep] = {}


def perform(job: Job, task: Task, inputs: Mapping[tuple[int, int], Inputs]) -> Tiles:
    """The tiles of a task, from the inputs of its blocks (side, block)."""
    key = job.digest, job.cut
    if key not in _held:
        _held.clear()  # one job at a time: a worker's memory is planned for one
        kernel = unpack(job.kernel)
        _held[key] = Sweep(kernel, lambda side, k: {}, job.cut)
    sweep = _held[key]
    kernel = sweep.kernel
    sweep.load = lambda side, k: batch(kernel.ready, kernel.device, inputs[side, k], "x")
    with torch.no_grad():
        found = [(i, j, tile.cpu().numpy()) for i, j, tile in sweep.tiles(task)]
    for i, j, tile in found:
        if not finite(tile):
            raise sweep.diagnose(i, j)
    return found


def finite(tile: np.ndarray) -> bool:
    """Whether all entries are. The sum first: it is finite if every entry is (or overflows, and the entries decide)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(tile.sum())) or bool(np.isfinite(tile).all())


def pack(kernel: Kernel) -> bytes:
    """The kernel as bytes. Tensors on a GPU travel by way of the CPU to the receiver's own GPU."""
    try:
        from cloudpickle import CloudPickler as Base
    except ImportError:
        Base = pickle.Pickler  # type: ignore[misc,assignment,unused-ignore]

    class Packer(Base):  # type: ignore[misc,valid-type,unused-ignore]
        def reducer_override(self, thing: Any) -> Any:
            if type(thing) is Tensor and thing.device.type == "cuda":
                return _arrive, (thing.detach().cpu(),)
            override = getattr(super(), "reducer_override", None)
            return NotImplemented if override is None else override(thing)

    buffer = io.BytesIO()
    try:
        Packer(buffer, protocol=5).dump(kernel)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise InputError(
            f"the kernel cannot be sent to other processes: {e}. Define the model and its functions in a module that can "
            "be imported, or pip install cloudpickle."
        ) from e
    return buffer.getvalue()


def unpack(packed: bytes) -> Kernel:
    return pickle.loads(packed)


def _arrive(t: Tensor) -> Tensor:
    return t.cuda()
