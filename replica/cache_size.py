"""What each rank has to work with, and how much of it its KV cache gets, decided before a worker starts."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from replica.config import ReplicaConfig
from replica.errors import ConfigError
from replica.plan import GIB, RankPlan

_CACHE_SHARE: Final = 0.7  # of the memory that the weights leave; the rest is for activations and everybody else


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpace:
    """What each rank of a replica has to work with."""

    device: str  # of the first: cpu, or cuda:I
    free_bytes: int  # of memory, the least of any
    num_threads: int  # on the CPU


def local_space(config: ReplicaConfig) -> RankSpace:
    """That of ranks on this machine. Raises ConfigError where there are not enough devices."""
    return RankSpace(
        device=resolve_device(config),
        free_bytes=free_memory_bytes(config),
        num_threads=config.num_threads or max(1, len(os.sched_getaffinity(0)) // config.num_local_ranks),
    )


def resolve_device(config: ReplicaConfig) -> str:
    """`cpu`, or the device of this replica's first rank, such as `cuda:0`; its other ranks have the next ones.

    Asks the machine and the installed torch's name, since an engine does not import torch.
    """
    has_cuda = Path("/dev/nvidia0").exists() and not version("torch").endswith("+cpu")
    if config.device == "cuda" or (config.device == "auto" and has_cuda):
        return f"cuda:{(config.dp_rank - config.local_dp_ranks.start) * config.layout.attn_tp}"
    return "cpu"


def kv_cache_bytes(config: ReplicaConfig, *, rank: RankPlan, max_model_len: int, free_bytes: int) -> int:
    """Bytes for one rank's KV cache: what was asked for, or all that its limits can use, as far as there is room.

    `rank` has what must also fit the `free_bytes`: weights, and room for those of lost replicas. Raises ConfigError if
    the memory is not there.
    """
    room = free_bytes - rank.most_weight_bytes
    asked = config.kv_cache_gb * GIB  # a float, since it may be infinite; 0: nothing in particular
    taken = f"the weights take {rank.weight_bytes / GIB:.1f}"
    if rank.reserve_bytes:
        taken += f" and {rank.reserve_bytes / GIB:.1f} is kept for those of lost replicas (--survive)"
    if asked and asked > room:
        raise ConfigError(
            f"--kv-cache-gb is {config.kv_cache_gb:g}, but of {free_bytes / GIB:.1f} GiB free memory of a rank "
            f"{taken}: ask for less"
        )
    if asked:
        return int(asked)
    if room <= 0:
        raise ConfigError(
            f"of {free_bytes / GIB:.1f} GiB free memory of a rank {taken}: no room is left for a KV cache of "
            f"{config.model}"
        )
    blocks_per_sequence = -(-max_model_len // config.block_size)  # the last may be partly empty
    useful = config.max_num_seqs * blocks_per_sequence * config.block_size * rank.kv_bytes_per_token
    return min(useful, int(room * _CACHE_SHARE))


def weight_room_bytes(*, rank: RankPlan, cache_bytes: int, free_bytes: int) -> int:
    """How much the weights of a rank with such a KV cache may come to, when more replicas are lost than was planned."""
    unused = int((free_bytes - rank.most_weight_bytes) * _CACHE_SHARE) - cache_bytes
    return rank.most_weight_bytes + max(0, unused)


def free_memory_bytes(config: ReplicaConfig) -> int:
    """Memory that each rank of this machine can take now. Raises ConfigError where there are not enough devices."""
    num_ranks = config.num_local_ranks
    if resolve_device(config) == "cpu":
        return free_host_bytes() // num_ranks
    free_bytes = free_gpus_bytes()
    if len(free_bytes) < num_ranks:
        raise ConfigError(
            f"{config.layout.flags()} needs {num_ranks} GPUs, this machine has {len(free_bytes)}; "
            "--executor ray takes those of several"
        )
    return min(free_bytes[:num_ranks])


def free_host_bytes() -> int:
    """What the kernel counts as available, or what this control group may still take if that is less."""
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    available = next(int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return available  # no control group v2, or one without a memory controller
    return available if limit == "max" else min(available, int(limit) - used)


def free_gpus_bytes(only: str = "") -> list[int]:
    """Free memory of each GPU, or of those named, by indices or UUIDs with commas. Raises ConfigError."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    query += [f"--id={only}"] if only else []
    try:
        answer = subprocess.run(query, capture_output=True, check=True, text=True, timeout=10)
        return [int(line) << 20 for line in answer.stdout.split()]
    except (OSError, subprocess.SubprocessError, ValueError) as err:
        raise ConfigError(f"cannot ask nvidia-smi for free memory ({err}); is --device cpu meant?") from err
