"""Routing, sorting and the ragged experts under the interpreter, against their references."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

import kernels
from kernels import configs
from kernels.configs import ANY, Tile
from kernels.fp8 import quantize_blocks
from kernels.moe_experts import moe_experts_reference
from kernels.moe_routing import Scoring, route_reference, sort_by_expert, sort_by_expert_reference
from tests.kernels.tensors import assert_close, random

DTYPES = (torch.float32, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [0, 1, 3, 4, 5])
@pytest.mark.parametrize(
    ("E", "top_k", "renormalize", "scoring"),
    [
        (8, 2, True, "softmax"),
        (128, 8, True, "softmax"),
        (5, 3, False, "softmax"),
        (160, 6, True, "sigmoid"),
        (1, 1, False, "sigmoid"),
    ],
)
def test_routing_equals_its_reference(
    T: int, E: int, top_k: int, renormalize: bool, scoring: Scoring, dtype: torch.dtype
) -> None:
    logits = (random(T, E) * 2).round().to(dtype) if T % 2 else random(T, E, dtype=dtype)  # odd T has many ties
    weights, experts = kernels.route(logits, top_k, renormalize, scoring)
    expected_weights, expected_experts = route_reference(logits, top_k, renormalize, scoring)
    assert torch.equal(experts, expected_experts)
    assert_close(weights, expected_weights)


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # numpy's, of the interpreter
def test_a_row_of_nan_routes_to_experts_that_exist() -> None:
    _, experts = kernels.route(torch.full((1, 6), torch.nan), 3, True)
    assert bool(((experts >= 0) & (experts < 6)).all())


def skewed_ids(T: int, top_k: int, num_experts: int) -> Tensor:
    """Distinct experts of each token; the first experts get most of them, the last none."""
    scores = random(T, num_experts) - torch.arange(num_experts)
    scores[:, -1] = -99.0
    return scores.topk(top_k, dim=1).indices.to(torch.int32)


@pytest.mark.parametrize("launches", [1, 2])
@pytest.mark.parametrize(
    ("T", "top_k", "num_experts", "block_m"),
    [
        (1, 1, 1, 16),
        (1, 2, 3, 16),
        (31, 1, 9, 16),
        (9, 7, 20, 4),
        (1023, 1, 5, 64),
        (65, 4, 128, 16),
        (700, 3, 7, 128),
    ],
)
def test_sorting_equals_a_stable_sort(
    launches: int, T: int, top_k: int, num_experts: int, block_m: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if launches == 2:
        monkeypatch.setattr(sys.modules["kernels.moe_routing"], "_ONE_LAUNCH", 0)
    ids = skewed_ids(T, top_k, num_experts) if num_experts > 1 else torch.zeros(T, 1, dtype=torch.int32)
    work, expected = sort_by_expert(ids, num_experts, block_m), sort_by_expert_reference(ids, num_experts, block_m)
    num_tiles = int(expected.num_tiles)
    assert torch.equal(work.order, expected.order)
    assert int(work.num_tiles) == num_tiles <= work.max_tiles
    assert torch.equal(work.tiles[:num_tiles], expected.tiles)


def random_experts(
    hidden: int, widths: tuple[int, ...], dtype: torch.dtype, is_fp8: bool = False
) -> kernels.ExpertWeights:
    """Experts whose results have about the size of their input."""
    offsets = torch.tensor([0, *widths]).cumsum(0).to(torch.int32)
    total = int(offsets[-1])
    gate_up = random(2 * total, hidden, seed=1) * hidden**-0.5
    downs = [random(hidden, width, seed=2 + e) * max(width, 1) ** -0.5 for e, width in enumerate(widths)]
    if not is_fp8:
        down = torch.cat([matrix.flatten() for matrix in downs])
        return kernels.ExpertWeights(gate_up.to(dtype), down.to(dtype), offsets, widths)
    quantized, gate_up_scale = quantize_blocks(gate_up)
    blocks = [quantize_blocks(matrix) for matrix in downs if matrix.numel()]
    down, down_scale = (torch.cat([part[i].flatten() for part in blocks]) for i in (0, 1))
    return kernels.ExpertWeights(quantized, down, offsets, widths, gate_up_scale, down_scale)


TILES = {
    "small": (Tile(16, 32, 64, 4, 2), Tile(16, 64, 32, 4, 2)),
    "swapped": (Tile(16, 64, 128, 4, 2, is_swapped=True), Tile(16, 128, 64, 4, 2, is_swapped=True)),
    "persistent": (Tile(64, 64, 64, 4, 2, is_persistent=True), Tile(64, 64, 64, 4, 2, is_persistent=True)),
}


@pytest.fixture(params=list(TILES))
def tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every shape in a test uses one pair of tiles."""
    for name, tile in zip(("moe_gate_up", "moe_down"), TILES[request.param], strict=True):
        monkeypatch.setitem(configs.DEFAULTS[name], "sm_90", ((ANY, tile),))
    configs.pick.cache_clear()
    request.addfinalizer(configs.pick.cache_clear)
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("T", "top_k", "hidden", "widths"),
    [
        (0, 2, 64, (32, 32)),
        (1, 2, 64, (32, 0, 96)),
        (15, 2, 128, (128, 0, 256, 128)),
        (17, 1, 100, (24, 40, 0)),
        (66, 2, 64, (0, 48, 33)),
        (3, 2, 64, (0, 0, 0)),
        (2, 2, 72, (8, 16, 24, 8, 0, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8)),  # few enough to be tiles of their own
    ],
)
def test_experts_equal_their_reference(
    T: int, top_k: int, hidden: int, widths: tuple[int, ...], dtype: torch.dtype, tiles: str
) -> None:
    experts, x = random_experts(hidden, widths, dtype), random(T, hidden, seed=99, dtype=dtype)
    weights, ids = route_reference(random(T, len(widths), seed=98), top_k, True)
    assert_close(kernels.moe_experts(x, experts, weights, ids), moe_experts_reference(x, experts, weights, ids))


def test_all_tokens_on_one_expert(tiles: str) -> None:
    experts, x = random_experts(64, (32, 96, 64), torch.float32), random(65, 64, seed=9)
    weights, ids = torch.ones(65, 1), torch.ones(65, 1, dtype=torch.int32)
    assert_close(kernels.moe_experts(x, experts, weights, ids), moe_experts_reference(x, experts, weights, ids))


def test_a_token_is_bit_identical_alone_and_in_any_batch_of_one_bucket(tiles: str) -> None:
    experts, x = random_experts(64, (32, 96, 0, 64), torch.float16), random(20, 64, seed=9, dtype=torch.float16)
    weights, ids = route_reference(random(20, 4, seed=98), 2, True)
    together = kernels.moe_experts(x, experts, weights, ids)
    for rows in (slice(0, 1), slice(7, 20), slice(19, 20)):
        assert torch.equal(kernels.moe_experts(x[rows], experts, weights[rows], ids[rows]), together[rows])


def rank_widths(blocks: int, moe_tp: int, num_experts: int) -> tuple[int, ...]:
    """Widths on rank 0 of experts of `blocks` blocks of 128 columns, dealt as replica/shards.py deals layer 0."""
    base, extra = divmod(blocks, moe_tp)
    return tuple(128 * (base + ((-e * extra) % moe_tp < extra)) for e in range(num_experts))


def sparse_experts(hidden: int, widths: tuple[int, ...], used: set[int]) -> kernels.ExpertWeights:
    """As `random_experts`, but those that are not used have weights of zero, whose pages no test ever touches."""
    offsets = torch.tensor([0, *widths]).cumsum(0).to(torch.int32)
    total = int(offsets[-1])
    gate_up, down = (
        torch.zeros(2 * total, hidden, dtype=torch.float16),
        torch.zeros(total * hidden, dtype=torch.float16),
    )
    for e in used:
        first, width = int(offsets[e]), widths[e]
        gate_up[2 * first : 2 * (first + width)] = random(2 * width, hidden, seed=e) * hidden**-0.5
        down[hidden * first : hidden * (first + width)] = (
            random(hidden, width, seed=e + 1).flatten() * max(width, 1) ** -0.5
        )
    return kernels.ExpertWeights(gate_up, down, offsets, widths)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("moe_tp", "T"), [(1, 1), (2, 1), (4, 1), (8, 1), (8, 5)])  # 5 tokens are sorted by expert
@pytest.mark.parametrize(("hidden", "blocks"), [(2048, 6), (4096, 12)], ids=["30B", "235B"])
def test_the_128_experts_of_the_real_models_equal_their_reference_at_each_width(
    hidden: int, blocks: int, moe_tp: int, T: int
) -> None:
    num_experts, top_k = 128, 8
    x, scores = random(T, hidden, seed=9, dtype=torch.float16), random(T, num_experts, seed=8)
    scores[:, 16:-4] = -99.0  # few experts are used, so that few must be made; the last ones are among them
    weights, ids = route_reference(scores, top_k, True)
    experts = sparse_experts(hidden, rank_widths(blocks, moe_tp, num_experts), set(ids.flatten().tolist()))
    assert_close(kernels.moe_experts(x, experts, weights, ids), moe_experts_reference(x, experts, weights, ids))


@pytest.mark.parametrize("tile", [Tile(16, 128, 128, 4, 2), Tile(16, 128, 128, 4, 2, is_swapped=True)])
@pytest.mark.parametrize(
    ("T", "hidden", "widths"), [(5, 256, (128, 0, 256)), (1, 200, (128,) * 8), (18, 192, (128, 128))]
)
def test_fp8_experts_equal_their_reference(
    T: int, hidden: int, widths: tuple[int, ...], tile: Tile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("moe_gate_up_fp8", "moe_down_fp8"):
        monkeypatch.setitem(configs.DEFAULTS[name], "sm_90", ((ANY, tile),))
    configs.pick.cache_clear()
    experts, x = random_experts(hidden, widths, torch.float32, is_fp8=True), random(T, hidden, seed=9)
    weights, ids = route_reference(random(T, len(widths), seed=8), 2, True)
    actual = kernels.moe_experts(x, experts, weights, ids)
    configs.pick.cache_clear()
    # The inner row is quantised after sums in another order: one of its 128s may round to the next of float8's steps.
    expected = moe_experts_reference(x, experts, weights, ids)
    torch.testing.assert_close(actual, expected, rtol=0, atol=5e-3 * float(expected.abs().max()))


def test_fp8_experts_of_other_widths_are_refused() -> None:
    scale, offsets = torch.ones(1, 2), torch.tensor([0, 64], dtype=torch.int32)
    with pytest.raises(ValueError, match="an FP8 expert has a width of 64, which must be a multiple of 128"):
        kernels.ExpertWeights(torch.zeros(128, 256), torch.zeros(64 * 256), offsets, (64,), scale, scale)
