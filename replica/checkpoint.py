"""What a Hugging Face folder holds: its safetensors headers, checked before anything is loaded. No torch.

A safetensors file is an 8-byte little-endian length, that many bytes of JSON ({name: {dtype, shape, data_offsets}}),
then the tensors' bytes without gaps (https://github.com/huggingface/safetensors#format). So a file that was cut short,
or whose header is damaged, is found from its header and size alone.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replica.errors import CheckpointError
from replica.model_config import DTYPE_BYTES, ModelConfig

SINGLE_FILE: Final = "model.safetensors"
INDEX_FILE: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100_000_000  # safetensors' own limit
_FP8: Final = "float8_e4m3"
_DTYPES: Final = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F8_E4M3": _FP8}
_ITEM_BYTES: Final = {**DTYPE_BYTES, _FP8: 1}
_HASHED_FILES: Final = ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
# Names that old exporters wrote and nobody reads: the buffer is computed, the head of a tied model is its embedding.
_UNUSED_SUFFIX: Final = ".rotary_emb.inv_freq"
_TIED_HEAD: Final = "lm_head.weight"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where one tensor lies."""

    dtype: str  # a key of DTYPE_BYTES, float8_e4m3, or safetensors' own word for one that is not served
    shape: tuple[int, ...]
    file: Path
    begin: int  # bytes from the start of the file
    end: int

    @property
    def num_bytes(self) -> int:
        """Size in the file."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors of one folder, by name."""

    folder: Path
    tensors: dict[str, TensorEntry]
    headers_digest: bytes  # sha256 over the files' headers

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Reads every header of `folder`. Raises CheckpointError, in one line, if a file is missing or damaged."""
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is not a folder; the model must be a folder in Hugging Face format")
        indexed = _read_index(folder)
        files = sorted(set(indexed.values())) if indexed is not None else [SINGLE_FILE]
        tensors: dict[str, TensorEntry] = {}
        digest = hashlib.sha256()
        for name in files:
            header, entries = _read_header(folder / name)
            digest.update(name.encode() + b"\0" + header)
            for tensor in entries.keys() & tensors.keys():
                raise CheckpointError(f"{folder}: {tensor} is in both {tensors[tensor].file.name} and {name}")
            tensors |= entries
        for tensor, name in (indexed or {}).items():
            if tensor not in tensors or tensors[tensor].file.name != name:
                raise CheckpointError(f"{folder / INDEX_FILE}: {tensor} is not in {name}, as the index says")
        return cls(folder=folder, tensors=tensors, headers_digest=digest.digest())

    def check(self, config: ModelConfig) -> None:
        """Raises CheckpointError unless these are exactly the tensors of `config`, in its shapes and a known dtype."""
        check_names(self.folder, self.tensors.keys(), config)
        for name, shape in config.tensor_shapes().items():
            entry = self.tensors[name]
            if entry.shape != shape:
                raise CheckpointError(
                    f"{entry.file}: {name} has shape {list(entry.shape)}, config.json needs {list(shape)}"
                )
            allowed = (_FP8,) if config.is_fp8(name) else tuple(DTYPE_BYTES)
            if entry.dtype not in allowed:
                raise CheckpointError(f"{entry.file}: {name} is {entry.dtype}, must be one of {', '.join(allowed)}")


def check_names(folder: Path, names: Set[str], config: ModelConfig) -> None:
    """Raises CheckpointError unless these are exactly the names of the tensors of `config`."""
    expected = config.tensor_shapes().keys()
    unused = {name for name in names if name.endswith(_UNUSED_SUFFIX)}
    if config.tie_word_embeddings:
        unused.add(_TIED_HEAD)
    for wrong, complaint in ((expected - names, "lacks tensor"), (names - expected - unused, "has unknown tensor")):
        if wrong:
            more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
            raise CheckpointError(f"{folder} {complaint} {min(wrong)}{more}; does config.json belong to these weights?")


def model_hash(checkpoint: Checkpoint, dtype: str) -> str:
    """16 hex digits that two replicas share only if they answer alike: config, tokenizer, template, dtype and weights.

    Of the weights it covers the headers, not the values: reading those would take minutes.
    """
    digest = hashlib.sha256(dtype.encode() + b"\0" + checkpoint.headers_digest)
    for name in _HASHED_FILES:
        path = checkpoint.folder / name
        content = path.read_bytes() if path.is_file() else b""
        digest.update(struct.pack("<Q", len(content)) + content)
    return digest.hexdigest()[:16]


def _read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, or None if the weights are one file."""
    path = folder / INDEX_FILE
    if not path.is_file():
        if not (folder / SINGLE_FILE).is_file():
            raise CheckpointError(
                f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; other formats are not supported"
            )
        return None
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        files = set(weight_map.values())
        is_sound = bool(files) and all(Path(name).name == name for name in files)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise CheckpointError(f"{path} is damaged: {type(err).__name__}: {err}") from err
    if not is_sound:
        raise CheckpointError(f"{path} is damaged: weight_map must map tensors to files of the same folder")
    missing = sorted(name for name in files if not (folder / name).is_file())
    if missing:
        raise CheckpointError(
            f"{folder} lacks {missing[0]}, {len(missing)} of the {len(files)} files that {INDEX_FILE} names"
        )
    return dict(weight_map)


def _read_header(path: Path) -> tuple[bytes, dict[str, TensorEntry]]:
    """One file's raw header and its tensors. Raises CheckpointError if header and size do not fit each other."""
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else file_bytes
            if length > min(MAX_HEADER_BYTES, file_bytes - 8):
                raise _damaged(path, f"its {file_bytes} bytes do not hold its header")
            header = file.read(length)
        values = json.loads(header)
        values.pop("__metadata__", None)
        entries = {name: _entry(path, value, 8 + length) for name, value in values.items()}
    except OSError as err:
        raise CheckpointError(f"cannot read {path}: {err}") from err
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as err:
        raise _damaged(path, f"its header is not a safetensors header ({type(err).__name__}: {err})") from err
    end = 8 + length
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != end:
            raise _damaged(path, f"{name} begins at byte {entry.begin}, the tensor before it ends at {end}")
        end = entry.end
    if end != file_bytes:
        raise _damaged(
            path, f"its header describes {end} bytes, the file has {file_bytes}; was the download cut short?"
        )
    return header, entries


def _entry(path: Path, value: dict[str, Any], data_start: int) -> TensorEntry:
    dtype, shape = str(value["dtype"]), tuple(int(size) for size in value["shape"])
    begin, end = (int(offset) for offset in value["data_offsets"])
    entry = TensorEntry(_DTYPES.get(dtype, dtype), shape, path, data_start + begin, data_start + end)
    if min((begin, *shape), default=0) < 0 or end < begin:
        raise ValueError(f"negative size in {value}")
    if entry.dtype in _ITEM_BYTES and entry.num_bytes != math.prod(shape) * _ITEM_BYTES[entry.dtype]:
        raise ValueError(f"shape {list(shape)} of {dtype} does not take {entry.num_bytes} bytes")
    return entry


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"{path} is damaged: {what}")
