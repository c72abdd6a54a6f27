"""Attention of a step's sequences over their pages: those that decode, then chunks of prompts."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.attention_decode import attention_decode
from kernels.attention_prefill import attention_prefill
from kernels.step_plan import StepPlan


def paged_attention(q: Tensor, plan: StepPlan, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """q [T, Hq, D] -> [T, Hq, D]. The caches [num_blocks, block_size, Hkv, D] hold the step's own keys and values."""
    tables = plan.tables
    n = tables.decode_lens.shape[0]
    parts = []
    if n:
        parts.append(attention_decode(q[:n], k_cache, v_cache, tables.decode_tables, tables.decode_lens, scale))
    if len(q) > n or not n:  # a step of no tokens goes this way too
        chunks = (tables.prefill_tables, tables.prefill_starts, tables.prefill_lens)
        parts.append(attention_prefill(q[n:], k_cache, v_cache, *chunks, scale))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
