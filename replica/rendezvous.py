"""Connects a rank with its peers: gloo on the CPU, NCCL on CUDA, without a TCP store and without torch's global state.

A process group asks a key-value store where its peers are: it sets one value of its own (gloo: its addresses, 170
bytes; NCCL: the id of the communicator, on the group's first rank alone), then waits for those of the others. Here each
group of a rank has a small store in memory, and all of them are built side by side, each in a thread. When every store
has the rank's own value, these make the rank's one blob; when the blobs of all ranks have come, by way of the engine,
they fill the stores and the threads end. So all groups of an epoch cost one exchange, and nobody hosts anything.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgpack
import torch
from torch import Tensor
from torch.distributed import AllToAllOptions, ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

from replica.errors import PeerError
from replica.groups import CollectiveCount, Groups, Transport, shared_groups
from replica.layout import Layout

CONNECT_S: Final = 30.0  # between the blobs of all ranks and the connections to all of them


class Rendezvous:
    """The groups of one rank while they are built: `blob`, then `connect`."""

    def __init__(self, layout: Layout, rank: int, *, device: torch.device, peer_host: str, timeout_s: float) -> None:
        """Starts to build. `peer_host` is this machine's address for its peers, `timeout_s` is of a collective.

        Raises PeerError if it is no address of this machine.
        """
        self._layout = layout
        self._rank = rank
        settings = _Settings(device, _gloo_device(peer_host), timedelta(seconds=timeout_s))
        self._pending = [_PendingGroup(ranks, rank, settings) for ranks in shared_groups(layout, rank)]

    def blob(self) -> bytes:
        """What this rank's peers must know. Raises PeerError if it cannot be made."""
        values = {pending.name: pending.own_values() for pending in self._pending}
        blob: bytes = msgpack.packb(values)
        return blob

    def connect(self, blobs: Sequence[bytes], count: CollectiveCount) -> Groups:
        """Takes the blobs of all ranks, in order, and waits for the connections. Raises PeerError if one fails."""
        if len(blobs) != self._layout.world:
            raise PeerError(f"{len(blobs)} blobs came for the {self._layout.world} ranks of the group")
        transports: dict[tuple[int, ...], Transport] = {}
        for pending in self._pending:
            pending.fill({key: value for rank in pending.ranks for key, value in _values(blobs, rank, pending.name)})
        for pending in self._pending:
            transports[pending.ranks] = _ProcessGroupTransport(pending.result())
        return Groups.connect(self._layout, self._rank, transports, count)


@dataclass(frozen=True, slots=True)
class _Settings:
    device: torch.device
    gloo_device: Any
    timeout: timedelta  # of every collective


class _PendingGroup:
    """One process group, being built in a thread."""

    def __init__(self, ranks: tuple[int, ...], rank: int, settings: _Settings) -> None:
        self.ranks = ranks
        self.name = f"{ranks[0]}-{ranks[-1]}"  # groups are contiguous
        self._rank = ranks.index(rank)
        self._settings = settings
        self._store = _MemoryStore()
        self._built: Any = None
        self._error: Exception | None = None
        # A daemon, because after a failure elsewhere nobody fills the store.
        self._thread = threading.Thread(target=self._build, name=f"group {self.name}", daemon=True)
        self._thread.start()

    def own_values(self) -> dict[str, bytes]:
        """What the group has set, once it waits for its peers."""
        if not self._store.is_set.wait(CONNECT_S):
            raise PeerError(f"no address for the ranks {self.name} was found within {CONNECT_S:g} s")
        self._raise_error()
        return dict(self._store.values)

    def fill(self, values: dict[str, bytes]) -> None:
        """Gives the group what all its ranks have set."""
        self._store.fill(values)

    def result(self) -> Any:
        """Waits until all ranks are connected."""
        self._thread.join(CONNECT_S)
        self._raise_error()
        if self._built is None:
            raise PeerError(f"the ranks {self.name} did not connect within {CONNECT_S:g} s")
        return self._built

    def _raise_error(self) -> None:
        if self._error is not None:
            raise PeerError(f"the ranks {self.name} cannot connect: {self._error}") from self._error

    def _build(self) -> None:
        try:
            make = _nccl_group if self._settings.device.type == "cuda" else _gloo_group
            self._built = make(self._store, self._rank, len(self.ranks), self._settings)
        except Exception as err:  # the border of a thread: whoever waits for the result raises it
            self._error = err
            self._store.is_set.set()


class _MemoryStore(Store):
    """A store that has one reader and one writer: the group that is being built, and `fill`."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}
        self.is_set = threading.Event()  # the group has set its own value, or waits without having one
        self._is_filled = threading.Event()

    def fill(self, values: dict[str, bytes]) -> None:
        """Adds the values of all ranks, and lets the group go on."""
        self.values |= values
        self._is_filled.set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub says str
        self.values[key] = bytes(value)
        self.is_set.set()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # No deadline here: peers may load their weights for minutes yet, and who started this process has one for that.
        if not self.check(keys):
            self.is_set.set()
            self._is_filled.wait()

    def has_extended_api(self) -> bool:
        return False


class _ProcessGroupTransport:
    """A torch process group as a Transport."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._options = AllToAllOptions()

    def all_to_all(self, received: Tensor, sent: Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]) -> None:
        """See Transport."""
        self._group.alltoall_base(received, sent, list(receive_rows), list(send_rows), self._options).wait()


def _gloo_device(peer_host: str) -> Any:
    """One for all groups of a rank: each has a thread that wakes a hundred times a second, parked or not."""
    gloo: Any = ProcessGroupGloo  # torch's stub lacks what is used here and in _gloo_group
    try:
        return gloo.create_device(hostname=peer_host)
    except RuntimeError as err:
        raise PeerError(f"peers cannot connect to {peer_host}: {err}") from err


def _gloo_group(store: Store, rank: int, size: int, settings: _Settings) -> Any:
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = settings.timeout
    options._devices = [settings.gloo_device]
    return gloo(store, rank, size, options)


def _nccl_group(store: Store, rank: int, size: int, settings: _Settings) -> Any:
    from torch.distributed import ProcessGroupNCCL  # builds of torch for the CPU do not have it

    options = ProcessGroupNCCL.Options()
    options._timeout = settings.timeout
    group = ProcessGroupNCCL(store, rank, size, options)
    group.eager_connect_single_device(settings.device)  # else the first collective would ask the store
    return group


def _values(blobs: Sequence[bytes], rank: int, group: str) -> Iterable[tuple[str, bytes]]:
    """What a rank has set in the store of a group."""
    try:
        values: dict[str, bytes] = msgpack.unpackb(blobs[rank])[group]
        return values.items()
    except (ValueError, TypeError, KeyError, AttributeError) as err:
        raise PeerError(f"the blob of rank {rank} is not one of this layout: {err}") from err
