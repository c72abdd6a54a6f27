"""An FP8 checkpoint gives the logits of an independent computation: transformers' model over dequantised weights.

There the inputs of every product with an FP8 weight are rounded to FP8 in groups of 128 by a few lines of this file.
Our sums have another order, which sometimes rounds an activation to the next FP8 value; hence the two bounds.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from replica.checkpoint import SINGLE_FILE
from replica.quantization import SCALE_SUFFIX
from tests.layout_cases import CASES
from tests.step_driver import StepDriver

GROUP: Final = 128
FP8_MAX: Final = 448.0
MOST_WITHIN: Final = 1e-4  # most logits are so near, and
ALL_WITHIN: Final = 0.2  # all are, as a part of the logits' standard deviation


def dequantized(source: Path, folder: Path) -> Path:
    """The checkpoint with float32 weights of the values that the FP8 ones stand for."""
    tensors = load_file(source / SINGLE_FILE)
    values = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name + SCALE_SUFFIX)
        if scale is not None:
            rows = torch.arange(tensor.shape[0]) // GROUP
            columns = torch.arange(tensor.shape[1]) // GROUP
            values[name] = tensor.to(torch.float32) * scale[rows][:, columns]
        elif not name.endswith(SCALE_SUFFIX):
            values[name] = tensor.to(torch.float32)
    save_file(values, folder / SINGLE_FILE, metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rounded(x: Tensor) -> Tensor:
    """Each token's groups of 128 columns as FP8 has them."""
    parts = []
    for part in x.split(GROUP, dim=-1):
        scale = part.abs().amax(dim=-1, keepdim=True).clamp(min=1e-12 * FP8_MAX) / FP8_MAX
        parts.append((part / scale).to(torch.float8_e4m3fn).to(torch.float32) * scale)
    return torch.cat(parts, dim=-1)


@contextmanager
def rounded_inputs(unconverted_sizes: set[int]) -> Iterator[None]:
    """All products round their input, except the head and the routers, known by the sizes of their outputs."""
    linear: Callable[..., Tensor] = torch.nn.functional.linear

    def patched(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x if weight.shape[0] in unconverted_sizes else rounded(x), weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", patched)
        yield


@pytest.mark.parametrize("case", ["demo FP8", "random FP8"])
def test_an_fp8_checkpoint_gives_the_logits_of_an_independent_computation(case: str, tmp_path: Path) -> None:
    folder = CASES[case].write(tmp_path)
    plain = tmp_path / "plain"
    plain.mkdir()
    reference: Any = AutoModelForCausalLM.from_pretrained(
        dequantized(folder, plain),
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    driver = StepDriver(folder, dtype=torch.float32)
    draw = random.Random(2)
    sequences = [driver.add([draw.randrange(driver.config.vocab_size) for _ in range(4)]) for _ in range(16)]
    driver.step(dict.fromkeys(sequences, 4))
    with torch.inference_mode(), rounded_inputs({driver.config.vocab_size, driver.config.num_experts}):
        expected = reference(torch.tensor([s.token_ids[:4] for s in sequences])).logits  # [16, 4, V]
    errors = (torch.stack([s.logits[0] for s in sequences]) - expected).abs().flatten() / expected.std()
    assert float(errors.median()) < MOST_WITHIN
    assert float(errors.max()) < ALL_WITHIN
