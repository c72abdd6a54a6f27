"""Where the body of an HTTP/1.1 message ends. Pure state, fed with bytes however they were split.

`feed` says how many of the bytes belong to the body; what follows them is the next message's. A chunked body also
says how far its chunks are whole, so that a stream can be passed on, unchanged, in whole chunks.
"""

from __future__ import annotations

import re
from typing import Final, Protocol

from proxy.errors import Malformed

MAX_LINE_BYTES: Final = 4096  # of a chunk's size and extensions, or of one trailer
MAX_TRAILER_BYTES: Final = 16 * 1024
_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?")
# Not what says where a message ends: a reader that takes trailers for headers would see another one.
_TRAILER: Final = re.compile(
    rb"(?!(?i:content-length|transfer-encoding):)[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*"
)
_MAX_SIZES: Final = 4096  # size lines remembered
_MAX_SIZE_LINE: Final = 8  # of one that is remembered
_sizes: dict[bytes, int] = {}  # size line -> bytes; events of one model have few different lengths
_beginnings: dict[int, bytes] = {}  # length of a whole chunk -> what one of that length began with: its size line


Bytes = bytes | memoryview  # a large body is passed on by views of what was read, without a copy


class Body(Protocol):
    """A body that arrives."""

    is_done: bool
    boundary: int  # of the bytes fed last, up to here nothing is half: the rest is the start of a chunk

    def feed(self, data: bytes, parts: list[Bytes] | None = None) -> int:
        """Bytes of `data` that belong to the body; its payload is added to `parts`. Raises Malformed."""
        ...


class SizedBody:
    """A body whose length was announced."""

    __slots__ = ("_left", "boundary", "is_done")

    def __init__(self, length: int) -> None:
        self._left = length
        self.is_done = length == 0
        self.boundary = 0

    def feed(self, data: Bytes, parts: list[Bytes] | None = None) -> int:
        """See Body."""
        used = min(len(data), self._left)
        self._left -= used
        self.is_done = self._left == 0
        self.boundary = used
        if parts is not None and used:
            parts.append(data if used == len(data) else data[:used])
        return used


class EndlessBody:
    """A body that ends with its connection."""

    __slots__ = ("boundary", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self.boundary = 0

    def feed(self, data: bytes, parts: list[Bytes] | None = None) -> int:
        """See Body."""
        self.boundary = len(data)
        if parts is not None:
            parts.append(data)
        return self.boundary


class _At:
    SIZE: Final = 1
    DATA: Final = 2
    DATA_END: Final = 3
    TRAILER: Final = 4


class ChunkedBody:
    """A body in the chunked transfer coding."""

    __slots__ = ("_at", "_left", "_line", "_trailer_bytes", "boundary", "is_done")

    def __init__(self) -> None:
        self._at: int = _At.SIZE
        self._left = 0  # bytes of the current chunk's data
        self._line = b""  # the start of a line that is not whole
        self._trailer_bytes = 0
        self.is_done = False
        self.boundary = 0

    def feed(self, data: bytes, parts: list[Bytes] | None = None) -> int:
        """See Body."""
        total = len(data)
        if parts is None and self._at == _At.SIZE and not self._line:
            # One whole chunk: nearly every read of an event stream. Anything else goes the long way.
            beginning = _beginnings.get(total)
            if beginning is not None and data.startswith(beginning) and data.endswith(b"\r\n"):
                self.boundary = total
                return total
        at = self.boundary = 0
        while at < total and not self.is_done:
            if self._at == _At.SIZE and not self._line:
                at = self._whole_chunks(data, at, parts)
                if at == total:
                    break
            if self._at == _At.DATA:
                used = min(self._left, total - at)
                if parts is not None:
                    parts.append(data[at : at + used])
                at += used
                self._left -= used
                if self._left == 0:
                    self._at = _At.DATA_END
            else:
                at = self._take_line(data, at)
        return at

    def _whole_chunks(self, data: bytes, at: int, parts: list[Bytes] | None) -> int:
        """Passes over chunks that are there as a whole: nearly all of an event stream."""
        total = len(data)
        while at < total:
            end = data.find(b"\r\n", at, at + MAX_LINE_BYTES)
            if end < 0:
                break
            line = data[at:end]
            size = _sizes.get(line)
            if size is None:
                size = _size_of(line)
            start = end + 2
            stop = start + size
            if size == 0 or stop + 2 > total:
                break
            if data[stop : stop + 2] != b"\r\n":
                raise Malformed("a chunk is longer than its size")
            if parts is not None:
                parts.append(data[start:stop])
            if len(line) <= _MAX_SIZE_LINE and size <= MAX_LINE_BYTES:
                _beginnings[stop + 2 - at] = data[at:start]
            at = self.boundary = stop + 2
        return at

    def _take_line(self, data: bytes, at: int) -> int:
        """One line, or the start of one; returns where it ends."""
        end = data.find(b"\n", at)
        line = self._line + (data[at:] if end < 0 else data[at : end + 1])
        if len(line) > MAX_LINE_BYTES:
            raise Malformed(f"a line between chunks is longer than {MAX_LINE_BYTES} bytes")
        if self._at == _At.DATA_END and not b"\r\n".startswith(line):
            raise Malformed("a chunk is longer than its size")
        if end < 0:
            self._line = line
            return len(data)
        if not line.endswith(b"\r\n"):
            raise Malformed("a line between chunks ends with a bare LF")
        self._line = b""
        self._end_line(line[:-2], end + 1)
        return end + 1

    def _end_line(self, line: bytes, end: int) -> None:
        if self._at == _At.SIZE:
            self._left = _size_of(line)
            self._at = _At.DATA if self._left else _At.TRAILER
        elif self._at == _At.DATA_END:
            self._at = _At.SIZE
            self.boundary = end
        elif line:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > MAX_TRAILER_BYTES or not _TRAILER.fullmatch(line):
                raise Malformed("the trailers are malformed or too long")
        else:
            self.is_done = True
            self.boundary = end


def _size_of(line: bytes) -> int:
    match = _SIZE_LINE.fullmatch(line)
    if match is None:
        raise Malformed("a chunk's size is no number")
    size = int(match[1], 16)
    if len(_sizes) < _MAX_SIZES and len(line) <= _MAX_SIZE_LINE:
        _sizes[line] = size
    return size


def chunk(payload: Bytes) -> bytes:
    """One chunk of the chunked transfer coding."""
    return b"".join((b"%x\r\n" % len(payload), payload, b"\r\n"))


LAST_CHUNK: Final = b"0\r\n\r\n"


def first_payload(raw: bytes) -> bytes:
    """What has come of the payload of a chunk that is not whole."""
    line, _, rest = raw.partition(b"\r\n")
    return rest[: _size_of(line)] if rest else b""
