"""A worker without a model, for tests of the executor: `fake_worker.py MODE FRAME_FD LIFELINE_FD BOARD_FD`.

It samples the number of the step; its blob is its rank and the epoch. MODE says how it misbehaves, if at all.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import numpy as np

from replica.frames import (
    HEADER,
    Aborted,
    Blob,
    Blobs,
    Connected,
    Failed,
    Frame,
    Init,
    Progress,
    Ready,
    Regroup,
    StepDone,
    StepInput,
    StepOutput,
    decode,
    encode,
)
from replica.process_tree import follow_parent


class Worker:
    def __init__(self, mode: str, sock: socket.socket) -> None:
        self.mode, self.sock, self.rank, self.epoch = mode, sock, 0, 0

    def receive(self) -> Frame:
        (length,) = HEADER.unpack(self.read(HEADER.size))
        return decode(self.read(length))

    def read(self, num_bytes: int) -> bytes:
        received = self.sock.recv(num_bytes, socket.MSG_WAITALL)
        if len(received) < num_bytes:
            sys.exit(0)
        return received

    def start(self) -> None:
        init = self.receive()
        assert isinstance(init, Init)
        self.rank = init.rank
        match self.mode:
            case "refuses":
                self.sock.sendall(encode(Failed(error="model.safetensors is truncated", is_config=True)))
                sys.exit(2)
            case "dies at start":
                sys.exit(7)
            case "never ready":
                time.sleep(60)
            case "sends garbage":
                self.sock.sendall(HEADER.pack(4) + b"\xc1\xc1\xc1\xc1")
                time.sleep(60)
            case "claims a huge frame":
                self.sock.sendall(HEADER.pack(2**31))
                time.sleep(60)
        for done_bytes in (10, 20):
            self.sock.sendall(encode(Progress(done_bytes=done_bytes, total_bytes=20)))
        self.sock.sendall(encode(Ready(num_blocks=len(init.model), weight_bytes=20, load_s=0.0)))

    def regroup(self, frame: Regroup | Blobs) -> None:
        self.epoch = frame.epoch
        if isinstance(frame, Regroup):
            if self.mode == "dies in an epoch":
                sys.exit(3)
            self.sock.sendall(encode(Blob(epoch=frame.epoch, blob=b"%d of %d" % (self.rank, frame.epoch))))
        elif self.mode == "reaches nobody at first" and frame.epoch < 2:
            self.sock.sendall(encode(Aborted(epoch=frame.epoch, step=-1, error="rank 7 is gone")))
        else:
            self.sock.sendall(encode(Connected(epoch=frame.epoch, reload_s=0.5, weight_bytes=20 + self.rank)))

    def step(self, frame: StepInput) -> None:
        match self.mode:
            case "fails a step":
                self.sock.sendall(encode(Failed(error="RuntimeError: boom", is_config=False)))
                sys.exit(1)
            case "dies in a step":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freezes in a step":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "answers a step late":
                time.sleep(0.3)
            case "waits on rank 0" if not self.rank:
                return  # until the next epoch
            case "aborts on rank 1" | "waits on rank 0" if self.rank:
                self.sock.sendall(encode(Aborted(epoch=self.epoch, step=frame.step, error="rank 7 is gone")))
                return
        if self.rank:
            self.sock.sendall(encode(StepDone(step=frame.step)))
            return
        tokens = np.full(len(frame.sample_rows), frame.step, np.int32)
        self.sock.sendall(encode(StepOutput(step=frame.step, token_ids=tokens)))


def main() -> None:
    mode, frame_fd, lifeline_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    follow_parent(lifeline_fd)
    worker = Worker(mode, socket.socket(fileno=frame_fd))
    worker.start()
    while isinstance(frame := worker.receive(), StepInput | Regroup | Blobs):
        if isinstance(frame, StepInput):
            worker.step(frame)
        else:
            worker.regroup(frame)


if __name__ == "__main__":
    main()
