"""Log probabilities in OpenAI's two shapes: of chats, and of completions, where a prompt may have some, too.

There is one entry for each generated token, the one that ends the answer included, as there is in `token_ids`.
"""

from __future__ import annotations

from typing import Protocol

from replica.api.answers import Json
from replica.api.choice import Choice, Delta
from replica.api.openai_api import Options
from replica.api.tokenizer import Tokenizer
from replica.request import TokenLogprobs

LOWEST: float = -9999.0  # JSON has no infinity; OpenAI says this of a token that cannot be


class LogprobsFormat(Protocol):
    """Makes the entry `logprobs` of a choice, or nothing."""

    def delta(self, choice: Choice, delta: Delta | None, options: Options) -> Json:
        """Of a chunk: a delta's, or, for None, those that come before the first token."""

    def whole(self, choice: Choice, delta: Delta, options: Options) -> Json:
        """Of a whole answer; `delta` is all of it."""


class ChatLogprobs:
    """{"content": [{"token", "logprob", "bytes", "top_logprobs"}, ...]}"""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def delta(self, choice: Choice, delta: Delta | None, options: Options) -> Json:
        """See LogprobsFormat."""
        if delta is None or not delta.logprobs:
            return {}
        return {"logprobs": {"content": [self._entry(found) for found in delta.logprobs], "refusal": None}}

    def whole(self, choice: Choice, delta: Delta, options: Options) -> Json:
        """See LogprobsFormat."""
        return self.delta(choice, delta, options)

    def _entry(self, found: TokenLogprobs) -> Json:
        top = [self._token(token_id, logprob) for token_id, logprob in found.top]
        return {**self._token(found.token_id, found.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        text, raw = self._tokenizer.token_text(token_id)
        return {"token": text, "logprob": max(logprob, LOWEST), "bytes": list(raw)}


class CompletionLogprobs:
    """{"tokens": [...], "token_logprobs": [...], "top_logprobs": [{token: logprob}, ...], "text_offset": [...]}

    For one answer: it counts the characters that its choices' tokens have so far.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}  # by choice

    def delta(self, choice: Choice, delta: Delta | None, options: Options) -> Json:
        """See LogprobsFormat."""
        if options.logprobs is None:
            return {}
        if delta is None:
            return {"logprobs": self._of_prompt(choice, options)} if options.echo else {}
        return {"logprobs": self._columns(choice, list(delta.logprobs))} if delta.logprobs else {}

    def whole(self, choice: Choice, delta: Delta, options: Options) -> Json:
        """See LogprobsFormat."""
        if options.logprobs is None:
            return {}
        of_prompt = self._of_prompt(choice, options) if options.echo else {}
        of_output = self._columns(choice, list(delta.logprobs))
        return {"logprobs": {name: of_prompt.get(name, []) + column for name, column in of_output.items()}}

    def _of_prompt(self, choice: Choice, options: Options) -> Json:
        """Nothing is known of the first token, since nothing is before it."""
        first = choice.prompt.token_ids[0]
        columns = self._columns(choice, [TokenLogprobs(first, 0.0, ()), *choice.sequence.prompt_logprobs])
        columns["token_logprobs"][0] = columns["top_logprobs"][0] = None
        return columns

    def _columns(self, choice: Choice, found: list[TokenLogprobs]) -> Json:
        tokens = [self._text(one.token_id) for one in found]
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offsets.get(choice.index, 0))
            self._offsets[choice.index] = offsets[-1] + len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [max(one.logprob, LOWEST) for one in found],
            "top_logprobs": [self._top(one) for one in found],
            "text_offset": offsets,
        }

    def _top(self, found: TokenLogprobs) -> Json:
        """The most likely tokens and, if it is none of them, the one that is there."""
        made: Json = {}
        for token_id, logprob in (*found.top, (found.token_id, found.logprob)):
            made.setdefault(self._text(token_id), max(logprob, LOWEST))
        return made

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)[0]
