"""The torch references of `kernels` against loops over single numbers and against published vectors."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import kernels
from kernels.sampling import philox_reference, uniform_reference
from tests.kernels.tensors import Pages, assert_close, random

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_adds_then_divides_by_the_root_mean_square(dtype: torch.dtype) -> None:
    x, residual, weight = (random(3, 8, seed=i, dtype=dtype) for i in range(3))
    normed, total = kernels.add_rms_norm(x, residual, weight[0], 1e-6)
    assert_close(total, x.double() + residual.double())
    for t in range(3):
        mean_square = sum(float(value) ** 2 for value in total[t]) / 8
        assert_close(normed[t], total[t].double() / math.sqrt(mean_square + 1e-6) * weight[0].double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_is_silu_of_the_first_half_times_the_second(dtype: torch.dtype) -> None:
    x = random(5, 14, dtype=dtype)
    gate, up = x[:, :7].double(), x[:, 7:].double()
    assert_close(kernels.swiglu(x), gate / (1 + torch.exp(-gate)) * up)


def test_rope_turns_each_pair_by_its_position_and_skips_slot_minus_one() -> None:
    T, D = 4, 6
    q, k, v = random(T, 2, D, seed=1), random(T, 1, D, seed=2), random(T, 1, D, seed=3)
    q_weight, k_weight = random(D, seed=4), random(D, seed=5)
    angles = torch.arange(10).unsqueeze(1) * torch.tensor([1.0, 0.3, 0.1])  # [P, D/2]
    positions, slots = torch.tensor([0, 7, 2, 9]), torch.tensor([5, -1, 0, 7])
    k_cache, v_cache = torch.full((3, 4, 1, D), math.nan), torch.full((3, 4, 1, D), math.nan)
    out = kernels.qk_norm_rope_cache(
        q,
        k,
        v,
        q_weight,
        k_weight,
        1e-6,
        torch.cat((angles.cos(), angles.sin()), 1),
        positions,
        slots,
        k_cache,
        v_cache,
    )

    def turned(head: Tensor, weight: Tensor, position: int) -> Tensor:
        normed = head.double() / math.sqrt(float((head.double() ** 2).mean()) + 1e-6) * weight.double()
        pairs = torch.complex(normed[: D // 2], normed[D // 2 :])
        pairs = pairs * torch.polar(torch.ones(D // 2, dtype=torch.float64), angles[position].double())
        return torch.cat((pairs.real, pairs.imag))

    for t in range(T):
        for head in range(2):
            assert_close(out[t, head], turned(q[t, head], q_weight, int(positions[t])))
    flat_k, flat_v = k_cache.view(12, D), v_cache.view(12, D)
    for t in (0, 2, 3):
        assert_close(flat_k[slots[t]], turned(k[t, 0], k_weight, int(positions[t])))
        assert torch.equal(flat_v[slots[t]], v[t, 0])
    written = ~flat_k.isnan().any(dim=1)
    assert written.nonzero().squeeze(1).tolist() == [0, 5, 7]


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_attends_over_exactly_the_tokens_of_each_sequence(dtype: torch.dtype) -> None:
    pages = Pages([1, 4, 5, 0, 33, 8], num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    q = random(6, 6, 8, dtype=dtype)
    out = kernels.attention_decode(q, pages.k_cache, pages.v_cache, pages.tables, pages.lens, 0.35)
    for s, length in enumerate(pages.lens.tolist()):
        expected = pages.attend(q[s], s, length, 0.35) if length else torch.zeros(6, 8)
        assert_close(out[s], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prefill_is_causal_after_a_cached_prefix(dtype: torch.dtype) -> None:
    pages = Pages([5, 9, 12, 3], num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    starts = [0, 5, 6, 6, 8]  # whole prompt, one token, no token, the last two of three
    q = random(8, 4, 8, dtype=dtype)
    out = kernels.attention_prefill(
        q, pages.k_cache, pages.v_cache, pages.tables, torch.tensor(starts, dtype=torch.int32), pages.lens, 0.35
    )
    for s, context_len in enumerate(pages.lens.tolist()):
        for row in range(starts[s], starts[s + 1]):
            length = context_len - (starts[s + 1] - row) + 1
            assert_close(out[row], pages.attend(q[row], s, length, 0.35))


def test_attention_of_no_sequences_is_empty() -> None:
    cache, q = torch.zeros(2, 4, 2, 8), torch.zeros(0, 4, 8)
    tables, lens = torch.zeros(0, 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    assert kernels.attention_decode(q, cache, cache, tables, lens, 1.0).shape == (0, 4, 8)
    starts = torch.zeros(1, dtype=torch.int32)
    assert kernels.attention_prefill(q, cache, cache, tables, starts, lens, 1.0).shape == (0, 4, 8)


def test_routing_takes_the_best_experts_and_the_lower_id_on_ties() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0]])
    weights, experts = kernels.route(logits, 3, True)
    assert experts.tolist() == [[1, 2, 3], [0, 1, 2]] and experts.dtype == torch.int32
    scores = [math.exp(3), math.exp(3), math.exp(2)]
    assert_close(weights[0], torch.tensor([score / sum(scores) for score in scores]))
    raw, _ = kernels.route(logits, 3, False)
    assert_close(raw[0], torch.tensor([score / (sum(scores) + math.exp(1)) for score in scores]))
    gated, _ = kernels.route(logits, 1, False, "sigmoid")
    assert_close(gated[:, 0], torch.tensor([1 / (1 + math.exp(-3)), 0.5]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_experts_of_any_width_add_their_weighted_part(dtype: torch.dtype) -> None:
    T, hidden, widths = 9, 16, (6, 0, 3, 8, 5)
    offsets = [sum(widths[:e]) for e in range(len(widths) + 1)]
    gate_up, down = (
        random(2 * offsets[-1], hidden, seed=1, dtype=dtype),
        random(hidden * offsets[-1], seed=2, dtype=dtype),
    )
    experts = kernels.ExpertWeights(gate_up, down, torch.tensor(offsets, dtype=torch.int32), widths)
    x = random(T, hidden, seed=3, dtype=dtype)
    weights, expert_ids = kernels.route(random(T, 4, seed=4), 2, True)  # nobody is sent to expert 4
    expected = torch.zeros(T, hidden, dtype=torch.float64)
    for t in range(T):
        for weight, e in zip(weights[t].tolist(), expert_ids[t].tolist(), strict=True):
            o, width = offsets[e], widths[e]
            gate = gate_up[2 * o : 2 * o + width].double() @ x[t].double()
            up = gate_up[2 * o + width : 2 * (o + width)].double() @ x[t].double()
            matrix = down[hidden * o : hidden * (o + width)].view(hidden, width).double()
            expected[t] += weight * (matrix @ (torch.nn.functional.silu(gate) * up))
    assert_close(kernels.moe_experts(x, experts, weights, expert_ids), expected)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_known_answers_of_random123(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    c0, c1, c2, c3, k0, k1 = (torch.tensor([word]) for word in (*counter, *key))
    assert tuple(int(word) for word in philox_reference((c0, c1, c2, c3), (k0, k1))) == words


def test_uniform_numbers_depend_on_all_of_seed_choice_and_index() -> None:
    seeds = torch.tensor([0, 1, 1 << 40, 0, 0, -1])
    u = uniform_reference(seeds, torch.tensor([0, 0, 0, 1, 0, 0]), torch.tensor([0, 0, 0, 0, 1, 0]))
    assert float(u[0]) == (0x6627E8D5 >> 8) / 2**24
    assert len(set(u.tolist())) == 6 and bool(((u >= 0) & (u < 1)).all())


def sample(logits: Tensor, n: int = 1, **limits: float) -> list[int]:
    """`n` samples of one row of logits, with seeds 0 to n - 1."""
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
    temperature, top_k, top_p, min_p = (
        torch.full((n,), settings[key]) for key in ("temperature", "top_k", "top_p", "min_p")
    )
    zero = torch.zeros(n, dtype=torch.int32)
    ids = kernels.sample(
        logits.expand(n, -1), temperature, top_k.to(torch.int32), top_p, min_p, torch.arange(n), zero, zero
    )
    return ids.tolist()


def test_temperature_zero_takes_the_lowest_of_equal_maxima() -> None:
    assert sample(torch.tensor([1.0, 5.0, 5.0, 0.0]), temperature=0.0) == [1]


def test_samples_follow_the_distribution_in_id_order() -> None:
    probabilities = torch.tensor([0.1, 0.0, 0.4, 0.2, 0.3])
    ids = sample(probabilities.log(), n=4000)
    shares = torch.bincount(torch.tensor(ids), minlength=5) / 4000
    torch.testing.assert_close(shares, probabilities, rtol=0, atol=0.03)
    u = uniform_reference(torch.arange(4000), torch.zeros(4000), torch.zeros(4000))
    bounds = torch.tensor([0.1, 0.5, 0.7])
    assert ids == [(0, 2, 3, 4)[i] for i in torch.bucketize(u, bounds.double(), right=True)]


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 1}, {4}),
        ({"top_k": 2}, {1, 2, 4}),  # 1 and 2 tie
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.0}, {4}),
        ({"top_p": 0.39}, {4}),
        ({"top_p": 0.41}, {1, 2, 4}),
        ({"top_p": 0.9}, {1, 2, 3, 4}),
        ({"top_k": 3, "top_p": 0.45}, {4}),  # of the 0.8 that top_k leaves, 0.4 are half
        ({"min_p": 0.45}, {1, 2, 4}),
        ({"min_p": 1.0}, {4}),
        ({"top_k": 4, "top_p": 0.99, "min_p": 0.3}, {1, 2, 3, 4}),
    ],
)
def test_limits_keep_exactly_the_tokens_they_name(limits: dict[str, float], kept: set[int]) -> None:
    logits = torch.tensor([0.05, 0.2, 0.2, 0.15, 0.4]).log()
    assert set(sample(logits, n=300, **limits)) == kept


def test_a_nucleus_wider_than_the_quick_look_is_still_exact() -> None:
    probabilities = torch.cat((torch.full((4000,), 2.0), torch.full((1000,), 1.0)))
    ids = sample(probabilities.log(), n=200, top_p=0.88)
    assert max(ids) < 4000  # 0.889 of the mass lies on the first 4000
    assert max(sample(probabilities.log(), n=200, top_p=0.95)) >= 4000


def test_a_row_samples_the_same_whatever_the_rows_around_it() -> None:
    logits, n = random(40, 50), 40
    args = {
        "temperature": torch.linspace(0, 2, n),
        "top_k": torch.arange(n) % 7,
        "top_p": torch.linspace(1, 0.2, n),
        "min_p": torch.linspace(0, 0.2, n),
        "seeds": torch.arange(n) << 33,
        "choices": torch.arange(n) % 3,
        "output_indices": torch.arange(n),
    }
    together = kernels.sample(logits, **args)
    alone = [
        kernels.sample(logits[i : i + 1], **{name: arg[i : i + 1] for name, arg in args.items()}) for i in range(n)
    ]
    assert together.tolist() == [int(ids) for ids in alone]
