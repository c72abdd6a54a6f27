"""The proxy's routes and resources. Start reading here.

POST /v1/...        client.ClientConnection -> exchange.Exchange -> a replica; dispatcher.Dispatcher: to which one
GET /nodes/control  control.ControlConnections: replicas join, report and leave -> registry.Registry
all else            handlers.Handlers, by aiohttp, to which client.py hands the connection
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from proxy.access_log import AccessLog
from proxy.admission import Admission
from proxy.backends import Backends
from proxy.config import ProxyConfig
from proxy.control import ControlConnections
from proxy.cors import Cors
from proxy.dispatcher import Dispatcher
from proxy.handlers import MAX_NODE_BYTES, Handlers
from proxy.keys import ApiKeys
from proxy.metrics import Metrics
from proxy.middleware import close_connection, identify, shape_errors
from proxy.open_requests import OpenRequests
from proxy.protocol import CONTROL_PATH
from proxy.registry import Registry
from proxy.strangers import StrangerLog

INFERENCE: Final = r"/v1/{operation:[\w-]+(?:/[\w-]+)*}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """The parts of one proxy that serve.py runs."""

    app: web.Application  # everything but inference
    registry: Registry
    dispatcher: Dispatcher
    backends: Backends
    strangers: StrangerLog


def build(
    config: ProxyConfig, keys: ApiKeys, access_log: AccessLog, clock: Callable[[], float] = time.monotonic
) -> Proxy:
    """One proxy. `clock` gives monotonic seconds; replicas' silence and requests' durations are measured by it."""
    registry = Registry(heartbeat_timeout_s=config.heartbeat_timeout_s)
    admission = Admission(
        max_requests=config.max_requests,
        max_tokens=config.max_tokens,
        max_waiting=config.max_waiting,
        queue_timeout_s=config.queue_timeout_s,
    )
    metrics = Metrics(registry, admission, clock)
    strangers = StrangerLog(metrics, clock)
    backends = Backends(config=config, registry=registry, clock=clock)
    cors = Cors(config.cors_origins)
    dispatcher = Dispatcher(
        config=config,
        registry=registry,
        admission=admission,
        metrics=metrics,
        keys=keys,
        access_log=access_log,
        cors=cors,
        open_requests=OpenRequests(),
        clock=clock,
    )
    control = ControlConnections(config=config, registry=registry, strangers=strangers, clock=clock)
    handlers = Handlers(config=config, registry=registry, metrics=metrics, keys=keys, backends=backends, clock=clock)
    app = web.Application(middlewares=[identify, shape_errors], client_max_size=MAX_NODE_BYTES)
    app.on_response_prepare.append(close_connection)
    app.on_shutdown.append(control.close_all)
    if cors.is_on:
        app.on_response_prepare.append(cors.on_prepare)
        app.router.add_route("OPTIONS", "/{path:.*}", cors.preflight)
    app.add_routes(
        [
            web.get("/v1/models", handlers.models),
            web.get("/v1/models/{model:.+}", handlers.model),
            web.get("/health", handlers.health),
            web.get("/metrics", handlers.metrics),
            web.get("/nodes/status", handlers.nodes_status),
            web.post("/nodes/add", handlers.add_node),
            web.post("/nodes/remove", handlers.remove_node),
            web.post("/nodes/terminate", handlers.terminate_node),
            web.get(CONTROL_PATH, control.handle),
        ]
    )
    for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH"):  # POST is the data path's
        app.router.add_route(method, INFERENCE, handlers.only_post)
    return Proxy(app=app, registry=registry, dispatcher=dispatcher, backends=backends, strangers=strangers)
