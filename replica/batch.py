"""One step's work, and the arrays that a worker gets of it.

T tokens, S sequences, B the most blocks of a sequence in this step, N sampled rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, compress

import numpy as np
from numpy.typing import NDArray

from replica.frames import F32, I32, U64, Logprobs, StepInput
from replica.logit_edits import logit_edits, logprobs_wanted, token_logprobs
from replica.request import Sequence, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step computes: `num_new[i]` more tokens of `sequences[i]`. The first `num_decodes` sequences have
    history and one new token; the rest are prefill chunks. A sequence is sampled if the step reaches its last token."""

    sequences: tuple[Sequence, ...] = ()
    num_new: tuple[int, ...] = ()
    is_sampled: tuple[bool, ...] = ()
    num_decodes: int = 0
    # How many tokens of each sequence's prompt have their log probabilities wanted; empty if nobody wants any.
    num_prompt_rows: tuple[int, ...] = ()

    @property
    def decode_tokens(self) -> int:
        """Tokens of the sequences that decode."""
        return self.num_decodes

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prompts."""
        return sum(self.num_new[self.num_decodes :])

    def decodes(self) -> Batch:
        """The batch without its prefill chunks."""
        n = self.num_decodes
        return Batch(
            sequences=self.sequences[:n], num_new=self.num_new[:n], is_sampled=self.is_sampled[:n], num_decodes=n
        )

    @property
    def num_rows(self) -> int:
        """Rows of logits: N of the frame."""
        return sum(self.is_sampled) + sum(self.num_prompt_rows)

    def rows(self) -> Iterator[tuple[int, Sequence, int | None]]:
        """The rows of logits: sequence (its number and itself), and the prompt position that the row follows; None
        where a token is sampled."""
        for i, sequence in enumerate(self.sequences):
            if self.num_prompt_rows:
                start = max(sequence.num_computed, len(sequence.prompt_logprobs))
                yield from ((i, sequence, position) for position in range(start, start + self.num_prompt_rows[i]))
            if self.is_sampled[i]:
                yield i, sequence, None

    @property
    def sampled(self) -> list[Sequence]:
        """The sequences that get a token from this step, in the order of the worker's answer."""
        return list(compress(self.sequences, self.is_sampled))


class RowTable:
    """What a step needs to know of running sequences, as arrays: each keeps one row from admission on, so that a
    step gathers rows instead of walking every sequence's blocks and parameters."""

    def __init__(self, *, num_rows: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._free = list(range(num_rows - 1, -1, -1))
        self._block_tables: I32 = np.zeros((num_rows, max_blocks), np.int32)
        self._temperature: F32 = np.zeros(num_rows, np.float32)
        self._top_k: I32 = np.zeros(num_rows, np.int32)
        self._top_p: F32 = np.zeros(num_rows, np.float32)
        self._min_p: F32 = np.zeros(num_rows, np.float32)
        self._seeds: U64 = np.zeros(num_rows, np.uint64)
        self._choices: I32 = np.zeros(num_rows, np.int32)

    @property
    def has_free(self) -> bool:
        """Whether one more sequence can take a row."""
        return bool(self._free)

    def take(self, sequence: Sequence) -> None:
        """Gives the sequence a row that holds its sampling parameters and no blocks."""
        row = sequence.row = self._free.pop()
        params = sequence.params
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p
        self._min_p[row] = params.min_p
        self._seeds[row] = params.seed
        self._choices[row] = sequence.choice

    def append_blocks(self, sequence: Sequence, blocks: list[int]) -> None:
        """The sequence, whose `block_ids` end with `blocks`, has just got them."""
        end = len(sequence.block_ids)
        self._block_tables[sequence.row, end - len(blocks) : end] = blocks

    def give_back(self, sequence: Sequence) -> None:
        """The sequence runs no more. Its row's block ids become 0, as the frame wants them past a last block."""
        self._block_tables[sequence.row, : len(sequence.block_ids)] = 0
        self._free.append(sequence.row)
        sequence.row = -1

    def step_input(self, batch: Batch, *, step: int, group_tokens: I32) -> StepInput:
        """The frame of a batch that was scheduled and is not committed yet. `group_tokens`: see StepInput."""
        num_sequences = len(batch.sequences)
        rows = np.fromiter((s.row for s in batch.sequences), np.intp, num_sequences)
        starts = np.fromiter((s.num_computed for s in batch.sequences), np.int32, num_sequences)
        num_new = np.array(batch.num_new, np.int32)
        query_starts = np.zeros(num_sequences + 1, np.int32)
        np.cumsum(num_new, out=query_starts[1:])
        num_tokens = int(query_starts[-1])

        sequence_of_token = np.repeat(np.arange(num_sequences), num_new)  # [T]
        positions = np.arange(num_tokens, dtype=np.int32) + (starts - query_starts[:-1])[sequence_of_token]
        width = max((len(s.block_ids) for s in batch.sequences), default=0)
        block_tables = self._block_tables[rows, :width]
        blocks = block_tables[sequence_of_token, positions // self._block_size]

        logits = _LogitRows.of(batch, query_starts)
        logit_rows = rows[logits.owners]
        return StepInput(
            step=step,
            num_decodes=batch.num_decodes,
            token_ids=np.fromiter(chain.from_iterable(_new_tokens(batch)), np.int32, num_tokens),
            positions=positions,
            slots=blocks * self._block_size + positions % self._block_size,
            query_starts=query_starts,
            context_lens=starts + num_new,
            block_tables=block_tables,
            sample_rows=logits.tokens,
            temperature=np.where(logits.is_sampled, self._temperature[logit_rows], np.float32(0)),
            top_k=self._top_k[logit_rows],
            top_p=self._top_p[logit_rows],
            min_p=self._min_p[logit_rows],
            seeds=self._seeds[logit_rows],
            choices=self._choices[logit_rows],
            output_indices=np.array([len(batch.sequences[i].output_ids) for i in logits.owners], np.int32),
            group_tokens=group_tokens,
            edits=logit_edits(logits.sampled),
            logprobs=logprobs_wanted(logits.sampled, logits.of_prompts),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _LogitRows:
    """The N rows of logits of a step."""

    owners: NDArray[np.intp]  # [N] numbers of sequences in the batch
    tokens: I32  # [N] which of the step's tokens they follow
    is_sampled: NDArray[np.bool_]  # [N]
    sampled: list[tuple[int, Sequence]]  # number of a row, the sequence that is sampled there
    of_prompts: list[tuple[int, Sequence, int]]  # number of a row, sequence, the token of its prompt that comes next

    @classmethod
    def of(cls, batch: Batch, query_starts: I32) -> _LogitRows:
        """The rows in the order of their tokens. `query_starts` [S + 1]: the first token of each sequence."""
        if not batch.num_prompt_rows:
            owners = np.flatnonzero(np.array(batch.is_sampled, np.bool_))
            is_sampled = np.ones(len(owners), np.bool_)
            tokens = query_starts[1:][owners] - 1
            return cls(
                owners=owners,
                tokens=tokens,
                is_sampled=is_sampled,
                sampled=list(enumerate(batch.sampled)),
                of_prompts=[],
            )
        rows = list(batch.rows())
        first = query_starts.tolist()
        ends = [
            first[i + 1] - 1 if position is None else first[i] + position - s.num_computed for i, s, position in rows
        ]
        return cls(
            owners=np.array([i for i, _, _ in rows], np.intp),
            tokens=np.array(ends, np.int32),
            is_sampled=np.array([position is None for _, _, position in rows], np.bool_),
            sampled=[(row, s) for row, (_, s, position) in enumerate(rows) if position is None],
            of_prompts=[(row, s, s.prompt_ids[p + 1]) for row, (_, s, p) in enumerate(rows) if p is not None],
        )


def take_logprobs(batch: Batch, logprobs: Logprobs) -> dict[Sequence, tuple[TokenLogprobs]]:
    """Gives prompts theirs, and returns those of sampled tokens. To be called before the batch is committed."""
    of_sampled: dict[Sequence, tuple[TokenLogprobs]] = {}
    index = 0
    for _, sequence, position in list(batch.rows()):
        num_top = sequence.params.logprobs if position is None else sequence.params.prompt_logprobs
        if num_top is None:
            continue
        found = token_logprobs(logprobs, index, num_top)
        index += 1
        if position is None:
            of_sampled[sequence] = (found,)
        else:
            sequence.prompt_logprobs.append(found)
    return of_sampled


def _new_tokens(batch: Batch) -> Iterator[Iterable[int]]:
    """Each sequence's tokens of this step, in order."""
    for sequence, num_new in zip(batch.sequences, batch.num_new, strict=True):
        start = sequence.num_computed
        if num_new == 1 and start + 1 == sequence.num_tokens and sequence.output_ids:
            yield (sequence.output_ids[-1],)
        else:  # of the prompt, and after a preemption of the output, too
            yield sequence.tokens(start, start + num_new)
