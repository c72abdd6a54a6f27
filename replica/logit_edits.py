"""What a batch's sequences want of the sampler beyond the numbers that every row has: edits of logits, log
probabilities. A step in which nobody wants any costs one look at each sequence.

The worker keeps nothing of a sequence, so each step brings all that its rows need. That makes preemption, a new epoch
and a resumed stream nothing special: what a row needs is a function of its prompt and its output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from math import inf

import numpy as np

from replica.frames import LogitEdits, Logprobs, LogprobsWanted
from replica.request import Sequence, TokenLogprobs

Rows = list[tuple[int, Sequence]]  # number of a row among the step's N, the sequence that is sampled there


def logit_edits(rows: Rows) -> LogitEdits | None:
    """The edits that these rows want; None if none does."""
    penalized = [(row, s) for row, s in rows if s.params.has_penalty]
    biases = [(row, token_id, bias) for row, s in rows for token_id, bias in _biases(s)]
    masks = [(row, s.mask) for row, s in rows if s.mask is not None]
    if not (penalized or biases or masks):
        return None
    seen = [_seen(s) for _, s in penalized]
    bias_rows, bias_ids, bias_values = zip(*biases, strict=True) if biases else ((), (), ())
    return LogitEdits(
        bias_rows=np.array(bias_rows, np.int32),
        bias_ids=np.array(bias_ids, np.int32),
        biases=np.array(bias_values, np.float32),
        penalty_rows=np.array([row for row, _ in penalized], np.int32),
        repetition=np.array([s.params.repetition_penalty for _, s in penalized], np.float32),
        presence=np.array([s.params.presence_penalty for _, s in penalized], np.float32),
        frequency=np.array([s.params.frequency_penalty for _, s in penalized], np.float32),
        seen_rows=np.repeat(np.arange(len(seen), dtype=np.int32), [len(tokens) for tokens in seen]),
        seen_ids=_integers(chain.from_iterable(seen)),
        seen_counts=_integers(chain.from_iterable(tokens.values() for tokens in seen)),
        mask_rows=np.array([row for row, _ in masks], np.int32),
        masks=np.frombuffer(b"".join(mask for _, mask in masks), np.int32).reshape(len(masks), -1)
        if masks
        else np.zeros((0, 0), np.int32),
    )


def banned_ids(sequence: Sequence) -> frozenset[int]:
    """The tokens that would end the sequence too early."""
    params = sequence.params
    return params.stop_token_ids if len(sequence.output_ids) < params.min_tokens else frozenset()


def logprobs_wanted(rows: Rows, prompt_rows: list[tuple[int, Sequence, int]]) -> LogprobsWanted | None:
    """What to report of sampled rows, and of prompt rows: number of the row, sequence, and the prompt's next token."""
    wanted = [(row, -1, s.params.logprobs) for row, s in rows if s.params.logprobs is not None]
    wanted += [(row, target, s.params.prompt_logprobs or 0) for row, s, target in prompt_rows]
    if not wanted:
        return None
    wanted.sort()
    return LogprobsWanted(
        rows=np.array([row for row, _, _ in wanted], np.int32),
        targets=np.array([target for _, target, _ in wanted], np.int32),
        num_top=max(num_top for _, _, num_top in wanted),
    )


def token_logprobs(found: Logprobs, index: int, num_top: int) -> TokenLogprobs:
    """One row of what was reported."""
    ids, values = found.token_ids[index].tolist(), found.values[index].tolist()
    return TokenLogprobs(ids[0], values[0], tuple(zip(ids[1 : num_top + 1], values[1 : num_top + 1], strict=True)))


def _biases(sequence: Sequence) -> Iterable[tuple[int, float]]:
    params = sequence.params
    if sequence.mask is None and params.min_tokens and (banned := banned_ids(sequence)):
        return (*params.logit_bias, *((token_id, -inf) for token_id in sorted(banned)))
    return params.logit_bias  # a mask has the bans in it


def _seen(sequence: Sequence) -> dict[int, int]:
    """How often the output has each token, with 0 for those of the prompt alone. Counts only what is new."""
    seen, output_ids = sequence.seen, sequence.output_ids
    if not seen:
        seen.update(dict.fromkeys(sequence.prompt_ids, 0))
    for token_id, count in Counter(output_ids[sequence.num_seen :]).items():
        seen[token_id] = seen.get(token_id, 0) + count
    sequence.num_seen = len(output_ids)
    return seen


def _integers(values: Iterable[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.fromiter(values, np.int32)
