"""Messages on the control connection between a replica and a proxy: msgpack frames on one WebSocket.

    replica -> proxy   Hello         first frame, once the replica is warm; again after every reconnect
    proxy -> replica   Welcome       the replica is routable from here on
    replica -> proxy   LoadReport    on change and at least every `report_interval_s` of the Welcome
    replica -> proxy   Leaving       no new requests please; what is running goes on
    proxy -> replica   Refused       the Hello cannot be accepted; the proxy closes after it

A frame is a msgpack map with the key `type` beside the message's own fields. The end of the connection means
that the replica is gone; silence for longer than the proxy's `heartbeat_timeout_s` means that it is suspect.

The upgrade request carries the proxy's token, if it has one, as `Authorization: Bearer TOKEN`; without it the
answer is 401. Frames are binary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgpack

PROTOCOL_VERSION: Final = 1
CONTROL_PATH: Final = "/nodes/control"
MAX_FRAME_BYTES: Final = 64 * 1024
REQUEST_ID_HEADER: Final = "X-Request-Id"
VALID_REQUEST_ID: Final = r"[\x21-\x7e]{1,128}"  # a pattern, for text or bytes; an id that is none is replaced
NOT_BEGUN_HEADER: Final = "X-Not-Begun"  # on a 503: nothing of the request was done, so another replica may have it
INTERRUPTED_HEADER: Final = "X-Interrupted"  # on a 503: it had begun, is lost here, and will not be gone on with


class ProtocolError(Exception):
    """The peer sent a frame that is not a message of this protocol. The connection is closed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A replica introduces itself. `url` is the address at which the proxy and others reach it.

    Each text has at most 256 characters, all of them printable. A replica id that a live replica at another URL has
    is refused; from the same URL it is a restart, and the newest wins.
    """

    version: int = PROTOCOL_VERSION
    replica_id: str
    incarnation: str  # random per life of the engine process
    url: str
    model: str  # the served model name
    model_hash: str  # equal for replicas that answer alike: config, tokenizer, template, dtype, weights' headers
    group: str  # replicas of a group step together; a replica of its own group is a group of one
    dp_rank: int
    max_model_len: int  # tokens, prompt and output together
    max_num_seqs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """The proxy accepted the Hello."""

    version: int = PROTOCOL_VERSION
    proxy_id: str  # random per life of the proxy
    report_interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """The proxy did not accept the Hello; `reason` is for the replica's log."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """What a replica is doing now; `sequence` grows by one with every report of this connection."""

    sequence: int
    running: int  # sequences in the batch
    waiting: int  # sequences not started
    queued_prefill_tokens: int
    free_blocks: int
    total_blocks: int
    step: int
    epoch: int
    # Replicas older than these two fields do not send them.
    # Its group changes its members: no new requests for a moment.
    is_reconfiguring: bool = field(default=False, metadata={"may_lack": True})
    # The dp ranks of its group that live in `epoch`; empty: not told. Who is not among them was evicted for good, and
    # what it was doing is void.
    members: list[int] = field(default_factory=list, metadata={"may_lack": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """The replica drains: it takes no new requests and closes when the running ones have ended."""

    reason: str


Message = Hello | Welcome | Refused | LoadReport | Leaving

_TYPES: Final[dict[str, type[Message]]] = {
    "hello": Hello,
    "welcome": Welcome,
    "refused": Refused,
    "load": LoadReport,
    "leaving": Leaving,
}
_NAMES: Final = {cls: name for name, cls in _TYPES.items()}
_FIELD_TYPES: Final = {cls: get_type_hints(cls) for cls in _TYPES.values()}


def encode(message: Message) -> bytes:
    """One frame's bytes."""
    packed: bytes = msgpack.packb({"type": _NAMES[type(message)], **asdict(message)})
    return packed


def decode(frame: bytes) -> Message:
    """The message in a frame. Unknown fields are ignored, so a newer peer may add some.

    Raises ProtocolError when the frame is no message: wrong msgpack, an unknown type, a missing or mistyped field.
    """
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"frame has {len(frame)} bytes, limit is {MAX_FRAME_BYTES}")
    try:
        raw = msgpack.unpackb(frame)
    except Exception as err:  # msgpack raises many unrelated types for malformed input
        raise ProtocolError(f"frame is not msgpack: {err}") from err
    kind = raw.get("type") if isinstance(raw, dict) else None
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ProtocolError(f"unknown message type {kind!r}")
    cls = _TYPES[kind]
    values: dict[str, Any] = {}
    for item in fields(cls):
        if item.name not in raw:
            if item.metadata.get("may_lack"):
                continue
            raise ProtocolError(f"{kind} lacks the field {item.name}")
        value, wanted = raw[item.name], _FIELD_TYPES[cls][item.name]
        if wanted is float and type(value) is int:
            value = float(value)
        if not _is_of(value, wanted):
            raise ProtocolError(f"{kind}.{item.name} is {type(value).__name__}, not {item.type}")
        values[item.name] = value
    return cls(**values)


def _is_of(value: Any, wanted: Any) -> bool:
    """Whether the value is exactly of a field's type."""
    if get_origin(wanted) is list:
        (element,) = get_args(wanted)
        return type(value) is list and all(type(each) is element for each in value)
    return type(value) is wanted
