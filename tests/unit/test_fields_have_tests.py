"""Which test shows the value that each field of a request must produce. A new field needs one, too."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

import pytest

from replica.api.openapi import BODIES

TESTS: Final = Path(__file__).parents[1]
LOGITS, FIELDS = "e2e/test_sampling_fields.py", "e2e/test_request_fields.py"
SCHEMAS, STREAMS, APIS = "e2e/test_json_schemas.py", "protocol/test_streams.py", "protocol/test_other_apis.py"
COMPLETIONS: Final = (FIELDS, "test_fields_of_completions_whole_and_streamed")
PROMPTS: Final = (FIELDS, "test_prompt_of_a_chat_is_the_one_of_transformers")
EDITS: Final = (LOGITS, "test_greedy_answer_follows_the_edited_logits")
DRAWS: Final = (LOGITS, "test_each_of_n_choices_is_drawn_with_its_own_numbers")
TOKENS: Final = (FIELDS, "test_texts_become_the_tokens_of_transformers_and_come_back")
CALLS: Final = (SCHEMAS, "test_tool_that_must_be_called_is_called_with_valid_arguments")
RESPONSE: Final = (APIS, "test_response_becomes_a_chat")
MESSAGE: Final = (APIS, "test_message_becomes_a_chat")
# Field -> the file and the test. Of /v1/responses and /v1/messages those that chats have not.
SHOWN_BY: Final[dict[str, tuple[str, str]]] = {
    # both endpoints
    "model": ("protocol/test_bad_input.py", "test_unknown_model_is_a_404_of_every_api"),
    "stream": (STREAMS, "test_streams_put_together_are_the_whole_answers"),
    "stream_options": (FIELDS, "test_usage_in_a_stream_is_what_has_come_so_far"),
    "max_tokens": COMPLETIONS,
    "max_completion_tokens": COMPLETIONS,
    "min_tokens": EDITS,
    "n": DRAWS,
    "temperature": DRAWS,
    "top_p": DRAWS,
    "top_k": DRAWS,
    "min_p": DRAWS,
    "seed": (LOGITS, "test_a_seed_gives_the_same_tokens_alone_and_amid_other_requests"),
    "presence_penalty": EDITS,
    "frequency_penalty": EDITS,
    "repetition_penalty": EDITS,
    "logit_bias": EDITS,
    "priority": ("unit/test_priority.py", "test_the_body_s_number_goes_before_the_header_s_class"),
    "stop": COMPLETIONS,
    "stop_token_ids": COMPLETIONS,
    "include_stop_str_in_output": COMPLETIONS,
    "ignore_eos": COMPLETIONS,
    "skip_special_tokens": COMPLETIONS,
    "return_token_ids": COMPLETIONS,
    # chats
    "messages": PROMPTS,
    "tools": PROMPTS,
    "tool_choice": CALLS,
    "parallel_tool_calls": CALLS,
    "response_format": (SCHEMAS, "test_greedy_answers_are_those_of_trying_every_token_against_every_value"),
    "chat_template_kwargs": PROMPTS,
    "add_generation_prompt": PROMPTS,
    "continue_final_message": PROMPTS,
    "reasoning_effort": PROMPTS,
    "logprobs": (LOGITS, "test_logprobs_of_a_chat_are_of_the_model_before_penalties"),
    "top_logprobs": (LOGITS, "test_logprobs_of_a_chat_are_of_the_model_before_penalties"),
    # completions
    "prompt": (FIELDS, "test_one_prompt_and_several_and_several_choices_of_each"),
    "echo": (LOGITS, "test_echo_has_the_prompts_logprobs_however_it_is_cut_into_chunks"),
    # tokens
    "add_special_tokens": TOKENS,
    "return_token_strs": TOKENS,
    "tokens": TOKENS,
    # responses
    "input": RESPONSE,
    "instructions": RESPONSE,
    "max_output_tokens": RESPONSE,
    "text": RESPONSE,
    "reasoning": RESPONSE,
    "metadata": (APIS, "test_response_has_openais_shape"),
    # messages
    "system": MESSAGE,
    "stop_sequences": MESSAGE,
    "thinking": MESSAGE,
}


def test_every_served_field_is_shown_by_a_test() -> None:
    assert {name for tables in BODIES.values() for table in tables for name in table.served} == SHOWN_BY.keys()


@pytest.mark.parametrize("field", SHOWN_BY)
def test_the_named_test_is_there_and_its_file_uses_the_field(field: str) -> None:
    path, name = SHOWN_BY[field]
    source = (TESTS / path).read_text()
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    assert name in [function.name for function in functions]
    assert field in source
