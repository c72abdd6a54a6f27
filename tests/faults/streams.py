"""A client that asks for a long answer and reads it to its end, whatever that is."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import requests

from tests.commands import wait_until

LONG_ANSWER = 3000  # tokens; takes many seconds, so that whatever is done to it is done while it runs


class Stream(threading.Thread):
    """One request and what came of it, event by event."""

    def __init__(self, url: str, *, max_tokens: int = LONG_ANSWER, prompt: str = "count") -> None:
        super().__init__(daemon=True)
        self.url, self.max_tokens, self.prompt = url, max_tokens, prompt
        self.status = 0
        self.events: list[dict[str, object]] = []
        self.times_s: list[float] = []  # monotonic, of each event
        self.is_done = False  # the closing [DONE] came
        self.is_cut = False  # the connection ended first

    def run(self) -> None:
        body = {"prompt": self.prompt, "max_tokens": self.max_tokens, "stream": True, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        try:
            with requests.post(f"{self.url}/v1/completions", json=body, stream=True, timeout=60) as answer:
                self.status = answer.status_code
                for line in answer.iter_lines():
                    if line == b"data: [DONE]":
                        self.is_done = True
                    elif line:
                        self.times_s.append(time.monotonic())
                        self.events.append(json.loads(line.removeprefix(b"data: ")))
        except (requests.exceptions.ChunkedEncodingError, requests.exceptions.ConnectionError):
            self.is_cut = True

    @property
    def text(self) -> str:
        """All that the answer says so far."""
        choices = (event["choices"] for event in self.events if "choices" in event)
        return "".join(choice["text"] for each in choices for choice in each)  # type: ignore[attr-defined]

    def longest_pause_s(self, since_s: float) -> float:
        """Between two events of which the second came after that time; the longest."""
        pairs = zip(self.times_s, self.times_s[1:], strict=False)
        return max((later_s - earlier_s for earlier_s, later_s in pairs if later_s > since_s), default=0.0)

    @property
    def errors(self) -> list[object]:
        return [event["error"] for event in self.events if "error" in event]


@contextmanager
def streaming(url: str, *, max_tokens: int = LONG_ANSWER, prompt: str = "count") -> Iterator[Stream]:
    """A stream whose first tokens have come. When the block is left, it has ended, somehow."""
    stream = Stream(url, max_tokens=max_tokens, prompt=prompt)
    stream.start()
    wait_until(lambda: len(stream.events) > 3, "the stream's first events")
    yield stream
    stream.join(timeout=60)
    assert not stream.is_alive(), "the stream has no end"
