"""Kernels run here under Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/kernels`, in a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

if not triton.knobs.runtime.interpret:  # fixed when a kernel is decorated, so no test can switch it on
    collect_ignore_glob = ["test_*.py"]

_GUARD_BYTES = 4096


def pytest_configure(config: pytest.Config) -> None:
    """`-m "not long"` leaves out what takes minutes."""
    config.addinivalue_line("markers", "long: shapes of the real models; minutes under the interpreter")


class GuardedMemory:
    """Gives out tensors full of NaN (-1 if integer) between margins, and knows whether a margin was written."""

    def __init__(self) -> None:
        self.raw: list[Tensor] = []

    def empty(self, *size: Any, dtype: torch.dtype, device: Any = None) -> Tensor:
        """As torch.empty."""
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        num_bytes = shape.numel() * dtype.itemsize
        raw = torch.full((num_bytes + 2 * _GUARD_BYTES,), 0xFF, dtype=torch.uint8)  # NaN in every float type
        self.raw.append(raw)
        return raw[_GUARD_BYTES : _GUARD_BYTES + num_bytes].view(dtype).view(shape)

    def empty_like(self, tensor: Tensor) -> Tensor:
        """As torch.empty_like, contiguous."""
        return self.empty(tensor.shape, dtype=tensor.dtype)

    def is_intact(self) -> bool:
        """Whether all margins are as they were."""
        return all(bool((raw[:_GUARD_BYTES] == 0xFF).all() and (raw[-_GUARD_BYTES:] == 0xFF).all()) for raw in self.raw)


@pytest.fixture(autouse=True)
def fp8_rounds_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter loses the carry when a mantissa rounds up to the next power of two; GPUs and torch do not."""
    convert = interpreter._convert_float

    def convert_float(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.float8e4nv:
            floats = torch.from_numpy(np.ascontiguousarray(values).view(np.float32))
            return floats.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return convert(values, source, target, rounding)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)


@pytest.fixture(autouse=True)
def guarded_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[GuardedMemory]:
    """Every torch.empty of a launcher: the interpreter itself traps no stray store and no read of unwritten memory."""
    memory = GuardedMemory()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", memory.empty)
        patch.setattr(torch, "empty_like", memory.empty_like)
        yield memory
    assert memory.is_intact(), "a kernel wrote outside its output"
