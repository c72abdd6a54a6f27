"""From a request that is checked to its answer: sequences for the step loop, and their tokens written as they come.

    Asked -> sequences -> StepLoop.submit -> streams -> Choice -> Answer -> Writer -> one body, or one event a chunk

However a request ends, its sequences are aborted on the way out, which frees what still runs. A client that leaves
cancels its handler (the runner sets handler_cancellation), or a write to it fails.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from aiohttp import web

from replica.api.answers import Answer, Writer, to_json
from replica.api.choice import Choice
from replica.api.grammar import Grammar
from replica.api.http_io import EventStream
from replica.api.metrics import ChoiceTimes, Metrics
from replica.api.middleware import REQUEST_ID
from replica.api.openai_api import Options, Prompt, check_num_choices, sampling_params
from replica.api.priority import PRIORITY_HEADER, priority_of
from replica.api.reasoning import ReasoningSplitter
from replica.api.served_model import ServedModel
from replica.api.stop_strings import StopStrings
from replica.api.tools import ToolSplitter
from replica.config import ReplicaConfig
from replica.errors import RequestError, Unavailable
from replica.request import OutputStream, Sequence
from replica.step_loop import EngineStats

logger = logging.getLogger(__name__)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a request asks for, whichever API it came by."""

    options: Options
    prompts: list[Prompt]
    arrived_s: float
    is_chat: bool = False  # its answers may have reasoning in them
    reads_calls: bool = False  # and calls of tools
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None


class Generation:
    """Answers requests with one model and one step loop."""

    def __init__(self, *, config: ReplicaConfig, model: ServedModel, loop: SequenceLoop, metrics: Metrics) -> None:
        self._config = config
        self._model = model
        self._loop = loop
        self._metrics = metrics

    async def answer(
        self, request: web.Request, asked: Asked, writer_for: Callable[[list[Choice]], Writer]
    ) -> web.StreamResponse:
        """The answer, whole or streamed. Raises RequestError while there is none yet."""
        options = asked.options
        check_num_choices(options, len(asked.prompts), limit=self._config.max_waiting)
        event = asyncio.Event()
        prompts = [prompt for prompt in asked.prompts for _ in range(options.n)]
        sequences = [self._sequence(request, i, asked, prompt, event) for i, prompt in enumerate(prompts)]
        choices = [self._choice(s, asked, prompt) for s, prompt in zip(sequences, prompts, strict=True)]
        writer = writer_for(choices)
        answer = Answer(choices=choices, event=event, abort=self._loop.abort)
        try:
            self._loop.submit(sequences)
        except Unavailable:
            self._metrics.rejections.inc()
            raise
        try:
            if options.stream:
                return await self._stream(request, answer, writer)
            return web.json_response(writer.whole(await answer.whole()), dumps=to_json)
        finally:
            self._loop.abort(sequences)
            for choice in choices:
                choice.close()

    def _sequence(
        self, request: web.Request, index: int, asked: Asked, prompt: Prompt, event: asyncio.Event
    ) -> Sequence:
        num_tokens = len(prompt.token_ids)
        params = sampling_params(
            asked.options,
            self._model,
            request_id=request[REQUEST_ID],
            prompt_tokens=num_tokens,
            max_cached=self._loop.max_tokens_that_fit(num_tokens),
        )
        constraint = None
        if asked.grammar is not None:
            constraint = asked.grammar.constraint(may_reason=prompt.may_reason, is_reasoning=prompt.opens_reasoning)
        return Sequence(
            request_id=request[REQUEST_ID],
            choice=index,
            prompt_ids=prompt.token_ids,
            params=params,
            priority=priority_of(asked.options.priority, request.headers.get(PRIORITY_HEADER)),
            stream=OutputStream(event),
            arrived_s=asked.arrived_s,
            constraint=constraint,
        )

    def _choice(self, sequence: Sequence, asked: Asked, prompt: Prompt) -> Choice:
        options = asked.options
        splits = asked.is_chat and self._model.has_reasoning
        return Choice(
            sequence=sequence,
            prompt=prompt,
            detokenizer=self._model.tokenizer.detokenizer(skip_special_tokens=options.skip_special_tokens),
            stops=StopStrings(options.stop, keeps=options.include_stop_str_in_output) if options.stop else None,
            reasoning=ReasoningSplitter(opened=prompt.opens_reasoning) if splits else None,
            tools=ToolSplitter(parallel=asked.parallel_tool_calls) if asked.reads_calls else None,
            end_token_ids=self._model.end_token_ids,
            times=ChoiceTimes(self._metrics, sequence, num_choices=options.n),
        )

    async def _stream(self, request: web.Request, answer: Answer, writer: Writer) -> web.StreamResponse:
        stream = EventStream(request, timeout_s=self._config.client_timeout_s)
        try:
            await _send_events(stream, answer, writer)
        except ConnectionError as err:
            logger.debug("client lost request_id=%s err=%s", request[REQUEST_ID], err)  # nobody is there to be told
        except Exception as err:  # whatever it is, it ends this stream alone
            if not stream.is_begun:
                raise
            if not isinstance(err, RequestError):
                logger.exception("stream failed request_id=%s", request[REQUEST_ID])
                err = RequestError("internal error")
            await stream.fail(writer.failure(err))
        return stream.response


async def _send_events(stream: EventStream, answer: Answer, writer: Writer) -> None:
    said = await answer.next()  # before the first event: a request that fails here still gets a status
    for event in writer.opening():
        await stream.send(event)
    while True:
        for choice, delta in said:
            for event in writer.delta(choice, delta):
                await stream.send(event)
        if answer.is_done:
            break
        said = await answer.next()
    for event in writer.closing():
        await stream.send(event)
