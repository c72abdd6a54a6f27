"""Which sequences take part in the next step (pure state; one task owns it).

Sequences wait in the order of their arrival and run in that order. Each step gives one token to every sequence that
decodes, then spends what is left of the token budget on prompts, in chunks: first on those that run, then on waiting
ones, which are admitted in order and only if blocks for all their tokens are free. When a decoding sequence needs a
block and none is free, the newest running sequence gives up all of its blocks and waits again, to be computed anew.

A batch is scheduled before it is agreed with the group, and a release may then leave out its prefill chunks, or all of
it (`start`). What is left out is scheduled again. An empty batch may be scheduled anew when work comes.

Two facts carry the rest:
- Every running sequence is older than every waiting one: admission takes the oldest that waits, preemption the newest
  that runs. So the oldest sequence is never preempted, and, since it fits the cache alone, it ends; nobody starves.
- Between `schedule` and `commit` a forward may write the batch's blocks, so they are not freed before the commit.
"""

from __future__ import annotations

from collections import deque

from replica.batch import Batch, RowTable
from replica.block_pool import BlockPool
from replica.frames import I32, StepInput
from replica.request import FinishReason, Sequence, TokenOutput


class Scheduler:
    """Owns sequences from `add` until they end, and the blocks that they use."""

    def __init__(self, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int, block_size: int) -> None:
        # A running sequence can always have its one token, because no more run than the budget has tokens.
        self._max_running = min(max_num_seqs, max_num_batched_tokens)
        self._max_tokens = max_num_batched_tokens
        self.pool = BlockPool(block_size=block_size)
        self._rows = RowTable(
            num_rows=self._max_running, max_blocks=self.pool.blocks_for(max_model_len), block_size=block_size
        )
        self.waiting: deque[Sequence] = deque()  # oldest first
        self.running: list[Sequence] = []  # oldest first
        self._in_flight: Batch | None = None

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything, or one in flight does."""
        return bool(self.running or self.waiting or (self._in_flight and self._in_flight.sequences))

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens that must be computed before their sequences decode."""
        waiting = sum(s.num_tokens for s in self.waiting)
        return waiting + sum(s.num_tokens - s.num_computed for s in self.running if not _decodes(s))

    def max_tokens_that_fit(self, num_prompt_tokens: int) -> int:
        """How many output tokens fit the whole cache after such a prompt; below 1 means that none does.

        The last output token is never computed, so it needs no place.
        """
        return self.pool.num_blocks * self.pool.block_size + 1 - num_prompt_tokens

    def add(self, sequence: Sequence) -> None:
        """Takes a new sequence, which must fit the cache alone."""
        assert sequence.params.max_tokens <= self.max_tokens_that_fit(len(sequence.prompt_ids))
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """Ends a sequence; False if it has ended already or was never added.

        One in the step that runs now keeps its row and blocks until that step's commit.
        """
        if sequence.finish_reason is not None:
            return False
        if sequence.row >= 0:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            return False
        sequence.finish_reason = FinishReason.ABORT
        is_in_flight = self._in_flight is not None and sequence in self._in_flight.sequences
        if sequence.row >= 0 and not is_in_flight:
            self._release(sequence)
        return True

    def schedule(self) -> Batch:
        """The next step's batch. Unless it is empty it must be committed before the next call."""
        assert self._in_flight is None or not self._in_flight.sequences, "the last batch is not committed"
        self._make_room_for_decodes()
        decodes: list[Sequence] = []
        prefills: list[tuple[Sequence, int]] = []
        prefilling: list[Sequence] = []
        for sequence in self.running:
            (decodes if _decodes(sequence) else prefilling).append(sequence)
        budget = self._max_tokens - len(decodes)
        for sequence in prefilling:
            if budget > 0:
                prefills.append((sequence, min(budget, sequence.num_tokens - sequence.num_computed)))
                budget -= prefills[-1][1]
        while budget > 0 and self._admit_next():
            sequence = self.running[-1]
            prefills.append((sequence, min(budget, sequence.num_tokens)))
            budget -= prefills[-1][1]
        self._in_flight = _batch(decodes, prefills)
        return self._in_flight

    def start(self, *, decode_tokens: int, prefill_tokens: int) -> Batch:
        """What runs of the scheduled batch: all of it, its decodes, or nothing; the counts say which."""
        batch = scheduled = self._in_flight
        assert scheduled is not None and batch is not None
        counts = (decode_tokens, prefill_tokens)
        if counts != (scheduled.decode_tokens, scheduled.prefill_tokens):
            batch = scheduled.decodes() if decode_tokens else Batch()
            assert counts == (batch.decode_tokens, 0), "never scheduled"
        self._in_flight = batch
        for sequence in scheduled.sequences[len(batch.sequences) :]:
            if sequence.finish_reason is not None:  # aborted since, and in no step now
                self._release(sequence)
        return batch

    def step_input(self, batch: Batch, *, step: int, group_tokens: I32) -> StepInput:
        """The worker's frame for the batch of a step. `group_tokens`: see StepInput."""
        assert batch is self._in_flight
        return self._rows.step_input(batch, step=step, group_tokens=group_tokens)

    def commit(self, batch: Batch, token_ids: I32) -> list[tuple[Sequence, TokenOutput]]:
        """The step is done on all ranks: `token_ids` [N] are the tokens of `batch.sampled`.

        Returns what is to be published; the output of a sequence that ends carries its finish reason.
        """
        assert batch is self._in_flight and len(token_ids) == sum(batch.is_sampled)
        self._in_flight = None
        for sequence, num_new in zip(batch.sequences, batch.num_new, strict=True):
            sequence.num_computed += num_new
        outputs = []
        for sequence, token_id in zip(batch.sampled, token_ids.tolist(), strict=True):
            if sequence.finish_reason is None:  # else aborted while the step ran
                sequence.output_ids.append(token_id)
                sequence.finish_reason = _finish_reason(sequence)
                outputs.append((sequence, TokenOutput((token_id,), sequence.finish_reason)))
        ended = [s for s in batch.sequences if s.finish_reason is not None]
        for sequence in ended:
            self._release(sequence)
        if ended:
            self.running = [s for s in self.running if s.finish_reason is None]
        return outputs

    def end_all(self, reason: FinishReason) -> list[Sequence]:
        """Ends every sequence and drops the step in flight, whose worker writes no more. Returns those that ended."""
        batch, self._in_flight = self._in_flight, None
        ended = [*self.running, *self.waiting]
        for sequence in ended:
            sequence.finish_reason = reason
        for sequence in {*self.running, *(batch.sequences if batch else ())}:
            self._release(sequence)
        self.running.clear()
        self.waiting.clear()
        return ended

    def _make_room_for_decodes(self) -> None:
        """Gives each decoding sequence, oldest first, the block that its next token needs."""
        position = 0
        while position < len(self.running):
            sequence = self.running[position]
            missing = self.pool.blocks_for(sequence.num_tokens) - len(sequence.block_ids)
            if missing > self.pool.num_free:
                self._preempt_newest()  # perhaps the sequence itself
                continue
            if missing:
                self._allocate(sequence, missing)
            position += 1

    def _admit_next(self) -> bool:
        """Moves the oldest waiting sequence to the running ones, if there is room for all of its tokens.

        Each running sequence keeps one free block in reserve, lest the newcomer be preempted at once.
        """
        if not self.waiting or len(self.running) >= self._max_running:
            return False
        needed = self.pool.blocks_for(self.waiting[0].num_tokens)
        if needed + len(self.running) > self.pool.num_free:
            return False
        sequence = self.waiting.popleft()
        self.running.append(sequence)
        self._rows.take(sequence)
        self._allocate(sequence, needed)
        return True

    def _preempt_newest(self) -> None:
        sequence = self.running.pop()
        self._release(sequence)
        sequence.num_computed = 0
        self.waiting.appendleft(sequence)

    def _allocate(self, sequence: Sequence, num_blocks: int) -> None:
        self._rows.append_blocks(sequence, self.pool.allocate(sequence, num_blocks))

    def _release(self, sequence: Sequence) -> None:
        self._rows.give_back(sequence)
        self.pool.free(sequence)


def _decodes(sequence: Sequence) -> bool:
    """Whether all but the sequence's last token is in the cache."""
    return 0 < sequence.num_computed == sequence.num_tokens - 1


def _batch(decodes: list[Sequence], prefills: list[tuple[Sequence, int]]) -> Batch:
    entries = [*((sequence, 1) for sequence in decodes), *prefills]
    return Batch(
        sequences=tuple(sequence for sequence, _ in entries),
        num_new=tuple(num_new for _, num_new in entries),
        is_sampled=tuple(sequence.num_computed + num_new == sequence.num_tokens for sequence, num_new in entries),
        num_decodes=len(decodes),
    )


def _finish_reason(sequence: Sequence) -> FinishReason | None:
    if sequence.output_ids[-1] in sequence.params.stop_token_ids:
        return FinishReason.STOP
    if len(sequence.output_ids) >= sequence.params.max_tokens:
        return FinishReason.LENGTH
    return None
