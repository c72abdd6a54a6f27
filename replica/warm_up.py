"""What a replica computes before its first request, so that no client waits for a first time. No torch."""

from __future__ import annotations

from typing import Final

from replica.frames import Init
from replica.request import SamplingParams, Sequence

WARM_UP_TOKENS: Final = 256  # enough for every code path; more would delay a large model on a CPU
WARM_UP_SEQS: Final = 32


def warm_up_sequences(init: Init, *, num_blocks: int) -> list[Sequence]:
    """A long prompt and many short ones, to be prefilled together and then decoded. They fit the limits of any replica.

    The first replica of a group decodes one token more, so that the others take a step without tokens.
    """
    max_tokens = min(3 if init.rank == 0 else 2, init.max_model_len)
    budget = min(init.max_num_batched_tokens, WARM_UP_TOKENS)
    num_seqs = min(init.max_num_seqs, budget, WARM_UP_SEQS)
    room = min(init.max_model_len, num_blocks * init.block_size) + 1 - max_tokens
    longest = max(1, min(budget - (num_seqs - 1), room))
    params = SamplingParams(max_tokens=max_tokens, top_k=2, top_p=0.9, seed=0)
    lengths = [longest] + [1] * (num_seqs - 1)
    return [Sequence(request_id="warm-up", choice=0, prompt_ids=[0] * length, params=params) for length in lengths]
