"""Drives a rank's model without an engine: keeps sequences and their blocks, and makes StepInputs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from replica.checkpoint import Checkpoint
from replica.frames import StepInput
from replica.groups import Groups
from replica.kv_cache import KVCache
from replica.layout import Layout
from replica.model_config import ModelConfig
from replica.models.qwen3_moe import Qwen3Moe
from replica.shards import Shards
from replica.step_tensors import StepTensors
from replica.takeover import Takeover
from replica.weights import WeightReader

CPU: Final = torch.device("cpu")
BLOCK_SIZE: Final = 16


class RankModel:
    """One rank's model and cache, on the CPU."""

    def __init__(
        self, folder: Path, layout: Layout, rank: int, *, num_blocks: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config, checkpoint = ModelConfig.load(folder), Checkpoint.open(folder)
        checkpoint.check(self.config)
        layout.check(self.config)
        shards = Shards(self.config, layout, rank)
        self._weights = WeightReader(checkpoint, shards, dtype=dtype, device=CPU, on_progress=lambda done, total: None)
        self.model = Qwen3Moe(self.config, self._weights, num_positions=self.config.max_model_len, device=CPU)
        self._takeover = Takeover(shards, str(dtype).removeprefix("torch."))
        self.cache = KVCache(shards, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=dtype, device=CPU)

    @property
    def weight_bytes(self) -> int:
        """Of all that it holds."""
        return self._weights.weight_bytes

    def take_over(self, replicas: Sequence[int]) -> None:
        """These replicas (dp ranks) were evicted together."""
        taken = self._takeover.evict(replicas)
        with self._weights.reading(taken):
            self.model.take_over(self._weights, taken.layers)

    @torch.inference_mode()
    def forward(self, frame: StepInput, groups: Groups) -> Tensor:
        """The logits of the frame's sampled tokens [N, V], on a replica's first rank."""
        return self.model.forward(StepTensors.from_frame(frame, CPU, groups), self.cache, groups)


@dataclass(eq=False)
class Driven:
    """One sequence: its tokens, how many of them are in the cache, and the logits after each of those."""

    token_ids: list[int]
    prompt_len: int
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)  # of [n, V] float32

    @property
    def output_ids(self) -> list[int]:
        """What has been sampled so far."""
        return self.token_ids[self.prompt_len :]


class StepDriver:
    """A replica of one rank: its cache, the free blocks of it in random order, and greedy steps of any mixture."""

    def __init__(
        self, folder: Path, *, num_blocks: int = 256, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        self.rank = RankModel(folder, Layout(), 0, num_blocks=num_blocks, dtype=dtype)
        self.config = self.rank.config
        self._groups = Groups.alone()
        self._free = shuffled_blocks(num_blocks, seed)

    def add(self, prompt_ids: list[int]) -> Driven:
        """A new sequence, of which nothing is computed yet."""
        return Driven(list(prompt_ids), len(prompt_ids))

    def step(self, chunks: dict[Driven, int]) -> None:
        """One forward over the next `chunks[s]` tokens of each s; those with all their tokens computed grow by one."""
        order = frame_order(chunks)
        logits = self.rank.forward(make_frame(order, chunks, self._free), self._groups)
        for s, rows in zip(order, torch.split(logits, [chunks[s] for s in order]), strict=True):
            s.num_computed += chunks[s]
            s.logits.append(rows)
            if s.num_computed == len(s.token_ids):
                s.token_ids.append(int(rows[-1].argmax()))

    def generate(self, s: Driven, num_tokens: int) -> None:
        """Decodes one sequence, alone, until it has so many output tokens."""
        while len(s.output_ids) < num_tokens:
            self.step({s: len(s.token_ids) - s.num_computed})


def shuffled_blocks(num_blocks: int, seed: int) -> list[int]:
    """All blocks of a cache, in random order."""
    free = list(range(num_blocks))
    random.Random(seed).shuffle(free)
    return free


def frame_order(chunks: dict[Driven, int]) -> list[Driven]:
    """Decodes first, as StepInput has it; sorting is stable, so the rest keeps its order."""
    return sorted(chunks, key=lambda s: chunks[s] > 1 or not s.num_computed)


def make_frame(order: list[Driven], chunks: dict[Driven, int], free: list[int]) -> StepInput:
    """The next `chunks[s]` tokens of each sequence, each of which is sampled after; takes blocks from the free ones."""
    for s in order:
        while len(s.block_ids) * BLOCK_SIZE < s.num_computed + chunks[s]:
            s.block_ids.append(free.pop())
    spans = [range(s.num_computed, s.num_computed + chunks[s]) for s in order]  # positions
    places = [(s, p) for s, span in zip(order, spans, strict=True) for p in span]
    block_tables = np.zeros((len(order), max((len(s.block_ids) for s in order), default=0)), np.int32)
    for row, s in enumerate(order):
        block_tables[row, : len(s.block_ids)] = s.block_ids
    T = N = len(places)  # every token's logits are looked at
    slots = [s.block_ids[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for s, p in places]
    return StepInput(
        step=0,
        num_decodes=sum(chunks[s] == 1 and s.num_computed > 0 for s in order),
        token_ids=np.array([s.token_ids[p] for s, p in places], np.int32),
        positions=np.array([p for _, p in places], np.int32),
        slots=np.array(slots, np.int32),
        query_starts=np.cumsum([0, *(chunks[s] for s in order)], dtype=np.int32),
        context_lens=np.array([span.stop for span in spans], np.int32),
        block_tables=block_tables,
        sample_rows=np.arange(T, dtype=np.int32),
        temperature=np.zeros(N, np.float32),
        top_k=np.zeros(N, np.int32),
        top_p=np.ones(N, np.float32),
        min_p=np.zeros(N, np.float32),
        seeds=np.zeros(N, np.uint64),
        choices=np.zeros(N, np.int32),
        output_indices=np.zeros(N, np.int32),
    )
