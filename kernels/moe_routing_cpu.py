"""The choice of experts on the CPU: by code of our own where it can be had (bf16_cpu.py), else the reference."""

from __future__ import annotations

from torch import Tensor

from kernels import bf16_cpu
from kernels.moe_routing import Scoring, route_reference


def route_cpu(logits: Tensor, top_k: int, renormalize: bool, scoring: Scoring = "softmax") -> tuple[Tensor, Tensor]:
    """See moe_routing.route."""
    if scoring == "softmax" and bf16_cpu.serves(logits):
        return bf16_cpu.route(logits, top_k, renormalize)
    return route_reference(logits, top_k, renormalize, scoring)
