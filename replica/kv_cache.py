"""The paged keys and values of one rank: of the KV heads that it has, of its replica's sequences."""

from __future__ import annotations

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
        # Zeros, not empty: on the CPU such pages take no memory until they are written, and a padded read is never NaN.
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        for _ in range(shards.config.num_layers):
            self.keys.append(torch.zeros(size, dtype=dtype, device=device))
            self.values.append(torch.zeros(size, dtype=dtype, device=device))
        self.num_blocks = num_blocks
        self.block_size = block_size


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
