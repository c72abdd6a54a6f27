"""Layouts: which degrees are valid, who shares what, and what a refusal says. All small worlds by brute force."""

from __future__ import annotations

import itertools
import math
import shlex
from typing import Any

import pytest

from replica.errors import ConfigError
from replica.layout import Layout, own_group, valid_layouts
from replica.model_config import ModelConfig
from tests.shapes import dense_model_config, model_config

WORLDS = range(1, 17)
LAYOUTS = [layout for world in WORLDS for layout in valid_layouts(world)]


def resolve_flags(flags: str) -> Layout:
    """The layout of a command line's options."""
    words = shlex.split(flags)
    given = {name[2:].replace("-", "_"): int(value) for name, value in zip(words[::2], words[1::2], strict=True)}
    return Layout.resolve(**given)


def is_valid(dp: int, attn_tp: int, mlp: int, moe: int) -> bool:
    """The rules of the design, written out."""
    world = max(mlp, moe)
    widths_fit = all(width == 1 or (width % attn_tp == 0 and world % width == 0) for width in (mlp, moe))
    return dp * attn_tp == world and widths_fit


def test_degrees_resolve_as_the_design_says() -> None:
    layout = Layout.resolve(dp=2, tp=8)
    assert (layout.world, layout.attn_tp, layout.mlp_tp, layout.moe) == (8, 4, 8, 8)
    assert layout.groups(layout.attn_tp) == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (1, 1, 1, 1, 1)),
        ({"tp": 8}, (1, 8, 8, 8, 1)),
        ({"tp": 8, "attn_tp": 2}, (4, 2, 8, 8, 1)),
        ({"tp": 8, "ep": 2}, (1, 8, 8, 4, 2)),
        ({"tp": 8, "moe_tp": 2}, (1, 8, 8, 2, 4)),
        ({"dp": 8, "ep": 8}, (8, 1, 1, 1, 8)),
        ({"dp": 2, "tp": 4, "moe_tp": 2, "ep": 1}, (2, 2, 4, 2, 1)),
        ({"dp": 4, "tp": 4, "mlp_tp": 1}, (4, 1, 1, 4, 1)),
        ({"dp": 4, "attn_tp": 2, "tp": 8}, (4, 2, 8, 8, 1)),
    ],
)
def test_options_that_are_not_given_follow_from_the_others(given: dict[str, int], expected: tuple[int, ...]) -> None:
    layout = Layout.resolve(**given)
    assert (layout.dp, layout.attn_tp, layout.mlp_tp, layout.moe_tp, layout.ep) == expected


def test_exactly_the_combinations_that_the_rules_allow_are_accepted() -> None:
    for dp, attn_tp, mlp, moe_tp, ep in itertools.product(
        [1, 2, 3, 4, 6], [1, 2, 3, 4], [1, 2, 4, 6, 8, 12], [1, 2, 3, 4], [1, 2, 3]
    ):
        try:
            Layout(dp=dp, attn_tp=attn_tp, mlp_tp=mlp, moe_tp=moe_tp, ep=ep)
            was_accepted = True
        except ConfigError:
            was_accepted = False
        assert was_accepted == is_valid(dp, attn_tp, mlp, moe_tp * ep), (dp, attn_tp, mlp, moe_tp, ep)


def test_the_list_of_valid_layouts_is_complete() -> None:
    for world in WORLDS:
        expected = {
            (dp, mlp, moe_tp, ep)
            for dp, mlp, moe_tp, ep in itertools.product(range(1, world + 1), repeat=4)
            if world % dp == 0 and max(mlp, moe_tp * ep) == world and is_valid(dp, world // dp, mlp, moe_tp * ep)
        }
        listed = [(layout.dp, layout.mlp_tp, layout.moe_tp, layout.ep) for layout in valid_layouts(world)]
        assert len(listed) == len(set(listed)) and set(listed) == expected


def test_the_flags_of_a_layout_give_it_back() -> None:
    for layout in LAYOUTS:
        assert resolve_flags(layout.flags()) == layout


def test_groups_of_every_width_divide_the_ranks() -> None:
    for layout in LAYOUTS:
        for width in {layout.attn_tp, layout.mlp_tp, layout.moe}:
            assert sorted(itertools.chain(*layout.groups(width))) == list(range(layout.world))
            assert all(len(group) == width for group in layout.groups(width))
            assert all(
                own_group(layout.groups(width), rank).index(rank) == rank % width for rank in range(layout.world)
            )


def test_the_groups_join_all_ranks() -> None:
    for layout in LAYOUTS:
        reached, frontier = {0}, [0]
        while frontier:
            rank = frontier.pop()
            for width in (layout.attn_tp, layout.mlp_tp, layout.moe):
                new = set(own_group(layout.groups(width), rank)) - reached
                reached |= new
                frontier += new
        assert len(reached) == layout.world


def test_places_in_a_moe_group_are_each_taken_once() -> None:
    for layout in LAYOUTS:
        for group in layout.groups(layout.moe):
            places = [layout.moe_rank(rank) for rank in group]
            assert places == list(itertools.product(range(layout.ep), range(layout.moe_tp)))


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 7, 8, 33])
def test_each_token_has_one_owner_in_its_own_replica(num_tokens: int) -> None:
    for layout in LAYOUTS:
        parts = [layout.owned_tokens(num_tokens, local_rank) for local_rank in range(layout.attn_tp)]
        assert [row for part in parts for row in range(*part)] == list(range(num_tokens))
        assert max(stop - start for start, stop in parts) == math.ceil(num_tokens / layout.attn_tp)


def test_the_padded_vocabulary_is_the_next_multiple() -> None:
    layout = Layout.resolve(tp=4)
    assert [layout.padded_vocab(size) for size in (1, 4, 5, 640)] == [4, 4, 8, 640]


@pytest.mark.parametrize(
    ("given", "arithmetic", "remedy"),
    [
        ({"dp": 3, "tp": 8}, "--dp 3 does not divide the 8 ranks of --tp 8", "--dp 4 --tp 8"),
        ({"dp": 2}, "--dp 2 does not divide the 1 rank of --tp 1 (--tp counts those of all replicas)", "--dp 1 --tp 1"),
        ({"tp": 8, "attn_tp": 3}, "--attn-tp 3 does not divide the 8 ranks of --tp 8", "--dp 2 --tp 8"),
        ({"dp": 2, "tp": 8, "attn_tp": 2}, "--dp 2 x --attn-tp 2 = 4, must equal the 8 ranks", "--dp 2 --tp 8"),
        ({"tp": 8, "ep": 3}, "--ep 3 does not divide the MoE width 8", "--dp 1 --tp 8 --ep 4"),
        ({"tp": 8, "moe_tp": 3}, "--moe-tp 3 does not divide the MoE width 8", "--dp 1 --tp 8 --ep 2"),
        ({"dp": 2, "tp": 8, "mlp_tp": 6}, "MLP width is 6, must be 1, or a multiple of attn_tp 4", "--dp 2 --tp 8"),
        ({"dp": 2, "tp": 8, "moe_tp": 2, "ep": 1}, "MoE width is 2", "--dp 2 --tp 8 --moe-tp 4 --ep 1"),
        ({"dp": 6, "tp": 6, "nnodes": 4}, "6 replicas do not divide over --nnodes 4", "--dp 6 --tp 6"),
        ({"tp": 0}, "--tp is 0, must be 1 to 1024", ""),
        ({"dp": -1, "tp": 4}, "--dp is -1", ""),
        ({"moe_tp": 900, "ep": 900}, "810000 ranks, limit is 1024", ""),
    ],
)
def test_a_refusal_gives_the_arithmetic_and_the_nearest_valid_choice(
    given: dict[str, int], arithmetic: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        Layout.resolve(**given)
    assert arithmetic in str(refused.value) and str(refused.value).endswith(remedy)
    assert "\n" not in str(refused.value)


def test_every_remedy_is_itself_valid() -> None:
    config = model_config()
    options: list[Any] = [None, 1, 3, 4]
    for dp, mlp_tp, moe_tp, ep in itertools.product(options, repeat=4):
        for tp in (6, 8):
            try:
                Layout.resolve(dp=dp, tp=tp, mlp_tp=mlp_tp, moe_tp=moe_tp, ep=ep).check(config)
            except ConfigError as err:
                resolve_flags(str(err).rsplit(": ", 1)[1])


@pytest.mark.parametrize(
    ("config", "layout", "arithmetic"),
    [
        (model_config(num_heads=12), Layout.resolve(tp=8), "12 query heads do not divide over attn_tp 8"),
        (model_config(num_heads=24), Layout.resolve(tp=6), "4 KV heads neither divide over attn_tp 6"),
        (dense_model_config(), Layout.resolve(dp=2, tp=2, ep=2), "--ep is 2, but the model has no experts"),
        (
            model_config(dense_layers=frozenset()),
            Layout.resolve(dp=2, tp=8, moe_tp=4, ep=1),
            "(attention 4, MoE 4) join only 4 of 8 ranks: that is 2 independent groups",
        ),
        (dense_model_config(), Layout.resolve(dp=4, tp=4, mlp_tp=1), "(attention 1, MLP 1) join only 1 of 4 ranks"),
    ],
)
def test_a_layout_that_does_not_suit_the_model_is_refused(config: ModelConfig, layout: Layout, arithmetic: str) -> None:
    with pytest.raises(ConfigError) as refused:
        layout.check(config)
    assert arithmetic in str(refused.value)
    resolve_flags(str(refused.value).rsplit(": ", 1)[1]).check(config)


@pytest.mark.parametrize("attn_tp", [1, 2, 4, 8, 24])
def test_kv_heads_that_divide_or_repeat_evenly_are_accepted(attn_tp: int) -> None:
    Layout.resolve(tp=attn_tp).check(model_config())


def test_suggestions_for_a_model_leave_out_degrees_of_layers_that_it_lacks() -> None:
    dense = list(valid_layouts(4, dense_model_config()))
    assert {(layout.dp, layout.mlp_tp, layout.ep) for layout in dense} == {(1, 1, 1), (1, 4, 1), (2, 4, 1), (4, 4, 1)}
    assert all(layout.mlp_tp == 4 for layout in valid_layouts(4, model_config(dense_layers=frozenset())))
