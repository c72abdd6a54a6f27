"""A bfloat16 model whose weights fill the strips of our own code gives each token the same logits, to the last bit,
whatever else is in its steps and however its prompt was cut: the model as a whole, where the parts have tests of their
own."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from kernels import bf16_cpu
from tests.checkpoints import Variant, write_checkpoint
from tests.step_driver import Driven, StepDriver

pytestmark = pytest.mark.skipif(bf16_cpu.library() is None, reason="no g++, or no AVX512-BF16")

SIZES: Final[dict[str, Any]] = {"vocab_size": 208, "hidden_size": 64, "moe_intermediate_size": 48, "num_experts": 16}
VARIANTS: Final = {
    "experts": Variant(SIZES),
    "experts, tied, biases": Variant({**SIZES, "tie_word_embeddings": True, "attention_bias": True}),
    "dense": Variant({"vocab_size": 208, "hidden_size": 64}, is_dense=True),
}
LENGTH: Final = 150  # more than one block of keys


@pytest.fixture(params=list(VARIANTS))
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, VARIANTS[request.param])


def prompt(length: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(208) for _ in range(length)]


def logits(s: Driven) -> Tensor:
    return torch.cat(s.logits)


def test_a_sequence_has_the_same_logits_to_the_last_bit_in_any_company(folder: Path) -> None:
    driver = StepDriver(folder, dtype=torch.bfloat16)
    alone = driver.add(prompt(LENGTH, seed=1))
    driver.step({alone: LENGTH})
    driver.generate(alone, 20)

    cut = driver.add(alone.token_ids[:LENGTH])
    others = [driver.add(prompt(length, seed=length)) for length in (3, 17, 40, 60)]
    for size, others_sizes in ((1, (3, 0, 0, 0)), (30, (1, 17, 0, 0)), (99, (1, 1, 40, 0)), (20, (1, 1, 1, 60))):
        chunks = dict(zip(others, others_sizes, strict=True))
        driver.step({cut: size, **{other: n for other, n in chunks.items() if n}})
    while len(cut.output_ids) < 20:
        driver.step({cut: 1, **dict.fromkeys(others[: len(cut.output_ids) % 5], 1)})

    assert cut.token_ids == alone.token_ids
    assert torch.equal(logits(cut), logits(alone))
    anew = driver.add(alone.token_ids[:-1])  # as after a preemption
    driver.step({anew: len(anew.token_ids)})
    assert torch.equal(logits(anew), logits(alone))


def test_the_logits_are_as_near_those_of_float32_as_torchs_are(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def distance(driver: StepDriver) -> float:
        s = driver.add(prompt(LENGTH, seed=2))
        driver.step({s: LENGTH})
        return float((logits(s) - exact).abs().mean())

    driver = StepDriver(folder)
    s = driver.add(prompt(LENGTH, seed=2))
    driver.step({s: LENGTH})
    exact = logits(s)
    ours = distance(StepDriver(folder, dtype=torch.bfloat16))
    monkeypatch.setattr(bf16_cpu, "library", lambda: None)
    torchs = distance(StepDriver(folder, dtype=torch.bfloat16))
    assert 0 < ours < 1.3 * torchs < 0.15 * float(exact.std())
