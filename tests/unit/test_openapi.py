"""The description of the API is as wide as what is served, and no wider."""

from __future__ import annotations

import json
import random
from typing import Any, Final

import jsonschema
import pytest
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replica.api.fields import FieldReader, Table
from replica.api.openapi import BODIES, body_schema, description
from replica.api.server import build_app
from replica.errors import BadRequest
from replica.lifecycle import EngineState, Lifecycle
from tests.fuzz import mutated
from tests.protocol.fake_loop import CONFIG, MODEL, FakeLoop
from tests.request_bodies import GOOD
from tests.schema_values import values

NUM_MUTATED: Final = 3000
SCHEMAS: Final = {path: body_schema(tables, MODEL.name) for path, tables in BODIES.items()}
STRATEGIES: Final = {path: values(schema) for path, schema in SCHEMAS.items()}
VALIDATORS: Final = {path: jsonschema.Draft202012Validator(schema) for path, schema in SCHEMAS.items()}


def table_of(path: str, body: Any) -> Table:
    """The one that reads the body; /tokenize has two."""
    is_chat = isinstance(body, dict) and body.get("messages") is not None
    return BODIES[path][0] if is_chat or len(BODIES[path]) == 1 else BODIES[path][1]


def is_read(path: str, body: Any) -> bool:
    try:
        FieldReader().read(body, table_of(path, body))
    except BadRequest:
        return False
    return True


def strict_json(raw: bytes) -> Any:
    """The value, if it is JSON: without NaN and the like. Raises ValueError, RecursionError."""

    def refuse(constant: str) -> Any:
        raise ValueError(constant)

    return json.loads(raw, parse_constant=refuse)


def has_float_tokens(body: Any) -> bool:
    """Whether a list of tokens has an 1e308, which is an integer to JSON Schema; our lists have integers alone."""
    fields = [body.get(name) for name in ("tokens", "prompt", "stop_token_ids")] if isinstance(body, dict) else []
    lists = [field for field in fields if isinstance(field, list)]
    lists += [item for items in lists for item in items if isinstance(item, list)]
    return any(isinstance(item, float) for items in lists for item in items)


@pytest.mark.parametrize("path", BODIES)
def test_good_bodies_follow_the_description(path: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[path])
    bodies = [body for of, body in GOOD if of == path]
    assert bodies
    for body in bodies:
        VALIDATORS[path].validate(body)
        assert is_read(path, body)


def test_bodies_follow_the_description_exactly_when_they_are_read() -> None:
    seen: set[tuple[str, bool]] = set()
    for number in range(NUM_MUTATED):
        path, raw = mutated(random.Random(number))
        try:
            body = strict_json(raw)
        except (ValueError, RecursionError):
            continue
        if isinstance(body, dict) and body.get("model") not in (None, MODEL.name):
            continue  # a model that is not there is a 404
        if has_float_tokens(body):
            continue
        follows = VALIDATORS[path].is_valid(body)
        assert is_read(path, body) is follows, (path, raw[:500])
        seen.add((path, follows))
    assert seen == {(path, follows) for path in BODIES for follows in (True, False)}


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_whatever_follows_the_description_is_read(path: str, data: st.DataObject) -> None:
    body = data.draw(STRATEGIES[path])
    assert is_read(path, body), body


def test_description_names_every_route() -> None:
    app = build_app(config=CONFIG, model=MODEL, loop=FakeLoop(), lifecycle=Lifecycle(state=EngineState.READY))
    served = {
        (route.method.lower(), resource.canonical)
        for resource in app.router.resources()
        for route in resource
        if route.method != "HEAD" and not resource.canonical.startswith("/v1/responses/")  # they are stored nowhere
    }
    described = {(method, path) for path, item in description("m")["paths"].items() for method in item}
    assert described == served and isinstance(app, web.Application)
    assert json.loads(json.dumps(description("m"))) == description("m")
