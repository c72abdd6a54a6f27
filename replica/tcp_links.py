"""A rank's TCP connections with its peers in one epoch, for ranks on CPUs: one with each, whatever groups they share.

Both ends of a connection know from the step's counts what comes next and how long it is, so nothing is negotiated: a
message is its number, its length and the rows. Two ranks take the collectives of all groups that they share in the same
order, so one stream is enough. Whatever a rank waits for, it waits for in one `poll`, and `release` ends that at once,
whatever its peers do, in the middle of a message too.

Why not gloo: it cannot be made to let go. When a connection ends it tells the operations that have not begun, but not
the one that is halfway through (torch 2.13; its abort does nothing), and about every seventh rank that was released in
a busy group waited for its timeout. These links need no thread either, and a small collective takes a third of the CPU.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import msgpack
from torch import Tensor

from replica.errors import CollectiveFailed, PeerError

_MESSAGE: Final = struct.Struct("<QQ")  # its number on the connection, bytes that follow
_HELLO: Final = struct.Struct("<16sI")  # the token of who is dialled, the rank that dials
_TOKEN_BYTES: Final = 16
_BACKLOG: Final = 1024  # as many as a group may have ranks

Address = tuple[str, int]


@dataclass(slots=True)
class _Link:
    """The connection with one peer."""

    rank: int
    sock: socket.socket
    num_sent: int = 0  # messages
    num_received: int = 0


@dataclass(slots=True)
class _Transfer:
    """One message, and how far it has come."""

    link: _Link
    header: bytes | bytearray
    payload: memoryview
    num_bytes: int = 0  # that were moved

    @property
    def has_header(self) -> bool:
        """Whether all of the header was moved."""
        return self.num_bytes >= len(self.header)

    @property
    def is_done(self) -> bool:
        """Whether all was moved."""
        return self.num_bytes == len(self.header) + len(self.payload)

    def rest(self) -> list[memoryview]:
        """What was not."""
        if self.has_header:
            return [self.payload[self.num_bytes - len(self.header) :]]
        return [memoryview(self.header)[self.num_bytes :], self.payload]


class TcpLinks:
    """`blob`, then `connect`, then `transport` of each group, then `close`. `release` may come at any time."""

    def __init__(self, rank: int, peers: Collection[int], *, host: str, timeout_s: float) -> None:
        """Begins to listen at `host` for the peers. `timeout_s` is of a collective.

        Raises PeerError if it is no address of this machine.
        """
        self.rank = rank
        self._peers = sorted(peers)
        self._timeout_s = timeout_s
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._links: dict[int, _Link] = {}
        self._is_released = False
        self._listener = _listener(host)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # readable for ever after `release`

    def blob(self) -> bytes:
        """Where this rank listens, and what must be said there."""
        host, port = self._listener.getsockname()[:2]
        blob: bytes = msgpack.packb((host, port, self._token))
        return blob

    def connect(self, blobs: Mapping[int, bytes], deadline_s: float) -> None:
        """Connects with all peers, whose blobs `blobs` has by rank: it dials those of lower rank, the others dial.

        Raises PeerError for a blob that is none, CollectiveFailed if a peer is gone, if not all are there after so many
        seconds, or when released.
        """
        ends_s = time.monotonic() + deadline_s
        addresses = {peer: _unpacked(blobs[peer], peer) for peer in self._peers}
        for peer in self._peers:
            if peer < self.rank:
                self._dial(peer, *addresses[peer], ends_s)
        self._accept({peer for peer in self._peers if peer > self.rank}, ends_s)
        self._listener.close()

    def transport(self, ranks: Sequence[int]) -> TcpTransport:
        """That of a group of these ranks, of which this one is one."""
        return TcpTransport(self, ranks)

    def release(self) -> None:
        """Ends whatever the rank waits for, now and later. May be called from any thread."""
        self._is_released = True
        os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Closes everything. Not to be called while another thread may call `release`."""
        self._listener.close()
        for link in self._links.values():
            link.sock.close()
        os.close(self._wake)

    def exchange(self, sent: Mapping[int, memoryview], received: Mapping[int, memoryview]) -> None:
        """Sends and fills what is named for each peer, unless it is empty. Raises CollectiveFailed."""
        self._check_released()
        ends_s = time.monotonic() + self._timeout_s
        sending, receiving = self._transfers(sent, received)
        for fd in [fd for fd, transfer in sending.items() if _send(transfer)]:
            del sending[fd]
        poller = self._poller()
        for fd in sending.keys() | receiving.keys():
            poller.register(fd, _events(fd in sending, fd in receiving))
        while sending or receiving:
            for fd, _ in self._poll(poller, ends_s, [*receiving.values(), *sending.values()]):
                if fd in receiving and _receive(receiving[fd]):
                    del receiving[fd]
                if fd in sending and _send(sending[fd]):
                    del sending[fd]
                if fd in sending or fd in receiving:
                    poller.modify(fd, _events(fd in sending, fd in receiving))
                else:
                    poller.unregister(fd)

    def _transfers(
        self, sent: Mapping[int, memoryview], received: Mapping[int, memoryview]
    ) -> tuple[dict[int, _Transfer], dict[int, _Transfer]]:
        """Those of a collective, by file descriptor."""
        sending: dict[int, _Transfer] = {}
        receiving: dict[int, _Transfer] = {}
        for peer, payload in sent.items():
            if payload:
                link = self._links[peer]
                sending[link.sock.fileno()] = _Transfer(link, _MESSAGE.pack(link.num_sent, len(payload)), payload)
                link.num_sent += 1
        for peer, payload in received.items():
            if payload:
                link = self._links[peer]
                receiving[link.sock.fileno()] = _Transfer(link, bytearray(_MESSAGE.size), payload)
        return sending, receiving

    def _poller(self) -> select.poll:
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        return poller

    def _poll(self, poller: select.poll, ends_s: float, waits: Sequence[_Transfer | int]) -> list[tuple[int, int]]:
        """The sockets that are ready. Raises CollectiveFailed when released, or after the deadline.

        `waits` are the transfers, or the ranks, that are waited for.
        """
        events = poller.poll(max(0.0, ends_s - time.monotonic()) * 1000)
        self._check_released()
        if not events:
            raise CollectiveFailed(_late({wait.link.rank if isinstance(wait, _Transfer) else wait for wait in waits}))
        return events

    def _check_released(self) -> None:
        if self._is_released:
            raise CollectiveFailed("the rank was told to let go of its peers")

    def _dial(self, peer: int, address: Address, token: bytes, ends_s: float) -> None:
        """Connects with a peer that listens, and says who dials."""
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        link = self._add(peer, sock)
        status = sock.connect_ex(address)
        if status == errno.EINPROGRESS:
            poller = self._poller()
            poller.register(sock, select.POLLOUT)
            self._poll(poller, ends_s, [peer])
            status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise CollectiveFailed(f"rank {peer} is gone: {os.strerror(status)}")
        hello = _Transfer(link, _HELLO.pack(token, self.rank), memoryview(b""))
        is_sent = _send(hello)
        assert is_sent  # a new socket has room for so little

    def _accept(self, missing: set[int], ends_s: float) -> None:
        """Waits until these peers have dialled and said so. Whoever else dials is sent away."""
        callers: dict[int, tuple[socket.socket, bytearray]] = {}  # that have not said all
        poller = self._poller()
        poller.register(self._listener, select.POLLIN)
        try:
            while missing:
                for fd, _ in self._poll(poller, ends_s, sorted(missing)):
                    if fd == self._listener.fileno():
                        with suppress(OSError):  # it has hung up again
                            sock, _ = self._listener.accept()
                            sock.setblocking(False)
                            callers[sock.fileno()] = sock, bytearray()
                            poller.register(sock, select.POLLIN)
                    elif (peer := self._hello(*callers[fd])) is not None:
                        poller.unregister(fd)
                        sock, _ = callers.pop(fd)
                        if peer in missing:
                            missing.remove(peer)
                            self._add(peer, sock)
                        else:
                            sock.close()
                if missing and time.monotonic() > ends_s:  # strangers that never let up put off no deadline
                    raise CollectiveFailed(_late(missing))
        finally:
            for sock, _ in callers.values():
                sock.close()

    def _hello(self, sock: socket.socket, said: bytearray) -> int | None:
        """The rank of a caller, by what it has said so far; -1 for a stranger, None while it has not said all."""
        try:
            more = sock.recv(_HELLO.size - len(said))
        except OSError:
            more = b""
        said += more
        if more and len(said) < _HELLO.size:
            return None
        token, rank = _HELLO.unpack(said) if len(said) == _HELLO.size else (b"", -1)
        return int(rank) if secrets.compare_digest(token, self._token) else -1

    def _add(self, peer: int, sock: socket.socket) -> _Link:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._links[peer] = _Link(peer, sock)
        return self._links[peer]


class TcpTransport:
    """A group of ranks as a Transport (groups.py)."""

    def __init__(self, links: TcpLinks, ranks: Sequence[int]) -> None:
        self._links = links
        self._ranks = ranks

    def all_to_all(self, received: Tensor, sent: Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]) -> None:
        """See Transport."""
        theirs = dict(zip(self._ranks, _cut(received, receive_rows), strict=True))
        ours = dict(zip(self._ranks, _cut(sent, send_rows), strict=True))
        theirs.pop(self._links.rank)[:] = ours.pop(self._links.rank)
        self._links.exchange(ours, theirs)


def _listener(host: str) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except OSError as err:
        raise PeerError(f"peers cannot connect to {host}: {err}") from err
    try:
        listener.bind(address)
    except OSError as err:
        listener.close()
        raise PeerError(f"peers cannot connect to {host}: {err}") from err
    listener.listen(_BACKLOG)
    listener.setblocking(False)
    return listener


def _send(transfer: _Transfer) -> bool:
    """Sends what the socket takes. Returns whether that was all."""
    try:
        transfer.num_bytes += transfer.link.sock.sendmsg(transfer.rest())
    except BlockingIOError:
        return False
    except OSError as err:
        raise CollectiveFailed(f"rank {transfer.link.rank} is gone: {err}") from err
    return transfer.is_done


def _receive(transfer: _Transfer) -> bool:
    """Receives what there is. Returns whether that was all."""
    link, had_header = transfer.link, transfer.has_header
    try:
        num_bytes = link.sock.recvmsg_into(transfer.rest())[0]
    except BlockingIOError:
        return False
    except OSError as err:
        raise CollectiveFailed(f"rank {link.rank} is gone: {err}") from err
    if not num_bytes:
        raise CollectiveFailed(f"rank {link.rank} is gone: it has closed its connection")
    transfer.num_bytes += num_bytes
    if transfer.has_header and not had_header:
        number, length = _MESSAGE.unpack(transfer.header)
        if (number, length) != (link.num_received, len(transfer.payload)):
            found = f"message {number} of {length} bytes"
            raise CollectiveFailed(
                f"rank {link.rank} sent {found}, expected {link.num_received} of {len(transfer.payload)}"
            )
        link.num_received += 1
    return transfer.is_done


def _cut(x: Tensor, rows: Sequence[int]) -> list[memoryview]:
    """The bytes of a uint8 tensor [rows, bytes], cut after each of so many rows."""
    view = x.numpy().reshape(-1).data
    bounds = [0]
    for count in rows:
        bounds.append(bounds[-1] + count * x.shape[1])
    return [view[start:stop] for start, stop in itertools.pairwise(bounds)]


def _late(ranks: Collection[int]) -> str:
    return f"rank {', '.join(map(str, sorted(ranks)))} did not answer in time"


def _events(is_sending: bool, is_receiving: bool) -> int:
    return (select.POLLOUT if is_sending else 0) | (select.POLLIN if is_receiving else 0)


def _unpacked(blob: bytes, rank: int) -> tuple[Address, bytes]:
    try:
        host, port, token = msgpack.unpackb(blob)
        if not (isinstance(host, str) and isinstance(port, int) and isinstance(token, bytes)):
            raise TypeError("it names no address")
    except (ValueError, TypeError, msgpack.UnpackException) as err:
        raise PeerError(f"the blob of rank {rank} is not one of this epoch: {err}") from err
    return (host, port), token
