"""The data path fed with broken bytes from both sides: nothing is raised, nothing stays counted, nothing is smuggled.

What goes to a replica is read again by h11, which knows nothing of this proxy: it must find exactly the one request
that was meant. FUZZ_S sets how many seconds are spent (`make fuzz-proxy`: ten minutes).
"""

from __future__ import annotations

import asyncio
import os
import random
import time

import h11

from tests.http_answers import ANSWERS, GARBLED
from tests.http_requests import BAD_BODIES, MALFORMED, POST, REQUESTS
from tests.proxy_bed import Bed

FUZZ_S = float(os.environ.get("FUZZ_S", "10"))
MORSELS = [
    b"\r\n",
    b"\n",
    b"\r",
    b"\0",
    b" ",
    b":",
    b"0\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Expect: 100-continue\r\n",
    b"HTTP/1.1",
    b"ffffffff",
    b'"model": "tiny"',
    POST,
]


async def converse(bed: Bed, request: bytes, answer: bytes, draws: random.Random) -> int:
    """One client's connection from its first byte to its last; how many requests of it went to the replica."""
    client, transport = bed.client()
    spare, wire = bed.spare()
    passed = 0
    for read in split(request, draws):
        if transport.closed or not client._transport:
            break
        client.data_received(read)
        while bed.is_answering(spare):
            sent = answer if draws.random() < 0.9 else answer[: draws.randrange(len(answer) + 1)]
            for part in split(sent, draws):
                if spare._transport is not None and not wire.closed:
                    spare.data_received(part)
            check_one_request(wire.written)
            passed += 1
            if bed.is_answering(spare) or draws.random() < 0.3:
                spare.connection_lost(None if draws.random() < 0.5 else ConnectionResetError())
            await asyncio.sleep(0)
            spare, wire = bed.spare()
    client.connection_lost(None)
    bed.dispatcher.pool.close_idle(at_all=True)
    bed.check_at_rest()
    return passed


def check_one_request(written: bytes) -> None:
    """What a replica was sent is one request and nothing behind it, perhaps not all of it."""
    reader = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    reader.receive_data(written)
    found = []
    while True:
        event = reader.next_event()
        if event in (h11.NEED_DATA, h11.PAUSED):
            break
        found.append(type(event))
    assert found.count(h11.Request) == 1 and reader.trailing_data[0] == b"", written


def split(data: bytes, draws: random.Random) -> list[bytes]:
    places = sorted(draws.randrange(len(data) + 1) for _ in range(draws.choice((0, 0, 1, 3))))
    return [part for part in (data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True)) if part]


def mutate(data: bytes, draws: random.Random) -> bytes:
    """The bytes with a few things changed."""
    for _ in range(draws.choice((0, 1, 1, 2, 5))):
        at, end = sorted((draws.randrange(len(data) + 1), draws.randrange(len(data) + 1)))
        end = min(end, at + 8)
        change = draws.randrange(5)
        if change == 0:
            data = data[:at] + data[end:]
        elif change == 1:
            data = data[:at] + draws.choice(MORSELS) + data[at:]
        elif change == 2:
            data = data[:at] + draws.randbytes(1) + data[at + 1 :]
        elif change == 3:
            data = data[:at] + data[at:end] * 2 + data[end:]
        else:
            data = data[:at] + draws.choice(MORSELS) + data[end:]
    return data


async def test_broken_bytes_raise_nothing_leave_nothing_and_smuggle_nothing() -> None:
    seed = time.time_ns()
    draws, bed = random.Random(seed), Bed()
    whole = [*REQUESTS.values(), REQUESTS["a length"] * 3]
    broken = [*BAD_BODIES.values(), *(head + b"\r\n\r\n" for head in MALFORMED.values())]
    long_request = POST + b"Content-Length: 1300000\r\n\r\n" + b"x" * 1_300_000
    answers = [answer.raw for answer in ANSWERS.values()] + [*GARBLED.values()]
    answers = [answer for answer in answers if len(answer) < 10_000]
    cases, passed, end_s = 0, 0, time.monotonic() + FUZZ_S
    while time.monotonic() < end_s:
        request = mutate(long_request if cases % 500 == 0 else draws.choice(whole if cases % 2 else broken), draws)
        answer = mutate(draws.choice(answers), draws)
        try:
            passed += await converse(bed, request, answer, draws)
        except BaseException:
            print(f"seed={seed} case={cases} request={request[:2000]!r} answer={answer[:2000]!r}")
            raise
        cases += 1
    print(f"cases={cases} passed={passed} seconds={FUZZ_S:g}")
    assert cases > 20 * FUZZ_S and passed > cases / 10
