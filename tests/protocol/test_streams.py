"""What a stream says, put together, is what the whole answer says: 500 requests of all kinds, of all four APIs."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from aiohttp import ClientSession

from tests.protocol.fake_loop import MODEL, replica
from tests.protocol.http_probe import post
from tests.protocol.script_loop import ScriptLoop

NUM_REQUESTS = 500
AT_ONCE = 8
TOOL = {"name": "f", "description": "?", "parameters": {"type": "object"}}


async def events_of(session: ClientSession, url: str, body: dict[str, Any], headers: dict[str, str]) -> list[Any]:
    """The data of the events of a stream; names must be the types that the data have."""
    async with session.post(url, json={**body, "stream": True}, headers=headers) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    found: list[Any] = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        *name, data = event.split("\n")
        found.append(data if data == "data: [DONE]" else json.loads(data.removeprefix("data: ")))
        if name:
            assert name == [f"event: {found[-1]['type']}"]
    return found


def sampling(draw: random.Random) -> dict[str, Any]:
    """Some fields, at random."""
    fields: dict[str, Any] = {"seed": draw.randrange(10_000), "max_tokens": draw.choice([3, 20, 60])}
    if draw.random() < 0.3:
        fields["stop"] = draw.sample(["END", "\N{ROCKET}", "\n", "字"], k=2)
        fields["include_stop_str_in_output"] = draw.random() < 0.5
        fields["min_tokens"] = draw.choice([0, 2])
    if draw.random() < 0.3:
        fields["return_token_ids"] = True
    if draw.random() < 0.3:
        fields["n"] = draw.choice([2, 3])
    if draw.random() < 0.5:
        fields["stream_options"] = {"include_usage": True, "continuous_usage_stats": draw.random() < 0.5}
    return fields


def joined_choices(events: list[Any]) -> list[dict[str, Any]]:
    """The choices of a whole answer, put together from a stream's chunks."""
    assert events[-1] == "data: [DONE]"
    choices: dict[int, dict[str, Any]] = {}
    for event in events[:-1]:
        for part in event["choices"]:
            made = choices.setdefault(part["index"], {"index": part["index"], "logprobs": None, "finish_reason": None})
            assert made["finish_reason"] is None, "something comes after the end"
            for name in ("text", "token_ids"):
                if name in part:
                    made[name] = made.get(name, "" if name == "text" else []) + part[name]
            for name in ("finish_reason", "stop_reason", "prompt_token_ids"):
                if name in part:
                    made[name] = part[name]
            if part["logprobs"] is not None:
                columns = made["logprobs"] or {name: [] for name in part["logprobs"]}
                made["logprobs"] = {n: (c or []) + (part["logprobs"][n] or []) for n, c in columns.items()}
            if "delta" in part:
                add_to_message(made.setdefault("message", {}), part["delta"])
    return [choices[index] for index in sorted(choices)]


def add_to_message(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning_content"):
        if name in delta:
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
        calls[call["index"]]["arguments"] += call["function"]["arguments"]


def plain_message(message: dict[str, Any]) -> dict[str, Any]:
    """A whole message as add_to_message makes one."""
    made = {"content": message["content"] or ""}
    if message["reasoning_content"]:
        made["reasoning_content"] = message["reasoning_content"]
    if "tool_calls" in message:
        made["tool_calls"] = [{"id": call["id"], **call["function"]} for call in message["tool_calls"]]
    return made


async def check_openai(session: ClientSession, url: str, number: int) -> None:
    draw = random.Random(number)
    body: dict[str, Any] = sampling(draw)
    if is_chat := draw.random() < 0.6:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "hi"}]
        if draw.random() < 0.6:
            body |= {"tools": [{"type": "function", "function": TOOL}], "parallel_tool_calls": draw.random() < 0.7}
        if draw.random() < 0.4:
            body |= {"logprobs": True, "top_logprobs": draw.choice([0, 2])}
    else:
        path = "/v1/completions"
        body |= {"prompt": draw.choice(["one", ["one", "two"], [16, 17]]), "echo": draw.random() < 0.3}
        if draw.random() < 0.4:
            body["logprobs"] = draw.choice([0, 2])
    headers = {"X-Request-Id": f"r{number}"}
    _, whole = await post(session, url + path, body, headers=headers)
    events = await events_of(session, url + path, body, headers)
    expected = whole["choices"]
    if is_chat:
        expected = [{**choice, "message": plain_message(choice["message"])} for choice in expected]
        logprobs = [choice["logprobs"] for choice in expected if choice["logprobs"]]
        for found in logprobs:
            found["refusal"] = []
    assert joined_choices(events) == expected, number
    if "stream_options" in body:
        assert events[-2]["usage"] == whole["usage"] and events[-2]["choices"] == []
        continuous = body["stream_options"]["continuous_usage_stats"]
        assert all((event["usage"] is not None) is continuous for event in events[:-2])
        if continuous:
            assert events[-3]["usage"] == whole["usage"]


async def check_responses(session: ClientSession, url: str, number: int) -> None:
    draw = random.Random(number)
    body = {"input": "hi", "seed": number, "max_output_tokens": draw.choice([3, 60])}
    if draw.random() < 0.7:
        body["tools"] = [{"type": "function", **TOOL}]
    headers = {"X-Request-Id": f"r{number}"}
    _, whole = await post(session, url + "/v1/responses", body, headers=headers)
    events = await events_of(session, url + "/v1/responses", body, headers)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}"
    assert events[-1]["response"] | {"created_at": 0} == whole | {"created_at": 0}, number
    items = {event["output_index"]: event["item"] for event in events if event["type"] == "response.output_item.done"}
    assert [items[index] for index in sorted(items)] == whole["output"]
    for index, item in enumerate(whole["output"]):
        pieces = [e["delta"] for e in events if e["type"].endswith(".delta") and e["output_index"] == index]
        text = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert "".join(pieces) == text


async def check_messages(session: ClientSession, url: str, number: int) -> None:
    draw = random.Random(number)
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": number, "max_tokens": 60}
    if draw.random() < 0.3:
        body["stop_sequences"] = ["END"]
    if draw.random() < 0.7:
        body["tools"] = [{"name": "f", "input_schema": {"type": "object"}}]
    headers = {"X-Request-Id": f"r{number}"}
    _, whole = await post(session, url + "/v1/messages", body, headers=headers)
    events = await events_of(session, url + "/v1/messages", body, headers)
    message: dict[str, Any] = events[0]["message"]
    for event in events[1:]:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append({**event["content_block"], "partial": ""})
        elif event["type"] == "content_block_delta":
            block, delta = message["content"][event["index"]], event["delta"]
            name = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial"}[delta["type"]]
            block[name] += delta["text" if name == "text" else "thinking" if name == "thinking" else "partial_json"]
        elif event["type"] == "message_delta":
            message |= {**event["delta"], "usage": event["usage"]}
    for block in message["content"]:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial) if is_json(partial) else {}  # no object when it was cut off
    assert events[-1]["type"] == "message_stop"
    assert message == whole, number


def is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


async def test_streams_put_together_are_the_whole_answers(session: ClientSession) -> None:
    loop = ScriptLoop()
    checks = [check_openai, check_openai, check_openai, check_responses, check_messages]
    numbers = iter(range(NUM_REQUESTS))

    async def client() -> None:
        for number in numbers:
            await checks[number % len(checks)](session, url, number)

    async with replica(loop) as url, asyncio.TaskGroup() as clients:
        for _ in range(AT_ONCE):
            clients.create_task(client())
        assert MODEL.has_reasoning
    assert not loop.running
