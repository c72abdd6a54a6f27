"""LangChain's ChatOpenAI against a running server: `python tests/clients/langchain_client.py URL`. Prints JSON."""

from __future__ import annotations

import json
import sys

import langchain_openai
from langchain_core.messages import ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel, SecretStr


class Sum(BaseModel):
    """The sum of two numbers."""

    answer: int


@tool
def get_weather(city: str) -> str:
    """Get the weather in a city."""
    return json.dumps({"city": city, "sky": "sunny", "degrees": 7})


def main(argv: list[str]) -> int:
    """Runs all of it."""
    (url,) = argv
    model = langchain_openai.ChatOpenAI(
        model="tiny-moe", base_url=url + "/v1", api_key=SecretStr("none"), max_retries=0, timeout=60, temperature=0
    )
    assert model.invoke("What is 12 + 30?").content == "42"
    assert "".join(str(piece.content) for piece in model.stream("What is 12 + 30?")) == "42"
    assert [answer.content for answer in model.batch(["What is 12 + 30?"] * 4)] == ["42"] * 4
    bound = model.bind_tools([get_weather], tool_choice="any")  # described otherwise than the demo model has learned
    called = bound.invoke("What is the weather in Oslo?", parallel_tool_calls=False)
    (call,) = called.tool_calls
    assert call["name"] == "get_weather" and isinstance(call["args"]["city"], str)
    result = ToolMessage(content=get_weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.invoke([("user", "What is the weather in Oslo?"), called, result]).content
    assert isinstance(model.with_structured_output(Sum, method="json_schema").invoke("What is 12 + 30?"), Sum)
    forced = model.with_structured_output(Sum, method="function_calling").invoke("What is 12 + 30?")
    assert isinstance(forced, Sum)
    print(json.dumps({"client": "langchain-openai", "passed": True}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
