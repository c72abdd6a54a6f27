"""Safetensors -> this rank's tensors. Files are mapped, and only the slices that are asked for are read.

A shard is a list of row or column ranges, so that it can be any set of blocks. Every part is copied, and converted on
the way, straight into the array that serves it: nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from kernels import ExpertWeights
from replica.checkpoint import Checkpoint

Ranges = Sequence[tuple[int, int]]  # half-open, in the order in which they shall lie in memory


class WeightReader:
    """Reads tensors of one checkpoint by name. A context manager: leaving it unmaps the files.

    The checkpoint must have passed `Checkpoint.check`; a name that it lacks is a KeyError.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[int], None],
    ) -> None:
        """`on_progress` is called with the bytes of the files read so far, after each part."""
        self.weight_bytes = 0  # of the tensors made so far
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._read_bytes = 0
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def tensor(self, name: str, rows: Ranges | None = None, columns: Ranges | None = None) -> Tensor:
        """A vector or matrix, or the given rows and columns of it, one range after the other."""
        return self.stacked([name], rows, columns)

    def stacked(self, names: Sequence[str], rows: Ranges | None = None, columns: Ranges | None = None) -> Tensor:
        """Several tensors of one width, one below the other; `rows` and `columns` are taken from each."""
        sizes = [self._size(name, rows, columns) for name in names]
        out = self._empty(sum(size[0] for size in sizes), *sizes[0][1:])
        first = 0
        for name, size in zip(names, sizes, strict=True):
            self._read_into(out[first : first + size[0]], name, rows, columns)
            first += size[0]
        return out

    def experts(self, prefix: str, shards: Sequence[Ranges]) -> ExpertWeights:
        """The experts `prefix`.0 to `prefix`.E-1; `shards[e]` is the part of expert e's width that this rank holds."""
        widths = tuple(sum(stop - start for start, stop in shard) for shard in shards)
        offsets = [0]
        for width in widths:
            offsets.append(offsets[-1] + width)
        hidden = self._checkpoint.tensors[f"{prefix}.0.down_proj.weight"].shape[0]
        gate_up = self._empty(2 * offsets[-1], hidden)
        down = self._empty(hidden * offsets[-1])
        for expert, shard in enumerate(shards):
            first, middle = 2 * offsets[expert], 2 * offsets[expert] + widths[expert]
            name = f"{prefix}.{expert}"
            self._read_into(gate_up[first:middle], f"{name}.gate_proj.weight", rows=shard)
            self._read_into(gate_up[middle : middle + widths[expert]], f"{name}.up_proj.weight", rows=shard)
            part = down[hidden * offsets[expert] : hidden * offsets[expert + 1]].view(hidden, widths[expert])
            self._read_into(part, f"{name}.down_proj.weight", columns=shard)
        table = torch.tensor(offsets, dtype=torch.int32, device=self._device)
        return ExpertWeights(gate_up=gate_up, down=down, offsets=table, widths=widths)

    def _empty(self, *size: int) -> Tensor:
        out = torch.empty(size, dtype=self._dtype, device=self._device)
        self.weight_bytes += out.nbytes
        return out

    def _size(self, name: str, rows: Ranges | None, columns: Ranges | None) -> list[int]:
        size = list(self._checkpoint.tensors[name].shape)
        for dim, ranges in enumerate((rows, columns)):
            if ranges is not None:
                size[dim] = sum(stop - start for start, stop in ranges)
        return size

    def _read_into(self, out: Tensor, name: str, rows: Ranges | None = None, columns: Ranges | None = None) -> None:
        """Copies the ranges of one tensor to `out`, which has exactly their size."""
        entry = self._checkpoint.tensors[name]
        source = self._file(entry.file).get_slice(name)
        row = 0
        for row_start, row_stop in [(0, entry.shape[0])] if rows is None else rows:
            mapped = source[row_start:row_stop]  # a view of the mapped file; nothing is read yet
            target = out[row : row + row_stop - row_start]
            row += row_stop - row_start
            if columns is None:
                target.copy_(mapped)
            else:
                column = 0
                for start, stop in columns:
                    target[:, column : column + stop - start].copy_(mapped[:, start:stop])
                    column += stop - start
        self._read_bytes += out.numel() * entry.num_bytes // max(1, _numel(entry.shape))
        self._on_progress(self._read_bytes)

    def _file(self, path: Path) -> Any:
        if path not in self._files:
            self._files[path] = self._stack.enter_context(safe_open(path, framework="pt"))
        return self._files[path]


def _numel(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
