"""Where a replica listens, and the address at which others reach it."""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from replica.config import WILDCARDS, ReplicaConfig
from replica.errors import ConfigError

BACKLOG: Final = 1024  # connections that the kernel accepts before the server does


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. It is bound before anything is published, so that nobody hears of a port that is not ours."""
    sock: socket.socket | None = None
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as err:
        if sock is not None:
            sock.close()
        raise ConfigError(f"cannot listen at {host}:{port}: {err.strerror} (--host, --port)") from err
    return sock


def http_url(host: str, port: int) -> str:
    """The URL of an address; IPv6 gets its brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def advertised_url(config: ReplicaConfig, port: int) -> str:
    """What proxies are told: --advertise-url, or where the replica listens, at `port`.

    A wildcard host is no address to dial; in its place stands the one from which this machine reaches the first proxy.
    Raises ConfigError where a proxy could not dial it.
    """
    if config.advertise_url:
        return config.advertise_url.rstrip("/")
    if is_loopback(config.host):
        for url in config.proxy_urls:
            if is_elsewhere(urlsplit(url).hostname or ""):
                raise ConfigError(
                    f"--host is {config.host}, which the proxy at {url} cannot reach: give the address at which it can "
                    "(--host), or this replica's URL (--advertise-url)"
                )
    if config.host not in WILDCARDS:
        return http_url(config.host, port)
    proxy = urlsplit(config.proxy_urls[0]).hostname if config.proxy_urls else None
    try:
        return http_url(own_address(proxy or "localhost"), port)
    except ConfigError as err:
        raise ConfigError(f"{err}: give this replica's URL with --advertise-url") from err


def host_and_port(url: str) -> str:
    """HOST:PORT of a URL, also where its port is the scheme's own."""
    parts = urlsplit(url)
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_elsewhere(peer: str) -> bool:
    """Whether the host is certainly another machine: this one reaches it from an address that is not its own."""
    if is_loopback(peer):
        return False
    try:
        return own_address(peer) not in {str(found[4][0]) for found in socket.getaddrinfo(peer, None)}
    except (ConfigError, OSError):  # no route yet, or no name
        return False


def own_address(peer: str) -> str:
    """This machine's address on the route to `peer`. Connecting a datagram socket only asks the routing table.

    Raises ConfigError where there is none.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(peer, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError as err:
        raise ConfigError(f"no route to {peer} ({err.strerror})") from err
