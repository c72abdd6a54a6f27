"""The paged keys and values of one rank: of the KV heads that it has, of its replica's sequences."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from replica.errors import ConfigError
from replica.shards import Shards

_GIB = 2**30


class KVCache:
    """For each layer, `keys[layer]` and `values[layer]` [num_blocks, block_size, num_kv_heads, D]."""

    def __init__(
        self, shards: Shards, *, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        _, num_kv_heads, _ = shards.num_heads
        size = (num_blocks, block_size, num_kv_heads, shards.config.head_dim)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for _ in range(shards.config.num_layers):
            self.keys.append(_zeros(size, dtype, device))
            self.values.append(_zeros(size, dtype, device))
        self.num_blocks = num_blocks
        self.block_size = block_size


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros, so that a padded read is never NaN. On the CPU they take no memory until they are written."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    num_bytes = math.prod(size) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(size)  # torch.zeros would write them all


def num_blocks_in(cache_bytes: int, *, block_bytes: int, block_size: int, max_model_len: int) -> int:
    """How many whole blocks fit. Raises ConfigError if not even one sequence of `max_model_len` tokens would."""
    num_blocks = cache_bytes // block_bytes
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        raise ConfigError(
            f"the KV cache of {cache_bytes / _GIB:.3g} GiB holds {num_blocks * block_size} tokens, one sequence may "
            f"have {max_model_len}: give it {needed * block_bytes / _GIB:.3g} GiB (--kv-cache-gb) "
            f"or lower --max-model-len"
        )
    return num_blocks
