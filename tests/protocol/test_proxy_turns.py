"""What is new goes before events of streams that flow already; and nothing of a stream is lost or overtaken by that."""

from __future__ import annotations

import asyncio
import random
import socket
from urllib.parse import urlsplit

import pytest

from proxy.client import ClientConnection
from proxy.turns import FEWEST, PART
from tests.http_answers import EVENT_CHUNKS
from tests.http_requests import POST
from tests.protocol.proxy_fakes import RunningProxy, hello, joined, raw_replica, running_proxy
from tests.protocol.proxy_process import proxy, proxy_url
from tests.proxy_bed import Bed, DumbTransport

__all__ = ["proxy", "proxy_url"]

REQUEST = POST + b"Content-Length: 2\r\n\r\n{}"
END = b"0\r\n\r\n"
EVENT_BYTES = 16_384  # far more of them than a small socket buffer takes at once
EVENTS = 32
CLIENTS = 8
SMALL_BUFFER_BYTES = 4096


def event(number: int, filling: bytes = b"") -> bytes:
    data = b"data: %d %b\n\n" % (number, filling)
    return b"%x\r\n%b\r\n" % (len(data), data)


class Stream:
    """A client that was sent the head and the first event of an answer, which goes on."""

    def __init__(self, bed: Bed) -> None:
        self.upstream, _ = bed.spare()
        self.client, self.got = bed.client()
        self.client.data_received(REQUEST)
        self.upstream.data_received(EVENT_CHUNKS + event(0))
        self.head = self.got.written.removesuffix(event(0))

    @property
    def body(self) -> bytes:
        """What the client has of it."""
        return self.got.written.removeprefix(self.head)


async def passes(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


def waiting(bed: Bed) -> int:
    return len(bed.door.turns.waiting)


async def test_a_request_is_sent_before_events_that_were_read_before_it() -> None:
    bed = Bed()
    stream = Stream(bed)
    _, to_replica = bed.spare()
    client, _ = bed.client()
    stream.upstream.data_received(event(1))
    client.data_received(REQUEST)
    assert to_replica.written.endswith(b"\r\n\r\n{}")
    assert stream.body == event(0)
    await passes(1)
    assert stream.body == event(0) + event(1)


async def test_the_first_bytes_of_an_answer_go_before_events_that_were_read_before_them() -> None:
    bed = Bed()
    stream = Stream(bed)
    stream.upstream.data_received(event(1))
    new = Stream(bed)
    assert new.body == event(0)
    assert stream.body == event(0)


async def test_the_end_of_an_answer_does_not_wait_and_comes_after_what_does() -> None:
    bed = Bed()
    stream = Stream(bed)
    stream.upstream.data_received(event(1))
    stream.upstream.data_received(event(2) + END)
    assert stream.body == event(0) + event(1) + event(2) + END
    stream.client.data_received(REQUEST)
    await passes(2)
    assert stream.body == event(0) + event(1) + event(2) + END


async def test_an_end_alone_comes_after_the_event_that_waits() -> None:
    stream = Stream(Bed())
    stream.upstream.data_received(event(1))
    stream.upstream.data_received(END)
    assert stream.body == event(0) + event(1) + END


async def test_half_an_event_comes_after_the_one_that_waits() -> None:
    stream = Stream(Bed())
    stream.upstream.data_received(event(1))
    stream.upstream.data_received(event(2) + event(3)[:-4])
    stream.upstream.data_received(event(3)[-4:])
    await passes(2)
    assert stream.body == event(0) + event(1) + event(2) + event(3)


async def test_an_event_that_waits_is_delivered_before_a_cut() -> None:
    stream = Stream(Bed())
    stream.upstream.data_received(event(1))
    stream.upstream.connection_lost(ConnectionResetError())
    assert stream.body.startswith(event(0) + event(1))
    assert b"server_error" in stream.body and stream.body.endswith(END)


@pytest.mark.parametrize("close", [ClientConnection.close, lambda client: client._exchange.stop()])
async def test_an_event_that_waits_is_delivered_before_the_connection_closes(close) -> None:  # type: ignore[no-untyped-def]
    stream = Stream(Bed())
    stream.upstream.data_received(event(1))
    close(stream.client)
    assert stream.got.closed
    assert stream.body == event(0) + event(1)


async def test_an_event_waits_for_nobody_who_has_left() -> None:
    bed = Bed()
    gone, stays = Stream(bed), Stream(bed)
    for stream in (gone, stays):
        stream.upstream.data_received(event(1))
    gone.client.connection_lost(None)
    await passes(1)
    assert gone.body == event(0)
    assert stays.body == event(0) + event(1)


async def test_many_streams_are_written_to_a_few_at_a_time_in_the_order_of_their_events() -> None:
    bed = Bed()
    streams = [Stream(bed) for _ in range(10 * FEWEST)]
    for stream in streams:
        stream.upstream.data_received(event(1))
    written = []
    while waiting(bed):
        await passes(1)
        served = [stream.body == event(0) + event(1) for stream in streams]
        assert served == sorted(served, reverse=True), "the first to come is the first to be written to"
        written.append(sum(served) - sum(written))
    assert written[0] == len(streams) // PART, "more where many come at once"
    assert set(written[1:-1]) == {FEWEST}
    assert sum(written) == len(streams)


async def test_reads_that_never_pause_let_nothing_pile_up() -> None:
    bed = Bed()
    streams = [Stream(bed) for _ in range(8 * FEWEST)]
    sent = b""
    for number in range(1, 50):
        sent += event(number)
        for stream in streams:
            stream.upstream.data_received(event(number))
            behind = len(event(0) + sent) - len(stream.body)
            assert behind in (0, len(event(number))), "one read waits, never two"
        assert waiting(bed) <= len(streams)
        await passes(1)
    while waiting(bed):
        await passes(1)
    assert all(stream.body == event(0) + sent for stream in streams)


async def test_streams_that_never_pause_do_not_keep_events_of_others_waiting() -> None:
    bed = Bed()
    seldom, busy = ([Stream(bed) for _ in range(20 * FEWEST)] for _ in range(2))
    for stream in seldom:
        stream.upstream.data_received(event(1))
    number = 0
    while not all(stream.body == event(0) + event(1) for stream in seldom):
        number += 1
        for stream in busy:
            stream.upstream.data_received(event(number))
        await passes(1)
    assert number <= 2 * PART


class Stubborn(DumbTransport):
    """A transport that a bug makes fail."""

    def write(self, data: bytes) -> None:
        raise RuntimeError("a bug")


async def test_a_client_whose_turn_fails_costs_the_others_nothing() -> None:
    bed = Bed()
    streams = [Stream(bed) for _ in range(3)]
    streams[0].client._send = Stubborn().write
    failures: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(str(context["exception"])))
    for stream in streams:
        stream.upstream.data_received(event(1))
    await passes(3)
    assert failures == ["a bug"]
    assert [stream.body for stream in streams[1:]] == [event(0) + event(1)] * 2


async def read_slowly(address: tuple[str, int], draws: random.Random) -> bytes:
    """A whole answer, read in small bites through a small buffer."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BUFFER_BYTES)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, address)
    await loop.sock_sendall(sock, REQUEST)
    got = bytearray()
    while not got.endswith(END):
        got += await loop.sock_recv(sock, draws.randrange(1, 8 * SMALL_BUFFER_BYTES))
        if draws.random() < 0.1:
            await asyncio.sleep(draws.random() / 200)
    sock.close()
    return bytes(got)


async def check_slow_readers(proxy: RunningProxy) -> None:
    draws = random.Random(7)
    events = [event(number, draws.randbytes(EVENT_BYTES).hex().encode()) for number in range(EVENTS)]

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(EVENT_CHUNKS)
        for each in events:
            writer.write(each)
            await writer.drain()
            await asyncio.sleep(draws.choice((0, 0, 0.002)))
        writer.write(END)
        await writer.drain()

    parts = urlsplit(proxy.url)
    address = (parts.hostname or "", parts.port or 0)
    async with raw_replica(script) as replica, joined(proxy, hello(replica.url, replica_id="only")):
        async with asyncio.timeout(30):
            answers = await asyncio.gather(*(read_slowly(address, random.Random(seed)) for seed in range(CLIENTS)))
    for answer in answers:
        assert answer.partition(b"\r\n\r\n")[2] == b"".join(events) + END


async def test_slow_readers_get_every_byte_in_its_place(proxy: RunningProxy) -> None:
    await check_slow_readers(proxy)


async def test_slow_readers_behind_small_buffers_get_every_byte_in_its_place() -> None:
    async with running_proxy(send_buffer_bytes=SMALL_BUFFER_BYTES) as proxy:
        await check_slow_readers(proxy)
