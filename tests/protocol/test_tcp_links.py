"""Connections of ranks over real sockets: whatever a rank waits for, it can be let go of. The ranks are threads."""

from __future__ import annotations

import os
import random
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Final

import msgpack
import pytest
import torch

from replica.errors import CollectiveFailed
from replica.tcp_links import TcpLinks

TIMEOUT_S: Final = 20.0  # more than any test waits
SOON_S: Final = 2.0  # on a loaded machine
LARGE: Final = bytes(64 << 20)  # more than sockets hold
RELEASED: Final = "told to let go"


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def trio() -> Iterator[list[TcpLinks]]:
    """Three ranks that listen; those that are still in the list are closed."""
    trio = [TcpLinks(rank, {0, 1, 2} - {rank}, host="127.0.0.1", timeout_s=TIMEOUT_S) for rank in range(3)]
    yield trio
    for links in trio:
        links.close()


def blobs_of(trio: list[TcpLinks]) -> dict[int, bytes]:
    return {links.rank: links.blob() for links in trio}


@pytest.fixture
def connected(trio: list[TcpLinks], pool: ThreadPoolExecutor) -> list[TcpLinks]:
    blobs = blobs_of(trio)
    list(pool.map(lambda links: links.connect(blobs, TIMEOUT_S), trio))
    return trio


def views(data: Mapping[int, bytes | bytearray]) -> dict[int, memoryview]:
    return {peer: memoryview(part) for peer, part in data.items()}


def fails(run: Future[None], match: str) -> None:
    """It raises soon."""
    started_s = time.monotonic()
    with pytest.raises(CollectiveFailed, match=match):
        run.result(TIMEOUT_S)
    assert time.monotonic() - started_s < SOON_S


def test_messages_of_all_sizes_arrive_as_they_were_and_none_costs_a_message(
    connected: list[TcpLinks], pool: ThreadPoolExecutor
) -> None:
    draw = random.Random(1)
    for sizes in ([0, 0, 0], [1, 0, 70_000], [3_000_000, 5, 0], [1 << 20] * 3):
        sent = {(a, b): draw.randbytes(sizes[a]) for a in range(3) for b in range(3) if a != b}
        received = {(a, b): bytearray(len(data)) for (a, b), data in sent.items()}

        def exchange(links: TcpLinks, sent: Mapping = sent, received: Mapping = received) -> None:  # type: ignore[type-arg]
            own = links.rank
            links.exchange(
                views({b: data for (a, b), data in sent.items() if a == own}),
                views({a: data for (a, b), data in received.items() if b == own}),
            )

        list(pool.map(exchange, connected))
        assert received == sent


def test_a_rank_that_is_ahead_waits_only_for_what_it_needs(connected: list[TcpLinks]) -> None:
    for number in range(100):
        connected[0].exchange(views({1: b"%3d" % number}), {})
    for number in range(100):
        received = bytearray(3)
        connected[1].exchange({}, views({0: received}))
        assert received == b"%3d" % number


@pytest.mark.parametrize(
    ("sent", "received"),
    [({}, {1: bytearray(5)}), ({1: LARGE}, {}), ({1: LARGE, 2: LARGE}, {2: bytearray(1)})],
    ids=["receiving", "sending", "both"],
)
def test_a_rank_that_waits_for_a_silent_peer_is_released_at_once(
    connected: list[TcpLinks],
    pool: ThreadPoolExecutor,
    sent: dict[int, bytes],
    received: dict[int, bytearray],
) -> None:
    run = pool.submit(connected[0].exchange, views(sent), views(received))
    time.sleep(0.1)
    assert not run.done()
    connected[0].release()
    fails(run, RELEASED)
    with pytest.raises(CollectiveFailed, match=RELEASED):  # and so is whatever it would wait for next
        connected[0].exchange(views({1: b"x"}), {})


def test_a_rank_is_released_in_the_middle_of_a_message(connected: list[TcpLinks], pool: ThreadPoolExecutor) -> None:
    """Both its own and its peer's have begun, and the peer takes no more of either."""
    part = bytearray(len(LARGE))
    peer = pool.submit(connected[1].exchange, views({0: LARGE}), {})
    run = pool.submit(connected[0].exchange, views({1: LARGE}), views({1: part, 2: bytearray(1)}))
    peer.result(TIMEOUT_S)
    time.sleep(0.1)
    assert not run.done()
    connected[0].release()
    fails(run, RELEASED)


def test_a_peer_that_goes_in_the_middle_of_a_message_is_noticed_at_once(
    connected: list[TcpLinks], pool: ThreadPoolExecutor
) -> None:
    sending = pool.submit(connected[0].exchange, views({2: LARGE}), {})
    receiving = pool.submit(connected[1].exchange, {}, views({2: bytearray(9)}))
    time.sleep(0.1)
    connected.pop().close()
    fails(sending, "rank 2 is gone")
    fails(receiving, "rank 2 is gone")


@pytest.mark.parametrize("rank", [0, 2], ids=["dialled", "dialling"])
def test_a_rank_that_waits_for_connections_is_released_at_once(
    trio: list[TcpLinks], pool: ThreadPoolExecutor, rank: int
) -> None:
    blobs = blobs_of(trio)
    if rank:  # a listener whose backlog is full does not answer who dials
        with full_listener() as address:
            blobs[0] = msgpack.packb((*address, b"x" * 16))
            check_release(trio[rank], blobs, pool)
    else:
        check_release(trio[rank], blobs, pool)


def check_release(links: TcpLinks, blobs: dict[int, bytes], pool: ThreadPoolExecutor) -> None:
    run = pool.submit(links.connect, blobs, TIMEOUT_S)
    time.sleep(0.1)
    assert not run.done()
    links.release()
    fails(run, RELEASED)


@contextmanager
def full_listener() -> Iterator[tuple[str, int]]:
    """The address of one that accepts nobody and has no room for more."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address: tuple[str, int] = listener.getsockname()
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        time.sleep(0.05)
        yield address


def test_a_peer_that_died_before_the_connections_is_noticed_at_once(
    trio: list[TcpLinks], pool: ThreadPoolExecutor
) -> None:
    blobs = blobs_of(trio)
    trio.pop(0).close()
    fails(pool.submit(trio[0].connect, blobs, TIMEOUT_S), "rank 0 is gone: Connection refused")


def test_a_peer_that_does_not_come_is_waited_for_until_the_deadline(trio: list[TcpLinks]) -> None:
    with pytest.raises(CollectiveFailed, match="rank 1, 2 did not answer in time"):
        trio[0].connect(blobs_of(trio), 0.1)


def test_strangers_are_sent_away_and_keep_nobody_waiting(trio: list[TcpLinks], pool: ThreadPoolExecutor) -> None:
    blobs = blobs_of(trio)
    host, port, token = msgpack.unpackb(blobs[0])
    said = [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 20, token, token + b"\7\0\0\0", token + b"\0\0\0\0"]
    strangers = [socket.create_connection((host, port)) for _ in said]
    for stranger, words in zip(strangers, said, strict=True):
        stranger.sendall(words)
    strangers[0].close()
    list(pool.map(lambda links: links.connect(blobs, TIMEOUT_S), trio))
    for stranger in strangers[1:]:
        stranger.settimeout(SOON_S)
        try:
            assert stranger.recv(1) == b""
        except ConnectionResetError:
            pass  # it said more than was read
        stranger.close()
    received = bytearray(2)
    connected = pool.submit(trio[0].exchange, {}, views({2: received}))
    trio[2].exchange(views({0: b"ok"}), {})
    connected.result(TIMEOUT_S)
    assert received == b"ok"


def test_a_stranger_who_cannot_be_accepted_puts_off_no_deadline(trio: list[TcpLinks], pool: ThreadPoolExecutor) -> None:
    blobs = blobs_of(trio)
    address = tuple(msgpack.unpackb(blobs[0])[:2])
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(address):
        os.close(free := os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))  # so that the listener is always ready
        try:
            fails(pool.submit(trio[0].connect, blobs, 0.1), "rank 1, 2 did not answer in time")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
            trio[0].release()


def test_a_message_of_another_size_than_was_agreed_is_an_error(
    connected: list[TcpLinks], pool: ThreadPoolExecutor
) -> None:
    connected[0].exchange(views({1: b"four"}), {})
    fails(
        pool.submit(connected[1].exchange, {}, views({0: bytearray(5)})),
        "rank 0 sent message 0 of 4 bytes, expected 0 of 5",
    )


def test_a_group_moves_the_rows_of_tensors_of_any_shape(connected: list[TcpLinks], pool: ThreadPoolExecutor) -> None:
    sent = [torch.randint(0, 255, (4, 3), dtype=torch.uint8) for _ in range(2)]
    rows = [[1, 3], [0, 4]]  # that each sends to each

    def run(rank: int) -> torch.Tensor:
        receive_rows = [rows[peer][rank] for peer in range(2)]
        received = torch.empty((sum(receive_rows), 3), dtype=torch.uint8)
        connected[rank].transport((0, 1)).all_to_all(received, sent[rank], receive_rows, rows[rank])
        return received

    def expected(rank: int, work: Callable[[list[torch.Tensor]], torch.Tensor] = torch.cat) -> torch.Tensor:
        return work([torch.split(sent[peer], rows[peer])[rank] for peer in range(2)])

    assert all(torch.equal(found, expected(rank)) for rank, found in enumerate(pool.map(run, range(2))))
