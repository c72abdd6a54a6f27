"""Frames between an engine and one of its workers: a 4-byte big-endian length, then a msgpack array.

    engine -> worker   Init        first, once
    worker -> engine   Progress    while weights load
    worker -> engine   Blob        loaded; where the other ranks of its group can reach it; or, if it is alone, Ready
    engine -> worker   Blobs       those of all ranks
    worker -> engine   Ready       loaded, and connected with its peers: how many KV blocks there are
    engine -> worker   StepInput   one forward; may hold no tokens
    worker -> engine   StepOutput  what it sampled; or
    worker -> engine   StepDone    from the ranks of a replica that do not sample
    worker -> engine   Failed      Init or a step raised; the worker exits after it
    engine -> worker   Shutdown    exit 0

Arrays travel as raw little-endian bytes, so neither side walks them and nothing is pickled.
T tokens, S sequences, B the most blocks of a sequence in this step, N sampled rows.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field, fields
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

from replica.layout import Layout

FRAMES_VERSION: Final = 1
HEADER: Final = struct.Struct(">I")
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
U64 = NDArray[np.uint64]
F32 = NDArray[np.float32]


class FrameError(Exception):
    """The peer's bytes are not a frame of this version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Init:
    """What a worker needs to load its shard and to join its group."""

    version: int = FRAMES_VERSION
    model: str  # folder
    dtype: str  # bfloat16, float16 or float32
    device: str  # cpu or cuda:I
    num_threads: int  # on the CPU
    block_size: int
    kv_cache_bytes: int  # of this rank; the worker makes as many whole blocks as fit
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    rank: int = 0  # in the group
    dp: int = 1  # the degrees of `layout`
    attn_tp: int = 1
    mlp_tp: int = 1
    moe_tp: int = 1
    ep: int = 1
    peer_host: str = "127.0.0.1"  # this machine's address for the other ranks
    collective_timeout_s: float = 30.0  # the last resort against a peer that is gone: well above the deadlines
    count_fd: int = -1  # a file of one 64-bit count per local rank: collectives entered; -1: nobody asks

    @property
    def layout(self) -> Layout:
        """The group's layout. Raises ConfigError for degrees that do not fit together."""
        return Layout(dp=self.dp, attn_tp=self.attn_tp, mlp_tp=self.mlp_tp, moe_tp=self.moe_tp, ep=self.ep)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Weights read so far."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Where one rank can be reached (see groups.py)."""

    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Blobs:
    """The blobs of all ranks of the group."""

    blobs: tuple[bytes, ...]  # by rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Steps may come."""

    num_blocks: int
    weight_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One forward. Sequences of one token with history come first (`num_decodes` of them), then prefill chunks."""

    step: int
    num_decodes: int
    token_ids: I32  # [T]
    positions: I32  # [T]
    slots: I32  # [T] where each token's key and value go: block_id * block_size + offset
    query_starts: I32  # [S + 1] first token of each sequence, then T
    context_lens: I32  # [S] tokens in the cache after this step, this step's included
    block_tables: I32  # [S, B] block ids, 0 past a sequence's last
    sample_rows: I32  # [N] which of the T tokens are sampled after, ascending
    temperature: F32  # [N]
    top_k: I32  # [N]
    top_p: F32  # [N]
    min_p: F32  # [N]
    seeds: U64  # [N]
    choices: I32  # [N]
    output_indices: I32  # [N] 0 for a sequence's first output token
    # [dp] how many tokens each replica of the group has in this step; empty for a replica alone.
    group_tokens: I32 = field(default_factory=lambda: np.zeros(0, np.int32))


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The sampled tokens of one forward."""

    step: int
    token_ids: I32  # [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    """This rank's part of one forward is done."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The worker cannot go on. `is_config` says that the user's setting or checkpoint is at fault."""

    error: str
    is_config: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Exit 0."""


Frame = Init | Progress | Blob | Blobs | Ready | StepInput | StepOutput | StepDone | Failed | Shutdown
_TYPES: Final[tuple[type[Frame], ...]] = (
    *(Init, Progress, Blob, Blobs, Ready),
    *(StepInput, StepOutput, StepDone, Failed, Shutdown),
)
_NAMES: Final = {cls: [f.name for f in fields(cls)] for cls in _TYPES}
_DTYPES: Final = ("<i4", "<i8", "<u8", "<f4")


def encode(frame: Frame) -> bytes:
    """One frame's bytes, length included."""
    values = [_pack(getattr(frame, name)) for name in _NAMES[type(frame)]]
    body: bytes = msgpack.packb([_TYPES.index(type(frame)), *values])
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame has {len(body)} bytes, limit is {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """The frame in a body, whose length was read before. Its arrays are read-only views of `body`'s copy."""
    try:
        kind, *values = msgpack.unpackb(body)
        cls = _TYPES[kind]
        frame: Frame = cls(**dict(zip(_NAMES[cls], map(_unpack, values), strict=True)))
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as err:
        raise FrameError(f"not a frame: {err}") from err
    return frame


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_DTYPES.index(value.dtype.newbyteorder("<").str), list(value.shape), value.tobytes()]
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        if not value or isinstance(value[0], bytes):
            return tuple(value)  # of bytes; an array begins with the number of its dtype
        kind, shape, raw = value
        return np.frombuffer(raw, dtype=_DTYPES[kind]).reshape(shape)
    return value
