"""A training step recorded as a CUDA graph and replayed, so that a small network does not wait for Python."""

import gc
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from ..errors import PerformanceWarning

# Steps of each batch size that are taken one by one before one is recorded, as torch's examples do it: whatever is
# made or chosen at first use (optimizer states, cuBLAS workspaces, cuDNN's algorithms) is there then.
FIRST = 3

Step = Callable[[Tensor], Tensor]


class Recorded:
    """`step(rows)` by replaying what its kernels were, for each number of rows; the first few are taken one by one.

    These are steps of the training like all others, and recording runs nothing, so that nothing is to be undone. What
    `step` returns is overwritten by the next replay. On a CPU the rows are copied to the same place at each step as on
    a GPU, and the step is taken. A step that CUDA cannot record is taken one by one ever after, with a warning.
    """

    def __init__(self, step: Step, device: torch.device) -> None:
        self.step, self.device = step, device
        self.taken: Counter[int] = Counter()
        self.replays: dict[int, Step] = {}
        self.refused = False
        # One stream for the first steps and the recording: autograd goes on where it has begun.
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, rows: Tensor) -> Tensor:
        """The step on these samples."""
        size = len(rows)
        if size in self.replays:
            return self.replays[size](rows)
        if self.refused or self.taken[size] < FIRST:
            self.taken[size] += 1
            return self.step(rows) if self.stream is None else self._aside(rows, self.stream)
        try:
            self.replays[size] = self._recorded(rows.clone())
        except RuntimeError as e:
            self.refused = True
            reason = str(e.__context__ or e).partition("\n")[0]
            warnings.warn(
                f"the training step cannot be recorded as a CUDA graph ({reason}), so its operations are started one "
                "by one: as exact, but slower. Leave captured=True out, or let forward() take no number from the GPU.",
                PerformanceWarning,
                stacklevel=5,
            )
        return self(rows)

    def forget(self) -> None:
        """Give back what was recorded, now and not when Python comes to it."""
        self.replays.clear()

    def _recorded(self, place: Tensor) -> Step:
        """A replay of the step on the samples that `place` holds."""
        if self.stream is None:
            sums, graph = None, None
        else:
            gc.collect()  # a graph that is thrown away while another is recorded spoils the recording
            graph = torch.cuda.CUDAGraph()
            with (
                torch.cuda.device(self.device),
                # Brings the caller's stream back, which torch forgets where a recording fails.
                torch.cuda.stream(torch.cuda.current_stream(self.device)),
                # "thread_local": other threads may go on using the GPU meanwhile.
                torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"),
            ):
                sums = self.step(place)

        def replay(rows: Tensor) -> Tensor:
            """The kernels as they were, on other samples."""
            place.copy_(rows)
            if graph is None or sums is None:
                return self.step(place)
            graph.replay()
            return sums

        return replay

    def _aside(self, rows: Tensor, stream: torch.cuda.Stream) -> Tensor:
        """The step on the stream that it will be recorded on."""
        here = torch.cuda.current_stream(self.device)
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            found = self.step(rows)
        here.wait_stream(stream)
        return found
