"""What callers catch. Every message says what was given, what is needed, and the fix."""


class TangencyError(Exception):
    """Base of all errors raised by tangency."""


class InputError(TangencyError, ValueError):
    """The inputs, options or parameters cannot be used as given."""


class ModelError(TangencyError, ValueError):
    """The model is not a deterministic function of one sample (training mode, batch mixing, randomness…)."""


class NonFiniteError(TangencyError, ArithmeticError):
    """An output or a gradient is NaN or infinite. `sample` is its index, `layer` the first layer where it shows."""

    def __init__(self, message: str, sample: int, layer: str) -> None:
        super().__init__(message)
        self.sample, self.layer, self.template = sample, layer, message

    def shifted(self, start: int) -> "NonFiniteError":
        """The same error for a block whose first sample is number `start` of the whole."""
        message = self.template.replace(f"sample {self.sample}", f"sample {self.sample + start}", 1)
        return NonFiniteError(message, self.sample + start, self.layer)


class MemoryBudgetError(TangencyError, MemoryError):
    """The declared memory budget is too small for even one sample, or for the result itself."""


class TangencyWarning(UserWarning):
    """Base of all warnings issued by tangency."""


class PerformanceWarning(TangencyWarning):
    """The answer is exact, but a slower path than usual leads to it."""
