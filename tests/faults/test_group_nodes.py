"""A group over two machines, a replica on each, whose supervisors share a Redis: one is lost, or cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.store import LEASE_S
from tests.commands import BIN, DEMO_MODEL, READY_TIMEOUT_S, Command, Commands, free_port, wait_until
from tests.faults.networks import Network
from tests.faults.survival import NOTICED_S, ROUNDS, TIMEOUT_S, Group, kill, stopped, under_load, wait_gone
from tests.redis_server import redis_server

DEADLINE_S = 2.0
# A master that is cut off goes on until nobody has heard of it for the deadline; the new one waits for its members.
CUT_OFF_S = DEADLINE_S + 2 * LEASE_S + 2.0
CUTS = (
    pytest.param(0, id="master"),
    pytest.param(1, id="other"),
)  # which machine is alone; a single round has the first

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.parametrize("round_", ROUNDS)]


@pytest.fixture(autouse=True)
def shared_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_GROUP_SECRET", "a secret of both machines")


def start_node(
    commands: Commands, rank: int, *options: str, host: str, master: str, redis_url: str, prefix: tuple[str, ...] = ()
) -> Command:
    """One machine's command, which is not waited for."""
    address, port = master.split(":")
    argv = [*prefix, str(BIN / "replica"), "serve", str(DEMO_MODEL), "--dp", "2", "--tp", "2", "--nnodes", "2"]
    argv += ["--node-rank", str(rank), "--master-addr", address, "--master-port", port, "--redis-url", redis_url]
    argv += ["--host", host, "--port", "0", "--num-threads", "1", "--dtype", "float32"]
    return commands.start(*argv, "--progress-deadline-s", f"{DEADLINE_S:g}", *options)


def start_nodes(commands: Commands, redis_url: str) -> list[Command]:
    """Both machines' commands, each on a loopback address of its own."""
    master, hosts = f"127.0.0.1:{free_port()}", ("127.0.0.1", "127.0.0.2")
    return [
        start_node(commands, rank, host=host, master=master, redis_url=redis_url) for rank, host in enumerate(hosts)
    ]


def both_ready(nodes: list[Command]) -> Group:
    for node in nodes:
        node.wait_ready()
    return Group(*nodes)


def test_the_other_machine_takes_over_when_the_one_with_the_master_is_lost(
    commands: Commands, tmp_path: Path, round_: int
) -> None:
    with redis_server(tmp_path, password="of the store") as redis:
        nodes = start_nodes(commands, redis.url)
        group = both_ready(nodes)
        lost, last = group.replicas
        with under_load(group) as load:
            kill(*sorted(nodes[0].pids()))  # the supervisor comes first
            load.check_survivors("loss of the master's machine", [lost], limit_s=LEASE_S + 1.0)
            load.check_lost([lost])
        assert "taking over as master" in nodes[1].log()
        assert last.group()["epoch"] == 2
        assert nodes[1].stop() == 0


def test_a_machine_that_loses_its_replica_just_when_the_master_freezes_serves_the_clock_of_the_other(
    commands: Commands, tmp_path: Path, round_: int
) -> None:
    with redis_server(tmp_path) as redis:
        nodes = start_nodes(commands, redis.url)
        group = both_ready(nodes)
        last, lost = group.replicas
        with under_load(group) as load:
            with stopped(nodes[0].process.pid):
                kill(*lost.pids)
                load.check_survivors("loss of a replica and of the master", [lost], limit_s=2 * LEASE_S + 1.0)
            load.check_lost([lost])
        assert "taking over as master" in nodes[1].log()
        wait_until(lambda: "this master is deposed" in nodes[0].log(), "the end of the first mastership", NOTICED_S)
        assert last.ask() == 200
        assert nodes[0].stop() == 0
        assert nodes[1].process.wait(READY_TIMEOUT_S) == 1, "it has lost its replicas, and nobody needs its clock now"


@pytest.mark.parametrize("cut_off", CUTS if len(ROUNDS) > 1 else CUTS[:1])
def test_one_machine_goes_on_and_the_other_hands_back_when_the_network_between_them_is_cut(
    commands: Commands, tmp_path: Path, round_: int, cut_off: int
) -> None:
    with Network(2) as network, redis_server(tmp_path, host=network.host_address) as redis:
        master = f"{network.addresses[0]}:{free_port()}"
        nodes = [
            start_node(
                commands,
                rank,
                host=address,
                master=master,
                redis_url=redis.url,
                prefix=tuple(network.command_prefix(rank)),
            )
            for rank, address in enumerate(network.addresses)
        ]
        group = both_ready(nodes)
        lost, last = group.replicas[cut_off], group.replicas[1 - cut_off]
        with under_load(group) as load:
            network.cut(cut_off)
            load.check_survivors(f"cut of the network, machine {cut_off} alone", [lost], limit_s=CUT_OFF_S)
            wait_gone(lost.pids, "the end of the replica that is cut off")
            network.heal(cut_off)
            load.check_lost([lost])
        assert nodes[cut_off].process.wait(READY_TIMEOUT_S) == 1, "there is no group for it to come back to"
        reason = "could not be committed" if cut_off == 0 else "no master was found"
        assert reason in nodes[cut_off].log()
        wait_until(lambda: last.ask() == 200, "an answer of the one that is left")
        assert nodes[1 - cut_off].stop() == 0
