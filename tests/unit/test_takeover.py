"""Who takes over the blocks of lost replicas: each block has one holder, nothing moves, and all hold about the same."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.layout import Layout, own_group, valid_layouts
from replica.model_config import ModelConfig
from replica.plan import PlanSettings, SurvivorCheck, make_plan
from replica.shards import Ranges, Shards, weight_bytes
from replica.takeover import GroupBlocks, TakenShards, Takeover, dead_ranks
from replica.tensor_specs import BLOCK_WIDTH, block_size, tensor_specs
from tests.planned_bytes import weight_bytes_after
from tests.shapes import FP8, dense_model_config, model_config

GIB: Final = 2**30
CONFIGS: Final = {
    "bf16": model_config(),
    "fp8": model_config(quantization=FP8),
    "dense": dense_model_config(),
    "three blocks, partial ones": model_config(moe_intermediate_size=2 * BLOCK_WIDTH + 7, dense_layers=frozenset()),
}
KINDS: Final = {"mlp": "mlp_tp", "experts": "moe"}

Evictions = Sequence[Collection[int]]


def losses(layout: Layout, seed: int) -> Evictions:
    """Some replicas, one of which is left, in evictions of one or two."""
    draw = random.Random(seed)
    lost = draw.sample(range(layout.dp), draw.randrange(1, layout.dp))
    evicted = []
    while lost:
        count = draw.randint(1, 2)
        evicted.append(tuple(lost[:count]))
        lost = lost[count:]
    return evicted


def cases(config: ModelConfig, worlds: Sequence[int] = (2, 3, 4, 6, 8)) -> Iterator[tuple[Layout, Evictions]]:
    for world in worlds:
        for seed, layout in enumerate(valid_layouts(world, config)):
            if layout.dp > 1:
                yield layout, losses(layout, seed)


def living(layout: Layout, evicted: Evictions) -> list[int]:
    dead = {rank for replicas in evicted for rank in dead_ranks(layout, replicas)}
    return [rank for rank in range(layout.world) if rank not in dead]


def taken_over(config: ModelConfig, layout: Layout, evicted: Evictions) -> dict[int, list[TakenShards]]:
    """For each living rank, what it takes over at each eviction, by its own reckoning."""
    found = {}
    for rank in living(layout, evicted):
        takeover = Takeover(Shards(config, layout, rank), "bfloat16")
        found[rank] = [takeover.evict(replicas) for replicas in evicted]
    return found


def parts(shards: Shards, layer: int) -> list[Ranges]:
    """Columns of each expert, or of the dense MLP."""
    return shards.experts(layer) if shards.config.is_moe(layer) else [shards.mlp(layer)]


@pytest.mark.parametrize("name", CONFIGS)
def test_each_block_of_a_group_with_a_survivor_is_held_by_exactly_one_of_its_living_ranks(name: str) -> None:
    config = CONFIGS[name]
    for layout, evicted in cases(config):
        taken = taken_over(config, layout, evicted)
        for layer in range(config.num_layers):
            is_moe = config.is_moe(layer)
            width = config.moe_intermediate_size if is_moe else config.intermediate_size
            for group in layout.groups(layout.moe if is_moe else layout.mlp_tp):
                alive = [rank for rank in group if rank in taken]
                if not alive:
                    continue
                held = [one for rank in alive for one in (Shards(config, layout, rank), *taken[rank])]
                for of_part in zip(*(parts(shards, layer) for shards in held), strict=True):
                    columns = [column for ranges in of_part for start, stop in ranges for column in range(start, stop)]
                    assert sorted(columns) == list(range(width)), (layout.flags(), evicted, layer)


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_are_whole_blocks_in_ascending_ranges_that_do_not_touch(name: str) -> None:
    config = CONFIGS[name]
    for layout, evicted in cases(config, (4, 6)):
        for shards in itertools.chain(*taken_over(config, layout, evicted).values()):
            for layer in range(config.num_layers):
                size = block_size(config, layer, "bfloat16")
                ends = {stop for block in range(size.num_blocks) for stop in size.columns(block)}
                for ranges in parts(shards, layer):
                    bounds = [bound for span in ranges for bound in span]
                    assert bounds == sorted(set(bounds)) and ends.issuperset(bounds)


@pytest.mark.parametrize("name", CONFIGS)
def test_nobody_that_takes_something_over_ends_more_than_a_block_above_another_one(name: str) -> None:
    config = CONFIGS[name]
    specs = tensor_specs(config, "bfloat16")
    for layout, evicted in cases(config):
        before, after = (
            weight_bytes(config, layout, specs),
            weight_bytes_after(config, layout, specs, "bfloat16", evicted),
        )
        for kind, width in KINDS.items():
            layers = [layer for layer in range(config.num_layers) if config.is_moe(layer) == (kind == "experts")]
            block = max((block_size(config, layer, "bfloat16").num_bytes(0) for layer in layers), default=0)
            for group in layout.groups(getattr(layout, width)):
                held = {rank: after[rank][kind] for rank in group if rank in after}
                for rank in held:
                    assert held[rank] >= before[rank][kind]
                    if held[rank] > before[rank][kind]:
                        assert held[rank] - min(held.values()) <= block, (layout.flags(), evicted)


def test_whole_models_end_exactly_even_where_the_blocks_divide() -> None:
    config = model_config(num_layers=4, moe_intermediate_size=6 * BLOCK_WIDTH, num_experts=8, dense_layers=frozenset())
    layout = Layout.resolve(dp=4, tp=4)
    after = weight_bytes_after(config, layout, tensor_specs(config, "bfloat16"), "bfloat16", [(3,)])
    assert len({kinds["experts"] for kinds in after.values()}) == 1  # 4 x 8 x 6 blocks, 64 a rank
    # In one layer too, for nobody waits for a rank that has more of it.
    of_layers = Counter[tuple[int, int]]()
    for rank, (shards,) in taken_over(config, layout, [(3,)]).items():
        for layer in range(config.num_layers):
            of_layers[layer, rank] += sum(stop - start for ranges in shards.experts(layer) for start, stop in ranges)
    assert set(of_layers.values()) == {4 * BLOCK_WIDTH}


def test_what_was_taken_over_stays_where_it_is_at_the_next_eviction() -> None:
    config = CONFIGS["bf16"]
    layout = Layout.resolve(dp=4, tp=8)
    first = taken_over(config, layout, [(1,)])
    both = taken_over(config, layout, [(1,), (2,)])
    for rank, (shards, _) in both.items():
        for layer in range(config.num_layers):
            assert parts(shards, layer) == parts(first[rank][0], layer)


def test_the_blocks_of_an_expert_may_go_to_ranks_of_another_ep_rank() -> None:
    config = CONFIGS["bf16"]
    layout = Layout.resolve(dp=2, tp=4, moe_tp=2, ep=2)  # each replica is one ep rank
    taken = taken_over(config, layout, [(1,)])
    layer = next(layer for layer in range(config.num_layers) if config.is_moe(layer))
    for rank, (shards,) in taken.items():
        others = set(range(config.num_experts)) - set(Shards(config, layout, rank).local_experts(layer))
        assert {expert for expert, ranges in enumerate(shards.experts(layer)) if ranges} <= others
        assert any(shards.experts(layer))


def test_a_group_that_is_lost_whole_leaves_nothing_to_the_others() -> None:
    config = dense_model_config(num_layers=2)
    layout = Layout.resolve(dp=4, mlp_tp=4, moe_tp=1, ep=1)
    experts = model_config(dense_layers=frozenset({0}))
    narrow = Layout.resolve(dp=4, mlp_tp=4, moe_tp=2, ep=1)  # MoE groups (0, 1) and (2, 3)
    for rank, (shards,) in taken_over(experts, narrow, [(0, 1)]).items():
        assert rank in (2, 3) and shards.layers == [0]  # the dense layer's, which all four shared
    assert all(shards.layers for (shards,) in taken_over(config, layout, [(0, 1)]).values())


@pytest.mark.parametrize("name", CONFIGS)
def test_counted_bytes_are_those_of_what_is_taken_over(name: str) -> None:
    config = CONFIGS[name]
    specs = tensor_specs(config, "float16")
    for layout, evicted in cases(config, (3, 4, 6)):
        before, after = (
            weight_bytes(config, layout, specs),
            weight_bytes_after(config, layout, specs, "float16", evicted),
        )
        for rank, taken in taken_over(config, layout, evicted).items():
            summed = sum(before[rank].values()) + sum(
                math.prod(shards.tensor(tensor, spec).shape) * spec.item_bytes
                for shards in taken
                for tensor, spec in specs.items()
                if spec.kind in KINDS
            )
            assert sum(after[rank].values()) == summed


@settings(max_examples=60, deadline=None)
@given(
    num_blocks=st.integers(1, 9),
    num_experts=st.integers(1, 9),
    moe_tp=st.integers(1, 4),
    ep=st.integers(1, 3),
    draw=st.randoms(use_true_random=False),
)
def test_any_dealing_keeps_every_block_and_the_balance(
    num_blocks: int, num_experts: int, moe_tp: int, ep: int, draw: random.Random
) -> None:
    world = moe_tp * ep
    config = model_config(
        num_layers=3, num_experts=num_experts, moe_intermediate_size=num_blocks * BLOCK_WIDTH, dense_layers=frozenset()
    )
    layout = Layout(dp=world, attn_tp=1, mlp_tp=world, moe_tp=moe_tp, ep=ep)
    blocks = GroupBlocks(config, layout, "experts", range(world), "bfloat16")
    everything = sorted((layer, *block) for held in blocks.held.values() for layer, of in held.items() for block in of)
    assert len(everything) == 3 * num_experts * num_blocks
    while len(blocks.held) > 1:
        dead = draw.sample(sorted(blocks.held), draw.randint(1, len(blocks.held) - 1))
        kept = {rank: {layer: list(of) for layer, of in held.items()} for rank, held in blocks.held.items()}
        before = dict(blocks.bytes)
        taken = blocks.evict(dead)
        assert set(taken) == set(blocks.held) == set(blocks.bytes) == set(kept) - set(dead)
        for rank, held in blocks.held.items():
            assert all(set(kept[rank][layer]) <= set(of) for layer, of in held.items())
            assert blocks.bytes[rank] == sum(map(len, held.values())) * block_size(config, 0, "bfloat16").num_bytes(0)
            if blocks.bytes[rank] > before[rank]:
                assert blocks.bytes[rank] - min(blocks.bytes.values()) <= block_size(config, 0, "bfloat16").num_bytes(0)
        assert everything == sorted(
            (layer, *block) for held in blocks.held.values() for layer, of in held.items() for block in of
        )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_reserve_is_enough_whoever_is_lost_and_in_whatever_order(name: str) -> None:
    config = CONFIGS[name]
    specs = tensor_specs(config, "bfloat16")
    for layout in (layout for world in (3, 4) for layout in valid_layouts(world, config) if layout.dp > 1):
        for count in range(1, min(3, layout.dp)):
            plan = make_plan(
                config, layout, PlanSettings(dtype="bfloat16", device_bytes=GIB, step_tokens=8, survive=count), specs
            )
            for lost in itertools.permutations(range(layout.dp), count):
                for evicted in ([lost], [(dp_rank,) for dp_rank in lost]):
                    for rank, kinds in weight_bytes_after(config, layout, specs, "bfloat16", evicted).items():
                        assert sum(kinds.values()) <= plan.ranks[rank].most_weight_bytes, (layout.flags(), evicted)


@pytest.mark.parametrize("name", CONFIGS)
def test_survivors_that_were_planned_for_can_go_on_and_fewer_are_told_what_they_lack(name: str) -> None:
    config = CONFIGS[name]
    for layout in (Layout.resolve(dp=4, tp=4), Layout.resolve(dp=4, tp=8)):
        planned = PlanSettings(dtype="bfloat16", device_bytes=GIB, step_tokens=8, survive=2)
        room = max(rank.most_weight_bytes for rank in make_plan(config, layout, planned).ranks)
        why_not = SurvivorCheck(config, layout, "bfloat16", room)
        assert [why_not(members) for members in ((0, 1, 2, 3), (0, 1, 3), (1, 2), (0, 3))] == [""] * 4
        assert why_not((2,)).startswith("1 of 4 replicas are left: a rank would hold 0.0")
        assert "there is room for 0.0" in why_not((2,)) and "--survive" in why_not((2,))
        assert SurvivorCheck(config, layout, "bfloat16", GIB)((2,)) == ""
        assert why_not(()) == "no replica is left"


def test_groups_narrower_than_the_loss_do_not_count_what_others_have_lost() -> None:
    """Each of two MoE groups has all experts; the loss of one of them whole costs the other nothing."""
    config = model_config(dense_layers=frozenset())
    layout = Layout(dp=4, attn_tp=1, mlp_tp=4, moe_tp=2, ep=1)
    room = max(sum(kinds.values()) for kinds in weight_bytes(config, layout, tensor_specs(config, "bfloat16")))
    why_not = SurvivorCheck(config, layout, "bfloat16", room)
    assert why_not((0, 1)) == "" and why_not((0, 1, 2)) != ""
    assert own_group(layout.groups(layout.moe), 2) == (2, 3)
