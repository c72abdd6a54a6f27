"""OpenAI requests -> prompts and sampling parameters. All parsing and bounding is here; tables in request_fields.py."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from replica.api.chat import TooManyCharacters
from replica.api.fields import FieldReader
from replica.api.message_fields import ResponseFormat
from replica.api.reasoning import is_closed_by, is_opened_by
from replica.api.request_fields import CHAT, COMPLETION
from replica.api.served_model import ServedModel
from replica.errors import BadRequest, ContextTooLong, UnknownModel
from replica.request import SamplingParams

GREEDY_BELOW: Final = 1e-5  # a temperature that would overflow float32 logits means greedy
SMALLEST_TOP_P: Final = 1e-6  # 0 means the most likely token alone, and the token that crosses top_p is always kept
UINT64: Final = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What both endpoints share, as the client asked. None is what it did not say."""

    model: str | None
    stream: bool
    stream_options: tuple[bool, bool]  # include_usage, continuous_usage_stats
    max_tokens: int | None
    max_completion_tokens: int | None
    min_tokens: int
    n: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    logit_bias: dict[int, float]
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    skip_special_tokens: bool
    return_token_ids: bool
    logprobs: int | None  # of so many most likely tokens beside each output token's
    echo: bool = False  # the answer begins with the prompt
    priority: int | None = None  # the lower, the earlier


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What becomes the prompt of a chat."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    add_generation_prompt: bool
    continue_final_message: bool
    body_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A checked body of /v1/chat/completions."""

    options: Options
    conversation: Conversation
    tool_choice: str | dict[str, str]  # auto, none, required, or {"name": ...}
    parallel_tool_calls: bool
    response_format: ResponseFormat | None

    @property
    def reads_calls(self) -> bool:
        """Whether what looks like a tool call is one."""
        return bool(self.conversation.tools)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """A checked body of /v1/completions."""

    options: Options
    prompts: list[str | list[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as tokens, and as text where it was one."""

    token_ids: list[int]
    text: str | None = None
    opens_reasoning: bool = False  # the answer begins inside of `<think>`
    may_reason: bool = False  # the answer may begin with `<think>`


def parse_json(body: bytes) -> Any:
    """The value in a request's body. Raises BadRequest."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as err:  # ValueError: not JSON, not UTF-8, or a number of thousands of digits
        raise BadRequest(f"the body is not valid JSON: {err}") from err


def read_chat(reader: FieldReader, body: Any, *, body_bytes: int) -> ChatRequest:
    """Checks the parsed body of /v1/chat/completions, or what another API makes of its own. Raises BadRequest."""
    values = reader.read(body, CHAT)
    choice, effort = values.pop("tool_choice"), values.pop("reasoning_effort")
    if choice == "none":
        values["tools"] = None  # a model that does not see a tool does not call it
    if effort is not None:
        thinks = {"enable_thinking": False} if effort == "none" else {}
        values["chat_template_kwargs"] = {"reasoning_effort": effort, **thinks, **values["chat_template_kwargs"]}
    conversation = take_conversation(values, body_bytes=body_bytes)
    _check_choice(choice, conversation.tools)
    asks, top = values.pop("logprobs"), values.pop("top_logprobs")
    if top and not asks:
        raise BadRequest(f"top_logprobs is {top}, must be 0 without logprobs", param="top_logprobs")
    parallel, response_format = values.pop("parallel_tool_calls"), values.pop("response_format")
    return ChatRequest(
        options=_options(values, logprobs=top if asks else None),
        conversation=conversation,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=response_format,
    )


def take_conversation(values: dict[str, Any], *, body_bytes: int) -> Conversation:
    """Takes the conversation's fields out of the checked ones. Raises BadRequest."""
    adds, continues = values.pop("add_generation_prompt"), values.pop("continue_final_message")
    if adds and continues:
        raise BadRequest(
            "add_generation_prompt and continue_final_message cannot both be true", param="continue_final_message"
        )
    return Conversation(
        messages=values.pop("messages"),
        tools=values.pop("tools") or None,
        template_kwargs=values.pop("chat_template_kwargs"),
        add_generation_prompt=not continues if adds is None else adds,
        continue_final_message=continues,
        body_bytes=body_bytes,
    )


def parse_completion(reader: FieldReader, body: bytes, *, max_prompts: int) -> CompletionRequest:
    """Checks a body of /v1/completions. Raises BadRequest."""
    values = reader.read(parse_json(body), COMPLETION)
    prompts = values.pop("prompt")
    if len(prompts) > max_prompts:
        raise BadRequest(f"prompt has {len(prompts)} prompts, limit is {max_prompts} (--max-waiting)", param="prompt")
    return CompletionRequest(options=_options(values, logprobs=values.pop("logprobs")), prompts=prompts)


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises UnknownModel when the client asks for another; one that names none gets this one."""
    if name is not None and name != model.name:
        raise UnknownModel(f"the model {name[:200]!r} is not served here; {model.name!r} is", param="model")


def check_num_choices(options: Options, num_prompts: int, *, limit: int) -> None:
    """Raises BadRequest when there would be more choices than can ever wait together."""
    if options.n * num_prompts > limit:
        raise BadRequest(
            f"n is {options.n} for each of {num_prompts} prompts, limit is {limit} choices (--max-waiting)", param="n"
        )


async def chat_prompt(conversation: Conversation, model: ServedModel) -> Prompt:
    """Renders and encodes the conversation. Raises BadRequest, ContextTooLong."""
    if model.chat_template is None:
        raise BadRequest(f"the model {model.name!r} has no chat template; use /v1/completions", param="messages")
    messages = conversation.messages
    if not model.chat_template.mentions("developer"):
        # OpenAI's newer word for the same role; templates that do not know it would drop the message silently.
        messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
    try:
        text = await model.chat_template.render_off_loop(
            messages,
            tools=conversation.tools,
            kwargs=conversation.template_kwargs,
            add_generation_prompt=conversation.add_generation_prompt,
            continue_final_message=conversation.continue_final_message,
            max_chars=model.max_prompt_chars,
            input_chars=conversation.body_bytes,
        )
    except TooManyCharacters as err:
        raise _surely_too_long(err.num_chars, model, "messages") from err
    token_ids = await model.tokenizer.encode_off_loop(text, add_special_tokens=False)
    if not token_ids:
        raise BadRequest("the chat template makes an empty prompt of the messages", param="messages")
    opens = model.has_reasoning and is_opened_by(text)
    may_reason = model.has_reasoning and not opens and not is_closed_by(text)
    return Prompt(token_ids, opens_reasoning=opens, may_reason=may_reason)


async def completion_prompts(request: CompletionRequest, model: ServedModel) -> list[Prompt]:
    """Encodes the prompts that are texts and checks those that are token ids. Raises BadRequest, ContextTooLong."""
    prompts: list[Prompt] = []
    for prompt in request.prompts:
        if isinstance(prompt, list):
            check_token_ids("prompt", prompt, model)
            prompts.append(Prompt(prompt))
        else:
            prompts.append(Prompt(await encode_text("prompt", prompt, model), prompt))
        if not prompts[-1].token_ids:
            raise BadRequest("prompt is empty; it must have at least one token", param="prompt")
    return prompts


async def encode_text(name: str, text: str, model: ServedModel, *, add_special_tokens: bool = True) -> list[int]:
    """The tokens of a text that may fit the context. Raises BadRequest, ContextTooLong."""
    if len(text) > model.max_prompt_chars:
        raise _surely_too_long(len(text), model, name)
    return await model.tokenizer.encode_off_loop(text, add_special_tokens=add_special_tokens)


def check_token_ids(name: str, token_ids: list[int], model: ServedModel) -> None:
    """Raises BadRequest for an id that is none of the model's."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < model.vocab_size:
        wrong = next(i for i in token_ids if not 0 <= i < model.vocab_size)
        raise BadRequest(f"{name} has the token id {wrong}, must be from 0 to {model.vocab_size - 1}", param=name)


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
    """How to sample one choice: what the client asks, else the checkpoint's defaults.

    Raises BadRequest for what this model or this prompt does not allow.
    """
    defaults = model.defaults
    temperature = defaults.temperature if options.temperature is None else options.temperature
    seed = derived_seed(request_id) if options.seed is None else options.seed
    max_tokens = output_tokens(
        options, prompt_tokens=prompt_tokens, max_model_len=model.max_model_len, max_cached=max_cached
    )
    stop_ids = options.stop_token_ids | (frozenset() if options.ignore_eos else model.end_token_ids)
    stop_ids = frozenset(token_id for token_id in stop_ids if token_id < model.vocab_size)
    _check_min_tokens(options.min_tokens, max_tokens, num_stop_ids=len(stop_ids), vocab_size=model.vocab_size)
    check_token_ids("logit_bias", list(options.logit_bias), model)
    repeats = defaults.repetition_penalty if options.repetition_penalty is None else options.repetition_penalty
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature if temperature >= GREEDY_BELOW else 0.0,
        top_k=max(0, defaults.top_k if options.top_k is None else options.top_k),
        top_p=max(SMALLEST_TOP_P, defaults.top_p if options.top_p is None else options.top_p),
        min_p=defaults.min_p if options.min_p is None else options.min_p,
        seed=seed & UINT64,
        stop_token_ids=stop_ids,
        min_tokens=options.min_tokens,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=repeats,
        logit_bias=tuple(options.logit_bias.items()),
        logprobs=options.logprobs,
        prompt_logprobs=options.logprobs if options.echo else None,
    )


def derived_seed(request_id: str) -> int:
    """The seed of a request that names none: a function of its id, so that the same request can be continued."""
    return int.from_bytes(hashlib.sha256(request_id.encode()).digest()[:8], "little")


def _options(values: dict[str, Any], *, logprobs: int | None) -> Options:
    values.pop("logprobs", None)
    return Options(**values, logprobs=logprobs)


def _check_choice(choice: str | dict[str, str], tools: list[dict[str, Any]] | None) -> None:
    names = [tool["function"]["name"] for tool in tools or []]
    if choice == "required" and not names:
        raise BadRequest("tool_choice is 'required', and there are no tools", param="tool_choice")
    if isinstance(choice, dict) and choice["name"] not in names:
        raise BadRequest(f"tool_choice names {choice['name']!r}, which is none of the tools", param="tool_choice")


def _check_min_tokens(min_tokens: int, max_tokens: int, *, num_stop_ids: int, vocab_size: int) -> None:
    if min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens is {min_tokens}, limit is {max_tokens}: the answer's max_tokens", param="min_tokens"
        )
    if min_tokens and num_stop_ids >= vocab_size:
        raise BadRequest("min_tokens leaves no token to begin with: stop_token_ids has all of them", param="min_tokens")


def _surely_too_long(num_chars: int, model: ServedModel, param: str) -> ContextTooLong:
    """The error for a text so long that encoding it would be wasted work."""
    num_tokens = -(-num_chars // model.tokenizer.max_token_chars)
    return ContextTooLong(
        f"the prompt has at least {num_tokens} tokens ({num_chars} characters or more), limit is "
        f"{model.max_model_len - 1}: the context of {model.max_model_len} tokens (--max-model-len) must hold the "
        "answer, too",
        param=param,
    )
