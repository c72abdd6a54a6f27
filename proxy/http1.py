"""The heads of HTTP/1.1 messages: strict where two readers could disagree, and byte for byte where they cannot.

A proxy and the server behind it must see the same requests in the same bytes. So nothing is repaired: a repeated or
odd length, a length beside a transfer coding, a folded line, a space before a colon, a bare LF or CR, a control
character are errors. A head is parsed when it is there as a whole, which makes the result independent of how its bytes
arrived.

Header lines that pass end to end are kept as the bytes they came in. What is wanted of a name is looked up by its
spelling in a small cache, since the same few spellings come all the time.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from proxy.errors import BadRequest, GarbledAnswer

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 256
_MAX_SPELLINGS: Final = 1024  # of header names, remembered per parser

# All that may not stand in a head: controls but for the tab, and CR and LF, which only end lines.
_FORBIDDEN: Final = bytes(code for code in (*range(32), 127) if code != 9)
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET_BYTES: Final = bytes(code for code in range(0x21, 0x7F) if code != 0x23)  # no '#': that begins a fragment
_ABSOLUTE: Final = re.compile(rb"(?i:https?)://[^/?]+(/.*|)")
_LENGTH: Final = re.compile(rb"[0-9]{1,15}")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")


# What a header is to the proxy. Plain numbers: an Enum's members cost more to look up than all else done for a line.
PASS: Final = 0
NOTE: Final = 1  # passes, and its value is wanted
TAKE: Final = 2  # its value is wanted; does not pass
LENGTH: Final = 3
CODING: Final = 4
CONNECTION: Final = 5
DROP: Final = 6  # one connection's own, or made anew

# RFC 9110 section 7.6.1, and `Keep-Alive` and `Proxy-Connection` of older peers.
_HOP_BY_HOP: Final = {
    b"connection": CONNECTION,
    b"content-length": LENGTH,
    b"keep-alive": DROP,
    b"proxy-authenticate": DROP,
    b"proxy-authorization": DROP,
    b"proxy-connection": DROP,
    b"te": DROP,
    b"trailer": DROP,
    b"transfer-encoding": CODING,
    b"upgrade": DROP,
}
_REQUEST_USES: Final = {
    **_HOP_BY_HOP,
    b"authorization": NOTE,
    b"expect": TAKE,
    b"host": TAKE,
    b"origin": NOTE,
    b"x-data-parallel-rank": NOTE,
    b"x-priority": NOTE,
    b"x-request-id": TAKE,
}
_ANSWER_USES: Final = {
    **_HOP_BY_HOP,
    b"content-encoding": NOTE,
    b"content-type": NOTE,
    b"x-not-begun": TAKE,
    b"x-request-id": NOTE,
}


class Fields(NamedTuple):
    """The header lines of one message, sorted out."""

    passing: list[bytes]  # whole lines, as they came
    noted: dict[bytes, bytes]  # lower-case name -> value
    content_length: int | None
    is_chunked: bool
    options: list[bytes]  # of `Connection`, lower case


class RequestHead(NamedTuple):
    """One request up to its body."""

    method: bytes
    target: bytes  # path and query, as the client wrote them
    is_http_1_1: bool
    fields: Fields

    @property
    def is_kept_alive(self) -> bool:
        """Whether another request may follow on the connection."""
        options = self.fields.options
        return b"close" not in options if self.is_http_1_1 else b"keep-alive" in options


class AnswerHead(NamedTuple):
    """One answer up to its body."""

    status: int
    line: bytes  # from the status on: b"200 OK"
    is_http_1_1: bool
    fields: Fields

    @property
    def is_kept_alive(self) -> bool:
        """Whether the connection can be used again."""
        options = self.fields.options
        return b"close" not in options if self.is_http_1_1 else b"keep-alive" in options


class HeadParser:
    """Parses heads; one for requests, one for answers, each for a whole process."""

    def __init__(self, uses: dict[bytes, int]) -> None:
        self._uses = uses
        self._spellings: dict[bytes, tuple[int, bytes]] = {}

    @classmethod
    def for_requests(cls, *noted: str) -> HeadParser:
        """`noted` are more headers whose values are wanted."""
        return cls({**_REQUEST_USES, **{name.lower().encode(): NOTE for name in noted}})

    @classmethod
    def for_answers(cls) -> HeadParser:
        """The parser of what replicas send."""
        return cls(_ANSWER_USES)

    def request(self, head: bytes) -> RequestHead:
        """A request's head, without the empty line at its end. Raises BadRequest."""
        lines = _lines(head)
        parts = lines[0].split(b" ")
        if len(parts) != 3:
            raise BadRequest("the request line is malformed")
        method, target, version = parts
        if target.translate(None, _TARGET_BYTES) or not (method == b"POST" or _TOKEN.fullmatch(method)):
            raise BadRequest("the request line is malformed")
        if version not in (b"HTTP/1.1", b"HTTP/1.0"):
            raise BadRequest("the request is not HTTP/1.1")
        if not target.startswith(b"/") and target != b"*":
            absolute = _ABSOLUTE.fullmatch(target)
            if absolute is None:
                raise BadRequest("the request's target is no path")
            target = absolute[1] if absolute[1].startswith(b"/") else b"/" + absolute[1]
        is_http_1_1 = version == b"HTTP/1.1"
        fields = self._fields(lines)
        if is_http_1_1 and b"host" not in fields.noted:
            raise BadRequest("the request has no Host")
        if fields.is_chunked and not is_http_1_1:
            raise BadRequest("HTTP/1.0 has no transfer codings")
        return RequestHead(method, target, is_http_1_1, fields)

    def answer(self, head: bytes) -> AnswerHead:
        """An answer's head, without the empty line at its end. Raises GarbledAnswer."""
        try:
            lines = _lines(head)
            match = _STATUS_LINE.fullmatch(lines[0])
            if match is None:
                raise GarbledAnswer("the replica's answer has no status line")
            return AnswerHead(int(match[2]), lines[0][9:], match[1] == b"1", self._fields(lines))
        except BadRequest as err:
            raise GarbledAnswer(f"the replica's answer is malformed: {err}") from err

    def _fields(self, lines: list[bytes]) -> Fields:
        passing: list[bytes] = []
        noted: dict[bytes, bytes] = {}
        length: int | None = None
        is_chunked = False
        options: list[bytes] = []
        spellings = self._spellings
        for line in lines[1:]:
            spelling, colon, value = line.partition(b":")
            known = spellings.get(spelling)
            use, name = known if known is not None and colon else self._learn(spelling, colon)
            if use == PASS:
                passing.append(line)
            elif use == LENGTH:
                if length is not None:
                    raise BadRequest("Content-Length is there twice")
                length = _length(value)
            elif use <= TAKE:
                if name in noted:
                    raise BadRequest(f"the header {name.decode()} is there twice")
                noted[name] = value.strip(b" \t")
                if use == NOTE:
                    passing.append(line)
            elif use == CODING:
                if is_chunked or value.strip(b" \t").lower() != b"chunked":
                    raise BadRequest("Transfer-Encoding must be 'chunked', once")
                is_chunked = True
            elif use == CONNECTION:
                options += [option.strip(b" \t").lower() for option in value.split(b",")]
        if is_chunked and length is not None:
            raise BadRequest("Content-Length and Transfer-Encoding exclude each other")
        if options:
            passing = _without(passing, options)
        return Fields(passing, noted, length, is_chunked, options)

    def _learn(self, spelling: bytes, colon: bytes) -> tuple[int, bytes]:
        if not colon or not _TOKEN.fullmatch(spelling):
            raise BadRequest("a header line is malformed")
        name = spelling.lower()
        found = (self._uses.get(name, PASS), name)
        if len(self._spellings) < _MAX_SPELLINGS:
            self._spellings[spelling] = found
        return found


def _lines(head: bytes) -> list[bytes]:
    """Raises BadRequest if anything but CRLF ends a line, or a control character stands in one."""
    lines = head.split(b"\r\n")
    if len(head.translate(None, _FORBIDDEN)) + 2 * len(lines) - 2 != len(head):
        raise BadRequest("a control character or a bare line end stands in the head")
    if len(lines) > MAX_HEADERS:
        raise BadRequest(f"there are {len(lines) - 1} headers, limit is {MAX_HEADERS - 1}")
    return lines


def _length(value: bytes) -> int:
    value = value.strip(b" \t")
    if not _LENGTH.fullmatch(value):
        raise BadRequest("Content-Length is no number of bytes")
    return int(value)


def _without(lines: list[bytes], names: list[bytes]) -> list[bytes]:
    """The lines but those of headers that `Connection` names: they end here."""
    return [line for line in lines if line.partition(b":")[0].lower() not in names]
