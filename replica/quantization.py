"""Block-scaled FP8 checkpoints (Qwen3-*-FP8): which tensors are float8, and the shapes of their scales. No torch.

A converted `X.weight` is float8_e4m3, and `X.weight_scale_inv` holds one factor per block of 128x128 of it; the block's
value is weight * factor. A matrix whose size is no multiple of 128 ends in partial blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from replica.errors import CheckpointError

FP8_BLOCK: Final = 128  # rows and columns that share one scale
SCALE_SUFFIX: Final = "_scale_inv"
CONVERTIBLE: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Fp8Config:
    """A checkpoint's quantization_config."""

    unconverted: frozenset[str]  # modules_to_not_convert

    @classmethod
    def parse(cls, value: Any) -> Fp8Config:
        """Reads the value of quantization_config. Raises CheckpointError for any kind but block-scaled FP8."""
        if not isinstance(value, Mapping):
            raise CheckpointError(f"quantization_config is {value!r}, must be an object")
        expected = {
            "quant_method": ("fp8",),
            "weight_block_size": ([FP8_BLOCK, FP8_BLOCK],),
            "activation_scheme": ("dynamic", None),
            "fmt": ("e4m3", None),
        }
        for key, allowed in expected.items():
            if value.get(key) not in allowed:
                raise CheckpointError(f"quantization_config.{key} is {value.get(key)!r}, must be {allowed[0]!r}")
        unconverted = value.get("modules_to_not_convert") or []
        if not isinstance(unconverted, list) or any(not isinstance(name, str) for name in unconverted):
            raise CheckpointError("quantization_config.modules_to_not_convert must be a list of module names")
        return cls(frozenset(unconverted))

    def converts(self, module: str) -> bool:
        """Whether the module's weight is float8. A listed name spares the modules it contains or ends."""
        parts = module.split(".")
        if parts[-1] not in CONVERTIBLE:
            return False
        inside = (".".join(parts[:end]) for end in range(1, len(parts) + 1))
        ending = (".".join(parts[start:]) for start in range(1, len(parts)))
        return self.unconverted.isdisjoint(inside) and self.unconverted.isdisjoint(ending)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a converted weight's scales."""
    return tuple(-(-size // FP8_BLOCK) for size in shape)
