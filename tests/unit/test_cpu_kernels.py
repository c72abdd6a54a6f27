"""What runs on a CPU against the plain torch references of the Triton kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernels
from kernels import bf16_cpu
from kernels.attention_decode import attention_decode_reference
from kernels.attention_prefill import attention_prefill_reference
from kernels.fp8 import quantize_blocks
from kernels.moe_experts import ExpertWeights, PackedExperts, StripExperts, moe_experts_reference
from kernels.moe_routing import route_reference
from kernels.packed_linear import padded_rows
from kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from kernels.rope_cache import qk_norm_rope_cache_reference
from kernels.step_plan_cpu import TILE
from kernels.swiglu import swiglu_reference
from tests.kernels.tensors import Pages, assert_close, random

BF16 = torch.bfloat16
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
needs_own_code = pytest.mark.skipif(bf16_cpu.library() is None, reason="no g++, or no AVX512-BF16")


@pytest.fixture
def only_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where it cannot be compiled."""
    monkeypatch.setattr(bf16_cpu, "library", lambda: None)


@pytest.fixture(params=["our code, if it is there", "oneDNN"])
def either_code(request: pytest.FixtureRequest) -> None:
    """Runs a test with both."""
    if request.param == "oneDNN":
        request.getfixturevalue("only_onednn")


@pytest.mark.usefixtures("either_code")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_linear_gives_the_product_of_the_plain_one_for_any_number_of_rows(
    dtype: torch.dtype, has_bias: bool
) -> None:
    weight = random(128, 192, seed=1, dtype=dtype) * 0.1
    bias = random(128, seed=2, dtype=dtype) if has_bias else None
    packed = kernels.pack_linear(weight)
    for num_rows in (0, 1, 5, 7, 16, 33, 64, 65, 200):
        x = random(num_rows, 192, seed=num_rows, dtype=dtype)
        y = kernels.linear(x, packed, bias)
        assert y.shape == (num_rows, 128) and y.dtype == dtype
        exact = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert_close(y, exact)


@needs_own_code
@pytest.mark.parametrize(("rows", "columns"), [(16, 2), (48, 70), (96, 256)])
def test_a_row_of_a_product_is_what_it_is_alone_to_the_last_bit(rows: int, columns: int) -> None:
    weight, bias = random(rows, columns, seed=1, dtype=BF16), random(rows, seed=2, dtype=BF16)
    packed = kernels.pack_linear(weight)
    assert bf16_cpu.is_packed(packed) and packed.nbytes == weight.nbytes
    for num_rows in (1, 2, 11, 12, 13, 25, 400):
        x = random(num_rows, columns, seed=num_rows, dtype=BF16)
        y = kernels.linear(x, packed, bias)
        assert_close(y, x.double() @ weight.double().T + bias.double())
        assert torch.equal(y, torch.cat([kernels.linear(row, packed, bias) for row in x.split(1)]))
        assert torch.equal(y, kernels.linear(x.t().contiguous().t(), packed, bias))  # in another layout


@pytest.mark.usefixtures("either_code")
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_that_is_a_linear_too_gives_its_rows(dtype: torch.dtype) -> None:
    weight, x = random(80, 64, seed=1, dtype=dtype), random(3, 64, dtype=dtype)
    packed = kernels.pack_embedding(weight)
    ids = torch.tensor([0, 79, 17, 15, 16])
    assert torch.equal(kernels.embedding(packed, ids), weight[ids])
    assert_close(kernels.linear(x, packed), x.double() @ weight.double().T)


@needs_own_code
def test_a_tokens_experts_give_the_same_whatever_the_batch_to_the_last_bit() -> None:
    packed = kernels.pack_experts(make_experts((64, 0, 32, 48, 16, 64, 64, 64), 64, BF16))
    assert isinstance(packed, StripExperts)
    x = random(300, 64, seed=3, dtype=BF16)
    weights, ids = route_reference(random(300, 8, seed=4), 3, True)
    together = kernels.moe_experts(x, packed, weights, ids)
    for part in (slice(0, 1), slice(1, 8), slice(8, 30), slice(30, 300)):
        assert torch.equal(together[part], kernels.moe_experts(x[part], packed, weights[part], ids[part]))


@needs_own_code
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 4), 64), ((6, 2), 40), ((16, 1), 128), ((2, 1), 18)])
def test_our_attention_takes_any_grouping_of_heads_and_any_size(heads: tuple[int, int], head_dim: int) -> None:
    lens = [1, 15, 16, 17, 0, 333, 128, 129, 256]
    pages = Pages(lens, num_kv_heads=heads[1], head_dim=head_dim, block_size=16, dtype=BF16)
    q = 8 * random(len(lens), heads[0], head_dim, dtype=BF16)  # some scores are far below the largest
    y = kernels.paged_attention(
        q, plan_of(pages.k_cache, len(lens), (pages.tables, pages.lens)), pages.k_cache, pages.v_cache, head_dim**-0.5
    )
    expected = attention_decode_reference(q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, head_dim**-0.5)
    assert_close(y, expected)


@needs_own_code
def test_a_query_attends_alike_to_the_last_bit_however_its_prompt_is_cut() -> None:
    length = 450  # four blocks of keys
    pages = Pages([length], num_kv_heads=2, head_dim=32, block_size=16, dtype=BF16)
    q = random(length, 6, 32, dtype=BF16)

    def attend(first: int, last: int) -> Tensor:
        """The queries of one chunk."""
        context, starts = torch.tensor([last]), torch.tensor([0, last - first])
        prompts = pages.tables, starts.to(torch.int32), context.to(torch.int32)
        plan = plan_of(pages.k_cache, last - first, prompts=prompts)
        return kernels.paged_attention(q[first:last], plan, pages.k_cache, pages.v_cache, 0.2)

    whole = attend(0, length)
    for cut in (1, 127, 128, 300):
        assert torch.equal(whole, torch.cat((attend(0, cut), attend(cut, length))))
    for position in (0, 130, 449):
        decodes = pages.tables, torch.tensor([position + 1], dtype=torch.int32)
        plan = plan_of(pages.k_cache, 1, decodes)
        alone = kernels.paged_attention(q[position : position + 1], plan, pages.k_cache, pages.v_cache, 0.2)
        assert torch.equal(whole[position], alone[0])


@needs_own_code
def test_attention_keeps_nan_to_its_sequence_and_gives_keys_of_minus_infinity_nothing() -> None:
    length, infinite = 200, 128  # a whole block of keys
    pages = Pages([length] * 3, num_kv_heads=1, head_dim=16, block_size=16, dtype=BF16)
    pages.k_cache[pages.tables[1, 0]] = torch.nan
    pages.k_cache[pages.tables[2, : infinite // 16]] = -torch.inf
    pages.keys[2][:infinite] = -torch.inf
    q = random(3, 2, 16, dtype=BF16).abs()
    plan = plan_of(pages.k_cache, 3, (pages.tables, pages.lens))
    y = kernels.paged_attention(q, plan, pages.k_cache, pages.v_cache, 0.35)
    assert y[1].isnan().all()
    for s in (0, 2):
        assert_close(y[s], pages.attend(q[s], s, length, 0.35))


@needs_own_code
def test_what_each_token_gets_on_its_own_is_the_same_to_the_last_bit_in_any_company() -> None:
    x, residual, weight = random(60, 72, seed=1, dtype=BF16), random(60, 72, seed=2, dtype=BF16), random(72, dtype=BF16)
    functions = (
        lambda rows: (kernels.rms_norm(x[rows], weight, 1e-6),),
        lambda rows: kernels.add_rms_norm(x[rows], residual[rows], weight, 1e-6),
        lambda rows: (kernels.swiglu(x[rows]),),
        lambda rows: kernels.route(x[rows], 6, True),
    )
    for function in functions:
        parts = zip(*(function(slice(*rows)) for rows in ((0, 1), (1, 5), (5, 60))), strict=True)
        for whole, cut in zip(function(slice(60)), parts, strict=True):
            assert torch.equal(whole, torch.cat(cut))


@pytest.mark.usefixtures("either_code")
@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_gives_the_reference_for_any_width_and_for_numbers_that_are_none(dtype: torch.dtype) -> None:
    for num_tokens, width in ((0, 16), (1, 32), (300, 21)):
        x = 3 * random(num_tokens, 2 * width, dtype=dtype)
        assert_close(kernels.swiglu(x), swiglu_reference(x))
    gates = [torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, torch.finfo(dtype).min, -104.0, -88.0, 0.0]
    x = torch.tensor([[*gates, *[2.0] * len(gates)]], dtype=dtype)
    torch.testing.assert_close(kernels.swiglu(x), swiglu_reference(x), equal_nan=True)


@needs_own_code
def test_our_code_rounds_to_even_and_keeps_nan_and_infinity() -> None:
    x = torch.tensor([[1.0, 2.0**-8], [1.0, 3 * 2.0**-8], [torch.nan, 1.0], [torch.inf, 1.0]], dtype=BF16)
    y = kernels.linear(x, kernels.pack_linear(torch.ones(16, 2, dtype=BF16)))
    assert y[0].eq(1.0).all() and y[1].eq(1 + 2.0**-6).all() and y[2].isnan().all() and y[3].isinf().all()


@needs_own_code
def test_our_code_refuses_what_it_would_read_as_something_else() -> None:
    x, packed = random(2, 64, dtype=BF16), kernels.pack_linear(random(16, 64, dtype=BF16))
    with pytest.raises(ValueError, match="rows of 32, the weight's have 64"):
        kernels.linear(x[:, :32], packed)
    with pytest.raises(ValueError, match="float32"):
        kernels.linear(x.float(), packed)
    packed_experts = kernels.pack_experts(make_experts((32, 32), 64, BF16))
    for least, most in ((-1, 1), (0, 2)):
        ids = torch.tensor([[0, most], [least, 1]], dtype=torch.int32)
        with pytest.raises(ValueError, match=f"expert ids are {least} to {most}, limit is 0 to 1"):
            kernels.moe_experts(x, packed_experts, torch.ones(2, 2), ids)


@pytest.mark.usefixtures("either_code")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(8, 2), (40, 40), (128, 8)])
def test_tokens_are_routed_as_by_the_reference_lower_ids_first(
    dtype: torch.dtype, renormalize: bool, num_experts: int, top_k: int
) -> None:
    for num_tokens in (0, 1, 300):
        logits = random(num_tokens, num_experts, seed=num_tokens, dtype=torch.bfloat16).to(dtype)  # many are equal
        actual, expected = kernels.route(logits, top_k, renormalize), route_reference(logits, top_k, renormalize)
        assert_close(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


@needs_own_code
def test_our_exponential_is_as_exact_as_float32() -> None:
    exponents = torch.linspace(-87, 0, 999).to(BF16)
    weights, _ = kernels.route(torch.stack((torch.zeros(999, dtype=BF16), exponents), 1), 2, False)
    ratios = weights[:, 1].double() / weights[:, 0].double()
    torch.testing.assert_close(ratios, exponents.double().exp(), rtol=4e-7, atol=0)


@needs_own_code
def test_a_token_of_nan_is_routed_to_experts_that_exist() -> None:
    logits = random(2, 32, dtype=BF16)
    logits[0] = torch.nan
    logits[1, 3] = torch.nan
    weights, ids = kernels.route(logits, 4, True)
    assert weights.isnan().all() and ids.ge(0).all() and ids.lt(32).all()
    assert all(len(set(row)) == 4 for row in ids.tolist())


@pytest.mark.usefixtures("only_onednn")
@pytest.mark.parametrize("shape", [(32, 192), (7, 48), (128, 40), (100, 64)])
def test_a_weight_that_packing_would_enlarge_stays_plain(shape: tuple[int, int]) -> None:
    weight = random(*shape, dtype=torch.bfloat16)
    assert kernels.pack_linear(weight) is weight
    x = random(3, shape[1], dtype=torch.bfloat16)
    assert_close(kernels.linear(x, weight), x.double() @ weight.double().T)


def test_numbers_of_rows_are_padded_little_and_take_few_values() -> None:
    counts = torch.arange(2049).numpy()
    padded = padded_rows(counts)
    assert (padded >= counts).all() and (padded[counts > 3] < 1.5 * counts[counts > 3] + 1).all()
    assert padded[0] == 0 and (padded[counts > 256] < 1.13 * counts[counts > 256]).all()
    assert len(set(padded.tolist())) < 80


def make_experts(widths: tuple[int, ...], hidden: int, dtype: torch.dtype) -> ExpertWeights:
    total = sum(widths)
    offsets = [sum(widths[:e]) for e in range(len(widths) + 1)]
    gate_up = random(2 * total, hidden, seed=1) * hidden**-0.5
    down = random(hidden * total, seed=2) * max(widths) ** -0.5
    return ExpertWeights(gate_up.to(dtype), down.to(dtype), torch.tensor(offsets, dtype=torch.int32), widths)


@pytest.mark.usefixtures("either_code")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("widths", [(64,) * 8, (64, 0, 128, 128, 64, 48, 0, 16), (64, 0, 128, 128, 64, 40, 0, 7)])
@pytest.mark.parametrize("num_tokens", [0, 1, 3, 17, 300])
def test_packed_experts_add_the_parts_of_the_plain_ones(
    dtype: torch.dtype, widths: tuple[int, ...], num_tokens: int
) -> None:
    hidden = 144  # neither pairs of strips nor kDownBlock divide it
    experts = make_experts(widths, hidden, dtype)
    packed = kernels.pack_experts(experts)
    assert isinstance(packed, PackedExperts | StripExperts)
    x = random(num_tokens, hidden, seed=3, dtype=dtype)
    weights, expert_ids = route_reference(random(num_tokens, len(widths), seed=4), 3, True)
    y = kernels.moe_experts(x, packed, weights, expert_ids)
    assert y.dtype == dtype
    assert_close(y, moe_experts_reference(x, experts, weights, expert_ids))


@pytest.mark.usefixtures("either_code")
@pytest.mark.parametrize(("dtype", "num_tokens"), [(torch.float32, 600), (torch.bfloat16, 600), (torch.bfloat16, 40)])
def test_experts_work_with_all_tokens_on_one_and_with_none_here(dtype: torch.dtype, num_tokens: int) -> None:
    experts = make_experts((0, 64, 64), 64, dtype)
    packed = kernels.pack_experts(experts)
    x = random(num_tokens, 64, seed=3, dtype=dtype)  # 600 are more rows than a run has
    for expert in range(3):
        ids, weights = torch.full((num_tokens, 1), expert, dtype=torch.int32), torch.full((num_tokens, 1), 0.7)
        y = kernels.moe_experts(x, packed, weights, ids)
        assert_close(y, moe_experts_reference(x, experts, weights, ids))
        assert bool(y.any()) == (expert > 0)


def test_a_tokens_experts_give_the_same_whatever_the_batch_in_float32() -> None:
    packed = kernels.pack_experts(make_experts((64,) * 8, 64, torch.float32))
    x = random(40, 64, seed=3)
    weights, ids = route_reference(random(40, 8, seed=4), 2, True)
    together = kernels.moe_experts(x, packed, weights, ids)
    alone = torch.cat(
        [kernels.moe_experts(x[t : t + 1], packed, weights[t : t + 1], ids[t : t + 1]) for t in range(40)]
    )
    assert_close(together, alone)


@pytest.mark.usefixtures("only_onednn")
def test_packing_keeps_nothing_of_the_plain_experts() -> None:
    experts = make_experts((64, 40), 64, torch.bfloat16)  # the second cannot be packed
    packed = kernels.pack_experts(experts)
    assert isinstance(packed, PackedExperts)
    kept = {w.untyped_storage().data_ptr() for w in (*packed.gate_up, *packed.down) if not w.is_mkldnn}
    assert kept and not kept & {w.untyped_storage().data_ptr() for w in (experts.gate_up, experts.down)}


def test_fp8_experts_stay_as_they_are() -> None:
    plain = make_experts((128, 128), 128, torch.float32)
    gate_up, gate_up_scale = quantize_blocks(plain.gate_up)
    down = [quantize_blocks(part.view(128, 128)) for part in plain.down.split(128 * 128)]
    experts = ExpertWeights(
        gate_up,
        torch.cat([weight.flatten() for weight, _ in down]),
        plain.offsets,
        plain.widths,
        gate_up_scale,
        torch.cat([scale.flatten() for _, scale in down]),
    )
    assert kernels.pack_experts(experts) is experts
    x = random(5, 128, seed=3)
    weights, ids = route_reference(random(5, 2, seed=4), 1, True)
    y = kernels.moe_experts(x, kernels.pack_experts(experts), weights, ids)
    assert torch.equal(y, moe_experts_reference(x, experts, weights, ids))


NO_SEQUENCES = torch.zeros((0, 1), dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
NO_CHUNKS = torch.zeros((0, 1), dtype=torch.int32), torch.zeros(1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)


def plan_of(
    cache: Tensor,
    num_tokens: int,
    decodes: tuple[Tensor, Tensor] = NO_SEQUENCES,
    prompts: tuple[Tensor, Tensor, Tensor] = NO_CHUNKS,
    slots: Tensor | None = None,
) -> kernels.StepPlan:
    """The plan of a step whose token i stands at position i modulo 50."""
    angles = random(50, cache.shape[-1] // 2, seed=9)
    tables = kernels.StepTables(
        cos_sin=torch.cat((angles.cos(), angles.sin()), 1),
        positions=torch.arange(num_tokens, dtype=torch.int32) % 50,
        slots=torch.arange(num_tokens, dtype=torch.int32) if slots is None else slots,
        decode_tables=decodes[0],
        decode_lens=decodes[1],
        prefill_tables=prompts[0],
        prefill_starts=prompts[1],
        prefill_lens=prompts[2],
    )
    return kernels.plan_step(cache, tables)


@pytest.mark.usefixtures("either_code")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_sorted", [False, True])
def test_decoding_sequences_attend_to_their_own_pages_alone(dtype: torch.dtype, is_sorted: bool) -> None:
    lens = [1, 4, 5, 0, 33, 8, 1700, 16, 17, 40, 41, 40]  # several chunks; one sequence without tokens
    lens = sorted(lens, reverse=True) if is_sorted else lens
    pages = Pages(lens, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    q = random(len(lens), 6, 8, dtype=dtype)
    plan = plan_of(pages.k_cache, len(lens), (pages.tables, pages.lens))
    if not bf16_cpu.serves(pages.k_cache):
        assert plan.cpu is not None
        assert len(plan.cpu.decodes) > 3 and (plan.cpu.order is None) == is_sorted
    y = kernels.paged_attention(q, plan, pages.k_cache, pages.v_cache, 0.35)
    expected = attention_decode_reference(q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, 0.35)
    assert_close(y, expected)


@pytest.mark.parametrize("lens", [[7], [12, 12], [9, 8, 7]])
def test_a_step_of_one_chunk_attends_like_any_other(lens: list[int]) -> None:
    pages = Pages(lens, num_kv_heads=2, head_dim=8, block_size=4, dtype=torch.float32)
    q = random(len(lens), 4, 8)
    plan = plan_of(pages.k_cache, len(lens), (pages.tables, pages.lens))
    y = kernels.paged_attention(q, plan, pages.k_cache, pages.v_cache, 0.35)
    for s, length in enumerate(lens):
        assert_close(y[s], pages.attend(q[s], s, length, 0.35))


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_attend_causally_after_a_cached_prefix_and_across_tiles(dtype: torch.dtype) -> None:
    pages = Pages([5, 9, 12, 3, 700], num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    starts = torch.tensor([0, 5, 6, 6, 8, 8 + 600], dtype=torch.int32)  # whole, one token, none, two of three, a prefix
    assert 600 > 2 * TILE
    q = random(608, 4, 8, dtype=dtype)
    plan = plan_of(pages.k_cache, 608, prompts=(pages.tables, starts, pages.lens))
    y = kernels.paged_attention(q, plan, pages.k_cache, pages.v_cache, 0.35)
    expected = attention_prefill_reference(q, pages.k_cache, pages.v_cache, pages.tables, starts, pages.lens, 0.35)
    assert_close(y, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_decodes_and_prompts_of_one_step_do_not_mix(dtype: torch.dtype) -> None:
    pages = Pages([9, 30, 20, 25], num_kv_heads=1, head_dim=8, block_size=4, dtype=dtype)
    q = random(2 + 45, 2, 8, dtype=dtype)
    prompts = pages.tables[2:], torch.tensor([0, 20, 45], dtype=torch.int32), pages.lens[2:]
    plan = plan_of(pages.k_cache, 47, (pages.tables[:2], pages.lens[:2]), prompts)
    y = kernels.paged_attention(q, plan, pages.k_cache, pages.v_cache, 0.35)
    for row, s in ((0, 0), (1, 1)):
        assert_close(y[row], pages.attend(q[row], s, int(pages.lens[s]), 0.35))
    for row, s, length in ((2, 2, 1), (21, 2, 20), (22, 3, 1), (46, 3, 25)):
        assert_close(y[row], pages.attend(q[row], s, length, 0.35))


def test_attention_of_a_step_without_tokens_is_empty() -> None:
    cache = torch.zeros(2, 4, 2, 8)
    assert kernels.paged_attention(torch.zeros(0, 4, 8), plan_of(cache, 0), cache, cache, 1.0).shape == (0, 4, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
@pytest.mark.parametrize("hidden", [64, 41])
def test_norms_give_the_reference(dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    x, residual = random(num_tokens, hidden, seed=1, dtype=dtype), random(num_tokens, hidden, seed=2, dtype=dtype)
    weight = random(hidden, seed=3, dtype=dtype)
    before = x.clone()
    assert_close(kernels.rms_norm(x, weight, 1e-6), rms_norm_reference(x, weight, 1e-6))
    assert torch.equal(x, before)
    for actual, expected in zip(
        kernels.add_rms_norm(x, residual, weight, 1e-6), add_rms_norm_reference(x, residual, weight, 1e-6), strict=True
    ):
        assert_close(actual, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 300])
@pytest.mark.parametrize(("has_padding", "head_dim"), [(False, 16), (True, 16), (True, 38)])
def test_rotated_heads_and_what_they_leave_in_the_cache_are_the_references(
    dtype: torch.dtype, num_tokens: int, has_padding: bool, head_dim: int
) -> None:
    slots = torch.randperm(400, generator=torch.Generator().manual_seed(0))[:num_tokens].to(torch.int32)
    if has_padding:
        slots[::3] = -1
    qkv = random(num_tokens, 4 + 2 + 2, head_dim, dtype=dtype)
    q_norm, k_norm = random(head_dim, seed=4, dtype=dtype), random(head_dim, seed=5, dtype=dtype)
    caches, expected = ([torch.full((100, 4, 2, head_dim), -9.0, dtype=dtype) for _ in range(2)] for _ in range(2))
    plan = plan_of(caches[0], num_tokens, slots=slots)
    q = kernels.cache_heads(qkv, kernels.HeadNorms.of(q_norm, k_norm, 4, 2), 1e-6, plan, *caches)
    tables = plan.tables
    q_expected = qk_norm_rope_cache_reference(
        *(*qkv.split((4, 2, 2), dim=1), q_norm, k_norm, 1e-6),
        *(tables.cos_sin, tables.positions, slots, *expected),
    )
    assert_close(q, q_expected)
    for actual, reference in zip(caches, expected, strict=True):
        assert_close(actual, reference)
