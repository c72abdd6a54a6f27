"""Every tensor of a model as it lies in memory: name, shape, bytes, and the kind of layer it belongs to. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from replica.errors import CheckpointError
from replica.model_config import DTYPE_BYTES, ModelConfig
from replica.quantization import FP8_BLOCK, SCALE_SUFFIX

KINDS: Final = ("attention", "mlp", "experts", "vocabulary", "replicated")
SCALE_BYTES: Final = 4  # float32 in memory, whatever the file holds
BLOCK_WIDTH: Final = 64  # of an MLP's width in bf16, fp16 and fp32: 128 bytes of bf16, a memory line and a K tile


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. `layer` and `expert` are -1 where it belongs to none."""

    shape: tuple[int, ...]
    item_bytes: int
    kind: str  # of KINDS
    layer: int = -1
    expert: int = -1

    @property
    def num_bytes(self) -> int:
        """Size of the whole tensor in memory."""
        return math.prod(self.shape) * self.item_bytes


def tensor_specs(config: ModelConfig, dtype: str) -> dict[str, TensorSpec]:
    """All tensors of the model by their names in the checkpoint, FP8 scales beside their weights.

    `dtype` is what the tensors that are not FP8 have in memory.
    """
    specs: dict[str, TensorSpec] = {}
    for name, shape in config.tensor_shapes().items():
        kind, layer, expert = _place(name)
        item_bytes = SCALE_BYTES if name.endswith(SCALE_SUFFIX) else 1 if config.is_fp8(name) else DTYPE_BYTES[dtype]
        specs[name] = TensorSpec(shape, item_bytes, kind, layer, expert)
    return specs


@lru_cache(maxsize=1024)
def mlp_block_width(config: ModelConfig, layer: int) -> int:
    """Columns of gate and up (rows of down) that stay together when the layer's MLP or experts are cut.

    Raises CheckpointError if only a part of the layer is FP8: its matrices are one array, of one type.
    """
    prefix = f"model.layers.{layer}.mlp."
    experts = [f"experts.{expert}." for expert in range(config.num_experts)] if config.is_moe(layer) else [""]
    parts = ("gate_proj", "up_proj", "down_proj")
    kinds = {config.is_fp8(f"{prefix}{expert}{part}.weight") for expert in experts for part in parts}
    if len(kinds) > 1:
        raise CheckpointError(f"modules_to_not_convert names a part of {prefix[:-1]}: all or none of it must be FP8")
    return FP8_BLOCK if kinds == {True} else BLOCK_WIDTH


@dataclass(frozen=True, slots=True)
class BlockSize:
    """The blocks into which a dense MLP's width, or that of each expert of a layer, is cut: some rows of gate and of
    up, and as many columns of down."""

    width: int  # columns of a block
    num_blocks: int
    partial_columns: int  # of the last block, if it is a partial one; else 0
    column_bytes: int  # of all three matrices
    scale_bytes: int  # of one block, whole or partial

    def columns(self, block: int) -> tuple[int, int]:
        """The first column of a block, and one past its last."""
        start = block * self.width
        is_partial = self.partial_columns and block == self.num_blocks - 1
        return start, start + (self.partial_columns if is_partial else self.width)

    def num_bytes(self, block: int) -> int:
        """What a block takes in memory."""
        start, stop = self.columns(block)
        return (stop - start) * self.column_bytes + self.scale_bytes


def block_size(config: ModelConfig, layer: int, dtype: str) -> BlockSize:
    """That of a layer. `dtype` is what weights that are not FP8 have in memory."""
    width = config.moe_intermediate_size if config.is_moe(layer) else config.intermediate_size
    block_width = mlp_block_width(config, layer)
    is_fp8 = block_width == FP8_BLOCK
    return BlockSize(
        width=block_width,
        num_blocks=-(-width // block_width),
        partial_columns=width % block_width,
        column_bytes=3 * config.hidden_size * (1 if is_fp8 else DTYPE_BYTES[dtype]),
        scale_bytes=3 * -(-config.hidden_size // FP8_BLOCK) * SCALE_BYTES if is_fp8 else 0,
    )


def _place(name: str) -> tuple[str, int, int]:
    """(kind, layer, expert) of a tensor's name."""
    parts = name.split(".")
    if parts[1] != "layers":
        return ("replicated" if parts[1] == "norm" else "vocabulary"), -1, -1
    layer = int(parts[2])
    if parts[3] == "self_attn":
        return "attention", layer, -1
    if parts[3] != "mlp" or parts[4] == "gate":  # the norms and the router
        return "replicated", layer, -1
    return ("experts", layer, int(parts[5])) if parts[4] == "experts" else ("mlp", layer, -1)
