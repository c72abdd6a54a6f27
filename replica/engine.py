"""One replica's process, `python -m replica.engine SUPERVISOR_FD`: HTTP, tokenizer, scheduler and step loop.

    supervisor -> engine   the settings as one line of JSON: a socket keeps secrets out of `ps`
    engine -> supervisor   lines: `ready`, once; `epoch N`, when its group begins one; `failed`, when the group has
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
from typing import TYPE_CHECKING, Final

from aiohttp import web

from proxy.protocol import Hello
from replica.address import advertised_url, host_and_port, http_url, listen
from replica.api.http_io import HttpServerLog
from replica.api.served_model import ServedModel
from replica.api.server import build_app
from replica.cache_size import RankSpace, local_space
from replica.checkpoint import Checkpoint, model_hash
from replica.cli import configure_logging, print_error
from replica.config import ReplicaConfig
from replica.errors import ConfigError, CutOff, GroupLost, WorkerFailed, first_error
from replica.executor import RankExecutor, RankHost
from replica.executor_mp import LocalRanks
from replica.frames import Init, Ready
from replica.group_config import group_config
from replica.lifecycle import EngineState, Lifecycle
from replica.model_config import ModelConfig
from replica.plan import GIB
from replica.process_tree import EPOCH, GROUP_FAILED, READY, follow_parent, new_event_loop
from replica.progress_bar import ProgressBar
from replica.rank_init import rank_init
from replica.registration import Registration
from replica.scheduler import Scheduler
from replica.step_clock import DRAIN, STOP, LocalClock, Reconfiguration
from replica.step_loop import StepLoop
from replica.warm_up import warm_up_sequences

if TYPE_CHECKING:
    from replica.group_clock import GroupClock

logger = logging.getLogger("replica.engine")  # __name__ is __main__ here

MAX_HEADER_BYTES: Final = 64 * 1024  # what a proxy lets through
FLUSH_S: Final = 5.0  # at the end, clients have so long to read what is already theirs
LEAVE_S: Final = 3.0  # a drained replica waits so long for a last step, beyond the others' time to drain


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
    init: Init  # of its first rank
    lifecycle: Lifecycle
    executor: RankExecutor
    group: GroupClock | None  # of several replicas
    loop: StepLoop
    registration: Registration
    runner: web.AppRunner
    stop: StopRequests

    async def run(self, tell: Callable[[bytes], None]) -> None:
        """Loads, serves until asked to stop, drains; tells the supervisor how far it has come.

        Raises a group of ConfigError, GroupLost or WorkerFailed.
        """
        async with asyncio.TaskGroup() as tasks:
            loading = tasks.create_task(self._load())
            asked = tasks.create_task(self.stop.asked())
            await asyncio.wait({loading, asked}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                loading.cancel()
                return
            ready, first = loading.result()
            self.loop.add_blocks(ready.num_blocks)
            self._tell_epochs(tell)
            stepping = tasks.create_task(self.loop.run(first))
            await self.loop.warm_up(warm_up_sequences(self.init, num_blocks=ready.num_blocks))
            registrations = [tasks.create_task(self.registration.run(url)) for url in self.config.proxy_urls]
            self.lifecycle.state = EngineState.READY
            tell(READY)
            logger.info(
                "replica ready url=%s model=%s dp_rank=%d kv_blocks=%d load_s=%.1f",
                self.url,
                self.config.model_name,
                self.config.dp_rank,
                ready.num_blocks,
                ready.load_s,
            )
            told = tasks.create_task(self.loop.commanded(DRAIN))  # by another replica of the group
            await asyncio.wait({asked, told}, return_when=asyncio.FIRST_COMPLETED)
            self.loop.want(DRAIN)
            await self._drain()
            await self._leave(stepping)
            await self.close_http()  # proxies must not see this replica go while answers are on their way to them
            for task in (asked, told, stepping, *registrations):
                task.cancel()

    async def close(self) -> None:
        """Ends whatever is left."""
        if self.lifecycle.state is EngineState.FAILED:
            self.executor.kill()  # its ranks may be in a collective whose peers are gone
        if self.group is not None:
            await self.group.close()
        await self.executor.close()
        await self.close_http()

    async def close_http(self) -> None:
        """Stops listening and gives the handlers FLUSH_S to end. Does nothing the second time."""
        if self.runner.server is not None:
            await self.runner.cleanup()

    async def _load(self) -> tuple[Ready, Reconfiguration | None]:
        """Meets the other replicas, then loads. Returns how the first epoch begins, too; None for a rank alone."""
        if self.group is None:
            first = Reconfiguration(epoch=0, members=(0,)) if self.executor.num_ranks > 1 else None
            return await self._start_ranks(), first
        first = await self.group.join()
        async with asyncio.TaskGroup() as tasks:
            watch = tasks.create_task(self.group.failed())
            ready = await self._start_ranks()
            watch.cancel()
        return ready, first

    async def _start_ranks(self) -> Ready:
        """Loads the weights. The step loop connects the ranks."""
        ready = await self.executor.start(
            self.init, timeout_s=self.config.startup_timeout_s, on_progress=ProgressBar(sys.stderr).update
        )
        logger.info(
            "weights loaded dp_rank=%d ranks=%d weights_gib=%.2f load_s=%.1f",
            self.config.dp_rank,
            self.executor.num_ranks,
            ready.weight_bytes / GIB,
            ready.load_s,
        )
        return ready

    def _tell_epochs(self, tell: Callable[[bytes], None]) -> None:
        told = 0

        def tell_epoch() -> None:
            nonlocal told
            epoch = self.loop.group.epoch
            if epoch != told:
                told = epoch
                tell(EPOCH + b" %d" % epoch)

        tell_epoch()
        self.loop.subscribe(tell_epoch)

    async def _drain(self) -> None:
        """Takes no new requests and waits for the running ones, until the time is up or a second request."""
        logger.info(
            "replica drains, a second signal stops at once running=%d timeout_s=%g",
            self.loop.num_unfinished,
            self.config.drain_timeout_s,
        )
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

    async def _leave(self, stepping: asyncio.Task[None]) -> None:
        """Steps on with the group until all of its replicas have drained, so that none is missed while it is needed."""
        self.loop.want(_drained(self.config.dp_rank))
        limit_s = LEAVE_S if self.stop.count > 1 else LEAVE_S + self.config.drain_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                await self.loop.commanded_by_all(_drained)
                self.loop.want(STOP)
                await asyncio.wait({stepping})
        except TimeoutError:
            logger.warning("replica leaves without a last step waited_s=%g", limit_s)


def _drained(dp_rank: int) -> str:
    """The command by which a replica says that it has no more requests."""
    return f"drained {dp_rank}"


async def rank_host(config: ReplicaConfig) -> tuple[RankHost, RankSpace]:
    """Where the ranks are started, and what each has there. Raises ConfigError, WorkerFailed."""
    if config.executor == "ray":
        from replica.executor_ray import RayRanks  # only here: nothing else needs ray

        return await RayRanks.place(config)
    return LocalRanks(config.layout.attn_tp), local_space(config)


def make_scheduler(config: ReplicaConfig, model: ServedModel) -> Scheduler:
    """As the settings say. It has no blocks yet."""
    return Scheduler(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=model.max_model_len,
        block_size=config.block_size,
        max_prefill_tokens=config.max_prefill_tokens,
        has_prefix_cache=not config.no_prefix_cache,
    )


def build(
    config: ReplicaConfig, sock: socket.socket, stop: StopRequests, *, host: RankHost, space: RankSpace
) -> Engine:
    """Checks the checkpoint, without torch, and makes every part. Raises ConfigError."""
    model_config = ModelConfig.load(config.model)
    checkpoint = Checkpoint.open(config.model)
    checkpoint.check(model_config)
    model = ServedModel.load(config, model_config)
    init = rank_init(config, model_config, space, max_model_len=model.max_model_len)
    port = sock.getsockname()[1]
    hello = make_hello(config, model, model_hash(checkpoint, init.dtype), port)

    lifecycle = Lifecycle()
    executor = RankExecutor(host)
    group = None
    if config.layout.dp > 1:
        from replica.group_clock import GroupClock  # only here: a replica alone must not need a coordinator

        shared = group_config(config, model_config, checkpoint)
        group = GroupClock(config, hello, shared, collectives=executor.collectives_entered, is_alive=executor.is_alive)
    scheduler = make_scheduler(config, model)
    loop = StepLoop(
        scheduler=scheduler,
        executor=executor,
        clock=group or LocalClock(),
        dp_rank=config.dp_rank,
        max_waiting=config.max_waiting,
        progress_deadline_s=config.progress_deadline_s,
        startup_timeout_s=config.startup_timeout_s,
    )
    app = build_app(config=config, model=model, loop=loop, lifecycle=lifecycle)
    return Engine(
        config=config,
        url=http_url(config.host, port),
        init=init,
        lifecycle=lifecycle,
        executor=executor,
        group=group,
        loop=loop,
        registration=Registration(config=config, hello=hello, loop=loop),
        runner=make_runner(app),
        stop=stop,
    )


def make_runner(app: web.Application) -> web.AppRunner:
    """The HTTP server around the application."""
    return web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=FLUSH_S,
        max_line_size=MAX_HEADER_BYTES,
        max_field_size=MAX_HEADER_BYTES,
        logger=HttpServerLog(),
    )


def make_hello(config: ReplicaConfig, model: ServedModel, hash_: str, port: int) -> Hello:
    """How the replica that listens at `port` introduces itself."""
    url = advertised_url(config, port)
    # Not of the machine's name: two machines may have the same one, and a proxy drops the older of two equal ids. What
    # reaches one replica reaches no other.
    replica_id = host_and_port(url)
    return Hello(
        replica_id=replica_id,
        incarnation=uuid.uuid4().hex,
        url=url,
        model=config.model_name,
        model_hash=hash_,
        group=config.group or replica_id,
        dp_rank=config.dp_rank,
        max_model_len=model.max_model_len,
        max_num_seqs=config.max_num_seqs,
    )


async def serve(config: ReplicaConfig, supervisor_fd: int) -> None:
    """Runs a replica until it is asked to stop. Raises ConfigError, or a group of it, GroupLost or WorkerFailed."""
    stop = StopRequests()
    asyncio_loop = asyncio.get_running_loop()

    def on_stop_request() -> None:  # in a thread
        with suppress(RuntimeError):  # the event loop is closed: the process ends already
            asyncio_loop.call_soon_threadsafe(stop.add)

    def tell(line: bytes) -> None:
        with suppress(OSError):  # the supervisor is gone, which ends this process
            os.write(supervisor_fd, line + b"\n")

    follow_parent(supervisor_fd, on_stop_request)
    sock = listen(config.host, config.port)
    placed = await _placed(config, stop)
    if placed is None:
        return
    host, space = placed
    try:
        engine = build(config, sock, stop, host=host, space=space)
    except ConfigError:
        await host.close()
        raise
    try:
        await engine.runner.setup()
        await web.SockSite(engine.runner, sock).start()
        await engine.run(tell)
    except* (ConfigError, GroupLost, WorkerFailed) as errors:
        error = first_error(errors)
        engine.lifecycle.state, engine.lifecycle.reason = EngineState.FAILED, str(error)
        if isinstance(error, GroupLost) and not isinstance(error, CutOff):
            tell(GROUP_FAILED)
        raise
    finally:
        await engine.close()
    logger.info("replica stopped")


async def _placed(config: ReplicaConfig, stop: StopRequests) -> tuple[RankHost, RankSpace] | None:
    """As `rank_host`; None if the replica is to stop before that is known."""
    async with asyncio.TaskGroup() as tasks:
        placing = tasks.create_task(rank_host(config))
        asked = tasks.create_task(stop.asked())
        await asyncio.wait({placing, asked}, return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        placing.cancel()
    return None if placing.cancelled() else placing.result()


def _read_line(fd: int) -> str:
    """The supervisor's line; byte by byte, because what follows it is read elsewhere."""
    received = bytearray()
    while (byte := os.read(fd, 1)) != b"\n":
        if not byte:
            sys.exit(1)  # the supervisor is gone
        received += byte
    return received.decode()


def main(argv: list[str]) -> int:
    """The process: returns its exit code."""
    (supervisor_fd,) = (int(value) for value in argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_logging()
    config = ReplicaConfig.from_json(_read_line(supervisor_fd))
    status = 0
    try:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(serve(config, supervisor_fd))
    except* ConfigError as errors:
        print_error(first_error(errors))
        status = 2
    except* CutOff as errors:
        logger.error("replica is cut off from its group reason=%s", first_error(errors))
        status = 1
    except* GroupLost as errors:
        logger.info("replica left its group reason=%s", first_error(errors))  # the master's process says it louder
        status = 1
    except* WorkerFailed as errors:
        logger.error("replica failed reason=%s", first_error(errors))
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
