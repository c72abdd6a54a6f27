"""Fields of request bodies as tables: each has its check, its default, and the JSON schema that describes it.

A field is in exactly one place of an endpoint's table: among those that are served, in `not_served` (it would change
the answer, so anything but a value that changes nothing is refused), or in `ignored` (it changes no answer). A field in
none of them is accepted and logged once, since clients send fields of other servers. `null` is the same as leaving the
field out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from replica.errors import BadRequest

logger = logging.getLogger(__name__)

Check = Callable[[str, Any], Any]  # (name, value) -> the value to use; raises BadRequest
Schema = Mapping[str, Any]

TEXT: Final[Schema] = {"type": "string"}
BOOLEAN: Final[Schema] = {"type": "boolean"}
MAX_INT32: Final = 2**31 - 1
MAX_SHOWN_CHARS: Final = 100  # of a wrong value
MAX_SHOWN_ITEMS: Final = 8
MAX_UNKNOWN_LOGGED: Final = 256  # names of unknown fields that are remembered, and so logged once


@dataclass(frozen=True, slots=True)
class Field:
    """A served field: its check, the value when the client sends none, and how it is described."""

    check: Check
    default: Any
    schema: Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The fields of one endpoint."""

    served: Mapping[str, Field]
    not_served: Mapping[str, tuple[Any, ...]]  # name -> the values that change nothing
    ignored: frozenset[str]
    required: tuple[str, ...]  # the fields that must be there


def bad(name: str, value: Any, expected: str) -> BadRequest:
    """The error for a field with a wrong value."""
    shown = preview(value)
    if len(shown) > MAX_SHOWN_CHARS:
        shown = shown[:MAX_SHOWN_CHARS] + "..."
    return BadRequest(f"{name} is {shown}, must be {expected}", param=name)


def preview(value: Any, levels: int = 3) -> str:
    """As `repr`, but of the first few elements alone: the whole of what a client sent may be millions."""
    if isinstance(value, str):
        return repr(value[:MAX_SHOWN_CHARS]) + ("..." if len(value) > MAX_SHOWN_CHARS else "")
    if not isinstance(value, list | dict) or not value:
        return repr(value)
    if not levels:
        return "..."
    if isinstance(value, list):
        shown = [preview(item, levels - 1) for item in value[:MAX_SHOWN_ITEMS]]
    else:
        first = islice(value.items(), MAX_SHOWN_ITEMS)
        shown = [f"{preview(key)}: {preview(item, levels - 1)}" for key, item in first]
    text = ", ".join(shown) + (", ..." if len(value) > MAX_SHOWN_ITEMS else "")
    return f"[{text}]" if isinstance(value, list) else f"{{{text}}}"


def number(low: float, high: float, default: float | None = None) -> Field:
    """A finite number from `low` to `high`."""

    def check(name: str, value: Any) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:  # false for NaN, too
            raise bad(name, value, f"a number from {low:g} to {high:g}")
        return float(value)

    return Field(check, default, {"type": "number", "minimum": low, "maximum": high})


def whole(low: int, high: int, default: int | None = None) -> Field:
    """A whole number from `low` to `high`; 3.0 is one."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int or not low <= value <= high:
            limit = f"of at least {low}" if high == MAX_INT32 else f"from {low} to {high}"
            raise bad(name, value, f"a whole number {limit}")
        return value

    return Field(check, default, {"type": "integer", "minimum": low, "maximum": high})


def check_count(name: str, value: Sized, limit: int, what: str) -> None:
    """Raises BadRequest for too many elements: before they are looked at, since that could take seconds."""
    if len(value) > limit:
        raise BadRequest(f"{name} has {len(value)} {what}, limit is {limit}", param=name)


def check_flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise bad(name, value, "true or false")
    return value


def flag(default: bool | None) -> Field:
    """True or false."""
    return Field(check_flag, default, BOOLEAN)


def check_string(name: str, value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise bad(name, value, "a string")
    return value


def checked(check: Check, default: Any, **schema: Any) -> Field:
    """A field with a check of its own."""
    return Field(check, default, schema)


def nullable(schema: Schema) -> Schema:
    """What a field may be that need not be there."""
    return {"anyOf": [schema, {"type": "null"}]}


def string() -> Field:
    """A string, absent by default."""
    return Field(check_string, None, TEXT)


def check_object(name: str, value: Any) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise bad(name, value, "an object")
    return value


class FieldReader:
    """Reads request bodies by table. Remembers which unknown fields it has logged."""

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def read(self, body: Any, table: Table) -> dict[str, Any]:
        """The value of each served field. Raises BadRequest."""
        if not isinstance(body, dict):
            raise BadRequest(f"the body is a JSON {type(body).__name__}, must be an object")
        values = {name: field.default for name, field in table.served.items()}
        for name, value in body.items():
            if value is None or name in table.ignored:
                continue
            if name in table.served:
                values[name] = table.served[name].check(name, value)
            elif name in table.not_served:
                _check_neutral(name, value, table.not_served[name])
            else:
                self._log_unknown(name)
        for name in table.required:
            if values[name] is None:
                raise BadRequest(f"{name} is missing", param=name)
        return values

    def _log_unknown(self, name: str) -> None:
        if name not in self._logged and len(self._logged) < MAX_UNKNOWN_LOGGED:
            self._logged.add(name)
            logger.info("unknown request field ignored name=%.64r", name)


def _check_neutral(name: str, value: Any, neutrals: tuple[Any, ...]) -> None:
    for neutral in neutrals:
        if value == neutral and isinstance(value, bool) == isinstance(neutral, bool):
            return
    if not neutrals:
        raise BadRequest(f"{name} is not supported; leave it out", param=name)
    allowed = " or ".join(repr(neutral) for neutral in neutrals)
    raise BadRequest(f"{name} is not supported; leave it out or send {allowed}", param=name)
