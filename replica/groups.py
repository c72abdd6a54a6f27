"""The groups of ranks that one rank is in, in one epoch, and what ranks do together in them.

A rank is in three groups: of the ranks that share its attention, its dense MLP and its experts. Between the layers
each token has one owner, which alone holds its residual. Before a layer the group of that layer gathers its tokens,
each sent by its owner; every rank computes its part; then the parts are reduce-scattered: each sum to its owner.

    owners --all_gather--> all tokens of the group -> this rank's part of the layer --reduce_scatter--> owners

This one pair serves every width. A width of 1 is a group of one rank, whose pair does nothing: it computes its own
tokens. A width above attn_tp spans replicas. If instead all ranks of a replica held all its tokens, as many bytes would
travel, in five collectives a layer instead of four, and each norm and router would be computed attn_tp times.

Both are made of one collective, an all-to-all, because it takes parts of different sizes and sends each byte once. The
parts are summed here, in the order of the ranks, so a sum does not depend on who was first. All sizes are known
beforehand, from the release of the step: no rank ever asks another one for a size, and one without tokens takes every
collective too.

Where replicas were lost, their ranks are left out of every group; all others keep their numbers.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from replica.layout import Layout, own_group


class Transport(Protocol):
    """Moves rows between the ranks of one group. Calls must come in the same order on all of them."""

    def all_to_all(self, received: Tensor, sent: Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]) -> None:
        """Rank i of the group gets the i-th part of `sent`; the i-th part of `received` comes from it.

        Both are contiguous uint8 [rows, bytes]; the row counts have one number per rank. Returns when `received` may
        be read on the current stream. Raises CollectiveFailed when a peer is gone, the group's timeout has passed or
        the group was released.
        """


class CollectiveCount:
    """How many collectives of an epoch the rank has entered. The clock tells by it which rank is behind."""

    def __init__(self, count: NDArray[np.int64] | None = None) -> None:
        """`count` [1] may lie in shared memory, where others read it."""
        self._count = np.zeros(1, np.int64) if count is None else count

    def add(self) -> None:
        """One more."""
        self._count[0] += 1

    def reset(self) -> None:
        """A new epoch begins."""
        self._count[0] = 0

    @property
    def value(self) -> int:
        """All of the epoch so far."""
        return int(self._count[0])


class Group:
    """The ranks that share a layer. Tensors are [tokens, ...]; `rows` has the number of tokens of each of its ranks."""

    def __init__(self, ranks: tuple[int, ...], rank: int, transport: Transport | None, count: CollectiveCount) -> None:
        """`transport` is None for a group of one, which has nothing to move."""
        self.ranks = ranks
        self.position = ranks.index(rank)  # of this rank in the group
        self._transport = transport
        self._count = count

    @property
    def size(self) -> int:
        """Its number of ranks."""
        return len(self.ranks)

    def owned_rows(self, layout: Layout, group_tokens: Sequence[int]) -> tuple[int, ...]:
        """How many tokens each rank of the group owns, when the replicas of the layout have `group_tokens`."""
        ranges = (
            layout.owned_tokens(group_tokens[layout.dp_rank(rank)], layout.local_rank(rank)) for rank in self.ranks
        )
        return tuple(stop - start for start, stop in ranges)

    def all_gather(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """This rank's rows of x [rows of this rank, ...] -> those of all ranks, one after the other."""
        if self._transport is None:
            return x
        num_rows = rows[self.position]
        sent = x.expand(self.size, *x.shape).flatten(0, 1)  # a copy for each rank
        return self._all_to_all(self._transport, sent, rows, [num_rows] * self.size)

    def all_gather_packed(self, tensors: Sequence[Tensor], rows: Sequence[int]) -> list[Tensor]:
        """Several tensors, each as `all_gather` does it, in one collective."""
        if self._transport is None:
            return list(tensors)
        columns = [_as_bytes(x.contiguous()) for x in tensors]
        gathered = self.all_gather(torch.cat(columns, dim=1), rows)  # uint8 [rows of all ranks, bytes of all tensors]
        parts = torch.split(gathered, [part.shape[1] for part in columns], dim=1)
        return [part.contiguous().view(x.dtype).view(-1, *x.shape[1:]) for part, x in zip(parts, tensors, strict=True)]

    def reduce_scatter(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """This rank's part of the sum for all rows of the group -> the whole sum for this rank's rows."""
        if self._transport is None:
            return x
        num_rows = rows[self.position]
        parts = self._all_to_all(self._transport, x, [num_rows] * self.size, rows)
        parts = parts.view(self.size, num_rows, *x.shape[1:])
        total = parts[0].to(torch.float32)
        for part in parts[1:]:
            total = total + part
        return total.to(x.dtype)

    def gather_columns(self, x: Tensor) -> Tensor:
        """x [N, C] on each rank -> [N, size * C] on the first, side by side; [0, size * C] on the others."""
        if self._transport is None:
            return x
        N, C = x.shape
        receive_rows = [N if self.position == 0 else 0] * self.size
        parts = self._all_to_all(self._transport, x, receive_rows, [N, *[0] * (self.size - 1)])
        return parts.view(self.size, receive_rows[0], C).transpose(0, 1).reshape(receive_rows[0], self.size * C)

    def _all_to_all(
        self, transport: Transport, x: Tensor, receive_rows: Sequence[int], send_rows: Sequence[int]
    ) -> Tensor:
        """Moves rows of any dtype, as bytes: a transport need not know it."""
        received = torch.empty((sum(receive_rows), *x.shape[1:]), dtype=x.dtype, device=x.device)
        self._count.add()
        transport.all_to_all(_as_bytes(received), _as_bytes(x.contiguous()), receive_rows, send_rows)
        return received


@dataclass(frozen=True, slots=True)
class Groups:
    """The groups of one rank, by the kind of layer. Groups of the same ranks may be one."""

    layout: Layout
    attention: Group
    mlp: Group
    moe: Group

    @classmethod
    def connect(
        cls,
        layout: Layout,
        rank: int,
        transports: dict[tuple[int, ...], Transport],
        count: CollectiveCount,
        members: Collection[int] | None = None,
    ) -> Groups:
        """The rank's groups; `transports` has one for each of `shared_groups`."""

        def group(width: int) -> Group:
            ranks = _living_group(layout, width, rank, members)
            return Group(ranks, rank, transports[ranks] if len(ranks) > 1 else None, count)

        return cls(layout, group(layout.attn_tp), group(layout.mlp_tp), group(layout.moe))

    @classmethod
    def alone(cls) -> Groups:
        """Those of a rank that has no peers."""
        return cls.connect(Layout(), 0, {}, CollectiveCount())


def shared_groups(layout: Layout, rank: int, members: Collection[int] | None = None) -> list[tuple[int, ...]]:
    """The groups of more than one rank that the rank is in, each once.

    `members` are the replicas that live (dp ranks), all of the layout by default.
    """
    widths = (layout.attn_tp, layout.mlp_tp, layout.moe)
    groups = dict.fromkeys(_living_group(layout, width, rank, members) for width in widths)
    return [ranks for ranks in groups if len(ranks) > 1]


def _living_group(layout: Layout, width: int, rank: int, members: Collection[int] | None) -> tuple[int, ...]:
    ranks = own_group(layout.groups(width), rank)
    return ranks if members is None else tuple(rank for rank in ranks if layout.dp_rank(rank) in members)


def _as_bytes(x: Tensor) -> Tensor:
    """A contiguous tensor [rows, ...] as uint8 [rows, bytes of a row]; the two share their memory."""
    return x.view(x.shape[0], math.prod(x.shape[1:])).view(torch.uint8)
