"""The model gives transformers' logits and greedy tokens, for every kind of checkpoint, alone and in mixed batches.

Greedy decoding is checked by teacher forcing: one forward of transformers over prompt and output gives its logits at
every place, and each of our tokens must be its argmax there. Where its top two are closer than NEAR_TIE, rounding may
choose either; such places are counted and printed. One test lets transformers decode by itself.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.checkpoints import VARIANTS, write_checkpoint
from tests.step_driver import Driven, StepDriver

DEMO_MODEL: Final = Path(__file__).parents[2] / "deploy" / "models" / "tiny-moe"
TOLERANCE: Final = 1e-4
NEAR_TIE: Final = 2e-4
NUM_OUTPUT: Final = 64
MAX_BATCH: Final = 16


class Parity:
    """One checkpoint in both implementations, float32."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = load_reference(folder, torch.float32)
        self.num_tokens = 0
        self.near_ties = 0

    def prompt(self, length: int, seed: int = 0) -> list[int]:
        """Random token ids."""
        draw = random.Random(seed)
        return [draw.randrange(self.reference.config.vocab_size) for _ in range(length)]

    def check(self, s: Driven) -> None:
        """All logits of a sequence that were computed, and all tokens that came of them, are transformers'."""
        assert sum(len(rows) for rows in s.logits) == s.num_computed
        expected = self.logits(s.token_ids[: s.num_computed])
        torch.testing.assert_close(torch.cat(s.logits), expected, atol=TOLERANCE, rtol=0)
        self.num_tokens += len(s.output_ids)
        for token_id, row in zip(s.output_ids, expected[s.prompt_len - 1 :], strict=True):
            if token_id != int(row.argmax()):
                assert float(row.max() - row[token_id]) < NEAR_TIE, f"{token_id} instead of {int(row.argmax())}"
                self.near_ties += 1

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> Tensor:
        """transformers' logits after each token [T, V], from one forward."""
        logits: Tensor = self.reference(torch.tensor([token_ids])).logits[0]
        return logits


def load_reference(folder: Path, dtype: torch.dtype) -> Any:
    """transformers' model, with the attention that spells out each operation."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")


@pytest.fixture(scope="module", params=["demo", *VARIANTS])
def parity(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parity]:
    if request.param == "demo":
        folder = DEMO_MODEL
    else:
        folder = write_checkpoint(tmp_path_factory.mktemp(request.param), VARIANTS[request.param])
    parity = Parity(folder)
    yield parity
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(
            f"\n{request.param}: {parity.near_ties} near ties (within {NEAR_TIE}) in {parity.num_tokens} greedy tokens"
        )


@pytest.fixture
def driver(parity: Parity) -> StepDriver:
    return StepDriver(parity.folder)


def test_a_whole_prefill_and_each_decode_step_give_the_reference_logits(parity: Parity, driver: StepDriver) -> None:
    s = driver.add(parity.prompt(45))
    driver.step({s: 45})
    assert s.num_computed == 45
    driver.generate(s, NUM_OUTPUT)
    parity.check(s)


@pytest.mark.parametrize("chunk", [1, 7, 16, 33])
def test_a_chunked_prefill_gives_the_reference_logits(parity: Parity, driver: StepDriver, chunk: int) -> None:
    s = driver.add(parity.prompt(50, seed=chunk))
    while s.num_computed < 50:
        driver.step({s: min(chunk, 50 - s.num_computed)})
    driver.generate(s, 4)
    parity.check(s)


def test_greedy_tokens_are_those_that_transformers_generates(parity: Parity, driver: StepDriver) -> None:
    prompt = parity.prompt(20, seed=3)
    s = driver.add(prompt)
    driver.generate(s, NUM_OUTPUT)
    parity.reference.generation_config.eos_token_id = None  # all of the tokens, whatever they mean
    generated = parity.reference.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=NUM_OUTPUT,
        do_sample=False,
        pad_token_id=0,
    )
    expected = generated[0, len(prompt) :].tolist()
    if s.output_ids != expected:
        parity.check(s)  # after a near tie both go their own way, and only teacher forcing can tell
        assert parity.near_ties
    assert len(expected) == NUM_OUTPUT


def test_mixed_batches_of_1_to_16_give_the_reference_logits_and_tokens(parity: Parity, driver: StepDriver) -> None:
    """Every second step one more sequence joins; its prompt is computed in chunks beside the others' decodes."""
    draw = random.Random(5)
    waiting = [driver.add(parity.prompt(draw.randint(1, 60), seed=100 + i)) for i in range(MAX_BATCH)]
    running: list[Driven] = []
    finished: list[Driven] = []
    batch_sizes, mixed_steps, num_steps = set(), 0, 0
    while waiting or running:
        if waiting and num_steps % 2 == 0:
            running.insert(draw.randrange(len(running) + 1), waiting.pop())
        chunks = {s: min(draw.randint(1, 25), len(s.token_ids) - s.num_computed) for s in running}
        driver.step(chunks)
        batch_sizes.add(len(chunks))
        mixed_steps += any(n > 1 for n in chunks.values()) and any(s.output_ids for s in running)
        num_steps += 1
        finished += [s for s in running if len(s.output_ids) == NUM_OUTPUT]
        running = [s for s in running if len(s.output_ids) < NUM_OUTPUT]
    assert batch_sizes == set(range(1, MAX_BATCH + 1)) and mixed_steps > 10
    for s in finished:
        parity.check(s)


def test_a_step_without_tokens_gives_no_logits_and_leaves_the_cache_alone(parity: Parity, driver: StepDriver) -> None:
    s = driver.add(parity.prompt(20))
    driver.step({s: 20})
    before = [cache.clone() for cache in driver.rank.cache.keys + driver.rank.cache.values]
    driver.step({})
    assert all(map(torch.equal, before, driver.rank.cache.keys + driver.rank.cache.values))
    driver.generate(s, 3)
    parity.check(s)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.08), (torch.float16, 0.015)])
@pytest.mark.parametrize("variant", ["attention_bias", "yarn_5", "dense"])
def test_half_precision_stays_near_the_reference(
    tmp_path: Path, variant: str, dtype: torch.dtype, tolerance: float
) -> None:
    """Rounding differs from place to place, so this only bounds the distance, of logits whose deviation is 1 to 2."""
    folder = write_checkpoint(tmp_path, VARIANTS[variant])
    driver, exact = StepDriver(folder, dtype=dtype), Parity(folder)
    s = driver.add(exact.prompt(40))
    driver.step({s: 40})
    distance = (s.logits[0] - exact.logits(s.token_ids[:40])).abs()
    assert float(distance.mean()) < tolerance
