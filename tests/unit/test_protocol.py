"""The control protocol: every message survives the wire, and everything else is a ProtocolError."""

from __future__ import annotations

from dataclasses import asdict, fields, replace
from typing import Any, get_type_hints

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.protocol import (
    MAX_FRAME_BYTES,
    Hello,
    Leaving,
    LoadReport,
    Message,
    ProtocolError,
    Refused,
    Welcome,
    decode,
    encode,
)

TYPES: list[type[Message]] = [Hello, Welcome, Refused, LoadReport, Leaving]
VALUES = {
    bool: st.booleans(),
    str: st.text(max_size=100),
    int: st.integers(-(2**63), 2**63),
    float: st.floats(allow_nan=False),
    list[int]: st.lists(st.integers(0, 1000), max_size=9),
}
REPORT = {
    "type": "load",
    **dict.fromkeys(
        ("sequence", "running", "waiting", "queued_prefill_tokens", "free_blocks", "total_blocks", "step", "epoch"), 1
    ),
}
WELCOME = {"type": "welcome", "version": 1, "proxy_id": "p", "report_interval_s": 1.0}


def messages(cls: type[Message]) -> st.SearchStrategy[Any]:
    return st.builds(cls, **{field.name: VALUES[get_type_hints(cls)[field.name]] for field in fields(cls)})


@given(st.one_of([messages(cls) for cls in TYPES]))
def test_every_message_comes_out_of_its_frame_as_it_went_in(message: Message) -> None:
    assert decode(encode(message)) == message


def test_a_field_that_this_version_does_not_know_is_ignored() -> None:
    frame = msgpack.packb({**WELCOME, "colour": "green"})
    assert decode(frame) == Welcome(proxy_id="p", report_interval_s=1.0)


def test_a_whole_number_is_taken_for_a_float() -> None:
    assert decode(msgpack.packb({**WELCOME, "report_interval_s": 2})) == Welcome(proxy_id="p", report_interval_s=2.0)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ({**WELCOME, "type": "farewell"}, "unknown message type 'farewell'"),
        ({**WELCOME, "type": ["welcome"]}, "unknown message type"),
        ({name: WELCOME[name] for name in ("type", "version", "proxy_id")}, "welcome lacks the field report_interval"),
        ({**WELCOME, "version": "1"}, "welcome.version is str, not int"),
        ({**WELCOME, "version": True}, "welcome.version is bool, not int"),
        ({**WELCOME, "proxy_id": b"p"}, "welcome.proxy_id is bytes, not str"),
        ({**WELCOME, "report_interval_s": None}, "welcome.report_interval_s is NoneType, not float"),
        ({**REPORT, "members": 3}, "load.members is int, not list"),
        ({**REPORT, "members": [1, "2"]}, "load.members is list, not list"),
        ([1, 2], "unknown message type None"),
        ("welcome", "unknown message type None"),
    ],
)
def test_a_frame_that_is_no_message_says_what_is_wrong_with_it(raw: object, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        decode(msgpack.packb(raw))


def test_a_frame_over_the_limit_is_refused_by_its_size_alone() -> None:
    with pytest.raises(ProtocolError, match=f"limit is {MAX_FRAME_BYTES}"):
        decode(b"\xc1" * (MAX_FRAME_BYTES + 1))


@given(st.binary(max_size=300))
def test_garbage_is_a_protocol_error_and_nothing_else(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


@given(st.one_of([messages(cls) for cls in TYPES]), st.data())
def test_a_frame_cut_anywhere_is_a_protocol_error(message: Message, data: st.DataObject) -> None:
    frame = encode(message)
    with pytest.raises(ProtocolError):
        decode(frame[: data.draw(st.integers(0, len(frame) - 1))])


@given(messages(LoadReport))
def test_a_report_of_a_replica_that_knows_of_no_reconfiguration_is_whole(message: Message) -> None:
    raw = {**msgpack.unpackb(encode(message))}
    del raw["is_reconfiguring"], raw["members"]
    assert decode(msgpack.packb(raw)) == replace(message, is_reconfiguring=False, members=[])


@given(st.one_of([messages(cls) for cls in TYPES]), st.data())
def test_a_message_that_lacks_any_field_is_a_protocol_error(message: Message, data: st.DataObject) -> None:
    raw = {**msgpack.unpackb(encode(message))}
    del raw[data.draw(st.sampled_from(sorted({*asdict(message)} - {"is_reconfiguring", "members"})))]
    with pytest.raises(ProtocolError, match="lacks the field"):
        decode(msgpack.packb(raw))
