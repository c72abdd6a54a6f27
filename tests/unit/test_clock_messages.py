"""Frames of the clock: what is encoded comes back, and nothing else is let in."""

from __future__ import annotations

from dataclasses import replace

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import messages as m
from coordinator.errors import ProtocolError
from coordinator.handshake import accept, checked_secret, is_genuine, is_signed, new_challenge, sign
from tests.clock_driver import make_hello

SECRET = b"0123456789abcdef"
EXAMPLES: list[m.Message] = [
    new_challenge(),
    sign(make_hello(1), SECRET, new_challenge()),
    m.Accepted(proof=b"p"),
    m.Refused(reason="tp is 8"),
    m.Reconfigure(
        epoch=3,
        members=(0, 2),
        evicted=((1,), (3, 4)),
        kinds=("lost", "silent", "silent"),
        reason="EOF",
        detect_ms=1,
        agree_ms=2,
    ),
    m.Ready(epoch=0, blob=b"\x00\xff"),
    m.Go(epoch=0, blobs=(b"a", b"")),
    m.Arrive(epoch=0, step=m.MAX_INT, decode_tokens=1, prefill_tokens=2, wants=("drain",)),
    m.Release(epoch=0, step=3, decode_tokens=(1, 0), prefill_tokens=(0, 7), commands=()),
    m.Done(epoch=0, step=3),
    m.Fault(epoch=0, step=3, what="reset"),
    m.Beat(epoch=0, step=3, collectives=(70, 71)),
    m.Evicted(epoch=3, reason="member 1 was silent"),
    m.Failed(epoch=0, step=3, reason="member 1 was lost"),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_a_message_comes_back_as_it_was(message: m.Message) -> None:
    assert list(m.FrameBuffer(m.MAX_FRAME_BYTES).feed(m.encode(message))) == [message]


def test_every_message_has_an_example_here() -> None:
    assert {type(message) for message in EXAMPLES} == set(m._TYPES)


def test_frames_that_come_in_pieces_are_put_together() -> None:
    stream = b"".join(m.encode(message) for message in EXAMPLES)
    frames = m.FrameBuffer(m.MAX_FRAME_BYTES)
    received = [message for at in range(len(stream)) for message in frames.feed(stream[at : at + 1])]
    assert received == EXAMPLES


@pytest.mark.parametrize(
    "values",
    [
        [],
        {"type": "done"},
        "done",
        [99, 0, 0],
        [-1, 0, 0],
        [True, 0, 0],
        [9],
        [9, 0],
        [9, 0, 0, 0],
        [9, 0, -1],
        [9, 0, 1.0],
        [9, 0, True],
        [9, 0, None],
        [9, 0, 2**63],
        [8, 0, 0, [1, "2"], [0, 0], []],
        [8, 0, 0, 1, [0, 0], []],
        [8, 0, 0, [1], [0], [b"stop"]],
        [4, 3, [0, 2], [1], "", 0, 0],
        [4, 3, [0, 2], [["1"]], "", 0, 0],
        [4, 3, [0, 2], [[1], [-1]], "", 0, 0],
        [1, "g", "r", "i", 0, {"tp": 4}, "", 0, b"", b""],
        [1, "g", "r", "i", 0, [["tp", "4"]], "", 0, b"", b""],
        [1, "g", "r", "i", 0, {}, "", -1, b"", b""],
        [1, b"g", "r", "i", 0, {}, "", 0, b"", b""],
    ],
)
def test_what_is_not_exactly_a_message_is_refused(values: object) -> None:
    with pytest.raises(ProtocolError):
        m.decode(msgpack.packb(values))


@given(st.binary(max_size=200))
def test_random_bytes_raise_nothing_but_a_protocol_error(received: bytes) -> None:
    try:
        m.decode(received)
        list(m.FrameBuffer(100).feed(received))
    except ProtocolError:
        pass


@given(st.sampled_from(EXAMPLES), st.data())
def test_a_damaged_frame_raises_nothing_but_a_protocol_error(message: m.Message, data: st.DataObject) -> None:
    frame = bytearray(m.encode(message)[m.HEADER.size :])
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    try:
        m.decode(bytes(frame))
    except ProtocolError:
        pass


def test_a_frame_over_the_limit_is_refused_by_its_header_alone() -> None:
    with pytest.raises(ProtocolError, match="frame has 101 bytes, limit is 100"):
        list(m.FrameBuffer(100).feed(m.HEADER.pack(101)))
    with pytest.raises(ProtocolError, match="limit is 4194304"):
        m.encode(m.Ready(epoch=0, blob=bytes(m.MAX_FRAME_BYTES)))


def test_both_ends_prove_that_they_know_the_secret() -> None:
    challenge = new_challenge()
    hello = sign(make_hello(1), SECRET, challenge)
    assert is_signed(hello, SECRET, challenge)
    assert is_genuine(accept(hello, SECRET), hello, SECRET)


def test_a_proof_is_worth_nothing_for_another_secret_connection_or_hello() -> None:
    challenge, other = new_challenge(), b"another secret of 24 b"
    hello = sign(make_hello(1), SECRET, challenge)
    assert not is_signed(hello, other, challenge)
    assert not is_signed(hello, SECRET, new_challenge())
    assert not is_signed(replace(hello, dp_rank=0), SECRET, challenge)
    assert not is_signed(replace(hello, proof=b""), SECRET, challenge)
    assert not is_genuine(accept(hello, other), hello, SECRET)
    assert not is_genuine(m.Accepted(proof=hello.proof), hello, SECRET)
    again = sign(make_hello(1), SECRET, challenge)
    assert not is_genuine(accept(hello, SECRET), again, SECRET)


def test_the_secret_itself_is_in_no_frame() -> None:
    hello = sign(make_hello(1), SECRET, new_challenge())
    assert SECRET not in m.encode(hello) + m.encode(accept(hello, SECRET))


def test_a_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="has 3 bytes, needs at least 16"):
        checked_secret(b"abc")
