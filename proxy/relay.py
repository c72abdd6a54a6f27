"""One request to one replica, and the bytes of its answer back to the client.

Headers pass end to end but for those that belong to one connection; bodies pass as bytes, and an answer goes out chunk
by chunk as it comes in. An answer has these ends:

    whole                                  the client's answer ends as the replica's did
    the replica refuses the connection     ConnectFailed: nothing was sent, so the caller may try another replica
    it fails before the first body byte    UpstreamFailed (502) or UpstreamTimeout (504): it may have done the work
    it fails later, in an event stream     every byte that came, then an error event in OpenAI's form, then the end;
                                           never a `[DONE]` that the replica did not send
    it fails later, otherwise              the client's connection is aborted, so that half an answer never looks whole
    the client leaves, at any time         the handler is cancelled, and with it the connection to the replica closes
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from proxy.config import ProxyConfig
from proxy.errors import ConnectFailed, UpstreamFailed, UpstreamTimeout
from proxy.metrics import Metrics
from proxy.protocol import REQUEST_ID_HEADER
from proxy.registry import Replica

logger = logging.getLogger(__name__)

# RFC 9110 section 7.6.1, and `Keep-Alive` and `Proxy-Connection` of older clients. They describe one connection.
HOP_BY_HOP: Final = frozenset(
    {
        "connection",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
# Answered by this proxy, or made anew for the replica's connection.
NOT_FORWARDED: Final = HOP_BY_HOP | {"host", "content-length", "expect", "authorization", "x-request-id"}

# Below uvicorn's 5 s, the shortest of the servers met: a connection that is about to be closed is not used again.
IDLE_CONNECTION_S: Final = 4.0
READ_BUFFER_BYTES: Final = 64 * 1024  # a slow reader holds at most twice this of its answer here
MAX_HEADER_BYTES: Final = 64 * 1024  # of one header field
EVENT_STREAM: Final = "text/event-stream"
EVENT_ENDS: Final = (b"\n\n", b"\r\n\r\n", b"\r\r")


def client_session(config: ProxyConfig) -> aiohttp.ClientSession:
    """The connections to all replicas. aiohttp's own limits are off; the relay sets a deadline for each phase."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=IDLE_CONNECTION_S),
        timeout=aiohttp.ClientTimeout(total=None, connect=config.connect_timeout_s, sock_read=None),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        trust_env=False,
        read_bufsize=READ_BUFFER_BYTES,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """The way to the replicas: what every request through it shares."""

    session: aiohttp.ClientSession
    config: ProxyConfig
    metrics: Metrics

    async def forward(self, request: web.Request, body: bytes, replica: Replica, request_id: str) -> web.StreamResponse:
        """Sends the request to the replica and its answer to the client; returns the answer, which has been sent.

        Raises ConnectFailed, UpstreamFailed or UpstreamTimeout, all before anything was sent to the client.
        """
        started_s = asyncio.get_running_loop().time()
        upstream = await self._send(request, body, replica, request_id, started_s)
        answer = web.StreamResponse(
            status=upstream.status, reason=upstream.reason, headers=_answer_headers(upstream, request_id)
        )
        try:
            await self._pump(request, upstream, answer, started_s)
        except ConnectionError as err:
            # Only writing to the client raises this: `_read` translates what reading from the replica raises.
            logger.debug("client left request_id=%s err=%r", request_id, err)
        finally:
            upstream.close()  # does nothing to a connection whose answer was read to its end
        return answer

    async def _send(
        self, request: web.Request, body: bytes, replica: Replica, request_id: str, started_s: float
    ) -> aiohttp.ClientResponse:
        """The replica's answer up to the end of its head."""
        url = URL(replica.url + _target(request), encoded=True)
        try:
            async with asyncio.timeout_at(started_s + self.config.first_byte_timeout_s):
                return await self.session.post(
                    url,
                    data=io.BytesIO(body),  # aiohttp would write bytes in one piece, however large
                    headers=_request_headers(request, request_id),
                    allow_redirects=False,
                )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as err:
            raise ConnectFailed(f"no connection to {replica.url}: {err}") from err
        except TimeoutError as err:
            raise UpstreamTimeout("the replica did not begin its answer in time") from err
        except (aiohttp.ClientError, OSError) as err:
            raise UpstreamFailed("the replica broke off before its answer began") from err

    async def _pump(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        answer: web.StreamResponse,
        started_s: float,
    ) -> None:
        """The answer, chunk by chunk. Raises UpstreamFailed or UpstreamTimeout if not even its head went out."""
        loop = asyncio.get_running_loop()
        if upstream.content_type == EVENT_STREAM:
            await answer.prepare(request)  # an event stream's head does not wait for its first event
        deadline_s = started_s + self.config.first_byte_timeout_s
        chunk = b""
        while True:
            try:
                chunk, sent = await _read(upstream, deadline_s), chunk
            except (UpstreamFailed, UpstreamTimeout) as err:
                if not answer.prepared:
                    raise
                await self._end_cut(request, upstream, answer, err, chunk)
                return
            if not answer.prepared:
                await answer.prepare(request)
            if not chunk:
                await self._to_client(request, answer.write_eof())
                return
            await self._to_client(request, answer.write(chunk))
            if not sent:
                self.metrics.first_byte_s.observe(loop.time() - started_s)
            deadline_s = loop.time() + self.config.between_bytes_timeout_s

    async def _end_cut(
        self,
        request: web.Request,
        upstream: aiohttp.ClientResponse,
        answer: web.StreamResponse,
        err: UpstreamFailed | UpstreamTimeout,
        sent: bytes,
    ) -> None:
        """Ends an answer that has begun and cannot be finished; `sent` is the last of what the client has."""
        self.metrics.upstream_failures.labels("cut").inc()
        logger.warning("answer cut request_id=%s reason=%r", answer.headers[REQUEST_ID_HEADER], str(err))
        # aiohttp's reader keeps what came before the failure, but its public methods only raise from then on.
        rest = upstream.content._read_nowait(-1)
        if rest:
            await self._to_client(request, answer.write(rest))
        is_plain = "Content-Encoding" not in answer.headers and answer.content_length is None
        if not (upstream.content_type == EVENT_STREAM and is_plain):
            abort(request)
            return
        last = rest or sent
        gap = b"" if not last or last.endswith(EVENT_ENDS) else b"\n\n"  # half an event must not swallow the error
        await self._to_client(request, answer.write(gap + b"data: " + json.dumps(err.body()).encode() + b"\n\n"))
        # A whole HTTP answer on a connection that stays usable: a client's reader may drop what it has not yet handed
        # out when a connection breaks, and a pool may send its next request into a close that no header announced.
        await self._to_client(request, answer.write_eof())

    async def _to_client(self, request: web.Request, sending: Awaitable[None]) -> None:
        """Sends to the client. Raises ConnectionError if it left, or read nothing for too long."""
        try:
            async with asyncio.timeout(self.config.client_timeout_s):
                await sending
        except TimeoutError as err:
            abort(request)
            raise ConnectionAbortedError(f"client read nothing for {self.config.client_timeout_s:g} s") from err


RELAY: Final = web.AppKey("relay", Relay)


async def _read(upstream: aiohttp.ClientResponse, deadline_s: float) -> bytes:
    """The next bytes, never of more than one HTTP chunk; empty at the end. Raises UpstreamFailed, UpstreamTimeout."""
    try:
        async with asyncio.timeout_at(deadline_s):
            while True:
                data, is_chunk_end = await upstream.content.readchunk()
                if data or not is_chunk_end:  # (b"", True) marks the end of a chunk whose bytes were handed out before
                    return data
    except TimeoutError as err:
        raise UpstreamTimeout("the replica went silent in its answer") from err
    except (aiohttp.ClientError, OSError) as err:
        raise UpstreamFailed("the replica broke off in its answer") from err


def _target(request: web.Request) -> str:
    """The path and query as the client wrote them; of a whole URL, which is legal there too, only these."""
    return request.raw_path if request.raw_path.startswith("/") else request.rel_url.raw_path_qs


def _request_headers(request: web.Request, request_id: str) -> CIMultiDict[str]:
    """What the replica gets: end-to-end headers, at most one Authorization, and the request's id."""
    headers = _end_to_end(request.headers, NOT_FORWARDED)
    authorization = request.headers.get("Authorization")  # the first, the one that this proxy has checked
    if authorization is not None:
        headers["Authorization"] = authorization
    headers[REQUEST_ID_HEADER] = request_id
    return headers


def _answer_headers(upstream: aiohttp.ClientResponse, request_id: str) -> CIMultiDict[str]:
    """What the client gets: end-to-end headers, the length if the replica gave one, and the request's id."""
    headers = _end_to_end(upstream.headers, HOP_BY_HOP)
    headers.setdefault(REQUEST_ID_HEADER, request_id)
    return headers


def _end_to_end(headers: Mapping[str, str], dropped: frozenset[str]) -> CIMultiDict[str]:
    """The headers without `dropped` and those that `Connection` names, repeated ones repeated."""
    named = {
        name.strip().lower()
        for key, value in headers.items()
        if key.lower() == "connection"
        for name in value.split(",")
    }
    kept = ((key, value) for key, value in headers.items() if key.lower() not in dropped and key.lower() not in named)
    return CIMultiDict(kept)


def abort(request: web.Request) -> None:
    """Resets the client's connection, so that it cannot take half an answer for a whole one."""
    if request.transport is not None:
        request.transport.abort()
