"""Settings that cannot be served are refused with the value and the remedy."""

from __future__ import annotations

import logging
from dataclasses import fields

import pytest

from proxy.cli import SECRETS, build_parser, main
from proxy.config import ProxyConfig, is_http_url
from proxy.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 65536}, "--port is 65536"),
        ({"port": -1}, "--port is -1"),
        ({"host": ""}, "--host is empty"),
        ({"max_body_mb": 0.0}, "--max-body-mb is 0.0, must be 0.001 to 65536"),
        ({"max_body_mb": 1e308}, "--max-body-mb is 1e\\+308, must be"),
        ({"first_byte_timeout_s": float("nan")}, "--first-byte-timeout-s is nan"),
        ({"between_bytes_timeout_s": float("inf")}, "--between-bytes-timeout-s is inf"),
        ({"heartbeat_timeout_s": -1.0}, "--heartbeat-timeout-s is -1.0"),
        ({"heartbeat_timeout_s": 1e-9}, "--heartbeat-timeout-s is 1e-09, must be 0.01 to 1000000"),
        ({"max_requests": 10**400}, "--max-requests is 1000"),
        ({"drain_timeout_s": -0.1}, "--drain-timeout-s is -0.1, must be 0 to"),
        ({"backends": ("localhost:8000",)}, "--backend 'localhost:8000' cannot be dialled"),
        ({"backends": ("http://h:70000",)}, "--backend 'http://h:70000' cannot be dialled"),
        ({"backends": ("http://h:1", "http://h:1/v1/")}, "given twice"),
    ],
)
def test_a_setting_that_cannot_be_served_is_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ProxyConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org"])
def test_a_host_that_others_can_reach_needs_a_token(host: str) -> None:
    with pytest.raises(ConfigError, match="--proxy-token"):
        ProxyConfig(host=host)
    assert ProxyConfig(host=host, proxy_token="t").host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_token(host: str) -> None:
    assert ProxyConfig(host=host).proxy_token == ""


def test_a_backend_s_url_may_end_as_openai_s_base_url_does() -> None:
    config = ProxyConfig(backends=("http://a:1/", "http://b:2/v1", "https://c/api/v1/", "http://[::1]:4"))
    assert config.backend_urls == ("http://a:1", "http://b:2", "https://c/api", "http://[::1]:4")


def test_secrets_are_not_shown() -> None:
    assert "hidden" not in repr(ProxyConfig(api_key="hidden", proxy_token="hidden"))


@pytest.mark.parametrize(
    "url",
    [
        "http://.:80",
        "http://a..b",
        f"http://{'a' * 64}:80",
        f"http://{'a.' * 127}com",
        "http://[::1",
        "http://[v1.x]:80",
        "http://h:99999",
        "http://h:0",
        "http://h:",
        "http://h h:80",
        "http://h:80\r\nX-Evil: 1",
        "http://h:80\n",
        "http://h:80#fragment",
        "http://h:80?query",
        "http://user:password@h:80",
        "http://h\u00f6st:80",
        "ftp://h",
        "http://",
    ],
)
def test_a_url_that_cannot_be_dialled_is_none(url: str) -> None:
    assert not is_http_url(url)
    with pytest.raises(ConfigError, match="cannot be dialled"):
        ProxyConfig(backends=(url,))


@pytest.mark.parametrize(
    "url", ["http://h", "https://a-b.c_d.example.:443/v1", "http://127.0.0.1:1", "http://[::1]:4", f"http://{'a' * 63}"]
)
def test_a_url_that_can_be_dialled_is_one(url: str) -> None:
    assert is_http_url(url)


def test_every_setting_has_an_option_whose_default_is_the_field_s() -> None:
    settings = vars(build_parser().parse_args(["serve"]))
    assert settings.pop("command") == "serve"
    assert settings.keys() == {field.name for field in fields(ProxyConfig)}
    assert ProxyConfig(**{name: tuple(value) if value == [] else value for name, value in settings.items()}) == (
        ProxyConfig()
    )


def test_the_help_names_each_option_s_unit_and_the_secrets_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["serve", "--help"])
    text = capsys.readouterr().out
    for shown in ("--queue-timeout-s SECONDS", "--max-body-mb MIB", "--journal-kb KIB", "--backend URL"):
        assert shown in text
    assert "VALUE" not in text and "`ps`" in text
    assert all(variable in text for variable in SECRETS.values())
    assert set(SECRETS) == {each.name for each in fields(ProxyConfig) if each.metadata["is_secret"]}


@pytest.mark.parametrize(
    "argv",
    [
        ["--max-body-mb", "1e308"],
        ["--heartbeat-timeout-s", "1e-9"],
        ["--probe-interval-s", "nan"],
        ["--backend", "http://.:80"],
        ["--max-req", "5"],  # an abbreviation
    ],
)
def test_nonsense_on_the_command_line_ends_it_with_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *argv]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_policy_that_is_none_is_answered_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--routing", "fastest"]) == 2
    assert "'fastest' is none of least-load, round-robin" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "warns"), [(["--proxy-token", "t"], False), ([], True)])
def test_an_api_key_without_a_proxy_token_is_warned_of(
    options: list[str], warns: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in SECRETS.values():
        monkeypatch.delenv(variable, raising=False)
    with caplog.at_level(logging.WARNING):
        assert main(["serve", "--api-key", "k", *options, "--tls-cert", "/none", "--tls-key", "/none"]) == 2
    assert any("LOCKSTEP_PROXY_TOKEN" in record.getMessage() for record in caplog.records) is warns


def test_options_and_environment_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_API_KEY", "from-env")
    monkeypatch.setenv("LOCKSTEP_PROXY_TOKEN", "from-env")
    argv = ["serve", "--proxy-token", "given", "--backend", "http://a", "--backend", "http://b", "--port", "0"]
    settings = vars(build_parser().parse_args(argv))
    assert settings["api_key"] == "from-env" and settings["proxy_token"] == "given"
    assert settings["backends"] == ["http://a", "http://b"] and settings["port"] == 0
