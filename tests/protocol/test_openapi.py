"""Bodies drawn from the replica's own description are answered, or refused for what only the model can tell."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from typing import Any, Final

import pytest
import requests
from hypothesis import HealthCheck, given, settings

from replica.api.openapi import BODIES
from tests.probed_replica import probed_replica
from tests.schema_values import values

EXAMPLES: Final = 15
SHORT: Final = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2, "n": 2}
# Of values that the description allows: what depends on the model, on the context, or on two fields together.
ONLY_HERE: Final = re.compile(
    "|".join(
        (
            r"the prompt has ",
            r"(prompt|logit_bias|tokens) has the token id -?\d+, must be from 0 to 639",
            r"prompt is empty",
            r"prompt has \d+ prompts, limit is",
            r"min_tokens (is \d+, limit is \d+: the answer's max_tokens|leaves no token to begin with)",
            r"n is \d+ for each of",
            r"top_logprobs is \d+, must be 0 without logprobs",
            r"add_generation_prompt and continue_final_message cannot both be true",
            r"the chat template (refused the messages|does not show the last message|makes an empty prompt)",
            r"the schema (cannot be used|has \d+ characters)",
            r"the answer cannot follow its grammar",
            r"tool_choice (is 'required', and there are no tools|names '.*', which is none of the tools)",
        )
    )
)


@pytest.mark.timeout(300)
async def test_bodies_drawn_from_the_description_are_answered_or_refused_for_a_good_reason() -> None:
    async with probed_replica(max_model_len=160) as (served, _):
        described = await asyncio.to_thread(requests.get, served.url + "/openapi.json", timeout=60)
        for path in BODIES:
            schema = described.json()["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
            statuses = await asyncio.to_thread(ask_examples, served.url + path, with_known_tokens(schema))
            assert statuses[200] > EXAMPLES / 5, (path, statuses)


def with_known_tokens(schema: Any) -> Any:
    """The schema with nothing but tokens that the model has, which it cannot say."""
    if schema == {"type": "integer"}:
        return {"type": "integer", "minimum": 0, "maximum": 639}
    if schema == {"pattern": "^[0-9]{1,10}$"}:
        return {"pattern": "^[1-9][0-9]$"}
    if isinstance(schema, dict):
        return {name: with_known_tokens(value) for name, value in schema.items()}
    return [with_known_tokens(value) for value in schema] if isinstance(schema, list) else schema


def ask_examples(url: str, schema: Any) -> Counter[int]:
    """Sends bodies that follow the schema; how many got which status."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )
    @given(values(schema))
    def ask(body: Any) -> None:
        for name, most in SHORT.items():
            if name in schema.get("properties", {}):
                body[name] = min(body.get(name) or most, most)  # time is short
        response = requests.post(url, json=body, timeout=60)
        statuses[response.status_code] += 1
        if response.status_code != 200:
            assert response.status_code == 400, (response.text, body)
            assert ONLY_HERE.match(response.json()["error"]["message"]), (response.text, body)

    ask()
    return statuses
