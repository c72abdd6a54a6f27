"""Where a kernel runs: the one dispatch point, and what the launchers ask of the device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, ParamSpec, Protocol, TypeVar

import torch
import triton

from kernels.configs import Tile

P = ParamSpec("P")
R = TypeVar("R")

# Triton reads TRITON_INTERPRET when a kernel is decorated, so this is fixed once this package is imported.
IS_INTERPRETED: Final[bool] = bool(triton.knobs.runtime.interpret)
_INTERPRETED_PROGRAMS: Final = 3  # few enough that persistent kernels loop over small problems too


class _Placed(Protocol):
    """A tensor, or what is made of some that lie on one device."""

    @property
    def is_cuda(self) -> bool: ...


def dispatched(launcher: Callable[P, R], on_cpu: Callable[P, R]) -> Callable[P, R]:
    """One function of the two: Triton for CUDA tensors or under the interpreter, `on_cpu` for those on the CPU.

    The first argument, which must be given by position, tells which.
    """

    @functools.wraps(launcher)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        x: _Placed = args[0]  # type: ignore[assignment]  # P knows nothing of its first
        return (launcher if x.is_cuda or IS_INTERPRETED else on_cpu)(*args, **kwargs)

    return call


@functools.cache
def arch(device: torch.device) -> str:
    """The row of the tables in configs.py that this device uses. The interpreter uses those of sm_90."""
    if IS_INTERPRETED:
        return "sm_90"
    if torch.version.hip:
        return "gfx942"
    major, _ = torch.cuda.get_device_capability(device)
    return {8: "sm_80", 9: "sm_90"}.get(major, "sm_100")


def num_programs(num_tiles: int, tile: Tile, device: torch.device) -> int:
    """The grid of a kernel whose programs take every so many of `num_tiles` tiles."""
    return min(num_tiles, _num_multiprocessors(device)) if tile.is_persistent else num_tiles


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return _INTERPRETED_PROGRAMS if IS_INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def check_rows(**tensors: torch.Tensor) -> None:
    """Every kernel here assumes that the last dimension is contiguous. Raises ValueError with the tensor's name."""
    for name, tensor in tensors.items():
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ValueError(f"{name} has strides {tensor.stride()}; its last dimension must be contiguous")
