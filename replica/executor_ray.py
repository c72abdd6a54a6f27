"""Starts a replica's ranks on a Ray cluster: one actor per rank, in a placement group of the replica's own.

An actor runs the worker in its own process, which dials back (remote_rank.py); Ray starts it, says how it ended, and
ends it when this engine is gone. Steps do not touch Ray. The nodes need the same installation, and the checkpoint at
the same path. What the ranks print is in Ray's logs of their nodes.

Loaded only for --executor ray: others need no ray.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from replica.cache_size import RankSpace, free_gpus_bytes, free_host_bytes, resolve_device
from replica.config import ReplicaConfig
from replica.errors import ConfigError, WorkerFailed
from replica.frames import Init, encode
from replica.placement import Node, Resources, check_size, home, not_placed, rank_needs, ranks_that_fit
from replica.process_tree import describe_status
from replica.rank_board import RankBoard
from replica.rank_link import RankLink
from replica.remote_rank import Address, Lifeline, RankDoor, run
from replica.worker_environment import WORKER_ENVIRONMENT

logger = logging.getLogger(__name__)

DIAL_S: Final = 5.0
CONNECT_S: Final = 40.0  # Ray itself gives a head up after 30
PLACE_S: Final = 30.0  # ranks of an earlier life may have to go first
START_S: Final = 120.0  # of the actors' processes, on nodes that have much to do
CLOSE_S: Final = 5.0
REASON_S: Final = 0.2  # Ray tells so soon after its connection's end how an actor has ended; peers wait meanwhile
MAX_REASON_CHARS: Final = 200

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Where an actor runs."""

    address: str  # of its node
    pid: int
    free_bytes: int  # of memory: its GPU's, or all of the node's


class RankActor:
    """One rank's process."""

    def site(self, device: str) -> Site:
        """Where it runs, and what there is."""
        if device == "cpu":
            free_bytes = free_host_bytes()
        else:
            free_bytes = min(free_gpus_bytes(os.environ.get("CUDA_VISIBLE_DEVICES", "")))
        return Site(address=ray.util.get_node_ip_address(), pid=os.getpid(), free_bytes=free_bytes)

    def run(self, engine: Address, token: bytes, local_rank: int, num_ranks: int) -> int:
        """The worker's exit code."""
        return run(engine, token, local_rank=local_rank, num_ranks=num_ranks)


class ActorProcess:
    """A worker in an actor. See RankProcess."""

    def __init__(self, actor: Any, site: Site, end: asyncio.Future[str], lifeline: Lifeline) -> None:
        self._actor = actor
        self._site = site
        self._end = end  # as Ray tells it
        self._lifeline = lifeline

    def __str__(self) -> str:
        return f"node={self._site.address} pid={self._site.pid}"

    @property
    def end(self) -> str | None:
        """See RankProcess."""
        if self._end.done():
            return self._end.result()
        return "its connection ended" if self._lifeline.ended.done() else None

    async def wait(self) -> str:
        """See RankProcess."""
        ends: set[asyncio.Future[Any]] = {self._end, self._lifeline.ended}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait({self._end}, timeout=REASON_S)
        how = self.end
        assert how is not None  # one of the two has happened
        return how

    def release(self) -> None:
        """See RankProcess."""
        self._lifeline.release()

    def kill(self) -> None:
        """See RankProcess."""
        if not self._end.done():
            ray.kill(self._actor)

    def close(self) -> None:
        """See RankProcess."""
        self._lifeline.close()


class RayRanks:
    """The ranks of one replica as actors. See RankHost. `place` makes it."""

    def __init__(self, group: PlacementGroup, actors: list[Any], sites: list[Site]) -> None:
        self.num_ranks = len(actors)
        self.board = RankBoard(self.num_ranks)
        self._group = group
        self._actors = actors
        self._sites = sites
        self._door: RankDoor | None = None

    @classmethod
    async def place(cls, config: ReplicaConfig) -> tuple[RayRanks, RankSpace]:
        """Connects with the cluster and starts the actors, which have nothing to do yet.

        Raises ConfigError without a cluster, or when it lacks what the ranks need, WorkerFailed when it breaks.
        """
        try:
            async with asyncio.timeout(CONNECT_S):
                await _in_thread(partial(_connect, config.ray_address))
        except TimeoutError as err:
            raise ConfigError(f"{_at(config.ray_address)} does not answer within {CONNECT_S:g} s") from err
        return await _in_thread(partial(_place, config))

    async def start(self, init: Init) -> AsyncIterator[RankLink]:
        """See RankHost."""
        self._door = RankDoor(ray.util.get_node_ip_address(), self.num_ranks)
        address, token = self._door.address, self._door.token
        ends = [
            _end_of(actor.run.remote(address, token, rank, self.num_ranks)) for rank, actor in enumerate(self._actors)
        ]
        for rank, (frames, lifeline) in enumerate(await _admitted(self._door, ends)):
            site = self._sites[rank]
            logger.info("rank placed rank=%d node=%s pid=%d", init.rank + rank, site.address, site.pid)
            process = ActorProcess(self._actors[rank], site, ends[rank], Lifeline(lifeline, self.board, rank))
            reader, writer = await asyncio.open_connection(sock=frames)
            link = RankLink(rank, process, reader, writer)
            link.write(encode(replace(init, rank=init.rank + rank, peer_host=site.address)))
            yield link

    async def close(self) -> None:
        """See RankHost."""
        if self._door is not None:
            self._door.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await _in_thread(self._disconnect)
        except TimeoutError:
            logger.warning("Ray does not answer, the actors end with this process waited_s=%g", CLOSE_S)

    def _disconnect(self) -> None:
        if ray.is_initialized():
            remove_placement_group(self._group)  # which ends the actors, frozen ones too
            ray.shutdown()


def _connect(address: str) -> None:
    """Raises ConfigError."""
    logging.getLogger("ray").setLevel(logging.ERROR)  # it would say that SIGTERM is left to us
    try:
        if address != "auto":  # Ray would try for half a minute, and print about it
            host, _, port = address.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=DIAL_S).close()
        ray.init(address=address, log_to_driver=False, configure_logging=False)
    except (OSError, OverflowError, RuntimeError, ValueError, RayError) as err:
        raise ConfigError(f"{_at(address)} cannot be used: {_one_line(err)}") from err


def _place(config: ReplicaConfig) -> tuple[RayRanks, RankSpace]:
    """See RayRanks.place."""
    device = resolve_device(config).partition(":")[0]
    needs = rank_needs(config, device)
    nodes = [
        Node(address=node["NodeManagerAddress"], resources=node["Resources"]) for node in ray.nodes() if node["Alive"]
    ]
    check_size(config, needs, nodes)
    num_ranks = config.layout.attn_tp
    address = home(config, needs, nodes, ray.util.get_node_ip_address())
    bundle = {**needs, f"node:{address}": 0.001} if address else dict(needs)  # Ray's name for being on that node
    group = placement_group([bundle] * num_ranks, strategy="PACK")
    if not group.wait(PLACE_S):
        raise not_placed(config, needs, ray.available_resources(), PLACE_S)
    actors = [_actor(group, needs, rank) for rank in range(num_ranks)]
    try:
        sites: list[Site] = ray.get([actor.site.remote(device) for actor in actors], timeout=START_S)
    except RayTaskError as err:
        raise ConfigError(_one_line(err.cause)) from err
    except (RayError, GetTimeoutError) as err:
        raise WorkerFailed(f"an actor does not start: {_one_line(err)}") from err
    space = RankSpace(
        device="cpu" if device == "cpu" else "cuda:0",  # an actor sees its own GPU only
        free_bytes=min(_share_bytes(config, needs, device, site, nodes) for site in sites),
        num_threads=config.num_threads or 1,
    )
    return RayRanks(group, actors, sites), space


def _actor(group: PlacementGroup, needs: Resources, bundle: int) -> Any:
    actor_class: Any = ray.remote(RankActor)
    return actor_class.options(
        num_cpus=needs["CPU"],
        num_gpus=needs.get("GPU", 0),
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle),
        runtime_env={"env_vars": {name: os.environ.get(name, value) for name, value in WORKER_ENVIRONMENT.items()}},
    ).remote()


def _share_bytes(config: ReplicaConfig, needs: Resources, device: str, site: Site, nodes: list[Node]) -> int:
    """What one rank may take of a site's memory: all of its GPU's, or an equal share of its node's."""
    if device != "cpu":
        return site.free_bytes
    most = max(ranks_that_fit(needs, node) for node in nodes if node.address == site.address)
    return site.free_bytes // min(most, config.layout.world)


async def _admitted(door: RankDoor, ends: list[asyncio.Future[str]]) -> list[tuple[socket.socket, socket.socket]]:
    """The connections of all ranks. Raises WorkerFailed when one ends instead of dialling."""
    async with asyncio.TaskGroup() as tasks:
        admitting = tasks.create_task(door.admit())
        waits: set[asyncio.Future[Any]] = {admitting, *ends}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if not admitting.done():
            admitting.cancel()
    if admitting.cancelled():
        rank, how = next((rank, end.result()) for rank, end in enumerate(ends) if end.done())
        raise WorkerFailed(f"the worker of rank {rank} ended: {how}")
    return admitting.result()


def _end_of(reference: ray.ObjectRef[int]) -> asyncio.Future[str]:
    """How an actor's worker ends, in words, once it has."""
    loop = asyncio.get_running_loop()
    end: asyncio.Future[str] = loop.create_future()

    def tell(result: concurrent.futures.Future[int]) -> None:  # in a thread of Ray's
        error = result.exception()
        how = describe_status(result.result()) if error is None else f"its actor died, {_one_line(error)}"
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(end.set_result, how)

    reference.future().add_done_callback(tell)
    return end


def _one_line(error: BaseException) -> str:
    """What a message of Ray's comes down to; they tell of many lines, the reason last."""
    words = " ".join(str(error).split()).rpartition("is dead because ")[2]
    return words.partition(". ")[0].rstrip(".")[:MAX_REASON_CHARS]


def _at(address: str) -> str:
    return f"the Ray cluster at {address} (--ray-address)"


async def _in_thread(call: Callable[[], T]) -> T:
    """As asyncio.to_thread, but a call that is given up keeps nobody waiting, the end of the process neither."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run_call() -> None:
        try:
            result = call()
        except BaseException as err:  # the border of a thread: whoever waits raises it
            future.set_exception(err)
        else:
            future.set_result(result)

    threading.Thread(target=run_call, name="ray", daemon=True).start()
    return await asyncio.wrap_future(future)
