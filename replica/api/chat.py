"""The checkpoint's chat template: OpenAI's messages and tools -> the text of a prompt.

A template is a Jinja program that came with the checkpoint. It runs (template_sandbox.py) with what transformers'
`apply_chat_template` gives it, so that it renders the same text; tests compare the two. Whatever it raises is the
request's own error, and both its time and its output are bounded.

Most conversations render in well under a millisecond, so that is done on the event loop. What takes longer, or is
large, is done from the beginning in one of a few threads, which no other work waits for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import jinja2

from replica.api.generation_config import read_json_object, special_tokens
from replica.api.template_sandbox import OutOfTime, Sandbox, Timer, render
from replica.errors import BadRequest, CheckpointError

RENDER_DEADLINE_S: Final = 5.0  # a template that runs longer is broken, or its input was made to break it
ON_LOOP_S: Final = 0.01  # the most that a rendering may take of the event loop's time
SMALL_INPUT_CHARS: Final = 16 * 1024  # messages up to this size render in about 1 ms
NUM_THREADS: Final = 2
_REASONING_KEYS: Final = ("reasoning_content", "thinking", "reasoning")  # what clients use; templates read the first
_CONTINUED_HERE: Final = "CONTINUE_FINAL_MESSAGE_TAG "  # as in transformers; the space tells whether content is trimmed

Message = dict[str, Any]


class TooManyCharacters(Exception):
    """The rendered prompt is too long. `num_chars` is what there was of it when rendering stopped."""

    def __init__(self, num_chars: int) -> None:
        super().__init__(f"{num_chars} characters")
        self.num_chars = num_chars


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The compiled template(s) of a checkpoint: `default`, perhaps `tool_use` and others."""

    templates: Mapping[str, jinja2.Template]
    sources: Mapping[str, str]
    special_tokens: Mapping[str, str]  # `bos_token` and the like, as variables
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="template")
    )

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """Reads the template of a checkpoint; None when it has none. Raises CheckpointError.

        As in transformers, files (chat_template.jinja, additional_chat_templates/*.jinja) win over
        tokenizer_config.json.
        """
        sources = _template_files(folder) or _configured_templates(folder)
        if not sources:
            return None
        return cls.compile(sources, special_tokens(folder))

    @classmethod
    def compile(cls, sources: Mapping[str, str], special_tokens: Mapping[str, str]) -> ChatTemplate:
        """Compiles templates by name. Raises CheckpointError for one that is no Jinja."""
        sandbox = Sandbox()
        templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                templates[name] = sandbox.template(source)
            except jinja2.TemplateSyntaxError as err:
                raise CheckpointError(f"chat template {name!r}, line {err.lineno}: {err.message}") from err
        return cls(templates, dict(sources), dict(special_tokens))

    def mentions(self, text: str) -> bool:
        """Whether the text occurs in any of the templates."""
        return any(text in source for source in self.sources.values())

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_chars: int,
        timer: Timer,
    ) -> str:
        """The prompt's text, ending where the assistant is to begin, or with the last message to be continued.

        `kwargs` are further variables of the template.

        Raises BadRequest for whatever the template raises, TooManyCharacters for a text of more than `max_chars`,
        OutOfTime.
        """
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise BadRequest(f"the model has no default chat template, only {sorted(self.templates)}", param="messages")
        shown: list[Message] = []
        for message in messages:
            shown.append(_for_template(message))
            timer.check()
        if continue_final_message:
            shown[-1] = _with_mark(shown[-1])
        variables = {
            **self.special_tokens,
            **(kwargs or {}),
            "messages": shown,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _collect(self.templates[name], variables, max_chars, timer)
            return _cut_at_mark(text) if continue_final_message else text
        except (BadRequest, TooManyCharacters, OutOfTime):
            raise
        except Exception as err:  # a template may raise anything: it is a program, and this request is its input
            raise BadRequest(
                f"the chat template refused the messages: {type(err).__name__}: {str(err)[:500]}", param="messages"
            ) from err

    async def render_off_loop(self, messages: list[Message], *, input_chars: int, **options: Any) -> str:
        """`render` with its other options, which takes little of the event loop's time, whatever the template does.

        Raises BadRequest, also when it takes too long, and TooManyCharacters.
        """
        text = partial(self.render, messages, **options)
        if input_chars < SMALL_INPUT_CHARS:
            try:
                return text(timer=Timer(ON_LOOP_S, is_beside=False))
            except OutOfTime:
                pass  # not so small after all
        try:
            return await asyncio.get_running_loop().run_in_executor(self.threads, lambda: text(timer=_long_timer()))
        except OutOfTime as err:
            raise BadRequest(f"the chat template took more than {RENDER_DEADLINE_S:g} s", param="messages") from err


def _long_timer() -> Timer:
    """To be made in the thread: the time begins when the rendering does."""
    return Timer(RENDER_DEADLINE_S, is_beside=True)


def _with_mark(message: Message) -> Message:
    """The message with a mark at the end of its content, so that its end is found in the prompt."""
    return {**message, "content": message["content"] + _CONTINUED_HERE}


def _cut_at_mark(text: str) -> str:
    """The prompt up to the mark, without white space before it if the template has trimmed the content."""
    start = text.rfind(_CONTINUED_HERE.strip())
    if start < 0:
        raise BadRequest(
            "the chat template does not show the last message, so it cannot be continued", param="messages"
        )
    return text[:start] if text.startswith(_CONTINUED_HERE, start) else text[:start].rstrip()


def _collect(template: jinja2.Template, variables: dict[str, Any], max_chars: int, timer: Timer) -> str:
    pieces: list[str] = []
    num_chars = 0
    for piece in render(template, variables, timer):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TooManyCharacters(num_chars)
    return "".join(pieces)


def _for_template(message: Message) -> Message:
    """One message as templates expect it, which is not quite as OpenAI's clients send it.

    Text parts become one string and an assistant without content says "" (templates concatenate it). Arguments of
    tool calls, JSON in a string for OpenAI, become the object they mean: templates walk them or print them with
    `tojson`. Keys without a value go, and reasoning gets the key that templates read.
    """
    made = {key: value for key, value in message.items() if value is not None}
    content = made.get("content", "")
    made["content"] = content if isinstance(content, str) else "\n".join(part["text"] for part in content)
    reasoning = next((made[key] for key in _REASONING_KEYS if key in made), None)
    if reasoning is not None:
        made = {"thinking": reasoning, **made, "reasoning_content": reasoning}
    if "tool_calls" in made:
        made["tool_calls"] = [_with_arguments_as_object(call) for call in made["tool_calls"]]
    return made


def _with_arguments_as_object(call: dict[str, Any]) -> dict[str, Any]:
    arguments = call["function"].get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments else {}
    except (ValueError, RecursionError):
        return call  # a model may have written no JSON; the template gets what it wrote
    return {**call, "function": {**call["function"], "arguments": parsed}} if isinstance(parsed, dict) else call


def _template_files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if (folder / "chat_template.jinja").exists():
        files["default"] = folder / "chat_template.jinja"
    try:
        return {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    except (OSError, ValueError) as err:
        raise CheckpointError(f"cannot read the chat templates of {folder}: {err}") from err


def _configured_templates(folder: Path) -> dict[str, str]:
    configured = read_json_object(folder / "tokenizer_config.json").get("chat_template")
    if configured is None:
        return {}
    if isinstance(configured, str):
        return {"default": configured}
    try:
        return {str(entry["name"]): str(entry["template"]) for entry in configured}
    except (TypeError, KeyError) as err:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a string or a list of objects with the keys "
            "name and template"
        ) from err
