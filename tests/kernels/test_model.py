"""The demo model's whole forward, through the real model code: the interpreter's logits against plain torch's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import kernels.device
from replica.layers import ExpertMlp
from replica.layout import Layout
from tests.step_driver import RankModel, StepDriver

FOLDER = Path(__file__).parents[2] / "deploy" / "models" / "tiny-moe"
NUM_BLOCKS = 6
# Rank 1 of 4, without its peers: whole attention, and of each expert's width one block of 64 or two.
RAGGED = (Layout(dp=4, moe_tp=4), 1)


def logits(layout: Layout, rank: int) -> list[Tensor]:
    """Those of two prompts of 17 and 3 tokens, then of their next tokens beside both chunks of a third prompt."""
    driver = StepDriver(FOLDER, num_blocks=NUM_BLOCKS)
    driver.rank = RankModel(FOLDER, layout, rank, num_blocks=NUM_BLOCKS)
    prompts = [[(s * 131 + i * 37) % 600 for i in range(n)] for s, n in enumerate((17, 3, 17))]
    first, second, third = (driver.add(prompt) for prompt in prompts)
    driver.step({first: 17, second: 3})
    driver.step({first: 1, second: 1, third: 15})
    driver.step({second: 1, third: 2})
    return [rows for s in (first, second, third) for rows in s.logits]


@pytest.mark.parametrize(("layout", "rank"), [(Layout(), 0), RAGGED], ids=["width one", "ragged width"])
def test_the_forward_of_the_demo_model_equals_the_torch_path(
    layout: Layout, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    through_kernels = logits(layout, rank)
    monkeypatch.setattr(kernels.device, "IS_INTERPRETED", False)
    through_torch = logits(layout, rank)
    for actual, expected in zip(through_kernels, through_torch, strict=True):
        assert expected.abs().max() > 1  # the model says something
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def test_the_ragged_width_is_ragged() -> None:
    layers = RankModel(FOLDER, *RAGGED, num_blocks=NUM_BLOCKS).model.layers
    widths = {width for layer in layers if isinstance(layer.mlp, ExpertMlp) for width in layer.mlp.parts[0].widths}
    assert len(widths) > 1
