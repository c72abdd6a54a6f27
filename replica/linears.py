"""Matrix products with this rank's part of a weight, in the model's dtype or in block-scaled FP8.

A weight that is cut by rows (q, k, v, gate, up) gives some columns of the output; one that is cut by columns (o_proj,
down_proj) takes some columns of the input and gives this rank's part of a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import kernels
from replica.errors import CheckpointError
from replica.layout import Range
from replica.quantization import FP8_BLOCK, SCALE_SUFFIX
from replica.shards import Ranges
from replica.weights import WeightReader


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + b."""

    weight: Tensor  # [out, in]
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        return torch.nn.functional.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class Fp8Linear:
    """The same with FP8 weights, and activations that are quantised in groups of 128 columns of a token.

    A kernel finds an element's scale by its row and column / 128, counted from the beginning of what it is given. A
    part that is cut by heads may begin within a block of 128; so it is given to the kernel in pieces, each of which
    begins with a block or lies within one. Heads of 128 give a single piece.

    Where heads are narrower, a group of o_proj's activations spans ranks. Each rank quantises its own columns of it,
    with their own scale: as fine or finer than on one rank, without a collective, but not rounded alike.
    """

    columns: tuple[Range, ...]  # of x; the products of these are summed
    pieces: tuple[tuple[tuple[Tensor, Tensor], ...], ...]  # for each of them, weights and scales; outputs side by side
    bias: Tensor | None = None  # [out]

    def __call__(self, x: Tensor) -> Tensor:  # [T, in] -> [T, out]
        y = self._product(0, x)
        for index in range(1, len(self.columns)):
            y = y + self._product(index, x)
        return y if self.bias is None else y + self.bias

    def _product(self, index: int, x: Tensor) -> Tensor:
        start, stop = self.columns[index]
        outputs = [kernels.linear_fp8(x[:, start:stop], weight, scale) for weight, scale in self.pieces[index]]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)


def load_linear(weights: WeightReader, *names: str, has_bias: bool = False) -> Linear | Fp8Linear:
    """The rank's parts of the linears `names`, fused into one whose output is theirs side by side.

    Raises CheckpointError if some of them are FP8 and some are not.
    """
    bias = weights.stacked([f"{name}.bias" for name in names]) if has_bias else None
    matrices = [f"{name}.weight" for name in names]
    kinds = {weights.shards.config.is_fp8(name) for name in matrices}
    if len(kinds) > 1:
        raise CheckpointError(f"modules_to_not_convert names some of {', '.join(names)}: all or none must be FP8")
    weight = weights.stacked(matrices)
    if kinds == {False}:
        return Linear(weight, bias)
    scale = weights.stacked([name + SCALE_SUFFIX for name in matrices])
    parts = [weights.shard(name) for name in matrices]
    assert parts[0].columns is not None  # they are matrices
    rows = _pieces(*(part.rows for part in parts))
    columns = _pieces(parts[0].columns)
    pieces = tuple(tuple((weight[r, c], scale[rs, cs]) for r, rs in rows) for c, cs in columns)
    return Fp8Linear(tuple((c.start, c.stop) for c, _ in columns), pieces, bias)


def _pieces(*parts: Ranges) -> list[tuple[slice, slice]]:
    """Cuts the rows (or columns) of stacked parts into pieces whose scales can be found by row / 128.

    A part is the ranges that were taken of one tensor; its scales are those of the blocks that it touches. Returns the
    slices of the rows in memory, and of their scales.
    """
    pieces: list[tuple[slice, slice]] = []
    row = block = 0  # in memory
    for start, stop in (piece for part in parts for span in part for piece in _block_runs(span)):
        num_blocks = -(-stop // FP8_BLOCK) - start // FP8_BLOCK
        rows, blocks = slice(row, row + stop - start), slice(block, block + num_blocks)
        row, block = rows.stop, blocks.stop
        if pieces and (pieces[-1][0].stop - pieces[-1][0].start) % FP8_BLOCK == 0:
            rows, blocks = slice(pieces[-1][0].start, row), slice(pieces[-1][1].start, block)
            pieces.pop()
        pieces.append((rows, blocks))
    return pieces or [(slice(0, 0), slice(0, 0))]


def _block_runs(span: Range) -> list[Range]:
    """The range in parts that begin with a block, or lie within one."""
    start, stop = span
    boundary = -(-start // FP8_BLOCK) * FP8_BLOCK
    return [span] if start == boundary or stop <= boundary else [(start, boundary), (boundary, stop)]
