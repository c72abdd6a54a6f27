"""What the processes of the lockstep benchmark run: one kind of step agreement each, in a tight loop.

Every function ends by sending `Times` through its pipe: for each step, when this process's members arrived and when
they had the agreement, on the machine's monotonic clock. With several members in a process it is the last of each.
"""

from __future__ import annotations

import asyncio
import time
from multiprocessing.connection import Connection
from pathlib import Path

import uvloop

from coordinator.master import Master, bind
from coordinator.member import Member
from coordinator.messages import STOP, Hello
from tests.clock_driver import make_settings

Times = tuple[list[float], list[float]]  # seconds at which each step was arrived for, and agreed on

SECRET = b"benchmark secret"
CONFIG = {"model_hash": "0"}


def serve_clock(size: int, pipe: Connection) -> None:
    """The master, in a process of its own, as in life. Sends its port first."""

    async def serve() -> None:
        master = Master(make_settings(size, group="bench", config=CONFIG), SECRET)
        listener = await bind("127.0.0.1", 0)
        await master.start(listener)
        pipe.send(listener.getsockname()[1])
        await master.run()
        await master.close()

    uvloop.run(serve())


def run_clock_members(dp_ranks: range, steps: int, port: int, pipe: Connection) -> None:
    """Members of the clock's group; several share a process, and its event loop, where there are many."""

    async def run_member(dp_rank: int) -> Times:
        replica_id = f"r{dp_rank}"
        member = Member(
            hello=Hello(
                group="bench", replica_id=replica_id, incarnation=replica_id, dp_rank=dp_rank, config=CONFIG, url=""
            ),
            host="127.0.0.1",
            port=port,
            secret=SECRET,
            startup_deadline_s=60.0,
            silence_s=10.0,
            collectives=tuple,
        )
        arrived, agreed = [], []
        try:
            await member.join()
            await member.ready(b"")
            for step in range(steps):
                if step == steps - 1:
                    member.want(STOP)
                arrived.append(time.monotonic())
                member.arrive(decode_tokens=1, prefill_tokens=0)
                await member.released()
                agreed.append(time.monotonic())
                member.done(step)
        finally:
            member.close()
        return arrived, agreed

    async def run_all() -> Times:
        every = await asyncio.gather(*map(run_member, dp_ranks))
        arrived, agreed = zip(*every, strict=True)
        return list(map(max, zip(*arrived, strict=True))), list(map(max, zip(*agreed, strict=True)))

    pipe.send(uvloop.run(run_all()))


def run_gloo_member(rank: int, size: int, steps: int, store: Path, pipe: Connection) -> None:
    """What others do: every member gathers every member's four counts."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    mine = torch.tensor([rank, 1, 0, 0], dtype=torch.int64, device="cpu")
    everyones = [torch.empty_like(mine) for _ in range(size)]
    arrived, agreed = [], []
    for _ in range(steps):
        arrived.append(time.monotonic())
        dist.all_gather(everyones, mine)
        agreed.append(time.monotonic())
    dist.barrier()
    dist.destroy_process_group()
    pipe.send((arrived, agreed))


# KEYS: the step's counter, the step's list. ARGV: members, seconds to keep both. Returns nothing.
REDIS_ARRIVE = """
redis.call('EXPIRE', KEYS[1], ARGV[2])
if redis.call('INCR', KEYS[1]) == tonumber(ARGV[1]) then
    for _ = 1, ARGV[1] do redis.call('RPUSH', KEYS[2], 1) end
    redis.call('EXPIRE', KEYS[2], ARGV[2])
end
"""


def run_redis_member(size: int, steps: int, port: int, pipe: Connection) -> None:
    """A barrier by redis.asyncio: a script counts arrivals, and the last one wakes all who block on a list."""
    import redis.asyncio

    async def run() -> Times:
        arrived, agreed = [], []
        async with redis.asyncio.Redis(host="127.0.0.1", port=port) as client:
            arrive = client.register_script(REDIS_ARRIVE)
            for step in range(steps):
                arrived.append(time.monotonic())
                await arrive(keys=[f"count:{step}", f"go:{step}"], args=[size, 60])
                await client.blpop([f"go:{step}"], timeout=60)
                agreed.append(time.monotonic())
        return arrived, agreed

    pipe.send(uvloop.run(run()))
