"""Weights are read in exactly the slices that are asked for, converted, and laid out for the kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from replica.checkpoint import SINGLE_FILE, Checkpoint
from replica.weights import Ranges, WeightReader

H: Final = 10
WIDTH: Final = 12
NUM_EXPERTS: Final = 3
SHARDS: Final[list[Ranges]] = [[(0, 4), (8, 12)], [], [(4, 5)]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)

    def random(*size: int) -> Tensor:
        return torch.randn(size, generator=generator).to(torch.bfloat16)

    tensors = {"matrix": random(9, 7), "below": random(4, 7), "vector": random(9)}
    for e in range(NUM_EXPERTS):
        tensors[f"experts.{e}.gate_proj.weight"] = random(WIDTH, H)
        tensors[f"experts.{e}.up_proj.weight"] = random(WIDTH, H)
        tensors[f"experts.{e}.down_proj.weight"] = random(H, WIDTH)
    save_file(tensors, tmp_path / SINGLE_FILE)
    return tmp_path


@pytest.fixture
def progress() -> list[int]:
    return []


@pytest.fixture
def reader(folder: Path, progress: list[int]) -> Iterator[WeightReader]:
    checkpoint = Checkpoint.open(folder)
    with WeightReader(
        checkpoint, dtype=torch.float32, device=torch.device("cpu"), on_progress=progress.append
    ) as weights:
        yield weights


@pytest.fixture
def whole(folder: Path) -> dict[str, Tensor]:
    return {name: tensor.to(torch.float32) for name, tensor in load_file(folder / SINGLE_FILE).items()}


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (None, None),
        ([(2, 5)], None),
        (None, [(1, 3), (5, 7)]),
        ([(0, 1), (4, 6), (8, 9)], [(6, 7), (0, 2)]),
        ([], None),
        ([(3, 3)], [(0, 7)]),
    ],
)
def test_a_slice_read_gives_exactly_those_rows_and_columns(
    reader: WeightReader, whole: dict[str, Tensor], rows: Ranges | None, columns: Ranges | None
) -> None:
    row_ids = [i for start, stop in ([(0, 9)] if rows is None else rows) for i in range(start, stop)]
    column_ids = [i for start, stop in ([(0, 7)] if columns is None else columns) for i in range(start, stop)]
    read = reader.tensor("matrix", rows, columns)
    assert read.dtype == torch.float32 and read.is_contiguous()
    assert torch.equal(read, whole["matrix"][row_ids][:, column_ids])


def test_vectors_are_sliced_like_the_rows_of_their_matrix(reader: WeightReader, whole: dict[str, Tensor]) -> None:
    assert torch.equal(reader.tensor("vector", [(1, 2), (5, 8)]), whole["vector"][[1, 5, 6, 7]])


def test_stacked_tensors_lie_one_below_the_other(reader: WeightReader, whole: dict[str, Tensor]) -> None:
    assert torch.equal(reader.stacked(["matrix", "below"]), torch.cat((whole["matrix"], whole["below"])))
    assert torch.equal(
        reader.stacked(["matrix", "below"], [(1, 3)]), torch.cat((whole["matrix"][1:3], whole["below"][1:3]))
    )


def test_experts_are_ragged_with_their_gate_up_and_down_parts_in_place(
    reader: WeightReader, whole: dict[str, Tensor]
) -> None:
    experts = reader.experts("experts", SHARDS)
    assert experts.widths == (8, 0, 1) and experts.offsets.tolist() == [0, 8, 8, 9]
    assert experts.gate_up.shape == (18, H) and experts.down.shape == (9 * H,)
    for e, columns in ((0, [0, 1, 2, 3, 8, 9, 10, 11]), (1, []), (2, [4])):
        gate_up = experts.gate_up[2 * experts.offsets[e] : 2 * experts.offsets[e + 1]]
        parts = (whole[f"experts.{e}.gate_proj.weight"][columns], whole[f"experts.{e}.up_proj.weight"][columns])
        assert torch.equal(gate_up, torch.cat(parts))
        down = experts.down[H * experts.offsets[e] : H * experts.offsets[e + 1]].view(H, len(columns))
        assert torch.equal(down, whole[f"experts.{e}.down_proj.weight"][:, columns])


def test_progress_counts_the_bytes_of_the_file_and_weights_those_in_memory(
    reader: WeightReader, progress: list[int]
) -> None:
    reader.tensor("matrix")
    reader.tensor("matrix", [(0, 2)])
    reader.experts("experts", SHARDS)
    assert progress == sorted(progress)
    assert progress[-1] == 2 * (9 * 7 + 2 * 7 + 3 * 9 * H)
    assert reader.weight_bytes == 2 * progress[-1]  # bfloat16 in the file, float32 in memory


def test_an_unknown_name_is_a_key_error(reader: WeightReader) -> None:
    with pytest.raises(KeyError, match="nothing"):
        reader.tensor("nothing")
