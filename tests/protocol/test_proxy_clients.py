"""Real clients through a real `proxy serve` process, plain and over TLS: openai, requests, httpx, curl, a browser."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import shutil
import signal
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import openai
import pytest
import requests
from aiohttp import web

from proxy.protocol import CONTROL_PATH, encode
from tests.commands import Commands
from tests.protocol.proxy_fakes import CHAT, MODEL, ControlLine, FakeReplica, answer_ok, eventually, fake_replica, hello
from tests.protocol.test_proxy_operators import certificate

__all__ = ["certificate"]  # the fixture

WORDS = ["The", " quick", " brown", " fox"]


async def generate(go_on: asyncio.Event, request: web.Request) -> web.StreamResponse:
    """A replica that says WORDS, as one answer or as events, of which the second waits for `go_on`."""
    asked = json.loads(await request.read())
    base = {"id": "c", "created": 1, "model": MODEL}
    if not asked.get("stream"):
        message = {"role": "assistant", "content": "".join(WORDS)}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({**base, "object": "chat.completion", "choices": [choice]})
    answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await answer.prepare(request)
    for word in WORDS:
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        chunk = {**base, "object": "chat.completion.chunk", "choices": [choice]}
        await answer.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        await go_on.wait()
    await answer.write(b"data: [DONE]\n\n")
    return answer


@dataclass
class Served:
    """A proxy with one replica behind it."""

    url: str
    ca: str | bool  # what a client checks the proxy's certificate against
    replica: FakeReplica
    go_on: asyncio.Event  # set, unless a test wants to see the first event arrive before the second is made

    @property
    def context(self) -> ssl.SSLContext | bool:
        return ssl.create_default_context(cafile=self.ca) if isinstance(self.ca, str) else True


@pytest.fixture(params=["plain", "tls"])
async def served(
    request: pytest.FixtureRequest, commands: Commands, certificate: tuple[str, str]
) -> AsyncIterator[Served]:
    cert, key = certificate
    options = ["--tls-cert", cert, "--tls-key", key] if request.param == "tls" else []
    process = await asyncio.to_thread(lambda: commands.proxy(*options, "--cors-origin", "*"))
    context = ssl.create_default_context(cafile=cert)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context)) as client:
        go_on = asyncio.Event()
        go_on.set()
        handler = functools.partial(generate, go_on)
        async with fake_replica(handler) as replica, client.ws_connect(process.url + CONTROL_PATH) as line:
            await line.send_bytes(encode(hello(replica.url)))
            await line.receive_bytes()
            beating = asyncio.create_task(keep_alive(line))
            yield Served(process.url, cert if options else True, replica, go_on)
            beating.cancel()
    assert "Traceback" not in process.log()


async def keep_alive(line: aiohttp.ClientWebSocketResponse) -> None:
    end = ControlLine(line)
    while True:
        await end.report()
        await asyncio.sleep(0.5)


def messages(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **more}


async def in_thread(function: Callable[[], Any]) -> Any:
    return await asyncio.to_thread(function)


async def test_the_openai_client_sync_async_and_streaming(served: Served) -> None:
    def ask() -> tuple[str, list[str]]:
        with openai.OpenAI(
            base_url=f"{served.url}/v1", api_key="k", http_client=httpx.Client(verify=served.context)
        ) as client:
            whole = client.chat.completions.create(**messages())
            events = client.chat.completions.create(**messages(stream=True))
            return whole.choices[0].message.content, [event.choices[0].delta.content for event in events]

    assert await in_thread(ask) == ("".join(WORDS), WORDS)
    async with openai.AsyncOpenAI(
        base_url=f"{served.url}/v1", api_key="k", http_client=httpx.AsyncClient(verify=served.context)
    ) as client:
        whole = await client.chat.completions.create(**messages())
        assert whole.choices[0].message.content == "".join(WORDS)
        stream = await client.chat.completions.create(**messages(stream=True))
        assert [event.choices[0].delta.content async for event in stream] == WORDS
        assert [model.id async for model in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**{**messages(), "model": "unknown"})


async def test_requests_and_httpx(served: Served) -> None:
    def ask() -> None:
        with requests.Session() as session:
            session.trust_env = False  # or a CA bundle of the environment wins over this one
            session.verify = served.ca
            for _ in range(3):
                assert session.post(served.url + CHAT, json=messages(), timeout=10).status_code == 200
            pieces = (piece for piece in (b'{"mod', b'el": "tiny"}'))
            assert session.post(served.url + CHAT, data=pieces, timeout=10).status_code == 200
            with session.post(served.url + CHAT, json=messages(stream=True), stream=True, timeout=10) as response:
                assert [line for line in response.iter_lines() if line][-1] == b"data: [DONE]"
            assert session.get(f"{served.url}/health", timeout=10).json()["replicas"] == 1
            assert session.post(served.url + CHAT, json=messages(), timeout=10).status_code == 200

    await in_thread(ask)
    async with httpx.AsyncClient(verify=served.context) as client:
        assert (await client.post(served.url + CHAT, json=messages())).status_code == 200
        async with client.stream("POST", served.url + CHAT, json=messages(stream=True)) as response:
            assert [line async for line in response.aiter_lines() if line][-1] == "data: [DONE]"
    assert len(served.replica.received) == 8


@pytest.mark.parametrize(
    "options",
    [
        ["--expect100-timeout", "5", "-H", "Expect: 100-continue"],
        ["-H", "Transfer-Encoding: chunked"],
        ["--http1.0"],
        ["-H", "Connection: close"],
    ],
    ids=["expect", "chunked", "http1.0", "close"],
)
async def test_curl(served: Served, options: list[str], tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    body = json.dumps(messages(padding="x" * 200_000))
    file = tmp_path / "body"
    file.write_text(body, encoding="utf-8")
    ca = ["--cacert", served.ca] if isinstance(served.ca, str) else []
    command = ["curl", "-sS", "-m", "10", "-w", "%{http_code} %{time_total}", "-o", os.devnull, *ca, *options]
    command += ["-T", str(file)] if "chunked" in options[-1] else ["--data-binary", f"@{file}"]
    done = await in_thread(
        lambda: subprocess.run([*command, "-X", "POST", served.url + CHAT], capture_output=True, text=True, check=False)
    )
    status, took_s = done.stdout.split()
    assert status == "200", done.stderr
    assert float(took_s) < 3, "nobody waited for anybody"
    assert served.replica.received[-1].body.decode() == body


PAGE = """<!doctype html><script>
const report = (said) => fetch("%s", {method: "POST", mode: "no-cors", body: said});
(async () => {
  const answer = await fetch("%s", {method: "POST", headers: {"Content-Type": "application/json"}, body: '%s'});
  const reader = answer.body.getReader(), parts = [], decoder = new TextDecoder();
  for (let read; !(read = await reader.read()).done;) {
    if (!parts.length) await report("first");
    parts.push(decoder.decode(read.value));
  }
  return answer.status + " " + parts.join("").includes("[DONE]");
})().catch((err) => "failed: " + err).then(report);
</script>"""


async def test_a_browser_s_fetch_stream_of_another_origin(served: Served, tmp_path: Path) -> None:
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    page = tmp_path / "page.html"
    served.go_on.clear()

    async def take_report(request: web.Request) -> web.StreamResponse:
        served.go_on.set()  # the page has read the first event: the others may be made
        return await answer_ok(request)

    async with fake_replica(take_report) as reports:
        page.write_text(PAGE % (reports.url, served.url + CHAT, json.dumps(messages(stream=True))), encoding="utf-8")
        command = [browser, "--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
        command += ["--ignore-certificate-errors", "--no-first-run", page.as_uri()]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:

            async def has_reported() -> bool:
                return len(reports.received) > 1

            await eventually(has_reported, "the page has reported", timeout_s=60.0)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        assert [report.body for report in reports.received] == [b"first", b"200 true"]
