"""The heads of HTTP/1.1 messages: strict where two readers could disagree, and byte for byte where they cannot.

A proxy and the server behind it must see the same requests in the same bytes. So nothing is repaired: a repeated or
odd length, a length beside a transfer coding, a folded line, a space before a colon, a bare LF or CR, a control
character are errors. A head is parsed when it is there as a whole, which makes the result independent of how its bytes
arrived.

Header lines that pass end to end are kept as the bytes they came in. The same few lines come all the time, so what a
first line, a line of the `_REPEATING` headers or a name's spelling was found to be is remembered, in bounded tables.
"""

from __future__ import annotations

import re
from typing import Any, Final

from proxy.errors import BadRequest, GarbledAnswer

MAX_HEAD_BYTES: Final = 64 * 1024
MAX_HEADERS: Final = 256
_MAX_REMEMBERED: Final = 1024  # entries of each table of a parser
_MAX_LINE_BYTES: Final = 128  # of a line that is remembered

# All that may not stand in a head: controls but for the tab, and CR and LF, which only end lines.
_FORBIDDEN: Final = bytes(code for code in (*range(32), 127) if code != 9)
_TOKEN: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET_BYTES: Final = bytes(code for code in range(0x21, 0x7F) if code != 0x23)  # no '#': that begins a fragment
_ABSOLUTE: Final = re.compile(rb"(?i:https?)://[^/?]+(/.*|)")
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9]{2})(?: .*)?")
_MAX_LENGTH_DIGITS: Final = 15


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
    b"x-api-key": NOTE,
    b"x-data-parallel-rank": NOTE,
    b"x-priority": NOTE,
    b"x-request-id": TAKE,
}
_ANSWER_USES: Final = {
    **_HOP_BY_HOP,
    b"content-encoding": NOTE,
    b"content-type": NOTE,
    b"x-interrupted": TAKE,
    b"x-not-begun": TAKE,
    b"x-request-id": NOTE,
}
# Headers whose lines hold no secret and are the same in message after message.
_REPEATING: Final = re.compile(
    rb"accept(?:-encoding|-language)?|cache-control|connection|content-type|host|server|user-agent|x-accel-buffering"
    rb"|x-stainless-[a-z-]+"
)
_OF_THIS_CONNECTION: Final = frozenset((b"close", b"keep-alive", b""))  # options of `Connection` that name no header


class Head:
    """One message up to its body."""

    __slots__ = ("content_length", "is_chunked", "is_http_1_1", "is_kept_alive", "noted", "passing")

    def _begin(self, is_http_1_1: bool) -> None:
        self.is_http_1_1 = is_http_1_1
        self.is_kept_alive = is_http_1_1  # whether another message may follow on the connection
        self.passing: list[bytes] = []  # whole header lines, as they came
        self.noted: dict[bytes, bytes] = {}  # lower-case name -> value
        self.content_length: int | None = None
        self.is_chunked = False


class RequestHead(Head):
    """A request's."""

    __slots__ = ("method", "target")

    def __init__(self, method: bytes, target: bytes, is_http_1_1: bool) -> None:
        self._begin(is_http_1_1)
        self.method = method
        self.target = target  # path and query, as the client wrote them


class AnswerHead(Head):
    """An answer's."""

    __slots__ = ("line", "status")

    def __init__(self, status: int, line: bytes, is_http_1_1: bool) -> None:
        self._begin(is_http_1_1)
        self.status = status
        self.line = line  # from the status on: b"200 OK"


class HeadParser:
    """Parses heads; one for requests, one for answers, each for a whole process."""

    def __init__(self, uses: dict[bytes, int]) -> None:
        self._uses = uses
        # of a name -> what it is for, the name, whether its lines are remembered
        self._spellings: dict[bytes, tuple[int, bytes, bool]] = {}
        self._lines: dict[bytes, tuple[int, bytes, bytes]] = {}  # header line -> what it is for, its name and value
        self._request_lines: dict[bytes, tuple[bytes, bytes, bool]] = {}
        self._status_lines: dict[bytes, tuple[int, bytes, bool]] = {}

    @classmethod
    def for_requests(cls, *noted: str) -> HeadParser:
        """`noted` are more headers whose values are wanted."""
        return cls({**_REQUEST_USES, **{name.lower().encode(): NOTE for name in noted}})

    @classmethod
    def for_answers(cls) -> HeadParser:
        """The parser of what replicas send."""
        return cls(_ANSWER_USES)

    def request(self, data: bytes) -> RequestHead:
        """A request's head, without the empty line at its end. Raises BadRequest."""
        lines = _lines(data)
        first = self._request_lines.get(lines[0])
        if first is None:
            first = _request_line(lines[0])
            if b"?" not in lines[0]:
                _remember(self._request_lines, lines[0], first)
        head = RequestHead(*first)
        self._read_fields(head, lines)
        if head.is_http_1_1 and b"host" not in head.noted:
            raise BadRequest("the request has no Host")
        if head.is_chunked and not head.is_http_1_1:
            raise BadRequest("HTTP/1.0 has no transfer codings")
        return head

    def answer(self, data: bytes) -> AnswerHead:
        """An answer's head, without the empty line at its end. Raises GarbledAnswer."""
        try:
            lines = _lines(data)
            first = self._status_lines.get(lines[0])
            if first is None:
                first = _status_line(lines[0])
                _remember(self._status_lines, lines[0], first)
            head = AnswerHead(*first)
            self._read_fields(head, lines)
        except BadRequest as err:
            raise GarbledAnswer(f"the replica's answer is malformed: {err}") from err
        return head

    def _read_fields(self, head: Head, lines: list[bytes]) -> None:
        passing, noted, remembered = head.passing, head.noted, self._lines
        options: list[bytes] | None = None
        for line in lines[1:]:
            use, name, value = remembered.get(line) or self._read_line(line)
            if use == PASS:
                passing.append(line)
            elif use == LENGTH:
                if head.content_length is not None:
                    raise BadRequest("Content-Length is there twice")
                head.content_length = _length(value)
            elif use <= TAKE:
                if name in noted:
                    raise BadRequest(f"the header {name.decode()} is there twice")
                noted[name] = value
                if use == NOTE:
                    passing.append(line)
            elif use == CODING:
                if head.is_chunked or value.lower() != b"chunked":
                    raise BadRequest("Transfer-Encoding must be 'chunked', once")
                head.is_chunked = True
            elif use == CONNECTION:
                options = (options or []) + [option.strip(b" \t").lower() for option in value.split(b",")]
        if head.is_chunked and head.content_length is not None:
            raise BadRequest("Content-Length and Transfer-Encoding exclude each other")
        if options:
            head.is_kept_alive = b"close" not in options if head.is_http_1_1 else b"keep-alive" in options
            if not _OF_THIS_CONNECTION.issuperset(options):
                head.passing = _without(passing, options)

    def _read_line(self, line: bytes) -> tuple[int, bytes, bytes]:
        """What a header line is for, its name in lower case, and its value."""
        spelling, colon, value = line.partition(b":")
        known = self._spellings.get(spelling) if colon else None
        if known is None:
            if not colon or not _TOKEN.fullmatch(spelling):
                raise BadRequest("a header line is malformed")
            name = spelling.lower()
            known = (self._uses.get(name, PASS), name, _REPEATING.fullmatch(name) is not None)
            _remember(self._spellings, spelling, known)
        use, name, is_repeating = known
        read = (use, name, value.strip(b" \t"))
        if is_repeating:
            _remember(self._lines, line, read)
        return read


def _remember(table: dict[bytes, Any], line: bytes, read: Any) -> None:
    if len(table) < _MAX_REMEMBERED and len(line) <= _MAX_LINE_BYTES:
        table[line] = read


def _request_line(line: bytes) -> tuple[bytes, bytes, bool]:
    """Method, target, and whether it is HTTP/1.1 rather than 1.0. Raises BadRequest."""
    parts = line.split(b" ")
    if len(parts) != 3:
        raise BadRequest("the request line is malformed")
    method, target, version = parts
    if target.translate(None, _TARGET_BYTES) or not _TOKEN.fullmatch(method):
        raise BadRequest("the request line is malformed")
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise BadRequest("the request is not HTTP/1.1")
    if not target.startswith(b"/") and target != b"*":
        absolute = _ABSOLUTE.fullmatch(target)
        if absolute is None:
            raise BadRequest("the request's target is no path")
        target = absolute[1] if absolute[1].startswith(b"/") else b"/" + absolute[1]
    return method, target, version == b"HTTP/1.1"


def _status_line(line: bytes) -> tuple[int, bytes, bool]:
    """Status, all from it on, and whether it is HTTP/1.1 rather than 1.0. Raises BadRequest."""
    match = _STATUS_LINE.fullmatch(line)
    if match is None:
        raise BadRequest("it has no status line")
    return int(match[2]), line[9:], match[1] == b"1"


def _lines(head: bytes) -> list[bytes]:
    """Raises BadRequest if anything but CRLF ends a line, or a control character stands in one."""
    lines = head.split(b"\r\n")
    if len(head.translate(None, _FORBIDDEN)) + 2 * len(lines) - 2 != len(head):
        raise BadRequest("a control character or a bare line end stands in the head")
    if len(lines) > MAX_HEADERS:
        raise BadRequest(f"there are {len(lines) - 1} headers, limit is {MAX_HEADERS - 1}")
    return lines


def _length(value: bytes) -> int:
    if not value.isdigit() or len(value) > _MAX_LENGTH_DIGITS:
        raise BadRequest("Content-Length is no number of bytes")
    return int(value)


def _without(lines: list[bytes], names: list[bytes]) -> list[bytes]:
    """The lines but those of headers that `Connection` names: they end here."""
    return [line for line in lines if line.partition(b":")[0].lower() not in names]
