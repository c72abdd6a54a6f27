"""The tables of tile sizes, and what the offline search writes into them."""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import triton

from kernels import configs, tune
from kernels.configs import ANY, ARCHS, DEFAULTS, Tile


@pytest.mark.parametrize("arch", ARCHS)
def test_every_bucket_of_every_kernel_has_a_tile(arch: str) -> None:
    for kernel, table in DEFAULTS.items():
        if arch in table:
            assert table[arch][-1][0] == ANY, kernel
            assert [most for most, _ in table[arch]] == sorted(most for most, _ in table[arch])


@pytest.mark.parametrize("suffix", ["", "_fp8"])
def test_both_products_of_the_experts_share_block_m(suffix: str) -> None:
    for arch in DEFAULTS[f"moe_down{suffix}"]:
        for tokens in (1, 256, 257, 2048, 2049, 1 << 20):
            bucket = configs.bucket_of(tokens)
            tiles = [configs.pick(f"moe_{name}{suffix}", arch, (), bucket) for name in ("gate_up", "down")]
            assert tiles[0].block_m == tiles[1].block_m


@pytest.mark.parametrize(("tokens", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (256, 256), (257, 512)])
def test_tokens_are_rounded_up_to_a_power_of_two(tokens: int, bucket: int) -> None:
    assert configs.bucket_of(tokens) == bucket


def test_a_measured_row_wins_up_to_its_own_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    measured, shape = Tile(16, 32, 0, 1, 1), (4, 2, 64)
    monkeypatch.setitem(configs.TUNED, ("attention_decode", "sm_90", shape), ((8, measured),))
    configs.pick.cache_clear()
    default = DEFAULTS["attention_decode"]["sm_90"][0][1]
    picked = [configs.pick("attention_decode", "sm_90", *key) for key in ((shape, 4), (shape, 16), ((4, 2, 32), 4))]
    configs.pick.cache_clear()
    assert picked == [measured, default, default]


def test_what_the_search_writes_reads_back_and_replaces_only_its_own_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, large = Tile(16, 64, 128, 4, 3, is_swapped=True), Tile(128, 128, 64, 8, 3, is_persistent=True)
    table = {
        ("moe_down", "sm_90", (128, 2048, 768, 8)): tune.merged(tune.merged(((8, large),), 2048, large), 8, small),
        ("linear_fp8", "gfx942", (5120, 2048)): ((1, small),),
    }
    path = tmp_path / "configs.py"
    source = Path(configs.__file__).read_text()
    path.write_text(source)
    tune.write(path, table)
    spec = importlib.util.spec_from_file_location("written_configs", path)
    assert spec is not None and spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "written_configs", written)  # where dataclasses look for it
    spec.loader.exec_module(written)
    assert repr(written.TUNED) == repr(dict(sorted(table.items())))
    tune.write(path, {})
    assert path.read_text() == source


def test_the_search_says_that_there_is_no_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune.torch.cuda, "is_available", lambda: False)
    assert tune.main([]) == 0
    assert capsys.readouterr().out == "kernels.tune: no GPU here, nothing was measured\n"


@pytest.mark.parametrize("kernel", ["moe_gate_up", "moe_down", "moe_gate_up_fp8", "moe_down_fp8", *tune.KERNELS[2:]])
def test_candidates_keep_what_the_kernels_assume(kernel: str) -> None:
    tiles = list(tune.candidates(kernel))
    assert len(tiles) == len(set(tiles)) > 5
    for tile in tiles:
        assert not (tile.is_swapped and tile.block_m > 16)
        if kernel.endswith("fp8"):
            assert tile.block_k == 128 and 128 % tile.block_n == 0
        if kernel == "moe_gate_up_fp8":
            assert tile.block_n == 128


ENTRY = ("attention_decode", "sm_90", (4, 2, 64))
SLOW, FAST, TOO_LARGE = Tile(16, 32, 0, 9, 1), Tile(16, 32, 0, 2, 1), Tile(16, 32, 0, 0, 1)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[Tile]:
    """A benchmark that takes num_warps milliseconds, and the tiles that it has seen. 0 warps do not fit."""
    seen = []

    def do_bench(run: Callable[[], None], **_: int) -> float:
        run()
        tile = configs.pick(*ENTRY, 8) if ENTRY in configs.TUNED else configs.pick("moe_down", "sm_90", (8,), 8)
        seen.append(tile)
        if tile == TOO_LARGE:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        return float(tile.num_warps)

    monkeypatch.setattr(triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(configs, "TUNED", {})
    monkeypatch.setattr(tune, "candidates", lambda kernel: iter([SLOW, TOO_LARGE, FAST]))
    configs.pick.cache_clear()
    return seen


def test_the_search_keeps_the_fastest_tile_that_fits(clock: list[Tile]) -> None:
    assert tune.search(ENTRY, lambda: None, math.inf) == (2.0, FAST)
    assert clock == [SLOW, TOO_LARGE, FAST]
    configs.pick.cache_clear()


def test_the_search_of_the_experts_gives_both_products_one_block_m(clock: list[Tile]) -> None:
    found = tune.search_moe("", "sm_90", (8,), lambda: None, math.inf)
    assert found == {("moe_gate_up", "sm_90", (8,)): (2.0, SLOW), ("moe_down", "sm_90", (8,)): (2.0, FAST)}
    configs.pick.cache_clear()


def test_a_search_that_meets_its_deadline_finds_nothing(clock: list[Tile]) -> None:
    assert tune.search(ENTRY, lambda: None, 0.0) is None
    assert tune.search_moe("", "sm_90", (8,), lambda: None, 0.0) is None
    assert clock == []


def test_fp8_on_an_architecture_without_it_is_refused() -> None:
    with pytest.raises(ValueError, match="linear_fp8 does not run on sm_80: FP8 needs one of sm_90, sm_100, gfx942"):
        configs.pick("linear_fp8", "sm_80", (1, 1), 1)
