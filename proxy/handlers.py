"""What the proxy answers itself: /v1/models, and what operators ask: /health, /metrics, /nodes/..."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

from proxy.auth import check_bearer
from proxy.backends import Backends
from proxy.config import ProxyConfig, backend_root, is_http_url
from proxy.errors import BadRequest, UnknownModel
from proxy.keys import ApiKeys
from proxy.metrics import Metrics
from proxy.registry import Groups, Registry
from proxy.replicas import Replica

MAX_NODE_BYTES: Final = 64 * 1024  # of a body of /nodes/...
KEY_HEADERS: Final = ("Authorization", "X-Api-Key")  # OpenAI's and Anthropic's
HYBRID: Final = 1  # LMDeploy's number for a server that does prefill and decode


class Handlers:
    """The routes of one proxy, but for inference and the replicas' control connections."""

    def __init__(
        self,
        *,
        config: ProxyConfig,
        registry: Registry,
        metrics: Metrics,
        keys: ApiKeys,
        backends: Backends,
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._registry = registry
        self._metrics = metrics
        self._keys = keys
        self._backends = backends
        self._clock = clock

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
        """GET /nodes/status: every known replica by its URL, as LMDeploy shows its nodes, and what we know beyond."""
        self._check_token(request)
        now_s = self._clock()
        groups = self._registry.groups(now_s=now_s)
        return web.json_response(
            {replica.url: self._describe(replica, groups, now_s) for replica in self._registry.known()}
        )

    async def add_node(self, request: web.Request) -> web.Response:
        """POST /nodes/add {"url": ..., "status": {"models": [...]}}: spreads requests over this server too.

        With models it is routable at once, else when its first probe succeeded. What is known already stays.
        """
        url, models = await self._read_node(request)
        self._backends.add(url, models)
        return web.json_response("Added successfully")

    async def remove_node(self, request: web.Request) -> web.Response:
        """POST /nodes/remove {"url": ...}: no new requests; what runs there goes on."""
        url, _ = await self._read_node(request)
        self._remove(url)
        return web.json_response("Deleted successfully")

    async def terminate_node(self, request: web.Request) -> web.Response:
        """POST /nodes/terminate {"url": ...}: removes the server, and asks it to end itself (GET /terminate)."""
        url, _ = await self._read_node(request)
        self._remove(url)
        refusal = await self._backends.terminate(url)
        return web.json_response(f"Failed to terminate node {url}: {refusal}" if refusal else "Terminated successfully")

    async def only_post(self, request: web.Request) -> web.StreamResponse:
        """Any other method on an inference route."""
        raise web.HTTPMethodNotAllowed(request.method, ["POST"])

    async def _read_node(self, request: web.Request) -> tuple[str, list[str]]:
        """The url and the models of a body in LMDeploy's shape. Raises BadRequest."""
        self._check_token(request)
        try:
            node: Any = json.loads(await request.content.read(MAX_NODE_BYTES))
            url = backend_root(node["url"])
            models = [str(model) for model in (node.get("status") or {}).get("models") or []]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
            raise BadRequest('the body must look like {"url": "http://HOST:PORT"}') from err
        if not is_http_url(url):
            raise BadRequest(f"url is {url!r}, must look like http://HOST:PORT")
        return url, models

    def _remove(self, url: str) -> None:
        if not self._backends.remove(url):
            raise BadRequest(f"{url} is no server that was added here; replicas that joined are stopped where they run")

    def _check_token(self, request: web.Request) -> None:
        check_bearer(request, self._config.proxy_token, "the proxy's token (--proxy-token)")

    def _check_api_key(self, request: web.Request) -> None:
        shown = [request.headers.get(name, "").encode(errors="surrogateescape") for name in KEY_HEADERS]
        self._keys.caller(*shown)

    def _live_models(self) -> dict[str, Mapping[str, Any]]:
        models: dict[str, Mapping[str, Any]] = {}
        for replica in self._registry.live(now_s=self._clock()):
            for model_id, model in replica.models.items():
                models.setdefault(model_id, model)
        return models

    def _describe(self, replica: Replica, groups: Groups, now_s: float) -> dict[str, Any]:
        group, state = groups.get(replica.group, (None, None))
        return {
            # LMDeploy's:
            "role": HYBRID,
            "models": list(replica.models),
            "unfinished": replica.in_flight,
            "latency": [replica.latency_s] if replica.latency_s else [],
            "speed": None,
            # ours:
            "replica_id": replica.replica_id,
            "incarnation": replica.incarnation,
            "state": self._registry.state(replica, now_s=now_s),
            "is_backend": replica.is_backend,
            "dp_rank": replica.dp_rank,
            "group": None if group is None else {"name": replica.group, "epoch": group.epoch, "state": state},
            "load": None if replica.report is None else asdict(replica.report),
        }
