"""`replica chat --url`: answers as they come, keys, and errors that say what is wrong."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path
from typing import Final

from aiohttp import web

from replica.request import FinishReason
from tests.commands import BIN
from tests.protocol.fake_loop import CONFIG, MODEL, FakeLoop, replica
from tests.protocol.terminal import CTRL_C, CTRL_D, Terminal, terminal

CHAT: Final = (str(BIN / "replica"), "chat")
PROMPT: Final = "> "


async def piped(asked: str, *argv: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a chat without a terminal."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*CHAT, *argv, stdin=pipe, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(30):
        output, errors = await process.communicate(asked.encode())
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def text_of(loop: FakeLoop, index: int) -> str:
    """A prompt that the replica got."""
    return MODEL.tokenizer.decode(loop.submitted[index].prompt_ids, skip_special_tokens=False)


async def say(chat: Terminal, question: str) -> None:
    await chat.expect(PROMPT)
    chat.type(question + "\r")
    await chat.expect(question)


async def test_answer_is_shown_with_its_reasoning_dimmed_and_ctrl_d_leaves() -> None:
    async with replica(FakeLoop()) as url, terminal(*CHAT, "--url", url) as chat:
        await chat.expect(f"tiny-moe at {url}. Ctrl-C stops an answer, Ctrl-D leaves, /reset begins")
        await say(chat, "hi")
        shown = (await chat.expect(PROMPT)).replace("\r", "")
        assert shown == "\n\x1b[2mhm\x1b[0m\n\nyes \N{ROCKET}\n\n> "
        chat.type(CTRL_D)
        assert await chat.ended() == 0


async def test_ctrl_c_stops_an_answer_and_what_was_said_stays_said() -> None:
    loop = FakeLoop("abcdefgh ")
    loop.step_s = 0.01
    async with replica(loop) as url, terminal(*CHAT, "--url", url + "/v1/") as chat:
        await say(chat, "one")
        await chat.expect("abcdefgh abcd")
        chat.type(CTRL_C)
        await loop.until(lambda: loop.num_aborted == 1)
        await chat.expect(PROMPT)
        chat.type(f"never sent{CTRL_C}")  # at the prompt it drops what was typed
        loop.script = MODEL.tokenizer.encode("well<|im_end|>", add_special_tokens=False)
        await say(chat, "two")
        await chat.expect("well")
        asked = text_of(loop, 1)
        assert "one<|im_end|>" in asked and "abcdefgh abcd" in asked and "never sent" not in asked
        await say(chat, "/reset")
        await say(chat, "three")
        await chat.expect("well")
        assert text_of(loop, 2).startswith("<|im_start|>user\nthree<|im_end|>")
        await chat.expect(PROMPT)
        chat.type(CTRL_D)
        assert await chat.ended() == 0


async def test_lines_of_a_pipe_are_questions_and_control_characters_stay_out() -> None:
    loop = FakeLoop("<think>hm</think>\x1b[31mred\x07\n\ttoo<|im_end|>")
    async with replica(loop) as url:
        code, output, errors = await piped("one\n\n/what\ntwo", "--url", url)
    assert (code, output) == (0, "[31mred\n\ttoo\n" * 2)
    assert errors.startswith("/what is no command.")
    assert len(loop.submitted) == 2 and "red" in text_of(loop, 1)


async def test_error_of_one_question_is_told_and_the_chat_goes_on() -> None:
    loop = FakeLoop("well<|im_end|>")
    async with replica(loop) as url:
        code, output, errors = await piped("a" * 70_000 + "\nhi\n", "--url", url)
    assert (code, output) == (0, "\nwell\n")
    assert "replica: error: the prompt has " in errors and "limit is 4095" in errors
    assert len(loop.submitted) == 1 and "aaa" not in text_of(loop, 0)


async def test_answer_that_breaks_off_is_an_error() -> None:
    loop = FakeLoop("abcdefgh")
    async with replica(loop, steps=False) as url:
        chatting = asyncio.create_task(piped("one\n", "--url", url))
        await loop.until(lambda: bool(loop.running))
        loop.step()
        await asyncio.sleep(0.1)
        loop.end(loop.running[0], FinishReason.LOST, "the worker died")
        code, _, errors = await chatting
    assert code == 0 and errors == "\nreplica: error: the worker died\n"


async def test_server_that_is_none_or_wants_a_key_is_an_error_in_one_line() -> None:
    config = dataclasses.replace(CONFIG, api_key="secret")
    async with replica(FakeLoop("well<|im_end|>"), config=config) as url:
        code, _, errors = await piped("hi\n", "--url", url)
        assert (code, errors.count("\n")) == (1, 1) and "the API key is missing or wrong" in errors
        assert (await piped("hi\n", "--url", url, "--api-key", "secret"))[:2] == (0, "well\n")
        code, _, errors = await piped("hi\n", "other", "--url", url, "--api-key", "secret")
        assert (code, errors) == (1, f"replica: error: {url} does not serve 'other'; it serves tiny-moe\n")
    code, _, errors = await piped("hi\n", "--url", url)
    assert code == 1 and errors.startswith(f"replica: error: cannot reach {url}: ")
    for wrong in ("ftp://x", "http://x:y", "http://x/path", "http://", "http://[::1"):
        code, _, errors = await piped("", "--url", wrong)
        assert (code, errors) == (1, f"replica: error: the URL is {wrong!r}, must look like http://HOST:PORT\n")


async def test_pipe_that_is_closed_or_full_is_an_error_in_one_line() -> None:
    async with replica(FakeLoop()) as url:
        for closed, why in (("<&-", "standard input"), (">/dev/full", "No space left"), ("| true", "Broken pipe")):
            line = f"set -o pipefail; echo hi | {{ {' '.join((*CHAT, '--url', url))}; }} {closed}"
            process = await asyncio.create_subprocess_exec("bash", "-c", line, stderr=asyncio.subprocess.PIPE)
            async with asyncio.timeout(30):
                _, errors = await process.communicate()
            assert process.returncode == 1 and why in errors.decode()
            assert len(errors.decode().strip().splitlines()) == 1, errors.decode()


async def test_server_of_something_else_is_an_error() -> None:
    async def hello(request: web.Request) -> web.Response:
        return web.Response(text="hello")

    app = web.Application()
    app.router.add_get("/v1/models", hello)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        code, _, errors = await piped("hi\n", "--url", f"127.0.0.1:{runner.addresses[0][1]}")
    finally:
        await runner.cleanup()
    assert code == 1 and "is no server of the OpenAI API" in errors and errors.count("\n") == 1


async def test_checkpoint_that_cannot_be_served_is_the_servers_own_error(tmp_path: Path) -> None:
    code, _, errors = await piped("hi\n", str(tmp_path))
    assert code == 1 and errors.startswith(f"loading {tmp_path} ...\nreplica: error: ") and errors.count("\n") == 2
    assert "config.json" in errors
    code, _, errors = await piped("hi\n")
    assert (code, errors) == (2, "replica: error: name a checkpoint folder to talk to, or a server with --url\n")
