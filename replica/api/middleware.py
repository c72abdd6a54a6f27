"""What every request of a replica passes through: its id, its count, errors as JSON, the API key."""

from __future__ import annotations

import hmac
import logging
import re
import uuid
from typing import Final

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from proxy.protocol import REQUEST_ID_HEADER, VALID_REQUEST_ID
from replica.api.http_io import error_response, http_error
from replica.api.messages_answers import error_body
from replica.api.metrics import Metrics
from replica.errors import RequestError, Unauthorized

logger = logging.getLogger(__name__)

CLIENT_CLOSED: Final = 499  # nginx's status for a client that left; seen in the metrics only
REQUEST_ID: Final = web.RequestKey("request_id", str)
MESSAGES_PATH: Final = "/v1/messages"
_VALID_ID: Final = re.compile(VALID_REQUEST_ID)
_GUARDED: Final = ("/v1/", "/tokenize", "/detokenize")


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its id: the client's (or the proxy's) if it is one, else a new one."""
    request[REQUEST_ID] = _id_of(request)
    return await handler(request)


async def show_id(request: web.Request, response: web.StreamResponse) -> None:
    """Puts the request's id into the answer's headers."""
    # aiohttp refuses what is wrong with `Expect` before any middleware runs.
    response.headers[REQUEST_ID_HEADER] = request[REQUEST_ID] if REQUEST_ID in request else _id_of(request)


def _id_of(request: web.Request) -> str:
    given = request.headers.get(REQUEST_ID_HEADER, "")
    return given if _VALID_ID.fullmatch(given) else uuid.uuid4().hex


@web.middleware
async def errors_as_json(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns what a handler raises into the API's error body."""
    try:
        return await handler(request)
    except RequestError as err:
        return _error_response(request, err)
    except web.HTTPException as err:
        return http_error(err)
    except Exception:
        logger.exception("request failed path=%s request_id=%s", request.path, request[REQUEST_ID])
        return _error_response(request, RequestError("internal error"))


def count_answers(metrics: Metrics) -> Middleware:
    """A middleware that counts answers by route and status."""

    @web.middleware
    async def count(request: web.Request, handler: Handler) -> web.StreamResponse:
        status = CLIENT_CLOSED
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            metrics.answered(path=resource.canonical if resource else "", status=status)

    return count


def authorize_with(api_key: str) -> Middleware:
    """A middleware that asks for the API key where answers are made, if there is one."""

    @web.middleware
    async def authorize(request: web.Request, handler: Handler) -> web.StreamResponse:
        if api_key and request.path.startswith(_GUARDED) and not _shows(request, api_key):
            raise Unauthorized("the API key is missing or wrong; send it as 'Authorization: Bearer ...'")
        return await handler(request)

    return authorize


def _shows(request: web.Request, api_key: str) -> bool:
    """Whether the request has the key, in OpenAI's header or in Anthropic's."""
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer":
        shown = request.headers.get("X-Api-Key", "")
    # surrogateescape: aiohttp's stand-in for header bytes that are not UTF-8
    return hmac.compare_digest(shown.strip().encode(errors="surrogateescape"), api_key.encode())


def _error_response(request: web.Request, err: RequestError) -> web.Response:
    return error_response(err, error_body(err) if request.path.startswith(MESSAGES_PATH) else err.body())
