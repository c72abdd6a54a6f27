"""The demo model's whole forward, through the real model code: the interpreter's logits against plain torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.device
from replica.checkpoint import Checkpoint
from replica.kv_cache import KVCache
from replica.layers import ExpertMlp
from replica.model_config import ModelConfig
from replica.models.qwen3_moe import Qwen3Moe
from replica.step_tensors import StepTensors
from replica.weights import WeightReader

FOLDER = Path(__file__).parents[2] / "deploy" / "models" / "tiny-moe"
BLOCK_SIZE = 16
CPU = torch.device("cpu")
RAGGED = ([], [(0, 128)], [(128, 384)], [(0, 384)], [(0, 128), (256, 384)], [], [(256, 384)], [(0, 256)])


def load(shards: tuple[list[tuple[int, int]], ...] | None) -> tuple[ModelConfig, Qwen3Moe]:
    """The model in float32 on one rank; with `shards`, that rank holds only these columns of each layer's experts."""
    config, checkpoint = ModelConfig.load(FOLDER), Checkpoint.open(FOLDER)
    with WeightReader(checkpoint, dtype=torch.float32, device=CPU, on_progress=lambda _: None) as weights:
        model = Qwen3Moe(config, weights, num_positions=64, device=CPU)
        for index, layer in enumerate(model.layers):
            if shards is not None and isinstance(layer.mlp, ExpertMlp):
                layer.mlp.experts = weights.experts(f"model.layers.{index}.mlp.experts", shards)
    return config, model


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def steps() -> list[StepTensors]:
    """Two prompts of 17 and 3 tokens; then their next tokens beside the first and second chunk of a third prompt."""
    tables = torch.tensor([[3, 1], [5, 0], [2, 4]], dtype=torch.int32)

    def step(parts: list[tuple[int, int, int]], num_decodes: int) -> StepTensors:
        """`parts` are (sequence, first position, new tokens)."""
        positions = torch.cat([torch.arange(first, first + new) for _, first, new in parts]).to(torch.int32)
        owners = torch.cat([torch.full((new,), s) for s, _, new in parts])
        blocks = tables[owners, (positions // BLOCK_SIZE).to(torch.int64)]
        starts = int32(0, *(new for _, _, new in parts)).cumsum(0).to(torch.int32)
        lens = int32(*(first + new for _, first, new in parts))
        rows = tables[[s for s, _, _ in parts]]
        return StepTensors(
            token_ids=((owners * 131 + positions * 37) % 600).to(torch.int32),
            positions=positions,
            slots=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
            sample_rows=starts[1:] - 1,
            num_decodes=num_decodes,
            decode_tables=rows[:num_decodes],
            decode_lens=lens[:num_decodes],
            prefill_tables=rows[num_decodes:],
            prefill_starts=starts[num_decodes:] - num_decodes,
            prefill_lens=lens[num_decodes:],
        )

    return [
        step([(0, 0, 17), (1, 0, 3)], num_decodes=0),
        step([(0, 17, 1), (1, 3, 1), (2, 0, 15)], num_decodes=2),
        step([(0, 18, 1), (2, 15, 2)], num_decodes=1),
    ]


@torch.inference_mode()
def logits(config: ModelConfig, model: Qwen3Moe) -> Tensor:
    cache = KVCache(config, num_blocks=6, block_size=BLOCK_SIZE, dtype=torch.float32, device=CPU)
    return torch.cat([model.forward(step, cache) for step in steps()])


@pytest.mark.parametrize("shards", [None, RAGGED], ids=["width one", "ragged width"])
def test_the_forward_of_the_demo_model_equals_the_torch_path(
    shards: tuple[list[tuple[int, int]], ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, model = load(shards)
    through_kernels = logits(config, model)
    monkeypatch.setattr(kernels.device, "IS_INTERPRETED", False)
    through_torch = logits(config, model)
    assert through_torch.abs().max() > 1  # the model says something
    torch.testing.assert_close(through_kernels, through_torch, rtol=0, atol=1e-4)
