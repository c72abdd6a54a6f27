"""One choice of an answer: committed tokens -> text, taken apart into reasoning, content and tool calls.

    tokens -> detokenizer -> stop strings -> reasoning -> tool calls -> Delta

Each part holds back what the next token may still change, and each takes token by token, so that the joined deltas do
not depend on how many tokens came together.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from replica.api.metrics import ChoiceTimes
from replica.api.openai_api import Prompt
from replica.api.reasoning import ReasoningSplitter
from replica.api.stop_strings import StopStrings
from replica.api.tokenizer import Detokenizer
from replica.api.tools import Said, ToolSplitter
from replica.errors import GrammarFailed, Interrupted
from replica.request import FinishReason, Sequence, TokenLogprobs, TokenOutput

TOOL_CALLS: Final = "tool_calls"  # the finish reason of an answer that calls tools


@dataclass(slots=True)
class Delta:
    """What one output adds to a choice. `finish_reason` is set in the last one only."""

    reasoning: str = ""  # before all else
    said: Said = field(default_factory=Said)
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: str | None = None
    stopped_by: str | int | None = None  # the stop string or the token of stop_token_ids that ended it

    @property
    def has_text(self) -> bool:
        """Whether it says anything."""
        return bool(self.reasoning or self.said.parts)


class Choice:
    """One choice of an answer, while its tokens come."""

    def __init__(
        self,
        *,
        sequence: Sequence,
        prompt: Prompt,
        detokenizer: Detokenizer,
        stops: StopStrings | None,
        reasoning: ReasoningSplitter | None,
        tools: ToolSplitter | None,
        end_token_ids: frozenset[int],
        times: ChoiceTimes,
    ) -> None:
        self.sequence = sequence
        self.prompt = prompt
        self.num_tokens = 0
        self.num_reasoning_tokens = 0
        self.finish_reason: str | None = None
        self._detokenizer = detokenizer
        self._stops = stops
        self._reasoning = reasoning
        self._tools = tools
        self._end_token_ids = end_token_ids
        self._times = times

    @property
    def index(self) -> int:
        """The choice's place in the answer."""
        return self.sequence.choice

    def push(self, output: TokenOutput) -> Delta:
        """The text of these tokens. Raises GrammarFailed, Interrupted when the sequence ended without an answer."""
        if output.finish_reason in (FinishReason.ERROR, FinishReason.LOST):
            self.finish_reason = output.finish_reason
            raise (GrammarFailed if output.finish_reason is FinishReason.ERROR else Interrupted)(output.error)
        if output.finish_reason is FinishReason.ABORT:
            raise Interrupted("the replica stopped before the answer was complete")
        delta = Delta()
        num_taken = 0
        for token_id in output.token_ids:
            num_taken += 1
            ends = num_taken == len(output.token_ids) and output.finish_reason is FinishReason.STOP
            # The token that stops an answer is counted but is no part of its text.
            self._add(delta, "" if ends else self._detokenizer.push((token_id,)), num_tokens=1)
            if self._stops is not None and self._stops.found is not None:
                break
        delta.token_ids, delta.logprobs = output.token_ids[:num_taken], output.logprobs[:num_taken]
        self._times.output(num_taken)
        if self._stops is not None and self._stops.found is not None:
            delta.finish_reason, delta.stopped_by = FinishReason.STOP, self._stops.found
        elif output.finish_reason is not None:
            self._end(delta, output)
        if delta.finish_reason is not None:
            self._flush(delta)
        return delta

    def close(self) -> None:
        """To be called once, when nobody reads the choice any more."""
        reason = FinishReason.STOP if self.finish_reason == TOOL_CALLS else self.finish_reason
        self._times.end(reason or FinishReason.ABORT)

    def _add(self, delta: Delta, text: str, *, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        if self._stops is not None:
            text = self._stops.push(text, counts=self.num_tokens >= self.sequence.params.min_tokens)
        if self._reasoning is not None:
            split = self._reasoning.push(text)
            delta.reasoning += split.reasoning
            text = split.content
            self.num_reasoning_tokens += num_tokens if self._reasoning.is_reasoning else 0
        self._add_content(delta, text)

    def _add_content(self, delta: Delta, text: str) -> None:
        if self._tools is None or not text:
            delta.said.add(text)
        else:
            delta.said.add_all(self._tools.push(text))

    def _end(self, delta: Delta, output: TokenOutput) -> None:
        delta.finish_reason = output.finish_reason
        if output.finish_reason is FinishReason.STOP and output.token_ids[-1] not in self._end_token_ids:
            delta.stopped_by = output.token_ids[-1]
        self._add(delta, self._detokenizer.flush(), num_tokens=0)
        if self._stops is not None and self._stops.found is not None:
            delta.finish_reason, delta.stopped_by = FinishReason.STOP, self._stops.found

    def _flush(self, delta: Delta) -> None:
        text = self._stops.flush() if self._stops is not None else ""
        if self._reasoning is not None:
            split, rest = self._reasoning.push(text), self._reasoning.flush()
            delta.reasoning += split.reasoning + rest.reasoning
            text = split.content + rest.content
        self._add_content(delta, text)
        if self._tools is not None:
            delta.said.add_all(self._tools.flush())
            if self._tools.has_calls and delta.finish_reason == FinishReason.STOP:
                delta.finish_reason = TOOL_CALLS
        self.finish_reason = delta.finish_reason


def joined(deltas: list[Delta]) -> Delta:
    """The deltas of a choice as one."""
    made = Delta(
        reasoning="".join(delta.reasoning for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(found for delta in deltas for found in delta.logprobs),
        finish_reason=deltas[-1].finish_reason,
        stopped_by=deltas[-1].stopped_by,
    )
    for delta in deltas:
        made.said.add_all(delta.said)
    return made
