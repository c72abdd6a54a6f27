"""All settings of `proxy serve`. Built in cli.py, checked here, passed on, never changed."""

from __future__ import annotations

import ipaddress
import math
import re
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from proxy.errors import ConfigError
from proxy.routing import Routing

_HEADER_NAME: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_NOT_NEGATIVE: Final = ("max_tokens", "max_replica_tokens", "max_waiting", "journal_kb", "drain_timeout_s")
_POSITIVE: Final = (
    "max_body_mb",
    "max_requests",
    "max_replica_requests",
    "queue_timeout_s",
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
    api_key_file: str = ""  # more keys, with names and limits of their own (keys.py)
    proxy_token: str = field(default="", repr=False)  # what replicas and operators show; "" on loopback only

    tls_cert: str = ""  # PEM file; with it, clients and replicas speak TLS to this proxy
    tls_key: str = ""  # PEM file
    cors_origins: tuple[str, ...] = ()  # web pages of these origins may use this proxy; "*" is all
    routing: str = Routing.LEAST_LOAD
    session_header: str = "X-Session-Id"  # names a session, for --routing session
    access_log: str = ""  # file that gets a line of JSON per inference request

    max_requests: int = 16384  # under way at once
    max_tokens: int = 0  # of the prompts under way, as their bytes / 4; 0 is no limit
    max_replica_requests: int = 4096  # the same for each replica
    max_replica_tokens: int = 0
    max_waiting: int = 1024  # requests that wait for one of these limits, or for a group that reconfigures
    queue_timeout_s: float = 30.0  # how long they wait at the most
    journal_kb: int = 64  # KiB of a stream's sent events that are kept until it ends; 0 keeps none
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
        for name in _NOT_NEGATIVE:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}, must not be negative")
        if self.routing not in set(Routing):
            raise ConfigError(f"--routing is {self.routing!r}, must be one of {', '.join(Routing)}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key go together; give both or none")
        if not _HEADER_NAME.fullmatch(self.session_header):
            raise ConfigError(f"--session-header is {self.session_header!r}, which is no header's name")
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
        return tuple(map(backend_root, self.backends))


def backend_root(url: str) -> str:
    """A server's root, of a URL that may end as OpenAI's base URLs do."""
    return url.rstrip("/").removesuffix("/v1")


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
