"""What each kind of broken request is answered: the status, and the message with the value and the limit."""

from __future__ import annotations

from typing import Any, Final

from tests.protocol.http_probe import COMPLETIONS

USER: Final = {"role": "user", "content": "hi"}
NAN: Final = float("nan")
TOOL: Final = {"type": "function", "function": {"name": "f"}}
SURROGATE: Final = "which is no Unicode text; send surrogates in pairs"
CHOICE: Final = 'must be "auto", "none", "required", or {"type": "function", "function": {"name": ...}}'
NO_SCHEMA: Final = "the schema cannot be used: "
NAME: Final = "must be a name of 1 to 128 letters, digits, or any of _ . : / -"


def json_schema(value: Any) -> dict[str, Any]:
    """The fields that ask for JSON of a schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": value}}}


def function(**fields: Any) -> dict[str, Any]:
    """A tool."""
    return {"type": "function", "function": fields}


def nested(depth: int) -> dict[str, Any]:
    """A schema of objects in objects."""
    made: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        made = {"type": "object", "properties": {"a": made}}
    return made


def says(content: Any, role: Any = "user") -> dict[str, Any]:
    """The fields of a conversation with one message."""
    return {"messages": [{"role": role, "content": content}]}


BAD_TEMPLATE_KWARGS: Final[dict[str, Any]] = {
    "messages": [{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}],
    "chat_template_kwargs": {"namespace": 5},
}
# Fields -> the whole message. Each is a 400 in OpenAI's form.
BAD_CHATS: Final[list[tuple[dict[str, Any], str]]] = [
    # wrong types, no messages, an unknown role
    ({"messages": "hi"}, "messages is 'hi', must be a list of at least one message"),
    ({"messages": None}, "messages is missing"),
    ({"messages": []}, "messages is [], must be a list of at least one message"),
    ({"messages": [5]}, "messages[0] is 5, must be an object"),
    (says(5), "messages[0].content is 5, must be a string"),
    (says([{"type": "text", "text": 5}]), "messages[0].content[0].text is 5, must be a string"),
    (
        says([{"type": "image_url"}]),
        "messages[0].content[0].type is 'image_url', must be 'text'; nothing else is supported",
    ),
    (says("hi", "wizard"), "messages[0].role is 'wizard', must be one of system, developer, user, assistant, tool"),
    ({"model": 5}, "model is 5, must be a string"),
    ({"stop": 5}, "stop is 5, must be a string or a list of strings"),
    ({"logit_bias": [5]}, "logit_bias is [5], must be an object"),
    ({"stream_options": "x"}, "stream_options is 'x', must be an object"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs is 5, must be an object"),
    ({"response_format": "json"}, "response_format is 'json', must be an object"),
    ({"reasoning_effort": 5}, "reasoning_effort is 5, must be a string"),
    ({"ignore_eos": "yes"}, "ignore_eos is 'yes', must be true or false"),
    # numbers out of their range
    ({"max_tokens": 0}, "max_tokens is 0, must be a whole number of at least 1"),
    ({"max_completion_tokens": -5}, "max_completion_tokens is -5, must be a whole number of at least 1"),
    ({"min_tokens": 4}, "min_tokens is 4, limit is 3: the answer's max_tokens"),
    ({"n": 1000}, "n is 1000, must be a whole number from 1 to 128"),
    ({"n": 0}, "n is 0, must be a whole number from 1 to 128"),
    ({"temperature": NAN}, "temperature is nan, must be a number from 0 to 2"),
    ({"temperature": -1}, "temperature is -1, must be a number from 0 to 2"),
    ({"top_p": 1.5}, "top_p is 1.5, must be a number from 0 to 1"),
    ({"top_k": -2}, "top_k is -2, must be a whole number of at least -1"),
    ({"presence_penalty": 3}, "presence_penalty is 3, must be a number from -2 to 2"),
    ({"repetition_penalty": 0}, "repetition_penalty is 0, must be a number from 0.01 to 100"),
    ({"top_logprobs": 21, "logprobs": True}, "top_logprobs is 21, must be a whole number from 0 to 20"),
    ({"top_logprobs": 5}, "top_logprobs is 5, must be 0 without logprobs"),
    ({"logit_bias": {"99999": 1}}, "logit_bias has the token id 99999, must be from 0 to 639"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5 is 101, must be a number from -100 to 100"),
    ({"stop": ["x"] * 10_000}, "stop has 10000 strings, limit is 64"),
    ({"stop": "x" * 5000}, "stop has a string of 5000 characters, limit is 1024"),
    # a prompt longer than the context: the second is sure to be without encoding it
    (
        says("1" * 4200),
        "the prompt has 4213 tokens, limit is 4095: the context of 4096 tokens (--max-model-len) must hold the answer, "
        "too",
    ),
    (
        says("1" * 500_000),
        "the prompt has at least 31252 tokens (500028 characters or more), limit is 4095: the context of 4096 tokens "
        "(--max-model-len) must hold the answer, too",
    ),
    # schemas
    (json_schema({"type": "wizard"}), NO_SCHEMA + "Invalid type: wizard"),
    (json_schema({"type": "object", "properties": 5}), NO_SCHEMA + "properties must be an object"),
    (json_schema({"$ref": "#"}), NO_SCHEMA + "no value follows it"),
    (
        json_schema({"$ref": "http://localhost/x"}),
        NO_SCHEMA + "Resource 'http://localhost/x' is not present in a registry and retrieving it failed: Default "
        "retriever does not fetch resources",
    ),
    (json_schema({"$ref": "#/$defs/x"}), NO_SCHEMA + "Pointer '/$defs/x' does not exist"),
    (json_schema({"enum": ["x" * 100] * 3000}), "the schema has 312129 characters, limit is 262144"),
    (
        json_schema(nested(400)),
        NO_SCHEMA + 'failed to parse "%json": recursion limit exceeded at line 1 column 2492',
    ),
    (
        json_schema({"type": "integer", "minimum": 5, "maximum": 3}),
        NO_SCHEMA + "Unsatisfiable schema: minimum (5) is greater than maximum (3)",
    ),
    (
        json_schema({"type": "array", "uniqueItems": True}),
        NO_SCHEMA + '"uniqueItems": not supported in a schema that an answer must follow; leave it out, and check the '
        "answer for it",
    ),
    (
        json_schema({"properties": {"a": {"if": {"type": "string"}, "then": {"not": {"const": "b"}}}}}),
        NO_SCHEMA + '"if", "then": not supported in a schema that an answer must follow; leave it out, and check the '
        "answer for it",
    ),
    (
        json_schema({"oneOf": [{"type": "integer"}, {"type": "number"}]}),
        NO_SCHEMA + "oneOf whose alternatives may hold at the same time is not supported; use anyOf",
    ),
    (
        json_schema({"type": "string", "format": "roman"}),
        NO_SCHEMA + "the format roman is not supported; leave it out, or use a pattern",
    ),
    (json_schema({"enum": []}), NO_SCHEMA + "Unsatisfiable schema: anyOf is empty"),
    (
        json_schema({"type": "string", "pattern": "(?=a)b"}),
        NO_SCHEMA
        + "regex parse error:\n    (?=a)b\n    ^^^\nerror: look-around, including look-ahead and look-behind, "
        "is not supported",
    ),
    (
        json_schema({"type": "string", "pattern": "(a|b"}),
        NO_SCHEMA + "regex parse error:\n    (a|b\n    ^\nerror: unclosed group",
    ),
    (
        json_schema({"enum": ["\ud800"]}),
        NO_SCHEMA + 'failed to parse "%json": unexpected end of hex escape at line 1 column 19',
    ),
    (
        {"response_format": {"type": "xml"}},
        "response_format.type is 'xml', must be one of text, json_object, json_schema",
    ),
    # tools
    ({"tools": [function()]}, f"tools[0].function.name is None, {NAME}"),
    ({"tools": [function(name='a"b')]}, f"tools[0].function.name is 'a\"b', {NAME}"),
    ({"tools": [TOOL] * 300}, "tools has 300 tools, limit is 256"),
    ({"tools": [TOOL], "tool_choice": function(name="g")}, "tool_choice names 'g', which is none of the tools"),
    ({"tool_choice": "required"}, "tool_choice is 'required', and there are no tools"),
    ({"tools": [TOOL], "tool_choice": "some"}, f"tool_choice is 'some', {CHOICE}"),
    (
        {"tools": [function(name="f", parameters={"type": "wizard"})], "tool_choice": "required"},
        NO_SCHEMA + "Invalid type: wizard",
    ),
    # texts that are none
    (says("\ud800"), f"the prompt holds a lone surrogate (U+D800) at character 17, {SURROGATE}"),
    (
        {"tools": [function(name="f", description="\udc00")]},
        f"the prompt holds a lone surrogate (U+DC00) at character 89, {SURROGATE}",
    ),
    # a chat template that raises, of what it is asked
    (BAD_TEMPLATE_KWARGS, "the chat template refused the messages: TypeError: 'int' object is not callable"),
    (
        {"chat_template_kwargs": {"messages": []}},
        "chat_template_kwargs.messages cannot be set; the request itself does",
    ),
    # what would change the answer and is not served
    ({"suffix": "x"}, "suffix is not supported; leave it out or send ''"),
    ({"best_of": 2}, "best_of is not supported; leave it out or send 1"),
    ({"guided_json": {}}, "guided_json is not supported; leave it out"),
]
# Path, fields, message: of the endpoints that have fields of their own. Each is a 400.
BAD_OTHERS: Final[list[tuple[str, dict[str, Any], str]]] = [
    (COMPLETIONS, {}, "prompt is missing"),
    (COMPLETIONS, {"prompt": ""}, "prompt is empty; it must have at least one token"),
    (
        COMPLETIONS,
        {"prompt": 5},
        "prompt is 5, must be a text, a list of token ids, or a list of one or more of either",
    ),
    (COMPLETIONS, {"prompt": [640]}, "prompt has the token id 640, must be from 0 to 639"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt has the token id -1, must be from 0 to 639"),
    (
        COMPLETIONS,
        {"prompt": [16] * 5000},
        "the prompt has 5000 tokens, limit is 4095: the context of 4096 tokens (--max-model-len) must hold the answer, "
        "too",
    ),
    (COMPLETIONS, {"prompt": ["a"] * 2000}, "prompt has 2000 prompts, limit is 1024 (--max-waiting)"),
    (
        COMPLETIONS,
        {"prompt": ["a"] * 20, "n": 100},
        "n is 100 for each of 20 prompts, limit is 1024 choices (--max-waiting)",
    ),
    (COMPLETIONS, {"prompt": "a", "suffix": "x"}, "suffix is not supported; leave it out or send ''"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs is 21, must be a whole number from 0 to 20"),
    (COMPLETIONS, {"prompt": "\ud800"}, f"the prompt holds a lone surrogate (U+D800) at character 0, {SURROGATE}"),
    ("/v1/responses", {}, "input is missing"),
    (
        "/v1/responses",
        {"input": "hi", "previous_response_id": "r"},
        "previous_response_id is not supported; leave it out",
    ),
    (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 0},
        "max_output_tokens is 0, must be a whole number of at least 1",
    ),
    ("/v1/responses", {"input": "hi", "temperature": -1}, "temperature is -1, must be a number from 0 to 2"),
    ("/v1/responses", {"input": "hi", "tools": [{"type": "function"}]}, f"tools[0].name is None, {NAME}"),
    ("/v1/responses", {"input": []}, "input is [], must be a text or a list of at least one item"),
    (
        "/v1/responses",
        {"input": [{"role": "wizard", "content": "x"}]},
        "input[0].role is 'wizard', must be one of user, assistant, system, developer",
    ),
    (
        "/v1/responses",
        {"input": "hi", "text": {"format": {"type": "json_schema", "schema": 5}}},
        "text.format.schema is 5, must be an object",
    ),
    ("/v1/messages", {"messages": [USER]}, "max_tokens is missing"),
    (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 3, "stop_sequences": ["x"] * 100},
        "stop_sequences has 100 strings, limit is 64",
    ),
    (
        "/v1/messages",
        {"messages": [USER], "max_tokens": 3, "tools": [{"name": "f", "input_schema": 5}]},
        "tools[0].input_schema is 5, must be an object",
    ),
    ("/v1/messages", {"max_tokens": 3}, "messages is missing"),
    ("/v1/messages", {"messages": [USER], "max_tokens": 0}, "max_tokens is 0, must be a whole number of at least 1"),
    (
        "/v1/messages",
        {**says("x", "wizard"), "max_tokens": 3},
        "messages[0].role is 'wizard', must be user or assistant",
    ),
    ("/v1/messages", {"messages": [USER], "max_tokens": 3, "tools": [{}]}, f"tools[0].name is None, {NAME}"),
    ("/v1/messages/count_tokens", {"messages": []}, "messages is [], must be a list of at least one message"),
    ("/tokenize", {}, "prompt is missing"),
    ("/tokenize", {"prompt": 5}, "prompt is 5, must be a string"),
    ("/tokenize", {"messages": []}, "messages is [], must be a list of at least one message"),
    ("/detokenize", {}, "tokens is missing"),
    ("/detokenize", {"tokens": [640]}, "tokens has the token id 640, must be from 0 to 639"),
    ("/detokenize", {"tokens": ["x"]}, "tokens is ['x'], must be a list of token ids"),
]
# Bytes, status, and how the message begins: of every endpoint that takes a body.
BAD_BODIES: Final[list[tuple[bytes, int, str]]] = [
    (b"hello", 400, "the body is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    (b"", 400, "the body is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
    (b'{"messages": [', 400, "the body is not valid JSON: Expecting value: line 1 column 15 (char 14)"),
    (
        b'{"messages": "\xff\xfe"}',
        400,
        "the body is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 14",
    ),
    (b"[" * 200_000, 400, "the body is not valid JSON: maximum recursion depth exceeded"),
    (b'{"n": ' + b"9" * 10_000 + b"}", 400, "the body is not valid JSON: Exceeds the limit (4300 digits)"),
    (b"[1]", 400, "the body is a JSON list, must be an object"),
    (b"null", 400, "the body is a JSON NoneType, must be an object"),
    (b" " * 2_000_000, 413, "the body has 2000000 bytes or more, limit is 1048576 (--max-body-mb)"),
]
# Schemas that take much work, and the error of those that fail: some at once, some in mid-answer.
RECURSIVE: Final = {"$defs": {"n": {"type": "object", "properties": {"c": {"$ref": "#/$defs/n"}}}}, "$ref": "#/$defs/n"}
DOUBLING: Final[dict[str, Any]] = {
    "$ref": "#/$defs/d0",
    "$defs": {"d40": {"type": "integer"}}
    | {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
}
HARD_SCHEMAS: Final[list[tuple[Any, str]]] = [
    (RECURSIVE, ""),
    (DOUBLING, ""),
    ({"type": "string", "pattern": "^((a{1,99}){1,99}){1,99}$"}, ""),
    ({"type": "string", "pattern": "^(a|a?)*(a|aa)+([a-z]*)*$"}, ""),
    ({"type": "string", "pattern": "^(.*a.{40}b|.*c.{50}d|.*e.{60}f)$"}, ""),
    ({"anyOf": [{"type": "string", "pattern": f"^.*{i}.{{{i}}}$"} for i in range(200)]}, ""),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}, ""),
    ({"type": "string", "minLength": 10**6}, ""),
    (
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(700)}},
        "the answer cannot follow its grammar any further, ask for a simpler one: Parser Error: Current row has 2807 "
        "items; max is 2000",
    ),
]
