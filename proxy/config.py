"""All settings of `proxy serve`. Built in cli.py, checked here, passed on, never changed."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from proxy.errors import ConfigError

_POSITIVE: Final = (
    "max_body_mb",
    "connect_timeout_s",
    "first_byte_timeout_s",
    "between_bytes_timeout_s",
    "client_timeout_s",
    "heartbeat_timeout_s",
    "probe_interval_s",
    "probe_timeout_s",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """All settings of one proxy. The defaults of the command line come from here."""

    host: str = "127.0.0.1"
    port: int = 8000  # 0 picks a free port; the chosen one is logged
    backends: tuple[str, ...] = ()  # root URLs of other OpenAI-compatible servers, polled rather than joining
    api_key: str = field(default="", repr=False)  # "" means that clients need none
    proxy_token: str = field(default="", repr=False)  # what replicas and operators show; "" on loopback only

    max_body_mb: float = 32.0  # MiB of one request's body
    connect_timeout_s: float = 2.0  # to a replica, name resolution included
    first_byte_timeout_s: float = (
        600.0  # from the request sent to the answer's first byte; a whole answer if not streamed
    )
    between_bytes_timeout_s: float = 120.0  # silence inside an answer
    client_timeout_s: float = 60.0  # a client may stall so long while it sends its request or reads its answer
    heartbeat_timeout_s: float = 3.0  # silence after which a replica gets no new requests
    probe_interval_s: float = 2.0  # between two looks at a --backend
    probe_timeout_s: float = 2.0  # one look at a --backend
    drain_timeout_s: float = 30.0  # after SIGTERM, running requests may go on for so long

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot be served."""
        for name in _POSITIVE:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}, must be above 0")
        if not (math.isfinite(self.drain_timeout_s) and self.drain_timeout_s >= 0):
            raise ConfigError(f"--drain-timeout-s is {self.drain_timeout_s}, must not be negative")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}, must be 0 to 65535")
        if not self.host:
            raise ConfigError("--host is empty; give an address of this machine, or 0.0.0.0 for all of them")
        if not self.proxy_token and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, so replicas must show a token: "
                "set --proxy-token or LOCKSTEP_PROXY_TOKEN, here and at the replicas"
            )
        for url in self.backends:
            if not is_http_url(url):
                raise ConfigError(f"--backend {url!r} is not a URL; it must look like http://HOST:PORT")
        if len(set(self.backend_urls)) < len(self.backends):
            raise ConfigError(f"a --backend is given twice: {' '.join(self.backends)}")

    @property
    def max_body_bytes(self) -> int:
        """`max_body_mb` in bytes."""
        return int(self.max_body_mb * 2**20)

    @property
    def report_interval_s(self) -> float:
        """How often a replica reports: three reports fit into the silence that makes it suspect."""
        return self.heartbeat_timeout_s / 3

    @property
    def backend_urls(self) -> tuple[str, ...]:
        """The backends' roots, so that every `/v1/...` path can be put behind them."""
        return tuple(url.rstrip("/").removesuffix("/v1") for url in self.backends)


def flag(name: str) -> str:
    """The command-line option of a field."""
    return "--" + name.replace("_", "-")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_http_url(url: str) -> bool:
    """Whether the proxy could send requests there."""
    try:
        parts = urlsplit(url)
        port_is_valid = parts.port != 0  # reading it raises ValueError above 65535
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and port_is_valid and not parts.query
