"""Under pressure: far more requests than the cache holds say what transformers says, and streams go on in a flood.

`PRESSURE_REQUESTS=400` asks for more than CI does, with all settings.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import pytest
import torch

from replica.request import FinishReason, Sequence
from tests.commands import DEMO_MODEL
from tests.e2e.pressure import PressedLoop, Settings, make_sequence, outputs_of, pressed_loop
from tests.e2e.test_parity_with_transformers import NEAR_TIE, load_reference
from tests.step_driver import BLOCK_SIZE

IS_WHOLE = "PRESSURE_REQUESTS" in os.environ
NUM_REQUESTS = int(os.environ.get("PRESSURE_REQUESTS", "40"))
# Prefix cache, preemption, overlap: each on and off.
CASES = list(itertools.product((True, False), repeat=3)) if IS_WHOLE else [(True,) * 3, (False,) * 3]
FLOOD_BUDGET = 32


class Reference:
    """transformers' model, asked once for each text."""

    def __init__(self) -> None:
        self._model: Any = load_reference(DEMO_MODEL, torch.float32)
        self.vocab_size: int = self._model.config.vocab_size
        self.check = cache(self._check)
        self.near_ties = 0

    @torch.inference_mode()
    def _check(self, prompt_ids: tuple[int, ...], output_ids: tuple[int, ...]) -> None:
        """Every token is the most likely after those before it, or as good as that."""
        logits = self._model(torch.tensor([prompt_ids + output_ids])).logits[0, len(prompt_ids) - 1 : -1]
        for token_id, row in zip(output_ids, logits, strict=True):
            if token_id != int(row.argmax()):
                assert float(row.max() - row[token_id]) < NEAR_TIE, f"{token_id} instead of {int(row.argmax())}"
                self.near_ties += 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, the step it comes at, and after how many more steps its client leaves, if it does."""

    sequence: Sequence
    step: int
    leaves_after: int | None


@pytest.fixture(scope="module")
def reference() -> Iterator[Reference]:
    reference = Reference()
    yield reference
    print(f"\n{reference.near_ties} near ties (within {NEAR_TIE})")


def make_arrivals(vocab_size: int) -> list[Arrival]:
    """Random lengths; most prompts begin with a part of one of a few texts."""
    rng = random.Random(11)
    texts = [[rng.randrange(vocab_size) for _ in range(80)] for _ in range(6)]
    arrivals, step = [], 0
    for _ in range(NUM_REQUESTS):
        shared = rng.choice(texts)[: rng.choice([0, 16, 40, 64, 80])]
        own = [rng.randrange(vocab_size) for _ in range(rng.randint(1, 30))]
        sequence = make_sequence(shared + own, max_tokens=rng.choice([1, 40, 150, 150]))
        step += rng.choice([0] * 12 + [20])  # in bursts, which grow together
        arrivals.append(Arrival(sequence, step, rng.randrange(30) if rng.random() < 0.15 else None))
    return arrivals


async def serve(pressed: PressedLoop, arrival: Arrival) -> list[int]:
    """The tokens that the request gets."""
    await pressed.until_step(arrival.step)
    pressed.loop.submit([arrival.sequence])
    reading = asyncio.create_task(outputs_of(arrival.sequence))
    if arrival.leaves_after is not None:
        await pressed.until_step(pressed.loop.stats().step + arrival.leaves_after)
        pressed.loop.abort([arrival.sequence])
    token_ids, reason = await reading
    assert reason is FinishReason.LENGTH or arrival.leaves_after is not None
    return token_ids


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("has_prefix_cache", "preempts", "overlaps"), CASES)
async def test_with_a_tenth_of_the_cache_that_they_need_requests_say_what_transformers_says(
    reference: Reference, has_prefix_cache: bool, preempts: bool, overlaps: bool
) -> None:
    arrivals = make_arrivals(reference.vocab_size)
    needs = [-(-(len(a.sequence.prompt_ids) + a.sequence.params.max_tokens) // BLOCK_SIZE) for a in arrivals]
    settings = Settings(
        num_blocks=max(sum(needs) // 10, *needs) if preempts else sum(needs),
        has_prefix_cache=has_prefix_cache,
        overlaps=overlaps,
    )
    async with pressed_loop(settings) as pressed:
        answers = await asyncio.gather(*(serve(pressed, arrival) for arrival in arrivals))
        counts = pressed.scheduler.counts
    assert (counts.num_preemptions > 0) is preempts
    assert (counts.prefix_hits > 0) is has_prefix_cache
    for arrival, token_ids in zip(arrivals, answers, strict=True):
        reference.check(tuple(arrival.sequence.prompt_ids), tuple(token_ids))


async def flood(budget: int, vocab_size: int) -> tuple[PressedLoop, list[Sequence]]:
    """Three streams go on while long prompts come. What the loop did, and the streams."""
    rng = random.Random(3)
    streams = [make_sequence([rng.randrange(vocab_size) for _ in range(8)], max_tokens=60) for _ in range(3)]
    prompts = [make_sequence([rng.randrange(vocab_size) for _ in range(700)], max_tokens=1) for _ in range(5)]
    async with pressed_loop(Settings(num_blocks=400, max_prefill_tokens=budget)) as pressed:
        pressed.loop.submit(streams)
        await pressed.until_step(4)
        pressed.loop.submit(prompts)
        await asyncio.gather(*(outputs_of(sequence) for sequence in (*streams, *prompts)))
    return pressed, streams


@pytest.mark.timeout(120)
async def test_in_a_flood_of_long_prompts_streams_have_a_token_in_every_step_and_those_are_short(
    reference: Reference,
) -> None:
    pressed, _ = await flood(FLOOD_BUDGET, reference.vocab_size)
    with_streams = [forward for forward in pressed.executor.forwards if forward.num_decodes]
    assert len(with_streams) == 59  # their first tokens come with their prompts
    assert all(forward.num_decodes == 3 for forward in with_streams)
    assert max(forward.num_prompt_tokens for forward in with_streams) == FLOOD_BUDGET
    assert (
        max(forward.num_prompt_tokens for forward in pressed.executor.forwards) > FLOOD_BUDGET
    )  # when they have ended
    unbounded, _ = await flood(512, reference.vocab_size)
    stalls = [
        median(f.took_s for f in run.executor.forwards if f.num_decodes and f.num_prompt_tokens >= FLOOD_BUDGET)
        for run in (pressed, unbounded)
    ]
    assert stalls[0] * 2 < stalls[1], stalls
