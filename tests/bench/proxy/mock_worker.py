"""A mock OpenAI-compatible worker that is much cheaper than any proxy in front of it.

The worker speaks just enough hand-written HTTP/1.1 to satisfy LLM routers:

* `GET  /health` (and the usual aliases), `/v1/models`, `/get_model_info`,
  `/get_server_info`, `/get_load`, `/v1/loads`, `/metrics`
* `POST /v1/chat/completions`, `/v1/completions`, `/generate` as one JSON
  document or, when the body says `"stream": true`, as an SSE stream
* `GET/POST /mock/config` and `GET /mock/stats` to drive it from a benchmark

Streams are produced the way an inference engine produces them: a *step* emits one
chunk for every running stream, then the engine waits `itl_ms` (or, with 0, only
until the event loop has polled its sockets, so every chunk is its own packet).

Each content chunk carries the CLOCK_MONOTONIC time of the step that made it
(`"content":"@<16 hex digits>"`), so a client on the same machine can compute the
one-way latency that a proxy adds to every single chunk.  A stream's first chunk carries
(after `#`) the nanoseconds from the request's arrival here to its first step: what is left
of the client's time to first token is what the way there and back took.  With `stamps` two
more numbers follow: when the kernel received the request and when the chunk was written, in
nanoseconds of CLOCK_REALTIME, between which nothing of the time is the router's.

Knobs, all of them settable per port while running (`POST /mock/config`):

=================  ====================================================================
`chunks`         content chunks per stream (`max_tokens` in the request wins)
`ttft_ms`        delay before the first byte of any answer
`itl_ms`         delay between two engine steps
`fault`          one of `FAULTS` below, or `""`
`fault_after`    content chunks before a stream fault strikes
`fault_every`    strike every n-th inference request (1 = all)
`health`         status code of the health endpoints
`stamps`         1: first chunks have the kernel's time stamps, at a system call for each read
=================  ====================================================================
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import socket
import time

from arrivals import TimedProtocol
from mock_answers import EDGE, SSE_HEAD, Shape, header, http_answer, json_answer

#: die: close the socket mid-stream; reset: the same with RST; hang: never answer;
#: hang_stream: stop after `fault_after` chunks; http500 / http503 / http429: an error
#: answer; close: accept the request, close the connection without an answer.
FAULTS = ("", "die", "reset", "hang", "hang_stream", "http500", "http503", "http429", "close")


@dataclasses.dataclass
class Config:
    """What one worker (one port) does; see the module docstring."""

    model: str = "mock"
    chunks: int = 128
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    fault: str = ""
    fault_after: int = 8
    fault_every: int = 1
    health: int = 200
    stamps: int = 0

    def update(self, values: dict) -> None:
        """Set the named fields, converting each value to the field's type."""
        for field in dataclasses.fields(self):
            if field.name in values:
                kind = type(getattr(self, field.name))
                setattr(self, field.name, kind(values[field.name]))
        if self.fault not in FAULTS:
            raise ValueError(f"unknown fault {self.fault!r}")


@dataclasses.dataclass
class Stats:
    """Counters of one worker, served at `/mock/stats`."""

    requests: int = 0  # inference requests whose body arrived whole
    streams: int = 0
    chunks: int = 0
    completed: int = 0  # answers written to the end
    faults: int = 0
    aborted: int = 0  # the peer closed while an answer was pending or running
    running: int = 0
    connections: int = 0  # connections accepted so far
    body_bytes: int = 0
    last_abort_at: float = 0.0  # CLOCK_MONOTONIC seconds
    last_head: str = ""  # the head of the newest inference request


class Engine:
    """Steps all running streams of one worker in lockstep, as a decode loop does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: Config, stats: Stats):
        self.loop, self.config, self.stats = loop, config, stats
        self.running: list[Connection] = []
        self.scheduled = False
        self.next_step = 0.0

    def add(self, connection: Connection) -> None:
        """Let a stream join the running batch at the next step."""
        self.running.append(connection)
        self.stats.running = len(self.running)
        self.wake()

    def wake(self) -> None:
        """Schedule a step, if none is due."""
        if not self.scheduled and self.running:
            self.scheduled = True
            self.next_step = self.loop.time()
            self.loop.call_soon(self.step)

    def step(self) -> None:
        """Emit one chunk for every stream whose socket takes it."""
        now_ns = time.monotonic_ns()
        frames: dict[int, bytes] = {}
        still, progressed = [], False
        for connection in self.running:
            if connection.transport is None:
                continue  # the peer has gone
            if connection.paused:  # backpressure: the peer does not read
                still.append(connection)
                continue
            progressed = True
            shape = connection.shape
            if connection.sent == 0:
                frame = shape.first_frame(now_ns - connection.arrived_ns, connection.stamps())
            else:
                frame = frames.get(id(shape)) or frames.setdefault(id(shape), shape.frame(now_ns))
            if connection.emit(frame):
                still.append(connection)
        self.running = still
        self.stats.running = len(still)
        self.scheduled = bool(still) and progressed
        if self.scheduled:
            if self.config.itl_ms > 0:
                # Keep the cadence: a late step does not shift the ones after it.
                period = self.config.itl_ms / 1000
                self.next_step = max(self.next_step + period, self.loop.time())
                self.loop.call_at(self.next_step, self.step)
            else:
                self.loop.call_soon(self.step)


class Worker:
    """One listening port: its configuration, its counters, its engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop, config: Config):
        self.loop, self.config, self.stats = loop, config, Stats()
        self.engine = Engine(loop, config, self.stats)
        self.last_head = b""
        model = config.model
        self.shapes = {
            b"/v1/chat/completions": Shape(model, "chat"),
            b"/v1/completions": Shape(model, "text"),
            b"/generate": Shape(model, "generate"),
        }
        # No tokenizer path: a router must not try to fetch one from a hub.
        info = {
            "model_path": "",
            "served_model_name": model,
            "tokenizer_path": "",
            "is_generation": True,
            "dp_size": 1,
            "tp_size": 1,
            "version": "0.0-mock",
            "max_running_requests": 4096,
            "max_total_tokens": 1 << 20,
            "max_req_input_len": 1 << 20,
        }
        models = {
            "object": "list",
            "data": [
                {
                    "id": model,
                    "object": "model",
                    "created": 1700000000,
                    "owned_by": "sglang",
                    "root": model,
                    "max_model_len": 1 << 20,
                }
            ],
        }
        load = {"load": 0, "num_reqs": 0, "num_waiting_reqs": 0, "dp_rank": 0, "num_tokens": 0}
        self.pages = {
            b"/v1/models": json_answer(models),
            b"/get_model_info": json_answer(info),
            b"/model_info": json_answer(info),
            b"/get_server_info": json_answer(info),
            b"/server_info": json_answer(info),
            b"/version": json_answer({"version": "0.0-mock"}),
            b"/get_load": json_answer([load]),
            b"/v1/loads": json_answer({"loads": [load]}),
            b"/flush_cache": json_answer({}),
            b"/metrics": http_answer(200, b"# mock\n", "text/plain; version=0.0.4"),
        }
        self.health = {b"/health", b"/health_generate", b"/liveness", b"/readiness", b"/ping", b"/"}

    def faulty(self) -> str:
        """The fault that strikes the current request, or `""`."""
        config = self.config
        if config.fault and self.stats.requests % max(1, config.fault_every) == 0:
            self.stats.faults += 1
            return config.fault
        return ""


class Connection(TimedProtocol):
    """One HTTP/1.1 keep-alive connection."""

    def __init__(self, worker: Worker):
        self.worker = worker
        self.paused = False
        self.busy = False  # an answer is pending or running
        self.buffer = bytearray()
        self.head: tuple | None = None  # (path, body start, body end or -1, close?)
        self.skip_left = 0  # bytes of a big body still to come
        self.skip_front = self.skip_back = b""
        self.shape: Shape | None = None
        self.arrived_ns = 0  # when the current request was whole
        self.left = 0
        self.sent = 0
        self.fault = ""

    # -- transport events

    def connection_made(self, transport):
        super().connection_made(transport)
        self.worker.stats.connections += 1

    def connection_lost(self, exc):
        super().connection_lost(exc)
        if self.busy:
            self.busy = False
            self.worker.stats.aborted += 1
            self.worker.stats.last_abort_at = time.monotonic()

    def pause_writing(self):
        self.paused = True

    def resume_writing(self):
        self.paused = False
        self.worker.engine.wake()

    def eof_received(self):
        return False

    def get_buffer(self, sizehint):
        self.wants_stamps = self.worker.config.stamps
        return super().get_buffer(sizehint)

    def data_received(self, data):
        if self.skip_left:
            take = min(len(data), self.skip_left)
            self.skip_left -= take
            self.skip_back = (self.skip_back + data[max(0, take - EDGE) : take])[-EDGE:]
            if self.skip_left:
                return
            path, start, stop, close = self.head
            self.head = None
            self.buffer += data[take:]
            self.serve(path, self.skip_front + self.skip_back, stop - start)
            if close and not self.busy and self.transport is not None:
                self.transport.close()
        else:
            self.buffer += data
        if self.buffer and not self.busy:
            self.pump()

    # -- requests

    def pump(self) -> None:
        """Serve the whole requests that the buffer holds, one at a time."""
        buffer = self.buffer
        while buffer and not self.busy and self.transport is not None:
            if self.head is None:
                end = buffer.find(b"\r\n\r\n")
                if end < 0:
                    return
                self.head = self.parse_head(end)
            path, start, stop, close = self.head
            if stop < 0:  # chunked request body
                body, stop = self.read_chunked(start)
                if body is None:
                    return
            elif len(buffer) < stop:
                if stop - start > 8 * EDGE and len(buffer) >= start + 2 * EDGE:
                    # A big body: keep its edges only, so that its copies cost nothing.
                    self.skip_front = bytes(buffer[start : start + EDGE])
                    self.skip_back = bytes(buffer[-EDGE:])
                    self.skip_left = stop - len(buffer)
                    buffer.clear()
                return
            else:
                body = buffer[start:stop]
            self.head = None
            del buffer[:stop]
            self.serve(path, body, len(body))
            if close and not self.busy and self.transport is not None:
                self.transport.close()

    def parse_head(self, end: int) -> tuple:
        """(path, body start, body end or -1 when chunked, close after the answer)."""
        head = bytes(self.buffer[:end])
        path = head.split(b" ", 2)[1].split(b"?", 1)[0]
        if path in self.worker.shapes:
            self.worker.last_head = head
        low = head.lower()
        start = end + 4
        if b"\r\nexpect: 100-continue" in low:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        close = b"\r\nconnection: close" in low
        if b"chunked" in header(low, b"transfer-encoding"):
            return path, start, -1, close
        return path, start, start + int(header(low, b"content-length") or 0), close

    def read_chunked(self, start: int) -> tuple:
        """(body, end of the request) of a chunked body, or (None, 0) when not whole."""
        buffer, parts, at = self.buffer, [], start
        while True:
            line = buffer.find(b"\r\n", at)
            if line < 0:
                return None, 0
            size = int(buffer[at:line].split(b";")[0], 16)
            at = line + 2
            if len(buffer) < at + size + 2:
                return None, 0
            if size == 0:
                return b"".join(parts), at + 2  # trailers are not supported
            parts.append(bytes(buffer[at : at + size]))
            at += size + 2

    def serve(self, path: bytes, body, size: int) -> None:
        """Answer one request; of a big body only the edges are given."""
        worker = self.worker
        shape = worker.shapes.get(path)
        if shape is None:
            self.transport.write(self.page(path, body))
            return
        stats, config = worker.stats, worker.config
        stats.requests += 1
        stats.body_bytes += size
        self.busy, self.shape, self.sent, self.fault = True, shape, 0, worker.faulty()
        # The flags stand before or after the prompt: no need to search all of a big body.
        edges = body if len(body) <= 2 * EDGE else body[:EDGE] + body[-EDGE:]
        stream = b'"stream":true' in edges or b'"stream": true' in edges
        if self.fault in ("http500", "http503", "http429"):
            status = int(self.fault[4:])
            self.finish(json_answer({"error": {"message": "mock fault", "code": status}}, status))
            return
        if self.fault == "close":
            self.drop()
            return
        if self.fault == "hang":
            return
        if stream:
            stats.streams += 1
            self.arrived_ns = time.monotonic_ns()
            self.left = self.max_tokens(edges) or config.chunks
            start = lambda: worker.engine.add(self)  # noqa: E731
        else:
            start = lambda: self.finish(shape.whole)  # noqa: E731
        if config.ttft_ms > 0:
            worker.loop.call_later(config.ttft_ms / 1000, start)
        else:
            start()

    @staticmethod
    def max_tokens(body) -> int:
        """The number of tokens asked for, without parsing the JSON, or 0."""
        for name in (b'"max_tokens":', b'"max_completion_tokens":'):  # routers may rename it
            at = body.find(name)
            if at >= 0:
                at += len(name)
                digits = bytes(body[at : at + 12]).split(b",")[0].split(b"}")[0].strip()
                if digits.isdigit():
                    return int(digits)
        return 0

    def page(self, path: bytes, body) -> bytes:
        """The answer of a page that is no inference endpoint."""
        worker = self.worker
        if path in worker.health:
            return json_answer({"status": "ok"}, worker.config.health)
        if path == b"/mock/stats":
            return json_answer(dataclasses.asdict(worker.stats) | {"last_head": worker.last_head.decode("latin-1")})
        if path == b"/mock/config":
            try:
                if body:
                    worker.config.update(json.loads(bytes(body)))
            except (ValueError, TypeError) as error:
                return json_answer({"error": str(error)}, 500)
            return json_answer(dataclasses.asdict(worker.config))
        return worker.pages.get(path) or json_answer({"error": "no such page"}, 404)

    # -- answers

    def stamps(self) -> tuple[int, ...]:
        """When the kernel received the request, and the time now, if stamps are wanted."""
        return (self.received_ns, time.time_ns()) if self.worker.config.stamps else ()

    def emit(self, frame: bytes) -> bool:
        """Write the next chunk; whether the stream goes on."""
        stats = self.worker.stats
        if self.fault and self.sent >= self.worker.config.fault_after:
            if self.fault in ("die", "reset"):
                self.drop(reset=self.fault == "reset")
                return False
            if self.fault == "hang_stream":
                return False
        self.transport.write(SSE_HEAD + frame if self.sent == 0 else frame)
        self.sent += 1
        self.left -= 1
        stats.chunks += 1
        if self.left > 0:
            return True
        self.finish(self.shape.final)
        return False

    def finish(self, data: bytes) -> None:
        """Write the end of an answer and go on with the next request."""
        if self.transport is None:
            return
        self.transport.write(data)
        self.busy = False
        self.worker.stats.completed += 1
        if self.buffer:
            self.pump()

    def drop(self, reset: bool = False) -> None:
        """Close the connection in the middle of an answer."""
        self.busy = False
        transport, self.transport = self.transport, None
        if reset:
            sock = transport.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            transport.abort()
        else:
            transport.close()


async def serve(host: str, ports: list[int], config: Config) -> None:
    """Serve one worker on each port, in one process, until cancelled."""
    loop = asyncio.get_running_loop()
    for port in ports:
        worker = Worker(loop, dataclasses.replace(config))
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # for big bodies
        sock.bind((host, port))
        await loop.create_server(lambda worker=worker: Connection(worker), sock=sock, backlog=4096)
    print(f"mock worker on {host} ports {ports}", flush=True)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--ports", default="18001", help="comma-separated; each port is one worker of this process")
    for field in dataclasses.fields(Config):
        parser.add_argument("--" + field.name.replace("_", "-"), type=type(field.default), default=field.default)
    args = parser.parse_args()
    config = Config()
    config.update({f.name: getattr(args, f.name) for f in dataclasses.fields(Config)})
    try:
        import uvloop
    except ImportError:
        runner = asyncio.run
    else:
        runner = uvloop.run
    with contextlib.suppress(KeyboardInterrupt):
        runner(serve(args.host, [int(port) for port in args.ports.split(",")], config))


if __name__ == "__main__":
    main()
