"""Bytes in and out of one HTTP exchange: bodies with bounds and deadlines, event streams, errors in OpenAI's shape."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final

from aiohttp import ClientError, web
from aiohttp.http import HttpProcessingError

from proxy.protocol import INTERRUPTED_HEADER, NOT_BEGUN_HEADER
from replica.api.answers import Event
from replica.errors import BadRequest, BodyTooLarge, ClientTooSlow, Interrupted, RequestError, Unavailable

logger = logging.getLogger(__name__)

MIB: Final = 2**20
RETRY_AFTER_S: Final = 1


class HttpServerLog(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log of its connections. Each malformed request would give it a traceback, and anybody can send one."""

    def __init__(self) -> None:
        super().__init__(logger)

    def exception(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Called by aiohttp for whatever goes wrong with a connection."""
        err = kwargs.get("exc_info")
        if isinstance(err, HttpProcessingError):
            self.debug("malformed request refused reason=%.200r", err.message)
        else:
            super().exception(msg, *args, **kwargs)


async def read_body(request: web.Request, *, max_bytes: int, timeout_s: float) -> bytes:
    """The whole body, unpacked if it was compressed. Raises BodyTooLarge, ClientTooSlow, BadRequest."""
    pieces: list[bytes] = []
    num_bytes = request.content_length or 0
    if num_bytes <= max_bytes:
        num_bytes = 0
        while piece := await _read_piece(request, timeout_s):
            pieces.append(piece)
            num_bytes += len(piece)
            if num_bytes > max_bytes:
                break
        else:
            return b"".join(pieces)
    raise BodyTooLarge(f"the body has {num_bytes} bytes or more, limit is {max_bytes} (--max-body-mb)")


async def _read_piece(request: web.Request, timeout_s: float) -> bytes:
    try:
        async with asyncio.timeout(timeout_s):
            return await request.content.readany()
    except TimeoutError as err:
        raise ClientTooSlow(f"nothing of the body came for {timeout_s:g} s (--client-timeout-s)") from err
    except (ClientError, web.RequestPayloadError) as err:  # wrongly chunked or compressed
        raise BadRequest(f"the body cannot be read: {err}") from err


def error_response(err: RequestError, body: dict[str, Any]) -> web.Response:
    """The answer to a request that failed before anything was sent."""
    response = web.json_response(body, status=err.status)
    if isinstance(err, Unavailable):
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
        response.headers[INTERRUPTED_HEADER if isinstance(err, Interrupted) else NOT_BEGUN_HEADER] = "1"
    return response


def http_error(err: web.HTTPException) -> web.Response:
    """aiohttp's own errors, such as for a route that is not there, as OpenAI's clients expect errors."""
    kind = "invalid_request_error" if err.status < 500 else "server_error"
    body: dict[str, Any] = {"error": {"message": err.reason, "type": kind, "param": None, "code": None}}
    response = web.json_response(body, status=err.status)
    if "Allow" in err.headers:
        response.headers["Allow"] = err.headers["Allow"]
    return response


class EventStream:
    """Server-sent events. The headers go with the first event, so until then an error can still have its status."""

    def __init__(self, request: web.Request, *, timeout_s: float) -> None:
        self._request = request
        self._timeout_s = timeout_s
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # nginx would gather events
            }
        )

    @property
    def is_begun(self) -> bool:
        """Whether the status and the headers are decided."""
        return self.response.prepared

    async def fail(self, error: Event) -> None:
        """Writes the error as the last event and closes the connection, so that nobody takes the stream for whole."""
        self.response.force_close()
        try:
            await self.send(error)
        except ConnectionError as err:
            logger.debug("error not delivered err=%s", err)  # the client knows that the stream broke off

    async def send(self, event: Event) -> None:
        """Writes one event as one HTTP chunk. Raises ConnectionError if the client is gone or does not read.

        Waits while the client reads slowly: what it does not take stays with the sequence, as tokens.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                name = b"" if event.name is None else b"event: " + event.name.encode() + b"\n"
                await self.response.write(name + b"data: " + event.data.encode() + b"\n\n")
        except TimeoutError as err:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ConnectionResetError(f"the client read nothing for {self._timeout_s:g} s") from err
