"""The `openai` package against a running server: `python tests/clients/openai_client.py URL`. Prints a line of JSON.

Chats, completions, tools, response formats parsed into pydantic, log probabilities, and responses; whole and streamed.
"""

from __future__ import annotations

import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

QUESTION: Any = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER: Any = [{"role": "user", "content": "What is the weather in Oslo?"}]
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


class Sum(BaseModel):
    """What the answer is to be."""

    answer: int
    parity: Literal["even", "odd"]


def chats(client: openai.OpenAI, model: str) -> None:
    """Whole and streamed, with reasoning, usage, a seed and several choices."""
    whole = client.chat.completions.create(model=model, messages=QUESTION)
    message: Any = whole.choices[0].message
    assert message.content == "42" and "2 + 0" in message.reasoning_content
    assert whole.usage is not None and whole.usage.completion_tokens_details is not None
    assert whole.usage.completion_tokens_details.reasoning_tokens
    usage = {"include_usage": True}
    with client.chat.completions.stream(model=model, messages=QUESTION, stream_options=usage) as stream:  # type: ignore[arg-type]
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "42" and final.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens
    several = client.chat.completions.create(model=model, messages=QUESTION, n=3, seed=1, temperature=1, stop=["carry"])
    assert [choice.index for choice in several.choices] == [0, 1, 2]


def completions(client: openai.OpenAI, model: str) -> None:
    """Of a text and of several, with echo and log probabilities."""
    answer = client.completions.create(model=model, prompt=["one", "two"], echo=True, logprobs=2, max_tokens=4)
    assert [choice.text.startswith(prompt) for choice, prompt in zip(answer.choices, ("one", "two"), strict=True)]
    found = answer.choices[0].logprobs
    assert found is not None and found.token_logprobs and found.tokens
    assert len(found.token_logprobs) == len(found.tokens) and found.token_logprobs[1] < 0
    pieces = client.completions.create(model=model, prompt="one", max_tokens=4, stream=True)
    assert "one" + "".join(piece.choices[0].text for piece in pieces) == answer.choices[0].text


def tools(client: openai.OpenAI, model: str) -> None:
    """Called by choice and by force, whole and streamed, and the result read."""
    whole = client.chat.completions.create(model=model, messages=WEATHER, tools=[TOOL])
    (call,) = whole.choices[0].message.tool_calls or []
    assert call.type == "function" and json.loads(call.function.arguments) == {"city": "Oslo"}
    assert whole.choices[0].finish_reason == "tool_calls"
    with client.chat.completions.stream(model=model, messages=WEATHER, tools=[TOOL], tool_choice="required") as stream:
        message = stream.get_final_completion().choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.name == "get_weather"
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "sunny", "degrees": 7}'}
    asked: Any = [*WEATHER, whole.choices[0].message.to_dict(), result]
    told = client.chat.completions.create(model=model, messages=asked, tools=[TOOL])
    assert told.choices[0].message.content and not told.choices[0].message.tool_calls


def formats(client: openai.OpenAI, model: str) -> None:
    """A pydantic model, and any object."""
    parsed = client.chat.completions.parse(model=model, messages=QUESTION, response_format=Sum)
    assert isinstance(parsed.choices[0].message.parsed, Sum)
    any_object: Any = {"type": "json_object"}
    answer = client.chat.completions.create(model=model, messages=QUESTION, response_format=any_object, max_tokens=80)
    assert (answer.choices[0].message.content or "").startswith("{") or answer.choices[0].finish_reason == "length"


def logprobs(client: openai.OpenAI, model: str) -> None:
    """Of each token of a chat, which together are its text."""
    answer = client.chat.completions.create(model=model, messages=QUESTION, logprobs=True, top_logprobs=3)
    found = answer.choices[0].logprobs
    assert found is not None and found.content and all(len(token.top_logprobs) == 3 for token in found.content)
    assert "42" in "".join(token.token for token in found.content)


def responses(client: openai.OpenAI, model: str) -> None:
    """Whole, streamed, with a tool, and parsed into pydantic."""
    whole = client.responses.create(model=model, input="What is 12 + 30?")
    assert whole.output_text == "42" and whole.status == "completed" and whole.output[0].type == "reasoning"
    with client.responses.stream(model=model, input="What is 12 + 30?") as stream:
        assert stream.get_final_response().output_text == "42"
    tool: Any = {"type": "function", **TOOL["function"], "strict": True}
    called = client.responses.create(model=model, input="What is the weather in Oslo?", tools=[tool])
    call = called.output[-1]
    assert call.type == "function_call" and json.loads(call.arguments) == {"city": "Oslo"}
    parsed = client.responses.parse(model=model, input="What is 12 + 30?", text_format=Sum)
    assert isinstance(parsed.output_parsed, Sum)


def main(argv: list[str]) -> int:
    """Runs all of them."""
    (url,) = argv
    checks = [chats, completions, tools, formats, logprobs, responses]
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        for check in checks:
            check(client, model)
    print(json.dumps({"client": f"openai {openai.__version__}", "passed": [check.__name__ for check in checks]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
