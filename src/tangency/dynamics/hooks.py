"""A monitor in the trainers of other people: Lightning's callbacks and Hugging Face's.

Their libraries are imported when a callback is made. Both call the monitor after every step of the optimizer, of the
process with rank 0 alone, and close it when training ends; how often it looks is the monitor's own to decide.
"""

from typing import TYPE_CHECKING, Any

from torch import nn

from .._base.extras import is_installed, needed
from ..errors import InputError
from .monitor import Monitor

if TYPE_CHECKING:
    from lightning.pytorch import Callback
    from transformers import TrainerCallback


class _Steps:
    """Tells a monitor of each step once: a batch whose gradients are kept for later is no step."""

    def __init__(self, monitor: Monitor) -> None:
        self.monitor, self.last = monitor, -1

    def begin(self, model: nn.Module, step: int) -> None:
        """The start, or where a checkpoint goes on."""
        if not self.monitor.watches(model):
            watched = type(self.monitor.kernel.feature_map.network.model).__name__
            raise InputError(
                f"a {type(model).__name__} is trained, and the monitor watches a {watched} that is no part of it. Make "
                "the kernel of the model that is given to the trainer, or of a module in it."
            )
        self.at(step)

    def at(self, step: int) -> None:
        """After a step of the optimizer."""
        if step > self.last:
            self.last = step
            self.monitor.step(step)


def lightning_callback(monitor: Monitor) -> "Callback":
    """A callback for Lightning's Trainer that offers every step to the monitor, and closes it at the end.

    The kernel may be that of the LightningModule, or of a network in it.

        trainer = L.Trainer(callbacks=[tg.dynamics.lightning_callback(monitor)])
    """
    if is_installed("lightning") or not is_installed("pytorch_lightning"):
        with needed("lightning", "lightning_callback()"):
            from lightning.pytorch import Callback
    else:  # the same library by its older name
        from pytorch_lightning import Callback
    steps = _Steps(monitor)

    class MonitorCallback(Callback):  # type: ignore[misc]
        """Offers every step to a monitor."""

        def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
            """The first record."""
            if trainer.is_global_zero:
                steps.begin(pl_module, int(trainer.global_step))

        def on_train_batch_end(
            self, trainer: Any, pl_module: nn.Module, outputs: object, batch: object, batch_idx: int
        ) -> None:
            """A record, if one is due."""
            if trainer.is_global_zero:
                steps.at(int(trainer.global_step))

        def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
            """The last record."""
            if trainer.is_global_zero:
                monitor.close()

    return MonitorCallback()


def trainer_callback(monitor: Monitor) -> "TrainerCallback":
    """A callback for Hugging Face's Trainer that offers every step to the monitor, and closes it at the end.

        trainer = transformers.Trainer(model, callbacks=[tg.dynamics.trainer_callback(monitor)], …)

    A kernel of such a model says which of its outputs counts: `tg.trace_ntk(model, outputs="logits")`.
    """
    with needed("transformers", "trainer_callback()"):
        from transformers import TrainerCallback
    steps = _Steps(monitor)

    class MonitorCallback(TrainerCallback):  # type: ignore[misc]
        """Offers every step to a monitor."""

        def on_train_begin(
            self, args: object, state: Any, control: object, *, model: nn.Module, **more: object
        ) -> None:
            """The first record."""
            if state.is_world_process_zero:
                steps.begin(model, int(state.global_step))

        def on_step_end(self, args: object, state: Any, control: object, **more: object) -> None:
            """A record, if one is due."""
            if state.is_world_process_zero:
                steps.at(int(state.global_step))

        def on_train_end(self, args: object, state: Any, control: object, **more: object) -> None:
            """The last record."""
            if state.is_world_process_zero:
                monitor.close()

    return MonitorCallback()
