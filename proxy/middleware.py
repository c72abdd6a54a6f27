"""What every route has in common: a request id, and errors in OpenAI's shape."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web
from aiohttp.typedefs import Handler

from proxy.errors import RequestError, error_body
from proxy.protocol import REQUEST_ID_HEADER, VALID_REQUEST_ID

logger = logging.getLogger(__name__)

REQUEST_ID: Final = web.RequestKey("request_id", str)
_VALID_ID: Final = re.compile(VALID_REQUEST_ID)


@web.middleware
async def identify(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Keeps the client's X-Request-Id or makes one, and shows it in the answer."""
    shown = request.headers.get(REQUEST_ID_HEADER, "")
    request[REQUEST_ID] = shown if _VALID_ID.fullmatch(shown) else uuid.uuid4().hex
    response = await handler(request)
    if not response.prepared:
        response.headers.setdefault(REQUEST_ID_HEADER, request[REQUEST_ID])
    return response


@web.middleware
async def shape_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a handler raises into an answer that OpenAI's clients understand."""
    try:
        return await handler(request)
    except RequestError as err:
        return _json(err.body(), err.status, err.headers())
    except web.HTTPException as err:  # of aiohttp's router: no such path, or no such method on it
        message = f"{request.method} {request.path} is not served here: {err.reason}"
        allowed = {"Allow": err.headers["Allow"]} if "Allow" in err.headers else {}
        code = "method_not_supported" if err.status == 405 else None
        return _json(error_body(message, kind="invalid_request_error", code=code), err.status, allowed)
    except Exception:
        if request.writer.output_size > 0:
            raise  # the answer has begun: aiohttp logs this and closes the connection
        logger.exception("request failed path=%s request_id=%s", request.path, request[REQUEST_ID])
        return _json(error_body("the proxy failed", kind="server_error", code=None), 500, {})


async def close_connection(request: web.Request, answer: web.StreamResponse) -> None:
    """For `app.on_response_prepare`: the next request on the connection could be for the data path, not for aiohttp."""
    if not isinstance(answer, web.WebSocketResponse):
        answer.force_close()
        answer.headers["Connection"] = "close"


def _json(body: dict[str, Any], status: int, headers: Mapping[str, str]) -> web.Response:
    return web.Response(text=json.dumps(body), status=status, headers=headers, content_type="application/json")
