"""Clients against real servers over TLS and behind Sentinel."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

from coordinator.errors import StoreUnavailable
from coordinator.membership import Membership
from coordinator.private_redis import find_server
from coordinator.store import Record
from tests.redis_server import RedisServer, free_port, redis_server

RELAY_BYTES = 64 * 1024
FAILOVER_S = 20.0


async def test_a_store_behind_tls_is_reached_and_one_whose_certificate_nobody_vouches_for_is_not(
    tmp_path: Path,
) -> None:
    certificate = make_certificate(tmp_path)
    with redis_server(tmp_path, password="secret") as server:
        async with tls_in_front(server, certificate) as port:
            url = f"rediss://:secret@localhost:{port}"
            trusting = Membership.at(f"{url}?ssl_ca_certs={certificate}", "group")
            assert (await trusting.view()).token == 0
            wary = Membership.at(url, "group")
            with pytest.raises(StoreUnavailable, match="certificate"):
                await wary.view()
            await trusting.close()
            await wary.close()


async def test_behind_sentinel_a_copy_that_takes_over_is_found_and_told_what_it_lacks(tmp_path: Path) -> None:
    with redis_server(tmp_path) as first, redis_server(tmp_path) as copy:
        copy.call("CONFIG", "SET", "replica-read-only", "no")
        copy.call("REPLICAOF", "127.0.0.1", str(first.port))
        with sentinel(tmp_path, first) as sentinel_port:
            await fail_over(first, copy, sentinel_port)


async def fail_over(first: RedisServer, copy: RedisServer, sentinel_port: int) -> None:
    store = Membership.at(f"redis+sentinel://127.0.0.1:{sentinel_port}/group-store", "group")
    lease = await store.take_lease(holder="a", address="10.0.0.1:1", seen_token=0, seen_epoch=0)
    record = Record(epoch=1, members=(0, 1), evicted=(), config_hash="c")
    await store.commit(lease.token, record)
    await until_known(sentinel_port)
    first.kill()
    copy.call("FLUSHALL")  # a copy lags behind; what it never had is what a failover loses
    began_s = time.monotonic()
    while True:
        try:
            await store.renew(lease.token, 1)
            break
        except StoreUnavailable:
            assert time.monotonic() - began_s < FAILOVER_S
            await asyncio.sleep(0.1)
    assert b"role:master" in copy.call("INFO", "replication")
    found = await store.take_lease(holder="b", address="10.0.0.2:1", seen_token=0, seen_epoch=0, replaces=1)
    assert (found.token, found.epoch, found.record) == (2, 2, record)
    await store.close()


def make_certificate(folder: Path) -> Path:
    """A self-signed certificate for localhost, and its key beside it."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("makes its certificate with the openssl command")
    subject = [*("-subj", "/CN=localhost"), *("-addext", "subjectAltName=DNS:localhost")]
    files = ["-keyout", str(folder / "key.pem"), "-out", str(folder / "certificate.pem")]
    key = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run([openssl, *key, *subject, *files], check=True, capture_output=True)
    return folder / "certificate.pem"


@asynccontextmanager
async def tls_in_front(server: RedisServer, certificate: Path) -> AsyncIterator[int]:
    """Ends TLS and passes the bytes on, since a server may be built without it. Yields the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, certificate.with_name("key.pem"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", server.port)
        await asyncio.gather(relay(reader, plain_writer), relay(plain_reader, writer))

    tls = await asyncio.start_server(serve, "localhost", 0, ssl=context)
    async with tls:
        yield tls.sockets[0].getsockname()[1]


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while received := await reader.read(RELAY_BYTES):
            writer.write(received)
        writer.close()


@contextmanager
def sentinel(folder: Path, server: RedisServer) -> Iterator[int]:
    """A Sentinel that watches `server` as `group-store`. Yields its port."""
    port = free_port()
    config = folder / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\n"
        f"sentinel monitor group-store 127.0.0.1 {server.port} 1\n"
        "sentinel down-after-milliseconds group-store 300\n"
        "sentinel failover-timeout group-store 2000\n"
    )
    command = [find_server(), str(config), "--sentinel"]
    process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
    try:
        RedisServer(folder, port=port).wait_until_it_answers()
        yield port
    finally:
        process.kill()
        process.wait()


async def until_known(sentinel_port: int) -> None:
    """Waits until the Sentinel has a copy that it could promote."""
    sentinel = RedisServer(Path(), port=sentinel_port)
    began_s = time.monotonic()
    while b"link-status\r\n$2\r\nok" not in (found := sentinel.call("SENTINEL", "replicas", "group-store")):
        assert time.monotonic() - began_s < FAILOVER_S, found
        await asyncio.sleep(0.1)
