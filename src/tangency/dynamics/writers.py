"""Where records go besides the log: TensorBoard's writers, Weights & Biases, and what is called as they are."""

from collections.abc import Mapping, Sequence

from .._base.types import Json
from ..errors import InputError

# Before the name of each quantity, so that dashboards show them together.
PREFIX = "ntk/"


def check_writers(writers: Sequence[object]) -> tuple[object, ...]:
    """Each must have `add_scalar(tag, value, step)` or `log(values, step=…)`."""
    if hasattr(writers, "add_scalar") or hasattr(writers, "log"):
        writers = (writers,)
    for writer in writers:
        if not callable(getattr(writer, "add_scalar", None)) and not callable(getattr(writer, "log", None)):
            raise InputError(
                f"writers has a {type(writer).__name__}; needed: add_scalar(tag, value, step), as TensorBoard's "
                "SummaryWriter has it, or log(values, step=…), as wandb has it."
            )
    return tuple(writers)


def send(writers: Sequence[object], step: int, values: Mapping[str, Json]) -> None:
    """Give every number to every writer; of a list each by its place, and what is not finite to none."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        cells = {f"{PREFIX}{name}/{k}": v for k, v in enumerate(value, 1)} if isinstance(value, list) else None
        flat |= {k: v for k, v in (cells or {f"{PREFIX}{name}": value}).items() if isinstance(v, (int, float))}
    for writer in writers:
        if callable(add := getattr(writer, "add_scalar", None)):
            for tag, value in flat.items():
                add(tag, value, step)
        elif callable(log := getattr(writer, "log", None)):
            log(flat, step=step)
