"""Requests of the two older endpoints as tests write them, read for the demo model."""

from __future__ import annotations

import json
from typing import Any, Final

from replica.api.fields import FieldReader
from replica.api.openai_api import (
    ChatRequest,
    CompletionRequest,
    Options,
    parse_completion,
    parse_json,
    read_chat,
    sampling_params,
)
from replica.api.served_model import ServedModel
from replica.config import ReplicaConfig
from replica.model_config import ModelConfig
from replica.request import SamplingParams
from tests.commands import DEMO_MODEL

CONFIG: Final = ReplicaConfig(model=DEMO_MODEL)
MODEL: Final = ServedModel.load(CONFIG, ModelConfig.load(DEMO_MODEL))
MESSAGES: Final = [{"role": "user", "content": "What is 1 + 2?"}]
TOOL: Final = {"type": "function", "function": {"name": "get_weather"}}


def parse_chat(reader: FieldReader, body: bytes) -> ChatRequest:
    return read_chat(reader, parse_json(body), body_bytes=len(body))


def chat(**fields: Any) -> ChatRequest:
    return parse_chat(FieldReader(), json.dumps({"messages": MESSAGES, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion(FieldReader(), json.dumps({"prompt": "hi", **fields}).encode(), max_prompts=4)


def params(options: Options, *, model: ServedModel = MODEL, prompt_tokens: int = 10) -> SamplingParams:
    return sampling_params(options, model, request_id="r1", prompt_tokens=prompt_tokens, max_cached=100_000)
