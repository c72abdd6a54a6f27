"""The proxy's routes and resources. Start reading here.

POST /v1/...        handlers.Handlers.infer -> routing.choose -> relay.Relay.forward -> a replica
GET /nodes/control  control.ControlConnections: replicas join, report and leave -> registry.Registry
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import Final

from aiohttp import web

from proxy.backends import Backends
from proxy.config import ProxyConfig
from proxy.control import ControlConnections
from proxy.handlers import Handlers
from proxy.metrics import Metrics
from proxy.middleware import identify, shape_errors
from proxy.open_requests import OpenRequests
from proxy.protocol import CONTROL_PATH
from proxy.registry import Registry
from proxy.relay import RELAY, Relay, client_session
from proxy.strangers import StrangerLog

BACKENDS: Final = web.AppKey("backends", Backends)
OPEN_REQUESTS: Final = web.AppKey("open_requests", OpenRequests)
REGISTRY: Final = web.AppKey("registry", Registry)
STRANGERS: Final = web.AppKey("strangers", StrangerLog)


def build_app(config: ProxyConfig, clock: Callable[[], float] = time.monotonic) -> web.Application:
    """One proxy. `clock` gives monotonic seconds; replicas' silence and requests' durations are measured by it."""
    registry = Registry(heartbeat_timeout_s=config.heartbeat_timeout_s)
    metrics = Metrics(registry, clock)
    strangers = StrangerLog(metrics, clock)
    open_requests = OpenRequests()
    control = ControlConnections(config=config, registry=registry, strangers=strangers, clock=clock)
    handlers = Handlers(config=config, registry=registry, metrics=metrics, open_requests=open_requests, clock=clock)

    async def replica_connections(app: web.Application) -> AsyncIterator[None]:
        async with client_session(config) as session:
            app[RELAY] = Relay(session=session, config=config, metrics=metrics)
            yield

    app = web.Application(middlewares=[identify, shape_errors], client_max_size=config.max_body_bytes)
    app[BACKENDS] = Backends(config=config, registry=registry, clock=clock)
    app[OPEN_REQUESTS] = open_requests
    app[REGISTRY] = registry
    app[STRANGERS] = strangers
    app.cleanup_ctx.append(replica_connections)
    app.on_response_prepare.append(open_requests.close_connections)
    app.on_shutdown.append(control.close_all)
    app.add_routes(
        [
            web.get("/v1/models", handlers.models),
            web.get("/v1/models/{model:.+}", handlers.model),
            web.post("/v1/chat/completions", handlers.infer),
            web.post("/v1/completions", handlers.infer),
            # Without dots, so that no path can climb out of /v1 at the replica.
            web.post(r"/v1/{operation:[\w-]+(?:/[\w-]+)*}", handlers.infer),
            web.get("/health", handlers.health),
            web.get("/metrics", handlers.metrics),
            web.get("/nodes/status", handlers.nodes_status),
            web.get(CONTROL_PATH, control.handle),
        ]
    )
    return app
