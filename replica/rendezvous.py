"""Connects a rank with the living ranks of its group for one epoch, and lets go of them.

Each rank makes one blob of where it can be reached; the blobs of all ranks go round once, by way of the engines and
their clock; then each connects with those that it shares a group with. So all groups of an epoch cost one exchange.
Ranks on CPUs are connected by TCP (tcp_links.py), those on CUDA by NCCL (nccl_links.py).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Protocol

import torch

from replica.errors import PeerError
from replica.groups import CollectiveCount, Groups, Transport, shared_groups
from replica.layout import Layout
from replica.nccl_links import NcclLinks, nccl_group
from replica.tcp_links import TcpLinks

CONNECT_S: Final = 30.0  # between the blobs of all ranks and the connections to all of them


class Links(Protocol):
    """The connections of one rank: `blob`, then `connect`, then `transport` of each group, then `close`."""

    def blob(self) -> bytes:
        """What this rank's peers must know."""

    def connect(self, blobs: Mapping[int, bytes], deadline_s: float) -> None:
        """Takes those of its peers, by rank. Raises PeerError for one that is none, CollectiveFailed."""

    def transport(self, ranks: tuple[int, ...]) -> Transport:
        """That of a group of ranks."""

    def release(self) -> None:
        """Ends whatever the rank waits for, now and later, within milliseconds. May be called from any thread."""

    def close(self) -> None:
        """Closes everything. Not to be called while another thread may call `release`."""


class Rendezvous:
    """The groups of one rank in one epoch: `blob`, `connect`, `close`. `release` may come at any time before that."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        *,
        members: Collection[int] | None = None,
        device: torch.device,
        peer_host: str,
        timeout_s: float,
    ) -> None:
        """`peer_host` is this machine's address for its peers, `timeout_s` is of a collective.

        `members` are the replicas that live (dp ranks), all of the layout by default. Raises PeerError if `peer_host`
        is no address of this machine.
        """
        self._layout = layout
        self._rank = rank
        self._members = range(layout.dp) if members is None else members
        self._shared = shared_groups(layout, rank, self._members)
        self._lock = threading.Lock()  # between `release` and `close`
        self.is_released = False  # what the groups' collectives gave since then may be anything
        self._is_closed = False
        self._links: Links
        if device.type == "cuda":
            self._links = NcclLinks(rank, self._shared, nccl_group(device, timeout_s))
        else:
            peers = {peer for ranks in self._shared for peer in ranks} - {rank}
            self._links = TcpLinks(rank, peers, host=peer_host, timeout_s=timeout_s)

    def blob(self) -> bytes:
        """What this rank's peers must know. Raises PeerError if it cannot be made."""
        return self._links.blob()

    def connect(self, blobs: Sequence[bytes], count: CollectiveCount) -> Groups:
        """Takes the blobs of all living ranks, in order, and waits for the connections.

        Raises PeerError if the blobs are none of this layout, CollectiveFailed if a peer cannot be reached, or when
        released.
        """
        living = [rank for rank in range(self._layout.world) if self._layout.dp_rank(rank) in self._members]
        if len(blobs) != len(living):
            raise PeerError(f"{len(blobs)} blobs came for the {len(living)} ranks of the group")
        self._links.connect(dict(zip(living, blobs, strict=True)), CONNECT_S)
        transports = {ranks: self._links.transport(ranks) for ranks in self._shared}
        return Groups.connect(self._layout, self._rank, transports, count, self._members)

    def release(self) -> None:
        """Ends every wait of the rank for its peers, within milliseconds. May be called from any thread, and again."""
        with self._lock:
            if not self.is_released and not self._is_closed:
                self.is_released = True
                self._links.release()

    def close(self) -> None:
        """Lets go of the peers. The groups cannot be used afterwards."""
        self.release()
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._links.close()
