"""A replica over the demo model itself, all in the test's own process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from replica.api.chat import ChatTemplate
from replica.api.served_model import ServedModel
from replica.config import ReplicaConfig
from replica.frames import StepInput, StepOutput, decode, encode
from replica.groups import Groups
from replica.layout import Layout
from replica.model_config import ModelConfig
from replica.sampler import sample
from tests.commands import DEMO_MODEL
from tests.served_replica import ServedReplica, served_replica
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
class ModelReplica(ServedReplica):
    """A running one, and its model."""

    rank: RankModel


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
    async with served_replica(config, model, ModelExecutor(rank), num_blocks=num_blocks) as served:
        yield ModelReplica(served.url, served.loop, served.model, rank)
