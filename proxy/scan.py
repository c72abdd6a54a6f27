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

END_BYTES: Final = 4096  # of a body that are searched first
_VALUE: Final = re.compile(rb'\s*:\s*("(?:[^"\\]++|\\.)*+"|true|false)', re.DOTALL)
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_STRUCTURE: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[{}\[\]]', re.DOTALL)
_PROMPTS: Final = (b'"messages"', b'"prompt"', b'"input"')

BLOCK_BYTES: Final = 256  # of a prompt, hashed together; about 64 tokens
MAX_BLOCKS: Final = 128


def requested_model(body: bytes) -> str | None:
    """The `model` of a JSON body; None if it names none or is no JSON, which is for the replica to judge."""
    value = _top_level(body, b'"model"')
    if value is None or value[:1] != b'"':
        return None
    try:
        return str(json.loads(value)) if b"\\" in value else value[1:-1].decode()
    except ValueError:
        return None


def _top_level(body: bytes, key: bytes) -> bytes | None:
    """The raw value, a string or a boolean, of a key of the outermost object."""
    head = body[:END_BYTES]
    for value, at in _places(head, key):
        if _depth(head[:at]) == 1:
            return value
    if len(body) <= END_BYTES:
        return None
    tail = body[-END_BYTES:]
    for value, at in _places(tail, key):
        if _depth(tail[at:]) == -1:
            return value
    return _walk(body, key) if body.find(key, END_BYTES, -END_BYTES) >= 0 else None


def _places(part: bytes, key: bytes) -> Iterator[tuple[bytes, int]]:
    """Each value of this key in the part, with where the key begins."""
    at = part.find(key)
    while at >= 0:
        if part[at - 1 : at] != b"\\":
            match = _VALUE.match(part, at + len(key))
            if match is not None:
                yield match[1], at
        at = part.find(key, at + len(key))


def _depth(part: bytes) -> int:
    """Brackets opened less brackets closed, outside of strings. The part must not begin within a string."""
    if part == b"{":
        return 1
    bare = _STRING.sub(b"", part)
    return bare.count(b"{") + bare.count(b"[") - bare.count(b"}") - bare.count(b"]")


def _walk(body: bytes, key: bytes) -> bytes | None:
    """The value of a top-level key, wherever it is."""
    depth = 0
    for match in _STRUCTURE.finditer(body):
        token = match[0]
        if token in (b"{", b"["):
            depth += 1
        elif token in (b"}", b"]"):
            depth -= 1
        elif depth == 1 and token == key:
            value = _VALUE.match(body, match.end())
            if value is not None:
                return value[1]
    return None


def prompt_blocks(body: bytes) -> list[int]:
    """Hashes of the prompt's growing beginnings, one block longer each: equal where two bodies begin alike.

    Raw bytes from the prompt's key on, so that short fields before it do not matter. A last block that is not full is left
    out, since the next turn of a conversation goes on in it.
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
