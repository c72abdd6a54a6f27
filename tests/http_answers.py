"""Answers of replicas: unusual ones, which must arrive whole, and broken ones, of which clients must hear."""

from __future__ import annotations

from typing import NamedTuple

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\n"
EVENT_CHUNKS = EVENTS + b"Transfer-Encoding: chunked\r\n\r\n"
LONG_LINE = b"data: " + b"x" * 300_000 + b"\n\n"


def chunks(*parts: bytes) -> bytes:
    """A body in the chunked coding."""
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def sized(body: bytes) -> bytes:
    """An answer whose body has a length."""
    return OK + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Answer(NamedTuple):
    """What a replica sends, and what it means."""

    raw: bytes
    body: bytes
    ends_with_connection: bool = False  # nothing else says where the body ends

    @property
    def status(self) -> int:
        """Of the final answer."""
        head, _, rest = self.raw.partition(b"\r\n\r\n")
        while head[9:10] == b"1":
            head, _, rest = rest.partition(b"\r\n\r\n")
        return int(head[9:12])

    @property
    def is_event_stream(self) -> bool:
        """Whether an error can be told at its end."""
        return b"text/event-stream" in self.raw.lower()


ANSWERS = {
    "a length": Answer(sized(b"ok"), b"ok"),
    "a length in odd letters and spaces": Answer(OK + b"content-LENGTH:\t 2 \r\n\r\nok", b"ok"),
    "an empty body": Answer(sized(b""), b""),
    "bytes that are no text": Answer(sized(bytes(range(256))), bytes(range(256))),
    "a body of a mebibyte": Answer(sized(b"y" * 2**20), b"y" * 2**20),
    "chunks": Answer(CHUNKED + chunks(b"o", b"k"), b"ok"),
    "one hundred chunks of one byte": Answer(CHUNKED + chunks(*[b"z"] * 100), b"z" * 100),
    "a chunk of a mebibyte": Answer(CHUNKED + chunks(b"y" * 2**20), b"y" * 2**20),
    "a coding in capitals": Answer(OK + b"transfer-encoding: Chunked\r\n\r\n" + chunks(b"ok"), b"ok"),
    "chunk sizes in capitals and with zeros before": Answer(
        CHUNKED + b"000A\r\n0123456789\r\n0b\r\n01234567890\r\n0000\r\n\r\n", b"012345678901234567890"
    ),
    "chunk extensions": Answer(CHUNKED + b'2;a="b"\r\nok\r\n0;x\r\n\r\n', b"ok"),
    "quoted chunk extensions with separators": Answer(CHUNKED + b'2;a="b;c, d";e\r\nok\r\n0\r\n\r\n', b"ok"),
    "chunk extensions of a kilobyte": Answer(CHUNKED + b"2;" + b"e" * 1024 + b"\r\nok\r\n0\r\n\r\n", b"ok"),
    "a trailer": Answer(CHUNKED + b"2\r\nok\r\n0\r\nX-Sum: 1\r\n\r\n", b"ok"),
    "ten trailers": Answer(CHUNKED + b"2\r\nok\r\n0\r\n" + b"X-Sum: 1\r\n" * 10 + b"\r\n", b"ok"),
    "no chunk": Answer(CHUNKED + b"0\r\n\r\n", b""),
    "no length": Answer(OK + b"\r\nok", b"ok", True),
    "no length and no body": Answer(OK + b"\r\n", b"", True),
    "no length in HTTP/1.0": Answer(b"HTTP/1.0 200 OK\r\n\r\nok", b"ok", True),
    "a length in HTTP/1.0": Answer(b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "a kept connection in HTTP/1.0": Answer(
        b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok", b"ok"
    ),
    "no length, though it would keep the connection": Answer(OK + b"Connection: keep-alive\r\n\r\nok", b"ok", True),
    "a 204": Answer(b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "a 204 with a type": Answer(b"HTTP/1.1 204 No Content\r\nContent-Type: text/plain\r\n\r\n", b""),
    "a 204 with a length of 0": Answer(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n", b""),
    "a 304": Answer(b"HTTP/1.1 304 Not Modified\r\nETag: x\r\n\r\n", b""),
    "a 304 with the length that a 200 would have": Answer(
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n", b""
    ),
    "a 304 with a coding": Answer(b"HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n", b""),
    "a 100 before": Answer(b"HTTP/1.1 100 Continue\r\n\r\n" + sized(b"ok"), b"ok"),
    "a 100 with headers before": Answer(b"HTTP/1.1 100 Continue\r\nX-A: 1\r\n\r\n" + sized(b"ok"), b"ok"),
    "a 102 before": Answer(b"HTTP/1.1 102 Processing\r\n\r\n" + sized(b"ok"), b"ok"),
    "hints before": Answer(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * 3 + sized(b"ok"), b"ok"),
    "twenty heads before": Answer(b"HTTP/1.1 100 Continue\r\n\r\n" * 20 + CHUNKED + chunks(b"ok"), b"ok"),
    "no reason": Answer(b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "an empty reason": Answer(b"HTTP/1.1 200 \r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "a reason beyond ASCII": Answer(b"HTTP/1.1 200 sch\xf6n\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "a status that nobody knows": Answer(b"HTTP/1.1 299 Odd\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "the highest status": Answer(b"HTTP/1.1 999 Odd\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "an error with a body": Answer(b"HTTP/1.1 500 No\r\nContent-Length: 2\r\n\r\nno", b"no"),
    "an error in chunks": Answer(
        b"HTTP/1.1 429 Slow\r\nRetry-After: 2\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"no"), b"no"
    ),
    "a close": Answer(OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "a header without a value": Answer(OK + b"X-A:\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "a header beyond ASCII": Answer(OK + b"X-A: \xc3\xa4\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "two cookies": Answer(OK + b"Set-Cookie: a=1\r\nSet-Cookie: b=2\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "two hundred headers": Answer(OK + b"X-A: 1\r\n" * 200 + b"Content-Length: 2\r\n\r\nok", b"ok"),
    "a header of thirty kilobytes": Answer(OK + b"X-A: " + b"a" * 30_000 + b"\r\nContent-Length: 2\r\n\r\nok", b"ok"),
    "headers of this connection": Answer(
        OK + b"Connection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\nContent-Length: 2\r\n\r\nok", b"ok"
    ),
    "a body that looks like an answer": Answer(
        sized(OK + b"Content-Length: 0\r\n\r\n"), OK + b"Content-Length: 0\r\n\r\n"
    ),
    "events in chunks of their own": Answer(
        EVENT_CHUNKS + chunks(b"data: 1\n\n", b"data: [DONE]\n\n"), b"data: 1\n\ndata: [DONE]\n\n"
    ),
    "two events in one chunk": Answer(EVENT_CHUNKS + chunks(b"data: 1\n\ndata: 2\n\n"), b"data: 1\n\ndata: 2\n\n"),
    "an event in two chunks": Answer(EVENT_CHUNKS + chunks(b"data", b": 1\n\n"), b"data: 1\n\n"),
    "an event in chunks of one byte": Answer(
        EVENT_CHUNKS + chunks(*(b"data: 1\n\n"[at : at + 1] for at in range(9))), b"data: 1\n\n"
    ),
    "events that end with CRLF": Answer(
        EVENT_CHUNKS + chunks(b"data: 1\r\n\r\n", b"data: 2\r\n\r\n"), b"data: 1\r\n\r\ndata: 2\r\n\r\n"
    ),
    "comments and named events": Answer(
        EVENT_CHUNKS + chunks(b": still here\n\n", b"event: a\nid: 1\ndata: 1\n\n"),
        b": still here\n\nevent: a\nid: 1\ndata: 1\n\n",
    ),
    "an event with chunk extensions and a trailer": Answer(
        EVENT_CHUNKS + b"9;a=b\r\ndata: 1\n\n\r\n0\r\nX-Sum: 1\r\n\r\n", b"data: 1\n\n"
    ),
    "a stream without an event": Answer(EVENT_CHUNKS + chunks(), b""),
    "events without chunks": Answer(EVENTS + b"\r\ndata: 1\n\n", b"data: 1\n\n", True),
    "events with a length": Answer(EVENTS + b"Content-Length: 9\r\n\r\ndata: 1\n\n", b"data: 1\n\n"),
    "a stream's type with parameters and in capitals": Answer(
        OK
        + b"Content-Type: Text/Event-Stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks(b"data: 1\n\n"),
        b"data: 1\n\n",
    ),
    "an event line of 300 KB in one chunk": Answer(EVENT_CHUNKS + chunks(LONG_LINE), LONG_LINE),
    "an event line of 300 KB in many chunks": Answer(
        EVENT_CHUNKS + chunks(*(LONG_LINE[at : at + 7001] for at in range(0, len(LONG_LINE), 7001))), LONG_LINE
    ),
    "an event line of 300 KB between short ones": Answer(
        EVENT_CHUNKS + chunks(b"data: 1\n\n", LONG_LINE, b"data: 2\n\n"), b"data: 1\n\n" + LONG_LINE + b"data: 2\n\n"
    ),
    "an event line of 300 KB without chunks": Answer(EVENTS + b"\r\n" + LONG_LINE, LONG_LINE, True),
}

GARBLED = {
    "two lengths that differ": OK + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nok",
    "one length twice": OK + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nok",
    "a list of lengths": OK + b"Content-Length: 2, 2\r\n\r\nok",
    "a negative length": OK + b"Content-Length: -2\r\n\r\nok",
    "a signed length": OK + b"Content-Length: +2\r\n\r\nok",
    "a hexadecimal length": OK + b"Content-Length: 0x2\r\n\r\nok",
    "an empty length": OK + b"Content-Length:\r\n\r\nok",
    "a length beyond all bounds": OK + b"Content-Length: 9999999999999999\r\n\r\nok",
    "a length and a coding": OK + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "a coding and a length": OK + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    "an unknown coding": OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a coding twice": OK + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "an empty coding": OK + b"Transfer-Encoding:\r\n\r\n0\r\n\r\n",
    "a folded line": OK + b"X: 1\r\n 2\r\nContent-Length: 0\r\n\r\n",
    "a folded first line": OK + b" X: 1\r\nContent-Length: 0\r\n\r\n",
    "a bare LF": OK + b"X: 1\nY: 2\r\nContent-Length: 0\r\n\r\n",
    "a bare CR": OK + b"X: 1\rY: 2\r\nContent-Length: 0\r\n\r\n",
    "a NUL": OK + b"X: \x00\r\nContent-Length: 0\r\n\r\n",
    "a control character": OK + b"X: \x1b[2J\r\nContent-Length: 0\r\n\r\n",
    "a space before a colon": OK + b"Content-Length : 2\r\n\r\nok",
    "a line without a colon": OK + b"X\r\nContent-Length: 2\r\n\r\nok",
    "an empty name": OK + b": 1\r\nContent-Length: 2\r\n\r\nok",
    "a name of other letters": OK + b"X-\xc3\xa4: 1\r\nContent-Length: 2\r\n\r\nok",
    "too many headers": OK + b"A: 1\r\n" * 300 + b"\r\n",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/2": b"HTTP/2 200\r\n\r\n",
    "HTTP/1.1 in lower case": b"http/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "a page without a head": b"<html>hello</html>",
    "an old radio": b"ICY 200 OK\r\n\r\n",
    "a TLS greeting": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "a switch of protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    "a switch of protocols after a 100": b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 101 Yes\r\nUpgrade: x\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "a status below all": b"HTTP/1.1 099 No\r\n\r\n",
    "two spaces": b"HTTP/1.1  200 OK\r\n\r\n",
    "a head that never ends": OK + b"X: " + b"y" * 70_000,
    "a chunk size that is none": CHUNKED + b"xyz\r\n",
    "a negative chunk size": CHUNKED + b"-2\r\nok\r\n",
    "a signed chunk size": CHUNKED + b"+2\r\nok\r\n",
    "a chunk size with 0x": CHUNKED + b"0x2\r\nok\r\n",
    "a chunk size with an underscore": CHUNKED + b"1_0\r\nok\r\n",
    "a chunk size beyond all bounds": CHUNKED + b"ffffffffffffffff\r\nok\r\n",
    "an empty chunk size": CHUNKED + b"\r\nok\r\n",
    "a space before a chunk size": CHUNKED + b" 2\r\nok\r\n",
    "a chunk longer than its size": CHUNKED + b"2\r\nokay\r\n0\r\n\r\n",
    "a bare LF after a chunk size": CHUNKED + b"2\nok\r\n0\r\n\r\n",
    "a chunk extension with a NUL": CHUNKED + b"2;\x00\r\nok\r\n0\r\n\r\n",
    "a chunk extension that never ends": CHUNKED + b"2;" + b"e" * 5000,
    "a length in a trailer": CHUNKED + b"2\r\nok\r\n0\r\nContent-Length: 9\r\n\r\n",
    "a coding in a trailer": CHUNKED + b"2\r\nok\r\n0\r\ntransfer-encoding: chunked\r\n\r\n",
    "a trailer that is none": CHUNKED + b"2\r\nok\r\n0\r\nnone\r\n\r\n",
    "an event stream whose first chunk has no size": EVENT_CHUNKS + b"data: 1\n\n",
}
