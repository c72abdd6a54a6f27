"""A group of two replicas while one of them has other work than the other: the tokens stay those of greedy decoding."""

from __future__ import annotations

import asyncio
import random
from types import ModuleType
from typing import Any, Final

import aiohttp
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.commands import DEMO_MODEL, wait_until
from tests.e2e.cluster import MODEL_NAME, Cluster, metric
from tests.e2e.test_accuracy import Ties, ask_all, check_is_greedy

NUM_QUESTIONS: Final = 40
SEED: Final = 5
LONG_PROMPT: Final = "Count from 1 to 99. " * 250  # some thousand tokens: several steps of prefill
STEPS: Final = "lockstep_steps_total"

pytestmark = pytest.mark.parametrize("cluster", ["group"], indirect=True)


async def disturb(url: str, rng: random.Random) -> None:
    """Long prompts, and clients that hang up, at one replica; until cancelled."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as session:
        while True:
            body = {"model": MODEL_NAME, "prompt": LONG_PROMPT, "max_tokens": 4}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()
            body = {"model": MODEL_NAME, "prompt": "count", "max_tokens": 3000, "ignore_eos": True, "stream": True}
            async with session.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200
                await response.content.readany()
                await asyncio.sleep(rng.uniform(0.0, 0.3))
                response.close()  # gone in the middle of its answer
            await asyncio.sleep(rng.uniform(0.0, 0.5))  # idle


@pytest.mark.timeout(400)
async def test_long_prompts_aborts_and_idleness_of_one_member_change_no_token_of_the_other(
    cluster: Cluster, corpus: ModuleType
) -> None:
    rng = random.Random(SEED)
    samples = [corpus.draw(rng) for _ in range(NUM_QUESTIONS)]
    quiet, disturbed = cluster.replica_urls
    task = asyncio.create_task(disturb(disturbed, rng))
    answers = await ask_all(quiet, samples)
    assert not task.done(), task.result()
    task.cancel()
    await asyncio.wait([task])

    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    ties = Ties()
    for answer in answers:
        check_is_greedy(model, answer, ties)
    await asyncio.to_thread(wait_until, lambda: not cluster.busy(), "an idle group")
    steps = [metric(url, STEPS) for url in cluster.replica_urls]
    idle_steps = [metric(url, "lockstep_idle_steps_total") for url in cluster.replica_urls]
    assert steps[0] == steps[1] and all(idle_steps), "all take every step, also those of others"


def test_a_member_that_was_never_asked_takes_the_steps_of_the_one_that_is(cluster: Cluster) -> None:
    wait_until(lambda: not cluster.busy(), "an idle group")
    before = [metric(url, STEPS) for url in cluster.replica_urls]
    answers = asyncio.run(ask_one(cluster.replica_urls[1], num_tokens=20))
    assert answers == 20
    wait_until(lambda: not cluster.busy(), "an idle group")
    after = [metric(url, STEPS) for url in cluster.replica_urls]
    assert after[0] - before[0] == after[1] - before[1] == 20


async def ask_one(url: str, *, num_tokens: int) -> int:
    """How many tokens an answer has."""
    body = {"model": MODEL_NAME, "prompt": "count", "max_tokens": num_tokens, "ignore_eos": True}
    async with aiohttp.ClientSession() as session, session.post(f"{url}/v1/completions", json=body) as response:
        answer = await response.json()
    count: int = answer["usage"]["completion_tokens"]
    return count
