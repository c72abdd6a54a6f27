"""Sampling and penalties under the interpreter, against their references."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import kernels
from kernels.sampling import penalize_reference, philox_reference, sample_reference
from tests.kernels.tensors import assert_close, random


@triton.jit
def _words_kernel(seeds_ptr, indices_ptr, choices_ptr, out_ptr):
    i = tl.program_id(0)
    index = tl.load(indices_ptr + i).to(tl.uint32)
    choice = tl.load(choices_ptr + i).to(tl.uint32)
    word, _, _, _ = tl.philox(tl.load(seeds_ptr + i), index, choice, choice * 0, choice * 0)
    tl.store(out_ptr + i, word.to(tl.int64))


def test_the_generator_equals_the_reference_bit_for_bit() -> None:
    n, most = 64, torch.iinfo(torch.int64).max
    seeds = torch.randint(-most, most, (n,), generator=torch.Generator().manual_seed(0))
    seeds[:3] = torch.tensor([0, -1, 1 << 32])
    indices, choices = torch.arange(n, dtype=torch.int32) * 977, torch.arange(n, dtype=torch.int32) % 5
    words = torch.zeros(n, dtype=torch.int64)
    _words_kernel[(n,)](seeds, indices, choices, words)
    zero, mask = torch.zeros_like(seeds), 0xFFFFFFFF
    counter = (indices.to(torch.int64), choices.to(torch.int64), zero, zero)
    assert torch.equal(words, philox_reference(counter, (seeds & mask, (seeds >> 32) & mask))[0])


def test_a_flat_distribution_shows_the_high_bits_of_the_random_number() -> None:
    n, V = 32, 1024
    args = (torch.ones(n), torch.zeros(n, dtype=torch.int32), torch.ones(n), torch.zeros(n), torch.arange(n) << 30)
    counters = (torch.arange(n, dtype=torch.int32) % 3, torch.arange(n, dtype=torch.int32))
    assert torch.equal(
        kernels.sample(torch.zeros(n, V), *args, *counters), sample_reference(torch.zeros(n, V), *args, *counters)
    )


@pytest.mark.parametrize("V", [1, 5, 640, 2048, 2049, 5000])
@pytest.mark.parametrize(
    "limits",
    [
        {"temperature": 0.0},
        {},
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_k": 20},
        {"top_k": 20, "top_p": 0.95, "temperature": 0.6},
        {"top_p": 0.9},
        {"top_p": 0.0},
        {"min_p": 0.05},
        {"top_k": 40, "top_p": 0.7, "min_p": 0.1},
    ],
    ids=str,
)
def test_samples_equal_their_reference(V: int, limits: dict[str, float]) -> None:
    n = 6
    settings = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **limits}
    logits = random(n, V) * 3
    logits[::2] = (logits[::2] * 2).round() / 2  # many ties, both zeros
    temperature, top_p, min_p = (torch.full((n,), settings[name]) for name in ("temperature", "top_p", "min_p"))
    top_k = torch.full((n,), int(settings["top_k"]), dtype=torch.int32)
    counters = (torch.arange(n), torch.zeros(n, dtype=torch.int32), torch.arange(n, dtype=torch.int32))
    args = (logits, temperature, top_k, top_p, min_p, *counters)
    assert torch.equal(kernels.sample(*args), sample_reference(*args))


def test_a_vocabulary_of_151936_is_sampled_within_bounds() -> None:
    logits = random(1, 151_936)
    row = (torch.ones(1), torch.zeros(1, dtype=torch.int32), torch.ones(1), torch.zeros(1), torch.tensor([5]))
    counters = (torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    assert torch.equal(kernels.sample(logits, *row, *counters), sample_reference(logits, *row, *counters))


def test_sampling_no_rows_gives_no_tokens() -> None:
    none, no_ids = torch.zeros(0), torch.zeros(0, dtype=torch.int32)
    ids = kernels.sample(torch.zeros(0, 8), none, no_ids, none, none, no_ids.to(torch.int64), no_ids, no_ids)
    assert ids.shape == (0,)


@pytest.mark.parametrize(("N", "V"), [(0, 8), (1, 1), (3, 2047), (2, 2049)])
def test_penalties_equal_their_reference(N: int, V: int) -> None:
    counts = (random(N, V, seed=1).relu() * 2).to(torch.int32)
    in_prompt = random(N, V, seed=2) > 1
    rows = (torch.linspace(1, 2, N), torch.linspace(-1, 1, N), torch.linspace(0.5, 0, N))
    actual, expected = random(N, V), random(N, V)
    assert_close(
        kernels.penalize(actual, counts, in_prompt, *rows), penalize_reference(expected, counts, in_prompt, *rows)
    )
