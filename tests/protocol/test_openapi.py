"""The replica's own description: what it allows is answered, and what is drawn from it never is the replica's fault."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import requests
from aiohttp import ClientSession
from hypothesis import HealthCheck, given, settings

from replica.api.openapi import description
from tests.model_replica import model_replica
from tests.schema_values import values

EXAMPLES = 25
SHORT = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "min_tokens": 1, "n": 2}


def test_description_names_every_route_and_is_json() -> None:
    paths = description("m")["paths"]
    assert {path for path, item in paths.items() if "post" in item} == {
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
        *("/tokenize", "/detokenize"),
    }
    assert json.loads(json.dumps(description("m"))) == description("m")


async def test_bodies_drawn_from_the_description_are_answered_or_refused_clearly() -> None:
    async with model_replica(max_model_len=160) as served, ClientSession() as session:
        async with session.get(served.url + "/openapi.json") as response:
            paths = (await response.json())["paths"]
        for path, item in paths.items():
            if "post" in item:
                schema = item["post"]["requestBody"]["content"]["application/json"]["schema"]
                answered = await asyncio.to_thread(ask_examples, served.url + path, schema)
                assert answered, f"nothing that the description of {path} allows was answered"


def ask_examples(url: str, schema: Any) -> int:
    """Sends bodies that follow the schema; the number of those that were answered."""
    num_answered = 0

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(values(schema))
    def ask(body: Any) -> None:
        nonlocal num_answered
        for name, most in SHORT.items():
            if name in schema["properties"]:
                body[name] = min(body.get(name, most), most)  # time is short
        response = requests.post(url, json=body, timeout=60)
        assert response.status_code in (200, 400, 404), (response.text, body)
        assert response.status_code == 200 or response.json()["error"]["message"]
        num_answered += response.status_code == 200

    ask()
    return num_answered
