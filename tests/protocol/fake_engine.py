"""An engine without a replica, for tests of the supervisor: `fake_engine.py NOTES PLAN... SUPERVISOR_FD`.

There is one PLAN for each replica of a group, and {dp_rank} in NOTES becomes its own. A PLAN holds one word per life:
`ready-N` is ready, in epoch 1, and ends with status N once the others of its group have begun as many lives, `early-N`
ends before, `failed-N` says first that the group has failed; `serve` is ready and stops when asked, `stubborn` is not
to be stopped. NOTES is the file to which each life adds a line.
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
        os.write(fd, b"epoch 1\nready\n")
    if word in ("ready", "failed"):
        wait_for_others(num_lives + 1, config)
    if word == "failed":
        os.write(fd, b"failed\n")
    if word == "serve":
        return 0 if os.read(fd, 1) else 1
    if word == "stubborn":
        time.sleep(60)
    if status == "kill":
        os.abort()
    return int(status)


def wait_for_others(num_lives: int, config: ReplicaConfig) -> None:
    files = [Path(sys.argv[1].format(dp_rank=dp_rank)) for dp_rank in config.local_dp_ranks]
    deadline_s = time.monotonic() + 20
    while any(not file.exists() or len(file.read_text().splitlines()) < num_lives for file in files):
        assert time.monotonic() < deadline_s, "the others have not begun"
        time.sleep(0.02)
    if len(files) > 1:
        time.sleep(0.3)  # between another one's line and its byte that says that it is ready


if __name__ == "__main__":
    sys.exit(main())
