"""An option that is one of a few names."""

from collections.abc import Iterable

from .._check import suggest
from ..errors import InputError


def choice(value: object, name: str, choices: Iterable[str], more: str = "") -> str:
    """`value`, which must be one of `choices`; `more` says what else the option takes."""
    known = list(choices)
    if not isinstance(value, str) or value not in known:
        listed = ", ".join(map(repr, known)) + more
        raise InputError(f"{name}={value!r}; needed: {listed}.{suggest(str(value), known)}")
    return value
