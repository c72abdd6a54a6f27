"""The bytes of the heads and errors that clients get."""

from __future__ import annotations

import json
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from proxy.errors import RequestError
from proxy.framing import LAST_CHUNK, chunk
from proxy.http1 import AnswerHead

EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")
MESSAGES_ROUTE: Final = "/v1/messages"  # Anthropic's; what begins so has errors, and events, in its shapes


def passed_head(head: AnswerHead, request_id: bytes, *, is_chunked: bool, more_lines: Sequence[bytes]) -> bytes:
    """A replica's head for the client: end-to-end headers, the request's id, and this connection's framing."""
    lines = [b"HTTP/1.1 " + head.line, *head.passing]
    if b"x-request-id" not in head.noted:
        lines.append(b"X-Request-Id: " + request_id)
    if head.content_length is not None:
        lines.append(b"Content-Length: %d" % head.content_length)
    elif is_chunked:
        lines.append(b"Transfer-Encoding: chunked")
    lines.extend(more_lines)
    lines.append(b"\r\n")
    return b"\r\n".join(lines)


def error_answer(err: RequestError, route: str, request_id: bytes, more_lines: Sequence[bytes]) -> bytes:
    """An error as a whole answer, in the shape of the route's API."""
    body = _error_json(err, route)
    lines = [
        b"HTTP/1.1 %d %b" % (err.status, HTTPStatus(err.status).phrase.encode()),
        b"Content-Type: application/json; charset=utf-8",
        b"Content-Length: %d" % len(body),
        *(f"{name}: {value}".encode() for name, value in err.headers().items()),
        *more_lines,
    ]
    if request_id:
        lines.append(b"X-Request-Id: " + request_id)
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def error_end(err: RequestError, route: str, *, last: bytes, held: bytes, is_chunked: bool) -> bytes:
    """The end of an event stream that cannot be finished: what is held of an event, then the error as one.

    `last` is what the client was sent last, in chunks if `is_chunked`. A whole HTTP answer on a connection that stays
    usable: a client's reader may drop what it has not yet handed out when a connection breaks, and a pool may send its
    next request into a close that no header announced.
    """
    said = held or (last.removesuffix(b"\r\n") if is_chunked else last)
    parts = [held] if held else []
    if said and not said.endswith(EVENT_ENDS):
        parts.append(b"\n\n")  # half an event must not swallow the error
    kind = b"event: error\n" if route.startswith(MESSAGES_ROUTE) else b""
    parts.append(kind + b"data: " + _error_json(err, route) + b"\n\n")
    return b"".join([*map(chunk, parts), LAST_CHUNK] if is_chunked else parts)


def _error_json(err: RequestError, route: str) -> bytes:
    body = err.anthropic_body() if route.startswith(MESSAGES_ROUTE) else err.body()
    return json.dumps(body).encode()
