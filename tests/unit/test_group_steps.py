"""Several step loops in lockstep, within an epoch. Epochs that follow each other: test_group_epochs.py."""

from __future__ import annotations

import asyncio

import pytest

from coordinator import messages
from replica.request import FinishReason
from replica.step_clock import DRAIN, STOP
from tests.unit.group_soak import soak
from tests.unit.hand_clock import HandGroup
from tests.unit.hand_executor import HandExecutor
from tests.unit.hand_replica import NUM_BLOCKS, Replica, by_hand, end_step, make_sequence, running, settle


async def both_decode(group: HandGroup, replicas: list[Replica]) -> None:
    """Two members each have a sequence that decodes, and a step runs."""
    for replica in replicas:
        replica.loop.submit([make_sequence(max_tokens=20)])
    await settle()
    for _ in range(3):  # the first's prompt; its decode, which holds the second's prompt back; both
        group.now_s += 1.1
        await end_step(replicas)


async def test_a_member_without_work_runs_every_step_of_the_others_without_tokens() -> None:
    group, replicas = by_hand(3)
    async with running(replicas):
        assert group.is_parked and not group.releases
        replicas[1].loop.submit([make_sequence()])
        await settle()
        for tokens in ([0, 3, 0], [0, 1, 0]):
            inputs = await end_step(replicas)
            assert [len(step_input.token_ids) for step_input in inputs] == tokens
            assert all(step_input.group_tokens.tolist() == tokens for step_input in inputs)
        assert group.is_parked
        stats = [replica.loop.stats() for replica in replicas]
        assert [s.step for s in stats] == [2, 2, 2] and [s.idle_steps for s in stats] == [2, 0, 2]
        assert all(s.barrier_wait_s >= 0 and s.forward_s > 0 for s in stats) and stats[0].barrier_wait_s == 0


async def test_a_request_replaces_the_arrival_of_an_idle_member() -> None:
    group, replicas = by_hand(2)
    async with running(replicas):
        assert replicas[0].clock.arrivals == [(0, 0)]
        replicas[0].loop.submit([make_sequence(5)])
        assert replicas[0].clock.arrivals == [(0, 0), (0, 5)]  # at once, whatever the loop's task is doing
        assert [release.tokens for release in group.releases] == [(5, 0)]
        await settle()
        await end_step(replicas)


async def test_an_arrival_that_came_too_late_to_be_replaced_runs_as_released() -> None:
    group, replicas = by_hand(2)
    async with running(replicas):
        late = replicas[1].loop
        replicas[0].loop.submit([make_sequence()])  # releases a step with (3, 0), which member 1 has not taken yet
        sequence = make_sequence(7)
        late.submit([sequence])
        assert replicas[1].clock.arrivals == [(0, 0), (0, 7)]
        await settle()
        inputs = await end_step(replicas)
        assert [len(step_input.token_ids) for step_input in inputs] == [3, 0]
        inputs = await end_step(replicas)
        assert [len(step_input.token_ids) for step_input in inputs] == [1, 7]
        await end_step(replicas)
        assert sequence.output_ids == [100, 101]
    assert group.clock.step == 3


async def test_the_next_step_is_agreed_while_a_step_runs_and_a_sequence_that_ends_meanwhile_is_computed_once_more() -> (
    None
):
    group, replicas = by_hand(2)
    sequence = make_sequence(max_tokens=9, stop_token_ids=frozenset({101}))
    async with running(replicas):
        replicas[0].loop.submit([sequence])
        await settle()
        await end_step(replicas)
        assert len(group.releases) == 3  # the prompt, the decode that runs, and the next one
        await end_step(replicas)
        assert sequence.output_ids == [100, 101] and sequence.finish_reason is FinishReason.STOP
        assert sequence.block_ids  # a forward writes them
        inputs = await end_step(replicas)
        assert [len(step_input.token_ids) for step_input in inputs] == [1, 0]
        assert sequence.output_ids == [100, 101] and not sequence.block_ids
        assert group.is_parked and replicas[0].loop.stats().free_blocks == NUM_BLOCKS


async def test_a_sequence_that_ends_by_length_takes_no_part_in_the_next_step() -> None:
    group, replicas = by_hand(2)
    async with running(replicas):
        replicas[0].loop.submit([make_sequence(max_tokens=2)])
        await settle()
        await end_step(replicas)
        await end_step(replicas)
        assert group.is_parked and [release.tokens for release in group.releases] == [(3, 0), (1, 0)]


async def test_a_prompt_is_bounded_while_another_member_has_streams() -> None:
    _, replicas = by_hand(2)
    async with running(replicas):
        replicas[1].loop.submit([make_sequence(max_tokens=6)])
        await settle()
        for _ in range(2):  # its prompt, and its first decode
            await end_step(replicas)
        replicas[0].loop.submit([make_sequence(40)])
        tokens = []
        for _ in range(6):
            inputs = await end_step(replicas)
            tokens.append([len(step_input.token_ids) for step_input in inputs])
        # Two steps were released before; of a step that is scheduled ahead, the last known is that the other decodes.
        assert tokens == [[0, 1], [0, 1], [8, 1], [8, 1], [8, 0], [16, 0]]
        await end_step(replicas)


async def test_a_request_that_waits_for_room_runs_when_the_step_that_took_it_is_done() -> None:
    group = HandGroup(2)
    replicas = [Replica(group, dp_rank, HandExecutor(), num_blocks=2) for dp_rank in range(2)]
    async with running(replicas):
        replicas[0].loop.submit([make_sequence(8, max_tokens=1), make_sequence(7, max_tokens=1)])
        await settle()
        # While the first runs there is no room for the second, and the replica arrives with nothing. The second's first
        # block is the first's.
        for tokens in (8, 3):
            inputs = await end_step(replicas)
            assert len(inputs[0].token_ids) == tokens
        assert group.is_parked and not replicas[0].loop.num_unfinished


async def test_a_prompt_is_held_back_while_others_decode_and_its_decodes_run() -> None:
    group, replicas = by_hand(2, prefill_delay_s=1.0)
    async with running(replicas):
        await both_decode(group, replicas)
        replicas[0].loop.submit([make_sequence(6)])
        await end_step(replicas)  # was released before
        for _ in range(3):
            inputs = await end_step(replicas)
            assert [len(step_input.token_ids) for step_input in inputs] == [1, 1]
        group.now_s += 1.1
        for _ in range(2):
            await end_step(replicas)  # the one that runs, and the one that was agreed while it ran
        inputs = await end_step(replicas)
        assert [len(step_input.token_ids) for step_input in inputs] == [7, 1]


async def test_a_prompt_that_is_held_back_and_aborted_frees_its_blocks() -> None:
    group, replicas = by_hand(2, prefill_delay_s=1.0)
    loop = replicas[0].loop
    async with running(replicas):
        await both_decode(group, replicas)
        num_released = len(group.releases)
        held = make_sequence(6)
        loop.submit([held])
        await end_step(replicas)
        assert len(held.block_ids) == 2
        loop.abort([held])  # while a step runs that has it not
        await end_step(replicas)
        assert (loop.stats().running, held.block_ids) == (1, [])
    assert all(release.prefill_tokens == (0, 0) for release in group.releases[num_released:])


def test_the_replica_and_the_clock_have_one_word_for_the_last_step() -> None:
    assert STOP == messages.STOP


async def test_all_members_act_on_a_command_at_the_same_step_and_stop_together() -> None:
    group, replicas = by_hand(2)
    async with running(replicas) as tasks:
        told = [asyncio.create_task(replica.loop.commanded(DRAIN)) for replica in replicas]
        replicas[0].loop.want(DRAIN)
        await settle()
        await end_step(replicas)
        assert all(task.done() for task in told)
        replicas[1].loop.want(STOP)
        await settle()
        await end_step(replicas)
        await asyncio.gather(*tasks)
    assert [release.commands for release in group.releases] == [(DRAIN,), (STOP,)]


@pytest.mark.parametrize("seed", range(4))
async def test_members_that_are_idle_at_random_run_the_same_steps(seed: int) -> None:
    await soak(seed, num_steps=1500)
