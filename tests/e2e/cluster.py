"""A running proxy with its replicas, each alone or two in one group, and what their counters say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import requests
from prometheus_client.parser import text_string_to_metric_families

from tests.commands import DEMO_MODEL, Command, Commands, wait_until

MODEL_NAME: Final = DEMO_MODEL.name
# A question that the demo model answers rightly, with certainty far from any near tie.
QUESTION: Final = "What is 12 + 30?"
ANSWER: Final = "42"


@dataclass(frozen=True)
class Cluster:
    """One proxy and its replicas of the demo model in float32."""

    proxy: Command
    replicas: list[Command]
    idle_files: int  # open files and sockets of all processes while nothing is asked

    @classmethod
    def start(cls, commands: Commands, *, count: int = 2) -> Cluster:
        """Starts all of it and waits until the proxy knows every replica."""
        proxy = commands.proxy()
        replicas = commands.replicas(proxy.url, "--dtype", "float32", "--kv-cache-gb", "0.25", count=count)
        wait_until(lambda: num_live(proxy.url) == count, f"{count} replicas at the proxy")
        return cls(proxy, replicas, idle_files=num_idle_files(proxy, *replicas))

    @classmethod
    def start_group(cls, commands: Commands) -> Cluster:
        """The same with two replicas that share their experts: --dp 2 --tp 4, so of two ranks each."""
        proxy = commands.proxy()
        replicas = commands.group("--port", "0", "--proxy-url", proxy.url, "--dtype", "float32")
        wait_until(lambda: num_live(proxy.url) == 2, "2 replicas at the proxy")
        return cls(proxy, [replicas], idle_files=num_idle_files(proxy, replicas))

    @property
    def replica_urls(self) -> list[str]:
        """Where each replica serves."""
        return [url for command in self.replicas for url in command.urls]

    @property
    def url(self) -> str:
        """Where clients go."""
        return self.proxy.url

    def busy(self) -> dict[str, float]:
        """What is not zero of the counts of work in hand."""
        counts = {"proxy in flight": metric(self.url, "lockstep_proxy_requests_in_flight")}
        for i, replica_url in enumerate(self.replica_urls):
            for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "lockstep_kv_blocks_used"):
                counts[f"replica {i} {name}"] = metric(replica_url, name)
        return {name: count for name, count in counts.items() if count}

    def open_files(self) -> int:
        """Open files and sockets of all processes together."""
        return num_open_files(self.proxy, *self.replicas)


def num_idle_files(proxy: Command, *replicas: Command) -> int:
    """What is open while nothing is asked and each engine has its grammar checker, which comes with a first schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "any", "schema": {"type": "object"}}}
    request = {"messages": [{"role": "user", "content": QUESTION}], "max_completion_tokens": 4}
    for url in [url for command in replicas for url in command.urls]:
        response = requests.post(
            f"{url}/v1/chat/completions",
            json=request | {"model": MODEL_NAME, "response_format": schema},
            headers={"Connection": "close"},
            timeout=60,
        )
        response.raise_for_status()
    return num_open_files(proxy, *replicas)


def num_open_files(*commands: Command) -> int:
    """Open files and sockets of all processes of the commands together."""
    return sum(sum(command.num_open_files().values()) for command in commands)


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have the labels."""
    response = requests.get(f"{url}/metrics", timeout=10, headers={"Connection": "close"})
    response.raise_for_status()
    samples = [sample for family in text_string_to_metric_families(response.text) for sample in family.samples]
    return sum(
        sample.value for sample in samples if sample.name == name and labels.items() <= (sample.labels or {}).items()
    )


def num_live(proxy_url: str) -> int:
    """Replicas that the proxy would send a request to now."""
    return int(metric(proxy_url, "lockstep_proxy_replicas", state="live"))


def num_answered(proxy_url: str) -> int:
    """Chat requests that the proxy has brought to an end, of whatever kind."""
    return int(metric(proxy_url, "lockstep_proxy_requests_total", route="/v1/chat/completions"))
