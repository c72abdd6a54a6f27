"""A bare asyncio.Protocol relay: about the least that a Python proxy can cost.

It frames HTTP/1.1 on both sides, picks workers round robin, keeps upstream connections,
passes bytes through unchanged, and closes the upstream when its client leaves.  It has no
other feature; it is the lower bound for a Python proxy, not a product.

    run.py --routers direct,nginx \\
        --custom 'raw=python examples/raw_proxy.py --port {port} --workers {workers_comma}'
"""

import argparse
import asyncio
import collections
import itertools
import socket
import urllib.parse

ERROR = b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n"


def field(low: bytes, name: bytes) -> bytes:
    """A header's value in a lower-cased head."""
    at = low.find(b"\r\n" + name + b":")
    if at < 0:
        return b""
    stop = low.find(b"\r\n", at + 2)
    return low[at + len(name) + 3 : stop if stop > 0 else None].strip()


class Framer:
    """Where one HTTP message ends in a stream of bytes, without copying its body."""

    __slots__ = ("left", "pending")

    def start(self, low: bytes) -> None:
        chunked = b"chunked" in field(low, b"transfer-encoding")
        self.left = -1 if chunked else int(field(low, b"content-length") or 0)
        self.pending = b""

    def ended(self, data: bytes) -> bool:
        """Whether the message ends with this part of its body."""
        if self.left >= 0:
            self.left -= len(data)
            return self.left <= 0
        if self.pending:
            data, self.pending = self.pending + data, b""
        at, total = 0, len(data)
        while at < total:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            size = int(data[at:line].partition(b";")[0], 16)
            end = line + 4 + size
            if total < end:
                break
            if size == 0:
                return True
            at = end
        self.pending = data[at:]
        return False


class Upstream(asyncio.Protocol):
    """One connection to a worker; serves one client at a time."""

    def __init__(self, pool):
        self.pool, self.client, self.transport = pool, None, None
        self.framer = Framer()

    def connection_made(self, transport):
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, client, parts):
        self.client, self.head = client, b""
        self.in_head = True
        if len(parts) == 1:
            self.transport.write(parts[0])
        else:
            self.transport.writelines(parts)

    def data_received(self, data):
        client = self.client
        if client is None or client.transport is None:
            self.transport.abort()
            return
        client.transport.write(data)
        if self.in_head:
            head = self.head + data
            end = head.find(b"\r\n\r\n")
            if end < 0:
                self.head = head
                return
            self.in_head = False
            self.framer.start(head[:end].lower())
            data = head[end + 4 :]
        if self.framer.ended(data):
            self.client = None
            self.pool.append(self)
            client.answered()

    def connection_lost(self, exc):
        self.transport = None
        if self.client is not None and self.client.transport is not None:
            self.client.transport.abort()

    def pause_writing(self):
        if self.client is not None and self.client.transport is not None:
            self.client.transport.pause_reading()

    def resume_writing(self):
        if self.client is not None and self.client.transport is not None:
            self.client.transport.resume_reading()


class Client(asyncio.Protocol):
    """One client connection."""

    def __init__(self, proxy):
        self.proxy, self.transport, self.upstream = proxy, None, None
        self.parts, self.size = [], 0  # what was read; a big body is never copied together
        self.need = 0  # length of the request that the parts start with, 0 = unknown
        self.busy = False

    def connection_made(self, transport):
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data):
        self.parts.append(data)
        self.size += len(data)
        if self.size >= self.need and not self.busy:
            self.pump()

    def pump(self):
        if not self.need:
            data = self.parts[0] if len(self.parts) == 1 else b"".join(self.parts)
            self.parts = [data]
            end = data.find(b"\r\n\r\n")
            if end < 0:
                return
            self.need = end + 4 + int(field(data[:end].lower(), b"content-length") or 0)
            if self.size < self.need:
                return
        request, self.parts = self.parts, []
        if self.size > self.need:  # the next request has begun
            data = b"".join(request)
            request, self.parts = [data[: self.need]], [data[self.need :]]
        self.size -= self.need
        self.need, self.busy = 0, True
        self.proxy.forward(self, request)

    def answered(self):
        self.busy, self.upstream = False, None
        if self.parts:
            self.pump()

    def connection_lost(self, exc):
        self.transport = None
        if self.upstream is not None and self.upstream.transport is not None:
            self.upstream.transport.abort()  # the worker must stop generating

    def pause_writing(self):
        if self.upstream is not None and self.upstream.transport is not None:
            self.upstream.transport.pause_reading()

    def resume_writing(self):
        if self.upstream is not None and self.upstream.transport is not None:
            self.upstream.transport.resume_reading()


class Proxy:
    """The workers and their idle connections."""

    def __init__(self, loop, urls):
        self.loop = loop
        parts = map(urllib.parse.urlsplit, urls)
        self.workers = itertools.cycle([(p.hostname, p.port, collections.deque()) for p in parts])

    def forward(self, client, request):
        host, port, pool = next(self.workers)
        while pool:
            upstream = pool.pop()
            if upstream.transport is not None and not upstream.transport.is_closing():
                client.upstream = upstream
                upstream.send(client, request)
                return
        self.loop.create_task(self.dial(client, request, host, port, pool))

    async def dial(self, client, request, host, port, pool):
        try:
            _, upstream = await self.loop.create_connection(lambda: Upstream(pool), host, port)
        except OSError:
            if client.transport is not None:
                client.transport.write(ERROR)
                client.answered()
            return
        if client.transport is None:
            upstream.transport.abort()
            return
        client.upstream = upstream
        upstream.send(client, request)


async def serve(port, workers):
    loop = asyncio.get_running_loop()
    proxy = Proxy(loop, workers)
    await loop.create_server(lambda: Client(proxy), "127.0.0.1", port, backlog=4096)
    await asyncio.Event().wait()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--workers", required=True)
    parser.add_argument("--uvloop", action="store_true")
    args = parser.parse_args()
    if args.uvloop:
        import uvloop

        runner = uvloop.run
    else:
        runner = asyncio.run
    runner(serve(args.port, args.workers.split(",")))


if __name__ == "__main__":
    main()
