"""The HTTP side of a replica: OpenAI's routes, health and metrics. `build_app` shows every route in one screen.

    POST /v1/chat/completions, /v1/completions
      -> read_body -> openai_api: checked request -> prompts as tokens -> sequences -> StepLoop.submit
      -> the sequences' streams -> answers: text, JSON -> one body, or one event a chunk

However a request ends, its sequences are aborted on the way out, which frees what still runs. A client that leaves
cancels its handler (the runner sets handler_cancellation), or a write to it fails.
"""

from __future__ import annotations

import asyncio
import hmac
import importlib.metadata
import logging
import re
import uuid
from collections.abc import Awaitable, Callable
from typing import Final, Protocol

from aiohttp import web

from proxy.protocol import REQUEST_ID_HEADER
from replica.answers import Answer, ChatFormat, Choice, CompletionFormat, Format, to_json
from replica.config import ReplicaConfig
from replica.errors import RequestError, Unauthorized, Unavailable, UnknownModel
from replica.http_io import EventStream, error_response, http_error_response, read_body
from replica.lifecycle import EngineState, Lifecycle
from replica.metrics import ChoiceTimes, Metrics
from replica.openai_api import (
    Options,
    Prompt,
    chat_prompt,
    check_model,
    completion_prompts,
    parse_chat,
    parse_completion,
    sampling_params,
)
from replica.reasoning import ReasoningSplitter
from replica.request import OutputStream, Sequence
from replica.request_fields import FieldReader
from replica.served_model import ServedModel
from replica.step_loop import EngineStats

logger = logging.getLogger(__name__)

CLIENT_CLOSED: Final = 499  # nginx's status for a client that left; seen in the metrics only
REQUEST_ID: Final = web.RequestKey("request_id", str)
_ACCEPTED_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SequenceLoop(Protocol):
    """The part of StepLoop that a server uses."""

    def submit(self, sequences: list[Sequence]) -> None:
        """Takes all, or raises Unavailable."""

    def abort(self, sequences: list[Sequence]) -> None:
        """Ends those that still run."""

    def stats(self) -> EngineStats:
        """The load now."""

    def is_progressing(self) -> bool:
        """False when work waits and no step ends."""

    def max_tokens_that_fit(self, num_prompt_tokens: int) -> int:
        """The longest answer that the whole KV cache can hold after such a prompt."""


def build_app(
    *, config: ReplicaConfig, model: ServedModel, loop: SequenceLoop, lifecycle: Lifecycle
) -> web.Application:
    """The replica's application. Run it with handler_cancellation=True."""
    api = Api(config=config, model=model, loop=loop, lifecycle=lifecycle)
    app = web.Application(middlewares=[api.identify, api.count, api.errors_as_json, api.authorize])
    app.on_response_prepare.append(_name_request)
    app.router.add_post("/v1/chat/completions", api.chat_completions)
    app.router.add_post("/v1/completions", api.completions)
    app.router.add_get("/v1/models", api.models)
    app.router.add_get("/v1/models/{model:.+}", api.one_model)
    app.router.add_get("/health", api.health)
    app.router.add_get("/metrics", api.metrics_text)
    app.router.add_get("/version", api.version)
    return app


class Api:
    """The handlers and what they share."""

    def __init__(self, *, config: ReplicaConfig, model: ServedModel, loop: SequenceLoop, lifecycle: Lifecycle) -> None:
        self._config = config
        self._model = model
        self._loop = loop
        self._lifecycle = lifecycle
        self._metrics = Metrics(model_name=model.name, stats=loop.stats)
        self._reader = FieldReader()

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        arrived_s = self._metrics.now_s()
        chat = parse_chat(self._reader, await self._body(request))
        check_model(chat.options, self._model)
        prompt = await chat_prompt(chat, self._model)
        return await self._answer(request, chat.options, [prompt], ChatFormat(), arrived_s)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        arrived_s = self._metrics.now_s()
        body = await self._body(request)
        completion = parse_completion(self._reader, body, max_prompts=self._config.max_waiting)
        check_model(completion.options, self._model)
        prompts = await completion_prompts(completion, self._model)
        return await self._answer(request, completion.options, prompts, CompletionFormat(), arrived_s)

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response({"object": "list", "data": [self._model_object()]})

    async def one_model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        name = request.match_info["model"]
        if name != self._model.name:
            raise UnknownModel(f"the model {name[:200]!r} is not served here; {self._model.name!r} is", param="model")
        return web.json_response(self._model_object())

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 only when requests are served, and step after step ends."""
        state, reason = str(self._lifecycle.state), self._lifecycle.reason
        if self._lifecycle.state is EngineState.READY:
            if self._loop.is_progressing():
                return web.json_response({"status": state})
            state = "stalled"
            reason = f"work waits and no step has ended for {self._config.progress_deadline_s:g} s"
        return web.json_response({"status": state, "reason": reason or state}, status=503)

    async def metrics_text(self, request: web.Request) -> web.Response:
        """GET /metrics."""
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        return web.Response(body=self._metrics.text(), headers={"Content-Type": content_type})

    async def version(self, request: web.Request) -> web.Response:
        """GET /version."""
        return web.json_response({"version": importlib.metadata.version("lockstep-serving")})

    async def _body(self, request: web.Request) -> bytes:
        """The body of a request for an answer. Raises Unavailable before it is read if there can be none."""
        if self._lifecycle.state is not EngineState.READY:
            raise Unavailable(self._lifecycle.reason or f"the replica is {self._lifecycle.state}")
        return await read_body(request, max_body_mb=self._config.max_body_mb, timeout_s=self._config.client_timeout_s)

    async def _answer(
        self, request: web.Request, options: Options, prompts: list[Prompt], format_: Format, arrived_s: float
    ) -> web.StreamResponse:
        event = asyncio.Event()
        request_id = request[REQUEST_ID]
        sequences = [
            self._sequence(request_id, index, options, prompt, event, arrived_s) for index, prompt in enumerate(prompts)
        ]
        choices = [
            self._choice(sequence, options, prompt, format_)
            for sequence, prompt in zip(sequences, prompts, strict=True)
        ]
        answer = Answer(
            format_=format_,
            options=options,
            choices=choices,
            event=event,
            request_id=request_id,
            model_name=self._model.name,
        )
        self._loop.submit(sequences)
        try:
            if options.stream:
                return await self._stream(request, answer)
            return web.json_response(await answer.whole(), dumps=to_json)
        finally:
            self._loop.abort(sequences)
            for choice in choices:
                choice.close()

    def _sequence(
        self, request_id: str, index: int, options: Options, prompt: Prompt, event: asyncio.Event, arrived_s: float
    ) -> Sequence:
        num_tokens = len(prompt.token_ids)
        params = sampling_params(
            options,
            self._model,
            request_id=request_id,
            prompt_tokens=num_tokens,
            max_cached=self._loop.max_tokens_that_fit(num_tokens),
        )
        return Sequence(
            request_id=request_id,
            choice=index,
            prompt_ids=prompt.token_ids,
            params=params,
            stream=OutputStream(event),
            arrived_s=arrived_s,
        )

    def _choice(self, sequence: Sequence, options: Options, prompt: Prompt, format_: Format) -> Choice:
        splits = self._model.has_reasoning and isinstance(format_, ChatFormat)
        times = ChoiceTimes(
            self._metrics,
            arrived_s=sequence.arrived_s,
            prompt_tokens=len(prompt.token_ids),
            max_tokens=sequence.params.max_tokens,
        )
        return Choice(
            sequence=sequence,
            prompt=prompt,
            detokenizer=self._model.tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens),
            splitter=ReasoningSplitter(opened=prompt.opens_reasoning) if splits else None,
            times=times,
        )

    async def _stream(self, request: web.Request, answer: Answer) -> web.StreamResponse:
        stream = EventStream(request, timeout_s=self._config.client_timeout_s)
        try:
            await self._send_events(stream, answer)
        except ConnectionError as err:
            logger.debug("client lost request_id=%s err=%s", request[REQUEST_ID], err)  # nobody is there to be told
        except Exception as err:  # whatever it is, it ends this stream alone
            if not stream.is_begun:
                raise
            if not isinstance(err, RequestError):
                logger.exception("stream failed request_id=%s", request[REQUEST_ID])
                err = RequestError("internal error")
            await stream.fail(to_json(err.body()))
        return stream.response

    async def _send_events(self, stream: EventStream, answer: Answer) -> None:
        said = await answer.next()  # before the first event: a request that fails here still gets a status
        for event in answer.opening_events():
            await stream.send(event)
        while True:
            for choice, delta in said:
                for event in answer.events(choice, delta):
                    await stream.send(event)
            if answer.is_done:
                break
            said = await answer.next()
        for event in answer.closing_events():
            await stream.send(event)

    def _model_object(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._model.created,
            "owned_by": "lockstep",
            "max_model_len": self._model.max_model_len,
        }

    @web.middleware
    async def identify(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Gives the request its id: the client's (or the proxy's) if it is one, else a new one."""
        given = request.headers.get(REQUEST_ID_HEADER, "")
        request[REQUEST_ID] = given if _ACCEPTED_ID.fullmatch(given) else uuid.uuid4().hex
        return await handler(request)

    @web.middleware
    async def count(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Counts the answer by its route and status."""
        status = CLIENT_CLOSED
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            self._metrics.answered(path=resource.canonical if resource else "", status=status)

    @web.middleware
    async def errors_as_json(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turns what a handler raises into OpenAI's error body."""
        try:
            return await handler(request)
        except RequestError as err:
            return error_response(err)
        except web.HTTPException as err:
            return http_error_response(err)
        except Exception:
            logger.exception("request failed path=%s request_id=%s", request.path, request[REQUEST_ID])
            return error_response(RequestError("internal error"))

    @web.middleware
    async def authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Asks for the API key on OpenAI's routes, if there is one."""
        key = self._config.api_key
        if key and request.path.startswith("/v1/"):
            scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
            # surrogateescape: aiohttp's stand-in for header bytes that are not UTF-8
            matches = hmac.compare_digest(shown.strip().encode(errors="surrogateescape"), key.encode())
            if scheme.lower() != "bearer" or not matches:
                raise Unauthorized("the API key is missing or wrong; send it as 'Authorization: Bearer ...'")
        return await handler(request)


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID]
