"""The `proxy` command: `proxy serve`."""

from __future__ import annotations

import argparse
import asyncio
import enum
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import Any, Final, NoReturn

from proxy.config import ProxyConfig, flag
from proxy.errors import ConfigError
from proxy.memory import keep_freed_memory, spare_the_collector
from proxy.serve import Resources, Stop, bind, open_resources, serve

logger = logging.getLogger(__name__)

EXIT_STOPPED: Final = 0
EXIT_FAILED: Final = 1
EXIT_USAGE: Final = 2

SECRETS: Final = {"api_key": "LOCKSTEP_API_KEY", "proxy_token": "LOCKSTEP_PROXY_TOKEN"}
UNITS: Final = {"s": "SECONDS", "kb": "KIB", "mb": "MIB"}  # by an option's last word
METAVARS: Final = {
    "host": "ADDRESS",
    "backend": "URL",
    "tls_cert": "FILE",
    "tls_key": "FILE",
    "access_log": "FILE",
    "routing": "POLICY",
    "max_waiting": "REQUESTS",
}


class _Parser(argparse.ArgumentParser):
    """Reports bad usage as one line, like every other bad setting."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Every option is a field of ProxyConfig, and takes its default and its help from there."""
    parser = _Parser(
        prog="proxy",
        description="The HTTP front door: spreads OpenAI-API requests over replicas.",
        allow_abbrev=False,  # an abbreviation that works today is ambiguous when the next option comes
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    command = commands.add_parser("serve", help="listen for clients and replicas", allow_abbrev=False)
    for setting in fields(ProxyConfig):
        _add_option(command, setting)
    return parser


def _add_option(command: argparse.ArgumentParser, setting: Field[Any]) -> None:
    name = setting.metadata["name"] or setting.name
    help_text = setting.metadata["help"]
    if isinstance(setting.default, tuple):
        command.add_argument(
            flag(name), dest=setting.name, action="append", default=[], metavar=_metavar(name), help=help_text
        )
    elif setting.metadata["is_secret"]:
        variable = SECRETS[setting.name]
        command.add_argument(
            flag(name),
            default=os.environ.get(variable, ""),
            metavar=_metavar(name),
            help=f"{help_text}; better set in the environment as {variable}: `ps` shows command lines to everybody",
        )
    else:
        command.add_argument(
            flag(name),
            type=_kind(setting.default),
            default=setting.default,
            metavar=_metavar(name),
            help=_help(setting),
        )


def _kind(default: Any) -> Callable[[str], Any]:
    """What makes an option's value of its text."""
    kind = type(default)
    if not issubclass(kind, enum.Enum):
        return kind

    def one_of(text: str) -> Any:
        try:
            return kind(text)
        except ValueError as err:
            raise argparse.ArgumentTypeError(
                f"{text!r} is none of {', '.join(choice.value for choice in kind)}"
            ) from err

    return one_of


def _help(setting: Field[Any]) -> str:
    """What a plain option does, with its range and its default, if it has these."""
    said = []
    if setting.metadata["between"] is not None:
        least, most = setting.metadata["between"]
        said.append(f"{least:g} to {most:_}")
    if setting.default != "":
        said.append("default: %(default)s")
    help_text: str = setting.metadata["help"]
    return f"{help_text} ({'; '.join(said)})" if said else help_text


def _metavar(name: str) -> str:
    """What the help shows for an option's value: its unit, or what it is."""
    if name in METAVARS:
        return METAVARS[name]
    last_word = name.rpartition("_")[2]
    return UNITS.get(last_word, last_word.upper())


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code: 0 stopped as asked, 1 failed, 2 bad usage or config."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s", stream=sys.stderr)
    try:
        settings = vars(build_parser().parse_args(argv))
        del settings["command"]
        for name in ("backends", "cors_origins"):
            settings[name] = tuple(settings[name])
        config = ProxyConfig(**settings)
        if (config.api_key or config.api_key_file) and not config.proxy_token:
            logger.warning(
                "API keys without a proxy token: any process on this machine can join as a replica and read "
                "requests and keys; set %s here and at the replicas",
                SECRETS["proxy_token"],
            )
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
