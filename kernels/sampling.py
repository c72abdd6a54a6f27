"""Logits to token ids, with one random number for each output token.

The random number is a function of (seed, choice, output index) alone: the first word of Philox4x32-10 (Salmon et
al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with the seed as key and (output index, choice, 0, 0) as
counter. So the numbers do not depend on the batch around a row, and a stream that continues on another replica draws
the same ones. The logits are equal up to the rounding of the dtype, since that of a matmul depends on its number of
rows: tokens are equal in float32, but for draws within rounding of a boundary, and may differ in bfloat16, unless
bf16_cpu.py computes it.

The rule, for one row:
  temperature 0    the most likely token, the lowest id on ties
  otherwise        1. logits / temperature, softmax
                   2. top_k (0 keeps all): keep the tokens no less likely than the k-th; all that tie with it are kept
                   3. top_p: of the mass that is left, keep the smallest set of most likely tokens whose sum reaches
                      top_p, and all that tie with the last of them
                   4. min_p: drop tokens less likely than min_p times the most likely one
                   5. the first token, in the order of ids, at which the running sum of the kept mass exceeds u * total
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.aot_case import AotCase
from kernels.device import check_rows

PHILOX_ROUNDS: Final = 10
PHILOX_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
PHILOX_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
UNIFORM_STEP: Final = 2.0**-24  # the 24 high bits of a word make a float32 in [0, 1) without rounding
_WORD: Final = 0xFFFFFFFF
_ROWS_AT_ONCE: Final = 16  # bounds the float64 temporaries: 151,936 tokens x 16 rows are 19 MB each
_MOST_NUCLEUS: Final = 1024  # top_p looks among so many tokens before it sorts the vocabulary
_BLOCK_V: Final = 2048


@triton.jit
def _sort_key(x):
    """float32 -> uint32 in the same order; both zeros have one key."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _load_logits(row_ptr, offs_v, V):
    return tl.load(row_ptr + offs_v, mask=offs_v < V, other=float("-inf"))


@triton.jit
def _threshold(row_ptr, V, peak, temperature, floor, target, BY_MASS: tl.constexpr, BLOCK_V: tl.constexpr):
    """The largest key at which the tokens of no lower key (and none below `floor`) reach `target`.

    Reach in number, or BY_MASS in exp((logit - peak) / temperature). Finds four bits of the key in each pass over V.
    """
    candidates = tl.arange(0, 16).to(tl.uint32)
    key = floor * 0
    for shift in range(28, -1, -4):
        bounds = key + (candidates << shift)
        reached = tl.zeros([16], tl.float64)
        for v in range(0, V, BLOCK_V):
            offs_v = v + tl.arange(0, BLOCK_V)
            x = _load_logits(row_ptr, offs_v, V)
            keys = _sort_key(x)
            weight = tl.exp((x - peak) / temperature) if BY_MASS else tl.full([BLOCK_V], 1.0, tl.float32)
            weight = tl.where((offs_v < V) & (keys >= floor), weight, 0.0)
            reached += tl.sum(tl.where(keys[None, :] >= bounds[:, None], weight[None, :], 0.0), axis=1).to(tl.float64)
        digit = tl.max(tl.where((reached >= target) & (reached > 0), tl.arange(0, 16), 0), axis=0)
        key += digit.to(tl.uint32) << shift
    return key


@triton.jit
def _kept_mass(row_ptr, offs_v, V, peak, temperature, floor, min_p):
    """exp((logit - peak) / temperature) of the tokens that are kept, 0 elsewhere."""
    x = _load_logits(row_ptr, offs_v, V)
    mass = tl.exp((x - peak) / temperature)
    return tl.where((offs_v < V) & (_sort_key(x) >= floor) & (mass >= min_p), mass, 0.0)


@triton.jit
def _sample_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    choices_ptr,
    output_indices_ptr,
    ids_ptr,
    stride_ln,
    V,
    BLOCK_V: tl.constexpr,
):
    """ids [N]. Grid (N,): a program passes over its row (in L2) as often as the limits need, and never sorts it."""
    n = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + n * stride_ln
    lanes = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    best_v = tl.zeros([BLOCK_V], tl.int32)
    for v in range(0, V, BLOCK_V):
        x = _load_logits(row_ptr, v + lanes, V)
        best_v = tl.where(x > best, v + lanes, best_v)
        best = tl.maximum(x, best)
    peak = tl.max(best, axis=0)
    token = tl.min(tl.where(best == peak, best_v, V - 1), axis=0)
    temperature = tl.load(temperature_ptr + n)
    if temperature > 0:
        top_k = tl.load(top_k_ptr + n)
        top_p = tl.load(top_p_ptr + n)
        min_p = tl.load(min_p_ptr + n)
        floor = (top_k * 0).to(tl.uint32)
        if (top_k > 0) & (top_k < V):
            floor = _threshold(row_ptr, V, peak, temperature, floor, top_k.to(tl.float64), False, BLOCK_V)
        if top_p < 1:
            mass = tl.zeros([BLOCK_V], tl.float64)
            for v in range(0, V, BLOCK_V):
                mass += _kept_mass(row_ptr, v + lanes, V, peak, temperature, floor, 0.0)
            target = top_p.to(tl.float64) * tl.sum(mass, axis=0)
            floor = tl.maximum(floor, _threshold(row_ptr, V, peak, temperature, floor, target, True, BLOCK_V))
        mass = tl.zeros([BLOCK_V], tl.float64)
        for v in range(0, V, BLOCK_V):
            mass += _kept_mass(row_ptr, v + lanes, V, peak, temperature, floor, min_p)
        choice = tl.load(choices_ptr + n).to(tl.uint32)
        index = tl.load(output_indices_ptr + n).to(tl.uint32)
        word, _, _, _ = tl.philox(tl.load(seeds_ptr + n), index, choice, choice * 0, choice * 0)
        target = (word >> 8).to(tl.float64) * 5.9604644775390625e-08 * tl.sum(mass, axis=0)
        running = tl.sum(tl.zeros([BLOCK_V], tl.float64), axis=0)
        first = V
        last = 0
        for v in range(0, V, BLOCK_V):
            kept = _kept_mass(row_ptr, v + lanes, V, peak, temperature, floor, min_p).to(tl.float64)
            above = running + tl.cumsum(kept, axis=0) > target
            first = tl.minimum(first, tl.min(tl.where(above & (kept > 0), v + lanes, V), axis=0))
            last = tl.maximum(last, tl.max(tl.where(kept > 0, v + lanes, 0), axis=0))
            running += tl.sum(kept, axis=0)
        token = tl.minimum(first, last)  # a sum in another order may fall short of the target by its last bit
    tl.store(ids_ptr + n, token)


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    output_indices: Tensor,
) -> Tensor:
    """logits [N, V] float32, everything else [N] -> token ids [N] int32, by the rule at the top of this file.

    The uniform numbers equal the reference's bit for bit; masses are float32, summed in float64.
    """
    check_rows(logits=logits)
    N, V = logits.shape
    ids = torch.empty(N, dtype=torch.int32, device=logits.device)
    if N:
        _sample_kernel[(N,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds.view(torch.int64),
            choices,
            output_indices,
            ids,
            logits.stride(0),
            V,
            BLOCK_V=_BLOCK_V,
            num_warps=8,
        )
    return ids


@triton.jit
def _penalize_kernel(
    logits_ptr,
    counts_ptr,
    prompt_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    stride_ln,
    stride_cn,
    stride_pn,
    V,
    BLOCK_V: tl.constexpr,
):
    """logits [N, V], in place. Grid (N, cdiv(V, BLOCK_V))."""
    n = tl.program_id(0).to(tl.int64)
    offs_v = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask_v = offs_v < V
    x = tl.load(logits_ptr + n * stride_ln + offs_v, mask=mask_v, other=0.0)
    count = tl.load(counts_ptr + n * stride_cn + offs_v, mask=mask_v, other=0)
    in_prompt = tl.load(prompt_ptr + n * stride_pn + offs_v, mask=mask_v, other=0)
    repetition = tl.load(repetition_ptr + n)
    x = tl.where((count > 0) | (in_prompt != 0), tl.where(x > 0, x / repetition, x * repetition), x)
    x -= tl.load(frequency_ptr + n) * count.to(tl.float32)
    x -= tl.where(count > 0, tl.load(presence_ptr + n), 0.0)
    tl.store(logits_ptr + n * stride_ln + offs_v, x, mask=mask_v)


def penalize(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Changes logits [N, V] float32 in place and returns them.

    counts [N, V] int32 says how often a row's output has each token, in_prompt [N, V] bool whether its prompt has it.
    Logits of tokens in either are divided by repetition [N] (multiplied if negative); then frequency [N] is taken off
    for each time in the output, and presence [N] once.
    """
    check_rows(logits=logits, counts=counts, in_prompt=in_prompt)
    N, V = logits.shape
    if N:
        _penalize_kernel[(N, triton.cdiv(V, _BLOCK_V))](
            logits,
            counts,
            in_prompt.view(torch.uint8),
            repetition,
            presence,
            frequency,
            logits.stride(0),
            counts.stride(0),
            in_prompt.stride(0),
            V,
            BLOCK_V=_BLOCK_V,
        )
    return logits


def penalize_reference(
    logits: Tensor, counts: Tensor, in_prompt: Tensor, repetition: Tensor, presence: Tensor, frequency: Tensor
) -> Tensor:
    """Plain torch."""
    factor = repetition.unsqueeze(1)
    repeated = torch.where(logits > 0, logits / factor, logits * factor)
    penalized = torch.where((counts > 0) | in_prompt, repeated, logits)
    penalized -= frequency.unsqueeze(1) * counts
    penalized -= presence.unsqueeze(1) * (counts > 0)
    return logits.copy_(penalized)


def philox_reference(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four words of Philox4x32-10. All words are int64 tensors of one shape that hold 32-bit values."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        # The products may pass 2^63; they wrap as two's complement, which keeps both 32-bit halves right.
        product0, product1 = c0 * PHILOX_MULTIPLIERS[0], c2 * PHILOX_MULTIPLIERS[1]
        high0, high1 = (product0 >> 32) & _WORD, (product1 >> 32) & _WORD
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, product1 & _WORD, high0 ^ c3 ^ k1, product0 & _WORD
        k0, k1 = (k0 + PHILOX_KEY_STEPS[0]) & _WORD, (k1 + PHILOX_KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def uniform_reference(seeds: Tensor, choices: Tensor, output_indices: Tensor) -> Tensor:
    """seeds [N] (64 bits: int64 or uint64), choices [N], output_indices [N] -> [N] float64 in [0, 1)."""
    seeds = seeds.view(torch.int64)
    zero = torch.zeros_like(seeds)
    counter = (output_indices.to(torch.int64) & _WORD, choices.to(torch.int64) & _WORD, zero, zero)
    word = philox_reference(counter, (seeds & _WORD, (seeds >> 32) & _WORD))[0]
    return (word >> 8).to(torch.float64) * UNIFORM_STEP


def sample_reference(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    choices: Tensor,
    output_indices: Tensor,
) -> Tensor:
    """Plain torch, in float64."""
    token_ids = torch.argmax(logits, dim=-1).to(torch.int32)  # argmax takes the lowest id on ties
    sampled = torch.nonzero(temperature > 0).squeeze(1)
    if not sampled.numel():
        return token_ids
    for rows in torch.tensor_split(sampled, -(-sampled.numel() // _ROWS_AT_ONCE)):
        scaled = logits[rows].to(torch.float64) / temperature[rows].to(torch.float64).unsqueeze(1)
        kept = _kept_mass_reference(scaled, top_k[rows], top_p[rows], min_p[rows])  # [n, V]
        running = kept.cumsum(dim=-1)
        target = uniform_reference(seeds[rows], choices[rows], output_indices[rows]).unsqueeze(1) * running[:, -1:]
        token_ids[rows] = torch.searchsorted(running, target, right=True).squeeze(1).to(torch.int32)
    return token_ids


def _kept_mass_reference(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """exp(scaled - max) [n, V] of the tokens that the limits keep, 0 elsewhere. Not normalised."""
    V = scaled.shape[1]
    mass = (scaled - scaled.max(dim=-1, keepdim=True).values).exp_()  # [n, V], 1 for the most likely token
    limited = torch.nonzero((top_k > 0) & (top_k < V)).squeeze(1)
    if limited.numel():
        largest = mass[limited].topk(int(top_k[limited].max()), dim=-1).values  # [n', max k]
        kth = largest.gather(1, top_k[limited].to(torch.int64).unsqueeze(1) - 1)
        mass[limited] = mass[limited].masked_fill_(mass[limited] < kth, 0.0)
    nucleus = torch.nonzero(top_p < 1).squeeze(1)
    if nucleus.numel():
        least = _nucleus_threshold(mass[nucleus], top_p[nucleus])
        mass[nucleus] = mass[nucleus].masked_fill_(mass[nucleus] < least, 0.0)
    # The most likely token has mass 1 and is never dropped, so min_p is its own threshold.
    return mass.masked_fill_(mass < min_p.to(torch.float64).unsqueeze(1), 0.0)


def _nucleus_threshold(mass: Tensor, top_p: Tensor) -> Tensor:
    """mass [n, V], top_p [n] -> [n, 1]: the least mass in the smallest set of likely tokens that reaches top_p."""
    V = mass.shape[1]
    target = top_p.to(torch.float64).unsqueeze(1) * mass.sum(dim=-1, keepdim=True)  # [n, 1]
    largest = mass.topk(min(V, _MOST_NUCLEUS), dim=-1).values
    if bool((largest.sum(dim=-1, keepdim=True) < target).any()):  # a flat distribution: sort all of it
        largest = mass.sort(dim=-1, descending=True).values
    crossing = torch.searchsorted(largest.cumsum(dim=-1), target)  # the first whose running sum is not below it
    return largest.gather(1, crossing.clamp_(max=largest.shape[1] - 1))


_ROW_SIGNATURE: Final = {"temperature_ptr": "*fp32", "top_k_ptr": "*i32", "top_p_ptr": "*fp32", "min_p_ptr": "*fp32"}
AOT_CASES = [
    AotCase(
        kernel=_sample_kernel,
        max_registers=128,
        name="any V",
        signature={
            "logits_ptr": "*fp32",
            **_ROW_SIGNATURE,
            "seeds_ptr": "*i64",
            **dict.fromkeys(("choices_ptr", "output_indices_ptr", "ids_ptr"), "*i32"),
            **dict.fromkeys(("stride_ln", "V"), "i32"),
        },
        constants={"BLOCK_V": _BLOCK_V},
        num_warps=8,
        unaligned=frozenset(("V",)),
    ),
    AotCase(
        kernel=_penalize_kernel,
        max_registers=128,
        name="any V",
        signature={
            "logits_ptr": "*fp32",
            "counts_ptr": "*i32",
            "prompt_ptr": "*u8",
            **dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr"), "*fp32"),
            **dict.fromkeys(("stride_ln", "stride_cn", "stride_pn", "V"), "i32"),
        },
        constants={"BLOCK_V": _BLOCK_V},
        unaligned=frozenset(("V",)),
    ),
]
