"""Products with weights on the CPU: by code of our own where it can be had (bf16_cpu.py), else by oneDNN.

Either wants a weight laid out once in its own way, which replaces the plain one. That is done only where it takes no
more room, so a plan that counts plain weights counts right.

oneDNN multiplies blocks of a weight. From a plain matrix it must first arrange those, for every product anew, which
costs more than the product itself when there are few rows: a packed weight is about twice as fast then, and as fast for
many. Its blocks of 64 rows pad smaller matrices; those stay plain.

oneDNN prepares code for each number of rows (a millisecond) and keeps it in a bounded cache, so rows are padded to one
of few numbers.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels import bf16_cpu

_ROWS_HINT: Final = 64  # for which a layout is chosen; it serves any number of rows as well
# More are padded to multiples of _ROWS_STEP. Four rows take less time than one: the code for those keeps more weights
# on their way (768 x 1024 on an EPYC: 1 row 123 us, 2 rows 151, 3 rows 118, 4 to 6 rows 111, 8 rows 143).
_FEW_ROWS: Final = (0, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_ROWS_STEP: Final = 32

_linear = torch.ops.mkldnn._linear_pointwise.default
# By number of rows, the next larger of _FEW_ROWS.
_FEW: Final[NDArray[np.int64]] = np.repeat(_FEW_ROWS, np.diff(_FEW_ROWS, prepend=-1))


def pack(weight: Tensor) -> Tensor:
    """weight [N, K] -> the same for `linear`: packed if that is faster, and takes no more room."""
    return bf16_cpu.pack(weight) if bf16_cpu.can_pack(weight) else pack_blocks(weight)


def pack_blocks(weight: Tensor) -> Tensor:
    """As `pack`, for `linear_padded`."""
    if not _is_fast(weight.dtype) or weight.numel() == 0:
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
    return packed if torch.ops.mkldnn._nbytes(packed) <= weight.nbytes else weight


def pack_embedding(weight: Tensor) -> Tensor:
    """As `pack`, for a weight whose rows `embedding` takes too."""
    return bf16_cpu.pack(weight) if bf16_cpu.can_pack(weight) else weight


def embedding(weight: Tensor, row_ids: Tensor) -> Tensor:
    """weight [V, H] as `pack_embedding` gave it, or plain; row_ids [T] -> [T, H]."""
    if bf16_cpu.is_packed(weight):
        return bf16_cpu.rows(weight, row_ids)
    return embedding_plain(weight, row_ids)


def embedding_plain(weight: Tensor, row_ids: Tensor) -> Tensor:
    """As `embedding`, with a plain weight."""
    return torch.nn.functional.embedding(row_ids, weight)


def pack_nothing(weight: Tensor) -> Tensor:
    """As `pack`, on a GPU, whose products take a plain matrix."""
    return weight


def linear_plain(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, with a plain weight."""
    return torch.nn.functional.linear(x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K] as `pack` gave it, bias [N] -> [T, N]."""
    if bf16_cpu.is_packed(weight):
        return bf16_cpu.linear(x, weight, bias)
    T = x.shape[0]
    if T == 0:
        return x.new_empty((0, weight.shape[0]))
    num_rows = _padded(T)
    if num_rows != T:
        x = torch.nn.functional.pad(x, (0, 0, 0, num_rows - T))
    y = linear_padded(x, weight, bias)
    return y if num_rows == T else y[:T]


def linear_padded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As `linear`, by oneDNN, for an x whose number of rows is one of `padded_rows`."""
    if not weight.is_mkldnn:
        return linear_plain(x, weight, bias)
    y: Tensor = _linear(x, weight, bias, "none", [], "")
    return y


def padded_rows(num_rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """For each number of rows the next one, not smaller, for which there is code."""
    if num_rows.max() < len(_FEW):  # as in every step that decodes
        return _FEW[num_rows]
    few = _FEW[np.minimum(num_rows, len(_FEW) - 1)]
    return np.where(num_rows < len(_FEW), few, -(-num_rows // _ROWS_STEP) * _ROWS_STEP)


@cache
def _padded(num_rows: int) -> int:
    return int(padded_rows(np.array(num_rows)))


def _is_fast(dtype: torch.dtype) -> bool:
    """Whether oneDNN has products of this type for this processor."""
    if not torch.backends.mkldnn.is_available():
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return dtype == torch.float32
