"""The command line of `replica serve`: options from the dataclass, secrets from the environment, errors in one line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Final

import pytest

from replica import cli
from replica.config import ReplicaConfig
from replica.layout import Layout
from tests.commands import DEMO_MODEL

TWO_NODES: Final = "--dp 4 --tp 4 --nnodes 2 --master-port 7000 --group-secret a-secret-of-16-bytes"


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ReplicaConfig]:
    """What would be served; nothing is."""
    configs: list[ReplicaConfig] = []

    def note(config: ReplicaConfig) -> int:
        configs.append(config)
        return 0

    monkeypatch.setattr(cli, "supervise", note)
    monkeypatch.setattr(cli, "configure_logging", lambda: None)
    for variable in (*cli.SECRETS.values(), *cli.ADDRESSES.values()):
        monkeypatch.delenv(variable, raising=False)
    return configs


def test_defaults_are_those_of_the_dataclass(served: list[ReplicaConfig]) -> None:
    assert cli.main(["serve", "some/model"]) == 0
    assert served == [ReplicaConfig(model=Path("some/model"))]


def test_options_have_the_types_of_their_fields_and_proxy_url_repeats(served: list[ReplicaConfig]) -> None:
    arguments = "serve m --port 0 --kv-cache-gb 1.5 --proxy-url http://a:1 --proxy-url http://b:2 --dtype float32"
    assert cli.main(arguments.split()) == 0
    assert served == [
        ReplicaConfig(
            model=Path("m"), port=0, kv_cache_gb=1.5, proxy_urls=("http://a:1", "http://b:2"), dtype="float32"
        )
    ]


def test_secrets_come_from_the_environment_unless_given(
    served: list[ReplicaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_API_KEY", "from-environment")
    monkeypatch.setenv("LOCKSTEP_PROXY_TOKEN", "token")
    cli.main(["serve", "m"])
    cli.main(["serve", "m", "--api-key", "given"])
    assert [(config.api_key, config.proxy_token) for config in served] == [
        ("from-environment", "token"),
        ("given", "token"),
    ]
    assert "given" not in repr(served[1]) and "token'" not in repr(served[1])


def test_degrees_become_a_layout(served: list[ReplicaConfig]) -> None:
    assert cli.main("serve m --dp 2 --tp 4 --mlp-tp 4 --moe-tp 2 --ep 2".split()) == 0
    assert served[0].layout == Layout.resolve(dp=2, tp=4, mlp_tp=4, moe_tp=2, ep=2)


def test_the_clocks_address_comes_from_the_environment_unless_given(
    served: list[ReplicaConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DP_MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("DP_MASTER_PORT", "7000")
    cli.main(["serve", "m"])
    cli.main(["serve", "m", "--master-addr", "10.0.0.2", "--master-port", "7001"])
    assert [(config.master_addr, config.master_port) for config in served] == [("10.0.0.1", 7000), ("10.0.0.2", 7001)]


def test_ray_is_asked_for_by_name_and_must_be_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replica.supervisor.importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(cli, "configure_logging", lambda: None)
    assert cli.main(["serve", str(DEMO_MODEL), "--executor", "ray"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "--executor ray needs the package ray, which is not installed" in error


def test_each_machine_serves_its_own_share_of_the_replicas(served: list[ReplicaConfig]) -> None:
    for node_rank in range(2):
        assert cli.main(f"serve m {TWO_NODES} --node-rank {node_rank} --port 65534".split()) == 0
    assert [list(config.local_dp_ranks) for config in served] == [[0, 1], [2, 3]]
    assert [config.layout.nnodes for config in served] == [2, 2]


def test_several_replicas_can_lose_one_unless_told_otherwise(served: list[ReplicaConfig]) -> None:
    for arguments in ("serve m", "serve m --dp 3 --tp 3", "serve m --dp 3 --tp 3 --survive 2"):
        assert cli.main(arguments.split()) == 0
    assert [config.layout.losses(config.survive) for config in served] == [0, 1, 2]


def test_plan_is_a_verb_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(DEMO_MODEL), "--dp", "2", "--tp", "4"]) == 0
    assert "fullest over mean" in capsys.readouterr().out
    assert cli.main(["plan", str(DEMO_MODEL), "--tp", "4", "--ep", "3"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "required: COMMAND"),
        ("serve", "required: MODEL"),
        ("serve m --nope", "unrecognized arguments: --nope"),
        ("serve m --port many", "invalid int value: 'many'"),
        ("serve m --port 70000", "--port is 70000, must be 0 to 65535"),
        ("serve m --max-num-seqs 0", "--max-num-seqs is 0, must be at least 1"),
        ("serve m --drain-timeout-s nan", "--drain-timeout-s is nan"),
        ("serve m --dtype int8", "--dtype is 'int8', must be one of auto"),
        ("serve m --executor slurm", "--executor is 'slurm', must be one of mp, ray"),
        ("serve m --executor ray --ray-address ray://h:1", "--ray-address is 'ray://h:1', must be auto or HOST:PORT"),
        ("serve m --proxy-url proxy:8000", "--proxy-url is 'proxy:8000', which is not a URL"),
        ("serve m --proxy-url http://.:80", "--proxy-url is 'http://.:80', "),
        (f"serve m --proxy-url http://{'a' * 80}:80", "whose host or port is none: "),
        ("serve m --proxy-url http://:80", "must name a host and a port"),
        ("serve m --proxy-url http://a:0", "must name a host and a port from 1 to 65535"),
        ("serve m --proxy-url http://a:65536", "whose host or port is none: "),
        ("serve m --proxy-url http://[::1", "whose host or port is none: "),
        ("serve m --proxy-url http://u:p@a:1", "without user, path, query or fragment"),
        ("serve m --advertise-url http://a:1/x", "--advertise-url is 'http://a:1/x', must be http://HOST:PORT"),
        ("serve m --advertise-url http://a:1?", "without user, path, query or fragment"),
        ("serve m --advertise-url http://a:1#", "without user, path, query or fragment"),
        ("serve m --max-body-mb 1e-9", "--max-body-mb is 1e-09, must be 0 or from"),
        ("serve m --max-body-mb 1e308", "--max-body-mb is 1e+308, must be 0 or from"),
        ("serve m --max-body-mb nan", "--max-body-mb is nan, must be 0 or from"),
        ("serve m --dp 3 --tp 4", "--dp 3 does not divide the 4 ranks of --tp 4; nearest valid for 4 ranks: --dp"),
        ("serve m --dp 2 --tp 2 --survive 2", "--survive is 2, must be 0 to 1: the group has 2 (--dp)"),
        ("serve m --survive 1", "--survive is 1, must be 0 to 0: the group has 1 (--dp)"),
        ("serve m --dp 3 --tp 3 --nnodes 2", "3 replicas do not divide over --nnodes 2"),
        (f"serve m {TWO_NODES} --node-rank 2", "--node-rank is 2, must be below the 2 machines of --nnodes"),
        (f"serve m {TWO_NODES} --master-addr 0.0.0.0", "--master-addr is '0.0.0.0': the other machines"),
        ("serve m --dp 2 --tp 2 --nnodes 2", "--master-port is 0: all 2 machines"),
        ("serve m --dp 2 --tp 2 --nnodes 2 --master-port 7000", "--group-secret is missing: all 2 machines"),
        ("serve m --dp 2 --tp 2 --advertise-url http://a", "--advertise-url names one replica"),
        ("serve m --dp 4 --tp 4 --port 65534", "--port is 65534, which leaves no ports for 4 replicas"),
        ("serve m --group-secret short", "--group-secret has fewer than 16 bytes"),
        ("serve m --master-port 70000", "--master-port is 70000, must be 0 to 65535"),
        ("serve m --max-num 3", "unrecognized arguments: --max-num 3"),
    ],
)
def test_a_bad_argument_is_code_2_and_one_line(
    served: list[ReplicaConfig], capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert cli.main(arguments.split()) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith("replica") and message in output.err
    assert served == []


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--help"]) == 0
    shown = capsys.readouterr().out
    for field in (field for field in fields(ReplicaConfig) if field.metadata):
        assert field.metadata["help"].split()[0] in shown
    assert "--proxy-url URL" in shown and "--max-num-seqs" in shown


def test_settings_survive_the_way_to_an_engine() -> None:
    layout = Layout.resolve(dp=2, tp=4)
    config = ReplicaConfig(
        model=Path("m"), layout=layout, dp_rank=1, proxy_urls=("http://a",), api_key="k", kv_cache_gb=0.5, port=0
    )
    assert ReplicaConfig.from_json(config.to_json()) == config
    assert "\n" not in config.to_json()
