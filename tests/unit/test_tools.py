"""Calls of tools are taken out of an answer, and what looks like a call and is none stays."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.api.tools import CallDelta, Said, ToolSplitter

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
Split = tuple[str, list[tuple[str, str]]]


def said(pieces: list[str], *, parallel: bool) -> Said:
    """All that comes of the pieces, in order."""
    splitter, whole = ToolSplitter(parallel=parallel), Said()
    for found in [*map(splitter.push, pieces), splitter.flush()]:
        whole.add_all(found)
    return whole


def split(pieces: list[str], *, parallel: bool = True) -> Split:
    """The content, and the name and arguments of each call."""
    splitter = ToolSplitter(parallel=parallel)
    content, calls = "", dict[int, CallDelta]()
    for found in [*map(splitter.push, pieces), splitter.flush()]:
        content += found.content
        for call in found.calls:
            if call.name is not None:
                assert call.index not in calls, "a call has its name once"
                calls[call.index] = CallDelta(call.index, call.name)
            calls[call.index].arguments += call.arguments
    assert list(calls) == list(range(len(calls)))
    return content, [(call.name or "", call.arguments) for call in calls.values()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", ("plain", [])),
        ("ends in white space \n\n", ("ends in white space \n\n", [])),
        ("a < b <tool", ("a < b <tool", [])),
        (CALL, ("", [("f", '{"x": 1}')])),
        (f"Let me see.\n{CALL}", ("Let me see.", [("f", '{"x": 1}')])),
        (f"{CALL}\n{CALL}\n", ("", [("f", '{"x": 1}')] * 2)),
        ('<tool_call>{"name":"f","arguments":{}}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name":"f","parameters":{"a": "}{\\"]"}}</tool_call>', ("", [("f", '{"a": "}{\\"]"}')])),
        ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f"}</tool_call>', ("", [("f", "{}")])),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', ("", [("f", '{"a": 1}')])),
        ('<tool_call>{"name": "f", "arguments": {"a": [1, {"b": 2', ("", [("f", '{"a": [1, {"b": 2')])),
        ("<tool_call>no json</tool_call>!", ("<tool_call>no json</tool_call>!", [])),
        ("<tool_call>no end", ("<tool_call>no end", [])),
        ('<tool_call>{"name": 5}</tool_call>', ('<tool_call>{"name": 5}</tool_call>', [])),
        ("<tool_call>[1]</tool_call>", ("<tool_call>[1]</tool_call>", [])),
        (f"{CALL} and more", (" and more", [("f", '{"x": 1}')])),
    ],
)
def test_answer_is_taken_apart(text: str, expected: Split) -> None:
    assert split([text]) == expected
    assert split(list(text)) == expected


PARTS = st.sampled_from(
    [
        CALL,
        "<tool_call>",
        "</tool_call>",
        "\n",
        " ",
        "text",
        '{"name": "g", "arguments": {"\N{ROCKET}": "\\u00e9"}}',
        "}",
        "<",
    ]
)


@given(st.lists(PARTS, max_size=8).map("".join), st.lists(st.integers(1, 20)), st.booleans())
def test_pieces_make_no_difference(text: str, cuts: list[int], parallel: bool) -> None:
    pieces, rest = [], text
    for size in cuts:
        pieces.append(rest[:size])
        rest = rest[size:]
    assert said([*pieces, rest], parallel=parallel) == said(list(text), parallel=parallel)


def test_text_and_calls_keep_their_order() -> None:
    assert said([f"a{CALL}b{CALL}"], parallel=True).parts == [
        *("a", CallDelta(0, "f", '{"x": 1}'), "b", CallDelta(1, "f", '{"x": 1}')),
    ]


def test_arguments_come_as_they_are_written() -> None:
    splitter = ToolSplitter(parallel=True)
    assert splitter.push('<tool_call>\n{"name": "f", "arg').calls == []
    (begun,) = splitter.push('uments": {"ci').calls
    assert (begun.name, begun.arguments) == ("f", '{"ci')
    (more,) = splitter.push('ty": "Oslo"}').calls
    assert (more.name, more.arguments) == (None, 'ty": "Oslo"}')
    assert splitter.push("}\n</tool_call>").calls == []
    assert splitter.has_calls


def test_only_the_first_call_counts_unless_calls_may_be_parallel() -> None:
    _, calls = split([CALL + CALL.replace('"f"', '"g"') + CALL], parallel=False)
    assert calls == [("f", '{"x": 1}')]


@given(
    st.recursive(
        st.none() | st.booleans() | st.text() | st.floats(allow_nan=False),
        lambda s: st.lists(s) | st.dictionaries(st.text(), s),
        max_leaves=5,
    )
)
def test_any_object_comes_through(value: object) -> None:
    arguments = json.dumps({"value": value})
    text = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    assert split(list(text)) == ("", [("f", arguments)])
