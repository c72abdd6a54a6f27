"""config.json in all its spellings, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replica.errors import CheckpointError
from replica.model_config import ModelConfig, RopeConfig, YarnConfig

MOE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
DENSE: Final[dict[str, Any]] = {
    "architectures": ["Qwen3ForCausalLM"],
    **{key: MOE[key] for key in MOE if "expert" not in key and key not in ("architectures", "moe_intermediate_size")},
}
YARN: Final[dict[str, Any]] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
FP8: Final[dict[str, Any]] = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def load(folder: Path, values: dict[str, Any], **changes: Any) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(values | changes))
    return ModelConfig.load(folder)


def test_both_spellings_of_transformers_give_the_same_config(tmp_path: Path) -> None:
    old = load(tmp_path, MOE, rope_theta=1e6, rope_scaling=None)
    new = {key: value for key, value in MOE.items() if key not in ("num_experts", "torch_dtype")}
    new |= {"num_local_experts": 8, "dtype": "bfloat16"}
    assert load(tmp_path, new, rope_parameters={"rope_type": "default", "rope_theta": 1e6}) == old
    assert (old.num_experts, old.dtype, old.rope) == (8, "bfloat16", RopeConfig(theta=1e6))


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_scaling": YARN},
        {"rope_theta": 1e6, "rope_scaling": {**{k: v for k, v in YARN.items() if k != "rope_type"}, "type": "yarn"}},
        {"rope_parameters": {**YARN, "rope_theta": 1e6}},
    ],
)
def test_yarn_is_read_in_every_spelling_with_its_defaults(tmp_path: Path, spelling: dict[str, Any]) -> None:
    config = load(tmp_path, MOE, **spelling)
    yarn = YarnConfig(factor=4.0, original_max_len=4096, beta_fast=32.0, beta_slow=1.0, truncate=True)
    assert config.rope == RopeConfig(theta=1e6, yarn=yarn, attention_factor=0.1 * math.log(4) + 1)


def test_yarn_stretches_the_context_beyond_the_trained_length(tmp_path: Path) -> None:
    assert load(tmp_path, MOE, rope_scaling=YARN).max_model_len == 4 * 4096
    assert load(tmp_path, MOE, rope_scaling=YARN, max_position_embeddings=16384).max_model_len == 16384


def test_yarn_mscale_pair_and_explicit_attention_factor_are_used(tmp_path: Path) -> None:
    mscale = load(tmp_path, MOE, rope_scaling=YARN | {"mscale": 0.8, "mscale_all_dim": 0.4})
    assert mscale.rope.attention_factor == (0.08 * math.log(4) + 1) / (0.04 * math.log(4) + 1)
    explicit = load(tmp_path, MOE, rope_scaling=YARN | {"attention_factor": 1.25, "mscale": 0.8, "mscale_all_dim": 0.4})
    assert explicit.rope.attention_factor == 1.25


def test_sparse_step_and_mlp_only_layers_say_which_layers_are_dense(tmp_path: Path) -> None:
    assert load(tmp_path, MOE).dense_layers == frozenset()
    assert load(tmp_path, MOE, mlp_only_layers=[0, 3]).dense_layers == {0, 3}
    every_second = load(tmp_path, MOE, decoder_sparse_step=2)
    assert every_second.dense_layers == {0, 2}
    assert [every_second.is_moe(layer) for layer in range(4)] == [False, True, False, True]


def test_a_dense_model_has_no_experts_and_qwen3s_head_size(tmp_path: Path) -> None:
    config = load(tmp_path, DENSE)
    assert config.dense_layers == {0, 1, 2, 3} and config.num_experts == 0
    assert config.head_dim == 128
    assert load(tmp_path, MOE).head_dim == 64 // 4


def test_a_dense_models_window_is_refused_only_where_a_layer_uses_it(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 1024}
    assert load(tmp_path, DENSE, **window, max_window_layers=4).num_layers == 4
    with pytest.raises(CheckpointError, match="sliding window"):
        load(tmp_path, DENSE, **window, max_window_layers=3)
    with pytest.raises(CheckpointError, match="sliding window"):
        load(tmp_path, DENSE, **window, layer_types=["sliding_attention"] * 4)


def test_a_checkpoint_without_dtype_runs_in_float32(tmp_path: Path) -> None:
    assert load(tmp_path, MOE, torch_dtype=None).dtype == "float32"


def test_kv_bytes_count_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    config = load(tmp_path, MOE)
    assert config.kv_bytes_per_token("bfloat16") == 2 * 4 * 2 * 16 * 2
    assert config.kv_bytes_per_token("float32") == 2 * config.kv_bytes_per_token("bfloat16")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*supported: Qwen3MoeForCausalLM, Qwen3ForCausalLM"),
        ({"architectures": None}, "supported: Qwen3MoeForCausalLM"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -3}, "vocab_size is -3, must be a whole number of at least 1"),
        ({"num_hidden_layers": "four"}, "num_hidden_layers is 'four'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, must be a divisor of num_attention_heads"),
        ({"num_experts_per_tok": 9}, r"num_experts_per_tok is 9, must be at most num_experts \(8\)"),
        ({"head_dim": 15}, "head_dim is 15, must be even"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', must be silu"),
        ({"torch_dtype": "float64"}, "dtype is 'float64', must be one of bfloat16, float16, float32"),
        ({"quantization_config": FP8, "hidden_size": 192}, "hidden_size is 192, must be a multiple of 128 in an FP8"),
        (
            {"quantization_config": FP8, "hidden_size": 128, "moe_intermediate_size": 64},
            "moe_intermediate_size is 64, must be a multiple",
        ),
        ({"quantization_config": {"quant_method": "awq"}}, "quant_method is 'awq'"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding window attention is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope type 'llama3'.*supported: default, yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "by layer type"),
        ({"rope_scaling": YARN | {"factor": 0}}, "factor is 0, must be a number above 0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"mlp_only_layers": ["0"]}, "mlp_only_layers"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', must be true or false"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        load(tmp_path, MOE, **changes)
    assert "\n" not in str(caught.value) and str(tmp_path) in str(caught.value)


def test_a_missing_or_unreadable_config_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a folder"):
        ModelConfig.load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ModelConfig.load(tmp_path)
    for content in (b'{"vocab_size": ', b"\xff\xfe", b"[1, 2]"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            ModelConfig.load(tmp_path)


JSON_VALUES: Final = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
ALL_KEYS: Final = (
    *MOE,
    *("rope_scaling", "rope_parameters", "rope_theta", "head_dim", "dtype", "num_local_experts", "mlp_only_layers"),
    *("decoder_sparse_step", "norm_topk_prob", "rms_norm_eps", "hidden_act", "quantization_config", "layer_types"),
    *("use_sliding_window", "sliding_window", "partial_rotary_factor", "original_max_position_embeddings"),
)
YARN_KEYS: Final = (*YARN, "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "rope_theta")


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    base=st.sampled_from([MOE, DENSE]),
    changes=st.dictionaries(st.sampled_from(ALL_KEYS), JSON_VALUES, max_size=3),
    yarn=st.none() | st.dictionaries(st.sampled_from(YARN_KEYS), JSON_VALUES, max_size=2),
)
def test_no_value_of_any_key_raises_anything_but_checkpoint_error(
    tmp_path: Path, base: dict[str, Any], changes: dict[str, Any], yarn: dict[str, Any] | None
) -> None:
    if yarn is not None:
        changes = {"rope_scaling": YARN | yarn, **changes}
    try:
        config = load(tmp_path, base, **changes)
    except CheckpointError:
        return
    assert config.num_heads % config.num_kv_heads == 0 and config.max_model_len >= 1
