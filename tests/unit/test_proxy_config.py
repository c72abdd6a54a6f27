"""Settings that cannot be served are refused with the value and the remedy."""

from __future__ import annotations

from dataclasses import fields

import pytest

from proxy.cli import LISTS, OPTIONS, build_parser
from proxy.config import ProxyConfig
from proxy.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"port": 65536}, "--port is 65536"),
        ({"port": -1}, "--port is -1"),
        ({"host": ""}, "--host is empty"),
        ({"max_body_mb": 0.0}, "--max-body-mb is 0.0, must be above 0"),
        ({"first_byte_timeout_s": float("nan")}, "--first-byte-timeout-s is nan"),
        ({"between_bytes_timeout_s": float("inf")}, "--between-bytes-timeout-s is inf"),
        ({"heartbeat_timeout_s": -1.0}, "--heartbeat-timeout-s is -1.0"),
        ({"drain_timeout_s": -0.1}, "--drain-timeout-s is -0.1, must not be negative"),
        ({"backends": ("localhost:8000",)}, "--backend 'localhost:8000' is not a URL"),
        ({"backends": ("http://h:70000",)}, "--backend 'http://h:70000' is not a URL"),
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


def test_every_setting_has_an_option_whose_default_is_the_field_s() -> None:
    settings = vars(build_parser().parse_args(["serve"]))
    assert settings.pop("command") == "serve"
    assert ProxyConfig(**{**settings, **{name: tuple(settings[name]) for name in LISTS}}) == ProxyConfig()
    assert {field.name for field in fields(ProxyConfig)} == {*OPTIONS, *LISTS}


def test_options_and_environment_reach_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_API_KEY", "from-env")
    monkeypatch.setenv("LOCKSTEP_PROXY_TOKEN", "from-env")
    argv = ["serve", "--proxy-token", "given", "--backend", "http://a", "--backend", "http://b", "--port", "0"]
    settings = vars(build_parser().parse_args(argv))
    assert settings["api_key"] == "from-env" and settings["proxy_token"] == "given"
    assert settings["backends"] == ["http://a", "http://b"] and settings["port"] == 0
