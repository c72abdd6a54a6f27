"""A replica's whole HTTP side, scheduler and step loop over the demo model itself, all in the test's own process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from aiohttp import web

from replica.api.chat import ChatTemplate
from replica.api.served_model import ServedModel
from replica.api.server import build_app
from replica.config import ReplicaConfig
from replica.frames import StepInput, StepOutput, decode, encode
from replica.groups import Groups
from replica.layout import Layout
from replica.lifecycle import EngineState, Lifecycle
from replica.model_config import ModelConfig
from replica.sampler import sample
from replica.scheduler import Scheduler
from replica.step_clock import LocalClock
from replica.step_loop import StepLoop
from tests.commands import DEMO_MODEL
from tests.step_driver import RankModel

NUM_BLOCKS = 1024
HEADER_BYTES = 4


class ModelExecutor:
    """One rank in a thread. Frames pass through their bytes, as between processes."""

    def __init__(self, rank: RankModel) -> None:
        self._rank = rank

    async def step(self, step_input: StepInput, on_sent: Callable[[], None]) -> StepOutput:
        on_sent()
        return await asyncio.to_thread(self._step, step_input)

    async def failed(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError("nobody sets it")

    @torch.inference_mode()
    def _step(self, step_input: StepInput) -> StepOutput:
        frame = decode(encode(step_input)[HEADER_BYTES:])
        assert isinstance(frame, StepInput)
        token_ids, logprobs = sample(self._rank.forward(frame, Groups.alone()), frame)
        output = decode(encode(StepOutput(step=frame.step, token_ids=token_ids, logprobs=logprobs))[HEADER_BYTES:])
        assert isinstance(output, StepOutput)
        return output


@dataclass(frozen=True)
class ModelReplica:
    """A running one."""

    url: str
    loop: StepLoop
    model: ServedModel
    rank: RankModel

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
async def model_replica(
    folder: Path = DEMO_MODEL,
    *,
    max_num_seqs: int = 32,
    max_num_batched_tokens: int = 512,
    num_blocks: int = NUM_BLOCKS,
    chat_template: str | None = None,
    **settings: Any,
) -> AsyncIterator[ModelReplica]:
    """A replica of the demo model, float32, on a free port. At its end nothing may be left in scheduler or cache.

    `chat_template` is a source to have instead of the checkpoint's.
    """
    config = ReplicaConfig(
        model=folder, max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens, **settings
    )
    model = ServedModel.load(config, ModelConfig.load(folder))
    if chat_template is not None:
        model = dataclasses.replace(model, chat_template=ChatTemplate.compile({"default": chat_template}, {}))
    rank = RankModel(folder, Layout(), 0, num_blocks=num_blocks)
    scheduler = Scheduler(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=model.max_model_len,
        block_size=config.block_size,
        max_prefill_tokens=config.max_prefill_tokens,
        has_prefix_cache=not config.no_prefix_cache,
    )
    loop = StepLoop(
        scheduler=scheduler,
        executor=ModelExecutor(rank),
        clock=LocalClock(),
        max_waiting=config.max_waiting,
        progress_deadline_s=60.0,
        startup_timeout_s=60.0,
    )
    loop.add_blocks(num_blocks)
    lifecycle = Lifecycle(state=EngineState.READY)
    runner = web.AppRunner(
        build_app(config=config, model=model, loop=loop, lifecycle=lifecycle),
        handler_cancellation=True,
        access_log=None,
    )
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    running = asyncio.create_task(loop.run())
    try:
        served = ModelReplica(f"http://127.0.0.1:{port}", loop, model, rank)
        yield served
        assert not running.done(), running.exception()
        await served.until(lambda: not loop.num_unfinished and loop.stats().free_blocks == num_blocks)
    finally:
        running.cancel()
        await runner.cleanup()
