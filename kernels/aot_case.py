"""One kernel with one choice of types and constants, as `python -m kernels.aot` compiles it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class AotCase:
    """`signature` holds the arguments passed at run time ("*bf16", "i32", ...), `constants` the rest.

    `max_registers` says how many warps an SM, with its 65536 registers, must be able to hold so that others compute
    while one waits for memory: 64 is 32 warps, 128 is 16, 168 is 12. A product of tiles on tensor cores keeps its
    operands in flight by itself; there 255, beyond which a thread spills, is the limit.
    """

    kernel: Any  # a triton.JITFunction
    name: str  # the shape bucket, e.g. "decode"
    signature: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 2
    targets: tuple[str, ...] = ()  # () means all
    max_registers: int = 255  # per thread; on gfx942, whose SIMDs have twice as many, twice that
    max_spill_bytes: int = 0  # per thread; 0 for every kernel on the step path
    ptx: str = ""  # an instruction that sm_90's PTX must contain
    unaligned: frozenset[str] = field(default_factory=frozenset)  # pointers and integers that need not divide by 16
