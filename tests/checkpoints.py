"""Small random checkpoints, written by transformers itself: one for each spelling and option that we read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from kernels.fp8 import quantize_blocks
from replica.checkpoint import SINGLE_FILE
from replica.quantization import FP8_BLOCK, SCALE_SUFFIX, Fp8Config

SMALL: Final[dict[str, Any]] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,  # large enough that the next token is seldom a near tie
    "tie_word_embeddings": False,
}
SMALL_MOE: Final[dict[str, Any]] = {
    **SMALL,
    "moe_intermediate_size": 40,
    "num_experts": 7,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
YARN: Final[dict[str, Any]] = {"factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Variant:
    """One kind of checkpoint: its config, how its weights are stored, and how its config.json is spelled."""

    config: dict[str, Any] = field(default_factory=dict)
    is_dense: bool = False
    dtype: torch.dtype = torch.float32
    max_shard_size: str = "1GB"
    respell: Callable[[dict[str, Any]], None] = lambda values: None


def spell_as_transformers_4(values: dict[str, Any]) -> None:
    """Rewrites a config.json of transformers 5 as transformers 4 wrote it."""
    if "num_local_experts" in values:
        values["num_experts"] = values.pop("num_local_experts")
    values["torch_dtype"] = values.pop("dtype")
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if rope == {"rope_type": "default"} else rope


def spell_rope_type_as_type(values: dict[str, Any]) -> None:
    """The older of the two spellings that transformers 4 had."""
    spell_as_transformers_4(values)
    values["rope_scaling"]["type"] = values["rope_scaling"].pop("rope_type")


def _yarn(**more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, **YARN, **more}}


VARIANTS: Final[dict[str, Variant]] = {
    "transformers_5": Variant(),
    "transformers_4": Variant(respell=spell_as_transformers_4),
    "tied": Variant({"tie_word_embeddings": True}),
    "norm_topk_prob_off": Variant({"norm_topk_prob": False}),
    "decoder_sparse_step": Variant({"decoder_sparse_step": 2}),
    "mlp_only_layers": Variant({"mlp_only_layers": [1]}),
    "attention_bias": Variant({"attention_bias": True}),
    "yarn_5": Variant(_yarn()),
    "yarn_4": Variant(_yarn(), respell=spell_rope_type_as_type),
    "yarn_mscale": Variant(_yarn(mscale=0.8, mscale_all_dim=0.4, beta_fast=16, beta_slow=2)),
    "yarn_not_truncated": Variant(_yarn(truncate=False, attention_factor=1.3), respell=spell_as_transformers_4),
    "sharded": Variant(max_shard_size="60KB"),
    "bfloat16": Variant(dtype=torch.bfloat16),
    "float16": Variant(dtype=torch.float16, respell=spell_as_transformers_4),
    "dense": Variant(is_dense=True),
    "dense_tied_bias_yarn": Variant({"tie_word_embeddings": True, "attention_bias": True, **_yarn()}, is_dense=True),
}


def write_checkpoint(folder: Path, variant: Variant, *, seed: int = 0) -> Path:
    """Writes the checkpoint to `folder` and returns that. Norms and biases are random too: none can be forgotten."""
    torch.manual_seed(seed)
    model: Any
    if variant.is_dense:
        model = Qwen3ForCausalLM(Qwen3Config(**{**SMALL, **variant.config}))
    else:
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SMALL_MOE, **variant.config}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith(".bias"):
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.to(variant.dtype).save_pretrained(folder, max_shard_size=variant.max_shard_size)
    path = folder / "config.json"
    values = json.loads(path.read_text())
    variant.respell(values)
    path.write_text(json.dumps(values))
    return folder


def write_fp8_checkpoint(folder: Path, source: Path, unconverted: tuple[str, ...] = ()) -> Path:
    """Quantises the checkpoint in `source`, which is one file, as Qwen3-*-FP8 is; returns `folder`."""
    folder.mkdir(exist_ok=True)
    quantization = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
        "modules_to_not_convert": ["lm_head", *unconverted],
    }
    fp8 = Fp8Config.parse(quantization)
    tensors = {}
    for name, tensor in load_file(source / SINGLE_FILE).items():
        if name.endswith(".weight") and fp8.converts(name.removesuffix(".weight")):
            tensors[name], tensors[name + SCALE_SUFFIX] = quantize_blocks(tensor)
        else:
            tensors[name] = tensor
    save_file(tensors, folder / SINGLE_FILE)
    values = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "quantization_config": quantization}))
    return folder
