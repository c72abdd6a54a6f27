"""Several step loops whose group loses members: the others go on in a new epoch, and no token is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from coordinator import messages
from coordinator.clock import Phase
from replica.errors import CollectiveFailed, GroupLost, WorkerFailed
from replica.frames import StepInput, StepOutput
from replica.group_state import PARTS, GroupPhase
from replica.request import FinishReason
from replica.step_clock import DRAIN
from tests.unit.group_soak import soak
from tests.unit.hand_replica import NUM_BLOCKS, by_hand, end_step, hand, make_sequence, running, settle


async def test_the_others_go_on_without_a_replica_whose_rank_dies_and_lose_no_token() -> None:
    group, replicas = by_hand(3)
    sequences = [make_sequence(max_tokens=9) for _ in replicas]
    async with running(replicas) as tasks:
        for replica, sequence in zip(replicas, sequences, strict=True):
            replica.loop.submit([sequence])
        await settle()
        for _ in range(3):
            await end_step(replicas)
        tokens = [list(sequence.output_ids) for sequence in sequences]
        hand(replicas[1]).death.set_result(WorkerFailed("the worker of rank 0 ended: killed by SIGKILL"))
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            await tasks[1]
        await settle()
        output = sequences[1].stream.take()
        assert output is not None and output.finish_reason is FinishReason.LOST and "SIGKILL" in output.error

        survivors = [replicas[0], replicas[2]]
        for replica, sequence, before in zip(survivors, sequences[::2], tokens[::2], strict=True):
            assert await hand(replica).regroups.get() == (2, (0, 2), ((1,),))
            assert sequence.output_ids == before, "the step that was cut off is not committed"
            hand(replica).started.get_nowait()
        while any(sequence.finish_reason is None for sequence in sequences[::2]):
            inputs = await end_step(survivors)
            assert all(step_input.group_tokens[1] == 0 for step_input in inputs)
        assert [release.step for release in group.releases if release.epoch == 2][:2] == [0, 1]
    assert [sequence.output_ids for sequence in sequences[::2]] == [list(range(100, 109))] * 2
    for replica in survivors:
        state = replica.loop.group.to_json()
        assert (state["epoch"], state["members"], state["state"]) == (2, [0, 2], "running")
        (eviction,) = state["evicted"]
        assert eviction["dp_ranks"] == [1] and "member 1 (r1) was lost before step" in eviction["reason"]
        assert set(state["last_reconfiguration"]) == {f"{part}_s" for part in PARTS}


async def test_parked_members_go_on_without_one_that_is_lost_and_serve_the_next_request() -> None:
    group, replicas = by_hand(2)
    async with running(replicas) as tasks:
        replicas[0].loop.submit([make_sequence(max_tokens=1)])
        await settle()
        await end_step(replicas)
        tasks[1].cancel()
        group.lose(1)
        await settle()
        assert group.is_parked and group.clock.members == (0,)
        sequence = make_sequence()
        replicas[0].loop.submit([sequence])
        await settle()
        while sequence.finish_reason is None:
            await end_step(replicas[:1])
        assert sequence.output_ids == [100, 101]


async def test_a_replica_that_is_lost_while_the_others_regroup_begins_another_epoch() -> None:
    group, replicas = by_hand(3)
    sequence = make_sequence(max_tokens=5)
    async with running(replicas) as tasks:
        replicas[0].loop.submit([sequence])
        await settle()
        await end_step(replicas)
        hand(replicas[0]).may_regroup.clear()
        for dp_rank in (2, 1):
            tasks[dp_rank].cancel()
            group.lose(dp_rank)
            await settle()
        regroups = hand(replicas[0]).regroups
        assert [regroups.get_nowait(), regroups.get_nowait()] == [(2, (0, 1), ((2,),)), (3, (0,), ((2,), (1,)))]
        hand(replicas[0]).may_regroup.set()
        await settle()
        hand(replicas[0]).started.get_nowait()  # that was cut off
        while sequence.finish_reason is None:
            await end_step(replicas[:1])
    assert sequence.output_ids == [100, 101, 102, 103, 104]
    assert [eviction.dp_ranks for eviction in replicas[0].loop.group.evictions] == [(2,), (1,)]


async def test_a_group_is_said_to_form_until_its_ranks_are_connected_for_the_first_epoch() -> None:
    _, replicas = by_hand(2)
    loop = replicas[0].loop
    told = loop.group.to_json()
    assert (told["state"], told["epoch"], told["members"]) == ("forming", 0, []), "nobody has agreed on anything"
    async with running(replicas):
        told = loop.group.to_json()
        assert (told["state"], told["epoch"], told["members"]) == ("running", 1, [0, 1])


async def test_a_collective_that_fails_is_told_to_the_clock_and_its_step_runs_again_in_the_next_epoch() -> None:
    group, replicas = by_hand(2)
    sequence = make_sequence(max_tokens=3)
    async with running(replicas) as tasks:
        replicas[0].loop.submit([sequence])
        await settle()
        await end_step(replicas)
        for replica in replicas:
            hand(replica).started.get_nowait()
            hand(replica).ends.put_nowait(CollectiveFailed("connection reset by peer"))
        await settle()
        assert [replica.clock.faults for replica in replicas] == [["connection reset by peer"]] * 2
        assert {replica.loop.group.phase for replica in replicas} == {GroupPhase.RECONFIGURING}
        assert sequence.output_ids == [100] and not any(task.done() for task in tasks)
        for _ in range(20):  # nobody is to blame
            group.now_s += 0.25
            group.deliver(group.clock.tick(group.now_s))
            for dp_rank in range(2):
                group.send(dp_rank, messages.Beat(epoch=group.clock.epoch, step=0, collectives=(7,)))
        await settle()
        assert hand(replicas[1]).regroups.get_nowait() == (2, (0, 1), ())
        while sequence.finish_reason is None:
            await end_step(replicas)
    assert sequence.output_ids == [100, 101, 102]


async def test_a_collective_that_fails_just_when_its_epoch_ends_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, replicas = by_hand(2)
    executor = hand(replicas[0])
    run_step = executor.step

    async def step(step_input: StepInput, on_sent: Callable[[], None]) -> StepOutput:
        try:
            return await run_step(step_input, on_sent)
        except asyncio.CancelledError:
            raise CollectiveFailed("connection reset by peer") from None  # as a TaskGroup does, before Python 3.13

    monkeypatch.setattr(executor, "step", step)
    sequence = make_sequence(max_tokens=3)
    async with running(replicas) as tasks:
        replicas[0].loop.submit([sequence])
        await settle()
        await end_step(replicas)
        tasks[1].cancel()
        group.lose(1)
        for _ in range(100):
            await asyncio.sleep(0.05)  # a cancellation that is lost is made again after so long
            if group.clock.phase is Phase.RUNNING:
                break
        executor.started.get_nowait()  # that was cut off
        while sequence.finish_reason is None:
            await end_step(replicas[:1])
    assert sequence.output_ids == [100, 101, 102]


async def test_a_request_that_comes_while_members_regroup_waits_for_the_new_epoch() -> None:
    group, replicas = by_hand(2)
    async with running(replicas) as tasks:
        replicas[0].loop.submit([make_sequence(max_tokens=1)])
        await settle()
        await end_step(replicas)
        hand(replicas[0]).may_regroup.clear()
        tasks[1].cancel()
        group.lose(1)
        sequence = make_sequence(max_tokens=1)
        replicas[0].loop.submit([sequence])  # before the loop's task has seen the new epoch
        await settle()
        late = make_sequence(max_tokens=1)
        replicas[0].loop.submit([late])
        replicas[0].loop.abort([late])
        await settle()
        hand(replicas[0]).may_regroup.set()
        await settle()
        await end_step(replicas[:1])
    assert sequence.output_ids == [100] and late.output_ids == []
    assert replicas[0].loop.stats().free_blocks == NUM_BLOCKS


async def test_a_command_whose_step_was_cut_off_is_carried_again() -> None:
    group, replicas = by_hand(3)
    async with running(replicas) as tasks:
        replicas[0].loop.submit([make_sequence(max_tokens=1)])
        await settle()
        await end_step(replicas)
        told = [asyncio.create_task(replica.loop.commanded(DRAIN)) for replica in replicas[:2]]
        replicas[0].loop.want(DRAIN)
        await settle()
        tasks[2].cancel()
        group.lose(2)
        await settle()
        for replica in replicas[:2]:
            hand(replica).started.get_nowait()  # that was cut off
        assert not any(task.done() for task in told)
        await end_step(replicas[:2])
        assert all(task.done() for task in told)


async def test_who_waits_for_a_command_of_all_does_not_wait_for_one_that_is_lost() -> None:
    group, replicas = by_hand(2)
    async with running(replicas) as tasks:
        replicas[0].loop.submit([make_sequence(max_tokens=1)])
        await settle()
        await end_step(replicas)
        left = asyncio.create_task(replicas[0].loop.commanded_by_all(lambda dp_rank: f"drained {dp_rank}"))
        replicas[0].loop.want("drained 0")
        await settle()
        await end_step(replicas)
        assert not left.done()
        tasks[1].cancel()
        group.lose(1)
        await settle()
        await end_step(replicas[:1])
        assert left.done()


async def test_a_group_that_fails_ends_its_requests_so_that_another_one_can_go_on() -> None:
    group, replicas = by_hand(2)
    sequence = make_sequence()
    async with running(replicas) as tasks:
        replicas[0].loop.submit([sequence])
        await settle()
        group.lose(1)  # before any step is done
        with pytest.raises(GroupLost, match=r"member 1 \(r1\) was lost before step"):
            await tasks[0]
    output = sequence.stream.take()
    assert output is not None and output.finish_reason is FinishReason.LOST and "was lost" in output.error


@pytest.mark.parametrize("seed", range(4))
async def test_members_that_are_lost_at_random_cost_the_others_no_token(seed: int) -> None:
    await soak(seed, num_steps=600, size=6, loses=True)
