"""One rank's connections with the others of its group, epoch after epoch. At most one epoch's exist at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import torch

from replica.errors import CollectiveFailed
from replica.groups import CollectiveCount, Groups
from replica.layout import Layout
from replica.rank_board import RankBoard
from replica.rendezvous import Rendezvous


class Peers:
    """`meet`, `connect`, any number of `together`, and from the start. Only `release_older` may be called elsewhere."""

    def __init__(
        self, layout: Layout, rank: int, *, device: torch.device, peer_host: str, timeout_s: float, board: RankBoard
    ) -> None:
        """See Rendezvous. `board` says which epoch is wanted, and gets the number of collectives entered."""
        self.epoch = 0
        self._layout = layout
        self._rank = rank
        self._device = device
        self._peer_host = peer_host
        self._timeout_s = timeout_s
        self._board = board
        self._count = CollectiveCount(board.count_of(layout.local_rank(rank)))
        self._current: tuple[int, Rendezvous] | None = None
        self._groups = Groups.alone() if layout.world == 1 else None

    def meet(self, epoch: int, members: Collection[int]) -> bytes:
        """Lets go of the peers of before and begins to meet the living ones. Returns what those must know.

        Raises CollectiveFailed if a newer epoch is wanted already, PeerError if the machine has no such address.
        """
        self._groups = None
        if self._current is not None:
            self._current[1].close()
            self._current = None
        self.epoch = epoch
        self._count.reset()
        rendezvous = Rendezvous(
            self._layout,
            self._rank,
            members=members,
            device=self._device,
            peer_host=self._peer_host,
            timeout_s=self._timeout_s,
        )
        self._current = epoch, rendezvous
        self.release_older()  # a newer epoch may be wanted since before there was anything to release
        return rendezvous.blob()

    def connect(self, blobs: Sequence[bytes]) -> None:
        """Waits for the connections with all living ranks. Raises CollectiveFailed."""
        assert self._current is not None  # the engine has the blobs from `meet`
        self._groups = self._current[1].connect(blobs, self._count)

    def release_older(self) -> None:
        """Ends all waits for peers of an epoch older than the wanted one. May be called from any thread."""
        current = self._current
        if current is not None and current[0] < self._board.epoch:
            current[1].release()

    @contextmanager
    def together(self) -> Iterator[Groups]:
        """The groups of the epoch. Raises CollectiveFailed if there are none, or if they were released meanwhile.

        Whatever was computed after a release, and whatever it raised, may come from data that never arrived.
        """
        if self._groups is None:
            raise CollectiveFailed("the rank is not connected with its peers")
        try:
            yield self._groups
        except CollectiveFailed:
            raise
        except Exception as err:
            if self._is_released:
                raise CollectiveFailed(f"a collective was released: {err}") from err
            raise
        if self._is_released:
            raise CollectiveFailed("a collective was released")

    @property
    def _is_released(self) -> bool:
        return self._current is not None and self._current[1].is_released
