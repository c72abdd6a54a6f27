"""Which sequences take part in the next step (pure state; one task owns it).

Sequences stand in one order: by priority, and within one by arrival. Each step gives one token to every sequence that
decodes, then spends what is left of the token budget on prompts, in chunks: first on those that run, then on waiting
ones, which are admitted in order and only if blocks for all their tokens are free. Beside decodes, prompts get no more
than `max_prefill_tokens`, so that a stream never waits for more than such a step.

A prompt begins with the blocks that the cache holds of it (block_pool.py). Blocks enter the cache when the step that
filled them is committed; where a running sequence is computing just the block that a waiting one needs next, that one
waits for it, so that the choices of a request, or a crowd with one system prompt, compute it once.

When a decoding sequence needs a block and none is free, the last running sequence gives up all of its blocks and waits
again, to be computed anew; so it does when a waiting one of a higher priority has no room.

A batch is scheduled before it is agreed with the group, and a release may then leave out its prefill chunks, or all of
it (`start`). What is left out is scheduled again. An empty batch may be scheduled anew when work comes.

So that a group agrees on a step while the step before it runs, the next batch may be scheduled ahead of the tokens that
it depends on: `schedule_ahead` counts as if no sequence ended with a token of the running step. One that does end is
computed once more, to no use, and keeps its row and blocks until that is done.

Three facts carry the rest:
- Within a priority, every running sequence comes before every waiting one: admission takes the first that waits,
  preemption the last that runs. So the first of all is not preempted for long, and, since it fits the cache alone, it
  ends; nobody starves but for those of a higher priority.
- Between `schedule` and `commit` a forward may write the batch's blocks, so they are not freed before the commit, or
  before the `rollback` that takes the step back.
- Only committed tokens count as computed, so a step that is taken back is simply scheduled again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Final

from replica.batch import Batch, take_logprobs
from replica.block_pool import BlockPool
from replica.frames import I32, Logprobs, StepInput
from replica.outline import Outline
from replica.request import FinishReason, Sequence, TokenOutput
from replica.roster import Roster, SchedulerCounts

MAX_PROMPT_ROWS: Final = 512  # rows of logits a step may have for prompts: each is as long as the vocabulary


# A sequence, and how many of its tokens are computed, and how many it has, when the step before the one that is
# scheduled is committed.
_Progress = tuple[Sequence, int, int]


class Scheduler:
    """Owns sequences from `add` until they end, and the blocks that they use."""

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        max_prefill_tokens: int | None = None,
        has_prefix_cache: bool = True,
    ) -> None:
        """`max_prefill_tokens`: tokens of prompts in a step that somebody decodes in; None: as many as in any."""
        self._max_tokens = max_num_batched_tokens
        self._max_prefill_tokens = max_prefill_tokens or max_num_batched_tokens
        self._roster = Roster(
            # A running sequence can always have its one token, because no more run than the budget has tokens.
            max_running=min(max_num_seqs, max_num_batched_tokens),
            max_model_len=max_model_len,
            block_size=block_size,
            has_prefix_cache=has_prefix_cache,
        )
        self.others_decode = False  # other replicas of the group: their streams wait for this one's prompts, too
        self._in_flight: Batch | None = None
        self._ahead: Outline | None = None  # of the batch after it

    @property
    def pool(self) -> BlockPool:
        """The blocks of the KV cache."""
        return self._roster.pool

    @property
    def running(self) -> list[Sequence]:
        """Those that have blocks, in their order."""
        return self._roster.running

    @property
    def waiting(self) -> list[Sequence]:
        """Those that have none, in their order."""
        return self._roster.waiting

    @property
    def counts(self) -> SchedulerCounts:
        """What has happened since the start."""
        return self._roster.counts

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
        self._roster.add(sequence)

    def abort(self, sequence: Sequence) -> bool:
        """Ends a sequence; False if it has ended already or was never added.

        One in the step that runs now keeps its row and blocks until that step's commit.
        """
        if sequence.finish_reason is not None or not self._roster.remove(sequence):
            return False
        sequence.finish_reason = FinishReason.ABORT
        if sequence.row >= 0 and sequence not in self._held():
            self._roster.release((sequence,))
        return True

    def schedule(self) -> Batch:
        """The next step's batch. Unless it is empty it must be committed, or taken back, before the next call."""
        assert not self._held(), "the last batch is not committed"
        self._roster.make_room_for_decodes()
        for sequence in self._roster.in_the_way():
            self._roster.preempt(sequence)
        self._in_flight = self._fill([(s, s.num_computed, s.num_tokens) for s in self.running]).batch()
        self._ahead = None
        return self._in_flight

    def schedule_ahead(self) -> Outline | None:
        """An outline of the step after the running one; None while that depends on the tokens that this one samples.

        An empty one may be replaced by another call, and by `schedule`, for whom the running step makes room.
        """
        assert self._in_flight is not None and not self._ahead
        going_on = self._after(self._in_flight)
        wanted = [(sequence, self.pool.blocks_for(num_tokens)) for sequence, _, num_tokens in going_on]
        num_missing = sum(max(0, num_blocks - len(sequence.block_ids)) for sequence, num_blocks in wanted)
        if num_missing > self.pool.num_free or self._roster.in_the_way():
            return None  # one must be preempted, which cannot be while a forward writes its blocks
        for sequence, num_blocks in wanted:
            self._roster.allocate(sequence, num_blocks)
        self._ahead = self._fill(going_on)
        return self._ahead

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
        self._release_ended(scheduled.sequences[len(batch.sequences) :])  # aborted since, and in no step now
        return batch

    def step_input(self, batch: Batch, *, step: int, group_tokens: I32) -> StepInput:
        """The worker's frame for the batch of a step. `group_tokens`: see StepInput."""
        assert batch is self._in_flight
        return self._roster.rows.step_input(batch, step=step, group_tokens=group_tokens)

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
        found = {} if logprobs is None else take_logprobs(batch, logprobs)
        self._count_computed(batch)
        held = self._held()
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
        if ended:
            self._release_ended(s for s in ended if s not in held)
            self.running[:] = [s for s in self.running if s.finish_reason is None]
        return outputs

    def rollback(self) -> None:
        """Takes back the steps that are not committed, in flight or ahead: they are scheduled again, and what was
        aborted meanwhile is freed. To be called when no forward writes blocks any more, or none whose writes matter."""
        held = self._held()
        self._in_flight = self._ahead = None
        self._release_ended(held)

    def end_all(self, reason: FinishReason) -> list[Sequence]:
        """Ends every sequence and drops the step in flight, whose worker writes no more. Returns those that ended."""
        self.rollback()
        ended = [*self.running, *self.waiting]
        for sequence in ended:
            sequence.finish_reason = reason
        self._release_ended(self.running)
        self.running.clear()
        self.waiting.clear()
        return ended

    def _held(self) -> set[Sequence]:
        """The sequences whose rows and blocks a forward uses, or will."""
        in_flight = self._in_flight.sequences if self._in_flight else ()
        return {*in_flight, *(self._ahead.sequences if self._ahead else ())}

    def _release_ended(self, sequences: Iterable[Sequence]) -> None:
        """Takes back what those hold that have ended."""
        self._roster.release(s for s in sequences if s.finish_reason is not None)

    def _after(self, batch: Batch) -> list[_Progress]:
        """The running sequences as the batch leaves them, but for those that it surely ends."""
        computed = {
            sequence: (num_new, is_sampled)
            for sequence, num_new, is_sampled in zip(batch.sequences, batch.num_new, batch.is_sampled, strict=True)
        }
        going_on = []
        for sequence in self.running:
            num_new, is_sampled = computed.get(sequence, (0, False))
            if not is_sampled or len(sequence.output_ids) + 1 < sequence.params.max_tokens:
                going_on.append((sequence, sequence.num_computed + num_new, sequence.num_tokens + is_sampled))
        return going_on

    def _fill(self, going_on: list[_Progress]) -> Outline:
        """Shares the token budget out among the sequences that run, and those that it still lets run."""
        outline = Outline()
        prefilling: deque[tuple[Sequence, int]] = deque()  # with the tokens that are left to compute
        for sequence, num_computed, num_tokens in going_on:
            if 0 < num_computed == num_tokens - 1:
                outline.decodes.append(sequence)
            else:
                prefilling.append((sequence, num_tokens - num_computed))
        budget = self._max_tokens - len(outline.decodes)
        if outline.decodes or self.others_decode:
            budget = min(budget, self._max_prefill_tokens)
        prompt_rows = MAX_PROMPT_ROWS
        while budget > 0:
            if not prefilling:
                admitted = self._roster.admit_next()
                if admitted is None:
                    break
                prefilling.append((admitted, admitted.num_tokens - admitted.num_computed))
            sequence, num_left = prefilling.popleft()
            num_new = min(budget, num_left)
            if sequence.params.prompt_logprobs is not None:
                num_new = min(num_new, prompt_rows)
                prompt_rows -= num_new
            if num_new:
                outline.prefills.append((sequence, num_new))
                budget -= num_new
        return outline

    def _count_computed(self, batch: Batch) -> None:
        """The batch is in the cache: what has become full of it can be found there from now on."""
        block_size = self.pool.block_size
        for sequence, num_new in zip(batch.sequences, batch.num_new, strict=True):
            sequence.num_computed += num_new
            if sequence.num_computed % block_size < num_new:
                full = sequence.num_computed // block_size
                self.pool.enter(sequence, (sequence.num_computed - num_new) // block_size, full)
        if num_tokens := batch.decode_tokens + batch.prefill_tokens:
            self.counts.step_tokens[num_tokens] += 1


def _decodes(sequence: Sequence) -> bool:
    """Whether all but the sequence's last token is in the cache."""
    return 0 < sequence.num_computed == sequence.num_tokens - 1


def _finish_reason(sequence: Sequence) -> FinishReason | None:
    if sequence.output_ids[-1] in sequence.params.stop_token_ids:
        return FinishReason.STOP
    if len(sequence.output_ids) >= sequence.params.max_tokens:
        return FinishReason.LENGTH
    return None
