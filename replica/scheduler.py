"""Which sequences take part in the next step (pure state; one task owns it).

Sequences wait in the order of their arrival and run in that order. Each step gives one token to every sequence that
decodes, then spends what is left of the token budget on prompts, in chunks: first on those that run, then on waiting
ones, which are admitted in order and only if blocks for all their tokens are free. When a decoding sequence needs a
block and none is free, the newest running sequence gives up all of its blocks and waits again, to be computed anew.

A batch is scheduled before it is agreed with the group, and a release may then leave out its prefill chunks, or all of
it (`start`). What is left out is scheduled again. An empty batch may be scheduled anew when work comes.

So that a group agrees on a step while the step before it runs, the next batch may be scheduled ahead of the tokens that
it depends on: `schedule_ahead` counts as if no sequence ended with a token of the running step. One that does end is
computed once more, to no use, and keeps its row and blocks until that is done.

Two facts carry the rest:
- Every running sequence is older than every waiting one: admission takes the oldest that waits, preemption the newest
  that runs. So the oldest sequence is never preempted, and, since it fits the cache alone, it ends; nobody starves.
- Between `schedule` and `commit` a forward may write the batch's blocks, so they are not freed before the commit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from replica.batch import Batch, RowTable
from replica.block_pool import BlockPool
from replica.frames import I32, Logprobs, StepInput
from replica.logit_edits import token_logprobs
from replica.request import FinishReason, Sequence, TokenLogprobs, TokenOutput

MAX_PROMPT_ROWS: Final = 512  # rows of logits a step may have for prompts: each is as long as the vocabulary


@dataclass(slots=True)
class Outline:
    """Who takes part in a step and with how many tokens."""

    decodes: list[Sequence] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)

    @property
    def decode_tokens(self) -> int:
        """Tokens of the sequences that decode."""
        return len(self.decodes)

    @property
    def prefill_tokens(self) -> int:
        """Tokens of prompts."""
        return sum(num_new for _, num_new in self.prefills)

    @property
    def sequences(self) -> list[Sequence]:
        """All of them."""
        return [*self.decodes, *(sequence for sequence, _ in self.prefills)]

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prefills)

    def batch(self) -> Batch:
        """The batch, now that the step before it is committed."""
        entries = [*((sequence, 1) for sequence in self.decodes), *self.prefills]
        prompt_rows = tuple(_num_prompt_rows(sequence, num_new) for sequence, num_new in entries)
        return Batch(
            sequences=tuple(sequence for sequence, _ in entries),
            num_new=tuple(num_new for _, num_new in entries),
            is_sampled=tuple(sequence.num_computed + num_new == sequence.num_tokens for sequence, num_new in entries),
            num_decodes=len(self.decodes),
            num_prompt_rows=prompt_rows if any(prompt_rows) else (),
        )


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
        self._ahead: Outline | None = None  # of the batch after it

    @property
    def has_work(self) -> bool:
        """Whether a step would compute anything, or one in flight does."""
        return bool(self.running or self.waiting or (self._in_flight and self._in_flight.sequences) or self._ahead)

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
        if sequence.row >= 0 and sequence not in self._held():
            self._release(sequence)
        return True

    def schedule(self) -> Batch:
        """The next step's batch. Unless it is empty it must be committed before the next call."""
        assert not self._held(), "the last batch is not committed"
        self._make_room_for_decodes()
        self._in_flight, self._ahead = self._fill(Outline(), {}).batch(), None
        return self._in_flight

    def schedule_ahead(self) -> Outline | None:
        """An outline of the step after the running one; None while that depends on the tokens that this one samples.

        An empty one may be replaced by another call.
        """
        assert self._in_flight is not None and not self._ahead
        progress = {
            sequence: (num_new, int(is_sampled))
            for sequence, num_new, is_sampled in zip(
                self._in_flight.sequences, self._in_flight.num_new, self._in_flight.is_sampled, strict=True
            )
        }
        missing = {}
        for sequence in self.running:
            num_tokens = sequence.num_tokens + progress.get(sequence, (0, 0))[1]
            missing[sequence] = max(0, self.pool.blocks_for(num_tokens) - len(sequence.block_ids))
        if sum(missing.values()) > self.pool.num_free:
            return None  # one must be preempted, which cannot be while a forward writes its blocks
        for sequence, num_blocks in missing.items():
            if num_blocks:
                self._allocate(sequence, num_blocks)
        self._ahead = self._fill(Outline(), progress)
        return self._ahead

    def _fill(self, outline: Outline, progress: Mapping[Sequence, tuple[int, int]]) -> Outline:
        """Shares the token budget out. `progress`: the tokens that the running step computes and samples."""
        prefilling: deque[tuple[Sequence, int]] = deque()  # with the tokens that are left to compute
        for sequence in self.running:
            num_new, num_sampled = progress.get(sequence, (0, 0))
            if num_sampled and len(sequence.output_ids) + 1 >= sequence.params.max_tokens:
                continue  # it ends with the running step
            num_computed, num_tokens = sequence.num_computed + num_new, sequence.num_tokens + num_sampled
            if 0 < num_computed == num_tokens - 1:
                outline.decodes.append(sequence)
            else:
                prefilling.append((sequence, num_tokens - num_computed))
        budget = self._max_tokens - len(outline.decodes)
        prompt_rows = MAX_PROMPT_ROWS
        while budget > 0 and (prefilling or self._admit_next()):
            sequence, num_new = prefilling.popleft() if prefilling else (self.running[-1], self.running[-1].num_tokens)
            num_new = min(budget, num_new)
            if sequence.params.prompt_logprobs is not None:
                num_new = min(num_new, prompt_rows)
                prompt_rows -= num_new
            if num_new:
                outline.prefills.append((sequence, num_new))
                budget -= num_new
        return outline

    def start(self, *, decode_tokens: int, prefill_tokens: int) -> Batch:
        """What runs of the scheduled batch: all of it, its decodes, or nothing; the counts say which."""
        if self._ahead is not None:
            assert self._in_flight is None, "the last batch is not committed"
            self._in_flight, self._ahead = self._ahead.batch(), None
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

    def commit(
        self, batch: Batch, token_ids: I32, logprobs: Logprobs | None = None
    ) -> list[tuple[Sequence, TokenOutput]]:
        """The step is done on all ranks: `token_ids` [N] and `logprobs` answer the rows of its frame.

        Returns what is to be published; the output of a sequence that ends carries its finish reason.
        """
        assert batch is self._in_flight and len(token_ids) == batch.num_rows
        self._in_flight = None
        if batch.num_prompt_rows:
            token_ids = token_ids[[position is None for _, _, position in batch.rows()]]
        found = {} if logprobs is None else _take_logprobs(batch, logprobs)
        for sequence, num_new in zip(batch.sequences, batch.num_new, strict=True):
            sequence.num_computed += num_new
        held = set(self._ahead.sequences) if self._ahead else set()
        outputs = []
        for sequence, token_id in zip(batch.sampled, token_ids.tolist(), strict=True):
            is_aborted = sequence.finish_reason is not None  # while the step ran
            if not is_aborted or sequence in held:  # what is scheduled ahead counts on the token
                sequence.output_ids.append(token_id)
            if not is_aborted:
                sequence.finish_reason = _finish_reason(sequence)
                outputs.append(
                    (sequence, TokenOutput((token_id,), sequence.finish_reason, logprobs=found.get(sequence, ())))
                )
        ended = [s for s in batch.sequences if s.finish_reason is not None]
        for sequence in ended:
            if sequence not in held:
                self._release(sequence)
        if ended:
            self.running = [s for s in self.running if s.finish_reason is None]
        return outputs

    def end_all(self, reason: FinishReason) -> list[Sequence]:
        """Ends every sequence and drops the step in flight, whose worker writes no more. Returns those that ended."""
        held = self._held()
        self._in_flight = self._ahead = None
        ended = [*self.running, *self.waiting]
        for sequence in ended:
            sequence.finish_reason = reason
        for sequence in {*self.running, *held}:
            self._release(sequence)
        self.running.clear()
        self.waiting.clear()
        return ended

    def _held(self) -> set[Sequence]:
        """The sequences whose rows and blocks a forward uses, or will."""
        in_flight = self._in_flight.sequences if self._in_flight else ()
        return {*in_flight, *(self._ahead.sequences if self._ahead else ())}

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
        if not self.waiting or len(self.running) >= self._max_running or not self._rows.has_free:
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


def _take_logprobs(batch: Batch, logprobs: Logprobs) -> dict[Sequence, tuple[TokenLogprobs]]:
    """Gives prompts theirs, and returns those of sampled tokens."""
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


def _num_prompt_rows(sequence: Sequence, num_new: int) -> int:
    """Tokens of the step after which a prompt token comes whose log probability is wanted and not known yet.

    A prompt that is computed anew after a preemption tells nothing new.
    """
    if sequence.params.prompt_logprobs is None:
        return 0
    start = max(sequence.num_computed, len(sequence.prompt_logprobs))
    return max(0, min(sequence.num_computed + num_new, len(sequence.prompt_ids) - 1) - start)


def _finish_reason(sequence: Sequence) -> FinishReason | None:
    if sequence.output_ids[-1] in sequence.params.stop_token_ids:
        return FinishReason.STOP
    if len(sequence.output_ids) >= sequence.params.max_tokens:
        return FinishReason.LENGTH
    return None
