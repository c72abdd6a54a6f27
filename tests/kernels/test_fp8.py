"""FP8 quantisation and the block-scaled linear under the interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels import configs
from kernels.configs import ANY, Tile
from kernels.fp8 import linear_fp8_reference, quantize_blocks, quantize_fp8, quantize_fp8_reference
from tests.kernels.tensors import assert_close, random


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("T", "H"), [(0, 128), (1, 1), (3, 127), (2, 128), (2, 129), (1, 2048)])
def test_quantisation_equals_its_reference(T: int, H: int, dtype: torch.dtype) -> None:
    x = random(T, H, dtype=dtype) * 100
    x[:, : H // 2] *= 1e-3
    quantized, scale = quantize_fp8(x)
    expected, expected_scale = quantize_fp8_reference(x)
    assert torch.equal(scale, expected_scale)
    assert torch.equal(quantized.view(torch.uint8), expected.view(torch.uint8))


def test_zeros_quantise_to_zeros() -> None:
    quantized, scale = quantize_fp8(torch.zeros(2, 200))
    assert not bool(quantized.to(torch.float32).any()) and bool((scale > 0).all())


@pytest.mark.parametrize(
    "tile",
    [
        Tile(16, 128, 128, 4, 2),
        Tile(16, 128, 128, 4, 2, is_swapped=True),
        Tile(64, 64, 128, 4, 2, is_persistent=True),
    ],
)
@pytest.mark.parametrize(
    ("T", "N", "K"),
    [(0, 128, 128), (3, 0, 128), (3, 5, 0), (1, 128, 256), (15, 130, 200), (65, 256, 128), (17, 1, 384)],
)
def test_block_scaled_linear_equals_its_reference(
    T: int, N: int, K: int, tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(configs.DEFAULTS["linear_fp8"], "sm_90", ((ANY, tile),))
    configs.pick.cache_clear()
    x, (weight, scale) = random(T, K), quantize_blocks(random(N, K, seed=1))
    actual = kernels.linear_fp8(x, weight, scale)
    configs.pick.cache_clear()
    assert_close(actual, linear_fp8_reference(x, weight, scale))
