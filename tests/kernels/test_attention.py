"""Paged attention under the interpreter, against its reference and one head at a time in float64."""

from __future__ import annotations

import sys

import pytest
import torch

import kernels
from kernels.attention_decode import attention_decode_reference
from kernels.attention_prefill import attention_prefill_reference
from tests.kernels.tensors import Pages, assert_close, random

DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lens", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        ([], 4, 2, 32, 16),
        ([0], 4, 2, 32, 16),
        ([1, 15, 16, 17, 0, 63, 64, 65], 4, 2, 32, 16),
        ([255, 256, 257, 700], 8, 1, 16, 16),
        ([5, 40], 6, 2, 24, 8),
        ([33, 3], 3, 3, 128, 4),
        ([70], 32, 1, 128, 16),
    ],
)
def test_decode_equals_its_reference(
    lens: list[int], num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    pages = Pages(lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    q = random(len(lens), num_heads, head_dim, dtype=dtype)
    args = (q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, head_dim**-0.5)
    assert_close(kernels.attention_decode(*args), attention_decode_reference(*args))


def test_a_sequence_longer_than_all_splits_gets_longer_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["kernels.attention_decode"]
    monkeypatch.setattr(module, "MAX_SPLITS", 4)
    monkeypatch.setattr(module, "MIN_SPLIT", 64)
    lens = [255, 256, 257, 700, 64, 1]
    pages = Pages(lens, num_kv_heads=1, head_dim=16, block_size=16, dtype=torch.float32)
    q = random(len(lens), 2, 16)
    out = kernels.attention_decode(q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, 0.25)
    for s, length in enumerate(lens):
        assert_close(out[s], pages.attend(q[s], s, length, 0.25))


def test_decode_of_a_sequence_is_bit_identical_alone_and_in_a_batch() -> None:
    lens = [300, 17, 700]
    pages = Pages(lens, num_kv_heads=2, head_dim=16, block_size=16, dtype=torch.float16)
    q = random(3, 4, 16, dtype=torch.float16)
    together = kernels.attention_decode(q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, 0.25)
    for s, length in enumerate(lens):
        table = pages.tables[s : s + 1, : -(-length // 16)].contiguous()
        alone = kernels.attention_decode(q[s : s + 1], pages.k_cache, pages.v_cache, table, pages.lens[s : s + 1], 0.25)
        assert torch.equal(alone[0], together[s])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("chunks", "num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        ([(0, 0)], 4, 2, 32, 16),
        ([(1, 0)], 4, 2, 32, 16),
        ([(5, 0), (0, 9), (1, 16), (17, 15), (0, 0)], 4, 2, 32, 16),
        ([(63, 0), (64, 1), (65, 70)], 4, 2, 16, 16),  # a tile is 64 tokens here
        ([(31, 3), (42, 0), (43, 0), (44, 0)], 6, 2, 24, 8),  # 42 tokens of 3 heads fill 126 rows of 128
        ([(9, 250)], 16, 1, 128, 16),
        ([(130, 0)], 2, 2, 8, 4),
    ],
)
def test_prefill_equals_its_reference(
    chunks: list[tuple[int, int]],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> None:
    lens = [new + cached for new, cached in chunks]
    pages = Pages(lens, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=block_size, dtype=dtype)
    starts = torch.tensor([0, *(new for new, _ in chunks)]).cumsum(0).to(torch.int32)
    q = random(int(starts[-1]), num_heads, head_dim, dtype=dtype)
    args = (q, pages.k_cache, pages.v_cache, pages.tables, starts, pages.lens, head_dim**-0.5)
    assert_close(kernels.attention_prefill(*args), attention_prefill_reference(*args))


def test_an_fp8_cache_is_read_with_the_scale_of_each_head() -> None:
    pages = Pages([20, 5], num_kv_heads=2, head_dim=16, block_size=8, dtype=torch.float32)
    caches = (pages.k_cache.to(torch.float8_e4m3fn), pages.v_cache.to(torch.float8_e4m3fn))
    scales = (torch.tensor([0.5, 2.0]), torch.tensor([1.5, 0.25]))
    q, starts = random(2, 4, 16), torch.tensor([0, 1, 2], dtype=torch.int32)
    decode = (q, *caches, pages.tables, pages.lens, 0.25, *scales)
    assert_close(kernels.attention_decode(*decode), attention_decode_reference(*decode))
    prefill = (q, *caches, pages.tables, starts, pages.lens, 0.25, *scales)
    assert_close(kernels.attention_prefill(*prefill), attention_prefill_reference(*prefill))
    assert_close(kernels.attention_prefill(*prefill), attention_decode_reference(*decode))
