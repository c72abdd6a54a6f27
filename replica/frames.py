"""Frames between an engine and one of its workers: a 4-byte big-endian length, then a msgpack array.

    engine -> worker   Init        first, once
    worker -> engine   Progress    while weights load
    worker -> engine   Ready       loaded and warm: how many KV blocks there are
    engine -> worker   StepInput   one forward; may hold no tokens
    worker -> engine   StepOutput  what it sampled
    worker -> engine   Failed      Init or a step raised; the worker exits after it
    engine -> worker   Shutdown    exit 0

Arrays travel as raw little-endian bytes, so neither side walks them and nothing is pickled.
T tokens, S sequences, B the most blocks of a sequence in this step, N sampled rows.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Any, Final

import msgpack
import numpy as np
from numpy.typing import NDArray

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
    """What a worker needs to load its shard."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Weights read so far."""

    done_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The worker is warm."""

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
    sample_rows: I32  # [N] which of the T tokens are sampled after
    temperature: F32  # [N]
    top_k: I32  # [N]
    top_p: F32  # [N]
    min_p: F32  # [N]
    seeds: U64  # [N]
    choices: I32  # [N]
    output_indices: I32  # [N] 0 for a sequence's first output token


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The sampled tokens of one forward."""

    step: int
    token_ids: I32  # [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The worker cannot go on. `is_config` says that the user's setting or checkpoint is at fault."""

    error: str
    is_config: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Exit 0."""


Frame = Init | Progress | Ready | StepInput | StepOutput | Failed | Shutdown
_TYPES: Final[tuple[type[Frame], ...]] = (Init, Progress, Ready, StepInput, StepOutput, Failed, Shutdown)
_DTYPES: Final = ("<i4", "<i8", "<u8", "<f4")


def encode(frame: Frame) -> bytes:
    """One frame's bytes, length included."""
    values = [_pack(getattr(frame, field.name)) for field in fields(frame)]
    body: bytes = msgpack.packb([_TYPES.index(type(frame)), *values])
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"frame has {len(body)} bytes, limit is {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """The frame in a body, whose length was read before. Its arrays are read-only views of `body`'s copy."""
    try:
        kind, *values = msgpack.unpackb(body)
        cls = _TYPES[kind]
        names = [field.name for field in fields(cls)]
        frame: Frame = cls(**dict(zip(names, map(_unpack, values), strict=True)))
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as err:
        raise FrameError(f"not a frame: {err}") from err
    return frame


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_DTYPES.index(value.dtype.newbyteorder("<").str), list(value.shape), value.tobytes()]
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        kind, shape, raw = value
        return np.frombuffer(raw, dtype=_DTYPES[kind]).reshape(shape)
    return value
