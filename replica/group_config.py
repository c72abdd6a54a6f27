"""What all replicas of a group must have in common, as the clock compares it, field by field."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict

from replica.cache_size import resolve_device
from replica.checkpoint import Checkpoint, model_hash
from replica.config import ReplicaConfig
from replica.model_config import ModelConfig

_SHARED_OPTIONS = ("block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "progress_deadline_s")


def resolve_dtype(config: ReplicaConfig, model: ModelConfig) -> str:
    """What the model runs in: --dtype, or the checkpoint's."""
    return model.dtype if config.dtype == "auto" else config.dtype


def group_config(config: ReplicaConfig, model: ModelConfig, checkpoint: Checkpoint) -> dict[str, str]:
    """Names and values. Replicas that differ in one would not compute alike, or not at the same time."""
    dtype = resolve_dtype(config, model)
    return {
        "version": importlib.metadata.version("lockstep-serving"),
        "model_hash": model_hash(checkpoint, dtype),
        "dtype": dtype,
        "device": resolve_device(config).partition(":")[0],
        **{name: str(degree) for name, degree in asdict(config.layout).items()},
        **{name: str(getattr(config, name)) for name in _SHARED_OPTIONS},
    }
