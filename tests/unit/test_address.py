"""Where a replica listens and what it tells its proxies."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from replica import address
from replica.address import advertised_url, host_and_port, http_url, listen
from replica.api.served_model import ServedModel
from replica.config import ReplicaConfig
from replica.engine import make_hello
from replica.errors import ConfigError
from replica.model_config import ModelConfig
from tests.commands import DEMO_MODEL


def make_config(**values: object) -> ReplicaConfig:
    return ReplicaConfig(model=Path("m"), **values)  # type: ignore[arg-type]


def test_port_0_picks_a_free_one() -> None:
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", 0) as second:
        ports = {first.getsockname()[1], second.getsockname()[1]}
        assert len(ports) == 2 and 0 not in ports


def test_a_taken_port_is_a_setting_at_fault() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use"):
            listen("127.0.0.1", port)


def test_a_host_that_is_not_here_is_a_setting_at_fault() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen at 203\.0\.113\.1:0: .*--host"):
        listen("203.0.113.1", 0)


def test_a_port_is_free_again_right_after_its_connections_closed() -> None:
    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server, _ = sock.accept()
        server.close()  # this side closes first, so its end of the connection stays in TIME_WAIT
        client.close()
    listen("127.0.0.1", port).close()


def test_an_address_of_ip_version_6_gets_brackets() -> None:
    assert http_url("::1", 80) == "http://[::1]:80"
    assert http_url("10.0.0.1", 80) == "http://10.0.0.1:80"


def test_a_given_url_is_told_as_it_is() -> None:
    config = make_config(advertise_url="https://replica.example/", host="0.0.0.0")
    assert advertised_url(config, 8001) == "https://replica.example"


def test_a_plain_host_is_told_with_the_real_port() -> None:
    assert advertised_url(make_config(host="10.0.0.7", port=0), 4321) == "http://10.0.0.7:4321"


@pytest.mark.parametrize("host", ["0.0.0.0", "::", ""])
def test_a_wildcard_becomes_the_address_that_faces_the_proxy(host: str) -> None:
    config = make_config(host=host, proxy_urls=("http://127.0.0.1:8000",))
    assert advertised_url(config, 8001) == "http://127.0.0.1:8001"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_proxy_elsewhere_cannot_be_told_of_this_machines_loopback(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address, "own_address", lambda peer: "10.0.0.7")
    proxies = ("http://127.0.0.1:8000", "http://10.0.0.7:8000", "http://no-such-host.invalid:8000")
    assert advertised_url(make_config(host=host, proxy_urls=proxies), 8001) == http_url(host, 8001)
    config = make_config(host=host, proxy_urls=(*proxies, "http://10.0.0.1:8000"))
    with pytest.raises(ConfigError, match=f"--host is {host}, which the proxy at http://10.0.0.1:8000 cannot reach"):
        advertised_url(config, 8001)
    given = make_config(host=host, proxy_urls=config.proxy_urls, advertise_url="http://10.0.0.7:9000")
    assert advertised_url(given, 8001) == "http://10.0.0.7:9000"


def test_an_unknown_proxy_is_answered_with_the_remedy() -> None:
    config = make_config(host="0.0.0.0", proxy_urls=("http://no-such-host.invalid:8000",))
    with pytest.raises(ConfigError, match="--advertise-url"):
        advertised_url(config, 8001)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://10.0.0.1:8001", "10.0.0.1:8001"),
        ("http://[::1]:8001", "[::1]:8001"),
        ("https://replica.example", "replica.example:443"),
        ("http://replica.example/", "replica.example:80"),
    ],
)
def test_host_and_port_of_a_url(url: str, expected: str) -> None:
    assert host_and_port(url) == expected


def test_replicas_of_machines_of_one_name_have_ids_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    configs = [ReplicaConfig(model=DEMO_MODEL, host=host) for host in ("10.0.0.1", "10.0.0.2")]
    model = ServedModel.load(configs[0], ModelConfig.load(DEMO_MODEL))
    hellos = [make_hello(config, model, "hash", 8001) for config in configs]
    assert [hello.replica_id for hello in hellos] == ["10.0.0.1:8001", "10.0.0.2:8001"]
    assert hellos[0].group != hellos[1].group
