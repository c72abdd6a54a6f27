"""FP8 products of parts of a weight are those of the whole: pieces by rows, and scales that ranks agree on."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kernels.fp8 import group_maxima, linear_fp8_reference, linear_fp8_scaled, quantize_blocks, scale_of
from replica.linears import _pieces


def values(*size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(sum(size)))


@pytest.mark.parametrize(
    ("parts", "pieces"),
    [
        ([((0, 256),), ((128, 256),)], [(0, 384, 0, 3)]),  # whole blocks, fused
        ([((64, 128),)], [(0, 64, 0, 1)]),  # within a block
        ([((96, 192),)], [(0, 32, 0, 1), (32, 96, 1, 2)]),  # over a boundary
        ([((0, 96),), ((96, 144),), ((48, 96),)], [(0, 96, 0, 1), (96, 128, 1, 2), (128, 144, 2, 3), (144, 192, 3, 4)]),
        ([((0, 128),), ((32, 96),)], [(0, 192, 0, 2)]),  # the second lies within a block, after a whole one
        ([(), ((0, 128),)], [(0, 128, 0, 1)]),
        ([(), ()], [(0, 0, 0, 0)]),
    ],
)
def test_stacked_parts_are_cut_where_scales_cannot_be_counted_on(
    parts: list[tuple[tuple[int, int], ...]], pieces: list[tuple[int, int, int, int]]
) -> None:
    found = [(rows.start, rows.stop, blocks.start, blocks.stop) for rows, blocks in _pieces(parts)]
    assert found == pieces


@pytest.mark.parametrize("cuts", [[0, 96, 192, 288], [0, 48, 96, 144, 192, 240, 288], [0, 160, 288], [0, 288]])
@pytest.mark.parametrize("num_tokens", [0, 1, 5])
def test_parts_whose_groups_span_ranks_sum_to_the_product_of_one_rank(cuts: list[int], num_tokens: int) -> None:
    x = values(num_tokens, 288)
    weight, scale = quantize_blocks(values(200, 288))
    spans = list(itertools.pairwise(cuts))
    maxima = torch.zeros(num_tokens, 3)
    for start, stop in spans:
        touched = slice(start // 128, -(-stop // 128))
        maxima[:, touched] = maxima[:, touched].maximum(group_maxima(x[:, start:stop], start))
    total = torch.zeros(num_tokens, 200)
    for start, stop in spans:
        touched = slice(start // 128, -(-stop // 128))
        part = (weight[:, start:stop], scale[:, touched], start)
        total += linear_fp8_scaled(x[:, start:stop], scale_of(maxima[:, touched]), *part)
    torch.testing.assert_close(total, linear_fp8_reference(x, weight, scale), atol=1e-4, rtol=0)
