"""What each rank makes of a frame that all ranks of its replica get: whose tokens are whose, and which are sampled."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
import pytest
import torch

from replica.errors import PeerError
from replica.frames import HEADER, Blobs, Frame, FrameError, Init, Regroup, StepInput, decode, encode
from replica.groups import CollectiveCount, Groups, shared_groups
from replica.layout import Layout
from replica.step_tensors import StepTensors
from tests.layout_driver import MemoryTransport
from tests.step_driver import CPU, Driven, make_frame

LAYOUT: Final = Layout.resolve(dp=2, mlp_tp=4, moe_tp=2, ep=1)


def groups_of(rank: int) -> Groups:
    """The rank's groups, whose transports nobody uses."""
    transports = {ranks: MemoryTransport(None, 0) for ranks in shared_groups(LAYOUT, rank)}  # type: ignore[arg-type]
    return Groups.connect(LAYOUT, rank, transports, CollectiveCount())


def frame_of(num_tokens: int, sample_rows: list[int], group_tokens: list[int]) -> StepInput:
    s = Driven(list(range(num_tokens)), num_tokens)
    frame = make_frame([s], {s: num_tokens}, [0])
    return replace(frame, sample_rows=np.array(sample_rows, np.int32), group_tokens=np.array(group_tokens, np.int32))


def test_rows_are_the_tokens_that_each_rank_of_a_group_owns() -> None:
    step = StepTensors.from_frame(frame_of(5, [4], [5, 2]), CPU, groups_of(0))
    assert step.attention_rows == (3, 2)
    assert step.mlp_rows == (3, 2, 1, 1)
    assert step.moe_rows == (3, 2)
    assert len(step.token_ids) == 5  # all ranks of a replica see all its tokens


@pytest.mark.parametrize(
    ("sample_rows", "first", "second"),
    [([0, 2, 3, 4], [0, 2], [0, 1]), ([4, 4], [], [1, 1]), ([], [], []), ([2], [2], [])],
)
def test_each_rank_picks_the_sampled_tokens_that_it_owns(
    sample_rows: list[int], first: list[int], second: list[int]
) -> None:
    for rank, expected in ((0, first), (1, second)):
        step = StepTensors.from_frame(frame_of(5, sample_rows, [5, 0]), CPU, groups_of(rank))
        assert step.sample_rows.tolist() == expected and step.sample_rows.dtype == torch.int32
        assert step.sampled_rows == (len(first), len(second))


@pytest.mark.parametrize("tokens", [[4, 2], [5], [5, 2, 1], []])
def test_a_frame_that_disagrees_with_its_group_is_refused(tokens: list[int]) -> None:
    with pytest.raises(PeerError, match="step 0 of replica 0 has 5 tokens, its group agreed on"):
        StepTensors.from_frame(frame_of(5, [], tokens), CPU, groups_of(1))


def test_a_replica_alone_needs_no_agreement() -> None:
    step = StepTensors.from_frame(frame_of(5, [4], []), CPU, Groups.alone())
    assert step.attention_rows == step.mlp_rows == step.moe_rows == (5,)


def round_trip(frame: Frame) -> Frame:
    return decode(encode(frame)[HEADER.size :])


def test_blobs_and_layouts_travel_in_frames() -> None:
    for blobs in ((b"", b"\x00\xff", b"three"), ()):
        assert round_trip(Blobs(epoch=3, blobs=blobs)) == Blobs(epoch=3, blobs=blobs)
    init = Init(
        **{"model": "m", "dtype": "float32", "device": "cpu", "num_threads": 1, "block_size": 16},
        **{"kv_cache_bytes": 1, "max_model_len": 16, "max_num_seqs": 1, "max_num_batched_tokens": 16},
        **{"rank": 3, "dp": 2, "attn_tp": 2, "mlp_tp": 4, "moe_tp": 2},
    )
    received = round_trip(init)
    assert received == init and isinstance(received, Init) and received.layout == LAYOUT


@pytest.mark.parametrize("evicted", [(), ((1,),), ((1,), (0, 2)), ((1, 3, 4), (2,), (0,))])
def test_members_and_evictions_travel_in_frames(evicted: tuple[tuple[int, ...], ...]) -> None:
    for members in ((0,), (0, 5), (0, 5, 6), (0, 5, 6, 7)):
        regroup = Regroup(epoch=2**40, members=members, evicted=evicted)
        assert round_trip(regroup) == regroup


def test_a_frame_of_a_kind_that_nobody_knows_is_refused() -> None:
    with pytest.raises(FrameError):
        decode(b"\x91\x63")
