"""What callers catch. Every message says what was given, what is needed, and the fix."""

from collections.abc import Mapping


class TangencyError(Exception):
    """Base of all errors raised by tangency."""


class InputError(TangencyError, ValueError):
    """The inputs, options or parameters cannot be used as given."""


class MissingLibrary(ModuleNotFoundError, InputError):
    """What was asked for needs a library that is not installed. `name` is the one; the message has the command."""


class ModelError(TangencyError, ValueError):
    """The model is not a deterministic function of one sample (training mode, batch mixing, randomness…)."""


class UnsupportedModule(TangencyError, NotImplementedError):
    """A module, or what is done with it, has no infinite-width limit that is known here."""


class NonFiniteError(TangencyError, ArithmeticError):
    """An output or a gradient is NaN or infinite. `sample` is its index, `layer` the first layer where it shows."""

    def __init__(self, message: str, sample: int, layer: str) -> None:
        super().__init__(message)
        self.sample, self.layer, self.template = sample, layer, message

    def shifted(self, start: int) -> "NonFiniteError":
        """The same error for a block whose first sample is number `start` of the whole."""
        message = self.template.replace(f"sample {self.sample}", f"sample {self.sample + start}", 1)
        return type(self)(message, self.sample + start, self.layer)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.template, self.sample, self.layer)


class PrecisionLoss(NonFiniteError, InputError):
    """What was computed cannot be kept in the type that was asked for. `sample` is its index."""


class NotPositiveDefinite(TangencyError, ArithmeticError):
    """The matrix to be solved with is not positive definite. `pivot` is the row where it shows, where one is known."""

    def __init__(self, message: str, pivot: int | None = None) -> None:
        super().__init__(message)
        self.pivot = pivot

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.pivot)


class DidNotConverge(TangencyError, ArithmeticError):
    """The answer is not as exact as was asked for. `solution` is the best one found, with its residual."""

    def __init__(self, message: str, solution: object = None) -> None:
        super().__init__(message)
        self.solution = solution

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (str(self), self.solution)


class MemoryBudgetError(TangencyError, MemoryError):
    """The declared memory budget is too small for even one sample, or for the result itself."""


class StoreError(TangencyError):
    """A Gram matrix on disk cannot be written, read or gone on with."""


class StoreMismatch(StoreError, ValueError):
    """The store was begun with something else. `fields` maps each field that differs to (in the store, given now)."""

    def __init__(self, store: str, fields: Mapping[str, tuple[object, object]]) -> None:
        lines = [f"  {name}: {_short(was)} in the store, {_short(now)} now" for name, (was, now) in fields.items()]
        super().__init__(
            f"{store} holds another Gram matrix; these differ:\n"
            + "\n".join(lines)
            + "\nGive what it was begun with, or "
            "another store=. tg.open_gram reads it as it is."
        )
        self.store, self.fields = store, dict(fields)

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.store, self.fields)


class IncompleteGram(StoreError):
    """The Gram matrix is not finished, and what was asked for lies in a tile that is missing."""


class DamagedTile(StoreError):
    """A stored tile does not match its checksum."""


class WorkerLost(TangencyError):
    """A worker process, or the machine it ran on, is gone. Its tiles are computed again elsewhere."""


class TangencyWarning(UserWarning):
    """Base of all warnings issued by tangency."""


class PerformanceWarning(TangencyWarning):
    """The answer is exact, but a slower path than usual leads to it."""


class StoreWarning(TangencyWarning):
    """Something about a store was found and dealt with: a damaged tile, another version of a library."""


def _short(value: object, most: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= most else text[: most - 1] + "…"
