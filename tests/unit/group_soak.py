"""Members of a group under random requests, aborts and losses, for tests of seconds and of many minutes."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

from replica.request import FinishReason, Sequence, TokenOutput
from replica.step_clock import STOP
from tests.unit.hand_clock import HandGroup
from tests.unit.hand_replica import NUM_BLOCKS, QuickExecutor, Replica, make_sequence, running, settle


async def soak(seed: int, *, num_steps: int, size: int = 0, loses: bool = False) -> None:
    """Requests come and go at random until so many steps are released. All members have then run the same steps, and
    every request that was not aborted has all of its tokens. With `loses`, all members but two are lost on the way."""
    rng = random.Random(seed)
    group = HandGroup(size or rng.choice([2, 3, 4]), prefill_delay_s=0.01)
    num_blocks = rng.choice([24, NUM_BLOCKS])  # so few that some are preempted, or enough for all
    replicas = [
        Replica(group, r, QuickExecutor(group, r, seed + r), num_blocks=num_blocks) for r in range(len(group.members))
    ]
    open_: dict[Sequence, Replica] = {}
    async with running(replicas) as tasks:
        while len(group.releases) < num_steps:
            group.now_s += 0.001
            if loses and len(group.releases) * (size - 1) > num_steps * (size + 1 - len(replicas)):
                lost = rng.randrange(len(replicas))
                tasks[lost].cancel()
                await asyncio.wait([tasks.pop(lost)])
                open_ = {sequence: replica for sequence, replica in open_.items() if replica is not replicas[lost]}
                group.lose(replicas.pop(lost).dp_rank)
            replica = rng.choice(replicas)
            if rng.random() < 0.3 and replica.loop.stats().waiting < 4:
                stop_token_ids = frozenset({100 + rng.randrange(40)})  # half of them end by themselves
                sequence = make_sequence(rng.randrange(1, 40), rng.randrange(1, 20), stop_token_ids)
                open_[sequence] = replica
                replica.loop.submit([sequence])
            elif rng.random() < 0.05 and open_:
                aborted = rng.choice(list(open_))
                open_.pop(aborted).loop.abort([aborted])
            for _ in range(rng.choice([0, 1, 1, 5, 50])):
                await asyncio.sleep(0)
            for task in tasks:
                assert not task.done(), task.result()
            for ended in [sequence for sequence in open_ if sequence.finish_reason is not None]:
                check_whole(ended)
                del open_[ended]
        while any(replica.loop.num_unfinished for replica in replicas):
            group.now_s += 0.001
            await asyncio.sleep(0)
        await settle()
        assert group.is_parked
        replicas[0].loop.want(STOP)
        await asyncio.gather(*tasks)
    for sequence in open_:
        check_whole(sequence)
    stats = [replica.loop.stats() for replica in replicas]
    assert all(s.free_blocks == num_blocks for s in stats)
    assert all(0 < s.idle_steps < s.step for s in stats)
    if loses:
        assert len(replicas) == 2 and {s.epoch for s in stats} == {size - 1}
    else:
        assert {s.step for s in stats} == {group.clock.step} == {len(group.releases)}
        assert all(replica_steps(replica) == list(range(len(group.releases))) for replica in replicas)


def replica_steps(replica: Replica) -> list[int]:
    assert isinstance(replica.executor, QuickExecutor)
    return replica.executor.steps


def check_whole(sequence: Sequence) -> None:
    (stop_token,) = sequence.params.stop_token_ids
    num_tokens = min(sequence.params.max_tokens, stop_token - 100 + 1)
    assert sequence.finish_reason is (FinishReason.STOP if stop_token < 100 + num_tokens else FinishReason.LENGTH)
    assert list(tokens_of(sequence)) == sequence.output_ids == list(range(100, 100 + num_tokens))


def tokens_of(sequence: Sequence) -> Iterator[int]:
    output = sequence.stream.take()
    assert isinstance(output, TokenOutput)
    yield from output.token_ids
