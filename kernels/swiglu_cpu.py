"""SwiGLU on the CPU: by code of our own where it can be had (bf16_cpu.py), else the reference."""

from __future__ import annotations

from torch import Tensor

from kernels import bf16_cpu
from kernels.swiglu import swiglu_reference


def swiglu_cpu(x: Tensor) -> Tensor:
    """See swiglu.swiglu."""
    return bf16_cpu.swiglu(x) if bf16_cpu.serves(x) else swiglu_reference(x)
