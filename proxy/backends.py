"""Servers that do not join by themselves (`--backend URL`, `POST /nodes/add`).

They are asked side by side whether they live and what they serve.

A look is GET /health, where the server has it, then GET /v1/models. The first good look makes a backend routable;
PROBE_FAILURES_OUT bad ones in a row put it out and PROBE_SUCCESSES_IN good ones bring it back. A refused connection
puts it out at once, here as on the data path.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterable
from typing import Any, Final

import aiohttp

from proxy.config import ProxyConfig
from proxy.registry import Registry
from proxy.replicas import ModelObjects, Replica, ReplicaState

logger = logging.getLogger(__name__)

NO_SUCH_ROUTE: Final = (404, 405, 501)  # a server without /health is judged by /v1/models alone


class ProbeFailed(Exception):
    """A look at a backend found no working server; the message says what it found."""


class Backends:
    """The probes of one proxy's backends."""

    def __init__(self, *, config: ProxyConfig, registry: Registry, clock: Callable[[], float]) -> None:
        self._config = config
        self._registry = registry
        self._clock = clock
        self._known: dict[str, Replica] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._session: aiohttp.ClientSession | None = None

    async def run(self) -> None:
        """Watches all backends, also those added meanwhile, until cancelled."""
        async with probe_session() as self._session, asyncio.TaskGroup() as self._tasks:
            for url in self._config.backend_urls:
                self.add(url)
            await asyncio.Event().wait()  # those added later need the group

    def add(self, url: str, models: Iterable[str] = ()) -> None:
        """Watches one more backend; with `models`, requests may go to it before its first look."""
        assert self._tasks is not None and self._session is not None, "backends are added while they are watched"
        if url in self._known:
            return
        backend = self._known[url] = self._registry.add_backend(url, now_s=self._clock())
        objects = {model: {"id": model, "object": "model", "created": 0, "owned_by": url} for model in models}
        if objects:
            self._registry.probe_succeeded(backend, objects, now_s=self._clock())
        self._tasks.create_task(self._watch(backend, self._session))

    def remove(self, url: str) -> bool:
        """Forgets a backend; False if it is none."""
        self._registry.remove_backend(url)
        return self._known.pop(url, None) is not None

    async def terminate(self, url: str) -> str:
        """Asks a server to end itself, as LMDeploy's do on GET /terminate; returns why it will not, or nothing."""
        assert self._session is not None
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                async with self._session.get(f"{url}/terminate", headers=self._headers()) as response:
                    return "" if response.status == 200 else f"it answered {response.status}"
        except (TimeoutError, aiohttp.ClientError, OSError, ValueError) as err:
            return str(err) or "no answer"

    async def _watch(self, backend: Replica, session: aiohttp.ClientSession) -> None:
        while self._known.get(backend.url) is backend:
            before = self._registry.state(backend, now_s=self._clock())
            finding = await self._look(backend, session)
            after = self._registry.state(backend, now_s=self._clock())
            if after is not before:
                level = logging.INFO if after is ReplicaState.LIVE else logging.WARNING
                logger.log(level, "backend %s url=%s finding=%r", after, backend.url, finding)
            await asyncio.sleep(self._config.probe_interval_s)

    async def _look(self, backend: Replica, session: aiohttp.ClientSession) -> str:
        """One look, noted in the registry; returns what it found, for the log."""
        try:
            async with asyncio.timeout(self._config.probe_timeout_s):
                await self._check_health(backend.url, session)
                models = await self._read_models(backend.url, session)
        except aiohttp.ClientConnectorError as err:
            self._registry.connect_failed(backend)
            return str(err)
        except TimeoutError:
            self._registry.probe_failed(backend)
            return f"no answer within {self._config.probe_timeout_s:g} s"
        except (ProbeFailed, aiohttp.ClientError, OSError, ValueError) as err:  # ValueError: a host that is no name
            self._registry.probe_failed(backend)
            return str(err) or repr(err)
        self._registry.probe_succeeded(backend, models, now_s=self._clock())
        return f"serves {', '.join(models) or 'no model'}"

    async def _check_health(self, url: str, session: aiohttp.ClientSession) -> None:
        async with session.get(f"{url}/health", headers=self._headers()) as response:
            if response.status >= 400 and response.status not in NO_SUCH_ROUTE:
                raise ProbeFailed(f"GET /health answered {response.status}")

    async def _read_models(self, url: str, session: aiohttp.ClientSession) -> ModelObjects:
        async with session.get(f"{url}/v1/models", headers=self._headers()) as response:
            if response.status != 200:
                raise ProbeFailed(f"GET /v1/models answered {response.status}")
            return parse_models(await response.read())

    def _headers(self) -> dict[str, str]:
        """A backend that wants a key wants the one that clients send through this proxy."""
        return {"Authorization": f"Bearer {self._config.api_key}"} if self._config.api_key else {}


def probe_session() -> aiohttp.ClientSession:
    """The connections on which backends are looked at."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), cookie_jar=aiohttp.DummyCookieJar(), trust_env=False
    )


def parse_models(body: bytes) -> ModelObjects:
    """The models in an answer of /v1/models. Raises ProbeFailed if it is no such answer."""
    try:
        listed: Any = json.loads(body)["data"]
        return {str(model["id"]): dict(model) for model in listed}
    except (ValueError, KeyError, TypeError, RecursionError) as err:
        raise ProbeFailed("GET /v1/models did not answer OpenAI's list of models") from err
