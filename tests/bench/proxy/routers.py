"""How to start each proxy under test.

A router is a command line with the placeholders `{port}`, `{host}`, `{workers}`
(all worker URLs, space-separated), `{workers_comma}`, `{worker_args:FLAG}` (`FLAG
URL` once per worker), `{metrics}` (a free port) and `{dir}` (a scratch folder).
`VENVS` is where their virtual environments are; set `PROXYBENCH_VENVS` to change it.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shlex
import shutil
import sys
import sysconfig

HERE = pathlib.Path(__file__).resolve().parent
VENVS = pathlib.Path(os.environ.get("PROXYBENCH_VENVS", HERE.parents[2] / ".venv" / "peers"))


@dataclasses.dataclass
class Router:
    """One proxy: its command, what it needs before and after the start."""

    name: str
    command: str
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    #: (method, path, JSON body) sent to the started proxy once per worker; `{worker}`
    register: tuple[str, str, str] | None = None
    #: file name in `{dir}` -> text with placeholders
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    note: str = ""

    def expand(self, text: str, values: dict[str, str]) -> str:
        """Fill in the placeholders; other braces stay."""
        text = re.sub(
            r"\{worker_args:([^}]+)\}",
            lambda match: " ".join(f"{match[1]} {url}" for url in values["workers"].split()),
            text,
        )
        return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), text)

    def argv(self, values: dict[str, str]) -> list[str]:
        """The command as a list."""
        return shlex.split(self.expand(self.command, values))

    def is_installed(self) -> bool:
        """Whether its program is here."""
        program = self.argv({"venvs": str(VENVS), "python": sys.executable, "workers": ""})[0]
        return shutil.which(program) is not None


NGINX_CONF = """\
worker_processes {nginx_workers};
daemon off;
pid {dir}/nginx.pid;
error_log {dir}/error.log warn;
events { worker_connections 4096; }
http {
  access_log off;
  client_body_temp_path {dir}/body; proxy_temp_path {dir}/proxy;
  fastcgi_temp_path {dir}/f; uwsgi_temp_path {dir}/u; scgi_temp_path {dir}/s;
  client_max_body_size 512m;
  client_body_buffer_size 1m;
  keepalive_requests 1000000000;
  upstream workers { {nginx_upstreams} keepalive 512; keepalive_requests 1000000000; }
  server {
    listen {host}:{port} backlog=4096;
    location / {
      proxy_pass http://workers;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_read_timeout 1h;
    }
  }
}
"""

SGLANG = (
    "{venvs}/v_sglang_router/bin/python -m sglang_router.launch_router --host {host} "
    "--port {port} --worker-urls {workers} --policy %s --log-level warn "
    "--prometheus-host 127.0.0.1 --prometheus-port {metrics} "
    "--worker-startup-check-interval 1"
)
SMG = (
    "{venvs}/v_smg/bin/smg launch --host {host} --port {port} --worker-urls {workers} "
    "--policy %s --log-level warn --prometheus-host 127.0.0.1 --prometheus-port {metrics} "
    "--worker-startup-check-interval 1 --disable-tokenizer-autoload"
)
VLLM = (
    "{venvs}/v_vllm_router/bin/vllm-router --host {host} --port {port} "
    "--worker-urls {workers} --policy %s --log-level warning "
    "--prometheus-port {metrics} --worker-startup-check-interval 1"
)
OFFLINE = {"HF_HUB_OFFLINE": "1", "NO_PROXY": "*", "no_proxy": "*"}

LOCKSTEP = (
    "{python} -m proxy.cli serve --host {host} --port {port} {worker_args:--backend} "
    "--access-log {dir}/access.log --routing %s"
)

ROUTERS = {
    router.name: router
    for router in (
        Router("lockstep", LOCKSTEP % "least-load", note="with all that is on by default, and its access log"),
        Router("lockstep-prefix", LOCKSTEP % "prefix"),
        Router(
            "raw", "{python} {here}/raw_proxy.py --uvloop --port {port} --workers {workers_comma}", note="the floor"
        ),
        Router(
            "nginx",
            "nginx -c {dir}/nginx.conf -e {dir}/error.log",
            files={"nginx.conf": NGINX_CONF},
            note="1 worker process, round robin, unbuffered",
        ),
        Router("sglang-rr", SGLANG % "round_robin", OFFLINE),
        Router("sglang-cache", SGLANG % "cache_aware", OFFLINE, note="its default policy"),
        Router("smg-rr", SMG % "round_robin", OFFLINE),
        Router("smg-cache", SMG % "cache_aware", OFFLINE, note="its default policy"),
        Router("vllm-rr", VLLM % "round_robin", OFFLINE),
        Router("vllm-cache", VLLM % "cache_aware", OFFLINE, note="its default policy"),
        Router(
            "lmdeploy",
            f"{{venvs}}/v_lmdeploy/bin/python {shlex.quote(str(HERE / 'lmdeploy_proxy.py'))} "
            "--host {host} --port {port}",
            OFFLINE
            | {
                "UVICORN_LOG_LEVEL": "warning",
                "LMDEPLOY_SOURCE": str(VENVS / "lmdeploy"),
                "LMDEPLOY_SITE": sysconfig.get_path("purelib"),  # it imports torch
            },
            register=("POST", "/nodes/add", '{"url": "{worker}"}'),
        ),
    )
}


def custom(spec: str) -> Router:
    """A router from `NAME=COMMAND` on the command line."""
    name, _, command = spec.partition("=")
    if not name or not command:
        sys.exit(f"--custom wants NAME=COMMAND, not {spec!r}")
    return Router(name, command)
