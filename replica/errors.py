"""Errors of the replica, and what a client or operator sees.

ReplicaError
├── ConfigError            exit code 2 and one line; nothing was started
│   └── CheckpointError    the same, for a missing, damaged or unsupported checkpoint
├── PeerError              a rank cannot be connected with the others of its group: its process exits 1
├── GroupLost              the group steps no more, or there is none to join: as WorkerFailed
│   └── CutOff             the group goes on without this replica: it was evicted, or finds no master
├── WorkerFailed           a rank's process died, froze or raised: its requests are Interrupted, the process exits 1
├── CollectiveFailed       a collective of a step raised and no rank here has died: the group's clock says what follows
└── RequestError           OpenAI's error body; nothing else notices
    ├── BadRequest         400, do not retry
    │   ├── GrammarRefused 400, a schema that is no schema, cannot be met, or asks for too much work
    │   ├── GrammarFailed  400, code grammar_failed, in mid-answer: it cannot follow its grammar, wherever it runs
    │   └── ContextTooLong 400, code context_length_exceeded
    ├── Unauthorized       401
    ├── UnknownModel       404
    ├── NotStored          404, an earlier response is asked for
    ├── ClientTooSlow      408, the body did not come
    ├── BodyTooLarge       413
    └── Unavailable        503 with Retry-After and X-Not-Begun: full, loading, draining; retry, elsewhere if possible
        └── Interrupted    503 with Retry-After, code replica_lost: the replica stopped or was lost meanwhile
"""

from __future__ import annotations

from typing import Any, ClassVar


class ReplicaError(Exception):
    """Root of everything that this package raises on purpose."""


class ConfigError(ReplicaError):
    """A setting that cannot be served, with the value, the limit and the remedy."""


class CheckpointError(ConfigError):
    """The checkpoint is missing, damaged, or of a kind that is not supported."""


class PeerError(ReplicaError):
    """A rank cannot be connected with the others of its group."""


class GroupLost(ReplicaError):
    """The group steps no more, or could not be joined. The message names who is at fault."""


class CutOff(GroupLost):
    """The group may go on, but without this replica."""


class WorkerFailed(ReplicaError):
    """A rank's process died, froze or raised."""


class CollectiveFailed(ReplicaError):
    """A collective of a step raised, as it does when a peer is gone. No rank of this replica has died."""


class RequestError(ReplicaError):
    """One request's own failure. `param` names the field at fault."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class BadRequest(RequestError):
    """The request is wrong in itself."""

    status = 400
    kind = "invalid_request_error"


class ContextTooLong(BadRequest):
    """The prompt leaves no room for an answer."""

    code = "context_length_exceeded"


class GrammarRefused(BadRequest):
    """A grammar cannot be compiled within the limits."""


class GrammarFailed(BadRequest):
    """An answer cannot go on, here or elsewhere: its grammar takes too much work there. A retry would do the same."""

    code = "grammar_failed"


class Unauthorized(RequestError):
    """The API key is missing or wrong."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"


class UnknownModel(RequestError):
    """The request names a model that is not served here."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class NotStored(RequestError):
    """The request is about an earlier response, and none is kept."""

    status = 404
    kind = "invalid_request_error"
    code = "response_not_found"


class ClientTooSlow(RequestError):
    """The client stopped sending its body for --client-timeout-s."""

    status = 408
    kind = "invalid_request_error"


class BodyTooLarge(RequestError):
    """The body is over --max-body-mb."""

    status = 413
    kind = "invalid_request_error"


class Unavailable(RequestError):
    """The replica cannot take the request now, and has done nothing of it."""

    status = 503
    kind = "service_unavailable"


class Interrupted(Unavailable):
    """The replica stopped, or was lost, while the request ran. Another one can go on with it."""

    code = "replica_lost"


def first_error(errors: BaseExceptionGroup[Any]) -> BaseException:
    """One of the errors of a group of tasks: they have one cause, seen by several of them."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
