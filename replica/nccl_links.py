"""A rank's NCCL process groups in one epoch, without a TCP store and without torch's global state.

A process group asks a key-value store where its peers are: the first rank sets the id of the communicator, the others
wait for it. Here each group of a rank has a small store in memory, and all of them are built side by side, each in a
thread. When every store has the rank's own value, or is asked for that of another, these make the rank's blob; when the
blobs of all ranks have come they fill the stores, and the threads end. So nobody hosts anything.

`release` aborts every communicator, and destroys none: a destruction waits for the peers. All are aborted in one NCCL
group, since one that aborts may wait for the kernels of another (https://github.com/pytorch/pytorch/issues/119797).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import msgpack
import torch
from torch import Tensor
from torch.distributed import AllToAllOptions
from torch.distributed.distributed_c10d import Store

from replica.errors import CollectiveFailed, PeerError

BLOB_S: Final = 30.0  # until a group has set its value or asks for another's

MakeGroup = Callable[[Store, int, int], Any]  # store, rank and size of the group


class NcclLinks:
    """`blob`, then `connect`, then `transport` of each group, then `close`. `release` may come at any time."""

    def __init__(self, rank: int, groups: Sequence[tuple[int, ...]], make_group: MakeGroup) -> None:
        """Begins to build the groups, each with `make_group`: see `nccl_group`."""
        self._released = threading.Event()
        self._pending = {ranks: _PendingGroup(ranks, rank, make_group, self._released) for ranks in groups}

    def blob(self) -> bytes:
        """What this rank's peers must know. Raises PeerError if there is nothing, CollectiveFailed when released."""
        blob: bytes = msgpack.packb([pending.own_values() for pending in self._pending.values()])
        return blob

    def connect(self, blobs: Mapping[int, bytes], deadline_s: float) -> None:
        """Gives each group the values of its ranks' blobs, and waits until its connections are there.

        Raises PeerError for a blob that is none, CollectiveFailed if not all are there after so many seconds, or when
        released.
        """
        for ranks, pending in self._pending.items():
            values: dict[str, bytes] = {}
            for rank in ranks:
                values |= _unpacked(blobs[rank], rank)
            pending.fill(values)
        for pending in self._pending.values():
            pending.connected(deadline_s)

    def transport(self, ranks: tuple[int, ...]) -> NcclTransport:
        """That of one of the groups."""
        return NcclTransport(self._pending[ranks].group, self._released)

    def release(self) -> None:
        """Ends whatever the rank waits for, now and later. May be called from any thread."""
        self._released.set()
        groups = []
        for pending in self._pending.values():
            pending.give_up()
            if pending.group is not None:
                groups.append(pending.group)
        if groups:
            groups[0]._group_start()
            for group in groups:
                group.abort()
            groups[0]._group_end()

    def close(self) -> None:
        """Drops the groups, which were released."""
        self._pending.clear()


def nccl_group(device: torch.device, timeout_s: float) -> MakeGroup:
    """Makes groups of ranks that each have such a device; `timeout_s` is of a collective."""

    def make(store: Store, rank: int, size: int) -> Any:
        from torch.distributed import ProcessGroupNCCL  # builds of torch for the CPU do not have it

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        group = ProcessGroupNCCL(store, rank, size, options)
        group.eager_connect_single_device(device)  # else the first collective would ask the store
        return group

    return make


class NcclTransport:
    """A torch process group as a Transport (groups.py)."""

    def __init__(self, group: Any, released: threading.Event) -> None:
        self._group = group
        self._released = released
        self._options = AllToAllOptions()

    def all_to_all(self, received: Tensor, sent: Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]) -> None:
        """See Transport."""
        if self._released.is_set():
            raise CollectiveFailed("the rank was told to let go of its peers")
        try:
            self._group.alltoall_base(received, sent, list(receive_rows), list(send_rows), self._options).wait()
        except RuntimeError as err:
            raise CollectiveFailed(str(err)) from err


class _PendingGroup:
    """One process group, being built in a thread."""

    def __init__(self, ranks: tuple[int, ...], rank: int, make_group: MakeGroup, released: threading.Event) -> None:
        self.group: Any = None  # once it is connected
        self._ranks = ranks
        self._rank = ranks.index(rank)
        self._make_group = make_group
        self._released = released
        self._store = _MemoryStore(prefix=f"{ranks[0]}-{ranks[-1]}/")  # no two groups of a rank begin and end alike
        self._is_done = threading.Event()
        self._error: Exception | None = None
        # A daemon, because after a failure elsewhere nobody fills the store.
        threading.Thread(target=self._build, name=f"group {self._store.prefix}", daemon=True).start()

    def own_values(self) -> dict[str, bytes]:
        """What the group has set, once it waits for its peers."""
        if not self._store.is_set.wait(BLOB_S):
            raise PeerError(f"the group of the ranks {self._ranks} has no address after {BLOB_S:g} s")
        self._check(PeerError)
        return dict(self._store.values)

    def fill(self, values: Mapping[str, bytes]) -> None:
        """Gives the group what all its ranks have set."""
        self._store.fill(values)

    def connected(self, deadline_s: float) -> None:
        """Waits until all ranks are connected."""
        is_done = self._is_done.wait(deadline_s)
        self._check(CollectiveFailed)
        if not is_done:
            raise CollectiveFailed(f"the ranks {self._ranks} did not connect within {deadline_s:g} s")

    def give_up(self) -> None:
        """Ends the waits for it. What the thread may still make is dropped."""
        self._is_done.set()
        self._store.fill({})

    def _check(self, kind: type[PeerError] | type[CollectiveFailed]) -> None:
        if self._released.is_set():
            raise CollectiveFailed("the rank was told to let go of its peers")
        if self._error is not None:
            raise kind(f"the ranks {self._ranks} cannot connect: {self._error}") from self._error

    def _build(self) -> None:
        try:
            self.group = self._make_group(self._store, self._rank, len(self._ranks))
        except Exception as err:  # the border of a thread: whoever waits for the result raises it
            self._error = err
        self._is_done.set()
        self._store.is_set.set()


class _MemoryStore(Store):
    """A store that has one reader and one writer: the group that is being built, and `fill`."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix  # of every key: a rank's blob has those of several groups
        self.values: dict[str, bytes] = {}
        self.is_set = threading.Event()  # the group has set its own value, or waits without having one, or has failed
        self._is_filled = threading.Event()

    def fill(self, values: Mapping[str, bytes]) -> None:
        """Adds the values of all ranks, and lets the group go on; it raises if it lacks one."""
        self.values |= values
        self._is_filled.set()
        self.is_set.set()

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch's stub says str
        self.values[self.prefix + key] = bytes(value)
        self.is_set.set()

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.values[self.prefix + key]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def check(self, keys: list[str]) -> bool:
        return all(self.prefix + key in self.values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        # No deadline here: peers may load their weights for minutes yet, and who started this process has one for that.
        if not self.check(keys):
            self.is_set.set()
            self._is_filled.wait()

    def has_extended_api(self) -> bool:
        return False


def _unpacked(blob: bytes, rank: int) -> dict[str, bytes]:
    """What a rank has set in the stores of all its groups."""
    try:
        values: dict[str, bytes] = {}
        for of_group in msgpack.unpackb(blob):
            values |= dict(of_group)
    except (ValueError, TypeError, msgpack.UnpackException) as err:
        raise PeerError(f"the blob of rank {rank} is not one of this epoch: {err}") from err
    return values
