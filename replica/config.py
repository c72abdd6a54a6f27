"""All settings of `replica serve`. Built in cli.py, checked here, passed on, never changed."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from replica.errors import ConfigError

DTYPES: Final = ("auto", "bfloat16", "float16", "float32")
DEVICES: Final = ("auto", "cpu", "cuda")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """All settings of one replica. The defaults of the command line come from here."""

    model: Path  # folder of a Hugging Face checkpoint
    served_model_name: str = ""  # "" means the folder's name
    host: str = "127.0.0.1"
    port: int = 8001  # 0 picks a free port; the chosen one is logged
    advertise_url: str = ""  # "" means http://host:port, with this machine's address where host is a wildcard
    proxy_urls: tuple[str, ...] = ()
    proxy_token: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)  # "" means that clients need none
    group: str = ""  # "" means a group of its own, named by the replica's id

    dtype: str = "auto"  # auto takes the checkpoint's
    device: str = "auto"  # auto takes cuda where there is one
    max_model_len: int = 0  # tokens, prompt and output; 0 takes the checkpoint's
    max_num_seqs: int = 256  # sequences in one step
    max_num_batched_tokens: int = 2048  # tokens in one step
    kv_cache_gb: float = 0.0  # GiB for the KV cache; 0 sizes it from max_num_seqs, max_model_len and free memory
    block_size: int = 16  # tokens per KV block
    num_threads: int = 0  # CPU threads of each rank; 0 shares the cores between this node's ranks

    max_waiting: int = 1024  # sequences that wait to be scheduled; more are refused with 503
    max_body_mb: float = 32.0  # MiB of one request's body
    progress_deadline_s: float = 10.0  # work waits and no step ends for so long: /health says 503
    startup_timeout_s: float = 600.0  # a worker must have loaded its weights by then
    drain_timeout_s: float = 30.0  # after SIGTERM, running requests may go on for so long
    report_interval_s: float = 1.0  # a load report at least so often

    def __post_init__(self) -> None:
        """Raises ConfigError for a value that cannot be served."""
        at_least_one = ("max_num_seqs", "max_num_batched_tokens", "block_size", "max_waiting")
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}, must be at least 1")
        positive = ("max_body_mb", "progress_deadline_s", "startup_timeout_s", "report_interval_s")
        for name in positive:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}, must be above 0")
        for name in ("max_model_len", "num_threads", "kv_cache_gb", "drain_timeout_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise ConfigError(f"{_flag(name)} is {getattr(self, name)}, must not be negative")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"--port is {self.port}, must be 0 to 65535")
        if self.dtype not in DTYPES:
            raise ConfigError(f"--dtype is {self.dtype!r}, must be one of {', '.join(DTYPES)}")
        if self.device not in DEVICES:
            raise ConfigError(f"--device is {self.device!r}, must be one of {', '.join(DEVICES)}")
        for url in (*self.proxy_urls, *filter(None, [self.advertise_url])):
            if not url.startswith(("http://", "https://")):
                raise ConfigError(f"{url!r} is not a URL; it must begin with http:// or https://")

    @property
    def model_name(self) -> str:
        """The name clients ask for."""
        return self.served_model_name or self.model.resolve().name


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
