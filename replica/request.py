"""What a request becomes inside a replica: sampling parameters, sequences, and the tokens that come back.

A request has `n` choices and each choice is one Sequence. The server makes sequences, the Scheduler owns them from
`add` until they end, and the tokens of a committed step reach the server through the sequence's OutputStream.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are OpenAI's own words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"  # the client left or the server ended it
    ERROR = "error"  # it cannot go on, here or elsewhere
    LOST = "lost"  # the replica stopped or was lost: it can go on elsewhere


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
    min_tokens: int = 0  # no token of stop_token_ids is sampled before so many others
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added to its logit
    logprobs: int | None = None  # each output token's log probability and those of so many most likely; None: neither
    prompt_logprobs: int | None = None  # the same of each prompt token but the first

    @property
    def has_penalty(self) -> bool:
        """Whether the tokens so far change the logits."""
        return bool(self.presence_penalty or self.frequency_penalty) or self.repetition_penalty != 1.0


class Constraint(Protocol):
    """What the output may be: a grammar, or anything else that allows or forbids each next token (see grammar.py)."""

    def mask(self, output_ids: list[int], banned_ids: frozenset[int]) -> bytes | None:
        """The tokens that may come next, one bit each, lowest first; None allows all.

        Banned ones are left out unless nothing else is left. Runs in a thread. Raises ConstraintFailed.
        """


class ConstraintFailed(Exception):
    """The output cannot be constrained any further. Only its own sequence ends."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token, its log probability before penalties and temperature, and the most likely tokens in its place."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # most likely first


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Tokens of one committed step. `finish_reason` is set in the last output of a sequence and only there."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str = ""  # with FinishReason.ERROR and LOST
    logprobs: tuple[TokenLogprobs, ...] = ()  # one for each token if the sequence asks for them


class OutputStream:
    """The tokens of one sequence, from the step loop to the one handler that reads them.

    A reader that lags gets what has gathered as one output, so that no more is kept than the tokens themselves.
    A handler that reads several streams gives them one event.
    """

    __slots__ = ("_error", "_event", "_finish_reason", "_logprobs", "_token_ids")

    def __init__(self, event: asyncio.Event | None = None) -> None:
        self._event = event or asyncio.Event()  # set when there is something to take
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._finish_reason: FinishReason | None = None
        self._error = ""

    def put(self, output: TokenOutput) -> None:
        """Called by the step loop, on the event loop's thread."""
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._finish_reason = output.finish_reason
        self._error = output.error
        self._event.set()

    def take(self) -> TokenOutput | None:
        """What has come since the last call, as one output; None when nothing has."""
        if not self._token_ids and self._finish_reason is None:
            return None
        output = TokenOutput(tuple(self._token_ids), self._finish_reason, self._error, tuple(self._logprobs))
        self._token_ids.clear()
        self._logprobs.clear()
        self._finish_reason = None
        return output

    async def __aiter__(self) -> AsyncIterator[TokenOutput]:
        """Yields outputs until the one with a finish reason, which is the last."""
        while True:
            await self._event.wait()
            self._event.clear()
            output = self.take()
            if output is not None:
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
    priority: int = 0  # the lower, the earlier
    stream: OutputStream = field(default_factory=OutputStream)
    output_ids: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)  # of its full blocks, as far as they were asked for
    num_computed: int = 0  # tokens whose keys and values are in the cache
    num_cached: int | None = None  # tokens of the prompt that were there already; None before it first runs
    place: tuple[int, int] = (0, 0)  # in the order of all sequences: its priority, then its number
    row: int = -1  # in the scheduler's row table while it runs
    finish_reason: FinishReason | None = None  # set once, when it ends
    arrived_s: float = 0.0  # monotonic
    started_s: float = 0.0  # monotonic; when its first step began
    constraint: Constraint | None = None
    mask: bytes | None = None  # of the constraint, for the step that comes
    # Token id -> times in the output; for penalties (logit_edits.py).
    seen: dict[int, int] = field(default_factory=dict)
    num_seen: int = 0  # output tokens that `seen` counts
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # from the second prompt token on

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt_ids) + len(self.output_ids)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Those from position `start` to `stop`, of prompt and output."""
        num_prompt = len(self.prompt_ids)
        if stop <= num_prompt:
            return self.prompt_ids[start:stop]
        return self.prompt_ids[start:] + self.output_ids[max(0, start - num_prompt) : stop - num_prompt]
