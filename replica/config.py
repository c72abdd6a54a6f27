"""All settings of `replica serve`. Built in cli.py, checked here, passed on, never changed."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from replica.errors import ConfigError
from replica.layout import Layout

WILDCARDS: Final = ("", "0.0.0.0", "::")  # addresses to listen at, and none to dial
DTYPES: Final = ("auto", "bfloat16", "float16", "float32")
DEVICES: Final = ("auto", "cpu", "cuda")
EXECUTORS: Final = ("mp", "ray")
MIN_SECRET_BYTES: Final = 16
_RAY_ADDRESS: Final = re.compile(r"auto|[^/\s]+:\d{1,5}")  # not ray://, by which actors could not be reached
MIN_BODY_MB: Final = 1 / 1024  # less holds no request
MAX_BODY_MB: Final = 4096.0


def option(default: Any, help_text: str, *, kind: type | None = None, is_secret: bool = False) -> Any:
    """A field that is also an option of the command line; `help_text` states unit and effect.

    It is of this kind, or of the default's type.
    """
    return field(default=default, repr=not is_secret, metadata={"help": help_text, "kind": kind or type(default)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """All settings of one replica. The command line takes its options, defaults and help from here.

    A supervisor that starts several gives each its own port and dp_rank.
    """

    model: Path = field(metadata={"help": "folder of a Hugging Face checkpoint"})
    layout: Layout = field(default_factory=Layout)  # from --dp, --tp, --nnodes and so on
    dp_rank: int = 0  # which replica of the layout this is
    served_model_name: str = option("", "name that clients ask for; the folder's name by default")
    host: str = option("127.0.0.1", "address to listen at; 0.0.0.0 listens at all of this machine's")
    port: int = option(
        8001, "TCP port of the first replica, the next has the next; 0 picks free ones, which are logged"
    )
    advertise_url: str = option("", "URL at which proxies reach this replica; by default http://HOST:PORT")
    proxy_urls: tuple[str, ...] = option((), "URL of a proxy to serve behind; may be given several times")
    proxy_token: str = option("", "secret that the proxies ask replicas for", is_secret=True)
    api_key: str = option("", "secret that clients must send; by default none is needed", is_secret=True)
    group: str = option(
        "",
        "name of the group that steps together; by default made of this machine's name, or of --master-addr if there "
        "are several machines, and a port",
    )
    group_secret: str = option(
        "", "secret that the group's members share; by default one is made for those of this command", is_secret=True
    )
    survive: int | None = option(
        None,
        "replicas that the group can lose: memory is kept free for their share of the weights; by default 1 of several",
        kind=int,
    )
    node_rank: int = option(0, "which of the --nnodes machines this is, from 0")
    master_addr: str = option(
        "127.0.0.1", "address of the clock of a group of several replicas, on the machine of --node-rank 0"
    )
    master_port: int = option(0, "TCP port of that clock; 0 picks a free one")
    redis_url: str = option(
        "",
        "Redis that keeps the group's membership, as redis://, rediss://, unix:// or redis+sentinel://; by default the "
        "machine of --node-rank 0 runs one for itself",
        is_secret=True,
    )

    executor: str = option("mp", "where the ranks run: mp (on this machine), ray (on the nodes of a Ray cluster)")
    ray_address: str = option(
        "auto", "HOST:PORT of the head of --executor ray's cluster; auto takes the one that this machine is a node of"
    )
    dtype: str = option("auto", f"what the weights are computed in: {', '.join(DTYPES)} (the checkpoint's)")
    device: str = option("auto", f"where the model runs: {', '.join(DEVICES)}; auto takes cuda where there is one")
    max_model_len: int = option(0, "tokens of a prompt and its answer together; 0 takes the checkpoint's limit")
    max_num_seqs: int = option(256, "sequences in one step; more wait")
    max_num_batched_tokens: int = option(2048, "tokens in one step; long prompts are computed in such chunks")
    max_prefill_tokens: int = option(
        512,
        "prompt tokens in a step beside sequences that decode: a stream waits for no more than such a step; fewer make "
        "streams smoother, more bring the first token of long prompts sooner",
    )
    kv_cache_gb: float = option(
        0.0, "GiB for the KV cache of each rank; 0 sizes it from the limits above and free memory"
    )
    block_size: int = option(16, "tokens per block of the KV cache")
    no_prefix_cache: bool = option(False, "compute every prompt whole, also where the KV cache has its beginning")
    num_threads: int = option(
        0,
        "CPU threads of each rank, which reserves as many CPUs of a Ray cluster; 0 shares this machine's cores between "
        "its ranks, and is 1 with --executor ray",
    )

    max_waiting: int = option(1024, "sequences that may wait to be scheduled; more are refused with 503")
    max_body_mb: float = option(
        0.0, "MiB of one request's body, more is refused with 413; 0 takes what --max-model-len can need, 1 to 32"
    )
    client_timeout_s: float = option(60.0, "seconds without a byte of a body, or read by a client, that end a request")
    prefill_delay_s: float = option(
        0.02, "seconds that a prompt may wait for prompts of the group's other replicas, while some replica decodes"
    )
    progress_deadline_s: float = option(
        10.0,
        "seconds without a step, while work waits, after which /health is 503 and a group goes on without the replica "
        "that holds it up",
    )
    startup_timeout_s: float = option(600.0, "seconds in which all replicas must be there and ready")
    drain_timeout_s: float = option(30.0, "seconds that running requests may go on after SIGTERM")
    report_interval_s: float = option(1.0, "seconds between load reports to a proxy, at most")

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot be served."""
        at_least_one = ("max_num_seqs", "max_num_batched_tokens", "max_prefill_tokens", "block_size", "max_waiting")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}, must be at least 1")
        positive = ("client_timeout_s", "progress_deadline_s", "startup_timeout_s", "report_interval_s")
        for name in positive:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}, must be above 0")
        for name in ("max_model_len", "num_threads", "kv_cache_gb", "drain_timeout_s", "prefill_delay_s", "node_rank"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}, must not be negative")
        for name in ("port", "master_port"):
            if not 0 <= getattr(self, name) <= 65535:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}, must be 0 to 65535")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype is {self.dtype!r}, must be one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ConfigError(f"--device is {self.device!r}, must be one of {', '.join(DEVICES)}")
        if self.executor not in EXECUTORS:
            raise ConfigError(f"--executor is {self.executor!r}, must be one of {', '.join(EXECUTORS)}")
        if self.executor == "ray" and not _RAY_ADDRESS.fullmatch(self.ray_address):
            raise ConfigError(
                f"--ray-address is {self.ray_address!r}, must be auto or HOST:PORT of a Ray cluster's head"
            )
        if self.max_body_mb and not MIN_BODY_MB <= self.max_body_mb <= MAX_BODY_MB:
            raise ConfigError(
                f"--max-body-mb is {self.max_body_mb}, must be 0 or from {MIN_BODY_MB:.4f} to {MAX_BODY_MB:g}"
            )
        for url in self.proxy_urls:
            _check_url("--proxy-url", url)
        if self.advertise_url:
            _check_url("--advertise-url", self.advertise_url)
        self._check_group()

    def _check_group(self) -> None:
        nnodes, num_local = self.layout.nnodes, len(self.local_dp_ranks)
        if self.port and self.port + num_local - 1 > 65535:
            raise ConfigError(f"--port is {self.port}, which leaves no ports for {num_local} replicas (--dp)")
        if num_local > 1 and self.advertise_url:
            raise ConfigError(f"--advertise-url names one replica, but there are {num_local} (--dp); leave it out")
        if self.group_secret and len(self.group_secret.encode()) < MIN_SECRET_BYTES:
            raise ConfigError(f"--group-secret has fewer than {MIN_SECRET_BYTES} bytes; take a longer one")
        self.layout.losses(self.survive)
        if self.node_rank >= nnodes:
            raise ConfigError(f"--node-rank is {self.node_rank}, must be below the {nnodes} machines of --nnodes")
        if nnodes > 1 and self.master_addr in WILDCARDS:
            raise ConfigError(
                f"--master-addr is {self.master_addr!r}: the other machines of --nnodes must be told where that is"
            )
        if nnodes > 1 and not self.master_port:
            raise ConfigError(f"--master-port is 0: all {nnodes} machines of --nnodes must be told the same port")
        if nnodes > 1 and not self.group_secret:
            raise ConfigError(
                f"--group-secret is missing: all {nnodes} machines of --nnodes must be given the same secret, "
                f"of {MIN_SECRET_BYTES} bytes or more"
            )

    @property
    def local_dp_ranks(self) -> range:
        """The replicas of this machine."""
        count = self.layout.dp // self.layout.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

    @property
    def num_local_ranks(self) -> int:
        """The ranks of this machine's replicas."""
        return len(self.local_dp_ranks) * self.layout.attn_tp

    @property
    def model_name(self) -> str:
        """The name clients ask for."""
        return self.served_model_name or self.model.resolve().name

    def to_json(self) -> str:
        """All settings, secrets included, for the pipe to an engine."""
        return json.dumps(asdict(self) | {"model": str(self.model)})

    @classmethod
    def from_json(cls, text: str) -> ReplicaConfig:
        """The inverse of `to_json`."""
        values = json.loads(text)
        typed = {
            "model": Path(values["model"]),
            "proxy_urls": tuple(values["proxy_urls"]),
            "layout": Layout(**values["layout"]),
        }
        return cls(**values | typed)


def _check_url(option_name: str, url: str) -> None:
    """Raises ConfigError unless this is the URL of a server's root that can be dialled."""
    shown = f"{option_name} is {url[:200]!r}"
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{shown}, which is not a URL; it must begin with http:// or https://")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
        host.encode("idna")  # as the resolver will
    except ValueError as err:  # UnicodeError is one
        raise ConfigError(f"{shown}, whose host or port is none: {err}") from err
    if not host or not host.strip(".") or any(c.isspace() for c in url) or port == 0:
        raise ConfigError(f"{shown}, must name a host and a port from 1 to 65535")
    if "@" in parts.netloc or parts.path not in ("", "/") or "?" in url or "#" in url:
        raise ConfigError(f"{shown}, must be http://HOST:PORT without user, path, query or fragment")


def flag(name: str) -> str:
    """A field's option on the command line. A field that holds several values is repeated in the singular."""
    return "--" + ("proxy-url" if name == "proxy_urls" else name.replace("_", "-"))
