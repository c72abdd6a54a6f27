"""The life of a proxy process: bind, serve, drain, stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import time
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from proxy.access_log import AccessLog
from proxy.app import Proxy, build
from proxy.client import FrontDoor
from proxy.config import ProxyConfig
from proxy.errors import ConfigError
from proxy.http1 import MAX_HEAD_BYTES
from proxy.keys import ApiKeys
from proxy.strangers import HttpServerLog

logger = logging.getLogger(__name__)

BACKLOG: Final = 4096  # connections that the kernel holds until they are accepted
GOODBYE_S: Final = 0.5  # after the last answer: to flush it, and for cancelled handlers to unwind
SHORTEST_TICK_S: Final = 0.02
LONGEST_TICK_S: Final = 0.25  # between two looks at what took too long
TICKS_PER_TIMEOUT: Final = 10


class Stop:
    """What SIGTERM and SIGINT ask for: the first to drain, the second to stop at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def request(self) -> None:
        """A signal came."""
        (self.now if self.drain.is_set() else self.drain).set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """The files that the settings name, opened."""

    keys: ApiKeys
    access_log: AccessLog
    tls: ssl.SSLContext | None


def open_resources(config: ProxyConfig) -> Resources:
    """Raises ConfigError, in one line, for a file that cannot be used."""
    return Resources(
        keys=ApiKeys(config.api_key, config.api_key_file),
        access_log=AccessLog(config.access_log),
        tls=_tls(config) if config.tls_cert else None,
    )


def _tls(config: ProxyConfig) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as err:
        raise ConfigError(f"--tls-cert {config.tls_cert} --tls-key {config.tls_key}: {err}") from err
    return context


def bind(config: ProxyConfig) -> socket.socket:
    """The listening socket. Raises ConfigError in one line if the address cannot be had."""
    try:
        return _listen(config)
    except OSError as err:
        if err.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {config.port} of {config.host} is taken; choose another --port, or 0") from err
        raise ConfigError(f"cannot listen on --host {config.host} --port {config.port}: {err.strerror}") from err


def _listen(config: ProxyConfig) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    return socket.create_server(address, family=family, backlog=BACKLOG)


async def serve(config: ProxyConfig, listener: socket.socket, stop: Stop, resources: Resources) -> None:
    """Serves until `stop` asks for the end; a crash of a long-lived task ends it too, by raising."""
    proxy = build(config, resources.keys, resources.access_log)
    runner = _control_plane(proxy)
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        await runner.setup()
        server = runner.server
        assert server is not None, "the runner is set up"
        door = FrontDoor(
            dispatcher=proxy.dispatcher,
            control_plane=server,
            strangers=proxy.strangers,
            session_header=config.session_header,
            client_timeout_s=config.client_timeout_s,
        )
        background = [
            tasks.create_task(proxy.backends.run()),
            tasks.create_task(proxy.dispatcher.run()),
            tasks.create_task(_tick(config, proxy, door)),
        ]
        try:
            await asyncio.sleep(0)  # the background is there before the first request
            site = await loop.create_server(door, sock=listener, ssl=resources.tls, backlog=BACKLOG)
            logger.info("proxy ready url=%s", _url(config, listener))
            await stop.drain.wait()
            site.close()
            await _drain(proxy, config, stop)
        finally:
            door.close_all()
            await runner.cleanup()
            proxy.dispatcher.pool.close_idle(at_all=True)
            for task in background:
                task.cancel()
            resources.access_log.close()
    logger.info("proxy stopped")


def _control_plane(proxy: Proxy) -> web.AppRunner:
    """aiohttp's part: it never listens, connections are handed to it."""
    return web.AppRunner(
        proxy.app,
        handler_cancellation=True,
        shutdown_timeout=GOODBYE_S,
        max_line_size=MAX_HEAD_BYTES,
        max_field_size=MAX_HEAD_BYTES,
        access_log=None,
        logger=HttpServerLog(proxy.strangers),
    )


async def _tick(config: ProxyConfig, proxy: Proxy, door: FrontDoor) -> None:
    """Looks at everything that has a deadline, a few times within the shortest of them."""
    shortest_s = min(
        config.client_timeout_s, config.first_byte_timeout_s, config.between_bytes_timeout_s, config.queue_timeout_s
    )
    tick_s = min(max(shortest_s / TICKS_PER_TIMEOUT, SHORTEST_TICK_S), LONGEST_TICK_S)
    while True:
        now_s = time.monotonic()
        proxy.registry.tick(now_s=now_s, every_s=tick_s)
        proxy.dispatcher.tick(now_s)
        door.tick(now_s)
        await asyncio.sleep(tick_s)


async def _drain(proxy: Proxy, config: ProxyConfig, stop: Stop) -> None:
    """Lets open requests end, for as long as the config and the operator allow, then stops the rest."""
    open_requests = proxy.dispatcher.open_requests
    logger.info("proxy draining requests=%d timeout_s=%g", len(open_requests), config.drain_timeout_s)
    async with asyncio.TaskGroup() as tasks:
        ends = [tasks.create_task(open_requests.drained()), tasks.create_task(stop.now.wait())]
        await asyncio.wait(ends, timeout=config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
    if len(open_requests):
        logger.warning("requests cut by the stop requests=%d", len(open_requests))
        open_requests.stop_all()


def _url(config: ProxyConfig, listener: socket.socket) -> str:
    """The address as given, with the port that was really bound."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"{'https' if config.tls_cert else 'http'}://{host}:{listener.getsockname()[1]}"
