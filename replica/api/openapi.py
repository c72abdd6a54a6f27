"""The OpenAPI description of a replica's routes, made from the tables that check requests."""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

from replica.api.fields import MAX_INT32, Table
from replica.api.request_fields import CHAT, COMPLETION
from replica.api.tokens_api import DETOKENIZE, TOKENIZE

Json = dict[str, Any]

_TEXT: Final[Json] = {"type": "string"}
_BLOCKS: Final[Json] = {
    "type": "array",
    "items": {"type": "object", "properties": {"type": {"const": "text"}, "text": _TEXT}, "required": ["type", "text"]},
    "minItems": 1,
}
_SAMPLING: Final[Json] = {
    name: dict(CHAT.served[name].schema) for name in ("stream", "temperature", "top_p", "top_k", "min_p", "seed")
}
_MESSAGES: Final[Json] = {
    "type": "object",
    "properties": {
        "model": _TEXT,
        "max_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_INT32},
        "system": {"anyOf": [_TEXT, _BLOCKS]},
        "messages": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"role": {"enum": ["user", "assistant"]}, "content": {"anyOf": [_TEXT, _BLOCKS]}},
                "required": ["role", "content"],
            },
            "minItems": 1,
        },
        "stop_sequences": {"type": "array", "items": _TEXT, "maxItems": 64},
        "tools": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,64}$"},
                    "description": _TEXT,
                    "input_schema": {"type": "object"},
                },
                "required": ["name", "input_schema"],
            },
        },
        "tool_choice": {"type": "object", "properties": {"type": {"enum": ["auto", "none"]}}, "required": ["type"]},
        **_SAMPLING,
    },
    "required": ["max_tokens", "messages"],
}
_RESPONSES: Final[Json] = {
    "type": "object",
    "properties": {
        "model": _TEXT,
        "input": {
            "anyOf": [
                _TEXT,
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {
                            "type": {"const": "message"},
                            "role": {"enum": ["user", "assistant", "system", "developer"]},
                            "content": _TEXT,
                        },
                        "required": ["role", "content"],
                    },
                    "minItems": 1,
                },
            ]
        },
        "instructions": _TEXT,
        "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": MAX_INT32},
        "reasoning": {"type": "object", "properties": {"effort": {"enum": ["none", "low", "medium", "high"]}}},
        "text": {
            "type": "object",
            "properties": {
                "format": {"type": "object", "properties": {"type": {"const": "text"}}, "required": ["type"]}
            },
        },
        **_SAMPLING,
    },
    "required": ["input"],
}
_ERRORS: Final = {
    "400": "the request is wrong",
    "401": "the API key is missing or wrong",
    "404": "the model is not served here",
    "408": "the body did not come",
    "413": "the body is too large",
    "503": "full, loading or stopping; come again",
}


def description(model_name: str) -> Json:
    """OpenAPI 3.1. Values that the description allows are accepted, but for what only the model can tell."""
    tokenize = _schema_of(TOKENIZE)
    tokenize["required"] = []
    tokenize["anyOf"] = [{"required": ["prompt"]}, {"required": ["messages"]}]
    bodies = {
        "/v1/chat/completions": _schema_of(CHAT),
        "/v1/completions": _schema_of(COMPLETION),
        "/v1/responses": _RESPONSES,
        "/v1/messages": _MESSAGES,
        "/v1/messages/count_tokens": {**_MESSAGES, "required": ["messages"]},
        "/tokenize": tokenize,
        "/detokenize": _schema_of(DETOKENIZE),
    }
    paths: Json = {path: {"post": _post(schema, model_name)} for path, schema in bodies.items()}
    for path in ("/v1/models", "/health", "/metrics", "/version", "/openapi.json"):
        paths[path] = {"get": {"responses": {"200": {"description": "what is asked for"}, **_errors("401", "503")}}}
    version = importlib.metadata.version("lockstep-serving")
    return {"openapi": "3.1.0", "info": {"title": "Lockstep replica", "version": version}, "paths": paths}


def _schema_of(table: Table) -> Json:
    properties = {name: dict(field.schema) for name, field in table.served.items()}
    return {"type": "object", "properties": properties, "required": [table.required]}


def _post(schema: Json, model_name: str) -> Json:
    properties = schema["properties"] | {"model": {"const": model_name}}
    body = {"application/json": {"schema": {**schema, "properties": properties}}}
    good = {
        "description": "the answer; events if `stream` is true",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
    return {"requestBody": {"required": True, "content": body}, "responses": {"200": good, **_errors(*_ERRORS)}}


def _errors(*statuses: str) -> Json:
    return {status: {"description": _ERRORS[status], "content": {"application/json": {}}} for status in statuses}
