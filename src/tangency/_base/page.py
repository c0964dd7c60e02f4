"""A page in one file: its parts put in the places that a template marks, and data for its script."""

import json
from collections.abc import Mapping

from .types import Json


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
