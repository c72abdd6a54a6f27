"""URLs of a Redis, and what the client that they give must never do."""

from __future__ import annotations

from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import Connection, SSLConnection, UnixDomainSocketConnection
from redis.asyncio.sentinel import SentinelConnectionPool

from coordinator.keys import checked_group, lease, mastership
from coordinator.redis_client import SENTINEL_TIMEOUT_S, SOCKET_TIMEOUT_S, connect


def options(client: Redis) -> dict[str, Any]:
    kwargs: dict[str, Any] = client.connection_pool.connection_kwargs
    return kwargs


@pytest.mark.parametrize(
    ("url", "kind", "expected"),
    [
        ("redis://10.0.0.1", Connection, {"host": "10.0.0.1"}),
        ("redis://:p%40ss@host:7000/3", Connection, {"host": "host", "port": 7000, "db": 3, "password": "p@ss"}),
        ("redis://user:secret@[fd00::1]:7000", Connection, {"host": "fd00::1", "username": "user"}),
        ("rediss://host/0", SSLConnection, {"host": "host"}),
        ("rediss://host?ssl_ca_certs=/etc/ca.pem", SSLConnection, {"ssl_ca_certs": "/etc/ca.pem"}),
        ("unix://:secret@/run/redis.sock", UnixDomainSocketConnection, {"path": "/run/redis.sock"}),
    ],
)
def test_a_url_names_a_server_its_transport_and_its_password(url: str, kind: type, expected: dict[str, Any]) -> None:
    client = connect(url)
    assert client.connection_pool.connection_class is kind
    assert options(client).items() >= expected.items()


@pytest.mark.parametrize(
    "url", ["redis://host", "rediss://host", "unix:///run/redis.sock", "redis+sentinel://a:1,b:2/service"]
)
def test_every_client_gives_up_in_under_a_second_and_never_calls_again_by_itself(url: str) -> None:
    connection = connect(url).connection_pool.make_connection()
    assert connection.socket_timeout == connection.socket_connect_timeout == SOCKET_TIMEOUT_S < 1
    assert connection.retry.get_retries() == 0
    assert not connection.retry_on_error and not connection.retry_on_timeout


def test_a_sentinel_url_names_the_sentinels_the_service_and_the_credentials_of_both() -> None:
    client = connect("redis+sentinel://user:p%40ss@a:1,[fd00::1],c:3/service/2?sentinel_password=other")
    pool = client.connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert pool.service_name == "service" and pool.is_master
    assert options(client).items() >= {"db": 2, "username": "user", "password": "p@ss"}.items()
    sentinels = [options(sentinel) for sentinel in pool.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in sentinels] == [("a", 1), ("fd00::1", 26379), ("c", 3)]
    assert all(each["password"] == "other" and each["socket_timeout"] == SENTINEL_TIMEOUT_S for each in sentinels)


def test_a_sentinel_url_with_tls_encrypts_both_kinds_of_connection() -> None:
    pool = connect("rediss+sentinel://a/service?ssl_ca_certs=/etc/ca.pem").connection_pool
    assert isinstance(pool, SentinelConnectionPool)
    assert issubclass(pool.connection_class, SSLConnection)
    (sentinel,) = pool.sentinel_manager.sentinels
    assert sentinel.connection_pool.connection_class is SSLConnection
    assert sentinel.connection_pool.connection_kwargs["ssl_ca_certs"] == "/etc/ca.pem"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:6379",
        "http://:hidden@host",
        "redis://:hidden@host:port",
        "redis+sentinel://:hidden@a:1",
        "redis+sentinel://:hidden@a:1,,b/service",
        "redis+sentinel://:hidden@a:x/service",
        "redis+sentinel://:hidden@a/service/x",
    ],
)
def test_a_url_that_cannot_be_is_refused_with_the_forms_there_are_and_without_its_password(url: str) -> None:
    with pytest.raises(ValueError, match=r"redis://\[:password@\]host") as refusal:
        connect(url)
    assert "hidden" not in str(refusal.value)


def test_keys_of_a_group_are_on_one_node_of_a_cluster_and_no_two_groups_share_one() -> None:
    assert lease("a") == "lockstep:{a}:lease" and mastership("a").startswith("lockstep:{a}:")
    assert lease("a") != lease("b")


@pytest.mark.parametrize("group", ["", "two words", "a{b}", "x" * 201])
def test_a_group_s_name_that_would_break_a_key_is_refused(group: str) -> None:
    with pytest.raises(ValueError, match="needs 1 to 200 characters"):
        checked_group(group)
