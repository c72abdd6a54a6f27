"""Model configurations without weights, for tests of layouts, shards and plans."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from replica.model_config import MOE_ARCHITECTURE, ModelConfig, RopeConfig
from replica.quantization import Fp8Config

PLANS: Final = Path(__file__).parent / "data" / "plans"  # config.json facts of public models
FP8: Final = Fp8Config(unconverted=frozenset({"lm_head"}))


def model_config(**changes: Any) -> ModelConfig:
    """A small MoE model: layer 0 is dense, widths end in a partial block, and little divides anything."""
    values: dict[str, Any] = {
        "architecture": MOE_ARCHITECTURE,
        "vocab_size": 101,
        "hidden_size": 192,
        "num_layers": 4,
        "num_heads": 24,
        "num_kv_heads": 4,
        "head_dim": 16,
        "intermediate_size": 400,
        "moe_intermediate_size": 300,
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "dense_layers": frozenset({0}),
        "rms_norm_eps": 1e-6,
        "rope": RopeConfig(theta=10_000.0),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "max_model_len": 256,
        "dtype": "bfloat16",
    }
    return ModelConfig(**(values | changes))


def dense_model_config(**changes: Any) -> ModelConfig:
    """The same without experts."""
    dense = {
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "moe_intermediate_size": 0,
        "dense_layers": frozenset(range(4)),
    }
    return model_config(**(dense | changes))
