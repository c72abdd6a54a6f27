"""Heads: what passes unchanged, what ends at the proxy, and what two readers could take for two different requests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.errors import BadRequest, GarbledAnswer
from proxy.http1 import HeadParser
from tests.http_requests import MALFORMED, PLAIN

PARSER = HeadParser.for_requests("X-Session-Id")
ANSWERS = HeadParser.for_answers()


def test_end_to_end_headers_pass_as_they_came_and_others_do_not() -> None:
    head = PARSER.request(
        b"POST /v1/x?q=%20 HTTP/1.1\r\nHost: p\r\nX-A:  1 \r\nx-a:2\r\nConnection: x-b, Keep-Alive\r\nX-B: no"
        b"\r\nTE: trailers\r\nUpgrade: h2c\r\nContent-Length: 5\r\nAuthorization: Bearer k"
        b"\r\nX-Request-Id: mine\r\nExpect: x"
    )
    assert head.target == b"/v1/x?q=%20" and head.is_kept_alive
    assert head.passing == [b"X-A:  1 ", b"x-a:2", b"Authorization: Bearer k"]
    assert head.content_length == 5
    assert head.noted == {
        b"host": b"p",
        b"authorization": b"Bearer k",
        b"x-request-id": b"mine",
        b"expect": b"x",
    }


@pytest.mark.parametrize(
    ("target", "path"),
    [(b"http://h/v1/x?y", b"/v1/x?y"), (b"HTTPS://h:1", b"/"), (b"/a//b", b"/a//b"), (b"*", b"*")],
)
def test_a_whole_url_is_taken_for_its_path(target: bytes, path: bytes) -> None:
    assert PARSER.request(b"POST " + target + b" HTTP/1.1\r\nHost: h").target == path


@pytest.mark.parametrize(
    ("version", "connection", "is_kept"),
    [
        (b"1.1", b"", True),
        (b"1.1", b"close", False),
        (b"1.1", b"x, CLOSE", False),
        (b"1.0", b"", False),
        (b"1.0", b"Keep-Alive", True),
    ],
)
def test_a_connection_is_kept_as_version_and_options_say(version: bytes, connection: bytes, is_kept: bool) -> None:
    lines = b"\r\nConnection: " + connection if connection else b""
    assert PARSER.request(b"POST / HTTP/" + version + b"\r\nHost: h" + lines).is_kept_alive is is_kept


@pytest.mark.parametrize("head", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_head_that_could_be_read_in_two_ways_is_refused(head: bytes) -> None:
    with pytest.raises(BadRequest):
        PARSER.request(head)


@given(st.binary(max_size=300) | st.binary(max_size=100).map(lambda noise: PLAIN + b"\r\n" + noise))
def test_noise_is_a_bad_request_or_passes_without_a_line_end_of_its_own(noise: bytes) -> None:
    try:
        head = PARSER.request(noise)
    except BadRequest:
        return
    assert all(b"\r" not in line and b"\n" not in line and b"\0" not in line for line in head.passing)


def test_spellings_of_names_that_are_remembered_are_bounded() -> None:
    parser = HeadParser.for_requests()
    for number in range(3000):
        parser.request(PLAIN + b"\r\nX-%d: 1" % number)
    assert len(parser._spellings) <= 1024


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"HTTP/2 200 OK",
        b"HTTP/1.1 20 OK",
        b"HTTP/1.1 2000 OK",
        b"HTTP/1.1 099 No",
        b"HTTP/1.1  200 OK",
        b"HTTP/1.1 200OK",
        b"ICY 200 OK",
        b"http/1.1 200 OK",
        b"HTTP/1.1 200 O\nK",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip",
        b"HTTP/1.1 200 OK\r\nX-A : 1",
        b"HTTP/1.1 200 OK\r\n folded",
        b"HTTP/1.1 200 OK\r\nX-A: \x00",
        b"<html>",
    ],
)
def test_an_answer_s_head_that_is_none_is_garbled(head: bytes) -> None:
    with pytest.raises(GarbledAnswer):
        ANSWERS.answer(head)


@pytest.mark.parametrize("line", [b"200 OK", b"200", b"404 Nicht gefunden \xc3\xa4", b"599 x y z"])
def test_a_status_line_passes_as_it_came(line: bytes) -> None:
    head = ANSWERS.answer(b"HTTP/1.1 " + line + b"\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nKeep-Alive: timeout=5")
    assert head.status == int(line[:3]) and head.line == line
    assert head.passing == [b"Set-Cookie: a", b"Set-Cookie: b"]
