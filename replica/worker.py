"""One rank's process: `python -m replica.worker FRAME_FD LIFELINE_FD`, started by its engine.

The main thread reads frames from the socket FRAME_FD and answers them one by one (see replica/frames.py). A second
thread watches the pipe LIFELINE_FD and ends the process when the engine is gone, whatever the main thread is doing.
SIGINT and SIGTERM are ignored: Ctrl-C reaches the whole foreground group, and the engine says when its workers stop.

Exit codes: 0 shut down or engine gone, 1 a step or the start failed, 2 the setting or checkpoint is at fault.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np
import torch

from replica.checkpoint import Checkpoint
from replica.errors import ConfigError
from replica.frames import (
    FRAMES_VERSION,
    HEADER,
    MAX_FRAME_BYTES,
    Failed,
    Frame,
    FrameError,
    Init,
    Progress,
    Ready,
    Shutdown,
    StepInput,
    StepOutput,
    decode,
    encode,
)
from replica.kv_cache import KVCache, num_blocks_in
from replica.model_config import ModelConfig
from replica.models.qwen3_moe import Qwen3Moe
from replica.sampler import sample
from replica.step_tensors import StepTensors
from replica.weights import WeightReader

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL_S: Final = 0.1
WARM_UP_TOKENS: Final = 256  # enough for every code path; more would delay a large model on a CPU
WARM_UP_SEQS: Final = 32


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
        (length,) = HEADER.unpack(header)
        if length > MAX_FRAME_BYTES:
            raise FrameError(f"frame has {length} bytes, limit is {MAX_FRAME_BYTES}")
        body = self._read(length)
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
        """Checks the checkpoint, loads the weights and reports progress. Raises ConfigError if it cannot be served."""
        self.device = torch.device(init.device)
        dtype: torch.dtype = getattr(torch, init.dtype)
        config = ModelConfig.load(Path(init.model))
        checkpoint = Checkpoint.open(Path(init.model))
        checkpoint.check(config)
        num_blocks = num_blocks_in(
            init.kv_cache_bytes,
            block_bytes=config.kv_bytes_per_token(init.dtype) * init.block_size,
            block_size=init.block_size,
            max_model_len=init.max_model_len,
        )
        total_bytes = sum(checkpoint.tensors[name].num_bytes for name in config.tensor_shapes())
        report = ProgressReport(channel, total_bytes)
        with WeightReader(checkpoint, dtype=dtype, device=self.device, on_progress=report) as weights:
            self.model = Qwen3Moe(config, weights, num_positions=init.max_model_len, device=self.device)
            self.weight_bytes = weights.weight_bytes
        self.cache = KVCache(config, num_blocks=num_blocks, block_size=init.block_size, dtype=dtype, device=self.device)

    def step(self, frame: StepInput) -> StepOutput:
        """One forward and one sampled token for each of the frame's sample rows."""
        logits = self.model.forward(StepTensors.from_frame(frame, self.device), self.cache)  # [N, V]
        return StepOutput(step=frame.step, token_ids=sample(logits, frame))

    def warm_up(self, init: Init) -> None:
        """Takes the paths of a prefill, a decode and an empty step once, so that no client waits for a first time."""
        num_tokens = min(init.max_num_batched_tokens, init.max_model_len, WARM_UP_TOKENS)
        num_seqs = min(init.max_num_batched_tokens, init.max_num_seqs, WARM_UP_SEQS)
        self.step(_blank_step(num_decodes=0, lengths=[num_tokens], block_size=init.block_size))
        self.step(_blank_step(num_decodes=num_seqs, lengths=[1] * num_seqs, block_size=init.block_size))
        self.step(_blank_step(num_decodes=0, lengths=[], block_size=init.block_size))


class ProgressReport:
    """Tells the engine about bytes read, at most every PROGRESS_INTERVAL_S and once at the end."""

    def __init__(self, channel: FrameChannel, total_bytes: int) -> None:
        self._channel = channel
        self._total_bytes = total_bytes
        self._sent_s = 0.0

    def __call__(self, done_bytes: int) -> None:
        now_s = time.monotonic()
        if now_s - self._sent_s >= PROGRESS_INTERVAL_S or done_bytes == self._total_bytes:
            self._sent_s = now_s
            self._channel.send(Progress(done_bytes=done_bytes, total_bytes=self._total_bytes))


def _blank_step(*, num_decodes: int, lengths: list[int], block_size: int) -> StepInput:
    """A step of sequences of token 0 that begin here, whose keys and values are written nowhere; each is sampled."""
    starts = np.concatenate(([0], np.cumsum(lengths, dtype=np.int32))).astype(np.int32)  # [S + 1]
    T, S = int(starts[-1]), len(lengths)
    positions = np.concatenate([np.arange(n) for n in lengths]) if lengths else np.zeros(0)
    return StepInput(
        step=0,
        num_decodes=num_decodes,
        token_ids=np.zeros(T, np.int32),
        positions=positions.astype(np.int32),
        slots=np.full(T, -1, np.int32),
        query_starts=starts,
        context_lens=np.array(lengths, np.int32),
        block_tables=np.zeros((S, -(-max(lengths, default=0) // block_size)), np.int32),
        sample_rows=starts[1:] - 1,
        temperature=np.ones(S, np.float32),
        top_k=np.full(S, 2, np.int32),
        top_p=np.full(S, 0.9, np.float32),
        min_p=np.zeros(S, np.float32),
        seeds=np.zeros(S, np.uint64),
        choices=np.zeros(S, np.int32),
        output_indices=np.zeros(S, np.int32),
    )


def _start(channel: FrameChannel) -> Rank | None:
    """Waits for Init, loads and warms up. None if the engine went away instead."""
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
    rank.warm_up(init)
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


def _exit_with_engine(lifeline_fd: int) -> None:
    """Blocks until the engine's end of the pipe is closed. Nothing is ever written to it."""
    os.read(lifeline_fd, 1)
    os._exit(0)  # not sys.exit: the main thread may be inside a forward or a collective


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
    threading.Thread(target=_exit_with_engine, args=(lifeline_fd,), name="lifeline", daemon=True).start()
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
    sys.exit(main(sys.argv[1:]))
