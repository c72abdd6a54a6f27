"""The models and precisions in which layouts are compared, and how far they may be from one rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from replica.layout import Layout
from replica.model_config import ModelConfig
from replica.tensor_specs import tensor_specs
from tests.checkpoints import Variant, write_checkpoint, write_fp8_checkpoint
from tests.layout_driver import (
    Comparison,
    Evictions,
    Reference,
    Script,
    compare,
    make_reference,
    make_script,
    run_in_threads,
)
from tests.planned_bytes import weight_bytes_after

DEMO_MODEL: Final = Path(__file__).parents[1] / "deploy" / "models" / "tiny-moe"
WORLDS: Final = (1, 2, 3, 4, 6, 8)

# 5 experts of 3 blocks, so that 2, 4 and 8 ranks are uneven; heads that divide by every attn_tp of WORLDS, and one KV
# head that all ranks repeat; a vocabulary that needs padding, a dense layer with a partial last block, biases.
_RANDOM: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_attention_heads": 24,
    "num_key_value_heads": 1,
    "mlp_only_layers": [1],
    "attention_bias": True,
    "tie_word_embeddings": True,
}


def _demo(folder: Path) -> Path:
    return DEMO_MODEL


def _demo_fp8(folder: Path) -> Path:
    return write_fp8_checkpoint(folder / "fp8", DEMO_MODEL)


def _random(folder: Path) -> Path:
    return write_checkpoint(folder / "random", Variant({**_RANDOM, "moe_intermediate_size": 3 * 64}))


def _random_fp8(folder: Path) -> Path:
    variant = Variant({**_RANDOM, "moe_intermediate_size": 3 * 128}, dtype=torch.bfloat16)
    return write_fp8_checkpoint(folder / "fp8", write_checkpoint(folder / "source", variant))


@dataclass(frozen=True)
class Case:
    """One model in one precision. The bound is for every logit, as a multiple of all logits' standard deviation.

    Where `is_pinned`, tokens go to the reference's experts (see layout_driver.py).
    """

    write: Callable[[Path], Path]  # makes the checkpoint in a folder and returns its own
    dtype: torch.dtype
    bound: float
    is_pinned: bool


# In bfloat16 most logits are off by a hundredth of their deviation, and the worst were by 0.14. FP8 adds what happens
# when an activation is rounded to the next of 16 steps instead: the worst were off by 0.5; by 0.08 where all but the
# FP8 values is float32.
CASES: Final = {
    "demo float32": Case(_demo, torch.float32, 0.0, False),
    "random float32": Case(_random, torch.float32, 0.0, False),
    "demo bfloat16": Case(_demo, torch.bfloat16, 0.25, True),
    "random bfloat16": Case(_random, torch.bfloat16, 0.25, True),
    "demo FP8": Case(_demo_fp8, torch.bfloat16, 0.75, True),
    "random FP8": Case(_random_fp8, torch.bfloat16, 0.75, True),
    "demo FP8 float32": Case(_demo_fp8, torch.float32, 0.2, True),
}
FLOAT32_BOUND: Final = 1e-4


def evictions(layout: Layout, seed: int) -> list[Evictions]:
    """None; one replica; two, one after the other; two at once: as far as there are as many and one is left."""
    some = random.Random(seed).sample(range(layout.dp), layout.dp)
    found: list[Evictions] = [()]
    if layout.dp > 1:
        found.append(([some[0]],))
    if layout.dp > 2:
        found += [([some[0]], [some[1]]), (some[:2],)]
    return found


class Checked:
    """A case's checkpoint and reference, against which layouts are checked."""

    def __init__(self, case: Case, folder: Path) -> None:
        self.case = case
        self.folder = case.write(folder)
        self.reference: Reference = make_reference(self.folder, case.dtype)
        self.config = ModelConfig.load(self.folder)
        self.specs = tensor_specs(self.config, self.dtype)
        self.bound = case.bound * float(torch.cat(self.reference.logits).std()) or FLOAT32_BOUND
        self.num_places = 0
        self.near_ties = 0
        self.largest_error = 0.0

    @property
    def dtype(self) -> str:
        """Of what is not FP8, by name."""
        return str(self.case.dtype).removeprefix("torch.")

    @property
    def pinned(self) -> Reference | None:
        """Whose experts the tokens are to have."""
        return self.reference if self.case.is_pinned else None

    def script(self, layout: Layout, seed: int = 0, evicted: Evictions = ()) -> Script:
        """What the replicas of the layout compute."""
        return make_script(self.reference, layout, seed, evicted)

    def run_in_threads(self, layout: Layout, seed: int = 0, evicted: Evictions = ()) -> None:
        """Checks a layout with threads for ranks, and that it then holds the bytes that are planned."""
        script = self.script(layout, seed, evicted)
        runs = run_in_threads(self.folder, layout, script, self.case.dtype, self.pinned, evicted)
        self.check(layout, script, [run.logits for run in runs])
        planned = weight_bytes_after(self.config, layout, self.specs, self.dtype, evicted)
        assert {rank: runs[rank].weight_bytes for rank in planned} == {
            rank: sum(kinds.values()) for rank, kinds in planned.items()
        }

    def check(self, layout: Layout, script: Script, logits: list[list[torch.Tensor]]) -> None:
        """Fails unless the logits [world][steps] are within the bound and the argmax is the reference's beyond it."""
        result: Comparison = compare(self.reference, layout, script, logits, self.bound)
        self.num_places += result.num_places
        self.near_ties += result.near_ties
        self.largest_error = max(self.largest_error, result.largest_error)
        found = f"{layout.flags()}: {result}"
        assert result.largest_error <= self.bound, f"{found}, bound {self.bound:.2g}"
        assert result.wrong_tokens == 0, found

    def report(self, name: str) -> str:
        """What was found, in one line."""
        return (
            f"{name}: largest error {self.largest_error:.2g}, bound {self.bound:.2g}; "
            f"{self.near_ties} near ties in {self.num_places} tokens"
        )
