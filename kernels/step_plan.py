"""What all layers need to know of a step: where its tokens stand and its sequences' pages lie, worked out once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTables:
    """A step of T tokens as it comes: one token each of the sequences that decode, then the prompts' chunks. All int32
    but cos_sin."""

    cos_sin: Tensor  # [P, D] float32, each position's D/2 cosines, then its D/2 sines
    positions: Tensor  # [T]
    slots: Tensor  # [T] block_id * block_size + offset; nothing is written at -1
    decode_tables: Tensor  # [decodes, B]
    decode_lens: Tensor  # [decodes] context with the step's own token
    prefill_tables: Tensor  # [chunks, B]
    prefill_starts: Tensor  # [chunks + 1] first row of each chunk, counted from the first chunk's
    prefill_lens: Tensor  # [chunks]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeChunk:
    """Some of the sequences that decode, of similar lengths: n of them, L positions that the longest has."""

    sequences: slice  # of the plan's `order`
    blocks: Tensor  # [n * B] int64, those of a sequence after one another; any block past its last
    max_len: int  # L
    padding: Tensor  # [...] int64 among the n * B * block_size slots: those past a sequence's end
    mask: Tensor | None  # [n, 1, 1, L] -inf past a sequence's end, else 0; None: all are L long


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChunk:
    """A run of tokens of one sequence, which end its context."""

    rows: slice  # of the step's tokens
    blocks: Tensor  # [B] int64
    context_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuPlan:
    """What a CPU works out."""

    cosines: Tensor  # [T, 1, D] float32, of each pair twice
    sines: Tensor  # [T, 1, D] float32, the first half negative
    places: Tensor  # [written] int64: the slots that are written
    written: Tensor | None  # [written] int64: the tokens they belong to; None: all
    num_decodes: int
    decodes: tuple[DecodeChunk, ...]
    order: Tensor | None  # [decodes] int64: the sequences by length; None: as they come
    ranks: Tensor | None  # [decodes] int64: where each is in `order`
    prompts: tuple[PromptChunk, ...]
    causal: Tensor | None  # the mask of all prompts, see attention_cpu.py; None: there are none


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """A step, and what its device works out of it. Triton's kernels take the tables."""

    tables: StepTables
    cpu: CpuPlan | None = None  # None too where code of our own takes the tables (bf16_cpu.py)


def plan_step(k_cache: Tensor, tables: StepTables) -> StepPlan:
    """The plan of a step over caches like k_cache [num_blocks, block_size, Hkv, D]."""
    return StepPlan(tables=tables)
