"""A training watched: what its kernel does on a few samples, at a bounded cost, in a file that outlives the process."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import numpy as np
import torch
from torch import Tensor, nn

from .._base.fingerprint import describe
from .._base.targets import Kind
from .._base.types import FilePath, Inputs, Json, Numbers, Params
from ..errors import InputError, NonFiniteError, StoreWarning
from ..kernels.empirical import Empirical
from .evolution import Evolution, Regime
from .pace import Clock, Pace
from .path import Loss
from .probed import Checkpoint, Probe, as_found
from .quantities import QUANTITIES, Sight, Start, UserFunction, look, picked
from .runlog import Line, Recorded, RunLog
from .writers import check_writers, send


class Monitor:
    """Records picked quantities of the kernel on the samples `x` while a training goes on; `history()` has them.

    `monitor(step)` records now. `monitor.step(step)` may be called at every step: it records as often as fits into
    `share` of the training time (default: 5 %), or at each `every`-th step. The first step is always recorded, and the
    last too if the monitor is closed: `with Monitor(…) as monitor:`. The model is left as it was: it is looked at in
    evaluation mode, and modes, buffers, gradients and random numbers are as before.

    `record`: names out of `tg.dynamics.QUANTITIES` (default: change, cosine, velocity, moved, rotation, with `y` the
    centred alignment and the energy of the targets, with `loss` the loss). `functions`: more, of the Gram [n, n], by
    name. `y`: targets or classes of x, read as `tangency.spectra` does; `targets`: "classes" or "real",
    of floats that may be either. `top`: how many eigenvectors are the top ones (default: 10, and at most a
    quarter). `log`: a file for the record, a line for each step; `resume` goes on with the one that is there.
    `writers`: TensorBoard's, W&B's, or what is called as they are.

    The kernel must read its model live (no `params=`). Cost: a Gram of the samples for each record, and eigenpairs
    where something recorded needs them; two Grams are kept, and for how far parameters moved their first values.

    >>> import tangency as tg
    >>> net, x = tg.models.mlp([3, 8, 1]), torch.randn(20, 3)
    >>> monitor = tg.dynamics.Monitor(tg.trace_ntk(net), x)
    >>> sgd = lambda p: torch.optim.SGD(p, lr=0.1)
    >>> past = tg.dynamics.train(
    ...     net, x, x[:, :1], loss=torch.nn.functional.mse_loss, optimizer=sgd, steps=10, every=5, watch=monitor
    ... )
    >>> monitor.regime().steps.tolist()
    [0.0, 5.0, 10.0]
    """

    def __init__(
        self,
        kernel: Empirical,
        x: Inputs,
        *,
        y: Numbers | Sequence[str] | None = None,
        targets: Kind | None = None,
        loss: Loss | None = None,
        record: Sequence[str] | None = None,
        functions: Mapping[str, UserFunction] | None = None,
        top: int | None = None,
        share: float | None = None,
        every: int | None = None,
        log: FilePath | None = None,
        resume: bool = False,
        writers: Sequence[object] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        self._probe = Probe(kernel, x, y, loss, top, targets)
        told = y is not None
        self.record = picked(record, targets=told, loss=told and loss is not None, full=not kernel.trace)
        self.functions, self._writers = dict(functions or {}), check_writers(writers)
        if taken := sorted(set(self.functions) & set(QUANTITIES)):
            raise InputError(f"functions has {taken[0]!r}, which the monitor records itself; needed: another name.")
        self._pace = Pace(share, every, clock=clock)
        if resume and log is None:
            raise InputError("resume=True without log=; needed: the file to go on with.")
        self.notes: list[str] = []
        self._start: Start | None = None
        self._last: tuple[int, Tensor] | None = None  # a Gram, with its step
        self._offered: tuple[Checkpoint, int] | None = None  # to step(), recorded or not
        self._known = -1  # steps up to here are in a log that was resumed
        self._unsaid = 0  # skipped calls that no line has counted yet
        self._closed = False
        self._lines = Recorded(self._head())
        self._log = None if log is None else RunLog(log, self._lines.head, resume)
        self._take_up()

    @property
    def kernel(self) -> Empirical:
        """Whose Gram matrix is recorded."""
        return self._probe.kernel

    # ---- recording --------------------------------------------------------------------------------------------------

    def __call__(self, step: int) -> None:
        """Record the kernel as it is now; steps must grow."""
        if not self._in_log(step):
            self._record(None, step)

    def step(self, model: nn.Module | Params | int | None, step: int | None = None) -> bool:
        """Offer a step: record it if it is due. `step(7)`, `step(model, 7)`, or of a checkpoint `step(state_dict, 7)`.

        A model that is given must be the one that is watched (or a wrapper around it), or have its parameters: then
        the record is made of these. Returns whether it was recorded. Cost of a step that is not due: a look at the
        clock.
        """
        if step is None and isinstance(model, (int, np.integer)):
            step, model = int(model), None
        if isinstance(model, int) or step is None or not isinstance(step, (int, np.integer)) or step < 0:
            raise InputError(
                f"step({type(model).__name__}, {step!r}); needed: monitor.step(step) or monitor.step(model, step), "
                "steps being whole numbers from 0."
            )
        step = int(step)
        if self._in_log(step):
            return False
        self._check(step, self._offered[1] if self._offered else None)
        self._offered = (model, step)
        if not self._pace.due(step):
            self._unsaid += 1
            return False
        self._record(model, step)
        return True

    def close(self) -> None:
        """Record the last step that was offered, if it was not, and end the log. Nothing is recorded afterwards."""
        if self._closed:
            return
        if self._offered is not None and self._offered[1] > self._recorded():
            self._pace.skipped -= 1
            self._unsaid -= 1
            self._record(*self._offered)
        self._closed = True
        line: Line = {"end": True, "skipped": self._unsaid, "looks": self._pace.looks, "share": self._pace.part()}
        self._lines.ended = line
        if self._log is not None:
            self._log.write(line)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Closed after a training that ended; one that failed is left open, so that it can be resumed."""
        if kind is None:
            self.close()

    # ---- what was seen ----------------------------------------------------------------------------------------------

    def history(self) -> Evolution:
        """What was recorded so far, by earlier processes too where a log was resumed."""
        return Evolution.of(self._lines, self.notes, self._unsaid)

    def regime(self) -> Regime:
        """Change, cosine, velocity and movement so far."""
        return self.history().regime()

    @property
    def skipped(self) -> int:
        """Steps that were offered and not recorded, in this process."""
        return self._pace.skipped

    @property
    def share(self) -> float | None:
        """What recording took beside the training, in this process: 0.05 is 5 % more; None before there was any."""
        return self._pace.part()

    def watches(self, model: nn.Module) -> bool:
        """Whether the parameters that are watched are parameters of this model."""
        watched = self.kernel.feature_map.network
        own = {id(p) for p in model.parameters()}
        return all(id(watched.model.get_parameter(name)) in own for name in watched.trainable)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _record(self, model: Checkpoint, step: int) -> None:
        """Look, compare, write down."""
        self._check(step, self._recorded() if self._lines.records else None)
        kernel = self._probe.kernel_of(model, step)
        if kernel.device.type == "cuda":  # what training has begun is not ours to pay for
            torch.cuda.synchronize(kernel.device)
        line: Line = {"step": step}
        with self._pace.looking():
            try:
                line["values"], notes = self._look(kernel, step)
            except NonFiniteError as e:
                # A training that diverged goes on as it would without us, and the record says so.
                line["values"] = dict.fromkeys((*self.record, *self.functions))
                notes = [f"step {step}: {e}".rstrip(".")]
        line |= {"notes": list(notes)} if notes else {}
        line |= {"seconds": self._pace.last_cost, "skipped": self._unsaid}
        self._unsaid = 0
        self._lines.records.append(line)
        with self._pace.afterwards():
            if self._log is not None:
                self._log.write(line)
                if self._last is not None and "velocity" in self.record:
                    self._log.save_last(*self._last)
            send(self._writers, step, line["values"])  # type: ignore[arg-type]

    def _look(self, kernel: Empirical, step: int) -> tuple[dict[str, Json], list[str]]:
        """All quantities now, and what is to be said of them; the first time, what is seen becomes the start."""
        probe = self._probe
        with as_found(probe.model):
            gram = probe.gram(kernel)
            theta = probe.theta(kernel) if {"moved", "moved_part"} & {*self.record} else None
            if self._start is None:
                kept = None if theta is None else {name: p.clone() for name, p in theta.items()}
                start = Start(step, gram, kept)
                if self._log is not None:  # first on disk: an interrupt must leave none, or both
                    self._log.save_start(start)
                self._start = start
            if self._start.gram.device != gram.device:  # after a resume, or where the model was moved
                self._start = replace(self._start, gram=self._start.gram.to(gram))
            before = None if self._last is None else (self._last[0], self._last[1].to(gram))
            targets = None if probe.targets is None else probe.targets.to(gram)
            loss = None if probe.loss is None else lambda: probe.probe_loss(kernel)
            values, notes = look(
                Sight(step, gram, theta, self._start, before, probe.top, targets, loss), self.record, self.functions
            )
        self._last = (step, gram)
        return {**values}, notes

    def _in_log(self, step: int) -> bool:
        """Whether a log that was resumed has this step already; said once."""
        if step > self._known:
            return False
        said = f"the log has steps up to {self._known} already, which are not recorded again"
        if said not in self.notes:
            self._say(said)
        return True

    def _recorded(self) -> int:
        """The last step that was."""
        return int(self._lines.records[-1]["step"]) if self._lines.records else -1  # type: ignore[arg-type]

    def _check(self, step: int, before: int | None) -> None:
        if self._closed:
            raise InputError(f"the monitor was closed and is given step {step}; make another, with resume=True.")
        if before is not None and step <= before:
            raise InputError(f"step {step} comes after step {before}; needed: growing numbers.")

    def _head(self) -> Line:
        """The first line of a log."""
        return {
            "begun": datetime.now(UTC).isoformat(timespec="seconds"),
            **self._probe.form(),
            "record": list(self.record),
            "functions": {name: describe(f) for name, f in self.functions.items()},
            "pace": self._pace.words(),
        }

    def _take_up(self) -> None:
        """Go on with the record of an earlier process, if there is one."""
        was = None if self._log is None else self._log.was
        if self._log is None or was is None:
            return
        self._lines, was.ended = was, None
        if was.torn:
            self._say(f"{self._log.path}: {was.note}")
            was.torn = 0
        if not was.records:
            return
        self._known = self._recorded()
        if any(v is not None for line in was.records for v in line["values"].values()):  # type: ignore[union-attr]
            most = self._probe.most()
            self._start, self._last = self._log.load_start(most), self._log.load_last(most)
        if self._last is not None and self._last[0] > self._known:  # its line was lost: no record before the next
            self._last = None
        seconds = was.records[-1].get("seconds")
        self._pace.expect(float(seconds) if isinstance(seconds, (int, float)) else 0.0)

    def _say(self, note: str) -> None:
        self.notes.append(note)
        warnings.warn(f"{note}.", StoreWarning, stacklevel=4)
