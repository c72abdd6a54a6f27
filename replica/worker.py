"""One rank's process: `python -m replica.worker FRAME_FD LIFELINE_FD`, started by its engine.

The main thread reads frames from the socket FRAME_FD and answers them one by one (see replica/frames.py). A second
thread watches the pipe LIFELINE_FD and ends the process when the engine is gone, whatever the main thread is doing.
SIGINT and SIGTERM are ignored: Ctrl-C reaches the whole foreground group, and the engine says when its workers stop.

Exit codes: 0 shut down, 1 a step or the start failed, 2 the setting or checkpoint is at fault. When the engine is gone
nobody is left to see one.
"""

from __future__ import annotations

import logging
import mmap
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from replica.checkpoint import Checkpoint
from replica.errors import ConfigError
from replica.frames import (
    FRAMES_VERSION,
    HEADER,
    Blob,
    Blobs,
    Failed,
    Frame,
    FrameError,
    Init,
    Progress,
    Ready,
    Shutdown,
    StepDone,
    StepInput,
    StepOutput,
    body_length,
    decode,
    encode,
)
from replica.groups import CollectiveCount, Groups
from replica.kv_cache import KVCache, num_blocks_in
from replica.model_config import ModelConfig
from replica.models.qwen3_moe import Qwen3Moe
from replica.process_tree import follow_parent
from replica.rendezvous import Rendezvous
from replica.sampler import sample
from replica.shards import Shards
from replica.step_tensors import StepTensors
from replica.weights import WeightReader

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S: Final = 0.1
PEER_HOST: Final = "127.0.0.1"  # this rank's address for the others of its group, which are all on this machine


class FrameChannel:
    """Whole frames over a blocking stream socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, frame: Frame) -> None:
        """Blocks until the kernel has taken the frame."""
        self._sock.sendall(encode(frame))

    def receive(self) -> Frame | None:
        """The next frame, or None when the engine has closed its end."""
        header = self._read(HEADER.size)
        if header is None:
            return None
        body = self._read(body_length(header))
        return None if body is None else decode(body)

    def _read(self, num_bytes: int) -> bytes | None:
        buffer = bytearray(num_bytes)
        view = memoryview(buffer)
        while view:
            count = self._sock.recv_into(view)
            if not count:
                return None
            view = view[count:]
        return bytes(buffer)


class Rank:
    """The weights and the cache of one rank, and the forward over them."""

    def __init__(self, init: Init, channel: FrameChannel) -> None:
        """Checks the checkpoint, loads the weights and reports progress, then waits for the peers' blobs and connects.

        Raises ConfigError if the checkpoint cannot be served so, PeerError if a peer cannot be reached.
        """
        self.device = torch.device(init.device)
        self.samples = init.layout.local_rank(init.rank) == 0
        dtype: torch.dtype = getattr(torch, init.dtype)
        config = ModelConfig.load(Path(init.model))
        checkpoint = Checkpoint.open(Path(init.model))
        checkpoint.check(config)
        init.layout.check(config)
        shards = Shards(config, init.layout, init.rank)
        num_blocks = num_blocks_in(
            init.kv_cache_bytes,
            block_bytes=shards.kv_bytes_per_token(init.dtype) * init.block_size,
            block_size=init.block_size,
            max_model_len=init.max_model_len,
        )
        report = ProgressReport(channel)
        with WeightReader(checkpoint, shards, dtype=dtype, device=self.device, on_progress=report) as weights:
            self.model = Qwen3Moe(config, weights, num_positions=init.max_model_len, device=self.device)
            self.weight_bytes = weights.weight_bytes
        self.cache = KVCache(shards, num_blocks=num_blocks, block_size=init.block_size, dtype=dtype, device=self.device)
        self.groups = Groups.alone() if init.layout.world == 1 else _connect(init, channel, self.device)

    def step(self, frame: StepInput) -> StepOutput | StepDone:
        """One forward; on the replica's first rank, which has the logits, a token for each of the sample rows."""
        step = StepTensors.from_frame(frame, self.device, self.groups)
        logits = self.model.forward(step, self.cache, self.groups)  # [N, V]
        if not self.samples:
            return StepDone(step=frame.step)
        token_ids, logprobs = sample(logits, frame)
        return StepOutput(step=frame.step, token_ids=token_ids, logprobs=logprobs)


def _connect(init: Init, channel: FrameChannel, device: torch.device) -> Groups:
    """Exchanges blobs with the other ranks, by way of the engines, and connects with them."""
    rendezvous = Rendezvous(
        init.layout, init.rank, device=device, peer_host=PEER_HOST, timeout_s=init.collective_timeout_s
    )
    channel.send(Blob(blob=rendezvous.blob()))
    answer = channel.receive()
    if answer is None or isinstance(answer, Shutdown):
        raise BrokenPipeError("the engine is gone")
    if not isinstance(answer, Blobs):
        raise FrameError(f"expected Blobs, got {type(answer).__name__}")
    count = CollectiveCount() if init.count_fd < 0 else CollectiveCount(_shared_count(init))
    return rendezvous.connect(answer.blobs, count)


def _shared_count(init: Init) -> NDArray[np.int64]:
    """This rank's own count of the file that its engine reads for the beats."""
    counts = np.frombuffer(mmap.mmap(init.count_fd, 8 * init.attn_tp), np.int64)
    local_rank = init.layout.local_rank(init.rank)
    return counts[local_rank : local_rank + 1]


class ProgressReport:
    """Tells the engine about bytes read, at most every PROGRESS_INTERVAL_S and once at the end."""

    def __init__(self, channel: FrameChannel) -> None:
        self._channel = channel
        self._sent_s = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._sent_s >= PROGRESS_INTERVAL_S or done_bytes == total_bytes:
            self._sent_s = now_s
            self._channel.send(Progress(done_bytes=done_bytes, total_bytes=total_bytes))


def _start(channel: FrameChannel) -> Rank | None:
    """Waits for Init, loads and connects. None if the engine went away instead."""
    init = channel.receive()
    if init is None or isinstance(init, Shutdown):
        return None
    if not isinstance(init, Init) or init.version != FRAMES_VERSION:
        raise FrameError(f"expected Init of version {FRAMES_VERSION}, got {init}")
    started_s = time.monotonic()
    if init.device == "cpu":
        torch.set_num_threads(init.num_threads)
    elif torch.cuda.is_available():
        torch.cuda.set_device(init.device)  # kernels launch on the current device
    else:
        raise ConfigError(f"--device is {init.device}, and torch finds no CUDA device; use --device cpu")
    rank = Rank(init, channel)
    load_s = time.monotonic() - started_s
    channel.send(Ready(num_blocks=rank.cache.num_blocks, weight_bytes=rank.weight_bytes, load_s=load_s))
    return rank


@torch.inference_mode()
def serve(channel: FrameChannel) -> None:
    """Answers frames until Shutdown or until the engine closes its end."""
    rank = _start(channel)
    while rank is not None:
        frame = channel.receive()
        if frame is None or isinstance(frame, Shutdown):
            return
        if not isinstance(frame, StepInput):
            raise FrameError(f"expected StepInput, got {type(frame).__name__}")
        channel.send(rank.step(frame))


def _tell(channel: FrameChannel, failed: Failed) -> None:
    try:
        channel.send(failed)
    except OSError:
        pass  # the engine is gone; the exit code still tells whoever asks


def main(argv: list[str]) -> int:
    """The process: returns its exit code."""
    frame_fd, lifeline_fd = (int(value) for value in argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # Triton's default differs between releases
    follow_parent(lifeline_fd)
    channel = FrameChannel(socket.socket(fileno=frame_fd))
    try:
        serve(channel)
    except ConfigError as err:
        _tell(channel, Failed(error=str(err), is_config=True))
        return 2
    except (BrokenPipeError, ConnectionResetError):
        return 0  # the engine is gone, and nobody is left to tell
    except Exception as err:
        # The process boundary: whatever it was, the engine must hear of it, and this process ends.
        logger.exception("worker failed")
        _tell(channel, Failed(error=f"{type(err).__name__}: {err}", is_config=False))
        return 1
    return 0


if __name__ == "__main__":
    # Not sys.exit: taking torch and its process groups apart takes a second, and there is nothing in them to save.
    os._exit(main(sys.argv[1:]))
