"""Shards: every tensor is covered exactly once, and every rank holds as much as any other."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import pytest

from replica.errors import CheckpointError
from replica.layout import Layout, own_group, valid_layouts
from replica.model_config import ModelConfig
from replica.quantization import FP8_BLOCK, SCALE_SUFFIX, Fp8Config, scale_shape
from replica.shards import Shards, blocks_before, deal_blocks, deal_width, dealt_totals, weight_bytes
from replica.tensor_specs import BLOCK_WIDTH, TensorSpec, mlp_block_width, tensor_specs
from tests.shapes import FP8, dense_model_config, model_config

CONFIGS = {
    "bf16": model_config(),
    "fp8": model_config(quantization=FP8),
    "fp8 with whole heads in blocks": model_config(head_dim=128, quantization=FP8),
    "dense": dense_model_config(attention_bias=True),
    "tied, three blocks, experts only": model_config(
        tie_word_embeddings=True, moe_intermediate_size=3 * BLOCK_WIDTH, dense_layers=frozenset()
    ),
}


def test_extra_blocks_go_round_as_the_design_says() -> None:
    for num_experts, num_blocks, num_ranks in ((160, 24, 16), (128, 12, 8), (5, 3, 8), (7, 5, 3)):
        base, extra = divmod(num_blocks, num_ranks)
        for layer, expert in itertools.product(range(3), range(num_experts)):
            ordinal = layer * num_experts + expert
            first = ((layer * num_experts + expert) * extra) % num_ranks
            lucky = {(first + i) % num_ranks for i in range(extra)}
            sizes = [stop - start for start, stop in deal_blocks(num_blocks, num_ranks, ordinal)]
            assert sizes == [base + (rank in lucky) for rank in range(num_ranks)]


def test_totals_differ_by_at_most_one_block_for_any_number_of_experts() -> None:
    for num_blocks, num_ranks in itertools.product(range(1, 25), range(1, 17)):
        totals = [0] * num_ranks
        for ordinal in range(2 * 160):  # two layers of up to 160 experts: every prefix is a smaller model
            for rank, (start, stop) in enumerate(deal_blocks(num_blocks, num_ranks, ordinal)):
                totals[rank] += stop - start
            assert max(totals) - min(totals) <= 1
            assert totals == blocks_before(num_blocks, num_ranks, ordinal + 1)


def test_the_formula_by_layer_and_expert_balances_every_model_up_to_160_experts() -> None:
    num_layers = 3
    for num_experts, num_blocks, num_ranks in itertools.product(range(1, 161), range(1, 25), range(1, 17)):
        base, extra = divmod(num_blocks, num_ranks)
        starts = Counter(
            (layer * num_experts + expert) * extra % num_ranks
            for layer in range(num_layers)
            for expert in range(num_experts)
        )
        got = [
            sum(count for start, count in starts.items() if (rank - start) % num_ranks < extra)
            for rank in range(num_ranks)
        ]
        assert max(got) - min(got) <= 1
        assert [base * num_layers * num_experts + more for more in got] == blocks_before(
            num_blocks, num_ranks, num_layers * num_experts
        )


def test_a_width_is_dealt_out_whole_and_a_partial_block_is_shared_fairly() -> None:
    for width, num_ranks in itertools.product([1, 63, 64, 65, 200, 256, 300, 460, 640], range(1, 9)):
        totals = [0] * num_ranks
        for ordinal in range(60):
            dealt = deal_width(width, 64, num_ranks, ordinal)
            columns = [column for start, stop in sorted(dealt) for column in range(start, stop)]
            assert columns == list(range(width))
            assert all(start % 64 == 0 and (stop % 64 == 0 or stop == width) for start, stop in dealt)
            totals = [total + stop - start for total, (start, stop) in zip(totals, dealt, strict=True)]
            assert max(totals) - min(totals) <= 3 * 64  # a block more or less, and the partial one at most twice
        assert totals == [columns for columns, _ in dealt_totals(width, 64, num_ranks, range(60))]


def test_totals_of_a_range_are_the_sums_of_its_ordinals() -> None:
    for width, num_ranks in itertools.product([130, 256, 300], [1, 3, 4, 8]):
        for start, stop in ((0, 0), (0, 7), (5, 23)):
            dealt = [deal_width(width, 128, num_ranks, ordinal) for ordinal in range(start, stop)]
            columns = [sum(one[rank][1] - one[rank][0] for one in dealt) for rank in range(num_ranks)]
            blocks = [sum(math.ceil((one[rank][1] - one[rank][0]) / 128) for one in dealt) for rank in range(num_ranks)]
            assert dealt_totals(width, 128, num_ranks, range(start, stop)) == list(zip(columns, blocks, strict=True))


def test_qwen3_235b_in_fp8_over_eight_ranks_is_exactly_even() -> None:
    assert dealt_totals(1536, 128, 8, range(128)) == [(192 * 128, 192)] * 8


@pytest.mark.parametrize("name", CONFIGS)
def test_every_layout_covers_every_tensor_exactly_once(name: str) -> None:
    config = CONFIGS[name]
    specs = tensor_specs(config, "bfloat16")
    for layout in (layout for world in (1, 2, 3, 6, 8) for layout in valid_layouts(world, config)):
        shards = [Shards(config, layout, rank) for rank in range(layout.world)]
        for width, kinds in (
            (layout.attn_tp, ("attention", "vocabulary")),
            (layout.mlp_tp, ("mlp",)),
            (layout.moe, ("experts",)),
        ):
            some_group = own_group(layout.groups(width), layout.world - 1)
            for tensor, spec in specs.items():
                if spec.kind in kinds:
                    assert_covered(config, tensor, spec, [shards[rank] for rank in some_group])


def assert_covered(config: ModelConfig, name: str, spec: TensorSpec, group: list[Shards]) -> None:
    """The parts of a group hold each row and column of a tensor once: KV heads as often as they are repeated."""
    parts = [shards.tensor(name, spec) for shards in group]
    is_repeated = name.split(".")[-2] in ("k_proj", "v_proj")
    repeats = max(1, len(group) // config.num_kv_heads) if is_repeated else 1
    is_cut_scale = name.endswith(SCALE_SUFFIX) and spec.kind == "attention" and config.head_dim % FP8_BLOCK
    for dim, size in enumerate(spec.shape):
        ranges = [part.rows if dim == 0 else part.columns or () for part in parts]
        seen = Counter(i for part in ranges for start, stop in part for i in range(start, stop))
        is_whole = all(part == ((0, size),) for part in ranges)
        assert set(seen) == set(range(size))
        if not is_whole and not is_cut_scale:
            assert set(seen.values()) == {repeats}, name


def test_scales_lie_on_the_rank_that_has_their_block() -> None:
    config = CONFIGS["fp8"]
    specs = tensor_specs(config, "bfloat16")
    for layout in valid_layouts(4, config):
        for rank in range(layout.world):
            shards = Shards(config, layout, rank)
            for name in (name for name in specs if name.endswith(SCALE_SUFFIX)):
                weight = shards.tensor(name.removesuffix(SCALE_SUFFIX), specs[name.removesuffix(SCALE_SUFFIX)])
                scale = shards.tensor(name, specs[name])
                for of_weight, of_scale in ((weight.rows, scale.rows), (weight.columns or (), scale.columns or ())):
                    needed = {i // FP8_BLOCK for start, stop in of_weight for i in range(start, stop)}
                    assert needed == {i for start, stop in of_scale for i in range(start, stop)}


def test_query_heads_lie_with_the_kv_head_that_they_attend_to() -> None:
    config = model_config()
    heads_per_kv = config.num_heads // config.num_kv_heads
    for attn_tp in (1, 2, 4, 8, 12, 24):
        layout = Layout.resolve(tp=attn_tp)
        layout.check(config)
        for rank in range(attn_tp):
            shards = Shards(config, layout, rank)
            assert {head // heads_per_kv for head in range(*shards.query_heads)} == set(range(*shards.kv_heads))


def test_the_vocabulary_is_padded_in_memory_only() -> None:
    config = model_config(vocab_size=5)
    specs = tensor_specs(config, "bfloat16")
    for attn_tp in (1, 2, 4, 8):
        parts = [Shards(config, Layout.resolve(tp=attn_tp), rank) for rank in range(attn_tp)]
        shapes = {part.tensor("lm_head.weight", specs["lm_head.weight"]).shape for part in parts}
        assert shapes == {(math.ceil(5 / attn_tp), config.hidden_size)}
        assert [row for part in parts for row in range(*part.vocab_rows)] == list(range(5))


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_bytes_are_those_of_the_shards(name: str) -> None:
    config = CONFIGS[name]
    specs = tensor_specs(config, "float16")
    for layout in (layout for world in (1, 2, 6, 8) for layout in valid_layouts(world, config)):
        counted = weight_bytes(config, layout, specs)
        for rank in range(layout.world):
            shards = Shards(config, layout, rank)
            summed = Counter[str]()
            for tensor, spec in specs.items():
                summed[spec.kind] += math.prod(shards.tensor(tensor, spec).shape) * spec.item_bytes
            assert Counter(counted[rank]) == summed


def test_ranks_of_all_ep_degrees_hold_nearly_the_same() -> None:
    config = model_config(num_experts=6, num_layers=9, moe_intermediate_size=5 * BLOCK_WIDTH)
    column_bytes = 3 * config.hidden_size * 2
    for layout in valid_layouts(8, config):
        sizes = [rank["experts"] for rank in weight_bytes(config, layout, tensor_specs(config, "bfloat16"))]
        # One expert's part more or less between ep ranks, one block within one.
        assert max(sizes) - min(sizes) <= column_bytes * (
            2 * BLOCK_WIDTH + config.moe_intermediate_size / layout.moe_tp
        )


def test_fp8_checkpoints_name_their_scales() -> None:
    specs = tensor_specs(CONFIGS["fp8"], "bfloat16")
    gate = specs["model.layers.1.mlp.experts.0.gate_proj.weight"]
    assert gate.item_bytes == 1 and specs["model.layers.1.mlp.gate.weight"].item_bytes == 2
    assert specs["model.layers.1.mlp.experts.0.gate_proj.weight_scale_inv"].shape == scale_shape(gate.shape) == (3, 2)
    assert "lm_head.weight_scale_inv" not in specs


def test_modules_to_not_convert_spare_what_they_contain_or_end() -> None:
    config = Fp8Config(frozenset({"model.layers.1", "o_proj", "model.layers.2.mlp.gate"}))
    converted = {"model.layers.0.self_attn.q_proj", "model.layers.10.self_attn.q_proj", "model.layers.2.mlp.gate_proj"}
    spared = {"model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj", "model.norm", "lm_head"}
    assert all(map(config.converts, converted)) and not any(map(config.converts, spared))


def test_a_layer_that_is_fp8_in_part_is_refused() -> None:
    config = model_config(quantization=Fp8Config(frozenset({"model.layers.1.mlp.experts.3"})))
    assert mlp_block_width(config, 2) == FP8_BLOCK
    with pytest.raises(CheckpointError, match=r"names a part of model\.layers\.1\.mlp"):
        mlp_block_width(config, 1)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
        ({"weight_block_size": [64, 64]}, r"weight_block_size is \[64, 64\]"),
        ({"activation_scheme": "static"}, "activation_scheme is 'static'"),
        ({"modules_to_not_convert": "lm_head"}, "must be a list"),
    ],
)
def test_other_quantisations_are_refused_by_name(changes: dict[str, object], named: str) -> None:
    fields = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    assert Fp8Config.parse(fields) == Fp8Config(frozenset())
    with pytest.raises(CheckpointError, match=named):
        Fp8Config.parse(fields | changes)
