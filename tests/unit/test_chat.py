"""The chat template: the same text as transformers' apply_chat_template, and nothing a template does harms others."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any, Final

import pytest
from transformers import AutoTokenizer

from replica.api.chat import ChatTemplate, TooManyCharacters
from replica.api.template_sandbox import OutOfTime, Timer
from replica.api.tokenizer import Tokenizer
from replica.errors import BadRequest, CheckpointError
from tests.commands import DEMO_MODEL

TEMPLATES: Final = Path(__file__).parents[1] / "data" / "templates"
SOURCES: Final = {
    "demo": (DEMO_MODEL / "chat_template.jinja").read_text(),
    "qwen3": (TEMPLATES / "qwen3_style.jinja").read_text(),
    "features": (TEMPLATES / "every_feature.jinja").read_text(),
    "loops": (TEMPLATES / "loops.jinja").read_text(),
}
SPECIAL_TOKENS: Final[dict[str, Any]] = {
    "bos_token": "<|im_start|>",
    "eos_token": "<|im_end|>",
    "pad_token": "<|endoftext|>",
}
MAX_CHARS: Final = 100_000
WEATHER: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Wetter für <eine> Stadt & 'mehr'",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def render_by(template: ChatTemplate | None, messages: list[dict[str, Any]], **options: Any) -> str:
    """With time and characters enough, unless a test says otherwise."""
    assert template is not None
    return template.render(messages, **{"max_chars": MAX_CHARS, "timer": Timer(60.0, is_beside=False), **options})


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def call(city: str, **further: Any) -> dict[str, Any]:
    function = {"name": "get_weather", "arguments": {"city": city}}
    return {"role": "assistant", "tool_calls": [{"id": "c1", "type": "function", "function": function}], **further}


CONVERSATIONS: Final[dict[str, list[dict[str, Any]]]] = {
    "question": [user("What is 1 + 2?")],
    "system": [{"role": "system", "content": "Be brief."}, user("Hi\n\n there ")],
    "turns": [user("I am Ada."), {"role": "assistant", "content": "Hello Ada."}, user("Who am I?")],
    "reasoning": [
        user("1 + 1?"),
        {"role": "assistant", "content": "2", "reasoning_content": "one and one\n"},
        user("2 + 2?"),
        {"role": "assistant", "content": "4", "reasoning_content": "\ntwo and two"},
    ],
    "inline reasoning": [user("1 + 1?"), {"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"}],
    "other name for reasoning": [user("1 + 1?"), {"role": "assistant", "content": "2", "reasoning": "hm"}],
    "tool call": [user("Weather in Rome?"), call("Rome", content="", reasoning_content="Ask."), user("Well?")],
    "tool result": [
        user("Weather in Rome and Zürich?"),
        call("Rome", content="Let me see."),
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "雨"},
    ],
    "other scripts": [user("e\N{COMBINING ACUTE ACCENT} 漢字 \N{THUMBS UP SIGN} \"quoted\" <b>'&amp;'</b>")],
}


@pytest.fixture(scope="module")
def reference() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("tools", [None, [WEATHER]], ids=["no tools", "tools"])
@pytest.mark.parametrize("kwargs", [{}, {"enable_thinking": False}, {"enable_thinking": True, "flavour": "é"}], ids=str)
@pytest.mark.parametrize("template", SOURCES)
def test_template_renders_as_in_transformers(
    template: str, kwargs: dict[str, Any], tools: list[dict[str, Any]] | None, conversation: str, reference: Any
) -> None:
    messages = CONVERSATIONS[conversation]
    expected = reference.apply_chat_template(
        messages,
        tools=tools,
        chat_template=SOURCES[template],
        add_generation_prompt=True,
        tokenize=False,
        **kwargs,
    )
    ours = ChatTemplate.compile({"default": SOURCES[template]}, SPECIAL_TOKENS)
    assert render_by(ours, messages, tools=tools, kwargs=kwargs) == expected


def test_demo_checkpoint_makes_the_prompt_ids_of_transformers() -> None:
    reference = AutoTokenizer.from_pretrained(DEMO_MODEL)
    template, tokenizer = ChatTemplate.load(DEMO_MODEL), Tokenizer.load(DEMO_MODEL)
    for messages in CONVERSATIONS.values():
        expected = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        text = render_by(template, messages)
        assert tokenizer.encode(text, add_special_tokens=False) == expected


def render(source: str, messages: list[dict[str, Any]], **further: Any) -> str:
    return render_by(ChatTemplate.compile({"default": source}, SPECIAL_TOKENS), messages, **further)


def test_arguments_in_a_string_render_as_the_object_they_mean() -> None:
    as_object = call("Rome")
    as_string = json.loads(json.dumps(as_object))
    as_string["tool_calls"][0]["function"]["arguments"] = '{"city":"Rome"}'
    for source in SOURCES.values():
        assert render(source, [user("?"), as_string, user("!")]) == render(source, [user("?"), as_object, user("!")])


def test_arguments_that_are_no_json_reach_the_template_as_they_are() -> None:
    broken = call("Rome")
    broken["tool_calls"][0]["function"]["arguments"] = '{"city": '
    assert '"arguments": {"city": }' in render(SOURCES["qwen3"], [user("?"), broken, user("!")])


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "one\ntwo"


def test_messages_are_not_changed_by_rendering() -> None:
    messages = CONVERSATIONS["tool call"]
    before = json.dumps(messages)
    render(SOURCES["qwen3"], messages)
    assert json.dumps(messages) == before


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('no tools, please') }}",
        "{{ 1 // 0 }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content.lower() }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ missing() }}",
    ],
)
def test_whatever_a_template_raises_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest, match="the chat template refused the messages"):
        render(source, [user("hi")])


def test_reason_of_a_template_reaches_the_client() -> None:
    with pytest.raises(BadRequest, match="no tools, please") as caught:
        render("{{ raise_exception('no tools, please') }}", [user("hi")])
    assert caught.value.param == "messages"


def test_rendering_stops_at_the_limit_of_characters() -> None:
    with pytest.raises(TooManyCharacters) as caught:
        render("{% for i in range(99999) %}{{ 'x' * 10 }}{% endfor %}", [user("hi")], max_chars=1000)
    assert 1000 < caught.value.num_chars <= 1010


ENDLESS: Final = {
    "text": "{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}",
    "no text": "{% for i in range(99999) %}{% for j in range(99999) %}{% set k = j %}{% endfor %}{% endfor %}",
    "macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "loop in a macro": "{% macro f() %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endmacro %}{{ f() }}",
    "recursive loop": "{% for i in [1, 1] recursive %}{{ loop([1, 1]) if loop.depth < 60 }}{% endfor %}",
    "block": "{% block b scoped %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% endblock %}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_template_that_never_ends_runs_out_of_time_whether_it_writes_or_not(source: str) -> None:
    with pytest.raises(OutOfTime):
        render(source, [user("hi")], max_chars=10**9, timer=Timer(0.05, is_beside=False))


@pytest.mark.parametrize("input_chars", [10, 10**6])
async def test_template_that_never_ends_is_refused_and_the_loop_goes_on_meanwhile(
    monkeypatch: pytest.MonkeyPatch, input_chars: int
) -> None:
    monkeypatch.setattr("replica.api.chat.RENDER_DEADLINE_S", 0.5)
    template = ChatTemplate.compile({"default": ENDLESS["no text"]}, {})
    rendering = asyncio.create_task(template.render_off_loop([user("hi")], max_chars=9, input_chars=input_chars))
    turns, began_s = 0, time.monotonic()
    while not rendering.done():
        await asyncio.sleep(0.001)
        turns += 1
    with pytest.raises(BadRequest, match=r"the chat template took more than 0\.5 s"):
        await rendering
    assert time.monotonic() - began_s < 5
    assert turns > 50  # of some 350; a thread that leaves no room allows 90 a second at most, a blocked loop none


async def test_large_or_slow_input_renders_off_the_loop_to_the_same_text(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate.compile({"default": SOURCES["demo"]}, SPECIAL_TOKENS)
    messages = [user("x" * 30_000)]
    expected = render_by(template, messages)
    assert await template.render_off_loop(messages, max_chars=MAX_CHARS, input_chars=30_000) == expected
    monkeypatch.setattr("replica.api.chat.ON_LOOP_S", -1.0)
    assert await template.render_off_loop(messages, max_chars=MAX_CHARS, input_chars=30) == expected


def checkpoint(folder: Path, **config: Any) -> Path:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_template_of_tokenizer_config_is_used_with_its_special_tokens(tmp_path: Path) -> None:
    checkpoint(tmp_path, chat_template="{{ bos_token }}!", bos_token={"content": "<s>"}, add_bos_token=True)
    template = ChatTemplate.load(tmp_path)
    assert render_by(template, [user("hi")]) == "<s>!"


def test_named_templates_choose_by_tools(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    template = ChatTemplate.load(checkpoint(tmp_path, chat_template=named))
    assert render_by(template, [user("hi")]) == "plain"
    assert render_by(template, [user("hi")], tools=[WEATHER]) == "tools"


def test_template_file_wins_over_tokenizer_config(tmp_path: Path) -> None:
    checkpoint(tmp_path, chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file")
    template = ChatTemplate.load(tmp_path)
    assert render_by(template, [user("hi")]) == "file"


def test_checkpoint_without_a_template_has_none(tmp_path: Path) -> None:
    assert ChatTemplate.load(checkpoint(tmp_path)) is None
    assert ChatTemplate.load(tmp_path / "nowhere") is None


@pytest.mark.parametrize("chat_template", ["{% if %}", [{"name": "default"}], 3])
def test_broken_template_is_a_checkpoint_error(tmp_path: Path, chat_template: Any) -> None:
    with pytest.raises(CheckpointError, match=r"chat_template|chat template 'default', line 1"):
        ChatTemplate.load(checkpoint(tmp_path, chat_template=chat_template))


@pytest.mark.parametrize("content", ["It is ", "It is", " \n It is\n", "x CONTINUE_FINAL_MESSAGE_TAG y"])
@pytest.mark.parametrize("name", ["demo", "qwen3"])
def test_last_message_is_continued_as_in_transformers(name: str, content: str) -> None:
    reference = AutoTokenizer.from_pretrained(DEMO_MODEL)
    messages = [user("What is 1 + 2?"), {"role": "assistant", "content": content}]
    expected = reference.apply_chat_template(
        messages, chat_template=SOURCES[name], tokenize=False, continue_final_message=True
    )
    template = ChatTemplate.compile({"default": SOURCES[name]}, SPECIAL_TOKENS)
    rendered = render_by(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected


def test_message_that_the_template_does_not_show_cannot_be_continued() -> None:
    template = ChatTemplate.compile({"default": "nothing"}, {})
    with pytest.raises(BadRequest, match="does not show the last message"):
        render_by(template, [user("hi")], continue_final_message=True)


def test_the_time_before_the_template_begins_counts_too() -> None:
    with pytest.raises(OutOfTime):
        render("{{ raise_exception('begun') }}", [user("hi")], timer=Timer(-1.0, is_beside=False))


def test_arguments_that_nest_without_end_stay_what_the_model_wrote() -> None:
    template = ChatTemplate.compile({"default": "{{ messages[0].tool_calls[0].function.arguments }}"}, {})
    arguments = "[" * 100_000
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert render_by(template, [message], max_chars=10**6) == arguments
