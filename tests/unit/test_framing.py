"""Bodies: where they end, whatever the reads they come in, and what is no body."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import Malformed
from proxy.framing import LAST_CHUNK, ChunkedBody, EndlessBody, SizedBody, chunk, first_payload

REST = b"GET / HTTP/1.1\r\n"


@st.composite
def chunked(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """(a body in the chunked coding, its payload), with all that the coding allows."""
    raw, payload = b"", b""
    for part in draw(st.lists(st.binary(min_size=1, max_size=40), max_size=6)):
        size = draw(st.sampled_from([b"%x", b"%X", b"0%x", b"000%x"])) % len(part)
        extension = draw(st.sampled_from([b"", b"", b";a", b' ; a="b; c"', b";\xff"]))
        raw += size + extension + b"\r\n" + part + b"\r\n"
        payload += part
    trailers = draw(st.sampled_from([b"", b"", b"X-Sum: 1\r\n", b"A: b\r\nC:\r\n"]))
    return raw + draw(st.sampled_from([b"0", b"00", b"0;x"])) + b"\r\n" + trailers + b"\r\n", payload


def pieces(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """The bytes in a random number of reads."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=8)))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


@settings(max_examples=400)
@given(st.data())
def test_any_split_of_a_chunked_body_gives_the_same_payload_and_the_same_end(data: st.DataObject) -> None:
    raw, payload = data.draw(chunked())
    body, parts, passed = ChunkedBody(), [], b""
    reads = data.draw(st.composite(lambda draw: pieces(draw, raw + REST))())
    for number, read in enumerate(reads):
        used = body.feed(read, parts)
        passed += read[:used]
        assert body.boundary <= used
        if body.is_done:
            assert read[used:] + b"".join(reads[number + 1 :]) == REST
            break
    assert body.is_done and passed == raw and b"".join(parts) == payload


@settings(max_examples=300)
@given(st.data())
def test_up_to_a_boundary_there_are_whole_chunks(data: st.DataObject) -> None:
    raw, _ = data.draw(chunked())
    body, held, whole = ChunkedBody(), b"", b""
    for read in data.draw(st.composite(lambda draw: pieces(draw, raw))()):
        body.feed(read)
        if body.boundary:
            whole, held = whole + held + read[: body.boundary], read[body.boundary :]
        else:
            held += read
        again = ChunkedBody()
        assert again.feed(whole) == len(whole) and again.boundary == len(whole), "they can be read alone"
    assert whole == raw and not held


@pytest.mark.parametrize(
    "raw",
    [
        b"x\r\n",
        b"\r\n",
        b" 5\r\nhello\r\n",
        b"+5\r\nhello\r\n",
        b"-1\r\n",
        b"0x5\r\nhello\r\n",
        b"5_0\r\n",
        b"5 5\r\nhello\r\n",
        b"5\nhello\r\n",
        b"5\r\nhello\n",
        b"5\r\nhello6\r\n",
        b"5\r\nhelloxx",
        b"5\r\nhello\r\r\n",
        b"5;\x00\r\nhello\r\n",
        b"5;a\rb\r\nhello\r\n",
        b"fffffffffffffffff\r\n",
        b"5" + b" " * 5000 + b"\r\n",
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\nContent-Length: 1\r\n\r\n",
        b"0\r\nA: b\r\ntransfer-Encoding: chunked\r\n\r\n",
        b"0\r\n folded: 1\r\n\r\n",
        b"0\r\nX-A : 1\r\n\r\n",
        b"0\r\nX: \x00\r\n\r\n",
        b"0\r\nA: b\n\r\n",
        b"0\r\n" + b"A: " + b"b" * 5000 + b"\r\n\r\n",
        b"0\r\n" + b"A: bbbbbbbbbbbbbbbbbbb\r\n" * 1000 + b"\r\n",
        b"\xd9\xa1\r\nx\r\n",
    ],
)
@pytest.mark.parametrize("is_split", [False, True])
def test_what_is_no_chunk_is_malformed_however_it_is_split(raw: bytes, is_split: bool) -> None:
    body = ChunkedBody()
    with pytest.raises(Malformed):
        for read in [raw[at : at + 1] for at in range(len(raw))] if is_split else [raw]:
            body.feed(read)


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_a_sized_body_ends_with_its_length(reads: list[bytes]) -> None:
    length = len(b"".join(reads))
    body, parts = SizedBody(length), []
    for read in reads:
        assert body.feed(read, parts) == len(read)
    assert body.is_done and b"".join(parts) == b"".join(reads)
    assert SizedBody(2).feed(b"abc") == 2


def test_an_endless_body_takes_all() -> None:
    body = EndlessBody()
    assert body.feed(b"abc") == 3 and not body.is_done


@pytest.mark.parametrize(
    ("raw", "payload"), [(b"5", b""), (b"5\r\n", b""), (b"5\r\nhel", b"hel"), (b"5\r\nhello\r", b"hello")]
)
def test_what_came_of_a_chunk_is_known(raw: bytes, payload: bytes) -> None:
    assert first_payload(raw) == payload


def test_a_chunk_that_is_made_can_be_read() -> None:
    body, parts = ChunkedBody(), []
    body.feed(chunk(b"hello") + chunk(b"x" * 300) + LAST_CHUNK, parts)
    assert parts == [b"hello", b"x" * 300] and body.is_done
