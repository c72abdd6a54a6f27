"""The scheduler as pure state: what a step holds, what is freed when, and what holds whatever happens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.batch import Batch
from replica.frames import I32, StepInput, decode, encode
from replica.request import FinishReason, SamplingParams, Sequence, TokenOutput
from replica.scheduler import Scheduler

BLOCK_SIZE = 4
END_TOKEN = 9
ALONE: I32 = np.zeros(0, np.int32)  # group_tokens of a replica alone


def make_sequence(num_prompt: int, max_tokens: int = 4, *, choice: int = 0, seed: int = 7) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=frozenset({END_TOKEN}), top_k=5)
    prompt_ids = [100 + position for position in range(num_prompt)]
    return Sequence(request_id="r", choice=choice, prompt_ids=prompt_ids, params=params)


def make_scheduler(*, num_blocks: int = 64, max_num_seqs: int = 8, max_tokens: int = 16) -> Scheduler:
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs, max_num_batched_tokens=max_tokens, max_model_len=256, block_size=BLOCK_SIZE
    )
    scheduler.pool.add_blocks(num_blocks)
    return scheduler


def run_step(scheduler: Scheduler, token_id: int = 1) -> tuple[Batch, StepInput, list[tuple[Sequence, TokenOutput]]]:
    """One step of a worker that always samples `token_id`."""
    batch = scheduler.schedule()
    step_input = scheduler.step_input(batch, step=0, group_tokens=ALONE)
    tokens = np.full(len(step_input.sample_rows), token_id, np.int32)
    return batch, step_input, scheduler.commit(batch, tokens)


def test_a_prompt_is_computed_in_one_step_and_sampled() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(6)
    scheduler.add(sequence)
    _, frame, outputs = run_step(scheduler)
    assert frame.num_decodes == 0
    assert frame.token_ids.tolist() == sequence.prompt_ids
    assert frame.positions.tolist() == [0, 1, 2, 3, 4, 5]
    first, second = sequence.block_ids
    assert frame.slots.tolist() == [first * 4 + i for i in range(4)] + [second * 4, second * 4 + 1]
    assert frame.query_starts.tolist() == [0, 6]
    assert frame.context_lens.tolist() == [6]
    assert frame.sample_rows.tolist() == [5]
    assert (frame.seeds.tolist(), frame.top_k.tolist(), frame.output_indices.tolist()) == ([7], [5], [0])
    assert outputs == [(sequence, TokenOutput((1,)))]


def test_decodes_come_first_and_the_rest_of_the_budget_goes_to_prompts() -> None:
    scheduler = make_scheduler(max_tokens=8)
    short, long = make_sequence(3), make_sequence(20)
    scheduler.add(short)
    run_step(scheduler)
    scheduler.add(long)
    batch, frame, outputs = run_step(scheduler)
    assert batch.sequences == (short, long)
    assert batch.num_new == (1, 7)
    assert frame.num_decodes == 1
    assert frame.token_ids.tolist() == [1, *long.prompt_ids[:7]]
    assert frame.positions.tolist() == [3, 0, 1, 2, 3, 4, 5, 6]
    assert frame.context_lens.tolist() == [4, 7]
    assert frame.sample_rows.tolist() == [0]  # the long prompt has more chunks to come
    assert [sequence for sequence, _ in outputs] == [short]


def test_chunks_go_on_where_the_last_one_ended() -> None:
    scheduler = make_scheduler(max_tokens=8)
    sequence = make_sequence(20)
    scheduler.add(sequence)
    positions, sampled = [], []
    for _ in range(3):
        _, frame, _ = run_step(scheduler)
        positions += frame.positions.tolist()
        sampled.append(len(frame.sample_rows))
    assert positions == list(range(20))
    assert sampled == [0, 0, 1]


def test_a_block_table_is_zero_past_a_sequences_last_block() -> None:
    scheduler = make_scheduler(num_blocks=8)
    long, short = make_sequence(12, max_tokens=1), make_sequence(2)
    scheduler.add(long)
    run_step(scheduler)  # the long one ends and leaves its row behind
    assert long.finish_reason is FinishReason.LENGTH
    other = make_sequence(9)
    scheduler.add(short)
    scheduler.add(other)
    _, frame, _ = run_step(scheduler)
    assert frame.block_tables.shape == (2, 3)
    assert frame.block_tables[0].tolist() == [short.block_ids[0], 0, 0]
    assert frame.block_tables[1].tolist() == other.block_ids


def test_an_empty_batch_is_a_legal_frame() -> None:
    scheduler = make_scheduler()
    batch = scheduler.schedule()
    frame = decode(encode(scheduler.step_input(batch, step=3, group_tokens=ALONE))[4:])
    assert isinstance(frame, StepInput)
    assert (frame.step, frame.token_ids.size, frame.query_starts.tolist()) == (3, 0, [0])
    assert scheduler.commit(batch, np.zeros(0, np.int32)) == []


def test_an_end_token_is_published_and_ends_the_sequence() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(3)
    scheduler.add(sequence)
    _, _, outputs = run_step(scheduler, END_TOKEN)
    assert outputs == [(sequence, TokenOutput((END_TOKEN,), FinishReason.STOP))]
    assert not scheduler.has_work and scheduler.pool.num_free == 64


def test_a_sequence_ends_with_its_last_allowed_token() -> None:
    scheduler = make_scheduler()
    sequence = make_sequence(3, max_tokens=3)
    scheduler.add(sequence)
    reasons = [run_step(scheduler)[2][0][1].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.LENGTH]
    assert not scheduler.has_work and scheduler.pool.num_free == 64


def test_no_more_sequences_run_than_allowed() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for _ in range(3):
        scheduler.add(make_sequence(2))
    run_step(scheduler)
    assert (len(scheduler.running), len(scheduler.waiting)) == (2, 1)


def test_no_more_sequences_run_than_the_budget_can_decode() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_tokens=2)
    sequences = [make_sequence(1, max_tokens=20) for _ in range(4)]
    for sequence in sequences:
        scheduler.add(sequence)
    run_step(scheduler)
    batch, _, _ = run_step(scheduler)
    assert batch.sequences == (sequences[0], sequences[1])


def test_a_prompt_waits_until_all_of_it_fits() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first, second = make_sequence(8, max_tokens=2), make_sequence(12, max_tokens=2)
    scheduler.add(first)
    scheduler.add(second)
    batch, _, _ = run_step(scheduler)
    assert batch.sequences == (first,)
    run_step(scheduler)
    assert first.finish_reason is FinishReason.LENGTH
    batch, _, _ = run_step(scheduler)
    assert batch.sequences == (second,)


def test_a_waiting_prompt_is_not_overtaken_by_a_smaller_one() -> None:
    scheduler = make_scheduler(num_blocks=4)
    first, large, small = make_sequence(8, max_tokens=3), make_sequence(12), make_sequence(1)
    for sequence in (first, large, small):
        scheduler.add(sequence)
    batch, _, _ = run_step(scheduler)
    assert batch.sequences == (first,)
    assert list(scheduler.waiting) == [large, small]


def test_the_newest_is_preempted_and_computed_again_with_what_it_had_said() -> None:
    scheduler = make_scheduler(num_blocks=4)
    old, new = make_sequence(4, max_tokens=9), make_sequence(4, max_tokens=9)
    scheduler.add(old)
    run_step(scheduler)
    scheduler.add(new)
    while new not in scheduler.waiting or not new.output_ids:
        run_step(scheduler)
    assert scheduler.running == [old]
    assert new.num_computed == 0 and new.block_ids == [] and new.row == -1
    said = list(new.output_ids)
    while old.finish_reason is None:
        run_step(scheduler)
    batch, frame, _ = run_step(scheduler)
    assert batch.sequences == (new,)
    assert frame.token_ids.tolist() == new.prompt_ids + said
    assert frame.output_indices.tolist() == [len(said)]
    assert frame.num_decodes == 0


def test_blocks_of_an_aborted_sequence_are_not_free_before_its_step_is_committed() -> None:
    scheduler = make_scheduler()
    sequence, other = make_sequence(4), make_sequence(4)
    scheduler.add(sequence)
    scheduler.add(other)
    batch = scheduler.schedule()
    free = scheduler.pool.num_free
    assert scheduler.abort(sequence)
    assert scheduler.pool.num_free == free and sequence.block_ids
    frame = scheduler.step_input(batch, step=0, group_tokens=ALONE)
    assert len(frame.sample_rows) == 2
    outputs = scheduler.commit(batch, np.array([1, 2], np.int32))
    assert outputs == [(other, TokenOutput((2,)))]
    assert sequence.finish_reason is FinishReason.ABORT and sequence.block_ids == []
    assert scheduler.pool.num_free == free + 1
    assert scheduler.running == [other]


def test_an_abort_frees_what_no_step_uses_at_once_and_only_the_first_counts() -> None:
    scheduler = make_scheduler()
    waiting, running = make_sequence(4), make_sequence(4)
    scheduler.add(running)
    run_step(scheduler)
    scheduler.add(waiting)
    assert scheduler.abort(running) and scheduler.abort(waiting)
    assert not scheduler.abort(running) and not scheduler.abort(waiting)
    assert not scheduler.abort(make_sequence(1))  # it was never added
    assert scheduler.pool.num_free == 64 and not scheduler.has_work


def test_ending_all_gives_back_everything_in_flight_too() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    sequences = [make_sequence(4) for _ in range(3)]
    for sequence in sequences:
        scheduler.add(sequence)
    scheduler.schedule()
    scheduler.abort(sequences[0])
    assert scheduler.end_all(FinishReason.ERROR) == sequences[1:]
    assert [s.finish_reason for s in sequences] == [FinishReason.ABORT, FinishReason.ERROR, FinishReason.ERROR]
    assert scheduler.pool.num_free == 64 and not scheduler.has_work


def test_queued_prefill_tokens_are_those_before_decoding() -> None:
    scheduler = make_scheduler(max_tokens=8)
    scheduler.add(make_sequence(20))
    scheduler.add(make_sequence(3))
    assert scheduler.queued_prefill_tokens == 23
    run_step(scheduler)
    assert scheduler.queued_prefill_tokens == 15
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.queued_prefill_tokens == 0


@pytest.mark.parametrize(("num_prompt", "fits"), [(1, 16), (16, 1), (17, 0)])
def test_the_last_output_token_needs_no_place_in_the_cache(num_prompt: int, fits: int) -> None:
    scheduler = make_scheduler(num_blocks=4)
    assert scheduler.max_tokens_that_fit(num_prompt) == fits
    if fits > 0:
        sequence = make_sequence(num_prompt, max_tokens=fits)
        scheduler.add(sequence)
        for _ in range(100):
            if sequence.finish_reason is None:
                run_step(scheduler)
        assert len(sequence.output_ids) == fits


class Trial:
    """A scheduler under random events, with a worker that remembers what it was told to write where."""

    def __init__(self, *, num_blocks: int, max_num_seqs: int, max_tokens: int) -> None:
        self.scheduler = make_scheduler(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_tokens=max_tokens)
        self.max_num_seqs, self.max_tokens, self.num_blocks = max_num_seqs, max_tokens, num_blocks
        self.sequences: list[Sequence] = []
        self.published: dict[int, list[TokenOutput]] = {}
        self.cache: dict[int, int] = {}  # slot -> token
        self.steps = 0

    def add(self, num_prompt: int, max_tokens: int) -> None:
        num_prompt = min(num_prompt, self.num_blocks * BLOCK_SIZE)
        max_tokens = min(max_tokens, self.scheduler.max_tokens_that_fit(num_prompt))
        sequence = make_sequence(num_prompt, max_tokens)
        self.sequences.append(sequence)
        self.published[id(sequence)] = []
        self.scheduler.add(sequence)

    def abort(self, index: int) -> None:
        if self.sequences:
            sequence = self.sequences[index % len(self.sequences)]
            if self.scheduler.abort(sequence):
                self.published[id(sequence)].append(TokenOutput((), FinishReason.ABORT))

    def step(self, abort_during: int | None) -> None:
        batch = self.scheduler.schedule()
        frame = self.scheduler.step_input(batch, step=self.steps, group_tokens=ALONE)
        held = {block for s in batch.sequences for block in s.block_ids}
        self.check_frame(batch, frame)
        if abort_during is not None:
            self.abort(abort_during)
        assert held == {block for s in batch.sequences for block in s.block_ids}
        # The next token depends on all before it, so a lost or repeated one changes what follows.
        tokens = [self.sample(s) for s in batch.sampled]
        for sequence, output in self.scheduler.commit(batch, np.array(tokens, np.int32)):
            self.published[id(sequence)].append(output)
        self.steps += 1
        self.check_blocks()

    def sample(self, sequence: Sequence) -> int:
        return 10 + sum(sequence.prompt_ids + sequence.output_ids) % 89

    def check_frame(self, batch: Batch, frame: StepInput) -> None:
        assert len(frame.token_ids) <= self.max_tokens
        assert len(batch.sequences) <= self.max_num_seqs
        assert len(set(frame.slots.tolist())) == len(frame.slots)
        for index, (sequence, num_new) in enumerate(zip(batch.sequences, batch.num_new, strict=True)):
            assert num_new >= 1 and sequence.finish_reason is None
            is_decode = num_new == 1 and sequence.num_computed > 0
            assert is_decode or index >= batch.num_decodes
            start, end = frame.query_starts[index : index + 2]
            self.cache |= dict(zip(frame.slots[start:end].tolist(), frame.token_ids[start:end].tolist(), strict=True))
            # What attention would read through the block table is the sequence's own text.
            tokens = (sequence.prompt_ids + sequence.output_ids)[: frame.context_lens[index]]
            table = frame.block_tables[index]
            read = [self.cache[int(table[p // BLOCK_SIZE]) * BLOCK_SIZE + p % BLOCK_SIZE] for p in range(len(tokens))]
            assert read == tokens

    def check_blocks(self) -> None:
        owned = [block for s in self.sequences for block in s.block_ids]
        assert len(owned) == len(set(owned)) == self.num_blocks - self.scheduler.pool.num_free
        order = [self.sequences.index(s) for s in (*self.scheduler.running, *self.scheduler.waiting)]
        assert order == sorted(order)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 30), st.integers(1, 12)),
        st.tuples(st.just("step"), st.none() | st.integers(0, 20), st.none()),
        st.tuples(st.just("abort"), st.integers(0, 20), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, num_blocks=st.integers(1, 12), max_num_seqs=st.integers(1, 5), max_tokens=st.integers(1, 12))
def test_whatever_happens_every_sequence_ends_once_and_every_block_comes_back(
    events: list[tuple[str, int, int]], num_blocks: int, max_num_seqs: int, max_tokens: int
) -> None:
    trial = Trial(num_blocks=num_blocks, max_num_seqs=max_num_seqs, max_tokens=max_tokens)
    for kind, first, second in events:
        if kind == "add":
            trial.add(first, second)
        elif kind == "abort":
            trial.abort(first)
        else:
            trial.step(first)
    # Each step computes something, and a preempted sequence is computed again only while older ones end.
    for _ in range(3000):
        if trial.scheduler.has_work:
            trial.step(None)
    assert not trial.scheduler.has_work
    assert trial.scheduler.pool.num_free == num_blocks
    for sequence in trial.sequences:
        outputs = trial.published[id(sequence)]
        assert [o.finish_reason for o in outputs if o.finish_reason] == [sequence.finish_reason]
        assert outputs[-1].finish_reason is sequence.finish_reason
        assert [token for o in outputs for token in o.token_ids] == sequence.output_ids
        if sequence.finish_reason is FinishReason.LENGTH:
            assert len(sequence.output_ids) == sequence.params.max_tokens
