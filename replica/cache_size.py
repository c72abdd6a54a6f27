"""How much memory the KV cache gets, decided before a worker starts."""

from __future__ import annotations

import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Final

from replica.checkpoint import Checkpoint
from replica.config import ReplicaConfig
from replica.errors import ConfigError
from replica.model_config import DTYPE_BYTES, ModelConfig

GIB: Final = 1 << 30
_CACHE_SHARE: Final = 0.7  # of the memory that the weights leave; the rest is for activations and everybody else


def resolve_device(config: ReplicaConfig) -> str:
    """`cpu` or `cuda:0`. Asks the machine and the installed torch's name, since an engine does not import torch."""
    has_cuda = Path("/dev/nvidia0").exists() and not version("torch").endswith("+cpu")
    if config.device == "cuda" or (config.device == "auto" and has_cuda):
        return "cuda:0"
    return "cpu"


def weight_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of the weights once they are loaded as `dtype`."""
    tensors = checkpoint.tensors.values()
    return sum(t.num_bytes // DTYPE_BYTES.get(t.dtype, 1) for t in tensors) * DTYPE_BYTES[dtype]


def kv_cache_bytes(
    config: ReplicaConfig, *, model: ModelConfig, dtype: str, max_model_len: int, loaded_bytes: int, free_bytes: int
) -> int:
    """Bytes for the KV cache of a replica: what was asked for, or all that its limits can use, as far as there is room.

    `loaded_bytes` is what the weights take of the `free_bytes`. Raises ConfigError if the memory is not there.
    """
    room = free_bytes - loaded_bytes
    asked = int(config.kv_cache_gb * GIB)
    if asked > room:
        raise ConfigError(
            f"--kv-cache-gb is {config.kv_cache_gb:g}, but of {free_bytes / GIB:.1f} GiB free memory "
            f"the weights take {loaded_bytes / GIB:.1f}: ask for less"
        )
    if asked:
        return asked
    if room <= 0:
        raise ConfigError(
            f"{config.model} takes {loaded_bytes / GIB:.1f} GiB, free memory is {free_bytes / GIB:.1f} GiB: "
            "no room is left for a KV cache"
        )
    blocks_per_sequence = -(-max_model_len // config.block_size)  # the last may be partly empty
    useful = config.max_num_seqs * blocks_per_sequence * config.block_size * model.kv_bytes_per_token(dtype)
    return min(useful, int(room * _CACHE_SHARE))


def free_memory_bytes(device: str) -> int:
    """Memory that a worker on `device` can take now."""
    return _free_gpu_bytes() if device.startswith("cuda") else _free_host_bytes()


def _free_host_bytes() -> int:
    """What the kernel counts as available, or what this control group may still take if that is less."""
    fields = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    available = next(int(field[1]) * 1024 for field in fields if field[0] == "MemAvailable:")
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return available  # no control group v2, or one without a memory controller
    return available if limit == "max" else min(available, int(limit) - used)


def _free_gpu_bytes() -> int:
    """Free memory of the fullest GPU in sight."""
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, check=True, text=True, timeout=10)
        return min(int(line) for line in answer.stdout.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError) as err:
        raise ConfigError(f"cannot ask nvidia-smi for free memory ({err}); is --device cpu meant?") from err
