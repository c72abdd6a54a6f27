"""Errors of the proxy, and what a client or operator sees.

ProxyError
├── ConfigError                exit code 2 and one line; nothing was started
├── JoinRefused                the replica gets Refused with the reason, and the connection ends
└── RequestError               OpenAI's error body
    ├── BadRequest             400, do not retry
    ├── Unauthorized           401
    ├── UnknownModel           404, code model_not_found: replicas are live, but none serves that model
    ├── BodyTooLarge           413
    ├── UpstreamFailed         502: the replica broke off; it may have done the work, so the proxy does not repeat it
    │   └── ConnectFailed      never seen by a client: nothing was sent, so another replica is tried
    ├── NoReplicaAvailable     503 with Retry-After
    └── UpstreamTimeout        504: the replica accepted the request and then sent nothing for too long
"""

from __future__ import annotations

from typing import Any, ClassVar


class ProxyError(Exception):
    """Root of everything that this package raises on purpose."""


class ConfigError(ProxyError):
    """A setting that cannot be served, with the value, the limit and the remedy."""


class JoinRefused(ProxyError):
    """A Hello that cannot be accepted; the message goes to the replica."""


class RequestError(ProxyError):
    """One request's own failure."""

    status: ClassVar[int] = 500
    kind: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = None

    def body(self) -> dict[str, Any]:
        """The error in OpenAI's shape."""
        return error_body(str(self), kind=self.kind, code=self.code)

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


class UpstreamFailed(RequestError):
    """The replica ended the connection before its answer began."""

    status = 502
    kind = "upstream_error"
    code = "upstream_failed"


class ConnectFailed(UpstreamFailed):
    """The replica never accepted the connection, so the request is safe to send elsewhere."""

    code = "connect_failed"


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


class UpstreamTimeout(RequestError):
    """The replica accepted the request, but its answer did not come in time."""

    status = 504
    kind = "upstream_error"
    code = "upstream_timeout"


def error_body(message: str, *, kind: str, code: str | None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
