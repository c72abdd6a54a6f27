"""Good bodies of every endpoint that answers, to be changed by fuzz.py. They are short to compute."""

from __future__ import annotations

from typing import Any, Final

TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
USER: Final[dict[str, Any]] = {"role": "user", "content": "hi"}
SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^a{1,3}$"}, "b": {"$ref": "#/$defs/b"}},
    "required": ["a"],
    "$defs": {"b": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "array", "items": {"enum": [1, None]}}]}},
}
GOOD: Final[list[tuple[str, dict[str, Any]]]] = [
    (
        "/v1/chat/completions",
        {"messages": [USER], "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
    ),
    (
        "/v1/chat/completions",
        {"messages": [USER], "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "n": 2, "stop": ["x"]},
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "s"}]},
                USER,
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "r"},
            ],
            **{
                "tools": [TOOL],
                "tool_choice": "required",
                "max_tokens": 3,
                "chat_template_kwargs": {"enable_thinking": False},
            },
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            "max_tokens": 3,
            "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/completions",
        {
            **{
                "prompt": ["a", "b"],
                "max_tokens": 3,
                "echo": True,
                "logprobs": 1,
                "min_tokens": 1,
                "seed": 5,
                "top_k": 5,
            },
            **{
                "logit_bias": {"5": 1},
                "presence_penalty": 0.5,
                "repetition_penalty": 1.1,
                "temperature": 1,
                "min_p": 0.1,
            },
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "developer", "content": "d"}, USER, {"role": "assistant", "content": "I "}],
            **{"continue_final_message": True, "add_generation_prompt": False, "max_completion_tokens": 3, "seed": 1},
            **{"stop": "x", "include_stop_str_in_output": True, "skip_special_tokens": False, "return_token_ids": True},
            **{"reasoning_effort": "low", "frequency_penalty": 0.5, "top_p": 0.9, "temperature": 1, "user": "u"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [USER],
            **{"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}, "max_tokens": 3},
            **{"parallel_tool_calls": False, "response_format": {"type": "json_object"}, "stream": True},
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    ("/v1/completions", {"prompt": [[16, 17], [17]], "max_tokens": 3, "stream": True, "stop_token_ids": [5]}),
    (
        "/v1/responses",
        {
            "input": [USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}],
            "max_output_tokens": 3,
            "tools": [{"type": "function", "name": "f"}],
            "text": {"format": {"type": "json_object"}},
        },
    ),
    (
        "/v1/responses",
        {"input": "hi", "instructions": "i", "reasoning": {"effort": "low"}, "max_output_tokens": 3, "stream": True},
    ),
    (
        "/v1/messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "r"}]},
            ],
            **{
                "max_tokens": 3,
                "system": "s",
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
                "thinking": {"type": "disabled"},
                "stop_sequences": ["x"],
            },
        },
    ),
    (
        "/v1/responses",
        {
            "input": [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "1", "output": "r"},
            ],
            **{"tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}], "max_output_tokens": 3},
            **{"tool_choice": {"type": "function", "name": "f"}, "metadata": {"k": "v"}, "parallel_tool_calls": False},
            "text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}},
        },
    ),
    (
        "/v1/messages",
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "a"}],
                },
                USER,
            ],
            **{
                "max_tokens": 3,
                "stream": True,
                "thinking": {"type": "enabled"},
                "system": [{"type": "text", "text": "s"}],
            },
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}, "type": "custom"}],
            "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
        },
    ),
    ("/v1/messages/count_tokens", {"messages": [USER], "tool_choice": {"type": "auto"}}),
    ("/tokenize", {"prompt": "hi", "return_token_strs": True}),
    ("/tokenize", {"messages": [USER], "continue_final_message": True}),
    ("/detokenize", {"tokens": [16, 17]}),
]
