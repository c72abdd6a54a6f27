"""The life of a proxy process: bind, serve, drain, stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from typing import Final

from aiohttp import web

from proxy.app import BACKENDS, OPEN_REQUESTS, STRANGERS, build_app
from proxy.config import ProxyConfig
from proxy.errors import ConfigError
from proxy.relay import MAX_HEADER_BYTES, READ_BUFFER_BYTES, RELAY
from proxy.strangers import HttpServerLog

logger = logging.getLogger(__name__)

BACKLOG: Final = 4096  # connections that the kernel holds until they are accepted
CLIENT_KEEPALIVE_S: Final = 75.0  # an idle client connection, or one that does not finish its request's head
GOODBYE_S: Final = 0.5  # after the last answer: to flush it, and for cancelled handlers to unwind


class Stop:
    """What SIGTERM and SIGINT ask for: the first to drain, the second to stop at once."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def request(self) -> None:
        """A signal came."""
        (self.now if self.drain.is_set() else self.drain).set()


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


async def serve(config: ProxyConfig, listener: socket.socket, stop: Stop) -> None:
    """Serves until `stop` asks for the end; a crash of a long-lived task ends it too, by raising."""
    app = build_app(config)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its request, up to the replica
        shutdown_timeout=GOODBYE_S,
        keepalive_timeout=CLIENT_KEEPALIVE_S,
        auto_decompress=False,  # bodies pass as they came
        read_bufsize=READ_BUFFER_BYTES,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        access_log=None,
        logger=HttpServerLog(app[STRANGERS]),
    )
    async with asyncio.TaskGroup() as tasks:
        await runner.setup()
        try:
            site = web.SockSite(runner, listener, backlog=BACKLOG)
            await site.start()
            probes = tasks.create_task(app[BACKENDS].run(app[RELAY].session))
            logger.info("proxy ready url=%s", _url(config, listener))
            await stop.drain.wait()
            await site.stop()
            await _drain(app, config, stop)
            probes.cancel()
        finally:
            await runner.cleanup()
    logger.info("proxy stopped")


async def _drain(app: web.Application, config: ProxyConfig, stop: Stop) -> None:
    """Lets open requests end, for as long as the config and the operator allow, then cancels the rest."""
    open_requests = app[OPEN_REQUESTS]
    logger.info("proxy draining requests=%d timeout_s=%g", len(open_requests), config.drain_timeout_s)
    async with asyncio.TaskGroup() as tasks:
        ends = [tasks.create_task(open_requests.drained()), tasks.create_task(stop.now.wait())]
        await asyncio.wait(ends, timeout=config.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in ends:
            task.cancel()
    if len(open_requests):
        logger.warning("requests cut by the stop requests=%d", len(open_requests))
        open_requests.cancel_all()


def _url(config: ProxyConfig, listener: socket.socket) -> str:
    """The address as given, with the port that was really bound."""
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"
