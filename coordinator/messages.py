"""Messages between the members of a group and its master: a 4-byte big-endian length, then a msgpack array.

    master -> member   Challenge   first frame of a connection; its form is the same in every version
    member -> master   Hello       who the member is, how it is configured, and the proof that it knows the secret
    master -> member   Accepted    the master's own proof; or
    master -> member   Refused     why not; the master closes after it
    master -> member   Reconfigure an epoch begins, the first or the next; what was under way in the one before is void
    member -> master   Ready       weights are loaded; a blob for its peers (where its ranks can be reached)
    master -> member   Go          all are ready: the blobs of all; steps of the epoch, from 0, may be arrived for
    member -> master   Arrive      what the member would run in the next step; stands until that step is released
    master -> member   Release     run this step, with exactly these tokens
    member -> master   Done        all ranks of the member have reported the step: its batch is committed
    member -> master   Fault       a collective raised; the member waits for the next Reconfigure
    both               Beat        4 times a second, twice while nobody has work, whatever else happens
    master -> member   Evicted     the group goes on without this member; the master closes after it
    master -> member   Failed      the group steps no more

A frame's array is the message's number, then its fields in order. Counts and steps are integers from 0 up, epochs from
1: epoch 0 is none.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import Any, Final, get_type_hints

import msgpack

from coordinator.errors import ProtocolError

PROTOCOL_VERSION: Final = 2
HEADER: Final = struct.Struct(">I")
MAX_HELLO_BYTES: Final = 16 * 1024  # of a frame from a peer that has not proved itself
MAX_FRAME_BYTES: Final = 4 * 1024 * 1024
MAX_BLOBS_BYTES: Final = MAX_FRAME_BYTES // 2  # of all members' blobs together
MAX_INT: Final = 2**63 - 1
BEAT_INTERVAL_S: Final = 0.25  # while there is something to wait for
PARKED_BEAT_S: Final = 2 * BEAT_INTERVAL_S  # while nobody has work, so that an idle group costs little
MAX_TICK_S: Final = 4 * BEAT_INTERVAL_S  # ticks further apart than this mean that whoever ticks was paused

# Commands are names that mean something to the members. The clock itself knows one of them.
STOP: Final = "stop"  # the step that carries it is the group's last; members leave after it


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """The master greets a connection. `nonce` is random, for the member to sign."""

    version: int = PROTOCOL_VERSION
    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A member asks to be one of the group. `nonce` and `proof` are filled in by handshake.sign."""

    group: str
    replica_id: str
    incarnation: str  # random per life of the process
    dp_rank: int
    config: dict[str, str]  # every setting that must be the same in all members, the layout's degrees included
    url: str  # for logs
    epoch: int = 0  # the last that it was told of: 0 in a new process, more in one whose master was lost
    nonce: bytes = b""
    proof: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """The Hello was in order; the member waits for a Reconfigure."""

    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The Hello was not in order; `reason` names the field."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconfigure:
    """An epoch begins: a member drops what it has not committed, and makes itself ready. A newer one supersedes.

    Every tuple of this epoch that speaks of all members follows the order of `members`.
    """

    epoch: int
    members: tuple[int, ...]  # dp ranks that live, ascending
    evicted: tuple[tuple[int, ...], ...]  # dp ranks of each eviction, in order, since the group was whole
    kinds: tuple[str, ...]  # of each in `evicted`, one after the other, what spoke against it, in a word (verdicts.py)
    reason: str  # why, for logs and operators; names who was evicted
    detect_ms: int  # from the last sign of life, or of progress, of who was evicted until the verdict
    agree_ms: int  # from the verdict until it was committed


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The member could step. `blob` is opaque here."""

    epoch: int
    blob: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Go:
    """All members are ready."""

    epoch: int
    blobs: tuple[bytes, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrive:
    """The member is ready for `step` and would run these tokens; with none, and no wants, it is idle."""

    epoch: int
    step: int
    decode_tokens: int
    prefill_tokens: int
    wants: tuple[str, ...]  # commands that the member asks the group for

    @property
    def has_work(self) -> bool:
        """Whether this arrival alone is a reason to step."""
        return bool(self.decode_tokens or self.prefill_tokens or self.wants)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """Every member runs one forward for `step`, with exactly its counts, after it has acted on `commands`."""

    epoch: int
    step: int
    decode_tokens: tuple[int, ...]
    prefill_tokens: tuple[int, ...]  # all 0 where prefills are held back in this step
    commands: tuple[str, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        """Tokens of each member in this step."""
        return tuple(d + p for d, p in zip(self.decode_tokens, self.prefill_tokens, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """All ranks of the member have reported `step`: its batch is committed."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A collective of `step` raised; the member waits for the verdict."""

    epoch: int
    step: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The sender's process lives. `collectives` counts, for each rank of a member, those entered in this epoch."""

    epoch: int
    step: int
    collectives: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evicted:
    """The member is not one of `epoch`, nor of any later one."""

    epoch: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """The master's verdict; `reason` names the member at fault."""

    epoch: int
    step: int
    reason: str


MemberMessage = Ready | Arrive | Done | Fault | Beat
ClockMessage = Reconfigure | Go | Release | Evicted | Failed
Message = Challenge | Hello | Accepted | Refused | MemberMessage | ClockMessage

_TYPES: Final[tuple[type[Message], ...]] = (
    *(Challenge, Hello, Accepted, Refused, Reconfigure, Ready, Go),
    *(Arrive, Release, Done, Fault, Beat, Evicted, Failed),
)
_NUMBERS: Final = {cls: number for number, cls in enumerate(_TYPES)}
_FIELDS: Final = {cls: tuple(field.name for field in fields(cls)) for cls in _TYPES}


def _is_int(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_INT


def _is_str(value: Any) -> bool:
    return type(value) is str


def _is_bytes(value: Any) -> bool:
    return type(value) is bytes


def _is_map(value: Any) -> bool:
    return type(value) is dict and all(_is_str(k) and _is_str(v) for k, v in value.items())


def _is_tuple_of(is_item: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: type(value) is tuple and all(map(is_item, value))


_CHECK_OF_TYPE: Final[dict[Any, Callable[[Any], bool]]] = {
    int: _is_int,
    str: _is_str,
    bytes: _is_bytes,
    dict[str, str]: _is_map,
    tuple[int, ...]: _is_tuple_of(_is_int),
    tuple[tuple[int, ...], ...]: _is_tuple_of(_is_tuple_of(_is_int)),
    tuple[str, ...]: _is_tuple_of(_is_str),
    tuple[bytes, ...]: _is_tuple_of(_is_bytes),
}
_CHECKS: Final = {
    cls: tuple((name, _CHECK_OF_TYPE[get_type_hints(cls)[name]]) for name in names) for cls, names in _FIELDS.items()
}


def encode(message: Message) -> bytes:
    """One frame's bytes, length included. Raises ProtocolError when the message is over MAX_FRAME_BYTES."""
    cls = type(message)
    body: bytes = msgpack.packb([_NUMBERS[cls], *[getattr(message, name) for name in _FIELDS[cls]]])
    if len(body) > MAX_FRAME_BYTES:
        raise ProtocolError(f"{cls.__name__} has {len(body)} bytes, limit is {MAX_FRAME_BYTES}")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """The message in a frame's body. Raises ProtocolError for anything but exactly a message of this version."""
    try:
        raw = msgpack.unpackb(body, use_list=False)
    except Exception as err:  # msgpack raises many unrelated types for malformed input
        raise ProtocolError(f"frame is not msgpack: {err}") from err
    if type(raw) is not tuple or not raw or not _is_int(raw[0]) or raw[0] >= len(_TYPES):
        raise ProtocolError("frame is not a message")
    cls, values = _TYPES[raw[0]], raw[1:]
    checks = _CHECKS[cls]
    if len(values) != len(checks):
        raise ProtocolError(f"{cls.__name__} has {len(values)} fields, not {len(checks)}")
    for value, (name, is_valid) in zip(values, checks, strict=True):
        if not is_valid(value):
            raise ProtocolError(f"{cls.__name__}.{name} is not valid: {type(value).__name__}")
    message: Message = cls(**dict(zip(_FIELDS[cls], values, strict=True)))
    return message


class FrameBuffer:
    """Cuts a connection's bytes into messages. Holds at most one frame of `limit_bytes` and what came with it."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._bytes = bytearray()

    def feed(self, received: bytes) -> Iterator[Message]:
        """The messages that are now whole. Raises ProtocolError at a frame that is too long or no message."""
        self._bytes += received
        while len(self._bytes) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes)
            if length > self.limit_bytes:
                raise ProtocolError(f"frame has {length} bytes, limit is {self.limit_bytes}")
            end = HEADER.size + length
            if len(self._bytes) < end:
                return
            body = bytes(self._bytes[HEADER.size : end])
            del self._bytes[:end]
            yield decode(body)
