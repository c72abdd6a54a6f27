"""Which grammar a chat's answer must follow: that of its response format, of the tools it must call, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from replica.api.grammar import json_rules, tool_rules
from replica.api.openai_api import ChatRequest
from replica.api.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class ConstrainedText:
    """The text of a grammar, and the field that is to blame if it cannot be compiled."""

    text: str
    param: str


def chat_grammar(chat: ChatRequest, model: ServedModel) -> ConstrainedText | None:
    """None if the answer may be any text. A tool that must be called goes before a response format."""
    tools = _tools(chat)
    calls = "calls: " + ('call ("\\n" call)*' if chat.parallel_tool_calls else "call")
    if chat.tool_choice not in ("auto", "none"):
        if isinstance(chat.tool_choice, dict):
            tools = [(name, schema) for name, schema in tools if name == chat.tool_choice["name"]][:1]
        return ConstrainedText("\n".join(["start: calls", calls, *tool_rules(tools, model)]), "tools")
    if chat.response_format is None:
        return None
    value = json_rules("value", chat.response_format.schema)
    if not tools:
        return ConstrainedText("\n".join(["start: value", value]), "response_format")
    # A tool may still be called: the format is that of the answer in the end.
    rules = ["start: value | calls", value, calls, *tool_rules(tools, model)]
    return ConstrainedText("\n".join(rules), "response_format")


def _tools(chat: ChatRequest) -> list[tuple[str, Any]]:
    """Names and the schemas of their arguments; any object for a tool that says nothing of them."""
    functions = [tool["function"] for tool in chat.conversation.tools or []]
    return [(function["name"], function.get("parameters") or {"type": "object"}) for function in functions]
