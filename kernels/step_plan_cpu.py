"""The plan of a step on the CPU: rows to gather, where sequences end, and rotations. numpy does it: a fifth of the time
that torch takes for tensors so small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import bf16_cpu
from kernels.step_plan import CpuPlan, DecodeChunk, PromptChunk, StepPlan, StepTables

CHUNK_TOKENS: Final = 1280  # of all sequences of a decode chunk; 640 KiB of keys for 4 heads of 64 in bfloat16
SIMILAR: Final = 2  # the longest sequence of a decode chunk has at most so many times the tokens of the shortest
TILE: Final = 256  # queries of a prompt at a time

I32 = NDArray[np.int32]


def plan_step_cpu(k_cache: Tensor, tables: StepTables) -> StepPlan:
    """See step_plan.plan_step."""
    if bf16_cpu.serves(k_cache):
        return StepPlan(tables=tables)
    block_size, dtype = k_cache.shape[1], k_cache.dtype
    lens = tables.decode_lens.numpy()
    order = np.argsort(-lens, kind="stable")
    is_sorted = bool((order[:-1] < order[1:]).all())
    slots = tables.slots.numpy()
    is_whole = not len(slots) or int(slots.min()) >= 0
    written = None if is_whole else np.flatnonzero(slots >= 0)
    cos, sin = tables.cos_sin.index_select(0, tables.positions).unsqueeze(1).chunk(2, dim=-1)  # [T, 1, D/2] each
    plan = CpuPlan(
        cosines=torch.cat((cos, cos), dim=-1),
        sines=torch.cat((-sin, sin), dim=-1),
        places=torch.from_numpy((slots if written is None else slots[written]).astype(np.int64)),
        written=None if written is None else torch.from_numpy(written),
        num_decodes=len(lens),
        decodes=tuple(_decode_chunks(tables.decode_tables.numpy()[order], lens[order], block_size, dtype)),
        order=None if is_sorted else torch.from_numpy(order),
        ranks=None if is_sorted else torch.from_numpy(np.argsort(order)),
        prompts=tuple(_prompt_chunks(tables, len(lens), block_size)),
        causal=causal_mask(int(tables.prefill_lens.max()), dtype) if len(tables.prefill_lens) else None,
    )
    return StepPlan(tables=tables, cpu=plan)


def _decode_chunks(tables: I32, lens: I32, block_size: int, dtype: torch.dtype) -> Iterator[DecodeChunk]:
    """tables [decodes, B], lens [decodes], longest first. Sequences without tokens are in no chunk."""
    first = 0
    num_sequences = int(np.count_nonzero(lens))
    while first < num_sequences:
        max_len = int(lens[first])
        num_similar = int(np.searchsorted(-lens[:num_sequences], -max_len / SIMILAR, side="right"))
        last = min(num_similar, first + max(1, CHUNK_TOKENS // max_len))
        num_blocks = -(-max_len // block_size)
        is_past = np.arange(num_blocks * block_size) >= lens[first:last, None]  # [n, B * block_size]
        mask = None
        if lens[last - 1] < max_len:
            bias = np.where(is_past[:, None, None, :max_len], np.float32(-np.inf), np.float32(0))
            mask = torch.from_numpy(bias).to(dtype)
        yield DecodeChunk(
            sequences=slice(first, last),
            blocks=torch.from_numpy(tables[first:last, :num_blocks].astype(np.int64).ravel()),
            max_len=max_len,
            padding=torch.from_numpy(np.flatnonzero(is_past)),
            mask=mask,
        )
        first = last


def _prompt_chunks(tables: StepTables, num_decodes: int, block_size: int) -> Iterator[PromptChunk]:
    bounds = (tables.prefill_starts.numpy() + num_decodes).tolist()
    for s, context_len in enumerate(tables.prefill_lens.tolist()):
        if bounds[s + 1] > bounds[s]:
            blocks = tables.prefill_tables[s, : -(-context_len // block_size)].to(torch.int64)
            yield PromptChunk(rows=slice(bounds[s], bounds[s + 1]), blocks=blocks, context_len=context_len)


def causal_mask(width: int, dtype: torch.dtype) -> Tensor:
    """[TILE, TILE + width]: row i is 0 up to column width + i, and -inf after it."""
    return torch.full((TILE, TILE + width), -torch.inf, dtype=dtype).triu_(width + 1)
