"""What a choice says does not depend on how many tokens come together, whatever has to be taken out of it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.api.choice import Choice, Delta, joined
from replica.api.metrics import ChoiceTimes, Metrics
from replica.api.openai_api import Prompt
from replica.api.reasoning import ReasoningSplitter
from replica.api.stop_strings import StopStrings
from replica.api.tools import ToolSplitter
from replica.errors import GrammarFailed, Interrupted
from replica.request import FinishReason, SamplingParams, Sequence, TokenOutput
from replica.step_loop import EngineStats
from tests.protocol.fake_loop import MODEL

STATS = EngineStats(running=0, waiting=0, queued_prefill_tokens=0, free_blocks=0, total_blocks=0, step=0, epoch=0)
METRICS = Metrics(model_name="m", block_size=16, has_prefix_cache=True, stats=lambda: STATS)
CALL = '<tool_call>\n{"name": "f", "arguments": {"x": "\N{ROCKET}"}}\n</tool_call>'
# An emoji of several code points, combining marks, CJK, Arabic, and what must be taken out.
PARTS = [
    *(
        "\N{FAMILY}\N{ZERO WIDTH JOINER}\N{ROCKET}",
        "e\N{COMBINING ACUTE ACCENT}\N{COMBINING TILDE}",
        "漢字",
        "한국어",
        "سلام",
    ),
    *(
        "<think>",
        "</think>",
        "\n\n",
        "stop",
        "st",
        CALL,
        "<tool_call>",
        "</tool_call>",
        "a b",
        "\N{REPLACEMENT CHARACTER}",
    ),
]


def make(stops: tuple[str, ...] = (), *, min_tokens: int = 0, is_chat: bool = True) -> Choice:
    params = SamplingParams(max_tokens=1000, seed=0, min_tokens=min_tokens)
    sequence = Sequence(request_id="r", choice=0, prompt_ids=[1], params=params)
    return Choice(
        sequence=sequence,
        prompt=Prompt([1]),
        detokenizer=MODEL.tokenizer.detokenizer(),
        stops=StopStrings(stops, keeps=False) if stops else None,
        reasoning=ReasoningSplitter(opened=False) if is_chat else None,
        tools=ToolSplitter(parallel=True) if is_chat else None,
        end_token_ids=MODEL.end_token_ids,
        times=ChoiceTimes(METRICS, sequence, num_choices=1),
    )


def run(choice: Choice, token_ids: list[int], sizes: list[int], reason: FinishReason = FinishReason.LENGTH) -> Delta:
    """The whole answer, of tokens that came in groups of these sizes, and what is left together."""
    deltas: list[Delta] = []
    ends = [end for end in itertools.accumulate(sizes) if end < len(token_ids)]
    for start, end in itertools.pairwise([0, *ends, len(token_ids)]):
        is_last = end == len(token_ids)
        deltas.append(choice.push(TokenOutput(tuple(token_ids[start:end]), reason if is_last else None)))
        if deltas[-1].finish_reason is not None:
            break
    return joined(deltas)


def encode(text: str) -> list[int]:
    return MODEL.tokenizer.encode(text, add_special_tokens=False)


@given(
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=10).map("".join),
    st.lists(st.integers(1, 9), max_size=30),
    st.sampled_from([(), ("stop",), ("st", "\n\n", "字")]),
    st.integers(0, 12),
    st.booleans(),
)
def test_groups_of_tokens_make_no_difference(
    text: str, sizes: list[int], stops: tuple[str, ...], min_tokens: int, is_chat: bool
) -> None:
    token_ids = encode(text)
    one_by_one, grouped = (make(stops, min_tokens=min_tokens, is_chat=is_chat) for _ in range(2))
    expected = run(one_by_one, token_ids, [1] * len(token_ids))
    assert run(grouped, token_ids, sizes) == expected
    assert grouped.num_reasoning_tokens == one_by_one.num_reasoning_tokens
    assert grouped.num_tokens == one_by_one.num_tokens == len(expected.token_ids)


@given(st.lists(st.sampled_from(PARTS), min_size=1, max_size=10).map("".join), st.lists(st.integers(1, 9)))
def test_text_of_a_completion_is_the_text_of_its_tokens(text: str, sizes: list[int]) -> None:
    whole = run(make(is_chat=False), encode(text), sizes)
    assert whole.said.content == text and whole.finish_reason == "length"


def test_stop_string_ends_the_choice_with_the_token_that_completes_it() -> None:
    token_ids = encode("abc") + encode("stop") + encode("never seen")
    choice = make(("stop",), is_chat=False)
    whole = run(choice, token_ids, [len(token_ids)])
    assert (whole.said.content, whole.finish_reason, whole.stopped_by) == ("abc", "stop", "stop")
    assert MODEL.tokenizer.decode(list(whole.token_ids)) == "abcstop"


def test_stop_string_within_the_least_tokens_stops_nothing() -> None:
    text = "a stop b stop"
    num_tokens = len(encode("a stop b"))
    assert run(make(("stop",), min_tokens=num_tokens, is_chat=False), encode(text), []).said.content == "a stop b "


def test_token_that_ends_the_choice_is_named_unless_it_is_the_models_own() -> None:
    end = min(MODEL.end_token_ids)
    assert run(make(), [*encode("ab"), end], [], FinishReason.STOP).stopped_by is None
    whole = run(make(is_chat=False), [*encode("ab"), 16], [], FinishReason.STOP)
    assert (whole.said.content, whole.stopped_by) == ("ab", 16)


def test_choice_that_calls_a_tool_says_so_at_its_end_unless_it_is_cut_off() -> None:
    token_ids = [*encode(CALL), min(MODEL.end_token_ids)]
    assert run(make(), token_ids, [], FinishReason.STOP).finish_reason == "tool_calls"
    assert run(make(), token_ids[:-1], []).finish_reason == "length"


def test_choice_without_an_answer_is_an_error() -> None:
    with pytest.raises(GrammarFailed, match="no simpler"):
        make().push(TokenOutput((), FinishReason.ERROR, "no simpler"))
    with pytest.raises(Interrupted, match="before the answer was complete"):
        make().push(TokenOutput((), FinishReason.ABORT))
