"""One conversation with a server over the OpenAI API, for `replica chat`: questions out, answers in as they come."""

from __future__ import annotations

import http.client
import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

from replica.errors import ReplicaError

CONNECT_TIMEOUT_S: Final = 10.0
SILENCE_TIMEOUT_S: Final = 600.0  # a long prompt on a slow machine says nothing for minutes
_DATA: Final = b"data: "
_DONE: Final = b"[DONE]"


class ChatFailed(ReplicaError):
    """The server cannot be asked, or has answered with an error. The message is for whoever asked."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer."""

    text: str
    is_reasoning: bool


@dataclass(frozen=True, slots=True)
class Server:
    """Where answers come from. `url` has neither path nor credentials."""

    url: str
    api_key: str = ""

    @classmethod
    def at(cls, url: str, *, api_key: str) -> Server:
        """Takes a URL as people write it, with or without /v1. Raises ChatFailed."""
        try:
            parts = urlsplit(url if "://" in url else f"http://{url}")
            is_known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
            is_known = is_known and parts.path.rstrip("/") in ("", "/v1") and not (parts.query or parts.fragment)
        except ValueError:  # the port is no number, or a bracket is not closed
            is_known = False
        if not is_known:
            raise ChatFailed(f"the URL is {url!r}, must look like http://HOST:PORT")
        return cls(f"{parts.scheme}://{parts.netloc}", api_key)

    def models(self) -> list[str]:
        """The names of what is served. Raises ChatFailed."""
        connection = self.connection()
        try:
            answer = self.request(connection, "GET", "/v1/models")
            return [str(model["id"]) for model in json.loads(answer.read())["data"]]
        except (ValueError, KeyError, TypeError) as err:
            raise ChatFailed(f"{self.url} is no server of the OpenAI API: {err!r}") from err
        finally:
            connection.close()

    def connection(self) -> http.client.HTTPConnection:
        """A new connection, not opened yet."""
        parts = urlsplit(self.url)
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        return kind(parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT_S)

    def request(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: Any = None
    ) -> http.client.HTTPResponse:
        """The begin of a good answer. Raises ChatFailed."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        try:
            connection.connect()
            connection.sock.settimeout(SILENCE_TIMEOUT_S)
            text = None if body is None else json.dumps(body)
            connection.request(method, path, text, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            if response.status == 200:
                return response
            raise ChatFailed(_error_in(response.read()) or f"{self.url} answered {response.status} {response.reason}")
        except (OSError, http.client.HTTPException) as err:
            raise ChatFailed(f"cannot reach {self.url}: {err}") from err


class Conversation:
    """What was said so far, and the way to say more."""

    def __init__(self, server: Server, model: str) -> None:
        self._server = server
        self._model = model
        self._messages: list[dict[str, str]] = []

    def reset(self) -> None:
        """Begins anew."""
        self._messages.clear()

    def ask(self, question: str) -> Generator[Piece, None, None]:
        """The answer, as it comes. Close the generator to stop it: what has come until then was said.

        Raises ChatFailed; a question without an answer was not asked.
        """
        self._messages.append({"role": "user", "content": question})
        connection = self._server.connection()
        said = ""
        try:
            body = {"model": self._model, "messages": self._messages, "stream": True}
            for delta in _deltas(self._server.request(connection, "POST", "/v1/chat/completions", body)):
                if reasoning := delta.get("reasoning_content"):
                    yield Piece(reasoning, is_reasoning=True)
                if content := delta.get("content"):
                    said += content
                    yield Piece(content, is_reasoning=False)
        finally:
            connection.close()
            if said:
                self._messages.append({"role": "assistant", "content": said})
            else:
                self._messages.pop()


def _deltas(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """What each event of a stream adds. Raises ChatFailed, also when the stream breaks off."""
    try:
        while line := response.readline():
            if not line.startswith(_DATA):
                continue
            data = line[len(_DATA) :].strip()
            if data == _DONE:
                return
            if error := _error_in(data):
                raise ChatFailed(error)
            for choice in json.loads(data)["choices"]:
                yield choice["delta"]
    except (OSError, http.client.HTTPException) as err:
        raise ChatFailed(f"the answer broke off: {err!r}") from err
    except (ValueError, KeyError, TypeError) as err:
        raise ChatFailed(f"the answer cannot be read: {err!r}") from err
    raise ChatFailed("the answer broke off")


def _error_in(body: bytes) -> str:
    """The message of an error in OpenAI's shape; empty if it is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
