"""The checkpoint's chat template: OpenAI's messages and tools -> the text of a prompt.

A template is a Jinja program that came with the checkpoint. It runs in jinja2's sandbox with what transformers'
`apply_chat_template` gives it, so that it renders the same text; tests compare the two. Whatever it raises is the
request's own error, and both its time and its output are bounded.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, Final

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from replica.api.generation_config import read_json_object, special_tokens
from replica.errors import BadRequest, CheckpointError

RENDER_DEADLINE_S: Final = 5.0  # a template that runs longer is broken, or its input was made to break it
SMALL_INPUT_CHARS: Final = 16 * 1024  # messages up to this size render in about 1 ms, on the event loop
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
        environment = _environment()
        templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                templates[name] = environment.from_string(source)
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
    ) -> str:
        """The prompt's text, ending where the assistant is to begin, or with the last message to be continued.

        `kwargs` are further variables of the template.

        Raises BadRequest for whatever the template raises or when it takes too long, TooManyCharacters for a text of
        more than `max_chars`.
        """
        name = "tool_use" if tools and "tool_use" in self.templates else "default"
        if name not in self.templates:
            raise BadRequest(f"the model has no default chat template, only {sorted(self.templates)}", param="messages")
        variables = {**self.special_tokens, **(kwargs or {})}
        deadline_s = time.monotonic() + RENDER_DEADLINE_S
        shown: list[Message] = []
        for message in messages:
            shown.append(_for_template(message))
            _check_time(deadline_s)
        if continue_final_message:
            shown[-1] = _with_mark(shown[-1])
        variables |= {
            "messages": shown,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = _collect(self.templates[name], variables, max_chars, deadline_s)
            return _cut_at_mark(text) if continue_final_message else text
        except (BadRequest, TooManyCharacters):
            raise
        except Exception as err:  # a template may raise anything: it is a program, and this request is its input
            raise BadRequest(
                f"the chat template refused the messages: {type(err).__name__}: {str(err)[:500]}", param="messages"
            ) from err

    async def render_off_loop(
        self,
        messages: list[Message],
        *,
        tools: list[dict[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        max_chars: int,
        input_chars: int,
    ) -> str:
        """`render`, in a thread when the input is large."""
        render = partial(
            self.render,
            messages,
            tools=tools,
            kwargs=kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            max_chars=max_chars,
        )
        return render() if input_chars < SMALL_INPUT_CHARS else await asyncio.to_thread(render)


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


def _check_time(deadline_s: float) -> None:
    if time.monotonic() > deadline_s:
        raise BadRequest(f"the chat template took more than {RENDER_DEADLINE_S:g} s", param="messages")


def _collect(template: jinja2.Template, variables: dict[str, Any], max_chars: int, deadline_s: float) -> str:
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > max_chars:
            raise TooManyCharacters(num_chars)
        _check_time(deadline_s)
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


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """What transformers renders templates in."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is just rendered."""

    tags = {"generation"}  # noqa: RUF012  (jinja2's own declaration)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """The statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which a model has never seen.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
