"""No wait without a deadline, read from the code: what can wait for a peer, a process, a lock or a queue stands under a
timeout, has one as an argument, or is named here with the reason why it ends all the same.

Each rule is also shown to bite.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("coordinator", "replica", "proxy")
SIMULATION: Final = "coordinator/simulation/"  # its time is simulated

# What may wait for ever when it is awaited, or made a task of.
ASYNC_WAITS: Final = frozenset(
    {
        *("wait", "acquire", "get", "join"),
        *("read", "readany", "readline", "readexactly", "readuntil", "drain", "wait_closed", "start_tls"),
        *("open_connection", "open_unix_connection", "create_connection", "getaddrinfo"),
        *("sock_connect", "sock_recv", "sock_sendall", "sock_accept"),
        *("ws_connect", "receive", "receive_bytes", "send_bytes", "prepare", "write"),
    }
)
# What may stop a thread for ever.
BLOCKING_WAITS: Final = frozenset(
    {
        *("wait", "acquire", "get", "join", "communicate"),
        *("recv", "recv_into", "accept", "create_connection", "sendall", "os.read"),
    }
)
TASK_MAKERS: Final = ("create_task", "ensure_future", "gather", "wait")
TIMEOUTS: Final = ("timeout", "timeout_at")  # asyncio's

# Why it ends all the same -> `file:function`, without the package's suffix.
ENDS: Final[dict[str, tuple[str, ...]]] = {
    "a task for as long as its process or its group lives, which is cancelled at the end": (
        "coordinator/master:Master.run",
        "coordinator/master:Master._perform_commits",
        "coordinator/private_redis:PrivateRedis._end_of",
        "proxy/backends:Backends.run",
        "proxy/serve:serve",
        "replica/engine:StopRequests.asked",
        "replica/engine:Engine.run",
        "replica/engine:_placed",
        "replica/executor:RankExecutor.watch",
        "replica/executor_mp:LocalProcess.wait",
        "replica/executor_ray:ActorProcess.wait",
        "replica/step_clock:LocalClock.released",
        "replica/step_clock:LocalClock.superseded",
        "replica/step_clock:LocalClock.failed",
        "replica/step_loop:StepLoop._run_epoch",
        "replica/supervisor:EngineProcess.live",
        "replica/supervisor:Supervisor._live",
        "replica/supervisor:Supervisor._end_with_group",
        "replica/supervisor:Supervisor._serve_others",
    ),
    "the deadline is that of whoever awaits it, or made it": (
        "coordinator/member:_dial",
        "proxy/backends:Backends._read_models",
        "proxy/handlers:Handlers._read_node",
        "proxy/open_requests:OpenRequests.drained",
        "proxy/serve:_drain",
        "replica/executor_ray:RayRanks.start",
        "replica/executor_ray:_admitted",
        "replica/api/grammar_checkers:_ask",
        "replica/rank_link:RankLink.loaded",
        "replica/rank_link:RankLink.receive",
        "replica/rank_link:RankLink.regrouped",
        "replica/rank_link:RankLink.sent",
        "replica/rank_link:RankLink.stepped",
        "replica/nccl_links:_MemoryStore.wait",
        "replica/nccl_links:NcclTransport.all_to_all",
        "replica/registration:_receive",
        "replica/remote_rank:RankDoor.admit",
        "replica/remote_rank:RankDoor._accept",
        "replica/remote_rank:_received",
        "replica/step_loop:StepLoop.commanded_by_all",
    ),
    "the clock ends it: with a release, an epoch, or the error of a master that is silent or lost": (
        "coordinator/member:Member._change",
        "replica/engine:Engine._load",
        "replica/group_clock:GroupClock.join",
    ),
    "the step loop ends every sequence, whatever ends the loop": (
        "replica/api/answers:Answer.next",
        "replica/request:OutputStream.__aiter__",
        "replica/step_loop:StepLoop.warm_up",
    ),
    "the end of a process of ours ends it, and that is seen or follows a kill": (
        "coordinator/private_redis:PrivateRedis._stop",
        "replica/api/grammar_checkers:GrammarCheckers._end",
        "replica/chat_command:_stop",
        "replica/api/grammar_check:check",
        "replica/api/grammar_check:main",
        "replica/engine:_read_line",
        "replica/process_tree:follow_parent.follow",
        "replica/remote_rank:_next_number",
        "replica/worker:FrameChannel._read",
        "replica/worker:FrameChannel.send",
    ),
    "it does not wait: the socket does not block, is new, or takes so little at once": (
        "coordinator/member:Member._read",
        "proxy/control:ControlConnections.handle",
        "replica/executor_mp:LocalRanks._spawn",
        "replica/remote_rank:Lifeline.release",
        "replica/remote_rank:_dial",
        "replica/remote_rank:_report",
        "replica/supervisor:EngineProcess.live",
        "replica/tcp_links:TcpLinks._accept",
        "replica/tcp_links:TcpLinks._hello",
    ),
    "the system's resolver has a deadline of its own": ("coordinator/master:bind",),
}


def waits(path: str, source: str) -> Iterator[str]:
    """`file:function call` of everything that may wait for ever."""
    yield from _Walk(path.removesuffix(".py")).of(ast.parse(source, path))


class _Walk:
    def __init__(self, path: str) -> None:
        self._path = path

    def of(self, node: ast.AST, names: tuple[str, ...] = (), *, is_async: bool = False) -> Iterator[str]:
        """What may wait for ever below this node, which is in the functions `names`, the innermost last."""
        found: list[ast.AST] = []
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names, is_async = (*names, node.name), isinstance(node, ast.AsyncFunctionDef)
            case ast.AsyncWith() if any(_name(item.context_expr) in TIMEOUTS for item in node.items):
                return  # whatever is in it has an end
            case ast.AsyncFor():
                found = [node]
            case ast.Await():
                found = [node.value] if _name(node.value) in ASYNC_WAITS else []
            case ast.Call() if not is_async and _name(node) in BLOCKING_WAITS:
                found = [node]
            case ast.Call() if _name(node) in TASK_MAKERS:
                found = [argument for argument in node.args if _name(argument) in ASYNC_WAITS]
        where = f"{self._path}:{'.'.join(names)}"
        yield from (f"{where} {_name(wait) or 'async for'}" for wait in found if not _has_end(wait, is_async))
        for child in ast.iter_child_nodes(node):
            yield from self.of(child, names, is_async=is_async)


def _name(node: ast.AST) -> str:
    """The last part of what is called."""
    if not isinstance(node, ast.Call):
        return ""
    match node.func:
        case ast.Attribute(value=ast.Name(id="os"), attr=attr):
            return f"os.{attr}"
        case ast.Attribute(attr=attr) | ast.Name(id=attr):
            return attr
    return ""


def _has_end(wait: ast.AST, is_async: bool) -> bool:
    """Whether it has a timeout of its own, or is `mapping.get(key)`, `separator.join(parts)` or the like."""
    if not isinstance(wait, ast.Call):
        return False
    has_value = bool(wait.args) and _name(wait) in ("get", "join", "wait", "acquire", "accept") and not is_async
    return has_value or any(keyword.arg == "timeout" for keyword in wait.keywords)


def all_waits() -> list[str]:
    paths = (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py")))
    files = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}
    return [wait for path, source in files.items() if not path.startswith(SIMULATION) for wait in waits(path, source)]


def test_nothing_waits_without_a_deadline_but_for_a_named_reason() -> None:
    named = {place for places in ENDS.values() for place in places}
    assert [wait for wait in all_waits() if wait.split()[0] not in named] == []


def test_every_named_exception_is_needed() -> None:
    found = {wait.split()[0] for wait in all_waits()}
    assert [place for places in ENDS.values() for place in places if place not in found] == []


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("async def f(q):\n    await q.get()", "m:f get"),
        ("async def f(lock):\n    await lock.acquire()", "m:f acquire"),
        ("class C:\n    async def f(self):\n        await self.event.wait()", "m:C.f wait"),
        ("async def f(reader):\n    return decode(await reader.readexactly(4))", "m:f readexactly"),
        ("async def f(writer):\n    await writer.drain()", "m:f drain"),
        ("async def f(tasks, e):\n    tasks.create_task(e.wait())", "m:f wait"),
        ("async def f(tasks):\n    await asyncio.wait(tasks)", "m:f wait"),
        ("async def f(body):\n    async for piece in body:\n        pass", "m:f async for"),
        ("async def f(e):\n    async with asyncio.timeout(1):\n        pass\n    await e.wait()", "m:f wait"),
        ("async def f(e):\n    async with session.get(url):\n        await e.wait()", "m:f wait"),
        ("def f(work):\n    work.wait()", "m:f wait"),
        ("def f(thread):\n    thread.join()", "m:f join"),
        ("def f(sock):\n    return sock.recv(4)", "m:f recv"),
        ("def f(fd):\n    return os.read(fd, 1)", "m:f os.read"),
        ("async def f():\n    def g(q):\n        q.get()\n    await to_thread(g)", "m:f.g get"),
    ],
)
def test_a_wait_without_an_end_is_found(source: str, found: str) -> None:
    assert list(waits("m.py", source)) == [found]


@pytest.mark.parametrize(
    "source",
    [
        "async def f(e):\n    async with asyncio.timeout(limit_s):\n        await e.wait()",
        "async def f(tasks):\n    await asyncio.wait(tasks, timeout=1)",
        "async def f(d):\n    return d.get(1)",
        "async def f(e):\n    e.set()\n    await asyncio.sleep(1)",
        "def f(thread, event, queue):\n    thread.join(1.0)\n    event.wait(1.0)\n    queue.get(timeout=1.0)",
        "def f(parts):\n    return ', '.join(parts)",
    ],
)
def test_a_wait_with_an_end_is_not_found(source: str) -> None:
    assert list(waits("m.py", source)) == []
