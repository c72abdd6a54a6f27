"""Each rank reads its part of each tensor, converted and laid out for the kernels, in as many bytes as planned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from kernels.fp8 import dequantize_blocks
from replica.checkpoint import SINGLE_FILE, Checkpoint
from replica.errors import CheckpointError
from replica.groups import Groups
from replica.layout import Layout, valid_layouts
from replica.linears import Fp8Linear, Linear, load_linear
from replica.model_config import ModelConfig
from replica.shards import Ranges, Shards, weight_bytes
from replica.tensor_specs import tensor_specs
from replica.weights import WeightReader
from tests.checkpoints import Variant, write_checkpoint, write_fp8_checkpoint
from tests.step_driver import CPU, RankModel

CONFIG: Final[dict[str, Any]] = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "mlp_only_layers": [1],
    "intermediate_size": 200,  # a partial last block in bf16 and FP8
    "moe_intermediate_size": 384,
    "num_experts": 5,
    "num_experts_per_tok": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 48,  # boundaries between heads fall within blocks of 128
    "attention_bias": True,
}
LAYOUT: Final = Layout.resolve(dp=2, mlp_tp=4, moe_tp=2, ep=2)
DTYPES: Final = {"bfloat16": torch.bfloat16, "fp8": torch.bfloat16, "float32": torch.float32}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    plain = write_checkpoint(tmp_path_factory.mktemp("plain"), Variant(CONFIG, dtype=torch.bfloat16))
    return {
        "bfloat16": plain,
        "float32": plain,
        "fp8": write_fp8_checkpoint(tmp_path_factory.mktemp("fp8"), plain),
    }


@pytest.fixture(scope="module", params=["bfloat16", "fp8", "float32"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class OneRank:
    """One rank's reader, beside the tensors of the whole file."""

    def __init__(self, folder: Path, rank: int, dtype: torch.dtype) -> None:
        self.config = ModelConfig.load(folder)
        self.shards = Shards(self.config, LAYOUT, rank)
        self.whole = load_file(folder / SINGLE_FILE)
        self.progress: list[tuple[int, int]] = []
        self.reader = WeightReader(
            Checkpoint.open(folder),
            self.shards,
            dtype=dtype,
            device=CPU,
            on_progress=lambda *progress: self.progress.append(progress),
        )

    def values(self, name: str) -> Tensor:
        """A whole weight in float32, without scales."""
        tensor = self.whole[name]
        if tensor.dtype == torch.float8_e4m3fn:
            return dequantize_blocks(tensor, self.whole[f"{name}_scale_inv"])
        return tensor.to(torch.float32)


@pytest.fixture(params=range(LAYOUT.world))
def one_rank(request: pytest.FixtureRequest, folders: dict[str, Path], kind: str) -> Iterator[OneRank]:
    one_rank = OneRank(folders[kind], request.param, DTYPES[kind])
    with one_rank.reader:
        yield one_rank


def taken(ranges: Ranges) -> list[int]:
    return [i for start, stop in ranges for i in range(start, stop)]


def test_each_tensor_is_the_rows_and_columns_of_its_shard(one_rank: OneRank) -> None:
    for name, whole in one_rank.whole.items():
        part, read = one_rank.reader.shard(name), one_rank.reader.tensor(name)
        expected = whole.to(torch.float32)[taken(part.rows)]
        if part.columns is not None:
            expected = expected[:, taken(part.columns)]
        assert read.is_contiguous() and read.shape == part.shape
        num_rows = read.shape[0] - part.num_padding_rows
        assert torch.equal(read[:num_rows].to(torch.float32), expected)
        assert not read[num_rows:].to(torch.float32).any()
        if read.dtype in (torch.float8_e4m3fn, torch.bfloat16):
            assert read.dtype == whole.dtype


def test_the_vocabulary_is_cut_in_equal_parts_with_the_padding_on_the_last_rank(one_rank: OneRank) -> None:
    embedding = one_rank.reader.tensor("model.embed_tokens.weight")
    local_rank = LAYOUT.local_rank(one_rank.shards.rank)
    assert embedding.shape[0] == 106  # of 211
    assert bool(embedding[-1].to(torch.float32).any()) == (local_rank == 0)


def test_experts_are_ragged_with_their_gate_up_and_down_parts_in_place(one_rank: OneRank) -> None:
    prefix = "model.layers.0.mlp.experts"
    experts = one_rank.reader.experts(prefix, 0)
    hidden, offset = one_rank.config.hidden_size, 0
    gate_up_values, down_values = expert_values(experts.gate_up, experts.gate_up_scale), None
    for expert, shard in enumerate(one_rank.shards.experts(0)):
        columns = taken(shard)
        width = len(columns)
        assert experts.widths[expert] == width and experts.offsets[expert] == offset
        parts = [one_rank.values(f"{prefix}.{expert}.{part}_proj.weight")[columns] for part in ("gate", "up")]
        assert torch.equal(gate_up_values[2 * offset : 2 * (offset + width)], torch.cat(parts))
        down_values = experts.down[hidden * offset : hidden * (offset + width)].view(hidden, width)
        scale = experts.down_scale
        if scale is not None:
            scale = scale[hidden * offset // 128**2 : hidden * (offset + width) // 128**2].view(hidden // 128, -1)
        whole = one_rank.values(f"{prefix}.{expert}.down_proj.weight")
        assert torch.equal(expert_values(down_values, scale), whole[:, columns])
        offset += width
    assert experts.offsets[-1] == offset


def expert_values(weight: Tensor, scale: Tensor | None) -> Tensor:
    return weight.to(torch.float32) if scale is None else dequantize_blocks(weight, scale)


def test_progress_ends_with_all_the_bytes_that_the_rank_reads(folders: dict[str, Path], kind: str) -> None:
    one_rank = OneRank(folders[kind], 1, DTYPES[kind])
    with one_rank.reader:
        for name in one_rank.whole:
            if ".experts." not in name:
                one_rank.reader.tensor(name)
        one_rank.reader.experts("model.layers.0.mlp.experts", 0)
    done = [done for done, _ in one_rank.progress]
    assert done == sorted(done) and done[-1] == one_rank.progress[-1][1]
    assert done[-1] < sum(tensor.nbytes for tensor in one_rank.whole.values())


def test_every_rank_of_every_layout_loads_as_many_bytes_as_the_plan_says(folders: dict[str, Path], kind: str) -> None:
    config, dtype = ModelConfig.load(folders[kind]), DTYPES[kind]
    specs = tensor_specs(config, str(dtype).removeprefix("torch."))
    for world in (1, 2, 4, 6):
        for layout in list(valid_layouts(world, config))[::3]:
            planned = [sum(kinds.values()) for kinds in weight_bytes(config, layout, specs)]
            for rank in range(layout.world):
                model = RankModel(folders[kind], layout, rank, num_blocks=1, dtype=dtype)
                assert model.weight_bytes == planned[rank], f"rank {rank} of {layout.flags()}"


def test_fused_linears_compute_with_each_parts_own_rows_and_scales(one_rank: OneRank, kind: str) -> None:
    """q, k and v, whose heads of 48 begin and end within blocks; and gate and up, with a partial last block."""
    attention, mlp = "model.layers.0.self_attn", "model.layers.1.mlp"
    x = torch.randn((3, one_rank.config.hidden_size), generator=torch.Generator().manual_seed(0))
    for prefix, parts in ((attention, ("q_proj", "k_proj", "v_proj")), (mlp, ("gate_proj", "up_proj"))):
        names = [f"{prefix}.{part}" for part in parts]
        linear = load_linear(one_rank.reader, *names)
        assert isinstance(linear, Fp8Linear if kind == "fp8" else Linear)
        rows = [
            one_rank.values(f"{name}.weight")[taken(one_rank.reader.shard(f"{name}.weight").rows)] for name in names
        ]
        y = linear(x.to(DTYPES[kind])).to(torch.float32)
        expected = x @ torch.cat(rows).T
        # FP8 activations have 3 mantissa bits, bfloat16 has 7.
        tolerance = {"fp8": 0.03, "bfloat16": 0.01, "float32": 1e-5}[kind] * float(expected.norm())
        assert float((y - expected).norm()) <= tolerance


def test_linears_of_which_some_are_fp8_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = write_fp8_checkpoint(tmp_path, folders["bfloat16"], unconverted=("model.layers.0.self_attn.k_proj",))
    with pytest.raises(CheckpointError, match=r"some of model.layers.0.self_attn.q_proj.*all or none"):
        RankModel(folder, Layout(), 0, num_blocks=1, dtype=torch.bfloat16)


def test_an_unknown_name_is_a_key_error(one_rank: OneRank) -> None:
    with pytest.raises(KeyError, match="nothing"):
        one_rank.reader.tensor("nothing")


def test_a_rank_alone_holds_the_whole_model(folders: dict[str, Path]) -> None:
    model = RankModel(folders["bfloat16"], Layout(), 0, num_blocks=1, dtype=torch.bfloat16)
    assert model.weight_bytes == sum(t.nbytes for t in load_file(folders["bfloat16"] / SINGLE_FILE).values())
    assert Groups.alone().attention.size == 1
