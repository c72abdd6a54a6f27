"""Random tensors, a random paged cache and tolerances for the tests of `kernels`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Of the largest value; a dtype's rounding, some four times over. FP8 is compared after equal quantisation.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Equal within the tolerance of `actual`'s dtype; NaN never is."""
    limit = TOLERANCE[actual.dtype] * max(1.0, float(expected.abs().max())) if expected.numel() else 0.0
    torch.testing.assert_close(actual.to(torch.float64), expected.to(torch.float64), rtol=0, atol=limit)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, the same for the same arguments."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32).to(dtype)


class Pages:
    """Random keys and values of sequences in a cache whose unwritten slots are NaN."""

    def __init__(
        self, lens: list[int], *, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
    ) -> None:
        self.lens = torch.tensor(lens, dtype=torch.int32)
        counts = [-(-length // block_size) for length in lens]
        shape = (sum(counts) + 2, block_size, num_kv_heads, head_dim)
        self.k_cache, self.v_cache = torch.full(shape, math.nan, dtype=dtype), torch.full(shape, math.nan, dtype=dtype)
        free = (torch.randperm(sum(counts) + 1, generator=torch.Generator().manual_seed(0)) + 1).tolist()
        self.tables = torch.zeros((len(lens), max(counts, default=0)), dtype=torch.int32)
        self.keys = [random(n, num_kv_heads, head_dim, seed=10 + s, dtype=dtype) for s, n in enumerate(lens)]
        self.values = [random(n, num_kv_heads, head_dim, seed=90 + s, dtype=dtype) for s, n in enumerate(lens)]
        for s, count in enumerate(counts):
            for b in range(count):
                block = self.tables[s, b] = free.pop()
                tokens = slice(b * block_size, (b + 1) * block_size)
                num_tokens = len(self.keys[s][tokens])
                self.k_cache[block, :num_tokens] = self.keys[s][tokens]
                self.v_cache[block, :num_tokens] = self.values[s][tokens]

    def attend(self, query: Tensor, s: int, length: int, scale: float) -> Tensor:
        """query [Hq, D] over the first `length` positions of sequence s, one head at a time in float64."""
        group = query.shape[0] // self.keys[s].shape[1]
        rows = []
        for head, q in enumerate(query.double()):
            keys, values = (
                self.keys[s][:length, head // group].double(),
                self.values[s][:length, head // group].double(),
            )
            rows.append(torch.softmax(keys @ q * scale, dim=0) @ values)
        return torch.stack(rows)
