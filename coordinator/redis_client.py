"""The one place that builds Redis clients: sub-second timeouts, and no retries of their own.

A client that retries by itself stalls for minutes on a frozen server and may apply a call twice. Here a call fails in
time and whoever made it decides; every script may be applied twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, unquote, urlsplit

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff

SOCKET_TIMEOUT_S: Final = 0.5
SENTINEL_TIMEOUT_S: Final = 0.2  # they are asked one after the other, within one call
MAX_CONNECTIONS: Final = 4
DEFAULT_SENTINEL_PORT: Final = 26379
FORMS: Final = (
    "redis://[:password@]host[:port][/db], rediss:// for TLS, unix://[:password@]/path, "
    "or redis+sentinel://[:password@]host[:port][,host[:port]...]/service[/db] (rediss+sentinel:// for TLS)"
)

T = TypeVar("T")


def connect(url: str) -> Redis:
    """A client for `url`; it dials at its first call. Raises ValueError, which names no password, for a bad URL."""
    scheme = url.partition("://")[0]
    if scheme in ("redis+sentinel", "rediss+sentinel"):
        return _sentinel_client(url, is_tls=scheme.startswith("rediss"))
    try:
        client: Redis = Redis.from_url(url, **_options(SOCKET_TIMEOUT_S), max_connections=MAX_CONNECTIONS)
    except ValueError as err:
        raise ValueError(f"the Redis URL is not one of {FORMS}") from err
    return client


async def within(limit_s: float, call: Awaitable[T]) -> T:
    """What a call of such a client returns. Raises what it raises, and TimeoutError after so long."""
    # In a task of its own, because redis-py swallows a cancellation that comes together with the server's answer.
    answer = asyncio.ensure_future(call)
    try:
        await asyncio.wait({answer}, timeout=limit_s)
    finally:
        answer.cancel()
        answer.add_done_callback(_take_error)
    if not answer.done():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return answer.result()


async def disconnect(client: Redis) -> None:
    """Closes the connections of a client that `connect` built."""
    pool = client.connection_pool
    if isinstance(pool, SentinelConnectionPool):
        for sentinel in pool.sentinel_manager.sentinels:
            await sentinel.aclose()
    await client.aclose()


def _take_error(answer: asyncio.Future[Any]) -> None:
    """Nobody waits for it any more, or whoever does has its error."""
    if not answer.cancelled():
        answer.exception()


def _options(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "protocol": 2,  # nothing here needs more, and it saves round trips when connecting
        "driver_info": None,
        "decode_responses": True,
    }


def _sentinel_client(url: str, *, is_tls: bool) -> Redis:
    """A client that asks the sentinels for the master whenever it connects."""
    parts = urlsplit(url)
    credentials, _, hosts = parts.netloc.rpartition("@")
    service, _, db = unquote(parts.path).strip("/").partition("/")
    query = dict(parse_qsl(parts.query))
    try:
        sentinels = [_address(host) for host in hosts.split(",")]
        options: dict[str, Any] = {"db": int(db or 0)}
        if not service:
            raise ValueError("no service is named")
    except ValueError as err:
        raise ValueError(f"the Redis URL is not one of {FORMS}") from err
    username, _, password = credentials.partition(":")
    tls: dict[str, Any] = {"ssl": True} if is_tls else {}
    tls |= {name: value for name, value in query.items() if name.startswith("ssl_")}
    options |= {"username": unquote(username) or None, "password": unquote(password) or None}
    of_sentinels = {"username": query.get("sentinel_username"), "password": query.get("sentinel_password")}
    finder = Sentinel(  # type: ignore[no-untyped-call]
        sentinels,
        sentinel_kwargs=_options(SENTINEL_TIMEOUT_S) | tls | of_sentinels,
        **(_options(SOCKET_TIMEOUT_S) | tls | options),
    )
    client: Redis = finder.master_for(service, max_connections=MAX_CONNECTIONS)
    return client


def _address(text: str) -> tuple[str, int]:
    """host:port, host, [v6]:port or [v6]."""
    parts = urlsplit(f"//{text}")
    if not parts.hostname:
        raise ValueError("a host is empty")
    return parts.hostname, parts.port or DEFAULT_SENTINEL_PORT
