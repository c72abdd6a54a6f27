"""A replica's whole HTTP side, scheduler and step loop over any executor, all in the test's own process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

from replica.api.served_model import ServedModel
from replica.api.server import build_app
from replica.config import ReplicaConfig
from replica.engine import make_scheduler
from replica.lifecycle import EngineState, Lifecycle
from replica.step_clock import LocalClock
from replica.step_loop import Executor, StepLoop


@dataclass(frozen=True)
class ServedReplica:
    """A running one."""

    url: str
    loop: StepLoop
    model: ServedModel

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what the loop's changes bring about."""
        changed = asyncio.Event()
        unsubscribe = self.loop.subscribe(changed.set)
        try:
            async with asyncio.timeout(10):
                while not condition():
                    changed.clear()
                    await changed.wait()
        finally:
            unsubscribe()


@asynccontextmanager
async def served_replica(
    config: ReplicaConfig, model: ServedModel, executor: Executor, *, num_blocks: int
) -> AsyncIterator[ServedReplica]:
    """A replica alone, on a free port. At its end nothing may be left in scheduler or cache."""
    scheduler = make_scheduler(config, model)
    loop = StepLoop(
        scheduler=scheduler,
        executor=executor,
        clock=LocalClock(),
        max_waiting=config.max_waiting,
        progress_deadline_s=60.0,
        startup_timeout_s=60.0,
    )
    loop.add_blocks(num_blocks)
    runner = web.AppRunner(
        build_app(config=config, model=model, loop=loop, lifecycle=Lifecycle(state=EngineState.READY)),
        handler_cancellation=True,
        access_log=None,
    )
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    running = asyncio.create_task(loop.run())
    try:
        served = ServedReplica(f"http://127.0.0.1:{port}", loop, model)
        yield served
        await served.until(lambda: not loop.num_unfinished and loop.stats().free_blocks == num_blocks)
    finally:
        await runner.cleanup()
        if running.done():
            await running  # its error, not what came of it
        running.cancel()
