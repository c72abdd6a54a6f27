"""Who may ask: one secret for the OpenAI routes, one for the control side."""

from __future__ import annotations

import hmac

from aiohttp import web

from proxy.errors import Unauthorized


def check_bearer(request: web.Request, secret: str, what: str) -> None:
    """Raises Unauthorized unless the request shows the secret; an empty secret admits everyone.

    The time taken does not depend on how much of the secret is right.
    """
    if not secret:
        return
    scheme, _, shown = request.headers.get("Authorization", "").partition(" ")
    # surrogateescape: aiohttp's stand-in for header bytes that are not UTF-8
    matches = hmac.compare_digest(shown.strip().encode(errors="surrogateescape"), secret.encode())
    if scheme.lower() != "bearer" or not matches:
        raise Unauthorized(f"send {what} as 'Authorization: Bearer ...'")
