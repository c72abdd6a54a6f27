"""Bfloat16 on CPUs with AVX512-BF16, by code of our own (the folder bf16, where product.h says how).

All that a step does to its tokens is there but for sampling. A token's result is the same to the last bit whatever else
is in the step, and whether its prompt was computed at once, in parts, or anew after a preemption. Not so in a model
with weights that do not fill strips of 16 rows: oneDNN multiplies those.

The code is compiled when the first weight is packed, in three to ten seconds, and kept in the user's cache folder. It
only makes things faster: where there is no compiler, or the CPU lacks these instructions, torch and oneDNN do the same.
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

from kernels.moe_experts import ExpertWeights, StripExperts
from kernels.step_plan import StepTables

logger = logging.getLogger(__name__)

LANES: Final = 16  # rows of a strip
BF16: Final = torch.bfloat16
_SOURCES: Final = Path(__file__).with_name("bf16")
_FLAGS: Final = ("-std=c++17", "-O3", "-fPIC", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512bf16")
_COMPILE_S: Final = 60.0
_CACHE_FOLDER: Final = ".cache/lockstep"  # in the user's home


@cache
def library() -> ctypes.CDLL | None:
    """The compiled code; None where there is none."""
    if not torch.cpu._is_avx512_bf16_supported():
        return None
    try:
        loaded = _load(Path.home() / _CACHE_FOLDER)
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as err:  # RuntimeError: the user has no home
        logger.warning(
            "bfloat16 models take twice the time, as kernels/bf16 is not compiled; it needs g++ and ~/%s error=%s",
            *(_CACHE_FOLDER, err),
        )
        return None
    pointer, size, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    loaded.pack.argtypes = (*[pointer] * 2, *[size] * 2)
    loaded.linear.argtypes = (*[pointer] * 4, *[size] * 3)
    loaded.experts.argtypes = (*[pointer] * 7, *[size] * 4)
    loaded.attention.argtypes = (*[pointer] * 7, *[size] * 6, real)
    loaded.rms_norm.argtypes = (*[pointer] * 5, *[size] * 2, real)
    loaded.cache_heads.argtypes = (*[pointer] * 8, *[size] * 4, real)
    loaded.route.argtypes = (*[pointer] * 3, *[size] * 3, ctypes.c_bool)
    loaded.swiglu.argtypes = (*[pointer] * 2, *[size] * 2)
    for name in ("pack", "linear", "attention", "rms_norm", "cache_heads", "route", "swiglu"):
        getattr(loaded, name).restype = None
    loaded.experts.restype = ctypes.c_bool
    return loaded


def serves(x: Tensor) -> bool:
    """Whether this tensor on the CPU is of the type that is served here."""
    return x.dtype == BF16 and library() is not None


def can_pack(weight: Tensor) -> bool:
    """Whether `weight` [N, K] can lie in strips, which take no more room than it does."""
    N, K = weight.shape
    return serves(weight) and N % LANES == 0 and K % 2 == 0


def pack(weight: Tensor) -> Tensor:
    """weight [N, K], which `can_pack` has accepted -> a copy in strips [N / 16, K / 2, 16, 2]."""
    N, K = weight.shape
    strips = weight.new_empty((N // LANES, K // 2, LANES, 2))
    _pack_into(strips, weight)
    return strips


def is_packed(weight: Tensor) -> bool:
    """Whether a linear's weight lies in strips."""
    return weight.dim() == 4


def rows(strips: Tensor, indices: Tensor) -> Tensor:
    """Rows of the matrix [N, K] that `pack` was given: indices [T] -> [T, K]."""
    return strips[indices // LANES, :, indices % LANES].flatten(1)


def pack_experts(experts: ExpertWeights) -> StripExperts | None:
    """A copy in strips; None where an expert's width does not fill them."""
    hidden = experts.gate_up.shape[1]
    if not can_pack(experts.gate_up) or hidden % LANES or any(width % LANES for width in experts.widths):
        return None
    down = torch.empty_like(experts.down)
    sizes = [hidden * width for width in experts.widths]
    for strips, part, width in zip(down.split(sizes), experts.down.split(sizes), experts.widths, strict=True):
        _pack_into(strips, part.view(hidden, width))
    return StripExperts(pack(experts.gate_up), down, experts.offsets, experts.widths)


def _pack_into(strips: Tensor, weight: Tensor) -> None:
    _run("pack", (weight.contiguous(), strips), (BF16, BF16), *weight.shape)


def linear(x: Tensor, strips: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, K], strips of a weight [N, K], bias [N] -> [T, N]."""
    T, N, K = x.shape[0], strips.shape[0] * LANES, strips.shape[1] * 2
    if x.shape[1] != K:
        raise ValueError(f"x has rows of {x.shape[1]}, the weight's have {K}")
    y = x.new_empty((T, N))
    _run("linear", (x.contiguous(), strips, bias, y), (BF16,) * 4, T, N, K)
    return y


def experts(x: Tensor, weights: StripExperts, routing_weights: Tensor, expert_ids: Tensor) -> Tensor:
    """See moe_experts.moe_experts. The routing weights are applied between the two products, in float32."""
    (T, H), num_experts = x.shape, len(weights.widths)
    if weights.gate_up.shape[1] * 2 != H:
        raise ValueError(f"x has {H} columns, the experts take {weights.gate_up.shape[1] * 2}")
    y = x.new_empty(x.shape)
    inputs = x.contiguous(), weights.gate_up, weights.down, weights.offsets
    routes = routing_weights.contiguous(), expert_ids.contiguous()
    dtypes = (BF16, BF16, BF16, torch.int32, torch.float32, torch.int32, BF16)
    if not _run("experts", (*inputs, *routes, y), dtypes, T, expert_ids.shape[1], num_experts, H):
        least, most = torch.aminmax(expert_ids)
        raise ValueError(f"expert ids are {int(least)} to {int(most)}, limit is 0 to {num_experts - 1}")
    return y


def attention(q: Tensor, tables: StepTables, k_cache: Tensor, v_cache: Tensor, scale: float) -> Tensor:
    """See paged_attention.paged_attention."""
    q, y = q.contiguous(), q.new_empty(q.shape)
    n = len(tables.decode_lens)
    for rows, pages, starts, lens in (
        (slice(0, n), tables.decode_tables, None, tables.decode_lens),
        (slice(n, None), tables.prefill_tables, tables.prefill_starts, tables.prefill_lens),
    ):
        if len(lens):
            (_, Hq, D), (_, block_size, Hkv, _) = q.shape, k_cache.shape
            _run(
                "attention",
                (q[rows], k_cache, v_cache, pages.contiguous(), starts, lens, y[rows]),
                (BF16, BF16, BF16, torch.int32, torch.int32, torch.int32, BF16),
                *(len(lens), Hq, Hkv, D, block_size, pages.shape[1], scale),
            )
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See rms_norm.rms_norm."""
    y = x.new_empty(x.shape)
    _run("rms_norm", (x.contiguous(), None, weight, y, None), (BF16,) * 5, *x.shape, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See rms_norm.add_rms_norm."""
    y, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _run("rms_norm", (x.contiguous(), residual.contiguous(), weight, y, total), (BF16,) * 5, *x.shape, eps)
    return y, total


def cache_heads(qkv: Tensor, norms: Tensor, eps: float, tables: StepTables, k_cache: Tensor, v_cache: Tensor) -> Tensor:
    """See rope_cache.cache_heads. norms [Hq + Hkv, D] float32."""
    (T, heads, D), Hkv = qkv.shape, k_cache.shape[2]
    q = qkv.new_empty((T, heads - 2 * Hkv, D))
    _run(
        "cache_heads",
        (qkv.contiguous(), norms, tables.cos_sin, tables.positions, tables.slots, q, k_cache, v_cache),
        (BF16, torch.float32, torch.float32, torch.int32, torch.int32, BF16, BF16, BF16),
        *(T, heads - 2 * Hkv, Hkv, D, eps),
    )
    return q


def route(logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """See moe_routing.route, for softmax."""
    T, E = logits.shape
    weights = logits.new_empty((T, top_k), dtype=torch.float32)
    expert_ids = logits.new_empty((T, top_k), dtype=torch.int32)
    dtypes = (BF16, torch.float32, torch.int32)
    _run("route", (logits.contiguous(), weights, expert_ids), dtypes, T, E, top_k, renormalize)
    return weights, expert_ids


def swiglu(x: Tensor) -> Tensor:
    """See swiglu.swiglu."""
    T, F = x.shape[0], x.shape[1] // 2
    y = x.new_empty((T, F))
    _run("swiglu", (x.contiguous(), y), (BF16, BF16), T, F)
    return y


def _run(name: str, tensors: Sequence[Tensor | None], dtypes: Sequence[torch.dtype], *sizes: float) -> bool | None:
    """Calls a function of the library. Raises ValueError for tensors that it would read as something else."""
    for tensor, dtype in zip(tensors, dtypes, strict=True):
        if tensor is not None and (tensor.dtype != dtype or not tensor.is_contiguous()):
            layout = "contiguous" if tensor.is_contiguous() else f"of strides {tensor.stride()}"
            raise ValueError(f"a tensor is {tensor.dtype} and {layout}, needs {dtype} and contiguous")
    code = library()
    assert code is not None  # as `serves` said
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    result: bool | None = getattr(code, name)(*pointers, *sizes)
    return result


def _load(folder: Path) -> ctypes.CDLL:
    """The library in the folder, compiled if there is none of this version. Raises OSError, TimeoutExpired."""
    files = sorted(_SOURCES.glob("*.[ch]*"))
    version = hashlib.sha256(b"".join([" ".join(_FLAGS).encode(), *(file.read_bytes() for file in files)]))
    path = folder / f"bf16-{version.hexdigest()[:16]}.so"
    try:
        _check_owner(folder, path)
        return ctypes.CDLL(str(path))
    except PermissionError:
        raise
    except OSError:  # it is not there, or cannot be loaded: damaged, or made on another system
        return _compile([file for file in files if file.suffix == ".cpp"], path)


def _compile(sources: Sequence[Path], path: Path) -> ctypes.CDLL:
    """The library of the sources, kept at `path` in place of other versions. Raises OSError, TimeoutExpired."""
    compiler, folder = shutil.which("g++"), path.parent
    if compiler is None:
        raise FileNotFoundError("there is no g++")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_owner(folder)
    logger.info("kernels/bf16 is compiled, once, in some ten seconds folder=%s", folder)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        objects = [f"{source.stem}.o" for source in sources]
        # In two steps: linked without -fopenmp it has torch's threads, not some of its own beside them.
        for arguments in (("-fopenmp", "-c", *sources), ("-shared", *objects, "-o", path.name)):
            command = [compiler, *_FLAGS, *map(str, arguments)]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_COMPILE_S, cwd=scratch)
            if done.returncode:
                raise OSError(f"{compiler}: {done.stderr.strip()[:300]}")
        built = Path(scratch, path.name)
        built.chmod(0o700)  # as `_check_owner` wants it, whatever the umask
        with built.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut could shorten what is kept, and loading that may crash
        library = ctypes.CDLL(str(built))  # from there, where no other version takes it away
        os.replace(built, path)  # whole or not at all: other workers may be doing the same
    for other in set(folder.glob("*.so")) - {path}:
        other.unlink(missing_ok=True)  # a process that has loaded it keeps it
    return library


def _check_owner(*paths: Path) -> None:
    """Raises PermissionError where somebody else could have put code there for this process to run."""
    for path in paths:
        status = path.stat()
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} must belong to this user, and nobody else may write to it")
