"""Prompts begin with what the KV cache has of them: which blocks are found, shared, evicted, and when not to look."""

from __future__ import annotations

import numpy as np
import pytest

from replica.batch import Batch
from replica.block_pool import BlockPool
from replica.frames import I32, Logprobs, StepInput
from replica.request import SamplingParams, Sequence
from replica.scheduler import Scheduler

BLOCK_SIZE = 4
ALONE: I32 = np.zeros(0, np.int32)  # group_tokens of a replica alone
TEXT = list(range(100, 160))


def make_sequence(prompt_ids: list[int], max_tokens: int = 1, *, logprobs: int | None = None) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, seed=7, prompt_logprobs=logprobs)
    return Sequence(request_id="r", choice=0, prompt_ids=prompt_ids, params=params)


def make_scheduler(*, num_blocks: int = 64, max_tokens: int = 64, has_prefix_cache: bool = True) -> Scheduler:
    scheduler = Scheduler(
        max_num_seqs=8,
        max_num_batched_tokens=max_tokens,
        max_model_len=256,
        block_size=BLOCK_SIZE,
        has_prefix_cache=has_prefix_cache,
    )
    scheduler.pool.add_blocks(num_blocks)
    return scheduler


def run_step(scheduler: Scheduler) -> tuple[Batch, StepInput]:
    """One step of a worker that always samples 1."""
    batch = scheduler.schedule()
    frame = scheduler.step_input(batch, step=0, group_tokens=ALONE)
    found = None
    if (wanted := frame.logprobs) is not None:
        found = Logprobs(token_ids=wanted.targets[:, np.newaxis], values=np.zeros((len(wanted.targets), 1), np.float32))
    scheduler.commit(batch, np.ones(len(frame.sample_rows), np.int32), found)
    return batch, frame


def run(scheduler: Scheduler, *sequences: Sequence) -> None:
    """Until these, and all others, have ended."""
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work:
        run_step(scheduler)


@pytest.mark.parametrize(
    ("num_shared", "num_own", "num_cached"),
    [(3, 9, 0), (4, 9, 4), (11, 2, 8), (12, 1, 12), (12, 0, 8), (13, 0, 12), (1, 0, 0)],
    ids=lambda n: str(n),
)
def test_a_prompt_takes_the_full_blocks_that_it_shares_but_for_its_last_token(
    num_shared: int, num_own: int, num_cached: int
) -> None:
    scheduler = make_scheduler()
    run(scheduler, make_sequence(TEXT))
    sequence = make_sequence(TEXT[:num_shared] + [7] * num_own, max_tokens=2)
    scheduler.add(sequence)
    _, frame = run_step(scheduler)
    assert sequence.num_cached == num_cached
    assert frame.positions.tolist() == list(range(num_cached, num_shared + num_own))
    assert frame.context_lens.tolist() == [num_shared + num_own]
    assert scheduler.counts.prefix_hits == num_cached
    assert scheduler.counts.prefix_queries == len(TEXT) + num_shared + num_own


def test_what_was_said_is_found_when_a_conversation_goes_on() -> None:
    scheduler = make_scheduler()
    first = make_sequence(TEXT[:6], max_tokens=7)
    run(scheduler, first)
    following = make_sequence(TEXT[:6] + first.output_ids + [7, 7, 7])
    run(scheduler, following)
    assert following.num_cached == 12  # 6 and 7, of which the last was never computed: 3 blocks


def test_blocks_that_are_alike_are_found_only_after_the_same_beginning() -> None:
    scheduler = make_scheduler()
    run(scheduler, make_sequence([5] * 8))
    other = make_sequence([1, 2, 3, 4] + [5] * 8)
    run(scheduler, other)
    assert other.num_cached == 0
    longer = make_sequence([5] * 16)
    run(scheduler, longer)
    assert longer.num_cached == 8


def test_a_block_is_not_found_before_the_step_that_fills_it_is_committed() -> None:
    scheduler = make_scheduler()
    cut_off = make_sequence(TEXT[:9])
    scheduler.add(cut_off)
    scheduler.step_input(scheduler.schedule(), step=0, group_tokens=ALONE)
    scheduler.abort(cut_off)
    scheduler.rollback()
    sequence = make_sequence(TEXT[:9])
    run(scheduler, sequence)
    assert sequence.num_cached == 0


def test_of_an_aborted_sequence_what_its_last_step_has_filled_is_found() -> None:
    scheduler = make_scheduler()
    aborted = make_sequence(TEXT[:9], max_tokens=5)
    scheduler.add(aborted)
    batch = scheduler.schedule()
    scheduler.abort(aborted)
    scheduler.commit(batch, np.ones(1, np.int32))
    sequence = make_sequence(TEXT[:9])
    run(scheduler, sequence)
    assert sequence.num_cached == 8


def test_choices_of_one_request_wait_for_the_first_and_share_its_prompt() -> None:
    scheduler = make_scheduler()
    prompt_ids = TEXT[:10]
    choices = [make_sequence(prompt_ids, max_tokens=3) for _ in range(4)]
    for choice in choices:
        scheduler.add(choice)
    assert run_step(scheduler)[0].sequences == (choices[0],)
    batch, frame = run_step(scheduler)
    assert batch.sequences == tuple(choices) and batch.num_new == (1, 2, 2, 2)
    assert frame.block_tables[:, :2].tolist() == [choices[0].block_ids[:2]] * 4
    assert len({choice.block_ids[2] for choice in choices}) == 4
    assert [choice.num_cached for choice in choices] == [0, 8, 8, 8]
    assert all(choice.block_keys == choices[0].block_keys for choice in choices)
    run(scheduler)
    assert scheduler.pool.num_free == 64


def test_a_choice_that_comes_later_has_the_keys_of_its_own_answer() -> None:
    scheduler = make_scheduler()
    prompt_ids = TEXT[:8]
    first, later = (make_sequence(prompt_ids, max_tokens=20) for _ in range(2))
    scheduler.add(first)
    for _ in range(9):
        run_step(scheduler)
    scheduler.add(later)
    run_step(scheduler)
    later.output_ids[:] = [5]  # another one than the first's
    run(scheduler)
    fresh = make_sequence(prompt_ids + later.output_ids)
    assert later.block_keys == [BlockPool(block_size=BLOCK_SIZE).key(fresh, i) for i in range(len(later.block_keys))]
    assert len(later.block_keys) == 6 and later.block_keys[2] != first.block_keys[2]


def test_prompts_that_go_on_differently_do_not_wait_for_each_other() -> None:
    scheduler = make_scheduler()
    run(scheduler, make_sequence(TEXT[:9]))
    prompts = [make_sequence([*TEXT[:8], own, *TEXT[:8]]) for own in (1, 2)] + [
        make_sequence([own] * 8) for own in (3, 4)
    ]
    for prompt in prompts:
        scheduler.add(prompt)
    assert run_step(scheduler)[0].sequences == tuple(prompts)


def test_one_that_shares_the_beginning_of_a_long_prompt_waits_for_that_part_only() -> None:
    scheduler = make_scheduler(max_tokens=16)
    long, short = make_sequence(TEXT), make_sequence([*TEXT[:16], 7])
    scheduler.add(long)
    scheduler.add(short)
    assert run_step(scheduler)[0].sequences == (long,)
    while long.finish_reason is None:
        run_step(scheduler)
    assert short.num_cached == 16


def test_nobody_waits_for_a_beginning_whose_sequence_is_gone() -> None:
    scheduler = make_scheduler(max_tokens=4)
    first, second = make_sequence(TEXT[:12]), make_sequence(TEXT[:12])
    scheduler.add(first)
    scheduler.add(second)
    run_step(scheduler)
    scheduler.abort(first)
    assert run_step(scheduler)[0].sequences == (second,) and second.num_cached == 4


def test_where_log_probabilities_of_a_prompt_are_wanted_none_of_it_is_taken_and_others_take_of_it() -> None:
    scheduler = make_scheduler()
    run(scheduler, make_sequence(TEXT[:20]))
    echoes = make_sequence(TEXT[:28], logprobs=0)
    run(scheduler, echoes)
    assert echoes.num_cached == 0
    assert [found.token_id for found in echoes.prompt_logprobs] == TEXT[1:28]
    sequence = make_sequence(TEXT[:28])
    run(scheduler, sequence)
    assert sequence.num_cached == 24


def test_a_preempted_prompt_takes_what_is_left_of_it_and_tells_no_log_probability_twice() -> None:
    scheduler = make_scheduler(num_blocks=8, max_tokens=8)
    old, new = make_sequence(TEXT[:4], max_tokens=20), make_sequence(TEXT[20:38], max_tokens=4, logprobs=0)
    scheduler.add(old)
    scheduler.add(new)
    while not scheduler.counts.num_preemptions:
        run_step(scheduler)
    assert new in scheduler.waiting and len(new.output_ids) < 4
    run(scheduler)
    assert [found.token_id for found in new.prompt_logprobs] == TEXT[21:38]
    assert new.num_cached == 0 and scheduler.counts.prefix_hits == 0  # what it had itself is no hit


def test_the_longest_unused_block_is_given_away_first_and_of_one_text_the_last() -> None:
    scheduler = make_scheduler(num_blocks=8)
    old, used = TEXT[:13], TEXT[20:33]
    run(scheduler, make_sequence(old))
    run(scheduler, make_sequence(used))  # three blocks of each are cached
    run(scheduler, make_sequence(old))  # but the other is unused for longer now
    run(scheduler, make_sequence(TEXT[40:53]))  # takes the two empty ones and two more
    assert cached(scheduler, old) == 12
    assert cached(scheduler, used) == 4


def test_a_block_that_somebody_uses_is_not_given_away() -> None:
    scheduler = make_scheduler(num_blocks=8)
    stream = make_sequence(TEXT[:9], max_tokens=8)
    scheduler.add(stream)
    run_step(scheduler)
    blocks = list(stream.block_ids)
    run_step(scheduler)
    while stream.finish_reason is None:
        scheduler.add(make_sequence([len(stream.output_ids)] * 9))
        run_step(scheduler)
        assert stream.finish_reason or stream.block_ids[:3] == blocks
    assert cached(scheduler, TEXT[:9]) == 8


def test_cached_blocks_are_free_ones_and_room_for_a_prompt_counts_those_it_takes() -> None:
    scheduler = make_scheduler(num_blocks=4)
    run(scheduler, make_sequence(TEXT[:16]))
    assert scheduler.pool.num_free == 4
    whole = make_sequence(TEXT[:13])  # its three cached blocks and one more are all there are
    run(scheduler, whole)
    assert whole.num_cached == 12
    other = make_sequence(TEXT[30:46])
    run(scheduler, other)
    assert other.finish_reason is not None and cached(scheduler, TEXT[:16]) == 0


def test_without_a_prefix_cache_nothing_is_found_and_nobody_waits() -> None:
    scheduler = make_scheduler(has_prefix_cache=False)
    run(scheduler, make_sequence(TEXT[:20]))
    twins = [make_sequence(TEXT[:20]) for _ in range(2)]
    for twin in twins:
        scheduler.add(twin)
    assert run_step(scheduler)[0].sequences == tuple(twins)
    assert [twin.num_cached for twin in twins] == [0, 0]
    assert (scheduler.counts.prefix_queries, scheduler.counts.prefix_hits) == (0, 0)


def test_a_key_is_of_the_tokens_alone() -> None:
    pools = [BlockPool(block_size=BLOCK_SIZE) for _ in range(2)]
    prompt, said = make_sequence(TEXT[:8]), make_sequence(TEXT[:3])
    said.output_ids = TEXT[3:8]
    assert [pools[0].key(prompt, i) for i in (1, 0)] == [pools[1].key(said, i) for i in (1, 0)]


def cached(scheduler: Scheduler, prompt_ids: list[int]) -> int:
    """How many tokens of the prompt are in the cache."""
    return len(scheduler.pool.find(make_sequence(prompt_ids), len(prompt_ids))) * BLOCK_SIZE
