"""How the code for bfloat16 on CPUs is compiled, kept and found again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from kernels import bf16_cpu

can_compile = pytest.mark.skipif(bf16_cpu.library() is None, reason="no g++, or no AVX512-BF16")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The file of this version's library in a home of its own, damaged."""
    library = bf16_cpu.library()
    assert library is not None
    monkeypatch.setenv("HOME", str(tmp_path))
    path = tmp_path / ".cache/lockstep" / Path(library._name).name
    path.parent.mkdir(parents=True, mode=0o700)
    path.touch(mode=0o600)
    return path


@can_compile
@pytest.mark.parametrize("whose", ["folder", "library"])
def test_code_that_somebody_else_could_have_put_there_is_not_run(
    kept: Path, caplog: pytest.LogCaptureFixture, whose: str
) -> None:
    (kept.parent if whose == "folder" else kept).chmod(0o777)
    assert bf16_cpu.library.__wrapped__() is None
    assert "nobody else may write to it" in caplog.text


@can_compile
def test_the_code_is_compiled_once_and_replaces_other_versions_and_what_cannot_be_loaded(
    kept: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kept.with_name("bf16-0.so").touch()
    umask = os.umask(0o002)  # the group may write to what is created
    try:
        assert bf16_cpu.library.__wrapped__() is not None
    finally:
        os.umask(umask)
    assert list(kept.parent.iterdir()) == [kept]
    monkeypatch.setenv("PATH", str(tmp_path))  # no compiler any more
    assert bf16_cpu.library.__wrapped__() is not None


@pytest.mark.parametrize(
    ("compiler", "home", "reason"),
    [("", ".", "no g++"), ("echo no such option >&2; exit 1", ".", "no such option"), ("", "g++", "Not a directory")],
)
def test_what_cannot_be_compiled_or_kept_is_done_without_after_a_warning(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    compiler: str,
    home: str,
    reason: str,
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    monkeypatch.setenv("HOME", str(tmp_path / home))
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "g++").write_text(f"#!/bin/sh\n{compiler}\n")
    (tmp_path / "g++").chmod(0o700 if reason != "no g++" else 0o600)
    assert bf16_cpu.library.__wrapped__() is None
    assert reason in caplog.text
