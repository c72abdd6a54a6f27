"""A replica alone, from the command line to a built engine, in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

from tests.commands import DEMO_MODEL, ROOT

SCRIPT = """
import asyncio, sys
from pathlib import Path
import replica.cli
from replica.address import listen
from replica.cache_size import local_space
from replica.config import ReplicaConfig
from replica.engine import StopRequests, build
from replica.executor_mp import LocalRanks
from replica.supervisor import Supervisor

async def main():
    config = ReplicaConfig(model=Path(sys.argv[1]), port=0, device="cpu")
    Supervisor(config)
    with listen(config.host, config.port) as sock:
        build(config, sock, StopRequests(), host=LocalRanks(), space=local_space(config))

asyncio.run(main())
tops = {name.split(".")[0] for name in sys.modules}
print(*sorted(tops & {"torch", "triton", "coordinator", "redis", "tokenizers"}))
"""


def test_a_replica_alone_loads_neither_torch_nor_a_coordinator() -> None:
    command = [sys.executable, "-c", SCRIPT, str(DEMO_MODEL)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["tokenizers"], ended.stderr  # which shows that the look is at the right names
