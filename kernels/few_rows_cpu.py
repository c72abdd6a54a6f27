"""What a step that decodes computes in bfloat16 on the CPU, by code of our own (few_rows.cpp, which says why).

It is compiled when the first weight is packed, in some two seconds, and kept in the user's cache folder. It only makes
things faster: where there is no compiler, or the CPU has no AVX512-BF16, oneDNN computes everything (packed_linear.py).
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from kernels.moe_experts import ExpertWeights

logger = logging.getLogger(__name__)

BF16: Final = torch.bfloat16
MAX_ROWS: Final = 16  # of a product, of experts on average; for more, oneDNN is as fast
_SOURCE: Final = Path(__file__).with_name("few_rows.cpp")
_FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16")
_COMPILE_S: Final = 60.0
_CACHE_FOLDER: Final = ".cache/lockstep"  # in the user's home


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code; None where there is none."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        loaded = ctypes.CDLL(str(_compiled(Path.home() / _CACHE_FOLDER)))
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as err:  # RuntimeError: the user has no home
        logger.warning("steps of few tokens take twice the time: few_rows.cpp cannot be compiled error=%s", err)
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    loaded.linear.argtypes = (*[pointer] * 4, *[size] * 3)
    loaded.experts.argtypes = (*[pointer] * 7, *[size] * 4)
    loaded.attention.argtypes = (*[pointer] * 6, *[size] * 6, ctypes.c_float)
    loaded.linear.restype = loaded.attention.restype = None
    loaded.experts.restype = ctypes.c_bool
    return loaded


def serves(weight: Tensor) -> bool:
    """Whether this weight or KV cache, on the CPU, is of the type that is served here. It must stay plain then."""
    return weight.dtype == torch.bfloat16 and library() is not None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], weight [N, K] that `serves` has accepted, bias [N] -> [T, N]. For T up to MAX_ROWS."""
    code = library()
    assert code is not None
    x = x.contiguous()
    T, (N, K) = x.shape[0], weight.shape
    if x.shape[1] != K or T > MAX_ROWS:
        raise ValueError(f"x is {tuple(x.shape)}, needs at most {MAX_ROWS} rows of {K}")
    y = x.new_empty((T, N))
    _check((x, weight) if bias is None else (x, weight, bias), (BF16, BF16, BF16))
    bias_at = None if bias is None else bias.data_ptr()
    code.linear(x.data_ptr(), weight.data_ptr(), bias_at, y.data_ptr(), T, N, K)
    return y


def experts(x: Tensor, weights: ExpertWeights, routing_weights: Tensor, expert_ids: Tensor) -> Tensor:
    """As moe_experts.moe_experts, with weights that `serves` has accepted. For few rows an expert."""
    code = library()
    assert code is not None
    x, routing_weights, expert_ids = x.contiguous(), routing_weights.contiguous(), expert_ids.contiguous()
    (T, H), top_k = x.shape, expert_ids.shape[1]
    y = torch.empty_like(x)
    tensors = (x, weights.gate_up, weights.down, weights.offsets, routing_weights, expert_ids, y)
    _check(tensors, (BF16, BF16, BF16, torch.int32, torch.float32, torch.int32, BF16))
    num_experts = len(weights.widths)
    if weights.gate_up.shape[1] != H:
        raise ValueError(f"x has {H} columns, the experts take {weights.gate_up.shape[1]}")
    if not code.experts(*_pointers(tensors), T, top_k, num_experts, H):
        least, most = torch.aminmax(expert_ids)
        raise ValueError(f"expert ids are {int(least)} to {int(most)}, limit is 0 to {num_experts - 1}")
    return y


def attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, lens: Tensor, scale: float) -> Tensor:
    """As attention_decode.attention_decode, with caches that `serves` has accepted."""
    code = library()
    assert code is not None
    q = q.contiguous()
    (S, Hq, D), (_, block_size, Hkv, _) = q.shape, k_cache.shape
    y = torch.empty_like(q)
    tensors = (q, k_cache, v_cache, tables.contiguous(), lens.contiguous(), y)
    _check(tensors, (BF16, BF16, BF16, torch.int32, torch.int32, BF16))
    code.attention(*_pointers(tensors), S, Hq, Hkv, D, block_size, tables.shape[1], scale)
    return y


def _check(tensors: Sequence[Tensor], dtypes: Sequence[torch.dtype]) -> None:
    """Raises ValueError for what the code would read as something else."""
    for tensor, dtype in zip(tensors, dtypes, strict=False):
        if tensor.dtype != dtype or not tensor.is_contiguous():
            layout = "contiguous" if tensor.is_contiguous() else f"of strides {tensor.stride()}"
            raise ValueError(f"a tensor is {tensor.dtype} and {layout}, needs {dtype} and contiguous")


def _pointers(tensors: Sequence[Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def _compiled(folder: Path) -> Path:
    """The library in the folder, made if it is not there. Raises OSError, TimeoutExpired."""
    source = _SOURCE.read_bytes()
    version = hashlib.sha256(source + " ".join(_FLAGS).encode()).hexdigest()[:16]
    path = folder / f"few_rows-{version}.so"
    if path.exists():
        _check_owner(folder, path)
        return path
    compiler = shutil.which("g++")
    if compiler is None:
        raise FileNotFoundError("there is no g++")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        compiled, linked = Path(scratch, "few_rows.o"), Path(scratch, "few_rows.so")
        # In two steps: linked without -fopenmp it has torch's threads, not some of its own beside them.
        for arguments in (("-fopenmp", "-c", _SOURCE, "-o", compiled), ("-shared", compiled, "-o", linked)):
            command = [compiler, *_FLAGS, *map(str, arguments)]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_COMPILE_S)
            if done.returncode:
                raise OSError(f"{compiler}: {done.stderr.strip()[:300]}")
        os.replace(linked, path)  # whole or not at all: other workers may be doing the same
    return path


def _check_owner(*paths: Path) -> None:
    """Raises PermissionError where somebody else could have put code there for this process to run."""
    for path in paths:
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} must belong to this user, and nobody else may write to it")
