"""Every field that changes logits or reports them gives what transformers' logits and a few plain lines of torch give.

Greedy answers are checked by teacher forcing, as in test_parity_with_transformers.py.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from itertools import zip_longest
from typing import Any, Final

import pytest
import torch
from aiohttp import ClientSession
from torch import Tensor

from kernels.sampling import sample_reference
from tests.commands import DEMO_MODEL
from tests.e2e.test_parity_with_transformers import NEAR_TIE, load_reference
from tests.model_replica import ModelReplica, model_replica

TOLERANCE: Final = 1e-4
PROMPT: Final = "What is 12 + 30? Write it out, one and two and one and two."
COMPLETION: Final[dict[str, Any]] = {
    **{"prompt": PROMPT, "temperature": 0, "return_token_ids": True, "max_tokens": 24},
    "ignore_eos": True,  # as raw text the prompt is an odd one, and the model would have nothing to say
}
END_IDS: Final = (631, 633)


@pytest.fixture(scope="module")
def reference() -> Any:
    return load_reference(DEMO_MODEL, torch.float32)


@torch.inference_mode()
def raw_logits(reference: Any, token_ids: list[int]) -> Tensor:
    logits: Tensor = reference(torch.tensor([token_ids])).logits[0]  # [T, V]
    return logits


def edited(row: Tensor, prompt: list[int], output: list[int], fields: dict[str, Any]) -> Tensor:
    """What a token is chosen by, one plain operation after the other."""
    row = row.clone()
    for token_id, bias in fields.get("logit_bias", {}).items():
        row[int(token_id)] += bias
    repetition = fields.get("repetition_penalty", 1.0)
    for token_id in {*prompt, *output}:
        row[token_id] = row[token_id] / repetition if row[token_id] > 0 else row[token_id] * repetition
    for token_id, count in Counter(output).items():
        row[token_id] -= fields.get("presence_penalty", 0) + fields.get("frequency_penalty", 0) * count
    if len(output) < fields.get("min_tokens", 0):
        row[[*END_IDS, *fields.get("stop_token_ids", [])]] = -torch.inf
    return row


async def ask(replica: ModelReplica, path: str, body: dict[str, Any]) -> Any:
    async with ClientSession() as session, session.post(replica.url + path, json=body) as response:
        answer = await response.json()
        assert response.status == 200, answer
        return answer


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"presence_penalty": 1.5},
        {"presence_penalty": -2},
        {"frequency_penalty": 0.9},
        {"frequency_penalty": -0.5},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.8},
        {"logit_bias": {"87": 9.5, "16": -100, "300": 4}},
        {"min_tokens": 12, "stop_token_ids": [87, 220, 269], "ignore_eos": False},
        {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "logit_bias": {"87": -3.5}},
    ],
    ids=str,
)
async def test_greedy_answer_follows_the_edited_logits(reference: Any, fields: dict[str, Any]) -> None:
    async with model_replica() as replica:
        (choice,) = (await ask(replica, "/v1/completions", {**COMPLETION, **fields}))["choices"]
    prompt, output = choice["prompt_token_ids"], choice["token_ids"]
    assert len(output) >= fields.get("min_tokens", 1)
    rows = raw_logits(reference, prompt + output)[len(prompt) - 1 :]
    for i, token_id in enumerate(output):
        row = edited(rows[i], prompt, output[:i], fields)
        assert token_id == int(row.argmax()) or float(row.max() - row[token_id]) < NEAR_TIE, i


async def test_rows_with_and_without_edits_share_a_step(reference: Any) -> None:
    body = {**COMPLETION, "prompt": [PROMPT] * 3, "n": 2, "frequency_penalty": 0.9}
    async with model_replica() as replica:
        plain = await ask(replica, "/v1/completions", COMPLETION)
        alone = await ask(replica, "/v1/completions", {**COMPLETION, "frequency_penalty": 0.9})
        together = await ask(replica, "/v1/completions", body)
    assert plain["choices"][0]["token_ids"] != alone["choices"][0]["token_ids"]
    assert [c["token_ids"] for c in together["choices"]] == [alone["choices"][0]["token_ids"]] * 6
    assert together["usage"]["prompt_tokens"] == 3 * alone["usage"]["prompt_tokens"]


async def test_each_of_n_choices_is_drawn_with_its_own_numbers(reference: Any) -> None:
    fields = {"temperature": 1.0, "seed": 7, "n": 3, "presence_penalty": 0.5, "top_p": 0.9, "top_k": 50, "min_p": 0.01}
    async with model_replica() as replica:
        choices = (await ask(replica, "/v1/completions", {**COMPLETION, **fields}))["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({tuple(choice["token_ids"]) for choice in choices}) == 3
    for choice in choices:
        prompt, output = choice["prompt_token_ids"], choice["token_ids"]
        rows = raw_logits(reference, prompt + output)[len(prompt) - 1 : -1]
        rows = torch.stack([edited(row, prompt, output[:i], fields) for i, row in enumerate(rows)])
        N = len(rows)
        drawn = sample_reference(
            rows,
            torch.full((N,), 1.0),
            torch.full((N,), 50, dtype=torch.int32),
            torch.full((N,), 0.9),
            torch.full((N,), 0.01),
            torch.full((N,), 7, dtype=torch.int64),
            torch.full((N,), choice["index"], dtype=torch.int32),
            torch.arange(N, dtype=torch.int32),
        )
        assert drawn.tolist() == output


async def test_logprobs_of_a_chat_are_of_the_model_before_penalties(reference: Any) -> None:
    body = {
        "messages": [{"role": "user", "content": "What is 1 + 2?"}],
        **{"logprobs": True, "top_logprobs": 4, "return_token_ids": True, "presence_penalty": 1.0, "temperature": 0},
    }
    async with model_replica() as replica:
        answer = await ask(replica, "/v1/chat/completions", body)
        text_of = replica.model.tokenizer.token_text
    (choice,) = answer["choices"]
    prompt, output = answer["prompt_token_ids"], choice["token_ids"]
    rows = raw_logits(reference, prompt + output)[len(prompt) - 1 : -1].log_softmax(dim=-1)
    entries = choice["logprobs"]["content"]
    assert len(entries) == len(output) == answer["usage"]["completion_tokens"]
    for row, token_id, entry in zip(rows, output, entries, strict=True):
        text, raw = text_of(token_id)
        assert (entry["token"], entry["bytes"]) == (text, list(raw))
        assert entry["logprob"] == pytest.approx(float(row[token_id]), abs=TOLERANCE)
        expected = row.topk(4).values.tolist()
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("max_num_batched_tokens", [16, 512])
async def test_echo_has_the_prompts_logprobs_however_it_is_cut_into_chunks(
    reference: Any, max_num_batched_tokens: int
) -> None:
    prompts = [PROMPT, PROMPT + " Three.", "One"]
    body = {**COMPLETION, "prompt": prompts, "echo": True, "logprobs": 2, "max_tokens": 3, "skip_special_tokens": False}
    async with model_replica(max_num_batched_tokens=max_num_batched_tokens) as replica:
        choices = (await ask(replica, "/v1/completions", body))["choices"]
    for prompt_text, choice in zip(prompts, choices, strict=True):
        token_ids = choice["prompt_token_ids"] + choice["token_ids"]
        rows = raw_logits(reference, token_ids)[:-1].log_softmax(dim=-1)
        found = choice["logprobs"]
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        expected = [float(row[token_id]) for row, token_id in zip(rows, token_ids[1:], strict=True)]
        assert found["token_logprobs"][1:] == pytest.approx(expected, abs=TOLERANCE)
        for row, top in zip(rows, found["top_logprobs"][1:], strict=True):
            assert list(top.values())[:2] == pytest.approx(row.topk(2).values.tolist(), abs=TOLERANCE)
        assert choice["text"].startswith(prompt_text) and "".join(found["tokens"]) == choice["text"]
        assert [
            choice["text"][at : at + len(t)] for at, t in zip(found["text_offset"], found["tokens"], strict=True)
        ] == (found["tokens"])


async def test_echo_without_logprobs_is_text_alone() -> None:
    async with model_replica() as replica:
        plain = (await ask(replica, "/v1/completions", {**COMPLETION, "max_tokens": 3}))["choices"][0]
        echoed = (await ask(replica, "/v1/completions", {**COMPLETION, "max_tokens": 3, "echo": True}))["choices"][0]
        ids = {**COMPLETION, "prompt": plain["prompt_token_ids"], "max_tokens": 3, "echo": True}
        of_ids = (await ask(replica, "/v1/completions", ids))["choices"][0]
    assert echoed["text"] == of_ids["text"] == PROMPT + plain["text"]
    assert echoed["logprobs"] is None


async def test_a_seed_gives_the_same_tokens_alone_and_amid_other_requests() -> None:
    """In float32: in bfloat16 the number of rows in a step changes the rounding of the logits."""
    bodies = [{**COMPLETION, "temperature": 1.0, "seed": seed} for seed in range(6)]
    crowd = [{**COMPLETION, "prompt": f"{PROMPT} {i} and", "temperature": 1.0, "seed": 100 + i} for i in range(9)]
    async with model_replica() as replica:
        alone = [await ask(replica, "/v1/completions", body) for body in bodies]
        mixed = [body for pair in zip_longest(crowd, bodies) for body in pair if body]
        together = await asyncio.gather(*(ask(replica, "/v1/completions", body) for body in mixed))
    found = {body["seed"]: answer["choices"][0]["token_ids"] for body, answer in zip(mixed, together, strict=True)}
    expected = [answer["choices"][0]["token_ids"] for answer in alone]
    assert len({tuple(token_ids) for token_ids in expected}) == 6
    assert [found[seed] for seed in range(6)] == expected
