"""Safetensors -> this rank's tensors. Files are mapped, and only the rank's own slices are read.

They stay open, since blocks of lost replicas are read later. But a page of a mapped file that was read counts as memory
of this process: every so often all is unmapped, and mapped again when it is needed.

`Shards` says which rows and columns those are: any set of blocks. Every part is copied, and converted on the way,
straight into the array that serves it: nothing is held twice. FP8 weights stay FP8; their scales become float32.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from kernels import ExpertWeights
from replica.checkpoint import Checkpoint
from replica.quantization import FP8_BLOCK, SCALE_SUFFIX
from replica.shards import Ranges, Shards, TensorShard
from replica.tensor_specs import tensor_specs

_LEAST_OWN_BYTES: Final = 64 * 1024
_MAPPED_BYTES: Final = 128 * 2**20  # so much is read before it is unmapped


class WeightReader:
    """Reads one rank's part of a checkpoint, by the tensors' names. A context manager: leaving it unmaps the files.

    The checkpoint must have passed `Checkpoint.check`, and the layout `Layout.check`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shards: Shards,
        *,
        dtype: torch.dtype,
        device: torch.device,
        on_progress: Callable[[int, int], None],
    ) -> None:
        """`dtype` is that of everything but FP8 weights and their scales.

        `on_progress` is called after each part, with the bytes of the files read so far and all that will be.
        """
        self.shards = shards
        self.specs = tensor_specs(shards.config, str(dtype).removeprefix("torch."))
        self.weight_bytes = 0  # of the tensors made so far
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._device = device
        self._on_progress = on_progress
        self._read_bytes = 0
        self._total_bytes = sum(self._file_bytes(name) for name in self.specs)
        self._opened = ExitStack()
        self._descriptors: dict[Path, int] = {}  # what is served stays as it was, whatever becomes of the names
        self._mapped = ExitStack()
        self._files: dict[Path, Any] = {}
        self._mapped_bytes = 0  # of them, what was read

    def __enter__(self) -> WeightReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.unmap()
        self._opened.close()

    def unmap(self) -> None:
        """Gives back the memory of what was read from the files."""
        self._files.clear()
        self._mapped.close()
        self._mapped_bytes = 0

    @contextmanager
    def reading(self, shards: Shards) -> Iterator[None]:
        """Reads other shards of the same files meanwhile, and tells nobody of the progress."""
        own, self.shards = self.shards, shards
        on_progress, self._on_progress = self._on_progress, lambda done, total: None
        try:
            yield
        finally:
            self.shards, self._on_progress = own, on_progress
            self.unmap()

    def tensor(self, name: str) -> Tensor:
        """The rank's part of one tensor, padded with zeros where its shard is."""
        return self.stacked([name])

    def stacked(self, names: Sequence[str]) -> Tensor:
        """The rank's parts of several tensors of one type and width, one below the other."""
        parts = [self.shard(name) for name in names]
        num_rows = [part.shape[0] for part in parts]
        out = self._empty(names[0], sum(num_rows), *parts[0].shape[1:])
        for name, part, rows in zip(names, parts, torch.split(out, num_rows), strict=True):
            num_read = rows.shape[0] - part.num_padding_rows
            rows[num_read:].zero_()
            self._read_into(rows[:num_read], name, part.rows, part.columns)
        return out

    def shard(self, name: str) -> TensorShard:
        """Which part of a tensor the rank holds."""
        return self.shards.tensor(name, self.specs[name])

    def experts(self, prefix: str, layer: int) -> ExpertWeights:
        """The rank's parts of the experts `prefix`.0 to `prefix`.E-1, which are those of the layer."""
        shards = self.shards.experts(layer)
        gate_up, down = self._expert_arrays(prefix, shards, "weight")
        widths = tuple(sum(stop - start for start, stop in shard) for shard in shards)
        offsets = [sum(widths[:expert]) for expert in range(len(widths) + 1)]
        table = torch.tensor(offsets, dtype=torch.int32, device=self._device)
        if not self.shards.config.is_fp8(f"{prefix}.0.down_proj.weight"):
            return ExpertWeights(gate_up=gate_up, down=down, offsets=table, widths=widths)
        blocks = [tuple((start // FP8_BLOCK, -(-stop // FP8_BLOCK)) for start, stop in shard) for shard in shards]
        gate_up_scale, down_scale = self._expert_arrays(prefix, blocks, f"weight{SCALE_SUFFIX}")
        return ExpertWeights(
            gate_up=gate_up,
            down=down,
            offsets=table,
            widths=widths,
            gate_up_scale=gate_up_scale,
            down_scale=down_scale,
        )

    def _expert_arrays(self, prefix: str, shards: Sequence[Ranges], suffix: str) -> tuple[Tensor, Tensor]:
        """Gate and up [2 * F_total, H], and down [H * F_total], of weights, or of scales, whose sizes are in blocks."""
        widths = [sum(stop - start for start, stop in shard) for shard in shards]
        hidden = self.specs[f"{prefix}.0.down_proj.{suffix}"].shape[0]
        gate_up = self._empty(f"{prefix}.0.gate_proj.{suffix}", 2 * sum(widths), hidden)
        down = self._empty(f"{prefix}.0.down_proj.{suffix}", hidden * sum(widths))
        gate_up_parts = torch.split(gate_up, [width for width in widths for _ in range(2)])
        down_parts = torch.split(down, [hidden * width for width in widths])
        for expert, (shard, width) in enumerate(zip(shards, widths, strict=True)):
            name = f"{prefix}.{expert}"
            self._read_into(gate_up_parts[2 * expert], f"{name}.gate_proj.{suffix}", shard, ((0, hidden),))
            self._read_into(gate_up_parts[2 * expert + 1], f"{name}.up_proj.{suffix}", shard, ((0, hidden),))
            part = down_parts[expert].view(hidden, width)
            self._read_into(part, f"{name}.down_proj.{suffix}", ((0, hidden),), shard)
        return gate_up, down

    def _empty(self, name: str, *size: int) -> Tensor:
        """Room for a tensor of the type that the named one has in memory."""
        dtype = self._dtype
        if name.endswith(SCALE_SUFFIX):
            dtype = torch.float32
        elif self.shards.config.is_fp8(name):
            dtype = torch.float8_e4m3fn
        out = _room(size, dtype, self._device)
        self.weight_bytes += out.nbytes
        return out

    def _read_into(self, out: Tensor, name: str, rows: Ranges, columns: Ranges | None) -> None:
        """Copies ranges of one tensor to `out`, which has exactly their size; None: it is a vector."""
        entry = self._checkpoint.tensors[name]
        source = self._file(entry.file).get_slice(name)
        row = 0
        for row_start, row_stop in rows:
            mapped = source[row_start:row_stop]  # a view of the mapped file; nothing is read yet
            target = out[row : row + row_stop - row_start]
            row += row_stop - row_start
            if columns is None:
                target.copy_(mapped)
                continue
            column = 0
            for start, stop in columns:
                target[:, column : column + stop - start].copy_(mapped[:, start:stop])
                column += stop - start
        num_bytes = out.numel() * entry.num_bytes // max(1, math.prod(entry.shape))
        self._read_bytes += num_bytes
        self._mapped_bytes += num_bytes
        self._on_progress(self._read_bytes, self._total_bytes)

    def _file_bytes(self, name: str) -> int:
        """What the rank reads of a tensor."""
        entry, part = self._checkpoint.tensors[name], self.shard(name)
        num_rows = part.shape[0] - part.num_padding_rows
        return num_rows * math.prod(part.shape[1:]) * entry.num_bytes // max(1, math.prod(entry.shape))

    def _file(self, path: Path) -> Any:
        if self._mapped_bytes > _MAPPED_BYTES:
            self.unmap()
        if path not in self._descriptors:
            self._descriptors[path] = os.open(path, os.O_RDONLY)
            self._opened.callback(os.close, self._descriptors[path])
        if path not in self._files:
            name = f"/dev/fd/{self._descriptors[path]}"
            self._files[path] = self._mapped.enter_context(safe_open(name, framework="pt"))
        return self._files[path]


def _room(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty tensor. On the CPU one of some size has memory of its own, which goes back to the system when it was
    packed: between pieces that stay it would leave a gap that the next one may not fit. In huge pages, where the kernel
    offers them on request: a product reads it a third faster."""
    num_bytes = math.prod(size) * dtype.itemsize
    if device.type != "cpu" or num_bytes < _LEAST_OWN_BYTES:
        return torch.empty(size, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(size)
