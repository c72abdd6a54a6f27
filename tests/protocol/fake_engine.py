"""An engine without a replica, for tests of the supervisor: `fake_engine.py NOTES PLAN... SUPERVISOR_FD`.

There is one PLAN for each replica of a group, and {dp_rank} in NOTES becomes its own. A PLAN holds one word per life:
`ready-N` is ready and ends with status N, `early-N` ends before; `serve` is ready and stops when asked, `stubborn` is
not to be stopped. NOTES is the file to which each life adds a line.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from replica.config import ReplicaConfig


def main() -> int:
    fd = int(sys.argv[-1])
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(fd, 1)
    config = ReplicaConfig.from_json(line.decode())
    plan = sys.argv[2 + config.dp_rank].split()
    notes = Path(sys.argv[1].format(dp_rank=config.dp_rank))
    num_lives = len(notes.read_text().splitlines()) if notes.exists() else 0
    with notes.open("a") as file:
        group = f"{config.port} {config.master_port} {config.group} {config.group_secret}"
        file.write(f"{time.monotonic()} {config.model} {config.api_key or '-'} {group}\n")
    word, _, status = plan[num_lives].partition("-")
    if word != "early":
        os.write(fd, b"r")
    if word == "serve":
        return 0 if os.read(fd, 1) else 1
    if word == "stubborn":
        time.sleep(60)
    if status == "kill":
        os.abort()
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
