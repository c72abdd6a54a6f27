"""safetensors headers: what a sound checkpoint tells, and how a damaged one is refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from replica.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, model_hash
from replica.errors import CheckpointError
from replica.model_config import ModelConfig
from tests.checkpoints import VARIANTS, write_checkpoint


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "sharded", VARIANTS["sharded"])


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "single", VARIANTS["transformers_5"])


def refused(folder: Path, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        Checkpoint.open(folder).check(ModelConfig.load(folder))
    assert "\n" not in str(caught.value)


def rewrite_header(path: Path, header: bytes) -> None:
    """Puts another header before the file's tensors."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    path.write_bytes(struct.pack("<Q", len(header)) + header + data[8 + length :])


def header_of(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    header: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return header


def test_entries_give_dtype_shape_and_the_exact_bytes(tmp_path: Path) -> None:
    wanted = torch.arange(6, dtype=torch.float16).view(2, 3)
    save_file({"first": torch.zeros(5), "second": wanted}, tmp_path / SINGLE_FILE)
    entry = Checkpoint.open(tmp_path).tensors["second"]
    assert (entry.dtype, entry.shape, entry.num_bytes) == ("float16", (2, 3), 12)
    assert (tmp_path / SINGLE_FILE).read_bytes()[entry.begin : entry.end] == wanted.numpy().tobytes()


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_checkpoint_passes_the_check(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path, VARIANTS[name])
    config, checkpoint = ModelConfig.load(folder), Checkpoint.open(folder)
    checkpoint.check(config)
    assert config.tensor_shapes().keys() <= checkpoint.tensors.keys()
    assert len({entry.file for entry in checkpoint.tensors.values()}) == (14 if name == "sharded" else 1)


def test_a_folder_without_weights_is_refused(tmp_path: Path, single: Path) -> None:
    (single / SINGLE_FILE).rename(single / "pytorch_model.bin")
    refused(single, f"neither {SINGLE_FILE} nor {INDEX_FILE}")
    with pytest.raises(CheckpointError, match="is not a folder"):
        Checkpoint.open(tmp_path / "nowhere")


@pytest.mark.parametrize("kept", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(single: Path, kept: int) -> None:
    path = single / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:kept])
    refused(single, r"model\.safetensors is damaged")


def test_a_file_with_bytes_after_its_last_tensor_is_refused(single: Path) -> None:
    with (single / SINGLE_FILE).open("ab") as file:
        file.write(b"more")
    refused(single, r"is damaged: its header describes \d+ bytes, the file has \d+")


@pytest.mark.parametrize("header", [b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff\xff"])
def test_a_header_that_is_none_is_refused(single: Path, header: bytes) -> None:
    rewrite_header(single / SINGLE_FILE, header)
    refused(single, "is damaged: its header is not a safetensors header")


def test_a_tensor_whose_bytes_do_not_fit_its_shape_is_refused(single: Path) -> None:
    header = header_of(single / SINGLE_FILE)
    header["model.norm.weight"]["shape"] = [47]
    rewrite_header(single / SINGLE_FILE, json.dumps(header).encode())
    refused(single, r"shape \[47\] of F32 does not take 192 bytes")


def test_overlapping_tensors_are_refused(single: Path) -> None:
    header = header_of(single / SINGLE_FILE)
    first, second = sorted((name for name in header if name.endswith("_proj.weight")), key=str)[:2]
    header[second] = header[first]
    rewrite_header(single / SINGLE_FILE, json.dumps(header).encode())
    refused(single, r"begins at byte \d+, the tensor before it ends at \d+")


def test_an_index_that_names_a_missing_file_is_refused(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[3]
    gone.unlink()
    refused(sharded, f"lacks {gone.name}, 1 of the 14 files")


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 3}}'])
def test_a_damaged_index_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX_FILE).write_text(content)
    refused(sharded, rf"{INDEX_FILE} is damaged")


def test_an_index_may_not_point_out_of_its_folder(sharded: Path, single: Path) -> None:
    (sharded / INDEX_FILE).write_text(json.dumps({"weight_map": {"a": f"../{single.name}/{SINGLE_FILE}"}}))
    refused(sharded, "of the same folder")


def test_an_index_that_disagrees_with_its_files_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    weight_map = index["weight_map"]
    weight_map["model.norm.weight"] = weight_map["model.embed_tokens.weight"]
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    refused(sharded, r"model\.norm\.weight is not in .*safetensors, as the index says")


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX_FILE).read_text())
    index["weight_map"]["more"] = "more.safetensors"
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    save_file({"more": torch.zeros(1), "model.norm.weight": torch.zeros(48)}, sharded / "more.safetensors")
    refused(sharded, r"model\.norm\.weight is in both")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 4}, r"lacks tensor model\.layers\.3.* and \d+ more; does config\.json belong"),
        ({"num_hidden_layers": 2}, r"has unknown tensor model\.layers\.2.* and \d+ more"),
        ({"attention_bias": True}, r"lacks tensor model\.layers\.0\.self_attn\.k_proj\.bias"),
        ({"moe_intermediate_size": 41}, r"has shape \[40, 48\], config\.json needs \[41, 48\]"),
        ({"vocab_size": 212}, r"embed_tokens\.weight has shape \[211, 48\], config\.json needs \[212, 48\]"),
    ],
)
def test_tensors_of_another_config_are_refused(single: Path, changes: dict[str, Any], said: str) -> None:
    values = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(values | changes))
    refused(single, said)


def test_a_tensor_of_another_dtype_is_refused(single: Path) -> None:
    header = header_of(single / SINGLE_FILE)
    header["model.norm.weight"]["dtype"] = "I32"
    rewrite_header(single / SINGLE_FILE, json.dumps(header).encode())
    refused(single, r"model\.norm\.weight is I32, must be one of bfloat16, float16, float32")


def test_a_tied_model_may_still_hold_its_head(single: Path) -> None:
    values = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(values | {"tie_word_embeddings": True}))
    Checkpoint.open(single).check(ModelConfig.load(single))


def test_the_model_hash_changes_with_all_that_changes_answers(single: Path) -> None:
    def current(dtype: str = "float32") -> str:
        return model_hash(Checkpoint.open(single), dtype)

    hashes = [current(), current("bfloat16")]
    assert hashes[0] == current() and len(hashes[0]) == 16
    for name in ("tokenizer.json", "chat_template.jinja", "config.json"):
        (single / name).write_text((single / name).read_text() + " " if (single / name).exists() else "x")
        hashes.append(current())
    header = header_of(single / SINGLE_FILE)
    header["__metadata__"] = {"format": "other"}
    rewrite_header(single / SINGLE_FILE, json.dumps(header).encode())
    hashes.append(current())
    assert len(set(hashes)) == len(hashes)


def test_a_header_or_index_that_nests_without_end_is_damaged(single: Path, sharded: Path) -> None:
    rewrite_header(single / SINGLE_FILE, b"[" * 100_000)
    refused(single, "its header is not a safetensors header")
    (sharded / INDEX_FILE).write_bytes(b"[" * 100_000)
    refused(sharded, "is damaged: RecursionError")


def test_a_config_that_nests_without_end_is_refused(single: Path) -> None:
    (single / "config.json").write_bytes(b"[" * 100_000)
    refused(single, "cannot read .*config.json")
