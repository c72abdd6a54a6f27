"""Frames between an engine and one of its workers: a 4-byte big-endian length, then a msgpack array.

    engine -> worker   Init        first, once
    worker -> engine   Progress    while weights load
    worker -> engine   Ready       loaded: how many KV blocks there are
    engine -> worker   Regroup     an epoch begins: which replicas live, and so what to take over of those that do not
    worker -> engine   Blob        that is loaded; where the other ranks of its group can reach it
    engine -> worker   Blobs       those of all living ranks; or a newer Regroup
    worker -> engine   Connected   with its peers: steps of the epoch may come
    engine -> worker   StepInput   one forward; may hold no tokens
    worker -> engine   StepOutput  what it sampled; or
    worker -> engine   StepDone    from the ranks of a replica that do not sample
    worker -> engine   Aborted     a step's collective, or connecting, failed or was cut off; only a Regroup may follow
    worker -> engine   Failed      anything else raised; the worker exits after it
    engine -> worker   Shutdown    exit 0

A rank without peers is ready for steps at once. A Regroup may come at any time after Ready; before it the engine puts
the epoch on the board (rank_board.py) and a byte into the lifeline, which ends the collective that the worker is in.
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

FRAMES_VERSION: Final = 2
HEADER: Final = struct.Struct(">I")
MAX_FRAME_BYTES: Final = 256 * 1024 * 1024

I32 = NDArray[np.int32]
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
    collective_timeout_s: float = 30.0  # the last resort against a peer that is gone: well above the deadlines
    peer_host: str = "127.0.0.1"  # this machine's address for the other ranks of the group

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
class Ready:
    """The rank's weights are loaded and its KV cache is there."""

    num_blocks: int
    weight_bytes: int
    load_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Regroup:
    """What was under way is void. The rank takes over its share of the lost blocks and connects with who lives."""

    epoch: int
    members: tuple[int, ...]  # dp ranks that live, ascending
    evicted: tuple[tuple[int, ...], ...]  # dp ranks of each eviction, in order, since the group was whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """Where one rank can be reached in an epoch (see rendezvous.py)."""

    epoch: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Blobs:
    """The blobs of all living ranks of the group."""

    epoch: int
    blobs: tuple[bytes, ...]  # in order of their ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Connected:
    """Steps of the epoch may come."""

    epoch: int
    reload_s: float  # spent on reading what lost replicas held
    weight_bytes: int  # with that


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted:
    """The rank and its peers did not finish something together. Nothing is wrong with the rank itself."""

    epoch: int
    step: int  # -1: they did not connect
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitEdits:
    """What is done to logits before they are sampled, in this order. `..._rows` are among the step's N rows.

    A biases, P rows with penalties, C tokens that those have seen, M rows with masks, W = cdiv(V, 32) words.
    """

    bias_rows: I32  # [A]
    bias_ids: I32  # [A] token ids
    biases: F32  # [A] added to the logit; -inf forbids the token
    penalty_rows: I32  # [P]
    repetition: F32  # [P]
    presence: F32  # [P]
    frequency: F32  # [P]
    seen_rows: I32  # [C] which of the P
    seen_ids: I32  # [C] token ids, each once a row
    seen_counts: I32  # [C] times in the output; 0 for a token of the prompt alone
    mask_rows: I32  # [M]
    masks: I32  # [M, W] one bit a token, the lowest first; 0 forbids it


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobsWanted:
    """Of which of the step's N rows log probabilities are wanted."""

    rows: I32  # [L] ascending
    targets: I32  # [L] the token of interest; -1 for the one that is sampled
    num_top: int  # how many of the most likely tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprobs:
    """Log probabilities by the unedited logits: first the token of interest, then the most likely, K in all."""

    token_ids: I32  # [L, K]
    values: F32  # [L, K]


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
    # [N] after which of the T tokens logits are wanted, ascending: where a token is sampled, and prompt tokens whose
    # log probabilities are asked for (those are sampled greedily, to no use)
    sample_rows: I32
    temperature: F32  # [N]
    top_k: I32  # [N]
    top_p: F32  # [N]
    min_p: F32  # [N]
    seeds: U64  # [N]
    choices: I32  # [N]
    output_indices: I32  # [N] 0 for a sequence's first output token
    # [dp] how many tokens each replica of the group has in this step; empty for a replica alone.
    group_tokens: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    edits: LogitEdits | None = None
    logprobs: LogprobsWanted | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """The sampled tokens of one forward, and the log probabilities that it was asked for."""

    step: int
    token_ids: I32  # [N]
    logprobs: Logprobs | None = None


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


Frame = (
    Init
    | Progress
    | Ready
    | Regroup
    | Blob
    | Blobs
    | Connected
    | StepInput
    | StepOutput
    | StepDone
    | Aborted
    | Failed
    | Shutdown
)
_TYPES: Final[tuple[type[Frame], ...]] = (
    *(Init, Progress, Ready, Regroup, Blob, Blobs, Connected),
    *(StepInput, StepOutput, StepDone, Aborted, Failed, Shutdown),
)
_NESTED: Final = {cls.__name__: cls for cls in (LogitEdits, LogprobsWanted, Logprobs)}
_NAMES: Final = {cls: [f.name for f in fields(cls)] for cls in (*_TYPES, *_NESTED.values())}
_DTYPES: Final = ("<i4", "<i8", "<u8", "<f4")


def encode(frame: Frame) -> bytes:
    """One frame's bytes, length included."""
    values = [_pack(getattr(frame, name)) for name in _NAMES[type(frame)]]
    body: bytes = msgpack.packb([_TYPES.index(type(frame)), *values])
    _check_length(len(body))
    return HEADER.pack(len(body)) + body


def body_length(header: bytes) -> int:
    """The bytes of the body that follows these HEADER.size bytes. Raises FrameError when it is over the limit."""
    (length,) = HEADER.unpack(header)
    _check_length(length)
    return int(length)


def decode(body: bytes) -> Frame:
    """The frame in a body, whose length was read before. Its arrays are read-only views of `body`'s copy."""
    try:
        kind, *values = msgpack.unpackb(body)
        cls = _TYPES[kind]
        frame: Frame = cls(**dict(zip(_NAMES[cls], map(_unpack, values), strict=True)))
    except (ValueError, TypeError, LookupError, msgpack.UnpackException) as err:
        raise FrameError(f"not a frame: {err}") from err
    return frame


def _check_length(length: int) -> None:
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"frame has {length} bytes, limit is {MAX_FRAME_BYTES}")


def _pack(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return [_DTYPES.index(value.dtype.newbyteorder("<").str), list(value.shape), value.tobytes()]
    if isinstance(value, LogitEdits | LogprobsWanted | Logprobs):
        return {type(value).__name__: [_pack(getattr(value, name)) for name in _NAMES[type(value)]]}
    return value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        if len(value) == 3 and isinstance(value[1], list) and isinstance(value[2], bytes):
            kind, shape, raw = value
            return np.frombuffer(raw, dtype=_DTYPES[kind]).reshape(shape)
        return tuple(map(_unpack, value))
    if isinstance(value, dict):
        ((name, values),) = value.items()
        cls = _NESTED[name]
        return cls(**dict(zip(_NAMES[cls], map(_unpack, values), strict=True)))
    return value
