"""A task that another process can do: everything it needs travels with it, and doing it twice does no harm.

The kernel is packed once (`pack`); a worker unpacks it once and keeps it, with the row blocks of its last task.
"""

import io
import pickle
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from .._base import tree
from .._base.extras import install
from .._base.types import Inputs
from ..errors import InputError, ModelError
from ..kernels.kernel import Kernel, all_finite
from .manifest import Witness
from .plan import TilePlan
from .rows import RowMap
from .source import batch
from .sweep import TileTask, sweep_of
from .witness import Sample, changed_numbers, witness

CPU = torch.device("cpu")
Blocks = Mapping[tuple[int, int], Inputs]  # samples by (side, number of the first one)
Tiles = list[tuple[int, int, np.ndarray]]


@dataclass(frozen=True)
class TileJob:
    """What all tasks of a run share."""

    kernel: bytes
    cut: TilePlan
    samples: list[Sample]
    witness: Witness  # what the kernel gives for them where it was packed
    run: str  # another one for every run: what a worker holds comes from the inputs of that run

    @staticmethod
    def of(kernel: Kernel | RowMap, cut: TilePlan, samples: list[Sample], seen: Witness) -> "TileJob":
        """The job of a kernel that gave `seen` for the samples."""
        alone = [replace(s, x=tree.to(s.x, CPU)) for s in samples]
        return TileJob(pack(kernel), cut, alone, seen, secrets.token_hex(16))

    def kernel_here(self) -> Kernel | RowMap:
        """The kernel, if it computes here what it does there: a class comes by its name, from files that may differ."""
        kernel = unpack(self.kernel)
        other = changed_numbers(self.witness, witness(kernel, self.samples), kernel.spec())
        if other:
            name, (there, here) = next(iter(other.items()))
            raise ModelError(
                f"the kernel gives other numbers on a worker: {name} is {here} there and {there} here. The worker "
                "imports the model's classes and functions anew: a file that was changed since, or a global that was "
                "set while the program ran, is another there. Keep such values in the model."
            )
        return kernel


_held = threading.local()  # a sweep is one thread's: the workers of an executor may be threads of one process


def perform(job: TileJob, task: TileTask, inputs: Blocks) -> Tiles:
    """The tiles of a task, from the inputs of its blocks."""

    def load(side: int, block: slice) -> Inputs:
        """Samples that came with the task."""
        return batch(sweep.maker, inputs[side, block.start], f"x{side + 1}", block.stop - block.start)

    if getattr(_held, "run", None) != job.run:
        _held.sweep = None  # one job at a time: a worker's memory is planned for one
        _held.sweep = sweep_of(job.kernel_here(), load, job.cut)
        _held.run = job.run
    # Rows that the last task prepared are still there; the inputs are those of this task.
    sweep = _held.sweep
    sweep.load = load
    with torch.no_grad():
        tiles = [(i, j, tile.cpu()) for i, j, tile in sweep.tiles(task)]
        for i, j, tile in tiles:
            if not all_finite(tile):
                raise sweep.diagnose(i, j)
    return [(i, j, tile.numpy()) for i, j, tile in tiles]


def pack(kernel: Kernel | RowMap) -> bytes:
    """The kernel as bytes. Tensors on a GPU travel by way of the CPU to the receiver's own GPU."""
    try:
        from cloudpickle import CloudPickler as Base
    except ImportError:
        Base = pickle.Pickler  # type: ignore[misc,assignment,unused-ignore]

    class Packer(Base):  # type: ignore[misc,valid-type,unused-ignore]
        """A pickler that takes tensors off the GPU, which the receiver may number otherwise."""

        def reducer_override(self, thing: object) -> object:
            """How to make a thing again; NotImplemented for the usual way."""
            if type(thing) is Tensor and _far(thing):
                return _arrive, (_leave(thing),)
            if isinstance(thing, torch.device) and thing.type == "cuda":
                return torch.device, ("cuda",)
            override = getattr(super(), "reducer_override", None)
            return NotImplemented if override is None else override(thing)

    buffer = io.BytesIO()
    try:
        Packer(buffer, protocol=5).dump(kernel)
    except (pickle.PicklingError, AttributeError, TypeError) as e:
        raise InputError(
            f"the kernel cannot be sent to other processes: {e}. Define the model and its functions in a module that "
            f"can be imported, or {install('workers')}."
        ) from e
    return buffer.getvalue()


def unpack(packed: bytes) -> Kernel | RowMap:
    """What `pack` packed, in the process that received it."""
    try:
        return pickle.loads(packed)
    except (AttributeError, ImportError) as e:  # without cloudpickle, what a script defines is sent by name alone
        raise InputError(
            f"a worker cannot unpack the kernel: {e}. Define the model and its functions in a module that the workers "
            f"can import too, or {install('workers')}."
        ) from e


def _far(t: Tensor) -> bool:
    return t.device.type == "cuda"


def _leave(t: Tensor) -> Tensor:
    return t.detach().cpu()


def _arrive(t: Tensor) -> Tensor:
    return t.cuda()
