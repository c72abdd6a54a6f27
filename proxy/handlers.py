"""The OpenAI routes, and what operators ask: /health, /metrics, /nodes/status."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.auth import check_bearer
from proxy.config import ProxyConfig
from proxy.errors import (
    BadRequest,
    BodyTooLarge,
    ConnectFailed,
    NoReplicaAvailable,
    RequestError,
    UnknownModel,
    UpstreamFailed,
    UpstreamTimeout,
)
from proxy.metrics import Metrics
from proxy.middleware import REQUEST_ID
from proxy.open_requests import OpenRequests
from proxy.registry import InFlight, Registry, Replica
from proxy.relay import RELAY
from proxy.routing import choose, requested_model

logger = logging.getLogger(__name__)

MAX_ATTEMPTS: Final = 2  # replicas that a request is offered to, where the first does not accept the connection
CLIENT_LEFT_STATUS: Final = 499  # nginx's number for it; in metrics only


class Handlers:
    """The routes of one proxy, but for the replicas' control connections."""

    def __init__(
        self,
        *,
        config: ProxyConfig,
        registry: Registry,
        metrics: Metrics,
        open_requests: OpenRequests,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._open_requests = open_requests
        self._clock = clock
        self._turns = itertools.count()

    async def infer(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/...: whatever a replica may serve, sent to the best replica."""
        resource = request.match_info.route.resource
        route = "" if resource is None else resource.canonical
        started_s = self._clock()
        status = 500
        try:
            with self._open_requests.track():
                self._check_api_key(request)
                answer = await self._forward(request, await self._read_body(request))
                status = answer.status
                return answer
        except RequestError as err:
            status = err.status
            raise
        except asyncio.CancelledError:
            status = CLIENT_LEFT_STATUS
            raise
        finally:
            self._metrics.requests.labels(route, status).inc()
            self._metrics.request_duration_s.labels(route).observe(self._clock() - started_s)

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models: what live replicas serve, each model once."""
        self._check_api_key(request)
        return web.json_response({"object": "list", "data": list(self._live_models().values())})

    async def model(self, request: web.Request) -> web.Response:
        """GET /v1/models/{model}."""
        self._check_api_key(request)
        model_id = request.match_info["model"]
        found = self._live_models().get(model_id)
        if found is None:
            raise UnknownModel(f"model {model_id!r} is not served here")
        return web.json_response(found)

    async def health(self, request: web.Request) -> web.Response:
        """GET /health: 200 if a request could be served."""
        num_live = len(self._registry.live(now_s=self._clock()))
        status = "ok" if num_live else "no replica is ready"
        return web.json_response({"status": status, "replicas": num_live}, status=200 if num_live else 503)

    async def metrics(self, request: web.Request) -> web.Response:
        """GET /metrics, in Prometheus' text format."""
        return web.Response(body=self._metrics.text(), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def nodes_status(self, request: web.Request) -> web.Response:
        """GET /nodes/status: every known replica with its state and load, for operators."""
        check_bearer(request, self._config.proxy_token, "the proxy's token (--proxy-token)")
        return web.json_response({"replicas": [self._describe(replica) for replica in self._registry.known()]})

    def _check_api_key(self, request: web.Request) -> None:
        check_bearer(request, self._config.api_key, "the API key")

    async def _read_body(self, request: web.Request) -> bytes:
        """The whole body as the client sent it. Raises BodyTooLarge and BadRequest."""
        limit = self._config.max_body_bytes
        try:
            if request.content_length is not None and request.content_length > limit:
                raise BodyTooLarge(f"body has {request.content_length} bytes, limit is {limit} (--max-body-mb)")
            async with asyncio.timeout(self._config.client_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge as err:
            raise BodyTooLarge(f"body has more than {limit} bytes (--max-body-mb)") from err
        except web.RequestPayloadError as err:
            raise BadRequest(f"the body is malformed: {err}") from err
        except TimeoutError as err:
            raise BadRequest(f"the body did not arrive within {self._config.client_timeout_s:g} s") from err

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        """Sends the request to a replica, and to one other if that replica never accepted the connection."""
        model = requested_model(body)
        tried: list[Replica] = []
        while len(tried) < MAX_ATTEMPTS:
            replica = choose(
                self._registry.live(now_s=self._clock()),
                self._registry.known(),
                model=model,
                tried=tried,
                turn=next(self._turns),
            )
            tried.append(replica)
            try:
                with InFlight(replica):
                    return await request.app[RELAY].forward(request, body, replica, request[REQUEST_ID])
            except ConnectFailed as err:
                self._registry.connect_failed(replica)
                self._metrics.upstream_failures.labels(err.code).inc()
                logger.warning("replica refused a connection replica_id=%s err=%s", replica.replica_id, err)
            except (UpstreamFailed, UpstreamTimeout) as err:
                self._metrics.upstream_failures.labels(err.code).inc()
                logger.warning(
                    "request failed replica_id=%s request_id=%s err=%s", replica.replica_id, request[REQUEST_ID], err
                )
                raise
        raise NoReplicaAvailable("the replicas that were tried do not accept connections; try again shortly")

    def _live_models(self) -> dict[str, Mapping[str, Any]]:
        models: dict[str, Mapping[str, Any]] = {}
        for replica in self._registry.live(now_s=self._clock()):
            for model_id, model in replica.models.items():
                models.setdefault(model_id, model)
        return models

    def _describe(self, replica: Replica) -> dict[str, Any]:
        return {
            "replica_id": replica.replica_id,
            "incarnation": replica.incarnation,
            "url": replica.url,
            "state": self._registry.state(replica, now_s=self._clock()),
            "is_backend": replica.is_backend,
            "models": list(replica.models),
            "in_flight": replica.in_flight,
            "load": None if replica.load is None else asdict(replica.load),
        }
