"""Grammars that an answer must follow, by way of llguidance: its text -> a mask of allowed tokens for each step.

    response_format, tool_choice  ->  the text of a grammar (llguidance's Lark, with JSON schemas inside)
    GrammarCompiler.compile       ->  tried in another process (grammar_checkers.py), then compiled here, in a thread
    Grammar.constraint            ->  one GrammarConstraint for each choice, which the step loop asks for masks

A model that reasons does so first and freely; the grammar begins after `</think>`, and after the newlines that models
have learned to write there: without them they are off their track.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from replica.api.grammar_checkers import GrammarCheckers
from replica.api.reasoning import CLOSE, OPEN
from replica.api.served_model import ServedModel
from replica.api.tools import CLOSE as CALL_CLOSE
from replica.api.tools import OPEN as CALL_OPEN
from replica.errors import GrammarRefused
from replica.request import ConstraintFailed

MAX_GRAMMAR_CHARS: Final = 256 * 1024
NEWLINES_AFTER_REASONING: Final = 2
MAX_KEPT: Final = 128  # compiled grammars, and refusals, that are remembered
MAX_REASON_CHARS: Final = 300
LIMITS: Final = LLParserLimits(verbose_errors=False)  # a mask's work is bounded, too
# In llguidance's errors: where in the grammar, and an excerpt of it. The grammar is ours, so a client knows neither.
_PLACE: Final = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_EXCERPT: Final = re.compile(r"\n\s+\d+ \| .*", re.DOTALL)
# What it says of the parts of JSON schema that it does not know -> the same with a remedy.
_REMEDIES: Final = (
    (
        re.compile(r"Unimplemented keys: \[(.*)\]"),
        r"\1: not supported in a schema that an answer must follow; leave it out, and check the answer for it",
    ),
    (
        re.compile(r"oneOf constraints are not supported\..*", re.DOTALL),
        "oneOf whose alternatives may hold at the same time is not supported; use anyOf",
    ),
    (re.compile(r"Unknown format: (.*)"), r"the format \1 is not supported; leave it out, or use a pattern"),
)
# No free white space: a model could go on with it for ever. The separators are what models have mostly read.
SPACING: Final = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a grammar must know of a model's tokens."""

    tokenizer_json: str
    vocab_size: int
    end_token_ids: list[int]

    @classmethod
    def of(cls, model: ServedModel) -> Vocabulary:
        """The model's."""
        return cls(model.tokenizer.to_json(), model.vocab_size, sorted(model.end_token_ids))

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        """The reverse of to_json."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def tokenizer(self) -> LLTokenizer:
        """Takes a second for a large vocabulary. Raises GrammarRefused if grammars cannot work with it."""
        try:
            return LLTokenizer(self.tokenizer_json, n_vocab=self.vocab_size, eos_token=self.end_token_ids or None)
        except Exception as err:  # the Rust side raises plain exceptions for whatever it does not support
            raise GrammarRefused(f"the checkpoint's tokenizer cannot follow grammars: {err}") from err


def new_matcher(tokenizer: LLTokenizer, grammar: str, limits: LLParserLimits) -> LLMatcher:
    """Compiles; a matcher that `is_error` is what comes of a bad grammar."""
    return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0, limits=limits)


def json_rules(name: str, schema: Any) -> str:
    """The rule of a JSON value that follows a schema. Raises GrammarRefused."""
    return f"{name}: {_inline(schema)}"


def tool_rules(tools: list[tuple[str, Any]], model: ServedModel) -> list[str]:
    """The rules of `call`, one call in Hermes' form. `tools`: names and schemas of arguments. Raises GrammarRefused."""
    begin, end = (_mark(mark, model) for mark in (CALL_OPEN, CALL_CLOSE))
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, schema) in enumerate(tools):
        head = json.dumps('\n{"name": ' + json.dumps(name) + ', "arguments": ')
        rules.append(f'call_{i}: {begin} {head} arguments_{i} "}}\\n" {end}')
        rules.append(json_rules(f"arguments_{i}", schema))
    return rules


def _mark(mark: str, model: ServedModel) -> str:
    """A tag as the token that it is, or as text where the vocabulary has no such token."""
    return mark if model.tokenizer.token_id(mark) is not None else json.dumps(mark)


def _inline(schema: Any) -> str:
    spaced = {**schema, "x-guidance": SPACING} if isinstance(schema, dict) else schema
    try:
        return "%json " + json.dumps(spaced)
    except RecursionError as err:
        raise GrammarRefused("the JSON schema is nested too deeply") from err


@dataclass(frozen=True, slots=True)
class Grammar:
    """A compiled grammar of one model."""

    matcher: LLMatcher
    model: ServedModel

    def constraint(self, *, may_reason: bool, is_reasoning: bool) -> GrammarConstraint:
        """For one choice. Its output may begin with `<think>`, or has begun inside of it."""
        return GrammarConstraint(self.matcher.deep_copy(), self.model, may_reason=may_reason, is_reasoning=is_reasoning)


class GrammarConstraint:
    """Follows the output of one choice. See request.Constraint."""

    def __init__(self, matcher: LLMatcher, model: ServedModel, *, may_reason: bool, is_reasoning: bool) -> None:
        self._matcher = matcher
        self._num_bytes = -(-model.vocab_size // 32) * 4
        self._end_token_ids = model.end_token_ids
        self._open_id, self._close_id = model.tokenizer.token_id(OPEN), model.tokenizer.token_id(CLOSE)
        self._may_reason = may_reason  # the output may begin with `<think>` and has not begun yet
        self._is_reasoning = is_reasoning
        newlines = (("\n" * count, count) for count in range(1, NEWLINES_AFTER_REASONING + 1))
        self._newlines = {
            ids[0]: n for text, n in newlines if len(ids := model.tokenizer.encode(text, add_special_tokens=False)) == 1
        }
        self._newlines_left = 0  # that may come before the grammar begins
        self._num_consumed = 0

    def mask(self, output_ids: list[int], banned_ids: frozenset[int]) -> bytes:
        """See request.Constraint. An answer does not end in its reasoning."""
        for token_id in output_ids[self._num_consumed :]:
            self._consume(token_id)
        self._num_consumed = len(output_ids)
        if self._is_reasoning:
            bits = bytearray(b"\xff" * self._num_bytes)
            _forbid(bits, self._end_token_ids)
            return bytes(bits)
        bits = bytearray(self._matcher.compute_bitmask()[: self._num_bytes])
        if self._matcher.is_error():
            raise ConstraintFailed(_reason(self._matcher.get_error()))
        if self._may_reason and self._open_id is not None:
            _allow(bits, [self._open_id])
        _allow(bits, [token_id for token_id, count in self._newlines.items() if count <= self._newlines_left])
        if banned_ids:
            allowed = bytes(bits)
            _forbid(bits, banned_ids)
            return bytes(bits) if any(bits) else allowed
        return bytes(bits)

    def _consume(self, token_id: int) -> None:
        newlines = self._newlines.get(token_id, 0)
        if self._is_reasoning:
            self._is_reasoning = token_id != self._close_id
            self._newlines_left = 0 if self._is_reasoning else NEWLINES_AFTER_REASONING
        elif self._may_reason and token_id == self._open_id:
            self._is_reasoning = True
        elif 0 < newlines <= self._newlines_left:
            self._newlines_left -= newlines
        else:
            self._newlines_left = 0
            if not self._matcher.is_stopped() and not self._matcher.consume_token(token_id):
                raise ConstraintFailed(_reason(self._matcher.get_error()) or f"token {token_id} is not allowed")
        self._may_reason = False


def _allow(bits: bytearray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        bits[token_id // 8] |= 1 << token_id % 8


def _forbid(bits: bytearray, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        if token_id // 8 < len(bits):
            bits[token_id // 8] &= ~(1 << token_id % 8)


def _reason(error: str) -> str:
    """What llguidance says is wrong, for a client."""
    if error.startswith("NoExtensionBias"):
        return "no value follows it"
    said = _EXCERPT.sub("", _PLACE.sub("", error)).removesuffix("<non-verbose/>").strip()
    for pattern, remedy in _REMEDIES:
        if found := pattern.fullmatch(said):
            said = found.expand(remedy)
    return said[:MAX_REASON_CHARS]


class GrammarCompiler:
    """Compiles the grammars of one model, and remembers them. Its methods run on the event loop."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._checkers = GrammarCheckers(lambda: Vocabulary.of(model).to_json())
        self._tokenizer: LLTokenizer | None = None
        self._making_tokenizer = asyncio.Lock()
        self._known: OrderedDict[str, Grammar | str] = OrderedDict()  # by digest; a text is why it was refused

    async def compile(self, text: str, *, param: str) -> Grammar:
        """Raises GrammarRefused for a bad grammar or one that takes too long, Unavailable when too many wait."""
        if len(text) > MAX_GRAMMAR_CHARS:
            raise GrammarRefused(f"the schema has {len(text)} characters, limit is {MAX_GRAMMAR_CHARS}", param=param)
        key = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()
        if key not in self._known:
            async with self._checkers.turn():
                if key not in self._known:  # another request may have asked for the same meanwhile
                    self._remember(key, await self._compile(text))
        known = self._known[key]
        self._known.move_to_end(key)
        if isinstance(known, str):
            raise GrammarRefused(f"the schema cannot be used: {known}", param=param)
        return known

    async def close(self) -> None:
        """Ends the processes that try grammars."""
        await self._checkers.close()

    def _remember(self, key: str, made: Grammar | str) -> None:
        self._known[key] = _reason(made) if isinstance(made, str) else made
        while len(self._known) > MAX_KEPT:
            self._known.popitem(last=False)

    async def _compile(self, text: str) -> Grammar | str:
        async with self._making_tokenizer:
            if self._tokenizer is None:
                self._tokenizer = await asyncio.to_thread(Vocabulary.of(self._model).tokenizer)
        error = await self._checkers.check(text)
        if error:
            return error
        matcher = await asyncio.to_thread(new_matcher, self._tokenizer, text, LIMITS)
        return matcher.get_error() or Grammar(matcher, self._model)
