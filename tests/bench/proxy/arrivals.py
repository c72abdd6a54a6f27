"""When the kernel received what a protocol is about to read.

The time at which a busy process comes to read says how long its own queue is. The benchmark's ends are busy, so what a
router takes between them is measured from the kernel's time stamps: TCP keeps the arrival of each packet
(`SO_TIMESTAMPNS`), and a peek at the first byte shows it without taking anything.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import time

SO_TIMESTAMPNS = 35  # Linux, 64-bit; Python has no name for it
STAMP = struct.Struct("qq")  # seconds and nanoseconds of CLOCK_REALTIME
BUFFER_BYTES = 1 << 18

# One for all connections of a process: each read is taken out of it before the next one begins.
_buffer = bytearray(BUFFER_BYTES)
_view = memoryview(_buffer)


class TimedProtocol(asyncio.BufferedProtocol):
    """A protocol that knows, if it wants to, when the bytes given to `data_received` came."""

    transport: asyncio.Transport | None = None
    wants_stamps = False
    received_ns = 0  # CLOCK_REALTIME nanoseconds, of the read that is going on
    _sock: socket.socket | None = None
    _has_stamps = False

    def connection_made(self, transport):
        self.transport = transport
        # The same descriptor, still the transport's own: its socket cannot peek.
        self._sock = socket.socket(fileno=transport.get_extra_info("socket").fileno())
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def connection_lost(self, exc):
        self.transport = None
        self._sock.detach()  # the transport closes it

    def get_buffer(self, sizehint):
        if self.wants_stamps:
            if not self._has_stamps:  # else packets come as they always do
                self._sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
                self._has_stamps = True
            self.received_ns = self.read_stamp_ns()
        return _buffer

    def buffer_updated(self, num_bytes):
        self.data_received(bytes(_view[:num_bytes]))

    def data_received(self, data: bytes) -> None:
        """The bytes of one read."""
        raise NotImplementedError

    def read_stamp_ns(self) -> int:
        """The kernel's stamp on the first unread byte; now, if there is none: the first time, and at the end."""
        try:
            _, fields, _, _ = self._sock.recvmsg(1, 64, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:
            fields = []  # the read that follows tells the protocol
        for level, kind, value in fields:
            if (level, kind) == (socket.SOL_SOCKET, SO_TIMESTAMPNS):
                seconds, ns = STAMP.unpack(value)
                return seconds * 1_000_000_000 + ns
        return time.time_ns()
