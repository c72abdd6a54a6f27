"""OpenAI requests -> prompts and sampling parameters. All parsing and bounding is here; tables in request_fields.py."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from replica.chat import TooManyCharacters
from replica.errors import BadRequest, ContextTooLong, UnknownModel
from replica.reasoning import is_opened_by
from replica.request import SamplingParams
from replica.request_fields import CHAT_FIELDS, COMPLETION_FIELDS, FieldReader
from replica.served_model import ServedModel

GREEDY_BELOW: Final = 1e-5  # a temperature that would overflow float32 logits means greedy
SMALLEST_TOP_P: Final = 1e-6  # 0 means the most likely token alone, and the token that crosses top_p is always kept
UINT64: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both endpoints share, as the client asked. None is what it did not say."""

    model: str | None
    stream: bool
    stream_options: bool  # include_usage
    max_tokens: int | None
    max_completion_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    skip_special_tokens: bool
    return_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked body of /v1/chat/completions."""

    options: Options
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked body of /v1/completions."""

    options: Options
    prompts: list[str | list[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens. `opens_reasoning`: the answer begins inside of `<think>`."""

    token_ids: list[int]
    opens_reasoning: bool = False


def parse_json(body: bytes) -> Any:
    """The value in a request's body. Raises BadRequest."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as err:  # ValueError: not JSON, not UTF-8, or a number of thousands of digits
        raise BadRequest(f"the body is not valid JSON: {err}") from err


def parse_chat(reader: FieldReader, body: bytes) -> ChatRequest:
    """Checks a body of /v1/chat/completions. Raises BadRequest."""
    values = reader.read(parse_json(body), CHAT_FIELDS)
    messages, tools = values.pop("messages"), values.pop("tools")
    if messages is None:
        raise BadRequest("messages is missing", param="messages")
    template_kwargs = values.pop("chat_template_kwargs")
    if values.pop("tool_choice") == "none":
        tools = None  # a model that does not see a tool does not call it
    return ChatRequest(
        options=Options(**values),
        messages=messages,
        tools=tools or None,
        template_kwargs=template_kwargs,
        body_bytes=len(body),
    )


def parse_completion(reader: FieldReader, body: bytes, *, max_prompts: int) -> CompletionRequest:
    """Checks a body of /v1/completions. Raises BadRequest."""
    values = reader.read(parse_json(body), COMPLETION_FIELDS)
    prompts = values.pop("prompt")
    if prompts is None:
        raise BadRequest("prompt is missing", param="prompt")
    if len(prompts) > max_prompts:
        raise BadRequest(f"prompt has {len(prompts)} prompts, limit is {max_prompts} (--max-waiting)", param="prompt")
    return CompletionRequest(options=Options(**values), prompts=prompts)


def check_model(options: Options, model: ServedModel) -> None:
    """Raises UnknownModel when the client asks for another; one that names none gets this one."""
    if options.model is not None and options.model != model.name:
        raise UnknownModel(f"the model {options.model[:200]!r} is not served here; {model.name!r} is", param="model")


async def chat_prompt(request: ChatRequest, model: ServedModel) -> Prompt:
    """Renders and encodes the conversation. Raises BadRequest, ContextTooLong."""
    if model.chat_template is None:
        raise BadRequest(f"the model {model.name!r} has no chat template; use /v1/completions", param="messages")
    messages = request.messages
    if not model.chat_template.mentions("developer"):
        # OpenAI's newer word for the same role; templates that do not know it would drop the message silently.
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    try:
        text = await model.chat_template.render_off_loop(
            messages,
            tools=request.tools,
            kwargs=request.template_kwargs,
            max_chars=model.max_prompt_chars,
            input_chars=request.body_bytes,
        )
    except TooManyCharacters as err:
        raise _surely_too_long(err.num_chars, model, "messages") from err
    token_ids = await model.tokenizer.encode_off_loop(text, add_special_tokens=False)
    return Prompt(token_ids, opens_reasoning=model.has_reasoning and is_opened_by(text))


async def completion_prompts(request: CompletionRequest, model: ServedModel) -> list[Prompt]:
    """Encodes the prompts that are texts and checks those that are token ids. Raises BadRequest, ContextTooLong."""
    prompts: list[Prompt] = []
    for prompt in request.prompts:
        if isinstance(prompt, list):
            _check_token_ids(prompt, model)
            prompts.append(Prompt(prompt))
        elif len(prompt) > model.max_prompt_chars:
            raise _surely_too_long(len(prompt), model, "prompt")
        else:
            prompts.append(Prompt(await model.tokenizer.encode_off_loop(prompt, add_special_tokens=True)))
        if not prompts[-1].token_ids:
            raise BadRequest("prompt is empty; it must have at least one token", param="prompt")
    return prompts


def output_tokens(options: Options, *, prompt_tokens: int, max_model_len: int, max_cached: int) -> int:
    """The most tokens that an answer may have: what the client asks, bounded by what is left.

    `max_completion_tokens` wins over `max_tokens`, its old name; without both it is all that is left of the context.
    `max_cached` is what the whole KV cache can hold after such a prompt. Raises ContextTooLong when nothing is left.
    """
    left = max_model_len - prompt_tokens
    if left < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens, limit is {max_model_len - 1}: "
            f"the context of {max_model_len} tokens (--max-model-len) must hold the answer, too"
        )
    if max_cached < 1:
        raise ContextTooLong(
            f"the prompt has {prompt_tokens} tokens, limit is {prompt_tokens + max_cached - 1}: "
            "the KV cache (--kv-cache-gb) must hold it and the answer"
        )
    asked = options.max_tokens if options.max_completion_tokens is None else options.max_completion_tokens
    return min(left, max_cached) if asked is None else min(asked, left, max_cached)


def sampling_params(
    options: Options, model: ServedModel, *, request_id: str, prompt_tokens: int, max_cached: int
) -> SamplingParams:
    """How to sample one choice: what the client asks, else the checkpoint's defaults. Raises ContextTooLong."""
    defaults = model.defaults
    temperature = defaults.temperature if options.temperature is None else options.temperature
    seed = derived_seed(request_id) if options.seed is None else options.seed
    return SamplingParams(
        max_tokens=output_tokens(
            options, prompt_tokens=prompt_tokens, max_model_len=model.max_model_len, max_cached=max_cached
        ),
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(0, defaults.top_k if options.top_k is None else options.top_k),
        top_p=max(SMALLEST_TOP_P, defaults.top_p if options.top_p is None else options.top_p),
        min_p=defaults.min_p if options.min_p is None else options.min_p,
        seed=seed & UINT64,
        stop_token_ids=options.stop_token_ids | (frozenset() if options.ignore_eos else model.end_token_ids),
    )


def derived_seed(request_id: str) -> int:
    """The seed of a request that names none: a function of its id, so that the same request can be continued."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")


def _check_token_ids(token_ids: list[int], model: ServedModel) -> None:
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        wrong = next(i for i in token_ids if not 0 <= i < model.vocab_size)
        raise BadRequest(f"prompt has the token id {wrong}, must be from 0 to {model.vocab_size - 1}", param="prompt")


def _surely_too_long(num_chars: int, model: ServedModel, param: str) -> ContextTooLong:
    """The error for a text so long that encoding it would be wasted work."""
    num_tokens = -(-num_chars // model.tokenizer.max_token_chars)
    return ContextTooLong(
        f"the prompt has at least {num_tokens} tokens ({num_chars} characters or more), limit is "
        f"{model.max_model_len - 1}: the context of {model.max_model_len} tokens (--max-model-len) must hold the "
        "answer, too",
        param=param,
    )
