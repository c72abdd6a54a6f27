"""Norms, SwiGLU, rotary and cache writes under the interpreter, against their references."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from kernels.rope_cache import qk_norm_rope_cache_reference
from kernels.swiglu import swiglu_reference
from tests.kernels.tensors import assert_close, random

DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [0, 1, 3])
@pytest.mark.parametrize("H", [1, 100, 128, 4096])
def test_rms_norm_equals_its_reference(T: int, H: int, dtype: torch.dtype) -> None:
    x, residual = random(T, H, dtype=dtype), random(T, H, seed=1, dtype=dtype)
    weight = random(H, seed=2, dtype=dtype)
    assert_close(kernels.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    normed, total = kernels.add_rms_norm(x, residual, weight, 1e-6)
    expected_normed, expected_total = add_rms_norm_reference(x, residual, weight, 1e-6)
    assert_close(normed, expected_normed)
    assert torch.equal(total, expected_total)


def test_rms_norm_reads_rows_of_a_wider_tensor() -> None:
    x, weight = random(4, 24)[:, 5:13], random(8, seed=1)
    assert_close(kernels.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    with pytest.raises(ValueError, match=r"x has strides .* last dimension must be contiguous"):
        kernels.rms_norm(random(8, 8).T, weight, 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [0, 1, 3])
@pytest.mark.parametrize("F", [1, 7, 768, 1023, 1024, 1025])
def test_swiglu_equals_its_reference(T: int, F: int, dtype: torch.dtype) -> None:
    x = random(T, 2 * F, dtype=dtype)
    assert_close(kernels.swiglu(x), swiglu_reference(x))


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "T", "has_norm", "is_fp8"),
    [
        (4, 2, 32, 0, True, False),
        (4, 2, 32, 7, True, False),
        (5, 5, 24, 3, False, False),
        (1, 3, 6, 2, True, False),
        (32, 4, 128, 2, True, False),
        (6, 2, 16, 5, True, True),
        (64, 1, 128, 1, False, True),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_and_cache_write_equal_their_reference(
    num_heads: int, num_kv_heads: int, head_dim: int, T: int, has_norm: bool, is_fp8: bool, dtype: torch.dtype
) -> None:
    heads = (num_heads, num_kv_heads, num_kv_heads)
    fused = random(T, sum(heads) * head_dim, dtype=dtype).view(T, sum(heads), head_dim)  # as the projection makes them
    q, k, v = fused.split(heads, dim=1)
    q_weight, k_weight = (random(head_dim, seed=s, dtype=dtype) if has_norm else None for s in (1, 2))
    scales = (random(num_kv_heads, seed=5).abs() + 0.1, random(num_kv_heads, seed=6).abs() + 0.1) if is_fp8 else ()
    positions = torch.arange(T) * 3 % 11
    slots = (torch.arange(T) * 5 + 3) % 16
    slots[1::3] = -1
    results = []
    for function in (kernels.qk_norm_rope_cache, qk_norm_rope_cache_reference):
        caches = torch.full((2, 4, 4, num_kv_heads, head_dim), 7.0, dtype=dtype)
        k_cache, v_cache = caches.to(torch.float8_e4m3fn) if is_fp8 else caches
        cos_sin = random(11, head_dim, seed=4)
        out = function(q, k, v, q_weight, k_weight, 1e-6, cos_sin, positions, slots, k_cache, v_cache, *scales)
        results.append((out, k_cache.to(dtype), v_cache.to(dtype)))
    for actual, expected in zip(*results, strict=True):
        assert_close(actual, expected)
