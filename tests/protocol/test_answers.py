"""Answers of a replica in OpenAI's shapes, whole and streamed."""

from __future__ import annotations

from aiohttp import ClientSession

from tests.protocol.fake_loop import MODEL, FakeLoop, replica
from tests.protocol.http_probe import ANSWER, BODY, CHAT, COMPLETIONS, PROMPT, post, stream


async def test_chat_answer_has_openais_shape(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        status, answer = await post(session, url + CHAT, BODY, headers={"X-Request-Id": "abc"})
    assert status == 200
    assert answer.pop("created") > 1_600_000_000
    assert answer == {
        "id": "chatcmpl-abc",
        "object": "chat.completion",
        "model": "tiny-moe",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": ANSWER, "reasoning_content": "hm", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": len(loop.submitted[0].prompt_ids),
            "completion_tokens": len(loop.script),
            "total_tokens": len(loop.submitted[0].prompt_ids) + len(loop.script),
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": loop.script.index(635)},  # `</think>`
        },
    }


async def test_chat_stream_has_openais_shape(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        events = await stream(session, url + CHAT, {**BODY, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events
    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in events[:-1]}) == len({chunk["created"] for chunk in events[:-1]}) == 1
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    first, *middle, last = [chunk["choices"][0] for chunk in chunks]
    assert first == {
        "index": 0,
        "delta": {"role": "assistant", "content": ""},
        "logprobs": None,
        "finish_reason": None,
    }
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert "".join(choice["delta"].get("content", "") for choice in middle) == ANSWER
    assert "".join(choice["delta"].get("reasoning_content", "") for choice in middle) == "hm"
    assert all(choice["finish_reason"] is None and choice["delta"] for choice in middle)
    assert usage["choices"] == [] and usage["usage"]["completion_tokens"] == len(loop.script)


async def test_stream_without_usage_mentions_none(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        events = await stream(session, url + CHAT, BODY)
    assert all("usage" not in event for event in events[:-1]) and events[-1] == "[DONE]"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"


async def test_completion_has_openais_shape_and_keeps_its_reasoning_tags(session: ClientSession) -> None:
    async with replica(FakeLoop()) as url:
        status, answer = await post(session, url + COMPLETIONS, PROMPT)
        events = await stream(session, url + COMPLETIONS, PROMPT)
    text = "<think>\nhm\n</think>\n\nyes \N{ROCKET}"
    assert status == 200 and answer["object"] == "text_completion" and answer["id"].startswith("cmpl-")
    assert answer["choices"] == [
        {"index": 0, "text": text, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    ]
    choices = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == text
    assert choices[-1] == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop", "stop_reason": None}


async def test_prompts_of_one_request_are_its_choices(session: ClientSession) -> None:
    loop = FakeLoop()
    body = {"prompt": ["one", [16, 17], "three"], "max_tokens": 9}
    async with replica(loop) as url:
        _, answer = await post(session, url + COMPLETIONS, body)
        events = await stream(session, url + COMPLETIONS, body)
    whole = [choice["text"] for choice in answer["choices"]]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2] and len(set(whole)) == 1
    assert answer["usage"]["completion_tokens"] == 27
    assert answer["usage"]["prompt_tokens"] == sum(len(sequence.prompt_ids) for sequence in loop.submitted[:3])
    texts = ["", "", ""]
    for event in events[:-1]:
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == whole
    assert [sequence.choice for sequence in loop.submitted] == [0, 1, 2, 0, 1, 2]


async def test_token_ids_are_returned_on_request_and_cover_the_answer(session: ClientSession) -> None:
    loop = FakeLoop()
    async with replica(loop) as url:
        _, chat = await post(session, url + CHAT, {**BODY, "return_token_ids": True})
        chat_events = await stream(session, url + CHAT, {**BODY, "return_token_ids": True})
        _, completion = await post(session, url + COMPLETIONS, {**PROMPT, "return_token_ids": True})
        events = await stream(session, url + COMPLETIONS, {**PROMPT, "return_token_ids": True})
    chat_ids, prompt_ids = loop.submitted[0].prompt_ids, loop.submitted[2].prompt_ids
    assert chat["prompt_token_ids"] == chat_ids and chat["choices"][0]["token_ids"] == loop.script
    assert chat_events[0]["prompt_token_ids"] == chat_ids
    assert completion["choices"][0]["prompt_token_ids"] == prompt_ids
    assert completion["choices"][0]["token_ids"] == loop.script
    assert events[0]["choices"][0]["prompt_token_ids"] == prompt_ids
    for streamed in (chat_events, events):
        ids = [event["choices"][0].get("token_ids", []) for event in streamed[:-1]]
        assert [token_id for some in ids for token_id in some] == loop.script


async def test_length_ends_an_answer_with_what_was_held_back(session: ClientSession) -> None:
    loop = FakeLoop("\N{ROCKET}")
    async with replica(loop) as url:
        _, whole = await post(session, url + CHAT, {**BODY, "max_completion_tokens": 2, "max_tokens": 3})
        events = await stream(session, url + CHAT, {**BODY, "max_tokens": 2})
    assert whole["choices"][0]["finish_reason"] == "length"
    assert whole["choices"][0]["message"]["content"] == "\N{REPLACEMENT CHARACTER}"
    assert whole["usage"]["completion_tokens"] == 2
    deltas = [event["choices"][0] for event in events[:-1]]
    assert "".join(choice["delta"].get("content", "") for choice in deltas) == "\N{REPLACEMENT CHARACTER}"
    assert deltas[-1]["finish_reason"] == "length"


async def test_token_that_stops_an_answer_is_counted_but_is_no_text(session: ClientSession) -> None:
    loop = FakeLoop("abc")
    body = {**PROMPT, "stop_token_ids": [loop.script[-1]], "return_token_ids": True}
    async with replica(loop) as url:
        _, answer = await post(session, url + COMPLETIONS, body)
    expected = MODEL.tokenizer.decode(loop.script[:-1])
    assert (answer["choices"][0]["text"], answer["choices"][0]["token_ids"]) == (expected, loop.script)


async def test_special_tokens_are_text_on_request(session: ClientSession) -> None:
    body = {**PROMPT, "ignore_eos": True, "max_tokens": 3}
    async with replica(FakeLoop("a<|im_end|>b")) as url:
        _, skipped = await post(session, url + COMPLETIONS, body)
        _, shown = await post(session, url + COMPLETIONS, {**body, "skip_special_tokens": False})
    assert skipped["choices"][0]["text"] == "ab"
    assert shown["choices"][0]["text"] == "a<|im_end|>b"
