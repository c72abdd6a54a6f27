"""The proxy's data path without sockets: real connections on transports that only remember, so that a second sees
thousands of cases."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from proxy.app import build
from proxy.breaker import Breaker
from proxy.client import ClientConnection, FrontDoor
from proxy.config import ProxyConfig
from proxy.replicas import Replica
from proxy.serve import open_resources
from proxy.upstream import Upstream

URL = "http://127.0.0.1:9"


class DumbTransport:
    """A transport that takes everything and remembers it."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False
        self.was_reset = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.written += b"".join(parts)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.was_reset = True

    def write_eof(self) -> None:
        self.closed = True

    def can_write_eof(self) -> bool:
        return True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> Any:
        return None

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def set_protocol(self, protocol: Any) -> None:
        pass

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class ControlPlane(asyncio.Protocol):
    """In aiohttp's place."""


class Bed:
    """A proxy with one replica that is always there. Made and used on one event loop."""

    def __init__(self) -> None:
        config = ProxyConfig()
        resources = open_resources(config)
        self.proxy = build(config, resources.keys, resources.access_log)
        self.dispatcher = self.proxy.dispatcher
        self.replica: Replica = self.proxy.registry.add_backend(URL, now_s=0.0)
        self.proxy.registry.probe_succeeded(self.replica, {"tiny": {"id": "tiny"}}, now_s=0.0)
        self.door = FrontDoor(
            dispatcher=self.dispatcher,
            control_plane=ControlPlane,
            strangers=self.proxy.strangers,
            session_header="X-Session-Id",
            client_timeout_s=60.0,
        )

    def client(self) -> tuple[ClientConnection, DumbTransport]:
        """A client's connection."""
        client, transport = self.door(), DumbTransport()
        client.connection_made(transport)  # type: ignore[arg-type]
        return client, transport

    def spare(self) -> tuple[Upstream, DumbTransport]:
        """An idle connection to the replica, with nothing written on it, which the next request takes."""
        self.dispatcher.pool.close_idle(at_all=True)
        self.replica.breaker = Breaker()
        self.proxy.registry._changed()
        upstream, transport = Upstream(self.dispatcher.pool, URL), DumbTransport()
        upstream.connection_made(transport)  # type: ignore[arg-type]
        self.dispatcher.pool.put_back(upstream)
        return upstream, transport

    def is_answering(self, upstream: Upstream) -> bool:
        """Whether a request is under way on the connection."""
        return upstream._exchange is not None

    def answer(
        self, request: bytes, reads: Iterable[bytes], *, then: Exception | None = None, is_closed: bool = False
    ) -> DumbTransport:
        """What a client got for a request that the replica answered with these reads.

        With `is_closed`, or `then` as the error, the replica's connection ends after them.
        """
        client, got = self.client()
        upstream, _ = self.spare()
        client.data_received(request)
        for read in reads:
            if self.is_answering(upstream):
                upstream.data_received(read)
        if self.is_answering(upstream) and (is_closed or then is not None):
            upstream.connection_lost(then)
        client.connection_lost(None)
        self.dispatcher.pool.close_idle(at_all=True)
        self.check_at_rest()
        return got

    def check_at_rest(self) -> None:
        """Fails if anything of a request that has ended is left."""
        assert (self.replica.in_flight, self.replica.in_flight_tokens, self.replica.load) == (0, 0, 0)
        assert (self.dispatcher._admission.requests, self.dispatcher._admission.tokens) == (0, 0)
        assert len(self.dispatcher.open_requests) == 0 and not self.door.connections
