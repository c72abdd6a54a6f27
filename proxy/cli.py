"""The `proxy` command: `proxy serve`."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any, Final, NoReturn

from proxy.config import ProxyConfig, flag
from proxy.errors import ConfigError
from proxy.memory import keep_freed_memory, spare_the_collector
from proxy.serve import Resources, Stop, bind, open_resources, serve

logger = logging.getLogger(__name__)

EXIT_STOPPED: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

OPTIONS: Final[dict[str, str]] = {
    "host": "address to listen on; anything but loopback needs --proxy-token",
    "port": "port to listen on; 0 picks a free one and logs it",
    "api_key": "key that clients must send as a bearer token, and that replicas get from them (or LOCKSTEP_API_KEY)",
    "api_key_file": "TOML file of more keys, with names and limits of their own; read again when it changes",
    "proxy_token": "token that replicas and operators must show (or LOCKSTEP_PROXY_TOKEN)",
    "tls_cert": "PEM file of the certificate chain; clients and replicas then speak TLS",
    "tls_key": "PEM file of the certificate's key",
    "routing": "which replica gets a request: least-load, round-robin, power-of-two, prefix, session, "
    "expected-latency or random",
    "session_header": "header that names a client's session, for --routing session",
    "access_log": "file that gets a line of JSON per inference request, without its prompt",
    "max_requests": "requests under way at once; more wait",
    "max_tokens": "tokens of the prompts under way at once, as their bytes / 4; 0 is no limit",
    "max_replica_requests": "requests under way at once on one replica",
    "max_replica_tokens": "tokens of the prompts under way at once on one replica; 0 is no limit",
    "max_waiting": "requests that wait at once; more are refused",
    "queue_timeout_s": "seconds that a request waits at the most before it is refused",
    "journal_kb": "KiB of each stream's sent events that are kept until it ends; 0 keeps none",
    "max_body_mb": "MiB of one request's body",
    "connect_timeout_s": "seconds to connect to a replica; then another is tried",
    "first_byte_timeout_s": "seconds until a replica's answer begins; if it does not stream, until it ends",
    "between_bytes_timeout_s": "seconds that an answer may be silent once it has begun",
    "client_timeout_s": "seconds that a client may take to send its request, or read nothing of its answer",
    "heartbeat_timeout_s": "seconds of silence after which a replica gets no new requests",
    "probe_interval_s": "seconds between two looks at a --backend",
    "probe_timeout_s": "seconds that one look at a --backend may take",
    "drain_timeout_s": "seconds that running requests may go on after SIGTERM; a second SIGTERM stops at once",
}
LISTS: Final = ("backends", "cors_origins")
SECRETS: Final = {"api_key": "LOCKSTEP_API_KEY", "proxy_token": "LOCKSTEP_PROXY_TOKEN"}


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as one line, like every other bad setting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Every option is a field of ProxyConfig, and takes its default from there."""
    parser = _Parser(prog="proxy", description="The HTTP front door: spreads OpenAI-API requests over replicas.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("serve", help="listen for clients and replicas")
    defaults: dict[str, Any] = {field.name: field.default for field in fields(ProxyConfig)}
    for name, help_text in OPTIONS.items():
        shown = help_text if name in SECRETS else f"{help_text} (default: %(default)s)"
        default = os.environ.get(SECRETS[name], "") if name in SECRETS else defaults[name]
        command.add_argument(flag(name), type=type(defaults[name]), default=default, metavar="VALUE", help=shown)
    command.add_argument(
        "--backend",
        dest="backends",
        action="append",
        default=[],
        metavar="URL",
        help="root of another OpenAI-compatible server to spread requests over; may be given several times",
    )
    command.add_argument(
        "--cors-origin",
        dest="cors_origins",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="origin whose web pages may use this proxy, or * for all; may be given several times",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0 stopped as asked, 1 failed, 2 bad usage or config."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        settings = vars(build_parser().parse_args(argv))
        del settings["command"]
        for name in LISTS:
            settings[name] = tuple(settings[name])
        config = ProxyConfig(**settings)
        resources = open_resources(config)
        listener = bind(config)
    except ConfigError as err:
        print(f"proxy: {err}", file=sys.stderr)
        return EXIT_USAGE
    keep_freed_memory()
    spare_the_collector()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_serve_until_signalled(config, listener, resources))
    except Exception:
        logger.exception("proxy failed")
        return EXIT_FAILED
    return EXIT_STOPPED


async def _serve_until_signalled(config: ProxyConfig, listener: socket.socket, resources: Resources) -> None:
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.request)
    await serve(config, listener, stop, resources)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed, asyncio's own loop elsewhere."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    return uvloop.new_event_loop


if __name__ == "__main__":
    sys.exit(main())
