"""An executor without ranks, for tests of the step loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from replica.frames import StepInput, StepOutput
from replica.step_loop import Exchange


@dataclass(frozen=True)
class HandRegrouped:
    rebuild_s: float = 0.0
    reload_s: float = 0.0


class HandExecutor:
    """Holds each step until the test lets it end. A token is 100 plus its index in the answer."""

    def __init__(self) -> None:
        self.started: asyncio.Queue[StepInput] = asyncio.Queue()
        self.ends: asyncio.Queue[Exception | None] = asyncio.Queue()
        self.death: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self.num_steps = 0
        self.regroups: asyncio.Queue[tuple[int, tuple[int, ...], tuple[tuple[int, ...], ...]]] = asyncio.Queue()
        self.may_regroup = asyncio.Event()
        self.may_regroup.set()

    async def step(self, step_input: StepInput, on_sent: Callable[[], None]) -> StepOutput:
        on_sent()
        self.num_steps += 1
        self.started.put_nowait(step_input)
        error = await self.ends.get()
        if error is not None:
            raise error
        return StepOutput(step=step_input.step, token_ids=100 + step_input.output_indices)

    async def regroup(
        self,
        *,
        epoch: int,
        members: tuple[int, ...],
        evicted: tuple[tuple[int, ...], ...],
        exchange: Exchange,
        timeout_s: float,
    ) -> HandRegrouped:
        self.regroups.put_nowait((epoch, members, evicted))
        await self.may_regroup.wait()
        await exchange((b"",))
        return HandRegrouped()

    async def failed(self) -> NoReturn:
        raise await asyncio.shield(self.death)
