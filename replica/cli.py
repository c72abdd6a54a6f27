"""The command line: `replica serve`, `replica plan` and `replica chat`. The only place that reads the environment."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, Final, NoReturn

from replica.chat_command import add_chat_parser
from replica.config import ReplicaConfig, flag
from replica.errors import ConfigError
from replica.plan_command import add_layout_options, add_plan_parser, layout_from
from replica.supervisor import supervise

# Secrets, by field. On the command line anybody on this machine could read them.
SECRETS: Final = {
    "api_key": "LOCKSTEP_API_KEY",
    "proxy_token": "LOCKSTEP_PROXY_TOKEN",
    "group_secret": "LOCKSTEP_GROUP_SECRET",
    "redis_url": "LOCKSTEP_REDIS_URL",  # a password is part of it
}
ADDRESSES: Final = {"master_addr": "DP_MASTER_ADDR", "master_port": "DP_MASTER_PORT", "ray_address": "RAY_ADDRESS"}


def main(argv: list[str] | None = None) -> int:
    """Runs a command and returns its exit code: 0 stopped as asked, 1 failed, 2 bad usage or setting."""
    try:
        args = _parser().parse_args(argv)
    except SystemExit as err:  # argparse has printed the help or the error
        return int(err.code or 0)
    try:
        status: int = args.run(args)
    except ConfigError as err:
        print_error(err)
        return 2
    return status


def run_serve(args: argparse.Namespace) -> int:
    """Serves until stopped; returns the exit code. Raises ConfigError for settings that cannot be served."""
    values = {field.name: getattr(args, field.name) for field in fields(ReplicaConfig) if field.metadata}
    for name, variable in SECRETS.items():
        values[name] = values[name] or os.environ.get(variable, "")
    values["proxy_urls"] = tuple(values["proxy_urls"] or ())
    config = ReplicaConfig(**values, layout=layout_from(args, args.nnodes))
    configure_logging()
    return supervise(config)


def configure_logging() -> None:
    """Logs go to stderr. Called by each process of the tree, once."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(process)d %(name)s %(message)s"
    )


def print_error(error: BaseException) -> None:
    """The one line before exit code 2."""
    print(f"replica: error: {' '.join(str(error).split())}", file=sys.stderr)


class _Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (try --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="replica", description="Serves a checkpoint over the OpenAI API.", allow_abbrev=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint until stopped",
        description="Serves a checkpoint over the OpenAI API until SIGINT or SIGTERM; a second one stops at once.",
        allow_abbrev=False,
    )
    serve.set_defaults(run=run_serve)
    add_layout_options(serve)
    serve.add_argument(
        "--nnodes", type=int, default=1, metavar="N", help="machines that run this command, with as many replicas each"
    )
    for field in fields(ReplicaConfig):
        if field.metadata:
            _add_option(serve, field)
    add_plan_parser(commands)
    add_chat_parser(commands, api_key=os.environ.get(SECRETS["api_key"], ""))
    return parser


def _add_option(serve: argparse.ArgumentParser, field: Field[Any]) -> None:
    help_text = field.metadata["help"]
    if field.default is MISSING:
        serve.add_argument(field.name, type=Path, metavar=field.name.upper(), help=help_text)
        return
    options: dict[str, Any] = {"default": field.default, "type": field.metadata["kind"]}
    if isinstance(field.default, tuple):
        options = {"default": None, "action": "append", "metavar": "URL"}
    if isinstance(field.default, bool):
        options = {"action": "store_true"}
    if field.name in SECRETS:
        help_text += f"; better given in the environment as {SECRETS[field.name]}"
    elif field.default:
        help_text += f" (default {field.default})"
    if field.name in ADDRESSES:
        help_text += f"; also given in the environment as {ADDRESSES[field.name]}"
        options["default"] = os.environ.get(ADDRESSES[field.name], field.default)  # argparse converts a text
    serve.add_argument(flag(field.name), dest=field.name, help=help_text, **options)


if __name__ == "__main__":
    sys.exit(main())
