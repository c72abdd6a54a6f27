"""The OpenAPI description of a replica's routes, made from the tables that check requests.

It is to be as wide as what is served and no wider: a body that a table's checks let through follows the description,
and one that follows it is refused only for what no schema can say (a token that the model has not, a prompt over the
context, fields that contradict each other). Tests hold both to that.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any, Final

from replica.api.fields import Table, nullable
from replica.api.messages_request import COUNT_TOKENS, MESSAGES
from replica.api.request_fields import CHAT, COMPLETION
from replica.api.responses_request import RESPONSES
from replica.api.tokens_api import DETOKENIZE, TOKENIZE_CHAT, TOKENIZE_TEXT

Json = dict[str, Any]

STREAMED: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
BODIES: Final[dict[str, tuple[Table, ...]]] = {
    "/v1/chat/completions": (CHAT,),
    "/v1/completions": (COMPLETION,),
    "/v1/responses": (RESPONSES,),
    "/v1/messages": (MESSAGES,),
    "/v1/messages/count_tokens": (COUNT_TOKENS,),
    "/tokenize": (TOKENIZE_CHAT, TOKENIZE_TEXT),
    "/detokenize": (DETOKENIZE,),
}
READ: Final = ("/v1/models", "/v1/models/{model}", "/health", "/group", "/metrics", "/version", "/openapi.json")
_ERROR: Final[Json] = {
    "type": "object",
    "properties": {"error": {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}},
    "required": ["error"],
}
_ERRORS: Final = {
    "400": "the request is wrong, or its answer cannot follow its grammar any further",
    "401": "the API key is missing or wrong",
    "404": "the model is not served here",
    "408": "the body did not come",
    "413": "the body is too large",
    "503": "full, loading, stopping or lost; come again",
}


def description(model_name: str) -> Json:
    """OpenAPI 3.1."""
    paths: Json = {path: {"post": _post(path, tables, model_name)} for path, tables in BODIES.items()}
    for path in READ:
        paths[path] = {"get": _get(path)}
    version = importlib.metadata.version("lockstep-serving")
    return {"openapi": "3.1.0", "info": {"title": "Lockstep replica", "version": version}, "paths": paths}


def body_schema(tables: tuple[Table, ...], model_name: str) -> Json:
    """The JSON schema of a body that one of the tables is for."""
    if len(tables) > 1:
        return {"anyOf": [body_schema((table,), model_name) for table in tables]}
    (table,) = tables
    properties: Json = {name: {} for name in sorted(table.ignored)}
    properties |= {name: {"enum": [*neutrals, None]} for name, neutrals in table.not_served.items()}
    for name, field in table.served.items():
        properties[name] = dict(field.schema) if name in table.required else nullable(field.schema)
    properties["model"] = {"enum": [model_name, None]}
    return {"type": "object", "properties": properties, "required": list(table.required)}


def _post(path: str, tables: tuple[Table, ...], model_name: str) -> Json:
    body = {"required": True, "content": _as_json(body_schema(tables, model_name))}
    good: Json = {"description": "the answer", "content": _as_json({"type": "object"})}
    if path in STREAMED:
        good["description"] += "; events if `stream` is true"
        good["content"]["text/event-stream"] = {}
    return {"requestBody": body, "responses": {"200": good, **_errors(*_ERRORS)}}


def _get(path: str) -> Json:
    content: Json = {"text/plain": {}} if path == "/metrics" else _as_json({"type": "object"})
    good = {"description": "what is asked for", "content": content}
    made: Json = {"responses": {"200": good, **_errors("401", "404")}}
    made["responses"]["503"] = {"description": _ERRORS["503"], "content": _as_json({"type": "object"})}
    if "{model}" in path:
        made["parameters"] = [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]
    return made


def _errors(*statuses: str) -> Json:
    return {status: {"description": _ERRORS[status], "content": _as_json(_ERROR)} for status in statuses}


def _as_json(schema: Json) -> Json:
    return {"application/json": {"schema": schema}}
