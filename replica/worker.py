"""One rank's process: `python -m replica.worker FRAME_FD LIFELINE_FD BOARD_FD`, started by its engine.

The main thread reads frames from the socket FRAME_FD and answers them one by one (see replica/frames.py). A second
thread watches the pipe LIFELINE_FD, whatever the main thread is doing: a byte in it ends the collective that the rank
is in, if its epoch is over, and its EOF ends the process, because the engine is gone. A third one shows in the file
BOARD_FD (rank_board.py) that it runs.
SIGINT and SIGTERM are ignored: Ctrl-C reaches the whole foreground group, and the engine says when its workers stop.

Exit codes: 0 shut down, 1 a step or the start failed, 2 the setting or checkpoint is at fault. When the engine is gone
nobody is left to see one.
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from replica.checkpoint import Checkpoint
from replica.errors import CollectiveFailed, ConfigError, PeerError
from replica.frames import (
    FRAMES_VERSION,
    HEADER,
    Aborted,
    Blob,
    Blobs,
    Connected,
    Failed,
    Frame,
    FrameError,
    Init,
    Progress,
    Ready,
    Regroup,
    Shutdown,
    StepDone,
    StepInput,
    StepOutput,
    body_length,
    decode,
    encode,
)
from replica.kv_cache import KVCache, num_blocks_in
from replica.model_config import ModelConfig
from replica.models.qwen3_moe import Qwen3Moe
from replica.peers import Peers
from replica.process_tree import follow_parent
from replica.rank_board import RankBoard
from replica.sampler import sample
from replica.shards import Shards
from replica.step_tensors import StepTensors
from replica.takeover import Takeover
from replica.weights import WeightReader

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S: Final = 0.1


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

    def __init__(self, init: Init, board: RankBoard, on_progress: Callable[[int, int], None]) -> None:
        """Checks the checkpoint and loads the weights. Raises ConfigError if the checkpoint cannot be served so."""
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
        # It stays: lost replicas' blocks are read later.
        self._weights = WeightReader(checkpoint, shards, dtype=dtype, device=self.device, on_progress=on_progress)
        self.model = Qwen3Moe(config, self._weights, num_positions=init.max_model_len, device=self.device)
        self._weights.unmap()
        self.cache = KVCache(shards, num_blocks=num_blocks, block_size=init.block_size, dtype=dtype, device=self.device)
        self.peers = Peers(
            init.layout,
            init.rank,
            device=self.device,
            peer_host=init.peer_host,
            timeout_s=init.collective_timeout_s,
            board=board,
        )
        self._takeover = Takeover(shards, init.dtype) if init.layout.dp > 1 else None
        self._evicted: tuple[tuple[int, ...], ...] = ()  # of which this rank has taken over its share
        self._reload_s = 0.0

    @property
    def weight_bytes(self) -> int:
        """Of all that it holds."""
        return self._weights.weight_bytes

    def regroup(self, frame: Regroup) -> Blob:
        """Lets go of its peers, takes over its share of what the lost ones held, and begins to meet those that live.

        Raises CollectiveFailed if the epoch is over already.
        """
        started_s = time.monotonic()
        known = len(self._evicted)
        if frame.evicted[:known] != self._evicted:
            raise PeerError(f"the evictions {frame.evicted} do not go on from {self._evicted}")
        for replicas in frame.evicted[known:]:
            assert self._takeover is not None  # somebody lives, so there were several
            shards = self._takeover.evict(replicas)
            with self._weights.reading(shards):
                self.model.take_over(self._weights, shards.layers)
            self._evicted = (*self._evicted, replicas)
        self._reload_s = time.monotonic() - started_s
        return Blob(epoch=frame.epoch, blob=self.peers.meet(frame.epoch, frame.members))

    def connect(self, frame: Blobs) -> Connected:
        """Connects with the living peers. Raises CollectiveFailed."""
        self.peers.connect(frame.blobs)
        return Connected(epoch=frame.epoch, reload_s=self._reload_s, weight_bytes=self.weight_bytes)

    def step(self, frame: StepInput) -> StepOutput | StepDone:
        """One forward; on the replica's first rank, which has the logits, a token for each of the sample rows.

        Raises CollectiveFailed when the ranks did not do it together.
        """
        with self.peers.together() as groups:
            step = StepTensors.from_frame(frame, self.device, groups)
            logits = self.model.forward(step, self.cache, groups)  # [N, V]
            if not self.samples:
                return StepDone(step=frame.step)
            token_ids, logprobs = sample(logits, frame)
            return StepOutput(step=frame.step, token_ids=token_ids, logprobs=logprobs)


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


def _start(channel: FrameChannel, wake: Wake, board_fd: int) -> Rank | None:
    """Waits for Init and loads. None if the engine went away instead."""
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
    board = RankBoard(init.attn_tp, board_fd)
    board.keep_beating(init.layout.local_rank(init.rank))
    rank = Rank(init, board, ProgressReport(channel))
    wake.call = rank.peers.release_older
    gc.freeze()  # what is here stays; a collection that walked through it would take as long as a step
    load_s = time.monotonic() - started_s
    channel.send(Ready(num_blocks=rank.cache.num_blocks, weight_bytes=rank.weight_bytes, load_s=load_s))
    return rank


class Wake:
    """What a byte in the lifeline calls, once there is something to call."""

    def __init__(self) -> None:
        self.call: Callable[[], None] = lambda: None

    def __call__(self) -> None:
        self.call()


@torch.inference_mode()
def serve(channel: FrameChannel, wake: Wake, board_fd: int) -> None:
    """Answers frames until Shutdown or until the engine closes its end."""
    rank = _start(channel, wake, board_fd)
    while rank is not None:
        frame = channel.receive()
        if frame is None or isinstance(frame, Shutdown):
            return
        channel.send(_answer(rank, frame))


def _answer(rank: Rank, frame: Frame) -> Frame:
    """What comes of a frame that asks for something."""
    try:
        match frame:
            case StepInput():
                return rank.step(frame)
            case Regroup():
                return rank.regroup(frame)
            case Blobs():
                return rank.connect(frame)
            case _:
                raise FrameError(f"expected a step or an epoch, got {type(frame).__name__}")
    except CollectiveFailed as err:
        step = frame.step if isinstance(frame, StepInput) else -1
        return Aborted(epoch=rank.peers.epoch, step=step, error=str(err))


def _tell(channel: FrameChannel, failed: Failed) -> None:
    try:
        channel.send(failed)
    except OSError:
        pass  # the engine is gone; the exit code still tells whoever asks


def main(argv: list[str]) -> int:
    """The process: returns its exit code."""
    frame_fd, lifeline_fd, board_fd = (int(value) for value in argv)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"  # Triton's default differs between releases
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # else torch ends this process for what `release` is there for
    wake = Wake()
    follow_parent(lifeline_fd, wake)
    channel = FrameChannel(socket.socket(fileno=frame_fd))
    try:
        serve(channel, wake, board_fd)
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
