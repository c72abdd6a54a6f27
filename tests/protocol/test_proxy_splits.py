"""However an answer's bytes are split into reads, and wherever they end, the client gets the same, or hears of it."""

from __future__ import annotations

import json
import random
from typing import NamedTuple

import h11
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http_answers import ANSWERS, GARBLED, Answer
from tests.http_requests import POST
from tests.proxy_bed import Bed, DumbTransport

REQUEST = POST + b"Content-Length: 2\r\n\r\n{}"
SHORT = {name: answer for name, answer in ANSWERS.items() if len(answer.raw) < 2000}
ODD_BYTES = 1_500  # an answer longer than this is split at a few places, not at each


class Got(NamedTuple):
    """An answer as h11 reads it, which knows nothing of this proxy."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    is_whole: bool


def read(transport: DumbTransport) -> Got:
    """What a client makes of what it was sent, with nothing behind it."""
    reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    reader.send(h11.Request(method="POST", target="/v1/completions", headers=[("Host", "p"), ("Content-Length", "0")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(transport.written)
    if transport.closed:
        reader.receive_data(b"")
    status, headers, body = 0, (), b""
    while True:
        try:
            event = reader.next_event()
        except h11.RemoteProtocolError:
            return Got(status, headers, body, False)
        if isinstance(event, h11.Response):
            status, headers = event.status_code, tuple(event.headers)
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert reader.trailing_data[0] == b"", "nothing comes behind an answer"
            return Got(status, headers, body, not transport.was_reset)
        else:
            return Got(status, headers, body, False)


def split(raw: bytes, draws: random.Random, times: int) -> list[bytes]:
    places = sorted(draws.randrange(len(raw) + 1) for _ in range(times))
    return [raw[start:end] for start, end in zip([0, *places], [*places, len(raw)], strict=True) if end > start]


def without_ids(got: Got) -> Got:
    """Without the request's id, which is another each time."""
    return got._replace(headers=tuple(line for line in got.headers if line[0] != b"x-request-id"))


@pytest.mark.parametrize("name", ANSWERS)
async def test_any_split_of_an_answer_into_reads_gives_the_same_answer(name: str) -> None:
    bed, answer, draws = Bed(), ANSWERS[name], random.Random(name)
    whole = without_ids(read(bed.answer(REQUEST, [answer.raw], is_closed=answer.ends_with_connection)))
    assert (whole.status, whole.body, whole.is_whole) == (answer.status, answer.body, True)
    ways = [split(answer.raw, draws, times) for times in (1, 1, 2, 3, 5, 8, 13)]
    if len(answer.raw) <= ODD_BYTES:
        ways.append([answer.raw[at : at + 1] for at in range(len(answer.raw))])
        ways += [[answer.raw[:at], answer.raw[at:]] for at in range(1, len(answer.raw))]
    for reads in ways:
        got = bed.answer(REQUEST, reads, is_closed=answer.ends_with_connection)
        assert without_ids(read(got)) == whole, reads


@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("how", ["eof", "reset"])
async def test_an_answer_that_ends_too_early_never_looks_whole_and_loses_no_byte_that_came(name: str, how: str) -> None:
    bed, answer = Bed(), ANSWERS[name]
    for at in range(len(answer.raw)):
        if answer.ends_with_connection and how == "eof" and b"\r\n\r\n" in answer.raw[:at]:
            continue  # nobody could tell this end from the right one
        got = bed.answer(
            REQUEST, [answer.raw[:at]], is_closed=True, then=ConnectionResetError() if how == "reset" else None
        )
        check_cut(read(got), answer, at)


def check_cut(got: Got, answer: Answer, at: int) -> None:
    """What a client may see of an answer whose connection ended after `at` bytes."""
    if got.status == 502:
        error = json.loads(got.body)["error"]
        assert got.is_whole and error["code"] == "upstream_failed"
    elif answer.is_event_stream and b"content-length" not in dict(got.headers):
        assert got.status == answer.status and got.is_whole, "the connection stays usable"
        text, _, last = got.body.rstrip().rpartition(b"data: ")
        assert json.loads(last)["error"]["code"] == "replica_lost", at
        assert answer.body.startswith(text.rstrip(b"\r\n")), at
        assert b"[DONE]" not in text or answer.raw[:at].count(b"[DONE]") == 1
    else:
        assert got.status in (0, answer.status) and not got.is_whole, at
        assert answer.body.startswith(got.body), at


@pytest.mark.parametrize("name", GARBLED)
async def test_a_garbled_answer_is_told_however_it_is_split_and_never_looks_whole(name: str) -> None:
    bed, raw, draws = Bed(), GARBLED[name], random.Random(name)
    ways = [split(raw, draws, times) for times in (0, 1, 2, 5)]
    if len(raw) <= ODD_BYTES:
        ways.append([raw[at : at + 1] for at in range(len(raw))])
    for reads in ways:
        got = read(bed.answer(REQUEST, reads, is_closed=True))
        if got.status == 200:  # what was wrong came after something that was not
            assert not got.is_whole or ("event stream" in name and b"malformed" in got.body)
        else:
            assert got.status == 502 and got.is_whole, (reads, got)
            assert json.loads(got.body)["error"]["code"] == "upstream_failed"


@settings(max_examples=200)
@given(
    parts=st.lists(st.binary(min_size=1, max_size=60), max_size=8),
    seed=st.integers(0, 2**32),
    is_events=st.booleans(),
    end=st.sampled_from(["whole", "cut"]),
)
async def test_any_chunks_in_any_reads_arrive_as_they_are_up_to_where_they_end(
    parts: list[bytes], seed: int, is_events: bool, end: str
) -> None:
    draws = random.Random(seed)
    kind = b"text/event-stream" if is_events else b"application/json"
    head = b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    raw = head + b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
    answer = Answer(raw, b"".join(parts))
    at = len(raw) if end == "whole" else draws.randrange(len(raw))
    got = read(Bed().answer(REQUEST, split(raw[:at], draws, 5), is_closed=True))
    if end == "whole":
        assert (got.status, got.body, got.is_whole) == (200, answer.body, True)
    elif got.status == 502:
        assert got.is_whole
    elif is_events:
        text, _, error = got.body.rpartition(b"data: ")
        assert b'"replica_lost"' in error and got.is_whole
        assert answer.body.startswith((text, text.removesuffix(b"\n\n")))
    else:
        assert not got.is_whole and answer.body.startswith(got.body)
