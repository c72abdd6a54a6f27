"""The steps that a replica takes before its first request, so that no client waits for a first time. No torch."""

from __future__ import annotations

from typing import Final

import numpy as np

from replica.frames import Init, StepInput

WARM_UP_TOKENS: Final = 256  # enough for every code path; more would delay a large model on a CPU
WARM_UP_SEQS: Final = 32


def warm_up_steps(init: Init) -> list[StepInput]:
    """A prefill, a decode and an empty step, which write no keys and values and whose tokens nobody wants."""
    num_tokens = min(init.max_num_batched_tokens, init.max_model_len, WARM_UP_TOKENS)
    num_seqs = min(init.max_num_batched_tokens, init.max_num_seqs, WARM_UP_SEQS)
    return [
        _blank_step(num_decodes=0, lengths=[num_tokens], block_size=init.block_size),
        _blank_step(num_decodes=num_seqs, lengths=[1] * num_seqs, block_size=init.block_size),
        _blank_step(num_decodes=0, lengths=[], block_size=init.block_size),
    ]


def _blank_step(*, num_decodes: int, lengths: list[int], block_size: int) -> StepInput:
    """A step of sequences of token 0 that begin here, whose keys and values are written nowhere; each is sampled."""
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int32))).astype(np.int32)  # [S + 1]
    T, S = int(starts[-1]), len(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths]) if lengths else np.zeros(0)
    return StepInput(
        step=0,
        num_decodes=num_decodes,
        token_ids=np.zeros(T, np.int32),
        positions=positions.astype(np.int32),
        slots=np.full(T, -1, np.int32),
        query_starts=starts,
        context_lens=np.array(lengths, np.int32),
        block_tables=np.zeros((S, -(-max(lengths, default=0) // block_size)), np.int32),
        sample_rows=starts[1:] - 1,
        temperature=np.ones(S, np.float32),
        top_k=np.full(S, 2, np.int32),
        top_p=np.full(S, 0.9, np.float32),
        min_p=np.zeros(S, np.float32),
        seeds=np.zeros(S, np.uint64),
        choices=np.zeros(S, np.int32),
        output_indices=np.zeros(S, np.int32),
    )
