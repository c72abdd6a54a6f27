"""What a request becomes inside a replica: sampling parameters, sequences, and the tokens that come back.

A request has `n` choices and each choice is one Sequence. The server makes sequences, the Scheduler owns them from
`add` until they end, and the tokens of a committed step reach the server through the sequence's OutputStream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are OpenAI's own words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # the client left or the server ended it
    ERROR = "error"  # the step failed


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the next token of a sequence, and when to stop. Already checked and bounded."""

    max_tokens: int  # output tokens, at least 1; prompt + max_tokens is within the context
    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0 keeps all
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int  # 64 bits, never absent: a request without one gets it from its id
    stop_token_ids: frozenset[int] = frozenset()  # ends the sequence; the token itself is published


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Tokens of one committed step. `finish_reason` is set in the last output of a sequence and only there."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str = ""  # with FinishReason.ERROR


class OutputStream:
    """The tokens of one sequence, from the step loop to the one handler that reads them.

    At most `max_tokens` + 1 outputs are ever put, so the queue is bounded by the request itself.
    """

    __slots__ = ("_queue",)

    def __init__(self) -> None:
        self._queue: asyncio.Queue[TokenOutput] = asyncio.Queue()

    def put(self, output: TokenOutput) -> None:
        """Called by the step loop, on the event loop's thread."""
        self._queue.put_nowait(output)

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        """Yields outputs until the one with a finish reason, which is the last."""
        while True:
            output = await self._queue.get()
            while output.finish_reason is None and not self._queue.empty():
                # A reader that lags gets what has gathered as one output.
                more = self._queue.get_nowait()
                output = TokenOutput(output.token_ids + more.token_ids, more.finish_reason, more.error)
            yield output
            if output.finish_reason is not None:
                return


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One choice of one request. Only the Scheduler changes it after `add`."""

    request_id: str
    choice: int
    prompt_ids: list[int]
    params: SamplingParams
    stream: OutputStream = field(default_factory=OutputStream)
    output_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    num_computed: int = 0  # tokens whose keys and values are in the cache
    arrived_s: float = 0.0  # monotonic

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_ids) + len(self.output_ids)
