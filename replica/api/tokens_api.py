"""/tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from typing import Any, Final

from replica.api.answers import Json
from replica.api.fields import FieldReader, Table, bad, check_count, checked, flag, string
from replica.api.openai_api import chat_prompt, check_model, check_token_ids, encode_text, take_conversation
from replica.api.request_fields import CONVERSATION_FIELDS
from replica.api.served_model import ServedModel

MAX_TOKENS: Final = 2**20  # of a /detokenize


def _check_tokens(name: str, value: Any) -> list[int]:
    if not isinstance(value, list):
        raise bad(name, value, "a list of token ids")
    check_count(name, value, MAX_TOKENS, "ids")
    if not all(type(i) is int for i in value):
        raise bad(name, value, "a list of token ids")
    return value


TOKENIZE_TEXT: Final = Table(
    served={
        "model": string(),
        "prompt": string(),
        "add_special_tokens": flag(True),
        "return_token_strs": flag(False),
    },
    not_served={"messages": ()},  # with messages it is the other one
    ignored=frozenset(),
    required=("prompt",),
)
TOKENIZE_CHAT: Final = Table(
    served={
        "model": string(),
        **CONVERSATION_FIELDS,
        "return_token_strs": flag(False),
    },
    not_served={"chat_template": (), "add_special_tokens": (False,)},
    ignored=frozenset(),
    required=("messages",),
)
DETOKENIZE: Final = Table(
    served={
        "model": string(),
        "tokens": checked(_check_tokens, None, type="array", items={"type": "integer"}, maxItems=MAX_TOKENS),
    },
    not_served={},
    ignored=frozenset(),
    required=("tokens",),
)


async def tokenize(reader: FieldReader, body: Any, model: ServedModel, *, body_bytes: int) -> Json:
    """The tokens of a text, or of a conversation. Raises BadRequest, ContextTooLong."""
    is_chat = isinstance(body, dict) and body.get("messages") is not None
    values = reader.read(body, TOKENIZE_CHAT if is_chat else TOKENIZE_TEXT)
    check_model(values.pop("model"), model)
    if is_chat:
        conversation = take_conversation(values, body_bytes=body_bytes)
        token_ids = (await chat_prompt(conversation, model)).token_ids
    else:
        adds = values["add_special_tokens"]
        token_ids = await encode_text("prompt", values["prompt"], model, add_special_tokens=adds)
    answer: Json = {"count": len(token_ids), "max_model_len": model.max_model_len, "tokens": token_ids}
    if values["return_token_strs"]:
        answer["token_strs"] = [model.tokenizer.token_text(token_id)[0] for token_id in token_ids]
    return answer


def detokenize(reader: FieldReader, body: Any, model: ServedModel) -> Json:
    """The text of tokens, special ones included. Raises BadRequest."""
    values = reader.read(body, DETOKENIZE)
    check_model(values["model"], model)
    check_token_ids("tokens", values["tokens"], model)
    return {"prompt": model.tokenizer.decode(values["tokens"], skip_special_tokens=False)}
