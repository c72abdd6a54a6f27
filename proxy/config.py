"""All settings of `proxy serve`. Built in cli.py, checked here, passed on, never changed."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field, fields
from typing import Any, Final
from urllib.parse import urlsplit

from proxy.errors import ConfigError
from proxy.routing import Routing

_HEADER_NAME: Final = re.compile(r"[\w!#$%&'*+.^`|~-]+", re.ASCII)
_URL_CHARS: Final = re.compile(r"[!-~]+")  # no space, no control character, nothing beyond ASCII
_LABEL: Final = r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST_NAME: Final = re.compile(rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*\.?")

_SECONDS: Final = (0.01, 1_000_000)
_COUNT: Final = (1, 1_000_000_000)
_COUNT_OR_NONE: Final = (0, 1_000_000_000_000)


def option(
    default: Any, help_text: str, *, between: tuple[float, float] | None = None, is_secret: bool = False, name: str = ""
) -> Any:
    """A field that is also an option of the command line, of the default's type; `help_text` states unit and effect.

    A number must be `between` these two. `name` is the option's, where it is not the field's: a list's single value.
    """
    metadata = {"help": help_text, "between": between, "is_secret": is_secret, "name": name}
    return field(default=default, repr=not is_secret, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProxyConfig:
    """All settings of one proxy. The command line takes its options, defaults and help from here."""

    host: str = option("127.0.0.1", "address to listen on; anything but loopback needs --proxy-token")
    port: int = option(8000, "port to listen on; 0 picks a free one and logs it", between=(0, 65535))
    backends: tuple[str, ...] = option(
        (),
        "root of another OpenAI-compatible server to spread requests over; may be given several times",
        name="backend",
    )
    api_key: str = option(
        "", "key that clients must send as a bearer token, and replicas get from them", is_secret=True
    )
    api_key_file: str = option("", "TOML file of more keys, with names and limits of their own; read again on changes")
    proxy_token: str = option("", "token that replicas and operators must show", is_secret=True)

    tls_cert: str = option("", "PEM file of the certificate chain; clients and replicas then speak TLS")
    tls_key: str = option("", "PEM file of the certificate's key")
    cors_origins: tuple[str, ...] = option(
        (), "origin whose web pages may use this proxy, or * for all; may be given several times", name="cors_origin"
    )
    routing: str = option(Routing.LEAST_LOAD, f"which replica gets a request: {', '.join(Routing)}")
    session_header: str = option("X-Session-Id", "header that names a client's session, for --routing session")
    access_log: str = option("", "file that gets a line of JSON per inference request, without its prompt")

    max_requests: int = option(16384, "requests under way at once; more wait", between=_COUNT)
    max_tokens: int = option(
        0, "tokens of the prompts under way at once, as their bytes / 4; 0 is no limit", between=_COUNT_OR_NONE
    )
    max_replica_requests: int = option(4096, "requests under way at once on one replica", between=_COUNT)
    max_replica_tokens: int = option(
        0, "tokens of the prompts under way at once on one replica; 0 is no limit", between=_COUNT_OR_NONE
    )
    max_waiting: int = option(
        1024,
        "requests that wait at once, for these limits or a group's change; more are refused",
        between=_COUNT_OR_NONE,
    )
    queue_timeout_s: float = option(
        30.0, "seconds that a request waits at the most before it is refused", between=_SECONDS
    )
    journal_kb: int = option(
        64, "KiB of each stream's sent events that are kept until it ends; 0 keeps none", between=(0, 1_048_576)
    )
    max_body_mb: float = option(32.0, "MiB of one request's body", between=(0.001, 65_536))
    connect_timeout_s: float = option(
        2.0, "seconds to connect to a replica, name resolution included; then another is tried", between=_SECONDS
    )
    first_byte_timeout_s: float = option(
        600.0, "seconds until a replica's answer begins; if it does not stream, until it ends", between=_SECONDS
    )
    between_bytes_timeout_s: float = option(
        120.0, "seconds that an answer may be silent once it has begun", between=_SECONDS
    )
    client_timeout_s: float = option(
        60.0, "seconds that a client may take to send its request, or read nothing of its answer", between=_SECONDS
    )
    heartbeat_timeout_s: float = option(
        3.0, "seconds of silence after which a replica gets no new requests", between=_SECONDS
    )
    probe_interval_s: float = option(2.0, "seconds between two looks at a --backend", between=_SECONDS)
    probe_timeout_s: float = option(2.0, "seconds that one look at a --backend may take", between=_SECONDS)
    drain_timeout_s: float = option(
        30.0,
        "seconds that running requests may go on after SIGTERM; a second SIGTERM stops at once",
        between=(0, 1_000_000),
    )

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot be served."""
        for each in fields(self):
            if each.metadata["between"] is not None:
                value, (least, most) = getattr(self, each.name), each.metadata["between"]
                if not least <= value <= most:  # NaN is not either
                    raise ConfigError(f"{flag(each.name)} is {value}, must be {least} to {most}")
        if self.routing not in set(Routing):
            raise ConfigError(f"--routing is {self.routing!r}, must be one of {', '.join(Routing)}")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise ConfigError("--tls-cert and --tls-key go together; give both or none")
        if not _HEADER_NAME.fullmatch(self.session_header):
            raise ConfigError(f"--session-header is {self.session_header!r}, which is no header's name")
        if not self.host:
            raise ConfigError("--host is empty; give an address of this machine, or 0.0.0.0 for all of them")
        if not self.proxy_token and not is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from other machines, so replicas must show a token: "
                "set --proxy-token or LOCKSTEP_PROXY_TOKEN, here and at the replicas"
            )
        for url in self.backends:
            if not is_http_url(url):
                raise ConfigError(f"--backend {url!r} cannot be dialled; it must look like http://HOST:PORT")
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
    """Whether the proxy could send requests there: a host that can be looked up, maybe a port and a path, no more."""
    if not _URL_CHARS.fullmatch(url) or not {"?", "#", "\\"}.isdisjoint(url):
        return False
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port  # ValueError for a port above 65535, and for half a bracket
    except ValueError:
        return False
    if parts.scheme not in ("http", "https") or "@" in parts.netloc or parts.netloc.endswith(":") or port == 0:
        return False
    return _is_ip_address(host) if "[" in parts.netloc else _HOST_NAME.fullmatch(host) is not None


def _is_ip_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
