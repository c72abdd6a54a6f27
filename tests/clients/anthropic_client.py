"""The `anthropic` package against a running server: `python tests/clients/anthropic_client.py URL`. Prints JSON.

Messages whole and streamed, thinking, tools and their results, counting tokens, and errors.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import anthropic

QUESTION: Any = [{"role": "user", "content": "What is 12 + 30?"}]
WEATHER: Any = {"role": "user", "content": "What is the weather in Oslo?"}
TOOL: Any = {
    "name": "get_weather",
    "description": "Get the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def main(argv: list[str]) -> int:
    """Runs all of it."""
    url, model = argv[0], argv[1] if len(argv) > 1 else "tiny-moe"
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        whole = client.messages.create(model=model, max_tokens=300, messages=QUESTION)
        assert [block.type for block in whole.content] == ["thinking", "text"]
        assert whole.content[-1].text == "42" and whole.stop_reason == "end_turn"
        with client.messages.stream(model=model, max_tokens=300, messages=QUESTION) as stream:
            assert "".join(stream.text_stream) == "42"
            final = stream.get_final_message()
        assert final.usage.output_tokens == whole.usage.output_tokens
        assert final.content[0].thinking == whole.content[0].thinking

        called = client.messages.create(model=model, max_tokens=300, messages=[WEATHER], tools=[TOOL])
        call = called.content[-1]
        assert call.type == "tool_use" and call.input == {"city": "Oslo"} and called.stop_reason == "tool_use"
        result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"sky": "sunny", "degrees": 7}'}
        messages: Any = [
            WEATHER,
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": [result]},
        ]
        told = client.messages.create(model=model, max_tokens=300, messages=messages, tools=[TOOL])
        assert told.stop_reason == "end_turn" and told.content[-1].type == "text"
        forced: Any = {"type": "tool", "name": "get_weather"}
        with client.messages.stream(
            model=model, max_tokens=300, messages=[WEATHER], tools=[TOOL], tool_choice=forced
        ) as stream:
            assert stream.get_final_message().content[-1].name == "get_weather"

        cut = client.messages.create(model=model, max_tokens=300, messages=QUESTION, stop_sequences=["carry"])
        assert (cut.stop_reason, cut.stop_sequence) == ("stop_sequence", "carry")
        counted = client.messages.count_tokens(model=model, messages=QUESTION)
        usage = whole.usage  # what was found in the cache is counted apart
        assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
        try:
            client.messages.create(model="other", max_tokens=1, messages=QUESTION)
        except anthropic.NotFoundError as err:
            assert "is not served here" in str(err)
        else:
            raise AssertionError("an unknown model was answered")
    print(json.dumps({"client": f"anthropic {anthropic.__version__}", "passed": True}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
