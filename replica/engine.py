"""One replica's process, `python -m replica.engine SUPERVISOR_FD`: HTTP, tokenizer, scheduler and step loop.

    supervisor -> engine   the settings as one line of JSON: a socket keeps secrets out of `ps`
    engine -> supervisor   one byte, once the replica is ready
    supervisor -> engine   one byte: drain; another: stop at once
    EOF                    the supervisor is gone, and the engine ends at once

SIGINT and SIGTERM are ignored. Ctrl-C, `timeout` and service managers send theirs to every process of a command, and
counting one twice would cut off what a drain is for; so only the supervisor reacts to signals.

`build` makes every part, in the order in which it is needed. No torch is imported: that is the workers'.

Exit codes: 0 stopped as asked, 1 failed, 2 bad setting or checkpoint (one line on stderr).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from aiohttp import web

from proxy.protocol import Hello
from replica.address import advertised_url, http_url, listen
from replica.cache_size import GIB, free_memory_bytes, kv_cache_bytes, resolve_device, weight_bytes
from replica.checkpoint import Checkpoint, model_hash
from replica.cli import configure_logging, print_error
from replica.config import ReplicaConfig
from replica.errors import ConfigError, WorkerFailed
from replica.executor_mp import MpExecutor
from replica.frames import Init
from replica.lifecycle import EngineState, Lifecycle
from replica.model_config import ModelConfig
from replica.process_tree import follow_parent
from replica.progress_bar import ProgressBar
from replica.registration import Registration
from replica.scheduler import Scheduler
from replica.served_model import ServedModel
from replica.server import build_app
from replica.step_loop import StepLoop

logger = logging.getLogger("replica.engine")  # __name__ is __main__ here

READY_BYTE: Final = b"r"
FLUSH_S: Final = 5.0  # at the end, clients have so long to read what is already theirs


class StopRequests:
    """Counts what the supervisor asks for: the first request is to drain, the second to stop at once."""

    def __init__(self) -> None:
        self.count = 0
        self.changed = asyncio.Event()

    def add(self) -> None:
        """One more."""
        self.count += 1
        self.changed.set()

    async def asked(self) -> None:
        """Waits for the first."""
        while not self.count:
            await self.changed.wait()


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The parts of one replica. `build` makes them."""

    config: ReplicaConfig
    url: str  # where it listens
    init: Init
    lifecycle: Lifecycle
    executor: MpExecutor
    loop: StepLoop
    registration: Registration
    runner: web.AppRunner
    stop: StopRequests

    async def run(self, on_ready: Callable[[], object]) -> None:
        """Loads, serves until asked to stop, drains. Raises a group of ConfigError or WorkerFailed."""
        async with asyncio.TaskGroup() as tasks:
            bar = ProgressBar(sys.stderr)
            loading = tasks.create_task(
                self.executor.start(self.init, timeout_s=self.config.startup_timeout_s, on_progress=bar.update)
            )
            asked = tasks.create_task(self.stop.asked())
            await asyncio.wait({loading, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                loading.cancel()
                return
            ready = loading.result()
            self.loop.add_blocks(ready.num_blocks)
            watches = [self.executor.watch(rank) for rank in range(self.executor.num_ranks)]
            registrations = [self.registration.run(url) for url in self.config.proxy_urls]
            services = [self.loop.run(), *watches, *registrations]
            running = [tasks.create_task(service) for service in services]
            self.lifecycle.state = EngineState.READY
            on_ready()
            logger.info(
                "replica ready url=%s model=%s kv_blocks=%d load_s=%.1f",
                self.url,
                self.config.model_name,
                ready.num_blocks,
                ready.load_s,
            )
            await asked
            await self._drain()
            await self.close_http()  # proxies must not see this replica go while answers are on their way to them
            for task in running:
                task.cancel()

    async def close_http(self) -> None:
        """Stops listening and gives the handlers FLUSH_S to end. Does nothing the second time."""
        if self.runner.server is not None:
            await self.runner.cleanup()

    async def _drain(self) -> None:
        """Takes no new requests and waits for the running ones, until the time is up or a second request."""
        logger.info("replica drains running=%d timeout_s=%g", self.loop.num_unfinished, self.config.drain_timeout_s)
        self.lifecycle.state, self.lifecycle.reason = EngineState.DRAINING, "the replica is stopping"
        self.registration.leaving(self.lifecycle.reason)
        unsubscribe = self.loop.subscribe(self.stop.changed.set)
        with suppress(TimeoutError):  # then the rest is aborted, as after a second request
            async with asyncio.timeout(self.config.drain_timeout_s):
                while self.loop.num_unfinished and self.stop.count < 2:
                    self.stop.changed.clear()
                    await self.stop.changed.wait()
        unsubscribe()
        if self.loop.num_unfinished:
            logger.warning("replica aborts requests running=%d", self.loop.num_unfinished)
        self.loop.abort_all()


def build(config: ReplicaConfig, sock: socket.socket, stop: StopRequests) -> Engine:
    """Checks the checkpoint, without torch, and makes every part. Raises ConfigError."""
    model_config = ModelConfig.load(config.model)
    checkpoint = Checkpoint.open(config.model)
    checkpoint.check(model_config)
    model = ServedModel.load(config, model_config)
    init = _worker_init(config, model_config, checkpoint, max_model_len=model.max_model_len)
    host, port = config.host, sock.getsockname()[1]

    lifecycle = Lifecycle()
    executor = MpExecutor()
    scheduler = Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        block_size=config.block_size,
    )
    loop = StepLoop(
        scheduler=scheduler,
        executor=executor,
        max_waiting=config.max_waiting,
        progress_deadline_s=config.progress_deadline_s,
    )
    app = build_app(config=config, model=model, loop=loop, lifecycle=lifecycle)
    replica_id = f"{socket.gethostname()}:{port}"
    hello = Hello(
        replica_id=replica_id,
        incarnation=uuid.uuid4().hex,
        url=advertised_url(config, port),
        model=config.model_name,
        model_hash=model_hash(checkpoint, init.dtype),
        group=config.group or replica_id,
        dp_rank=0,
        max_model_len=model.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )
    return Engine(
        config=config,
        url=http_url(host, port),
        init=init,
        lifecycle=lifecycle,
        executor=executor,
        loop=loop,
        registration=Registration(config=config, hello=hello, loop=loop),
        runner=web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=FLUSH_S),
        stop=stop,
    )


async def serve(config: ReplicaConfig, supervisor_fd: int) -> None:
    """Runs a replica until it is asked to stop. Raises ConfigError, alone or in a group, or a group of WorkerFailed."""
    stop = StopRequests()
    asyncio_loop = asyncio.get_running_loop()

    def on_stop_request() -> None:  # in a thread
        with suppress(RuntimeError):  # the event loop is closed: the process ends already
            asyncio_loop.call_soon_threadsafe(stop.add)

    follow_parent(supervisor_fd, on_stop_request)
    sock = listen(config.host, config.port)
    engine = build(config, sock, stop)
    try:
        await engine.runner.setup()
        await web.SockSite(engine.runner, sock).start()
        await engine.run(on_ready=lambda: os.write(supervisor_fd, READY_BYTE))
    except* (ConfigError, WorkerFailed) as errors:
        engine.lifecycle.state, engine.lifecycle.reason = EngineState.FAILED, str(_first(errors))
        raise
    finally:
        await engine.executor.close()
        await engine.close_http()
    logger.info("replica stopped")


def _worker_init(
    config: ReplicaConfig, model_config: ModelConfig, checkpoint: Checkpoint, *, max_model_len: int
) -> Init:
    dtype = model_config.dtype if config.dtype == "auto" else config.dtype
    device = resolve_device(config)
    loaded_bytes = weight_bytes(checkpoint, dtype)
    cache_bytes = kv_cache_bytes(
        config,
        model=model_config,
        dtype=dtype,
        max_model_len=max_model_len,
        loaded_bytes=loaded_bytes,
        free_bytes=free_memory_bytes(device),
    )
    num_tokens = cache_bytes // model_config.kv_bytes_per_token(dtype)
    logger.info(
        "memory planned device=%s dtype=%s weights_gib=%.2f kv_cache_gib=%.2f kv_tokens=%d",
        device,
        dtype,
        loaded_bytes / GIB,
        cache_bytes / GIB,
        num_tokens,
    )
    return Init(
        model=str(config.model),
        dtype=dtype,
        device=device,
        num_threads=config.num_threads or len(os.sched_getaffinity(0)),
        block_size=config.block_size,
        kv_cache_bytes=cache_bytes,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )


def _first(errors: BaseExceptionGroup[Any]) -> BaseException:
    """One of the errors: they have one cause, seen by several tasks."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _read_line(fd: int) -> str:
    """The supervisor's line; byte by byte, because what follows it is read elsewhere."""
    received = bytearray()
    while (byte := os.read(fd, 1)) != b"\n":
        if not byte:
            sys.exit(1)  # the supervisor is gone
        received += byte
    return received.decode()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # it is not made for every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def main(argv: list[str]) -> int:
    """The process: returns its exit code."""
    (supervisor_fd,) = (int(value) for value in argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_logging()
    config = ReplicaConfig.from_json(_read_line(supervisor_fd))
    status = 0
    try:
        with asyncio.Runner(loop_factory=_new_event_loop) as runner:
            runner.run(serve(config, supervisor_fd))
    except* ConfigError as errors:
        print_error(_first(errors))
        status = 2
    except* WorkerFailed as errors:
        logger.error("replica failed reason=%s", _first(errors))
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
