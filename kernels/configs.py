"""Tile sizes by kernel, GPU architecture and shape bucket: plain data.

None of these has been measured: they are chosen from the shared memory and registers that `python -m kernels.aot`
reports. `python -m kernels.tune` measures on a GPU and writes rows of its own shapes into TUNED.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Final

ARCHS: Final = ("sm_80", "sm_90", "sm_100", "gfx942")
FP8_ARCHS: Final = ("sm_90", "sm_100", "gfx942")  # sm_80 has no float8_e4m3fn
SHARED_LIMIT_BYTES: Final = {"sm_80": 166_912, "sm_90": 232_448, "sm_100": 232_448, "gfx942": 65_536}  # of one program
ANY: Final = 1 << 62  # the last bucket of each list


@dataclass(frozen=True, slots=True)
class Tile:
    """How one kernel cuts its problem. A kernel that has no M, N or K leaves it at 0."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    is_swapped: bool = False  # the weights are the dot's M operand, so that few tokens still fill a wgmma
    is_persistent: bool = False  # one program a multiprocessor, each with many tiles

    def constants(self) -> dict[str, int | bool]:
        """What a kernel of a matrix product takes of it."""
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "BLOCK_K": self.block_k,
            "SWAP": self.is_swapped,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


Rows = tuple[tuple[int, Tile], ...]  # (largest number of tokens, tile), ascending
Entry = tuple[str, str, tuple[int, ...]]  # kernel, arch, and the shape under which its launcher looks

# Decode attention: block_n tokens of the cache at once. Prefill: block_m queries times heads, block_n tokens.
_ATTENTION_DECODE: Final[Rows] = ((ANY, Tile(16, 64, 0, 4, 3)),)
_ATTENTION_PREFILL: Final[Rows] = ((ANY, Tile(128, 64, 0, 8, 3)),)

# Grouped products. With 128 experts and 8 a token, 256 tokens are 16 rows an expert. Both products of a layer share
# the tile list, so a bucket's block_m must be equal in the two.
_GATE_UP: Final[Rows] = (
    (256, Tile(16, 64, 128, 4, 3)),
    (2048, Tile(64, 128, 64, 8, 3)),
    (ANY, Tile(128, 128, 64, 8, 3, is_persistent=True)),
)
_DOWN: Final[Rows] = (
    (256, Tile(16, 128, 64, 4, 4)),
    (2048, Tile(64, 128, 64, 4, 3)),
    (ANY, Tile(128, 128, 64, 8, 3, is_persistent=True)),
)
# sm_80 keeps accumulators in few registers: two of 128 x 128 would spill.
_SM80_GATE_UP: Final[Rows] = (*_GATE_UP[:2], (ANY, Tile(128, 64, 64, 8, 3, is_persistent=True)))
_SM90_GATE_UP: Final[Rows] = ((256, Tile(16, 64, 128, 4, 4, is_swapped=True)), *_GATE_UP[1:])
_SM90_DOWN: Final[Rows] = ((256, Tile(16, 128, 64, 4, 4, is_swapped=True)), *_DOWN[1:])
_AMD_GATE_UP: Final[Rows] = (
    (256, Tile(16, 64, 64, 4, 2)),
    (2048, Tile(64, 64, 64, 4, 2)),
    (ANY, Tile(128, 64, 64, 8, 2, is_persistent=True)),
)
_AMD_DOWN: Final[Rows] = (
    (256, Tile(16, 64, 64, 4, 2)),
    (2048, Tile(64, 64, 64, 4, 2)),
    (ANY, Tile(128, 128, 64, 8, 2, is_persistent=True)),
)

# FP8: a scale belongs to 128 rows and columns, so block_k is 128; the gate-up epilogue quantises groups of 128 columns,
# so its block_n is 128 as well, and with two accumulators block_m is at most 64.
_FP8_LARGE: Final = (ANY, Tile(64, 128, 128, 8, 3, is_persistent=True))
_FP8_GATE_UP: Final[Rows] = ((256, Tile(16, 128, 128, 8, 3)), _FP8_LARGE)
_FP8_DOWN: Final[Rows] = ((256, Tile(16, 128, 128, 4, 3)), (ANY, Tile(64, 128, 128, 4, 3, is_persistent=True)))
_SM90_FP8_GATE_UP: Final[Rows] = ((256, Tile(16, 128, 128, 4, 3, is_swapped=True)), _FP8_LARGE)
_SM90_FP8_DOWN: Final[Rows] = ((256, Tile(16, 128, 128, 4, 4, is_swapped=True)), _FP8_LARGE)
_AMD_FP8_GATE_UP: Final[Rows] = (
    (256, Tile(16, 128, 128, 4, 1)),
    (ANY, Tile(64, 128, 128, 4, 1, is_persistent=True)),
)
_AMD_FP8_DOWN: Final[Rows] = (
    (256, Tile(16, 128, 128, 4, 2)),
    (ANY, Tile(64, 128, 128, 8, 2, is_persistent=True)),
)

DEFAULTS: Final[dict[str, dict[str, Rows]]] = {
    "attention_decode": {
        "sm_80": _ATTENTION_DECODE,
        "sm_90": _ATTENTION_DECODE,
        "sm_100": _ATTENTION_DECODE,
        "gfx942": ((ANY, Tile(16, 64, 0, 4, 1)),),
    },
    "attention_prefill": {
        "sm_80": _ATTENTION_PREFILL,
        "sm_90": _ATTENTION_PREFILL,
        "sm_100": _ATTENTION_PREFILL,
        "gfx942": ((ANY, Tile(128, 64, 0, 4, 1)),),
    },
    "moe_gate_up": {"sm_80": _SM80_GATE_UP, "sm_90": _SM90_GATE_UP, "sm_100": _GATE_UP, "gfx942": _AMD_GATE_UP},
    "moe_down": {"sm_80": _DOWN, "sm_90": _SM90_DOWN, "sm_100": _DOWN, "gfx942": _AMD_DOWN},
    "moe_gate_up_fp8": {"sm_90": _SM90_FP8_GATE_UP, "sm_100": _FP8_GATE_UP, "gfx942": _AMD_FP8_GATE_UP},
    "moe_down_fp8": {"sm_90": _SM90_FP8_DOWN, "sm_100": _FP8_DOWN, "gfx942": _AMD_FP8_DOWN},
    "linear_fp8": {"sm_90": _SM90_FP8_DOWN, "sm_100": _FP8_DOWN, "gfx942": _AMD_FP8_DOWN},
}

# What a GPU has measured; more tokens than the last row has use DEFAULTS. `tune.py` writes between the two marks.
# tuned: begin
TUNED: Final[dict[Entry, Rows]] = {}
# tuned: end


@functools.cache
def pick(kernel: str, arch: str, shape: tuple[int, ...], bucket: int) -> Tile:
    """The tile for `bucket` tokens (a power of two: see `bucket_of`) of a problem of this shape.

    Raises ValueError where this kernel cannot run on `arch`.
    """
    if arch not in DEFAULTS[kernel]:
        raise ValueError(f"{kernel} does not run on {arch}: FP8 needs one of {', '.join(FP8_ARCHS)}")
    rows = (*TUNED.get((kernel, arch, shape), ()), *DEFAULTS[kernel][arch])
    return next(tile for most, tile in rows if bucket <= most)


def bucket_of(tokens: int) -> int:
    """The number of tokens rounded up to a power of two, so that the tables stay small."""
    return 1 << max(0, tokens - 1).bit_length()
