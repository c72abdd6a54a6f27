"""Fresh questions through the front door: the tokens are those of transformers' greedy decoding, in float32.

A greedy decoder takes the largest logit after every prefix. So instead of decoding each question again, transformers
reads question and answer in one forward and gives its logits at each of the answer's tokens: if every token has the
largest one there, transformers would have written the same tokens. Where its largest logits are nearly equal, rounding
decides; such places are counted, and the rest of the answer is held against the prefix that was really written.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.commands import DEMO_MODEL
from tests.e2e.cluster import MODEL_NAME, Cluster, metric

NUM_QUESTIONS: Final = 300
SEED: Final = 20261130
CONCURRENCY: Final = 32
MAX_TOKENS: Final = 220
NEAR_TIE: Final = 2e-4  # logits closer than this are equal in float32, for the order of sums differs
LEAST_SHARE_RIGHT: Final = 0.8  # the model's own is 0.875


@dataclass(frozen=True)
class Answer:
    """What a client got for one question."""

    content: str
    calls: list[tuple[str, str]]  # name and arguments of each tool call
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str

    @property
    def text(self) -> str:
        """The answer as the model writes it, tool calls included."""
        written = [
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            for name, arguments in self.calls
        ]
        return self.content + "\n".join(written)


@dataclass
class Ties:
    """Places where the reference's two largest logits are nearly equal."""

    seen: int = 0
    decided_otherwise: int = 0


@pytest.mark.timeout(600)
async def test_answers_are_those_of_greedy_decoding_in_transformers(cluster: Cluster, corpus: ModuleType) -> None:
    rng = random.Random(SEED)
    samples = [corpus.draw(rng) for _ in range(NUM_QUESTIONS)]
    answers = await ask_all(cluster.url, samples)

    tokenizer: Any = AutoTokenizer.from_pretrained(DEMO_MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
    end_ids = set(model.generation_config.eos_token_id)
    right: Counter[str] = Counter()
    ties = Ties()
    for sample, answer in zip(samples, answers, strict=True):
        assert answer.prompt_ids == prompt_ids(tokenizer, sample)
        check_is_greedy(model, answer, ties)
        check_end(answer, end_ids)
        is_right = corpus.is_right(sample, answer.text)
        assert is_right == corpus.is_right(sample, tokenizer.decode(answer.token_ids, skip_special_tokens=True))
        right[sample.task] += is_right

    asked = Counter(sample.task for sample in samples)
    num_tokens = sum(len(answer.token_ids) for answer in answers)
    print(f"\n{NUM_QUESTIONS} questions, {num_tokens} tokens as transformers, {ties.seen} near ties,", end=" ")
    print(f"{ties.decided_otherwise} decided otherwise; right: {right.total() / NUM_QUESTIONS:.3f}")
    print("  ".join(f"{task} {right[task]}/{asked[task]}" for task in sorted(asked)))
    assert right.total() >= LEAST_SHARE_RIGHT * NUM_QUESTIONS
    assert all(metric(url, "vllm:generation_tokens_total") > 0 for url in cluster.replica_urls)


async def ask_all(url: str, samples: list[Any]) -> list[Answer]:
    """The answers, asked CONCURRENCY at a time; every second one is streamed."""
    places = asyncio.Semaphore(CONCURRENCY)
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:

        async def ask(index: int, sample: Any) -> Answer:
            request = {
                "model": MODEL_NAME,
                "messages": as_openai(sample.messages[:-1]),
                "temperature": 0,
                "max_completion_tokens": MAX_TOKENS,
                "extra_body": {"return_token_ids": True},
            } | ({"tools": sample.tools} if sample.tools else {})
            async with places:
                return await (streamed(client, request) if index % 2 else whole(client, request))

        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(ask(index, sample)) for index, sample in enumerate(samples)]
    return [task.result() for task in running]


async def whole(client: AsyncOpenAI, request: dict[str, Any]) -> Answer:
    """One answer in one piece."""
    response = await client.chat.completions.create(**request)
    choice: Any = response.choices[0]
    return Answer(
        content=choice.message.content or "",
        calls=[(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []],
        prompt_ids=response.prompt_token_ids,
        token_ids=choice.token_ids,
        finish_reason=choice.finish_reason,
    )


async def streamed(client: AsyncOpenAI, request: dict[str, Any]) -> Answer:
    """One answer put together from its events."""
    content, finish_reason = "", ""
    calls: list[tuple[str, str]] = []
    prompt: list[int] = []
    token_ids: list[int] = []
    async for chunk in await client.chat.completions.create(**request, stream=True):
        prompt = getattr(chunk, "prompt_token_ids", None) or prompt
        choice: Any = chunk.choices[0]
        content += choice.delta.content or ""
        for part in choice.delta.tool_calls or []:
            if part.index == len(calls):
                calls.append(("", ""))
            name, arguments = calls[part.index]
            calls[part.index] = (name + (part.function.name or ""), arguments + (part.function.arguments or ""))
        token_ids += getattr(choice, "token_ids", None) or []
        finish_reason = choice.finish_reason or finish_reason
    return Answer(content=content, calls=calls, prompt_ids=prompt, token_ids=token_ids, finish_reason=finish_reason)


def as_openai(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The corpus' messages as OpenAI's API wants them: calls with an id, arguments as a string."""
    made = []
    for message in messages:
        if message["role"] == "tool":
            message = message | {"tool_call_id": "call_0"}
        if "tool_calls" in message:
            (call,) = message["tool_calls"]
            function = call["function"] | {"arguments": json.dumps(call["function"]["arguments"])}
            message = message | {"tool_calls": [call | {"id": "call_0", "function": function}]}
        made.append(message)
    return made


def prompt_ids(tokenizer: Any, sample: Any) -> list[int]:
    """The question's tokens by transformers."""
    text = tokenizer.apply_chat_template(
        sample.messages[:-1], tools=sample.tools, tokenize=False, add_generation_prompt=True
    )
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.no_grad()
def check_is_greedy(model: Any, answer: Answer, ties: Ties) -> None:
    """Fails when a token of the answer has not the largest logit, or one nearly equal to it, after those before it."""
    ids = torch.tensor([answer.prompt_ids + answer.token_ids[:-1]])  # [1, T]
    logits = model(ids).logits[0, len(answer.prompt_ids) - 1 :]  # [N, V], one row for each token of the answer
    chosen = logits.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]  # [N]
    largest = logits.topk(2).values  # [N, 2]
    behind = largest[:, 0] - chosen
    assert behind.max() < NEAR_TIE, f"token {int(behind.argmax())} of {answer} is {float(behind.max())} behind"
    ties.seen += int((largest[:, 0] - largest[:, 1] < NEAR_TIE).sum())
    ties.decided_otherwise += int((behind > 0).sum())


def check_end(answer: Answer, end_ids: set[int]) -> None:
    """Fails when the answer goes on after an end token, or stops without a reason."""
    assert not end_ids & set(answer.token_ids[:-1])
    if answer.finish_reason in ("stop", "tool_calls"):
        assert answer.token_ids[-1] in end_ids
    else:
        assert answer.finish_reason == "length" and len(answer.token_ids) == MAX_TOKENS
        assert answer.token_ids[-1] not in end_ids
