"""A page in one file: its parts put in the places that a template marks, and data for its script."""

import json
import re
from collections.abc import Mapping, Sequence
from unicodedata import bidirectional

from .types import Json

_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def filled(template: str, parts: Mapping[str, str]) -> str:
    """The template with each part in the place of its mark, `<!--name-->`, in their order.

    A part that holds the mark of a later one would be filled itself: titles are escaped, and JSON has no "<" left.

    >>> filled("<title><!--title--></title>", {"title": "Digits"})
    '<title>Digits</title>'
    """
    for name, value in parts.items():
        before, _, after = template.partition(f"<!--{name}-->")
        template = before + value + after
    return template


def script_json(value: Json, *, ascii_only: bool = False) -> str:
    """For a script element, which only "<" could end; JSON has it in strings alone, where it may be written so.

    >>> script_json({"a": "</script>"})
    '{"a":"\\\\u003c/script>"}'
    """
    text = json.dumps(value, ensure_ascii=ascii_only, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def visible(value: Json) -> Json:
    """`value` with every text made safe to show: what would be unseen, or turn the line around, becomes ⟨U+202E⟩.

    That is control characters (but for tabs and line ends), marks of the direction of writing, and halves of surrogate
    pairs, which no file can hold. A text with letters that are written from right to left is set apart from what stands
    beside it, by marks of our own.

    >>> visible({"class": ["cat", "dog\\u202e", "\\ud800"]})
    {'class': ['cat', 'dog⟨U+202E⟩', '⟨U+D800⟩']}
    """
    if isinstance(value, str):
        return visible_text(value)
    if isinstance(value, Mapping):
        return {visible_text(k): visible(v) for k, v in value.items()}
    return [visible(v) for v in value] if isinstance(value, Sequence) else value


def visible_text(text: str) -> str:
    """As `visible` has it, of one text."""
    if text.isascii() and text.isprintable():
        return text
    shown = _UNSEEN.sub(lambda m: f"⟨U+{ord(m[0]):04X}⟩", text.replace("\r\n", "\n"))
    leftwards = not shown.isascii() and any(bidirectional(c) in ("R", "AL", "AN") for c in shown)
    return f"\u2068{shown}\u2069" if leftwards else shown
