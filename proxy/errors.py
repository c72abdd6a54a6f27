"""Errors of the proxy, and what a client or operator sees.

ProxyError
├── ConfigError                exit code 2 and one line; nothing was started
├── JoinRefused                the replica gets Refused with the reason, and the connection ends
├── Malformed                  a body whose framing is broken; BadRequest or UpstreamFailed, by who sent it
└── RequestError               OpenAI's error body, or Anthropic's
    ├── BadRequest             400, do not retry
    ├── Unauthorized           401
    ├── UnknownModel           404, code model_not_found: replicas are live, but none serves that model
    ├── BodyTooLarge           413
    ├── ExpectationFailed      417: an Expect that is not 100-continue
    ├── KeyOverLimit           429 with Retry-After: the API key's own limit
    ├── HeadTooLarge           431
    ├── UpstreamFailed         502: the replica broke off; it may have done the work, so the proxy does not repeat it
    │   ├── ConnectFailed      never seen by a client: nothing was sent, so another replica is tried
    │   ├── GarbledAnswer      what the replica sent is no HTTP
    │   ├── NotBegun           never seen by a client while another replica can be tried: this one did not begin it
    │   └── ReplicaLost        code replica_lost, mostly as the last event of a stream: the replica will not finish this
    │                          answer; asking again is safe
    ├── NoReplicaAvailable     503 with Retry-After: nobody is live
    │   └── Overloaded         503 with Retry-After: the queue is full, or the wait in it was too long
    └── UpstreamTimeout        504: the replica accepted the request and then sent nothing for too long
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

_ANTHROPIC_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    417: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ProxyError(Exception):
    """Root of everything that this package raises on purpose."""


class ConfigError(ProxyError):
    """A setting that cannot be served, with the value, the limit and the remedy."""


class JoinRefused(ProxyError):
    """A Hello that cannot be accepted; the message goes to the replica."""


class Malformed(ProxyError):
    """The framing of a message's body is broken."""


class RequestError(ProxyError):
    """One request's own failure."""

    status: ClassVar[int] = 500
    kind: str = "server_error"
    code: ClassVar[str | None] = None

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        return error_body(str(self), kind=self.kind, code=self.code)

    def anthropic_body(self) -> dict[str, Any]:
        """The error in Anthropic's shape, for /v1/messages."""
        return {
            "type": "error",
            "error": {"type": _ANTHROPIC_TYPES.get(self.status, "api_error"), "message": str(self)},
        }

    def headers(self) -> dict[str, str]:
        """Headers that the answer needs beside the body."""
        return {}


class BadRequest(RequestError):
    """The request is wrong in itself."""

    status = 400
    kind = "invalid_request_error"


class Unauthorized(RequestError):
    """The API key or the proxy's token is missing or wrong."""

    status = 401
    kind = "invalid_request_error"
    code = "invalid_api_key"

    def headers(self) -> dict[str, str]:
        """The scheme that is wanted."""
        return {"WWW-Authenticate": "Bearer"}


class UnknownModel(RequestError):
    """Replicas are live, but none of them serves the model."""

    status = 404
    kind = "invalid_request_error"
    code = "model_not_found"


class BodyTooLarge(RequestError):
    """The body is over --max-body-mb."""

    status = 413
    kind = "invalid_request_error"


class ExpectationFailed(RequestError):
    """The client expects what this proxy does not know."""

    status = 417
    kind = "invalid_request_error"


class KeyOverLimit(RequestError):
    """The API key has as much in flight as it may."""

    status = 429
    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, of: str) -> None:
        """`of` is what there is too much of: requests or tokens. OpenAI names the error's type after it."""
        super().__init__(message)
        self.kind = of

    def headers(self) -> dict[str, str]:
        """When to ask again."""
        return {"Retry-After": "1"}


class HeadTooLarge(RequestError):
    """The request's head is over the limit."""

    status = 431
    kind = "invalid_request_error"


class UpstreamFailed(RequestError):
    """The replica ended the connection before its answer began."""

    status = 502
    code = "upstream_failed"


class ConnectFailed(UpstreamFailed):
    """The replica never accepted the connection, so the request is safe to send elsewhere."""

    code = "connect_failed"


class GarbledAnswer(UpstreamFailed):
    """What the replica sent is no HTTP/1.1."""


class NotBegun(UpstreamFailed):
    """The replica said that it did not begin the request."""

    code = "not_begun"


class ReplicaLost(UpstreamFailed):
    """The replica that worked on the answer is gone, or stopped; another one could go on with it."""

    code = "replica_lost"


class NoReplicaAvailable(RequestError):
    """Nobody can serve the request now."""

    status = 503
    kind = "service_unavailable"
    code = "no_replica_available"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def headers(self) -> dict[str, str]:
        """When to ask again."""
        return {"Retry-After": str(self.retry_after_s)}


class Overloaded(NoReplicaAvailable):
    """Those who can serve the request have too much to do."""

    code = "overloaded"


class UpstreamTimeout(RequestError):
    """The replica accepted the request, but its answer did not come in time."""

    status = 504
    code = "upstream_timeout"


def error_body(message: str, *, kind: str, code: str | None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
