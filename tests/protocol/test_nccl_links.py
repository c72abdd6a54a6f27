"""What is around NCCL's process groups, with gloo's in their place: blobs, threads, letting go. Ranks are threads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Final

import msgpack
import pytest
import torch
from torch.distributed import ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

from replica.errors import CollectiveFailed, PeerError
from replica.nccl_links import NcclLinks

DEADLINE_S: Final = 20.0
SOON_S: Final = 2.0
GROUPS: Final = ((0, 1), (0, 1, 2))


class Group(ProcessGroupGloo):
    """Counts how it is aborted."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        super().__init__(store, rank, size, timedelta(seconds=DEADLINE_S))
        self.calls: list[str] = []

    def abort(self) -> None:
        self.calls.append("abort")

    def _group_start(self) -> None:
        self.calls.append("start")

    def _group_end(self) -> None:
        self.calls.append("end")


def fails(store: Store, rank: int, size: int) -> Any:
    raise RuntimeError("no device")


def links_of(*ranks: int) -> list[NcclLinks]:
    return [NcclLinks(rank, [group for group in GROUPS if rank in group], Group) for rank in ranks]


def together(links: Sequence[NcclLinks]) -> None:
    blobs = {rank: one.blob() for rank, one in enumerate(links)}
    with ThreadPoolExecutor(len(links)) as pool:
        list(pool.map(lambda one: one.connect(blobs, DEADLINE_S), links))


def test_all_groups_of_a_rank_are_built_from_one_blob_of_each_and_aborted_together() -> None:
    links = links_of(0, 1, 2)
    together(links)

    def gather(rank: int) -> list[float]:
        sent = torch.full((3, 4), float(rank)).view(torch.uint8)
        received = torch.empty_like(sent)
        links[rank].transport((0, 1, 2)).all_to_all(received, sent, [1, 1, 1], [1, 1, 1])
        return received.view(torch.float32)[:, 0].tolist()

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(gather, range(3))) == [[0.0, 1.0, 2.0]] * 3
    groups = [links[0].transport(ranks)._group for ranks in GROUPS]
    links[0].release()
    assert groups[0].calls == ["start", "abort", "end"] and groups[1].calls == ["abort"]
    with pytest.raises(CollectiveFailed, match="told to let go"):
        gather(0)


def test_a_rank_that_waits_for_its_peers_is_released_at_once() -> None:
    (one,) = links_of(2)
    blob = one.blob()
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(one.connect, {0: msgpack.packb([]), 1: msgpack.packb([]), 2: blob}, DEADLINE_S)
        time.sleep(0.1)
        one.release()
        started_s = time.monotonic()
        with pytest.raises(CollectiveFailed):
            run.result(DEADLINE_S)
    assert time.monotonic() - started_s < SOON_S
    with pytest.raises(CollectiveFailed, match="told to let go"):
        one.blob()


def test_a_group_that_cannot_be_made_is_an_error() -> None:
    with pytest.raises(PeerError, match=r"the ranks \(0, 1\) cannot connect: no device"):
        NcclLinks(0, [(0, 1)], fails).blob()


@pytest.mark.parametrize("blob", [b"\xc1", msgpack.packb([3]), msgpack.packb(None)])
def test_a_blob_that_is_none_is_refused(blob: bytes) -> None:
    (one,) = links_of(0)
    with pytest.raises(PeerError, match="the blob of rank 1 is not one of this epoch"):
        one.connect({0: one.blob(), 1: blob, 2: blob}, DEADLINE_S)
    one.release()
