"""An engine without a replica, for tests of the supervisor: `fake_engine.py NOTES PLAN SUPERVISOR_FD`.

PLAN holds one word per life: `ready-N` is ready and ends with status N, `early-N` ends before; `serve` is ready and
stops when asked, `stubborn` is not to be stopped. NOTES is the file to which each life adds a line.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from replica.config import ReplicaConfig


def main() -> int:
    notes, plan, fd = Path(sys.argv[1]), sys.argv[2].split(), int(sys.argv[3])
    line = bytearray()
    while not line.endswith(b"\n"):
        line += os.read(fd, 1)
    config = ReplicaConfig.from_json(line.decode())
    num_lives = len(notes.read_text().splitlines()) if notes.exists() else 0
    with notes.open("a") as file:
        file.write(f"{time.monotonic()} {config.model} {config.api_key}\n")
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
