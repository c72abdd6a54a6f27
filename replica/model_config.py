"""A checkpoint's config.json as a checked, frozen ModelConfig. No torch: an engine refuses a checkpoint at once.

Both spellings are read: transformers 4 (`num_experts`, `rope_theta` + `rope_scaling`, `torch_dtype`) and
transformers 5 (`num_local_experts`, `rope_parameters`, `dtype`). Where a key is absent, transformers' default holds.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replica.errors import CheckpointError
from replica.quantization import FP8_BLOCK, SCALE_SUFFIX, Fp8Config, scale_shape

MOE_ARCHITECTURE: Final = "Qwen3MoeForCausalLM"
DENSE_ARCHITECTURE: Final = "Qwen3ForCausalLM"
ARCHITECTURES: Final = (MOE_ARCHITECTURE, DENSE_ARCHITECTURE)
DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
_MAX_NUMBER: Final = 1e15  # no constant of a model comes near it
_QWEN3_HEAD_DIM: Final = 128  # Qwen3Config's default; Qwen3MoeConfig has none and divides hidden_size by the heads


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnConfig:
    """YaRN's stretch of the context (https://arxiv.org/abs/2309.00071), with every default filled in."""

    factor: float
    original_max_len: int  # positions the model was trained on
    beta_fast: float
    beta_slow: float
    truncate: bool  # the ramp's ends are whole dimensions


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: the base, and how it is stretched."""

    theta: float
    yarn: YarnConfig | None = None
    attention_factor: float = 1.0  # multiplies cos and sin


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The architecture of one checkpoint. A dense model has no experts and all its layers in `dense_layers`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int  # width of a dense layer's MLP
    moe_intermediate_size: int  # width of one expert
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool  # the chosen experts' weights are scaled to sum to 1
    dense_layers: frozenset[int]
    rms_norm_eps: float
    rope: RopeConfig
    attention_bias: bool
    tie_word_embeddings: bool
    max_model_len: int  # tokens
    dtype: str  # what the weights are meant to run in: a key of DTYPE_BYTES
    quantization: Fp8Config | None = None

    @classmethod
    def load(cls, folder: Path) -> ModelConfig:
        """Reads `folder`/config.json. Raises CheckpointError, in one line, for whatever cannot be served."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; the model must be a folder in Hugging Face format")
        return cls.from_fields(_Fields(folder / "config.json"))

    @classmethod
    def from_fields(cls, fields: _Fields) -> ModelConfig:
        """Builds the config from the values of one config.json."""
        architecture = _architecture(fields)
        is_moe = architecture == MOE_ARCHITECTURE
        _refuse_unsupported(fields, is_moe)
        num_layers = fields.count("num_hidden_layers")
        num_experts = fields.count("num_local_experts", "num_experts") if is_moe else 0
        dense_layers = _dense_layers(fields, num_layers) if is_moe else frozenset(range(num_layers))
        hidden_size, num_heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        rope = _rope(fields)
        max_model_len = fields.count("max_position_embeddings")
        if rope.yarn is not None:
            # config.json may still name the trained length; the stretched one is what YaRN is there for.
            max_model_len = max(max_model_len, int(rope.yarn.original_max_len * rope.yarn.factor))
        config = cls(
            architecture=architecture,
            vocab_size=fields.count("vocab_size"),
            hidden_size=hidden_size,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=fields.count("num_key_value_heads", default=num_heads),
            head_dim=_head_dim(fields, hidden_size, num_heads, is_moe),
            intermediate_size=fields.count("intermediate_size") if dense_layers else 0,
            moe_intermediate_size=fields.count("moe_intermediate_size") if is_moe else 0,
            num_experts=num_experts,
            num_experts_per_tok=fields.count("num_experts_per_tok") if is_moe else 0,
            norm_topk_prob=is_moe and fields.flag("norm_topk_prob"),
            dense_layers=dense_layers,
            rms_norm_eps=fields.check_number("rms_norm_eps", fields.get("rms_norm_eps"), 1e-6),
            rope=rope,
            attention_bias=fields.flag("attention_bias"),
            tie_word_embeddings=fields.flag("tie_word_embeddings"),
            max_model_len=max_model_len,
            dtype=_dtype(fields),
            quantization=_quantization(fields),
        )
        _check_ratios(config, fields)
        return config

    def is_moe(self, layer: int) -> bool:
        """Whether the layer has experts instead of a dense MLP."""
        return layer not in self.dense_layers

    def kv_bytes_per_token(self, dtype: str) -> int:
        """Bytes of one token's keys and values in all layers, when the model runs in `dtype`."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[dtype]

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that a checkpoint of this model holds, by name."""
        H, V = self.hidden_size, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,)}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (V, H)
        for layer in range(self.num_layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self._layer_shapes(layer).items()}
        scales = {name + SCALE_SUFFIX: scale_shape(shape) for name, shape in shapes.items() if self.is_fp8(name)}
        return shapes | scales

    def is_fp8(self, name: str) -> bool:
        """Whether the checkpoint holds the named tensor as float8, with its scales beside it."""
        if self.quantization is None or not name.endswith(".weight"):
            return False
        return self.quantization.converts(name.removesuffix(".weight"))

    def _layer_shapes(self, layer: int) -> dict[str, tuple[int, ...]]:
        H, D = self.hidden_size, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (H,),
            "post_attention_layernorm.weight": (H,),
            "self_attn.q_norm.weight": (D,),
            "self_attn.k_norm.weight": (D,),
            "self_attn.q_proj.weight": (self.num_heads * D, H),
            "self_attn.k_proj.weight": (self.num_kv_heads * D, H),
            "self_attn.v_proj.weight": (self.num_kv_heads * D, H),
            "self_attn.o_proj.weight": (H, self.num_heads * D),
        }
        if self.attention_bias:
            for part in "qkvo":
                shapes[f"self_attn.{part}_proj.bias"] = shapes[f"self_attn.{part}_proj.weight"][:1]
        if not self.is_moe(layer):
            return shapes | _mlp_shapes("mlp", H, self.intermediate_size)
        shapes["mlp.gate.weight"] = (self.num_experts, H)
        for expert in range(self.num_experts):
            shapes |= _mlp_shapes(f"mlp.experts.{expert}", H, self.moe_intermediate_size)
        return shapes


def _mlp_shapes(prefix: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (width, hidden),
        f"{prefix}.up_proj.weight": (width, hidden),
        f"{prefix}.down_proj.weight": (hidden, width),
    }


class _Fields:
    """One config.json, read key by key; each error names the file, the key and the value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            values = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent} has no config.json; is it a Hugging Face checkpoint?") from None
        except (OSError, ValueError, RecursionError) as err:
            raise CheckpointError(f"cannot read {path}: {err}") from err
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} holds {type(values).__name__}, not an object")
        self.values: dict[str, Any] = values

    def get(self, *names: str) -> Any:
        """The first of the names whose value is not null, or None."""
        return next((self.values[name] for name in names if self.values.get(name) is not None), None)

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number from 1 to 2^31 - 1."""
        value = self.get(*names)
        if value is None and default is not None:
            return default
        return self.check_count(names[-1], value)

    def check_count(self, name: str, value: Any) -> int:
        """The value, which must be a whole number from 1 to 2^31 - 1."""
        if type(value) is not int or not 1 <= value < 2**31:
            raise self.bad(name, value, "a whole number of at least 1")
        return value

    def check_number(self, name: str, value: Any, default: float) -> float:
        """The value, or the default where it is None; it must be above 0 and finite."""
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_NUMBER:
            raise self.bad(name, value, "a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """True or false; false when absent."""
        value = self.get(name)
        if value not in (None, True, False):
            raise self.bad(name, value, "true or false")
        return bool(value)

    def bad(self, name: str, value: Any, expected: str) -> CheckpointError:
        """The error for a value that cannot be served."""
        said = "is missing" if value is None else f"is {value!r}"
        return CheckpointError(f"{self.path}: {name} {said}, must be {expected}")


def _architecture(fields: _Fields) -> str:
    named = fields.get("architectures") or ["none"]
    if isinstance(named, list) and named[0] in ARCHITECTURES:
        return str(named[0])
    raise CheckpointError(
        f"{fields.path}: architecture {named!r} is not supported; supported: {', '.join(ARCHITECTURES)}"
    )


def _refuse_unsupported(fields: _Fields, is_moe: bool) -> None:
    if _has_sliding_window(fields, is_moe):
        raise CheckpointError(f"{fields.path}: sliding window attention is not supported (use_sliding_window)")
    activation = fields.get("hidden_act")
    if activation not in (None, "silu"):
        raise fields.bad("hidden_act", activation, "silu")


def _has_sliding_window(fields: _Fields, is_moe: bool) -> bool:
    if not fields.flag("use_sliding_window") or fields.get("sliding_window") is None:
        return False
    if is_moe:
        return True
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list):
        return "sliding_attention" in layer_types
    return fields.count("max_window_layers", default=28) < fields.count("num_hidden_layers")


def _dense_layers(fields: _Fields, num_layers: int) -> frozenset[int]:
    sparse_step = fields.count("decoder_sparse_step", default=1)
    mlp_only = fields.get("mlp_only_layers") or []
    if not isinstance(mlp_only, list) or any(type(layer) is not int for layer in mlp_only):
        raise fields.bad("mlp_only_layers", mlp_only, "a list of layer numbers")
    return frozenset(layer for layer in range(num_layers) if layer in mlp_only or (layer + 1) % sparse_step)


def _head_dim(fields: _Fields, hidden_size: int, num_heads: int, is_moe: bool) -> int:
    if not is_moe and "head_dim" not in fields.values:
        return _QWEN3_HEAD_DIM
    return fields.count("head_dim", default=max(1, hidden_size // num_heads))


def _quantization(fields: _Fields) -> Fp8Config | None:
    value = fields.get("quantization_config")
    try:
        return None if value is None else Fp8Config.parse(value)
    except CheckpointError as err:
        raise CheckpointError(f"{fields.path}: {err}") from None


def _dtype(fields: _Fields) -> str:
    dtype = fields.get("dtype", "torch_dtype")
    if dtype is None:
        return "float32"  # holds the weights of all three exactly
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise fields.bad("dtype", dtype, f"one of {', '.join(DTYPE_BYTES)}")
    return dtype


def _rope(fields: _Fields) -> RopeConfig:
    scaling = fields.get("rope_scaling", "rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise fields.bad("rope_parameters", scaling, "an object")
    if any(isinstance(value, dict) for value in scaling.values()):
        raise CheckpointError(f"{fields.path}: rope_parameters by layer type are not supported")
    theta = fields.check_number("rope_theta", scaling.get("rope_theta", fields.get("rope_theta")), 10_000.0)
    if scaling.get("partial_rotary_factor", fields.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise CheckpointError(f"{fields.path}: partial_rotary_factor is not supported")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "yarn":
        return _yarn(fields, scaling, theta)
    raise CheckpointError(f"{fields.path}: rope type {kind!r} is not supported; supported: default, yarn")


def _yarn(fields: _Fields, scaling: dict[str, Any], theta: float) -> RopeConfig:
    max_len = fields.count("max_position_embeddings")
    original = fields.get("original_max_position_embeddings") or scaling.get(
        "original_max_position_embeddings", max_len
    )
    original = fields.check_count("original_max_position_embeddings", original)
    factor = fields.check_number("rope factor", scaling.get("factor"), max_len / original)
    yarn = YarnConfig(
        factor=factor,
        original_max_len=original,
        beta_fast=fields.check_number("beta_fast", scaling.get("beta_fast") or None, 32.0),
        beta_slow=fields.check_number("beta_slow", scaling.get("beta_slow") or None, 1.0),
        truncate=bool(scaling.get("truncate", True)),
    )
    inferred = _mscale(factor, 1.0)
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above, below = (fields.check_number(name, scaling[name], 1.0) for name in ("mscale", "mscale_all_dim"))
        inferred = _mscale(factor, above) / _mscale(factor, below)
    attention_factor = fields.check_number("attention_factor", scaling.get("attention_factor"), inferred)
    return RopeConfig(theta=theta, yarn=yarn, attention_factor=attention_factor)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _check_ratios(config: ModelConfig, fields: _Fields) -> None:
    if config.num_heads % config.num_kv_heads:
        expected = f"a divisor of num_attention_heads ({config.num_heads})"
        raise fields.bad("num_key_value_heads", config.num_kv_heads, expected)
    if config.head_dim % 2:
        raise fields.bad("head_dim", config.head_dim, "even")
    if config.num_experts_per_tok > config.num_experts:
        expected = f"at most num_experts ({config.num_experts})"
        raise fields.bad("num_experts_per_tok", config.num_experts_per_tok, expected)
    if config.quantization is not None and config.num_experts:
        # Experts lie in one ragged array, whose scales are found by place / 128 (kernels/moe_experts.py).
        for name in ("hidden_size", "moe_intermediate_size"):
            if getattr(config, name) % FP8_BLOCK:
                raise fields.bad(name, getattr(config, name), f"a multiple of {FP8_BLOCK} in an FP8 mixture of experts")
