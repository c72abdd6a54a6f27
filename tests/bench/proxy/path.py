"""What Python costs on the proxy's data path: no sockets, no kernel, so that a change shows on a busy machine too.

    python -m tests.bench.proxy.path

CPU microseconds of one short request, from its bytes to those of its answer, and of one event where many streams have
one at the same time: the best of several runs. Prints JSON as the last line.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

from proxy.turns import FEWEST
from proxy.upstream import Upstream
from tests.http_answers import EVENT_CHUNKS
from tests.proxy_bed import URL, Bed, DumbTransport

RUNS = 15
STREAMS = 64
STEPS = 300
BODY = b'{"model":"tiny","messages":[{"role":"user","content":"' + b"lorem ipsum " * 16 + b'"}],"max_tokens":1}'
REQUEST = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nContent-Type: application/json\r\nAccept: */*\r\n"
    b"Content-Length: %d\r\n\r\n" % len(BODY)
) + BODY
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 300\r\n\r\n" + b"x" * 300
TEXT = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" a"}}]}\n\n'
EVENT = b"%x\r\n%b\r\n" % (len(TEXT), TEXT)


class Nowhere(DumbTransport):
    """A transport that keeps nothing."""

    def write(self, data: bytes) -> None:
        pass


def connections(bed: Bed) -> tuple[Callable[[bytes], None], Callable[[bytes], None]]:
    """What takes a client's bytes, and what takes its replica's."""
    client, upstream = bed.door(), Upstream(bed.dispatcher.pool, URL)
    client.connection_made(Nowhere())  # type: ignore[arg-type]
    upstream.connection_made(Nowhere())  # type: ignore[arg-type]
    bed.dispatcher.pool.put_back(upstream)
    return client.data_received, upstream.data_received


def stream(bed: Bed) -> Callable[[bytes], None]:
    """What takes a replica's bytes in the middle of a stream."""
    from_client, from_replica = connections(bed)
    from_client(REQUEST)
    from_replica(EVENT_CHUNKS)
    return from_replica


async def best_us(work: Callable[[], Awaitable[None]], count: int) -> float:
    """CPU microseconds of one of `count` things that `work` does."""
    took = []
    for _ in range(RUNS):
        started_s = time.process_time()
        await work()
        took.append(time.process_time() - started_s)
    return min(took) / count * 1e6


async def measure() -> dict[str, float]:
    """The figures by name."""
    from_client, from_replica = connections(Bed())
    bed = Bed()
    streams = [stream(bed) for _ in range(STREAMS)]

    async def requests() -> None:
        for _ in range(3000):
            from_client(REQUEST)
            from_replica(ANSWER)

    async def steps() -> None:
        for _ in range(STEPS):
            for each_from_replica in streams:
                each_from_replica(EVENT)
            for _ in range(STREAMS // FEWEST):  # the clients' turns
                await asyncio.sleep(0)

    return {
        "request_us": round(await best_us(requests, 3000), 2),
        "event_us": round(await best_us(steps, STREAMS * STEPS), 3),
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(measure())))
