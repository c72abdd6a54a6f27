"""A step loop without a model: every sequence gets the tokens of a script, one a step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from aiohttp import web

from replica.api.served_model import ServedModel
from replica.api.server import build_app
from replica.config import ReplicaConfig
from replica.errors import Unavailable
from replica.group_state import GroupState
from replica.lifecycle import EngineState, Lifecycle
from replica.model_config import ModelConfig
from replica.request import FinishReason, Sequence, TokenOutput
from replica.step_loop import EngineStats
from tests.commands import DEMO_MODEL

CONFIG = ReplicaConfig(model=DEMO_MODEL)
MODEL = ServedModel.load(CONFIG, ModelConfig.load(DEMO_MODEL))


class FakeLoop:
    """Takes sequences as StepLoop does. Steps come when `step` is called, or all the time while `run` runs."""

    def __init__(self, script: str = "<think>\nhm\n</think>\n\nyes \N{ROCKET}<|im_end|>") -> None:
        self.script = MODEL.tokenizer.encode(script, add_special_tokens=False)
        self.running: list[Sequence] = []
        self.submitted: list[Sequence] = []
        self.num_aborted = 0
        self.num_steps = 0
        self.step_s = 0.0
        self.is_stalled = False
        self.is_full = False
        self.max_cached = 1_000_000
        self.group = GroupState()
        self.changed = asyncio.Event()
        self._subscribers: list[Callable[[], None]] = []

    def submit(self, sequences: list[Sequence]) -> None:
        if self.is_full:
            raise Unavailable("the queue is full")
        self.submitted += sequences
        self.running += sequences
        self.notify()

    def abort(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            if sequence in self.running:
                self.num_aborted += 1
                self.end(sequence, FinishReason.ABORT)

    def end(self, sequence: Sequence, reason: FinishReason, error: str = "") -> None:
        self.running.remove(sequence)
        sequence.stream.put(TokenOutput((), reason, error))
        self.notify()

    def step(self) -> None:
        self.num_steps += 1
        for sequence in list(self.running):
            token_id = self.script[len(sequence.output_ids) % len(self.script)]
            sequence.output_ids.append(token_id)
            reason = None
            if token_id in sequence.params.stop_token_ids:
                reason = FinishReason.STOP
            elif len(sequence.output_ids) == sequence.params.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not None:
                self.running.remove(sequence)
            sequence.stream.put(TokenOutput((token_id,), reason))
        self.notify()

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=0,
            queued_prefill_tokens=0,
            free_blocks=100 - len(self.running),
            total_blocks=100,
            step=self.num_steps,
            epoch=self.group.epoch,
            group=self.group,
        )

    def is_progressing(self) -> bool:
        return not self.is_stalled

    def max_tokens_that_fit(self, num_prompt_tokens: int) -> int:
        return self.max_cached - num_prompt_tokens

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        self._subscribers.append(callback)
        return lambda: self._subscribers.remove(callback)

    def notify(self) -> None:
        self.changed.set()
        for callback in self._subscribers:
            callback()

    async def run(self) -> None:
        while True:
            while not self.running:
                self.changed.clear()
                await self.changed.wait()
            self.step()
            await asyncio.sleep(self.step_s)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for what the loop's changes bring about."""
        async with asyncio.timeout(10):
            while not condition():
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def replica(
    loop: FakeLoop,
    *,
    config: ReplicaConfig = CONFIG,
    model: ServedModel = MODEL,
    lifecycle: Lifecycle | None = None,
    steps: bool = True,
) -> AsyncIterator[str]:
    """A replica's HTTP server on a free port, run as engine.py runs it; yields its URL."""
    lifecycle = lifecycle or Lifecycle(state=EngineState.READY)
    app = build_app(config=config, model=model, loop=loop, lifecycle=lifecycle)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    assert site._server is not None
    port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
    stepping = asyncio.create_task(loop.run()) if steps else None
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        if stepping is not None:
            stepping.cancel()
        await runner.cleanup()
