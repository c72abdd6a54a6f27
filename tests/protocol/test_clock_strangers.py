"""Whatever strangers do at the master's port, the group does not notice."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from coordinator import master as master_module
from coordinator.master import Master
from coordinator.messages import HEADER, MAX_HELLO_BYTES, Done, encode
from tests.protocol.test_clock_group import make_member, running, serving, take_step, until

HALF_A_FRAME = HEADER.pack(100) + b"x" * 50
NOISE = [
    b"GET / HTTP/1.1\r\nHost: master\r\n\r\n",
    os.urandom(4096),
    HEADER.pack(MAX_HELLO_BYTES + 1),
    HEADER.pack(3) + b"\xc1\xc1\xc1",
    encode(Done(epoch=0, step=0)),
]


def port_of(master: Master) -> int:
    assert master._server is not None
    port: int = master._server.sockets[0].getsockname()[1]
    return port


async def knock(port: int, sent: bytes) -> bytes:
    """Sends bytes as a stranger and returns what comes until the master hangs up."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        return await reader.read()
    except ConnectionResetError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize("sent", NOISE)
async def test_strangers_bytes_end_their_connection_and_nothing_else(sent: bytes) -> None:
    async with running(2) as (master, members, _):
        async with asyncio.timeout(1.0):
            greeting = await knock(port_of(master), sent)
        assert len(greeting) < 100, "a stranger gets the challenge at most"
        await take_step(members, 1, 1)


async def test_half_a_frame_is_dropped_at_the_handshake_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(master_module, "HANDSHAKE_S", 0.3)
    async with serving(2) as (master, port, _):
        async with asyncio.timeout(2.0):
            await knock(port, HALF_A_FRAME)
            await knock(port, b"")
        assert not master._strangers


FLOOD = """
import socket, sys
held = [socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=20) for _ in range(500)]
print("held", flush=True)
sys.stdin.read()
"""


@asynccontextmanager
async def flood(port: int) -> AsyncIterator[asyncio.Future[list[bytes]]]:
    """A thousand connections from two processes, which have their own file descriptors. Yields when all are held."""
    command = (sys.executable, "-c", FLOOD, str(port))
    processes = [await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE) for _ in "ab"]
    try:
        yield asyncio.gather(*(process.stdout.readline() for process in processes if process.stdout))
    finally:
        for process in processes:
            await process.communicate(b"")
        await asyncio.sleep(0.3)  # asyncio leaks what it is just accepting when a server closes


async def test_a_thousand_connections_do_not_keep_a_member_out() -> None:
    async with serving(2, startup_deadline_s=30.0) as (master, port, _):
        first, second = make_member(port, 0), make_member(port, 1)
        joining = asyncio.ensure_future(first.join())
        await until(lambda: master.clock.missing == [1])
        async with flood(port) as held, asyncio.timeout(20.0):
            assert await held == [b"held\n"] * 2
            await asyncio.gather(joining, second.join())
            assert len(master._strangers) <= master_module.MAX_STRANGERS
        first.close()
        second.close()


async def test_a_group_steps_on_while_a_thousand_connections_come() -> None:
    async with running(2) as (master, members, _):
        longest_s = 0.0
        async with flood(port_of(master)) as held, asyncio.timeout(20.0):
            while not held.done():
                began_s = time.monotonic()
                await take_step(members, 1, 1)
                longest_s = max(longest_s, time.monotonic() - began_s)
        assert held.result() == [b"held\n"] * 2
        assert longest_s < 0.5


async def test_strangers_are_logged_at_most_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "coordinator.master")
    async with serving(2) as (_, port, _run):
        for _ in range(20):
            await knock(port, b"GET / HTTP/1.1\r\n\r\n")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1
    assert "strangers dropped count=1" in lines[0]
    assert "reason=frame has" in lines[0]


async def test_who_only_looks_whether_a_master_is_there_is_not_worth_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "coordinator.master")
    async with serving(2) as (master, port, _run):
        for _ in range(3):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            assert await reader.read(1), "a master greets whoever connects"
            writer.close()
        await until(lambda: not master._strangers)
    assert not caplog.records


async def test_the_lines_that_were_held_back_are_counted_in_the_next(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING, "coordinator.master")
    monkeypatch.setattr(master_module, "STRANGER_LOG_S", 0.5)
    async with serving(2) as (_, port, _run):
        for _ in range(5):
            await knock(port, b"GET / HTTP/1.1\r\n\r\n")
        await until(lambda: len(caplog.records) == 2)
    assert "count=4" in caplog.records[1].getMessage()
