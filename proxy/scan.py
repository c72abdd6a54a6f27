"""What routing wants to know of a JSON body, read without building anything from it.

A quote that no backslash precedes and that follows no open string begins a string; so `"model"` with a colon after it
is a key wherever it is found, but perhaps of an inner object. The two ends of a body are looked at first, since
clients write the short fields before or after the long ones, and how deep a place there is follows from the few
brackets between it and that end. Only a field that is in neither end costs a walk over the whole body.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Final

from proxy.framing import Bytes

END_BYTES: Final = 4096  # of a body that are searched first
_FIRST: Final = re.compile(rb'\s*{\s*"model"\s*:\s*"([^"\\]*)"')
_KEY: Final = b'"model"'
_VALUE: Final = re.compile(rb'\s*:\s*("(?:[^"\\]++|\\.)*+"|[^\s"])', re.DOTALL)
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]]', re.DOTALL)
_PROMPTS: Final = (b'"messages"', b'"prompt"', b'"input"')

BLOCK_BYTES: Final = 256  # of a prompt, hashed together; about 64 tokens
MAX_BLOCKS: Final = 128
PROMPT_BYTES: Final = END_BYTES + MAX_BLOCKS * BLOCK_BYTES  # of a body, all that prompt_blocks looks at


def requested_model(body: bytes) -> str | None:
    """The `model` of a whole JSON body; None if it names none or is no JSON, which is for the replica to judge."""
    first = _FIRST.match(body)
    if first is not None:
        return _text(first[1])
    return _decode(_in_head(body) or _in_tail(body) or _in_the_middle(body))


def model_in_beginning(part: Bytes) -> str | None:
    """The `model`, if it is in the first bytes of a body, of which this is the beginning."""
    first = _FIRST.match(part)
    return _text(first[1]) if first is not None else _decode(_in_head(bytes(part[:END_BYTES])))


def model_in_part(part: bytes) -> str | None:
    """The `model`, if it is anywhere in a body of which only this first part is known."""
    return _decode(_in_head(part) or _walk(part))


def _text(value: bytes) -> str | None:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None


def _decode(value: bytes | None) -> str | None:
    if value is None or value[:1] != b'"':
        return None
    if b"\\" not in value:
        return _text(value[1:-1])
    try:
        return str(json.loads(value))
    except ValueError:
        return None


def _in_head(body: bytes) -> bytes | None:
    head = body[:END_BYTES]
    return next((value for value, at in _places(head) if _depth(head[:at]) == 1), None)


def _in_tail(body: bytes) -> bytes | None:
    if len(body) <= END_BYTES:
        return None
    tail = body[-END_BYTES:]
    return next((value for value, at in _places(tail) if _depth(tail[at:]) == -1), None)


def _in_the_middle(body: bytes) -> bytes | None:
    return _walk(body) if len(body) > END_BYTES and _KEY in body else None


def _places(part: bytes) -> Iterator[tuple[bytes, int]]:
    """Each raw value of a key `model` in the part, with where the key begins."""
    at = part.find(_KEY)
    while at >= 0:
        if part[at - 1 : at] != b"\\":
            match = _VALUE.match(part, at + len(_KEY))
            if match is not None:
                yield match[1], at
        at = part.find(_KEY, at + len(_KEY))


def _depth(part: bytes) -> int:
    """Brackets opened less brackets closed, outside of strings. The part must not begin within a string."""
    if part == b"{":
        return 1
    bare = _STRING.sub(b"", part)
    return bare.count(b"{") + bare.count(b"[") - bare.count(b"}") - bare.count(b"]")


def _walk(body: bytes) -> bytes | None:
    """The value of the outermost object's `model`, wherever it is."""
    depth = 0
    for match in _STRUCTURE.finditer(body):
        token = match[0]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and token == _KEY:
            value = _VALUE.match(body, match.end())
            if value is not None:
                return value[1]
    return None


def prompt_blocks(body: bytes) -> list[int]:
    """Hashes of the prompt's growing beginnings, one block longer each: equal where two bodies begin alike.

    Raw bytes from the prompt's key on, so that short fields before it do not matter. A last block that is not full is
    left out, since the next turn of a conversation goes on in it.
    """
    start = -1
    for key in _PROMPTS:
        start = body.find(key, 0, END_BYTES)
        if start >= 0:
            break
    else:
        return []
    blocks: list[int] = []
    chained = 0
    last = min(len(body) - BLOCK_BYTES, start + (MAX_BLOCKS - 1) * BLOCK_BYTES)
    for at in range(start, last + 1, BLOCK_BYTES):
        chained = hash((chained, body[at : at + BLOCK_BYTES]))
        blocks.append(chained)
    return blocks
