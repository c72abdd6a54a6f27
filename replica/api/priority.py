"""How urgent a request is: the body's `priority`, as vLLM has it, or the class that the header names.

Sequences with a lower number run first, and when there is no room, those with a higher one give way to them.
"""

from __future__ import annotations

from typing import Final

from replica.errors import BadRequest

PRIORITY_HEADER: Final = "X-Priority"  # the proxy reads it, too, and lets in the more urgent first
_CLASSES: Final = {"high": -1, "normal": 0, "low": 1}


def priority_of(asked: int | None, header: str | None) -> int:
    """The number, of the body if that has one. Raises BadRequest."""
    if header is None:
        return asked or 0
    number = _CLASSES.get(header.strip().lower())
    if number is None:
        raise BadRequest(f"{PRIORITY_HEADER} is {header[:100]!r}, must be one of {', '.join(_CLASSES)}")
    return number if asked is None else asked
