"""A scheduler driven by random events, with a worker that remembers what it was told to write where.

After every event it checks what must hold whatever happens; `finish` lets all sequences end and checks each.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from replica.batch import Batch
from replica.frames import I32, Logprobs, StepInput
from replica.outline import Outline
from replica.request import FinishReason, SamplingParams, Sequence, TokenOutput
from replica.scheduler import Scheduler

BLOCK_SIZE = 4
ALONE: I32 = np.zeros(0, np.int32)  # group_tokens of a replica alone
CUT_OFF = -1  # what a step that was taken back has written
STOP_TOKENS = frozenset({11, 12})  # of 89 that are sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Those of the scheduler."""

    num_blocks: int
    max_num_seqs: int
    max_tokens: int
    max_prefill_tokens: int | None = None
    has_prefix_cache: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """How one step goes."""

    is_withheld: bool = False  # the release leaves the prompts out
    schedules_ahead: bool = False
    aborted: int | None = None  # number of a sequence that ends while the step runs
    is_taken_back: bool = False  # its ranks are cut off while they write, and it is never committed
    others_decode: bool = False


class Trial:
    """One scheduler and all sequences that it was given."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.scheduler = Scheduler(
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_tokens,
            max_model_len=256,
            block_size=BLOCK_SIZE,
            max_prefill_tokens=limits.max_prefill_tokens,
            has_prefix_cache=limits.has_prefix_cache,
        )
        self.scheduler.pool.add_blocks(limits.num_blocks)
        self.sequences: list[Sequence] = []
        self._published: dict[Sequence, list[TokenOutput]] = {}
        self._written: dict[int, int] = {}  # slot -> what the token's key and value depend on
        self._arrival: tuple[int, int] | None = None  # tokens of the batch that was scheduled ahead
        self._num_steps = 0

    def add(self, prompt_ids: list[int], max_tokens: int, *, priority: int = 0, echoes: bool = False) -> Sequence:
        """A new sequence, cut to what fits the cache."""
        prompt_ids = prompt_ids[: self.limits.num_blocks * BLOCK_SIZE]
        params = SamplingParams(
            max_tokens=min(max_tokens, self.scheduler.max_tokens_that_fit(len(prompt_ids))),
            seed=7,
            stop_token_ids=STOP_TOKENS,
            prompt_logprobs=0 if echoes else None,
        )
        sequence = Sequence(request_id="r", choice=0, prompt_ids=prompt_ids, params=params, priority=priority)
        self.sequences.append(sequence)
        self._published[sequence] = []
        self.scheduler.add(sequence)
        self._check()
        return sequence

    def abort(self, number: int) -> None:
        """Aborts a sequence, if there is one and it has not ended."""
        if self.sequences:
            sequence = self.sequences[number % len(self.sequences)]
            if self.scheduler.abort(sequence):
                self._published[sequence].append(TokenOutput((), FinishReason.ABORT))
            self._check()

    def step(self, how: Step) -> Batch:
        """One step, as the step loop takes it."""
        scheduler = self.scheduler
        scheduler.others_decode = how.others_decode
        if self._arrival is None or (self._arrival == (0, 0) and scheduler.has_work):
            scheduled = scheduler.schedule()
            self._arrive(scheduled)
            self._check_nobody_is_left_out(scheduled)
        decode_tokens, prefill_tokens = self._arrival
        self._arrival = None
        batch = scheduler.start(decode_tokens=decode_tokens, prefill_tokens=0 if how.is_withheld else prefill_tokens)
        frame = scheduler.step_input(batch, step=self._num_steps, group_tokens=ALONE)
        self._run(batch, frame)
        if how.schedules_ahead and (outline := scheduler.schedule_ahead()) is not None:
            self._arrive(outline)
        held = {s: list(s.block_ids) for s in batch.sequences}
        if how.aborted is not None:
            self.abort(how.aborted)
        assert all(s.block_ids[: len(blocks)] == blocks for s, blocks in held.items()), "freed while a forward writes"
        if how.is_taken_back:
            self._written |= dict.fromkeys(frame.slots.tolist(), CUT_OFF)
            scheduler.rollback()
            self._arrival = None
        else:
            self._commit(batch, frame)
        self._num_steps += 1
        self._check()
        return batch

    def finish(self) -> None:
        """Steps until all have ended: each computes something, and what is preempted waits for older ones only."""
        for _ in range(5000):
            if self.scheduler.has_work:
                self.step(Step())
        assert not self.scheduler.has_work, "somebody starves"
        assert self.scheduler.pool.num_free == self.limits.num_blocks
        for sequence in self.sequences:
            outputs = self._published[sequence]
            assert [o.finish_reason for o in outputs if o.finish_reason] == [sequence.finish_reason]
            assert outputs[-1].finish_reason is sequence.finish_reason
            said = [token_id for output in outputs for token_id in output.token_ids]
            if sequence.finish_reason is not FinishReason.ABORT:
                assert said == sequence.output_ids == self._expected(sequence)
                if sequence.params.prompt_logprobs is not None:
                    assert [found.token_id for found in sequence.prompt_logprobs] == sequence.prompt_ids[1:]

    def _arrive(self, scheduled: Batch | Outline) -> None:
        self._arrival = decode_tokens, prefill_tokens = scheduled.decode_tokens, scheduled.prefill_tokens
        assert decode_tokens + prefill_tokens <= self.limits.max_tokens
        if decode_tokens or self.scheduler.others_decode:
            assert prefill_tokens <= (self.limits.max_prefill_tokens or self.limits.max_tokens)

    def _run(self, batch: Batch, frame: StepInput) -> None:
        """The worker writes what the frame says. Reads, as attention would, what each sequence has in its blocks."""
        assert len(batch.sequences) <= self.limits.max_num_seqs
        assert len(set(frame.slots.tolist())) == len(frame.slots)
        users = self._users()
        assert all(users[slot // BLOCK_SIZE] == 1 for slot in frame.slots.tolist()), "a shared block is written"
        for index, (sequence, num_new) in enumerate(zip(batch.sequences, batch.num_new, strict=True)):
            is_decode = num_new == 1 and sequence.num_computed > 0
            assert num_new >= 1 and (is_decode or index >= batch.num_decodes)
            start, end = frame.query_starts[index : index + 2]
            context = int(frame.context_lens[index])
            tokens = sequence.tokens(0, context)
            content = [hash(tuple(tokens[: position + 1])) for position in range(context)]
            assert frame.token_ids[start:end].tolist() == tokens[context - num_new :]
            self._written |= dict(zip(frame.slots[start:end].tolist(), content[context - num_new :], strict=True))
            table = frame.block_tables[index]
            read = [self._written[int(table[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE] for p in range(context)]
            assert read == content, "another text's keys and values are read"

    def _commit(self, batch: Batch, frame: StepInput) -> None:
        sampled = [1 if position is not None else sample(s.tokens(0, s.num_tokens)) for _, s, position in batch.rows()]
        found = None
        if (wanted := frame.logprobs) is not None:
            ids = np.where(wanted.targets < 0, np.array(sampled, np.int32)[wanted.rows], wanted.targets)
            found = Logprobs(token_ids=ids[:, np.newaxis], values=np.zeros((len(ids), 1), np.float32))
        for sequence, output in self.scheduler.commit(batch, np.array(sampled, np.int32), found):
            self._published[sequence].append(output)

    def _expected(self, sequence: Sequence) -> list[int]:
        tokens = list(sequence.prompt_ids)
        for _ in range(sequence.params.max_tokens):
            tokens.append(sample(tokens))
            if tokens[-1] in STOP_TOKENS:
                break
        return tokens[len(sequence.prompt_ids) :]

    def _users(self) -> Counter[int]:
        return Counter(block for s in self.sequences for block in s.block_ids)

    def _check(self) -> None:
        """Blocks are counted right, nobody has one twice, and each priority runs in the order of its arrivals."""
        users, pool = self._users(), self.scheduler.pool
        assert len(users) == pool.num_blocks - pool.num_free
        assert all(pool.num_users(block) == users[block] for block in range(pool.num_blocks))
        assert all(len(s.block_ids) == len(set(s.block_ids)) for s in self.sequences)
        if not self.limits.has_prefix_cache:
            assert set(users.values()) <= {1}
        assert [s.place for s in self.scheduler.running] == sorted(s.place for s in self.scheduler.running)
        assert [s.place for s in self.scheduler.waiting] == sorted(s.place for s in self.scheduler.waiting)
        for running in self.scheduler.running:
            assert all(w.place > running.place for w in self.scheduler.waiting if w.priority == running.priority)

    def _check_nobody_is_left_out(self, batch: Batch) -> None:
        """Whoever decodes has its token in every step, and the first whose prompt is not computed gets on."""
        running = self.scheduler.running
        decoding = [s for s in running if s.output_ids and s.num_computed == s.num_tokens - 1]
        assert set(decoding) <= set(batch.sequences)
        prefilling = [s for s in running if s not in decoding]
        assert not prefilling or prefilling[0] in batch.sequences
        assert batch.sequences or not self.scheduler.waiting


def sample(tokens: list[int]) -> int:
    """The next token: it depends on all before it, so that one that is lost or repeated changes all that follow."""
    return 10 + (sum(tokens) * 31 + len(tokens)) % 89
