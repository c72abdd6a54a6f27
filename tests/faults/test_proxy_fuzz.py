"""The data path fed with broken bytes from both sides: nothing is raised, nothing stays counted, nothing is smuggled.

The connections are real, their transports are not, so a second sees thousands of cases. What goes to a replica is read
again by h11, which knows nothing of this proxy: it must find exactly the one request that was meant. FUZZ_S sets how
many seconds are spent (`make fuzz-proxy`: ten minutes).
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from typing import Any

import h11

from proxy.app import build
from proxy.client import FrontDoor
from proxy.config import ProxyConfig
from proxy.registry import Replica
from proxy.serve import open_resources
from proxy.upstream import Upstream
from tests.protocol.test_proxy_http import ANSWERS, BAD_BODIES, GARBLED, POST, REQUESTS
from tests.unit.test_http1 import MALFORMED

FUZZ_S = float(os.environ.get("FUZZ_S", "10"))
URL = "http://127.0.0.1:9"
MORSELS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"HTTP/1.1",
    b"ffffffff",
    b'"model": "tiny"',
    POST,
]


class DumbTransport:
    """A transport that takes everything and remembers it."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written += data

    def writelines(self, parts: list[bytes]) -> None:
        self.written += b"".join(parts)

    def close(self) -> None:
        self.closed = True

    abort = close

    def write_eof(self) -> None:
        pass

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
    """A proxy with one replica that is always there."""

    def __init__(self) -> None:
        self.passed = 0  # requests that went to the replica
        config = ProxyConfig()
        resources = open_resources(config)
        self.proxy = build(config, resources.keys, resources.access_log)
        self.relay = self.proxy.relay
        self.replica: Replica = self.relay._registry.add_backend(URL, now_s=0.0)
        self.relay._registry.probe_succeeded(self.replica, {"tiny": {"id": "tiny"}}, now_s=0.0)
        self.door = FrontDoor(
            relay=self.relay,
            control_plane=ControlPlane,
            strangers=self.proxy.strangers,
            session_header="X-Session-Id",
            client_timeout_s=60.0,
        )

    async def case(self, request: bytes, answer: bytes, draws: random.Random) -> None:
        """One client's connection from its first byte to its last, and what a replica answers to each request."""
        client, transport = self.door(), DumbTransport()
        client.connection_made(transport)  # type: ignore[arg-type]
        spare = self.spare()
        for read in split(request, draws):
            if transport.closed or not client._transport:
                break
            client.data_received(read)
            while spare._exchange is not None:
                wire = spare._transport
                sent = answer if draws.random() < 0.9 else answer[: draws.randrange(len(answer) + 1)]
                for part in split(sent, draws):
                    if spare._transport is not None and not wire.closed:  # type: ignore[union-attr]
                        spare.data_received(part)
                check_one_request(wire.written)  # type: ignore[union-attr]
                self.passed += 1
                if spare._exchange is not None or draws.random() < 0.3:
                    spare.connection_lost(None if draws.random() < 0.5 else ConnectionResetError())
                await asyncio.sleep(0)
                spare = self.spare()
        client.connection_lost(None)
        self.relay.pool.close_idle(at_all=True)
        assert (self.replica.in_flight, self.replica.in_flight_tokens) == (0, 0)
        assert (self.relay._admission.requests, self.relay._admission.tokens) == (0, 0)
        assert len(self.relay.open_requests) == 0 and not self.door.connections

    def spare(self) -> Upstream:
        """An idle connection to the replica, with nothing written on it."""
        self.relay.pool.close_idle(at_all=True)
        self.replica.breaker.__init__()  # type: ignore[misc]
        self.relay._registry.broke()
        upstream = Upstream(self.relay.pool, URL)
        upstream.connection_made(DumbTransport())  # type: ignore[arg-type]
        self.relay.pool.put_back(upstream)
        return upstream


def check_one_request(written: bytes) -> None:
    """What a replica was sent is one request and nothing behind it, perhaps not all of it."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    reader.receive_data(written)
    found = []
    while True:
        event = reader.next_event()
        if event in (h11.NEED_DATA, h11.PAUSED):
            break
        found.append(type(event))
    assert found.count(h11.Request) == 1 and reader.trailing_data[0] == b"", written


def split(data: bytes, draws: random.Random) -> list[bytes]:
    places = sorted(draws.randrange(len(data) + 1) for _ in range(draws.choice((0, 0, 1, 3))))
    return [part for part in (data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)) if part]


def mutate(data: bytes, draws: random.Random) -> bytes:
    """The bytes with a few things changed."""
    for _ in range(draws.choice((0, 1, 1, 2, 5))):
        at, end = sorted((draws.randrange(len(data) + 1), draws.randrange(len(data) + 1)))
        end = min(end, at + 8)
        change = draws.randrange(5)
        if change == 0:
            data = data[:at] + data[end:]
        elif change == 1:
            data = data[:at] + draws.choice(MORSELS) + data[at:]
        elif change == 2:
            data = data[:at] + draws.randbytes(1) + data[at + 1 :]
        elif change == 3:
            data = data[:at] + data[at:end] * 2 + data[end:]
        else:
            data = data[:at] + draws.choice(MORSELS) + data[end:]
    return data


async def test_broken_bytes_raise_nothing_leave_nothing_and_smuggle_nothing() -> None:
    seed = time.time_ns()
    draws, bed = random.Random(seed), Bed()
    requests = [*REQUESTS.values(), *BAD_BODIES.values(), *(head + b"\r\n\r\n" for head in MALFORMED.values())]
    requests.append(REQUESTS["a length"] * 3)
    requests.append(POST + b"Content-Length: 1300000\r\n\r\n" + b"x" * 1_300_000)
    answers = [raw for raw, _ in ANSWERS.values() if len(raw) < 10_000] + [*GARBLED.values()]
    cases, end_s = 0, time.monotonic() + FUZZ_S
    while time.monotonic() < end_s:
        request = draws.choice(requests if cases % 500 == 0 else requests[:-1])
        request, answer = mutate(request, draws), mutate(draws.choice(answers), draws)
        try:
            await bed.case(request, answer, draws)
        except BaseException:
            print(f"seed={seed} case={cases} request={request[:2000]!r} answer={answer[:2000]!r}")
            raise
        cases += 1
    print(f"cases={cases} passed={bed.passed} seconds={FUZZ_S:g}")
    assert cases > 20 * FUZZ_S and bed.passed > cases / 20
