"""A proxy that is started again and a replica that is killed, under load: what the clients see, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import pytest
import requests

from tests.commands import Commands, wait_until
from tests.e2e.cluster import ANSWER, MODEL_NAME, QUESTION, Cluster, num_live

NUM_CLIENTS: Final = 6
REQUEST_TIMEOUT_S: Final = 20.0
BACK_S: Final = 1.0  # a proxy knows all replicas again so soon
BUSY_MACHINE_S: Final = 1.0  # and this much later where tests compete for two cores
KNOWN_S: Final = 0.5  # a killed replica is known to be gone: the connection's end takes milliseconds


class Load:
    """Clients that ask one question after the other, and how each request ended."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_over = threading.Event()
        self.lock = threading.Lock()
        self.answers: list[tuple[float, str]] = []  # when it was asked (monotonic), the answer
        self.failures: list[tuple[float, str]] = []  # when it was asked, what went wrong

    def ask(self) -> str:
        """One question's answer."""
        body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": QUESTION}]}
        response = requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=REQUEST_TIMEOUT_S)
        response.raise_for_status()
        content: str = response.json()["choices"][0]["message"]["content"]
        return content

    def run(self) -> None:
        """One client."""
        while not self.is_over.is_set():
            asked_s = time.monotonic()
            try:
                answer = self.ask()
            except requests.RequestException as err:
                with self.lock:
                    self.failures.append((asked_s, repr(err)))
                self.is_over.wait(0.05)  # as a client would that tries again
            else:
                with self.lock:
                    self.answers.append((asked_s, answer))

    def num_answers_since(self, since_s: float) -> int:
        """Answers to questions that were asked after a moment."""
        with self.lock:
            return sum(asked_s >= since_s for asked_s, _ in self.answers)

    def failures_since(self, since_s: float) -> list[str]:
        """What went wrong with questions that were asked after a moment."""
        with self.lock:
            return [failure for asked_s, failure in self.failures if asked_s >= since_s]


@contextmanager
def load(url: str) -> Iterator[Load]:
    """Load from NUM_CLIENTS clients, running. At the end every client must have come back: no request may hang."""
    made = Load(url)
    threads = [threading.Thread(target=made.run) for _ in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(made.answers) >= NUM_CLIENTS, "first answers")
        yield made
    finally:
        made.is_over.set()
        for thread in threads:
            thread.join(REQUEST_TIMEOUT_S + 5)
    assert not any(thread.is_alive() for thread in threads)
    assert not [failure for _, failure in made.failures if "Timeout" in failure]
    assert {answer for _, answer in made.answers} == {ANSWER}


@pytest.mark.timeout(180)
def test_a_restarted_proxy_and_a_killed_replica_cost_no_request_that_comes_after(commands: Commands) -> None:
    cluster = Cluster.start(commands)
    port = int(cluster.url.rsplit(":", 1)[1])

    with load(cluster.url) as clients:
        cluster.proxy.kill()
        proxy = commands.proxy(port=port)
        back_s = wait_until(lambda: num_live(proxy.url) == 2, "both replicas at the new proxy")
        recovered_s = time.monotonic()
        wait_until(lambda: clients.num_answers_since(recovered_s) >= 4 * NUM_CLIENTS, "answers from the new proxy")
        assert clients.failures_since(recovered_s) == []
        print(f"\nboth replicas back {back_s:.2f} s after the proxy was ready")
        assert back_s < BACK_S + BUSY_MACHINE_S

        killed, survivor = cluster.replicas
        killed.kill()
        known_s = wait_until(lambda: num_live(proxy.url) == 1, "one replica gone at the proxy")
        after_s = time.monotonic()
        wait_until(lambda: clients.num_answers_since(after_s) >= 4 * NUM_CLIENTS, "answers from the other replica")
        assert clients.failures_since(after_s) == []
        print(f"the proxy knew {known_s:.2f} s after the kill")
        assert known_s < KNOWN_S + BUSY_MACHINE_S
        killed.assert_gone()
    assert survivor.process.poll() is None


def test_without_a_replica_a_request_is_refused_at_once_and_may_come_back(commands: Commands) -> None:
    proxy = commands.proxy()
    started_s = time.monotonic()
    response = requests.post(
        f"{proxy.url}/v1/chat/completions",
        json={"model": MODEL_NAME, "messages": [{"role": "user", "content": QUESTION}]},
        timeout=REQUEST_TIMEOUT_S,
    )
    assert response.status_code == 503
    assert int(response.headers["Retry-After"]) >= 1
    assert response.json()["error"]["type"] == "service_unavailable"
    assert time.monotonic() - started_s < 5
