"""The scheduler as pure state: what a step holds, and what is freed when. Random events: test_scheduler_trials.py."""

from __future__ import annotations

import numpy as np
import pytest

from replica.batch import Batch
from replica.frames import I32, StepInput, decode, encode
from replica.request import FinishReason, SamplingParams, Sequence, TokenOutput
from replica.scheduler import Scheduler

BLOCK_SIZE = 4
END_TOKEN = 9
ALONE: I32 = np.zeros(0, np.int32)  # group_tokens of a replica alone


def make_sequence(
    num_prompt: int, max_tokens: int = 4, *, choice: int = 0, seed: int = 7, priority: int = 0
) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=frozenset({END_TOKEN}), top_k=5)
    prompt_ids = [100 + position for position in range(num_prompt)]
    return Sequence(request_id="r", choice=choice, prompt_ids=prompt_ids, params=params, priority=priority)


def make_scheduler(
    *, num_blocks: int = 64, max_num_seqs: int = 8, max_tokens: int = 16, max_prefill_tokens: int | None = None
) -> Scheduler:
    """Without a prefix cache: test_prefix_cache.py has one."""
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_tokens,
        max_model_len=256,
        block_size=BLOCK_SIZE,
        max_prefill_tokens=max_prefill_tokens,
        has_prefix_cache=False,
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
    assert scheduler.running == [old] and scheduler.counts.num_preemptions == 1
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


def test_beside_decodes_prompts_get_no_more_than_their_budget_and_alone_all_of_the_step() -> None:
    scheduler = make_scheduler(max_tokens=16, max_prefill_tokens=5)
    stream, prompt = make_sequence(12, max_tokens=4), make_sequence(40)
    scheduler.add(stream)
    assert run_step(scheduler)[0].prefill_tokens == 12
    scheduler.add(prompt)
    counts = [(b.decode_tokens, b.prefill_tokens) for b in (run_step(scheduler)[0] for _ in range(4))]
    assert counts == [(1, 5), (1, 5), (1, 5), (0, 16)]
    scheduler.others_decode = True  # now those are streams of the group's other replicas
    assert run_step(scheduler)[0].prefill_tokens == 5


def test_a_lower_number_runs_first_and_within_a_priority_the_older() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    low, normal, later, high = (make_sequence(2, max_tokens=1, priority=p) for p in (1, 0, 0, -1))
    for sequence in (low, normal, later, high):
        scheduler.add(sequence)
    assert [run_step(scheduler)[0].sequences for _ in range(4)] == [(high,), (normal,), (later,), (low,)]


def test_one_of_lower_priority_gives_way_and_one_of_the_same_does_not() -> None:
    scheduler = make_scheduler(num_blocks=6)
    low, normal = make_sequence(8, max_tokens=9, priority=1), make_sequence(4, max_tokens=8)
    scheduler.add(normal)
    scheduler.add(low)
    run_step(scheduler)
    run_step(scheduler)
    assert scheduler.running == [normal, low] and scheduler.pool.num_free == 1
    high = make_sequence(7, max_tokens=1, priority=-1)
    scheduler.add(high)
    batch, _, _ = run_step(scheduler)
    assert batch.sequences == (normal, high) and scheduler.waiting == [low]
    run_step(scheduler)
    assert scheduler.running == [normal, low]
    scheduler.add(make_sequence(7, max_tokens=1, priority=1))
    assert run_step(scheduler)[0].sequences == (normal, low)


def test_nobody_gives_way_in_vain() -> None:
    scheduler = make_scheduler(num_blocks=6)
    normal, low = make_sequence(8, max_tokens=9), make_sequence(4, max_tokens=9, priority=1)
    scheduler.add(normal)
    scheduler.add(low)
    run_step(scheduler)
    scheduler.add(make_sequence(20, max_tokens=1))  # does not fit beside the one of its own priority
    run_step(scheduler)
    assert scheduler.running == [normal, low] and scheduler.counts.num_preemptions == 0


def test_a_step_ahead_is_not_scheduled_where_one_must_give_way() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    low, high = make_sequence(2, priority=1), make_sequence(2, priority=-1)
    scheduler.add(low)
    batch = scheduler.schedule()
    scheduler.add(high)
    assert scheduler.schedule_ahead() is None
    scheduler.commit(batch, np.ones(1, np.int32))
    assert run_step(scheduler)[0].sequences == (high,)


def test_steps_that_are_taken_back_are_scheduled_again_and_what_was_aborted_is_freed() -> None:
    scheduler = make_scheduler()
    first, aborted = make_sequence(6), make_sequence(6)
    scheduler.add(first)
    scheduler.add(aborted)
    scheduler.schedule()
    assert scheduler.schedule_ahead()
    scheduler.abort(aborted)
    scheduler.rollback()
    assert scheduler.pool.num_free == 64 - 2 and aborted.row == -1
    batch, frame, outputs = run_step(scheduler)
    assert batch.sequences == (first,) and frame.token_ids.tolist() == first.prompt_ids
    assert outputs == [(first, TokenOutput((1,)))]
    scheduler.rollback()  # of nothing
    assert run_step(scheduler)[0].num_new == (1,)


def test_the_sizes_of_steps_are_counted_and_those_without_tokens_are_not() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_sequence(6, max_tokens=3))
    for _ in range(4):
        run_step(scheduler)
    assert scheduler.counts.step_tokens == {6: 1, 1: 2}
