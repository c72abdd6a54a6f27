"""Which web pages of other origins a browser may let read answers (--cors-origin)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from aiohttp import web

PREFLIGHT_S: Final = 3600  # for which a browser may remember what it was told


class Cors:
    """The origins that one proxy allows; `*` allows all."""

    def __init__(self, origins: Collection[str]) -> None:
        self._origins = frozenset(origins)

    @property
    def is_on(self) -> bool:
        """Whether any origin is allowed."""
        return bool(self._origins)

    def lines(self, origin: bytes | None) -> list[bytes]:
        """The header lines of an answer to a page of this origin, for the data path."""
        if origin is None or not self._origins:
            return []
        return [f"{name}: {value}".encode("latin-1") for name, value in self._headers(origin.decode("latin-1")).items()]

    async def on_prepare(self, request: web.Request, answer: web.StreamResponse) -> None:
        """For `app.on_response_prepare`: the same for what aiohttp answers."""
        origin = request.headers.get("Origin")
        if origin is not None:
            answer.headers.update(self._headers(origin))

    async def preflight(self, request: web.Request) -> web.Response:
        """OPTIONS on any route."""
        return web.Response(
            status=204,
            headers={
                "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
                "Access-Control-Allow-Headers": request.headers.get("Access-Control-Request-Headers", "*"),
                "Access-Control-Max-Age": str(PREFLIGHT_S),
            },
        )

    def _headers(self, origin: str) -> Mapping[str, str]:
        allows_any = "*" in self._origins
        if not (allows_any or origin in self._origins):
            return {}
        return {
            "Access-Control-Allow-Origin": "*" if allows_any else origin,
            "Access-Control-Expose-Headers": "X-Request-Id, Retry-After",
            "Vary": "Origin",
        }
