"""The HTTP side of a replica. `build_app` shows every route in one screen; start reading there.

POST /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages
  -> read_body -> a checked request (openai_api.py; the last two become chats first) -> prompts as tokens
  -> Generation.answer (generation.py)
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import AsyncIterator
from typing import Any, Final

from aiohttp import web

from replica.api.answers import Json, to_json
from replica.api.choice import Choice
from replica.api.fields import FieldReader
from replica.api.generation import Asked, Generation, SequenceLoop
from replica.api.grammar import GrammarCompiler
from replica.api.http_io import MIB, read_body
from replica.api.logprobs import ChatLogprobs, CompletionLogprobs
from replica.api.messages_answers import MessagesWriter
from replica.api.messages_request import chat_of_messages
from replica.api.metrics import Metrics
from replica.api.middleware import (
    MESSAGES_PATH,
    REQUEST_ID,
    authorize_with,
    count_answers,
    errors_as_json,
    identify,
    show_id,
)
from replica.api.openai_answers import ChatFormat, CompletionFormat, OpenAIWriter
from replica.api.openai_api import (
    ChatRequest,
    chat_prompt,
    check_model,
    completion_prompts,
    parse_completion,
    parse_json,
    read_chat,
)
from replica.api.openapi import description
from replica.api.responses_answers import ResponsesWriter
from replica.api.responses_request import chat_of_response
from replica.api.served_model import ServedModel
from replica.api.tokens_api import detokenize, tokenize
from replica.api.tool_choice import chat_grammar
from replica.config import ReplicaConfig
from replica.errors import NotStored, Unavailable
from replica.lifecycle import EngineState, Lifecycle

BODY_BYTES_PER_TOKEN: Final = 128  # a token is about 4 characters, seldom 16, and JSON may write one in 6 bytes


def build_app(
    *, config: ReplicaConfig, model: ServedModel, loop: SequenceLoop, lifecycle: Lifecycle
) -> web.Application:
    """The replica's application. Run it with handler_cancellation=True."""
    metrics = Metrics(
        model_name=model.name,
        dp_rank=config.dp_rank,
        block_size=config.block_size,
        has_prefix_cache=not config.no_prefix_cache,
        stats=loop.stats,
    )
    api = Api(config=config, model=model, loop=loop, lifecycle=lifecycle, metrics=metrics)
    app = web.Application(
        middlewares=[identify, count_answers(metrics), errors_as_json, authorize_with(config.api_key)]
    )
    app.on_response_prepare.append(show_id)
    app.cleanup_ctx.append(api.close_grammars)
    app.router.add_post("/v1/chat/completions", api.chat_completions)
    app.router.add_post("/v1/completions", api.completions)
    app.router.add_post("/v1/responses", api.responses)
    for method, path in (("GET", "{id}"), ("DELETE", "{id}"), ("POST", "{id}/cancel"), ("GET", "{id}/input_items")):
        app.router.add_route(method, f"/v1/responses/{path}", api.stored_response)
    app.router.add_post(MESSAGES_PATH, api.messages)
    app.router.add_post(MESSAGES_PATH + "/count_tokens", api.count_tokens)
    app.router.add_get("/v1/models", api.models)
    app.router.add_get("/v1/models/{model:.+}", api.one_model)
    app.router.add_post("/tokenize", api.tokenize)
    app.router.add_post("/detokenize", api.detokenize)
    app.router.add_get("/health", api.health)
    app.router.add_get("/group", api.group)
    app.router.add_get("/metrics", api.metrics_text)
    app.router.add_get("/version", api.version)
    app.router.add_get("/openapi.json", api.openapi)
    return app


class Api:
    """The handlers and what they share."""

    def __init__(
        self,
        *,
        config: ReplicaConfig,
        model: ServedModel,
        loop: SequenceLoop,
        lifecycle: Lifecycle,
        metrics: Metrics,
    ) -> None:
        self._config = config
        self._model = model
        self._loop = loop
        self._lifecycle = lifecycle
        self._metrics = metrics
        self._generation = Generation(config=config, model=model, loop=loop, metrics=metrics)
        self._max_body_bytes = max_body_bytes(config, model.max_model_len)
        self._reader = FieldReader()
        self._grammars = GrammarCompiler(model)

    async def close_grammars(self, app: web.Application) -> AsyncIterator[None]:
        """Ends the process that tries grammars with the application."""
        yield
        await self._grammars.close()

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        arrived_s = self._metrics.now_s()
        body, body_bytes = await self._json(request)
        chat = read_chat(self._reader, body, body_bytes=body_bytes)
        asked = await self._asked(chat, arrived_s)

        def writer(choices: list[Choice]) -> OpenAIWriter:
            return OpenAIWriter(
                format_=ChatFormat(),
                logprobs=ChatLogprobs(self._model.tokenizer),
                options=chat.options,
                choices=choices,
                request_id=request[REQUEST_ID],
                model_name=self._model.name,
            )

        return await self._generation.answer(request, asked, writer)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        arrived_s = self._metrics.now_s()
        body = await self._body(request)
        completion = parse_completion(self._reader, body, max_prompts=self._config.max_waiting)
        check_model(completion.options.model, self._model)
        prompts = await completion_prompts(completion, self._model)
        asked = Asked(options=completion.options, prompts=prompts, arrived_s=arrived_s)

        def writer(choices: list[Choice]) -> OpenAIWriter:
            return OpenAIWriter(
                format_=CompletionFormat(self._model.tokenizer),
                logprobs=CompletionLogprobs(self._model.tokenizer),
                options=completion.options,
                choices=choices,
                request_id=request[REQUEST_ID],
                model_name=self._model.name,
            )

        return await self._generation.answer(request, asked, writer)

    async def responses(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        arrived_s = self._metrics.now_s()
        body, body_bytes = await self._json(request)
        chat = read_chat(self._reader, chat_of_response(self._reader, body), body_bytes=body_bytes)
        asked = await self._asked(chat, arrived_s)

        def writer(choices: list[Choice]) -> ResponsesWriter:
            return ResponsesWriter(
                body=body, choices=choices, request_id=request[REQUEST_ID], model_name=self._model.name
            )

        return await self._generation.answer(request, asked, writer)

    async def stored_response(self, request: web.Request) -> web.StreamResponse:
        """Any other route of /v1/responses."""
        raise NotStored("responses are not stored here; send the whole conversation as input")

    async def messages(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        arrived_s = self._metrics.now_s()
        body, body_bytes = await self._json(request)
        chat = read_chat(self._reader, chat_of_messages(self._reader, body), body_bytes=body_bytes)
        asked = await self._asked(chat, arrived_s)

        def writer(choices: list[Choice]) -> MessagesWriter:
            return MessagesWriter(choices=choices, request_id=request[REQUEST_ID], model_name=self._model.name)

        return await self._generation.answer(request, asked, writer)

    async def count_tokens(self, request: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        body, body_bytes = await self._json(request)
        as_chat = chat_of_messages(self._reader, body, counts=True)
        chat = read_chat(self._reader, as_chat, body_bytes=body_bytes)
        check_model(chat.options.model, self._model)
        prompt = await chat_prompt(chat.conversation, self._model)
        return _json_response({"input_tokens": len(prompt.token_ids)})

    async def tokenize(self, request: web.Request) -> web.Response:
        """POST /tokenize."""
        body, body_bytes = await self._json(request)
        return _json_response(await tokenize(self._reader, body, self._model, body_bytes=body_bytes))

    async def detokenize(self, request: web.Request) -> web.Response:
        """POST /detokenize."""
        body, _ = await self._json(request)
        return _json_response(detokenize(self._reader, body, self._model))

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return _json_response({"object": "list", "data": [self._model_object()]})

    async def one_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        check_model(request.match_info["model"], self._model)
        return _json_response(self._model_object())

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 only when requests are served, and step after step ends. Says which step that is."""
        stats = self._loop.stats()
        place = {"dp_rank": self._config.dp_rank, "epoch": stats.epoch, "step": stats.step}
        state, reason = str(self._lifecycle.state), self._lifecycle.reason
        if self._lifecycle.state is EngineState.READY:
            if self._loop.is_progressing():
                return _json_response({"status": state, **place})
            state = "stalled"
            reason = f"work waits and no step has ended for {self._config.progress_deadline_s:g} s"
        return web.json_response({"status": state, "reason": reason or state, **place}, status=503)

    async def group(self, request: web.Request) -> web.Response:
        """GET /group: which replicas step with this one, which were lost and why, and what the last change took."""
        body = {"group": self._config.group, "dp_rank": self._config.dp_rank, **self._loop.stats().group.to_json()}
        return _json_response(body)

    async def metrics_text(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._metrics.text(), headers={"Content-Type": content_type})

    async def version(self, request: web.Request) -> web.Response:
        """GET /version."""
        return _json_response({"version": importlib.metadata.version("lockstep-serving")})

    async def openapi(self, request: web.Request) -> web.Response:
        """GET /openapi.json."""
        return _json_response(description(self._model.name))

    async def _asked(self, chat: ChatRequest, arrived_s: float) -> Asked:
        check_model(chat.options.model, self._model)
        prompt = await chat_prompt(chat.conversation, self._model)
        constrained = chat_grammar(chat, self._model)
        grammar = None
        if constrained is not None:
            grammar = await self._grammars.compile(constrained.text, param=constrained.param)
        return Asked(
            options=chat.options,
            prompts=[prompt],
            arrived_s=arrived_s,
            is_chat=True,
            reads_calls=chat.reads_calls,
            parallel_tool_calls=chat.parallel_tool_calls,
            grammar=grammar,
        )

    async def _json(self, request: web.Request) -> tuple[Any, int]:
        """The value in the body, and the body's bytes."""
        body = await self._body(request)
        return parse_json(body), len(body)

    async def _body(self, request: web.Request) -> bytes:
        """The body of a request for an answer. Raises Unavailable before it is read if there can be none."""
        if self._lifecycle.state is not EngineState.READY:
            raise Unavailable(self._lifecycle.reason or f"the replica is {self._lifecycle.state}")
        return await read_body(request, max_bytes=self._max_body_bytes, timeout_s=self._config.client_timeout_s)

    def _model_object(self) -> Json:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "lockstep",
            "max_model_len": self._model.max_model_len,
        }


def max_body_bytes(config: ReplicaConfig, max_model_len: int) -> int:
    """The most bytes of a body: --max-body-mb, or what a full context can need.

    While a body is parsed and checked nothing else runs, so one that cannot be answered should not be taken in.
    """
    if config.max_body_mb:
        return int(config.max_body_mb * MIB)
    return min(max(MIB, max_model_len * BODY_BYTES_PER_TOKEN), 32 * MIB)


def _json_response(value: Json) -> web.Response:
    return web.json_response(value, dumps=to_json)
