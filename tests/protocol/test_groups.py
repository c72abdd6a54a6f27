"""Groups of two and four ranks, connected over real sockets; the ranks are threads of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Final, TypeVar

import msgpack
import pytest
import torch
from torch import Tensor

from replica.errors import CollectiveFailed, PeerError
from replica.groups import CollectiveCount, Group, Groups, shared_groups
from replica.layout import Layout
from replica.rendezvous import Rendezvous

LAYOUT: Final = Layout(dp=2, attn_tp=2, mlp_tp=2, moe_tp=4)
TIMEOUT_S: Final = 1.0
DTYPES: Final = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32)

T = TypeVar("T")


def together(work: Callable[[int], T]) -> list[T]:
    """The results of all ranks, each in its thread."""
    with ThreadPoolExecutor(LAYOUT.world) as pool:
        return list(pool.map(work, range(LAYOUT.world)))


@contextmanager
def rendezvous(*ranks: int, members: Sequence[int] | None = None) -> Iterator[list[Rendezvous]]:
    """Of these ranks, closed afterwards."""
    with ExitStack() as stack:
        pending = []
        for rank in ranks:
            one = Rendezvous(
                LAYOUT,
                rank,
                members=members,
                device=torch.device("cpu"),
                peer_host="127.0.0.1",
                timeout_s=TIMEOUT_S,
            )
            stack.callback(one.close)
            pending.append(one)
        yield pending


@pytest.fixture(scope="module")
def counts() -> list[CollectiveCount]:
    return [CollectiveCount() for _ in range(LAYOUT.world)]


@pytest.fixture(scope="module")
def groups(counts: list[CollectiveCount]) -> Iterator[list[Groups]]:
    """Of each rank."""
    with rendezvous(*range(LAYOUT.world)) as pending:
        blobs = [rank.blob() for rank in pending]
        yield together(lambda rank: pending[rank].connect(blobs, counts[rank]))


def values(*size: int, seed: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def test_a_rank_is_in_the_groups_of_its_layout_each_once() -> None:
    assert shared_groups(LAYOUT, 3) == [(2, 3), (0, 1, 2, 3)]  # attention and MLP are the same ranks
    assert shared_groups(Layout(dp=2, attn_tp=1, mlp_tp=1, moe_tp=2), 1) == [(0, 1)]
    assert shared_groups(Layout(), 0) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(3, 0, 2, 5), (0, 0, 0, 0), (1, 1, 1, 1)])
def test_an_all_gather_has_every_ranks_rows_in_order(
    groups: list[Groups], rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [(9 * values(n, 2, 4, seed=rank)).to(dtype) for rank, n in enumerate(rows)]
    expected = torch.cat(parts).to(torch.float32)
    for gathered in together(lambda rank: groups[rank].moe.all_gather(parts[rank], rows)):
        assert gathered.dtype == dtype and torch.equal(gathered.to(torch.float32), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [(3, 0, 2, 5), (0, 0, 0, 0)])
def test_a_reduce_scatter_gives_each_rank_the_sums_of_its_rows_added_in_the_order_of_the_ranks(
    groups: list[Groups], rows: tuple[int, ...], dtype: torch.dtype
) -> None:
    parts = [values(sum(rows), 8, seed=rank).to(dtype) for rank in range(4)]
    total = parts[0].to(torch.float32)
    for part in parts[1:]:
        total = total + part
    scattered = together(lambda rank: groups[rank].moe.reduce_scatter(parts[rank], rows))
    assert [len(part) for part in scattered] == list(rows)
    assert torch.equal(torch.cat(scattered), total.to(dtype))


def test_packed_tensors_of_different_types_arrive_as_they_were(groups: list[Groups]) -> None:
    rows = (2, 0, 1, 3)
    tensors = [
        (
            values(n, 5, seed=n).to(torch.bfloat16),
            values(n, 3, seed=n),
            torch.arange(3 * n, dtype=torch.int32).view(n, 3),
        )
        for n in rows
    ]
    for gathered in together(lambda rank: groups[rank].moe.all_gather_packed(tensors[rank], rows)):
        for index, tensor in enumerate(gathered):
            assert torch.equal(tensor, torch.cat([tensors[rank][index] for rank in range(4)]))


def test_columns_are_gathered_on_the_first_rank_of_each_group_alone(groups: list[Groups]) -> None:
    parts = [values(3, 5, seed=rank) for rank in range(4)]
    gathered = together(lambda rank: groups[rank].attention.gather_columns(parts[rank]))
    assert torch.equal(gathered[0], torch.cat(parts[:2], dim=1))
    assert torch.equal(gathered[2], torch.cat(parts[2:], dim=1))
    assert gathered[1].shape == gathered[3].shape == (0, 10)


def test_every_collective_is_counted_as_it_is_entered(groups: list[Groups], counts: list[CollectiveCount]) -> None:
    before = [count.value for count in counts]
    together(lambda rank: groups[rank].attention.all_gather(torch.ones(1, 1), (1, 1)))
    assert [count.value - value for count, value in zip(counts, before, strict=True)] == [1] * 4


def test_a_group_of_one_moves_and_counts_nothing() -> None:
    x, group = torch.ones(3, 2), Groups.alone().mlp
    assert group.all_gather(x, (3,)) is x and group.reduce_scatter(x, (3,)) is x and group.gather_columns(x) is x


def test_tokens_are_owned_in_equal_parts_within_each_replica(groups: list[Groups]) -> None:
    tokens = (5, 2)
    assert groups[0].moe.owned_rows(LAYOUT, tokens) == (3, 2, 1, 1)
    assert groups[3].attention.owned_rows(LAYOUT, tokens) == (1, 1)


def test_blobs_for_another_number_of_ranks_are_refused() -> None:
    with rendezvous(0) as (pending,), pytest.raises(PeerError, match="3 blobs came for the 4 ranks"):
        pending.connect([pending.blob()] * 3, CollectiveCount())


@pytest.mark.parametrize("blob", [b"\xc1", msgpack.packb({"0-1": {}}), msgpack.packb([]), msgpack.packb([1, 2, 3])])
def test_a_blob_that_is_none_is_refused(blob: bytes) -> None:
    with rendezvous(0) as (pending,), pytest.raises(PeerError, match="blob of rank 2"):
        pending.connect([pending.blob(), pending.blob(), blob, pending.blob()], CollectiveCount())


def test_an_address_that_is_not_this_machines_is_an_error() -> None:
    for host in ("no.such.host.invalid", "192.0.2.1"):
        with pytest.raises(PeerError, match=f"peers cannot connect to {host}"):
            Rendezvous(LAYOUT, 0, device=torch.device("cpu"), peer_host=host, timeout_s=TIMEOUT_S)


def test_peers_may_load_for_longer_than_a_collective_may_take() -> None:
    with rendezvous(*range(LAYOUT.world)) as pending:
        blobs = [rank.blob() for rank in pending]
        time.sleep(2 * TIMEOUT_S)
        groups = together(lambda rank: pending[rank].connect(blobs, CollectiveCount()))
        ones = together(lambda rank: groups[rank].moe.all_gather(torch.ones(1, 1), (1,) * 4))
    assert [len(x) for x in ones] == [4] * 4


def test_a_rank_that_does_not_come_ends_the_collective_at_its_timeout() -> None:
    with rendezvous(*range(LAYOUT.world)) as pending:
        blobs = [rank.blob() for rank in pending]
        groups = together(lambda rank: pending[rank].connect(blobs, CollectiveCount()))

        def all_but_one(rank: int) -> float:
            group: Group = groups[rank].moe
            started_s = time.monotonic()
            if rank != 2:
                with pytest.raises(CollectiveFailed, match="rank 2 did not answer in time"):
                    group.all_gather(torch.ones(1, 1), (1, 1, 1, 1))
            return time.monotonic() - started_s

        assert max(together(all_but_one)) < 5 * TIMEOUT_S


def test_lost_replicas_are_left_out_of_every_group_and_the_others_keep_their_numbers() -> None:
    assert shared_groups(LAYOUT, 3, members=[1]) == [(2, 3)]  # attention, MLP and MoE are the same ranks now
    assert shared_groups(Layout(dp=3, attn_tp=1, mlp_tp=3, moe_tp=3), 2, members=[0, 2]) == [(0, 2)]
    assert shared_groups(Layout(dp=3, attn_tp=1, mlp_tp=3, moe_tp=3), 2, members=[2]) == []
    with rendezvous(2, 3, members=[1]) as pending:
        blobs = [rank.blob() for rank in pending]
        with ThreadPoolExecutor(2) as pool:
            groups = list(pool.map(lambda rank: rank.connect(blobs, CollectiveCount()), pending))
            rows = groups[0].moe.owned_rows(LAYOUT, (0, 5))
            assert rows == (3, 2) and groups[1].moe.position == 1 and groups[1].layout == LAYOUT
            parts = [torch.full((count, 2), float(rank)) for rank, count in enumerate(rows)]
            gathered = list(pool.map(lambda rank: groups[rank].moe.all_gather(parts[rank], rows), range(2)))
    assert all(torch.equal(x, torch.cat(parts)) for x in gathered)
